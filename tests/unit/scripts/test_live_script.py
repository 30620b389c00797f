"""What scripts/live draws, and what it calls right; tests/e2e runs jobs of each kind."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(sys, "path", [*sys.path, str(SCRIPTS.parent / "tests" / "fakegpu")])
    yield importlib.import_module("live")
    for name in ("live", "demo"):
        sys.modules.pop(name, None)


def verdict(status: str, *found: tuple[str, list[int]]) -> dict[str, Any]:
    return {"status": status, "slowdown": 1.5, "findings": [{"kind": kind, "ranks": ranks} for kind, ranks in found]}


def test_a_plan_is_drawn_from_its_seed(live: ModuleType) -> None:
    plans = [live.draw(name, number, 7) for name in live.FAULTS for number in range(20)]
    assert plans == [live.draw(name, number, 7) for name in live.FAULTS for number in range(20)]
    assert plans != [live.draw(name, number, 8) for name in live.FAULTS for number in range(20)]
    for plan in plans:
        assert 0 <= plan.rank < plan.ranks
        assert plan.job in live.FAULTS[plan.name].jobs
        assert str(plan.rank) in live.FAULTS[plan.name].env(plan.rank, plan.dose).values()
    assert not any(plan.from_the_start for plan in plans if plan.name == "hang")
    assert {plan.from_the_start for plan in plans if plan.name == "slow GPU"} == {True, False}


def test_a_verdict_is_right_if_status_kind_and_rank_are(live: ModuleType) -> None:
    plan = live.Plan("slow GPU", 0, "train", 4, 2, 0.5, True)
    judge = lambda *words: live.judge(plan, verdict(*words))  # noqa: E731
    assert judge("degraded", ("compute_straggler", [2]))["right"]
    assert judge("degraded", ("compute_straggler", [2]), ("jitter", [1]))["right"]
    assert not judge("degraded", ("jitter", [1]), ("compute_straggler", [2]))["right"]
    assert not judge("degraded", ("compute_straggler", [1]))["right"]
    assert not judge("degraded", ("compute_straggler", [1, 2]))["right"]
    assert not judge("degraded", ("data_loading", [2]))["right"]
    assert not judge("inconclusive", ("compute_straggler", [2]))["right"]
    assert not judge("healthy")["right"]
    hang = live.Plan("hang", 0, "train", 4, 2, 0.5, False)
    assert live.judge(hang, verdict("hung", ("hang", [2])))["right"]
    assert not live.judge(hang, verdict("degraded", ("hang", [2])))["right"]
    healthy = live.Plan("healthy", 0, "train", 4, 2, 0.5, False)
    assert live.judge(healthy, verdict("healthy"))["right"]
    assert not live.judge(healthy, verdict("inconclusive"))["right"]
    assert not live.judge(healthy, verdict("degraded", ("jitter", [1])))["right"]
