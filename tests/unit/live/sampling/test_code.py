"""When what processes map is read again, to name their code."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from argus.live.mapped_libraries import MAPS_S, Reading
from argus.live.sampling import processes as processes_module
from argus.live.sampling.processes import SampledProcesses


class Process:
    """A process that is asked once a second, and what it answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pid, self.symbols, self.code = 7, self, Reading()
        self.pages, self.grows, self.moves = b"100", False, False
        self.now_s = 1000.0
        self.read_at: list[float] = []
        self.processes = 1
        monkeypatch.setattr(processes_module, "mapped_pages", lambda pid: self.pages)
        monkeypatch.setattr(processes_module, "time", SimpleNamespace(monotonic=lambda: self.now_s))

    def refresh(self) -> bool:
        self.read_at.append(self.now_s)
        return self.moves

    def asked(self, times: int) -> list[bool]:
        asks: Any = SampledProcesses._has_moved
        processes = SimpleNamespace(by_pid=range(self.processes))
        answers = []
        for _ in range(times):
            answers.append(asks(processes, self))
            self.now_s += 1
        return answers


@pytest.mark.parametrize(("processes", "longest_s"), [(1, 10), (64, 10), (256, 40), (1000, 60)])
def test_what_stays_as_it_is_is_read_more_seldom(
    monkeypatch: pytest.MonkeyPatch, processes: int, longest_s: int
) -> None:
    """Where there are few processes as often as before: another library may lie where one lay."""
    process = Process(monkeypatch)
    process.processes = processes
    assert process.asked(400) == [False] * 400
    waited = [after - before for before, after in itertools.pairwise(process.read_at)]
    assert waited[0] == MAPS_S
    assert set(waited[4:]) == {longest_s}


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
