"""Requests to the embedded engine's socket: HTTP with a statement, settings, parameters and rows."""

from __future__ import annotations

import contextlib
import io
import socket
import threading
from types import SimpleNamespace
from typing import Any

from argus.store.engine import _Handler

ALLOWED = (ConnectionError,)
CODE = ["argus.store.engine"]
TOKENS = [b"\r\n", b"Content-Length: ", b"Transfer-Encoding: chunked\r\n", b"Content-Type: multipart/form-data; ",
          b"boundary=x", b"--x\r\n", b"%00", b"query=", b"param_a=", b"database=", b"FORMAT Arrow\n", b"GET /?",
          b"-5", b"fffffffffffffff\r\n", b"HTTP/1.1", b"Expect: 100-continue\r\n"]  # fmt: skip


class _Handle:
    """An engine that refuses what holds an X. Like chdb's, it takes text that is UTF-8, or bytes."""

    def query(self, asked: str | bytes, *_: Any, **__: Any) -> Any:
        text = asked.decode("utf-8", "surrogateescape") if isinstance(asked, bytes) else asked.encode().decode()
        if "X" in text:
            raise RuntimeError(f"Code: 62. DB::Exception: Syntax error: position 9: {text[:50]}. (SYNTAX_ERROR)")
        return SimpleNamespace(bytes=lambda: b"1\n", rows_read=lambda: 1)

    def close(self) -> None:
        pass


class _Connection:
    """The client's end: what it sent, and what it gets."""

    def __init__(self, sent: bytes) -> None:
        self.sent, self.got = io.BufferedReader(io.BytesIO(sent)), io.BytesIO()  # type: ignore[arg-type]

    def makefile(self, mode: str, *_: Any, **__: Any) -> Any:
        return self.sent if "r" in mode else self.got

    def settimeout(self, *_: Any) -> None:
        pass


_server: Any = SimpleNamespace(
    chdb=SimpleNamespace(connect=lambda target: _Handle()), target="", named=("\0", ""), bytes=0, max_bytes=1,
    guard=threading.Lock(), running={},
)  # fmt: skip


def seeds() -> list[bytes]:
    form = b'--x\r\nContent-Disposition: form-data; name="param_a"\r\n\r\n5\r\n--x--\r\n'
    return [
        b"GET /ping HTTP/1.1\r\nHost: argus\r\n\r\n",
        b"POST /?database=default&max_threads=2&param_a=5 HTTP/1.1\r\nContent-Length: 8\r\n\r\nSELECT 1",
        b"POST /?query=INSERT+INTO+t+FORMAT+Arrow HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 40\r\n\r\nINSERT INTO `t` (`a`) FORMAT Native\n12345678",
        b"POST /?query=SELECT+1 HTTP/1.1\r\nContent-Type: multipart/form-data; boundary=x\r\nContent-Length: "
        + str(len(form)).encode() + b"\r\n\r\n" + form,
        b"POST /?query=X HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
    ]  # fmt: skip


def run(data: bytes) -> None:
    connection: Any = _Connection(data)
    keep: Any = connection.got
    keep.close = lambda: None
    with contextlib.suppress(socket.timeout):
        _Handler(connection, "", _server)
    assert not _server.running
