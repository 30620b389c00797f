-- Jobs, and the ranks that were traced in them.
--
-- How these files are written, all of them: plain ClickHouse SQL, one subject a file; CREATE TABLE IF NOT EXISTS and CREATE
-- OR REPLACE VIEW. A comment on each column is its documentation. What older stores lack is in upgrades/ (CONTRIBUTING.md).
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
  world_size UInt32 COMMENT 'Ranks of the whole job as the launcher reports; 0: unknown',
  launcher LowCardinality(String) COMMENT 'torchrun, openmpi, mvapich, pmi, slurm, kubernetes or unknown; of imported traces: kineto, nsys',
  mono_offset_ns Int64 COMMENT 'Wall time minus CLOCK_MONOTONIC on this host, fixed for the session',
  argus_version LowCardinality(String) COMMENT 'Version of Argus that wrote the run',
  version UInt64 COMMENT 'Row version: the highest wins',
  step_flops Float64 DEFAULT 0 COMMENT 'Floating-point operations of the model in a step, of all ranks, as the user gave them; 0: not given',
  peak_flops Float64 DEFAULT 0 COMMENT 'Floating-point operations a second that a GPU can do at most, as the user gave them; 0: not given',
  wall_error_ns Int64 DEFAULT -1 COMMENT 'By how much the host''s wall clock may have been off when tracing began, as its kernel reports (adjtimex: maxerror); -1: not known'
) ENGINE = ReplacingMergeTree(version) ORDER BY (job, run, host)
COMMENT 'One row per tracing session and host';

CREATE TABLE IF NOT EXISTS ranks
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 COMMENT 'Tracing session',
  rank UInt32 COMMENT 'Global rank; numbered in the order of first calls where no launcher variable gives it (see rank_source)',
  host LowCardinality(String) COMMENT 'Node',
  pid UInt32 COMMENT 'Process id on the host',
  local_rank Int32 COMMENT 'Rank inside the node; -1: unknown',
  rank_source LowCardinality(String) COMMENT 'Whose variable gave the rank: torchrun, openmpi, mvapich, pmi, slurm; order: guessed; parent: a child of the rank''s process; of imported traces: trace, file name',
  started DateTime64(3, 'UTC') COMMENT 'Start of the process',
  exe String COMMENT 'Executable',
  command String COMMENT 'Command line',
  libraries Array(String) COMMENT 'Libraries with probes',
  probes UInt32 COMMENT 'Probes attached',
  state LowCardinality(String) COMMENT 'traced, exited or imported',
  version UInt64 COMMENT 'Row version: the highest wins',
  uid Int64 DEFAULT -1 COMMENT 'User that the process runs as, as its host numbers users; -1: unknown',
  container String DEFAULT '' COMMENT 'What it runs in: its pod, Slurm''s job or PID namespace; empty: the host, or unknown'
) ENGINE = ReplacingMergeTree(version) ORDER BY (job, run, rank, host, pid)
COMMENT 'One row per traced process';

CREATE TABLE IF NOT EXISTS host_names
(
  run UInt32 COMMENT 'Tracing session that several nodes share (--run)',
  host LowCardinality(String) COMMENT 'Name that a node goes by',
  machine String COMMENT 'Digits of the node, which others of that name do not have',
  stored DateTime('UTC') DEFAULT now() COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = ReplacingMergeTree(stored) ORDER BY (run, host, machine)
TTL stored + {{ttl}}
COMMENT 'Which nodes go by a name: containers on several may have one, and the second to come gets another';
