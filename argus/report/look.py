"""What panels are built from: one run of a job, diagnosed once, each query run once.

What the verdict was reached by is here too (:attr:`Look.case`), so that the page shows what the verdict names.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.case import Case
from argus.diagnose.ranks.lateness import RECENT_STEPS
from argus.diagnose.read import gpu_times, queries
from argus.diagnose.read.peers import Mesh, mesh_of
from argus.diagnose.read.query import across, of_job, runnable_sql
from argus.diagnose.stored import Examined
from argus.diagnose.verdict import NOTABLE_SLOWDOWN, Finding, Verdict
from argus.model.text import printable, shortened
from argus.report.panel import Fact, Mark, Panel, Sql, Table, View
from argus.store.open import Store
from argus.store.reader import query_columns

Columns: TypeAlias = "dict[str, NDArray[Any]]"

NAMED = 16
"""Ranks of findings that panels show one by one; of more the first of each finding."""
WIDTH = 160
"""Characters of a name of others."""
LONG_NAME = 200
"""A job's name that is longer stands in queries by its hash: it may have a megabyte, and is in all of them."""
LONG_SQL = 60_000
"""Characters of a query that is shown. A job of a thousand hosts whose clocks could not be stored has longer ones."""
_EVER = 2**32 - 1

_RANKS = """
SELECT rank, argMax(host, version) AS host, argMax(local_rank, version) AS local_rank FROM ranks
WHERE job = {job:String} AND run = {run:UInt32} AND rank_source != 'parent' GROUP BY rank ORDER BY rank
"""
_STEPPED = """
SELECT rank, any(host) AS host, toInt32(-1) AS local_rank FROM iterations
WHERE job = {job:String} AND run = {run:UInt32} GROUP BY rank ORDER BY rank
"""
_TIMES = """
SELECT toUnixTimestamp64Nano(min(first_ts)) AS begin_ns,
       toUnixTimestamp64Nano(max(last_ts)) + toInt64(max(max_ns)) AS end_ns, count() AS n
FROM iteration_rollup
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}
"""
_SESSION = """
SELECT toUnixTimestamp64Nano(min(started)) AS begin_ns, toUnixTimestamp64Nano(max(ifNull(ended, started))) AS end_ns,
       count() AS n
FROM jobs FINAL WHERE job = {job:String} AND run = {run:UInt32}
"""
_STAGES = """
SELECT rank, any(stage) AS stage, any(dp_rank) AS dp_rank FROM phase_ops
WHERE job = {job:String} AND run = {run:UInt32} AND step = {last:UInt32} GROUP BY rank ORDER BY rank
"""


def bounded(text: object, width: int = WIDTH) -> str:
    """A name of others: of bounded length, without control characters."""
    return shortened(printable(shortened(str(text), width)), width)


@dataclass(frozen=True)
class Place:
    """Where ranks are: ``host`` and ``gpu`` by rank, as texts that may be shown."""

    host: Mapping[int, str]
    gpu: Mapping[int, str]

    def of(self, rank: int) -> str:
        """A rank with its node: rank 3 on node-0."""
        host = self.host.get(rank, "")
        return f"rank {rank} on {host}" if host else f"rank {rank}"


