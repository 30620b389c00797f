-- What ran on the GPUs, as CUPTI timed it.

CREATE TABLE IF NOT EXISTS kernel_events
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  rank UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Global rank',
  host LowCardinality(String) COMMENT 'Node',
  pid UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Process id',
  device UInt32 CODEC(T64, ZSTD(1)) COMMENT 'GPU, as the process numbers those it may use',
  context UInt32 CODEC(T64, ZSTD(1)) COMMENT 'CUPTI''s number of the CUDA context',
  stream UInt32 CODEC(T64, ZSTD(1)) COMMENT 'CUPTI''s number of the stream; not the handle that launches.stream has',
  kind LowCardinality(String) COMMENT 'kernel, memcpy (_h2d, _d2h, _d2d, _h2h, _p2p where known) or memset',
  name LowCardinality(String) COMMENT 'Kernel name in full, as launches.kernel has it; empty: not a kernel, or no name found',
  ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'When it began on the GPU',
  duration_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Time on the GPU',
  launch_ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'When the CPU began the call that launched it; 1970: not known',
  issue_latency_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'From the beginning of that call to ts; -1: not known',
  launch_tid UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Thread that launched it; 0: not known',
  launch_probed Bool COMMENT 'Whether launch_ts is exactly the ts of a row of launches (same rank and thread)',
  correlation UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'CUPTI''s number of the call that launched it: one for all kernels of a graph launch',
  graph UInt32 CODEC(T64, ZSTD(1)) COMMENT 'CUPTI''s number of the CUDA graph it is part of; 0: none',
  graph_node UInt64 CODEC(ZSTD(1)) COMMENT 'Node of that graph; 0: none',
  grid Array(UInt32) CODEC(ZSTD(3)) COMMENT 'Grid x, y, z of a kernel; empty otherwise',
  block Array(UInt16) CODEC(ZSTD(3)) COMMENT 'Block x, y, z of a kernel; empty otherwise',
  registers UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Registers of a thread of a kernel',
  shared_static UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Bytes of shared memory of a block that the kernel declares',
  shared_dynamic UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Bytes of shared memory of a block that the launch adds',
  bytes UInt64 CODEC(ZSTD(1)) COMMENT 'Bytes copied or set',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(ts) ORDER BY (job, run, rank, ts)
