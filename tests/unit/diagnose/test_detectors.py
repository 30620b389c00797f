"""Detectors: what one has to do to be asked, when it is asked, and what becomes of its suspects."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from argus.diagnose.case import Case
from argus.diagnose.detector import ANY, Entry, ask
from argus.diagnose.detectors import DETECTORS
from argus.diagnose.findings import findings_of
from argus.diagnose.kinds import EXPLANATIONS, OWNERS
from argus.diagnose.run import diagnose
from argus.diagnose.suspect import StepTime, Suspect, slowdown_of
from argus.diagnose.verdict import FINDING_KINDS, Verdict
from argus.model.errors import ArgusError
from tests.builders.cases import case_of
from tests.builders.memory_query import MemoryQuery
from tests.builders.synthetic_job import simulate


def suspect(kind: str, ranks: list[int], lost_ns: float, *, since: int = 7) -> Suspect:
    output = [{"text": f"{kind} of {ranks}", "sql": "SELECT 1"}]
    return Suspect(kind, ranks, ["node-0"], since, 59, lost_ns, 1.5, 0.9, "phase", output, "Look.")  # type: ignore[arg-type]


@dataclass
class Suspects:
    """A detector that suspects the same in any job."""

    suspects: list[Suspect]

    def detect(self, _: Case) -> list[Suspect]:
        return self.suspects


def job(suspects: dict[str, list[Suspect]] | None = None) -> Case:
    case = case_of(MemoryQuery(simulate(steps=20)), {"job": "j", "run": 1}, np.full(20, 1e8), {0: "node-0"})
    for name, found in (suspects or {}).items():
        ask([Entry(name, Suspects(found))], case)
    return case


class SlowDisks:
    """All that a detector is."""

    def detect(self, case: Case) -> list[Suspect]:
        lost_ns = 0.25 * case.recent_ns
        output = {"text": f"the disk of rank 2 is slow since step {case.last - 5}", "sql": "SELECT 1"}
        return [
            Suspect(
                "data_loading", [2], case.hosts_of([2]), case.last - 5, case.last, lost_ns,
                slowdown_of(case.recent_ns, lost_ns), 0.8, "phase", [output], "Look at its disk.",  # type: ignore[list-item]
            )
        ]  # fmt: skip


def test_a_detector_is_one_file_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = MemoryQuery(simulate(steps=60))
    assert diagnose(healthy, "job", 1)["findings"] == []
    monkeypatch.setattr("argus.diagnose.run.DETECTORS", (*DETECTORS, Entry("slow_disks", SlowDisks())))
    verdict = diagnose(healthy, "job", 1)
    assert (verdict["status"], verdict["slowdown"]) == ("degraded", pytest.approx(1 / 0.75, abs=1e-3))
    (found,) = verdict["findings"]
    assert (found["kind"], found["ranks"], found["share"], found["owner"]) == ("data_loading", [2], 1.0, "data")
    assert found["slowdown"] == verdict["slowdown"]
    assert re.fullmatch("[0-9a-f]{12}", found["id"])
    assert found["id"] == diagnose(healthy, "job", 1)["findings"][0]["id"]


class Broken:
    """A detector with a defect, or one whose store is away."""

    def __init__(self, failure: Exception) -> None:
        self.failure = failure

    def detect(self, *_: object) -> list[Suspect]:
        raise self.failure


def with_detectors(monkeypatch: pytest.MonkeyPatch, *more: Entry) -> Verdict:
    monkeypatch.setattr("argus.diagnose.run.DETECTORS", (*more[:1], *DETECTORS, *more[1:]))
    return diagnose(MemoryQuery(simulate(steps=60)), "job", 1)


def test_a_detector_that_fails_costs_its_own_findings_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    broken = Entry("bent_disks", Broken(ZeroDivisionError("a planted fault")))
    verdict = with_detectors(monkeypatch, broken)
    assert verdict["status"] == "inconclusive", "what was not examined is not healthy"
    assert verdict["reason"].startswith("bent disks could not be examined (internal error); ")
    assert verdict["coverage"] == {"complete": False, "dropped": {"detectors_failed": 1}, "ended": True}
    (log,) = (tmp_path / "argus").glob("error-*.log")
    assert "a planted fault" in log.read_text()
    verdict = with_detectors(monkeypatch, broken, Entry("slow_disks", SlowDisks()), broken)
    assert (verdict["status"], [one["kind"] for one in verdict["findings"]]) == ("degraded", ["data_loading"])
    assert verdict["reason"].startswith("bent disks could not be examined (internal error)")
    assert len(list((tmp_path / "argus").iterdir())) == 1, "it is logged once"


def test_a_defect_in_what_all_detectors_read_costs_no_other_finding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also the status asks who came late."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("argus.diagnose.case.lateness_of", Broken(KeyError("a planted fault")).detect)
    verdict = with_detectors(monkeypatch)
    assert (verdict["status"], verdict["slowdown"]) == ("inconclusive", 1.0)
    assert "late ranks" in verdict["reason"]
    assert with_detectors(monkeypatch, Entry("slow_disks", SlowDisks()))["status"] == "degraded"


def test_a_store_that_is_away_is_no_defect_of_a_detector(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgusError, match="is away"):
        with_detectors(monkeypatch, Entry("late", Broken(ArgusError("the store is away"))))


@pytest.mark.parametrize(
    ("how", "before", "asked"),
    [
        ({"unless": (ANY,)}, [], True),
        ({"unless": (ANY,)}, ["a"], False),
        ({"unless": ("a",)}, ["b"], True),
        ({"unless": ("a",)}, ["a", "b"], False),
        ({"only": "a"}, ["a"], True),
        ({"only": "a"}, [], False),
        ({"only": "a"}, ["a", "b"], False),
    ],
)
def test_when_a_detector_is_asked(how: dict[str, object], before: list[str], asked: bool) -> None:
    case = job({name: [suspect("jitter", [number], 1.0)] for number, name in enumerate(before)})
    ask([Entry("late", Suspects([suspect("hang", [9], 1.0)]), **how)], case)  # type: ignore[arg-type]
    assert ("late" in [one.detector for one in case.suspects]) == asked


def test_after_some_suspects_no_other_detector_is_asked() -> None:
    case = job()
    hang = Entry("hang", Suspects([suspect("hang", [1], 1.0)]), last=True)
    ask([hang, Entry("other", Suspects([suspect("jitter", [2], 1.0)]))], case)
    assert [one.detector for one in case.suspects] == ["hang"]
    ask([replace(hang, detector=Suspects([])), Entry("other", Suspects([suspect("jitter", [2], 1.0)]))], case)
    assert [one.detector for one in case.suspects] == ["hang", "other"]


def test_ranks_that_are_suspected_already_may_be_left_out() -> None:
    case = job({"a": [suspect("data_loading", [1], 1.0)]})
    stalls = Suspects([suspect("jitter", [1], 1.0), suspect("jitter", [2], 1.0)])
    ask([Entry("stalls", stalls, other_ranks=True)], case)
    assert [(one.kind, one.ranks) for one in case.suspects] == [("data_loading", [1]), ("jitter", [2])]


def test_a_suspect_takes_the_place_of_those_that_it_explains() -> None:
    case = job({"gpus": [suspect("compute_straggler", [1], 1.0), suspect("compute_straggler", [2], 1.0)]})
    late = replace(suspect("data_loading", [1], 1.0), replaces=(case.suspects[0],))
    ask([Entry("late", Suspects([late]))], case)
    assert [(one.detector, one.kind) for one in case.suspects] == [
        ("gpus", "compute_straggler"), ("late", "data_loading"),
    ]  # fmt: skip
    # What only says more of an earlier one stays that detector's.
    more = replace(case.suspects[0], slowdown=3.0, replaces=(case.suspects[0],))
    ask([Entry("growth", Suspects([more]))], case)
    assert [one.detector for one in case.suspects] == ["late", "gpus"]


def test_shares_are_fractions_of_what_is_lost_the_costliest_first() -> None:
    found = findings_of([suspect("jitter", [1], 1e6), suspect("data_loading", [2], 3e6)], "job", 1)
    assert [(one["kind"], one["share"]) for one in found] == [("data_loading", 0.75), ("jitter", 0.25)]
    assert [one["share"] for one in findings_of([suspect("jitter", [1], 1e6)], "job", 1, lost_ns=4e6)] == [0.25]
    costless = findings_of([suspect("masked_compute_straggler", [1], 0.0)], "job", 1)
    assert costless[0]["share"] == 0.0


def test_evidence_is_in_the_order_seen_cost_further() -> None:
    one = suspect("jitter", [1], 1e6)
    one.cost = {"text": "it costs 1 ms", "sql": ""}
    one.further.append({"text": "its node is hot", "sql": ""})
    texts = [each["text"] for each in findings_of([one], "job", 1)[0]["evidence"]]
    assert texts == ["jitter of [1]", "it costs 1 ms", "its node is hot"]


@pytest.mark.parametrize(
    ("effect", "ideal_ns"),
    [(None, 70.0), (lambda step: step.before(2.0), 50.0), (lambda step: step, 100.0)],
)
def test_what_a_suspect_does_to_the_step(effect: Callable[[StepTime], StepTime] | None, ideal_ns: float) -> None:
    case = job({"a": [replace(suspect("jitter", [1], 30.0), effect=effect)]})
    case.recent_ns = 100.0
    assert case.step == StepTime(100.0, ideal_ns)


def test_costs_that_add_up_to_more_than_a_step_leave_some_of_it() -> None:
    assert StepTime(100.0, 100.0).shorter(60.0).shorter(60.0) == StepTime(100.0, 5.0)


def ids(*suspects: Suspect, run: int = 1) -> list[str]:
    return [found["id"] for found in findings_of(suspects, "job", run)]


def test_an_id_is_of_the_job_the_run_the_kind_and_the_ranks() -> None:
    (one,) = ids(suspect("jitter", [3], 1.0))
    assert ids(suspect("jitter", [3], 9.0, since=40)) == [one]
    assert ids(suspect("jitter", [3, 4], 1.0)) == [one], "a rank that joins is no new finding"
    others = {
        *ids(suspect("jitter", [4], 1.0)),
        *ids(suspect("gc_pause", [3], 1.0)),
        *ids(suspect("jitter", [3], 1.0), run=2),
    }
    assert len(others | {one}) == 4
    # With all ranks, the phase distinguishes them.
    bubble, other = suspect("link_degradation", [], 1.0), suspect("link_degradation", [], 1.0)
    bubble.phase, other.phase = "AllReduce", "AllGather"
    assert len(set(ids(bubble, other))) == 2
    assert len(set(ids(suspect("jitter", [3], 2.0), suspect("jitter", [3, 5], 1.0)))) == 2


def test_every_kind_has_an_owner() -> None:
    assert [one.name for one in EXPLANATIONS] == list(FINDING_KINDS)
    assert {one.owner for one in EXPLANATIONS} == set(OWNERS)
