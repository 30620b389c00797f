"""Communicators joined across ranks, and their calls lined up, against synthetic jobs whose truth is known."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from argus.model.calls import BY_SYMBOL, CALLS, Layer
from argus.model.groups import Membership, Place
from argus.model.records import COLLECTIVE, CONTROL
from argus.semantics.groups import communicators
from argus.semantics.groups.communicators import (
    APART,
    COMMUNICATOR,
    RankCalls,
    find_groups,
    groups_in_parts,
    keep_alignment,
)
from tests.builders.stored_job import known
from tests.builders.synthetic_job import Fault, Job, Op, ddp, simulate


def find(job: Job) -> NDArray[np.void]:
    return find_groups([known(rank) for rank in job.ranks])


def true_offsets(job: Job, rows: NDArray[np.void]) -> set[int]:
    """What rows without error add to the true number of each rank's first call: one value if all agree."""
    fine = rows[rows["error"] == ""]
    return {int(row["seq_offset"]) - job.first_call[int(row["rank"]), int(row["comm"])] for row in fine}


def test_communicators_seen_made_need_no_guess() -> None:
    groups = {"dp": [(0, 2), (1, 3)], "tp": [(0, 1), (2, 3)]}
    program = [*ddp(), Op("collective", 0.5, group="tp", count=5)]
    job = simulate(4, 12, program, groups=groups)
    rows = find(job)
    assert rows.dtype == COMMUNICATOR
    assert set(rows["joined_by"]) == {"unique_id"}
    assert not rows["seq_offset"].any()
    assert not (rows["error"] != "").any()
    members: dict[int, set[int]] = {}
    for row in rows:
        members.setdefault(int(row["comm_group"]), set()).add(int(row["rank"]))
    assert sorted(map(sorted, members.values())) == [[0, 1], [0, 2], [1, 3], [2, 3]]
    assert (rows["nranks"] == 2).all()
    at = {(int(r["rank"]), int(r["comm"])): int(r["comm_rank"]) for r in rows}
    assert at[2, job.handles[2, "dp"]] == 1
    assert at[2, job.handles[2, "tp"]] == 0


def control(**fields: Any) -> NDArray[np.void]:
    row = np.zeros(1, CONTROL)
    for name, value in fields.items():
        row[name] = value
    return row


