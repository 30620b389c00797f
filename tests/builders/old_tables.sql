-- Tables that have changed since their versions made them, as those up to 25 made and altered them, and later ones made them
-- (old_stores.py): what later ones altered is in schemas/upgrades/. A table that changes gets the form here that it had before.

-- version 1
CREATE TABLE IF NOT EXISTS jobs
(
  job LowCardinality(String) COMMENT 'Job name: --job, or read from the launcher''s environment',
  run UInt32 COMMENT 'One tracing session of the job: Unix time of its start',
  host LowCardinality(String) COMMENT 'Node that was traced',
  started DateTime64(9, 'UTC') COMMENT 'When tracing began',
  ended Nullable(DateTime64(9, 'UTC')) COMMENT 'When tracing ended; NULL: still running, or Argus was killed',
  world_size UInt32 COMMENT 'Ranks of the whole job as the launcher says; 0: unknown',
  launcher LowCardinality(String) COMMENT 'torchrun, openmpi, mvapich, pmi, slurm, kubernetes or unknown',
  mono_offset_ns Int64 COMMENT 'Wall time minus CLOCK_MONOTONIC on this host, fixed for the session',
  argus_version LowCardinality(String) COMMENT 'Version of Argus that wrote the run',
  version UInt64 COMMENT 'Row version: the highest wins'
) ENGINE = ReplacingMergeTree(version) ORDER BY (job, run, host)
COMMENT 'One row per tracing session and host';
CREATE TABLE IF NOT EXISTS ranks
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 COMMENT 'Tracing session',
  rank UInt32 COMMENT 'Global rank; numbered in the order of first calls where no launcher variable tells it (see rank_source)',
  host LowCardinality(String) COMMENT 'Node',
  pid UInt32 COMMENT 'Process id on the host',
  local_rank Int32 COMMENT 'Rank inside the node; -1: unknown',
  rank_source LowCardinality(String) COMMENT 'Whose variable told the rank: torchrun, openmpi, mvapich, pmi, slurm; order: guessed; parent: a child of the rank''s process',
  started DateTime64(3, 'UTC') COMMENT 'Start of the process',
  exe String COMMENT 'Executable',
  command String COMMENT 'Command line',
  libraries Array(String) COMMENT 'Libraries with probes',
  probes UInt32 COMMENT 'Probes attached',
  state LowCardinality(String) COMMENT 'traced or exited',
  version UInt64 COMMENT 'Row version: the highest wins'
) ENGINE = ReplacingMergeTree(version) ORDER BY (job, run, rank, host, pid)
COMMENT 'One row per traced process';
CREATE TABLE IF NOT EXISTS iterations
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  rank UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Global rank',
  step UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Step number, the same on every rank, from 0 at the first whole step seen',
  host LowCardinality(String) COMMENT 'Node',
  ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'Start of the step on this rank',
  duration_ns UInt64 CODEC(T64, ZSTD(1)) COMMENT 'Length of the step on this rank',
  collectives UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Collective calls in the step',
  launches UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Kernel and graph launches in the step',
  method LowCardinality(String) COMMENT 'How the boundary was found: collectives, launches, imported',
  confidence Float32 CODEC(ZSTD(1)) COMMENT 'Share of calls that repeat exactly with the period, 0 to 1',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(ts) ORDER BY (job, run, step, rank)
