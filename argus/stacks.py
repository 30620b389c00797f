"""The stack side of a live trace: what the threads of every rank were doing on the CPU, and what they waited for.

``Tracer`` tells who is traced (``look``), lets new stacks be resolved while their code is still there (``poll``) and
turned into rows (``work``).
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from argus import records
from argus.blocked import assemble, read_blocked
from argus.bulkhead import Bulkheads
from argus.capture import DEFAULT_OFF_CPU_NS, DEFAULT_RATE_HZ, RAISED_RATE_HZ, offcpu, reader, stack_rows
from argus.capture.code import DECODED_BYTES, CodeResolver
from argus.capture.launches import Origin
from argus.capture.python import MAX_COUNT, Interpreter, PythonProcess, find_interpreter, lists_cut
from argus.capture.remote import RemotePython, RemoteResolver, RemoteSymbols
from argus.capture.stacks import Drained, RawStack, StackProbes
from argus.capture.symbols import Symbols
from argus.capture.targets import PROC, mapped_pages, read_file
from argus.capture.threads import ThreadWatch
from argus.draining import RELIEVE_S
from argus.errors import ArgusError
from argus.records import STACK_LOSS_COUNTERS, StackCounter
from argus.roster import YOUNG_S, Job
from argus.semantics.stacks import Stack
from argus.stack_view import Recent, StackView, hot_line, summarize
from argus.store.writer import Writer

REFRESH_ALL_S = 5.0
"""How often children of all threads are looked for, and programs executed that the kernel did not tell of."""
NAMES_S = 10.0
"""How often names, mappings and thread states of all threads are looked at again; at once if there are new threads."""
WAITING_S = 2.0
"""A thread that has been off the CPU for so long is told while it waits, whenever counts become rows: one that hangs
never comes back."""
ROWS_S, CALM_ROWS_S = 5.0, 10.0
"""How often the threads' times are read and counts become rows: while something is the matter or somebody looks, and
else. That takes some four milliseconds whatever there is to be told, since by then no cache holds what does it. At
first it is more often."""
FIRST_ROWS_S = 1.0
POLL_S = 0.1
"""How often new stacks are fetched while there are many, or a process is new."""
LONGEST_POLL_S = CALM_ROWS_S
"""The same when there are few. What their frames are called comes with them, so that there is no hurry; and a stack
that is resolved alone, with all that it takes in no cache, costs thrice what one of many does."""
MANY, FEW = 1 / 16, 1 / 64
"""Parts of a ring."""
FULL = 1 / 2
"""Part of what a CPU can count that is fetched whatever is due."""
SLACK_S = 0.03
"""What is due so soon is done at once: a turn costs more than what it does."""
CALM_S = 60.0
"""For so long nothing must be the matter before the rate is lowered again: several judgements."""
DOUBTS = 8
"""So often the chain of frame pointers at a place must be found wrong, and never right, before the kernel is told to
leave it out there. What it holds then differs each time, and every sample would be a new stack."""
_BELIEVED = -1 << 40
_NOT_ASKED = "off: not asked for"
_SIGNS_OF_LIFE = ("switches_voluntary", "switches_involuntary", "cpu_ns")
RECENT_S = 5.0
"""What the live view shows, or what the newest rows tell."""
LOOKED_S = 2.0
"""Who asks for the view twice within this time is looking."""
LATE_PYTHON_S, NO_PYTHON_S = 10.0, 60.0
"""How often a program without CPython is searched for one: when it has mapped something since, after its first minute,
and whatever it has mapped."""
KEPT_STACKS = 16_384
"""Stacks remembered in all, some 2 KB each, twice; beyond it all are numbered and sent anew, which costs time and loses
nothing. A job has some hundreds; one that compiles while it runs makes new ones all the time."""
KEPT_REASONS = 64
"""Why Python stacks of processes that have ended were not read."""
KEPT_THREADS = 1024
"""Of a process: names of threads that have ended, and that counts may still speak of."""
PARTS = {
    "sampling": ("stacks_not_sampled", "no stacks are sampled, and no garbage collections seen"),
    "off-cpu": (
        "off_cpu_not_followed",
        "waits for data, locks, I/O and CPUs, and short garbage collections, are not seen",
    ),
    "forks": ("forks_not_followed", "children are found up to 5 s late"),
    "thread ends": ("thread_ends_not_followed", "garbage collections of threads that end are not seen"),
    "execs": ("execs_not_followed", "a program that a process executes is found up to 5 s late"),
}
"""What may fail to start while the rest goes on: its counter, and what that means."""
NO_CPYTHON = "the process runs no CPython"


@dataclass
class _Process:
    """A sampled process."""

    pid: int
    job: Job
    rank: int
    symbols: Symbols | RemoteSymbols
    threads: ThreadWatch
    pidfd: int
    program: bytes = b""
    interpreter: Interpreter | None = None
    python: PythonProcess | RemotePython | None = None
    resolver: CodeResolver | RemoteResolver | None = None
    names: dict[int, str] = field(default_factory=dict)
    asleep: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Threads that have not run since the process was first seen, so that no switch told of them: (stack, what)."""
    asleep_until_ns: int = 0
    """Until when that was told."""
    awake: set[int] = field(default_factory=set)
    ran: bool = True
    """Whether it may have run since all of it was looked at: what has not run has not changed."""
    retry: bool = True
    since: float = 0.0
    """When it was first seen, ``time.monotonic()``."""
    looked: float = 0.0
    mapped: bytes = b""
    """When a CPython was looked for, and how much it had mapped then."""
    python_since_ns: int = 0
    folded: set[int] = field(default_factory=set)
    """Functions that the kernel was told of, and other places that it was asked about."""
    doubts: Tally[int] = field(default_factory=Tally)
    """Of places where a stack's leaf was: how often its chain was not believed; far below 0: it once was."""
    quarantined: bool = False
    """Something about it could not be read that should have been: it is left alone until it ends."""
    ended: bool = False
    ended_ns: int = 0
    drained: bool = False

    def counters(self) -> Tally[str]:
        found = Tally(self.symbols.counters)
        found.update(self.threads.counters)
        if self.resolver is not None:
            found.update(self.resolver.counters)
        return found

    def close(self) -> None:
        if self.python is not None:
            self.python.close()
        self.symbols.close()
        self.threads.close()
        os.close(self.pidfd)


