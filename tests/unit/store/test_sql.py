"""``argus sql`` and ``argus store`` as a user runs them, and the queries of docs/sql.md."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from argus.cli.main import main
from argus.cli.sql import completions
from argus.compress.kernels import Compressor
from argus.model.units import binary_size
from argus.store.open import open_store
from argus.store.read.render import table_lines
from argus.store.reader import query
from argus.store.writer import Writer
from tests.builders.stack_data import T0 as STACKS_T0
from tests.builders.stack_data import Row, native, py, stack, store_stacks
from tests.stores import new_store

ROOT = Path(__file__).parents[3]
T0 = 1_700_000_000_123_456_789
MS = 1_000_000
LATER = 4_000_000_000_000_000_000
"""2096: health of long ago would have expired."""


Run = Callable[..., tuple[int, str, str]]


def compressed_kernels() -> dict[str, dict[str, Any]]:
    """200 launches of 50 us a rank and step, which on rank 3 take 60 us from step 12 on; one takes 2 ms on rank 0."""
    rng, compressor = np.random.default_rng(0), Compressor()
    group = compressor.group("void softmax<float>(float*)", 7, 0, (8, 1, 1), (128, 1, 1))
    for step in range(20):
        for rank in range(4):
            took = rng.normal(60_000 if rank == 3 and step >= 12 else 50_000, 500, 200).astype(np.int64)
            if (rank, step) == (0, 15):
                took[7] = 2 * MS
            start = T0 + step * 100 * MS + np.arange(200) * 400_000
            compressor.feed(rank, step, int(start[0]), int(start[0]) + 90 * MS, np.full(200, group), start, took)
    return compressor.take(final=True)


# Over 100 lines: the rows of one job, data only.
@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A store with a job of four ranks and twenty steps, in which rank 2 is late by 3 ms and step 7 is slow. On the GPU
    of rank 1 gemm takes twice as long, on that of rank 3 softmax does from step 12 on. The main thread of rank 2 spends
    its time in a data loader, waits for the GIL, and collects garbage; since step 10 rank 3 tokenizes more."""
    address = new_store(tmp_path_factory.mktemp("sql"))
    every = [(rank, step) for rank in range(4) for step in range(20)]
    start = [T0 + step * 100 * MS for _, step in every]
    late = [3 * MS if rank == 2 else 0 for rank, _ in every]
    common: dict[str, Any] = {"job": "llama", "run": 1, "rank": [rank for rank, _ in every], "host": "node-0"}
    with open_store(address) as store:
        writer = Writer(store, source="test")
        writer.append("jobs", {
            "job": "llama", "run": 1, "host": "node-0", "started": [T0], "ended": None, "world_size": 4,
            "launcher": "torchrun", "mono_offset_ns": 0, "argus_version": "0", "version": 1,
            "step_flops": 3.6e14, "peak_flops": 2e15,
        })  # fmt: skip
        writer.append("health", {
            "host": "node-0", "ts": LATER, "kind": "8 x H100", "check": ["argus", "xid"], "status": "critical",
            "text": "GPU has fallen off the bus", "hint": "", "facts": [{}, {"driver": "570"}], "duration_ns": 1,
        })  # fmt: skip
        writer.append("health_figures", {
            "host": "node-0", "ts": LATER, "kind": "8 x H100", "check": "gpu_heat", "figure": "core_c",
            "device": ["gpu0", "gpu1"], "value": [60.0, 70.0],
        })  # fmt: skip
        writer.append("iterations", {
            **common, "step": [step for _, step in every], "ts": start, "collectives": 1, "launches": 2,
            "method": "test",
            "duration_ns": [300 * MS if step == 7 else 90 * MS for _, step in every], "confidence": 1.0,
        })  # fmt: skip
        writer.append("parallel_groups", {
            "job": "llama", "run": 1, "host": "node-0", "comm_group": 77, "dimension": "dp", "ranks": [[0, 1, 2, 3]],
            "nranks": 4, "confidence": 0.7, "why": "all-reduces, in one size", "version": 1, "superseded": 0,
        })  # fmt: skip
        for table, columns in compressed_kernels().items():
            host = {} if table in ("kernel_groups", "kernel_templates") else {"host": "node-0"}
            writer.append(table, {"job": "llama", "run": 1, **host, **columns})
        for phase, took in (("data_loading", 3), ("forward", 20), ("backward", 60), ("communication", 7)):
            writer.append("phases", {
                **common, "step": [step for _, step in every], "ts": start, "phase": phase,
                "duration_ns": [(took + 3 * (rank == 2 and phase == "data_loading")) * MS for rank, _ in every],
                "overlapped_ns": 0, "spans": 1, "method": "marks", "confidence": 1.0,
            })  # fmt: skip
        writer.append("collectives", {
            **common, "pid": 1, "tid": 1, "comm": 5, "op": "AllReduce", "bytes": 4096,
            "seq": [step for _, step in every], "count": 1024, "dtype": "float32", "redop": "sum", "peer": -1,
            "stream": 0,
            "ts": [a + b + 50 * MS for a, b in zip(start, late, strict=True)], "duration_ns": 900, "result": 0,
            "in_group": False,
        })  # fmt: skip
        writer.append("communicators", {
            "job": "llama", "run": 1, "rank": range(4), "comm": 5, "comm_group": 77, "comm_rank": range(4), "nranks": 4,
            "seq_offset": 0, "joined_by": "unique_id", "error": "", "version": 1,
        })  # fmt: skip
        for kind, call in (("kernel", "cuLaunchKernel"), ("sync", "cuStreamSynchronize")):
            writer.append("launches", {
                **common, "pid": 1, "tid": 1, "call": call, "kind": kind, "kernel": "gemm" if kind == "kernel" else "",
                "handle": 1, "stream": 0, "bytes": 0, "shared_bytes": 0, "grid": [[1]] * 80, "block": [[1]] * 80,
                "ts": [a + MS for a in start], "duration_ns": 5000, "result": 0, "in_nccl": False,
            })  # fmt: skip
        for name, took in (("gemm", {1: 40}), ("softmax", {}), ("ncclDevKernel_AllReduce_Sum_f32_RING_LL()", {})):
            writer.append("kernel_events", {
                **common, "pid": 1, "device": 0, "context": 1, "stream": 7, "kind": "kernel", "name": name,
                "ts": [a + 2 * MS for a in start],
                "duration_ns": [
                    (took.get(rank, 20) if name != "softmax" or rank != 3 or step < 12 else 50) * MS
                    for rank, step in every
                ],
                "launch_ts": [a + MS for a in start], "issue_latency_ns": MS, "launch_tid": 1, "launch_probed": True,
                "correlation": 1, "graph": 0, "graph_node": 0, "grid": [[1]] * 80, "block": [[1]] * 80,
                "registers": 32, "shared_static": 0, "shared_dynamic": 0, "bytes": 0,
            })  # fmt: skip
        writer.append("gpu_usage", {
            "job": "llama", "run": 1, "rank": range(4), "host": "node-0", "pid": 1, "device": 0, "ts": T0,
            "duration_ns": 1000 * MS, "busy_ns": [900 * MS, 900 * MS, 600 * MS, 900 * MS], "compute_ns": 500 * MS,
            "communication_ns": 200 * MS, "exposed_communication_ns": [50 * MS, 50 * MS, 50 * MS, 150 * MS],
            "overlapped_communication_ns": [150 * MS, 150 * MS, 150 * MS, 50 * MS], "memcpy_ns": 0,
            "idle_ns": [100 * MS, 100 * MS, 400 * MS, 100 * MS], "idle_gaps": 50, "largest_gap_ns": 9 * MS,
            "kernels": 60, "queue_depth_mean": 3.5, "queue_depth_max": 9, "issue_latency_p50_ns": MS,
            "issue_latency_p99_ns": MS,
        })  # fmt: skip
        writer.append("gpu_steps", {
            **common, "pid": 1, "device": 0, "step": [step for _, step in every], "ts": start, "duration_ns": 90 * MS,
            "busy_ns": 60 * MS, "compute_ns": 50 * MS, "communication_ns": 20 * MS, "exposed_communication_ns": 5 * MS,
            "overlapped_communication_ns": 15 * MS, "memcpy_ns": 0, "idle_ns": 30 * MS, "idle_gaps": 50,
            "largest_gap_ns": 9 * MS, "kernels": 60, "queue_depth_mean": 3.5, "queue_depth_max": 9,
            "issue_latency_p50_ns": MS, "issue_latency_p99_ns": MS,
            "void_share": [0.5 if rank == 1 else 0.25 for rank, _ in every],
        })  # fmt: skip
        for phase, took in (("forward", 20), ("backward", 30), ("all_reduce", 5), ("idle", 35)):
            writer.append("gpu_phases", {
                **common, "pid": 1, "device": 0, "step": [step for _, step in every], "ts": start, "phase": phase,
                "duration_ns": [(took + 10 * (rank == 1 and phase == "backward")) * MS for rank, _ in every],
                "overlapped_ns": 15 * MS if phase == "all_reduce" else 0, "operations": 12, "method": "names",
                "confidence": 0.8,
            })  # fmt: skip
        writer.append("gpu_collectives", {
            **common, "pid": 1, "device": 0, "step": [step for _, step in every], "ts": start, "comm": 5,
            "op": "AllReduce", "peer": -1, "calls": 2, "bytes": 8_000_000, "shortest_ns": 4 * MS,
            "duration_ns": [(20 if rank == 1 else 26) * MS for rank, _ in every],
        })  # fmt: skip
        writer.append("kernel_flops", {
            **common, "pid": 1, "device": 0, "step": [step for _, step in every], "ts": start, "kind": "gemm",
            "operator": "aten::mm", "dtype": "bfloat16", "shape": "4096 x 4096 x 4096", "kernel": "gemm", "calls": 2,
            "kernels": 2, "flops": 2.0 * 2 * 4096**3, "duration_ns": [(2 + (rank == 1)) * MS for rank, _ in every],
        })  # fmt: skip
        writer.append("raw_requests", {
            "job": "llama", "run": 1, "ts": T0, "until": T0 + 90 * MS, "ranks": [[1]], "why": "by hand",
        })  # fmt: skip
        writer.append("raw_windows", {
            "job": "llama", "run": 1, "rank": 1, "host": "node-0", "ts": T0, "duration_ns": 90 * MS,
            "why": "asked for: by hand", "whole": True, "operations": 60,
        })  # fmt: skip
        writer.append("features", {
            "job": "llama", "run": 1, "rank": range(4), "host": "node-0", "feature": "gpu_times", "state": "on",
            "reason": "", "version": 1,
        })  # fmt: skip
        writer.append("clocks", {
            "job": "llama", "run": 1, "host": ["node-0", "node-1"], "reference": "node-0", "ts": 0, "at": T0,
            "offset_ns": [0, 3 * MS], "drift_ppb": [0, 20_000], "error_ns": [0, 35_000], "calls": [0, 60],
            "method": ["reference", "gpu"], "through": "", "version": 1,
        })  # fmt: skip
        writer.append("step_shifts", {
            "job": "llama", "run": 1, "host": ["node-0", "node-1"], "shift": [0, 4], "how": ["reference", "calls"],
            "calls": [0, 60], "confidence": 1.0, "error": "", "version": 1,
        })  # fmt: skip
        writer.append("group_joins", {
            "job": "llama", "run": 1, "host": ["node-1"], "comm_group": 78, "joined_group": 0, "seq_shift": 0,
            "error": "its calls are not like those of other hosts", "version": 1,
        })  # fmt: skip
        writer.append("findings", {
            "job": "llama", "run": 1, "created": [T0], "status": "degraded", "kind": "compute_straggler",
            "ranks": [[2]], "hosts": [["node-0"]], "step_from": 0, "step_to": 19, "phase": "", "slowdown": 1.1,
            "share": 0.9, "confidence": 0.9, "evidence": "{}", "action": "Look at node-0",
        })  # fmt: skip
        writer.append("coverage", {
            "job": "llama", "run": 1, "host": "node-0", "counter": ["ring_full"], "value": 3, "loss": True, "ts": T0,
            "version": 1,
        })  # fmt: skip
        main = py("main", 12)
        compute = stack(main, py("step", 40), py("forward", 9, "/app/model.py"), native("cudaLaunchKernel"))
        load = stack(main, py("step", 38), py("__getitem__", 55, "/app/data.py"))
        tokenize = stack(main, py("step", 38), py("tokenize", 80, "/app/data.py"))
        rows = []
        for n, (rank, step) in enumerate(every):
            at = (start[n] - STACKS_T0) / MS
            rows.append(Row(rank, load if rank == 2 else compute, at + 10, count=6, last_ms=at + 70, gil=rank == 2))
            rows.append(Row(rank, tokenize, at + 80, count=3 if rank == 3 and step >= 10 else 1))
            if rank == 2:
                rows.append(Row(
                    rank, load, at + 20, kind="off", ns=15 * MS, last_ms=at + 35, reason="gil", runqueue_ns=2 * MS,
                ))  # fmt: skip
        store_stacks(writer, rows)
        writer.append("gc_pauses", {
            **common, "pid": 1002, "tid": 1002, "thread": "python", "ts": [a + 40 * MS for a in start],
            "duration_ns": [12 * MS if rank == 2 else 2 * MS for rank, _ in every], "uncertainty_ns": MS,
            "generation": 2, "stack_id": load.id,
        })  # fmt: skip
        writer.append("thread_usage", {
            **common, "pid": 1, "tid": 1, "thread": "python", "ts": start, "interval_ns": 100 * MS, "cpu_ns": 60 * MS,
            "runqueue_ns": [30 * MS if rank == 1 else 0 for rank, _ in every], "io_ns": -1, "voluntary": 5,
            "involuntary": 2,
        })  # fmt: skip
        writer.append("phase_ops", {
            **common, "step": [step for _, step in every], "stage": [rank // 2 for rank, _ in every],
            "dp_rank": [rank % 2 for rank, _ in every], "op": "forward-compute", "seq": 0, "microbatch": 0, "chunk": 0,
            "global_chunk": [rank // 2 for rank, _ in every], "ts": start, "ts_end": [a + 20 * MS for a in start],
            "duration_ns": [(40 if rank == 1 else 20) * MS for rank, _ in every],
        })  # fmt: skip
        writer.append("parallel_layout", {
            "job": "llama", "run": [1], "dp": 2, "pp": 2, "tp": 1, "sp": 1, "vpp": 1, "world_size": 4,
            "source": "whatif", "version": 1,
        })  # fmt: skip
        assert writer.flush(), writer.last_error
        yield address


@pytest.fixture
def argus(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``argus`` in this process: (exit code, output, errors)."""
    monkeypatch.setenv("ARGUS_STORE", url)

    def run(*arguments: str, stdin: str | None = None) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin or ""))
        code = main(list(arguments))
        out, err = capsys.readouterr()
        return code, out, err

    return run


# ---- output ----


def test_a_table_is_aligned_ascii(argus: Run) -> None:
    sql = "SELECT 'ab' AS name, 7 AS n, toInt64(1500000) AS took_ns, 'a\\tb' AS t, NULL AS x, nan AS y"
    code, out, err = argus("sql", sql)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "name  n  took_ns  t     x        y",
        "----  -  -------  ----  ----  ----",
        r"ab    7  1.50 ms  a\tb  NULL  NULL",
    ]


def test_json_is_exact(argus: Run) -> None:
    sql = "SELECT toUInt64(18446744073709551615) AS big, nan AS x, [1, 2] AS a, 'q\"' AS s FROM numbers(2)"
    row = {"big": 2**64 - 1, "x": None, "a": [1, 2], "s": 'q"'}
    assert json.loads(argus("sql", "--format", "json", sql)[1]) == [row, row]
    assert [json.loads(line) for line in argus("sql", "--format", "jsonl", sql)[1].splitlines()] == [row, row]
    assert argus("sql", "--format", "json", "SELECT 1 WHERE 0")[1] == "[]\n"


def test_csv_and_tsv(argus: Run) -> None:
    sql = "SELECT 'a,\n\"b' AS s, toUInt64(18446744073709551615) AS n, NULL AS x"
    assert argus("sql", "--format", "csv", sql)[1] == '"s","n","x"\n"a,\n""b",18446744073709551615,\n'
    assert argus("sql", "--format", "tsv", sql)[1] == 's\tn\tx\na,\\n"b\t18446744073709551615\t\\N\n'


def test_rows_beyond_the_limit_are_counted(argus: Run) -> None:
    code, out, err = argus("sql", "--max-rows", "3", "SELECT number FROM numbers(100000)")
    assert (code, len(out.splitlines())) == (0, 5)
    assert err == "99,997 more rows were cut after 3: see --max-rows and --format\n"
    assert len(argus("sql", "--max-rows", "0", "SELECT number FROM numbers(3000)")[1].splitlines()) == 3002
    code, out, err = argus("sql", "--max-rows", "3", "--format", "csv", "SELECT number FROM numbers(3000)")
    assert (len(out.splitlines()), err) == (3001, "")


@pytest.mark.parametrize(
    ("ns", "text"),
    [(0, "0 ns"), (-1, "-1"), (999, "999 ns"), (1500, "1.50 µs"), (21422, "21.4 µs"), (90 * MS, "90.0 ms"),
     (61 * 10**9, "61.0 s"), (-2500, "-2.50 µs")],
)  # fmt: skip
def test_durations_are_readable_in_a_table(argus: Run, ns: int, text: str) -> None:
    assert argus("sql", f"SELECT toInt64({ns}) AS took_ns")[1].splitlines()[2].strip() == text


def test_helpers() -> None:
    assert list(table_lines(["a"], [], [True])) == ["a", "-"]
    assert binary_size(0) == "0 B"
    assert binary_size(4434432) == "4.23 MiB"
    assert completions("sel", ["SELECT", "settle", "other"]) == ["select"]
    assert completions("iter", ["iterations", "IN"]) == ["iterations"]


# ---- queries in ----


def test_queries_come_from_the_argument_or_stdin(argus: Run) -> None:
    assert argus("sql", "SELECT 1 AS a; SELECT ';' AS b;")[1] == "a\n-\n1\nb\n-\n;\n"
    assert argus("sql", "--format", "csv", "-", stdin="SELECT 5 AS a -- five")[1] == '"a"\n5\n'
    assert argus("sql", "--format", "csv", stdin="SELECT 6 AS a;\n")[1] == '"a"\n6\n'
    code, _, err = argus("sql", stdin=" -- nothing\n")
    assert code == 2
    assert "there is no query" in err


def test_parameters(argus: Run) -> None:
    given = ["--param", "job=a' OR 1", "--param", "n=3"]
    code, out, _ = argus("sql", "--format", "csv", *given, "SELECT {job:String}, {n:UInt8} + 1")
    assert code == 0
    assert out.splitlines()[1] == '"a\' OR 1",4'
    assert argus("sql", "--param", "job", "SELECT 1")[0] == 2


def test_tables_and_columns(argus: Run) -> None:
    for arguments in (["--tables"], ["\\d"], [".tables"]):
        code, out, _ = argus("sql", *arguments)
        assert code == 0
        assert re.search(r"^iterations +80  One row per rank and step$", out, re.MULTILINE)
        assert re.search(r"^launches_by_step +view  ", out, re.MULTILINE)
    for arguments in (["--describe", "iterations"], ["\\d iterations"]):
        out = argus("sql", *arguments)[1]
        assert re.search(r"^duration_ns +UInt64 +Length of the step on this rank$", out, re.MULTILINE)
    code, _, err = argus("sql", "--describe", "nope")
    assert code == 1
    assert "no table 'nope'" in err


# ---- what goes wrong ----


def test_errors_are_one_line(argus: Run) -> None:
    code, out, err = argus("sql", "SELECT nope FROM jobs")
    assert (code, out) == (1, "")
    assert err == "argus: Unknown expression identifier `nope`. In scope SELECT nope FROM jobs. (UNKNOWN_IDENTIFIER)\n"
    assert argus("sql", "SELECT 1 FROM")[2].startswith("argus: Syntax error: failed at position 14")
    slow = "SELECT sum(sleepEachRow(0.01)) FROM numbers(1000) SETTINGS max_block_size = 10"
    code, _, err = argus("sql", "--timeout", "0.2", slow)
    assert code == 1
    assert err.startswith("argus: Timeout exceeded")


def test_a_store_that_is_not_there(argus: Run, tmp_path: Path) -> None:
    code, _, err = argus("sql", "--store", f"chdb://{tmp_path}/none", "SELECT 1")
    assert code == 3
    assert "nothing is stored yet" in err
    assert not (tmp_path / "none").exists()


def test_queries_only_read(argus: Run, url: str, tmp_path: Path) -> None:
    target = tmp_path / "out"
    for sql in (
        "INSERT INTO jobs (job) VALUES ('x')",
        "DROP TABLE jobs",
        "ALTER TABLE jobs DELETE WHERE 1",
        "CREATE TABLE x (a UInt8) ENGINE = Memory",
        "CREATE TEMPORARY TABLE x (a UInt8)",
        "TRUNCATE TABLE jobs",
        "KILL QUERY WHERE 1",
        f"SELECT 1 INTO OUTFILE '{target}'",
        f"INSERT INTO FUNCTION file('{target}', 'CSV', 'a UInt8') VALUES (1)",
        f"WITH a AS (SELECT 1) INSERT INTO FUNCTION file('{target}', 'CSV', 'a UInt8') SELECT * FROM a",
        f"EXPLAIN PIPELINE INSERT INTO FUNCTION file('{target}', 'CSV', 'a UInt8') SELECT 1",
        "SELECT 1 SETTINGS readonly = 0",
    ):
        code, _, err = argus("sql", sql)
        assert code == 1, sql
        assert err.startswith("argus: "), sql
    assert not target.exists()
    assert "1" in argus("sql", "--format", "csv", "SELECT count() FROM jobs")[1]
    # The engine refuses too, should the check of the words ever miss something.
    with open_store(url) as store, pytest.raises(Exception, match="readonly"):
        query(store, "DROP TABLE jobs", settings={"readonly": 2})


def test_write_allows_changes(argus: Run) -> None:
    make = "CREATE TABLE scratch (a UInt8) ENGINE = Memory; INSERT INTO scratch VALUES (1), (2)"
    assert argus("sql", "--write", make)[0] == 0
    assert argus("sql", "--format", "csv", "SELECT sum(a) AS s FROM scratch")[1] == '"s"\n3\n'
    assert argus("sql", "--write", "--format", "csv", "SELECT 1 AS one; DROP TABLE scratch")[:2] == (0, '"one"\n1\n')


# ---- argus store ----


def test_store_status(argus: Run, url: str, tmp_path: Path) -> None:
    code, out, _ = argus("store", "status")
    assert code == 0
    assert re.search(r"^iterations +80 +\d.*KiB  30 days +2023-11-14 22:13:20  2023-11-14 22:13:22$", out, re.MULTILINE)
    assert "\njobs    1 job, 1 run: llama; `argus jobs` lists them\n" in out
    found = json.loads(argus("store", "status", "--format", "json")[1])
    assert (found["url"], found["schema"]["changed"]) == (url, [])
    assert {t["name"]: t["rows"] for t in found["tables"]}["launches"] == 160
    code, out, _ = argus("store", "status", "--store", f"chdb://{tmp_path}/none")
    assert code == 0
    assert "nothing is stored here yet" in out


def test_store_init(argus: Run, tmp_path: Path) -> None:
    address = f"chdb://{tmp_path}/new"
    code, out, _ = argus("store", "init", "--store", address, "--ttl", "90d")
    assert code == 0
    assert out.startswith(f"{address}: schema ")
    assert argus("store", "init", "--store", address)[0] == 0
    code, _, err = argus("store", "init", "--store", address, "--ttl", "soon")
    assert code == 2
    assert "no span of time" in err


# ---- docs/sql.md ----

EXAMPLES = re.findall(r"```sql\n(.*?)```", (ROOT / "docs" / "sql.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("sql", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_examples_of_the_documentation_find_something(argus: Run, sql: str) -> None:
    code, out, err = argus("sql", "--format", "json", sql)
    assert code == 0, err
    assert json.loads(out), "no rows"


def test_the_examples_find_what_was_planted(argus: Run) -> None:
    def first(words: str) -> dict[str, Any]:
        sql = next(example for example in EXAMPLES if words in example)
        found: dict[str, Any] = json.loads(argus("sql", "--format", "json", sql)[1])[0]
        return found

    assert len(EXAMPLES) >= 8
    assert first("mean_late_ns")["rank"] == 2
    assert first("mean_late_ns")["mean_late_ns"] == 3 * MS
    slow = first("times_usual")
    assert (slow["step"], slow["slowest_ns"], slow["times_usual"]) == (7, 300 * MS, 3.33)
    assert first("per_step") == {"kernel": "gemm", "per_step": 1, "launch_ns": 5000}
    assert first("spread_ns")["last_rank"] == 2
    top = first("FROM latest_top_kernels")
    assert (top["count"], top["total_ns"], top["share"], top["p50_ns"]) == (20, 400 * MS, 0.333, 20 * MS)
    slower = first("FROM latest_kernel_stats")
    assert (slower["kernel"], slower["rank"], slower["times_before"]) == ("softmax<float>", 3, 1.2)
    spike = first("FROM latest_kernel_spikes")
    assert (spike["rank"], spike["step"], spike["duration_ns"]) == (0, 15, 2 * MS)
    phase = first("FROM latest_slow_phases")
    assert (phase["phase"], phase["rank"]) == ("data_loading", 2)
    assert (phase["typical_ns"], phase["excess_ns"]) == (6 * MS, 3 * MS)
    slow = first("slow_rank")
    assert (slow["name"], slow["slow_rank"], slow["times_usual"]) == ("gemm", 1, 2)
    since = first("since_step")
    assert (since["name"], since["rank"], since["since_step"]) == ("softmax", 3, 12)
    idle = first("idle_share")
    assert (idle["rank"], idle["idle_share"], idle["gaps_per_s"], idle["longest_ns"]) == (2, 0.4, 50, 9 * MS)
    void = first("worst_step")
    assert (void["rank"], void["void"], void["exposed_ns"]) == (1, 0.5, 5 * MS)
    exposed = first("exposed_share")
    assert (exposed["rank"], exposed["exposed_share"], exposed["hidden_part"]) == (3, 0.15, 0.25)
    assert first("starved_share")["median_ns"] == MS
    assert first("in_nccl")["call"] == "cuLaunchKernel"
    hot = first("FROM latest_hot_lines")
    assert (hot["line"], hot["self_ns"], hot["share"]) == ("data.py:55", 1200 * MS, 0.857)
    more = first("extra_ns_per_step")
    assert (more["function"], more["extra_ns_per_step"]) == ("tokenize", 20 * MS)
    elsewhere = first("usual_share")
    assert (elsewhere["slow_rank"], elsewhere["function"]) == (2, "__getitem__")
    assert first("off_cpu_by_reason")["reason"] == "gil"
    assert first("FROM latest_gc_pauses") == {"rank": 2, "pauses": 20, "gc_ns_per_step": 12 * MS, "longest_ns": 12 * MS}
    assert first("FROM latest_thread_usage")["rank"] == 1
    assert (first("gil_ns")["rank"], first("gil_ns")["gil_ns"]) == (2, 1200 * MS)
    assert (first("FROM latest_phase_ops")["rank"], first("FROM latest_phase_ops")["compute_ns_per_step"]) == (
        1,
        40 * MS,
    )
    last = first("last_seen")
    assert (last["ranks"], last["doing"]) == ([0, 1, 2, 3], "step (train.py:38) / tokenize (data.py:80)")


def test_every_table_is_documented(url: str) -> None:
    text = (ROOT / "docs" / "sql.md").read_text()
    with open_store(url) as store:
        names = query(store, "SELECT name FROM system.tables WHERE database = 'default'").column("name").to_pylist()
    latest = {name for name in names if name.startswith("latest_") and name.removeprefix("latest_") in names}
    assert [name for name in names if name not in latest and f"`{name}`" not in text] == []
