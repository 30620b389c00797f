-- Argus schema, version 7: kernel durations, compressed: what a kernel usually looks like, and each step's deviations.

CREATE TABLE IF NOT EXISTS kernel_groups
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  kernel_id UInt64 CODEC(ZSTD(1)) COMMENT 'Hash of kernel, stream, grid and block: the same on every host and in every run',
  kernel String CODEC(ZSTD(1)) COMMENT 'Name without return type, parameters, anonymous namespaces and hashes of a build',
  name String CODEC(ZSTD(1)) COMMENT 'Name in full, as kernel_events.name has it',
  stream UInt32 CODEC(T64, ZSTD(1)) COMMENT 'CUPTI''s number of the stream',
  grid Array(UInt32) CODEC(ZSTD(1)) COMMENT 'Grid x, y, z; empty: of several grids and blocks that are not told apart',
  block Array(UInt16) CODEC(ZSTD(1)) COMMENT 'Block x, y, z; empty: as grid',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = ReplacingMergeTree ORDER BY (job, run, kernel_id)
TTL stored + {{ttl}}
COMMENT 'Kernels, told apart by name, stream, grid and block';

CREATE TABLE IF NOT EXISTS kernel_templates
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  kernel_id UInt64 CODEC(ZSTD(1)) COMMENT 'As in kernel_groups',
  template UInt64 CODEC(ZSTD(1)) COMMENT 'Hash of its content: hosts have templates of their own, and their numbers do not meet',
  version UInt32 CODEC(T64, ZSTD(1)) COMMENT '1, 2, … of this kernel on one host: a kernel that no longer fits gets a new one',
  samples UInt64 CODEC(T64, ZSTD(1)) COMMENT 'Launches that it was made from',
  heaviest UInt8 CODEC(T64, ZSTD(1)) COMMENT 'The cell with most launches, from 1: its count is what the others leave',
  mode Array(UInt8) CODEC(ZSTD(6)) COMMENT 'Of each cell: the mode it is part of, from 0. Cells are in order of duration',
  share Array(Float32) CODEC(ZSTD(6)) COMMENT 'Of each cell: part of the launches',
  mean_ns Array(Float32) CODEC(ZSTD(6)) COMMENT 'Of each cell: mean duration',
  unit Array(Float32) CODEC(ZSTD(6)) COMMENT 'Of each cell: unit of its mean codes, nepers',
  shape Array(UInt16) CODEC(Delta(2), ZSTD(6)) COMMENT '16 for each cell: its quantiles (1/32, 3/32, …) over its mean, in 1/8192',
  spike_limit_ns Int64 CODEC(ZSTD(1)) COMMENT 'What takes longer is a spike: three times the 99.9th percentile',
  escape_error Float32 CODEC(ZSTD(1)) COMMENT 'Rows whose codes are further from the histogram (W1 over the mean) are stored as histograms',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = ReplacingMergeTree ORDER BY (job, run, kernel_id, template)
TTL stored + {{ttl}}
COMMENT 'What the durations of a kernel usually look like on a host: kernel_summaries has deviations from it';

CREATE TABLE IF NOT EXISTS kernel_summaries
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  rank UInt32 CODEC(Delta, ZSTD(3)) COMMENT 'Global rank',
  host LowCardinality(String) CODEC(ZSTD(3)) COMMENT 'Node',
  kernel_id UInt64 CODEC(ZSTD(3)) COMMENT 'As in kernel_groups',
  step UInt32 CODEC(Delta, ZSTD(3)) COMMENT 'Step number, as in iterations',
  steps UInt16 CODEC(T64, ZSTD(3)) COMMENT 'Steps that the row covers, from step on',
  template UInt64 CODEC(ZSTD(3)) COMMENT 'As in kernel_templates',
  n UInt32 CODEC(ZSTD(3)) COMMENT 'Launches, without spikes',
  total_ns Int64 CODEC(T64, ZSTD(3)) COMMENT 'Their durations added up, exactly',
  count_codes Array(Int8) CODEC(ZSTD(6)) COMMENT 'Of each cell of the template: how many more launches than usual, in roots: see docs/compression.md',
  mean_codes Array(Int8) CODEC(ZSTD(6)) COMMENT 'Of each cell: how much longer than usual, beyond the whole row',
  low UInt8 CODEC(ZSTD(3)) COMMENT 'The shortest is exp(low / 32) times shorter than the mean, within 2 %',
  high UInt8 CODEC(ZSTD(3)) COMMENT 'The longest but for spikes is exp(high / 32) times longer than the mean, within 2 %',
  trend Int8 CODEC(ZSTD(3)) COMMENT 'How much longer launches took in the second half of the step than in the first, in 1/100 nepers; 0: not more than chance has it',
  spikes UInt32 CODEC(T64, ZSTD(3)) COMMENT 'Launches that are in kernel_spikes',
  spike_ns Int64 CODEC(T64, ZSTD(3)) COMMENT 'Their durations added up',
  spike_max_ns Int64 CODEC(T64, ZSTD(3)) COMMENT 'The longest of them, if there are several; 0 otherwise',
  stored DateTime('UTC') DEFAULT toStartOfHour(now()) CODEC(Delta, ZSTD(1)) COMMENT 'Hour in which the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(stored) ORDER BY (job, run, kernel_id, rank, step)
