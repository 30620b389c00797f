"""Periods and steps against synthetic jobs whose true steps are known."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from argus.model.calls import BY_SYMBOL
from argus.model.records import COLLECTIVE, LAUNCH
from argus.semantics.groups.communicators import COMMUNICATOR
from argus.semantics.steps import by_calls as steps_module
from argus.semantics.steps.by_calls import BY_COLLECTIVES, BY_LAUNCHES, ITERATION, StepTracker
from argus.semantics.steps.period import find_period
from tests.builders.stored_job import analyse
from tests.builders.synthetic_job import ALL_REDUCE, MS, Fault, Job, Op, ddp, simulate


def repeat(unit: Sequence[int], times: int, cut: int = 0) -> NDArray[np.int64]:
    return np.tile(np.array(unit, np.int64), times)[cut:]


def layered(layers: int, per_layer: int, head: int) -> list[int]:
    """A step of equal layers: the trap of a period finder."""
    return [*range(1000, 1000 + head), *(list(range(per_layer)) * layers)]


@given(
    layers=st.integers(1, 40),
    per_layer=st.integers(1, 12),
    head=st.integers(1, 12),
    times=st.integers(6, 12),
    cut=st.integers(0, 200),
)
@settings(max_examples=200, deadline=None)
def test_a_step_of_equal_layers_is_not_taken_for_a_layer(
    layers: int, per_layer: int, head: int, times: int, cut: int
) -> None:
    unit = layered(layers, per_layer, head)
    period = find_period(repeat(unit, times, cut % len(unit)))
    assert period is not None
    assert period.length == len(unit)
    assert period.score == 1.0


@given(unit=st.lists(st.integers(0, 3), min_size=1, max_size=60), times=st.integers(4, 9))
@settings(max_examples=300, deadline=None)
def test_the_shortest_repetition_is_found(unit: list[int], times: int) -> None:
    codes = repeat(unit, times)
    exact = next(p for p in range(1, len(codes)) if (codes[p:] == codes[:-p]).all())
    period = find_period(codes)
    assert period is not None
    assert period.length <= exact
    if period.length < exact:  # allowed to be near-exact only
        assert period.score < 1.0


def test_more_than_fifty_equal_buckets_are_still_one_step() -> None:
    assert find_period(repeat([*([7] * 100), 1], 20)).length == 101  # type: ignore[union-attr]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_too_little_has_no_period(count: int) -> None:
    assert find_period(np.zeros(count, np.int64)) is None


def test_two_and_a_half_units_are_not_enough() -> None:
    assert find_period(repeat(range(100), 3)[:250]) is None
    assert find_period(repeat(range(100), 3)) is not None


def test_noise_has_no_period() -> None:
    assert find_period(np.random.default_rng(1).integers(0, 50, 20_000)) is None


def test_warm_up_and_a_rare_extra_call_do_not_hide_the_period() -> None:
    rng = np.random.default_rng(2)
    codes = np.concatenate([rng.integers(5000, 6000, 3000), np.insert(repeat(range(200), 120), 18_001, 77)])
    period = find_period(codes)
    assert period is not None
    assert period.length == 200
    assert 0.97 < period.score < 1


def true_steps(job: Job, steps: NDArray[np.void]) -> NDArray[np.int64]:
    """True index of the boundary that each found step ends on; fails if it ends elsewhere. Shape (n,)."""
    out = np.empty(len(steps), np.int64)
    for i, row in enumerate(steps):
        ends = job.boundaries[:, row["rank"]]
        place = int(np.searchsorted(ends, row["ts_ns"] + row["duration_ns"]))
        assert place < len(ends)
        assert ends[place] == row["ts_ns"] + row["duration_ns"], "a step ends between the true boundaries"
        out[i] = place
    return out


def sane(steps: NDArray[np.void]) -> None:
    """Numbers go up, steps have a length and do not overlap, on every rank."""
    assert steps.dtype == ITERATION
    for rank in np.unique(steps["rank"]):
        own = steps[steps["rank"] == rank]
        assert (np.diff(own["step"].astype(np.int64)) > 0).all()
        assert (own["duration_ns"] > 0).all()
        assert (own["ts_ns"][1:] >= own["ts_ns"][:-1] + own["duration_ns"][:-1]).all()
        assert ((own["confidence"] >= 0) & (own["confidence"] <= 1)).all()


CASES = {
    "plain": {},
    "warm-up": {"warmup": 9},
    "equal buckets": {"program": ddp(equal=True)},
    "tiny": {"program": ddp(layers=1, kernels=1)},
    "no loss sync": {"program": ddp(loss_sync=False)},
    "late attach": {"attach_ms": np.array([100, 900, 333, 555.0]), "inits": False},
    "late attach, slow rank": {
        "attach_ms": np.array([100, 900, 333, 555.0]),
        "inits": False,
        "faults": (Fault("compute", (2,), 3.0),),
    },
    "different kernels a rank": {"extra_kernels": {0: 3, 1: 1}},
    "tensor and data parallel": {
        "nranks": 4,
        "groups": {"dp": [(0, 2), (1, 3)], "tp": [(0, 1), (2, 3)]},
        "program": [*ddp()[:4], Op("collective", 0.5, group="tp", count=5, overlap=False), *ddp()[4:]],
    },
    "pipeline stages": {
        "nranks": 4,
        "groups": {"dp": [(0, 1), (2, 3)], "mp": [(0, 2), (1, 3)]},
        "extra_kernels": {0: 4, 1: 4},
        "program": [*ddp(), Op("collective", 0.1, group="mp", count=1)],
    },
}


@pytest.mark.thorough(first=4)
@pytest.mark.parametrize("batches", [1, 41])
@pytest.mark.parametrize("name", CASES)
def test_steps_end_where_they_do_and_have_the_same_number_on_every_rank(name: str, batches: int) -> None:
    job = simulate(steps=40, **CASES[name])  # type: ignore[arg-type]
    _, steps, _ = analyse(job, batches)
    sane(steps)
    assert set(np.unique(steps["rank"])) == set(range(len(job.ranks)))
    if len(job.groups) == 1:
        offset = true_steps(job, steps) - steps["step"]
    else:
        # The largest gap may lie after another group's call: any boundary will do, if it is one a step.
        ends = steps["ts_ns"] + steps["duration_ns"]
        true = [np.searchsorted(job.boundaries[:, r], end) for r, end in zip(steps["rank"], ends, strict=True)]
        offset = np.array(true) - steps["step"]
    assert len(np.unique(offset)) == 1
    assert len(steps) > 25 * len(job.ranks)
    assert (steps["confidence"] == 1).mean() > 0.95
    assert (steps["method"] == BY_COLLECTIVES).all()
    assert steps["step"].min() == 0


def test_what_lacks_a_communicator_in_regular_use_is_no_step() -> None:
    """More micro-batches than a unit is put to the proof over. While they come in, the first step's may deceive it."""
    program = [
        *[Op("kernels", 1.0, (1, 2, 3)), Op("collective", 0.1, group="tp", count=5, overlap=False)] * 25,
        Op("collective", 1.0, count=9),
        Op("kernels", 1.0, (901, 902)),
        Op("sync"),
    ]
    groups = {"dp": [(0, 2), (1, 3)], "tp": [(0, 1), (2, 3)]}
    _, steps, _ = analyse(simulate(steps=40, program=program, groups=groups))
    sane(steps)
    assert 35 * 4 < len(steps) <= 40 * 4
    assert (steps["confidence"] == 1).mean() > 0.95


