"""Runs of the same job class: how long steps took, which are the baseline, and where the environment changed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.iteration.against_baseline import MIN_RUNS
from argus.diagnose.read import queries
from argus.diagnose.read.baseline import read_owner
from argus.diagnose.read.profile import class_name, read_class
from argus.model.errors import ArgusError
from argus.model.text import counted
from argus.report.arrays import Arrays
from argus.report.look import Columns, Look, absent, bounded, panel
from argus.report.panel import Column, Line, Mark, Panel, Series, Sql, Table
from argus.store.reader import query_columns

ID = "history"
TITLE = "Runs of this job class"

RUNS = 60
"""The newest, and the one that is shown."""
NAMES = 2_000
"""Names of jobs that begin like the class, those traced last."""
LISTED = 40
FEWEST = MIN_RUNS
"""Runs of a baseline below which it has no line, as none is compared with it."""

_JOBS = f"""
SELECT job FROM jobs WHERE startsWith(job, {{name:String}})
  AND {queries.of_owner("startsWith(job, {name:String})")}
GROUP BY job ORDER BY max(started) DESC, job LIMIT {NAMES}
"""
_OF_OWNER = queries.of_owner("job IN {jobs:Array(String)}")
_RUNS = f"""
SELECT job, run, toUnixTimestamp64Nano(min(first)) AS began_ns, count() AS steps, max(ranks) AS ranks,
       toFloat64(quantileExactInclusive(0.5)(step_ns)) AS step_ns
FROM
(
  SELECT job, run, step, sum(n) AS ranks, sum(sum_ns) / ranks AS step_ns, min(iteration_rollup.first_ts) AS first
  FROM iteration_rollup
  WHERE job IN {{jobs:Array(String)}} AND {_OF_OWNER} AND (run = {{run:UInt32}} OR run IN
  (
    SELECT DISTINCT run FROM iteration_rollup WHERE job IN {{jobs:Array(String)}} AND {_OF_OWNER}
    ORDER BY run DESC LIMIT {RUNS}
  ))
  GROUP BY job, run, step
)
GROUP BY job, run ORDER BY began_ns, job, run
"""
"""A run's number is the time of its first trace, s, so that the highest are the newest."""
_VERDICTS = """
SELECT job, run, status, kind FROM findings WHERE job IN {jobs:Array(String)}
ORDER BY job, run, created DESC, share DESC LIMIT 1 BY job, run
"""
_BASELINES = f"""
SELECT job, run FROM baselines FINAL WHERE class = {{class:String}} AND NOT removed
  AND (source = 'set' OR {queries.of_owner("job IN (SELECT job FROM baselines WHERE class = {class:String})")})
"""
_ENVIRONMENTS = """
SELECT job, run, toString(sipHash64(arraySort(groupUniqArray(digest)))) AS environment FROM environments FINAL
WHERE job IN {jobs:Array(String)} AND digest != 0 GROUP BY job, run
"""
_MESHES = """
SELECT job, run, arrayStringConcat(arraySort(groupArray(concat(dimension, ' ', toString(nranks)))), ' x ') AS mesh FROM
(
  SELECT job, run, dimension, max(nranks) AS nranks FROM parallel_groups FINAL
  WHERE job IN {jobs:Array(String)} GROUP BY job, run, dimension
)
GROUP BY job, run
"""


@dataclass(frozen=True)
class _History:
    """The runs of a class, the oldest first.

    Attributes:
        rows: job, run, began_ns, steps, ranks, step_ns.
        here: The place of the run that is shown.
        baseline: Which are baselines.
        verdicts: Status, and the kind of the costliest finding.
        changed: Which ran in another environment than the one before.
        others: Runs of the name that have another number of ranks, or another mesh.
        bounded: There may be older runs, which were not read.
        owned: Whose the run is is known: runs of other users were not read.
    """

    rows: Columns
    here: int
    baseline: NDArray[np.bool_]
    verdicts: list[str]
    changed: NDArray[np.bool_]
    others: int
    bounded: bool
    owned: bool


def build(look: Look, arrays: Arrays) -> Panel:
    """The trend of a job class over its runs."""
    name = class_name(look.job)
    owner = read_owner(partial(query_columns, look.store), look.job, look.run)
    begun = look.read(_JOBS, name=name, owner=owner)["job"].tolist()
    jobs = [one for one in begun if class_name(one) == name] or [look.job]
    try:
        ident = read_class(partial(query_columns, look.store), look.job, look.run)
    except ArgusError:
        ident = ""
    given: dict[str, Any] = {"jobs": jobs, "class": ident, "owner": owner}
    sql: list[Sql] = [
        look.sql("Step times of runs", _RUNS, jobs=jobs, owner=owner), look.sql("Their verdicts", _VERDICTS, jobs=jobs),
        look.sql("The baseline", _BASELINES, **given), look.sql("Their environments", _ENVIRONMENTS, jobs=jobs),
        look.sql("Their meshes", _MESHES, jobs=jobs),
    ]  # fmt: skip
    found = _read(look, given, len(begun) >= NAMES)
    if found is None:
        return absent(ID, TITLE, "no whole step of it is stored", sql=sql)
    if len(found.rows["run"]) < 2:
        why = "it is the only run of this job class (name without ids, ranks, mesh) that is stored"
        return absent(ID, TITLE, why, sql=sql)
    view = _view(found, arrays)
    return panel(ID, TITLE, _lead(found), [view], table=_table(look, found), sql=sql)


