"""What every thread of some processes does at one instant, without stopping any of them.

A thread that waits is read from outside: its stack cannot change before it runs, and the kernel's count of its switches
shows whether it ran meanwhile. A thread that runs is sampled in the kernel, some hundred times a second, for a moment.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from argus.capture.blocked import assemble, read_blocked
from argus.capture.process.symbols import Symbols
from argus.capture.process.targets import PROC, inspect
from argus.capture.python.code import CodeResolver
from argus.capture.python.interpreter import Interpreter, PythonProcess, find_interpreter
from argus.capture.sampler import RawStack, StackProbes
from argus.model import records
from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.model.stacks import Stack

RATE_HZ = 997
"""Of the sampler while it lasts: a thread that runs is met within milliseconds."""
SAMPLE_S = 0.4
"""How long threads that run are waited for."""


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
    symbols: Symbols
    interpreter: Interpreter | None
    python: PythonProcess | None = None
    resolver: CodeResolver | None = None

    @classmethod
    def open(cls, pid: int) -> _Process:
        inspect(pid).close()  # refuses what cannot be read: threads, zombies, the kernel's own
        try:
            interpreter = find_interpreter(pid)
            process = cls(pid, Symbols(pid), interpreter)
            if interpreter is not None and interpreter.layout is not None:
                process.python = PythonProcess(pid, interpreter)
                process.resolver = CodeResolver(process.python, interpreter.layout)
        except PermissionError as reason:
            raise ArgusError(f"process {pid} cannot be inspected", "Run Argus with sudo", EXIT_UNAVAILABLE) from reason
        except OSError as reason:
            raise ArgusError(f"process {pid} does not exist, or has just ended", "", EXIT_UNAVAILABLE) from reason
        return process

    @property
    def note(self) -> str:
        """Why none of its stacks has Python frames; empty: they have, or no Python runs in it."""
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
                # A thread that did not run after all waits now.
                for process in processes:
                    missing = {key for key in running if key[0] == process.pid and stacks[key].stack is None}
                    if missing:
                        stacks |= {key: one for key, one in _waiting(process, missing).items() if one.stack is not None}
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
    states = process.python.thread_states() if process.python is not None else None
    for tid in _threads(process.pid):
        if only is None or (process.pid, tid) in only:
            one = _read(process, tid, states)
            if one is not None:
                stacks[(process.pid, tid)] = replace(one, gil=holder == tid)
    return stacks


def _read(process: _Process, tid: int, states: dict[int, int] | None) -> ThreadStack | None:
    """One thread; None: it has ended."""
    try:
        name = (PROC / str(process.pid) / "task" / str(tid) / "comm").read_text(errors="replace").rstrip("\n")
        layout = process.interpreter.layout if process.interpreter is not None else None
        blocked = read_blocked(process.pid, tid, process.symbols, process.python, process.resolver, layout, states)
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
                stack = assemble(process.symbols, process.resolver, one.frames, one.native, int(one.head["flags"]))
                holds = bool(int(row["what"]) & records.WHAT_GIL)
                stacks[key] = replace(waiting[key], stack=stack, gil=holds)
        if final:
            break
        time.sleep(0.01)
    return stacks


def _newest(counts: NDArray[np.void]) -> NDArray[np.void]:
    """Samples on the CPU, the newest last."""
    chosen: NDArray[np.void] = counts[(counts["what"] & records.WHAT_OFF) == 0]
    return chosen[np.argsort(chosen["last_ns"], kind="stable")]


def _threads(pid: int) -> list[int]:
    try:
        return sorted(int(entry.name) for entry in (PROC / str(pid) / "task").iterdir())
    except OSError:
        return []
