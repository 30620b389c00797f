"""What ranks' CPUs and GPUs did in phases of a step."""

from __future__ import annotations

from argus.diagnose.read.query import ITERATIONS, by_hosts

CPU_TIME = by_hosts(
    f"""
WITH
  (SELECT min(ts) FROM {ITERATIONS}) AS begin,
  (SELECT max(addNanoseconds(ts, duration_ns)) FROM {ITERATIONS}) AS end,
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
        AND rank IN {{ranks:Array(UInt32)}}
    ) AS l
    ASOF JOIN
    (
      SELECT rank, ts, step, addNanoseconds(ts, duration_ns) AS ts_end FROM {ITERATIONS}
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
)
"""Where some ranks' CPU time went, by step: waiting for the GPU, loading code, outside CUDA before a copy of data, and
outside CUDA otherwise."""

PHASE_TIME = by_hosts(
    """
SELECT rank, step, phase, toFloat64(duration_ns) AS duration_ns FROM $phases
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}$near
  AND rank IN {ranks:Array(UInt32)}
ORDER BY step, rank, phase
"""
)
"""Where some ranks' steps went, by phase."""

GPU_PHASE_TIME = by_hosts(
    """
SELECT rank, step, phase, toFloat64(sum(duration_ns)) AS duration_ns FROM $gpuphases
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}$near
  AND rank IN {ranks:Array(UInt32)} AND phase IN ('forward', 'backward', 'optimizer', 'compute')
GROUP BY rank, step, phase
ORDER BY step, rank, phase
"""
)
"""How long kernels computed on some ranks' GPUs, by step and phase."""

LOADING = by_hosts(
    """
WITH
  (SELECT min(ts) FROM $iterations WHERE job = {job:String} AND run = {run:UInt32} AND step >= {first:UInt32}) AS begin,
  (SELECT max(addNanoseconds(ts, duration_ns)) FROM $iterations
    WHERE job = {job:String} AND run = {run:UInt32} AND step <= {last:UInt32}) AS end
SELECT rank, toFloat64(sum(duration_ns)) AS loading_ns FROM launches
WHERE job = {job:String} AND run = {run:UInt32} AND kind = 'module' AND duration_ns > 0 AND ts > begin AND ts <= end
GROUP BY rank ORDER BY rank
"""
)
"""Time that each rank spent loading or compiling GPU code."""
