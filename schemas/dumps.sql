-- Dumps of PyTorch's flight recorder, which are imported: how far each rank's collectives had come.

CREATE TABLE IF NOT EXISTS dumps
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 COMMENT 'The import',
  rank UInt32 COMMENT 'Global rank',
  host LowCardinality(String) COMMENT 'Node; unknown: the dump does not name it',
  source LowCardinality(String) COMMENT 'flight-recorder or ras',
  path String COMMENT 'File; empty: there is no dump of this rank, which is in a process group of others',
  format LowCardinality(String) COMMENT 'Version of the format',
  library LowCardinality(String) COMMENT 'Version of NCCL; empty: not recorded',
  state LowCardinality(String) COMMENT 'dumped; absent: no dump; unresponsive, dead: as RAS has it',
  written DateTime64(9, 'UTC') COMMENT 'When the file was last written: not before the dump; 1970: no file',
  calls UInt32 COMMENT 'Calls in the dump',
  version UInt64 COMMENT 'Row version: the highest wins'
) ENGINE = ReplacingMergeTree(version) ORDER BY (job, run, rank)
COMMENT 'Which ranks were dumped, one row a rank';

CREATE TABLE IF NOT EXISTS dumped_groups
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 COMMENT 'The import',
  rank UInt32 COMMENT 'Global rank',
  comm_group UInt64 COMMENT 'Process group, as in communicators',
  name String COMMENT 'Its name',
  description String COMMENT 'What its maker calls it',
  enqueued Int64 COMMENT 'Number of the last call that was made; -1: none, or not recorded',
  started Int64 COMMENT 'Number of the last call that was seen to have started; -1: none, or not recorded',
  completed Int64 COMMENT 'Number of the last call that was seen to have completed; -1: none, or not recorded',
  transfers Bool COMMENT 'Sends and receives were made, too: the numbers are of either',
  version UInt64 COMMENT 'Row version: the highest wins'
) ENGINE = ReplacingMergeTree(version) ORDER BY (job, run, rank, comm_group)
COMMENT 'How far each rank had come in each of its process groups, one row a rank and group';

CREATE TABLE IF NOT EXISTS dumped_calls
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'The import',
  rank UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Global rank',
  comm_group UInt64 CODEC(ZSTD(1)) COMMENT 'Process group, as in communicators',
  record Int64 CODEC(Delta, ZSTD(1)) COMMENT 'Number of the call on this rank, in the order in which the CPU made them; -1: not recorded',
  name LowCardinality(String) COMMENT 'What PyTorch calls it',
  op LowCardinality(String) COMMENT 'As in collectives; Barrier, Coalesced',
  p2p Bool COMMENT 'A send or a receive',
  peer Int32 CODEC(T64, ZSTD(1)) COMMENT 'Global rank that is sent to or received from; -1: none, or not known',
  seq Int64 CODEC(Delta, ZSTD(1)) COMMENT 'Number of the collective in its process group, the same on all ranks; of a transfer, of the last collective before it',
  p2p_seq Int64 CODEC(Delta, ZSTD(1)) COMMENT 'Number of the transfer in its process group on this rank',
  state LowCardinality(String) COMMENT 'scheduled, started or completed. Started is seen only with TORCH_NCCL_ENABLE_TIMING=1',
  retired Bool COMMENT 'The watchdog no longer waits for it: it completed, or timed out',
  ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'When the CPU made the call; 1970: not recorded',
  started_ns Int64 CODEC(ZSTD(1)) COMMENT 'When it was seen to have started, ns since 1970; -1: not seen',
  completed_ns Int64 CODEC(ZSTD(1)) COMMENT 'When it was seen to have completed, ns since 1970; -1: not seen',
  timeout_ms Int64 CODEC(ZSTD(1)) COMMENT 'After how long the watchdog gives up; -1: not recorded',
  count UInt64 CODEC(ZSTD(1)) COMMENT 'Elements',
  dtype LowCardinality(String) COMMENT 'Data type',
  inputs String CODEC(ZSTD(1)) COMMENT 'Sizes of the tensors that go in: 8192x1x5120',
  outputs String CODEC(ZSTD(1)) COMMENT 'Sizes of the tensors that come out',
  frames Array(String) CODEC(ZSTD(1)) COMMENT 'Where the call was made, innermost first; empty: not recorded',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(stored) ORDER BY (job, run, rank, record)
TTL stored + {{ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'One row per call in a dump of a flight recorder';
