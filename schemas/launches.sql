-- CUDA calls on the CPU.

-- The same launches come again in every step: ZSTD(1) does not look back far enough to see it, ZSTD(3) does (`scripts/bench codecs`).
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
  shared_bytes UInt64 CODEC(Delta, ZSTD(1)) COMMENT 'Dynamic shared memory of a kernel',
  grid Array(UInt32) CODEC(ZSTD(3)) COMMENT 'Grid x, y, z of a kernel; empty otherwise',
  block Array(UInt16) CODEC(ZSTD(3)) COMMENT 'Block x, y, z of a kernel; empty otherwise',
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

CREATE OR REPLACE VIEW launches_by_step
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
