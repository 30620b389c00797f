"""``argus serve`` as a process of a test, and questions to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ARGUS = str(Path(sys.executable).parent / "argus")
WITHIN_S = 90


class Server:
    """The verb, serving a store.

    Args:
        store: Its URL.
        words: Options.
        program: Python code that runs the verb; empty: ``argus`` does.
    """

    def __init__(self, store: str, *words: str, program: str = "") -> None:
        start = [sys.executable, "-c", program] if program else [ARGUS]
        self.process = subprocess.Popen(
            [*start, "serve", "--store", store, "--listen", "127.0.0.1:0", *words],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        address, _, self.token = self.line.split(" at ")[1].strip().partition("#token=")
        self.port = int(address.rstrip("/").rpartition(":")[2])

    def ask(self, path: str, **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WITHIN_S)
        with contextlib.closing(connection):
            connection.request("GET", path, headers={"Authorization": f"Bearer {self.token}", **headers})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def json(self, path: str) -> Any:
        status, content = self.ask(path)
        assert status == 200, content
        return json.loads(content)

    def end(self, number: int = signal.SIGINT) -> tuple[int, str]:
        self.process.send_signal(number)
        rest = self.process.communicate(timeout=WITHIN_S)[0]
        return self.process.returncode, rest
