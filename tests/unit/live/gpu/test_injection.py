"""Whose processes are injected when; the injections themselves are doubles."""

from __future__ import annotations

import errno
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from argus.cupti import inject_apart, inject_child, load
from argus.cupti.inject_apart import Children
from argus.live.gpu import injection
from argus.live.gpu.injection import HELD_UP, NO_THREAD, Injector
from argus.model.losses import Owner


class Under:
    """Injections that wait until they are let go."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.go: dict[int, threading.Event] = {}
        self.hostile: set[int] = set()

    def inject(self, pid: int, by: Callable[[Any], float]) -> str:
        self.begun.append(pid)
        if pid in self.hostile:
            self.go.setdefault(pid, threading.Event()).wait(60)
        return "injected"


@pytest.fixture
def under(monkeypatch: pytest.MonkeyPatch) -> Iterator[Under]:
    made = Under()
    monkeypatch.setattr(injection, "inject", made.inject)
    monkeypatch.setattr(injection, "maps_cuda", lambda _: True)
    yield made
    for event in made.go.values():
        event.set()


def process(pid: int, owner: Owner) -> Any:
    return SimpleNamespace(target=SimpleNamespace(pid=pid), owner=owner, failure="", injection=None, again_at=0.0)


def settle(injector: Injector, processes: list[Any], hostile: set[int]) -> None:
    """Polls until nothing more begins or ends but what hangs."""
    for turn in range(2 * len(processes) + 4):
        for one in processes:
            injector.poll(one, float(turn))
            if one.injection is not None and one.target.pid not in hostile:
                assert one.injection.wait(10)


def test_a_user_in_many_containers_leaves_turns_for_others(under: Under) -> None:
    """66 injections that hung held up everybody: there was one turn, and room for 64 that wait."""
    injector = Injector(lambda _: None)
    under.hostile = set(range(1, 67))
    hostile = [process(pid, (1000, f"pod {pid}")) for pid in range(1, 67)]
    honest = [process(pid, (1001, "")) for pid in (101, 102, 103)]
    settle(injector, hostile + honest, under.hostile)
    assert [one.injection is not None for one in honest] == [True] * 3
    assert sum(one.injection is not None for one in hostile) == injection.MOST_AT_ONCE // 2
    others = [process(pid, (pid, "")) for pid in (2000, 2001, 2002, 2003)]
    settle(injector, hostile + others, under.hostile)
    assert all(one.injection is not None for one in others)


def test_of_one_user_in_a_container_one_at_a_time(under: Under) -> None:
    injector = Injector(lambda _: None)
    under.hostile = {1}
    processes = [process(pid, (1000, "")) for pid in (1, 2, 3)]
    settle(injector, processes, under.hostile)
    assert under.begun == [1]
    under.go[1].set()
    assert processes[0].injection.wait(10)
    settle(injector, processes, set())
    assert under.begun == [1, 2, 3]
    assert [one.again_at >= 0 and one.failure for one in processes] == [""] * 3


def test_who_leaves_children_hanging_waits_until_one_has_ended(under: Under) -> None:
    notes: list[str] = []
    injector = Injector(notes.append)
    one = process(1, (1000, ""))
    left = [hung((1000, "")) for _ in range(inject_apart.MOST_HUNG_OF_OWNER)]
    injector._children._left = left[:]
    assert not injector.poll(one, 10.0)
    assert one.failure == HELD_UP
    left[0][0].ended = True
    assert not injector.poll(one, 10.5), "it is tried each second"
    assert not injector.poll(one, 11.0)
    assert one.failure == ""
    assert one.injection.wait(10)
    assert injector.poll(one, 11.1)
    assert notes == ["process 1: injected"]


def hung(owner: Owner) -> Any:
    process = SimpleNamespace(ended=False)
    process.poll = lambda: 0 if process.ended else None
    return process, owner


def test_children_that_hang_are_bounded_for_an_owner_a_user_and_in_all() -> None:
    children = Children()
    left: Counter[Owner] = Counter()
    for user in range(40):
        for container in range(40):
            owner = user, f"pod {container}"
            while children.has_room(owner):
                children._left.append(hung(owner))
                left[owner] += 1
    assert max(left.values()) == inject_apart.MOST_HUNG_OF_OWNER
    assert left.total() <= inject_apart.MOST_HUNG
    of_users = Counter({user: sum(n for owner, n in left.items() if owner[0] == user) for user in range(40)})
    assert of_users[0] == inject_apart.MOST_HUNG // 2
    assert of_users[1] == inject_apart.MOST_HUNG // 4, "whoever comes later finds room"
    children._left[0][0].ended = True
    children.has_room((50, ""))
    assert len(children._left) == left.total() - 1, "who has ended is forgotten"


def test_nothing_begins_once_the_trace_ends(under: Under) -> None:
    injector = Injector(lambda _: None)
    injector.end()
    one = process(1, (1000, ""))
    assert not injector.poll(one, 10.0)
    assert one.injection is None


def test_a_thread_that_cannot_be_started_takes_no_turn(under: Under, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(*_: Any) -> Any:
        raise RuntimeError("can't start new thread")

    injector, owner = Injector(lambda _: None), (1000, "")
    with monkeypatch.context() as patch:
        patch.setattr(injection, "Aside", no_thread)
        one = process(1, owner)
        assert injector.poll(one, 0.0) is False
    assert one.failure == NO_THREAD
    settle(injector, [one], set())
    assert (under.begun, one.failure) == ([1], "")


def test_nobody_is_stopped_once_the_trace_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[int] = []
    monkeypatch.setattr(load.interrupt, "stop", lambda pid, _: stopped.append(pid))
    request: Any = SimpleNamespace(pid=1)
    nothing: Any = None
    with pytest.raises(load.interrupt.Refused, match="the trace ends"):
        load._stop_and_load(request, 0, 0, nothing, lambda: False)
    assert stopped == []


@pytest.mark.parametrize(
    ("failure", "number"),
    [
        (ProcessLookupError("1 ended"), errno.ESRCH),
        (OSError("?"), 0),
        (PermissionError(errno.EPERM, "no"), errno.EPERM),
    ],
)
def test_that_a_process_has_ended_is_told(failure: OSError, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> float:
        raise failure

    monkeypatch.setattr(inject_child, "load", fail)
    ours, its = socket.socketpair()
    with ours, its:
        request: Any = None
        assert inject_child._answer(request, its)["error"][0] == number
