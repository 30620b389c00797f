"""The queries behind a verdict. Each takes job, run, first and last (steps) as parameters; ``shown`` puts the values
in, so that what a verdict cites can be pasted into ``argus sql``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy.typing as npt

Query: TypeAlias = Callable[[str, Mapping[str, Any]], dict[str, npt.NDArray[Any]]]
"""Runs SQL with parameters and returns columns: ``functools.partial(argus.store.reader.query_columns, store)``."""

_ITERATIONS = (
    "iterations WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}"
)

STEPS = f"""
SELECT step, toFloat64(median(duration_ns)) AS duration_ns, toFloat64(median(confidence)) AS confidence,
       uniqExact(rank) AS ranks
FROM {_ITERATIONS}
GROUP BY step ORDER BY step
"""
"""The job's step times: the median over ranks."""

_LATE = f"""
WITH
  (SELECT min(ts) FROM {_ITERATIONS}) AS begin,
  (SELECT max(addNanoseconds(ts, duration_ns)) FROM {_ITERATIONS}) AS end,
  calls AS
  (
    SELECT comm_group, aligned_seq, groupArray(rank) AS ranks, groupArray(toUnixTimestamp64Nano(ts)) AS times,
           min(rank) AS ref_rank, argMin(ts, rank) AS ref_ts
    FROM collectives_aligned
    WHERE job = {{job:String}} AND run = {{run:UInt32}} AND aligned AND ts > begin AND ts <= end
      AND op NOT IN ('Send', 'Recv', 'GroupStart', 'GroupEnd')
    GROUP BY comm_group, aligned_seq
    HAVING length(ranks) > 1
  ),
  whole AS
  (
    SELECT *, max(length(ranks)) OVER (PARTITION BY comm_group) AS most FROM calls
  ),
  late AS
  (
    SELECT w.comm_group AS comm_group, w.aligned_seq AS aligned_seq, i.step AS step,
           arrayJoin(arrayZip(w.ranks, w.times)) AS arrival,
           arrival.1 AS rank,
           arrival.2 - arrayReduce('quantileExactLow(0.5)', w.times) AS late_ns
    FROM (SELECT * FROM whole WHERE 10 * length(ranks) >= 9 * most) AS w
    ASOF JOIN
    (
      SELECT rank, ts, step, addNanoseconds(ts, duration_ns) AS ts_end
      FROM {_ITERATIONS}
    ) AS i ON w.ref_rank = i.rank AND w.ref_ts > i.ts
    WHERE w.ref_ts <= i.ts_end
  )
"""
# The low median: of two ranks the earlier counts as on time, of four with two late ones the punctual pair does. A
# call that more than a tenth of its ranks lack (attached later, records lost) says nothing about who was late.

LATENESS = (
    _LATE
    + """
SELECT comm_group, rank, step, toFloat64(max(late_ns)) AS peak_ns, toFloat64(argMin(late_ns, aligned_seq)) AS first_ns,
       toFloat64(argMax(late_ns, aligned_seq)) AS last_ns
FROM late
GROUP BY comm_group, rank, step
ORDER BY step, rank, comm_group
"""
)
"""How late each rank came to the collectives of each step, against the median rank: most, first and last call."""

LEAD = (
    _LATE
    + """
SELECT step, toFloat64(maxIf(late_ns, has({ranks:Array(UInt32)}, rank))) AS suspects_ns,
       toFloat64(maxIf(late_ns, NOT has({ranks:Array(UInt32)}, rank))) AS others_ns
FROM late
GROUP BY step
HAVING countIf(has({ranks:Array(UInt32)}, rank)) > 0 AND countIf(NOT has({ranks:Array(UInt32)}, rank)) > 0
ORDER BY step
"""
)
"""The latest of some ranks and the latest of all others, by step: the difference is what the others lose."""

LAST = (
    _LATE
    + """
SELECT step, argMax(rank, late_by_rank) AS rank,
       toFloat64(max(late_by_rank)) - toFloat64(arrayReverseSort(groupArray(late_by_rank))[2]) AS lead_ns
FROM (SELECT step, rank, max(late_ns) AS late_by_rank FROM late GROUP BY step, rank)
GROUP BY step
HAVING count() > 1
ORDER BY step
"""
)
"""The last rank of each step and its distance to the second last."""

CPU_TIME = f"""
WITH
  (SELECT min(ts) FROM {_ITERATIONS}) AS begin,
  (SELECT max(addNanoseconds(ts, duration_ns)) FROM {_ITERATIONS}) AS end,
  calls AS
  (
    SELECT l.rank AS rank, i.step AS step, l.kind AS kind, toUnixTimestamp64Nano(l.ts) AS at,
           greatest(l.duration_ns, 0) AS inside,
           at - greatest(toUnixTimestamp64Nano(i.ts), max(at + inside) OVER
             (PARTITION BY rank, step ORDER BY at ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)) AS gap
    FROM
    (
      SELECT rank, ts, kind, duration_ns FROM launches
      WHERE job = {{job:String}} AND run = {{run:UInt32}} AND ts > begin AND ts <= end AND NOT in_nccl
        AND has({{ranks:Array(UInt32)}}, rank)
    ) AS l
    ASOF JOIN
    (
      SELECT rank, ts, step, addNanoseconds(ts, duration_ns) AS ts_end FROM {_ITERATIONS}
    ) AS i ON l.rank = i.rank AND l.ts > i.ts
    WHERE l.ts <= i.ts_end
  )
SELECT rank, step, toFloat64(sumIf(inside, kind = 'sync')) AS sync_ns, toFloat64(sumIf(inside, kind = 'module')) AS
module_ns,
       toFloat64(sumIf(greatest(gap, 0), kind IN ('memcpy_h2d', 'memcpy'))) AS data_ns,
       toFloat64(sumIf(greatest(gap, 0), kind NOT IN ('memcpy_h2d', 'memcpy'))) AS other_ns
FROM calls
GROUP BY rank, step
ORDER BY step, rank
"""
"""Where some ranks' CPU time went, by step: waiting for the GPU, loading code, outside CUDA before a copy of data, and
outside CUDA otherwise."""

