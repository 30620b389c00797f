"""What NCCL's Inspector logs: one JSON object a line and completed collective, of communicators that its process is in
(``NCCL_INSPECTOR_ENABLE=1``; format v4 of NCCL 2.28 and later, RCCL's likewise).

It logs the newest collective of each communicator at an interval, so most are not there. Ranks are those of the
communicator; the job's are those of its largest one. There are no steps: the number of the collective stands for one in
``gpu_collectives``, so that the view ``collective_waits`` compares the ranks of each.
"""

from __future__ import annotations

import json
import time
from array import array
from collections import Counter as Tally
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.importers.recordings.recording import Progress
from argus.importers.regular import open_regular
from argus.importers.rows import ImportReport, store_run
from argus.model.errors import EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError
from argus.model.ranks import HIGHEST_RANK
from argus.model.text import printable
from argus.store.open import Store

SOURCE = "nccl-inspector"
HINT = "Files of NCCL's Inspector are named HOST-pidPID.log, in NCCL_INSPECTOR_DUMP_DIR"
SUFFIXES = (".log", ".json", ".jsonl")
MAX_LINE = 1 << 20
"""Longest line. With the trace of 64 channels one has 30 kB."""
MAX_ROWS = 20_000_000
MAX_UNREADABLE = 0.01
"""More lines that are of another kind, and the file is refused."""
BATCH = 100_000
_YEAR_NS = 365 * 86400 * 10**9


@dataclass
class Log:
    """Rows of all files: columns, whose codes are places in the lists of words.

    Attributes:
        columns: communicator, rank in it, op, number, bytes, duration (ns), end (ns), process.
        communicators: Hash and size.
        processes: Host and PID.
    """

    columns: dict[str, array[int]] = field(
        default_factory=lambda: {
            name: array("q") for name in ("comm", "rank", "op", "seq", "bytes", "ns", "ts", "process")
        }
    )
    communicators: dict[tuple[str, int], int] = field(default_factory=dict)
    processes: dict[tuple[str, int], int] = field(default_factory=dict)
    ops: dict[str, int] = field(default_factory=dict)
    losses: Tally[str] = field(default_factory=Tally)


def read_all(paths: Sequence[Path], progress: Progress = lambda what, share: None) -> Log:
    """All rows of some files.

    Raises:
        ArgusError: One cannot be read, or is of another kind; they have too many rows.
    """
    log = Log()
    for number, path in enumerate(paths):
        progress(path.name, number / len(paths))
        if not path.is_file():
            raise ArgusError(f"{path} is not a file", HINT, EXIT_USAGE)
        try:
            _read(path, log)
        except OSError as error:
            raise ArgusError(f"{path} cannot be read: {error.strerror}", HINT, EXIT_UNAVAILABLE) from None
    if not len(log.columns["seq"]):
        raise ArgusError(f"{paths[0]} has no collective of NCCL's Inspector", HINT, EXIT_USAGE)
    return log


def _read(path: Path, log: Log) -> None:
    wrong, lines, why = 0, 0, ""
    with open_regular(path) as file:
        while line := file.readline(MAX_LINE + 1):
            lines += 1
            try:
                if len(line) > MAX_LINE:
                    raise ValueError(f"line {lines:,} is longer than {MAX_LINE:,} bytes")
                if line.strip():
                    _row(line, log)
            except (ValueError, RecursionError) as error:
                wrong += 1
                why = why or f"line {lines:,}: {printable(str(error))[:120] or 'nested too deeply'}"
                if wrong > 1 + MAX_UNREADABLE * lines:
                    raise ArgusError(f"{path} is not a log of NCCL's Inspector: {why}", HINT, EXIT_USAGE) from None
            if len(log.columns["seq"]) > MAX_ROWS:
                raise ArgusError(
                    f"the logs have more than {MAX_ROWS:,} collectives", "Import fewer files at once", EXIT_USAGE
                )
    if wrong:
        # The last line of a process that was ended may be cut off.
        log.losses["lines_unreadable"] += wrong


def _row(line: bytes, log: Log) -> None:
    fields = json.loads(line)
    header, about, perf = (fields.get(name) for name in ("header", "metadata", "coll_perf")) if isinstance(
        fields, dict) else (None, None, None)  # fmt: skip
    if not isinstance(header, dict) or not isinstance(about, dict) or not isinstance(perf, dict):
        raise ValueError("it lacks header, metadata or coll_perf")
    size, rank, seq = (_whole(value) for value in (header.get("n_ranks"), header.get("rank"), perf.get("coll_sn")))
    if not 0 <= rank < size or size > HIGHEST_RANK or seq < 0:
        raise ValueError("its rank or number is out of range")
    comm = (_text(header.get("id")), size)
    process = (_text(about.get("hostname")) or "unknown", max(_whole(about.get("pid")), 0) % 2**32)
    took = max(_whole(perf.get("coll_exec_time_us")), 0)
    columns = log.columns
    columns["comm"].append(log.communicators.setdefault(comm, len(log.communicators)))
    columns["process"].append(log.processes.setdefault(process, len(log.processes)))
    columns["op"].append(log.ops.setdefault(_text(perf.get("coll"))[:40], len(log.ops)))
    columns["rank"].append(rank)
    columns["seq"].append(seq)
    columns["bytes"].append(max(_whole(perf.get("coll_msg_size_bytes")), 0))
    columns["ns"].append(min(took, 2**50) * 1000)
    columns["ts"].append(_begin(about, perf, took) * 1000)


