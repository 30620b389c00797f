-- Which operations of the GPUs are kept one by one.

CREATE TABLE IF NOT EXISTS raw_requests
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 COMMENT 'Tracing session',
  ts DateTime64(9, 'UTC') COMMENT 'Begin of the moment whose operations are wanted',
  until DateTime64(9, 'UTC') COMMENT 'End of it; both may lie ahead',
  ranks Array(UInt32) COMMENT 'Ranks it is about; empty: all',
  why String COMMENT 'What for, in words',
  asked DateTime64(3, 'UTC') DEFAULT now64(3) COMMENT 'When it was asked for',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree ORDER BY (job, run, ts)
TTL stored + {{raw_ttl}}
SETTINGS non_replicated_deduplication_window = 1000
COMMENT 'Moments that somebody flagged: every tracer of the run stores their GPU operations one by one';

CREATE TABLE IF NOT EXISTS raw_windows
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 COMMENT 'Tracing session',
  rank UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Global rank',
  host LowCardinality(String) COMMENT 'Node',
  ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'Begin of the moment',
  duration_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Its length',
  why LowCardinality(String) COMMENT 'What for: request: ..., slow step, spike: KERNEL',
  whole Bool COMMENT 'Whether all of it is in kernel_events; false: its beginning had left the memory',
  operations UInt64 CODEC(T64, ZSTD(1)) COMMENT 'Rows that were stored for it and were not there for another reason',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree ORDER BY (job, run, rank, ts)
TTL stored + {{raw_ttl}}
SETTINGS non_replicated_deduplication_window = 1000
COMMENT 'Moments of which kernel_events has every operation of the rank, although it has not all of them otherwise';
