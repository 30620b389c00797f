"""The verdict on a job of which dumps were imported: whether it hung when they were made, and who held up whom
(:mod:`argus.diagnose.wavefront`)."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose import sql, wavefront
from argus.diagnose.verdict import Collective, Evidence, Finding, Verdict, named
from argus.diagnose.wavefront import Call, Group, Snapshot, Wait, Wavefront
from argus.semantics.stacks import rank_text

SURE, UNRECORDED, UNSURE = 0.9, 0.8, 0.5
"""Confidence where a rank at fault was dumped, where it is named for having no dump, and where it is one of several."""
LEAST_NS = 5_000_000_000
"""Dumps that were written less than this after the newest call are of a moment in which ranks may just have worked."""
LONGEST_NS = 14 * 86400 * 10**9
"""The time of a file that is later than this was set when it was copied."""
SHOWN = 4
"""So many waits are shown as evidence."""
WRAPPERS = ("c10d_logger.py", "distributed_c10d.py", "_functional_collectives.py", "_ops.py", "comm_hooks")
"""Files of PyTorch through which every collective is called: the frame below them is the caller's."""


def judge(query: sql.Query, params: Mapping[str, Any], verdict: Verdict) -> bool:
    """Completes the verdict on a job of which dumps were imported; False: there are none of it."""
    dumps = query(sql.DUMPS, params)
    if not len(dumps["rank"]):
        return False
    recorded = dumps["state"] == "dumped"
    verdict["ranks"] = len(dumps["rank"])
    calls = query(sql.DUMPED_PENDING, params)
    snapshot = read(query, params, dumps, calls)
    found = wavefront.find(snapshot)
    if doubt := _doubt(found, snapshot, dumps, calls):
        verdict["reason"] = doubt
        return True
    verdict["status"] = "hung"
    verdict["findings"].append(_finding(query, params, found, snapshot, dumps))
    if not recorded.all():
        absent = dumps["rank"][~recorded].astype(np.int64).tolist()
        verdict["reason"] = f"there is no dump of {named(absent)}"
    return True


def read(
    query: sql.Query, params: Mapping[str, Any], dumps: Mapping[str, NDArray[Any]], calls: Mapping[str, NDArray[Any]]
) -> Snapshot:
    """How far all ranks had come, from rows of ``dumps``, ``dumped_groups`` and ``dumped_calls``."""
    seen = Snapshot()
    states = zip(dumps["rank"].astype(np.int64).tolist(), dumps["state"].tolist(), strict=True)
    for rank, state in states:
        (seen.ranks if state == "dumped" else seen.absent).add(rank)
    for group, name, description, ranks in _rows(query(sql.DUMPED_GROUPS, params), "comm_group", "name", "description",
                                                 "ranks"):  # fmt: skip
        label = description if description not in ("", "undefined") else f"process group {name}"
        seen.groups[group] = Group(group, label, tuple(int(rank) for rank in ranks))
    seen.pending = _calls(calls)
    pending = {(call.group, call.seq) for call in seen.pending if call.peer < 0}
    seen.same = [call for call in _calls(query(sql.DUMPED_SAME, params)) if (call.group, call.seq) in pending]
    least: dict[tuple[int, int], int] = {}
    for call in seen.pending:
        if call.peer < 0:
            key = call.rank, call.group
            least[key] = min(call.seq, least.get(key, call.seq))
    progress = _rows(query(sql.DUMPED_PROGRESS, params), "rank", "comm_group", "issued", "enqueued", "completed",
                     "transfers", "collectives")  # fmt: skip
    # Where sends and receives are counted as well, the process group's own numbers are of either, on some ranks or all.
    mixed = {group for _, group, _, _, _, transfers, _ in progress if transfers}
    clear = {group for _, group, *_, collectives in progress if collectives} - mixed
    for rank, group, issued, enqueued, completed, _, _ in progress:
        known = max(issued, enqueued) if group in clear else issued
        if known >= 0:
            seen.issued[rank, group] = known
        done = least[rank, group] - 1 if (rank, group) in least else known
        if done >= 0:
            seen.done[rank, group] = max(done, min(completed, known) if group in clear else -1)
    _order(query, params, seen)
    return seen


