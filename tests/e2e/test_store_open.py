"""Opening a store: URLs, sharing the embedded engine between processes, and what goes wrong with it."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from argus.model.errors import EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError
from argus.store import engine
from argus.store import open as open_module
from argus.store.failures import first_line, transient
from argus.store.open import Store, open_store
from argus.store.schema import ensure_schema, init_schema, schema_state
from argus.store.url import default_url, parse_url
from argus.system import memory


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ARGUS_STORE", "ARGUS_STORE_PASSWORD", "ARGUS_STORE_PASSWORD_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"chdb://{tmp_path}/store"


@pytest.fixture(scope="module")
def running_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store whose engine runs, for tests that leave nothing in it."""
    with open_store(f"chdb://{tmp_path_factory.mktemp('running')}/store") as store, store.lease():
        yield store


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of stores that their last client has left: their engines end in a moment, all at the same time."""
    parent = tmp_path_factory.mktemp("left")
    folders = {"long": parent / ("x" * 120), "damaged": parent / "damaged"}
    with (
        open_store(f"chdb://{folders['long']}") as long,
        open_store(f"chdb://{folders['damaged']}") as damaged,
    ):
        with long.lease() as client:
            assert client.command("SELECT 1") == 1
        with damaged.lease() as client:
            client.command("CREATE TABLE t (a UInt8) ENGINE = MergeTree ORDER BY a")
    return folders


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def engine_pid(folder: Path) -> int:
    return int((folder / "lock").read_text().split()[0])


def running(pid: int) -> bool:
    """Whether a process runs; one that ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition: object, timeout_s: float = 10.0) -> bool:
    end = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


# ---- URLs ----


def test_url_of_a_server() -> None:
    target = parse_url("clickhouse://me@db.example:8443/argus?secure=true&verify=false")
    assert (target.host, target.port, target.user, target.database, target.secure) == (
        "db.example", 8443, "me", "argus", True,
    )  # fmt: skip
    assert target.path is None
    plain = parse_url("clickhouse://db/argus")
    assert (plain.port, plain.user, plain.secure) == (8123, "default", False)
    assert parse_url("clickhouse://db/argus?secure=true").port == 8443


def test_url_of_a_folder(tmp_path: Path) -> None:
    assert parse_url(f"chdb://{tmp_path}/a%20b").path == tmp_path / "a b"


def test_url_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ARGUS_STORE", f"chdb://{tmp_path}/env")
    assert open_store().url == f"chdb://{tmp_path}/env"
    assert open_store(f"chdb://{tmp_path}/given").url == f"chdb://{tmp_path}/given"


def test_default_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert default_url() == "chdb:///data/argus"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert default_url() == "chdb:///home/me/.local/share/argus"
    monkeypatch.setenv("HOME", "/home/50 % ü#")
    monkeypatch.delenv("ARGUS_STORE", raising=False)
    assert open_store().target.path == Path("/home/50 % ü#/.local/share/argus")
    monkeypatch.setenv("HOME", "~")  # what a user without an entry in passwd gets for one
    with pytest.raises(ArgusError, match="no home"):
        default_url()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert default_url() == "chdb:///var/lib/argus"


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("postgres://db/x", "unknown kind"),
        ("/var/lib/argus", "unknown kind"),
        ("chdb://var/lib/argus", "names no folder"),
        ("chdb://", "names no folder"),
        ("chdb:///var/lib/a%3Fb", "'?' in its name"),
        ("clickhouse:///argus", "names no host"),
        ("clickhouse://db:http/argus", "bad store URL"),
        ("clickhouse://db:80000/argus", "port is no number up to 65535"),
        ("clickhouse://db/argus?sekure=true", "sekure"),
        ("clickhouse://db/argus?secure=maybe", "maybe"),
        ("clickhouse://me:hunter2@db/argus", "password"),
        ("clickhouse://db/argus?password=hunter2", "password"),
    ],
)
def test_bad_urls_are_refused(url: str, word: str) -> None:
    with pytest.raises(ArgusError) as failure:
        open_store(url)
    assert word in failure.value.message
    assert failure.value.hint
    assert failure.value.exit_code == EXIT_USAGE
    assert "hunter2" not in str(failure.value)


# ---- the embedded engine ----


