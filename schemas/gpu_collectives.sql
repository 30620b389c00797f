-- Argus schema, version 15: what the GPUs' kernels of NCCL took, by communicator and step.

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
  comm UInt64 CODEC(ZSTD(1)) COMMENT 'Communicator handle in this process, as in communicators; 0: not known',
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

CREATE VIEW IF NOT EXISTS gpu_collectives_across
AS SELECT g.* EXCEPT (step), g.step AS host_step, toUInt32(greatest(0, toInt64(g.step) + s.shift)) AS step
FROM gpu_collectives AS g
LEFT ANY JOIN
(
  SELECT job, run, host, shift, error FROM step_shifts
  WHERE (job, run, version) IN (SELECT job, run, max(version) FROM step_shifts GROUP BY job, run)
) AS s ON g.job = s.job AND g.run = s.run AND g.host = s.host
WHERE s.error = ''
COMMENT 'gpu_collectives with step numbers that are the same on all hosts. Hosts whose steps could not be numbered so are missing';

CREATE VIEW IF NOT EXISTS collective_waits
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
COMMENT 'Time in collectives by step, communicator and rank, taken apart: transfer_ns is the least of any rank, which waited for nobody; the rest is waiting for those who came later. Of ranks of one host (comm_group is told host by host where nobody saw the communicator being made)';
