"""``argus``, and other programs, in processes forked from one that has imported what they need: starting Python and
importing all that a verb needs takes up to 0.6 s of CPU time.

Such a process has descriptors, an environment, a folder and an exit code of its own, and runs what a shell's would from
the first line of ``main`` on. What happens before that, how much memory a process has, and what the dynamic linker
takes from the environment, it cannot show.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


ARGUS_IMPORTS = "from tests.forked import import_argus; import_argus()"
ARGUS_MAIN = """
import sys
from argus.cli import interrupt, main
sys.argv[0] = main.__file__
interrupt.quit_at_once()
sys.exit(main.main())
"""


def argus(
    *words: str, env: Mapping[str, str] | None = None, timeout: float = 280, stdout: int | None = None
) -> subprocess.CompletedProcess[str]:
    """What ``argus WORDS`` printed, and its exit code; see ``python``."""
    return _text(python(ARGUS_IMPORTS, ARGUS_MAIN, *words, env=env, timeout=timeout, stdout=stdout))


def argus_bytes(*words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    """The same as bytes."""
    return python(ARGUS_IMPORTS, ARGUS_MAIN, *words, env=env)


def script(imports: str, code: str, env: Mapping[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    """What a program printed, and its exit code; see ``python``."""
    return _text(python(imports, code, env=env, timeout=timeout))


def python(
    imports: str,
    code: str,
    *words: str,
    env: Mapping[str, str] | None = None,
    timeout: float = 280,
    stdout: int | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Runs a program, and returns what ``subprocess.run`` would.

    Args:
        imports: Code that was run before, once, in the process that all with these imports are forked from.
        code: The program.
        words: Its arguments.
        env: Its environment; None: that of the tests.
        timeout: In seconds.
        stdout: A descriptor that it prints to; None: what it prints is returned.
    """
    server = _server(imports)
    (out, out_end), (err, err_end) = os.pipe(), os.pipe()
    with open(os.devnull, "rb") as nothing, _closed(out, err):
        with _closed(out_end, err_end):
            environment = dict(os.environ if env is None else env)
            given = {"code": code, "words": words, "env": environment, "folder": os.getcwd()}
            fds = [nothing.fileno(), out_end if stdout is None else stdout, err_end]
            socket.send_fds(server, [json.dumps(given).encode()], fds)
        pid = int(server.recv(99))
        try:
            texts = _read([out, err], time.monotonic() + timeout)
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            server.recv(99)
            raise subprocess.TimeoutExpired(list(words), timeout) from None
        return subprocess.CompletedProcess(list(words), int(server.recv(99)), *texts)


def _text(done: subprocess.CompletedProcess[bytes]) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


@contextlib.contextmanager
def _closed(*fds: int) -> Iterator[None]:
    try:
        yield
    finally:
        for fd in fds:
            os.close(fd)


def _read(fds: list[int], until: float) -> list[bytes]:
    """What comes of each, to its end."""
    texts = dict.fromkeys(fds, b"")
    with selectors.DefaultSelector() as selector:
        for fd in fds:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(until - time.monotonic(), 0))
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                part = os.read(key.fd, 1 << 20)
                texts[key.fd] += part
                if not part:
                    selector.unregister(key.fd)
    return [texts[fd] for fd in fds]


@functools.cache
def _server(imports: str) -> socket.socket:
    """Which ends with this process."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with there:
        subprocess.Popen(
            [sys.executable, "-m", "tests.forked", str(there.fileno()), imports], pass_fds=[there.fileno()], cwd=ROOT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    return here


def import_argus() -> None:
    """All verbs, and what they import later."""
    import importlib

    from argus.cli.main import MODULES, VERBS
    from argus.store.open import _import_driver
    from argus.system.lean import hide_pandas

    hide_pandas()
    for verb in VERBS:
        importlib.import_module(f"argus.cli.{MODULES.get(verb, verb)}")
    _import_driver()


def _serve(client: socket.socket) -> dict[str, Any]:
    """Returns in a new process for each program, with what was given."""
    while True:
        message, fds, *_ = socket.recv_fds(client, 1 << 20, 3)
        if not message:
            os._exit(0)
        if pid := os.fork():
            for fd in fds:
                os.close(fd)
            client.send(str(pid).encode())
            client.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
            continue
        client.close()
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
            os.close(fd)
        given: dict[str, Any] = json.loads(message)
        os.environ.clear()
        os.environ.update(given["env"])
        os.chdir(given["folder"])
        return given


def _own_streams() -> None:
    """As the interpreter makes them when it starts."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        buffering = 1 if name == "stderr" else -1
        new = open(number, "w" if number else "r", buffering, old.encoding, old.errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


if __name__ == "__main__":
    exec(sys.argv[2], {"__name__": "imports"})
    gc.freeze()  # no process goes through what all have
    asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    _own_streams()
    sys.argv = ["", *asked["words"]]
    exec(compile(asked["code"], "<string>", "exec"), {"__name__": "__main__"})
