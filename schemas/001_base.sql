-- Argus schema, version 1. Plain ClickHouse SQL; statements end with a semicolon at the end of a line.
-- {{ttl}} and {{raw_ttl}} are replaced by intervals (argus/store/schema.py). Times are wall-clock UTC, to the nanosecond:
-- the host's CLOCK_MONOTONIC plus jobs.mono_offset_ns. Durations are nanoseconds; -1 means "not measured", which differs from 0.
-- Calls lie on disk minute by minute, and in each rank by rank: what happened lately is read without what happened before,
-- and neighbours are alike. Rows expire by their time in the store, not by ts: an imported trace of last year would vanish while it is being inserted.

CREATE TABLE IF NOT EXISTS jobs
(
  job LowCardinality(String) COMMENT 'Job name: --job, or read from the launcher''s environment',
  run UInt32 COMMENT 'One tracing session of the job: Unix time of its start',
  host LowCardinality(String) COMMENT 'Node that was traced',
  started DateTime64(9, 'UTC') COMMENT 'When tracing began',
  ended Nullable(DateTime64(9, 'UTC')) COMMENT 'When tracing ended; NULL: still running, or Argus was killed',
  world_size UInt32 COMMENT 'Ranks of the whole job as the launcher says; 0: unknown',
  launcher LowCardinality(String) COMMENT 'torchrun, openmpi, mvapich, pmi, slurm, kubernetes or unknown',
  mono_offset_ns Int64 COMMENT 'Wall time minus CLOCK_MONOTONIC on this host, fixed for the session',
  argus_version LowCardinality(String) COMMENT 'Version of Argus that wrote the run',
  version UInt64 COMMENT 'Row version: the highest wins'
) ENGINE = ReplacingMergeTree(version) ORDER BY (job, run, host)
COMMENT 'One row per tracing session and host';

CREATE TABLE IF NOT EXISTS ranks
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 COMMENT 'Tracing session',
  rank UInt32 COMMENT 'Global rank; numbered in the order of first calls where no launcher variable tells it (see rank_source)',
  host LowCardinality(String) COMMENT 'Node',
  pid UInt32 COMMENT 'Process id on the host',
  local_rank Int32 COMMENT 'Rank inside the node; -1: unknown',
  rank_source LowCardinality(String) COMMENT 'Whose variable told the rank: torchrun, openmpi, mvapich, pmi, slurm; order: guessed; parent: a child of the rank''s process',
  started DateTime64(3, 'UTC') COMMENT 'Start of the process',
  exe String COMMENT 'Executable',
  command String COMMENT 'Command line',
  libraries Array(String) COMMENT 'Libraries with probes',
  probes UInt32 COMMENT 'Probes attached',
  state LowCardinality(String) COMMENT 'traced or exited',
  version UInt64 COMMENT 'Row version: the highest wins'
) ENGINE = ReplacingMergeTree(version) ORDER BY (job, run, rank, host, pid)
COMMENT 'One row per traced process';

CREATE TABLE IF NOT EXISTS iterations
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  rank UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Global rank',
  step UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Step number, the same on every rank, from 0 at the first whole step seen',
  host LowCardinality(String) COMMENT 'Node',
  ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'Start of the step on this rank',
  duration_ns UInt64 CODEC(T64, ZSTD(1)) COMMENT 'Length of the step on this rank',
  collectives UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Collective calls in the step',
  launches UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Kernel and graph launches in the step',
  method LowCardinality(String) COMMENT 'How the boundary was found: collectives, launches, imported',
  confidence Float32 CODEC(ZSTD(1)) COMMENT 'Share of calls that repeat exactly with the period, 0 to 1',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(ts) ORDER BY (job, run, step, rank)
