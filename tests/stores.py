"""Embedded stores for tests: each a copy of one whose tables were made once, which takes 1.5 s of CPU time.

That tables are made where there are none is for test_store_schema, test_store_open, test_packaging and the demo.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argus.store.open import Store

ROOT = Path(__file__).resolve().parents[1]
_MAKE = "import sys; from argus.store.open import open_store; from argus.store.schema import ensure_schema\n" + (
    "with open_store(sys.argv[1]) as store: ensure_schema(store)"
)


def new_store(folder: Path | str) -> str:
    """Makes an empty store with all tables in ``folder/store``, and returns its URL."""
    store = Path(folder, "store")
    store.mkdir(mode=0o700, parents=True)
    shutil.copytree(_template() / "db", store / "db", symlinks=True)
    return f"chdb://{store}"


def rows(store: Store, sql: str) -> list[tuple[Any, ...]]:
    """What a query returns, as the engine has it."""
    with store.lease() as client:
        return [tuple(row) for row in client.query(sql).result_rows]


def stored(url: str, sql: str) -> list[tuple[Any, ...]]:
    """What a query of the store at a URL returns, as Argus reads it: times in nanoseconds."""
    from argus.store.open import open_store
    from argus.store.reader import query_columns

    with open_store(url) as store:
        return list(zip(*(column.tolist() for column in query_columns(store, sql).values()), strict=True))


def _template() -> Path:
    digest = hashlib.sha256()
    for path in [*sorted((ROOT / "argus" / "store").glob("*.py")), *sorted((ROOT / "schemas").rglob("*.sql"))]:
        digest.update(path.read_bytes())
    store = ROOT / "build" / "store-template" / digest.hexdigest()[:16]
    done = store / "done"
    if done.exists():
        return store
    store.parent.mkdir(parents=True, exist_ok=True)
    with Path(store.parent, "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        if not done.exists():
            for old in store.parent.iterdir():
                if old.is_dir():
                    shutil.rmtree(old)
            subprocess.run([sys.executable, "-c", _MAKE, f"chdb://{store}"], check=True, cwd=ROOT)
            _wait_for_engine(store)
            done.touch()
    return store


def _wait_for_engine(store: Path) -> None:
    """Its engine is a process that ends a moment after its last client."""
    engine = os.open(store / "lock", os.O_RDWR)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                fcntl.flock(engine, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
    finally:
        os.close(engine)
