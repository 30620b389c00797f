"""What else was seen of a late rank at that time: garbage collections, waits for a free CPU or a disk, and the place in
its code where it spends the time that the others do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose import sql
from argus.diagnose.cause import HALF, Cause
from argus.diagnose.stacks import StackReader
from argus.diagnose.verdict import Evidence, Finding, named
from argus.semantics.stacks import Frame, label

WINDOW_NS = 30_000_000_000
"""What is seen only by samples, or told once a second, is summed over so much of the time since a rank became late, ns:
some 3,000 samples a busy thread, which leaves a component that takes a tenth of the time uncertain by a twentieth."""
UNTOLD = ("jit_stall",)
"""Kinds that say more than what is found here."""


@dataclass(frozen=True)
class Seen:
    """What was seen besides.

    Attributes:
        cause: Why the rank is late: what was known before, or gc_pause or host_contention.
        evidence: For it.
        action: What to do about it; empty: what the cause says.
        level: "stack" where a place in the code is told, else empty.
        alike: Other ranks of the same hosts that it happens to as well.
    """

    cause: Cause
    evidence: list[Evidence]
    action: str = ""
    level: str = ""
    alike: tuple[int, ...] = ()


def look_closer(
    query: sql.Query,
    params: Mapping[str, Any],
    cause: Cause,
    late: Sequence[int],
    others: Sequence[int],
    late_ns: float,
    where: str,
    stacks: StackReader | None,
    neighbours: Sequence[int] = (),
    elsewhere: Sequence[int] = (),
    idle_ns: float | None = None,
) -> Seen:
    """A cause, sharpened by what the stack side saw of the ranks.

    Each component counts by its excess over the others' (median of the ranks), as a share of time, times the length of
    a step. Collecting garbage: by samples of running threads, with what those wait for a CPU meanwhile. Waiting for a
    CPU, or for a disk: by the thread of each rank that waits the most; for a CPU, less what it would wait if it waited
    as much for its work as the others' do for theirs. One that makes up half of the lateness is the cause. If their
    GPUs have nothing to do for less than that, half of it is to be explained instead: a CPU that others take away works
    more slowly as well, and is later than it has waited.

    Args:
        query: Runs SQL with parameters.
        params: job, run, and the steps since the ranks are late.
        cause: What calls or phases say.
        late, others: The late ranks, and those they are compared with.
        late_ns: How late they are.
        where: The late ranks in words, with their hosts.
        stacks: Where threads were; None: nothing is known of them.
        neighbours: Ranks on the hosts of the late ones that are not late. Waits for a CPU are not compared with theirs,
            and if more of them than of the late ones wait as long, that is not why these are late.
        elsewhere: Ranks of other hosts, to compare with where all others are neighbours.
        idle_ns: For how much longer the late ranks' GPUs have nothing to do; None: not known, or not their CPUs' fault.
    """
    if cause.kind in UNTOLD or not others:
        return Seen(cause, [])
    span = query(sql.SPAN_NS, params)
    if not len(span["end_ns"]) or int(span["steps"][0]) == 0:
        return Seen(cause, [])
    end = int(span["end_ns"][0])
    begin = max(int(span["begin_ns"][0]), end - WINDOW_NS)
    step_ns = float(span["step_ns"][0])
    at = {**params, "ranks": [*late, *others], "from_ns": begin, "to_ns": end}
    usage, sampled = query(sql.HOST_TIME, at), query(sql.SAMPLED_TIME, at)
    waits = usage
    apart = [rank for rank in others if rank not in neighbours] or list(elsewhere)
    hosts_at = {**at, "ranks": [*late, *(apart or others)]}
    by_host = query(sql.HOST_TIME, hosts_at) if apart else usage
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
    known = [("gc_pause", collecting), ("host_contention", queued)]
    if cause.kind != "data_loading":  # there a disk is where to look anyway
        waits = usage if excess(usage, "io_share", late) is not None else sampled
        known.append(("io", excess(waits, "io_share", late)))
    parts = [(kind, shares[0] * step_ns, shares[1] * step_ns) for kind, shares in known if shares is not None]
    kind, mine, theirs = max(parts, key=lambda part: part[1] - part[2], default=("", 0.0, 0.0))
    lost_ns = late_ns if idle_ns is None else float(np.clip(idle_ns, HALF * late_ns, late_ns))
    if mine - theirs >= HALF * lost_ns:
        if kind == "gc_pause":
            return _collections(query, at, cause, late, mine, theirs, where)
        if kind != "host_contention":
            return _contention(waits, usage, at, cause, late, step_ns, where, kind)
        where = where if not alike else named(sorted([*late, *alike]))
        seen = _contention(by_host, by_host, hosts_at, cause, late, step_ns, where, kind)
        if alike:
            text = f"{named(alike)} on the same hosts {'waits' if len(alike) == 1 else 'wait'} for a CPU as long"
            shown = sql.shown(sql.HOST_TIME, {**at, "ranks": [*late, *alike]})
            seen = replace(seen, evidence=[*seen.evidence, {"text": text, "sql": shown}], alike=alike)
        return seen
    return _place(stacks, at, cause, late, others, late_ns, step_ns)


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
    query: sql.Query, at: dict[str, Any], queued: tuple[float, float], neighbours: Sequence[int]
) -> tuple[int, ...]:
    """The neighbours whose threads wait for a CPU by more than half of what parts the late ranks from those of other
    hosts."""
    if not neighbours:
        return ()
    near = query(sql.HOST_TIME, {**at, "ranks": list(neighbours)})
    waiting = near["runqueue_share"] > queued[1] + HALF * (queued[0] - queued[1])
    return tuple(sorted(near["rank"][waiting].tolist()))


def _collections(
    query: sql.Query,
    at: dict[str, Any],
    cause: Cause,
    late: Sequence[int],
    mine: float,
    theirs: float,
    where: str,
) -> Seen:
    pauses = query(sql.PAUSES, {**at, "ranks": list(late)})
    text = f"it collects garbage for {mine / 1e6:.1f} ms a step, the others for {theirs / 1e6:.1f} ms"
    place = ""
    if len(pauses["pauses"]) and int(pauses["pauses"][0]):
        text += f": {int(pauses['pauses'][0])} pauses of {float(pauses['usual_ns'][0]) / 1e6:.1f} ms were seen"
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
    told: Evidence = {"text": text, "sql": sql.shown(sql.PAUSES, {**at, "ranks": list(late)})}
    return Seen(replace(cause, kind="gc_pause", text=text, known=True), [told], action, "stack")


def _contention(
    waits: Mapping[str, NDArray[Any]],
    usage: Mapping[str, NDArray[Any]],
    at: dict[str, Any],
    cause: Cause,
    late: Sequence[int],
    step_ns: float,
    where: str,
    kind: str,
) -> Seen:
    share = "runqueue_share" if kind == "host_contention" else "io_share"
    mine, theirs = (part * step_ns for part in excess(waits, share, late) or (0.0, 0.0))
    what = "for a free CPU" if kind == "host_contention" else "for a disk or its memory to be read back"
    text = f"a thread of it waits {mine / 1e6:.1f} ms a step {what}, against {theirs / 1e6:.1f} ms"
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
    told: Evidence = {"text": text, "sql": sql.shown(sql.HOST_TIME, at)}
    return Seen(replace(cause, kind="host_contention", text=text, known=True), [told], action)


def _place(
    stacks: StackReader | None,
    at: dict[str, Any],
    cause: Cause,
    late: Sequence[int],
    others: Sequence[int],
    late_ns: float,
    step_ns: float,
) -> Seen:
    """Where the late ranks' code spends the time, if it is the CPU's."""
    on_cpu = cause.kind != "compute_straggler" or cause.phase
    if stacks is None or not on_cpu:
        return Seen(cause, [])
    found = stacks.excess(late, others, at["from_ns"], at["to_ns"])
    scale = step_ns / max(at["to_ns"] - at["from_ns"], 1)
    if not found or found[0].excess_ns * scale < HALF * late_ns:
        return Seen(cause, [])
    first = found[0]
    text = f"its stacks differ most from the others' in {label(first.frame, lines=True)}: "
    more = f"{first.excess_ns * scale / 1e6:.1f} ms a step more"
    if max(first.share, first.others) <= 1:
        text += f"{first.share:.0%} of its time, {first.others:.0%} of theirs, {more}"
    else:
        # Several threads or workers are there at once: their times add up to more than the time that passes.
        threads = [f"{share:.1f}" for share in (first.share, first.others)]
        text += f"in {threads[0]} threads or workers at once, in {threads[1]} of the others', {more} in all of them"
    if first.queued > first.share / 2:
        text += f"; for {first.queued / first.share:.0%} of that it is ready to run, and no CPU is free"
    evidence: list[Evidence] = [{"text": text, "sql": sql.shown(sql.PLACES, at)}]
    action = f"argus export svg --rank {late[0]} --kind all --diff rank=others -o diff.svg shows what it does more."
    return Seen(cause, evidence, action, "stack")


def explain_jitter(query: sql.Query, params: Mapping[str, Any], finding: Finding, steps: int) -> None:
    """Turns the jitter of a rank into ``gc_pause`` where its garbage collections take half of the time that is lost.

    Args:
        query: Runs SQL with parameters.
        params: job, run, first, last.
        finding: Of kind jitter, its share in ns a step. Changed in place.
        steps: How many steps it was told from.
    """
    if finding["kind"] != "jitter" or not finding["ranks"]:
        return
    at = {**params, "first": finding["steps"][0], "last": finding["steps"][1]}
    span = query(sql.SPAN_NS, at)
    if not len(span["end_ns"]) or int(span["steps"][0]) == 0:
        return
    at |= {"ranks": finding["ranks"], "from_ns": int(span["begin_ns"][0]), "to_ns": int(span["end_ns"][0])}
    pauses = query(sql.PAUSES, at)
    if not len(pauses["pauses"]) or float(pauses["total_ns"][0]) < HALF * finding["share"] * steps:
        return
    finding["kind"], finding["level"] = "gc_pause", "stack"
    text = (
        f"it collected garbage {int(pauses['pauses'][0])} times in that time, "
        f"for {float(pauses['usual_ns'][0]) / 1e6:.1f} ms each"
    )
    if pauses["function"][0]:
        frame = Frame("python", pauses["function"][0], pauses["file"][0], int(pauses["line"][0]))
        text += f", most in {label(frame, lines=True)}"
    finding["evidence"].append({"text": text, "sql": sql.shown(sql.PAUSES, at)})
    finding["action"] = (
        f"Let all ranks collect garbage in the same steps (gc.disable(), and gc.collect() every so many steps), or let "
        f"rank {finding['ranks'][0]} keep fewer objects (gc.freeze() after the setup)."
    )
