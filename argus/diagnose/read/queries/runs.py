"""A run as a whole: what it is compared with others by."""

from __future__ import annotations

LEVELS = tuple(round((place + 0.5) / 32, 6) for place in range(32))
"""Quantiles of a distribution that is kept."""

RUN_SIZE = """
SELECT max(world_size) AS world_size, max(step_flops) AS step_flops, groupUniqArray(host) AS hosts,
       countIf(isNull(ended)) AS open
FROM jobs FINAL WHERE job = {job:String} AND run = {run:UInt32}
"""

RUN_STEPS = """
SELECT step, avg(duration_ns) AS duration_ns, avg(launches) AS launches, avg(collectives) AS collectives,
       count() AS ranks
FROM iterations
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32} AND confidence >= 0.8
GROUP BY step ORDER BY step
"""

RUN_GPU_PHASES = """
SELECT step, phase, sum(duration_ns) / any(ranks) AS duration_ns
FROM gpu_phases
CROSS JOIN (SELECT uniqExact(rank) AS ranks FROM gpu_phases WHERE job = {job:String} AND run = {run:UInt32}) AS r
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}
GROUP BY step, phase ORDER BY step
"""

RUN_CPU_PHASES = RUN_GPU_PHASES.replace("gpu_phases", "phases")

RUN_GPU_STEPS = """
SELECT step, avg(idle_ns) AS idle_ns, avgIf(issue_latency_p50_ns, issue_latency_p50_ns >= 0) AS latency_ns,
       avg(void_share) AS void_share
FROM gpu_steps
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}
GROUP BY step ORDER BY step
"""

RUN_LATENCIES = f"""
SELECT quantiles({", ".join(map(str, LEVELS))})(issue_latency_p50_ns) AS points, count() AS n
FROM gpu_steps
WHERE job = {{job:String}} AND run = {{run:UInt32}} AND step BETWEEN {{first:UInt32}} AND {{last:UInt32}}
  AND issue_latency_p50_ns >= 0
"""

RUN_COMPUTE = """
SELECT host, intDiv((step - {first:UInt32}) * {batches:UInt32}, {last:UInt32} - {first:UInt32} + 1) AS batch,
       avg(compute_ns) AS compute_ns
FROM gpu_steps
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}
GROUP BY host, batch ORDER BY host, batch
"""

RUN_SLOWEST = """
SELECT host, rank, intDiv((step - {first:UInt32}) * {batches:UInt32}, {last:UInt32} - {first:UInt32} + 1) AS batch,
       avg(compute_ns) AS compute_ns
FROM gpu_steps
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32} AND (host, rank) IN
(
  SELECT host, argMax(rank, took) FROM
  (
    SELECT host, rank, quantileExact(0.5)(compute_ns) AS took FROM gpu_steps
    WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}
    GROUP BY host, rank
  )
  GROUP BY host
)
GROUP BY host, rank, batch ORDER BY host, batch
"""
"""What the slowest rank of each host computes."""

NEWEST_VERDICT = """
SELECT status, kind, ranks FROM findings WHERE job = {job:String} AND run = {run:UInt32}
ORDER BY created DESC, share DESC LIMIT 1
"""

RUN_TRANSFERS = """
SELECT dimension, op, step, avg(group_ns) AS transfer_ns, avg(group_bytes) AS bytes
FROM
(
  SELECT step, comm_group, op, any(transfer_ns) AS group_ns, any(bytes) AS group_bytes
  FROM collective_waits
  WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}
    AND (step - {first:UInt32}) % {every:UInt32} = 0
  GROUP BY step, comm_group, op
) AS w
LEFT ANY JOIN
(
  SELECT comm_group, any(parallel_groups.dimension) AS dimension FROM parallel_groups FINAL
  WHERE job = {job:String} AND run = {run:UInt32} GROUP BY comm_group
) AS g ON w.comm_group = g.comm_group
GROUP BY dimension, op, step ORDER BY dimension, op, step
"""

RUN_KERNELS = """
SELECT g.kernel AS kernel, k.batch AS batch, sum(k.launches) AS launches, sum(k.spent_ns) AS spent_ns,
       argMax(k.kernel_id, k.spent_ns) AS kernel_id, any(k.ranks) AS ranks
FROM
(
  SELECT kernel_id, intDiv((step - {first:UInt32}) * {batches:UInt32}, {last:UInt32} - {first:UInt32} + 1) AS batch,
         sum(kernel_times.launches) AS launches, sum(kernel_times.spent_ns) AS spent_ns,
         (SELECT uniqExact(rank) FROM kernel_summaries WHERE job = {job:String} AND run = {run:UInt32}) AS ranks
  FROM kernel_times
  WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}
  GROUP BY kernel_id, batch
) AS k
LEFT ANY JOIN
(
  SELECT kernel_id, any(kernel_groups.kernel) AS kernel FROM kernel_groups
  WHERE job = {job:String} AND run = {run:UInt32} GROUP BY kernel_id
) AS g ON k.kernel_id = g.kernel_id
WHERE NOT startsWith(g.kernel, 'nccl')
GROUP BY kernel, batch ORDER BY kernel, batch
"""

