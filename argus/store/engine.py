"""The process that owns an embedded engine: ClickHouse's HTTP interface over chdb, on a Unix socket.

chdb locks its folder to one process, and closing it inside a process that lives on leaves threads, descriptors and
memory behind at every cycle. So no Argus command loads chdb. The first one that needs a store starts this process,
later ones connect to its socket, and it ends when the last of them has gone: a tracer and ``argus sql`` share a store,
and neither the tracer nor the traced job pays for chdb or dies with it.

Files in the store's folder: ``db`` (chdb's own), ``lock`` (held by this process while it lives; holds its pid and who
started it), ``socket``, ``config.xml`` (``CONFIG``, written at each start), ``engine.log`` (what this process printed).
"""

from __future__ import annotations

import contextlib
import email.parser
import email.policy
import fcntl
import json
import os
import re
import select
import signal
import socket
import socketserver
import sys
import threading
import time
import uuid
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from argus.model.units import binary_size
from argus.store import limits
from argus.store.failures import BOUND_REACHED
from argus.system import files, memory, privileges
from argus.system.limits import unbounded

LINGER_S = 2.0
"""How long the engine outlives its last client: the next command of a shell line then finds it warm."""
MEASURE_S = 10.0
"""How often the store's size is measured. What is inserted meanwhile is added as it came, which is more than what it
takes up: compressed, that is 5 MB at 50,000 operations a second."""
RENEW_BYTES = 512 << 20
"""Memory beyond which an engine that nobody asks anything at the moment ends, and its clients start the next one."""
RENEW_S = 3600.0
"""How old it must be for that: a store may need as much all along. An engine that takes rows of a tracer all the time
grows by some 40 MB an hour (``scripts/soak``): its allocator can give little back, for what stays lies among what goes.
"""
QUIET_S = 0.05
"""How long nobody has asked anything when it ends so."""
DRAIN_S = 20.0
"""How long an engine that ends waits for what is being answered. Then it is cut off."""
CLOSE_S = 8
"""How long it may take to close the database; then the kernel ends the process, whose files are whole at any moment. As
long as it holds them, nobody else opens the store (30 s are waited for that)."""
ENDING = " ends, and leaves its bound: "
"""In the lock file, of an engine that is being replaced: whoever starts the next one does not choose another bound."""
HEIR_S = 60.0
"""How long after that an engine which starts is the next one. Later nobody used the store, and its user may choose."""
MAX_THREADS = 4
"""Threads of one query. The engine shares the node with the job that is being traced."""
COMPILE_NOTHING = "compile_expressions=0&compile_aggregate_expressions=0&compile_sort_description=0"
"""No machine code is made for a query. Making it takes longer than it saves: 15 to 20 % of the engine's CPU time of a
diagnosis, of 8 ranks and of 512."""

# chdb starts 128 threads the first time that it removes parts, which keep 20 MB and more, and lets parts that were
# merged into others (400 a minute of one tracer, 16 KB each) stay for up to 5 minutes. They have to stay until
# the kernel has written the new one, which is not synchronised, to the disk: some 35 s (vm.dirty_expire_centisecs). Its
# caches may hold 5 GB each. Threads and parts can be set in a file only (``scripts/bench memory``). What conditions
# select is not remembered: an entry takes 400 bytes and not the 64 that are counted, and a diagnosis that goes on asks
# 400 times a minute, never twice the same. The two threads would have four merges under way. One took 18 to 44 MB even
# of small parts (``system.merges``), since each column that is written has a buffer as large as a compressed block may
# be, 1 MB: with 128 KiB it takes 5 to 22, and no more on disk.
CONFIG = """<clickhouse>
    <max_parts_cleaning_thread_pool_size>2</max_parts_cleaning_thread_pool_size>
    <mark_cache_size>67108864</mark_cache_size>
    <index_mark_cache_size>16777216</index_mark_cache_size>
    <primary_index_cache_size>33554432</primary_index_cache_size>
    <query_condition_cache_size>0</query_condition_cache_size>
    <compiled_expression_cache_size>16777216</compiled_expression_cache_size>
    <background_merges_mutations_concurrency_ratio>1</background_merges_mutations_concurrency_ratio>
    <merge_tree>
        <min_free_disk_bytes_to_perform_insert>{free}</min_free_disk_bytes_to_perform_insert>
        <old_parts_lifetime>45</old_parts_lifetime>
        <cleanup_delay_period>5</cleanup_delay_period>
        <cleanup_delay_period_random_add>2</cleanup_delay_period_random_add>
        <max_cleanup_delay_period>10</max_cleanup_delay_period>
        <max_compress_block_size>131072</max_compress_block_size>
    </merge_tree>
</clickhouse>
"""


