"""Imported times of operations, steps and phases."""

from __future__ import annotations

OPERATIONS = """
SELECT rank, step, stage, dp_rank, op, seq, chunk, global_chunk, ts, ts_end, duration_ns FROM phase_ops
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}
"""
"""Every operation of some steps, in no order."""

WAITS_LEAST = """
SELECT comm_group, least_rank AS rank, count() AS collectives, countIf(next_ns >= {apart:Float64} * first_ns) AS clear,
       toFloat64(quantileExact(0.5)(first_ns)) AS least_ns, toFloat64(quantileExact(0.5)(middle_ns)) AS others_ns
FROM
(
  SELECT comm_group, argMin(rank, duration_ns) AS least_rank, min(duration_ns) AS first_ns,
         arraySort(groupArray(duration_ns)) AS sorted, sorted[2] AS next_ns,
         sorted[intDiv(length(sorted), 2) + 1] AS middle_ns
  FROM collective_waits
  WHERE job = {job:String} AND run = {run:UInt32} AND duration_ns > 0
  GROUP BY comm_group, step, op HAVING count() > 1
)
GROUP BY comm_group, least_rank ORDER BY clear DESC, comm_group, rank
"""
"""Which rank of each communicator spent the least time in how many of the collectives that several ranks logged,
and in how many of these clearly."""

STEP_TIMES = """
SELECT rank, step, toFloat64(any(duration_ns)) AS duration_ns FROM iterations
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}
GROUP BY rank, step
"""
"""Each rank's time of each step, in no order."""

STEP_TIMES_BY_RANK = """
SELECT rank, count() AS steps, quantileExact(0.5)(duration_ns) / 1e6 AS median_ms,
       quantileExactIf(0.5)(duration_ns, step < ({first:UInt32} + {last:UInt32}) / 2) / 1e6 AS first_half_ms,
       quantileExactIf(0.5)(duration_ns, step >= ({first:UInt32} + {last:UInt32}) / 2) / 1e6 AS second_half_ms
FROM iterations
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}
GROUP BY rank ORDER BY median_ms DESC
"""
"""Each rank's typical step time."""

ALL_PHASES = """
SELECT rank, step, phase, toFloat64(any(duration_ns)) AS duration_ns FROM phases
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}
GROUP BY rank, step, phase
"""
"""Each rank's time in each phase of each step, in no order."""

LOGGED_PHASES = """
SELECT count() AS n FROM phases
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}
"""
"""How many phases are stored."""

PHASES_BY_RANK = """
SELECT rank, phase, count() AS steps, quantileExact(0.5)(duration_ns) / 1e6 AS median_ms,
       quantileExact(0.95)(duration_ns) / 1e6 AS p95_ms
FROM phases
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}
GROUP BY rank, phase ORDER BY phase, median_ms DESC
"""
"""Each rank's typical time in each phase."""

PHASES_GROWN = """
SELECT phase, toFloat64(quantileExactIf(0.5)(duration_ns, step < {onset:UInt32})) AS before_ns,
       toFloat64(quantileExactIf(0.5)(duration_ns, step >= {onset:UInt32})) AS after_ns
FROM phases
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}
GROUP BY phase ORDER BY after_ns - before_ns DESC
"""
"""What each phase takes before and from a step on, median over ranks and steps."""

ONLY_STEPS = """
SELECT
  (SELECT count() FROM launches WHERE job = {job:String} AND run = {run:UInt32}) +
  (SELECT count() FROM collectives WHERE job = {job:String} AND run = {run:UInt32}) AS calls,
  (SELECT countIf(method != 'imported') FROM iterations WHERE job = {job:String} AND run = {run:UInt32}) AS found
"""
"""Calls that are stored, and steps whose numbers the recording does not contain."""

LAYOUT = """
SELECT dp, pp, tp, sp, vpp, world_size FROM parallel_layout FINAL WHERE job = {job:String} AND run = {run:UInt32}
"""
"""How the job is split: one row, or none."""

COMPUTE_TIME = """
SELECT stage, dp_rank, rank, sum(duration_ns) / uniqExact(step) / 1e6 AS compute_ms_a_step,
       quantileExact(0.5)(duration_ns) / 1e6 AS median_ms, max(duration_ns) / 1e6 AS longest_ms, op
FROM phase_ops
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}
  AND op IN ('forward-compute', 'backward-compute')
GROUP BY stage, dp_rank, rank, op ORDER BY op, stage, dp_rank
"""
"""How long each worker computes."""

TRANSFER_TIME = """
SELECT stage, dp_rank, rank, quantileExact(0.5)(duration_ns) / 1e6 AS median_ms,
       min(duration_ns) / 1e6 AS shortest_ms, max(duration_ns) / 1e6 AS longest_ms, op
FROM phase_ops
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}
  AND op NOT IN ('forward-compute', 'backward-compute', 'optimizer', 'gc')
GROUP BY stage, dp_rank, rank, op ORDER BY op, stage, dp_rank
"""
"""How long each worker communicates, waiting for others included."""
