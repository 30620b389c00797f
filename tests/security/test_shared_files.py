"""A file that several users map is probed once, for all of them: who mapped it first takes nothing from the others."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from argus.capture import placement
from argus.capture.attachment import Attachment
from argus.live.options import Options
from argus.live.tracer import Tracer
from argus.model import calls
from argus.store.open import open_store
from argus.store.reader import query
from tests.kernel.conftest import poll_until
from tests.security.mapping_process import AS_NOBODY, NOBODY, needs_root
from tests.stores import new_store

pytestmark = [pytest.mark.kernel, needs_root()]

AS_HONEST = ("setpriv", "--reuid=1000", "--regid=1000", "--clear-groups")
PROGRAM = """
import ctypes, mmap, os, struct, sys, time
kept = []
def map_file(path):
    file = os.open(path, os.O_RDONLY)
    kept.append(mmap.mmap(file, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC))
    os.close(file)
def reduce(path, times, numel_at):
    function = ctypes.CDLL(path)["ALLREDUCE"]
    impl = ctypes.create_string_buffer(1024)
    struct.pack_into("<qq", impl, numel_at, 1000, 6)
    address = ctypes.addressof(impl)
    tensors = (ctypes.c_void_p * 1)(address)
    vector = (ctypes.c_void_p * 2)(ctypes.addressof(tensors), ctypes.addressof(tensors) + 8)
    for _ in range(times):
        function(impl, impl, vector, impl)
