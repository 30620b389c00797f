"""The status of a verdict, and its reason: what it lacks, what a healthy job may hide, what it went through before."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.case import MIN_STEPS, MOST_CALLS, Case, Logged
from argus.diagnose.causes.activity import activities, describe
from argus.diagnose.iteration.hang import PLACES_S
from argus.diagnose.iteration.logged_growth import lacking
from argus.diagnose.iteration.regression import least_growth
from argus.diagnose.iteration.stalls import LONGEST_STALL
from argus.diagnose.ranks import links, recovered
from argus.diagnose.ranks.lateness import RECENT_STEPS, find_episode
from argus.diagnose.ranks.layout import stages_alike, unknown_partners
from argus.diagnose.ranks.phase_times import listed_phases
from argus.diagnose.read import gpu_times, queries, transfers
from argus.diagnose.read.query import Query
from argus.diagnose.verdict import Verdict
from argus.model.counters import describe_all
from argus.model.text import named
from argus.model.units import duration, listed, ranks_text

NOTHING = "nothing to diagnose"
"""How the reason begins where a trace holds nothing that could be diagnosed."""
EPISODE = 0.1
"""Share by which steps must have taken longer for a while to be mentioned, as of a regression."""
APART, MOSTLY = 1.5, 0.6
"""A rank comes last to a collective where any other is in it for so many times as long; it is mentioned if it does so
in such a share of them."""
MOST_MISSING = 1000
"""Ranks that are named one by one."""
_APART = re.compile(r"(.+?)#uid[0-9]{1,10}(?:#[0-9]{1,10})?", re.DOTALL)
"""A name under which a trace stored a job of which another user's had the name: what it is called, and whose it is."""
REFERENCES = 16
"""Processes of which it is asked what they do."""


def conclude(verdict: Verdict, case: Case, now_ns: float, world_size: int) -> None:
    """Fills in the status of a job that was compared, and the reason.

    Args:
        verdict: With its findings and slowdown; changed in place.
        case: The job.
        now_ns: What a step takes.
        world_size: Ranks of the job, by its launcher; 0: unknown.
    """
    notes, logged = case.notes, case.notes.logged
    ranks, compared = verdict["ranks"], case.lateness is not None or logged is not None
    trouble = _trouble(case, now_ns)
    if verdict["findings"]:
        verdict["status"] = "degraded"
        known = compared or is_alone(case.query, case.params, ranks, world_size)
        verdict["reason"] = trouble if known else f"nothing is known of who comes late: {trouble or notes.why_not}"
        if logged is not None:
            verdict["reason"] = _joined(verdict["reason"], logged.note)
    else:
        verdict["slowdown"] = 1.0
        if trouble or notes.blurred:
            verdict["reason"] = _joined(notes.doubt, notes.blurred, trouble)
        elif not compared and not notes.doubt and is_alone(case.query, case.params, ranks, world_size):
            verdict["status"] = "healthy"
            steady = f"one rank, so there is nothing to compare it with; a step takes {duration(now_ns)}"
            verdict["reason"] = _joined(steady, notes.long_steps, notes.more_work)
        elif not compared and not notes.doubt and (alike := stages_alike(case)) and world_size <= ranks:
            verdict["status"] = "healthy"
            past = notes.recovered or recovered.clause(case)
            verdict["reason"] = _joined(alike, notes.long_steps, notes.more_work, past)
        elif not compared or notes.doubt:
            verdict["reason"] = notes.doubt or notes.why_not
        elif case.lateness is None and logged is not None and logged.blind:
            verdict["reason"] = logged.note
        elif world_size > ranks:
            verdict["reason"] = f"{ranks} of {world_size} ranks were traced, and none of them holds up the others"
        elif case.lateness is None and logged is not None and verdict["coverage"]["dropped"]:
            lost = describe_all(verdict["coverage"]["dropped"])
            verdict["reason"] = f"nothing slows the job down in the rows that count, but others were left out: {lost}"
        elif unknown := unknown_partners(case):
            verdict["reason"] = unknown
        elif missing := _missing(case):
            verdict["reason"] = missing
        else:
            verdict["status"], verdict["reason"] = "healthy", _of_healthy(case, now_ns)
    verdict["reason"] = _joined(verdict["reason"], notes.history)
    verdict["reason"] = _joined(verdict["reason"], _of_several_users(case))
    if case.across is not None and case.across.not_stored:
        note = f"what is known of the hosts' clocks could not be stored: {case.across.not_stored}"
        verdict["reason"] = _joined(verdict["reason"], note)