def test_batches_do_not_change_the_steps() -> None:
    job = simulate(steps=40, warmup=5, program=ddp(equal=True))
    found = [analyse(job, batches)[1] for batches in (1, 3, 100)]
    for other in found[1:]:
        assert sorted(other.tolist()) == sorted(found[0].tolist())


def test_a_program_of_four_micro_batches_is_one_step_wherever_argus_attaches() -> None:
    micro = [Op("data", 1.0), Op("h2d"), Op("kernels", 20.0, tuple(range(6)), phase="forward")]
    program = [
        *micro * 4,
        *(Op("collective", 1.0, count=9 + i) for i in range(3)),
        Op("wait"),
        Op("kernels", 1.0, (99,)),
    ]
    for attach in (0.0, 1.1, 2.3, 3.9):
        job = simulate(2, 40, program, attach_ms=np.full(2, attach), inits=False)
        # Without synchronise calls the offset is known only because both were attached at once.
        for rank in job.ranks:
            rank.control = simulate(2, 1, program).ranks[rank.rank].control.copy()
            rank.control["handle"] = rank.collectives["comm"][0]
        _, steps, _ = analyse(job, 23)
        sane(steps)
        true_steps(job, steps)
        assert len(steps) > 2 * 35


def test_lost_records_cost_confidence_not_numbers() -> None:
    job = simulate(steps=80, drop=0.002)
    _, steps, _ = analyse(job, 20)
    sane(steps)
    offset = true_steps(job, steps) - steps["step"]
    assert len(np.unique(offset)) == 1
    assert len(steps) > 4 * 70


