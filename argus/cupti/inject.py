"""Puts the helper into a running process that was not armed. Only on request: nothing else that Argus does changes a
process from outside.

CPython 3.14 and newer is asked to load the helper itself (``sys.remote_exec``), and is never stopped. In any other
process the main thread is interrupted, as by a signal, to call ``dlopen`` (``argus.cupti.interrupt``). That is safe
only where it is not within the C library's allocator or loader: where it is found there, it goes on, and is looked at
again a little later.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import secrets
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from argus.capture.targets import PROC, executable_mappings, inspect, maps_cuda, read_environment
from argus.cupti import build, interrupt
from argus.cupti.arm import SWITCH, helper_address
from argus.errors import EXIT_UNAVAILABLE, ArgusError

WAIT_S = 10.0
"""How long the helper may take to start once it was asked to."""
REST_TIMEOUT_S = 5.0
"""How long to look for a moment in which the main thread can be made to load a library."""
REST_INTERVAL_S = 0.02
SECCOMP_VARIABLE = "ARGUS_INJECT_SECCOMP"
"""``ARGUS_INJECT_SECCOMP=1``: inject in spite of a seccomp filter. Container runtimes' default ones allow it."""
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")

_ARM_INSTEAD = "Arm it where it is started: docs/gpu-times.md"
_MACHINES = {"x86_64": 62, "aarch64": 183}
_PYTHON = re.compile(r"/(?:lib)?python3\.(\d+)t?(?:\.so\S*)?$")


def inject(pid: int) -> str:
    """Puts the helper into a running process, dormant; returns what was done, and what it cost the process.

    Raises:
        ArgusError: It cannot or should not be done, with what to do instead. The process is as it was.
    """
    target = inspect(pid)
    try:
        return _inject(pid)
    except (FileNotFoundError, ProcessLookupError) as reason:
        if target.alive():
            raise
        raise ArgusError(f"process {pid} ended while Argus looked at it", "", EXIT_UNAVAILABLE) from reason
    except PermissionError as reason:
        raise ArgusError(
            f"process {pid} may not be injected: {reason}", "Run Argus with sudo", EXIT_UNAVAILABLE
        ) from reason
    finally:
        target.close()


def _inject(pid: int) -> str:
    if helper_address(pid) is not None:
        return "already armed"
    refuse(pid)
    environment = read_environment(pid)
    minor = _python_minor(pid)
    wanted = "PYTHON_DISABLE_REMOTE_DEBUG" not in environment and not _disabled_by_option(pid)
    if minor is not None and minor >= 14 and wanted:
        with _seen_by(pid) as (outside, inside):
            return _by_python(pid, environment, outside, inside)
    with _seen_by(pid) as (_, inside):
        return _by_ptrace(pid, inside)


# ---- what is not injected


def refuse(pid: int) -> None:
    """Says why a process cannot or should not be injected.

    Raises:
        ArgusError: The reason, with what to do instead.
    """

    def no(what: str, hint: str = _ARM_INSTEAD) -> ArgusError:
        return ArgusError(f"process {pid} {what}: not injected", hint, EXIT_UNAVAILABLE)

    if pid == os.getpid():
        raise no("is Argus itself", "")
    status = _status(pid)
    if status["TracerPid"] != "0":
        raise no(f"is being traced by process {status['TracerPid']} (a debugger?)", "End that first")
    state = status["State"][:1]
    if state in "Tt":
        raise no("is stopped", f"Let it go on first: kill -CONT {pid}")
    if state == "D" and _stays_uninterruptible(pid):
        raise no("hangs in the kernel (uninterruptible sleep)", "Try again once it runs: it may be waiting for a disk")
    if read_environment(pid).get(SWITCH) == "0":
        raise no(f"was started with {SWITCH}=0", "Start it without")
    with open(PROC / str(pid) / "exe", "rb") as file:
        head = file.read(20)
    machine = _MACHINES.get(platform.machine())
    if len(head) < 20 or head[4] != 2 or struct.unpack_from("<H", head, 18)[0] != machine:
        raise no(f"is a program for another architecture than Argus ({platform.machine()})", "")
    if not maps_cuda(pid):
        raise no("has not loaded CUDA yet")
    names = {Path(mapping.path).name for mapping in executable_mappings(pid)}
    if any(name.startswith("ld-musl") for name in names):
        raise no("uses musl, and the helper needs glibc", "")
    if "shstk" in status.get("x86_Thread_features", ""):
        raise no("has a shadow stack, which forbids it")
    if not any(name.startswith(("libc.so.6", "libc-2.")) for name in names):
        raise no("uses no glibc that Argus can find", "")
    if status.get("Seccomp", "0") == "2" and os.environ.get(SECCOMP_VARIABLE) != "1":
        raise no(
            "has a seccomp filter, which may end it for a call that it does not expect",
            f"{SECCOMP_VARIABLE}=1 tries all the same (the default filters of container runtimes allow it)",
        )
    with contextlib.suppress(OSError):
        if YAMA.read_text().strip() == "3":
            raise no("cannot be injected on this machine (Yama, ptrace_scope 3)")


