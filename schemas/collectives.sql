-- NCCL's calls on the CPU, and the communicators they belong to.
--
-- There are two views of calls, one with a window function and one without. A condition on a view does not reach below a
-- window function: whoever asks for the calls of some seconds reads calls_aligned or calls_across, and those seconds alone.

-- Calls of several communicators take turns: hence the codecs of comm and seq (`scripts/bench codecs`).
CREATE TABLE IF NOT EXISTS collectives
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  rank UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Global rank',
  host LowCardinality(String) COMMENT 'Node',
  pid UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Process id',
  tid UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Thread id',
  comm UInt64 CODEC(Delta, ZSTD(1)) COMMENT 'Communicator (NCCL) or process group (PyTorch, gloo) handle in this process; join communicators for the group it belongs to',
  op LowCardinality(String) COMMENT 'AllReduce, AllGather, ReduceScatter, Broadcast, Reduce, AlltoAll, Gather, Scatter, Barrier, Send, Recv, GroupStart, GroupEnd',
  seq UInt64 CODEC(DoubleDelta, ZSTD(1)) COMMENT 'Call number on this communicator in this process, from 0 when first seen; Send and Recv have their own',
  bytes UInt64 CODEC(ZSTD(3)) COMMENT 'count x size of dtype',
  count UInt64 CODEC(ZSTD(3)) COMMENT 'Elements, as passed to the call',
  dtype LowCardinality(String) COMMENT 'Type of the elements, by its name in NCCL; unknown: not known, nor are bytes; empty: the call has none',
  redop LowCardinality(String) COMMENT 'Reduction: sum, prod, max, min, avg, custom; empty: none',
  peer Int32 CODEC(ZSTD(1)) COMMENT 'Root or peer rank inside the communicator; -1: none',
  stream UInt64 CODEC(ZSTD(3)) COMMENT 'CUDA stream handle',
  ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'When the call was made',
  duration_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Time inside the CPU call (not on the GPU); -1: not measured',
  result Int32 CODEC(ZSTD(1)) COMMENT 'ncclResult_t; 0: success',
  in_group Bool COMMENT 'Between ncclGroupStart and ncclGroupEnd',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(ts) ORDER BY (job, run, toStartOfMinute(ts), rank, ts)
TTL stored + {{ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'One row per NCCL call and rank, as seen on the CPU';

CREATE TABLE IF NOT EXISTS communicators
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 COMMENT 'Tracing session',
  rank UInt32 COMMENT 'Global rank',
  comm UInt64 COMMENT 'Communicator handle in this process',
  comm_group UInt64 COMMENT 'The same number on every rank of the communicator',
  comm_rank Int32 COMMENT 'Rank inside the communicator; -1: unknown (made before Argus attached)',
  nranks Int32 COMMENT 'Size of the communicator; -1: unknown',
  seq_offset Int64 COMMENT 'Add to collectives.seq to get a number that is the same on every rank of the group',
  joined_by LowCardinality(String) COMMENT 'How the group was found: unique_id, split, name (reported by the process group), memory (NCCL''s own object names its ranks; how calls line up is inferred from the calls), traffic (guessed from equal call sequences), single',
  error String COMMENT 'Why the alignment is unknown; empty: known',
  version UInt64 COMMENT 'Row version: the highest wins'
) ENGINE = ReplacingMergeTree(version) ORDER BY (job, run, rank, comm)
COMMENT 'Which handles on which ranks are one communicator, and how their calls line up';

CREATE TABLE IF NOT EXISTS communicator_calls
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 COMMENT 'Tracing session',
  rank UInt32 COMMENT 'Global rank',
  host LowCardinality(String) COMMENT 'Node',
  pid UInt32 COMMENT 'Process id',
  tid UInt32 COMMENT 'Thread id',
  call LowCardinality(String) COMMENT 'Function that was called: ncclCommInitRank, ncclCommSplit, ncclCommDestroy, ...',
  comm UInt64 COMMENT 'Communicator that was made, asked or ended; 0: none',
  parent UInt64 COMMENT 'Communicator it was split from; 0: none',
  comm_rank Int32 COMMENT 'Rank inside the communicator; -1: not known from the call',
  nranks Int32 COMMENT 'Size of the communicator; -1: not known from the call',
  color Int32 COMMENT 'Colour of a split; -1: none (NCCL_SPLIT_NOCOLOR)',
  key Int32 COMMENT 'Key of a split; excluded ranks of a shrink; -1: none',
  unique_id String COMMENT 'ncclUniqueId, 256 hexadecimal digits; empty: not known from the call',
  ts DateTime64(9, 'UTC') COMMENT 'When the call was made',
  duration_ns Int64 COMMENT 'Time inside the call; -1: not measured',
  result Int32 COMMENT 'ncclResult_t; 0: success',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMM(ts) ORDER BY (job, run, rank, ts)
TTL stored + {{ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'One row per call that makes, asks or ends a communicator';

CREATE OR REPLACE VIEW calls_aligned
AS SELECT
  c.job AS job, c.run AS run, c.rank AS rank, c.host AS host, c.pid AS pid, c.tid AS tid, c.comm AS comm, c.op AS op,
  c.seq AS seq, c.bytes AS bytes, c.count AS count, c.dtype AS dtype, c.redop AS redop, c.peer AS peer, c.stream AS stream,
  c.ts AS ts, c.duration_ns AS duration_ns, c.result AS result, c.in_group AS in_group,
  m.comm_group AS comm_group, m.comm_rank AS comm_rank, m.nranks AS nranks, m.joined_by AS joined_by,
  m.known AS aligned,
  if(aligned, toInt64(c.seq) + m.seq_offset, NULL) AS aligned_seq
FROM collectives AS c
LEFT JOIN
(
  SELECT job, run, rank, comm, comm_group, comm_rank, nranks, joined_by, seq_offset, error = '' AS known
  FROM communicators FINAL
) AS m ON c.job = m.job AND c.run = m.run AND c.rank = m.rank AND c.comm = m.comm
COMMENT 'collectives with their communicator: comm_group and aligned_seq name one call on all ranks';

CREATE OR REPLACE VIEW collectives_aligned
AS SELECT
  *,
  if(
    aligned AND op NOT IN ('Send', 'Recv', 'GroupStart', 'GroupEnd'),
    toUnixTimestamp64Nano(ts)
      - min(toUnixTimestamp64Nano(ts)) OVER (PARTITION BY job, run, comm_group, aligned_seq, op),
    NULL
  ) AS lateness_ns
FROM calls_aligned
COMMENT 'calls_aligned with lateness_ns: how much later than the first rank the call was made (NULL: alignment unknown, or not a collective of all ranks)';
