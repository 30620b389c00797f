"""Recordings of other tools (``recording.Recording``), on their way into the store as a traced run is stored.

Nothing is written before all files were read.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from argus import __version__
from argus.importers.recordings.flops import achieved
from argus.importers.recordings.groups import mesh_of
from argus.importers.recordings.phases import phases_of
from argus.importers.recordings.recording import CALL_KINDS, Progress, Recording
from argus.importers.recordings.steps import RankSteps
from argus.model import calls as hooked
from argus.model import event_kinds
from argus.model.environment import bounded, digest
from argus.model.errors import EXIT_USAGE, ArgusError
from argus.model.records import GPU_OP, GpuKind
from argus.model.units import elapsed
from argus.semantics.gpu.flops import Achieved
from argus.semantics.gpu.usage import GpuSteps, GpuUsage
from argus.semantics.phases.cpu import METHODS as PHASE_METHODS
from argus.semantics.phases.gpu import GPU_METHODS, GPU_OPS, GPU_PHASES, OF_NCCL, Transfers, What, communicates
from argus.store.open import Store
from argus.store.runs import _flush, flush_whole, new_run
from argus.store.writer import Writer
from argus.tables import collectives, gpu
from argus.tables.arrow import Origin, constant, dictionary, triples

CHUNK = 1 << 18
LONGEST_NS = 7 * 86400 * 10**9
"""Longest recording: what is worked out for each second of it is kept in memory."""
APART_NS = 600 * 10**9
"""Recordings of one job overlap, but for clocks that differ and profilers that were started one after the other."""


def check_ranks(recordings: Sequence[Recording]) -> None:
    """Refuses two recordings of one rank, and recordings of different times.

    Raises:
        ArgusError: Naming both files.
    """
    for each in recordings:
        begin, end = each.span
        if end - begin > LONGEST_NS:
            raise ArgusError(
                f"{each.path} has times that lie {(end - begin) / 864e11:,.0f} days apart, which no recording has",
                "Is it damaged? Export it again",
                EXIT_USAGE,
            )
    dated = sorted((each.span, each.path) for each in recordings if each.zero == Recording.zero and any(each.span))
    latest, last = 0, ""
    for (begin, end), path in dated:
        if last and begin - latest > APART_NS:
            raise ArgusError(
                f"{path} begins {elapsed((begin - latest) / 1e9)} after the end of {last}: not of one run",
                "Import recordings of one run together; others under a --job name of their own",
                EXIT_USAGE,
            )
        latest, last = max((latest, last), (end, path))
    seen: dict[int, str] = {}
    for each in recordings:
        if each.rank in seen:
            raise ArgusError(
                f"{seen[each.rank]} and {each.path} are both of rank {each.rank}",
                "Import recordings of one job, one file a rank; others under a --job name of their own",
                EXIT_USAGE,
            )
        seen[each.rank] = each.path


def write(
    store: Store,
    job: str,
    recordings: Sequence[Recording],
    steps: dict[int, RankSteps],
    communicators: NDArray[np.void],
    progress: Progress = lambda what, share: None,
    utilization: tuple[float, float] = (0.0, 0.0),
) -> int:
    """Stores recordings as a new run of a job.

    Args:
        store: Where to.
        job: Name of the job.
        recordings: One a rank, ranks differ.
        steps: Of each rank.
        communicators: ``groups.COMMUNICATOR`` rows.
        progress: Called with how far it is.
        utilization: Floating-point operations of the model in a step, of all ranks, and what a GPU can do at most in a
            second; 0: not given.

    Returns:
        Number of the run: the time, or one more than the newest.

    Raises:
        ArgusError: The store cannot be had, or refuses rows. The run is then left without an end: a run that was cut
            off, to ``argus diagnose`` and to whoever reads ``jobs.ended``.
    """
    run = new_run(store)
    with Writer(store, source=f"import/{run}") as writer:
        version, transfers = time.time_ns(), Transfers()
        # Of all ranks, before the first one's are stored: which ranks waited follows from those that did not.
        for each in recordings:
            kinds = each.kinds()
            pairs = kinds == What.SEND_RECV
            _gpu_steps(each, transfers).learn(each.ops[pairs], communicates(kinds[pairs]), kinds[pairs])
        _write_job(writer, job, run, recordings, version, utilization, ended=False)
        for number, each in enumerate(recordings):
            progress(f"storing rank {each.rank}", number / len(recordings))
            _write_rank(writer, job, run, each, steps[each.rank], version, transfers)
            flush_whole(writer, job, run)
        _write_groups(writer, job, run, recordings, communicators, version)
        _write_coverage(writer, job, run, recordings, version)
        flush_whole(writer, job, run)
        _write_job(writer, job, run, recordings, version + 1, utilization, ended=True)
        flush_whole(writer, job, run)
        progress("stored", 1.0)
    return run


def _write_job(
    writer: Writer,
    job: str,
    run: int,
    recordings: Sequence[Recording],
    version: int,
    utilization: tuple[float, float],
    *,
    ended: bool,
) -> None:
    for host in sorted({each.host for each in recordings}):
        of_host = [each for each in recordings if each.host == host]
        spans = [each.span for each in of_host]
        writer.append(
            "jobs",
            {
                "job": job, "run": run, "host": host,
                "started": np.array([min(begin for begin, _ in spans)], np.int64),
                "ended": np.array([max(end for _, end in spans)], np.int64) if ended else [None],
                "world_size": max(each.world_size for each in recordings), "launcher": of_host[0].source,
                "mono_offset_ns": 0, "argus_version": __version__, "version": version,
                "step_flops": utilization[0], "peak_flops": utilization[1],
            },
        )  # fmt: skip


def _write_rank(
    writer: Writer,
    job: str,
    run: int,
    recording: Recording,
    steps: RankSteps,
    version: int,
    transfers: Transfers,
) -> None:
    host, rank, pid = recording.host, recording.rank, recording.pid
    origin = Origin(job, run, host, 0)
    shared = {"job": job, "run": run, "rank": rank, "host": host}
    begin, _ = recording.span
    functions = sorted({recording.functions[place] for place in np.unique(recording.calls["function"]).tolist()})
    libraries = sorted(
        {"hip" if f.startswith("hip") else "cudart" if f.startswith("cuda") else "cuda" for f in functions}
    )
    writer.append(
        "ranks",
        {
            **shared, "pid": pid, "local_rank": -1, "rank_source": recording.rank_source,
            "started": np.array([begin], np.int64), "exe": "", "command": recording.command, "libraries": [libraries],
            "probes": 0, "state": "imported", "version": version,
        },
    )  # fmt: skip
    if facts := bounded(recording.facts):
        writer.append(
            "environments",
            {
                **shared, "pid": pid, "ts": np.array([begin], np.int64), "facts": [facts],
                "digest": np.array([digest(facts)], np.uint64), "version": version,
            },
        )  # fmt: skip
    state = "on" if len(recording.ops) else "off"
    reason = f"{len(recording.ops):,} operations, imported from {recording.path}" if len(recording.ops) else (
        f"{recording.path} has no GPU operations"
    )  # fmt: skip
    writer.append("features", {**shared, "feature": "gpu_times", "state": state, "reason": reason, "version": version})
    names = gpu.Names()
    names.learn(recording.symbols)
    kinds, words = _launch_kinds(recording, origin, names)
    for low in range(0, len(recording.calls), CHUNK):
        part = slice(low, low + CHUNK)
        writer.append("launches", _launches(recording, recording.calls[part], kinds[part], words, origin, names))
        _flush(writer)
    if len(recording.collectives):
        ranks = np.full(len(recording.collectives), rank, np.uint32)
        writer.append("collectives", collectives.to_table(recording.collectives, origin, ranks))
    rows = steps.rows
    if len(rows):
        writer.append(
            "iterations",
            {
                **shared, "step": rows["step"].copy(), "ts": rows["ts_ns"].astype(np.int64),
                "duration_ns": rows["duration_ns"].copy(), "collectives": rows["collectives"].copy(),
                "launches": rows["launches"].copy(), "method": steps.method, "confidence": rows["confidence"].copy(),
            },
        )  # fmt: skip
    _write_phases(writer, recording, rows, shared)
    _write_gpu(writer, recording, rows, origin, names, transfers)
    flops = achieved(recording, rows)
    if len(flops.flops):
        writer.append("kernel_flops", _flops(recording, flops, shared, names))


def _write_phases(writer: Writer, recording: Recording, rows: NDArray[np.void], shared: dict[str, Any]) -> None:
    parts, names = phases_of(recording, rows)
    if not len(parts):
        return
    at = np.searchsorted(rows["step"], parts["step"])
    writer.append(
        "phases",
        {
            **shared, **{name: parts[name].copy() for name in ("step", "duration_ns", "overlapped_ns", "spans")},
            "ts": rows["ts_ns"][at].astype(np.int64),
            "phase": dictionary(parts["phase"].astype(np.int32), names),
            "method": dictionary(parts["method"].astype(np.int32), list(PHASE_METHODS)),
            "confidence": parts["confidence"].copy(),
        },
    )  # fmt: skip


def _write_coverage(writer: Writer, job: str, run: int, recordings: Sequence[Recording], version: int) -> None:
    for host in sorted({each.host for each in recordings}):
        of_host = [each for each in recordings if each.host == host]
        losses = sum((each.losses for each in of_host), Tally())
        losses.update(dict.fromkeys(of_host[0].losses, 0))
        values = {name: (value, True) for name, value in losses.items()}
        values |= {name: (value, False) for name, value in sum((each.counters for each in of_host), Tally()).items()}
        if values:
            writer.append(
                "coverage",
                {
                    "job": job, "run": run, "host": host, "counter": list(values),
                    "value": np.array([value for value, _ in values.values()], np.uint64),
                    "loss": np.array([loss for _, loss in values.values()], bool),
                    "ts": np.full(len(values), max(each.span[1] for each in of_host), np.int64), "version": version,
                },
            )  # fmt: skip


def _flops(recording: Recording, done: Achieved, shared: dict[str, Any], names: gpu.Names) -> dict[str, Any]:
    kinds, operators, types, shapes = zip(*(recording.operators[text] for text in done.text.tolist()), strict=True)
    return {
        **shared, "pid": recording.pid, "device": done.device.astype(np.uint32), "step": done.step.astype(np.int32),
        "ts": done.ts_ns, "kind": list(kinds), "operator": list(operators), "dtype": list(types),
        "shape": list(shapes), "kernel": [names.words[code] for code in names.of(done.symbol.astype(np.uint32))],
        "steps": (done.step >= 0).astype(np.uint32), "calls": done.calls.astype(np.uint32),
        "kernels": done.kernels.astype(np.uint32), "flops": done.flops,
        "duration_ns": done.duration_ns,
    }  # fmt: skip


def _launch_kinds(recording: Recording, origin: Origin, names: gpu.Names) -> tuple[NDArray[np.int32], list[str]]:
    """Kinds of calls as the table has them: those of copies by their direction. Codes, and what they stand for."""
    table = gpu.kernel_events(recording.ops, origin, recording.rank, recording.pid, names)["kind"]
    column = table.combine_chunks() if isinstance(table, pa.ChunkedArray) else table
    op_kinds = column.dictionary.to_pylist()
    kinds_in_use = list(dict.fromkeys([*CALL_KINDS, *op_kinds]))
    place = np.array([kinds_in_use.index(word) for word in op_kinds], np.int64)
    of_op = np.append(place[np.asarray(column.indices)], 0) if len(recording.ops) else np.zeros(1, np.int64)
    kinds = recording.calls["kind"].copy()
    copy = (kinds == CALL_KINDS.index("memcpy")) | ((kinds == 0) & (recording.calls["op"] >= 0))
    known = copy & (recording.calls["op"] >= 0)
    kinds[known] = of_op[recording.calls["op"][known]]
    return kinds.astype(np.int32), kinds_in_use


def _launches(
    recording: Recording,
    calls: NDArray[np.void],
    kinds: NDArray[np.int32],
    words: list[str],
    origin: Origin,
    names: gpu.Names,
) -> pa.Table:
    count = len(calls)
    known = calls["op"] >= 0
    blank = np.zeros(1, GPU_OP)
    ops = np.concatenate([recording.ops, blank])[calls["op"]]
    kernel = np.array([word == "kernel" for word in words])[kinds]
    nccl = np.append(recording.communication(), False)[calls["op"]]
    ts = pa.array(np.ascontiguousarray(calls["ts_ns"]), pa.int64()).cast(pa.timestamp("ns", tz="UTC"))
    codes = np.where(kernel & known, names.of(ops["name"]), 0).astype(np.int32)
    return pa.table(
        {
            "job": constant(origin.job, count),
            "run": np.full(count, origin.run, np.uint32),
            "rank": np.full(count, recording.rank, np.uint32),
            "host": constant(origin.host, count),
            "pid": np.full(count, recording.pid, np.uint32),
            "tid": np.ascontiguousarray(calls["tid"]),
            "call": dictionary(calls["function"].astype(np.int32), recording.functions),
            "kind": dictionary(kinds, words),
            "kernel": dictionary(codes, list(names.words)),
            "handle": np.zeros(count, np.uint64),
            "stream": np.zeros(count, np.uint64),
            "bytes": np.where(kernel, 0, ops["bytes"]).astype(np.uint64),
            "shared_bytes": np.where(kernel, ops["shared_dynamic"], 0).astype(np.uint64),
            "grid": triples(ops["grid"], kernel & known, pa.uint32()),
            "block": triples(ops["block"].astype(np.uint16), kernel & known, pa.uint16()),
            "ts": ts,
            "duration_ns": np.ascontiguousarray(calls["duration_ns"]),
            "result": np.ascontiguousarray(calls["result"]),
            "in_nccl": nccl,
        }
    )


def _gpu_steps(recording: Recording, transfers: Transfers) -> GpuSteps:
    """What a recording's GPU phases are made from, with its collectives classified."""
    steps = GpuSteps()
    steps.phases.transfers = transfers
    called = recording.collectives
    meant = [OF_NCCL.get(hooked.CALLS[call].kind, What.COMMUNICATION) for call in called["call"].tolist()]
    steps.phases.calls.feed(
        called["ts_ns"].astype(np.int64),
        called["tid"].astype(np.int64),
        np.array(meant, np.uint8),
        event_kinds.payload_bytes(called).astype(np.int64),
        called["comm"],
        called["peer"],
    )
    return steps