def _status(pid: int) -> dict[str, str]:
    lines = (PROC / str(pid) / "status").read_text(errors="replace").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _stays_uninterruptible(pid: int) -> bool:
    for _ in range(10):
        time.sleep(0.05)
        if _status(pid)["State"][:1] != "D":
            return False
    return True


# ---- a place for the files that the process can read


@contextlib.contextmanager
def _seen_by(pid: int) -> Iterator[tuple[Path, Path]]:
    """A folder with both libraries that the process can load them from, for a while.

    Yields the folder as this process opens it and as the other one does. After ``dlopen`` the files may go.

    Raises:
        ArgusError: There is no folder that the process could load a library from.
    """
    tried = []
    name = f"argus-inject-{secrets.token_hex(8)}"
    for parent in map(Path, ("/tmp", "/var/tmp", "/dev/shm", "/run")):
        with contextlib.ExitStack() as stack:
            try:
                # By descriptor: /proc/PID/root ends with the process, and the files must be removed even then.
                folder = os.open(f"{PROC}/{pid}/root{parent}", os.O_PATH | os.O_DIRECTORY)
                stack.callback(os.close, folder)
                if os.statvfs(folder).f_flag & os.ST_NOEXEC:
                    tried.append(f"{parent} is mounted noexec")
                    continue
                made = Path(f"{PROC}/self/fd/{folder}/{name}")
                made.mkdir(mode=0o755)
                stack.callback(shutil.rmtree, made, ignore_errors=True)
                made.chmod(0o755)
                for library in (build.library(), build.injected_library()):
                    shutil.copyfile(library, made / library.name)
                    (made / library.name).chmod(0o755)
            except OSError as failure:
                tried.append(f"{parent}: {failure.strerror}")
                continue
            yield made, parent / name
            return
    raise ArgusError(
        f"process {pid} has no folder to load the helper from ({'; '.join(tried)})", _ARM_INSTEAD, EXIT_UNAVAILABLE
    )


def _other_namespace(pid: int, kind: str) -> bool:
    return os.readlink(f"{PROC}/{pid}/ns/{kind}") != os.readlink(f"{PROC}/self/ns/{kind}")