def _order(query: sql.Query, params: Mapping[str, Any], seen: Snapshot) -> None:
    """What each rank's GPU went past, and when its CPU made its last call."""
    records: dict[int, list[int]] = defaultdict(list)
    for call in seen.pending:
        if call.record >= 0:
            records[call.rank].append(call.record)
    for rank, completed, last_ns in _rows(query(sql.DUMPED_LAST, params), "rank", "completed", "last_ns"):
        seen.last_ns[rank] = last_ns
        mine = sorted(records.get(rank, ()))
        # A dump may leave out what completed: then the numbers in between are missing.
        gaps = [high - 1 for low, high in itertools.pairwise(mine) if high - low > 1]
        seen.went_past[rank] = max([completed, *gaps[-1:]])


def _rows(columns: Mapping[str, NDArray[Any]], *names: str) -> list[tuple[Any, ...]]:
    return list(zip(*(columns[name].tolist() for name in names), strict=True))


def _calls(columns: Mapping[str, NDArray[Any]]) -> list[Call]:
    names = (
        "rank",
        "comm_group",
        "record",
        "seq",
        "op",
        "peer",
        "p2p",
        "state",
        "retired",
        "dtype",
        "inputs",
        "outputs",
    )
    return [
        Call(rank, group, record, seq, op, peer, state == "started", bool(retired), dtype, (inputs, outputs))
        for rank, group, record, seq, op, peer, p2p, state, retired, dtype, inputs, outputs in _rows(columns, *names)
        if peer >= 0 or not p2p
    ]


def _doubt(
    found: Wavefront, seen: Snapshot, dumps: Mapping[str, NDArray[Any]], calls: Mapping[str, NDArray[Any]]
) -> str:
    """Why the dumps are not of a hang; empty: they are."""
    many = f"{len(seen.ranks)} rank{'s' * (len(seen.ranks) != 1)}"
    if not found.waits and not found.at_fault:
        if found.stale:
            return _stale_text(found)
        return f"no collective was pending when {many} were dumped: none of them waited for another"
    if len(found.stale) * 2 >= len(seen.ranks):
        return _stale_text(found)
    written = dumps["written_ns"][dumps["state"] == "dumped"].astype(np.int64)
    newest = max(seen.last_ns.values(), default=0)
    age_ns = int(written.min()) - newest if len(written) and newest > 0 else -1
    if found.timed_out:
        return ""
    if 0 <= age_ns < LEAST_NS:
        oldest = int(calls["created_ns"].min())
        return (
            f"the newest call had been made {age_ns / 1e9:.1f} s before, and the oldest of those that were pending "
            f"{(age_ns + newest - oldest) / 1e9:.1f} s: that is no hang yet. Look at the ranks once more"
        )
    named_any = found.at_fault or found.circle or not found.stuck
    if not named_any and not LEAST_NS <= age_ns <= LONGEST_NS:
        waits = found.stuck or found.waits
        return (
            f"{_wait_text(waits[0], seen)}: all of them made the call, nobody is missing. The files do not say for how "
            "long it had been pending (their times are not those of the dump): if the job hung, look at the network "
            "and at these ranks' GPUs"
        )
    return ""


def _stale_text(found: Wavefront) -> str:
    return (
        f"the dumps are not of one moment: others completed collectives that {named(found.stale)} had not made when "
        "dumped, so the job was making progress. Dump all ranks again"
    )


