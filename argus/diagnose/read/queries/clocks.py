"""How hosts go together: clocks, step numbers, communicators."""

from __future__ import annotations

from argus.diagnose.read.query import OF_ALL_HOSTS, by_hosts

SEVERAL = """
SELECT uniqExactIf(host, mono_offset_ns != 0 OR launcher IN ('kineto', 'nsys')) AS hosts,
       toUInt32(countIf(launcher IN ('kineto', 'nsys')) > 0) AS recorded FROM jobs
WHERE job = {job:String} AND run = {run:UInt32}
"""
"""Hosts with clocks of their own: times that were simulated are taken as they are."""

WALLS = """
SELECT host, argMax(wall_error_ns, version) AS error_ns FROM jobs
WHERE job = {job:String} AND run = {run:UInt32} GROUP BY host
"""
"""The error that each host reports for its wall clock, ns; -1: none."""

LOCAL_GROUPS = """
SELECT m.comm_group AS comm_group, r.host AS host, any(m.joined_by) AS joined_by, max(m.nranks) AS nranks,
       toInt64(uniqExact(m.rank)) AS members, min(m.rank) AS first_rank, argMin(m.comm, m.rank) AS comm,
       argMin(m.seq_offset, m.rank) AS seq_offset
FROM
(
  SELECT rank, comm, comm_group, nranks, seq_offset, joined_by FROM communicators FINAL
  WHERE job = {job:String} AND run = {run:UInt32} AND error = ''
) AS m
INNER JOIN
(
  SELECT rank, argMax(host, version) AS host FROM ranks
  WHERE job = {job:String} AND run = {run:UInt32} GROUP BY rank
) AS r ON m.rank = r.rank
GROUP BY comm_group, host
ORDER BY host, comm_group
"""
"""The communicators of each host, with one rank that stands for the others."""

NEWEST_CALLS = """
SELECT rank, comm, op, dtype, count, seq, toUnixTimestamp64Nano(ts) AS ts_ns FROM collectives
WHERE job = {job:String} AND run = {run:UInt32}
  AND has(arrayZip({ranks:Array(UInt32)}, {comms:Array(UInt64)}), (rank, comm))
  AND op NOT IN ('Send', 'Recv', 'GroupStart', 'GroupEnd')
ORDER BY ts DESC LIMIT {most:UInt32} BY rank, comm
"""

NEWEST_WAITS = """
SELECT rank, toUnixTimestamp64Nano(ts) AS ts_ns, duration_ns FROM launches
WHERE job = {job:String} AND run = {run:UInt32} AND rank IN {ranks:Array(UInt32)}
  AND kind = 'sync' AND NOT in_nccl AND duration_ns >= 0
ORDER BY ts DESC LIMIT {most:UInt32} BY rank
"""

_NCCL_KERNELS = """
    SELECT rank, launch_tid, launch_ts, toUnixTimestamp64Nano(ts) AS begun, begun + duration_ns AS done
    FROM kernel_events
    WHERE job = {job:String} AND run = {run:UInt32} AND kind = 'kernel' AND startsWith(name, 'nccl')
"""

NEWEST_ENDS = f"""
SELECT c.rank AS rank, c.comm AS comm, c.seq AS seq, min(k.begun) AS begun_ns, max(k.done) AS done_ns
FROM
(
  SELECT * FROM
  (
{_NCCL_KERNELS}
  ) WHERE has({{ranks:Array(UInt32)}}, rank)
) AS k
ASOF INNER JOIN
(
  SELECT rank, tid, comm, seq, ts, duration_ns FROM collectives
  WHERE job = {{job:String}} AND run = {{run:UInt32}}
    AND has(arrayZip({{ranks:Array(UInt32)}}, {{comms:Array(UInt64)}}), (rank, comm))
    AND op NOT IN ('Send', 'Recv', 'GroupStart', 'GroupEnd')
  ORDER BY ts DESC LIMIT {{most:UInt32}} BY rank, comm
) AS c ON k.rank = c.rank AND k.launch_tid = c.tid AND k.launch_ts >= c.ts
WHERE k.launch_ts <= addNanoseconds(c.ts, greatest(c.duration_ns, 0))
GROUP BY rank, comm, seq
"""
"""When the kernels of the newest calls of some handles ran: those that were launched inside the call."""

EXTENT = """
SELECT toInt64(toUnixTimestamp(toStartOfMinute(min(first_ts)))) AS first_s,
       toInt64(toUnixTimestamp(max(last_ts)) + intDiv(max(max_ns), 1000000000)) AS last_s,
       toFloat64(sum(n)) AS steps,
       (SELECT toFloat64(avg(collectives)) FROM iterations
        WHERE job = {job:String} AND run = {run:UInt32} AND step IN
          (SELECT step FROM iteration_rollup WHERE job = {job:String} AND run = {run:UInt32}
           ORDER BY step DESC LIMIT 1 BY step LIMIT 2)) AS calls
FROM iteration_rollup WHERE job = {job:String} AND run = {run:UInt32}
"""
"""When a run was, s, how many steps its ranks made together, and how many collective calls are in one of them."""

