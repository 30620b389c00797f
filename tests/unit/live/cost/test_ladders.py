"""What is given up for one owner, and what for all."""

from __future__ import annotations

import pytest

from argus.live.cost.governor import LADDERS, PATIENCE, RETURN_S, Governor, Part, Reading, Rung
from argus.live.cost.ladders import EVERYBODYS, KEPT_OWNERS, OF_OWNERS, Ladders
from argus.model.losses import Owner

WINDOW_S = 2.0
ALL = {rung for rungs in LADDERS.values() for rung in rungs}
S = 10**9
A, B, C = (1001, ""), (1002, ""), (1003, "")
"""Owners."""
LITTLE = {Part.STACKS: 0.001, Part.OFF_CPU: 0.001, Part.GPU: 0.001}


class Trace:
    """Owners whose costs a test sets; a rung that is taken makes no difference to them, and is not able again."""

    def __init__(self, **costs: dict[Part, float]) -> None:
        self.costs: dict[Owner, dict[Part, float]] = {{"a": A, "b": B, "c": C}[name]: of for name, of in costs.items()}
        self.ladders = Ladders(Governor(0.01))
        self.now = 0.0
        self.down: set[tuple[Owner | None, Rung]] = set()

    def go(self, windows: int) -> list[tuple[Owner | None, str]]:
        changes = []
        for _ in range(windows):
            self.now += WINDOW_S
            able = {
                owner: {rung for rung in ALL if not {(owner, rung), (None, rung)} & self.down} for owner in self.costs
            }
            for own in self.ladders.look(self.costs, self.now, able):
                one = own.owner, own.change.rung
                (self.down.add if own.change.down else self.down.remove)(one)
                changes.append((own.owner, ("-" if own.change.down else "+") + own.change.rung.feature))
        return changes


def test_what_one_owner_costs_is_given_up_for_that_one() -> None:
    trace = Trace(a={Part.GPU: 0.5}, b=LITTLE)
    assert trace.go(4) == [(A, "-GPU times for all of the time"), (A, "-GPU times for a quarter of the time")]
    trace.costs[A] = {Part.OFF_CPU: 0.2}
    assert trace.go(4) == [(A, "-following waits")]
    assert trace.ladders.taken == [(A, Rung.GPU_ALWAYS), (A, Rung.GPU_QUARTER), (A, Rung.FOLLOW_WAITS)]


def test_it_comes_back_for_that_one() -> None:
    trace = Trace(a={Part.OFF_CPU: 0.2}, b=LITTLE)
    trace.go(2)
    trace.costs[A] = LITTLE
    assert trace.go(int(RETURN_S / WINDOW_S) + 2) == [(A, "+following waits")]
    assert not trace.ladders.taken


def test_no_one_hides_what_it_costs_others() -> None:
    """Of ten owners nine are idle: the mean is within the budget."""
    trace = Trace(a={Part.OFF_CPU: 0.05})
    trace.costs |= {(2000 + number, ""): dict.fromkeys(LITTLE, 0.0) for number in range(9)}
    assert trace.go(2) == [(A, "-following waits")]


def test_the_rate_of_stacks_is_that_of_most() -> None:
    heavy = {**LITTLE, Part.STACKS: 0.05}
    trace = Trace(a=heavy, b=LITTLE)
    assert all(owner == A for owner, _ in trace.go(10)), "of two, one is not most"
    assert not {rung for owner, rung in trace.down if owner is None}
    trace = Trace(a=heavy, b=LITTLE, c=heavy)
    assert trace.go(2 * PATIENCE)[:2] == [(None, "-sampling more often"), (None, "-sampling at the usual rate")]


def test_containers_of_one_user_have_one_vote() -> None:
    heavy = {**LITTLE, Part.STACKS: 0.05}
    trace = Trace(a={**LITTLE, Part.STACKS: 0.004})
    trace.costs |= {(1002, f"pod {number}"): heavy for number in range(3)}
    trace.go(10)
    assert not {rung for owner, rung in trace.down if owner is None}
    assert trace.ladders.middle(trace.costs) == trace.costs[A]
    # Two thirds of a vote, and one of another user: more than half of three.
    trace.costs[1002, "pod 0"] = trace.costs[A]
    trace.costs[C] = heavy
    trace.go(10)
    assert {rung for owner, rung in trace.down if owner is None} == {Rung.SAMPLE_OFTEN, Rung.SAMPLE_USUALLY}
    # Where there is one user, most of its containers decide.
    alone = Trace()
    alone.costs = {(1002, "pod 0"): LITTLE, (1002, "pod 1"): heavy, (1002, "pod 2"): heavy}
    assert (None, "-sampling more often") in alone.go(2 * PATIENCE)