@contextlib.contextmanager
def two_clients(folder: Path) -> Iterator[tuple[Store, Store]]:
    """Of a store with a table ``t``, which one fills and the other reads."""
    with open_store(f"chdb://{folder}") as one, open_store(f"chdb://{folder}") as two:
        with one.lease() as client:
            client.command("CREATE TABLE t (a UInt8) ENGINE = MergeTree ORDER BY a")
            client.command("INSERT INTO t VALUES (7)")
        with two.lease() as client:
            assert client.query("SELECT a FROM t").result_rows == [(7,)]
        yield one, two


@pytest.mark.usefixtures("left")
def test_it_works_and_the_engine_ends_with_its_last_client(tmp_path: Path) -> None:
    """Of two stores, one keeps a client for as long as it takes the engine of the other to end, and for longer."""
    kept, closed = tmp_path / "kept", tmp_path / "closed"
    with two_clients(kept) as (one, two):
        stays = engine_pid(kept)
        one.close()
        with two_clients(closed):
            pid = engine_pid(closed)
        assert wait_until(lambda: not running(pid))
        assert not (closed / "socket").exists()
        time.sleep(1)
        assert running(stays), "the engine left while it had a client"
        with two.lease() as client:
            assert client.query("SELECT a FROM t").result_rows == [(7,)]
        assert engine_pid(kept) == stays
    with open_store(f"chdb://{closed}") as again, again.lease() as client:
        assert client.query("SELECT a FROM t").result_rows == [(7,)]
        assert engine_pid(closed) != pid


def test_clients_do_not_load_the_engine(url: str) -> None:
    code = """
import sys
from argus.store.open import open_store
with open_store(sys.argv[1]) as store, store.lease() as client:
    assert client.command("SELECT 1") == 1
print([name for name in sys.modules if name.split(".")[0] in ("chdb", "pandas")])
print(len(__import__("os").listdir("/proc/self/task")))
"""
    out, err = python(code, url).communicate(timeout=30)
    assert out.split("\n")[:2] == ["[]", "1"], err


def test_processes_share_a_store_at_the_same_time(url: str) -> None:
    code = """
import sys
from argus.store.open import open_store
with open_store(sys.argv[1]) as store, store.lease() as client:
    client.command("CREATE TABLE IF NOT EXISTS t (who UInt8) ENGINE = MergeTree ORDER BY who")
    for _ in range(10):
        client.command("INSERT INTO t VALUES (" + sys.argv[2] + ")")
"""
    workers = [python(code, url, str(i)) for i in range(4)]
    for worker in workers:
        _, err = worker.communicate(timeout=60)
        assert worker.returncode == 0, err
    with open_store(url) as store, store.lease() as client:
        assert client.query("SELECT who, count() FROM t GROUP BY who ORDER BY who").result_rows == [
            (i, 10) for i in range(4)
        ]


@contextlib.contextmanager
def engine_connection(folder: Path) -> Iterator[http.client.HTTPConnection]:
    """A connection of its own to a store's engine."""
    connection = http.client.HTTPConnection("argus")
    connection.sock = socket.socket(socket.AF_UNIX)
    with engine.socket_address(folder) as address:
        connection.sock.connect(address)
    with contextlib.closing(connection):
        yield connection


def heaps(pid: int) -> int:
    """glibc's heaps of a process besides its first: 64 MiB each from a multiple of 64 MiB on (HEAP_MAX_SIZE in arena.c
    of glibc), of which the beginning may be written to and the rest not."""
    found, whole = 0, 64 << 20
    lines = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    ranges = [(*(int(word, 16) for word in words[0].split("-")), words[1]) for words in lines if len(words) == 5]
    for (begin, middle, used), (after, end, unused) in pairwise(ranges):
        rights = used[:2], unused[:2]
        found += begin % whole == 0 and middle == after and end == begin + whole and rights == ("rw", "--")
    return found


def test_connections_do_not_get_heaps_of_their_own(url: str, tmp_path: Path) -> None:
    """Each connection has a thread, and what batches leave behind in the heap of each would stay with the engine."""
    with open_store(url) as store, store.lease():
        folder = tmp_path / "store"
        with contextlib.ExitStack() as stack:
            connections = [stack.enter_context(engine_connection(folder)) for _ in range(12)]
            for connection in connections:
                connection.request("POST", "/", b"SELECT count() FROM numbers(10) " + b" " * 100_000)
            for connection in connections:
                assert connection.getresponse().read() == b"10\n"
            assert heaps(engine_pid(folder)) < memory.ARENAS


