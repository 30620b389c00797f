"""The jobs of a store: what was traced of each run, and the removal of a job's rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.model.text import named
from argus.store.cluster import LOCAL
from argus.store.open import Store
from argus.store.reader import list_jobs, list_runs, no_job, no_run, nothing_stored, query, query_columns


@dataclass(frozen=True)
class JobRun:
    """One run of one job.

    Attributes:
        job, run: Its name and number.
        ranks: Ranks seen; ``world_size``: of the whole job as its launcher says, 0: not known.
        hosts: Nodes.
        started_ns, ended_ns: Wall time of its first and last rows.
        open: Its trace has not ended, or was cut off.
        steps: Steps found; ``step_ns``: the median over ranks and steps, 0: none were found.
        status: Of the newest verdict stored; empty: none is. ``kind``, ``finding_ranks``: of its first finding.
        judged_ns: Wall time of that verdict; 0: none is stored.
        mesh: Data x pipeline x tensor parallel (``4x2x1``) where a recording has them, else ranks of a communicator of
            each dimension (``dp 4 x pp 2``); empty: not known.
        environment: Digits of a hash of what its ranks ran on and with; empty: not known. Runs with the same digits had
            the same environment (``environments``).
        uids: Users that its processes ran as, as their hosts number them.
    """

    job: str
    run: int
    ranks: int
    world_size: int
    hosts: int
    started_ns: int
    ended_ns: int
    open: bool
    steps: int
    step_ns: int
    status: str
    kind: str
    finding_ranks: list[int]
    judged_ns: int
    mesh: str = ""
    environment: str = ""
    uids: list[int] = field(default_factory=list)


# Sessions, processes and steps: imported jobs may have steps alone, a trace that has just begun no step yet. Only small
# tables are read, and steps from their rollup.
_RUNS = """
SELECT job, run, max(seen) AS ranks, max(world) AS world_size, max(nodes) AS hosts,
       minIf(first_ns, first_ns > 0) AS started_ns, max(last_ns) AS ended_ns, max(is_open) AS open,
       max(step_count) AS steps, max(typical_ns) AS step_ns
FROM
(
  SELECT job, run, 0 AS seen, max(world_size) AS world, uniqExact(host) AS nodes,
         toUnixTimestamp64Nano(min(started)) AS first_ns, toUnixTimestamp64Nano(max(ifNull(ended, started))) AS last_ns,
         max(ended IS NULL) AS is_open, 0 AS step_count, 0 AS typical_ns
  FROM jobs FINAL GROUP BY job, run
  UNION ALL
  SELECT job, run, uniqExact(rank), 0, uniqExact(host), 0, 0, 0, 0, 0 FROM ranks GROUP BY job, run
  UNION ALL
  SELECT job, run, max(ranks_of_step), 0, 0, toUnixTimestamp64Nano(min(first)), toUnixTimestamp64Nano(max(last)), 0,
         count(),
         toUInt64(arrayElement(quantilesTDigestMerge(0.5, 0.95, 0.99)(merged), 1))
  FROM
  (
    SELECT job, run, step, sum(n) AS ranks_of_step, min(iteration_rollup.first_ts) AS first,
           max(iteration_rollup.last_ts) AS last, quantilesTDigestMergeState(0.5, 0.95, 0.99)(quantiles) AS merged
    FROM iteration_rollup GROUP BY job, run, step
  )
  GROUP BY job, run
)
GROUP BY job, run
ORDER BY run DESC, ended_ns DESC, job
"""
_VERDICTS = """
SELECT job, run, status, kind, ranks, toInt64(toUnixTimestamp64Nano(created)) AS created_ns
FROM findings ORDER BY job, run, created DESC, share DESC LIMIT 1 BY job, run
"""

_MORE = """
SELECT job, run, max(layout) AS mesh, max(digits) AS environment,
       arraySort(arrayDistinct(arrayFlatten(groupArray(users)))) AS uids
FROM
(
  SELECT job, run, concat(toString(dp), 'x', toString(pp), 'x', toString(tp)) AS layout, '' AS digits,
         emptyArrayInt64() AS users FROM parallel_layout FINAL
  UNION ALL
  SELECT job, run, '', lower(substring(hex(sipHash64(arraySort(groupUniqArray(digest)))), 1, 8)), emptyArrayInt64()
  FROM environments FINAL WHERE digest != 0 GROUP BY job, run
  UNION ALL
  SELECT job, run, '', '', groupUniqArray(16)(uid) FROM ranks WHERE uid >= 0 GROUP BY job, run
)
GROUP BY job, run
"""
"""What not every run has."""
_DIMENSIONS = """
SELECT job, run, parallel_groups.dimension AS dimension,
       greatest(max(nranks), toInt32(max(length(ranks)))) AS size
