"""Settings and thresholds: documented defaults, and a TOML file that changes some of them."""

from __future__ import annotations

import difflib
import errno
import importlib
import importlib.metadata
import os
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from itertools import chain, count
from pathlib import Path
from typing import Any

from argus.health import checks
from argus.health.check import Look, Result, clean
from argus.health.limit import Limit
from argus.model.errors import EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError
from argus.system import toml
from argus.system.lean import unhide_pandas

DEFAULT_FILE = Path("/etc/argus/health.toml")
_MOST = 1_000_000
"""For numbers of the top level: 11 days, 1 TB. More cannot be waited for."""
_SETTINGS_HINT = "docs/health.md shows what settings look like; argus health --list shows thresholds"
ENTRY_POINTS = "argus.health"
"""Group of Python entry points that are checks: functions as those of ``argus.health.checks``."""


@dataclass
class Settings:
    """How a run goes. Names and defaults are those of the TOML file's top level.

    Attributes:
        store: Where results go (as ``--store``); empty: the default store. ``off``: nowhere.
        root: Below it lie /proc, /sys, /etc; in a container perhaps /host.
        kmsg: The kernel log.
        state_dir: What a run leaves for the next one; empty: /var/lib/argus/health for root, else
            ~/.local/state/argus/health.
        total_s: The run's time limit, s. A check that was not started by then is unknown.
        check_s: The time limit of each check, s; ``probe_s`` that of an active probe.
        memory_mb: Memory that a check may take, MiB (data and heap).
        store_s: The longest that storing may take, s.
        window_s: Counters are compared with the oldest look of the last so many seconds.
        skip: Checks that never run.
        required: Checks that must find something to look at: absent is critical for them.
        plugins: Executables in this folder are checks (exit code and output as Nagios plug-ins).
        kind: The kind of node, for comparing it with peers; empty: derived from its GPUs, CPUs and memory.
        limits: Thresholds by check.
    """

    store: str = ""
    root: str = "/"
    kmsg: str = "/dev/kmsg"
    state_dir: str = ""
    total_s: float = 60.0
    check_s: float = 10.0
    probe_s: float = 30.0
    memory_mb: float = 512
    store_s: float = 60.0
    window_s: float = 3600.0
    skip: list[str] = field(default_factory=list)
    required: list[str] = field(default_factory=list)
    plugins: str = "/etc/argus/health.d"
    kind: str = ""
    limits: dict[str, dict[str, Any]] = field(default_factory=dict)

    def state(self) -> Path:
        """The folder for what a run leaves behind."""
        if self.state_dir:
            return Path(self.state_dir)
        if os.geteuid() == 0:
            return Path("/var/lib/argus/health")
        folder = Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")) / "argus" / "health"
        if not folder.is_absolute():  # of a user without a home
            hint = "Name another one: state_dir in the settings"
            raise ArgusError(f"cannot use the folder {folder}: this user has no home", hint, EXIT_UNAVAILABLE)
        return folder


@dataclass(frozen=True)
class Check:
    """A check that can run."""

    name: str
    about: str
    kind: str
    """``builtin``, ``probe`` (runs with --active only), ``python`` (an entry point) or ``executable``."""
    where: str
    """Module, entry point or file."""
    limits: dict[str, Limit]

    def load(self) -> Callable[[Look], Result]:
        """Its function. Call this where a crash does no harm: importing a plug-in runs its code."""
        if self.kind == "python":
            unhide_pandas()
            entries = importlib.metadata.entry_points(group=ENTRY_POINTS)
            function: Callable[[Look], Result] = entries[self.name].load()
            return function
        module = importlib.import_module(self.where)
        loaded: Callable[[Look], Result] = module.check
        return loaded


def builtin() -> list[Check]:
    """Argus's own checks, by name."""
    listed = []
    for name in sorted(info.name for info in pkgutil.iter_modules(checks.__path__)):
        if name.startswith("_"):
            continue
        module = importlib.import_module(f"{checks.__name__}.{name}")
        about = (module.__doc__ or "").strip().splitlines()[0]
        kind = "probe" if name.startswith("probe_") else "builtin"
        listed.append(Check(name, about, kind, module.__name__, dict(module.LIMITS)))
    return listed


def available(settings: Settings) -> list[Check]:
    """Every check: Argus's own, entry points, executables. A plug-in cannot take the name of another check."""
    by_name = {check.name: check for check in builtin()}
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        by_name.setdefault(entry.name, Check(entry.name, f"plug-in {entry.value}", "python", entry.value, {}))
    for file in _executables(Path(settings.plugins)):
        # gpu.sh is gpu_sh: it is neither lost, nor in the place of Argus's own.
        whole = _word(file.name)
        names = chain([_word(file.name.split(".")[0]), whole], (f"{whole}_{number}" for number in count(2)))
        name = next(name for name in names if name not in by_name)
        by_name[name] = Check(name, clean(f"plug-in {file}"), "executable", str(file), {})
    return list(by_name.values())


