"""Step times and timers that a training loop logged, as tables: one row a rank and step, columns named by the user.

Files are read in blocks (:mod:`argus.importers.tables`), twice: once to check every row, so that a file with a row that
makes no sense leaves nothing in the store, and once to store them. They may be of any size; 8 bytes a row are kept
to detect rows of a rank and step that occur twice. If there are any, files are read once more, and some 100 bytes a row
are kept, to find out what they mean (:mod:`argus.importers.numbering`). Without a column of times the steps of each
rank are stored one after the other, as if the first had begun now.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from argus.importers import tables
from argus.importers.numbering import Numbering, Rows, number
from argus.importers.rows import HOST, ImportReport, store_run, too_high
from argus.model.errors import EXIT_USAGE, ArgusError
from argus.model.ranks import HIGHEST_RANK, Gaps
from argus.model.text import printable
from argus.model.units import ranks_text
from argus.store.open import Store

Int = NDArray[np.int64]
Float = NDArray[np.float64]

UNITS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9, "min": 60e9}
"""What a unit is in nanoseconds."""
LONGEST = 200
"""Bytes of a value: text becomes columns whose cells are all as wide as the longest."""
MOST_NS = 2.0**62 / 1e3
"""The longest step: 53 days. Longer ones are of another unit, and sums of them would not fit."""
OTHER = "other"
"""The phase of what no timer covers."""
PHASE_NAME = r"[A-Za-z][A-Za-z0-9_.-]{0,39}"
MOST_PHASES = 32
OVERLAP = 1.01
"""Timers that add up to more than so many steps overlap: rounding to 0.01 ms does less."""
EPOCHS = ((1e17, 1.0), (1e14, 1e3), (1e11, 1e6), (1e8, 1e9))
"""Numbers from there on are times since 1970 in this unit (ns): 1973 and later. Smaller ones count from the begin of
the log, in seconds."""
PLAUSIBLE = 0.9
"""Share of the rows whose times must be apart by half of their timers at least, if steps are as long as that: coarser
times are of no use."""
EARLY = 10
"""Steps before the last one of all ranks at which the rows of a rank may end without a word."""
MOST_NOTES = 4
MOST_DAYS = 64
"""Between the first and the last step: a store takes no more than 100 days at once."""


@dataclass(frozen=True)
class Columns:
    """How the files call them.

    Attributes:
        rank: None: each file is of one rank, which its name gives.
        duration: None: a step is as long as its phases together.
        unit: Of durations and phases.
        phases: Columns of timers, by the name of the phase.
        host: None: not logged.
        time: When a row was logged, at the end of its step; None: not logged.
        epoch: The number of the epoch, where step numbers begin again in each; None: not logged.
    """

    rank: str | None
    step: str
    duration: str | None
    unit: str = "ms"
    phases: Mapping[str, str] = field(default_factory=dict)
    host: str | None = None
    time: str | None = None
    epoch: str | None = None

    def wanted(self) -> list[str]:
        """All columns that are read."""
        several = [self.rank, self.step, self.duration, *self.phases.values(), self.host, self.time, self.epoch]
        return [name for name in several if name is not None]


@dataclass
class _Reading:
    """What was read so far."""

    rows: int = 0
    names: list[str] | None = None
    """Ranks that are no numbers, numbered in order of appearance."""
    keys: list[Int] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    steps: tuple[int, int] = (2**62, -1)
    spans: tuple[int, int] = (2**62, -1)
    """When the first step began and the last one ended, wall ns."""
    unit: float = 0.0
    """Of a column of times that are numbers, ns; 0: not seen."""
    last: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of each rank the last step, and when it was logged; 0: not logged."""
    following: int = 0
    """Rows that follow the rank's step before, with a time and no duration."""
    plausible: int = 0
    """Those of them that were logged no less than half of their timers after it."""
    by_time: bool = False
    """Such a row's step is as long as that."""
    twice: bool = False
    """Rows of a rank and step that had a row were seen."""
    numbers: Int | None = None
    """The steps of all rows, in file order, as they are stored; -1: the row does not count. None: as logged."""


