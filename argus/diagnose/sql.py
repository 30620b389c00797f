"""The queries behind a verdict. Each takes job, run, first and last (steps) as parameters; ``shown`` puts the values
in, so that what a verdict cites can be pasted into ``argus sql``.

Each has a second form for jobs of several hosts, which reads the views ``*_across``: steps with numbers, and calls with
times, that are the same on all hosts. ``across`` in the parameters chooses it: ``"stored"``, or ``"given"`` where the
store could not take the estimates; then they are in the parameters, and the query holds the views itself.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy.typing as npt

from argus.resources import resource_dir
from argus.store.statements import split_statements

Query: TypeAlias = Callable[[str, Mapping[str, Any]], dict[str, npt.NDArray[Any]]]
"""Runs SQL with parameters and returns columns: ``functools.partial(argus.store.reader.query_columns, store)``."""

_CALLS = """(
      SELECT {job:String} AS job, {run:UInt32} AS run, c.rank AS rank, c.op AS op, c.ts AS ts, true AS aligned,
             m.comm_group AS comm_group, toInt64(c.seq) + m.seq_offset AS aligned_seq
      FROM (SELECT * FROM collectives WHERE job = {job:String} AND run = {run:UInt32}) AS c
      INNER JOIN
      (
        SELECT rank, comm, comm_group, seq_offset FROM communicators FINAL
        WHERE job = {job:String} AND run = {run:UInt32} AND error = ''
      ) AS m ON c.rank = m.rank AND c.comm = m.comm
    )"""
"""``calls_aligned`` of one run, as far as it is aligned: joined by numbers alone, in half of the time."""

_NODES = """
      SELECT host, min(rank) AS node FROM
      (
        SELECT rank, argMax(host, version) AS host FROM ranks
        WHERE job = {job:String} AND run = {run:UInt32} GROUP BY rank
      ) GROUP BY host
"""
"""Hosts by the number of their first rank: joined by it, rows are found sooner than by a name."""

_OF_ALL_HOSTS = f"""
    SELECT m.rank AS rank, m.comm AS comm, if(j.joined_group = 0, m.comm_group, j.joined_group) AS comm_group,
           m.comm_rank AS comm_rank, m.seq_offset + j.seq_shift AS seq_offset, r.host AS host, n.node AS node
    FROM
    (
      SELECT rank, comm, comm_group, comm_rank, seq_offset FROM communicators FINAL
      WHERE job = {{job:String}} AND run = {{run:UInt32}} AND error = ''
    ) AS m
    INNER JOIN
    (
      SELECT rank, argMax(host, version) AS host FROM ranks
      WHERE job = {{job:String}} AND run = {{run:UInt32}} GROUP BY rank
    ) AS r ON m.rank = r.rank
    INNER JOIN ({_NODES}) AS n ON r.host = n.host
    LEFT ANY JOIN
    (
      SELECT host, comm_group, joined_group, seq_shift FROM group_joins
      WHERE job = {{job:String}} AND run = {{run:UInt32}} AND error = ''
        AND version = (SELECT max(version) FROM clocks WHERE job = {{job:String}} AND run = {{run:UInt32}})
    ) AS j ON r.host = j.host AND m.comm_group = j.comm_group
"""
"""What each handle is on all hosts. Calls are joined with this first, by numbers alone: of a large job they are
hundreds of millions, and few are of use."""

_CALLS_ACROSS = f"""(
      SELECT {{job:String}} AS job, {{run:UInt32}} AS run, c.rank AS rank, c.op AS op, c.ts AS ts, true AS aligned,
             m.comm_group AS comm_group, toInt64(c.seq) + m.seq_offset AS aligned_seq,
             toUnixTimestamp64Nano(c.ts) + k.offset_ns
               + intDiv((toUnixTimestamp64Nano(c.ts) - k.at_ns) * k.drift_ppb, 1000000000) AS at_ns,
             if(k.error_ns < 0 OR k.error_ns > {{apart_ns:Int64}}, m.node + 1, 0) AS side
      FROM (SELECT * FROM collectives WHERE job = {{job:String}} AND run = {{run:UInt32}}) AS c
      INNER JOIN
      (
{_OF_ALL_HOSTS}
      ) AS m ON c.rank = m.rank AND c.comm = m.comm
      ASOF LEFT JOIN
      (
        SELECT h.node AS node, o.ts AS ts, toUnixTimestamp64Nano(o.at) AS at_ns, o.offset_ns AS offset_ns,
               o.drift_ppb AS drift_ppb, o.error_ns AS error_ns
        FROM
        (
          SELECT host, ts, at, offset_ns, drift_ppb, error_ns FROM clocks
          WHERE job = {{job:String}} AND run = {{run:UInt32}}
            AND version = (SELECT max(version) FROM clocks WHERE job = {{job:String}} AND run = {{run:UInt32}})
        ) AS o
        INNER JOIN ({_NODES}) AS h ON o.host = h.host
      ) AS k ON m.node = k.node AND c.ts >= k.ts
    )"""
"""``calls_across`` of one run in the same way. ``side``: ranks of one number are compared with one another; clocks that
are too inexact are worth nothing, and such a host's ranks have a number of their own."""

_SHIFTS = """
      SELECT r.rank AS rank, s.shift AS shift, true AS known FROM
      (
        SELECT rank, argMax(host, version) AS host FROM ranks
        WHERE job = {job:String} AND run = {run:UInt32} GROUP BY rank
      ) AS r
      INNER JOIN
      (
        SELECT host, shift FROM step_shifts
        WHERE job = {job:String} AND run = {run:UInt32} AND error = ''
          AND version = (SELECT max(version) FROM step_shifts WHERE job = {job:String} AND run = {run:UInt32})
      ) AS s ON r.host = s.host
"""
"""What to add to the steps of each rank, as far as it is known."""


def _shifted(table: str) -> str:
    """The view ``<table>_across`` of one run: joined by numbers alone."""
    return f"""(
      SELECT x.* EXCEPT (job, run, step), {{job:String}} AS job, {{run:UInt32}} AS run, x.step AS host_step,
             toUInt32(greatest(0, toInt64(x.step) + s.shift)) AS step
      FROM (SELECT * FROM {table} WHERE job = {{job:String}} AND run = {{run:UInt32}}) AS x
      LEFT ANY JOIN ({_SHIFTS}) AS s ON x.rank = s.rank
      WHERE s.known
    )"""


_SPANS_ACROSS = f"""(
      SELECT {{job:String}} AS job, {{run:UInt32}} AS run, i.ts AS ts,
             toUInt32(greatest(0, toInt64(arrayJoin([i.low, i.high])) + s.shift)) AS step
      FROM
      (
        WITH
          steps AS
          (
            SELECT step FROM iteration_rollup
            WHERE job = {{job:String}} AND run = {{run:UInt32}}
            GROUP BY step HAVING max(last_ts) >= fromUnixTimestamp64Nano({{since_ns:Int64}})
          ),
          (SELECT min(step) FROM steps) AS first_step,
          (SELECT max(step) FROM steps) AS last_step
        SELECT rank, min(step) AS low, max(step) AS high, max(iterations.ts) AS ts FROM iterations
        WHERE job = {{job:String}} AND run = {{run:UInt32}}
          AND iterations.ts >= fromUnixTimestamp64Nano({{since_ns:Int64}})
          AND (step <= first_step + {{most_shift:Int64}} OR step >= last_step - {{most_shift:Int64}})
        GROUP BY rank
      ) AS i
      INNER JOIN ({_SHIFTS}) AS s ON i.rank = s.rank
    )"""
"""Steps since then, the first and the last among them: those that no shift can make the first or the last are not
read."""

_HANDLES = """
    SELECT rank, comm, comm_group, comm_rank FROM communicators FINAL
    WHERE job = {job:String} AND run = {run:UInt32} AND error = ''
"""

_ONE_HOST = {
    "$iterations": "iterations",
    "$phases": "phases",
    "$gpuphases": "gpu_phases",
    "$gpusteps": "gpu_steps",
    "$kerneltimes": "kernel_times",
    "$gpucollectives": "gpu_collectives",
    "$handles": _HANDLES,
    "$collectives": "calls_aligned",
    "$calls": _CALLS,
    "$begun": "last_ts",
    "$spans": "iteration_rollup",
    "$communicators": "communicators FINAL",
    "$known": "error = ''",
    "$arrival": "toUnixTimestamp64Nano(ts)",
    "$numbered": "",
    "$side": "",
    "$group": "w.comm_group",
    "$aside": "",
    "$near": "",
    "$among": "",
}
_SEVERAL_HOSTS = {
    "$iterations": _shifted("iterations"),
    "$phases": _shifted("phases"),
    "$gpuphases": _shifted("gpu_phases"),
    "$gpusteps": _shifted("gpu_steps"),
    "$kerneltimes": "kernel_times_across",
    "$gpucollectives": _shifted("gpu_collectives"),
    "$handles": _OF_ALL_HOSTS,
    "$collectives": "calls_across",
    "$calls": _CALLS_ACROSS,
    "$begun": "ts",
    "$spans": _SPANS_ACROSS,
    "$communicators": "calls_across",
    "$known": "aligned",
    "$arrival": "at_ns",
    # Of whose steps the numbers are known.
    "$numbered": (
        "AND rank IN (SELECT rank FROM iterations WHERE job = {job:String} AND run = {run:UInt32})"
        f" AND rank IN (SELECT rank FROM ({_SHIFTS}))"
    ),
    "$side": " side,",
    "$group": "cityHash64(w.comm_group, w.side)",
    "$aside": ", side",
    # Tables are ordered by the hosts' own numbers: what is far from those asked for is not read.
    "$near": " AND host_step BETWEEN greatest(0, toInt64({first:UInt32}) - {most_shift:Int64}) AND {last:UInt32}",
    "$among": (
        " AND host_step IN (SELECT toUInt32(greatest(0, toInt64(arrayJoin({steps:Array(UInt32)})) - toInt64(number)))"
        " FROM numbers(toUInt64({most_shift:Int64} + 1)))"
    ),
}
_FORMS: dict[str, str] = {}
"""The form for several hosts of each query that has one, by the form for one."""


