"""The page as a whole: the verdict in it, panels that fail, names of others, arrays."""

from __future__ import annotations

import json
import zlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from argus.diagnose.stored import diagnose_store
from argus.model.errors import ArgusError
from argus.report import build
from argus.report.arrays import Arrays, unpacked
from argus.report.look import bounded
from argus.report.panels import steps
from argus.report.summary import summary_of
from argus.store.open import Store
from tests.builders.report_jobs import HOSTILE, SLOW, write_hostile
from tests.unit.report.conftest import Made, Pages


@pytest.mark.thorough(first=1)
@pytest.mark.parametrize("job", ["slow", "hung", "one"])
def test_the_page_has_the_verdict_of_diagnose(pages: Pages, report_store: Store, job: str) -> None:
    page = pages(job).page
    verdict = diagnose_store(report_store, job, page["run"])
    shown = page["verdict"]
    for key in ("status", "slowdown", "ranks", "steps", "reason", "coverage"):
        assert shown[key] == verdict[key]
    assert [one["id"] for one in shown["findings"]] == [one["id"] for one in verdict["findings"]]
    assert page["window"]["first_step"] == verdict["steps"][0]
    assert page["window"]["last_step"] == verdict["steps"][1]
    assert int(page["window"]["begin_ns"]) < int(page["window"]["end_ns"])
    json.dumps(page, allow_nan=False)


def test_only_the_steps_that_were_asked_for(report_store: Store, slow: Made) -> None:
    page, packed = build.build_page(report_store, "slow", slow.page["run"], steps=(50, 69))
    made = Made(report_store, page, packed)
    assert page["window"]["first_step"] == 50
    assert made.view("heatmap")["edges"] == list(range(50, 71))
    assert made.array(made.view("steps")["x"]).tolist() == list(range(50, 70))


def test_the_summary_says_who_since_when_and_what_it_costs(slow: Made) -> None:
    since = slow.page["verdict"]["findings"][0]["steps"][0]
    text = slow.page["summary"]
    assert f"rank {SLOW} on node0000" in text
    assert f"since step {since}" in text
    assert f"{slow.page['verdict']['slowdown']:.2f}x slower" in text
    assert text == summary_of(slow.page["verdict"])  # type: ignore[arg-type]


@pytest.mark.parametrize("failure", [ValueError("<b>no"), ArgusError("the store is away", "look")])
def test_a_panel_that_fails_is_absent_and_the_others_stay(
    report_store: Store, slow: Made, monkeypatch: pytest.MonkeyPatch, failure: Exception, tmp_path: Any
) -> None:
    def fail(look: object, arrays: object) -> Any:
        raise failure

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    broken = SimpleNamespace(ID="broken", TITLE="Broken", build=fail)
    monkeypatch.setattr(build, "PANELS", (broken, steps))
    page, _ = build.build_page(report_store, "slow", slow.page["run"])
    first, second = page["panels"]
    assert "could not be" in first["absent"]
    assert "<b>" not in first["absent"]
    assert not second["absent"]


def test_names_of_others_are_bounded(report_store: Store) -> None:
    write_hostile(report_store)
    page, _ = build.build_page(report_store, HOSTILE, 7)
    for text, path in _texts(page, ""):
        if path.endswith((".sql", ".text")) and "sql" in path:
            continue
        assert len(text) <= 4_000, path
        assert text.replace("\n", "").isprintable(), path
    for panel in page["panels"]:
        assert "could not be" not in panel["absent"], panel
        for sql in panel["sql"]:
            # The name is too long to stand in every query.
            assert HOSTILE not in sql["text"]
    assert {"heatmap", "steps", "phases", "kernels", "flame", "health"} <= {
        panel["id"] for panel in page["panels"] if not panel["absent"]
    }
    answer = Made(report_store, page, b"").rows("steps")
    assert len(answer["place"]) == 40


def _texts(value: Any, path: str) -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [found for key, each in value.items() for found in _texts(each, f"{path}.{key}")]
    if isinstance(value, list):
        return [found for each in value for found in _texts(each, path)]
    return [(value, path)] if isinstance(value, str) else []


def test_a_megabyte_is_a_short_name() -> None:
    assert len(bounded("\u202e" * 1_000_000)) <= 160
    assert bounded("rank\x1b[31m") == "rank\\x1b[31m"


def test_arrays_come_back_as_they_went() -> None:
    arrays = Arrays()
    levels = np.arange(7, dtype=np.uint8).reshape(1, 7)
    first, second, empty = arrays.add(levels, "u1"), arrays.add([1.5, np.nan]), arrays.add([], "f8")
    packed = arrays.packed()
    assert unpacked(packed, first).tolist() == levels.tolist()
    assert np.array_equal(unpacked(packed, second), np.array([1.5, np.nan], np.float32), equal_nan=True)
    assert unpacked(packed, empty).shape == (0,)
    # A Float32Array of a browser begins at a multiple of four.
    assert second["offset"] % 8 == 0
    assert len(zlib.decompress(packed)) == arrays.length
