"""Requests to ``argus serve``: bytes of a connection, of somebody with the token or without."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import anyio.to_thread
import uvicorn

from argus.model.errors import ArgusError
from argus.report.server import answers
from argus.report.server.access import Access
from argus.report.server.app import make_app
from argus.report.server.connections import Connection

ALLOWED = ()
CODE = ["argus.report.server.access", "argus.report.server.answers", "argus.report.server.app"]
TOKEN, SECRET = "a" * 32, b"a row of the store"
_OWN = b"Authorization: Bearer " + TOKEN.encode() + b"\r\n"
TOKENS = [b"\r\n", b"GET /api/runs", b"/api/page?job=a&run=1", b"/api/heatmap?job=a&run=1&measure=step&first=1&last=9",
          b"/api/events?job=a&run=1&version=7", b"HEAD ", b"OPTIONS ", b"HTTP/1.0", b"Host: localhost\r\n", _OWN,
          b"Host: evil\r\n", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"Upgrade: websocket\r\n",
          b"Connection: close\r\n", b"Expect: 100-continue\r\n", b"Accept-Encoding: gzip\r\n", b"%00", b"%2e%2e/",
          b"//api/runs", b"/api%2fruns", b"Authorization: bearer \xff", b"&run=4294967296", b"\0"]  # fmt: skip
_STATUS = re.compile(rb"HTTP/1\.1 ([0-9]{3}) ")


class _Transport(asyncio.Transport):
    """The client's end: what it gets."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 4), "sockname": ("127.0.0.1", 5)})
        self.got, self._closing = bytearray(), False

    def write(self, data: Any) -> None:
        self.got += data

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True

    abort = close

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


def _query(_: object, statement: str, values: dict[str, Any]) -> dict[str, list[Any]]:
    known = values["job"] == "a"
    return {name: [int(known)] for name in ("step", "judged", "open", "covered", "known")}


async def _at_once(function: Callable[..., Any], *words: Any, limiter: object = None) -> Any:
    """In the place of threads: what is asked of the store is answered at once."""
    return function(*words)


def _zoom(measure: str, first: int, last: int) -> tuple[Any, bytes]:
    if measure != "step" or first > last:
        raise ArgusError("no such measure")
    return {"rows": SECRET.decode()}, b""


_store: Any = mock.Mock(url="chdb")
_answers = answers.Answers(_store, lambda *_: answers.Built({"rows": SECRET.decode()}, b"", _zoom))
logging.getLogger("uvicorn").setLevel(logging.CRITICAL + 1)  # it notes each request that is none
_loop = asyncio.new_event_loop()
_worker = ThreadPoolExecutor(1)  # where no other loop may run
_config = uvicorn.Config(
    make_app(_answers, Access(TOKEN, loopback=True), {"/": b"page", "/a.js": b"code"}),
    log_config=None, access_log=False, server_header=False, date_header=False, lifespan="off",
    ws="none", http=Connection, timeout_keep_alive=30, h11_max_incomplete_event_size=16384,
)  # fmt: skip
_config.load()


def seeds() -> list[bytes]:
    paths = [b"/", b"/a.js", b"/api/runs", b"/api/page?job=a&run=1", b"/api/page?job=b&run=1&first=1&last=4",
             b"/api/heatmap?job=a&run=1&measure=step&first=1&last=9", b"/api/events?job=a&run=1&version=1"]  # fmt: skip
    requests = [b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n" for path in paths]
    return [
        b"".join(request + _OWN + b"\r\n" for request in requests[:-1]),
        *(request + b"\r\n" for request in requests),
        requests[-1] + _OWN + b"\r\n",
        b"POST /api/runs HTTP/1.1\r\nHost: [::1]:80\r\nContent-Length: 3\r\n" + _OWN + b"\r\nabc",
    ]


async def _converse(data: bytes) -> bytes:
    state, transport = uvicorn.server.ServerState(), _Transport()
    connection = Connection(_config, state, {}, _loop)
    connection.connection_made(transport)
    if data:  # asyncio gives none that are empty
        connection.data_received(data)
    still, before = 0, -1
    while still < 50 and not transport.is_closing():  # turns of the loop in which nothing is sent: all are answered
        await asyncio.sleep(0)
        still = still + 1 if len(transport.got) == before else 0
        before = len(transport.got)
    connection.connection_lost(None)
    for task in list(state.tasks):
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task  # what an application raises, uvicorn has logged and answered
    return bytes(transport.got)


def run(data: bytes) -> None:
    listed = [mock.Mock(judged_ns=1, ended_ns=2, started_ns=0, kind="", job=SECRET.decode(), run=1, status="",
                        open=True, ranks=1, world_size=1, hosts=1, steps=1, step_ns=1)]  # fmt: skip
    with (
        mock.patch.object(answers, "query_columns", _query),
        mock.patch.object(answers, "find_job_runs", side_effect=lambda _: list(listed)),
        mock.patch.object(anyio.to_thread, "run_sync", _at_once),
    ):
        got = _worker.submit(_loop.run_until_complete, _converse(data)).result()
    statuses = _STATUS.findall(got)
    assert b"500" not in statuses, got[:500]
    if TOKEN.encode() not in data:
        assert SECRET not in got, "rows went to who has no token"
    own = [each for each in statuses if each not in (b"400", b"100")]  # uvicorn's own
    assert got.count(b"content-security-policy: default-src 'none'") >= len(own), got[:500]
