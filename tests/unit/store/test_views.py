"""What views compute, against rows whose answers can be worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from argus.store.open import open_store
from argus.store.reader import query_columns
from argus.store.writer import Writer
from tests.stores import new_store

T0 = 1_700_000_000_000_000_000
US = 1_000
MB = 1_000_000

CALLS = (
    # op, bytes, in a group with the next one, factor of the bus bandwidth on 4 ranks
    ("AllReduce", 8 * MB, False, 2 * 3 / 4),
    ("AllGather", 2 * MB, False, 3),
    ("ReduceScatter", 2 * MB, False, 3),
    ("AlltoAll", 2 * MB, False, 3),
    ("Broadcast", 8 * MB, False, 1),
)


def columns(path: Path, sql: str, **tables: dict[str, Any]) -> dict[str, list[Any]]:
    with open_store(new_store(path)) as store:
        writer = Writer(store, source="test")
        for table, rows in tables.items():
            writer.append(table, rows)
        assert writer.flush()
        assert writer.last_error is None
        return {name: column.tolist() for name, column in query_columns(store, sql).items()}


def kernels(
    rank: list[int], launched: list[int], took: list[int], name: str = "ncclSymkDevKernel_X()"
) -> dict[str, Any]:
    return {
        "job": "j", "run": 1, "rank": rank, "host": "h", "pid": 1, "device": 0, "context": 1, "stream": 7,
        "kind": "kernel", "name": name, "ts": [at + 5 * US for at in launched], "duration_ns": took,
        "launch_ts": launched, "issue_latency_ns": 5 * US, "launch_tid": 1, "launch_probed": True, "correlation": 1,
        "graph": 0, "graph_node": 0, "grid": [[1]] * len(rank), "block": [[1]] * len(rank), "registers": 32,
        "shared_static": 0, "shared_dynamic": 0, "bytes": 0,
    }  # fmt: skip


def calls(
    rank: list[int], op: list[str], at: list[int], nbytes: list[int], seq: list[int], grouped: list[bool]
) -> dict[str, Any]:
    return {
        "job": "j", "run": 1, "rank": rank, "host": "h", "pid": 1, "tid": 1, "comm": 5, "op": op, "bytes": nbytes,
        "seq": seq, "count": 1, "dtype": "float32", "redop": "sum", "peer": -1, "stream": 0, "ts": at,
        "duration_ns": 900, "result": 0, "in_group": grouped,
    }  # fmt: skip


COMMUNICATORS: dict[str, Any] = {
    "job": "j", "run": 1, "rank": range(4), "comm": 5, "comm_group": 77, "comm_rank": range(4), "nranks": 4,
    "seq_offset": 0, "joined_by": "unique_id", "error": "", "version": 1,
}  # fmt: skip


def test_bus_bandwidth_is_what_nccl_s_tests_define(tmp_path: Path) -> None:
    """Rank 2 comes last, so that its kernels wait for nobody and take 100 us; the others' take as much longer as they
    are earlier."""
    rank = [rank for rank in range(4) for _ in CALLS]
    place = [place for _ in range(4) for place in range(len(CALLS))]
    at = [T0 + number * 1000 * US + r * US for r, number in zip(rank, place, strict=True)]
    took = [100 * US if r == 2 else (200 + 10 * r) * US for r in rank]
    found = columns(
        tmp_path,
        "SELECT op, bytes, nranks, seen, transfer_ns, waited_ns, last_rank, bus_gb_s, aligned_seq"
        " FROM collective_bandwidth ORDER BY aligned_seq",
        collectives=calls(
            rank, [CALLS[n][0] for n in place], at, [CALLS[n][1] for n in place], place, [False] * len(rank)
        ),
        kernel_events=kernels(rank, [time + US for time in at], took),
        communicators=COMMUNICATORS,
    )
    assert found["op"] == [op for op, *_ in CALLS]
    assert found["transfer_ns"] == [100 * US] * 5
    assert found["waited_ns"] == [130 * US] * 5
    assert set(found["last_rank"]) == {2}
    assert found["nranks"] == found["seen"] == [4] * 5
    # Bytes in 100 us, in GB/s: 8 MB are 80.
    assert found["bus_gb_s"] == pytest.approx([nbytes / (100 * US) * factor for _, nbytes, _, factor in CALLS])
    assert found["bus_gb_s"][0] == pytest.approx(120)


def test_what_nccl_takes_as_one_is_one(tmp_path: Path) -> None:
    """A group of three all-reduces is one kernel; PyTorch makes groups of one; sends are left out."""
    op = ["GroupStart", "AllReduce", "AllReduce", "AllReduce", "GroupEnd", "GroupStart", "AllReduce", "GroupEnd",
          "Send", "AllReduce"]  # fmt: skip
    seq = [0, 0, 1, 2, 0, 0, 3, 0, 0, 4]
    at = [T0 + number * 10 * US for number in range(len(op))]
    size = [0, MB, MB, MB, 0, 0, 4 * MB, 0, MB, 5 * MB]
    found = columns(
        tmp_path,
        "SELECT calls, bytes, aligned_seq, transfer_ns FROM collective_bandwidth ORDER BY aligned_seq",
        collectives=calls([0] * 10, op, at, size, seq, [True] * 8 + [False] * 2),
        # In ncclGroupEnd; of the Send, and of the last call.
        kernel_events=kernels(
            [0] * 4, [at[4] + 1, at[7] + 1, at[8] + 1, at[9] + 1], [30 * US, 40 * US, 10 * US, 50 * US]
        ),
        communicators=COMMUNICATORS,
    )
    assert list(zip(*found.values(), strict=True)) == [
        (3, 3 * MB, 2, 30 * US), (1, 4 * MB, 3, 40 * US), (1, 5 * MB, 4, 50 * US)
    ]  # fmt: skip


def test_groups_in_groups_are_one(tmp_path: Path) -> None:
    op = ["GroupStart", "GroupStart", "AllReduce", "GroupEnd", "GroupStart", "AllReduce", "GroupEnd", "GroupEnd"]
    at = [T0 + number * US for number in range(len(op))]
    found = columns(
        tmp_path,
        "SELECT calls, bytes, transfer_ns FROM collective_bandwidth",
        collectives=calls([0] * 8, op, at, [0, 0, MB, 0, 0, MB, 0, 0], [0, 0, 0, 0, 0, 1, 0, 0], [True] * 8),
        kernel_events=kernels([0], [at[7] + 1], [30 * US]),
        communicators=COMMUNICATORS,
    )
    assert list(zip(*found.values(), strict=True)) == [(2, 2 * MB, 30 * US)]


def test_kernels_of_graphs_are_no_call_s(tmp_path: Path) -> None:
    """The call before the graph's launch was another one."""
    found = columns(
        tmp_path,
        "SELECT transfer_ns FROM collective_bandwidth",
        collectives=calls([0], ["AllReduce"], [T0], [1000 * MB], [0], [False]),
        kernel_events={**kernels([0, 0], [T0 + 1, T0 + 50 * US], [40 * US, 1 * US]), "graph": [0, 3]},
        communicators=COMMUNICATORS,
    )
    assert found == {"transfer_ns": [40 * US]}


