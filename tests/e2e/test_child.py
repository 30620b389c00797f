"""Questions to a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from argus.system import child, secrets

SERVES = "from argus.system import child\nraise SystemExit(child.serve({}))"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Makes one of this text."""

    def make(text: str) -> str:
        (tmp_path / "asked.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return "asked"

    return make


def test_an_answer_comes_back(module: Callable[[str], str]) -> None:
    name = module(SERVES.format("lambda request: [request['a'] + 1, 'ü']"))
    assert child.ask(name, {"a": 1}, 20) == [2, "ü"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SERVES.format("lambda request: request['b']"), "KeyError: 'b'"),
        ("import sys; print('no JSON')", "ended with 0"),
        ("import os; os._exit(7)", "ended with 7"),
        ("raise ImportError('of what it needs')", "of what it needs"),
    ],
)
def test_a_failure_is_what_it_says(module: Callable[[str], str], text: str, message: str) -> None:
    with pytest.raises(child.ChildError, match=message):
        child.ask(module(text), {"a": 1}, 20)


def test_the_password_of_the_store_is_not_its(module: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (secrets.VARIABLE, f"{secrets.VARIABLE}_FILE"):
        monkeypatch.setenv(name, "secret")
    name = module("import os\n" + SERVES.format("lambda request: dict(os.environ)"))
    found = child.ask(name, {}, 20)
    assert "PATH" in found
    assert "secret" not in found.values()


def test_it_may_not_take_longer(module: Callable[[str], str]) -> None:
    with pytest.raises(child.ChildError, match=r"did not end within 500 ms"):
        child.ask(module("import time; time.sleep(60)"), {}, 0.5)


def test_it_ends_with_who_asks(module: Callable[[str], str], tmp_path: Path) -> None:
    busy = "import os, time; open(request['file'], 'w').write(str(os.getpid())) and time.sleep(60)"
    name = module(f"def answer(request):\n    {busy}\n{SERVES.format('answer')}")
    file = tmp_path / "pid"
    asking = f"from argus.system import child; child.ask({name!r}, {json.dumps({'file': str(file)})}, 60)"
    with subprocess.Popen([sys.executable, "-c", asking]) as asker:
        deadline = time.monotonic() + 60
        while not (file.exists() and file.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        asker.kill()
    ended = Path("/proc", file.read_text())
    while ended.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not ended.exists()