def _fill(template: str, words: Mapping[str, str]) -> str:
    return re.sub(r"\$[a-z]+", lambda match: words[match[0]], template)


def _query(template: str) -> str:
    """The form for one host of a query; notes the other."""
    here = _fill(template, _ONE_HOST)
    _FORMS[here] = _fill(template, _SEVERAL_HOSTS)
    return here


_ITERATIONS = (
    "$iterations WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}$near"
)

STEPS = _query(
    f"""
SELECT step, toFloat64(quantileExactInclusive(duration_ns)) AS duration_ns,
       toFloat64(quantileExactInclusive(confidence)) AS confidence,
       groupBitmap(rank) AS ranks, toFloat64(avg(collectives)) AS calls
FROM {_ITERATIONS}
GROUP BY step ORDER BY step
"""
)
"""The job's step times: the median over ranks. (``median`` draws a sample from 8,192 values on, which takes longer.)"""

WORK = _query(
    f"""
WITH
  (SELECT min(ts) FROM {_ITERATIONS}) AS begin,
  (SELECT max(addNanoseconds(ts, duration_ns)) FROM {_ITERATIONS}) AS end
SELECT s.step AS step, toFloat64(avg(s.launches)) AS launches, toFloat64(avg(c.calls)) AS calls,
       toFloat64(avg(c.bytes)) AS bytes
FROM
(
  SELECT rank, step, launches FROM {_ITERATIONS} AND rank IN {{ranks:Array(UInt32)}}
) AS s
LEFT JOIN
(
  SELECT l.rank AS rank, i.step AS step, count() AS calls, sum(l.bytes) AS bytes
  FROM
  (
    SELECT rank, ts, bytes FROM collectives
    WHERE job = {{job:String}} AND run = {{run:UInt32}} AND ts > begin AND ts <= end AND rank IN {{ranks:Array(UInt32)}}
      AND op NOT IN ('GroupStart', 'GroupEnd')
  ) AS l
  ASOF JOIN
  (
    SELECT rank, ts, step, addNanoseconds(ts, duration_ns) AS ts_end FROM {_ITERATIONS}
      AND rank IN {{ranks:Array(UInt32)}}
  ) AS i ON l.rank = i.rank AND l.ts > i.ts
  WHERE l.ts <= i.ts_end
  GROUP BY rank, step
) AS c ON s.rank = c.rank AND s.step = c.step
GROUP BY step ORDER BY step
"""
)
"""What some ranks had to do in each step: launches, collective calls and their bytes, of a rank."""

_LATE_OF = f"""
WITH
  (SELECT min(ts) FROM {_ITERATIONS}) AS begin,
  (SELECT max(addNanoseconds(ts, duration_ns)) FROM {_ITERATIONS}) AS end,
  calls AS
  (
    SELECT comm_group, aligned_seq,$side groupArray(rank) AS ranks, groupArray($arrival) AS times,
           min(rank) AS ref_rank, argMin(ts, rank) AS ref_ts
    FROM $calls
    WHERE job = {{job:String}} AND run = {{run:UInt32}} AND aligned AND ts > begin AND ts <= end
      AND op NOT IN ('Send', 'Recv', 'GroupStart', 'GroupEnd') AND comm_group NOT IN {{left_out:Array(UInt64)}}
      $members $numbered
    GROUP BY comm_group, aligned_seq$aside
    HAVING length(ranks) > 1
  ),
  whole AS
  (
    SELECT *, max(length(ranks)) OVER (PARTITION BY comm_group$aside) AS most FROM calls
  ),
  late AS
  (
    SELECT $group AS comm_group, w.aligned_seq AS aligned_seq, i.step AS step,
           arrayJoin(arrayZip(w.ranks, w.times)) AS arrival,
           arrival.1 AS rank,
           arrival.2 - arrayReduce('quantileExactLow(0.5)', w.times) AS late_ns
    FROM (SELECT * FROM whole WHERE 10 * length(ranks) >= 9 * most) AS w
    ASOF JOIN
    (
      SELECT rank, ts, step, addNanoseconds(ts, duration_ns) AS ts_end
      FROM {_ITERATIONS}
    ) AS i ON w.ref_rank = i.rank AND w.ref_ts > i.ts
    WHERE w.ref_ts <= i.ts_end
  )
"""
# The low median: of two ranks the earlier counts as on time, of four with two late ones the punctual pair does. A
# call that more than a tenth of its ranks lack (attached later, records lost) says nothing about who was late.

_LATE = _LATE_OF.replace("      $members $numbered\n", "      $numbered\n")
_LATE_AMONG = _LATE_OF.replace("$members", "AND rank IN {members:Array(UInt32)}")

LATENESS = _query(
    _LATE
    + """
SELECT comm_group, rank, step, toFloat64(max(late_ns)) AS peak_ns, toFloat64(argMin(late_ns, aligned_seq)) AS first_ns,
       toFloat64(argMax(late_ns, aligned_seq)) AS last_ns
FROM late
GROUP BY comm_group, rank, step
"""
)
"""How late each rank came to the collectives of each step, against the median rank: most, first and last call. In no
order."""

LEAD = _query(
    _LATE_AMONG
    + """
SELECT step, toFloat64(maxIf(late_ns, has({ranks:Array(UInt32)}, rank))) AS suspects_ns,
       toFloat64(maxIf(late_ns, NOT has({ranks:Array(UInt32)}, rank))) AS others_ns
FROM late
GROUP BY step
HAVING countIf(has({ranks:Array(UInt32)}, rank)) > 0 AND countIf(NOT has({ranks:Array(UInt32)}, rank)) > 0
ORDER BY step
"""
)
"""The latest of some ranks and the latest of all others among ``members``, by step: the difference is what these
lose."""

LAST = _query(
    _LATE
    + """
SELECT step, argMax(rank, late_by_rank) AS rank,
       toFloat64(max(late_by_rank)) - toFloat64(arrayReverseSort(groupArray(late_by_rank))[2]) AS lead_ns
FROM (SELECT step, rank, max(late_ns) AS late_by_rank FROM late GROUP BY step, rank)
GROUP BY step
HAVING count() > 1
ORDER BY step
"""
)
"""The last rank of each step and its distance to the second last."""

CPU_TIME = _query(
    f"""
WITH
  (SELECT min(ts) FROM {_ITERATIONS}) AS begin,
  (SELECT max(addNanoseconds(ts, duration_ns)) FROM {_ITERATIONS}) AS end,
  calls AS
  (
    SELECT l.rank AS rank, i.step AS step, l.kind AS kind, toUnixTimestamp64Nano(l.ts) AS at,
           greatest(l.duration_ns, 0) AS inside,
           at - greatest(toUnixTimestamp64Nano(i.ts), max(at + inside) OVER
             (PARTITION BY rank, step ORDER BY at ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)) AS gap
    FROM
    (
      SELECT rank, ts, kind, duration_ns FROM launches
      WHERE job = {{job:String}} AND run = {{run:UInt32}} AND ts > begin AND ts <= end AND NOT in_nccl
        AND rank IN {{ranks:Array(UInt32)}}
    ) AS l
    ASOF JOIN
    (
      SELECT rank, ts, step, addNanoseconds(ts, duration_ns) AS ts_end FROM {_ITERATIONS}
    ) AS i ON l.rank = i.rank AND l.ts > i.ts
    WHERE l.ts <= i.ts_end
  )
SELECT rank, step, toFloat64(sumIf(inside, kind = 'sync')) AS sync_ns, toFloat64(sumIf(inside, kind = 'module')) AS
module_ns,
       toFloat64(sumIf(greatest(gap, 0), kind IN ('memcpy_h2d', 'memcpy'))) AS data_ns,
       toFloat64(sumIf(greatest(gap, 0), kind NOT IN ('memcpy_h2d', 'memcpy'))) AS other_ns
FROM calls
GROUP BY rank, step
ORDER BY step, rank
"""
)
"""Where some ranks' CPU time went, by step: waiting for the GPU, loading code, outside CUDA before a copy of data, and
outside CUDA otherwise."""

