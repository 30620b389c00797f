"""Runs functions in processes of their own: one that hangs, crashes, prints or eats memory harms nobody else.

Children are forked without exec: a start costs milliseconds rather than a new interpreter's, every few minutes, for
years. That is safe as long as this process has neither threads nor a driver loaded, so callers load nothing before.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import json
import os
import resource
import selectors
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from argus.model.units import binary_size, elapsed
from argus.system import descendants
from argus.system.proc import stat_of

MAX_OUTPUT = 256 << 10
"""Bytes that a child may send; a check of a node with 16 GPUs sends some 20 KiB."""
AT_ONCE = 4
"""Children that run at the same time: one that hangs does not hold up the others."""
_REAP_S = 0.5
"""How long a killed child may take to end. One that takes longer sleeps in the kernel, where no signal reaches it."""
_PDEATHSIG = 1  # include/uapi/linux/prctl.h


@dataclass
class Task:
    """What runs in a child.

    Attributes:
        name: For messages.
        run: Called in the child with a function that takes notes, and findings that are to outlive the child
            (``note(text, found=…)``); returns what JSON can hold.
        limit_s: Its time.
        memory_bytes: Its RLIMIT_DATA; 0: none.
    """

    name: str
    run: Callable[[Callable[..., None]], Any]
    limit_s: float
    memory_bytes: int = 0


@dataclass
class Outcome:
    """What became of a task: ``value``, or ``error`` in words."""

    value: Any = None
    error: str = ""
    seconds: float = 0.0
    stuck: str = ""
    """``PID/START`` of a child that outlived SIGKILL, as /proc/PID/stat has them."""
    found: list[Any] = field(default_factory=list)
    """What it reported on its way."""


@dataclass
class _Child:
    task: Task
    pid: int
    pipe: int
    begun: float
    data: bytearray = field(default_factory=bytearray)

    @property
    def ends(self) -> float:
        return self.begun + self.task.limit_s


def run_all(
    tasks: list[Task], total_s: float, closing: tuple[int, ...] = (), *, sweep: bool = True
) -> dict[str, Outcome]:
    """Runs every task, a few at once, in order.

    Args:
        tasks: By distinct names.
        total_s: The time limit of all; what was not started by then is reported as such, what runs is killed.
        closing: Descriptors that children must not keep, such as a lock: a stuck one would hold it for ever.
        sweep: Whether to kill what they leave behind in other process groups.

    Returns:
        Outcomes by name, after ``total_s`` + 1 s at the latest.
    """
    end = time.monotonic() + total_s
    waiting, running, outcomes = list(tasks), list[_Child](), dict[str, Outcome]()
    libc = ctypes.CDLL(None)
    descendants.adopt(sweep)
    strangers = descendants.children()
    gc.freeze()  # children that collect garbage would copy all of this process's memory
    handlers = _ending_by_exception()
    try:
        while waiting or running:
            now = time.monotonic()
            while waiting and len(running) < AT_ONCE and now < end:
                try:
                    running.append(_start(waiting[0], closing, libc))
                except OSError as failure:  # the node is out of processes, memory or descriptors
                    if running:
                        break  # one that ends makes room
                    outcomes[waiting[0].name] = Outcome(error=f"could not be started: {failure.strerror}")
                waiting.pop(0)
            if now >= end:
                for task in waiting:
                    outcomes[task.name] = Outcome(error="was not started: the run's time was up")
                waiting = []
            if not running:
                break
            over = _read(running, min(end, *(child.ends for child in running)) - now)
            now = time.monotonic()
            for child in [*running]:
                if child in over or now >= min(child.ends, end):
                    running.remove(child)
                    outcomes[child.task.name] = _finish(child, child in over, libc)
    finally:
        for child in running:
            descendants.kill(child.pid)
        if sweep:
            descendants.kill_left(strangers)
        gc.unfreeze()
        descendants.adopt(False)
        for number in handlers:
            signal.signal(number, signal.SIG_DFL)
    return outcomes


def _ending_by_exception() -> list[int]:
    """Lets SIGTERM and SIGHUP end this process as ^C does, so that it kills its children. Returns what was changed."""

    def stop(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        return []
    signals = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in signals:
        signal.signal(number, stop)
    return list(signals)


def die_with_parent() -> None:
    """For ``preexec_fn``: programs that a check starts must not outlive it, even where everything is killed."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _start(task: Task, closing: tuple[int, ...], libc: Any) -> _Child:
    pipe, sender = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(pipe)
        os.close(sender)
        raise
    if pid == 0:
        try:
            os.close(pipe)
            _become_child(task, closing, libc)
            _send(sender, _answer(task, lambda text, **more: _send(sender, {"note": text, **more})))
        finally:
            os._exit(0)
    os.close(sender)
    os.set_blocking(pipe, False)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    return _Child(task, pid, pipe, time.monotonic())


