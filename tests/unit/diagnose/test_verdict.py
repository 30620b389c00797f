"""The contract of ``argus diagnose --format json``: what the schema takes, and what it refuses."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any, cast

import jsonschema
import pytest

from argus.diagnose.verdict import FINDING_KINDS, LEVELS, SCHEMA, Verdict, json_schema, to_json

GOOD: dict[str, Any] = {
    "schema": "argus.verdict/1", "job": "llama", "run": 1, "ranks": 64, "steps": [16, 1237], "status": "degraded",
    "slowdown": 1.97,
    "findings": [{
        "kind": "compute_straggler", "ranks": [0], "hosts": ["n1"], "steps": [16, 1237], "phase": "backward",
        "kernels": [], "slowdown": 1.97, "share": 0.99, "confidence": 0.99, "level": "iteration",
        "id": "0123456789ab", "owner": "infrastructure",
        "evidence": [{"text": "rank 0 came last", "sql": "SELECT 1"}], "action": "Check the GPU.",
    }],
    "whatif": {"S": 1.97, "M_W": 1.0, "M_S": 0.0, "S_optype": {}, "S_rank": {}, "S_stage": {}},
    "coverage": {"complete": True, "dropped": {}}, "reason": "",
}  # fmt: skip


def broken(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    verdict = copy.deepcopy(GOOD)
    change(verdict)
    return verdict


def test_the_schema_is_valid_and_takes_a_good_verdict() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())
    jsonschema.validate(GOOD, json_schema())
    jsonschema.validate(broken(lambda v: v.pop("whatif")), json_schema())
    healthy = broken(lambda v: v.update(status="healthy", findings=[], slowdown=1.0))
    jsonschema.validate(healthy, json_schema())


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.update(schema="argus.verdict/2"),
        lambda v: v.pop("coverage"),
        lambda v: v.pop("slowdown"),
        lambda v: v.update(status="slow"),
        lambda v: v.update(status="healthy"),
        lambda v: v.update(findings=[]),
        lambda v: v.update(status="inconclusive", findings=[], reason=""),
        lambda v: v.update(slowdown=0.5),
        lambda v: v.update(steps=[1, 2, 3]),
        lambda v: v["findings"][0].update(kind="slow"),
        lambda v: v["findings"][0].update(share=1.2),
        lambda v: v["findings"][0].update(confidence=-0.1),
        lambda v: v["findings"][0].update(ranks=["0"]),
        lambda v: v["findings"][0].update(evidence=[]),
        lambda v: v["findings"][0].update(evidence=["rank 0"]),
        lambda v: v["findings"][0].update(level="L1"),
        lambda v: v["findings"][0].update(action=""),
        lambda v: v["findings"][0].pop("id"),
        lambda v: v["findings"][0].update(owner="somebody"),
        lambda v: v["findings"][0].pop("steps"),
        lambda v: v["coverage"].update(dropped={"launches": 3}),
        lambda v: v.update(coverage={"complete": False, "dropped": {"launches": 0}}),
        lambda v: v.update(whatif={"S": 1.0}),
    ],
)
def test_the_schema_refuses_a_broken_verdict(change: Callable[[dict[str, Any]], Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken(change), json_schema())


def test_schema_and_code_know_the_same_words() -> None:
    finding = json_schema()["$defs"]["finding"]["properties"]
    assert finding["kind"]["enum"] == list(FINDING_KINDS)
    assert finding["level"]["enum"] == list(LEVELS)
    assert json_schema()["properties"]["schema"]["const"] == SCHEMA
    assert set(json_schema()["properties"]) == Verdict.__required_keys__ | Verdict.__optional_keys__


def test_json_round_trips_and_refuses_nan() -> None:
    assert json.loads(to_json(cast(Verdict, GOOD))) == GOOD
    with pytest.raises(ValueError, match="JSON"):
        to_json(cast(Verdict, broken(lambda v: v.update(slowdown=float("nan")))))
