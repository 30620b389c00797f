"""Names and runs of jobs, where jobs of the same name were there before and are forgotten."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from argus.capture.process.names import KernelNames
from argus.capture.process.targets import Identity
from argus.live.job import Job, Member
from argus.live.roster import KEPT_OVER, Roster
from argus.model import given_names
from argus.model.given_names import KEPT_NAMES, GivenNames
from tests.builders.sessions import a_session

RUN = 1_700_000_000
HONEST, MALLORY = 1000, 65_534


class Node:
    """A node whose jobs all are one rank each."""

    def __init__(self) -> None:
        self.session = a_session(run=RUN)
        self.session.probes = SimpleNamespace(remove_target=lambda pid: None)  # type: ignore[assignment]
        self.roster = Roster(self.session, KernelNames())
        self.pid = 1 << 22

    def begin(self, uid: int, name: str) -> Job:
        self.pid += 1
        identity = Identity(0, 1, 0, name, "slurm", f"run {self.pid}", uid)
        target: Any = SimpleNamespace(pid=self.pid, identity=identity, libraries=[], alive=lambda: True)
        job, rank = self.roster._place(target)
        job.members[self.pid] = Member(target, rank, "slurm")
        job.over_since = 0.0
        return job

    def end(self, *jobs: Job) -> None:
        """They have ended, and are forgotten."""
        for job in jobs:
            job.over_since = 1.0
            for member in job.members.values():
                member.target.alive = lambda: False  # type: ignore[method-assign]
        rest = [Job(f"rest {number}", RUN, over_since=1.0) for number in range(KEPT_OVER)]
        self.roster.jobs += rest
        self.roster.take_over(5000.0, 0.0)
        self.roster.jobs = [job for job in self.roster.jobs if job not in rest]


def test_a_job_of_another_user_s_that_is_forgotten_changes_no_run() -> None:
    node = Node()
    node.end(node.begin(MALLORY, "llama"))
    job = node.begin(HONEST, "llama")
    assert (job.name, job.run) == (f"llama#uid{HONEST}", RUN), "as on the nodes where the other's job runs yet"
    said = f"a job of uid {MALLORY} has the name llama: ranks of uid {HONEST} are stored as llama#uid{HONEST}"
    assert said in node.session.notes


def test_a_job_of_the_same_user_that_comes_again_is_another_run() -> None:
    node = Node()
    runs = []
    for _ in range(3):
        job = node.begin(HONEST, "llama")
        assert job.name == "llama"
        runs.append(job.run)
        node.end(job)
        node.end(node.begin(MALLORY, "llama"))
    assert runs[0] == RUN
    assert len(set(runs)) == 3


def test_who_had_what_a_job_would_be_called_gets_no_rows_of_it() -> None:
    node = Node()
    node.end(node.begin(MALLORY, "llama"), node.begin(MALLORY, f"llama#uid{HONEST}"))
    job = node.begin(HONEST, "llama")
    assert (job.name, job.run) == (f"llama#uid{HONEST}#2", RUN)


def test_names_without_end_change_no_run_of_another_user_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(given_names, "KEPT_NAMES", 64)
    node = Node()
    for number in range(200):
        job = node.begin(MALLORY, f"x{number}")
        assert (job.run == RUN) is (number < 32 + 1), "of who has no room left each is a run of its own"
        node.end(job)
    theirs = node.begin(MALLORY, "llama")
    assert (theirs.name, theirs.run == RUN) == (f"llama#uid{MALLORY}", False), "no newer run of a name of others"
    node.end(theirs)
    for number in range(10):
        assert node.begin(HONEST, f"job {number}").run == RUN
    job = node.begin(HONEST, "llama")
    assert (job.name, job.run) == ("llama", RUN)
    assert len(node.roster._given._given) < 64


def test_jobs_go_on_being_numbered_when_the_trace_is() -> None:
    node = Node()
    job = node.begin(HONEST, "llama")
    node.roster.renumber(RUN + 5)
    assert job.run == RUN + 5
    node.end(job)
    assert node.begin(HONEST, "llama").run > RUN + 5
    assert node.begin(HONEST, "gpt").run == RUN + 5


@pytest.mark.parametrize("seed", range(10))
def test_no_two_jobs_have_rows_under_one_name_and_run(seed: int) -> None:
    """Whoever starts what when. A user whose names no other user took has what it always had."""
    rng = np.random.default_rng(seed)
    node, current = Node(), []
    seen: dict[tuple[str, int], int] = {}
    began: dict[str, int] = defaultdict(int)
    for _ in range(60):
        uid, name = int(rng.choice([HONEST, 1001, MALLORY])), str(rng.choice(["llama", "gpt", f"llama#uid{HONEST}"]))
        name = name if uid != 1001 else f"own {name}"
        job = node.begin(uid, name)
        assert seen.setdefault((job.name, job.run), id(job)) == id(job)
        current.append(job)
        if uid == 1001 and not any(each.name == name for each in current[:-1]):
            assert job.name == name
            assert (job.run == RUN) is (began[name] == 0)
        began[name] += uid == 1001
        if rng.random() < 0.7:
            node.end(*current)
            current.clear()


def test_names_are_bounded_and_a_user_has_as_many_as_stay_free() -> None:
    names = GivenNames()
    given = sum(names.give(f"x{number}", MALLORY, RUN) for number in range(3 * KEPT_NAMES))
    assert KEPT_NAMES // 2 <= given <= KEPT_NAMES // 2 + 1
    given = sum(names.give(f"y{number}", HONEST, RUN) for number in range(3 * KEPT_NAMES))
    assert KEPT_NAMES // 4 <= given <= KEPT_NAMES // 4 + 1
    assert len(names._given) < KEPT_NAMES
    assert names.give("x0", MALLORY, RUN + 7)
    assert names.newest_run("x0") == RUN + 7
    assert not names.give("x0", HONEST, RUN + 9), "it is another's"
    assert names.newest_run("x0") == RUN + 7
