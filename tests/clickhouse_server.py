"""A real ClickHouse server for tests: HTTP and native protocol on free ports of the loopback, users with passwords.

npm's ``@chdb/lib-linux-x64-gnu`` is ClickHouse as a library. It has clickhouse-local's whole command line behind one C
function, ``query_stable_v2(argc, argv)``, and clickhouse-local 26.7 can ``SYSTEM START LISTEN``: one call that does not
return is a server, with users, merges, materialised views, TTL and deduplication. What it lacks: replication (tables
stay read-only), ``ON CLUSTER``, background sends of Distributed tables. ``ARGUS_WITH_SERVER=1 scripts/setup`` installs
it.

Run as a program, this file is that process: ``python clickhouse_server.py LIBRARY ARGUMENT…``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path

PACKAGE = "node_modules/@chdb/lib-linux-x64-gnu/libchdb.so"
FOLDER = Path(os.environ.get("ARGUS_SERVER_FOLDER", Path(__file__).resolve().parent.parent / "build" / "clickhouse"))
USER, PASSWORD, READER = "argus", "correct horse", "reader"

_CONFIG = """<clickhouse>
  <users_config>{folder}/users.xml</users_config>
  <logger><level>error</level><log>{folder}/server.log</log></logger>
  <max_server_memory_usage_to_ram_ratio>0.3</max_server_memory_usage_to_ram_ratio>
  {remote}
</clickhouse>
"""
_USERS = """<clickhouse>
  <profiles><default><max_threads>2</max_threads></default><readonly><readonly>1</readonly></readonly></profiles><quotas><default/></quotas>
  <users>
    <default><no_password/><networks><ip>127.0.0.1</ip></networks><profile>default</profile><quota>default</quota>
      <access_management>1</access_management></default>
    <argus><password>{password}</password><networks><ip>127.0.0.1</ip></networks><profile>default</profile>
      <quota>default</quota><access_management>1</access_management></argus>
    {more}
  </users>
</clickhouse>
"""
_FOREVER = "SELECT sleepEachRow(3) FROM numbers(1000000) SETTINGS function_sleep_max_microseconds_per_block = 0, "


def library() -> Path | None:
    """The library; None: it is not installed."""
    path = FOLDER / PACKAGE
    return path if path.exists() else None


MISSING = ""
"""Why tests of a server are skipped; empty: they run. Where it was asked for, as in CI, its lack is a failure."""
if library() is None and (os.environ.get("ARGUS_WITH_SERVER") != "1" or os.uname().machine != "x86_64"):
    MISSING = "no ClickHouse server here: ARGUS_WITH_SERVER=1 scripts/setup"


class Server:
    """One server. Its data outlives ``kill`` and ``start``.

    Args:
        folder: Its own, for data and configuration.
        shards: (host, port, …) of a cluster ``two`` that its Distributed tables may use: native ports.
        users: XML of further users.
    """

    def __init__(self, folder: Path, *, shards: Mapping[str, list[int]] | None = None, users: str = "") -> None:
        self.folder = folder
        # Run as a program, this file does not see the other tests' modules.
        from tests.ports import free_port

        self.port, self.native_port = free_port(), free_port()
        self.shards: dict[str, list[int]] = dict(shards or {})
        self._users = users
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def url(self, database: str = "argus", user: str = USER) -> str:
        return f"clickhouse://{user}@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        """Starts it and waits until it answers. Where it does not, nothing of it is left."""
        try:
            self._start()
        except BaseException:  # `__exit__` never runs where `__enter__` has failed
            self.kill()
            raise

    def _start(self) -> None:
        path = library()
        assert path is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        clusters = "".join(
            f"<{name}>"
            + "".join(
                f"<shard><internal_replication>true</internal_replication><replica><host>127.0.0.1</host>"
                f"<port>{port}</port><user>{USER}</user><password>{PASSWORD}</password></replica></shard>"
                for port in ports
            )
            + f"</{name}>"
            for name, ports in self.shards.items()
        )
        remote = f"<remote_servers>{clusters}</remote_servers>" if clusters else ""
        (self.folder / "config.xml").write_text(_CONFIG.format(folder=self.folder, remote=remote))
        (self.folder / "users.xml").write_text(_USERS.format(password=PASSWORD, more=self._users))
        arguments = [
            "clickhouse", f"--config-file={self.folder}/config.xml", f"--path={self.folder}/data",
            f"--http_port={self.port}", f"--tcp_port={self.native_port}", "--listen_host=127.0.0.1",
            "--query", f"SYSTEM START LISTEN HTTP; SYSTEM START LISTEN TCP; {_FOREVER} max_block_size = 1 FORMAT Null",
        ]  # fmt: skip
        with open(self.folder / "out.log", "ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(path), *arguments], stdout=out, stderr=out, stdin=subprocess.DEVNULL
            )
        deadline = time.monotonic() + 60
        while True:
            ping = f"http://127.0.0.1:{self.port}/ping"
            with contextlib.suppress(OSError, HTTPException), urllib.request.urlopen(ping, timeout=2) as answer:
                if answer.status == 200:
                    return
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the server did not start: " + (self.folder / "out.log").read_text()[-2000:])
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL: as a power cut to the process."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def command(self, sql: str, database: str = "default") -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/?database={database}",
            sql.encode(),
            {"X-ClickHouse-User": USER, "X-ClickHouse-Key": PASSWORD},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as failure:
            raise RuntimeError(failure.read().decode()) from None

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class _Result(ctypes.Structure):
    """``local_result_v2`` of chdb.h."""

    _fields_ = (
        ("buf", ctypes.c_char_p), ("len", ctypes.c_size_t), ("vec", ctypes.c_void_p), ("elapsed", ctypes.c_double),
        ("rows_read", ctypes.c_uint64), ("bytes_read", ctypes.c_uint64), ("error_message", ctypes.c_char_p),
    )  # fmt: skip


def _main() -> None:
    # Nothing outlives the test that started it, however that ends.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    arguments = [argument.encode() for argument in sys.argv[2:]]
    call = ctypes.CDLL(sys.argv[1]).query_stable_v2
    call.restype = ctypes.POINTER(_Result)
    result = call(len(arguments), (ctypes.c_char_p * len(arguments))(*arguments))
    sys.exit(f"ended: {result.contents.error_message}" if result else "ended")


if __name__ == "__main__":
    _main()