def test_joins_of_an_older_estimate_do_not_count(tmp_path: Path) -> None:
    """The newest estimate joined nothing."""
    clock = {"job": "j", "run": 1, "host": "h", "reference": "h", "ts": T0, "at": T0, "offset_ns": 0, "drift_ppb": 0,
             "error_ns": 0, "calls": 0, "method": "reference", "through": ""}  # fmt: skip
    found = columns(
        tmp_path,
        "SELECT comm_group FROM collectives_across",
        collectives=calls([0], ["AllReduce"], [T0], [MB], [0], [False]),
        communicators=COMMUNICATORS,
        clocks={**clock, "version": [1, 2]},
        step_shifts={"job": "j", "run": 1, "host": "h", "shift": 0, "how": "reference", "calls": 0, "confidence": 1.0,
                     "error": "", "version": [1, 2]},
        group_joins={"job": "j", "run": 1, "host": "h", "comm_group": 77, "joined_group": 99, "seq_shift": 5,
                     "error": "", "version": [1]},
    )  # fmt: skip
    assert found == {"comm_group": [77]}


def test_a_bandwidth_among_nobody_knows_how_many_is_not_told(tmp_path: Path) -> None:
    unknown = {**COMMUNICATORS, "rank": [0], "comm_rank": [0], "nranks": -1}
    found = columns(
        tmp_path,
        "SELECT transfer_ns, isNull(bus_gb_s) AS unknown FROM collective_bandwidth",
        collectives=calls([0], ["AllReduce"], [T0], [MB], [0], [False]),
        kernel_events=kernels([0], [T0 + 1], [30 * US]),
        communicators=unknown,
    )
    assert found == {"transfer_ns": [30 * US], "unknown": [1]}


def test_utilization(tmp_path: Path) -> None:
    """A step of 2e15 operations takes 100 ms on 4 ranks, of which two are seen: 5e15 a second and GPU."""
    found = columns(
        tmp_path,
        "SELECT step, duration_ns, flops_per_gpu, mfu FROM utilization",
        iterations={
            "job": "j", "run": 1, "rank": [0, 1], "step": 7, "host": "h", "ts": T0, "collectives": 1, "launches": 1,
            "method": "launches", "duration_ns": [90 * 1000 * US, 110 * 1000 * US], "confidence": 1.0,
        },
        jobs={
            "job": "j", "run": 1, "host": ["h", "g"], "started": T0, "ended": None, "world_size": 4,
            "launcher": "slurm", "mono_offset_ns": 0, "argus_version": "0", "version": 1,
            "step_flops": 2e15, "peak_flops": 2e16,
        },
    )  # fmt: skip
    assert (found["step"], found["duration_ns"]) == ([7], [1e8])
    assert found["flops_per_gpu"] == pytest.approx([5e15])
    assert found["mfu"] == pytest.approx([0.25])