def test_the_engine_does_not_remember_what_each_condition_selects(running_store: Store) -> None:
    """A diagnosis that goes on asks for other steps every time, and every answer would stay in memory."""
    with running_store.lease() as client:
        client.command("CREATE OR REPLACE TABLE t (x UInt64) ENGINE = MergeTree ORDER BY tuple()")
        client.command("INSERT INTO t SELECT number FROM numbers(200000)")
        assert client.command("SELECT count() FROM t WHERE x = 100001") == 1
        kept = client.command("SELECT value FROM system.metrics WHERE metric = 'QueryConditionCacheEntries'")
    assert kept == 0


def test_the_engine_gives_back_what_was_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it has clients."""
    trims: list[int] = []
    server = SimpleNamespace(guard=threading.Lock(), connections=1, idle_since=0.0, cancel_abandoned=lambda: None)
    server.give_back, server.measure = lambda: trims.append(1), lambda: None
    monkeypatch.setattr(memory, "TRIM_S", 0.0)
    turns = iter([True] * 5)
    stop = SimpleNamespace(wait=lambda seconds: False, is_set=lambda: False)  # never, and nobody waits for it
    engine._tend(server, stop, lambda: next(turns, False))  # type: ignore[arg-type]
    assert len(trims) == 6


@pytest.mark.parametrize(
    ("age_s", "held_bytes", "quiet", "ends"),
    [(4000, 600 << 20, True, True), (4000, 400 << 20, True, False), (3000, 600 << 20, True, False),
     (4000, 600 << 20, False, False)],
    ids=["large", "small", "young", "asked"],
)  # fmt: skip
def test_an_engine_that_grew_too_large_ends_when_nobody_asks(
    monkeypatch: pytest.MonkeyPatch, age_s: float, held_bytes: int, quiet: bool, ends: bool
) -> None:
    now = iter([0.0] + [float(age_s)] * 1000)
    server = SimpleNamespace(guard=threading.Lock(), connections={1}, idle_since=0.0, cancel_abandoned=lambda: None)
    server.give_back, server.measure, server.asked = lambda: None, lambda: None, lambda: not quiet
    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: next(now), sleep=time.sleep))
    monkeypatch.setattr(memory, "resident", lambda: held_bytes)
    turns: list[int] = []
    stop = SimpleNamespace(wait=lambda seconds: False, is_set=lambda: False)
    assert ends == engine._tend(server, stop, lambda: turns.append(1) or len(turns) < 5)  # type: ignore[arg-type, func-returns-value]
    assert len(turns) == (0 if ends else 5)


RENEWED = """
import os, sys
from argus.store import engine
from argus.system import memory
engine.RENEW_S, memory.TRIM_S, engine.RENEW_BYTES = 2.0, 0.5, 1
engine.serve(engine.Path(sys.argv[1]), "a test", 1)
"""


NEVER_CLOSED = """
import ctypes, sys
import chdb
from argus.store import engine
engine.LINGER_S, engine.CLOSE_S = 0.0, 1
class Handle:
    def __init__(self, target):
        self.handle = CONNECT(target)
    def __getattr__(self, name):
        return getattr(self.handle, name)
    def close(self):
        if self is FIRST[0]:
            ctypes.PyDLL(None).pause()  # with the interpreter's lock
        self.handle.close()
