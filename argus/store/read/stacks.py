"""Brings stacks back from a store: where chosen ranks and threads were in chosen steps or at a time."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.model.stacks import Frame, Stack
from argus.model.text import named
from argus.model.units import rank_text, span_text
from argus.semantics.stacks.profile import Profile, Sample, annotated, without_lines
from argus.semantics.stacks.stack import thread_role
from argus.store.open import Store
from argus.store.reader import query_columns

S = 1_000_000_000

PROFILE_KINDS = ("cpu", "off", "all")
OWN_THREAD = "argus-cupti"
"""The thread of Argus's CUPTI helper in traced processes (argus/cupti/helper/helper.c): left out unless asked for."""


@dataclass(frozen=True)
class Selection:
    """Which samples.

    Attributes:
        job, run: The tracing session.
        ranks: Empty: all.
        other_ranks: All but ``ranks``.
        threads: Names, with * and ? as in a shell; ``main``: the main thread of each rank's own process. Empty: all.
        steps: First and last, both included; None: not by step.
        from_ns, to_ns: Wall time, from and before; None: open. Of a wait that lies across an end counts the part
            inside: it may have been reported in pieces of 10 s. Samples count where the middle of their row is.
        last_ns: The last so many ns before ``to_ns``, or before the newest sample; None: all.
        kind: cpu, off or all.
        gil: Only what held the GIL.
    """

    job: str
    run: int
    ranks: tuple[int, ...] = ()
    other_ranks: bool = False
    threads: tuple[str, ...] = ()
    steps: tuple[int, int] | None = None
    from_ns: int | None = None
    to_ns: int | None = None
    last_ns: int | None = None
    kind: str = "cpu"
    gil: bool = False

    def describe(self) -> str:
        """The selection in words."""
        parts = [f"run {self.run}"]
        if self.ranks:
            many = "s" * (len(self.ranks) > 1)
            parts.append(f"{'all but ' * self.other_ranks}rank{many} {rank_text(self.ranks)}")
        else:
            parts.append("all ranks")
        if self.threads:
            parts.append(f"thread{'s' * (len(self.threads) > 1)} {', '.join(self.threads)}")
        if self.steps:
            first, last = self.steps
            several = f"steps {first}-{last}" if last < 2**32 - 1 else f"steps {first} on"
            parts.append(f"step {first}" if first == last else several)
        if self.from_ns is not None or self.to_ns is not None:
            if self.to_ns is None:
                parts.append(f"from {_clock(self.from_ns)} on")
            elif self.from_ns is None:
                parts.append(f"before {_clock(self.to_ns)}")
            else:
                parts.append(f"{_clock(self.from_ns)} to {_clock(self.to_ns)}")
        elif self.last_ns is not None:
            parts.append(f"the last {span_text(self.last_ns / S)}")
        parts.append({"cpu": "on the CPU", "off": "off the CPU", "all": "on and off the CPU"}[self.kind])
        if self.gil:
            parts.append("with the GIL")
        return ", ".join(parts)


