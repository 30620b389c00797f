"""A job that stopped making steps: since when, in which collective, who did not come to it, and where those are.

Each communicator has a first collective that not all of its ranks called: the one that the others wait in. A rank that
is missing in one communicator, and itself waits for somebody in another one, is a victim; those that wait for
nobody are to be looked at. What is read are the last calls of each rank: the work does not grow with the job's past.

Silence alone is not a hang: what was not observed throughout is unknown, and ranks whose threads compute or move go on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.case import Case
from argus.diagnose.causes.activity import COMPUTES, activities, describe
from argus.diagnose.causes.stacks import ROLES, Place, StackReader, compare
from argus.diagnose.iteration.wavefront import Node, ends_of
from argus.diagnose.read import queries
from argus.diagnose.read.observed import Observed, Silence, on_cpus_alone, silence
from argus.diagnose.read.query import Query, runnable_sql
from argus.diagnose.suspect import Suspect
from argus.diagnose.verdict import Collective, Evidence
from argus.model.units import duration, elapsed, named_hosts, rank_text, ranks_text
from argus.semantics.stacks.stack import label

SEEN_S = 5.0
"""When Argus looked last is in the store so much later, s: it is noted every 4 s (argus.live.tracer.COVERAGE_S), and
written within a second."""
HANG_STEPS = 20
"""Silence of so many typical steps."""
SURE, UNSURE = 0.9, 0.5
"""Confidence where the missing ranks are known, and where they are not."""
PAUSE_S = 5.0
"""Silence that keeps a verdict from being "healthy": more than the delay with which steps reach the store (2 s)."""
LOOK_BACK_S = 600.0
"""Calls so long before the last step count: ranks that run ahead of others do so by less."""
PLACES_S = 15.0
"""Where threads are is read from the last so many seconds: more than pass between two reports of waits (10 s)."""
MISSING, PEERS = 8, 16
"""So many of the missing ranks' stacks are compared, and of the others'."""


@dataclass(frozen=True)
class Stuck:
    """A collective that some ranks of a communicator have called and others have not.

    Attributes:
        group: The communicator.
        seq: The collective's number in it.
        came, missing: Ranks.
    """

    group: int
    seq: int
    came: tuple[int, ...]
    missing: tuple[int, ...]


def stuck_calls(groups: Sequence[int], ranks: Sequence[int], last: Sequence[int]) -> list[Stuck]:
    """The first collective of each communicator that not all of its ranks called, where there is one.

    Args:
        groups, ranks, last: The number of the last collective that each rank called in each of its communicators.

    Returns:
        Those that the most ranks wait in first.
    """
    by_group: dict[int, dict[int, int]] = {}
    for group, rank, seq in zip(groups, ranks, last, strict=True):
        by_group.setdefault(int(group), {})[int(rank)] = int(seq)
    stuck = []
    for group, members in by_group.items():
        least = min(members.values())
        came = tuple(sorted(rank for rank, seq in members.items() if seq > least))
        if came:
            stuck.append(Stuck(group, least + 1, came, tuple(sorted(members.keys() - set(came)))))
    return sorted(stuck, key=lambda one: (-len(one.came), one.group))


def stuck_transfers(columns: Mapping[str, NDArray[Any]]) -> list[Stuck]:
    """Sends and receives that one rank called and the other did not.

    Args:
        columns: As :data:`argus.diagnose.read.queries.LAST_TRANSFERS` returns them.

    Returns:
        One for each rank that waits for another, with -1 as its number.
    """
    names = ("comm_group", "rank", "comm_rank", "peer", "sent", "received")
    rows = list(zip(*(columns[name].tolist() for name in names), strict=True))
    ranks = {(group, place): rank for group, rank, place, *_ in rows}
    calls = {(group, place, peer): (sent, received) for group, _, place, peer, sent, received in rows}
    stuck = []
    for group, rank, place, peer, sent, received in rows:
        there, back = calls.get((group, peer, place), (0, 0))
        if (group, peer) in ranks and (received > there or sent > back):
            stuck.append(Stuck(group, -1, (rank,), (ranks[group, peer],)))
    return stuck


def root_causes(stuck: Sequence[Stuck]) -> tuple[list[int], bool]:
    """The ranks that others wait for, and that wait for nobody themselves.

    Returns:
        The ranks; and whether there are none, so that some wait for one another: then these, and not who only waits for
        them.
    """
    missing = {rank for one in stuck for rank in one.missing}
    waiting = {rank for one in stuck for rank in one.came}
    if roots := sorted(missing - waiting):
        return roots, False
    edges: dict[Node, set[Node]] = {}
    for one in stuck:
        for rank in one.came:
            edges.setdefault(rank, set()).update(one.missing)
    circles = {node for end in ends_of(edges) for node in end if isinstance(node, int)}
    return sorted(circles), bool(circles)


def not_downstream(roots: Sequence[int], stuck: Sequence[Stuck], columns: Mapping[str, NDArray[Any]]) -> list[int]:
    """Of ranks that others wait for, those whose neighbours in the pipeline wait for nobody else: one that does has
    nothing to hand on. All of them, if that leaves none.

    Args:
        roots: As :func:`root_causes` returns them.
        stuck: What ranks wait in.
        columns: As :data:`argus.diagnose.read.queries.LAST_TRANSFERS` returns them.
    """
    names = ("comm_group", "rank", "comm_rank", "peer")
    rows = list(zip(*(columns[name].tolist() for name in names), strict=True))
    ranks = {(group, place): rank for group, rank, place, _ in rows}
    missed: dict[int, set[int]] = {}
    for one in stuck:
        for rank in one.came:
            missed.setdefault(rank, set()).update(one.missing)

    def waited_for(rank: int) -> set[int]:
        """Whom a rank waits for, directly or since those it waits for wait for them."""
        reached: set[int] = set()
        ahead = [rank]
        while ahead:
            fresh = missed.get(ahead.pop(), set()) - reached
            reached |= fresh
            ahead += fresh
        return reached

    left = set(roots)
    for group, rank, _, peer in rows:
        # Around the ring of an interleaved pipeline a neighbour may wait for what the rank itself did not hand on.
        held = waited_for(ranks[group, peer]) if rank in left and (group, peer) in ranks else set()
        if held and rank not in held:
            left.discard(rank)
    return sorted(left) or list(roots)


@dataclass(frozen=True)
class _Silent:
    """A job that has been silent for long.

    Attributes:
        params: job, run, last; since_ns: from when on its last calls are read.
        silent_s: How long.
        seen: How much of it was observed.
        from_ns, to_ns: The part of it in which threads are compared.
        step_ns: A typical step.
        hosts: By rank.
        gone: Ranks without a process.
    """

    params: dict[str, Any]
    silent_s: float
    seen: Silence
    from_ns: int
    to_ns: int
    step_ns: float
    hosts: dict[int, str]
    gone: list[int]

    @property
    def alive(self) -> list[int]:
        return sorted(self.hosts.keys() - set(self.gone))


def detect(case: Case) -> list[Suspect]:
    """The hang that a job is in, if its last moments were asked for."""
    if not case.asked.to_the_end:
        return []
    step_ns = float(np.median(case.durations))
    hang, case.notes.doubt = find_hang(case.query, case.params, step_ns, case.asked.hang_after_s, case.stacks)
    return [] if hang is None else [hang]


def find_hang(
    query: Query, params: dict[str, Any], step_ns: float, after_s: float, stacks: StackReader | None = None
) -> tuple[Suspect | None, str]:
    """Whether the job had stopped when Argus last looked at it.

    Silence counts only of signals that were observed throughout it. Ranks whose threads compute, or are now here and
    now there, do not hang (:mod:`argus.diagnose.causes.activity`); nor does a job that nobody waits for and that waits
    for neither a GPU, other ranks, data nor a disk: it is idle.

    Args:
        query: Runs SQL with parameters, returns columns.
        params: job, run, first, last.
        step_ns: A typical step.
        after_s: Silence that counts.
        stacks: Where threads were; None: nobody knows.

    Returns:
        The hang, if it had; and otherwise a sentence on why its last moments are in doubt (empty: it went on, every
        process of it had ended, or nothing shows when Argus last looked, as in an imported job).
    """
    seen = query(queries.LAST_LOOK, params)
    looked, stepped, called = (int(seen[name][0]) for name in ("looked_ns", "stepped_ns", "called_ns"))
    if looked == 0:
        return None, ""
    states = query(queries.STATES, params)
    gone = states["rank"][states["state"] == "exited"].astype(np.int64).tolist()
    if not len(states["rank"]) or len(gone) == len(states["rank"]):
        return None, ""  # it ended
    last_ns, window = max(stepped, called), looked - int(PLACES_S * 1e9)
    alive = sorted(set(states["rank"].astype(np.int64).tolist()) - set(gone))
    silent_s, stepless_s = (looked - last_ns) / 1e9, (looked - stepped) / 1e9
    usual_s = HANG_STEPS * step_ns / 1e9
    # Who has no process any more will never come: the others need not be waited for so long.
    least_s = max(min(after_s, PAUSE_S) if gone else after_s, usual_s)
    if silent_s < least_s:
        if gone and len(gone) < len(states["rank"]):
            return (
                None,
                f"{ranks_text(sorted(gone))} had no process any more when Argus looked last, while others ran on",
            )
        if stepless_s < max(PAUSE_S, usual_s):
            return None, ""
        doing = "and no call was made" if silent_s > stepless_s / 2 else "though calls go on (an evaluation? a change?)"
        activity = activities(
            query, params, alive[:: max(1, len(alive) // PEERS)][:PEERS], max(last_ns, window), looked
        )
        threads = sorted(activity.values(), key=lambda one: (not one.progresses, one.rank))
        return None, f"{_no_step(stepless_s, step_ns)}, {doing}" + (f": {describe(threads)}" if threads else "")
    observed = Observed(query, params)
    silent = _Silent(
        {**params, "since_ns": max(0, stepped - int(LOOK_BACK_S * 1e9))}, silent_s,
        silence(query, params, observed, alive, last_ns, looked),
        max(last_ns, window), looked + int(PAUSE_S * 1e9), step_ns,
        {int(rank): str(host) for rank, host in zip(states["rank"], states["host"], strict=True)}, sorted(gone),
    )  # fmt: skip
    missing = _find_missing(query, silent, observed)
    if doubt := _doubt(query, silent, missing, least_s, looked):
        return None, f"{_no_step(stepless_s, step_ns)}: {doubt}"
    return _suspect(query, silent, missing, stacks), ""


def _no_step(seconds: float, step_ns: float) -> str:
    return f"no step was seen for the last {elapsed(seconds)} ({seconds * 1e9 / step_ns:.0f} usual steps)"


@dataclass(frozen=True)
class _Missing:
    """Whom a silent job waits for.

    Attributes:
        ranks: Those; empty: nobody is missing in a collective.
        circle: They wait for one another.
        stuck: The collectives that somebody did not come to.
        handed: Sends and receives that one of two ranks did not call.
    """

    ranks: list[int]
    circle: bool
    stuck: list[Stuck]
    handed: list[Stuck]


def _find_missing(query: Query, silent: _Silent, observed: Observed) -> _Missing:
    """Whom the others wait for, by the collectives of ranks whose collectives were all observed."""
    params = silent.params
    last_ns = int(silent.from_ns)
    unknown = [rank for rank in silent.hosts if observed.until("collectives", last_ns, [rank])[0] <= last_ns]
    calls = query(queries.LAST_CALLS, params)
    transfers = query(queries.LAST_TRANSFERS, params)
    if unknown:
        calls, transfers = (_without(columns, unknown) for columns in (calls, transfers))
    stuck = stuck_calls(calls["comm_group"].tolist(), calls["rank"].tolist(), calls["seq"].tolist())
    missing, circle = root_causes(stuck)
    # Stages wait for one another by sends and receives: who is missed may wait for such a one.
    handed = stuck_transfers(transfers)
    roots, around = root_causes([*stuck, *handed])
    if not around:
        roots = not_downstream(roots, [*stuck, *handed], transfers)
    if handed and not around and (not missing or set(roots) <= set(missing)):
        missing, circle = roots, False
    return _Missing(missing, circle, stuck, handed)


def _without(columns: Mapping[str, NDArray[Any]], ranks: Sequence[int]) -> dict[str, NDArray[Any]]:
    kept = ~np.isin(columns["rank"], list(ranks))
    return {name: values[kept] for name, values in columns.items()}


def _doubt(query: Query, silent: _Silent, missing: _Missing, least_s: float, looked: int) -> str:
    """Why a silence is not a hang, without a full stop; empty: it is one."""
    seen = silent.seen
    waited_for = [rank for rank in missing.ranks if rank not in silent.gone]
    if missing.ranks and not waited_for:
        return ""  # who has no process any more does nothing
    asked = waited_for or silent.alive[:: max(1, len(silent.alive) // PEERS)][:PEERS]
    asked = asked[: max(MISSING, PEERS)]
    activity = activities(query, silent.params, asked, silent.from_ns, looked)
    doing = sorted(activity.values(), key=lambda one: (not one.progresses, one.rank))
    going_on = [one for one in doing if one.progresses]
    unobserved = f"; {seen.unobserved}" if seen.unobserved else ""
    if going_on:
        others = f"others wait for {ranks_text(waited_for)}; " if waited_for and not missing.circle else ""
        return f"{others}{describe(going_on)}{unobserved}"
    what = describe(doing) if doing else "what its threads do is not known (no stacks are stored)"
    if seen.observed_s < least_s or (seen.unobserved and not missing.ranks) or (seen.windows and not doing):
        return f"{seen.unobserved or 'it is observed in windows only'}; {what}"
    if missing.ranks or silent.gone:
        return ""
    # Nobody is missed. Several ranks that make no collective any more all wait in one, unless they do something else.
    together = len(silent.hosts) > 1
    if not doing:
        return "" if together else what
    stays = [one for one in doing if one.waits_for or one.spins >= COMPUTES]
    if stays or (together and all(one.place is None for one in doing)):
        return ""
    return what


def _suspect(query: Query, silent: _Silent, missing_ranks: _Missing, stacks: StackReader | None) -> Suspect:
    """The hang, with who is missing, and where those are."""
    params, since, hosts = silent.params, silent.params, silent.hosts
    on_cpus = on_cpus_alone(query, params)
    its_gpu = "" if on_cpus else ", its GPU"
    missing, circle, stuck, handed = (
        missing_ranks.ranks,
        missing_ranks.circle,
        missing_ranks.stuck,
        missing_ranks.handed,
    )
    evidence: list[Evidence] = [
        {
            "text": f"no step has finished for {elapsed(silent.silent_s)}, where one took {duration(silent.step_ns)}",
            "sql": runnable_sql(queries.LAST_LOOK, {**params, "since_ns": 0}),
        }
    ]
    collective: Collective | None = None
    if missing:
        # The collective that these are missed in; if in several, the one that the most ranks wait in.
        held = [one for one in stuck if set(one.missing) & set(missing)]
        if not held:
            text = (
                f"{len({one.came for one in handed})} ranks wait for what {ranks_text(missing)} did not send or receive"
            )
            evidence.append({"text": text, "sql": runnable_sql(queries.LAST_TRANSFERS, since)})
        for one in held if circle else held[:1]:
            stuck_call, text, query_text = _collective(query, since, one, sorted(set(one.missing) & set(missing)))
            collective = collective or stuck_call
            evidence.append({"text": text, "sql": query_text})
        if circle:
            action = (
                f"{ranks_text(missing).capitalize()} wait for one another: do all ranks call their collectives in the "
            )
            action += "same order?"
        else:
            action = f"Look at {ranks_text(missing)}: what its processes are doing, its kernel log{its_gpu}."
            others = len(stuck) - len(held)
            if others:
                text = f"ranks of {others} other communicators wait, for ranks that wait themselves"
                evidence.append({"text": text, "sql": runnable_sql(queries.LAST_CALLS, since)})
    elif len(hosts) > 1:
        action = "All ranks came to the same call: look at the network"
        action += "." if on_cpus else " and at NCCL's own log (NCCL_DEBUG=INFO)."
    else:
        what = "the kernel log" if on_cpus else "its GPU (nvidia-smi -q, the kernel log)"
        action = f"Look at what {ranks_text(sorted(hosts))} waits for: its data, {what}."
    missing = missing or silent.gone
    dead = sorted(set(missing) & set(silent.gone))
    if dead:
        evidence.append(
            {"text": f"{ranks_text(dead)} has no process any more", "sql": runnable_sql(queries.STATES, params)}
        )
        action = f"Restart the job, and find out what ended {ranks_text(dead)}: its log, the kernel log (OOM, XID)."
    # The call that all ranks came to does not go on; nor does a rank that has no process any more.
    owner = "infrastructure" if dead or (not missing and len(hosts) > 1) else ""
    level = "phase"
    alone = sorted(hosts) if len(hosts) == 1 else []
    if not circle and (alive := [rank for rank in missing or alone if rank not in dead]):
        places = None
        window = silent.from_ns, silent.to_ns
        if stacks is not None:
            places = _places(stacks, alive, [rank for rank in sorted(hosts) if rank not in missing], window)
        if places:
            level = "stack"
            at = {**params, "ranks": alive[:MISSING], "from_ns": window[0], "to_ns": window[1]}
            evidence += [{"text": place.text, "sql": runnable_sql(queries.PLACES, at)} for place in places[:ROLES]]
            action = _action_at(places[0], alive, hosts, on_cpus=on_cpus)
            if not places[0].differs and places[0].peers:
                owner = "infrastructure"
        else:
            action += f" {_dump(query, params, alive)}"
    last = int(params["last"])
    return Suspect(
        kind="hang",
        ranks=missing or alone,
        hosts=list(dict.fromkeys(hosts[rank] for rank in missing or alone if rank in hosts)),
        since=last,
        last=last,
        phase="communication" if missing or not alone else "",
        lost_ns=silent.silent_s * 1e9,
        slowdown=1 + silent.silent_s * 1e9 / max(silent.step_ns, 1.0),
        confidence=SURE if missing and not circle else UNSURE,
        level=level,
        evidence=evidence,
        action=action,
        collective=collective,
        owner=owner,
    )


def _collective(query: Query, params: dict[str, Any], one: Stuck, missing: list[int]) -> tuple[Collective, str, str]:
    """A collective that waits for somebody: as columns, in words, and the query that shows it."""
    at = {**params, "group": one.group, "seq": one.seq}
    call = query(queries.STUCK_CALL, at)
    op = str(call["call"][0]) if len(call["call"]) and call["call"][0] else "a collective"
    known = query(queries.DIMENSION, at)["dimension"]
    dimension = str(known[0]) if len(known) else ""
    kind = f" ({dimension})" if dimension not in ("", "unknown", "world") else ""
    members = rank_text((*one.came, *one.missing)) if len(one.came) + len(one.missing) <= MISSING * 4 else ""
    whose = f"their communicator{kind}" + (f" of ranks {members}" if members else "")
    came = f"{len(one.came)} rank{'s' * (len(one.came) > 1)}"
    text = f"{came} called {op} {one.seq} of {whose}; {ranks_text(missing)} did not come"
    stuck = Collective(
        op=op, comm_group=str(one.group), seq=one.seq, came=list(one.came), missing=list(one.missing),
        dimension=dimension,
    )  # fmt: skip
    return stuck, text, runnable_sql(queries.STUCK_CALL, at)


def _places(stacks: StackReader, alive: list[int], others: list[int], window: tuple[int, int]) -> list[Place]:
    """Where the threads of missing ranks are that are elsewhere; where none is, their main threads."""
    chosen, peers = alive[:MISSING], others[:: max(1, len(others) // PEERS)][:PEERS]
    differing = [place for place in compare(stacks.threads([*chosen, *peers], *window), chosen) if place.frames]
    return [place for place in differing if place.differs] or [place for place in differing if place.role == "main"]


def _action_at(place: Place, alive: list[int], hosts: dict[int, str], *, on_cpus: bool) -> str:
    rank = place.ranks[0]
    where = label(place.frames[place.odd], lines=True)
    named = named_hosts([hosts.get(rank, "")])
    on = f" on {named[0]}" if named else ""
    if not place.differs and place.peers:
        text = (
            f"{ranks_text(alive).capitalize()}{on}: its threads are where those of the others are ({where}). Look "
            "at its "
        )
        return text + ("network." if on_cpus else "GPU (nvidia-smi -q, the kernel log: XID) and its network.")
    return (
        f"See why {ranks_text(list(place.ranks))}{on} stays in {where}: argus stacks --rank {rank} shows its threads."
    )


def _dump(query: Query, params: dict[str, Any], alive: list[int]) -> str:
    """How to get the stacks that are not stored."""
    known = query(queries.PROCESSES, {**params, "ranks": alive[:1]})
    if not len(known["pid"]):
        return "No stacks of it are stored: argus dump --pid PID shows where its threads are."
    return (
        f"No stacks of it are stored: argus dump --pid {int(known['pid'][0])} on {known['host'][0]} shows where its "
        "threads are now."
    )
