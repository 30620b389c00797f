-- Where the CPU's threads were, and what they waited for.

CREATE TABLE IF NOT EXISTS stacks
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  stack_id UInt64 CODEC(ZSTD(1)) COMMENT 'Hash of the frames: the same stack has the same id on every rank and host and in every run',
  kinds Array(LowCardinality(String)) CODEC(ZSTD(1)) COMMENT 'Of each frame, root first: python, native, jit, kernel, marker (a note in parentheses: frames are missing here)',
  functions Array(LowCardinality(String)) CODEC(ZSTD(1)) COMMENT 'Function of each frame; (unresolved): a Python frame that could not be named; libfoo.so+0x1234: no symbol there',
  files Array(LowCardinality(String)) CODEC(ZSTD(1)) COMMENT 'Source file of a Python frame, executable or library of another; empty: not known',
  lines Array(UInt32) CODEC(ZSTD(1)) COMMENT 'Line of a Python frame; 0: none',
  depth UInt16 CODEC(T64, ZSTD(1)) COMMENT 'Number of frames',
  leaf_kind LowCardinality(String) COMMENT 'Kind of the last frame: where the thread was',
  leaf_function LowCardinality(String) COMMENT 'Function of the last frame',
  leaf_file LowCardinality(String) COMMENT 'File of the last frame',
  python_function LowCardinality(String) COMMENT 'Function of the deepest Python frame; empty: none',
  python_file LowCardinality(String) COMMENT 'Its file',
  python_line UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Its line; 0: none',
  python LowCardinality(String) COMMENT 'Python frames: complete; cut: those nearest to the root are missing; rejected: there were some that could not be read; none: no Python runs in the thread',
  native LowCardinality(String) COMMENT 'Frames of compiled code: complete; leaf: only where the thread was; cut: the same, the chain being too long; none: not known',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = ReplacingMergeTree(stored) ORDER BY (job, run, stack_id)
