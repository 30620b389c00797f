"""Rows of the compression in a real store: the view says what the launches were, and what Python decodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from argus.compress.decode import decode_escapes, decode_summaries
from argus.compress.kernels import Compressor
from argus.store.open import Store, open_store
from argus.store.reader import query
from argus.store.writer import Writer

STEP_NS = 1_000_000_000
RANKS, STEPS, LAUNCHES = 4, 12, 3000
NAMES = ("void gemm<float>(int)", "void softmax(float*)", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)")
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
    with open_store(f"chdb://{folder}/store") as store:
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
        mine = took[kind == kinds[row["kernel"]]]
        assert row["step_to"] == row["step_from"]
        assert row["count"] == len(mine)
        assert row["total_ns"] == (mine.sum() if not row["spikes"] else pytest.approx(mine.sum(), rel=1e-3))
        assert row["mean_ns"] == pytest.approx(mine.mean(), rel=1e-3)
        assert row["min_ns"] == pytest.approx(mine.min(), rel=0.04)
        assert row["max_ns"] == pytest.approx(mine.max(), rel=0.04)
        exact = np.quantile(mine, Q, method="inverted_cdf")
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


def test_python_decodes_what_the_view_says(stored: tuple[Store, Any]) -> None:
    store, _ = stored
    said = {
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
            assert said[key] == pytest.approx(values, rel=1e-4, abs=1)


def test_the_spike_is_where_it_was(stored: tuple[Store, Any]) -> None:
    store, launches = stored
    sql = "SELECT rank, step, toUnixTimestamp64Nano(toDateTime64(ts, 9)) AS at, duration_ns FROM kernel_spikes"
    (row,) = view(store, sql)
    assert (row["rank"], row["step"], row["at"]) == (1, 9, 9 * STEP_NS + 301 * 300_000)
    assert row["duration_ns"] == launches[1, 9][1][301]
