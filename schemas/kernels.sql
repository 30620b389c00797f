-- Kernel durations, compressed: what a kernel usually looks like, and each step's deviations (docs/compression.md).

CREATE TABLE IF NOT EXISTS kernel_groups
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  kernel_id UInt64 CODEC(ZSTD(1)) COMMENT 'Hash of kernel, stream, grid and block: the same on every host and in every run',
  kernel String CODEC(ZSTD(1)) COMMENT 'Name without return type, parameters, anonymous namespaces and hashes of a build',
  name String CODEC(ZSTD(1)) COMMENT 'Name in full, as kernel_events.name has it',
  stream UInt32 CODEC(T64, ZSTD(1)) COMMENT 'CUPTI''s number of the stream',
  grid Array(UInt32) CODEC(ZSTD(1)) COMMENT 'Grid x, y, z; empty: of several grids and blocks that are not distinguished',
  block Array(UInt16) CODEC(ZSTD(1)) COMMENT 'Block x, y, z; empty: as grid'
) ENGINE = ReplacingMergeTree ORDER BY (job, run, kernel_id)
COMMENT 'Kernels, distinguished by name, stream, grid and block. Kept for good: rows of a run that lasts for months refer to them';

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
  escape_error Float32 CODEC(ZSTD(1)) COMMENT 'Rows whose codes are further from the histogram (W1 over the mean) are stored as histograms'
) ENGINE = ReplacingMergeTree ORDER BY (job, run, kernel_id, template)
COMMENT 'What the durations of a kernel usually look like on a host: kernel_summaries has deviations from it';

-- Codes: ZSTD(15) takes nine times as long as ZSTD(3), at each merge again, for a tenth of the bytes of a row.
CREATE TABLE IF NOT EXISTS kernel_summaries
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  rank UInt32 CODEC(Delta, ZSTD(3)) COMMENT 'Global rank',
  host LowCardinality(String) CODEC(ZSTD(3)) COMMENT 'Node',
  kernel_id UInt64 CODEC(ZSTD(3)) COMMENT 'As in kernel_groups',
  step UInt32 CODEC(Delta, ZSTD(3)) COMMENT 'Step number, as in iterations; from 2147483648 on: of no step, and the rest is the second of the trace',
  steps UInt16 CODEC(T64, ZSTD(3)) COMMENT 'Steps that the row covers, from step on',
  template UInt64 CODEC(ZSTD(3)) COMMENT 'As in kernel_templates',
  count UInt32 CODEC(T64, ZSTD(3)) COMMENT 'Launches, spikes included',
  total_ns Int64 CODEC(T64('bit'), ZSTD(3)) COMMENT 'Durations of those that are no spikes, added up, exactly',
  count_codes Array(Int8) CODEC(ZSTD(3)) COMMENT 'Of each cell of the template: how many more launches than usual, in roots: see docs/compression.md',
  mean_codes Array(Int8) CODEC(ZSTD(3)) COMMENT 'Of each cell: how much longer than usual, beyond the whole row',
  low UInt8 CODEC(ZSTD(3)) COMMENT 'The shortest is exp(low / 16) times shorter than the mean, within 4 %',
  high UInt8 CODEC(ZSTD(3)) COMMENT 'The longest but for spikes is exp(high / 16) times longer than the mean, within 4 %',
  trend Int8 CODEC(ZSTD(3)) COMMENT 'How much longer launches took in the second half of the step than in the first, in 1/100 nepers; 0: not more than chance has it',
  spikes UInt32 CODEC(T64, ZSTD(3)) COMMENT 'Launches that are in kernel_spikes',
  spike_sum UInt16 CODEC(ZSTD(3)) COMMENT 'Their durations added up: exp(spike_sum / 64) ns, within 0.8 %; kernel_spikes has them exactly',
  spike_max UInt16 CODEC(ZSTD(3)) COMMENT 'The longest of them, as spike_sum, if there are several; 0 otherwise',
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
  step UInt32 CODEC(Delta, ZSTD(3)) COMMENT 'Step number, as in iterations; from 2147483648 on: of no step, and the rest is the second of the trace',
  steps UInt16 CODEC(T64, ZSTD(3)) COMMENT 'Steps that the row covers, from step on',
  reason LowCardinality(String) CODEC(ZSTD(3)) COMMENT 'new (no template yet), shape (its codes would not be true enough), range (a code would be too large, or only spikes)',
  count UInt32 CODEC(T64, ZSTD(3)) COMMENT 'Launches, spikes included',
  total_ns Int64 CODEC(T64('bit'), ZSTD(3)) COMMENT 'Durations of those that are no spikes, added up, exactly',
  bins Array(UInt16) CODEC(Delta(2), ZSTD(6)) COMMENT 'Bins with launches: b holds exp(b / 64) up to exp((b + 1) / 64) ns, the first one 0 ns as well',
  counts Array(UInt32) CODEC(T64, ZSTD(6)) COMMENT 'Launches in each of them',
  trend Int8 CODEC(ZSTD(3)) COMMENT 'As in kernel_summaries',
  spikes UInt32 CODEC(T64, ZSTD(3)) COMMENT 'Launches that are in kernel_spikes',
  spike_sum UInt16 CODEC(ZSTD(3)) COMMENT 'Their durations added up: exp(spike_sum / 64) ns, within 0.8 %; kernel_spikes has them exactly',
  spike_max UInt16 CODEC(ZSTD(3)) COMMENT 'The longest of them, as spike_sum, if there are several; 0 otherwise',
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
  step UInt32 CODEC(Delta, ZSTD(3)) COMMENT 'Step number, as in iterations; from 2147483648 on: of no step, and the rest is the second of the trace',
  ts DateTime64(6, 'UTC') CODEC(Delta, ZSTD(3)) COMMENT 'When it began on the GPU, to the microsecond',
  duration_ns Int64 CODEC(T64, ZSTD(3)) COMMENT 'Time on the GPU',
  stored DateTime('UTC') DEFAULT toStartOfHour(now()) CODEC(Delta, ZSTD(1)) COMMENT 'Hour in which the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(stored) ORDER BY (job, run, kernel_id, rank, ts)
