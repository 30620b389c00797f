-- Steps of each rank, and their sums over the ranks.

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
  method LowCardinality(String) COMMENT 'How the boundary was found: collectives, launches, marks (end of the optimiser); of imported traces: annotations, repetition',
  confidence Float32 CODEC(ZSTD(1)) COMMENT 'Share of calls that repeat exactly with the period, 0 to 1',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(ts) ORDER BY (job, run, step, rank)
TTL stored + {{ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 20000
COMMENT 'One row per rank and step';

-- Sums that a materialised view keeps up as rows come in: they answer in milliseconds what would otherwise read every row of
-- every rank. Base and rollup are two inserts: a retry under the same token repairs the second one where the first had been
-- done when the engine was killed (docs/store.md). Both windows are wide, since a retry may come after many other writers' blocks.
CREATE TABLE IF NOT EXISTS iteration_rollup
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  step UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Step number, as the hosts have it (iterations.step)',
  n SimpleAggregateFunction(sum, UInt64) CODEC(T64, ZSTD(1)) COMMENT 'Rows of iterations: ranks whose step is stored. Add up',
  sum_ns SimpleAggregateFunction(sum, UInt64) CODEC(T64, ZSTD(1)) COMMENT 'Sum of duration_ns. Add up',
  min_ns SimpleAggregateFunction(min, UInt64) CODEC(T64, ZSTD(1)) COMMENT 'Shortest duration_ns. Take the minimum',
  max_ns SimpleAggregateFunction(max, UInt64) CODEC(T64, ZSTD(1)) COMMENT 'Longest duration_ns. Take the maximum',
  first_ts SimpleAggregateFunction(min, DateTime64(9, 'UTC')) CODEC(Delta, ZSTD(1)) COMMENT 'When the first rank began. Take the minimum',
  last_ts SimpleAggregateFunction(max, DateTime64(9, 'UTC')) CODEC(Delta, ZSTD(1)) COMMENT 'When the last rank began. Take the maximum',
  quantiles AggregateFunction(quantilesTDigest(0.5, 0.95, 0.99), UInt64) CODEC(ZSTD(1)) COMMENT 'Median, 95th and 99th percentile of duration_ns (t-digest): quantilesTDigestMerge(0.5, 0.95, 0.99)(quantiles)',
  slowest AggregateFunction(argMax, UInt32, UInt64) CODEC(ZSTD(1)) COMMENT 'Rank with the longest duration_ns: argMaxMerge(slowest)',
  stored SimpleAggregateFunction(max, DateTime('UTC')) CODEC(Delta, ZSTD(1)) COMMENT 'When a row of the step was stored last: its age decides when it expires'
) ENGINE = AggregatingMergeTree ORDER BY (job, run, step)
TTL stored + {{ttl}}
SETTINGS non_replicated_deduplication_window = 20000
COMMENT 'A few rows per step (merged in the background into one): aggregate over them, or read the view step_times';

CREATE MATERIALIZED VIEW IF NOT EXISTS iteration_rollup_feed TO iteration_rollup
AS SELECT
  job, run, step, count() AS n, sum(duration_ns) AS sum_ns, min(duration_ns) AS min_ns, max(duration_ns) AS max_ns,
  min(ts) AS first_ts, max(ts) AS last_ts,
  quantilesTDigestState(0.5, 0.95, 0.99)(duration_ns) AS quantiles, argMaxState(rank, duration_ns) AS slowest,
  max(iterations.stored) AS stored
FROM iterations
GROUP BY job, run, step;

CREATE OR REPLACE VIEW step_times
AS SELECT
  job, run, step, sum(n) AS ranks, sum(sum_ns) / ranks AS mean_ns,
  arrayElement(quantilesTDigestMerge(0.5, 0.95, 0.99)(quantiles) AS q, 1) AS median_ns, q[2] AS p95_ns, q[3] AS p99_ns,
  min(min_ns) AS shortest_ns, max(max_ns) AS slowest_ns, argMaxMerge(slowest) AS slowest_rank,
  min(iteration_rollup.first_ts) AS first_ts, max(iteration_rollup.last_ts) AS last_ts
FROM iteration_rollup
GROUP BY job, run, step
COMMENT 'How long each step took over all ranks, from iteration_rollup: a thousandth of the rows of iterations in large jobs. Percentiles are approximate (t-digest). Where the hosts of a job number steps differently, use iterations_across';
