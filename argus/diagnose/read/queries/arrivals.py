"""Who came late to collectives, and by how much."""

from __future__ import annotations

from argus.diagnose.read.query import ITERATIONS, by_hosts

_LATE_OF = f"""
WITH
  (SELECT min(ts) FROM {ITERATIONS}) AS begin,
  (SELECT max(addNanoseconds(ts, duration_ns)) FROM {ITERATIONS}) AS end,
  calls AS
  (
    SELECT comm_group, aligned_seq,$side groupArray(rank) AS ranks, groupArray($arrival) AS times,
           min(rank) AS ref_rank, argMin(ts, rank) AS ref_ts
    FROM $calls
    WHERE job = {{job:String}} AND run = {{run:UInt32}} AND aligned AND ts > begin AND ts <= end
      AND op NOT IN ('Send', 'Recv', 'GroupStart', 'GroupEnd') AND comm_group NOT IN {{left_out:Array(UInt64)}}
      $members $numbered
    GROUP BY comm_group, aligned_seq$aside
    HAVING length(ranks) > 1
  ),
  whole AS
  (
    SELECT *, max(length(ranks)) OVER (PARTITION BY comm_group$aside) AS most FROM calls
  ),
  late AS
  (
    SELECT $group AS comm_group, w.aligned_seq AS aligned_seq, i.step AS step,
           arrayJoin(arrayZip(w.ranks, w.times)) AS arrival,
           arrival.1 AS rank,
           arrival.2 - arrayReduce('quantileExactLow(0.5)', w.times) AS late_ns
    FROM (SELECT * FROM whole WHERE 10 * length(ranks) >= 9 * most) AS w
    ASOF JOIN
    (
      SELECT rank, ts, step, addNanoseconds(ts, duration_ns) AS ts_end
      FROM {ITERATIONS}
    ) AS i ON w.ref_rank = i.rank AND w.ref_ts > i.ts
    WHERE w.ref_ts <= i.ts_end
  )
"""

_LATE = _LATE_OF.replace("      $members $numbered\n", "      $numbered\n")

_LATE_AMONG = _LATE_OF.replace("$members", "AND rank IN {members:Array(UInt32)}")

LATENESS = by_hosts(
    _LATE
    + """
SELECT comm_group, rank, step, toFloat64(max(late_ns)) AS peak_ns, toFloat64(argMin(late_ns, aligned_seq)) AS first_ns,
       toFloat64(argMax(late_ns, aligned_seq)) AS last_ns
FROM late
GROUP BY comm_group, rank, step
"""
)
"""How late each rank came to the collectives of each step, against the median rank: most, first and last call. In no
order."""

LEAD = by_hosts(
    _LATE_AMONG
    + """
SELECT step, toFloat64(maxIf(late_ns, has({ranks:Array(UInt32)}, rank))) AS suspects_ns,
       toFloat64(maxIf(late_ns, NOT has({ranks:Array(UInt32)}, rank))) AS others_ns
FROM late
GROUP BY step
HAVING countIf(has({ranks:Array(UInt32)}, rank)) > 0 AND countIf(NOT has({ranks:Array(UInt32)}, rank)) > 0
ORDER BY step
"""
)
"""The latest of some ranks and the latest of all others among ``members``, by step: the difference is what these
lose."""

LAST = by_hosts(
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

ALIGNMENT = """
SELECT uniqExactIf(rank, error = '') AS aligned_ranks, uniqExact(rank) AS ranks, anyIf(error, error != '') AS why
FROM communicators FINAL
WHERE job = {job:String} AND run = {run:UInt32}
"""