CONNECT, FIRST = chdb.connect, []
chdb.connect = lambda target: FIRST.append(Handle(target)) or FIRST[-1]
engine.serve(engine.Path(sys.argv[1]), "a test", 1)
"""


def test_an_engine_whose_database_does_not_close_holds_the_store_for_seconds(url: str, tmp_path: Path) -> None:
    with open_store(url) as store, store.lease() as client:
        client.command("CREATE TABLE t (a UInt64) ENGINE = MergeTree ORDER BY a")
        client.command("INSERT INTO t VALUES (7)")
    folder = tmp_path / "store"
    assert wait_until(lambda: open_module._holder(folder) is None)
    hangs = subprocess.Popen([sys.executable, "-c", NEVER_CLOSED, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert hangs.stdout is not None
        assert hangs.stdout.readline() == "ready\n"
        with open_store(url) as store, store.lease() as client:  # the first engine, or the next one
            assert client.query("SELECT a FROM t").result_rows == [(7,)]
        assert hangs.wait(30) == -signal.SIGALRM
    finally:
        hangs.kill()
    with open_store(url) as store, store.lease() as client:
        assert client.query("SELECT a FROM t").result_rows == [(7,)]


def test_an_engine_that_is_renewed_loses_nothing(url: str, tmp_path: Path) -> None:
    """Clients that ask and insert all the time notice nothing: the next engine has what was stored."""
    with open_store(url) as store, store.lease() as client:
        client.command("CREATE TABLE t (a UInt64) ENGINE = MergeTree ORDER BY a")
    folder = tmp_path / "store"
    assert wait_until(lambda: open_module._holder(folder) is None)
    first = subprocess.Popen([sys.executable, "-c", RENEWED, str(folder)], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    assert first.stdout.readline() == "ready\n"
    stop, failures, asked = threading.Event(), [], [0]

    def ask() -> None:
        with open_store(url) as other:
            while not stop.is_set():
                try:
                    with other.lease() as client:
                        client.query("SELECT count() FROM t")
                    asked[0] += 1
                except Exception as failure:
                    failures.append(failure)
                time.sleep(0.2)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    inserted, deadline = 0, time.monotonic() + 120
    with contextlib.ExitStack() as ends, open_store(url) as store:
        ends.callback(first.kill)
        ends.callback(stop.set)
        cpu_s = 0.0
        while (first.poll() is None or inserted % 50) and time.monotonic() < deadline:
            with store.lease() as client:
                client.command(f"INSERT INTO t VALUES ({inserted})")
            inserted += 1
            assert store.engine_cpu_s() >= cpu_s, "that of both engines"
            cpu_s = store.engine_cpu_s()
            time.sleep(0.1)
        stop.set()
        asking.join(timeout=60)
        assert first.poll() == 0
        assert failures == []
        assert asked[0] > 10
        assert engine_pid(folder) != first.pid
        with store.lease() as client:
            assert client.query("SELECT count(), uniqExact(a) FROM t").result_rows == [(inserted, inserted)]


PURGE = """
import sys, types
import chdb
from argus.store import engine
class Connection:
    def __init__(self, target):
        self.handle = chdb.connect(target)
    def query(self, text):
        self.handle.query(text)
        print(text)
    def close(self):
        self.handle.close()
        print("closed")
target = sys.argv[1] + "?max_threads=2"
keeper = chdb.connect(target)
engine._Server.give_back(types.SimpleNamespace(chdb=types.SimpleNamespace(connect=Connection), target=target))
"""


def test_an_insert_whose_answer_is_lost_fails_and_is_not_sent_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer keeps the rows then, and sends them with the token that the store knows them by."""
    import pyarrow as pa

    dial, inserts = open_module._dial, []

    def pass_on(ours: socket.socket, engine_socket: socket.socket) -> None:
        """Everything goes to the engine, and its answers to the client, but for those to inserts."""
        insert = False
        while True:
            ready, _, _ = select.select([ours, engine_socket], [], [])
            data = ready[0].recv(1 << 20)
            if ready[0] is ours and b"INSERT" in data:
                insert = True
                inserts.append(data)
            if not data or (insert and ready[0] is engine_socket):
                break
            (engine_socket if ready[0] is ours else ours).sendall(data)
        ours.close()
        engine_socket.close()

    def through(folder: Path) -> socket.socket:
        theirs, ours = socket.socketpair()
        threading.Thread(target=pass_on, args=(ours, dial(folder)), daemon=True).start()
        return theirs

    with open_store(url) as store, store.lease() as client:
        client.command("CREATE TABLE kept (n UInt8) ENGINE = MergeTree ORDER BY n")
        monkeypatch.setattr(open_module, "_dial", through)
        with open_store(url) as other, other.lease() as unlucky:
            assert unlucky.command("SELECT count() FROM kept") == 0
            with pytest.raises(Exception, match=r"aborted|closed|without response"):
                unlucky.insert_arrow("kept", pa.table({"n": pa.array([1, 2, 3], pa.uint8())}))
        monkeypatch.undo()
        assert len(inserts) == 1
        assert client.command("SELECT count() FROM kept") == 3


def test_what_a_large_query_took_does_not_stay_with_the_engine(tmp_path: Path) -> None:
    """The engine's allocator can be made to give back what it keeps for the next one. (It does by itself, too, but at
    times of its own.)"""
    output = subprocess.run(
        [sys.executable, "-c", PURGE, str(tmp_path / "db")], capture_output=True, text=True, check=True, timeout=120
    )
    assert output.stdout.splitlines() == ["SYSTEM JEMALLOC PURGE", "closed"]


