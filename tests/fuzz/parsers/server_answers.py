"""Answers of a ClickHouse server: to the driver's first questions, to queries, commands and inserts."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pyarrow as pa
from urllib3 import HTTPResponse

from argus.model.errors import ArgusError
from argus.store import open as store_open
from argus.store import reader
from argus.store.arrow import to_arrow
from argus.store.open import Store
from argus.store.schema_files import table_columns
from argus.store.url import parse_url
from tests.fuzz.harness import Bytes, joined
from tests.fuzz.parsers.spools import COVERAGE

ALLOWED = (ArgusError,)
CODE = ["argus.store.reader", "argus.store.open"]
TOKENS = [b"Code: 60. DB::Exception: ", b"(UNKNOWN_TABLE)", b"Stack trace:", b"25.8.1.1\tUTC\n", b"\0", b"\xff",
          b"Code: 99999999999999999999.", b"ARROW1", b"String", b"UInt8"]  # fmt: skip
SECONDS = 4.0
URL = "clickhouse://argus@db.invalid:8123/argus"
STATUS = (200, 200, 200, 500, 404, 403, 502, 302, 204)
HEADERS = ({"Content-Type": "x"}, {"X-ClickHouse-Exception-Code": "60"}, {"X-ClickHouse-Summary": "{"},
           {"Content-Encoding": "gzip"}, {"X-ClickHouse-Format": "TabSeparated"}, {"X-ClickHouse-Exception-Code": "x"},
           {"Content-Encoding": "zstd"}, {"Content-Encoding": "lz4"}, {"X-ClickHouse-Timezone": "Mars/Olympus"},
           {"Location": "http://169.254.169.254/"}, {"Transfer-Encoding": "chunked"})  # fmt: skip


class _Pool:
    """In the place of urllib3's: answers by a function of what is asked."""

    def __init__(self, answer: Callable[[str], tuple[int, dict[str, str], bytes]]) -> None:
        self.answer = answer
        self.connection_pool_kw: dict[str, Any] = {}

    def request(self, method: str, url: str, **words: Any) -> HTTPResponse:
        asked = url + repr(words.get("body") or "") + repr(words.get("fields") or "")
        status, headers, body = self.answer(asked)
        return HTTPResponse(
            io.BytesIO(body), headers, status, preload_content=bool(words.get("preload_content", True)),
            decode_content=bool(words.get("decode_content", True)), request_method=method, request_url=url,
        )  # fmt: skip

    def clear(self) -> None:
        pass


def _native(rows: list[tuple[str, str, int]]) -> bytes:
    """A block of ClickHouse's format Native: name, value and readonly of settings."""

    def text(value: str) -> bytes:
        return bytes([len(value)]) + value.encode()

    columns = list(zip(*rows, strict=True))
    out = bytes([3, len(rows)])
    for name, kind, values in zip(("name", "value", "readonly"), ("String", "String", "UInt8"), columns, strict=True):
        out += text(name) + text(kind)
        out += b"".join(text(str(v)) for v in values) if kind == "String" else bytes(int(v) for v in values)
    return out


VERSION = b"25.8.1.1\tUTC\n"
SETTINGS = _native([("max_threads", "8", 0), ("distributed_product_mode", "deny", 0)])


def _good(asked: str) -> tuple[int, dict[str, str], bytes]:
    if "version" in asked:
        return 200, {"X-ClickHouse-Format": "TabSeparated"}, VERSION
    if "system.settings" in asked or "system%2Esettings" in asked:
        return 200, {"X-ClickHouse-Format": "Native"}, SETTINGS
    return 200, HEADERS[0], b"1\n"


def _connected(pool: _Pool) -> Store:
    """A store whose driver asks this pool.

    Raises:
        ArgusError: The answers are no server's.
    """
    from argus.store.driver import clickhouse_connect

    real = clickhouse_connect.get_client
    store = Store(parse_url(URL), create=False)
    with mock.patch.object(clickhouse_connect, "get_client", lambda **words: real(pool_mgr=pool, **words)):
        store._client = store._connect(1.0)
    return store


_pool = _Pool(_good)
_store: list[Store] = []


def _stream(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table)
    return bytes(sink.getvalue())


def seeds() -> list[bytes]:
    rows = _stream(pa.table({"a": [1, 2], "b": ["x", None], "t": pa.array([5, 6], pa.timestamp("us"))}))
    refused = b"Code: 60. DB::Exception: Unknown table expression identifier 'x'. (UNKNOWN_TABLE) (version 25.8.1.1)"
    found = [bytes([0, 0, 0]) + joined(VERSION, SETTINGS, b""), bytes([1, 0, 0]) + joined(b"", b"", rows)]
    for mode in range(1, 6):
        found += [bytes([mode, 3, 1]) + joined(b"", b"", refused), bytes([mode, 0, 0]) + joined(b"", b"", b"7\n")]
        found += [bytes([mode, 0, header]) + joined(b"", b"", rows) for header in range(2, len(HEADERS))]
    return found


def run(data: bytes) -> None:
    taken = Bytes(data)
    mode, status, headers = taken.number() % 6, taken.number() % len(STATUS), taken.number() % len(HEADERS)
    version, settings, body = taken.pieces(3)

    def hostile(asked: str) -> tuple[int, dict[str, str], bytes]:
        return STATUS[status], HEADERS[headers], body

    if mode == 0:

        def begins(asked: str) -> tuple[int, dict[str, str], bytes]:
            if "version" in asked:
                return STATUS[status], HEADERS[headers], version
            return (200, HEADERS[0], settings if "settings" in asked else body)

        _connected(_Pool(begins)).close()
        return
    if not _store:
        _store.append(_connected(_pool))
    store = _store[0]
    store._pid = os.getpid()
    _pool.answer = hostile
    try:
        if mode == 1:
            assert isinstance(reader.query(store, "SELECT a"), pa.Table)
        elif mode == 2:
            reader.query_columns(store, "SELECT a")
        elif mode == 3:
            store.insert("coverage", _rows, "t/1")
        elif mode == 4:
            reader.newest_run(store)
        else:
            reader.list_runs(store)
    finally:
        _pool.answer = _good
        if store._client is None:
            _store.clear()


_rows = to_arrow("coverage", COVERAGE)
assert table_columns()
assert store_open
