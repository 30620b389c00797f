"""The CPython interpreter inside a process, seen from outside: where it lies, its threads, their stacks.

Everything is read: /proc/PID/maps, the mapped files' symbols, and /proc/PID/mem. The process is neither stopped nor
changed, so what is read may change meanwhile; every loop is bounded and what does not fit is refused.

``_PyRuntime`` → interpreters → thread states → frames → code objects. The offsets are those of ``python_layouts``; from
3.13 on the process's own (``_Py_DebugOffsets``). The kernel walks the same way (``bpf/python_walk.bpf.h``), by the
record that ``find_interpreter`` fills.
"""

from __future__ import annotations

import os
import re
import struct
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from argus.capture.process.elf import Elf, NotElf, Symbol
from argus.capture.process.mapped import Allowance, File, Lasting, lasting, open_mapped, owner_text
from argus.capture.process.targets import PROC, Mapping, executable_mappings
from argus.capture.python import layouts
from argus.capture.python.layouts import Layout
from argus.capture.reader import left_out, progress, reader
from argus.model.records import FRAME, FRAME_ENTRY, NO_OFFSET, PYTHON

_U64 = struct.Struct("<Q")
_U32 = struct.Struct("<I")
_I32 = struct.Struct("<i")
_MASK = (1 << 64) - 1

MAX_INTERPRETERS = 256
"""Interpreters of one process that are looked at."""
MAX_THREADS = 4096
"""Thread states of all interpreters of one process that are looked at. The lists are the process's to forge."""
MAX_FRAMES = 1 << 17
"""Deepest stack that ``walk`` follows; beyond it answers None."""
LIST_S, WALK_S = 0.05, 0.5
"""CPU time for a process's lists, and for a thread's frames: some 20,000 states, and ``MAX_FRAMES``."""
MAX_COUNT = 1 << 62
"""A counter that a process says is larger is not believed."""
_PTHREAD_BYTES = 2048
"""How much of glibc's ``struct pthread`` is searched for the thread's number (2304 bytes in 2.36; the number is at 720
on x86_64, 208 on aarch64)."""
_GLIBC_TID = 720
"""Offset of ``tid`` in glibc's ``struct pthread`` on x86_64 (nptl/descr.h, 2.4 to 2.43): tried first."""


class Memory:
    """The memory of a process, through /proc/PID/mem.

    The descriptor belongs to the program that ran when it was opened: after that ended or called exec, every read
    answers None, whatever the PID stands for by then.

    Raises:
        OSError: The process ended, or may not be read.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.open(PROC / str(pid) / "mem", os.O_RDONLY | os.O_CLOEXEC)

    @property
    def fd(self) -> int:
        return self._fd

    def read(self, address: int, size: int) -> bytes | None:
        """``size`` bytes at ``address``, or None if not all of them can be read."""
        return read_memory(self._fd, address, size)

    def u64(self, address: int) -> int | None:
        data = read_memory(self._fd, address, 8)
        return None if data is None else int(_U64.unpack(data)[0])

    def i32(self, address: int) -> int | None:
        data = read_memory(self._fd, address, 4)
        return None if data is None else int(_I32.unpack(data)[0])

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_memory(fd: int, address: int, size: int) -> bytes | None:
    """``size`` bytes at ``address`` through an open /proc/PID/mem; None if not all of them can be read."""
    if fd < 0 or address <= 0 or size <= 0 or address + size >= 1 << 63:
        return None
    if progress.page is not None:
        progress.memory()
    try:
        data = os.pread(fd, size, address)
        while 0 < len(data) < size:
            more = os.pread(fd, size - len(data), address + len(data))
            if not more:
                return None
            data += more
    except OSError:
        return None
    return data if len(data) == size else None


@dataclass(frozen=True)
class Interpreter:
    """A CPython in a process.

    Attributes:
        version: (major, minor, micro); (0, 0, 0): unknown.
        state: "on", or "off: why".
        layout: One ``records.PYTHON`` record, shape (); None unless the state is "on".
        path: The file that holds it, as the process sees it.
        settled: Whether all of ``layout`` is known. False while the interpreter begins: some addresses are
            still 0, so look again a little later.
    """

    version: tuple[int, int, int]
    state: str
    layout: NDArray[np.void] | None
    path: str
    settled: bool = True


# ---- files

_EVAL_LOOP = "_PyEval_EvalFrameDefault"
_ADDRESSES = ("_PyRuntime", "PyCode_Type", "PyType_Type", "Py_Version", _EVAL_LOOP)
# Functions that are new in a minor version (What's New in Python 3.8, 3.9, 3.10: C API): they date those that have no
# Py_Version (3.11). Newest first.
_MARKS = (("PyIter_Send", 10), ("PyInterpreterState_Get", 9), ("PyCode_NewWithPosOnlyArgs", 8))
_FUNCTION = "Py_GetVersion"
_VERSION_TEXT = re.compile(rb"\x00(3)\.(\d{1,2})\.(\d{1,3})(?:\+|rc\d+)?\+? \([^\x00]{1,80}\) \n?\[")
"""``sys.version``, as Python/getversion.c writes it into a variable of its own: "3.10.13 (main, …) [GCC 12.2.0]"."""


@dataclass(frozen=True)
class _Binary:
    """A file that defines some of CPython's symbols."""

    elf: Elf
    symbols: dict[str, Symbol]

    @property
    def has_interpreter(self) -> bool:
        """Else it holds copies of a library's variables at most (of a program that is not position-independent)."""
        return _FUNCTION in self.symbols


