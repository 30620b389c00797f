"""What the GPUs of some ranks did in one step, operation by operation, for its critical path."""

from __future__ import annotations

_RANKS = "job = {job:String} AND run = {run:UInt32} AND rank IN {ranks:Array(UInt32)}"
_NCCL = "kind = 'kernel' AND match(name, '^(void )?nccl(Symk)?(Dev)?Kernel')"

STEPS_ON_GPUS = """
SELECT rank, any(host) AS node, step, toUnixTimestamp64Nano(min(ts)) AS begin_ns,
       toInt64(max(toUnixTimestamp64Nano(ts) + duration_ns)) AS end_ns, sum(busy_ns) AS busy_ns
FROM gpu_steps
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:Int64} AND {last:Int64}
  AND (empty({ranks:Array(UInt32)}) OR has({ranks:Array(UInt32)}, rank))
GROUP BY rank, step ORDER BY step, rank
"""
"""When each step began and ended on each GPU, with the numbers and clocks of the hosts."""

WAITED_FOR_DATA = """
SELECT rank, step, toInt64(sum(duration_ns)) AS loading_ns FROM gpu_phases
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:Int64} AND {last:Int64}
  AND phase = 'data_loading'
GROUP BY rank, step
"""
"""How long each GPU waited for data."""

COUNT_ON_GPUS = f"""
SELECT count() AS operations FROM kernel_events
WHERE {_RANKS} AND ts >= fromUnixTimestamp64Nano({{begin:Int64}}) AND ts < fromUnixTimestamp64Nano({{end:Int64}})
"""

DONE_ON_GPUS = f"""
SELECT rank, toUnixTimestamp64Nano(ts) AS begin_ns, toInt64(duration_ns) AS took_ns,
       multiIf({_NCCL}, 2, kind = 'kernel', 0, 1) AS what,
       if(name = '', toString(kind), substringUTF8(name, 1, 200)) AS word,
       if(issue_latency_ns >= 0, toUnixTimestamp64Nano(launch_ts), -1) AS launched_ns, launch_tid
FROM kernel_events
WHERE {_RANKS} AND ts >= fromUnixTimestamp64Nano({{begin:Int64}}) AND ts < fromUnixTimestamp64Nano({{end:Int64}})
ORDER BY rank, ts
"""
"""Every operation that began in a stretch of time. ``what``: 0 a kernel that computes, 1 a copy, 2 a kernel of NCCL."""

CALLS_OF_RANKS = f"""
SELECT rank, tid, toUnixTimestamp64Nano(ts) AS called_ns, comm, op IN ('Send', 'Recv') AS pairwise,
       toString(op) AS word, seq, peer
FROM collectives
WHERE {_RANKS} AND ts >= fromUnixTimestamp64Nano({{begin:Int64}}) AND ts < fromUnixTimestamp64Nano({{end:Int64}})
  AND op NOT IN ('GroupStart', 'GroupEnd')
ORDER BY rank, tid, ts
"""
"""Calls of NCCL in a stretch of time."""

MEMBERS = """
SELECT rank, comm, comm_group, comm_rank, seq_offset FROM communicators FINAL
WHERE job = {job:String} AND run = {run:UInt32} AND error = '' ORDER BY rank, comm
"""
"""Communicators by rank and handle."""

STEP_BEGINS = """
SELECT step, toUnixTimestamp64Nano(min(ts)) AS begin_ns FROM phase_ops
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32} GROUP BY step
"""
"""When the steps of a recording of operations began."""

STEPS_OF_HOSTS = """
SELECT step, toString(host) AS node, toUnixTimestamp64Nano(min(ts)) AS begin_ns FROM iterations
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:Int64} AND {last:Int64}
GROUP BY step, node ORDER BY step, node
"""
"""When steps began on each host, by its own numbers and clock."""
