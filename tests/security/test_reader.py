"""What parses what traced processes have written runs in a process of its own: it has few rights, and whatever becomes
of it, the trace goes on."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter as Tally
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from argus.capture import probes as bpf
from argus.capture.probes import Probes
from argus.capture.process import targets
from argus.capture.process.environment import process_facts, read_facts
from argus.capture.process.names import KernelNames
from argus.capture.python.interpreter import find_interpreter
from argus.capture.reader import process, progress, reader, wire
from argus.capture.reader.reader import Reader, Unreadable
from argus.capture.reader.remote import RemotePython, RemoteSymbols
from argus.cli import main as cli_main
from argus.live.bulkhead import Watchdog
from argus.live.options import Options
from argus.live.preflight import own_library
from argus.live.sides.draining import CallRings
from argus.live.tracer import Tracer
from argus.model import records
from argus.model.errors import ArgusError
from argus.model.records import Counter
from argus.store.open import open_store
from argus.store.reader import query
from tests.kernel.conftest import wait_until
from tests.security.test_neighbours import CALLER, call
from tests.stores import new_store

HERE = Path(__file__).parent
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="reads other processes")
WORK = "#include <unistd.h>\nvoid work(void) { for (volatile int i = 0; i < 1000000; i++) ; usleep(1000); }"
MAPPER = "import mmap, sys, time\nfile = open(sys.argv[1], 'rb')\n"
MAPPER += "mapped = mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC)\nprint(flush=True)\n"
MAPPER += "time.sleep(1000)"
SLEEPER = "import time\ndef nap():\n    time.sleep(1000)\nprint(flush=True)\nnap()"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    one = Reader()
    monkeypatch.setattr(reader, "shared", one)
    one.begin()
    yield one
    one.close()


@contextlib.contextmanager
def running(*command: str, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **more)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with running(sys.executable, "-c", SLEEPER) as process:
        yield process


def functions(symbols: RemoteSymbols, pid: int) -> list[str]:
    found = symbols.blocked(pid)
    assert found is not None
    return [frame.function for frame in found.stack.frames]


def native(*addresses: int) -> Any:
    return np.empty(0, records.FRAME), np.array(addresses, np.uint64), 0


# ---- what it may do


@AS_ROOT
def test_a_reader_has_few_rights_and_a_user_of_its_own(made: Reader) -> None:
    made.ask("hello", 0)
    status = Path(f"/proc/{made.pid}/status").read_text()
    output = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert int(output["CapEff"], 16) & ~(1 << 2 | 1 << 19 | 1 << 40) == 0
    assert int(output["CapBnd"], 16) & ~(1 << 2 | 1 << 19 | 1 << 40) == 0
    assert int(output["Uid"].split()[0]) >= process.USER
    assert output["Groups"].strip() == ""
    assert output["NoNewPrivs"].strip() == "1"
    assert output["Seccomp"].strip() == "2"
    assert "PATH" not in Path(f"/proc/{made.pid}/environ").read_text()
    limits = Path(f"/proc/{made.pid}/limits").read_text()
    assert "Max address space         unlimited" not in limits
    assert "Max file size             0" in limits
    assert "Max core file size        0" in limits


def test_without_its_rights_there_is_no_reader_and_it_is_reported(
    made: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where Argus has its capabilities by file: what it starts has none."""
    monkeypatch.setattr(reader.privileges, "BITS", {"SYS_PTRACE": 20})
    monkeypatch.setattr(reader.privileges, "effective", lambda: {"SYS_PTRACE"})
    made.settle()
    assert not made.on
    assert made.trouble.startswith("off: programs that Argus starts have not its capabilities")