_MAX_FILES = 10_000
_binaries: OrderedDict[Lasting, _Binary | None] = OrderedDict()
_new_files = Allowance(burst=1024, per_second=32)
"""As of ``targets.find_libraries``."""
_MAX_CANDIDATES = 4096
"""Files of a process that are considered."""
_MAX_VARIABLES = 64 << 20
"""Bytes of a file's variables that are searched for its version: CPython's own have 1 MB."""


def _binary(pid: int, file: File, *, whole: bool) -> _Binary | None:
    """The CPython in a file, or None. Each file is read once: processes of a node map the same ones."""
    key = lasting(file.key, owner_text(pid))
    if key not in _binaries:
        if not _new_files.take(pid):
            return None
        try:
            _binaries[key] = _read_binary(file, whole=whole)
        except (NotElf, OSError):
            _binaries[key] = None
        while len(_binaries) > _MAX_FILES:
            _binaries.popitem(last=False)
    return _binaries[key]


def _read_binary(file: File, *, whole: bool) -> _Binary | None:
    elf = Elf(file, dynamic_only=not whole)
    symbols = elf.symbols((_FUNCTION, *_ADDRESSES, *(name for name, _ in _MARKS)))
    elf.forget_symbols()
    return _Binary(elf, symbols) if symbols else None


def _candidates(pid: int) -> Iterator[tuple[Mapping, list[Mapping], bool]]:
    """Files that the process executes, likely ones first: a mapping, all mappings, whether .symtab is worth reading."""
    by_file: dict[tuple[str, int], list[Mapping]] = {}
    for mapping in executable_mappings(pid):
        by_file.setdefault((mapping.device, mapping.inode), []).append(mapping)
    try:
        with progress.look_up(progress.PROGRAM):
            program = os.stat(PROC / str(pid) / "exe").st_ino
    except OSError:
        program = -1
    ranked = []
    for position, mappings in enumerate(by_file.values()):
        is_program = mappings[0].inode == program
        likely = is_program or "python" in Path(mappings[0].path).name
        ranked.append((not is_program, not likely, position, mappings, likely))
    for *_, mappings, likely in sorted(ranked, key=lambda item: item[:3])[:_MAX_CANDIDATES]:
        yield mappings[0], mappings, likely


