"""A trace of processes that make no calls does nothing about calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from argus.live import tracer as trace
from argus.live.options import Options
from argus.live.sides import stack_samples
from argus.live.tracer import Tracer
from argus.model import records


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(trace.spill, "place", lambda target: None)
    store: Any = SimpleNamespace(target=None, spooled=True)
    made: Any = Tracer(store, Options(stacks=True))
    made._roster = made.session.roster = SimpleNamespace(attached=[], jobs=[], by_pid={}, candidates=list)
    made.worked = []

    def work(now: float, *, final: bool) -> Any:
        made.worked.append(now)
        return np.empty(0, records.LAUNCH)

    monkeypatch.setattr(made._calls, "_work", work)
    return made


def test_records_of_hundreds_of_ranks_become_rows_less_often(tracer: Any) -> None:
    tracer.session.roster.attached.append(object())
    intervals, looks = [], []
    for ranks in (1, 32, 128, 256, 4000):
        tracer.session.roster.by_pid = dict.fromkeys(range(ranks))
        intervals.append(tracer._work_interval_s)
        looks.append(tracer._look_interval_s)
    assert intervals == [0.25, 0.25, 1.0, 2.0, 4.0]
    assert looks == [0.5, 0.5, 0.5, 1.0, 2.0], "processes, too"
    tracer.session.roster.attached.clear()
    assert (tracer._work_interval_s, tracer._look_interval_s) == (1.0, 1.0)


def test_where_no_calls_come_none_are_looked_for(tracer: Any) -> None:
    tracer._calls.work(1.0)
    assert not tracer.worked


@pytest.mark.parametrize("what", ["drained", "attached", "children", "collects", "final"])
def test_whatever_may_bring_calls_has_them_looked_for(tracer: Any, what: str) -> None:
    if what == "drained":
        tracer._calls._drained["marks"].append(np.zeros(1, records.MARK))
    elif what == "attached":
        tracer.session.roster.attached.append(object())
    elif what == "children":
        tracer.session.options = Options(children=True, stacks=True)
    elif what == "collects":
        tracer._gpu._processes.append(SimpleNamespace(collects=True))
    tracer._calls.work(1.0, final=what == "final")
    assert tracer.worked == [1.0]


@pytest.mark.parametrize(("after_s", "late"), [(0.6, False), (24.0, True)])
def test_sampling_that_began_late_is_reported(
    tracer: Any, monkeypatch: pytest.MonkeyPatch, after_s: float, late: bool
) -> None:
    """0 samples, and nothing lost: the programs were compiled until the trace was over."""
    side = tracer._stacks
    tracer.session.started_ns = 10**12
    side._programs._loading = SimpleNamespace(wait=lambda _: True, result=lambda: None)
    monkeypatch.setattr(side, "start", lambda: None)
    monkeypatch.setattr(side, "_summary", lambda: ["stacks: 0 samples"])
    clock = SimpleNamespace(monotonic_ns=lambda: 10**12 + int(after_s * 1e9), monotonic=lambda: 1.0)
    monkeypatch.setattr(stack_samples, "time", clock)
    side.begin_sampling(1.0)
    (line,) = tracer.stacks()
    assert line.endswith(", from 24 s on: their BPF programs were being loaded until then") == late
    assert line.startswith("stacks: 0 samples")