@pytest.mark.parametrize("every", [7, 25])
@pytest.mark.parametrize("batches", [1, 30])
def test_evaluation_every_few_steps_makes_no_nonsense(every: int, batches: int) -> None:
    job = simulate(steps=100, eval_every=every)
    _, steps, _ = analyse(job, batches)
    sane(steps)
    numbers = {}
    for row, true in zip(steps, true_steps(job, steps).tolist(), strict=True):
        assert numbers.setdefault(true, row["step"]) == row["step"], "ranks disagree"
    if every == 25:
        assert (steps["confidence"] == 1).mean() > 0.9
        assert (steps["confidence"] < 0.95).sum() == 3 * 4  # the step that an evaluation lies in, but for the last


@pytest.mark.thorough(first=2)
@pytest.mark.parametrize("batches", [1, 40])
@pytest.mark.parametrize("attach_ms", [0.0, 5050.0, 5950.0])
@pytest.mark.parametrize("every", [7, 10])
def test_evaluation_between_a_few_steps_is_no_part_of_a_longer_step(every: int, attach_ms: float, batches: int) -> None:
    """It launches what the steps launch, too; wherever Argus attaches."""
    job = simulate(steps=150, eval_every=every, attach_ms=np.full(4, attach_ms), inits=attach_ms == 0)
    _, steps, _ = analyse(job, batches)
    sane(steps)
    true = true_steps(job, steps)
    for rank in range(4):
        own = steps["rank"] == rank
        assert np.array_equal(np.diff(true[own]), np.ones(own.sum() - 1))
    # An evaluation calls a collective of its own: numbers are the program's all the same.
    assert len(set((true - steps["step"]).tolist())) == 1


@pytest.mark.parametrize("seen", [30, 50])
def test_a_rank_whose_calls_come_later_ends_its_steps_where_the_others_do(seen: int) -> None:
    """Between its calls and the newest of the others' lie evaluations, whose calls belong to no step."""
    job = simulate(steps=150, eval_every=7)
    groups, _, _ = analyse(job)
    tracker = StepTracker()
    tracker.align(groups)
    out = []
    cuts = [0, int(job.boundaries[seen].max()), int(job.boundaries[100].max()), 1 << 62]
    for turn, (first, others) in enumerate([(2, 0), (2, 1), (3, 3)]):
        for rank in job.ranks:
            had = [0, 0, 1][turn] if rank.rank else [0, 2, 2][turn]
            low, high = cuts[had], cuts[others if rank.rank else first]
            parts = [a[(a["ts_ns"] >= low) & (a["ts_ns"] < high)] for a in (rank.launches, rank.collectives)]
            tracker.feed(rank.rank, *parts)
        out.append(tracker.advance(final=turn == 2))
    steps = np.concatenate(out)
    sane(steps)
    true = true_steps(job, steps)
    assert len(set((true - steps["step"]).tolist())) == 1
    assert len(steps) > 4 * 140


