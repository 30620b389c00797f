-- Argus schema, version 13: kernels' times by step where rows cover several steps.

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
