"""Timelines in Perfetto's own format, which https://ui.perfetto.dev and its trace processor open.

A rank is a process. Its tracks: steps, the phases of each step, threads of the CPU (CUDA calls, collectives, garbage
collections), what their stacks showed, streams of its GPUs, and counters. Arrows lead from launches to kernels, and
through the calls of one collective on all ranks, from the first that came to the last. Above the ranks is the critical
path. Times of several hosts are on the clock of the first one; a rank's name says how exact that is.

The store is read in pieces of bounded size, and each is written before the next one is read.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from argus.diagnose.read.hosts import Hosts, align_hosts
from argus.diagnose.whatif.critical_path import Paths
from argus.diagnose.whatif.stored_paths import read_paths
from argus.export import timeline as read
from argus.export.packets import TraceFile, Track
from argus.export.perfetto import Moment, end_to_end, stack_slice
from argus.export.timeline import Columns, Piece, Source, Timeline, among
from argus.model.errors import EXIT_FAILURE, EXIT_UNAVAILABLE, ArgusError
from argus.model.units import duration
from argus.store.open import Store
from argus.store.read.stacks import Selection, read_stacks
from argus.store.reader import query_columns
from argus.system import files

MAX_EVENTS = 5_000_000
"""Slices of one file: a viewer in a browser has 4 GB of memory, and needs some 500 bytes for each."""
MOST_TOGETHER = 1_000
"""Rows of a thread's stacks that overlap and become one slice."""
STEPS, PHASES, STREAMS, THREADS, WAITS, COUNTERS = 0, 1, 10, 1_000, 2_000, 10_000
"""Order of a rank's tracks: these, and those of the kind after it."""
CRITICAL_PATH, ABOUT, NODES = -2, -1, 1 << 24
"""Order of what is not a rank's."""

Row = tuple[Any, ...]


@dataclass(frozen=True)
class Written:
    """What is in a file.

    Attributes:
        slices, arrows, values: Slices, ends of arrows, and values of counters.
        notes: What a reader of it should know, in sentences.
    """

    slices: int
    arrows: int
    values: int
    notes: tuple[str, ...]


def write_trace(
    store: Store, moment: Moment, file: Path, *, hosts: Hosts | None = None, paths: Paths | None = None, note: str = ""
) -> Written:
    """Writes a timeline; ``file`` ending in ``.gz`` is compressed.

    Args:
        store: Where the rows are.
        moment: What to show; its times are the first host's.
        file: Where to; replaced only when all is written.
        hosts: How the hosts go together; None: all have the same clock.
        paths: The critical paths of its steps.
        note: The file's own description.

    Raises:
        ArgusError: Nothing is stored of the moment, too much is, or the file cannot be written.
    """
    timeline = Timeline(store, moment, hosts)
    if timeline.events > MAX_EVENTS:
        raise ArgusError(
            f"{timeline.events:,} events are more than a viewer opens ({MAX_EVENTS:,})",
            "Choose fewer ranks, steps or seconds: --rank 0-3, --step 812, --last 2s",
            EXIT_UNAVAILABLE,
        )
    if not timeline.events:
        raise ArgusError("nothing is stored of that moment", "See: argus store status", EXIT_UNAVAILABLE)
    try:
        with files.replacing(file) as raw:
            if file.suffix.lower() != ".gz":
                return _write(raw, timeline, store, paths, note)
            with gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=5, mtime=0) as packed:
                return _write(packed, timeline, store, paths, note)  # type: ignore[arg-type]
    except OSError as failure:
        raise ArgusError(f"{file} cannot be written: {failure.strerror}", "", EXIT_FAILURE) from None


def export_trace(store: Store, chosen: Selection, file: Path) -> tuple[Moment, Written]:
    """:func:`write_trace` of a selection, with the hosts' clocks aligned and the critical paths of its whole steps.

    Raises:
        ArgusError: As :func:`write_trace`; or there is no such step.
    """
    query = partial(query_columns, store)
    hosts = align_hosts(query, chosen.job, chosen.run)
    moment = read.moment_across(store, chosen, hosts)
    steps = read.whole_steps(store, moment, hosts)
    if steps is not None and chosen.steps is not None:  # which may be all from one on
        steps = max(steps[0], chosen.steps[0]), min(steps[1], chosen.steps[1])
    if steps is None:
        paths = Paths((), why_not="no step lies in that time as a whole")
    else:
        paths = read_paths(query, chosen.job, chosen.run, steps, hosts, chosen.ranks)
    return moment, write_trace(store, moment, file, hosts=hosts, paths=paths)


