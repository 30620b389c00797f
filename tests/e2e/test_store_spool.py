"""The spool on a full disk, and its writers side by side."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from argus.cli.main import main
from argus.model.errors import EXIT_FAILURE
from argus.store import runs, spool
from argus.store.failures import transient
from argus.store.open import open_store
from argus.store.writer import Writer
from tests.unit.store.test_writer import iterations, launches


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "spool"


def test_two_writers_share_a_folder(folder: Path) -> None:
    folder.mkdir()
    rows = pa.table({"job": ["a"]})

    def fill(who: str) -> None:
        for k in range(101):
            spool.write(folder, "coverage", f"{who}/{k}", rows)

    threads = [threading.Thread(target=fill, args=(who,)) for who in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tokens = [spool.read(file).token for file in folder.iterdir()]
    assert len(tokens) == len(set(tokens)) == 303


def test_a_full_disk_is_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(open_store(f"spool://{folder}"), source="test")
    writer.append("iterations", iterations(7))
    full = True

    real = os.rename

    def rename(*words: Any, **options: Any) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*words, **options)

    monkeypatch.setattr(os, "rename", rename)
    assert not writer.flush(timeout_s=0.2)
    assert "no space" in writer.trouble
    assert transient(writer.last_error or AssertionError())
    assert os.listdir(folder) == []
    full = False
    assert writer.flush(timeout_s=5)
    assert writer.report().written == {"iterations": 7}
    full = True
    writer.append("iterations", iterations(5))
    assert writer.close(timeout_s=0.1).dropped == {"iterations": 5}


def test_an_import_does_not_wait_for_long_for_a_full_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_words: Any, **_options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    waited: list[float] = []
    real = Writer.flush

    def flush(self: Writer, timeout_s: float = 30.0) -> bool:
        until = time.monotonic() + 60  # however long it takes until it was tried once
        while not (done := real(self, 0.2)) and self.last_error is None and time.monotonic() < until:
            pass
        waited.append(0.0 if done else timeout_s)
        return done

    monkeypatch.setattr(os, "rename", full)
    monkeypatch.setattr(Writer, "flush", flush)
    assert main(["simulate", "--ranks", "2", "--steps", "3", "--store", f"spool://{folder}"]) == EXIT_FAILURE
    assert "no space is left" in capsys.readouterr().err
    assert 0 < sum(waited) <= runs.FULL_S


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k,mode=700", "none", disk], capture_output=True
    ).returncode:
        pytest.skip("mount is not allowed here")
    try:
        writer = Writer(open_store(f"spool://{disk}"), source="test")
        noise = np.random.default_rng(1).integers(0, 2**63, 100_000)
        writer.append("launches", {**launches(100_000), "handle": noise})
        assert not writer.flush(timeout_s=0.2)
        assert "no space is left" in writer.trouble
        assert not list(disk.iterdir())
        writer.append("iterations", iterations(7))
        report = writer.close(timeout_s=0.1)
        assert report.dropped == {"launches": 100_000, "iterations": 7}
    finally:
        subprocess.run(["umount", disk], check=True)
