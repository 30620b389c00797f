"""Every importer reads regular files only: of a pipe without a writer, which would be waited for, one line."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from argus.cli.main import main
from argus.importers import kineto, nsys, tables, whatif_parquet
from argus.importers.dumps import flight_recorder, inspector, ras
from argus.importers.regular import open_regular
from argus.model.errors import ArgusError

COLUMNS = ["--rank-column", "rank", "--step-column", "step", "--duration-column", "ms"]
VERBS = {
    "kineto": [], "nsys": [], "whatif": [], "iterations": COLUMNS, "flight-recorder": [], "ras": [], "inspector": [],
}  # fmt: skip
READERS = {
    "kineto": lambda path: kineto.read(path, 0),
    "nsys": lambda path: nsys.read(path, 0),
    "whatif": lambda path: whatif_parquet.read(path, None),
    "whatif --meta": whatif_parquet.read_meta,
    "iterations": lambda path: list(tables.blocks(path, ["rank"])),
    "flight-recorder": flight_recorder.read,
    "ras": ras.read,
    "inspector": lambda path: inspector.read_all([path]),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_pipe_is_one_line(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "rank_0.json"
    os.mkfifo(pipe)
    code = main(["import", verb, str(pipe), *VERBS[verb], "--store", f"chdb://{tmp_path}/store"])
    shown = capsys.readouterr().err
    assert code in (2, 3)
    assert "rank_0.json is not a" in shown
    assert "is not a file" in shown
    assert len(shown.strip().splitlines()) <= 2


@pytest.mark.parametrize("reader", READERS)
def test_what_became_a_pipe_is_not_waited_for(reader: str, tmp_path: Path) -> None:
    """Between the look at a path and its opening."""
    pipe = tmp_path / "rank_0.json"
    os.mkfifo(pipe)
    with pytest.raises(ArgusError, match="is not a file"):
        READERS[reader](pipe)


def test_sockets_and_devices_are_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("s")
        for path in (Path("s"), Path("/dev/zero")):
            with pytest.raises(ArgusError, match="is not a file"):
                open_regular(path)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: makes a device")
def test_a_device_is_not_even_opened(tmp_path: Path) -> None:
    """Opening some does something: a watchdog's begins to count. A link may lead to one."""
    device, link = tmp_path / "device", tmp_path / "rank_0.json"
    os.mknod(device, 0o600 | stat.S_IFCHR, os.makedev(253, 1048575))  # of no driver: who opens it gets ENXIO
    link.symlink_to(device)
    for path in (device, link):
        with pytest.raises(ArgusError, match="is not a file"):
            open_regular(path)