PHASE_TIME = _query(
    """
SELECT rank, step, phase, toFloat64(duration_ns) AS duration_ns FROM $phases
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}$near
  AND rank IN {ranks:Array(UInt32)}
ORDER BY step, rank, phase
"""
)
"""Where some ranks' steps went, by phase."""

GPU_PHASE_TIME = _query(
    """
SELECT rank, step, phase, toFloat64(sum(duration_ns)) AS duration_ns FROM $gpuphases
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}$near
  AND rank IN {ranks:Array(UInt32)} AND phase IN ('forward', 'backward', 'optimizer', 'compute')
GROUP BY rank, step, phase
ORDER BY step, rank, phase
"""
)
"""How long kernels computed on some ranks' GPUs, by step and phase."""

GPU_TIMES = _query(
    """
SELECT rank, step,
       toFloat64(sumIf(duration_ns, phase = 'forward')) AS forward_ns,
       toFloat64(sumIf(duration_ns, phase = 'backward')) AS backward_ns,
       toFloat64(sumIf(duration_ns, phase = 'optimizer')) AS optimizer_ns,
       toFloat64(sumIf(duration_ns, phase = 'compute')) AS compute_ns,
       toFloat64(sumIf(duration_ns, phase IN ('all_reduce', 'all_gather', 'reduce_scatter', 'all_to_all', 'broadcast',
                                              'reduce', 'communication'))) AS collective_ns,
       toFloat64(sumIf(duration_ns, phase IN ('send_recv', 'pipeline_bubble'))) AS pipeline_ns,
       toFloat64(sumIf(duration_ns, phase IN ('idle', 'data_loading', 'memcpy', 'checkpoint'))) AS idle_ns,
       toFloat64(sum(duration_ns)) AS step_ns,
       toInt64(sumIf(operations, phase IN ('forward', 'backward', 'optimizer', 'compute'))) AS kernels
FROM $gpuphases
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}$near
GROUP BY rank, step
"""
)
"""How long each rank's GPU computed, was in collectives, handed on data between stages or waited for it, and had
nothing to do or waited for data, by step. In no order."""

GPU_COMPUTE = _query(
    """
SELECT rank, step, toFloat64(sum(duration_ns)) AS compute_ns
FROM $gpuphases
WHERE job = {job:String} AND run = {run:UInt32} AND step IN {steps:Array(UInt32)}$among
  AND rank IN {ranks:Array(UInt32)} AND phase IN ('forward', 'backward', 'optimizer', 'compute')
GROUP BY rank, step
ORDER BY step, rank
"""
)
"""How long kernels computed on some ranks' GPUs in some steps."""

_TRANSFERS = """
FROM
(
  SELECT g.rank AS rank, m.comm_group AS comm_group, g.op AS op, g.step AS step,
         g.op = 'SendRecv' AS pairwise, if(pairwise, least(m.comm_rank, g.peer), -1) AS one,
         if(pairwise, greatest(m.comm_rank, g.peer), -1) AS other,
         toFloat64(if(pairwise, min(g.shortest_ns), sum(g.duration_ns))) AS took,
         toInt64(sum(g.calls)) AS calls, toInt64(sum(g.bytes)) AS bytes
  FROM $gpucollectives AS g
  INNER JOIN
  ($handles) AS m ON g.rank = m.rank AND g.comm = m.comm
  WHERE g.job = {job:String} AND g.run = {run:UInt32} AND g.step BETWEEN {first:UInt32} AND {last:UInt32}$near
    AND g.op != ''
  GROUP BY rank, comm_group, op, step, one, other
)
WHERE NOT pairwise OR one >= 0
"""
# A pair of which one number is not known cannot be told from others.

TRANSFERS = _query(
    """
SELECT comm_group, op, one, other, step, min(took) AS took_ns, max(calls) AS calls, max(bytes) AS bytes"""
    + _TRANSFERS
    + "GROUP BY comm_group, op, one, other, step\n"
)
"""What each communicator's collectives took the rank that waited for nobody, and transfers between two ranks (``one``
and ``other``, as numbered in the communicator) the one that waited less, by step and operation."""

TRANSFER_RANKS = _query(
    """
SELECT comm_group, op, one, other, groupUniqArray(rank) AS ranks
FROM
(
  SELECT g.rank AS rank, m.comm_group AS comm_group, g.op AS op, g.op = 'SendRecv' AS pairwise,
         if(pairwise, least(m.comm_rank, g.peer), -1) AS one, if(pairwise, greatest(m.comm_rank, g.peer), -1) AS other
  FROM
  (
    SELECT DISTINCT rank, comm, op, peer FROM $gpucollectives
    WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}$near AND op != ''
  ) AS g
  INNER JOIN
  ($handles) AS m ON g.rank = m.rank AND g.comm = m.comm
)
WHERE NOT pairwise OR one >= 0
GROUP BY comm_group, op, one, other
"""
)
"""Who takes part in them."""

SENDS = _query(
    f"""
WITH
  (SELECT min(ts) FROM {_ITERATIONS}) AS begin,
  (SELECT max(addNanoseconds(ts, duration_ns)) FROM {_ITERATIONS}) AS end
SELECT s.rank AS rank, toFloat64(s.sent / i.steps) AS sent
FROM
(
  SELECT c.rank AS rank, count() AS sent
  FROM
  (
    SELECT rank, ts FROM collectives
    WHERE job = {{job:String}} AND run = {{run:UInt32}} AND ts > begin AND ts <= end AND rank IN {{ranks:Array(UInt32)}}
      AND op = 'Send'
  ) AS c
  INNER JOIN
  (
    SELECT rank, min(ts) AS begun, max(addNanoseconds(ts, duration_ns)) AS ended
    FROM {_ITERATIONS} AND rank IN {{ranks:Array(UInt32)}} GROUP BY rank
  ) AS t ON c.rank = t.rank
  WHERE c.ts > t.begun AND c.ts <= t.ended
  GROUP BY rank
) AS s
INNER JOIN
(
  SELECT rank, uniqExact(step) AS steps FROM {_ITERATIONS} AND rank IN {{ranks:Array(UInt32)}} GROUP BY rank
) AS i ON s.rank = i.rank
ORDER BY rank
"""
)
"""How much some ranks send to other stages of their pipeline in a step."""

GROUPS = """
SELECT host, comm_group, dimension, ranks FROM parallel_groups FINAL WHERE job = {job:String} AND run = {run:UInt32}
"""
"""What each communicator is for, and who is in it, as each host saw it."""

KERNEL_TIME = _query(
    """
SELECT s.kernel_id AS kernel_id, g.kernel AS kernel, s.rank AS rank, sum(s.launches) AS launches,
       sum(s.spent_ns) AS spent_ns, sum(s.steps) AS steps
FROM $kerneltimes AS s
LEFT ANY JOIN
(
  SELECT kernel_id, kernel FROM kernel_groups WHERE job = {job:String} AND run = {run:UInt32}
) AS g ON s.kernel_id = g.kernel_id
WHERE s.job = {job:String} AND s.run = {run:UInt32} AND s.step BETWEEN {first:UInt32} AND {last:UInt32}
  AND s.rank IN {ranks:Array(UInt32)} AND g.kernel != '' AND NOT startsWith(g.kernel, 'nccl')
GROUP BY kernel_id, kernel, rank
ORDER BY kernel_id, rank
"""
)
"""Launches and time of each kernel that does not communicate, by rank, from the summaries."""

RECORDED_KERNELS = """
SELECT cityHash64(name, grid, block) AS kernel_id, any(name) AS kernel, rank, count() AS launches,
       sum(duration_ns) AS spent_ns, toUInt32({steps:UInt32}) AS steps
FROM kernel_events
WHERE job = {job:String} AND run = {run:UInt32} AND rank IN {ranks:Array(UInt32)} AND kind = 'kernel'
  AND NOT startsWith(name, 'nccl')
GROUP BY kernel_id, rank
ORDER BY kernel_id, rank
"""
"""The same of recordings, whose kernels are stored one by one. ``steps``: how many they have."""

KERNEL_STEPS = _query(
    """
SELECT toInt64(min(t.step)) AS since, toFloat64(sum(t.spent_ns)) / sum(t.launches) AS mean_ns
FROM $kerneltimes AS t
WHERE t.job = {job:String} AND t.run = {run:UInt32} AND t.step BETWEEN {first:UInt32} AND {last:UInt32}
  AND t.rank IN {ranks:Array(UInt32)} AND t.kernel_id = {kernel:UInt64} AND t.launches > 0
GROUP BY intDiv(t.step, {width:UInt32})
ORDER BY since
"""
)
"""Mean duration of a kernel on some ranks, some steps together."""