@pytest.mark.parametrize("what", ["renamed", "moved", "one group of two", "late rank"])
def test_groups_that_are_seen_otherwise_leave_steps_alone(what: str) -> None:
    """Which ranks are in a communicator is concluded from times, anew every second; what was counted stands."""
    job = simulate(steps=120, **CASES["tensor and data parallel"])  # type: ignore[arg-type]
    before, _, _ = analyse(job)
    after = before.copy()
    if what == "renamed":
        after["comm_group"] += 1
    if what == "moved":
        after["seq_offset"] += 1000
    if what == "one group of two":
        for dimension in ("tp", "dp"):
            own = [job.handles[rank, dimension] for rank in range(4)]
            chosen = np.isin(after["comm"], own)
            after["comm_group"][chosen] = after["comm_group"][chosen].min()
            after["seq_offset"][chosen] += 17
    tracker = StepTracker()
    tracker.align(before)
    out = []
    cut = int(job.boundaries[60].max())
    for half, groups in ((0, before), (1, after)):
        tracker.align(groups)
        for rank in job.ranks:
            late = what == "late rank" and rank.rank == 3
            parts = [
                a[(a["ts_ns"] >= cut) if half else (a["ts_ns"] < cut) & (not late)]
                for a in (rank.launches, rank.collectives)
            ]
            tracker.feed(rank.rank, *parts)
        out.append(tracker.advance(final=bool(half)))
    steps = np.concatenate(out)
    sane(steps)
    ends = steps["ts_ns"] + steps["duration_ns"]
    true = [np.searchsorted(job.boundaries[:, r], end) for r, end in zip(steps["rank"], ends, strict=True)]
    assert len(np.unique(np.array(true) - steps["step"])) == 1
    assert not tracker.counters["steps_counted_anew"]
    assert len(np.unique(steps["collectives"])) == 1, "all end with the same call"
    for rank in range(4):
        own = steps["step"][steps["rank"] == rank].astype(np.int64)
        assert np.array_equal(own, np.arange(own[0], own[0] + len(own)))
        assert len(own) > (50 if what == "late rank" and rank == 3 else 110)


@pytest.mark.parametrize("wrong", [(3,), (0, 3)])
@pytest.mark.parametrize("doubtful", [False, True])
def test_a_rank_that_was_lined_up_wrongly_is_counted_anew(wrong: tuple[int, ...], doubtful: bool) -> None:
    """Its calls were taken for those of the step before; or nobody knew, and it counted alone."""
    job = simulate(steps=120, **CASES["tensor and data parallel"])  # type: ignore[arg-type]
    right, _, _ = analyse(job)
    before = right.copy()
    for rank in wrong:
        for dimension, calls in (("tp", 1), ("dp", 4)):
            own = (before["rank"] == rank) & (before["comm"] == job.handles[rank, dimension])
            assert own.sum() == 1
            before["seq_offset"][own] += calls
            if doubtful:
                before["error"][own] = "ambiguous"
    tracker = StepTracker(window=2000)  # so that it does not wait for the communicators
    unknown = before.copy()
    unknown["error"] = "too few calls to line up"
    parts: list[list[NDArray[np.void]]] = [[], []]
    cuts = [0, *job.boundaries[9::10].max(axis=1).tolist()]
    for turn, (low, high) in enumerate(pairwise(cuts)):
        half = turn >= len(cuts) // 2
        if half:
            tracker.align(unknown)
        tracker.align(right if half else before)
        for rank in job.ranks:
            calls = [a[(a["ts_ns"] > low) & (a["ts_ns"] <= high)] for a in (rank.launches, rank.collectives)]
            tracker.feed(rank.rank, *calls)
        parts[half].append(tracker.advance(final=high == cuts[-1]))
    out = [np.concatenate(half) for half in parts]
    sane(np.concatenate(out))
    for steps, agree in ((out[0], doubtful), (out[1], True)):
        ends = steps["ts_ns"] + steps["duration_ns"]
        true = [np.searchsorted(job.boundaries[:, r], end) for r, end in zip(steps["rank"], ends, strict=True)]
        shifts = np.array(true) - steps["step"]
        assert agree or len(np.unique(shifts)) > 1, "it was wrong"
        late = steps["ts_ns"] > job.boundaries[72].max()
        assert len(np.unique(shifts[late])) <= 1
        confidence = steps["confidence"][np.isin(steps["rank"], wrong) & (late if steps is out[1] else True)]
        assert len(confidence) > 20
        assert confidence.max() < 0.6 if doubtful and steps is out[0] else confidence.min() == 1
    assert len(out[1]) > 4 * 50
    if wrong == (3,):
        assert tracker.counters["steps_counted_anew"] == np.sum(out[0]["rank"] == 3)
    if not doubtful and wrong == (3,):
        kept = [steps["step"][steps["rank"] == 0].astype(np.int64) for steps in out]
        assert kept[1][0] == kept[0][-1] + 1, "of those who were right nothing changes"


