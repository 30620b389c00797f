"""The budget for overhead: what is given up, in which order, and when it is taken up again."""

from __future__ import annotations

import numpy as np
import pytest

from argus.capture.call_prices import REFILL_NS
from argus.live.cost.governor import (
    LADDERS,
    LEAST_DUTY,
    LONGEST_RETURN_S,
    PATIENCE,
    RETURN_S,
    Change,
    Governor,
    Part,
    Plan,
    Reading,
    Rung,
    plan,
)
from argus.live.cost.overhead import INTERRUPT_NS, Overhead
from argus.model import calls

WINDOW_S = 2.0
ALL = {rung for rungs in LADDERS.values() for rung in rungs}
S = 10**9
A, B, C = (1001, ""), (1002, ""), (1003, "")
"""Owners."""


def changes_of(
    governor: Governor, shares: dict[Part, float], windows: int, begin: float = 0.0, able: set[Rung] = ALL
) -> list[Change]:
    """The changes that so many windows with the same costs bring."""
    changes = (governor.next_change(shares, begin + WINDOW_S * n, able) for n in range(windows))
    return [change for change in changes if change is not None]


def names(changes: list[Change]) -> list[str]:
    return [("-" if change.down else "+") + change.rung.feature for change in changes]


def test_what_a_job_loses_is_what_is_taken_from_the_time_that_it_runs() -> None:
    """10 s of one rank, of which 0.1 s were taken by probes, or by interrupts."""
    for cpu, waited, probes, interrupts in (
        (10 * S, 0, 0.01, 0.01),  # its thread computes all the time
        (S, 0, 0.01, 0.01),  # it sleeps for nine tenths, and pays for each call all the same
        (10 * S, 9 * S, 0.0025, 0.01),  # it waits for the GPU: three quarters are believed to be hidden
        (S, 5 * S, 0.005, 0.01),
        (S, S // 10, 0.01, 0.01),  # it waits for less than twice what is taken
        (80 * S, 0, 0.01, 0.1 / 80),  # eight threads compute: interrupts hit all of them
    ):
        of = {part: Reading(10 * S, cpu, waited, {part: S // 10}).shares()[part] for part in (Part.CALLS, Part.STACKS)}
        assert of[Part.CALLS] == pytest.approx(probes), (cpu, waited)
        assert of[Part.STACKS] == pytest.approx(interrupts), (cpu, waited)
    assert Reading().shares() == {}
    # It waited for a CPU for another 10 s: it made no calls then, but was interrupted as others were.
    waiting = Reading(10 * S, 10 * S, 0, {Part.CALLS: S // 10, Part.STACKS: S // 10}, 10 * S).shares()
    assert waiting == {Part.CALLS: pytest.approx(0.01), Part.STACKS: pytest.approx(0.005)}


def test_a_window_is_the_difference_of_two_readings() -> None:
    before = Reading(10 * S, 10 * S, S, {Part.CALLS: 5, Part.GPU: 7})
    after = Reading(12 * S, 11 * S, S, {Part.CALLS: 8, Part.GPU: 7, Part.STACKS: 4})
    assert after.since(before) == Reading(2 * S, S, 0, {Part.CALLS: 3, Part.GPU: 0, Part.STACKS: 4})


def test_within_the_budget_nothing_is_given_up() -> None:
    governor = Governor(0.01)
    assert not changes_of(governor, {Part.CALLS: 0.004, Part.STACKS: 0.003, Part.GPU: 0.003}, 1000)


def test_a_burst_is_let_pass() -> None:
    governor = Governor(0.01)
    for turn in range(50):
        assert not changes_of(governor, {Part.CALLS: 0.5}, PATIENCE - 1, 10 * turn)
        assert not changes_of(governor, {Part.CALLS: 0.005}, 1, 10 * turn + 5)


def test_what_costs_most_goes_first_one_step_at_a_time() -> None:
    governor = Governor(0.01)
    costs = {Part.STACKS: 0.008, Part.OFF_CPU: 0.005, Part.GPU: 0.015}
    assert names(changes_of(governor, costs, PATIENCE)) == ["-GPU times for all of the time"]
    assert names(changes_of(governor, costs, PATIENCE, 10)) == ["-GPU times for a quarter of the time"]
    rest = ["-sampling more often", "-sampling at the usual rate", "-following waits"]
    assert names(changes_of(governor, costs, 100 * PATIENCE, 40)) == rest
    assert len(governor.taken) == 5


def test_what_probes_cost_takes_nothing_from_stacks() -> None:
    assert not changes_of(Governor(0.01), {Part.CALLS: 0.5, Part.MARKS: 0.5, Part.STACKS: 0.004}, 100)


def test_far_above_the_budget_no_second_window_is_waited_for() -> None:
    assert changes_of(Governor(0.01), {Part.STACKS: 0.05}, 1)


def test_steps_that_change_nothing_are_left_out() -> None:
    able = ALL - {Rung.SAMPLE_OFTEN}
    costs = {Part.CALLS: 0.5, Part.STACKS: 0.1, Part.OFF_CPU: 0.05}
    assert names(changes_of(Governor(0.01), costs, 10, able=able)) == [
        "-sampling at the usual rate",
        "-following waits",
    ]


def test_what_was_given_up_comes_back_when_there_has_been_room_for_long() -> None:
    governor = Governor(0.01)
    both = {Part.STACKS: 0.02, Part.OFF_CPU: 0.01}
    changes_of(governor, both, 2 * PATIENCE, able={Rung.SAMPLE_USUALLY, Rung.FOLLOW_WAITS})
    windows = int(RETURN_S / WINDOW_S)
    assert not changes_of(governor, {Part.STACKS: 0.004}, windows, 100)
    assert not changes_of(governor, {Part.STACKS: 0.008}, 10, 200)  # below the budget, and no room
    changes = changes_of(governor, {Part.STACKS: 0.004}, 2 * windows + 2, 300)
    assert names(changes) == ["+following waits", "+sampling at the usual rate"]  # each after its own wait
    assert not governor.taken


def test_each_time_that_it_was_too_early_doubles_the_wait() -> None:
    """Otherwise a job would be over its budget for ever, now and then."""
    governor, now, waits = Governor(0.01), 0.0, []
    for _ in range(9):
        while not changes_of(governor, {Part.OFF_CPU: 0.02}, 1, now, {Rung.FOLLOW_WAITS}):
            now += WINDOW_S
        begin = now
        while not changes_of(governor, {Part.OFF_CPU: 0.001}, 1, now):
            now += WINDOW_S
        waits.append(now - begin)
    expected = [min(RETURN_S * 2**turn, LONGEST_RETURN_S) for turn in range(9)]
    assert waits == pytest.approx(expected, abs=2 * WINDOW_S)


# ---- probes

LAUNCH_BOUND = {"launches": 1.3, "copies": 0.16, "collectives": 0.22, "waits": 0.013}
"""A job in C whose functions are single-stepped: 101 launches, 13 copies, 17 collectives and a wait in 740 µs."""
SMALL_SCRIPT = {"ranges": 0.012, "backward": 0.001, "collectives": 0.0}
"""PyTorch on a CPU, 3 ms a step."""


def probed(governor: Governor, costs: dict[str, float], now: float, others: float = 0.0) -> list[str]:
    return names(governor.probe_changes(costs, costs, others, now))


def test_the_first_look_is_enough_where_the_cost_is_far_above_the_budget() -> None:
    governor = Governor(0.01)
    assert probed(governor, LAUNCH_BOUND, 0.015) == ["-launches", "-copies", "-collectives", "-waits"]
    made = governor.plan
    assert made.windowed == LAUNCH_BOUND.keys()
    assert sum(LAUNCH_BOUND.values()) * made.duty <= 0.01
    assert made.length_s >= 0.015  # ten slowed steps
    assert made.period_s == pytest.approx(made.length_s / made.duty)


def test_a_little_above_the_budget_a_second_look_is_waited_for() -> None:
    governor = Governor(0.01)
    assert probed(governor, SMALL_SCRIPT, 0.1) == []
    assert probed(governor, SMALL_SCRIPT, 0.2) == ["-ranges"]
    assert governor.plan.off == {"ranges"}
    assert not governor.plan.windowed


def test_within_the_budget_everything_is_probed() -> None:
    governor = Governor(0.01)
    for turn in range(1000):
        assert probed(governor, {"launches": 0.006, "collectives": 0.002}, 2.0 * turn, others=0.001) == []
    assert governor.plan == Plan()


def test_what_stacks_cost_is_not_there_for_probes() -> None:
    governor = Governor(0.01)
    assert probed(governor, {"launches": 0.008}, 0.0, others=0.004) == []
    assert probed(governor, {"launches": 0.008}, 2.0, others=0.004) == ["-launches"]


@pytest.mark.parametrize("scale", [0.5, 1.0, 10.0, 1e3, 1e6])
@pytest.mark.parametrize(
    "costs", [LAUNCH_BOUND, SMALL_SCRIPT, {"launches": 0.4}, {"nvtx": 0.3}, {"backward": 0.1}, {"collectives": 1.0}]
)
def test_no_plan_leaves_a_job_without_what_marks_steps_and_each_keeps_the_budget(
    costs: dict[str, float], scale: float
) -> None:
    """Where the cost of a window of 20 ms can be kept by one a minute: a job that is a thousand times slower cannot."""
    costs = {subject: cost * scale for subject, cost in costs.items()}
    made = plan(costs, costs, 0.01)
    throughout = sum(cost for subject, cost in costs.items() if subject not in made.windowed | made.off)
    in_windows = sum(costs.get(subject, 0.0) for subject in made.windowed)
    assert not made.off or throughout or made.windowed, "something marks steps"
    if made.windowed:
        assert made.length_s >= 0.02
        assert made.duty > 0
    if LEAST_DUTY * in_windows < 0.01:
        assert throughout + in_windows * made.duty <= 0.01 * 1.001


def test_what_went_first_and_would_not_have_had_to_comes_back_at_once() -> None:
    """Ranges are the matter, not the launches that are more expendable."""
    made = plan({"launches": 0.003, "ranges": 0.05, "backward": 0.0005}, {"launches": 0.003}, 0.01)
    assert made.off == {"ranges"}
    assert not made.windowed


def test_exits_go_before_entries() -> None:
    costs = {"launches": 0.002, "copies": 0.009, "waits": 0.0005}
    made = plan(costs, {**costs, "copies": 0.003}, 0.01)
    assert made.rungs == (Rung.COPY_DURATIONS,)
    assert made.entries == {"copies"}
    assert made.duty == 1.0


def test_products_go_altogether() -> None:
    made = plan({"math": 0.02, "launches": 0.004}, {"math": 0.02, "launches": 0.004}, 0.01)
    assert made.off == {"math"}
    assert not made.windowed


def test_ranges_that_alone_mark_steps_are_seen_in_windows() -> None:
    alone, beside = (plan({"nvtx": 0.3, **more}, {}, 0.01) for more in ({}, {"launches": 1e-4}))
    assert alone.windowed == {"nvtx"}
    assert not alone.off
    assert beside.off == {"nvtx"}
    assert not beside.windowed


def test_pytorch_s_ranges_go_but_in_samples_also_before_the_first_backward_pass() -> None:
    """Attached in an evaluation: without backward passes ranges mark no steps, in windows neither."""
    made = plan({"ranges": 0.05}, {}, 0.01)
    assert made.off == made.sampled == {"ranges"}
    assert not made.windowed


@pytest.mark.parametrize("step_s", [0.0, 0.0005, 0.002, 0.05, 2.0])
@pytest.mark.parametrize("cost", [0.011, 0.05, 0.2, 1.0])
def test_samples_cost_a_small_part_of_the_budget(cost: float, step_s: float) -> None:
    made = plan({"ranges": cost, "backward": 0.001}, {}, 0.01, step_s=step_s)
    if not made.sampled:
        assert 0.02 * cost / (0.05 * 0.01) > 60 or 3 * step_s * cost / (0.05 * 0.01) > 60, "once a minute is too much"
        return
    assert made.sample_s * cost <= 0.05 * 0.01 * made.sample_period_s * 1.001
    assert made.sample_s >= max(0.02, 3 * step_s)
    assert 5.0 <= made.sample_period_s <= 60.0


def test_what_would_cost_too_much_even_in_samples_is_not_sampled() -> None:
    made = plan({"ranges": 4.0, "backward": 0.001}, {}, 0.01)
    assert made.off == {"ranges"}
    assert not made.sampled


def test_samples_follow_the_length_of_steps() -> None:
    governor = Governor(0.01)
    for now in (0.1, 0.2):
        probed(governor, SMALL_SCRIPT, now)
    assert governor.plan.sample_s == pytest.approx(0.1)
    governor.probe_changes(SMALL_SCRIPT, SMALL_SCRIPT, 0.0, 2.0, step_s=0.01)
    assert governor.plan.sample_s == pytest.approx(0.12)
    assert governor.plan.sampled == {"ranges"}


def test_longer_steps_have_longer_windows() -> None:
    costs = {"launches": 0.12, "collectives": 0.001}
    short, long = (plan(costs, costs, 0.01, step_s=step_s) for step_s in (0.001, 0.06))
    assert long.length_s >= 12 * 0.06 > short.length_s
    assert long.duty == pytest.approx(short.duty)


def test_windows_follow_what_they_cost_without_a_word() -> None:
    governor = Governor(0.01)
    probed(governor, {"launches": 0.12}, 0.0)
    duty = governor.plan.duty
    assert probed(governor, {"launches": 0.36}, 2.0) == []
    assert governor.plan.duty == pytest.approx(duty / 3)
    assert governor.taken == [Rung.LAUNCHES]


def test_launches_come_back_when_there_has_been_room_for_long() -> None:
    governor = Governor(0.01)
    probed(governor, {"launches": 0.12, "collectives": 0.001}, 0.0)
    calm = {"launches": 0.001, "collectives": 0.001}
    assert probed(governor, calm, 10.0) == []
    assert probed(governor, calm, 10.0 + RETURN_S - 1) == []
    assert probed(governor, calm, 10.0 + RETURN_S) == ["+launches"]
    assert governor.plan == Plan()
    assert not governor.taken
    # It was too early: the next wait is twice as long.
    probed(governor, {"launches": 0.12, "collectives": 0.001}, 100.0)
    assert probed(governor, calm, 110.0) == []
    assert probed(governor, calm, 110.0 + RETURN_S) == []
    assert probed(governor, calm, 110.0 + 2 * RETURN_S) == ["+launches"]


def test_what_numbers_or_bounds_steps_never_comes_back() -> None:
    """Calls of a communicator that were missed cannot be numbered; steps by backward passes have other bounds."""
    governor = Governor(0.01)
    probed(governor, {**SMALL_SCRIPT, **LAUNCH_BOUND, "ranges": 1.0, "nvtx": 1.0}, 0.0)
    for turn in range(3000):
        probed(governor, dict.fromkeys([*LAUNCH_BOUND, "ranges", "nvtx"], 1e-6), 10.0 + 2 * turn)
    assert governor.plan.windowed == {"collectives"}
    assert governor.plan.off == {"ranges", "nvtx"}


def programs(ns: int, runs: int) -> dict[str, tuple[int, int]]:
    return {"cuda_enter": (ns, runs), "mark_enter": (0, 0)}


def counted(**more: int) -> dict[str, int]:
    return dict.fromkeys(("hits", "marks", "stack_samples", "gpu_ops", "cupti_callback_ns", "cupti_api"), 0) | more


def test_costs_are_what_the_kernel_measured_and_the_traps_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0]
    monkeypatch.setattr("argus.live.cost.overhead.cpu_ns", lambda pid: clock[0])
    side = Overhead(0.5)
    side.measured = True
    samplers = {"on_sample": (500, 1), "on_switch": (300, 1), "finish_switched": (0, 0)}
    side.look(100.0, {7: A}, programs(10**6, 1000), samplers, counted(stack_samples=10), {A: ALL})
    clock[0] = 10 * S
    copy, mark = calls.BY_SYMBOL["cudaMemcpyAsync"].id, calls.symbol_of("range_begin")
    hits, prices = np.zeros(256, np.int64), np.full(256, 700)
    hits[[copy, calls.BY_SYMBOL[mark].id]], prices[copy] = (200, 7), 9_000
    for turn in (1, 2):  # the same hits are counted once
        side.count_hits(hits * turn, prices)
    now = counted(stack_samples=110, gpu_ops=1000, cupti_callback_ns=9)
    samplers = {"on_sample": (100_500, 101), "on_switch": (20_300, 11), "finish_switched": (5_000, 5)}
    assert not side.look(110.0, {7: A}, programs(2 * 10**6, 2000), samplers, now, {A: ALL})
    values = {name: value for name, (value, loss) in side.counters().items() if not loss}
    assert values["overhead_job_ns"] == 10 * S
    assert values["overhead_calls_ns"] == 10**6 + 1000 * 50 + 400 * 9_000
    assert values["overhead_marks_ns"] == 14 * (700 + REFILL_NS)
    assert values["overhead_stacks_ns"] == 100_000 + 100 * 50 + 100 * INTERRUPT_NS
    assert values["overhead_off_cpu_ns"] == 25_000 + 15 * 50
    assert values["overhead_gpu_ns"] == 1000 * 500 + 9
    total = sum(values[f"overhead_{part}_ns"] for part in Part)
    assert values["overhead_ppm"] == pytest.approx(total / 10**4, abs=1)
    assert side.share == pytest.approx(total / (10 * S))
    assert side.summary()[0].startswith(f"overhead: {total / 1e8:.2f}% of the job's time (probes ")


def test_processes_that_come_and_go_count_while_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = {1: 5 * S, 2: 0}
    monkeypatch.setattr("argus.live.cost.overhead.cpu_ns", lambda pid: spent.get(pid, -1))
    side = Overhead(0.5)
    for now, pids in ((10.0, [1]), (12.0, [1, 2]), (14.0, [1, 2, 3]), (16.0, [2])):
        side.look(now, dict.fromkeys(pids, A), programs(0, 0), {}, counted(), {A: ALL})
        spent = {pid: ns + S for pid, ns in spent.items()}
    assert side.counters()["overhead_job_ns"] == (8 * S, False)  # 2 s of the first, 4 of both, 2 of the second


def test_prices_are_corrected_by_what_the_job_s_steps_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch costs twice what the machine's price says: windows, and what is reported, go by the job's own steps."""
    monkeypatch.setattr("argus.live.cost.overhead.cpu_ns", lambda pid: S)
    side = Overhead(0.01)
    side.measured = True  # the programs' runs, of which there are none here
    launch = calls.BY_SYMBOL["cudaLaunchKernel"].id
    price, hits, inside, on = np.zeros(256, np.int64), np.zeros(256, np.int64), np.zeros(256, np.int64), 0
    price[launch] = 1000

    def look(now: float, seen_ns: int, windows: bool) -> list[Change]:
        hits[launch] += seen_ns * 200_000 // S  # 20 % of the time, and takes 40 %
        inside[launch] += seen_ns * 200_000 // S if windows else 0
        side.count_hits(hits.copy(), price)
        side.look(now, {7: A}, {}, {}, counted(), {A: ALL})
        return side.look_at_probes(
            now, {}, price, price, {"launches": on if windows else None}, inside.copy(), (), (), step_s=1e-3
        )  # fmt: skip

    look(1.0, 0, False)
    look(1.1, S // 10, False)
    assert side.governor.plan.windowed == {"launches"}
    assert side.costs["launches"] == pytest.approx(0.2, rel=0.1)
    duty = side.governor.plan.duty
    for turn in range(12):
        on += 20_000_000
        look(3.1 + 2 * turn, 20_000_000, True)
        side.correct(0.4)
        again = side.correction
        side.correct(0.4)
        assert side.correction == again, "a window corrects once"
    assert side.correction == pytest.approx(2, rel=0.15)
    assert side.governor.plan.duty == pytest.approx(duty / 2, rel=0.2)
    side.correct(0.0)
    assert side.correction == again, "not known"
    before = side.counters()["overhead_calls_ns"][0]
    look(27.2, 20_000_000, True)
    assert side.counters()["overhead_calls_ns"][0] - before == pytest.approx(2 * 4000 * 1000, rel=0.15)
