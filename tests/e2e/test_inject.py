"""Injection into real processes: nothing of theirs may change. And every process that is refused."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from argus.cupti import arm, inject, load
from argus.model.errors import ArgusError
from tests import pythons as cpythons

pytestmark = pytest.mark.kernel

PYTHON_TARGET = """
import ctypes, os, sys, threading, time
# By its path: an interpreter that brings its own C library may search nowhere else.
assert ctypes.CDLL(os.environ["LD_LIBRARY_PATH"] + "/libcuda.so.1").cuInit(0) == 0
def work():
    while True: sum(range(100))
for _ in range(3 if sys.argv[1] == "threads" else 0):
    threading.Thread(target=work, daemon=True).start()
print("ready", flush=True)
deadline, rounds = time.monotonic() + 30, 0
while time.monotonic() < deadline:
    if sys.argv[1] == "waits": time.sleep(0.01)
    assert [str(i) for i in range(50)][-1] == "49"
    rounds += 1
    if sys.argv[2:] and rounds > 100: break
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A native program that notices what is done to it."""
    built = tmp_path_factory.mktemp("injected") / "injected"
    source = Path(__file__).with_name("injected.c")
    subprocess.run(["gcc", "-O1", "-pthread", "-o", built, source, "-ldl"], check=True)
    return str(built)


@pytest.fixture
def start(fakegpu: Path) -> Iterator[Start]:
    """Starts a process that loads the fake GPU, and waits until it is ready."""
    started: list[subprocess.Popen[str]] = []

    def run(*command: str, **environment: str) -> subprocess.Popen[str]:
        plain = {name: value for name, value in os.environ.items() if name not in (arm.VARIABLE, arm.SWITCH)}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**plain, "LD_LIBRARY_PATH": str(fakegpu), **environment}
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def leftovers(pid: int | None = None) -> list[str]:
    """What an injection left behind: files where the process could have loaded them from, and its descriptors."""
    folders = ("/tmp", "/var/tmp", "/dev/shm", "/run")
    found = [str(path) for folder in folders for path in Path(folder).glob("argus-inject-*")]
    if pid is not None:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # the program opens and closes some itself
                if "argus" in (file := os.readlink(entry)):
                    found.append(file)
    return found


# ---- what an injected process notices: nothing


@pytest.mark.alone  # starved of CPU time Argus gives up: one that is always in malloc must be stopped often
@pytest.mark.parametrize(
    ("mode", "alarm_us"),
    [
        *((mode, 0) for mode in ("spin", "redzone", "malloc", "nanosleep", "poll", "epoll", "condition")),
        # Signals end the system calls of the others early, injected or not.
        *((mode, 1000) for mode in ("spin", "redzone", "malloc")),
    ],
)
def test_a_native_program_is_injected_and_notices_nothing(program: str, start: Start, mode: str, alarm_us: int) -> None:
    process = start(program, mode, str(alarm_us), "30")
    output = inject.inject(process.pid)
    took = r"(?:\d,\d{3}|\d{1,3}|\d\d\.\d|\d\.\d\d) (?:ns|µs|ms|s)"
    assert re.fullmatch(rf"injected by ptrace: the process was stopped for {took}", output)
    assert [entry.state for entry in arm.armed_processes([process.pid])] == ["DORMANT"]
    assert inject.inject(process.pid) == "already armed"
    time.sleep(0.5)
    assert leftovers(process.pid) == []
    process.send_signal(signal.SIGUSR1)
    reported, _ = process.communicate(timeout=20)
    assert process.returncode == 0, reported


IN_A_HANDLER = """
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
static volatile int over;
static void on_end(int number) { (void)number; over = 1; }
static void on_alarm(int number) { (void)number; puts("ready"); fflush(stdout); while (!over); }
int main(void) {
	((int (*)(unsigned))dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuInit"))(0);
	signal(SIGUSR1, on_end);
	signal(SIGALRM, on_alarm);
	raise(SIGALRM);
	return 0;
}
"""


def test_a_thread_in_a_signal_handler_is_let_be(tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have interrupted the allocator, which would then be waited for for ever."""
    monkeypatch.setattr(load, "REST_TIMEOUT_S", 0.5)
    (tmp_path / "handler.c").write_text(IN_A_HANDLER)
    subprocess.run(["cc", "-o", tmp_path / "handler", tmp_path / "handler.c", "-ldl"], check=True)
    process = start(str(tmp_path / "handler"))
    with pytest.raises(ArgusError, match="never found where loading a library is safe"):
        inject.inject(process.pid)
    assert leftovers(process.pid) == []
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=20)
    assert process.returncode == 0