@dataclass(frozen=True)
class Stored:
    """What was stored. ``names``: of ranks that are no numbers, by rank; None: they are numbers. ``notes``: what was
    concluded of the rows, clauses."""

    run: int
    files: int
    rows: int
    steps: tuple[int, int]
    names: list[str] | None
    report: ImportReport
    notes: list[str]


def write(store: Store, job: str, paths: Path | Sequence[Path], columns: Columns) -> Stored:
    """Reads files and stores them as a new run of a job.

    Args:
        store: Where to.
        job: Name of the job.
        paths: Files, folders and patterns.
        columns: How they call what is read.

    Raises:
        ArgusError: A file cannot be read, lacks a column, or a row makes no sense: nothing is stored then. Or the store
            cannot be had or refuses rows: the run is left without an end.
    """
    paths = [paths] if isinstance(paths, Path) else paths
    files = tables.find(paths)
    _check_columns(columns)
    ranks = _ranks_of(files) if columns.rank is None else {}
    checked, report = _Reading(), ImportReport(begin_ns=time.time_ns())
    for _ in _blocks(files, ranks, columns, checked, report):
        pass
    if not checked.rows:
        raise ArgusError(f"{files[0]} has no rows", "It needs one for each rank and step", EXIT_USAGE)
    reading, begun = _Reading(unit=checked.unit), report.begin_ns
    report = ImportReport(begin_ns=begun)
    notes: list[str] = []
    if columns.duration is None and columns.time is not None and checked.following:
        reading.by_time = checked.plausible >= PLAUSIBLE * checked.following
        notes.append(
            f"a step is as long as {columns.time} is after that of the step before"
            if reading.by_time
            else f"a step is as long as its phases together: {columns.time} is not precise enough"
        )
    if checked.twice or columns.epoch is not None:
        numbering, checked.spans = _number(files, ranks, columns, checked.unit, begun)
        reading.numbers, notes = numbering.steps, notes + numbering.notes
        report.counters.update(numbering.counters)
        report.losses.update(numbering.losses)
    if columns.time:
        report.begin_ns, report.end_ns = checked.spans

    def stored() -> Iterator[tuple[str, Mapping[str, Any]]]:
        for by_table in _blocks(files, ranks, columns, reading, report):
            yield from by_table.items()
        report.ranks = sorted(reading.ends)
        if reading.names is not None:
            report.hosts = [reading.names[rank] for rank in report.ranks]
        if columns.host is not None:
            report.hosts = [reading.hosts.get(rank, HOST) for rank in report.ranks]
        report.rank_source = "order" if reading.names is not None else "file name" if columns.rank is None else "trace"
        report.end_ns = max(report.end_ns, *reading.ends.values())

    where = str(paths[0]) if len(paths) == 1 else f"{len(files)} files"
    run = store_run(store, job, "iterations", report, stored(), where)
    notes += _lacking(reading)
    return Stored(run, len(files), reading.rows, reading.steps, reading.names, report, notes)


def _lacking(reading: _Reading) -> list[str]:
    """Ranks without rows, and ranks whose rows end before those of others, in clauses."""
    notes = []
    ranks, end = sorted(reading.last), reading.steps[1]
    lacking = Gaps(ranks, 0, ranks[-1]) if reading.names is None else Gaps()
    if lacking:
        verb = "has" if len(lacking) == 1 else "have"
        notes.append(f"{ranks_text(lacking)} of 0 to {ranks[-1]} {verb} no rows")
    early: dict[int, list[int]] = {}
    for rank in ranks:
        if reading.last[rank][0] < end - EARLY:
            early.setdefault(reading.last[rank][0], []).append(rank)
    for step, those in sorted(early.items())[:MOST_NOTES]:
        notes.append(f"{ranks_text(those)} {'has' if len(those) == 1 else 'have'} no rows after step {step}")
    return notes


