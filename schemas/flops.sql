-- Argus schema, version 16: how fast matrix products and attention were, where recordings tell the shapes of their inputs.

CREATE TABLE IF NOT EXISTS kernel_flops
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  rank UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Global rank',
  host LowCardinality(String) COMMENT 'Node',
  pid UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Process id',
  device UInt32 CODEC(T64, ZSTD(1)) COMMENT 'GPU, as the process numbers those it may use',
  step Int32 CODEC(Delta, ZSTD(1)) COMMENT 'Step in which the kernels were launched, as in iterations; -1: outside every step',
  ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'When the first of the kernels began on the GPU',
  kind LowCardinality(String) COMMENT 'gemm or attention',
  operator LowCardinality(String) COMMENT 'PyTorch''s operator that launched the kernels: aten::mm, aten::_scaled_dot_product_flash_attention, …',
  dtype LowCardinality(String) COMMENT 'Type of the elements of the first factor, or of the query: float, bfloat16, …; empty: not recorded',
  shape LowCardinality(String) COMMENT 'Of a product m x k x n, of products in a batch b x m x k x n; of attention batch x heads x queries x keys x size of a head, and causal',
  kernel LowCardinality(String) COMMENT 'The kernel of theirs that took longest, by its name',
  calls UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Operations',
  kernels UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Kernels that they launched',
  flops Float64 CODEC(ZSTD(1)) COMMENT 'Floating-point operations that these shapes take: 2mkn a product, two products a head of attention forward and five backward, half of it where it is causal',
  duration_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Time of these kernels on the GPU, what they copy and sum up on the way included',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(ts) ORDER BY (job, run, step, rank, device, operator, shape)
TTL stored + {{ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'Floating-point operations and GPU time of matrix products and attention, by rank, step, operator and shape';

CREATE VIEW IF NOT EXISTS achieved_flops
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
  FROM kernel_flops GROUP BY job, run, rank, kind, operator, dtype, shape
) AS f
LEFT JOIN
(
  SELECT job, run, max(peak_flops) AS peak FROM jobs FINAL GROUP BY job, run
) AS j ON f.job = j.job AND f.run = j.run
WHERE duration_ns > 0
COMMENT 'FLOP/s that matrix products and attention achieved while their kernels ran, by rank, operator and shape, and what share of a GPU''s peak that is (NULL: --peak-tflops was not given)';

ALTER TABLE communicators COMMENT COLUMN joined_by 'How the group was found: unique_id, split, name (the process group told it), memory (NCCL''s own object told who is in it; how calls line up is concluded from them), traffic (guessed from equal call sequences), single';
