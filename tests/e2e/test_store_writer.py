"""The writer's own thread, a store that is away, and kills: an acknowledged row is stored exactly once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.store import writer as writer_module
from argus.store.open import Store, open_store
from argus.store.writer import Writer
from tests.stores import rows
from tests.unit.store.test_writer import _Flaky, iterations

ROOT = Path(__file__).parents[2]


@pytest.mark.alone
def test_rows_wait_while_the_store_is_away(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    away = ArgusError("cannot reach the store", "", EXIT_UNAVAILABLE)
    monkeypatch.setattr(writer_module, "_BACKOFF_S", (600.0, 600.0))
    flaky = _Flaky(store, [away] * 3)
    flaky.install(monkeypatch)
    writer = Writer(store, source="test")
    writer.append("iterations", iterations(10))
    assert not writer.flush(timeout_s=0)
    assert writer.last_error is away
    assert writer.bytes_waiting > 0
    writer.maybe_flush()
    assert len(flaky.failures) == 2, "the store was tried again at once, in the caller's time"
    monkeypatch.setattr(writer_module, "_BACKOFF_S", (0.01, 0.02))
    assert writer.flush(timeout_s=10)
    assert writer.close().written == {"iterations": 10}


@pytest.mark.alone
def test_a_thread_of_its_own_sends(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    real, go, senders, caller = Writer._send, threading.Event(), set(), threading.get_ident()

    def slow(self: Writer, batch: Any) -> None:
        senders.add(threading.get_ident())
        assert threading.get_ident() != caller
        assert go.wait(60), "the loop waited for the store"
        real(self, batch)

    monkeypatch.setattr(Writer, "_send", slow)
    writer = Writer(store, source="test", flush_rows=1)
    writer.start()
    for _ in range(3):
        writer.append("iterations", iterations(10))
        writer.maybe_flush()
    assert caller not in senders
    go.set()
    assert writer.close().written == {"iterations": 30}
    assert len(senders) == 1
    assert rows(store, "SELECT count() FROM iterations") == [(30,)]


def test_the_thread_outlives_failures(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "_BACKOFF_S", (0.01, 0.02))
    _Flaky(store, [OSError("away")] * 5 + [RuntimeError("a bug")]).install(monkeypatch)  # type: ignore[list-item]
    writer = Writer(store, source="test")
    writer.start()
    writer.append("iterations", iterations(10))
    writer.flush()
    writer.append("iterations", iterations(5))
    assert writer.flush(timeout_s=5)
    report = writer.close()
    assert report.dropped == {"iterations": 10}
    assert report.written == {"iterations": 5}
    assert report.last_error == "a bug"


def test_kill_9_loses_and_doubles_nothing(tmp_path: Path) -> None:
    """Kills the engine in the middle of inserts, and at last the writer too."""
    code = """
import sys
from argus.store.open import open_store
from argus.store.writer import Writer
sys.path.insert(0, sys.argv[2])
from tests.unit.store.test_writer import launches
writer = Writer(open_store(sys.argv[1]), source="test")
for batch in range(10_000):
    writer.append("launches", {**launches(20_000), "pid": batch})
    if writer.flush(timeout_s=60):
        print(batch, flush=True)
"""
    url, folder = f"chdb://{tmp_path}/store", tmp_path / "store"
    child = subprocess.Popen([sys.executable, "-c", code, url, str(ROOT)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    acknowledged = -1
    for kill in range(4):
        for _ in range(8):
            acknowledged = int(child.stdout.readline())
        time.sleep(0.01 * kill)
        os.kill(int((folder / "lock").read_text().split()[0]), signal.SIGKILL)
    for _ in range(8):
        acknowledged = int(child.stdout.readline())
    child.kill()
    rest = child.communicate()[0].split()
    acknowledged = int(rest[-1]) if rest else acknowledged
    with open_store(url) as store:
        found = dict(rows(store, "SELECT pid, count() FROM launches GROUP BY pid"))
    assert [found.get(batch, 0) for batch in range(acknowledged + 1)] == [20_000] * (acknowledged + 1)
    # At most one more was stored and not acknowledged any more; none is there in part.
    assert set(found.values()) == {20_000}
    assert len(found) <= acknowledged + 2
