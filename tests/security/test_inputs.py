"""What a user names on a command line, and others may have made: it is bounded, and not waited for longer than said."""

from __future__ import annotations

import os
import re
import socket
import sqlite3
import stat
import struct
import subprocess
import sys
import textwrap
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from argus.capture.probes import Probes
from argus.capture.process.targets import executable_mappings
from argus.cli import completion
from argus.cli.main import main
from argus.compare.observe import exposed
from argus.importers import nsys, whatif_parquet
from argus.live import preflight
from argus.model.errors import ArgusError
from argus.store import spool
from argus.store.arrow import to_arrow
from argus.store.url import password_of_environment
from argus.system import files
from tests.forked import ROOT
from tests.fuzz.parsers.spools import COVERAGE
from tests.security.mapping_process import NOBODY
from tests.unit.importers.test_nsys import export

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="reads another user's file")


def test_a_length_in_a_spool_s_file_that_is_none_ends_no_process(tmp_path: Path) -> None:
    """pyarrow looked where it said, before anything had been checked: the whole load ended by SIGSEGV."""
    whole = bytearray(spool._encoded("coverage", "trace/host/1/x/0", to_arrow("coverage", COVERAGE), 0.0))
    counts = [struct.pack("<q", number) for number in (1, 2)]
    places = [at for at in range(0, len(whole) - 8, 8) if whole[at : at + 8] in counts]
    assert len(places) > 10
    for number, place in enumerate(places):
        changed = bytearray(whole)
        changed[place : place + 8] = struct.pack("<q", 0x7375677261000001)
        sums = spool._sum_places(changed)
        for at in sums:
            changed[at : at + 8] = spool._ZERO
        total = f"{zlib.crc32(changed):08x}".encode()
        for at in sums:
            changed[at : at + 8] = total
        (tmp_path / f"{number:06}-coverage.arrow").write_bytes(changed)
    script = f"""
        from pathlib import Path
        from argus.store import spool
        for file in sorted(Path({str(tmp_path)!r}).iterdir()):
            try:
                spool.read(file)
            except spool.Damaged:
                print("damaged")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("damaged") >= 5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"dp_size: {'9' * 5000}\n", "dp_size is '999"),
        ("dp_size: 99999999999999999999999\n", "dp_size is '999"),
        ("dp_size: 1\nvpp_size: 99999999999999\n", "vpp_size is '999"),
        ("dp_size: ²\n", "dp_size is"),
        ("dp_size: 100000\npp_size: 100000\n", "is 10,000,000,000"),
        ("dp_size: 1\n" + "#" * (1 << 20), "longer than 1 MiB"),
    ],
)
def test_sizes_of_a_job_are_bounded(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "meta.yaml").write_text(text)
    with pytest.raises(ArgusError, match=re.escape(says)):
        whatif_parquet.read_meta(tmp_path / "meta.yaml")


def test_an_endless_file_of_sizes_takes_no_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(pa.table({"step": [0]}), tmp_path / "t.parquet")
    (tmp_path / "meta.yaml").touch()
    os.truncate(tmp_path / "meta.yaml", 1 << 40)
    words = [str(tmp_path / "t.parquet"), "--meta", str(tmp_path / "meta.yaml"), "--store", f"spool://{tmp_path}/s"]
    assert main(["import", "whatif", *words]) == 2
    assert "longer than 1 MiB" in capsys.readouterr().err


@AS_ROOT
@pytest.mark.parametrize("mine", [True, False])
def test_a_recording_that_others_may_exchange_is_read_of_a_copy(
    mine: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite opens a name: a pipe was waited for, and a device opened, which were put there meanwhile."""
    path = export(folder / "recording.sqlite", steps=2)
    folder.chmod(0o755)
    os.chown(folder, *((0, 0) if mine else (NOBODY, NOBODY)))
    opened: list[tuple[str, int]] = []
    connect = sqlite3.connect

    def connecting(place: str, **words: Any) -> sqlite3.Connection:
        name = Path(place.removeprefix("file:").partition("?")[0])
        opened.append((str(name), stat.S_IMODE(name.parent.stat().st_mode)))
        if not mine:
            path.unlink()
            os.mkfifo(path)
        return connect(place, **words)

    monkeypatch.setattr(nsys.sqlite3, "connect", connecting)
    one = nsys._Export(path)
    try:
        assert one.rows("SELECT count(*) FROM StringIds")[0][0] > 0
    finally:
        one.close()
    ((name, mode),) = opened
    assert (name == str(path)) is mine
    assert mine or mode == 0o700
    assert mine or not Path(name).exists()


