-- Argus schema, version 5: phases and GPU time of a step, parallel groups, and collectives of PyTorch's gloo.

CREATE TABLE IF NOT EXISTS phases
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  rank UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Global rank',
  step UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Step number, as in iterations',
  host LowCardinality(String) COMMENT 'Node',
  ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'Start of the step on this rank',
  phase LowCardinality(String) COMMENT 'What the thread that trains did: data_loading, forward, backward, communication (it waited for it), optimizer, other',
  duration_ns UInt64 CODEC(T64, ZSTD(1)) COMMENT 'Time of that thread in this phase. The phases of a step add up to the step',
  overlapped_ns UInt64 CODEC(T64, ZSTD(1)) COMMENT 'communication: time in which it went on while the thread did something else; else 0',
  spans UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Separate stretches of time that it consists of',
  method LowCardinality(String) COMMENT 'How most of it was found: marks (begin and end were seen), between_marks (it lies between two that were), remainder',
  confidence Float32 CODEC(ZSTD(1)) COMMENT 'How sure the phase is, 0 to 1',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(ts) ORDER BY (job, run, step, rank, phase)
TTL stored + {{ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'Where the time of each step went, by rank, as its training thread on the CPU saw it';

CREATE VIEW IF NOT EXISTS slow_phases
AS SELECT
  job, run, rank, node, phase, steps, typical_ns, usual_ns, toInt64(typical_ns) - toInt64(usual_ns) AS excess_ns
FROM
(
  SELECT *, quantileExactLow(0.5)(typical_ns) OVER (PARTITION BY job, run, phase) AS usual_ns
  FROM
  (
    SELECT job, run, rank, any(host) AS node, phase, count() AS steps, quantileExact(0.5)(duration_ns) AS typical_ns
    FROM phases GROUP BY job, run, rank, phase
  )
)
COMMENT 'Typical time of each phase on each rank (median over the steps that have it), what is usual among the ranks (their lower median), and the excess';

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

CREATE TABLE IF NOT EXISTS gpu_steps
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  rank UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Global rank',
  host LowCardinality(String) COMMENT 'Node',
  pid UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Process id',
  device UInt32 CODEC(T64, ZSTD(1)) COMMENT 'GPU, as the process numbers those it may use',
  step UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Step number, as in iterations',
  ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'When the step before it was over on the GPU',
  duration_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Until all that was launched up to the end of the step on the CPU had ended',
  busy_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Time in which at least one kernel, copy or fill of the rank ran',
  compute_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Time in which at least one kernel ran that is not NCCL''s',
  communication_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Time in which at least one kernel of NCCL ran',
  exposed_communication_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Part of communication_ns in which no other kernel ran',
  overlapped_communication_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Part of communication_ns in which another kernel ran as well',
  memcpy_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'Time in which at least one copy or fill ran',
  idle_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'duration_ns without busy_ns',
  idle_gaps UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Stretches of idle time of 1 us or more',
  largest_gap_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'The longest of them, as far as it lies in the step',
  kernels UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Kernels that began in the step',
  queue_depth_mean Float32 CODEC(ZSTD(1)) COMMENT 'Operations that were launched and had not begun, averaged over time; -1: launches are not known',
  queue_depth_max Int32 CODEC(T64, ZSTD(1)) COMMENT 'The most of them at once; -1: launches are not known',
  issue_latency_p50_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'From the call to the begin on the GPU, median of the kernels that began in the step; -1: not known',
  issue_latency_p99_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'The same, 99th percentile; -1: not known',
  void_share Float32 CODEC(ZSTD(1)) COMMENT 'idle_ns / duration_ns: share of the step in which nothing ran (the void percentage of Flare)',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(ts) ORDER BY (job, run, step, rank, device)
TTL stored + {{ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'What the GPU did in each step of each rank';

ALTER TABLE jobs ADD COLUMN IF NOT EXISTS step_flops Float64 DEFAULT 0 COMMENT 'Floating-point operations of the model in a step, of all ranks, as the user gave them; 0: not given';
ALTER TABLE jobs ADD COLUMN IF NOT EXISTS peak_flops Float64 DEFAULT 0 COMMENT 'Floating-point operations a second that a GPU can do at most, as the user gave them; 0: not given';
CREATE VIEW IF NOT EXISTS slow_gpu_phases
AS SELECT
  job, run, rank, device, node, phase, steps, typical_ns, usual_ns, toInt64(typical_ns) - toInt64(usual_ns) AS excess_ns,
  surest
FROM
(
  SELECT *, quantileExactLow(0.5)(typical_ns) OVER (PARTITION BY job, run, phase) AS usual_ns
  FROM
  (
    SELECT
      job, run, rank, device, any(host) AS node, phase, count() AS steps, quantileExact(0.5)(duration_ns) AS typical_ns,
      quantileExact(0.5)(confidence) AS surest
    FROM gpu_phases GROUP BY job, run, rank, device, phase
  )
)
COMMENT 'Typical time of each phase on each GPU (median over the steps that have it), what is usual among the GPUs (their lower median), the excess, and how sure the phase is (median)';

CREATE VIEW IF NOT EXISTS collective_bandwidth
AS SELECT
  c.job AS job, c.run AS run, m.comm_group AS comm_group, toInt64(c.last_seq) + m.seq_offset AS aligned_seq, c.op AS op,
  max(c.calls) AS calls, max(c.sent) AS bytes, greatest(max(m.nranks), toInt32(uniqExact(c.rank))) AS nranks,
  uniqExact(c.rank) AS seen, min(c.ts) AS ts, min(c.gpu_ns) AS transfer_ns, max(c.gpu_ns) - min(c.gpu_ns) AS waited_ns,
  argMin(c.rank, c.gpu_ns) AS last_rank,
  if(max(m.nranks) > 0 OR seen > 1, bytes * multiIf(
    op = 'AllReduce', 2 * (nranks - 1) / nranks,
    op IN ('AllGather', 'ReduceScatter', 'AlltoAll', 'Gather', 'Scatter'), nranks - 1,
    1
  ) / transfer_ns, NULL) AS bus_gb_s
FROM
(
  SELECT
    k.job AS job, k.run AS run, k.rank AS rank, k.duration_ns AS gpu_ns, b.op AS op, b.comm AS comm, b.calls AS calls,
    b.sent AS sent, b.last_seq AS last_seq, b.ts AS ts
  FROM
  (
    SELECT job, run, rank, launch_tid AS tid, launch_ts, duration_ns FROM kernel_events
    WHERE kind = 'kernel' AND match(name, '^(void )?nccl(Symk)?(Dev)?Kernel') AND issue_latency_ns >= 0
      AND graph = 0
  ) AS k
  ASOF JOIN
  (
    SELECT
      job, run, rank, tid, min(at) AS ts, anyLastIf(what, real) AS op, anyLastIf(handle, real) AS comm,
      countIf(real) AS calls, sum(bytes) AS sent, maxIf(seq, real) AS last_seq, uniqExactIf((handle, what), real) AS kinds
    FROM
    (
      SELECT
        job, run, rank, tid, ts AS at, op AS what, comm AS handle, bytes, seq,
        op NOT IN ('GroupStart', 'GroupEnd') AS real,
        sum(NOT in_group OR (op = 'GroupStart' AND depth = 1)) OVER
          (PARTITION BY job, run, rank, tid ORDER BY ts ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS together
      FROM
      (
        SELECT *, sum((op = 'GroupStart') - (op = 'GroupEnd')) OVER
          (PARTITION BY job, run, rank, tid ORDER BY ts ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS depth
        FROM collectives
      )
    )
    GROUP BY job, run, rank, tid, together
    HAVING calls > 0
  ) AS b ON k.job = b.job AND k.run = b.run AND k.rank = b.rank AND k.tid = b.tid AND k.launch_ts >= b.ts
  WHERE b.kinds = 1 AND b.op NOT IN ('Send', 'Recv')
) AS c
JOIN
(
  SELECT job, run, rank, comm, comm_group, nranks, seq_offset FROM communicators FINAL WHERE error = ''
) AS m ON c.job = m.job AND c.run = m.run AND c.rank = m.rank AND c.comm = m.comm
GROUP BY job, run, comm_group, aligned_seq, op
COMMENT 'How fast each collective was on the GPUs: transfer_ns is the time of the rank that came last and waited for nobody, bus_gb_s the bus bandwidth in GB/s as NCCL''s own tests define it (NULL: among how many ranks is not known)';

CREATE VIEW IF NOT EXISTS utilization
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

ALTER TABLE iterations COMMENT COLUMN method 'How the boundary was found: collectives, launches, marks (end of the optimiser); of imported traces: annotations, repetition';
ALTER TABLE collectives COMMENT COLUMN comm 'Communicator (NCCL) or process group (PyTorch, gloo) handle in this process; join communicators for the group it belongs to';
ALTER TABLE collectives COMMENT COLUMN op 'AllReduce, AllGather, ReduceScatter, Broadcast, Reduce, AlltoAll, Gather, Scatter, Barrier, Send, Recv, GroupStart, GroupEnd';
ALTER TABLE collectives COMMENT COLUMN dtype 'Type of the elements, by its name in NCCL; unknown: not known, nor are bytes; empty: the call has none';
ALTER TABLE communicators COMMENT COLUMN joined_by 'How the group was found: unique_id, split, name (the process group told it), traffic (guessed from equal call sequences), single';
ALTER TABLE jobs COMMENT COLUMN launcher 'torchrun, openmpi, mvapich, pmi, slurm, kubernetes or unknown; of imported traces: kineto, nsys';
ALTER TABLE ranks COMMENT COLUMN rank_source 'Whose variable told the rank: torchrun, openmpi, mvapich, pmi, slurm; order: guessed; parent: a child of the rank''s process; of imported traces: trace, file name';
ALTER TABLE ranks COMMENT COLUMN state 'traced, exited or imported';
