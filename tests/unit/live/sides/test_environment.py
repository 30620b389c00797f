"""When the environment of ranks is read, and what of it is stored."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from argus.live.job import Job, Member
from argus.live.sides import environment
from argus.live.sides.environment import EnvironmentSide
from argus.model.environment import digest
from tests.builders.sessions import Rows, a_session

NODE = {"kernel.release": "6.8", "unreadable": "cpu.governor"}


class Answered:
    """Work beside the main thread that is done at once."""

    def __init__(self, work: Callable[[], dict[str, str]], name: str) -> None:
        self.result = work

    def wait(self, seconds: float) -> bool:
        return True


class Ranks:
    """A job of some ranks whose environments are in ``facts``, by PID; a missing one cannot be read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int = 1, command: str = "", **options: Any) -> None:
        self.facts = {10 + rank: {"env.NCCL_ALGO": "Ring"} for rank in range(ranks)}
        self.asked: list[int] = []
        self.job, self.rows = Job("j", 1), Rows()
        for rank, pid in enumerate(self.facts):
            target: Any = SimpleNamespace(pid=pid, command=command)
            self.job.members[pid] = Member(target, rank, "torchrun")
        monkeypatch.setattr(environment, "read_facts", self._read)
        monkeypatch.setattr(environment, "host_facts", lambda: dict(NODE))
        monkeypatch.setattr(environment, "Aside", Answered)
        self.side = EnvironmentSide(a_session(self.rows, jobs=[self.job], **options))

    @property
    def stored(self) -> list[tuple[int, dict[str, str]]]:
        """Rank and facts of each row, in order."""
        rows = [(row["rank"], dict(row["facts"]), row["digest"]) for row in self.rows["environments"]]
        assert all(stored == digest(facts) != 0 for _, facts, stored in rows)
        return [(rank, facts) for rank, facts, _ in rows]

    def _read(self, pid: int) -> dict[str, str]:
        self.asked.append(pid)
        if pid not in self.facts:
            raise OSError("it has ended")
        return dict(self.facts[pid])


def test_a_rank_is_read_three_times_and_stored_when_it_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch)
    for now in (0.0, 1.0, 9.0):
        ranks.side.look(now)
    assert ranks.stored == [(0, {**NODE, "env.NCCL_ALGO": "Ring"})]
    ranks.facts[10]["torch.version"] = "2.9"
    for now in (10.0, 11.0, 60.0, 200.0):
        ranks.side.look(now)
    assert len(ranks.asked) == 3
    assert [facts.get("torch.version") for _, facts in ranks.stored] == [None, "2.9"]


def test_few_are_read_in_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, ranks=environment.AT_ONCE + 1)
    ranks.side.look(0.0)
    assert len(ranks.asked) == environment.AT_ONCE
    ranks.side.look(0.5)
    assert sorted(rank for rank, _ in ranks.stored) == list(range(environment.AT_ONCE + 1))


