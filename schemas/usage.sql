-- Who used the CPUs: each thread of a rank, and everything on a node while a job was traced there.

CREATE TABLE IF NOT EXISTS thread_usage
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  rank UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Global rank',
  host LowCardinality(String) COMMENT 'Node',
  pid UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Process id',
  tid UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Thread id',
  thread LowCardinality(String) COMMENT 'Name of the thread; empty: not known',
  ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'Begin of the interval',
  interval_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Length of the interval',
  cpu_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Time on a CPU; -1: not known',
  runqueue_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Time in which it could have run, but no CPU was free; -1: not known',
  io_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Time in which it waited for a disk; -1: not known',
  voluntary Int64 CODEC(T64, ZSTD(1)) COMMENT 'Times it left the CPU to wait; -1: not known',
  involuntary Int64 CODEC(T64, ZSTD(1)) COMMENT 'Times it was taken from the CPU; -1: not known',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(ts) ORDER BY (job, run, rank, ts)
TTL stored + {{raw_ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'What each thread did, exactly, as the kernel reports it about once a second';

CREATE TABLE IF NOT EXISTS host_usage
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  host LowCardinality(String) COMMENT 'Node',
  ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'Begin of the interval',
  interval_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Length of the interval',
  cpus UInt16 CODEC(T64, ZSTD(1)) COMMENT 'CPUs of the node that are online',
  busy_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'CPU time of everything, time taken by the hypervisor included; at most interval_ns x cpus',
  stolen_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Of it: taken by the hypervisor for other machines',
  job_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Of it: of all ranks that are traced here, of this job and others',
  argus_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Of it: of Argus, its embedded store excepted',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(ts) ORDER BY (job, run, host, ts)
TTL stored + {{raw_ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'Who used the CPUs of a node, every few seconds: a CPU that is shared is slower, whether or not a thread has to wait for it';