def test_steps_go_on_where_they_were_when_calls_were_given_back() -> None:
    """A job that seemed to be over was not."""
    job = simulate(steps=60)
    groups, _, _ = analyse(job)
    tracker = StepTracker()
    tracker.align(groups)
    cut = int(job.boundaries[30].max()) + 1
    found = []
    for low, high in ((0, cut), (cut, 1 << 62)):
        for rank in job.ranks:
            parts = [a[(a["ts_ns"] >= low) & (a["ts_ns"] < high)] for a in (rank.launches, rank.collectives)]
            tracker.feed(rank.rank, *parts)
        found.append(tracker.advance(final=True))
        tracker.forget_calls()
        assert tracker.advance(final=True).size == 0
        assert sum(rank.room.nbytes for rank in tracker._ranks.values()) == 0
    steps = np.concatenate(found)
    sane(steps)
    assert len(set((true_steps(job, steps) - steps["step"]).tolist())) == 1
    # The step in which they were given back has no begin any more.
    assert all((steps["rank"] == rank.rank).sum() >= 55 for rank in job.ranks)


@pytest.mark.parametrize("moved", [0, 1000])
def test_a_changed_program_goes_on_counting(moved: int) -> None:
    before, after = simulate(steps=40, seed=3), simulate(steps=60, program=ddp(layers=6, kernels=3), seed=3)
    shift = int(before.boundaries.max()) + 30 * MS - int(after.ranks[0].cuda["ts_ns"].min())
    tracker = StepTracker()
    groups, _, _ = analyse(before)
    tracker.align(groups)
    out = []
    for job, move in ((before, 0), (after, shift)):
        if move:
            groups["seq_offset"] += moved
            tracker.align(groups)
        for rank in job.ranks:
            launches, collectives = rank.launches.copy(), rank.collectives.copy()
            if move:
                launches["ts_ns"] += move
                collectives["ts_ns"] += move
                collectives["seq"] += len(before.ranks[rank.rank].collectives)
                collectives["comm"] = before.ranks[rank.rank].collectives["comm"][0]
            tracker.feed(rank.rank, launches, collectives)
        out.append(tracker.advance(final=bool(move)))
    sane(np.concatenate(out))
    ends = after.boundaries + shift
    late = out[1][out[1]["confidence"] == 1]
    assert len(late) > 4 * 50
    for row in late:
        assert row["ts_ns"] + row["duration_ns"] in ends[:, row["rank"]]
    assert 90 < late["step"].max() < 110
    by_true: dict[int, int] = {}
    for row in late:
        true = int(np.searchsorted(ends[:, row["rank"]], row["ts_ns"] + row["duration_ns"]))
        assert by_true.setdefault(true, int(row["step"])) == row["step"]


def test_one_gpu_without_collectives_counts_launches() -> None:
    job = simulate(
        1, 40, [Op("data", 20.0), Op("h2d"), Op("kernels", 5.0, tuple(range(30))), Op("collective", count=1)]
    )
    tracker = StepTracker()
    tracker.feed(0, job.ranks[0].launches, np.empty(0, COLLECTIVE))
    steps = tracker.advance(final=True)
    sane(steps)
    assert (steps["method"] == BY_LAUNCHES).all()
    assert len(steps) >= 38
    assert steps["step"].tolist() == list(range(len(steps)))
    # The data loader's 20 ms are the gap: steps start at the first launch after the last one before it.
    last = job.ranks[0].launches["ts_ns"][29::30]
    assert np.isin(steps["ts_ns"] + steps["duration_ns"], last).all()


def test_nothing_is_reported_before_the_alignment_is_known() -> None:
    job = simulate(steps=30)
    tracker = StepTracker()
    for rank in job.ranks:
        tracker.feed(rank.rank, rank.launches, rank.collectives)
    assert len(tracker.advance(final=True)) == 0
    groups, expected, _ = analyse(job)
    tracker.align(groups)
    assert len(tracker.advance(final=True)) == len(expected) > 0


def test_an_unknown_alignment_is_never_sure() -> None:
    job = simulate(steps=30)
    groups, _, _ = analyse(job)
    groups["error"] = "unknown"
    tracker = StepTracker()
    tracker.align(groups)
    for rank in job.ranks:
        tracker.feed(rank.rank, rank.launches, rank.collectives)
    assert len(tracker.advance()) == 0  # more calls may decide
    steps = tracker.advance(final=True)
    assert len(steps)
    assert (steps["confidence"] <= 0.5).all()


def test_memory_is_bounded() -> None:
    job = simulate(2, 200)
    tracker = StepTracker(window=2000)
    groups, expected, _ = analyse(job)
    tracker.align(groups)
    out = []
    edges = np.linspace(0, float(job.boundaries.max() + 1), 60)
    for low, high in pairwise(edges):
        for rank in job.ranks:
            tracker.feed(
                rank.rank, *(a[(a["ts_ns"] >= low) & (a["ts_ns"] < high)] for a in (rank.launches, rank.collectives))
            )
        out.append(tracker.advance(final=high == edges[-1]))
        assert all(len(state.calls) <= 4000 for state in tracker._ranks.values())
    assert sum(len(part) for part in out) == len(expected)


