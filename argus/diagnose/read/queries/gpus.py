"""What GPUs did: times of a step, kernels, issue latencies, functions."""

from __future__ import annotations

from argus.diagnose.read.query import ITERATIONS, by_hosts

GPU_TIMES = by_hosts(
    """
SELECT rank, step,
       toFloat64(sumIf(duration_ns, phase = 'forward')) AS forward_ns,
       toFloat64(sumIf(duration_ns, phase = 'backward')) AS backward_ns,
       toFloat64(sumIf(duration_ns, phase = 'optimizer')) AS optimizer_ns,
       toFloat64(sumIf(duration_ns, phase = 'compute')) AS compute_ns,
       toFloat64(sumIf(duration_ns, phase IN ('all_reduce', 'all_gather', 'reduce_scatter', 'all_to_all', 'broadcast',
                                              'reduce', 'communication'))) AS collective_ns,
       toFloat64(sumIf(duration_ns, phase IN ('send_recv', 'pipeline_bubble'))) AS pipeline_ns,
       toFloat64(sumIf(duration_ns, phase = 'send_recv')) AS transfer_ns,
       toFloat64(sumIf(duration_ns, phase IN ('idle', 'data_loading', 'memcpy', 'checkpoint'))) AS idle_ns,
       toFloat64(sum(duration_ns)) AS step_ns,
       toInt64(sumIf(operations, phase IN ('forward', 'backward', 'optimizer', 'compute'))) AS kernels
FROM $gpuphases
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}$near
GROUP BY rank, step
"""
)
"""How long each rank's GPU computed, was in collectives, handed on data between stages or waited for it, and was
idle or waited for data, by step. In no order."""

GPU_COMPUTE = by_hosts(
    """
SELECT rank, step, toFloat64(sum(duration_ns)) AS compute_ns
FROM $gpuphases
WHERE job = {job:String} AND run = {run:UInt32} AND step IN {steps:Array(UInt32)}$among
  AND rank IN {ranks:Array(UInt32)} AND phase IN ('forward', 'backward', 'optimizer', 'compute')
GROUP BY rank, step
ORDER BY step, rank
"""
)
"""How long kernels computed on some ranks' GPUs in some steps."""

KERNEL_TIME = by_hosts(
    """
SELECT s.kernel_id AS kernel_id, g.kernel AS kernel, s.rank AS rank, sum(s.launches) AS launches,
       sum(s.spent_ns) AS spent_ns, sum(s.steps) AS steps
FROM $kerneltimes AS s
LEFT ANY JOIN
(
  SELECT kernel_id, kernel FROM kernel_groups WHERE job = {job:String} AND run = {run:UInt32}
) AS g ON s.kernel_id = g.kernel_id
WHERE s.job = {job:String} AND s.run = {run:UInt32} AND s.step BETWEEN {first:UInt32} AND {last:UInt32}
  AND s.rank IN {ranks:Array(UInt32)} AND g.kernel != '' AND NOT startsWith(g.kernel, 'nccl')
GROUP BY kernel_id, kernel, rank
ORDER BY kernel_id, rank
"""
)
"""Launches and time of each kernel that does not communicate, by rank, from the summaries."""

RECORDED_KERNELS = """
SELECT cityHash64(k.name, k.grid, k.block) AS kernel_id, any(k.name) AS kernel, k.rank AS rank, count() AS launches,
       sum(k.duration_ns) AS spent_ns, toUInt32({steps:UInt32}) AS steps,
       quantileExact(0.25)(k.duration_ns) AS short_ns, quantileExact(0.75)(k.duration_ns) AS long_ns
FROM kernel_events AS k
INNER JOIN
(
  SELECT rank, min(ts) AS begun, max(addNanoseconds(ts, duration_ns)) AS ended FROM iterations
  WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32} GROUP BY rank
) AS i ON k.rank = i.rank
WHERE k.job = {job:String} AND k.run = {run:UInt32} AND k.rank IN {ranks:Array(UInt32)} AND k.kind = 'kernel'
  AND NOT startsWith(k.name, 'nccl') AND k.ts >= i.begun AND k.ts < i.ended
GROUP BY kernel_id, rank
ORDER BY kernel_id, rank
"""
"""The same of recordings, whose kernels are stored one by one, with quartiles. ``steps``: how many they have."""

