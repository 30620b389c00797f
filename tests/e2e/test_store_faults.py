"""Kills writers and engines at random, under load, and then counts: what was acknowledged is stored exactly once.

``ARGUS_FAULTS=30`` kills more often (``ARGUS_FAULTS_SEED`` otherwise).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from argus.cli.main import main
from argus.store import spill, spool
from argus.store.load import load_spilled
from argus.store.open import Store, _holder, open_store
from argus.store.reader import query, query_columns
from argus.store.schema import ensure_schema, init_schema
from argus.store.url import parse_url
from tests.clickhouse_server import MISSING, PASSWORD, Server
from tests.e2e.store_writer import COVERED, ROWS, SPIKE, STEPS, T0, durations
from tests.kernel.conftest import wait_for_cuda, wait_until

KILLS = int(os.environ.get("ARGUS_FAULTS", "4"))
SEED = int(os.environ.get("ARGUS_FAULTS_SEED", "1"))
BATCHES_A_WRITER = 100_000
TIMEOUT_S = 240 + 70 * KILLS
"""Each kill waits for up to a minute for acknowledgements; the last writer has two minutes, the count the rest."""


@dataclass
class Ledger:
    """What writers have reported as safe."""

    acknowledged: dict[int, str] = field(default_factory=dict)
    dropped: int = 0
    errors: list[str] = field(default_factory=list)


class LoadedWriter:
    """A writing process, and what it has reported so far."""

    def __init__(self, url: str, number: int, ledger: Ledger) -> None:
        program = Path(__file__).with_name("store_writer.py")
        self.child = subprocess.Popen(
            [sys.executable, str(program), url, str(number * BATCHES_A_WRITER)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._ledger = ledger
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            what, number, rest = line.rstrip("\n").split(" ", 2)
            if what == "ack":
                self._ledger.acknowledged[int(number)] = rest
            else:
                self._ledger.dropped += int(number)
                self._ledger.errors.append(rest)

    def wait_for(self, acknowledged: int) -> None:
        deadline = time.monotonic() + 60
        while len(self._ledger.acknowledged) < acknowledged:
            assert time.monotonic() < deadline, "no batch was acknowledged"
            assert self.child.poll() is None, "the writer has died by itself"
            time.sleep(0.01)

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()
        self._reader.join()

    def finish(self) -> None:
        assert self.child.stdin is not None
        self.child.stdin.close()
        assert self.child.wait(timeout=120) == 0
        self._reader.join()


def faults(url: str, kill_engine: Callable[[random.Random], None]) -> Ledger:
    """Kills ``KILLS`` times, writer or engine, and lets the last writer end in peace."""
    chance, ledger, number = random.Random(SEED), Ledger(), 0
    writer = LoadedWriter(url, number, ledger)
    try:
        for _ in range(KILLS):
            writer.wait_for(len(ledger.acknowledged) + 3)
            time.sleep(chance.uniform(0.0, 0.3))
            if chance.random() < 0.5:
                kill_engine(chance)
            else:
                writer.kill()
                number += 1
                writer = LoadedWriter(url, number, ledger)
        writer.wait_for(len(ledger.acknowledged) + 1)
        writer.finish()
    finally:
        writer.kill()
    return ledger


def audit(url: str, ledger: Ledger) -> None:
    assert ledger.dropped == 0, ledger.errors
    assert len(ledger.acknowledged) >= 3 * KILLS + 1
    with open_store(url) as store:
        ensure_schema(store)
        place = spill.place(store.target)
        assert place is not None
        assert load_spilled(store, place.folder).trouble == []
        assert spill.waiting(place.folder).files == spill.waiting(place.folder).aside == 0
        for table, key in (("iterations", "rank"), ("launches", "pid")):
            found = query_columns(store, f"SELECT {key} AS batch, count() AS n FROM {table} GROUP BY batch")
            counts = dict(zip(found["batch"].tolist(), found["n"].tolist(), strict=True))
            lost = [batch for batch in ledger.acknowledged if counts.get(batch, 0) < ROWS]
            doubled = [batch for batch, n in counts.items() if n > ROWS]
            in_part = [batch for batch, n in counts.items() if n != ROWS]
            assert (lost, doubled, in_part) == ([], [], []), table
        recount = query_columns(
            store,
            "SELECT step, count() AS n, sum(duration_ns) AS s, min(duration_ns) AS a, max(duration_ns) AS b,"
            " argMax(rank, duration_ns) AS w FROM iterations GROUP BY step ORDER BY step",
        )
        rolled = query_columns(
            store,
            "SELECT step, sum(n) AS n, sum(sum_ns) AS s, min(min_ns) AS a, max(max_ns) AS b, argMaxMerge(slowest) AS w"
            " FROM iteration_rollup GROUP BY step ORDER BY step",
        )
        assert {k: v.tolist() for k, v in rolled.items()} == {k: v.tolist() for k, v in recount.items()}
        audit_kernels(store, ledger.acknowledged)
    disk = sum(how == "disk" for how in ledger.acknowledged.values())
    print(f"{KILLS} kills, {len(ledger.acknowledged)} batches acknowledged ({disk} on disk), 0 lost, 0 doubled")


def audit_kernels(store: Store, acknowledged: Iterable[int]) -> None:
    """What was fed to the compressor for each batch is in rows, once, to the nanosecond, and can be decoded."""

    def by_batch(sql: str) -> dict[int, list[int]]:
        found = query_columns(store, f"SELECT rank, {sql} GROUP BY rank")
        return {
            rank: list(values) for rank, *values in zip(*(column.tolist() for column in found.values()), strict=True)
        }

    both = " UNION ALL ".join(
        f"SELECT rank, step, steps, count, total_ns, spikes FROM {table}"
        for table in ("kernel_summaries", "kernel_escapes")
    )
    reported = by_batch(
        f"sum(steps), uniqExactArray(range(step, step + steps)), sum(count), sum(total_ns), sum(spikes) FROM ({both})"
    )
    spikes = by_batch(
        "count(), uniqExact(ts), sum(duration_ns), sum(toUnixTimestamp64Micro(ts)) * 1000 FROM kernel_spikes"
    )
    decoded = by_batch("sum(count), sum(p50_ns BETWEEN 8000 AND 22000), count() FROM kernel_stats")
    lost, other = [], []
    for batch in acknowledged:
        took = durations(batch)
        spike, at = int(took[SPIKE]), T0 + batch * 1_000_000 + SPIKE[0] * 10_000 + SPIKE[1] * 1000
        if reported.get(batch) != [STEPS, STEPS, took.size, int(took.sum()) - spike, 1]:
            lost.append((batch, reported.get(batch)))
        if spikes.get(batch) != [1, 1, spike, at]:
            lost.append((batch, spikes.get(batch)))
        rows = decoded.get(batch, [0, 0, -1])
        if rows[0] != took.size or rows[1] != rows[2]:
            other.append((batch, rows))
    assert (lost, other) == ([], [])
    assert [batch for batch, (steps, unlike, *_) in reported.items() if steps != unlike] == [], "doubled"
    assert [batch for batch, (rows, unlike, *_) in spikes.items() if rows != unlike] == [], "doubled"
    (shape,) = query(
        store,
        "SELECT max(steps) AS longest, countIf(template NOT IN (SELECT template FROM kernel_templates)) AS unknown,"
        " (SELECT count() FROM kernel_escapes) AS escapes FROM kernel_summaries",
    ).to_pylist()
    assert (shape["longest"], shape["unknown"]) == (COVERED, 0)
    assert shape["escapes"] > 0


@pytest.fixture(autouse=True)
def _spill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARGUS_SPILL_DIR", str(tmp_path / "spill"))


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.alone
def test_kills_of_writers_and_of_the_embedded_engine(tmp_path: Path) -> None:
    url = f"chdb://{tmp_path}/store"

    def kill_engine(chance: random.Random) -> None:
        # Not what the file says, but who holds it: the pid of a process that is gone may be somebody else's by now.
        if (holder := _holder(tmp_path / "store")) is not None:
            with contextlib.suppress(ValueError, ProcessLookupError):
                os.kill(int(holder.split()[0]), signal.SIGKILL)

    audit(url, faults(url, kill_engine))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    if MISSING:
        pytest.skip(MISSING)
    monkeypatch.setenv("ARGUS_STORE_PASSWORD", PASSWORD)
    with Server(tmp_path / "server") as running:
        yield running


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.alone
def test_kills_of_writers_and_of_a_server(server: Server) -> None:
    with open_store(server.url()) as store:
        init_schema(store)

    def kill_engine(chance: random.Random) -> None:
        server.kill()
        time.sleep(chance.choice((0.0, 0.2, 1.5)))
        server.start()

    audit(server.url(), faults(server.url(), kill_engine))


@pytest.mark.kernel
@pytest.mark.alone
def test_a_trace_outlives_its_server(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The server is killed under the trace, and then the trace: `argus store load` has everything up to then."""
    from run import Job

    from tests.e2e.conftest import Log, attached, pid_words, start_trace

    with open_store(server.url()) as store:
        init_schema(store)
        place = spill.place(store.target)
    assert place is not None
    log = Log(tmp_path, 2)
    launches = "SELECT count() AS n, uniqExact(rank, tid, ts) AS calls FROM launches"
    with Job(ranks=2, args=log.args) as job:
        wait_for_cuda(job.pids)
        tracing = start_trace(server.url(), *pid_words(job.pids))
        attached(tracing)
        log.wait_for_steps(10)
        server.kill()
        wait_until(lambda: spill.waiting(place.folder).files > 5, 60, "rows on disk")
        waited = spill.waiting(place.folder)
        tracing.kill()
        tracing.communicate(timeout=60)
        assert job.poll() == [None, None], "the job has noticed"
    assert waited.writers == 1
    left = list(place.folder.glob("*/*-launches.arrow"))
    sizes = [spool.read(file).rows.num_rows for file in left]
    rows = sum(sizes)
    assert rows > 0
    server.start()
    with open_store(server.url()) as store:
        before = int(query_columns(store, launches)["n"][0])
    assert main(["store", "load", "--store", server.url()]) == 0, capsys.readouterr().err
    with open_store(server.url()) as store:
        after = query_columns(store, launches)
        # One batch may have been stored without its answer, and be on disk too: it counts once.
        assert before + rows - max(sizes) <= int(after["n"][0]) <= before + rows
        assert after["n"][0] == after["calls"][0], "something was stored twice"


def test_what_is_left_on_disk_is_known_by_the_store_and_not_by_the_user(server: Server) -> None:
    one, two = (spill.place(parse_url(server.url(user=user))) for user in ("argus", "reader"))
    assert one == two
