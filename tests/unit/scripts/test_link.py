"""``scripts/link``: ``argus`` in a folder of sudo's PATH, and nothing of others overwritten."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TARGET = ROOT / ".venv" / "bin" / "argus"


def run(link: Path | str, *words: str) -> str:
    done = subprocess.run(
        [str(ROOT / "scripts" / "link"), *words], env={**os.environ, "ARGUS_LINK": str(link)}, capture_output=True,
        text=True, check=True, cwd="/",
    )  # fmt: skip
    assert done.stdout == ""
    return done.stderr


def changed(link: Path) -> tuple[int, ...]:
    """What differs once somebody has written to a path, or replaced it; not when it was last read."""
    status = os.lstat(link)
    return status.st_ino, status.st_mode, status.st_uid, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def test_it_is_made_once_and_removed(tmp_path: Path) -> None:
    link = tmp_path / "argus"
    assert run(link) == f"setup: linked {link}\n"
    assert os.readlink(link) == str(TARGET)
    assert run(link) == "", "nothing is left to do"
    assert run(link, "--remove") == f"setup: removed {link}\n"
    assert not os.path.lexists(link)
    assert run(link, "--remove") == ""


@pytest.mark.parametrize("other", ["file", "link", "dangling"])
def test_what_is_another_s_stays(tmp_path: Path, other: str) -> None:
    link = tmp_path / "argus"
    if other == "file":
        link.write_text("theirs")
    else:
        link.symlink_to("/bin/true" if other == "link" else tmp_path / "gone" / ".venv" / "bin" / "argus")
    before = changed(link)
    assert "is there already, and stays" in run(link)
    assert "stays" in run(link, "--remove")
    assert changed(link) == before


def test_it_can_be_left_out(tmp_path: Path) -> None:
    assert run("off") == ""


@pytest.mark.skipif(shutil.which("setpriv") is None or os.geteuid() != 0, reason="needs root, to become somebody else")
def test_who_may_not_write_there_reads_how(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir(mode=0o555)
    script = tmp_path / "scripts" / "link"
    script.parent.mkdir()
    shutil.copy(ROOT / "scripts" / "link", script)
    for path in (tmp_path, *tmp_path.parents[:-2]):
        path.chmod(path.stat().st_mode | 0o055)
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", str(script)], capture_output=True, text=True,
        env={**os.environ, "ARGUS_LINK": str(folder / "argus")}, check=True,
    )  # fmt: skip
    assert f"sudo ln -s {tmp_path}/.venv/bin/argus {folder}/argus" in done.stderr
