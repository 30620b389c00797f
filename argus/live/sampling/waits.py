"""Waits that have not ended: the kernel counts a wait when it ends, which that of a hanging thread never does."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from argus.capture.blocked import read_blocked
from argus.capture.reader.remote import RemotePython, RemoteResolver, RemoteSymbols
from argus.live.sampling.dictionary import StackDictionary
from argus.live.sampling.process import SampledProcess
from argus.live.sampling.processes import SIGNS_OF_LIFE, SampledProcesses
from argus.live.sampling.programs import StackPrograms
from argus.live.session import Session
from argus.model import records
from argus.model.losses import Owner, Whom

WAITING_S = 2.0
"""A thread that has been off the CPU for so long is reported while it waits, whenever counts become rows."""

HELD_S = 2.0
"""So long threads that slept when Argus came are read in one turn, of all processes; users have equal parts. A thread
takes some milliseconds."""

ONGOING_S, AT_THE_END_S = 0.5, 2.0
"""So long threads are read in a call for waits that go on, of all owners together; and when nothing comes after it."""
PUT_OFF_S = 30.0
"""A wait whose thread could not be read yet is reported so much later at most, then without its stack."""

_Item = TypeVar("_Item")
_Wait = tuple[int, tuple[int, int], int, int]
"""A thread, its stack and ``what``, from and until when it waited, CLOCK_MONOTONIC."""


@dataclass
class _Reported:
    """What was reported of a thread's wait while it lasted."""

    since_ns: int
    reported_ns: int
    stack: int
    what: int
    kernel_stack: int
    """As the kernel numbers it: 0: it took none."""
    settled: bool = False
    """Its thread was read, or need not be: its stack stays what it is."""
    over_ns: int | None = None
    """When it was seen to be over: once all that was counted before has come, it is in no count to come."""

    def is_counted_in(self, row: np.void) -> bool:
        """Whether a row of the thread's, ``records.STACK_COUNT`` with the same stack, may have it."""
        if int(row["max_ns"]) < self.reported_ns or int(row["first_ns"]) > self.since_ns:
            return False
        return int(row["last_ns"]) >= self.since_ns + self.reported_ns


