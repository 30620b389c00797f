"""Stacks are remembered within bounds in number and bytes, of each owner in its part of the room."""

from __future__ import annotations

import random

import numpy as np
import pytest

from argus.capture.bounded import text_bytes
from argus.live.job import Job
from argus.live.sampling import dictionary
from argus.live.sampling.dictionary import StackDictionary
from argus.model.losses import Owner
from argus.model.shares import CONTAINERS
from argus.model.stacks import Frame, Stack

ME, OTHER = (1001, ""), (1002, "")


def stack_of(*functions: str, file: str = "train.py") -> Stack:
    return Stack(tuple(Frame("python", function, file, 1) for function in functions), "complete", "none")


class Plain:
    """The same of one owner, without bytes."""

    def __init__(self) -> None:
        self.ids: dict[int, int] = {}
        self.stacks: dict[int, Stack] = {}
        self.before: tuple[dict[int, int], dict[int, Stack]] = ({}, {})

    def begin_anew(self) -> None:
        self.before = self.ids, self.stacks
        self.ids, self.stacks = {}, {}

    def get(self, one: int) -> Stack | None:
        if one not in self.stacks and one in self.before[1]:
            self.stacks[one] = self.before[1][one]
        return self.stacks.get(one)


@pytest.mark.parametrize("seed", range(20))
def test_one_owner_s_stacks_are_kept_as_if_there_were_no_others(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(dictionary, "KEPT_STACKS", 20)
    kept, plain = StackDictionary(), Plain()
    every = [stack_of(*(rng.choice("abcd") for _ in range(rng.randrange(1, 6)))) for _ in range(60)]
    for _ in range(400):
        chosen, number = rng.choice(every), rng.randrange(1, 100)
        if rng.random() < 0.5:
            kept.add(number, chosen, ME)
            plain.ids[number] = chosen.id
            plain.stacks.setdefault(chosen.id, chosen)
        assert kept.get(chosen.id, ME) == kept.get(chosen.id) == plain.get(chosen.id)
        numbers = np.arange(1, 100, dtype=np.uint64)
        expected = [plain.ids.get(one) or plain.before[0].get(one, 0) for one in range(1, 100)]
        assert kept.ids_of(numbers, ME).tolist() == expected
        full = len(plain.ids) > 20
        assert kept.full() == ([ME] if full else [])
        assert kept.has_room(ME)
        if full:
            kept.begin_anew(ME)
            plain.begin_anew()


@pytest.mark.parametrize("seed", range(10))
def test_bytes_are_counted_as_they_come_and_go(seed: int) -> None:
    rng = random.Random(seed)
    kept, owners = StackDictionary(), [(user, container) for user in (1, 2) for container in "ab"]
    for _ in range(300):
        owner = rng.choice(owners)
        if rng.random() < 0.9:
            kept.add(rng.randrange(50), stack_of(*rng.choices("abcdefgh", k=3), file=rng.choice("äz") * 9), owner)
        elif rng.random() < 0.8:
            kept.begin_anew(owner)
        else:
            kept.forget_gone([owner])
        assert kept.nbytes == sum(one.nbytes for one in kept._of.values())
        assert kept.before_nbytes == sum(one.nbytes for one in kept._before.values())
        for one in kept._of.values():
            frames = {frame for stack in one.stacks.values() for frame in stack.frames}
            assert len({id(frame) for stack in one.stacks.values() for frame in stack.frames}) == len(frames)
            texts = sum(text_bytes(frame.function) + text_bytes(frame.file) for frame in frames)
            assert one.nbytes >= texts + 300 * len(frames)


def fill(kept: StackDictionary, owner: Owner, nbytes: int, first: int = 0) -> int:
    """Adds stacks of long names until an owner has no room; returns their number."""
    for number in range(10_000):
        if not kept.has_room(owner):
            return number
        kept.add(1 + first + number, stack_of(f"{first + number}" + "n" * nbytes), owner)
    raise AssertionError("no bound")


def test_long_stacks_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dictionary, "KEPT_BYTES", 1 << 20)
    kept = StackDictionary()
    assert fill(kept, ME, 50_000) < 30
    assert kept.nbytes < (1 << 20) + 60_000
    assert kept.full() == [ME]
    kept.begin_anew(ME)
    assert kept.nbytes == 0
    assert kept.ids_of(np.array([1], np.uint64), ME)[0], "what is under way is still understood"
    fill(kept, ME, 50_000, 100)
    kept.begin_anew(ME)
    assert not kept.ids_of(np.array([1], np.uint64), ME)[0]


def test_who_has_long_stacks_costs_others_none_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dictionary, "KEPT_BYTES", 1 << 20)
    kept, job = StackDictionary(), Job("j", 1, owner=OTHER)
    mine = stack_of("f", "g")
    kept.add(1, mine, OTHER)
    kept.note_written(job, [mine])
    for turn in range(5):
        fill(kept, ME, 50_000, 100 * turn)
        assert kept.full() == [ME]
        assert kept.has_room(OTHER)
        kept.begin_anew(ME)
        kept.forget_gone([ME, OTHER])
    assert kept.get(mine.id, OTHER) == mine
    assert kept.ids_of(np.array([1], np.uint64), OTHER).tolist() == [mine.id]
    assert kept.unwritten(job, np.array([mine.id], np.uint64)) == [], "nor is it written again"
    kept.begin_anew(OTHER)
    assert kept.unwritten(job, np.array([mine.id], np.uint64)) == [mine]


