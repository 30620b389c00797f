"""CPython is found in every kind of process, and its threads, GIL and collector are what the process says itself."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from argus.capture.python import interpreter as capture
from argus.capture.python import layouts
from argus.capture.python.code import CodeResolver
from argus.capture.python.interpreter import Interpreter, PythonProcess, check_of, find_interpreter
from argus.model.records import FRAME_ENTRY, NO_OFFSET
from tests.e2e.python_programs import FOLDER, Running
from tests.pythons import NEWEST, OLDEST, free_threaded_pythons, pyenv_root, pythons

PYTHONS = pythons()


@pytest.fixture(params=PYTHONS or [pytest.param("", marks=pytest.mark.skip(reason="no CPython 3.8 or later"))])
def python(request: pytest.FixtureRequest) -> str:
    return PYTHONS[request.param]


def _until(true: Callable[[], Any], seconds: float = 30) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        value = true()
        if value:
            return value
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def _ask(program: Running, text: str) -> Any:
    program.send(text + "\n")
    return json.loads(program.line())


def _attach(pid: int) -> PythonProcess:
    interpreter = find_interpreter(pid)
    assert interpreter is not None
    assert interpreter.state == "on"
    assert interpreter.settled
    return PythonProcess(pid, interpreter)


def _functions(process: PythonProcess, tid: int) -> list[str]:
    assert process.interpreter.layout is not None
    frames = process.walk(tid)
    if frames is None:
        return []
    named = CodeResolver(process, process.interpreter.layout).resolve(frames)
    return ["?" if frame is None else frame.function for frame in named]


def test_threads_come_and_go(python: str) -> None:
    with Running(python, "process.py") as program:
        assert _ask(program, "threads") == [program.pid]
        process = _attach(program.pid)
        assert process.thread_states().keys() == {program.pid}
        _ask(program, "more 101")
        expected = set(_ask(program, "threads"))
        assert len(expected) == 102
        states = process.thread_states()
        assert states.keys() == expected
        assert len(set(states.values())) == 102
        for tid in expected:
            assert _until(lambda tid=tid: _functions(process, tid))  # type: ignore[misc]
        _ask(program, "fewer")
        _until(lambda: process.thread_states().keys() == {program.pid})
        process.close()


def test_the_gil_s_holder_is_the_thread_that_spins(python: str) -> None:
    with Running(python, "process.py") as program:
        _ask(program, "more 3")
        process = _attach(program.pid)
        _until(lambda: process.gil_holder() == 0)
        for _ in range(2):
            spinning = _ask(program, "spin")
            _until(lambda tid=spinning: process.gil_holder() == tid)  # type: ignore[misc]
            # It lets go of it only when another thread asks, which may lose its CPU while it has it.
            held: list[int] = []
            for _ in range(100):
                held = [process.gil_holder() for _ in range(50)]
                assert set(held) <= {spinning, 0, program.pid}
                if held.count(spinning) > 40:
                    break
                time.sleep(0.05)
            assert held.count(spinning) > 40
            _ask(program, "stop")
            _until(lambda: process.gil_holder() == 0)
        process.close()


def test_collections_are_seen_and_counted(python: str) -> None:
    with Running(python, "process.py") as program:
        before = _ask(program, "statistics")
        process = _attach(program.pid)
        assert process.collections() == tuple(before)
        assert process.collecting() is False
        _ask(program, "collect")
        _until(process.collecting)
        _until(lambda: (process.collections() or (0, 0, 0))[2] >= before[2] + 2)
        # It does nothing else: most looks find it at it.
        looks = [process.collecting() for _ in range(200)]
        assert looks.count(True) > 100
        _ask(program, "stop")
        _until(lambda: process.collecting() is False)
        assert list(process.collections() or ()) == _ask(program, "statistics")
        process.close()


def test_addresses_in_the_record_are_those_of_the_flags(python: str) -> None:
    with Running(python, "process.py") as program:
        spinning = _ask(program, "spin")
        process = _attach(program.pid)
        record = process.interpreter.layout
        assert record is not None
        assert record["runtime"] < record["runtime_end"]
        namespace = os.stat(f"/proc/{program.pid}/ns/pid")
        assert record["ns_ino"] == namespace.st_ino
        assert record["ns_dev"] == os.minor(namespace.st_dev)
        state = process.thread_states()[spinning]
        _until(lambda: process.memory.u64(int(record["gil_holder"])) == state)
        assert process.memory.i32(int(record["gil_locked"])) in (0, 1)
        assert process.memory.i32(int(record["gc_collecting"])) == 0
        # glibc's; the kernel needs it before 3.11.
        if sys.platform == "linux" and os.uname().machine == "x86_64" and record["pthread_tid"] != NO_OFFSET:
            assert record["pthread_tid"] == 720
        assert record["minor"] >= 11 or record["pthread_tid"] != NO_OFFSET
        process.close()


def test_a_forked_child_has_its_own_state(python: str) -> None:
    with Running(python, "process.py") as program:
        _ask(program, "more 2")
        child = _ask(program, "fork")
        try:
            # Until the fork has returned the child is in its parent's state.
            _until(lambda: (found := find_interpreter(child)) and found.settled)
            process = _attach(child)
            _until(lambda: process.thread_states().keys() == {child})
            _until(lambda: _functions(process, child) == ["<module>"])
            process.close()
        finally:
            os.kill(child, 9)


def test_after_exec_nothing_is_reported_of_the_old_program(python: str) -> None:
    with Running(python, "process.py") as program:
        _ask(program, "threads")
        process = _attach(program.pid)
        assert process.thread_states()
        program.send("exec\n")
        _until(lambda: os.readlink(f"/proc/{program.pid}/exe").endswith("sleep"))
        assert process.thread_states() == {}
        assert process.walk(program.pid) is None
        assert process.gil_holder() is None
        assert find_interpreter(program.pid) is None
        process.close()


def test_threads_of_other_interpreters(python: str) -> None:
    with Running(python, "process.py") as program:
        tid = _ask(program, "interpreter")
        process = _attach(program.pid)
        functions = _until(lambda: (f := _functions(process, tid)) and f[0] == "inside" and f)
        assert functions[:2] == ["inside", "<module>"]
        assert process.thread_states().keys() == {program.pid, tid}
        process.close()


def test_a_deleted_program_under_another_name(tmp_path: Path) -> None:
    """A static interpreter, renamed and removed while it runs."""
    real = os.path.realpath("/usr/bin/python3")
    if not Path(real).exists():
        pytest.skip("no /usr/bin/python3")
    copy = tmp_path / "trainer"
    shutil.copy(real, copy)
    copy.chmod(0o755)
    with Running(str(copy), "process.py") as program:
        _ask(program, "threads")
        copy.unlink()
        process = _attach(program.pid)
        assert process.interpreter.path == str(copy)
        _until(lambda: _functions(process, program.pid) == ["<module>"])
        process.close()


_EMBEDDING = """
#include <Python.h>
#include <stdio.h>
int main(void) {
    Py_Initialize();
    /* Names the variables, so that a program that is not position-independent gets copies of them. */
    printf("%p\\n", (void *)&PyCode_Type);
    fflush(stdout);
    return PyRun_SimpleString("def embedded():\\n    import sys\\n    sys.stdin.read()\\nembedded()");
}
"""


@pytest.mark.parametrize("pie", ["-pie", "-no-pie"])
def test_an_embedded_interpreter(python: str, pie: str, tmp_path: Path) -> None:
    folder = Path(python).resolve().parents[1]
    (library, *_) = [*folder.glob("lib/libpython3.?.so"), *folder.glob("lib/libpython3.??.so"), None]
    if library is None or not shutil.which("gcc"):
        pytest.skip("no shared libpython beside this interpreter, or no gcc")
    (include,) = folder.glob("include/python3.*")
    (tmp_path / "host.c").write_text(_EMBEDDING)
    code = "-fPIE" if pie == "-pie" else "-fno-pie"
    command = [
        "gcc",
        "-w",
        code,
        pie,
        f"-I{include}",
        "host.c",
        "-o",
        "host",
        str(library),
        f"-Wl,-rpath,{folder / 'lib'}",
    ]
    subprocess.run(command, check=True, cwd=tmp_path)
    host = subprocess.Popen(
        [tmp_path / "host"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONHOME": str(folder)},
    )
    try:
        assert host.stdout is not None
        code_type = int(host.stdout.readline(), 16)
        process = _attach(host.pid)
        assert process.interpreter.layout is not None
        assert process.interpreter.layout["code_type"] == code_type
        _until(lambda: _functions(process, host.pid)[:1] == ["embedded"])
        process.close()
    finally:
        host.kill()
        host.communicate()


def test_another_pid_namespace(python: str) -> None:
    unshare = ("unshare", "--fork", "--pid", "--mount-proc", "--kill-child")
    if not shutil.which("unshare") or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("no PID namespaces here")
    with Running(python, "process.py", wrapper=unshare) as program:
        _ask(program, "more 2")
        assert _ask(program, "threads")[0] == 1
        (pid,) = [int(tid) for tid in Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()]
        process = _attach(pid)
        states = process.thread_states()
        assert states.keys() == {int(tid) for tid in os.listdir(f"/proc/{pid}/task")}
        assert len(states) == 3
        _until(lambda: _functions(process, pid) == ["<module>"])
        spinning = _ask(program, "spin")
        holder = _until(process.gil_holder)
        status = Path(f"/proc/{pid}/task/{holder}/status").read_text()
        assert f"\t{spinning}\n" in next(line + "\n" for line in status.splitlines() if line.startswith("NSpid"))
        process.close()


def test_a_process_that_begins_is_never_misjudged(python: str) -> None:
    """From exec to the first line of Python, every answer is true of its moment, and the last one is complete."""
    for _ in range(2):
        with Running(python, "process.py") as program:
            program.send("threads\n")

            def settled(pid: int = program.pid) -> Interpreter | None:
                found = find_interpreter(pid)
                assert found is None or found.state == "on" or not found.settled, found
                if found is not None and found.layout is not None:
                    process = PythonProcess(pid, found)
                    process.thread_states()
                    process.walk(pid)
                    process.close()
                return found if found is not None and found.settled else None

            found = _until(settled)
            assert found.state == "on"
            program.line()


def test_a_process_without_python() -> None:
    sleep = subprocess.Popen(["sleep", "1000"])
    try:
        _until(lambda: os.readlink(f"/proc/{sleep.pid}/exe").endswith("sleep"))
        assert find_interpreter(sleep.pid) is None
    finally:
        sleep.kill()
        sleep.wait()
    with pytest.raises(OSError):
        find_interpreter(sleep.pid)


def test_an_older_python_is_off_and_says_why() -> None:
    older = sorted((pyenv_root() / "versions").glob("3.[67].*/bin/python3"))
    if not older:
        pytest.skip("no CPython before 3.8")
    for path in older:
        with Running(str(path), "sleeping.py") as program:
            program.line()
            found = find_interpreter(program.pid)
            assert found is not None
            assert found.state == "off: CPython before 3.8 is not supported"
            assert found.layout is None
            with pytest.raises(ValueError):
                PythonProcess(program.pid, found)


def test_a_free_threaded_python_is_off_and_says_why() -> None:
    """Their objects are others, and threads have copies of code: none of it may be read as if it were the same."""
    found = free_threaded_pythons()
    if not found:
        pytest.skip("no free-threaded CPython (tests/pythons.py)")
    for name, path in found.items():
        with Running(path, "sleeping.py") as program:
            program.line()
            interpreter = find_interpreter(program.pid)
            assert interpreter is not None
            assert interpreter.state == f"off: free-threaded CPython {name.rpartition('.')[0]} is not supported"
            assert interpreter.layout is None
            assert interpreter.settled


# ---- an interpreter made up in this process's memory


class _Made:
    """Structures of CPython 3.12 in a buffer of our own: lists, frames, code objects, whatever their state."""

    def __init__(self, version: tuple[int, int] = (3, 12)) -> None:
        self.table = layouts.LAYOUTS[version]
        self.buffer = mmap.mmap(-1, 1 << 20)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))
        self.used = 4096
        self.record = capture._record(self.table, (*version, 0))
        self.record["runtime"] = self.base
        self.record["code_type"] = 0xABCD
        self.process = PythonProcess(os.getpid(), Interpreter((*version, 0), "on", self.record, "made"))

    def new(self, **fields: int) -> int:
        """A structure with these offsets set: ``_8=value`` writes eight bytes at 8."""
        at = self.used
        self.used += 1024 if max(int(name[1:]) for name in fields) < 1000 else 8192
        for name, value in fields.items():
            struct.pack_into("<Q", self.buffer, at + int(name[1:]), value)
        return self.base + at

    def set(self, address: int, offset: int, value: int, kind: str = "<Q") -> None:
        struct.pack_into(kind, self.buffer, address - self.base + offset, value)

    def code(self, name: int = 11) -> int:
        t = self.table
        code = self.new(_8=0xABCD, _16=10)
        for field, value in (("name", name), ("qualname", name), ("filename", 22), ("linetable", 33)):
            self.set(code, getattr(t, f"code_{field}"), value)
        self.set(code, t.code_firstlineno, 7, "<I")
        return code

    def frame(self, previous: int, code: int, owner: int = 0, instruction: int = 4) -> int:
        t = self.table
        frame = self.new(_200=0)
        self.set(frame, t.frame_code, code)
        self.set(frame, t.frame_previous, previous)
        self.set(frame, t.frame_instr, code + t.code_adaptive + instruction)
        self.set(frame, t.frame_owner, owner, "<B")
        return frame

    def thread(self, tid: int, next_state: int, frame: int) -> int:
        t = self.table
        cframe = self.new(_0=frame)
        state = self.new(_400=0)
        for offset, value in ((t.thread_next, next_state), (t.native_thread_id, tid), (t.thread_frame, cframe)):
            self.set(state, offset, value)
        return state

    def run(self, frame: int) -> np.ndarray | None:
        """The walk of this thread, whose innermost frame that is."""
        tid = os.getpid()
        self.interpreter(self.thread(tid, 0, frame))
        return self.process.walk(tid)

    def interpreter(self, state: int, next_interpreter: int = 0) -> int:
        interp = self.new(_400=0)
        self.set(interp, self.table.threads_head, state)
        self.set(interp, self.table.interp_next, next_interpreter)
        self.set(self.base, self.table.interp_head, interp)
        return interp


@pytest.fixture
def made() -> Iterator[_Made]:
    made = _Made()
    yield made
    made.process.close()


def test_a_stack_and_its_entry_frames(made: _Made) -> None:
    code, entry = made.code(), made.table.owner_entry
    bottom = made.frame(0, 0, entry)
    outer = made.frame(bottom, code)
    called = made.frame(made.frame(outer, 0, entry), code, instruction=10)
    leaf = made.frame(called, code, instruction=-2)
    frames = made.run(leaf)
    assert frames is not None
    assert frames["code"].tolist() == [code] * 3
    assert frames["instruction"].tolist() == [0xFFFFFFFF, 10, 4]
    assert frames["firstlineno"].tolist() == [7, 7 | FRAME_ENTRY, 7 | FRAME_ENTRY]
    assert set(frames["check"].tolist()) == {check_of(11, 11, 22, 33)}


def test_the_check_is_the_one_of_the_header() -> None:
    # bpf/stacks.h and its description: mix(x) = x * 0x9E3779B97F4A7C15, then x ^= x >> 29.
    assert check_of(0, 0, 0, 5) == 5
    x = 0x7F00_1234_5678 * 0x9E3779B97F4A7C15 % 2**64
    x ^= x >> 29
    y = (x ^ 0x10) * 0x9E3779B97F4A7C15 % 2**64
    y ^= y >> 29
    z = (y ^ 0x20) * 0x9E3779B97F4A7C15 % 2**64
    z ^= z >> 29
    assert check_of(0x7F00_1234_5678, 0x10, 0x20, 0x30) == z ^ 0x30


def test_a_thread_without_frames_has_an_empty_stack(made: _Made) -> None:
    frames = made.run(0)
    assert frames is not None
    assert len(frames) == 0


def test_a_stack_that_does_not_end_in_an_entry_frame_is_refused(made: _Made) -> None:
    code = made.code()
    assert made.run(made.frame(made.frame(0, code), code)) is None


def test_a_frame_that_holds_no_code_is_refused(made: _Made) -> None:
    code, bottom = made.code(), made.frame(0, 0, made.table.owner_entry)
    assert made.run(made.frame(bottom, code)) is not None
    made.set(code, layouts.OBJECT_TYPE, 0xABCE)
    assert made.run(made.frame(bottom, code)) is None
    assert made.run(made.frame(bottom, 0)) is None
    assert made.run(0x10) is None


def test_an_instruction_far_from_its_code_is_refused(made: _Made) -> None:
    code, bottom = made.code(), made.frame(0, 0, made.table.owner_entry)
    assert made.run(made.frame(bottom, code, instruction=1 << 40)) is None
    assert made.run(made.frame(bottom, code, instruction=-4000)) is None
    # Ten units of two bytes are its code.
    assert made.run(made.frame(bottom, code, instruction=18)) is not None
    assert made.run(made.frame(bottom, code, instruction=20)) is None


def test_frames_in_a_ring_are_refused(made: _Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "MAX_FRAMES", 5000)
    code = made.code()
    first = made.frame(0, code)
    second = made.frame(first, code)
    made.set(first, made.table.frame_previous, second)
    assert made.run(second) is None


def test_the_frame_below_an_inlined_constructor_is_hidden(made: _Made) -> None:
    """CPython hides it too; a function that has its file's name is no such frame."""
    code, shim, same = made.code(), made.code(), made.code()
    for one, first in ((shim, 0), (same, 1)):
        for field in ("name", "qualname", "filename"):
            made.set(one, getattr(made.table, f"code_{field}"), 44)
        made.set(one, made.table.code_firstlineno, first, "<I")
    bottom = made.frame(0, 0, made.table.owner_entry)
    frames = made.run(made.frame(made.frame(made.frame(bottom, same), shim), code))
    assert frames is not None
    assert frames["code"].tolist() == [code, same]