class Waits:
    """Reports waits piece by piece while they last, and takes those pieces off the count that comes in the end.

    Args:
        programs: What follows threads off the CPU.
        processes: Whose threads.
        dictionary: Where stacks go that are read from outside.
        session: The trace: time for reading them is taken of their owners' parts.
    """

    def __init__(
        self, programs: StackPrograms, processes: SampledProcesses, dictionary: StackDictionary, session: Session
    ) -> None:
        self._session = session
        self._programs = programs
        self._processes = processes
        self._dictionary = dictionary
        self._reported: dict[tuple[int, int, int], _Reported] = {}
        """By process, thread, and since when it waits."""
        self._off: set[tuple[int, int]] = set()
        """Processes and threads that the kernel had off the CPU when it was last asked."""
        self._put_off: dict[tuple[int, int, int], int] = {}
        """Waits of these that are not reported yet, since their threads are still to be read: since when."""
        self._asleep_s: dict[int, float] = {}
        """Of users with processes: how long threads of theirs that slept when Argus came were read in this turn."""
        self._to_come: Tally[int] = Tally()
        """Of users: processes whose turn has not come yet."""
        self._last = False
        self._turn = 0
        self._served: dict[Hashable, int] = {}
        """Users, containers and processes: the last turn in which a thread of theirs was read."""

    @property
    def behind(self) -> bool:
        """Whether ``ongoing`` has left something for its next call, which should be soon."""
        return bool(self._put_off)

    def asked_for(self) -> dict[Owner, list[int]]:
        """Of owners: the stacks of waits that were reported and go on; their next rows have them, too."""
        numbers: dict[Owner, list[int]] = {}
        for (pid, _, _), wait in self._reported.items():
            process = self._processes.by_pid.get(pid)
            if process is not None and wait.stack and wait.over_ns is None:
                numbers.setdefault(process.job.owner, []).append(wait.stack)
        return numbers

    # ---- waits whose begin the kernel has seen

    def ongoing(self, *, final: bool) -> NDArray[np.void]:
        """Rows for threads that are off the CPU and stay there, a piece at a time.

        Args:
            final: Nothing comes after it: short waits, too.

        Returns:
            ``records.STACK_COUNT``.
        """
        off = self._programs.probes.off_now(tids=None if final else self._processes.threads())
        now_ns = time.monotonic_ns()
        shortest_ns = self._programs.off_cpu_ns or 0 if final else WAITING_S * 1e9
        due: list[tuple[tuple[int, int, int], _Reported]] = []
        unread: list[tuple[SampledProcess, int, _Reported]] = []
        self._off = set()
        for one in off:
            pid, tid, since = int(one["pid"]), int(one["tid"]), int(one["since_ns"])
            self._off.add((pid, tid))
            wait = self._reported.get((pid, tid, since))
            if wait is None:
                wait = _Reported(since, 0, int(one["stack"]), int(one["what"]), int(one["stack"]))
            wait.over_ns = None
            if now_ns - since - wait.reported_ns < shortest_ns:
                continue
            due.append(((pid, tid, since), wait))
            process = self._processes.by_pid.get(pid)
            if process is None or process.quarantined or (wait.stack and since >= process.python_since_ns):
                wait.settled = True
            elif not wait.settled:
                # The kernel took no stack when it went, or took it before it knew of the interpreter.
                unread.append((process, tid, wait))
        self._read_in_turns(unread, AT_THE_END_S if final else ONGOING_S)
        due = self._without_put_off(due, now_ns, final=final)
        rows = np.zeros(len(due), records.STACK_COUNT)
        for row, ((pid, tid, since), wait) in zip(rows, due, strict=True):
            fresh = now_ns - since - wait.reported_ns
            row["stack"], row["pid"], row["tid"], row["what"] = wait.stack, pid, tid, wait.what
            row["count"] = 0 if wait.reported_ns else 1
            row["ns"] = row["max_ns"] = fresh
            row["first_ns"], row["last_ns"] = since + wait.reported_ns, now_ns
            wait.reported_ns += fresh
            self._reported[pid, tid, since] = wait
        self._forget_ended(off, now_ns)
        return rows

    def _read_in_turns(self, unread: list[tuple[SampledProcess, int, _Reported]], held_s: float) -> None:
        """Reads threads for so long: users take turns, so do a user's containers, and processes in one."""
        refused: set[Hashable] = set()
        until = time.monotonic() + held_s
        for process, tid, wait in self._in_turns(unread):
            if time.monotonic() >= until:
                return
            owner, pid = process.job.owner, process.pid
            if process.quarantined or owner in refused or pid in refused:
                continue
            if not self._dictionary.has_room(owner):
                refused.add(owner)
            elif not self._session.has_time(pid):
                refused.add(pid)
            else:
                wait.settled = True
                wait.stack = self._stack_of(process, tid) or wait.stack
                self._note_served(process)

    def _in_turns(
        self, unread: list[tuple[SampledProcess, int, _Reported]]
    ) -> Iterator[tuple[SampledProcess, int, _Reported]]:
        """All of them; those whose turn was longest ago first."""
        if not unread:
            return iter(())
        users: dict[int, dict[Owner, dict[int, list[tuple[SampledProcess, int, _Reported]]]]] = {}
        for one in unread:
            owner, pid = one[0].job.owner, one[0].pid
            users.setdefault(owner[0], {}).setdefault(owner, {}).setdefault(pid, []).append(one)
        self._forget_served()

        def last(place: Hashable) -> int:
            return self._served.get(place, 0)

        parts = []
        for user in sorted(users, key=last):
            containers = []
            for owner in sorted(users[user], key=last):
                processes = sorted(users[user][owner].items(), key=lambda item: last(("pid", item[0])))
                containers.append(_alternately(iter(threads) for _, threads in processes))
            parts.append(_alternately(containers))
        return _alternately(parts)

    def _forget_served(self) -> None:
        """When users, containers and processes that are gone had their turns."""
        there: set[Hashable] = set()
        for pid, process in self._processes.by_pid.items():
            there |= set(_places(process.job.owner, pid))
        self._served = {key: turn for key, turn in self._served.items() if key in there}

    def _note_served(self, process: SampledProcess) -> None:
        self._turn += 1
        self._served |= dict.fromkeys(_places(process.job.owner, process.pid), self._turn)

    def _without_put_off(
        self, due: list[tuple[tuple[int, int, int], _Reported]], now_ns: int, *, final: bool
    ) -> list[tuple[tuple[int, int, int], _Reported]]:
        """Waits that are reported now. Others have time until their threads are read; what then lacks its stack is
        counted."""
        chosen, before = [], self._put_off
        self._put_off = {}
        for key, wait in due:
            if not wait.settled and not wait.reported_ns:
                since_ns = before.get(key, now_ns)
                if not final and now_ns < since_ns + PUT_OFF_S * 1e9:
                    self._put_off[key] = since_ns
                    continue
                self._count_unread(self._processes.by_pid[key[0]])
            chosen.append((key, wait))
        return chosen

    def _stack_of(self, process: SampledProcess, tid: int) -> int:
        """``Stack.id`` of a thread that waits, from outside; 0: it was not read."""
        blocked = None
        with self._processes.guard(process.pid, process.job), self._session.looking_up(process.pid):
            blocked = self._read_blocked(process, tid)
        return 0 if blocked is None else blocked[0]

    def _count_unread(self, process: SampledProcess) -> None:
        self._session.losses.count("look_ups_over_share", Whom(process.job))

    def _forget_ended(self, off: NDArray[np.void], now_ns: int) -> None:
        """Drops waits that are over and that no count is of: their threads have ended."""
        waits = set(zip(off["pid"].tolist(), off["tid"].tolist(), off["since_ns"].tolist(), strict=True))
        for key in self._reported.keys() - waits:
            wait = self._reported[key]
            if wait.over_ns is None:
                wait.over_ns = now_ns
            elif self._programs.probes.counted_ns > wait.over_ns:
                del self._reported[key]

    def without_reported(self, counts: NDArray[np.void]) -> NDArray[np.void]:
        """Takes off ``records.STACK_COUNT`` what was reported already of waits that are over now."""
        if not self._reported:
            return counts
        waited = np.fromiter((pid << 32 | tid for pid, tid, _ in self._reported), np.uint64, len(self._reported))
        threads = counts["pid"].astype(np.uint64) << np.uint64(32) | counts["tid"]
        places = np.flatnonzero(((counts["what"] & records.WHAT_OFF) != 0) & np.isin(threads, waited))
        if not len(places):
            return counts
        counts = counts.copy()
        of_stack: dict[tuple[int, int, int], list[int]] = {}
        whose = (counts[name][places].tolist() for name in ("pid", "tid", "stack"))
        for place, pid, tid, stack in zip(places.tolist(), *whose, strict=True):
            of_stack.setdefault((pid, tid, stack), []).append(place)
        for key, wait in list(self._reported.items()):
            for place in of_stack.get((*key[:2], wait.kernel_stack), ()):
                row = counts[place]
                if wait.is_counted_in(row):
                    row["ns"] -= min(wait.reported_ns, int(row["ns"]))
                    row["count"] -= min(1, int(row["count"]))
                    if row["count"] == 0:
                        row["max_ns"] = max(int(row["max_ns"]) - wait.reported_ns, 0)
                    row["first_ns"] = max(int(row["first_ns"]), wait.since_ns + wait.reported_ns)
                    del self._reported[key]
                    break
        return counts

    # ---- waits that had begun when Argus came

    def begin_turn(self, found: Sequence[SampledProcess] | None = None, *, final: bool = False) -> list[SampledProcess]:
        """Before ``next_is`` and ``asleep`` are called for processes: there is time for them again.

        Args:
            found: For which; None: for all.
            final: Nothing comes after it: what is not read is lost, and counted.

        Returns:
            They: those of whose user, container, and themselves threads were read longest ago come first.
        """
        self._last = final
        all_of_them = list(self._processes.by_pid.values())
        processes = all_of_them if found is None else found
        self._asleep_s = {process.job.owner[0]: 0.0 for process in all_of_them}
        self._to_come = Tally(process.job.owner[0] for process in processes)
        self._forget_served()
        return sorted(
            processes,
            key=lambda one: [self._served.get(place, 0) for place in _places(one.job.owner, one.pid)],
        )

    def _may_read_asleep(self, process: SampledProcess, until_s: float) -> bool:
        """Whether there is time, and room, for a further thread of a process in this turn."""
        if not self._dictionary.has_room(process.job.owner) or not self._session.has_time(process.pid):
            return False
        held_s = self._asleep_s.get(process.job.owner[0], 0.0)
        return held_s < until_s and sum(self._asleep_s.values()) < HELD_S

    def next_is(self, process: SampledProcess) -> None:
        """A process's turn comes, whether or not there is something to read: what it leaves is the others'."""
        user = process.job.owner[0]
        self._to_come[user] = max(self._to_come[user] - 1, 0)

    def _part_of(self, process: SampledProcess) -> float:
        """Until when threads of a process may be read, by what was read of its user's: processes that come later have
        as much, and at least their main threads."""
        user = process.job.owner[0]
        held_s, of_user_s = self._asleep_s.get(user, 0.0), HELD_S / max(len(self._asleep_s), 1)
        return held_s + (of_user_s - held_s) / (self._to_come[user] + 1)

    def asleep(
        self, process: SampledProcess, usage: NDArray[np.void], pending: Sequence[NDArray[np.void]]
    ) -> NDArray[np.void]:
        """Rows for threads that were off the CPU when Argus came, and have been since: those of a job that hangs.
        Threads that there is no time to read now are reported later, from when they began.

        Args:
            process: A process.
            usage: Of its threads, ``records.THREAD_USAGE``, at least one.
            pending: Counts that are to become rows, ``records.STACK_COUNT``.

        Returns:
            ``records.STACK_COUNT``.
        """
        with self._session.looking_up(process.pid):
            ran, waits = self._awake(process, usage, pending)
        states: dict[int, int] | None = None
        may_read, until_s = True, self._part_of(process)
        slept = usage[~ran]
        for one in slept[np.argsort(slept["tid"] != process.pid, kind="stable")]:
            tid = int(one["tid"])
            if tid in process.awake or (process.pid, tid) in self._off:
                continue
            blocked, since_ns = process.asleep.get(tid), int(one["begin_ns"])
            if blocked is None:
                may_read = may_read and self._may_read_asleep(process, until_s)
                if not may_read:
                    if self._last:
                        self._count_unread(process)
                    process.unread.setdefault(tid, since_ns)
                    continue
                since_ns = process.unread.get(tid, since_ns)
                begun = time.monotonic()
                with self._session.looking_up(process.pid):
                    if states is None and process.python is not None:
                        states = process.python.thread_states()
                    blocked = self._read_blocked(process, tid, states)
                user = process.job.owner[0]
                self._asleep_s[user] = self._asleep_s.get(user, 0.0) + time.monotonic() - begun
                self._note_served(process)
                if blocked is None:
                    continue
                process.unread.pop(tid, None)
                process.asleep[tid] = blocked
            waits.append((tid, blocked, since_ns, int(one["end_ns"])))
        process.asleep_until_ns = int(usage["end_ns"].max())
        return _rows(process, waits)

    def _awake(
        self, process: SampledProcess, usage: NDArray[np.void], pending: Sequence[NDArray[np.void]]
    ) -> tuple[NDArray[np.bool_], list[_Wait]]:
        """Which threads have run, and the ends of waits of those that have woken or ended."""
        ran = np.logical_or.reduce([usage[name] > 0 for name in SIGNS_OF_LIFE])
        process.awake.update(usage["tid"][ran].tolist())
        if process.unread:
            asleep = set(usage["tid"][~ran].tolist())
            for tid in process.unread.keys() - asleep:
                del process.unread[tid]
                self._count_unread(process)
        waits: list[_Wait] = []
        woken = usage[ran & np.isin(usage["tid"], list(process.asleep))]
        ended = process.asleep.keys() - set(usage["tid"].tolist())
        met_ns = _first_met_ns(process, ended.union(woken["tid"].tolist()), pending)
        for one in woken:
            # It woke before it was met first. Since then it has run, waited for a CPU, and waited for less than is
            # counted as often as it was switched: it woke no earlier than so long before.
            tid = int(one["tid"])
            spent_ns = sum(max(int(one[name]), 0) for name in ("cpu_ns", "runqueue_ns"))
            spent_ns += max(int(one["switches_voluntary"]), 0) * (self._programs.off_cpu_ns or 0)
            until_ns = met_ns.get(tid, 0) - spent_ns
            waits.append((tid, process.asleep.pop(tid), process.asleep_until_ns, until_ns))
        for tid in ended:
            waits.append((tid, process.asleep.pop(tid), process.asleep_until_ns, met_ns.get(tid, 0)))
        return ran, waits

    def asleep_until_the_end(self, process: SampledProcess, pending: Sequence[NDArray[np.void]]) -> NDArray[np.void]:
        """The same of a process that has ended: they waited until they were met, ending, or until then."""
        for _ in process.unread:
            self._count_unread(process)
        process.unread.clear()
        met_ns = _first_met_ns(process, process.asleep, pending)
        until = {tid: met_ns.get(tid) or process.ended_ns for tid in process.asleep}
        since_ns = process.asleep_until_ns
        rows = _rows(process, [(tid, blocked, since_ns, until[tid]) for tid, blocked in process.asleep.items()])
        process.asleep.clear()
        return rows

    def _read_blocked(
        self, process: SampledProcess, tid: int, states: dict[int, int] | None = None
    ) -> tuple[int, int] | None:
        """Stack and ``what`` of a thread that waits, from outside; None: it runs, or has ended."""
        layout = process.interpreter.layout if process.interpreter is not None else None
        symbols, python, resolver = process.symbols, process.python, process.resolver
        try:
            if isinstance(symbols, RemoteSymbols):
                blocked = symbols.blocked(tid)
            else:
                assert not isinstance(python, RemotePython)
                assert not isinstance(resolver, RemoteResolver)
                blocked = read_blocked(process.pid, tid, symbols, python, resolver, layout, states)
        except OSError:
            return None
        if blocked is None:
            return None
        self._dictionary.add(blocked.stack.id, blocked.stack, process.job.owner)
        return blocked.stack.id, blocked.what


