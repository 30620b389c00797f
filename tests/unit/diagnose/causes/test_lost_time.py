"""Why ranks are late: from which steps the phases are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from argus.diagnose.causes.lost_time import _by_cpu, _Peers, cpu_action
from argus.diagnose.read import queries

MS = 1e6
NOTHING: dict[str, Any] = {name: np.empty(0) for name in ("rank", "step", "phase", "duration_ns")}
NO_CALLS: dict[str, Any] = {
    name: np.empty(0) for name in ("rank", "step", "sync_ns", "module_ns", "data_ns", "other_ns")
}


def phases(steps: range) -> dict[str, Any]:
    """Rank 1 loads its batch for 10 ms longer."""
    rows = [(rank, step, "data_loading", (10 * rank + 1) * MS) for step in steps for rank in (0, 1)]
    rows += [(rank, step, "backward", 5 * MS) for step in steps for rank in (0, 1)]
    return dict(zip(NOTHING, map(np.array, zip(*rows, strict=True)), strict=True))


@pytest.mark.parametrize("seen", [range(985, 1000), range(400, 412)], ids=["throughout", "in samples"])
def test_where_the_newest_steps_have_no_phases_those_since_the_onset_say_why(seen: range) -> None:
    asked = []

    def query(sql: str, params: dict[str, Any]) -> dict[str, Any]:
        assert sql == queries.PHASE_TIME
        asked.append(params["first"])
        inside = [step for step in seen if step >= params["first"]]
        return phases(range(inside[0], inside[-1] + 1)) if inside else NOTHING

    case: Any = SimpleNamespace(query=query)
    straggler: Any = SimpleNamespace(ranks=(1,), gain_ns=10 * MS, hidden=False)
    peers = _Peers([1], [1], [0], {"first": 980, "last": 999, "ranks": [0, 1]}, None)
    cause, (sql, window) = _by_cpu(case, straggler, 300, peers, NO_CALLS)
    assert (cause.kind, sql) == ("data_loading", queries.PHASE_TIME)
    assert window["first"] == asked[-1] == (980 if seen.start > 980 else 300)
    assert peers.window["first"] == 980


@pytest.mark.parametrize(
    ("phase", "begins"),
    [
        ("", "Look at the CPU of rank 1: other processes on its cores"),
        ("optimizer", "See what the CPU of rank 1 does in the optimizer: a loop over parameters"),
        ("forward", "See what the CPU of rank 1 does in the forward: hooks"),
        ("checkpoint", "See why rank 1 saves checkpoints"),
        ("other", "See what the CPU of rank 1 does between the marked parts of a step: logging"),
        ("my_logging", "See what rank 1 does in my_logging that the others do not"),
    ],
)
def test_what_to_do_about_a_late_cpu_depends_on_the_phase(phase: str, begins: str) -> None:
    assert cpu_action("rank 1", phase).startswith(begins)
