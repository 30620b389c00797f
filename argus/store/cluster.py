"""The tables of one server as those of a cluster: the same statements, rendered.

Every table ``t`` becomes ``t_local`` on each node, replicated within its shard, and ``t``, a Distributed table over
them. Rows go to shards by ``cityHash64(job, rank)``, so that a rank's rows are together and rows that replace one
another meet. Materialised views read and write ``_local`` tables: each shard adds up what it stores. Views read the
Distributed ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LOCAL = "_local"
VERSIONS = "schema_migrations"

_TABLE = re.compile(r"CREATE TABLE IF NOT EXISTS (\w+)")
_ENGINE = re.compile(r"\bENGINE = (\w*MergeTree)(?:\(([^)]*)\))?")
_COMMENT = re.compile(r"\nCOMMENT ('(?:[^'\\]|\\.|'')*')\s*\Z")
_FED = re.compile(r"CREATE MATERIALIZED VIEW IF NOT EXISTS (\w+) TO (\w+)(.*)", re.DOTALL)
_SOURCE = re.compile(r"\nFROM (\w+)")


@dataclass(frozen=True)
class Cluster:
    """Where tables are made.

    Attributes:
        name: The cluster's name in the servers' ``remote_servers``.
        database: The database that holds the tables, the same on every node.
        replicas: Whether tables are replicated and made on all nodes at once (``ON CLUSTER``), which takes Keeper.
            Otherwise they are plain, and are made on the node that is asked: each shard is initialised by itself.
    """

    name: str
    database: str
    replicas: bool = True

    @property
    def everywhere(self) -> str:
        """`` ON CLUSTER …`` for a statement; empty without replicas."""
        return f" ON CLUSTER {_name(self.name)}" if self.replicas else ""


def _name(name: str) -> str:
    return "`" + name.replace("\\", "\\\\").replace("`", "\\`") + "`"


def _text(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def render(statement: str, cluster: Cluster) -> list[str]:
    """The statements that do on a cluster what one of ``schemas/`` does on a server."""
    on = cluster.everywhere
    if table := _TABLE.match(statement):
        return _tables(statement, table.group(1), cluster)
    if fed := _FED.match(statement):
        name, target, rest = fed.groups()
        source = _SOURCE.search(rest)
        assert source, statement
        rest = re.sub(rf"\b{source.group(1)}\b", source.group(1) + LOCAL, rest)
        return [f"CREATE MATERIALIZED VIEW IF NOT EXISTS {name}{on} TO {target}{LOCAL}{rest}"]
    if view := re.match(r"CREATE OR REPLACE VIEW (\w+)", statement):
        return [view.group(0) + on + statement[view.end() :]]
    if altered := re.match(r"ALTER TABLE (\w+)\s+(.*)", statement, re.DOTALL):
        name, change = altered.groups()
        change = change.replace("non_replicated_deduplication_window", "replicated_deduplication_window")
        if not cluster.replicas:
            change = change.replace("replicated_deduplication_window", "non_replicated_deduplication_window")
        if name == VERSIONS and not cluster.replicas:
            tables = [name]
        elif re.match(r"MODIFY (SETTING|TTL|COLUMN \w+ CODEC)|ADD INDEX", change):
            tables = [name + LOCAL]
        else:
            tables = [name + LOCAL, name]
        return [f"ALTER TABLE {table}{on} {change}" for table in tables]
    if statement.startswith("INSERT INTO"):
        return []  # what an older schema had stored: there is none, clusters begin with this form
    raise ValueError(f"no cluster form is known of: {statement[:80]}")


def _tables(statement: str, name: str, cluster: Cluster) -> list[str]:
    on, local = cluster.everywhere, name + LOCAL
    if name == VERSIONS and not cluster.replicas:
        return [statement]  # each shard is initialised by itself, and has a state of its own
    made = statement.replace(f"CREATE TABLE IF NOT EXISTS {name}", f"CREATE TABLE IF NOT EXISTS {local}{on}", 1)
    engine = _ENGINE.search(made)
    assert engine, statement
    if cluster.replicas:
        # {shard} and {replica} are macros of each server's configuration, as ClickHouse's documentation has them.
        place = f"'/clickhouse/tables/{{shard}}/{{database}}/{local}', '{{replica}}'"
        arguments = ", ".join(filter(None, [place, engine.group(2)]))
        replicated = f"ENGINE = Replicated{engine.group(1)}({arguments})"
        made = made[: engine.start()] + replicated + made[engine.end() :]
        made = made.replace("non_replicated_deduplication_window", "replicated_deduplication_window")
    columns = statement[: engine.start()]
    key = "0"
    if re.search(r"^\s+job ", columns, re.MULTILINE):
        by = [name for name in ("job", "rank") if re.search(rf"^\s+{name} ", columns, re.MULTILINE)] or ["host"]
        key = f"cityHash64({', '.join(by)})"
    comment = _COMMENT.search(statement)
    spread = (
        f"CREATE TABLE IF NOT EXISTS {name}{on} AS {_name(cluster.database)}.{local}"
        f" ENGINE = Distributed({_text(cluster.name)}, {_text(cluster.database)}, {local}, {key})"
    )
    return [made, spread + (f" COMMENT {comment.group(1)}" if comment else "")]
