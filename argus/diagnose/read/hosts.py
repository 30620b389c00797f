"""Makes a job of several hosts one: clocks that agree, communicators and step numbers that are the same everywhere.

Each tracing session knows its own host only, so all this is worked out where the rows of all come together. A job of
one host costs one query of a table with a row a host.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.read import queries
from argus.diagnose.read.ahead import Ahead
from argus.diagnose.read.query import Query, of_job
from argus.model.errors import ArgusError
from argus.model.records import COLLECTIVE
from argus.model.units import duration, listed
from argus.semantics.groups.clocks import (
    BY_GPU,
    BY_WAITS,
    CALL,
    METHODS,
    SYNCHRONISING,
    convert,
    estimate,
    likely,
    most_informative,
)
from argus.semantics.groups.communicators import VIOLATIONS, RankCalls, find_groups
from argus.store.open import Store
from argus.store.reader import query_columns
from argus.store.writer import Writer

Int = NDArray[np.int64]

ALIKE_NS = 50_000
"""Ranks of recordings whose clocks differ by no more are put on one host (argus.importers.recordings.clocks.AGREE_NS):
GPUs of a host, and hosts whose clocks happen to agree."""
MAX_CALLS = 2_000_000
"""Calls of all ranks that may be read: a second of CPU time of a query. Of longer runs some minutes are."""
MAX_MINUTES = 240
"""Minutes of which clocks are compared, of runs of however few calls."""
MIN_MINUTES = 4
"""Minutes that are read of any run: the newest two, the first, and one between. Six are no better: of 1,280 hosts whose
clocks drift steadily offsets differ by 1.4 µs at most, of 61 µs that they are known to."""
MAX_ROWS = 200_000
"""Collectives, counted once a host, that are compared at once; some five seconds for a million. Where there are more,
only the communicators are read that compare clocks best: those with the shortest collectives, by the GPUs' times
or else by one minute of calls."""
PER_MINUTE = 24
"""Collectives of each communicator and minute that are compared then, a hash of their number chooses: a line through so
many ends is off by a third of what one of them is."""
PER_GLANCE = 12
"""The same in the minute by which communicators are chosen."""
GLANCED = 8
"""Newest steps in which the time of each communicator's shortest collective is looked up."""
MEMBERS = 2
"""Ranks of a communicator and host whose calls are compared then: those that waited least in these steps."""
SHIFT_MINUTES = 3
"""Minutes of a run in which step numbers are compared, where not all are."""
MAX_GIVEN = 5_000
"""Lines of clocks that a query holds, where the store could not take them: some 300 KB."""
RECENT = 4096
"""Newest calls of a communicator that are lined up between hosts, as in groups.py."""
MIN_CALLS = 8
"""Fewer calls in common show nothing about steps."""
AGREE = 0.9
"""Share of the calls in common that must give the same difference of step numbers."""
APART = 0.25
"""Clocks that are off by more than this share of a step are not used: a host's ranks are compared with one another."""
CLOSE = 0.25
"""Wall clocks are taken to agree to this share of a step when communicators have to be found by their traffic. NTP
keeps hosts within some ms, steps take tens of ms to seconds."""
BIN_NS = 500_000
"""Width in which ends on two hosts count as the same, to find how their clocks differ roughly."""
SLACK_NS = 2 * BIN_NS
"""What clocks that are known so roughly may make a rank seem to leave too early."""
TOGETHER = 2.0
"""Ranks of one communicator leave it within this many times its shortest time of one another; see clocks.py."""


@dataclass(frozen=True)
class Shift:
    """What to add to a host's step numbers.

    Attributes:
        shift: Added, 0 where unknown.
        how: reference, calls, recorded (the recordings number them) or none.
        calls: Collectives in common that were compared.
        confidence: Share of them that agree.
        error: Why it is not known; empty: it is.
    """

    shift: int
    how: str
    calls: int
    confidence: float
    error: str = ""


@dataclass(frozen=True)
class Join:
    """A communicator that one host knows by its traffic only, and what it is on the others."""

    host: str
    comm_group: int
    joined_group: int
    seq_shift: int
    error: str = ""