def test_giving_back_loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing of pyarrow's to give back where it was not loaded."""
    monkeypatch.delitem(sys.modules, "pyarrow", raising=False)
    memory.trim()
    assert "pyarrow" not in sys.modules


def test_an_engine_takes_little_memory_for_heaps_and_merges(url: str) -> None:
    """What was chosen is what it has: jemalloc and ClickHouse ignore what they do not know."""
    with open_store(url) as store, store.lease() as client:
        stats = str(client.command("SELECT stats FROM system.jemalloc_stats"))
        wanted = {
            "max_compress_block_size": 128 << 10,
            "old_parts_lifetime": 45,
            "cleanup_delay_period": 5,
            "max_cleanup_delay_period": 10,
        }
        for name, value in wanted.items():
            assert client.command(f"SELECT value FROM system.merge_tree_settings WHERE name = '{name}'") == value
    heaps = ("opt.narenas: 1", "opt.dirty_decay_ms: 500", 'opt.percpu_arena: "disabled"')
    for option in (*heaps, "opt.tcache_max: 1024", "opt.tcache_nslots_small_max: 32"):
        assert option in stats.replace("\\n", "\n"), stats[:3000]


def test_rows_outlive_a_crash_before_what_they_were_merged_into_is_on_the_disk(url: str, tmp_path: Path) -> None:
    """The crash is simulated: the engine is killed, and the files of the merged part are empty."""
    with open_store(url) as store:
        with store.lease() as client:
            client.command("CREATE TABLE t (a UInt64) ENGINE = MergeTree ORDER BY a")
            for number in range(5):
                client.command(f"INSERT INTO t SELECT number + {1000 * number} FROM numbers(1000)")
            client.command("OPTIMIZE TABLE t FINAL")
            path = str(client.command("SELECT path FROM system.parts WHERE table = 't' AND active"))
            merged = tmp_path / "store" / path.partition("/fd/")[2].partition("/")[2]
        time.sleep(
            13.0
        )  # a table is cleaned 5 to 12 s after the last time (CONFIG): once, at least, and nothing tells when
        os.kill(engine_pid(tmp_path / "store"), signal.SIGKILL)
        assert wait_until(lambda: store._anchor is not None and not open_module._alive(store._anchor))
        for file in merged.iterdir():
            file.write_bytes(b"")
        with store.lease() as client:
            assert client.query("SELECT count(), uniqExact(a) FROM t").result_rows == [(5000, 5000)]


def test_a_query_may_hold_any_bytes(url: str, tmp_path: Path) -> None:
    with open_store(url) as store, store.lease(), engine_connection(tmp_path / "store") as connection:
        answers = []
        for sql in (b"SELECT hex('\x9e')", b"SELECT 1 FRM \x9e X"):
            connection.request("POST", "/", sql)
            answer = connection.getresponse()
            answers.append((answer.status, answer.read()))
    assert answers[0] == (200, b"9E\n")
    assert answers[1] == (500, b"the query is refused; why is not known, since it is not UTF-8")


def test_an_engine_loads_chdb_alone(url: str, tmp_path: Path) -> None:
    """pyarrow and numpy, which chdb would import, take 30 MB of it."""
    with open_store(url) as store, store.lease() as client:
        client.command("CREATE TABLE t (a UInt8) ENGINE = MergeTree ORDER BY a")
        client.insert_arrow("t", pa.table({"a": pa.array([7], pa.uint8())}))
        assert client.query("SELECT a FROM t").result_rows == [(7,)]
        mapped = Path(f"/proc/{engine_pid(tmp_path / 'store')}/maps").read_text()
    assert "chdb" in mapped
    assert not [line for line in mapped.splitlines() if "pyarrow" in line or "numpy" in line]


def test_a_killed_engine_is_replaced(url: str, tmp_path: Path) -> None:
    with open_store(url) as store:
        with store.lease() as client:
            client.command("CREATE TABLE t (a UInt8) ENGINE = MergeTree ORDER BY a")
            client.command("INSERT INTO t VALUES (7)")
        os.kill(engine_pid(tmp_path / "store"), signal.SIGKILL)
        # A killed process of many threads is dead before its sockets are closed.
        assert wait_until(lambda: store._anchor is not None and not open_module._alive(store._anchor))
        with store.lease() as client:
            assert client.query("SELECT a FROM t").result_rows == [(7,)]


