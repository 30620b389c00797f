"""Timelines in the Trace Event Format (JSON), which https://ui.perfetto.dev and chrome://tracing open.

A rank is a process; its steps, its CPU threads (CUDA calls, collectives, garbage collections) and its GPU's streams are
threads of it; arrows lead from launches to kernels. The format: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argus.errors import EXIT_FAILURE, EXIT_UNAVAILABLE, ArgusError
from argus.store.open import Store
from argus.store.reader import query_columns
from argus.store.stacks import Selection

MAX_EVENTS = 2_000_000
"""More than that no viewer opens in reasonable time."""
STREAMS_FROM = 1 << 30
"""Threads of streams are numbered from here on; Linux's are at most 2^22."""
STEPS = 0
"""The thread of steps: no thread of a user's program has this number."""


@dataclass(frozen=True)
class Moment:
    """What to show.

    Attributes:
        job, run: The tracing session.
        begin_ns, end_ns: Wall time.
        ranks: Whose; none: all.
    """

    job: str
    run: int
    begin_ns: int
    end_ns: int
    ranks: tuple[int, ...] = ()

    @property
    def values(self) -> dict[str, Any]:
        """Parameters of the queries."""
        return {
            "job": self.job,
            "run": self.run,
            "ranks": list(self.ranks),
            "begin": self.begin_ns,
            "end": self.end_ns,
        }


LAST_NS = 2_000_000_000
"""Shown where no time is chosen."""

_OF_RUN = (
    "job = {job:String} AND run = {run:UInt32} AND (empty({ranks:Array(UInt32)}) OR has({ranks:Array(UInt32)}, rank))"
)
_IN_TIME = (
    "ts < fromUnixTimestamp64Nano({end:Int64})"
    " AND toUnixTimestamp64Nano(ts) + greatest(toInt64(duration_ns), 0) > {begin:Int64}"
    # Rows are in order of their begin: without this all before would be read.
    " AND ts > fromUnixTimestamp64Nano({begin:Int64} - 60000000000)"
)
_WHERE = f"WHERE {_OF_RUN} AND {_IN_TIME}"
_AT = "toUnixTimestamp64Nano(ts) - {begin:Int64} AS at, greatest(toInt64(duration_ns), 0) AS took"

_STEPS = f"SELECT rank, step, {_AT}, launches, collectives FROM iterations {_WHERE} ORDER BY rank, at"
_LAUNCHES = f"SELECT rank, tid, call, kernel, bytes, stream, {_AT} FROM launches {_WHERE} ORDER BY rank, tid, at"
_COLLECTIVES = (
    f"SELECT rank, tid, op, bytes, dtype, count, seq, comm, {_AT} FROM collectives {_WHERE}"
    " AND op NOT IN ('GroupStart', 'GroupEnd') ORDER BY rank, tid, at"
)
_KERNELS = (
    "SELECT rank, device, stream, kind, name, bytes, grid, block, correlation, issue_latency_ns, launch_tid,"
    " toUnixTimestamp64Nano(launch_ts) - {begin:Int64} AS launched, " + _AT + f" FROM kernel_events {_WHERE}"
    " ORDER BY rank, device, stream, at"
)
_PAUSES = f"SELECT rank, tid, generation, {_AT} FROM gc_pauses {_WHERE} ORDER BY rank, tid, at"
_RANKS = f"SELECT rank, any(host) AS node, any(pid) AS pid FROM ranks FINAL WHERE {_OF_RUN} GROUP BY rank ORDER BY rank"
_COUNT = "SELECT " + " + ".join(
    f"(SELECT count() FROM {table} {_WHERE})" for table in ("launches", "collectives", "kernel_events", "gc_pauses")
) + " AS events"  # fmt: skip


_SPAN = f"""
SELECT toUnixTimestamp64Nano(min(ts)) AS begin_ns, max(toUnixTimestamp64Nano(ts) + toInt64(duration_ns)) AS end_ns
FROM iterations WHERE {_OF_RUN} AND step BETWEEN {{first:UInt32}} AND {{last:UInt32}}
"""
_END = f"""
SELECT max(newest) AS end_ns FROM
(
  SELECT max(toUnixTimestamp64Nano(ts)) AS newest FROM launches WHERE {_OF_RUN}
  UNION ALL SELECT max(toUnixTimestamp64Nano(ts)) FROM collectives WHERE {_OF_RUN}
  UNION ALL SELECT max(toUnixTimestamp64Nano(ts)) FROM kernel_events WHERE {_OF_RUN}
)
"""


def moment_of(store: Store, chosen: Selection) -> Moment:
    """What a selection means for a timeline: without a time, the last ``LAST_NS``.

    Raises:
        ArgusError: There is no such step, or nothing at all.
    """
    values = {"job": chosen.job, "run": chosen.run, "ranks": list(chosen.ranks)}
    if chosen.steps is not None:
        steps = {"first": chosen.steps[0], "last": chosen.steps[1]}
        found = query_columns(store, _SPAN, values | steps)
        begin_ns, end_ns = int(found["begin_ns"][0]), int(found["end_ns"][0])
        if not end_ns:
            raise ArgusError(f"no step {chosen.steps[0]} of job {chosen.job} is stored", "", EXIT_UNAVAILABLE)
    else:
        newest = chosen.to_ns if chosen.to_ns is not None else int(query_columns(store, _END, values)["end_ns"][0]) + 1
        end_ns = newest
        begin_ns = chosen.from_ns if chosen.from_ns is not None else end_ns - (chosen.last_ns or LAST_NS)
    return Moment(chosen.job, chosen.run, begin_ns, end_ns, chosen.ranks)