def _write_gpu(
    writer: Writer,
    recording: Recording,
    rows: NDArray[np.void],
    origin: Origin,
    names: gpu.Names,
    transfers: Transfers,
) -> None:
    ops, rank, pid = recording.ops, recording.rank, recording.pid
    if not len(ops):
        return
    kinds = recording.kinds()
    communication = communicates(kinds)
    usage, steps = GpuUsage(), _gpu_steps(recording, transfers)
    # The recording begins before its first operation: a first step that begins between was recorded as a whole.
    begin = np.zeros(1, GPU_OP)
    begin["start_ns"] = begin["end_ns"] = recording.span[0]
    begin["kind"], begin["device"] = GpuKind.MEMSET, ops["device"][0]
    steps.feed(begin, np.zeros(1, bool), np.array([What.COPY], np.uint8))
    fed = 0
    for low in range(0, len(ops), CHUNK):
        part = slice(low, low + CHUNK)
        final = low + CHUNK >= len(ops)
        writer.append("kernel_events", gpu.kernel_events(ops[part], origin, rank, pid, names))
        usage.feed(ops[part], communication[part])
        steps.feed(ops[part], communication[part], kinds[part])
        ready = len(rows) if final else int(np.searchsorted(rows["ts_ns"], ops["start_ns"][part][-1]))
        steps.feed_steps(rows[fed:ready])
        fed = ready
        windows, done = usage.advance(final=final), steps.advance(final=final)
        if len(windows):
            writer.append("gpu_usage", gpu.gpu_usage(windows, origin, rank, pid))
        if len(done):
            writer.append("gpu_steps", gpu.gpu_steps(done, origin, rank, pid))
        if len(phases := steps.take_phases()):
            writer.append("gpu_phases", gpu.gpu_phases(phases, origin, rank, pid, GPU_PHASES, GPU_METHODS))
        if len(talked := steps.take_collectives()):
            writer.append("gpu_collectives", gpu.gpu_collectives(talked, origin, rank, pid, GPU_OPS))
        _flush(writer)
    recording.counters["gpu_operations_late"] += usage.late
    recording.counters["gpu_operations_without_step"] += steps.dropped


