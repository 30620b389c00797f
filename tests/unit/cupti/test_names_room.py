"""Names of all processes have one room, which their owners share."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from argus.cupti import buffers, names_room
from argus.cupti.buffers import Buffers
from argus.cupti.names_room import NamesRoom, Part
from argus.tables import gpu
from argus.tables.gpu import Names
from tests.unit.cupti.test_buffers import Texts, made, taken


def owned(monkeypatch: pytest.MonkeyPatch, of_all: int, of_part: int) -> NamesRoom:
    """A room; PIDs below 100 are of user 1."""
    room = NamesRoom()
    monkeypatch.setattr(names_room, "shared", room)
    monkeypatch.setattr(names_room, "OF_ALL", of_all)
    monkeypatch.setattr(names_room, "OF_PART", of_part)
    monkeypatch.setattr(names_room, "owner_of", lambda pid: (1 if pid < 100 else pid, ""))
    return room


def test_owners_share_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    room = owned(monkeypatch, 1000, 400)
    parts = [Part(pid) for pid in range(10)]
    for part in parts:
        while part.take(10):
            pass
    assert room.total == 500, "one alone has half"
    assert parts[0].names == 400, "and a process its part"
    later = [Part(200), Part(300)]
    for part in later:
        while part.take(10):
            pass
    assert [part.names for part in later] == [250, 120]
    del part, parts, later
    assert not room.total
    assert not room.held


def test_what_is_held_is_what_the_parts_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(2)
    room = owned(monkeypatch, 100_000, 30_000)
    parts: dict[int, Part] = {}
    for _ in range(3000):
        pid = rng.choice([1, 2, 3, 200, 300])
        part = parts.setdefault(pid, Part(pid))
        if rng.random() < 0.05:
            del parts[pid], part
        elif rng.random() < 0.5:
            before = part.names
            assert part.take(500) == (part.names > before)
        else:
            number = rng.randrange(100)
            assert part.hold(number) == (part.pointers == number * names_room.POINTER_BYTES)
        held: Counter[int] = Counter()
        for pid, each in parts.items():
            assert each.names + each.pointers <= 30_000
            held[1 if pid < 100 else pid] += each.names + each.pointers
        assert room.total == held.total() <= 100_000
        assert {user: nbytes for (user, _), nbytes in room.held.items()} == +held


def test_names_without_room_are_lost_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    room = owned(monkeypatch, 200_000, 60_000)
    texts = Texts()
    processes = [made(texts) for _ in range(10)]
    for number, one in enumerate(processes):
        one.room = Part(number)
        for first in range(1, 1001, 50):
            named = taken(one, range(first, first + 50), 1)
            assert all(
                name in ("", f"kernel {pointer}") for name, pointer in zip(named, range(first, first + 50), strict=True)
            )
            assert len(one.pointers) <= 300 + 50
    assert room.total <= 100_000
    assert all(one.names_unread for one in processes)
    other = made(texts)
    other.room = Part(200)
    assert taken(other, range(1, 50), 1) == [f"kernel {pointer}" for pointer in range(1, 50)]


def test_names_that_have_room_are_those_without_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(4)
    owned(monkeypatch, 1 << 30, 1 << 30)
    bounded, free = Names(0, Part(0)), Names(0)
    symbols = [""]
    for _ in range(30):
        symbols += [f"_Z3fo{rng.choice('abc')}{rng.choice('ivfd') * rng.randrange(1, 5)}" for _ in range(40)]
        symbols += rng.choices(["main", "", "triton_1"], k=3)
        bounded.learn(symbols)
        free.learn(symbols)
        assert bounded.words == free.words
        assert bounded.codes.tolist() == free.codes.tolist()
        assert len(set(bounded.words)) == len(bounded.words)


def test_words_without_room_stay_symbols(monkeypatch: pytest.MonkeyPatch) -> None:
    room = owned(monkeypatch, 1 << 30, 100_000)
    monkeypatch.setattr(gpu, "demangle_all", lambda symbols, pid: [f"{symbol}{'x' * 4000}" for symbol in symbols])
    monkeypatch.setattr(gpu.demangler, "given_up", 0)
    symbols = ["", *(f"_Z{number}" for number in range(5000))]
    names = Names(7, Part(7))
    names.learn(symbols)
    assert sum(len(word) > 1000 for word in names.words) < 26
    assert room.total <= 100_000
    assert names.words[-1] is symbols[-1]
    assert gpu.demangler.given_up > 4900
    assert names.codes[-1] == len(names.words) - 1


def test_a_process_keeps_no_more_than_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "MAX_NAMES", 10)
    owned(monkeypatch, 1 << 30, 1 << 30)
    one = Buffers(1)
    assert [one._named(number, f"{number}") for number in range(1, 20)] == [*range(1, 10), *[0] * 10]
