"""Runs a command and lets another process trace it: ``argus run``.

Three processes, so that nothing that happens to the tracing reaches the command:

* this one starts the command, hands signals on, waits, and has the command's exit code. It does nothing else, imports
  little and has one thread: it stays small, and may fork;
* the watcher traces this process and all that comes of it. It is nobody's child, and in a session of its own: a Ctrl-C
  does not reach it. It ends when this process says so or is gone;
* the command starts once the watcher says that it follows.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import pwd
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from argus.live.account import Account
from argus.model.errors import EXIT_USAGE, ArgusError
from argus.model.units import span_text
from argus.system import files

NOT_FOUND = 127
NOT_EXECUTABLE = 126
"""Exit codes of a command that could not be started, as shells have them."""
SIGNALLED = 128
"""Added to the number of the signal that ended a command."""

_HANDED_ON = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_FOLLOWED_S = 0.02
"""The watcher hears of a fork within a millisecond, on a busy machine a few; the command does not exec sooner."""
_SENT_BY_A_PROCESS = 0
"""siginfo's si_code is 0 or less for kill, tgkill and sigqueue. The terminal's own signals are above: they go to all
processes of the foreground, the command included."""
HELD_S = 10.0
"""How long a command waits for what it will load to be found. A program that is linked takes some 10 ms."""
ENDS_S = 2.0
"""How long the end of a child is waited for."""
_LIBRARIES = ("libcuda.so", "libcudart.so", "libnccl.so")
_LOADERS = ("/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1")
_SYSTEM_FOLDERS = (
    *("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64"),
    *("/usr/local/nvidia/lib64", "/usr/local/cuda/compat", "/usr/local/cuda/lib64"),
)


# ---- the watcher


class Watched:
    """The watcher's side of the talk."""

    def __init__(self, up: int, down: int) -> None:
        self._up = up
        self._down = down
        self.is_ready = False

    def ready(self) -> None:
        """From here on the command may run."""
        self.is_ready = True
        self._send("ready")

    def off(self, reason: str) -> None:
        """There will be no tracing."""
        self._send(f"off {reason}")

    def finished(self, code: int) -> None:
        """Everything is stored."""
        self._send(f"finished {code}")

    def over(self) -> bool:
        """Whether the command has ended, or whoever waits for it is gone."""
        return bool(select.select([self._down], [], [], 0)[0])

    def _send(self, text: str) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more
            os.write(self._up, text.replace("\n", " ").encode(errors="backslashreplace")[:4000] + b"\n")


class Watcher:
    """A process that traces this one. It is forked here: call this before anything starts threads.

    Args:
        work: What it does. Its result is an exit code.
        output: Descriptor that its standard output and error go to.
    """

    def __init__(self, work: Callable[[Watched], int], output: int) -> None:
        up_read, up_write = os.pipe()
        down_read, down_write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        first = os.fork()
        if first == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            os.close(up_read)
            os.close(down_write)
            _watch(Watched(up_write, down_read), work, output)
        os.close(up_write)
        os.close(down_read)
        os.waitpid(first, 0)
        self._up, self._down = up_read, down_write
        self._heard = b""
        self.pid = int(self._line(10.0) or 0)
        self.code: int | None = None
        """What it ended with; None: it has not ended, or not in good order."""

    def wait_until_ready(self, timeout_s: float) -> str:
        """Waits until the command may run; returns "on", or "off: " and why there is no tracing."""
        line = self._line(timeout_s)
        if line == "ready":
            return "on"
        if line is None:
            self.give_up()
            return f"off: it was not ready after {span_text(timeout_s)}"
        return "off: " + (line.removeprefix("off ") or "it ended at once")

    def finish(self) -> None:
        """Reports to it that the command has ended, and waits until everything is stored."""
        self._hang_up()
        while line := self._line(None):
            if line.startswith("finished "):
                self.code = int(line.split()[1])
        os.close(self._up)

    def give_up(self) -> None:
        """Ends it at once. What it has not stored is lost."""
        self._hang_up()
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _hang_up(self) -> None:
        if self._down >= 0:
            os.close(self._down)
            self._down = -1

    def _line(self, timeout_s: float | None) -> str | None:
        """The next line it sends; empty: it is gone; None: none came in time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._heard:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._up], [], [], left)[0]:
                return None
            got = os.read(self._up, 65536)
            if not got:
                return ""
            self._heard += got
        line, self._heard = self._heard.split(b"\n", 1)
        return line.decode(errors="replace")


def _watch(watched: Watched, work: Callable[[Watched], int], output: int) -> None:
    """The watcher's whole life. Does not return."""
    code = 1
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        for number in _HANDED_ON:
            # Not SIG_IGN: what it starts in turn would inherit that.
            signal.signal(number, lambda _number, _frame: None)
        watched._send(str(os.getpid()))
        code = work(watched)
    except ArgusError as failure:
        code = failure.exit_code
        if watched.is_ready:
            print(f"argus: {failure}", file=sys.stderr)
        else:
            watched.off(str(failure))
    except BaseException as failure:
        from argus.system import debug

        where = debug.traceback_of(failure)
        if watched.is_ready:
            print(f"argus: tracing ended: {type(failure).__name__}: {failure}. {where}", file=sys.stderr)
        else:
            watched.off(f"{type(failure).__name__}: {failure}")
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        if watched.is_ready:
            watched.finished(code)
        os._exit(code)