def test_an_engine_whose_folder_was_removed_ends(url: str, tmp_path: Path) -> None:
    with open_store(url) as store:
        with store.lease() as client:
            assert client.command("SELECT 1") == 1
        engine = engine_pid(tmp_path / "store")
        (tmp_path / "store").rename(tmp_path / "gone")
        assert wait_until(lambda: not running(engine), 60)
        assert wait_until(lambda: store._anchor is not None and not open_module._alive(store._anchor))
        with store.lease() as client:
            assert client.command("SELECT 2") == 2
        assert engine_pid(tmp_path / "store") != engine


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_a_new_store_on_a_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "none", disk], capture_output=True
    ).returncode:
        pytest.skip("mount is not allowed here")
    try:
        with contextlib.suppress(OSError):
            (disk / "fill").write_bytes(b"x" * 65536)
        with open_store(f"chdb://{disk}/store") as store, pytest.raises(ArgusError, match="no space is left"):
            ensure_schema(store)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_a_long_path_fits_the_socket(left: dict[str, Path]) -> None:
    folder = left["long"]
    assert engine_pid(folder)
    assert wait_until(lambda: not (folder / "socket").exists())


def test_threads_share_a_store(running_store: Store) -> None:
    wrong: list[object] = []
    with open_store(running_store.url) as store:

        def work(number: int) -> None:
            for _ in range(20):
                with store.lease() as client:
                    if client.command("SELECT {n:UInt32}", parameters={"n": number}) != number:
                        wrong.append(number)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_a_forked_child_can_query(url: str) -> None:
    code = """
import os, sys
from argus.store.open import open_store
store = open_store(sys.argv[1])
with store.lease() as client:
    client.command("SELECT 1")
pid = os.fork()
own_pid, ok = os.getpid(), True
for _ in range(200):
    with store.lease() as client:
        ok = ok and client.command(f"SELECT {own_pid}") == own_pid
if pid == 0:
    os._exit(0 if ok else 1)
assert ok and os.waitpid(pid, 0)[1] == 0
with store.lease() as client:
    assert client.command("SELECT 6") == 6
"""
    child = python(code, url)
    _, err = child.communicate(timeout=30)
    assert child.returncode == 0, err


def test_settings_do_not_leak_between_requests(running_store: Store) -> None:
    with running_store.lease() as client:
        client.command("SELECT 1", settings={"readonly": 2, "max_threads": 1})
        client.command("CREATE OR REPLACE TABLE t (a UInt8) ENGINE = Memory")
        with pytest.raises(Exception, match="readonly"):
            client.command("INSERT INTO t VALUES (1)", settings={"readonly": 2})


def test_parameters_of_every_length_arrive(running_store: Store) -> None:
    text = "tab\t line\n quote ' back \\ ü"
    with running_store.lease() as client:
        assert client.query("SELECT {x:String}", parameters={"x": text}).result_rows == [(text,)]
        # So long that the client sends a form instead of a URL.
        many = list(range(20000))
        assert client.query("SELECT sum(arrayJoin({x:Array(UInt32)}))", parameters={"x": many}).result_rows == [
            (sum(many),)
        ]


def test_signals_end_a_client_but_not_the_shared_engine(url: str, tmp_path: Path) -> None:
    code = """
import sys
from argus.store.open import open_store
store = open_store(sys.argv[1])
with store.lease() as client:
    print("ready", flush=True)
    try:
        client.command("SELECT sum(sleepEachRow(0.01)) FROM numbers(2000) SETTINGS max_block_size = 10")
    except KeyboardInterrupt:
        print("interrupted")
        sys.exit(7)
"""
    with open_store(url) as watcher, watcher.lease() as client:
        ends = {signal.SIGINT: 7, signal.SIGTERM: -signal.SIGTERM}
        victims = {number: python(code, url) for number in ends}
        for victim in victims.values():
            assert victim.stdout is not None
            assert victim.stdout.readline() == "ready\n"
        sleeping = "SELECT countIf(query LIKE '%sleepEachRow(%' AND query NOT LIKE '%processes%') FROM system.processes"
        assert wait_until(lambda: client.command(sleeping) == len(victims))
        for left, (number, victim) in zip((1, 0), victims.items(), strict=True):
            victim.send_signal(number)
            victim.communicate(timeout=10)
            assert victim.returncode == ends[number]
            gone = wait_until(lambda left=left: client.command(sleeping) == left, 5)
            assert gone, "the query of a client that is gone goes on"
        for number in ends:
            os.kill(engine_pid(tmp_path / "store"), number)
        time.sleep(0.5)
        assert client.command("SELECT 1") == 1, "the engine left its client alone"


