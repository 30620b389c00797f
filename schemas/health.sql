-- Results of argus health. They belong to nodes, not to jobs.

CREATE TABLE IF NOT EXISTS health
(
  host LowCardinality(String) COMMENT 'Node',
  ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'When the run of argus health began: the same in all rows of a run',
  kind LowCardinality(String) COMMENT 'Kind of node: GPUs, CPUs and memory, or as the settings name it. Nodes of one kind are peers',
  check LowCardinality(String) COMMENT 'Name of the check; argus is the run itself, with the worst status of all',
  status LowCardinality(String) COMMENT 'ok, warning, critical, unknown (could not look) or absent (nothing of the kind here)',
  text String COMMENT 'What was found',
  hint String COMMENT 'What to do',
  facts Map(String, String) COMMENT 'Versions and settings by name, to be alike on nodes of one kind',
  duration_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'How long the check took',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree ORDER BY (host, check, ts)
TTL stored + {{ttl}}
SETTINGS non_replicated_deduplication_window = 1000
COMMENT 'Results of argus health: a row for each node, run and check';

CREATE TABLE IF NOT EXISTS health_figures
(
  host LowCardinality(String) COMMENT 'Node',
  ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'When the run of argus health began',
  kind LowCardinality(String) COMMENT 'Kind of node, as in health',
  check LowCardinality(String) COMMENT 'Name of the check',
  figure LowCardinality(String) COMMENT 'What was measured; its name ends in its unit, or in _total for what only counts up while the node runs',
  device LowCardinality(String) COMMENT 'Which of the node''s devices: gpu3, eth0, /scratch; empty: the node',
  value Float64 CODEC(ZSTD(1)) COMMENT 'The number',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree ORDER BY (check, figure, host, device, ts)
TTL stored + {{ttl}}
SETTINGS non_replicated_deduplication_window = 1000
COMMENT 'Numbers that checks of argus health measured: a row for each node, run, figure and device';