# ---- whom it runs as


@dataclass(frozen=True)
class User:
    """Whom a command runs as: ids, groups, and what login sets."""

    uid: int
    gid: int
    groups: list[int]
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def is_other(self) -> bool:
        """Whether this process is another user's."""
        return (self.uid, self.gid) != (os.geteuid(), os.getegid())


def find_user(name: str) -> User:
    """A user by name or number.

    Raises:
        ArgusError: There is none, or this process may not become one.
    """
    try:
        entry = pwd.getpwuid(int(name)) if name.isdigit() else pwd.getpwnam(name)
    except KeyError as reason:
        raise ArgusError(f"there is no user {name}", "", EXIT_USAGE) from reason
    if os.geteuid() not in (0, entry.pw_uid):
        raise ArgusError(f"only root can run a command as {name}", "Run Argus with sudo", EXIT_USAGE)
    home = {"HOME": entry.pw_dir, "USER": entry.pw_name, "LOGNAME": entry.pw_name, "SHELL": entry.pw_shell}
    return User(entry.pw_uid, entry.pw_gid, os.getgrouplist(entry.pw_name, entry.pw_gid), home)


# ---- what the command will load


def likely_libraries(command: Sequence[str], environment: Mapping[str, str]) -> list[Path]:
    """Files with CUDA calls that a command will probably load, so that they can be probed before it does.

    A guess that fails costs nothing: what is loaded instead is found when it is there.
    """
    libraries: list[Path] = []
    programs: list[Path] = []
    for word in command[:16]:
        exe = shutil.which(word, path=environment.get("PATH"))
        if exe is not None and len(programs) < 3:
            programs.append(Path(exe))
    for program in programs:
        with contextlib.suppress(OSError):
            libraries += _linked(program, environment)
            interpreter = _interpreter(program)
            # Not resolved: a virtual environment's link leads out of it.
            for package in interpreter.parent.parent.glob("lib/python3*/site-packages/nvidia/*/lib"):
                libraries += package.glob("*.so*")
    folders = [Path(word) for word in environment.get("LD_LIBRARY_PATH", "").split(":") if word]
    for folder in [*folders, *map(Path, _SYSTEM_FOLDERS)]:
        with contextlib.suppress(OSError):
            libraries += [folder / name for name in ("libcuda.so.1",) if (folder / name).exists()]
    unique: dict[tuple[int, int], Path] = {}
    for path in libraries:
        if path.name.startswith(_LIBRARIES) or path in programs:
            with contextlib.suppress(OSError):
                stat = os.stat(path)
                unique.setdefault((stat.st_dev, stat.st_ino), path)
    return list(unique.values())


def _interpreter(program: Path) -> Path:
    """What runs a script; of anything else itself."""
    with open(program, "rb") as file:
        head = file.read(256)
    if not head.startswith(b"#!"):
        return program
    words = head[2:].split(b"\n")[0].split()
    if words and words[0].endswith(b"/env") and len(words) > 1:
        return Path(shutil.which(os.fsdecode(words[1])) or program)
    return Path(os.fsdecode(words[0])) if words else program


