"""Probes are put into the file that was parsed, whatever lies under its path by then."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from typing import Literal

import pytest

from argus.capture.probes import Probes
from argus.capture.process.targets import find_libraries
from tests.security.mapping_process import mapping, needs_root

pytestmark = [pytest.mark.kernel, needs_root()]

SOURCE = "int cuLaunchKernel(int n) { return n * 3 + %d; }"
"""Both files have it at the same offset."""


def build(path: Path, number: int) -> Path:
    command = ["gcc", "-O1", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=(SOURCE % number).encode(), check=True)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("backend", ["multi", "perf"])
@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_path_exchanged_after_it_was_parsed_leads_nowhere(
    folder: Path, tmp_path: Path, backend: Literal["multi", "perf"], kind: str
) -> None:
    """A process (uid 65534) had root patch a byte of a library of root's, in every process that maps it."""
    library = build(folder / "libcuda.so.1", 1)
    of_root = build(tmp_path / "libv.so", 2)
    victim = ctypes.CDLL(str(of_root))  # this very process, which is root's
    code = ctypes.cast(victim.cuLaunchKernel, ctypes.c_void_p).value
    before = ctypes.string_at(code, 64)
    probes = Probes(backend=backend)
    try:
        with mapping([library]) as pid:
            (found,) = (one for one in find_libraries(pid) if one.path == str(library))
            if kind == "link":
                (folder / "link").symlink_to(of_root)
                (folder / "link").rename(library)
            else:
                library.unlink()
                os.link(of_root, library)
            attachment = probes.attach(found, None)
            assert attachment.probes > 0
            assert ctypes.string_at(code, 64) == before
            with open(f"/proc/{pid}/maps") as lines:
                start, offset = next(
                    (int(line.split("-")[0], 16), int(line.split()[2], 16))
                    for line in lines
                    if "libcuda.so.1" in line and "x" in line.split()[1]
                )
            with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
                at = start + found.offsets["cuLaunchKernel"] - offset
                inside = os.pread(memory.fileno(), 64, at)
            with open(found.open_path, "rb") as file:
                assert inside != os.pread(file.fileno(), 64, found.offsets["cuLaunchKernel"]), "its own file is probed"
    finally:
        probes.close()
