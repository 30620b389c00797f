"""Where the time of some ranks goes: phases, GPUs, kernels, calls, lines."""

from __future__ import annotations

_STEPS = """
job = {job:String} AND run = {run:UInt32} AND rank IN {ranks:Array(UInt32)}
  AND step BETWEEN {first:UInt32} AND {last:UInt32}"""
_TIMES = """
job = {job:String} AND run = {run:UInt32} AND rank IN {ranks:Array(UInt32)}
  AND ts >= fromUnixTimestamp64Nano({from_ns:Int64}) AND ts < fromUnixTimestamp64Nano({to_ns:Int64})"""

BREAKDOWN_SPAN = f"""
SELECT toInt64(min(toUnixTimestamp64Nano(ts))) AS begin_ns,
       toInt64(max(toUnixTimestamp64Nano(ts) + toInt64(duration_ns))) AS end_ns, count() AS steps,
       toFloat64(median(duration_ns)) AS step_ns
FROM iterations WHERE {_STEPS}
GROUP BY rank ORDER BY rank
"""

BREAKDOWN_SAMPLED_SPAN = """
SELECT toInt64(toUnixTimestamp64Nano(min(ts))) AS begin_ns, toInt64(toUnixTimestamp64Nano(max(last_ts))) AS end_ns,
       count() AS samples
FROM stack_samples WHERE job = {job:String} AND run = {run:UInt32} AND rank IN {ranks:Array(UInt32)}
"""

BREAKDOWN_PHASES = f"""
SELECT phase AS name, toFloat64(sum(duration_ns)) AS spent_ns
FROM (SELECT *, count() OVER (PARTITION BY rank, step) AS parts FROM phases WHERE {_STEPS})
WHERE parts > 1
GROUP BY name ORDER BY spent_ns DESC
"""
"""Steps of which one phase alone is known were found by one mark each: what was in them is not known."""

BREAKDOWN_GPU_PHASES = f"""
SELECT phase AS name, toFloat64(sum(duration_ns)) AS spent_ns, toFloat64(sum(overlapped_ns)) AS hidden_ns
FROM gpu_phases WHERE {_STEPS}
GROUP BY name ORDER BY spent_ns DESC
"""

BREAKDOWN_GPU = f"""
SELECT rank, toFloat64(sum(duration_ns)) AS span_ns, toFloat64(sum(compute_ns)) AS compute_ns,
       toFloat64(sum(exposed_communication_ns)) AS exposed_ns, toFloat64(sum(communication_ns)) AS communication_ns,
       toFloat64(sum(memcpy_ns)) AS memcpy_ns, toFloat64(sum(idle_ns)) AS idle_ns,
       toFloat64(median(if(issue_latency_p50_ns < 0, nan, toFloat64(issue_latency_p50_ns)))) AS latency_ns,
       toFloat64(max(largest_gap_ns)) AS gap_ns, toFloat64(count()) AS steps
FROM gpu_steps WHERE {_STEPS}
GROUP BY rank ORDER BY rank
"""

BREAKDOWN_GPU_SECONDS = BREAKDOWN_GPU.replace("gpu_steps", "gpu_usage").replace(_STEPS, _TIMES)

BREAKDOWN_KERNELS = f"""
SELECT name, toFloat64(sum(duration_ns)) AS spent_ns, toFloat64(count()) AS times FROM kernel_events
WHERE {_TIMES} AND kind = 'kernel'
GROUP BY name ORDER BY spent_ns DESC LIMIT 50
"""

BREAKDOWN_SUMMED_KERNELS = f"""
SELECT any(g.kernel) AS name, toFloat64(sum(t.spent)) AS spent_ns, toFloat64(sum(t.launched)) AS times
FROM
(
  SELECT kernel_id, sum(spent_ns) AS spent, sum(launches) AS launched FROM kernel_times WHERE {_STEPS}
  GROUP BY kernel_id
) AS t
INNER JOIN
(
  SELECT DISTINCT kernel_id, kernel FROM kernel_groups WHERE job = {{job:String}} AND run = {{run:UInt32}}
) AS g ON t.kernel_id = g.kernel_id
GROUP BY g.kernel ORDER BY spent_ns DESC LIMIT 50
"""

BREAKDOWN_CALLS = f"""
SELECT kind AS name, toFloat64(sum(greatest(duration_ns, 0))) AS spent_ns, toFloat64(count()) AS times FROM launches
WHERE {_TIMES} AND NOT in_nccl AND kind IN ('sync', 'memcpy_d2h', 'module')
GROUP BY name ORDER BY spent_ns DESC
"""

BREAKDOWN_LINES = """
WITH
  mains AS
  (
    SELECT rank, pid FROM ranks
    WHERE job = {job:String} AND run = {run:UInt32} AND rank_source != 'parent' GROUP BY rank, pid
  )
SELECT t.kind AS kind, t.main AS main, t.reason AS reason, toFloat64(sum(t.spent)) AS spent_ns,
       if(k.python_function != '', 'python', k.leaf_kind) AS frame,
       if(k.python_function != '', k.python_function, k.leaf_function) AS function,
       if(k.python_function != '', k.python_file, k.leaf_file) AS file, max(k.python_line) AS line
FROM
(
  SELECT job, run, kind, if(kind = 'off', reason, '') AS reason, (rank, pid) IN (SELECT rank, pid FROM mains)
         AND tid = pid AS main, stack_id, sum(ns) AS spent
  FROM stack_samples
  WHERE job = {job:String} AND run = {run:UInt32} AND rank IN {ranks:Array(UInt32)}
    AND last_ts >= fromUnixTimestamp64Nano({from_ns:Int64}) AND ts < fromUnixTimestamp64Nano({to_ns:Int64})
    AND NOT startsWith(thread, 'argus')
  GROUP BY job, run, kind, reason, main, stack_id
) AS t
LEFT ANY JOIN stacks AS k ON t.job = k.job AND t.run = k.run AND t.stack_id = k.stack_id
GROUP BY kind, main, reason, frame, function, file, k.python_line
ORDER BY spent_ns DESC
"""
"""Time by the deepest line of Python, or the function where there is none; of all threads on the CPU and off it."""