def _clock(ns: int | None) -> str:
    return "" if ns is None else str(np.datetime64(ns // 1_000_000, "ms")).replace("T", " ") + " UTC"


def newest_sample_ns(store: Store, job: str, run: int) -> int | None:
    """Wall time of a run's last sample; None: it has none."""
    newest = query_columns(store, "SELECT toUnixTimestamp64Nano(max(ts)) AS ns FROM stack_samples")["ns"]
    for since in ((int(newest[0]) - 3600 * S) if len(newest) else 0, 0):  # most often it is the newest run of all
        found = query_columns(
            store,
            "SELECT count() AS rows, toUnixTimestamp64Nano(max(last_ts)) AS ns FROM stack_samples"
            " WHERE job = {job:String} AND run = {run:UInt32} AND ts >= fromUnixTimestamp64Nano({since:Int64})",
            {"job": job, "run": run, "since": since},
        )
        if found["rows"][0]:
            return int(found["ns"][0])
    return None


_LATEST_NS = 1 << 62
"""In the year 2116."""
_MAINS = "SELECT rank, pid FROM ranks FINAL WHERE job = {job:String} AND run = {run:UInt32} AND rank_source != 'parent'"
"""Processes that are ranks themselves, not what those have forked."""


def _mains(store: Store, selection: Selection) -> set[tuple[int, int]]:
    """The ranks' own processes; empty: the store does not know (stacks were imported without)."""
    rows = query_columns(store, _MAINS, {"job": selection.job, "run": selection.run})
    return set(zip(rows["rank"].tolist(), rows["pid"].tolist(), strict=True))


def _where(store: Store, selection: Selection) -> tuple[str, str, str, dict[str, Any]]:
    """(table, condition, time of a row that is in the selection in ns, parameters)."""
    table = "stack_samples_by_step" if selection.steps else "stack_samples"
    conditions = ["job = {job:String}", "run = {run:UInt32}"]
    values: dict[str, Any] = {"job": selection.job, "run": selection.run}
    if selection.ranks:
        conditions.append("rank " + ("NOT IN" if selection.other_ranks else "IN") + " {ranks:Array(UInt32)}")
        values["ranks"] = list(selection.ranks)
    if selection.threads:
        either = ["tid = pid" + (f" AND (rank, pid) IN ({_MAINS})" if _mains(store, selection) else "")]
        if "main" not in selection.threads:
            either.clear()
        if named := [_pattern(name) for name in selection.threads if name != "main"]:
            either.append("match(thread, {threads:String})")
            values["threads"] = "^(" + "|".join(named) + ")$"
        conditions.append("(" + " OR ".join(either) + ")")
    if not any(fnmatch.fnmatchcase(OWN_THREAD, name) and name != "*" for name in selection.threads):
        conditions.append(f"thread != '{OWN_THREAD}'")
    if selection.steps:
        conditions.append("step BETWEEN {first_step:UInt32} AND {last_step:UInt32}")
        values["first_step"], values["last_step"] = selection.steps
        span = query_columns(
            store,
            "SELECT toUnixTimestamp64Nano(min(ts)) AS begin_ns,"
            " max(toUnixTimestamp64Nano(ts) + toInt64(duration_ns)) AS end_ns FROM iterations"
            " WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {a:UInt32} AND {b:UInt32}",
            {"job": selection.job, "run": selection.run, "a": selection.steps[0], "b": selection.steps[1]},
        )
        # Says nothing new, but keeps the view from joining the whole run.
        conditions.append(
            "ts < fromUnixTimestamp64Nano({end_ns:Int64}) AND last_ts >= fromUnixTimestamp64Nano({begin_ns:Int64})"
        )
        values |= {name: int(span[name][0]) if len(span[name]) else 0 for name in span}
    time = "ns"
    if selection.from_ns is not None or selection.to_ns is not None:
        values["from_ns"] = selection.from_ns or 0
        values["to_ns"] = _LATEST_NS if selection.to_ns is None else selection.to_ns
        begin, end = "toUnixTimestamp64Nano(ts)", "toUnixTimestamp64Nano(last_ts)"
        part = f"least({end}, {{to_ns:Int64}}) - greatest({begin}, {{from_ns:Int64}})"
        middle = f"{begin} + intDiv({end} - {begin}, 2)"
        lasts = "kind = 'off' AND last_ts > ts"
        conditions += [
            "last_ts >= fromUnixTimestamp64Nano({from_ns:Int64}) AND ts < fromUnixTimestamp64Nano({to_ns:Int64})",
            f"if({lasts}, {part} > 0, {middle} >= {{from_ns:Int64}} AND {middle} < {{to_ns:Int64}})",
        ]
        time = f"if({lasts}, toInt64(ns * (({part}) / ({end} - {begin}))), ns)"
    if selection.kind != "all":
        conditions.append("kind = {kind:String}")
        values["kind"] = selection.kind
    if selection.gil:
        conditions.append("gil")
    return table, " AND ".join(conditions), time, values


def _pattern(shell: str) -> str:
    return "".join({"*": ".*", "?": "."}.get(c, re.escape(c)) for c in shell)


def resolved(store: Store, selection: Selection) -> Selection:
    """The selection with "the last ns" as a time.

    Raises:
        ArgusError: The run has no samples.
    """
    if selection.last_ns is None:
        return selection
    end = selection.to_ns
    if end is None:
        newest = newest_sample_ns(store, selection.job, selection.run)
        if newest is None:
            raise nothing_found(store, selection)
        end = newest + 1
    return replace(selection, from_ns=end - selection.last_ns, to_ns=end, last_ns=None)


def read_profile(store: Store, selection: Selection, *, by: Collection[str] = (), lines: bool = False) -> Profile:
    """The chosen stacks with their weights.

    Args:
        store: The store.
        selection: Which; "the last" is taken from its newest sample.
        by: What is kept apart: "rank", "thread". What is not is added up in the store, however many ranks there are.
        lines: Keep lines apart; without, functions.

    Raises:
        ArgusError: There are no such samples, or the store cannot be reached.
    """
    selection = resolved(store, selection)
    table, where, time, values = _where(store, selection)
    keys = {
        "rank": "toInt64(rank)" if "rank" in by else "toInt64(-1)",
        "tid": "tid" if {"rank", "thread"} <= set(by) else "toUInt32(0)",
        "thread": "toString(thread)" if "thread" in by else "''",
    }
    chosen = ", ".join(f"{expression} AS {name}_key" for name, expression in keys.items())
    rows = query_columns(
        store,
        f"SELECT {chosen}, toString(kind) AS kind_key, toString(reason) AS reason_key, gc, in_kernel, stack_id,"
        f" sum({time}) AS spent_ns, sum(count) AS times,"
        " toUnixTimestamp64Nano(min(ts)) AS begin_ns, toUnixTimestamp64Nano(max(last_ts)) AS end_ns,"
        f" groupUniqArray(rank) AS ranks FROM {table} WHERE {where}"
        " GROUP BY rank_key, tid_key, thread_key, kind_key, reason_key, gc, in_kernel, stack_id"
        " ORDER BY rank_key, tid_key, thread_key, kind_key, spent_ns DESC, stack_id",
        values,
    )
    if not len(rows["times"]):
        raise nothing_found(store, selection)
    frames = _frames(store, selection, rows["stack_id"])
    shape = (lambda stack: stack) if lines else without_lines
    known = {one: shape(stack) for one, stack in frames.items()}
    names = (
        "rank_key",
        "tid_key",
        "thread_key",
        "kind_key",
        "reason_key",
        "gc",
        "in_kernel",
        "stack_id",
        "spent_ns",
        "times",
    )

    @functools.cache  # a thousand ranks share their stacks
    def frames_of(stack: int, kind: str, reason: str, gc: bool, in_kernel: bool) -> tuple[Frame, ...]:
        return annotated(known.get(stack, ()), kind=kind, reason=reason, gc=gc, in_kernel=in_kernel)

    samples = [
        Sample(
            frames_of(stack, kind, reason, bool(gc), bool(in_kernel)),
            ns, times, kind, rank, thread, tid,
        )
        for rank, tid, thread, kind, reason, gc, in_kernel, stack, ns, times in zip(
            *(rows[name].tolist() for name in names), strict=True
        )
    ]  # fmt: skip
    begin = max(int(rows["begin_ns"].min()), selection.from_ns or 0)
    end = min(int(rows["end_ns"].max()), selection.to_ns or _LATEST_NS)
    seen = sorted({int(rank) for ranks in rows["ranks"] for rank in ranks})
    cpu = rows["kind_key"] == "cpu"
    counted = int(rows["times"][cpu].sum())
    steps, step_ns = _steps(store, selection, seen, begin, end)
    return Profile(
        samples,
        title=selection.job,
        subtitle=selection.describe(),
        begin_ns=begin,
        end_ns=end,
        period_ns=round(int(rows["spent_ns"][cpu].sum()) / counted) if counted else 0,
        rank_steps=steps,
        rank_ns=step_ns if selection.steps else (end - begin) * len(seen),
    )


def _steps(store: Store, selection: Selection, ranks: list[int], begin: int, end: int) -> tuple[int, int]:
    """How many steps of these ranks lie in a selection, and how long they took."""
    if selection.steps:
        within = "step BETWEEN {a:UInt32} AND {b:UInt32}"
        a, b = selection.steps
    else:
        a = begin if selection.from_ns is None else selection.from_ns
        b = end if selection.to_ns is None else selection.to_ns
        within = (
            "toUnixTimestamp64Nano(ts) + intDiv(toInt64(duration_ns), 2) >= {a:Int64}"
            " AND toUnixTimestamp64Nano(ts) + intDiv(toInt64(duration_ns), 2) < {b:Int64}"
        )
    found = query_columns(
        store,
        "SELECT count() AS steps, toInt64(sum(duration_ns)) AS ns FROM iterations"
        f" WHERE job = {{job:String}} AND run = {{run:UInt32}} AND rank IN {{ranks:Array(UInt32)}} AND {within}",
        {"job": selection.job, "run": selection.run, "ranks": ranks, "a": a, "b": b},
    )
    return int(found["steps"][0]), int(found["ns"][0])


_PIECE = 5000
"""Ids in one query: they travel in its address or form."""


def _frames(store: Store, selection: Selection, ids: NDArray[Any]) -> dict[int, tuple[Frame, ...]]:
    return {one: stack.frames for one, stack in read_stacks(store, selection.job, selection.run, ids.tolist()).items()}


def read_stacks(store: Store, job: str, run: int, ids: Collection[int]) -> dict[int, Stack]:
    """Stacks by id. Those that the store lacks are missing."""
    found: dict[int, Stack] = {}
    wanted = sorted({int(one) for one in ids} - {0})
    for start in range(0, len(wanted), _PIECE):
        rows = query_columns(
            store,
            "SELECT stack_id, kinds, functions, files, lines, toString(python) AS python_state,"
            " toString(native) AS native_state FROM stacks"
            " WHERE job = {job:String} AND run = {run:UInt32} AND stack_id IN {ids:Array(UInt64)} LIMIT 1 BY stack_id",
            {"job": job, "run": run, "ids": wanted[start : start + _PIECE]},
        )
        columns = (rows[name] for name in ("kinds", "functions", "files", "lines", "python_state", "native_state"))
        for one, kinds, functions, files, lines, python, native in zip(
            rows["stack_id"].tolist(), *columns, strict=True
        ):
            found[one] = Stack(tuple(map(Frame, kinds, functions, files, lines)), python, native)
    return found


_ONLY = {
    ("cpu", "off"): ", all of them off the CPU: --kind off",
    ("off", "cpu"): ", all of them on the CPU: --kind cpu",
}
"""By what was asked for, and all the kinds there are."""


def nothing_found(store: Store, selection: Selection) -> ArgusError:
    """The error for a selection without samples: what was asked for, and what there is."""
    rows = query_columns(
        store,
        "SELECT groupUniqArray(rank) AS ranks, arraySort(groupUniqArray(toString(kind))) AS kinds,"
        " toUnixTimestamp64Nano(min(ts)) AS begin_ns,"
        " toUnixTimestamp64Nano(max(last_ts)) AS end_ns FROM stack_samples"
        " WHERE job = {job:String} AND run = {run:UInt32}",
        {"job": selection.job, "run": selection.run},
    )
    ranks = [int(rank) for found in rows["ranks"] for rank in found]
    hint = (
        f"It has samples of rank{'s' * (len(ranks) > 1)} {rank_text(ranks)} from {_clock(int(rows['begin_ns'][0]))}"
        f" to {_clock(int(rows['end_ns'][0]))}" + _ONLY.get((selection.kind, *rows["kinds"][0]), "")
        if ranks
        else "The run has no stacks at all: was it traced with --no-stacks, or have they expired?"
    )
    return ArgusError(
        f"no stacks of job '{named(selection.job)}' found: {selection.describe()}", hint, EXIT_UNAVAILABLE
    )


# ---- threads at a time


@dataclass(frozen=True)
class Thread:
    """Where a thread is.

    Attributes:
        rank, host, pid, tid: Whose.
        name: Its name; empty: not known.
        role: What it has in common with threads of other ranks: ``main``, ``main of helpers`` (of a data-loader
            worker), or the name without numbers.
        stack: Where it was for most of the time of which a stack was taken; without frames: none was.
        reason: What it waited for then; empty: it ran.
        share: Part of its observed time that it was there, 0 to 1.
        off_ns: Time off the CPU in the window.
        cpu_ns: Time on the CPU in the window.
        age_ns: Before the end of the window: its last sign of life; 0: in the window.
        gil: It held the GIL there.
    """

    rank: int
    host: str
    pid: int
    tid: int
    name: str
    role: str
    stack: Stack
    reason: str
    share: float
    off_ns: int
    cpu_ns: int
    age_ns: int
    gil: bool


EMPTY = Stack((), "none", "none")

_LOOK_BACK_S = (60, 3600, 86400 * 3650)


def read_threads(store: Store, selection: Selection) -> list[Thread]:
    """Where each chosen thread was.

    Of each thread the stack with the most time in the window is returned. For a thread without a row in the window (it
    was off the CPU, and its wait has not ended) it is its last stack before, and ``age_ns`` is how old that is.

    Args:
        store: The store.
        selection: Which; ``kind`` should be "all", lest waiting threads be missed.

    Raises:
        ArgusError: There are no such samples, or the store cannot be reached.
    """
    selection = resolved(store, selection)
    found = _read_threads(store, selection)
    if selection.steps is None and selection.from_ns is not None and selection.to_ns is not None:
        start, end = selection.from_ns, selection.to_ns
        expected = _processes(store, selection)
        for seconds in _LOOK_BACK_S:
            if expected <= {(thread.rank, thread.pid) for thread in found if thread.role == "main"}:
                break
            known = {(thread.rank, thread.pid, thread.tid) for thread in found}
            before = replace(selection, from_ns=end - seconds * S, to_ns=start)
            found += [
                thread
                for thread in _read_threads(store, before, last_only=end)
                if (thread.rank, thread.pid, thread.tid) not in known and (thread.rank, thread.pid) in expected
            ]
    if not found:
        raise nothing_found(store, selection)
    return sorted(found, key=lambda thread: (thread.rank, thread.pid, thread.tid))


def _processes(store: Store, selection: Selection) -> set[tuple[int, int]]:
    """The processes of the chosen ranks that have not ended, as far as the store knows."""
    rows = query_columns(
        store,
        "SELECT rank, pid FROM ranks FINAL WHERE job = {job:String} AND run = {run:UInt32} AND state != 'exited'",
        {"job": selection.job, "run": selection.run},
    )
    chosen = set(selection.ranks)
    return {
        (rank, pid)
        for rank, pid in zip(rows["rank"].tolist(), rows["pid"].tolist(), strict=True)
        if not chosen or (rank in chosen) != selection.other_ranks
    }


def _role(name: str, rank: int, pid: int, tid: int, mains: set[tuple[int, int]]) -> str:
    if pid == tid and mains and (rank, pid) not in mains:
        return "main of helpers"
    return thread_role(name, main=pid == tid)


def _read_threads(store: Store, selection: Selection, *, last_only: int | None = None) -> list[Thread]:
    table, where, time, values = _where(store, selection)
    # Of threads that were silent: the last row. Of others: the stack, whatever the samples say besides, with most time.
    order = "max(last_ts)" if last_only is not None else "own"
    rows = query_columns(
        store,
        "SELECT rank, any(host_) AS host, pid, tid, argMax(thread_, last_) AS thread,"
        " argMax(stack_id, known) AS stack_id, argMax(reason_, known) AS reason, argMax(gil_, known) AS gil,"
        " argMax(own, known) AS top, sum(own) AS total, sum(off) AS off_ns, sum(cpu) AS cpu_ns,"
        " toUnixTimestamp64Nano(max(last_)) AS last_ns"
        " FROM (SELECT rank, pid, tid, stack_id, any(toString(host)) AS host_, anyLast(toString(thread)) AS thread_,"
        f" max(last_ts) AS last_, (stack_id != 0, {order}) AS known, sum({time}) AS own,"
        f" sumIf({time}, kind = 'off') AS off, sumIf({time}, kind = 'cpu') AS cpu,"
        f" argMax(toString(reason), {time}) AS reason_, argMax(gil, {time}) AS gil_"
        f" FROM {table} WHERE {where} GROUP BY rank, pid, tid, stack_id)"
        " GROUP BY rank, pid, tid ORDER BY rank, pid, tid",
        values,
    )
    stacks = read_stacks(store, selection.job, selection.run, rows["stack_id"].tolist())
    columns = {name: values.tolist() for name, values in rows.items()}
    mains = _mains(store, selection)
    return [
        Thread(
            rank=columns["rank"][n],
            host=columns["host"][n],
            pid=columns["pid"][n],
            tid=columns["tid"][n],
            name=columns["thread"][n],
            role=_role(columns["thread"][n], columns["rank"][n], columns["pid"][n], columns["tid"][n], mains),
            stack=stacks.get(columns["stack_id"][n], EMPTY),
            reason=columns["reason"][n],
            share=columns["top"][n] / columns["total"][n] if columns["total"][n] else 1.0,
            off_ns=columns["off_ns"][n] if last_only is None else 0,
            cpu_ns=columns["cpu_ns"][n] if last_only is None else 0,
            age_ns=0 if last_only is None else max(last_only - columns["last_ns"][n], 1),
            gil=bool(columns["gil"][n]),
        )
        for n in range(len(columns["rank"]))
    ]