def config(folder: int | Path) -> str:
    """``CONFIG`` for a store's folder: an insert is refused that would leave too little room on its disk."""
    return CONFIG.format(free=limits.kept_free(folder))


def _check_database(folder: int) -> None:
    """Refuses a database that somebody else owns: chdb follows the links in it.

    Raises:
        Untrusted: It is.
    """
    with contextlib.suppress(FileNotFoundError):
        status = os.stat("db", dir_fd=folder)
        if reason := files.distrust(status):
            raise files.Untrusted("db", reason)


# What belongs to HTTP, not to the engine: chdb would refuse them as unknown settings.
_TRANSPORT = frozenset(
    {
        "query",
        "database",
        "default_format",
        "query_id",
        "session_id",
        "session_timeout",
        "session_check",
        "quota_key",
        "compress",
        "decompress",
        "buffer_size",
        "wait_end_of_query",
        "client_protocol_version",
        "role",
        "user",
        "password",
        "send_progress_in_http_headers",
        "http_headers_progress_interval_ms",
        "enable_http_compression",
        "cancel_http_readonly_queries_on_client_close",
    }
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_INSERT_HEAD = re.compile(rb"\s*INSERT\b[^;]*?\bFORMAT\s+\w+[ \t]*\r?\n", re.IGNORECASE)
_POSITION = re.compile(r"(failed at position )(\d+)")
_CODE = re.compile(r"Code: (\d+)")


@contextlib.contextmanager
def socket_address(folder: Path) -> Any:
    """An address for the socket in ``folder`` that fits the kernel's 108 bytes, however long the path is."""
    if len(os.fsencode(folder)) < 90:
        yield str(folder / "socket")
        return
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}/socket"
    finally:
        os.close(fd)


def _quoted(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


MAX_REQUEST = 1 << 31
"""Bytes of a request's body; the writer sends a quarter of a GiB at most."""


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, folder: Path, chdb: Any, target: str, named: tuple[str, str], max_bytes: int) -> None:
        self.chdb, self.target, self.named = chdb, target, named
        self.max_bytes = max_bytes
        self.bytes = 0
        """What the tables take up on disk, as it was measured last, and all that was inserted since."""
        self.guard = threading.Lock()
        self.connections: set[socket.socket] = set()
        self.idle_since = time.monotonic()
        self.asked_s = time.monotonic()
        """When the last query ended."""
        self.running: dict[str, socket.socket] = {}
        with socket_address(folder) as address:
            super().__init__(address, _Handler)

    def get_request(self) -> tuple[Any, Any]:
        # Counted here, not in the handler's thread: between the two the engine would look idle.
        with self.guard:
            request, address = super().get_request()
            self.connections.add(request)
        return request, address

    def shutdown_request(self, request: Any) -> None:
        with self.guard:  # before it is closed: its number may be another's then
            self.connections.discard(request)
            self.idle_since = time.monotonic()
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def give_back(self) -> None:
        """Gives freed memory back to the system: Python's, and the engine's, whose allocator keeps what a large query
        took for the next one."""
        memory.trim()
        with contextlib.suppress(Exception), contextlib.closing(self.chdb.connect(self.target)) as handle:
            handle.query("SYSTEM JEMALLOC PURGE")  # an engine with another allocator refuses

    def measure(self) -> None:
        """Sees how large the store is: beyond ``ARGUS_STORE_MAX`` it takes no rows."""
        with contextlib.suppress(Exception), contextlib.closing(self.chdb.connect(self.target)) as handle:
            found = int(handle.query("SELECT sum(bytes_on_disk) FROM system.parts", "TabSeparated").bytes() or 0)
            with self.guard:
                self.bytes = found

    def asked(self) -> bool:
        """Whether a request arrives or is being answered, or was a moment ago."""
        with self.guard:
            return bool(self.running) or time.monotonic() - self.asked_s < QUIET_S

    def drain(self) -> None:
        """Ends all connections once what they asked is answered, for ``DRAIN_S`` at most. Who asks more is refused at
        once, and starts the next engine."""
        deadline = time.monotonic() + DRAIN_S
        waiting = select.poll()
        waiting.register(self.fileno(), select.POLLIN)
        while time.monotonic() < deadline:
            with self.guard:
                if not self.connections and not waiting.poll(0):
                    return
                for connection in self.connections:
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RD)  # what has arrived is still read
            time.sleep(0.01)

    def cancel_abandoned(self) -> None:
        """Ends the queries whose client has hung up (Ctrl-C, a closed terminal)."""
        poll = select.poll()
        with self.guard:  # none of them is closed meanwhile
            running = {mark: connection.fileno() for mark, connection in self.running.items()}
        for fd in running.values():
            poll.register(fd, select.POLLRDHUP)
        gone = {fd for fd, _ in poll.poll(0)}
        for mark, fd in running.items():
            if fd in gone:
                # Inserts are left to end: whether they were stored must not depend on when the client died.
                handle = self.chdb.connect(self.target)
                with contextlib.suppress(Exception):
                    handle.query(f"KILL QUERY WHERE startsWith(query, '/* {mark} */') AND query_kind != 'Insert' ASYNC")
                handle.close()


