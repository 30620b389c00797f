-- Stores before version 9: what they have of iterations, summed up in the rollup that keeps itself up from then on. What was
-- there before and what comes after differ by the second: upgrade while nothing is traced. Under a token: it is done once,
-- however often this is.

INSERT INTO iteration_rollup
SELECT
  job, run, step, count() AS n, sum(duration_ns) AS sum_ns, min(duration_ns) AS min_ns, max(duration_ns) AS max_ns,
  min(ts) AS first_ts, max(ts) AS last_ts,
  quantilesTDigestState(0.5, 0.95, 0.99)(duration_ns) AS quantiles, argMaxState(rank, duration_ns) AS slowest,
  max(iterations.stored) AS stored
FROM iterations
WHERE iterations.stored < (SELECT if(count() = 0, now(), least(now(), min(r.stored))) FROM iteration_rollup AS r)
GROUP BY job, run, step
ORDER BY job, run, step
SETTINGS max_threads = 1, max_block_size = 1048576, insert_deduplication_token = 'argus-009-backfill';
