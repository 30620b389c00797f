"""Timelines in the Trace Event Format (JSON), which https://ui.perfetto.dev and chrome://tracing open.

A rank is a process; its steps, the phases of each step, its CPU threads (CUDA calls, collectives, garbage
collections), their sampled stacks and waits, and its GPU's streams are threads of it; arrows lead from launches to
kernels. The format: "Trace Event Format", Google, 2016.

Times count from the first event, since Perfetto drops what has a negative time. Phases are stored as sums of a step:
they are drawn end to end inside it, in the order in which a step usually has them, and the track's name states that.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argus.model.errors import EXIT_FAILURE, EXIT_UNAVAILABLE, ArgusError
from argus.model.stacks import Stack
from argus.model.text import printable
from argus.model.units import duration
from argus.semantics.stacks.profile import annotated, frame_text
from argus.store.open import Store
from argus.store.read.stacks import OWN_THREAD, Selection, read_stacks
from argus.store.reader import query_columns
from argus.system import files

MAX_EVENTS = 2_000_000
"""More than that no viewer opens in reasonable time."""
STREAMS_FROM = 1 << 30
"""Threads of streams are numbered from here on; Linux's are at most 2^22."""
STEPS = 0
"""The thread of steps: no thread of a user's program has this number."""
PHASES = 1 << 25
"""The thread of the phases of steps."""
ON_CPU, OFF_CPU = 1 << 26, 1 << 27
"""Added to a thread's number: what it ran, by samples of its stack, and what it waited for."""
PHASE_ORDER = ("data_loading", "forward", "backward", "communication", "optimizer", "other")
"""In which phases are drawn inside a step."""
SHOWN_STACKS, SHOWN_FRAMES = 3, 24
"""Stacks in the details of a slice, and frames of each."""


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
_AT = "toUnixTimestamp64Nano(ts) - {origin:Int64} AS at, greatest(toInt64(duration_ns), 0) AS took"
# Rows of waits come every 10 s, and begin when the wait did.
_SAMPLED = (
    f"WHERE {_OF_RUN} AND ts < fromUnixTimestamp64Nano({{end:Int64}})"
    " AND last_ts >= fromUnixTimestamp64Nano({begin:Int64})"
    " AND ts > fromUnixTimestamp64Nano({begin:Int64} - 60000000000)"
    f" AND thread != '{OWN_THREAD}'"
)

_STEPS = f"SELECT rank, step, {_AT}, launches, collectives FROM iterations {_WHERE} ORDER BY rank, at"
_LAUNCHES = f"SELECT rank, tid, call, kernel, bytes, stream, {_AT} FROM launches {_WHERE} ORDER BY rank, tid, at"
_COLLECTIVES = (
    f"SELECT rank, tid, op, bytes, dtype, count, seq, comm, {_AT} FROM collectives {_WHERE}"
    " AND op NOT IN ('GroupStart', 'GroupEnd') ORDER BY rank, tid, at"
)
_KERNELS = (
    "SELECT rank, device, stream, kind, name, bytes, grid, block, correlation, issue_latency_ns, launch_tid,"
    " toUnixTimestamp64Nano(launch_ts) - {origin:Int64} AS launched, " + _AT + f" FROM kernel_events {_WHERE}"
    " ORDER BY rank, device, stream, at"
)
_PAUSES = f"SELECT rank, tid, generation, {_AT} FROM gc_pauses {_WHERE} ORDER BY rank, tid, at"
_PHASES = (
    "SELECT rank, step, toString(phase) AS name, toString(method) AS found_by, confidence, overlapped_ns, spans,"
    f" {_AT} FROM phases WHERE {_OF_RUN} AND (rank, step) IN (SELECT rank, step FROM iterations {_WHERE})"
    " ORDER BY rank, at, step"
)
_STACKS = (
    "SELECT rank, pid, tid, toString(thread) AS thread_name, toString(kind) AS kind_name,"
    " toString(reason) AS reason_name,"
    " gc, in_kernel, count AS times, ns AS spent, stack_id, toUnixTimestamp64Nano(ts) - {origin:Int64} AS at,"
    " toUnixTimestamp64Nano(last_ts) - toUnixTimestamp64Nano(ts) AS took"
    f" FROM stack_samples {_SAMPLED} ORDER BY rank, tid, kind, ts"
)
_RANKS = f"SELECT rank, any(host) AS node, any(pid) AS pid FROM ranks FINAL WHERE {_OF_RUN} GROUP BY rank ORDER BY rank"
_TIMED = ("iterations", "launches", "collectives", "kernel_events", "gc_pauses")
"""Tables with a row for each event."""
_COUNT = "SELECT " + " + ".join(
    [f"(SELECT count() FROM {table} {_WHERE})" for table in _TIMED]
    + [f"(SELECT count() FROM stack_samples {_SAMPLED})"]
) + " AS events"  # fmt: skip
_ORIGIN = "SELECT min(first) AS origin FROM (" + " UNION ALL ".join(
    [f"SELECT toUnixTimestamp64Nano(min(ts)) AS first FROM {table} {_WHERE} HAVING count() > 0" for table in _TIMED]
    + [f"SELECT toUnixTimestamp64Nano(min(ts)) FROM stack_samples {_SAMPLED} HAVING count() > 0"]
) + ")"  # fmt: skip


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
  UNION ALL SELECT max(toUnixTimestamp64Nano(ts) + toInt64(duration_ns)) FROM iterations WHERE {_OF_RUN}
  UNION ALL SELECT max(toUnixTimestamp64Nano(last_ts)) FROM stack_samples WHERE {_OF_RUN}
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
        span = query_columns(store, _SPAN, values | steps)
        begin_ns, end_ns = int(span["begin_ns"][0]), int(span["end_ns"][0])
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
        note: The file's own description.

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
    written = 0
    try:
        with files.replacing(file) as raw:
            packed = gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=5, mtime=0) if file.suffix == ".gz" else raw
            with io.TextIOWrapper(packed, encoding="utf-8") as out:
                origin = _origin(store, moment)
                about = {"job": moment.job, "run": moment.run, "begin_ns": str(origin), "note": note}
                out.write('{"displayTimeUnit":"ns","otherData":' + json.dumps(about) + ',"traceEvents":[')
                for number, event in enumerate(_events(store, moment, origin)):
                    out.write(",\n" if number else "\n")
                    out.write(json.dumps(event, separators=(",", ":")))
                    written += event["ph"] == "X"
                out.write("\n]}\n")
            if not written:
                raise ArgusError("nothing is stored of that moment", "See: argus store status", EXIT_UNAVAILABLE)
    except OSError as failure:
        raise ArgusError(f"{file} cannot be written: {failure.strerror}", "", EXIT_FAILURE) from None
    return written


