#!/usr/bin/env python3
"""Starts the ranks of a job on the fake GPU, and never leaves one behind.

    run.py --ranks 4 --env FAKEGPU_SLOW_RANK=2 -- --steps 100

prints ``{"pids": [...]}``, passes SIGTERM and SIGINT on, and ends all ranks when one fails. In tests:

    with Job(ranks=4, args=["--steps", "100"], env={"FAKEGPU_SLOW_RANK": "2"}) as job:
        trace(job.pids)
        assert job.wait(30) == [0, 0, 0, 0]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).resolve().parent
BUILD = Path(os.environ.get("FAKEGPU_BUILD") or HERE.parent.parent / "build" / "fakegpu")
PROGRAM = BUILD / "fake_train"
PR_SET_PDEATHSIG = 1
GRACE_S = 10.0

_libc = ctypes.CDLL(None, use_errno=True)


def build(directory: Path = BUILD) -> Path:
    """Builds the libraries and programs where needed and returns their folder."""
    subprocess.run(["make", "-s", "-C", str(HERE), f"BUILD={directory}"], check=True, stdout=subprocess.DEVNULL)
    return directory


def armed(injection: str | os.PathLike[str] | None = None) -> dict[str, str]:
    """What a process needs in its environment to find the fake libcupti and load an injection library (Argus's)."""
    if injection is None:
        sys.path.insert(0, str(HERE.parent.parent))
        try:
            from argus.cupti import build as helper
        finally:
            sys.path.pop(0)
        injection = helper.library()
    paths = [str(BUILD), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {"CUDA_INJECTION64_PATH": os.fspath(injection), "LD_LIBRARY_PATH": os.pathsep.join(paths)}


def ops_log(path: str | os.PathLike[str], pid: int) -> tuple[Any, list[str]]:
    """What ran in a process that was started with ``FAKEGPU_OPS_LOG=path`` and has ended by itself.

    Returns:
        A structured numpy array, one row an operation, in order within a stream; times are CLOCK_MONOTONIC. And the
        names: ``name`` counts from 1, 0 is none.
    """
    import numpy as np

    fields = [(field, "<i8") for field in ("called_ns", "start_ns", "transfer_ns", "end_ns")]
    fields += [(field, "<u8") for field in ("correlation", "bytes")]
    fields += [(f, "<u4") for f in ("kind", "copy", "device", "stream", "name", "graph", "graph_node", "unused")]
    log = f"{os.fspath(path)}.{pid}"
    return np.fromfile(log, dtype=fields), Path(f"{log}.names").read_text().splitlines()


class Job:
    """A running job; its ranks start at once and are ended when the ``with`` block is left.

    Args:
        ranks: How many processes to start.
        args: The program's arguments.
        env: More environment variables; a value of ``None`` removes one.
        program: What to run; ``fake_train`` by default.
        rank_env: More environment variables for single ranks.
        stdout, stderr: As for ``subprocess.Popen``.
        cupti: The fake libcupti is the one that is found, and CUDA loads Argus's helper; or this injection library.
    """

    def __init__(
        self,
        ranks: int,
        args: Sequence[str] = (),
        env: Mapping[str, str | None] | None = None,
        program: str | os.PathLike[str] | None = None,
        rank_env: Mapping[int, Mapping[str, str]] | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        cupti: bool | str | os.PathLike[str] = False,
    ) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="fakegpu-"))
        self.processes: list[subprocess.Popen[bytes]] = []
        parent = os.getpid()

        def die_with_parent() -> None:
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

        base = dict(os.environ)
        base.update(
            WORLD_SIZE=str(ranks),
            LOCAL_WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(20000 + parent % 20000),
            FAKEGPU_RENDEZVOUS=str(self.directory / "rendezvous"),
        )
        if cupti:
            base.update(armed(None if cupti is True else cupti))
        for key, value in (env or {}).items():
            if value is None:
                base.pop(key, None)
            else:
                base[key] = value
        try:
            for rank in range(ranks):
                own = dict(base, RANK=str(rank), LOCAL_RANK=str(rank), **(rank_env or {}).get(rank, {}))
                self.processes.append(
                    subprocess.Popen(
                        [os.fspath(program or PROGRAM), *args],
                        env=own,
                        stdin=subprocess.DEVNULL,
                        stdout=stdout,
                        stderr=stderr,
                        preexec_fn=die_with_parent,
                    )
                )
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def poll(self) -> list[int | None]:
        """The exit status of each rank, None for one that runs; a negative one is the signal that ended it."""
        return [process.poll() for process in self.processes]

    def wait(self, timeout: float | None = None) -> list[int]:
        """Waits for all ranks; raises ``subprocess.TimeoutExpired`` when that takes too long."""
        until = None if timeout is None else time.monotonic() + timeout
        return [
            process.wait(None if until is None else max(0.0, until - time.monotonic())) for process in self.processes
        ]

    def send_signal(self, number: int) -> None:
        for process in self.processes:
            process.send_signal(number)

    def terminate(self, grace: float = GRACE_S) -> list[int]:
        """Asks all ranks to stop after their step, kills those that do not, and returns all exit statuses."""
        self.send_signal(signal.SIGTERM)
        try:
            return self.wait(grace)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> list[int]:
        for process in self.processes:
            process.kill()
        return [process.wait() for process in self.processes]

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Run a job on the fake GPU.", epilog="Arguments after -- go to the program."
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--env", action="append", default=[], metavar="K=V", help="set a variable in every rank")
    parser.add_argument("--program", help="what to run (fake_train)")
    parser.add_argument("--cupti", action="store_true", help="with the fake libcupti, and Argus's helper injected")
    parser.add_argument("--keep", action="store_true", help="let the others go on when a rank fails")
    own, theirs = sys.argv[1:], []
    if "--" in own:
        own, theirs = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parser.parse_args(own)
    if any("=" not in pair for pair in options.env):
        parser.error("--env wants K=V")

    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda caught, _frame: stopping.append(caught))
    env = dict(pair.split("=", 1) for pair in options.env)
    with Job(options.ranks, theirs, env, program=options.program, cupti=options.cupti) as job:
        print(json.dumps({"pids": job.pids}), flush=True)
        while None in (statuses := job.poll()):
            if stopping:
                statuses = list(job.terminate())
                break
            if not options.keep and any(statuses):
                statuses = list(job.terminate(grace=1.0))
                break
            time.sleep(0.05)
    failed = next((status for status in statuses if status), 0)
    return 128 - failed if failed < 0 else failed


if __name__ == "__main__":
    sys.exit(main())