_ROWS_OF_KERNEL = """
WHERE job = {job:String} AND run = {run:UInt32} AND kernel_id = {kernel:UInt64} AND rank IN {ranks:Array(UInt32)}
  AND step BETWEEN {first:UInt32} AND {last:UInt32}
ORDER BY rank, step
"""
KERNEL_ROWS = f"""
SELECT rank, template, count, spikes, total_ns, count_codes, mean_codes FROM kernel_summaries{_ROWS_OF_KERNEL}"""
KERNEL_ESCAPED = f"""
SELECT rank, total_ns, bins, counts FROM kernel_escapes{_ROWS_OF_KERNEL}"""
KERNEL_TEMPLATES = """
SELECT template, any(heaviest) AS heaviest, any(mode) AS mode, any(share) AS share, any(mean_ns) AS mean_ns,
       any(unit) AS unit, any(shape) AS shape
FROM kernel_templates WHERE job = {job:String} AND run = {run:UInt32} AND kernel_id = {kernel:UInt64}
GROUP BY template
"""
"""What :mod:`argus.compress.decode` rebuilds durations from. Steps are the hosts' own: some more or less do not
matter."""

ISSUE = _query(
    """
SELECT rank, step, toFloat64(issue_latency_p50_ns) AS p50_ns, toFloat64(issue_latency_p99_ns) AS p99_ns,
       toFloat64(void_share) AS void_share
FROM $gpusteps
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}$near
  AND rank IN {ranks:Array(UInt32)} AND kernels > 0
ORDER BY step, rank
"""
)
"""How long operations of some ranks waited from launch to begin, and the share of each step without any."""

PATTERNS = _query(
    f"""
WITH
  spans AS
  (
    SELECT rank, toFloat64(sum(duration_ns)) AS span_ns, min(toUnixTimestamp64Nano(ts)) AS begin,
           max(toUnixTimestamp64Nano(ts) + toInt64(duration_ns)) AS done
    FROM {_ITERATIONS} AND rank IN {{ranks:Array(UInt32)}}
    GROUP BY rank
  )
SELECT p.kind AS kind, p.function AS function, p.rank AS rank, p.spent_ns / s.span_ns AS beta, p.mu AS mu,
       p.sigma AS sigma
FROM
(
  SELECT 'kernel' AS kind, rank, g.kernel AS function, sum(spent) AS spent_ns, sum(best) / sum(spent) AS mu,
         stddevPop(best / spent) AS sigma
  FROM
  (
    SELECT rank, kernel_id, step, toFloat64(sum(spent_ns)) AS spent, sum(launches) AS times,
           least(times * min(sum(spent_ns) / sum(launches)) OVER (PARTITION BY kernel_id, step), spent) AS best
    FROM $kerneltimes
    WHERE job = {{job:String}} AND run = {{run:UInt32}} AND step BETWEEN {{first:UInt32}} AND {{last:UInt32}}
      AND rank IN {{ranks:Array(UInt32)}} AND launches > 0 AND spent_ns > 0
    GROUP BY rank, kernel_id, step
  ) AS k
  LEFT ANY JOIN
  (
    SELECT kernel_id, kernel FROM kernel_groups WHERE job = {{job:String}} AND run = {{run:UInt32}}
  ) AS g ON k.kernel_id = g.kernel_id
  WHERE g.kernel != '' AND NOT startsWith(g.kernel, 'nccl')
  GROUP BY rank, function
  UNION ALL
  SELECT 'python' AS kind, rank, k.python_function AS function, toFloat64(sum(t.ns)) AS spent_ns,
         sumIf(t.ns, t.kind = 'cpu') / spent_ns AS mu, 0 AS sigma
  FROM
  (
    SELECT job, run, rank, stack_id, kind, sum(ns) AS ns FROM stack_samples
    WHERE job = {{job:String}} AND run = {{run:UInt32}} AND rank IN {{ranks:Array(UInt32)}} AND tid = pid
      AND ts >= fromUnixTimestamp64Nano((SELECT min(begin) FROM spans))
      AND ts < fromUnixTimestamp64Nano((SELECT max(done) FROM spans))
    GROUP BY job, run, rank, stack_id, kind
  ) AS t
  INNER JOIN (SELECT DISTINCT stack_id, python_function FROM stacks
              WHERE job = {{job:String}} AND run = {{run:UInt32}} AND python_function != '') AS k
    ON t.stack_id = k.stack_id
  GROUP BY rank, function
) AS p
INNER JOIN spans AS s ON p.rank = s.rank
WHERE beta > 0.002
ORDER BY kind, function, rank
"""
)
"""Behaviour of functions on some ranks: share of the time, how well it uses what it runs on, and how much that
varies."""

NODE_HEALTH = """
WITH
  (SELECT min(first_ts) FROM iteration_rollup WHERE job = {job:String} AND run = {run:UInt32}) AS begun,
  (SELECT max(last_ts) FROM iteration_rollup WHERE job = {job:String} AND run = {run:UInt32}) AS ended
SELECT h.host AS host, h.check AS check, argMax(h.status, h.ts) AS status, argMax(h.text, h.ts) AS text,
       toUnixTimestamp64Nano(max(h.ts)) AS ts_ns
FROM health AS h
WHERE h.host IN {hosts:Array(String)} AND h.status IN ('warning', 'critical') AND h.check != 'argus'
  AND h.ts BETWEEN begun - INTERVAL 1 HOUR AND ended + INTERVAL 10 MINUTE
GROUP BY host, check
ORDER BY host, check
"""
"""What checks of these nodes complained of last, from an hour before the job's first step to ten minutes after its
last."""

FLAGGED = """
SELECT count() AS n FROM raw_requests
WHERE job = {job:String} AND run = {run:UInt32} AND asked > now64(3) - INTERVAL 1 MINUTE
"""
"""Moments that were flagged within the last minute."""

ALIGNMENT = """
SELECT uniqExactIf(rank, error = '') AS aligned_ranks, uniqExact(rank) AS ranks, anyIf(error, error != '') AS why
FROM communicators FINAL
WHERE job = {job:String} AND run = {run:UInt32}
"""

HOSTS = """
SELECT rank, argMax(host, version) AS host FROM ranks
WHERE job = {job:String} AND run = {run:UInt32} GROUP BY rank ORDER BY rank
"""

SESSIONS = """
SELECT countIf(ended IS NULL) AS open, max(world_size) AS world_size FROM jobs FINAL
WHERE job = {job:String} AND run = {run:UInt32}
"""
"""Tracing sessions (hosts) that have not closed their books, and how many ranks the launcher speaks of."""

LAST_LOOK = """
WITH
  latest AS
  (
    SELECT step, addNanoseconds(max(last_ts), max(max_ns)) AS at_most, max(last_ts) AS begun FROM iteration_rollup
    WHERE job = {job:String} AND run = {run:UInt32} GROUP BY step
  ),
  (SELECT max(addNanoseconds(ts, duration_ns)) FROM iterations
    WHERE job = {job:String} AND run = {run:UInt32} AND ts >= fromUnixTimestamp64Nano({since_ns:Int64})
      AND step IN (SELECT step FROM latest WHERE at_most >= (SELECT max(begun) FROM latest))) AS ended
SELECT
  (SELECT toUnixTimestamp64Milli(max(ts)) * 1000000 FROM coverage WHERE job = {job:String} AND run = {run:UInt32})
    AS looked_ns,
  toUnixTimestamp64Nano(ended) AS stepped_ns,
  greatest(
    (SELECT max(toUnixTimestamp64Nano(ts)) FROM launches
      WHERE job = {job:String} AND run = {run:UInt32} AND ts >= ended
        AND ts >= fromUnixTimestamp64Nano({since_ns:Int64})),
    (SELECT max(toUnixTimestamp64Nano(ts)) FROM collectives
      WHERE job = {job:String} AND run = {run:UInt32} AND ts >= ended
        AND ts >= fromUnixTimestamp64Nano({since_ns:Int64})),
    stepped_ns
  ) AS called_ns,
  toUnixTimestamp64Nano(now64(9)) AS now_ns
"""
"""When Argus last looked at the job, when a step last ended, when a call was last made (the later of the two; 0:
never), and now. Of the steps only those are read that may have ended last."""

LOADING = _query(
    """
WITH
  (SELECT min(ts) FROM $iterations WHERE job = {job:String} AND run = {run:UInt32} AND step >= {first:UInt32}) AS begin,
  (SELECT max(addNanoseconds(ts, duration_ns)) FROM $iterations
    WHERE job = {job:String} AND run = {run:UInt32} AND step <= {last:UInt32}) AS end
SELECT rank, toFloat64(sum(duration_ns)) AS loading_ns FROM launches
WHERE job = {job:String} AND run = {run:UInt32} AND kind = 'module' AND duration_ns > 0 AND ts > begin AND ts <= end
GROUP BY rank ORDER BY rank
"""
)
"""Time that each rank spent loading or compiling GPU code."""

STATES = """
SELECT rank, argMax(state, version) AS state, argMax(host, version) AS host FROM ranks
WHERE job = {job:String} AND run = {run:UInt32} AND rank_source != 'parent' GROUP BY rank ORDER BY rank
"""

LAST_CALLS = _query(
    """
SELECT comm_group, rank, toInt64(max(aligned_seq)) AS seq, toInt64(max(toUnixTimestamp64Nano(ts))) AS called_ns
FROM $collectives
WHERE job = {job:String} AND run = {run:UInt32} AND aligned AND ts >= fromUnixTimestamp64Nano({since_ns:Int64})
  AND op NOT IN ('Send', 'Recv', 'GroupStart', 'GroupEnd')
GROUP BY comm_group, rank ORDER BY comm_group, rank
"""
)
"""The last collective that each rank called on each of its communicators."""