def _begin(about: Mapping[str, Any], perf: Mapping[str, Any], took: int) -> int:
    """When a collective began, microseconds since 1970: as traced (verbose logs), else before it was logged."""
    trace = perf.get("event_trace_ts")
    begun = _whole(trace.get("coll_start_ts")) if isinstance(trace, dict) else -1
    at = begun if begun > 0 else _whole(about.get("dump_timestamp_us")) - took
    return at if 0 < at < 2**52 else 0


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        return -1
    return value if -(2**62) < value < 2**62 else -1


def _text(value: Any) -> str:
    return printable(value[:200]) if isinstance(value, str) else ""


def write(store: Store, job: str, log: Log, path: str) -> tuple[int, ImportReport]:
    """Stores what logs hold as a new run.

    Returns:
        Number of the run; what is known of the whole.

    Raises:
        ArgusError: The store cannot be had or refuses rows.
    """
    columns = {name: np.frombuffer(values, np.int64) for name, values in log.columns.items()}
    ranks = _ranks(log, columns)
    first = _first(columns)
    repeated = len(first) - int(first.sum())
    columns = {name: values[first] for name, values in columns.items()}
    dated = columns["ts"][columns["ts"] > 0]
    middle = int(np.median(dated)) if len(dated) else time.time_ns()
    kept = np.abs(columns["ts"] - middle) < _YEAR_NS // 12
    report = ImportReport(world_size=max(size for _, size in log.communicators), losses=Tally(log.losses))
    report.begin_ns = int(columns["ts"][kept].min()) if kept.any() else middle
    report.end_ns = int((columns["ts"] + columns["ns"])[kept].max()) if kept.any() else middle
    if repeated:
        report.counters["collectives_repeated"] = repeated
    if not kept.all():
        report.counters["calls_of_a_wrong_time"] = int(len(kept) - kept.sum())
    order = sorted(range(len(ranks)), key=lambda place: int(ranks[place]))
    hosts = list(log.processes)
    report.ranks, report.hosts = [int(ranks[place]) for place in order], [hosts[place][0] for place in order]
    chosen = {name: values[kept] for name, values in columns.items()}
    return store_run(store, job, SOURCE, report, _tables(log, chosen, ranks), path), report


def _first(columns: Mapping[str, NDArray[np.int64]]) -> NDArray[np.bool_]:
    """Which rows are the first of their communicator, rank and number: a log that is given twice counts once."""
    keys = np.stack([columns[name] for name in ("comm", "rank", "seq", "op")])
    first = np.zeros(keys.shape[1], np.bool_)
    first[np.unique(keys, axis=1, return_index=True)[1]] = True
    return first


def _ranks(log: Log, columns: Mapping[str, NDArray[np.int64]]) -> NDArray[np.int64]:
    """Global rank of each process: as in the largest communicator it is in, while no other process has that one."""
    sizes = np.array([size for _, size in log.communicators])
    ranks = np.full(len(log.processes), -1, np.int64)
    pairs = np.unique(np.stack([-sizes[columns["comm"]], columns["comm"], columns["rank"], columns["process"]]), axis=1)
    taken: set[int] = set()
    most = -1
    for rank, process in zip(pairs[2].tolist(), pairs[3].tolist(), strict=True):
        if ranks[process] < 0:
            ranks[process] = rank if rank not in taken else most + 1
            taken.add(int(ranks[process]))
            most = max(most, int(ranks[process]))
    return ranks


def _tables(
    log: Log, columns: Mapping[str, NDArray[np.int64]], ranks: NDArray[np.int64]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    ops, hosts = list(log.ops), [host for host, _ in log.processes]
    pids = np.array([pid for _, pid in log.processes], np.int64)
    members = np.unique(np.stack([columns["process"], columns["comm"], columns["rank"]]), axis=1)
    sizes = np.array([size for _, size in log.communicators], np.int32)
    if members.shape[1]:
        yield "communicators", {
            "rank": ranks[members[0]].astype(np.uint32), "comm": (members[1] + 1).astype(np.uint64),
            "comm_group": (members[1] + 1).astype(np.uint64), "comm_rank": members[2].astype(np.int32),
            "nranks": sizes[members[1]], "seq_offset": np.zeros(members.shape[1], np.int64), "joined_by": "name",
            "error": "", "version": time.time_ns(),
        }  # fmt: skip
    order = np.argsort(columns["ts"], kind="stable")
    for low in range(0, len(order), BATCH):
        part = {name: values[order[low : low + BATCH]] for name, values in columns.items()}
        shared = {
            "rank": ranks[part["process"]].astype(np.uint32),
            "host": [hosts[place] for place in part["process"].tolist()],
            "pid": pids[part["process"]].astype(np.uint32), "comm": (part["comm"] + 1).astype(np.uint64),
            "op": [ops[place] for place in part["op"].tolist()], "ts": part["ts"],
        }  # fmt: skip
        count = len(part["ts"])
        yield "collectives", {
            **shared, "tid": 0, "seq": part["seq"].astype(np.uint64), "bytes": part["bytes"].astype(np.uint64),
            "count": np.zeros(count, np.uint64), "dtype": "unknown", "redop": "", "peer": np.full(count, -1, np.int32),
            "stream": 0, "duration_ns": np.full(count, -1, np.int64), "result": 0,
            "in_group": np.zeros(count, np.bool_),
        }  # fmt: skip
        yield "gpu_collectives", {
            **shared, "device": 0, "step": (part["seq"] % 2**32).astype(np.uint32),
            "peer": np.full(count, -1, np.int32), "calls": np.ones(count, np.uint32), "bytes": part["bytes"],
            "duration_ns": part["ns"], "shortest_ns": part["ns"],
        }  # fmt: skip
