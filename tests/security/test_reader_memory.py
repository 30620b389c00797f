"""What a reader remembers of the code of Python processes is bounded: of each, and of all together."""

from __future__ import annotations

import random
from typing import Any

import pytest

from argus.capture.python import code
from argus.capture.reader import process
from tests.security.test_long_stacks import Code


class Asked:
    """Stands in for ``process._Session``."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.closed = False

    def forget(self) -> None:
        self.nbytes = 0

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("seed", range(20))
def test_who_remembers_most_forgets_it(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(process, "REMEMBERED_BYTES", 100)
    sessions: Any = process._Sessions()
    plain: dict[int, int] = {}  # bytes by number; those that were asked about last at the end
    for _ in range(400):
        number = rng.randrange(12)
        if number not in sessions:
            sessions[number] = Asked()
            plain[number] = 0
        elif rng.random() < 0.1:
            session = sessions[number]
            sessions.let_go(number)
            assert session.closed
            del plain[number]
            continue
        sessions[number].nbytes += rng.randrange(30)
        plain[number] = sessions[number].nbytes
        plain[number] = plain.pop(number)
        sessions.used(number)
        while sum(plain.values()) > 100:
            plain[next(one for one, nbytes in plain.items() if nbytes == max(plain.values()))] = 0
        assert {one: session.nbytes for one, session in sessions.items()} == plain
        assert sessions.nbytes == sum(plain.values()) <= 100
    sessions.let_go(99)


def test_processes_that_remember_much_have_no_others_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine of them had all others' code forgotten at every poll, and with it what the kernel had sent."""
    monkeypatch.setattr(process, "REMEMBERED_BYTES", 1000)
    sessions: Any = process._Sessions()
    small, large = range(8), range(100, 112)
    for number in (*small, *large):
        sessions[number] = Asked()
    for _ in range(5):
        for number in (*small, *large):
            sessions[number].nbytes = 4 if number in small else 116
            sessions.used(number)
            assert sessions.nbytes <= 1000
        assert all(sessions[number].nbytes for number in small)


def test_frames_that_are_remembered_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """One code object has as many as it has instructions."""
    monkeypatch.setattr(code, "MAX_FRAMES", 1000)
    one = Code(monkeypatch, {7: "f"})
    made = one._at(7)
    monkeypatch.setattr(one.resolver, "_code_at", lambda address: made)
    one.resolver._codes[7] = made
    frames = one.frames([7] * 100)
    for begin in range(0, 5000, 100):
        frames["instruction"] = range(1 << 31, (1 << 31) + 100)
        frames["instruction"] += begin
        assert {frame.function for frame in one.resolver.chain(frames).frames if frame} == {"f"}
        assert len(made.frames) <= 1000
    assert one.resolver.nbytes > 0
    one.resolver.forget()
    assert one.resolver.nbytes == 0
    assert not made.frames or 7 not in one.resolver._codes


def test_what_was_forgotten_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    process_ = Code(monkeypatch, {at: f"f{at}" for at in range(1, 30)})
    process_.resolver._pid = 1
    frames = process_.frames(list(range(1, 30)))
    before = process_.resolver.chain(frames)
    process_.resolver.forget()
    assert process_.resolver.chain(frames).frames == before.frames