def test_lists_in_a_ring_end(made: _Made) -> None:
    me = os.getpid()
    first = made.thread(me, 0, 0)
    second = made.thread(me + 1_000_000, first, 0)
    made.set(first, made.table.thread_next, second)
    one = made.interpreter(second)
    two = made.interpreter(second, one)
    made.set(one, made.table.interp_next, two)
    assert made.process.thread_states() == {me: first}


def test_a_thread_in_two_interpreters_is_where_it_runs_code(made: _Made) -> None:
    me, bottom = os.getpid(), made.frame(0, 0, made.table.owner_entry)
    idle, busy = made.thread(me, 0, 0), made.thread(me, 0, made.frame(bottom, made.code()))
    made.interpreter(idle, made.interpreter(busy))
    assert made.process.thread_states() == {me: busy}
    made.interpreter(busy, made.interpreter(idle))
    assert made.process.thread_states() == {me: busy}


def test_unreadable_lists_end(made: _Made) -> None:
    made.interpreter(0xDEAD0000)
    assert made.process.thread_states() == {}
    made.set(made.base, made.table.interp_head, 0xDEAD0000)
    assert made.process.thread_states() == {}
    made.set(made.base, made.table.interp_head, (1 << 64) - 8)
    assert made.process.thread_states() == {}


