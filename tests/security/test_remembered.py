"""What is remembered of a file that is closed: its device's number is given again, all else can be forged."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from argus.capture.process import mapped, targets
from argus.capture.process.elf import Elf
from argus.capture.process.mapped import open_file
from argus.capture.process.symbols import Symbols
from argus.capture.process.targets import find_libraries
from tests.security.mapping_process import AS_NOBODY, mapping, mapping_of, needs_root

pytestmark = needs_root()
AS_ANOTHER = ("setpriv", "--reuid=1234", "--regid=1234", "--clear-groups")
FUNCTION = "int %s(int n) { return n * 3; }\n"


def library(path: Path, *names: str) -> Path:
    path.parent.mkdir()
    source = "".join(FUNCTION % name for name in names)
    words = ["gcc", "-O1", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
    subprocess.run(words, input=source.encode(), check=True)
    os.truncate(path, 1 << 16)  # all are of one size
    path.chmod(0o755)
    return path


@contextlib.contextmanager
def mounted(where: Path, shown: Path) -> Iterator[Path]:
    """A file system with this file: its inode is 2, it was changed at 0 whenever that was."""
    words = [sys.executable, str(Path(__file__).parent / "fuse_folder.py"), str(where), str(shown)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        if process.stdout.readline() != b"mounted\n":
            pytest.skip("no file system in user space can be mounted here")
        yield where / shown.name
    finally:
        end = time.monotonic() + 10
        while subprocess.run(["umount", where], capture_output=True).returncode and time.monotonic() < end:
            time.sleep(0.02)
        process.kill()
        process.communicate()


def look(pid: int) -> tuple[mapped.Key, dict[str, int], str]:
    """The key of the process's libcuda, what is found in it, and what its function's code is called."""
    where = mapping_of(pid, "libcuda.so.1")
    offsets = next((one.offsets for one in find_libraries(pid) if one.path == where.path), {})
    file = mapped.open_mapped(pid, where)
    code = Elf(file).functions(["cuLaunchKernel", "other"])
    names = Symbols(pid)
    try:
        address = where.start + (code.get("cuLaunchKernel") or code["other"]) - where.offset
        return file.key, offsets, names.name(np.array([address], np.uint64))[0].function
    finally:
        names.close()


@pytest.mark.parametrize("forged", [("cuCtxSynchronize", "other", "cuLaunchKernel"), ("other", "another")])
def test_a_device_s_number_that_is_given_again_brings_no_functions(folder: Path, forged: tuple[str, ...]) -> None:
    """Probes stood amid instructions of another user's library, or it was taken to have no functions."""
    true = library(folder / "true" / "libcuda.so.1", "cuLaunchKernel", "cuCtxSynchronize", "last")
    false = library(folder / "false" / "libcuda.so.1", *forged)
    (folder / "place").mkdir()
    for _ in range(20):
        with mounted(folder / "place", false) as shown:
            with mapping([shown], AS_NOBODY) as pid:
                theirs = look(pid)[0]
            gc.collect()
        with mounted(folder / "place", true) as shown, mapping([shown], AS_ANOTHER) as pid:
            key, offsets, name = look(pid)
        gc.collect()
        if key == theirs:  # nobody else has mounted something meanwhile
            break
    else:
        pytest.skip("other file systems are mounted all the time")
    assert offsets == Elf(open_file(true)).functions(["cuLaunchKernel", "cuCtxSynchronize"])
    assert name == "cuLaunchKernel"


def test_what_may_be_mounted_anew_is_remembered_by_owner() -> None:
    def together(device: int) -> bool:
        key = (device, 2, 1 << 16, 0)
        return mapped.lasting(key, "(1, '')") == mapped.lasting(key, "(2, '')")

    assert [together(os.makedev(*numbers)) for numbers in ((0, 40), (7, 0), (43, 1))] == [False] * 3
    assert together(os.makedev(259, 1))
    assert together(os.makedev(8, 1))


def test_functions_that_are_remembered_are_looked_up_in_the_file_again(folder: Path) -> None:
    true = library(folder / "true" / "libcuda.so.1", "cuLaunchKernel", "cuCtxSynchronize")
    functions = Elf(open_file(true)).functions(["cuLaunchKernel", "cuCtxSynchronize"])
    with mapping([true]) as pid:
        for _ in range(2):
            (found,) = (one for one in find_libraries(pid) if one.path == str(true))
            assert found.offsets == functions
            (key,) = (key for key in targets._hooks_by_file if key[0] == found.file.key)
            roles, offsets, text_bytes, places = targets._hooks_by_file[key]
            moved = {name: offset + 1 for name, offset in offsets.items()}
            targets._hooks_by_file[key] = roles, moved, text_bytes, places