def _finding(
    query: sql.Query, params: Mapping[str, Any], found: Wavefront, seen: Snapshot, dumps: Mapping[str, NDArray[Any]]
) -> Finding:
    blamed = _blamed(found, seen)
    evidence: list[Evidence] = []
    waits = _waits_for(found, blamed)
    for wait in waits[:SHOWN]:
        at = {**params, "group": wait.group, "seq": wait.seq}
        evidence.append({"text": _wait_text(wait, seen), "sql": sql.shown(sql.DUMPED_CALL, at)})
    # What stalled is said next to the call that is waited in.
    about = [one for rank in blamed for one in _about(query, params, rank, found, seen)]
    evidence[1:1] = about
    if called := _called(query, params, waits[:1]):
        evidence.insert(1, called)
    others = sum(1 for wait in found.waits if wait not in waits[:SHOWN])
    if others:
        text = f"ranks wait in {others} other call{'s' * (others > 1)}, for these or for ranks that wait themselves"
        evidence.append({"text": text, "sql": sql.shown(sql.DUMPED_PENDING, params)})
    if found.stale:
        evidence.append({"text": _stale_text(found).split(":")[0] + f": {named(found.stale)} count as not dumped",
                         "sql": sql.shown(sql.DUMPED_LAST, params)})  # fmt: skip
    hosts = dict(zip(dumps["rank"].astype(np.int64).tolist(), dumps["host"].tolist(), strict=True))
    sure = set(blamed) == set(found.at_fault)
    unrecorded = sure and all(found.at_fault[rank] == "absent" for rank in blamed)
    finding = Finding(
        kind="hang",
        ranks=blamed,
        hosts=list(dict.fromkeys(hosts[rank] for rank in blamed if hosts.get(rank, "unknown") != "unknown")),
        steps=[0, 0],
        phase="communication",
        kernels=[],
        slowdown=1.0,
        share=1.0,
        confidence=UNSURE if not sure or not blamed else UNRECORDED if unrecorded else SURE,
        level="phase",
        evidence=evidence,
        action=_action(found, blamed),
    )
    if waits:
        wait = waits[0]
        finding["collective"] = Collective(
            op=wait.op, comm_group=str(wait.group), seq=max(wait.seq, 0), came=list(wait.came),
            missing=sorted({*wait.late, *wait.absent, *wait.held}), dimension="",
        )  # fmt: skip
    return finding


