"""Steps from one event a step, seen throughout or in windows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.semantics.steps import thinned
from argus.semantics.steps.by_calls import BY_PULSES, ITERATION
from argus.semantics.steps.thinned import ALIGNED, EXACT, GUESSED, Int, ThinnedSteps, find_pulse

MS = 10**6


def rows_of(steps: ThinnedSteps, until: int = 1 << 62, final: bool = True) -> list[tuple[int, int, int, int, float]]:
    found = steps.advance(until, final=final)
    assert (found["method"] == BY_PULSES).all()
    columns = (found[name].tolist() for name in ("rank", "step", "ts_ns", "duration_ns", "confidence"))
    return list(zip(*columns, strict=True))


def test_steps_go_on_from_where_they_were_found_otherwise() -> None:
    steps = ThinnedSteps()
    steps.begin(0, 1, number=7, after_ns=100 * MS, step_ns=3 * MS)
    steps.feed(0, np.arange(101, 120, 3) * MS)
    assert rows_of(steps) == [(0, 7 + i, (101 + 3 * i) * MS, 3 * MS, 1.0) for i in range(6)]
    assert steps.step_ns == 3 * MS


def test_micro_batches_make_one_step() -> None:
    """Four backward passes a step, of which two were there already."""
    steps = ThinnedSteps()
    steps.begin(0, 4, number=5, after_ns=MS, step_ns=10 * MS, pulses=2)
    steps.feed(0, np.array([8, 9, 12, 14, 16, 18, 22, 24, 26, 28, 32]) * MS)
    assert rows_of(steps) == [(0, 6, 12 * MS, 10 * MS, 1.0), (0, 7, 22 * MS, 10 * MS, 1.0)]


def test_batches_of_pulses_change_nothing() -> None:
    pulses = np.arange(1, 50) * 2 * MS
    whole, parts = ThinnedSteps(), ThinnedSteps()
    for steps in (whole, parts):
        steps.begin(0, 3, number=0, after_ns=MS, step_ns=6 * MS)
    whole.feed(0, pulses)
    found = []
    for part in np.array_split(pulses, 11):
        parts.feed(0, part)
        found += rows_of(parts, int(part[-1]) - MS, final=False)
    assert found + rows_of(parts) == rows_of(whole)


@pytest.mark.parametrize(("other_hosts", "sure"), [(False, ALIGNED), (True, GUESSED)])
def test_what_a_window_cuts_is_no_step_and_numbers_go_on(other_hosts: bool, sure: float) -> None:
    """Steps of 10 ms, seen from 100 to 150 ms and from 400 to 450 ms. Another host may estimate what was between
    otherwise."""
    steps = ThinnedSteps(other_hosts=other_hosts)
    steps.begin(0, 1, number=3, after_ns=96 * MS, step_ns=10 * MS)
    steps.unseen(150 * MS, 400 * MS)
    steps.feed(0, np.array([105, 115, 125, 135, 145, 405, 415, 425, 435, 445]) * MS)
    found = rows_of(steps)
    assert [row[1] for row in found] == [3, 4, 5, 6, 33, 34, 35, 36]
    assert {row[3] for row in found} == {10 * MS}
    assert [row[4] for row in found] == pytest.approx([EXACT] * 4 + [sure] * 4)
    assert steps.counters["steps_not_observed"] == 25  # those that lay between, and the cut one


def test_after_a_gap_all_ranks_have_the_same_numbers() -> None:
    """Though what each would conclude alone differs: the second rank's steps were not known."""
    steps = ThinnedSteps()
    steps.begin(0, 1, number=0, after_ns=MS, step_ns=10 * MS)
    steps.begin(1, 1, number=0, after_ns=MS, step_ns=11 * MS)
    steps.unseen(60 * MS, 700 * MS)
    for rank, late in ((0, 0), (1, 2)):
        steps.feed(rank, (np.array([11, 21, 31, 41, 51, 701, 711, 721, 731]) + late) * MS)
    found = rows_of(steps)
    assert [row[1] for row in found if row[0] == 0] == [row[1] for row in found if row[0] == 1]