def _places(owner: Owner, pid: int) -> tuple[Hashable, ...]:
    """Whose turn it is when a thread of a process is read."""
    return owner[0], owner, ("pid", pid)


def _alternately(parts: Iterable[Iterator[_Item]]) -> Iterator[_Item]:
    """One of each part, then another of each that has more."""
    waiting = deque(parts)
    while waiting:
        part = waiting.popleft()
        for item in part:
            yield item
            waiting.append(part)
            break


def _first_met_ns(
    process: SampledProcess, tids: Collection[int], pending: Iterable[NDArray[np.void]]
) -> dict[int, int]:
    """When threads went off the CPU or were sampled first, of what is to become rows; those that did not are left
    out."""
    if not tids:
        return {}
    wanted = np.sort(np.fromiter(tids, np.uint32, len(tids)))
    first_ns = np.full(len(wanted), np.iinfo(np.uint64).max, np.uint64)
    met = np.zeros(len(wanted), np.bool_)
    for part in pending:
        rows = np.flatnonzero(part["pid"] == process.pid)
        rows = rows[np.isin(part["tid"][rows], wanted)]
        places = np.searchsorted(wanted, part["tid"][rows])
        np.minimum.at(first_ns, places, part["first_ns"][rows])
        met[places] = True
    return dict(zip(wanted[met].tolist(), first_ns[met].tolist(), strict=True))


def _rows(process: SampledProcess, waits: Iterable[_Wait]) -> NDArray[np.void]:
    """``records.STACK_COUNT`` for waits; what lasted no time is left out."""
    waits = [wait for wait in waits if wait[2] < wait[3]]
    rows = np.zeros(len(waits), records.STACK_COUNT)
    rows["pid"] = process.pid
    for row, (tid, blocked, begin_ns, end_ns) in zip(rows, waits, strict=True):
        row["stack"], row["what"], row["tid"] = *blocked, tid
        row["ns"] = row["max_ns"] = end_ns - begin_ns
        row["first_ns"], row["last_ns"] = begin_ns, end_ns
    return rows
