"""Small real programs that the tests look into, and the CPythons that run them.

Interpreters are those of pyenv (``$PYENV_ROOT`` or ``~/.pyenv``), the system's, and those that the environment variable
``ARGUS_TEST_PYTHONS`` names (paths, separated by colons; a path may be a script that ends in ``exec``). A newer CPython
than the machine's comes, for example, from Debian's archive: download ``python3.14``, what it depends on and its libc,
unpack them with ``dpkg -x`` into a folder, and let a script run ``PYTHONHOME=FOLDER/usr exec
FOLDER/lib64/ld-linux-x86-64.so.2 --library-path FOLDER/usr/lib/x86_64-linux-gnu FOLDER/usr/bin/python3.14 "$@"``.
"""

from __future__ import annotations

import os
import subprocess
from functools import lru_cache
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
OLDEST, NEWEST = (3, 8), (3, 15)


def pyenv_root() -> Path:
    """Where pyenv keeps its interpreters."""
    return Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")


@lru_cache(maxsize=1)
def pythons() -> dict[str, str]:
    """Name → path of every CPython that is there and that Argus supports."""
    paths = sorted(str(path) for path in (pyenv_root() / "versions").glob("3.*/bin/python3"))
    paths += ["/usr/bin/python3"]
    paths += [path for path in os.environ.get("ARGUS_TEST_PYTHONS", "").split(":") if path]
    found: dict[str, str] = {}
    for path in paths:
        ask = "import sys; print(*sys.version_info[:3], sys.implementation.name)"
        try:
            said = subprocess.run([path, "-c", ask], capture_output=True, text=True, timeout=60).stdout.split()
        except OSError:
            continue
        if len(said) != 4 or said[3] != "cpython" or not OLDEST <= (int(said[0]), int(said[1])) <= NEWEST:
            continue
        name = ".".join(said[:3])
        found[f"{name}-{sum(other.startswith(name) for other in found)}" if name in found else name] = path
    return found


class Running:
    """One of the programs at work; ends with the ``with`` block.

    Args:
        python: Path of the interpreter.
        program: Its file in this folder.
        arguments: For the program.
        wrapper: A command that starts it.
    """

    def __init__(self, python: str, program: str, *arguments: str, wrapper: tuple[str, ...] = ()) -> None:
        self._process = subprocess.Popen(
            [*wrapper, python, str(FOLDER / program), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.pid = self._process.pid

    def line(self) -> str:
        """The next line that it prints; waits for it."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode()
        assert line, f"the program ended with {self._process.wait()}"
        return line

    def tell(self, text: str = "\n") -> None:
        """Writes a line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode())
        self._process.stdin.flush()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
