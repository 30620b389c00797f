"""Jobs that hang, run call by call, and the flight-recorder dumps that their ranks would leave behind.

A job is a program for each rank: collectives, transfers and waits. Its CPU makes calls in order until it waits for
the GPU; a call completes when all of its ranks have made it and none of their GPUs is held up before it.
"""

from __future__ import annotations

import json
import pickle
import random
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

T0 = 1_758_610_505_000_000_000
MS = 1_000_000
SHAPES = {"all_reduce": ([[4096]], [[4096]]), "_all_gather_base": ([[1024, 8]], [[8192, 8]]),
          "_reduce_scatter_base": ([[8192, 8]], [[1024, 8]]), "all_to_all": ([[512, 8]], [[512, 8]]),
          "broadcast": ([[1, 8192]], [[1, 8192]]), "send": ([[64, 64]], [[64, 64]]),
          "recv": ([[64, 64]], [[64, 64]])}  # fmt: skip


@dataclass(frozen=True)
class Item:
    """One thing that a rank's program does: a collective of a group, a transfer, or (``op`` "sync") a wait for its GPU.

    ``ahead``: begun ahead of time, so later calls need not wait for it until the next sync."""

    op: str
    group: str = ""
    peer: int = -1
    ahead: bool = False


@dataclass
class Job:
    """Process groups by name (description, ranks), and each rank's program."""

    groups: dict[str, tuple[str, list[int]]]
    programs: dict[int, list[Item]]


@dataclass
class Fault:
    """What is wrong with a rank from its item ``at`` on: ``cpu`` (stuck), ``dead`` (no dump), ``gpu`` (its GPU's
    completions are no longer seen; its CPU makes ``more`` calls and stops), ``other`` (another collective), ``skip``
    (leaves one out)."""

    kind: str
    rank: int
    at: int
    more: int = 4


def job(tp: int, pp: int, dp: int, *, steps: int = 6, layers: int = 3) -> Job:
    """A job of nested groups, ranks in the order tensor, data, pipeline (Megatron's)."""
    world = tp * pp * dp

    def place(rank: int) -> tuple[int, int, int]:
        return rank % tp, rank // tp % dp, rank // (tp * dp)

    groups: dict[str, tuple[str, list[int]]] = {"0": ("default_pg", list(range(world)))}
    of: dict[tuple[str, int], str] = {}
    number = 1
    for name, key, size in (
        ("TENSOR_MODEL_PARALLEL_GROUP", lambda r: place(r)[1:], tp),
        ("DATA_PARALLEL_GROUP", lambda r: (place(r)[0], place(r)[2]), dp),
        ("PIPELINE_MODEL_PARALLEL_GROUP", lambda r: place(r)[:2], pp),
    ):
        members: dict[Any, list[int]] = defaultdict(list)
        for rank in range(world):
            members[key(rank)].append(rank)
        for ranks in members.values():
            if size > 1:
                groups[str(number)] = (name, ranks)
                of.update({(name, rank): str(number) for rank in ranks})
            number += 1
    programs: dict[int, list[Item]] = {}
    for rank in range(world):
        tensor, data, pipe = (of.get((name, rank)) for name in (
            "TENSOR_MODEL_PARALLEL_GROUP", "DATA_PARALLEL_GROUP", "PIPELINE_MODEL_PARALLEL_GROUP"))  # fmt: skip
        stage = place(rank)[2]
        items: list[Item] = []
        for _ in range(steps):
            before, after = rank - tp * dp, rank + tp * dp
            if pipe and stage > 0:
                items.append(Item("recv", pipe, before))
            for _ in range(layers):
                if tensor:
                    items += [Item("_all_gather_base", tensor), Item("_reduce_scatter_base", tensor)]
            if pipe and stage < pp - 1:
                items += [Item("send", pipe, after), Item("recv", pipe, after)]
            items.append(Item("sync"))
            for _ in range(layers):
                if tensor:
                    items += [Item("_all_gather_base", tensor), Item("_reduce_scatter_base", tensor)]
            if pipe and stage > 0:
                items.append(Item("send", pipe, before))
            if data:
                items += [Item("_reduce_scatter_base", data), Item("_all_gather_base", data)]
            items += [Item("all_reduce", "0"), Item("sync")]
        programs[rank] = items
    return Job(groups, programs)


