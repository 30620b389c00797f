"""One URL, one store: ``chdb:///folder`` (embedded) or ``clickhouse://user@host:8443/argus?secure=true`` (a server).

Both are reached through the same clickhouse-connect HTTP client. For the embedded engine it speaks over a Unix socket
to a process that owns chdb (``engine.py``), started here when none runs yet. A third kind, ``spool:///folder``, only
takes rows, as files that are loaded into a store later (``spool.py``); it needs neither package.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.util
import logging
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.model.units import span_text
from argus.store import limits
from argus.store.engine import ENDING, socket_address
from argus.store.failures import AUTHENTICATION, REACH_HINT, code_of, disk_full, explain, first_line, spool_not_queried
from argus.store.url import ROOTS_STORE, Target, parse_url, password_of_environment, truth
from argus.system import child, files
from argus.system.proc import field_of, number, read_file

LEASE_TIMEOUT_S = 30.0
"""How long to wait for another process to let go of an embedded store."""
CONNECT_S = 30
"""How long a server may take to answer when a connection is made."""
QUERY_S = 3600
"""How long it may take to answer later."""

_INSERT = {
    # An imported trace may span months; ClickHouse's own limit is 100 partitions (days) in one insert.
    "max_partitions_per_insert_block": 5000,
    # The token's promise holds for synchronous inserts, and not where a user's profile has switched it off.
    "async_insert": 0,
    "deduplicate_insert": "enable",
    # A rollup keeps it as well: a retry repairs the rollup where the engine was killed between the two.
    "deduplicate_blocks_in_dependent_materialized_views": 1,
    # Of a cluster: acknowledged means that every shard has its rows.
    "distributed_foreground_insert": 1,
}


class Store:
    """A store that may be shared with other processes and threads.

    Nothing is opened before the first ``lease``. Every method may be called from any thread.
    """

    def __init__(self, target: Target, *, create: bool) -> None:
        self.target = target
        self.bounds: limits.QueryBounds | None = None
        """Of what is asked of it from now on; None: none."""
        self._create = create
        self._guard = threading.Lock()
        self._client: Any = None
        self._anchor: socket.socket | None = None
        self._pid = os.getpid()
        self._engine, self._engine_s, self._engines_s = b"", 0.0, 0.0
        """The process of the embedded engine, its CPU time, and that of those it replaced, as of the last look."""
        self._number = 0
        """Of the newest file that was written to a spool; 0: none was."""

    @property
    def url(self) -> str:
        """The URL as shown to people; holds no password."""
        return self.target.url

    @property
    def embedded(self) -> bool:
        """Whether the engine runs on this machine, for Argus alone."""
        return self.target.path is not None

    @property
    def spooled(self) -> bool:
        """Whether rows become files to be loaded later: nothing can be asked of it."""
        return self.target.spool is not None

    @property
    def database(self) -> str:
        """The database that holds the tables."""
        return self.target.database

    def exists(self) -> bool:
        """Whether there is a store to open: always true for a server."""
        return self.target.path is None or _has_engine(self.target.path)

    @contextlib.contextmanager
    def lease(self, timeout_s: float = LEASE_TIMEOUT_S) -> Iterator[Any]:
        """Yields a clickhouse-connect ``Client``, connecting where needed.

        Leases do not exclude one another: other threads and other processes may hold one at the same time. The client
        is safe to use from several threads.

        Args:
            timeout_s: How long to wait for another process that is opening, closing or wrongly holding the folder.

        Raises:
            ArgusError: The store cannot be reached, with the reason, or is a spool. Failures of a query itself are
                clickhouse-connect's own exceptions; ``explain`` translates them.
        """
        if self.target.spool is not None:
            raise spool_not_queried(self.target)
        with self._guard:
            if os.getpid() != self._pid:
                # After a fork the connections belong to the parent.
                self._client = self._anchor = None
                self._pid = os.getpid()
            if self._client is not None and self._anchor is not None and not _alive(self._anchor):
                self._drop()
            if self._client is None:
                self._client = self._connect(timeout_s)
            client = self._client
        try:
            yield client
        except Exception as failure:
            if code_of(failure) in AUTHENTICATION:
                # Passwords change, in the file that holds them too: it is read when the next connection is made.
                with self._guard:
                    if self._client is client:
                        self._drop()
            raise

    def begin(self) -> None:
        """Starts to connect, in a thread of its own: an embedded engine takes a second to start. What goes wrong is
        reported by the first lease."""
        if self.target.spool is None:
            threading.Thread(target=self._connect_ahead, name="argus-connect", daemon=True).start()

    def _connect_ahead(self) -> None:
        with contextlib.suppress(Exception), self.lease():
            pass

    def insert(self, table: str, rows: Any, token: str, timeout_s: float = LEASE_TIMEOUT_S) -> None:
        """Stores rows (an Arrow table of ``arrow.to_arrow``'s types); of a token that was stored before, nothing.

        Raises:
            ArgusError: They are not stored, or perhaps not; ``transient`` says whether trying again may help.
        """
        if self.target.spool is not None:
            from argus.store import spool  # numpy and Arrow, which others need only later

            # The folder is listed once: from then on this store knows the number of its newest file.
            file = spool.write(
                self.target.spool, table, token, rows, number=self._number and self._number + 1, sync=True
            )
            self._number = int(file.name.split("-")[0])
            return
        with self.lease(timeout_s) as client:
            from argus.store.driver import Error

            try:
                client.insert_arrow(table, rows, settings={**_INSERT, "insert_deduplication_token": token})
            except Error as failure:
                raise self.explain(failure) from failure

    def close(self) -> None:
        """Ends the connections. An embedded engine without other clients ends by itself soon after."""
        with self._guard:
            self._drop()

    def engine_cpu_s(self) -> float:
        """CPU time that the embedded engine and those it replaced have used so far, s; 0 for a server, or where none
        ran."""
        stat = self._of_engine("stat")
        if stat:
            name, _, rest = stat.rpartition(b")")
            user, system = rest.split()[11:13]
            if self._engine not in (b"", name):
                self._engines_s += self._engine_s
            self._engine, self._engine_s = name, (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
        return self._engines_s + self._engine_s

    def engine_peak_bytes(self) -> int:
        """The most memory that the embedded engine has had so far; 0 for a server, or where none runs."""
        return max(number(field_of(self._of_engine("status"), b"VmHWM").removesuffix(b" kB")), 0) * 1024

    def _of_engine(self, file: str) -> bytes:
        """A file of the embedded engine's process in /proc; empty: none runs."""
        holder = None if self.target.path is None else _holder(self.target.path)
        if not holder:
            return b""
        try:
            return read_file(f"/proc/{holder.split()[0]}/{file}")
        except OSError:
            return b""

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _drop(self) -> None:
        client, anchor, self._client, self._anchor = self._client, self._anchor, None, None
        if client is not None:
            with contextlib.suppress(Exception):
                client.close()
                client.http.clear()
        if anchor is not None:
            anchor.close()

    def _connect(self, timeout_s: float) -> Any:
        # The driver logs what it also raises, to standard error where nobody has set logging up.
        logging.getLogger("clickhouse_connect").setLevel(logging.CRITICAL)
        target = self.target
        if target.path is not None:
            # The driver takes a while to import, as the engine takes to start: it does so meanwhile.
            self._anchor = _connect_engine(target.path, timeout_s, self._create, meanwhile=_import_driver)
        try:
            clickhouse_connect, Error = _import_driver()
        except BaseException:
            self._drop()
            raise
        common: dict[str, Any] = {
            "autogenerate_session_id": False,
            "connect_timeout": 10,
            "send_receive_timeout": QUERY_S,
            "query_retries": 0,
            "client_name": "argus",
        }
        from urllib3.util import Timeout

        try:
            if target.path is not None:
                return clickhouse_connect.get_client(
                    interface="http",
                    host="argus",
                    port=80,
                    database=target.database,
                    compress=False,
                    pool_mgr=_unix_pool(target.path),
                    **common,
                )
            verify = truth("verify", target.options.get("verify", "true"))
            if not verify:
                import urllib3

                urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)  # who asked for it knows
            client = clickhouse_connect.get_client(
                interface="https" if target.secure else "http",
                host=target.host,
                port=target.port,
                username=target.user,
                password=password_of_environment(),
                database=target.database,
                verify=verify,
                ca_cert=_authority(target),
                # What is asked first takes no time: so a server that hangs is distinguished from a long query.
                **{**common, "send_receive_timeout": CONNECT_S},
            )
            client.timeout = Timeout(connect=common["connect_timeout"], read=QUERY_S)
            # Joins of a cluster's tables, whose rows of one key may be on different shards.
            mode = client.server_settings.get("distributed_product_mode")
            if mode is not None and not mode.readonly:
                client.set_client_setting("distributed_product_mode", "global")
            return client
        except Error as failure:
            self._drop()
            raise self.explain(failure) from None
        except (ValueError, TypeError, LookupError, ArithmeticError, EOFError, zlib.error) as failure:
            self._drop()
            where = str(target.path) if target.path is not None else f"{target.host}:{target.port}"
            why = first_line(str(failure)) or type(failure).__name__
            raise ArgusError(
                f"{where} does not answer as ClickHouse does: {why}", REACH_HINT, EXIT_UNAVAILABLE
            ) from None
        except BaseException:
            self._drop()
            raise

    def explain(self, failure: Exception) -> ArgusError:
        """Turns an exception of clickhouse-connect into one line: what is wrong with the store or the query."""
        return explain(failure, self.target)


