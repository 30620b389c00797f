"""Prices of probes by the instruction under them, and how they are kept."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from argus.capture import prices as module
from argus.capture.prices import FALLBACK, KINDS, STEPPED, Prices, kind_of, prices

pytestmark = pytest.mark.skipif(not module.MEASURABLE, reason="x86-64 only")

MEASURED = Prices(dict.fromkeys(KINDS, 700) | {STEPPED: 9_000}, 600)


@contextlib.contextmanager
def no_probe(path: str, offsets: list[int], at_exit: bool) -> Iterator[None]:
    yield


def test_an_instructions_kind_is_that_of_the_bytes_that_it_begins_with() -> None:
    cases = {
        b"\x55\x48": "push",
        b"\x41\x57": "push",  # r15
        b"\xe9\x00": "jmp",
        b"\x0f\x84": "jcc",
        b"\x74\x05": "jcc",
        b"\x90\x90": "nop",
        b"\x0f\x1f\x44\x00\x00": "nop5",
        b"\x0f\x1f\x44\x00\x08": "long nop",
        b"\xf3\x0f\x1e\xfa": "endbr64",
        b"\x48\x89\xfb": "mov",
        b"\x48\x89\x3b": STEPPED,  # to memory
        b"\x58\xc3": STEPPED,  # pop
        b"\x48\x83\xec\x08": "sub rsp",
        b"\x48\x83\xeb\x08": STEPPED,  # sub rbx
        b"\x31\xc0": STEPPED,
        b"": STEPPED,
    }
    assert {code: kind_of(code) for code in cases} == cases
    assert {kind_of(function) for function in KINDS.values()} == set(KINDS)


def test_what_cannot_be_measured_has_the_prices_of_a_slow_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No probe is hit here, so that the functions cost nothing more: these are no prices."""
    monkeypatch.setenv("ARGUS_CACHE_DIR", str(tmp_path))
    assert prices("multi", no_probe) is FALLBACK
    assert not FALLBACK.measured
    assert not any(tmp_path.rglob("*.json"))
    assert FALLBACK.of(b"\x55") < FALLBACK.cheap < FALLBACK.of(b"\x31\xc0")


def test_prices_are_measured_once_a_boot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ARGUS_CACHE_DIR", str(tmp_path))
    measured: list[tuple[str, ...]] = []

    def measure(attach: object, kinds: tuple[str, ...]) -> Prices:
        measured.append(kinds)
        return MEASURED

    monkeypatch.setattr(module, "measure", measure)
    monkeypatch.setattr(module, "_machine", lambda backend: backend)
    for _ in range(2):
        found = prices("multi", no_probe)
        assert (found.entry, found.exit, found.measured) == (MEASURED.entry, MEASURED.exit, True)
    assert len(measured) == 1
    prices("perf", no_probe)
    assert measured == [tuple(KINDS), module.FEW_KINDS]
    file = tmp_path / "prices/multi.json"
    file.write_text('{"entry": {}}')
    assert prices("multi", no_probe) == MEASURED
    assert len(measured) == 3
    os.chmod(file, 0o666)  # anybody may have written it
    prices("multi", no_probe)
    assert len(measured) == 4
