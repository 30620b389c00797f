"""Steps from PyTorch's marks, against played programs whose steps are known."""

from __future__ import annotations

import gc
import random
import sys
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from types import BuiltinFunctionType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.capture.process.targets import TORCH
from argus.live.display.recent import LATE_CALLS, lateness_ms
from argus.live.job import Job as TracedJob
from argus.live.job import Member
from argus.model import records
from argus.model.calls import BY_SYMBOL, CALLS
from argus.model.groups import Membership
from argus.semantics.groups.communicators import COMMUNICATOR
from argus.semantics.groups.mesh import describe, find_mesh
from argus.semantics.phases.cpu import MARK, What
from argus.semantics.steps import by_marks
from argus.semantics.steps.by_calls import BY_COLLECTIVES, BY_MARKS, ITERATION
from argus.semantics.steps.by_marks import FIRST_ENDS, MarkedSteps
from argus.semantics.steps.marks import Marks
from argus.semantics.steps.range_names import Role

MS = 1_000_000
MAIN = 100
RANGES = {"data": Role.DATA, "fwd": Role.FORWARD, "opt": Role.OPTIMIZER, "zero": Role.ZERO_GRAD, "user": Role.NONE}
ALL_REDUCE = BY_SYMBOL["ncclAllReduce"].id
NOBODY: frozenset[int] = frozenset()

Program = Callable[[int], str]
Array = NDArray[np.void]


@dataclass
class Rank:
    marks: Array
    calls: Array
    launched: NDArray[np.int64]
    ends: dict[int, int]
    """Step of the program by the time of its true end, for steps seen as a whole and the one before them."""
    missing: dict[int, int] = field(default_factory=dict)
    """Calls of each communicator before Argus came."""


@dataclass
class Job:
    ranks: list[Rank]
    groups: Mapping[str, list[tuple[int, ...]]]

    def communicators(self, *, doubtful: Collection[int] = NOBODY) -> Array:
        """What is known of the communicators; those of some ranks could not be lined up."""
        rows = []
        for rank, seen in enumerate(self.ranks):
            for name, parts in self.groups.items():
                for part in parts:
                    if rank in part:
                        comm, error = handle(rank, name), "ambiguous" if rank in doubtful else ""
                        group = zlib.crc32(f"{name} {part}".encode())
                        rows.append((rank, comm, group, -1, len(part), seen.missing.get(comm, 0), "name", error))
        return np.array(rows, COMMUNICATOR)


def handle(rank: int, group: str) -> int:
    return 0x7F0000000000 + (rank << 20) + zlib.crc32(group.encode()) % 1000 * 64


def named(word: str) -> int:
    return 1 + zlib.crc32(word.encode())