def open_store(url: str | None = None, *, create: bool = True) -> Store:
    """The store that a URL names. Connects to nothing before the first use.

    Args:
        url: The URL; None: ``ARGUS_STORE``, else the default (``default_url``).
        create: Whether an embedded store's folder may be created. False for verbs that only read.

    Raises:
        ArgusError: The URL is wrong, or a spool's for a verb that only reads.
    """
    target = parse_url(url)
    if target.spool is not None and not create:
        raise spool_not_queried(target)
    return Store(target, create=create)


def _authority(target: Target) -> str | None:
    """The file of the certificate authority that a URL names.

    Raises:
        ArgusError: It cannot be read, or is none.
    """
    import ssl

    file = target.options.get("ca_cert")
    if file and target.secure:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
        except OSError as failure:  # an SSLError is one
            reason = "it holds no certificate in PEM form" if isinstance(failure, ssl.SSLError) else failure.strerror
            raise ArgusError(f"cannot read ca_cert '{file}': {reason}", "See the store URL", EXIT_UNAVAILABLE) from None
    return file


# ---- the embedded engine -------------------------------------------------------------------------------------------


def _unix_pool(folder: Path) -> Any:
    """A urllib3 pool whose every connection goes to the engine's socket."""
    from urllib3 import HTTPConnectionPool, PoolManager
    from urllib3.connection import HTTPConnection

    class Connection(HTTPConnection):
        def _new_conn(self) -> socket.socket:
            from urllib3.exceptions import NewConnectionError

            try:
                return _dial(folder)
            except (ConnectionError, FileNotFoundError) as failure:
                # The engine has ended since the client was made.
                if not _has_engine(folder):
                    raise NewConnectionError(self, str(failure)) from failure
                return _connect_engine(folder, LEASE_TIMEOUT_S, create=False, meanwhile=_nothing)
            except OSError as failure:
                raise NewConnectionError(self, str(failure)) from failure

        def request(self, method: str, url: str, body: Any = None, *words: Any, **named: Any) -> None:
            try:
                super().request(method, url, body, *words, **named)
            except BrokenPipeError:
                if hasattr(body, "read") or hasattr(body, "__next__"):
                    raise
                # An engine that ends answers what it has read whole, and no more: this it has not.
                self.close()
                super().request(method, url, body, *words, **named)

    class Pool(HTTPConnectionPool):
        ConnectionCls = Connection

    manager = PoolManager(maxsize=16)
    manager.pool_classes_by_scheme = {"http": Pool}
    return manager


