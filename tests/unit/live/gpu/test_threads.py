"""Thread ids of a PID namespace: what /proc says of each thread, read once, a part of very many at once."""

from __future__ import annotations

import contextlib
import os
import random
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from argus.live.gpu import threads
from argus.live.gpu.threads import HostTids


class Turns:
    """Look-ups as the test wants them."""

    def __init__(self) -> None:
        self.may, self.looked_up = True, 0

    def may_look_up(self, pid: int) -> bool:
        return self.may

    def looking_up(self, pid: int) -> AbstractContextManager[None]:
        self.looked_up += 1
        return contextlib.nullcontext()


class Process:
    """Threads of process 77, host's number → the namespace's; 0: the kernel does not say it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: dict[int, int] = {}
        self.read: list[int] = []
        monkeypatch.setattr(threads.os, "listdir", lambda folder: [str(tid) for tid in self.threads])
        monkeypatch.setattr(threads, "read_file", self.status)

    def status(self, path: str) -> bytes:
        tid = int(path.split("/")[-2])
        self.read.append(tid)
        inside = self.threads[tid]
        return b"Name:\tx\nNSpid:\t%d\t%d\n" % (tid, inside) if inside else b"Name:\tx\n"

    def plainly(self) -> dict[int, int]:
        """All threads as they are."""
        found = {inside: host for host, inside in self.threads.items() if inside}
        return {} if all(inside == host for inside, host in found.items()) else found


def test_threads_of_a_namespace_are_read_from_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert HostTids(os.getpid(), Turns())([]) == {}, "the same numbers inside and outside"
    for tid, line in ((500, "NSpid:\t500\t1"), (501, "NSpid:\t501\t9"), (502, "Name:\tx")):
        (tmp_path / "77" / "task" / str(tid)).mkdir(parents=True)
        (tmp_path / "77" / "task" / str(tid) / "status").write_text(f"Name:\tx\n{line}\n" if tid != 502 else line)
    monkeypatch.setattr(threads, "PROC", tmp_path)
    assert HostTids(77, Turns())([]) == {1: 500, 9: 501}
    assert HostTids(78, Turns())([]) == {}


def test_as_when_all_are_read_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """While threads come and go; a number that is used again is noticed the next time."""
    rng = random.Random(5)
    for _ in range(50):
        process, find = Process(monkeypatch), HostTids(77, Turns())
        inside = 0
        for _ in range(20):
            for tid in rng.sample(list(process.threads), len(process.threads) // 3):
                del process.threads[tid]
            for _ in range(rng.randrange(5)):
                tid = rng.randrange(100, 160)
                if tid not in process.threads:
                    process.threads[tid], inside = rng.choice([0, inside + 1, inside + 1]), inside + 1
            asked = [rng.randrange(100, 160) for _ in range(5)]
            if find(asked) != process.plainly():
                assert find(asked) == process.plainly()


def test_threads_are_read_once_and_a_part_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    process, find = Process(monkeypatch), HostTids(77, Turns())
    process.threads = {host: host - 99_999 for host in range(100_000, 110_000)}
    launching = list(range(109_000, 109_100))
    found = find(launching)
    assert found is not None
    assert len(process.read) == len(found) == threads.MOST_READ
    assert found.keys() >= {host - 99_999 for host in launching}, "those of launches first"
    for _ in range(2):
        found = find(launching)
    assert found == process.plainly()
    assert len(process.read) == len(set(process.read)) == 10_000
    process.threads[200_000] = 12_345
    find([])
    assert process.read[10_000:] == [200_000]
    assert find([]) == process.plainly(), "nothing is new: they are read again, a part at once"
    assert len(process.read) == 10_001 + threads.MOST_READ
    process.threads = {7: 1}
    assert find([]) == {1: 7}, "nothing is kept of those that have ended"
    assert (len(find._inside), len(find._been_read)) == (1, 1)


def test_an_owner_without_time_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    process, turns = Process(monkeypatch), Turns()
    process.threads = {500: 1}
    find = HostTids(77, turns)
    turns.may = False
    assert find([]) is None
    assert (process.read, turns.looked_up) == ([], 0)
    turns.may = True
    assert find([]) == {1: 500}
    assert turns.looked_up == 1
