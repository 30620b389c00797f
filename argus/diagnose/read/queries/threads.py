"""Where threads were, what they waited for, what else ran on their nodes."""

from __future__ import annotations

PLACES = """
SELECT t.rank AS rank, t.host AS host, t.pid AS pid, t.tid AS tid, t.thread AS thread, t.reason AS reason,
       t.seconds AS seconds, k.functions AS functions, k.files AS files, k.lines AS lines
FROM
(
  SELECT job, run, rank, any(host) AS host, pid, tid, any(thread) AS thread, reason, stack_id, sum(ns) / 1e9 AS seconds
  FROM stack_samples
  WHERE job = {job:String} AND run = {run:UInt32} AND rank IN {ranks:Array(UInt32)}
    AND last_ts >= fromUnixTimestamp64Nano({from_ns:Int64}) AND ts < fromUnixTimestamp64Nano({to_ns:Int64})
  GROUP BY job, run, rank, pid, tid, reason, stack_id
) AS t
LEFT ANY JOIN stacks AS k ON t.job = k.job AND t.run = k.run AND t.stack_id = k.stack_id
ORDER BY rank, seconds DESC
"""
"""Where the threads of some ranks were, and for how long."""

HOST_TIME = """
SELECT rank, argMax(pid, runqueue) AS process, argMax(name, runqueue) AS thread,
       if(max(seen) = 0, -1, max(runqueue / greatest(seen, 1))) AS runqueue_share,
       if(max(seen) = 0, -1, argMax(cpu / greatest(seen, 1), runqueue)) AS cpu_share,
       if(max(io_seen) = 0, -1, max(io / greatest(io_seen, 1))) AS io_share,
       if(max(taken_seen) = 0, -1, 1e9 * sum(taken) / max(taken_seen)) AS taken_per_s
FROM
(
  SELECT rank, pid, tid, any(thread) AS name,
         sumIf(part * cpu_ns, runqueue_ns >= 0) AS cpu,
         sumIf(part * runqueue_ns, runqueue_ns >= 0) AS runqueue, sumIf(part * interval_ns, runqueue_ns >= 0) AS seen,
         sumIf(part * io_ns, io_ns >= 0) AS io, sumIf(part * interval_ns, io_ns >= 0) AS io_seen,
         sumIf(part * involuntary, involuntary >= 0) AS taken, sumIf(part * interval_ns, involuntary >= 0) AS taken_seen
  FROM
  (
    SELECT rank, pid, tid, thread, interval_ns, cpu_ns, runqueue_ns, io_ns, involuntary,
           toUnixTimestamp64Nano(ts) AS begin_ns,
           (least(begin_ns + interval_ns, {to_ns:Int64}) - greatest(begin_ns, {from_ns:Int64})) / interval_ns AS part
    FROM thread_usage
    WHERE job = {job:String} AND run = {run:UInt32} AND rank IN {ranks:Array(UInt32)}
      AND ts >= fromUnixTimestamp64Nano({from_ns:Int64} - 60000000000) AND ts < fromUnixTimestamp64Nano({to_ns:Int64})
      AND interval_ns > 0 AND begin_ns + interval_ns > {from_ns:Int64}
  )
  GROUP BY rank, pid, tid
)
GROUP BY rank ORDER BY rank
"""
"""The thread of each rank that waited the most for a CPU, and for a disk: as shares of the time. Of an interval that
only overlaps the time counts the part that does. They last 10 s at most, and longer only where Argus was held up."""

WORKED = """
SELECT rank, sum(worked) / greatest(max(seen), 1) AS share
FROM
(
  SELECT rank, pid, tid, sum(part * (cpu_ns + greatest(runqueue_ns, 0))) AS worked, sum(part * interval_ns) AS seen
  FROM
  (
    SELECT rank, pid, tid, interval_ns, cpu_ns, runqueue_ns, toUnixTimestamp64Nano(ts) AS begin_ns,
           (least(begin_ns + interval_ns, {to_ns:Int64}) - greatest(begin_ns, {from_ns:Int64})) / interval_ns AS part
    FROM thread_usage
    WHERE job = {job:String} AND run = {run:UInt32} AND rank IN {ranks:Array(UInt32)}
      AND ts >= fromUnixTimestamp64Nano({from_ns:Int64} - 60000000000) AND ts < fromUnixTimestamp64Nano({to_ns:Int64})
      AND interval_ns > 0 AND cpu_ns >= 0 AND begin_ns + interval_ns > {from_ns:Int64}
  )
  GROUP BY rank, pid, tid
)
GROUP BY rank ORDER BY rank
"""
"""For how long the threads of some ranks were on a CPU or waited for one, all together, as a share of the time: above 1
where several were at once."""

ASLEEP = """
SELECT rank, toFloat64(sum(ns - runqueue_ns)) / ({to_ns:Int64} - {from_ns:Int64}) AS share FROM stack_samples
WHERE job = {job:String} AND run = {run:UInt32} AND rank IN {ranks:Array(UInt32)}
  AND kind = 'off' AND reason IN ('sleep', 'disk', 'page_fault', 'wait_child')
  AND ts >= fromUnixTimestamp64Nano({from_ns:Int64}) AND ts < fromUnixTimestamp64Nano({to_ns:Int64})
GROUP BY rank ORDER BY rank
"""
"""For how long the threads of some ranks waited for what no other rank and no CPU has to do with, all together, as a
share of the time."""

