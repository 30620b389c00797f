"""Stores as older versions of the schema left them."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from argus.store import schema_files
from argus.store.cluster import Cluster, render
from argus.store.open import Store
from argus.store.schema import DEFAULT_RAW_TTL, DEFAULT_TTL, _fill
from argus.store.statements import split_statements

LAST = 25
"""Up to this version each was a file of its own, and recorded itself. Those from the next one on recorded a stamp."""

UNCHANGED = {
    1: {"findings": "f63bb56d", "coverage": "0dc1d6c3"},
    3: {"gpu_usage": "0de49e0c", "features": "a8fed950"},
    4: {"stacks": "1142cfd1", "gc_pauses": "0eb1872e"},
    5: {"phases": "ddfcca79", "gpu_steps": "d5547eb9"},
    6: {"clocks": "3f73afd0", "step_shifts": "fa2c3f03", "group_joins": "3a229aba"},
    7: {"kernel_templates": "32532094", "kernel_escapes": "e0312603", "kernel_spikes": "c24d2040"},
    9: {"iteration_rollup": "16e44208", "iteration_rollup_feed": "4518ee7a"},
    10: {"raw_requests": "927b2fc5", "raw_windows": "bb13abf3"},
    11: {"health_figures": "19a12b3c"},
    21: {"signal_coverage": "1b3b0315"},
    24: {"host_usage": "d45a4e20"},
    25: {"dumped_groups": "e1e73b2a", "dumped_calls": "e3b4d2cf"},
    27: {"baselines": "b4ee3197"},
    28: {"host_names": "6029733a"},
}  # fmt: skip
"""Tables that are as each version made them, with the beginning of the SHA-256 of the statement that makes them. Of the
others ``old_tables.sql`` has what they were."""

VIEWS = {2: "launches_by_step", 6: "iterations_across", 7: "kernel_stats", 16: "achieved_flops", 22: "latest_ranks"}
"""Some views of each version. What they were does not matter: an upgrade replaces them."""

_VERSIONS = """CREATE TABLE IF NOT EXISTS schema_migrations
(
  version UInt32 COMMENT 'Number of the file in schemas/',
  name String COMMENT 'Name of the file',
  checksum String COMMENT 'SHA-256 of the file',
  applied DateTime64(3, 'UTC') DEFAULT now64(3) COMMENT 'When it was applied'
) ENGINE = ReplacingMergeTree ORDER BY version
COMMENT 'Which schema files were applied'"""


def make_old_store(store: Store, version: int, *, cluster: Cluster | None = None) -> None:
    """Makes the tables that a version had, in a store without any.

    Args:
        store: An empty store.
        version: 1 to the one before today's.
        cluster: As ``init_schema`` would have made them there.
    """
    values = {"ttl": DEFAULT_TTL, "raw_ttl": DEFAULT_RAW_TTL}
    made = _statements(version)
    with store.lease() as client:
        for statement in made:
            filled = _fill(statement, values)
            for each in [filled] if cluster is None else render(filled, cluster):
                client.command(each)
        for number, name, checksum in _recorded(version, made):
            client.command(
                "INSERT INTO schema_migrations (version, name, checksum) SELECT {v:UInt32}, {n:String}, {c:String}",
                settings={"distributed_foreground_insert": 1},
                parameters={"v": number, "n": name, "c": checksum},
            )


def _recorded(version: int, made: list[str]) -> list[tuple[int, str, str]]:
    if version <= LAST:
        return [(number, f"{number:03d}_what.sql", "of the file") for number in range(1, version + 1)]
    return [(version, "argus 0.1.0", hashlib.sha256("\n".join(sorted(made)).encode()).hexdigest())]


def _statements(version: int) -> list[str]:
    now = {**schema_files.tables(), **schema_files.feeds()}
    old = re.split(r"^-- version (\d+)$", Path(__file__).with_name("old_tables.sql").read_text(), flags=re.MULTILINE)
    changed = {int(number): split_statements(text) for number, text in zip(old[1::2], old[2::2], strict=True)}
    later = {upgrade.version: upgrade.statements for upgrade in schema_files.upgrades() if upgrade.version > LAST}
    made = [_VERSIONS]
    for number in range(1, version + 1):
        for table, digest in UNCHANGED.get(number, {}).items():
            found = hashlib.sha256(now[table].encode()).hexdigest()[:8]
            assert found == digest, f"{table} is not what version {number} made: old_tables.sql needs its old form"
            made.append(now[table])
        made += changed.get(number, [])
        made += later.get(number, [])
        if number in VIEWS:
            made.append(f"CREATE OR REPLACE VIEW {VIEWS[number]} AS SELECT job, run FROM jobs COMMENT 'old'")
    return made