def _origin(store: Store, moment: Moment) -> int:
    """Wall time that counts as 0: of the first event shown, which may have begun before the moment."""
    origins = query_columns(store, _ORIGIN, moment.values)["origin"]
    first = int(origins[0]) if len(origins) else 0
    return min(first, moment.begin_ns) if first else moment.begin_ns


def _rows(store: Store, sql: str, moment: Moment, origin: int) -> Iterator[dict[str, Any]]:
    columns = query_columns(store, sql, moment.values | {"origin": origin})
    names = list(columns)
    for values in zip(*(columns[name].tolist() for name in names), strict=True):
        yield dict(zip(names, values, strict=True))


def _events(store: Store, moment: Moment, origin: int) -> Iterator[Mapping[str, Any]]:
    named: set[tuple[int, int]] = set()

    def name_of(rank: int, tid: int, name: str, place: int) -> Iterator[Mapping[str, Any]]:
        if (rank, tid) not in named:
            named.add((rank, tid))
            yield _meta("thread_name", rank, tid, name=name)
            yield _meta("thread_sort_index", rank, tid, sort_index=place)

    for row in _rows(store, _RANKS, moment, origin):
        rank = row["rank"]
        yield _meta("process_name", rank, 0, name=f"rank {rank} ({row['node']}, pid {row['pid']})")
        yield _meta("process_sort_index", rank, 0, sort_index=rank)
    for row in _rows(store, _STEPS, moment, origin):
        yield from name_of(row["rank"], STEPS, "steps", -1)
        args = {"launches": row["launches"], "collectives": row["collectives"]}
        yield _span(row, STEPS, f"step {row['step']}", "step", args)
    for row in end_to_end(_rows(store, _PHASES, moment, origin)):
        yield from name_of(row["rank"], PHASES, "phases (sums of each step, drawn end to end)", -1)
        args = {"found by": row["found_by"], "confidence": round(row["confidence"], 3), "stretches": row["spans"]}
        if row["overlapped_ns"]:
            args["also behind other phases, ms"] = row["overlapped_ns"] / 1e6
        yield _span(row, PHASES, row["name"].replace("_", " "), "phase", args)
    for slice_ in stack_slices(store, moment, list(_rows(store, _STACKS, moment, origin))):
        label = "waits of" if slice_.off_cpu else "stacks of"
        thread = slice_.thread or ("main thread" if slice_.tid == slice_.pid else f"thread {slice_.tid}")
        tid = slice_.tid + (OFF_CPU if slice_.off_cpu else ON_CPU)
        yield from name_of(slice_.rank, tid, f"{label} {thread} ({slice_.tid})", 1 if slice_.tid == slice_.pid else 2)
        row = {"rank": slice_.rank, "at": slice_.at_ns, "took": slice_.took_ns}
        yield _span(row, tid, slice_.name, "wait" if slice_.off_cpu else "stack", slice_.details)
    for row in _rows(store, _LAUNCHES, moment, origin):
        yield from name_of(row["rank"], row["tid"], f"thread {row['tid']}", 0)
        args = {name: row[name] for name in ("kernel", "bytes", "stream") if row[name]}
        yield _span(row, row["tid"], row["call"], "cuda", args)
    for row in _rows(store, _COLLECTIVES, moment, origin):
        yield from name_of(row["rank"], row["tid"], f"thread {row['tid']}", 0)
        args = {name: row[name] for name in ("bytes", "dtype", "count", "seq")} | {"comm": hex(row["comm"])}
        yield _span(row, row["tid"], row["op"], "collective", args)
    for row in _rows(store, _PAUSES, moment, origin):
        yield from name_of(row["rank"], row["tid"], f"thread {row['tid']}", 0)
        yield _span(row, row["tid"], "garbage collection", "gc", {"generation": row["generation"]})
    for number, row in enumerate(_rows(store, _KERNELS, moment, origin)):
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