TTL stored + {{raw_ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'One row per kernel, copy and fill on a GPU, with the call that launched it';

CREATE TABLE IF NOT EXISTS gpu_usage
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  rank UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Global rank',
  host LowCardinality(String) COMMENT 'Node',
  pid UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Process id',
  device UInt32 CODEC(T64, ZSTD(1)) COMMENT 'GPU, as the process numbers those it may use',
  ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'Begin of the window',
  duration_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Length of the window: a second; the first and the last of a process are shorter',
  busy_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Time in which at least one kernel, copy or fill of the rank ran',
  compute_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Time in which at least one kernel ran that is not NCCL''s',
  communication_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Time in which at least one kernel of NCCL ran',
  exposed_communication_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Part of communication_ns in which no other kernel ran',
  overlapped_communication_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Part of communication_ns in which another kernel ran as well',
  memcpy_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Time in which at least one copy or fill ran',
  idle_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'duration_ns without busy_ns',
  idle_gaps UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Stretches of idle time of 1 us or more; one that spans windows counts in each',
  largest_gap_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'The longest of them, as far as it lies in the window',
  kernels UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Kernels that began in the window',
  queue_depth_mean Float32 CODEC(ZSTD(1)) COMMENT 'Operations that were launched and had not begun, averaged over time; -1: launches are not known',
  queue_depth_max Int32 CODEC(T64, ZSTD(1)) COMMENT 'The most of them at once; -1: launches are not known',
  issue_latency_p50_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'From the call to the begin on the GPU, median of the kernels that began in the window; -1: not known',
  issue_latency_p99_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'The same, 99th percentile; -1: not known',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(ts) ORDER BY (job, run, rank, device, ts)
TTL stored + {{ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'What a rank''s GPU did, second by second';

CREATE TABLE IF NOT EXISTS gpu_steps
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  rank UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Global rank',
  host LowCardinality(String) COMMENT 'Node',
  pid UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Process id',
  device UInt32 CODEC(T64, ZSTD(1)) COMMENT 'GPU, as the process numbers those it may use',
  step UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Step number, as in iterations',
  ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'When the step before it was over on the GPU',
  duration_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Until all that was launched up to the end of the step on the CPU had ended',
  busy_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Time in which at least one kernel, copy or fill of the rank ran',
  compute_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Time in which at least one kernel ran that is not NCCL''s',
  communication_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Time in which at least one kernel of NCCL ran',
  exposed_communication_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Part of communication_ns in which no other kernel ran',
  overlapped_communication_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Part of communication_ns in which another kernel ran as well',
  memcpy_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Time in which at least one copy or fill ran',
  idle_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'duration_ns without busy_ns',
  idle_gaps UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Stretches of idle time of 1 us or more',
  largest_gap_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'The longest of them, as far as it lies in the step',
  kernels UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Kernels that began in the step',
  queue_depth_mean Float32 CODEC(ZSTD(1)) COMMENT 'Operations that were launched and had not begun, averaged over time; -1: launches are not known',
  queue_depth_max Int32 CODEC(T64, ZSTD(1)) COMMENT 'The most of them at once; -1: launches are not known',
  issue_latency_p50_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'From the call to the begin on the GPU, median of the kernels that began in the step; -1: not known',
  issue_latency_p99_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'The same, 99th percentile; -1: not known',
  void_share Float32 CODEC(ZSTD(1)) COMMENT 'idle_ns / duration_ns: share of the step in which nothing ran (the void percentage of Flare)',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(ts) ORDER BY (job, run, step, rank, device)
TTL stored + {{ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'What the GPU did in each step of each rank';

CREATE TABLE IF NOT EXISTS gpu_host_events
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  rank UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Global rank',
  host LowCardinality(String) COMMENT 'Node',
  pid UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Process id',
  tid UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Thread id; 0: not known from the record',
  kind LowCardinality(String) COMMENT 'synchronization, overhead, jit, module or marker',
  name LowCardinality(String) COMMENT 'Text of a marker, or which synchronization, overhead or compilation; empty: not known',
  code UInt32 CODEC(T64, ZSTD(1)) COMMENT 'CUPTI''s number for that; id of a module; flags of a marker (2: begins, 4: ends)',
  ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'When it began',
  duration_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'How long it took; 0: a marker; -1: not measured (a module), ts is when it was reported',
  correlation UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'CUPTI''s number of the call it belongs to; 0: none',
  stream UInt32 CODEC(T64, ZSTD(1)) COMMENT 'CUPTI''s number of the stream',
  result Int32 CODEC(T64, ZSTD(1)) COMMENT 'Result of the call; 0: success',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(ts) ORDER BY (job, run, rank, ts)
TTL stored + {{raw_ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'What CUPTI saw on the CPU besides launches: waits, overhead of its own, compilations, modules, markers';

CREATE OR REPLACE VIEW kernels_by_step
AS SELECT
  k.job AS job, k.run AS run, k.rank AS rank,
  if(k.called < i.ts_end, i.step, NULL) AS step,
  k.host AS host, k.pid AS pid, k.device AS device, k.stream AS stream, k.kind AS kind, k.name AS name,
  k.ts AS ts, k.duration_ns AS duration_ns, k.launch_ts AS launch_ts, k.issue_latency_ns AS issue_latency_ns,
  k.launch_tid AS launch_tid, k.correlation AS correlation, k.graph AS graph, k.grid AS grid, k.block AS block, k.bytes AS bytes
FROM
(
  SELECT *, if(issue_latency_ns < 0, ts, launch_ts) AS called FROM kernel_events
) AS k
ASOF LEFT JOIN
(
  SELECT job, run, rank, ts, toNullable(step) AS step, addNanoseconds(ts, duration_ns) AS ts_end FROM iterations
) AS i ON k.job = i.job AND k.run = i.run AND k.rank = i.rank AND k.called >= i.ts
COMMENT 'kernel_events with the step they were launched in, or began in where the launch is not known (NULL: outside every step)';

CREATE OR REPLACE VIEW top_kernels
AS SELECT
  job, run, rank, name, count() AS count, sum(duration_ns) AS total_ns, min(duration_ns) AS min_ns,
  toInt64(quantileTDigest(0.5)(duration_ns)) AS p50_ns, toInt64(quantileTDigest(0.99)(duration_ns)) AS p99_ns,
  max(duration_ns) AS max_ns
FROM kernel_events
WHERE kind = 'kernel'
GROUP BY job, run, rank, name
COMMENT 'Time on the GPU by rank and kernel; the percentiles are approximate';