def find_interpreter(pid: int) -> Interpreter | None:
    """The CPython of a process: in its program, a shared library, wherever these lie.

    Returns:
        None if there is no CPython in it. With several the first one in use is meant: the program's own, then libraries
        named "python", then others.

    Raises:
        OSError: The process ended, or may not be read.
    """
    if reader.shared.on:
        if not reader.shared.reads_memory(pid):
            raise reader.Unreadable(f"the memory of process {pid} does not answer")
        return reader.checked(reader.shared.ask("interpreter", pid), interpreter_of)  # type: ignore[no-any-return]
    memory = Memory(pid)
    try:
        fallback: Interpreter | None = None
        # A program that is not position-independent has copies of library variables that it names: those are in use.
        copies: dict[str, int] = {}
        for first, mappings, likely in _candidates(pid):
            try:
                binary = _binary(pid, open_mapped(pid, first), whole=likely)
            except OSError:
                continue
            bias = None if binary is None else _bias(binary.elf, mappings)
            if binary is None or bias is None:
                continue
            addresses = {name: symbol.address + bias for name, symbol in binary.symbols.items()}
            if not binary.has_interpreter:
                copies = copies or {name: addresses[name] for name in _ADDRESSES if name in addresses}
                continue
            interpreter = _describe(pid, memory, binary, bias, {**addresses, **copies}, first.path)
            if interpreter.settled:
                return interpreter
            fallback = fallback or interpreter
        return fallback
    finally:
        memory.close()


def interpreter_of(answer: reader.Answer) -> Interpreter | None:
    """What the reader process has found."""
    fields = answer.what["found"]
    if fields is None:
        return None
    major, minor, micro = reader.integers(fields["version"], 1 << 16)
    layout = None
    if answer.data:
        if len(answer.data) != PYTHON.itemsize:
            raise reader.Malformed("a layout")
        layout = np.frombuffer(answer.data, PYTHON).copy().reshape(())
    state = reader.text(fields["state"], 4096)
    return Interpreter((major, minor, micro), state, layout, reader.text(fields["path"]), bool(fields["settled"]))


def _bias(elf: Elf, mappings: list[Mapping]) -> int | None:
    """Load bias of a file; None where its mappings contradict each other."""
    biases = {elf.load_bias(mapping.start, mapping.offset) for mapping in mappings} - {None}
    return biases.pop() if len(biases) == 1 else None


def _describe(
    pid: int, memory: Memory, binary: _Binary, bias: int, addresses: dict[str, int], path: str
) -> Interpreter:
    version, why = _version(memory, binary, bias, addresses)
    if why:
        return Interpreter(version, f"off: {why}", None, path, settled=why != _NOT_BEGUN)
    name = f"CPython {version[0]}.{version[1]}"
    table = layouts.LAYOUTS.get(version[:2])
    if table is None:
        first, last = min(layouts.LAYOUTS), max(layouts.LAYOUTS)
        why = f"{name} is not supported ({first[0]}.{first[1]} to {last[0]}.{last[1]} are)"
        return Interpreter(version, f"off: {why}", None, path)
    if not {"_PyRuntime", "PyCode_Type", "PyType_Type"} <= addresses.keys():
        return Interpreter(version, f"off: {path} lacks the symbols _PyRuntime and PyCode_Type (stripped)", None, path)
    runtime, code_type = addresses["_PyRuntime"], addresses["PyCode_Type"]
    if version[:2] in layouts.DEBUG_OFFSETS:
        table_or_reason = _own_offsets(memory, runtime, version[:2], table)
        if isinstance(table_or_reason, str):
            return Interpreter(version, f"off: {table_or_reason}", None, path)
        table = table_or_reason
    # The type of all types: detects a wrong address, and a process whose relocations are not done yet.
    if memory.u64(code_type + layouts.OBJECT_TYPE) != addresses["PyType_Type"]:
        return Interpreter(version, f"off: {_NOT_BEGUN}", None, path, settled=False)
    record = _record(table, version)
    record["runtime"], record["code_type"] = runtime, code_type
    record["runtime_end"] = runtime + binary.symbols["_PyRuntime"].size
    if _EVAL_LOOP in addresses:
        record["eval_begin"] = addresses[_EVAL_LOOP]
        record["eval_end"] = addresses[_EVAL_LOOP] + binary.symbols[_EVAL_LOOP].size
    namespace = os.stat(PROC / str(pid) / "ns" / "pid")
    # The kernel compares with its own dev_t: 20 bits of minor number (include/linux/kdev_t.h), not stat's encoding.
    record["ns_dev"] = os.major(namespace.st_dev) << 20 | os.minor(namespace.st_dev)
    record["ns_ino"] = namespace.st_ino
    settled = _find_live(pid, memory, record, table)
    return Interpreter(version, "on", record, path, settled)


