"""The environment: what the job ran on and with, as far as it is stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from argus.model.text import counted
from argus.model.units import listed, rank_text
from argus.report.arrays import Arrays
from argus.report.look import Look, absent, bounded, fact, panel
from argus.report.panel import Column, Fact, Facts, Panel, Table

ID = "environment"
TITLE = "Environment"

SHOWN = 40
LISTED = 50
CHANGES = 12

_SESSIONS = """
SELECT argus_version, launcher, max(world_size) AS world_size, uniqExact(host) AS hosts, max(peak_flops) AS peak_flops,
       max(step_flops) AS step_flops
FROM jobs FINAL WHERE job = {job:String} AND run = {run:UInt32}
GROUP BY argus_version, launcher ORDER BY hosts DESC
"""
_PROCESSES = """
SELECT exe, command, container != '' AS contained, count() AS processes, uniqExact(rank) AS ranks FROM ranks FINAL
WHERE job = {job:String} AND run = {run:UInt32} AND rank_source != 'parent'
GROUP BY exe, command, contained ORDER BY processes DESC LIMIT 20
"""
_LIBRARIES = """
SELECT arrayJoin(libraries) AS library, uniqExact(rank) AS ranks FROM ranks FINAL
WHERE job = {job:String} AND run = {run:UInt32} AND rank_source != 'parent'
GROUP BY library ORDER BY ranks DESC, library LIMIT 200
"""
_FEATURES = """
SELECT feature, state, reason, count() AS many, arraySlice(arraySort(groupUniqArray(rank)), 1, 64) AS some_ranks
FROM features FINAL WHERE job = {job:String} AND run = {run:UInt32}
GROUP BY feature, state, reason ORDER BY feature, many DESC LIMIT 200
"""
_LAYOUT = """
SELECT dp, pp, tp, sp, vpp, world_size, source FROM parallel_layout FINAL
WHERE job = {job:String} AND run = {run:UInt32}
"""
_DIMENSIONS = """
SELECT dimension, uniqExact(comm_group) AS communicators,
       greatest(max(nranks), toInt32(max(length(ranks)))) AS ranks FROM parallel_groups FINAL
WHERE job = {job:String} AND run = {run:UInt32} GROUP BY dimension ORDER BY dimension
"""
_FACTS = """
SELECT key, value, uniqExact(host) AS hosts, arraySlice(arraySort(groupUniqArray(host)), 1, 8) AS some_hosts FROM
(
  SELECT host, arrayJoin(argMax(facts, ts)) AS pair, pair.1 AS key, pair.2 AS value FROM health
  WHERE host IN (SELECT DISTINCT host FROM ranks WHERE job = {job:String} AND run = {run:UInt32})
  GROUP BY host, check
)
GROUP BY key, value ORDER BY key, hosts DESC LIMIT 500
"""
_RAN_ON = """
SELECT fact, value, count() AS processes, arraySlice(arraySort(groupUniqArray(rank)), 1, 64) AS some_ranks
FROM environment_facts WHERE job = {job:String} AND run = {run:UInt32}
GROUP BY fact, value ORDER BY fact, processes DESC LIMIT 1000
"""
_CHANGED = """
SELECT fact, before, after, before_run FROM environment_changes WHERE job = {job:String} AND run = {run:UInt32}
ORDER BY fact LIMIT 200
"""
_STATES = {"on": "good", "failed": "bad", "ignored": "bad", "waiting": "unknown", "off": ""}


def build(look: Look, arrays: Arrays) -> Panel:
    """Sessions, processes, libraries, features, and what node checks know of versions."""
    facts = [*_changed(look), *_session(look), *_processes(look), *_mesh(look), *_features(look)]
    texts = (
        ("Sessions", _SESSIONS), ("Processes", _PROCESSES), ("Libraries with probes", _LIBRARIES),
        ("What could be observed", _FEATURES), ("Communicators", _DIMENSIONS), ("Versions and settings", _FACTS),
        ("What ranks ran on and with", _RAN_ON), ("Changed since the run before", _CHANGED),
    )  # fmt: skip
    sql = [look.sql(title, text) for title, text in texts]
    if not facts:
        return absent(ID, TITLE, "no session of it is stored", sql=sql)
    view: Facts = {"view": "facts", "facts": facts[:SHOWN]}
    lead = "What the job ran on and with. Of variables only settings of training libraries are recorded."
    return panel(ID, TITLE, lead, [view], table=_settings(look), sql=sql)


def _changed(look: Look) -> list[Fact]:
    """What is not as in the job's run before."""
    rows = look.read(_CHANGED)
    facts = []
    names = ("fact", "before", "after", "before_run")
    for name, before, after, run in zip(*(rows[one].tolist() for one in names), strict=True):
        now, then = (bounded(value, 80) or "not set" for value in (after, before))
        facts.append(fact("changed", f"{bounded(name, 60)}: {now}, in run {int(run)}: {then}"))
    if len(facts) > CHANGES:
        facts[CHANGES - 1 :] = [fact("changed", f"and {len(facts) - CHANGES + 1} more: environment_changes")]
    return facts