def _write_groups(
    writer: Writer,
    job: str,
    run: int,
    recordings: Sequence[Recording],
    communicators: NDArray[np.void],
    version: int,
) -> None:
    if len(communicators):
        writer.append(
            "communicators",
            {
                "job": job, "run": run,
                **{name: communicators[name].copy() for name in ("rank", "comm", "comm_group", "comm_rank", "nranks")},
                "seq_offset": communicators["seq_offset"].copy(), "joined_by": communicators["joined_by"].tolist(),
                "error": communicators["error"].tolist(), "version": version,
            },
        )  # fmt: skip
    mesh = mesh_of(recordings, communicators)
    if mesh:
        writer.append(
            "parallel_groups",
            {
                "job": job, "run": run, "host": recordings[0].host,
                "comm_group": np.array([group.id for group in mesh], np.uint64),
                "dimension": [group.dimension for group in mesh], "ranks": [list(group.ranks) for group in mesh],
                "nranks": np.array([group.size for group in mesh], np.int32),
                "confidence": np.array([group.confidence for group in mesh], np.float32),
                "why": [group.why for group in mesh], "version": version,
                "superseded": np.zeros(len(mesh), np.uint8),
            },
        )  # fmt: skip


def summary(recording: Recording, steps: RankSteps) -> dict[str, Any]:
    """What was read of one file and rank, for people and programs."""
    kernels = recording.ops["kind"] == GpuKind.KERNEL
    flops = achieved(recording, steps.rows)
    spent = int(flops.duration_ns.sum())
    return {
        "file": recording.path,
        "rank": recording.rank,
        "rank_source": recording.rank_source,
        "pid": recording.pid,
        "gpu_operations": len(recording.ops),
        "kernels": int(kernels.sum()),
        "nccl_kernels": int(recording.communication().sum()),
        "launches": len(recording.calls),
        "collectives": len(recording.collectives),
        "steps": len(steps.rows),
        "method": steps.method,
        "why": steps.why,
        "confidence": round(float(np.median(steps.rows["confidence"])), 3) if len(steps.rows) else 0.0,
        "step_ns": int(np.median(steps.rows["duration_ns"])) if len(steps.rows) else -1,
        "flops": float(flops.flops.sum()),
        "flops_ns": spent,
        "flops_per_s": float(flops.flops.sum()) / spent * 1e9 if spent else None,
        "zero": recording.zero,
        "counters": {name: value for name, value in (recording.losses + recording.counters).items() if value},
        "notes": recording.notes,
    }
