"""Warnings of libraries and tracebacks go to a file, never to the terminal."""

from __future__ import annotations

import logging
import os
import stat
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from argus.system import debug


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name, value in (("_log", None), ("_path", None), ("_bytes", 0), ("counters", Counter())):
        monkeypatch.setattr(debug, name, value)
    for module, name in (
        (warnings, "showwarning"),
        (threading, "excepthook"),
        (sys, "unraisablehook"),
        (logging, "lastResort"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))
    yield tmp_path / "argus"
    if debug._log is not None:
        debug._log.close()


def make_noise() -> None:
    warnings.warn("All-NaN slice encountered", RuntimeWarning, stacklevel=1)

    def fails() -> None:
        raise ZeroDivisionError("in a thread")

    thread = threading.Thread(target=fails, name="noisy")
    thread.start()
    thread.join()
    # Not through a logger: pytest gives each a handler.
    record = {
        "name": "a.library",
        "levelno": logging.WARNING,
        "levelname": "WARNING",
        "msg": "connection %d lost",
        "args": (3,),
    }
    assert logging.lastResort is not None
    logging.lastResort.handle(logging.makeLogRecord(record))


@pytest.mark.filterwarnings("default")
def test_without_a_log_warnings_are_counted(logs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    debug.capture()
    debug.capture_logging()
    debug.note("nowhere")
    make_noise()
    assert capfd.readouterr() == ("", "")
    assert debug.counters == {"warnings": 2, "thread_failures": 1}
    assert not logs.exists()


@pytest.mark.filterwarnings("default")
def test_with_a_log_they_are_in_it(logs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = debug.begin()
    assert path is not None
    assert path == debug.path() == debug.begin()
    assert (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(logs.stat().st_mode)) == (0o600, 0o700)
    debug.capture()
    debug.capture_logging()
    make_noise()
    text = path.read_text()
    assert "RuntimeWarning: All-NaN slice encountered" in text
    assert "thread noisy failed\n    Traceback" in text
    assert "ZeroDivisionError: in a thread" in text
    assert "warning of a.library: connection 3 lost" in text
    assert capfd.readouterr() == ("", "")


EVIL = "evil\x1b]0;owned\x07\u202e\n1.000 1.000 forged"


@pytest.mark.parametrize("has_log", [True, False])
def test_names_of_others_are_text_and_begin_no_line(logs: Path, monkeypatch: pytest.MonkeyPatch, has_log: bool) -> None:
    monkeypatch.setattr(sys, "argv", ["argus", EVIL])
    if has_log:
        debug.begin()
        debug.capture()
        debug.note(f"diagnosis: {EVIL}: 1 findings")
        thread = threading.Thread(target=int, args=(EVIL,), name=EVIL)
        thread.start()
        thread.join()
    path = debug.crash(ValueError(EVIL))
    assert path is not None
    text = path.read_text()
    assert text.count("forged") == (5 if has_log else 2)
    assert all(char.isprintable() or char == "\n" for char in text)
    assert not [line for line in text.splitlines() if line.startswith("1.000")]


def test_a_log_is_bounded(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug, "MAX_BYTES", 1000)
    path = debug.begin()
    assert path is not None
    for _ in range(100):
        debug.note("x" * 100)
    assert path.stat().st_size < 1400
    assert debug.counters["log_dropped"] > 80


def test_the_newest_logs_are_kept(logs: Path) -> None:
    logs.mkdir(mode=0o700)
    for number in range(debug.KEPT + 5):
        (logs / f"old-{number}.log").touch()
        os.utime(logs / f"old-{number}.log", (number, number))
    (logs / "sql_history").touch()
    path = debug.crash(ValueError("once"))
    assert path is not None
    assert "ValueError: once" in path.read_text()
    left = set(logs.glob("*.log"))
    assert len(left) == debug.KEPT
    assert path in left
    assert logs / "old-5.log" not in left
    assert (logs / "sql_history").exists()


def test_nothing_is_written_where_others_could_put_a_link(logs: Path) -> None:
    logs.mkdir()
    logs.chmod(0o777)
    assert debug.crash(ValueError()) is None
    assert debug.begin() is None
    assert "cannot be written" in debug.traceback_of(ValueError())
    assert list(logs.iterdir()) == []


@pytest.mark.parametrize(
    ("uid", "home", "place"), [(0, "", "/var/log/argus"), (7, "", "/h/.local/state/argus"), (0, "/s", "/s/argus")]
)
def test_where_logs_are(uid: int, home: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.setenv("XDG_STATE_HOME", home)
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert debug.folder() == Path(place)


@pytest.mark.parametrize(("value", "wanted"), [("1", True), ("yes", True), ("0", False), ("", False), ("off", False)])
def test_the_environment_asks_for_a_log(value: str, wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARGUS_DEBUG", value)
    assert debug.wanted() is wanted