PHASE_TIME = """
SELECT rank, step, phase, toFloat64(duration_ns) AS duration_ns FROM phases
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}
  AND has({ranks:Array(UInt32)}, rank)
ORDER BY step, rank, phase
"""
"""Where some ranks' steps went, by phase."""

ALIGNMENT = """
SELECT uniqExactIf(rank, error = '') AS aligned_ranks, uniqExact(rank) AS ranks, anyIf(error, error != '') AS why
FROM communicators FINAL
WHERE job = {job:String} AND run = {run:UInt32}
"""

HOSTS = """
SELECT rank, argMax(host, version) AS host FROM ranks
WHERE job = {job:String} AND run = {run:UInt32} GROUP BY rank ORDER BY rank
"""

SESSIONS = """
SELECT countIf(ended IS NULL) AS open, max(world_size) AS world_size FROM jobs FINAL
WHERE job = {job:String} AND run = {run:UInt32}
"""
"""Tracing sessions (hosts) that have not closed their books, and how many ranks the launcher speaks of."""

LAST_LOOK = """
SELECT
  (SELECT toUnixTimestamp64Milli(max(ts)) * 1000000 FROM coverage WHERE job = {job:String} AND run = {run:UInt32})
    AS looked_ns,
  (SELECT max(toUnixTimestamp64Nano(ts) + toInt64(duration_ns)) FROM iterations
    WHERE job = {job:String} AND run = {run:UInt32}) AS stepped_ns,
  greatest(
    (SELECT max(toUnixTimestamp64Nano(ts)) FROM launches WHERE job = {job:String} AND run = {run:UInt32}),
    (SELECT max(toUnixTimestamp64Nano(ts)) FROM collectives WHERE job = {job:String} AND run = {run:UInt32})
  ) AS called_ns,
  toUnixTimestamp64Nano(now64(9)) AS now_ns
"""
"""When Argus last looked at the job, when a step last ended, when a call was last made (0: never), and now."""

LOADING = """
WITH
  (SELECT min(ts) FROM iterations WHERE job = {job:String} AND run = {run:UInt32} AND step >= {first:UInt32}) AS begin,
  (SELECT max(addNanoseconds(ts, duration_ns)) FROM iterations
    WHERE job = {job:String} AND run = {run:UInt32} AND step <= {last:UInt32}) AS end
SELECT rank, toFloat64(sum(duration_ns)) AS loading_ns FROM launches
WHERE job = {job:String} AND run = {run:UInt32} AND kind = 'module' AND duration_ns > 0 AND ts > begin AND ts <= end
GROUP BY rank ORDER BY rank
"""
"""Time that each rank spent loading or compiling GPU code."""

STATES = """
SELECT rank, argMax(state, version) AS state, argMax(host, version) AS host FROM ranks
WHERE job = {job:String} AND run = {run:UInt32} AND rank_source != 'parent' GROUP BY rank ORDER BY rank
"""

LAST_CALLS = """
WITH
  (
    SELECT comm_group FROM communicators FINAL WHERE job = {job:String} AND run = {run:UInt32} AND error = ''
    GROUP BY comm_group ORDER BY uniqExact(rank) DESC, comm_group LIMIT 1
  ) AS widest
SELECT rank, toInt64(max(aligned_seq)) AS seq, argMax(op, aligned_seq) AS call
FROM collectives_aligned
WHERE job = {job:String} AND run = {run:UInt32} AND aligned AND comm_group = widest
  AND op NOT IN ('Send', 'Recv', 'GroupStart', 'GroupEnd')
GROUP BY rank ORDER BY rank
"""
"""The last collective that each rank called on the widest communicator."""

COVERAGE = """
SELECT counter, sum(value) AS value FROM coverage FINAL
WHERE job = {job:String} AND run = {run:UInt32} AND loss GROUP BY counter ORDER BY counter
"""

SPAN = """
SELECT min(step) AS first, max(step) AS last, count() AS n FROM iterations
WHERE job = {job:String} AND run = {run:UInt32}
"""

SLOWER = f"""
SELECT rank, toFloat64(medianIf(duration_ns, step < {{onset:UInt32}})) AS before_ns,
       toFloat64(medianIf(duration_ns, step >= {{onset:UInt32}})) AS after_ns
FROM {_ITERATIONS}
GROUP BY rank ORDER BY rank
"""
"""Each rank's step time before and from a step on."""


def _literal(value: Any) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_literal(item) for item in value) + "]"
    return str(int(value))


def shown(sql: str, params: Mapping[str, Any]) -> str:
    """``sql`` with its parameters' values in place, for people to run again."""
    filled = re.sub(r"\{(\w+):[^}]*\}", lambda match: _literal(params[match[1]]), sql)
    return filled.strip()
