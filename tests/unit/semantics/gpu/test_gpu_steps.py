"""Steps of a GPU, from steps of its CPU and what each of them launched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.semantics.gpu import usage as gpu
from argus.semantics.gpu.usage import LAG_NS, STEP_USAGE, GpuSteps, GpuUsage
from argus.semantics.phases.gpu import GPU_PHASES, What
from argus.semantics.steps.by_calls import ITERATION
from tests.unit.semantics.gpu.test_usage import MS, S, ops


def cpu_steps(*bounds: int, first: int = 0) -> NDArray[np.void]:
    """Steps between these times."""
    out = np.zeros(len(bounds) - 1, ITERATION)
    out["ts_ns"], out["duration_ns"] = bounds[:-1], np.diff(bounds)
    out["step"] = np.arange(first, first + len(out))
    return out


def none(given: NDArray[np.void]) -> NDArray[np.bool_]:
    return np.zeros(len(given), bool)


def found(
    given: NDArray[np.void], steps: NDArray[np.void], communication: list[bool] | None = None
) -> NDArray[np.void]:
    usage = GpuSteps()
    usage.feed(given, none(given) if communication is None else np.array(communication))
    usage.feed_steps(steps)
    return usage.advance(final=True)


# A kernel before the first step, so that it is known to have been recorded from its beginning on.
BEFORE = (5 * MS, 9 * MS)


def test_a_step_is_over_on_the_gpu_when_what_it_launched_has_ended() -> None:
    """The CPU is done with each step after 10 ms, the GPU takes 15."""
    given = ops(BEFORE, (12 * MS, 27 * MS), (27 * MS, 42 * MS), (42 * MS, 57 * MS),
                launch=[4 * MS, 11 * MS, 21 * MS, 31 * MS])  # fmt: skip
    rows = found(given, cpu_steps(10 * MS, 20 * MS, 30 * MS, 40 * MS, first=7))
    assert rows.dtype == STEP_USAGE
    assert rows["step"].tolist() == [7, 8, 9]
    assert rows["start_ns"].tolist() == [9 * MS, 27 * MS, 42 * MS]
    assert rows["duration_ns"].tolist() == [18 * MS, 15 * MS, 15 * MS]
    assert rows["idle_ns"].tolist() == [3 * MS, 0, 0]
    assert rows["kernels"].tolist() == [1, 1, 1]
    assert rows["issue_latency_p50_ns"].tolist() == [MS, 6 * MS, 11 * MS]


def test_communication_hidden_and_not() -> None:
    given = ops(BEFORE, (10 * MS, 14 * MS), (12 * MS, 18 * MS), launch=[4 * MS, 10 * MS, 11 * MS])
    (row,) = found(given, cpu_steps(9 * MS, 19 * MS), [False, False, True])
    assert (row["busy_ns"], row["compute_ns"], row["communication_ns"]) == (8 * MS, 4 * MS, 6 * MS)
    assert (row["exposed_communication_ns"], row["overlapped_communication_ns"]) == (4 * MS, 2 * MS)


def test_without_launches_the_steps_are_the_cpu_s() -> None:
    rows = found(ops(BEFORE, (12 * MS, 27 * MS), (31 * MS, 35 * MS)), cpu_steps(10 * MS, 20 * MS, 40 * MS))
    assert rows["start_ns"].tolist() == [10 * MS, 20 * MS]
    assert rows["busy_ns"].tolist() == [8 * MS, 11 * MS]
    assert rows["queue_depth_max"].tolist() == [-1, -1]


def test_a_step_that_was_not_recorded_from_its_beginning_is_left_out() -> None:
    given = ops((12 * MS, 15 * MS), (22 * MS, 25 * MS), launch=[11 * MS, 21 * MS])
    assert found(given, cpu_steps(10 * MS, 20 * MS, 30 * MS))["step"].tolist() == [1]


def test_steps_that_do_not_follow_one_another() -> None:
    given = ops(BEFORE, (12 * MS, 15 * MS), (22 * MS, 25 * MS), (32 * MS, 36 * MS),
                launch=[4 * MS, 11 * MS, 21 * MS, 31 * MS])  # fmt: skip
    steps = cpu_steps(10 * MS, 20 * MS, 30 * MS, 40 * MS)[[0, 2]]
    rows = found(given, steps)
    assert rows["step"].tolist() == [0, 2]
    assert rows["busy_ns"].tolist() == [3 * MS, 4 * MS]
    assert rows["start_ns"].tolist() == [9 * MS, 25 * MS]


def test_a_step_without_work_has_no_row() -> None:
    given = ops(BEFORE, (12 * MS, 15 * MS), (32 * MS, 36 * MS), launch=[4 * MS, 11 * MS, 31 * MS])
    assert found(given, cpu_steps(10 * MS, 20 * MS, 30 * MS, 40 * MS))["step"].tolist() == [0, 2]


def test_devices_are_distinguished() -> None:
    given = ops(BEFORE, BEFORE, (12 * MS, 15 * MS), (12 * MS, 19 * MS), launch=[4 * MS, 4 * MS, 11 * MS, 11 * MS])
    given["device"] = [0, 1, 0, 1]
    rows = found(given, cpu_steps(10 * MS, 20 * MS))
    assert rows[["device", "busy_ns"]].tolist() == [(0, 3 * MS), (1, 7 * MS)]


@pytest.mark.parametrize("pieces", [1, 3, 17, 200])
def test_live_as_at_the_end(pieces: int) -> None:
    """Whatever comes when, all steps are reported once, and alike."""
    rng = np.random.default_rng(4)
    starts = np.sort(rng.integers(0, 30 * S, 6000))
    given = ops(*((int(t), int(t) + 2 * MS) for t in starts), launch=np.maximum(starts - 40 * MS, 1).tolist())
    steps = cpu_steps(*range(S, 29 * S, 50 * MS))
    whole = found(given, steps)
    live = GpuSteps()
    parts = []
    for chunk in np.array_split(np.arange(len(given)), pieces):
        newest = int(given["end_ns"][chunk].max())
        live.feed(given[chunk], none(chunk))
        due = (steps["ts_ns"] + steps["duration_ns"] <= newest) & (steps["ts_ns"] >= 0)
        live.feed_steps(steps[due])
        steps = steps[~due]
        parts.append(live.advance())
    parts.append(live.advance(final=True))
    joined = np.concatenate(parts)
    assert len(joined) == len(whole) > 500
    assert np.array_equal(joined, whole)
    assert pieces == 1 or len(parts[-1]) < 6 * LAG_NS / (50 * MS)


def test_steps_of_a_process_add_up_to_its_seconds() -> None:
    rng = np.random.default_rng(5)
    starts = np.sort(rng.integers(0, 10 * S, 3000))
    given = ops(*((int(t), int(t) + int(n)) for t, n in zip(starts, rng.integers(1, 9 * MS, 3000), strict=True)))
    rows = found(given, cpu_steps(*range(S, 9 * S + 1, 100 * MS)))
    usage = GpuUsage()
    usage.feed(given, none(given))
    seconds = usage.advance(final=True)
    inside = (seconds["start_ns"] >= S) & (seconds["start_ns"] < 9 * S)
    for name in ("busy_ns", "idle_ns", "kernels"):
        assert rows[name].sum() == seconds[name][inside].sum()


def test_operations_without_steps_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "KEPT_OPS", 100)
    usage = GpuSteps()
    for k in range(30):
        given = ops(*((k * S + i * MS, k * S + i * MS + 1000) for i in range(20)))
        usage.feed(given, none(given))
    assert usage.dropped >= 500
    usage.feed_steps(cpu_steps(*range(0, 31 * S, S)))
    rows = usage.advance(final=True)
    assert 0 < len(rows) <= 5
    assert (rows["kernels"] == 20).all()


@pytest.mark.parametrize("made", [GpuSteps, GpuUsage])
@pytest.mark.parametrize("devices", [1, 64])
def test_operations_of_a_process_are_bounded_whatever_it_says(made: Any, devices: int) -> None:
    """That all ran at one time, so that no window ends, and on many GPUs."""
    kept = made(1000)
    for turn in range(60):
        given = ops(*((S, S + 1000) for _ in range(50)), device=turn % devices)
        kept.feed(given, none(given))
        sizes = [sum(map(len, parts)) for parts in getattr(kept, "_ops", {}).values()]
        sizes += [device.size for device in getattr(kept, "_devices", {}).values()]
        assert kept.size == sum(sizes) <= 1000
    assert sum(sizes) + (kept.dropped if made is GpuSteps else kept.over_share) == 3000


@pytest.mark.parametrize("made", [GpuSteps, GpuUsage])
def test_what_others_need_the_room_for_is_counted_apart(made: Any) -> None:
    kept = made()
    for turn in range(10):
        given = ops(*((turn * S, turn * S + 1000) for _ in range(50)), device=turn % 2)
        kept.feed(given, none(given))
    if made is GpuSteps:
        kept.feed_steps(cpu_steps(*range(0, 9 * S + 1, S)))
    kept.keep(500)
    assert (kept.size, kept.over_share) == (500, 0)
    kept.keep(400)
    assert kept.size <= 400
    assert kept.over_share == 500 - kept.size
    if made is GpuSteps:
        assert kept.dropped == 0
    kept.advance(final=True)
    sizes = [sum(map(len, parts)) for parts in getattr(kept, "_ops", {}).values()]
    sizes += [device.size for device in getattr(kept, "_devices", {}).values()]
    assert kept.size == sum(sizes) < 400


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("most", [0, 30])
def test_of_what_never_has_a_step_nothing_is_lost(devices: int, most: int) -> None:
    """Steps that come after all, and whose operations are gone, are a loss; those that began before the first operation
    are none. The others are as if all had been kept."""
    usage, whole = GpuSteps(), GpuSteps()

    def feed(first: int, last: int) -> None:
        for second in range(first, last):
            at = [second * S + number * 100 * MS for number in range(1, 9)]
            given = ops(*((t, t + MS) for t in at), launch=[t - MS for t in at], device=np.arange(8) % devices)
            usage.feed(given, none(given))
            whole.feed(given, none(given))

    feed(5, 15)
    usage.keep(most)
    assert (usage.over_share, usage.dropped, usage.size <= most) == (0, 80 - usage.size, True)
    first_kept = 15 if not most else next(s for s in range(5, 15) if usage._first_ns <= s * S)
    feed(15, 25)
    steps = cpu_steps(*range(2 * S, 22 * S, S), first=2)
    usage.feed_steps(steps)
    whole.feed_steps(steps)
    rows, expected = usage.advance(final=True), whole.advance(final=True)
    assert usage.over_share == first_kept - 6, "from the second whole one on"
    assert whole.over_share == 0
    assert sorted(set(rows["step"].tolist())) == list(range(first_kept, 21))
    assert (rows["kernels"] == 8 // devices).all()
    # When the one before had ended on the GPU is not known of the first.
    assert rows[rows["step"] > first_kept].tolist() == expected[expected["step"] > first_kept].tolist()
    dropped = usage.dropped
    feed(25, 30)
    usage.keep(10)
    assert usage.dropped == dropped
    assert usage.over_share > first_kept - 6, "now steps lack them"


def test_a_device_that_was_used_once_holds_up_no_other() -> None:
    """A program that touched GPU 0 before it chose GPU 1."""
    usage = GpuSteps()
    touch = ops((1 * S, 1 * S + MS), launch=[1 * S - MS], device=0)
    usage.feed(touch, none(touch))
    reported = 0
    for second in range(2, 40):
        given = ops((second * S, second * S + 900 * MS), launch=[second * S - MS], device=1)
        usage.feed(given, none(given))
        usage.feed_steps(cpu_steps(second * S - 2 * MS, (second + 1) * S - 2 * MS, first=second))
        rows = usage.advance()
        reported += int(np.sum(rows["device"] == 1))
    # The newest seconds' records may still come.
    assert reported >= 38 - 6


def test_a_graph_s_collectives_are_no_call_s() -> None:
    """The call before its launch was of another one: that of the graph was made when it was captured."""
    usage = GpuSteps()
    usage.phases.calls.feed(np.array([9 * MS]), np.array([7]), np.array([What.ALL_TO_ALL], np.uint8), np.array([8]))
    given = ops(BEFORE, (12 * MS, 14 * MS), (15 * MS, 18 * MS), launch=[4 * MS, 10 * MS, 11 * MS])
    given["launch_tid"], given["graph"] = 7, [0, 0, 3]
    kinds = np.array([What.KERNEL, What.SEND_RECV, What.SEND_RECV], np.uint8)
    usage.feed(given, np.array([False, True, True]), kinds)
    usage.feed_steps(cpu_steps(8 * MS, 20 * MS))
    usage.advance(final=True)
    phases = {GPU_PHASES[row["phase"]]: int(row["duration_ns"]) for row in usage.take_phases()}
    assert (phases["all_to_all"], phases["send_recv"]) == (2 * MS, 3 * MS)


def apart(random: np.random.Generator, number: int) -> NDArray[np.void]:
    """Steps of which about half follow one another."""
    bounds = np.sort(random.choice(np.arange(1, 20 * number), 2 * number, replace=False)).reshape(number, 2)
    joined = np.flatnonzero(random.random(number - 1) < 0.5) + 1
    bounds[joined, 0] = bounds[joined - 1, 1]
    steps = cpu_steps(*range(number + 1), first=5)
    steps["ts_ns"], steps["duration_ns"] = MS * bounds[:, 0], MS * (bounds[:, 1] - bounds[:, 0])
    return steps


@pytest.mark.parametrize("seed", range(40))
def test_each_step_has_what_it_would_have_by_itself(seed: int) -> None:
    random = np.random.default_rng(seed)
    steps = apart(random, int(random.integers(1, 12)))
    launched = random.integers(0, 260, 60)
    start = launched + random.choice([0, 1, 40], 60)
    end = start + random.integers(1, 30, 60)
    spans = zip((MS * start).tolist(), (MS * end).tolist(), strict=True)
    given = ops(*spans, launch=(MS * launched).tolist())
    communication = random.random(60) < 0.3
    usage = GpuSteps()
    usage._first_ns = 1
    usage.feed(given, communication)
    usage.feed_steps(steps)
    rows = usage.advance(final=True)
    short = gpu._short(given, communication)
    for row in rows:
        edges = np.array([row["start_ns"], row["start_ns"] + row["duration_ns"]])
        (alone,) = gpu._windows(gpu._Device(0, 0, ops=short), edges, launches_known=True)
        assert tuple(row[name] for name in gpu.USAGE.names or ()) == alone.tolist()


def test_steps_apart_from_one_another_take_no_pass_each(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[int] = []
    windows = gpu._windows

    def counted(device: Any, edges: NDArray[np.int64], launches_known: bool) -> NDArray[np.void]:
        passed.append(len(device.ops))
        return windows(device, edges, launches_known)

    monkeypatch.setattr(gpu, "_windows", counted)
    steps = cpu_steps(*(10 * MS * k for k in range(1, 102)))
    steps["duration_ns"] -= MS
    given = ops(BEFORE, *((10 * MS * k + 2 * MS, 10 * MS * k + 5 * MS) for k in range(1, 102)))
    rows = found(given, steps)
    assert rows["step"].tolist() == list(range(100))
    assert rows["kernels"].tolist() == [1] * 100
    assert passed == [len(given) - 2], "all but those before the first step and after the last, once"


def crowded(seed: int, devices: int = 3) -> tuple[NDArray[np.void], NDArray[np.uint8], NDArray[np.void]]:
    """Operations on several GPUs, what they are, and steps."""
    random = np.random.default_rng(seed)
    number = 400
    launched = np.sort(random.integers(0, 260, number))
    start = launched + random.choice([0, 1, 40], number)
    end = start + random.integers(1, 30, number)
    spans = zip((MS * start).tolist(), (MS * end).tolist(), strict=True)
    given = ops(*spans, launch=(MS * launched).tolist(), device=random.integers(0, devices, number))
    given["launch_tid"] = random.integers(1, 4, number)
    kinds = random.choice([0, 1, 2, 4, 5, 10], number).astype(np.uint8)
    return given, kinds, apart(random, int(random.integers(1, 12)))


def results_of(usage: GpuSteps, rows: list[NDArray[np.void]]) -> list[Any]:
    parts = [np.concatenate(rows), usage.take_phases(), usage.take_collectives()]
    return [part.tolist() for part in parts] + [usage.take_over(), usage.size]


@pytest.mark.parametrize("seed", range(19))
def test_steps_of_many_operations_come_in_parts_as_in_one_go(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given, kinds, steps = crowded(seed)
    later = ops((20 * S, 21 * S), launch=[19 * S])
    found, calls = [], []
    for most in (1 << 60, 150, 1):
        monkeypatch.setattr(gpu, "OPS_AT_ONCE", most)
        usage, rows = GpuSteps(), []
        usage._first_ns = 1
        usage.feed(given, kinds >= 4, kinds)
        usage.feed(later, none(later))
        usage.feed_steps(steps)
        rows.append(usage.advance())
        calls.append(1)
        while usage._parts:
            rows.append(usage.advance())
            calls[-1] += 1
        # What comes next is not changed by it either.
        usage.feed_steps(cpu_steps(18 * S, 22 * S, first=99))
        rows.append(usage.advance(final=True))
        found.append(results_of(usage, rows))
    assert len(found[0][0]) > 0
    assert len(found[0][2]) > 0
    assert found[0] == found[1] == found[2]
    assert calls[0] == 1 < calls[1] <= calls[2]


def test_at_the_end_all_parts_are_done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given, kinds, steps = crowded(3)
    found = []
    for most in (1 << 60, 1):
        monkeypatch.setattr(gpu, "OPS_AT_ONCE", most)
        usage = GpuSteps()
        usage._first_ns = 1
        usage.feed(given, kinds >= 4, kinds)
        usage.feed(later := ops((20 * S, 21 * S), launch=[19 * S]), none(later))
        usage.feed_steps(steps)
        rows = [usage.advance()] if most == 1 else []
        rows.append(usage.advance(final=True))
        assert not usage._parts
        found.append(results_of(usage, rows))
    assert found[0] == found[1]


def test_one_turn_works_on_a_part_of_the_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "OPS_AT_ONCE", 100, raising=False)
    passed: list[int] = []
    windows, split = gpu._windows, gpu.GpuPhases.split

    def counted_windows(device: Any, *rest: Any) -> NDArray[np.void]:
        passed.append(len(device.ops))
        return windows(device, *rest)

    def counted_split(self: Any, ops: NDArray[np.void], *rest: Any) -> NDArray[np.void]:
        passed.append(len(ops))
        return split(self, ops, *rest)

    monkeypatch.setattr(gpu, "_windows", counted_windows)
    monkeypatch.setattr(gpu.GpuPhases, "split", counted_split)
    given, kinds, steps = crowded(1, devices=8)
    usage = GpuSteps()
    usage._first_ns = 1
    usage.feed(given, kinds >= 4, kinds)
    usage.feed(later := ops((20 * S, 21 * S), launch=[19 * S]), none(later))
    usage.feed_steps(steps)
    settled = 0
    for _ in range(40):
        passed.clear()
        usage.advance()
        assert sum(passed) <= 3 * 100
        settled += sum(passed)
    assert settled > 400
    assert len(usage.take_over()) == len(steps)


def test_what_is_dropped_while_steps_are_settled_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "OPS_AT_ONCE", 1)
    monkeypatch.setattr(gpu, "KEPT_STEPS", 20)
    given, kinds, steps = crowded(2)
    usage = GpuSteps()
    usage._first_ns = 1
    usage.feed(given, kinds >= 4, kinds)
    usage.feed(later := ops((20 * S, 21 * S), launch=[19 * S]), none(later))
    usage.feed_steps(steps)
    usage.advance()
    assert usage._parts
    usage.feed_steps(cpu_steps(*range(18 * S, 42 * S, S), first=99))
    assert usage.over_share == 3, "steps beyond those that may wait"
    usage.keep(300)
    usage.keep(0)
    assert (usage.size, len(usage._parts)) == (0, 0)
    assert usage.over_share == 3 + len(given) + len(later)
    assert [step for _, _, step in usage.take_over()] == steps["step"].tolist(), "they are over nevertheless"
