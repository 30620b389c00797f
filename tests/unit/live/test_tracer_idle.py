"""A trace of processes that make no calls does nothing about calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from argus import records, trace
from argus.trace import Options, Tracer


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(trace.spill, "place", lambda target: None)
    store: Any = SimpleNamespace(target=None, spooled=True)
    made: Any = Tracer(store, Options(stacks=True))
    made._roster = SimpleNamespace(attached=[], jobs=[], by_pid={}, candidates=list)
    made._gpu = SimpleNamespace(
        collects=False,
        take_math=lambda _: None,
        look=lambda *_: None,
        work=lambda *_, final: None,
    )
    made._kernels = SimpleNamespace(keeps=False, work=lambda *_, final: None)
    made.worked = []

    def work_on_calls(now: float, *, final: bool) -> Any:
        made.worked.append(now)
        return np.empty(0, records.LAUNCH)

    monkeypatch.setattr(made, "_work_on_calls", work_on_calls)
    return made


def test_records_of_hundreds_of_ranks_become_rows_less_often(tracer: Any) -> None:
    tracer._roster.attached.append(object())
    found = []
    for ranks in (1, 32, 128, 256, 4000):
        tracer._roster.by_pid = dict.fromkeys(range(ranks))
        found.append(tracer._work_interval_s)
    assert found == [0.25, 0.25, 1.0, 2.0, 4.0]
    tracer._roster.attached.clear()
    assert tracer._work_interval_s == 1.0


def test_where_no_calls_come_none_are_looked_for(tracer: Any) -> None:
    tracer._work(1.0)
    assert not tracer.worked


@pytest.mark.parametrize("what", ["drained", "attached", "children", "collects", "final"])
def test_whatever_may_bring_calls_has_them_looked_for(tracer: Any, what: str) -> None:
    if what == "drained":
        tracer._drained["marks"].append(np.zeros(1, records.MARK))
    elif what == "attached":
        tracer._roster.attached.append(object())
    elif what == "children":
        tracer.options = Options(children=True, stacks=True)
    elif what == "collects":
        tracer._gpu.collects = True
    tracer._work(1.0, final=what == "final")
    assert tracer.worked == [1.0]


@pytest.mark.parametrize(("after_s", "late"), [(0.6, False), (24.0, True)])
def test_sampling_that_began_late_is_said_to_have(
    tracer: Any, monkeypatch: pytest.MonkeyPatch, after_s: float, late: bool
) -> None:
    """0 samples, and nothing lost: the programs were compiled until the trace was over."""
    tracer.started_ns, tracer._loading = 10**12, SimpleNamespace(wait=lambda _: True, result=lambda: None)
    tracer._stacks = SimpleNamespace(start=lambda: None, look=lambda *_: None, summary=lambda: ["stacks: 0 samples"])
    clock = SimpleNamespace(monotonic_ns=lambda: 10**12 + int(after_s * 1e9))
    monkeypatch.setattr(trace, "time", clock)
    tracer._begin_stacks(1.0)
    (line,) = tracer.stacks()
    assert line.endswith(", from 24.0 s on: their BPF programs were being loaded until then") == late
    assert line.startswith("stacks: 0 samples")
