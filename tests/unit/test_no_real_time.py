"""Unit tests take no real time and start nothing that a busy machine could delay."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CLOCKS = {
    "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "process_time_ns", "thread_time",
    "time", "time_ns", "clock_gettime", "clock_gettime_ns", "sleep",
}  # fmt: skip
PROCESSES = {("subprocess", "Popen"), ("os", "fork"), ("os", "forkpty"), ("os", "posix_spawn"), ("pty", "fork")}
TIMERS = {("threading", "Timer")}


def forbidden(text: str) -> list[str]:
    """What a test's text calls that depends on how fast the machine is, by line."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            if isinstance(node, ast.ImportFrom) and node.module in ("time", "subprocess"):
                found.append(f"{node.lineno}: from {node.module} import …")
            continue
        called = node.func
        if not isinstance(called, ast.Attribute) or not isinstance(called.value, ast.Name):
            continue
        name = (called.value.id, called.attr)
        if (name[0] == "time" and name[1] in CLOCKS) or name in PROCESSES | TIMERS:
            found.append(f"{node.lineno}: {'.'.join(name)}()")
        if name[0] == "subprocess" and any(word.arg == "timeout" for word in node.keywords):
            found.append(f"{node.lineno}: {'.'.join(name)}(timeout=…)")
    return found


FILES = sorted(path for path in HERE.rglob("*.py") if path.name not in ("conftest.py", Path(__file__).name))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_unit_tests_take_no_real_time(path: Path) -> None:
    assert forbidden(path.read_text()) == [], "pass the time in, or move the test to tests/e2e"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import time\ntime.sleep(1)", ["2: time.sleep()"]),
        ("began = time.perf_counter()", ["1: time.perf_counter()"]),
        ("with subprocess.Popen(['sleep', '9']) as it: ...", ["1: subprocess.Popen()"]),
        ("subprocess.run(words, timeout=9)", ["1: subprocess.run(timeout=…)"]),
        ("from time import sleep", ["1: from time import …"]),
        ("os.fork()", ["1: os.fork()"]),
        ("subprocess.run(['gcc', source])\nmonkeypatch.setattr(time, 'time', clock)", []),
    ],
)
def test_what_is_found(text: str, found: list[str]) -> None:
    assert forbidden(text) == found