class _Whole:
    """What a client sends. A request that is cut off, by a client that was killed or an engine that ends, is an error,
    which the parsers of HTTP take for its end."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.begun = False

    def readline(self, limit: int = -1) -> bytes:
        line: bytes = self._stream.readline(limit)
        if not line.endswith(b"\n") and (self.begun or line) and len(line) != limit:
            raise ConnectionError("the request is cut off")
        self.begun = True
        return line

    def read(self, size: int) -> bytes:
        data: bytes = self._stream.read(size)
        if len(data) < size:
            raise ConnectionError("the request is cut off")
        return data

    def close(self) -> None:
        self._stream.close()


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    rfile: Any
    protocol_version = "HTTP/1.1"
    # Headers and body leave in one segment each; without this every answer waits for the buffer's flush.
    wbufsize = -1

    def setup(self) -> None:
        super().setup()
        self.rfile = _Whole(self.rfile)

    def handle_one_request(self) -> None:
        self.rfile.begun = False
        super().handle_one_request()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self._read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self._read(int(self.headers.get("Content-Length", 0)))

    def _read(self, size: int) -> bytes:
        if not 0 <= size <= MAX_REQUEST:
            raise ValueError(f"{size} bytes")
        data: bytes = self.rfile.read(size)
        return data

    def _reply(self, status: int, body: Any, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def do_GET(self) -> None:
        mark = f"argus:{uuid.uuid4().hex}"
        with self.server.guard:
            self.server.running[mark] = self.connection
        try:
            self._answer(mark)
        finally:
            with self.server.guard:
                self.server.running.pop(mark, None)
                self.server.asked_s = time.monotonic()

    def _answer(self, mark: str) -> None:
        try:
            asked = self._request()
        except OSError:
            raise  # the client has gone
        except Exception as failure:  # what the parsers of HTTP and of forms make of nonsense is of many types
            self.close_connection = True
            self._reply(
                400, f"the request cannot be read: {failure or type(failure).__name__}".encode(errors="replace")
            )
            return
        if asked is None:
            self._reply(200, b"Ok.\n", X_Argus_Pid=str(os.getpid()))
        else:
            self._run(mark, *asked)

    def _request(self) -> tuple[dict[str, str], bytes] | None:
        """Options and body of a request; None: whether the engine is there is all that is asked."""
        url = urlsplit(self.path)
        if url.path == "/ping":
            return None
        options = dict(parse_qsl(url.query, keep_blank_values=True))
        body = self._body()
        if self.headers.get_content_type() == "multipart/form-data":
            head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
            form = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(head + body)
            for part in form.iter_parts():
                name = str(part.get_param("name", "", "content-disposition"))
                options[name] = (part.get_payload(decode=True) or b"").decode()  # type: ignore[union-attr]
            body = b""
        return options, body

    do_POST = do_GET

    def _run(self, mark: str, options: dict[str, str], body: bytes) -> None:
        data: memoryview | None = None
        sql = options.get("query", "").encode()
        if sql:
            data = memoryview(body) if body else None
        elif head := _INSERT_HEAD.match(body[:65536]):
            sql, data = head.group(0), memoryview(body)[head.end() :]
        else:
            sql = body
        default_format = options.get("default_format") or self.headers.get("X-ClickHouse-Format") or "TabSeparated"
        settings = {k: v for k, v in options.items() if k not in _TRANSPORT and not k.startswith("param_")}
        params = {k[6:]: v for k, v in options.items() if k.startswith("param_")}
        handle = self.server.chdb.connect(self.server.target)
        spool = -1
        try:
            if bad := [name for name in settings if not _NAME.match(name)]:
                raise ValueError(f"Code: 115. DB::Exception: Bad setting name {bad[0]!r}. (UNKNOWN_SETTING)")
            if database := options.get("database"):
                handle.query("USE `" + database.replace("`", "``") + "`")
            if settings:
                # Each request has a handle of its own: SET cannot leak into the next, and readonly cannot be undone.
                handle.query("SET " + ", ".join(f"{k} = {_quoted(v)}" for k, v in settings.items()))
            text = sql.decode("utf-8", "surrogateescape")
            if data is not None and self.server.bytes > self.server.max_bytes:
                bound = binary_size(self.server.max_bytes)
                raise ValueError(f"Code: 243. DB::Exception: {BOUND_REACHED} {bound}. (NOT_ENOUGH_SPACE)")
            if data is not None:
                # A memory file, not one on disk: the rows are written once, into the table.
                spool = os.memfd_create("argus-insert")
                done = 0
                while done < len(data):
                    done += os.write(spool, data[done:])
                text, n = re.subn(r"(?i)\bFORMAT\s+(\w+)\s*\Z", rf"FROM INFILE '/proc/self/fd/{spool}' FORMAT \1", text)
                if not n:
                    raise ValueError("Code: 62. DB::Exception: Rows were sent with a statement that has no FORMAT")
            statement: Any = f"/* {mark} */ {text}"
            if not _is_utf8(sql):  # a string may hold any bytes
                statement = statement.encode("utf-8", "surrogateescape")
            result = handle.query(statement, default_format, params=params)
            if data is not None:
                with self.server.guard:
                    self.server.bytes += len(data)  # until it is measured again: the bound holds meanwhile, too
            content = result.bytes() or b"" if hasattr(result, "bytes") else b""
            summary = {"written_rows": str(result.rows_read())} if data is not None else {}
        except Exception as failure:
            # Positions count from the user's own text, not from our comment before it.
            message = str(failure).replace(f"/* {mark} */ ", "").replace(*self.server.named)
            message = message or "the query is refused; why is not known, since it is not UTF-8"  # chdb drops the text
            message = _POSITION.sub(lambda m: f"{m[1]}{max(1, int(m[2]) - len(mark) - 7)}", message)
            code = _CODE.search(message)
            body = message.encode(errors="backslashreplace")  # it quotes the query, whose bytes need not be UTF-8
            self._reply(500, body, X_ClickHouse_Exception_Code=code.group(1) if code else "1002")
        else:
            self._reply(200, content, X_ClickHouse_Summary=json.dumps(summary))
        finally:
            if spool >= 0:
                os.close(spool)
            handle.close()


def _is_utf8(sql: bytes) -> bool:
    try:
        sql.decode()
    except UnicodeDecodeError:
        return False
    return True


def serve(folder: Path, starter: str, ready: int) -> None:
    """Runs the engine of the store in ``folder`` until its last client has gone.

    Args:
        folder: The store's folder; exists.
        starter: Who started it, for the lock file: shown to whoever waits for the lock.
        ready: Descriptor that gets one line, ``ready``, ``busy`` or ``error <text>``, and is closed then.
    """

    def say(line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # who started it was interrupted: it lingers, and ends
            os.write(ready, line.replace("\n", " ").encode() + b"\n")
        os.close(ready)

    try:
        # All files by this descriptor, chdb's too: whoever may rename the folder must not choose what is written to.
        own = files.open_folder(folder)
        lock = files.open_at(own, "lock", os.O_RDWR | os.O_CREAT)
        _check_database(own)
    except OSError as failure:
        say(f"error {failure.filename}: {failure.strerror}")
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        say("busy")
        return
    max_bytes = _bound(lock)
    with contextlib.suppress(OSError):  # a full disk: what is stored can be read there all the same
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()} {starter}\n".encode(), 0)
    # Yields to the traced job in everything: CPU, and memory when the node runs out of it.
    with contextlib.suppress(OSError, ValueError):
        os.nice(int(os.environ.get("ARGUS_ENGINE_NICE", "10")))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")
    unbounded()  # it has a bound of its own
    with contextlib.suppress(OSError):
        # The store is this user's own; the folders above it, or above what is imported yet, may be somebody else's.
        privileges.keep(("DAC_READ_SEARCH",))
    stop = threading.Event()
    # Ctrl-C belongs to the terminal's command. At SIGTERM (a service that stops) the tracer still has rows to store.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    # chdb silently reads a config.xml in the current directory.
    os.fchdir(own)
    try:
        files.write_at(own, "config.xml", config(own).encode(), alone=True)
    except OSError:  # a full disk: that of another version is worse than none
        with contextlib.suppress(OSError):
            os.unlink("config.xml", dir_fd=own)
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    memory.settle()  # before there are threads that it could concern
    database = f"/proc/self/fd/{own}/db"
    target = f"{database}?max_threads={threads}&max_server_memory_usage_to_ram_ratio=0.25&{COMPILE_NOTHING}"
    for name in ("pyarrow", "pandas"):
        # chdb looks for tables among Python's variables. There are none, and pyarrow and numpy take 30 MB.
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        import chdb

        keeper = chdb.connect(target)
        with contextlib.suppress(FileNotFoundError):
            (folder / "socket").unlink()
        server = _Server(folder, chdb, target, (database, str(folder / "db")), max_bytes)
        own_socket = os.stat(folder / "socket").st_ino
    except Exception as failure:
        say(f"error {type(failure).__name__}: {failure}".replace(database, str(folder / "db")))
        return
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    say("ready")
    if _tend(server, stop, lambda: _is_ours(folder, own_socket)):
        with contextlib.suppress(OSError):
            os.pwrite(lock, f"{os.getpid()} {starter}{ENDING}{server.max_bytes}\n".encode(), 0)
    # Whoever connects from here on is refused, waits for the lock and starts the next engine.
    if _is_ours(folder, own_socket):
        (folder / "socket").unlink(missing_ok=True)
        server.drain()
        server.shutdown()
        server.socket.close()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # whatever lock of the interpreter is held
        signal.alarm(CLOSE_S)
        with contextlib.suppress(Exception):
            keeper.close()
    # Python's own exit would run chdb's destructors beside its live threads.
    os._exit(0)


def _bound(lock: int) -> int:
    """How large the store may become: as the engine left it that this one replaces, if it has just ended."""
    left = re.search(rf"{ENDING}(\d+)".encode(), os.pread(lock, 1000, 0))
    just = time.time() - os.fstat(lock).st_mtime < HEIR_S
    return int(left[1]) if left and just else limits.store_bytes()


def _tend(server: _Server, stop: threading.Event, ours: Callable[[], bool]) -> bool:
    """Looks after the engine until its last client has gone, its folder is another's, ``stop`` is set, or it has grown
    too large.

    Returns:
        Whether it has, and is to be replaced.
    """
    started = time.monotonic()
    trim_due = started + memory.TRIM_S
    measure_due = 0.0
    too_large = False
    while True:
        if time.monotonic() >= measure_due:
            server.measure()
            memory.unmap_unused()
            measure_due = time.monotonic() + MEASURE_S
        stop.wait(0.2) if not stop.is_set() else time.sleep(0.05)
        server.cancel_abandoned()
        if time.monotonic() >= trim_due:
            server.give_back()
            trim_due = time.monotonic() + memory.TRIM_S
            too_large = time.monotonic() - started >= RENEW_S and memory.resident() > RENEW_BYTES
        if too_large and not server.asked():
            return True
        if not ours():
            return False  # the folder was removed: whoever comes next makes it anew, and an engine for it
        with server.guard:
            idle = not server.connections
            linger = 0.0 if stop.is_set() else LINGER_S
            if idle and time.monotonic() - server.idle_since >= linger:
                return False


def _is_ours(folder: Path, socket_inode: int) -> bool:
    """Whether a folder still has an engine's socket: it may have been removed, and made anew with another one in it."""
    try:
        return os.stat(folder / "socket").st_ino == socket_inode
    except FileNotFoundError:
        return False


def main() -> None:
    """Entry point: ``python -m argus.store.engine FOLDER STARTER READY_FD``."""
    folder, starter, ready = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    os.umask(0o077)
    # The starter must not be left with a child to wait for. No thread exists yet, and chdb is not loaded.
    if os.fork():
        os._exit(0)
    serve(folder, starter, ready)


if __name__ == "__main__":
    main()
