"""What ``scripts/hostile`` measures and watches."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def hostile(root: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for folder in ("scripts", "tests/fakegpu"):
        monkeypatch.syspath_prepend(str(root / folder))
    return importlib.import_module("hostile")


def test_memory_is_that_of_all_processes(hostile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each had when all had most, and the most of each."""
    processes = importlib.import_module("benches._processes")
    parts = {1: "tracer", 2: "reader", 3: "reader", 4: "engine", 5: "others"}
    sizes = {pid: pid << 20 for pid in parts}
    monkeypatch.setattr(processes, "family", lambda pid: [4] if pid == 4 else [1, 2, 3, 5])
    monkeypatch.setattr(processes, "engine_of", lambda store: 4)
    monkeypatch.setattr(processes, "pss_bytes", lambda pid: (sizes[pid], 2 * sizes[pid]))
    monkeypatch.setattr(processes.Peaks, "_part", staticmethod(lambda pid, tracer, engine: parts[pid]))
    peaks = processes.Peaks()
    peaks.look(1, Path("store"))
    then = "15 MiB (tracer 1, reader 5, engine 4, others 5)"
    end = "reader 5, engine 4, others 5; with pages of files 30 MiB"
    assert str(peaks) == f"{then}; each at most tracer 1, {end}"
    sizes[1], sizes[5] = 3 << 20, 0
    peaks.look(1, Path("store"))
    assert str(peaks) == f"{then}; each at most tracer 3, {end}"


def test_the_memory_of_a_process_is_read(hostile: Any) -> None:
    processes = importlib.import_module("benches._processes")
    own, whole = processes.pss_bytes(os.getpid())
    assert 1 << 20 < own < whole < 16 << 30
    assert processes.pss_bytes(1 << 22) == (0, 0)


def test_pages_of_files_are_counted_apart(hostile: Any) -> None:
    """Relocations are written to a library's pages: those are its own. So are the kernel's rings."""
    processes = importlib.import_module("benches._processes")
    parts = [
        ("r-xp", "/usr/lib/a.so", 100, 0),
        ("r--p", "/usr/lib/a b.so", 40, 12),
        ("rw-p", "[heap]", 7, 7),
        ("rw-p", "", 5, 5),
        ("rw-s", "/memfd:x\r1-2 r-xp 0 0:0 1 /usr/lib/a.so", 3, 0),
        ("r--s", "anon_inode:bpf-map", 2, 0),
    ]
    lines = [
        f"7f0000000000-7f0000001000 {rights} 00000000 08:01 77       {path}\nRss: 999 kB\nPss: {pss} kB\n"
        f"Pss_Dirty: 50 kB\nAnonymous: {anonymous} kB\nVmFlags: rd\n"
        for rights, path, pss, anonymous in parts
    ]
    found = processes.own_and_whole("".join(lines).encode())
    assert found == ((12 + 7 + 5 + 3 + 2) << 10, (100 + 40 + 7 + 5 + 3 + 2) << 10)


def test_what_changes_below_the_folders_of_root_is_seen(
    hostile: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {str(path) for path in hostile.UNTOUCHED}
    assert names >= {"/etc", "/var/lib", "/var/cache", "/usr/local"}
    treasure, below = tmp_path / "treasure", tmp_path / "lib" / "package"
    treasure.write_bytes(b"x")
    below.mkdir(parents=True)
    (tmp_path / "lib" / "argus").mkdir()
    monkeypatch.setattr(hostile, "UNTOUCHED", (tmp_path / "lib",))
    before = hostile._snapshot(treasure)
    assert hostile._snapshot(treasure) == before
    (tmp_path / "lib" / "argus" / "own").write_bytes(b"")
    assert hostile._snapshot(treasure) == before, "what Argus keeps there itself"
    (below / "new").write_bytes(b"")
    assert hostile._snapshot(treasure) != before
    assert any("libc" in name for name, *_ in before)