def test_splits_of_a_known_parent_are_joined_by_colour_and_order() -> None:
    init, split = BY_SYMBOL["ncclCommInitRank"].id, BY_SYMBOL["ncclCommSplit"].id
    ranks = []
    for rank in range(4):
        world = control(ts_ns=1, handle=100 + rank, call=init, nranks=4, rank=rank)
        world["data"][0, :4] = 7
        parts = [world]
        for i, color in enumerate((rank % 2, rank // 2)):
            parts.append(
                control(
                    ts_ns=2 + i,
                    handle=1000 * (i + 1) + rank,
                    parent=100 + rank,
                    color=color,
                    key=-rank,
                    call=split,
                    nranks=-1,
                    rank=-1,
                )
            )
        ranks.append(RankCalls(rank, np.empty(0, COLLECTIVE), control=np.concatenate(parts)))
    rows = find_groups(ranks)
    groups = {(int(r["rank"]), int(r["comm"])): int(r["comm_group"]) for r in rows}
    assert groups[0, 1000] == groups[2, 1002] != groups[1, 1001] == groups[3, 1003]
    assert groups[0, 2000] == groups[1, 2001] != groups[2, 2002] == groups[3, 2003]
    assert len(set(groups.values())) == 5
    split_rows = rows[rows["joined_by"] == "split"]
    assert (split_rows["nranks"] == 2).all()
    # Keys count down, so the later rank comes first.
    assert {int(r["rank"]): int(r["comm_rank"]) for r in split_rows if r["comm"] < 2000} == {0: 1, 2: 0, 1: 1, 3: 0}


def test_the_trap_call_times_alone_pair_a_late_rank_with_the_wrong_step() -> None:
    """Rank 1's loader holds it up by 0.6 steps: its calls are nearest to the *next* step of rank 0."""
    step_ms = 60 * 3.1 + 112
    job = simulate(
        2,
        40,
        ddp(forward_ms=60),
        faults=(Fault("data", (1,), ms=step_ms * 1.6),),
        attach_ms=np.array([700.0, 1500.0]),
        inits=False,
        jitter=0.02,
    )
    late = (job.boundaries[5:, 1] - job.boundaries[5:, 0]) / np.diff(job.boundaries[:, 0]).mean()
    assert 0.5 < np.median(late) < 0.95, "the test must lay the trap"
    calls = [rank.collectives for rank in job.ranks]
    true = job.first_call[1, int(calls[1]["comm"][0])] - job.first_call[0, int(calls[0]["comm"][0])]

    def apart(offset: int) -> float:
        a = dict(zip(calls[0]["seq"].tolist(), calls[0]["ts_ns"].astype(np.int64).tolist(), strict=True))
        pairs = [
            (a[s + offset], t)
            for s, t in zip(calls[1]["seq"].tolist(), calls[1]["ts_ns"].tolist(), strict=True)
            if s + offset in a
        ]
        return float(np.median([abs(x - int(y)) for x, y in pairs]))

    assert apart(true + 4) < apart(true), "nearest call times would be wrong by one step"
    rows = find(job)
    assert not (rows["error"] != "").any()
    assert int(rows["seq_offset"][1] - rows["seq_offset"][0]) == true


@pytest.mark.thorough
@given(
    seed=st.integers(0, 10_000),
    nranks=st.sampled_from([2, 3, 4, 8]),
    layers=st.integers(1, 5),
    equal=st.booleans(),
    end_sync=st.booleans(),
    kind=st.sampled_from(["none", "compute", "data"]),
    factor=st.floats(1.1, 4),
    late=st.floats(0.3, 12),
)
@settings(max_examples=60, deadline=None)
def test_late_attachment_is_lined_up_or_reported_as_unknown(
    seed: int, nranks: int, layers: int, equal: bool, end_sync: bool, kind: str, factor: float, late: float
) -> None:
    rng = np.random.default_rng(seed)
    forward = float(rng.uniform(10, 60))
    faults = () if kind == "none" else (Fault(kind, (seed % nranks,), factor, ms=late * forward),)
    job = simulate(
        nranks,
        35,
        ddp(layers, 3, forward, equal=equal, end_sync=end_sync),
        faults=faults,
        jitter=0.01,
        spikes=0.05,
        attach_ms=rng.uniform(0, 25 * forward, nranks),
        inits=False,
        seed=seed,
    )
    rows = find(job)
    assert len(true_offsets(job, rows)) <= 1, "wrong, and silent about it"
    if end_sync:
        # All ranks leave the last synchronise together, however late one of them calls.
        assert (rows["error"] == "").all()
    if kind != "data":
        assert (rows["error"] == "").mean() > 0.5
        assert rows["seq_offset"][rows["error"] == ""].min() >= 0


def test_without_synchronise_calls_a_doubt_is_reported() -> None:
    job = simulate(4, 40, ddp(loss_sync=False), attach_ms=np.array([0, 40, 80, 11.0]), inits=False)
    rows = find(job)
    assert len(true_offsets(job, rows[rows["error"] == ""])) <= 1
    assert any("ambiguous" in str(error) and "no synchronise" in str(error) for error in rows["error"])


def test_equal_communicators_of_one_rank_are_not_guessed() -> None:
    program = [*ddp(equal=True), *ddp(equal=True, group="other")]
    job = simulate(2, 20, program, groups={"dp": [(0, 1)], "other": [(0, 1)]}, inits=False)
    rows = find(job)
    assert len(rows) == 4
    assert all("equal call sequences" in str(error) for error in rows["error"])


def test_communicators_with_different_traffic_are_distinguished() -> None:
    groups = {"dp": [(0, 2), (1, 3)], "world": [(0, 1, 2, 3)]}
    program = [*ddp(), Op("collective", 0.5, group="world", count=5), Op("wait"), Op("sync")]
    job = simulate(4, 40, program, groups=groups, inits=False, attach_ms=np.array([10, 900, 500, 20.0]))
    rows = find(job)
    worlds = [row for row in rows if row["comm"] == job.handles[int(row["rank"]), "world"]]
    assert len({int(row["comm_group"]) for row in worlds}) == 1
    assert len({int(row["comm_group"]) for row in rows}) >= 2
    world_offsets = true_offsets(job, np.array(worlds))
    assert len(world_offsets) == 1


def test_a_rank_attached_later_joins_a_group_seen_made() -> None:
    job = simulate(4, 40, ddp(end_sync=True), attach_ms=np.array([0, 0, 700.0, 0]))
    rows = find(job)
    assert Counter(rows["joined_by"].tolist()) == {"unique_id": 3, "traffic": 1}
    assert len(set(rows["comm_group"].tolist())) == 1
    assert true_offsets(job, rows) == {0}


def test_sizes_that_were_asked_for_must_fit() -> None:
    query = BY_SYMBOL["ncclCommCount"].id
    job = simulate(3, 30, ddp(end_sync=True), inits=False)
    for rank in job.ranks:
        rank.control = control(ts_ns=1, handle=rank.collectives["comm"][0], call=query, nranks=8, rank=-1)
    rows = find(job)
    assert (rows["nranks"] == 8).all()
    assert not (rows["error"] != "").any()


def test_few_calls_are_too_few() -> None:
    rows = find(simulate(2, 1, ddp(layers=2), inits=False))
    assert all("too few" in str(error) for error in rows["error"])


def pairs() -> Job:
    """Two pairs, and two pairs across them, made before Argus came."""
    groups = {"dp": [(0, 2), (1, 3)], "tp": [(0, 1), (2, 3)]}
    program = [Op("collective", 0.5, group="tp", count=5), *ddp(end_sync=True)]
    return simulate(4, 40, program, groups=groups, inits=False)


def with_memory(job: Job, ranks: Sequence[int] = (0, 1, 2, 3)) -> list[RankCalls]:
    """What is known of the ranks where the memory of some shows who is in which communicator."""
    found = []
    for rank in job.ranks:
        tp, dp = (job.handles[rank.rank, dimension] for dimension in ("tp", "dp"))
        places = {
            tp: Place(1000 + rank.rank // 2, rank.rank % 2, 2),
            dp: Place(2000 + rank.rank % 2, rank.rank // 2, 2),
        }
        found.append(replace(known(rank), in_memory=places if rank.rank in ranks else {}))
    return found


def members(rows: NDArray[np.void]) -> set[tuple[int, ...]]:
    return {tuple(rows["rank"][rows["comm_group"] == group].tolist()) for group in np.unique(rows["comm_group"])}


def test_pairs_that_always_end_together_are_distinguished_by_their_memory() -> None:
    job = pairs()
    guessed = find_groups([known(rank) for rank in job.ranks])
    assert members(guessed) != {(0, 1), (2, 3), (0, 2), (1, 3)}, "by their calls alone they are not"
    rows = find_groups(with_memory(job))
    assert members(rows) == {(0, 1), (2, 3), (0, 2), (1, 3)}
    assert set(rows["joined_by"]) == {"memory"}
    assert set(rows["nranks"]) == {2}
    for row in rows:
        tp = row["comm"] == job.handles[int(row["rank"]), "tp"]
        assert row["comm_rank"] == (row["rank"] % 2 if tp else row["rank"] // 2)
    assert set(rows["error"]) == {""}
    # Each call has one number on both ranks: as often called, as often counted.
    for group in np.unique(rows["comm_group"]):
        assert len(np.unique(rows["seq_offset"][rows["comm_group"] == group])) == 1


def test_ranks_that_were_not_seen_to_call_at_one_time_are_together_by_their_memory() -> None:
    """Of ranks 1 and 3 nothing has been read yet of when 0 and 2 were seen."""
    job = pairs()
    middle = (int(job.ranks[0].collectives["ts_ns"].min()) + int(job.ranks[0].collectives["ts_ns"].max())) // 2
    ranks = []
    for rank in with_memory(job):
        late = rank.collectives["ts_ns"] > middle
        ranks.append(replace(rank, collectives=rank.collectives[late if rank.rank % 2 else ~late]))
    rows = find_groups(ranks)
    assert members(rows) == {(0, 1), (2, 3), (0, 2), (1, 3)}
    for row in rows:
        tp = row["comm"] == job.handles[int(row["rank"]), "tp"]
        assert row["error"] == (APART if tp else ""), "how their calls line up is not known"


@pytest.mark.parametrize("what", ["one rank", "one key", "one place", "another size"])
def test_memory_that_makes_no_sense_is_not_believed(what: str) -> None:
    job = pairs()
    ranks = with_memory(job, (0,) if what == "one rank" else (0, 1, 2, 3))
    for place, rank in enumerate(ranks):
        changed = dict(rank.in_memory)
        for comm, output in rank.in_memory.items():
            changed[comm] = {
                "one key": Place(5, output.rank, output.size), "one place": Place(output.key, 0, output.size),
                "another size": Place(output.key, output.rank, 2 + rank.rank),
            }.get(what, output)  # fmt: skip
        ranks[place] = replace(rank, in_memory=changed)
    assert "memory" not in find_groups(ranks)["joined_by"].tolist()


def test_communicators_that_only_send_have_their_members() -> None:
    job = pairs()
    ranks = [replace(known(rank), in_memory={77: Place(9, rank.rank, 4)}) for rank in job.ranks]
    rows = find_groups(ranks)
    pipeline = rows[rows["comm"] == 77]
    assert (pipeline["rank"].tolist(), pipeline["comm_rank"].tolist()) == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert len(set(pipeline["comm_group"].tolist())) == 1
    assert set(pipeline["nranks"]) == {4}
    assert set(pipeline["error"]) == {"sends and receives alone do not show how calls line up"}


def test_nothing_in_nothing_out() -> None:
    assert len(find_groups([])) == 0
    assert len(find_groups([RankCalls(0, np.empty(0, COLLECTIVE))])) == 0
    with pytest.raises(TypeError):
        find_groups([RankCalls(0, np.empty(3, CONTROL))])


# ---- groups whose names are known

GLOO = next(call.id for call in CALLS if call.layer is Layer.TORCH and call.kind == "AllReduce")
WORLD = Membership("0", 0, 4)


def gloo(
    rank: int,
    counts: Sequence[int],
    *,
    comm: int = 0,
    place: Membership | None = None,
    has_counts: bool = True,
    lost: Sequence[int] = (),
) -> RankCalls:
    """A rank whose calls of one group have these counts.

    Args:
        rank: Global rank.
        counts: What the group's count was at each call.
        comm: Its handle; 0: one of the rank's own.
        place: What the process says of it; None: rank of 4 in the world.
        has_counts: Whether its calls carry the count.
        lost: Calls, by number since Argus came, whose records were lost.
    """
    comm = comm or 0x1000 + rank
    rows = np.zeros(len(counts), COLLECTIVE)
    rows["ts_ns"] = 1_000_000 * (1 + np.array(counts)) + 100 * rank
    rows["call"], rows["comm"], rows["seq"], rows["count"] = GLOO, comm, np.arange(len(counts)), 5
    rows["stream"] = np.array(counts) + 1 if has_counts else 0
    rows = rows[~np.isin(rows["seq"], lost)]
    return RankCalls(rank, rows, named={comm: place or Membership("0", rank, 4)})


def of_rank(rows: NDArray[np.void], field: str) -> dict[int, Any]:
    return dict(zip(rows["rank"].tolist(), rows[field].tolist(), strict=True))


def test_named_groups_are_lined_up_by_their_own_counts() -> None:
    ranks = [gloo(0, range(100, 140)), gloo(1, range(107, 141), lost=[0, 3]), gloo(2, range(138, 139)), gloo(3, [3, 4])]
    rows = find_groups(ranks)
    assert of_rank(rows, "seq_offset") == {0: 100, 1: 107, 2: 138, 3: 3}
    assert set(rows["joined_by"]) == {"name"}
    assert set(rows["error"]) == {""}
    assert len(set(rows["comm_group"].tolist())) == 1
    assert of_rank(rows, "comm_rank") == {0: 0, 1: 1, 2: 2, 3: 3}
    assert set(rows["nranks"]) == {4}


def test_two_hosts_that_see_their_own_ranks_line_them_up_alike() -> None:
    ranks = [gloo(0, range(10, 30)), gloo(1, range(12, 30)), gloo(2, range(20, 30)), gloo(3, range(5, 30))]
    whole = find_groups(ranks)
    parts = np.concatenate([find_groups(ranks[:2]), find_groups(ranks[2:])])
    assert parts.tolist() == whole.tolist()


def test_groups_of_one_name_and_other_sizes_are_not_one() -> None:
    ranks = [gloo(0, range(9)), gloo(1, range(9), place=Membership("0", 1, 2))]
    assert len(set(find_groups(ranks)["comm_group"].tolist())) == 2


def test_a_call_that_counts_several_times_leaves_offsets_that_agree() -> None:
    """Calls 5 and 9 of the group are two collectives each."""
    counts = [0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 12, 13, 14]
    ranks = [gloo(0, counts), gloo(1, counts[3:]), gloo(2, counts[9:], lost=[1])]
    rows = find_groups(ranks)
    assert of_rank(rows, "seq_offset") == {0: 0, 1: 3, 2: 9}
    assert set(rows["error"]) == {""}
    rows = find_groups([ranks[1], ranks[0]])
    assert of_rank(rows, "seq_offset") == {0: 0, 1: 3}, "none is below 0"


def test_counts_without_a_call_in_common_say_so() -> None:
    counts = [0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 12, 13, 14]
    rows = find_groups([gloo(0, counts[:8]), gloo(1, counts[9:])])
    assert of_rank(rows, "error") == {0: "", 1: "no call in common yet"}


def test_counts_that_contradict_the_calls_say_so() -> None:
    rows = find_groups([gloo(0, [0, 1, 2, 4, 5]), gloo(1, [0, 1, 2, 5, 6, 7])])
    assert of_rank(rows, "error") == {0: "", 1: "calls do not agree with the group's count"}


def test_groups_of_one_name_one_after_the_other_are_distinguished() -> None:
    """The program destroyed its groups and began again; one rank has not called the new one yet."""
    first = gloo(0, range(20), place=WORLD)
    then = gloo(0, range(20), comm=0x9000, place=replace(WORLD, turn=1))
    then.collectives["ts_ns"] += np.uint64(30_000_000)
    both = RankCalls(
        0, np.concatenate([first.collectives, then.collectives]), named={**first.named, **then.named}
    )  # fmt: skip
    rows = find_groups([both, gloo(1, range(20))])
    assert not (rows["error"] != "").any()
    assert sorted(Counter(rows["comm_group"].tolist()).values()) == [1, 2]


@pytest.mark.parametrize(("seen", "missed"), [(0, 1), (1, 0)])
@pytest.mark.parametrize("late", [0, 3_000_000])
def test_the_first_group_seen_of_a_rank_may_be_one_that_another_has_left(seen: int, missed: int, late: int) -> None:
    """Argus came when one rank had a last call to make in the group before, and the other one had none."""
    ranks = []
    for rank in (0, 1):
        first = int(rank == missed)
        lives = [
            gloo(
                rank, [19] if turn == 0 else range(20), comm=0x9000 + turn, place=Membership("0", rank, 2, turn - first)
            )
            for turn in range(first, 4)
        ]
        for life in lives:
            (comm,) = life.named
            life.collectives["ts_ns"] += np.uint64(30_000_000 * (comm - 0x9000) + late * rank)
        named = {comm: place for life in lives for comm, place in life.named.items()}
        ranks.append(RankCalls(rank, np.concatenate([life.collectives for life in lives]), named=named))
    rows = find_groups(ranks)
    assert set(rows["error"]) == {""}
    groups: dict[int, set[int]] = defaultdict(set)
    for row in rows:
        groups[int(row["comm_group"])].add(int(row["comm"]))
    assert sorted(map(sorted, groups.values())) == [[0x9000 + turn] for turn in range(4)]
    assert sorted(Counter(rows["comm_group"].tolist()).values()) == [1, 2, 2, 2]


def test_groups_that_come_and_go_often_are_compared_with_their_neighbours_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may make as many as are remembered, and the loop of a trace looks at them once a second."""
    ranks = []
    for rank in range(4):
        lives = [gloo(rank, range(20), comm=0x9000 + life).collectives for life in range(40)]
        for life, calls in enumerate(lives):
            calls["ts_ns"] += np.uint64(30_000_000 * life)
        named = {0x9000 + life: Membership("0", rank, 4, life) for life in range(40)}
        ranks.append(RankCalls(rank, np.concatenate(lives), named=named))
    compared: list[None] = []
    apart = communicators._apart
    monkeypatch.setattr(communicators, "_apart", lambda a, b: (compared.append(None), apart(a, b))[1])
    assert len(set(find_groups(ranks)["comm_group"].tolist())) == 40
    assert len(compared) <= 3 * 3 * 40


def test_calls_that_do_not_overlap_in_time_are_of_two_communicators() -> None:
    """Equal calls, the only ones of either rank, and no names."""
    ranks = []
    for rank, later in ((0, 0), (1, 50_000_000)):
        calls = gloo(rank, [*range(7), *range(20, 60)], has_counts=False)
        calls.collectives["ts_ns"] += np.uint64(later)
        ranks.append(RankCalls(rank, calls.collectives))
    assert len(set(find_groups(ranks)["comm_group"].tolist())) == 1
    ranks[1].collectives["ts_ns"] += np.uint64(50_000_000)
    assert len(set(find_groups(ranks)["comm_group"].tolist())) == 2


@pytest.mark.parametrize("nameless", [({2}, {4}), ({1, 4}, {2}), ({5}, {3, 4}), (set(), {0, 5})])
@pytest.mark.parametrize("late", [0, 3_000_000])
def test_a_group_that_was_gone_before_its_name_was_read_confuses_no_other(
    nameless: tuple[set[int], set[int]], late: int
) -> None:
    """Each rank has had six groups of one name, one after the other."""
    ranks = []
    for rank in (0, 1):
        lives, named, turns = [], {}, itertools.count()
        for life in range(6):
            calls = gloo(rank, range(20), comm=0x9000 + life).collectives
            calls["ts_ns"] += np.uint64(30_000_000 * life + late * rank)
            lives.append(calls)
            if life not in nameless[rank]:
                named[0x9000 + life] = Membership("0", rank, 2, next(turns))
        ranks.append(RankCalls(rank, np.concatenate(lives), named=named))
    for seen in (ranks, ranks[::-1]):
        rows = find_groups(seen)
        groups: dict[int, set[int]] = defaultdict(set)
        for row in rows[rows["error"] == ""]:
            groups[int(row["comm_group"])].add(int(row["comm"]))
        assert all(len(lives) == 1 for lives in groups.values())
        sizes = {next(iter(groups[group])) - 0x9000: n for group, n in Counter(rows["comm_group"].tolist()).items()
                 if group in groups}  # fmt: skip
        assert {life for life, n in sizes.items() if n == 2} >= set(range(6)) - nameless[0] - nameless[1]


def test_two_ranks_in_one_place_are_not_guessed() -> None:
    rows = find_groups([gloo(0, range(20), place=WORLD), gloo(1, range(20), place=WORLD)])
    assert set(rows["error"]) == {"several process groups of this name have the same ranks"}


def test_a_named_group_is_not_looked_for_by_its_traffic() -> None:
    """Equal calls at equal times: the names distinguish them."""
    ranks = [gloo(rank, range(40), place=Membership(str(rank // 2), rank % 2, 2)) for rank in range(4)]
    rows = find_groups(ranks)
    groups = of_rank(rows, "comm_group")
    assert groups[0] == groups[1] != groups[2] == groups[3]
    assert set(rows["joined_by"]) == {"name"}


def test_groups_whose_calls_carry_no_count_are_still_joined_by_traffic() -> None:
    for nameless in ({}, {0x1000: WORLD, 0x1001: Membership("0", 1, 4)}):
        ranks = [gloo(rank, [*range(7), *range(20, 60)], has_counts=False) for rank in range(2)]
        ranks = [RankCalls(calls.rank, calls.collectives, named=nameless) for calls in ranks]
        for calls in ranks:
            calls.collectives["count"] = 1000 + np.arange(len(calls.collectives)) % 5
            calls.collectives["ts_ns"] += np.uint64(1_000_000) * (np.arange(len(calls.collectives)) % 5 == 0)
        rows = find_groups(ranks)
        assert set(rows["joined_by"]) == {"traffic"}
        assert len(set(rows["comm_group"].tolist())) == 1


def test_a_name_without_calls_makes_no_row() -> None:
    assert len(find_groups([gloo(0, [])])) == 0


def test_a_clear_alignment_is_kept_when_times_blur() -> None:
    before = np.zeros(4, COMMUNICATOR)
    before["rank"], before["comm"] = [0, 1, 0, 1], [7, 7, 8, 8]
    before["comm_group"], before["seq_offset"], before["joined_by"] = [70, 70, 80, 80], [0, 5, 0, 9], "traffic"
    now = before.copy()
    now["seq_offset"] = [3, 0, 1, 1]
    now["error"] = ["", "ambiguous", "", ""]
    kept = keep_alignment(now, before)
    # The group with an error as it was, with all of its ranks; the other as it is.
    assert kept["seq_offset"].tolist() == [0, 5, 1, 1]
    assert not (kept["error"] != "").any()
    before["error"] = "too few calls to line up"
    assert np.array_equal(keep_alignment(now, before), now)
    assert np.array_equal(keep_alignment(now, np.empty(0, COMMUNICATOR)), now)


def two_that_wait(short: slice, *, ends: bool = False) -> list[RankCalls]:
    """Two ranks that wait for each of their equal calls, the second one from call 40 of the first on. Some of its waits
    are so short that those calls seem to end with the next. ``ends``: when calls end is known otherwise."""
    rng = np.random.default_rng(5)
    begun = np.cumsum(rng.integers(20, 40, 240)) * 1_000_000
    done = begun + rng.integers(5, 15, 240) * 1_000_000
    ranks = []
    for rank, seen in ((0, slice(0, 200)), (1, slice(40, 240))):
        calls = np.zeros(200, COLLECTIVE)
        calls["ts_ns"], calls["seq"], calls["comm"], calls["count"] = begun[seen], np.arange(200), 7 + rank, 9
        calls["call"] = BY_SYMBOL["ncclAllReduce"].id
        waits = (done - begun)[seen].copy()
        if rank:
            waits[short] = 1_000
        ranks.append(RankCalls(rank, calls, begun[seen], waits, ends=done[seen] if ends else None))
    return ranks


def lined_up(ranks: list[RankCalls]) -> bool:
    """Whether that is found out."""
    rows = find_groups(ranks)
    assert len(rows) == 2
    return rows["error"].tolist() == ["", ""] and int(rows["seq_offset"][1] - rows["seq_offset"][0]) == 40


def test_a_wait_that_was_too_short_to_count_decides_nothing() -> None:
    assert lined_up(two_that_wait(slice(5, 6)))


def test_many_waits_that_were_too_short_to_count_decide_nothing() -> None:
    assert lined_up(two_that_wait(slice(0, 50, 4)))


def test_ends_that_are_known_need_no_waits() -> None:
    """One rank calls late, and nobody waits where it is seen; on the GPU all calls' ends are known."""
    for ends in (False, True):
        ranks = two_that_wait(slice(0, 0), ends=ends)
        ranks[1].collectives["ts_ns"] += ranks[1].sync_duration.astype(np.uint64) // 2
        none = np.empty(0, np.int64)
        assert lined_up([replace(calls, sync_ts=none, sync_duration=none) for calls in ranks]) == ends


def test_the_cost_of_a_call_a_step_does_not_grow_with_the_steps_squared() -> None:
    """Each call of one may be each of the other's: few are compared."""
    compared = []
    for steps in (200, 4000):
        begun = np.arange(steps) * 50_000_000
        ranks = []
        for rank in (0, 1):
            calls = np.zeros(steps, COLLECTIVE)
            calls["ts_ns"], calls["seq"], calls["comm"], calls["count"] = begun + rank * 1000, np.arange(steps), 7, 9
            calls["call"] = BY_SYMBOL["ncclAllReduce"].id
            ranks.append(RankCalls(rank, calls, begun + 2000, np.full(steps, 10_000_000)))
        seen = []

        def near(*words: Any, seen: list[int] = seen, real: Any = communicators._near, **more: Any) -> Any:
            chosen = real(*words, **more)
            seen.append(len(chosen))
            return chosen

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(communicators, "_near", near)
            rows = find_groups(ranks)
        assert rows["error"].tolist() == ["", ""]
        compared.append(seen)
    assert compared == [[8], [8]]


def test_groups_can_be_found_a_part_at_a_time() -> None:
    ranks = [replace(calls, rank=rank) for rank in range(3) for calls in two_that_wait(slice(0, 0))[:1]]
    found = []

    def left() -> Iterator[None]:
        found.append((yield from groups_in_parts(ranks)))

    assert sum(1 for _ in left()) >= 3 + 2  # ranks, and pairs
    assert np.array_equal(found[0], find_groups(ranks))
