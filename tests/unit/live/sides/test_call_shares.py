"""How much of the loop's time what an owner's processes call may take."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from argus.live.job import Job
from argus.live.sides import call_shares
from argus.live.sides.call_shares import CALL_S, CHARGED_S, CONTROL_S, GRACE_S, OF_LOOP, SAVED_S, CallShares
from argus.live.sides.call_shares import CONTROL as CONTROL_KIND
from argus.model.losses import Whom
from argus.model.records import COLLECTIVE, CONTROL, LAUNCH
from tests.builders.sessions import a_session

TURN_S = 0.25


class Traced:
    """Jobs of owners of their own, each of one process, in a loop that turns four times a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call_s: dict[int, float]) -> None:
        """``call_s``: by PID, what each of its calls costs."""
        self.call_s, self.cpu_s, self.now_s = call_s, 0.0, 100.0
        self.besides_s: dict[int, float] = {}
        """What a turn costs however many calls there are."""
        self.jobs = {pid: Job(f"job {pid}", 1, owner=(pid, "")) for pid in call_s}
        self.session = a_session(None, jobs=list(self.jobs.values()))
        self.session.roster.by_pid = {pid: (job, None) for pid, job in self.jobs.items()}
        self.session.roster.whom = lambda pid: Whom(self.jobs[pid])
        self.shares = CallShares(self.session)
        monkeypatch.setattr(call_shares, "time", SimpleNamespace(thread_time=lambda: self.cpu_s))

    def turn(self, number: dict[int, int]) -> dict[int, int]:
        """How many of so many calls of each were worked on."""
        self.now_s += TURN_S
        launches, collectives = np.zeros(0, LAUNCH), np.zeros(0, COLLECTIVE)
        for pid, count in number.items():
            calls: Any = np.zeros(count, LAUNCH)
            calls["pid"], calls["ts_ns"] = pid, 1_000 * np.arange(count)
            launches = np.concatenate([launches, calls])
        collectives = np.zeros(len(number), COLLECTIVE)
        collectives["pid"], collectives["ts_ns"] = list(number), 10**9
        self.shares.begin_turn(self.now_s)
        kept = self.shares.within({"launches": launches, "collectives": collectives})
        done = {}
        for pid, job in self.jobs.items():
            own = kept["launches"][kept["launches"]["pid"] == pid]
            assert own["ts_ns"].tolist() == (1_000 * np.arange(len(own))).tolist(), "not the first ones"
            assert pid in kept["collectives"]["pid"] or len(own) < number.get(pid, 0) or not number.get(pid)
            with self.shares.working(job) as working:
                with working.on("launches"):
                    done[pid] = working.calls["launches"] = len(own)
                    self.cpu_s += len(own) * self.call_s[pid]
                self.cpu_s += self.besides_s.pop(pid, 0.0)
        return done

    def left_out(self, pid: int) -> int:
        return int(self.session.losses.of(self.jobs[pid]).get("calls_over_share", 0))


def test_calls_of_an_owner_take_its_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left out is counted, for its job. Nobody else loses anything."""
    traced = Traced(monkeypatch, {1: 50e-6, 2: 1e-6})
    turns = [traced.turn({1: 100_000, 2: 2_000}) for _ in range(100)]
    assert all(done[2] == 2_000 for done in turns)
    assert traced.left_out(2) == 0
    worked = sum(done[1] for done in turns)
    assert traced.left_out(1) == pytest.approx(100 * 100_001 - worked, abs=100)
    # Before it is known what its calls cost, a turn takes as many as would be cheap.
    assert worked * 50e-6 <= OF_LOOP * 100 * TURN_S + SAVED_S + 3 * 100_000 * 50e-6
    assert worked * 50e-6 >= 0.5 * OF_LOOP * 100 * TURN_S, "what others do not use is its own"
    assert max(done[1] for done in turns[10:]) * 50e-6 <= 2 * SAVED_S


def test_what_a_turn_costs_besides_is_not_what_calls_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Communicators are lined up, steps are stored: a burst of calls that follows is worked on."""
    traced = Traced(monkeypatch, {1: 0.5e-6, 2: 1e-6})
    for _ in range(100):
        traced.besides_s = {1: 0.03}
        assert traced.turn({1: 1_100}) == {1: 1_100, 2: 0}
    assert traced.turn({1: 100_000})[1] == 100_000


def test_one_dear_turn_is_soon_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Traced(monkeypatch, {1: 400e-6, 2: 1e-6})
    traced.turn({1: 5_000})
    traced.call_s[1] = 0.5e-6
    done = [traced.turn({1: 500})[1] for _ in range(40)]
    assert done.count(500) >= 36, "what it was charged for is filled up in a second"
    assert traced.turn({1: 50_000})[1] == 50_000


