"""Names of all processes have one room, which their owners share."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from argus.capture import kernel_books
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
    for name, part in (("SPARE", 8), ("LITTLE_OF_USER", 16), ("LITTLE", 24)):
        monkeypatch.setattr(names_room, name, of_all // part)
    monkeypatch.setattr(names_room, "owner_of", lambda pid: (1 if pid < 100 else pid, ""))
    return room


def filled(part: Part, size: int = 1000) -> int:
    """Takes names of this size until there is no room for one more, and returns how many bytes it has."""
    while part.take(f"{part.names} {id(part)} ", size - TEXT) is not None:
        pass
    return part.names


TEXT = kernel_books.Texts.size_of("x" * 24)
"""What a text of the tests takes, about."""


def test_a_user_who_comes_later_has_room_for_a_node_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever came first kept all but 12 MB: a third of the names of 16 ranks were lost."""
    monkeypatch.setattr(names_room, "shared", NamesRoom())
    monkeypatch.setattr(names_room, "owner_of", lambda pid: (1 if pid < 100 else 2, ""))
    first = [Part(pid) for pid in range(8)]
    for part in first:
        filled(part, 100_000)
    later = [Part(100 + rank) for rank in range(16)]
    for rank, part in enumerate(later):
        for number in range(20):
            assert part.take(f"{rank} {number}", 100_000) is not None


def test_owners_share_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    room = owned(monkeypatch, 24_000_000, 4_000_000)
    parts = [Part(pid) for pid in range(10)]
    for part in parts:
        filled(part)
    assert 19_900_000 < room.total <= 20_000_000, "one alone has all but an eighth and a part in 24"
    assert 3_990_000 < parts[0].names <= 4_000_000, "and a process its part"
    later = [Part(200), Part(300)]
    for part in later:
        filled(part)
    assert later[0].names > 990_000
    assert later[1].names > 990_000
    del part, parts, later
    assert not room.total
    assert not room.held
    assert not room.users
    assert not room.texts


def test_a_user_s_many_containers_leave_room_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    room = owned(monkeypatch, 24_000_000, 24_000_000)
    greedy = [Part(1, (7, f"c{number}")) for number in range(40)]
    for part in greedy:
        filled(part)
    assert greedy[1].names > 990_000, "another container of the user has some"
    honest = [Part(1, (user, "")) for user in (8, 9)]
    assert filled(honest[0]) > 1_490_000
    assert filled(honest[1]) > 740_000
    assert room.total <= 24_000_000


def test_ranks_of_a_job_have_their_texts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    room = owned(monkeypatch, 192 << 20, 48 << 20)
    ranks = [Part(rank) for rank in range(64)]
    texts = [f"{number} {'x' * 2000}" for number in range(2000)]
    first = [ranks[0].take(text, names_room.NAME_BYTES) for text in texts]
    for part in ranks[1:]:
        assert all(
            part.take(f"{number} {'x' * 2000}", names_room.NAME_BYTES) is kept for number, kept in enumerate(first)
        )
        assert part.hold(3000)
    texts_bytes = sum(map(kernel_books.Texts.size_of, texts))
    assert room.total == texts_bytes + 64 * 2000 * names_room.NAME_BYTES + 63 * 3000 * names_room.POINTER_BYTES
    del part, ranks
    assert room.total == 0


def test_what_is_held_is_what_the_parts_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(2)
    room = owned(monkeypatch, 100_000, 30_000)
    parts: dict[int, Part] = {}
    texts: dict[int, list[str]] = {}
    for _ in range(3000):
        pid = rng.choice([1, 2, 3, 200, 300])
        part = parts.setdefault(pid, Part(pid))
        of_part = texts.setdefault(pid, [])
        if rng.random() < 0.05:
            del parts[pid], texts[pid], part
        elif rng.random() < 0.5:
            text = f"{rng.randrange(60)}"
            kept = part.take(text, 100)
            assert kept in (None, text)
            of_part += [] if kept is None else [text]
        else:
            number = rng.randrange(100)
            assert part.hold(number) == (part.pointers == number * names_room.POINTER_BYTES)
        held: Counter[int] = Counter()
        known: set[tuple[int, str]] = set()
        for pid, each in parts.items():
            assert each.names + each.pointers <= 30_000
            user = 1 if pid < 100 else pid
            held[user] += each.pointers + 100 * len(texts[pid])
            known |= {(user, text) for text in texts[pid]}
        for user, text in known:
            held[user] += kernel_books.Texts.size_of(text)
        assert room.total == held.total() <= 100_000
        assert {user: nbytes for (user, _), nbytes in room.held.items()} == +held == room.users


def test_names_without_room_are_lost_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    room = owned(monkeypatch, 800_000, 60_000)
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
    assert room.total <= 800_000
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


def test_a_name_without_room_counts_once_and_is_looked_up_once_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    owned(monkeypatch, 1 << 30, 0)
    texts = Texts()
    one = made(texts)
    for flush in (1, 2):
        for _ in range(50):
            assert taken(one, range(1, 201), flush) == [""] * 200
            assert taken(one, range(201, 401), flush) == [""] * 200
        assert one.names_unread == 400
        assert len(texts.asked) == 400 * flush
    monkeypatch.setattr(names_room, "OF_PART", 1 << 30)
    assert taken(one, range(1, 201), 3) == [f"kernel {pointer}" for pointer in range(1, 201)], "there is room now"
    monkeypatch.setattr(buffers, "MOST_WITHOUT", 500)
    monkeypatch.setattr(names_room, "OF_PART", 0)
    for first in range(1000, 3000, 100):
        taken(one, range(first, first + 100), 4)
    assert len(one._without) == 500
    assert one.names_unread == 2400


def test_an_owner_that_is_given_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    room = owned(monkeypatch, 1 << 30, 1 << 30)
    monkeypatch.delattr(names_room, "owner_of")
    one = Buffers(1, (7, "c"))
    one._named(1, "kernel")
    assert set(room.held) == {(7, "c")}