def _read(look: Look, given: dict[str, Any], bounded_names: bool) -> _History | None:
    rows = look.read(_RUNS, **given)
    keys = list(zip(rows["job"].tolist(), rows["run"].tolist(), strict=True))
    if (look.job, look.run) not in keys:
        return None
    ranks = rows["ranks"].astype(np.int64)
    alike = ranks == ranks[keys.index((look.job, look.run))]
    meshes = _by_run(look.read(_MESHES, **given), "mesh")
    mesh = meshes.get((look.job, look.run))
    alike &= np.array([mesh is None or meshes.get(key, mesh) == mesh for key in keys])
    rows = {name: values[alike] for name, values in rows.items()}
    keys = [key for key, kept in zip(keys, alike.tolist(), strict=True) if kept]
    verdicts = _by_run(look.read(_VERDICTS, **given), "status")
    kinds = _by_run(look.read(_VERDICTS, **given), "kind")
    learned = _by_run(look.read(_BASELINES, **given), "run")
    digests = _by_run(look.read(_ENVIRONMENTS, **given), "environment")
    last, changed = "", []
    for key in keys:
        digest = digests.get(key, "")
        changed.append(bool(digest and last and digest != last))
        last = digest or last
    texts = [f"{verdicts.get(key, '')} {kinds.get(key, '')}".replace("_", " ").strip() for key in keys]
    return _History(
        rows, keys.index((look.job, look.run)), np.array([key in learned for key in keys]), texts, np.array(changed),
        int((~alike).sum()), bounded_names or len(alike) >= RUNS, bool(given["owner"]),
    )  # fmt: skip


def _by_run(rows: Columns, name: str) -> dict[tuple[str, int], str]:
    keys = zip(rows["job"].tolist(), rows["run"].tolist(), strict=True)
    return dict(zip(keys, map(str, rows[name].tolist()), strict=True))


def _view(found: _History, arrays: Arrays) -> Series:
    steps = found.rows["step_ns"].astype(np.float64)
    count = len(steps)
    lines: list[Line] = [{"title": "median step of a run", "role": "typical", "y": arrays.add(steps)}]
    learned = steps[found.baseline]
    if len(learned) >= FEWEST:
        for title, role, value in (
            (f"baseline, {len(learned)} healthy runs", "baseline", np.median(learned)),
            ("the shortest of them", "low", learned.min()), ("the longest of them", "high", learned.max()),
        ):  # fmt: skip
            lines.append({"title": title, "role": role, "y": arrays.add(np.full(count, value))})  # type: ignore[typeddict-item]
    marks: list[Mark] = [{"step": found.here + 1, "kind": "note", "text": "this run"}]
    for place in np.flatnonzero(found.changed).tolist():
        marks.append({"step": place + 1, "kind": "change", "text": "another environment than the run before"})
    marks.sort(key=lambda mark: mark["step"])
    return {
        "view": "series", "x_title": "run", "x_unit": "count",
        "x": arrays.add(np.arange(1, count + 1), "f8"),
        "y_title": "step time", "y_unit": "ns", "lines": lines, "marks": marks,
    }  # fmt: skip


def _lead(found: _History) -> str:
    steps = found.rows["step_ns"].astype(np.float64)
    lead = f"{counted(len(steps), 'run')} of the same name (without ids at its end), ranks and mesh."
    learned = steps[found.baseline & (np.arange(len(steps)) != found.here)]
    if len(learned) >= FEWEST:
        change = steps[found.here] / np.median(learned) - 1
        size = f"{abs(change):.1%} {'longer' if change > 0 else 'shorter'} than"
        lead += f" This run's median step is {size} that of its {len(learned)} baselines."
    elif len(learned) or not found.baseline.any():
        lead += f" {FEWEST} healthy runs make a baseline; {len(learned)} are there."
    if found.bounded:
        lead += f" Of the name the newest {RUNS} runs are looked at."
    if found.others:
        lead += f" {counted(found.others, 'run')} with another number of ranks, or another mesh, left out."
    if found.owned:
        lead += " Runs of other users are left out."
    return lead


def _table(look: Look, found: _History) -> Table:
    columns: list[Column] = [
        {"title": "run", "unit": ""}, {"title": "job", "unit": ""}, {"title": "began", "unit": ""},
        {"title": "steps", "unit": "count"}, {"title": "median step", "unit": "ns"},
        {"title": "of this run's", "unit": "ratio"}, {"title": "verdict", "unit": ""},
        {"title": "baseline", "unit": ""}, {"title": "environment", "unit": ""},
    ]  # fmt: skip
    rows = found.rows
    steps = rows["step_ns"].astype(np.float64)
    listed: list[list[str | float | int | None]] = []
    for place in range(len(steps) - 1, max(-1, len(steps) - 1 - LISTED), -1):
        listed.append([
            int(rows["run"][place]), bounded(rows["job"][place], 60), _date(int(rows["began_ns"][place])),
            int(rows["steps"][place]), float(steps[place]), float(steps[place] / steps[found.here]),
            found.verdicts[place], "yes" if found.baseline[place] else "",
            "changed" if found.changed[place] else "",
        ])  # fmt: skip
    return {"columns": columns, "rows": listed, "of": len(steps)}


def _date(ns: int) -> str:
    return datetime.fromtimestamp(ns // 10**9, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
