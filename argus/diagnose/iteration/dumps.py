"""The verdict on a job of which dumps were imported: whether it hung when they were made, and who held up whom
(:mod:`argus.diagnose.iteration.wavefront`)."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.findings import findings_of
from argus.diagnose.iteration import wavefront
from argus.diagnose.iteration.wavefront import FEW, Call, Group, Snapshot, Wait, Wavefront
from argus.diagnose.read import queries
from argus.diagnose.read.query import Query, runnable_sql
from argus.diagnose.suspect import Suspect
from argus.diagnose.verdict import Collective, Evidence, Verdict
from argus.model.text import counted
from argus.model.units import named_hosts, rank_text, ranks_text, seconds

SURE, UNRECORDED, UNSURE, UNLISTED = 0.9, 0.8, 0.5, 0.3
"""Confidence where ranks at fault were dumped, where one is named for having no dump, where they are some of those
possible, and where nobody is named since the dumps do not list the ranks of process groups."""
UNLISTED_GROUPS = (
    "the dumps do not list the ranks of their process groups, so that a rank which did not make the call is not seen"
)
LEAST_NS = 5_000_000_000
"""Dumps that were written less than this after the newest call are of a moment in which ranks may just have worked."""
LONGEST_NS, TIMEOUTS = 14 * 86400 * 10**9, 2
"""The time of a file that is later than this, or than so many recorded timeouts, was set when it was copied."""
SHOWN = 4
"""So many waits are shown as evidence."""
WRAPPERS = ("c10d_logger.py", "distributed_c10d.py", "_functional_collectives.py", "_ops.py", "comm_hooks")
"""Files of PyTorch through which every collective is called: the frame below them is the caller's."""


def conclude(query: Query, params: Mapping[str, Any], verdict: Verdict) -> bool:
    """Completes the verdict on a job of which dumps were imported; False: there are none of it."""
    dumps = query(queries.DUMPS, params)
    if not len(dumps["rank"]):
        return False
    recorded = dumps["state"] == "dumped"
    verdict["ranks"] = len(dumps["rank"])
    calls = query(queries.DUMPED_PENDING, params)
    snapshot = read(query, params, dumps, calls)
    front = wavefront.find(snapshot)
    age_ns, dated = _age(front, snapshot, dumps, calls)
    if doubt := _doubt(front, snapshot, calls, age_ns, dated=dated):
        verdict["reason"] = doubt
        return True
    verdict["status"] = "hung"
    culprits, uncertain = _culprits(front, snapshot)
    suspects = [_suspect(query, params, front, snapshot, dumps, culprits, dated=dated)]
    if uncertain:
        suspects.append(_without_dump(params, front, snapshot, dumps, uncertain))
    verdict["findings"] = findings_of(suspects, verdict["job"], verdict["run"])
    if not recorded.all():
        absent = dumps["rank"][~recorded].astype(np.int64).tolist()
        verdict["reason"] = "; ".join(filter(None, _missing(absent, snapshot)))
    return True


