-- Healthy runs that later runs of the same job class are compared with.

CREATE TABLE IF NOT EXISTS baselines
(
  class String COMMENT 'What runs must have in common to be compared: name without ids, ranks, mesh, GPU model, as JSON',
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 COMMENT 'Tracing session',
  profile String CODEC(ZSTD(6)) COMMENT 'What is compared of the run (argus.diagnose.read.profile.Profile), as JSON: it outlives the rows that it was read from',
  step_ns Float64 COMMENT 'Mean step time',
  step_error_ns Float64 COMMENT 'Standard error of it within the run; -1: unknown',
  steps UInt32 COMMENT 'Steps that it is the mean of',
  source LowCardinality(String) COMMENT 'healthy: a diagnosis of the finished run found nothing; set: argus baseline set',
  added DateTime64(3, 'UTC') COMMENT 'When it became a baseline',
  version UInt64 COMMENT 'Row version: the highest wins',
  removed UInt8 COMMENT '1: argus baseline rm took it out. It does not become one again by itself'
) ENGINE = ReplacingMergeTree(version) ORDER BY (class, job, run)
COMMENT 'Runs that are the reference of their job class';