LAST_TRANSFERS = _query(
    """
SELECT c.comm_group AS comm_group, c.rank AS rank, any(c.comm_rank) AS comm_rank, c.peer AS peer,
       countIf(c.op = 'Send' AND c.ts > i.ended) AS sent, countIf(c.op = 'Recv' AND c.ts > i.ended) AS received
FROM $collectives AS c
INNER JOIN
(
  SELECT rank, max(addNanoseconds(ts, duration_ns)) AS ended FROM iterations
  WHERE job = {job:String} AND run = {run:UInt32} AND step + 50 >= {last:UInt32} GROUP BY rank
) AS i ON c.rank = i.rank
WHERE c.job = {job:String} AND c.run = {run:UInt32} AND c.aligned AND c.ts >= fromUnixTimestamp64Nano({since_ns:Int64})
  AND c.op IN ('Send', 'Recv')
GROUP BY comm_group, rank, peer
"""
)
"""Sends and receives that each rank called since its last whole step, by peer."""

STUCK_CALL = _query(
    """
SELECT any(op) AS call, arraySort(groupUniqArray(rank)) AS came
FROM $collectives
WHERE job = {job:String} AND run = {run:UInt32} AND aligned AND ts >= fromUnixTimestamp64Nano({since_ns:Int64})
  AND comm_group = {group:UInt64} AND aligned_seq = {seq:Int64}
  AND op NOT IN ('Send', 'Recv', 'GroupStart', 'GroupEnd')
"""
)
"""One collective, and who called it."""

DIMENSION = """
SELECT any(dimension) AS dimension FROM parallel_groups FINAL
WHERE job = {job:String} AND run = {run:UInt32} AND comm_group = {group:UInt64}
"""
"""What a communicator is for; empty: not known."""

PLACES = """
SELECT t.rank AS rank, t.host AS host, t.pid AS pid, t.tid AS tid, t.thread AS thread, t.reason AS reason,
       t.seconds AS seconds, k.functions AS functions, k.files AS files, k.lines AS lines
FROM
(
  SELECT job, run, rank, any(host) AS host, pid, tid, any(thread) AS thread, reason, stack_id, sum(ns) / 1e9 AS seconds
  FROM stack_samples
  WHERE job = {job:String} AND run = {run:UInt32} AND rank IN {ranks:Array(UInt32)}
    AND last_ts >= fromUnixTimestamp64Nano({from_ns:Int64}) AND ts < fromUnixTimestamp64Nano({to_ns:Int64})
  GROUP BY job, run, rank, pid, tid, reason, stack_id
) AS t
LEFT ANY JOIN stacks AS k ON t.job = k.job AND t.run = k.run AND t.stack_id = k.stack_id
ORDER BY rank, seconds DESC
"""
"""Where the threads of some ranks were, and for how long."""

SPAN_NS = _query(
    f"""
SELECT toInt64(min(toUnixTimestamp64Nano(ts))) AS begin_ns,
       toInt64(max(toUnixTimestamp64Nano(ts) + toInt64(duration_ns))) AS end_ns, uniqExact(step) AS steps,
       toFloat64(median(duration_ns)) AS step_ns
FROM {_ITERATIONS}
"""
)
"""When some steps were, and how long a typical one took."""

HOST_TIME = """
SELECT rank, argMax(pid, runqueue) AS process, argMax(name, runqueue) AS thread,
       if(max(seen) = 0, -1, max(runqueue / greatest(seen, 1))) AS runqueue_share,
       if(max(seen) = 0, -1, argMax(cpu / greatest(seen, 1), runqueue)) AS cpu_share,
       if(max(io_seen) = 0, -1, max(io / greatest(io_seen, 1))) AS io_share,
       if(max(taken_seen) = 0, -1, 1e9 * sum(taken) / max(taken_seen)) AS taken_per_s
FROM
(
  SELECT rank, pid, tid, any(thread) AS name,
         sumIf(part * cpu_ns, runqueue_ns >= 0) AS cpu,
         sumIf(part * runqueue_ns, runqueue_ns >= 0) AS runqueue, sumIf(part * interval_ns, runqueue_ns >= 0) AS seen,
         sumIf(part * io_ns, io_ns >= 0) AS io, sumIf(part * interval_ns, io_ns >= 0) AS io_seen,
         sumIf(part * involuntary, involuntary >= 0) AS taken, sumIf(part * interval_ns, involuntary >= 0) AS taken_seen
  FROM
  (
    SELECT rank, pid, tid, thread, interval_ns, cpu_ns, runqueue_ns, io_ns, involuntary,
           toUnixTimestamp64Nano(ts) AS begin_ns,
           (least(begin_ns + interval_ns, {to_ns:Int64}) - greatest(begin_ns, {from_ns:Int64})) / interval_ns AS part
    FROM thread_usage
    WHERE job = {job:String} AND run = {run:UInt32} AND rank IN {ranks:Array(UInt32)}
      AND ts >= fromUnixTimestamp64Nano({from_ns:Int64} - 60000000000) AND ts < fromUnixTimestamp64Nano({to_ns:Int64})
      AND interval_ns > 0 AND begin_ns + interval_ns > {from_ns:Int64}
  )
  GROUP BY rank, pid, tid
)
GROUP BY rank ORDER BY rank
"""
"""The thread of each rank that waited the most for a CPU, and for a disk: as shares of the time. Of an interval that
only overlaps the time counts the part that does. They last 10 s at most, and longer only where Argus was held up."""

HOST_CPU = """
SELECT host, sum(part * busy_ns) / greatest(sum(part * interval_ns * cpus), 1) AS busy,
       sum(part * greatest(busy_ns - job_ns - argus_ns, 0)) / greatest(sum(part * interval_ns * cpus), 1) AS others,
       sum(part * stolen_ns) / greatest(sum(part * interval_ns * cpus), 1) AS stolen
FROM
(
  SELECT host, interval_ns, cpus, busy_ns, job_ns, argus_ns, stolen_ns, toUnixTimestamp64Nano(ts) AS begin_ns,
         (least(begin_ns + interval_ns, {to_ns:Int64}) - greatest(begin_ns, {from_ns:Int64})) / interval_ns AS part
  FROM host_usage
  WHERE job = {job:String} AND run = {run:UInt32} AND host IN {hosts:Array(String)}
    AND ts >= fromUnixTimestamp64Nano({from_ns:Int64} - 60000000000) AND ts < fromUnixTimestamp64Nano({to_ns:Int64})
    AND interval_ns > 0 AND begin_ns + interval_ns > {from_ns:Int64}
)
GROUP BY host ORDER BY host
"""
"""How busy the CPUs of nodes were, and with what besides the traced ranks and Argus: shares of all CPU time."""

SAMPLED_TIME = """
SELECT rank, toFloat64(sum(gc_ns)) / greatest(max(last) - min(first), 1) AS gc_share,
       toFloat64(max(io_ns)) / greatest(max(last) - min(first), 1) AS io_share
FROM
(
  SELECT rank, pid, tid, sumIf(ns, kind = 'cpu' AND gc) AS gc_ns,
         sumIf(ns, kind = 'off' AND reason IN ('disk', 'page_fault')) AS io_ns,
         min(toUnixTimestamp64Nano(ts)) AS first, max(toUnixTimestamp64Nano(last_ts)) AS last
  FROM stack_samples
  WHERE job = {job:String} AND run = {run:UInt32} AND rank IN {ranks:Array(UInt32)}
    AND ts >= fromUnixTimestamp64Nano({from_ns:Int64}) AND ts < fromUnixTimestamp64Nano({to_ns:Int64})
  GROUP BY rank, pid, tid
)
GROUP BY rank ORDER BY rank
"""
"""How much of the time each rank collected garbage, and a thread of it waited for a disk, by stacks."""

PAUSES = """
SELECT count() AS pauses, toFloat64(sum(p.duration_ns)) AS total_ns, toFloat64(median(p.duration_ns)) AS usual_ns,
       max(p.generation) AS generation,
       topK(1)((toString(k.python_function), toString(k.python_file), k.python_line))[1] AS place,
       place.1 AS function, place.2 AS file, place.3 AS line
FROM gc_pauses AS p
LEFT ANY JOIN stacks AS k ON p.job = k.job AND p.run = k.run AND p.stack_id = k.stack_id
WHERE p.job = {job:String} AND p.run = {run:UInt32} AND p.rank IN {ranks:Array(UInt32)}
  AND p.ts >= fromUnixTimestamp64Nano({from_ns:Int64}) AND p.ts < fromUnixTimestamp64Nano({to_ns:Int64})
"""
"""Pauses for garbage collection of some ranks, and where most of them were."""