-- A stack is stored once, at the beginning of a run, and named by samples until its end: it must outlive them all.
TTL stored + {{ttl}} + INTERVAL 1 YEAR
SETTINGS non_replicated_deduplication_window = 1000
COMMENT 'Every stack that was seen, once a run: what stack_id stands for';

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
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires',
  -- "Since" is a question about last_ts: a long wait begins far before it.
  INDEX last_ts_range last_ts TYPE minmax GRANULARITY 1
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(ts) ORDER BY (job, run, rank, ts)
TTL stored + {{raw_ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'Where threads were: one row per thread, stack and window of some 100 ms';

CREATE TABLE IF NOT EXISTS gc_pauses
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Tracing session',
  rank UInt32 CODEC(Delta, ZSTD(1)) COMMENT 'Global rank',
  host LowCardinality(String) COMMENT 'Node',
  pid UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Process id',
  tid UInt32 CODEC(T64, ZSTD(1)) COMMENT 'Thread that collected',
  thread LowCardinality(String) COMMENT 'Its name; empty: not known',
  ts DateTime64(9, 'UTC') CODEC(Delta, ZSTD(1)) COMMENT 'When it began, to half of uncertainty_ns',
  duration_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'How long it took, estimated from the samples before, in and after it',
  uncertainty_ns Int64 CODEC(T64, ZSTD(1)) COMMENT 'By how much duration_ns may be off, up or down',
  generation Int8 CODEC(ZSTD(1)) COMMENT 'Oldest generation that was collected; -1: not known',
  stack_id UInt64 CODEC(ZSTD(1)) COMMENT 'Where the thread was then: row of stacks; 0: no stack was taken',
  stored DateTime('UTC') DEFAULT now() CODEC(Delta, ZSTD(1)) COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = MergeTree
PARTITION BY toYYYYMMDD(ts) ORDER BY (job, run, rank, ts)
TTL stored + {{ttl}}
SETTINGS ttl_only_drop_parts = 1, non_replicated_deduplication_window = 1000
COMMENT 'Pauses for Python''s garbage collection that were long enough for a sample to hit';

CREATE OR REPLACE VIEW stack_samples_by_step
AS SELECT
  s.job AS job, s.run AS run, s.rank AS rank,
  if(s.middle < i.ts_end, i.step, NULL) AS step,
  s.host AS host, s.pid AS pid, s.tid AS tid, s.thread AS thread, s.ts AS ts, s.last_ts AS last_ts, s.kind AS kind,
  s.reason AS reason, s.gil AS gil, s.gc AS gc, s.in_kernel AS in_kernel, s.count AS count, s.ns AS ns,
  s.runqueue_ns AS runqueue_ns, s.max_ns AS max_ns, s.stack_id AS stack_id
FROM
(
  SELECT *, addNanoseconds(ts, intDiv(toUnixTimestamp64Nano(last_ts) - toUnixTimestamp64Nano(ts), 2)) AS middle
  FROM stack_samples
) AS s
ASOF LEFT JOIN
(
  SELECT job, run, rank, ts, toNullable(step) AS step, addNanoseconds(ts, duration_ns) AS ts_end FROM iterations
) AS i ON s.job = i.job AND s.run = i.run AND s.rank = i.rank AND s.middle >= i.ts
COMMENT 'stack_samples with the step that the middle of ts and last_ts lies in (NULL: outside every step)';

CREATE OR REPLACE VIEW hot_lines
AS SELECT
  job, run, rank, kind, tupleElement(frame, 1) AS file, tupleElement(frame, 2) AS line,
  any(tupleElement(named, 3)) AS function,
  sumIf(ns, own = frame) AS self_ns, sum(ns) AS total_ns, sumIf(count, own = frame) AS self_count, sum(count) AS total_count
FROM
(
  SELECT
    s.job AS job, s.run AS run, s.rank AS rank, s.kind AS kind, s.ns AS ns, s.count AS count,
    arrayJoin(emptyArrayToSingle(k.places)) AS named, (tupleElement(named, 1), tupleElement(named, 2)) AS frame,
    (k.python_file, k.python_line) AS own
  FROM
  (
    SELECT job, run, rank, kind, stack_id, sum(ns) AS ns, sum(count) AS count
    FROM stack_samples GROUP BY job, run, rank, kind, stack_id
  ) AS s
  LEFT ANY JOIN
  (
    SELECT
      job, run, stack_id, python_file, python_line,
      arrayFilter(
        (place, kind, at) -> kind = 'python' AND at = indexOf(arrayZip(kinds, files, lines), ('python', tupleElement(place, 1), tupleElement(place, 2))),
        arrayZip(files, lines, functions), kinds, arrayEnumerate(kinds)
      ) AS places
    FROM stacks
  ) AS k ON s.job = k.job AND s.run = k.run AND s.stack_id = k.stack_id
)
GROUP BY job, run, rank, kind, frame
COMMENT 'Time by rank, kind (cpu, off) and line of Python. self_ns: the line was the deepest of Python, compiled code that it called included; total_ns: it was anywhere in the stack, counted once. An empty file: no Python frame';

CREATE OR REPLACE VIEW hot_functions
AS SELECT
  job, run, rank, kind, tupleElement(frame, 1) AS frame_kind, tupleElement(frame, 2) AS function, tupleElement(frame, 3) AS file,
  sumIf(ns, own = frame) AS self_ns, sum(ns) AS total_ns, sumIf(count, own = frame) AS self_count, sum(count) AS total_count
FROM
(
  SELECT
    s.job AS job, s.run AS run, s.rank AS rank, s.kind AS kind, s.ns AS ns, s.count AS count,
    arrayJoin(emptyArrayToSingle(k.frames)) AS frame, (k.leaf_kind, k.leaf_function, k.leaf_file) AS own
  FROM
  (
    SELECT job, run, rank, kind, stack_id, sum(ns) AS ns, sum(count) AS count
    FROM stack_samples GROUP BY job, run, rank, kind, stack_id
  ) AS s
  LEFT ANY JOIN
  (
    SELECT job, run, stack_id, leaf_kind, leaf_function, leaf_file, arrayDistinct(arrayZip(kinds, functions, files)) AS frames
    FROM stacks
  ) AS k ON s.job = k.job AND s.run = k.run AND s.stack_id = k.stack_id
)
GROUP BY job, run, rank, kind, frame
COMMENT 'Time by rank, kind (cpu, off) and function, Python and compiled. self_ns: the thread was in it; total_ns: it was anywhere in the stack, counted once. An empty function: no stack was taken';

CREATE OR REPLACE VIEW off_cpu_by_reason
AS SELECT
  job, run, rank, thread, reason, sum(count) AS times, sum(ns) AS off_ns, sum(runqueue_ns) AS waited_for_cpu_ns,
  max(max_ns) AS longest_ns
FROM stack_samples
WHERE kind = 'off'
GROUP BY job, run, rank, thread, reason
COMMENT 'What the threads of a rank waited for while they were off the CPU for long';
