"""A process of another user that maps files as code, and waits."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from argus.capture.process.mapped import Mapping
from argus.capture.process.targets import executable_mappings

NOBODY = 65534
AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
# Maps each file that it is given, says so, and unmaps them on demand.
_PROGRAM = """
import mmap, os, sys
maps = []
for path in sys.argv[1:]:
    fd = os.open(path, os.O_RDONLY)
    maps.append(mmap.mmap(fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC))
    os.close(fd)
print("mapped", flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def folder_of_nobody() -> Iterator[Path]:
    """A folder that belongs to the other user."""
    path = Path(tempfile.mkdtemp(prefix="argus-hostile-"))
    try:
        os.chown(path, NOBODY, NOBODY)
        path.chmod(0o755)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def mapping(files: Sequence[Path | str], before: Sequence[str] = AS_NOBODY) -> Iterator[int]:
    """The PID of a process that maps these files; it ends with the block.

    Args:
        files: As it sees them.
        before: Words before its command, which end in an exec.
    """
    command = [*before, "/usr/bin/python3", "-I", "-S", "-c", _PROGRAM, *map(str, files)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "mapped\n":
            pytest.fail("the process could not map its files")
        yield next(pid for pid in _group(process.pid) if _runs_program(pid))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _group(leader: int) -> list[int]:
    """The processes of a group: `unshare --fork` has a child."""
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and os.getpgid(int(entry)) == leader:
                found.append(int(entry))
    return found


def _runs_program(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"/usr/bin/python3\0-I\0-S\0")
    return False


def mapping_of(pid: int, name: str) -> Mapping:
    """Its mapping of the file of this name."""
    return next(one for one in executable_mappings(pid) if Path(one.path).name == name)


def needs_root() -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        os.geteuid() != 0 or not sys.platform.startswith("linux"), reason="starts processes of other users"
    )
