"""Imported dumps of NCCL's state."""

from __future__ import annotations

DUMPS = """
SELECT d.rank AS rank, d.host AS host, d.source AS source, d.state AS state,
       toUnixTimestamp64Nano(d.written) AS written_ns, r.pid AS pid
FROM (SELECT * FROM dumps FINAL WHERE job = {job:String} AND run = {run:UInt32}) AS d
LEFT ANY JOIN
(
  SELECT rank, pid FROM ranks FINAL WHERE job = {job:String} AND run = {run:UInt32}
) AS r ON d.rank = r.rank
ORDER BY rank
"""
"""Which ranks a dump was imported of, and the process of each (0: not known)."""

_DUMPED_CALLS = """
SELECT rank, comm_group, record, seq, op, peer, p2p, state, retired, dtype, inputs, outputs,
       toUnixTimestamp64Nano(ts) AS created_ns, timeout_ms
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

DUMPED_ROOTED = """
SELECT comm_group, groupUniqArray(seq) AS numbers FROM dumped_calls
WHERE job = {job:String} AND run = {run:UInt32} AND state = 'completed' AND NOT p2p AND op IN {ops:Array(String)}
GROUP BY comm_group ORDER BY comm_group
"""
"""Numbers of completed calls of some kinds, by process group."""

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