def _linked(program: Path, environment: Mapping[str, str]) -> list[Path]:
    """A program and the libraries it is linked with, as the loader finds them: one that is made for it (segments over
    the loader's own) has its code run."""
    with open(program, "rb") as file:
        if file.read(4) != b"\x7fELF":
            return []
    for loader in _LOADERS:
        if not os.path.exists(loader):
            continue
        try:
            done = subprocess.run(
                [loader, "--list", str(program)],
                capture_output=True, env=dict(environment), timeout=5, check=False, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            break
        lines = os.fsdecode(done.stdout).splitlines()
        return [program, *(Path(line.split(" => ")[1].rsplit(" (", 1)[0]) for line in lines if " => /" in line)]
    return [program]


class Holder:
    """A child that maps the files with CUDA calls that a command will probably load: who traces this process probes
    them before the command begins.

    Whom the command is to run as may have written it and what it is linked with: all is looked for, opened and listed
    as that user, who can thereby keep the command waiting for :data:`HELD_S` at most.

    Args:
        command: Its words.
        environment: Its variables.
        user: Whom it runs as; None: as this process.
        find: What else is to be looked for: a path, at most 4,000 bytes, or nothing.

    Attributes:
        pid: The child; 0: there is none.
        gave_up: Whether it took too long.
        found: What ``find`` returned.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        user: User | None = None,
        find: Callable[[], Path | None] = lambda: None,
    ) -> None:
        parent = os.getpid()
        ready_read, ready_write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                # It may wait for a file for ever, and its parent may have ended by then.
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(math.ceil(HELD_S) + 1)
                os.setsid()
                if user is not None and user.is_other:
                    os.setgroups(user.groups)
                    os.setgid(user.gid)
                    os.setuid(user.uid)
                os.close(ready_read)
                signal.pthread_sigmask(signal.SIG_SETMASK, [])
                held = []
                for path in likely_libraries(command, environment):
                    with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:
                        held.append(
                            mmap.mmap(file.fileno(), 4096, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC)
                        )
                os.write(ready_write, (b"1" if held else b"0") + os.fsencode(find() or "")[:4000])
                signal.alarm(0)
                while held and os.getppid() == parent:
                    time.sleep(0.2)
            finally:
                os._exit(0)
        os.close(ready_write)
        has_files, self.found = False, None
        try:
            came, _, _ = select.select([ready_read], [], [], HELD_S)
            self.gave_up = not came
            answer = os.read(ready_read, select.PIPE_BUF) if came else b""
            has_files = answer[:1] == b"1"
            self.found = Path(os.fsdecode(answer[1:])) if answer[1:] else None
        finally:
            os.close(ready_read)
            if not has_files:
                self.let_go()

    def let_go(self) -> None:
        """Ends it, and what it has started. One that hangs in the kernel is not waited for: it ends later."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):  # it has not made its session yet
                os.killpg(self.pid, signal.SIGKILL)
            os.kill(self.pid, signal.SIGKILL)
            until = time.monotonic() + ENDS_S
            while os.waitpid(self.pid, os.WNOHANG)[0] == 0 and time.monotonic() < until:
                time.sleep(0.001)
            self.pid = 0


# ---- the command


def run(
    command: Sequence[str], environment: Mapping[str, str], user: User | None = None, account: Account | None = None
) -> int:
    """Runs a command in the foreground and returns its exit code, 128 + the signal if one ended it.

    Its descriptors are this process's. Signals sent to this process are handed on to it; those that the terminal sends
    it has already. ``account`` is given its start and its end.

    Raises:
        ArgusError: It cannot be started; the exit code is a shell's.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_HANDED_ON, signal.SIGCHLD})
    began_ns = mmap.mmap(-1, 8)

    def begin() -> None:
        time.sleep(_FOLLOWED_S)
        files.share()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        began_ns[:] = time.monotonic_ns().to_bytes(8, sys.byteorder)

    try:
        # As root it could not become root again: ids are only set where they differ.
        other = user is not None and user.is_other
        try:
            child = subprocess.Popen(
                list(command),
                env={**environment, **(user.environment if user else {})},
                close_fds=False,
                user=user.uid if user and other else None,
                group=user.gid if user and other else None,
                extra_groups=user.groups if user and other else None,
                preexec_fn=begin,
            )
        except FileNotFoundError as failure:
            raise ArgusError(f"{command[0]}: not found", "", NOT_FOUND) from failure
        except (OSError, subprocess.SubprocessError) as failure:
            raise ArgusError(f"{command[0]}: {failure}", "", NOT_EXECUTABLE) from failure
        if account is not None:
            # Not by this process's clock: it may get a CPU long after the command has.
            account.started(int.from_bytes(began_ns[:], sys.byteorder))
        code = _wait(child)
        if account is not None:
            account.ended(code)
        return code if code >= 0 else SIGNALLED - code
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(child: subprocess.Popen[bytes]) -> int:
    while (code := child.poll()) is None:
        came = signal.sigtimedwait({*_HANDED_ON, signal.SIGCHLD}, 1.0)
        if came is not None and came.si_signo != signal.SIGCHLD and came.si_code <= _SENT_BY_A_PROCESS:
            child.send_signal(came.si_signo)
    return code
