"""File systems that do not answer, or slowly: what a process brings costs that process, and no other's names."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from argus.capture.process import environment, mapped, targets
from argus.capture.process.mapped import device_of
from argus.capture.reader import progress, reader
from argus.capture.reader.reader import Reader, Unreadable
from argus.capture.reader.remote import RemoteSymbols
from argus.model import calls, records
from argus.system import proc as system_proc
from tests.security.mapping_process import AS_NOBODY, NOBODY, mapping, mapping_of
from tests.security.test_reader import AS_ROOT, HERE, made, running  # noqa: F401 - a fixture

SOURCE = "".join(f"int {name}(void) {{ return 0; }}\n" for name in calls.symbols_of("backward_begin")[:1])
MANY = """__asm__(".altmacro\\n.macro one n\\n.globl a_name_of_a_function_that_takes_some_room_in_its_table_\\\\n\\n"
"a_name_of_a_function_that_takes_some_room_in_its_table_\\\\n: nop\\n.endm\\n"
".set i, 0\\n.rept 20000\\none %i\\n.set i, i + 1\\n.endr\\n");
"""
NCCL = "int ncclAllReduce(void) { return 0; }\n"


def build(source: str, library: Path, *options: str) -> Path:
    library.parent.mkdir(parents=True, exist_ok=True)
    text = library.with_suffix(".c")
    text.write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", *options, "-o", str(library), str(text)], check=True)
    text.unlink()
    return library


@contextlib.contextmanager
def file_system(
    where: Path, shown: Path, delay: Path | None = None, *, server: Path = HERE / "fuse_folder.py"
) -> Iterator[subprocess.Popen[bytes]]:
    """A file system in user space; SIGSTOP makes it one that does not answer, a file ``delay`` one that is slow."""
    where.mkdir(exist_ok=True)
    more = [] if delay is None else [str(delay)]
    with running(sys.executable, str(server), str(where), str(shown), *more) as daemon:
        try:
            if daemon.poll() is not None:
                pytest.skip("no file systems in user space here (/dev/fuse)")
            yield daemon
        finally:
            daemon.kill()
            daemon.wait()
            subprocess.run(["umount", "-l", str(where)], check=False)


def c_library_code(pid: int) -> int:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return next(int(line.split("-")[0], 16) for line in lines if "r-xp" in line and "libc.so" in line)


def names(symbols: RemoteSymbols, *addresses: int) -> list[str]:
    stack = symbols.assemble(np.empty(0, records.FRAME), np.array(addresses, np.uint64), 0)
    return [frame.function for frame in stack.frames]


@AS_ROOT
@pytest.mark.parametrize("how", ["version", "debug file", "perf map"])
def test_a_path_that_leads_to_a_dead_file_system_costs_its_process_alone(
    made: Reader,  # noqa: F811
    folder: Path,
    tmp_path: Path,
    how: str,
) -> None:
    """The file system that was read last was given up: the root's, with the libraries of everybody."""
    where = folder / "fs"
    nccl = build(NCCL, tmp_path / "honest" / "libnccl.so.2")
    before: tuple[str, ...] = AS_NOBODY
    files: list[Path] = []
    if how == "version":
        files = [build(SOURCE, folder / "torch" / "lib" / "libtorch_cpu.so")]
        (folder / "torch" / "version.py").symlink_to(where / nccl.name)
    elif how == "debug file":
        files = [build("int other(void) { return 0; }", folder / "libother.so")]
        link = folder / "link"
        link.write_bytes(b"gone.debug\0\0" + b"\1\2\3\4")
        section = f"--add-section=.gnu_debuglink={link}"
        subprocess.run(["objcopy", "--strip-all", section, str(files[0])], check=True)
        (folder / ".debug").symlink_to(where)
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(file_system(where, nccl))
        if how == "perf map":
            before = ("unshare", "-m", "sh", "-c", f'mount --bind {where} /tmp && exec "$@"', "sh", *AS_NOBODY)
        hostile = stack.enter_context(mapping(files, before))
        honest = stack.enter_context(mapping([nccl], ()))
        own = RemoteSymbols(honest)
        code = c_library_code(honest)
        expected = names(own, code + 0x30000)
        symbols = RemoteSymbols(hostile)
        daemon.send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        if how == "version":
            with pytest.raises(Unreadable):
                targets.find_libraries(hostile)
            assert [one.roles for one in targets.find_libraries(hostile)], "its libraries are read, without a version"
        elif how == "debug file":
            lines = Path(f"/proc/{hostile}/maps").read_text().splitlines()
            names(symbols, int(next(line for line in lines if files[0].name in line).split("-")[0], 16) + 0x100)
        else:
            time.sleep(
                1.1
            )  # addresses outside all that is mapped have the list of mappings read again, and the perf map
            two = np.array([c_library_code(hostile) + 0x1000, 0x1000], "<u8").tobytes()
            symbols.ask("resolve", two, stacks=[[0, 0, 8], [0, 0, 8]], budget=False).close()
        assert made.counters["file_systems_hung"] == 1
        assert list(made._dead) == [f"paths of process {hostile}"]
        again = RemoteSymbols(honest)
        assert names(again, code + 0x30000) == expected
        assert names(own, code + 0x31000)[0] != "[not read]"
        assert [one.path for one in targets.find_libraries(honest)] == [str(nccl)]
        assert time.monotonic() - begun < 30
        assert made.reads(hostile)


