"""What every thread of some processes does at one instant, without stopping any of them.

A thread that waits is read from outside: its stack cannot change before it runs, and the kernel's count of its switches
shows whether it ran meanwhile. A thread that runs is sampled in the kernel, some hundred times a second, for a moment.
What the processes have written is read in the reader process (``argus.capture.reader``), as in a trace.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from argus.capture.blocked import Blocked, assemble, read_blocked
from argus.capture.process.symbols import Symbols
from argus.capture.process.targets import PROC, inspect
from argus.capture.python.code import CodeResolver
from argus.capture.python.interpreter import Interpreter, PythonProcess, find_interpreter
from argus.capture.reader import reader
from argus.capture.reader.remote import RemotePython, RemoteResolver, RemoteSymbols
from argus.capture.sampler import RawStack, StackProbes
from argus.live.sampling.process import symbols_of
from argus.model import records
from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.model.stacks import Stack
from argus.system.limits import frugal, raise_descriptor_limit
from argus.system.proc import read_file

RATE_HZ = 997
"""Of the sampler while it lasts: a thread that runs is met within milliseconds."""
SAMPLE_S = 0.4
"""How long threads that run are waited for."""
WAIT_S = 1.0
"""How long those are looked at that no sample met. A thread that mostly sleeps is, on a busy node, ready for long, and
runs for microseconds."""


@dataclass(frozen=True)
class ThreadStack:
    """A thread at one instant.

    Attributes:
        pid, tid: As the host numbers them.
        name: Of the thread.
        state: "running", "waiting", "stopped" (a signal or a debugger), or "unknown".
        reason: What it waits for (``argus.capture.offcpu``); empty: it runs.
        gil: Whether it holds the GIL.
        stack: None: it could not be read, ``note`` says why.
        note: For people: also why a stack lacks its Python frames, where that is so of the whole process.
    """

    pid: int
    tid: int
    name: str
    state: str
    reason: str = ""
    gil: bool = False
    stack: Stack | None = None
    note: str = ""


@dataclass
class _Process:
    pid: int
    symbols: Symbols | RemoteSymbols
    interpreter: Interpreter | None = None
    python: PythonProcess | RemotePython | None = None
    resolver: CodeResolver | RemoteResolver | None = None
    unread: bool = False

    @classmethod
    def open(cls, pid: int) -> _Process:
        inspect(pid).close()  # refuses what cannot be read: threads, zombies, the kernel's own
        try:
            process = cls(pid, symbols_of(pid))
            process._find_python()
        except PermissionError as reason:
            raise ArgusError(f"process {pid} cannot be inspected", "Run Argus with sudo", EXIT_UNAVAILABLE) from reason
        except OSError as reason:
            raise ArgusError(f"process {pid} does not exist, or has just ended", "", EXIT_UNAVAILABLE) from reason
        return process

    def _find_python(self) -> None:
        if isinstance(self.symbols, RemoteSymbols):
            try:
                self.interpreter = self.symbols.find_python()
            except reader.Unreadable:
                self.unread = True
            if self.interpreter is not None and self.interpreter.layout is not None:
                self.python, self.resolver = RemotePython(self.symbols), RemoteResolver(self.symbols)
            return
        self.interpreter = find_interpreter(self.pid)
        if self.interpreter is not None and self.interpreter.layout is not None:
            self.python = PythonProcess(self.pid, self.interpreter)
            self.resolver = CodeResolver(self.python, self.interpreter.layout)

    def blocked(self, tid: int, states: dict[int, int] | None) -> Blocked | None:
        """What a thread that does not run is doing; None: it runs.

        Args:
            tid: The thread.
            states: Of its CPython's threads, where they were read.

        Raises:
            OSError: The thread has ended, or may not be looked at.
        """
        if isinstance(self.symbols, RemoteSymbols):
            return self.symbols.blocked(tid)
        assert not isinstance(self.python, RemotePython)
        assert not isinstance(self.resolver, RemoteResolver)
        layout = self.interpreter.layout if self.interpreter is not None else None
        return read_blocked(self.pid, tid, self.symbols, self.python, self.resolver, layout, states)

    def assemble(self, raw: RawStack) -> Stack:
        """A sampled stack with names.

        Raises:
            OSError: The process has ended.
        """
        flags = int(raw.head["flags"])
        if isinstance(self.symbols, RemoteSymbols):
            return self.symbols.assemble(raw.frames, raw.native, flags)
        assert not isinstance(self.resolver, RemoteResolver)
        return assemble(self.symbols, self.resolver, raw.frames, raw.native, flags)

    @property
    def note(self) -> str:
        """Why none of its stacks has Python frames; empty: they have, or no Python runs in it."""
        if self.unread:
            return "Python frames are unknown: its memory or its files do not answer"
        if self.interpreter is None or self.python is not None:
            return ""
        return f"Python frames are {self.interpreter.state}"

    def close(self) -> None:
        if self.python is not None:
            self.python.close()
        self.symbols.close()


def dump(pids: Iterable[int], discovered: Iterable[int] = ()) -> list[ThreadStack]:
    """Every thread of these processes, in the order of process and thread numbers.

    Args:
        pids: Processes that somebody has named.
        discovered: Others. One that cannot be looked at is one thread without a stack, and a note why: of a job
            with a rank that died, the rest is seen all the same.

    Raises:
        ArgusError: A process of ``pids`` does not exist, or may not be looked at.
    """
    raise_descriptor_limit()
    with reader.shared.entered(), frugal():
        return _dump(pids, discovered)


def _dump(pids: Iterable[int], discovered: Iterable[int]) -> list[ThreadStack]:
    processes: list[_Process] = []
    refused: list[ThreadStack] = []
    probes: StackProbes | None = None
    try:
        for pid in pids:
            processes.append(_Process.open(pid))
        for pid in discovered:
            try:
                processes.append(_Process.open(pid))
            except ArgusError as failure:
                refused.append(ThreadStack(pid, pid, "", "unknown", note=failure.message))
        stacks = {key: stack for process in processes for key, stack in _waiting(process).items()}
        running = {key for key, one in stacks.items() if one.stack is None and one.state == "running"}
        if running:
            why = ""
            try:
                probes = StackProbes(rate_hz=RATE_HZ, off_cpu_ns=None)
            except ArgusError as failure:
                why = f"it runs, and cannot be sampled: {failure.message}"
            if probes is not None:
                stacks |= _running(processes, probes, running, stacks)
                stacks |= _not_met(processes, {key for key in running if stacks[key].stack is None})
                why = "it ran, and was not met on a CPU"
            for key in running:
                if stacks[key].stack is None:
                    stacks[key] = replace(stacks[key], note=why)
        notes = {process.pid: process.note for process in processes}
        threads = [replace(one, note=one.note or notes[one.pid]) for one in stacks.values()]
        return sorted(threads + refused, key=lambda one: (one.pid, one.tid))
    finally:
        if probes is not None:
            probes.close()
        for process in processes:
            process.close()


def _waiting(process: _Process, only: set[tuple[int, int]] | None = None) -> dict[tuple[int, int], ThreadStack]:
    """Threads of a process, with the stacks of those that do not run."""
    stacks = {}
    holder = process.python.gil_holder() if process.python is not None else None
    # A reader has them for itself.
    states = process.python.thread_states() if isinstance(process.python, PythonProcess) else None
    for tid in _threads(process.pid):
        if only is None or (process.pid, tid) in only:
            one = _read(process, tid, states)
            if one is not None:
                stacks[(process.pid, tid)] = replace(one, gil=holder == tid)
    return stacks


def _read(process: _Process, tid: int, states: dict[int, int] | None) -> ThreadStack | None:
    """One thread; None: it has ended."""
    try:
        comm = read_file(f"{PROC}/{process.pid}/task/{tid}/comm")
        name = comm.removesuffix(b"\n").decode(errors="replace")
        blocked = process.blocked(tid, states)
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError as failure:
        return ThreadStack(process.pid, tid, "", "unknown", note=f"it may not be read: {failure.strerror}")
    if blocked is None:
        return ThreadStack(process.pid, tid, name, "running")
    state = "stopped" if blocked.stopped else "waiting"
    return ThreadStack(process.pid, tid, name, state, blocked.reason, stack=blocked.stack)


def _running(
    processes: list[_Process],
    probes: StackProbes,
    wanted: set[tuple[int, int]],
    waiting: dict[tuple[int, int], ThreadStack],
) -> dict[tuple[int, int], ThreadStack]:
    """Stacks of threads that run, sampled until each was met or the time is up."""
    by_pid = {process.pid: process for process in processes}
    for pid in {pid for pid, _ in wanted}:
        process = by_pid[pid]
        if process.interpreter is not None and process.interpreter.layout is not None and process.python is not None:
            probes.set_python(pid, process.interpreter.layout)
            probes.set_threads(pid, process.python.thread_states())
        probes.add_target(pid)  # last, or the first samples would lack their Python stacks
    stacks: dict[tuple[int, int], ThreadStack] = {}
    raw: dict[int, RawStack] = {}
    deadline = time.monotonic() + SAMPLE_S
    while wanted - stacks.keys():
        final = time.monotonic() >= deadline
        drained = probes.drain(final=final)
        for pid, code in drained.codes:
            resolver = by_pid[pid].resolver
            if resolver is not None:
                resolver.learn(code)
        raw |= {int(one.head["stack"]): one for one in drained.stacks}
        for row in _newest(drained.counts):
            key = (int(row["pid"]), int(row["tid"]))
            one = raw.get(int(row["stack"]))
            if key not in wanted or one is None:
                continue
            process = by_pid[key[0]]
            with contextlib.suppress(OSError):
                stack = process.assemble(one)
                holds = bool(int(row["what"]) & records.WHAT_GIL)
                stacks[key] = replace(waiting[key], stack=stack, gil=holds)
        if final:
            break
        time.sleep(0.01)
    return stacks


def _not_met(processes: list[_Process], missing: set[tuple[int, int]]) -> dict[tuple[int, int], ThreadStack]:
    """Stacks of threads that did not run after all, or only for a moment: they wait at some time."""
    found: dict[tuple[int, int], ThreadStack] = {}
    deadline = time.monotonic() + WAIT_S
    while missing:
        looked: dict[tuple[int, int], ThreadStack] = {}
        for process in processes:
            if only := {key for key in missing if key[0] == process.pid}:
                looked |= _waiting(process, only)
        found |= {key: one for key, one in looked.items() if one.stack is not None}
        missing = {key for key, one in looked.items() if one.stack is None}  # others have ended
        if time.monotonic() >= deadline:
            break
        time.sleep(0.01)
    return found


def _newest(counts: NDArray[np.void]) -> NDArray[np.void]:
    """Samples on the CPU, the newest last."""
    chosen: NDArray[np.void] = counts[(counts["what"] & records.WHAT_OFF) == 0]
    return chosen[np.argsort(chosen["last_ns"], kind="stable")]


def _threads(pid: int) -> list[int]:
    try:
        return sorted(int(entry.name) for entry in (PROC / str(pid) / "task").iterdir())
    except OSError:
        return []