def _of_several_users(case: Case) -> str:
    """That ranks may be another job's, to which somebody gave the same name and run on another node, or that others of
    the job have another name: where another user's job had it first, a trace puts the user's number behind it."""
    users = case.query(queries.RANK_USERS, case.params)
    apart = _stored_apart(case, users["uid"].tolist())
    if len(users["uid"]) < 2:
        return apart
    each = [f"uid {uid} on {listed(hosts)}" for uid, hosts in zip(users["uid"].tolist(), users["hosts"], strict=True)]
    several = f"ranks of several users are stored under this name ({'; '.join(each[:4])}): are all of them this job's?"
    return _joined(several, apart)


def _stored_apart(case: Case, users: list[int]) -> str:
    if not users:
        return ""
    stored = _APART.fullmatch(str(case.params["job"]))
    found = case.query(queries.RANKS_APART, {**case.params, "name": stored[1] if stored else case.params["job"]})
    each = [
        f"ranks of uid {uid} on {listed(hosts)} are stored as '{named(str(job))}'"
        for uid, job, hosts in zip(*(found[one].tolist() for one in ("uid", "job", "hosts")), strict=True)
    ]
    why = ": where another user's job has the name, a job is stored under another one"
    return ", ".join(each[:4]) + why if each else ""


def name_failed(verdict: Verdict, failed: Iterable[str]) -> None:
    """Says what could not be examined, for a defect of Argus, and counts it. What was not examined is not healthy.

    Args:
        verdict: Changed in place.
        failed: As of :class:`argus.diagnose.case.Case`.
    """
    names = [name.replace("_", " ") for name in dict.fromkeys(failed)]
    if not names:
        return
    if verdict["status"] != "hung":
        verdict["status"] = "degraded" if verdict["findings"] else "inconclusive"
        verdict["slowdown"] = verdict["slowdown"] if verdict["findings"] else 1.0
    text = f"{', '.join(names)} could not be examined (internal error)"
    verdict["reason"] = _joined(text, verdict["reason"])
    coverage = verdict["coverage"]
    coverage["complete"] = False
    coverage["dropped"]["detectors_failed"] = max(coverage["dropped"].get("detectors_failed", 0), len(names))


def _joined(*clauses: str) -> str:
    return "; ".join(filter(None, clauses))


def _trouble(case: Case, now_ns: float) -> str:
    """Why ranks of several hosts cannot be compared; empty: they can, or there is one host."""
    if (across := case.across) is None:
        return ""
    by_gpus = case.gpus is not None and gpu_times.all_compared(case.gpus, set(case.hosts))
    if by_gpus and case.gpus is not None and case.transfers is not None:
        by_gpus = not transfers.without_partners(case.gpus, case.transfers, case.threshold)
    trouble = across.trouble(case.threshold * now_ns, clocks=not by_gpus)
    if case.lateness is not None:
        alone = sorted(set(case.hosts) - set(case.lateness.ranks.tolist()))
        if alone and not trouble and not by_gpus:
            return f"{ranks_text(alone)} could not be compared with others, which collectives are the same is not known"
    return trouble


