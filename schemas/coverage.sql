-- Argus schema, version 21: which signals of a rank were observed, from when on, and for what share of the time.

CREATE TABLE IF NOT EXISTS signal_coverage
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 COMMENT 'Tracing session',
  rank UInt32 COMMENT 'Global rank',
  host LowCardinality(String) COMMENT 'Node',
  signal LowCardinality(String) COMMENT 'What is observed: ranges (of PyTorch), nvtx, backward (the begin of each backward pass), launches (of kernels and graphs), calls (copies, waits for the GPU, allocations), collectives, products (matrix products and attention), stacks, off_cpu, gpu_times',
  ts DateTime64(9, 'UTC') COMMENT 'From when on; the state holds until the next row of this rank and signal',
  seen Float32 COMMENT 'Share of the time that is observed from then on: 1 throughout, 0 not at all, between: in windows',
  period_ns UInt64 COMMENT 'From the begin of one window to the next; 0: there are no windows',
  reason String COMMENT 'Why it is so, for people; empty: it is observed throughout, as was asked for',
  version UInt64 COMMENT 'Row version: the highest wins'
) ENGINE = ReplacingMergeTree(version) ORDER BY (job, run, rank, host, signal, ts)
COMMENT 'Since when, and for what share of the time, each signal of a rank was observed: silence counts only where seen is 1. A signal without a row has no source in that rank';