def _session(look: Look) -> list[Fact]:
    rows = look.read(_SESSIONS)
    facts = []
    for version, launcher, world, hosts in zip(
        *(rows[name].tolist() for name in ("argus_version", "launcher", "world_size", "hosts")), strict=True
    ):
        facts.append(fact("Argus", f"{version} on {counted(int(hosts), 'host')}"))
        size = f", {counted(int(world), 'rank')} by its own setting" if world else ""
        facts.append(fact("launcher", f"{launcher}{size}"))
    if len(look.ranks):
        hosts = dict.fromkeys(look.place.host.values())
        names = listed(list(hosts), 8)
        facts.append(fact("ranks", f"{counted(len(look.ranks), 'rank')} on {counted(len(hosts), 'host')}: {names}"))
    return facts


def _processes(look: Look) -> list[Fact]:
    rows = look.read(_PROCESSES)
    facts = []
    for exe, command, contained, ranks in zip(
        *(rows[name].tolist() for name in ("exe", "command", "contained", "ranks")), strict=True
    ):
        inside = ", in a container" if contained else ""
        facts.append(fact("command", f"{bounded(command or exe, 300)} ({counted(int(ranks), 'rank')}{inside})"))
    found: Counter[str] = Counter()
    libraries = look.read(_LIBRARIES)
    for path, ranks in zip(libraries["library"].tolist(), libraries["ranks"].tolist(), strict=True):
        found[bounded(PurePosixPath(path).name, 60)] += int(ranks)
    if found:
        names = [f"{name} ({many})" for name, many in found.most_common(16)]
        facts.append(fact("libraries", f"with probes, and in how many ranks: {listed(names, 16)}"))
    elif len(look.ranks):
        facts.append(fact("libraries", "none has probes"))
    return facts[:12]


def _mesh(look: Look) -> list[Fact]:
    facts = []
    rows = look.read(_LAYOUT)
    for dp, pp, tp, sp, vpp in zip(*(rows[name].tolist() for name in ("dp", "pp", "tp", "sp", "vpp")), strict=True):
        facts.append(fact("layout", f"data {dp} x pipeline {pp} x tensor {tp}; sequence {sp}, chunks a stage {vpp}"))
    rows = look.read(_DIMENSIONS)
    groups = [
        f"{what}: {many} of {ranks} rank{'s' * (ranks != 1)} each"
        for what, many, ranks in zip(
            *(rows[name].tolist() for name in ("dimension", "communicators", "ranks")), strict=True
        )
    ]
    if groups:
        facts.append(fact("communicators", "; ".join(groups)))
    return facts


def _features(look: Look) -> list[Fact]:
    rows = look.read(_FEATURES)
    facts = []
    names = ("feature", "state", "reason", "many", "some_ranks")
    for feature, state, reason, many, ranks in zip(*(rows[name].tolist() for name in names), strict=True):
        whose = f"ranks {rank_text(int(rank) for rank in ranks)}" if many > 1 else f"rank {int(ranks[0])}"
        more = f" and {int(many) - len(ranks)} more" if many > len(ranks) else ""
        text = f"{state} ({whose}{more})" + (f": {bounded(reason, 200)}" if reason else "")
        facts.append(fact(str(feature).replace("_", " "), text, _STATES.get(str(state), "")))
    return facts[:16]


def _settings(look: Look) -> Table | None:
    """What ranks ran on and with, then what node checks found; of both, what is not alike comes first."""
    ran, checked = look.read(_RAN_ON), look.read(_FACTS)
    every = _unlike_first(ran, ("fact", "value", "processes", "some_ranks"))
    rows: list[list[str | float | int | None]] = [
        [bounded(name, 60), bounded(value), counted(int(many), "process"), f"rank {rank_text(map(int, ranks))}"]
        for name, value, many, ranks in every
    ]
    rows += [
        [bounded(name, 60), bounded(value), counted(int(many), "node"), bounded(", ".join(hosts), 80)]
        for name, value, many, hosts in _unlike_first(checked, ("key", "value", "hosts", "some_hosts"))
    ]
    if not rows:
        return None
    columns: list[Column] = [
        {"title": "setting", "unit": ""}, {"title": "value", "unit": ""}, {"title": "on", "unit": ""},
        {"title": "which", "unit": ""},
    ]  # fmt: skip
    return {"columns": columns, "rows": rows[:LISTED], "of": len(rows)}


def _unlike_first(rows: Mapping[str, Any], names: tuple[str, ...]) -> list[tuple[Any, ...]]:
    """Rows of settings: those with several values first, of each the commonest value first."""
    every = list(zip(*(rows[name].tolist() for name in names), strict=True))
    values = Counter(one[0] for one in every)
    return sorted(every, key=lambda one: (-values[one[0]], one[0], -one[2]))
