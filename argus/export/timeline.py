"""Reads what a timeline shows from a store: in pieces of bounded size, with the times of all hosts on one clock."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.read.hosts import Hosts
from argus.export.perfetto import LAST_NS, Moment
from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.store.open import Store
from argus.store.read.stacks import OWN_THREAD, Selection
from argus.store.reader import query_columns

Int = NDArray[np.int64]
Keys = NDArray[np.uint64]
Columns = dict[str, NDArray[Any]]

BATCH = 20_000
"""Rows that are read at once, of all tables together."""
BUCKETS = 256
"""Stretches of time that rows are counted in, to find pieces of :data:`BATCH` rows."""
RANKS_AT_ONCE = 512
"""They travel with each query."""
BEFORE_NS = 60_000_000_000
"""What began earlier than this before the moment is not shown, although it may have lasted until then: rows are in
order of their begins, and all would have to be read."""
LONGEST = 1024
"""Characters of a name that are read; of longer ones the begin and the end."""


def _cut(column: str) -> str:
    keep = LONGEST // 2
    return (
        f"if(length({column}) > {LONGEST}, concat(substringUTF8({column}, 1, {keep}), '…',"
        f" substringUTF8({column}, -{keep})), toString({column})) AS {column}_"
    )


_RUN = "job = {job:String} AND run = {run:UInt32}"
_CHOSEN = _RUN + " AND (empty({ranks:Array(UInt32)}) OR has({ranks:Array(UInt32)}, rank))"
_BEGUN = "ts >= fromUnixTimestamp64Nano({from:Int64}) AND ts < fromUnixTimestamp64Nano({to:Int64})"
_LASTS = "toUnixTimestamp64Nano(ts) + greatest(toInt64({length}), 0) > {{begin:Int64}}"
_AT = "host, rank, toUnixTimestamp64Nano(ts) AS at"
_TOOK = "greatest(toInt64(duration_ns), 0) AS took"


@dataclass(frozen=True)
class Source:
    """A table that a timeline shows.

    Attributes:
        table: Its name.
        columns: What is read of a row besides host, rank and begin, ``at``.
        length: How long a row lasts, ns.
        only: A further condition.
        order: Of the rows.
        group: Rows that are added up.
        key: Whose rows: ``rank`` or ``host``.
        slices: Each row is an event, of which a viewer can show so many.
    """

    table: str
    columns: str
    length: str = "duration_ns"
    only: str = ""
    order: str = "rank, at"
    group: str = ""
    key: str = "rank"
    slices: bool = True

    def where(self, chosen: str) -> str:
        lasts = _LASTS.format(length=self.length)
        return f"WHERE {chosen} AND {_BEGUN} AND {lasts}" + (f" AND {self.only}" if self.only else "")

    @property
    def sql(self) -> str:
        chosen = f"{_RUN} AND {self.key} IN {{keys:Array({'UInt32' if self.key == 'rank' else 'String'})}}"
        group = f" GROUP BY {self.group}" if self.group else ""
        at = _AT if self.key == "rank" else "host, toUnixTimestamp64Nano(ts) AS at"
        return f"SELECT {at}, {self.columns} FROM {self.table} {self.where(chosen)}{group} ORDER BY {self.order}"


STEPS = Source("iterations", f"step, {_TOOK}, launches, collectives")
LAUNCHES = Source(
    "launches",
    f"tid, toString(call) AS name, {_cut('kernel')}, bytes, stream, arrayStringConcat(grid, 'x') AS grid_text,"
    f" arrayStringConcat(block, 'x') AS block_text, {_TOOK}",
)
COLLECTIVES = Source(
    "collectives",
    f"tid, toString(op) AS name, bytes, toString(dtype) AS dtype_, count, seq, comm, {_TOOK}",
    only="op NOT IN ('GroupStart', 'GroupEnd')",
)
KERNELS = Source(
    "kernel_events",
    f"device, stream, toString(kind) AS kind_, {_cut('name')}, bytes, arrayStringConcat(grid, 'x') AS grid_text,"
    " arrayStringConcat(block, 'x') AS block_text, correlation, issue_latency_ns, launch_tid,"
    f" toUnixTimestamp64Nano(launch_ts) AS launched, {_TOOK}",
    order="rank, device, stream, at, took DESC",
)
PAUSES = Source("gc_pauses", f"tid, generation, {_TOOK}")
STACKS = Source(
    "stack_samples",
    f"pid, tid, {_cut('thread')}, toString(kind) AS kind_name, toString(reason) AS reason_name, gc, in_kernel,"
    " count AS times, ns AS spent, stack_id, toUnixTimestamp64Nano(last_ts) - toUnixTimestamp64Nano(ts) AS took",
    length="toUnixTimestamp64Nano(last_ts) - toUnixTimestamp64Nano(ts) + 1",
    only=f"thread != '{OWN_THREAD}'",
    order="rank, tid, kind, ts",
)
GPU_SECONDS = Source(
    "gpu_usage",
    "device, duration_ns, busy_ns, exposed_communication_ns, queue_depth_mean, issue_latency_p50_ns",
    slices=False,
)
GPU_STEPS = Source("gpu_steps", "device, void_share", slices=False)
THREADS = Source(
    "thread_usage",
    "sum(greatest(cpu_ns, 0)) AS cpu, sum(greatest(runqueue_ns, 0)) AS waited, max(interval_ns) AS length",
    length="interval_ns",
    group="host, rank, pid, ts",
    slices=False,
)
NODES = Source(
    "host_usage", "interval_ns, cpus, busy_ns, stolen_ns", length="interval_ns", order="host, at", key="host",
    slices=False,
)  # fmt: skip
OF_RANKS = (STEPS, LAUNCHES, COLLECTIVES, KERNELS, PAUSES, STACKS, GPU_SECONDS, GPU_STEPS, THREADS)
_OF_KEYS = _RUN + " AND rank IN {keys:Array(UInt32)}"
PHASES = (
    f"SELECT {_AT}, step, toString(phase) AS name, toString(method) AS found_by, confidence, overlapped_ns, spans,"
    f" {_TOOK} FROM phases WHERE {_OF_KEYS} AND (rank, step) IN"
    f" (SELECT rank, step FROM iterations {STEPS.where(_OF_KEYS)}) ORDER BY rank, at, step"
)
PHASES_A_STEP = 6
LAUNCH_KEYS = (
    f"SELECT rank, tid AS thread, toUnixTimestamp64Nano(ts) AS called FROM launches {LAUNCHES.where(_OF_KEYS)}"
)
KERNEL_KEYS = (
    "SELECT rank, launch_tid AS thread, toUnixTimestamp64Nano(launch_ts) AS called FROM kernel_events"
    f" {KERNELS.where(_OF_KEYS)} AND issue_latency_ns >= 0 AND launch_tid != 0"
)
CALL_KEYS = (
    "SELECT host, rank, toString(op) AS name, seq, comm FROM collectives"
    f" {COLLECTIVES.where(_OF_KEYS)} AND op NOT IN ('Send', 'Recv')"
)
_RANKS = (
    "SELECT rank, argMax(host, (rank_source != 'parent', version)) AS node,"
    " argMax(pid, (rank_source != 'parent', version)) AS pid"
    f" FROM ranks WHERE {_CHOSEN} GROUP BY rank ORDER BY rank"
)
_GPUS = "SELECT rank, arraySort(groupUniqArray(device)) AS devices FROM ({parts}) GROUP BY rank ORDER BY rank".format(
    parts=" UNION ALL ".join(
        f"SELECT DISTINCT rank, device FROM {table} WHERE {_CHOSEN}" for table in ("gpu_usage", "gpu_steps")
    )
)
_HANDLES = (
    "SELECT rank, comm, comm_group, seq_offset FROM communicators FINAL"
    f" WHERE {_CHOSEN} AND error = '' ORDER BY rank, comm"
)
_NEWEST = (
    "SELECT host, max(newest) AS end_ns FROM ("
    + " UNION ALL ".join(
        f"SELECT toString(host) AS host, max(toUnixTimestamp64Nano({time})) AS newest FROM {table}"
        f" WHERE {_CHOSEN} GROUP BY host"
        for table, time in (
            ("launches", "ts"),
            ("collectives", "ts"),
            ("kernel_events", "ts"),
            ("iterations", "addNanoseconds(ts, duration_ns)"),
            ("stack_samples", "last_ts"),
        )
    )
    + ") GROUP BY host ORDER BY host"
)
_SPAN = (
    "SELECT host, toUnixTimestamp64Nano(min(ts)) AS begin_ns,"
    " max(toUnixTimestamp64Nano(ts) + toInt64(duration_ns)) AS end_ns FROM iterations"
    f" WHERE {_CHOSEN}"
    " AND toInt64(step) + transform(toString(host), {hosts:Array(String)}, {shifts:Array(Int64)}, toInt64(0)) BETWEEN"
    " {first:Int64} AND {last:Int64} GROUP BY host ORDER BY host"
)
_WHOLE = (
    "SELECT toString(host) AS host, toInt64(step) + transform(host, {hosts:Array(String)}, {shifts:Array(Int64)},"
    " toInt64(0)) AS number, min(toUnixTimestamp64Nano(ts)) AS first,"
    " max(toUnixTimestamp64Nano(ts) + toInt64(duration_ns)) AS last"
    f" FROM iterations WHERE {_CHOSEN} AND {_BEGUN} GROUP BY host, number ORDER BY number, host"
)


def moment_across(store: Store, chosen: Selection, hosts: Hosts | None) -> Moment:
    """What a selection means for a timeline: without a time, the last ``LAST_NS``. Its times are those of the first
    host's clock, its steps those that are the same on all hosts.

    Raises:
        ArgusError: There is no such step, or nothing at all.
    """

    def converted(rows: Columns, name: str) -> list[int]:
        times = rows[name].astype(np.int64)
        if hosts is None:
            return [int(time) for time in times.tolist()]
        return [
            int(hosts.on_reference(str(host), times[place : place + 1])[0])
            for place, host in enumerate(rows["host"].tolist())
        ]

    values = {"job": chosen.job, "run": chosen.run, "ranks": list(chosen.ranks)}
    if chosen.steps is not None:
        shifts = {name: hosts.shift_of(name) for name in hosts.names} if hosts is not None else {"": 0}
        numbers = {"first": chosen.steps[0], "last": chosen.steps[1]}
        span = query_columns(store, _SPAN, values | numbers | {"hosts": list(shifts), "shifts": list(shifts.values())})
        if not len(span["host"]):
            raise ArgusError(f"no step {chosen.steps[0]} of job {chosen.job} is stored", "", EXIT_UNAVAILABLE)
        begin_ns, end_ns = min(converted(span, "begin_ns")), max(converted(span, "end_ns"))
    else:
        end_ns = chosen.to_ns if chosen.to_ns is not None else 0
        if chosen.to_ns is None:
            end_ns = max(converted(query_columns(store, _NEWEST, values), "end_ns"), default=0) + 1
        begin_ns = chosen.from_ns if chosen.from_ns is not None else end_ns - (chosen.last_ns or LAST_NS)
    return Moment(chosen.job, chosen.run, begin_ns, end_ns, chosen.ranks)


def whole_steps(store: Store, moment: Moment, hosts: Hosts | None) -> tuple[int, int] | None:
    """The first and the last step that lie in a moment on all ranks, by the numbers that are the same on all hosts;
    None: none does."""
    shifts = {name: hosts.shift_of(name) for name in hosts.names} if hosts is not None else {"": 0}
    values = {"job": moment.job, "run": moment.run, "ranks": list(moment.ranks), "from": moment.begin_ns - BEFORE_NS}
    values |= {"to": moment.end_ns + BEFORE_NS, "hosts": list(shifts), "shifts": list(shifts.values())}
    rows = query_columns(store, _WHOLE, values)
    spans: dict[int, list[int]] = {}
    for host, step, begin, end in zip(
        *(rows[name].tolist() for name in ("host", "number", "first", "last")), strict=True
    ):
        times = np.array([begin, end], np.int64)
        both = (times if hosts is None else hosts.on_reference(str(host), times)).tolist()
        known = spans.setdefault(step, both)
        known[0], known[1] = min(known[0], both[0]), max(known[1], both[1])
    inside = [step for step, (first, last) in spans.items() if moment.begin_ns <= first and last <= moment.end_ns]
    return (min(inside), max(inside)) if inside else None


@dataclass(frozen=True)
class Rank:
    """Where a rank runs.

    Attributes:
        rank: Global rank.
        host: Node; empty: not known.
        pid: Its process there; 0: not known.
        devices: GPUs, as the process numbers them.
    """

    rank: int
    host: str
    pid: int
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """Rows that are read at once.

    Attributes:
        keys: Ranks, or hosts.
        from_ns, to_ns: They begin from and before then, by their hosts' own clocks.
        begin_ns: And are not over before.
        rows: Of each source that has some, roughly how many.
    """

    keys: tuple[Any, ...]
    from_ns: int
    to_ns: int
    begin_ns: int
    rows: dict[str, int]

    @property
    def values(self) -> dict[str, Any]:
        return {"keys": list(self.keys), "from": self.from_ns, "to": self.to_ns, "begin": self.begin_ns}


class Timeline:
    """The rows of a moment.

    Args:
        store: Where they are.
        moment: What to show; its times are the first host's.
        hosts: How the hosts go together; None: all have the same clock.
    """

    def __init__(self, store: Store, moment: Moment, hosts: Hosts | None) -> None:
        self._store = store
        self.moment = moment
        self.hosts = hosts
        self._run = {"job": moment.job, "run": moment.run}

    # ---- what there is

    @cached_property
    def ranks(self) -> dict[int, Rank]:
        """The ranks as far as the store knows them."""
        chosen = self._run | {"ranks": list(self.moment.ranks)}
        gpus = query_columns(self._store, _GPUS, chosen)
        devices = {
            rank: tuple(int(device) for device in own)
            for rank, own in zip(gpus["rank"].tolist(), gpus["devices"].tolist(), strict=True)
        }
        rows = query_columns(self._store, _RANKS, chosen)
        return {
            rank: Rank(rank, str(node), int(pid), devices.get(rank, ()))
            for rank, node, pid in zip(*(rows[name].tolist() for name in ("rank", "node", "pid")), strict=True)
        }

    @cached_property
    def pieces(self) -> list[Piece]:
        """All rows of the ranks, in pieces: rank by rank, each in order of time."""
        return list(self._pieces(OF_RANKS, "rank"))

    @cached_property
    def node_pieces(self) -> list[Piece]:
        """The same of the nodes."""
        return list(self._pieces((NODES,), "host"))

    @property
    def events(self) -> int:
        """Slices and arrows' ends, roughly: what a viewer has to hold."""
        slices = {source.table for source in OF_RANKS if source.slices}
        return sum(count for piece in self.pieces for table, count in piece.rows.items() if table in slices)

    def _window(self, host: str) -> tuple[int, int]:
        """The moment as a host's own clock has it."""
        begin, end = self.moment.begin_ns, self.moment.end_ns
        if self.hosts is None or host not in self.hosts.names:
            return begin, end
        return self.hosts.off_reference(host, begin), self.hosts.off_reference(host, end)

    def _pieces(self, sources: Sequence[Source], key: str) -> Iterator[Piece]:
        """Ranks (or hosts) of few rows together, those of many cut into stretches of time."""
        by_host: dict[str, list[int]] = {}
        if self.hosts is not None and key == "rank":
            for rank in self.ranks.values():
                by_host.setdefault(rank.host, []).append(rank.rank)
        windows: list[tuple[tuple[int, int], tuple[int, ...]]]
        windows = [(self._window(host), tuple(own)) for host, own in by_host.items()]
        if not windows:
            windows = [((self.moment.begin_ns, self.moment.end_ns), self.moment.ranks if key == "rank" else ())]
        for (begin, end), only in windows:
            first = begin - BEFORE_NS
            counts: dict[Any, dict[str, int]] = {}
            for source in sources:
                for own, rows in self._counted(source, only, first, end, begin).items():
                    counts.setdefault(own, {})[source.table] = rows
            together: list[Any] = []
            held: dict[str, int] = {}
            for own in sorted(counts):
                size = sum(counts[own].values())
                full = sum(held.values()) + size > BATCH or len(together) >= RANKS_AT_ONCE
                if together and full:
                    yield Piece(tuple(together), first, end, begin, held)
                    together, held = [], {}
                if size > BATCH:
                    yield from self._cut_up(sources, own, first, end, begin, counts[own])
                    continue
                together.append(own)
                for table, rows in counts[own].items():
                    held[table] = held.get(table, 0) + rows
            if together:
                yield Piece(tuple(together), first, end, begin, held)

    def _counted(self, source: Source, only: Sequence[int], first: int, end: int, begin: int) -> dict[Any, int]:
        """Rows of a source by rank or host."""
        chosen = _CHOSEN if source.key == "rank" else _RUN
        values = self._run | {"ranks": list(only), "from": first, "to": end, "begin": begin}
        rows = query_columns(
            self._store,
            f"SELECT {source.key} AS own, count() AS many FROM {source.table} {source.where(chosen)} GROUP BY own",
            values,
        )
        weight = 1 + PHASES_A_STEP if source is STEPS else 1
        return {own: weight * many for own, many in zip(rows["own"].tolist(), rows["many"].tolist(), strict=True)}

    def _cut_up(
        self, sources: Sequence[Source], own: Any, first: int, end: int, begin: int, counts: dict[str, int]
    ) -> Iterator[Piece]:
        """Stretches of time of one rank with at most :data:`BATCH` rows, unless that many begin in the same ns."""
        if sum(counts.values()) <= BATCH or end - first <= 1:
            yield Piece((own,), first, end, begin, counts)
            return
        width = -(-(end - first) // BUCKETS)
        buckets: dict[int, dict[str, int]] = {}
        for source in sources:
            if source.table not in counts:
                continue
            chosen = f"{_RUN} AND {source.key} = {{own:{'UInt32' if source.key == 'rank' else 'String'}}}"
            rows = query_columns(
                self._store,
                "SELECT intDiv(toUnixTimestamp64Nano(ts) - {from:Int64}, {width:Int64}) AS bucket, count() AS many"
                f" FROM {source.table} {source.where(chosen)} GROUP BY bucket",
                self._run | {"own": own, "from": first, "to": end, "begin": begin, "width": width},
            )
            weight = 1 + PHASES_A_STEP if source is STEPS else 1
            for bucket, many in zip(rows["bucket"].tolist(), rows["many"].tolist(), strict=True):
                buckets.setdefault(bucket, {})[source.table] = weight * many
        since, held = first, dict[str, int]()
        for bucket in sorted(buckets):
            at, size = first + bucket * width, sum(buckets[bucket].values())
            if held and sum(held.values()) + size > BATCH:
                yield Piece((own,), since, at, begin, held)
                since, held = at, {}
            if size > BATCH:
                yield from self._cut_up(sources, own, at, min(at + width, end), begin, buckets[bucket])
                since = at + width
                continue
            for table, rows_ in buckets[bucket].items():
                held[table] = held.get(table, 0) + rows_
        if held:
            yield Piece((own,), since, end, begin, held)

    # ---- rows

    def rows(self, piece: Piece, source: Source) -> Columns | None:
        """A piece's rows of a source, ``at`` on the first host's clock, ``own_at`` on its own; None: there are none."""
        if not piece.rows.get(source.table):
            return None
        return self._read(piece, source.sql)

    def phases(self, piece: Piece) -> Columns | None:
        """The phases of a piece's steps."""
        return self._read(piece, PHASES) if piece.rows.get(STEPS.table) else None

    def _read(self, piece: Piece, sql: str) -> Columns | None:
        rows = query_columns(self._store, sql, self._run | piece.values)
        if not len(rows["at"]):
            return None
        rows["own_at"] = rows["at"].astype(np.int64)
        rows["at"] = self._converted(rows["host"], rows["own_at"])
        return rows

    def _converted(self, hosts: NDArray[Any], times: Int) -> Int:
        if self.hosts is None or not len(times):
            return times
        out: Int = times.copy()
        for host in set(hosts.tolist()):
            own = hosts == host
            out[own] = self.hosts.on_reference(str(host), times[own])
        return out

    def called(self, hosts: NDArray[Any], times: Int) -> Int:
        """Other times of rows, on the first host's clock."""
        return self._converted(hosts, times)

    def origin_ns(self) -> int:
        """When the first event shown began, which may have been before the moment."""
        first = self.moment.begin_ns
        for piece in self.pieces:
            for source in OF_RANKS:
                if not source.slices or not piece.rows.get(source.table) or piece.from_ns >= piece.begin_ns:
                    continue
                rows = query_columns(
                    self._store,
                    f"SELECT host, min(toUnixTimestamp64Nano(ts)) AS first FROM {source.table} {source.where(_OF_KEYS)}"
                    " GROUP BY host",
                    self._run | piece.values,
                )
                times = self._converted(rows["host"], rows["first"].astype(np.int64))
                first = min(first, int(times.min(initial=first)))
        return first

    # ---- arrows

    @cached_property
    def handles(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Of each rank's communicators: the number that is the same on all ranks, and what to add to numbers of calls.
        Those that could not be lined up are missing."""
        rows = query_columns(self._store, _HANDLES, self._run | {"ranks": list(self.moment.ranks)})
        joined = {}
        for join in self.hosts.joins if self.hosts is not None else ():
            if not join.error:
                joined[join.host, join.comm_group] = join.joined_group, join.seq_shift
        out = {}
        names = ("rank", "comm", "comm_group", "seq_offset")
        for rank, comm, group, offset in zip(*(rows[name].tolist() for name in names), strict=True):
            host = self.ranks[rank].host if rank in self.ranks else ""
            group, shift = joined.get((host, group), (group, 0))
            out[rank, comm] = group, offset + shift
        return out

    def call_keys(self, rows: Columns) -> Keys:
        """A number for each row of ``collectives`` that is the same on all ranks of the call; 0: none is known."""
        none = (0, 0)
        found = [self.handles.get(own, none) for own in zip(rows["rank"].tolist(), rows["comm"].tolist(), strict=True)]
        groups = np.array([group for group, _ in found], np.uint64)
        numbers = rows["seq"].astype(np.int64) + np.array([offset for _, offset in found], np.int64)
        codes = {name: zlib.crc32(str(name).encode("utf-8", "replace")) for name in set(rows["name"].tolist())}
        kinds = np.array([codes[name] for name in rows["name"].tolist()], np.uint64)
        pairs = np.isin(rows["name"].astype(object), ("Send", "Recv"))
        return np.where((groups == 0) | pairs, np.uint64(0), _mixed(groups, numbers.astype(np.uint64), kinds))

    def shared_calls(self) -> Keys:
        """Of which calls several ranks are shown, ascending: 12 bytes a call and rank are held meanwhile."""
        keys, ranks = [], []
        for piece in self.pieces:
            if piece.rows.get("collectives"):
                rows = query_columns(self._store, CALL_KEYS, self._run | piece.values)
                keys.append(self.call_keys(rows))
                ranks.append(rows["rank"].astype(np.uint32))
        return shared_keys(keys, ranks)

    def launches_shown(self) -> Keys:
        """Launches of which both the call and a kernel are shown, ascending: 8 bytes of each are held."""
        parts: list[Keys] = []
        for table, sql in (("launches", LAUNCH_KEYS), ("kernel_events", KERNEL_KEYS)):
            own = [np.empty(0, np.uint64)]
            for piece in self.pieces:
                if piece.rows.get(table):
                    rows = query_columns(self._store, sql, self._run | piece.values)
                    own.append(launch_keys(rows["rank"], rows["thread"], rows["called"]))
            # In place: numpy's own sets take several times as much as the keys meanwhile.
            keys = np.concatenate(own)
            own.clear()
            keys.sort()
            parts.append(keys)
        launches, kernels = parts
        return launches[among(launches, kernels)]


def shared_keys(keys: Iterable[Keys], ranks: Iterable[NDArray[np.uint32]]) -> Keys:
    """Keys that several ranks have, ascending."""
    all_keys = np.concatenate([np.empty(0, np.uint64), *keys])
    all_ranks = np.concatenate([np.empty(0, np.uint32), *ranks])
    order = np.lexsort((all_ranks, all_keys))
    all_keys, all_ranks = all_keys[order], all_ranks[order]
    other = (all_keys[1:] == all_keys[:-1]) & (all_ranks[1:] != all_ranks[:-1])
    several = np.unique(all_keys[1:][other])
    return np.asarray(several[several != 0], np.uint64)


def launch_keys(ranks: NDArray[Any], threads: NDArray[Any], called: NDArray[Any]) -> Keys:
    """A number for each launch, by who made it when on the host's own clock."""
    times = called.astype(np.int64).astype(np.uint64)
    return _mixed(ranks.astype(np.uint64), threads.astype(np.uint64) + np.uint64(1 << 40), times)


def among(keys: Keys, known: Keys) -> NDArray[np.bool_]:
    """Which keys are among those known, which are in order."""
    if not len(known):
        return np.zeros(len(keys), np.bool_)
    places = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return np.asarray(known[places] == keys)


def _mixed(*parts: Keys) -> Keys:
    """One number of several, as splitmix64 mixes them; never 0."""
    out = np.zeros(len(parts[0]), np.uint64)
    for part in parts:
        out = out * np.uint64(31) + part + np.uint64(0x9E3779B97F4A7C15)
        out = (out ^ (out >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        out = (out ^ (out >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        out ^= out >> np.uint64(31)
    return np.asarray(np.maximum(out, np.uint64(1)), np.uint64)