def end_to_end(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Phases of a step, each where the one before ends. Those of zero length are left out."""
    place = {name: number for number, name in enumerate(PHASE_ORDER)}
    for _, group in itertools.groupby(rows, key=lambda row: (row["rank"], row["step"])):
        end = None
        for row in sorted(group, key=lambda row: place.get(row["name"], len(place))):
            at = row["at"] if end is None else end
            end = at + row["took"]
            if row["took"]:
                yield {**row, "at": at}


@dataclass(frozen=True)
class StackSlice:
    """What a thread ran, or waited for, during a stretch of time.

    Attributes:
        rank, pid, tid, thread: Whose.
        off_cpu: Whether these are waits.
        at_ns, took_ns: When, from the timeline's origin, and how long.
        name: The line with the most time in it, or what was waited for.
        details: Its stacks, those with the most time first.
    """

    rank: int
    pid: int
    tid: int
    thread: str
    off_cpu: bool
    at_ns: int
    took_ns: int
    name: str
    details: dict[str, Any]


def stack_slices(store: Store, moment: Moment, rows: Sequence[Mapping[str, Any]]) -> Iterator[StackSlice]:
    """Samples of stacks as slices that do not overlap on a thread: rows that do are put together.

    Args:
        store: Where the stacks are.
        moment: Whose.
        rows: Rows of ``stack_samples``, in order of rank, thread, kind and begin.
    """
    stacks = read_stacks(store, moment.job, moment.run, {row["stack_id"] for row in rows})
    for _, of_thread in itertools.groupby(rows, key=lambda row: (row["rank"], row["tid"], row["kind_name"])):
        together: list[Mapping[str, Any]] = []
        end = 0
        for row in of_thread:
            if together and row["at"] >= end:
                yield stack_slice(together, end, stacks)
                together = []
            end = max(end if together else 0, row["at"] + max(row["took"], 1))
            together.append(row)
        if together:
            yield stack_slice(together, end, stacks)


def stack_slice(rows: Sequence[Mapping[str, Any]], end: int, stacks: Mapping[int, Stack]) -> StackSlice:
    """Rows of a thread that overlap as one slice, until ``end``."""
    first, off_cpu = rows[0], rows[0]["kind_name"] == "off"
    most = sorted(rows, key=lambda row: -row["spent"])
    place = _place(stacks.get(most[0]["stack_id"]))
    name = f"{most[0]['reason_name'] or 'unknown wait'}: {place}" if off_cpu else place
    details: dict[str, Any] = {"waits" if off_cpu else "samples": sum(row["times"] for row in rows)}
    for number, row in enumerate(most[:SHOWN_STACKS], 1):
        stack = stacks.get(row["stack_id"])
        frames = annotated(
            stack.frames if stack is not None else (), kind=row["kind_name"], reason=row["reason_name"],
            gc=bool(row["gc"]), in_kernel=bool(row["in_kernel"]),
        )  # fmt: skip
        shown = " < ".join(printable(frame_text(frame)) for frame in reversed(frames[-SHOWN_FRAMES:]))
        details[f"{number}: {duration(row['spent'])}"] = shown
    return StackSlice(
        first["rank"], first["pid"], first["tid"], printable(first["thread_name"]), off_cpu, first["at"],
        end - first["at"], printable(name), details,
    )  # fmt: skip


def _place(stack: Stack | None) -> str:
    """Where a thread was: its deepest line of Python, or else its last frame."""
    if stack is None or not stack.frames:
        return "(no stack)"
    python = [frame for frame in stack.frames if frame.kind == "python"]
    return frame_text(python[-1] if python else stack.frames[-1])


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
