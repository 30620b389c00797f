-- How fast matrix products and attention were, and how well a job uses its GPUs.

CREATE TABLE IF NOT EXISTS kernel_flops
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  rank UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Global rank',
  host LowCardinality(String) COMMENT 'Node',
  pid UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Process id',
  device UInt32 CODEC(T64, ZSTD(1)) COMMENT 'GPU, as the process numbers those it may use',
  step Int32 CODEC(Delta, ZSTD(1)) COMMENT 'Step in which the kernels were launched, as in iterations, the first of several of a running job; -1: outside every step',
  ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'When the first of the kernels began on the GPU',
  kind LowCardinality(String) COMMENT 'gemm or attention',
  operator LowCardinality(String) COMMENT 'What launched the kernels: PyTorch''s operator (aten::mm, aten::_scaled_dot_product_flash_attention, …), of running jobs cuBLAS''s function or PyTorch''s operator of attention; empty: kernels detected by their names, shapes not known',
  dtype LowCardinality(String) COMMENT 'Type of the elements of the first factor, or of the query: float, bfloat16, …; empty: not known',
  shape LowCardinality(String) COMMENT 'Of a product m x k x n, of products in a batch b x m x k x n, as the operator has them: cuBLAS''s matrices are by columns, so PyTorch''s n is its m; of attention batch x heads x queries x keys x size of a head, and causal; empty: not known',
  kernel LowCardinality(String) COMMENT 'The kernel of theirs that took longest, by its name',
  calls UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Operations',
  kernels UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Kernels that they launched',
  flops Float64 CODEC(ZSTD(1)) COMMENT 'Floating-point operations that these shapes take: 2mkn a product, two products a head of attention forward and five backward, half of it where it is causal; 0: not known',
  duration_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Time of these kernels on the GPU, what they copy and sum up on the way included',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires',
  steps UInt32 DEFAULT 1 COMMENT 'Steps that are summed up here: this one and those that follow; 0: outside every step'
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(ts) ORDER BY (job, run, step, rank, device, operator, shape)
TTL stored + {{ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'Floating-point operations and GPU time of matrix products and attention, by rank, step, operator and shape';

CREATE OR REPLACE VIEW achieved_flops
AS SELECT
  f.job AS job, f.run AS run, f.rank AS rank, f.kind AS kind, f.operator AS operator, f.dtype AS dtype, f.shape AS shape,
  f.kernel AS kernel, f.calls AS calls, f.flops AS flops, f.duration_ns AS duration_ns,
  f.flops / f.duration_ns * 1e9 AS flops_per_s,
  if(j.peak > 0, flops_per_s / j.peak, NULL) AS peak_share
FROM
(
  SELECT
    job, run, rank, kind, operator, dtype, shape, argMax(kernel_flops.kernel, kernel_flops.duration_ns) AS kernel,
    sum(kernel_flops.calls) AS calls, sum(kernel_flops.flops) AS flops, sum(kernel_flops.duration_ns) AS duration_ns
  FROM kernel_flops WHERE kernel_flops.flops > 0 GROUP BY job, run, rank, kind, operator, dtype, shape
) AS f
LEFT JOIN
(
  SELECT job, run, max(peak_flops) AS peak FROM jobs FINAL GROUP BY job, run
) AS j ON f.job = j.job AND f.run = j.run
WHERE duration_ns > 0
COMMENT 'FLOP/s that matrix products and attention achieved while their kernels ran, by rank, operator and shape, and what share of a GPU''s peak that is (NULL: --peak-tflops was not given)';

CREATE OR REPLACE VIEW counted_flops
AS SELECT
  f.job AS job, f.run AS run, f.rank AS rank, f.flops / f.counted AS step_flops, f.told_ns / (f.told_ns + f.untold_ns) AS told_share,
  i.step_ns AS step_ns, step_flops / i.step_ns * 1e9 AS flops_per_s, if(j.peak > 0, flops_per_s / j.peak, NULL) AS mfu
FROM
(
  SELECT job, run, rank, sum(flops) AS flops, sum(told_ns) AS told_ns, sum(untold_ns) AS untold_ns, sum(steps) AS counted
  FROM
  (
    SELECT
      job, run, rank, step, max(kernel_flops.steps) AS steps, sum(kernel_flops.flops) AS flops,
      sumIf(duration_ns, kernel_flops.flops > 0) AS told_ns, sumIf(duration_ns, kernel_flops.flops = 0) AS untold_ns
    FROM kernel_flops WHERE step >= 0 GROUP BY job, run, rank, step
  )
  GROUP BY job, run, rank HAVING flops > 0
) AS f
JOIN
(
  SELECT job, run, rank, avg(duration_ns) AS step_ns FROM iterations GROUP BY job, run, rank
) AS i ON f.job = i.job AND f.run = i.run AND f.rank = i.rank
LEFT JOIN
(
  SELECT job, run, max(peak_flops) AS peak FROM jobs FINAL GROUP BY job, run
) AS j ON f.job = j.job AND f.run = j.run
COMMENT 'Floating-point operations a step by rank, inferred from the shapes of matrix products and attention, and the share of such kernels'' time that they are of (told_share: below 1 it is a lower bound; of imported traces kernels of unknown shapes are not counted); mfu: model FLOPs utilisation, if --peak-tflops was given';

CREATE OR REPLACE VIEW utilization
AS SELECT
  i.job AS job, i.run AS run, i.step AS step, count() AS ranks, avg(i.duration_ns) AS duration_ns,
  any(j.work) / greatest(any(j.world), ranks) / duration_ns * 1e9 AS flops_per_gpu,
  flops_per_gpu / any(j.peak) AS mfu
FROM iterations AS i
JOIN
(
  SELECT job, run, max(step_flops) AS work, max(peak_flops) AS peak, max(world_size) AS world
  FROM jobs FINAL WHERE step_flops > 0 AND peak_flops > 0 GROUP BY job, run
) AS j ON i.job = j.job AND i.run = j.run
GROUP BY job, run, step
COMMENT 'Model FLOPs utilisation of each step, of jobs whose FLOPs a step and peak of a GPU were given (argus trace --step-flops, --peak-tflops)';