def test_numbered_boundaries_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest half at least is known: a rank that is behind gets the numbers that the first one had."""
    monkeypatch.setattr(steps_module, "KEPT_BOUNDARIES", 100)
    family = steps_module._Family(1, [steps_module._Epoch(0, 4)], 0)
    for step in range(10_000):
        assert family.number(4 * step + 3) == step
        assert len(family.calls) == len(family.numbers) <= 100
    assert [family.number(4 * step + 3) for step in range(9_950, 10_000)] == list(range(9_950, 10_000))
    assert len(family.calls) <= 100
    assert family.calls.itemsize == family.numbers.itemsize == 8


def test_batches_of_two_threads_may_interleave() -> None:
    job = simulate(2, 40)
    groups, expected, _ = analyse(job)
    tracker = StepTracker()
    tracker.align(groups)
    out = []
    none = np.empty(0, LAUNCH)
    for low in range(40):
        # Launches of one thread arrive 20 ms after the collectives of the other.
        for rank in job.ranks:
            begin = int(rank.launches["ts_ns"].min())
            window = [begin + low * 100 * MS, begin + (low + 1) * 100 * MS]
            late = [window[0] - 20 * MS if low else 0, window[1] - 20 * MS if low < 39 else 1 << 62]
            window[1] = window[1] if low < 39 else 1 << 62
            c, k = rank.collectives, rank.launches
            tracker.feed(rank.rank, none, c[(c["ts_ns"] >= window[0]) & (c["ts_ns"] < window[1])])
            tracker.feed(rank.rank, k[(k["ts_ns"] >= late[0]) & (k["ts_ns"] < late[1])], c[:0])
        out.append(tracker.advance(final=low == 39))
    found = np.concatenate(out)
    assert tracker.counters["late_calls"] == 0
    assert sorted(found.tolist()) == sorted(expected.tolist())


def test_wrong_records_are_refused() -> None:
    with pytest.raises(TypeError, match="LAUNCH"):
        StepTracker().feed(0, np.empty(0, COLLECTIVE), np.empty(0, LAUNCH))
    assert ALL_REDUCE != 0


class AllPairs(StepTracker):
    """The same, where a new family is compared with those of all other ranks."""

    def _shift(self, state: Any, family: Any) -> int:
        settled = [other for other in self._ranks.values() if (f := self._family(other)) and f.shift is not None]
        for other in settled:
            differences = self._shared(other, state)
            if len(differences):
                return int(Tally(differences.tolist()).most_common(1)[0][0]) + self._family(other).shift  # type: ignore
        self._groups_of[state.rank], kept = {}, self._groups_of[state.rank]
        shift = super()._shift(state, family)  # by time
        self._groups_of[state.rank] = kept
        return shift

    def _families_of(self, rank: int, groups: Any) -> Any:
        found = {}
        for wanted in groups:
            pairs: dict[int, Any] = {}
            for key, (family, offset) in self._counted.items():
                there, now = self._groups[key]
                if there == wanted and (family.trusted or key[0] == rank):
                    pairs.setdefault(id(family), (family, offset - now))
            found[wanted] = max(pairs.values(), key=lambda pair: (len(pair[0].members), -pair[0].group), default=None)
        return found


def in_pairs(nranks: int, groups: Sequence[Sequence[int]], *, steps: int = 40, seed: int = 0) -> list[Any]:
    """Ranks that call each of their groups once a step, from some step on: the groups, and each rank's calls."""
    rng = np.random.default_rng(seed)
    rows, calls = [], []
    for rank in range(nranks):
        own = [number for number, members in enumerate(groups) if rank in members]
        since = int(rng.integers(0, 6)) if seed else 0
        made = np.zeros(len(own) * (steps - since), COLLECTIVE)
        step, place = np.divmod(np.arange(len(made)), max(len(own), 1))
        made["comm"] = np.array(own)[place] + 100 if own else 0
        made["seq"], made["call"], made["count"] = step, ALL_REDUCE, 1 + place
        made["ts_ns"] = (10 + (since + step) * 20 + place) * MS + rng.integers(0, MS, len(made)) + rank
        calls.append(made)
        for number in own:
            rows.append((rank, 100 + number, 1000 + number, -1, 2, since, "name", "" if rng.random() < 0.9 else "?"))
    return [np.array(rows, COMMUNICATOR), calls]


