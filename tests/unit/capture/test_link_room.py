"""Nobody's files take the descriptors of all for their probes."""

from __future__ import annotations

import random
import resource
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from argus.capture import link_room
from argus.capture.attachment import Attachment, subject_of
from argus.capture.link_room import LinkRoom
from argus.capture.placement import Placement
from argus.model import calls
from argus.model.errors import ArgusError
from argus.model.losses import Owner

HOSTILE, HONEST = (65534, ""), (1000, "")


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1600, 1600))


def a_file(owner: Owner, symbols: Any = calls.BY_SYMBOL) -> Attachment:
    library: Any = SimpleNamespace(offsets=dict.fromkeys(symbols, 1), shown_path="lib.so", key=object(), layout=None)
    return Attachment(library, None, owner=owner)


def taken(room: LinkRoom, owner: Owner, files: int, symbols: Any = calls.BY_SYMBOL) -> list[Attachment]:
    """Those of an owner's files that have room."""
    of = [a_file(owner, symbols) for _ in range(files)]
    for each in of:
        with suppress(ArgusError):
            room.take(each)
    return [each for each in of if each.links_kept]


def test_a_user_with_very_many_files_leaves_descriptors_to_others() -> None:
    room = LinkRoom("multi", launch_durations=False)
    theirs = taken(room, HOSTILE, 1000)
    all_of_them = sum(each.links_kept for each in theirs)
    assert 400 < all_of_them <= 500, "half of five eighths"
    assert len(taken(room, HONEST, 8)) == 8
    room.give_back(*theirs, *theirs)
    assert len(taken(room, HOSTILE, 4)) == 4, "room that is given back is used again"


def test_a_user_with_very_many_containers_leaves_descriptors_to_others() -> None:
    room = LinkRoom("multi", launch_durations=False)
    theirs = [each for number in range(100) for each in taken(room, (65534, str(number)), 40)]
    assert sum(each.links_kept for each in theirs) <= 2 * 1000 // 3
    assert len(taken(room, HONEST, 8)) == 8


def test_who_has_room_is_who_may_take_it() -> None:
    chosen = random.Random(5)
    room = LinkRoom("multi", launch_durations=False)
    owners = [(uid, container) for uid in (1, 2, 3) for container in ("", "a", "b")]
    for _ in range(300):
        each = a_file(chosen.choice(owners))
        may = each.owner in room.who_has(each.library, owners)
        with suppress(ArgusError):
            room.take(each)
        assert may == bool(each.links_kept)


@pytest.mark.parametrize("seed", range(10))
def test_links_of_a_file_are_those_of_an_owner_who_maps_it(seed: int) -> None:
    """Who mapped it first may have gone: it has room for other files again."""
    draw, room = random.Random(seed), LinkRoom("multi", launch_durations=False)
    owners = [HOSTILE, HONEST, (1001, "pod")]
    there = [each for owner in owners for each in taken(room, owner, draw.randrange(1, 4))]
    for _ in range(40):
        file = draw.choice(there)
        file.mapped_by(frozenset(draw.sample(owners, draw.randrange(1, 3))))
        before = {owner: sum(each.links_kept for each in there if each.owner == owner) for owner in owners}
        if file.owner not in file.owners:
            room.hand_on(file)
            assert file.owner in file.owners
            assert before[file.owner] == min(before[owner] for owner in file.owners)
        kept = {owner: sum(each.links_kept for each in there if each.owner == owner) for owner in owners}
        assert dict(room._of_owner) == {owner: number for owner, number in kept.items() if number}
    room.give_back(*there)
    assert not room._of_owner


def test_what_is_given_back_leaves_nothing() -> None:
    room, draw = LinkRoom("perf", launch_durations=True), random.Random(3)
    held: list[Attachment] = []
    for _ in range(500):
        owner = draw.choice([HOSTILE, HONEST, (0, "pod")])
        held += taken(room, owner, 1, draw.sample(list(calls.BY_SYMBOL), 5))
        gone = draw.sample(held, draw.randrange(len(held) // 4 + 1))
        room.give_back(*gone)
        held = [each for each in held if each.links_kept]
        assert room._of_owner.total() == sum(each.links_kept for each in held) <= 1000
    room.give_back(*held)
    assert not room._of_owner


@pytest.mark.parametrize("backend", ["multi", "perf"])
@pytest.mark.parametrize("seed", range(20))
def test_no_file_has_more_links_than_are_kept_for_it(backend: Any, seed: int) -> None:
    draw = random.Random(seed)
    symbols = draw.sample(list(calls.BY_SYMBOL), draw.randrange(1, 60))
    durations = draw.random() < 0.5
    groups: dict[Any, int] = {}
    for call in map(calls.BY_SYMBOL.__getitem__, symbols):
        for edge in ("enter", "exit"):
            if edge == "enter" or calls.probes_exit(call, durations):
                name = subject_of(call), f"{call.program}_{edge}"
                groups[name] = groups.get(name, 0) + 1
    library: Any = SimpleNamespace(offsets=dict.fromkeys(symbols, 1))
    expected = len(groups) if backend == "multi" else sum(groups.values())
    assert LinkRoom(backend, launch_durations=durations).at_most(library) == expected


def test_a_refused_file_costs_no_look_at_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again, and again."""
    nothing: Any = None
    maps: Any = dict.fromkeys(("text_bytes", "torch_layouts"), SimpleNamespace(set=lambda key, value: None))
    placed = Placement(maps, nothing, launch_durations=False)
    monkeypatch.setitem(link_room.MOST_LINKS, "multi", 0)
    with pytest.raises(ArgusError, match="as many probes as they may"):
        placed.choose(a_file(HOSTILE), {}, nothing, (), False, HOSTILE)
    assert not placed._file_slots