def test_a_file_system_is_given_up_for_one_user_s_processes_in_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """That Argus lives on it, or that others read from it, shows that it is alive: what hung is the process's doing."""
    one = Reader()
    monkeypatch.setattr(one, "_end", lambda *_: None)
    one._own = reader._own_file_systems()
    own = device_of(os.stat(reader.__file__).st_dev)
    assert own in one._own
    for device, pid in (("07:77", 100), (own, 200)):
        monkeypatch.setattr(one, "_doing", lambda device=device: device)
        one._blame(pid, (NOBODY, "pod"), TimeoutError())
    assert one.counters == {"file_systems_hung": 2}
    monkeypatch.setattr(progress, "dead", set(one._dead))

    def opens(device: str, pid: int, user: int, container: str = "pod") -> bool:
        monkeypatch.setattr(progress, "process", pid)
        monkeypatch.setattr(progress, "owner", (user, container))
        with contextlib.suppress(TimeoutError), progress.file(device):
            return True
        return False

    assert [opens("07:77", 100, NOBODY), opens("07:77", 101, NOBODY), opens("07:77", 102, 0)] == [False, False, True]
    assert opens("07:77", 103, NOBODY, "another pod")
    assert [opens(own, 200, NOBODY), opens(own, 201, NOBODY), opens(own, 102, 0)] == [False, True, True]
    one.forget(200)
    assert list(one._dead) == [f"07:77 of user {NOBODY} in pod"], "another process may have its number"


def test_what_was_given_up_of_a_process_is_forgotten_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Reader()
    monkeypatch.setattr(one, "_end", lambda *_: None)
    for doing in (progress.MEMORY.decode(), progress.PATHS):
        monkeypatch.setattr(one, "_doing", lambda doing=doing: doing)
        one._blame(200, (NOBODY, ""), TimeoutError())
    assert (one.reads_memory(200), list(one._dead)) == (False, ["paths of process 200"])
    one.forget(200)
    assert (one.reads_memory(200), list(one._dead), one._hung) == (True, [], {})
    assert one.counters == {"memory_hung": 1, "file_systems_hung": 1}