_FORBIDDEN = """
import ctypes, os, signal, socket, struct, sys
sys.path[:] = {path!r}
from argus.capture.process import mapped
from argus.capture.reader import process, wire
process.give_up_rights(process.USER)
assert process.confine()
def refused(what):
    try:
        what()
    except PermissionError:
        return True
    return False
libc = ctypes.CDLL(None, use_errno=True)
def openat2(name, flags, mode=0):
    how = struct.pack("=QQQ", flags, mode, 0)
    if libc.syscall(437, -100, os.fsencode(name), how, len(how)) < 0:
        raise OSError(ctypes.get_errno(), name)
open("/proc/self/status").read()
assert mapped.FileTree({pid}).file({name!r}).read(4, 0) == b"data"
print(
    refused(lambda: os.open({name!r}, os.O_WRONLY)),
    refused(lambda: os.open({name!r}, os.O_RDONLY | os.O_TRUNC)),
    refused(lambda: os.open({name!r} + ".new", os.O_CREAT)),
    refused(lambda: socket.socket()),
    refused(lambda: os.fork()),
    refused(lambda: os.execv("/bin/true", ["true"])),
    refused(lambda: os.kill({pid}, signal.SIGTERM)),
    refused(lambda: os.unlink({name!r})),
    refused(lambda: openat2({name!r}, os.O_WRONLY)),
    refused(lambda: openat2({name!r}, os.O_RDONLY | os.O_TRUNC)),
    refused(lambda: openat2({name!r} + ".new", os.O_WRONLY | os.O_CREAT, 0o600)),
)
os._exit(0)
"""


@AS_ROOT
def test_a_reader_writes_starts_and_sends_nothing(tmp_path: Path) -> None:
    name = tmp_path / "a"
    name.write_text("data")
    name.chmod(0o666)
    tmp_path.chmod(0o777)
    program = _FORBIDDEN.format(path=sys.path, name=str(name), pid=os.getpid())
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True"] * 11, done.stderr


# ---- what becomes of the trace when something becomes of it


@AS_ROOT
def test_a_reader_answers_what_the_modules_answer(made: Reader, sleeper: subprocess.Popen[bytes]) -> None:
    symbols = RemoteSymbols(sleeper.pid)
    found = symbols.find_python()
    assert found is not None
    assert found.state == "on"
    assert "nap" in functions(symbols, sleeper.pid)
    assert targets.read_command(sleeper.pid)[1:] == ["-c", SLEEPER]
    assert targets.read_environment(sleeper.pid)["PATH"] == os.environ["PATH"]
    assert RemotePython(symbols).thread_states().keys() == {sleeper.pid}
    assert read_facts(sleeper.pid) == process_facts(sleeper.pid)
    assert not made.counters


@AS_ROOT
def test_libraries_come_with_the_file_that_was_parsed(made: Reader, fakegpu: Path) -> None:
    with running(sys.executable, "-c", MAPPER, str(fakegpu / "libcuda.so.1")) as target:
        (found,) = targets.find_libraries(target.pid)
        own = targets.find_libraries(target.pid, targets.Allowance(64, 1))[0]  # in this process
        assert found.roles == own.roles == ("libcuda",)
        assert found.offsets == own.offsets
        assert found.key == own.key
        assert os.path.samestat(os.stat(found.open_path), os.stat(own.open_path))


@AS_ROOT
def test_a_reader_that_is_killed_is_begun_again(made: Reader, sleeper: subprocess.Popen[bytes]) -> None:
    symbols = RemoteSymbols(sleeper.pid)
    symbols.find_python()
    before = made.pid
    os.kill(before, signal.SIGKILL)
    assert "nap" in functions(symbols, sleeper.pid), "the new one knows the process and its interpreter"
    assert made.pid not in (0, before)
    assert made.counters == {"reader_restarts": 1}


@AS_ROOT
def test_several_traces_share_it_and_the_last_one_ends_it(made: Reader, sleeper: subprocess.Popen[bytes]) -> None:
    for _ in range(2):
        made.enter()

    def ask(_: int) -> bytes:
        return made.ask("file", sleeper.pid, name="cmdline").data

    with ThreadPoolExecutor(4) as pool:
        assert {b"python" in found for found in pool.map(ask, range(200))} == {True}
    assert made.counters == {}
    made.leave()
    assert made.on
    made.leave()
    assert not made.on


@AS_ROOT
def test_a_nursery_that_is_killed_is_begun_again(made: Reader, sleeper: subprocess.Popen[bytes]) -> None:
    symbols = RemoteSymbols(sleeper.pid)
    symbols.find_python()
    assert made._nursery is not None
    made._nursery.send_signal(signal.SIGKILL)
    made._nursery.wait()
    assert "nap" in functions(symbols, sleeper.pid)
    assert made.counters["reader_restarts"] >= 1


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """Maps a library of half a million symbols."""
    monkeypatch.setenv("ARGUS_CACHE_DIR", "off")
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        pytest.skip("no PyTorch here")
    library = str(Path(torch.origin).parent / "lib" / "libtorch_cpu.so")
    with running(sys.executable, "-c", MAPPER, library) as process:
        yield process