def test_the_rank_that_waits_for_nobody_tells_how_long_the_transfer_takes(tmp_path: Path) -> None:
    common = {
        "job": "j",
        "run": 1,
        "host": "h",
        "pid": 1,
        "ts": T0,
        "peer": -1,
        "calls": 2,
        "bytes": MB,
        "shortest_ns": 1,
    }
    took = [300, 100, 250, 180]
    found = columns(
        tmp_path,
        "SELECT step, op, rank, transfer_ns, waited_ns, calls FROM collective_waits ORDER BY step, op, rank",
        gpu_collectives={
            **common, "rank": [*range(4), *range(4), 0], "device": [0] * 8 + [1], "step": [7] * 4 + [8] * 4 + [7],
            "comm": 5, "op": ["AllReduce"] * 4 + ["SendRecv"] * 4 + ["AllReduce"],
            "duration_ns": [ns * US for ns in (*took, *took, 10)],
        },
        communicators=COMMUNICATORS,
    )  # fmt: skip
    # Two GPUs of a rank count as one; sends and receives are no collectives.
    assert found == {
        "step": [7] * 4, "op": ["AllReduce"] * 4, "rank": [0, 1, 2, 3], "transfer_ns": [100 * US] * 4,
        "waited_ns": [210 * US, 0, 150 * US, 80 * US], "calls": [4, 2, 2, 2],
    }  # fmt: skip


def test_slow_gpu_phases(tmp_path: Path) -> None:
    rank = [rank for rank in range(3) for _ in range(4)]
    found = columns(
        tmp_path,
        "SELECT rank, phase, typical_ns, usual_ns, excess_ns, steps FROM slow_gpu_phases ORDER BY excess_ns DESC, rank",
        gpu_phases={
            "job": "j", "run": 1, "rank": rank, "host": "h", "pid": 1, "device": 0, "step": [0, 1, 2, 3] * 3, "ts": T0,
            "phase": "backward", "duration_ns": [10 + 9 * (r == 1) for r in rank], "overlapped_ns": 0, "operations": 1,
            "method": "names", "confidence": 0.8,
        },
    )  # fmt: skip
    assert [row[2:] for row in zip(*found.values(), strict=True)] == [(19, 10, 9, 4), (10, 10, 0, 4), (10, 10, 0, 4)]
    assert found["rank"][0] == 1


ACROSS = {
    "iterations": {"stored"},
    "phases": {"stored"},
    "kernel_times": set(),
    "gpu_steps": set(),
    "gpu_phases": set(),
    "gpu_collectives": set(),
    "collectives_aligned": {"redop", "stream", "result", "joined_by"},
    "calls_aligned": {"redop", "stream", "result", "joined_by"},
}
"""Tables and views of one host's steps and calls, and which of their columns the views over hosts leave out."""


def test_what_is_one_host_s_is_there_across_hosts_with_every_column(tmp_path: Path) -> None:
    found = columns(
        tmp_path,
        "SELECT table, groupUniqArray(name) AS names FROM system.columns WHERE database = currentDatabase()"
        " GROUP BY table",
    )
    names = dict(zip(found["table"], map(set, found["names"]), strict=True))
    for table, left_out in ACROSS.items():
        across = names[table.removesuffix("_aligned") + "_across"]
        assert names[table] - across == left_out, table
        assert {"host", "step"} - across <= {"step"} - names[table]
    every = {name for name in names if name.endswith("_across") and not name.startswith("latest_")}
    assert every == {table.removesuffix("_aligned") + "_across" for table in ACROSS}


def test_iterations_across_is_its_table_with_the_steps_of_the_reference(tmp_path: Path) -> None:
    """Host b counts from 3 steps later on, host c could not be numbered; of two estimates the newer one counts."""
    table = ("job", "run", "rank", "host", "ts", "duration_ns", "collectives", "launches", "method", "confidence")
    hosts = ["a"] * 4 + ["b"] * 4 + ["c"] * 4
    rows = {
        "job": "j", "run": 1, "rank": [0] * 4 + [1] * 4 + [2] * 4, "step": [*range(4)] * 3, "host": hosts,
        "ts": [T0 + number * 1000 * US for number in range(12)], "duration_ns": range(100, 112),
        "collectives": range(12), "launches": range(20, 32), "method": "marks", "confidence": [0.5] * 12,
    }  # fmt: skip
    shifts = {
        "job": "j", "run": 1, "host": ["a", "b", "b", "c"], "shift": [0, 9, 3, 0], "how": "calls", "calls": 9,
        "confidence": 1.0, "error": ["", "", "", "no call in common"], "version": [2, 1, 2, 2],
    }  # fmt: skip
    chosen = ", ".join(f"i.{name} = x.{name} AS same_{name}" for name in table)
    found = columns(
        tmp_path,
        f"SELECT x.host AS host, x.host_step AS host_step, x.step AS step, {chosen} FROM iterations_across AS x"
        " JOIN iterations AS i ON i.host = x.host AND i.step = x.host_step ORDER BY host, host_step",
        iterations=rows,
        step_shifts=shifts,
    )
    assert found["host"] == hosts[:8]
    assert found["host_step"] == [0, 1, 2, 3] * 2
    assert found["step"] == [0, 1, 2, 3, 3, 4, 5, 6]
    assert all(all(found[f"same_{name}"]) for name in table)