print("ready", flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""
ALLREDUCE = next(symbol for symbol in calls.BY_SYMBOL if "ProcessGroupGloo9allreduceER" in symbol)


class Process:
    """A process that executes lines as another user."""

    def __init__(self, stack: contextlib.ExitStack, who: tuple[str, ...], **environment: str) -> None:
        command = [*who, "/usr/bin/python3", "-I", "-S", "-c", PROGRAM.replace("ALLREDUCE", ALLREDUCE)]
        self._process = stack.enter_context(
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
                env={"PATH": "/usr/bin", **environment},
            )
        )
        stack.callback(self._process.kill)
        self.pid = self._process.pid
        assert self._process.stdout is not None
        self._out = self._process.stdout
        assert self._out.readline() == "ready\n"

    def begin(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")

    def do(self, line: str, tracer: Tracer | None = None) -> None:
        """Executes it; meanwhile a trace goes on."""
        self.begin(line)
        if tracer is not None:
            poll_until(tracer, lambda: bool(select.select([self._out], [], [], 0)[0]), 30, line)
        assert self._out.readline() == "done\n"

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def a_library(path: Path, symbols: list[str], version: str = "", body: str = "push %rbp; pop %rbp") -> Path:
    """Functions that return at once, each behind a cheap instruction to probe."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if version:
        (path.parent.parent / "version.py").write_text(f"__version__ = '{version}'\n")
    lines = [
        f".globl {each}\n.type {each},@function\n.p2align 5\n{each}:\n{body}\nxor %eax,%eax\nret\n.size {each},.-{each}"
        for each in symbols
    ]
    source = path.with_suffix(".s")
    source.write_text("\n".join([".text", *lines, '.section .note.GNU-stack,"",@progbits', ""]))
    subprocess.run(["gcc", "-shared", "-o", path, source], check=True)
    source.unlink()
    return path


def torch(path: Path, version: str) -> Path:
    methods = [each.symbol for each in calls.CALLS if each.program == "torch"]
    return a_library(path / "torch/lib/libtorch_cpu.so", [*methods, *calls.symbols_of("backward_begin")], version)


def linked(library: Path, path: Path, version: str) -> Path:
    """The same file at another place, with another version beside it, as a bind mount makes it for any user."""
    other = path / "torch/lib" / library.name
    other.parent.mkdir(parents=True)
    os.link(library, other)
    (path / "torch/version.py").write_text(f"__version__ = '{version}'\n")
    return other


class Scene:
    """A hostile process and an honest one, each with a GPU's library of its own, and a trace of both."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path, store: Path, **options: Any) -> None:
        from run import BUILD

        self.url = new_store(store)
        own = [Path(shutil.copy(BUILD / "libnccl.so.2", folder / f"libnccl{n}.so")) for n in range(2)]
        self.evil = Process(stack, AS_NOBODY)
        self.honest = Process(stack, AS_HONEST, RANK="0", WORLD_SIZE="1", JOB_NAME="honest")
        for process, library in zip((self.evil, self.honest), own, strict=True):
            process.do(f"map_file({str(library)!r})")
        pids = (self.evil.pid, self.honest.pid)
        self.tracer = Tracer(open_store(self.url), Options(pids=pids, stacks=False, **options, max_overhead=1.0))
        self.tracer.start()
        self._stopped = False
        stack.callback(self.stop)

    def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self.lost = {name: value for name, (value, loss) in self.tracer.counters().items() if loss and value}
            self.tracer.stop()

    def rows(self, of: str) -> list[dict[str, Any]]:
        self.stop()
        with open_store(self.url) as store:
            found: list[dict[str, Any]] = query(store, of).to_pylist()
        return found

    def probed(self, library: Path) -> Callable[[], bool]:
        inode = library.stat().st_ino
        return lambda: any(each.library.inode == inode for each in self.tracer.attached)

    def map(self, process: Process, library: Path) -> None:
        """Has it map a file, and waits for probes there, and until it is seen that it does."""
        process.do(f"map_file({str(library)!r})")
        inode = library.stat().st_ino
        roster = self.tracer.session.roster

        def seen() -> bool:
            return any(each.inode == inode for each in roster.by_pid[process.pid][1].target.libraries)

        poll_until(self.tracer, lambda: seen() and self.probed(library)(), 20, f"probes on {library}")


@pytest.fixture
def stack(fakegpu: Path) -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


SIZES = "SELECT job, bytes, toString(dtype) AS dtype, count() AS n FROM collectives GROUP BY job, bytes, dtype"


@pytest.mark.parametrize("hostile", ["2.0.1", "0.1"])
def test_nobody_else_says_how_a_process_s_tensors_are_read(
    stack: contextlib.ExitStack, folder: Path, tmp_path: Path, hostile: str
) -> None:
    """Another user had mapped the library first, with another version beside it, or none."""
    library = torch(folder / "honest", "2.8.0")
    theirs = linked(library, folder / "evil", hostile)
    scene = Scene(stack, folder, tmp_path)
    scene.map(scene.evil, theirs)
    scene.map(scene.honest, library)
    scene.honest.do(f"reduce({str(library)!r}, 101, 160)", scene.tracer)
    scene.evil.do(f"reduce({str(theirs)!r}, 53, 168)", scene.tracer)
    rows = {(row["n"], row["bytes"], row["dtype"]) for row in scene.rows(SIZES)}
    sizes = (4000, "float32") if hostile == "2.0.1" else (0, "unknown")
    assert rows == {(101, 4000, "float32"), (53, *sizes)}
    assert "layout_unknown" not in scene.lost


def many(folder: Path, number: int) -> list[str]:
    """Copies of a small library of the GPU's."""
    first = a_library(folder / "many" / "libcudart.so", ["cudaLaunchKernel"])
    return [str(shutil.copy(first, folder / f"many/libcudart{n}.so")) for n in range(number)]


def attachment_of(scene: Scene, library: Path) -> Attachment:
    inode = library.stat().st_ino
    (found,) = (each for each in scene.tracer.attached if each.library.inode == inode)
    return found


@pytest.mark.parametrize("ends", [False, True])
def test_who_has_no_slots_takes_none_of_another_s_collectives(
    stack: contextlib.ExitStack, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """Another user, whose files have used up its slots, had mapped the library first."""
    monkeypatch.setattr(placement, "FILE_SLOTS", 16)
    library = torch(folder / "torch", "2.8.0")
    scene = Scene(stack, folder, tmp_path)
    files = many(folder, 10)
    scene.evil.do(f"for path in {files!r}: map_file(path)")
    poll_until(scene.tracer, lambda: len(scene.tracer.attached) >= len(files) + 2, 20, "probes on all")
    scene.evil.do(f"map_file({str(library)!r})")
    refused = "there is room for no more files of its user"
    poll_until(scene.tracer, lambda: any(refused in note for note in scene.tracer.session.notes), 10, "the refusal")
    if ends:
        scene.evil.end()
    scene.map(scene.honest, library)
    assert attachment_of(scene, library).has_slot
    scene.honest.do(f"reduce({str(library)!r}, 101, 160)", scene.tracer)
    rows = scene.rows(SIZES)
    assert [(row["job"], row["n"], row["bytes"]) for row in rows] == [("honest", 101, 4000)]
    (job,) = (each for each in scene.tracer.jobs if each.name == "honest")
    assert not job.losses["attach_failed"]
    assert [member.without_slot for member in job.ranks()] == [0]


def test_a_call_costs_what_the_file_costs_that_its_process_maps(
    stack: contextlib.ExitStack, folder: Path, tmp_path: Path
) -> None:
    """Files without a slot share one place: another user's dear one had honest jobs ignored for its price."""
    cheap = a_library(folder / "cheap/libcudart.so", ["cudaLaunchKernel"])
    dear = a_library(folder / "dear/libcudart.so", ["cudaLaunchKernel"], body="")
    scene = Scene(stack, folder, tmp_path)
    probes = scene.tracer.session.probes
    taken: dict[Any, Any] = {n: placement._Slot(n, (NOBODY, "")) for n in range(2, 255)}
    probes.placement._file_slots.update(taken)
    launch = calls.BY_SYMBOL["cudaLaunchKernel"].id
    prices = {}
    for process, library in ((scene.honest, cheap), (scene.evil, dear)):
        scene.map(process, library)
        found = attachment_of(scene, library)
        assert found.lacks_slot
        prices[process.pid] = found.prices[launch]
        process.do(f"import ctypes; launch = ctypes.CDLL({str(library)!r}).cudaLaunchKernel")
    assert prices[scene.evil.pid] > 2 * prices[scene.honest.pid]
    for process in (scene.honest, scene.evil):
        before = probes.spent(process.pid)
        process.do("for _ in range(499): launch(0, 0, 0, 0, 0, 0, 0)", scene.tracer)
        hits, _, trap_ns = (now - then for now, then in zip(probes.spent(process.pid), before, strict=True))
        assert hits == 499
        assert trap_ns == 499 * prices[process.pid]
