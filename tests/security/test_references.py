"""The tracer has files of traced processes as places only (O_PATH): it can neither read them nor be kept waiting when
it closes them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from argus.capture.probes import Probes, kernel_version
from argus.capture.process import instructions, mapped, targets
from argus.capture.process.instructions import Code, RemoteCode, code_of
from argus.capture.process.mapped import File
from argus.capture.process.nccl import GETTERS, rank_offset
from argus.capture.reader import reader, wire
from argus.capture.reader.reader import Reader, Unreadable
from argus.live.options import Options
from argus.live.tracer import Tracer
from argus.store.open import open_store
from tests.kernel import test_later_instructions as later
from tests.kernel.conftest import wait_until
from tests.security.mapping_process import AS_NOBODY, NOBODY, mapping
from tests.security.test_file_systems import NCCL, build
from tests.security.test_reader import AS_ROOT, HERE, Liar, _turn, made  # noqa: F401 - a fixture
from tests.stores import new_store

program = later.program
O_PATH = 0o10000000


def readable(pid: int) -> list[str]:
    """Descriptors of this process that read a file which another one maps."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    paths = {line.split(None, 5)[5] for line in lines if " /" in line}
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            place = os.readlink(f"/proc/self/fd/{fd}")
            about = dict(line.split(":\t", 1) for line in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()[:3])
            if place in paths and not int(about["flags"], 8) & O_PATH:
                found.append(place)
    return found