HOST_CPU = """
SELECT host, sum(part * busy_ns) / greatest(sum(part * interval_ns * cpus), 1) AS busy,
       sum(part * greatest(busy_ns - job_ns - argus_ns, 0)) / greatest(sum(part * interval_ns * cpus), 1) AS others,
       sum(part * stolen_ns) / greatest(sum(part * interval_ns * cpus), 1) AS stolen
FROM
(
  SELECT host, interval_ns, cpus, busy_ns, job_ns, argus_ns, stolen_ns, toUnixTimestamp64Nano(ts) AS begin_ns,
         (least(begin_ns + interval_ns, {to_ns:Int64}) - greatest(begin_ns, {from_ns:Int64})) / interval_ns AS part
  FROM host_usage
  WHERE job = {job:String} AND run = {run:UInt32} AND host IN {hosts:Array(String)}
    AND ts >= fromUnixTimestamp64Nano({from_ns:Int64} - 60000000000) AND ts < fromUnixTimestamp64Nano({to_ns:Int64})
    AND interval_ns > 0 AND begin_ns + interval_ns > {from_ns:Int64}
)
GROUP BY host ORDER BY host
"""
"""How busy the CPUs of nodes were, and with what besides the traced ranks and Argus: shares of all CPU time."""

SAMPLED_TIME = """
SELECT rank, toFloat64(sum(gc_ns)) / greatest(max(last) - min(first), 1) AS gc_share,
       toFloat64(max(io_ns)) / greatest(max(last) - min(first), 1) AS io_share
FROM
(
  SELECT rank, pid, tid, sumIf(ns, kind = 'cpu' AND gc) AS gc_ns,
         sumIf(ns, kind = 'off' AND reason IN ('disk', 'page_fault')) AS io_ns,
         min(toUnixTimestamp64Nano(ts)) AS first, max(toUnixTimestamp64Nano(last_ts)) AS last
  FROM stack_samples
  WHERE job = {job:String} AND run = {run:UInt32} AND rank IN {ranks:Array(UInt32)}
    AND ts >= fromUnixTimestamp64Nano({from_ns:Int64}) AND ts < fromUnixTimestamp64Nano({to_ns:Int64})
  GROUP BY rank, pid, tid
)
GROUP BY rank ORDER BY rank
"""
"""How much of the time each rank collected garbage, and a thread of it waited for a disk, by stacks."""

PAUSES = """
SELECT count() AS pauses, toFloat64(sum(p.duration_ns)) AS total_ns, toFloat64(median(p.duration_ns)) AS usual_ns,
       max(p.generation) AS generation,
       topK(1)((toString(k.python_function), toString(k.python_file), k.python_line))[1] AS place,
       place.1 AS function, place.2 AS file, place.3 AS line
FROM gc_pauses AS p
LEFT ANY JOIN stacks AS k ON p.job = k.job AND p.run = k.run AND p.stack_id = k.stack_id
WHERE p.job = {job:String} AND p.run = {run:UInt32} AND p.rank IN {ranks:Array(UInt32)}
  AND p.ts >= fromUnixTimestamp64Nano({from_ns:Int64}) AND p.ts < fromUnixTimestamp64Nano({to_ns:Int64})
"""
"""Pauses for garbage collection of some ranks, and where most of them were."""

PROCESSES = """
SELECT rank, argMax(pid, version) AS pid, argMax(host, version) AS host FROM ranks
WHERE job = {job:String} AND run = {run:UInt32} AND rank IN {ranks:Array(UInt32)} AND rank_source != 'parent'
GROUP BY rank ORDER BY rank
"""
"""The processes of some ranks."""

ACTIVITY = """
WITH
  mains AS
  (
    SELECT rank, pid FROM ranks
    WHERE job = {job:String} AND run = {run:UInt32} AND rank_source != 'parent' GROUP BY rank, pid
  )
SELECT t.rank AS rank, (t.rank, t.pid) IN (SELECT rank, pid FROM mains) AS own, t.pid = t.tid AS first_thread,
       t.thread AS thread, t.kind AS kind, t.reason AS reason, t.spent_ns AS spent_ns,
       k.kinds AS kinds, k.functions AS functions, k.files AS files, k.lines AS lines
FROM
(
  SELECT job, run, rank, pid, tid, any(thread) AS thread, kind, reason, stack_id, sum(part) AS spent_ns
  FROM
  (
    SELECT *, toUnixTimestamp64Nano(ts) AS begin, toUnixTimestamp64Nano(last_ts) AS done,
           if(kind = 'off' AND done > begin,
              toFloat64(ns) * greatest(0, least(done, {to_ns:Int64}) - greatest(begin, {from_ns:Int64}))
                / (done - begin),
              toFloat64(ns) * (begin + intDiv(done - begin, 2) BETWEEN {from_ns:Int64} AND {to_ns:Int64})) AS part
    FROM stack_samples
    WHERE job = {job:String} AND run = {run:UInt32} AND rank IN {ranks:Array(UInt32)}
      AND last_ts >= fromUnixTimestamp64Nano({from_ns:Int64}) AND ts < fromUnixTimestamp64Nano({to_ns:Int64})
  )
  GROUP BY job, run, rank, pid, tid, kind, reason, stack_id
  HAVING spent_ns > 0
) AS t
LEFT ANY JOIN stacks AS k ON t.job = k.job AND t.run = k.run AND t.stack_id = k.stack_id
ORDER BY rank, spent_ns DESC
"""
"""What the threads of some ranks did in some time, with their stacks."""
