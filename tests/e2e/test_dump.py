"""What ``argus dump`` says of processes that it sees only in part."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from argus.capture.process.targets import Identity
from argus.capture.python.interpreter import Interpreter
from argus.capture.reader.remote import RemoteSymbols
from argus.cli.dump import _grouped, command
from argus.live.dump import ThreadStack
from argus.model.errors import ArgusError
from argus.model.stacks import Frame, Stack

pytestmark = pytest.mark.core


def test_why_python_frames_are_missing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native frames alone look like a program without Python."""
    if os.geteuid():
        pytest.skip("reading another process's stack needs root")
    refused = Interpreter((3, 14, 0), "off: free-threaded CPython 3.14 is not supported", None, "/bin/python3.14t")
    sleep = subprocess.Popen(["sleep", "1000"])
    try:
        deadline = time.monotonic() + 20
        while not os.readlink(f"/proc/{sleep.pid}/exe").endswith(("sleep", "coreutils", "busybox")):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        words = ["--pid", str(sleep.pid)]
        output = "Python frames are off: free-threaded CPython 3.14 is not supported"
        assert "Python frames are" not in CliRunner().invoke(command, words).output
        monkeypatch.setattr(RemoteSymbols, "find_python", lambda _: refused)
        assert f"process {sleep.pid}: {output}" in CliRunner().invoke(command, words).output.splitlines()
        assert f'"note": "{output}"' in CliRunner().invoke(command, [*words, "--format", "json"]).output
    finally:
        sleep.kill()
        sleep.wait()


def test_a_rank_that_died_hides_none_of_the_others() -> None:
    """Its launcher has not looked after it yet: of such a process there is nothing but its number."""
    if os.geteuid():
        pytest.skip("reading another process's stack needs root")
    script = "import subprocess, time; p = subprocess.Popen(['true']); print(p.pid, flush=True); time.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as launcher:
        try:
            assert launcher.stdout is not None
            dead = int(launcher.stdout.readline())
            deadline = time.monotonic() + 60
            while Path(f"/proc/{dead}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                assert time.monotonic() < deadline
                time.sleep(0.005)
            all_of_them = CliRunner().invoke(command, ["--pid", str(launcher.pid), "--children", "--format", "json"])
            threads = {thread["tid"]: thread for thread in json.loads(all_of_them.output)["threads"]}
            assert threads[launcher.pid]["frames"]
            assert (threads[dead]["state"], threads[dead]["frames"]) == ("unknown", [])
            assert threads[dead]["note"] == f"process {dead} has ended and waits for its parent (zombie)"
            alone = CliRunner().invoke(command, ["--pid", str(dead)])
            assert isinstance(alone.exception, ArgusError)
            assert (alone.exception.message, alone.exception.exit_code) == (threads[dead]["note"], 3)
        finally:
            launcher.kill()


def test_the_number_of_a_thread_is_no_process() -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        tid = thread.native_id
        with pytest.raises(ArgusError, match=f"{tid} is a thread of process {os.getpid()}"):
            CliRunner().invoke(command, ["--pid", str(tid)], catch_exceptions=False)
    finally:
        ended.set()
        thread.join()


def test_a_launcher_is_no_rank_of_minus_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Threads of a launcher (process 10) with two ranks (11, 12), and of a program without a rank (13)."""
    ranks, parents = {10: -1, 11: 0, 12: 1, 13: -1}, {10: 1, 11: 10, 12: 10, 13: 1}
    monkeypatch.setattr("argus.cli.dump.identity_of", lambda pid: Identity(ranks[pid], -1, 2, "job", "torchrun"))
    monkeypatch.setattr("argus.cli.dump.parent_of", parents.__getitem__)
    places = {10: "wait", 11: "step", 12: "step", 13: "read"}
    threads = [
        ThreadStack(pid, pid, "python", "waiting", "futex", stack=Stack((Frame("python", name),), "complete", "leaf"))
        for pid, name in places.items()
    ]
    _grouped(Console(width=200), threads)
    assert [line for line in capsys.readouterr().out.splitlines() if not line.startswith("   ")] == [
        "main: 2 threads of 2 processes",
        "  rank 0,1 (process 11, 12): waits: futex",
        "main of the launcher: 1 thread of 1 process",
        "  process 10: waits: futex",
        "main without a rank: 1 thread of 1 process",
        "  process 13: waits: futex",
    ]
