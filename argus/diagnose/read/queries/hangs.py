"""Last calls of a job, and when it was observed last."""

from __future__ import annotations

from argus.diagnose.read.query import by_hosts

LAST_LOOK = """
WITH
  (SELECT max(addNanoseconds(ts, duration_ns)) FROM iterations
    WHERE job = {job:String} AND run = {run:UInt32} AND ts >= fromUnixTimestamp64Nano({since_ns:Int64})
      AND step IN (
        SELECT step FROM iteration_rollup
        WHERE job = {job:String} AND run = {run:UInt32} AND addNanoseconds(last_ts, max_ns) >=
          (SELECT max(last_ts) FROM iteration_rollup WHERE job = {job:String} AND run = {run:UInt32})
      )) AS ended
SELECT
  (SELECT toUnixTimestamp64Milli(max(ts)) * 1000000 FROM coverage WHERE job = {job:String} AND run = {run:UInt32})
    AS looked_ns,
  toUnixTimestamp64Nano(ended) AS stepped_ns,
  greatest(
    (SELECT max(toUnixTimestamp64Nano(ts)) FROM launches
      WHERE job = {job:String} AND run = {run:UInt32} AND ts >= ended
        AND ts >= fromUnixTimestamp64Nano({since_ns:Int64})),
    (SELECT max(toUnixTimestamp64Nano(ts)) FROM collectives
      WHERE job = {job:String} AND run = {run:UInt32} AND ts >= ended
        AND ts >= fromUnixTimestamp64Nano({since_ns:Int64})),
    stepped_ns
  ) AS called_ns,
  toUnixTimestamp64Nano(now64(9)) AS now_ns
"""
"""When Argus last looked at the job, when a step last ended, when a call was last made (the later of the two; 0:
never), and now. Of the steps only those are read that may have ended last."""

STATES = """
SELECT rank, argMax(state, version) AS state, argMax(host, version) AS host FROM ranks
WHERE job = {job:String} AND run = {run:UInt32} AND rank_source != 'parent' GROUP BY rank ORDER BY rank
"""

LAST_CALLS = by_hosts(
    """
SELECT comm_group, rank, toInt64(max(aligned_seq)) AS seq, toInt64(max(toUnixTimestamp64Nano(ts))) AS called_ns
FROM $collectives
WHERE job = {job:String} AND run = {run:UInt32} AND aligned AND ts >= fromUnixTimestamp64Nano({since_ns:Int64})
  AND op NOT IN ('Send', 'Recv', 'GroupStart', 'GroupEnd')
GROUP BY comm_group, rank ORDER BY comm_group, rank
"""
)
"""The last collective that each rank called on each of its communicators."""

LAST_TRANSFERS = by_hosts(
    """
SELECT c.comm_group AS comm_group, c.rank AS rank, any(c.comm_rank) AS comm_rank, c.peer AS peer,
       countIf(c.op = 'Send' AND c.ts > i.ended) AS sent, countIf(c.op = 'Recv' AND c.ts > i.ended) AS received
FROM $collectives AS c
INNER JOIN
(
  SELECT rank, max(addNanoseconds(ts, duration_ns)) AS ended FROM iterations
  WHERE job = {job:String} AND run = {run:UInt32} AND step + 50 >= {last:UInt32} GROUP BY rank
) AS i ON c.rank = i.rank
WHERE c.job = {job:String} AND c.run = {run:UInt32} AND c.aligned AND c.ts >= fromUnixTimestamp64Nano({since_ns:Int64})
  AND c.op IN ('Send', 'Recv')
GROUP BY comm_group, rank, peer
"""
)
"""Sends and receives that each rank called since its last whole step, by peer."""

STUCK_CALL = by_hosts(
    """
SELECT any(op) AS call, arraySort(groupUniqArray(rank)) AS came
FROM $collectives
WHERE job = {job:String} AND run = {run:UInt32} AND aligned AND ts >= fromUnixTimestamp64Nano({since_ns:Int64})
  AND comm_group = {group:UInt64} AND aligned_seq = {seq:Int64}
  AND op NOT IN ('Send', 'Recv', 'GroupStart', 'GroupEnd')
"""
)
"""One collective, and who called it."""

DIMENSION = """
SELECT any(dimension) AS dimension FROM parallel_groups FINAL
WHERE job = {job:String} AND run = {run:UInt32} AND comm_group = {group:UInt64}
"""
"""What a communicator is for; empty: not known."""
