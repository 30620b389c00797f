"""Small real programs that the tests look into."""

from __future__ import annotations

import subprocess
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


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

    def send(self, text: str = "\n") -> None:
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
