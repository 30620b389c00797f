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

_ONE_HOST = {
    "$iterations": "iterations",
    "$phases": "phases",
    "$gpuphases": "gpu_phases",
    "$kerneltimes": "kernel_times",
    "$collectives": "collectives_aligned",
    "$communicators": "communicators FINAL",
    "$known": "error = ''",
    "$arrival": "toUnixTimestamp64Nano(ts)",
    "$numbered": "",
    "$side": "",
    "$group": "w.comm_group",
    "$aside": "",
}
_SEVERAL_HOSTS = {
    "$iterations": "iterations_across",
    "$phases": "phases_across",
    "$gpuphases": "gpu_phases_across",
    "$kerneltimes": "kernel_times_across",
    "$collectives": "collectives_across",
    "$communicators": "collectives_across",
    "$known": "aligned",
    "$arrival": "at_ns",
    "$numbered": "AND rank IN (SELECT rank FROM iterations_across WHERE job = {job:String} AND run = {run:UInt32})",
    # Clocks that are too inexact are worth nothing: such a host's ranks are compared with one another.
    "$side": " if(cluster = '' AND clock_error_ns > {apart_ns:Int64}, toString(host), cluster) AS side,",
    "$group": "cityHash64(w.comm_group, w.side)",
    "$aside": ", side",
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
    "$iterations WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}"
)

STEPS = _query(
    f"""
SELECT step, toFloat64(median(duration_ns)) AS duration_ns, toFloat64(median(confidence)) AS confidence,
       uniqExact(rank) AS ranks
FROM {_ITERATIONS}
GROUP BY step ORDER BY step
"""
)
"""The job's step times: the median over ranks."""

_LATE = f"""
WITH
  (SELECT min(ts) FROM {_ITERATIONS}) AS begin,
  (SELECT max(addNanoseconds(ts, duration_ns)) FROM {_ITERATIONS}) AS end,
  calls AS
  (
    SELECT comm_group, aligned_seq,$side groupArray(rank) AS ranks, groupArray($arrival) AS times,
           min(rank) AS ref_rank, argMin(ts, rank) AS ref_ts
    FROM $collectives
    WHERE job = {{job:String}} AND run = {{run:UInt32}} AND aligned AND ts > begin AND ts <= end
      AND op NOT IN ('Send', 'Recv', 'GroupStart', 'GroupEnd') $numbered
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

LATENESS = _query(
    _LATE
    + """
SELECT comm_group, rank, step, toFloat64(max(late_ns)) AS peak_ns, toFloat64(argMin(late_ns, aligned_seq)) AS first_ns,
       toFloat64(argMax(late_ns, aligned_seq)) AS last_ns
FROM late
GROUP BY comm_group, rank, step
ORDER BY step, rank, comm_group
"""
)
"""How late each rank came to the collectives of each step, against the median rank: most, first and last call."""

LEAD = _query(
    _LATE
    + """
SELECT step, toFloat64(maxIf(late_ns, has({ranks:Array(UInt32)}, rank))) AS suspects_ns,
       toFloat64(maxIf(late_ns, NOT has({ranks:Array(UInt32)}, rank))) AS others_ns
FROM late
GROUP BY step
HAVING countIf(has({ranks:Array(UInt32)}, rank)) > 0 AND countIf(NOT has({ranks:Array(UInt32)}, rank)) > 0
ORDER BY step
"""
)
"""The latest of some ranks and the latest of all others, by step: the difference is what the others lose."""

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
        AND has({{ranks:Array(UInt32)}}, rank)
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
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}
  AND has({ranks:Array(UInt32)}, rank)
ORDER BY step, rank, phase
"""
)
"""Where some ranks' steps went, by phase."""

GPU_PHASE_TIME = _query(
    """
SELECT rank, step, phase, toFloat64(sum(duration_ns)) AS duration_ns FROM $gpuphases
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}
  AND has({ranks:Array(UInt32)}, rank) AND phase IN ('forward', 'backward', 'optimizer', 'compute')
GROUP BY rank, step, phase
ORDER BY step, rank, phase
"""
)
"""How long kernels computed on some ranks' GPUs, by step and phase."""

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
  AND has({ranks:Array(UInt32)}, s.rank) AND g.kernel != '' AND NOT startsWith(g.kernel, 'nccl')
GROUP BY kernel_id, kernel, rank
ORDER BY kernel_id, rank
"""
)
"""Launches and time of each kernel that does not communicate, by rank, from the summaries."""

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
SELECT
  (SELECT toUnixTimestamp64Milli(max(ts)) * 1000000 FROM coverage WHERE job = {job:String} AND run = {run:UInt32})
    AS looked_ns,
  (SELECT max(toUnixTimestamp64Nano(ts) + toInt64(duration_ns)) FROM iterations
    WHERE job = {job:String} AND run = {run:UInt32}) AS stepped_ns,
  greatest(
    (SELECT max(toUnixTimestamp64Nano(ts)) FROM launches WHERE job = {job:String} AND run = {run:UInt32}),
    (SELECT max(toUnixTimestamp64Nano(ts)) FROM collectives WHERE job = {job:String} AND run = {run:UInt32})
  ) AS called_ns,
  toUnixTimestamp64Nano(now64(9)) AS now_ns
"""
"""When Argus last looked at the job, when a step last ended, when a call was last made (0: never), and now."""

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
WITH
  (
    SELECT comm_group FROM $communicators WHERE job = {job:String} AND run = {run:UInt32} AND $known
    GROUP BY comm_group ORDER BY uniqExact(rank) DESC, comm_group LIMIT 1
  ) AS widest
