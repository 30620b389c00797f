"""The parent's side of the reader: a process that opens and parses what traced processes have written.

What is asked of it is answered with plain data of bounded size, each part of which is checked; where it cannot be had,
the answer is an ``OSError``, as of a process that has ended. So whoever asks needs no other path for a reader that
hangs, that was killed or that runs out of memory.

A reader has CPU time for a request (``wire.CPU_S``), not time on the clock: a busy node is no failure. One that neither
runs nor waits for a CPU, and has not for ``HUNG_S``, or in all for ``SLOW_S``, is given up: it is ended, without a wait
for its end; another one begins. What it hung on it has written into a page that both see. If that is a file, nothing of
its file system is opened for a while for processes of that user in that container: others may read from it, and their
experience is their own. If Argus itself lives on that file system, it is alive, and the process did something to its
file: only for that process nothing of it is opened. The same holds for a path that the process chose, which may lead
anywhere. If it is memory, the memory of that process is not read any more; the rest of what can be read of the process
goes on. Who brings a reader down in another way, or has it answer nonsense, twice, is not read any more at all.

While a reader reads, the loop of a trace waits. So processes, users in one container, and users have a share of its
time (``PROCESS_SHARE``, ``OWNER_SHARE``, ``USER_SHARE``), and of the readers that may be left hanging (``MOST_HUNG``):
beyond it they are refused until they have some again.

Readers are forks of a process that has imported everything and read nothing (``process``), which begins before a
trace gives up its rights. Imports no numpy.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import json
import mmap
import os
import re
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from argus.capture.process.mapped import device_of
from argus.capture.reader import left_out, progress, wire
from argus.capture.reader.wire import HEADER, MAGIC, MAX_BYTES, MAX_FDS, MAX_JSON
from argus.model.counters import describe
from argus.system import disk_cache, privileges
from argus.system.aside import Aside
from argus.system.proc import field_of, owner_of, read_file, stat_of

PROC = Path("/proc")
HUNG_S, HUNG_AT_START_S = 4.0, 30.0
"""A reader that has used no CPU and was not switched for so long, and waits for none, hangs: longer than a read of a
busy disk takes. A file system of the network may take longer, and is tried again. The second is for imports."""
LOOK_S = 0.1
"""How often that is looked at."""
HELD_S, MOST_HELD = 1.0, 3
"""Who looks so late was held up itself (a stopped container, Ctrl-Z), and its readers most likely with it: that time is
not theirs, so many times while one answer is waited for."""
SLOW_S, SLOW_PER_CPU, SLOWEST_S = 10.0, 10.0, 40.0
"""A reader may wait for so long in all during a request, and for so much more as it uses CPU time, up to the third: on
a cold disk each of a thousand files takes 10 ms. A file system that answers each read after some seconds hangs."""
PROCESS_S, PROCESS_SHARE = 60.0, 0.2
"""For so long a process is read at first, and this share of the time after that: CPU time and waits for its files. A
process with a PyTorch of its own takes some 10 s at first, then a few ms a stack."""
OWNER_S, OWNER_SHARE = 120.0, 0.4
"""The same for all processes of a user in one container."""
USER_S, USER_SHARE = 8 * OWNER_S, 2 * OWNER_SHARE
"""The same for all processes of a user: in containers, most are root's."""
MOST_CHARGED_S = 30.0
"""Of one request. Time in which Argus itself was stopped is in it."""
LONGEST_S = 600.0
"""Longest wait for an answer of a reader that does something: its CPU time ends before, unless a node is very busy."""
RETRY_S, LONGEST_RETRY_S = 60.0, 3600.0
"""For so long nothing is opened of a file system that did not answer: twice as long each time."""
STRIKES = 2
"""So often a process may bring a reader down in a way that does not show by what."""
MOST_HANGS = 3
"""File systems that do not answer that a process may bring, each of which costs :data:`HUNG_S`: whose mounts are his
own may have any number. Beyond it nothing of the process is read."""
PATIENT, PATIENT_WITH_USER, IMPATIENT_S = 8, 64, 0.5
"""After so many files or memories that did not answer, of one user's processes in a container or in all of them, others
of these are waited for so long: who starts a thousand such processes must not hold up the trace for an hour."""
MOST_MISSED = 64
"""File systems that an answer may name."""
MOST_HUNG, MOST_HUNG_OF_OWNER = 32, 4
"""Readers that may be left hanging in all, and for one user's processes in a container: a process in the kernel's hands
cannot be ended. All processes of a user may leave as many as stay free. Whoever has left so many is not read until one
has ended."""
_LETS_GO = ("close", "forget")
"""Requests that only let go of something."""
_MOST_KEPT = 4096
"""Hangs by what was touched and by whose it was, the newest: file systems come and go, and containers."""
_MOST_BUDGETS = 16_384
"""Processes, or users, of which is remembered what they have left."""
Owner = tuple[int, str]
"""User and container (``owner_of``)."""
NOBODY: Owner = -1, ""
OWNER_FOR_S = 1.0
"""For so long a process is taken to be whose it was: to look costs 70 us."""
Key = TypeVar("Key", bound=Hashable)
Made = TypeVar("Made")
_MOST_ERRNO = 4096
"""MAX_ERRNO of include/linux/err.h, and one more."""
_DEVICE = re.compile(r"[0-9a-f]+:[0-9a-f]+")
_ENTRY = re.compile(r"[0-9a-f]{32}\.json")
PROGRAM_BYTES = 64
"""Of a program: the header of an ELF file."""
_MOST_MAPS = 64 << 20
"""Of a process's list of mappings: 65,530 of them with paths of a kilobyte."""
_EXECUTABLE_LINE = re.compile(rb"^[0-9a-f]+-[0-9a-f]+ ..x. .*\n", re.MULTILINE)


