"""What a Ctrl-C does, by how far a trace is. No process and no clock: signals are calls, timers are kept."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from argus.cli import interrupt
from argus.cli.interrupt import Stopping


class Left(BaseException):
    """Stands in for the end of the process."""


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Timers that were set: seconds, action, and whether it was cancelled."""
    made: list[Any] = []

    def in_a_while(seconds: float, action: Callable[[], None]) -> Any:
        timer = SimpleNamespace(seconds=seconds, action=action, cancelled=False)
        timer.cancel = lambda: setattr(timer, "cancelled", True)
        made.append(timer)
        return timer

    def leave(code: int = interrupt.INTERRUPTED) -> None:
        raise Left(code)

    monkeypatch.setattr(interrupt, "in_a_while", in_a_while)
    monkeypatch.setattr(interrupt, "leave", leave)
    monkeypatch.setattr(interrupt, "came", False)
    monkeypatch.setattr(interrupt, "announced", False)
    return made


def test_while_it_attaches_one_ends_the_trace(timers: list[Any], capfd: pytest.CaptureFixture[str]) -> None:
    stop = Stopping()
    with pytest.raises(KeyboardInterrupt):
        stop.note(signal.SIGINT, None)
    assert capfd.readouterr().err == "argus: stopped before the trace began; nothing was stored\n"
    assert interrupt.came
    assert [timer.seconds for timer in timers] == [interrupt.GRACE_S]
    with pytest.raises(Left):
        timers[0].action()
    with pytest.raises(Left):
        stop.note(signal.SIGINT, None)
    stop.close()


def test_then_the_first_is_noted_and_wakes_who_waits(timers: list[Any]) -> None:
    output: list[str] = []
    stop = Stopping(feedback=lambda: output.append("storing"))
    stop.attached()
    assert not stop
    stop.wait(0.0)
    stop.note(signal.SIGTERM, None)
    assert stop == [signal.SIGTERM]
    stop.wait(3600.0)  # over at once
    assert not interrupt.came, "it goes on in good order"
    (timer,) = timers
    assert timer.seconds <= 0.5
    stop.storing()
    assert timer.cancelled
    timer.action()  # it was under way
    assert output == ["storing"], "once"
    stop.close()


def test_feedback_comes_though_the_trace_is_busy(timers: list[Any]) -> None:
    output: list[str] = []
    stop = Stopping(feedback=lambda: output.append("storing"))
    stop.attached()
    stop.note(signal.SIGINT, None)
    timers[0].action()
    stop.storing()
    assert output == ["storing"]
    stop.close()


@pytest.mark.parametrize("slow", [False, True])
def test_the_second_gives_up(timers: list[Any], capfd: pytest.CaptureFixture[str], slow: bool) -> None:
    stop = Stopping(give_up=lambda: "argus: given up: 3 rows wait")
    stop.attached()
    stop.note(signal.SIGINT, None)
    stop.note(signal.SIGINT, None)
    at_once, at_last = timers[1:]
    assert (at_once.seconds, at_last.seconds) == (0.0, interrupt.GRACE_S)
    with pytest.raises(Left):
        (at_last if slow else at_once).action()
    with pytest.raises(Left):
        (at_once if slow else at_last).action()
    text = interrupt.GIVEN_UP if slow else "argus: given up: 3 rows wait"
    assert capfd.readouterr().err == text + "\n", "one line"
    stop.note(signal.SIGINT, None)
    assert len(timers) == 3, "a third changes nothing"
    stop.close()


def test_what_saves_rows_may_fail(timers: list[Any], capfd: pytest.CaptureFixture[str]) -> None:
    def fails() -> str:
        raise OSError("no")

    stop = Stopping(give_up=fails)
    stop.attached()
    for _ in range(2):
        stop.note(signal.SIGINT, None)
    with pytest.raises(Left):
        timers[1].action()
    assert capfd.readouterr().err == interrupt.GIVEN_UP + "\n"
    stop.close()


def test_a_verb_is_interrupted_once_and_then_ended(timers: list[Any]) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupt._interrupt(signal.SIGINT, None)
    assert [timer.seconds for timer in timers] == [interrupt.GRACE_S]
    with pytest.raises(Left):
        interrupt._interrupt(signal.SIGINT, None)


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """The process's handlers, none of them real."""
    found: dict[int, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGTERM: signal.SIG_DFL,
    }

    def set_handler(number: int, handler: Any) -> Any:
        before, found[number] = found[number], handler
        return before

    monkeypatch.setattr(interrupt.signal, "getsignal", found.__getitem__)
    monkeypatch.setattr(interrupt.signal, "signal", set_handler)
    return found


def test_only_a_process_of_argus_s_own_is_interrupted_so(handlers: dict[int, Any]) -> None:
    interrupt.interrupt_verbs()
    assert handlers[signal.SIGINT] is signal.default_int_handler, "main() called by a program: it keeps its handler"
    interrupt.quit_at_once()
    interrupt.interrupt_verbs()
    assert handlers[signal.SIGINT] is interrupt._interrupt
    interrupt.interrupt_plainly()
    assert handlers[signal.SIGINT] is signal.default_int_handler


def test_what_the_shell_ignores_stays_ignored(handlers: dict[int, Any]) -> None:
    handlers[signal.SIGINT] = handlers[signal.SIGHUP] = signal.SIG_IGN
    interrupt.quit_at_once()
    interrupt.interrupt_verbs()
    assert handlers[signal.SIGINT] is signal.SIG_IGN
    with interrupt.stopping() as stop:
        assert handlers[signal.SIGHUP] is signal.SIG_IGN, "nohup argus trace"
        assert handlers[signal.SIGINT] == stop.note, "a trace in a script's background is ended by kill -INT"
        assert handlers[signal.SIGTERM] == stop.note
    assert handlers[signal.SIGINT] is signal.SIG_IGN
    assert handlers[signal.SIGTERM] is signal.SIG_DFL


def test_the_terminal_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(interrupt.os, "_exit", done.append)
    monkeypatch.setattr(interrupt.os, "isatty", lambda fd: fd == 2)
    monkeypatch.setattr(interrupt.os, "write", lambda fd, text: done.append((fd, text)) or len(text))
    monkeypatch.setattr(interrupt, "restore", lambda: done.append("restored"))
    interrupt.leave()
    assert done == ["restored", (2, b"\x1b[?25h"), 130]
    assert os.isatty is not None