def test_a_process_that_is_always_in_the_loader_is_let_be(
    program: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "REST_TIMEOUT_S", 1.0)
    monkeypatch.setattr("argus.cupti.interrupt.Stopped.at_rest", lambda *_: False)
    process = start(program, "loader", "1000", "30")
    with pytest.raises(ArgusError, match="never found where loading a library is safe"):
        inject.inject(process.pid)
    assert leftovers(process.pid) == []
    process.send_signal(signal.SIGUSR1)
    reported, _ = process.communicate(timeout=20)
    assert process.returncode == 0, reported


def test_a_process_that_ends_meanwhile_leaves_no_files(
    program: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start(program, "nanosleep", "0", "30")

    def at_rest(*_: object) -> bool:
        process.kill()
        return False

    monkeypatch.setattr("argus.cupti.interrupt.Stopped.at_rest", at_rest)
    with pytest.raises(ArgusError, match=f"process {process.pid} ended while Argus inspected it"):
        inject.inject(process.pid)
    assert leftovers() == []


def pythons() -> list[str]:
    """This interpreter, and one of each other version that is installed."""
    found = {sys.version_info[:2]: sys.executable}
    for python in cpythons.every():
        found.setdefault(python.version[:2], python.path)
    return list(found.values())


@pytest.mark.parametrize("mode", ["waits", "spins", "threads"])
@pytest.mark.parametrize("python", pythons())
def test_a_python_program_is_injected(start: Start, python: str, mode: str) -> None:
    process = start(python, "-c", PYTHON_TARGET, mode)
    output = inject.inject(process.pid)
    assert output.startswith("injected by ptrace")
    assert [entry.state for entry in arm.armed_processes([process.pid])] == ["DORMANT"]
    time.sleep(0.2)
    assert process.poll() is None
    assert leftovers(process.pid) == []


def test_another_thread_than_the_main_one_is_not_taken_for_a_process(program: str, start: Start) -> None:
    process = start(sys.executable, "-c", PYTHON_TARGET, "threads")
    thread = max(map(int, os.listdir(f"/proc/{process.pid}/task")))
    with pytest.raises(ArgusError, match="is a thread of process"):
        inject.inject(thread)


# ---- containers


IN_NAMESPACES = "unshare --mount --pid --fork --kill-child --mount-proc sh -c"


def inner(process: subprocess.Popen[str]) -> int:
    """The process that unshare waits for."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


def test_a_process_with_mounts_of_its_own_is_injected(program: str, start: Start, fakegpu: Path) -> None:
    hide = "mount -t tmpfs x /tmp; mount -t tmpfs x /var/tmp"
    # The repository may lie in /tmp.
    place = Path(f"/dev/shm/injected-{os.getpid()}")
    place.mkdir()
    for file in (Path(program), *fakegpu.glob("*.so*")):
        shutil.copy(file, place)
    run = f"exec {place / Path(program).name} nanosleep 0 30"
    try:
        process = start(*IN_NAMESPACES.split(), f"{hide}; {run}", LD_LIBRARY_PATH=str(place))
        pid = inner(process)
        assert inject.inject(pid).startswith("injected by ptrace")
        assert os.listdir(f"/proc/{pid}/root/tmp") == []
        os.kill(pid, signal.SIGUSR1)
        process.communicate(timeout=20)
        assert process.returncode == 0
    finally:
        shutil.rmtree(place)


def test_no_folder_of_the_process_is_needed(program: str, start: Start) -> None:
    places = ("/tmp", "/var/tmp", "/dev/shm", "/run")
    keep = f"mkdir -p /mnt/keep; mount --bind {Path(program).parent} /mnt/keep"
    hide = "; ".join(f"mount -t tmpfs -o noexec,ro x {place}" for place in places)
    with_libraries = "mkdir -p /mnt/gpu; mount --bind $LD_LIBRARY_PATH /mnt/gpu; export LD_LIBRARY_PATH=/mnt/gpu"
    process = start(
        *IN_NAMESPACES.split(),
        f"mount -t tmpfs x /mnt; {keep}; {with_libraries}; {hide}; exec /mnt/keep/injected nanosleep 0 30",
    )
    assert inject.inject(inner(process)).startswith("injected by ptrace")


def test_without_proc_it_is_refused(program: str, start: Start) -> None:
    process = start("unshare", "--mount", "sh", "-c", f"umount -l /proc; exec {program} nanosleep 0 30")
    refused(process.pid, "has no /proc, through which it would load the helper: not injected")


# ---- refused


def refused(pid: int, words: str) -> None:
    with pytest.raises(ArgusError, match=words):
        inject.inject(pid)
    assert leftovers() == []


def test_processes_that_cannot_be_injected_are_refused(program: str, start: Start) -> None:
    process = start(program, "nanosleep", "0", "30")
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    refused(process.pid, "is stopped: not injected. Let it go on first: kill -CONT")
    process.send_signal(signal.SIGCONT)
    refused(start(program, "nanosleep", "0", "30", NO_CUDA="1").pid, "has not loaded CUDA yet")
    refused(start(program, "nanosleep", "0", "30", SECCOMP="1").pid, "has a seccomp filter")
    refused(start(program, "nanosleep", "0", "30", ARGUS_CUPTI="0").pid, "was started with ARGUS_CUPTI=0")
    process.kill()
    while Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
        time.sleep(0.01)
    refused(process.pid, "zombie")
    process.wait()
    refused(process.pid, f"there is no process {process.pid}")
    refused(os.getpid(), "is Argus itself")


def test_a_kernel_thread_is_refused() -> None:
    for entry in Path("/proc").glob("[0-9]*"):
        if (entry / "cmdline").read_bytes() == b"" and not os.path.lexists(entry / "exe"):
            refused(int(entry.name), "kernel thread")
            return  # in a container there may be none to be seen


def test_a_seccomp_filter_can_be_accepted(program: str, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(inject.SECCOMP_VARIABLE, "1")
    assert inject.inject(start(program, "nanosleep", "0", "30", SECCOMP="1").pid).startswith("injected")


def test_a_process_under_a_debugger_is_refused(program: str, start: Start) -> None:
    process = start(program, "nanosleep", "0", "30")
    debugger = os.fork()
    if debugger == 0:
        libc = ctypes.CDLL(None)
        os._exit(1 if libc.ptrace(0x4206, process.pid, None, None) else (time.sleep(30) or 0))
    try:
        while "TracerPid:\t0" in Path(f"/proc/{process.pid}/status").read_text():
            time.sleep(0.01)
        refused(process.pid, f"is being traced by process {debugger}")
    finally:
        os.kill(debugger, signal.SIGKILL)
        os.waitpid(debugger, 0)


def test_a_process_that_waits_in_the_kernel_is_refused() -> None:
    """The parent of a vfork waits uninterruptibly until its child execs or ends."""
    code = "import ctypes; libc = ctypes.CDLL(None); print('ready', flush=True); libc.vfork() or libc.sleep(30)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        deadline = time.monotonic() + 5
        while Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "D":
            if time.monotonic() > deadline:
                pytest.fail("it is not seen to wait")
        child = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
        try:
            refused(process.pid, "hangs in the kernel")
        finally:
            process.kill()
            os.kill(child, signal.SIGKILL)


def test_other_machines_libraries_and_rules_are_refused(
    program: str, start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pid = start(program, "nanosleep", "0", "30").pid
    with monkeypatch.context() as patch:
        patch.setattr(inject.platform, "machine", lambda: "aarch64")
        refused(pid, "another architecture")
    mapped = inject.executable_mappings(pid)
    with monkeypatch.context() as patch:
        musl = type(mapped[0])(1, 2, 0, "0:0", 9, "/lib/ld-musl-x86_64.so.1", False)
        patch.setattr(inject, "executable_mappings", lambda _: [*mapped, musl])
        refused(pid, "uses musl")
        patch.setattr(inject, "executable_mappings", lambda _: [m for m in mapped if "libc" not in m.path])
        refused(pid, "uses no glibc")
    with monkeypatch.context() as patch:
        (tmp_path / "ptrace_scope").write_text("3\n")
        patch.setattr(inject, "YAMA", tmp_path / "ptrace_scope")
        refused(pid, "Yama")
    assert inject.inject(pid).startswith("injected")
