"""What a dump does about threads that no sample met."""

from __future__ import annotations

import pytest

from argus.live import dump
from argus.live.dump import ThreadStack
from argus.model.stacks import Stack


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_thread_that_no_sample_met_is_looked_at_until_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy node a thread that mostly sleeps is ready for long, and runs for microseconds."""
    clock, stack = Clock(), Stack((), "none", "leaf")
    waits_from = {(7, 71): 100.5, (7, 72): 200.0, (7, 73): 100.0}
    asked = []

    class Process:
        pid = 7

    def waiting(process: Process, only: set[tuple[int, int]]) -> dict[tuple[int, int], ThreadStack]:
        asked.append(only)
        there = {key for key in only if key != (7, 74)}  # it has ended
        return {
            key: ThreadStack(*key, "", "waiting", stack=stack if clock.now >= waits_from[key] else None)
            for key in there
        }

    monkeypatch.setattr(dump, "time", clock)
    monkeypatch.setattr(dump, "_waiting", waiting)
    process = Process()
    found = dump._not_met([process], {(7, 71), (7, 72), (7, 73), (7, 74)})  # type: ignore[list-item]
    assert found.keys() == {(7, 71), (7, 73)}
    assert asked[0] == {(7, 71), (7, 72), (7, 73), (7, 74)}
    assert asked[1] == {(7, 71), (7, 72)}
    assert asked[-1] == {(7, 72)}
    assert clock.now == pytest.approx(101.0, abs=0.02)
    asked.clear()
    assert dump._not_met([process], {(7, 73)}).keys() == {(7, 73)}  # type: ignore[list-item]
    assert len(asked) == 1, "no look more than needed"
