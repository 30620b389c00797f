"""What ``argus dump`` says of processes that it sees only in part."""

from __future__ import annotations

import os
import subprocess
import time

import pytest
from click.testing import CliRunner

from argus.capture.python import Interpreter
from argus.cli.dump import command


def test_why_python_frames_are_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
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
        said = "Python frames are off: free-threaded CPython 3.14 is not supported"
        assert "Python frames are" not in CliRunner().invoke(command, words).output
        monkeypatch.setattr("argus.dump.find_interpreter", lambda pid: refused)
        assert f"process {sleep.pid}: {said}" in CliRunner().invoke(command, words).output.splitlines()
        assert f'"note": "{said}"' in CliRunner().invoke(command, [*words, "--format", "json"]).output
    finally:
        sleep.kill()
        sleep.wait()
