"""Rows of ``signal_coverage``: what was observed, since when."""

from __future__ import annotations

import re
from pathlib import Path

from argus.live.coverage import SIGNALS, Seen, SignalCoverage

ROOT = Path(__file__).resolve().parents[3]
A, B = ("job", 7, 0), ("job", 7, 1)


def test_only_changes_become_rows() -> None:
    coverage = SignalCoverage()
    first = coverage.update({A: {"launches": Seen(), "stacks": Seen()}, B: {"launches": Seen()}}, 100, "node", 1)
    assert list(zip(first["rank"].tolist(), first["signal"], first["seen"].tolist(), strict=True)) == [
        (0, "launches", 1.0),
        (0, "stacks", 1.0),
        (1, "launches", 1.0),
    ]
    assert first["ts"].tolist() == [100] * 3
    assert first["job"] == ["job"] * 3
    windows = Seen(0.25, 4 * 10**9, "too dear")
    second = coverage.update({A: {"launches": windows, "stacks": Seen()}, B: {}}, 200, "node", 2)
    assert second["rank"].tolist() == [0]
    assert (second["seen"].tolist(), second["period_ns"].tolist(), second["reason"]) == (
        [0.25],
        [4 * 10**9],
        ["too dear"],
    )
    assert coverage.of(A)["launches"] == windows
    assert not len(coverage.update({A: {"launches": windows}}, 300, "node", 3)["rank"])


def test_what_ends_is_seen_no_more() -> None:
    coverage = SignalCoverage()
    coverage.update({A: {"launches": Seen(), "products": Seen(0.0, 0, "off")}}, 100, "node", 1)
    over = coverage.update(coverage.end([A, B], "the trace has ended"), 200, "node", 2)
    assert over["signal"] == ["launches"]
    assert over["seen"].tolist() == [0.0]
    assert over["reason"] == ["the trace has ended"]
    coverage.forget("job", 7)
    assert coverage.of(A) == {}


def test_every_signal_is_in_the_schema_and_the_documentation() -> None:
    schema = (ROOT / "schemas" / "coverage.sql").read_text()
    text = (ROOT / "docs" / "sql.md").read_text().split("**`signal_coverage`**")[1].split("\n\n")[0]
    for signal in SIGNALS:
        assert re.search(rf"\b{signal}\b", schema)
        assert f"`{signal}`" in text
