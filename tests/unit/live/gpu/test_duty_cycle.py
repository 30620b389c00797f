"""What recording for a share of the time costs, seen in windows that are shorter than its period."""

from __future__ import annotations

import pytest

from argus.cupti.collector import PERIOD_MS, CuptiOptions
from argus.live.cost.governor import Governor, Part, Rung
from argus.live.gpu.duty_cycle import DutyCycle

WINDOW_MS = 2_000
A_MS = 10
"""Operations a millisecond while they are recorded."""


class Recorder:
    """A GPU that is always busy, and recorded at the begin of each period, as CUPTI is."""

    def __init__(self, phase_ms: int) -> None:
        self.duty = DutyCycle(CuptiOptions())
        self.now_ms, self.operations, self.counted = phase_ms, 0, 0

    def window(self) -> tuple[int, int]:
        """Operations recorded in the next window, and those that count."""
        before, counted = self.operations, self.counted
        on_ms = self.duty.share * PERIOD_MS
        self.operations += A_MS * sum((self.now_ms + ms) % PERIOD_MS < on_ms for ms in range(WINDOW_MS))
        self.now_ms += WINDOW_MS
        self.counted = self.duty.evened(self.operations, self.now_ms * 1_000_000)
        return self.operations - before, self.counted - counted


def test_all_count_at_once_while_all_are_recorded() -> None:
    recorder = Recorder(0)
    assert [recorder.window()[1] for _ in range(15)] == [A_MS * WINDOW_MS] * 15


@pytest.mark.parametrize("phase_ms", range(0, PERIOD_MS, 3_000))
def test_a_quarter_of_the_time_costs_a_quarter_in_each_window(phase_ms: int) -> None:
    recorder = Recorder(phase_ms)
    for _ in range(7):
        recorder.window()
    recorder.duty.set_share(0.25, recorder.now_ms * 1_000_000)
    windows = [recorder.window() for _ in range(60)]
    even = A_MS * WINDOW_MS / 4
    assert max(recorded for recorded, _ in windows) == 4 * even, "which is what would count else"
    assert max(counted for _, counted in windows) <= 1.4 * even
    assert abs(recorder.operations - recorder.counted) <= 2.1 * even * PERIOD_MS / WINDOW_MS, "and none is left out"


def test_what_was_asked_for_is_even_from_the_second_period_on() -> None:
    recorder = Recorder(0)
    recorder.duty = DutyCycle(CuptiOptions(share=0.25))
    windows = [recorder.window()[1] for _ in range(40)]
    assert set(windows[11:]) == {A_MS * WINDOW_MS // 4}
    assert sum(windows) == recorder.counted >= recorder.operations - 2 * A_MS * PERIOD_MS / 4


def test_a_budget_that_a_quarter_keeps_asks_for_no_less() -> None:
    recorder, governor, now, taken = Recorder(0), Governor(0.005), 0.0, []
    for _ in range(60):
        now += WINDOW_MS / 1000
        share = {Part.GPU: recorder.window()[1] / (A_MS * WINDOW_MS) * 0.016}
        change = governor.next_change(share, now, recorder.duty.reducible())
        if change is not None:
            assert change.down
            taken.append(change.rung)
            recorder.duty.set_share(recorder.duty.reduce(change.rung), recorder.now_ms * 1_000_000)
    assert taken == [Rung.GPU_ALWAYS]


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_operations_of_processes_that_end_count_as_well(share: float) -> None:
    """One after the other, ten seconds each: what one had done was taken off what the next one did."""
    recorder, total = Recorder(0), 0
    recorder.duty = DutyCycle(CuptiOptions(share=share))
    for _ in range(20):
        for _ in range(5):
            recorder.window()
        total += recorder.operations
        recorder.duty.ended += recorder.operations
        recorder.operations = 0
    assert total * 0.8 <= recorder.counted <= total


def test_what_was_held_back_does_not_come_at_once() -> None:
    recorder = Recorder(0)
    recorder.duty = DutyCycle(CuptiOptions(share=0.25))
    for _ in range(32):
        recorder.window()
    held = recorder.operations - recorder.counted
    assert held > A_MS * WINDOW_MS
    recorder.duty.set_share(1.0, recorder.now_ms * 1_000_000)
    windows = [recorder.window()[1] for _ in range(60)]
    assert max(windows) <= 1.5 * A_MS * WINDOW_MS
    assert recorder.operations - recorder.counted < held / 100
