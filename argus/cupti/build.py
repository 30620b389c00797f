"""Compiles the helper that CUDA loads into a traced process, and returns where it is.

Two libraries come of ``helper/``: the helper itself, and the same with a constructor that starts it, which is put into
running processes. Both are plain C with no dependency but the C library, so one wheel serves every Python. ``python -m
argus.cupti.build`` compiles them in place; so do ``scripts/setup`` and the building of a wheel.

This file is also run by ``setup.py``, before anything is installed: it imports nothing but the standard library,
``argus.model.errors`` and ``argus.system.files``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.system import files

PACKAGE = Path(__file__).resolve().parent
SOURCES = PACKAGE / "helper"
LIBRARY = "libargus_cupti.so"
INJECTED_LIBRARY = "libargus_cupti_inject.so"

_PARTS = {LIBRARY: "helper.c", INJECTED_LIBRARY: "inject.c"}
_FLAGS = (
    *("-std=gnu11", "-O2", "-g1", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra"),
    # Of functions that moved into libc.so.6 in 2.34, the versions that older systems have as well.
    *("-include", "glibc.h"),
    # A lookup that fails must fail when the library is loaded, where nothing has happened yet. Never unloaded: its
    # thread runs in it.
    *("-Wl,-z,now", "-Wl,-z,nodelete", "-Wl,-z,noexecstack", "-Wl,--no-undefined"),
)
# Before 2.34 these functions are in libraries of their own, which later ones still have, empty.
_LIBRARIES = ("-Wl,--no-as-needed", "-l:libdl.so.2", "-l:libpthread.so.0")


def library() -> Path:
    """The helper: what ``CUDA_INJECTION64_PATH`` has to name.

    Raises:
        ArgusError: It was not compiled.
    """
    return _existing(LIBRARY)


def injected_library() -> Path:
    """The helper as a library that starts when it is loaded; it needs no other file.

    Raises:
        ArgusError: It was not compiled.
    """
    return _existing(INJECTED_LIBRARY)


def _existing(name: str) -> Path:
    path = PACKAGE / name
    if not path.is_file():
        raise ArgusError(
            f"the CUPTI helper is not compiled ({path} is missing)",
            f"Compile it: {sys.executable} -m argus.cupti.build (needs a C compiler)",
            EXIT_UNAVAILABLE,
        )
    return path


def compile_helper(folder: Path) -> list[Path]:
    """Compiles both libraries into a folder.

    A library that is there is replaced, never written over: processes run in the old one.

    Raises:
        ArgusError: There is no compiler, or it refuses.
    """
    compiler = os.environ.get("CC") or "cc"
    if shutil.which(compiler.split()[0]) is None:
        raise ArgusError(
            f"the CUPTI helper cannot be compiled: there is no C compiler ('{compiler}')",
            "Install one (apt install gcc libc6-dev), or name yours in CC",
            EXIT_UNAVAILABLE,
        )
    files.make_folder(folder)
    made = []
    # The compiler writes by name: where nobody else may.
    with tempfile.TemporaryDirectory(prefix="argus-build-") as unfinished:
        for name, source in _PARTS.items():
            library = Path(unfinished, name)
            done = subprocess.run(
                [*compiler.split(), *_FLAGS, f"-Wl,-soname,{name}", "-I", str(SOURCES), "-o", str(library),
                 str(SOURCES / source), *_LIBRARIES],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode:
                raise ArgusError(f"the CUPTI helper does not compile:\n{done.stderr.strip()}")
            if done.stderr:
                sys.stderr.write(done.stderr)
            place = files.open_output_folder(folder.resolve())
            try:
                files.write_at(place, name, library.read_bytes(), 0o755)
            finally:
                os.close(place)
            made.append(folder / name)
    return made


def stale(folder: Path) -> bool:
    """Whether a library in a folder is missing, or older than what it is made of."""
    newest = max(path.stat().st_mtime for path in [*SOURCES.glob("*.[ch]"), Path(__file__)])
    return any(not (folder / name).is_file() or (folder / name).stat().st_mtime < newest for name in _PARTS)


def main() -> int:
    """Compiles the helper in place if its sources changed."""
    try:
        if stale(PACKAGE):
            for made in compile_helper(PACKAGE):
                print(f"compiled {made}", file=sys.stderr)
    except ArgusError as failure:
        print(f"argus: {failure}", file=sys.stderr)
        return failure.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