def _write(out: BinaryIO, timeline: Timeline, store: Store, paths: Paths | None, note: str) -> Written:
    trace = TraceFile(out, timeline.origin_ns())
    writer = _Writer(trace, timeline, store)
    notes = [*clock_notes(timeline.hosts)]
    if paths is not None:
        notes += writer.critical_paths(paths)
    for piece in timeline.pieces:
        writer.ranks(piece)
    writer.left_stacks()
    for piece in timeline.node_pieces:
        writer.nodes(piece)
    if not trace.slices:
        raise ArgusError("nothing is stored of that moment", "See: argus store status", EXIT_UNAVAILABLE)
    if trace.cut:
        notes.append(f"{trace.cut:,} slices overlap too many others of their track, and were cut short")
    writer.about(note, notes)
    trace.flush()
    return Written(trace.slices, writer.arrows, trace.values, tuple(notes))


def clock_notes(hosts: Hosts | None) -> Iterator[str]:
    """Sentences on how well the clocks of hosts agree."""
    if hosts is None:
        return
    errors = {name: hosts.known_error_ns(name) for name in hosts.names[1:]}
    unknown = [name for name, error in errors.items() if error < 0]
    known = [error for error in errors.values() if error >= 0]
    if known:
        yield f"times of all hosts are on the clock of {hosts.names[0]}, to {duration(max(known))}"
    if unknown:
        shown = ", ".join(unknown[:8]) + (", …" if len(unknown) > 8 else "")
        yield f"clocks of {shown} could not be aligned: their times are as these hosts had them"


@dataclass
class _Waiting:
    """Rows of a thread's stacks that overlap: one slice, until ``end_ns``."""

    rows: list[dict[str, Any]]
    end_ns: int = 0


