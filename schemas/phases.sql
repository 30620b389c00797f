-- Where the time of each step went, on the CPU and on the GPU.

CREATE TABLE IF NOT EXISTS phases
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  rank UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Global rank',
  step UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Step number, as in iterations',
  host LowCardinality(String) COMMENT 'Node',
  ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'Start of the step on this rank',
  phase LowCardinality(String) COMMENT 'What the thread that trains did: data_loading, forward, backward, communication (it waited for it), optimizer, other',
  duration_ns UInt64 CODEC(T64, ZSTD(1)) COMMENT 'Time of that thread in this phase. The phases of a step add up to the step',
  overlapped_ns UInt64 CODEC(T64, ZSTD(1)) COMMENT 'communication: time in which it went on while the thread did something else; else 0',
  spans UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Separate stretches of time that it consists of',
  method LowCardinality(String) COMMENT 'How most of it was found: marks (begin and end were seen), between_marks (it lies between two that were), remainder',
  confidence Float32 CODEC(ZSTD(1)) COMMENT 'How sure the phase is, 0 to 1',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(ts) ORDER BY (job, run, step, rank, phase)
TTL stored + {{ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'Where the time of each step went, by rank, as its training thread on the CPU saw it';

CREATE OR REPLACE VIEW slow_phases
AS SELECT
  job, run, rank, node, phase, steps, typical_ns, usual_ns, toInt64(typical_ns) - toInt64(usual_ns) AS excess_ns
FROM
(
  SELECT *, quantileExactLow(0.5)(typical_ns) OVER (PARTITION BY job, run, phase) AS usual_ns
  FROM
  (
    SELECT job, run, rank, any(host) AS node, phase, count() AS steps, quantileExact(0.5)(duration_ns) AS typical_ns
    FROM phases GROUP BY job, run, rank, phase
  )
)
COMMENT 'Typical time of each phase on each rank (median over the steps that have it), what is usual among the ranks (their lower median), and the excess';

CREATE TABLE IF NOT EXISTS gpu_phases
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  rank UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Global rank',
  host LowCardinality(String) COMMENT 'Node',
  pid UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Process id',
  device UInt32 CODEC(T64, ZSTD(1)) COMMENT 'GPU, as the process numbers those it may use',
  step UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Step number, as in iterations',
  ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'Start of the step on the GPU, as in gpu_steps',
  phase LowCardinality(String) COMMENT 'Kernels: forward, backward, optimizer, compute (not known which). Only NCCL ran: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, send_recv, communication (not known which), pipeline_bubble (waiting for who sends or receives). Only copies: memcpy, checkpoint. Nothing ran: data_loading, checkpoint, idle',
  duration_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Time of the GPU in this phase. The phases of a step add up to its duration in gpu_steps',
  overlapped_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Communication: time in which it went on while kernels computed, not in duration_ns; else 0',
  operations UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Kernels and copies of this phase that began in the step',
  method LowCardinality(String) COMMENT 'How most of it was found: records (the operations themselves), marks (launched in that part of PyTorch), names (of kernels), threads (launched by one that does backward passes only), order (launched between kernels whose phase is known by their names), calls (of the CPU)',
  confidence Float32 CODEC(ZSTD(1)) COMMENT 'How sure the phase is, 0 to 1',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(ts) ORDER BY (job, run, step, rank, device, phase)
TTL stored + {{ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'Where the GPU''s time of each step went, by rank';

CREATE OR REPLACE VIEW slow_gpu_phases
AS SELECT
  job, run, rank, device, node, phase, steps, typical_ns, usual_ns, toInt64(typical_ns) - toInt64(usual_ns) AS excess_ns,
  surest
FROM
(
  SELECT *, quantileExactLow(0.5)(typical_ns) OVER (PARTITION BY job, run, phase) AS usual_ns
  FROM
  (
    SELECT
      job, run, rank, device, any(host) AS node, phase, count() AS steps, quantileExact(0.5)(duration_ns) AS typical_ns,
      quantileExact(0.5)(confidence) AS surest
    FROM gpu_phases GROUP BY job, run, rank, device, phase
  )
)
COMMENT 'Typical time of each phase on each GPU (median over the steps that have it), what is usual among the GPUs (their lower median), the excess, and how sure the phase is (median)';
