"""The communicators of recordings, and what they are for."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from argus.importers.recordings.clocks import lane_of, line_up
from argus.importers.recordings.collectives import POINT_TO_POINT, places_by_comm
from argus.importers.recordings.members import infer_members
from argus.importers.recordings.recording import UNKNOWN_TYPE, Int, Recording
from argus.model import calls as hooked
from argus.model import event_kinds
from argus.model.groups import Membership
from argus.semantics.groups.communicators import COMMUNICATOR, RankCalls, find_groups, named_group
from argus.semantics.groups.mesh import Group, Traffic, find_mesh

ALIGN_WITHIN = 1024
"""Calls that two ranks' recordings of one communicator may begin apart."""


def find_communicators(recordings: Sequence[Recording]) -> NDArray[np.void]:
    """Which communicators are one on several ranks, and how their calls line up: ``groups.COMMUNICATOR`` rows."""
    known = []
    offsets, inferred = _line_up(recordings), infer_members(recordings)
    for each in recordings:
        rows = each.collectives.copy()
        together = ~np.isin(rows["call"], POINT_TO_POINT)
        named: dict[int, Membership] = {}
        turns: Tally[tuple[str, int]] = Tally()
        rows["stream"] = 0
        _distinguish_by_count(each, rows, together)
        calls_of, none = places_by_comm(rows), np.empty(0, np.int64)
        for comm, (name, members, size) in each.groups.items():
            offset = offsets.get((each.rank, comm))
            if offset is None or (members and each.rank not in members):
                continue
            of_comm = calls_of.get(comm, none)
            rows["stream"][of_comm] = rows["seq"][of_comm] + offset + 1
            ranks = ",".join(map(str, members))
            place = Membership(f"{name}/{ranks}", members.index(each.rank) if members else -1, size)
            named[comm] = replace(place, turn=turns[place.name, size])
            turns[place.name, size] += 1
        for comm, calls in calls_of.items():
            if comm not in each.groups and (member := inferred.get((each.rank, comm))) is not None:
                rows["stream"][calls] = rows["seq"][calls] + member.offset + 1
                named[comm] = member.membership
        if inferred_here := sum(comm not in each.groups for comm in named):
            each.counters["communicators_inferred"] = inferred_here
        ended = each.gpu_end >= 0
        ts = rows["ts_ns"].astype(np.int64)
        chosen = ended & together
        known.append(
            RankCalls(
                rank=each.rank,
                collectives=np.ascontiguousarray(rows[together]),
                # A collective ends on the GPU, and all its ranks end together: better than a wait on the CPU.
                sync_ts=ts[chosen],
                sync_duration=np.maximum(each.gpu_end - ts, 0)[chosen],
                clock_ns=each.clock_ns,
                named=named,
            )
        )
    if not known:
        return np.empty(0, COMMUNICATOR)
    found = find_groups(known)
    return np.sort(np.concatenate([found, _of_transfers_alone(recordings, found)]), order=("rank", "comm"))


def _of_transfers_alone(recordings: Sequence[Recording], found: NDArray[np.void]) -> NDArray[np.void]:
    """Groups whose ranks are named and that only send and receive, such as those of a pipeline: rows of
    :data:`COMMUNICATOR`. Their calls need not be lined up."""
    others = set(found["comm"].tolist())
    for each in recordings:
        others.update(each.collectives["comm"][~np.isin(each.collectives["call"], POINT_TO_POINT)].tolist())
    rows = []
    for each in recordings:
        alone = set(each.collectives["comm"].tolist()) - others
        for comm, (name, members, size) in each.groups.items():
            if comm not in alone or each.rank not in members:
                continue
            place = Membership(f"{name}/{','.join(map(str, members))}", members.index(each.rank), size)
            nranks = size if size > 0 else len(members)
            rows.append((each.rank, comm, named_group(place), place.rank, nranks, 0, "name", ""))
    return np.array(rows, COMMUNICATOR)


def _distinguish_by_count(each: Recording, rows: NDArray[np.void], together: NDArray[np.bool_]) -> None:
    """Where sizes are not known, the number of calls in a step distinguishes communicators of one rank: puts that in
    the place of the size. ``rows``: a copy of the recording's collectives."""
    if not len(each.marks):
        return
    ts = rows["ts_ns"].astype(np.int64)
    for comm in np.unique(rows["comm"][together & (rows["dtype"] == UNKNOWN_TYPE)]).tolist():
        of_comm = together & (rows["comm"] == comm)
        first, last = (np.searchsorted(ts[of_comm], each.marks[name]) for name in ("begin_ns", "end_ns"))
        rows["count"][of_comm & (rows["dtype"] == UNKNOWN_TYPE)] = int(np.median(last - first))