def _own(made: _Made, version: tuple[int, int], **changes: int) -> layouts.Layout | str:
    """What becomes of the debug offsets that a process of that version states, some of them changed."""
    table, places = layouts.LAYOUTS[version], layouts.DEBUG_OFFSETS[version]
    made.buffer[: layouts.DEBUG_OFFSETS_BYTES] = bytes(layouts.DEBUG_OFFSETS_BYTES)
    stated = {field: getattr(table, field) for field in places if hasattr(table, field)}
    stated |= {"gil_begin": 500, "gil_locked": 500 + table.gil_locked, "gil_holder": 500 + table.gil_holder}
    stated |= {"object_type": layouts.OBJECT_TYPE}
    made.buffer[:8] = layouts.DEBUG_COOKIE
    made.set(made.base, layouts.DEBUG_VERSION, changes.pop("states", version[0] << 24 | version[1] << 16 | 0xF0))
    made.set(made.base, layouts.DEBUG_FREE_THREADED, changes.pop("free_threaded", 0))
    made.set(made.base, 0, changes.pop("cookie", int.from_bytes(layouts.DEBUG_COOKIE, "little")))
    for field, value in {**stated, **changes}.items():
        made.set(made.base, places[field], value)
    return capture._own_offsets(made.process.memory, made.base, version, table)


