"""What ``scripts/hostile`` measures and watches."""

from __future__ import annotations

import importlib
import mmap
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
    """Each kind's peak, and that of all at once."""
    processes = importlib.import_module("benches._processes")
    parts = {1: "tracer", 2: "reader", 3: "reader", 4: "engine", 5: "others"}
    sizes = {pid: pid << 20 for pid in parts}
    monkeypatch.setattr(processes, "family", lambda pid: [4] if pid == 4 else [1, 2, 3, 5])
    monkeypatch.setattr(processes, "engine_of", lambda store: 4)
    monkeypatch.setattr(processes, "pss_bytes", lambda pid: (sizes[pid], 2 * sizes[pid]))
    monkeypatch.setattr(processes.Peaks, "_part", staticmethod(lambda pid, tracer, engine: parts[pid]))
    peaks = processes.Peaks()
    peaks.look(1, Path("store"))
    assert str(peaks) == "15 MiB (tracer 1, reader 5, engine 4, others 5); with pages of files 30 MiB"
    sizes[1], sizes[5] = 3 << 20, 0
    peaks.look(1, Path("store"))
    assert str(peaks) == "15 MiB (tracer 3, reader 5, engine 4, others 5); with pages of files 30 MiB"


def test_the_memory_of_a_process_is_read(hostile: Any) -> None:
    processes = importlib.import_module("benches._processes")
    own, whole = processes.pss_bytes(os.getpid())
    assert 1 << 20 < own < whole < 16 << 30
    assert processes.pss_bytes(1 << 22) == (0, 0)


def test_pages_of_files_are_counted_apart(hostile: Any, tmp_path: Path) -> None:
    """32 MB that are read of a file are no memory of its own, 16 MB that are written are."""
    processes = importlib.import_module("benches._processes")
    (tmp_path / "file").write_bytes(bytes(32 << 20))
    before = processes.pss_bytes(os.getpid())
    with (tmp_path / "file").open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    assert sum(memory[place] for place in range(0, 32 << 20, 4096)) == 0
    read = processes.pss_bytes(os.getpid())
    for place in range(0, 16 << 20, 4096):
        memory[place] = 1
    written = processes.pss_bytes(os.getpid())
    near = 3 << 20
    assert abs(read[0] - before[0]) < near
    assert abs(read[1] - before[1] - (32 << 20)) < near
    assert abs(written[0] - before[0] - (16 << 20)) < near
    assert abs(written[1] - before[1] - (32 << 20)) < near


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
