-- Argus schema, version 2: what most queries would otherwise join by hand.

CREATE VIEW IF NOT EXISTS collectives_aligned
AS SELECT
  c.job AS job, c.run AS run, c.rank AS rank, c.host AS host, c.pid AS pid, c.tid AS tid, c.comm AS comm, c.op AS op,
  c.seq AS seq, c.bytes AS bytes, c.count AS count, c.dtype AS dtype, c.redop AS redop, c.peer AS peer, c.stream AS stream,
  c.ts AS ts, c.duration_ns AS duration_ns, c.result AS result, c.in_group AS in_group,
  m.comm_group AS comm_group, m.comm_rank AS comm_rank, m.nranks AS nranks, m.joined_by AS joined_by,
  m.known AS aligned,
  if(aligned, toInt64(c.seq) + m.seq_offset, NULL) AS aligned_seq,
  if(
    aligned AND c.op NOT IN ('Send', 'Recv', 'GroupStart', 'GroupEnd'),
    toUnixTimestamp64Nano(c.ts)
      - min(toUnixTimestamp64Nano(c.ts)) OVER (PARTITION BY c.job, c.run, comm_group, aligned_seq, c.op),
    NULL
  ) AS lateness_ns
FROM collectives AS c
LEFT JOIN
(
  SELECT job, run, rank, comm, comm_group, comm_rank, nranks, joined_by, seq_offset, error = '' AS known
  FROM communicators FINAL
) AS m ON c.job = m.job AND c.run = m.run AND c.rank = m.rank AND c.comm = m.comm
COMMENT 'collectives with their communicator: comm_group and aligned_seq name one call on all ranks; lateness_ns is how much later than the first rank it was made (NULL: alignment unknown, or not a collective)';

CREATE VIEW IF NOT EXISTS launches_by_step
AS SELECT
  l.job AS job, l.run AS run, l.rank AS rank,
  if(l.ts < i.ts_end, i.step, NULL) AS step,
  l.host AS host, l.pid AS pid, l.tid AS tid, l.call AS call, l.kind AS kind, l.kernel AS kernel, l.handle AS handle,
  l.stream AS stream, l.bytes AS bytes, l.shared_bytes AS shared_bytes, l.grid AS grid, l.block AS block,
  l.ts AS ts, l.duration_ns AS duration_ns, l.result AS result, l.in_nccl AS in_nccl
FROM launches AS l
ASOF LEFT JOIN
(
  SELECT job, run, rank, ts, toNullable(step) AS step, addNanoseconds(ts, duration_ns) AS ts_end FROM iterations
) AS i ON l.job = i.job AND l.run = i.run AND l.rank = i.rank AND l.ts >= i.ts
COMMENT 'launches with the step they were made in (NULL: outside every step)';
