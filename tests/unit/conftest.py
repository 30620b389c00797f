"""Unit tests may not sleep, fork or start processes: what finds it at run time. ``test_no_real_time.py`` reads them."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
WAITED_FOR = {
    Path(ctypes.util.__file__),  # runs ldconfig, as cupti-python is imported
    ROOT / "argus" / "capture" / "process" / "demangler.py",
    *(ROOT / "argus" / "store").glob("*.py"),
    *(ROOT / "tests" / name for name in ("stores.py", "clickhouse_server.py", "tls_front.py")),
}
"""A store is a process, and large C++ names are demangled in one. Who asks waits for the answer; who copies a store,
until it has ended."""


def _outside(depth: int) -> Path:
    """The file that called what stands in for a function of the standard library."""
    return Path(sys._getframe(depth).f_code.co_filename)


@pytest.fixture(autouse=True)
def _no_real_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test that sleeps, forks, or starts a process that it does not simply wait for."""
    started, slept = subprocess.Popen.__init__, time.sleep
    process = os.getpid()

    def start(self: Any, *arguments: Any, **options: Any) -> None:
        caller = _outside(2)
        if os.getpid() == process and caller not in WAITED_FOR | {Path(subprocess.__file__)}:
            pytest.fail(f"{caller} starts a process: such tests are in tests/e2e")
        started(self, *arguments, **options)

    def sleep(seconds: float) -> None:
        caller = _outside(2)
        ours = caller.is_relative_to(ROOT) and not caller.is_relative_to(ROOT / ".venv")
        if os.getpid() == process and ours and caller not in WAITED_FOR:
            pytest.fail(f"{caller} sleeps for {seconds} s: pass the time in, or move the test to tests/e2e")
        slept(seconds)

    def fork() -> int:
        pytest.fail("a unit test forks: such tests are in tests/e2e")

    monkeypatch.setattr(subprocess.Popen, "__init__", start)
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(os, "fork", fork)
