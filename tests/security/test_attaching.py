"""No process keeps a trace from putting probes on the others' files: by files that the kernel refuses, that are slow to
probe, or that come without end."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from argus.capture.probes import Probes
from argus.capture.process.targets import find_libraries
from argus.live.probed_files import ProbedFiles
from argus.model.errors import ArgusError
from argus.model.losses import Owner
from tests.builders.sessions import a_session
from tests.security.mapping_process import mapping, needs_root

HONEST, HOSTILE = (1000, ""), (65534, "")


class FakeProbes:
    """Probes without a kernel.

    Attributes:
        refused: Numbers of files that the kernel refuses.
        attached: Numbers of files that were probed, in order, with the process.
    """

    def __init__(self) -> None:
        self.refused: set[int] = set()
        self.attached: list[tuple[int, int | None]] = []

    def attach(self, library: Any, pid: int | None, **_: Any) -> Any:
        number = library.key[1]
        self.attached.append((number, pid))
        if number in self.refused:
            raise ArgusError(f"the kernel refuses to probe {number}")
        return SimpleNamespace(library=library, pid=pid, probes=1)


def a_target(pid: int, owner: Owner, numbers: Sequence[int]) -> Any:
    """A process that maps these files."""
    libraries = [
        SimpleNamespace(key=("08:01", n, 1, 1), shown_path=str(n), file=SimpleNamespace(on_overlay=False))
        for n in numbers
    ]
    return SimpleNamespace(
        pid=pid, libraries=libraries, alive=lambda: True, has=lambda _: False, identity=SimpleNamespace(owner=owner)
    )


def probed_files(probes: Any) -> ProbedFiles:
    """As of a trace that follows children: nobody's mappings are read."""
    session = a_session(children=True)
    session.probes = probes
    family: Any = set()
    return ProbedFiles(session, family)


# ---- files that the kernel refuses


def test_a_file_that_cannot_be_probed_keeps_no_trace_of_others_from_beginning() -> None:
    probes = FakeProbes()
    probes.refused = {1}
    files = probed_files(probes)
    users = [a_target(1, HOSTILE, [1]), a_target(2, HONEST, [2])]
    files.attach(users, {1, 2}, running=False)
    assert [attachment.library.key[1] for attachment in files.attached] == [2]
    assert files._session.losses.totals == {"attach_failed": 1}
    assert list(files._session.notes) == ["the kernel refuses to probe 1"]


def test_nor_one_beside_a_process_that_has_loaded_nothing_yet() -> None:
    probes = FakeProbes()
    probes.refused = {1}
    files = probed_files(probes)
    files.attach([a_target(1, HOSTILE, [1])], {1, 2}, running=False)
    assert files._session.losses.totals == {"attach_failed": 1}


def test_a_trace_of_what_cannot_be_probed_does_not_begin() -> None:
    probes = FakeProbes()
    probes.refused = {1, 2}
    files = probed_files(probes)
    users = [a_target(1, HONEST, [1]), a_target(2, HONEST, [2])]
    with pytest.raises(ArgusError, match="refuses to probe 1"):
        files.attach(users, {1, 2}, running=False)
    named = probed_files(probes)
    named.named = {1}
    with pytest.raises(ArgusError, match="refuses to probe 1"):
        named.attach(users[:1], {1, 3}, running=False)
    one_of_two = probed_files(probes)
    one_of_two.named = {1, 3}
    one_of_two.attach([*users, a_target(3, HONEST, [3])], {1, 2, 3}, running=False)
    assert one_of_two._session.losses.totals == {"attach_failed": 2}


REFUSED = """
__asm__(".text\\n.globl cudaLaunchKernel\\n.type cudaLaunchKernel,@function\\ncudaLaunchKernel: int3\\n ret\\n"
        ".size cudaLaunchKernel,2\\n");
"""


def build(path: Path, source: str) -> Path:
    command = ["gcc", "-O1", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=source.encode(), check=True)
    path.chmod(0o755)
    return path


@pytest.mark.kernel
@needs_root()
def test_a_function_that_begins_with_a_breakpoint_costs_its_file_alone(folder: Path) -> None:
    """The kernel refuses it, with an error that has no name (``ENOTSUPP``)."""
    hostile = build(folder / "libcudart.so.12", REFUSED)
    honest = build(folder / "libcuda.so.1", "int cuLaunchKernel(int n) { return n * 3; }")
    probes = Probes()
    try:
        with mapping([hostile, honest]) as pid:
            files = probed_files(probes)
            target = a_target(pid, HOSTILE, [])
            target.libraries = find_libraries(pid)
            files.attach([target], {pid}, running=False)
            assert [Path(each.library.path).name for each in files.attached] == [honest.name]
            (note,) = files._session.notes
            assert "libcudart.so.12" in note
            assert "begins with an instruction on which no probe can stand" in note
    finally:
        probes.close()