_NOT_BEGUN = "it has not begun yet"


def _version(memory: Memory, binary: _Binary, bias: int, addresses: dict[str, int]) -> tuple[tuple[int, int, int], str]:
    """Version, and why it may not be used (empty: it may)."""
    if "Py_Version" in addresses:
        value = memory.u64(addresses["Py_Version"])
        if value is None:
            return (0, 0, 0), "its version cannot be read"
        version = (value >> 24 & 0xFF, value >> 16 & 0xFF, value >> 8 & 0xFF)
        if not 3 <= version[0] <= 4 or value >> 32:
            return (0, 0, 0), f"its version number {value:#x} makes no sense"
        if value >> 4 & 0xF < 0xC:
            return version, f"CPython {version[0]}.{version[1]} before its release candidates is not supported"
        return version, ""
    minor = next((minor for name, minor in _MARKS if name in addresses), 0)
    if not minor:
        return (0, 0, 0), "CPython before 3.8 is not supported"
    versions = set()
    left = _MAX_VARIABLES
    for variables in binary.elf.variables():
        if variables.size > left:
            continue
        left -= variables.size
        data = memory.read(variables.address + bias, variables.size) or b""
        versions |= {(3, int(match[2]), int(match[3])) for match in _VERSION_TEXT.finditer(data)}
    if not versions:
        return (0, 0, 0), _NOT_BEGUN
    version = versions.pop()
    if versions or version[1] != minor:
        return (0, 0, 0), f"its version is not clear: it has the functions of 3.{minor}, and says {version}"
    return version, ""


def _own_offsets(memory: Memory, runtime: int, version: tuple[int, int], table: Layout) -> Layout | str:
    """The table with the process's own offsets (``_Py_DebugOffsets``) in place of ours, or why it cannot be used."""
    name = f"CPython {version[0]}.{version[1]}"
    data = memory.read(runtime, layouts.DEBUG_OFFSETS_BYTES)
    if data is None or not data.startswith(layouts.DEBUG_COOKIE):
        return f"{name} without its debug offsets"
    stated = _U64.unpack_from(data, layouts.DEBUG_VERSION)[0]
    if (stated >> 24 & 0xFF, stated >> 16 & 0xFF) != version:
        return f"its debug offsets are those of another version ({stated:#x})"
    if _U64.unpack_from(data, layouts.DEBUG_FREE_THREADED)[0]:
        return f"free-threaded {name} is not supported"
    own = {field: _U64.unpack_from(data, at)[0] for field, at in layouts.DEBUG_OFFSETS[version].items()}
    begin = own.pop("gil_begin")
    own["gil_locked"] -= begin
    own["gil_holder"] -= begin
    fixed = {"object_type": layouts.OBJECT_TYPE}
    # The resolver knows these by version alone, and the kernel's records have 16 bits.
    fixed |= {field: getattr(table, field) for field in own if field.startswith(("unicode_", "bytes_"))}
    if any(own[field] != value for field, value in fixed.items()):
        return f"this {name} lays out its objects in an unknown way"
    # The record's sizes are offsets and the eight bytes behind them, in 16 bits.
    if not all(0 <= value < NO_OFFSET - 8 for value in own.values()):
        return f"the debug offsets of this {name} make no sense"
    del own["object_type"]
    shift = own["gc_collecting"] - table.gc_collecting
    return replace(table, **own, gc_statistics=table.gc_statistics + shift)


_SAME = tuple(
    field
    for field in PYTHON.names or ()
    if field in Layout.__dataclass_fields__ and field not in ("gil_holder", "gil_locked", "gc_collecting")
)


