"""What else was seen of a late rank at that time: garbage collections, waits for a free CPU or a disk, and the place in
its code where it spends the time that the others do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.causes.cpu_time import HALF, Cause
from argus.diagnose.causes.stacks import StackReader
from argus.diagnose.read import queries
from argus.diagnose.read.query import Query, runnable_sql
from argus.diagnose.suspect import Suspect
from argus.diagnose.verdict import Evidence
from argus.model.stacks import Frame
from argus.model.units import duration, ranks_text
from argus.semantics.stacks.stack import label

WINDOW_NS = 30_000_000_000
"""What is only sampled, or recorded once a second, is summed over this much of the time since a rank became late, ns:
some 3,000 samples a busy thread, which leaves a component that takes a tenth of the time uncertain by a twentieth."""
NOT_SHARPENED = ("jit_stall", "link_degradation")
"""Kinds that are more specific than the causes found here."""


@dataclass(frozen=True)
class Sharpened:
    """A cause with what else was seen of the ranks.

    Attributes:
        cause: Why the rank is late: what was known before, or gc_pause or host_contention.
        evidence: For it.
        action: What to do about it; empty: the action of the cause.
        level: "stack" where a place in the code is named, else empty.
        alike: Other ranks of the same hosts that it happens to as well.
    """

    cause: Cause
    evidence: list[Evidence]
    action: str = ""
    level: str = ""
    alike: tuple[int, ...] = ()


@dataclass(frozen=True)
class Compared:
    """Late ranks, and those that they are compared with.

    Attributes:
        late, others: The ranks of both.
        late_ns: How late they are.
        where: The late ranks in words, with their hosts.
        neighbours: Ranks on the hosts of the late ones that are not late. Waits for a CPU are not compared with theirs,
            and if more of them than of the late ones wait as long, that is not why these are late.
        elsewhere: Ranks of other hosts, to compare with where all others are neighbours.
        idle_ns: For how much longer the late ranks' GPUs are idle; None: not known, or not their CPUs' fault.
    """

    late: Sequence[int]
    others: Sequence[int]
    late_ns: float
    where: str
    neighbours: Sequence[int] = ()
    elsewhere: Sequence[int] = ()
    idle_ns: float | None = None


def sharpen(
    query: Query, params: Mapping[str, Any], cause: Cause, compared: Compared, stacks: StackReader | None
) -> Sharpened:
    """A cause, sharpened by what the stack side saw of the ranks.

    Each component counts by its excess over the others' (median of the ranks), as a share of time, times the length of
    a step. Collecting garbage: by samples of running threads, with what those wait for a CPU meanwhile. Waiting for a
    CPU, or for a disk: by the thread of each rank that waits the most; for a CPU, less what it would wait if it waited
    as much for its work as the others' do for theirs. One that makes up half of the lateness is the cause. If their
    GPUs are idle for less than that, half of it is to be explained instead: a CPU that others take away works
    more slowly as well, and is later than it has waited.

    Args:
        query: Runs SQL with parameters.
        params: job, run, and the steps since the ranks are late.
        cause: The cause by calls or phases.
        compared: Who is late, and whom they are compared with.
        stacks: Where threads were; None: nothing is known of them.
    """
    late, others = compared.late, compared.others
    if cause.kind in NOT_SHARPENED or not others:
        return Sharpened(cause, [])
    span = query(queries.SPAN_NS, params)
    if not len(span["end_ns"]) or int(span["steps"][0]) == 0:
        return Sharpened(cause, [])
    end = int(span["end_ns"][0])
    begin = max(int(span["begin_ns"][0]), end - WINDOW_NS)
    step_ns = float(span["step_ns"][0])
    at = {**params, "ranks": [*late, *others], "from_ns": begin, "to_ns": end}
    waits = _waits(query, at, cause, compared)
    parts = [(kind, shares[0] * step_ns, shares[1] * step_ns) for kind, shares in waits.shares if shares is not None]
    kind, own, theirs = max(parts, key=lambda part: part[1] - part[2], default=("", 0.0, 0.0))
    late_ns, idle_ns = compared.late_ns, compared.idle_ns
    lost_ns = late_ns if idle_ns is None else float(np.clip(idle_ns, HALF * late_ns, late_ns))
    if own - theirs < HALF * lost_ns:
        return _place(stacks, at, cause, late, others, late_ns, step_ns)
    if kind == "gc_pause":
        return _collections(query, at, cause, late, own, theirs, compared.where)
    if kind != "host_contention":
        return _contention(waits.of_disk, waits.usage, at, cause, late, step_ns, compared.where, kind)
    alike = waits.alike
    where = ranks_text(sorted([*late, *alike])) if alike else compared.where
    sharpened = _contention(waits.by_host, waits.by_host, waits.hosts_at, cause, late, step_ns, where, kind)
    if not alike:
        return sharpened
    text = f"{ranks_text(alike)} on the same hosts {'waits' if len(alike) == 1 else 'wait'} for a CPU as long"
    shown = runnable_sql(queries.HOST_TIME, {**at, "ranks": [*late, *alike]})
    return replace(sharpened, evidence=[*sharpened.evidence, {"text": text, "sql": shown}], alike=alike)


@dataclass(frozen=True)
class _Waits:
    """What threads waited for, as far as it is stored.

    Attributes:
        shares: By kind: the share of time of the late ranks, and of the others; None: not known.
        usage: Rows of the late ranks and the others.
        of_disk: The same, or samples where it lacks disks.
        by_host: Rows of the late ranks and of ranks on other hosts.
        hosts_at: The parameters of those.
        alike: Neighbours that wait for a CPU as long.
    """

    shares: list[tuple[str, tuple[float, float] | None]]
    usage: Mapping[str, NDArray[Any]]
    of_disk: Mapping[str, NDArray[Any]]
    by_host: Mapping[str, NDArray[Any]]
    hosts_at: dict[str, Any]
    alike: tuple[int, ...]


def _waits(query: Query, at: dict[str, Any], cause: Cause, compared: Compared) -> _Waits:
    late, others, neighbours = compared.late, compared.others, compared.neighbours
    usage, sampled = query(queries.HOST_TIME, at), query(queries.SAMPLED_TIME, at)
    of_disk = usage
    apart = [rank for rank in others if rank not in neighbours] or list(compared.elsewhere)
    hosts_at = {**at, "ranks": [*late, *(apart or others)]}
    by_host = query(queries.HOST_TIME, hosts_at) if apart else usage
    queued, working = excess(by_host, "runqueue_share", late), excess(by_host, "cpu_share", late)
    alike = _queued_as_long(query, hosts_at, queued, neighbours) if apart and queued is not None else ()
    if len(alike) > len(late):
        queued = None
    collecting = excess(sampled, "gc_share", late)
    if queued is not None and working is not None:
        # On a machine that is busy all over, who works more waits more, and everything takes so much longer.
        stretch = [1 + waits / max(works, 1e-3) for waits, works in zip(queued, working, strict=True)]
        queued = queued[0], max(queued[1], min(queued[0], working[0] * (stretch[1] - 1)))
        collecting = None if collecting is None else (collecting[0] * stretch[0], collecting[1] * stretch[1])
    shares = [("gc_pause", collecting), ("host_contention", queued)]
    if cause.kind != "data_loading":  # there a disk is where to look anyway
        of_disk = usage if excess(usage, "io_share", late) is not None else sampled
        shares.append(("io", excess(of_disk, "io_share", late)))
    return _Waits(shares, usage, of_disk, by_host, hosts_at, alike)


def excess(columns: Mapping[str, NDArray[Any]], name: str, late: Sequence[int]) -> tuple[float, float] | None:
    """A share of time of the late ranks and of the others, the median rank of each; None: not known of both.

    Args:
        columns: rank, and ``name``: a share of the time, below 0: not known.
        name: Which.
        late: The late ranks.
    """
    values = np.asarray(columns[name], np.float64)
    known = values >= 0
    slow = np.isin(columns["rank"], late) & known
    if not slow.any() or not (known & ~slow).any():
        return None
    return float(np.median(values[slow])), float(np.median(values[known & ~slow]))


def _queued_as_long(
    query: Query, at: dict[str, Any], queued: tuple[float, float], neighbours: Sequence[int]
) -> tuple[int, ...]:
    """The neighbours whose threads wait for a CPU by more than half of what parts the late ranks from those of other
    hosts."""
    if not neighbours:
        return ()
    near = query(queries.HOST_TIME, {**at, "ranks": list(neighbours)})
    waiting = near["runqueue_share"] > queued[1] + HALF * (queued[0] - queued[1])
    return tuple(sorted(near["rank"][waiting].tolist()))


def _collections(
    query: Query,
    at: dict[str, Any],
    cause: Cause,
    late: Sequence[int],
    late_ns: float,
    others_ns: float,
    where: str,
) -> Sharpened:
    pauses = query(queries.PAUSES, {**at, "ranks": list(late)})
    text = f"it collects garbage for {duration(late_ns)} a step, the others for {duration(others_ns)}"
    place = ""
    if len(pauses["pauses"]) and int(pauses["pauses"][0]):
        text += f": {int(pauses['pauses'][0])} pauses of {duration(float(pauses['usual_ns'][0]))} were seen"
        if int(pauses["generation"][0]) >= 0:
            text += f", of generation {int(pauses['generation'][0])} at most"
        if pauses["function"][0]:
            frame = Frame("python", pauses["function"][0], pauses["file"][0], int(pauses["line"][0]))
            place = label(frame, lines=True)
            text += f", most in {place}"
    action = (
        f"Let all ranks collect garbage in the same steps (gc.disable(), and gc.collect() every so many steps), or let "
        f"{where} keep fewer objects (gc.freeze() after the setup)" + (f": it collects in {place}." if place else ".")
    )
    pauses_evidence: Evidence = {"text": text, "sql": runnable_sql(queries.PAUSES, {**at, "ranks": list(late)})}
    return Sharpened(replace(cause, kind="gc_pause", text=text, known=True), [pauses_evidence], action, "stack")


def _contention(
    waits: Mapping[str, NDArray[Any]],
    usage: Mapping[str, NDArray[Any]],
    at: dict[str, Any],
    cause: Cause,
    late: Sequence[int],
    step_ns: float,
    where: str,
    kind: str,
) -> Sharpened:
    share = "runqueue_share" if kind == "host_contention" else "io_share"
    late_ns, others_ns = (part * step_ns for part in excess(waits, share, late) or (0.0, 0.0))
    what = "for a free CPU" if kind == "host_contention" else "for a disk or its memory to be read back"
    text = f"a thread of it waits {duration(late_ns)} a step {what}, against {duration(others_ns)}"
    taken = excess(usage, "taken_per_s", late)
    if kind == "host_contention" and taken is not None:
        text += f"; it was taken off the CPU {taken[0]:,.0f} times a second, the others {taken[1]:,.0f} times"
    processes = usage["process"][np.isin(usage["rank"], late)].tolist()
    pid = int(processes[0]) if processes else 0
    action = (
        f"Find out what else runs on the CPUs of {where} (top -H; taskset -pc {pid} shows which it may use), and "
        "whether its control group is throttled (cpu.max, cpu.stat)."
        if kind == "host_contention"
        else f"Find out what else uses the disk or the memory of {where}: iostat -x, vmstat, memory.max of its group."
    )
    waits_evidence: Evidence = {"text": text, "sql": runnable_sql(queries.HOST_TIME, at)}
    return Sharpened(replace(cause, kind="host_contention", text=text, known=True), [waits_evidence], action)


def _place(
    stacks: StackReader | None,
    at: dict[str, Any],
    cause: Cause,
    late: Sequence[int],
    others: Sequence[int],
    late_ns: float,
    step_ns: float,
) -> Sharpened:
    """Where the late ranks' code spends the time, if it is the CPU's."""
    on_cpu = cause.kind != "compute_straggler" or cause.phase
    if stacks is None or not on_cpu:
        return Sharpened(cause, [])
    places = stacks.excess(late, others, at["from_ns"], at["to_ns"])
    scale = step_ns / max(at["to_ns"] - at["from_ns"], 1)
    if not places or places[0].excess_ns * scale < HALF * late_ns:
        return Sharpened(cause, [])
    first = places[0]
    text = f"its stacks differ most from the others' in {label(first.frame, lines=True)}: "
    more = f"{duration(first.excess_ns * scale)} a step more"
    if max(first.share, first.others) <= 1:
        text += f"{first.share:.0%} of its time, {first.others:.0%} of theirs, {more}"
    else:
        # Several threads or workers are there at once: their times add up to more than the time that passes.
        threads = [f"{share:.1f}" for share in (first.share, first.others)]
        text += f"in {threads[0]} threads or workers at once, in {threads[1]} of the others', {more} in all of them"
    if first.queued > first.share / 2:
        text += f"; for {first.queued / first.share:.0%} of that it is ready to run, and no CPU is free"
    evidence: list[Evidence] = [{"text": text, "sql": runnable_sql(queries.PLACES, at)}]
    action = f"argus export svg --rank {late[0]} --kind all --diff rank=others -o diff.svg shows what it does more."
    return Sharpened(cause, evidence, action, "stack")


def explain_jitter(query: Query, params: Mapping[str, Any], stalls: Suspect, steps: int) -> None:
    """Turns the jitter of a rank into ``gc_pause`` where its garbage collections take half of the time that is lost.

    Args:
        query: Runs SQL with parameters.
        params: job, run, first, last.
        stalls: Of kind jitter. Changed in place.
        steps: How many steps it was detected in.
    """
    if stalls.kind != "jitter" or not stalls.ranks:
        return
    at = {**params, "first": stalls.since, "last": stalls.last}
    span = query(queries.SPAN_NS, at)
    if not len(span["end_ns"]) or int(span["steps"][0]) == 0:
        return
    at |= {"ranks": stalls.ranks, "from_ns": int(span["begin_ns"][0]), "to_ns": int(span["end_ns"][0])}
    pauses = query(queries.PAUSES, at)
    if not len(pauses["pauses"]) or float(pauses["total_ns"][0]) < HALF * stalls.lost_ns * steps:
        return
    stalls.kind, stalls.level = "gc_pause", "stack"
    text = (
        f"it collected garbage {int(pauses['pauses'][0])} times in that time, "
        f"for {duration(float(pauses['usual_ns'][0]))} each"
    )
    if pauses["function"][0]:
        frame = Frame("python", pauses["function"][0], pauses["file"][0], int(pauses["line"][0]))
        text += f", most in {label(frame, lines=True)}"
    stalls.further.append({"text": text, "sql": runnable_sql(queries.PAUSES, at)})
    stalls.action = (
        f"Let all ranks collect garbage in the same steps (gc.disable(), and gc.collect() every so many steps), or let "
        f"rank {stalls.ranks[0]} keep fewer objects (gc.freeze() after the setup)."
    )
