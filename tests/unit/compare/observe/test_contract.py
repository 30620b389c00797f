"""Documents that somebody changed: what is wrong in them is named, and nothing that the schema allows is refused."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest

from argus.compare.observe.contract import wrong_in
from argus.compare.observe.plan import Plan, Readings
from argus.compare.observe.records import META, METRICS, schemas
from tests.builders.observed import session, took

METRICS_CONTRACT = schemas()[METRICS]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("observed") / "o"
    plan = Plan(("x",), repeat=6, readings=Readings(r"latency=([0-9.]+) (ms)", errors="^error"))
    session(folder, plan, [took(1.0 + 0.5 * (n == 3)) for n in range(6)], output=lambda _: "latency=3 ms\n").carry_out()
    return {name: json.loads((folder / name).read_text()) for name in (METRICS, META)}


@pytest.mark.parametrize("name", [METRICS, META])
def test_what_was_written_is_as_its_schema_says(documents: dict[str, Any], name: str) -> None:
    assert wrong_in(documents[name], schemas()[name]) == ""


def set_wall(value: Any) -> Any:
    def change(metrics: dict[str, Any]) -> None:
        metrics["runs"][3]["figures"]["wall_ns"] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_wall("x"), 'runs[3].figures.wall_ns is "x", not number or null'),
        (set_wall(math.nan), "runs[3].figures.wall_ns is not a number that can be used"),
        (set_wall(10**400), "runs[3].figures.wall_ns is not a number that can be used"),
        (set_wall(-1), "runs[3].figures.wall_ns is -1, which does not fit (minimum)"),
        (set_wall([1]), "runs[3].figures.wall_ns is a list, not number or null"),
        (lambda metrics: metrics.pop("runs"), "the document is not complete, or has too much: 'runs' is a required"),
        (lambda metrics: metrics["runs"][0].pop("noise"), "runs[0] is not complete, or has too much: 'noise' is a"),
        (lambda metrics: metrics["runs"][0].update(a="b"), "runs[0] is not complete, or has too much: Additional"),
        (lambda metrics: metrics["runs"][1].update(status="fine"), 'runs[1].status is "fine", not one of ok, failed'),
        (lambda metrics: metrics["runs"][1].update(latency=3), "runs[1].latency is 3, which does not fit (anyOf)"),
        (lambda metrics: metrics["runs"][1]["latency"].update(histogram=[[1]]), "histogram[0] has 1 items"),
        (lambda metrics: metrics["runs"].__setitem__(2, "\x1b[2Jx\n" * 99), 'runs[2] is "\\u001b[2Jx\\n'),
    ],
)
def test_what_is_wrong_is_named(documents: dict[str, Any], change: Any, message: str) -> None:
    metrics = copy.deepcopy(documents[METRICS])
    change(metrics)
    found = wrong_in(metrics, METRICS_CONTRACT)
    assert message in found
    assert found.isprintable()
    assert len(found) < 200