class TwoJobs(Ranks):
    """A job of few ranks, of one user, and before it one of another that has new processes all the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int, **options: Any) -> None:
        super().__init__(monkeypatch, ranks)
        self.job.owner = 1001, ""
        self.busy = Job("busy", 1, owner=(1002, ""))
        self.side = EnvironmentSide(a_session(self.rows, jobs=[self.busy, self.job], **options))
        self.pid = 1000

    def add(self, ranks: int) -> None:
        for member in self.busy.members.values():
            member.state = "exited"
        for rank in range(ranks):
            self.pid += 1
            self.facts[self.pid] = {"env.NCCL_ALGO": "Tree"}
            target: Any = SimpleNamespace(pid=self.pid, command="")
            self.busy.members[self.pid] = Member(target, rank, "torchrun")

    def of(self, job: str) -> list[int]:
        return [row["rank"] for row in self.rows["environments"] if row["job"] == job]


def test_a_job_with_new_processes_all_the_time_leaves_turns_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = TwoJobs(monkeypatch, 6)
    for turn in range(3):
        ranks.add(2 * environment.AT_ONCE)
        ranks.side.look(turn * 0.5)
    assert ranks.of("j") == list(range(6))
    assert len(ranks.of("busy")) == 6


@pytest.mark.parametrize("one_user", [True, False])
def test_every_owner_has_a_turn_however_many_there_are(monkeypatch: pytest.MonkeyPatch, one_user: bool) -> None:
    """Containers of one user have the turns of one."""
    ranks = TwoJobs(monkeypatch, 4)
    others = [
        Job(f"other {number}", 1, owner=(1002 if one_user else 2000 + number, str(number))) for number in range(9)
    ]
    ranks.side._session.roster.jobs[:] = [*others, ranks.job]
    for turn in range(12):
        for job in others:
            ranks.pid += 1
            ranks.facts[ranks.pid] = {"env.NCCL_ALGO": "Tree"}
            target: Any = SimpleNamespace(pid=ranks.pid, command="")
            job.members = {ranks.pid: Member(target, 0, "torchrun")}
        ranks.side.look(turn * 0.5)
        if one_user and turn == 1:
            assert len(ranks.of("j")) == 4
    assert len(ranks.of("j")) == 4
    assert {row["job"] for row in ranks.rows["environments"]} == {"j", *(job.name for job in others)}


def test_at_the_end_owners_take_turns_and_who_was_never_read_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = TwoJobs(monkeypatch, 6)
    session = ranks.side._session
    ranks.side.look(0.0)
    assert ranks.of("j") == list(range(environment.AT_ONCE))
    ranks.add(environment.AT_THE_END + 10)
    ranks.side.stop()
    assert sorted(set(ranks.of("j"))) == list(range(6))
    assert len(ranks.of("busy")) == environment.AT_THE_END - 2, "those that were never read come first"
    assert not any(session.losses.of(ranks.job).values())
    assert session.losses.of(ranks.busy) == {"environments_over_share": 12}


def test_ranks_that_end_before_their_turn_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = TwoJobs(monkeypatch, 0)
    session = ranks.side._session
    for turn in range(3):
        ranks.add(environment.AT_ONCE + 3)
        ranks.side.look(turn * 0.5)
        assert session.losses.of(ranks.busy).get("environments_over_share", 0) == 3 * turn
    for member in ranks.busy.members.values():
        member.state = "exited"
    ranks.side.stop()
    assert session.losses.of(ranks.busy) == {"environments_over_share": 9}
    assert not any(session.losses.of(ranks.job).values())


@pytest.mark.parametrize("seed", range(20))
def test_a_job_alone_is_read_in_the_order_of_its_ranks(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """As if there were no turns."""
    rng = random.Random(seed)
    ranks = Ranks(monkeypatch, ranks=rng.randrange(1, 40))
    reads: dict[int, tuple[float, int]] = {}
    now, expected = 0.0, list[int]()
    for _ in range(60):
        left = environment.AT_ONCE
        for pid, member in ranks.job.members.items():
            since, times = reads.get(pid, (now, 0))
            if member.state != "traced" or times == 3 or now < since + environment.AGAIN_S[times] or not left:
                continue
            left -= 1
            reads[pid] = since, times + 1
            expected.append(pid)
        ranks.side.look(now)
        now += rng.random() * 4
        if rng.random() < 0.1:
            rng.choice(list(ranks.job.members.values())).state = "exited"
    assert ranks.asked == expected


def test_a_node_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch)
    node = SimpleNamespace(wait=lambda seconds: False)
    monkeypatch.setattr(environment, "Aside", lambda work, name: node)
    ranks.side.look(0.0)
    assert not ranks.asked
    ranks.side.look(environment.NODE_S)
    assert ranks.stored == [(0, {"env.NCCL_ALGO": "Ring", "unreadable": "node"})]
    node.wait, node.result = lambda seconds: True, lambda: dict(NODE)
    ranks.side.look(environment.NODE_S + environment.AGAIN_S[1])
    assert ranks.stored[-1] == (0, {**NODE, "env.NCCL_ALGO": "Ring"})


def test_who_cannot_be_read_any_more_keeps_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch)
    ranks.side.look(0.0)
    del ranks.facts[10]
    ranks.side.look(10.0)
    assert len(ranks.asked) == 2
    assert len(ranks.stored) == 1


def test_who_cannot_be_read_at_all_has_the_facts_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, command="python train.py")
    ranks.facts.clear()
    ranks.side.look(0.0)
    assert ranks.stored == [
        (0, {"kernel.release": "6.8", "command": "python train.py", "unreadable": "cpu.governor,process"})
    ]


def test_what_a_short_trace_leaves_young_is_read_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, ranks=2)
    ranks.side.look(0.0)
    ranks.facts[10]["torch.version"] = "2.9"
    del ranks.facts[11]
    ranks.side.stop()
    assert [(rank, facts.get("torch.version")) for rank, facts in ranks.stored] == [
        (0, None),
        (1, None),
        (0, "2.9"),
    ]
    for now in (10.0, 60.0):
        ranks.side.look(now)
    before = len(ranks.asked)
    ranks.side.stop()
    assert len(ranks.asked) == before, "those that were read often enough are not read again"


@pytest.mark.parametrize(
    ("command", "redact", "stored"),
    [
        ("python train.py --lr 1 --local-rank=3 --seed 2", (), "python train.py --lr 1 --seed 2"),
        ("torchrun --node_rank 1 --master_addr 10.0.0.1 x.py", (), "torchrun x.py"),
        ("torchrun --rdzv-endpoint=10.0.0.1:29500 x.py --ranking 1", (), "torchrun x.py --ranking 1"),
        ("python /home/u/train.py --lr 1", ("paths",), "python train.py --lr 1"),
        ("python /home/u/train.py --lr 1", ("arguments",), "python train.py ..."),
    ],
)
def test_commands_without_who_and_where(
    monkeypatch: pytest.MonkeyPatch, command: str, redact: tuple[str, ...], stored: str
) -> None:
    ranks = Ranks(monkeypatch, command=command, redact=redact)
    ranks.side.look(0.0)
    assert ranks.stored[0][1]["command"] == stored
