-- Argus schema, version 12: kernels' durations of jobs of thousands of ranks.

-- ZSTD(15) takes nine times as long as ZSTD(3), at each merge again, for a tenth of the bytes of a row.
ALTER TABLE kernel_summaries MODIFY COLUMN count_codes CODEC(ZSTD(3));
ALTER TABLE kernel_summaries MODIFY COLUMN mean_codes CODEC(ZSTD(3));

-- As before, but names of kernels are joined before anything is decoded: a filter on them becomes one of kernel_id where rows
-- are read (a LEFT JOIN whose right side is filtered is an inner one, and that has a runtime filter).
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
