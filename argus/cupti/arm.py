"""Arming: how CUDA comes to load the helper when a process starts to use the GPU, and which processes have it.

CUDA loads the library that ``CUDA_INJECTION64_PATH`` names in ``cuInit``, so only processes that use the GPU pay
anything: one mapping and one sleeping thread each, until ``argus trace`` wakes it. See docs/gpu-times.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from argus.capture.process.cupti import helper_mapping, read_helper
from argus.cupti import build
from argus.model.errors import EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError
from argus.system import files, redact

VARIABLE = "CUDA_INJECTION64_PATH"
NVTX_VARIABLE = "NVTX_INJECTION64_PATH"
SWITCH = "ARGUS_CUPTI"
"""``ARGUS_CUPTI=0``: this process is not to be armed."""
WAIT_VARIABLE = "ARGUS_CUPTI_WAIT_MS"
"""How long ``cuInit`` waits for Argus, so that the first kernel is timed too. Only ``argus run`` sets it."""
PTH = "argus_arm.pth"
_RUN_TIMEOUT_S = 60.0
_COMMAND_CHARACTERS = 4096
"""Of a command line, what is kept: it may be megabytes."""


# ---- by the environment


@dataclass(frozen=True)
class Arming:
    """What is to be set for a command, and the state that GPU times will have in it, for people.

    Attributes:
        changes: Variables to set.
        state: "on", or "off: " and why.
    """

    changes: Mapping[str, str]
    state: str

    @property
    def on(self) -> bool:
        """Whether the command will be armed."""
        return self.state == "on"


def arm(environment: Mapping[str, str], *, wait_ms: int = 0) -> Arming:
    """Arms what is started with this environment.

    What the user has set already wins: another profiler's injection library is left in its place.

    Args:
        environment: Of the command that is to be started.
        wait_ms: How long ``cuInit`` may wait for Argus; 0: not at all.
    """
    if environment.get(SWITCH) == "0":
        return Arming({}, f"off: {SWITCH}=0 is set")
    try:
        path = str(build.library())
    except ArgusError as failure:
        return Arming({}, f"off: {failure.message}")
    taken = environment.get(VARIABLE, "")
    if taken and Path(taken).name != build.LIBRARY:
        return Arming({}, f"off: {VARIABLE} is taken by {taken}")
    changes = {} if taken else {VARIABLE: path}
    if wait_ms and WAIT_VARIABLE not in environment:
        changes[WAIT_VARIABLE] = str(wait_ms)
    return Arming(changes, "on")


def export_text(path: Path, output_format: str = "env") -> str:
    """The setting that arms, for a shell (``env``), a program (``json``) or a pod (``k8s``)."""
    if output_format == "json":
        return json.dumps({VARIABLE: str(path)})
    if output_format == "k8s":
        return f"env:\n- name: {VARIABLE}\n  value: {json.dumps(str(path))}"
    return f"export {VARIABLE}={shlex.quote(str(path))}"


def copy_to(folder: Path) -> Path:
    """Copies the helper to a folder, for a shared file system or an image; returns its path there.

    A helper that is there is replaced, never written over: processes run in it.

    Raises:
        ArgusError: The folder cannot be written to, the helper is not compiled, or root runs this and others could put
            another helper in the folder.
    """
    source = build.library()
    try:
        library = source.read_bytes()
        with files.folder_for_others(folder) as (place, fd):
            files.write_at(fd, build.LIBRARY, library, 0o755)
    except files.Untrusted as failure:
        raise ArgusError(
            f"the helper is not copied to {folder}: others could exchange it: {failure.filename}: {failure.strerror}",
            "Name a folder that root alone may change, with all above it: --copy-to /opt/argus",
            EXIT_UNAVAILABLE,
        ) from None
    except OSError as failure:
        raise ArgusError(f"the helper cannot be copied to {folder}: {failure.strerror}") from failure
    return place / build.LIBRARY


# ---- by an interpreter's site-packages


def pth_line(path: Path) -> str:
    """One line of Python, run at each start of an interpreter.

    It sets the variable unless somebody has, the helper is gone, or the process does not want it. It raises nothing and
    imports nothing that is not loaded anyway.
    """
    place = repr(str(path))
    return (
        f'import os; os.environ.get("{SWITCH}") != "0" and os.access({place}, os.R_OK) '
        f'and os.environ.setdefault("{VARIABLE}", {place})\n'
    )


def arm_interpreter(python: str) -> Path:
    """Arms every process that an interpreter starts, by a .pth file in its site-packages; returns that file.

    Raises:
        ArgusError: It is no Python, its site-packages cannot be written, it does not read them, or root runs this and
            somebody else may change the interpreter.
    """
    path = build.library()
    folder = _site_packages(python)
    place = folder / PTH
    seen = ""
    try:
        with files.folder_for_others(folder) as (_, fd):
            files.write_at(fd, PTH, pth_line(path).encode("utf-8", "surrogateescape"), 0o644)
            try:
                seen = _run(python, f"import os; print(os.environ.get({VARIABLE!r}))")
            finally:
                if seen != str(path):
                    os.unlink(PTH, dir_fd=fd)
    except files.Untrusted as failure:
        raise _of_others(python, Path(failure.filename), str(failure.strerror)) from None
    except OSError as failure:
        hint = _by_owner(folder, python) if isinstance(failure, PermissionError) else ""
        raise ArgusError(f"{place} cannot be written: {failure.strerror}", hint) from failure
    if seen != str(path):
        raise ArgusError(
            f"{python} does not run {place}, or runs it too late",
            f'Set {VARIABLE} instead: eval "$(argus arm)"',
        )
    return place


def disarm_interpreter(python: str) -> Path | None:
    """Takes the .pth file away; None: there was none.

    Raises:
        ArgusError: It is no Python, the file may not be removed, or root runs this and somebody else may change the
            interpreter.
    """
    place = _site_packages(python, "--remove") / PTH
    try:
        place.unlink()
    except FileNotFoundError:
        return None
    except OSError as failure:
        hint = _by_owner(place.parent, python, "--remove") if isinstance(failure, PermissionError) else ""
        raise ArgusError(f"{place} cannot be removed: {failure.strerror}", hint) from failure
    return place


def _site_packages(python: str, *words: str) -> Path:
    """A folder whose .pth files an interpreter reads. ``words``: what else the command line has."""
    if os.geteuid() == 0:
        _refuse_others(python, words, _started_from(Path(_find(python))))
        _refuse_others(python, words, _imported_from(python))
    output = _run(
        python,
        "import json, os, site, sys, sysconfig\n"
        "folders = [sysconfig.get_paths()['purelib']] + list(getattr(site, 'getsitepackages', list)())\n"
        "print(json.dumps([f for f in folders if f in sys.path and os.path.isdir(f)]))",
    )
    try:
        folders = json.loads(output)
    except ValueError as failure:
        raise ArgusError(f"{python} is not a supported Python", "", EXIT_USAGE) from failure
    if not folders:
        raise ArgusError(f"{python} has no site-packages to write to", f'Set {VARIABLE} instead: eval "$(argus arm)"')
    if os.geteuid() == 0:
        _refuse_others(python, words, [Path(folders[0])])
    return Path(folders[0])


def _refuse_others(python: str, words: Sequence[str], parts: Iterable[Path]) -> None:
    """Raises an ArgusError if others than root may change a part of an interpreter."""
    for part in parts:
        while not os.path.lexists(part) and part != part.parent:
            part = part.parent  # who may make it there may change it
        try:
            found = files.changeable(part)
        except (OSError, ValueError):
            continue  # a link that leads nowhere, where nobody else could change that
        if found is not None:
            raise _of_others(python, *found, *words)


def _of_others(python: str, part: Path, reason: str, *words: str) -> ArgusError:
    message = f"{python} is not run as root: others may change it: {part}: {reason}"
    return ArgusError(message, _by_owner(part, python, *words), EXIT_UNAVAILABLE)


def _by_owner(part: Path, python: str, *words: str) -> str:
    """What to do for a file or folder to be changed by who owns it."""
    try:
        status = os.lstat(part)
    except OSError:
        return ""
    uid = status.st_uid
    if uid == os.geteuid():
        return f"Let nobody else change it: chmod go-w {shlex.quote(str(part))}" if files.distrust(status) else ""
    name = files.owner(uid)
    user = f"-u {shlex.quote(f'#{uid}' if name.startswith('uid ') else name)} " if uid else ""
    own = f"Run it as its owner: sudo {user}{shlex.join(['argus', 'arm', '--python', python, *words])}"
    return own if words else f'{own}, or arm a shell: eval "$(argus arm)"'


def _started_from(exe: Path) -> Iterator[Path]:
    """Files and folders that decide which code an interpreter is. Files of the next are read once it is asked for."""
    yield exe
    folders = [exe.parent, Path(os.path.realpath(exe)).parent]
    for config in (exe.parent / "pyvenv.cfg", exe.parent.parent / "pyvenv.cfg"):
        yield config
        with contextlib.suppress(OSError):
            for line in config.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
                name, _, value = line.partition("=")
                if name.strip().lower() == "home":
                    folders.append(exe.parent / value.strip())
    for folder in folders:
        yield folder
        for pattern in ("lib*/python3*", "lib*/python3*/site-packages", "lib*/python3*/dist-packages"):
            yield from sorted(folder.parent.glob(pattern))


def _imported_from(python: str) -> Iterator[Path]:
    """Folders that an interpreter imports from, and those that site-packages are read from at its start: of one that is
    started without reading them (``-S``)."""
    output = _run(
        python,
        "import json, os, site, sys\n"
        "above = os.path.dirname(os.path.dirname(sys.executable))\n"
        "print(json.dumps(sys.path + getattr(site, 'getsitepackages', list)([sys.prefix, sys.exec_prefix, above])))",
        "-S",
    )
    try:
        yield from (Path(folder) for folder in json.loads(output) if os.path.isabs(folder))
    except (TypeError, ValueError) as failure:
        raise ArgusError(f"{python} is not a supported Python", "", EXIT_USAGE) from failure


def _find(python: str) -> str:
    """The absolute path of an interpreter, which may be a link."""
    exe = shutil.which(python)
    if exe is None:
        raise ArgusError(f"there is no interpreter '{python}'", "Name the one that the job runs with", EXIT_USAGE)
    return str(Path(exe).absolute())


def _run(python: str, code: str, *options: str) -> str:
    """The last line that an interpreter prints, started as if nobody had set anything."""
    exe = _find(python)
    environment = {name: value for name, value in os.environ.items() if name not in (VARIABLE, SWITCH)}
    try:
        done = subprocess.run(
            [exe, "-I", *options, "-c", code],
            capture_output=True, text=True, errors="surrogateescape", env=environment, timeout=_RUN_TIMEOUT_S,
            check=False, stdin=subprocess.DEVNULL, cwd="/" if os.geteuid() == 0 else None,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as failure:
        raise ArgusError(f"{python} cannot be run: {failure}", "", EXIT_USAGE) from failure
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise ArgusError(f"{python} is not a supported Python: {last}", "", EXIT_USAGE)
    return lines[-1]


# ---- NVTX


def find_cupti(environment: Mapping[str, str], command: Sequence[str]) -> Path | None:
    """The CUPTI that a command is likely to load: its own wheels', then the search path's, then the system's."""
    folders: list[Path] = []
    exe = shutil.which(command[0], path=environment.get("PATH")) if command else None
    if exe is not None:
        prefix = Path(exe).parent.parent  # not resolved: a virtual environment's link leads out of it
        folders += sorted(prefix.glob("lib/python3*/site-packages/nvidia/c*/lib"))
    folders += [Path(word) for word in environment.get("LD_LIBRARY_PATH", "").split(":") if word]
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if environment.get(variable):
            folders += [Path(environment[variable], *tail) for tail in (("extras", "CUPTI", "lib64"), ("lib64",))]
    for toolkit in (Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)):
        folders += [toolkit / "extras" / "CUPTI" / "lib64", toolkit / "lib64"]
    folders += [Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib64")]
    for folder in folders:
        libraries = [path for path in sorted(folder.glob("libcupti.so*"), reverse=True) if path.is_file()]
        if libraries:
            return libraries[0].resolve()
    return None


# ---- who is armed


@dataclass(frozen=True)
class Armed:
    """A running process with the helper in it.

    Attributes:
        pid: As this machine counts.
        command: Its command line, 4096 characters of it at most.
        state: DORMANT, PROBED, ON, OFF, IGNORED, FAILED, ENDED, or why it could not be read.
        reason: The helper's reason; may be empty.
    """

    pid: int
    command: str
    state: str
    reason: str = ""


def helper_address(pid: int) -> int | None:
    """Where a process maps the helper's memory; None: it does not, so it is not armed.

    Raises:
        OSError: The process ended, or may not be looked at.
    """
    mapping = helper_mapping(pid)
    return int(mapping.split("-")[0], 16) if mapping else None


def armed_processes(pids: Sequence[int] = ()) -> Iterator[Armed]:
    """Every armed process, or those of ``pids`` that are. Processes that may not be looked at are left out. Where there
    is a reader process, that one reads."""
    from argus.capture.process.targets import processes, read_command  # with numpy: see _read_state

    for pid in pids or sorted(processes()):
        with contextlib.suppress(OSError):
            where = helper_mapping(pid)
            if not where:
                continue
            words = "\0".join(read_command(pid))[:_COMMAND_CHARACTERS].split("\0")
            state = _read_state(pid, where)
            if state is not None:
                yield Armed(pid, redact.command_line(words), *state)


def _read_state(pid: int, where: str) -> tuple[str, str] | None:
    """State and reason. None: the memory is another process's: a parent's, or one that this process traces."""
    # Not above: `argus run` needs this module before it forks, and numpy starts threads.
    import numpy as np

    from argus.capture.process.targets import numbers_of
    from argus.cupti import shared

    try:
        control = np.frombuffer(read_helper(pid, where, shared.CONTROL.itemsize), shared.CONTROL)[0]
    except PermissionError:
        return "unknown: not permitted (use sudo)", ""
    except (OSError, ValueError, IndexError):
        return "unknown: it could not be read", ""
    if int(control["magic"]) != shared.MAGIC:
        return "unknown: loaded by another version of Argus", ""
    if int(control["pid"]) not in numbers_of(pid):
        return None
    names = {state.value: state.name for state in shared.State}
    state = int(control["state"])
    reason = bytes(control["reason"]).split(b"\0")[0].decode(errors="backslashreplace")
    return names.get(state, f"unknown: {state}"), "".join(c if c.isprintable() else "?" for c in reason)
