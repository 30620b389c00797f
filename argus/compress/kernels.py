"""Kernel durations → rows, as a job runs: what is stored is how each step deviates from what is usual for a kernel.

Each launch ends up in exactly one place: in a row of ``kernel_summaries`` (codes relative to a template), in a row of
``kernel_escapes`` (a histogram: there is no template yet, or codes would not be true enough), in ``kernel_spikes``
(by itself, with its time), or in the counter ``durations_rejected``.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from argus.compress import rows as rows_of
from argus.compress.bins import BINS, CENTER_NS, LONGEST_NS, PER_NEPER, PLACE, bins_of, occupied
from argus.compress.codes import Bank, Codes
from argus.compress.rows import ROW, Rows
from argus.compress.templates import CELLS, ESCAPE, SHAPE_UNIT, build, spike_limit

Column: TypeAlias = "NDArray[Any] | pa.Array"

POOL = 32
"""Rank-steps that a template is made from."""
FEWEST = 64
"""Launches that a template is made from, at least."""
HOLD_STEPS = 64
"""Steps after which rows of a kernel are stored of which no template could be made until then."""
HELD = 8 << 20
"""Bins of rows without a template that are held at most, 160 MiB; beyond it they are stored as they are."""
SPIKES = 4096
"""Spikes of a rank and step, at most. More stay in the histogram, and their times are lost."""
SPIKE_SHARE = 0.05
"""If more of a kernel's launches are longer than a spike, they are no spikes: the kernel has changed."""
CANDIDATES = 64
"""Longest launches of a row that is held, kept with their times: its spikes are stored once there is a template."""
GROUPS = 4096
"""Kernels distinguished by name, stream, grid and block. Further ones are distinguished by name and stream alone."""
OTHERS = "(other kernels)"
"""Kernels beyond twice as many, of all names and streams."""
GRIDS = 256
"""The same for the grids and blocks of one kernel on one stream: shapes that go with the data must not pile up."""
REBUILD = 0.05
"""Share of a kernel's newest rows that may escape before it gets a new template."""
REBUILD_ROWS = 64
"""Rows that the share is of; twice as many with each version, so that a kernel that fits no template settles."""
TREND = (4.0, 0.01)
"""A trend in a row is one if it is above so many standard errors, and above this: nepers, and the unit of its code."""
UNCHANGED = (3.0, 0.01, 0.02)
"""A step is like those before if no cell's count differs by more standard errors, or by less than the third as a share
of the launches, and if modes have moved by less than the second, nepers, or by no more than so many standard errors."""
FEW = (0.13, 0.02)
"""However few launches make chance large: a cell's count differs by no more than the first as a share of the launches,
and modes have moved by no more than the second, nepers. On windows of 25 to 350 launches of real traces, a third of the
rows are left, at 1.3 to 1.4 times the distance to the samples; without, 30 % at 1.8 times."""
SINGLE = 1.0
"""Codes may be as far from a row as so many of its launches are if they take twice as long: more than ``ESCAPE`` where
launches are fewer than 100, of which the longest is represented by its code and a histogram costs six times a row."""

SPIKE_PER_NEPER = 64
"""Of the codes of spikes' durations in rows."""

_NEW, _SHAPE, _RANGE = "new", "shape", "range"


@dataclass
class _Kernel:
    """What is known of one kernel."""

    identity: int
    name: str
    full: str
    stream: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    slot: int = -1
    number: int = 0
    version: int = 0
    held: list[_Held] = field(default_factory=list)
    stored: bool = False


@dataclass
class _Held:
    """One row that waits for a template, or is kept for the next."""

    rows: Rows
    start_ns: NDArray[np.int64]
    duration_ns: NDArray[np.int64]
    """Of its longest launches, the longest first."""
    more: bool
    """Whether there are more of them."""
    written: bool


