"""The trace itself: sessions, losses, hosts, health of nodes, what was observed."""

from __future__ import annotations

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

HOSTS = """
SELECT rank, argMax(host, version) AS host FROM ranks
WHERE job = {job:String} AND run = {run:UInt32} GROUP BY rank ORDER BY rank
"""

SESSIONS = """
SELECT countIf(ended IS NULL) AS open, max(world_size) AS world_size FROM jobs FINAL
WHERE job = {job:String} AND run = {run:UInt32}
"""
"""Tracing sessions (hosts) that have not closed their books, and how many ranks the launcher speaks of."""

COVERAGE = """
SELECT counter, sum(value) AS value FROM coverage FINAL
WHERE job = {job:String} AND run = {run:UInt32} AND loss GROUP BY counter ORDER BY counter
"""

SIGNALS = """
SELECT rank, signal, toUnixTimestamp64Nano(ts) AS ts_ns, toFloat64(seen) AS seen, toInt64(period_ns) AS period_ns,
       reason
FROM signal_coverage FINAL
WHERE job = {job:String} AND run = {run:UInt32}
ORDER BY signal, rank, ts
"""
"""Every change of what is observed of each rank."""

LIBRARIES = """
SELECT rank, max(length(libraries)) AS libraries FROM ranks
WHERE job = {job:String} AND run = {run:UInt32} GROUP BY rank ORDER BY rank
"""
"""How many libraries with probes each rank has loaded."""

ON_CPUS = """
SELECT max(length(libraries)) > 0
       AND (SELECT count() FROM (SELECT 1 FROM launches WHERE job = {job:String} AND run = {run:UInt32} LIMIT 1)) = 0
       AND (SELECT count() FROM (SELECT 1 FROM gpu_usage WHERE job = {job:String} AND run = {run:UInt32} LIMIT 1)) = 0
       AS alone
FROM ranks WHERE job = {job:String} AND run = {run:UInt32}
"""
"""Whether libraries were probed, and no CUDA call nor any time of a GPU is stored."""

RANK_USERS = """
SELECT uid, arraySort(groupUniqArray(host)) AS hosts FROM ranks
WHERE job = {job:String} AND run = {run:UInt32} AND uid >= 0 GROUP BY uid ORDER BY uid
"""

RANKS_APART = """
SELECT uid, job, arraySort(groupUniqArray(host)) AS hosts FROM ranks
WHERE (job = {name:String} OR startsWith(job, concat({name:String}, '#uid'))) AND run = {run:UInt32}
  AND (job = {name:String} OR
    replaceRegexpOne(substring(job, length({name:String}) + 1), '#[0-9]{1,10}$', '') = concat('#uid', toString(uid)))
  AND uid IN (SELECT uid FROM ranks WHERE job = {job:String} AND run = {run:UInt32})
  AND (uid, host) NOT IN (SELECT uid, host FROM ranks WHERE job = {job:String} AND run = {run:UInt32})
GROUP BY uid, job ORDER BY uid, job
"""
"""Ranks of a run's users that other nodes stored under another name of the job: its own, or with the user's number, and
one more where others had that, too."""
