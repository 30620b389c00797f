"""Rows that were measured elsewhere, on their way into the store as a run of a job: no calls, no kernels, only what the
recording has."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from argus import __version__
from argus.model.errors import EXIT_USAGE, ArgusError
from argus.model.ranks import HIGHEST_RANK
from argus.model.units import UNKNOWN_HOST
from argus.store.open import Store
from argus.store.runs import flush_whole, new_run
from argus.store.writer import Writer

_WITHOUT_HOST = frozenset({"parallel_layout", "communicators", "dumped_groups", "dumped_calls"})
"""Tables that have no column for it."""
HOST = UNKNOWN_HOST
"""The host of ranks for which a recording names none."""


def too_high(where: str, rank: int) -> ArgusError:
    """What to raise of a rank above :data:`HIGHEST_RANK`. ``where``: the file, and its row if it has rows."""
    return ArgusError(f"{where}: rank {rank} is above {HIGHEST_RANK:,}", "Ranks count from 0", EXIT_USAGE)


@dataclass
class ImportReport:
    """What is known of a recording when all of it was read.

    Attributes:
        ranks: Global ranks in it.
        begin_ns, end_ns: When it began and ended, wall-clock ns.
        world_size: Ranks of the whole job; 0: not known.
        hosts, pids: Of each of ``ranks``; empty: not known.
        rank_source: Where the ranks come from, for ``ranks.rank_source``; empty: their order, if hosts are known, else
            the recording.
        counters: What was guessed or left out, by name. None of it is a loss.
        losses: What could not be read, by name.
    """

    ranks: list[int] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)
    rank_source: str = ""
    begin_ns: int = 0
    end_ns: int = 0
    world_size: int = 0
    counters: Tally[str] = field(default_factory=Tally)
    losses: Tally[str] = field(default_factory=Tally)


def store_run(
    store: Store,
    job: str,
    source: str,
    report: ImportReport,
    tables: Iterable[tuple[str, Mapping[str, Any]]],
    path: str,
) -> int:
    """Stores a recording as a new run.

    Args:
        store: Where to.
        job: Name of the job.
        source: Which importer: ``jobs.launcher``.
        report: Filled in at the latest when ``tables`` has ended.
        tables: Table names and columns without ``job``, ``run``, ``host``, in batches. May be read while it is stored.
        path: File, for ``ranks.command``.

    Returns:
        Number of the run.

    Raises:
        ArgusError: The store cannot be had or refuses rows. The run is then left without an end in ``jobs``.
    """
    run = new_run(store)
    with Writer(store, source=f"import/{run}") as writer:
        shared = {"job": job, "run": run, "host": HOST}

        def session(version: int, *, ended: bool) -> None:
            writer.append("jobs", {
                **shared, "started": np.array([report.begin_ns], np.int64),
                "ended": np.array([report.end_ns], np.int64) if ended else [None],
                "world_size": report.world_size, "launcher": source, "mono_offset_ns": 0,
                "argus_version": __version__, "version": version,
            })  # fmt: skip

        version = time.time_ns()
        session(version, ended=False)
        for table, columns in tables:
            where = {} if table in _WITHOUT_HOST else {"host": HOST}
            writer.append(table, {"job": job, "run": run, **where, **columns})
            flush_whole(writer, job, run)
        if report.ranks:
            writer.append("ranks", {
                **shared, "host": report.hosts or HOST, "rank": np.array(report.ranks, np.uint32),
                "pid": np.array(report.pids or np.zeros(len(report.ranks)), np.uint32),
                "local_rank": -1, "rank_source": report.rank_source or ("order" if report.hosts else "trace"),
                "started": np.full(len(report.ranks), report.begin_ns, np.int64), "exe": "", "command": path,
                "libraries": [[] for _ in report.ranks], "probes": 0, "state": "imported", "version": version,
            })  # fmt: skip
        counters = [(name, value, True) for name, value in report.losses.items()]
        counters += [(name, value, False) for name, value in report.counters.items()]
        if counters:
            writer.append("coverage", {
                **shared, "counter": [name for name, _, _ in counters],
                "value": np.array([value for _, value, _ in counters], np.uint64),
                "loss": np.array([loss for _, _, loss in counters], bool),
                "ts": np.full(len(counters), report.end_ns, np.int64), "version": version,
            })  # fmt: skip
        session(version + 1, ended=True)
        flush_whole(writer, job, run)
    return run
