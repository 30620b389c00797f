"""One sampled process: what is needed to name its code, its threads and their waits."""

from __future__ import annotations

import os
from collections import Counter as Tally
from dataclasses import dataclass, field

from argus.capture.process.symbols import Symbols
from argus.capture.process.threads import ThreadWatch
from argus.capture.python.code import CodeResolver
from argus.capture.python.interpreter import Interpreter, PythonProcess
from argus.capture.reader import reader
from argus.capture.reader.remote import RemotePython, RemoteResolver, RemoteSymbols
from argus.live.job import Job
from argus.live.mapped_libraries import Reading


@dataclass
class SampledProcess:
    """A sampled process.

    Attributes:
        pid, job, rank: Which.
        symbols, threads: What names its code, and reads its threads' times.
        pidfd: Readable once it has ended.
        program: What changes with each exec.
        interpreter, python, resolver: Its CPython, if it has one, and what names its code objects.
        retry: Whether a CPython is still looked for, or read again: it has not begun yet.
        python_since_ns: Since when the kernel reads it, CLOCK_MONOTONIC.
        names: Of threads, by TID.
        asleep: Threads that have not run since the process was first seen, so that no switch reported their wait:
            (stack, ``what``).
        asleep_until_ns: Until when these waits were reported.
        unread: Threads that are like these, but were not read yet: since when their waits are to be reported.
        awake: Threads that have run since.
        ran: Whether it may have run since all of it was read: what has not run has not changed.
        since: When it was first seen, ``time.monotonic()``.
        searched, mapped: When a CPython was last searched for, and how much the process had mapped then.
        code: When what it maps was last read to name its code.
        placed: Functions that the kernel was given, and other places that it asked about.
        doubts: Of places where a stack's leaf was: how often its chain was not believed; far below 0: it once was.
        quarantined: Something about it could not be read that should have been: it is left alone until it ends.
        ended, ended_ns: Whether and when it was seen to have ended.
        drained: Whether all that was counted of it, since it has ended, has been fetched.
    """

    pid: int
    job: Job
    rank: int
    symbols: Symbols | RemoteSymbols
    threads: ThreadWatch
    pidfd: int
    program: bytes = b""
    since: float = 0.0
    interpreter: Interpreter | None = None
    python: PythonProcess | RemotePython | None = None
    resolver: CodeResolver | RemoteResolver | None = None
    retry: bool = True
    searched: float = 0.0
    mapped: bytes = b""
    code: Reading = field(default_factory=Reading)
    python_since_ns: int = 0
    names: dict[int, str] = field(default_factory=dict)
    asleep: dict[int, tuple[int, int]] = field(default_factory=dict)
    asleep_until_ns: int = 0
    unread: dict[int, int] = field(default_factory=dict)
    awake: set[int] = field(default_factory=set)
    ran: bool = True
    placed: set[int] = field(default_factory=set)
    doubts: Tally[int] = field(default_factory=Tally)
    quarantined: bool = False
    ended: bool = False
    ended_ns: int = 0
    drained: bool = False

    def name_of(self, tid: int) -> str:
        """Name of a thread; empty: it has none that was read."""
        return self.names.get(tid, "")

    def counters(self) -> Tally[str]:
        """What reading it has counted."""
        counted = Tally(self.symbols.counters)
        counted.update(self.threads.counters)
        if self.resolver is not None:
            counted.update(self.resolver.counters)
        return counted

    def close(self) -> None:
        """Lets go of it."""
        if self.python is not None:
            self.python.close()
        self.symbols.close()
        self.threads.close()
        os.close(self.pidfd)


def symbols_of(pid: int) -> Symbols | RemoteSymbols:
    """What names the code of a process: in the reader process, where there is one.

    Raises:
        OSError: It has ended, or may not be read.
    """
    return RemoteSymbols(pid) if reader.shared.on else Symbols(pid)
