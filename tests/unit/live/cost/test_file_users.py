"""What follows for files and processes from who maps a file, whoever mapped it first."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from argus.capture.attachment import Attachment
from argus.capture.process.targets import TORCH
from argus.live.cost.file_users import FileUsers
from argus.model.losses import Owner

EVIL, HONEST, OTHER = (65534, ""), (1000, ""), (1001, "")


class Session:
    """What was said of processes, and for whom files count."""

    def __init__(self) -> None:
        self.priced: list[dict[int, set[int]]] = []
        self.charged: dict[Any, list[Owner]] = {}
        self.layouts: dict[int, Any] = {}
        self.probes = SimpleNamespace(
            placement=SimpleNamespace(charge=lambda key, owners: self.charged.update({key: list(owners)})),
            price_without_slots=lambda files: self.priced.append({pid: set(each) for pid, each in files.items()}),
            layouts=SimpleNamespace(set=self.layouts.__setitem__),
        )


def a_file(n: int = 1, **more: Any) -> Any:
    values: dict[str, Any] = {"key": ("08:01", n, 1, 1), "roles": (), "offsets": {}, "layout": None, **more}
    return SimpleNamespace(**values)


def a_user(pid: int, owner: Owner, *files: Any) -> Any:
    return SimpleNamespace(pid=pid, libraries=files, alive=lambda: True, identity=SimpleNamespace(owner=owner))


@pytest.mark.parametrize("seed", range(10))
def test_each_process_pays_for_the_files_that_it_maps(seed: int) -> None:
    draw, session = random.Random(seed), Session()
    users: Any = FileUsers(session)  # type: ignore[arg-type]
    files = [a_file(n) for n in range(8)]
    attached = [Attachment(file, draw.choice([None, None, 1]), lacks_slot=draw.random() < 0.7) for file in files]
    maps: dict[int, list[Any]] = {pid: draw.sample(files, 3) for pid in range(1, 5)}
    for _ in range(20):
        pid = draw.choice([*maps])
        maps[pid] = draw.sample(files, draw.randrange(0, 5))
        users.price([a_user(each, EVIL, *mapped) for each, mapped in maps.items()], attached, {})
        expected = {
            pid: {id(of) for of in attached if of.lacks_slot and of.library in mapped and of.pid in (None, pid)}
            for pid, mapped in maps.items()
        }
        assert (session.priced[-1] if session.priced else {}) == {pid: of for pid, of in expected.items() if of}
    told = len(session.priced)
    users.price([a_user(each, EVIL, *reversed(mapped)) for each, mapped in maps.items()], attached, {})
    assert len(session.priced) == told, "nothing is another"


def test_slots_count_for_those_who_map_the_files_now() -> None:
    session = Session()
    users: Any = FileUsers(session)  # type: ignore[arg-type]
    one, two, twin = (a_file(n) for n in (1, 2, 3))
    attached = [Attachment(one, None, has_slot=True), Attachment(two, None, lacks_slot=True)]
    both = [a_user(1, EVIL, one, two), a_user(2, HONEST, twin)]
    users.price(both, attached, {twin.key: one.key})
    assert session.priced == [{1: {id(attached[1])}}]
    users.retain(both[1:], attached, {twin.key: one.key})
    assert session.charged == {one.key: [HONEST]}
    assert session.priced[-1] == {}


def test_a_process_s_tensors_are_read_by_its_own_files() -> None:
    session = Session()
    users: Any = FileUsers(session)  # type: ignore[arg-type]
    own, other = a_file(1, roles=(TORCH[0],), layout="2.8"), a_file(1, roles=(TORCH[0],), layout="2.0")
    twin = a_file(2, roles=(TORCH[0],), layout="2.7")
    users.note_layouts(
        [a_user(1, HONEST, own, a_file(3)), a_user(2, EVIL, other), a_user(3, OTHER, twin)], {twin.key: own.key}
    )
    assert session.layouts == {1: {own.key: "2.8"}, 2: {own.key: "2.0"}, 3: {own.key: "2.7"}}