def write_perfetto(store: Store, moment: Moment, file: Path, note: str = "") -> int:
    """Writes a timeline; ``file`` ending in ``.gz`` is compressed.

    Args:
        store: Where the rows are.
        moment: What to show.
        file: Where to; replaced only when all is written.
        note: What the file should say of itself.

    Returns:
        The number of events.

    Raises:
        ArgusError: Nothing is stored of the moment, too much is, or the file cannot be written.
    """
    count = int(query_columns(store, _COUNT, moment.values)["events"][0])
    if count > MAX_EVENTS:
        raise ArgusError(
            f"{count:,} events are more than a viewer opens ({MAX_EVENTS:,})",
            "Choose fewer ranks, steps or seconds: --rank 0-3, --step 812, --last 2s",
            EXIT_UNAVAILABLE,
        )
    partial = file.with_name(f"{file.name}.part")
    written = 0
    try:
        with open(partial, "wb") as raw:
            packed = gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=5, mtime=0) if file.suffix == ".gz" else raw
            with io.TextIOWrapper(packed, encoding="utf-8") as out:
                about = {"job": moment.job, "run": moment.run, "begin_ns": str(moment.begin_ns), "note": note}
                out.write('{"displayTimeUnit":"ns","otherData":' + json.dumps(about) + ',"traceEvents":[')
                for number, event in enumerate(_events(store, moment)):
                    out.write(",\n" if number else "\n")
                    out.write(json.dumps(event, separators=(",", ":")))
                    written += event["ph"] == "X"
                out.write("\n]}\n")
        if not written:
            raise ArgusError("nothing is stored of that moment", "See: argus store status", EXIT_UNAVAILABLE)
        partial.replace(file)
    except OSError as failure:
        raise ArgusError(f"{file} cannot be written: {failure.strerror}", "", EXIT_FAILURE) from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    return written


def _rows(store: Store, sql: str, moment: Moment) -> Iterator[dict[str, Any]]:
    columns = query_columns(store, sql, moment.values)
    names = list(columns)
    for values in zip(*(columns[name].tolist() for name in names), strict=True):
        yield dict(zip(names, values, strict=True))


def _events(store: Store, moment: Moment) -> Iterator[Mapping[str, Any]]:
    named: set[tuple[int, int]] = set()

    def name_of(rank: int, tid: int, name: str, place: int) -> Iterator[Mapping[str, Any]]:
        if (rank, tid) not in named:
            named.add((rank, tid))
            yield _meta("thread_name", rank, tid, name=name)
            yield _meta("thread_sort_index", rank, tid, sort_index=place)

    for row in _rows(store, _RANKS, moment):
        rank = row["rank"]
        yield _meta("process_name", rank, 0, name=f"rank {rank} ({row['node']}, pid {row['pid']})")
        yield _meta("process_sort_index", rank, 0, sort_index=rank)
    for row in _rows(store, _STEPS, moment):
        yield from name_of(row["rank"], STEPS, "steps", -1)
        args = {"launches": row["launches"], "collectives": row["collectives"]}
        yield _span(row, STEPS, f"step {row['step']}", "step", args)
    for row in _rows(store, _LAUNCHES, moment):
        yield from name_of(row["rank"], row["tid"], f"thread {row['tid']}", 0)
        args = {name: row[name] for name in ("kernel", "bytes", "stream") if row[name]}
        yield _span(row, row["tid"], row["call"], "cuda", args)
    for row in _rows(store, _COLLECTIVES, moment):
        yield from name_of(row["rank"], row["tid"], f"thread {row['tid']}", 0)
        args = {name: row[name] for name in ("bytes", "dtype", "count", "seq")} | {"comm": hex(row["comm"])}
        yield _span(row, row["tid"], row["op"], "collective", args)
    for row in _rows(store, _PAUSES, moment):
        yield from name_of(row["rank"], row["tid"], f"thread {row['tid']}", 0)
        yield _span(row, row["tid"], "garbage collection", "gc", {"generation": row["generation"]})
    for number, row in enumerate(_rows(store, _KERNELS, moment)):
        tid = STREAMS_FROM + (row["device"] << 16) + (row["stream"] & 0xFFFF)
        yield from name_of(row["rank"], tid, f"GPU {row['device']} stream {row['stream']}", tid)
        args = {name: row[name] for name in ("bytes", "grid", "block", "correlation") if row[name]}
        if row["issue_latency_ns"] >= 0:
            args["issue_latency_us"] = row["issue_latency_ns"] / 1e3
        yield _span(row, tid, row["name"] or row["kind"], row["kind"], args)
        if row["issue_latency_ns"] >= 0 and row["launched"] >= 0 and row["launch_tid"]:
            arrow = {"name": "launch", "cat": "launch", "id": number, "pid": row["rank"]}
            yield {**arrow, "ph": "s", "tid": row["launch_tid"], "ts": row["launched"] / 1e3}
            yield {**arrow, "ph": "f", "bp": "e", "tid": tid, "ts": row["at"] / 1e3}


def _meta(kind: str, rank: int, tid: int, **args: Any) -> Mapping[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": tid, "args": args}


def _span(row: Mapping[str, Any], tid: int, name: str, kind: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
    """A stretch of time, in us. Of what took no time, or was not timed, a dot remains."""
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "pid": row["rank"],
        "tid": tid,
        "ts": row["at"] / 1e3,
        "dur": row["took"] / 1e3,
        "args": dict(args),
    }