@dataclass
class Look:
    """One run of one job.

    Attributes:
        store: Where its rows are.
        job, run: Its name and session.
        since_ns: Only what came later, wall time; 0: all of it.
        examined: The verdict, and what it was reached by.
        shown: First and last step, where only a part of those of the verdict is shown.
    """

    store: Store
    job: str
    run: int
    since_ns: int
    examined: Examined
    shown: tuple[int, int] | None = None
    _answers: dict[tuple[str, str], Columns] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        return self.examined.verdict

    @property
    def case(self) -> Case | None:
        """What was compared; None: there were no steps that could be."""
        return self.examined.case

    @cached_property
    def params(self) -> dict[str, Any]:
        """Of every query: job, run, since_ns, first, last, and how the hosts go together."""
        first, last = (self.steps[0], self.steps[1]) if self.steps else (0, _EVER)
        params: dict[str, Any] = {
            "job": self.job, "run": self.run, "since_ns": self.since_ns, "first": first, "last": last
        }  # fmt: skip
        if self.examined.across is not None:
            params |= self.examined.across.params()
        if self.case is not None and "left_out" in self.case.params:
            params["left_out"] = self.case.params["left_out"]
        return params

    @property
    def steps(self) -> list[int]:
        """The first and the last step; empty: there are none."""
        return self.verdict["steps"] if self.shown is None else list(self.shown)

    def part(self, first: int, last: int) -> Look:
        """The same run, with these steps alone, as far as they are there; whole: there are none of them."""
        if not self.steps or first > self.steps[1] or last < self.steps[0]:
            return self
        return replace(self, shown=(max(first, self.steps[0]), min(last, self.steps[1])), _answers={})

    def read(self, text: str, **more: Any) -> Columns:
        """The answer to a query, which is asked once."""
        given = {**self.params, **more}
        used = {name: given[name] for name in re.findall(r"\{(\w+):", text) if name in given}
        key = text, repr(sorted(used.items(), key=lambda item: item[0]))
        if key not in self._answers:
            self._answers[key] = self.read_large(text, **more)
        return self._answers[key]

    def read_large(self, text: str, **more: Any) -> Columns:
        """The answer to a query, which is not remembered."""
        given = {**self.params, **more}
        query = partial(query_columns, self.store)
        if text in self._nested:
            # It holds another query in its form for several hosts, and is taken as it is.
            return query(text, {name: value for name, value in given.items() if name != "across"})
        return (of_job(query) if "across" in given else query)(text, given)

    @cached_property
    def _nested(self) -> set[str]:
        return set()

    def within(self, outer: str, inner: str) -> str:
        """A query over the answer of another one, which stands for ``$inner``."""
        how = str(self.params.get("across", ""))
        text = outer.replace("$inner", (across(inner, how) if how else inner).strip())
        self._nested.add(text)
        return text

    def sql(self, title: str, text: str, **more: Any) -> Sql:
        """A query of a panel as people run it."""
        given = {**self.params, **more}
        if text in self._nested:
            given.pop("across", None)
        if len(self.job) > LONG_NAME:
            text = re.sub(r"\{job:String\}", self._hashed_name, text)
        shown = runnable_sql(text, given)
        if len(shown) > LONG_SQL:
            return {"title": f"{title} (too long to be shown here)", "text": f"-- {len(shown):,} characters\nSELECT 1"}
        return {"title": title, "text": shown}

    @property
    def _hashed_name(self) -> str:
        """The job by a digest of its name."""
        digest = hashlib.md5(self.job.encode(errors="replace"), usedforsecurity=False).hexdigest().upper()
        return f"(SELECT any(job) FROM jobs WHERE run = {int(self.run)} AND hex(MD5(job)) = '{digest}')"

    @cached_property
    def findings(self) -> list[Finding]:
        return self.verdict["findings"]

    @cached_property
    def named(self) -> list[int]:
        """The first ranks of each finding, those of the costliest first, at most :data:`NAMED`."""
        queues = [list(finding["ranks"]) for finding in self.findings]
        found: list[int] = []
        for turn in range(max(map(len, queues), default=0)):
            found += [queue[turn] for queue in queues if turn < len(queue)]
        return list(dict.fromkeys(found))[:NAMED]

    @cached_property
    def _rows_of_ranks(self) -> Columns:
        rows = self.read(_RANKS)
        return rows if len(rows["rank"]) else self.read(_STEPPED)

    @cached_property
    def ranks(self) -> NDArray[np.int64]:
        """All ranks of the run, ascending."""
        return self._rows_of_ranks["rank"].astype(np.int64)

    @cached_property
    def place(self) -> Place:
        rows = self._rows_of_ranks
        names = {host: bounded(host, 64) for host in dict.fromkeys(rows["host"].tolist())}
        ranks = self.ranks.tolist()
        local = rows["local_rank"].tolist()
        return Place(
            {rank: names[host] for rank, host in zip(ranks, rows["host"].tolist(), strict=True)},
            {rank: f"GPU {one}" if one >= 0 else "" for rank, one in zip(ranks, local, strict=True)},
        )

    @cached_property
    def mesh(self) -> Mesh:
        """Which ranks do the same work, of all of :attr:`ranks`."""
        seen = self.case.gpus if self.case is not None else None
        if seen is not None and np.array_equal(seen.mesh.ranks, self.ranks):
            return seen.mesh
        across_hosts = self.examined.across
        groups = self.read(queries.GROUPS)
        return mesh_of(groups, self.ranks, np.zeros(len(self.ranks), np.int64), gpu_times.joined(across_hosts))

    @cached_property
    def recorded_stages(self) -> dict[int, tuple[int, int]]:
        """Stage and data-parallel rank of each rank, where a recording has them."""
        if not self.steps:
            return {}
        rows = self.read(_STAGES)
        columns = (rows[name].tolist() for name in ("rank", "stage", "dp_rank"))
        return {rank: (stage, lane) for rank, stage, lane in zip(*columns, strict=True)}

    @cached_property
    def stages(self) -> dict[int, int]:
        """The pipeline stage of each rank, in the order of their first ranks; empty: there are none that are known."""
        if self.recorded_stages:
            return {rank: stage for rank, (stage, _) in self.recorded_stages.items()}
        if not self.mesh.staged:
            return {}
        return dict(zip(self.mesh.ranks.tolist(), in_order(self.mesh.stage).tolist(), strict=True))

    def group(self, rank: int) -> str:
        """What a rank is drawn with: its stage, else its node."""
        if rank in self.stages:
            return f"stage {self.stages[rank]}"
        return self.place.host.get(rank, "")

    def newest(self) -> dict[str, int]:
        """The first and the last of the newest steps, which are those that the verdict is about: a fault that began
        lately is half as large in an average of twice as many."""
        first, last = self.steps[0], self.steps[1]
        return {"first": max(first, last - RECENT_STEPS + 1), "last": last}

    @cached_property
    def cost_ns(self) -> tuple[float, float] | None:
        """What a step takes now, and what of it is lost by the verdict; None: nothing that shows, or not known."""
        slowdown = float(self.verdict["slowdown"])
        if self.case is None or self.verdict["status"] != "degraded" or slowdown < NOTABLE_SLOWDOWN:
            return None
        takes_ns = self.case.step.now_ns
        return takes_ns, takes_ns * (1 - 1 / slowdown)

    @property
    def slowdown_text(self) -> str:
        """The figure of the verdict that panels refer to."""
        return f"{self.verdict['slowdown']:.2f}x of the verdict"

    @cached_property
    def window_ns(self) -> tuple[int, int]:
        """Wall time of what is shown; 0, 0: not known."""
        rows = self.read(_TIMES) if self.steps else self.read(_SESSION)
        if not len(rows["n"]) or not int(rows["n"][0]):
            rows = self.read(_SESSION)
        if not len(rows["n"]) or not int(rows["n"][0]):
            return 0, 0
        return max(int(rows["begin_ns"][0]), self.since_ns), int(rows["end_ns"][0])

    @cached_property
    def marks(self) -> list[Mark]:
        """Where findings begin, and where there is more work."""
        if not self.steps:
            return []
        found: list[Mark] = []
        for finding in self.findings:
            since = finding["steps"][0] if finding["steps"] else 0
            if since > self.steps[0]:
                text = f"{finding['kind'].replace('_', ' ')} {_of_ranks(finding['ranks'])}".strip()
                found.append({"step": since, "kind": "change", "text": text})
        notes = self.case.notes if self.case is not None else None
        if notes is not None and notes.more_work_since is not None:
            found.append({"step": notes.more_work_since, "kind": "more_work", "text": bounded(notes.more_work, 400)})
        return found