def _line_up(recordings: Sequence[Recording]) -> dict[tuple[int, int], int]:
    """What makes each rank's call numbers in a named group those of the group, by (rank, handle): by its own numbers,
    by the steps that the recordings number, else by calls that are equal and end together. Those that are not clear are
    missing."""
    out: dict[tuple[int, int], int] = {}
    calls_of = [places_by_comm(each.collectives) for each in recordings]
    for comm in sorted({comm for each in recordings for comm in each.groups}):
        members = [(each, calls[comm]) for each, calls in zip(recordings, calls_of, strict=True) if comm in calls]
        if all((each.numbers[places] >= 0).all()
               and len(np.unique(each.numbers[places] - each.collectives["seq"][places].astype(np.int64))) == 1
               for each, places in members):  # fmt: skip
            for each, places in members:
                out[each.rank, comm] = int(each.numbers[places[0]]) - int(each.collectives["seq"][places[0]])
            continue
        first, places = members[0]
        offsets: dict[int, int] = {first.rank: 0}
        lane, rows = lane_of(first, places), first.collectives[places]
        end = _ends(first, places)
        for each, places in members[1:]:
            own = lane_of(each, places)
            offset = line_up(lane, own) if lane.begun.keys() & own.begun.keys() else None
            if offset is None:
                offset = _offset(_codes(rows), end, _codes(each.collectives[places]), _ends(each, places))
            if offset is not None:
                offsets[each.rank] = offset
        lowest = min(offsets.values())
        out |= {(rank, comm): offset - lowest for rank, offset in offsets.items()}
    return out


def _ends(each: Recording, places: Int) -> Int:
    """When calls ended, on the clock that all are compared on, ns; -1: not known."""
    return np.where(each.gpu_end[places] >= 0, each.gpu_end[places] + each.clock_ns, -1)


def _codes(rows: NDArray[np.void]) -> Int:
    return rows["call"].astype(np.int64) << 56 | rows["dtype"].astype(np.int64) << 48 | rows["count"].astype(np.int64)


def _offset(code: Int, end: Int, other_code: Int, other_end: Int) -> int | None:
    """Added to the places of the other rank's calls, it gives those of the same calls; None: not clear."""
    costs: list[tuple[float, int]] = []
    least = max(min(len(code), len(other_code)) // 2, 1)
    for offset in range(-min(len(other_code), ALIGN_WITHIN), min(len(code), ALIGN_WITHIN) + 1):
        low, high = max(offset, 0), min(offset + len(other_code), len(code))
        if high - low < least:
            continue
        own, other = slice(low, high), slice(low - offset, high - offset)
        if np.mean(code[own] == other_code[other]) < 0.98:
            continue
        both = (end[own] >= 0) & (other_end[other] >= 0)
        if both.any():
            costs.append((float(np.median(np.abs(end[own] - other_end[other])[both])), offset))
    costs.sort()
    if not costs or (len(costs) > 1 and costs[0][0] > 0.5 * costs[1][0]):
        return None
    return costs[0][1]


def mesh_of(recordings: Sequence[Recording], communicators: NDArray[np.void]) -> list[Group]:
    """What the communicators are for."""
    traffic: dict[tuple[int, int], Traffic] = {}
    for each in recordings:
        # The dimension of a communicator is inferred from sizes: where they are not known, it has none.
        rows = each.collectives[each.collectives["dtype"] != UNKNOWN_TYPE]
        sizes = event_kinds.payload_bytes(rows)
        unique: Tally[tuple[int, int, int, int]] = Tally(
            zip(rows["comm"].tolist(), rows["call"].tolist(), sizes.tolist(), rows["peer"].tolist(), strict=True)
        )
        for (comm, call, size, peer), count in unique.items():
            traffic.setdefault((each.rank, comm), Traffic()).add(hooked.CALLS[call].kind, size, peer, count)
    world = max((each.world_size for each in recordings), default=0)
    has_traffic = np.array([(rank, comm) in traffic for rank, comm in communicators[["rank", "comm"]].tolist()], bool)
    return find_mesh(communicators[has_traffic], traffic, world=world, command="")
