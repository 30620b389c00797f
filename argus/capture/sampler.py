"""Samples the stacks of traced processes, on the CPU and off it: loads ``SOURCES``, gives it the processes to sample
and how their interpreters lie in memory, and takes what it counted.

A perf event on each CPU (cpu-clock, which needs no hardware counters) fires the sampling program; raw tracepoints of
the scheduler follow threads off the CPU. Both vanish with the process that made them, even if it is killed.

What the kernel counts (``counts``), and what else is looked at often (``records.BOARD``), lies in memory that both
sides have: a look at it is no system call.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import secrets
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from argus.capture import RAISED_RATE_HZ
from argus.capture.kernel import btf
from argus.capture.kernel.counts import CountLogs
from argus.capture.kernel.links import PERF_FLAG_FD_CLOEXEC
from argus.capture.kernel.programs import PERF_EVENT, RAW_TRACEPOINT, Module, attach_raw_tracepoint, cpus_of
from argus.capture.kernel.ring import Ring, VariableRing
from argus.capture.owners import OWNERS, ThreadOwners
from argus.capture.probes import _BCC_PAGE, MINIMUM_KERNEL, kernel_version, load_failure, module
from argus.model import records
from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.model.losses import UNKNOWN, Owner
from argus.model.records import StackCounter
from argus.system import privileges
from argus.system.resources import resource_dir
from argus.system.syscalls import SYS_BPF, SYS_PERF_EVENT_OPEN, system_call

LONG_OFF_NS = 95_000_000
"""From when on ``off_now`` lists a thread."""
FEW_THREADS = 64
"""So many are looked up one by one, at some microseconds each: reading a map visits all of its places, in 0.3 ms."""
LAST_GRACE_S = 0.05
"""Before the last reading: a host may take a virtual CPU away while a program runs."""
LEAST_ROWS, READ_S = 4096, 1.0
"""Room for what a CPU counts: at least, and for how long if every sample is of another stack. Half of that: the other
half is for times off the CPU, and for a reader that is late."""
WALK_NS = 10_000_000
"""After a stack was taken at a switch, and the thread came back before ``off_cpu_ns``: how long none is taken at the
same place. Stacks at any place that prove useless are limited to twice this rate."""
STACK_NS, STACKS_NS = 500_000, 2_000_000_000
"""Of an owner beside others: time for each stack that is new, and how much of it may be owed: 2,000 a second, and 4,000
at once, which is what the ring has room for. A rank that begins has some hundreds."""
STACK_RING_BYTES = 4 << 20
"""Room for some 4,000 stacks of 40 Python frames."""
CODE_RING_BYTES = 4 << 20
"""Room for some 4,000 code objects: those that a large job met in its first second."""
_STACK_BYTES = 1024
"""Of a usual one, 30 frames deep."""
KEPT_BYTES = 64 << 20
"""Of what is read while ``drain`` is not called."""
RELIEVED = 1 / 4
"""Part of a ring, or of a CPU's counts, from which on it is read for a ``drain`` that is late."""
PAUSE_RING_BYTES = 64 << 10
SEEN_ENTRIES = 65_536
CODE_ENTRIES = 32_768
BLOCK_ENTRIES = 131_072
"""Sixteen bytes of code each: the hottest 2 MiB of all traced processes."""
LEAF_ENTRIES = 16_384
"""Places without a believable chain: all functions that a few processes call the kernel from or compute in."""
_BLOCK_BYTES = 16
_MAX_BLOCKS = 4096
"""Of one function: one that is longer is folded around the place where it was met."""
THREAD_ENTRIES = 32_768
THREADS_EACH = 4096
"""Of one process: several times what a rank has on the largest nodes, and an eighth of the room for all."""

# enum bpf_cmd and ioctls of include/uapi/linux/bpf.h and perf_event.h.
_BPF_PROG_GET_NEXT_ID = 11
_BPF_ENABLE_STATS = 32
_PERF_TYPE_SOFTWARE = 1
_PERF_COUNT_SW_CPU_CLOCK = 0
_PERF_EVENT_IOC_ENABLE = 0x2400
_PERF_EVENT_IOC_DISABLE = 0x2401
_PERF_EVENT_IOC_PERIOD = 0x40082404
_PERF_EVENT_IOC_SET_BPF = 0x40042408

