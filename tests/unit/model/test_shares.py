"""A room that owners share: what each may take."""

from __future__ import annotations

from argus.model.losses import Owner
from argus.model.shares import Shares

A, B, C = (1001, ""), (1002, ""), (1003, "")


def filled(shares: Shares, *floods: Owner, room: int = 1000, several: bool = True) -> int:
    """Lets owners take one after the other for as long as any may; how much all hold then."""
    used = shares._held.total()
    while True:
        may = [owner for owner in floods if used < room and shares.fits(owner, used / room, several=several)]
        if not may:
            return used
        for owner in may:
            shares.add(owner, 1)
            used += 1


def test_who_is_alone_may_have_all() -> None:
    assert filled(Shares(), A, several=False) == 1000


def test_one_who_floods_leaves_half() -> None:
    shares = Shares()
    shares.add(B, 10)
    assert 500 <= filled(shares, A) <= 512
    assert shares.fits(B, 0.51, several=True)
    shares.remove({B: 10})
    assert not shares.fits(A, 0.51, several=True), "others are there, though they hold nothing"
    assert shares.fits(A, 0.51, several=False)
    assert shares.fits(C, 0.51, several=True)


def test_several_who_flood_leave_a_part() -> None:
    shares = Shares()
    assert 660 <= filled(shares, A, B) <= 670
    assert shares.fits(C, 0.67, several=True)


def test_a_user_s_many_containers_have_the_part_of_eight() -> None:
    shares = Shares()
    many = [(1001, str(number)) for number in range(64)]
    shares.add(B, 1)
    held = filled(shares, *many, room=10_000)
    assert 8 / 9 - 0.01 <= held / 10_000 <= 8 / 9 + 0.01
    assert shares.fits(B, held / 10_000, several=True)


def test_who_holds_nothing_is_forgotten() -> None:
    shares = Shares()
    for number in range(100):
        shares.add((number, ""), 5)
        shares.remove({(number, ""): 5})
    assert not shares._held
