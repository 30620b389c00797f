"""Creating and upgrading tables while time passes and other processes do the same."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from argus.store import schema
from argus.store.open import Store, open_store
from argus.store.schema import ensure_schema
from tests.unit.test_store_schema import RECOUNT, ROLLED_UP


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"chdb://{tmp_path}/store") as opened:
        yield opened


def rows(store: Store, sql: str) -> list[tuple[object, ...]]:
    with store.lease() as client:
        return [tuple(row) for row in client.query(sql).result_rows]


def test_what_was_stored_before_the_rollup_is_in_it_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    from argus.store.writer import to_arrow

    from .test_store_writer import iterations

    now = schema.migrations()
    monkeypatch.setattr(schema, "migrations", lambda: [m for m in now if m.version < 9])
    ensure_schema(store)
    store.insert("iterations", to_arrow("iterations", iterations(50)), "before")
    time.sleep(2.1)  # the backfill tells before and after by the second
    monkeypatch.setattr(schema, "migrations", lambda: now)
    ensure_schema(store)
    with store.lease() as client:
        client.command("ALTER TABLE schema_migrations DELETE WHERE version = 9 SETTINGS mutations_sync = 2")
    ensure_schema(store)  # as if it had been killed just before it said that it is done
    store.insert("iterations", to_arrow("iterations", {**iterations(50, rank=1), "duration_ns": 1500}), "after")
    assert rows(store, ROLLED_UP) == rows(store, RECOUNT)
    assert rows(store, "SELECT sum(n) FROM iteration_rollup") == [(100,)]


def test_two_processes_may_create_the_tables_at_once(tmp_path: Path) -> None:
    code = """
import sys
from argus.store.open import open_store
from argus.store.reader import query
from argus.store.schema import init_schema
with open_store(sys.argv[1]) as store:
    print(init_schema(store).version)
"""
    url = f"chdb://{tmp_path}/store"
    workers = [
        subprocess.Popen([sys.executable, "-c", code, url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for worker in workers:
        out, err = worker.communicate(timeout=60)
        assert out == f"{schema.migrations()[-1].version}\n", err


def test_a_view_that_another_process_replaces_is_waited_for(store: Store) -> None:
    """It is gone for a moment: what reads it cannot be made then."""
    ensure_schema(store)
    with store.lease() as client:
        (view,) = client.query("SELECT create_table_query FROM system.tables WHERE name = 'kernel_times'").result_rows[
            0
        ]
        client.command("DROP VIEW kernel_times")
        client.command("DROP VIEW function_patterns")
    text = next(each.text for each in schema.migrations() if "VIEW IF NOT EXISTS function_patterns" in each.text)

    def put_back() -> None:
        with store.lease() as client:
            client.command(view)

    timer = threading.Timer(0.3, put_back)
    timer.start()
    try:
        with store.lease() as client:
            schema._make(client, text)
            assert client.query("SELECT count() FROM function_patterns").result_rows == [(0,)]
    finally:
        timer.join()