TTL stored + {{ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'One row per rank and step';
CREATE TABLE IF NOT EXISTS collectives
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  rank UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Global rank',
  host LowCardinality(String) COMMENT 'Node',
  pid UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Process id',
  tid UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Thread id',
  comm UInt64 CODEC(ZSTD(1)) COMMENT 'Communicator handle in this process; join communicators for the group it belongs to',
  op LowCardinality(String) COMMENT 'AllReduce, AllGather, ReduceScatter, Broadcast, Reduce, AlltoAll, Gather, Scatter, Send, Recv, GroupStart, GroupEnd',
  seq UInt64 CODEC(Delta, ZSTD(1)) COMMENT 'Call number on this communicator in this process, from 0 when first seen; Send and Recv have their own',
  bytes UInt64 CODEC(ZSTD(1)) COMMENT 'count x size of dtype',
  count UInt64 CODEC(ZSTD(1)) COMMENT 'Elements, as passed to the call',
  dtype LowCardinality(String) COMMENT 'NCCL data type',
  redop LowCardinality(String) COMMENT 'Reduction: sum, prod, max, min, avg, custom; empty: none',
  peer Int32 CODEC(ZSTD(1)) COMMENT 'Root or peer rank inside the communicator; -1: none',
  stream UInt64 CODEC(ZSTD(1)) COMMENT 'CUDA stream handle',
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
  joined_by LowCardinality(String) COMMENT 'How the group was found: unique_id, split, traffic (guessed from equal call sequences), single',
  error String COMMENT 'Why the alignment is unknown; empty: known',
  version UInt64 COMMENT 'Row version: the highest wins'
) ENGINE = ReplacingMergeTree(version) ORDER BY (job, run, rank, comm)
COMMENT 'Which handles on which ranks are one communicator, and how their calls line up';
CREATE TABLE IF NOT EXISTS launches
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  rank UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Global rank',
  host LowCardinality(String) COMMENT 'Node',
  pid UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Process id',
  tid UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Thread id',
  call LowCardinality(String) COMMENT 'Function that was called, as the library exports it',
  kind LowCardinality(String) COMMENT 'kernel, graph, memcpy (_h2d, _d2h, _d2d where the direction is known), memset, sync, alloc, free, module',
  kernel LowCardinality(String) COMMENT 'Kernel name where known; empty: not a kernel; kernel@0x...: no name found',
  handle UInt64 CODEC(ZSTD(1)) COMMENT 'Kernel, graph, event, pointer or module handle, as the call has it',
  stream UInt64 CODEC(ZSTD(1)) COMMENT 'CUDA stream handle; 0: default stream',
  bytes UInt64 CODEC(ZSTD(1)) COMMENT 'Bytes copied, set or allocated',
  shared_bytes UInt64 CODEC(ZSTD(1)) COMMENT 'Dynamic shared memory of a kernel',
  grid Array(UInt32) CODEC(ZSTD(1)) COMMENT 'Grid x, y, z of a kernel; empty otherwise',
  block Array(UInt16) CODEC(ZSTD(1)) COMMENT 'Block x, y, z of a kernel; empty otherwise',
  ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'When the call was made',
  duration_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Time inside the call; -1: not measured',
  result Int32 CODEC(ZSTD(1)) COMMENT 'CUresult or cudaError_t; 0: success or not measured',
  in_nccl Bool COMMENT 'Made by NCCL itself',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(ts) ORDER BY (job, run, toStartOfMinute(ts), rank, ts)
TTL stored + {{raw_ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'One row per CUDA call, as seen on the CPU';
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
  comm_rank Int32 COMMENT 'Rank inside the communicator; -1: not told by the call',
  nranks Int32 COMMENT 'Size of the communicator; -1: not told by the call',
  color Int32 COMMENT 'Colour of a split; -1: none (NCCL_SPLIT_NOCOLOR)',
  key Int32 COMMENT 'Key of a split; excluded ranks of a shrink; -1: none',
  unique_id String COMMENT 'ncclUniqueId, 256 hexadecimal digits; empty: not told by the call',
  ts DateTime64(9, 'UTC') COMMENT 'When the call was made',
  duration_ns Int64 COMMENT 'Time inside the call; -1: not measured',
  result Int32 COMMENT 'ncclResult_t; 0: success',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMM(ts) ORDER BY (job, run, rank, ts)
TTL stored + {{ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'One row per call that makes, asks or ends a communicator';

-- version 3
CREATE TABLE IF NOT EXISTS kernel_events
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  rank UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Global rank',
  host LowCardinality(String) COMMENT 'Node',
  pid UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Process id',
  device UInt32 CODEC(T64, ZSTD(1)) COMMENT 'GPU, as the process numbers those it may use',
  context UInt32 CODEC(T64, ZSTD(1)) COMMENT 'CUPTI''s number of the CUDA context',
  stream UInt32 CODEC(T64, ZSTD(1)) COMMENT 'CUPTI''s number of the stream; not the handle that launches.stream has',
  kind LowCardinality(String) COMMENT 'kernel, memcpy (_h2d, _d2h, _d2d, _h2h, _p2p where known) or memset',
  name LowCardinality(String) COMMENT 'Kernel name in full, as launches.kernel has it; empty: not a kernel, or no name found',
  ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'When it began on the GPU',
  duration_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Time on the GPU',
  launch_ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'When the CPU began the call that launched it; 1970: not known',
  issue_latency_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'From the beginning of that call to ts; -1: not known',
  launch_tid UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Thread that launched it; 0: not known',
  launch_probed Bool COMMENT 'Whether launch_ts is exactly the ts of a row of launches (same rank and thread)',
  correlation UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'CUPTI''s number of the call that launched it: one for all kernels of a graph launch',
  graph UInt32 CODEC(T64, ZSTD(1)) COMMENT 'CUPTI''s number of the CUDA graph it is part of; 0: none',
  graph_node UInt64 CODEC(ZSTD(1)) COMMENT 'Node of that graph; 0: none',
  grid Array(UInt32) CODEC(ZSTD(1)) COMMENT 'Grid x, y, z of a kernel; empty otherwise',
  block Array(UInt16) CODEC(ZSTD(1)) COMMENT 'Block x, y, z of a kernel; empty otherwise',
  registers UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Registers of a thread of a kernel',
  shared_static UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Bytes of shared memory of a block that the kernel declares',
  shared_dynamic UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Bytes of shared memory of a block that the launch adds',
  bytes UInt64 CODEC(ZSTD(1)) COMMENT 'Bytes copied or set',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(ts) ORDER BY (job, run, rank, ts)
TTL stored + {{raw_ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'One row per kernel, copy and fill on a GPU, with the call that launched it';
CREATE TABLE IF NOT EXISTS gpu_host_events
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  rank UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Global rank',
  host LowCardinality(String) COMMENT 'Node',
  pid UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Process id',
  tid UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Thread id; 0: the record does not tell',
  kind LowCardinality(String) COMMENT 'synchronization, overhead, jit, module or marker',
  name LowCardinality(String) COMMENT 'Text of a marker, or which synchronization, overhead or compilation; empty: not known',
  code UInt32 CODEC(T64, ZSTD(1)) COMMENT 'CUPTI''s number for that; id of a module; flags of a marker (2: begins, 4: ends)',
  ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'When it began',
  duration_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'How long it took; 0: a marker; -1: not measured (a module), ts is when it was told',
  correlation UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'CUPTI''s number of the call it belongs to; 0: none',
  stream UInt32 CODEC(T64, ZSTD(1)) COMMENT 'CUPTI''s number of the stream',
  result Int32 CODEC(T64, ZSTD(1)) COMMENT 'Result of the call; 0: success',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(ts) ORDER BY (job, run, rank, ts)
TTL stored + {{raw_ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'What CUPTI saw on the CPU besides launches: waits, overhead of its own, compilations, modules, markers';

-- version 4
CREATE TABLE IF NOT EXISTS stack_samples
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  rank UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Global rank',
  host LowCardinality(String) COMMENT 'Node',
  pid UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Process id',
  tid UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Thread id; that of the main thread is the process id',
  thread LowCardinality(String) COMMENT 'Name of the thread; empty: not known',
  ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'First sample; off the CPU: when it first left it',
  last_ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'Last sample; off the CPU: when it last came back',
  kind LowCardinality(String) COMMENT 'cpu: samples of a running thread; off: times that it was off the CPU for long',
  reason LowCardinality(String) COMMENT 'Why it was off the CPU: gil, futex, poll, sleep, read, write, network, wait_child, disk, page_fault, runqueue (it could have run), driver, other:NAME; empty: a running thread',
  gil Bool COMMENT 'Held the GIL',
  gc Bool COMMENT 'Was collecting garbage',
  in_kernel Bool COMMENT 'A sample that hit the kernel, not the program',
  count UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Samples, or times off the CPU',
  ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Time: samples x sampling period (an estimate), or time off the CPU (measured)',
  runqueue_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Part of the time off the CPU in which it could have run, but no CPU was free; 0 for cpu',
  max_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Longest single time off the CPU; 0 for cpu',
  stack_id UInt64 CODEC(ZSTD(1)) COMMENT 'Row of stacks; 0: no stack was taken',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(ts) ORDER BY (job, run, rank, ts)
TTL stored + {{raw_ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'Where threads were: one row per thread, stack and window of some 100 ms';
CREATE TABLE IF NOT EXISTS thread_usage
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  rank UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Global rank',
  host LowCardinality(String) COMMENT 'Node',
  pid UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Process id',
  tid UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Thread id',
  thread LowCardinality(String) COMMENT 'Name of the thread; empty: not known',
  ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'Begin of the interval',
  interval_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Length of the interval',
  cpu_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Time on a CPU; -1: not known',
  runqueue_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Time in which it could have run, but no CPU was free; -1: not known',
  io_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Time in which it waited for a disk; -1: not known',
  voluntary Int64 CODEC(T64, ZSTD(1)) COMMENT 'Times it left the CPU to wait; -1: not known',
  involuntary Int64 CODEC(T64, ZSTD(1)) COMMENT 'Times it was taken from the CPU; -1: not known',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(ts) ORDER BY (job, run, rank, ts)
TTL stored + {{raw_ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'What the kernel says each thread did, exactly, about once a second';
ALTER TABLE stack_samples ADD INDEX IF NOT EXISTS last_ts_range last_ts TYPE minmax GRANULARITY 1;

-- version 5
CREATE TABLE IF NOT EXISTS parallel_groups
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 COMMENT 'Tracing session',
  host LowCardinality(String) COMMENT 'Node that saw these ranks',
  comm_group UInt64 COMMENT 'As in communicators',
  dimension LowCardinality(String) COMMENT 'What it is for: tp (tensor), cp (context), ep (expert), fsdp (sharded data), dp (data), pp (pipeline parallel), world (bookkeeping among all), unknown',
  ranks Array(UInt32) COMMENT 'Global ranks seen in it on this node',
  nranks Int32 COMMENT 'Ranks it has; -1: unknown',
  confidence Float32 COMMENT 'How sure the dimension is, 0 to 1',
  why String COMMENT 'What it was told from',
  version UInt64 COMMENT 'Row version: the highest wins',
  superseded UInt8 COMMENT '1: its ranks turned out to be of another group; FINAL leaves it out'
) ENGINE = ReplacingMergeTree(version, superseded) ORDER BY (job, run, host, comm_group)
COMMENT 'What each communicator is for, by what is sent in it: the mesh of the job';
CREATE TABLE IF NOT EXISTS gpu_phases
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  rank UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Global rank',
  host LowCardinality(String) COMMENT 'Node',
  pid UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Process id',
  device UInt32 CODEC(T64, ZSTD(1)) COMMENT 'GPU, as the process numbers those it may use',
  step UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Step number, as in iterations',
  ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'Start of the step on the GPU, as in gpu_steps',
  phase LowCardinality(String) COMMENT 'Kernels: forward, backward, optimizer, compute (not known which). Only NCCL ran: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, send_recv, communication (not known which), pipeline_bubble (waiting for who sends or receives). Only copies: memcpy, checkpoint. Nothing ran: data_loading, checkpoint, idle',
  duration_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Time of the GPU in this phase. The phases of a step add up to its duration in gpu_steps',
  overlapped_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Communication: time in which it went on while kernels computed, not in duration_ns; else 0',
  operations UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Kernels and copies of this phase that began in the step',
  method LowCardinality(String) COMMENT 'How most of it was found: records (the operations themselves), marks (launched in that part of PyTorch), names (of kernels), threads (launched by one that does backward passes only), order (launched between kernels whose names tell), calls (of the CPU)',
  confidence Float32 CODEC(ZSTD(1)) COMMENT 'How sure the phase is, 0 to 1',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(ts) ORDER BY (job, run, step, rank, device, phase)
TTL stored + {{ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'Where the GPU''s time of each step went, by rank';
ALTER TABLE jobs ADD COLUMN IF NOT EXISTS step_flops Float64 DEFAULT 0 COMMENT 'Floating-point operations of the model in a step, of all ranks, as the user gave them; 0: not given';
ALTER TABLE jobs ADD COLUMN IF NOT EXISTS peak_flops Float64 DEFAULT 0 COMMENT 'Floating-point operations a second that a GPU can do at most, as the user gave them; 0: not given';
ALTER TABLE iterations COMMENT COLUMN method 'How the boundary was found: collectives, launches, marks (end of the optimiser); of imported traces: annotations, repetition';
ALTER TABLE collectives COMMENT COLUMN comm 'Communicator (NCCL) or process group (PyTorch, gloo) handle in this process; join communicators for the group it belongs to';
ALTER TABLE collectives COMMENT COLUMN op 'AllReduce, AllGather, ReduceScatter, Broadcast, Reduce, AlltoAll, Gather, Scatter, Barrier, Send, Recv, GroupStart, GroupEnd';
ALTER TABLE collectives COMMENT COLUMN dtype 'Type of the elements, by its name in NCCL; unknown: not known, nor are bytes; empty: the call has none';
ALTER TABLE communicators COMMENT COLUMN joined_by 'How the group was found: unique_id, split, name (the process group told it), traffic (guessed from equal call sequences), single';
ALTER TABLE jobs COMMENT COLUMN launcher 'torchrun, openmpi, mvapich, pmi, slurm, kubernetes or unknown; of imported traces: kineto, nsys';
ALTER TABLE ranks COMMENT COLUMN rank_source 'Whose variable told the rank: torchrun, openmpi, mvapich, pmi, slurm; order: guessed; parent: a child of the rank''s process; of imported traces: trace, file name';
ALTER TABLE ranks COMMENT COLUMN state 'traced, exited or imported';

-- version 6
ALTER TABLE jobs ADD COLUMN IF NOT EXISTS wall_error_ns Int64 DEFAULT -1 COMMENT 'By how much the host''s wall clock may have been off when tracing began, as its kernel says (adjtimex: maxerror); -1: not known';

-- version 7
CREATE TABLE IF NOT EXISTS kernel_summaries
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  rank UInt32 CODEC(Delta, ZSTD(3)) COMMENT 'Global rank',
  host LowCardinality(String) CODEC(ZSTD(3)) COMMENT 'Node',
  kernel_id UInt64 CODEC(ZSTD(3)) COMMENT 'As in kernel_groups',
  step UInt32 CODEC(Delta, ZSTD(3)) COMMENT 'Step number, as in iterations; from 2147483648 on: of no step, and the rest is the second of the trace',
  steps UInt16 CODEC(T64, ZSTD(3)) COMMENT 'Steps that the row covers, from step on',
  template UInt64 CODEC(ZSTD(3)) COMMENT 'As in kernel_templates',
  count UInt32 CODEC(T64, ZSTD(3)) COMMENT 'Launches, spikes included',
  total_ns Int64 CODEC(T64('bit'), ZSTD(3)) COMMENT 'Durations of those that are no spikes, added up, exactly',
  count_codes Array(Int8) CODEC(ZSTD(15)) COMMENT 'Of each cell of the template: how many more launches than usual, in roots: see docs/compression.md',
  mean_codes Array(Int8) CODEC(ZSTD(15)) COMMENT 'Of each cell: how much longer than usual, beyond the whole row',
  low UInt8 CODEC(ZSTD(3)) COMMENT 'The shortest is exp(low / 16) times shorter than the mean, within 4 %',
  high UInt8 CODEC(ZSTD(3)) COMMENT 'The longest but for spikes is exp(high / 16) times longer than the mean, within 4 %',
  trend Int8 CODEC(ZSTD(3)) COMMENT 'How much longer launches took in the second half of the step than in the first, in 1/100 nepers; 0: not more than chance has it',
  spikes UInt32 CODEC(T64, ZSTD(3)) COMMENT 'Launches that are in kernel_spikes',
  spike_sum UInt16 CODEC(ZSTD(3)) COMMENT 'Their durations added up: exp(spike_sum / 64) ns, within 0.8 %; kernel_spikes has them exactly',
  spike_max UInt16 CODEC(ZSTD(3)) COMMENT 'The longest of them, as spike_sum, if there are several; 0 otherwise',
  stored DateTime('UTC') DEFAULT toStartOfHour(now()) CODEC(Delta, ZSTD(1)) COMMENT 'Hour in which the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(stored) ORDER BY (job, run, kernel_id, rank, step)
TTL stored + {{ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'Durations of each kernel by rank and step, as deviations from its template; kernel_stats decodes them';
CREATE TABLE IF NOT EXISTS kernel_groups
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  kernel_id UInt64 CODEC(ZSTD(1)) COMMENT 'Hash of kernel, stream, grid and block: the same on every host and in every run',
  kernel String CODEC(ZSTD(1)) COMMENT 'Name without return type, parameters, anonymous namespaces and hashes of a build',
  name String CODEC(ZSTD(1)) COMMENT 'Name in full, as kernel_events.name has it',
  stream UInt32 CODEC(T64, ZSTD(1)) COMMENT 'CUPTI''s number of the stream',
  grid Array(UInt32) CODEC(ZSTD(1)) COMMENT 'Grid x, y, z; empty: of several grids and blocks that are not told apart',
  block Array(UInt16) CODEC(ZSTD(1)) COMMENT 'Block x, y, z; empty: as grid'
) ENGINE = ReplacingMergeTree ORDER BY (job, run, kernel_id)
COMMENT 'Kernels, told apart by name, stream, grid and block. Kept for good: rows of a run that lasts for months refer to them';

-- version 8
CREATE TABLE IF NOT EXISTS phase_ops
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  rank UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Global rank',
  step UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Step number, as in iterations',
  host LowCardinality(String) COMMENT 'Node',
  stage UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Pipeline stage of the rank, from 0',
  dp_rank UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Data-parallel rank of the rank',
  op LowCardinality(String) COMMENT 'Type: forward-compute, backward-compute, forward-send, forward-recv, backward-send, backward-recv, params-all-gather, grads-reduce-scatter, layernorm-grads-all-reduce, embedding-grads-all-reduce, optimizer-clip-main-grad, optimizer, gc',
  seq UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Number among the operations of this type of the rank in the step, from 0',
  microbatch Int32 CODEC(Delta, ZSTD(1)) COMMENT 'Micro-batch; -1: of none, or not told',
  chunk Int32 CODEC(T64, ZSTD(1)) COMMENT 'Model chunk within the stage (interleaved schedules have several); -1: of none',
  global_chunk Int32 CODEC(T64, ZSTD(1)) COMMENT 'Model chunk within the model; -1: of none',
  ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'Begin. Within a step all ranks share a clock',
  ts_end DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'End, in the precision of the recording: one in single precision rounds begin + length',
  duration_ns UInt64 CODEC(T64, ZSTD(1)) COMMENT 'Length, with waiting for others where it is a communication',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(ts) ORDER BY (job, run, step, rank, op, seq)
TTL stored + {{ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'Computations, sends, receives and collectives of each step and rank, where a recording tells them';
CREATE TABLE IF NOT EXISTS parallel_layout
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 COMMENT 'Tracing session',
  dp UInt32 COMMENT 'Data-parallel ranks',
  pp UInt32 COMMENT 'Pipeline stages',
  tp UInt32 COMMENT 'Ranks that share a layer (tensor parallel)',
  sp UInt32 COMMENT 'Ranks that share a sequence of data (dsp_size): their gradients are reduced too',
  vpp UInt32 COMMENT 'Model chunks a stage has',
  world_size UInt32 COMMENT 'Ranks of the whole job; 0: not known',
  source LowCardinality(String) COMMENT 'What told it',
  version UInt64 COMMENT 'Row version: the highest wins'
) ENGINE = ReplacingMergeTree(version) ORDER BY (job, run)
COMMENT 'How a job is split over its ranks, where a recording tells it';

-- version 9
ALTER TABLE iterations MODIFY SETTING non_replicated_deduplication_window = 20000;

-- version 11
CREATE TABLE IF NOT EXISTS health
(
  host LowCardinality(String) COMMENT 'Node',
  ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'When the run of argus health began: the same in all rows of a run',
  kind LowCardinality(String) COMMENT 'Kind of node: GPUs, CPUs and memory, or what the settings say. Nodes of one kind are peers',
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

-- version 12
ALTER TABLE kernel_summaries MODIFY COLUMN count_codes CODEC(ZSTD(3));
ALTER TABLE kernel_summaries MODIFY COLUMN mean_codes CODEC(ZSTD(3));

-- version 15
CREATE TABLE IF NOT EXISTS gpu_collectives
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  rank UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Global rank',
  host LowCardinality(String) COMMENT 'Node',
  pid UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Process id',
  device UInt32 CODEC(T64, ZSTD(1)) COMMENT 'GPU, as the process numbers those it may use',
  step UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Step number, as in iterations',
  ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'Start of the step on the GPU, as in gpu_steps',
  comm UInt64 CODEC(ZSTD(1)) COMMENT 'Communicator handle in this process, as in communicators; 0: not known',
  op LowCardinality(String) COMMENT 'AllReduce, AllGather, ReduceScatter, AlltoAll, Broadcast, Reduce, SendRecv; empty: of NCCL, and not known which',
  peer Int32 CODEC(T64, ZSTD(1)) COMMENT 'Who was sent to or received from, or the root, as a rank of the communicator; -1: none; of calls in a group, of the last one',
  calls UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Kernels of NCCL that began in the step',
  bytes Int64 CODEC(T64, ZSTD(1)) COMMENT 'Payload of the calls that launched them; of calls in a group the last one''s',
  duration_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Their time on the GPU, waiting for others included',
  shortest_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'The shortest of them',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(ts) ORDER BY (job, run, step, rank, device, comm, op, peer)
TTL stored + {{ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'How long the GPUs were in the collectives of each communicator, by rank and step';

-- version 16
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
ALTER TABLE communicators COMMENT COLUMN joined_by 'How the group was found: unique_id, split, name (the process group told it), memory (NCCL''s own object told who is in it; how calls line up is concluded from them), traffic (guessed from equal call sequences), single';

-- version 18
ALTER TABLE launches MODIFY COLUMN shared_bytes CODEC(Delta, ZSTD(1));
ALTER TABLE launches MODIFY COLUMN grid CODEC(ZSTD(3));
ALTER TABLE launches MODIFY COLUMN block CODEC(ZSTD(3));
ALTER TABLE kernel_events MODIFY COLUMN grid CODEC(ZSTD(3));
ALTER TABLE kernel_events MODIFY COLUMN block CODEC(ZSTD(3));
ALTER TABLE collectives MODIFY COLUMN comm CODEC(Delta, ZSTD(1));
ALTER TABLE collectives MODIFY COLUMN seq CODEC(DoubleDelta, ZSTD(1));
ALTER TABLE collectives MODIFY COLUMN bytes CODEC(ZSTD(3));
ALTER TABLE collectives MODIFY COLUMN count CODEC(ZSTD(3));
ALTER TABLE collectives MODIFY COLUMN stream CODEC(ZSTD(3));
ALTER TABLE gpu_collectives MODIFY COLUMN comm CODEC(ZSTD(3));

-- version 19
ALTER TABLE kernel_flops ADD COLUMN IF NOT EXISTS steps UInt32 DEFAULT 1 COMMENT 'Steps that are summed up here: this one and those that follow; 0: outside every step';
ALTER TABLE kernel_flops COMMENT COLUMN step 'Step in which the kernels were launched, as in iterations, the first of several of a running job; -1: outside every step';
ALTER TABLE kernel_flops COMMENT COLUMN operator 'What launched the kernels: PyTorch''s operator (aten::mm, aten::_scaled_dot_product_flash_attention, …), of running jobs cuBLAS''s function; empty: kernels that are such by their names, and nothing tells their shapes';
ALTER TABLE kernel_flops COMMENT COLUMN dtype 'Type of the elements of the first factor, or of the query: float, bfloat16, …; empty: not known';
ALTER TABLE kernel_flops COMMENT COLUMN shape 'Of a product m x k x n, of products in a batch b x m x k x n, as the operator has them: cuBLAS''s matrices are by columns, so PyTorch''s n is its m; of attention batch x heads x queries x keys x size of a head, and causal; empty: not known';
ALTER TABLE kernel_flops COMMENT COLUMN flops 'Floating-point operations that these shapes take: 2mkn a product, two products a head of attention forward and five backward, half of it where it is causal; 0: not known';

-- version 20
ALTER TABLE kernel_flops COMMENT COLUMN operator 'What launched the kernels: PyTorch''s operator (aten::mm, aten::_scaled_dot_product_flash_attention, …), of running jobs cuBLAS''s function or PyTorch''s operator of attention; empty: kernels that are such by their names, and nothing tells their shapes';

-- version 23
ALTER TABLE ranks ADD COLUMN IF NOT EXISTS uid Int64 DEFAULT -1 COMMENT 'User that the process runs as, as its host numbers users; -1: unknown';
ALTER TABLE ranks ADD COLUMN IF NOT EXISTS container String DEFAULT '' COMMENT 'What it runs in: its pod, Slurm''s job or PID namespace; empty: the host, or unknown';
-- version 25
CREATE TABLE IF NOT EXISTS dumps
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 COMMENT 'The import',
  rank UInt32 COMMENT 'Global rank',
  host LowCardinality(String) COMMENT 'Node; unknown: the dump does not say',
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

-- version 27
CREATE TABLE IF NOT EXISTS environments
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 COMMENT 'Tracing session',
  rank UInt32 COMMENT 'Global rank',
  host LowCardinality(String) COMMENT 'Node',
  pid UInt32 COMMENT 'Process id on the host; 0: of an imported or simulated run',
  ts DateTime64(9, 'UTC') COMMENT 'When it was read',
  facts Map(LowCardinality(String), String) COMMENT 'By name: gpu.model, torch.version, env.NCCL_ALGO … (docs/sql.md lists them). unreadable: what could not be read; what is in neither is not set',
  digest UInt64 COMMENT 'The same wherever all facts are that must be alike on every rank; 0: nothing is known',
  version UInt64 COMMENT 'Row version: the highest wins',
  stored DateTime('UTC') DEFAULT now() COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = ReplacingMergeTree(version) ORDER BY (job, run, rank, host, pid)
TTL stored + {{ttl}}
COMMENT 'What each process of a run ran on and with: GPU, driver, libraries, kernel, CPUs, network cards, limits, settings';

-- version 28
-- Its new stores, and the last of version 27.
ALTER TABLE environments MODIFY COLUMN facts Map(String, String);