def test_after_a_file_was_read_it_is_not_named_any_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What was read last was blamed for what came after."""
    page = memoryview(bytearray(progress.SIZE))
    monkeypatch.setattr(progress, "page", page)
    (tmp_path / "file").write_text("text")
    file = mapped.open_file(tmp_path / "file")
    progress.memory()
    assert file.read(4, 0) == b"text"
    assert bytes(page[:7]) == b"\x06memory"
    with progress.look_up():
        file.status_now()
        assert bytes(page[:6]) == b"\x05paths"


@AS_ROOT
def test_names_of_a_debug_file_are_for_processes_of_its_user(made: Reader, folder: Path) -> None:  # noqa: F811
    """A process may have any file in the place of a debug file, and its names were everybody's."""
    build_id = "ab" * 20
    options = ("-nostdlib", f"-Wl,--build-id=0x{build_id}")
    code = "void other(void) {{ }}\nstatic __attribute__((used)) void {}(void) {{ for (;;) ; }}\n"
    place = folder / ".build-id" / build_id[:2]
    forged = build(code.format("forged"), place / f"{build_id[2:]}.debug", *options)
    library = build(code.format("genuine"), folder / "libshared.so", *options)
    subprocess.run(["strip", library], check=True)
    symbols = subprocess.run(["nm", forged], capture_output=True, text=True, check=True).stdout.splitlines()
    offset = next(int(line.split()[0], 16) for line in symbols if line.endswith(" forged"))
    script = f'mount --bind {folder} /usr/lib/debug && exec "$@"'
    hostile_root = ("unshare", "-m", "sh", "-c", script, "sh", *AS_NOBODY)
    with mapping([library], hostile_root) as hostile, mapping([library], ()) as honest:
        for pid, expected in ((hostile, "forged"), (honest, "libshared.so")):
            one = mapping_of(pid, library.name)
            assert names(RemoteSymbols(pid), one.start + offset)[0].partition("+")[0] == expected


def test_a_dead_file_system_below_the_program_is_the_one_that_its_files_are_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The table of mounts writes devices in decimal, everything else in hexadecimal: it was waited for twice."""
    asked: list[str] = []
    monkeypatch.setattr(system_proc, "PROC", tmp_path)
    monkeypatch.setattr(progress, "refuse", asked.append)
    monkeypatch.setattr(mapped, "mount_of", lambda fd: fd)
    (tmp_path / "7").mkdir()
    mounts = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n30 22 254:16 / /data rw - nfs x rw\n"
    (tmp_path / "7" / "mountinfo").write_text(mounts)
    one = mapped.Mounts(7)
    for number in (22, 30):
        one.enter(number, frozenset())
    assert asked == ["08:01", "fe:10"]
    assert asked[0] == device_of(os.makedev(8, 1))
    with pytest.raises(mapped.Refused):
        one.enter(31, frozenset())


@AS_ROOT
@pytest.mark.parametrize("what", ["program", "repository"])
def test_what_a_process_runs_with_is_not_waited_for_twice(
    made: Reader,  # noqa: F811
    folder: Path,
    tmp_path: Path,
    what: str,
) -> None:
    """Its library and its folder are on one dead file system; a link of its repository leads to one."""
    where = folder / "fs"
    nccl = build(NCCL, tmp_path / "honest" / "libnccl.so.2")
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(file_system(where, nccl))
        if what == "repository":
            (folder / ".git").symlink_to(where)
        works = folder if what == "repository" else where
        files = [] if what == "repository" else [where / nccl.name]
        hostile = stack.enter_context(mapping(files, ("env", f"--chdir={works}", *AS_NOBODY)))
        honest = stack.enter_context(mapping([nccl], ()))
        stack.callback(daemon.kill)  # the kernel gives up what waits for it, the process's end among it
        daemon.send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        if files:
            with pytest.raises(Unreadable):
                targets.find_libraries(hostile)
        for _ in range(2):
            with contextlib.suppress(Unreadable):
                facts = environment.read_facts(hostile)
        assert "git.commit" in facts["unreadable"]
        assert made.counters["file_systems_hung"] == 1, "it is waited for once"
        assert time.monotonic() - begun < 20
        assert [one.path for one in targets.find_libraries(honest)] == [str(nccl)]


@AS_ROOT
def test_a_file_system_that_answers_slowly_is_given_up(made: Reader, folder: Path, tmp_path: Path) -> None:  # noqa: F811
    """Each of its answers was taken for progress: one request held the loop for minutes."""
    delay = tmp_path / "delay"
    library = build(NCCL + MANY, tmp_path / "libnccl.so.2")
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(file_system(folder / "fs", library, delay))
        pid = stack.enter_context(mapping([folder / "fs" / library.name]))
        stack.callback(daemon.kill)
        made.ask("hello", 0).close()
        delay.write_text("2.5")
        begun = time.monotonic()
        with pytest.raises(Unreadable, match="too slowly"):
            targets.find_libraries(pid)
        assert 10 < time.monotonic() - begun < 15
        assert made.counters["file_systems_hung"] == 1
        assert targets.find_libraries(pid) == [], "the others are read"
        assert time.monotonic() - begun < 30


@pytest.mark.parametrize(
    ("ran_s", "queued_s", "after_s"),
    [(0.0, 0.0, 10), (0.02, 0.0, 50), (0.0, 0.1, None), (0.05, 0.05, None), (0.05, 0.0, 80), (0.0, 0.05, 20)],
)
def test_waits_of_a_reader_are_bounded_and_waits_for_a_cpu_are_not(
    ran_s: float, queued_s: float, after_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tenth of a second it was switched, ran and waited for a CPU so long; for the rest it waited for files."""
    ours, its_end = socket.socketpair()
    looks, clock = [0], [1000.0]

    def now() -> float:
        clock[0] += 0.1
        return clock[0]

    def state(pid: int) -> tuple[str, tuple[str, ...]]:
        looks[0] += 1
        if looks[0] == 1000:
            its_end.send(b"answer")
        return "S", (str(looks[0]),)

    monkeypatch.setattr(reader, "_state", state)
    monkeypatch.setattr(reader, "LOOK_S", 0.0001)
    with ours, its_end:
        waiting = reader._Waiting(ours, 1, 4.0)
        monkeypatch.setattr(reader, "time", SimpleNamespace(monotonic=now))
        waiting._begun = clock[0]
        waiting._before = 0.0, 0.0
        monkeypatch.setattr(waiting._clock, "read", lambda: (looks[0] * ran_s, looks[0] * queued_s))
        if after_s is None:
            assert waiting.take(6) == b"answer"
        else:
            with pytest.raises(TimeoutError, match="too slowly"):
                waiting.take(6)
            assert clock[0] - 1000 == pytest.approx(after_s, abs=1)