TTL stored + {{ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'Durations of each kernel by rank and step, as deviations from its template; kernel_stats decodes them';

CREATE TABLE IF NOT EXISTS kernel_escapes
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  rank UInt32 CODEC(Delta, ZSTD(3)) COMMENT 'Global rank',
  host LowCardinality(String) CODEC(ZSTD(3)) COMMENT 'Node',
  kernel_id UInt64 CODEC(ZSTD(3)) COMMENT 'As in kernel_groups',
  step UInt32 CODEC(Delta, ZSTD(3)) COMMENT 'Step number, as in iterations',
  steps UInt16 CODEC(T64, ZSTD(3)) COMMENT 'Steps that the row covers, from step on',
  reason LowCardinality(String) CODEC(ZSTD(3)) COMMENT 'new (no template yet), shape (its codes would not be true enough), range (a code would be too large, or only spikes)',
  n UInt32 CODEC(T64, ZSTD(3)) COMMENT 'Launches, without spikes',
  total_ns Int64 CODEC(T64, ZSTD(3)) COMMENT 'Their durations added up, exactly',
  bins Array(UInt16) CODEC(Delta(2), ZSTD(6)) COMMENT 'Bins with launches: b holds exp(b / 64) up to exp((b + 1) / 64) ns, the first one 0 ns as well',
  counts Array(UInt32) CODEC(T64, ZSTD(6)) COMMENT 'Launches in each of them',
  trend Int8 CODEC(ZSTD(3)) COMMENT 'As in kernel_summaries',
  spikes UInt32 CODEC(T64, ZSTD(3)) COMMENT 'Launches that are in kernel_spikes',
  spike_ns Int64 CODEC(T64, ZSTD(3)) COMMENT 'Their durations added up',
  spike_max_ns Int64 CODEC(T64, ZSTD(3)) COMMENT 'The longest of them, if there are several; 0 otherwise',
  stored DateTime('UTC') DEFAULT toStartOfHour(now()) CODEC(Delta, ZSTD(1)) COMMENT 'Hour in which the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(stored) ORDER BY (job, run, kernel_id, rank, step)
TTL stored + {{ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'Durations of kernels that fit no template, by rank and step, as histograms. A launch is here or in kernel_summaries, never in both';

CREATE TABLE IF NOT EXISTS kernel_spikes
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  rank UInt32 CODEC(Delta, ZSTD(3)) COMMENT 'Global rank',
  host LowCardinality(String) CODEC(ZSTD(3)) COMMENT 'Node',
  kernel_id UInt64 CODEC(ZSTD(3)) COMMENT 'As in kernel_groups',
  step UInt32 CODEC(Delta, ZSTD(3)) COMMENT 'Step number, as in iterations',
  ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(3)) COMMENT 'When it began on the GPU',
  duration_ns Int64 CODEC(T64, ZSTD(3)) COMMENT 'Time on the GPU',
  stored DateTime('UTC') DEFAULT toStartOfHour(now()) CODEC(Delta, ZSTD(1)) COMMENT 'Hour in which the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(stored) ORDER BY (job, run, kernel_id, rank, ts)
TTL stored + {{ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'Single launches that took more than three times the 99.9th percentile of their kernel';

CREATE VIEW IF NOT EXISTS kernel_stats
AS WITH
  arrayMap((code, share, cell) -> if(cell = t.heaviest, 0, pow(greatest(sqrt(share * s.n) + 0.35 * code, 0), 2)),
           s.count_codes, t.share, arrayEnumerate(s.count_codes)) AS others,
  arraySum(others) AS rest,
  arrayMap((other, cell) -> if(cell = t.heaviest, greatest(s.n - rest, 0), if(rest > s.n, other * s.n / rest, other)),
           others, arrayEnumerate(others)) AS cells,
  arrayMap((code, mean, unit) -> mean * exp(code * unit), s.mean_codes, t.mean_ns, t.unit) AS levels,
  if(s.escaped, s.total_ns / arraySum((b, c) -> c * exp((b + 0.5) / 64), s.bins, s.counts),
     s.total_ns / arrayDotProduct(cells, levels)) AS factor,
  arrayCumSum(if(s.escaped, arrayMap(c -> toFloat64(c), s.counts), cells)) AS upto,
  arrayMap(q -> q * (s.n + s.spikes), [0.5, 0.9, 0.99]) AS ranks,
  arrayMap(r -> toUInt32(greatest(arrayFirstIndex(u -> u >= r, upto), 1)), ranks) AS found,
  arrayMap((r, k) -> (r - if(k > 1, upto[k - 1], 0)) / (upto[k] - if(k > 1, upto[k - 1], 0)), ranks, found) AS parts,
  arrayMap(f -> least(greatest(f * 16 - 0.5, 0), 15), parts) AS places,
  arrayMap((r, k, f, x) -> multiIf(
    r > s.n, s.spike_ns / s.spikes,
    s.escaped, factor * exp((s.bins[k] + f) / 64),
    factor * levels[k] / 8192 * (t.shape[16 * (k - 1) + 1 + toUInt32(floor(x))] * (1 - (x - floor(x)))
      + t.shape[16 * (k - 1) + 1 + toUInt32(ceil(x))] * (x - floor(x)))), ranks, found, parts, places) AS quantiles
SELECT
  s.job AS job, s.run AS run, s.rank AS rank, s.host AS host, s.step AS step_from, s.step + s.steps - 1 AS step_to,
  g.kernel AS kernel, g.stream AS stream, s.kernel_id AS kernel_id,
  s.n + s.spikes AS count, s.total_ns + s.spike_ns AS total_ns, (s.total_ns + s.spike_ns) / (s.n + s.spikes) AS mean_ns,
  toInt64(round(multiIf(s.n = 0, s.spike_ns / s.spikes, s.escaped, factor * exp((s.bins[1] + 0.5) / 64),
                        s.total_ns / s.n * exp(-s.low / 32)))) AS min_ns,
  toInt64(round(quantiles[1])) AS p50_ns, toInt64(round(quantiles[2])) AS p90_ns, toInt64(round(quantiles[3])) AS p99_ns,
  toInt64(round(multiIf(s.spikes > 1, s.spike_max_ns, s.spikes = 1, s.spike_ns,
                        s.escaped, factor * exp((s.bins[-1] + 0.5) / 64), s.total_ns / s.n * exp(s.high / 32)))) AS max_ns,
  s.spikes AS spikes, exp(s.trend / 100) AS trend,
  if(s.escaped, [], arrayMap(m -> (
       factor * arraySum((c, l, mode) -> if(mode = m, c * l, 0), cells, levels, t.mode)
         / greatest(arraySum((c, mode) -> if(mode = m, c, 0), cells, t.mode), 1e-9),
       arraySum((c, mode) -> if(mode = m, c, 0), cells, t.mode) / s.n), arrayDistinct(t.mode))) AS modes,
  s.escaped AS escaped
FROM
(
  SELECT job, run, rank, host, kernel_id, step, steps, template, n, total_ns, count_codes, mean_codes, low, high, trend,
         spikes, spike_ns, spike_max_ns, CAST([], 'Array(UInt16)') AS bins, CAST([], 'Array(UInt32)') AS counts, false AS escaped
  FROM kernel_summaries
  UNION ALL
  SELECT job, run, rank, host, kernel_id, step, steps, 0, n, total_ns, [], [], 0, 0, trend,
         spikes, spike_ns, spike_max_ns, bins, counts, true
  FROM kernel_escapes
) AS s
LEFT ANY JOIN kernel_templates AS t ON s.job = t.job AND s.run = t.run AND s.kernel_id = t.kernel_id AND s.template = t.template
LEFT ANY JOIN kernel_groups AS g ON s.job = g.job AND s.run = g.run AND s.kernel_id = g.kernel_id
COMMENT 'Durations of each kernel by rank and step in plain columns, decoded from kernel_summaries and kernel_escapes';