SPANNING = by_hosts(f"""
SELECT comm_group, groupUniqArray(host) AS hosts, min(rank) AS first_rank
FROM
(
{OF_ALL_HOSTS}
)
GROUP BY comm_group
HAVING length(hosts) > 1
ORDER BY comm_group
""")
"""Communicators that span hosts."""

_MINUTES = "toStartOfMinute({}) IN (SELECT toDateTime(arrayJoin({{minutes:Array(UInt32)}}), 'UTC'))"

_IN_MINUTES = _MINUTES.format("ts")
"""Calls are ordered by the minute: others are not read."""

CALL_RATES = by_hosts(f"""
SELECT m.comm_group AS comm_group, count() AS calls
FROM
(
  SELECT rank, comm FROM collectives
  WHERE job = {{job:String}} AND run = {{run:UInt32}} AND {_IN_MINUTES} AND rank IN {{firsts:Array(UInt32)}}
    AND op IN {{ops:Array(String)}}
) AS c
INNER JOIN
(
  SELECT * FROM
  (
{OF_ALL_HOSTS}
  ) WHERE comm_group IN {{groups:Array(UInt64)}} ORDER BY rank LIMIT 1 BY comm_group
) AS m ON c.rank = m.rank AND c.comm = m.comm
GROUP BY comm_group
ORDER BY comm_group
""")
"""How many synchronising calls the first rank of some communicators made in some minutes."""

_NEWEST_STEPS = """
      (SELECT step FROM iteration_rollup WHERE job = {job:String} AND run = {run:UInt32}
       GROUP BY step ORDER BY min(first_ts) DESC LIMIT {most:UInt32})
      UNION ALL
      (SELECT step FROM iteration_rollup WHERE job = {job:String} AND run = {run:UInt32}
       GROUP BY step ORDER BY max(last_ts) DESC LIMIT {most:UInt32})
""".strip("\n")

SHORTEST_CALLS = by_hosts(f"""
SELECT comm_group, toFloat64(quantileExactLow(0.5)(shortest)) AS shortest_ns
FROM
(
  SELECT m.comm_group AS comm_group, g.step AS step, min(g.shortest_ns) AS shortest
  FROM
  (
    SELECT rank, step, comm, shortest_ns FROM gpu_collectives
    WHERE job = {{job:String}} AND run = {{run:UInt32}} AND op IN {{ops:Array(String)}} AND step IN
    (
{_NEWEST_STEPS}
    )
  ) AS g
  INNER JOIN
  (
    SELECT * FROM
    (
{OF_ALL_HOSTS}
    ) WHERE comm_group IN {{groups:Array(UInt64)}}
  ) AS m ON g.rank = m.rank AND g.comm = m.comm
  GROUP BY comm_group, step
)
GROUP BY comm_group
ORDER BY comm_group
""")
"""How long the shortest collective of some communicators takes on their GPUs, in the newest steps."""

WAITED_FOR = by_hosts(f"""
SELECT DISTINCT rank FROM
(
  SELECT m.comm_group AS comm_group, m.host AS host, m.rank AS rank, g.took_ns AS took_ns
  FROM
  (
    SELECT * FROM
    (
{OF_ALL_HOSTS}
    ) WHERE comm_group IN {{groups:Array(UInt64)}}
  ) AS m
  LEFT JOIN
  (
    SELECT rank, comm, avg(shortest_ns) AS took_ns FROM gpu_collectives
    WHERE job = {{job:String}} AND run = {{run:UInt32}} AND op IN {{ops:Array(String)}} AND step IN
    (
{_NEWEST_STEPS}
    )
    GROUP BY rank, comm
  ) AS g ON m.rank = g.rank AND m.comm = g.comm
  ORDER BY took_ns, rank LIMIT {{members:UInt32}} BY comm_group, host
)
ORDER BY rank
""")
"""The ranks of some communicators that came last to them on each host, in the newest steps: their GPUs waited least. A
rank of which that is not known may be one of them."""

_SAMPLED = f"""
WITH
  members AS
  (
    SELECT rank, node, comm, comm_group, seq_offset,
           transform(comm_group, {{groups:Array(UInt64)}}, {{strides:Array(UInt32)}}, toUInt32(1)) AS stride
    FROM
    (
{OF_ALL_HOSTS}
    ) WHERE comm_group IN {{groups:Array(UInt64)}}
      AND (empty({{chosen:Array(UInt32)}}) OR rank IN (SELECT arrayJoin({{chosen:Array(UInt32)}})))
    ORDER BY rank LIMIT {{members:UInt32}} BY comm_group, host
  ),
  sampled AS
  (
    SELECT c.rank AS rank, m.node AS node, c.tid AS tid, m.comm_group AS comm_group,
           toInt64(c.seq) + m.seq_offset AS aligned_seq, c.ts AS ts, c.duration_ns AS duration_ns
    FROM
    (
      SELECT rank, tid, comm, seq, ts, duration_ns FROM collectives
      WHERE job = {{job:String}} AND run = {{run:UInt32}} AND {_IN_MINUTES} AND rank IN (SELECT rank FROM members)
        AND comm IN (SELECT comm FROM members) AND op IN {{ops:Array(String)}}
    ) AS c
    LEFT ANY JOIN members AS m ON c.rank = m.rank AND c.comm = m.comm
    WHERE m.stride > 0 AND cityHash64(aligned_seq) % greatest(m.stride, 1) = 0
  )
"""