@AS_ROOT
@pytest.mark.parametrize("limits", [{"cpu_s": 0.02}, {"memory_bytes": 32 << 20}])
def test_a_reader_beyond_its_limits_costs_that_process_alone(
    limits: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    large: subprocess.Popen[bytes],
    sleeper: subprocess.Popen[bytes],
) -> None:
    one = Reader(**limits)
    monkeypatch.setattr(reader, "shared", one)
    one.begin()
    try:
        for _ in range(5):
            with pytest.raises(Unreadable):
                targets.find_libraries(large.pid)
        assert one.counters["processes_unreadable"] == 1
        assert one.counters["reader_restarts"] <= 1, "it is not asked again"
        assert targets.read_command(large.pid) == [], "nothing of it is"
        assert targets.read_command(sleeper.pid)[1] == "-c"
    finally:
        one.close()


# ---- answers that no reader gives


class Liar(Reader):
    """One whose reader answers the first question with these bytes."""

    def __init__(self, lies: bytes) -> None:
        super().__init__()
        self._sock, self._theirs = socket.socketpair()
        self._nursery = subprocess.Popen(["sleep", "1000"])
        self._control, self._rest = socket.socketpair()
        self._pid = self._nursery.pid
        self._lies = lies
        self._page = reader.mmap.mmap(-1, 4096)
        self._thread = threading.Thread(target=self._lie, daemon=True)
        self._thread.start()

    def _lie(self) -> None:
        self._theirs.recv(1 << 16)
        self._theirs.sendall(self._lies)

    def close(self) -> None:
        super().close()
        self._theirs.close()
        self._rest.close()


def message(what: bytes, data: bytes = b"", magic: bytes = wire.MAGIC, fds: int = 0, more: int = 0) -> bytes:
    return wire.HEADER.pack(magic, len(what), len(data) + more, fds) + what + data


