"""A run: every check in a child of its own, within a bounded time, and never two runs at once."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import importlib
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from argus.health import isolate, plugin
from argus.health.check import (
    ABSENT,
    CRITICAL,
    UNKNOWN,
    WARNING,
    Absent,
    Blind,
    Found,
    Look,
    Result,
    clean,
    readable,
    worst,
)
from argus.health.config import Check, Settings, limits_of
from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.model.units import elapsed
from argus.system import debug, files
from argus.system.host import host_name
from argus.system.proc import field_of, read_file

_SAMPLES = 12
"""Looks at counters that are kept for ``window_s``."""
_MAX_STATE = 64 << 20
_GRACE_S = 60.0
"""So long after its time is up a run that still has the lock hangs: it kills children, and writes one file."""
_BAD_DISK = (errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Errors of a folder's disk that was good once: its node is to be checked all the more."""


@dataclass
class Run:
    """All results, and what they cost."""

    host: str
    at: float
    """Unix time, s."""
    results: list[Result]
    wall_s: float = 0.0
    cpu_s: float = 0.0
    rss_bytes: int = 0
    """The largest of this process and its children."""
    stored: str = ""
    """What became of the history, in words."""
    again: bool = False
    """These are the results of the last run: another one is under way."""
    kind: str = ""

    @property
    def status(self) -> str:
        """The worst of all."""
        return worst([result.status for result in self.results])

    def as_json(self) -> dict[str, Any]:
        """For ``--format json``, and for the next run."""
        return {"schema": "argus.health/1", "status": self.status, **dataclasses.asdict(self)}


@dataclass
class State:
    """What a run leaves for the next one, in a file."""

    boot: str = ""
    looks: dict[str, list[tuple[float, dict[str, float]]]] = field(default_factory=dict)
    """Counters (``*_total``) by check, oldest first."""
    stuck: dict[str, str] = field(default_factory=dict)
    """Children that outlived SIGKILL, by check."""
    last: dict[str, Any] = field(default_factory=dict)
    """The last run's JSON."""


def run(settings: Settings, checks: list[Check]) -> Run:
    """Runs checks, one process each.

    Raises:
        ArgusError: The state folder cannot be used.
    """
    folder = settings.state()
    with _locked(folder) as lock:
        if lock is None:
            return _last(folder, settings.total_s)
        return _run(settings, checks, folder, lock)