_BY_HOST = """
SELECT comm_group, aligned_seq, node, max(entry) AS entry_ns, min(done) AS end_ns, min(done - entry) AS took_ns
FROM calls
GROUP BY comm_group, aligned_seq, node
"""

GPU_CALLS = by_hosts(
    _SAMPLED.rstrip()
    + f""",
  calls AS
  (
    SELECT c.comm_group AS comm_group, c.aligned_seq AS aligned_seq, any(c.node) AS node, c.rank AS rank,
           min(k.begun) AS entry, max(k.done) AS done
    FROM
    (
{_NCCL_KERNELS.rstrip()}
      AND rank IN (SELECT rank FROM members) AND {_MINUTES.format("launch_ts")}
    ) AS k
    ASOF INNER JOIN sampled AS c ON k.rank = c.rank AND k.launch_tid = c.tid AND k.launch_ts >= c.ts
    WHERE k.launch_ts <= addNanoseconds(c.ts, greatest(c.duration_ns, 0))
    GROUP BY comm_group, aligned_seq, rank
  )
"""
    + _BY_HOST
)
"""When each host's ranks entered and left collectives on their GPUs, by NCCL's kernels. Hosts are the number of their
first rank, and rows in no order."""

WAITED_CALLS = by_hosts(
    _SAMPLED.rstrip()
    + f""",
  syncs AS
  (
    SELECT rank, ts, duration_ns FROM launches
    WHERE job = {{job:String}} AND run = {{run:UInt32}} AND {_IN_MINUTES} AND rank IN (SELECT rank FROM members)
      AND kind = 'sync' AND NOT in_nccl AND duration_ns >= 0
  ),"""
    + """
  waits AS
  (
    SELECT l.rank AS rank, l.ts AS ts, l.duration_ns AS duration_ns
    FROM
    (
      SELECT rank, ts, duration_ns FROM syncs
    ) AS l
    INNER JOIN
    (
      SELECT rank, quantile(0.9)(duration_ns) AS usual_ns FROM syncs GROUP BY rank
    ) AS u ON l.rank = u.rank
    WHERE 10 * l.duration_ns >= u.usual_ns
  ),
  calls AS
  (
    SELECT c.comm_group AS comm_group, c.aligned_seq AS aligned_seq, c.node AS node,
           toUnixTimestamp64Nano(c.ts) AS entry,
           toUnixTimestamp64Nano(w.ts) + w.duration_ns AS done
    FROM sampled AS c
    ASOF INNER JOIN waits AS w ON c.rank = w.rank AND c.ts <= w.ts
  )
"""
    + _BY_HOST
)
"""The same by the CPU: from the call to the end of the first wait for the GPU after it that was a long one."""

STEPS_OF_CALLS = by_hosts(
    _SAMPLED
    + """
SELECT c.comm_group AS comm_group, c.aligned_seq AS aligned_seq, c.node AS node,
       toInt64(argMin(i.step, c.rank)) AS step
FROM sampled AS c
ASOF INNER JOIN
(
  SELECT rank, ts, step, addNanoseconds(ts, duration_ns) AS ts_end FROM iterations
  WHERE job = {job:String} AND run = {run:UInt32} AND rank IN (SELECT rank FROM members) AND step IN
    (SELECT step FROM iteration_rollup WHERE job = {job:String} AND run = {run:UInt32}
       AND (has({minutes:Array(UInt32)}, toUInt32(toUnixTimestamp(toStartOfMinute(first_ts))))
         OR has({minutes:Array(UInt32)}, toUInt32(toUnixTimestamp(toStartOfMinute(last_ts))))
         OR has({minutes:Array(UInt32)}, toUInt32(toUnixTimestamp(toStartOfMinute(addNanoseconds(last_ts, max_ns)))))
         OR max_ns > 60000000000))
) AS i ON c.rank = i.rank AND c.ts > i.ts
WHERE c.ts <= i.ts_end
GROUP BY comm_group, aligned_seq, node
"""
)
"""The step that each host counts a call to."""

CLOCKS = by_hosts("""
SELECT host, ts, at, offset_ns, drift_ppb, error_ns FROM clocks
WHERE job = {job:String} AND run = {run:UInt32}
  AND version = (SELECT max(version) FROM clocks WHERE job = {job:String} AND run = {run:UInt32})
ORDER BY host, ts
""")
"""What is known of the clocks of a job's hosts."""
