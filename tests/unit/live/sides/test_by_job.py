"""Which records are of which process, and of which job."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from argus.live.job import Job, Member
from argus.live.sides.by_job import ByJob, ByProcess, Together, by_pid
from argus.model.records import LAUNCH


def processes(number: int, jobs: int, seed: int) -> dict[int, tuple[Job, Member]]:
    """Of so many jobs; who is in which is chosen at random."""
    chosen = np.random.default_rng(seed)
    made = [Job(f"job {k}", 1) for k in range(jobs)]
    pids = chosen.choice(10_000, number, replace=False).tolist()
    found: dict[int, tuple[Job, Member]] = {}
    for rank, pid in enumerate(pids):
        target: Any = SimpleNamespace(pid=pid)
        found[pid] = made[int(chosen.integers(jobs))], Member(target, rank, "order")
    return found


@pytest.mark.parametrize("seed", range(20))
def test_each_job_has_its_own_records_in_their_order(seed: int) -> None:
    """As if each job looked for its own."""
    of_pid = processes(1 + seed, 1 + seed // 3, seed)
    events: Any = np.zeros(400, LAUNCH)
    events["pid"] = np.random.default_rng(seed).choice([*of_pid, 10_001, 3], 400)
    events["ts_ns"] = np.random.default_rng(seed).permutation(400)
    whose = ByJob(of_pid)
    split = whose.split(events)
    for job in {id(job): job for job, _ in of_pid.values()}.values():
        own = {pid: member for pid, (its_job, member) in of_pid.items() if its_job is job}
        assert whose.members[id(job)] == own
        expected = np.flatnonzero(np.isin(events["pid"], list(own)))
        places, ranks = split.pop(id(job), (np.zeros(0, np.int64), np.zeros(0, np.uint32)))
        assert places.tolist() == expected.tolist()
        assert ranks.tolist() == [own[pid].rank for pid in events["pid"][expected].tolist()]
    assert not split
    places_of = dict(by_pid(events))
    assert sorted(places_of) == sorted(set(events["pid"].tolist()))
    each = ByProcess(events)
    assert (len(each), len(each.of(10_002))) == (400, 0)
    for pid, places in places_of.items():
        assert each.of(pid).tobytes() == events[places].tobytes()
        assert each.by_time(pid)["ts_ns"].tolist() == sorted(events["ts_ns"][places].tolist())
        assert places.tolist() == np.flatnonzero(events["pid"] == pid).tolist()


def test_nothing_is_nobodys() -> None:
    nothing, some = np.zeros(0, LAUNCH), np.zeros(3, LAUNCH)
    assert ByJob({}).split(some) == ByJob(processes(2, 1, 0)).split(nothing) == dict(by_pid(nothing)) == {}
    assert ByJob(processes(2, 1, 0)).split(some) == {}


@pytest.mark.parametrize("seed", range(20))
def test_records_of_each_process_are_together_by_time(seed: int) -> None:
    """As if each process looked for its own, of all and of some."""
    draw = np.random.default_rng(seed)
    events: Any = np.zeros(40 * seed, LAUNCH)
    events["pid"], events["ts_ns"] = draw.choice([7, 9, 11, 1000, 1 << 31], 40 * seed), draw.integers(0, 50, 40 * seed)
    events["handle"] = np.arange(40 * seed)
    together = Together(events)
    some = together.events["handle"] % 3 == 1
    places, of_some = list(together.places()), list(together.places(some))
    assert together.pids == sorted(set(events["pid"].tolist()))
    assert together.count(some) == [each.stop - each.start for each in of_some]
    for pid, its, its_some in zip(together.pids, places, of_some, strict=True):
        own = ByProcess(events).by_time(pid)
        assert together.events[its].tobytes() == own.tobytes()
        assert together.events[some][its_some].tobytes() == own[own["handle"] % 3 == 1].tobytes()