@dataclass(eq=False)
class _Call:
    rank: int
    item: Item
    record: int
    seq: int
    p2p_seq: int
    at: int
    pair: list[_Call] = field(default_factory=list)
    completed: bool = False


@dataclass
class Hang:
    """What a job's ranks had done when nothing went on any more."""

    job: Job
    calls: dict[int, list[_Call]] = field(default_factory=lambda: defaultdict(list))
    dead: set[int] = field(default_factory=set)
    reached: set[int] = field(default_factory=set)
    """Ranks that came to their fault before another one's stopped them."""


def run(job: Job, faults: list[Fault], seed: int = 0) -> Hang:
    """Runs a job until no rank can go on."""
    rng, hang = random.Random(seed), Hang(job)
    fault = {each.rank: each for each in faults}
    place = dict.fromkeys(job.programs, 0)
    counts: dict[tuple[int, str], int] = defaultdict(int)
    p2p: dict[tuple[int, str], int] = defaultdict(int)
    pairs: dict[tuple[str, int, int, int], list[_Call]] = defaultdict(list)
    numbers: dict[tuple[int, str, int, str], int] = defaultdict(int)
    calls: dict[tuple[str, int], dict[int, _Call]] = defaultdict(dict)
    clock = dict.fromkeys(job.programs, T0)
    hang.dead = {each.rank for each in faults if each.kind == "dead"}
    moved = True
    while moved:
        moved = False
        order = list(job.programs)
        rng.shuffle(order)
        for rank in order:
            items = job.programs[rank]
            while place[rank] < len(items):
                wrong, number = fault.get(rank), place[rank]
                if wrong and number >= wrong.at:
                    hang.reached.add(rank)
                if wrong and ((wrong.kind in ("cpu", "dead") and number >= wrong.at)
                              or (wrong.kind == "gpu" and number >= wrong.at + wrong.more)):  # fmt: skip
                    break
                item = items[number]
                seen_blind = wrong is not None and wrong.kind == "gpu" and number > wrong.at
                if item.op == "sync" and not seen_blind and not all(call.completed for call in hang.calls[rank]):
                    break
                place[rank] += 1
                moved = True
                if wrong and wrong.kind == "skip" and number == wrong.at:
                    continue
                if wrong and wrong.kind == "other" and number == wrong.at:
                    item = Item("broadcast", item.group)
                if item.op == "sync":
                    continue
                clock[rank] += MS + rng.randrange(MS // 10)
                if item.peer >= 0:
                    p2p[rank, item.group] += 1
                else:
                    counts[rank, item.group] += 1
                call = _Call(rank, item, len(hang.calls[rank]) + 100, counts[rank, item.group], p2p[rank, item.group],
                             clock[rank])  # fmt: skip
                hang.calls[rank].append(call)
                if item.peer >= 0:
                    low, high = (rank, item.peer) if item.op == "send" else (item.peer, rank)
                    turn = numbers[rank, item.group, item.peer, item.op] = (
                        numbers[rank, item.group, item.peer, item.op] + 1
                    )
                    call.pair = pairs[item.group, low, high, turn]
                    call.pair.append(call)
                else:
                    calls[item.group, call.seq][rank] = call
        moved |= _complete(job, hang, calls)
    # The faults of GPUs: what completed after them was not seen on their own ranks.
    for each in faults:
        if each.kind == "gpu":
            made = sum(item.op != "sync" for item in job.programs[each.rank][: each.at])
            for call in hang.calls[each.rank][made:]:
                call.completed = False
    return hang


def _complete(job: Job, hang: Hang, calls: dict[tuple[str, int], dict[int, _Call]]) -> bool:
    """Completes what can be; whether anything was."""
    any_, moved = False, True
    front = dict.fromkeys(hang.calls, 0)

    def first(rank: int) -> _Call | None:
        own = hang.calls[rank]
        while front[rank] < len(own) and own[front[rank]].completed:
            front[rank] += 1
        return own[front[rank]] if front[rank] < len(own) else None

    while moved:
        moved = False
        for rank in list(hang.calls):
            call = first(rank)
            if call is None:
                continue
            if call.item.peer >= 0:
                together, size = call.pair, 2
            else:
                together, size = list(calls[call.item.group, call.seq].values()), len(job.groups[call.item.group][1])
            same = len({each.item.op for each in together}) == 1 or call.item.peer >= 0
            if len(together) == size and same and all(first(each.rank) is each for each in together):
                for each in together:
                    each.completed = True
                moved = any_ = True
    return any_


def entries(
    hang: Hang, rank: int, version: str, *, active: bool = False, ring: int = 2000, batched: bool = False
) -> list[dict[str, Any]]:
    """The entries of a rank's dump, in the format of a version. ``batched``: transfers by ``batch_isend_irecv``: they
    stay scheduled, and an entry of the batch behind them has the state."""
    minor = int(version.split(".")[1])
    found = []
    for call in hang.calls[rank][-ring:]:
        if active and call.completed and not (batched and call.item.peer >= 0):
            continue
        item = call.item
        description, ranks = hang.job.groups[item.group]
        inputs, outputs = SHAPES[item.op]
        name = f"nccl:{item.op}"
        if item.peer >= 0:
            arrow = "->" if item.op == "send" else "<-"
            name += f" {ranks.index(rank)}{arrow}{ranks.index(item.peer)}"
        entry: dict[str, Any] = {
            "record_id": 2 * call.record if batched else call.record, "pg_id": 10 + int(item.group),
            "process_group": (item.group, description),
            "collective_seq_id": call.seq, "p2p_seq_id": call.p2p_seq if item.peer >= 0 else 0,
            "op_id": call.seq, "profiling_name": name, "time_created_ns": call.at, "input_sizes": inputs,
            "output_sizes": outputs, "state": "completed" if call.completed else "scheduled",
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": call.at + MS if call.completed else None, "retired": call.completed,
        }  # fmt: skip
        if minor >= 1:
            entry |= {"timeout_ms": 600_000, "is_p2p": item.peer >= 0}
        if minor >= 3:
            entry |= {"input_dtypes": ["BFloat16"], "output_dtypes": ["BFloat16"]}
        if minor >= 9:
            entry |= {"thread_name": "python3", "thread_id": "23456"}
        found.append(entry)
        if batched and item.peer >= 0:
            found[-1] = {**entry, "state": "scheduled", "retired": False, "time_discovered_completed_ns": None}
            whole = {**entry, "record_id": 2 * call.record + 1, "profiling_name": "nccl:coalesced", "is_p2p": True}
            found += [] if active and call.completed else [whole]
    return found


def dump(
    hang: Hang, rank: int, version: str = "2.9", *, active: bool = False, ring: int = 2000, batched: bool = False
) -> dict[str, Any]:
    """What a rank dumps."""
    minor = int(version.split(".")[1])
    found: dict[str, Any] = {
        "version": version,
        "entries": entries(hang, rank, version, active=active, ring=ring, batched=batched),
    }
    own = {name: group for name, group in hang.job.groups.items() if rank in group[1]}
    if minor >= 2:
        found["pg_config"] = {
            name: {"name": name, "desc": description, "ranks": str(ranks)} for name, (description, ranks) in own.items()
        }
    if minor >= 3:
        status: dict[str, dict[str, int]] = {}
        for name in own:
            calls = [call for call in hang.calls[rank] if call.item.group == name]
            last = [(call.p2p_seq if call.item.peer >= 0 else call.seq) for call in calls]
            done = [number for call, number in zip(calls, last, strict=True) if call.completed]
            status[str(10 + int(name))] = {
                "last_enqueued_collective": last[-1] if last else -1, "last_started_collective": -1,
                "last_completed_collective": done[-1] if done else -1,
            }  # fmt: skip
        found["pg_status"] = status
    found["nccl_version" if minor < 10 else "comm_lib_version"] = "2.27.3"
    return found


def write(
    folder: Path, hang: Hang, version: str = "2.9", *, active: bool = False, as_json: bool = False, ring: int = 2000,
    absent: tuple[int, ...] = (), batched: bool = False,
) -> Path:  # fmt: skip
    """Writes the dumps of all ranks that live."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in hang.job.programs:
        if rank in hang.dead or rank in absent:
            continue
        found = dump(hang, rank, version, active=active, ring=ring, batched=batched)
        path = folder / f"nccl_trace_rank_{rank}"
        if as_json:
            for status in found.get("pg_status", {}).values():
                status.update({key: str(value) for key, value in status.items()})
            path.write_text(json.dumps(found))
        else:
            path.write_bytes(pickle.dumps(found, protocol=2))
    return folder
