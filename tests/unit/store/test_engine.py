"""Waiting for the engine of an embedded store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from argus.model.errors import ArgusError
from argus.store import open as open_module
from argus.store.open import Store
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