def play(
    nranks: int,
    steps: int,
    program: Program | str,
    *,
    groups: Mapping[str, list[tuple[int, ...]]] | None = None,
    attached: Mapping[int, float] | None = None,
    lost: Collection[tuple[int, int, str]] = (),
    sizes: Mapping[str, int] | None = None,
    boundary: str = "",
    tid: int = MAIN,
    skew_ms: float = 0.4,
    seed: int = 0,
) -> Job:
    """Plays a program on all ranks: a string of words for each step, each of which takes 1 ms.

    A name of a group is a call of its communicator, ``launch`` a launch, ``bwd`` a backward pass; other words are
    ranges, with brackets where something is inside of them. A step ends with its last optimiser. Words with an @ are
    ranges that may be steps, those with @@ are called so.

    Args:
        nranks: Ranks.
        steps: Steps.
        program: Words of each step.
        groups: Ranks of each communicator by name; "dp" has all if there are none.
        attached: Time at which a rank is first seen, ms.
        lost: (rank, step, word): marks of this word that were lost, there.
        sizes: Bytes of a call, by group; 1,000,000 if there are none.
        boundary: A range with whose begin a step begins, instead of ending with an optimiser.
        tid: Main thread.
        skew_ms: How far ranks are apart.
        seed: Of the skews.
    """
    groups = {"dp": [tuple(range(nranks))]} if groups is None else groups
    rng = random.Random(seed)
    ranks = []
    for rank in range(nranks):
        marks, calls, launched, ends = [], [], [], {}
        count: dict[str, int] = dict.fromkeys(groups, 0)
        at = round(5000 * MS + rng.uniform(0, skew_ms) * MS)
        since = round(5000 * MS + (attached or {}).get(rank, 0) * MS)
        for step in range(steps):
            end, entered, whole, depth = 0, 0, False, 0
            for word in (program if isinstance(program, str) else program(step)).split():
                here = at + rng.randrange(MS // 10)
                at += MS
                name = word.strip("()")
                seen = here >= since and (rank, step, word) not in lost
                if name in groups:
                    if any(rank in part for part in groups[name]):
                        if seen:
                            calls.append((here, name, count[name]))
                        count[name] += 1
                elif name == "launch":
                    launched += [here] if seen else []
                elif "@" in name:
                    begin, finish = ")" not in word, "(" not in word
                    if name == boundary and begin and seen:
                        ends[here] = step - 1
                    if begin and seen:
                        marks.append((here, named(name), tid, What.STEP_BEGIN, "@@" in name, depth))
                    depth += begin
                    if finish and (not begin or seen):
                        marks.append((here + MS // 2, named(name), tid, What.STEP_END, "@@" in name, 0))
                    depth -= finish
                elif name == "bwd":
                    if seen:
                        marks.append((here, 0, tid, What.BACKWARD_BEGIN, 0, 0))
                    if "(" not in word and here + MS // 2 >= since:
                        marks.append((here + MS // 2, 0, tid, What.BACKWARD_END, 0, 0))
                else:
                    begin, finish = ")" not in word, "(" not in word
                    until = here + (MS // 2 if begin else 0)
                    if name == "opt" and begin:
                        entered = here
                    if begin and seen:
                        marks.append((here, 0, tid, What.RANGE_BEGIN, RANGES[name], 0))
                    if finish and until >= since and (rank, step, word) not in lost:
                        marks.append((until, 0, tid, What.RANGE_END, 0, 0))
                    if finish and name == "opt":
                        end, whole = until, entered >= since
            if end >= since and whole and not boundary:
                ends[end] = step
        rows = np.zeros(len(calls), records.COLLECTIVE)
        rows["call"] = ALL_REDUCE
        missing: dict[int, int] = {}
        for i, (ts, name, number) in enumerate(calls):
            comm = handle(rank, name)
            missing.setdefault(comm, number)
            rows[i]["ts_ns"], rows[i]["comm"], rows[i]["seq"] = ts, comm, number - missing[comm]
            rows[i]["count"] = (sizes or {}).get(name, 1_000_000)
        ranks.append(Rank(np.array(marks, MARK), rows, np.array(launched, np.int64), ends, missing))
    return Job(ranks, groups)


def between(rows: Array, low: int, high: int, delay: NDArray[np.int64] | int = 0) -> Array:
    times = rows["ts_ns"].astype(np.int64) + delay
    chosen: Array = rows[(times >= low) & (times < high)]
    return chosen


def find(
    job: Job,
    steps: MarkedSteps | None = None,
    *,
    edges: Collection[int] = (),
    settle: int = 0,
    ahead: Mapping[int, int] | None = None,
    final: bool = True,
    known: Array | None = None,
    seed: int = 0,
) -> Array:
    """Steps of a job that comes in pieces.

    Args:
        job: The job.
        steps: What looks at it.
        edges: Times between pieces.
        settle: Records come up to so much late, ns.
        ahead: By how much some ranks' records come too early, ns.
        final: Whether it has ended.
        known: Communicators, if not the true ones.
        seed: Of the delays.
    """
    steps = steps or MarkedSteps()
    rng = np.random.default_rng(seed)
    delays = [-(ahead or {}).get(i, 0) + rng.integers(0, settle + 1, len(r.calls)) for i, r in enumerate(job.ranks)]
    cuts = [0, *sorted(edges), 1 << 60]
    out = [np.empty(0, ITERATION)]
    for low, high in pairwise(cuts):
        for rank, seen in enumerate(job.ranks):
            early = (ahead or {}).get(rank, 0)
            steps.feed_marks(rank, between(seen.marks, low, high, -early))
            steps.feed_calls(rank, None, between(seen.calls, low, high, delays[rank]))
            steps.feed_calls(rank, seen.launched[(seen.launched - early >= low) & (seen.launched - early < high)], None)
        steps.align(job.communicators() if known is None else known)
        last = final and high == cuts[-1]
        if steps.ready(range(len(job.ranks)), final=last):
            out.append(steps.advance(high - settle - 1, final=last))
    found = np.concatenate(out)
    return found[np.lexsort((found["step"], found["rank"]))]


def of(found: Array, rank: int) -> Array:
    chosen: Array = found[found["rank"] == rank]
    return chosen


def ends_of(found: Array) -> list[int]:
    return (found["ts_ns"] + found["duration_ns"]).tolist()  # type: ignore[no-any-return]


def shift_of(job: Job, found: Array) -> int:
    """What the steps' numbers lack against the program's: the same on all ranks. Fails if a step ends where none does,
    or begins elsewhere than the one before ended."""
    assert found.dtype == ITERATION
    shifts: set[int] = set()
    for rank, seen in enumerate(job.ranks):
        own = of(found, rank)
        ends = ends_of(own)
        assert set(ends) <= seen.ends.keys(), "a step ends between the true ones"
        assert own["ts_ns"][1:].tolist() == ends[:-1], "steps are contiguous"
        assert not len(own) or int(own["ts_ns"][0]) in seen.ends
        shifts |= {seen.ends[end] - step for end, step in zip(ends, own["step"].tolist(), strict=True)}
    assert len(shifts) == 1, "ranks number one step differently"
    return shifts.pop()


def steps_of(job: Job, found: Array) -> list[list[int]]:
    """Of each rank, the program's steps that were found."""
    return [[seen.ends[end] for end in ends_of(of(found, rank))] for rank, seen in enumerate(job.ranks)]


DDP = "data fwd launch launch bwd dp dp opt"


# ---- usual programs


def test_every_step_of_a_usual_program_is_exact_from_the_second_on() -> None:
    job = play(4, 20, DDP)
    found = find(job)
    assert shift_of(job, found) == 1
    assert steps_of(job, found) == [list(range(1, 20))] * 4
    assert set(found["confidence"]) == {1.0}
    assert set(found["method"]) == {BY_MARKS}
    assert set(found["collectives"]) == {2}
    assert set(found["launches"]) == {2}


def test_calls_count_for_the_step_in_which_they_were_made_whatever_their_order() -> None:
    job = play(2, 12, lambda step: "data launch fwd bwd " + "dp " * (1 + step % 3) + "launch " * step + "opt")
    for rank in job.ranks:
        rank.launched = rank.launched[::-1].copy()  # as rings of several CPUs may deliver them
        rank.calls = rank.calls[::-1].copy()
    found = find(job)
    steps = found["step"].astype(int) + shift_of(job, found)
    assert found["collectives"].tolist() == (1 + steps % 3).tolist()
    assert found["launches"].tolist() == (1 + steps).tolist()


@pytest.mark.parametrize("rest", ["", "data fwd bwd "])
def test_gradient_accumulation_has_a_step_an_optimiser(rest: str) -> None:
    job = play(2, 12, f"data fwd bwd data fwd bwd {rest}dp opt zero")
    found = find(job)
    assert shift_of(job, found) == 1
    assert steps_of(job, found) == [list(range(1, 12))] * 2
    assert set(found["confidence"]) == {1.0}


def test_two_optimisers_that_take_turns_on_one_batch_are_one_step() -> None:
    def program(step: int) -> str:
        # One batch has no use for the first of them.
        return "data fwd bwd dp fwd bwd dp opt" if step == 12 else "data fwd bwd dp opt fwd bwd dp opt"

    job = play(2, 30, program)
    found = find(job)
    shift_of(job, found)
    assert steps_of(job, found) == [list(range(1, 30))] * 2
    assert set(found["confidence"]) == {1.0}


def test_the_second_of_two_optimisers_may_have_the_batch_s_mark_behind_a_backward_pass() -> None:
    """A penalty's gradient is computed before the next batch is loaded."""
    job = play(1, 30, "bwd data fwd bwd opt fwd bwd opt", groups={})
    found = find(job)
    shift_of(job, found)
    assert steps_of(job, found)[0] == list(range(1, 30))


def test_two_optimisers_without_a_loader_are_two_steps() -> None:
    found = find(play(2, 15, "fwd bwd dp opt fwd bwd dp opt"))
    for rank in range(2):
        assert of(found, rank)["step"].tolist() == list(range(29))
        assert set(np.round(of(found, rank)["duration_ns"] / MS)) == {4}


def test_two_optimisers_one_after_another_are_one_step() -> None:
    job = play(2, 12, "fwd bwd dp opt opt zero")
    assert steps_of(job, find(job)) == [list(range(1, 12))] * 2


def test_optimisers_in_one_another_and_in_the_user_s_ranges_are_one() -> None:
    job = play(2, 12, "user( data fwd bwd dp opt( user opt( zero opt) opt) user)")
    for rank in job.ranks:  # the outer one ends last
        assert len(rank.ends) == 12
    assert steps_of(job, find(job)) == [list(range(1, 12))] * 2


def test_optimisers_inside_of_the_backward_pass_are_one_step() -> None:
    job = play(2, 12, "data fwd bwd( dp opt dp opt dp opt")
    found = find(job)
    assert steps_of(job, found) == [list(range(1, 12))] * 2
    assert set(found["collectives"]) == {3}
    assert set(found["confidence"]) == {1.0}


@pytest.mark.parametrize("first", [0, 7, 12, 40])
def test_an_evaluation_with_a_loader_of_its_own_is_no_step(first: int) -> None:
    def program(step: int) -> str:
        return "fwd bwd dp opt" + " data fwd data fwd dp data" * (step % 50 == first)

    job = play(2, 120, program)
    for found in (find(job), find(job, edges=range(5000 * MS, 5600 * MS, 2 * MS), settle=MS)):
        assert shift_of(job, found) == 1
        assert steps_of(job, found) == [list(range(1, 120))] * 2
        assert set(found["confidence"]) == {1.0}


def test_calls_that_are_not_in_every_step_do_not_matter() -> None:
    def program(step: int) -> str:
        return "data fwd bwd dp dp opt" + " dp dp dp" * (step % 50 == 7) + " other" * (step % 10 == 3)

    job = play(3, 120, program, groups={"dp": [(0, 1, 2)], "other": [(0, 1, 2)]}, attached={1: 203.3, 2: 10.1})
    found = find(job)
    shift_of(job, found)
    assert [len(steps) for steps in steps_of(job, found)] == [119, 86, 118]
    assert set(found["confidence"]) == {1.0}


def test_a_process_of_its_own_that_calls_nothing_has_steps() -> None:
    job = play(1, 10, "data fwd bwd opt", groups={})
    found = find(job)
    assert shift_of(job, found) == 1
    assert steps_of(job, found) == [list(range(1, 10))]
    assert not found["collectives"].any()


def test_a_skipped_optimiser_makes_one_long_step_of_two_on_all_ranks() -> None:
    def program(step: int) -> str:
        return "data fwd bwd dp" if step == 10 else DDP  # gradients were not finite

    job = play(3, 20, program)
    found = find(job)
    assert steps_of(job, found) == [[*range(1, 10), *range(11, 20)]] * 3
    for rank in range(3):
        own = of(found, rank)
        assert own["step"].tolist() == list(range(18))
        assert own["confidence"].tolist() == [1.0] * 9 + [0.5] + [1.0] * 8


@pytest.mark.parametrize("counts", [(1, 2, 3, 4, 5), (2, 3)])
def test_where_micro_batches_vary_their_number_is_nothing_odd(counts: tuple[int, ...]) -> None:
    drawn = random.Random(3)
    job = play(2, 200, lambda step: "data fwd bwd " * drawn.choice(counts) + "dp opt")
    drawn.seed(3)
    found = find(job)
    assert steps_of(job, found) == [list(range(1, 200))] * 2
    assert (found["confidence"][found["step"] >= by_marks.USUAL] == 1.0).all()


# ---- ranks that see different things


@pytest.mark.parametrize(
    "attached",
    [
        {0: 100.2, 1: 3.2},
        {0: 3.2, 1: 100.2, 2: 55.7},
        {0: 44.4, 1: 45.6, 2: 46.7, 3: 47.8},
        {0: 43.2, 1: 40.2},
        {0: 47.7, 1: 46.2},
        {0: 47.2, 1: 48.9},
        {3: 47.7},
    ],
)
def test_ranks_seen_from_different_times_number_a_step_alike(attached: dict[int, float]) -> None:
    job = play(4, 30, DDP, attached=attached)
    pieces = find(job, edges=range(5000 * MS, 5240 * MS, 3 * MS), settle=MS)
    for found in (find(job), pieces):
        # Nothing is reported of what came before the first rank that was numbered.
        begin = shift_of(job, found)
        assert steps_of(job, found) == [
            [step for step in list(rank.ends.values())[1:] if step >= begin] for rank in job.ranks
        ]
        assert set(found["confidence"]) == {1.0}


def test_a_rank_that_comes_when_the_others_are_numbered_finds_its_place() -> None:
    for late in (101.2, 103.5, 104.6, 105.5, 107.1):
        job = play(3, 40, DDP, attached={1: late})
        steps, out = MarkedSteps(), [np.empty(0, ITERATION)]
        for low in range(5000 * MS, 5340 * MS, 4 * MS):
            there = [0, 2] if low < 5104 * MS else [0, 1, 2]
            for rank in there:
                steps.feed_marks(rank, between(job.ranks[rank].marks, low, low + 4 * MS))
                steps.feed_calls(rank, None, between(job.ranks[rank].calls, low, low + 4 * MS))
            known = job.communicators()
            steps.align(known if low > 5130 * MS else known[known["rank"] != 1])
            if steps.ready(there):
                out.append(steps.advance(low + 4 * MS - 1))
        found = np.concatenate(out)
        assert shift_of(job, found) == 1
        assert set(found["confidence"]) == {1.0}


@pytest.mark.parametrize("victim", range(3))
@pytest.mark.parametrize("pieces", [False, True])
def test_a_lost_mark_leaves_one_long_step_and_the_numbers_right(victim: int, pieces: bool) -> None:
    job = play(3, 40, DDP, lost={(victim, 20, "opt")})
    edges = range(5000 * MS, 5330 * MS, 5 * MS) if pieces else ()
    found = find(job, edges=edges, settle=MS)
    assert shift_of(job, found) == 1
    steps = list(range(1, 40))
    assert steps_of(job, found) == [[s for s in steps if rank != victim or s != 20] for rank in range(3)]
    for row in found:
        long = row["duration_ns"] > 12 * MS
        assert long == (row["rank"] == victim and row["step"] == 20)
        assert row["confidence"] == (0.5 if long else 1.0)


@pytest.mark.parametrize("victim", range(3))
@pytest.mark.parametrize("attached", [{}, {0: 91.9}])
def test_a_mark_lost_beside_an_evaluation_leaves_the_numbers_right(victim: int, attached: dict[int, float]) -> None:
    def program(step: int) -> str:
        return "fwd bwd dp opt" + " data fwd dp" * (step % 18 == 5)

    for seed in range(4):
        job = play(3, 50, program, attached=attached, lost={(victim, 41, "opt")}, seed=seed)
        found = find(job)
        shift_of(job, found)
        assert [41 in steps for steps in steps_of(job, found)] == [rank != victim for rank in range(3)]


@pytest.mark.parametrize("victim", range(2))
def test_a_step_whose_marks_are_all_lost_leaves_the_numbers_right(victim: int) -> None:
    job = play(2, 40, DDP, lost={(victim, 20, word) for word in ("data", "fwd", "bwd", "opt")})
    found = find(job)
    assert shift_of(job, found) == 1
    assert steps_of(job, found)[1 - victim] == list(range(1, 40))
    own = of(found, victim)
    assert own["confidence"][own["duration_ns"] > 12 * MS].tolist() == [0.5]


def test_an_optimiser_that_one_rank_alone_has_makes_no_step_of_its_own() -> None:
    job = play(2, 30, "fwd bwd dp opt")
    extra = play(1, 30, lambda step: "fwd bwd dp opt" + " bwd opt" * (step == 12), groups={"dp": [(0, 1)]})
    job.ranks[1] = extra.ranks[0]
    job.ranks[1].calls["comm"] = handle(1, "dp")
    found = find(job)
    own = of(found, 1)
    numbers = {row["step"]: row["duration_ns"] for row in own}
    assert sorted(numbers) == list(range(29)), "equal numbers for equal steps, to the end"
    assert of(found, 0)["step"].tolist() == list(range(29))
    assert own["confidence"][own["duration_ns"] > 5 * MS].tolist() == [0.5]


GRID: dict[str, list[tuple[int, ...]]] = {"tp": [(0, 1), (2, 3)], "dp": [(0, 2), (1, 3)]}


def test_ranks_that_share_groups_of_two_only_agree() -> None:
    job = play(4, 30, "data fwd tp tp bwd tp tp dp opt", groups=GRID, attached={0: 50.5, 1: 3.3, 3: 87.7})
    found = find(job)
    shift_of(job, found)
    assert all(steps_of(job, found))


@pytest.mark.parametrize("links", [[(0, 3), (1, 2), (2, 3)], [(0, 4), (1, 2), (2, 3), (3, 4)]])
def test_a_chain_of_groups_is_followed_to_its_end_even_at_the_last_moment(links: list[tuple[int, int]]) -> None:
    nranks = 1 + max(max(link) for link in links)
    groups: dict[str, list[tuple[int, ...]]] = {f"g{i}": [link] for i, link in enumerate(links)}
    words = " ".join(groups)
    job = play(nranks, 12, f"fwd bwd {words} opt", groups=groups, attached={1: 14.2, 2: 25.2, 3: 8.2})
    steps = MarkedSteps()
    shift_of(job, find(job, steps))
    assert not steps.counters["families_joined_by_time"]


def test_ranks_without_a_common_group_are_put_together_by_time() -> None:
    apart: dict[str, list[tuple[int, ...]]] = {"dp": [(0, 1), (2, 3)]}
    job = play(4, 40, DDP, groups=apart, attached={2: 41.2, 3: 43.2})
    steps = MarkedSteps()
    found = find(job, steps)
    assert shift_of(job, found) == 1
    assert steps.counters["families_joined_by_time"] == 1
    # While the job runs, calls in common are waited for: a while.
    job = play(4, 40 + by_marks.PENDING, DDP, groups=apart, attached={2: 41.2, 3: 43.2})
    steps = MarkedSteps()
    edge = 5000 * MS + 300 * MS
    assert set(find(job, steps, edges=[edge], final=False)["rank"].tolist()) == {0, 1, 2, 3}
    assert steps.counters["families_joined_by_time"] == 1


def test_families_are_put_together_by_time_though_the_first_has_had_hundreds_of_steps_since() -> None:
    apart: dict[str, list[tuple[int, ...]]] = {"dp": [(0, 1), (2, 3)]}
    job = play(4, 400, "fwd bwd dp opt", groups=apart)
    assert shift_of(job, find(job)) == 1


def test_single_processes_are_put_together_by_time() -> None:
    job = play(3, 40, "fwd bwd opt", groups={}, attached={1: 31.1, 2: 6.1})
    steps = MarkedSteps()
    assert shift_of(job, find(job, steps)) == 1
    assert steps.counters["families_joined_by_time"] == 2


def test_a_rank_that_calls_nothing_is_given_a_few_steps_before_it_is_put_in_by_time() -> None:
    job = play(2, 20, "fwd bwd opt", groups={})
    ends = sorted(job.ranks[1].ends)
    steps = MarkedSteps()
    steps.feed_marks(0, job.ranks[0].marks)
    assert steps.ready([0])
    steps.advance(1 << 60)
    steps.feed_marks(1, between(job.ranks[1].marks, 0, ends[FIRST_ENDS - 1] + 1))
    assert not len(steps.advance(1 << 60))
    steps.feed_marks(1, between(job.ranks[1].marks, ends[FIRST_ENDS - 1] + 1, 1 << 60))
    assert set(steps.advance(1 << 60)["rank"].tolist()) == {1}


def test_communicators_that_nobody_has_looked_at_are_waited_for() -> None:
    job = play(2, 20, DDP)
    steps = MarkedSteps()
    nothing = np.empty(0, COMMUNICATOR)
    assert not len(find(job, steps, known=nothing, final=False))
    steps.align(job.communicators())
    found = steps.advance(1 << 60)
    assert shift_of(job, found) == 1


def test_communicators_in_doubt_are_waited_for_but_not_for_ever() -> None:
    job = play(2, 50 + by_marks.PENDING, DDP)
    doubtful = job.communicators(doubtful={0, 1})
    early, late = 5000 * MS + 20 * 8 * MS, 5000 * MS + (20 + by_marks.PENDING) * 8 * MS
    steps = MarkedSteps()
    for rank, seen in enumerate(job.ranks):
        steps.feed_marks(rank, between(seen.marks, 0, early))
        steps.feed_calls(rank, None, between(seen.calls, 0, early))
    steps.align(doubtful)
    assert steps.ready(range(2))
    assert not len(steps.advance(early))
    for rank, seen in enumerate(job.ranks):
        steps.feed_marks(rank, between(seen.marks, early, late))
        steps.feed_calls(rank, None, between(seen.calls, early, late))
    found = steps.advance(late)
    assert set(found["rank"]) == {0, 1}
    assert shift_of(job, found) == 1
    assert steps.counters["families_joined_by_time"] == 1


def test_a_rank_in_doubt_is_no_hindrance_to_the_others() -> None:
    job = play(3, 20, DDP)
    found = find(job, known=job.communicators(doubtful={1}), final=False)
    assert set(found["rank"].tolist()) == {0, 2}


def test_numbers_stay_right_when_the_calls_are_lined_up_anew() -> None:
    """A rank that came later may have seen earlier calls: all offsets grow."""

    def program(step: int) -> str:
        return "fwd bwd dp opt" + " rare" * (step % 20 == 9)

    groups: dict[str, list[tuple[int, ...]]] = {"dp": [(0, 1, 2)], "rare": [(0, 1, 2)]}
    job = play(3, 80, program, groups=groups, skew_ms=3.9)
    known = job.communicators()
    for moved in (1, 2, 5):
        steps, out = MarkedSteps(), [np.empty(0, ITERATION)]
        for low in range(5000 * MS, 5340 * MS, 3 * MS):
            for rank, seen in enumerate(job.ranks):
                steps.feed_marks(rank, between(seen.marks, low, low + 3 * MS))
                steps.feed_calls(rank, None, between(seen.calls, low, low + 3 * MS))
            now = known.copy()
            now["seq_offset"] += moved if low > 5150 * MS else 0
            steps.align(now)
            if steps.ready(range(3)):
                out.append(steps.advance(low + 3 * MS - 1))
        found = np.concatenate(out)
        found = found[np.lexsort((found["step"], found["rank"]))]
        assert shift_of(job, found) == 1
        assert set(found["confidence"]) == {1.0}
        assert not steps.counters["steps_counted_anew"]


def test_steps_of_a_rank_that_was_lined_up_wrongly_are_counted() -> None:
    """Its calls were taken for those of the step before, and it goes on with the others' numbers."""
    job = play(3, 80, DDP)
    known = job.communicators()
    steps, out = MarkedSteps(), [np.empty(0, ITERATION)]
    wrong = known.copy()
    wrong["seq_offset"][wrong["rank"] == 2] -= DDP.split().count("dp")
    for low in range(5000 * MS, 5340 * MS, 3 * MS):
        for rank, seen in enumerate(job.ranks):
            steps.feed_marks(rank, between(seen.marks, low, low + 3 * MS))
            steps.feed_calls(rank, None, between(seen.calls, low, low + 3 * MS))
        steps.align(known if low > 5150 * MS else wrong)
        if steps.ready(range(3)):
            out.append(steps.advance(low + 3 * MS - 1))
    found = np.concatenate(out)
    own, theirs = found[found["rank"] == 2], found[found["rank"] == 0]
    ends = [part["ts_ns"] + part["duration_ns"] for part in (own, theirs)]
    nearest = np.abs(ends[0][:, None].astype(np.int64) - ends[1][None, :].astype(np.int64)).argmin(axis=1)
    differs = own["step"].astype(np.int64) != theirs["step"][nearest].astype(np.int64)
    assert differs.any()
    assert not differs[-20:].any()
    assert steps.counters["steps_counted_anew"] == differs.sum()


# ---- pieces


def programs() -> Iterator[tuple[str, Job]]:
    def uneven(step: int) -> str:
        return "data fwd bwd dp " + "data fwd bwd " * (step % 7 == 2) + "opt" + " dp" * (step % 11 == 3)

    yield "usual", play(4, 40, DDP, attached={0: 33.3, 2: 61.1})
    yield "two optimisers", play(2, 40, "data fwd bwd dp opt fwd bwd dp opt", attached={1: 37.7})
    yield "pairs", play(4, 40, "data fwd tp bwd tp dp opt", groups=GRID, attached={0: 20.2, 3: 61.1})
    yield "uneven", play(3, 40, uneven, attached={1: 44.4})
    yield "lost", play(3, 40, DDP, lost={(0, 15, "opt"), (2, 16, "opt"), (1, 20, "bwd")})
    yield "alone", play(1, 40, "fwd launch bwd opt", groups={})


@pytest.mark.parametrize("seed", range(3))
def test_steps_do_not_depend_on_the_pieces_in_which_they_come(seed: int) -> None:
    rng = random.Random(seed)
    for name, job in programs():
        last = 5000 * MS + 40 * 9 * MS
        edges = sorted(rng.sample(range(5000 * MS, last), rng.choice([3, 20, 90])))
        whole = find(job)
        pieces = find(job, edges=edges, settle=rng.choice([0, 2 * MS, 15 * MS]), seed=seed)
        assert len(whole), name
        assert whole.tolist() == pieces.tolist(), name


@pytest.mark.parametrize("first", range(2))
def test_a_rank_may_come_ten_steps_ahead_of_the_others(first: int) -> None:
    job = play(2, 40, DDP)
    edges = range(5000 * MS, 5330 * MS, 7 * MS)
    found = find(job, edges=edges, ahead={first: 80 * MS})
    assert found.tolist() == find(job).tolist()


def test_a_step_is_reported_once_its_calls_are_all_there() -> None:
    job = play(1, 10, "data fwd bwd dp opt", groups={"dp": [(0,)]})
    steps = MarkedSteps()
    steps.feed_marks(0, job.ranks[0].marks)
    steps.align(job.communicators())
    assert steps.ready([0])
    ends = sorted(job.ranks[0].ends)
    assert ends_of(steps.advance(ends[4] - 1)) == ends[1:4]
    assert ends_of(steps.advance(ends[4])) == [ends[4]]
    # The newest may be followed by another optimiser.
    assert ends_of(steps.advance(1 << 60)) == ends[5:9]
    assert ends_of(steps.advance(ends[6], final=True)) == [ends[9]], "nothing more will come"
    assert not len(steps.advance(1 << 60, final=True))


# ---- threads


def test_other_threads_marks_are_no_steps() -> None:
    job = play(1, 30, DDP, groups={"dp": [(0,)]})
    other = play(1, 9, "fwd bwd opt bwd opt", groups={}, tid=MAIN + 1, seed=1)
    loader = np.zeros(30, MARK)
    loader["ts_ns"], loader["tid"], loader["role"] = 5000 * MS + np.arange(30) * 7 * MS, 77, Role.DATA
    job.ranks[0].marks = np.sort(
        np.concatenate([job.ranks[0].marks, other.ranks[0].marks, loader]), order="ts_ns", kind="stable"
    )
    found = find(job)
    assert steps_of(job, found) == [list(range(1, 30))]


def test_a_second_thread_that_overtakes_the_main_one_makes_no_steps_that_run_backwards() -> None:
    one = play(1, 60, "zero fwd bwd opt", groups={}).ranks[0].marks
    two = play(1, 100, "bwd opt", groups={}, tid=MAIN + 1, seed=3).ranks[0].marks
    two["ts_ns"] += np.uint64(50 * MS)
    both = np.sort(np.concatenate([one, two]), order="ts_ns", kind="stable")
    steps, out = MarkedSteps(), [np.empty(0, ITERATION)]
    for low in range(5000 * MS, 5260 * MS, MS):
        steps.feed_marks(0, between(both, low, low + MS))
        if steps.ready([0]):
            out.append(steps.advance(low + MS - 1))
    found = np.concatenate(out)
    assert len(found) > 60
    assert (np.diff(found["step"].astype(int)) > 0).all()
    assert found["ts_ns"][1:].tolist() == ends_of(found)[:-1]
    assert (found["duration_ns"] < 10 * MS).all()


def test_threads_that_come_and_go_do_not_pile_up_nor_hide_the_main_one() -> None:
    job = play(1, 300, "data fwd bwd opt", groups={})
    marks = job.ranks[0].marks
    more = marks[marks["what"] == What.RANGE_BEGIN].copy()
    more["tid"] = 1000 + np.arange(len(more))
    job.ranks[0].marks = np.sort(np.concatenate([marks, more]), order="ts_ns", kind="stable")
    steps = MarkedSteps()
    assert steps_of(job, find(job, steps)) == [list(range(1, 300))]
    assert len(steps._ranks[0].threads) <= by_marks.THREADS


# ---- what it costs


class Rounds(MarkedSteps):
    """The same without an index: all ranks are tried in each round."""

    def _number_all(self, states: list[Any], final: bool) -> list[tuple[float, ...]]:
        rows, going = [], True
        while going:
            waiting = sum(len(state.ends) for state in states)
            for state in states:
                rows += self._number(state, final)
            going = sum(len(state.ends) for state in states) < waiting
            for state in [] if going else sorted(states, key=by_marks._turn):
                before = len(state.ends)
                rows += self._number(state, final, unsure=True)
                if len(state.ends) < before:
                    going = True
                    break
        return rows


def any_job(rng: random.Random) -> Job:
    """One with ranks that lack calls in common, ends that were lost, and steps that are not alike."""
    nranks, steps = rng.randrange(1, 6), rng.choice([12, 40, 90])
    groups: dict[str, list[tuple[int, ...]]] = {}
    for name in ["dp", "tp", "pp"][: rng.randrange(4)]:
        ranks = rng.sample(range(nranks), nranks)
        cut = rng.randrange(nranks + 1)
        groups[name] = [tuple(sorted(part)) for part in (ranks[:cut], ranks[cut:]) if part]
    words = " ".join(rng.choice(["fwd", "bwd", "launch", "data", *groups]) for _ in range(rng.randrange(2, 6)))
    vary, seed = rng.random(), rng.randrange(1 << 30)

    def program(step: int) -> str:
        of_step = random.Random(seed + step)
        more = " bwd" * of_step.randrange(4) if vary < 0.4 and of_step.random() < 0.4 else ""
        call = " " + of_step.choice(list(groups)) if vary < 0.6 and groups and of_step.random() < 0.2 else ""
        return f"fwd bwd {words}{more}{call} opt"

    lost = {
        (rng.randrange(nranks), rng.randrange(steps), rng.choice(["opt", "bwd"])) for _ in range(rng.choice([0, 9]))
    }
    attached = {rank: rng.uniform(0, 4 * steps) for rank in range(nranks) if rng.random() < 0.5}
    return play(nranks, steps, program, groups=groups, attached=attached, lost=lost, skew_ms=rng.choice([0.1, 8, 30]))


@pytest.mark.parametrize("most", [by_marks.MOST_ENDS, 7])
@pytest.mark.parametrize("seed", range(40))
def test_only_ranks_that_got_something_to_go_by_are_tried_again_and_steps_are_the_same(
    monkeypatch: pytest.MonkeyPatch, seed: int, most: int
) -> None:
    if most < by_marks.MOST_ENDS:
        monkeypatch.setattr(by_marks, "MOST_ENDS", most)
        monkeypatch.setattr(by_marks, "PENDING", 3)
    rng = random.Random(seed)
    job = any_job(rng)
    known = job.communicators(doubtful={rank for rank in range(len(job.ranks)) if rng.random() < 0.15})
    known["nranks"] += rng.random() < 0.3  # one that is not traced
    known["comm_group"] += np.arange(len(known), dtype=np.uint64) * np.uint64(1000 * (rng.random() < 0.3))
    edges = sorted(rng.sample(range(5000 * MS, 5400 * MS), rng.choice([0, 3, 20])))
    ahead = {rank: rng.randrange(200 * MS) for rank in range(len(job.ranks)) if rng.random() < 0.3}
    ways = MarkedSteps(), Rounds()
    found = [find(job, steps, edges=edges, ahead=ahead, known=known, final=seed % 4 > 0) for steps in ways]
    assert found[0].tolist() == found[1].tolist()
    assert +ways[0].counters == +ways[1].counters
    assert not ways[0].counters["step_ends_dropped"]


def alone_with_others(nranks: int, steps: int) -> tuple[Job, Array]:
    """Steps that all have another number of backward passes, and communicators of which the other member is not traced:
    no number is ever the same on two ranks."""

    def program(step: int) -> str:
        return "fwd" + " bwd" * (1 + step % 7) + " dp opt"

    job = play(nranks, steps, program)
    known = job.communicators()
    known["comm_group"] += np.arange(len(known), dtype=np.uint64)
    return job, known


def test_ends_that_nobody_can_number_surely_are_tried_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0
    number = MarkedSteps._number

    def counted(*args: Any, **named: Any) -> list[tuple[float, ...]]:
        nonlocal tries
        tries += 1
        return number(*args, **named)

    monkeypatch.setattr(MarkedSteps, "_number", counted)
    for nranks, steps in ((2, 60), (4, 120)):
        job, known = alone_with_others(nranks, steps)
        tries = 0
        assert len(find(job, known=known)) == nranks * (steps - 1)
        assert tries <= nranks * (steps + 2)


def test_of_many_ends_those_beyond_a_number_wait_for_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    job, known = alone_with_others(4, 100)
    whole = find(job, known=known, final=False)
    monkeypatch.setattr(by_marks, "MOST_ENDS", 50)
    monkeypatch.setattr(by_marks, "PENDING", 12)
    steps = MarkedSteps()
    out = [find(job, steps, known=known, final=False)]
    while len(out[-1]):
        assert len(out[-1]) <= 50
        out.append(steps.advance(1 << 60))
    found = np.concatenate(out)
    assert len(out) >= 8
    assert np.sort(found, order=["rank", "step"]).tolist() == whole.tolist()
    steps = MarkedSteps()
    assert find(job, steps, known=known).tolist() == find(job, Rounds(), known=known).tolist(), "at the end all"


def turns_of(nranks: int, rate: int, turns: int) -> Iterator[tuple[MarkedSteps, list[int]]]:
    """After each turn of a second, how many steps of each rank came of it. Ranks have no call in common."""
    steps = MarkedSteps()
    for turn in range(1, turns + 1):
        marks = np.zeros((rate, 3), MARK)
        marks["ts_ns"] = turn * 10**9 + np.arange(rate)[:, None] * (10**9 // rate) + [0, 1000, 2000]
        marks["tid"], marks["what"] = MAIN, [What.BACKWARD_BEGIN, What.RANGE_BEGIN, What.RANGE_END]
        marks["role"][:, 1] = Role.OPTIMIZER
        for rank in range(nranks):
            steps.feed_marks(rank, marks.ravel())
        assert steps.ready(range(nranks))
        found = steps.advance((turn + 1) * 10**9 - 1)
        yield steps, np.bincount(found["rank"], minlength=nranks).tolist()


def test_all_ranks_of_a_large_job_have_their_steps_in_every_turn() -> None:
    # The first end begins a step, and the newest is known by the next backward pass.
    assert [found for _, found in turns_of(128, 30, 3)] == [[28] * 128, [30] * 128, [30] * 128]


def test_where_ends_are_too_many_all_ranks_get_on_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_marks, "MOST_ENDS", 1000)
    for nranks, rate in ((8, 400), (5, 1000)):
        for steps, found in turns_of(nranks, rate, 4):
            ends = [state.last[1] for state in steps._ranks.values() if state.last]
            assert len(ends) == nranks
            assert max(ends) - min(ends) <= 1
            assert 1000 - nranks <= sum(found) <= 1000 + nranks


def test_ranks_that_wait_with_old_ends_do_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_marks, "MOST_ENDS", 10)
    monkeypatch.setattr(by_marks, "PENDING", 8)
    job = play(11, 100, "fwd bwd dp opt", groups={"dp": [(rank,) for rank in range(11)]})
    known = job.communicators()
    known = known[known["rank"] == 10]  # nobody has looked at those of the others
    steps = MarkedSteps()
    for rank, seen in enumerate(job.ranks):
        until = 5000 * MS + 4 * 7 * MS if rank < 10 else 1 << 60
        steps.feed_marks(rank, between(seen.marks, 0, until))
        steps.feed_calls(rank, None, between(seen.calls, 0, until))
    steps.align(known)
    assert steps.ready(range(11))
    found = [steps.advance(1 << 60)["rank"].tolist() for _ in range(6)]
    assert set().union(*found) == {10}
    assert sum(map(len, found)) > 90
    assert max(map(len, found)) <= 88


@pytest.mark.parametrize("seed", range(20))
def test_the_oldest_ends_of_all_ranks_are_numbered_first(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(by_marks, "PENDING", 4)
    monkeypatch.setattr(by_marks, "MOST_ENDS", 20)
    rng = random.Random(seed)
    states = [by_marks._Rank(rank) for rank in range(rng.randrange(1, 9))]
    for state in states:
        state.ends = sorted((rng.randrange(200), rng.randrange(3)) for _ in range(rng.randrange(30)))
    times = sorted(ts for state in states for ts, _ in state.ends)
    most = max(20, 4 * len(states))
    newest = times[most - 1] if len(times) > most else by_marks.EVER
    assert MarkedSteps._newest_of_oldest(states) == newest


def test_a_job_s_last_ends_are_numbered_a_bounded_number_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_marks, "MOST_ENDS", 700)
    ((steps, found),) = turns_of(10, 350, 1)
    numbers = [[] for _ in range(10)]
    times = 0
    while steps.waiting or not times:
        last = steps.advance(1 << 60, final=True)
        times += 1
        assert 0 < len(last) <= 701
        for row in last:
            numbers[row["rank"]].append(row["step"])
    assert times == 4
    assert steps.counters["step_ends_dropped"] == 0
    assert [len(of_rank) for of_rank in numbers] == [349 - each for each in found]
    assert all(np.all(np.diff(of_rank) == 1) for of_rank in numbers)


def test_all_ends_that_wait_may_be_dropped_and_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_marks, "MOST_ENDS", 100)
    ((steps, found),) = turns_of(10, 350, 1)
    by_marks.drop_ends(steps)
    # The newest end is known by the next backward pass; the first begins a step.
    assert steps.counters["step_ends_dropped"] == sum(348 - each for each in found)
    assert not len(steps.advance(1 << 60, final=True)) - 10
    unknown = MarkedSteps()
    job = play(1, 30, "fwd bwd opt", groups={})
    unknown.feed_marks(0, job.ranks[0].marks)
    by_marks.drop_ends(unknown)
    assert unknown.counters["step_ends_dropped"] == 29


def test_of_ranges_that_are_steps_the_begins_that_are_dropped_are_counted() -> None:
    job, steps = play(1, 300, "@@step", groups={}, boundary="@@step"), MarkedSteps()
    steps.feed_marks(0, job.ranks[0].marks)
    assert steps.ready([0])
    waiting = sum(len(each.begins) for each in steps._ranks[0].ranges().values())
    assert waiting > 200
    by_marks.drop_ends(steps)
    assert steps.counters["step_ends_dropped"] == waiting
    assert sum(len(each.begins) for each in steps._ranks[0].ranges().values()) == 0


@pytest.mark.parametrize("words", ["fwd bwd opt", "@step"])
def test_of_marks_that_are_kept_the_newest_stay(words: str) -> None:
    """However many threads and names there are."""
    job, steps = play(1, 3000, words, groups={}), MarkedSteps()
    for tid in range(40):
        marks = job.ranks[0].marks.copy()
        marks["tid"] = 100 + tid
        steps.feed_marks(0, marks)
    state = steps._ranks[0]

    def kept() -> list[list[int]]:
        ends = [[end.ts for end in thread.ends] for thread in state.threads.values()]
        return ends + [list(each.begins) for thread in state.threads.values() for each in thread.ranges.values()]

    before, real = kept(), bytes_of(state.threads)
    assert 0.6 * real < by_marks.kept_marks(steps, 0) < 1.6 * real
    most = by_marks.kept_marks(steps, 0) // 3
    by_marks.keep_marks(steps, 0, most)
    assert real // 6 < bytes_of(state.threads) <= 0.6 * real
    assert most // 2 < by_marks.kept_marks(steps, 0) <= most
    assert len(state.threads) == 40
    assert all(newest == all_[len(all_) - len(newest) :] for newest, all_ in zip(kept(), before, strict=True))
    gone = sum(map(len, before)) - sum(map(len, kept()))
    threads = state.threads.values()
    assert sum(each.dropped + sum(one.dropped for one in each.ranges.values()) for each in threads) == gone
    # Between counts it is never too little.
    steps.feed_marks(0, job.ranks[0].marks[:1000])
    assert by_marks.kept_marks(steps, 0) >= 0.6 * bytes_of(state.threads)


def test_names_and_threads_of_ranges_are_counted_and_go() -> None:
    """64 names on each of 64 threads, one range each: next to nothing is of their begins."""
    steps, number = MarkedSteps(), 64 * 64
    marks = np.zeros(number, MARK)
    marks["what"], marks["ts_ns"] = What.STEP_BEGIN, 1 + np.arange(number)
    marks["tid"], marks["handle"] = 1 + np.arange(number) // 64, 1 + np.arange(number) % 64
    for each in np.array_split(marks, 50):
        steps.feed_marks(0, each)
    state = steps._ranks[0]
    state.fed += by_marks.COUNTED_MARKS
    real = bytes_of(state.threads)
    assert real > 1_000_000
    assert real <= by_marks.kept_marks(steps, 0) < 2 * real
    for most in (real // 2, real // 8, 4000):
        by_marks.keep_marks(steps, 0, most)
        assert by_marks.kept_marks(steps, 0) <= most
        assert bytes_of(state.threads) < 1.2 * most + 4000
        assert state.structure == sum(thread.size for thread in state.threads.values())
    assert steps.counters["step_ends_dropped"] == 0, "none of these is called a step"
    assert state.main() is not None


def plain_keep(state: by_marks._Rank, most: int) -> tuple[dict[int, list[int]], dict[tuple[int, int], int]]:
    """Which names of each thread stay where a rank keeps so many bytes, and how many begins of those that go are not
    counted yet."""
    held = by_marks.END_BYTES * sum(len(each.ends) for each in state.threads.values())
    held += by_marks.BEGIN_BYTES * sum(
        len(one.begins) for each in state.threads.values() for one in each.ranges.values()
    )
    left, room = state.structure, max(most // 2, most - held)
    stay = {tid: dict.fromkeys(thread.ranges) for tid, thread in state.threads.items()}
    gone = {}
    order = sorted((one.is_step, one.seen, tid, n) for tid, of in state.threads.items() for n, one in of.ranges.items())
    for _, _, tid, name in order if left + held > most else ():
        if left <= room:
            break
        one = state.threads[tid].ranges[name]
        gone[tid, name] = len(one.begins) + one.dropped
        del stay[tid][name]
        left -= by_marks.RANGES_BYTES
    for tid, thread in sorted(state.threads.items(), key=lambda item: item[1].worth):
        if left + held <= most or left <= room:
            break
        if thread is not state.main() and not stay[tid]:
            left -= by_marks.THREAD_BYTES + by_marks.ROLE_BYTES * len(thread.roles)
            del stay[tid]
    return {tid: [*names] for tid, names in stay.items()}, gone


@pytest.mark.parametrize("seed", range(60))
def test_names_that_go_are_those_seen_least_and_only_steps_are_counted(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_marks, "KEPT_ENDS", 16)
    rng = np.random.default_rng(seed)
    steps, number = MarkedSteps(), int(rng.integers(100, 3000))
    marks = np.zeros(number, MARK)
    kinds = [What.STEP_BEGIN] * 4 + [What.RANGE_BEGIN, What.RANGE_END, What.BACKWARD_BEGIN]
    marks["what"], marks["ts_ns"] = rng.choice(kinds, number), 1 + np.arange(number)
    marks["tid"], marks["handle"] = rng.integers(1, 20, number), 1 + rng.geometric(0.1, number) % 40
    marks["role"] = np.where(marks["what"] == What.STEP_BEGIN, marks["handle"] % 2, Role.OPTIMIZER)
    marks["handle"] *= marks["what"] == What.STEP_BEGIN
    for each in np.array_split(marks, 5):
        steps.feed_marks(0, each)
    state, way = steps._ranks[0], seed % 3
    if way:
        steps._by_batch, steps._range = False, None if way == 1 else 7
    state.fed += by_marks.COUNTED_MARKS
    for share in (0.8, 0.5, 0.2):
        most = int(share * by_marks.kept_marks(steps, 0))
        before, shown = steps.counters["step_ends_dropped"], state.ranges()
        of = {(tid, name): one for tid, thread in state.threads.items() for name, one in thread.ranges.items()}
        stay, gone = plain_keep(state, most)
        by_marks.keep_marks(steps, 0, most)
        assert {tid: [*thread.ranges] for tid, thread in state.threads.items()} == stay
        steps_gone = [key for key in gone if (of[key].is_step, False, key[1] == 7)[way] and shown[key[1]] is of[key]]
        assert steps.counters["step_ends_dropped"] - before == sum(gone[key] for key in steps_gone)
        for thread in state.threads.values():
            assert thread.most == max((one.seen for one in thread.ranges.values()), default=0)
        assert state.structure == sum(thread.size for thread in state.threads.values())


def test_ranges_of_which_nothing_goes_are_not_gone_through() -> None:
    """64 names on each of 64 threads took 3 ms a rank: all was counted twice and copied."""
    steps, number = MarkedSteps(), 64 * 64
    marks = np.zeros(number, MARK)
    marks["what"], marks["ts_ns"] = What.STEP_BEGIN, 1 + np.arange(number)
    marks["tid"], marks["handle"] = 1 + np.arange(number) // 64, 1 + np.arange(number) % 64
    steps.feed_marks(0, marks)
    begins = {id(one.begins) for thread in steps._ranks[0].threads.values() for one in thread.ranges.values()}
    steps._ranks[0].fed += by_marks.COUNTED_MARKS
    by_marks.keep_marks(steps, 0, 7 * by_marks.kept_marks(steps, 0) // 8)
    left = [one for thread in steps._ranks[0].threads.values() for one in thread.ranges.values()]
    assert 3000 < len(left) < 4000
    assert {id(one.begins) for one in left} <= begins


def test_what_is_counted_of_threads_is_what_they_have() -> None:
    """Against counting all of them, whatever comes and goes."""
    rng = np.random.default_rng(3)
    steps = MarkedSteps()
    for turn in range(60):
        marks = np.zeros(int(rng.integers(1, 300)), MARK)
        marks["what"] = rng.choice([What.STEP_BEGIN, What.STEP_END, What.RANGE_BEGIN, What.RANGE_END], len(marks))
        marks["ts_ns"] = 1 + 1000 * turn + np.arange(len(marks))
        marks["tid"], marks["handle"] = rng.integers(1, 100, len(marks)), rng.integers(1, 100, len(marks))
        steps.feed_marks(0, marks)
        state = steps._ranks[0]
        assert state.structure == sum(thread.size for thread in state.threads.values())
        if turn % 20 == 19:
            by_marks.keep_marks(steps, 0, by_marks.kept_marks(steps, 0) // 2)
            assert state.structure == sum(thread.size for thread in state.threads.values())
    by_marks.forget_marks(steps)
    assert len(state.threads) == 1
    assert state.structure == sum(thread.size for thread in state.threads.values())


def test_ends_that_wait_are_bounded_and_those_beyond_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_marks, "MOST_ENDS", 5)
    monkeypatch.setattr(by_marks, "PENDING", 5)
    monkeypatch.setattr(by_marks, "KEPT_ENDS", 100)
    for words, boundary in (("fwd bwd opt", ""), ("@@step", "@@step")):
        job, steps, rows = play(1, 1000, words, groups={}, boundary=boundary), MarkedSteps(), 0
        edges = range(5000 * MS, 5000 * MS + 1000 * len(words.split()) * MS, 80 * MS)
        for low, high in pairwise([0, *edges, 1 << 60]):
            steps.feed_marks(0, between(job.ranks[0].marks, low, high))
            if steps.ready([0]):
                rows += len(steps.advance(high))
            state = steps._ranks[0]
            assert len(state.ends) <= 100
            assert all(len(thread.ends) <= 100 for thread in state.threads.values())
        rows += len(steps.advance(1 << 60, final=True))
        while steps.waiting:
            rows += len(steps.advance(1 << 60, final=True))
        assert steps.counters["step_ends_dropped"] > 0
        assert rows + 1 + steps.counters["step_ends_dropped"] == 1000


@pytest.mark.parametrize("seed", range(5))
def test_the_communicators_of_the_calls_that_are_kept_are_known(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Without looking through the calls at each end."""
    monkeypatch.setattr(by_marks, "KEPT_CALLS", 50)
    monkeypatch.setattr(by_marks, "KEPT_BEFORE", 8)
    rng = random.Random(seed)
    job, steps = any_job(rng), MarkedSteps()
    known = job.communicators()
    looked_at = known[[rng.random() < 0.8 for _ in known]]
    doubtful = [i for i in range(len(looked_at)) if rng.random() < 0.3]
    looked_at["error"][doubtful] = "ambiguous"
    rows = looked_at["rank"].tolist(), looked_at["comm"].astype(np.int64).tolist(), looked_at["error"].tolist()
    error_of = {(rank, comm): error for rank, comm, error in zip(*rows, strict=True)}
    for high in range(5000 * MS, 5300 * MS, 20 * MS):
        find(job, steps, known=looked_at, edges=[high], final=False)
        for rank, state in steps._ranks.items():
            comms = state.comms
            comms.look_up(rank, steps._groups, steps._doubtful)
            kept = dict(zip(*(each.tolist() for each in np.unique(state.comm, return_counts=True)), strict=True))
            assert comms.calls == kept
            assert comms.unknown == {comm for comm in kept if (rank, comm) not in error_of}
            assert comms.doubtful == {comm for comm in kept if error_of.get((rank, comm))}
            assert comms.aligned == kept.keys() - comms.unknown - comms.doubtful


def seldom_called(state: Any, ranges: Any) -> bool:
    """Whether a communicator that carries much is called in few of the ranges, all looked at by themselves."""
    begins = np.array(ranges.begins)
    within = np.searchsorted(begins, state.called, side="right") - 1
    inside = (within >= 0) & (within < len(begins) - 1)
    if len(state.called) and state.called[0] > begins[0]:
        inside &= within > np.searchsorted(begins, state.called[0])
    comm, nbytes, within = state.comm[inside], state.nbytes[inside], within[inside]
    nbytes = nbytes if nbytes.any() else np.ones_like(nbytes)
    return any(
        nbytes[comm == each].sum() >= by_marks.HEAVY * nbytes.sum()
        and len(set(within[comm == each])) < by_marks.CALLED_OFTEN * (within.max() - within.min() + 1)
        for each in set(comm.tolist())
    )


def test_communicators_that_carry_much_are_called_in_most_ranges_of_steps() -> None:
    rng = np.random.default_rng(3)
    answers = set()
    for _ in range(200):
        count, comms = rng.integers(1, 80), rng.integers(1, 12)
        ranges = by_marks._Ranges(True, 0)
        ranges.begins.extend(np.unique(rng.integers(0, 1000, rng.integers(2, 12))).tolist())
        state = by_marks._Rank(0)
        state.called = np.sort(rng.integers(0, 1000, count))
        state.comm = rng.integers(0, comms, count) - 5
        state.nbytes = rng.integers(0, 2, count) * rng.integers(0, 1 << 40, count)
        answers.add(by_marks._plausible(state, ranges))
        assert by_marks._plausible(state, ranges) is not seldom_called(state, ranges)
    assert answers == {True, False}


def test_of_many_communicators_those_that_carry_little_are_not_looked_through() -> None:
    looked_through = 0

    class Comms(np.ndarray):  # type: ignore[type-arg]
        def __eq__(self, other: object) -> Any:
            nonlocal looked_through
            looked_through += 1
            return np.asarray(self) == other

    ranges, state = by_marks._Ranges(True, 0), by_marks._Rank(0)
    ranges.begins.extend(range(0, 1100, 100))
    state.called = np.arange(1, 1001)
    state.comm = np.arange(1000).view(Comms)
    state.nbytes = np.ones(1000, np.int64)
    assert by_marks._plausible(state, ranges)
    assert looked_through <= 1 / by_marks.HEAVY


def test_threads_that_come_and_go_cost_the_same_however_many_names_others_have(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = 0

    class Ranges(by_marks._Ranges):
        def __getattribute__(self, name: str) -> Any:
            nonlocal looked_at
            looked_at += name == "seen"
            return super().__getattribute__(name)

    monkeypatch.setattr(by_marks, "_Ranges", Ranges)
    begins = np.zeros(by_marks.THREADS * by_marks.RANGES * 3, MARK)
    begins["what"], begins["ts_ns"] = What.STEP_BEGIN, np.arange(len(begins))
    begins["tid"] = np.arange(len(begins)) // (by_marks.RANGES * 3)
    begins["handle"] = 1 + np.arange(len(begins)) % by_marks.RANGES
    steps = MarkedSteps()
    steps.feed_marks(0, begins)
    others = begins[:1000].copy()
    others["tid"], others["handle"] = 1000 + np.arange(1000) % 2, 1
    looked_at = 0
    steps.feed_marks(0, others)
    assert looked_at <= 1000 * 10, "all names of all threads would be four million"


@pytest.mark.parametrize("seed", range(5))
def test_how_often_ranges_of_a_name_were_seen_is_known_of_each_thread(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_marks, "RANGES", 5)
    rng, thread = random.Random(seed), by_marks._Thread()
    for ts in range(1, 500):
        thread.take(ts, What.STEP_BEGIN, rng.random() < 0.3, rng.randrange(1, 12), 0)
        assert len(thread.ranges) <= 5
        assert thread.worth == (0, max(ranges.seen for ranges in thread.ranges.values()))
    thread.keep({3})
    assert thread.ranges.keys() <= {3}
    assert thread.worth == (0, max((ranges.seen for ranges in thread.ranges.values()), default=0))


# ---- what is kept


def test_what_is_kept_does_not_grow_with_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_marks, "KEPT_KEYS", 500)
    period, block = 8, 1000
    one = play(2, block, "user( data fwd launch bwd dp opt user)", skew_ms=0.1)
    steps = MarkedSteps()
    steps.align(one.communicators())
    reported_so_far, blocks = 0, 5
    for i in range(blocks):
        for rank, seen in enumerate(one.ranks):
            marks, calls = seen.marks.copy(), seen.calls.copy()
            marks["ts_ns"] += np.uint64(i * block * period * MS)
            calls["ts_ns"] += np.uint64(i * block * period * MS)
            calls["seq"] += np.uint64(i * block)
            steps.feed_marks(rank, marks)
            steps.feed_calls(rank, seen.launched + i * block * period * MS, calls)
        assert steps.ready(range(2))
        reported_so_far += len(steps.advance(1 << 60))
        for state in steps._ranks.values():
            thread = state.threads[MAIN]
            assert max(len(state.ends), len(thread.ends), len(thread.roles)) <= 2
            assert max(len(state.called), len(state.comm), len(state.seq), len(state.launched)) < 10_000
            assert len(state.bounds) <= 1024
            assert len(state.usual) <= by_marks.USUAL
        assert max(map(len, steps._numbers.values())) <= 500
    assert reported_so_far == 2 * (blocks * block - 2)


def test_communicators_that_are_gone_are_forgotten() -> None:
    steps = MarkedSteps()
    for i in range(20):
        job = play(2, 20, "fwd bwd dp opt", groups={"dp": [(0, 1)]})
        known = job.communicators()
        known["comm_group"] += np.uint64(i)
        for rank, seen in enumerate(job.ranks):
            marks, calls = seen.marks.copy(), seen.calls.copy()
            marks["ts_ns"] += np.uint64(i * 1000 * MS)
            calls["ts_ns"] += np.uint64(i * 1000 * MS)
            steps.feed_marks(rank, marks)
            steps.feed_calls(rank, None, calls)
        steps.align(known)
        assert steps.ready(range(2))
        steps.advance(1 << 60)
    assert len(steps._numbers) <= 2


def test_ends_that_nobody_asks_for_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_marks, "KEPT_CALLS", 300)
    steps = MarkedSteps()
    job = play(1, 5000, "bwd dp launch opt", groups={"dp": [(0,)]})
    steps.feed_marks(0, job.ranks[0].marks)
    steps.feed_calls(0, job.ranks[0].launched, job.ranks[0].calls)
    state = steps._ranks[0]
    assert len(state.threads[MAIN].ends) == by_marks.KEPT_ENDS
    assert len(state.called) == len(state.launched) == 300
    assert state.called[-1] == job.ranks[0].calls["ts_ns"][-1]


def test_marks_out_of_joint_do_no_harm() -> None:
    rng = random.Random(4)
    for _ in range(60):
        count = rng.randrange(1, 120)
        marks = np.zeros(count, MARK)
        marks["ts_ns"] = sorted(rng.sample(range(1, 10_000), count))
        marks["what"] = [rng.randrange(7) for _ in range(count)]
        marks["role"] = [rng.randrange(5) for _ in range(count)]
        marks["tid"] = [rng.randrange(2) for _ in range(count)]
        steps = MarkedSteps()
        steps.feed_marks(0, marks)
        if steps.ready([0], final=True):
            found = steps.advance(0, final=True)
            assert (np.diff(found["step"].astype(int)) > 0).all()
            assert found["ts_ns"][1:].tolist() == ends_of(found)[:-1]


# ---- whether they can be found, and whether they are


def test_steps_are_reported_once_every_rank_has_a_few() -> None:
    job = play(2, FIRST_ENDS + 1, DDP)
    last = sorted(job.ranks[1].ends)[FIRST_ENDS - 1]
    steps = MarkedSteps()
    steps.feed_marks(0, job.ranks[0].marks)
    assert not steps.ready([0, 1]), "of one nothing has come"
    steps.feed_marks(1, between(job.ranks[1].marks, 0, last + 1))
    assert not steps.ready([0, 1]), "its newest end may be followed by another optimiser"
    assert steps.ready([0])
    assert MarkedSteps().ready([]) is False
    assert not len(MarkedSteps().advance(1 << 60, final=True))


def member(rank: int, *, torch: bool = True) -> Member:
    target: Any = SimpleNamespace(has=lambda role: torch and role == TORCH[0], pid=rank, libraries=[])
    return Member(target, rank, "torchrun")


def traced(job: Job, marked: Collection[int], *, until: int = 1 << 60) -> TracedJob:
    """A job as tracing holds it, of whose ranks some have marks."""
    out = TracedJob("j", 1)
    for rank, seen in enumerate(job.ranks):
        out.members[rank] = member(rank, torch=rank in marked)
        calls = between(seen.calls, 0, until)
        out.members[rank].collectives = len(calls)
        launches = np.zeros(int((seen.launched < until).sum()), records.LAUNCH)
        launches["ts_ns"], launches["call"] = seen.launched[seen.launched < until], BY_SYMBOL["cudaLaunchKernel"].id
        launches["grid"], launches["block"] = 1, 1
        out.feed(out.members[rank], launches, None)
        out.feed(out.members[rank], None, calls)
        if rank in marked:
            marks = between(seen.marks, 0, until)
            out.feed_marks(out.members[rank], marks)
    out.tracker.align(job.communicators())
    out.marked.align(job.communicators())
    return out


def test_a_job_whose_ranks_all_have_marks_is_split_by_them() -> None:
    job = play(2, 40, DDP)
    whole = traced(job, {0, 1})
    found = whole.steps(1 << 60, final=True)
    assert whole.by_marks is True
    assert set(found["method"]) == {BY_MARKS}
    assert steps_of(job, found) == [list(range(1, 40))] * 2
    before = len(whole.tracker._ranks[0].calls)
    whole.feed(whole.members[0], None, job.ranks[0].calls)
    assert len(whole.tracker._ranks[0].calls) == before, "nobody will ask the tracker"


def test_a_job_with_a_rank_that_calls_and_has_no_marks_is_not() -> None:
    job = play(2, 120, DDP)
    half = traced(job, {0})
    found = half.steps(1 << 60, final=False)
    assert half.by_marks is False
    assert set(found["rank"]) == {0, 1}
    assert BY_MARKS not in found["method"]
    half.feed(half.members[0], None, job.ranks[0].calls)
    assert len(half.marked._ranks[0].called) == len(job.ranks[0].calls), "nobody will ask the marks"


@pytest.mark.parametrize(("micro_batches", "until"), [(16, 3 * 65), (60, 200)])
def test_calls_do_not_make_steps_where_the_optimiser_is_about_to(micro_batches: int, until: int) -> None:
    """Micro-batches that are all reduced repeat twenty times before there are enough steps, or any."""
    job = play(2, 8, "data fwd bwd dp " * micro_batches + "opt")
    early = traced(job, {0, 1}, until=(5000 + until) * MS)
    assert not len(early.steps(1 << 60, final=False))
    assert early.by_marks is None
    without = traced(job, set(), until=(5000 + until) * MS)
    assert len(without.steps(1 << 60, final=False)), "of the same calls alone"


def test_calls_make_steps_where_there_is_no_optimiser_or_no_more() -> None:
    job = play(2, 100, "data fwd bwd dp")
    for backwards, by_calls in ((by_marks.FIRST_BACKWARDS, False), (90, True)):
        some = traced(job, {0, 1}, until=(5000 + 4 * backwards) * MS)
        assert bool(len(some.steps(1 << 60, final=False))) is by_calls
    job = play(2, by_marks.MOST_BACKWARDS + 10, lambda step: "data fwd bwd dp" + " opt" * (not step))
    assert len(traced(job, {0, 1}).steps(1 << 60, final=False))


@pytest.mark.parametrize(
    ("step", "collectives"), [("bwd dp dp dp dp", 4), ("bwd bwd dp", 1), ("bwd bwd " * 20 + "dp", 1)]
)
def test_without_an_optimiser_a_step_has_its_backward_passes(step: str, collectives: int) -> None:
    """Nothing is launched on a CPU, and the layers' collectives are all alike."""
    job = play(2, 80, "fwd " + step)
    found = traced(job, {0, 1}).steps(1 << 60, final=True)
    assert len(found) >= 2 * 70
    assert set(found["collectives"]) == {collectives}
    assert not found["launches"].any()
    length = 1 + len(step.split())
    assert np.abs(found["duration_ns"].astype(np.int64) - length * MS).max() < MS


def test_without_an_optimiser_micro_batches_may_vary() -> None:
    drawn = random.Random(5)
    job = play(2, 80, lambda step: "fwd " + "bwd " * drawn.randint(1, 6) + "dp")
    found = traced(job, {0, 1}).steps(1 << 60, final=True)
    assert len(found) >= 2 * 70
    assert set(found["collectives"]) == {1}


def test_backward_passes_alone_are_no_steps() -> None:
    """They may be micro-batches."""
    job = play(1, 300, "fwd bwd", groups={"dp": [(0,)]})
    assert not len(traced(job, {0}).steps(1 << 60, final=True))


def test_backward_passes_are_no_launches() -> None:
    job = play(1, 80, "fwd launch launch bwd dp launch", groups={"dp": [(0,)]})
    found = traced(job, {0}).steps(1 << 60, final=True)
    assert len(found) >= 70
    assert set(found["launches"]) == {3}
    assert set(found["collectives"]) == {1}


def test_a_helper_of_a_rank_need_not_have_marks() -> None:
    whole = traced(play(1, 30, DDP, groups={"dp": [(0,)]}), {0})
    whole.members[99] = Member(member(5, torch=False).target, 5, "parent", launches=7)
    assert len(whole.steps(1 << 60, final=False))
    assert whole.by_marks is True


def test_a_short_job_is_split_by_its_marks_at_its_end() -> None:
    job = play(2, 3, DDP)
    short = traced(job, {0, 1})
    assert not len(short.steps(1 << 60, final=False))
    assert short.by_marks is None
    found = short.steps(1 << 60, final=True)
    assert short.by_marks is True
    assert steps_of(job, found) == [[1, 2]] * 2
    nothing = traced(play(2, 1, DDP), {0, 1})
    assert not len(nothing.steps(1 << 60, final=True))


# ---- ranges that programs name


STEP = "@@step"
ONE = "@@step( data launch @layer dp launch @layer @@step)"


def by_name(job: Job, **more: Any) -> Array:
    """Steps of a job whose ranges mark them, though its end is not announced."""
    found = find(job, final=False, **more)
    assert len(found)
    return found


@pytest.mark.parametrize("groups", [None, {"dp": [(0,), (1,)]}])
def test_a_range_that_is_called_a_step_is_one(groups: dict[str, list[tuple[int, ...]]] | None) -> None:
    job = play(2, 40, ONE, boundary=STEP, groups=groups)
    found = by_name(job)
    assert steps_of(job, found) == [list(range(39))] * 2
    assert set(found["step"].tolist()) == set(range(39))
    assert set(found["method"]) == {BY_MARKS}
    assert (found["confidence"] == 1).all()
    assert (found["collectives"] == 1).all()
    assert (found["launches"] == 2).all()


def test_ranks_that_come_at_different_times_number_these_alike() -> None:
    job = play(3, 60, ONE, boundary=STEP, attached={1: 93.5, 2: 201.2})
    found = by_name(job, edges=[(5000 + at) * MS for at in range(50, 400, 35)], settle=3 * MS)
    assert shift_of(job, found) == 0
    assert [steps[-1] for steps in steps_of(job, found)] == [58] * 3
    assert [steps[0] for steps in steps_of(job, found)] == [0, 12, 26]


def test_a_lost_begin_makes_one_long_step_on_its_rank() -> None:
    job = play(2, 60, ONE, boundary=STEP, lost=[(1, 40, "@@step(")])
    found = by_name(job)
    shift_of(job, found)
    assert steps_of(job, found) == [list(range(59)), [step for step in range(59) if step != 39]]


def test_what_comes_now_and_then_does_not_matter() -> None:
    """Evaluations, and log lines of a communicator of their own."""

    def program(step: int) -> str:
        return ONE + (" log" if step % 5 == 4 else "") + (" dp launch launch dp" if step % 7 == 6 else "")

    job = play(2, 60, program, boundary=STEP, groups={"dp": [(0, 1)], "log": [(0, 1)]}, sizes={"log": 8})
    assert steps_of(job, by_name(job)) == [list(range(59))] * 2


@pytest.mark.parametrize("parts", [2, 4])
def test_a_step_is_no_part_of_which_gradients_are_reduced_in_the_last(parts: int) -> None:
    """Whatever it is called: many loops number their micro-batches."""
    program = "@@step( tp launch @@step) " * (parts - 1) + "@@step( tp launch dp launch @@step)"
    job = play(2, 60, program, groups={"tp": [(0, 1)], "dp": [(0, 1)]})
    assert not len(find(job, final=False))


@pytest.mark.parametrize("parts", [4, 60])
def test_where_an_optimiser_has_marks_it_decides(parts: int) -> None:
    job = play(1, 20, "@@step( data bwd @@step) " * parts + "opt", groups={})
    edges = [(5000 + at) * MS for at in range(10, 20 * 4 * parts, 50)]
    found = find(job, final=False, edges=edges)
    assert steps_of(job, found) == [list(range(1, 19))]


def test_of_ranges_in_one_another_the_outer_one_is_the_step() -> None:
    inner = "@@batch( dp launch @@batch) "
    job = play(2, 40, f"@@iteration( {inner * 3} launch @@iteration)", boundary="@@iteration")
    edges = [(5000 + at) * MS for at in range(10, 500, 20)]
    assert steps_of(job, by_name(job, edges=edges)) == [list(range(39))] * 2


def test_a_range_around_hundreds_of_steps_is_none() -> None:
    job = play(1, 3, "@@epoch( " + "@@step( dp launch @@step) " * 300 + "@@epoch)")
    assert of(by_name(job), 0)["step"].tolist() == list(range(899))


def test_a_thread_that_fetches_batches_is_ahead_and_makes_no_steps() -> None:
    job = play(1, 40, ONE, boundary=STEP)
    ahead = job.ranks[0].marks[job.ranks[0].marks["what"] >= What.STEP_BEGIN].copy()
    ahead["tid"] += 1
    ahead["ts_ns"] -= 12 * MS
    early = ahead[:8].copy()
    early["ts_ns"] -= 60 * MS
    marks = np.concatenate([job.ranks[0].marks, ahead, early])
    job.ranks[0].marks = marks[np.argsort(marks["ts_ns"], kind="stable")]
    assert steps_of(job, by_name(job)) == [list(range(39))]


def test_a_range_of_any_name_is_a_step_where_nothing_else_is_seen_and_it_covers_the_time() -> None:
    body = "@train( data @a data @train) "
    job = play(1, 40, body + "@log", boundary="@train", groups={})
    assert steps_of(job, by_name(job)) == [list(range(39))]
    rare = play(1, 40, "@log data data data data", groups={})
    assert not len(find(rare, final=False))
    calling = play(1, 40, body + "launch", groups={})
    assert not len(find(calling, final=False)), "calls may repeat otherwise"


def test_another_thread_that_says_the_same_more_often_makes_no_steps_that_run_backwards() -> None:
    job, steps = play(1, 40, ONE, boundary=STEP), MarkedSteps()
    begins = job.ranks[0].marks[job.ranks[0].marks["what"] == What.STEP_BEGIN]
    other = np.repeat(begins, 3)
    other["tid"] += 1
    other["ts_ns"] += np.tile([0, MS, 2 * MS], len(begins)).astype(np.uint64)
    found = [find(job, steps, final=False)]
    steps.feed_marks(0, other)
    late = np.zeros(1, MARK)
    late["ts_ns"], late["tid"], late["what"], late["role"] = 1 << 60, int(other["tid"][0]), What.STEP_BEGIN, 1
    late["handle"] = named(STEP)
    steps.feed_marks(0, late)
    found.append(steps.advance(1 << 61))
    ends = np.concatenate([ends_of(rows) for rows in found])
    assert len(ends) > 39
    assert (np.diff(ends) > 0).all()


def test_an_end_that_says_what_it_ends_ends_what_lies_above_too() -> None:
    rows = [(10, What.RANGE_BEGIN, Role.OPTIMIZER), (20, What.RANGE_BEGIN, Role.NONE)]
    rows += [(30, What.RANGE_END, Role.OPTIMIZER), (40, What.BACKWARD_BEGIN, Role.NONE)]
    marks = np.zeros(4 * len(rows), MARK)
    for turn in range(4):
        for place, (ts, what, role) in enumerate(rows, turn * len(rows)):
            marks[place] = ts + 100 * turn, 0, MAIN, what, role, 0
    steps = MarkedSteps()
    steps.feed_marks(0, marks)
    assert steps.ready([0])
    assert ends_of(steps.advance(1000)) == [130, 230, 330]


def test_names_that_are_never_the_same_are_bounded() -> None:
    steps = MarkedSteps()
    rows = np.zeros(10_000, MARK)
    rows["ts_ns"] = rows["handle"] = np.arange(1, 10_001)
    rows["what"], rows["tid"] = What.STEP_BEGIN, 1
    rows["handle"][::10], rows["role"][::10] = 5, 1
    steps.feed_marks(0, rows)
    (thread,) = steps._ranks[0].threads.values()
    assert len(thread.ranges) == by_marks.RANGES
    assert thread.ranges[5].seen == 1001
    assert not steps.agree(np.zeros(1, ITERATION))


@pytest.mark.parametrize(
    ("program", "agrees"),
    [("@train( {0} @train)", True), ("@half( launch @half) @half( {0} @half)", False), ("{0} launch", False)],
)
def test_a_range_of_any_name_that_calls_agree_with_is_the_step(program: str, agrees: bool) -> None:
    job = play(2, 120, program.format("launch dp launch launch launch dp"), boundary="@train")
    whole = traced(job, {0, 1})
    found = whole.steps(1 << 60, final=False)
    assert whole.by_marks is agrees
    assert set(found["method"]) == ({BY_MARKS} if agrees else {BY_COLLECTIVES})
    if agrees:
        assert steps_of(job, found) == [list(range(119))] * 2
        assert whole.marked.wanted == named("@train")


def test_once_optimisers_decide_no_ranges_are_wanted() -> None:
    job, steps = play(1, 40, DDP), MarkedSteps()
    assert steps.wanted is None
    find(job, steps)
    assert steps.wanted == 0


def test_a_short_job_is_split_by_its_ranges_at_its_end() -> None:
    job = play(2, 4, ONE, boundary=STEP)
    short = traced(job, {0, 1})
    assert not len(short.steps(1 << 60, final=False))
    assert steps_of(job, short.steps(1 << 60, final=True)) == [[0, 1, 2]] * 2


def bytes_of(*held: Any) -> int:
    """Memory of all that can be reached from something, types and functions left out."""
    seen: set[int] = set()
    to_do, number = list(held), 0
    while to_do:
        one = to_do.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType | BuiltinFunctionType | Enum):
            continue
        seen.add(id(one))
        number += sys.getsizeof(one)
        to_do += gc.get_referents(one)
    return number


def kept_of(job: TracedJob) -> int:
    """Memory of a job, without its processes."""
    return bytes_of({name: held for name, held in vars(job).items() if name != "members"})


@pytest.mark.parametrize("final", [True, False])
def test_a_job_that_is_over_keeps_nothing_of_what_its_steps_were_made_from(final: bool) -> None:
    job = play(2, 30, DDP)
    over = traced(job, {0, 1})
    for rank, seen in enumerate(job.ranks):
        over.recent[rank] = np.tile(seen.calls, 100)
        over.syncs[rank] = np.zeros((4096, 2), np.int64)
        over.keep_control(rank, np.zeros(100, records.CONTROL))
        launches = np.zeros(100_000, records.LAUNCH)
        launches["ts_ns"] = np.linspace(4999 * MS, 5310 * MS, len(launches)).astype(np.uint64)
        over.tracker.feed(rank, launches, np.empty(0, records.COLLECTIVE))
        over.marked.feed_calls(rank, launches["ts_ns"], np.tile(seen.calls, 1000))
        waiting = np.zeros(10_000, MARK)
        waiting["ts_ns"], waiting["what"] = 1 << 50, What.STEP_BEGIN
        waiting["handle"] = np.arange(len(waiting)) % 50
        over.marked.feed_marks(rank, waiting)
        over.phases[rank].feed(np.zeros(40_000, MARK))
    if final:
        assert len(over.steps(1 << 60, final=True))
    before = kept_of(over)
    over.finish()
    assert before > 4 << 20
    assert kept_of(over) < 2 * 50_000
    assert {rank: len(calls) for rank, calls in over.recent.items()} == {0: LATE_CALLS, 1: LATE_CALLS}


def test_whatever_a_job_had_little_of_it_is_kept_once_it_is_over() -> None:
    """Names, threads, marks, communicators and process groups as many as a rank may have."""
    over, rng = traced(play(1, 30, DDP), {0}), np.random.default_rng(0)
    marks, number = Marks(), 4096
    pushes = np.zeros(number, records.MARK)
    pushes["call"] = next(call.id for call in CALLS if call.kind == "nvtx_push")
    pushes["tid"], pushes["ts_ns"], pushes["name_len"] = 1 + np.arange(number) // 64, 1 + np.arange(number), 40
    pushes["name"][:, :40] = rng.integers(ord("a"), ord("z"), (number, 40))
    over.marks[0] = marks
    over.feed_marks(over.members[0], marks.take(pushes, ends_of_backward=False))
    waits = np.zeros(60_000, MARK)
    waits["tid"], waits["what"], waits["ts_ns"] = 1, What.WAIT, 10**6 + np.arange(len(waits))
    over.feed_marks(over.members[0], waits)
    comms = rng.integers(1 << 20, 1 << 47, 2048).astype(np.uint64)
    calls = np.zeros(len(comms), records.COLLECTIVE)
    calls["comm"], calls["ts_ns"], calls["call"] = comms, 1 + np.arange(len(comms)), 1
    over.count_traffic(0, calls, np.full(len(calls), 4, np.uint64))
    over.calls.clear()  # after ``KERNELS_S``
    over.recent[0] = calls
    over.handles |= {(0, comm) for comm in comms.tolist()}
    over.ended |= over.handles
    over.communicators = np.zeros(len(comms), COMMUNICATOR)
    over.communicators["comm"] = over.communicators["comm_group"] = comms
    over.communicators["nranks"] = 1
    over.communicators["error"][:100] = "not lined up"
    for steps in (over.tracker, over.marked):
        steps.align(over.communicators)
    over.mesh = find_mesh(over.communicators, over.traffic, world=len(over.members))
    over.named[0] = {comm: Membership("a group", 0, 1) for comm in comms.tolist()}
    over.places[0] = dict.fromkeys(comms.tolist())
    over.queues[0] = deque((10**9 + each, 10**6 + each) for each in range(256))
    over.steps(1 << 60, final=True)
    counted, described, late = over.counters(), describe(over.mesh), lateness_ms(over.recent, over.communicators)
    before = kept_of(over)
    over.finish()
    assert before > 6 << 20
    assert kept_of(over) < 400_000
    assert over.counters() == counted
    assert over.not_aligned == 100
    assert described
    assert describe(over.mesh) == described
    assert lateness_ms(over.recent, over.communicators) == late


def test_a_job_that_is_over_has_its_mesh_and_lateness_as_before() -> None:
    """What the view and the end's summary show of it."""
    job = play(4, 30, DDP)
    over = traced(job, {0, 1, 2, 3})
    for rank, seen in enumerate(job.ranks):
        over.recent[rank] = seen.calls
        over.count_traffic(rank, seen.calls, np.full(len(seen.calls), 1 << 20, np.uint64))
    over.communicators = job.communicators()
    over.communicators["error"][-1] = "not lined up"
    over.mesh = find_mesh(over.communicators, over.traffic, world=len(over.members))
    shown = describe(over.mesh), lateness_ms(over.recent, over.communicators), over.not_aligned
    assert all(shown)
    over.finish()
    assert (describe(over.mesh), lateness_ms(over.recent, over.communicators), over.not_aligned) == shown
    assert not any(group.handles for group in over.mesh)


def test_a_job_that_seemed_to_be_over_has_steps_by_marks_again() -> None:
    """Its ranks go on, and another one comes."""
    job = play(3, 60, DDP)
    cut = int(sorted(job.ranks[0].ends)[30]) + MS
    whole = traced(job, {0, 1, 2}, until=0)
    out = []
    for low, high, there in ((0, cut, (0, 1)), (cut, 1 << 62, (0, 1, 2))):
        for rank in there:
            seen, own = job.ranks[rank], whole.members[rank]
            whole.feed(own, None, between(seen.calls, low, high))
            own.collectives += len(between(seen.calls, low, high))
            whole.feed_marks(own, between(seen.marks, low, high))
        known = job.communicators()
        whole.marked.align(known[np.isin(known["rank"], there)])
        out.append(whole.steps(1 << 60, final=True))
        whole.finish()
        whole.finished = False
    found = np.concatenate(out)
    assert whole.by_marks is True
    assert all(len(of(out[0], rank)) > 25 for rank in (0, 1))
    assert all(len(of(out[1], rank)) > 25 for rank in (0, 1, 2))
    assert len({seen_at - step for rank in (0, 1) for seen_at, step in numbered(job, found, rank)}) == 1
    assert all((np.diff(of(found, rank)["step"].astype(int)) > 0).all() for rank in range(3))


def numbered(job: Job, found: Array, rank: int) -> list[tuple[int, int]]:
    """The program's number and the one that was found, of each step of a rank that ends where it truly does."""
    own = of(found, rank)
    pairs = zip(ends_of(own), own["step"].tolist(), strict=True)
    return [(job.ranks[rank].ends[end], step) for end, step in pairs if end in job.ranks[rank].ends]


def test_ranges_that_wait_are_dropped_with_the_ends() -> None:
    steps = MarkedSteps()
    marks = np.zeros(10, MARK)
    marks["what"], marks["ts_ns"], marks["handle"] = What.STEP_BEGIN, 1 + np.arange(10), 7
    steps.feed_marks(0, marks)
    by_marks.drop_ends(steps)
    assert sum(len(each.begins) for each in steps._ranks[0].ranges().values()) == 0