def _of_healthy(case: Case, now_ns: float) -> str:
    notes, logged, across = case.notes, case.notes.logged, case.across
    past = notes.recovered or recovered.clause(case)
    if not past and case.lateness is not None:
        past = _history(case)
    elif not past and logged is not None:
        past = logged.note
    agreement = across.agreement(across.names[:1], across.names) if across is not None else ""
    inexact = across.trouble(case.threshold * now_ns) if across is not None else ""
    if inexact:
        agreement = f"by what their GPUs did all ranks are alike; {inexact}"
    longer, usual = _longer_for_a_while(case)
    reason = _joined(notes.long_steps, notes.more_work, past or longer) or agreement
    if not case.asked.whole:
        return reason
    small = _too_small(usual, logged.least if logged is not None else "")
    return _joined(reason, links.without_like(case), small, _inside(logged))


def _inside(logged: Logged | None) -> str:
    """Where a slow rank would not show, however slow, a clause: inside timers of computing that contain the wait;
    empty: it would, or nothing is known of ranks."""
    if logged is None or not logged.partial or not logged.least:
        return ""
    contain = "contains" if len(logged.waits) == 1 else "contain"
    return (
        f"{listed_phases(logged.waits)} {contain} the wait for other ranks, and a rank that is slower inside would not "
        "show"
    )


def _longer_for_a_while(case: Case) -> tuple[str, NDArray[np.float64]]:
    """A clause on steps that took longer for a while, whoever it was, and no longer do, empty: none did; and the other
    steps' times, ns."""
    durations, numbers = case.durations, case.numbers
    newest = float(np.median(durations[-RECENT_STEPS:]))
    episode = find_episode(durations >= (1 + EPISODE) * newest, RECENT_STEPS)
    if episode is None or episode[1] > len(durations) - RECENT_STEPS:
        return "", durations
    inside = slice(*episode)
    took = float(np.median(durations[inside]))
    begin, end = int(numbers[episode[0]]), int(numbers[episode[1] - 1])
    text = f"steps {begin} to {end} took {duration(took)}, {took / newest:.2f}x what steps take since"
    return f"{text}; who was behind that is not known", np.delete(durations, inside)


def _too_small(durations: NDArray[np.float64], least: str) -> str:
    """What a healthy job may hide: how much longer steps could have become without that being reported for sure.

    Args:
        durations: Step times, ns.
        least: The same of ranks, a clause; empty: unknown.
    """
    growth = least_growth(durations)
    text = f"growth of the newer half's steps by less than {growth:.0%} may have been missed"
    if not np.isfinite(growth):
        text = f"in {len(durations)} steps a change may have been missed unless the GPUs' own times show it, too"
    return f"{text}, as may {least}" if least else text


def _missing(case: Case) -> str:
    """That ranks between others are not stored, or not in the newest steps of a log, a clause; empty: none lack. Ranks
    before the first one may be another job's, or numbers may begin at 1."""
    ranks = sorted(case.hosts)
    logged = case.notes.logged
    if logged is not None and (unseen := logged.unseen.above(ranks[0])):
        return lacking(unseen, "in the log of the newest steps")
    gaps = [range(low + 1, high) for low, high in pairwise(ranks) if high > low + 1]
    if not gaps:
        return ""
    if (number := sum(map(len, gaps))) > MOST_MISSING:
        return f"{number} of ranks {ranks[0]} to {ranks[-1]} are not stored"
    return lacking([rank for gap in gaps for rank in gap], f"among those stored ({ranks[0]} to {ranks[-1]})")


def is_alone(query: Query, params: Mapping[str, Any], ranks: int, world_size: int) -> bool:
    """Whether a rank is a whole job: its launcher names no others, and it never communicated. An imported file may
    be one rank's of many, unless it states how many there are."""
    traced = int(query(queries.LAST_LOOK, params)["looked_ns"][0]) > 0
    if ranks != 1 or world_size > 1 or not (traced or world_size == 1):
        return False
    return int(query(queries.ALIGNMENT, params)["ranks"][0]) == 0


