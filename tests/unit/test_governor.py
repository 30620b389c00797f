"""The budget for overhead: what is given up, in which order, and when it is taken up again."""

from __future__ import annotations

import numpy as np
import pytest

from argus.capture import calls
from argus.capture.governor import LADDERS, LONGEST_RETURN_S, PATIENCE, RETURN_S, Change, Governor, Part, Reading
from argus.overhead import INTERRUPT_NS, OverheadSide

WINDOW_S = 2.0
ALL = {rung.name for rungs in LADDERS.values() for rung in rungs}
S = 10**9


def judge(
    governor: Governor, shares: dict[Part, float], windows: int, begin: float = 0.0, able: set[str] = ALL
) -> list[Change]:
    """The changes that so many windows with the same costs bring."""
    found = (governor.judge(shares, begin + WINDOW_S * n, able) for n in range(windows))
    return [change for change in found if change is not None]


def names(changes: list[Change]) -> list[str]:
    return [("-" if change.down else "+") + change.rung.name for change in changes]


def test_what_a_job_loses_is_what_is_taken_while_it_does_not_wait() -> None:
    """10 s of one rank, of which 0.1 s were taken."""
    taken = {Part.CALLS: S // 10}
    for cpu, waited, share in (
        (10 * S, 0, 0.01),  # its thread computes all the time
        (S, 0, 0.001),  # it sleeps for nine tenths
        (10 * S, 9 * S, 0.001),  # it spins in calls that wait for the GPU
        (S, 5 * S, 0.001),
        (80 * S, 0, 0.1 / 80),  # eight threads compute: it is an eightieth of what they do
        (0, 0, 0.0),
    ):
        assert Reading(10 * S, cpu, waited, taken).shares()[Part.CALLS] == pytest.approx(share), (cpu, waited)
    assert Reading().shares() == {}


def test_a_window_is_the_difference_of_two_readings() -> None:
    before = Reading(10 * S, 10 * S, S, {Part.CALLS: 5, Part.GPU: 7})
    after = Reading(12 * S, 11 * S, S, {Part.CALLS: 8, Part.GPU: 7, Part.STACKS: 4})
    assert after.since(before) == Reading(2 * S, S, 0, {Part.CALLS: 3, Part.GPU: 0, Part.STACKS: 4})


def test_within_the_budget_nothing_is_given_up() -> None:
    governor = Governor(0.01)
    assert not judge(governor, {Part.CALLS: 0.004, Part.STACKS: 0.003, Part.GPU: 0.003}, 1000)


def test_a_burst_is_let_pass() -> None:
    governor = Governor(0.01)
    for turn in range(50):
        assert not judge(governor, {Part.CALLS: 0.5}, PATIENCE - 1, 10 * turn)
        assert not judge(governor, {Part.CALLS: 0.005}, 1, 10 * turn + 5)


def test_what_costs_most_goes_first_one_step_at_a_time() -> None:
    governor = Governor(0.01)
    costs = {Part.CALLS: 0.03, Part.STACKS: 0.005, Part.GPU: 0.02, Part.MARKS: 0.001}
    assert names(judge(governor, costs, 3 * PATIENCE)) == [
        "-products",
        "-launches",
        "-GPU times for all of the time",
    ]
    costs[Part.CALLS] = 0.0
    assert names(judge(governor, costs, PATIENCE, 20)) == ["-GPU times for a quarter of the time"]
    costs[Part.GPU] = 0.005
    rest = ["-sampling more often", "-sampling at the usual rate", "-following waits", "-NVTX ranges", "-ranges"]
    assert names(judge(governor, costs, 100 * PATIENCE, 40)) == rest
    assert len(governor.taken) == 9


def test_steps_that_change_nothing_are_left_out() -> None:
    governor = Governor(0.01)
    able = ALL - {"sampling more often", "products", "launches"}
    costs = {Part.CALLS: 0.5, Part.STACKS: 0.1}
    assert names(judge(governor, costs, 10, able=able)) == ["-sampling at the usual rate", "-following waits"]


def test_what_was_given_up_comes_back_when_there_has_been_room_for_long() -> None:
    governor = Governor(0.01)
    judge(governor, {Part.CALLS: 0.03, Part.STACKS: 0.02}, 2 * PATIENCE, able={"launches", "following waits"})
    windows = int(RETURN_S / WINDOW_S)
    assert not judge(governor, {Part.CALLS: 0.004}, windows, 100)
    assert not judge(governor, {Part.CALLS: 0.008}, 10, 200)  # below the budget, and no room
    changes = judge(governor, {Part.CALLS: 0.004}, 2 * windows + 2, 300)
    assert names(changes) == ["+following waits", "+launches"]  # the newest first, each after its own wait
    assert not governor.taken


def test_each_time_that_it_was_too_early_doubles_the_wait() -> None:
    """Otherwise a job would be over its budget for ever, now and then."""
    governor, now, waits = Governor(0.01), 0.0, []
    for _ in range(9):
        while not judge(governor, {Part.CALLS: 0.03}, 1, now):
            now += WINDOW_S
        begin = now
        while not judge(governor, {Part.CALLS: 0.001}, 1, now):
            now += WINDOW_S
        waits.append(now - begin)
    expected = [min(RETURN_S * 2**turn, LONGEST_RETURN_S) for turn in range(9)]
    assert waits == pytest.approx(expected, abs=2 * WINDOW_S)


def test_ranges_never_come_back() -> None:
    governor = Governor(0.01)
    assert names(judge(governor, {Part.MARKS: 0.2}, 2 * PATIENCE)) == ["-NVTX ranges", "-ranges"]
    assert not judge(governor, {Part.MARKS: 0.0}, 10_000, 100)


def programs(ns: int, runs: int) -> dict[str, tuple[int, int]]:
    return {"cuda_enter": (ns, runs), "mark_enter": (0, 0)}


def counted(**more: int) -> dict[str, int]:
    return dict.fromkeys(("hits", "marks", "stack_samples", "gpu_ops", "cupti_callback_ns", "cupti_api"), 0) | more


def test_costs_are_what_the_kernel_measured_and_the_traps_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("argus.overhead.cpu_ns", lambda pid: clock[0])
    clock = [0]
    side = OverheadSide(0.5)
    side.measured = True
    side.look(100.0, [7], programs(10**6, 1000), {"on_sample": (500, 1)}, counted(stack_samples=10), ALL)
    clock[0] = 10 * S
    copy, mark = calls.BY_SYMBOL["cudaMemcpyAsync"].id, calls.symbol_of("range_begin")
    hits, prices = np.zeros(256, np.int64), np.full(256, 700)
    hits[[copy, calls.BY_SYMBOL[mark].id]], prices[copy] = (200, 7), 9_000
    for turn in (1, 2):  # the same hits are counted once
        side.count_hits(hits * turn, prices)
    now = counted(stack_samples=110, gpu_ops=1000, cupti_callback_ns=9)
    assert side.look(110.0, [7], programs(2 * 10**6, 2000), {"on_sample": (100_500, 101)}, now, ALL) is None
    found = {name: value for name, (value, loss) in side.counters().items() if not loss}
    assert found["overhead_job_ns"] == 10 * S
    assert found["overhead_calls_ns"] == 10**6 + 1000 * 50 + 400 * 9_000
    assert found["overhead_marks_ns"] == 14 * 700
    assert found["overhead_stacks_ns"] == 100_000 + 100 * 50 + 100 * INTERRUPT_NS
    assert found["overhead_gpu_ns"] == 1000 * 500 + 9
    total = sum(found[f"overhead_{part}_ns"] for part in Part)
    assert found["overhead_ppm"] == pytest.approx(total / 10**4, abs=1)
    assert side.share == pytest.approx(total / (10 * S))
    assert side.summary()[0].startswith(f"overhead: {total / 1e8:.2f}% of the job's time (probes ")


def test_processes_that_come_and_go_count_while_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = {1: 5 * S, 2: 0}
    monkeypatch.setattr("argus.overhead.cpu_ns", lambda pid: spent.get(pid, -1))
    side = OverheadSide(0.5)
    for now, pids in ((10.0, [1]), (12.0, [1, 2]), (14.0, [1, 2, 3]), (16.0, [2])):
        side.look(now, pids, programs(0, 0), {}, counted(), ALL)
        spent = {pid: ns + S for pid, ns in spent.items()}
    assert side.counters()["overhead_job_ns"] == (8 * S, False)  # 2 s of the first, 4 of both, 2 of the second
