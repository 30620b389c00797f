-- Argus schema, version 14: the views of calls in two steps. What is asked of a view cannot be told to what lies below a window
-- function: whoever asks for the calls of some seconds reads calls_aligned or calls_across, and those seconds alone.

CREATE VIEW IF NOT EXISTS calls_aligned
AS SELECT
  c.job AS job, c.run AS run, c.rank AS rank, c.host AS host, c.pid AS pid, c.tid AS tid, c.comm AS comm, c.op AS op,
  c.seq AS seq, c.bytes AS bytes, c.count AS count, c.dtype AS dtype, c.redop AS redop, c.peer AS peer, c.stream AS stream,
  c.ts AS ts, c.duration_ns AS duration_ns, c.result AS result, c.in_group AS in_group,
  m.comm_group AS comm_group, m.comm_rank AS comm_rank, m.nranks AS nranks, m.joined_by AS joined_by,
  m.known AS aligned,
  if(aligned, toInt64(c.seq) + m.seq_offset, NULL) AS aligned_seq
FROM collectives AS c
LEFT JOIN
(
  SELECT job, run, rank, comm, comm_group, comm_rank, nranks, joined_by, seq_offset, error = '' AS known
  FROM communicators FINAL
) AS m ON c.job = m.job AND c.run = m.run AND c.rank = m.rank AND c.comm = m.comm
COMMENT 'collectives with their communicator: comm_group and aligned_seq name one call on all ranks';

CREATE OR REPLACE VIEW collectives_aligned
AS SELECT
  *,
  if(
    aligned AND op NOT IN ('Send', 'Recv', 'GroupStart', 'GroupEnd'),
    toUnixTimestamp64Nano(ts)
      - min(toUnixTimestamp64Nano(ts)) OVER (PARTITION BY job, run, comm_group, aligned_seq, op),
    NULL
  ) AS lateness_ns
FROM calls_aligned
COMMENT 'calls_aligned with lateness_ns: how much later than the first rank the call was made (NULL: alignment unknown, or not a collective of all ranks)';

CREATE VIEW IF NOT EXISTS calls_across
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