def test_a_user_in_many_containers_leaves_room_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dictionary, "KEPT_BYTES", 1 << 20)
    kept = StackDictionary()
    for number in range(100):
        kept.add(1, stack_of("n" * 60_000), (1001, str(number)))
    for number in range(4):
        kept.add(number, stack_of(f"{number}" + "n" * 20_000), OTHER)
    assert kept._parts()[OTHER] == pytest.approx(1 / (1 + CONTAINERS))
    assert OTHER not in kept.full()
    assert len(kept.full()) == 100
    kept.forget_gone([OTHER])
    assert list(kept._of) == [OTHER]


def before_bytes(kept: StackDictionary) -> int:
    return sum(one.nbytes for one in kept._before.values())


def test_what_was_forgotten_is_bounded_of_all_owners_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One user with sixteen PID namespaces, one after the other, had a gigabyte."""
    monkeypatch.setattr(dictionary, "KEPT_BYTES", 1 << 20)
    kept = StackDictionary()
    kept.add(1, stack_of("train"), OTHER)
    kept.begin_anew(OTHER)
    for container in range(16):
        owner = (65534, f"ns{container}")
        fill(kept, owner, 50_000, 10_000 * container)
        kept.begin_anew(owner)
        assert before_bytes(kept) <= dictionary.BEFORE * (1 << 20)
        assert kept.ids_of(np.array([10_000 * container + 1], np.uint64), owner)[0], "the newest is still understood"
    assert kept.ids_of(np.array([1], np.uint64), OTHER)[0], "so is who has little"


def test_who_has_all_the_room_keeps_what_it_had_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dictionary, "KEPT_BYTES", 1 << 20)
    kept = StackDictionary()
    for turn in range(1, 4):
        fill(kept, ME, 50_000, 1000 * turn)
        assert kept.full() == [ME]
        kept.begin_anew(ME)
        assert kept.ids_of(np.array([1000 * turn + 1], np.uint64), ME)[0]


@pytest.mark.parametrize("seed", range(10))
def test_of_what_was_forgotten_the_oldest_of_who_has_most_goes(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(dictionary, "KEPT_BYTES", 100_000)
    kept, plain = StackDictionary(), dict[Owner, int]()
    owners = [(user, container) for user in (1, 2, 3) for container in "abc"]
    for number in range(300):
        owner = rng.choice(owners)
        kept.add(number, stack_of(f"{number}" + "n" * rng.randrange(40_000)), owner)
        nbytes = kept._of[owner].nbytes
        if rng.random() < 0.7:
            kept.begin_anew(owner)
            plain.pop(owner, None)
            plain[owner] = nbytes
            while sum(plain.values()) > 150_000:
                users = {user: sum(size for one, size in plain.items() if one[0] == user) for user, _ in plain}
                most = max(users, key=users.__getitem__)
                del plain[next(one for one in plain if one[0] == most)]
        assert {one: before.nbytes for one, before in kept._before.items()} == plain


def test_stacks_that_rows_to_come_have_stay_however_often_they_are_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that hangs has its number from before. After two renewals its rows had no stack."""
    monkeypatch.setattr(dictionary, "KEPT_BYTES", 1 << 20)
    kept, hangs = StackDictionary(), stack_of("hangs")
    kept.add(5, hangs, ME)
    for turn in range(1, 5):
        fill(kept, ME, 50_000, 100 * turn)
        kept.begin_anew(ME, [5, 99_999])
        assert kept.ids_of(np.array([5], np.uint64), ME).tolist() == [hangs.id]
        assert kept.get(hangs.id, ME) == hangs
        assert kept.nbytes < 2000
    kept.begin_anew(ME)
    kept.begin_anew(ME)
    assert kept.ids_of(np.array([5], np.uint64), ME).tolist() == [0], "nobody asks for it any more"


def test_what_stays_is_half_of_an_owner_s_part_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or there would be no room, and it would be begun anew all the time."""
    monkeypatch.setattr(dictionary, "KEPT_BYTES", 1 << 20)
    kept = StackDictionary()
    kept.add(1, stack_of("f"), OTHER)
    fill(kept, ME, 20_000, 100)
    kept.begin_anew(ME, range(101, 10_000))
    assert kept.ids_of(np.array([101], np.uint64), ME)[0]
    assert (1 << 17) < kept._of[ME].nbytes <= 1 << 18
    assert not kept.full()
    assert kept.has_room(ME)
    monkeypatch.setattr(dictionary, "KEPT_STACKS", 20)
    kept.begin_anew(ME, range(101, 10_000))
    assert len(kept._of[ME].ids) == 5


def test_many_processes_may_have_more_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 ranks with 300 each were begun anew at every poll."""
    kept = StackDictionary()
    for number in range(dictionary.KEPT_STACKS + 1):
        kept.add(number, stack_of(f"f{number % 300}"), ME)
    assert kept.full() == kept.full(32) == [ME]
    assert kept.full(33) == []
