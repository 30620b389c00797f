"""Rows of the compression in a real store: the view says what the launches were, and what Python decodes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from argus.compress.decode import decode_escapes, decode_summaries
from argus.compress.kernels import Compressor
from argus.store.open import Store, open_store
from argus.store.reader import query
from argus.store.writer import Writer
from tests.stores import new_store

STEP_NS = 1_000_000_000
RANKS, STEPS, LAUNCHES = 4, 12, 3000
NAMES = ("void gemm<float>(int)", "void softmax(float*)", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)")
NUMBERS = itertools.count()
Q = (0.5, 0.9, 0.99)
QUANTILE_BOUND = 0.03
"""Of p50, p90 and p99 of 1,000 launches a row, on average over rows; of a single one at most six times as much."""


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A job in which from step 8 on gemm takes 1.5 times as long on rank 2, with the launches that made it."""
    folder: Path = tmp_path_factory.mktemp("compress")
    rng, compressor = np.random.default_rng(0), Compressor()
    groups = np.array([compressor.group(name, 7, 0, (8, 1, 1), (128, 1, 1)) for name in NAMES])
    launches = {}
    with open_store(new_store(folder)) as store:
        writer = Writer(store, source="test")
        for step in range(STEPS):
            for rank in range(RANKS):
                kind = np.arange(LAUNCHES) % 3
                mode = np.where(rng.random(LAUNCHES) < 0.3, 1.0, 0.0) * (kind == 0)
                spread = np.array([0.01, 0.03, 0.3])[kind]
                log = np.array([10.0, 9.0, 12.0])[kind] + mode + spread * rng.standard_normal(LAUNCHES)
                took = np.exp(log) * np.where((kind == 0) & (rank == 2) & (step >= 8), 1.5, 1)
                if (rank, step) == (1, 9):
                    took[301] = 40 * took[301]  # of softmax
                launches[rank, step] = (kind, took.astype(np.int64))
                start = step * STEP_NS + np.arange(LAUNCHES) * 300_000
                compressor.feed(
                    rank, step, step * STEP_NS, (step + 1) * STEP_NS, groups[kind], start, launches[rank, step][1]
                )
        for table, columns in compressor.take(final=True).items():
            host = {} if table in ("kernel_groups", "kernel_templates") else {"host": "node-0"}
            assert writer.append(table, {"job": "j", "run": 1, **host, **columns})
        assert writer.flush(), writer.last_error
        yield store, launches