TTL stored + {{ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'Single launches that took more than three times the 99.9th percentile of their kernel';

-- Each step of a row has its share, of whole launches and nanoseconds, and the shares add up to the row. A filter on steps
-- then means the same whatever the rows cover. Filters on job, run, kernel_id and rank are applied before.
CREATE OR REPLACE VIEW kernel_times
AS SELECT
  job, run, rank, host, kernel_id, toUInt32(first + place) AS step, toUInt16(1) AS steps,
  toUInt32(intDiv(launched * (place + 1), covered) - intDiv(launched * place, covered)) AS launches,
  toInt64(intDiv(took_ns * toInt64(place + 1), toInt64(covered)) - intDiv(took_ns * toInt64(place), toInt64(covered))) AS spent_ns
FROM
(
  SELECT
    job, run, rank, host, kernel_id, step AS first, kernel_summaries.steps AS covered, toUInt64(count) AS launched,
    total_ns + if(spikes > 0, toInt64(round(exp(spike_sum / 64))), 0) AS took_ns
  FROM kernel_summaries
  UNION ALL
  SELECT
    job, run, rank, host, kernel_id, step AS first, kernel_escapes.steps AS covered, toUInt64(count) AS launched,
    total_ns + if(spikes > 0, toInt64(round(exp(spike_sum / 64))), 0) AS took_ns
  FROM kernel_escapes
)
ARRAY JOIN range(covered) AS place
COMMENT 'Launches and time of each kernel by rank and step, without what has to be decoded for kernel_stats. Of a row that covers several steps each has its share';

-- Names of kernels are joined before anything is decoded: a filter on them becomes one of kernel_id where rows are read
-- (a LEFT JOIN whose right side is filtered is an inner one, and that has a runtime filter).
-- [a, b][which] instead of if(): the arguments of if() are computed lazily, and what they share over and over.
CREATE OR REPLACE VIEW kernel_stats
AS SELECT
  job, run, rank, host, if(step < 2147483648, step, NULL) AS step_from, step_from + steps - 1 AS step_to, s.kernel AS kernel, s.stream AS stream,
  s.kernel_id AS kernel_id, count, total_ns + toInt64(round(spike_ns)) AS total_ns, (s.total_ns + spike_ns) / count AS mean_ns,
  toInt64(round([s.total_ns / n * exp(-low / 16), factor * exp((bins[1] + 0.5) / 64), spike_ns / spikes]
                [multiIf(n = 0, 3, escaped, 2, 1)])) AS min_ns,
  toInt64(round(p50)) AS p50_ns, toInt64(round(p90)) AS p90_ns, toInt64(round(p99)) AS p99_ns,
  toInt64(round([s.total_ns / n * exp(high / 16), factor * exp((bins[-1] + 0.5) / 64), spike_max_ns]
                [multiIf(spikes > 0, 3, escaped, 2, 1)])) AS max_ns,
  spikes, exp(trend / 100) AS trend,
  arrayMap(m -> (factor * arraySum((c, l, i) -> (i = m) * c * l, cells, levels, mode)
                   / greatest(arraySum((c, i) -> (i = m) * c, cells, mode), 1e-9),
                 arraySum((c, i) -> (i = m) * c, cells, mode) / n), arrayDistinct(mode)) AS modes,
  escaped
FROM
(
  SELECT *,
    [factor * levels[k50] / 8192 * (shape[16 * k50 - 15 + toUInt8(floor(x50))] * (1 - x50 + floor(x50))
       + shape[16 * k50 - 15 + toUInt8(ceil(x50))] * (x50 - floor(x50))),
     factor * exp((bins[k50] + f50) / 64), spike_ns / spikes][multiIf(r50 > n, 3, escaped, 2, 1)] AS p50,
    [factor * levels[k90] / 8192 * (shape[16 * k90 - 15 + toUInt8(floor(x90))] * (1 - x90 + floor(x90))
       + shape[16 * k90 - 15 + toUInt8(ceil(x90))] * (x90 - floor(x90))),
     factor * exp((bins[k90] + f90) / 64), spike_ns / spikes][multiIf(r90 > n, 3, escaped, 2, 1)] AS p90,
    [factor * levels[k99] / 8192 * (shape[16 * k99 - 15 + toUInt8(floor(x99))] * (1 - x99 + floor(x99))
       + shape[16 * k99 - 15 + toUInt8(ceil(x99))] * (x99 - floor(x99))),
     factor * exp((bins[k99] + f99) / 64), spike_ns / spikes][multiIf(r99 > n, 3, escaped, 2, 1)] AS p99
  FROM
  (
    SELECT *, least(greatest(f50 * 16 - 0.5, 0), 15) AS x50, least(greatest(f90 * 16 - 0.5, 0), 15) AS x90,
           least(greatest(f99 * 16 - 0.5, 0), 15) AS x99
    FROM
    (
      SELECT *,
        (r50 - upto[k50 - 1]) / (upto[k50] - upto[k50 - 1]) AS f50,
        (r90 - upto[k90 - 1]) / (upto[k90] - upto[k90 - 1]) AS f90,
        (r99 - upto[k99 - 1]) / (upto[k99] - upto[k99 - 1]) AS f99
      FROM
      (
        SELECT *, greatest(arrayFirstIndex(u -> u >= r50, upto), 1) AS k50,
               greatest(arrayFirstIndex(u -> u >= r90, upto), 1) AS k90,
               greatest(arrayFirstIndex(u -> u >= r99, upto), 1) AS k99
        FROM
        (
          SELECT *, 0.5 * count AS r50, 0.9 * count AS r90, 0.99 * count AS r99,
            total_ns / (arraySum((c, l) -> c * l, cells, levels)
              + arraySum((b, c) -> c * exp((b + 0.5) / 64), bins, counts)) AS factor,
            arrayCumSum(arrayConcat(cells, arrayMap(c -> toFloat64(c), counts))) AS upto
          FROM
          (
            SELECT *, arrayMap((other, i) -> [other * least(1, n / greatest(rest, 1e-9)), greatest(n - rest, 0)][1 + (i = heaviest)],
                               others, arrayEnumerate(others)) AS cells
            FROM
            (
              SELECT *, arraySum(others) AS rest FROM
              (
                SELECT s.*, t.heaviest AS heaviest, t.mode AS mode, t.shape AS shape,
                  arrayMap((code, usual, unit) -> usual * exp(code * unit), s.mean_codes, t.mean_ns, t.unit) AS levels,
                  arrayMap((code, share, i) -> (i != t.heaviest) * pow(greatest(sqrt(share * s.n) + 0.35 * code, 0), 2),
                           s.count_codes, t.share, arrayEnumerate(s.count_codes)) AS others
                FROM
                (
                  SELECT x.job AS job, x.run AS run, x.rank AS rank, x.host AS host, x.kernel_id AS kernel_id, x.step AS step, x.steps AS steps,
                         g.kernel AS kernel, g.stream AS stream, template, count, spikes, total_ns, count_codes,
                         mean_codes, low, high, trend, count - spikes AS n,
                         if(spikes > 0, exp(spike_sum / 64), 0) AS spike_ns,
                         if(spikes > 1, exp(spike_max / 64), spike_ns) AS spike_max_ns,
                         CAST([], 'Array(UInt16)') AS bins, CAST([], 'Array(UInt32)') AS counts, false AS escaped
                  FROM kernel_summaries AS x
                  LEFT JOIN
                  (
                    SELECT job, run, kernel_id, any(kernel_groups.kernel) AS kernel, any(kernel_groups.stream) AS stream
                    FROM kernel_groups GROUP BY job, run, kernel_id
                  ) AS g ON x.job = g.job AND x.run = g.run AND x.kernel_id = g.kernel_id
                  UNION ALL
                  SELECT x.job AS job, x.run AS run, x.rank AS rank, x.host AS host, x.kernel_id AS kernel_id, x.step AS step, x.steps AS steps,
                         g.kernel AS kernel, g.stream AS stream, 0, count, spikes, total_ns, [],
                         [], 0, 0, trend, count - spikes,
                         if(spikes > 0, exp(spike_sum / 64), 0) AS spike_ns,
                         if(spikes > 1, exp(spike_max / 64), spike_ns), bins, counts, true
                  FROM kernel_escapes AS x
                  LEFT JOIN
                  (
                    SELECT job, run, kernel_id, any(kernel_groups.kernel) AS kernel, any(kernel_groups.stream) AS stream
                    FROM kernel_groups GROUP BY job, run, kernel_id
                  ) AS g ON x.job = g.job AND x.run = g.run AND x.kernel_id = g.kernel_id
                ) AS s
                LEFT ANY JOIN kernel_templates AS t
                  ON s.job = t.job AND s.run = t.run AND s.kernel_id = t.kernel_id AND s.template = t.template
              )
            )
          )
        )
      )
    )
  )
) AS s
COMMENT 'Durations of each kernel by rank and step in plain columns, decoded from kernel_summaries and kernel_escapes. step_from NULL: of no step';