def _record(table: Layout, version: tuple[int, int, int]) -> NDArray[np.void]:
    record = np.zeros((), PYTHON)
    for field in _SAME:
        record[field] = getattr(table, field)
    record["major"], record["minor"] = version[:2]
    record["pthread_tid"] = NO_OFFSET
    frame = [table.frame_code + 8, table.frame_previous + 8, table.frame_instr + 8]
    if table.frame_owner != NO_OFFSET:
        # 3.11 keeps who owns a frame behind the mark of entry frames; the kernel's walk looks at it
        frame.append(table.frame_owner + 1 + table.entry_is_frame)
    record["frame_bytes"] = max(frame)
    code = [layouts.OBJECT_SIZE + 8, table.code_firstlineno + 4, table.code_filename + 8, table.code_name + 8]
    code.append(table.code_linetable + 8)
    if table.code_qualname != NO_OFFSET:
        code.append(table.code_qualname + 8)
    record["code_bytes"] = max(code)
    return record


def _find_live(pid: int, memory: Memory, record: NDArray[np.void], table: Layout) -> bool:
    """Fills in what depends on the running interpreter. False: some of it is not known yet."""
    interp = _main_interpreter(memory, int(record["runtime"]), table)
    if interp is None:
        return False
    holder, locked = _gil(memory, int(record["runtime"]), interp, table)
    record["gil_holder"], record["gil_locked"] = holder, locked
    gc = (int(record["runtime"]) if table.gc_in_runtime else interp) + table.gc
    if _gc_is_here(memory, gc, table):
        record["gc_collecting"] = gc + table.gc_collecting
    threads = [pthread for _, pthread, _ in _thread_states(memory, record)]
    record["pthread_tid"] = _find_pthread_tid(memory, threads, set(_numbers_inside(pid).values()))
    needs_pthread = table.native_thread_id == NO_OFFSET
    return bool(
        record["gil_holder"]
        and record["gc_collecting"]
        and threads
        and not (needs_pthread and int(record["pthread_tid"]) == NO_OFFSET)
    )


def _main_interpreter(memory: Memory, runtime: int, table: Layout) -> int | None:
    for interp in _list(memory, runtime + table.interp_head, table.interp_next, MAX_INTERPRETERS):
        if memory.u64(interp + table.interp_id) == 0:
            return interp
    return None


def _gil(memory: Memory, runtime: int, interp: int, table: Layout) -> tuple[int, int]:
    """Addresses of the holder and of the locked flag; zeros where there is no GIL (yet), or the place looks wrong."""
    gil: int | None = runtime
    if table.gil != NO_OFFSET:
        gil = memory.u64(interp + table.gil)
    if not gil:
        return 0, 0
    # "locked" is -1 until the GIL is made (Python/ceval_gil.c, gil_created).
    locked, interval = memory.i32(gil + table.gil_locked), memory.i32(gil + table.gil_interval)
    if locked not in (0, 1) or interval is None or not 0 < interval <= 1_000_000_000:
        return 0, 0
    return gil + table.gil_holder, gil + table.gil_locked


def _gc_is_here(memory: Memory, gc: int, table: Layout) -> bool:
    """Whether the collector's state lies there, by its pointer to its own list of the youngest objects."""
    if table.gc_generation0 == NO_OFFSET:
        return memory.i32(gc + table.gc_collecting) in (0, 1)
    return memory.u64(gc + table.gc_generation0) == gc + table.gc_generations