KERNEL_STEPS = by_hosts(
    """
SELECT toInt64(min(t.step)) AS since, toFloat64(sum(t.spent_ns)) / sum(t.launches) AS mean_ns
FROM $kerneltimes AS t
WHERE t.job = {job:String} AND t.run = {run:UInt32} AND t.step BETWEEN {first:UInt32} AND {last:UInt32}
  AND t.rank IN {ranks:Array(UInt32)} AND t.kernel_id = {kernel:UInt64} AND t.launches > 0
GROUP BY intDiv(t.step, {width:UInt32})
ORDER BY since
"""
)
"""Mean duration of a kernel on some ranks, some steps together."""

COPY_TIME = by_hosts(
    """
SELECT rank, step, toFloat64(sum(exposed)) AS exposed_ns, toFloat64(sum(took)) AS copy_ns
FROM
(
  SELECT rank, step, duration_ns AS exposed, 0 AS took FROM $gpuphases
  WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}$near
    AND rank IN {ranks:Array(UInt32)} AND phase = 'memcpy'
  UNION ALL
  SELECT rank, step, 0 AS exposed, memcpy_ns AS took FROM $gpusteps
  WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}$near
    AND rank IN {ranks:Array(UInt32)}
)
GROUP BY rank, step
ORDER BY step, rank
"""
)
"""How long some ranks' GPUs did nothing but copy, and how long they copied at all, by step."""

_COPIES = f"""
FROM
(
  SELECT rank, ts, kind, bytes, duration_ns FROM $table
  WHERE job = {{job:String}} AND run = {{run:UInt32}} AND rank IN {{ranks:Array(UInt32)}}
    AND startsWith(kind, 'memcpy') AND bytes > 0 AND ts >= begin AND ts < end
) AS k
ASOF INNER JOIN
(
  SELECT rank, step, ts AS begun, addNanoseconds(ts, duration_ns) AS ended
  FROM {ITERATIONS} AND rank IN {{ranks:Array(UInt32)}}
) AS i ON k.rank = i.rank AND k.ts >= i.begun
WHERE k.ts < i.ended
GROUP BY kind, rank
ORDER BY kind, rank
"""

_COPIED_WITHIN = f"""
WITH
  (SELECT min(ts) FROM {ITERATIONS}) AS begin,
  (SELECT max(addNanoseconds(ts, duration_ns)) FROM {ITERATIONS}) AS end
"""

COPIES = by_hosts(
    _COPIED_WITHIN + "SELECT k.kind AS kind, k.rank AS rank, sum(k.duration_ns) / uniqExact(i.step) AS took_ns,\n"
    "       sum(k.bytes) / uniqExact(i.step) AS nbytes" + _COPIES.replace("$table", "kernel_events")
)
"""What the copies of some ranks' GPUs take and carry in a step that has some, by kind, where they are stored one by
one: of running jobs those of a part of the steps may be."""

COPY_CALLS = by_hosts(
    _COPIED_WITHIN
    + "SELECT k.kind AS kind, k.rank AS rank, nan AS took_ns, sum(k.bytes) / uniqExact(i.step) AS nbytes"
    + _COPIES.replace("$table", "launches")
)
"""What some ranks' calls copy in a step that has some, by kind. How long the GPUs take for it is not known."""

_ROWS_OF_KERNEL = """
WHERE job = {job:String} AND run = {run:UInt32} AND kernel_id = {kernel:UInt64} AND rank IN {ranks:Array(UInt32)}
  AND step BETWEEN {first:UInt32} AND {last:UInt32}
ORDER BY rank, step
"""

KERNEL_ROWS = f"""
SELECT rank, template, count, spikes, total_ns, count_codes, mean_codes FROM kernel_summaries{_ROWS_OF_KERNEL}"""

KERNEL_ESCAPED = f"""
SELECT rank, total_ns, bins, counts FROM kernel_escapes{_ROWS_OF_KERNEL}"""

