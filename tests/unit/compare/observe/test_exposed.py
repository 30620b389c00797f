"""Latencies from histograms of a page of metrics: what pages say, and what a run's latencies become."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from argus.compare.observe.exposed import MOST_SAMPLES, Histogram, chosen, histograms, read_page, samples_between
from argus.compare.observe.latency import exposed_latencies
from argus.compare.observe.plan import Plan, Readings, check, from_yaml, to_document, to_yaml
from argus.model.errors import ArgusError

PAGE = """
# HELP request_seconds How long requests took.
# TYPE request_seconds histogram
request_seconds_bucket{path="/a",le="0.01"} 10
request_seconds_bucket{path="/a",le="0.1"} 30
request_seconds_bucket{path="/a",le="+Inf"} 32
request_seconds_sum{path="/a"} 2.5
request_seconds_count{path="/a"} 32
request_seconds_bucket{le="0.01",path="/b, le=\\"9\\""} 5
request_seconds_bucket{le="0.1",path="/b"} 5
request_seconds_bucket{le="+Inf",path="/b"} 5 1700000000
request_seconds_sum{path="/b"} 0.02
python_info{version="3.11"} 1
broken_seconds_bucket{le="0.1"} much
broken_seconds_bucket{le="NaN"} 3
alone_seconds_bucket{le="+Inf"} 3
negative_seconds_bucket{le="0.1"} -4
"""
READ = Readings(metrics="http://127.0.0.1:1/metrics")


def test_histograms_of_a_page() -> None:
    found = histograms(PAGE)
    assert list(found) == ["request_seconds"], "others have no numbers, or one bucket"
    assert found["request_seconds"].counts == {0.01: 15, 0.1: 35, math.inf: 37}
    assert found["request_seconds"].total == pytest.approx(2.52)
    assert chosen(found, READ) == "request_seconds"


def test_which_histogram_is_meant() -> None:
    two = {"a_seconds": Histogram(), "b_seconds": Histogram()}
    with pytest.raises(ArgusError, match="several histograms") as several:
        chosen(two, READ)
    assert "--metric: a_seconds, b_seconds" in several.value.hint
    assert chosen(two, Readings(metrics=READ.metrics, metric="b_seconds")) == "b_seconds"
    with pytest.raises(ArgusError, match="no histogram 'c'"):
        chosen(two, Readings(metrics=READ.metrics, metric="c"))


def test_the_sum_may_come_first() -> None:
    page = 'a_seconds_sum 3\na_seconds_bucket{le="1"} 2\na_seconds_bucket{le="+Inf"} 2\n'
    assert histograms(page)["a_seconds"].total == 3


def test_figures_of_a_page_that_nobody_can_mean_are_figures() -> None:
    """Counts that are no counts are passed over, and bounds beyond all latencies are latencies that long."""
    page = "".join(
        f'a_seconds_bucket{{x="{x}",le="{bound}"}} {count}\n'
        for x in range(3)
        for bound, count in (("5e-324", 4), ("1e308", 8), ("+Inf", 8), ("2", "1e308"), ("3", "Inf"))
    )
    found = histograms(page)["a_seconds"]
    assert found.counts == {5e-324: 12, 1e308: 24, math.inf: 24}
    with np.errstate(all="raise", over="ignore", under="ignore"):
        figures = exposed_latencies(Histogram(), found, "a_seconds", READ, 10**9)
    assert figures["count"] == 24
    assert figures["max_ns"] == 1e18
    assert sum(count for _, count in figures["histogram"]) == 24


def of(*counts: float, total: float = 0.0) -> Histogram:
    return Histogram(dict(zip((0.01, 0.1, math.inf), counts, strict=True)), total)


def test_latencies_of_a_run_are_what_came_in_it() -> None:
    figures = exposed_latencies(of(100, 150, 150, total=9.0), of(110, 240, 250, total=14.0), "a_seconds", READ, 10**9)
    assert figures["count"] == 100
    assert figures["throughput_s"] == 100
    assert figures["mean_ns"] == pytest.approx(5e9 / 100)
    assert 1e7 < figures["p50_ns"] < 1e8
    assert figures["p99_ns"] == figures["max_ns"] == 1e8, "beyond the last bound: that long at least"
    assert sum(count for _, count in figures["histogram"]) == 100
    values, count, _ = samples_between(of(0, 0, 0), of(10, 10, 10), "a_seconds", READ)
    assert count == 10
    np.testing.assert_allclose(values, (np.arange(10) + 0.5) * 1e6)


def test_a_server_that_was_started_anew_counts_from_0() -> None:
    figures = exposed_latencies(of(900, 900, 900, total=5.0), of(40, 50, 50, total=1.0), "a_seconds", READ, 10**9)
    assert figures["count"] == 50


def test_no_request_and_no_page_are_no_latency() -> None:
    assert exposed_latencies(of(5, 5, 5), of(5, 5, 5), "a_seconds", READ, 10**9)["p50_ns"] is None
    gone = exposed_latencies(of(5, 5, 5), None, "a_seconds", READ, 10**9)
    assert (gone["count"], gone["p50_ns"], gone["unreadable"]) == (0, None, 1)


@pytest.mark.parametrize(("name", "unit", "scale"), [
    ("a_seconds", "ms", 1e9), ("a_milliseconds", "s", 1e6), ("a_latency", "ms", 1e6), ("a_latency", "s", 1e9),
])  # fmt: skip
def test_units_are_those_of_the_name(name: str, unit: str, scale: float) -> None:
    values, *_ = samples_between(of(0, 0, 0), of(0, 1, 1), name, Readings(unit=unit))
    assert values.tolist() == pytest.approx([0.055 * scale])


def test_a_thousand_million_requests_are_as_many_samples_as_can_be_held_and_rare_ones_stay() -> None:
    values, count, _ = samples_between(of(0, 0, 0), of(10**9, 10**9, 10**9 + 1), "a_seconds", READ)
    assert count == 10**9 + 1
    assert len(values) <= MOST_SAMPLES + 2
    assert values.max() == 1e8
    figures = exposed_latencies(of(0, 0, 0), of(10**9, 10**9, 10**9 + 1), "a_seconds", READ, 10**9)
    assert (figures["count"], figures["left_out"]) == (count, 0), "each stands for several"


def test_a_page_that_does_not_answer_is_one_line() -> None:
    with pytest.raises(ArgusError, match=r"^the metrics at http://127\.0\.0\.1:1/metrics cannot be read: ") as failure:
        read_page(READ.metrics)
    assert "\n" not in failure.value.message


@pytest.mark.parametrize(("readings", "why"), [
    (Readings(metrics="file:///etc/passwd"), "the address of the metrics cannot be used"),
    (Readings(metrics="http://user:secret@h/m"), "the address of the metrics cannot be used"),
    (Readings(metrics="http://a b/"), "the address of the metrics cannot be used"),
    (Readings(metrics="http://h/m", key="ms"), "only one can be used"),
    (Readings(metric="a"), "no page of metrics"),
])  # fmt: skip
def test_settings_that_cannot_be(readings: Readings, why: str) -> None:
    with pytest.raises(ArgusError, match=re.escape(why)):
        check(Plan(("true",), readings=readings))


def test_a_file_of_settings_has_them() -> None:
    plan = Plan(("true",), readings=Readings(metrics="http://h:1/metrics", metric="a_seconds"))
    assert from_yaml(to_yaml(to_document(plan)), "f") == plan