def read(
    query: Query,
    params: Mapping[str, Any],
    dumps: Mapping[str, NDArray[Any]],
    calls: Mapping[str, NDArray[Any]],
) -> Snapshot:
    """How far all ranks had come, from rows of ``dumps``, ``dumped_groups`` and ``dumped_calls``."""
    seen = Snapshot()
    states = zip(dumps["rank"].astype(np.int64).tolist(), dumps["state"].tolist(), strict=True)
    for rank, state in states:
        (seen.ranks if state == "dumped" else seen.absent).add(rank)
    for rank, host, pid, state in _rows(dumps, "rank", "host", "pid", "state"):
        if state in ("dead", "unresponsive"):
            seen.silent[rank] = f"rank {rank} ({', '.join([*named_hosts([host]), *([f'pid {pid}'] if pid else [])])})"
            seen.dead |= {rank} if state == "dead" else set()
    groups = query(queries.DUMPED_GROUPS, params)
    for group, name, description, ranks in _rows(groups, "comm_group", "name", "description", "ranks"):
        label = description if description not in ("", "undefined") else f"process group {name}"
        seen.groups[group] = Group(group, label, tuple(int(rank) for rank in ranks))
    seen.pending = _calls(calls)
    transfers = _rows(calls, "rank", "op", "peer")
    seen.unpaired = {rank for rank, op, peer in transfers if peer < 0 and op in ("Send", "Recv")}
    pending = {(call.group, call.seq) for call in seen.pending if call.peer < 0}
    seen.same = [call for call in _calls(query(queries.DUMPED_SAME, params)) if (call.group, call.seq) in pending]
    rooted = query(queries.DUMPED_ROOTED, {**params, "ops": sorted(wavefront.ROOTED)})
    seen.rooted = {group: set(numbers) for group, numbers in _rows(rooted, "comm_group", "numbers")}
    least: dict[tuple[int, int], int] = {}
    for call in seen.pending:
        if call.peer < 0:
            key = call.rank, call.group
            least[key] = min(call.seq, least.get(key, call.seq))
    progress = _rows(query(queries.DUMPED_PROGRESS, params), "rank", "comm_group", "issued", "enqueued", "completed",
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


def _order(query: Query, params: Mapping[str, Any], seen: Snapshot) -> None:
    """What each rank's GPU went past, and when its CPU made its last call."""
    records: dict[int, list[int]] = defaultdict(list)
    for call in seen.pending:
        if call.record >= 0:
            records[call.rank].append(call.record)
    for rank, completed, last_ns in _rows(query(queries.DUMPED_LAST, params), "rank", "completed", "last_ns"):
        seen.last_ns[rank] = last_ns
        numbers = sorted(records.get(rank, ()))
        # A dump may leave out what completed: then the numbers in between are missing.
        gaps = [high - 1 for low, high in itertools.pairwise(numbers) if high - low > 1]
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


def _age(
    front: Wavefront, seen: Snapshot, dumps: Mapping[str, NDArray[Any]], calls: Mapping[str, NDArray[Any]]
) -> tuple[int, bool]:
    """How long before the dumps the newest call had been made, ns (-1: not known), and whether that is known to have
    been long enough for a hang: by the times of the files, or because the watchdog gave calls up."""
    written = dumps["written_ns"][dumps["state"] == "dumped"].astype(np.int64)
    newest = max(seen.last_ns.values(), default=0)
    age_ns = int(written.min()) - newest if len(written) and newest > 0 else -1
    timeout_ns = TIMEOUTS * 10**6 * int(calls["timeout_ms"].max(initial=0))
    return age_ns, front.timed_out or LEAST_NS <= age_ns <= (timeout_ns if timeout_ns > 0 else LONGEST_NS)


def _doubt(front: Wavefront, seen: Snapshot, calls: Mapping[str, NDArray[Any]], age_ns: int, *, dated: bool) -> str:
    """Why the dumps are not of a hang; empty: they are."""
    many = f"{counted(len(seen.ranks), 'rank')} {'was' if len(seen.ranks) == 1 else 'were'}"
    if not front.waits and not front.at_fault:
        if front.stale:
            return _stale_text(front)
        return f"no collective was pending when {many} dumped: none of them waited for another"
    if len(front.stale) * 2 >= len(seen.ranks):
        return _stale_text(front)
    newest = max(seen.last_ns.values(), default=0)
    if front.timed_out:
        return ""
    if 0 <= age_ns < LEAST_NS:
        oldest = int(calls["created_ns"].min())
        if age_ns == 0 and oldest == newest and front.waits:
            return (
                f"{_wait_text(front.waits[0], seen)}; as far as is recorded they have just come there: that is not "
                "a hang yet. Import another report, made some seconds later, together with this one"
            )
        return (
            f"the newest call had been made {seconds(age_ns / 1e9)} before, and the oldest of those that were pending "
            f"{seconds((age_ns + newest - oldest) / 1e9)}: that is not a hang yet. Look at the ranks once more"
        )
    named_any = front.at_fault or front.circle or not front.stuck
    if not named_any and not dated:
        if _unlisted(front, seen):
            return (
                f"{_wait_text(front.stuck[0], seen)}, and {UNLISTED_GROUPS}. Dumps with pg_config (format 2.2 and "
                "later) list them"
            )
        return (
            f"{_wait_text(front.stuck[0], seen)}: all of them made the call, nobody is missing. The files do not say "
            "for how long it had been pending (their times are not those of the dump): if the job hung, look at "
            "the network and at these ranks' GPUs"
        )
    return ""


def _stale_text(front: Wavefront) -> str:
    return (
        f"the dumps are not of one moment: others completed collectives that {ranks_text(front.stale)} had not "
        "made when "
        "dumped, so the job was making progress. Dump all ranks again"
    )


def _suspect(
    query: Query,
    params: Mapping[str, Any],
    front: Wavefront,
    seen: Snapshot,
    dumps: Mapping[str, NDArray[Any]],
    culprits: list[int],
    *,
    dated: bool,
) -> Suspect:
    waits = _waits_for(front, culprits)
    waited: list[Evidence] = []
    for wait in waits[:SHOWN]:
        at = {**params, "group": wait.group, "seq": wait.seq}
        waited.append({"text": _wait_text(wait, seen), "sql": runnable_sql(queries.DUMPED_CALL, at)})
    called = _called(query, params, waits[:1])
    about = [one for rank in culprits for one in _about(query, params, rank, front, seen)]
    # What stalled is reported next to the call that is waited in.
    crossed = [_crossed_text(rank, front, seen) for rank in culprits if rank in front.crossed]
    sql = runnable_sql(queries.DUMPED_PENDING, params)
    order: list[Evidence] = [{"text": text, "sql": sql} for text in crossed]
    evidence = [*order, *waited[:1], *([] if called is None else [called]), *about, *waited[1:]]
    others = sum(1 for wait in front.waits if wait not in waits[:SHOWN])
    if others:
        text = f"ranks wait in {others} other call{'s' * (others > 1)}, for these or for ranks that wait themselves"
        evidence.append({"text": text, "sql": runnable_sql(queries.DUMPED_PENDING, params)})
    if front.unpaired:
        text = f"{_unpaired_text(front)}: they are not named, since others are late without such a wait"
        evidence.append({"text": text, "sql": runnable_sql(queries.DUMPED_PENDING, params)})
    if front.stale:
        count = f"{ranks_text(front.stale)} count{'s' * (len(front.stale) == 1)} as not dumped"
        evidence.append({"text": f"{_stale_text(front).split(':')[0]}: {count}",
                         "sql": runnable_sql(queries.DUMPED_LAST, params)})  # fmt: skip
    if not dated:
        text = "the files do not say for how long: if the job may have been running, dump all ranks again"
        evidence.append({"text": text, "sql": runnable_sql(queries.DUMPED_LAST, params)})
    doubt = _ambiguity(front, culprits, seen)
    collective = None
    if waits:
        wait = waits[0]
        collective = Collective(
            op=wait.op, comm_group=str(wait.group), seq=max(wait.seq, 0), came=list(wait.came),
            missing=sorted({*wait.late, *wait.absent, *wait.held}), dimension="",
        )  # fmt: skip
    return Suspect(
        kind="hang",
        ranks=culprits,
        hosts=_hosts(dumps, culprits),
        since=0,
        last=0,
        phase="communication",
        lost_ns=1.0,
        slowdown=1.0,
        confidence=_confidence(front, seen, culprits, doubt),
        level="phase",
        evidence=evidence,
        action=_action(front, culprits, doubt, seen),
        collective=collective,
        owner=_owner(query, params, front, culprits, doubt),
    )


def _hosts(dumps: Mapping[str, NDArray[Any]], ranks: Sequence[int]) -> list[str]:
    hosts = dict(zip(dumps["rank"].astype(np.int64).tolist(), dumps["host"].tolist(), strict=True))
    return named_hosts(hosts.get(rank, "") for rank in ranks)


def _without_dump(
    params: Mapping[str, Any],
    front: Wavefront,
    seen: Snapshot,
    dumps: Mapping[str, NDArray[Any]],
    ranks: list[int],
) -> Suspect:
    """Ranks without a dump that others wait for, and that may themselves wait for the ranks at fault."""
    waits = sorted(_waits_for(front, ranks), key=lambda wait: not _held_up_by(wait) <= set(ranks))
    evidence: list[Evidence] = [
        {"text": _wait_text(wait, seen), "sql": runnable_sql(queries.DUMPED_CALL, {**params, "group": wait.group,
                                                                                  "seq": wait.seq})}
        for wait in waits[:1]
    ]  # fmt: skip
    one = len(ranks) == 1
    do, they = ("does", "it") if one else ("do", "they")
    text = f"no dump shows what {ranks_text(ranks)} {do}: {they} may be innocent and wait like the others"
    evidence.append({"text": text, "sql": runnable_sql(queries.DUMPS, params)})
    return Suspect(
        kind="hang", ranks=ranks, hosts=_hosts(dumps, ranks), since=0, last=0, phase="communication", lost_ns=0.0,
        slowdown=1.0, confidence=UNSURE, level="phase", evidence=evidence, owner="infrastructure",
        action=f"{_wanted(front, ranks)}; without one, see whether "
        f"{'its process' if one else 'their processes'} had ended (log, kernel log: OOM, XID).",
    )  # fmt: skip


def _wanted(front: Wavefront, ranks: list[int]) -> str:
    """Which dumps would show what these ranks did."""
    if set(ranks) <= set(front.stale):
        return f"Dump {ranks_text(ranks)} again"
    return f"Import the dump{'' if len(ranks) == 1 else 's'} of {ranks_text(ranks)}, too"


def _confidence(front: Wavefront, seen: Snapshot, culprits: Sequence[int], doubt: str) -> float:
    """That these ranks are at fault. A rank without a dump makes that less sure only where it could be the one that the
    others wait for: a rank whose own dump shows it late, stalled or elsewhere is so whatever the others did."""
    if not culprits:
        return UNLISTED if _unlisted(front, seen) else UNSURE
    if doubt or not set(culprits) <= set(front.at_fault):
        return UNSURE
    held = {rank for rank in culprits if front.at_fault[rank] == "held"}
    if any(held & set(wait.held) and wait.absent for wait in front.waits):
        return UNSURE
    unrecorded = any(front.at_fault[rank] == "absent" and rank not in seen.silent for rank in culprits)
    return UNRECORDED if unrecorded else SURE


def _culprits(front: Wavefront, seen: Snapshot) -> tuple[list[int], list[int]]:
    """The ranks to name; and those without a dump that may as well wait for these.

    A rank without a dump is not named where others miss it only behind a call in which they wait for another that is
    at fault, nor where few dumps were collected and another rank is at fault. RAS itself reports who does not answer.
    """
    shown = {rank for rank, why in front.at_fault.items() if why != "absent" or rank in seen.silent}
    absent = set(front.at_fault) - shown
    if not shown:
        return sorted({*absent, *front.candidates}), []
    alone = [wait for wait in front.waits if not shown & _held_up_by(wait)]
    absent &= set().union(*map(_held_up_by, alone))
    absent = set() if len(absent) > _few(seen) else absent
    absent &= set().union(*(_held_up_by(wait) for wait in alone if wait.first_of and set(wait.came) - shown))
    waiting = _waiting_for(front, shown)
    uncertain = {
        rank for rank in absent
        if any(rank in group.members and waiting & set(group.members) for group in seen.groups.values())
    }  # fmt: skip
    return sorted({*shown, *(absent - uncertain), *front.candidates}), sorted(uncertain)


def _held_up_by(wait: Wait) -> set[int]:
    """Whom those who wait in a call wait for."""
    return {*wait.late, *wait.absent, *wait.held, *wait.differ}


def _waiting_for(front: Wavefront, ranks: set[int]) -> set[int]:
    """These ranks, those that wait for them, and those that wait for these."""
    found = set(ranks)
    while True:
        more = {rank for wait in front.waits if found & _held_up_by(wait) for rank in wait.came} - found
        if not more:
            return found
        found |= more


def _few(seen: Snapshot) -> int:
    """So many ranks may lack a dump because they are dead; of more the dumps were only not collected."""
    return max(2, len(seen.ranks) // 10)


def _ambiguity(front: Wavefront, culprits: Sequence[int], seen: Snapshot) -> str:
    """Why other ranks may be at fault than these, for a sentence; empty: they are not."""
    reasons = {front.at_fault.get(rank) for rank in culprits}
    for wait in front.waits:
        everybody = {*wait.came, *wait.late, *wait.absent}
        if reasons == {"differs"} and set(culprits) == everybody:
            return "all of them called something else: one of them is wrong"
        late = set(wait.late)
        if reasons == {"late"} and set(culprits) == late and len(late) > max(FEW, len(everybody) / 2):
            return f"or {ranks_text(wait.came)} made a call that the others do not make"
    if len(_unlisted(front, seen)) > 1:
        return "the dumps do not list the ranks of their process groups, and equal numbers may be different groups"
    if reasons == {"absent"} and len(set(culprits) - set(seen.silent)) > _few(seen):
        return "most of them may be well: import the dumps of all ranks"
    if front.unpaired:
        return f"{_unpaired_text(front)}, and may be late for a reason of their own"
    return ""


def _unlisted(front: Wavefront, seen: Snapshot) -> set[int]:
    """Process groups whose ranks the dumps do not list."""
    groups = {*seen.groups, *(wait.group for wait in front.waits)}
    return {group for group in groups if group not in seen.groups or not seen.groups[group].members}


def _waits_for(front: Wavefront, culprits: Sequence[int]) -> list[Wait]:
    """The calls in which others wait for the culprits: collectives first, those that most ranks wait in."""
    wanted = set(culprits)
    held = [
        wait for wait in front.waits
        if wanted & {*wait.differ} or (wanted & {*wait.late, *wait.absent, *wait.held} and set(wait.came) - wanted)
    ]  # fmt: skip
    # First those in which nobody else is missing.
    held.sort(key=lambda wait: (
        wait.seq < 0, not wait.differ, not wanted >= {*wait.late, *wait.absent, *wait.held}, -wait.first_of,
        -len(wait.came),
    ))  # fmt: skip
    return held or front.stuck or [wait for wait in front.waits if wanted & set(wait.came)] or front.waits[:1]


def _group_text(group: int, seen: Snapshot) -> str:
    known = seen.groups.get(group)
    if known is None:
        return "their process group"
    members = f" of ranks {rank_text(known.members)}" if known.members else ""
    return f"{known.name}{members if len(members) < 200 else f' of {len(known.members)} ranks'}"


def _wait_text(wait: Wait, seen: Snapshot) -> str:
    """Who waits in a call, and who did not come."""
    came = f"{ranks_text(wait.came)} wait{'s' * (len(wait.came) == 1)}"
    if wait.seq < 0:
        other = (*wait.late, *wait.absent)
        verb = "receive from" if wait.op == "Recv" else "send to"
        if not other:
            return f"{came} for one another in a send and a receive of {_group_text(wait.group, seen)}"
        why = "which did not begin it" if wait.late else "of which there is no dump"
        if not wait.late and set(other) & {*seen.silent, *seen.ranks}:
            why = "; ".join(_missing(other, seen))
        return f"{came} to {verb} {ranks_text(other)} in {_group_text(wait.group, seen)}, {why}"
    text = f"{came} in {wait.op} {wait.seq} of {_group_text(wait.group, seen)}"
    if wait.late:
        reached = sorted({seen.issued.get((rank, wait.group), -1) for rank in wait.late})
        last = f" (its last is {reached[0]})" if len(wait.late) == 1 and reached[0] >= 0 else ""
        text += f"; {ranks_text(wait.late)} did not call it{last}"
    text = "; ".join([text, *_missing(wait.absent, seen)])
    for rank, call in list(wait.differ.items())[:SHOWN]:
        text += f"; rank {rank} called {call} there"
    if wait.differ and wait.usual:
        text += f", the others {wait.usual}"
    held = [rank for rank in wait.held if rank not in wait.differ]
    if held and len(held) < len(wait.came):
        text += f"; the GPU of {ranks_text(held)} had not come to it"
    return text


def _crossed_text(rank: int, front: Wavefront, seen: Snapshot) -> str:
    """Which two collectives a rank called in another order than the others."""
    pair = front.crossed[rank]
    ops = {(wait.group, wait.seq): wait.op for wait in front.waits}
    first, then = (f"{ops[call]} {call[1]} of {_group_text(call[0], seen)}" for call in (pair.first, pair.then))
    if pair.both:
        return f"rank {rank} called {first} before {then}, the others after it"
    return f"rank {rank} came to {first} first, the others to {then}"


def _unpaired_text(front: Wavefront) -> str:
    wait = "waits" if len(front.unpaired) == 1 else "wait"
    return f"{ranks_text(front.unpaired)} {wait} in a send or a receive, with ranks that the dumps do not list"


def _missing(ranks: Sequence[int], seen: Snapshot) -> list[str]:
    """Why there is no record of some ranks, in clauses: RAS says of each that it does not answer. A dump that there is
    does not count if it is of an earlier moment."""
    without = [rank for rank in ranks if rank not in seen.silent and rank not in seen.ranks]
    clauses = [f"there is no dump of {ranks_text(without)}"] if without else []
    if earlier := [rank for rank in ranks if rank in seen.ranks]:
        clauses.append(_earlier(earlier))
    for silent, dead in ((set(seen.silent) - seen.dead, False), (seen.dead, True)):
        if these := [rank for rank in ranks if rank in silent]:
            names = ", ".join(seen.silent[rank] for rank in these[:SHOWN])
            more = f" and {len(these) - SHOWN} more" if len(these) > SHOWN else ""
            one = len(these) == 1
            text = f"RAS: {names}{more} {'does' if one else 'do'} not answer"
            clauses.append(text + (f" and {'is' if one else 'are'} considered dead" if dead else ""))
    return clauses


def _earlier(ranks: Sequence[int]) -> str:
    dumps = f"the dump of {ranks_text(ranks)} is" if len(ranks) == 1 else f"the dumps of {ranks_text(ranks)} are"
    return f"{dumps} of an earlier moment"


def _about(query: Query, params: Mapping[str, Any], rank: int, front: Wavefront, seen: Snapshot) -> list[Evidence]:
    """What is known of a culprit: how far its GPU lags, and where its last call was made."""
    evidence: list[Evidence] = []
    at = {**params, "rank": rank}
    if rank in front.lagging:
        group, own, peers = front.lagging[rank]
        lag = f"its GPU completed collectives up to {own}, where its peers completed {peers}"
        text = f"rank {rank} stalled in {_group_text(group, seen)}: {lag}"
        evidence.append({"text": text, "sql": runnable_sql(queries.DUMPED_RANK, at)})
    if rank not in seen.ranks:
        return evidence
    last = query(queries.DUMPED_RANK, at)
    frames: list[str] = next((frames for frames in last["frames"].tolist() if len(frames)), [])
    if len(frames):
        text = f"rank {rank} made its last recorded call in {_caller(frames)}"
        evidence.append({"text": text, "sql": runnable_sql(queries.DUMPED_RANK, at)})
    return evidence


def _called(query: Query, params: Mapping[str, Any], waits: Sequence[Wait]) -> Evidence | None:
    """Where those who wait made the call, if the dumps have frames."""
    for wait in waits:
        at = {**params, "group": wait.group, "seq": wait.seq}
        rows = query(queries.DUMPED_CALL, at)
        for rank, frames in zip(rows["rank"].tolist(), rows["frames"].tolist(), strict=True):
            if len(frames) and rank in wait.came:
                text = f"rank {rank} called it in {_caller(frames)}"
                return {"text": text, "sql": runnable_sql(queries.DUMPED_CALL, at)}
    return None


def _caller(frames: Sequence[str]) -> str:
    """The innermost frame that is not of PyTorch's own way to a collective."""
    return next((frame for frame in frames if not any(word in frame for word in WRAPPERS)), frames[0])


def _owner(query: Query, params: Mapping[str, Any], front: Wavefront, culprits: Sequence[int], doubt: str) -> str:
    """Who has to act on a hang: one of :data:`argus.diagnose.kinds.OWNERS`; empty: the kind's owner.

    A GPU that does not go on, a rank that is gone, and a call that all ranks made are the infrastructure's. Where the
    dump of a rank that did not come to a call has the place of its last one, its code is to be read; else the platform
    has to find out.
    """
    reasons = {front.at_fault.get(rank) for rank in culprits}
    if "differs" in reasons or front.circle:
        return "model"
    if doubt and reasons != {"absent"}:
        return ""
    late = [rank for rank in culprits if front.at_fault.get(rank) == "late"]
    if not culprits or reasons & {"stalled", "held"} or not late:
        return "" if reasons == {None} and len(culprits) == 1 else "infrastructure"
    frames = [query(queries.DUMPED_RANK, {**params, "rank": rank})["frames"].tolist() for rank in late]
    return "model" if any(len(each) for of_rank in frames for each in of_rank) else "platform"


def _action(front: Wavefront, culprits: list[int], doubt: str, seen: Snapshot) -> str:
    them = ranks_text(culprits)
    if not culprits and not front.circle and _unlisted(front, seen):
        return (
            f"Look at the processes of all ranks, then at the network: {UNLISTED_GROUPS}. Dumps with pg_config "
            "(format 2.2 and later) list them."
        )
    if doubt:
        return f"Look at {them}: {doubt}."
    if front.circle:
        return f"{them.capitalize()} wait for one another: do all ranks call their collectives in the same order?"
    if not culprits:
        return "All ranks came to the same call: look at the network and at NCCL's own log (NCCL_DEBUG=INFO)."
    reasons = {front.at_fault.get(rank) for rank in culprits}
    if reasons == {None} and len(culprits) == 1:
        return f"Look at {them} first: of the ranks that wait for one another it made its last call first."
    if None in reasons:
        return f"One of {them} holds up the others: look at their GPUs (nvidia-smi -q, the kernel log: XID)."
    if set(culprits) <= set(front.crossed):
        call = "calls" if len(culprits) == 1 else "call"
        if not all(front.crossed[rank].both for rank in culprits):
            return (
                f"See why {them} {call} collectives in another order than the others, or {call} other ones: the ranks' "
                "control flow differs."
            )
        return (
            f"See why {them} {call} collectives in another order than the others: over all groups, the order must be "
            "the same on all ranks."
        )
    if "differs" in reasons:
        return f"See why {them} called another collective than the others: the ranks' control flow differs."
    if reasons == {"absent"}:
        if set(culprits) <= set(seen.silent):
            named = ", ".join(seen.silent[rank] for rank in culprits[:SHOWN])
            if set(culprits) <= seen.dead:
                return f"Find out what ended {named}: its log, the kernel log (OOM, XID); then restart the job."
            return f"See whether {named} still runs, and where: argus dump there, the kernel log (OOM, XID)."
        if set(culprits) <= set(front.stale):
            its = "its dump is" if len(culprits) == 1 else "their dumps are"
            return f"Dump {them} again: {its} of an earlier moment."
        return (
            f"Find out what ended {them} (log, kernel log: OOM, XID). Where a dump was only not collected, "
            "import it, too."
        )
    if reasons & {"stalled", "held"}:
        gpus, processes = ("GPU", "its process") if len(culprits) == 1 else ("GPUs", "their processes")
        return f"Look at the {gpus} of {them} first (kernel log: XID, nvidia-smi -q), then at {processes}."
    whose = "its" if len(culprits) == 1 else "their"
    return f"Look at {them}: what {whose} threads did, {whose} logs, {whose} GPUs."