TTL stored + {{ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'One row per rank and step';

CREATE TABLE IF NOT EXISTS collectives
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  rank UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Global rank',
  host LowCardinality(String) COMMENT 'Node',
  pid UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Process id',
  tid UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Thread id',
  comm UInt64 CODEC(ZSTD(1)) COMMENT 'Communicator handle in this process; join communicators for the group it belongs to',
  op LowCardinality(String) COMMENT 'AllReduce, AllGather, ReduceScatter, Broadcast, Reduce, AlltoAll, Gather, Scatter, Send, Recv, GroupStart, GroupEnd',
  seq UInt64 CODEC(Delta, ZSTD(1)) COMMENT 'Call number on this communicator in this process, from 0 when first seen; Send and Recv have their own',
  bytes UInt64 CODEC(ZSTD(1)) COMMENT 'count x size of dtype',
  count UInt64 CODEC(ZSTD(1)) COMMENT 'Elements, as passed to the call',
  dtype LowCardinality(String) COMMENT 'NCCL data type',
  redop LowCardinality(String) COMMENT 'Reduction: sum, prod, max, min, avg, custom; empty: none',
  peer Int32 CODEC(ZSTD(1)) COMMENT 'Root or peer rank inside the communicator; -1: none',
  stream UInt64 CODEC(ZSTD(1)) COMMENT 'CUDA stream handle',
  ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'When the call was made',
  duration_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Time inside the CPU call (not on the GPU); -1: not measured',
  result Int32 CODEC(ZSTD(1)) COMMENT 'ncclResult_t; 0: success',
  in_group Bool COMMENT 'Between ncclGroupStart and ncclGroupEnd',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(ts) ORDER BY (job, run, toStartOfMinute(ts), rank, ts)
TTL stored + {{ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'One row per NCCL call and rank, as seen on the CPU';

CREATE TABLE IF NOT EXISTS communicators
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 COMMENT 'Tracing session',
  rank UInt32 COMMENT 'Global rank',
  comm UInt64 COMMENT 'Communicator handle in this process',
  comm_group UInt64 COMMENT 'The same number on every rank of the communicator',
  comm_rank Int32 COMMENT 'Rank inside the communicator; -1: unknown (made before Argus attached)',
  nranks Int32 COMMENT 'Size of the communicator; -1: unknown',
  seq_offset Int64 COMMENT 'Add to collectives.seq to get a number that is the same on every rank of the group',
  joined_by LowCardinality(String) COMMENT 'How the group was found: unique_id, split, traffic (guessed from equal call sequences), single',
  error String COMMENT 'Why the alignment is unknown; empty: known',
  version UInt64 COMMENT 'Row version: the highest wins'
) ENGINE = ReplacingMergeTree(version) ORDER BY (job, run, rank, comm)
COMMENT 'Which handles on which ranks are one communicator, and how their calls line up';

CREATE TABLE IF NOT EXISTS communicator_calls
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 COMMENT 'Tracing session',
  rank UInt32 COMMENT 'Global rank',
  host LowCardinality(String) COMMENT 'Node',
  pid UInt32 COMMENT 'Process id',
  tid UInt32 COMMENT 'Thread id',
  call LowCardinality(String) COMMENT 'Function that was called: ncclCommInitRank, ncclCommSplit, ncclCommDestroy, ...',
  comm UInt64 COMMENT 'Communicator that was made, asked or ended; 0: none',
  parent UInt64 COMMENT 'Communicator it was split from; 0: none',
  comm_rank Int32 COMMENT 'Rank inside the communicator; -1: not told by the call',
  nranks Int32 COMMENT 'Size of the communicator; -1: not told by the call',
  color Int32 COMMENT 'Colour of a split; -1: none (NCCL_SPLIT_NOCOLOR)',
  key Int32 COMMENT 'Key of a split; excluded ranks of a shrink; -1: none',
  unique_id String COMMENT 'ncclUniqueId, 256 hexadecimal digits; empty: not told by the call',
  ts DateTime64(9, 'UTC') COMMENT 'When the call was made',
  duration_ns Int64 COMMENT 'Time inside the call; -1: not measured',
  result Int32 COMMENT 'ncclResult_t; 0: success',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMM(ts) ORDER BY (job, run, rank, ts)
TTL stored + {{ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'One row per call that makes, asks or ends a communicator';

CREATE TABLE IF NOT EXISTS launches
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  rank UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Global rank',
  host LowCardinality(String) COMMENT 'Node',
  pid UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Process id',
  tid UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Thread id',
  call LowCardinality(String) COMMENT 'Function that was called, as the library exports it',
  kind LowCardinality(String) COMMENT 'kernel, graph, memcpy (_h2d, _d2h, _d2d where the direction is known), memset, sync, alloc, free, module',
  kernel LowCardinality(String) COMMENT 'Kernel name where known; empty: not a kernel; kernel@0x...: no name found',
  handle UInt64 CODEC(ZSTD(1)) COMMENT 'Kernel, graph, event, pointer or module handle, as the call has it',
  stream UInt64 CODEC(ZSTD(1)) COMMENT 'CUDA stream handle; 0: default stream',
  bytes UInt64 CODEC(ZSTD(1)) COMMENT 'Bytes copied, set or allocated',
  shared_bytes UInt64 CODEC(ZSTD(1)) COMMENT 'Dynamic shared memory of a kernel',
  grid Array(UInt32) CODEC(ZSTD(1)) COMMENT 'Grid x, y, z of a kernel; empty otherwise',
  block Array(UInt16) CODEC(ZSTD(1)) COMMENT 'Block x, y, z of a kernel; empty otherwise',
  ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'When the call was made',
  duration_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Time inside the call; -1: not measured',
  result Int32 CODEC(ZSTD(1)) COMMENT 'CUresult or cudaError_t; 0: success or not measured',
  in_nccl Bool COMMENT 'Made by NCCL itself',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(ts) ORDER BY (job, run, toStartOfMinute(ts), rank, ts)
TTL stored + {{raw_ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'One row per CUDA call, as seen on the CPU';

CREATE TABLE IF NOT EXISTS findings
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 COMMENT 'Tracing session',
  created DateTime64(3, 'UTC') COMMENT 'When the diagnosis ran',
  status LowCardinality(String) COMMENT 'Verdict on the whole job: healthy, degraded, hung, inconclusive',
  kind LowCardinality(String) COMMENT 'Kind of finding; empty: the row only records the verdict',
  ranks Array(UInt32) COMMENT 'Ranks it concerns',
  hosts Array(String) COMMENT 'Nodes it concerns',
  step_from UInt32 COMMENT 'First step',
  step_to UInt32 COMMENT 'Last step',
  phase LowCardinality(String) COMMENT 'Phase it shows in',
  slowdown Float64 COMMENT 'Actual over ideal step time',
  share Float64 COMMENT 'Part of the lost time it explains',
  confidence Float64 COMMENT 'How sure, 0 to 1',
  evidence String COMMENT 'The finding as JSON, evidence and queries included',
  action String COMMENT 'What to do next'
) ENGINE = MergeTree ORDER BY (job, run, created)
SETTINGS non_replicated_deduplication_window = 1000
COMMENT 'What argus diagnose concluded';

CREATE TABLE IF NOT EXISTS coverage
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 COMMENT 'Tracing session',
  host LowCardinality(String) COMMENT 'Node',
  counter LowCardinality(String) COMMENT 'What was counted: every place that can drop, reject or guess has a name',
  value UInt64 COMMENT 'How many',
  loss Bool COMMENT 'Whether a value above 0 makes the coverage incomplete',
  ts DateTime64(3, 'UTC') COMMENT 'When it was read',
  version UInt64 COMMENT 'Row version: the highest wins'
) ENGINE = ReplacingMergeTree(version) ORDER BY (job, run, host, counter)
COMMENT 'What was seen, and what was lost: complete only if every loss counter is 0';