@pytest.mark.parametrize("version", layouts.DEBUG_OFFSETS)
def test_the_process_s_own_offsets_are_used(made: _Made, version: tuple[int, int]) -> None:
    table = layouts.LAYOUTS[version]
    assert _own(made, version) == table
    moved = _own(made, version, thread_frame=96, gc_collecting=table.gc_collecting + 8)
    assert isinstance(moved, layouts.Layout)
    assert moved.thread_frame == 96
    assert moved.gc_collecting - moved.gc_statistics == table.gc_collecting - table.gc_statistics


@pytest.mark.parametrize("version", layouts.DEBUG_OFFSETS)
def test_debug_offsets_that_cannot_be_used(made: _Made, version: tuple[int, int]) -> None:
    name = f"CPython {version[0]}.{version[1]}"
    assert _own(made, version, free_threaded=1) == f"free-threaded {name} is not supported"
    assert _own(made, version, cookie=0) == f"{name} without its debug offsets"
    assert "another version" in str(_own(made, version, states=0x030C00F0))
    assert "unknown way" in str(_own(made, version, unicode_state=40))
    assert "unknown way" in str(_own(made, version, object_type=16))
    assert "make no sense" in str(_own(made, version, threads_head=1 << 20))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            (NEWEST[0] << 24) + (NEWEST[1] + 1 << 16) + 0xF0,
            f"off: CPython 3.{NEWEST[1] + 1} is not supported (3.{OLDEST[1]} to 3.{NEWEST[1]} are)",
        ),
        (0x030D00A1, "off: CPython 3.13 before its release candidates is not supported"),
        (0x020712F0, "off: its version number 0x20712f0 makes no sense"),
        (0x1030C00F0, "off: its version number 0x1030c00f0 makes no sense"),
    ],
)
def test_versions_that_are_not_known(made: _Made, value: int, message: str) -> None:
    made.set(made.base, 0, value)
    binary = capture._Binary(None, {})  # type: ignore[arg-type]
    found = capture._describe(os.getpid(), made.process.memory, binary, 0, {"Py_Version": made.base}, "made")
    assert (found.state, found.layout, found.settled) == (message, None, True)


