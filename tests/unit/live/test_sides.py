"""What is given up to stay within the budget is carried out by the side that it is part of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from argus.live import tracer as trace
from argus.live.cost.budget import BudgetSide
from argus.live.cost.governor import Change, Part, Rung
from argus.live.job import Job, Member
from argus.live.options import Options
from argus.live.side import Side
from argus.live.sides.gpu_times import GpuSide
from argus.live.tracer import Tracer
from argus.model.losses import UNKNOWN, Owner
from tests.builders.sessions import Rows, a_session


class Observer(Side):
    """A side that notes what it is asked to give up."""

    name = "observer"

    def __init__(self, *parts: Part) -> None:
        self.parts = parts
        self.asked: list[tuple[str, Rung]] = []

    def reduce(self, rung: Rung, now: float, owner: Owner = UNKNOWN) -> None:
        self.asked.append(("reduce", rung))

    def restore(self, rung: Rung, now: float, owner: Owner = UNKNOWN) -> None:
        self.asked.append(("restore", rung))


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(trace.spill, "place", lambda target: None)
    return Tracer(SimpleNamespace(target=None, spooled=True), Options(stacks=True))  # type: ignore[arg-type]


def test_each_rung_goes_to_the_side_of_its_part() -> None:
    stacks, gpu, probes = Observer(Part.STACKS, Part.OFF_CPU), Observer(Part.GPU), Observer(Part.CALLS, Part.MARKS)
    calls: Any = SimpleNamespace(waited_ns=0)
    windows: Any = probes
    side = BudgetSide(a_session(Rows()), calls, windows, (stacks, gpu), SimpleNamespace())  # type: ignore[arg-type]
    for rung in Rung:
        side._carry_out(Change(rung, True, 0.1, 0.1), 1.0)
        if rung.back:
            side._carry_out(Change(rung, False, 0.1, 0.1), 1.0)
    for each, parts in ((stacks, {Part.STACKS, Part.OFF_CPU}), (gpu, {Part.GPU}), (probes, {Part.CALLS, Part.MARKS})):
        assert [rung for what, rung in each.asked if what == "reduce"] == [r for r in Rung if r.part in parts]
        assert [rung for what, rung in each.asked if what == "restore"] == [
            r for r in Rung if r.part in parts and r.back
        ]
    counters = side.counters()
    assert counters["waits_not_followed"] == (1, True)
    assert counters["call_probes_detached"] == (2, True), "copies and waits; coming back is not counted"
    assert "" not in counters


def test_what_changes_is_a_feature_of_every_rank_that_runs() -> None:
    job, rows = Job("j", 1), Rows()
    for rank, state in enumerate(("traced", "exited", "traced")):
        job.members[rank] = Member(SimpleNamespace(pid=rank), rank, "order", state)  # type: ignore[arg-type]
    session = a_session(rows, jobs=[job])
    budget: Any = BudgetSide(session, *[Observer()] * 2, (), SimpleNamespace())  # type: ignore[arg-type]
    budget._report(Change(Rung.FOLLOW_WAITS, True, 0.02, 0.01))
    states = [(row["rank"], row["feature"], row["state"]) for row in rows["features"]]
    assert states == [(0, "following waits", "off"), (2, "following waits", "off")]
    assert session.notes[-1].startswith("overhead: time off the CPU is not followed")


def test_no_rung_lacks_a_side(tracer: Any) -> None:
    assert {rung.part for rung in Rung} <= {part for side in tracer.sides for part in side.parts}


def test_every_rung_that_is_no_probe_s_is_reducible_by_its_side(tracer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that its side does not name in ``reducible`` is never taken."""
    from tests.unit.live.sides.test_stack_samples import Session

    stacks = Session(monkeypatch)
    stacks.side.raise_sampling("hang", stacks.now)
    (gpu,) = (side for side in tracer.sides if isinstance(side, GpuSide))
    gpu._processes = [SimpleNamespace(owner=UNKNOWN, collects=True)]  # type: ignore[list-item]
    for side in (stacks.side, gpu):
        assert side.reducible(UNKNOWN) == {rung for rung in Rung if rung.part in side.parts and not rung.subject}
    assert {rung.part for rung in Rung if not rung.subject} == {*stacks.side.parts, *gpu.parts}


def test_every_side_keeps_to_the_protocol(tracer: Any) -> None:
    assert all(Side in type(side).__mro__ for side in tracer.sides)
    assert len({side.name for side in tracer.sides}) == len(tracer.sides)


def test_stacks_give_up_and_take_up_again_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.unit.live.sides.test_stack_samples import Session

    session = Session(monkeypatch)
    session.side.raise_sampling("hang", session.now)
    assert session.side.rate_hz == 97
    session.side.reduce(Rung.SAMPLE_OFTEN, session.now)
    assert session.side.rate_hz == 19
    session.side.reduce(Rung.SAMPLE_USUALLY, session.now)
    assert (session.side.rate_hz, session.side.reducible(UNKNOWN)) == (7, {Rung.FOLLOW_WAITS})
    session.side.restore(Rung.SAMPLE_USUALLY, session.now)
    assert session.side.rate_hz == 19
    session.side.restore(Rung.SAMPLE_OFTEN, session.now)
    assert session.side.rate_hz == 97
