-- What argus diagnose concluded, and how functions behave on each rank, as EROICA describes them.

CREATE TABLE IF NOT EXISTS findings
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 COMMENT 'Tracing session',
  created DateTime64(3, 'UTC') COMMENT 'When the diagnosis ran',
  status LowCardinality(String) COMMENT 'Verdict on the whole job: healthy, degraded, hung, inconclusive',
  kind LowCardinality(String) COMMENT 'Kind of finding; empty: the row only records the verdict',
  ranks Array(UInt32) COMMENT 'Ranks it concerns',
  hosts Array(String) COMMENT 'Nodes it concerns',
  step_from UInt32 COMMENT 'First step',
  step_to UInt32 COMMENT 'Last step',
  phase LowCardinality(String) COMMENT 'Phase it shows in',
  slowdown Float64 COMMENT 'Actual over ideal step time',
  share Float64 COMMENT 'Part of the lost time it explains',
  confidence Float64 COMMENT 'How sure, 0 to 1',
  evidence String COMMENT 'The finding as JSON, evidence and queries included',
  action String COMMENT 'What to do next'
) ENGINE = MergeTree ORDER BY (job, run, created)
SETTINGS non_replicated_deduplication_window = 1000
COMMENT 'What argus diagnose concluded';

CREATE OR REPLACE VIEW function_patterns
AS SELECT
  p.job AS job, p.run AS run, p.rank AS rank, p.kind AS kind, p.function AS function, p.spent_ns / s.span_ns AS beta,
  p.mu AS mu, p.sigma AS sigma
FROM
(
  SELECT job, run, rank, 'kernel' AS kind, g.kernel AS function, sum(spent) AS spent_ns, sum(best) / sum(spent) AS mu,
         stddevPop(best / spent) AS sigma
  FROM
  (
    SELECT job, run, rank, kernel_id, step, toFloat64(sum(spent_ns)) AS spent, sum(launches) AS times,
           least(times * min(sum(spent_ns) / sum(launches)) OVER (PARTITION BY job, run, kernel_id, step), spent) AS best
    FROM kernel_times WHERE launches > 0 AND spent_ns > 0 AND step < 2147483648
    GROUP BY job, run, rank, kernel_id, step
  ) AS k
  LEFT ANY JOIN kernel_groups AS g ON k.job = g.job AND k.run = g.run AND k.kernel_id = g.kernel_id
  WHERE g.kernel != '' AND NOT startsWith(g.kernel, 'nccl')
  GROUP BY job, run, rank, function
  UNION ALL
  SELECT job, run, rank, 'collective' AS kind, op AS function, toFloat64(sum(duration_ns)) AS spent_ns,
         sum(transfer_ns) / sum(duration_ns) AS mu, stddevPop(transfer_ns / duration_ns) AS sigma
  FROM collective_waits WHERE duration_ns > 0 AND op != ''
  GROUP BY job, run, rank, function
  UNION ALL
  SELECT job, run, rank, 'python' AS kind, k.python_function AS function, toFloat64(sum(ns)) AS spent_ns,
         sumIf(ns, t.kind = 'cpu') / spent_ns AS mu, 0 AS sigma
  FROM
  (
    SELECT job, run, rank, stack_id, kind, sum(ns) AS ns FROM stack_samples WHERE tid = pid
    GROUP BY job, run, rank, stack_id, kind
  ) AS t
  INNER JOIN (SELECT DISTINCT job, run, stack_id, python_function FROM stacks WHERE python_function != '') AS k
    ON t.job = k.job AND t.run = k.run AND t.stack_id = k.stack_id
  GROUP BY job, run, rank, function
) AS p
INNER JOIN
(
  SELECT job, run, rank, toFloat64(sum(duration_ns)) AS span_ns FROM iterations GROUP BY job, run, rank
) AS s ON p.job = s.job AND p.run = s.run AND p.rank = s.rank
WHERE beta > 0.01
COMMENT 'How each kernel, kind of collective and Python function that takes over 1 % of the time behaves on each rank (EROICA): beta is its share of the time of all steps; mu how well it uses what it runs on, 0 to 1 (a kernel: its speed over the fastest rank''s; a collective: the share that is no waiting; a Python function of the main thread: the share on a CPU); sigma the standard deviation of mu over steps';