def test_a_copy_of_a_recording_is_no_longer_than_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who lets it grow meanwhile would fill the disk; and so would one that is mostly holes."""
    (tmp_path / "it").write_bytes(b"x" * 5000)
    monkeypatch.setattr(nsys.os, "geteuid", lambda: 0)
    monkeypatch.setattr(nsys.files, "changeable", lambda *_: (tmp_path, "others may write to it"))
    with (tmp_path / "it").open("rb") as file:
        with nsys._lasting(tmp_path / "it", file, 3000) as name:
            assert name.read_bytes() == b"x" * 3000
        with pytest.raises(OSError, match="No space left"), nsys._lasting(tmp_path / "it", file, 1 << 60):
            pass


def test_a_page_of_metrics_whose_head_drips_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte came before a socket's time-out."""
    monkeypatch.setattr(exposed, "TIMEOUT_S", 0.5)
    ended = threading.Event()

    def drip() -> None:
        one, _ = server.accept()
        with one:
            one.sendall(b"HTTP/1.1 200 OK\r\nX-A: ")
            while not ended.wait(0.05):
                one.sendall(b"a")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        try:
            with pytest.raises(ArgusError, match="incomplete after"):
                exposed.read_page(f"http://127.0.0.1:{server.getsockname()[1]}/metrics")
        finally:
            ended.set()
            thread.join()


def test_a_histogram_has_a_bounded_number_of_bounds() -> None:
    page = (
        "".join(f'a_bucket{{le="{n}"}} {n}\n' for n in range(1, 2 * exposed.MOST_BUCKETS)) + 'a_bucket{le="+Inf"} 9\n'
    )
    (one,) = exposed.histograms(page).values()
    assert len(one.counts) == exposed.MOST_BUCKETS + 1


@pytest.mark.parametrize("of", [lambda name: files.read_secret(Path(name), 16), None])
def test_a_password_is_read_of_a_file_or_a_pipe_and_nothing_else(
    of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe was waited for, a device opened, and one that never ends read."""

    def read(name: str) -> str:
        monkeypatch.setenv("ARGUS_STORE_PASSWORD_FILE", name)
        return of(name)[0].decode() if of is not None else password_of_environment()

    os.mkfifo(tmp_path / "pipe")
    assert read(str(tmp_path / "pipe")) == ""
    with pytest.raises((ArgusError, files.NotRegular), match="no regular file"):
        read("/dev/zero")
    ours, its = os.pipe()
    os.write(its, b"hunter2")
    os.close(its)
    assert read(f"/dev/fd/{ours}") == "hunter2"
    os.close(ours)
    (tmp_path / "long").write_text("x" * (1 << 20))
    assert len(read(str(tmp_path / "long"))) in (16, 4096)


def test_names_for_completion_are_asked_without_the_password_in_an_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody of that user, and root, could read it there."""
    program, proof = tmp_path / "python", tmp_path / "proof"
    program.write_text(
        f'#!/bin/sh\n{{ env; echo "words $*"; echo "given $(cat)"; }} > {proof}.new; mv {proof}.new {proof}\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(completion.sys, "executable", str(program))
    monkeypatch.setenv("ARGUS_STORE_PASSWORD", "hunter2")
    completion._refresh_aside("clickhouse://a@db/x")
    until = time.monotonic() + 60
    while not proof.exists() and time.monotonic() < until:
        time.sleep(0.01)
    lines = proof.read_text().splitlines()
    assert "given hunter2" in lines
    assert sum("hunter2" in line for line in lines) == 1
    assert any(line.startswith("words ") and line.endswith(" clickhouse://a@db/x -") for line in lines)


@AS_ROOT
@pytest.mark.kernel
def test_a_check_probes_what_nobody_else_can_hold_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It probed libc, which every process maps, and waited for all of them."""
    library, function = preflight.own_code()
    assert function() == 0
    assert [one.path for one in executable_mappings(os.getpid()) if one.inode == library.inode] == [library.path]
    assert "memfd" in library.path
    released = threading.Event()
    monkeypatch.setattr(preflight, "ATTACH_S", 0.2)
    monkeypatch.setattr(Probes, "attach", lambda *_: released.wait(60))
    try:
        state = preflight.probe_self()
    finally:
        released.set()
    assert not state.on
    assert "no probe came within" in state.detail