# Over 500 lines: its parts share one set of arrays by kernel, which each of them changes.
class Compressor:
    """The kernels of a host's ranks in one job, online and in bounded memory.

    Args:
        steps_per_row: Steps that a row may cover (``cover`` changes it). Above 1, steps of a kernel are put together
            as long as nothing changes; a step in which something does begins another row. Rows end at multiples of
            it, so that those of all ranks cover the same steps.
        cells: Cells of a template: more are truer and larger.
        pool: Rank-steps that a template is made from.

    Attributes:
        counters: ``durations_rejected`` (negative, longer than 73 minutes, or no number: in no row),
            ``spikes_over_cap`` (in a histogram, their times lost), ``rows_escaped``, ``rows_new`` (stored without a
            template), ``groups``, ``groups_merged`` (kernels whose grids are not distinguished),
            ``groups_crowded`` (launches that ``others`` was asked for), ``templates``, ``templates_rebuilt``.
    """

    def __init__(self, *, steps_per_row: int = 1, cells: int = CELLS, pool: int = POOL) -> None:
        self.steps_per_row, self.cells, self.pool = steps_per_row, cells, pool
        self.counters: dict[str, int] = Counter()
        self._kernels: list[_Kernel] = []
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._grids: Counter[tuple[str, int]] = Counter()
        self._bank = Bank()
        self._slot = np.empty(0, np.int64)
        self._limit = np.empty(0)
        """Of spikes, ns, by group; infinite: no template."""
        self._escape = np.empty(0)
        """Of the error, by slot."""
        self._collecting = np.empty(0, bool)
        self._rows, self._escaped, self._rows_needed = (np.empty(0, np.int64) for _ in range(3))
        """By group: rows since the share of those that escaped was last looked at, and how many it is of."""
        self._held = 0
        self._open: dict[int, Rows] = {}
        self._newest = 0
        self._out: dict[str, list[dict[str, Column]]] = {}

    def group(self, name: str, stream: int, device: int, grid: Sequence[int], block: Sequence[int]) -> int:
        """The number of a kernel on a stream.

        Args:
            name: In full, as ``kernel_events.name`` has it.
            stream: CUPTI's number.
            device: Not distinguished: a rank's kernels are compared with those of ranks that have other devices.
            grid: x, y, z.
            block: x, y, z.
        """
        shape = (tuple(map(int, grid)), tuple(map(int, block)))
        number = self._numbers.get((name, stream, shape))
        if number is not None:
            return number
        short = normalised(name)
        if self._grids[short, stream] >= GRIDS or len(self._kernels) >= GROUPS:
            self.counters["groups_merged"] += 1
            shape = ((), ())
            if len(self._kernels) >= 2 * GROUPS:
                name = short = OTHERS
                stream = 0
            number = self._numbers.get((name, stream, shape))
            if number is not None:
                return number
        self._grids[short, stream] += 1
        identity = kernel_id(short, stream, *shape)
        number = self._numbers[(name, stream, shape)] = len(self._kernels)
        self._kernels.append(_Kernel(identity, short, name, stream, *shape))
        self.counters["groups"] += 1
        self._slot = np.append(self._slot, -1)
        self._limit = np.append(self._limit, np.inf)
        self._collecting = np.append(self._collecting, True)
        self._rows, self._escaped = np.append(self._rows, 0), np.append(self._escaped, 0)
        self._rows_needed = np.append(self._rows_needed, REBUILD_ROWS)
        return number

    def others(self, launches: int) -> int:
        """The number of the kernel that stands for all that have no number of their own; counts its launches."""
        self.counters["groups_crowded"] += launches
        return self.group(OTHERS, 0, 0, (), ())

    def groups(
        self,
        names: Sequence[str],
        name: NDArray[np.int64],
        stream: NDArray[np.int64],
        grid: NDArray[np.int64],
        block: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """The numbers of many launches, shape (n,): ``group`` is asked once for each kernel among them.

        Args:
            names: In full.
            name: Place in ``names``, shape (n,).
            stream: Shape (n,).
            grid: x, y, z, shape (n, 3).
            block: x, y, z, shape (n, 3).
        """
        both = np.column_stack([name, stream, grid, block]).astype(np.int64)
        packed = np.ascontiguousarray(both).view(np.dtype((np.void, both.shape[1] * 8))).ravel()
        _, first, place = np.unique(packed, return_index=True, return_inverse=True)
        numbers = [self.group(names[which], at, 0, shape[:3], shape[3:]) for which, at, *shape in both[first].tolist()]
        return np.array(numbers, np.int64)[place]

    def feed(
        self,
        rank: int,
        step: int,
        begin_ns: int,
        end_ns: int,
        groups: NDArray[np.int64],
        start_ns: NDArray[np.int64],
        duration_ns: NDArray[np.int64],
    ) -> None:
        """Takes all kernels of one rank and step. Steps of a rank come in order.

        Args:
            rank: Global rank.
            step: Step number.
            begin_ns: When the step began, on the clock of ``start_ns``: a trend is between its halves.
            end_ns: When it ended.
            groups: Numbers that ``group`` gave, shape (n,).
            start_ns: When each kernel began, monotonic, shape (n,).
            duration_ns: Shape (n,). Negative ones, those above 73 minutes and (of floats) NaN are rejected and counted.
        """
        if duration_ns.dtype == np.int64:
            bad = duration_ns.view(np.uint64) > LONGEST_NS  # negative ones, too
        else:
            with np.errstate(invalid="ignore"):
                bad = ~((duration_ns >= 0) & (duration_ns <= LONGEST_NS))
        if bad.any():
            self.counters["durations_rejected"] += int(bad.sum())
            groups, start_ns, duration_ns = groups[~bad], start_ns[~bad], duration_ns[~bad]
        self._newest = max(self._newest, step)
        if len(groups):
            self._take_step(
                rank, step, (begin_ns + end_ns) // 2, groups, start_ns, duration_ns.astype(np.int64, copy=False)
            )
        self._settle(rank, step)

    def cover(self, steps: int) -> None:
        """From here on a row may cover so many steps. If they are fewer than before, open rows end here."""
        if steps < self.steps_per_row:
            for rank in list(self._open):
                self.release(rank)
        self.steps_per_row = steps

    def holds(self, rank: int) -> bool:
        """Whether rows of a rank are open, that is, are not handed out since further steps may be put to them."""
        return rank in self._open

    def release(self, rank: int) -> None:
        """Ends the open rows of a rank."""
        if (waiting := self._open.pop(rank, None)) is not None:
            self._store(waiting)

    @property
    def held(self) -> int:
        """Bins of rows that wait for templates, 20 bytes each."""
        return self._held

    def mature(self) -> None:
        """Makes templates from what is held now, and hands out what waited for them: nothing is held any more."""
        self._mature(np.flatnonzero(self._collecting).tolist())

    def take(self, *, final: bool = False) -> dict[str, dict[str, Column]]:
        """The rows that are ready, by table, as columns; they are forgotten.

        The caller adds ``job``, ``run`` and, but to kernel_groups and kernel_templates, ``host``. ``kernel_spikes.ts``
        is the only time: monotonic ns, int64, to be converted to wall time.

        Args:
            final: Nothing more will come: what is held or open is stored too.
        """
        if final:
            self._mature(range(len(self._kernels)))
            for rank in list(self._open):
                self.release(rank)
        new = [kernel for kernel in self._kernels if not kernel.stored]
        if new:
            for kernel in new:
                kernel.stored = True
            self._put("kernel_groups", {
                "kernel_id": np.array([kernel.identity for kernel in new], np.uint64),
                "kernel": pa.array([kernel.name for kernel in new]),
                "name": pa.array([kernel.full for kernel in new]),
                "stream": np.array([kernel.stream for kernel in new], np.int64),
                "grid": pa.array([kernel.grid for kernel in new], pa.list_(pa.uint32())),
                "block": pa.array([kernel.block for kernel in new], pa.list_(pa.uint16())),
            })  # fmt: skip
        out = {
            table: {name: _join([part[name] for part in parts]) for name in parts[0]}
            for table, parts in self._out.items()
        }
        self._out = {}
        return out

    # ---- one step ----

    def _take_step(
        self,
        rank: int,
        step: int,
        middle_ns: int,
        groups: NDArray[np.int64],
        start_ns: NDArray[np.int64],
        duration_ns: NDArray[np.int64],
    ) -> None:
        many = len(self._kernels)
        space = many * BINS
        own = groups << PLACE
        own += bins_of(duration_ns)
        key, count = occupied(own, space)
        n = np.bincount(key >> PLACE, weights=count, minlength=many).astype(np.int64)
        late = own[start_ns >= middle_ns]
        late_key, late_count = occupied(late, space)
        total = np.rint(np.bincount(groups, weights=duration_ns, minlength=many)).astype(np.int64)
        spikes = self._candidates(key, own, space)
        spikes = spikes[duration_ns[spikes] > self._limit[groups[spikes]]]
        if len(spikes):
            spikes = self._choose(spikes, groups, duration_ns, n)
        took, of = duration_ns[spikes], groups[spikes]
        counts, longest = np.bincount(of, minlength=many), np.zeros(many, np.int64)
        spike_ns = np.rint(np.bincount(of, weights=took, minlength=many)).astype(np.int64)
        np.maximum.at(longest, of, took)
        seen = np.flatnonzero(n)
        if len(spikes):
            key, count = _without(key, count, own[spikes])
            late_key, late_count = _without(late_key, late_count, own[spikes[start_ns[spikes] >= middle_ns]])
        number = np.zeros(many, np.int64)
        number[seen] = np.arange(len(seen))
        where, inside = key >> PLACE, key & (BINS - 1)
        row = np.zeros(len(seen), ROW)
        row["rank"], row["group"], row["step"], row["last"] = rank, seen, step, step
        row["n"], row["total_ns"] = (n - counts)[seen], (total - spike_ns)[seen]
        row["spikes"], row["spike_ns"], row["spike_max_ns"] = counts[seen], spike_ns[seen], longest[seen]
        late_of, late_bin = number[late_key >> PLACE], late_key & (BINS - 1)
        late_n = np.bincount(late_of, weights=late_count, minlength=len(seen))
        late_sum = np.bincount(late_of, weights=late_count * late_bin, minlength=len(seen))
        place = number[where]
        row["trend"] = _trend(row["n"], place, inside, count, late_n, late_sum)
        rows = Rows(row, place * BINS + inside, count)
        if len(spikes):
            self._spikes(rank, step, of, start_ns[spikes], took)
        without = self._slot[seen] < 0
        if without.any():
            self._hold(rows.select(without), groups, start_ns, duration_ns, inside, count, where)
        if not without.all():
            self._code(rows.select(~without))

    def _candidates(self, key: NDArray[np.int64], own: NDArray[np.int64], space: int) -> NDArray[np.int64]:
        """Launches in bins in which spikes may be, by the occupied ones: most steps have few, and each launch is
        looked up only in a table."""
        limit = self._limit[key >> PLACE]
        far: NDArray[np.int64] = key[(key & (BINS - 1)) >= bins_of(np.minimum(limit, LONGEST_NS).astype(np.int64))]
        far = far[np.isfinite(self._limit[far >> PLACE])]
        if not len(far):
            return far
        if space > max(1 << 21, 16 * len(own)):
            return np.flatnonzero(np.isin(own, far))
        table = np.zeros(space, bool)
        table[far] = True
        return np.flatnonzero(table[own])

    def _choose(
        self,
        spikes: NDArray[np.int64],
        groups: NDArray[np.int64],
        duration_ns: NDArray[np.int64],
        n: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Of what is long, what counts as spikes. ``n``: launches by group."""
        spike_counts = np.bincount(groups[spikes], minlength=len(n))
        common = spike_counts > np.maximum(1, SPIKE_SHARE * n)
        spikes = spikes[~common[groups[spikes]]]
        if len(spikes) > SPIKES:
            self.counters["spikes_over_cap"] += len(spikes) - SPIKES
            order = np.argsort(duration_ns[spikes], kind="stable")
            spikes = np.sort(spikes[order[-SPIKES:]])
        return spikes

    def _spikes(
        self,
        rank: int,
        step: int,
        groups: NDArray[np.int64],
        start_ns: NDArray[np.int64],
        duration_ns: NDArray[np.int64],
    ) -> None:
        self._put("kernel_spikes", {
            "rank": np.full(len(groups), rank, np.uint32),
            "kernel_id": self._identities(groups),
            "step": np.full(len(groups), step, np.uint32),
            "ts": start_ns.astype(np.int64),
            "duration_ns": duration_ns.astype(np.int64),
        })  # fmt: skip

    # ---- with a template ----

    def _code(self, rows: Rows) -> None:
        """Codes rows of one rank and step that have templates."""
        only = rows.row["n"] == 0  # nothing but spikes
        codes = None if only.any() else self._bank.encode(rows, self._slot[rows.row["group"]])
        escaped = only.copy() if codes is None else self._escapes(codes)
        if codes is None and not only.all():
            # Rare: rows with launches apart, so that codes line up with rows.
            self._code(rows.select(~only))
            self._code(rows.select(only))
            return
        self._watch(rows, escaped)
        if self.steps_per_row > 1 and codes is not None:
            self._extend(codes.remembered(rows), escaped)
        else:
            self._store(rows, codes)

    def _escapes(self, codes: Codes) -> NDArray[np.bool_]:
        limit = np.maximum(self._escape[codes.slot], SINGLE / np.maximum(codes.inside.sum(axis=1), 1))
        out: NDArray[np.bool_] = ~codes.fits | (codes.error > limit)
        return out

    def _watch(self, rows: Rows, escaped: NDArray[np.bool_]) -> None:
        """Notes which kernels no longer fit their templates, and collects rows for new ones."""
        groups = rows.row["group"]
        self._rows[groups] += 1
        self._escaped[groups] += escaped
        over = (self._escaped[groups] > np.maximum(2, REBUILD * self._rows_needed[groups])) & ~self._collecting[groups]
        self._collecting[groups[over]] = True
        again = self._rows[groups] >= self._rows_needed[groups]
        self._rows[groups[again]] = self._escaped[groups[again]] = 0
        chosen = self._collecting[groups] & (rows.row["n"] > 0)
        none = np.empty(0, np.int64)
        for held in _apart(rows.select(chosen)):
            kept = self._kernels[int(held.row["group"][0])].held
            kept.append(_Held(held, none, none, False, True))
            self._held += len(held.key)

    def _store(self, rows: Rows, codes: Codes | None = None) -> None:
        """Puts rows that have templates into tables."""
        for chosen in (rows.row["n"] > 0, rows.row["n"] == 0):
            part = rows.select(chosen)
            if not len(part):
                continue
            if part.row["n"][0] == 0:
                self._escape_rows(part, np.full(len(part), _RANGE))
                continue
            if codes is None or len(part) != len(rows):
                codes = self._bank.encode(part, self._slot[part.row["group"]])
            escaped = self._escapes(codes)
            if escaped.any():
                self.counters["rows_escaped"] += int(escaped.sum())
                self._escape_rows(part.select(escaped), np.where(codes.fits[escaped], _SHAPE, _RANGE))
            if not escaped.all():
                self._summary_rows(part, codes, ~escaped)

    # ---- several steps in a row ----

    def _extend(self, rows: Rows, escaped: NDArray[np.bool_]) -> None:
        """Puts a step together with those before, kernel by kernel, where nothing has changed."""
        rank = int(rows.row["rank"][0])
        if escaped.any():
            self._store(rows.select(escaped))
            rows = rows.select(~escaped)
        old = self._open.get(rank)
        if old is None:
            if len(rows):
                self._open[rank] = rows
            return
        pair = np.minimum(np.searchsorted(old.row["group"], rows.row["group"]), len(old) - 1)
        like = old.row["group"][pair] == rows.row["group"]
        goes_on = np.zeros(len(old), bool)
        goes_on[pair[like]] = True
        same = _alike(old.row[pair], rows.row)
        ends = np.zeros(len(old), bool)
        ends[pair[like & ~same]] = True
        like &= same
        stays = goes_on & ~ends
        if ends.any():
            self._store(old.select(ends))
        parts = [old.select(~goes_on), rows.select(~like)]
        if like.any():
            parts.append(rows_of.merge(old.select(stays), rows.select(like)))
        self._open[rank] = _by_group([part for part in parts if len(part)])

    def _settle(self, rank: int, step: int) -> None:
        """Stores what has waited long enough."""
        self._end(rank, step)
        every = self._held > HELD
        due_groups = [
            number
            for number in np.flatnonzero(self._collecting).tolist()
            if (held := self._kernels[number].held)
            and (every or self._enough(held) or self._newest - int(held[0].rows.row["step"][0]) >= HOLD_STEPS)
        ]
        if due_groups:
            self._mature(due_groups)

    def _end(self, rank: int, step: int) -> None:
        """Stores open rows of a rank that go no further than a step."""
        waiting = self._open.get(rank)
        if waiting is None:
            return
        due = waiting.row["step"] // self.steps_per_row < (step + 1) // self.steps_per_row
        if due.all():
            self.release(rank)
        elif due.any():
            self._store(waiting.select(due))
            self._open[rank] = waiting.select(~due)

    def _enough(self, held: Sequence[_Held]) -> bool:
        """Whether a template can be made. Of a kernel that runs once a step that takes more steps than of others."""
        return len(held) >= self.pool and sum(int(part.rows.row["n"][0]) for part in held) >= FEWEST

    # ---- without a template ----

    def _hold(
        self,
        rows: Rows,
        groups: NDArray[np.int64],
        start_ns: NDArray[np.int64],
        duration_ns: NDArray[np.int64],
        inside: NDArray[np.int64],
        count: NDArray[np.int64],
        where: NDArray[np.int64],
    ) -> None:
        """Keeps rows until their kernels have templates, with their longest launches."""
        many = len(self._kernels)
        below = np.cumsum(count)
        end = np.searchsorted(where, rows.row["group"], side="right")
        first = np.searchsorted(where, rows.row["group"])
        before = np.where(first > 0, below[first - 1], 0)
        middle = np.searchsorted(below, (before + below[end - 1]) / 2)
        limit = np.full(many, np.inf)
        limit[rows.row["group"]] = 2 * CENTER_NS[inside[middle]]
        long = np.flatnonzero(duration_ns > limit[groups])
        long = long[np.lexsort((-duration_ns[long], groups[long]))]
        edges = (
            np.searchsorted(groups[long], rows.row["group"]),
            np.searchsorted(groups[long], rows.row["group"], side="right"),
        )
        apart = _apart(rows)
        for place, (low, high) in enumerate(zip(*(edge.tolist() for edge in edges), strict=True)):
            longest = long[low : min(high, low + CANDIDATES)]
            held = _Held(apart[place], start_ns[longest], duration_ns[longest], high - low > CANDIDATES, False)
            self._kernels[int(rows.row["group"][place])].held.append(held)
            self._held += len(held.rows.key)

    def _mature(self, numbers: Sequence[int]) -> None:
        """Makes templates for kernels from what is held of them; stores what waited for it."""
        chosen = [number for number in numbers if self._kernels[number].held]
        if not chosen:
            return
        pieces = [held for number in chosen for held in self._kernels[number].held]
        into = np.repeat(np.arange(len(chosen)), [len(self._kernels[number].held) for number in chosen])
        rows = rows_of.join([held.rows for held in pieces])
        pooled = rows.dense(into, len(chosen))
        limit = np.array([spike_limit(counts) for counts in pooled])
        rows = self._late_spikes(rows, pieces, limit[into])
        pooled = rows.dense(into, len(chosen))
        total = np.bincount(into, weights=rows.row["total_ns"], minlength=len(chosen))
        samples = pooled.sum(axis=1)
        enough = (samples >= FEWEST) & (total > 0)
        written = np.array([held.written for held in pieces])
        for number in chosen:
            kernel = self._kernels[number]
            self._held -= sum(len(held.rows.key) for held in kernel.held)
            kernel.held = []
        if enough.any():
            self._part_from(np.array(chosen)[enough])
            self._learn(
                np.array(chosen)[enough], pooled[enough], total[enough], limit[enough], rows.select(enough[into])
            )
        waiting = rows.select(~written & enough[into])
        if len(waiting) and self.steps_per_row > 1:
            self._replay(waiting)
        elif len(waiting):
            self._store(waiting)
        raw = rows.select(~written & ~enough[into])
        if len(raw):
            self.counters["rows_new"] += len(raw)
            self._escape_rows(raw, np.full(len(raw), _NEW))

    def _part_from(self, numbers: NDArray[np.int64]) -> None:
        """Ends open rows of kernels whose cells are about to change."""
        for rank, rows in list(self._open.items()):
            of = np.isin(rows.row["group"], numbers)
            if of.any():
                self._store(rows.select(of))
                self._open[rank] = rows.select(~of)
            if of.all():
                del self._open[rank]

    def _replay(self, rows: Rows) -> None:
        """Puts steps that were held together, as if their templates had been there."""
        only = rows.row["n"] == 0
        self._store(rows.select(only))
        rows = rows.select(~only)
        which = rows.row["rank"].astype(np.int64) << 32 | rows.row["step"]
        for at in np.unique(which).tolist():
            part = _by_group([rows.select(which == at)])
            codes = self._bank.encode(part, self._slot[part.row["group"]])
            self._extend(codes.remembered(part), self._escapes(codes))
            self._end(at >> 32, at & 0xFFFFFFFF)

    def _late_spikes(self, rows: Rows, pieces: list[_Held], limit: NDArray[np.float64]) -> Rows:
        """Takes spikes out of rows that were held."""
        row, count = rows.row.copy(), rows.count.copy()
        for place, held in enumerate(pieces):
            long = held.duration_ns > limit[place]
            late = int(long.sum())
            if not late or late > max(1, SPIKE_SHARE * int(row["n"][place])):
                continue
            if held.more and long.all():
                self.counters["spikes_over_cap"] += 1
            took = held.duration_ns[long]
            at = np.searchsorted(rows.key, place * BINS + bins_of(took).astype(np.int64))
            np.subtract.at(count, at, 1)
            row["n"][place] -= late
            row["total_ns"][place] -= took.sum()
            row["spikes"][place], row["spike_ns"][place], row["spike_max_ns"][place] = late, took.sum(), took.max()
            own = np.full(late, row["group"][place])
            self._spikes(int(row["rank"][place]), int(row["step"][place]), own, held.start_ns[long], took)
        left = count > 0
        return Rows(row, rows.key[left], count[left])

    def _learn(
        self,
        numbers: NDArray[np.int64],
        pooled: NDArray[np.int64],
        total: NDArray[np.float64],
        limit: NDArray[np.float64],
        rows: Rows,
    ) -> None:
        """Gives kernels templates."""
        scale = total / (pooled @ CENTER_NS)
        made = build(pooled, scale, self.cells)
        first = len(self._bank.templates)
        fresh = self._slot[numbers] < 0
        slots = self._slot[numbers].copy()
        slots[fresh] = first + np.arange(int(fresh.sum()))
        if fresh.any():
            self._bank.add([template for template, is_new in zip(made, fresh.tolist(), strict=True) if is_new])
            self._escape = np.append(self._escape, np.zeros(int(fresh.sum())))
        for place in np.flatnonzero(~fresh).tolist():
            self._bank.put(int(slots[place]), made[place])
        self._slot[numbers] = slots
        self._limit[numbers] = limit
        self._collecting[numbers] = False
        self._rows[numbers] = self._escaped[numbers] = 0
        self._rows_needed[numbers[~fresh]] *= 2
        known = rows.select(rows.row["n"] > 0)
        codes = self._bank.encode(known, self._slot[known.row["group"]])
        for number, slot in zip(numbers.tolist(), slots.tolist(), strict=True):
            error = codes.error[codes.slot == slot]
            self._escape[slot] = max(ESCAPE[0], ESCAPE[1] * float(np.quantile(error, 0.9)) if len(error) else 0.0)
            kernel = self._kernels[number]
            kernel.slot = slot
            kernel.version += 1
            kernel.number = made[int(np.flatnonzero(numbers == number)[0])].number(kernel.identity)
            self.counters["templates"] += 1
            self.counters["templates_rebuilt"] += kernel.version > 1
        self._put("kernel_templates", {
            "kernel_id": self._identities(numbers),
            "template": np.array([self._kernels[number].number for number in numbers.tolist()], np.uint64),
            "version": np.array([self._kernels[number].version for number in numbers.tolist()], np.uint32),
            "samples": np.array([template.samples for template in made], np.uint64),
            "heaviest": np.array([template.heaviest + 1 for template in made], np.uint8),
            "mode": _lists([template.mode for template in made], pa.uint8()),
            "share": _lists([template.share for template in made], pa.float32()),
            "mean_ns": _lists([template.mean_ns for template in made], pa.float32()),
            "unit": _lists([template.unit for template in made], pa.float32()),
            "shape": _lists([np.rint(template.shape / SHAPE_UNIT).ravel() for template in made], pa.uint16()),
            "spike_limit_ns": np.minimum(limit, LONGEST_NS).astype(np.int64),
            "escape_error": self._escape[slots].astype(np.float32),
        })  # fmt: skip

    # ---- rows out ----

    def _identities(self, groups: NDArray[np.int64]) -> NDArray[np.uint64]:
        return np.array([self._kernels[number].identity for number in groups.tolist()], np.uint64)

    def _common(self, row: NDArray[np.void]) -> dict[str, Column]:
        return {
            "rank": row["rank"].copy(),
            "kernel_id": self._identities(row["group"]),
            "step": row["step"].copy(),
            "steps": row["last"] - row["step"] + 1,
            "count": row["n"] + row["spikes"],
            "total_ns": row["total_ns"].copy(),
            "trend": row["trend"].copy(),
            "spikes": row["spikes"].copy(),
            "spike_sum": _spike_codes(row["spike_ns"]),
            # One spike: its time is their sum.
            "spike_max": np.where(row["spikes"] > 1, _spike_codes(row["spike_max_ns"]), 0).astype(np.uint16),
        }

    def _summary_rows(self, rows: Rows, codes: Codes, chosen: NDArray[np.bool_]) -> None:
        width = codes.width[chosen]
        used = np.arange(codes.counts.shape[1]) < width[:, None]
        offsets = pa.array(np.concatenate([[0], np.cumsum(width)]), pa.int32())
        row = rows.row[chosen]
        self._put("kernel_summaries", {
            **self._common(row),
            "template": np.array([self._kernels[number].number for number in row["group"].tolist()], np.uint64),
            "count_codes": pa.ListArray.from_arrays(offsets, pa.array(codes.counts[chosen][used])),
            "mean_codes": pa.ListArray.from_arrays(offsets, pa.array(codes.means[chosen][used])),
            "low": codes.low[chosen],
            "high": codes.high[chosen],
        })  # fmt: skip

    def _escape_rows(self, rows: Rows, reason: NDArray[np.str_]) -> None:
        # Two bins are one: 1.6 % wide.
        place, inside = np.divmod(rows.key, BINS)
        half = place * (BINS // 2) + inside // 2
        first = np.flatnonzero(np.diff(half, prepend=-1))
        count = np.add.reduceat(rows.count, first) if len(first) else rows.count
        place, inside = np.divmod(half[first], BINS // 2)
        offsets = pa.array(np.searchsorted(place, np.arange(len(rows) + 1)), pa.int32())
        self._put("kernel_escapes", {
            **self._common(rows.row),
            "reason": pa.array(reason.tolist()),
            "bins": pa.ListArray.from_arrays(offsets, pa.array(inside, pa.uint16())),
            "counts": pa.ListArray.from_arrays(offsets, pa.array(count, pa.uint32())),
        })  # fmt: skip

    def _put(self, table: str, columns: dict[str, Column]) -> None:
        self._out.setdefault(table, []).append(columns)


_VOID = re.compile(r"^(?:static |inline |void )+")
_CONTENT_HASH = re.compile(r"_?(?<![0-9a-zA-Z])(?:[0-9a-f]{32,}|[0-9a-f]{16})(?![0-9a-zA-Z])")


def normalised(name: str) -> str:
    """A kernel's name without what carries no information: return type, parameters, anonymous namespaces, hashes of a
    build.

    Template arguments stay: they distinguish kernels that behave differently. Hashes of 16, or of 32 and more,
    hexadecimal digits go: compilers name modules by their content, and ranks that compile for themselves would not be
    comparable.
    """
    short = _VOID.sub("", name.strip()).replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    depth = 0
    for place, letter in enumerate(short):
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "(" and depth == 0 and place:
            short = short[:place]
            break
    return _CONTENT_HASH.sub("", short).strip() or name


def kernel_id(name: str, stream: int, grid: Sequence[int], block: Sequence[int]) -> int:
    """A hash of a kernel's normalised name, stream, grid and block: the same on every host and in every run."""
    text = f"{name}\0{stream}\0{tuple(grid)}\0{tuple(block)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _without(
    key: NDArray[np.int64], count: NDArray[np.int64], taken: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """A histogram less some of its samples: occupied keys and counts, shape (k,); ``taken``: keys, shape (m,)."""
    np.subtract.at(count, np.searchsorted(key, taken), 1)
    left = count > 0
    return key[left], count[left]


def _trend(
    n: NDArray[np.int64],
    place: NDArray[np.int64],
    inside: NDArray[np.int64],
    count: NDArray[np.int64],
    late: NDArray[Any],
    late_sum: NDArray[Any],
) -> NDArray[np.int8]:
    """How much longer kernels took in the step's second half, as a code; 0: not more than chance has it."""
    many = len(n)
    whole = np.bincount(place, weights=count * inside, minlength=many)
    squares = np.bincount(place, weights=count * inside.astype(np.float64) ** 2, minlength=many)
    early = n - late
    both = (late > 1) & (early > 1)
    n_all, n_late, n_early = (np.maximum(x, 1) for x in (n, late, early))
    difference = late_sum / n_late - (whole - late_sum) / n_early
    variance = np.maximum(squares / n_all - (whole / n_all) ** 2, 1 / 12)
    error = np.sqrt(variance * (1 / n_late + 1 / n_early))
    nepers = difference / PER_NEPER
    sure = both & (np.abs(difference) > TREND[0] * error) & (np.abs(nepers) > TREND[1])
    return np.where(sure, np.clip(np.rint(nepers / TREND[1]), -127, 127), 0).astype(np.int8)


def _alike(before: NDArray[np.void], now: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which rows are like those of the steps before, pair by pair, shape (r,)."""
    errors, level, share = UNCHANGED
    part = (now["n"] / before["n"])[:, None]
    inside, expected = now["inside"], before["inside"] * part
    apart = 2 * np.abs(np.sqrt(inside) - np.sqrt(expected)) / np.sqrt(1 + part)
    moved = np.abs(inside - expected) / now["n"][:, None]
    same = (((apart <= errors) & (moved <= FEW[0])) | (moved <= share)).all(axis=1)
    steps = (before["last"] - before["step"] + 1).astype(np.float64)
    same &= now["step"] == before["last"] + 1
    same &= np.abs(np.log(part[:, 0] * steps)) < 0.05
    chance = errors * before["spread"] * np.sqrt(1 / now["n"] + 1 / before["n"])
    shift = np.abs(now["shift"] - before["shift"])
    same &= shift < np.maximum(level, np.minimum(chance, FEW[1]))
    out: NDArray[np.bool_] = same & (now["trend"] == before["trend"])
    return out


def _apart(rows: Rows) -> list[Rows]:
    """Each row by itself."""
    edge = np.searchsorted(rows.key, np.arange(len(rows) + 1) * BINS)
    return [
        Rows(rows.row[k : k + 1].copy(), rows.key[low:high] - k * BINS, rows.count[low:high].copy())
        for k, (low, high) in enumerate(zip(edge[:-1].tolist(), edge[1:].tolist(), strict=True))
    ]


def _by_group(parts: list[Rows]) -> Rows:
    """Rows of one rank in order of their group; each part is in order."""
    rows = rows_of.join(parts)
    if len(parts) == 1:
        return rows
    order = np.argsort(rows.row["group"], kind="stable")
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    place, inside = np.divmod(rows.key, BINS)
    key = number[place] * BINS + inside
    sort = np.argsort(key)
    return Rows(rows.row[order], key[sort], rows.count[sort])


def _spike_codes(ns: NDArray[np.int64]) -> NDArray[np.uint16]:
    """1/64 nepers: 0.8 % at most off. The exact times are in kernel_spikes."""
    out: NDArray[np.uint16] = np.rint(np.log(np.maximum(ns, 1)) * SPIKE_PER_NEPER).astype(np.uint16)
    return out


def _lists(arrays: list[NDArray[Any]], of: pa.DataType) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum([len(array) for array in arrays])])
    values = np.concatenate(arrays) if arrays else np.empty(0)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values).cast(of, safe=False))


def _join(parts: list[Column]) -> Column:
    if len(parts) == 1:
        return parts[0]
    return pa.concat_arrays(parts) if isinstance(parts[0], pa.Array) else np.concatenate(parts)