def _number(
    files: Sequence[Path], ranks: Mapping[Path, int], columns: Columns, unit: float, begin_ns: int
) -> tuple[Numbering, tuple[int, int]]:
    """Which rows count, and as which step, of a log that has rows of a rank and step twice; and when the first of these
    steps began and the last one ended.

    Raises:
        ArgusError: What repeated step numbers mean is not clear.
    """
    reading, parts = _Reading(unit=unit), []
    for path in files:
        row = 1
        for block in tables.blocks(path, columns.wanted()):
            parts.append(_parsed(path, block, ranks.get(path), columns, row, reading, begin_ns).summary())
            row += len(parts[-1][0])
            reading.rows += len(parts[-1][0])
    rank, step, content, duration, ends, epochs = (np.concatenate(each) for each in zip(*parts, strict=True))
    timed, by_epoch = columns.time is not None, columns.epoch is not None
    numbering = number(Rows(rank, step, content, ends if timed else None, epochs if by_epoch else None))
    kept = numbering.steps >= 0
    return numbering, (int((ends - duration)[kept].min()), int(ends[kept].max()))


def _check_columns(columns: Columns) -> None:
    wanted = columns.wanted()
    if len(set(wanted)) < len(wanted):
        twice = next(name for name in wanted if wanted.count(name) > 1)
        raise ArgusError(f"the column {twice!r} is named twice", "Give each column once", EXIT_USAGE)
    if columns.duration is None and not columns.phases:
        raise ArgusError("neither step times nor phases are named", "Give --duration-column or --phase", EXIT_USAGE)
    for name in columns.phases:
        if not re.fullmatch(PHASE_NAME, name) or name == OTHER:
            hint = (
                "other is what no timer covers"
                if name == OTHER
                else "A letter, then letters, digits, _ . -, 40 at most"
            )
            raise ArgusError(f"{name[:60]!r} cannot be a phase's name", hint, EXIT_USAGE)
    if len(columns.phases) > MOST_PHASES:
        raise ArgusError(f"{len(columns.phases)} phases are more than {MOST_PHASES}", "Name the largest", EXIT_USAGE)


def _ranks_of(files: Sequence[Path]) -> dict[Path, int]:
    """The rank of each file, by its name."""
    rank_of: dict[Path, int] = {}
    for file in files:
        rank = tables.number_in(file)
        if rank is None:
            raise ArgusError(f"the name of {file} has no rank", "Name the column with it: --rank-column", EXIT_USAGE)
        if rank > HIGHEST_RANK:
            raise too_high(str(file), rank)
        if rank in rank_of.values():
            other = next(one for one, number in rank_of.items() if number == rank)
            raise ArgusError(
                f"{other} and {file} are both of rank {rank}",
                "Name the column with the rank: --rank-column",
                EXIT_USAGE,
            )
        rank_of[file] = rank
    return rank_of


def _blocks(
    files: Sequence[Path], ranks: Mapping[Path, int], columns: Columns, reading: _Reading, report: ImportReport
) -> Iterator[dict[str, dict[str, Any]]]:
    """Rows of ``iterations`` and ``phases``, block by block."""
    for path in files:
        row = 1
        for block in tables.blocks(path, columns.wanted()):
            count = len(block[columns.step])
            by_table = _rows(path, block, ranks.get(path), columns, row, reading, report)
            row += count
            reading.rows += count
            if by_table:
                yield by_table


