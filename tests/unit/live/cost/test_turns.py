"""The loop's time, shared by those whose processes want as much of it as they can get."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from argus.capture.process import demangler
from argus.live.cost.turns import Turns
from argus.model.losses import UNKNOWN

OF_LOOP, SAVED_S = 0.5, 0.25


def test_time_is_shared_by_owners() -> None:
    turns = Turns(OF_LOOP, SAVED_S)
    a, b, c = (1001, ""), (1002, ""), (1003, "")
    turns.fill({a, b, c}, 10.0)
    assert all(map(turns.may, (a, b, c)))
    for owner in (a, b):
        turns.spend(owner, SAVED_S + 1.0)
    turns.fill({a, b, c}, 11.0)
    assert [turns._of_owners.left_s[owner] for owner in (a, b, c)] == pytest.approx([-0.75, -0.75, SAVED_S]), (
        "c needs nothing"
    )
    assert [turns.may(owner) for owner in (a, b, c)] == [False, False, True]
    turns.spend(c, 2.0)
    turns.fill({a, b, c}, 12.5)
    assert [turns._of_owners.left_s[owner] for owner in (a, b, c)] == pytest.approx([-0.5, -0.5, SAVED_S - 1.75])
    turns.fill({a}, 12.6)
    assert turns.may(a), "alone"
    turns.fill({a, (1004, "")}, 12.7)
    assert turns.may((1004, ""))
    assert not turns.may(a), "it had not become better"


def test_a_user_s_many_containers_have_the_time_of_eight() -> None:
    turns = Turns(OF_LOOP, SAVED_S)
    many, other = {(1001, str(number)) for number in range(32)}, (1002, "")
    owners = {*many, other}
    turns.fill(owners, 10.0)
    for owner in owners:
        turns.spend(owner, SAVED_S + 1.0)
    before = dict(turns._of_owners.left_s)
    turns.fill(owners, 10.9)
    gained = {owner: turns._of_owners.left_s[owner] - before[owner] for owner in owners}
    assert gained[other] == pytest.approx(OF_LOOP * 0.9 / 9)
    assert sum(gained[owner] for owner in many) == pytest.approx(8 * gained[other])


def test_those_who_are_not_known_are_no_owner_beside_one() -> None:
    turns = Turns(OF_LOOP, SAVED_S)
    turns.fill({UNKNOWN, (1001, "")}, 10.0)
    turns.spend((1001, ""), 5.0)
    assert turns.may((1001, ""))
    turns.fill({UNKNOWN, (1001, ""), (1002, "")}, 10.1)
    assert turns.may((1001, "")), "nobody had to wait for it"
    turns.spend((1001, ""), 5.0)
    assert not turns.may((1001, ""))
    assert turns.may(UNKNOWN)
    turns.spend(UNKNOWN, 5.0)
    assert not turns.may(UNKNOWN)
    assert turns.may((1003, "")), "it has just come"
    turns.spend((1003, ""), 5.0)
    assert not turns.may((1003, ""))


def test_who_leaves_in_debt_and_comes_back_has_it_still() -> None:
    turns = Turns(OF_LOOP, SAVED_S)
    a, b, c = (1001, ""), (1002, ""), (1003, "")
    turns.fill({a, b, c}, 10.0)
    turns.spend(a, SAVED_S + 1.0)
    turns.fill({b, c}, 10.4)
    turns.fill({a, b, c}, 10.8)
    assert not turns.may(a)
    turns.fill({b, c}, 11.0)
    turns.fill({b, c}, 20.0)
    assert not turns._of_owners.gone_s, "it would have been paid by now"
    turns.fill({a, b, c}, 20.1)
    assert turns.may(a)


def test_who_leaves_with_little_and_comes_back_has_little() -> None:
    turns = Turns(OF_LOOP, SAVED_S)
    a, b, c = (1001, ""), (1002, ""), (1003, "")
    turns.fill({a, b, c}, 10.0)
    turns.spend(a, SAVED_S - 0.01)
    turns.fill({b, c}, 10.1)
    turns.fill({a, b, c}, 10.2)
    turns.spend(a, 0.06 + OF_LOOP * 0.1)
    assert not turns.may(a)


def test_what_an_owner_owes_is_remembered_whenever_it_comes_back() -> None:
    """Also between two fills, before it is among those that are filled."""
    turns = Turns(OF_LOOP, SAVED_S)
    a, b, c = (1001, ""), (1002, ""), (1003, "")
    spent_s = 0.0
    for turn in range(100):
        turns.fill({b, c}, 10.0 + 0.05 * turn)
        while turns.may(a):
            turns.spend(a, 0.01)
            spent_s += 0.01
    assert spent_s < SAVED_S + OF_LOOP * 0.05 * 100


def test_new_containers_of_a_user_have_no_full_accounts_without_end() -> None:
    """Anybody may make them: a namespace for each process."""
    turns = Turns(OF_LOOP, SAVED_S)
    other = (1002, "")
    turns.fill({other, (1003, "")}, 10.0)
    spent_s = 0.0
    for turn in range(400):
        container = (1001, f"pid:[{turn}]")
        while turns.may(container):
            turns.spend(container, 0.01)
            spent_s += 0.01
        turns.fill({other, container}, 10.0 + 0.05 * turn)
        assert len(turns._of_owners.gone_s) <= 256
    passed_s = 0.05 * 400
    assert spent_s < 4 * SAVED_S + 2 * OF_LOOP * passed_s
    assert turns.may(other)
    turns.spend(other, SAVED_S + 0.1)
    assert not turns.may(other)
    assert turns.may((1004, "")), "another user's are not less for it"


def test_who_waits_for_names_pays_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait for the child that demangles is no CPU time of the thread."""
    turns = Turns(OF_LOOP, SAVED_S)
    a, b = (1001, ""), (1002, "")
    turns.fill({a, b}, 10.0)
    with turns.spending(a):
        monkeypatch.setattr(demangler, "_waits", SimpleNamespace(seconds=SAVED_S + demangler.waits_s()))
    assert not turns.may(a)
    assert turns.may(b)


def test_no_clock_is_read_for_who_is_alone() -> None:
    """For 500 ranks of one job that was a sixth of what a turn took that found nothing."""
    read: list[float] = []
    turns = Turns(OF_LOOP, SAVED_S, lambda: read.append(0.0) or 100.0 * len(read))
    a, b = (1001, ""), (1002, "")
    turns.fill({a}, 10.0)
    with turns.spending(a):
        pass
    assert not read
    turns.fill({a, b}, 10.1)
    with turns.spending(a):
        pass
    assert len(read) == 2
    assert (turns.may(a), turns.may(b)) == (False, True)