class _Writer:
    """Writes rows as events. ``arrows``: ends of arrows so far."""

    def __init__(self, trace: TraceFile, timeline: Timeline, store: Store) -> None:
        self.arrows = 0
        self._trace = trace
        self._timeline = timeline
        self._store = store
        self._processes: dict[int, int] = {}
        self._tracks: dict[tuple[Any, ...], Track] = {}
        self._counters: dict[tuple[Any, ...], int] = {}
        self._calls = timeline.shared_calls()
        self._launches = timeline.launches_shown()
        self._stacks: dict[tuple[int, int, str], _Waiting] = {}

    # ---- tracks

    def _process(self, rank: int) -> int:
        """The rank's process. Its number is the rank's plus one: processes of several hosts may have the same, and 0 is
        the kernel's."""
        uuid = self._processes.get(rank)
        if uuid is None:
            known = self._timeline.ranks.get(rank)
            parts = [known.host, *(f"GPU {device}" for device in known.devices[:8])] if known is not None else []
            if known is not None and known.pid:
                parts.append(f"pid {known.pid}")
            if known is not None and (clock := self._clock(known.host)):
                parts.append(clock)
            name = f"rank {rank}" + (f" ({', '.join(parts)})" if parts else "")
            uuid = self._processes[rank] = self._trace.process(rank + 1, name, rank, parts)
        return uuid

    def _clock(self, host: str) -> str:
        hosts = self._timeline.hosts
        if hosts is None or host == hosts.names[0]:
            return ""
        error = hosts.known_error_ns(host)
        return f"clock ±{duration(error)}" if error >= 0 else "clock not aligned"

    def _track(self, rank: int, kind: str, number: Any, name: str, order: int) -> Track:
        track = self._tracks.get((rank, kind, number))
        if track is None:
            track = self._tracks[rank, kind, number] = self._trace.track(self._process(rank), name, order)
        return track

    def _thread(self, rank: int, tid: int) -> Track:
        track = self._tracks.get((rank, "thread", tid))
        if track is None:
            known = self._timeline.ranks.get(rank)
            main = known is not None and known.pid == tid
            name, order = ("main thread", THREADS) if main else (f"thread {tid}", THREADS + 1)
            track = self._trace.thread(self._process(rank), rank + 1, tid, name, order)
            self._tracks[rank, "thread", tid] = track
        return track

    def _value(self, rank: int, name: str, unit: str, at_ns: int, value: float) -> None:
        counter = self._counters.get((rank, name))
        if counter is None:
            counter = self._trace.counter(self._process(rank), name, unit, COUNTERS + len(self._counters))
            self._counters[rank, name] = counter
        self._trace.value(counter, at_ns, value)

    # ---- rows

    def ranks(self, piece: Piece) -> None:
        """All rows of a piece."""
        self._steps(piece)
        self._kernels(piece)
        self._cpu(piece)
        self._sampled(piece)
        self._usage(piece)

    def _rows(self, piece: Piece, source: Source, *names: str) -> Iterator[Row]:
        rows = self._timeline.rows(piece, source)
        if rows is not None:
            yield from _tuples(rows, "host", "rank", "at", *names)

    def _steps(self, piece: Piece) -> None:
        hosts = self._timeline.hosts
        for host, rank, at, step, took, launches, collectives in self._rows(
            piece, read.STEPS, "step", "took", "launches", "collectives"
        ):
            number = step + (hosts.shift_of(str(host)) if hosts is not None else 0)
            arguments = {"launches": launches, "collectives": collectives}
            if number != step:
                arguments["step by its host's numbers"] = step
            track = self._track(rank, "steps", 0, "steps", STEPS)
            self._trace.slice(track, at, took, f"step {number}", "step", arguments)
            self._value(rank, "step time", "ms", at, took / 1e6)
        rows = self._timeline.phases(piece)
        if rows is None:
            return
        names = ("rank", "step", "at", "took", "name", "found_by", "confidence", "spans", "overlapped_ns")
        for phase in end_to_end(dict(zip(names, row, strict=True)) for row in _tuples(rows, *names)):
            shown: dict[str, int | float | str] = {
                "found by": phase["found_by"],
                "confidence": round(float(phase["confidence"]), 3),
                "stretches": phase["spans"],
            }
            if phase["overlapped_ns"]:
                shown["also behind other phases, ms"] = phase["overlapped_ns"] / 1e6
            track = self._track(phase["rank"], "phases", 0, "phases (sums of each step, drawn end to end)", PHASES)
            name = str(phase["name"]).replace("_", " ")
            self._trace.slice(track, phase["at"], phase["took"], name, "phase", shown)

    def _kernels(self, piece: Piece) -> None:
        rows = self._timeline.rows(piece, read.KERNELS)
        if rows is None:
            return
        rows["key"] = read.launch_keys(rows["rank"], rows["launch_tid"], rows["launched"])
        rows["linked"] = among(rows["key"], self._launches)
        rows["launched"] = self._timeline.called(rows["host"], rows["launched"].astype(np.int64))
        names = ("rank", "device", "stream", "at", "took", "kind_", "name_", "bytes", "grid_text", "block_text",
                 "correlation", "issue_latency_ns", "launch_tid", "launched", "key", "linked")  # fmt: skip
        trace, known = self._trace, self._tracks
        for (rank, device, stream, at, took, kind, name, size, grid, block, correlation, latency, tid, launched, key,
             linked) in _tuples(rows, *names):  # fmt: skip
            track = known.get((rank, "stream", (device, stream)))
            if track is None:
                place = STREAMS + min(device, 7) * 100 + min(stream, 99)
                track = self._track(rank, "stream", (device, stream), f"GPU {device} stream {stream}", place)
            arguments: list[tuple[str, int | float | str]] = []
            if size:
                arguments.append(("bytes", size))
            if grid:
                arguments += [("grid", grid), ("block", block)]
            if correlation:
                arguments.append(("correlation", correlation))
            if latency < 0:
                trace.slice(track, at, took, name or kind, kind, arguments)
                continue
            arguments.append(("issue_latency_us", latency / 1e3))
            flows: tuple[int, ...] = ()
            if tid:
                flows = (key,)
                self.arrows += 1
                if not linked:  # CUPTI alone saw the launch
                    trace.instant(self._thread(rank, tid), launched, "launch", "launch", (), flows)
                    self.arrows += 1
            trace.slice(track, at, took, name or kind, kind, arguments, flows)

    def _cpu(self, piece: Piece) -> None:
        """Calls and pauses of each thread, in order of time."""
        trace = self._trace
        events: list[tuple[int, int, int, int, str, str, list[tuple[str, Any]], tuple[int, ...]]] = []
        if (rows := self._timeline.rows(piece, read.LAUNCHES)) is not None:
            rows["key"] = read.launch_keys(rows["rank"], rows["tid"], rows["own_at"])
            rows["linked"] = among(rows["key"], self._launches)
            for rank, tid, at, took, name, kernel, size, stream, grid, block, key, linked in _tuples(
                rows, "rank", "tid", "at", "took", "name", "kernel_", "bytes", "stream", "grid_text", "block_text",
                "key", "linked",
            ):  # fmt: skip
                shown = [("kernel", kernel), ("bytes", size), ("stream", stream), ("grid", grid), ("block", block)]
                given = [(word, value) for word, value in shown if value]
                events.append((rank, tid, at, -took, name, "cuda", given, (key,) if linked else ()))
        if (rows := self._timeline.rows(piece, read.COLLECTIVES)) is not None:
            rows["key"] = self._timeline.call_keys(rows)
            rows["linked"] = among(rows["key"], self._calls)
            for rank, tid, at, took, name, size, dtype, count, seq, comm, key, linked in _tuples(
                rows, "rank", "tid", "at", "took", "name", "bytes", "dtype_", "count", "seq", "comm", "key", "linked"
            ):
                given = [("bytes", size), ("dtype", dtype), ("count", count), ("seq", seq), ("comm", hex(comm))]
                if (own := self._timeline.handles.get((rank, comm))) is not None:
                    given += [("communicator", hex(own[0])), ("call of it", seq + own[1])]
                events.append((rank, tid, at, -took, name, "collective", given, (key,) if linked else ()))
        for _, rank, at, tid, took, generation in self._rows(piece, read.PAUSES, "tid", "took", "generation"):
            events.append((rank, tid, at, -took, "garbage collection", "gc", [("generation", generation)], ()))
        events.sort(key=lambda event: event[:4])
        for rank, tid, at, minus_took, name, category, given, flows in events:
            self.arrows += len(flows)
            trace.slice(self._thread(rank, tid), at, -minus_took, name, category, given, flows)

    # ---- stacks

    def _sampled(self, piece: Piece) -> None:
        """Stacks of each thread: rows that overlap become one slice. What may overlap rows of the next piece waits."""
        rows = self._timeline.rows(piece, read.STACKS)
        if rows is None:
            return
        rows["thread_name"] = rows["thread_"]
        names = ("rank", "pid", "tid", "thread_name", "kind_name", "reason_name", "gc", "in_kernel", "times", "spent",
                 "stack_id", "at", "took")  # fmt: skip
        done: list[_Waiting] = []
        for values in _tuples(rows, *names):
            row = dict(zip(names, values, strict=True))
            key = row["rank"], row["tid"], row["kind_name"]
            waiting = self._stacks.get(key)
            if waiting is None or row["at"] >= waiting.end_ns or len(waiting.rows) >= MOST_TOGETHER:
                if waiting is not None:
                    done.append(waiting)
                waiting = self._stacks[key] = _Waiting([])
            waiting.rows.append(row)
            waiting.end_ns = max(waiting.end_ns, row["at"] + max(row["took"], 1))
        self._show(done)

    def left_stacks(self) -> None:
        """Writes the stacks that waited for more."""
        self._show(list(self._stacks.values()))
        self._stacks.clear()

    def _show(self, groups: Sequence[_Waiting]) -> None:
        moment = self._timeline.moment
        for first in range(0, len(groups), 1000):
            some = groups[first : first + 1000]
            stacks = read_stacks(
                self._store, moment.job, moment.run, {row["stack_id"] for own in some for row in own.rows}
            )
            for own in some:
                shown = stack_slice(own.rows, own.end_ns, stacks)
                label, order = ("waits of", WAITS) if shown.off_cpu else ("stacks of", THREADS)
                main = shown.tid == shown.pid
                thread = shown.thread or ("main thread" if main else f"thread {shown.tid}")
                name = f"{label} {thread} ({shown.tid})"
                track = self._track(shown.rank, label, shown.tid, name, order + 2 - main)
                kind = "wait" if shown.off_cpu else "stack"
                self._trace.slice(track, shown.at_ns, shown.took_ns, shown.name, kind, shown.details)

    # ---- counters

    def _usage(self, piece: Piece) -> None:
        for _, rank, at, device, took, busy, exposed, depth, latency in self._rows(
            piece, read.GPU_SECONDS, "device", "duration_ns", "busy_ns", "exposed_communication_ns",
            "queue_depth_mean", "issue_latency_p50_ns",
        ):  # fmt: skip
            gpu = f"GPU {device}"
            if took > 0:
                self._value(rank, f"{gpu} busy", "%", at, 100 * busy / took)
                self._value(rank, f"{gpu} only communicates", "%", at, 100 * exposed / took)
            if depth >= 0:
                self._value(rank, f"{gpu} operations waiting", "operations", at, float(depth))
            if latency >= 0:
                self._value(rank, f"{gpu} issue latency, median", "us", at, latency / 1e3)
        for _, rank, at, device, share in self._rows(piece, read.GPU_STEPS, "device", "void_share"):
            self._value(rank, f"GPU {device} idle in step", "%", at, 100 * float(share))
        for _, rank, at, cpu, waited, length in self._rows(piece, read.THREADS, "cpu", "waited", "length"):
            if length > 0:
                self._value(rank, "CPUs used", "CPUs", at, cpu / length)
                self._value(rank, "threads waiting for a CPU", "threads", at, waited / length)

    def nodes(self, piece: Piece) -> None:
        """Counters of nodes."""
        rows = self._timeline.rows(piece, read.NODES)
        if rows is None:
            return
        for host, at, length, cpus, busy, stolen in _tuples(
            rows, "host", "at", "interval_ns", "cpus", "busy_ns", "stolen_ns"
        ):
            if length <= 0 or not cpus:
                continue
            if ("node", host) not in self._counters:
                group = self._trace.group(f"node {host}", NODES)
                self._counters["node", host] = self._trace.counter(group, "CPUs busy", "%", 0)
                self._counters["stolen", host] = self._trace.counter(group, "CPUs taken by the hypervisor", "%", 1)
            self._trace.value(self._counters["node", host], at, 100 * busy / (length * cpus))
            self._trace.value(self._counters["stolen", host], at, 100 * stolen / (length * cpus))

    # ---- what is of no rank

    def critical_paths(self, paths: Paths) -> Iterable[str]:
        """A track with the critical path of each step; sentences on what it is, or why there is none."""
        if not paths.steps:
            yield f"there is no critical path: {paths.why_not}"
            return
        track = self._trace.track(0, "critical path", CRITICAL_PATH, paths.source)
        until = 0
        for path in paths.steps:
            for segment in path.segments:
                begin = max(segment.begin_ns, until)
                if segment.end_ns <= begin:
                    continue
                until = segment.end_ns
                arguments: dict[str, int | float | str] = {
                    "rank": segment.rank, "what": segment.what, "step": path.step,
                    "part of the step, %": 100 * (segment.end_ns - segment.begin_ns) / max(path.length_ns, 1),
                }  # fmt: skip
                if segment.name:
                    arguments["name"] = segment.name
                name = f"rank {segment.rank}: {segment.what}"
                self._trace.slice(track, begin, segment.end_ns - begin, name, "critical path", arguments)
        yield f"the critical path is from {paths.source}"
        if paths.why_not:
            yield f"of some steps there is none: {paths.why_not}"

    def about(self, note: str, notes: Sequence[str]) -> None:
        """An event that says what the file is."""
        moment = self._timeline.moment
        track = self._trace.track(0, "about this timeline", ABOUT)
        arguments: dict[str, int | float | str] = {"job": moment.job, "run": moment.run}
        arguments |= {"note": note} if note else {}
        arguments |= {f"note {number}": sentence for number, sentence in enumerate(notes, 1)}
        self._trace.instant(track, moment.begin_ns, "about this timeline", "about", arguments)


def _tuples(rows: Columns, *names: str) -> Iterator[Row]:
    return zip(*(rows[name].tolist() for name in names), strict=True)