def _run(settings: Settings, checks: list[Check], folder: Path, lock: int) -> Run:
    begun, cpu = time.monotonic(), _cpu_s()
    state = _load(folder / "state.json", _boot_id())
    host = host_name()
    done = Run(host, time.time(), [])
    results: dict[str, Result] = {}
    tasks = []
    for check in checks:
        if isolate.alive(state.stuck.get(check.name, "")):
            text = f"process {state.stuck[check.name].partition('/')[0]} of an earlier look still sleeps in the kernel"
            results[check.name] = Result(check.name, CRITICAL, text, "A driver or a mount hangs: restart the node.")
        else:
            state.stuck.pop(check.name, None)
            tasks.append(_task(check, settings, state, done.at))
    _preload(checks)
    for name, outcome in isolate.run_all(tasks, settings.total_s, (lock,)).items():
        results[name] = _result(name, outcome)
        if outcome.stuck:
            state.stuck[name] = outcome.stuck
    done.results = [_require(results[check.name], settings) for check in checks]
    done.kind = settings.kind or kind_of(done.results, Path(settings.root))
    done.wall_s = time.monotonic() - begun
    done.cpu_s = _cpu_s() - cpu
    done.rss_bytes = max(_peak_kib(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) << 10
    _remember(state, done, settings.window_s)
    if failed := _save(folder / "state.json", state):
        text = f"cannot remember what was found, and counters are not compared: {folder}: {failed}"
        done.results.append(Result("state", WARNING, text, "Make room there, or name another folder: state_dir."))
    return done


def _peak_kib() -> int:
    """The most memory that this program has had. (``ru_maxrss`` keeps what the process had before it became this
    program: that of whoever started it.)"""
    with contextlib.suppress(OSError, ValueError):
        return int(field_of(read_file("/proc/self/status"), b"VmHWM").removesuffix(b" kB"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _preload(checks: list[Check]) -> None:
    """Imports what several checks need (``PRELOAD`` in their modules) once, for all children: pyroute2 takes 0.3 s."""
    for name in {getattr(sys.modules.get(check.where), "PRELOAD", "") for check in checks} - {""}:
        with contextlib.suppress(Exception):  # the check will report it
            importlib.import_module(name)


def _task(check: Check, settings: Settings, state: State, now: float) -> isolate.Task:
    def look(note: Callable[..., None]) -> dict[str, Any]:
        if check.kind == "executable":
            return plugin.run(check.where, note)
        # A clock that was set back made looks of the future: nothing can be compared with them.
        before = [look for look in state.looks.get(check.name, []) if look[0] <= now]

        def report(*finding: str) -> None:
            note("", found=finding)

        sources = Look(limits_of(check, settings), Path(settings.root), Path(settings.kmsg), before, note, now, report)
        try:
            return dataclasses.asdict(check.load()(sources))
        except Absent as nothing:
            return {"status": ABSENT, "text": str(nothing)}
        except Blind as reason:
            return {"status": UNKNOWN, "text": str(reason)}

    probe = check.kind == "probe"
    # CUDA reserves address space far beyond what it uses.
    memory = 0 if probe else int(settings.memory_mb * (1 << 20))
    return isolate.Task(check.name, look, settings.probe_s if probe else settings.check_s, memory)


def _result(name: str, outcome: isolate.Outcome) -> Result:
    if outcome.error:
        result = Result(name, UNKNOWN, clean(outcome.error))
    elif isinstance(outcome.value, dict):
        result = readable(outcome.value, name)
    else:
        result = Result(name, UNKNOWN, clean(f"answered {outcome.value!r}, which is no result"))
    if result.status in (UNKNOWN, ABSENT):
        result = _with_findings(result, outcome.found)
    result.seconds = outcome.seconds
    return result


def _with_findings(result: Result, reported: list[Any]) -> Result:
    """What a check had found before it crashed, hung or went blind counts all the same."""
    found = Found()
    for finding in reported:
        if isinstance(finding, list) and len(finding) == 3 and finding[0] in (CRITICAL, WARNING):
            found.add(*map(clean, finding))
    if not found.result("").text:
        return result
    found.unknown(result.text, result.hint)
    both = found.result("")
    return dataclasses.replace(result, status=both.status, text=clean(both.text), hint=clean(both.hint))


def _require(result: Result, settings: Settings) -> Result:
    if result.status == ABSENT and result.name in settings.required:
        return dataclasses.replace(result, status=CRITICAL, text=f"required, but {result.text}")
    return result


def kind_of(results: list[Result], root: Path) -> str:
    """The kind of a node, in words: its GPUs, else its CPUs, and its memory; nodes of one kind are peers."""
    facts = {key: value for result in results for key, value in result.facts.items()}
    with contextlib.suppress(OSError, ValueError):
        gib = int((root / "proc/meminfo").read_text().split()[1]) / (1 << 20)
        # Nodes alike differ by what firmware keeps for itself: to the nearest eighth of an octave.
        facts["memory"] = f"{2 ** (round(8 * math.log2(gib)) / 8):.0f} GiB"
    cpus = f"{os.cpu_count()} CPUs"
    return ", ".join(part for part in (facts.get("gpus", ""), cpus, facts.get("memory", "")) if part)


# ---- one at a time --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[int | None]:
    """Gives the lock's descriptor, None where another run has it. The kernel lets go of it when this process dies."""
    try:
        with files.opened(folder.resolve(), create=True) as opened:
            lock = files.open_at(opened, "lock", os.O_RDWR | os.O_CREAT)
    except OSError as failure:
        if failure.errno not in _BAD_DISK:
            fix = failure.fix if isinstance(failure, files.Untrusted) else ""
            raise ArgusError(
                f"cannot use the folder {folder}: {failure.strerror}",
                ". ".join(filter(None, ["Name another one: state_dir in the settings", fix])),
                EXIT_UNAVAILABLE,
            ) from None
        lock = _lock_without_writing(folder)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            with contextlib.suppress(OSError):
                os.pwrite(lock, f"{isolate.identity(os.getpid()):<40}\n".encode(), 0)
            yield lock
    finally:
        os.close(lock)


def _lock_without_writing(folder: Path) -> int:
    """A lock on what is there of the folder: a disk that takes no writes is what a run has to report. Whoever may open
    a file may lock it, so it is one that nobody else may open. Where there is none, nothing keeps two runs apart."""
    folder = folder.resolve()
    for place in (folder / "lock", folder, *folder.parents):
        with contextlib.suppress(OSError):
            fd = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            status = os.fstat(fd)
            if files.trusted(status) and not status.st_mode & 0o077:
                return fd
            os.close(fd)
    debug.note(f"health: nothing of {folder} can be locked, another run may be under way")
    return os.memfd_create("argus-health-lock", os.MFD_CLOEXEC)


def _overdue(folder: Path, total_s: float) -> Result | None:
    """The result to report of the run that has the lock, if it should have ended long ago."""
    with contextlib.suppress(OSError, ValueError):
        pid, _, start = (folder / "lock").read_text().strip().partition("/")
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(start) / os.sysconf("SC_CLK_TCK")
        if age > total_s + _GRACE_S and isolate.alive(f"{pid}/{start}"):
            text = f"process {pid} has been at it for {elapsed(age)} and does not end: nothing was looked at since"
            return Result(
                "earlier_run", UNKNOWN, text, f"See where it hangs: cat /proc/{pid}/stack. End it: kill -9 {pid}"
            )
    return None


def _last(folder: Path, total_s: float) -> Run:
    """What the last run found, when another one is under way."""
    if (hangs := _overdue(folder, total_s)) is not None:
        return Run(host_name(), time.time(), [hangs])
    state = _load(folder / "state.json", None)
    try:
        return run_from(state.last, again=True)
    except (KeyError, TypeError, ValueError):
        text = "another run is under way, and there was none before"
        return Run(host_name(), time.time(), [Result("argus", UNKNOWN, text)], again=True)


def run_from(values: dict[str, Any], *, again: bool = False) -> Run:
    """A run from its JSON; KeyError or TypeError where that is not one."""
    names = {f.name for f in dataclasses.fields(Run)}
    results = [Result(**result) for result in values["results"]]
    return Run(**{**{k: v for k, v in values.items() if k in names}, "results": results, "again": again})


# ---- between runs ---------------------------------------------------------------------------------------------------


def _load(file: Path, boot: str | None) -> State:
    """The state that the last run left; an empty one where it is missing or broken, or of another boot."""
    try:
        with files.opened(file.parent.resolve()) as folder:
            stored = json.loads(files.read_at(folder, file.name, _MAX_STATE))
        state = State(
            str(stored["boot"]),
            {name: [(float(at), dict(figures)) for at, figures in looks] for name, looks in stored["looks"].items()},
            {str(name): str(who) for name, who in stored["stuck"].items()},
            dict(stored["last"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return State(boot or "")
    return state if boot is None or state.boot == boot else State(boot, last=state.last)


def _remember(state: State, done: Run, window_s: float) -> None:
    state.last = done.as_json()
    for result in done.results:
        counters = {name: value for name, value in result.figures.items() if name.partition("/")[0].endswith("_total")}
        looks = [look for look in state.looks.get(result.name, []) if look[0] <= done.at]
        if counters and (len(looks) < 2 or done.at - looks[-1][0] >= window_s / _SAMPLES):
            looks.append((done.at, counters))
        while len(looks) > 1 and looks[1][0] <= done.at - window_s:
            looks.pop(0)  # the next one is old enough, too
        if looks:
            state.looks[result.name] = looks[-_SAMPLES - 2 :]


def _save(file: Path, state: State) -> str:
    """So that a kill or a full disk leaves the old one: what is lost is only a look. Returns why it failed."""
    try:
        with files.opened(file.parent.resolve()) as folder:
            files.write_at(folder, file.name, json.dumps(dataclasses.asdict(state)).encode(), alone=True)
    except OSError as failure:
        return failure.strerror or str(failure)
    return ""


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "?"


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)
