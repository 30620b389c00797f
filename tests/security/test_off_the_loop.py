"""No process keeps the loop of a trace waiting: its files, memory and mappings are read in the reader process, and
probes that the kernel does not finish with are left behind."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from argus.capture.kernel import links
from argus.capture.kernel.links import CLOSERS, Closing, link_in_time
from argus.capture.process import c_library, cupti, targets
from argus.capture.process.instructions import BREAKPOINT, has_probes
from argus.capture.reader import reader
from argus.capture.reader.reader import Reader, Unreadable
from argus.cupti import collector, shared
from tests.security.test_reader import AS_ROOT, HERE, made, running, sleeper  # noqa: F401 - fixtures

ROOT = HERE.parents[1]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("built") / "cupti_target"
    subprocess.run(["cc", "-o", str(built), str(HERE / "cupti_target.c")], check=True)
    return built


@contextlib.contextmanager
def armed(program: Path, where: Path) -> Iterator[tuple[subprocess.Popen[bytes], int, subprocess.Popen[bytes]]]:
    """A process with a helper's memory and a page of a file that does not answer; where that page lies; who answers."""
    where.mkdir()
    with running(sys.executable, str(HERE / "fuse_folder.py"), str(where), str(program)) as daemon:
        try:
            if daemon.poll() is not None:
                pytest.skip("no file systems in user space here (/dev/fuse)")
            shown = str(where / program.name)
            with subprocess.Popen([str(program), shown], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as target:
                try:
                    assert target.stdout is not None
                    page = int(target.stdout.readline(), 16)
                    yield target, page, daemon
                finally:
                    daemon.kill()
                    target.kill()
        finally:
            daemon.kill()
            daemon.wait()
            subprocess.run(["umount", "-l", str(where)], check=False)


@AS_ROOT
def test_a_name_in_memory_that_never_comes_holds_nobody_up(made: Reader, program: Path, tmp_path: Path) -> None:  # noqa: F811
    """Records of kernels point at names, where the process likes. The loop read them in its own memory's place."""
    with armed(program, tmp_path / "fs") as (target, page, daemon):
        texts = cupti.texts_of(target.pid)
        own = next(int(line.split("-")[0], 16) for line in _maps(target.pid) if line.endswith("[stack]"))
        assert texts.at([0]) == [None]
        daemon.send_signal(signal.SIGSTOP)
        assert texts.at([page]) == [None]
        assert made.counters["memory_hung"] == 1
        begun = time.monotonic()
        assert texts.at([page, own] * 1000) == [None] * 2000
        assert time.monotonic() - begun < 1, "its memory is not read any more"
        texts.close()
        assert made.reads(target.pid)


@AS_ROOT
def test_names_are_those_of_the_process(made: Reader, sleeper: subprocess.Popen[bytes]) -> None:  # noqa: F811
    """What the reader answers is what a reader in this process would."""
    here, there = cupti.Texts(sleeper.pid), cupti.texts_of(sleeper.pid)
    assert isinstance(there, cupti.RemoteTexts)
    starts = [int(line.split("-")[0], 16) for line in _maps(sleeper.pid) if line.split()[1].startswith("r")][:40]
    pointers = [start + 1 for start in starts] * 60  # of more than one question
    found = here.at(pointers)
    assert any(found)
    assert None in here.at([0])
    assert there.at(pointers) == found
    assert there.at([0, 1 << 63]) == [None, None]
    here.close()
    there.close()
    with pytest.raises(OSError, match="No such"):
        cupti.texts_of(1 << 22)


@AS_ROOT
def test_another_file_in_the_place_of_the_helper_s_memory_is_not_asked(
    made: Reader,  # noqa: F811
    program: Path,
    tmp_path: Path,
) -> None:
    """It was opened and described by the loop: each waits for a file system that does not answer."""
    with armed(program, tmp_path / "fs") as (target, _, daemon):
        where, place = cupti.open_helper(target.pid)
        fd = cupti.open_memory(place)
        assert os.fstat(fd).st_size == shared.HEAD_BYTES
        assert collector._same_file(place, fd)
        assert target.stdin is not None
        assert target.stdout is not None
        target.stdin.write(b"\n")
        target.stdin.flush()
        assert target.stdout.readline() == b"exchanged\n"
        daemon.send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        same, place = cupti.open_helper(target.pid, where)
        assert same == where
        with pytest.raises(OSError, match="no file in memory"):
            cupti.open_memory(place)
        assert not collector._same_file(place, fd)
        assert cupti.open_helper(target.pid) == ("", -1)
        assert time.monotonic() - begun < 3
        assert not made.counters
        os.close(fd)


@AS_ROOT
def test_mappings_come_from_the_reader(made: Reader, sleeper: subprocess.Popen[bytes]) -> None:  # noqa: F811
    pid = sleeper.pid
    there = targets.executable_mappings(pid), targets.mappings_signature(pid), cupti.mapped_paths(pid)
    library = c_library.find_functions(pid)
    head = targets.read_program(pid)
    asked = made.generation
    made.close()
    assert asked == 1
    assert there == (targets.executable_mappings(pid), targets.mappings_signature(pid), cupti.mapped_paths(pid))
    assert library == c_library.find_functions(pid)
    assert library is not None
    assert head == targets.read_program(pid)
    assert head[:4] == b"\x7fELF"
    with pytest.raises(OSError, match="No such"):
        targets.executable_mappings(1 << 22)


def test_a_list_of_mappings_that_never_comes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that changes mappings holds a lock while it waits for a file system, and who lists them waits for it."""
    one, asked = Reader(), []

    def hang(request: dict[str, object], data: bytes, *_: object) -> reader.Answer:
        asked.append(request["op"])
        raise TimeoutError

    monkeypatch.setattr(reader, "shared", one)
    monkeypatch.setattr(one, "_nursery", True)
    monkeypatch.setattr(one, "_exchange", hang)
    monkeypatch.setattr(one, "_renew", lambda: None)
    monkeypatch.setattr(one, "_end", lambda *_: None)
    monkeypatch.setattr(one, "_doing", lambda: "memory")
    for read in (targets.executable_mappings, targets.mappings_signature, targets.executable_mappings):
        with pytest.raises(Unreadable):
            read(7)
    assert cupti.mapped_paths(7) == []
    assert not targets.maps_cuda(7)
    assert asked == ["maps"] * 3, "three times, and never again"
    assert one.counters == {"memory_hung": 1, "processes_unreadable": 1}


@AS_ROOT
def test_probes_are_looked_for_in_the_reader(made: Reader, sleeper: subprocess.Popen[bytes]) -> None:  # noqa: F811
    one = next(one for one in targets.executable_mappings(sleeper.pid) if "libc.so" in one.path)
    file, offset = (one.device, one.inode), one.offset + 0x1000
    assert not has_probes(sleeper.pid, file, [offset]), "its code is as in the file"
    memory = os.open(f"/proc/{sleeper.pid}/mem", os.O_RDWR)
    os.pwrite(memory, BREAKPOINT, one.start + 0x1000)
    os.close(memory)
    assert has_probes(sleeper.pid, file, [offset])
    assert not has_probes(sleeper.pid, file, [offset, offset + 64])
    assert not has_probes(sleeper.pid, ("00:00", 1), [offset])
    made.close()
    assert has_probes(sleeper.pid, file, [offset])


def test_an_exec_is_seen_by_where_the_program_lies() -> None:
    again = "import os, sys; print(flush=True); sys.stdin.readline(); os.execv('/bin/sleep', ['sleep', '100'])"
    with running(sys.executable, "-c", again) as process:
        before = targets.program_of(process.pid)
        assert targets.program_of(process.pid) == before
        assert len(before.split()) == 4
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        until = time.monotonic() + 10
        while "sleep" not in os.readlink(f"/proc/{process.pid}/exe") and time.monotonic() < until:
            time.sleep(0.01)
        assert targets.program_of(process.pid) != before


def _maps(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/maps").read_text().splitlines()


# ---- probes


def test_probes_that_come_in_time_are_those_that_were_made() -> None:
    assert link_in_time(lambda: [7, 8]) == [7, 8]

    def refuse() -> list[int]:
        raise PermissionError(1, "no")

    with pytest.raises(PermissionError):
        link_in_time(refuse)


def test_probes_that_come_late_are_not_waited_for_and_taken_away() -> None:
    answers = threading.Event()
    fd = os.memfd_create("argus-test")

    def make() -> list[int]:
        answers.wait(30)
        return [fd]

    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        link_in_time(make, 0.05)
    assert time.monotonic() - begun < 10
    os.fstat(fd)
    answers.set()
    until = time.monotonic() + 10
    while _is_open(fd) and time.monotonic() < until:
        time.sleep(0.01)
    assert not _is_open(fd)


def test_probes_that_do_not_go_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    go, gone = threading.Event(), threading.Event()
    assert Closing([(frozenset(), ([os.memfd_create("argus-test")], []))]).wait(10)

    def close(_: object) -> list[OSError]:
        go.wait(30)
        gone.set()
        return []

    monkeypatch.setattr(links, "_close_all", close)
    closing = Closing([(frozenset(), ([3], []))])
    assert not closing.wait(0.05)
    assert not closing.closed(0)
    go.set()
    assert gone.wait(10), "they go on by themselves"


def test_probes_that_do_not_go_keep_no_others_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those of other users, however many do not, nor of the same one, at exits as at entries."""
    go, closed = threading.Event(), set[int]()

    def close(some: list[int]) -> list[OSError]:
        for link in some:
            if link >= 10_000:
                go.wait(60)
            closed.add(link)
        return []

    monkeypatch.setattr(links, "_close_all", close)
    one, two, three = frozenset([1]), frozenset([2]), frozenset([1, 3])
    held = [(one, ([10_000 + n], [20_000 + n])) for n in range(5 * CLOSERS)]
    same = [(two, ([30_000], [31_000])), *((two, ([100 + n], [200 + n])) for n in range(8))]
    other = [(three, ([1000, 1001, 1002], [2000])), (three, ([], [2001]))]
    before = threading.active_count()
    closing = Closing([*held, *same, *other])
    try:
        done = {link for _, both in [*same[1:], *other] for link in (*both[0], *both[1])}
        for number in [*range(len(held) + 1, len(held) + len(same)), *range(len(held) + len(same), len(held) + 11)]:
            for _ in range(200):
                if closing.closed(number):
                    break
                time.sleep(0.05)
        assert closed == done
        assert threading.active_count() - before <= 2 * CLOSERS
        assert not closing.wait(0)
    finally:
        go.set()
    assert closing.wait(60)
    assert len(closed) == 2 * len(held) + 2 * len(same) + 5


@pytest.mark.parametrize(("users", "number"), [(1, 2000), (4, 2000), (8, 2000), (12, 4096), (100, 4096)])
def test_threads_that_close_are_bounded_however_users_share_files(
    users: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each set of users had four: 12 users had 4,096."""
    draw, begun = random.Random(users), list[partial[None]]()
    monkeypatch.setattr(links, "Aside", lambda work, name: begun.append(work))
    sets = [frozenset([user]) for user in range(users)]
    sets += [frozenset(draw.sample(range(users), draw.randrange(1, users + 1))) for _ in range(number - users)]
    closing = Closing([(each, ([n], [])) for n, each in enumerate(sets)])
    assert CLOSERS // 2 <= len(begun) <= max(CLOSERS, 2 * users)
    monkeypatch.undo()
    monkeypatch.setattr(links, "_close_all", lambda some: [])
    hang = next(work.args[0] for work in begun if 0 in work.args[0])
    for work in begun:
        if work.args[0] is not hang:
            work()
    assert {sets[number] for number in closing._left} == {frozenset([0])}, "they keep no others from it"
    for work in begun:
        work()
    assert closing.wait(10)


def test_files_that_others_share_and_that_hang_keep_no_shared_ones_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever had many users could choose one with whose files another's waited."""
    begun = list[partial[None]]()
    monkeypatch.setattr(links, "Aside", lambda work, name: begun.append(work))
    hostile = [frozenset([100_000 + user, 200_000]) for user in range(2 * CLOSERS)]
    honest = frozenset([1000, 1001])
    Closing([(each, ([n], [])) for n, each in enumerate([*hostile, honest])])
    (of_honest,) = (work for work in begun if len(hostile) in work.args[0])
    assert list(of_honest.args[0]) == [len(hostile)]


SIZES = [0, 1, 3, 100]


@pytest.mark.parametrize("seed", range(20))
def test_of_each_file_entries_are_closed_before_exits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    closed: list[int] = []
    monkeypatch.setattr(links, "_close_all", lambda some: closed.extend(some) or [])
    numbers = iter(range(100_000))
    files = [
        (frozenset([draw.randrange(4)]), tuple([next(numbers) for _ in range(draw.choice(SIZES))] for _ in range(2)))
        for _ in range(draw.choice([0, 1, 3, 200]))
    ]
    closing = Closing(files)  # type: ignore[arg-type]
    assert closing.wait(60)
    closing.result()
    assert sorted(closed) == list(range(next(numbers)))
    at = {link: place for place, link in enumerate(closed)}
    for _, (entries, exits) in files:
        assert max(map(at.__getitem__, entries), default=-1) < min(map(at.__getitem__, exits), default=1 << 60)


HANGS = """
import os, sys, time
from types import SimpleNamespace
from argus.capture.kernel import links
links.os = SimpleNamespace(close=lambda fd: time.sleep(60))
assert not links.Closing([(frozenset(), ([3], []))]).wait(0.1)
"""


def test_nor_by_a_process_that_ends() -> None:
    subprocess.run([sys.executable, "-c", HANGS], timeout=20, check=True)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


# ---- who reads

_OF_PROC = r"(PROC|proc|open\(|file\(|begin\().*[\"/]"
_READERS = {
    r"\bELFFile\b|\bElf\(|\bSymbolFile\(|\bFunctionTable\(|\blzma\.": {
        "argus/capture/process/c_library.py",
        "argus/capture/process/elf.py",
        "argus/capture/process/names.py",
        "argus/capture/process/nccl.py",
        "argus/capture/process/symbol_cache.py",
        "argus/capture/process/symbols.py",
        "argus/capture/python/interpreter.py",
        "argus/live/preflight.py",  # a library of Argus's own process
    },
    r"\bprocess_vm_readv\b": {
        "argus/capture/offcpu.py",  # the name of a system call
        "argus/capture/python/code.py",
    },
    _OF_PROC + r"mem\"": {
        "argus/capture/process/cupti.py",
        "argus/capture/process/instructions.py",
        "argus/capture/process/names.py",
        "argus/capture/process/nccl.py",
        "argus/capture/process/pytorch.py",
        "argus/capture/process/symbols.py",
        "argus/capture/python/interpreter.py",
        "argus/cupti/load.py",  # a stack, while ptrace holds its thread; in a child that is left behind if it hangs
    },
    _OF_PROC + r"maps\"": {
        "argus/capture/process/demangler.py",  # its own
        "argus/capture/process/environment.py",
        "argus/capture/process/symbols.py",
        "argus/capture/process/targets.py",  # hidden_processes, before a trace begins
        "argus/capture/reader/reader.py",
        "argus/cupti/interrupt.py",  # in the same child
    },
    _OF_PROC + r"(environ|cmdline|auxv)\"|(PROC / str\(pid\) / |/proc/\{pid\}/\{)name\b": {
        "argus/capture/process/environment.py",
        "argus/capture/process/targets.py",
        "argus/capture/process/threads.py",  # the kernel's own command line
        "argus/capture/reader/process.py",
    },
    r"folder / \"syscall\"|/syscall\"": {"argus/capture/blocked.py"},
    r"\bopen\(.*\"exe\"": {"argus/capture/process/targets.py"},
    r"map_files|\bopen_mapped\(|\bopen_in_root\(|\bopen_beside\(|\bFileTree\(": {
        "argus/capture/process/c_library.py",
        "argus/capture/process/cupti.py",
        "argus/capture/process/elf.py",
        "argus/capture/process/environment.py",
        "argus/capture/process/instructions.py",
        "argus/capture/process/mapped.py",
        "argus/capture/process/names.py",
        "argus/capture/process/pytorch.py",
        "argus/capture/process/symbols.py",
        "argus/capture/process/targets.py",
        "argus/capture/python/interpreter.py",
    },
}
"""What reads files, memory or mappings of processes, and where it may stand: modules that ask the reader process where
there is one. docs/security.md says of the rest why they may."""


def users(pattern: str) -> set[str]:
    found = set()
    for path in sorted([*(ROOT / "argus").rglob("*.py"), *(ROOT / "cli").rglob("*.py")]):
        lines = (line.partition("#")[0] for line in path.read_text().splitlines())
        if any(re.search(pattern, line) and "``" not in line and '"""' not in line for line in lines):
            found.add(str(path.relative_to(ROOT)))
    return found


@pytest.mark.parametrize("pattern", _READERS)
def test_nobody_else_reads_what_processes_have_written(pattern: str) -> None:
    assert users(pattern) == _READERS[pattern]