def _dial(folder: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with socket_address(folder) as address:
            connection.connect(address)
        # Who answers must be the engine, not somebody who has put a socket in its place.
        _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid not in (0, os.geteuid()):
            raise files.Untrusted(folder / "socket", f"it is answered by {files.owner(uid)}")
    except BaseException:
        connection.close()
        raise
    return connection


def _nothing() -> None:
    """What there is to do while an engine starts."""


def _import_driver() -> tuple[Any, type[Exception]]:
    """The package clickhouse-connect and its error.

    Raises:
        ArgusError: It is not installed.
    """
    try:
        from argus.store.driver import Error, clickhouse_connect
    except ImportError as missing:
        raise ArgusError(
            f"the Python package '{missing.name}' is missing",
            "pip install 'clickhouse-connect[arrow]'",
            EXIT_UNAVAILABLE,
        ) from None
    return clickhouse_connect, Error


def _alive(anchor: socket.socket) -> bool:
    try:
        return bool(anchor.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False


def _connect_engine(folder: Path, timeout_s: float, create: bool, meanwhile: Callable[[], object]) -> socket.socket:
    """Connects to the engine of the store in ``folder``, starting it where none runs.

    Args:
        folder: The store's folder.
        timeout_s: How long to wait for it.
        create: Whether the folder may be created.
        meanwhile: Called while the engine starts.

    Returns:
        A connection that has been answered. The engine lives at least as long as it stays open.

    Raises:
        ArgusError: The folder is unusable, the engine does not start, or another process holds the folder.
    """
    _prepare(folder, create)
    deadline = time.monotonic() + timeout_s
    wait_s = 0.01
    while True:
        try:
            connection = _dial(folder)
            connection.settimeout(timeout_s)
            connection.sendall(b"GET /ping HTTP/1.1\r\nHost: argus\r\n\r\n")
            if connection.recv(4096).startswith(b"HTTP/1.1 200"):
                connection.settimeout(None)
                return connection
            connection.close()
        except files.Untrusted as failure:
            raise _untrusted(folder, failure) from None
        except PermissionError:
            raise _forbidden(folder) from None
        except OSError:
            pass
        holder = _holder(folder)
        if holder is None:
            outcome = _start_engine(folder, max(1.0, deadline - time.monotonic()), meanwhile)
            if outcome == "ready":
                continue
            if outcome != "busy":
                raise _engine_failure(folder, outcome)
        if time.monotonic() >= deadline:
            if holder is None:  # whoever held the lock has just ended
                raise ArgusError(
                    f"the store's engine did not start within {span_text(timeout_s)} ({folder})",
                    "The machine is busy: try again",
                    EXIT_UNAVAILABLE,
                )
            pid, _, who = holder.partition(" ")
            if ENDING in who:
                raise ArgusError(
                    f"the store's engine (process {pid}) ends, and still answers others ({folder})",
                    "Try again: the next command starts another",
                    EXIT_UNAVAILABLE,
                )
            raise ArgusError(
                f"process {pid} ({who}) holds the store {folder} and does not answer",
                f"Wait for it, or end it: kill {pid}",
                EXIT_UNAVAILABLE,
            )
        time.sleep(wait_s)
        wait_s = min(wait_s * 1.5, 0.2)


def _has_engine(folder: Path) -> bool:
    """Whether there is a store in a folder.

    Raises:
        ArgusError: It may not be looked at.
    """
    try:
        return (folder / "db").is_dir()
    except PermissionError:
        raise _forbidden(folder) from None


def _prepare(folder: Path, create: bool) -> None:
    if not create and not _has_engine(folder):
        raise ArgusError(f"nothing is stored yet at {folder}", nothing_hint(), EXIT_UNAVAILABLE)
    try:
        files.make_folder(folder, 0o700)
    except files.Untrusted as failure:
        raise _untrusted(folder, failure) from None
    except OSError as failure:
        raise ArgusError(
            f"cannot create the store's folder {folder}: {failure.strerror}", _FOLDER_HINT, EXIT_UNAVAILABLE
        ) from None
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise _forbidden(folder)
    try:
        os.close(files.open_folder(folder))
    except files.Untrusted as failure:
        raise _untrusted(folder, failure) from None
    if importlib.util.find_spec("chdb") is None:
        raise ArgusError(
            "the embedded engine (Python package 'chdb') is not installed",
            "pip install chdb, or use a server: --store clickhouse://user@host:8443/argus",
            EXIT_UNAVAILABLE,
        )


def _untrusted(folder: Path, failure: files.Untrusted) -> ArgusError:
    what = f"the store's folder {folder}" if failure.filename == str(folder) else str(folder / failure.filename)
    hint = f"{_FOLDER_HINT}. {failure.fix}" if failure.fix else _FOLDER_HINT
    return ArgusError(f"{what} is not used: {failure.strerror}", hint, EXIT_UNAVAILABLE)


def nothing_hint() -> str:
    """What to do about an empty store. Traces run as root, whose default store is another than the user's."""
    if os.geteuid() != 0 and os.path.isdir("/var/lib/argus"):
        return "What was traced with sudo is root's: use sudo here too, or name a store of yours with --store in both"
    return "Run `argus trace --pid PID` first, or name another store with --store"


_FOLDER_HINT = "Name another folder: --store chdb:///path"


def _forbidden(folder: Path) -> ArgusError:
    import pwd

    with contextlib.suppress(OSError):
        if os.statvfs(folder).f_flag & os.ST_RDONLY:
            return ArgusError(
                f"the store's folder {folder} is on a file system that is mounted read-only",
                f"The engine writes even where it is only asked: copy it. {_FOLDER_HINT}",
                EXIT_UNAVAILABLE,
            )
    owner: object = "somebody else"
    with contextlib.suppress(KeyError, OSError):
        owner = pwd.getpwuid(folder.stat().st_uid).pw_name
    if os.geteuid() == 0:
        return ArgusError(
            f"not even root may use the store's folder {folder}, which belongs to {owner}",
            "A network file system may take root for nobody (root_squash): name a folder on a local disk, --store "
            f"{ROOTS_STORE}, or run this without sudo as its owner",
            EXIT_UNAVAILABLE,
        )
    return ArgusError(
        f"you may not use the store's folder {folder}, which belongs to {owner}",
        f"Use sudo, or another folder: --store chdb://{os.path.expanduser('~')}/.local/share/argus",
        EXIT_UNAVAILABLE,
    )


def _holder(folder: Path) -> str | None:
    """``<pid> <who>`` of the process that holds the store's lock; None: nobody does."""
    try:
        with files.opened(folder) as opened:
            fd = files.open_at(opened, "lock", os.O_RDWR)
    except FileNotFoundError:
        return None
    except files.Untrusted as failure:
        raise _untrusted(folder, failure) from None
    except PermissionError:
        raise _forbidden(folder) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(fd, 200, 0).decode("utf-8", "replace").strip() or "? ?"
    finally:
        os.close(fd)
    return None


_ALLOCATOR = (
    "percpu_arena:disabled,narenas:1,dirty_decay_ms:500,muzzy_decay_ms:0,prof:false"
    ",tcache_max:1024,tcache_nslots_small_max:32"
)
"""Options of the engine's jemalloc: one heap, not one a CPU, and what is freed goes back within half a second. It takes
a tenth less memory (``scripts/bench diagnose``); giving it back at once would cost half as much CPU time again. Each of
some 40 threads keeps little of what it freed: else they keep 15 to 20 MB."""


def _start_engine(folder: Path, timeout_s: float, meanwhile: Callable[[], object]) -> str:
    """Starts the engine and returns what it says: ``ready``, ``busy`` or ``error <text>``.

    ``meanwhile`` is called while it starts.
    """
    reader, writer = os.pipe()
    environment = child.environment()
    environment.setdefault("JE_MALLOC_CONF", _ALLOCATOR)
    environment["ARGUS_STORE_MAX"] = str(limits.store_bytes())
    command = " ".join([os.path.basename(sys.argv[0] or "python"), *sys.argv[1:2]])
    starter = f"started by process {os.getpid()}: {command}"
    try:
        with files.opened(folder) as opened:
            handle = files.open_at(opened, "engine.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        with open(handle, "ab") as log:
            os.fchmod(handle, 0o600)
            if log.tell() > 1 << 20:
                log.truncate(0)
            starting = subprocess.Popen(
                [sys.executable, "-m", "argus.store.engine", str(folder), starter, str(writer)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=environment,
                pass_fds=(writer,),
                start_new_session=True,
            )
    except OSError as failure:
        os.close(reader)
        os.close(writer)
        if isinstance(failure, files.Untrusted):
            raise _untrusted(folder, failure) from None
        if failure.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise _forbidden(folder) from None
        return f"error {failure.strerror}"
    os.close(writer)
    try:
        try:
            meanwhile()
        finally:
            starting.wait()
        poll = select.poll()  # select.select refuses descriptors from 1,024 on
        poll.register(reader, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            return "busy"
        return os.read(reader, 65536).decode("utf-8", "replace").strip() or "error it died"
    finally:
        os.close(reader)


def _engine_failure(folder: Path, outcome: str) -> ArgusError:
    text = outcome.removeprefix("error ")
    if "Code: 36" in text and "EmbeddedServer" in text:
        return ArgusError(
            f"another program has opened {folder / 'db'} with chdb itself, or its files are damaged",
            f"Close that program (see: fuser {folder / 'db'}); details are in {folder / 'engine.log'}",
            EXIT_UNAVAILABLE,
        )
    if "No space left" in text or "Code: 243" in text:
        return disk_full(str(folder))
    return ArgusError(
        f"the embedded engine cannot open {folder / 'db'}: {first_line(text)}",
        f"Details are in {folder / 'engine.log'}. If the data is damaged, move the folder away and start afresh",
        EXIT_UNAVAILABLE,
    )