def view(store: Store, sql: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = query(store, sql).to_pylist()
    return found


def test_the_view_says_what_the_launches_were(stored: tuple[Store, Any]) -> None:
    store, launches = stored
    rows = view(store, "SELECT * FROM kernel_stats")
    assert len(rows) == RANKS * STEPS * 3
    kinds = {"gemm<float>": 0, "softmax": 1, "ncclDevKernel_AllReduce_Sum_f32_RING_LL": 2}
    errors = []
    for row in rows:
        kind, took = launches[row["rank"], row["step_from"]]
        own = took[kind == kinds[row["kernel"]]]
        assert row["step_to"] == row["step_from"]
        assert row["count"] == len(own)
        assert row["total_ns"] == (own.sum() if not row["spikes"] else pytest.approx(own.sum(), rel=1e-3))
        assert row["mean_ns"] == pytest.approx(own.mean(), rel=1e-3)
        assert row["min_ns"] == pytest.approx(own.min(), rel=0.04)
        assert row["max_ns"] == pytest.approx(own.max(), rel=0.04)
        exact = np.quantile(own, Q, method="inverted_cdf")
        errors.append(np.abs([row["p50_ns"], row["p90_ns"], row["p99_ns"]] - exact) / exact)
    assert np.max(np.mean(errors, axis=0)) < QUANTILE_BOUND
    assert np.max(errors) < 6 * QUANTILE_BOUND
    assert {row["kernel"]: row["spikes"] for row in rows if row["spikes"]} == {"softmax": 1}
    gemm = [row for row in rows if row["kernel"] == "gemm<float>" and not row["escaped"]]
    for row in gemm:
        (low, low_share), (high, high_share) = (tuple(mode.values()) for mode in row["modes"])
        slow = 1.5 if row["rank"] == 2 and row["step_from"] >= 8 else 1
        assert (low, high) == (pytest.approx(slow * np.exp(10), rel=0.02), pytest.approx(slow * np.exp(11), rel=0.02))
        assert (low_share, high_share) == (pytest.approx(0.7, abs=0.06), pytest.approx(0.3, abs=0.06))


def test_the_view_finds_the_slow_kernel(stored: tuple[Store, Any]) -> None:
    sql = """SELECT kernel, rank, round(avgIf(p50_ns, step_from >= 8) / avgIf(p50_ns, step_from < 8), 2) AS times
             FROM kernel_stats WHERE job = 'j' GROUP BY kernel, rank ORDER BY times DESC LIMIT 1"""
    (row,) = view(stored[0], sql)
    assert (row["kernel"], row["rank"], row["times"]) == ("gemm<float>", 2, pytest.approx(1.5, abs=0.02))


def test_a_kernels_name_decides_what_is_read(stored: tuple[Store, Any]) -> None:
    """The rows of other kernels are not decoded: that takes longer than everything else."""
    store, _ = stored
    every = view(store, "SELECT * FROM kernel_stats ORDER BY kernel, rank, step_from")
    only = view(store, "SELECT * FROM kernel_stats WHERE kernel = 'softmax' ORDER BY kernel, rank, step_from")
    assert only == [row for row in every if row["kernel"] == "softmax"]
    # Otherwise so few rows are not worth a filter.
    set_so = "SETTINGS join_runtime_filter_min_probe_rows = 0"
    plan = "EXPLAIN SELECT rank, avg(p50_ns) FROM kernel_stats WHERE {} GROUP BY rank " + set_so
    for where, filters in (("kernel = 'softmax'", True), ("kernel LIKE 'soft%'", True), ("rank = 1", False)):
        with store.lease() as client:
            reported = str(client.command(plan.format(where))).replace("\\n", "\n").splitlines()
        read = next(k for k, line in enumerate(reported) if line.strip(" │├└─").startswith("ReadFromMergeTree"))
        assert "kernel_summaries" in reported[read]
        assert (
            any("Runtime filters: " in line and "(kernel_id" in line for line in reported[read : read + 8]) == filters
        )


def test_steps_of_a_row_have_their_shares_of_it(stored: tuple[Store, Any]) -> None:
    store, _ = stored
    summary = "SELECT * REPLACE ('shared' AS job, 3 AS steps, 10 AS count, 100 AS total_ns, 0 AS spikes) FROM"
    with store.lease() as client:
        client.command(f"INSERT INTO kernel_summaries {summary} kernel_summaries WHERE step = 11")
        client.command(f"INSERT INTO kernel_escapes {summary} kernel_escapes WHERE step = 11")
    rows = view(
        store,
        "SELECT rank, kernel_id, groupArray((step, steps, launches, spent_ns)) AS of FROM"
        " (SELECT * FROM kernel_times WHERE job = 'shared' ORDER BY step) GROUP BY rank, kernel_id",
    )
    assert len(rows) == RANKS * 3
    for row in rows:
        assert [tuple(one.values()) for one in row["of"]] == [(11, 1, 3, 33), (12, 1, 3, 33), (13, 1, 4, 34)]
    (late,) = view(store, "SELECT sum(launches) AS n FROM kernel_times WHERE job = 'shared' AND step BETWEEN 12 AND 12")
    assert late["n"] == RANKS * 3 * 3
    totals = "SELECT sum({}) AS n, sum({}) AS ns FROM {} WHERE job = 'j'"
    (given,), (reported,) = (
        view(store, totals.format(*names))
        for names in (("count", "total_ns", "kernel_stats"), ("launches", "spent_ns", "kernel_times"))
    )
    assert (reported["n"], reported["ns"]) == (given["n"], pytest.approx(given["ns"], abs=20))
    with store.lease() as client:
        for table in ("kernel_summaries", "kernel_escapes"):
            client.command(f"DELETE FROM {table} WHERE job = 'shared'")


def test_kernels_without_a_name_are_stored_nevertheless(stored: tuple[Store, Any]) -> None:
    """Rows of ``kernel_groups`` may have been lost on the way."""
    store, _ = stored
    with store.lease() as client:
        client.command("INSERT INTO kernel_summaries SELECT * REPLACE ('nameless' AS job) FROM kernel_summaries")
        client.command("INSERT INTO kernel_templates SELECT * REPLACE ('nameless' AS job) FROM kernel_templates")
    (row,) = view(
        store, "SELECT count() AS n, sum(p50_ns) AS ns FROM kernel_stats WHERE job = 'nameless' AND kernel = ''"
    )
    (reported,) = view(
        store, "SELECT count() AS n, sum(p50_ns) AS ns FROM kernel_stats WHERE job = 'j' AND NOT escaped"
    )
    assert row == reported
    assert row["n"] > 0
    with store.lease() as client:
        client.command("DELETE FROM kernel_summaries WHERE job = 'nameless'")
        client.command("DELETE FROM kernel_templates WHERE job = 'nameless'")


def test_python_decodes_what_the_view_says(stored: tuple[Store, Any]) -> None:
    store, _ = stored
    output = {
        (row["kernel_id"], row["rank"], row["step_from"]): [row["p50_ns"], row["p90_ns"], row["p99_ns"]]
        for row in view(store, "SELECT * FROM kernel_stats WHERE spikes = 0")
    }
    templates = query(store, "SELECT * FROM kernel_templates")
    for table in ("kernel_summaries", "kernel_escapes"):
        rows = query(store, f"SELECT * FROM {table} WHERE spikes = 0")
        decoded = decode_escapes(rows) if table == "kernel_escapes" else decode_summaries(rows, templates)
        found = np.column_stack([decoded.quantile(q) for q in Q])
        keys = zip(*(rows.column(name).to_pylist() for name in ("kernel_id", "rank", "step")), strict=True)
        assert rows.num_rows
        for key, values in zip(keys, found, strict=True):
            assert output[key] == pytest.approx(values, rel=1e-4, abs=1)


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.lists(st.sampled_from([0, 1, 7, 1000, 1003, 1100, 10**12]), max_size=12), min_size=1, max_size=9),
    st.sampled_from([1, 4]),
    st.integers(1, 4),
)
def test_any_durations_survive_the_store(
    stored: tuple[Store, Any], steps: list[list[int]], steps_per_row: int, pool: int
) -> None:
    """Each step is in one row, whatever rows cover; counts and times are exact, and distributions as they were sent."""
    store, _ = stored
    compressor = Compressor(steps_per_row=steps_per_row, pool=pool)
    group = compressor.group("k", 7, 0, (1, 1, 1), (1, 1, 1))
    for step, took in enumerate(steps * 4):
        ns = np.array(took * 8, np.int64)
        compressor.feed(0, step, 0, STEP_NS, np.full(len(ns), group), np.arange(len(ns)), ns)
    sent = compressor.take(final=True)
    job = f"any{next(NUMBERS)}"
    with Writer(store, source="test") as writer:
        for table, columns in sent.items():
            host = {} if table in ("kernel_groups", "kernel_templates") else {"host": "node-0"}
            assert writer.append(table, {"job": job, "run": 1, **host, **columns})
        assert writer.flush(), writer.last_error
    many, total = 0, 0
    seen: list[int] = []
    templates = query(store, f"SELECT * FROM kernel_templates WHERE job = '{job}'")
    for table in ("kernel_summaries", "kernel_escapes"):
        rows = query(store, f"SELECT * EXCEPT stored FROM {table} WHERE job = '{job}' ORDER BY kernel_id, rank, step")
        if not rows.num_rows:
            continue
        for row in rows.select(["step", "steps", "count", "total_ns"]).to_pylist():
            seen += range(row["step"], row["step"] + row["steps"])
            many, total = many + row["count"], total + row["total_ns"]
        order = np.argsort(sent[table]["step"])
        decoded = decode_escapes(rows) if table == "kernel_escapes" else decode_summaries(rows, templates)
        decoded_before = (
            decode_escapes(sent[table])
            if table == "kernel_escapes"
            else decode_summaries(sent[table], sent["kernel_templates"])
        )
        assert decoded.weight == pytest.approx(decoded_before.weight[order])
        assert decoded.value_ns == pytest.approx(decoded_before.value_ns[order])
    (spikes,) = view(store, f"SELECT sum(duration_ns) AS ns FROM kernel_spikes WHERE job = '{job}'")
    assert (many, total + spikes["ns"]) == (32 * sum(map(len, steps)), 32 * sum(map(sum, steps)))
    assert len(seen) == len(set(seen))
    assert set(seen) >= {step for step, took in enumerate(steps * 4) if took}


def test_the_spike_is_where_it_was(stored: tuple[Store, Any]) -> None:
    store, launches = stored
    sql = "SELECT rank, step, toUnixTimestamp64Nano(toDateTime64(ts, 9)) AS at, duration_ns FROM kernel_spikes"
    (row,) = view(store, sql)
    assert (row["rank"], row["step"], row["at"]) == (1, 9, 9 * STEP_NS + 301 * 300_000)
    assert row["duration_ns"] == launches[1, 9][1][301]
