"""The files of schemas/: the version of the tables, the statements that make and upgrade them, what they declare."""

from __future__ import annotations

import functools
import graphlib
import hashlib
import re
from dataclasses import dataclass

from argus.model.errors import ArgusError
from argus.store.statements import split_statements
from argus.system.resources import resource_dir

VERSION = 29
"""Version of the tables and views that ``schemas/`` describes. Every change of a statement there raises it: a store of
a lower version gets the tables that it lacks, then ``schemas/upgrades/`` from its version on, then all views anew.

Up to 25 it was the number of the newest of several files, which a store was brought to one by one."""

ROLLUP = "_rollup"
"""How the names of tables end that materialised views write to."""

_TABLE = re.compile(r"CREATE TABLE IF NOT EXISTS (\w+)")
_FEED = re.compile(r"CREATE MATERIALIZED VIEW IF NOT EXISTS (\w+)")
_VIEW = re.compile(r"CREATE OR REPLACE VIEW (\w+)")


@dataclass(frozen=True)
class Upgrade:
    """One file of ``schemas/upgrades/``: what tables of stores before a version lack."""

    version: int
    """Stores before it are altered."""
    statements: tuple[str, ...]


@functools.cache
def statements() -> tuple[str, ...]:
    """All that make tables and views, file by file.

    Raises:
        ArgusError: The installation lacks them.
    """
    files = sorted(resource_dir("schemas").glob("*.sql"))
    if not files:
        raise ArgusError("the schema files of this installation are missing", "Install Argus again")
    return tuple(one for file in files for one in split_statements(file.read_text(encoding="utf-8")))


def tables() -> dict[str, str]:
    """The statement that makes each table, by its name."""
    return {match[1]: one for one in statements() if (match := _TABLE.match(one))}


def feeds() -> dict[str, str]:
    """The same for the materialised views. They read and write tables only."""
    return {match[1]: one for one in statements() if (match := _FEED.match(one))}


def views() -> dict[str, str]:
    """The same for the views, each behind those that it reads."""
    made = {match[1]: one for one in statements() if (match := _VIEW.match(one))}
    reads = {}
    for name, statement in made.items():
        words = set(re.findall(r"\w+", re.sub(r"'(?:[^'\\]|\\.|'')*'", "", statement)))
        reads[name] = words & made.keys() - {name}
    return {name: made[name] for name in graphlib.TopologicalSorter(reads).static_order()}


def upgrades() -> list[Upgrade]:
    """What tables of older stores lack, oldest first."""
    return [
        Upgrade(int(file.name[:3]), tuple(split_statements(file.read_text(encoding="utf-8"))))
        for file in sorted((resource_dir("schemas") / "upgrades").glob("[0-9][0-9][0-9]_*.sql"))
    ]


def checksum() -> str:
    """SHA-256 of the statements that make the tables and views, in any order, before placeholders are filled."""
    return hashlib.sha256("\n".join(sorted(statements())).encode()).hexdigest()


@dataclass(frozen=True)
class Column:
    """A column of a table, as the schema files declare it."""

    name: str
    type: str
    """ClickHouse type."""
    optional: bool
    """Whether a row may leave it out: it has a default."""


@functools.cache
def table_keys() -> dict[str, tuple[str, ...]]:
    """The columns of the sorting key of every table that keeps each row it is given: those that keep only the newest
    are not here. Parts of a key that are made from a column (its minute) are left out."""
    keys = {}
    for name, statement in tables().items():
        if engine := re.search(r"^\) ENGINE = MergeTree\s(?:.*\s)?ORDER BY \((.*)\)$", statement, re.MULTILINE):
            parts = (part.strip() for part in _split_commas(engine.group(1)))
            keys[name] = tuple(part for part in parts if part.isidentifier())
    return keys


_COLUMN = re.compile(r"(\w+)\s+(.+?)(?=\s+(?:DEFAULT|MATERIALIZED|ALIAS|CODEC|COMMENT|TTL)\b|$)", re.DOTALL)


@functools.cache
def table_columns() -> dict[str, dict[str, Column]]:
    """The columns of every table that rows can be written to, read from the schema files: no store is asked.

    Rollups are not among them: only materialised views write there.
    """
    declared: dict[str, dict[str, Column]] = {}
    for name, statement in tables().items():
        match = re.match(r"CREATE TABLE IF NOT EXISTS \w+\s*\((.*)\n\)", statement, re.DOTALL)
        if match and not name.endswith(ROLLUP):
            parts = (part for part in _split_commas(match.group(1)) if not part.startswith("INDEX "))
            declared[name] = {column.name: column for column in map(_column, parts)}
    return declared


def _column(text: str) -> Column:
    match = _COLUMN.match(text.strip())
    assert match, text
    return Column(match.group(1), match.group(2).strip(), bool(re.search(r"\s(DEFAULT|MATERIALIZED|ALIAS)\s", text)))


def _split_commas(text: str) -> list[str]:
    parts, depth, current = [], 0, ""
    for token in re.findall(r"'(?:[^'\\]|\\.|'')*'|[(),]|[^'(),]+", text):
        depth += {"(": 1, ")": -1}.get(token, 0)
        if token == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += token
    parts.append(current.strip())
    return [part for part in parts if part]
