-- Tables of versions before 26 that have changed since, as their versions made and altered them (old_stores.py). A table that
-- changes again gets the form here that it had before: from the version that made it, with what later ones altered.

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
ALTER TABLE stack_samples ADD INDEX IF NOT EXISTS last_ts_range last_ts TYPE minmax GRANULARITY 1;

-- version 5
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

-- version 9
ALTER TABLE iterations MODIFY SETTING non_replicated_deduplication_window = 20000;

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
