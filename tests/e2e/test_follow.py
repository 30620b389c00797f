"""Following forks: what the watching thread adds at any moment is neither lost nor taken for ended.

The probes are a double that remembers who was let through; the fork watcher is not started, its callback is called.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from argus.capture.process import follow
from argus.capture.process.follow import Family

pytestmark = pytest.mark.core


class Door:
    """Stands for ``Probes``: who is let through, and how many calls each had made before."""

    def __init__(self) -> None:
        self.inside: set[int] = set()
        self.before: dict[int, int] = {}

    def add_target(self, pid: int, owner: tuple[int, str] = (-1, "")) -> int:
        self.inside.add(pid)
        return self.before.get(pid, 0)

    def remove_target(self, pid: int) -> None:
        self.inside.discard(pid)

    def follow_forks(self) -> None: ...

    forks = "on"

    def is_target(self, pid: int) -> bool:
        return pid in self.inside

    def target_pids(self) -> list[int]:
        return list(self.inside)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "30"])
    yield process
    process.kill()
    process.wait()


def family(door: Door) -> Family:
    made = Family(door, follow=False)  # type: ignore[arg-type]
    made.admit([os.getpid()])
    return made


def test_a_fork_is_let_through_at_once_and_reported_once(child: subprocess.Popen[bytes]) -> None:
    door = Door()
    door.before[child.pid] = 3
    its = family(door)
    its._forked(os.getpid(), child.pid)
    its._forked(os.getpid(), child.pid)
    its._forked(1, 4194303)  # of somebody else
    assert door.inside == {os.getpid(), child.pid}
    assert its.new() == [child.pid]
    assert its.new() == []
    assert its.missed_calls == 3


def test_a_fork_that_comes_while_processes_are_looked_at_has_not_ended(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    its = family(Door())
    looked = follow.start_ticks

    def fork_now(pid: int) -> int | None:
        its._forked(os.getpid(), child.pid)
        return looked(pid)

    its._new.clear()
    # The thread's own moment: after the news were read, while the list of processes is being made.
    monkeypatch.setattr(its, "new", lambda: [its._forked(os.getpid(), child.pid), []][1])
    monkeypatch.setattr(follow, "start_ticks", fork_now)
    assert its.refresh() == ([], [])
    monkeypatch.undo()
    assert its.refresh() == ([child.pid], [])


def test_a_child_that_ended_before_it_was_read_is_reported_as_ended(child: subprocess.Popen[bytes]) -> None:
    door = Door()
    its = family(door)
    its._forked(os.getpid(), child.pid)
    child.kill()
    child.wait()
    joined, ended = its.refresh()
    assert (joined, ended) == ([child.pid], [child.pid])
    its.dismiss(child.pid)
    assert child.pid not in its
    assert door.inside == {os.getpid()}
    assert its.refresh() == ([], [])


class Deaf:
    """A fork watcher whose events were all dropped."""

    state, missed = "on", 0

    def __init__(self, on_fork: object) -> None: ...

    def close(self) -> None: ...


def test_children_that_only_the_kernel_has_noticed_join_and_are_forgotten(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "ForkWatcher", Deaf)
    monkeypatch.setattr(follow, "descendants", lambda pids: [])
    door = Door()
    its = Family(door, follow=True)  # type: ignore[arg-type]
    its.admit([os.getpid()])
    ended = 4194302
    door.inside |= {child.pid, ended}  # as the kernel lets them through
    assert its.includes(child.pid), "its calls have arrived"
    assert not its.includes(4194301)
    joined, gone = its.refresh()
    assert (joined, gone) == ([ended], [ended])
    its.dismiss(ended)
    assert door.inside == {os.getpid(), child.pid}
    assert its.refresh() == ([], [])
    its.let_go()
