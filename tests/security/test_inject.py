"""A hostile process that root injects: nothing of it is run with root's rights, and nothing of root's is written."""

from __future__ import annotations

import contextlib
import glob
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

from argus.cupti import arm, inject, inject_apart, inject_child, interrupt, load
from argus.cupti.inject_apart import Children
from argus.model.errors import ArgusError
from argus.system import privileges
from argus.system.aside import Aside
from argus.system.proc import field_of
from tests.kernel.conftest import wait_until
from tests.security.test_file_systems import file_system

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
        files = [f'-D{name.upper()}="{folder / name}"' for name in ("runs", "events", "looked")]
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
    assert begun == [(sys.executable, [sys.executable, "-I", "-S", "-c", load._FILL, ANY], "/", {})]


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
    real = interrupt.stop

    def stop(tid: int, memory: int) -> contextlib.AbstractContextManager[interrupt.Stopped]:
        process.send_signal(signal.SIGUSR2)
        wait_until(lambda: (place / "runs").read_text().count("\n") == 2, what="the process to call exec")
        assert process.stdout is not None
        process.stdout.readline()
        return real(tid, memory)

    monkeypatch.setattr(interrupt, "stop", stop)
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
    monkeypatch.setattr(load, "FILL_S", 0.3)
    filling = load._FILL
    pidfd = os.pidfd_open(os.getpid())
    for code in (filling.replace("os.pwrite(", "sock.recv(9) and os.pwrite("), filling):
        monkeypatch.setattr(load, "_FILL", code)
        file = os.memfd_create("argus-test", os.MFD_ALLOW_SEALING)
        with load._Filler(b"the helper") as filler:
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
    with load._Filler(b"the helper") as filler, pytest.raises(OSError, match="Invalid argument"):
        filler.fill(pidfd, other)
    os.close(other)
    os.close(pidfd)


@pytest.mark.parametrize("folder", ["/var/tmp", "/dev/shm"])
def test_a_file_with_a_name_is_not_written_even_where_the_process_may(folder: str) -> None:
    """Neither on a disk, nor on a tmpfs, whose files may have seals, too."""
    pidfd = os.pidfd_open(os.getpid())
    with tempfile.TemporaryFile(dir=folder) as file, load._Filler(b"the helper") as filler:
        with pytest.raises(OSError, match="Invalid argument"):
            filler.fill(pidfd, file.fileno())
        assert os.fstat(file.fileno()).st_size == 0
    os.close(pidfd)


def test_a_stack_pointer_that_is_no_address_is_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "REST_TIMEOUT_S", 0.3)
    process = start("stack")
    time.sleep(0.1)  # it may be some instructions away from it
    with pytest.raises(ArgusError, match="never found where loading a library is safe"):
        inject.inject(process.pid)
    assert process.poll() is None


# ---- a process that keeps who injects it waiting


BY_A_TRACER = """
import sys
from argus.cupti import inject, inject_apart
inject_apart.SCRIPT, children = sys.argv[2], inject_apart.Children()
inject.inject(int(sys.argv[1]), lambda request: children.load(request, (65534, "")))
"""
TOO_LATE = """
import sys, time
sys.path.insert(0, {root!r})
from argus.cupti import inject_child, interrupt
stack_end = interrupt.stack_end
def find(pid, pointer):
    found = stack_end(pid, pointer)
    open({looked!r}, "w").close()
    time.sleep(0.5)
    return found
interrupt.stack_end = find
inject_child.main()
"""
"""A child that a process overtakes: it exchanges its stack right after that was found to be of no file."""


def inject_by(children: Children, pid: int) -> str:
    return inject.inject(pid, lambda request: children.load(request, (NOBODY, "")))


@pytest.fixture
def dead(place: Path) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """A file of a file system in user space, and who serves it: who takes requests for its pages, and answers none."""
    shown, delay = place / "stack", place / "delay"
    shown.write_bytes(bytes(1 << 20))
    delay.write_text("inf")
    with file_system(place / "mount", shown, delay) as daemon:
        yield place / "mount" / "stack", daemon


@pytest.fixture
def late(place: Path, root: Path, tmp_path: Path) -> str:
    """The script of such a child."""
    script = tmp_path / "late.py"
    script.write_text(TOO_LATE.format(root=str(root), looked=str(place / "looked")))
    return str(script)


