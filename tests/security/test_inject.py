"""A hostile process that root injects: nothing of it is run with root's rights, and nothing of root's is written."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import ANY

import pytest

from argus.cupti import arm, inject, interrupt
from argus.model.errors import ArgusError
from tests.kernel.conftest import wait_until

pytestmark = pytest.mark.kernel

NOBODY = 65534
AS_NOBODY = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
IN_NAMESPACES = [*AS_NOBODY, "unshare", "--user", "--map-root-user", "--mount"]
OPEN_TMP = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o mode=0777 x /tmp && exec "$@"', "sh", *AS_NOBODY]
"""A folder for temporary files as a pod's emptyDir is: anyone may rename anything in it."""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def place(fakegpu: Path) -> Iterator[Path]:
    """A folder of nobody's with the hostile program and a CUDA. Not in /tmp: what hides that must not hide it."""
    folder = Path(tempfile.mkdtemp(prefix="argus-security-", dir="/var/tmp"))
    try:
        folder.chmod(0o755)
        for library in fakegpu.glob("*.so*"):
            shutil.copy(library, folder)
        source = Path(__file__).with_name("hostile_python.c")
        # Not in its environment: whoever runs it may not pass that on.
        files = [f'-D{name.upper()}="{folder / name}"' for name in ("runs", "events")]
        subprocess.run(["gcc", "-O1", "-pthread", *files, "-o", folder / "python3.14", source, "-ldl"], check=True)
        os.chown(folder, NOBODY, NOBODY)
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def start(place: Path) -> Iterator[Start]:
    """Starts the hostile program as nobody, or what is to start it, and waits until it is ready."""
    started: list[subprocess.Popen[str]] = []

    def run(*words: str, before: list[str] = AS_NOBODY) -> subprocess.Popen[str]:
        environment = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(place)}
        command = [*before, str(place / "python3.14"), *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def treasure(tmp_path: Path) -> Iterator[Path]:
    """A file of root's that nobody may read; afterwards it is as it was."""
    file = tmp_path / "treasure"
    file.write_bytes(b"root's own")
    file.chmod(0o600)
    before = file.stat()
    yield file
    after = file.stat()
    assert file.read_bytes() == b"root's own"
    assert (stat.S_IMODE(after.st_mode), after.st_mtime_ns, after.st_ctime_ns) == (
        0o600,
        before.st_mtime_ns,
        before.st_ctime_ns,
    )


def end(process: subprocess.Popen[str]) -> None:
    """It goes on as if nothing had been, until it is asked to end."""
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=20)
    assert process.returncode == 0


@pytest.mark.parametrize("before", [AS_NOBODY, IN_NAMESPACES], ids=["plain", "namespaces"])
def test_no_program_of_the_process_is_run(start: Start, place: Path, before: list[str]) -> None:
    """Its name says that it is a CPython, which could be asked to load the helper by running it once more."""
    process = start("waits", before=before)
    try:
        assert inject.inject(process.pid).startswith("injected by ptrace")
    finally:
        assert len((place / "runs").read_text().splitlines()) == 1, "only by its owner"
    assert [entry.state for entry in arm.armed_processes([process.pid])] == ["DORMANT"]
    end(process)


def test_a_folder_that_is_exchanged_leads_nowhere(start: Start, place: Path, treasure: Path) -> None:
    process = start("folders", str(treasure), before=OPEN_TMP)
    for _ in range(3):
        with contextlib.suppress(ArgusError):
            inject.inject(process.pid)
    assert not (place / "events").exists(), "nothing is made in its folders, even for a moment"
    assert sorted(os.listdir(f"/proc/{process.pid}/root/tmp")) == ["links"]
    assert [entry.state for entry in arm.armed_processes([process.pid])] == ["DORMANT"]
    end(process)


_watched: list[tuple[str, tuple[object, ...]]] | None = None


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    if _watched is not None:
        _watched.append((event, arguments))