@dataclass(frozen=True)
class Hosts:
    """The hosts of one run of a job.

    Attributes:
        names: The first is the reference.
        clocks: :data:`argus.semantics.groups.clocks.CLOCK` rows, ``host`` an index of ``names``.
        shifts: One a host.
        joins: Communicators that were joined, or could not be.
        step_ns: A usual step.
        not_stored: Why the store did not take this; empty: it did.
        stored: Whether it was offered to the store.
    """

    names: tuple[str, ...]
    clocks: NDArray[np.void]
    shifts: tuple[Shift, ...]
    joins: tuple[Join, ...]
    step_ns: float
    not_stored: str = ""
    stored: bool = False

    @cached_property
    def _errors(self) -> dict[str, int]:
        """The largest error of each host's clock, ns; -1: not known."""
        errors = {}
        for place, name in enumerate(self.names):
            own = self.clocks["error_ns"][self.clocks["host"] == place]
            errors[name] = -1 if (own < 0).any() else int(own.max(initial=0))
        return errors

    def params(self) -> dict[str, Any]:
        """What queries need besides job and run; see :func:`argus.diagnose.read.query.across`."""
        # The lowest is 0.
        shared = {"apart_ns": self.apart_ns, "most_shift": max(shift.shift for shift in self.shifts)}
        if self.stored and not self.not_stored:
            return {"across": "stored", **shared}
        # They travel with each query: of a long run on many hosts only the newest.
        kept = max(1, MAX_GIVEN // len(self.names))
        parts = [self.clocks[self.clocks["host"] == place][-kept:] for place in range(len(self.names))]
        for part in parts:
            part["since_ns"][0] = 0
        clocks = np.concatenate(parts)
        good = [join for join in self.joins if not join.error]
        return {
            "across": "given",
            **shared,
            "clock_host": [self.names[host] for host in clocks["host"].tolist()],
            "clock_ts": clocks["since_ns"].tolist(),
            "clock_at": clocks["at_ns"].tolist(),
            "clock_offset": clocks["offset_ns"].tolist(),
            "clock_drift": clocks["drift_ppb"].tolist(),
            "clock_error": clocks["error_ns"].tolist(),
            "shift_host": list(self.names),
            "shift": [shift.shift for shift in self.shifts],
            "shift_error": [shift.error for shift in self.shifts],
            "join_host": [join.host for join in good],
            "join_from": [join.comm_group for join in good],
            "join_to": [join.joined_group for join in good],
            "join_shift": [join.seq_shift for join in good],
        }

    @property
    def apart_ns(self) -> int:
        """Clocks that may be off by more are not compared."""
        return int(APART * self.step_ns)

    def error_ns(self, host: str) -> int:
        """By how much the host's clock may be off the reference's, ns; -1: not known, or more than is of use."""
        error = self._errors.get(host, -1)
        return error if error <= self.apart_ns else -1

    def on_reference(self, host: str, times: Int) -> Int:
        """A host's own times on the clock of the first one, ns; those of a host that is not known are left alone."""
        return convert(times, self._own[host]) if host in self._own else times

    def off_reference(self, host: str, at_ns: int) -> int:
        """What a host's own clock shows when the first one's shows ``at_ns``."""
        own = at_ns
        for _ in range(3):  # offsets change by ns while they are looked up
            own += at_ns - int(self.on_reference(host, np.array([own], np.int64))[0])
        return own

    def known_error_ns(self, host: str) -> int:
        """By how much a host's clock may be off, however much that is, ns; -1: not known."""
        return self._errors.get(host, -1)

    def shift_of(self, host: str) -> int:
        """What to add to a host's step numbers; 0: nothing, or it is not known."""
        return self.shifts[self.names.index(host)].shift if host in self.names else 0

    @cached_property
    def _own(self) -> dict[str, NDArray[np.void]]:
        return {name: self.clocks[self.clocks["host"] == place] for place, name in enumerate(self.names)}

    def between(self, some: Sequence[str], others: Sequence[str]) -> int:
        """By how much times of ``some`` and of ``others`` may be off at worst, ns. One host agrees with itself, and
        hosts whose clocks are not known are not compared with others at all."""
        worst = 0
        for a in set(some):
            for b in set(others) - {a}:
                errors = self.error_ns(a), self.error_ns(b)
                if min(errors) >= 0:
                    worst = max(worst, sum(errors))
        return worst

    @property
    def worst_ns(self) -> int:
        """By how much times of any two hosts that are compared may be off, ns."""
        errors = sorted(max(self.error_ns(name), 0) for name in self.names)
        return sum(errors[-2:])

    def trouble(self, least_ns: float, *, clocks: bool = True) -> str:
        """Why ranks of some hosts could not be compared with others', for people; empty: all could.

        Args:
            least_ns: Lateness that matters.
            clocks: Whether it matters that clocks are not known, or not exactly.
        """
        texts = []
        by_error: dict[str, list[str]] = defaultdict(list)
        for name, shift in zip(self.names, self.shifts, strict=True):
            if shift.error:
                by_error[shift.error].append(name)
        for error, names in by_error.items():
            texts.append(f"the steps of {listed(names, 4)} were left out: {error}")
        if not clocks:
            return "; ".join(texts)
        unknown = [name for name in self.names if self._errors[name] < 0]
        if unknown:
            texts.append(
                f"the clock of {listed(unknown, 4)} could not be compared with that of {self.names[0]} (no collectives "
                "whose ends on the GPU are known, see docs/clocks.md), so ranks were compared within a host only"
            )
        coarse = [name for name in self.names if 2 * self._errors[name] > least_ns]
        if coarse:
            worst = max(self._errors[name] for name in coarse)
            texts.append(
                f"the clocks of {listed(coarse, 4)} and {self.names[0]} agree only to {duration(worst)}, "
                "so that a rank that is late by less cannot be detected across hosts"
            )
        return "; ".join(texts)

    def agreement(self, some: Sequence[str], others: Sequence[str]) -> str:
        """How well the clocks of hosts agree, for people; empty: they are one host, or not compared."""
        worst, pair = -1, ("", "")
        for a in dict.fromkeys(some):
            for b in dict.fromkeys(others):
                errors = self.error_ns(a), self.error_ns(b)
                if a != b and min(errors) >= 0 and sum(errors) > worst:
                    worst, pair = sum(errors), (a, b)
        return f"clocks of {pair[0]} and {pair[1]} agree to {duration(worst)}" if worst >= 0 else ""


# ---- what is done with a store


def align_hosts(query: Query, job: str, run: int) -> Hosts | None:
    """Works out how the hosts of a run go together.

    Args:
        query: Runs SQL with parameters, returns columns.
        job: The job.
        run: Its tracing session.

    Returns:
        None: the run has one host, or its times did not come from clocks of several hosts (simulated, or logs without
        calls).
    """
    params: dict[str, Any] = {"job": job, "run": run}
    several = query(queries.SEVERAL, params)
    if not len(several["hosts"]) or int(several["hosts"][0]) < 2:
        return None
    recorded = bool(int(several["recorded"][0]))
    with Ahead(of_job(query)) as ahead:
        for text in (queries.HOSTS, queries.USUAL_STEP, queries.LOCAL_GROUPS, queries.WALLS, queries.EXTENT):
            ahead.start(text, params)
        aligned = _align(ahead, params, ALIKE_NS if recorded else 0)
    if aligned is None or not recorded:
        return aligned
    # The importer has numbered the steps of all ranks alike: a rank that shares no collective with others keeps them.
    kept = Shift(aligned.shifts[0].shift, "recorded", 0, 1.0)
    return replace(aligned, shifts=tuple(kept if shift.error else shift for shift in aligned.shifts))


def _align(query: Ahead, params: dict[str, Any], alike_ns: int = 0) -> Hosts | None:
    """:func:`align_hosts` of a run whose hosts have clocks of their own. ``alike_ns``: those of the ranks of one host
    may differ by so much."""
    of_rank = query(queries.HOSTS, params)
    place = dict[str, int]()
    for host, rank in zip(of_rank["host"].tolist(), of_rank["rank"].tolist(), strict=True):
        place.setdefault(str(host), int(rank))
    names, nodes = list(place), np.array(list(place.values()), np.int64)
    if len(names) < 2:
        return None
    usual = query(queries.USUAL_STEP, params)["step_ns"]
    step_ns = float(usual[0]) if len(usual) and np.isfinite(usual[0]) else 0.0
    joins = _join(query, params, names, step_ns)
    blank = Hosts(
        tuple(names),
        estimate(np.empty(0, CALL), len(names)),
        tuple(Shift(0, "none", 0, 0.0) for _ in names),
        tuple(joins),
        step_ns,
    )
    # Which communicators are one is determined first. Of clocks and steps nothing is known yet: one line stands for
    # them.
    first = replace(blank, names=blank.names[:1], clocks=blank.clocks[:1], shifts=blank.shifts[:1])
    asked = {**params, **first.params(), "ops": list(SYNCHRONISING)}
    spanning = query(queries.SPANNING, asked)
    wall_error_ns = _walls(query, params, names)
    if not len(spanning["comm_group"]):
        clocks = estimate(np.empty(0, CALL), len(names), wall_error_ns=wall_error_ns)
        return replace(blank, clocks=clocks, shifts=tuple(_shifts(None, names)))

    extent = _Extent.of(query, params)

    def compared(chosen: _Chosen) -> Hosts:
        sure = [minute for minute in chosen.minutes if extent.first <= minute <= extent.last]
        few = replace(chosen, minutes=_spread(sure, SHIFT_MINUTES), members=1) if chosen.part else chosen
        query.start(queries.STEPS_OF_CALLS, {**asked, **few.params()})
        calls = _calls(query, {**asked, **chosen.params()}, nodes, alike_ns)
        minutes = None if chosen.whole else np.array(chosen.minutes, np.int64) * 1_000_000_000
        steps = query(queries.STEPS_OF_CALLS, {**asked, **few.params()})
        clocks = estimate(calls, len(names), wall_error_ns=wall_error_ns, minutes=minutes)
        return replace(blank, clocks=clocks, shifts=tuple(_shifts(_by_place(steps, nodes), names)))

    connected = {str(host) for own in spanning["hosts"].tolist() for host in own}
    chosen = _choose(query, asked, names, nodes, spanning, extent, alike_ns=alike_ns)
    aligned = compared(chosen)
    if chosen.guessed and any(
        aligned.clocks["method"][aligned.clocks["host"] == place].max() > BY_GPU
        for place, name in enumerate(names) if name in connected
    ):  # fmt: skip
        chosen = _choose(query, asked, names, nodes, spanning, extent, alike_ns=alike_ns, guess=False)
        aligned = compared(chosen)
    if chosen.part and any(shift.error for name, shift in zip(names, aligned.shifts, strict=True)
                                     if name in connected):  # fmt: skip
        # Clocks that are minutes apart show other minutes at the same time.
        aligned = compared(replace(chosen, minutes=extent.minutes, whole=True))
    return aligned


@dataclass(frozen=True)
class _Chosen:
    """The calls that hosts are compared by.

    Attributes:
        groups: Communicators.
        strides: Of each of them: one of so many calls.
        minutes: In which the calls were made, as each host's clock has it: begins, s since 1970, ascending.
        whole: These are all minutes of the run.
        members: Ranks of each communicator and host that are compared. Of fewer than all it is not known who was the
            last, and so how long the others would have been in the call: clocks seem less exact than they are.
        ranks: Only these are compared; empty: all.
        part: These are not all calls.
        guessed: The communicators were chosen by how long their collectives take; whether their calls can be compared
            is not known.
    """

    groups: tuple[int, ...]
    strides: tuple[int, ...]
    minutes: tuple[int, ...]
    whole: bool
    members: int
    part: bool
    guessed: bool = False
    ranks: tuple[int, ...] = ()

    def params(self) -> dict[str, Any]:
        """What the queries need."""
        return {
            "groups": list(self.groups),
            "strides": list(self.strides),
            "minutes": list(self.minutes),
            "members": self.members,
            "chosen": list(self.ranks),
        }


ALL = 1 << 30
"""More ranks than a host has."""


@dataclass(frozen=True)
class _Extent:
    """How long a run is.

    Attributes:
        minutes: All that calls may be in, as any host's clock has it: begins, s since 1970, ascending.
        first, last: Those in which steps begin for sure: the last is whole, if there are two.
        calls: Of all ranks, roughly.
    """

    minutes: tuple[int, ...]
    first: int
    last: int
    calls: float

    @staticmethod
    def of(query: Query, params: Mapping[str, Any]) -> _Extent:
        rows = query(queries.EXTENT, params)
        first, last = int(rows["first_s"][0]), int(rows["last_s"][0])
        calls = float(rows["steps"][0]) * float(np.nan_to_num(rows["calls"][0]))
        # A host that is a little ahead; calls after the last whole step.
        return _Extent(tuple(range(max(first - 60, 0), last + 121, 60)), first, max(first, last // 60 * 60 - 60), calls)

    def minutes_read(self) -> tuple[int, ...]:
        """Minutes to look at. The newest half of them are next to one another: what the job does now is diagnosed."""
        count = len(self.minutes)
        most = int(np.clip(MAX_CALLS * count / max(self.calls, 1.0), MIN_MINUTES, MAX_MINUTES))
        newest = most // 2 + 2
        if most + 3 >= count:
            return self.minutes
        return (*_spread(self.minutes[1:-newest], most - most // 2), *self.minutes[-newest:])


def _choose(
    query: Ahead,
    asked: Mapping[str, Any],
    names: list[str],
    nodes: Int,
    spanning: Mapping[str, NDArray[Any]],
    run: _Extent,
    *,
    alike_ns: int = 0,
    guess: bool = True,
) -> _Chosen:
    """Which calls to read: all, or where these are too many, those of the most informative communicators. ``guess``:
    choose these by how long their collectives take, if that is known."""
    groups = spanning["comm_group"].astype(np.uint64).tolist()
    place = {name: i for i, name in enumerate(names)}
    hosts = [[place[str(host)] for host in own if str(host) in place] for own in spanning["hosts"].tolist()]
    minutes = run.minutes_read()
    whole = len(minutes) == len(run.minutes)
    shortest = {**asked, "groups": groups, "most": GLANCED}
    if guess and not whole:
        query.start(queries.SHORTEST_CALLS, shortest)
    firsts = np.unique(spanning["first_rank"]).tolist()
    rates = query(queries.CALL_RATES, {**asked, "groups": groups, "firsts": firsts, "minutes": list(minutes)})
    of_group = dict(zip(rates["comm_group"].tolist(), rates["calls"].astype(int).tolist(), strict=True))
    many = np.array([of_group.get(group, 0) for group in groups], np.int64)
    if whole and int(many @ [len(own) for own in hosts]) <= MAX_ROWS:
        return _Chosen(tuple(groups), (1,) * len(groups), minutes, whole, ALL, False)
    strides = np.maximum(1, many // (PER_MINUTE * len(minutes)))
    used = [i for i in range(len(groups)) if many[i] >= MIN_CALLS]
    best = _shortest(query(queries.SHORTEST_CALLS, shortest), {groups[i]: hosts[i] for i in used}) if guess else []
    guessed = bool(best)
    if not guessed:
        fewer = np.maximum(1, many // (PER_GLANCE * len(minutes)))
        one = _Chosen(tuple(groups), tuple(fewer.tolist()), (run.last,), False, 1, True)
        best = most_informative(_calls(query, {**asked, **one.params()}, nodes, alike_ns), len(names))
    kept = _connecting(groups, hosts, best)
    chosen = tuple(groups[i] for i in kept)
    last = _waited_for(query, asked, chosen) if guessed else ()
    return _Chosen(chosen, tuple(strides[kept].tolist()), minutes, whole, ALL, True, guessed, last)


def _shortest(rows: Mapping[str, NDArray[Any]], hosts: Mapping[int, list[int]]) -> list[int]:
    """The groups that should be most informative, by the times of their shortest collectives; empty: some of these
    are unknown. ``rows``: of :data:`argus.diagnose.read.queries.SHORTEST_CALLS`; ``hosts``: of each group, where its
    ranks are."""
    took = dict(zip(rows["comm_group"].tolist(), rows["shortest_ns"].tolist(), strict=True))
    if set(hosts) - set(took):
        return []
    return likely({group: (own, took[group]) for group, own in hosts.items()})


def _waited_for(query: Query, asked: Mapping[str, Any], groups: Sequence[int]) -> tuple[int, ...]:
    """Some ranks of each host that the others in the groups wait for: their times are the most informative. One that is
    always the last has to be among them, or everybody seems to leave as much later as it comes."""
    rows = query(queries.WAITED_FOR, {**asked, "groups": list(groups), "most": GLANCED, "members": MEMBERS})
    return tuple(rows["rank"].tolist())


def _connecting(groups: list[int], hosts: list[list[int]], best: Sequence[int]) -> list[int]:
    """Places of the ``best`` groups, and of as few others, the largest first, as make one of all hosts that some
    connect."""
    part = {host: host for own in hosts for host in own}

    def root(host: int) -> int:
        while part[host] != host:
            part[host] = host = part[part[host]]
        return host

    order = sorted(range(len(groups)), key=lambda i: (groups[i] not in best, -len(hosts[i])))
    kept = []
    for i in order:
        roots = {root(host) for host in hosts[i]}
        if groups[i] in best or len(roots) > 1:
            kept.append(i)
        for other in roots:
            part[other] = min(roots)
    return sorted(kept)


def _spread(some: Sequence[int], count: int) -> tuple[int, ...]:
    """So many of them, the first and the last among them."""
    if not some:
        return ()
    return tuple(some[i] for i in np.unique(np.linspace(0, len(some) - 1, count).round().astype(int)).tolist())


def prepare(store: Store, query: Query, job: str, run: int) -> Hosts | None:
    """:func:`align_hosts`, stored for whoever reads the views ``*_across``.

    A store that takes no rows is no reason not to go on: ``not_stored`` names the reason, and queries then carry the
    estimates themselves.
    """
    hosts = align_hosts(query, job, run)
    return None if hosts is None else store_hosts(store, hosts, job, run)


def store_hosts(store: Store, hosts: Hosts, job: str, run: int) -> Hosts:
    """Adds the estimates to ``clocks``, ``step_shifts`` and ``group_joins``, unless the newest there are the same.
    Returns them, with what came of it."""
    shared = {"job": job, "run": run}
    tables = _tables(hosts)
    if _stored_already(store, tables, shared):
        return replace(hosts, stored=True, not_stored="")
    writer, version = Writer(store, source="hosts"), time.time_ns()
    for table, columns in tables.items():
        writer.append(table, {**shared, **columns, "version": version})
    try:
        report = writer.close(timeout_s=5.0)
        why = (report.last_error or "it did not answer") if report.dropped else ""
    except ArgusError as failure:
        why = failure.message
    return replace(hosts, stored=True, not_stored=why.splitlines()[0] if why else "")


def _tables(hosts: Hosts) -> dict[str, dict[str, Any]]:
    """Columns of the estimates, by table."""
    clocks = hosts.clocks
    tables: dict[str, dict[str, Any]] = {
        "clocks": {
            "host": [hosts.names[host] for host in clocks["host"].tolist()],
            "reference": [hosts.names[0]] * len(clocks),
            "ts": clocks["since_ns"].copy(),
            "at": clocks["at_ns"].copy(),
            **{name: clocks[name].copy() for name in ("offset_ns", "drift_ppb", "error_ns", "calls")},
            "method": [METHODS[method] for method in clocks["method"].tolist()],
            "through": [hosts.names[t] if t >= 0 else "" for t in clocks["through"].tolist()],
        },
        "step_shifts": {
            "host": list(hosts.names),
            **{
                name: [getattr(shift, name) for shift in hosts.shifts]
                for name in ("shift", "how", "calls", "confidence", "error")
            },
        },
    }
    if hosts.joins:
        names = ("host", "comm_group", "joined_group", "seq_shift", "error")
        tables["group_joins"] = {name: [getattr(join, name) for join in hosts.joins] for name in names}
    return tables


def _stored_already(store: Store, tables: Mapping[str, Mapping[str, Any]], shared: Mapping[str, Any]) -> bool:
    """Whether the newest estimate of the run that the store has is this one: a diagnosis that is repeated finds
    the same."""
    try:
        for table, columns in tables.items():
            newest = query_columns(
                store,
                f"SELECT {', '.join(columns)} FROM {table} WHERE job = {{job:String}} AND run = {{run:UInt32}}"
                " AND version = (SELECT max(version) FROM clocks WHERE job = {job:String} AND run = {run:UInt32})",
                shared,
            )
            there = Counter(zip(*(_plain(newest[name]) for name in columns), strict=True))
            if there != Counter(zip(*(_plain(columns[name]) for name in columns), strict=True)):
                return False
    except ArgusError:
        return False
    return True


def _plain(column: NDArray[Any] | list[Any]) -> list[Any]:
    """Values as the store gives them back: it has shares in single precision."""
    values: list[Any] = column if isinstance(column, list) else column.tolist()
    return [float(np.float32(value)) if isinstance(value, float) else value for value in values]


# ---- clocks


def _walls(query: Query, params: Mapping[str, Any], names: list[str]) -> Int | None:
    try:
        rows = query(queries.WALLS, params)
    except ArgusError:
        return None  # a store of an older Argus, which may not be changed
    error_by_host = {str(host): int(error) for host, error in zip(rows["host"], rows["error_ns"], strict=True)}
    return np.array([error_by_host.get(name, -1) for name in names], np.int64)


def _by_place(rows: Mapping[str, NDArray[Any]], nodes: Int) -> dict[str, NDArray[Any]]:
    """Rows with the ``host`` that each is of, as a place in ``nodes``: the numbers of all hosts' first ranks,
    ascending. -1: none of them."""
    node = rows["node"].astype(np.int64)
    at = np.minimum(np.searchsorted(nodes, node), len(nodes) - 1)
    return {**rows, "host": np.where(nodes[at] == node, at, -1)}


def _calls(query: Query, params: Mapping[str, Any], nodes: Int, alike_ns: int = 0) -> NDArray[np.void]:
    """:data:`CALL` rows: by NCCL's kernels, and by waits where these do not cover all hosts. ``alike_ns``: as of
    :func:`_align`."""
    parts = []
    seen: set[int] = set()
    for text, method in ((queries.GPU_CALLS, BY_GPU), (queries.WAITED_CALLS, BY_WAITS)):
        if len(seen) == len(nodes):
            break
        rows = _by_place(query(text, params), nodes)
        part = np.zeros(len(rows["aligned_seq"]), CALL)
        part["host"] = rows["host"]
        part["group"], part["seq"], part["method"] = rows["comm_group"], rows["aligned_seq"], method
        for name in ("entry_ns", "end_ns", "took_ns"):
            part[name] = rows[name]
        part = _met(part[(part["host"] >= 0) & (part["took_ns"] >= 0)], alike_ns)
        parts.append(part[~np.isin(part["group"], _impossible(part))])
        seen |= set(np.unique(parts[-1]["host"]).tolist())
    return np.concatenate(parts)


def _met(calls: NDArray[np.void], alike_ns: int) -> NDArray[np.void]:
    """Calls that ranks of a host left before others of it had entered, by no more than their clocks may differ: then
    they met there, known to that difference. A short collective shows it, of a few microseconds."""
    early = calls["entry_ns"] - calls["end_ns"]
    met = (early > 0) & (early <= alike_ns)
    calls["took_ns"][met] = np.maximum(calls["took_ns"], early)[met]
    calls["entry_ns"][met] = calls["end_ns"][met]
    return calls


def _impossible(calls: NDArray[np.void]) -> NDArray[np.uint64]:
    """Groups that are none: on one clock, ranks of a host leave before others of it have entered."""
    groups, at = np.unique(calls["group"], return_inverse=True)
    broken = np.bincount(at, calls["end_ns"] < calls["entry_ns"], minlength=len(groups))
    return np.asarray(groups[broken > VIOLATIONS * np.bincount(at, minlength=len(groups))], np.uint64)


# ---- steps


def _shifts(rows: Mapping[str, NDArray[Any]] | None, names: list[str]) -> list[Shift]:
    """What to add to the steps of each host: the difference that most calls in common give, along the surest path.
    ``rows``: of :data:`argus.diagnose.read.queries.STEPS_OF_CALLS`, by :func:`_by_place`; None: there are none."""
    votes: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    if rows is not None and len(rows["step"]):
        host, group = rows["host"], rows["comm_group"]
        seq, step = rows["aligned_seq"].astype(np.int64), rows["step"].astype(np.int64)
        order = np.lexsort((seq, host, group))
        order = order[host[order] >= 0]
        for of_group in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
            parts = np.split(of_group, np.flatnonzero(np.diff(host[of_group])) + 1)
            # Sorted by host: the reference is the first, if it is there.
            hub = parts[0] if len(parts[0]) and host[parts[0][0]] == 0 else max(parts, key=len)
            for own in parts:
                if own is hub:
                    continue
                _, left, right = np.intersect1d(seq[hub], seq[own], return_indices=True)
                apart, times = np.unique(step[hub][left] - step[own][right], return_counts=True)
                a, b = int(host[hub[0]]), int(host[own[0]])
                for difference, count in zip(apart.tolist(), times.tolist(), strict=True):
                    votes[a, b][difference] += count
                    votes[b, a][-difference] += count
    out: dict[int, Shift] = {0: Shift(0, "reference", 0, 1.0)}
    why: dict[int, str] = {}
    reached = [0]
    ways: dict[int, list[tuple[int, int, Counter[int]]]] = defaultdict(list)
    for (here, other), count in votes.items():
        ways[here].append((sum(count.values()), other, count))
    for here in reached:
        for total, other, count in sorted(ways[here], key=lambda way: -way[0]):
            if other in out:
                continue
            difference, most = count.most_common(1)[0]
            share = most / total
            if total < MIN_CALLS:
                why[other] = f"only {total} collectives are in steps of it and of {names[here]}"
            elif share < AGREE:
                why[other] = (
                    f"the collectives do not agree how its steps line up with those of {names[here]} ({share:.0%})"
                )
            else:
                out[other] = Shift(out[here].shift + difference, "calls", total, min(share, out[here].confidence))
                reached.append(other)
    lowest = min(shift.shift for shift in out.values())
    unknown = f"no collective is known that ranks there and on {names[0]} took part in"
    return [
        replace(out[host], shift=out[host].shift - lowest)
        if host in out
        else Shift(0, "none", 0, 0.0, why.get(host, unknown))
        for host in range(len(names))
    ]


# ---- communicators


@dataclass(frozen=True)
class _Local:
    """A communicator as one host knows it, by one of its ranks."""

    host: str
    group: int
    rank: int
    made: bool
    nranks: int
    members: int
    rows: NDArray[np.void]
    """Its newest calls: :data:`COLLECTIVE`, ``seq`` as the host's ranks agree on it."""
    wait_ts: Int
    wait_ns: Int
    begun: Int
    """When each call's kernel began on the GPU, shape of ``rows``, ns; -1: not known."""
    done: Int

    @property
    def kind(self) -> tuple[int, ...]:
        """Equal for communicators that the same calls are made on again and again."""
        newer = self.rows[len(self.rows) // 2 :]
        codes = newer["count"].astype(np.int64) * 4096 + newer["call"].astype(np.int64) * 64 + newer["dtype"]
        values, uses = np.unique(codes, return_counts=True)
        return tuple(values[uses >= 3].tolist())

    def seen(self, clock_ns: int = 0) -> RankCalls:
        """What communicators are lined up from: times of the GPU where they are known, else of the CPU and its waits
        for the GPU."""
        known = self.done >= 0
        if np.mean(known) < 0.5:
            return RankCalls(self.rank, self.rows, self.wait_ts, self.wait_ns + SLACK_NS, clock_ns=clock_ns)
        ran = self.rows[known].copy()
        begun = self.begun[known]
        ran["ts_ns"] = begun
        ends = self.done[known] + SLACK_NS
        return RankCalls(self.rank, ran, begun, ends - begun, clock_ns=clock_ns, ends=ends)


def _join(query: Query, params: Mapping[str, Any], names: list[str], step_ns: float) -> list[Join]:
    """Joins communicators that no host saw made on all of its ranks."""
    rows = query(queries.LOCAL_GROUPS, params)
    seen: dict[int, list[int]] = defaultdict(list)
    for i, group in enumerate(rows["comm_group"].tolist()):
        seen[group].append(i)
    wanted = []
    for of_group in seen.values():
        members = sum(int(rows["members"][i]) for i in of_group)
        nranks = max(int(rows["nranks"][i]) for i in of_group)
        # One that several hosts saw made, and others did not, is detected by the first of them.
        if rows["joined_by"][of_group[0]] != "name" and nranks != members and (len(of_group) == 1 or nranks > members):
            wanted.append(min(of_group, key=lambda i: names.index(str(rows["host"][i]))))
    if len({rows["host"][i] for i in wanted}) < 2:
        return []
    locals_ = _read(query, params, rows, wanted)
    kinds: dict[tuple[int, ...], dict[str, list[_Local]]] = defaultdict(lambda: defaultdict(list))
    for local in locals_:
        if local.kind:
            kinds[local.kind][local.host].append(local)
    alone = len(kinds) == 1
    out: list[Join] = []
    for by_host in kinds.values():
        ordered = sorted(by_host, key=lambda host: (not any(one.made for one in by_host[host]), names.index(host)))
        base = by_host[ordered[0]]
        out += [Join(one.host, one.group, one.group, 0) for one in base if len(ordered) > 1]
        for host in ordered[1:]:
            out += _match(base, by_host[host], step_ns, alone)
    return out


def _read(query: Query, params: Mapping[str, Any], rows: Mapping[str, NDArray[Any]], wanted: list[int]) -> list[_Local]:
    ranks = [int(rows["first_rank"][i]) for i in wanted]
    comms = [int(rows["comm"][i]) for i in wanted]
    most = int(min(RECENT, max(64, MAX_ROWS // len(wanted))))
    asked = {**params, "ranks": ranks, "comms": comms, "most": most}
    calls = query(queries.NEWEST_CALLS, asked)
    waits = query(queries.NEWEST_WAITS, asked)
    ends = query(queries.NEWEST_ENDS, asked)
    _, op = np.unique(calls["op"].astype(str), return_inverse=True)
    _, dtype = np.unique(calls["dtype"].astype(str), return_inverse=True)
    out = []
    for i, rank, comm in zip(wanted, ranks, comms, strict=True):
        newest = np.flatnonzero((calls["rank"] == rank) & (calls["comm"] == comm))
        newest = newest[np.argsort(calls["seq"][newest], kind="stable")]
        own = np.zeros(len(newest), COLLECTIVE)
        own["ts_ns"], own["comm"], own["count"] = calls["ts_ns"][newest], comm, calls["count"][newest]
        own["call"], own["dtype"] = op[newest], dtype[newest]
        own["seq"] = calls["seq"][newest].astype(np.int64) + int(rows["seq_offset"][i])
        of_wait = waits["rank"] == rank
        begun, done = np.full(len(newest), -1, np.int64), np.full(len(newest), -1, np.int64)
        of_end = np.flatnonzero((ends["rank"] == rank) & (ends["comm"] == comm))
        _, here, there = np.intersect1d(calls["seq"][newest], ends["seq"][of_end], return_indices=True)
        begun[here], done[here] = ends["begun_ns"][of_end[there]], ends["done_ns"][of_end[there]]
        if not len(own):
            continue
        out.append(
            _Local(str(rows["host"][i]), int(rows["comm_group"][i]), rank,
                   rows["joined_by"][i] in ("unique_id", "split"), int(rows["nranks"][i]), int(rows["members"][i]),
                   own, waits["ts_ns"][of_wait].astype(np.int64), waits["duration_ns"][of_wait].astype(np.int64),
                   begun, done)
        )  # fmt: skip
    return out


def _match(base: list[_Local], own: list[_Local], step_ns: float, alone: bool) -> list[Join]:
    """Which of a host's communicators are which of another host's, all with the same calls."""
    fits: dict[tuple[int, int], tuple[int, float]] = {}
    errors: dict[int, str] = {}
    for i, b in enumerate(own):
        for j, a in enumerate(base):
            shift, error = _line_up(a, b, step_ns)
            if error:
                errors[i] = error
                continue
            off = _off(a, b, shift)
            if off >= 0 and off > TOGETHER:
                errors[i] = "ranks there do not leave it together with those of other hosts"
            elif off < 0 and not (
                len(base) == len(own) == 1 and (alone or a.members + b.members == max(a.nranks, b.nranks))
            ):
                errors[i] = (
                    "several communicators have equal calls, and without times of the GPU (CUPTI) they cannot "
                    "be distinguished"
                )
            else:
                fits[i, j] = shift, max(off, 0.0)
    out, taken = [], set()
    for i, b in enumerate(own):
        candidates = sorted((off, j, shift) for (k, j), (shift, off) in fits.items() if k == i)
        if not candidates:
            out.append(Join(b.host, b.group, 0, 0, errors.get(i, "its calls are not like those of other hosts")))
        elif len(candidates) > 1 and candidates[0][0] > 0.5 * candidates[1][0]:
            out.append(Join(b.host, b.group, 0, 0, "it ends together with several communicators of other hosts"))
        elif candidates[0][1] in taken:
            out.append(Join(b.host, b.group, 0, 0, "another one on this host fits the same communicator"))
        else:
            taken.add(candidates[0][1])
            a = base[candidates[0][1]]
            out.append(Join(b.host, b.group, a.group, candidates[0][2]))
    return out


def _line_up(a: _Local, b: _Local, step_ns: float) -> tuple[int, str]:
    """(What to add to b's numbers of calls to get a's, why it is not known)."""
    seen_a, seen_b = a.seen(), b.seen()
    clock = _rough(seen_a.sync_ts + seen_a.sync_duration, seen_b.sync_ts + seen_b.sync_duration, int(CLOSE * step_ns))
    groups = find_groups([seen_a, b.seen(clock)])
    if len(groups) != 2 or groups["comm_group"][0] != groups["comm_group"][1]:
        return 0, "its calls are not like those of other hosts"
    if groups["error"][0] or groups["error"][1]:
        return 0, f"its calls could not be lined up with those of {a.host}: {groups['error'][0] or groups['error'][1]}"
    of = {int(row["rank"]): int(row["seq_offset"]) for row in groups}
    return of[b.rank] - of[a.rank], ""


def _rough(ends_a: Int, ends_b: Int, close: int) -> int:
    """What to add to b's times so that most ends coincide, within ``close``, ns; 0: nothing shows."""
    ends_a, ends_b = np.unique(ends_a), np.unique(ends_b)
    if not len(ends_a) or not len(ends_b) or close < BIN_NS:
        return 0
    first = np.searchsorted(ends_a, ends_b - close)
    count = np.searchsorted(ends_a, ends_b + close) - first
    if not count.sum():
        return 0
    which = np.repeat(np.arange(len(ends_b)), count)
    place = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
    apart = ends_a[place] - ends_b[which]
    bins = np.bincount((apart + close) // BIN_NS)
    # A peak may lie across two bins.
    peak = int(np.argmax(bins + np.append(bins[1:], 0)))
    low = peak * BIN_NS - close
    return int(np.median(apart[(apart >= low) & (apart < low + 2 * BIN_NS)]))


def _off(a: _Local, b: _Local, shift: int) -> float:
    """How far apart two ranks leave calls on the GPU, in units of the calls' shortest time; -1: not known."""
    _, here, there = np.intersect1d(
        a.rows["seq"].astype(np.int64), b.rows["seq"].astype(np.int64) + shift, return_indices=True
    )
    known = (a.done[here] >= 0) & (b.done[there] >= 0)
    here, there = here[known], there[known]
    if len(here) < MIN_CALLS:
        return -1.0
    took = np.minimum(a.done[here] - a.begun[here], b.done[there] - b.begun[there])
    apart = (a.done[here] - b.done[there]).astype(np.float64)
    when = (a.done[here] - a.done[here][0]).astype(np.float64)
    tight = took <= 2 * np.quantile(took, 0.25)
    slope = np.polyfit(when[tight], apart[tight], 1) if tight.sum() >= MIN_CALLS else np.array([0.0, np.median(apart)])
    left = np.abs(apart - np.polyval(slope, when))[tight]
    return float(np.median(left) / max(float(np.median(took[tight])), 1.0))
