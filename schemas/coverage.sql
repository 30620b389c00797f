-- What was observed of a run, what was lost, and which signals each rank had.

CREATE TABLE IF NOT EXISTS coverage
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 COMMENT 'Tracing session',
  host LowCardinality(String) COMMENT 'Node',
  counter LowCardinality(String) COMMENT 'What was counted: every place that can drop, reject or guess has a name',
  value UInt64 COMMENT 'How many',
  loss Bool COMMENT 'Whether a value above 0 makes the coverage incomplete',
  ts DateTime64(3, 'UTC') COMMENT 'When it was read',
  version UInt64 COMMENT 'Row version: the highest wins'
) ENGINE = ReplacingMergeTree(version) ORDER BY (job, run, host, counter)
COMMENT 'What was seen, and what was lost: complete only if every loss counter is 0';

CREATE TABLE IF NOT EXISTS features
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 COMMENT 'Tracing session',
  rank UInt32 COMMENT 'Global rank',
  host LowCardinality(String) COMMENT 'Node',
  feature LowCardinality(String) COMMENT 'What could be observed or not: gpu_times',
  state LowCardinality(String) COMMENT 'on, waiting, off, ignored or failed',
  reason String COMMENT 'The state in words',
  version UInt64 COMMENT 'Row version: the highest wins'
) ENGINE = ReplacingMergeTree(version) ORDER BY (job, run, rank, host, feature)
COMMENT 'Which sources of data were there for a rank, and why not';

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