def test_what_calls_cost_is_learned_beside_idle_jobs_of_the_same_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """They say nothing of it: else who has fifty of them would be believed to be cheap."""
    traced = Traced(monkeypatch, {1: 50e-6, 2: 1e-6})
    idle = [Job(f"idle {number}", 1, owner=(1, "")) for number in range(50)]
    for _ in range(30):
        traced.turn({1: 2_000})
        for job in idle:
            with traced.shares.working(job) as working, working.on("launches"):
                pass
    assert traced.shares._believed_s((1, ""))["launches"] == pytest.approx(50e-6, rel=0.1)


def test_other_calls_than_before_are_not_believed_to_be_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Traced(monkeypatch, {1: 1e-9, 2: 1e-9})
    for _ in range(50):
        traced.turn({1: 100_000})
    believed = traced.shares._believed_s((1, ""))
    assert believed == pytest.approx(CALL_S), "of a kind that was not seen, and of one that was cheap"


def test_calls_of_who_is_alone_are_all_worked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Traced(monkeypatch, {1: 50e-6})
    assert [traced.turn({1: 100_000})[1] for _ in range(20)] == [100_000] * 20
    assert traced.left_out(1) == 0


def test_who_makes_few_calls_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """However dear they are: nobody is judged by a handful."""
    traced = Traced(monkeypatch, {1: 50e-6, 2: 500e-6})
    for _ in range(40):
        assert traced.turn({1: 100_000, 2: 50})[2] == 50


def test_what_is_kept_is_of_owners_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Traced(monkeypatch, dict.fromkeys(range(1, 20), 1e-6))
    traced.turn(dict.fromkeys(range(1, 20), 2_000))
    assert len(traced.shares._call_s) == 19
    traced.session.roster.jobs = list(traced.jobs.values())[:2]
    traced.turn({1: 5})
    assert set(traced.shares._call_s) <= {(1, ""), (2, "")}


class Storing(Traced):
    """Jobs of owner 1, of which each turn stores steps at a price, beside a cheap one of owner 2."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, jobs: int, store_s: float) -> None:
        super().__init__(monkeypatch, {1: 1e-6, 2: 1e-6})
        self.store_s = store_s
        self.session.roster.jobs = [Job(f"many {k}", 1, owner=(1, "")) for k in range(jobs)] + [self.jobs[2]]

    def stored(self) -> list[str]:
        """Whose steps are stored in a turn."""
        self.now_s += TURN_S
        self.shares.begin_turn(self.now_s)
        done = []
        for job in self.shares.in_turns(self.session.roster.jobs):
            with self.shares.working(job) as working:
                if self.shares.may_store(job, working):
                    done.append(job.name)
                    self.cpu_s += self.store_s if job.owner[0] == 1 else 0.01
        return done


def test_steps_of_an_owner_s_jobs_are_stored_for_its_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred jobs may have thousands of steps each, which become known at once."""
    storing = Storing(monkeypatch, 100, 0.2)
    turns = [storing.stored() for _ in range(400)]
    assert all("job 2" in done for done in turns[1:]), "another's are"
    assert len(turns[0]) <= SAVED_S / 0.2 + 3
    many = [name for done in turns for name in done if name != "job 2"]
    assert 0.2 * len(many) <= OF_LOOP * 400 * TURN_S + SAVED_S + 0.2
    assert max(map(len, turns[1:])) <= 3


def test_jobs_whose_steps_were_put_off_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    storing = Storing(monkeypatch, 100, 0.05)
    counted = Counter(name for _ in range(1000) for name in storing.stored())
    del counted["job 2"]
    assert len(counted) == 100
    assert max(counted.values()) <= min(counted.values()) + 2
    storing.session.roster.jobs = storing.session.roster.jobs[-1:]
    storing.stored()
    assert not storing.shares._put_off


def test_of_who_is_alone_all_steps_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    storing = Storing(monkeypatch, 100, 0.2)
    storing.session.roster.jobs.pop()
    assert [len(storing.stored()) for _ in range(5)] == [100] * 5