PROCESSES = """
SELECT rank, argMax(pid, version) AS pid, argMax(host, version) AS host FROM ranks
WHERE job = {job:String} AND run = {run:UInt32} AND rank IN {ranks:Array(UInt32)} AND rank_source != 'parent'
GROUP BY rank ORDER BY rank
"""
"""The processes of some ranks."""

COVERAGE = """
SELECT counter, sum(value) AS value FROM coverage FINAL
WHERE job = {job:String} AND run = {run:UInt32} AND loss GROUP BY counter ORDER BY counter
"""

SPAN = _query(
    """
SELECT min(step) AS first, max(step) AS last, count() AS n FROM $spans
WHERE job = {job:String} AND run = {run:UInt32} AND $begun >= fromUnixTimestamp64Nano({since_ns:Int64})
"""
)
"""The first and the last step since then; ``n`` is 0 if there is none."""

NEWEST_STEP = """
SELECT max(toUnixTimestamp64Nano(ts) + toInt64(duration_ns)) AS ns FROM iterations
WHERE job = {job:String} AND run = {run:UInt32} AND ts >= fromUnixTimestamp64Nano({since_ns:Int64} - 60000000000)
"""
"""When the newest step ended."""

SLOWER = _query(
    f"""
SELECT rank, toFloat64(quantileExactInclusiveIf(duration_ns, step < {{onset:UInt32}})) AS before_ns,
       toFloat64(quantileExactInclusiveIf(duration_ns, step >= {{onset:UInt32}})) AS after_ns
FROM {_ITERATIONS}
GROUP BY rank ORDER BY rank
"""
)
"""Each rank's step time before and from a step on."""

OPERATIONS = """
SELECT rank, step, stage, dp_rank, op, seq, chunk, global_chunk, ts, ts_end, duration_ns FROM phase_ops
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}
"""
"""Every operation of some steps, in no order."""

STEP_TIMES = """
SELECT rank, step, toFloat64(any(duration_ns)) AS duration_ns FROM iterations
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}
GROUP BY rank, step
"""
"""Each rank's time of each step, in no order."""

STEP_TIMES_BY_RANK = """
SELECT rank, count() AS steps, quantileExact(0.5)(duration_ns) / 1e6 AS median_ms,
       quantileExactIf(0.5)(duration_ns, step < ({first:UInt32} + {last:UInt32}) / 2) / 1e6 AS first_half_ms,
       quantileExactIf(0.5)(duration_ns, step >= ({first:UInt32} + {last:UInt32}) / 2) / 1e6 AS second_half_ms
FROM iterations
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}
GROUP BY rank ORDER BY median_ms DESC
"""
"""Each rank's typical step time."""

ALL_PHASES = """
SELECT rank, step, phase, toFloat64(any(duration_ns)) AS duration_ns FROM phases
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}
GROUP BY rank, step, phase
"""
"""Each rank's time in each phase of each step, in no order."""

LOGGED_PHASES = """
SELECT count() AS n FROM phases
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}
"""
"""How many phases are stored."""

PHASES_BY_RANK = """
SELECT rank, phase, count() AS steps, quantileExact(0.5)(duration_ns) / 1e6 AS median_ms,
       quantileExact(0.95)(duration_ns) / 1e6 AS p95_ms
FROM phases
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}
GROUP BY rank, phase ORDER BY phase, median_ms DESC
"""
"""Each rank's typical time in each phase."""

ONLY_STEPS = """
SELECT
  (SELECT count() FROM launches WHERE job = {job:String} AND run = {run:UInt32}) +
  (SELECT count() FROM collectives WHERE job = {job:String} AND run = {run:UInt32}) AS calls,
  (SELECT countIf(method != 'imported') FROM iterations WHERE job = {job:String} AND run = {run:UInt32}) AS found
"""
"""Calls that are stored, and steps that were not told by the one who recorded them."""

LAYOUT = """
SELECT dp, pp, tp, sp, vpp, world_size FROM parallel_layout FINAL WHERE job = {job:String} AND run = {run:UInt32}
"""
"""How the job is split: one row, or none."""

COMPUTE_TIME = """
SELECT stage, dp_rank, rank, sum(duration_ns) / uniqExact(step) / 1e6 AS compute_ms_a_step,
       quantileExact(0.5)(duration_ns) / 1e6 AS median_ms, max(duration_ns) / 1e6 AS longest_ms, op
FROM phase_ops
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}
  AND op IN ('forward-compute', 'backward-compute')
GROUP BY stage, dp_rank, rank, op ORDER BY op, stage, dp_rank
"""
"""How long each worker computes."""

TRANSFER_TIME = """
SELECT stage, dp_rank, rank, quantileExact(0.5)(duration_ns) / 1e6 AS median_ms,
       min(duration_ns) / 1e6 AS shortest_ms, max(duration_ns) / 1e6 AS longest_ms, op
FROM phase_ops
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}
  AND op NOT IN ('forward-compute', 'backward-compute', 'optimizer', 'gc')
GROUP BY stage, dp_rank, rank, op ORDER BY op, stage, dp_rank
"""
"""How long each worker communicates, waiting for others included."""


SEVERAL = """
SELECT uniqExactIf(host, mono_offset_ns != 0 OR launcher IN ('kineto', 'nsys')) AS hosts,
       toUInt32(countIf(launcher IN ('kineto', 'nsys')) > 0) AS recorded FROM jobs
WHERE job = {job:String} AND run = {run:UInt32}
"""
"""Hosts with clocks of their own: times that were simulated are taken as they are."""

WALLS = """
SELECT host, argMax(wall_error_ns, version) AS error_ns FROM jobs
WHERE job = {job:String} AND run = {run:UInt32} GROUP BY host
"""
"""What each host says about its wall clock, ns; -1: nothing."""

LOCAL_GROUPS = """
SELECT m.comm_group AS comm_group, r.host AS host, any(m.joined_by) AS joined_by, max(m.nranks) AS nranks,
       toInt64(uniqExact(m.rank)) AS members, min(m.rank) AS first_rank, argMin(m.comm, m.rank) AS comm,
       argMin(m.seq_offset, m.rank) AS seq_offset
FROM
(
  SELECT rank, comm, comm_group, nranks, seq_offset, joined_by FROM communicators FINAL
  WHERE job = {job:String} AND run = {run:UInt32} AND error = ''
) AS m
INNER JOIN
(
  SELECT rank, argMax(host, version) AS host FROM ranks
  WHERE job = {job:String} AND run = {run:UInt32} GROUP BY rank
) AS r ON m.rank = r.rank
GROUP BY comm_group, host
ORDER BY host, comm_group
"""
"""The communicators of each host, with one rank that stands for the others."""

NEWEST_CALLS = """
SELECT rank, comm, op, dtype, count, seq, toUnixTimestamp64Nano(ts) AS ts_ns FROM collectives
WHERE job = {job:String} AND run = {run:UInt32}
  AND has(arrayZip({ranks:Array(UInt32)}, {comms:Array(UInt64)}), (rank, comm))
  AND op NOT IN ('Send', 'Recv', 'GroupStart', 'GroupEnd')
ORDER BY ts DESC LIMIT {most:UInt32} BY rank, comm
"""

NEWEST_WAITS = """
SELECT rank, toUnixTimestamp64Nano(ts) AS ts_ns, duration_ns FROM launches
WHERE job = {job:String} AND run = {run:UInt32} AND rank IN {ranks:Array(UInt32)}
  AND kind = 'sync' AND NOT in_nccl AND duration_ns >= 0
ORDER BY ts DESC LIMIT {most:UInt32} BY rank
"""

_NCCL_KERNELS = """
    SELECT rank, launch_tid, launch_ts, toUnixTimestamp64Nano(ts) AS begun, begun + duration_ns AS done
    FROM kernel_events
    WHERE job = {job:String} AND run = {run:UInt32} AND kind = 'kernel' AND startsWith(name, 'nccl')
"""

NEWEST_ENDS = f"""
SELECT c.rank AS rank, c.comm AS comm, c.seq AS seq, min(k.begun) AS begun_ns, max(k.done) AS done_ns
FROM
(
  SELECT * FROM
  (
{_NCCL_KERNELS}
  ) WHERE has({{ranks:Array(UInt32)}}, rank)
) AS k
ASOF INNER JOIN
(
  SELECT rank, tid, comm, seq, ts, duration_ns FROM collectives
  WHERE job = {{job:String}} AND run = {{run:UInt32}}
    AND has(arrayZip({{ranks:Array(UInt32)}}, {{comms:Array(UInt64)}}), (rank, comm))
    AND op NOT IN ('Send', 'Recv', 'GroupStart', 'GroupEnd')
  ORDER BY ts DESC LIMIT {{most:UInt32}} BY rank, comm
) AS c ON k.rank = c.rank AND k.launch_tid = c.tid AND k.launch_ts >= c.ts
WHERE k.launch_ts <= addNanoseconds(c.ts, greatest(c.duration_ns, 0))
GROUP BY rank, comm, seq
"""
"""When the kernels of the newest calls of some handles ran: those that were launched inside the call."""