def test_a_user_s_files_are_read_for_a_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of 9 s, one after the other, of one process and of many."""
    one, clock, answered = Reader(), [1000.0], []

    def slow(request: dict[str, Any], data: bytes, *_: object) -> reader.Answer:
        clock[0] += 9.0 if request["owner"] == (NOBODY, "") else 0.001
        answered.append(request["pid"])
        return reader.Answer({}, b"", [])

    for name, value in (("_nursery", True), ("_exchange", slow), ("_renew", lambda: None)):
        monkeypatch.setattr(one, name, value)
    monkeypatch.setattr(reader, "_owner", lambda pid: (NOBODY if pid < 1000 else 1001, ""))
    monkeypatch.setattr(reader, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def ask(pid: int, op: str = "resolve") -> bool:
        with contextlib.suppress(Unreadable):
            one.ask(op, pid).close()
            return True
        return False

    assert [ask(7) for _ in range(12)] == [True] * 9 + [False] * 3, "60 s and a fifth of the time"
    assert one.counters == {"reads_over_budget": 3}
    assert [ask(8), ask(1001)] == [True, True], "others are read"
    assert ask(7, "close"), "what is open of it may be let go of"
    begun = clock[0]
    for number in range(2000):
        ask(10 + number % 900)
        clock[0] += 0.1
        assert ask(1001)
    held = sum(pid < 1000 for pid in answered[12:]) * 9.0
    assert held < 120 + 0.5 * (clock[0] - begun), "two fifths of the time"
    clock[0] += 60
    assert ask(7)


def test_a_pod_does_not_take_the_time_of_others_whose_processes_are_root_s_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """And all containers of a user together have a share as well."""
    one, clock = Reader(), [1000.0]

    def slow(request: dict[str, Any], data: bytes, *_: object) -> reader.Answer:
        clock[0] += 29.0
        return reader.Answer({}, b"", [])

    for name, value in (("_nursery", True), ("_exchange", slow), ("_renew", lambda: None)):
        monkeypatch.setattr(one, name, value)
    monkeypatch.setattr(reader, "_owner", lambda pid: (pid // 1000, f"pod {pid // 100}"))
    monkeypatch.setattr(reader, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def ask(pid: int) -> bool:
        with contextlib.suppress(Unreadable):
            one.ask("resolve", pid).close()
            return True
        return False

    assert [ask(pid) for pid in range(1, 20)].count(False) > 5
    assert [ask(101), ask(102)] == [True, True], "of another pod"
    assert not all(ask(200 + pid) for pid in range(700)), "but not in as many as somebody likes"
    assert ask(1001), "of another user"
