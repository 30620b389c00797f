-- Jobs of several hosts. argus diagnose fills these tables; a job of one host has no rows here.
-- Rows of one estimate have one version. The newest of a run counts: the views pick it.

CREATE TABLE IF NOT EXISTS clocks
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 COMMENT 'Tracing session',
  host LowCardinality(String) COMMENT 'Node',
  reference LowCardinality(String) COMMENT 'Node whose clock the times are converted to',
  ts DateTime64(9, 'UTC') COMMENT 'From when on the row holds, until the host''s next one; 1970: from the beginning',
  at DateTime64(9, 'UTC') COMMENT 'When offset_ns is exact, as the host''s own clock has it',
  offset_ns Int64 COMMENT 'Add to the host''s times at this time to get the reference''s',
  drift_ppb Int64 COMMENT 'By how much the offset grows: ns a second',
  error_ns Int64 COMMENT 'By how much the offset may be off while the row holds, up or down; -1: nothing is known of this clock, and the offset is a filler',
  calls UInt32 COMMENT 'Collectives that it was estimated from',
  method LowCardinality(String) COMMENT 'reference, gpu (times of NCCL''s kernels), waits (the CPU waits for the GPU after a call), wall (the host''s own estimate of its wall clock), none',
  through LowCardinality(String) COMMENT 'Node that this one was compared with, where it is not the reference; else empty',
  version UInt64 COMMENT 'Row version: the highest of a run wins',
  stored DateTime('UTC') DEFAULT now() COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = ReplacingMergeTree(version) ORDER BY (job, run, host, version, ts)
TTL stored + {{ttl}}
COMMENT 'How the clocks of a job''s hosts differ: a line for each host and stretch of time';

CREATE TABLE IF NOT EXISTS step_shifts
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 COMMENT 'Tracing session',
  host LowCardinality(String) COMMENT 'Node',
  shift Int64 COMMENT 'Add to the host''s step numbers to get those that are the same on all hosts',
  how LowCardinality(String) COMMENT 'reference, calls (the same collectives lie in steps of both), none',
  calls UInt32 COMMENT 'Collectives that were compared',
  confidence Float32 COMMENT 'Share of them that agree, 0 to 1',
  error String COMMENT 'Why the host''s steps cannot be numbered like the others''; empty: they can',
  version UInt64 COMMENT 'Row version: the highest of a run wins',
  stored DateTime('UTC') DEFAULT now() COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = ReplacingMergeTree(version) ORDER BY (job, run, host, version)
TTL stored + {{ttl}}
COMMENT 'How step numbers of a job''s hosts differ';

CREATE TABLE IF NOT EXISTS group_joins
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 COMMENT 'Tracing session',
  host LowCardinality(String) COMMENT 'Node',
  comm_group UInt64 COMMENT 'Communicator, as this host''s rows of communicators have it',
  joined_group UInt64 COMMENT 'The same number on every host of the communicator',
  seq_shift Int64 COMMENT 'Add to the host''s aligned numbers of calls to get those that are the same on every host',
  error String COMMENT 'Why it is not known which communicators of the other hosts it belongs to; empty: it is known',
  version UInt64 COMMENT 'Row version: the highest of a run wins',
  stored DateTime('UTC') DEFAULT now() COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = ReplacingMergeTree(version) ORDER BY (job, run, host, comm_group, version)
TTL stored + {{ttl}}
COMMENT 'Which communicators of several hosts are one, where no host saw it made';

CREATE OR REPLACE VIEW iterations_across
AS SELECT
  i.job AS job, i.run AS run, i.rank AS rank, toUInt32(greatest(0, toInt64(i.step) + s.shift)) AS step, i.host AS host,
  i.step AS host_step, i.ts AS ts, i.duration_ns AS duration_ns, i.collectives AS collectives, i.launches AS launches,
  i.method AS method, i.confidence AS confidence
FROM iterations AS i
LEFT ANY JOIN
(
  SELECT job, run, host, shift, error FROM step_shifts
  WHERE (job, run, version) IN (SELECT job, run, max(version) FROM step_shifts GROUP BY job, run)
) AS s ON i.job = s.job AND i.run = s.run AND i.host = s.host
WHERE s.error = ''
COMMENT 'iterations with step numbers that are the same on all hosts (ts is the host''s own clock). Hosts whose steps could not be numbered so are missing';

CREATE OR REPLACE VIEW phases_across
AS SELECT
  p.job AS job, p.run AS run, p.rank AS rank, toUInt32(greatest(0, toInt64(p.step) + s.shift)) AS step, p.host AS host,
  p.step AS host_step, p.ts AS ts, p.phase AS phase, p.duration_ns AS duration_ns, p.overlapped_ns AS overlapped_ns,
  p.spans AS spans, p.method AS method, p.confidence AS confidence
FROM phases AS p
LEFT ANY JOIN
(
  SELECT job, run, host, shift, error FROM step_shifts
  WHERE (job, run, version) IN (SELECT job, run, max(version) FROM step_shifts GROUP BY job, run)
) AS s ON p.job = s.job AND p.run = s.run AND p.host = s.host
WHERE s.error = ''
COMMENT 'phases with step numbers that are the same on all hosts. Hosts whose steps could not be numbered so are missing';

CREATE OR REPLACE VIEW gpu_steps_across
AS SELECT g.* EXCEPT (step), g.step AS host_step, toUInt32(greatest(0, toInt64(g.step) + s.shift)) AS step
FROM gpu_steps AS g
LEFT ANY JOIN
(
  SELECT job, run, host, shift, error FROM step_shifts
  WHERE (job, run, version) IN (SELECT job, run, max(version) FROM step_shifts GROUP BY job, run)
) AS s ON g.job = s.job AND g.run = s.run AND g.host = s.host
WHERE s.error = ''
COMMENT 'gpu_steps with step numbers that are the same on all hosts. Hosts whose steps could not be numbered so are missing';

