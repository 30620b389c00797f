"""What root runs when it runs ``argus``: who else could change it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from argus.system import files

_PACKAGES = ("argus", "argus.cli")


def program() -> list[str]:
    """How this very Argus is called, by absolute paths: cron knows no environment that was activated."""
    beside = Path(sys.executable).with_name("argus")
    return [str(beside)] if os.access(beside, os.X_OK) else [sys.executable, "-m", "argus.cli.main"]


def changeable(words: Iterable[str] = ()) -> tuple[Path, str] | None:
    """The first part of this installation that others than root may change, and why; None: there is none.

    Looked at are the program, the interpreter, the folders that it imports from, and every file of Argus's packages,
    each with all folders above it. What lies in other packages is not: a folder of root's is taken to hold root's.

    Args:
        words: Programs to look at besides, by absolute paths.
    """
    for entry in sys.path:
        if entry and not os.path.isabs(entry):
            return Path(entry), "Python looks for modules there in whatever folder is the current one"
    for part in (*words, *_parts()):
        try:
            who = files.changeable(Path(part))
        except OSError:
            continue  # it is not there: nothing of it runs
        if who is not None:
            return who
    return None


def _parts() -> Iterator[str]:
    yield program()[0]
    yield sys.executable
    yield os.path.join(sys.prefix, "pyvenv.cfg")
    yield from filter(None, sys.path)
    for name in _PACKAGES:
        module = sys.modules.get(name)
        for folder in getattr(module, "__path__", ()):
            for where, _, names in os.walk(folder):
                yield where
                for file in names:
                    if file.endswith((".py", ".pyc", ".so")):
                        yield os.path.join(where, file)


def fix(part: Path) -> str:
    """What to do about a part that ``changeable`` found."""
    return (
        f"Install Argus where all is root's, such as /opt/argus (see: ls -ld {part}), or make all of it root's: "
        "chown -R root:root, chmod -R go-w"
    )
