"""Children of traced processes are traced from their first call on: the kernel lets them through at the fork."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from argus.capture.kernel import btf
from argus.capture.kernel.programs import LoadError, Module
from argus.capture.probes import Probes
from argus.capture.process.pytorch import LAYOUTS
from argus.capture.process.targets import find_libraries

pytestmark = [pytest.mark.kernel, pytest.mark.core]

CALLS, CHILDREN = 211, 7
LIBRARY = """
__attribute__((noinline)) int cudaLaunchKernel(void) { __asm__ volatile("" ::: "rbx", "memory"); return 0; }
"""
PROGRAM = f"""
import ctypes, os, sys, threading
launch = ctypes.CDLL(sys.argv[1]).cudaLaunchKernel
print("ready", flush=True)
for line in sys.stdin:
    if line == "thread\\n":
        thread = threading.Thread(target=launch)
        thread.start()
        thread.join()
    else:
        child = os.fork()
        if not child:
            for _ in range({CALLS}): launch()
            grandchild = os.fork()
            if not grandchild: launch()
            else: os.waitpid(grandchild, 0)
            os._exit(0)
        os.waitpid(child, 0)
    print("done", flush=True)
"""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Forks a child that calls at once, and has a child that calls once, for each line that it reads."""
    source, library = tmp_path / "cudart.c", tmp_path / "libcudart.so.12"
    source.write_text(LIBRARY)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    words = [sys.executable, "-c", PROGRAM, str(library)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()


def ask(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{text}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


@pytest.fixture
def probes() -> Iterator[Probes]:
    made = Probes()
    yield made
    made.close()


def calls_by_process(probes: Probes) -> dict[int, int]:
    time.sleep(0.05)
    pids, counts = np.unique(probes.launches.drain()["pid"], return_counts=True)
    return dict(zip(pids.tolist(), counts.tolist(), strict=True))


def test_no_call_of_a_child_is_missed(probes: Probes, program: subprocess.Popen[str]) -> None:
    """Nothing in user space notices these forks."""
    (library,) = find_libraries(program.pid)
    probes.attach(library, None)
    probes.follow_forks()
    assert probes.forks == "on"
    ask(program, "fork")
    assert calls_by_process(probes) == {}, "of a process that is not traced"
    probes.add_target(program.pid, (1000, ""))
    for _ in range(CHILDREN):
        ask(program, "fork")
    calls = calls_by_process(probes)
    assert sorted(calls.values()) == [1] * CHILDREN + [CALLS] * CHILDREN
    assert program.pid not in calls
    for pid in calls:
        assert probes.is_target(pid), "until user space removes it"
        assert probes._target(pid)["owner"].item() == 1, "its parent's"  # type: ignore[index]
        assert probes.add_target(pid) == 0, "none came too early"
        assert probes.spent(pid)[0] == calls[pid], "what was counted stays"
        probes.remove_target(pid)
        assert not probes.is_target(pid)
    ask(program, "thread")
    assert calls_by_process(probes) == {program.pid: 1}, "a thread is its process's"


def test_a_number_that_is_given_again_is_no_traced_process(probes: Probes, program: subprocess.Popen[str]) -> None:
    probes.follow_forks()
    probes.add_target(program.pid)
    with subprocess.Popen(["true"]) as other:
        other.wait()
    last = Path("/proc/sys/kernel/ns_last_pid")
    if not last.exists():
        pytest.skip("no checkpoints in this kernel")
    probes.add_target(other.pid)  # as if it had not been removed yet
    for _ in range(20):
        last.write_text(str(other.pid - 1))
        with subprocess.Popen(["true"]) as again:
            again.wait()
        if again.pid == other.pid:
            break
    else:
        pytest.skip("others take the number")
    assert not probes.is_target(other.pid)


@pytest.mark.parametrize("lacks", ["types", "program"])
def test_where_the_kernel_cannot_the_reason_is_reported(
    probes: Probes, program: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lacks: str
) -> None:
    if lacks == "types":
        monkeypatch.setattr(btf, "VMLINUX", tmp_path / "vmlinux")
        why = "off: the kernel has no BTF (CONFIG_DEBUG_INFO_BTF)"
    else:

        def refuse(*_: object) -> int:
            raise LoadError(22, "program follow_fork: Invalid argument")

        monkeypatch.setattr(Module, "load", refuse)
        why = "failed: cannot load the program follow_fork: "
    (library,) = find_libraries(program.pid)
    probes.follow_forks()
    assert probes.forks.startswith(why)
    probes.attach(library, None)
    probes.add_target(program.pid)
    ask(program, "fork")
    assert calls_by_process(probes) == {}, "user space lets it through, too late for this one"


def test_a_child_s_pytorch_is_read_as_its_parent_s(probes: Probes, program: subprocess.Popen[str]) -> None:
    """From its first call on, and no longer than it has that number."""
    layouts = probes._module["torch_layouts"]
    probes.follow_forks()
    probes.add_target(program.pid)
    probes.layouts.give(("08:01", 1, 1, 1), 7)
    probes.layouts.set(program.pid, {("08:01", 1, 1, 1): LAYOUTS["x86_64", 2, 8]})
    ask(program, "fork")
    assert (own := layouts.get(program.pid))
    children = [pid for pid in probes.target_pids() if pid != program.pid]
    assert children
    for pid in children:
        assert layouts.get(pid) == own
        probes.remove_target(pid)
        assert layouts.get(pid) is None
