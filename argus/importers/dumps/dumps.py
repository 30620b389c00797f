"""Dumps of flight recorders, on their way into the store: the tables ``dumps``, ``dumped_groups`` and
``dumped_calls``, and
the same calls in ``collectives``, ``communicators`` and ``parallel_groups``, as a trace has them."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.importers.dumps import flight_recorder
from argus.importers.dumps.flight_recorder import Dump, Group
from argus.importers.rows import ImportReport, store_run
from argus.model.errors import EXIT_USAGE, ArgusError
from argus.store.open import Store

SOURCE = "flight-recorder"
SPAN_NS = 30 * 86400 * 10**9
"""Calls further than this from the median of all are of a wrong clock: they are left out of ``collectives``, which
lies on disk by day."""
BATCH = 50_000
"""Calls that are sent to the store at once."""
_DIMENSIONS = (
    ("tp", ("TENSOR_MODEL_PARALLEL", "TENSOR_PARALLEL", "MESH_TP")), ("pp", ("PIPELINE", "MESH_PP")),
    ("cp", ("CONTEXT_PARALLEL", "MESH_CP")), ("ep", ("EXPERT_MODEL_PARALLEL", "EXPERT_PARALLEL", "MESH_EP")),
    ("fsdp", ("FSDP", "DP_SHARD")), ("dp", ("DATA_PARALLEL", "MESH_DP", "DP_REPLICATE")), ("world", ("DEFAULT_PG",)),
)  # fmt: skip
"""What a process group is for, by what Megatron, TorchTitan and PyTorch's device meshes call it; the first that
fits."""


def dimension(description: str) -> str:
    """The dimension that a process group's description names; ``unknown``: none, or several at once."""
    text = description.upper()
    if "_AND_" in text or "MODEL_PIPELINE" in text:
        return "unknown"
    return next((name for name, words in _DIMENSIONS if any(word in text for word in words)), "unknown")


def write(store: Store, job: str, dumps: Sequence[Dump], counters: Tally[str]) -> tuple[int, ImportReport]:
    """Stores the dumps of a job as a new run.

    Args:
        dumps: One a rank, ranks differ.
        counters: As :func:`argus.importers.dumps.flight_recorder.read_all` returns them.

    Returns:
        Number of the run; what is known of the whole.

    Raises:
        ArgusError: They list too many ranks; the store cannot be had or refuses rows.
    """
    spans = [dump.span for dump in dumps if any(dump.span)]
    ranks = flight_recorder.all_ranks(dumps)
    if len(ranks) > flight_recorder.MAX_RANKS:
        raise ArgusError(
            f"the dumps list {len(ranks):,} ranks, over {flight_recorder.MAX_RANKS:,}",
            "Are they of one job?",
            EXIT_USAGE,
        )
    now = time.time_ns()
    report = ImportReport(
        ranks=[dump.rank for dump in dumps],
        begin_ns=min((begin for begin, _ in spans), default=now),
        end_ns=max((end for _, end in spans), default=now),
        world_size=len(ranks),
        counters=Tally(counters),
    )
    if len(ranks) > len(dumps):
        report.counters["ranks_without_dump"] = len(ranks) - len(dumps)
    run = store_run(store, job, SOURCE, report, _tables(dumps, report), dumps[0].path)
    return run, report


def _tables(dumps: Sequence[Dump], report: ImportReport) -> Iterator[tuple[str, Mapping[str, Any]]]:
    version = time.time_ns()
    groups = flight_recorder.members(dumps)
    yield "dumps", _of_ranks(dumps, version)
    yield from _of_groups(dumps, groups, version)
    created = [at for dump in dumps for at in dump.calls.get("ts", []) if at > 0]
    middle = int(np.median(created)) if created else 0
    waiting: dict[str, list[Mapping[str, Any]]] = {"dumped_calls": [], "collectives": []}
    for place, dump in enumerate(dumps):
        if dump.calls:
            waiting["dumped_calls"].append(_calls(dump, groups))
            waiting["collectives"].append(_collectives(dump, middle, report))
        if place + 1 == len(dumps) or sum(len(part["rank"]) for part in waiting["dumped_calls"]) >= BATCH:
            for table, parts in waiting.items():
                rows = _joined(parts)
                parts.clear()
                if rows and len(rows["rank"]):
                    yield table, rows