@dataclass
class _Told:
    """What was told of a thread's wait while it lasted."""

    since_ns: int
    told_ns: int
    stack: int
    what: int
    kernel_stack: int
    """As the kernel numbers it: 0: it took none."""
    over_ns: int | None = None
    """When it was found to be over: once all that was counted before has come, it is in no count to come."""


class StackSide:
    """Stacks of the processes of a session.

    Args:
        writer: Where rows go.
        origin: What a job's rows say besides the records themselves.
        version: Gives the next row version.
        on: Whether stacks are sampled at all.
        rate_hz: Samples a second and CPU; None: ``DEFAULT_RATE_HZ``, and more while ``heed`` is told of something.
        off_cpu_ns: Time off the CPU from which on it is told; None: not at all.
        bulkheads: Count what fails.
    """

    def __init__(
        self,
        writer: Writer,
        origin: Callable[[Job], Origin],
        version: Callable[[], int],
        *,
        on: bool = True,
        rate_hz: int | None = None,
        off_cpu_ns: int | None = DEFAULT_OFF_CPU_NS,
        bulkheads: Bulkheads | None = None,
    ) -> None:
        self._writer = writer
        self._origin = origin
        self._version = version
        self._bulkheads = bulkheads or Bulkheads()
        self._lists_cut = sum(lists_cut.values())
        """Before this session."""
        self._chosen_hz = rate_hz
        self._rate_hz, self._off_cpu_ns = rate_hz or DEFAULT_RATE_HZ, off_cpu_ns
        self._most_hz: int | None = None
        self._refused = False
        self._rests = False
        self._why, self._calm_due = "", 0.0
        self._probes: StackProbes | None = None
        self._loaded: StackProbes | None = None
        """What ``load`` has loaded, until ``start``."""
        self._reason = "" if on else "off: switched off with --no-stacks"
        self._begun = False
        self.not_started: dict[str, str] = {}
        """Of ``PARTS``, those that were asked for and did not start: "failed: why" or "off: why"."""
        self._unread: dict[int, str] = {}
        """Processes whose CPython is not understood, and why."""
        self._unread_before: Tally[str] = Tally()
        """The same of processes that have ended: how many for each reason, the first ``KEPT_REASONS``."""
        self._processes: dict[int, _Process] = {}
        self._left_alone: set[int] = set()
        """Processes that could not be taken in at all."""
        self._ends: select.epoll | None = None
        self._live: dict[int, _Process] = {}
        """By the descriptor of which ``_ends`` tells that the process has ended."""
        self._ids: dict[int, int] = {}
        self._stacks: dict[int, Stack] = {}
        self._hot_lines: dict[int, str] = {}
        """Of the stacks that the view has shown."""
        self._before: tuple[dict[int, int], dict[int, Stack]] = ({}, {})
        self._written: dict[tuple[str, int], set[int]] = {}
        self._counts: list[NDArray[np.void]] = []
        self._pauses: list[NDArray[np.void]] = []
        self._told: dict[tuple[int, int, int], _Told] = {}
        """By process, thread, and since when it waits."""
        self._off: set[tuple[int, int]] = set()
        self._losses: Tally[str] = Tally()
        self._counters: Tally[str] = Tally()
        self._collected: dict[int, tuple[int, ...]] = {}
        self._kernel: dict[StackCounter, int] = dict.fromkeys(StackCounter, 0)
        self._features: dict[tuple[int, str], tuple[str, str]] = {}
        self._recent: deque[Recent] = deque()
        """Of each time that counts became rows."""
        self._worked = self._turned = time.monotonic()
        self._refresh_all_due = self._names_due = self._waiting_due = self._rows_due = self._poll_due = 0.0
        self._viewed = self._looked = float("-inf")
        self._usage: list[tuple[_Process, NDArray[np.void]]] = []
        self._rows_s, self._poll_s = FIRST_ROWS_S, POLL_S
        self._execs = self._clones = self._clones_of_threads = self._clones_read = -1

    # ---- who

    def load(self) -> None:
        """Loads the programs, which takes the kernel most of a second: any thread may do so. What does not work is told
        by ``state``: the trace goes on without."""
        if self._reason or self._loaded is not None:
            return
        try:
            self._loaded = StackProbes(rate_hz=self._rate_hz, off_cpu_ns=self._off_cpu_ns)
            states = self._loaded.state
        except ArgusError as failure:
            self._reason = f"failed: {failure.message}" + (f" ({failure.hint})" if failure.hint else "")
            states = {"sampling": self._reason}
            if self._off_cpu_ns is not None:
                states["off-cpu"] = self._reason
        self.not_started = {part: state for part, state in states.items() if state not in ("on", _NOT_ASKED)}

    def start(self) -> None:
        """Begins, with the programs that ``load`` has loaded, or loads them."""
        self.load()
        if self._loaded is not None:
            self._probes, self._loaded = self._loaded, None
            self._begun = True
            self._ends = select.epoll()

    @property
    def due(self) -> float:
        """When ``poll`` has something to do, as ``time.monotonic`` tells it."""
        return self._poll_due if self._probes is not None else float("inf")

    @property
    def on(self) -> bool:
        """Whether threads are sampled."""
        return self._probes is not None

    def heed(self, why: str, now: float) -> str:
        """Samples more often while something is the matter, unless the rate was chosen. Call it now and then.

        Args:
            why: What is the matter; empty: nothing that is known.
            now: ``time.monotonic()``.

        Returns:
            What has changed, for people; empty: nothing.
        """
        if why:
            if now >= self._calm_due and self._rows_due > now + ROWS_S:
                self._soon_rows(now)
            self._calm_due = now + CALM_S
        return self._set_rate(why or f"nothing was the matter for {CALM_S:.0f} s", now, why)

    def limit(self, most_hz: int | None, now: float) -> str:
        """Samples so often at most from now on, whatever was chosen; None: there is no limit. As ``heed``."""
        self._most_hz = most_hz
        return self._set_rate("what it costs", now, "" if most_hz is None else "kept low for what it costs")

    @property
    def rate_hz(self) -> int:
        """Samples a second and CPU; 0: none."""
        return 0 if self._probes is None or self._probes.state["sampling"] != "on" else self._rate_hz

    def _set_rate(self, reason: str, now: float, why: str) -> str:
        wanted = self._chosen_hz or (RAISED_RATE_HZ if now < self._calm_due else DEFAULT_RATE_HZ)
        wanted = min(wanted, self._most_hz or wanted)
        if self._probes is None or wanted == self._rate_hz or self._refused:
            return ""
        try:
            self._probes.set_rate(wanted)
        except OSError as refusal:
            self._refused = True
            return f"stacks: the rate stays at {self._rate_hz} a second: {refusal.strerror}"
        self._rate_hz, self._why = wanted, why
        self._counters["stack_rate_changes"] += 1
        for process in self._processes.values():
            self._write_sampling(process)
        return f"stacks: {wanted} samples a second now: {reason}"

    @property
    def follows_waits(self) -> bool:
        """Whether threads are followed off the CPU."""
        return self._probes is not None and self._probes.state["off-cpu"] == "on" and not self._rests

    def follow_waits(self, on: bool) -> None:
        """Follows threads off the CPU, or not, from now on."""
        if self._probes is not None:
            self._rests = not on
            self._probes.follow_waits(on)

    def run_times(self) -> dict[str, tuple[int, int]]:
        """``Module.run_times`` of what takes stacks."""
        return {} if self._probes is None else self._probes.run_times()

    @property
    def state(self) -> str:
        """In words for people."""
        if self._probes is None:
            return self._reason or "waiting: not begun"
        return self._probes.state["sampling"]

    def look(self, jobs: Iterable[Job], now: float) -> None:
        """Takes note of who is traced: ranks, their helpers, and what those have forked.

        Args:
            jobs: All of them.
            now: ``time.monotonic()``.
        """
        if self._probes is None:
            if self.not_started:
                self._write_not_started(jobs)
            return
        wanted = {
            pid: (job, member.rank) for job in jobs for pid, member in job.members.items() if member.state == "traced"
        }
        now += SLACK_S
        all_of_them = now >= self._refresh_all_due
        execs, clones = self._probes.execs(), self._probes.clones()
        may_be_another = all_of_them or execs != self._execs
        self._execs = execs
        if all_of_them:
            self._refresh_all_due = now + REFRESH_ALL_S
        if clones != self._clones or (all_of_them and clones != self._clones_of_threads):
            self._clones = clones
            if all_of_them:
                self._clones_of_threads = clones
            for pid, whose in list(wanted.items()):
                for child in _children(pid, all_threads=all_of_them):
                    wanted.setdefault(child, whose)
        self._see_ends()
        self._left_alone &= wanted.keys()
        for process in self._live.values():
            wanted.setdefault(process.pid, (process.job, process.rank))
        for pid, (job, rank) in wanted.items():
            known = self._processes.get(pid)
            if known is None and pid not in self._left_alone:
                with self._bulkheads.process(pid, "stacks", lambda pid=pid: self._quarantine(pid), job):  # type: ignore[misc]
                    self._add(pid, job, rank)
            elif known is not None and not known.ended and not known.quarantined:
                with self._guard(known):
                    self._look_at(known, now, may_be_another=may_be_another)

    def _look_at(self, process: _Process, now: float, *, may_be_another: bool) -> None:
        """Whether a process runs another program, or a CPython that was not there before."""
        if may_be_another and (program := _program(process.pid)) != process.program:
            process.program = program
            self._begin_program(process)
        elif process.retry and self._may_have_loaded(process, now):
            before = process.resolver
            self._find_python(process)
            if process.resolver is not before:
                self._add_target(process)  # the new one is to be told of all code objects

    @staticmethod
    def _may_have_loaded(process: _Process, now: float) -> bool:
        """Whether a CPython may be there that was not when it was looked for, which means to open all files that the
        process maps. One that has not begun yet is looked at each time."""
        if process.interpreter is not None:
            return True
        try:
            pages = mapped_pages(process.pid)
        except OSError:
            return False
        soon_s = 0.0 if now < process.since + YOUNG_S else LATE_PYTHON_S
        if now < process.looked + (NO_PYTHON_S if pages == process.mapped else soon_s):
            return False
        process.mapped, process.looked = pages, now
        return True

    def _guard(self, process: _Process) -> AbstractContextManager[None]:
        """What fails for a process costs that process."""
        return self._bulkheads.process(process.pid, "stacks", lambda: self._quarantine(process.pid), process.job)

    def _quarantine(self, pid: int) -> None:
        """Samples a process no more, and reads nothing of it until it ends."""
        process = self._processes.get(pid)
        if process is None:
            self._left_alone.add(pid)
            return
        process.quarantined = True
        process.asleep.clear()
        if self._probes is not None:
            self._probes.remove_target(pid)
        self._write_feature(process, "sampling", "failed", "what the process holds could not be read")

    def _see_ends(self) -> None:
        """Takes note of processes that have ended. They are kept until their last samples are rows."""
        assert self._probes is not None
        assert self._ends is not None
        for pidfd, _ in self._ends.poll(0):
            self._ends.unregister(pidfd)
            process = self._live.pop(pidfd)
            process.ended, process.ended_ns = True, time.monotonic_ns()

    def _add(self, pid: int, job: Job, rank: int) -> None:
        assert self._probes is not None
        assert self._ends is not None
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return  # it has ended
        try:
            process = _Process(pid, job, rank, _symbols(pid), ThreadWatch(pid), pidfd, _program(pid))
            process.since = time.monotonic()
        except OSError:
            os.close(pidfd)
            return
        self._processes[pid] = self._live[pidfd] = process
        self._ends.register(pidfd, select.EPOLLIN)
        self._poll_s, self._poll_due = POLL_S, 0.0
        self._execs = self._clones = self._clones_read = -1
        self._soon_rows(time.monotonic())
        self._find_python(process)  # first, or the first samples would lack their Python stacks
        self._add_target(process)
        self._refresh(process, all_of_it=True)

    def _begin_program(self, process: _Process) -> None:
        """The process has called exec: what was known of its memory is void."""
        assert self._probes is not None
        with contextlib.suppress(OSError):
            fresh = _symbols(process.pid)
            self._counters.update(process.symbols.counters)
            process.symbols.close()
            process.symbols = fresh
            self._drop_python(process)
            process.interpreter = None
            process.mapped, process.since = b"", time.monotonic()
            process.asleep.clear()
            process.retry = True
            self._find_python(process)
            self._add_target(process)

    def _find_python(self, process: _Process) -> None:
        """CPython may be loaded late: a launcher execs it, a program embeds it."""
        assert self._probes is not None
        symbols = process.symbols
        remote = symbols if isinstance(symbols, RemoteSymbols) else None
        try:
            found = find_interpreter(process.pid) if remote is None else remote.find_python()
        except OSError as failure:
            if isinstance(failure, reader.Unreadable):
                self._write_feature(process, "python_stacks", "off", "its memory or its files do not answer")
            return
        process.interpreter = found
        if found is None:
            self._unread.pop(process.pid, None)
            self._write_feature(process, "python_stacks", "off", NO_CPYTHON)
            return
        state, _, reason = found.state.partition(": ")
        if found.layout is None and found.settled:
            self._unread[process.pid] = reason
        else:
            self._unread.pop(process.pid, None)
        if found.layout is not None:
            try:
                python = PythonProcess(process.pid, found) if remote is None else RemotePython(remote)
            except OSError:
                return
            self._drop_python(process)
            process.python = python
            if isinstance(python, PythonProcess):
                process.resolver = CodeResolver(python, found.layout)
            else:
                process.resolver = RemoteResolver(python.symbols)
            self._probes.set_python(process.pid, found.layout)
            process.python_since_ns = time.monotonic_ns()
            self._probes.set_threads(process.pid, process.python.thread_states())
            reason = reason or "CPython " + ".".join(map(str, found.version[:2]))
        process.retry = not found.settled
        self._write_feature(process, "python_stacks", state, reason)

    def _tell_asleep(self, process: _Process, usage: NDArray[np.void]) -> None:
        """Rows for threads that were off the CPU when Argus came, and have been since: those of a job that hangs."""
        ran = np.logical_or.reduce([usage[name] > 0 for name in _SIGNS_OF_LIFE])
        process.awake.update(usage["tid"][ran].tolist())
        waits: list[tuple[int, tuple[int, int], int, int]] = []
        for one in usage[ran & np.isin(usage["tid"], list(process.asleep))]:
            # It woke before it was met first. Since then it has run, waited for a CPU, and waited for less than is told
            # as often as it was switched: it woke no earlier than so long before.
            tid = int(one["tid"])
            spent_ns = sum(max(int(one[name]), 0) for name in ("cpu_ns", "runqueue_ns"))
            spent_ns += max(int(one["switches_voluntary"]), 0) * (self._off_cpu_ns or 0)
            until_ns = self._first_met_ns(process, tid) - spent_ns
            waits.append((tid, process.asleep.pop(tid), process.asleep_until_ns, until_ns))
        for tid in process.asleep.keys() - set(usage["tid"].tolist()):
            until_ns = self._first_met_ns(process, tid)
            waits.append((tid, process.asleep.pop(tid), process.asleep_until_ns, until_ns))
        states: dict[int, int] | None = None
        for one in usage[~ran]:
            tid = int(one["tid"])
            if tid in process.awake or (process.pid, tid) in self._off:
                continue
            known = process.asleep.get(tid)
            if known is None:
                if states is None and process.python is not None:
                    states = process.python.thread_states()
                known = self._read_blocked(process, tid, states)
                if known is None:
                    continue
                process.asleep[tid] = known
            waits.append((tid, known, int(one["begin_ns"]), int(one["end_ns"])))
        process.asleep_until_ns = int(usage["end_ns"].max())
        self._tell_waits(process, waits)

    def _tell_asleep_until_the_end(self, process: _Process) -> None:
        """The same of a process that has ended: they waited until they were met, ending, or until then."""
        until = {tid: self._first_met_ns(process, tid) or process.ended_ns for tid in process.asleep}
        since_ns = process.asleep_until_ns
        self._tell_waits(process, [(tid, known, since_ns, until[tid]) for tid, known in process.asleep.items()])
        process.asleep.clear()

    def _first_met_ns(self, process: _Process, tid: int) -> int:
        """When a thread went off the CPU or was sampled first, of what is to become rows; 0: it did not."""
        met = [part["first_ns"][(part["pid"] == process.pid) & (part["tid"] == tid)] for part in self._counts]
        return min((int(times.min()) for times in met if len(times)), default=0)

    def _tell_waits(self, process: _Process, waits: list[tuple[int, tuple[int, int], int, int]]) -> None:
        """Rows for waits: thread, (stack, what), from and until when. What lasted no time is left out."""
        waits = [wait for wait in waits if wait[2] < wait[3]]
        if not waits:
            return
        rows = np.zeros(len(waits), records.STACK_COUNT)
        rows["pid"] = process.pid
        for row, (tid, known, begin_ns, end_ns) in zip(rows, waits, strict=True):
            row["stack"], row["what"], row["tid"] = *known, tid
            row["ns"] = row["max_ns"] = end_ns - begin_ns
            row["first_ns"], row["last_ns"] = begin_ns, end_ns
        self._counts.append(rows)

    def _read_blocked(
        self, process: _Process, tid: int, states: dict[int, int] | None = None
    ) -> tuple[int, int] | None:
        """Stack and ``what`` of a thread that waits, from outside; None: it runs, or has ended."""
        layout = process.interpreter.layout if process.interpreter is not None else None
        symbols, python, resolver = process.symbols, process.python, process.resolver
        try:
            if isinstance(symbols, RemoteSymbols):
                found = symbols.blocked(tid)
            else:
                assert not isinstance(python, RemotePython)
                assert not isinstance(resolver, RemoteResolver)
                found = read_blocked(process.pid, tid, symbols, python, resolver, layout, states)
        except OSError:
            return None
        if found is None:
            return None
        self._ids[found.stack.id] = found.stack.id
        self._stacks.setdefault(found.stack.id, found.stack)
        return found.stack.id, found.what

    def _drop_python(self, process: _Process) -> None:
        if process.resolver is not None:
            self._counters.update(process.resolver.counters)
        if process.python is not None:
            process.python.close()
        process.python = process.resolver = None

    def _refresh(self, process: _Process, *, all_of_it: bool) -> None:
        assert self._probes is not None
        if process.ended:
            self._tell_asleep_until_the_end(process)
            return
        with contextlib.suppress(OSError):
            usage = process.threads.usage(time.monotonic_ns())
            # What was not measured is not 0.
            ran = not len(usage) or any(usage[name].any() for name in _SIGNS_OF_LIFE)
            process.ran |= ran
            if (all_of_it and process.ran) or not process.names.keys() >= set(usage["tid"].tolist()):
                process.ran = False
                if process.symbols.refresh():
                    self._add_target(process)  # other code may lie where functions were that the kernel was told of
                names = process.threads.names()
                if len(process.names) > len(names) + KEPT_THREADS:
                    process.names.clear()
                    process.awake &= names.keys()
                process.names.update(names)
                if process.python is not None:
                    self._probes.set_threads(process.pid, process.python.thread_states())
                self._write_sampling(process)
            if process.resolver is not None:
                process.resolver.budget = DECODED_BYTES
            if process.python is not None and ran:
                self._count_collections(process, process.python)
            if len(usage):
                self._tell_asleep(process, usage)
                self._usage.append((process, usage))
            for what, text in process.threads.state.items():
                state, _, reason = text.partition(": ")
                self._write_feature(process, f"{what} delay", state, reason)

    def _write_sampling(self, process: _Process) -> None:
        assert self._probes is not None
        for what, text in self._probes.state.items():
            state, _, reason = text.partition(": ")
            if what == "sampling" and state == "on":
                reason = f"{self._rate_hz} a second" + (f": {self._why}" if self._why else "")
            self._write_feature(process, what, state, reason)

    def _count_collections(self, process: _Process, python: PythonProcess | RemotePython) -> None:
        collections = python.collections()
        if collections is not None:
            before = self._collected.get(process.pid, collections)
            for number, (old, new) in enumerate(zip(before, collections, strict=False)):
                name = f"gc_collections_generation_{number}"
                self._counters[name] = min(self._counters[name] + max(new - old, 0), MAX_COUNT)
            self._collected[process.pid] = collections

    @staticmethod
    def _thread_name(process: _Process, tid: int) -> str:
        return process.names.get(tid, "")

    # ---- what

    def poll(self, now: float, *, slack_s: float = SLACK_S, final: bool = False) -> None:
        """Fetches counts and resolves stacks that are new, at once: code objects are freed, libraries unloaded.

        Args:
            now: ``time.monotonic()``.
            slack_s: What is due so soon is done now, since others have something to do; half of its interval at most.
            final: Nothing comes after it.
        """
        if self._probes is None:
            return
        self._turned = time.monotonic()
        now += max(SLACK_S, min(slack_s, self._poll_s / 2))
        tells_waiting = final or now >= self._waiting_due
        used = self._probes.used
        if now < self._poll_due and not tells_waiting and used < FEW and self._probes.counts_used < FULL:
            return
        if tells_waiting:
            self._waiting_due = float("inf")  # until there are rows
            self._tell_waiting(final=final)
        self._take(self._probes.drain(final=final))
        if used > MANY:
            self._poll_s = POLL_S
        elif used < FEW:
            self._poll_s = min(2 * self._poll_s, max(min(self._probes.longest_poll_s, LONGEST_POLL_S), POLL_S))
        self._poll_due = now + self._poll_s
        for process in self._processes.values():
            process.drained = process.ended and self._probes.counted_ns > process.ended_ns

    def _take(self, drained: Drained) -> None:
        if len(self._ids) > KEPT_STACKS:
            self._begin_dictionary()
        for pid, record in drained.codes:
            process = self._processes.get(pid)
            if process is not None and process.resolver is not None and not process.quarantined:
                process.resolver.learn(record)
        for raw in drained.stacks:
            pid = int(raw.head["pid"])
            job = process.job if (process := self._processes.get(pid)) is not None else None
            with self._bulkheads.process(pid, "stacks", lambda pid=pid: self._quarantine(pid), job):  # type: ignore[misc]
                self._resolve(raw)
        if len(drained.counts):
            self._counts.append(self._without_told(drained.counts))
        if len(drained.pauses):
            self._pauses.append(drained.pauses)

    def _begin_dictionary(self) -> None:
        """Forgets stacks of long ago: a program that makes code all the time never stops making new ones."""
        assert self._probes is not None
        self._before = self._ids, self._stacks  # counts that are under way speak of these
        self._ids, self._stacks = {}, {}
        self._hot_lines.clear()
        self._written.clear()
        for process in self._processes.values():
            process.asleep.clear()
            if not process.ended:
                self._add_target(process)

    def _stack(self, number: int) -> Stack | None:
        found = self._stacks.get(number)
        if found is None and (found := self._before[1].get(number)) is not None:
            self._stacks[number] = found
        return found

    def _resolve(self, raw: RawStack) -> None:
        process = self._processes.get(int(raw.head["pid"]))
        if process is None:
            self._losses["stacks_without_rank"] += 1
            return
        if process.quarantined:
            return
        flags = int(raw.head["flags"])
        if isinstance(process.symbols, RemoteSymbols):
            stack = process.symbols.assemble(raw.frames, raw.native, flags)
        else:
            assert not isinstance(process.resolver, RemoteResolver)
            stack = assemble(process.symbols, process.resolver, raw.frames, raw.native, flags)
        if len(raw.native):
            self._fold(process, int(raw.native[0]))
        if len(raw.native) > 1:
            self._doubt(process, int(raw.native[0]), stack.native == "complete")
        self._ids[int(raw.head["stack"])] = stack.id
        self._stacks.setdefault(stack.id, stack)

    def _fold(self, process: _Process, leaf: int) -> None:
        """Lets the kernel know the function that a thread was in, so that it takes all of it for one place."""
        if leaf in process.folded or process.ended:
            return
        process.folded.add(leaf)
        found = process.symbols.function(leaf)
        if found is None or (found[0] in process.folded and found[0] != leaf):
            return
        assert self._probes is not None
        process.folded.add(found[0])
        self._probes.set_function(process.pid, *found, near=leaf)

    def _doubt(self, process: _Process, leaf: int, believed: bool) -> None:
        """Lets the kernel know the places whose chains of frame pointers are worth nothing."""
        assert self._probes is not None
        process.doubts[leaf] = _BELIEVED if believed else process.doubts[leaf] + 1
        if process.doubts[leaf] == DOUBTS and not process.ended:
            self._probes.set_leaf_only(process.pid, leaf)

    def _add_target(self, process: _Process) -> None:
        """From now on the process's stacks have other numbers, and are sent again."""
        assert self._probes is not None
        process.folded.clear()
        process.doubts.clear()
        self._probes.add_target(process.pid)

    def _tell_waiting(self, *, final: bool) -> None:
        """Rows for threads that are off the CPU and stay there, a piece at a time."""
        assert self._probes is not None
        threads = None
        if not final and self._probes.clones() == self._clones_read:
            threads = [tid for process in self._processes.values() for tid in process.threads.tids]
        off = self._probes.off_now(tids=threads)
        now_ns = time.monotonic_ns()
        rows = np.zeros(len(off), records.STACK_COUNT)
        used = 0
        self._off = set()
        for one in off:
            pid, tid, since = int(one["pid"]), int(one["tid"]), int(one["since_ns"])
            self._off.add((pid, tid))
            told = self._told.get((pid, tid, since))
            if told is None:
                told = _Told(since, 0, int(one["stack"]), int(one["what"]), int(one["stack"]))
            told.over_ns = None
            fresh = now_ns - since - told.told_ns
            if fresh < (self._off_cpu_ns or 0 if final else WAITING_S * 1e9):
                continue
            process = self._processes.get(pid)
            if process is not None and not told.told_ns and (not told.stack or since < process.python_since_ns):
                # The kernel took no stack when it went, or took it before it knew of the interpreter.
                with self._guard(process):
                    found = None if process.quarantined else self._read_blocked(process, tid)
                    told.stack = told.stack if found is None else found[0]
            row = rows[used]
            row["stack"], row["pid"], row["tid"], row["what"] = told.stack, pid, tid, told.what
            row["count"] = 0 if told.told_ns else 1
            row["ns"] = row["max_ns"] = fresh
            row["first_ns"], row["last_ns"] = since + told.told_ns, now_ns
            told.told_ns += fresh
            self._told[pid, tid, since] = told
            used += 1
        if used:
            self._counts.append(rows[:used].copy())
        waits = set(zip(off["pid"].tolist(), off["tid"].tolist(), off["since_ns"].tolist(), strict=True))
        for wait in self._told.keys() - waits:
            told = self._told[wait]
            if told.over_ns is None:
                told.over_ns = now_ns
            elif self._probes.counted_ns > told.over_ns:
                del self._told[wait]  # the thread has ended: no count tells of it

    def _without_told(self, counts: NDArray[np.void]) -> NDArray[np.void]:
        """Takes off what was told already of waits that are over now."""
        if not self._told:
            return counts
        counts = counts.copy()
        for key, told in list(self._told.items()):
            mine = (counts["pid"] == key[0]) & (counts["tid"] == key[1]) & (counts["stack"] == told.kernel_stack)
            mine &= (counts["what"] & records.WHAT_OFF) != 0
            mine &= (counts["max_ns"] >= told.told_ns) & (counts["first_ns"] <= told.since_ns)
            for place in np.flatnonzero(mine & (counts["last_ns"] >= told.since_ns + told.told_ns))[:1]:
                row = counts[place]
                row["ns"] -= min(told.told_ns, int(row["ns"]))
                row["count"] -= min(1, int(row["count"]))
                row["max_ns"] = max(int(row["max_ns"]) - told.told_ns, 0) if row["count"] == 0 else row["max_ns"]
                row["first_ns"] = max(int(row["first_ns"]), told.since_ns + told.told_ns)
                del self._told[key]
        return counts

    def relieve(self, now: float) -> None:
        """Reads what is new while the loop does not turn, if there is much: any thread may call it.

        Args:
            now: ``time.monotonic()``.
        """
        if (probes := self._probes) is not None and now > self._turned + RELIEVE_S:
            probes.relieve()

    def _soon_rows(self, now: float) -> None:
        """Counts become rows soon, whatever was said before."""
        self._rows_due = min(self._rows_due, now + FIRST_ROWS_S)
        self._waiting_due = min(self._waiting_due, self._rows_due)

    def work(self, now: float, *, final: bool = False) -> None:
        """Reads the threads' times, and turns what was fetched into rows, when that is due."""
        now += SLACK_S
        if self._probes is None or (now < self._rows_due and not final):
            return
        longest = ROWS_S if now < self._calm_due or now < self._looked + ROWS_S else CALM_ROWS_S
        self._rows_s = min(self._rows_s, longest)
        self._rows_due = self._waiting_due = now + self._rows_s
        self._rows_s = min(1.5 * self._rows_s, longest)
        with_names = now >= self._names_due
        if with_names:
            self._names_due = now + NAMES_S - 2 * SLACK_S  # with every other rows, or with all
        self._clones_read = self._probes.clones()
        for process in self._processes.values():
            if not process.quarantined:
                with self._guard(process):
                    self._refresh(process, all_of_it=with_names)
        counts = _joined(self._counts, records.STACK_COUNT)
        pauses = _joined(self._pauses, records.PAUSE)
        self._counts, self._pauses = [], []
        known = np.zeros(len(counts), bool)
        for job in {id(process.job): process.job for process in self._processes.values()}.values():
            pids = np.array([pid for pid, process in self._processes.items() if process.job is job], np.uint32)
            pids.sort()
            mine = _among(counts["pid"], pids)
            known |= mine
            with self._bulkheads.job(job):
                self._write_counts(job, _chosen(counts, mine), now)
                if len(pauses):
                    self._write_pauses(job, pauses[_among(pauses["pid"], pids)])
                self._write_usage(job)
        self._usage.clear()
        if not known.all():
            self._losses["stack_samples_without_rank"] += int(counts["count"][~known].sum())
        for pid, process in list(self._processes.items()):
            if (process.drained or (process.quarantined and process.ended)) and not final:
                with self._bulkheads.part(f"stacks of process {pid}", process.job):
                    self._forget(pid)
        while self._recent and self._recent[0].until < now - RECENT_S + SLACK_S:
            self._recent.popleft()
        self._worked = now

    def _write_counts(self, job: Job, counts: NDArray[np.void], now: float) -> None:
        if not len(counts):
            return
        origin = self._origin(job)
        ids = self._content_ids(counts["stack"])
        missing = (ids == 0) & (counts["stack"] != 0)
        if missing.any():
            self._losses["stack_samples_without_stack"] += int(counts["count"][missing].sum())
        counts, ids = _together(counts, ids)
        ranks, threads = self._whose(counts)
        self._write_stacks(job, ids)
        reasons = offcpu.reasons(counts["what"])
        self._writer.append(
            "stack_samples",
            stack_rows.to_samples(counts, origin, ranks, threads, ids, reasons),
        )
        self._recent.append(Recent(self._worked, now, counts, ranks, ids, reasons))

    def _write_stacks(self, job: Job, ids: NDArray[np.uint64]) -> None:
        """Those that the job's dictionary lacks."""
        written = self._written.setdefault((job.name, job.run), set())
        fresh = [stack for one in set(ids.tolist()) - written if one and (stack := self._stack(one)) is not None]
        if fresh:
            self._writer.append("stacks", stack_rows.to_stacks(fresh, self._origin(job)))
            written |= {stack.id for stack in fresh}

    def _write_pauses(self, job: Job, pauses: NDArray[np.void]) -> None:
        if not len(pauses):
            return
        ranks, threads = self._whose(pauses)
        ids = self._content_ids(pauses["stack"])
        self._write_stacks(job, ids)
        self._writer.append(
            "gc_pauses",
            stack_rows.to_pauses(
                pauses,
                self._origin(job),
                ranks,
                threads,
                ids,
            ),
        )

    def _write_usage(self, job: Job) -> None:
        mine = [(process, usage) for process, usage in self._usage if process.job is job]
        if not mine:
            return
        ranks = np.repeat([process.rank for process, _ in mine], [len(usage) for _, usage in mine])
        names = [self._thread_name(process, tid) for process, usage in mine for tid in usage["tid"].tolist()]
        usage = _joined([usage for _, usage in mine], records.THREAD_USAGE)
        self._writer.append("thread_usage", stack_rows.to_usage(usage, self._origin(job), ranks, names))

    def _whose(self, events: NDArray[np.void]) -> tuple[NDArray[np.uint32], list[str]]:
        """Rank and thread name of each record."""
        processes = [self._processes[pid] for pid in events["pid"].tolist()]
        ranks = np.array([process.rank for process in processes], np.uint32)
        return ranks, list(map(self._thread_name, processes, events["tid"].tolist()))

    def _content_ids(self, stacks: NDArray[np.uint64]) -> NDArray[np.uint64]:
        now, before = self._ids, self._before[0]
        return np.array([now.get(one) or before.get(one, 0) for one in stacks.tolist()], np.uint64)

    def forget(self, job: Job) -> None:
        """Drops what is left of a job that is over."""
        self._written.pop((job.name, job.run), None)
        if self._probes is None:
            gone = job.members.keys()
            self._features = {key: state for key, state in self._features.items() if key[0] not in gone}

    def _forget(self, pid: int) -> None:
        process = self._processes.pop(pid)
        self._live.pop(process.pidfd, None)
        if self._probes is not None:
            self._probes.remove_target(pid)
        self._counters.update(process.counters())
        self._collected.pop(pid, None)
        if why := self._unread.pop(pid, ""):
            told = why in self._unread_before or len(self._unread_before) < KEPT_REASONS
            self._unread_before[why if told else "other reasons"] += 1
        for key in [key for key in self._features if key[0] == pid]:
            del self._features[key]  # the number may be another process's soon
        process.close()

    # ---- the end

    def stop(self) -> None:
        """Fetches the last samples and takes the programs away."""
        if self._probes is None:
            return
        self.poll(time.monotonic(), final=True)
        self.work(time.monotonic(), final=True)
        self._kernel = self._probes.counters()
        self.close()

    def close(self) -> None:
        """Lets go of everything."""
        for pid in list(self._processes):
            process = self._processes.pop(pid)
            self._counters.update(process.counters())
            process.close()
        self._live.clear()
        if self._ends is not None:
            self._ends.close()
            self._ends = None
        if self._probes is not None:
            self._kernel = self._probes.counters()
            self._probes.close()
            self._probes = None
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None

    # ---- what is known of it

    def _write_not_started(self, jobs: Iterable[Job]) -> None:
        """That nothing is sampled, as features of the ranks that would have been."""
        for job in jobs:
            for pid, member in job.members.items():
                if member.state == "traced":
                    for part, text in self.not_started.items():
                        state, _, reason = text.partition(": ")
                        self._write_state(job, member.rank, pid, part, state, reason)

    def _write_feature(self, process: _Process, feature: str, state: str, reason: str) -> None:
        self._write_state(process.job, process.rank, process.pid, feature, state, reason)

    def _write_state(self, job: Job, rank: int, pid: int, feature: str, state: str, reason: str) -> None:
        key = (pid, feature)
        if self._features.get(key) == (state, reason):
            return
        self._features[key] = (state, reason)
        origin = self._origin(job)
        self._writer.append(
            "features",
            {
                "job": origin.job,
                "run": origin.run,
                "rank": rank,
                "host": origin.host,
                "feature": feature,
                "state": [state],
                "reason": [reason],
                "version": self._version(),
            },
        )

    def over_share(self, pid: int) -> int:
        """Samples and switches of a process's threads beyond the share of one process."""
        return 0 if self._probes is None else self._probes.over_share(pid)

    def counters(self) -> dict[str, tuple[int, bool]]:
        """Every counter of the stack side: value, and whether a value above 0 is a loss."""
        absent = {PARTS[part][0]: (1, True) for part in self.not_started}
        if self._probes is not None:
            self._kernel = self._probes.counters()
        elif not self._begun:
            return absent
        absent["python_stacks_not_read"] = (len(self._unread) + self._unread_before.total(), True)
        absent["python_lists_cut"] = (sum(lists_cut.values()) - self._lists_cut + reader.shared.lists_cut, True)
        found = {f"stack_{c.name.lower()}": (value, c in STACK_LOSS_COUNTERS) for c, value in self._kernel.items()}
        counted = Tally(self._counters)
        for process in self._processes.values():
            counted.update(process.counters())
        for name, value in counted.items():
            found[name] = (value, False)
        for name, value in self._losses.items():
            found[name] = (value, True)
        return found | absent

    def view(self) -> StackView:
        """The last seconds. Rows come more often while somebody asks for it all the time."""
        now = time.monotonic()
        if now < self._viewed + LOOKED_S:
            if now >= self._looked + ROWS_S and self._rows_due > now + ROWS_S:
                self._soon_rows(now)
            self._looked = now
        self._viewed = now
        samples = self.counters().get("stack_samples", (0, False))[0]
        return summarize(self.state, samples, self._recent, self._stack, self._hot_line)

    def _hot_line(self, one: int) -> str:
        line = self._hot_lines.get(one)
        if line is None:
            stack = self._stack(one)
            line = self._hot_lines[one] = hot_line(stack) if stack is not None else ""
        return line

    def summary(self) -> list[str]:
        """How stacks went, in lines for people: failures beside the count of samples, and what did not start."""
        absent = [f"{part}: {state}; {PARTS[part][1]}" for part, state in self.not_started.items()]
        for reason, count in (Tally(self._unread.values()) + self._unread_before).items():
            which = "a process" if count == 1 else f"{count} processes"
            absent.append(f"Python stacks of {which}: off: {reason}")
        if not self._begun:
            return absent or ([f"stacks: {self._reason}"] if self._reason else [])
        found = {name: value for name, (value, _) in self.counters().items()}
        parts = []
        if "sampling" not in self.not_started:
            parts.append(f"{found['stack_samples']:,} samples")
        if "off-cpu" not in self.not_started:
            parts.append(f"{found['stack_off_cpu']:,} times off the CPU")
        for name, words in (
            ("stack_python", "Python stacks taken"),
            ("stack_python_cut", "cut"),
            ("stack_python_rejected", "rejected"),
            ("stack_python_fault", "unreadable"),
            ("python_frames_unresolved", "frames without a name"),
            ("stack_samples_dropped", "lost"),
        ):
            if found.get(name) or name in ("stack_python", "stack_samples_dropped"):
                parts.append(f"{found.get(name, 0):,} {words}")
        return ["stacks: " + ", ".join(parts), *absent]