_THREAD = np.dtype(
    [
        *(
            (name, "<u8")
            for name in ("off_ns", "off_stack", "wake_ns", "on_ns", "ran_ns", "walk_ns", "off_site", "short_site")
        ),
        *((name, "<u8") for name in ("short_ns", "state", "search_ns", "sample_ns")),
        *((name, "<u8") for name in ("gc_begin_ns", "gc_end_ns", "gc_before_ns", "gc_stack")),
        *(
            (name, "<u4")
            for name in ("off_what", "pid", "ns_tid", "had_state", "unreadable", "sure", "owner", "unused")
        ),
        ("distrusted", "<u8"),
        ("long_sites", "<u8", (8, 2)),
    ]
)
"""``struct thread`` of bpf/stacks.bpf.h."""
_THREAD_ROW = np.dtype(
    [("tid", "<u4"), *((name, _THREAD[name]) for name in ("off_ns", "on_ns", "off_stack", "off_what", "pid", "owner"))]
)
SOURCES = (
    "stacks.bpf.h",
    "python_state.bpf.h",
    "python_walk.bpf.h",
    "native.bpf.h",
    "stacks_send.bpf.h",
    "stacks_count.bpf.h",
    "gc.bpf.h",
    "system_call.bpf.h",
    "sampled.bpf.c",
    "threads.bpf.c",
    "offcpu.bpf.c",
)
"""Files of ``bpf/`` that are one program text, in this order."""
_ROW: Final = ("walk", "finish", "send")
"""The programs that take a stack, in the order of their places: each goes over to the next."""
PROGRAMS: Final = {
    "on_sample": PERF_EVENT,
    **{f"{step}_sampled": PERF_EVENT for step in _ROW},
    **{f"on_{event}": RAW_TRACEPOINT for event in ("switch", "wakeup", "fork", "exec", "exit")},
    **{f"{step}_switched": RAW_TRACEPOINT for step in _ROW},
}
"""Those of ``SOURCES``: name -> kind."""
FOLLOWED: Final = {
    "forks": ("sched_process_fork", "on_fork"),
    "thread ends": ("sched_process_exit", "on_exit"),
    "execs": ("sched_process_exec", "on_exec"),
}
"""What is followed besides: its tracepoint and program. Without one the rest goes on."""
_TARGET_BITS, _THREADS_A_PAGE = 32768, 4096
"""TARGET_BITS and THREADS_A_PAGE of bpf/stacks.bpf.h."""
_MOST_THREAD_NUMBERS = 1 << 22
"""PID_MAX_LIMIT of include/linux/threads.h on 64 bits."""
_CLONES, _EXECS = (records.BOARD.fields[name][1] // 8 for name in ("clones", "execs"))  # type: ignore[index]
"""Words of ``records.BOARD``."""
_TARGET = "<QIIQ"
"""``struct target`` of bpf/stacks.bpf.h: refused, threads, owner, space."""
_NO_PAUSES = np.empty(0, records.PAUSE)


@dataclass
class RawStack:
    """One stack as the kernel walked it.

    Attributes:
        head: ``records.STACK``.
        frames: ``records.FRAME``, shape (n,), leaf first.
        native: User addresses, leaf first. [0] is where the thread was, or entered the kernel; the rest is the raw
            chain of frame pointers, which nobody has verified.
    """

    head: np.void
    frames: NDArray[np.void]
    native: NDArray[np.uint64]


@dataclass
class Drained:
    """What one call of ``StackProbes.drain`` brought.

    Attributes:
        counts: ``records.STACK_COUNT``, one row per (stack, thread, what) of the window that ended; empty between
            windows.
        stacks: Those that are new. A stack arrives with, or before, the first row that counts it.
        codes: What their code objects are called, those that are new: process, and what ``CodeResolver.learn`` takes. A
            code object arrives with, or before, the first stack that names it.
        pauses: ``records.PAUSE``.
    """

    counts: NDArray[np.void]
    stacks: list[RawStack]
    codes: list[tuple[int, NDArray[np.uint8]]]
    pauses: NDArray[np.void]


def _refusal(what: str, reason: OSError) -> ArgusError:
    """Why a program does not load. The verifier's refusal is EACCES too, but no matter of permission."""
    log = getattr(reason, "log", "")
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    verdict = next((i for i, line in enumerate(lines) if line.startswith("processed ") and "insns" in line), None)
    if verdict:
        return ArgusError(f"cannot {what}: the verifier refuses it: {lines[verdict - 1]}", "", EXIT_UNAVAILABLE)
    return load_failure(what, log, reason)


@contextlib.contextmanager
def run_time_statistics() -> Iterator[None]:
    """While it lasts the kernel measures the run time of all BPF programs, which costs each run some 20-50 ns.

    Raises:
        OSError: Not permitted.
    """
    if privileges.statistics_fd >= 0:
        yield  # it does until this process ends
        return
    fd = system_call(SYS_BPF, _BPF_ENABLE_STATS, ctypes.byref(ctypes.create_string_buffer(16)), 16)
    try:
        yield
    finally:
        os.close(fd)


def program_ids() -> set[int]:
    """Numbers of all BPF programs that are loaded in this kernel."""
    ids: set[int] = set()
    request = ctypes.create_string_buffer(16)
    number = 0
    while True:
        struct.pack_into("<II", request, 0, number, 0)
        try:
            system_call(SYS_BPF, _BPF_PROG_GET_NEXT_ID, ctypes.byref(request), 16)
        except OSError as reason:
            if reason.errno == errno.ENOENT:
                return ids
            raise
        number = struct.unpack_from("<II", request.raw)[1]
        ids.add(number)


def _thread_numbers() -> int:
    """How many numbers threads can have."""
    try:
        return min(int(Path("/proc/sys/kernel/pid_max").read_text()), _MOST_THREAD_NUMBERS)
    except (OSError, ValueError):
        return _MOST_THREAD_NUMBERS


def online_cpus() -> list[int]:
    """CPUs in use."""
    return cpus_of(Path("/sys/devices/system/cpu/online").read_text())


class StackProbes:
    """The stack sampler's BPF programs and maps.

    Args:
        rate_hz: Samples a second on each CPU, until ``set_rate``; 0: none.
        off_cpu_ns: Shortest time off the CPU that is counted; None: none is.
        python: Walk Python stacks too.
        stack_ring_bytes: Room for new stacks: a power of two.
        walk_ns: see ``WALK_NS``.
        btf_path: The kernel's types.

    Attributes:
        state: "sampling" and "off-cpu": "on", "off: why" or "failed: why"; of ``FOLLOWED``, those that failed.
        period_ns: Time that one sample stands for now.
        owners: Whose threads are followed, and what they had the programs do.
        longest_poll_s: So often ``drain`` is to be called, or rings may overflow if every sample is a new stack.

    Raises:
        ArgusError: Neither samples nor times off the CPU can be had.
    """

    def __init__(
        self,
        *,
        rate_hz: int = RAISED_RATE_HZ,
        off_cpu_ns: int | None = 1_000_000,
        python: bool = True,
        stack_ring_bytes: int = STACK_RING_BYTES,
        walk_ns: int = WALK_NS,
        btf_path: Path = btf.VMLINUX,
    ) -> None:
        if kernel_version() < MINIMUM_KERNEL:
            raise ArgusError(f"Linux {os.uname().release} is too old: stacks need 5.15", "", EXIT_UNAVAILABLE)
        if rate_hz == 0 and off_cpu_ns is None:
            raise ValueError("nothing to sample")
        self.state = {"sampling": "off: not asked for", "off-cpu": "off: not asked for"}
        self.period_ns = 1_000_000_000 // rate_hz if rate_hz else 0
        self._python = python
        self._events: list[int] = []
        self._tracepoints: dict[str, int] = {}
        types, no_types = self._types(btf_path)
        cpus = online_cpus()
        possible = max(cpus_of(Path("/sys/devices/system/cpu/possible").read_text())) + 1
        rows = 1 << max(LEAST_ROWS, int(4 * READ_S * rate_hz)).bit_length() - 1
        definitions = {
            "ARGUS_STACK_PAGES": stack_ring_bytes // _BCC_PAGE,
            "ARGUS_CODE_PAGES": CODE_RING_BYTES // _BCC_PAGE,
            "ARGUS_PAUSE_PAGES": PAUSE_RING_BYTES // _BCC_PAGE,
            "ARGUS_CPUS": possible,
            "ARGUS_ROWS": rows,
            "ARGUS_THREADS": THREAD_ENTRIES,
            "ARGUS_THREADS_EACH": THREADS_EACH,
            "ARGUS_THREAD_OWNERS": OWNERS,
            "ARGUS_STACK_NS": f"{STACK_NS}ull",
            "ARGUS_STACKS_NS": f"{STACKS_NS}ull",
            "ARGUS_THREAD_PAGES": -(-_thread_numbers() // _THREADS_A_PAGE),
            "ARGUS_SEEN": SEEN_ENTRIES,
            "ARGUS_CODES": CODE_ENTRIES,
            "ARGUS_BLOCKS": BLOCK_ENTRIES,
            "ARGUS_LEAVES": LEAF_ENTRIES,
            "ARGUS_OFF_CPU_NS": f"{off_cpu_ns or 0}ull",
            "ARGUS_WALK_NS": f"{walk_ns}ull",
            **types,
        }
        self._module = self._compile(definitions)
        self._stack_ring_bytes, self._cpus = stack_ring_bytes, len(cpus)
        try:
            self._counts = CountLogs(self._map_fd("logs"), possible, rows)
            self._board_map = mmap.mmap(self._map_fd("board"), mmap.PAGESIZE)
            self._board = np.frombuffer(self._board_map, records.BOARD, 1)
            self._made = memoryview(self._board_map).cast("Q")
            self._set_period(rate_hz)
            self._load(rate_hz, off_cpu_ns, cpus, no_types)
            self._stacks = VariableRing(self._map_fd("stacks"), stack_ring_bytes)
            self._codes = VariableRing(self._map_fd("codes"), CODE_RING_BYTES)
            self._pauses = Ring(self._map_fd("pauses"), PAUSE_RING_BYTES, records.PAUSE)
        except BaseException:
            self._detach()
            self._module.close()
            raise
        self._lock = threading.Lock()
        self._kept: list[Drained] = []
        self._kept_bytes = self._counted_ns = 0
        self._closed = False
        self._spaces: dict[int, int] = {}
        self.owners = ThreadOwners(self._module)
        self._thread_states: dict[int, dict[int, int]] = {}
        self._with_python: set[int] = set()

    # --- setting up

    @staticmethod
    def _types(path: Path) -> tuple[dict[str, int], str]:
        """Offsets for the programs, or why there are none."""
        try:
            kernel = btf.kernel(path)
            return {
                "ARGUS_TASK_PID": kernel.offset("task_struct", "pid"),
                "ARGUS_TASK_STATE": kernel.offset("task_struct", "__state"),
                "ARGUS_TASK_RAN": kernel.offset("task_struct", "se")
                + kernel.offset("sched_entity", "sum_exec_runtime"),
                "ARGUS_PREV_STATE": int(kernel.tracepoint_arguments("sched_switch") >= 4),
            }, ""
        except (OSError, btf.BtfError) as failure:
            return {}, btf.why_unreadable(path, failure)

    def _compile(self, definitions: dict[str, Any]) -> Module:
        directory = resource_dir("bpf")
        text = "\n".join((directory / name).read_text() for name in SOURCES)
        flags = ["-D__BPF__", *(f"-D{name}={value}" for name, value in definitions.items())]
        return module(text, flags, "compile the BPF programs for stacks")

    def _load(self, rate_hz: int, off_cpu_ns: int | None, cpus: list[int], no_types: str) -> None:
        failure: ArgusError | None = None
        if off_cpu_ns is not None:
            self.state["off-cpu"] = no_types or "on"
            if not no_types:
                try:
                    self._load_row("switch_programs", "switched")
                    self._attach_tracepoint("sched_switch", "on_switch")
                    self._attach_tracepoint("sched_wakeup", "on_wakeup")
                except ArgusError as reason:
                    failure = reason
                    self._detach()
                    self.state["off-cpu"] = f"failed: {reason.message}"
        if rate_hz:
            try:
                self._sample(cpus)
                self.state["sampling"] = "on"
            except ArgusError as reason:
                failure = reason
                self.state["sampling"] = f"failed: {reason.message}"
        if "on" not in self.state.values():
            if failure is None:
                why = self.state["off-cpu"].partition(": ")[2]
                failure = ArgusError(f"no stacks can be sampled: {why}", "", EXIT_UNAVAILABLE)
            raise failure
        for what, (tracepoint, program) in FOLLOWED.items():
            try:
                self._attach_tracepoint(tracepoint, program)
            except ArgusError as reason:
                self.state[what] = f"failed: {reason.message}"

    def _attach_tracepoint(self, tracepoint: str, program: str) -> None:
        try:
            fd = self._module.load(program, PROGRAMS[program])
            self._tracepoints[tracepoint] = attach_raw_tracepoint(tracepoint, fd)
        except OSError as reason:
            raise _refusal(f"follow {tracepoint}", reason) from reason

    def _load_program(self, name: str) -> int:
        try:
            return self._module.load(name, PROGRAMS[name])
        except OSError as reason:
            raise _refusal(f"load the program {name}", reason) from reason

    def _load_row(self, table: str, ending: str) -> None:
        for place, step in enumerate(_ROW):
            self._module[table].set(place, self._load_program(f"{step}_{ending}"))

    def _sample(self, cpus: list[int]) -> None:
        self._load_row("sample_programs", "sampled")
        program = self._load_program("on_sample")
        for cpu in cpus:
            try:
                self._events.append(self._open_event(cpu, program))
            except OSError as reason:
                if reason.errno == errno.ENODEV:  # taken off line just now
                    continue
                for event in self._events:
                    os.close(event)
                self._events.clear()
                if reason.errno in (errno.EPERM, errno.EACCES):
                    hint = "Run Argus with sudo (or with CAP_PERFMON and CAP_BPF)"
                    raise ArgusError("no permission to sample CPUs", hint, EXIT_UNAVAILABLE) from reason
                text = f"the kernel refuses to sample CPU {cpu}: {reason.strerror}"
                raise ArgusError(text, "", EXIT_UNAVAILABLE) from reason

    def _open_event(self, cpu: int, program: int) -> int:
        # struct perf_event_attr: type, size, config, sample_period, sample_type, read_format, flags (bit 0: disabled).
        attribute = bytearray(112)
        struct.pack_into("<IIQQ", attribute, 0, _PERF_TYPE_SOFTWARE, 112, _PERF_COUNT_SW_CPU_CLOCK, self.period_ns)
        struct.pack_into("<Q", attribute, 40, 1)
        buffer = (ctypes.c_char * len(attribute)).from_buffer(attribute)
        event = system_call(
            SYS_PERF_EVENT_OPEN,
            ctypes.byref(buffer),
            ctypes.c_int(-1),
            ctypes.c_int(cpu),
            ctypes.c_int(-1),
            ctypes.c_ulong(PERF_FLAG_FD_CLOEXEC),
        )
        try:
            fcntl.ioctl(event, _PERF_EVENT_IOC_SET_BPF, program)
            fcntl.ioctl(event, _PERF_EVENT_IOC_ENABLE, 0)
        except OSError:
            os.close(event)
            raise
        return event

    def _set_period(self, rate_hz: int) -> None:
        self.period_ns = 1_000_000_000 // rate_hz if rate_hz else 0
        self.longest_poll_s = self._stack_ring_bytes / (2 * _STACK_BYTES * max(rate_hz, 1) * self._cpus)
        self._board["period_ns"] = self.period_ns

    def set_rate(self, rate_hz: int) -> None:
        """Samples so many times a second from now on, if it samples at all.

        What is counted is weighed by the rate of its moment; a sample taken meanwhile, one a CPU at most, by either.

        Args:
            rate_hz: Above 0.

        Raises:
            OSError: The kernel refuses.
        """
        if not self._events:
            return
        self._set_period(rate_hz)
        for event in self._events:
            fcntl.ioctl(event, _PERF_EVENT_IOC_PERIOD, struct.pack("<Q", self.period_ns))

    def _map_fd(self, name: str) -> int:
        return self._module[name].fd

    # --- whom to look at

    def add_target(self, pid: int, owner: Owner = UNKNOWN) -> None:
        """Takes stacks of a process: native ones, until ``set_python``. Called again, its stacks have new numbers."""
        refused, threads, *_ = self._target(pid) if pid in self._spaces else (0, 0)
        number = self.owners.add(pid, owner)
        self._spaces[pid] = secrets.randbits(64)
        self._module["stack_targets"].set(pid, struct.pack(_TARGET, refused, threads, number, self._spaces[pid]))
        self._publish_targets()

    def _publish_targets(self) -> None:
        bits = np.zeros(_TARGET_BITS, bool)
        bits[np.fromiter(self._spaces, np.int64, len(self._spaces)) % _TARGET_BITS] = True
        self._module["targets_known"].set(0, np.packbits(bits, bitorder="little").tobytes())

    def set_function(self, pid: int, begin: int, end: int, near: int) -> None:
        """Notes where a function of a process lies: where in it a thread is no longer makes stacks different. Holds
        until the next ``add_target``.

        Args:
            pid: The process.
            begin, end: Addresses. Nothing of another function may lie between.
            near: Where it was met.
        """
        first, last = -(-begin // _BLOCK_BYTES), end // _BLOCK_BYTES
        first = max(first, min(near // _BLOCK_BYTES - _MAX_BLOCKS // 2, last - _MAX_BLOCKS))
        last = min(last, first + _MAX_BLOCKS)
        if first >= last or pid not in self._spaces:
            return
        keys = np.empty((last - first, 2), "<u8")
        keys[:, 0] = np.arange(first, last, dtype=np.uint64)
        keys[:, 1] = self._spaces[pid]
        self._module["blocks"].update(keys, np.full(last - first, begin, "<u8"))

    def set_leaf_only(self, pid: int, place: int) -> None:
        """Notes that of stacks with this leaf the chain of frame pointers is not to be kept. Holds until the next
        ``add_target``.

        Args:
            pid: The process.
            place: ``RawStack.native[0]``.
        """
        if pid in self._spaces:
            key = struct.pack("<QQ", place, self._spaces[pid])
            self._module["leaf_only"].set(key, 1)

    def set_python(self, pid: int, layout: NDArray[np.void]) -> None:
        """Takes Python stacks of a process too. Before ``add_target``, or its first samples have none.

        Args:
            pid: The process.
            layout: One ``records.PYTHON``, shape () or (1,).
        """
        if not self._python:
            return
        # The states of its threads may have been of the program that it ran before.
        self._forget_states(self._thread_states.pop(pid, {}).keys() | set())
        value = np.ascontiguousarray(np.asarray(layout, records.PYTHON).reshape(1))
        self._module["pythons"].update(np.array([pid], "<u4"), value)
        self._with_python.add(pid)

    def without_python(self) -> set[int]:
        """Processes for which ``set_python`` was called, and that have executed another program since."""
        table = self._module["pythons"]
        return {pid for pid in self._with_python if table.get(pid) is None}

    def set_threads(self, pid: int, states: dict[int, int]) -> None:
        """Notes where thread states are, which saves the kernel a search and finds those at the end of long lists.

        Args:
            pid: The process.
            states: Thread (root namespace) -> address of its thread state. Replaces those of before.
        """
        before = self._thread_states.get(pid, {})
        states = dict(itertools.islice(states.items(), THREADS_EACH))
        new = {tid: state for tid, state in states.items() if before.get(tid) != state}
        if new:
            keys = np.fromiter(new.keys(), "<u4", len(new))
            self._module["thread_states"].update(keys, np.fromiter(new.values(), "<u8", len(new)))
        self._forget_states(before.keys() - states.keys())
        self._thread_states[pid] = dict(states)

    def _forget_states(self, tids: set[int]) -> None:
        table = self._module["thread_states"]
        for tid in tids:
            table.delete(tid)

    def remove_target(self, pid: int) -> None:
        """Forgets a process: its PID may be another's soon. What was counted stays for the next ``drain``."""
        for name in ("stack_targets", "pythons"):
            self._module[name].delete(pid)
        self._with_python.discard(pid)
        self._spaces.pop(pid, None)
        self._publish_targets()
        self._forget_states(self._thread_states.pop(pid, {}).keys() | set())
        rows = self._thread_rows()
        for tid in rows["tid"][rows["pid"] == pid].tolist():
            self._module["threads"].delete(tid)
        self.owners.remove(pid, self._thread_rows()["owner"])

    def over_share(self, pid: int) -> int:
        """Samples and switches of a process's threads beyond its share (``StackCounter.THREADS_OVER_SHARE``)."""
        return self._target(pid)[0]

    def _target(self, pid: int) -> tuple[int, ...]:
        value = self._module["stack_targets"].get(pid)
        return (0, 0, 0, 0) if value is None else struct.unpack(_TARGET, value)

    def _thread_rows(self, tids: Sequence[int] | None = None) -> NDArray[np.void]:
        """What is known of these threads, or of all: some columns of ``_THREAD``, and "tid"."""
        table = self._module["threads"]
        if tids is not None and len(tids) <= FEW_THREADS:
            rows_of = [(tid, value) for tid in tids if (value := table.get(tid)) is not None]
            numbers = np.array([tid for tid, _ in rows_of], "<u4")
            thread = np.frombuffer(b"".join(value for _, value in rows_of), _THREAD)
        else:
            keys, values = table.read()
            numbers, thread = keys.view("<u4")[:, 0], values.view(_THREAD)[:, 0]
        rows = np.empty(len(numbers), _THREAD_ROW)
        rows["tid"] = numbers
        for name in _THREAD_ROW.names[1:]:  # type: ignore[index]
            rows[name] = thread[name]
        return rows

    # --- results

    def drain(self, *, final: bool = False) -> Drained:
        """Takes what came since the last call. Call it after ``longest_poll_s`` at the latest.

        Args:
            final: Stop sampling, and take all there is. Nothing comes after it. Of threads that are off the CPU then
                only ``off_now`` shows.
        """
        if final:
            self._stop()
        with self._lock:
            drained = self._read(final=final)
            kept, self._kept, self._kept_bytes = self._kept, [], 0
            self._counted_ns = self._counts.until_ns
        if not kept:
            return drained
        parts = [*kept, drained]
        return Drained(
            np.concatenate([part.counts for part in parts]),
            list(itertools.chain.from_iterable(part.stacks for part in parts)),
            list(itertools.chain.from_iterable(part.codes for part in parts)),
            np.concatenate([part.pauses for part in parts]),
        )

    def relieve(self) -> None:
        """Reads what is new and keeps it for ``drain``, whose turn it is, if there is much and room for it. Any thread
        may call it, and it waits for nothing. Without room the kernel counts what its rings do not hold."""
        with self._lock:
            if self._closed or self._kept_bytes > KEPT_BYTES or max(self.used, self.counts_used) < RELIEVED:
                return
            drained = self._read(final=False)
            self._kept.append(drained)
            self._kept_bytes += drained.counts.nbytes + _STACK_BYTES * (len(drained.stacks) + len(drained.codes))

    def _read(self, *, final: bool) -> Drained:
        # Counts first: a stack is sent before the window in which it is counted is over.
        rows = self._counts.take(time.monotonic_ns(), final=final)
        if not self.used:
            return Drained(rows, [], [], _NO_PAUSES)
        # Stacks first: what its frames are called is sent before it.
        stacks = [self._stack(record) for record in self._stacks.drain()]
        return Drained(rows, stacks, [self._code(record) for record in self._codes.drain()], self._pauses.drain())

    @property
    def used(self) -> float:
        """Part of the fullest of its rings that waits to be drained, 0 to 1."""
        return max(self._stacks.used, self._codes.used, self._pauses.used)

    @property
    def counts_used(self) -> float:
        """The same of the fullest CPU's counts."""
        return self._counts.used

    @property
    def counted_ns(self) -> int:
        """All that was counted before, by CLOCK_MONOTONIC, has been drained."""
        return self._counted_ns

    def _stop(self) -> None:
        for event in self._events:
            os.close(event)
        self._events.clear()
        self._board["ended"] = 1
        time.sleep(LAST_GRACE_S)

    @staticmethod
    def _code(record: NDArray[np.uint8]) -> tuple[int, NDArray[np.uint8]]:
        return int(record[: records.CODE.itemsize].view(records.CODE)["pid"][0]), record

    @staticmethod
    def _stack(record: NDArray[np.uint8]) -> RawStack:
        head = record[: records.STACK.itemsize].view(records.STACK)[0]
        frames_at = records.STACK.itemsize
        native_at = frames_at + int(head["python_frames"]) * records.FRAME.itemsize
        return RawStack(head, record[frames_at:native_at].view(records.FRAME), record[native_at:].view("<u8"))

    def off_now(self, longer_than_ns: int = LONG_OFF_NS, tids: Sequence[int] | None = None) -> NDArray[np.void]:
        """Threads that have been off the CPU for long: no row of ``counts`` has that until they are back.

        Args:
            longer_than_ns: For how long.
            tids: All threads that there are, and some more perhaps; None: not known.

        Returns:
            ``records.OFF_NOW``, shape (n,). Threads that went off before their process was added are not among them.
        """
        rows = self._thread_rows(tids)
        now = time.monotonic_ns()
        is_off = (rows["off_ns"] != 0) & (rows["on_ns"] < rows["off_ns"])
        rows = rows[is_off & (rows["off_ns"] + longer_than_ns < now)]
        out = np.zeros(len(rows), records.OFF_NOW)
        for ours, kernel_name in {
            "stack": "off_stack",
            "pid": "pid",
            "tid": "tid",
            "since_ns": "off_ns",
            "what": "off_what",
        }.items():
            out[ours] = rows[kernel_name]
        return out

    def follow_waits(self, owner: Owner, on: bool) -> None:
        """Whether an owner's threads are followed off the CPU from now on, if they are at all: those that are off it
        now are reported when they come back."""
        self.owners.rest(owner, on=not on)

    def execs(self) -> int:
        """How often a traced process has executed another program."""
        return self._made[_EXECS]

    def clones(self) -> int:
        """How often a traced process has made a process or a thread."""
        return self._made[_CLONES]

    def counters(self) -> dict[StackCounter, int]:
        """What the kernel side counted so far, summed over CPUs."""
        of_cpus = np.frombuffer(self._module["stack_counters"].get(0) or b"", "<u8").reshape(-1, len(StackCounter))
        return dict(zip(StackCounter, of_cpus.sum(axis=0).tolist(), strict=True))

    def cpu_ns(self) -> int:
        """Time that its programs have run for, where the kernel measures it (``run_time_statistics``); else 0."""
        return sum(nanoseconds for nanoseconds, _ in self.run_times().values())

    def run_times(self) -> dict[str, tuple[int, int]]:
        """The same, program by program: (ns, runs)."""
        return self._module.run_times()

    def _detach(self) -> None:
        for event in self._events:
            os.close(event)
        self._events.clear()
        for fd in self._tracepoints.values():
            os.close(fd)
        self._tracepoints.clear()

    def close(self) -> None:
        """Takes the programs away and frees the maps."""
        with self._lock:
            self._closed = True
        self._detach()
        self._stacks.close()
        self._codes.close()
        self._pauses.close()
        self._counts.close()
        self._made.release()
        del self._board  # numpy's views keep the map open
        self._board_map.close()
        self._module.close()