def _wait_for_helper(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while helper_address(pid) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


# ---- Python 3.14 and newer


def _python_minor(pid: int) -> int | None:
    """N of the CPython 3.N that a process runs; None: it runs none, or does not say which."""
    paths = [os.readlink(PROC / str(pid) / "exe"), *(mapping.path for mapping in executable_mappings(pid))]
    for path in paths:
        match = _PYTHON.search(path.removesuffix(" (deleted)"))
        if match:
            return int(match[1])
    return None


def _disabled_by_option(pid: int) -> bool:
    words = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    return any(word.endswith((b"disable_remote_debug", b"disable-remote-debug")) for word in words[1:8])


def _by_python(pid: int, environment: dict[str, str], outside: Path, inside: Path) -> str:
    """Asks the interpreter to load the helper: it does so when its main thread next runs Python code."""
    script = outside / "start.py"
    library = str(inside / build.LIBRARY)
    script.write_text(f"import ctypes\nctypes.CDLL({library!r}).InitializeInjection()\n")
    script.chmod(0o644)
    exe, root = os.readlink(PROC / str(pid) / "exe"), os.readlink(PROC / str(pid) / "root")
    if root != "/":
        exe = exe.removeprefix(root)
    number = str(pid)
    enter: list[str] = []
    apart = not os.path.samefile(PROC / str(pid) / "root", "/")
    if apart or _other_namespace(pid, "mnt") or _other_namespace(pid, "pid"):
        # remote_exec looks at /proc: the process must have the number there that it has in its own namespace.
        number = _status(pid).get("NSpid", number).split()[-1]
        enter = ["nsenter", "--target", str(pid), "--mount", "--pid", "--root"]
    needed = {"PATH": os.environ.get("PATH", "/usr/bin:/bin:/usr/sbin:/sbin")}
    needed |= {name: environment[name] for name in ("LD_LIBRARY_PATH", "PYTHONHOME") if name in environment}
    # Its own interpreter: the two must be of one version.
    asked = f"import sys; sys.remote_exec({number}, {str(inside / script.name)!r})"
    try:
        done = subprocess.run(
            [*enter, exe, "-S", "-c", asked],
            capture_output=True, text=True, errors="replace", timeout=WAIT_S, check=False, stdin=subprocess.DEVNULL,
            env=needed,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as failure:
        raise ArgusError(f"process {pid} cannot be injected: {exe} does not run: {failure}", _ARM_INSTEAD) from failure
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ArgusError(f"process {pid} cannot be injected by its Python: {said}", _ARM_INSTEAD)
    asked_at = time.monotonic()
    if not _wait_for_helper(pid, WAIT_S):
        raise ArgusError(
            f"process {pid} was asked to load the helper and has not in {WAIT_S:.0f} s",
            "Its main thread runs no Python code (it waits, or is in a long call). Try again later",
            EXIT_UNAVAILABLE,
        )
    waited_ms = 1e3 * (time.monotonic() - asked_at)
    return f"injected by its own Python (sys.remote_exec), without stopping it; it took {waited_ms:.0f} ms"


# ---- everything else


def _by_ptrace(pid: int, inside: Path) -> str:
    if not interrupt.supported():
        raise ArgusError(f"a running process cannot be injected on {platform.machine()} yet", _ARM_INSTEAD)
    library = os.fsencode(inside / build.INJECTED_LIBRARY)
    longest_ms = 0.0
    deadline = time.monotonic() + REST_TIMEOUT_S
    try:
        functions = interrupt.find_functions(pid)
        mappings = executable_mappings(pid)
        while True:
            with _undisturbed(), interrupt.stop(pid) as thread:
                called = thread.at_rest(mappings, functions.sigreturn)
                if called:
                    thread.call(functions.dlopen, library, os.RTLD_NOW, functions.sigreturn)
            longest_ms = max(longest_ms, 1e3 * thread.held_s)
            if called:
                break
            if time.monotonic() > deadline:
                raise interrupt.Refused("its main thread was never found where loading a library is safe")
            time.sleep(REST_INTERVAL_S)
    except interrupt.Refused as reason:
        raise ArgusError(f"process {pid} cannot be injected: {reason}", _ARM_INSTEAD, EXIT_UNAVAILABLE) from reason
    if not _wait_for_helper(pid, WAIT_S):
        what = "was loaded but did not start" if _loaded(pid) else "could not be loaded"
        raise ArgusError(f"the helper {what} in process {pid}", "Is it a launcher, or very short of memory?")
    return f"injected by ptrace: the process was stopped for {longest_ms:.1f} ms"


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Nobody else gets this thread's processor while the process waits for it. Where that is not allowed, they may."""
    policy, priority = os.sched_getscheduler(0), os.sched_getparam(0)
    changed = False
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        changed = True
    try:
        yield
    finally:
        if changed:
            os.sched_setscheduler(0, policy, priority)


def _loaded(pid: int) -> bool:
    return any(Path(mapping.path).name == build.INJECTED_LIBRARY for mapping in executable_mappings(pid))