def test_what_containers_with_one_account_cost_is_theirs_by_their_time() -> None:
    ladders = Ladders(Governor(0.01))
    window = Reading(40 * S, 40 * S, 0, {Part.OFF_CPU: 4 * S})
    pods = [(1002, "pod 0"), (1002, "pod 1"), (1002, "pod 2")]
    times = {A: Reading(10 * S, 10 * S)} | dict(zip(pods, [Reading(t * S, t * S) for t in (10, 5, 15)], strict=True))
    ladders.split(window, times, {Part.OFF_CPU: {A: 100, (1002, "*"): 1000}})
    spent = {Part.OFF_CPU: {A: 200, pods[0]: 100, (1002, "*"): 1200}}
    shares = ladders.split(window, times, spent)
    assert [shares[owner][Part.OFF_CPU] for owner in (A, *pods)] == pytest.approx([0.1, 0.1, 0.1, 0.1])


def test_who_is_not_most_has_its_own_given_up() -> None:
    trace = Trace(a={Part.STACKS: 0.05, Part.OFF_CPU: 0.02, Part.GPU: 0.01}, b=LITTLE)
    assert [rung for _, rung in trace.go(6)] == [
        "-following waits", "-GPU times for all of the time", "-GPU times for a quarter of the time",
    ]  # fmt: skip
    trace = Trace(a={Part.STACKS: 0.05, Part.OFF_CPU: 0.001, Part.GPU: 0.001}, b=LITTLE)
    assert not trace.go(6), "it would bring nothing"


def test_whom_observing_costs_nothing_has_no_say_in_the_rate() -> None:
    heavy = {**LITTLE, Part.STACKS: 0.05}
    trace = Trace(a=heavy, b=dict.fromkeys(LITTLE, 0.0))
    assert trace.go(2 * PATIENCE)[:1] == [(None, "-sampling more often")]


def test_one_owner_has_one_ladder_of_all() -> None:
    trace = Trace(a={Part.STACKS: 0.01, Part.OFF_CPU: 0.008, Part.GPU: 0.015})
    changes = trace.go(100)
    assert [rung for _, rung in changes] == [
        "-GPU times for all of the time", "-GPU times for a quarter of the time", "-sampling more often",
        "-sampling at the usual rate", "-following waits",
    ]  # fmt: skip
    assert {rung for owner, rung in trace.down if owner is None} == EVERYBODYS & ALL
    assert {rung for owner, rung in trace.down if owner == A} == OF_OWNERS


def test_a_window_is_split_by_what_was_spent() -> None:
    ladders = Ladders(Governor(0.01))
    window = Reading(30 * S, 30 * S, 0, {Part.GPU: 3 * S, Part.OFF_CPU: 3 * S, Part.CALLS: S})
    times = {A: Reading(10 * S, 10 * S), B: Reading(20 * S, 20 * S)}
    before = {Part.GPU: {A: 1000, B: 50}}
    ladders.split(window, times, before)
    shares = ladders.split(window, times, {Part.GPU: {A: 1900, B: 150}, Part.CALLS: {B: 7}})
    assert shares[A] == pytest.approx({Part.GPU: 0.27, Part.OFF_CPU: 0.1, Part.CALLS: 0.0})
    assert shares[B] == pytest.approx({Part.GPU: 0.015, Part.OFF_CPU: 0.1, Part.CALLS: 0.05})
    assert ladders.split(window, {A: Reading(30 * S, 30 * S)}, {}) == {A: window.shares()}
    assert ladders.middle(shares) == shares[B]
    assert ladders.middle(shares | {C: dict.fromkeys(LITTLE, 0.0)}) == shares[B], "whom it costs nothing has no say"
    assert ladders.middle({C: {}}) == {}


def test_owners_that_left_are_forgotten() -> None:
    trace = Trace(a={**LITTLE, Part.OFF_CPU: 0.2}, b=LITTLE)
    trace.go(2)
    for number in range(KEPT_OWNERS + 1):
        trace.costs = {B: LITTLE, (3000 + number, ""): {**LITTLE, Part.OFF_CPU: 0.2}}
        trace.go(1)
    trace.costs = {B: LITTLE}
    assert (A, "+following waits") in trace.go(1) or (A, Rung.FOLLOW_WAITS) not in trace.down
    assert len(trace.ladders._of) <= KEPT_OWNERS + 1
