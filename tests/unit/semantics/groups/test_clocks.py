"""Clocks of simulated hosts whose offsets and drifts are known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from argus.semantics.groups.clocks import (
    BY_GPU,
    BY_WAITS,
    BY_WALL,
    CALL,
    METHODS,
    REFERENCE,
    WINDOW_NS,
    convert,
    error_at,
    estimate,
    most_informative,
)

MS, US, S = 1_000_000, 1_000, 1_000_000_000
WALL = 1_700_000_000 * S


@dataclass
class Cluster:
    """Hosts with clocks of their own: time t of the world is ``WALL + t + offset + drift * t`` there."""

    offset: NDArray[np.float64]
    drift: NDArray[np.float64]

    @classmethod
    def random(cls, rng: np.random.Generator, hosts: int) -> Cluster:
        return cls(rng.uniform(-5 * MS, 5 * MS, hosts), rng.uniform(-20e-6, 20e-6, hosts))

    def shown(self, host: int, t: NDArray[np.float64]) -> NDArray[np.int64]:
        own: NDArray[np.int64] = np.rint(t + self.offset[host] + self.drift[host] * t).astype(np.int64)
        return WALL + own

    def calls(
        self,
        rng: np.random.Generator,
        *,
        members: list[int] | None = None,
        group: int = 1,
        seconds: float = 90.0,
        step_ms: float = 100.0,
        spread_us: float = 300.0,
        slow: dict[int, float] | None = None,
        takes_us: tuple[float, ...] = (2000.0, 40.0),
        tail: float = 1.0,
        method: int = BY_GPU,
        waits_us: float = 0.0,
        ends: bool = True,
    ) -> NDArray[np.void]:
        """Calls of one communicator of hosts with a rank each.

        Args:
            rng: Random numbers.
            members: Its hosts.
            group: Its number.
            seconds: How long it goes on.
            step_ms: Time between two steps.
            spread_us: By how much arrivals differ (standard deviation).
            slow: Hosts that come later, by ms.
            takes_us: Transfer of each call of a step.
            tail: The last to leave takes so much longer than the one before it, at most: 1 is twice as long.
            method: How the times were taken.
            waits_us: What a CPU waits for besides the collective, at most.
            ends: Whether they are known.
        """
        members = list(range(len(self.offset))) if members is None else members
        steps = int(seconds * 1000 / step_ms)
        rows = []
        for place, takes in enumerate(takes_us):
            begin = np.arange(steps) * step_ms * MS + place * 10 * MS
            entered = begin[:, None] + rng.normal(0, spread_us * US, (steps, len(members)))
            for host, late in (slow or {}).items():
                entered[:, members.index(host)] += late * MS
            # The rank that comes last spends the transfer in it; the others leave with it, give or take a tail.
            last = entered.max(axis=1, keepdims=True)
            transfer = takes * US * rng.uniform(1, 1.2, (steps, 1))
            left = last + transfer * rng.uniform(1, 1 + tail, entered.shape)
            is_last = entered == last
            left = np.where(is_last, last + transfer, left) + rng.uniform(0, waits_us * US, entered.shape)
            for column, host in enumerate(members):
                part = np.zeros(steps, CALL)
                part["group"], part["host"], part["method"] = group, host, method
                part["seq"] = np.arange(steps) * len(takes_us) + place
                part["entry_ns"] = self.shown(host, entered[:, column])
                part["end_ns"] = self.shown(host, left[:, column]) if ends else -1
                part["took_ns"] = part["end_ns"] - part["entry_ns"] if ends else -1
                rows.append(part)
        return np.concatenate(rows)

    def check(self, clocks: NDArray[np.void], seconds: float, reference: int = 0) -> list[float]:
        """Asserts that each clock is within its stated error all the time; the errors stated, ns."""
        stated: list[float] = []
        t = np.linspace(0, seconds * S, 500)
        for host in range(len(self.offset)):
            own = clocks[clocks["host"] == host]
            here, there = self.shown(host, t), self.shown(reference, t)
            error = error_at(here, own)
            known = error >= 0
            wrong = np.abs(convert(here, own) - there)
            assert (wrong[known] <= error[known] + 1).all(), (host, wrong.max(), error.max())
            stated += error[known].tolist() if host != reference else []
        return stated


@given(seed=st.integers(0, 1 << 30), hosts=st.integers(2, 8))
@settings(max_examples=60, deadline=None)
def test_offsets_lie_within_their_stated_error(seed: int, hosts: int) -> None:
    rng = np.random.default_rng(seed)
    cluster = Cluster.random(rng, hosts)
    slow = {int(rng.integers(hosts)): float(rng.uniform(0, 40))} if rng.random() < 0.5 else None
    spread = float(rng.uniform(50, 2000))
    clocks = estimate(cluster.calls(rng, slow=slow, spread_us=spread), hosts)
    stated = cluster.check(clocks, 90)
    assert len(stated) == 500 * (hosts - 1)
    assert max(stated) < 150 * US


def test_where_hosts_take_turns_the_error_is_that_of_the_shortest_transfer() -> None:
    rng = np.random.default_rng(1)
    cluster = Cluster.random(rng, 4)
    clocks = estimate(cluster.calls(rng), 4)
    assert max(cluster.check(clocks, 90)) < 100 * US
    assert set(clocks["method"]) == {REFERENCE, BY_GPU}


def test_a_host_that_is_always_last_does_not_move_the_clocks() -> None:
    """Causality leaves 30 ms open on one side; that all leave together closes it."""
    rng = np.random.default_rng(2)
    cluster = Cluster.random(rng, 3)
    for slow in (0, 2):
        stated = cluster.check(estimate(cluster.calls(rng, slow={slow: 30.0}), 3), 90)
        assert max(stated) < 100 * US


def test_a_long_transfer_is_a_large_error() -> None:
    rng = np.random.default_rng(3)
    cluster = Cluster.random(rng, 2)
    stated = cluster.check(estimate(cluster.calls(rng, takes_us=(5000.0,), slow={1: 30.0}), 2), 90)
    assert 4 * MS < max(stated) < 15 * MS


def test_entries_alone_show_nothing() -> None:
    rng = np.random.default_rng(4)
    clocks = estimate(Cluster.random(rng, 3).calls(rng, ends=False), 3)
    assert clocks["error_ns"].tolist() == [0, -1, -1]
    assert [METHODS[m] for m in clocks["method"]] == ["reference", "none", "none"]
    assert (clocks["offset_ns"] == 0).all()


def test_few_calls_show_nothing() -> None:
    rng = np.random.default_rng(5)
    cluster = Cluster.random(rng, 2)
    assert estimate(cluster.calls(rng, seconds=0.7, takes_us=(40.0,)), 2)["error_ns"][1] == -1
    assert estimate(cluster.calls(rng, seconds=0.8, takes_us=(40.0,)), 2)["error_ns"][1] >= 0
    assert estimate(np.empty(0, CALL), 2)["error_ns"].tolist() == [0, -1]


def test_ten_calls_that_end_together_to_the_stamp_all_count() -> None:
    """Seven to within 0.1 us and three within 0.9 us: no stamp is exacter than that."""
    rng = np.random.default_rng(6)
    calls = Cluster(np.array([0.0, 3 * MS]), np.zeros(2)).calls(rng, seconds=1.0, takes_us=(40.0,), tail=0.0)
    calls["end_ns"][calls["host"] == 1] += np.array([60, 900, -40, 20, -900, -80, 50, -900, 30, -20])
    clocks = estimate(calls, 2)
    assert (clocks["calls"][1], clocks["drift_ppb"][1]) == (10, 0)
    assert clocks["offset_ns"][1] == pytest.approx(-3 * MS, abs=1_000)


@given(seed=st.integers(0, 1 << 30), hosts=st.integers(2, 5))
@settings(max_examples=30, deadline=None)
def test_waits_of_the_cpu_are_bounded_by_causality_alone(seed: int, hosts: int) -> None:
    """A wait may go on for 30 ms after the collective, on a slow host always: ends do not coincide then."""
    rng = np.random.default_rng(seed)
    cluster = Cluster.random(rng, hosts)
    slow = {int(rng.integers(hosts)): float(rng.uniform(0, 40))}
    clocks = estimate(cluster.calls(rng, slow=slow, method=BY_WAITS, waits_us=30_000, takes_us=(2000.0,)), hosts)
    stated = cluster.check(clocks, 90)
    assert min(stated) > 1 * MS


def test_a_host_that_waits_longer_every_time_does_not_move_the_clocks() -> None:
    """Its CPU waits for 30 ms of its own work as well: the ends look like an offset, and only the bounds are right."""
    rng = np.random.default_rng(18)
    cluster = Cluster.random(rng, 2)
    calls = cluster.calls(rng, method=BY_WAITS, takes_us=(2000.0,))
    calls["end_ns"][calls["host"] == 1] += 30 * MS
    calls["took_ns"] = calls["end_ns"] - calls["entry_ns"]
    assert min(cluster.check(estimate(calls, 2), 90)) > 25 * MS


def test_calls_without_ends_among_others_do_no_harm() -> None:
    rng = np.random.default_rng(19)
    cluster = Cluster.random(rng, 3)
    calls = cluster.calls(rng)
    gone = rng.random(len(calls)) < 0.5
    calls["end_ns"][gone] = calls["took_ns"][gone] = -1
    clocks = estimate(calls, 3)
    assert max(cluster.check(clocks, 90)) < 150 * US


def test_half_a_second_of_calls_says_little_about_the_next_minutes() -> None:
    """The drift is hardly known from it, and the error says so."""
    rng = np.random.default_rng(20)
    cluster = Cluster(np.array([0.0, 4.0 * MS]), np.array([0.0, 20e-6]))
    calls = cluster.calls(rng, seconds=240, step_ms=20, takes_us=(40.0,))
    t = calls["entry_ns"] - WALL
    kept = (t < 0.5 * S) | (t > 180 * S)
    cluster.check(estimate(calls[kept], 2), 240)


def test_a_few_waits_for_something_else_do_not_break_the_bounds() -> None:
    rng = np.random.default_rng(6)
    cluster = Cluster.random(rng, 2)
    calls = cluster.calls(rng, method=BY_WAITS, takes_us=(2000.0,), spread_us=3000)
    stray = rng.random(len(calls)) < 0.02
    calls["end_ns"][stray] = calls["entry_ns"][stray] + 50 * US
    cluster.check(estimate(calls, 2), 90)


def test_a_few_kernels_that_were_matched_wrongly_do_not_break_the_bounds() -> None:
    rng = np.random.default_rng(7)
    cluster = Cluster.random(rng, 2)
    calls = cluster.calls(rng)
    stray = rng.random(len(calls)) < 0.01
    calls["entry_ns"][stray] += 100 * MS
    calls["end_ns"][stray] += 100 * MS
    stated = cluster.check(estimate(calls, 2), 90)
    assert max(stated) < 100 * US


def test_clocks_that_contradict_each_other_are_unknown() -> None:
    """Half of the calls say 0, half 200 ms: somebody set a clock, or the calls were lined up wrongly."""
    rng = np.random.default_rng(8)
    cluster = Cluster(np.zeros(2), np.zeros(2))
    calls = cluster.calls(rng, seconds=50)
    moved = (calls["host"] == 1) & (calls["seq"] % 4 < 2)
    for name in ("entry_ns", "end_ns"):
        calls[name][moved] += 200 * MS
    assert estimate(calls, 2)["error_ns"][1] == -1


def test_errors_add_up_along_a_chain() -> None:
    """Hosts 0-1, 1-2 and 2-3 share communicators; 4 shares none."""
    rng = np.random.default_rng(9)
    cluster = Cluster.random(rng, 5)
    calls = [cluster.calls(rng, members=[a, a + 1], group=a) for a in range(3)]
    clocks = estimate(np.concatenate(calls), 5)
    cluster.check(clocks, 90)
    by_host = [int(clocks["error_ns"][clocks["host"] == host].max()) for host in range(5)]
    assert 0 == by_host[0] < by_host[1] < by_host[2] < by_host[3] < 300 * US
    assert by_host[3] > 2.5 * by_host[1]
    assert by_host[4] == -1
    assert clocks["through"][clocks["host"] == 3][0] == 2


def test_the_way_with_the_least_error_is_taken() -> None:
    rng = np.random.default_rng(10)
    cluster = Cluster.random(rng, 3)
    rough = cluster.calls(rng, members=[0, 2], group=1, takes_us=(20_000.0,))
    fine = [cluster.calls(rng, members=pair, group=7 + sum(pair)) for pair in ([0, 1], [1, 2])]
    clocks = estimate(np.concatenate([rough, *fine]), 3)
    assert max(cluster.check(clocks, 90)) < 300 * US
    assert (clocks["through"][clocks["host"] == 2] == 1).all()


def test_any_host_may_be_the_reference() -> None:
    rng = np.random.default_rng(11)
    cluster = Cluster.random(rng, 4)
    calls = [cluster.calls(rng, members=[a, a + 1], group=a) for a in range(3)]
    for reference in (1, 3):
        cluster.check(estimate(np.concatenate(calls), 4, reference=reference), 90, reference)


def test_the_rate_of_a_clock_may_change() -> None:
    """NTP corrects the rate every few minutes: each minute has a line of its own."""
    rng = np.random.default_rng(12)
    cluster = Cluster(np.array([0.0, 2.0 * MS]), np.array([0.0, 20e-6]))
    calls = cluster.calls(rng, seconds=300)
    selected = calls["host"] == 1
    t = calls["entry_ns"][selected] - WALL

    def bent(t: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.where(t > 150 * S, ((t - 150 * S) * -50e-6).astype(np.int64), 0)

    for name in ("entry_ns", "end_ns"):
        calls[name][selected] += bent(t)
    clocks = estimate(calls, 2)
    own = clocks[clocks["host"] == 1]
    assert len(own) == 300 * S // WINDOW_NS - 1
    true = np.linspace(0, 300 * S, 1000)
    here = cluster.shown(1, true)
    here = here + bent(here - WALL)
    wrong = np.abs(convert(here, own) - (WALL + true))
    assert (wrong <= error_at(here, own) + 1).all()
    straight = (true < 100 * S) | (true > 200 * S)
    assert error_at(here, own)[straight].max() < 100 * US


def test_a_hosts_own_word_about_its_wall_clock_is_used_where_it_is_better() -> None:
    rng = np.random.default_rng(13)
    cluster = Cluster(np.array([0.0, 0.3, -0.2, 0.1]) * MS, np.zeros(4))
    calls = cluster.calls(rng, members=[0, 1])
    clocks = estimate(calls, 4, wall_error_ns=np.array([MS, MS, MS, -1]))
    assert [METHODS[m] for m in clocks["method"]] == ["reference", "gpu", "wall", "none"]
    assert clocks["error_ns"][2] == 2 * MS + 1000
    cluster.check(clocks, 90)
    assert (estimate(calls, 4, wall_error_ns=np.array([-1, MS, MS, MS]))["method"] != BY_WALL).all()


def test_clocks_that_are_hours_apart() -> None:
    rng = np.random.default_rng(14)
    cluster = Cluster(np.array([0.0, 5 * 3600.0 * S]), np.array([0.0, 15e-6]))
    stated = cluster.check(estimate(cluster.calls(rng), 2), 90)
    assert max(stated) < 100 * US


def test_no_calls_in_a_window_leave_the_line_before_it() -> None:
    rng = np.random.default_rng(15)
    cluster = Cluster.random(rng, 2)
    calls = cluster.calls(rng, seconds=360)
    gone = (calls["entry_ns"] > WALL + 120 * S) & (calls["entry_ns"] < WALL + 240 * S)
    cluster.check(estimate(calls[~gone], 2), 360)


def test_minutes_between_those_looked_at_are_bridged() -> None:
    """A chord joins what is known before and after: where the rate stays, it is as exact as its ends."""
    rng = np.random.default_rng(21)
    cluster = Cluster.random(rng, 3)
    calls = cluster.calls(rng, seconds=600, step_ms=1000)
    minutes = np.array([0, 1, 5, 8, 9]) * 60 * S + WALL
    looked = np.isin((calls["entry_ns"] - WALL) // (60 * S), [0, 1, 5, 8, 9])
    clocks = estimate(calls[looked], 3, minutes=minutes)
    assert max(cluster.check(clocks, 600)) < 250 * US
    for host in (1, 2):
        own = clocks[clocks["host"] == host]
        since = np.round((own["since_ns"][1:] - WALL) / (60 * S)).astype(int)
        assert since.tolist() == [1, 2, 5, 6, 8, 9]
        ends = error_at(cluster.shown(host, np.array([30.0, 570.0]) * S), own)
        between = error_at(cluster.shown(host, np.array([210.0]) * S), own)
        assert between[0] > ends.max()


def test_a_rate_that_changes_between_those_minutes_is_within_the_error() -> None:
    """At once, and by as much as shows before and after: the chord is off by most there."""
    rng = np.random.default_rng(22)
    cluster = Cluster(np.array([0.0, 2.0 * MS]), np.array([0.0, 20e-6]))
    calls = cluster.calls(rng, seconds=360, step_ms=1000)
    selected = calls["host"] == 1
    t = calls["entry_ns"][selected] - WALL

    def bent(t: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.where(t > 180 * S, ((t - 180 * S) * -50e-6).astype(np.int64), 0)

    for name in ("entry_ns", "end_ns"):
        calls[name][selected] += bent(t)
    minutes = np.array([0, 1, 4, 5])
    looked = np.isin((calls["entry_ns"] - WALL) // (60 * S), minutes)
    own = estimate(calls[looked], 2, minutes=minutes * 60 * S + WALL)
    own = own[own["host"] == 1]
    true = np.linspace(0, 360 * S, 1000)
    here = cluster.shown(1, true)
    here = here + bent(here - WALL)
    wrong = np.abs(convert(here, own) - (WALL + true))
    assert wrong.max() > MS
    assert (wrong <= error_at(here, own) + 1).all()
    assert error_at(here, own).max() < 2 * MS


def test_what_a_host_says_of_itself_counts_where_lines_around_it_say_less() -> None:
    rng = np.random.default_rng(23)
    cluster = Cluster(np.array([0.0, 0.3 * MS]), np.zeros(2))
    calls = cluster.calls(rng, seconds=360, step_ms=20, takes_us=(40.0,))
    t = (calls["entry_ns"] - WALL) / S
    few, many = calls[(t < 0.5) | (t > 300)], calls[(t < 60) | (t > 300)]
    for some, wall_ms, expected in ((many, 50, {BY_GPU}), (few, 50, {BY_GPU}), (few, 1, {BY_GPU, BY_WALL})):
        clocks = estimate(some, 2, wall_error_ns=np.full(2, wall_ms * MS))
        assert set(clocks["method"][clocks["host"] == 1].tolist()) == expected, wall_ms
        cluster.check(clocks, 360)


def test_the_communicators_that_help_most_are_known() -> None:
    rng = np.random.default_rng(24)
    cluster = Cluster.random(rng, 4)
    rough = cluster.calls(rng, members=[0, 1, 2], group=1, takes_us=(20_000.0,))
    fine = [cluster.calls(rng, members=pair, group=7 + pair[0]) for pair in ([0, 1], [1, 2])]
    assert most_informative(np.concatenate([rough, *fine]), 4) == [7, 8]
    assert most_informative(rough, 4) == [1]
    assert most_informative(rough[:0], 4) == []


@pytest.mark.parametrize("method", [BY_GPU, BY_WAITS])
def test_more_calls_narrow_the_error(method: int) -> None:
    """Where hosts take turns being last, somebody is nearly last together with everybody else, sooner or later."""
    rng = np.random.default_rng(17)
    cluster = Cluster.random(rng, 2)
    few, many = (
        max(cluster.check(estimate(cluster.calls(rng, seconds=s, spread_us=800, method=method), 2), s)) for s in (2, 55)
    )
    assert many <= few


@pytest.mark.filterwarnings("error")
def test_hosts_that_share_no_call_are_unknown_without_a_word() -> None:
    """Of one communicator, in one minute, two pairs of hosts are seen."""
    calls = np.zeros(200, CALL)
    calls["group"], calls["method"] = 7, BY_GPU
    calls["seq"] = np.repeat(np.arange(100), 2)
    calls["host"] = np.tile([0, 1], 100) + 2 * (calls["seq"] >= 50)
    calls["entry_ns"] = calls["seq"] * 100_000_000 + calls["host"] * 10_000
    calls["end_ns"], calls["took_ns"] = calls["entry_ns"].max() * 0 + calls["seq"] * 100_000_000 + 500_000, 400_000
    rows = estimate(calls, 4)
    assert {int(row["host"]): bool(row["error_ns"] >= 0) for row in rows} == {0: True, 1: True, 2: False, 3: False}
