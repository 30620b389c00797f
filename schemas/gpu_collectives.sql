-- What NCCL's kernels took on the GPUs, by communicator and step.

CREATE TABLE IF NOT EXISTS gpu_collectives
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  rank UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Global rank',
  host LowCardinality(String) COMMENT 'Node',
  pid UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Process id',
  device UInt32 CODEC(T64, ZSTD(1)) COMMENT 'GPU, as the process numbers those it may use',
  step UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Step number, as in iterations',
  ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'Start of the step on the GPU, as in gpu_steps',
  comm UInt64 CODEC(ZSTD(3)) COMMENT 'Communicator handle in this process, as in communicators; 0: not known',
  op LowCardinality(String) COMMENT 'AllReduce, AllGather, ReduceScatter, AlltoAll, Broadcast, Reduce, SendRecv; empty: of NCCL, and not known which',
  peer Int32 CODEC(T64, ZSTD(1)) COMMENT 'Who was sent to or received from, or the root, as a rank of the communicator; -1: none; of calls in a group, of the last one',
  calls UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Kernels of NCCL that began in the step',
  bytes Int64 CODEC(T64, ZSTD(1)) COMMENT 'Payload of the calls that launched them; of calls in a group the last one''s',
  duration_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Their time on the GPU, waiting for others included',
  shortest_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'The shortest of them',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(ts) ORDER BY (job, run, step, rank, device, comm, op, peer)
TTL stored + {{ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'How long the GPUs were in the collectives of each communicator, by rank and step';

CREATE OR REPLACE VIEW collective_waits
AS SELECT
  job, run, step, comm_group, op, rank, host, calls, bytes, duration_ns,
  min(duration_ns) OVER (PARTITION BY job, run, step, comm_group, op) AS transfer_ns,
  duration_ns - transfer_ns AS waited_ns
FROM
(
  SELECT
    g.job AS job, g.run AS run, g.step AS step, g.rank AS rank, any(g.host) AS host, m.comm_group AS comm_group, g.op AS op,
    sum(g.calls) AS calls, sum(g.bytes) AS bytes, sum(g.duration_ns) AS duration_ns
  FROM gpu_collectives AS g
  JOIN
  (
    SELECT job, run, rank, comm, comm_group FROM communicators FINAL WHERE error = ''
  ) AS m ON g.job = m.job AND g.run = m.run AND g.rank = m.rank AND g.comm = m.comm
  WHERE g.op != 'SendRecv'
  GROUP BY job, run, step, rank, comm_group, op
)
COMMENT 'Time in collectives by step, communicator and rank, taken apart: transfer_ns is the least of any rank, which waited for nobody; the rest is waiting for those who came later. Of ranks of one host (comm_group is inferred host by host where nobody saw the communicator being made)';

CREATE OR REPLACE VIEW collective_bandwidth
AS SELECT
  c.job AS job, c.run AS run, m.comm_group AS comm_group, toInt64(c.last_seq) + m.seq_offset AS aligned_seq, c.op AS op,
  max(c.calls) AS calls, max(c.sent) AS bytes, greatest(max(m.nranks), toInt32(uniqExact(c.rank))) AS nranks,
  uniqExact(c.rank) AS seen, min(c.ts) AS ts, min(c.gpu_ns) AS transfer_ns, max(c.gpu_ns) - min(c.gpu_ns) AS waited_ns,
  argMin(c.rank, c.gpu_ns) AS last_rank,
  if(max(m.nranks) > 0 OR seen > 1, bytes * multiIf(
    op = 'AllReduce', 2 * (nranks - 1) / nranks,
    op IN ('AllGather', 'ReduceScatter', 'AlltoAll', 'Gather', 'Scatter'), nranks - 1,
    1
  ) / transfer_ns, NULL) AS bus_gb_s
FROM
(
  SELECT
    k.job AS job, k.run AS run, k.rank AS rank, k.duration_ns AS gpu_ns, b.op AS op, b.comm AS comm, b.calls AS calls,
    b.sent AS sent, b.last_seq AS last_seq, b.ts AS ts
  FROM
  (
    SELECT job, run, rank, launch_tid AS tid, launch_ts, duration_ns FROM kernel_events
    WHERE kind = 'kernel' AND match(name, '^(void )?nccl(Symk)?(Dev)?Kernel') AND issue_latency_ns >= 0
      AND graph = 0
  ) AS k
  ASOF JOIN
  (
    SELECT
      job, run, rank, tid, min(at) AS ts, anyLastIf(what, real) AS op, anyLastIf(handle, real) AS comm,
      countIf(real) AS calls, sum(bytes) AS sent, maxIf(seq, real) AS last_seq, uniqExactIf((handle, what), real) AS kinds
    FROM
    (
      SELECT
        job, run, rank, tid, ts AS at, op AS what, comm AS handle, bytes, seq,
        op NOT IN ('GroupStart', 'GroupEnd') AS real,
        sum(NOT in_group OR (op = 'GroupStart' AND depth = 1)) OVER
          (PARTITION BY job, run, rank, tid ORDER BY ts ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS together
      FROM
      (
        SELECT *, sum((op = 'GroupStart') - (op = 'GroupEnd')) OVER
          (PARTITION BY job, run, rank, tid ORDER BY ts ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS depth
        FROM collectives
      )
    )
    GROUP BY job, run, rank, tid, together
    HAVING calls > 0
  ) AS b ON k.job = b.job AND k.run = b.run AND k.rank = b.rank AND k.tid = b.tid AND k.launch_ts >= b.ts
  WHERE b.kinds = 1 AND b.op NOT IN ('Send', 'Recv')
) AS c
JOIN
(
  SELECT job, run, rank, comm, comm_group, nranks, seq_offset FROM communicators FINAL WHERE error = ''
) AS m ON c.job = m.job AND c.run = m.run AND c.rank = m.rank AND c.comm = m.comm
GROUP BY job, run, comm_group, aligned_seq, op
COMMENT 'How fast each collective was on the GPUs: transfer_ns is the time of the rank that came last and waited for nobody, bus_gb_s the bus bandwidth in GB/s as NCCL''s own tests define it (NULL: among how many ranks is not known)';