def _symbols(pid: int) -> Symbols | RemoteSymbols:
    """What names the code of a process: in the reader process, where there is one.

    Raises:
        OSError: It has ended, or may not be looked at.
    """
    return RemoteSymbols(pid) if reader.shared.on else Symbols(pid)


def _among(numbers: NDArray[np.uint32], wanted: NDArray[np.uint32]) -> NDArray[np.bool_]:
    """Which numbers are among those that are wanted, of which there is one at least, in order."""
    places = np.minimum(np.searchsorted(wanted, numbers), len(wanted) - 1)
    found: NDArray[np.bool_] = wanted[places] == numbers
    return found


def _joined(parts: list[NDArray[np.void]], dtype: np.dtype[np.void]) -> NDArray[np.void]:
    """All of them. numpy copies structures field by field: one alone is taken as it is."""
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype), *parts])


def _chosen(rows: NDArray[np.void], which: NDArray[np.bool_]) -> NDArray[np.void]:
    """Those rows; as they are, if all are chosen."""
    return rows if which.all() else rows[which]


def _together(counts: NDArray[np.void], ids: NDArray[np.uint64]) -> tuple[NDArray[np.void], NDArray[np.uint64]]:
    """Rows that differ only in where in its functions a stack was, as one.

    Args:
        counts: ``records.STACK_COUNT``, shape (n,).
        ids: ``Stack.id`` of each; 0: none.
    """
    whose = counts["pid"].astype(np.uint64) << np.uint64(32) | counts["tid"]
    when = counts["what"].astype(np.uint64) << np.uint64(32) | counts["window"]
    order = np.lexsort((when, whose, ids))
    keys = [column[order] for column in (ids, whose, when)]
    begins = np.flatnonzero(
        np.concatenate([[True], np.logical_or.reduce([column[1:] != column[:-1] for column in keys])])
    )
    rows = counts[order]
    out = rows[begins]
    for name in ("count", "ns", "runqueue_ns"):
        out[name] = np.add.reduceat(rows[name], begins)
    for name in ("max_ns", "last_ns"):
        out[name] = np.maximum.reduceat(rows[name], begins)
    out["first_ns"] = np.minimum.reduceat(rows["first_ns"], begins)
    return out, keys[0][begins]


def _children(pid: int, *, all_threads: bool) -> list[int]:
    """Everything that a process has forked and that lives; empty where the kernel does not tell
    (CONFIG_PROC_CHILDREN).

    Args:
        pid: The process.
        all_threads: Also what other threads than the main one have forked.
    """
    found: list[int] = []
    queue = [pid]
    while queue:
        with contextlib.suppress(OSError):
            one = queue.pop()
            folder = f"{PROC}/{one}/task"
            for tid in os.listdir(folder) if all_threads else (one,):
                with contextlib.suppress(OSError):
                    children = [int(word) for word in read_file(f"{folder}/{tid}/children").split()]
                    found += children
                    queue += children
    return found


def _program(pid: int) -> bytes:
    """What changes with each exec: the auxiliary vector, whose random bytes and entry point lie elsewhere then."""
    try:
        return read_file(f"{PROC}/{pid}/auxv")
    except OSError:
        return b""
