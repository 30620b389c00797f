"""The collectives of a recording: from the ranges on the CPU, and from NCCL's kernels."""

from __future__ import annotations

import hashlib
import re
from collections import Counter as Tally
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from argus.importers.recordings.recording import UNKNOWN_TYPE, CpuRange, Int, Recording
from argus.model import calls as hooked
from argus.model import records
from argus.model.errors import EXIT_USAGE, ArgusError
from argus.model.records import COLLECTIVE

_OPS = {
    "allreduce": "AllReduce", "allreducesparse": "AllReduce", "allreducecoalesced": "AllReduce",
    "allgather": "AllGather", "allgatherbase": "AllGather", "allgatherintotensor": "AllGather",
    "allgatherintotensorcoalesced": "AllGather", "allgathercoalesced": "AllGather", "allgathertotensor": "AllGather",
    "reducescatter": "ReduceScatter", "reducescatterbase": "ReduceScatter", "reducescattertensor": "ReduceScatter",
    "reducescattertensorcoalesced": "ReduceScatter", "broadcast": "Broadcast", "bcast": "Broadcast",
    "broadcastoop": "Broadcast", "reduce": "Reduce", "reduceoop": "Reduce", "alltoall": "AlltoAll",
    "alltoallbase": "AlltoAll", "alltoallv": "AlltoAll", "gather": "Gather", "scatter": "Scatter",
    "barrier": "Barrier", "send": "Send", "recv": "Recv",
}  # fmt: skip
_CALL_OF = {op: hooked.BY_SYMBOL[hooked.symbol_of(op)].id for op in dict.fromkeys(_OPS.values())}
POINT_TO_POINT = [_CALL_OF["Send"], _CALL_OF["Recv"]]
MOST_GROUPS = 4_096
"""Process groups of a rank, and streams where groups have no names. Ranks of large jobs are in some dozens."""
_KERNEL_OP = re.compile(r"nccl(?:Dev)?Kernel_([A-Za-z]+?)(?:_|\(|$)")


def places_by_comm(collectives: NDArray[np.void]) -> dict[int, Int]:
    """Where the calls of each communicator are, point-to-point ones left out, by handle."""
    places = np.flatnonzero(~np.isin(collectives["call"], POINT_TO_POINT))
    comm = collectives["comm"][places]
    order = np.argsort(comm, kind="stable")
    handles, first = np.unique(comm[order], return_index=True)
    parts = np.split(places[order], first[1:])
    return dict(zip(handles.tolist(), parts, strict=False))


def operation_name(text: str) -> str:
    """The collective that PyTorch, NCCL or a kernel of NCCL calls so; empty: none."""
    kernel = _KERNEL_OP.search(text)
    name = kernel[1] if kernel else text.split(",")[0].removeprefix("nccl:").removeprefix("c10d::")
    name = re.sub(r"[^a-z]", "", name.split(" ")[0].lower().removeprefix("nccl"))
    return _OPS.get(name, "")


def take_collectives(recording: Recording, ranges: Sequence[CpuRange], detail: dict[int, CpuRange]) -> None:
    """Makes collectives of CPU ranges and of NCCL's kernels. A kernel launched in a range is that call.

    Args:
        recording: With calls and operations connected.
        ranges: Ranges on the CPU; of nested ones, the outer one.
        detail: By place in ``recording.ops``: what a kernel itself describes. Its times are not used.
    """
    ranges = sorted(ranges, key=lambda each: (each.tid, each.begin_ns))
    ops = recording.ops
    kernels = np.flatnonzero(recording.communication())
    begins = np.array([each.begin_ns for each in ranges], np.int64)
    tids = np.array([each.tid for each in ranges], np.int64)
    of_range: dict[int, list[int]] = {}
    alone: list[int] = []
    first = {tid: int(np.searchsorted(tids, tid)) for tid in set(tids.tolist())}
    last = {tid: int(np.searchsorted(tids, tid, side="right")) for tid in first}
    for place in kernels.tolist():
        launched, tid = int(ops["launch_ns"][place]), int(ops["launch_tid"][place])
        low = first.get(tid, 0)
        near = low + int(np.searchsorted(begins[low : last.get(tid, 0)], launched, side="right")) - 1
        if launched and tid in first and near >= low and launched <= ranges[near].end_ns:
            of_range.setdefault(near, []).append(place)
        else:
            alone.append(place)
    calls: list[tuple[int, int, int, int, str, CpuRange | None, int]] = []
    for number, each in enumerate(ranges):
        places = of_range.get(number, [])
        described = next((detail[place] for place in places if place in detail), None)
        op = each.op or (described.op if described else "") or _kernel_operation(recording, places)
        if not op:
            continue  # a wait
        chosen = each if each.count or each.group[0] or described is None else described
        end = max((int(ops["end_ns"][place]) for place in places), default=-1)
        stream = int(ops["stream"][places[0]]) if places else -1
        calls.append((each.begin_ns, each.end_ns - each.begin_ns, each.tid, end, op, chosen, stream))
    for place in alone:
        described = detail.get(place)
        op = (described.op if described else "") or _kernel_operation(recording, [place])
        if not op:
            recording.counters["collectives_not_understood"] += 1
            continue
        launched = int(ops["launch_ns"][place])
        inside = int(ops["launch_end_ns"][place]) - launched if launched else records.NOT_MEASURED
        begin = launched or int(ops["start_ns"][place])
        end, stream, tid = int(ops["end_ns"][place]), int(ops["stream"][place]), int(ops["launch_tid"][place])
        calls.append((begin, inside, tid, end, op, described, stream))
    calls.sort(key=lambda row: row[0])
    _fill_collectives(recording, calls)