def test_a_foreign_holder_is_named(url: str, tmp_path: Path) -> None:
    code = """
import fcntl, os, sys
os.makedirs(sys.argv[1])
lock = os.open(sys.argv[1] + "/lock", os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
os.write(lock, f"{os.getpid()} started by a test".encode())
print("held", flush=True)
sys.stdin.read()
"""
    holder = python(code, str(tmp_path / "store"))
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with open_store(url) as store:
        named = rf"process {holder.pid} \(started by a test\)"
        with pytest.raises(ArgusError, match=named) as failure, store.lease(0.3):
            pass
        assert failure.value.exit_code == EXIT_UNAVAILABLE
        # It waits, and goes on as soon as it may.
        threading.Timer(0.3, holder.kill).start()
        with store.lease(10) as client:
            assert client.command("SELECT 1") == 1
    holder.communicate()


def test_a_program_that_uses_chdb_itself_is_distinguished(url: str, tmp_path: Path) -> None:
    code = """
import sys, chdb, os
os.makedirs(sys.argv[1])
connection = chdb.connect(sys.argv[1] + "/db")
print("held", flush=True)
sys.stdin.read()
"""
    holder = python(code, str(tmp_path / "store"))
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with (
        open_store(url) as store,
        pytest.raises(ArgusError, match="another program has opened") as failure,
        store.lease(5),
    ):
        pass
    assert failure.value.exit_code == EXIT_UNAVAILABLE
    holder.kill()
    holder.communicate()


def test_damaged_data_is_reported(left: dict[str, Path]) -> None:
    folder = left["damaged"]
    assert wait_until(lambda: not (folder / "socket").exists())
    assert wait_until(lambda: not running(engine_pid(folder)))
    definition = next((folder / "db").glob("store/*/*/t.sql"))
    definition.write_text("no SQL")
    with open_store(f"chdb://{folder}") as store, pytest.raises(ArgusError) as failure, store.lease(10):
        pass
    assert failure.value.exit_code == EXIT_UNAVAILABLE
    assert str(folder) in failure.value.message
    assert "engine.log" in failure.value.hint


def test_unusable_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgusError, match="cannot create") as failure, open_store(f"chdb://{tmp_path}/file/x").lease():
        pass
    assert failure.value.exit_code == EXIT_UNAVAILABLE
    with (
        pytest.raises(ArgusError, match="nothing is stored yet"),
        open_store(f"chdb://{tmp_path}/none", create=False).lease(),
    ):
        pass
    assert not (tmp_path / "none").exists()
    # Root may write anywhere, so the refusal is made here.
    monkeypatch.setattr(os, "access", lambda *_: False)
    with (
        pytest.raises(ArgusError, match="not even root may use" if os.geteuid() == 0 else "may not use"),
        open_store(f"chdb://{tmp_path}/locked").lease(),
    ):
        pass
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    with pytest.raises(ArgusError, match="mounted read-only"), open_store(f"chdb://{tmp_path}/locked").lease():
        pass


def test_missing_chdb_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    with pytest.raises(ArgusError, match="chdb") as failure, open_store(url).lease():
        pass
    assert "pip install chdb" in failure.value.hint