def _blamed(found: Wavefront, seen: Snapshot) -> list[int]:
    """The ranks to name. Where few dumps were collected, a rank is not named for lacking one if another is at fault."""
    blamed = dict(found.at_fault)
    absent = [rank for rank, why in blamed.items() if why == "absent"]
    if len(absent) < len(blamed) and len(absent) > max(2, len(seen.ranks) // 10):
        blamed = {rank: why for rank, why in blamed.items() if why != "absent"}
    return sorted({*blamed, *found.candidates})


def _waits_for(found: Wavefront, blamed: Sequence[int]) -> list[Wait]:
    """The calls in which others wait for those who are blamed: collectives first, those that most ranks wait in."""
    wanted = set(blamed)
    held = [
        wait for wait in found.waits
        if wanted & {*wait.late, *wait.absent, *wait.held, *wait.differ} and set(wait.came) - wanted
    ]  # fmt: skip
    # First those in which nobody else is missing.
    held.sort(key=lambda wait: (
        wait.seq < 0, not wanted >= {*wait.late, *wait.absent, *wait.held}, -wait.first_of, -len(wait.came)
    ))  # fmt: skip
    return held or found.stuck or [wait for wait in found.waits if wanted & set(wait.came)] or found.waits[:1]


def _group_text(group: int, seen: Snapshot) -> str:
    known = seen.groups.get(group)
    if known is None:
        return "their process group"
    members = f" of ranks {rank_text(known.members)}" if known.members else ""
    return f"{known.name}{members if len(members) < 200 else f' of {len(known.members)} ranks'}"


def _wait_text(wait: Wait, seen: Snapshot) -> str:
    """Who waits in a call, and who did not come."""
    came = f"{named(wait.came)} wait{'s' * (len(wait.came) == 1)}"
    if wait.seq < 0:
        other = (*wait.late, *wait.absent)
        verb = "receive from" if wait.op == "Recv" else "send to"
        if not other:
            return f"{came} for one another in a send and a receive of {_group_text(wait.group, seen)}"
        why = "which did not begin it" if wait.late else "of which there is no dump"
        return f"{came} to {verb} {named(other)} in {_group_text(wait.group, seen)}, {why}"
    text = f"{came} in {wait.op} {wait.seq} of {_group_text(wait.group, seen)}"
    if wait.late:
        reached = sorted({seen.issued.get((rank, wait.group), -1) for rank in wait.late})
        last = f" (its last is {reached[0]})" if len(wait.late) == 1 and reached[0] >= 0 else ""
        text += f"; {named(wait.late)} did not call it{last}"
    if wait.absent:
        text += f"; there is no dump of {named(wait.absent)}"
    for rank, call in list(wait.differ.items())[:SHOWN]:
        text += f"; rank {rank} called {call} there"
    held = [rank for rank in wait.held if rank not in wait.differ]
    if held and len(held) < len(wait.came):
        text += f"; the GPU of {named(held)} had not come to it"
    return text


def _about(query: sql.Query, params: Mapping[str, Any], rank: int, found: Wavefront, seen: Snapshot) -> list[Evidence]:
    """What is known of a rank that is blamed: how far its GPU lags, and where its last call was made."""
    evidence: list[Evidence] = []
    at = {**params, "rank": rank}
    if rank in found.lagging:
        group, own, peers = found.lagging[rank]
        lag = f"its GPU completed collectives up to {own}, where its peers completed {peers}"
        text = f"rank {rank} stalled in {_group_text(group, seen)}: {lag}"
        evidence.append({"text": text, "sql": sql.shown(sql.DUMPED_RANK, at)})
    if rank not in seen.ranks:
        return evidence
    last = query(sql.DUMPED_RANK, at)
    frames: list[str] = next((frames for frames in last["frames"].tolist() if len(frames)), [])
    if len(frames):
        text = f"rank {rank} made its last recorded call in {_caller(frames)}"
        evidence.append({"text": text, "sql": sql.shown(sql.DUMPED_RANK, at)})
    return evidence


def _called(query: sql.Query, params: Mapping[str, Any], waits: Sequence[Wait]) -> Evidence | None:
    """Where those who wait made the call, if the dumps have frames."""
    for wait in waits:
        at = {**params, "group": wait.group, "seq": wait.seq}
        rows = query(sql.DUMPED_CALL, at)
        for rank, frames in zip(rows["rank"].tolist(), rows["frames"].tolist(), strict=True):
            if len(frames) and rank in wait.came:
                text = f"rank {rank} called it in {_caller(frames)}"
                return {"text": text, "sql": sql.shown(sql.DUMPED_CALL, at)}
    return None


def _caller(frames: Sequence[str]) -> str:
    """The innermost frame that is not of PyTorch's own way to a collective."""
    return next((frame for frame in frames if not any(word in frame for word in WRAPPERS)), frames[0])


def _action(found: Wavefront, blamed: list[int]) -> str:
    if found.circle:
        return (
            f"{named(blamed).capitalize()} wait for one another: do all ranks call their collectives in the same order?"
        )
    if not blamed:
        return "All ranks came to the same call: look at the network and at NCCL's own log (NCCL_DEBUG=INFO)."
    reasons = {found.at_fault.get(rank) for rank in blamed}
    if reasons == {None} and len(blamed) == 1:
        return f"Look at {named(blamed)} first: of the ranks that wait for one another it made its last call first."
    if None in reasons:
        return f"One of {named(blamed)} holds up the others: look at their GPUs (nvidia-smi -q, the kernel log: XID)."
    if "differs" in reasons:
        return f"See why {named(blamed)} called another collective than the others: the ranks' control flow differs."
    if reasons == {"absent"}:
        return (
            f"Find out what ended {named(blamed)} (log, kernel log: OOM, XID). Where a dump was only not collected, "
            "import it, too."
        )
    if reasons & {"stalled", "held"}:
        return f"Look at the GPUs of {named(blamed)} first (kernel log: XID, nvidia-smi -q), then at their processes."
    whose = "its" if len(blamed) == 1 else "their"
    return f"Look at {named(blamed)}: what {whose} threads did, {whose} logs, {whose} GPUs."