@AS_ROOT
@pytest.mark.kernel
def test_a_trace_has_no_file_of_a_process_open_for_reading(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor opens any for a moment: stacks of a Python are sampled, too."""
    opened: list[int] = []
    monkeypatch.setattr(File, "__init__", lambda self, fd: opened.append(fd))
    libraries = [build(NCCL, folder / "libnccl.so.2"), build("int cuLaunchKernel(void) {}", folder / "libcuda.so.1")]
    with mapping(libraries) as pid:
        tracer = Tracer(open_store(new_store(tmp_path)), Options(pids=(pid,)))
        tracer.start()
        try:
            wait_until(lambda: tracer.poll() is None and len(tracer.attached) == 2, 20, "probes")
            held = [os.readlink(one.library.open_path) for one in tracer.attached]
            assert sorted(held) == sorted(map(str, libraries))
            assert readable(pid) == []
            assert all(_turn(tracer) for _ in range(30))
        finally:
            tracer.stop()
    assert opened == []


@pytest.fixture
def silent(folder: Path, tmp_path: Path) -> Iterator[tuple[list[int], Path, subprocess.Popen[str]]]:
    """Two processes that map a file below an overlay, a file for what is not answered, and who answers."""
    device, mine = folder / "fuse", folder / "mounts"
    try:
        os.mknod(device, 0o600 | 0o020000, os.makedev(10, 229))
        os.chown(device, NOBODY, NOBODY)
    except OSError:
        pytest.skip("no devices can be made here")
    mine.mkdir()
    os.chown(mine, NOBODY, NOBODY)
    tmp_path.chmod(0o755)
    library, waits = build(NCCL, folder / "libnccl.so.2"), folder / "waits"
    script = [sys.executable, str(HERE / "fuse_below_overlay.py"), *map(str, (device, mine, library, waits)), "2"]
    command = [*AS_NOBODY, "unshare", "--user", "--map-root-user", "--mount", *script]
    server = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert server.stdout is not None
        assert server.stderr is not None
        pids = [int(line) for line in (server.stdout.readline(), server.stdout.readline()) if line]
        if len(pids) < 2:
            server.kill()
            pytest.skip(f"no user may mount such file systems here: {server.stderr.read()[-300:]}")
        yield pids, waits, server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.communicate()


TRACES = """
import os, sys
from pathlib import Path
from argus.capture.process import targets
from argus.capture.process.instructions import code_of
from argus.capture.reader import reader
Path(sys.argv[1]).write_text(f"{os.getpid()}:15 {os.getpid()}:25")  # to read, to close
with reader.shared.entered():
    for pid in map(int, sys.argv[2:]):
        (found,) = targets.find_libraries(pid)
        code = code_of(found)
        offset = found.offsets["ncclAllReduce"]
        assert len(code.at(offset)) > 4, code.at(offset)
        assert code.places(offset, throws=False)
        del found, code
print("closed", flush=True)
"""


@AS_ROOT
def test_a_file_system_that_does_not_answer_when_a_file_is_closed_holds_nobody_up(
    silent: tuple[list[int], Path, subprocess.Popen[str]],
) -> None:
    """The kernel waits for it without an end, and SIGKILL does not end that: a trace was there for ever."""
    pids, waits, _ = silent
    words = [sys.executable, "-c", TRACES, str(waits), *map(str, pids)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as tracer:
        try:
            output, errors = tracer.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(silent[2].pid, signal.SIGKILL)  # else nobody ends
            tracer.kill()
            pytest.fail("it waits for the file system")
    assert output == "closed\n", errors


@AS_ROOT
def test_nor_when_the_reader_closes_it(
    silent: tuple[list[int], Path, subprocess.Popen[str]],
    made: Reader,  # noqa: F811
    tmp_path: Path,
) -> None:
    """The reader hung when it read the next process, which was taken for the one to blame."""
    pids, waits, _ = silent
    honest = build(NCCL, tmp_path / "honest" / "libnccl.so.2")
    losses: list[tuple[str, int]] = []
    made.on_loss = lambda counter, pid, number, device: losses.append((counter, pid))
    made.ask("hello", 0).close()
    waits.write_text(f"{made.pid}:25")
    with mapping([honest], ()) as other:
        with contextlib.suppress(Unreadable):
            targets.find_libraries(pids[0])
        assert losses == [("file_systems_hung", pids[0])]
        assert [one.path for one in targets.find_libraries(other)] == [str(honest)]
        assert made.counters["file_systems_hung"] == 1


# ---- instructions are read by the reader


@AS_ROOT
def test_instructions_are_those_that_are_read_here(made: Reader, tmp_path: Path) -> None:  # noqa: F811
    """At any offset, in any order, asked for at once or one by one."""
    random.seed(20)
    source = "".join(
        f"int f{n}(int a, int b) {{ {' '.join(f'a = a * {n + i} + b;' for i in range(n % 7))} return a ? a : b; }}\n"
        for n in range(60)
    )
    library = build(NCCL + source, tmp_path / "libnccl.so.2", "-O1")
    with mapping([library], ()) as pid:
        (found,) = targets.find_libraries(pid)
        here, size = Code(mapped.open_file(library)), library.stat().st_size
        assert isinstance(code_of(found), RemoteCode)
        for _ in range(20):
            there = RemoteCode(found)
            offsets = [random.randrange(size + 64) for _ in range(40)] + [found.offsets["ncclAllReduce"], 1 << 40]
            asked = [(offset, random.random() < 0.3) for offset in offsets]
            if random.random() < 0.5:
                there.look_ahead(offsets)
                there.follow(asked)
            for offset, throws in asked:
                assert there.at(offset) == here.at(offset)
                assert there.places(offset, throws=throws) == instructions.places(here, offset, throws=throws)


def _with_a_frame(name: str) -> str:
    """A function whose stack pointer goes down and up by anything, in several steps."""
    sizes = [
        8 * random.randrange(random.choice([16, 1 << 10, 1 << 20, 1 << 28])) for _ in range(random.randrange(1, 6))
    ]
    lines = ["xor %eax, %eax", *(f"{random.choice(['sub', 'sub', 'add'])} ${size}, %rsp" for size in sizes)]
    lines = [line for each in lines for line in (each, random.choice(["nop", "push %rbx", "xor %ecx, %ecx"]))]
    code = "\\n ".join([*lines, "ret"])
    return f'__asm__(".globl {name}\\n.type {name},@function\\n{name}: {code}\\n.size {name},.-{name}\\n");\n'


@AS_ROOT
def test_instructions_of_functions_with_large_frames_are_those_that_are_read_here(
    made: Reader,  # noqa: F811
    tmp_path: Path,
) -> None:
    """A frame of 1 KiB was no sense: the reader was ended, and of all other functions the entries alone were known."""
    random.seed(21)
    names = [f"ncclSend{n}" for n in range(80)]
    source = "\n".join(map(_with_a_frame, names)) + NCCL
    library = build(source, tmp_path / "libnccl.so.2", "-O1")
    table = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True
    ).stdout
    addresses = {name: int(address, 16) for address, _, name in map(str.split, table.splitlines()) if name in names}
    with mapping([library], ()) as pid:
        (found,) = targets.find_libraries(pid)
        here = Code(mapped.open_file(library))
        functions = [(addresses[name], False) for name in names]  # gcc lays text where it is in the file
        there, before = RemoteCode(found), made.pid
        there.follow(functions)
        words = 0
        for offset, throws in functions:
            places = there.places(offset, throws=throws)
            assert places == instructions.places(here, offset, throws=throws)
            words = max(words, *(place.below for place in places))
        assert words > 1 << 20
        assert (made.pid, dict(made.counters)) == (before, {})


@AS_ROOT
def test_a_library_with_large_objects_is_read(made: Reader, tmp_path: Path) -> None:  # noqa: F811
    """As NCCL 2.30.7. The answer was refused, and with it all libraries of the process."""
    rank = 0x1206F0
    source = "".join(
        f'int {name}(char *comm, int *to) {{ int got; __asm__ volatile (".byte 0x8b, 0x87; .long {rank + 4 * number}"'
        ' : "=a"(got)); *to = got; return 0; }\n'
        for number, name in enumerate(GETTERS)
    )
    library = build(NCCL + source, tmp_path / "libnccl.so.2", "-O1")
    with mapping([library], ()) as pid:
        (found,) = targets.find_libraries(pid)
        assert rank_offset(found.file) == rank
    assert made.counters["reader_restarts"] == 0


@AS_ROOT
def test_a_reader_is_asked_a_few_times_for_a_file(
    made: Reader,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And not again, once it has not answered: each may take seconds, of a slow file system."""
    library = build(NCCL, tmp_path / "libnccl.so.2")
    with mapping([library], ()) as pid:
        (found,) = targets.find_libraries(pid)
    asked: list[str] = []
    exchange = made._exchange

    def counted(request: dict[str, Any], *more: Any) -> reader.Answer:
        asked.append(request["op"])
        return exchange(request, *more)

    monkeypatch.setattr(made, "_exchange", counted)
    code, functions = RemoteCode(found), [(number, False) for number in range(4096, 4296)]
    code.look_ahead(entry for entry, _ in functions)
    code.follow(functions)
    for entry, throws in functions:
        code.at(entry)
        code.places(entry, throws=throws)
    assert asked == ["instructions"] * 5, "200 functions, 64 at once; also when the process has ended"

    def fail(request: dict[str, Any], *_: Any) -> reader.Answer:
        asked.append("again")
        raise wire.Closed

    monkeypatch.setattr(made, "_exchange", fail)
    code = RemoteCode(found)
    code.look_ahead(entry for entry, _ in functions)
    code.follow(functions)
    assert [(place.offset, place.code) for place in code.places(4096, throws=False)] == [(4096, b"")]
    assert code.at(5000) == b""
    assert asked.count("again") == 1


@AS_ROOT
def test_a_file_is_read_for_whichever_of_its_processes_may_be_read(made: Reader, tmp_path: Path) -> None:  # noqa: F811
    """Who maps it first and is not read any more had it probed at entries, at several times the price, for all."""
    library = build(NCCL + "int ncclBroadcast(int a) { return a * 2 + 1; }", tmp_path / "libnccl.so.2", "-O1")
    with mapping([library], ()) as first, mapping([library], ()) as second:
        (theirs,), (ours,) = targets.find_libraries(first), targets.find_libraries(second)
        made._strikes[first] = reader.STRIKES
        here, entry = Code(mapped.open_file(library)), ours.offsets["ncclBroadcast"]
        alone, together = code_of(theirs), code_of(theirs, ours)
        assert [place.code for place in alone.places(entry, throws=False)] == [b""]
        assert together.at(entry) == here.at(entry)
        assert together.places(entry, throws=False) == instructions.places(here, entry, throws=False)
        assert (alone.unread, together.unread) == (True, False)


class FewAnswer:
    """A reader that answers for some processes.

    Attributes:
        answering, refused, ending: Processes for which it answers; that it would not be asked about; that end it.
        asked: Processes, in order.
    """

    def __init__(self, answering: set[int], refused: set[int], ending: set[int]) -> None:
        self.answering, self.refused, self.ending = answering, refused, ending
        self.asked: list[int] = []
        self.generation = 0

    def may_ask(self, pid: int) -> bool:
        return pid not in self.refused

    def ask(self, op: str, pid: int, *, heads: list[int], **_: Any) -> reader.Answer:
        self.asked.append(pid)
        self.generation += pid in self.ending
        if pid not in self.answering:
            raise Unreadable("no")
        return reader.Answer({"heads": ["90"] * len(heads), "places": []}, b"", [])


def one_after_the_other(pids: list[int], fake: FewAnswer) -> list[int]:
    """Who is asked for, the simple way."""
    asked: list[int] = []
    for n, pid in enumerate(pids):
        if n and pid in fake.refused:
            continue
        if len(asked) == 16 or len(fake.ending & set(asked)) == 2:
            break
        asked.append(pid)
        if pid in fake.answering:
            break
    return asked


def test_few_processes_are_asked_for_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand that map a file and are not read cost nothing; those that hang cost two readers."""
    random.seed(22)
    for _ in range(300):
        pids = random.sample(range(1, 1000), random.randrange(1, 60))
        some = [{pid for pid in pids if random.random() < random.choice([0, 0.03, 0.5, 1])} for _ in range(3)]
        fake = FewAnswer(some[0] - some[1] - some[2], some[1], some[2] - some[1])
        monkeypatch.setattr(reader, "shared", fake)
        libraries: list[Any] = [SimpleNamespace(pid=pid, file=SimpleNamespace(fd=0, device="")) for pid in pids]
        code = RemoteCode(*libraries)
        code.look_ahead([1, 2])
        expected = one_after_the_other(pids, fake)
        assert fake.asked == expected
        answered = expected[-1] in fake.answering
        assert (code.at(2), code.unread) == ((b"\x90", False) if answered else (b"", True))
        assert fake.asked == expected, "nobody is asked again"


@pytest.mark.parametrize(
    "answer",
    [
        {"heads": [], "places": []},
        {"heads": ["zz"], "places": [[]]},
        {"heads": ["90"], "places": [[]]},
        {"heads": ["90" * 16], "places": [[[64, "90", 0, []]]]},
        {"heads": ["90"], "places": [[[65, "90", 0, []]]]},
        {"heads": ["90"], "places": [[[64, "90", 0, []], [64 + 128, "90", 0, []]]]},
        {"heads": ["90"], "places": [[[64, "90", 0, []], [63, "90", 0, []]]]},
        {"heads": ["90"], "places": [[[64, "90", 0, [6]]]]},
        {"heads": ["90"], "places": [[[64, "90", -8, []]]]},
        {"heads": ["90"], "places": [[[64, "90", 1 << 28, []]]]},
        {"heads": ["90"], "places": [[[64.5, "90", 0, []]]]},
        {"heads": ["90"]},
    ],
)
def test_instructions_that_make_no_sense_are_refused(answer: dict[str, Any]) -> None:
    """A probe elsewhere than in the first straight line of its function might change what the program does."""
    with pytest.raises(Unreadable):
        reader.checked(reader.Answer(answer, b"", []), lambda one: instructions._instructions([64], [(64, False)], one))


class Open(Liar):
    """A reader that sends a file open for reading."""

    def _lie(self) -> None:
        self._theirs.recv(1 << 16)
        with open(__file__, "rb") as file:
            wire.send(self._theirs, {"libraries": [], "unread": 0, "entries": []}, fds=[file.fileno()])


def test_a_descriptor_that_reads_is_not_taken_of_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor closed by the thread that asked."""
    liar, closed = Open(b""), []
    monkeypatch.setattr(reader, "shared", liar)
    monkeypatch.setattr(reader, "_close", lambda fds: closed.append((len(fds), threading.current_thread().name)))
    try:
        with pytest.raises(Unreadable, match="descriptors that read"):
            targets.find_libraries(4242)
        assert (1, "argus-close") in closed
        assert all(not count for count, name in closed if name != "argus-close")
    finally:
        liar.close()


# ---- probes are put into a file that cannot be read


@AS_ROOT
@pytest.mark.kernel
@pytest.mark.parametrize("backend", ["multi", "perf"])
def test_probes_count_through_places(
    made: Reader,  # noqa: F811
    program: Path,
    backend: Any,
) -> None:
    """Each way of attaching; the numbers are the program's own."""
    if backend == "multi" and kernel_version() < (6, 6):
        pytest.skip("this kernel has no multi links")
    probes = Probes(backend=backend)
    try:
        later.test_counts_and_arguments_are_the_programs(program, probes)
        assert probes.attachments
        assert not any(isinstance(one.library.file, File) for one in probes.attachments)
    finally:
        probes.close()
