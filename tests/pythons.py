"""The CPythons that tests look into.

Those of pyenv (``$PYENV_ROOT`` or ``~/.pyenv``), those in build/pythons (``ARGUS_WITH_PYTHON314=SUITE scripts/setup``
puts one there), the system's (/usr/bin/python3, ``python3.N`` on PATH), and those that ``ARGUS_TEST_PYTHONS`` names:
paths, separated by colons; a path may be a script that ends in ``exec``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST, NEWEST = (3, 8), (3, 15)

_WHO = """
import sys
print(*sys.version_info[:3], sys.implementation.name, "t" in sys.abiflags, sys.executable)
"""


@dataclass(frozen=True)
class Python:
    """A CPython: its version, the path that runs it, and whether it was built without the GIL."""

    version: tuple[int, int, int]
    path: str
    free_threaded: bool


def pyenv_root() -> Path:
    """Where pyenv keeps its interpreters."""
    return Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")


def prefixes() -> list[Path]:
    """Folders that hold an interpreter each, in ``bin``."""
    found = [*(pyenv_root() / "versions").glob("3.*"), *(ROOT / "build" / "pythons").glob("3.*")]
    return sorted(folder for folder in found if (folder / "bin" / "python3").exists())


@lru_cache(maxsize=1)
def every() -> list[Python]:
    """Every CPython that is there and whose version Argus knows, the oldest first."""
    paths = [str(folder / "bin" / "python3") for folder in prefixes()]
    paths.append("/usr/bin/python3")
    paths += [path for minor in range(OLDEST[1], NEWEST[1] + 1) if (path := shutil.which(f"python3.{minor}"))]
    named = [path for path in os.environ.get("ARGUS_TEST_PYTHONS", "").split(":") if path]
    found: dict[str, Python] = {}
    for path in [*paths, *named]:
        python = _ask(path)
        if python is not None:
            # shims and links lead to one that is there already
            found.setdefault(os.path.realpath(python.path), python)
        elif path in named:
            raise ValueError(f"ARGUS_TEST_PYTHONS: {path} runs no CPython {OLDEST} to {NEWEST}")
    if os.environ.get("ARGUS_WITH_PYTHON314") and not any(python.version[1] == 14 for python in found.values()):
        raise ValueError("ARGUS_WITH_PYTHON314 is set, and no CPython 3.14 is there: scripts/setup")
    return sorted(found.values(), key=lambda python: python.version)


def _ask(path: str) -> Python | None:
    try:
        output = subprocess.run([path, "-c", _WHO], capture_output=True, text=True, timeout=60).stdout.split()
    except OSError:
        return None
    if len(output) != 6 or output[3] != "cpython":
        return None
    major, minor, micro, _, free_threaded, executable = output
    version = int(major), int(minor), int(micro)
    return Python(version, executable, free_threaded == "True") if OLDEST <= version[:2] <= NEWEST else None


def pythons() -> dict[str, str]:
    """Name → path of those that Argus supports."""
    return _named([python for python in every() if not python.free_threaded])


def free_threaded_pythons() -> dict[str, str]:
    """Name → path of those that were built without the GIL, whose stacks Argus refuses."""
    return _named([python for python in every() if python.free_threaded])


def _named(found: list[Python]) -> dict[str, str]:
    names: dict[str, str] = {}
    for python in found:
        name = ".".join(map(str, python.version))
        same = sum(other.partition("-")[0] == name for other in names)
        names[f"{name}-{same}" if same else name] = python.path
    return names