def test_the_working_directory_is_left_alone(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit('imported from the working directory')")
    (tmp_path / "config.xml").write_text("not XML")
    monkeypatch.chdir(tmp_path)
    with open_store(url) as store, store.lease() as client:
        assert client.command("SELECT 1") == 1


# ---- a server: the engine's own HTTP interface, behind a port ----


@contextlib.contextmanager
def served_on_a_port(url: str, folder: Path) -> Iterator[int]:
    """Forwards a TCP port to the engine's socket. Not a real server: no users, no TLS."""
    with open_store(url) as keeper, keeper.lease():
        listener = socket.create_server(("127.0.0.1", 0))

        def copy(source: socket.socket, sink: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(65536):
                    sink.sendall(data)
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_WR)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    behind = socket.socket(socket.AF_UNIX)
                    behind.connect(str(folder / "socket"))
                    for pair in ((client, behind), (behind, client)):
                        threading.Thread(target=copy, args=pair, daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.close()


def test_a_server_over_http(url: str, tmp_path: Path) -> None:
    with served_on_a_port(url, tmp_path / "store") as port:
        server_url = f"clickhouse://127.0.0.1:{port}/traces"
        with open_store(server_url) as store:
            with pytest.raises(ArgusError, match="no database 'traces'") as failure:
                ensure_schema(store)
            assert "argus store init" in failure.value.hint
            state = init_schema(store)
            assert state.version == state.known
            assert ensure_schema(store) == state
            with store.lease() as client:
                assert client.command("SELECT count() FROM system.tables WHERE database = 'traces'") > 8
        with open_store(f"clickhouse://127.0.0.1:{port}/default") as store:
            assert schema_state(store).version == 0
            with pytest.raises(ArgusError, match="no Argus tables"):
                ensure_schema(store)


def test_an_unreachable_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    refused = rf"cannot reach the store 127\.0\.0\.1:{port}: connection refused"
    with (
        pytest.raises(ArgusError, match=refused) as failure,
        open_store(f"clickhouse://127.0.0.1:{port}/argus").lease(),
    ):
        pass
    assert failure.value.exit_code == EXIT_UNAVAILABLE
    unknown = r"cannot reach the store nowhere\.invalid:8123"
    with pytest.raises(ArgusError, match=unknown), open_store("clickhouse://nowhere.invalid/argus").lease():
        pass


def test_a_refused_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append(self.headers.get("Authorization"))
            self.send_response(403)
            self.send_header("X-ClickHouse-Exception-Code", "516")
            self.end_headers()
            self.wfile.write(b"Code: 516. DB::Exception: me: Authentication failed. (AUTHENTICATION_FAILED)")

        do_GET = do_POST

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "secret").write_text("hunter2\n")
    monkeypatch.setenv("ARGUS_STORE_PASSWORD_FILE", str(tmp_path / "secret"))
    url = f"clickhouse://me@127.0.0.1:{server.server_port}/argus"
    with pytest.raises(ArgusError, match=r"127\.0\.0\.1 refused user 'me'") as failure, open_store(url).lease():
        pass
    server.shutdown()
    assert failure.value.exit_code == EXIT_UNAVAILABLE
    assert "hunter2" not in str(failure.value)
    assert seen[0] == "Basic bWU6aHVudGVyMg=="
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name, reason in (
        ("absent", "No such file or directory"),
        ("", "Is a directory"),
        ("binary", "it is no text in UTF-8"),
    ):
        path = str(tmp_path / name)
        monkeypatch.setenv("ARGUS_STORE_PASSWORD_FILE", path)
        with pytest.raises(ArgusError) as failure, open_store("clickhouse://db/argus").lease():
            pass
        assert failure.value.message == f"cannot read the password file '{path}': {reason}"


def test_errors_are_cut_to_one_line() -> None:
    text = (
        "Received ClickHouse exception, code: 60, server response: Code: 60. DB::Exception: Unknown table expression "
        "identifier 'x' in scope SELECT 1 FROM x. (UNKNOWN_TABLE) (version 26.9.2.1 (official build)) (for url http://h:1)"
    )
    assert first_line(text) == "Unknown table expression identifier 'x' in scope SELECT 1 FROM x. (UNKNOWN_TABLE)"


def test_a_password_with_a_slash_in_it_is_not_printed() -> None:
    with pytest.raises(ArgusError) as wrong:
        parse_url("clickhouse://argus:s3cret/x@db/argus")
    assert "s3cret" not in str(wrong.value) + wrong.value.hint


@pytest.mark.parametrize("code", [202, 241])
def test_what_passes_by_itself_is_distinguished_from_what_is_wrong(code: int) -> None:
    from clickhouse_connect.driver.exceptions import DatabaseError

    for number, passes in ((code, True), (60, False)):
        failure = DatabaseError("Code: x. DB::Exception: no")
        failure.code = number
        assert transient(open_store("chdb:///nowhere").explain(failure)) == passes


def test_a_query_that_took_too_long_is_the_query_s_fault() -> None:
    from clickhouse_connect.driver.exceptions import DatabaseError

    failure = DatabaseError("Code: 159. DB::Exception: Timeout exceeded")
    failure.code = 159
    assert transient(failure), "an insert may be tried again"
    assert open_store("chdb:///nowhere").explain(failure).exit_code == 1
