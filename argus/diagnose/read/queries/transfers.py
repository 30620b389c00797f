"""What transfers took, and which communicators there are."""

from __future__ import annotations

from argus.diagnose.read.query import ITERATIONS, by_hosts

_TRANSFERS = """
FROM
(
  SELECT g.rank AS rank, m.comm_group AS comm_group, g.op AS op, g.step AS step,
         g.op = 'SendRecv' AS pairwise, if(pairwise, least(m.comm_rank, g.peer), -1) AS one,
         if(pairwise, greatest(m.comm_rank, g.peer), -1) AS other,
         toFloat64(if(pairwise, min(g.shortest_ns), sum(g.duration_ns))) AS took,
         toInt64(sum(g.calls)) AS calls, toInt64(sum(g.bytes)) AS bytes
  FROM $gpucollectives AS g
  INNER JOIN
  ($handles) AS m ON g.rank = m.rank AND g.comm = m.comm
  WHERE g.job = {job:String} AND g.run = {run:UInt32} AND g.step BETWEEN {first:UInt32} AND {last:UInt32}$near
    AND g.op != ''
  GROUP BY rank, comm_group, op, step, one, other
)
WHERE NOT pairwise OR one >= 0
"""

TRANSFERS = by_hosts(
    """
SELECT comm_group, op, one, other, step, min(took) AS took_ns, max(calls) AS calls, max(bytes) AS bytes"""
    + _TRANSFERS
    + "GROUP BY comm_group, op, one, other, step\n"
)
"""What each communicator's collectives took the rank that waited for nobody, and transfers between two ranks (``one``
and ``other``, as numbered in the communicator) the one that waited less, by step and operation."""

TRANSFER_RANKS = by_hosts(
    """
SELECT comm_group, op, one, other, groupUniqArray(rank) AS ranks
FROM
(
  SELECT g.rank AS rank, m.comm_group AS comm_group, g.op AS op, g.op = 'SendRecv' AS pairwise,
         if(pairwise, least(m.comm_rank, g.peer), -1) AS one, if(pairwise, greatest(m.comm_rank, g.peer), -1) AS other
  FROM
  (
    SELECT DISTINCT rank, comm, op, peer FROM $gpucollectives
    WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}$near AND op != ''
  ) AS g
  INNER JOIN
  ($handles) AS m ON g.rank = m.rank AND g.comm = m.comm
)
WHERE NOT pairwise OR one >= 0
GROUP BY comm_group, op, one, other
"""
)
"""Who takes part in them."""

STAGE_TRANSFERS = by_hosts(
    """
SELECT comm, rank, toFloat64(quantileExactLow(0.5)(shortest)) AS took_ns, avg(sent) AS calls, avg(each) AS nbytes
FROM
(
  SELECT comm, rank, step, min(shortest_ns) AS shortest, sum(calls) AS sent, sum(bytes) / sum(calls) AS each
  FROM $gpucollectives
  WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}$near
    AND op = 'SendRecv' AND comm != 0
  GROUP BY comm, rank, step
)
GROUP BY comm, rank
ORDER BY comm, rank
"""
)
"""What a send or receive takes that waits least, how many there are in a step, and their bytes, by communicator and
rank."""

STAGE_TRANSFER_STEPS = by_hosts(
    """
SELECT step, toFloat64(min(shortest_ns)) AS took_ns
FROM $gpucollectives
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}$near
  AND op = 'SendRecv' AND comm = {comm:UInt64} AND rank IN {ranks:Array(UInt32)}
GROUP BY step
ORDER BY step
"""
)
"""The same of one communicator, step by step: of the rank that waits less."""

SENDS = by_hosts(
    f"""
WITH
  (SELECT min(ts) FROM {ITERATIONS}) AS begin,
  (SELECT max(addNanoseconds(ts, duration_ns)) FROM {ITERATIONS}) AS end
SELECT s.rank AS rank, toFloat64(s.sent / i.steps) AS sent
FROM
(
  SELECT c.rank AS rank, count() AS sent
  FROM
  (
    SELECT rank, ts FROM collectives
    WHERE job = {{job:String}} AND run = {{run:UInt32}} AND ts > begin AND ts <= end AND rank IN {{ranks:Array(UInt32)}}
      AND op = 'Send'
  ) AS c
  INNER JOIN
  (
    SELECT rank, min(ts) AS begun, max(addNanoseconds(ts, duration_ns)) AS ended
    FROM {ITERATIONS} AND rank IN {{ranks:Array(UInt32)}} GROUP BY rank
  ) AS t ON c.rank = t.rank
  WHERE c.ts > t.begun AND c.ts <= t.ended
  GROUP BY rank
) AS s
INNER JOIN
(
  SELECT rank, uniqExact(step) AS steps FROM {ITERATIONS} AND rank IN {{ranks:Array(UInt32)}} GROUP BY rank
) AS i ON s.rank = i.rank
ORDER BY rank
"""
)
"""How much some ranks send to other stages of their pipeline in a step."""

GROUPS = """
SELECT host, comm_group, dimension, ranks FROM parallel_groups FINAL WHERE job = {job:String} AND run = {run:UInt32}
"""
"""What each communicator is for, and who is in it, as each host saw it."""
