"""When what processes map is read again, to name their code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from argus.live.mapped_libraries import MAPS_S, MOST_MAPS_S, Reading
from argus.live.sampling import processes as processes_module
from argus.live.sampling.processes import SampledProcesses


class Process:
    """A process that is asked once a second, and what it answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pid, self.symbols, self.code = 7, self, Reading()
        self.pages, self.grows, self.moves = b"100", False, False
        self.now_s = 1000.0
        self.read_at: list[float] = []
        monkeypatch.setattr(processes_module, "mapped_pages", lambda pid: self.pages)
        monkeypatch.setattr(processes_module, "time", SimpleNamespace(monotonic=lambda: self.now_s))

    def refresh(self) -> bool:
        self.read_at.append(self.now_s)
        return self.moves

    def asked(self, times: int) -> list[bool]:
        asks: Any = SampledProcesses._has_moved
        answers = []
        for _ in range(times):
            answers.append(asks(self))
            self.now_s += 1
        return answers


def test_what_stays_as_it_is_is_read_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    assert process.asked(400) == [False] * 400
    waited = [after - before for before, after in zip(process.read_at, process.read_at[1:], strict=False)]
    assert waited[:5] == [MAPS_S, 2 * MAPS_S, 4 * MAPS_S, 8 * MAPS_S, MOST_MAPS_S]
    assert set(waited[5:]) == {MOST_MAPS_S}


def test_who_has_mapped_something_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    process.asked(200)
    process.pages, process.moves = b"101", True
    assert process.asked(1) == [True]
    process.moves, before = False, len(process.read_at)
    process.asked(int(MAPS_S) + 1)
    assert len(process.read_at) == before + 1, "and soon again"


def test_who_writes_a_perf_map_is_read_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    process.grows = True
    process.asked(30)
    assert len(process.read_at) == 30