EXTENT = """
SELECT toInt64(toUnixTimestamp(toStartOfMinute(min(first_ts)))) AS first_s,
       toInt64(toUnixTimestamp(max(last_ts)) + intDiv(max(max_ns), 1000000000)) AS last_s,
       toFloat64(sum(n)) AS steps,
       (SELECT toFloat64(avg(collectives)) FROM iterations
        WHERE job = {job:String} AND run = {run:UInt32} AND step IN
          (SELECT step FROM iteration_rollup WHERE job = {job:String} AND run = {run:UInt32}
           ORDER BY step DESC LIMIT 1 BY step LIMIT 2)) AS calls
FROM iteration_rollup WHERE job = {job:String} AND run = {run:UInt32}
"""
"""When a run was, s, how many steps its ranks made together, and how many collective calls are in one of them."""

SPANNING = _query(f"""
SELECT comm_group, groupUniqArray(host) AS hosts, min(rank) AS first_rank
FROM
(
{_OF_ALL_HOSTS}
)
GROUP BY comm_group
HAVING length(hosts) > 1
ORDER BY comm_group
""")
"""Communicators that span hosts."""

_MINUTES = "toStartOfMinute({}) IN (SELECT toDateTime(arrayJoin({{minutes:Array(UInt32)}}), 'UTC'))"
_IN_MINUTES = _MINUTES.format("ts")
"""Calls are ordered by the minute: others are not read."""

CALL_RATES = _query(f"""
SELECT m.comm_group AS comm_group, count() AS calls
FROM
(
  SELECT rank, comm FROM collectives
  WHERE job = {{job:String}} AND run = {{run:UInt32}} AND {_IN_MINUTES} AND rank IN {{firsts:Array(UInt32)}}
    AND op IN {{ops:Array(String)}}
) AS c
INNER JOIN
(
  SELECT * FROM
  (
{_OF_ALL_HOSTS}
  ) WHERE comm_group IN {{groups:Array(UInt64)}} ORDER BY rank LIMIT 1 BY comm_group
) AS m ON c.rank = m.rank AND c.comm = m.comm
GROUP BY comm_group
ORDER BY comm_group
""")
"""How many synchronising calls the first rank of some communicators made in some minutes."""

_NEWEST_STEPS = """
      (SELECT step FROM iteration_rollup WHERE job = {job:String} AND run = {run:UInt32}
       GROUP BY step ORDER BY min(first_ts) DESC LIMIT {most:UInt32})
      UNION ALL
      (SELECT step FROM iteration_rollup WHERE job = {job:String} AND run = {run:UInt32}
       GROUP BY step ORDER BY max(last_ts) DESC LIMIT {most:UInt32})
""".strip("\n")

SHORTEST_CALLS = _query(f"""
SELECT comm_group, toFloat64(quantileExactLow(0.5)(shortest)) AS shortest_ns
FROM
(
  SELECT m.comm_group AS comm_group, g.step AS step, min(g.shortest_ns) AS shortest
  FROM
  (
    SELECT rank, step, comm, shortest_ns FROM gpu_collectives
    WHERE job = {{job:String}} AND run = {{run:UInt32}} AND op IN {{ops:Array(String)}} AND step IN
    (
{_NEWEST_STEPS}
    )
  ) AS g
  INNER JOIN
  (
    SELECT * FROM
    (
{_OF_ALL_HOSTS}
    ) WHERE comm_group IN {{groups:Array(UInt64)}}
  ) AS m ON g.rank = m.rank AND g.comm = m.comm
  GROUP BY comm_group, step
)
GROUP BY comm_group
ORDER BY comm_group
""")
"""How long the shortest collective of some communicators takes on their GPUs, in the newest steps."""

WAITED_FOR = _query(f"""
SELECT DISTINCT rank FROM
(
  SELECT m.comm_group AS comm_group, m.host AS host, m.rank AS rank, g.took_ns AS took_ns
  FROM
  (
    SELECT * FROM
    (
{_OF_ALL_HOSTS}
    ) WHERE comm_group IN {{groups:Array(UInt64)}}
  ) AS m
  LEFT JOIN
  (
    SELECT rank, comm, avg(shortest_ns) AS took_ns FROM gpu_collectives
    WHERE job = {{job:String}} AND run = {{run:UInt32}} AND op IN {{ops:Array(String)}} AND step IN
    (
{_NEWEST_STEPS}
    )
    GROUP BY rank, comm
  ) AS g ON m.rank = g.rank AND m.comm = g.comm
  ORDER BY took_ns, rank LIMIT {{members:UInt32}} BY comm_group, host
)
ORDER BY rank
""")
"""The ranks of some communicators that came last to them on each host, in the newest steps: their GPUs waited least. A
rank of which that is not known may be one of them."""

_SAMPLED = f"""
WITH
  members AS
  (
    SELECT rank, node, comm, comm_group, seq_offset,
           transform(comm_group, {{groups:Array(UInt64)}}, {{strides:Array(UInt32)}}, toUInt32(1)) AS stride
    FROM
    (
{_OF_ALL_HOSTS}
    ) WHERE comm_group IN {{groups:Array(UInt64)}}
      AND (empty({{chosen:Array(UInt32)}}) OR rank IN (SELECT arrayJoin({{chosen:Array(UInt32)}})))
    ORDER BY rank LIMIT {{members:UInt32}} BY comm_group, host
  ),
  sampled AS
  (
    SELECT c.rank AS rank, m.node AS node, c.tid AS tid, m.comm_group AS comm_group,
           toInt64(c.seq) + m.seq_offset AS aligned_seq, c.ts AS ts, c.duration_ns AS duration_ns
    FROM
    (
      SELECT rank, tid, comm, seq, ts, duration_ns FROM collectives
      WHERE job = {{job:String}} AND run = {{run:UInt32}} AND {_IN_MINUTES} AND rank IN (SELECT rank FROM members)
        AND comm IN (SELECT comm FROM members) AND op IN {{ops:Array(String)}}
    ) AS c
    LEFT ANY JOIN members AS m ON c.rank = m.rank AND c.comm = m.comm
    WHERE m.stride > 0 AND cityHash64(aligned_seq) % greatest(m.stride, 1) = 0
  )
"""

_BY_HOST = """
SELECT comm_group, aligned_seq, node, max(entry) AS entry_ns, min(done) AS end_ns, min(done - entry) AS took_ns
FROM calls
GROUP BY comm_group, aligned_seq, node
"""

GPU_CALLS = _query(
    _SAMPLED.rstrip()
    + f""",
  calls AS
  (
    SELECT c.comm_group AS comm_group, c.aligned_seq AS aligned_seq, any(c.node) AS node, c.rank AS rank,
           min(k.begun) AS entry, max(k.done) AS done
    FROM
    (
{_NCCL_KERNELS.rstrip()}
      AND rank IN (SELECT rank FROM members) AND {_MINUTES.format("launch_ts")}
    ) AS k
    ASOF INNER JOIN sampled AS c ON k.rank = c.rank AND k.launch_tid = c.tid AND k.launch_ts >= c.ts
    WHERE k.launch_ts <= addNanoseconds(c.ts, greatest(c.duration_ns, 0))
    GROUP BY comm_group, aligned_seq, rank
  )
"""
    + _BY_HOST
)
"""When each host's ranks entered and left collectives on their GPUs, by NCCL's kernels. Hosts are the number of their
first rank, and rows in no order."""

WAITED_CALLS = _query(
    _SAMPLED.rstrip()
    + f""",
  syncs AS
  (
    SELECT rank, ts, duration_ns FROM launches
    WHERE job = {{job:String}} AND run = {{run:UInt32}} AND {_IN_MINUTES} AND rank IN (SELECT rank FROM members)
      AND kind = 'sync' AND NOT in_nccl AND duration_ns >= 0
  ),"""
    + """
  waits AS
  (
    SELECT l.rank AS rank, l.ts AS ts, l.duration_ns AS duration_ns
    FROM
    (
      SELECT rank, ts, duration_ns FROM syncs
    ) AS l
    INNER JOIN
    (
      SELECT rank, quantile(0.9)(duration_ns) AS usual_ns FROM syncs GROUP BY rank
    ) AS u ON l.rank = u.rank
    WHERE 10 * l.duration_ns >= u.usual_ns
  ),
  calls AS
  (
    SELECT c.comm_group AS comm_group, c.aligned_seq AS aligned_seq, c.node AS node,
           toUnixTimestamp64Nano(c.ts) AS entry,
           toUnixTimestamp64Nano(w.ts) + w.duration_ns AS done
    FROM sampled AS c
    ASOF INNER JOIN waits AS w ON c.rank = w.rank AND c.ts <= w.ts
  )
"""
    + _BY_HOST
)
"""The same by the CPU: from the call to the end of the first wait for the GPU after it that was a long one."""