def test_root_writes_to_its_memory_and_to_no_file(start: Start) -> None:
    global _watched
    process = start("waits")
    sys.addaudithook(_watch)
    _watched = []
    try:
        inject.inject(process.pid)
    finally:
        seen, _watched = _watched, None
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    opened = [arguments for event, arguments in seen if event == "open"]
    assert opened
    assert {path for path, _, flags in opened if isinstance(flags, int) and flags & writing} == {
        f"/proc/{process.pid}/mem",
        "/dev/null",
    }
    starts = ("subprocess", "os.exec", "os.posix_spawn", "os.fork", "os.system", "pty")
    changes: tuple[str, ...] = (
        "os.mkdir",
        "os.chmod",
        "os.chown",
        "os.rename",
        "os.remove",
        "os.rmdir",
        "os.link",
        "os.symlink",
    )
    changes += ("os.truncate", "os.utime", "os.setxattr", "shutil", "tempfile")
    begun = [arguments for event, arguments in seen if event.startswith(starts + changes)]
    # Nothing but the Python that fills the process's file in memory.
    assert begun == [(sys.executable, [sys.executable, "-I", "-S", "-c", inject._FILL, ANY], "/", {})]


@pytest.mark.parametrize("kind", ["file", "fifo"])
def test_another_file_under_the_number_is_not_written(
    start: Start, place: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A thread of the process replaces the file in memory before it is filled, by one that it may only read."""
    other = place / "other"
    if kind == "fifo":
        os.mkfifo(other, 0o666)
    else:
        other.write_bytes(b"")
        other.chmod(0o644)
    before = other.stat()
    process = start("descriptor", str(other))
    real = interrupt.take_file

    def take_file(pidfd: int, number: int) -> int:
        replaced = Path(f"/proc/{process.pid}/fd/{number}")
        wait_until(lambda: os.readlink(replaced) == str(other), what="the process to replace its file")
        return real(pidfd, number)

    monkeypatch.setattr(interrupt, "take_file", take_file)
    with pytest.raises(ArgusError, match="its file in memory cannot be filled"):
        inject.inject(process.pid)
    after = other.stat()
    assert (after.st_size, after.st_mtime_ns) == (0, before.st_mtime_ns)
    end(process)


def test_a_process_that_becomes_another_program_is_let_be(
    start: Start, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It might become one that runs as root: neither its memory nor its registers are changed."""
    process = start("waits")
    real = interrupt.find_stacks

    def find_stacks(pid: int) -> list[range]:
        found = real(pid)
        process.send_signal(signal.SIGUSR2)
        wait_until(lambda: (place / "runs").read_text().count("\n") == 2, what="the process to call exec")
        assert process.stdout is not None
        process.stdout.readline()
        return found

    monkeypatch.setattr(interrupt, "find_stacks", find_stacks)
    with pytest.raises(ArgusError, match="has become another program"):
        inject.inject(process.pid)
    assert list(arm.armed_processes([process.pid])) == []
    end(process)


def test_memory_of_the_program_before_is_out_of_reach(start: Start, place: Path) -> None:
    """What was opened before an exec never reaches the program after it, which may run as root."""
    process = start("waits")
    memory = os.open(f"/proc/{process.pid}/mem", os.O_RDWR)
    try:
        process.send_signal(signal.SIGUSR2)
        assert process.stdout is not None
        process.stdout.readline()
        with interrupt.stop(process.pid, memory) as thread, pytest.raises(OSError, match="cannot be written"):
            thread.call([], 0)
    finally:
        os.close(memory)
    end(process)


def test_a_file_in_memory_that_keeps_who_writes_waiting_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that the process itself is writing to, from a page that never comes."""
    monkeypatch.setattr(inject, "FILL_S", 0.3)
    filling = inject._FILL
    pidfd = os.pidfd_open(os.getpid())
    for code in (filling.replace("os.pwrite(", "sock.recv(9) and os.pwrite("), filling):
        monkeypatch.setattr(inject, "_FILL", code)
        file = os.memfd_create("argus-test", os.MFD_ALLOW_SEALING)
        with inject._Filler(b"the helper") as filler:
            if code != filling:
                with pytest.raises(TimeoutError):
                    filler.fill(pidfd, file)
            else:
                filler.fill(pidfd, file)
                assert os.pread(file, 99, 0) == b"the helper"
                with pytest.raises(PermissionError):
                    os.pwrite(file, b"x", 0)
        assert filler._process.returncode is not None
        os.close(file)
    other = os.open("/dev/null", os.O_RDWR)
    with inject._Filler(b"the helper") as filler, pytest.raises(OSError, match="Invalid argument"):
        filler.fill(pidfd, other)
    os.close(other)
    os.close(pidfd)


@pytest.mark.parametrize("folder", ["/var/tmp", "/dev/shm"])
def test_a_file_with_a_name_is_not_written_even_where_the_process_may(folder: str) -> None:
    """Neither on a disk, nor on a tmpfs, whose files may have seals, too."""
    pidfd = os.pidfd_open(os.getpid())
    with tempfile.TemporaryFile(dir=folder) as file, inject._Filler(b"the helper") as filler:
        with pytest.raises(OSError, match="Invalid argument"):
            filler.fill(pidfd, file.fileno())
        assert os.fstat(file.fileno()).st_size == 0
    os.close(pidfd)


def test_a_stack_pointer_that_is_no_address_is_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inject, "REST_TIMEOUT_S", 0.3)
    process = start("stack")
    time.sleep(0.1)  # it may be some instructions away from it
    with pytest.raises(ArgusError, match="never found where loading a library is safe"):
        inject.inject(process.pid)
    assert process.poll() is None


ARMED = """
import ctypes, mmap, os, sys
file = os.memfd_create("argus-cupti")
os.ftruncate(file, 65536)
memory = mmap.mmap(file, 65536)
print("ready", flush=True)
sys.stdin.read()
"""
HOSTILE = "\x1b]0;owned\x07\x9b2J\x7f\r\n9999  ON  forged"


@pytest.mark.parametrize("output_format", ["env", "json"])
def test_arm_status_prints_names_of_others_as_text(output_format: str) -> None:
    with subprocess.Popen(
        [HOSTILE, "-c", ARMED, "x" * 100_000], executable="/usr/bin/python3", user=NOBODY, group=NOBODY,
        extra_groups=[], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        status = ["arm", "--status", "--pid", str(process.pid), "--format", output_format]
        done = subprocess.run([sys.executable, "-m", "argus.cli.main", *status], capture_output=True, check=True)
    (line,) = done.stdout.decode().removesuffix("\n").split("\n")
    assert line.isprintable()
    assert "owned" in line
    assert len(line) < 10_000


NAMED_LIKE_IT = """
import mmap, os, sys
with open("/memfd:argus-cupti", "w+b") as file:
    file.truncate(65536)
    memory = mmap.mmap(file.fileno(), 65536)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_file_named_like_the_helper_s_memory_is_not_read() -> None:
    """With a root of its own a process maps any file under that name: one whose pages never come, too."""
    folder = tempfile.mkdtemp(prefix="argus-security-", dir="/var/tmp")
    try:
        own = f"mount -t tmpfs x {folder}; cd {folder}; for d in usr lib lib64 bin etc; do [ ! -e /$d ] || "
        own += "{ mkdir $d; mount --bind /$d $d; }; done; mkdir old; pivot_root . old; "
        command = ["unshare", "--mount", "sh", "-ec", own + 'exec /usr/bin/python3 -c "$1"', "sh", NAMED_LIKE_IT]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            assert b" /memfd:argus-cupti\n" in Path(f"/proc/{process.pid}/maps").read_bytes()
            assert arm.helper_address(process.pid) is None
    finally:
        os.rmdir(folder)
