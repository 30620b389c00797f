"""Runs a command once, and measures what it used."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from argus.system import descendants
from argus.system.proc import field_of, number, read_file

FIRST_SAMPLE_S, LONGEST_SAMPLE_S = 0.01, 0.2
"""Time between samples of memory and delays: a tenth of the time that has gone by, within these bounds."""
GRACE_S = 2.0
"""What a command may take to end once it was asked to."""
_PROCESSES = 4096
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK_NS = 10**9 // os.sysconf("SC_CLK_TCK")

Status = Literal["ok", "failed", "timeout", "interrupted", "not_started"]


@dataclass(frozen=True)
class Outcome:
    """What became of a run. None: unknown.

    Attributes:
        status: ``ok`` is an exit code of 0. exit_code: None if a signal ended it. signal: Its number.
        error: Why it did not start, or why nothing is known of its end.
        figures: By name, in ns, bytes, or times; see ``FIGURES``.
    """

    status: Status
    exit_code: int | None = None
    signal: int | None = None
    error: str = ""
    figures: Mapping[str, float | None] = field(default_factory=dict)


FIGURES = (
    "wall_ns", "user_ns", "system_ns", "peak_memory_bytes", "mean_memory_bytes", "voluntary_switches",
    "involuntary_switches", "run_queue_ns", "block_io_ns",
)  # fmt: skip
"""What is measured of each command: CPU time and switches as wait4 has them, of it and of the children that it waited
for; memory of all its processes, sampled, or that of its largest one where more; time that its threads waited for a
CPU and for disks, by /proc/PID/task/TID/schedstat and stat, each as of its last sample."""


class Usage:
    """Memory and delays of a process and its descendants, sampled.

    Args:
        pid: The process.
        root: Where /proc is.
        clock: Monotonic, in seconds.
        beneath: Its descendants alone.
    """

    def __init__(
        self, pid: int, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic, *, beneath: bool = False
    ) -> None:
        self._pid = pid
        self._beneath = beneath
        self._proc = root / "proc"
        self._delays: dict[int, tuple[int, int]] = {}
        self._memory_bytes: list[int] = []
        self._spans_s: list[float] = []
        self._sampled_s = clock()
        self._clock = clock
        self._accounts_io = _line(self._proc / "sys/kernel/task_delayacct") == "1"
        self._schedules = False

    def sample(self) -> None:
        """Reads all of it once."""
        total = 0
        for pid in self.processes():
            words = _line(self._proc / str(pid) / "statm").split()
            total += int(words[1]) * _PAGE if len(words) > 1 else 0
            for thread in _numbers(self._proc / str(pid) / "task"):
                self._sample_thread(self._proc / str(pid) / "task" / str(thread), thread)
        now_s = self._clock()
        if total:
            self._memory_bytes.append(total)
            self._spans_s.append(max(now_s - self._sampled_s, 1e-9))
        self._sampled_s = now_s

    def _sample_thread(self, place: Path, thread: int) -> None:
        words = _line(place / "schedstat").split()
        queue = int(words[1]) if len(words) == 3 else 0
        self._schedules |= len(words) == 3
        waited = 0
        if self._accounts_io:
            fields = _line(place / "stat").rpartition(")")[2].split()
            waited = int(fields[39]) * _TICK_NS if len(fields) > 39 else 0  # field 42 of proc(5), counted from the 3rd
        before = self._delays.get(thread, (0, 0))
        self._delays[thread] = max(queue, before[0]), max(waited, before[1])

    def processes(self) -> list[int]:
        """Those that live now."""
        found: list[int] = []
        queue = [self._pid]
        while queue and len(found) < _PROCESSES:
            pid = queue.pop()
            found.append(pid)
            for thread in _numbers(self._proc / str(pid) / "task"):
                children = _line(self._proc / str(pid) / "task" / str(thread) / "children").split()
                queue += [int(child) for child in children if child.isdigit()]
        return found[1:] if self._beneath else found

    def cpu_s(self) -> float:
        """CPU time of the processes that live, and of the children that they waited for, in seconds."""
        ticks = 0
        for pid in self.processes():
            fields = _line(self._proc / str(pid) / "stat").rpartition(")")[2].split()
            ticks += sum(int(one) for one in fields[11:15])  # fields 14 to 17 of proc(5)
        return ticks * _TICK_NS / 1e9

    def figures(self) -> dict[str, float | None]:
        """Mean and peak memory, and delays; None: no sample has it."""
        memory = self._memory_bytes
        mean = sum(size * span for size, span in zip(memory, self._spans_s, strict=True)) / (sum(self._spans_s) or 1.0)
        queue, waited = (sum(one[at] for one in self._delays.values()) for at in (0, 1))
        return {
            "peak_memory_bytes": float(max(memory)) if memory else None,
            "mean_memory_bytes": round(mean) if memory else None,
            "run_queue_ns": float(queue) if self._schedules else None,
            "block_io_ns": float(waited) if self._accounts_io and self._delays else None,
        }


def _line(path: Path) -> str:
    try:
        with path.open(encoding="ascii", errors="replace", newline="\n") as file:
            return file.readline(65536).strip()
    except OSError:
        return ""


def _numbers(folder: Path) -> list[int]:
    try:
        return [int(name) for name in os.listdir(folder) if name.isdigit()]
    except OSError:
        return []


def execute(
    command: Sequence[str], environment: Mapping[str, str], out: int, err: int, timeout_s: float | None
) -> Outcome:
    """Runs a command to its end, without a shell; what it started ends with it.

    Args:
        command: Its words.
        environment: All of it.
        out, err: Descriptors that get its output.
        timeout_s: After so long it is ended; None: never.

    Raises:
        KeyboardInterrupt: The command was ended.
    """
    own_kib = _own_peak_kib()
    began_ns = time.monotonic_ns()
    try:
        child = start(command, environment, out, err)
    except (OSError, ValueError) as failure:
        return Outcome("not_started", error=getattr(failure, "strerror", None) or str(failure))
    usage = Usage(child.pid)
    timed_out = False
    try:
        timed_out = not ended_within(child.pid, timeout_s, usage)
        if timed_out:
            _end(child.pid)
    except BaseException:
        end_now(child)
        raise
    wall_ns = time.monotonic_ns() - began_ns
    usage.sample()  # of its main thread the delays are whole now: it is dead, and nobody has waited for it
    status, spent = reap(child)
    figures: dict[str, float | None] = {
        "wall_ns": float(wall_ns),
        "user_ns": float(round(spent.ru_utime * 1e9)),
        "system_ns": float(round(spent.ru_stime * 1e9)),
        "voluntary_switches": float(spent.ru_nvcsw),
        "involuntary_switches": float(spent.ru_nivcsw),
        **usage.figures(),
    }
    if spent.ru_maxrss > own_kib:  # else it may be Argus's own: at exec the kernel notes what the memory was before
        figures["peak_memory_bytes"] = max(figures["peak_memory_bytes"] or 0.0, spent.ru_maxrss * 1024.0)
    by_signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
    return Outcome("timeout" if timed_out else "ok" if code == 0 else "failed", code, by_signal, "", figures)


def _own_peak_kib() -> int:
    """The most memory that Argus had. Not ``ru_maxrss`` of itself: that has what its parent had when it started it."""
    peak = number(field_of(read_file("/proc/self/status"), b"VmHWM").removesuffix(b" kB"))
    return peak if peak >= 0 else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Child(subprocess.Popen[bytes]):
    """A command that runs. ``strangers``: children of this process that are none of its."""

    strangers: frozenset[int] = frozenset()

    def __init__(self, command: list[str], environment: dict[str, str], out: int, err: int) -> None:
        try:
            super().__init__(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, start_new_session=True
            )
        except KeyboardInterrupt:
            # It may run already: on a busy node for long before this process goes on.
            if getattr(self, "pid", 0):
                _signal(self.pid, signal.SIGKILL)
                with contextlib.suppress(ProcessLookupError):  # it has not made its session yet
                    os.kill(self.pid, signal.SIGKILL)
            raise


def start(command: Sequence[str], environment: Mapping[str, str], out: int, err: int) -> Child:
    """Starts a command in a session of its own, which no Ctrl-C of the terminal reaches: whoever starts it ends it."""
    strangers = frozenset(descendants.children())
    child = Child(list(command), dict(environment), out, err)
    child.strangers = strangers
    return child


def ended_within(pid: int, timeout_s: float | None, usage: Usage | None) -> bool:
    """Waits for a process to end, without reaping it, and samples meanwhile; False: it still runs."""
    began = time.monotonic()
    try:
        fd = os.pidfd_open(pid)
    except (OSError, AttributeError):
        fd = None  # a kernel before 5.3
    poll = select.poll()
    if fd is not None:
        poll.register(fd, select.POLLIN)
    try:
        while True:
            gone = time.monotonic() - began
            left = (timeout_s if timeout_s is not None else float("inf")) - gone
            pause = min(LONGEST_SAMPLE_S if fd is not None else FIRST_SAMPLE_S, max(FIRST_SAMPLE_S, gone / 10))
            poll.poll(max(0.0, min(pause, left)) * 1000)
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return True
            if left <= 0:
                return False
            if usage is not None:
                usage.sample()
    finally:
        if fd is not None:
            os.close(fd)


def _end(pid: int) -> None:
    """Asks a process group to end, and ends it."""
    _signal(pid, signal.SIGTERM)
    if not ended_within(pid, GRACE_S, None):
        _signal(pid, signal.SIGKILL)
        ended_within(pid, None, None)


def _signal(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        pass


def reap(child: Child) -> tuple[int, resource.struct_rusage]:
    """Ends what is left of the command's group, whose number is still its own, waits for the command, and ends what it
    left in other sessions, as launchers do (``descendants.adopt``)."""
    _signal(child.pid, signal.SIGKILL)
    _, status, spent = os.wait4(child.pid, 0)
    descendants.kill_left(child.strangers)
    child.returncode = os.waitstatus_to_exitcode(status)
    return status, spent


def end(child: Child) -> None:
    """Ends a command that ``start`` started, and all of its group."""
    if child.returncode is None:
        _end(child.pid)
        reap(child)


def end_now(child: Child) -> None:
    """The same without any grace: whoever pressed Ctrl-C waits for the prompt."""
    if child.returncode is None:
        _signal(child.pid, signal.SIGTERM)
        if not ended_within(child.pid, 0.1, None):
            _signal(child.pid, signal.SIGKILL)
        reap(child)
