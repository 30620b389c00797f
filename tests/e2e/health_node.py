"""``argus health`` as a program, on a node whose /proc, /sys and plug-ins a test made.

Most runs are forks of one process that has everything loaded: to start an interpreter and load it costs more than a
run, and there are hundreds. ``start`` starts the real program.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAIN = "import sys; from argus.cli.main import main; sys.exit(main())"

SERVER = """
import json, os, sys
from argus.cli.main import main
import argus.cli.health
from argus.health import config
config.builtin()
if len(sys.argv) > 1:
    import pyroute2
for line in sys.stdin:
    words, environment, folder = json.loads(line)
    if os.fork() == 0:
        os.environ.clear()
        os.environ.update(environment)
        for descriptor, name in ((0, os.devnull), (1, folder + "/stdout"), (2, folder + "/stderr")):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), descriptor)
        code = main(words)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""
AT_START = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH")
"""What a process reads when it is started only."""


class Server:
    """Runs ``argus`` in forks of itself, as many as are asked for, one by one."""

    running: dict[tuple[str, ...], Server] = {}  # noqa: RUF012 - by how they are started

    def __init__(self, before: list[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [*before, sys.executable, "-c", SERVER, *before],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        weakref.finalize(self, self._process.kill)

    @classmethod
    def of(cls, before: list[str], environment: dict[str, str]) -> Server:
        key = (*before, "", *(environment.get(name, "") for name in AT_START))
        if key not in cls.running:
            cls.running[key] = cls(before, environment)
        return cls.running[key]

    def run(self, words: list[str], environment: dict[str, str], folder: Path) -> tuple[int, str, str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([words, environment, str(folder)]) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        return code, *((folder / name).read_text() for name in ("stdout", "stderr"))  # type: ignore[return-value]

    def end(self) -> None:
        with contextlib.suppress(KeyError):
            self.running.pop(next(key for key, server in self.running.items() if server is self))
        self._process.kill()
        self._process.wait()


@dataclass
class Node:
    """A node below ``folder``: ``root`` has its /proc and /sys, ``plugins`` its executables."""

    folder: Path

    def __post_init__(self) -> None:
        self.settings: dict[str, Any] = {
            "state_dir": str(self.folder / "state"),
            "plugins": str(self.folder / "plugins"),
        }
        self.limits: dict[str, dict[str, Any]] = {}
        self.environment: dict[str, str] = {}
        self.before: list[str] = []
        (self.folder / "plugins").mkdir(exist_ok=True)

    def file(self, path: str, text: str) -> None:
        """Puts a file such as ``proc/stat`` there, and makes the checks look below the root that has it."""
        self.settings["root"] = str(self.folder / "root")
        where = self.folder / "root" / path
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(text)

    def plugin(self, name: str, text: str) -> None:
        """Makes an executable."""
        where = self.folder / "plugins" / name
        where.write_text(f"#!/bin/sh\n{text}\n")
        where.chmod(0o755)

    def command(self, *words: str) -> list[str]:
        """What ``argus health`` is as a command line."""
        lines = [f"{key} = {json.dumps(value)}" for key, value in self.settings.items()]
        for check, limits in self.limits.items():
            lines += [f"[{check}]", *(f"{key} = {json.dumps(value)}" for key, value in limits.items())]
        (self.folder / "health.toml").write_text("\n".join(lines) + "\n")
        program = [sys.executable, "-c", MAIN, "health", "--config", str(self.folder / "health.toml")]
        return [*self.before, *program, *words]

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "ARGUS_SPILL_DIR": str(self.folder / "spill"), **self.environment}

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Starts it."""
        return subprocess.Popen(
            self.command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self._environment()
        )

    def health(self, *words: str, store: str = "") -> tuple[int, str, str]:
        """Runs it; returns exit code, output, error output."""
        words = (*words, *(["--store", store] if store else ["--no-store"]))
        if self.before[:1] in ([], ["ip"]):
            server = Server.of(self.before, self._environment())
            arguments = self.command(*words)[len(self.before) + 3 :]
            code, output, errors = server.run(arguments, self._environment(), self.folder)
        else:
            process = self.start(*words)
            output, errors = process.communicate(timeout=120)
            code = process.returncode
        assert "Traceback" not in errors
        return code, output, errors

    def check(self, name: str) -> tuple[str, str]:
        """Runs one check; returns its status and text. The exit code must fit."""
        code, output, errors = self.health("--only", name, "--format", "json")
        assert output, errors
        result = json.loads(output)["results"][0]
        expected = {"ok": 0, "warning": 1, "critical": 2, "unknown": 3, "absent": 3}[result["status"]]
        assert code == expected, (code, result)
        return result["status"], result["text"]