SELECT rank, toInt64(max(aligned_seq)) AS seq, argMax(op, aligned_seq) AS call
FROM $collectives
WHERE job = {job:String} AND run = {run:UInt32} AND aligned AND comm_group = widest
  AND op NOT IN ('Send', 'Recv', 'GroupStart', 'GroupEnd')
GROUP BY rank ORDER BY rank
"""
)
"""The last collective that each rank called on the widest communicator."""

COVERAGE = """
SELECT counter, sum(value) AS value FROM coverage FINAL
WHERE job = {job:String} AND run = {run:UInt32} AND loss GROUP BY counter ORDER BY counter
"""

SPAN = _query(
    """
SELECT min(step) AS first, max(step) AS last, count() AS n FROM $iterations
WHERE job = {job:String} AND run = {run:UInt32}
"""
)

SLOWER = _query(
    f"""
SELECT rank, toFloat64(medianIf(duration_ns, step < {{onset:UInt32}})) AS before_ns,
       toFloat64(medianIf(duration_ns, step >= {{onset:UInt32}})) AS after_ns
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
SELECT uniqExactIf(host, mono_offset_ns != 0) AS hosts FROM jobs WHERE job = {job:String} AND run = {run:UInt32}
"""
"""Hosts with clocks of their own: times that were imported or simulated are taken as they are."""

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
WHERE job = {job:String} AND run = {run:UInt32} AND has({ranks:Array(UInt32)}, rank)
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

SPANNING = _query("""
SELECT comm_group, uniqExact(host) AS hosts, count() AS calls FROM $collectives
WHERE job = {job:String} AND run = {run:UInt32} AND aligned AND has({ops:Array(String)}, op)
GROUP BY comm_group
HAVING hosts > 1
ORDER BY comm_group
""")
"""Communicators that span hosts."""

_SAMPLED = """
WITH
  sampled AS
  (
    SELECT rank, host, tid, comm_group, aligned_seq, ts, duration_ns FROM $collectives
    WHERE job = {job:String} AND run = {run:UInt32} AND aligned AND has({groups:Array(UInt64)}, comm_group)
      AND has({ops:Array(String)}, op) AND cityHash64(aligned_seq) % {stride:UInt32} = 0
  )
"""

_BY_HOST = """
SELECT comm_group, aligned_seq, host, max(entry) AS entry_ns, min(done) AS end_ns, min(done - entry) AS took_ns
FROM calls
GROUP BY comm_group, aligned_seq, host
ORDER BY comm_group, aligned_seq, host
"""

GPU_CALLS = _query(
    _SAMPLED.rstrip()
    + f""",
  calls AS
  (
    SELECT c.comm_group AS comm_group, c.aligned_seq AS aligned_seq, c.host AS host, c.rank AS rank,
           min(k.begun) AS entry, max(k.done) AS done
    FROM
    (
{_NCCL_KERNELS}
    ) AS k
    ASOF INNER JOIN sampled AS c ON k.rank = c.rank AND k.launch_tid = c.tid AND k.launch_ts >= c.ts
    WHERE k.launch_ts <= addNanoseconds(c.ts, greatest(c.duration_ns, 0))
    GROUP BY comm_group, aligned_seq, host, rank
  )
"""
    + _BY_HOST
)
"""When each host's ranks entered and left collectives on their GPUs, by NCCL's kernels."""

WAITED_CALLS = _query(
    _SAMPLED.rstrip()
    + """,
  waits AS
  (
    SELECT l.rank AS rank, l.ts AS ts, l.duration_ns AS duration_ns
    FROM
    (
      SELECT rank, ts, duration_ns FROM launches
      WHERE job = {job:String} AND run = {run:UInt32} AND kind = 'sync' AND NOT in_nccl AND duration_ns >= 0
    ) AS l
    INNER JOIN
    (
      SELECT rank, quantile(0.9)(duration_ns) AS usual_ns FROM launches
      WHERE job = {job:String} AND run = {run:UInt32} AND kind = 'sync' AND NOT in_nccl AND duration_ns >= 0
      GROUP BY rank
    ) AS u ON l.rank = u.rank
    WHERE 10 * l.duration_ns >= u.usual_ns
  ),
  calls AS
  (
    SELECT c.comm_group AS comm_group, c.aligned_seq AS aligned_seq, c.host AS host,
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
SELECT c.comm_group AS comm_group, c.aligned_seq AS aligned_seq, c.host AS host,
       toInt64(argMin(i.step, c.rank)) AS step
FROM sampled AS c
ASOF INNER JOIN
(
  SELECT rank, ts, step, addNanoseconds(ts, duration_ns) AS ts_end FROM iterations
  WHERE job = {job:String} AND run = {run:UInt32}
) AS i ON c.rank = i.rank AND c.ts > i.ts
WHERE c.ts <= i.ts_end
GROUP BY comm_group, aligned_seq, host
ORDER BY comm_group, aligned_seq, host
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
    text = (resource_dir("schemas") / "006_clocks.sql").read_text(encoding="utf-8")
    found = (
        re.match(r"CREATE VIEW IF NOT EXISTS (\w+)\s+AS (.*)\nCOMMENT '", one, re.DOTALL)
        for one in split_statements(text)
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
    if how == "stored" or not (needed or re.search(r"\bclocks\b", form)):
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


def shown(sql: str, params: Mapping[str, Any]) -> str:
    """``sql`` with its parameters' values in place, for people to run again."""
    if "across" in params:
        sql = across(sql, params["across"])
    filled = re.sub(r"\{(\w+):[^}]*\}", lambda match: _literal(params[match[1]]), sql)
    return filled.strip()