def without_steps(query: Query, params: Mapping[str, Any], seen: Mapping[str, NDArray[Any]]) -> str:
    """Why a trace holds no step, and what its processes did instead; empty: nothing more is known."""
    states = query(queries.STATES, params)
    looked = int(seen["looked_ns"][0])
    if not looked or int(seen["called_ns"][0]) or not np.any(states["state"] == "traced"):
        return ""
    ranks = states["rank"].astype(np.int64).tolist()
    activity = activities(query, params, ranks[:REFERENCES], looked - int(PLACES_S * 1e9), looked)
    doing = sorted(activity.values(), key=lambda one: (not one.progresses, one.rank))
    many = f"{len(ranks)} processes" if len(ranks) > 1 else "1 process"
    text = f"{many} made no CUDA or NCCL call while they were traced" if len(ranks) > 1 else (
        f"{many} made no CUDA or NCCL call while it was traced"
    )  # fmt: skip
    if any(one.progresses for one in doing):
        return f"no training step was seen: {text}; {describe([one for one in doing if one.progresses])}"
    probed = bool(np.any(query(queries.LIBRARIES, params)["libraries"] > 0))
    if (
        doing
        and not probed
        and not any((one.place is not None and one.place.kind == "python") or one.waits_for for one in doing)
    ):
        return f"{NOTHING}: {text}, ran no Python and computed nothing; {describe(doing)}"
    return f"{text}: " + (describe(doing) if doing else "they hang, wait or idle")


def waits_least(query: Query, params: Mapping[str, Any]) -> str:
    """Which rank the others wait for, by the collectives that NCCL's Inspector logged; empty: none stands out.

    Who comes last to a collective waits for nobody, and is in it for the shortest time.
    """
    rows = query(queries.WAITS_LEAST, {**params, "apart": APART})
    if not len(rows["rank"]):
        return ""
    group, rank, clear = (rows[name][0] for name in ("comm_group", "rank", "clear"))
    many = int(rows["collectives"][rows["comm_group"] == group].sum())
    if many < MIN_STEPS or clear < MOSTLY * many:
        return ""
    return (
        f"rank {int(rank)} waits least in {int(clear)} of {many} logged collectives "
        f"({duration(float(rows['least_ns'][0]))}, the others {duration(float(rows['others_ns'][0]))}): it comes last "
        "to them"
    )


def _history(case: Case) -> str:
    """A sentence on what a job that is healthy now went through before; empty: nothing."""
    query, params, numbers, durations, threshold = case.query, case.params, case.numbers, case.durations, case.threshold
    # Ranks' times may be so much off one another; so many steps are read at most.
    blur_ns = case.across.worst_ns if case.across is not None else 0
    reach = max(case.reach, int(MOST_CALLS / max(case.calls, 1.0)))
    # Where steps took no longer for a while, nobody held them up.
    usual = float(np.quantile(durations, 0.1))
    longer = find_episode(durations >= (1 + threshold) * usual, LONGEST_STALL + 1)
    if longer is None:
        return ""
    begin = max(0, longer[0] - MIN_STEPS)
    end = min(longer[1] + MIN_STEPS, begin + reach, len(numbers))
    rows = query(queries.LAST, {**params, "first": int(numbers[begin]), "last": int(numbers[end - 1])})
    steps = rows["step"].astype(np.int64)
    at = np.minimum(np.searchsorted(numbers, steps), len(numbers) - 1)
    known = numbers[at] == steps
    steps, last, lead = steps[known], rows["rank"][known], rows["lead_ns"][known]
    slow = lead >= np.maximum(threshold * durations[at[known]], blur_ns)
    best: tuple[int, int, int] | None = None
    for rank in np.unique(last[slow]).tolist():
        episode = find_episode(slow & (last == rank), LONGEST_STALL + 1)
        if episode and (best is None or episode[1] - episode[0] > best[2] - best[1]):
            best = (rank, *episode)
    if best is None:
        return ""
    if steps[best[2] - 1] == numbers[-1]:
        late = f"rank {best[0]} is the last since step {steps[best[1]]}"
        return f"{late}, which costs too little of the newest steps to count"
    return f"rank {best[0]} held the job up in steps {steps[best[1]]} to {steps[best[2] - 1]}, and no longer does"