def test_a_stack_that_is_exchanged_costs_a_child_and_its_own_process(
    start: Start, dead: tuple[Path, subprocess.Popen[bytes]], late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even SIGKILL does not end who waits for a page that a file system in user space was asked for."""
    children, (file, daemon) = Children(), dead
    hostile, honest = start("exchange", str(file)), start("waits")
    with monkeypatch.context() as patch:
        patch.setattr(inject_apart, "SCRIPT", late)
        patch.setattr(inject_apart, "HUNG_S", 1.0)
        with pytest.raises(ArgusError) as refused:
            inject_by(children, hostile.pid)
    why = f"process {hostile.pid} cannot be injected: it kept Argus waiting for 1 s (a process of user {NOBODY})"
    assert refused.value.message == why
    assert inject_by(children, honest.pid).startswith("injected by ptrace")
    ((child, owner),) = children._left
    assert owner == (NOBODY, "")
    assert child.poll() is None, "it cannot be ended"
    begun = time.monotonic()
    children.end()
    children.finish()
    assert time.monotonic() - begun < 1
    daemon.kill()
    child.wait(10)
    assert children.has_room((NOBODY, ""))
    assert children._left == []
    end(honest)


def test_a_tracer_ends_by_sigkill_whatever_its_child_waits_for(
    start: Start, dead: tuple[Path, subprocess.Popen[bytes]], late: str
) -> None:
    hostile = start("exchange", str(dead[0]))
    with subprocess.Popen([sys.executable, "-c", BY_A_TRACER, str(hostile.pid), late]) as tracer:
        tasks = Path(f"/proc/{tracer.pid}/task/{tracer.pid}/children")
        wait_until(lambda: any(map(_waits_for_a_page, tasks.read_text().split())), what="its child to hang")
        tracer.kill()
        assert tracer.wait(10) == -signal.SIGKILL


def _waits_for_a_page(pid: str) -> bool:
    waits = [Path(place).read_text() for place in glob.glob(f"/proc/{pid}/task/*/wchan")]
    return "request_wait_answer" in waits


def test_a_file_right_above_the_stack_is_not_read(
    start: Start, dead: tuple[Path, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inject_apart, "HUNG_S", 1.0)
    process = start("above", str(dead[0]))
    assert inject_by(Children(), process.pid).startswith("injected by ptrace")


def test_a_child_that_injects_has_few_rights_and_no_descriptor_of_the_tracer() -> None:
    with open("/dev/zero", "rb") as file:
        os.set_inheritable(file.fileno(), True)
        child = inject_apart._Child()
    child._receive(1, 30.0)
    try:
        place = f"/proc/{child.process.pid}"
        status = Path(f"{place}/status").read_bytes()
        rights = sum(1 << privileges.BITS[name] for name in inject_child.RIGHTS)
        assert [int(field_of(status, name), 16) & ~rights for name in (b"CapEff", b"CapPrm", b"CapBnd")] == [0, 0, 0]
        assert sorted(os.listdir(f"{place}/fd")) == ["0", "1", "2"]
        assert Path(f"{place}/environ").read_bytes() == b""
        assert os.readlink(f"{place}/cwd") == "/"
    finally:
        child.close()
    assert child.process.returncode == -signal.SIGKILL


def stub(tmp_path: Path, code: str) -> str:
    script = tmp_path / "child.py"
    script.write_text(f"import os, signal, socket, sys, time\nsock = socket.socket(fileno=0)\n{code}\n")
    return str(script)


REQUEST = load.Request(1, 2, ("/bin/x", "0"), 3, 4, 5, [interrupt.Code(6, 7, "x")] * 50_000, "/x.so")


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("sock.send(b'!'); signal.pause()", "it kept Argus waiting for 500 ms"),
        ("signal.pause()", "it kept Argus waiting for 500 ms"),
        ("sock.send(b'!')\nwhile True: time.sleep(0.05)", "it kept Argus waiting for 2 s"),
        ("sock.send(b'!'); sys.exit()", "the process of Argus that was to do it has ended"),
    ],
)
def test_a_child_that_does_not_answer_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, why: str
) -> None:
    for name, value in (("SCRIPT", stub(tmp_path, code)), ("HUNG_S", 0.5), ("BEGIN_S", 0.5), ("LIMIT_S", 2.0)):
        monkeypatch.setattr(inject_apart, name, value)
    children = Children()
    with pytest.raises(interrupt.Refused, match=why):
        children.load(REQUEST, (NOBODY, ""))
    assert children._left == []


def test_at_the_end_all_injections_have_one_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was one for each, of 30 s. Those that look for a moment to begin give up when they are asked to."""
    patient = "sock.send(b'!'); signal.pause()"
    for name, value in (("SCRIPT", stub(tmp_path, patient)), ("FINISH_S", 1.0), ("HUNG_S", 60.0), ("BEGIN_S", 60.0)):
        monkeypatch.setattr(inject_apart, name, value)
    children = Children()
    asked = [Aside(lambda n=n: children.load(REQUEST, (n, "")), "test") for n in range(4)]
    wait_until(lambda: len(children._running) == 4, what="all to have begun")
    begun = time.monotonic()
    children.end()
    children.finish()
    assert time.monotonic() - begun < 1.9
    for one in asked:
        with pytest.raises(interrupt.Refused, match="has ended"):
            one.result()


def test_a_child_gives_up_between_two_looks_when_the_trace_ends(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start("stack")
    children = Children()
    asked = Aside(lambda: inject_by(children, process.pid), "test")
    wait_until(lambda: bool(children._running), what="it to have begun")
    time.sleep(0.3)
    begun = time.monotonic()
    children.end()
    children.finish()
    assert time.monotonic() - begun < 5
    with pytest.raises(ArgusError, match="the trace ends"):
        asked.result()


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
