"""Steps of a job: times, work, which there are."""

from __future__ import annotations

from argus.diagnose.read.query import ITERATIONS, by_hosts

STEPS = by_hosts(
    f"""
SELECT step, toFloat64(quantileExactInclusive(duration_ns)) AS duration_ns,
       toFloat64(quantileExactInclusive(confidence)) AS confidence,
       groupBitmap(rank) AS ranks, toFloat64(avg(collectives)) AS calls
FROM {ITERATIONS}
GROUP BY step ORDER BY step
"""
)
"""The job's step times: the median over ranks. (``median`` draws a sample from 8,192 values on, which takes longer.)"""

WORK = by_hosts(
    f"""
WITH
  (SELECT min(ts) FROM {ITERATIONS}) AS begin,
  (SELECT max(addNanoseconds(ts, duration_ns)) FROM {ITERATIONS}) AS end
SELECT s.step AS step, toFloat64(avg(s.launches)) AS launches, toFloat64(avg(c.calls)) AS calls,
       toFloat64(avg(c.bytes)) AS bytes
FROM
(
  SELECT rank, step, launches FROM {ITERATIONS} AND rank IN {{ranks:Array(UInt32)}}
) AS s
LEFT JOIN
(
  SELECT l.rank AS rank, i.step AS step, count() AS calls, sum(l.bytes) AS bytes
  FROM
  (
    SELECT rank, ts, bytes FROM collectives
    WHERE job = {{job:String}} AND run = {{run:UInt32}} AND ts > begin AND ts <= end AND rank IN {{ranks:Array(UInt32)}}
      AND op NOT IN ('GroupStart', 'GroupEnd')
  ) AS l
  ASOF JOIN
  (
    SELECT rank, ts, step, addNanoseconds(ts, duration_ns) AS ts_end FROM {ITERATIONS}
      AND rank IN {{ranks:Array(UInt32)}}
  ) AS i ON l.rank = i.rank AND l.ts > i.ts
  WHERE l.ts <= i.ts_end
  GROUP BY rank, step
) AS c ON s.rank = c.rank AND s.step = c.step
GROUP BY step ORDER BY step
"""
)
"""What some ranks had to do in each step: launches, collective calls and their bytes, of a rank."""

SPAN_NS = by_hosts(
    f"""
SELECT toInt64(min(toUnixTimestamp64Nano(ts))) AS begin_ns,
       toInt64(max(toUnixTimestamp64Nano(ts) + toInt64(duration_ns))) AS end_ns, uniqExact(step) AS steps,
       toFloat64(median(duration_ns)) AS step_ns
FROM {ITERATIONS}
"""
)
"""When some steps were, and how long a typical one took."""

SPAN = by_hosts(
    """
SELECT min(step) AS first, max(step) AS last, count() AS n FROM $spans
WHERE job = {job:String} AND run = {run:UInt32} AND $begun >= fromUnixTimestamp64Nano({since_ns:Int64})
"""
)
"""The first and the last step since then; ``n`` is 0 if there is none."""

NEWEST_STEP = """
SELECT max(toUnixTimestamp64Nano(ts) + toInt64(duration_ns)) AS ns FROM iterations
WHERE job = {job:String} AND run = {run:UInt32} AND ts >= fromUnixTimestamp64Nano({since_ns:Int64} - 60000000000)
"""
"""When the newest step ended."""

SLOWER = by_hosts(
    f"""
SELECT rank, toFloat64(quantileExactInclusiveIf(duration_ns, step < {{onset:UInt32}})) AS before_ns,
       toFloat64(quantileExactInclusiveIf(duration_ns, step >= {{onset:UInt32}})) AS after_ns
FROM {ITERATIONS}
GROUP BY rank ORDER BY rank
"""
)
"""Each rank's step time before and from a step on."""

USUAL_STEP = """
SELECT toFloat64(median(duration_ns)) AS step_ns FROM iterations WHERE job = {job:String} AND run = {run:UInt32}
"""

STEP_SOURCE = """
SELECT argMax(method, ts) AS method, toFloat64(avg(launches)) AS launches, toFloat64(avg(collectives)) AS collectives
FROM iterations
WHERE job = {job:String} AND run = {run:UInt32} AND step + 10 > {last:UInt32} AND step <= {last:UInt32}
"""
"""How the newest steps were found, and how many calls each has."""