def not_counted(counter: str, pid: int, number: int, device: str) -> None:
    """Nobody traces."""


class Unreadable(OSError):
    """What was asked could not be had of the reader."""

    def __init__(self, what: str) -> None:
        super().__init__(errno.EIO, what)


class Malformed(Exception):
    """An answer that no reader gives."""


@dataclass
class Answer:
    """What a reader answered.

    Attributes:
        pid: The process that it was asked about.
    """

    what: dict[str, Any]
    data: bytes
    fds: list[int]
    pid: int = 0

    def close(self) -> None:
        """Closes descriptors that nobody took."""
        _close(self.fds)
        self.fds = []


class Reader:
    """Asks readers, for all traces of this process. Any thread may: they wait for one another.

    Args:
        cpu_s: CPU time of a request.
        memory_bytes: Memory of a reader, beyond what it takes to start.

    Attributes:
        counters: "reader_restarts", "file_systems_hung", "memory_hung", "processes_unreadable", "reads_over_budget".
        generation: Changes with each reader's end and begin: what an earlier one knew, this one does not.
    """

    def __init__(self, cpu_s: float = wire.CPU_S, memory_bytes: int = wire.MEMORY_BYTES) -> None:
        self._cpu_s, self._memory_bytes = cpu_s, memory_bytes
        self._lock = threading.RLock()
        self._users = 0
        self.counters: Counter[str] = Counter()
        self.generation = 0
        self.on_slow: Callable[[str], None] | None = None
        """Called with the path of a library before its tables are read, if that takes long."""
        self.trouble = ""
        """What is the matter with it, for people; empty: nothing."""
        self.on_loss: Callable[[str, int, int, str], None] = not_counted
        """Called with each loss of a process: counter, process, how many, and the file system, if it is one's."""
        self._nursery: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._page: mmap.mmap | None = None
        self._sock: socket.socket | None = None
        self._pid = 0
        self._left: list[tuple[int, Owner]] = []
        self._most_cpu_s = 0.0
        self._strikes: Counter[int] = Counter()
        self._no_memory: set[int] = set()
        self._hangs: Counter[int] = Counter()
        self._hangs_of: Counter[Owner | int] = Counter()
        self._dead: dict[str, float] = {}
        self._reported: set[str] = set()
        self._waits_s: dict[str, float] = {}
        self._hung: dict[str, None] = {}
        self._own: set[str] = set()
        self._owners: dict[int, tuple[Owner, float]] = {}
        self._new_budgets()

    def _new_budgets(self) -> None:
        self._of_processes = _Budget[int](PROCESS_S, PROCESS_SHARE)
        self._of_owners = _Budget[Owner](OWNER_S, OWNER_SHARE)
        self._of_users = _Budget[int](USER_S, USER_SHARE)

    # ---- processes

    @property
    def on(self) -> bool:
        """Whether there is one to ask."""
        return self._nursery is not None

    @property
    def pid(self) -> int:
        """The reader's, 0: none runs."""
        return self._pid

    def cpu_s(self) -> float:
        """CPU time of its processes so far, s."""
        now = sum(_cpu_s(pid) for pid in (self._pid, self._nursery.pid if self._nursery is not None else 0) if pid)
        self._most_cpu_s = max(self._most_cpu_s, now)
        return self._most_cpu_s

    def begin(self) -> None:
        """Starts the nursery, without waiting for it, and forgets what was counted before. The calling thread's end is
        its end."""
        if self._nursery is not None:
            return
        self.counters.clear()
        self.trouble = ""
        self._strikes.clear()
        self._no_memory.clear()
        self._dead.clear()
        self._waits_s.clear()
        self._hung.clear()
        self._new_budgets()
        self._own = _own_file_systems()
        self._start()

    def _start(self) -> None:
        page = os.memfd_create("argus-reader")
        os.ftruncate(page, mmap.PAGESIZE)
        self._page = mmap.mmap(page, mmap.PAGESIZE)
        ours, its_end = socket.socketpair()
        script = str(Path(__file__).with_name("process.py"))
        paths = json.dumps([str(Path(__file__).parents[3]), *(path for path in sys.path if path)])
        folder = disk_cache.folder("x")
        cache = "" if folder is None else str(folder.parent)
        arguments = [str(its_end.fileno()), str(page), str(os.getpid()), paths, cache, str(self._cpu_s)]
        arguments.append(str(self._memory_bytes))
        try:
            self._nursery = subprocess.Popen(
                [sys.executable, "-I", "-S", script, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                start_new_session=True,
                pass_fds=(its_end.fileno(), page),
            )
        finally:
            its_end.close()
            os.close(page)
        self._control = ours
        self._birth()

    def settle(self) -> None:
        """Waits until the first reader answers. Where it cannot be had, or has not the rights that Argus has, there is
        none (``trouble``): then all is read in this process."""
        if self._nursery is None:
            return
        try:
            self.ask("hello", 0).close()
            status = read_file(f"/proc/{self._pid}/status")
        except OSError as failure:
            self.close()
            self.trouble = f"failed: {failure.strerror}; files and memory of processes are read by the tracer itself"
            return
        may_trace = int(field_of(status, b"CapEff"), 16) >> privileges.BITS["SYS_PTRACE"] & 1
        if not may_trace and "SYS_PTRACE" in privileges.effective():
            self.close()
            self.trouble = (
                "off: programs that Argus starts have not its capabilities (make them ambient); files and memory of"
                " processes are read by the tracer itself"
            )
        elif field_of(status, b"Seccomp") != b"2":
            self.trouble = "on, without a filter of system calls, which this kernel or machine lacks"

    def _birth(self) -> None:
        """Has the nursery fork a reader; its number comes when it is needed."""
        assert self._control is not None
        ours, its_end = socket.socketpair()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", its_end.fileno()))]
        try:
            self._control.sendmsg([HEADER.pack(MAGIC, 0, 0, 1)], rights)
        except OSError as reason:
            ours.close()
            raise Unreadable("the reader's process has ended") from reason
        finally:
            its_end.close()
        self._sock, self._pid = ours, 0
        self.generation += 1
        self._reported = set()

    def _number(self) -> int:
        """The reader's number, once the nursery has sent it."""
        if not self._pid:
            assert self._control is not None
            assert self._nursery is not None
            try:
                data = _Waiting(self._control, self._nursery.pid, HUNG_AT_START_S).take(4)
            except (OSError, wire.Closed) as reason:
                raise Unreadable("the reader's process has ended, or does not begin") from reason
            (self._pid,) = struct.unpack("<i", data)
        return self._pid

    def _end(self, owner: Owner = NOBODY) -> None:
        """Ends the reader, and waits for nothing: one that hangs in the kernel ends when that lets go of it.

        ``owner``: for whose process it hangs.
        """
        sock, self._sock = self._sock, None
        pid, self._pid = self._pid, 0
        self.generation += 1
        if sock is not None:
            sock.close()
        if pid and self._control is not None:
            with contextlib.suppress(OSError):
                self._control.sendall(HEADER.pack(MAGIC, pid, 0, 0))
            self._left.append((pid, owner))
        self._forget_ended()

    def _forget_ended(self) -> None:
        self._left = [one for one in self._left if os.path.exists(f"/proc/{one[0]}")]

    def _renew(self) -> None:
        """A reader that answers, begun anew if the last one was ended, and its nursery if somebody ended that."""
        if self._sock is not None:
            return
        if len(self._left) >= MOST_HUNG:
            raise Unreadable(f"{len(self._left)} readers hang")
        self.counters["reader_restarts"] += 1
        try:
            self._birth()
            self._number()
        except OSError:
            self.close()
            self._start()
            self._number()
        self._report_dead()

    def _report_dead(self) -> None:
        if self._dead.keys() != self._reported:
            self._exchange({"op": "dead", "pid": 0, "owner": NOBODY, "what": sorted(self._dead)}, b"").close()
            self._reported = set(self._dead)

    def enter(self) -> None:
        """A trace begins that asks; as ``begin``, and waits until the first reader answers (``settle``)."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self.begin()
                self.settle()

    def leave(self) -> None:
        """That trace is over; the last one closes."""
        with self._lock:
            self._users = max(self._users - 1, 0)
            if not self._users:
                self.close()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """``enter``, and ``leave`` at the end."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def close(self) -> None:
        """Ends all of it."""
        self._end()
        nursery, self._nursery = self._nursery, None
        control, self._control = self._control, None
        if control is not None:
            control.close()
        if nursery is not None:
            # It has no rights of ours, nor we of its user: its input's end is what ends it.
            with contextlib.suppress(OSError):
                nursery.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                nursery.wait(1.0)

    # ---- questions

    def ask(self, op: str, pid: int, data: bytes = b"", *, places: Sequence[int] = (), **more: Any) -> Answer:
        """Asks for something of a process.

        Args:
            op: One of ``reader_process``.
            pid: The process.
            data: Sent beside the request.
            places: Descriptors of files (O_PATH) that are sent along, and stay the caller's.
            more: The request's other parts.

        Raises:
            OSError: It cannot be had: the reader says so, or hangs, ended, or answered nonsense.
        """
        with self._lock:
            return self._ask(op, pid, data, places, more)

    def _ask(self, op: str, pid: int, data: bytes, places: Sequence[int], more: dict[str, Any]) -> Answer:
        if self._nursery is None:
            raise Unreadable("there is no reader")
        if self._strikes[pid] >= STRIKES:
            raise Unreadable(f"process {pid} is not read any more")
        owner = self._owner_of(pid)
        lets_go = op in _LETS_GO or more.get("pointers", ()) is None
        if not lets_go and (self._has_left_too_many(owner) or not self._has_time(pid, owner)):
            self.counters["reads_over_budget"] += 1
            self.on_loss("reads_over_budget", pid, 1, "")
            raise Unreadable(
                f"{op} of process {pid}: to read it, or others of its user, took too long, or left readers hanging"
            )
        self._revive()
        self._renew()
        spent = _Spent(self._pid)
        try:
            answer = self._exchange({"op": op, "pid": pid, "owner": owner, **more}, data, places)
        except (Malformed, wire.Closed, OSError) as failure:
            self._blame(pid, owner, failure)
            raise Unreadable(f"{op} of process {pid}: {failure}") from failure
        finally:
            self._charge(pid, owner, spent.seconds())
        answer.pid, fields = pid, answer.what
        self._note(pid, fields)
        if fields.get("full") is True:
            self._end()  # it has no descriptors left; the next one has
        if "failed" in fields:
            answer.close()
            self._strike(pid)
            raise Unreadable(f"{op} of process {pid}: {str(fields['failed'])[:200]}")
        if "error" in fields:
            answer.close()
            try:
                error = _error(*fields["error"])
            except (Malformed, TypeError) as reason:
                self.distrust(pid)
                raise Unreadable(f"{op} of process {pid}: an answer without sense: {reason}") from reason
            raise error
        return answer

    def _owner_of(self, pid: int) -> Owner:
        now = time.monotonic()
        owner, since = self._owners.get(pid, (NOBODY, -OWNER_FOR_S))
        if now - since >= OWNER_FOR_S:
            if len(self._owners) >= _MOST_BUDGETS:
                self._owners.clear()
            owner = _owner(pid)
            self._owners[pid] = owner, now
        return owner

    def _has_time(self, pid: int, owner: Owner) -> bool:
        if pid <= 0 or self._of_processes.left(pid) <= 0:
            return pid <= 0
        return owner == NOBODY or (self._of_owners.left(owner) > 0 and self._of_users.left(owner[0]) > 0)

    def _charge(self, pid: int, owner: Owner, seconds: float) -> None:
        seconds = min(seconds, MOST_CHARGED_S)
        self._of_processes.spend(pid, seconds)
        if owner != NOBODY:
            self._of_owners.spend(owner, seconds)
            self._of_users.spend(owner[0], seconds)

    def _has_left_too_many(self, owner: Owner) -> bool:
        """Whether so many readers hang for these processes that another one might not be left for others'."""
        if not self._left:
            return False
        self._forget_ended()
        of_owner = sum(one == owner for _, one in self._left)
        of_user = sum(one[0] == owner[0] for _, one in self._left)
        free = MOST_HUNG - len(self._left)
        return not free or (owner != NOBODY and (of_owner >= MOST_HUNG_OF_OWNER or of_user >= free))

    def distrust(self, pid: int) -> None:
        """The last answer, about this process, made no sense: its reader is ended. That costs the process a strike, as
        every end of a reader that does not show what brought it about: what is in its files and memory may have."""
        with self._lock:
            self._end()
            if pid > 0:
                self._strike(pid)

    def _note(self, pid: int, fields: dict[str, Any]) -> None:
        """Counts what was left out of a process for this answer, as far as that makes sense."""
        found, missed = fields.get("left_out"), fields.get("missed")
        for one in found[: len(left_out.COUNTERS)] if isinstance(found, list) else ():
            if isinstance(one, list) and len(one) == 2 and one[0] in left_out.COUNTERS:
                number = one[1]
                if type(number) is int and 0 < number < 1 << 32:
                    self.on_loss(one[0], pid, number, "")
        for device in missed[:MOST_MISSED] if isinstance(missed, list) else ():
            if isinstance(device, str) and device in self._dead:
                self.on_loss("file_systems_hung", pid, 1, device)

    def reads_memory(self, pid: int) -> bool:
        """Whether the memory of a process may be read: it has not kept a reader waiting."""
        return pid not in self._no_memory

    def reads(self, pid: int) -> bool:
        """Whether anything of a process is read."""
        return self._strikes[pid] < STRIKES

    def may_ask(self, pid: int) -> bool:
        """Whether a reader would be asked about a process now, and ``ask`` not refuse at once."""
        with self._lock:
            owner = self._owner_of(pid)
            return self.reads(pid) and self._has_time(pid, owner) and not self._has_left_too_many(owner)

    def forget(self, pid: int) -> None:
        """A process has ended: its number may be another's."""
        self._strikes.pop(pid, None)
        self._owners.pop(pid, None)
        self._no_memory.discard(pid)
        self._hangs.pop(pid, None)
        self._of_processes.forget(pid)
        for what in [what for what in self._waits_s if what.endswith(progress.of_process("", pid))]:
            self._dead.pop(what, None)
            self._hung.pop(what, None)
            del self._waits_s[what]

    def _revive(self) -> None:
        """Tries file systems again that did not answer long ago."""
        now = time.monotonic()
        for what in [what for what, until in self._dead.items() if now > until]:
            del self._dead[what]
        if self._sock is not None:
            with contextlib.suppress(Malformed, wire.Closed, OSError):
                self._report_dead()

    def _blame(self, pid: int, owner: Owner, failure: Exception) -> None:
        """A reader was brought down: by what?"""
        doing = self._doing()
        self._end(owner if isinstance(failure, TimeoutError) else NOBODY)
        if isinstance(failure, TimeoutError):
            for whose in (owner, owner[0]):
                _renew(self._hangs_of, whose, self._hangs_of[whose] + 1)
        if doing == progress.MEMORY.decode() and isinstance(failure, TimeoutError):
            if pid not in self._no_memory:
                self.counters["memory_hung"] += 1
                self.on_loss("memory_hung", pid, 1, "")
                self._no_memory.add(pid)
                return
        elif isinstance(failure, TimeoutError) and (what := self._given_up(doing, pid, owner)):
            wait_s = self._waits_s.get(what, RETRY_S)
            _renew(self._waits_s, what, min(2 * wait_s, LONGEST_RETRY_S))
            _renew(self._dead, what, time.monotonic() + wait_s)
            hung = doing if _DEVICE.fullmatch(doing) else what
            self.counters["file_systems_hung"] += hung not in self._hung
            _renew(self._hung, hung, None)
            self.on_loss("file_systems_hung", pid, 1, what)
            self._hangs[pid] += 1
            if self._hangs[pid] == MOST_HANGS and self.reads(pid):
                self._strikes[pid] = STRIKES
                self._give_up(pid)
            return
        self._strike(pid)

    def _is_patient(self, owner: Owner) -> bool:
        return self._hangs_of[owner] < PATIENT and self._hangs_of[owner[0]] < PATIENT_WITH_USER

    def _given_up(self, doing: str, pid: int, owner: Owner) -> str:
        """What is not opened any more after a reader hung; empty: it has not said on what."""
        if _DEVICE.fullmatch(doing):
            own = owner == NOBODY or doing in self._own
            return progress.of_process(doing, pid) if own else progress.of_owner(doing, owner)
        return progress.of_process(doing, pid) if doing in (progress.PATHS, progress.PROGRAM) else ""

    def _strike(self, pid: int) -> None:
        self._strikes[pid] += 1
        if self._strikes[pid] == STRIKES:
            self._give_up(pid)

    def _give_up(self, pid: int) -> None:
        self.counters["processes_unreadable"] += 1
        self.on_loss("processes_unreadable", pid, 1, "")

    def _doing(self) -> str:
        assert self._page is not None
        size = min(self._page[0], progress.SIZE - 1)
        text = self._page[1 : 1 + size].decode(errors="replace")
        self._page[0] = 0
        return text

    def _exchange(self, request: dict[str, Any], data: bytes, places: Sequence[int] = ()) -> Answer:
        """One request, one answer.

        Raises:
            TimeoutError: The reader hangs.
            Closed, Malformed, OSError: It ended; it answered nonsense.
        """
        sock, number = self._sock, self._number()
        assert sock is not None
        wire_text = json.dumps(request).encode()
        waiting = _Waiting(sock, number, HUNG_S if self._is_patient(request["owner"]) else IMPATIENT_S)
        waiting.send(HEADER.pack(MAGIC, len(wire_text), len(data), len(places)) + wire_text + data, places)
        while True:
            answer = waiting.receive()
            if "slow" not in answer.what:
                return answer
            answer.close()
            if self.on_slow is not None:
                self.on_slow(str(answer.what["slow"])[:4096])


def _renew(kept: dict[Any, Any], key: object, value: object) -> None:
    """Sets what is kept of something. What was set longest ago goes, where there is too much."""
    kept.pop(key, None)
    kept[key] = value
    while len(kept) > _MOST_KEPT:
        del kept[next(iter(kept))]


class _Budget(Generic[Key]):
    """Seconds of each process, owner or user.

    Args:
        burst_s: What each has at first, and at most.
        share: What each gets back a second.
    """

    def __init__(self, burst_s: float, share: float) -> None:
        self._burst_s, self._share = burst_s, share
        self._left: OrderedDict[Key, tuple[float, float]] = OrderedDict()

    def left(self, key: Key) -> float:
        """Seconds that are left; negative: the last request took more."""
        left, since = self._left.get(key, (self._burst_s, 0.0))
        return min(left + (time.monotonic() - since) * self._share, self._burst_s)

    def spend(self, key: Key, seconds: float) -> None:
        self._left[key] = self.left(key) - seconds, time.monotonic()
        self._left.move_to_end(key)
        while len(self._left) > _MOST_BUDGETS:
            self._left.popitem(last=False)

    def forget(self, key: Key) -> None:
        self._left.pop(key, None)


class _Clock:
    """How a process or thread was scheduled: its schedstat, which stays open."""

    def __init__(self, path: str) -> None:
        self._fd = -1
        self._last = 0.0, 0.0
        with contextlib.suppress(OSError):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def read(self) -> tuple[float, float]:
        """Seconds that it ran, and that it waited for a CPU: the last ones if it has ended, zeros where the kernel does
        not count them."""
        with contextlib.suppress(OSError, ValueError):
            ran_ns, queued_ns, *_ = os.pread(self._fd, 64, 0).split()
            self._last = int(ran_ns) / 1e9, int(queued_ns) / 1e9
        return self._last


class _Clocks(threading.local):
    """Those that a thread reads."""

    def __init__(self) -> None:
        self.own = _Clock("/proc/thread-self/schedstat")
        self._reader = 0, self.own

    def of_reader(self, pid: int) -> _Clock:
        if self._reader[0] != pid:
            self._reader = pid, _Clock(f"/proc/{pid}/schedstat")
        return self._reader[1]


_clocks = _Clocks()


class _Spent:
    """Time of a request, without that in which the reader or this thread waited for a CPU."""

    def __init__(self, pid: int) -> None:
        self._clocks = _clocks.own, _clocks.of_reader(pid)
        self._queued_s = self._read()
        self._begun = time.monotonic()

    def _read(self) -> float:
        return sum(clock.read()[1] for clock in self._clocks)

    def seconds(self) -> float:
        return max(time.monotonic() - self._begun - (self._read() - self._queued_s), 0.0)


class _Waiting:
    """Sends and receives without waiting for a reader that hangs."""

    def __init__(self, sock: socket.socket, pid: int, hung_s: float = HUNG_S) -> None:
        self._sock, self._pid, self._hung_s = sock, pid, hung_s
        self._seen: tuple[bytes, ...] = ()
        self._held = 0
        self._clock = _clocks.of_reader(pid)
        self._before = self._clock.read()
        self._runnable_s = 0.0
        self._since = self._begun = time.monotonic()

    def _ready(self, event: int) -> None:
        ready = select.poll()
        ready.register(self._sock, event)
        looked = time.monotonic()
        while not ready.poll(LOOK_S * 1000):
            now = time.monotonic()
            if now - looked > HELD_S and self._held < MOST_HELD:
                self._held += 1
                self._since += now - looked
                self._begun += now - looked
            state, spent = _state(self._pid)
            if state == "R":
                self._runnable_s += now - looked
            if spent != self._seen or state == "R":
                self._seen, self._since = spent, now
            looked = now
            if now - self._since > self._hung_s or now - self._begun > LONGEST_S:
                raise TimeoutError("it does not answer")
            if state != "R" and self._is_slow(now):
                raise TimeoutError("it answers too slowly")

    def _is_slow(self, now: float) -> bool:
        """Whether the reader has waited for too long in all. Waits for a CPU do not count."""
        ran_s, queued_s = (after - before for after, before in zip(self._clock.read(), self._before, strict=True))
        waited_s = now - self._begun - max(ran_s + queued_s, self._runnable_s)
        # Whose files are waited for less is waited for less here, too.
        return waited_s > min(SLOW_S + SLOW_PER_CPU * ran_s, SLOWEST_S) * self._hung_s / HUNG_S

    def send(self, message: bytes, places: Sequence[int] = ()) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", places))] if places else []
        while message:
            self._ready(select.POLLOUT)
            message = message[self._sock.sendmsg([message], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) :]
            rights = []  # they have gone with the first bytes

    def take(self, size: int) -> bytes:
        """So many bytes.

        Raises:
            TimeoutError: It hangs.
            Closed: It has ended.
        """
        parts = []
        while size:
            self._ready(select.POLLIN)
            part = self._sock.recv(min(size, 1 << 20), socket.MSG_DONTWAIT)
            if not part:
                raise wire.Closed("the reader has ended")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def receive(self) -> Answer:
        self._ready(select.POLLIN)
        head, fds = wire.receive_begin(self._sock, socket.MSG_DONTWAIT)
        try:
            if reading := [fd for fd in fds if not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_PATH]:
                # To close a file of a file system in user space waits for it, and no signal ends that.
                fds = [fd for fd in fds if fd not in reading]
                Aside(partial(_close, reading), "argus-close")
                raise Malformed("descriptors that read")
            head += self.take(HEADER.size - len(head))
            magic, size, more, count = HEADER.unpack(head)
            if magic != MAGIC or size > MAX_JSON or more > MAX_BYTES or count != len(fds) or count > MAX_FDS:
                raise Malformed("an answer of an unknown form")
            try:
                what = json.loads(self.take(size))
            except (ValueError, RecursionError) as reason:
                raise Malformed("an answer that is no JSON") from reason
            if not isinstance(what, dict):
                raise Malformed("an answer that is no object")
            return Answer(what, self.take(more), fds)
        except BaseException:
            _close(fds)
            raise


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _state(pid: int) -> tuple[str, tuple[bytes, ...]]:
    """State letter of a process; its CPU time and switches, which change if it does anything."""
    try:
        stat, status = stat_of(f"/proc/{pid}"), read_file(f"/proc/{pid}/status")
    except OSError:
        return "X", ()
    if len(stat) < 13:
        return "X", ()
    switches = (field_of(status, name) for name in (b"voluntary_ctxt_switches", b"nonvoluntary_ctxt_switches"))
    return stat[0].decode("ascii", "replace"), (stat[11], stat[12], *switches)


def _owner(pid: int) -> Owner:
    """User and container of a process; ``NOBODY``: it has ended, or is none."""
    return owner_of(pid) if pid > 0 else NOBODY


def _own_file_systems() -> set[str]:
    """Devices that this process's own files lie on: what it maps, and where its program and packages are."""
    own = set()
    with contextlib.suppress(OSError), open("/proc/self/maps", "rb") as maps:
        lines = (line.split(None, 5) for line in maps)
        own |= {fields[3].decode() for fields in lines if len(fields) == 6 and fields[4] != b"0"}
    for path in ("/", sys.executable, sys.prefix, os.__file__, __file__):
        with contextlib.suppress(OSError):
            own.add(device_of(os.stat(path).st_dev))
    return own


def _cpu_s(pid: int) -> float:
    """CPU time of a process, s; 0: it has ended."""
    spent = _state(pid)[1][:2]
    return sum(map(int, spent)) / os.sysconf("SC_CLK_TCK")


shared = Reader()
"""The one of this process."""


def entries(kept: object) -> None:
    """Keeps on disk where libraries have functions: what a reader has found. An entry is a hint that is verified by who
    reads it (``symbol_cache``)."""
    from argus.capture.process import symbol_cache

    if not isinstance(kept, list):
        raise Malformed("entries")
    folder = disk_cache.folder(symbol_cache.KIND)
    for name, body in kept[:MAX_FDS]:
        if folder is not None and isinstance(name, str) and isinstance(body, str) and _ENTRY.fullmatch(name):
            disk_cache.keep(folder / name, body.encode(), symbol_cache.KEPT)


def integers(values: Sequence[object], most: int = 1 << 64) -> list[int]:
    """These values, if all are integers from 0 on and below a bound.

    Raises:
        Malformed: They are not.
    """
    numbers = [value for value in values if type(value) is int and 0 <= value < most]
    if len(numbers) != len(values):
        raise Malformed("numbers")
    return numbers


def text(value: object, most: int = 1 << 16) -> str:
    """A string of bounded length.

    Raises:
        Malformed: It is none.
    """
    if not isinstance(value, str) or len(value) > most:
        raise Malformed("a text")
    return value


def _error(number: object, message: object) -> OSError:
    (known,) = integers([number], _MOST_ERRNO)
    return OSError(known, text(message, MAX_JSON)[:200])


def checked(answer: Answer, parse: Any) -> Any:
    """What ``parse`` makes of an answer. One that makes no sense ends the reader, and is a strike of the process that
    it is about (``Reader.distrust``).

    Raises:
        Unreadable: It makes no sense.
    """
    try:
        return parse(answer)
    except (Malformed, KeyError, TypeError, ValueError, IndexError, OverflowError) as reason:
        shared.distrust(answer.pid)
        raise Unreadable(f"an answer without sense: {reason}") from reason
    finally:
        answer.close()


def unread() -> list[str]:
    """What could not be read since the reader began, in lines for people."""
    lines = [describe(name, value) for name, value in sorted(shared.counters.items()) if name != "reader_restarts"]
    return lines + ([f"reader {shared.trouble}"] if shared.trouble else [])


def proc_file(pid: int, name: str) -> bytes:
    """A file of /proc/PID: "environ" or "cmdline", which lie in the process's memory, or the beginning of "exe".

    Raises:
        OSError: It has ended, may not be looked at, or its memory, or file system, does not answer.
    """
    if name != "exe" and not shared.reads_memory(pid):
        raise Unreadable(f"the memory of process {pid} does not answer")
    answer = shared.ask("file", pid, name=name)
    answer.close()
    return answer.data


def maps(pid: int, *, executable: bool = False) -> bytes:
    """/proc/PID/maps, of 16 MiB at most. To read it waits for a thread that changes the process's mappings, and that
    may wait for a file system.

    Args:
        pid: The process.
        executable: Only lines of executable mappings.

    Raises:
        OSError: It has ended, may not be looked at, or does not answer.
    """
    if shared.on:
        answer = shared.ask("maps", pid, executable=executable)
        answer.close()
        return answer.data
    progress.memory()
    fd = os.open(f"{PROC}/{pid}/maps", os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts, size = [], 0
        while size < _MOST_MAPS and (part := os.read(fd, 1 << 16)):
            parts.append(part)
            size += len(part)
    finally:
        os.close(fd)
    progress.clear()
    lines = b"".join(parts)
    if executable:
        lines = b"".join(_EXECUTABLE_LINE.findall(lines))
    if size >= _MOST_MAPS or len(lines) > MAX_BYTES:
        left_out.count_once("mappings_cut", pid)
    return lines if len(lines) <= MAX_BYTES else lines[: lines.rfind(b"\n", 0, MAX_BYTES) + 1]


def read_fields(op: str, pid: int, make: Callable[..., Made], **more: Any) -> Made | None:
    """What ``make`` makes of the parts that ``group`` and ``place`` answer; None: it cannot be read."""
    if not shared.reads_memory(pid):
        return None

    def parse(answer: Answer) -> Made | None:
        fields = answer.what["found"]
        if fields is None:
            return None
        if not isinstance(fields, list):
            raise Malformed(op)
        return make(*fields)

    try:
        return checked(shared.ask(op, pid, **more), parse)  # type: ignore[no-any-return]
    except OSError:
        return None
