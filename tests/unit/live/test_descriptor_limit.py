"""Descriptors: the room for what traced processes map goes by their limit, which is raised before anything is noted."""

from __future__ import annotations

import resource
from types import SimpleNamespace
from typing import Any

import pytest

from argus.live import dump as module_of_dump
from argus.live import tracer as module_of_tracer
from argus.live.options import Options
from argus.live.tracer import Tracer
from argus.model.errors import ArgusError
from argus.system import limits


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The usual one."""
    now = [(1024, 1 << 20)]
    monkeypatch.setattr(limits.resource, "getrlimit", lambda _: now[-1])  # type: ignore[attr-defined]
    monkeypatch.setattr(limits.resource, "setrlimit", lambda _, given: now.append(given))  # type: ignore[attr-defined]
    return now


class Begun(ArgusError):
    pass


def test_a_trace_looks_for_processes_with_all_descriptors_that_it_may_have(
    limit: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 ranks of one user with 30 libraries each: 6 of them were traced, others were said to map none."""

    def find(*_: Any) -> Any:
        raise Begun(str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))

    tracer: Any = Tracer.__new__(Tracer)
    tracer.session = SimpleNamespace(options=Options(), note=None)
    for name in ("_enter_reader", "abort"):
        monkeypatch.setattr(tracer, name, lambda: None)
    tracer._stacks = SimpleNamespace(wait_until_loaded=lambda: None)
    monkeypatch.setattr(module_of_tracer, "find_targets", find)
    monkeypatch.setattr(module_of_tracer, "sees_host_pids", lambda: True)
    monkeypatch.setattr(module_of_tracer.memory, "settle", lambda: None)
    with pytest.raises(Begun, match=r"^1048576$"):
        tracer.start()


def test_so_does_a_dump(limit: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    def dump(*_: Any) -> Any:
        raise Begun(str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))

    monkeypatch.setattr(module_of_dump, "_dump", dump)
    monkeypatch.setattr(module_of_dump.reader.shared, "enter", lambda: None)
    monkeypatch.setattr(module_of_dump.reader.shared, "leave", lambda: None)
    with pytest.raises(Begun, match=r"^1048576$"):
        module_of_dump.dump([1])