KERNEL_TEMPLATES = """
SELECT template, any(heaviest) AS heaviest, any(mode) AS mode, any(share) AS share, any(mean_ns) AS mean_ns,
       any(unit) AS unit, any(shape) AS shape
FROM kernel_templates WHERE job = {job:String} AND run = {run:UInt32} AND kernel_id = {kernel:UInt64}
GROUP BY template
"""
"""What :mod:`argus.compress.decode` rebuilds durations from. Steps are the hosts' own: some more or less do not
matter."""

ISSUE = by_hosts(
    """
SELECT rank, step, toFloat64(issue_latency_p50_ns) AS p50_ns, toFloat64(issue_latency_p99_ns) AS p99_ns,
       toFloat64(void_share) AS void_share
FROM $gpusteps
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}$near
  AND rank IN {ranks:Array(UInt32)} AND kernels > 0
ORDER BY step, rank
"""
)
"""How long operations of some ranks waited from launch to begin, and the share of each step without any."""

PATTERNS = by_hosts(
    f"""
WITH
  spans AS
  (
    SELECT rank, toFloat64(sum(duration_ns)) AS span_ns, min(toUnixTimestamp64Nano(ts)) AS begin,
           max(toUnixTimestamp64Nano(ts) + toInt64(duration_ns)) AS done
    FROM {ITERATIONS} AND rank IN {{ranks:Array(UInt32)}}
    GROUP BY rank
  )
SELECT p.kind AS kind, p.function AS function, p.rank AS rank, p.spent_ns / s.span_ns AS beta, p.mu AS mu,
       p.sigma AS sigma
FROM
(
  SELECT 'kernel' AS kind, rank, g.kernel AS function, sum(spent) AS spent_ns, sum(best) / sum(spent) AS mu,
         stddevPop(best / spent) AS sigma
  FROM
  (
    SELECT rank, kernel_id, step, toFloat64(sum(spent_ns)) AS spent, sum(launches) AS times,
           least(times * min(sum(spent_ns) / sum(launches)) OVER (PARTITION BY kernel_id, step), spent) AS best
    FROM $kerneltimes
    WHERE job = {{job:String}} AND run = {{run:UInt32}} AND step BETWEEN {{first:UInt32}} AND {{last:UInt32}}
      AND rank IN {{ranks:Array(UInt32)}} AND launches > 0 AND spent_ns > 0
    GROUP BY rank, kernel_id, step
  ) AS k
  LEFT ANY JOIN
  (
    SELECT kernel_id, kernel FROM kernel_groups WHERE job = {{job:String}} AND run = {{run:UInt32}}
  ) AS g ON k.kernel_id = g.kernel_id
  WHERE g.kernel != '' AND NOT startsWith(g.kernel, 'nccl')
  GROUP BY rank, function
  UNION ALL
  SELECT 'python' AS kind, rank, k.python_function AS function, toFloat64(sum(t.ns)) AS spent_ns,
         sumIf(t.ns, t.kind = 'cpu') / spent_ns AS mu, 0 AS sigma
  FROM
  (
    SELECT job, run, rank, stack_id, kind, sum(ns) AS ns FROM stack_samples
    WHERE job = {{job:String}} AND run = {{run:UInt32}} AND rank IN {{ranks:Array(UInt32)}} AND tid = pid
      AND ts >= fromUnixTimestamp64Nano((SELECT min(begin) FROM spans))
      AND ts < fromUnixTimestamp64Nano((SELECT max(done) FROM spans))
    GROUP BY job, run, rank, stack_id, kind
  ) AS t
  INNER JOIN (SELECT DISTINCT stack_id, python_function FROM stacks
              WHERE job = {{job:String}} AND run = {{run:UInt32}} AND python_function != '') AS k
    ON t.stack_id = k.stack_id
  GROUP BY rank, function
) AS p
INNER JOIN spans AS s ON p.rank = s.rank
WHERE beta > 0.002
ORDER BY kind, function, rank
"""
)
"""Behaviour of functions on some ranks: share of the time, how well it uses what it runs on, and how much that
varies."""
