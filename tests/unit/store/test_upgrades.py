"""Stores of older versions become what a new store is, and keep their rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from argus.store import schema_files
from argus.store.open import Store, open_store
from argus.store.schema import ensure_schema, schema_state
from tests.builders.old_stores import LAST, UNCHANGED, make_old_store
from tests.stores import new_store, rows

Shown = dict[str, list[tuple[object, ...]]]


def shown(store: Store) -> Shown:
    """What the engine says of each table and view, and of each column."""
    return {
        "tables": rows(
            store,
            "SELECT name, engine_full, comment, create_table_query FROM system.tables"
            " WHERE database = currentDatabase() ORDER BY name",
        ),
        "columns": rows(
            store,
            "SELECT table, position, name, type, default_kind, default_expression, comment, compression_codec"
            " FROM system.columns WHERE database = currentDatabase() ORDER BY table, position",
        ),
        "indices": rows(
            store,
            "SELECT table, name, type_full, expr, granularity FROM system.data_skipping_indices"
            " WHERE database = currentDatabase() ORDER BY table, name",
        ),
    }


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    with open_store(new_store(tmp_path_factory.mktemp("new"))) as store:
        found = shown(store)
    assert {name for name, *_ in found["tables"]} == {
        *schema_files.tables(), *schema_files.feeds(), *schema_files.views(), "schema_migrations",
    }  # fmt: skip
    assert found["indices"]
    return found


@pytest.mark.thorough(first=1)
@pytest.mark.parametrize("version", [1, LAST, 4, 8, 11, 15, 17, 22, 26, 27, 28])
def test_an_upgraded_store_is_as_a_new_one_and_keeps_its_rows(bare: Store, new: Shown, version: int) -> None:
    make_old_store(bare, version)
    state = schema_state(bare)
    assert (state.version, state.missing) == (version, list(range(version + 1, schema_files.VERSION + 1)))
    kept = {"jobs": "host", "ranks": "exe", "iterations": "method", "collectives": "op", "launches": "call",
            "communicators": "joined_by", "kernel_events": "name", "kernel_flops": "operator",
            "parallel_layout": "source", "baselines": "source"}  # fmt: skip
    there = {name for (name,) in rows(bare, "SHOW TABLES")}
    with bare.lease() as client:
        for table in kept.keys() & there - {"iterations"}:
            client.command(f"INSERT INTO {table} (job, run, {kept[table]}) SELECT 'job', 7, 'kept'")
        if "environments" in there:
            client.command("INSERT INTO environments (job, run, facts) SELECT 'job', 7, map('gpu.model', 'kept')")
        # The upgrade distinguishes before and after by the second.
        client.command("INSERT INTO iterations (job, run, method, stored) SELECT 'job', 7, 'kept', now() - 60")
    state = ensure_schema(bare)
    assert (state.version, state.missing, state.changed) == (schema_files.VERSION, [], [])
    now = shown(bare)
    for part, lines in new.items():
        assert now[part] == lines
    for table in kept.keys() & there:
        assert rows(bare, f"SELECT job, run, {kept[table]} FROM {table}") == [("job", 7, "kept")]
    facts = rows(bare, "SELECT run, fact, value FROM environment_facts")
    assert facts == ([(7, "gpu.model", "kept")] if "environments" in there else [])
    assert rows(bare, "SELECT step_flops, wall_error_ns FROM jobs") == [(0, -1)], "what the columns' comments promise"
    recorded = version if version <= LAST else 1
    assert rows(bare, "SELECT count(), max(version) FROM schema_migrations") == [(recorded + 1, schema_files.VERSION)]
    # Summed up once: by what keeps the rollup up, or, from before there was one, by the upgrade.
    assert rows(bare, "SELECT job, ranks FROM step_times") == [("job", 1)]
    assert ensure_schema(bare) == state


def test_every_table_of_older_versions_is_either_as_it_was_or_kept_in_its_old_form() -> None:
    old = (Path(__file__).parents[2] / "builders" / "old_tables.sql").read_text()
    frozen = {name for tables in UNCHANGED.values() for name in tables}
    for name in {*schema_files.tables(), *schema_files.feeds()}:
        assert (name in frozen) != (f"CREATE TABLE IF NOT EXISTS {name}\n" in old), name


@pytest.mark.thorough
def test_a_number_that_was_left_out_is_made_up_for(bare: Store, new: Shown) -> None:
    """Of two files that were applied at the same time, the one with the higher number may have been done first."""
    make_old_store(bare, LAST)
    with bare.lease() as client:
        for table in ("health", *UNCHANGED[11]):
            client.command(f"DROP TABLE {table}")
        client.command("ALTER TABLE schema_migrations DELETE WHERE version = 11 SETTINGS mutations_sync = 2")
    assert schema_state(bare).missing == [11, *range(LAST + 1, schema_files.VERSION + 1)]
    assert ensure_schema(bare).missing == []
    assert shown(bare) == new


@pytest.mark.thorough
def test_tables_whose_making_was_cut_short_are_altered_too(bare: Store, new: Shown) -> None:
    """A first version that was killed before it recorded itself."""
    make_old_store(bare, 1)
    with bare.lease() as client:
        client.command("TRUNCATE TABLE schema_migrations")
        client.command("DROP TABLE launches")
    assert schema_state(bare).version == 0
    ensure_schema(bare)
    assert shown(bare) == new
