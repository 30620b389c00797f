"""Work beside the main thread."""

from __future__ import annotations

import threading

import pytest

from argus.system.aside import Aside


def test_its_result_comes_when_asked_for() -> None:
    go_on = threading.Event()

    def work() -> int:
        go_on.wait()
        return 7

    aside = Aside(work, "test")
    assert not aside.wait(0)
    go_on.set()
    assert aside.result() == 7
    assert aside.wait(0)
    assert aside.result() == 7


def test_its_failure_too() -> None:
    def work() -> int:
        raise ZeroDivisionError

    aside = Aside(work, "test")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            aside.result()
