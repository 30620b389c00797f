-- How a job is split over its ranks, and the operations of its steps, from which argus diagnose rebuilds them.

CREATE TABLE IF NOT EXISTS parallel_groups
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 COMMENT 'Tracing session',
  host LowCardinality(String) COMMENT 'Node that saw these ranks',
  comm_group UInt64 COMMENT 'As in communicators',
  dimension LowCardinality(String) COMMENT 'What it is for: tp (tensor), cp (context), ep (expert), fsdp (sharded data), dp (data), pp (pipeline parallel), world (bookkeeping among all), unknown',
  ranks Array(UInt32) COMMENT 'Global ranks seen in it on this node',
  nranks Int32 COMMENT 'Ranks it has; -1: unknown',
  confidence Float32 COMMENT 'How sure the dimension is, 0 to 1',
  why String COMMENT 'What it was inferred from',
  version UInt64 COMMENT 'Row version: the highest wins',
  superseded UInt8 COMMENT '1: its ranks turned out to be of another group; FINAL leaves it out'
) ENGINE = ReplacingMergeTree(version, superseded) ORDER BY (job, run, host, comm_group)
COMMENT 'What each communicator is for, by what is sent in it: the mesh of the job';

CREATE TABLE IF NOT EXISTS parallel_layout
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 COMMENT 'Tracing session',
  dp UInt32 COMMENT 'Data-parallel ranks',
  pp UInt32 COMMENT 'Pipeline stages',
  tp UInt32 COMMENT 'Ranks that share a layer (tensor parallel)',
  sp UInt32 COMMENT 'Ranks that share a sequence of data (dsp_size): their gradients are reduced too',
  vpp UInt32 COMMENT 'Model chunks a stage has',
  world_size UInt32 COMMENT 'Ranks of the whole job; 0: not known',
  source LowCardinality(String) COMMENT 'What reported it',
  version UInt64 COMMENT 'Row version: the highest wins'
) ENGINE = ReplacingMergeTree(version) ORDER BY (job, run)
COMMENT 'How a job is split over its ranks, where a recording reports it';

CREATE TABLE IF NOT EXISTS phase_ops
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  rank UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Global rank',
  step UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Step number, as in iterations',
  host LowCardinality(String) COMMENT 'Node',
  stage UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Pipeline stage of the rank, from 0',
  dp_rank UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Data-parallel rank of the rank',
  op LowCardinality(String) COMMENT 'Type: forward-compute, backward-compute, forward-send, forward-recv, backward-send, backward-recv, params-all-gather, grads-reduce-scatter, layernorm-grads-all-reduce, embedding-grads-all-reduce, optimizer-clip-main-grad, optimizer, gc',
  seq UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Number among the operations of this type of the rank in the step, from 0',
  microbatch Int32 CODEC(Delta, ZSTD(1)) COMMENT 'Micro-batch; -1: of none, or not known',
  chunk Int32 CODEC(T64, ZSTD(1)) COMMENT 'Model chunk within the stage (interleaved schedules have several); -1: of none',
  global_chunk Int32 CODEC(T64, ZSTD(1)) COMMENT 'Model chunk within the model; -1: of none',
  ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'Begin. Within a step all ranks share a clock',
  ts_end DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'End, in the precision of the recording: one in single precision rounds begin + length',
  duration_ns UInt64 CODEC(T64, ZSTD(1)) COMMENT 'Length, with waiting for others where it is a communication',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(ts) ORDER BY (job, run, step, rank, op, seq)
TTL stored + {{ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'Computations, sends, receives and collectives of each step and rank, where a recording reports them';