@pytest.mark.parametrize("alone", [False, True])
def test_records_that_are_dearer_than_believed_are_worked_on_in_parts(
    monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    """A burst now and then, so that its price is forgotten."""
    traced = Traced(monkeypatch, {1: 12e-6} if alone else {1: 12e-6, 2: 1e-6})
    longest, done = 0.0, 0
    for turn in range(200):
        traced.now_s += TURN_S
        traced.shares.begin_turn(traced.now_s)
        number, begun_s = 150_000 if turn % 20 == 0 else 0, traced.cpu_s
        with traced.shares.working(traced.jobs[1]) as working:
            for begin, end in traced.shares.parts(traced.jobs[1], "collectives", number, working):
                assert begin == working.calls["collectives"]
                traced.cpu_s += 12e-6 * (end - begin)
                working.calls["collectives"] = end
        longest, done = max(longest, traced.cpu_s - begun_s), done + working.calls["collectives"]
    assert traced.left_out(1) == 10 * 150_000 - done
    assert (done == 10 * 150_000) is alone
    if not alone:
        assert SAVED_S < longest <= SAVED_S + GRACE_S + 4096 * 12e-6


def test_who_owes_time_and_calls_nothing_costs_nobody_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its account is below zero, and no part of nothing is left out."""
    traced = Traced(monkeypatch, {1: 50e-6, 2: 1e-6})
    traced.besides_s = {1: 5.0}
    traced.turn({1: 10})
    assert traced.shares._turns.left_s((1, "")) < 0
    assert traced.turn({2: 500}) == {1: 0, 2: 500}
    assert traced.turn({1: 500, 2: 500}) == {1: 0, 2: 500}
    assert (traced.left_out(1), traced.left_out(2)) == (501, 0)


def test_a_price_is_not_forgotten_while_calls_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Traced(monkeypatch, {1: 50e-6, 2: 1e-6})
    for _ in range(5):
        traced.turn({1: 20_000})
    done = [traced.turn({1: 200_000})[1] for _ in range(100)]
    assert max(done) * 50e-6 <= SAVED_S + CHARGED_S


def test_what_is_about_communicators_is_left_out_last(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Traced(monkeypatch, {1: 1e-6, 2: 1e-6})
    made: Any = np.zeros(400_000, CONTROL)
    made["pid"], made["ts_ns"] = 1, np.arange(len(made))

    def left(number: int) -> tuple[int, int]:
        traced.now_s += TURN_S
        traced.shares.begin_turn(traced.now_s)
        launched: Any = np.zeros(1000, LAUNCH)
        launched["pid"], launched["ts_ns"] = 1, np.arange(1000)
        kept = traced.shares.within({"launches": launched, CONTROL_KIND: made[:number]})
        with traced.shares.working(traced.jobs[1]):
            traced.cpu_s += 3e-6 * len(kept[CONTROL_KIND])
        return len(kept["launches"]), len(kept[CONTROL_KIND])

    assert left(1000) == (1000, 1000)
    assert left(200_000) == (0, 200_000), "its launches are"
    held = [3e-6 * left(400_000)[1] for _ in range(40)]
    assert sum(held) <= OF_LOOP * 40 * TURN_S + SAVED_S + CONTROL_S
    assert max(held) <= SAVED_S + CONTROL_S
    assert min(held[1:]) > 0, "and of it, what there is time for"


@pytest.mark.parametrize("seed", range(10))
def test_what_is_left_out_of_many_owners_is_what_would_be_of_each_alone(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chosen = np.random.default_rng(seed)
    owners = list(range(1, 30))
    traced = Traced(monkeypatch, dict.fromkeys(owners, 1e-6))
    of, kept = {}, {}
    for name, dtype in (("launches", LAUNCH), ("collectives", COLLECTIVE)):
        events: Any = np.zeros(3000, dtype)
        events["pid"] = chosen.choice(owners, 3000)
        events["ts_ns"] = chosen.permutation(10_000)[:3000]
        kept[name], of[name] = events, events["pid"].astype(np.int64) - 1
    before = dict(kept)
    expected_s, left_s = chosen.uniform(0, 2, 29), chosen.uniform(-1, 2, 29)
    names: Any = [(pid, "") for pid in owners]
    traced.shares._cut(kept, dict(of), list(kept), expected_s, left_s, names)
    for number in range(29):
        each = {name: events[of[name] == number] for name, events in before.items()}
        until = 1 << 62
        if expected_s[number] > max(left_s[number], 0):
            called = np.sort(np.concatenate([events["ts_ns"] for events in each.values()]))
            until = int(called[min(int(max(left_s[number], 0) / expected_s[number] * len(called)), len(called) - 1)])
        for name, events in each.items():
            found = kept[name][kept[name]["pid"] == number + 1]
            assert found["ts_ns"].tolist() == events["ts_ns"][events["ts_ns"] < until].tolist()


def test_losses_of_several_processes_are_each_counted() -> None:
    rng = np.random.default_rng(3)
    pids, numbers, lost = rng.integers(1, 50, 2_000), rng.integers(1, 9, 2_000), rng.random(2_000) < 0.5
    session = a_session(None)
    jobs = {pid: Job(f"job {pid}", 1) for pid in range(1, 50)}
    session.roster.whom = lambda pid: Whom(jobs[pid])
    session.count_losses("records_without_rank", pids, numbers, lost)
    for pid, job in jobs.items():
        assert job.losses["records_without_rank"] == int(numbers[lost & (pids == pid)].sum())
