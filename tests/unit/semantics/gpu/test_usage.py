"""Seconds of a GPU: unions, gaps, queue and latencies, against plain counting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.model import records
from argus.model.records import GPU_OP, GpuKind
from argus.semantics.gpu import usage as gpu
from argus.semantics.gpu.usage import GpuUsage, is_communication, union

S = 1_000_000_000
MS = 1_000_000


def ops(*rows: tuple[int, int], launch: list[int] | None = None, **fields: Any) -> NDArray[np.void]:
    out = np.zeros(len(rows), GPU_OP)
    out["start_ns"], out["end_ns"], out["kind"] = [r[0] for r in rows], [r[1] for r in rows], GpuKind.KERNEL
    if launch is not None:
        out["launch_ns"], out["flags"] = launch, records.GPU_LAUNCH_MATCHED
    for name, value in fields.items():
        out[name] = value
    return out


def windows(given: NDArray[np.void], communication: list[bool] | None = None) -> NDArray[np.void]:
    usage = GpuUsage()
    usage.feed(given, np.array(communication or [False] * len(given)))
    return usage.advance(final=True)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", True),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", True),
        ("void ncclKernel_x<int>(int)", True),
        ("sm90_xmma_gemm_bf16", False),
        ("my_ncclDevKernel", False),
        ("", False),
    ],
)
def test_nccl_s_kernels_are_known_by_name(name: str, expected: bool) -> None:
    assert is_communication(name) == expected


def test_union() -> None:
    begin, end = np.array([5, 1, 2, 9, 20, 4]), np.array([7, 3, 9, 12, 20, 5])
    assert union(begin, end).tolist() == [[1, 12]]
    assert union(np.array([1, 5, 3]), np.array([3, 6, 4])).tolist() == [[1, 4], [5, 6]]
    assert union(begin[:0], end[:0]).shape == (0, 2)


def test_a_second_of_work() -> None:
    """Two compute kernels that overlap by 100 ms, NCCL half under them, a copy, and idle time between."""
    t = 7 * S
    given = ops(
        (t, t + 300 * MS), (t + 200 * MS, t + 400 * MS), (t + 350 * MS, t + 500 * MS),
        (t + 600 * MS, t + 700 * MS), (t + 800 * MS, t + S),
        launch=[t - 50 * MS, t, t + 10 * MS, t, t + 790 * MS],
    )  # fmt: skip
    given["kind"][3] = GpuKind.MEMCPY
    (row,) = windows(given, [False, False, True, False, False])
    assert (row["start_ns"], row["duration_ns"]) == (t, S)
    assert (row["busy_ns"], row["idle_ns"]) == (800 * MS, 200 * MS)
    assert (row["compute_ns"], row["memcpy_ns"], row["kernels"]) == (600 * MS, 100 * MS, 4)
    assert row["communication_ns"] == 150 * MS
    assert (row["exposed_communication_ns"], row["overlapped_communication_ns"]) == (100 * MS, 50 * MS)
    assert (row["idle_gaps"], row["largest_gap_ns"]) == (2, 100 * MS)
    # queue: 200 ms from the second, 340 from the third, 600 of the copy, 10 of the last
    assert row["queue_depth_mean"] == pytest.approx(1.15)
    assert row["queue_depth_max"] == 3
    assert (row["issue_latency_p50_ns"], row["issue_latency_p99_ns"]) == (50 * MS, 340 * MS)


def test_a_kernel_that_spans_windows_counts_once_and_covers_all() -> None:
    found = windows(ops((S + 900 * MS, 4 * S + 250 * MS)))
    assert found["start_ns"].tolist() == [S + 900 * MS, 2 * S, 3 * S, 4 * S]
    assert found["duration_ns"].tolist() == [100 * MS, S, S, 250 * MS]
    assert found["busy_ns"].tolist() == found["duration_ns"].tolist()
    assert found["kernels"].tolist() == [1, 0, 0, 0]


def test_windows_close_when_newer_records_have_come() -> None:
    usage = GpuUsage()
    nothing = np.zeros(1, bool)
    usage.feed(ops((10 * S, 10 * S + 5)), nothing)
    assert len(usage.advance()) == 0
    usage.feed(ops((10 * S - 500 * MS, 10 * S - 400 * MS)), nothing)  # older, and nothing is closed yet
    usage.feed(ops((14 * S + 900 * MS, 14 * S + 990 * MS)), nothing)
    assert usage.advance()["start_ns"].tolist() == [10 * S - 500 * MS]
    assert len(usage.advance()) == 0
    usage.feed(ops((15 * S, 15 * S)), nothing)
    found = usage.advance()
    assert (found["start_ns"].tolist(), found["busy_ns"].tolist()) == ([10 * S], [5])
    assert usage.late == 0
    usage.feed(ops((10 * S + 7, 12 * S)), nothing)
    assert usage.late == 1
    usage.feed(ops((20 * S, 20 * S + 1)), nothing)
    found = usage.advance()
    assert found["start_ns"].tolist() == [s * S for s in (11, 12, 13, 14, 15)]
    assert found["busy_ns"].tolist() == [S, 0, 0, 90 * MS, 0], "what still lies in open windows counts"
    rest = usage.advance(final=True)
    assert rest["start_ns"].tolist() == [s * S for s in (16, 17, 18, 19, 20)]
    assert rest["duration_ns"].tolist() == [S] * 4 + [1]


def test_devices_are_apart() -> None:
    found = windows(ops((S, S + 5), (S, S + 7), device=[0, 3]))
    assert found["device"].tolist() == [0, 3]
    assert found["busy_ns"].tolist() == [5, 7]


def test_without_launches_the_queue_is_not_known() -> None:
    (row,) = windows(ops((S, S + 5)))
    assert (row["queue_depth_mean"], row["queue_depth_max"]) == (-1, -1)
    assert (row["issue_latency_p50_ns"], row["issue_latency_p99_ns"]) == (-1, -1)
    # An idle second of a process whose launches are known: the queue was empty.
    found = windows(ops((S, S + 5), (3 * S, 3 * S + 5), launch=[S, 3 * S]))
    assert found["queue_depth_max"].tolist() == [0, 0, 0]
    assert found["issue_latency_p50_ns"].tolist() == [0, -1, 0]


def test_gaps_shorter_than_a_kernel_switch_are_none() -> None:
    (row,) = windows(ops((S, S + 5000), (S + 5999, S + 8000), (S + 9000, S + 9500)))
    assert (row["idle_ns"], row["idle_gaps"], row["largest_gap_ns"]) == (1999, 1, 1000)


# ---- against counting every nanosecond


def counted(given: NDArray[np.void], communication: NDArray[np.bool_], window: int, gap: int) -> list[dict[str, Any]]:
    low, high = int(given["start_ns"].min()), int(given["end_ns"].max())
    covers = {name: np.zeros(high + 1, bool) for name in ("all", "compute", "comm", "copy")}
    queue = np.zeros(high + 1, int)
    for op, comm in zip(given, communication, strict=True):
        name = "comm" if comm else "compute" if op["kind"] == GpuKind.KERNEL else "copy"
        covers["all"][op["start_ns"] : op["end_ns"]] = covers[name][op["start_ns"] : op["end_ns"]] = True
        queue[op["launch_ns"] : op["start_ns"]] += 1
    rows = []
    for a in [low, *range((low // window + 1) * window, high, window)]:
        b = min((a // window + 1) * window, high)
        here = {name: cover[a:b] for name, cover in covers.items()}
        begun = (given["start_ns"] >= a) & (given["start_ns"] < b)
        kernels = begun & (given["kind"] == GpuKind.KERNEL)
        latency = np.sort((given["start_ns"] - given["launch_ns"])[kernels].astype(int))
        runs = [len(run) for run in "".join(np.where(here["all"], "X", ".")).split("X") if len(run) >= gap]
        rows.append({
            "start_ns": a, "duration_ns": b - a, "busy_ns": here["all"].sum(), "compute_ns": here["compute"].sum(),
            "communication_ns": here["comm"].sum(), "memcpy_ns": here["copy"].sum(),
            "exposed_communication_ns": (here["comm"] & ~here["compute"]).sum(),
            "overlapped_communication_ns": (here["comm"] & here["compute"]).sum(),
            "idle_ns": (~here["all"]).sum(), "idle_gaps": len(runs), "largest_gap_ns": max(runs, default=0),
            "kernels": kernels.sum(), "queue_depth_mean": pytest.approx(queue[a:b].mean()),
            "queue_depth_max": queue[a:b].max(),
            "issue_latency_p50_ns": latency[(len(latency) + 1) // 2 - 1] if len(latency) else -1,
            "issue_latency_p99_ns": latency[-1] if len(latency) else -1,
        })  # fmt: skip
    return rows


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("streaming", [False, True])
def test_against_counting(seed: int, streaming: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "WINDOW_NS", 100)
    monkeypatch.setattr(gpu, "LAG_NS", 300)
    monkeypatch.setattr(gpu, "IDLE_GAP_NS", 4)
    rng = np.random.default_rng(seed)
    n = 80
    launch = np.sort(rng.integers(300, 3000, n))
    start = launch + rng.integers(0, 90, n)
    given = ops(*zip(start, start + rng.integers(1, 200 if seed % 2 else 20, n), strict=True), launch=launch.tolist())
    given["kind"] = rng.choice([GpuKind.KERNEL, GpuKind.KERNEL, GpuKind.MEMCPY, GpuKind.MEMSET], n)
    communication = (given["kind"] == GpuKind.KERNEL) & (rng.random(n) < 0.4)
    usage, parts = GpuUsage(), []
    if streaming:
        # An operation comes up to 100 ns after its end, by which the newest one is at most 100 ahead.
        order = np.argsort(given["end_ns"].astype(int) + rng.integers(0, 100, n))
        for chunk in np.array_split(order, 17):
            usage.feed(given[chunk], communication[chunk])
            parts.append(usage.advance())
    else:
        usage.feed(given, communication)
    found = np.concatenate([*parts, usage.advance(final=True)])
    expected = counted(given, communication, 100, 4)
    assert len(found) == len(expected)
    for row, wanted in zip(found, expected, strict=True):
        assert {name: row[name] for name in wanted} == wanted
    assert usage.late == 0