def _kernel_operation(recording: Recording, places: list[int]) -> str:
    for place in places:
        symbol = recording.symbols[recording.ops["name"][place]]
        if op := operation_name(symbol):
            return op
        if "SendRecv" in symbol:
            # NCCL has one kernel for Send, Recv and all-to-all, which is made of them.
            recording.counters["collectives_send_or_receive"] += 1
            return "Send"
    return ""


def _fill_collectives(recording: Recording, calls: list[tuple[int, int, int, int, str, CpuRange | None, int]]) -> None:
    out = np.zeros(len(calls), COLLECTIVE)
    recording.gpu_end = np.full(len(calls), -1, np.int64)
    recording.numbers = np.full(len(calls), -1, np.int64)
    counted: Tally[tuple[int, bool]] = Tally()
    handles: set[int] = set()
    # A call whose kernel was not recorded is of the stream that most such calls have, or of most calls'.
    of_op: dict[str, Tally[int]] = {op: Tally() for _, _, _, _, op, _, _ in calls}
    for _, _, _, _, op, _, stream in calls:
        of_op[op][stream] += stream >= 0
    every = sum(of_op.values(), Tally()) or Tally([-1])
    streams = {op: max((each if +each else every).most_common(1)[0][0], -1) for op, each in of_op.items()}
    for place, (begin, inside, tid, end, op, described, stream) in enumerate(calls):
        row = out[place]
        row["ts_ns"], row["duration_ns"], row["tid"], row["pid"] = begin, inside, tid, recording.pid
        row["call"], row["redop"], row["peer"] = _CALL_OF[op], 255, -1
        row["dtype"] = UNKNOWN_TYPE
        recording.gpu_end[place] = end
        name, ranks, size = "", "", -1
        if described is not None:
            row["count"], row["dtype"], row["peer"] = described.count, described.dtype, described.peer
            recording.numbers[place] = described.number
            (name, ranks), size = described.group, described.size
        if op == "Barrier":
            row["count"] = 0
        elif row["dtype"] == UNKNOWN_TYPE:
            recording.counters["collectives_without_size"] += 1
        # Without a name: PyTorch gives each process group a stream of its own, which distinguishes them.
        handle = _handle(name, ranks) if name or ranks else 1 + (stream if stream >= 0 else streams[op])
        if name or ranks:
            members = _numbers(ranks) if "..." not in ranks else ()
            recording.groups[handle] = (name, members, size)
            if op in ("Send", "Recv") and ranks and row["peer"] >= 0:
                row["peer"] = _rank_in_group(int(row["peer"]), ranks, size)
                recording.counters["transfers_of_unknown_peers"] += int(row["peer"] < 0)
        row["comm"] = handle
        key = handle, op in ("Send", "Recv")
        handles.add(handle)
        if len(handles) > MOST_GROUPS:
            what = f"{recording.path} has calls of more than {MOST_GROUPS:,} process groups or streams"
            raise ArgusError(what, "Import a shorter recording", EXIT_USAGE)
        row["seq"] = counted[key]
        counted[key] += 1
    recording.collectives = out


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in re.findall(r"\d{1,9}", text))


def _rank_in_group(rank: int, ranks: str, size: int) -> int:
    """The place of a global rank in a group's list of ranks; -1: not known. PyTorch writes peers as global ranks, and
    of more than 30 ranks the first and the last one: those from 0 on without a gap are their own places."""
    first, _, last = ranks.partition("...")
    listed, end = _numbers(first), _numbers(last)
    if rank in listed:
        return listed.index(rank)
    if listed == tuple(range(len(listed))) and end == (size - 1,) and rank < size:
        return rank
    return size - 1 if end == (rank,) and size > 0 else -1


def _handle(name: str, ranks: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{name}/{ranks}".encode(), digest_size=7).digest(), "little")