def test_a_stripped_file_says_so(made: _Made) -> None:
    made.set(made.base, 0, 0x030C00F0)
    binary = capture._Binary(None, {})  # type: ignore[arg-type]
    found = capture._describe(os.getpid(), made.process.memory, binary, 0, {"Py_Version": made.base}, "made")
    assert found.state == "off: made lacks the symbols _PyRuntime and PyCode_Type (stripped)"


def test_the_thread_number_in_the_c_library_s_struct_is_found_or_unknown(made: _Made) -> None:
    find, memory = capture._find_pthread_tid, made.process.memory
    first, second = made.new(_2000=0), made.new(_2000=0)
    assert find(memory, [first, second], {1234, 77}) == NO_OFFSET
    made.set(first, 208, 1234, "<I")
    made.set(second, 208, 77, "<I")
    # A number that only one of them has there says nothing.
    made.set(first, 100, 77, "<I")
    assert find(memory, [first, second], {1234, 77}) == 208
    made.set(second, 100, 77, "<I")
    assert find(memory, [first, second], {1234, 77}) == NO_OFFSET
    for thread in (first, second):
        made.set(thread, 720, 77, "<I")
    assert find(memory, [first, second], {1234, 77}) == 720
    assert find(memory, [first, 0xDEAD0000], {1234, 77}) == 720


def test_memory_is_read_whole_or_not_at_all(made: _Made) -> None:
    memory = made.process.memory
    assert memory.read(made.base, 16) == bytes(made.buffer[:16])
    for address, size in ((0, 8), (-8, 8), (1 << 63, 8), ((1 << 64) - 8, 8), (8, 8), (made.base, 0), (made.base, -1)):
        assert memory.read(address, size) is None
    hole = mmap.mmap(-1, 8192)
    edge = ctypes.addressof(ctypes.c_char.from_buffer(hole)) + 4096
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(edge), 4096, 0) == 0
    assert libc.munmap(ctypes.c_void_p(edge), 4096) == 0
    assert memory.read(edge - 8, 8) == bytes(8)
    assert memory.read(edge - 8, 16) is None
    # The hole is another's now; mmap must not unmap it.
    assert libc.mmap is not None
    made.keep = hole  # type: ignore[attr-defined]
    memory.close()
    assert memory.read(made.base, 8) is None
    memory.close()


def test_the_program_folder_is_complete() -> None:
    assert {path.name for path in FOLDER.glob("*.py")} >= {"blocked.py", "churn.py", "process.py", "sleeping.py"}