FROM parallel_groups FINAL WHERE dimension IN {dimensions:Array(String)}
GROUP BY job, run, dimension HAVING size > 1
"""
DIMENSIONS = ("dp", "fsdp", "pp", "tp", "cp", "ep")
"""Of a mesh, as they are listed. Other communicators (``world``, ``unknown``) are no dimension of it."""


def list_job_runs(store: Store) -> list[JobRun]:
    """Every run of every job, the newest first.

    Raises:
        ArgusError: The store cannot be reached, or nothing is stored.
    """
    runs = find_job_runs(store) if store.exists() else []
    if not runs:
        raise nothing_stored(store)
    return runs


def find_job_runs(store: Store) -> list[JobRun]:
    """The same of a store that exists; empty: it has no runs yet.

    Raises:
        ArgusError: The store cannot be reached, or has no tables.
    """
    verdicts = {(row["job"], row["run"]): row for row in query(store, _VERDICTS).to_pylist()}
    more = {(row.pop("job"), row.pop("run")): row for row in query(store, _MORE).to_pylist()}
    meshes = _meshes(store)
    runs = []
    for row in query(store, _RUNS).to_pylist():
        verdict: dict[str, Any] = verdicts.get((row["job"], row["run"]), {})
        row |= more.get((row["job"], row["run"]), {})
        row["mesh"] = row.get("mesh") or meshes.get((row["job"], row["run"]), "")
        row["open"] = bool(row["open"])
        runs.append(
            JobRun(
                **row, status=verdict.get("status", ""), kind=verdict.get("kind", ""),
                finding_ranks=list(verdict.get("ranks", [])), judged_ns=verdict.get("created_ns", 0),
            )
        )  # fmt: skip
    return runs


def _meshes(store: Store) -> dict[tuple[str, int], str]:
    """Each run's mesh by its communicators: runs without any that have a dimension are missing."""
    sizes: dict[tuple[str, int], dict[str, int]] = {}
    for row in query(store, _DIMENSIONS, {"dimensions": list(DIMENSIONS)}).to_pylist():
        sizes.setdefault((row["job"], row["run"]), {})[row["dimension"]] = row["size"]
    return {
        run: " x ".join(f"{name} {known[name]}" for name in DIMENSIONS if name in known) for run, known in sizes.items()
    }


# Rows of a job lie in what has both columns and is no view. A cluster's rows lie in its nodes' local tables.
_TABLES = """
SELECT name, engine FROM system.tables
WHERE database = currentDatabase() AND engine LIKE '%MergeTree' AND name IN
(
  SELECT table FROM system.columns WHERE database = currentDatabase() AND name IN ('job', 'run')
  GROUP BY table HAVING count() = 2
)
ORDER BY name
"""


def count_job(store: Store, job: str, run: int | None = None) -> dict[str, int]:
    """Rows of a job, or of one run of it, by table; tables without any are left out.

    Raises:
        ArgusError: The store cannot be reached, or has no such job or run.
    """
    if not store.exists():
        raise nothing_stored(store)
    rows = _count(store, job, run)
    if not rows:
        known = [one.run for one in list_runs(store, job)]
        raise (
            no_run(job, run, known) if run is not None and known else no_job(job, list_jobs(store), f" at {store.url}")
        )
    return rows


def _count(store: Store, job: str, run: int | None) -> dict[str, int]:
    where, values = _which(job, run)
    names = [str(name).removesuffix(LOCAL) for name in query_columns(store, _TABLES)["name"]]
    if not names:
        raise nothing_stored(store)
    counts = " UNION ALL ".join(f"SELECT '{name}' AS name, count() AS rows FROM {name} WHERE {where}" for name in names)
    found = query(store, f"SELECT name, toInt64(rows) AS rows FROM ({counts}) WHERE rows > 0 ORDER BY name", values)
    return {row["name"]: row["rows"] for row in found.to_pylist()}


def remove_job(store: Store, job: str, run: int | None = None) -> dict[str, int]:
    """Removes all rows of a job, or of one run of it, from every table, and returns how many there were by table.

    It waits until they are gone, rollups included. Rows that wait on disk for the store stay, and so does the memory of
    inserts: a spool that was loaded before is not loaded again.

    Raises:
        ArgusError: The store cannot be reached or refuses, has no such job or run, or other shards still have rows.
    """
    from argus.store.driver import Error

    rows = count_job(store, job, run)
    where, values = _which(job, run)
    tables = query_columns(store, _TABLES)
    cluster = ""
    local = {str(name) for name in tables["name"] if str(name).endswith(LOCAL)}
    with store.lease() as client:
        try:
            if local and any(str(engine).startswith("Replicated") for engine in tables["engine"]):
                full = client.command(
                    "SELECT engine_full FROM system.tables WHERE database = currentDatabase() AND name = 'jobs'"
                )
                cluster = f" ON CLUSTER `{str(full).split(chr(39))[1]}`"
            for table in rows:
                name = table + LOCAL if table + LOCAL in local else table
                client.command(
                    f"ALTER TABLE {name}{cluster} DELETE WHERE {where}",
                    parameters=values,
                    settings={"mutations_sync": 2},
                )
        except Error as failure:
            raise store.explain(failure) from None
    if local and not cluster and (left := _count(store, job, run)):
        rows_left = f"{sum(left.values()):,} rows of job '{named(job)}'"
        message = f"{rows_left} are on other shards, which were initialised by themselves"
        raise ArgusError(message, "Run this again with the URL of each shard", EXIT_UNAVAILABLE)
    return rows


def _which(job: str, run: int | None) -> tuple[str, dict[str, Any]]:
    where = "job = {job:String}" + ("" if run is None else " AND run = {run:UInt32}")
    return where, {"job": job} | ({} if run is None else {"run": run})
