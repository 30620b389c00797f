"""Which processes are sampled: ranks, their helpers and what those have forked, until their last samples are rows."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections import Counter as Tally
from collections.abc import Iterable
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import NDArray

from argus.capture.process.targets import PROC, mapped_pages, program_of
from argus.capture.process.threads import ThreadWatch
from argus.capture.python.code import DECODED_BYTES, CodeResolver
from argus.capture.python.interpreter import MAX_COUNT, PythonProcess, find_interpreter
from argus.capture.reader import reader
from argus.capture.reader.remote import RemotePython, RemoteResolver, RemoteSymbols
from argus.live.job import Job
from argus.live.mapped_libraries import MOST_MAPS_S, Reading
from argus.live.roster import YOUNG_S
from argus.live.sampling.children import Descendants
from argus.live.sampling.process import SampledProcess, symbols_of
from argus.live.sampling.programs import StackPrograms
from argus.live.session import Session
from argus.model.losses import Whom

REFRESH_ALL_S = 5.0
"""How often children of all threads are looked for, and programs executed that the kernel did not report."""
LATE_PYTHON_S, NO_PYTHON_S = 10.0, 60.0
"""How often a program without CPython is searched for one: when it has mapped something since, after its first minute,
and whatever it has mapped."""
CODE_S, FEW_PROCESSES = 10.0, 64
"""How often what a process maps is read to name its code, though it has mapped as much as before; less often where
there are more processes. Until then a library has the names of another of its size that lay where it lies now."""
KEPT_REASONS = 64
"""Why Python stacks of processes that have ended were not read."""
KEPT_THREADS = 1024
"""Of a process: names of threads that have ended, and that counts may still be of."""
SIGNS_OF_LIFE = ("switches_voluntary", "switches_involuntary", "cpu_ns")
"""Columns of ``records.THREAD_USAGE`` of which one is above 0 if the thread has run."""
NO_CPYTHON = "the process runs no CPython"


class SampledProcesses:
    """The processes of a session that are sampled.

    Args:
        session: The trace.
        programs: What samples them.
        counters: What is counted of processes that have ended, and of garbage collections, is added here.

    Attributes:
        by_pid: All of them, those included that have ended and whose last samples are no rows yet.
    """

    def __init__(self, session: Session, programs: StackPrograms, counters: Tally[str]) -> None:
        self._session = session
        self._programs = programs
        self._counters = counters
        self.by_pid: dict[int, SampledProcess] = {}
        self._descendants = Descendants(session)
        self._left_alone: set[int] = set()
        """Processes that could not be added at all."""
        self._ends: select.epoll | None = None
        self._live: dict[int, SampledProcess] = {}
        """By the descriptor by which ``_ends`` reports that the process has ended."""
        self._of_others: set[int] = set()
        """Processes of another user than their job's, such as a setuid program that a rank started."""
        self._unread: dict[int, str] = {}
        """Processes whose CPython is not understood, and why."""
        self._unread_before: Tally[str] = Tally()
        """The same of processes that have ended: how many for each reason, the first ``KEPT_REASONS``."""
        self._unread_of: Tally[int] = Tally()
        """The same, how many of each job."""
        self._features: dict[tuple[int, str], tuple[str, str]] = {}
        self._collected: dict[int, tuple[int, ...]] = {}
        """Garbage collections of each generation when they were last read."""
        self._refresh_all_due = 0.0
        self._execs = self._clones = self._clones_of_threads = self._clones_listed = -1

    def pids_of_jobs(self) -> list[tuple[Job, NDArray[np.uint32]]]:
        """Jobs that have processes, and their PIDs, in order."""
        pids_of: dict[int, tuple[Job, list[int]]] = {}
        for pid in sorted(self.by_pid):
            job = self.by_pid[pid].job
            pids_of.setdefault(id(job), (job, []))[1].append(pid)
        return [(job, np.array(pids, np.uint32)) for job, pids in pids_of.values()]

    # ---- processes that begin and end

    def open(self) -> None:
        """Begins: the programs are on."""
        self._ends = select.epoll()

    def find(self, jobs: Iterable[Job], now: float) -> list[SampledProcess]:
        """Adds ranks, their helpers, and what those have forked; reads anew those that run another program.

        Args:
            jobs: Every attempt of every job that is kept.
            now: ``time.monotonic()``.

        Returns:
            Those that came. Their threads are to be read (``read_threads``).
        """
        wanted = {
            pid: (job, member.rank) for job in jobs for pid, member in job.members.items() if member.state == "traced"
        }
        all_of_them = now >= self._refresh_all_due
        execs = self._programs.probes.execs()
        may_be_another = all_of_them or execs != self._execs
        self._execs = execs
        if all_of_them:
            self._refresh_all_due = now + REFRESH_ALL_S
            self._of_others = {pid for pid in self._of_others if os.path.exists(f"{PROC}/{pid}")}
        self._add_children(wanted, all_threads=all_of_them)
        self._note_ends()
        self._left_alone &= wanted.keys()
        for process in self._live.values():
            wanted.setdefault(process.pid, (process.job, process.rank))
        before = self.by_pid.keys() & wanted.keys()
        for pid, (job, rank) in wanted.items():
            sampled = self.by_pid.get(pid)
            if sampled is None and pid not in self._left_alone:
                with self.guard(pid, job):
                    self._add(pid, job, rank)
            elif sampled is not None and not sampled.ended and not sampled.quarantined:
                with self.guard(pid, sampled.job):
                    if may_be_another and self._runs_as_another(pid, sampled.job):
                        self.remove(pid)
                    else:
                        self._check_program(sampled, now, may_be_another=may_be_another)
        return [self.by_pid[pid] for pid in wanted if pid in self.by_pid and pid not in before]

    def _add_children(self, wanted: dict[int, tuple[Job, int]], *, all_threads: bool) -> None:
        """Adds what these processes have forked, if the kernel has counted a clone since; over several looks."""
        clones = self._programs.probes.clones()
        if clones != self._clones or (all_threads and clones != self._clones_of_threads):
            self._clones = clones
            if all_threads:
                self._clones_of_threads = clones
            self._descendants.search(all_threads=all_threads)
        self._descendants.find(wanted)

    def _runs_as_another(self, pid: int, job: Job) -> bool:
        """Whether a process runs as another user than its job, and is counted as left out: what a setuid program does
        is not for those who see the job of who started it."""
        try:
            uid = os.stat(f"{PROC}/{pid}").st_uid
        except OSError:
            return False  # it has ended
        if job.owner[0] in (-1, uid):
            self._of_others.discard(pid)
            return False
        if pid not in self._of_others:
            self._of_others.add(pid)
            self._session.losses.count("stack_processes_of_others", Whom(job))
        return True

    def _add(self, pid: int, job: Job, rank: int) -> None:
        assert self._ends is not None
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return  # it has ended
        if self._runs_as_another(pid, job):
            os.close(pidfd)
            return
        try:
            process = SampledProcess(pid, job, rank, symbols_of(pid), ThreadWatch(pid), pidfd, program_of(pid))
            process.since = time.monotonic()
        except OSError:
            os.close(pidfd)
            return
        self.by_pid[pid] = self._live[pidfd] = process
        self._ends.register(pidfd, select.EPOLLIN)
        self._execs = self._clones = self._clones_listed = -1
        self._find_python(process)  # first, or the first samples would lack their Python stacks
        self.renumber(process)

    def _note_ends(self) -> None:
        """Processes that have ended are kept until their last samples are rows."""
        assert self._ends is not None
        for pidfd, _ in self._ends.poll(0):
            self._ends.unregister(pidfd)
            process = self._live.pop(pidfd)
            process.ended, process.ended_ns = True, time.monotonic_ns()

    def guard(self, pid: int, job: Job | None) -> AbstractContextManager[None]:
        """Surrounds what is done for a process: what fails costs that process. ``job``: its job."""
        return self._session.bulkheads.process(pid, "stacks", lambda: self._quarantine(pid), job)

    def _quarantine(self, pid: int) -> None:
        """Samples a process no more, and reads nothing of it until it ends."""
        process = self.by_pid.get(pid)
        if process is None:
            self._left_alone.add(pid)
            return
        process.quarantined = True
        process.asleep.clear()
        if self._programs.on:
            self._programs.probes.remove_target(pid)
        self._write_feature(process, "sampling", "failed", "what the process holds could not be read")

    def remove_drained(self) -> None:
        """Forgets processes that have ended and whose last samples are rows."""
        for pid, process in list(self.by_pid.items()):
            if process.drained or (process.quarantined and process.ended):
                with self._session.bulkheads.part(f"stacks of process {pid}", process.job):
                    self.remove(pid)

    def remove(self, pid: int) -> None:
        """Forgets a process: its PID may be another's soon."""
        process = self.by_pid.pop(pid)
        self._live.pop(process.pidfd, None)
        if self._programs.on:
            self._programs.probes.remove_target(pid)
        self._counters.update(process.counters())
        self._collected.pop(pid, None)
        if why := self._unread.pop(pid, ""):
            self._unread_of[id(process.job)] += 1
            apart = why in self._unread_before or len(self._unread_before) < KEPT_REASONS
            self._unread_before[why if apart else "other reasons"] += 1
        for key in [key for key in self._features if key[0] == pid]:
            del self._features[key]
        process.close()

    def forget(self, job: Job) -> None:
        """Drops what is kept of a job that is over."""
        del self._unread_of[id(job)]
        if not self._programs.on:
            gone = job.members.keys()
            self._features = {key: state for key, state in self._features.items() if key[0] not in gone}

    def close(self) -> None:
        """Lets go of all of them."""
        for pid in list(self.by_pid):
            process = self.by_pid.pop(pid)
            self._counters.update(process.counters())
            process.close()
        self._live.clear()
        if self._ends is not None:
            self._ends.close()
            self._ends = None

    # ---- their programs

    def _check_program(self, process: SampledProcess, now: float, *, may_be_another: bool) -> None:
        """Reads a process anew that runs another program, or a CPython that was not there before."""
        if may_be_another and (program := program_of(process.pid)) != process.program:
            process.program = program
            self._begin_program(process)
        elif process.retry and self._may_have_loaded(process, now):
            before = process.resolver
            self._find_python(process)
            if process.resolver is not before:
                self.renumber(process)  # the new one needs all code objects

    @staticmethod
    def _may_have_loaded(process: SampledProcess, now: float) -> bool:
        """Whether a CPython may be there that was not when it was searched for, which means to open all files that the
        process maps. One that has not begun yet is read each time."""
        if process.interpreter is not None:
            return True
        soon_s = 0.0 if now < process.since + YOUNG_S else LATE_PYTHON_S
        if now < process.searched + soon_s:
            return False
        try:
            pages = mapped_pages(process.pid)
        except OSError:
            return False
        if now < process.searched + NO_PYTHON_S and pages == process.mapped:
            return False
        process.mapped, process.searched = pages, now
        return True

    def _begin_program(self, process: SampledProcess) -> None:
        """The process has called exec: all that was read of its memory is void."""
        with contextlib.suppress(OSError):
            fresh = symbols_of(process.pid)
            self._counters.update(process.symbols.counters)
            process.symbols.close()
            process.symbols, process.code = fresh, Reading()
            self._drop_python(process)
            process.interpreter = None
            process.mapped, process.since = b"", time.monotonic()
            process.asleep.clear()
            process.retry = True
            self._find_python(process)
            self.renumber(process)

    def _find_python(self, process: SampledProcess) -> None:
        """CPython may be loaded late: a launcher execs it, a program embeds it."""
        symbols = process.symbols
        remote = symbols if isinstance(symbols, RemoteSymbols) else None
        try:
            interpreter = find_interpreter(process.pid) if remote is None else remote.find_python()
        except OSError as failure:
            if isinstance(failure, reader.Unreadable):
                self._write_feature(process, "python_stacks", "off", "its memory or its files do not answer")
            return
        process.interpreter = interpreter
        if interpreter is None:
            self._unread.pop(process.pid, None)
            self._write_feature(process, "python_stacks", "off", NO_CPYTHON)
            return
        state, _, reason = interpreter.state.partition(": ")
        if interpreter.layout is None and interpreter.settled:
            self._unread[process.pid] = reason
        else:
            self._unread.pop(process.pid, None)
        if interpreter.layout is not None:
            try:
                python = PythonProcess(process.pid, interpreter) if remote is None else RemotePython(remote)
            except OSError:
                return
            self._drop_python(process)
            process.python = python
            if isinstance(python, PythonProcess):
                process.resolver = CodeResolver(python, interpreter.layout)
            else:
                process.resolver = RemoteResolver(python.symbols)
            self._programs.probes.set_python(process.pid, interpreter.layout)
            process.python_since_ns = time.monotonic_ns()
            self._programs.probes.set_threads(process.pid, process.python.thread_states())
            reason = reason or "CPython " + ".".join(map(str, interpreter.version[:2]))
        process.retry = not interpreter.settled
        self._write_feature(process, "python_stacks", state, reason)

    def _drop_python(self, process: SampledProcess) -> None:
        if process.resolver is not None:
            self._counters.update(process.resolver.counters)
        if process.python is not None:
            process.python.close()
        process.python = process.resolver = None

    def renumber(self, process: SampledProcess) -> None:
        """From now on the process's stacks have other numbers, and are sent again."""
        process.placed.clear()
        process.doubts.clear()
        self._programs.probes.add_target(process.pid, process.job.owner)

    # ---- their threads

    def threads(self) -> list[int] | None:
        """TIDs of all threads; None: some have begun since they were listed."""
        if self._programs.probes.clones() != self._clones_listed:
            return None
        return [tid for process in self.by_pid.values() for tid in process.threads.tids]

    def begin_listing(self) -> None:
        """``read_threads`` is called for each process from here on."""
        self._clones_listed = self._programs.probes.clones()

    def read_threads(self, process: SampledProcess, *, with_names: bool) -> NDArray[np.void]:
        """Reads the times of a process's threads, ``records.THREAD_USAGE``, and what depends on whether it has run.

        Args:
            process: A process that has not ended.
            with_names: Also names, mappings and thread states, if it has run since that was done; without it they are
                read only if there are new threads.

        Raises:
            OSError: It has ended.
        """
        usage = process.threads.usage(time.monotonic_ns())
        # What was not measured is not 0.
        ran = not len(usage) or any(usage[name].any() for name in SIGNS_OF_LIFE)
        process.ran |= ran
        if (with_names and process.ran) or not process.names.keys() >= set(usage["tid"].tolist()):
            process.ran = False
            if self._has_moved(process):
                self.renumber(process)  # other code may lie where functions were that the kernel was given
            names = process.threads.names()
            if len(process.names) > len(names) + KEPT_THREADS:
                process.names.clear()
                process.awake &= names.keys()
            process.names.update(names)
            if process.python is not None:
                self._programs.probes.set_threads(process.pid, process.python.thread_states())
            self._write_sampling(process)
        if process.resolver is not None:
            process.resolver.budget = DECODED_BYTES
        if process.python is not None and ran:
            self._count_collections(process, process.python)
        for what, text in process.threads.state.items():
            state, _, reason = text.partition(": ")
            self._write_feature(process, f"{what} delay", state, reason)
        return usage

    def _has_moved(self, process: SampledProcess) -> bool:
        """Reads again what the process maps, if it may be something else. Returns whether code is no longer where it
        was.

        Raises:
            OSError: It has ended.
        """
        pages, now = mapped_pages(process.pid), time.monotonic()
        if not process.symbols.grows and not process.code.due(pages, now):
            return False
        moved = process.symbols.refresh()
        most_s = CODE_S * max(len(self.by_pid) / FEW_PROCESSES, 1.0)
        same = not moved and pages == process.code.pages
        process.code.read(pages, now, same=same, most_s=min(most_s, MOST_MAPS_S))
        return moved

    def _count_collections(self, process: SampledProcess, python: PythonProcess | RemotePython) -> None:
        collections = python.collections()
        if collections is not None:
            before = self._collected.get(process.pid, collections)
            for number, (old, new) in enumerate(zip(before, collections, strict=False)):
                name = f"gc_collections_generation_{number}"
                self._counters[name] = min(self._counters[name] + max(new - old, 0), MAX_COUNT)
            self._collected[process.pid] = collections

    # ---- what works

    def unread_pythons(self) -> Tally[str]:
        """How many processes' CPython was not understood, for each reason; those included that have ended."""
        return Tally(self._unread.values()) + self._unread_before

    def unread_pythons_of(self, job: Job) -> int:
        """Of these, how many are a job's."""
        there = sum(pid in self.by_pid and self.by_pid[pid].job is job for pid in self._unread)
        return there + self._unread_of[id(job)]

    def write_sampling(self) -> None:
        """Stores, as features, how each process is sampled now, where that has changed."""
        for process in self.by_pid.values():
            self._write_sampling(process)

    def _write_sampling(self, process: SampledProcess) -> None:
        programs = self._programs
        for what, text in programs.probes.state.items():
            state, _, reason = text.partition(": ")
            if what == "sampling" and state == "on":
                reason = f"{programs.rate_hz} a second" + (f": {programs.rate_reason}" if programs.rate_reason else "")
            self._write_feature(process, what, state, reason)

    def write_not_started(self, jobs: Iterable[Job]) -> None:
        """Stores that nothing is sampled, as features of the ranks that would have been."""
        for job in jobs:
            for pid, member in job.members.items():
                if member.state == "traced":
                    for part, text in self._programs.not_started.items():
                        state, _, reason = text.partition(": ")
                        self._write_state(job, member.rank, pid, part, state, reason)

    def _write_feature(self, process: SampledProcess, feature: str, state: str, reason: str) -> None:
        self._write_state(process.job, process.rank, process.pid, feature, state, reason)

    def _write_state(self, job: Job, rank: int, pid: int, feature: str, state: str, reason: str) -> None:
        key = (pid, feature)
        if self._features.get(key) == (state, reason):
            return
        self._features[key] = (state, reason)
        self._session.write_features(job, [rank], [(feature, state, reason)])