def _joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several batches as one; columns of a single value stay so."""
    columns: dict[str, Any] = {}
    for name, first in parts[0].items() if parts else ():
        if isinstance(first, np.ndarray):
            columns[name] = np.concatenate([part[name] for part in parts])
        elif isinstance(first, list):
            columns[name] = [value for part in parts for value in part[name]]
        else:
            columns[name] = first
    return columns


def _global(group: Group, place: int) -> int:
    return group.ranks[place] if 0 <= place < len(group.ranks) else -1


def _of_ranks(dumps: Sequence[Dump], version: int) -> dict[str, Any]:
    absent = sorted(set(flight_recorder.all_ranks(dumps)) - {dump.rank for dump in dumps})
    none = [""] * len(absent)
    return {
        "rank": np.array([dump.rank for dump in dumps] + absent, np.uint32), "source": SOURCE,
        "path": [dump.path for dump in dumps] + none, "format": [dump.version for dump in dumps] + none,
        "library": [dump.library for dump in dumps] + none,
        "state": ["dumped"] * len(dumps) + ["absent"] * len(absent),
        "written": np.array([max(dump.written_ns, 0) for dump in dumps] + [0] * len(absent), np.int64),
        "calls": np.array([len(dump.calls.get("seq", [])) for dump in dumps] + [0] * len(absent), np.uint32),
        "version": version,
    }  # fmt: skip


def _of_groups(
    dumps: Sequence[Dump], groups: Mapping[int, Group], version: int
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    rows: list[tuple[Any, ...]] = []
    places: list[tuple[int, int, int, int]] = []
    for dump in dumps:
        transfers = {
            comm
            for comm, p2p, number in zip(
                *(dump.calls.get(name, []) for name in ("comm", "p2p", "p2p_seq")), strict=True
            )
            if p2p or number > 0
        }
        for group in dump.groups.values():
            status = dump.status.get(group.id)
            progress = (status.enqueued, status.started, status.completed) if status else (-1, -1, -1)
            rows.append((dump.rank, group.id, group.name, group.description, *progress, group.id in transfers))
            place = group.ranks.index(dump.rank) if dump.rank in group.ranks else -1
            places.append((dump.rank, group.id, place, len(group.ranks) or -1))
    if not rows:
        return
    names = ("rank", "comm_group", "name", "description", "enqueued", "started", "completed", "transfers")
    types = {"rank": np.uint32, "comm_group": np.uint64, "enqueued": np.int64, "started": np.int64,
             "completed": np.int64, "transfers": np.bool_}  # fmt: skip
    columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    yield (
        "dumped_groups",
        {
            **{name: np.array(column, types[name]) if name in types else column for name, column in columns.items()},
            "version": version,
        },
    )
    yield "communicators", _communicators(places, version)
    with_ranks = [group for group in groups.values() if group.ranks]
    if with_ranks:
        yield "parallel_groups", {
            "comm_group": np.array([group.id for group in with_ranks], np.uint64),
            "dimension": [dimension(group.description) for group in with_ranks],
            "ranks": [list(group.ranks) for group in with_ranks],
            "nranks": np.array([len(group.ranks) for group in with_ranks], np.int32),
            "confidence": np.ones(len(with_ranks), np.float32),
            "why": [f"named {group.description or group.name}" for group in with_ranks],
            "version": version, "superseded": np.zeros(len(with_ranks), np.uint8),
        }  # fmt: skip


def _communicators(places: Sequence[tuple[int, int, int, int]], version: int) -> dict[str, Any]:
    rank, group, place, size = zip(*places, strict=True)
    return {
        "rank": np.array(rank, np.uint32), "comm": np.array(group, np.uint64),
        "comm_group": np.array(group, np.uint64), "comm_rank": np.array(place, np.int32),
        "nranks": np.array(size, np.int32), "seq_offset": np.zeros(len(rank), np.int64), "joined_by": "name",
        "error": "", "version": version,
    }  # fmt: skip


def _calls(dump: Dump, groups: Mapping[int, Group]) -> dict[str, Any]:
    calls = dump.calls
    peers = [
        _global(groups[comm], peer) if p2p else -1
        for comm, peer, p2p in zip(calls["comm"], calls["peer"], calls["p2p"], strict=True)
    ]
    whole = {name: np.array(calls[name], np.int64) for name in ("record", "seq", "p2p_seq", "timeout_ms")}
    return {
        "rank": np.full(len(peers), dump.rank, np.uint32), "comm_group": np.array(calls["comm"], np.uint64),
        **whole, "name": calls["name"], "op": calls["op"], "p2p": np.array(calls["p2p"], np.bool_),
        "peer": np.array(peers, np.int32), "state": calls["state"], "retired": np.array(calls["retired"], np.bool_),
        "ts": np.maximum(np.array(calls["ts"], np.int64), 0),
        "started_ns": np.array(calls["started_ns"], np.int64),
        "completed_ns": np.array(calls["completed_ns"], np.int64), "count": np.array(calls["count"], np.uint64),
        "dtype": calls["dtype"], "inputs": calls["inputs"], "outputs": calls["outputs"], "frames": calls["frames"],
    }  # fmt: skip


def _collectives(dump: Dump, middle: int, report: ImportReport) -> dict[str, Any]:
    """The calls as a trace has them. Sends and receives have numbers of their own."""
    calls = dump.calls
    ts = np.array(calls["ts"], np.int64)
    p2p = np.array(calls["p2p"], np.bool_)
    seq = np.where(p2p, np.array(calls["p2p_seq"], np.int64), np.array(calls["seq"], np.int64))
    kept = (np.abs(ts - middle) <= SPAN_NS) & (ts > 0) & (seq >= 0)
    if not kept.all():
        report.counters["calls_of_a_wrong_time"] += int(len(kept) - kept.sum())
    chosen = np.flatnonzero(kept).tolist()

    def of(name: str, kind: Any) -> NDArray[Any]:
        return np.array(calls[name], kind)[kept]

    return {
        "rank": np.full(len(chosen), dump.rank, np.uint32), "pid": 0, "tid": 0, "comm": of("comm", np.uint64),
        "op": [calls["op"][place] for place in chosen], "seq": seq[kept].astype(np.uint64),
        "bytes": of("bytes", np.uint64), "count": of("count", np.uint64),
        "dtype": [calls["dtype"][place] for place in chosen], "redop": "", "peer": of("peer", np.int32), "stream": 0,
        "ts": ts[kept], "duration_ns": np.full(len(chosen), -1, np.int64), "result": 0,
        "in_group": np.zeros(len(chosen), np.bool_),
    }  # fmt: skip
