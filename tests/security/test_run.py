"""`argus run --user`: what another user's program leads to is looked at as that user, and not for ever."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from argus.live import command
from argus.live.command import Holder, User

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
NOBODY = User(65534, 65534, [65534])
LOADER = """#!/bin/sh
{ id -u; id -G; grep CapEff /proc/self/status; ls /proc/self/fd | wc -l; } >> "$TOLD"
"""


@pytest.fixture
def theirs() -> Iterator[Path]:
    """A folder of theirs, which they can reach."""
    folder = Path(tempfile.mkdtemp(prefix="argus-security-", dir="/var/tmp"))
    os.chown(folder, NOBODY.uid, NOBODY.gid)
    yield folder
    shutil.rmtree(folder)


def test_the_loader_lists_a_program_with_no_right_of_root(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program can be made so that listing what it is linked with runs its code."""
    loader, told = theirs / "loader", theirs / "told"
    loader.write_text(LOADER)
    loader.chmod(0o755)
    monkeypatch.setattr(command, "_LOADERS", (str(loader),))
    holder = Holder(["/bin/true"], {"PATH": "/bin", "TOLD": str(told)}, NOBODY)
    holder.let_go()
    uid, groups, rights, descriptors = told.read_text().splitlines()
    assert (uid, groups, rights.split()[1].strip("0")) == ("65534", "65534", "")
    assert int(descriptors) <= 4, "input, output, errors, and the folder that ls reads"


def test_what_else_is_looked_for_is_so_as_the_user(theirs: Path) -> None:
    holder = Holder(["/bin/true"], {"PATH": "/bin"}, NOBODY, lambda: Path(f"/{os.getuid()}"))
    holder.let_go()
    assert holder.found == Path("/65534")


@pytest.mark.parametrize("user", [None, NOBODY])
def test_a_pipe_in_a_library_s_place_does_not_keep_the_command(
    theirs: Path, monkeypatch: pytest.MonkeyPatch, user: User | None
) -> None:
    monkeypatch.setattr(command, "HELD_S", 0.5)
    package = theirs / "lib/python3.11/site-packages/nvidia/nccl/lib"
    package.mkdir(parents=True)
    os.mkfifo(package / "libnccl.so.2")
    (theirs / "bin").mkdir()
    shutil.copy("/bin/true", theirs / "bin" / "python")
    began = time.monotonic()
    holder = Holder([str(theirs / "bin" / "python")], dict(os.environ), user)
    assert time.monotonic() - began < 5
    assert holder.pid == 0, "it is gone"


def test_a_holder_whose_command_is_given_up_ends(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for it may be ended meanwhile."""
    monkeypatch.setattr(command, "HELD_S", 0.5)
    monkeypatch.setattr(command, "likely_libraries", lambda *_: time.sleep(60))
    monkeypatch.setattr(Holder, "let_go", lambda self: None)  # as if its parent were no more
    holder = Holder(["true"], {})
    assert holder.gave_up
    assert os.waitpid(holder.pid, 0)[1] == signal.SIGALRM


def test_a_holder_is_let_go_if_the_wait_for_it_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[int] = []
    fork = os.fork

    def forked() -> int:
        children.append(fork())
        return children[-1]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "likely_libraries", lambda *_: time.sleep(60))
    monkeypatch.setattr(command, "os", SimpleNamespace(**{**vars(os), "fork": forked}))
    monkeypatch.setattr(command, "select", SimpleNamespace(select=interrupted))
    with pytest.raises(KeyboardInterrupt):
        Holder(["true"], {})
    with pytest.raises(ChildProcessError):
        os.waitpid(children[0], 0)
