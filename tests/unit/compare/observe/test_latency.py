"""Latencies that a run prints: by pattern, by key, with errors and retries; and the histogram that is kept of them."""

from __future__ import annotations

import numpy as np
import pytest

from argus.compare.observe.latency import BIN, LONGEST_LINE, read_latencies, samples_of, summary
from argus.compare.observe.plan import PATTERNS, Readings


def read(lines: list[str], readings: Readings, wall_ns: int = 10**9) -> dict[str, object]:
    found = read_latencies(lines, readings, wall_ns)
    assert found is not None
    return found


def test_nothing_is_read_where_nothing_is_asked_for() -> None:
    assert read_latencies(["latency=3 ms"], Readings(), 1) is None


def test_a_pattern_with_units() -> None:
    lines = ["latency=3.5 ms and latency: 250us", "latency=2 s", "latency=abc ms", "latency=1 h", "latency=9us x"]
    found = read(lines, Readings(PATTERNS["latency"]))
    assert found["count"] == 4
    assert found["max_ns"] == 2e9
    assert found["throughput_s"] == 4


def test_a_pattern_without_a_unit_has_the_one_given() -> None:
    assert read(["took 3.5"], Readings(r"took ([0-9.]+)", unit="ms"))["p50_ns"] == 3.5e6


@pytest.mark.parametrize(
    ("key", "line", "ns"),
    [
        ("latency_ms", '{"latency_ms": 3.5}', 3.5e6),
        ("a.b_us", '{"a": {"b_us": "250"}}', 250e3),
        ("took", ' {"took": 2}', 2e9),
        ("took_all", '{"took_all": [2, 2]}', 2e9),
    ],
)
def test_a_key_of_lines_of_json(key: str, line: str, ns: float) -> None:
    assert read([line, "no json", "{broken", '{"other": 1}', "[1]"], Readings(key=key))["p50_ns"] == ns


@pytest.mark.parametrize("value", ["true", "null", "-1", "0", '"nan"', "1e400", '{"x": 1}', '"inf"'])
def test_what_is_no_latency_is_left_out(value: str) -> None:
    found = read([f'{{"k": {value}}}'], Readings(key="k"))
    assert (found["count"], found["p50_ns"], found["throughput_s"]) == (0, None, None)
    assert found["unreadable"] == 1


def test_what_cannot_be_read_is_counted() -> None:
    pattern = Readings(r"took (\S+) (\w+)")
    assert read(["took 3 ms", "took 3 parsecs", "took x ms", "took -3 ms"], pattern)["unreadable"] == 3
    assert read(["x" * LONGEST_LINE, "took 3 ms"], pattern)["unreadable"] == 1
    assert read(['{"k": 1}', '{"other": 1}', "text", '{"k": '], Readings(key="k"))["unreadable"] == 1


def test_errors_and_retries_are_counted_only_if_asked_for() -> None:
    lines = ["error: a", "retry", "retry", "fine"]
    found = read(lines, Readings(errors="^error", retries="retry"))
    assert (found["errors"], found["retries"]) == (1, 2)
    assert read(lines, Readings(errors="^error"))["retries"] is None, "not counted is not 0"


def test_more_than_is_kept_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("argus.compare.observe.latency.MOST_SAMPLES", 3)
    found = read(["t=1"] * 5, Readings("t=([0-9]+)"))
    assert (found["count"], found["left_out"]) == (3, 2)


def test_a_line_without_end_is_searched_in_part() -> None:
    assert read([" " * LONGEST_LINE + "t=1"], Readings("t=([0-9]+)"))["count"] == 0


def test_the_histogram_has_all_samples_to_a_hundredth() -> None:
    values = np.random.default_rng(2).lognormal(15, 1, 5000)
    found = summary(values)
    back = samples_of(found["histogram"])
    assert len(back) == 5000
    assert np.abs(back / np.sort(values) - 1).max() < BIN - 1
    assert samples_of([]).tolist() == []


def test_growth_is_of_the_last_third_over_the_first() -> None:
    assert summary(np.linspace(1, 2, 300))["growth"] == pytest.approx(np.log(1.833 / 1.167), abs=0.01)
    assert summary(np.ones(29))["growth"] is None, "nine in a third are too few"