@pytest.mark.thorough(first=3)
@pytest.mark.parametrize("often", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("seed", range(4))
def test_steps_between_windows_are_as_many_as_fit_though_some_take_long(often: float, seed: int) -> None:
    """Beside other load most steps take 1 ms and some 20: counted by the usual one there would be too many."""
    rng = np.random.default_rng(seed)
    durations = rng.normal(1.0, 0.05, 60_000) + 20 * (rng.random(60_000) < often)
    at = np.cumsum(durations * MS).astype(np.int64)
    steps = ThinnedSteps()
    steps.begin(0, 1)
    windows = [(begin, begin + 50 * MS) for begin in range(int(at[0]), int(at[-1]), 500 * MS)]
    for (begin, end), (following, _) in zip(windows, [*windows[1:], (int(at[-1]), 0)], strict=True):
        steps.feed(0, at[(at >= begin) & (at < end)])
        steps.unseen(end, following)
    rows = steps.advance(int(at[-1]) + 1, final=True)
    true = np.searchsorted(at, rows["ts_ns"][[0, -1]])
    error = (rows["step"][-1] - rows["step"][0]) / (true[1] - true[0]) - 1
    assert abs(error) < (0.02 if not often else 0.08)


@pytest.mark.parametrize("turn_ms", [13, 40, 400])
def test_few_steps_in_a_window_are_enough_however_often_they_are_asked_for(turn_ms: int) -> None:
    """Nine steps in a window of 100 ms, every second; one step in four takes 20 ms, the others 8."""
    rng = np.random.default_rng(5)
    at = np.cumsum((rng.normal(8.0, 0.5, 12_000) + 12 * (np.arange(12_000) % 4 == 0)) * MS).astype(np.int64)
    begins = np.arange(int(at[0]), int(at[-1]), 1000 * MS)
    steps = ThinnedSteps()
    steps.begin(0, 1)
    found = []
    for begin, before in zip(begins.tolist(), [0, *(begins + 100 * MS).tolist()], strict=False):
        if before:
            steps.unseen(before, begin)
        for turn in range(begin, begin + 1000 * MS, turn_ms * MS):
            inside = (at >= turn) & (at < min(turn + turn_ms * MS, begin + 100 * MS))
            steps.feed(0, at[inside])
            found.append(steps.advance(turn, final=False))
    rows = np.concatenate(found)
    true = np.searchsorted(at, rows["ts_ns"][[0, -1]])
    assert abs((rows["step"][-1] - rows["step"][0]) / (true[1] - true[0]) - 1) < 0.01


@pytest.mark.thorough(first=2)
@pytest.mark.parametrize("seed", range(4))
def test_a_thread_makes_no_steps_while_it_waits_for_a_cpu(seed: int) -> None:
    """Steps of half a millisecond beside other load, which has the CPU for up to 40 ms at a time, and now and then for
    half a second: windows say nothing of how much of the time between them the thread had."""
    rng = np.random.default_rng(seed)
    ran, waited = rng.exponential(12, 4_000) * MS, rng.exponential(20, 4_000) * MS
    waited[::80] = 500 * MS
    turns = np.cumsum(ran + waited)
    own = np.arange(0, int(ran.sum()), MS // 2)  # by the thread's own clock
    place = np.searchsorted(np.cumsum(ran), own)
    at = (own + np.cumsum(waited)[place]).astype(np.int64)
    queues: dict[int, list[tuple[int, int]]] = {}
    steps = ThinnedSteps(queues=queues)
    steps.begin(0, 1)
    moments = np.arange(int(at[0]), int(at[-1]), 400 * MS)
    so_far = np.interp(moments, np.concatenate([[0], np.stack([turns - ran, turns], 1).ravel()]),
                       np.concatenate([[0], np.repeat(np.cumsum(waited), 2)]))  # fmt: skip
    queues[0] = list(zip(moments.tolist(), so_far.astype(np.int64).tolist(), strict=True))
    ends, nexts = moments[1::2].tolist(), moments[2::2].tolist()
    for begin, end, following in zip(moments[::2].tolist(), ends, nexts, strict=False):
        steps.feed(0, at[(at >= begin) & (at < end)])
        steps.unseen(end, following)
    rows = steps.advance(int(at[-1]) + 1, final=True)
    first, last = np.searchsorted(at, rows["ts_ns"][[0, -1]])
    assert abs((rows["step"][-1] - rows["step"][0]) / (last - first) - 1) < 0.02
    # also of each time that was not seen: by the windows alone it would be anything
    gaps = np.flatnonzero(np.diff(rows["ts_ns"]) > 350 * MS)
    found = rows["step"][gaps + 1] - rows["step"][gaps]
    true = np.searchsorted(at, rows["ts_ns"][gaps + 1]) - np.searchsorted(at, rows["ts_ns"][gaps])
    assert np.median(np.abs(found - true)) < 0.06 * np.median(true)


WINDOW_MS, PERIOD_MS = 1000, 2000


def disturbed_at_first(usual_ms: float, slow_ms: float, slow_until_ms: int, until_ms: int, seed: int = 0) -> Int:
    """When steps begin that take longer at first, while Argus attaches, ns, shape (n,)."""
    rng = np.random.default_rng(seed)
    at, begins = 0.0, []
    while at < until_ms:
        begins.append(at)
        at += (slow_ms if at < slow_until_ms else usual_ms) * rng.normal(1, 0.05)
    return (np.array(begins) * MS).astype(np.int64) + MS


def walk(steps: ThinnedSteps, pulses: dict[int, Int], windows: list[tuple[int, int]], turn_ms: int) -> NDArray[np.void]:
    """Feeds what falls into windows (begin and end, ms), and asks for steps in turns."""
    found = [np.empty(0, ITERATION)]
    for number, (begin, end) in enumerate(windows):
        if number:
            steps.unseen(windows[number - 1][1] * MS, begin * MS)
        for turn in range(begin, end, turn_ms):
            for rank, at in pulses.items():
                steps.feed(rank, at[(at >= turn * MS) & (at < min(turn + turn_ms, end) * MS)])
            found.append(steps.advance((turn - 5) * MS))
    found.append(steps.advance(1 << 62, final=True))
    return np.concatenate(found)


def far_off(rows: NDArray[np.void], at: Int) -> float:
    """How many steps too many the numbers make, from the first row to the last, as a share."""
    true = np.searchsorted(at, rows["ts_ns"][[0, -1]])
    return float((rows["step"][-1] - rows["step"][0]) / (true[1] - true[0]) - 1)


@pytest.mark.parametrize("seen_ms", [40, 1500])
@pytest.mark.parametrize("seed", range(3))
def test_a_disturbed_beginning_says_nothing_of_the_time_between_windows(seen_ms: int, seed: int) -> None:
    """Steps of 1 ms take 1.3 at first, while Argus attaches and their pulses are seen throughout."""
    at = disturbed_at_first(1.0, 1.3, seen_ms, 12_000, seed)
    steps = ThinnedSteps()
    steps.begin(0, 1, number=0, after_ns=int(at[0]), step_ns=round(1.3 * MS))
    windows = [(0, seen_ms), *((begin, begin + WINDOW_MS) for begin in range(2 * PERIOD_MS, 12_000, PERIOD_MS))]
    rows = walk(steps, {0: at[1:]}, windows, 20)
    true = np.searchsorted(at, rows["ts_ns"][-1])
    assert abs(rows["step"][-1] / true - 1) < 0.01
    assert abs(steps.counters["steps_not_observed"] + len(rows) - true) < 0.01 * true
    assert (np.diff(rows["step"].astype(np.int64)) > 0).all()


@pytest.mark.parametrize("usual_ms", [0.5, 2.0])
def test_numbers_only_rise_and_all_ranks_have_the_same_whatever_the_beginning_was_like(usual_ms: float) -> None:
    """Twice and half as fast as later: what was counted too much at first is left out of what follows."""
    at = disturbed_at_first(usual_ms, 1.0, 1500, 20_000)
    windows = [(0, 1500), *((begin, begin + WINDOW_MS) for begin in range(2 * PERIOD_MS, 20_000, PERIOD_MS))]
    found = []
    for turn_ms in (20, 70):  # however often steps are asked for
        steps = ThinnedSteps()
        for rank in (0, 1):
            steps.begin(rank, 1, number=0, after_ns=int(at[0]), step_ns=MS)
        rows = walk(steps, {0: at[1:], 1: at[1:] + MS // 20}, windows, turn_ms)
        begins = []
        for rank in (0, 1):
            of_rank = rows[rows["rank"] == rank]
            assert (np.diff(of_rank["step"].astype(np.int64)) > 0).all()
            assert abs(far_off(of_rank, at)) < 0.01
            begins.append(dict(zip(of_rank["step"].tolist(), of_rank["ts_ns"].tolist(), strict=True)))
        both = begins[0].keys() & begins[1].keys()
        assert len(both) >= len(begins[0]) - len(windows)  # the edge of a window may cut one rank's step alone
        assert all(begins[1][step] - begins[0][step] == MS // 20 for step in both)
        found.append(begins[0])
    assert found[0] == found[1]


@pytest.mark.parametrize("turn_ms", [9, 500])
@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_begin_steps_far_apart_have_the_same_numbers(seed: int, turn_ms: int) -> None:
    """The second comes up to 0.8 of a step before or after the first, so that the nearest is at times another step.
    Steps scatter, and each rank by itself would estimate otherwise how many a gap had."""
    rng = np.random.default_rng(seed)
    at = np.cumsum((rng.normal(10.0, 1.0, 6_000) + 20 * (rng.random(6_000) < 0.1)) * MS).astype(np.int64)
    lag = np.convolve(rng.normal(0, 60 * MS, 6_000), np.ones(400) / 400, "same")
    pulses = {0: at, 1: np.sort(at + np.clip(lag, -8 * MS, 8 * MS).astype(np.int64))}
    steps = ThinnedSteps()
    windows = [(begin, begin + 45) for begin in range(1_000, int(at[-1]) // MS, 1_000)]
    for rank in pulses:
        steps.begin(rank, 1)
    rows = walk(steps, pulses, windows, turn_ms)
    off = {rank: rows["step"][rows["rank"] == rank]
           - np.searchsorted(pulses[rank], rows["ts_ns"][rows["rank"] == rank]) for rank in pulses}  # fmt: skip
    begun = {rank: rows["ts_ns"][rows["rank"] == rank] for rank in pulses}
    between = np.abs(begun[1][:, None] - begun[0][None])
    apart = np.abs(off[1] - off[0][between.argmin(axis=1)])[between.min(axis=1) < 45 * MS]
    assert len(apart) > 100
    assert apart.max() <= 1
    assert np.mean(apart) < 0.3


def test_windows_in_which_everything_is_seen_say_nothing_of_the_time_between_windows() -> None:
    """Samples of 60 ms, in which steps take 1.2 ms instead of 1, beside windows of 200 ms."""
    spans, at, now = [], [], 0.0
    for begin in range(0, 20_000, PERIOD_MS):
        spans += [(begin, begin + 60, True), (begin + 1000, begin + 1200, False)]
    while now < 20_000:
        at.append(now)
        now += 1.2 if any(begin <= now < end for begin, end, sample in spans if sample) else 1.0
    pulses = (np.array(at) * MS).astype(np.int64) + MS
    steps = ThinnedSteps()
    steps.begin(0, 1)
    for begin, end, sample in spans:
        if sample:
            steps.watched(begin * MS, end * MS)
    assert abs(far_off(walk(steps, {0: pulses}, [span[:2] for span in spans], 20), pulses)) < 0.004


def test_without_a_step_before_ranks_are_numbered_alike() -> None:
    """Attached between the pulses of two ranks of one step; a third one is somewhere else."""
    steps = ThinnedSteps(other_hosts=True)
    for rank in (0, 1, 2):
        steps.begin(rank, 1, step_ns=10 * MS)
    steps.feed(0, (np.arange(6) * 10 + 1) * MS)
    steps.feed(1, (np.arange(1, 6) * 10 - 1) * MS)
    found = rows_of(steps)
    begins = {rank: {row[1]: row[2] for row in found if row[0] == rank} for rank in (0, 1)}
    assert all(abs(begins[1][step] - begins[0][step]) == 2 * MS for step in begins[1])
    assert [row[4] for row in found] == pytest.approx([ALIGNED] * len(found))


def test_where_more_is_observed_steps_are_counted_and_not_stored() -> None:
    steps = ThinnedSteps()
    steps.begin(0, 1, number=0, after_ns=MS, step_ns=10 * MS)
    steps.disturbed(32 * MS, 45 * MS)
    steps.feed(0, np.array([10, 20, 30, 45, 60, 70, 80]) * MS)
    assert [(row[1], row[3]) for row in rows_of(steps)] == [
        (0, 10 * MS),
        (1, 10 * MS),
        (3, 15 * MS),
        (4, 10 * MS),
        (5, 10 * MS),
    ]
    assert steps.counters["steps_disturbed"] == 1


def test_steps_show_how_much_seeing_everything_slows_them() -> None:
    rng = np.random.default_rng(2)
    steps = ThinnedSteps()
    steps.begin(0, 1, number=0, after_ns=MS, step_ns=MS)
    assert steps.slowdown() == 0
    at, ts = MS, []
    for window in range(8):
        for _ in range(40):  # between windows
            ts.append(at := at + round(MS * rng.normal(1, 0.02)))
        begin = at
        for _ in range(10):
            ts.append(at := at + round(1.6 * MS * rng.normal(1, 0.02)))
        steps.watched(begin - 1, at + 1)
        steps.disturbed(begin - 1, at + MS)
        steps.feed(0, np.array(ts))
        ts = []
        steps.advance(at)
        assert (steps.slowdown() == 0) == (window < 6), "six windows and steps after them are needed"
    assert steps.slowdown() == pytest.approx(1.6, rel=0.03)


def test_what_may_be_chance_slows_no_steps() -> None:
    """Steps that vary by 30 % from one to the next: of 50 jobs one or two may seem slowed, and then a little."""
    found = []
    for seed in range(50):
        rng = np.random.default_rng(seed)
        steps = ThinnedSteps()
        steps.begin(0, 1, number=0, after_ns=MS, step_ns=MS)
        ts = MS + np.cumsum(MS * rng.normal(1, 0.3, 400).clip(0.1)).astype(np.int64)
        for at in range(20, 400, 40):
            steps.watched(int(ts[at]), int(ts[at + 8]))
        steps.feed(0, ts)
        steps.advance(1 << 62, final=True)
        found.append(steps.slowdown())
    assert sum(each > 0 for each in found) <= 2
    assert max(found) < 1.2


def test_micro_batches_after_a_gap_begin_behind_the_longest_pause() -> None:
    steps = ThinnedSteps()
    steps.begin(0, 2, number=0, after_ns=0, step_ns=10 * MS)
    # 3 ms between the two of a step, 7 ms behind them; first seen in the middle.
    steps.feed(0, np.array([3, 10, 13, 20, 23, 30, 33]) * MS)
    assert [(row[2], row[3]) for row in rows_of(steps)] == [(10 * MS, 10 * MS), (20 * MS, 10 * MS)]


def test_the_cheapest_call_of_a_repeating_window_is_the_pulse() -> None:
    """A unit of 6 launches of three kernels, two copies and a wait."""
    unit = [(1, 0), (2, 0), (9, 1), (3, 0), (1, 0), (2, 0), (9, 1), (3, 0), (7, 2)]
    codes = np.array([code for code, _ in unit] * 8, np.uint64)
    called = np.array([call for _, call in unit] * 8, np.int64)
    ts = np.arange(len(codes), dtype=np.int64) * 1000
    pulse = find_pulse(codes, called, ts, {0: 700, 1: 700, 2: 9000})
    assert pulse is not None
    assert (pulse.call, pulse.per_step, pulse.step_ns) == (1, 2, 9000)
    assert pulse.calls == {0: 6, 1: 2, 2: 1}
    rarest = find_pulse(codes, called, ts, {0: 700, 1: 700, 2: 700})
    assert rarest is not None
    assert rarest.call == 2
    assert find_pulse(codes, called, ts, {}) is None
    shuffled = np.random.default_rng(1).permutation(codes)
    assert find_pulse(shuffled, called, ts, {0: 700}) is None
    assert find_pulse(codes[:20], called[:20], ts[:20], {0: 700}) is None  # two units and a bit


class ListOfSpans:
    """What ``_Spans`` is, by looking at all of them."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []
        self.merged = 0

    def add(self, begin: int, end: int) -> None:
        self.spans.append((begin, end))

    def forget(self, before: int) -> None:
        self.spans = [span for span in self.spans if span[1] >= before]

    def touches(self, begin: int, end: int) -> bool:
        return any(first < end and last > begin for first, last in self.spans)

    def hold(self, begin: int, end: int) -> bool:
        return any(first <= begin and end <= last for first, last in self.spans)

    def between(self, begin: int, end: int) -> list[tuple[int, int]]:
        parts = [(max(first, begin), min(last, end)) for first, last in self.spans]
        return sorted(part for part in parts if part[0] < part[1])

    def ends(self, after: int, until: int) -> list[int]:
        return sorted(last for _, last in self.spans if after < last <= until)


@pytest.mark.parametrize("seed", range(20))
def test_spans_that_lie_over_one_another_are_found_as_if_all_were_looked_at(seed: int) -> None:
    rng = np.random.default_rng(seed)
    spans, simple = thinned._Spans(), ListOfSpans()
    newest = 0
    for now in range(0, 2000, 10):
        begin = now + int(rng.integers(-30, 30))
        end = begin + int(rng.integers(0, 120))
        for each in (spans, simple):
            each.add(begin, end)
        if rng.random() < 0.2:
            newest = max(newest, now - int(rng.integers(0, 500)))
            for each in (spans, simple):
                each.forget(newest)
            assert len(spans) == len(simple.spans)
        for _ in range(5):
            first, last = sorted(newest + rng.integers(0, 600, 2))
            for name in ("touches", "hold", "between", "ends"):
                assert getattr(spans, name)(first, last) == getattr(simple, name)(first, last), name


def any_steps(seed: int, monkeypatch: pytest.MonkeyPatch, spans: type) -> tuple[list[Any], dict[str, int]]:
    """Steps of ranks of which some stand still, seen in windows, some of which slow them."""
    monkeypatch.setattr(thinned, "_Spans", spans)
    rng = np.random.default_rng(seed)
    waited = np.cumsum(rng.integers(0, 20 * MS, 100))
    queues = {0: list(zip((np.arange(100) * 200 * MS).tolist(), waited.tolist(), strict=True))}
    steps = ThinnedSteps(queues=queues)
    pulses = {}
    for rank in range(3):
        steps.begin(rank, int(rng.integers(1, 3)), number=4, after_ns=MS, step_ns=4 * MS)
        pulses[rank] = MS + np.cumsum(rng.integers(2 * MS, 6 * MS, 4000))
        still = np.sort(rng.integers(0, 20_000 * MS, 2))
        pulses[rank] = pulses[rank][(pulses[rank] < still[0]) | (pulses[rank] > still[1])]
    found, before = [], 0
    for begin in range(0, 16_000, 400):
        end = begin + int(rng.integers(50, 300))
        if begin:
            steps.unseen(before * MS, begin * MS)
        if rng.random() < 0.3:
            steps.watched(begin * MS, end * MS)
            steps.disturbed((begin - 20) * MS, (end + 20) * MS) if rng.random() < 0.5 else None
        for turn in range(begin, end, 40):
            for rank, at in pulses.items():
                steps.feed(rank, at[(at >= turn * MS) & (at < min(turn + 40, end) * MS)])
            found += steps.advance((turn - 5) * MS).tolist()
        before = end
    found += steps.advance(1 << 62, final=True).tolist()
    return found, dict(+steps.counters)


@pytest.mark.parametrize("seed", range(10))
def test_steps_are_those_that_are_found_by_looking_at_all_windows(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, simple = any_steps(seed, monkeypatch, thinned._Spans), any_steps(seed, monkeypatch, ListOfSpans)
    assert fast == simple
    assert len(fast[0]) > 200


class Moment(int):
    """Counts how often it is compared."""

    compared = 0

    def __lt__(self, other: int) -> bool:
        Moment.compared += 1
        return int(self) < int(other)

    def __le__(self, other: int) -> bool:
        Moment.compared += 1
        return int(self) <= int(other)

    def __gt__(self, other: int) -> bool:
        Moment.compared += 1
        return int(self) > int(other)

    def __ge__(self, other: int) -> bool:
        Moment.compared += 1
        return int(self) >= int(other)


def stopped_rank(windows: int) -> tuple[ThinnedSteps, int]:
    """One of two ranks makes no step any more, and the time goes on."""
    steps = ThinnedSteps()
    for rank in (0, 1):
        steps.begin(rank, 1)
        steps.feed(rank, np.array([10, 20]) * MS)
    steps.advance(30 * MS)
    for begin in range(30 * MS, (30 + 20 * windows) * MS, 20 * MS):
        steps.unseen(Moment(begin), Moment(begin + 10 * MS))
        for span in (steps.watched, steps.disturbed):
            span(Moment(begin + 10 * MS), Moment(begin + 15 * MS))
    return steps, (30 + 20 * windows) * MS


def test_pulses_cost_the_same_however_many_windows_a_rank_has_stood_still_for() -> None:
    steps, now = stopped_rank(2000)
    steps.feed(1, now + np.arange(400) * MS)
    Moment.compared = 0
    assert len(steps.advance(now + 1000 * MS)) == 399
    assert Moment.compared < 400 * 100, "all windows at each pulse would be two million"


def test_windows_that_a_rank_stands_still_for_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thinned, "KEPT_SPANS", 50)
    steps, now = stopped_rank(200)
    assert len(steps._unseen) == len(steps._watched) == len(steps._disturbed) == 50
    steps.feed(1, now + np.arange(10) * MS)
    assert len(steps.advance(now + 1000 * MS)) == 9
    assert steps.counters["windows_merged"] == 3 * 150
    # What it had not seen until then is still a gap, and no step.
    steps.feed(0, now + np.arange(10) * MS)
    rows = steps.advance(now + 1000 * MS, final=True)
    assert set(rows["duration_ns"].tolist()) == {MS}


def test_pulses_that_wait_for_the_first_rank_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose steps took an hour so far need not be followed for four more."""
    monkeypatch.setattr(thinned, "KEPT_PULSES", 100)
    steps = ThinnedSteps()
    for rank in (0, 1):
        steps.begin(rank, 1, number=3, after_ns=MS, step_ns=3600 * 1000 * MS)
    rows = 0
    for turn in range(1, 50):
        steps.feed(1, (turn * 20 + np.arange(20)) * MS)
        rows += len(steps.advance(turn * 20 * MS))
        assert sum(map(len, steps._ranks[1].waiting)) <= 100
    assert rows + len(steps.advance(1 << 62, final=True)) == 49 * 20 - 1
