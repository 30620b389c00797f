"""Prices of probes by the instruction under them, and how they are kept."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from argus.capture import prices as module
from argus.capture.prices import FALLBACK, INSTRUCTIONS, MEASUREMENTS, STEPPED, Prices, kind_of, prices

pytestmark = pytest.mark.skipif(not module.MEASURABLE, reason="x86-64 only")

MEASURED = Prices(dict.fromkeys(INSTRUCTIONS, 700) | {STEPPED: 9_000}, 600)


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
    assert {kind_of(function) for function in INSTRUCTIONS.values()} == set(INSTRUCTIONS)


def test_what_cannot_be_measured_has_the_prices_of_a_slow_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No probe is hit here, so that the functions cost nothing more: these are no prices."""
    monkeypatch.setenv("ARGUS_CACHE_DIR", str(tmp_path))
    assert prices("multi", no_probe) is FALLBACK
    assert not FALLBACK.measured
    assert not any(tmp_path.rglob("*.json"))
    assert FALLBACK.of(b"\x55") < FALLBACK.cheap < FALLBACK.of(b"\x31\xc0")


def test_the_least_of_the_first_measurements_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first start may be beside other load."""
    monkeypatch.setenv("ARGUS_CACHE_DIR", str(tmp_path))
    measured: list[tuple[str, ...]] = []

    def measure(attach: object, kinds: tuple[str, ...]) -> Prices:
        measured.append(kinds)
        by = 1.3 if len(measured) == 1 else 1.1 if len(measured) == 4 else 1.0
        return Prices({kind: round(by * ns) for kind, ns in MEASURED.entry.items()}, round(by * MEASURED.exit))

    monkeypatch.setattr(module, "measure", measure)
    monkeypatch.setattr(module, "_machine", lambda backend: backend)
    first = prices("multi", no_probe)
    assert first.entry["push"] == round(1.3 * MEASURED.entry["push"])
    for _ in range(MEASUREMENTS + 3):
        least = prices("multi", no_probe)
        assert (least.entry, least.exit, least.measured) == (MEASURED.entry, MEASURED.exit, True)
    assert len(measured) == MEASUREMENTS
    prices("perf", no_probe)
    assert measured[MEASUREMENTS - 1 :] == [tuple(INSTRUCTIONS), module.FEW_KINDS]
    file = tmp_path / "prices/multi.json"
    file.write_text('{"entry": {}}')
    assert prices("multi", no_probe) == MEASURED
    assert len(measured) == MEASUREMENTS + 2
    os.chmod(file, 0o666)  # anybody may have written it
    prices("multi", no_probe)
    assert len(measured) == MEASUREMENTS + 3


def test_a_price_that_cannot_be_measured_again_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ARGUS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(module, "measure", lambda *_: MEASURED)
    prices("multi", no_probe)
    monkeypatch.setattr(module, "measure", failing)
    assert prices("multi", no_probe) == MEASURED


def failing(*_: object) -> Prices:
    raise ValueError("these are no prices of probes")


def test_an_exit_is_dearer_by_what_both_cost_together() -> None:
    """Of one measurement the entry was slow, of the other the exit: neither makes the other cheaper."""
    one, other = (replace(MEASURED, entry={**MEASURED.entry, "push": ns}, exit=exit_ns) for ns, exit_ns in ((900, 300),
                  (700, 600)))  # fmt: skip
    assert (one.least(other).entry["push"], one.least(other).exit) == (700, 500)
    assert one.least(other) == other.least(one)
