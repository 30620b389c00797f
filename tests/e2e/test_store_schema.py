"""Creating and upgrading tables while time passes and other processes do the same."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from argus.store import schema, schema_files
from argus.store.open import Store, open_store
from argus.store.schema import ensure_schema
from tests.builders.old_stores import make_old_store
from tests.kernel.conftest import wait_until
from tests.stores import rows
from tests.unit.store.test_schema import RECOUNT, ROLLED_UP


def test_what_was_stored_before_the_rollup_is_in_it_once(bare: Store) -> None:
    from argus.store.arrow import to_arrow
    from tests.e2e.test_store_writer import iterations

    make_old_store(bare, 8)
    bare.insert("iterations", to_arrow("iterations", iterations(50)), "before")
    # The backfill distinguishes before and after by the second.
    wait_until(lambda: rows(bare, "SELECT max(stored) < now() FROM iterations") == [(1,)], what="the next second")
    ensure_schema(bare)
    with bare.lease() as client:
        client.command("ALTER TABLE schema_migrations DELETE WHERE version > 8 SETTINGS mutations_sync = 2")
    ensure_schema(bare)  # as if it had been killed just before it recorded that it is done
    bare.insert("iterations", to_arrow("iterations", {**iterations(50, rank=1), "duration_ns": 1500}), "after")
    assert rows(bare, ROLLED_UP) == rows(bare, RECOUNT)
    assert rows(bare, "SELECT sum(n) FROM iteration_rollup") == [(100,)]


@pytest.mark.parametrize("version", [0, 9])
def test_two_processes_may_make_or_upgrade_the_tables_at_once(tmp_path: Path, version: int) -> None:
    code = """
import sys
from argus.store.open import open_store
from argus.store.reader import query
from argus.store.schema import init_schema
with open_store(sys.argv[1]) as store:
    print(init_schema(store).version)
"""
    url = f"chdb://{tmp_path}/store"
    if version:
        with open_store(url) as old:
            make_old_store(old, version)
    workers = [
        subprocess.Popen([sys.executable, "-c", code, url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for worker in workers:
        out, err = worker.communicate(timeout=60)
        assert out == f"{schema_files.VERSION}\n", err


def test_a_view_that_another_process_replaces_is_waited_for(shared: Store) -> None:
    """It is gone for a moment: what reads it cannot be made then."""
    with shared.lease() as client:
        (view,) = client.query("SELECT create_table_query FROM system.tables WHERE name = 'kernel_times'").result_rows[
            0
        ]
        client.command("DROP VIEW kernel_times")
        client.command("DROP VIEW function_patterns")

    def put_back() -> None:
        with shared.lease() as client:
            client.command(view)

    timer = threading.Timer(0.3, put_back)
    timer.start()
    try:
        with shared.lease() as client:
            schema._make(client, schema_files.views()["function_patterns"])
            assert client.query("SELECT count() FROM function_patterns").result_rows == [(0,)]
    finally:
        timer.join()
