"""Documents that somebody changed: what is wrong in them is named, and nothing that the schema allows is refused."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from argus.compare.observe.contract import KEYWORDS, wrong_in
from argus.compare.observe.plan import Plan, Readings
from argus.compare.observe.records import CONFIG, META, METRICS, schemas
from tests.builders.observed import session, took

ANNOTATIONS = {"$schema", "$id", "title", "description"}
CONTRACTS = schemas()
METRICS_CONTRACT = CONTRACTS[METRICS]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("observed") / "o"
    plan = Plan(("x",), repeat=6, readings=Readings(r"latency=([0-9.]+) (ms)", errors="^error"))
    session(folder, plan, [took(1.0 + 0.5 * (n == 3)) for n in range(6)], output=lambda _: "latency=3 ms\n").carry_out()
    return {name: json.loads((folder / name).read_text()) for name in (METRICS, META)}


def schemas_within(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and all within it."""
    if isinstance(schema, dict):
        yield schema
        for key in ("items", "additionalProperties"):
            yield from schemas_within(schema.get(key))
        for key in ("anyOf", "prefixItems"):
            for one in schema.get(key, ()):
                yield from schemas_within(one)
        for one in schema.get("properties", {}).values():
            yield from schemas_within(one)


@pytest.mark.parametrize("name", [METRICS, META, CONFIG])
def test_every_keyword_of_the_schemas_is_checked(name: str) -> None:
    used = {key for schema in schemas_within(CONTRACTS[name]) for key in schema}
    assert used <= KEYWORDS | ANNOTATIONS


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container of a JSON value with each of its keys; of lists the first item."""
    keys = list(value) if isinstance(value, dict) else [0] if isinstance(value, list) and value else []
    for key in keys:
        yield value, key
        yield from places(value[key])


@pytest.mark.parametrize("name", [METRICS, META])
def test_it_refuses_what_jsonschema_refuses(documents: dict[str, Any], name: str) -> None:
    document = copy.deepcopy(documents[name])
    assert wrong_in(document, CONTRACTS[name]) == ""
    validator = jsonschema.Draft202012Validator(CONTRACTS[name])
    refused = 0
    for holder, key in list(places(document)):
        before = holder[key]
        for value in ("x", -1, 0.5, True, None, [], {}, {"a": 1}):
            holder[key] = value
            expected = validator.is_valid(document)
            assert (wrong_in(document, CONTRACTS[name]) == "") == expected, (key, value)
            refused += not expected
        holder[key] = before
        if isinstance(holder, dict):
            rest = {other: one for other, one in holder.items() if other != key}
            holder.clear()
            assert (wrong_in(document, CONTRACTS[name]) == "") == validator.is_valid(document), key
            holder.update({**rest, key: before})
    assert refused > 50


def set_wall(value: Any) -> Any:
    def change(metrics: dict[str, Any]) -> None:
        metrics["runs"][3]["figures"]["wall_ns"] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_wall("x"), 'runs[3].figures.wall_ns is "x", not a number or null'),
        (set_wall(math.nan), "runs[3].figures.wall_ns is NaN, not a number or null"),
        (set_wall(10**400), "runs[3].figures.wall_ns is a number of many digits, not a number or null"),
        (set_wall(-1), "runs[3].figures.wall_ns is -1: it must be from 0"),
        (set_wall([1]), "runs[3].figures.wall_ns is a list, not a number or null"),
        (lambda metrics: metrics.pop("runs"), "the document has no runs"),
        (lambda metrics: metrics["runs"][0].pop("noise"), "runs[0] has no noise"),
        (lambda metrics: metrics["runs"][0].update(a="b"), "runs[0] has 'a', which means nothing there"),
        (lambda metrics: metrics["runs"][1].update(status="fine"), 'runs[1].status is "fine", not one of ok, failed'),
        (lambda metrics: metrics["runs"][1].update(latency=3), "runs[1].latency is 3, not null or an object"),
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