def _executables(folder: Path) -> list[Path]:
    try:
        files = [file for file in sorted(folder.iterdir()) if file.is_file() and not file.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as failure:
        hint = "Run it as root, or name another folder: plugins in the settings"
        raise ArgusError(f"cannot read the plug-ins in {folder}: {failure.strerror}", hint, EXIT_UNAVAILABLE) from None
    return [file for file in files if os.access(file, os.X_OK)]


def _word(text: str) -> str:
    return re.sub(r"\W", "_", text, flags=re.ASCII) or "_"


def load(file: Path | None = None) -> Settings:
    """Reads settings.

    Args:
        file: The TOML file; None: ``/etc/argus/health.toml`` if there is one, else defaults.

    Raises:
        ArgusError: It cannot be read, or has an unknown setting.
    """
    default = file is None
    file = file or DEFAULT_FILE
    other = "Name other settings: --config FILE"
    unreadable = other if os.geteuid() == 0 else "Run it as root, or name other settings: --config FILE"
    tables = toml.read(file, _SETTINGS_HINT, unreadable)
    if tables is None:
        if default:
            return Settings()
        raise ArgusError(f"cannot read {file}: {os.strerror(errno.ENOENT)}", other, EXIT_UNAVAILABLE)
    return _settings(tables, file)


def _settings(tables: dict[str, Any], file: Path) -> Settings:
    settings = Settings()
    known = {f.name: getattr(settings, f.name) for f in fields(Settings) if f.name != "limits"}
    for key, value in tables.items():
        if not isinstance(value, dict):
            _accept(key, value, known, str(file))
            if isinstance(value, int | float) and value > _MOST:
                raise ArgusError(
                    f"{file}: {key} cannot be more than {_MOST:,}", f"Its default is {known[key]!r}", EXIT_USAGE
                )
            setattr(settings, key, value)
    own = {check.name: check for check in available(settings)}
    for name, table in tables.items():
        if not isinstance(table, dict):
            continue
        if name not in own:
            raise _unknown(f"[{name}]", name, list(own), str(file))
        if own[name].kind in ("builtin", "probe"):
            defaults = {key: limit.default for key, limit in own[name].limits.items()}
            for key, value in table.items():
                _accept(key, value, defaults, f"{file} [{name}]")
        settings.limits[name] = dict(table)
    for listed in (settings.skip, settings.required):
        for name in listed:
            known_check(name, list(own.values()))
    return settings


def known_check(name: str, among: list[Check]) -> None:
    """Raises ArgusError unless there is such a check."""
    if name not in (names := [check.name for check in among]):
        raise _unknown("check", name, names, "")


def _unknown(what: str, name: str, names: list[str], where: str) -> ArgusError:
    near = difflib.get_close_matches(name, names, 1)
    hint = f"Did you mean '{near[0]}'?" if near else f"There are: {', '.join(names)}"
    return ArgusError(f"{where + ': ' if where else ''}there is no {what} '{name}'", hint, EXIT_USAGE)


def _accept(key: str, value: Any, defaults: dict[str, Any], where: str) -> None:
    if key not in defaults:
        raise _unknown("setting", key, list(defaults), where)
    default = defaults[key]
    number = isinstance(default, int | float) and not isinstance(default, bool)
    good = isinstance(value, int | float) and not isinstance(value, bool) if number else type(value) is type(default)
    if good and isinstance(default, list):
        good = all(isinstance(each, str) for each in value)
    if not good:
        kind = (
            "a number" if number else {str: "a string", list: "a list of strings", bool: "true or false"}[type(default)]
        )
        raise ArgusError(f"{where}: {key} must be {kind}", f"Its default is {default!r}", EXIT_USAGE)
    if number and value != value:
        raise ArgusError(f"{where}: {key} must be a number, and nan is none", f"Its default is {default!r}", EXIT_USAGE)
    if number and value < 0:
        raise ArgusError(f"{where}: {key} cannot be negative", f"Its default is {default!r}", EXIT_USAGE)


def limits_of(check: Check, settings: Settings) -> dict[str, Any]:
    """A check's thresholds: defaults, changed by the file."""
    return {key: limit.default for key, limit in check.limits.items()} | settings.limits.get(check.name, {})