@dataclass(frozen=True)
class _Parsed:
    """Rows of one block.

    Attributes:
        rank, step: Shape (rows,).
        took: ns.
        spent: Of each phase, ns; NaN: not logged.
        ends: When they were logged, wall ns; None: not logged.
        hosts: None: not logged.
        epochs: None: not logged.
    """

    rank: Int
    step: Int
    took: Float
    spent: dict[str, Float]
    ends: Int | None
    hosts: NDArray[np.str_] | None
    epochs: Int | None

    def chosen(self, kept: NDArray[np.bool_]) -> _Parsed:
        """Some of the rows."""
        return _Parsed(
            self.rank[kept], self.step[kept], self.took[kept],
            {phase: values[kept] for phase, values in self.spent.items()},
            None if self.ends is None else self.ends[kept], None if self.hosts is None else self.hosts[kept],
            None if self.epochs is None else self.epochs[kept],
        )  # fmt: skip

    def summary(self) -> tuple[Int, Int, Int, Int, Int, Int]:
        """Rank, step, a hash of times, duration, end and epoch of each row; 0 of what is not logged."""
        nothing = np.zeros(len(self.rank), np.int64)
        ends = nothing if self.ends is None else self.ends
        content = ends.astype(np.uint64)
        for values in (self.took, *self.spent.values()):
            # Two rounds of xorshift and multiplication, as splitmix64 ends.
            content = (content ^ (content >> np.uint64(31)) ^ values.view(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
            content = (content ^ (content >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        epochs = nothing if self.epochs is None else self.epochs
        return self.rank, self.step, content.view(np.int64), np.rint(self.took).astype(np.int64), ends, epochs


def _parsed(
    path: Path,
    block: Mapping[str, pa.Array],
    given: int | None,
    columns: Columns,
    first: int,
    reading: _Reading,
    begin_ns: int,
) -> _Parsed:
    """The rows of a block.

    Args:
        given: The rank of the file; None: a column has it.
        first: The number of its first row.
        begin_ns: When a log began that counts seconds from its begin.
    """
    count = len(block[columns.step])
    for name in columns.wanted():
        long = pc.greater(pc.binary_length(block[name]), LONGEST).to_numpy(zero_copy_only=False)
        _check(path, name, block[name], long, first, f"of {LONGEST} bytes or less")
    step = _whole(path, columns.step, block[columns.step], first)
    spent = {
        phase: _durations(path, name, block[name], first, columns.unit, absent=True)
        for phase, name in columns.phases.items()
    }
    if columns.duration is not None:
        took = _durations(path, columns.duration, block[columns.duration], first, columns.unit)
    else:
        took = np.nansum(list(spent.values()), axis=0)
        _check(path, "the sum of the phases", block[columns.step], took > MOST_NS, first, "a duration (over 53 days)")
    if given is None and columns.rank is not None:
        rank = _ranks(path, columns.rank, block[columns.rank], first, reading)
    else:
        rank = np.full(count, given or 0, np.int64)
    ends = None
    if columns.time is not None:
        ends = _times(path, columns.time, block[columns.time], first, reading, begin_ns)
    hosts = None
    if columns.host is not None:
        hosts = np.char.strip(_texts(block[columns.host]).astype(str))
        hosts[hosts == ""] = HOST
        reading.hosts |= dict(zip(rank.tolist(), hosts.tolist(), strict=True))
    epochs = None
    if columns.epoch is not None:
        epochs = _whole(path, columns.epoch, block[columns.epoch], first, "the number of an epoch")
    return _Parsed(rank, step, took, spent, ends, hosts, epochs)


def _rows(
    path: Path,
    block: Mapping[str, pa.Array],
    given: int | None,
    columns: Columns,
    first: int,
    reading: _Reading,
    report: ImportReport,
) -> dict[str, dict[str, Any]]:
    """Rows of one block as they are stored; empty: none of them counts."""
    parsed = _parsed(path, block, given, columns, first, reading, report.begin_ns)
    if reading.numbers is not None:
        step = reading.numbers[reading.rows : reading.rows + len(parsed.rank)]
        if len(step) < len(parsed.rank):
            raise ArgusError(f"{path} grew while it was read", "Import it when it is whole, or a copy", EXIT_USAGE)
        parsed, kept = replace(parsed, step=step), step >= 0
    else:
        kept = _new(parsed.rank << 32 | parsed.step, reading)
        reading.twice |= not kept.all()
    if not kept.all():
        parsed = parsed.chosen(kept)
    rank, step, took, spent, ends = parsed.rank, parsed.step, parsed.took, parsed.spent, parsed.ends
    if not len(rank):
        return {}
    reading.steps = (min(reading.steps[0], int(step.min())), max(reading.steps[1], int(step.max())))
    apart = _apart(rank, step, ends, took, reading)
    if reading.by_time:
        took = np.fmax(took, apart)
    duration = np.rint(took).astype(np.int64)
    if ends is None:
        begins = _begins(rank, duration, reading.ends, report.begin_ns)
    else:
        begins = ends - duration
        for one in np.unique(rank).tolist():
            reading.ends[one] = max(reading.ends.get(one, 0), int(ends[rank == one].max()))
        reading.spans = (min(reading.spans[0], int(begins.min())), max(reading.spans[1], int(ends.max())))
        late = (ends - reading.spans[0]) > MOST_DAYS * 86_400_000_000_000
        if late.any():
            raise ArgusError(
                f"{path}: steps lie more than {MOST_DAYS} days apart", "Is that the column of times?", EXIT_USAGE
            )
    where: Any = HOST
    if reading.names is not None:
        where = [reading.names[one] for one in rank.tolist()]
    if parsed.hosts is not None:
        where = parsed.hosts.tolist()
    shared = {"rank": rank.astype(np.uint32), "step": step.astype(np.uint32), "ts": begins, "host": where}
    by_table: dict[str, dict[str, Any]] = {"iterations": {
        **shared, "duration_ns": duration.astype(np.uint64), "collectives": 0, "launches": 0, "method": "imported",
        "confidence": 1.0,
    }}  # fmt: skip
    if spent:
        by_table["phases"] = _phases(shared, spent, duration, report)
    return by_table


def _apart(rank: Int, step: Int, ends: Int | None, took: Float, reading: _Reading) -> Float:
    """How long each row was logged after that of the step before, ns; NaN: that is not known. Counts how often that can
    be how long the step took, and notes each rank's last row."""
    order = np.argsort(rank, kind="stable")
    at, steps = rank[order], step[order]
    times = np.zeros(len(rank), np.int64) if ends is None else ends[order]
    heads = np.flatnonzero(np.concatenate([[True], at[1:] != at[:-1]]))
    before, then = np.roll(steps, 1), np.roll(times, 1)
    for head, tail in zip(heads.tolist(), (np.append(heads[1:], len(at)) - 1).tolist(), strict=True):
        one = int(at[head])
        before[head], then[head] = last = reading.last.get(one, (-2, 0))
        reading.last[one] = max(last, (int(steps[tail]), int(times[tail])))
    apart = np.full(len(rank), np.nan)
    follows = np.flatnonzero((steps == before + 1) & (then > 0))
    apart[order[follows]] = times[follows] - then[follows]
    reading.following += len(follows)
    reading.plausible += int(np.sum(apart[order[follows]] >= took[order[follows]] / 2))
    return apart


def _phases(
    shared: Mapping[str, Any], spent: Mapping[str, Float], duration: Int, report: ImportReport
) -> dict[str, Any]:
    """Rows of ``phases``: a row for each timer that a step has, and one for what no timer covers."""
    names, rows, times = [], [], []
    total = np.zeros(len(duration))
    for phase, values in spent.items():
        there = np.flatnonzero(np.isfinite(values))
        report.counters["phase_values_missing"] += len(values) - len(there)
        total[there] += values[there]
        names += [phase] * len(there)
        rows.append(there)
        times.append(np.rint(values[there]).astype(np.int64))
    over = total > OVERLAP * duration
    report.counters["timers_longer_than_the_step"] += int(over.sum())
    for counter in ("phase_values_missing", "timers_longer_than_the_step"):
        if not report.counters[counter]:
            del report.counters[counter]
    rest = np.flatnonzero(duration - total >= 1)
    names += [OTHER] * len(rest)
    rows.append(rest)
    times.append(np.rint(duration - total)[rest].astype(np.int64))
    at = np.concatenate(rows)
    timed = len(at) - len(rest)
    hosts = shared["host"]
    return {
        "rank": shared["rank"][at], "step": shared["step"][at], "ts": shared["ts"][at],
        "host": hosts if isinstance(hosts, str) else [hosts[one] for one in at.tolist()], "phase": names,
        "duration_ns": np.concatenate(times).astype(np.uint64), "overlapped_ns": 0, "spans": 1,
        "method": ["imported"] * timed + ["remainder"] * len(rest), "confidence": 1.0,
    }  # fmt: skip


def _durations(path: Path, name: str, values: pa.Array, first: int, unit: str, *, absent: bool = False) -> Float:
    """A column of durations, ns. ``absent``: of rows without a value NaN."""
    texts = _texts(values)
    empty = np.isin(np.char.lower(np.char.strip(texts)), ("", "nan", "null", "none")) if absent else np.zeros(0, bool)
    numbers = np.full(len(texts), np.nan)
    chosen = ~empty if absent else np.ones(len(texts), bool)
    with np.errstate(over="ignore"):
        numbers[chosen] = _numbers(path, name, texts, chosen, first) * UNITS[unit]
    with np.errstate(invalid="ignore"):
        _check(path, name, values, chosen & (~np.isfinite(numbers) | (numbers < 0)), first, "a duration")
        _check(
            path, name, values, chosen & (numbers > MOST_NS), first,
            f"a duration in {unit} (it is over 53 days: name another with --unit)",
        )  # fmt: skip
    return numbers


def _times(path: Path, name: str, values: pa.Array, first: int, reading: _Reading, begin_ns: int) -> Int:
    """When rows were logged, wall ns: numbers since 1970, numbers since the begin of the log, or dates as ISO 8601."""
    texts = np.char.strip(_texts(values))
    try:
        numbers = texts.astype(np.float64)
    except ValueError:
        return _dates(path, name, values, first)
    _check(path, name, values, ~np.isfinite(numbers) | (numbers < 0), first, "a time")
    if not reading.unit:
        middle = float(np.median(numbers))
        reading.unit = next((unit for least, unit in EPOCHS if middle >= least), -1.0)
    ns = numbers * abs(reading.unit) if reading.unit > 0 else begin_ns + numbers * 1e9
    _check(path, name, values, ns > 2.0**62, first, "a time (it is after 2116)")
    _check(path, name, values, ns < MOST_NS, first, "a time like the others")
    return np.rint(ns).astype(np.int64)


def _dates(path: Path, name: str, values: pa.Array, first: int) -> Int:
    for zone in (None, "UTC"):
        try:
            moments = pc.cast(pc.utf8_trim_whitespace(values), pa.timestamp("ns", zone))
            ns: Int = pc.cast(moments, pa.int64()).to_numpy(zero_copy_only=False)
        except pa.ArrowException:
            continue
        _check(path, name, values, ns < int(MOST_NS), first, "a time after 1970")
        return ns
    texts = _texts(values).tolist()
    number = np.array([_is_number(text) for text in texts])
    dated = np.array([re.match(r"\s*\d{4}-\d\d-\d\d", text) is not None for text in texts])
    # Which kind most rows are of; the first one that is not is named.
    wrong = ~number if number.sum() > dated.sum() else ~dated
    if not wrong.any():
        zoned = np.array([_is_date(text, "UTC") for text in texts])
        plain = np.array([_is_date(text, None) for text in texts])
        wrong = ~zoned if zoned.sum() > plain.sum() else ~plain
    _check(path, name, values, wrong, first, "a time: seconds since 1970, or as 2026-01-31T12:00:00Z")
    raise AssertionError("a row was named")


def _is_date(text: str, zone: str | None) -> bool:
    try:
        pc.cast(pa.array([text.strip()]), pa.timestamp("ns", zone))
    except pa.ArrowException:
        return False
    return True


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _begins(rank: Int, duration: Int, ends: dict[int, int], begin_ns: int) -> Int:
    """When each step begins: where the rank's step before ended. Notes in ``ends`` where each rank's last one does."""
    order = np.argsort(rank, kind="stable")
    sorted_ = rank[order]
    total = np.cumsum(duration[order])
    heads = np.flatnonzero(np.concatenate([[True], sorted_[1:] != sorted_[:-1]]))
    lengths = np.diff(np.append(heads, len(rank)))
    before = np.repeat(total[heads] - duration[order][heads], lengths)
    known = np.array([ends.get(int(one), begin_ns) for one in sorted_[heads].tolist()], np.int64)
    end = np.repeat(known, lengths) + total - before
    ends.update(zip(sorted_[heads].tolist(), end[heads + lengths - 1].tolist(), strict=True))
    begins = np.empty(len(rank), np.int64)
    begins[order] = end - duration[order]
    return begins


def _new(keys: Int, reading: _Reading) -> NDArray[np.bool_]:
    """Which rows were not there before; of equal ones the first."""
    _, first = np.unique(keys, return_index=True)
    kept = np.zeros(len(keys), bool)
    kept[first] = True
    for earlier in reading.keys:
        place = np.minimum(np.searchsorted(earlier, keys), len(earlier) - 1)
        kept &= earlier[place] != keys
    fresh = np.sort(keys[kept])
    # Few sorted runs, as in a merge sort: each is at least twice as long as the next.
    while reading.keys and len(reading.keys[-1]) <= 2 * len(fresh):
        fresh = np.sort(np.concatenate([reading.keys.pop(), fresh]), kind="stable")
    if len(fresh):
        reading.keys.append(fresh)
    return kept


def _ranks(path: Path, name: str, values: pa.Array, first: int, reading: _Reading) -> Int:
    texts = np.char.strip(_texts(values))
    _check(path, name, values, texts == "", first, "a rank")
    # Whole numbers, also as pandas writes those of columns with gaps: 3.0.
    bare = np.char.partition(texts, ".")
    whole = np.char.isdecimal(bare[:, 0]) & (np.char.strip(bare[:, 2], "0") == "")
    numeric = whole & (np.char.str_len(bare[:, 0]) < 10)
    # One that is none among numbers is damage, which as a name would make a rank of its own and rename the others.
    if reading.names is None and (reading.rows or 2 * numeric.sum() >= len(numeric)):
        _check(path, name, values, ~numeric, first, "the number of a rank, as others are")
        ranks = np.asarray(bare[:, 0].astype(np.int64))
        if (ranks > HIGHEST_RANK).any():
            row = int(np.argmax(ranks))
            raise too_high(f"{path}, row {first + row}", int(ranks[row]))
        return ranks
    if reading.names is None:
        reading.names = []
    words, place, code = np.unique(texts, return_index=True, return_inverse=True)
    number = {name: one for one, name in enumerate(reading.names)}
    for one in np.argsort(place).tolist():
        if str(words[one]) not in number:
            number[str(words[one])] = len(reading.names)
            reading.names.append(str(words[one]))
    numbers: Int = np.array([number[str(word)] for word in words], np.int64)[code]
    return numbers


def _texts(values: pa.Array) -> NDArray[np.str_]:
    return np.asarray(values.to_numpy(zero_copy_only=False).astype(str))


def _whole(path: Path, name: str, values: pa.Array, first: int, what: str = "the number of a step") -> Int:
    texts = _texts(values)
    found = _numbers(path, name, texts, np.ones(len(texts), bool), first)
    wrong = ~np.isfinite(found) | (found != np.rint(found)) | (found < 0) | (found > 2**32 - 1)
    _check(path, name, values, wrong, first, what)
    return found.astype(np.int64)


def _numbers(path: Path, name: str, texts: NDArray[np.str_], chosen: NDArray[np.bool_], first: int) -> Float:
    """The chosen ones of a column as numbers."""
    try:
        values: Float = texts[chosen].astype(np.float64)
        return values
    except ValueError:
        pass

    wrong = np.array([not _is_number(text) for text in texts.tolist()]) & chosen
    _check(path, name, texts, wrong, first, "a number")
    raise AssertionError("numpy and Python differ on what is a number")


def _check(
    path: Path, name: str, values: pa.Array | NDArray[np.str_], wrong: NDArray[np.bool_], first: int, what: str
) -> None:
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ArgusError(
            f"{path}, row {first + row}: {name} is '{printable(str(values[row])[:40])}', not {what}",
            "Rows are counted from 1, without the head",
            EXIT_USAGE,
        )