CREATE OR REPLACE VIEW gpu_phases_across
AS SELECT g.* EXCEPT (step), g.step AS host_step, toUInt32(greatest(0, toInt64(g.step) + s.shift)) AS step
FROM gpu_phases AS g
LEFT ANY JOIN
(
  SELECT job, run, host, shift, error FROM step_shifts
  WHERE (job, run, version) IN (SELECT job, run, max(version) FROM step_shifts GROUP BY job, run)
) AS s ON g.job = s.job AND g.run = s.run AND g.host = s.host
WHERE s.error = ''
COMMENT 'gpu_phases with step numbers that are the same on all hosts. Hosts whose steps could not be numbered so are missing';

CREATE OR REPLACE VIEW collectives_across
AS SELECT
  *,
  at_ns - min(at_ns) OVER call AS later_ns,
  argMin(host, at_ns) OVER call AS first_host,
  argMin(clock_error_ns, at_ns) OVER call AS first_error_ns,
  if(
    NOT aligned OR op IN ('Send', 'Recv', 'GroupStart', 'GroupEnd'), NULL,
    if(host = first_host OR later_ns > clock_error_ns + first_error_ns, later_ns, 0)
  ) AS lateness_ns
FROM calls_across
WINDOW call AS (PARTITION BY job, run, comm_group, aligned_seq, op, cluster)
COMMENT 'calls_across with lateness_ns: how much later than the first rank the call was made, 0 where the clocks are not that exact';

CREATE OR REPLACE VIEW kernel_times_across
AS SELECT k.* EXCEPT (step), k.step AS host_step, toUInt32(greatest(0, toInt64(k.step) + s.shift)) AS step
FROM kernel_times AS k
LEFT ANY JOIN
(
  SELECT job, run, host, shift, error FROM step_shifts
  WHERE (job, run, version) IN (SELECT job, run, max(version) FROM step_shifts GROUP BY job, run)
) AS s ON k.job = s.job AND k.run = s.run AND k.host = s.host
WHERE s.error = ''
COMMENT 'kernel_times with step numbers that are the same on all hosts. Hosts whose steps could not be numbered so are missing';

CREATE OR REPLACE VIEW calls_across
AS SELECT
  c.job AS job, c.run AS run, c.rank AS rank, c.host AS host, c.pid AS pid, c.tid AS tid, c.comm AS comm, c.op AS op,
  c.seq AS seq, c.bytes AS bytes, c.count AS count, c.dtype AS dtype, c.ts AS ts, c.duration_ns AS duration_ns,
  c.in_group AS in_group, c.aligned AS aligned, c.nranks AS nranks, c.comm_group AS comm_group,
  c.comm_rank AS comm_rank, c.peer AS peer, c.aligned_seq AS aligned_seq,
  toUnixTimestamp64Nano(c.ts) + k.offset_ns
    + intDiv((toUnixTimestamp64Nano(c.ts) - toUnixTimestamp64Nano(k.at)) * k.drift_ppb, 1000000000) AS at_ns,
  greatest(k.error_ns, 0) AS clock_error_ns,
  if(k.error_ns < 0, toString(c.host), '') AS cluster
FROM
(
  SELECT
    a.job AS job, a.run AS run, a.rank AS rank, a.host AS host, a.pid AS pid, a.tid AS tid, a.comm AS comm, a.op AS op,
    a.seq AS seq, a.bytes AS bytes, a.count AS count, a.dtype AS dtype, a.ts AS ts, a.duration_ns AS duration_ns,
    a.in_group AS in_group, a.aligned AS aligned, a.nranks AS nranks, a.comm_rank AS comm_rank, a.peer AS peer,
    if(j.joined_group = 0, a.comm_group, j.joined_group) AS comm_group, a.aligned_seq + j.seq_shift AS aligned_seq
  FROM calls_aligned AS a
  LEFT ANY JOIN
  (
    SELECT job, run, host, comm_group, joined_group, seq_shift FROM group_joins
    WHERE error = '' AND (job, run, version) IN (SELECT job, run, max(version) FROM clocks GROUP BY job, run)
  ) AS j ON a.job = j.job AND a.run = j.run AND a.host = j.host AND a.comm_group = j.comm_group
) AS c
ASOF LEFT JOIN
(
  SELECT job, run, host, ts, at, offset_ns, drift_ppb, error_ns FROM clocks
  WHERE (job, run, version) IN (SELECT job, run, max(version) FROM clocks GROUP BY job, run)
) AS k ON c.job = k.job AND c.run = k.run AND c.host = k.host AND c.ts >= k.ts
COMMENT 'calls_aligned across hosts: at_ns is the time of the call on the reference''s clock; comm_group and aligned_seq are the same on all hosts. cluster: hosts that can be compared (empty: all whose clocks are known)';

CREATE OR REPLACE VIEW gpu_collectives_across
AS SELECT g.* EXCEPT (step), g.step AS host_step, toUInt32(greatest(0, toInt64(g.step) + s.shift)) AS step
FROM gpu_collectives AS g
LEFT ANY JOIN
(
  SELECT job, run, host, shift, error FROM step_shifts
  WHERE (job, run, version) IN (SELECT job, run, max(version) FROM step_shifts GROUP BY job, run)
) AS s ON g.job = s.job AND g.run = s.run AND g.host = s.host
WHERE s.error = ''
COMMENT 'gpu_collectives with step numbers that are the same on all hosts. Hosts whose steps could not be numbered so are missing';