STEPS_OF_CALLS = _query(
    _SAMPLED
    + """
SELECT c.comm_group AS comm_group, c.aligned_seq AS aligned_seq, c.node AS node,
       toInt64(argMin(i.step, c.rank)) AS step
FROM sampled AS c
ASOF INNER JOIN
(
  SELECT rank, ts, step, addNanoseconds(ts, duration_ns) AS ts_end FROM iterations
  WHERE job = {job:String} AND run = {run:UInt32} AND rank IN (SELECT rank FROM members) AND step IN
    (SELECT step FROM iteration_rollup WHERE job = {job:String} AND run = {run:UInt32}
       AND (has({minutes:Array(UInt32)}, toUInt32(toUnixTimestamp(toStartOfMinute(first_ts))))
         OR has({minutes:Array(UInt32)}, toUInt32(toUnixTimestamp(toStartOfMinute(last_ts))))
         OR has({minutes:Array(UInt32)}, toUInt32(toUnixTimestamp(toStartOfMinute(addNanoseconds(last_ts, max_ns)))))
         OR max_ns > 60000000000))
) AS i ON c.rank = i.rank AND c.ts > i.ts
WHERE c.ts <= i.ts_end
GROUP BY comm_group, aligned_seq, node
"""
)
"""The step that each host counts a call to."""

CLOCKS = _query("""
SELECT host, ts, at, offset_ns, drift_ppb, error_ns FROM clocks
WHERE job = {job:String} AND run = {run:UInt32}
  AND version = (SELECT max(version) FROM clocks WHERE job = {job:String} AND run = {run:UInt32})
ORDER BY host, ts
""")
"""What is known of the clocks of a job's hosts."""

USUAL_STEP = """
SELECT toFloat64(median(duration_ns)) AS step_ns FROM iterations WHERE job = {job:String} AND run = {run:UInt32}
"""


def _literal(value: Any) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_literal(item) for item in value) + "]"
    return str(int(value))


_GIVEN = """
  clocks AS
  (
    SELECT {job:String} AS job, {run:UInt32} AS run, row.1 AS host, fromUnixTimestamp64Nano(row.2, 'UTC') AS ts,
           fromUnixTimestamp64Nano(row.3, 'UTC') AS at, row.4 AS offset_ns, row.5 AS drift_ppb,
           row.6 AS error_ns, 1 AS version
    FROM
    (
      SELECT arrayJoin(arrayZip({clock_host:Array(String)}, {clock_ts:Array(Int64)}, {clock_at:Array(Int64)},
                                {clock_offset:Array(Int64)}, {clock_drift:Array(Int64)}, {clock_error:Array(Int64)}))
             AS row
    )
  ),
  step_shifts AS
  (
    SELECT {job:String} AS job, {run:UInt32} AS run, row.1 AS host, row.2 AS shift, row.3 AS error, 1 AS version
    FROM
    (
      SELECT arrayJoin(arrayZip({shift_host:Array(String)}, {shift:Array(Int64)}, {shift_error:Array(String)})) AS row
    )
  ),
  group_joins AS
  (
    SELECT {job:String} AS job, {run:UInt32} AS run, row.1 AS host, row.2 AS comm_group, row.3 AS joined_group,
           row.4 AS seq_shift, '' AS error, 1 AS version
    FROM
    (
      SELECT arrayJoin(arrayZip({join_host:Array(String)}, {join_from:Array(UInt64)}, {join_to:Array(UInt64)},
                                {join_shift:Array(Int64)})) AS row
    )
  )"""
"""The estimates as tables that stand before those of the store."""


@functools.cache
def _views() -> dict[str, str]:
    """What the views ``*_across`` are, as the schema files say."""
    found = (
        re.match(r"CREATE (?:OR REPLACE VIEW|VIEW IF NOT EXISTS) (\w+_across)\s+AS (.*)\nCOMMENT '", one, re.DOTALL)
        for file in sorted(resource_dir("schemas").glob("*.sql"))
        for one in split_statements(file.read_text(encoding="utf-8"))
    )
    return {match[1]: match[2] for match in found if match}


def across(text: str, how: str) -> str:
    """The form of a query for several hosts.

    Args:
        text: One of this file's queries; others are returned as they are.
        how: ``"stored"``, or ``"given"``: the estimates are in the parameters.
    """
    form = _FORMS.get(text, text)
    needed = [name for name in _views() if re.search(rf"\b{name}\b", form)]
    if how == "stored" or not (needed or re.search(r"\b(clocks|step_shifts)\b", form)):
        return form
    parts = [_GIVEN.strip(), *(f"{name} AS\n  (\n{_views()[name]}\n  )" for name in needed)]
    head = "WITH\n  " + ",\n  ".join(parts)
    body = form.strip()
    return head + (",\n  " + body.removeprefix("WITH").lstrip() if body.startswith("WITH") else "\n" + body)


def of_job(query: Query) -> Query:
    """Runs the form of each query that the parameters ask for."""

    def run(text: str, params: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
        if "across" not in params:
            return query(text, params)
        chosen = across(text, params["across"])
        return query(chosen, {name: value for name, value in params.items() if name != "across"})

    return run


def remembered(query: Query) -> Query:
    """Runs those queries once that several parts of a diagnosis ask for, and whose answer is the same to all."""
    answers: dict[str, dict[str, npt.NDArray[Any]]] = {}

    def run(text: str, params: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
        if text not in (GROUPS, STATES, LAST_LOOK):
            return query(text, params)
        if text not in answers:
            answers[text] = query(text, params)
        return answers[text]

    return run


def shown(sql: str, params: Mapping[str, Any]) -> str:
    """``sql`` with its parameters' values in place, for people to run again."""
    if "across" in params:
        sql = across(sql, params["across"])
    filled = re.sub(r"\{(\w+):[^}]*\}", lambda match: _literal(params[match[1]]), sql)
    return filled.strip()


DUMPS = """
SELECT rank, host, state, toUnixTimestamp64Nano(written) AS written_ns FROM dumps FINAL
WHERE job = {job:String} AND run = {run:UInt32} ORDER BY rank
"""
"""Which ranks a dump was imported of."""

_DUMPED_CALLS = """
SELECT rank, comm_group, record, seq, op, peer, p2p, state, retired, dtype, inputs, outputs,
       toUnixTimestamp64Nano(ts) AS created_ns
FROM dumped_calls
WHERE job = {job:String} AND run = {run:UInt32}
"""

DUMPED_PENDING = f"{_DUMPED_CALLS}  AND state != 'completed' ORDER BY rank, record\n"
"""Calls that had not completed when their rank was dumped."""

DUMPED_SAME = f"""{_DUMPED_CALLS}  AND state = 'completed' AND NOT p2p AND (comm_group, seq) IN
(
  SELECT comm_group, seq FROM dumped_calls
  WHERE job = {{job:String}} AND run = {{run:UInt32}} AND state != 'completed' AND NOT p2p
)
ORDER BY rank, record
"""
"""Calls that completed on their rank and not on another one."""

DUMPED_GROUPS = """
SELECT g.comm_group AS comm_group, any(g.name) AS name, any(g.description) AS description, any(p.ranks) AS ranks
FROM (SELECT * FROM dumped_groups FINAL WHERE job = {job:String} AND run = {run:UInt32}) AS g
LEFT ANY JOIN
(
  SELECT comm_group, ranks FROM parallel_groups FINAL WHERE job = {job:String} AND run = {run:UInt32}
) AS p ON g.comm_group = p.comm_group
GROUP BY comm_group ORDER BY comm_group
"""
"""The process groups of dumps, with their global ranks (empty: not known)."""

DUMPED_PROGRESS = """
SELECT g.rank AS rank, g.comm_group AS comm_group, if(c.calls = 0, -1, c.issued) AS issued, g.enqueued AS enqueued,
       g.completed AS completed, g.transfers AS transfers, c.collectives AS collectives
FROM (SELECT * FROM dumped_groups FINAL WHERE job = {job:String} AND run = {run:UInt32}) AS g
LEFT ANY JOIN
(
  SELECT rank, comm_group, max(seq) AS issued, count() AS calls, countIf(NOT p2p) AS collectives FROM dumped_calls
  WHERE job = {job:String} AND run = {run:UInt32} GROUP BY rank, comm_group
) AS c ON g.rank = c.rank AND g.comm_group = c.comm_group
ORDER BY rank, comm_group
"""
"""The last collective that each rank made in each of its process groups, by its calls and by the group's own count."""

DUMPED_LAST = """
SELECT rank, max(if(state = 'completed', record, -1)) AS completed, max(toUnixTimestamp64Nano(ts)) AS last_ns
FROM dumped_calls WHERE job = {job:String} AND run = {run:UInt32} GROUP BY rank ORDER BY rank
"""
"""The last call that each rank's GPU completed, and when its CPU made its last one."""

DUMPED_CALL = """
SELECT rank, op, state, ts, inputs, outputs, dtype, frames FROM dumped_calls
WHERE job = {job:String} AND run = {run:UInt32} AND comm_group = {group:UInt64}
  AND (seq = {seq:Int64} OR {seq:Int64} < 0) AND state != 'completed'
ORDER BY rank
"""
"""A collective as the ranks called it; with -1 for its number, all pending calls of its process group."""

DUMPED_RANK = """
SELECT record, name, seq, state, ts, frames FROM dumped_calls
WHERE job = {job:String} AND run = {run:UInt32} AND rank = {rank:UInt32} ORDER BY record DESC LIMIT 8
"""
"""The last calls of a rank in its dump."""