@pytest.mark.parametrize(
    "lies",
    [
        message(b'{"found": null}', magic=b"Arg0"),  # what is in these two makes sense: their headers do not
        message(b'{"found": null}', fds=3),
        message(b"{}", more=1 << 30),
        message(b"[1]"),
        message(b"{" * 100_000),
        message(b"[" * 100_000),
        message(b'{"found": {"version": [3, 11, 2], "state": "on", "path": "/p", "settled": true}}', b"short"),
        message(b'{"found": {"version": [3, "x", 2], "state": "on", "path": "/p", "settled": true}}'),
        message(b'{"found": {"version": [3, 11, 1e99], "state": "on", "path": "/p", "settled": true}}'),
        message(b'{"found": {"version": [3, 11]}}'),
        message(b'{"found": 7}'),
        message(b"{}"),
        message(b'{"error": 5}'),
        message(b'{"error": null}'),
        message(b'{"error": [1]}'),
        message(b'{"error": ["x", "y"]}'),
        message(b'{"error": [1e999, "x"]}'),
        message(b'{"error": [-1, "x"]}'),
        message(b'{"error": [2, {}]}'),
    ],
)
def test_an_answer_without_sense_is_refused_and_its_reader_ended(lies: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    liar = Liar(lies)
    monkeypatch.setattr(reader, "shared", liar)
    try:
        with pytest.raises(Unreadable):
            find_interpreter(4242)
        assert liar._sock is None, "it is not asked again"
        assert liar._strikes == {4242: 1}
    finally:
        liar.close()


@pytest.mark.parametrize("size", [1, wire.HEADER.size - 1, wire.HEADER.size, wire.HEADER.size + 2])
def test_an_answer_that_never_ends_is_not_waited_for(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte of its header held the loop for ever."""
    monkeypatch.setattr(reader, "HUNG_S", 0.3)
    liar = Liar(message(b'{"found": null}')[:size])
    monkeypatch.setattr(reader, "shared", liar)
    try:
        begun = time.monotonic()
        with pytest.raises(Unreadable):
            find_interpreter(4242)
        assert time.monotonic() - begun < 10
        assert liar._sock is None, "it is not asked again"
    finally:
        liar.close()


def without_sense(made: Reader, pid: int) -> None:
    """A question about a process whose answer makes no sense: somebody's file may bring that about."""

    def parse(_: reader.Answer) -> None:
        raise reader.Malformed("nonsense")

    with pytest.raises(Unreadable):
        reader.checked(made.ask("maps", pid, executable=True), parse)


@AS_ROOT
def test_a_process_with_answers_without_sense_is_soon_not_read_any_more(
    made: Reader, sleeper: subprocess.Popen[bytes]
) -> None:
    """Each ended a reader, for all: 60 a second, for as long as the process lived."""
    losses: list[tuple[str, int]] = []
    made.on_loss = lambda counter, pid, number, device: losses.append((counter, pid))
    for _ in range(10):
        without_sense(made, sleeper.pid)
    assert losses == [("processes_unreadable", sleeper.pid)]
    assert not made.reads(sleeper.pid)
    assert made.counters == {"processes_unreadable": 1, "reader_restarts": reader.STRIKES - 1}
    made.ask("hello", 0).close()
    assert made.reads(0)


@AS_ROOT
@pytest.mark.parametrize("meanwhile", [False, True])
def test_an_answer_without_sense_costs_others_no_stack(
    meanwhile: bool, made: Reader, sleeper: subprocess.Popen[bytes]
) -> None:
    """The new reader did not know the process, and nobody introduced it."""
    symbols = RemoteSymbols(sleeper.pid)
    assert symbols.find_python() is not None
    with running(sys.executable, "-c", SLEEPER) as other:
        without_sense(made, other.pid)
    if meanwhile:  # it was seen to be the reader that knows the process, and ended before it was asked
        symbols._generation = made.generation
    assert "nap" in functions(symbols, sleeper.pid)
    assert made.counters == {"reader_restarts": 1}


def test_libraries_without_descriptors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    liar = Liar(message(b'{"libraries": [{"path": "/etc/passwd"}], "unread": 0, "entries": []}'))
    monkeypatch.setattr(reader, "shared", liar)
    try:
        with pytest.raises(Unreadable):
            targets.find_libraries(4242)
    finally:
        liar.close()


# ---- files and memory that do not answer


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hung")
    subprocess.run(
        ["cc", "-o", str(folder / "hung_target"), str(HERE / "hung_target.c"), "-ldl", "-pthread"], check=True
    )
    (folder / "work.c").write_text(WORK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(folder / "libwork.so"), str(folder / "work.c")], check=True)
    return folder


@contextlib.contextmanager
def dead_file_system(programs: Path, where: Path, what: str = "library") -> Iterator[subprocess.Popen[bytes]]:
    """A target whose library lies on a file system that does not answer any more."""
    where.mkdir()
    with running(sys.executable, str(HERE / "fuse_folder.py"), str(where), str(programs / "libwork.so")) as daemon:
        try:
            if daemon.poll() is not None:
                pytest.skip("no file systems in user space here (/dev/fuse)")
            with running(str(programs / "hung_target"), what, str(where / "libwork.so")) as target:
                daemon.send_signal(signal.SIGSTOP)
                try:
                    yield target
                finally:
                    daemon.kill()  # the kernel gives up what waits for it, the target's own end among it
        finally:
            daemon.kill()
            daemon.wait()
            subprocess.run(["umount", "-l", str(where)], check=False)


@AS_ROOT
def test_a_dead_file_system_costs_its_files_alone(made: Reader, programs: Path, tmp_path: Path) -> None:
    with dead_file_system(programs, tmp_path / "fs") as target:
        begun = time.monotonic()
        symbols = RemoteSymbols(target.pid)
        maps = Path(f"/proc/{target.pid}/maps").read_text().splitlines()
        own = next(int(line.split("-")[0], 16) for line in maps if "r-xp" in line and "libwork" in line)
        libc = next(int(line.split("-")[0], 16) for line in maps if "r-xp" in line and "libc.so" in line)
        stack = symbols.assemble(*native(own + 0x10))
        assert stack.frames[-1].file.endswith("libwork.so"), "its file is known, its function is not"
        assert made.counters["file_systems_hung"] == 1
        waited = time.monotonic() - begun
        found = symbols.assemble(*native(libc + 0x1000))
        assert found.frames[-1].file.endswith("libc.so.6"), "the others are read"
        for _ in range(20):
            symbols.assemble(*native(own + 0x20))
        assert made.counters == {"file_systems_hung": 1, "reader_restarts": 1}, "it is not waited for again"
        assert made.reads(target.pid)
        assert waited < 60


def test_a_process_brings_few_dead_file_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose mounts are his own may have any number, and each costs some seconds."""
    one, asked = Reader(), []

    def hang(request: dict[str, Any], data: bytes, *_: object) -> reader.Answer:
        asked.append(request["pid"])
        raise TimeoutError

    monkeypatch.setattr(one, "_nursery", True)
    monkeypatch.setattr(one, "_exchange", hang)
    monkeypatch.setattr(one, "_renew", lambda: None)
    monkeypatch.setattr(one, "_end", lambda *_: None)
    monkeypatch.setattr(one, "_doing", lambda: f"0:{len(asked)}")
    for pid in (7, 7, 7, 7, 7, 8):
        with pytest.raises(Unreadable):
            one.ask("open", pid)
    assert asked == [7, 7, 7, 8]
    assert (one.reads(7), one.reads(8)) == (False, True)
    assert one.counters == {"file_systems_hung": 4, "processes_unreadable": 1}
    one.forget(7)
    assert one.reads(7)


def test_of_hangs_the_newest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """File systems come and go without end, and so do containers and processes."""
    monkeypatch.setattr(reader, "_MOST_KEPT", 16)
    one = Reader()
    monkeypatch.setattr(one, "_end", lambda owner: None)
    for number in range(100):
        owner = (1000, f"container {number}")
        monkeypatch.setattr(one, "_doing", lambda number=number: f"0:{number}")
        one._blame(7 + number, owner, TimeoutError())
        assert one._waits_s, "the newest is among them"
        monkeypatch.setattr(one, "_doing", lambda: progress.MEMORY.decode())
        one._blame(7 + number, owner, TimeoutError())
        one.forget(7 + number)
    kept = {name: len(value) for name, value in vars(one).items() if isinstance(value, dict | set | list)}
    assert max(kept.values()) == 16, kept
    assert "0:99 of user 1000 in container 99" in one._dead


def test_a_user_whose_processes_hang_is_waited_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand processes whose memory does not answer, 4 s each, would hold up the trace for an hour."""
    one, patience = Reader(), []

    class Hanging:
        def __init__(self, sock: object, pid: int, hung_s: float) -> None:
            patience.append(hung_s)

        def send(self, message: bytes, places: object) -> None:
            raise TimeoutError

    monkeypatch.setattr(one, "_nursery", True)
    monkeypatch.setattr(one, "_sock", True)
    monkeypatch.setattr(one, "_number", lambda: 0)
    monkeypatch.setattr(one, "_renew", lambda: None)
    monkeypatch.setattr(one, "_end", lambda *_: None)
    monkeypatch.setattr(one, "_doing", progress.MEMORY.decode)
    monkeypatch.setattr(reader, "_Waiting", Hanging)
    monkeypatch.setattr(reader, "_owner", lambda pid: (1000, "") if pid < 100 else (1000, "pod"))
    for pid in [*range(10, 20), 100]:
        with pytest.raises(Unreadable):
            one.ask("interpreter", pid)
    assert patience == [4.0] * 8 + [0.5] * 2 + [4.0]


def test_whose_a_process_is_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be another's by then."""
    one, clock, owners = Reader(), [10.0], [(7, "pod 1"), (8, ""), (9, "")]
    monkeypatch.setattr(reader, "_owner", lambda pid: owners.pop(0))
    monkeypatch.setattr(reader, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    assert one._owner_of(5) == one._owner_of(5) == (7, "pod 1")
    clock[0] += reader.OWNER_FOR_S
    assert one._owner_of(5) == (8, "")
    one.forget(5)
    assert one._owner_of(5) == (9, "")


def test_of_few_processes_it_is_remembered_whose_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Reader()
    monkeypatch.setattr(reader, "_MOST_BUDGETS", 10)
    monkeypatch.setattr(reader, "_owner", lambda pid: (7, ""))
    for pid in range(100):
        one._owner_of(pid)
        assert len(one._owners) <= 10


def test_a_user_in_many_containers_is_waited_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Reader()
    assert one._is_patient((1000, "pod 1"))
    monkeypatch.setattr(one, "_hangs_of", Tally({(1000, f"pod {number}"): 7 for number in range(9)} | {1000: 63}))
    assert one._is_patient((1000, "pod 1"))
    one._hangs_of[1000] += 1
    assert not one._is_patient((1000, "a new pod"))
    assert one._is_patient((1001, "pod 1"))


def test_readers_that_hang_for_one_leave_some_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four users' processes on a file system that takes requests and answers none: nothing ends a reader that waits."""
    one, losses = Reader(), Tally[tuple[str, int]]()
    owners = {pid: (pid // 100, f"pod {pid // 10}") for pid in range(2000)}
    hung: list[int] = []

    def renew() -> None:
        one._pid = os.getpid()  # "ended", it is still there

    def hang(request: dict[str, Any], data: bytes, *_: object) -> reader.Answer:
        if request["pid"] >= 1000:
            return reader.Answer({}, b"", [])
        hung.append(request["pid"])
        raise TimeoutError

    with socket.socketpair()[0] as control:
        for name, value in (("_nursery", True), ("_control", control), ("_renew", renew), ("_exchange", hang)):
            monkeypatch.setattr(one, name, value)
        monkeypatch.setattr(one, "_doing", lambda: "0:77")
        monkeypatch.setattr(one, "on_loss", lambda counter, pid, number, device: losses.update({(counter, pid): 1}))
        monkeypatch.setattr(reader, "_owner", owners.__getitem__)
        for pid in range(1, 400):
            with pytest.raises(Unreadable):
                one.ask("open", pid)
            one.ask("open", 1000 + pid).close()
    assert len(hung) < reader.MOST_HUNG
    assert max(Tally(owners[pid] for pid in hung).values()) == reader.MOST_HUNG_OF_OWNER
    assert max(Tally(owners[pid][0] for pid in hung).values()) == reader.MOST_HUNG // 2
    assert all(losses[("reads_over_budget", pid)] for pid in range(1, 400) if pid not in hung), (
        "each refusal is counted"
    )


@pytest.mark.parametrize(
    ("steps_s", "hangs"), [([0.0, 0.1, 1500.0, 0.1], False), ([0.0] + [0.1] * 50, True), ([0.0] + [5.0] * 9, True)]
)
def test_time_for_which_argus_itself_was_stopped_is_not_the_reader_s(
    steps_s: list[float], hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that is frozen and goes on: each reader that was asked at that moment was given up."""
    ours, its_end = socket.socketpair()
    left, clock = iter(steps_s), [1000.0]

    def now() -> float:
        step = next(left, None)
        if step is None:
            its_end.send(b"answer")
        clock[0] += step or 0.0
        return clock[0]

    monkeypatch.setattr(reader, "_state", lambda pid: ("S", ("7", "7")))
    monkeypatch.setattr(reader, "LOOK_S", 0.001)
    with ours, its_end:
        waiting = reader._Waiting(ours, 1, 4.0)
        monkeypatch.setattr(reader, "time", SimpleNamespace(monotonic=now))
        waiting._since = waiting._begun = clock[0]
        waiting._seen = ("7", "7")
        if hangs:
            with pytest.raises(TimeoutError):
                waiting.take(6)
        else:
            assert waiting.take(6) == b"answer"


@AS_ROOT
def test_memory_that_never_comes_costs_that_memory_alone(made: Reader, programs: Path, tmp_path: Path) -> None:
    with dead_file_system(programs, tmp_path / "fs", "memory") as target:
        maps = Path(f"/proc/{target.pid}/maps").read_text().splitlines()
        page = next(int(line.split("-")[0], 16) for line in maps if line.endswith("libwork.so"))
        memory = KernelNames()._memory(target.pid)
        assert memory is not None
        for _ in range(3):
            assert memory.string(page) is None
        assert made.counters == {"memory_hung": 1}, "it is not waited for again"
        inspected = targets.inspect(target.pid)
        assert inspected.exe.endswith("hung_target")
        inspected.close()
        symbols = RemoteSymbols(target.pid)
        with pytest.raises(Unreadable):
            symbols.find_python()
        found = symbols.blocked(target.pid)
        assert found is not None
        assert found.reason == "sleep"
        assert found.stack.frames[-1].file.endswith("libc.so.6"), "its files are read"
        assert made.reads(target.pid)


# ---- the rings


@AS_ROOT
@pytest.mark.kernel
def test_records_are_read_while_the_loop_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times what the ring holds, and not one is lost."""
    monkeypatch.setattr(bpf, "RECORDS_S", 10**7)
    monkeypatch.setattr(bpf, "BURST", 1.0)
    library, _ = own_library("getppid")
    with contextlib.ExitStack() as stack:
        caller = stack.enter_context(running("/usr/bin/python3", "-c", CALLER))
        probes = Probes(launch_ring_bytes=1 << 16)
        stack.callback(probes.close)
        probes.add_target(caller.pid)
        probes.attach(library, None)
        rings = CallRings(probes.rings())
        stack.callback(rings.close)
        dog = Watchdog(str, print, rings.relieve)
        dog.start()
        stack.callback(dog.close)
        made = 0
        for _ in range(12):
            call(caller, 701)
            made += 701
            wait_until(lambda: rings.relieved == made, what="the ring to be read")  # noqa: B023
        parts, _ = rings.take()
        assert sum(map(len, parts["launches"])) == made == 8412
        assert probes.counters()[Counter.LAUNCHES_DROPPED] == 0


# ---- a whole trace


@AS_ROOT
@pytest.mark.kernel
def test_a_job_on_a_dead_file_system_is_described(programs: Path, tmp_path: Path) -> None:
    """Its threads' waits come out, and the loop goes on."""
    url = new_store(tmp_path)
    with dead_file_system(programs, tmp_path / "fs") as target:
        assert target.stdin is not None
        target.stdin.write(b"read\n")
        target.stdin.flush()
        tracer = Tracer(open_store(url), Options(pids=(target.pid,), stacks=True, run=1))
        tracer.start()
        try:
            wait_until(lambda: _turn(tracer) and tracer.samples > 20, timeout_s=60, what="samples")
            until = time.monotonic() + 4
            while time.monotonic() < until:
                _turn(tracer)
            counted = {name: value for name, (value, _) in tracer.counters().items()}
        finally:
            tracer.stop()
        with open_store(url) as store:
            waits = query(store, "SELECT DISTINCT reason FROM stack_samples WHERE reason != ''")
            functions = query(store, "SELECT DISTINCT arrayJoin(functions) FROM stacks")
    assert counted["file_systems_hung"] == 1
    assert not counted.get("processes_unreadable")
    assert not counted.get("processes_quarantined")
    assert not counted.get("turns_failed")
    assert {"other:openat", "disk"} & set(waits.column(0).to_pylist()), waits
    assert any("libwork.so+" in name for name in functions.column(0).to_pylist()), functions


@AS_ROOT
@pytest.mark.kernel
def test_a_dump_of_a_job_on_a_dead_file_system_ends(programs: Path, tmp_path: Path) -> None:
    with dead_file_system(programs, tmp_path / "fs") as target:
        done = subprocess.run(
            [sys.executable, "-m", "argus.cli.main", "dump", str(target.pid)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith(f"  thread {target.pid} 'hung_target': ") for line in lines), lines
    assert "1 file system under traced processes did not answer: code of its files has no names" in lines


@pytest.mark.parametrize("verb", ["trace", "dump"])
def test_processes_to_choose_from_are_read_by_the_reader(
    made: Reader, verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def pick(verb: str) -> tuple[int, ...]:
        asked.append(made.on)
        raise ArgusError("nobody was chosen")

    monkeypatch.setattr("argus.cli.pick.pick_pids", pick)
    assert cli_main.main([verb]) != 0
    assert "nobody was chosen" in capsys.readouterr().err
    assert asked == [True]


@AS_ROOT
def test_who_is_armed_is_read_by_the_reader(
    made: Reader, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a process whose mappings never come is left out, in a line."""
    asked, exchange = [], made._exchange

    def hang(request: dict[str, Any], data: bytes, *_: object) -> reader.Answer:
        if request["pid"] != sleeper.pid:
            return exchange(request, data)
        asked.append(request["op"])
        raise TimeoutError

    monkeypatch.setattr(made, "_exchange", hang)
    monkeypatch.setattr(made, "_doing", lambda: "memory")
    made.close()
    assert cli_main.main(["arm", "--status", "--pid", str(sleeper.pid)]) == 0
    assert asked == ["maps"]
    output = capsys.readouterr()
    assert output.out == f"process {sleeper.pid} is not armed, as far as could be read\n"
    assert "did not answer" in output.err
    assert not made.on, "it ends with the verb"


def _turn(tracer: Tracer) -> bool:
    tracer.poll()
    time.sleep(tracer.pace_s)
    return True