def _find_pthread_tid(memory: Memory, threads: list[int], numbers: set[int]) -> int:
    """Offset of the thread's number in the C library's ``struct pthread``: where every thread has one of ``numbers``.

    Args:
        threads: Addresses of such structs, as pthread_self() gives them.
        numbers: Threads of the process, as it numbers them itself.
    """
    wanted = np.array(sorted(numbers), np.uint32)
    fits: NDArray[np.bool_] | None = None
    # A thread state may outlive its thread, so not every struct must be readable; a few are enough.
    for address in threads[-16:]:
        data = memory.read(address, _PTHREAD_BYTES)
        if data is None:
            # musl's struct and its end of the page are smaller.
            data = memory.read(address, 256)
        if data is None:
            continue
        words = np.zeros(_PTHREAD_BYTES // 4, np.uint32)
        words[: len(data) // 4] = np.frombuffer(data, np.uint32)
        here = np.isin(words, wanted)
        if here.any():
            fits = here if fits is None else fits & here
    if fits is None:
        return NO_OFFSET
    if fits[_GLIBC_TID // 4]:
        return _GLIBC_TID
    places = np.flatnonzero(fits)
    return int(places[0]) * 4 if len(places) == 1 else NO_OFFSET


# ---- threads


def _list(memory: Memory, head: int, next_offset: int, limit: int) -> Iterator[int]:
    """The elements of a linked list that may change meanwhile: never endless, never the same one twice."""
    seen: set[int] = set()
    element = memory.u64(head)
    while element and element not in seen:
        if len(seen) >= limit:
            left_out.count("python_lists_cut", memory.pid)
            return
        seen.add(element)
        yield element
        element = memory.u64(element + next_offset)


def _thread_states(memory: Memory, record: NDArray[np.void]) -> Iterator[tuple[int, int, int]]:
    """(address, pthread_self, native_thread_id or 0) of every thread state, newest interpreter and thread first, as far
    as ``MAX_THREADS`` and ``LIST_S`` reach."""
    next_offset, pthread_offset = int(record["thread_next"]), int(record["thread_id"])
    native_offset = int(record["native_thread_id"])
    size = max(offset for offset in (next_offset, pthread_offset, native_offset) if offset != NO_OFFSET) + 8
    interp_head = int(record["runtime"]) + int(record["interp_head"])
    until = time.thread_time() + LIST_S
    followed = 0
    for interp in _list(memory, interp_head, int(record["interp_next"]), MAX_INTERPRETERS):
        seen: set[int] = set()
        state = memory.u64(interp + int(record["threads_head"]))
        while state and state not in seen:
            if followed >= MAX_THREADS or (followed % 64 == 63 and time.thread_time() > until):
                left_out.count("python_lists_cut", memory.pid)
                return
            followed += 1
            seen.add(state)
            data = memory.read(state, size)
            if data is None:
                break
            native = 0 if native_offset == NO_OFFSET else _U64.unpack_from(data, native_offset)[0]
            yield state, _U64.unpack_from(data, pthread_offset)[0], native
            state = _U64.unpack_from(data, next_offset)[0]


def _numbers_inside(pid: int) -> dict[int, int]:
    """Threads of a process: their number here → their number in the process's own PID namespace."""
    try:
        threads = [int(entry) for entry in os.listdir(PROC / str(pid) / "task")]
        inside = os.stat(PROC / str(pid) / "ns" / "pid").st_ino
    except OSError:
        return {}
    if inside == os.stat(PROC / "self" / "ns" / "pid").st_ino:
        return {tid: tid for tid in threads}
    inside_of = {}
    for tid in threads:
        try:
            status = (PROC / str(pid) / "task" / str(tid) / "status").read_bytes()
        except OSError:
            continue
        match = re.search(rb"^NSpid:[\t\d ]*?(\d+)$", status, re.MULTILINE)
        inside_of[tid] = int(match[1]) if match else tid
    return inside_of


def check_of(name: int, qualname: int, filename: int, linetable: int) -> int:
    """``FRAME.check``: a hash of a code object's pointers, the same as the kernel's (``bpf/stacks.h``)."""
    return _mix(_mix(_mix(name) ^ qualname) ^ filename) ^ linetable


def _mix(x: int) -> int:
    x = x * 0x9E3779B97F4A7C15 & _MASK
    return x ^ x >> 29


def is_hidden(name: int, qualname: int, filename: int, firstlineno: int) -> bool:
    """Whether a code object is the one of the frame that CPython puts below an inlined ``__init__``.

    It is no code of the program (_Py_InitCleanup in Python/specialize.c, 3.12 and later), and tracebacks hide it too.
    Its three names are one object. So they may be in a program's function too, but no line of a program is 0.
    """
    return name == filename == qualname and not firstlineno


class PythonProcess:
    """A process that runs CPython. Once it has ended, or called exec, it answers nothing any more.

    Args:
        pid: The process.
        interpreter: What ``find_interpreter`` returned for it; its state must be "on".

    Raises:
        OSError: The process ended, or may not be read.
    """

    def __init__(self, pid: int, interpreter: Interpreter) -> None:
        if interpreter.layout is None:
            raise ValueError(f"the interpreter of process {pid} is {interpreter.state}")
        self.pid = pid
        self.interpreter = interpreter
        self.memory = Memory(pid)
        self._record = interpreter.layout.reshape(())
        self._fields = {name: int(self._record[name]) for name in PYTHON.names or () if name != "reserved"}
        self._table = layouts.LAYOUTS[interpreter.version[:2]]

    def thread_states(self) -> dict[int, int]:
        """Number of each thread that has Python → address of its thread state.

        Numbers are those of this /proc (the root namespace's). A thread that takes part in several interpreters has a
        state in each: that of the newest interpreter in which it runs code is given.
        """
        outside = {inside: tid for tid, inside in _numbers_inside(self.pid).items()}
        states: dict[int, int] = {}
        for state, pthread, native in _thread_states(self.memory, self._record):
            number: int | None = native
            if self._fields["native_thread_id"] == NO_OFFSET:
                number = self._number(pthread)
            tid = outside.get(number) if number else None
            if tid is not None and (tid not in states or (not self._frame(states[tid]) and self._frame(state))):
                states[tid] = state
        return states

    def _number(self, pthread: int) -> int | None:
        """The thread's number in its own namespace, of glibc's struct."""
        if self._fields["pthread_tid"] == NO_OFFSET:
            self._fields["pthread_tid"] = _find_pthread_tid(
                self.memory,
                [pthread for _, pthread, _ in _thread_states(self.memory, self._record)],
                set(_numbers_inside(self.pid).values()),
            )
            if self._fields["pthread_tid"] == NO_OFFSET:
                return None
        return self.memory.i32(pthread + self._fields["pthread_tid"])

    def _frame(self, state: int) -> int | None:
        """The frame that a thread is in; 0: none, None: unreadable."""
        frame = self.memory.u64(state + self._fields["thread_frame"])
        if frame and self._fields["cframe_frame"] != NO_OFFSET:
            return self.memory.u64(frame + self._fields["cframe_frame"])
        return frame

    def walk(self, tid: int, states: dict[int, int] | None = None) -> NDArray[np.void] | None:
        """The Python stack of a thread, leaf first, each frame as ``records.FRAME``.

        Right for a thread that stays blocked meanwhile; what is true of one that runs may be mixed, so the caller makes
        sure of it (the thread's count of context switches before and after is the same).

        Args:
            tid: The thread.
            states: ``thread_states``, when it is known already; it takes longer than the walk where threads are many.

        Returns:
            Empty: it has a state and runs no Python code. None: it has no state, its stack changed meanwhile or failed
            a check, or is deeper than ``MAX_FRAMES``.
        """
        state = (self.thread_states() if states is None else states).get(tid)
        if state is None:
            return None
        leaf = self._frame(state)
        if leaf is None:
            return None
        before = self.memory.read(leaf, self._fields["frame_bytes"]) if leaf else b""
        frames = self._walk(leaf)
        if frames is None or self._frame(state) != leaf:
            return None
        after = self.memory.read(leaf, self._fields["frame_bytes"]) if leaf else b""
        return frames if before == after else None

    def _walk(self, frame: int) -> NDArray[np.void] | None:
        f = self._fields
        rows: list[tuple[int, int, int, int, int]] = []
        has_owner = f["frame_owner"] != NO_OFFSET
        owners = (f["owner_entry"], f["owner_entry_2"])
        entry = True
        until = time.thread_time() + WALK_S
        for depth in range(MAX_FRAMES):
            if not frame:
                break
            if depth % 256 == 255 and time.thread_time() > until:
                return None
            data = self.memory.read(frame, f["frame_bytes"])
            if data is None:
                return None
            entry = has_owner and data[f["frame_owner"]] in owners
            frame = _U64.unpack_from(data, f["frame_previous"])[0]
            if entry and not f["entry_is_frame"]:
                if rows:
                    rows[-1] = (*rows[-1][:4], rows[-1][4] | FRAME_ENTRY)
                continue
            row = self._code(data)
            if row is None:
                return None
            if row[1] != -1:
                rows.append((*row[:4], row[4] | (FRAME_ENTRY if entry else 0)))
        # A stack that does not end in a frame that C code called in was cut: a generator that is being linked (3.12).
        if frame or (rows and has_owner and not entry):
            return None
        return np.array(rows, FRAME)

    def _code(self, frame: bytes) -> tuple[int, int, int, int, int] | None:
        """``FRAME`` of a frame's bytes; None: it holds no code object. A check of -1: to be left out."""
        f = self._fields
        tag = (1 << f["code_tag_bits"]) - 1
        code = _U64.unpack_from(frame, f["frame_code"])[0] & ~tag
        data = self.memory.read(code, f["code_bytes"])
        if data is None or _U64.unpack_from(data, layouts.OBJECT_TYPE)[0] != f["code_type"]:
            return None
        name, filename = (_U64.unpack_from(data, f[field])[0] for field in ("code_name", "code_filename"))
        linetable = _U64.unpack_from(data, f["code_linetable"])[0]
        qualname = 0 if f["code_qualname"] == NO_OFFSET else _U64.unpack_from(data, f["code_qualname"])[0]
        first = _U32.unpack_from(data, f["code_firstlineno"])[0] & ~FRAME_ENTRY
        if is_hidden(name, qualname, filename, first):
            return code, -1, 0, 0, 0
        limit = 1 << 31
        if f["code_adaptive"] == NO_OFFSET:
            instruction = _I32.unpack_from(frame, f["frame_instr"])[0] << f["instr_shift"]
        else:
            instruction = _U64.unpack_from(frame, f["frame_instr"])[0] - code - f["code_adaptive"]
            # ob_size counts units of two bytes (Include/cpython/code.h, _PyCode_NBYTES).
            limit = min(2 * _U64.unpack_from(data, layouts.OBJECT_SIZE)[0], limit)
        if not -2 <= instruction < limit:
            return None
        return code, check_of(name, qualname, filename, linetable), 0, max(instruction, -1) & 0xFFFFFFFF, first

    def collections(self) -> tuple[int, ...] | None:
        """How many times garbage was collected since the start: generation 0, 1, 2. None: unknown, or no number that a
        process can reach."""
        flag = self._fields["gc_collecting"]
        if not flag:
            return None
        table = self._table
        at: int | None = flag - table.gc_collecting + table.gc_statistics
        counts = []
        if table.gc_statistics_is_pointer:
            at = self.memory.u64(at or 0)
            for records, index in layouts.GC_RINGS:
                newest = self.memory.read((at or 0) + index, 1) if at else None
                if at is None or newest is None or newest[0] * layouts.GC_RING_RECORD >= index - records:
                    return None
                place = at + records + newest[0] * layouts.GC_RING_RECORD + layouts.GC_RING_COLLECTIONS
                counts.append(self.memory.u64(place))
        else:
            counts = [self.memory.u64((at or 0) + place) for place in table.gc_collections]
        if any(count is None or count > MAX_COUNT for count in counts):
            return None
        return tuple(count for count in counts if count is not None)

    def collecting(self) -> bool | None:
        """Whether garbage is being collected now; None: unknown."""
        flag = self._fields["gc_collecting"]
        value = self.memory.i32(flag) if flag else None
        return None if value is None else value != 0

    def gil_holder(self) -> int | None:
        """Number of the thread that holds the main interpreter's GIL now; 0: nobody, None: unknown."""
        holder, locked = self._fields["gil_holder"], self._fields["gil_locked"]
        if not holder:
            return None
        flag = self.memory.i32(locked)
        if flag is None:
            return None
        if flag <= 0:
            return 0
        state = self.memory.u64(holder)
        threads = {address: tid for tid, address in self.thread_states().items()}
        return threads.get(state) if state else None

    def close(self) -> None:
        """Lets go of the process's memory."""
        self.memory.close()
