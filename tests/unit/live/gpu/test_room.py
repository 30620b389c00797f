"""Who has to drop operations of GPUs when there is no room for all."""

from __future__ import annotations

from dataclasses import dataclass

from argus.live.gpu.room import OF_ALL, OF_OWNER, over_room
from argus.model.losses import Owner

ONE, OTHER = (1001, ""), (1002, "")


@dataclass
class Process:
    owner: Owner
    held: int


def kept(*processes: Process) -> list[int]:
    """What is left of each one's operations."""
    left = {id(process): most for process, most in over_room(processes)}
    return [left.get(id(process), process.held) for process in processes]


def test_processes_that_hold_nothing_take_no_room() -> None:
    honest = Process(ONE, 2_000_000)
    assert over_room([honest, *(Process(OTHER, 0) for _ in range(4000))]) == []
    assert over_room([honest, *(Process(OTHER, 10) for _ in range(4000))]) == []


def test_who_holds_most_drops_some_and_nobody_else() -> None:
    many = [Process(OTHER, 1 << 20) for _ in range(30)]
    modest = Process(ONE, 1 << 20)
    left = kept(modest, *many)
    assert left[0] == modest.held
    assert 0.99 * OF_OWNER < sum(left[1:]) <= OF_OWNER
    # However many owners there are.
    floods = [Process((2000 + number, ""), 2 << 20) for number in range(31)]
    left = kept(modest, *floods)
    assert sum(left) <= OF_ALL
    assert left[0] >= OF_ALL // 32
    assert kept(Process(ONE, OF_ALL // 32), *floods)[0] == OF_ALL // 32, "less than its part is all kept"


def test_a_user_s_many_containers_have_the_room_of_eight() -> None:
    pods = [Process((1002, f"pod{number}"), 2 << 20) for number in range(80)]
    left = kept(Process(ONE, 2 << 20), *pods)
    assert left[0] >= OF_ALL // 9 - 1
    assert sum(left[1:]) <= OF_ALL - left[0]


def test_processes_of_an_owner_share_its_room() -> None:
    left = kept(Process(ONE, 1000), *(Process(ONE, 2 << 20) for _ in range(8)))
    assert left[0] == 1000
    assert max(left[1:]) - min(left[1:]) <= 1
    assert sum(left) <= OF_OWNER
