"""Queries of a diagnosis: in which form they are asked, and with their parameters put in.

Each takes job, run, first and last (steps) as parameters; :func:`runnable_sql` puts the values in, so that what a
verdict cites can be pasted into ``argus sql``.

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

from argus.store import schema_files

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

OF_ALL_HOSTS = f"""
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
{OF_ALL_HOSTS}
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
    "$handles": OF_ALL_HOSTS,
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


def by_hosts(template: str) -> str:
    """The form for one host of a query; notes the other."""
    here = _fill(template, _ONE_HOST)
    _FORMS[here] = _fill(template, _SEVERAL_HOSTS)
    return here


ITERATIONS = (
    "$iterations WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}$near"
)


_UNSAFE = re.compile('["$`\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]')


def quoted(text: str) -> str:
    """A text as SQL has it. Control characters are escapes, since a terminal that a query is pasted into would obey
    them, and what a shell looks for in double quotes is, too."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return "'" + _UNSAFE.sub(_as_bytes, escaped) + "'"


def _as_bytes(match: re.Match[str]) -> str:
    return "".join(f"\\x{byte:02x}" for byte in match[0].encode("utf-8", "replace"))


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_literal(item) for item in value) + "]"
    if isinstance(value, float):
        return repr(float(value))
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
    """The definitions of the views ``*_across``, from the schema files."""
    definitions = (
        re.match(r"CREATE OR REPLACE VIEW (\w+_across)\s+AS (.*)\nCOMMENT '", statement, re.DOTALL)
        for statement in schema_files.statements()
    )
    return {match[1]: match[2] for match in definitions if match}


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


def runnable_sql(sql: str, params: Mapping[str, Any]) -> str:
    """``sql`` with its parameters' values in place, for people to run again."""
    if "across" in params:
        sql = across(sql, params["across"])
    filled = re.sub(r"\{(\w+):[^}]*\}", lambda match: _literal(params[match[1]]), sql)
    return filled.strip()