@pytest.mark.parametrize("seed", range(1, 25))
def test_families_are_joined_as_if_all_pairs_of_ranks_were_compared(seed: int) -> None:
    rng = np.random.default_rng(seed)
    nranks = int(rng.integers(1, 9))
    groups = [rng.choice(nranks, int(rng.integers(1, nranks + 1)), replace=False).tolist() for _ in range(nranks)]
    known, calls = in_pairs(nranks, groups, seed=seed)
    found = []
    for tracker in (StepTracker(), AllPairs()):
        tracker.align(known)
        for rank, made in enumerate(calls):
            tracker.feed(rank, np.empty(0, LAUNCH), made)
        found.append((tracker.advance(final=True).tolist(), +tracker.counters))
    assert found[0] == found[1]


def test_ranks_without_a_group_in_common_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0
    shared = StepTracker._shared

    def counted(*args: Any) -> NDArray[np.int64]:
        nonlocal compared
        compared += 1
        return shared(*args)

    monkeypatch.setattr(StepTracker, "_shared", counted)
    known, calls = in_pairs(40, [[rank] for rank in range(40)])
    tracker = StepTracker()
    tracker.align(known)
    for rank, made in enumerate(calls):
        tracker.feed(rank, np.empty(0, LAUNCH), made)
    assert len(np.unique(tracker.advance(final=True)["rank"])) == 40
    assert compared == 0
    assert tracker.counters["families_joined_by_time"] == 39


@pytest.mark.parametrize("final", [True, False])
def test_ranks_without_a_period_are_looked_at_in_turns(monkeypatch: pytest.MonkeyPatch, final: bool) -> None:
    """However many they are, a look goes through a bounded number of calls. Ranks with one are not kept waiting."""
    monkeypatch.setattr(steps_module, "MOST_CALLS", 10_000)
    looked: list[int] = []
    detect = StepTracker._detect
    monkeypatch.setattr(
        StepTracker, "_detect", lambda self, state, *more: (looked.append(state.rank), detect(self, state, *more))[1]
    )
    tracker, chosen = StepTracker(), np.random.default_rng(3)
    for rank in range(10):
        calls = np.zeros(4000, LAUNCH)
        calls["ts_ns"], calls["handle"] = 10**9 + 1000 * np.arange(4000), chosen.integers(1, 1 << 40, 4000)
        calls["call"], calls["pid"] = BY_SYMBOL["cuLaunchKernel"].id, rank
        tracker.feed(rank, calls, np.empty(0, COLLECTIVE))
    turns = []
    for _ in range(5):
        looked.clear()
        tracker.advance(until_ns=1 << 60, final=final)
        turns.append(list(looked))
        assert tracker.waiting is (final and len(turns) < 5)
    assert all(len(turn) == 2 for turn in turns)
    assert sorted(rank for turn in turns for rank in turn) == list(range(10))


@pytest.mark.parametrize("seed", range(5))
def test_steps_are_those_of_one_look_whatever_the_turns(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    chosen = np.random.default_rng(seed)
    units = {rank: chosen.integers(1, 1 << 40, 20 + rank) for rank in range(6)}
    found = []
    for most in (1 << 30, 1500):
        monkeypatch.setattr(steps_module, "MOST_CALLS", most)
        tracker, rows = StepTracker(), []
        for turn in range(12):
            for rank, unit in units.items():
                calls = np.zeros(3 * len(unit), LAUNCH)
                calls["handle"], calls["call"] = np.tile(unit, 3), BY_SYMBOL["cuLaunchKernel"].id
                calls["ts_ns"] = 10**9 * (turn + 1) + (10**9 // len(calls)) * np.arange(len(calls))
                tracker.feed(rank, calls, np.empty(0, COLLECTIVE))
            rows.append(tracker.advance())
        rows.append(tracker.advance(final=True))
        while tracker.waiting:
            rows.append(tracker.advance(final=True))
        found.append(np.sort(np.concatenate(rows), order=["rank", "ts_ns"]))
    assert len(found[0]) > 150
    assert found[0].tolist() == found[1].tolist()
