"""Waiting for the engine of an embedded store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from argus.model.errors import ArgusError
from argus.store import engine, limits
from argus.store import open as open_module
from argus.store.open import Store
from tests.fuzz.parsers import engine_requests
from tests.stores import rows


def test_an_engine_that_does_not_start_in_time_is_not_blamed_on_process_question_mark(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another one held the lock when it was to start, and had ended when it was asked who."""
    monkeypatch.setattr(open_module, "_prepare", lambda *_: None)
    monkeypatch.setattr(open_module, "_dial", refuse)
    monkeypatch.setattr(open_module, "_holder", lambda _: None)
    monkeypatch.setattr(open_module, "_start_engine", lambda *_: "busy")
    with pytest.raises(ArgusError, match="engine did not start within 0 s") as failure:
        open_module._connect_engine(tmp_path, 0.0, False, lambda: None)
    assert "try again" in failure.value.hint
    monkeypatch.setattr(open_module, "_holder", lambda _: "4821 argus trace")
    with pytest.raises(ArgusError, match=r"process 4821 \(argus trace\) holds the store") as failure:
        open_module._connect_engine(tmp_path, 0.0, False, lambda: None)


def refuse(_: Path) -> Any:
    raise ConnectionRefusedError


def test_caches_are_bounded(bare: Store) -> None:
    """What the engine keeps of tables and of compiled expressions. Others of its caches are of formats that no table of
    Argus has."""
    sizes = rows(
        bare,
        "SELECT sum(toUInt64(value)) FROM system.server_settings WHERE name IN ('mark_cache_size',"
        " 'index_mark_cache_size', 'primary_index_cache_size', 'uncompressed_cache_size',"
        " 'index_uncompressed_cache_size', 'query_condition_cache_size', 'compiled_expression_cache_size')",
    )
    assert sizes == [(128 << 20,)]


def test_an_engine_that_replaces_another_keeps_its_bound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever starts it may have another one in its environment."""
    monkeypatch.setattr(limits, "store_bytes", lambda: 7 << 30)
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    assert engine._bound(lock) == 7 << 30
    os.pwrite(lock, f"4821 process 12: argus trace{engine.ENDING}{300 << 30}\n".encode(), 0)
    assert engine._bound(lock) == 300 << 30
    os.utime(lock, times=(0, 0))
    assert engine._bound(lock) == 7 << 30, "nobody has used the store since"
    os.close(lock)


def test_an_engine_that_still_answers_others_is_not_to_be_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(open_module, "_prepare", lambda *_: None)
    monkeypatch.setattr(open_module, "_dial", refuse)
    monkeypatch.setattr(open_module, "_holder", lambda _: f"4821 argus trace{engine.ENDING}5")
    with pytest.raises(ArgusError, match=r"engine \(process 4821\) ends, and still answers others") as failure:
        open_module._connect_engine(tmp_path, 0.0, False, lambda: None)
    assert "kill" not in failure.value.hint


INSERT = b"/?query=INSERT+INTO+t+VALUES+(1)"


@pytest.mark.parametrize(
    "cut",
    [
        b"POST " + INSERT,
        b"POST " + INSERT + b" HTTP/1.1",
        b"POST " + INSERT + b" HTTP/1.1\r\nHost: x\r\n",
        b"POST " + INSERT + b" HTTP/1.1\r\nHost: x\r\nContent-Le",
        b"POST " + INSERT + b" HTTP/1.1\r\nContent-Length: 5\r\n\r\n1234",
        b"POST " + INSERT + b" HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
        b"POST " + INSERT + b" HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0",
    ],
    ids=["line", "version", "headers", "header", "body", "chunks", "last chunk"],
)
def test_a_request_that_is_cut_off_is_not_run(cut: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client was killed, or sends it again elsewhere."""
    run: list[str] = []
    monkeypatch.setattr(engine_requests._Handle, "query", lambda self, text, *_, **__: run.append(text))
    connection: Any = engine_requests._Connection(cut)
    connection.got.close = lambda: None
    with pytest.raises(ConnectionError, match="cut off"):
        engine_requests._Handler(connection, "", engine_requests._server)
    assert (run, connection.got.getvalue()) == ([], b"")
    assert engine_requests._server.running == {}
    whole: Any = engine_requests._Connection(b"POST " + INSERT + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
    whole.got.close = lambda: None
    engine_requests._Handler(whole, "", engine_requests._server)
    assert "INSERT INTO t" in run[0]
