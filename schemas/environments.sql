-- What each rank ran on and with, and how that differs between runs and ranks.

CREATE TABLE IF NOT EXISTS environments
(
  job LowCardinality(String) COMMENT 'Job name',
  run UInt32 COMMENT 'Tracing session',
  rank UInt32 COMMENT 'Global rank',
  host LowCardinality(String) COMMENT 'Node',
  pid UInt32 COMMENT 'Process id on the host; 0: of an imported or simulated run',
  ts DateTime64(9, 'UTC') COMMENT 'When it was read',
  facts Map(String, String) COMMENT 'By name: gpu.model, torch.version, env.NCCL_ALGO … (docs/sql.md lists them). unreadable: what could not be read; what is in neither is not set',
  digest UInt64 COMMENT 'The same wherever all facts are that must be alike on every rank; 0: nothing is known',
  version UInt64 COMMENT 'Row version: the highest wins',
  stored DateTime('UTC') DEFAULT now() COMMENT 'When the row was stored: its age decides when it expires'
) ENGINE = ReplacingMergeTree(version) ORDER BY (job, run, rank, host, pid)
TTL stored + {{ttl}}
COMMENT 'What each process of a run ran on and with: GPU, driver, libraries, kernel, CPUs, network cards, limits, settings';

CREATE OR REPLACE VIEW environment_facts
AS SELECT job, run, rank, host, pair.1 AS fact, pair.2 AS value
FROM (SELECT job, run, rank, host, arrayJoin(facts) AS pair FROM environments FINAL)
COMMENT 'environments, a row for each rank and fact';

CREATE OR REPLACE VIEW environment_differences
AS SELECT f.job AS job, f.run AS run, f.fact AS fact, f.value AS value, count() AS ranks,
  arraySlice(arraySort(groupArray(f.rank)), 1, 64) AS some_ranks, arraySlice(arraySort(groupUniqArray(f.host)), 1, 16) AS some_hosts
FROM environment_facts AS f
INNER JOIN
(
  SELECT job, run, fact, uniqExact(value) AS values, count() AS has FROM environment_facts GROUP BY job, run, fact
) AS t ON f.job = t.job AND f.run = t.run AND f.fact = t.fact
INNER JOIN (SELECT job, run, count() AS processes FROM environments FINAL GROUP BY job, run) AS p ON f.job = p.job AND f.run = p.run
WHERE t.values > 1 OR t.has < p.processes
GROUP BY job, run, fact, value
COMMENT 'Facts that are not alike on all ranks of a run. Ranks on which one is not set have no row';

CREATE OR REPLACE VIEW environment_changes
AS SELECT job, run, before_run, fact, earlier[fact] AS before, facts[fact] AS after, has[fact] AS ranks
FROM
(
  SELECT job, run, facts, has, lagInFrame(run, 1, 0) OVER w AS before_run, lagInFrame(facts) OVER w AS earlier,
    arrayJoin(arrayDistinct(arrayConcat(mapKeys(facts), mapKeys(earlier)))) AS fact,
    multiIf(startsWith(fact, 'cgroup.') OR fact = 'container.id', 'cgroup', startsWith(fact, 'env.'), 'settings',
      endsWith(fact, '.version') OR fact IN ('gpu.cuda', 'gpu.driver'), 'versions', fact) AS read_with,
    if(match(fact, '^(env|numa|cgroup|container|git|nccl|cudnn|torch|python)[.]|^gpu[.](cuda|driver)$|^command$'), 'process', 'node') AS read_of,
    splitByRegexp(',| [|] ', facts['unreadable']) AS unread, splitByRegexp(',| [|] ', earlier['unreadable']) AS unread_before
  FROM
  (
    SELECT job, run, mapFromArrays(groupArray(fact), groupArray(value)) AS facts, mapFromArrays(groupArray(fact), groupArray(ranks)) AS has
    FROM
    (
      SELECT job, run, fact, arrayStringConcat(arraySlice(arraySort(groupUniqArray(17)(value)), 1, 16), ' | ') AS value, uniqExact(rank) AS ranks
      FROM environment_facts GROUP BY job, run, fact
    )
    GROUP BY job, run
  )
  WINDOW w AS (PARTITION BY job ORDER BY run ROWS BETWEEN 1 PRECEDING AND CURRENT ROW)
)
WHERE before_run > 0 AND facts[fact] != earlier[fact]
  AND NOT (after = '' AND hasAny(unread, [fact, read_with, read_of]))
  AND NOT (before = '' AND hasAny(unread_before, [fact, read_with, read_of]))
  AND fact NOT IN ('host.boot', 'container.id', 'env.CUDA_VISIBLE_DEVICES', 'env.NVIDIA_VISIBLE_DEVICES', 'numa.cpus', 'numa.memory', 'unreadable')
COMMENT 'What of the environment changed from a job''s run to its next, by fact, and how many ranks have it now; values of several ranks are joined by |. Empty: not set. What could not be read in one of the two is left out';