def _become_child(task: Task, closing: tuple[int, ...], libc: Any) -> None:
    os.setpgid(0, 0)
    libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    for descriptor in closing:
        os.close(descriptor)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    os.nice(5)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if task.memory_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (task.memory_bytes, task.memory_bytes))


def _answer(task: Task, note: Callable[..., None]) -> dict[str, Any]:
    try:
        value = task.run(note)
        json.dumps(value)
        return {"value": value}
    except MemoryError:
        return {"error": f"needed more memory than it may have ({binary_size(task.memory_bytes)})"}
    except BaseException as failure:
        trace = failure.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = f" ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})" if trace else ""
        return {"error": f"crashed: {type(failure).__name__}: {failure}{where}"}


def _send(descriptor: int, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


def _read(running: list[_Child], timeout_s: float) -> list[_Child]:
    """Waits for output; returns the children whose pipe is closed, or who sent too much."""
    over = []
    with selectors.DefaultSelector() as selector:
        for child in running:
            selector.register(child.pipe, selectors.EVENT_READ, child)
        for key, _ in selector.select(max(0.0, timeout_s)):
            child = key.data
            part = os.read(child.pipe, 65536)
            child.data += part
            if not part or len(child.data) > MAX_OUTPUT or _answered(child):
                over.append(child)
    return over


def _answered(child: _Child) -> bool:
    """Its answer is complete: a grandchild may keep the pipe open."""
    return child.data.endswith(b"\n") and child.data.splitlines()[-1].startswith((b'{"value"', b'{"error"'))


def _finish(child: _Child, ended: bool, libc: Any) -> Outcome:
    os.close(child.pipe)
    seconds = time.monotonic() - child.begun
    notes, found, answer = list[str](), list[Any](), None
    for line in bytes(child.data).splitlines():
        message = _message(line)
        if "found" in message:
            found.append(message["found"])
        elif "note" in message:
            notes.append(str(message["note"]))
        elif message:
            answer = message
    made = functools.partial(Outcome, seconds=seconds, found=found)
    status = None
    if ended and len(child.data) <= MAX_OUTPUT:
        status = descendants.wait(child.pid, 0.2)
    if status is None:
        descendants.kill(child.pid)
        status = descendants.wait(child.pid, _REAP_S)
    descendants.kill(child.pid)  # what else is in its process group
    if status is None:
        return made(error=_hung(seconds, notes) + ", and sleeps in the kernel", stuck=identity(child.pid))
    if len(child.data) > MAX_OUTPUT:
        return made(error=f"sent more than {binary_size(MAX_OUTPUT)}")
    if answer is not None:
        return made(answer.get("value"), str(answer.get("error", "")))
    if ended and os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return made(error=f"died of {name}" + (f" at: {notes[-1]}" if notes else ""))
    if ended:
        return made(error="ended without an answer")
    return made(error=_hung(seconds, notes))


def _message(line: bytes) -> dict[str, Any]:
    """What a child sent, in one line; empty: garbage, as a library may print into any descriptor."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def _hung(seconds: float, notes: list[str]) -> str:
    return f"did not answer within {elapsed(seconds)}" + (f", at: {notes[-1]}" if notes else "")


def identity(pid: int) -> str:
    """A process by PID and start time, as one string; empty: there is none."""
    try:
        return f"{pid}/{stat_of(f'/proc/{pid}')[19].decode()}"
    except (OSError, IndexError):
        return ""


def alive(who: str) -> bool:
    """Whether the process of ``identity`` is still there, and no zombie."""
    pid = who.partition("/")[0]
    if not who or identity(int(pid)) != who:
        return False
    try:
        return stat_of(f"/proc/{pid}")[0] not in b"ZX"
    except (OSError, IndexError):
        return False