RUN_MESH = """
SELECT dimension, max(nranks) AS nranks FROM parallel_groups FINAL
WHERE job = {job:String} AND run = {run:UInt32} GROUP BY dimension ORDER BY dimension
"""

RUN_PAUSES = """
SELECT sum(duration_ns) AS paused_ns,
       (SELECT count() FROM signal_coverage WHERE job = {job:String} AND run = {run:UInt32} AND signal = 'stacks')
         AS sampled, count() AS n
FROM gc_pauses WHERE job = {job:String} AND run = {run:UInt32}
"""

RUN_WAITS = """
SELECT batch, sum(if(runqueue_ns >= 0, runqueue_ns, 0)) AS runqueue_ns, sum(interval_ns) AS interval_ns
FROM
(
  SELECT runqueue_ns, interval_ns, intDiv((toUnixTimestamp64Nano(ts) - low) * 10, high - low + 1) AS batch
  FROM thread_usage
  CROSS JOIN
  (
    SELECT min(toUnixTimestamp64Nano(ts)) AS low, max(toUnixTimestamp64Nano(ts)) AS high
    FROM thread_usage WHERE job = {job:String} AND run = {run:UInt32}
  ) AS span
  WHERE job = {job:String} AND run = {run:UInt32} AND tid = pid
)
GROUP BY batch ORDER BY batch
"""

RUN_LAST = """
SELECT max(step) AS last, arraySlice(arraySort(groupUniqArray(rank)), 1, 8) AS ranks
FROM kernel_summaries WHERE job = {job:String} AND run = {run:UInt32} AND step < 2147483648
"""

RUN_RANKS = """
SELECT uniqExact(rank) AS ranks FROM iterations WHERE job = {job:String} AND run = {run:UInt32}
"""

ENVIRONMENT_PROCESSES = """
SELECT count() AS processes FROM environments FINAL WHERE job = {job:String} AND run = {run:UInt32}
"""

ENVIRONMENT_FACTS = """
SELECT fact, value, count() AS processes, arraySlice(arraySort(groupUniqArray(rank)), 1, 64) AS some_ranks
FROM environment_facts WHERE job = {job:String} AND run = {run:UInt32}
GROUP BY fact, value ORDER BY fact, processes DESC
"""

GPU_MODEL = """
SELECT facts['gpu.model'] AS model, count() AS processes FROM environments FINAL
WHERE job = {job:String} AND run = {run:UInt32} AND model != '' GROUP BY model ORDER BY processes DESC, model LIMIT 1
"""

ANY_BASELINE = """
SELECT count() AS n FROM baselines
"""

_OWNER = """arraySort(groupUniqArrayIf(concat(toString(uid), if(container = '' OR startsWith(container, 'slurm '), '',
         ' in a container')), uid >= 0))"""
"""Whose a run is: its users, apart those in containers, whose root is not the node's. Empty: not known."""

RUN_OWNER = f"""
SELECT {_OWNER} AS owner FROM ranks WHERE job = {{job:String}} AND run = {{run:UInt32}}
"""


def of_owner(among: str) -> str:
    """A condition on ``job`` and ``run``: the run's owner is ``{owner:Array(String)}``.

    Args:
        among: A condition on ``ranks`` that those of all the runs in question meet.
    """
    runs = f"SELECT job, run FROM ranks WHERE {among} GROUP BY job, run HAVING"
    return (
        f"((job, run) IN ({runs} notEmpty({_OWNER}) AND {_OWNER} = {{owner:Array(String)}})"
        f" OR empty({{owner:Array(String)}}) AND (job, run) NOT IN ({runs} notEmpty({_OWNER})))"
    )


BASELINES = f"""
SELECT job, run, profile, source, added FROM baselines FINAL
WHERE class = {{class:String}} AND NOT removed
  AND (source = 'set' OR {of_owner("job IN (SELECT job FROM baselines WHERE class = {class:String})")})
ORDER BY added DESC
"""
"""Names are a job's own choice: what was learned of a user's runs says nothing of another's."""

BASELINE_CLASSES = """
SELECT class, count() AS runs FROM baselines FINAL
WHERE startsWith(class, {begin:String}) AND NOT removed AND NOT (job = {job:String} AND run = {run:UInt32})
GROUP BY class ORDER BY class LIMIT 100
"""

ALL_BASELINES = """
SELECT class, job, run, step_ns, steps, source, added FROM baselines FINAL
WHERE NOT removed ORDER BY class, added
"""

BASELINE_ROW = """
SELECT class, removed, source, profile FROM baselines FINAL WHERE job = {job:String} AND run = {run:UInt32}
"""

BASELINE_STEPS = """
SELECT b.job AS job, b.run AS run, b.step_ns / 1e6 AS step_ms, b.source AS source
FROM baselines AS b FINAL
WHERE b.class = {class:String} AND NOT b.removed
  AND has({jobs:Array(String)}, b.job) AND has({runs:Array(UInt32)}, b.run)
UNION ALL
SELECT job, run, avg(duration_ns) / 1e6, 'this run' FROM iterations
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}
GROUP BY job, run
"""