def _of_ranks(ranks: Sequence[int]) -> str:
    from argus.model.units import ranks_text

    return ranks_text(ranks)


def in_order(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Labels as numbers from 0, in the order in which they come first."""
    _, first, place = np.unique(labels, return_index=True, return_inverse=True)
    return np.asarray(np.argsort(np.argsort(first))[place], np.int64)


def some(ranks: Sequence[int], most: int) -> list[int]:
    """At most so many of them, evenly chosen."""
    return list(ranks)[:: max(1, -(-len(ranks) // most))]


def panel(
    ident: str,
    title: str,
    lead: str,
    views: Sequence[View],
    *,
    table: Table | None = None,
    sql: Sequence[Sql] = (),
) -> Panel:
    """A panel with something in it."""
    return {
        "id": ident, "title": title, "lead": lead, "absent": "", "views": list(views), "table": table, "sql": list(sql)
    }  # fmt: skip


def absent(ident: str, title: str, why: str, *, sql: Sequence[Sql] = ()) -> Panel:
    """A panel without data: why, in one line."""
    line = bounded(why.replace("\n", " "), 400)
    return {"id": ident, "title": title, "lead": "", "absent": line, "views": [], "table": None, "sql": list(sql)}


def fact(name: str, text: str, state: str = "") -> Fact:
    """A fact with texts of others in it."""
    assert state in ("good", "bad", "unknown", "")
    return {"name": bounded(name, 80), "text": bounded(text, 600), "state": state}  # type: ignore[typeddict-item]
