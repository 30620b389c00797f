"""The numbers of hooked functions, which BPF programs and recordings of records hold."""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import sys
from types import ModuleType

import pytest

from argus.model import calls

DIGESTS = {
    "x86_64": (224, "dd0eec493c980a49c53c125a8b92fe2b515acb22d5fb46597d45a0a08546a9e6"),
    "aarch64": (198, "74f9727e23965c29f3b58015fa78c8d58840a1a6543cf1cc54d83990d9ff6ab7"),
}
"""Of ``lines_of``. Whoever adds a function at the end of its table shifts those behind it, and writes new ones here."""


def lines_of(module: ModuleType) -> str:
    return "\n".join(
        f"{c.id} {c.symbol} {c.layer.value} {c.kind} {c.shape.value} {tuple(map(int, c.args))} {c.exit} {c.scale}"
        f" {c.offset} {c.dims} {c.cookie(True):x}"
        for c in module.CALLS
    )


@pytest.mark.parametrize("machine", DIGESTS)
def test_every_function_keeps_its_number_and_its_cookie(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    spec = importlib.util.spec_from_file_location("calls_of_machine", calls.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    assert (len(module.CALLS), hashlib.sha256(lines_of(module).encode()).hexdigest()) == DIGESTS[machine]


def test_tables_of_the_driver_and_the_runtime_hold_their_own_functions() -> None:
    for table, layer in ((calls.DRIVER, calls.Layer.DRIVER), (calls.RUNTIME, calls.Layer.RUNTIME)):
        assert {row.layer for rows in table.values() for row in rows} == {layer}
    assert len(calls.BY_SYMBOL) == len(calls.CALLS)
