"""Calls of communicators, as the tracer takes them in: what is kept is what it was when each record was taken alone,
and how often it is gone through does not grow with the records."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.live import job as job_module
from argus.live.job import KEPT_COMMUNICATORS, MOST_ASKED, Job, Member
from argus.live.sides import call_shares
from argus.live.sides.by_job import ByJob
from argus.live.sides.calls import CallSide
from argus.model.calls import BY_SYMBOL, CALLS, Layer
from argus.model.groups import Membership, Place
from argus.model.records import COLLECTIVE, CONTROL
from argus.semantics.groups.communicators import COMMUNICATOR, RankCalls, find_groups
from argus.semantics.groups.mesh import Traffic, find_mesh
from tests.builders.sessions import a_session

INIT, DESTROY, QUERY = (BY_SYMBOL[name].id for name in ("ncclCommInitRank", "ncclCommDestroy", "ncclCommCount"))
SPLIT, ALL_REDUCE = (BY_SYMBOL[name].id for name in ("ncclCommSplit", "ncclAllReduce"))
KEY = tuple[int, int]


class Side:
    """Calls of a job whose processes' numbers are those in ``ranks``."""

    def __init__(self, job: Job, ranks: dict[int, int], session: Any = None) -> None:
        self.job = job
        self.session = session or a_session(SimpleNamespace(append=lambda *_: None), jobs=[job])
        self.members = {}
        for pid, rank in ranks.items():
            target: Any = SimpleNamespace(
                pid=pid, libraries=[], has=lambda _: False, identity=SimpleNamespace(world_size=0), command=""
            )
            self.members[pid] = job.members[pid] = Member(target, rank, "order")
            self.session.roster.by_pid[pid] = job, self.members[pid]
        probing: Any = SimpleNamespace(until_ns=lambda _: 1 << 62, feed=lambda *_: None, take_note=lambda _: None)
        self.calls = CallSide(self.session, SimpleNamespace(), probing, *[SimpleNamespace()] * 2)  # type: ignore[arg-type]

    def _of_job(self, events: tuple[NDArray[np.void], ...]) -> tuple[NDArray[np.void], NDArray[np.uint32]]:
        joined = np.concatenate(events)
        places, ranks = ByJob(self.session.roster.by_pid).split(joined)[id(self.job)]
        return joined[places], ranks

    def control(self, *events: NDArray[np.void]) -> None:
        self.calls._feed_control(self.job, self.members, *self._of_job(events))

    def collectives(self, *events: NDArray[np.void]) -> None:
        self.calls._feed_collectives(self.job, self.members, *self._of_job(events))


def about(pid: int, calls: Any, handles: Any, ts_ns: Any) -> NDArray[np.void]:
    """CONTROL rows of a process."""
    rows = np.zeros(max(np.size(calls), np.size(handles), np.size(ts_ns)), CONTROL)
    rows["pid"], rows["call"], rows["handle"], rows["ts_ns"] = pid, calls, handles, ts_ns
    return rows


def called(pid: int, comms: Any, ts_ns: Any) -> NDArray[np.void]:
    """COLLECTIVE rows of a process."""
    rows = np.zeros(max(np.size(comms), np.size(ts_ns)), COLLECTIVE)
    rows["pid"], rows["call"], rows["comm"], rows["ts_ns"], rows["count"] = pid, ALL_REDUCE, comms, ts_ns, 4
    return rows


def placed(keys: list[KEY]) -> NDArray[np.void]:
    rows = np.zeros(len(keys), COMMUNICATOR)
    rows["rank"], rows["comm"] = zip(*keys, strict=True)
    return rows


# ---- communicators that are made and ended


class OneByOne:
    """What is kept, as it was when every record went through all of it."""

    def __init__(self) -> None:
        self.recent: dict[int, list[KEY]] = {}
        self.placed: list[KEY] = []
        self.known: set[KEY] = set()
        self.ended: set[KEY] = set()
        self.gone: set[KEY] = set()
        self.in_memory: set[KEY] = set()
        self.control: dict[int, list[KEY]] = {}

    def keep_control(self, rank: int, events: NDArray[np.void]) -> None:
        for call, handle in zip(events["call"].tolist(), events["handle"].tolist(), strict=True):
            key = rank, handle
            if CALLS[call].kind == "comm_end":
                self.ended.add(key)
            elif CALLS[call].kind in ("comm_init", "comm_split"):
                self.in_memory.discard(key)
                self.gone.add(key)
                if key in self.ended:
                    for kept in (self.known, self.ended):
                        kept.discard(key)
                    self.placed = [each for each in self.placed if each != key]
                    self.recent[rank] = [each for each in self.recent.get(rank, []) if each[0] != handle]
        for call, handle, ts_ns in zip(*(events[name].tolist() for name in ("call", "handle", "ts_ns")), strict=True):
            if CALLS[call].kind in ("comm_init", "comm_split"):
                self.recent[rank] = [e for e in self.recent.get(rank, []) if e[0] != handle or e[1] > ts_ns]
        kept_before = self.control.get(rank, [])
        self.control[rank] = [*kept_before, *pairs_of(events, "handle", "ts_ns")][-9:]


def pairs_of(rows: NDArray[np.void], *names: str) -> list[KEY]:
    return list(zip(*(rows[name].tolist() for name in names), strict=True))


def state(job: Job) -> dict[str, Any]:
    return {
        "recent": {rank: pairs_of(rows, "comm", "ts_ns") for rank, rows in job.recent.items()},
        "placed": pairs_of(job.placed, "rank", "comm"),
        "known": set(job.traffic),
        "handles": job.handles,
        "ended": job.ended,
        "gone": job.alignment.gone if job.alignment is not None else set(),
        "in_memory": {(rank, comm) for rank, of in job.places.items() for comm in of},
        "control": {rank: pairs_of(rows, "handle", "ts_ns") for rank, rows in job.control.items()},
    }


@pytest.mark.parametrize("seed", range(60))
def test_what_is_kept_is_what_it_was_record_by_record(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of two ranks, one of them with a helper, end and make communicators at few addresses."""
    monkeypatch.setattr(job_module, "KEPT_CONTROL", 9)
    random = np.random.default_rng(seed)
    ranks = {11: 1, 12: 0, 13: 1}
    job, plain = Job("job", 1), OneByOne()
    side = Side(job, ranks)
    far = int(random.choice([0, 3 << 61]))  # of groups at an address that had many
    of = {(rank, far + handle) for rank in (0, 1) for handle in range(6)}
    job.alignment = job_module.Alignment(parts=iter(()), of=of)  # type: ignore[arg-type]
    for turn in range(4):
        for rank in (0, 1):
            rows = called(0, far + random.integers(1, 6, 8), 100 * turn + np.sort(random.integers(0, 130, 8)))
            keys = [(rank, comm) for comm in sorted(set(rows["comm"].tolist()))]
            job.recent[rank] = np.concatenate([job.recent.get(rank, rows[:0]), rows])
            job.traffic.update((key, Traffic()) for key in keys)
            job.handles.update(keys)
            job.places.setdefault(rank, {}).update((comm, None) for _, comm in keys)
            job.placed = np.concatenate([job.placed, placed(keys)])
            plain.recent.setdefault(rank, []).extend(pairs_of(rows, "comm", "ts_ns"))
            plain.known.update(keys)
            plain.in_memory.update(keys)
            plain.placed += keys
        number = int(random.integers(1, 14))
        events = about(0, random.choice([INIT, DESTROY, QUERY, SPLIT], number), 0, 0)
        events["pid"] = random.choice(list(ranks), number)
        events["handle"] = far + random.integers(0, 6, number)
        events["ts_ns"] = 100 * turn + random.integers(0, 130, number)
        side.control(events)
        for pid in np.unique(events["pid"]).tolist():
            plain.keep_control(ranks[pid], events[events["pid"] == pid])
        now = state(job)
        assert now.pop("handles") == plain.known
        plain.recent = {rank: calls for rank, calls in plain.recent.items() if rank in now["recent"]}
        assert now == vars(plain)


class Counted(np.ndarray[Any, Any]):
    """Counts how often anything is taken from it, or from what was."""

    taken: ClassVar[Counter[str]] = Counter()

    def __getitem__(self, key: Any) -> Any:
        self.taken["times"] += 1
        return super().__getitem__(key)


def test_communicators_that_come_and_go_have_what_is_kept_gone_through_once_a_turn() -> None:
    pairs = 1000
    events = [about(pid, [DESTROY, INIT] * pairs, 77, 5000 + np.arange(2 * pairs)) for pid in (1, 2)]
    events += [about(pid, INIT, 1000 + np.arange(pairs), 9000) for pid in (1, 2)]
    job = Job("job", 1)
    side = Side(job, {1: 0, 2: 0})
    job.recent[0] = called(1, 70 + np.arange(4096) % 10, np.arange(4096)).view(Counted)
    job.placed = placed([(0, 70 + comm) for comm in range(10)]).view(Counted)
    Counted.taken.clear()
    side.control(*events)
    assert Counted.taken["times"] < 40
    assert 77 not in job.recent[0]["comm"].tolist()
    assert len(job.recent[0]) == 4096 - 409
    assert 77 not in job.placed["comm"].tolist()


# ---- communicators without end


def test_new_communicators_take_no_more_while_no_alignment_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job("job", 1)
    job.alignment = job_module.Alignment(parts=iter(()), of={(0, 64 * comm) for comm in range(10)})  # type: ignore[arg-type]
    side = Side(job, {1: 0, 2: 1})
    forgets: list[int] = []
    forget = job.forget_old_communicators
    monkeypatch.setattr(job, "forget_old_communicators", lambda: (forgets.append(0), forget()))
    most = 2 * KEPT_COMMUNICATORS
    for turn in range(6):
        new = 64 * (1 + 5000 * turn + np.arange(5000))
        side.collectives(*(called(pid, new, turn) for pid in (1, 2)))
        places = sum(map(len, job.places.values()))
        assert max(len(job.traffic), len(job.handles), places) <= most
    assert len(forgets) == 6
    assert job.forgotten == 6 * 2 * 5000 - KEPT_COMMUNICATORS
    for turn in range(20):
        side.collectives(*(called(pid, 64 * np.arange(1, 100), turn) for pid in (1, 2)))
    assert len(forgets) == 6, "not before it is worth it"
    for turn in range(3):
        side.control(about(1, DESTROY, 7 + 64 * (5000 * turn + np.arange(5000)), turn))
        assert len(job.ended) <= most
    assert job.alignment.gone <= job.alignment.of, "however many are forgotten while it is under way"


def test_what_is_ended_of_those_that_are_called_is_known_whatever_else_there_is() -> None:
    job = Job("job", 1)
    side = Side(job, {1: 0})
    side.collectives(called(1, 7, [1, 2]))
    side.control(about(1, DESTROY, [7, *range(1000, 9000)], 3))
    assert job.ended == {(0, 7)}
    assert (0, 7) in job.traffic, "its last calls may show what it was for"


def align(job: Job) -> None:
    """Lines up what was made, and says what it is for."""
    job.forget_old_communicators()
    nothing = np.empty(0, COLLECTIVE)
    job.communicators = find_groups(
        [RankCalls(rank, job.recent.get(rank, nothing), control=control) for rank, control in job.control.items()]
    )
    job.find_mesh()


def made(pid: int, handles: Any, ts_ns: Any) -> NDArray[np.void]:
    """Communicators of a rank alone, each with its own id."""
    rows = about(pid, INIT, handles, ts_ns)
    rows["nranks"] = 1
    rows["data"][:, :8] = rows["handle"].copy().view(np.uint8).reshape(-1, 8)
    return rows


@pytest.mark.parametrize("ends", [False, True])
def test_communicators_that_nobody_calls_take_no_more(ends: bool) -> None:
    job = Job("job", 1)
    pids = range(1, 5)
    side = Side(job, {pid: pid - 1 for pid in pids})
    side.control(*(made(pid, 7, 1) for pid in pids))
    side.collectives(*(called(pid, 7, 2 + np.arange(50)) for pid in pids))
    for turn in range(1, 6):
        new = 1000 * turn + np.arange(500)
        side.control(*(made(pid, new, 1000 * turn + np.arange(500)) for pid in pids))
        align(job)
        assert len(job.placed) <= len(job.communicators) <= KEPT_COMMUNICATORS + 4
        assert {(rank, 7) for rank in range(4)} <= set(job_module._keys(job.placed)), "those that are called stay"
        if ends:
            side.control(*(about(pid, DESTROY, new, 1000 * turn + 600) for pid in pids))
    newest = job.placed["comm"][job.placed["comm"] != 7]
    assert ends or newest.min() >= 5244, "the newest"
    align(job)
    assert len(job.placed) == 4 + (0 if ends else KEPT_COMMUNICATORS)
    assert ends or job.forgotten == 5 * 4 * 500 - KEPT_COMMUNICATORS


def test_splits_are_counted_whether_what_they_made_is_remembered_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which split it was distinguishes communicators: all ranks must count alike."""
    monkeypatch.setattr(job_module, "KEPT_COMMUNICATORS", 3)
    monkeypatch.setattr(job_module, "MADE_OF_RANK", 1)
    job, whole = Job("job", 1), Job("job", 1)
    splits = about(1, SPLIT, 100 + np.arange(10), 10 + np.arange(10))
    splits["parent"] = 7
    for each in (job, whole):
        Side(each, {1: 0}).control(made(1, 7, 1), splits)
    align(job)
    of_all = find_groups([RankCalls(0, np.empty(0, COLLECTIVE), control=whole.control[0])])
    assert job.communicators["comm"].tolist() == [7, 108, 109]
    kept = np.isin(of_all["comm"], job.communicators["comm"])
    assert job.communicators["comm_group"].tolist() == of_all["comm_group"][kept].tolist()


@pytest.mark.parametrize("seed", range(60))
def test_a_mesh_is_what_it_was_with_every_row_there_ever_was(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "KEPT_CONTROL", 6)
    random = np.random.default_rng(seed)
    job = Job("job", 1)
    side = Side(job, {1: 0, 2: 1})
    rows: dict[KEY, NDArray[np.void]] = {}
    forget = job._forget_communicators

    def forgotten(gone: set[KEY]) -> None:
        forget(gone)
        for key in gone:
            rows.pop(key, None)

    monkeypatch.setattr(job, "_forget_communicators", forgotten)
    alive = [set(range(1, 9)), set(range(1, 9))]
    for turn in range(12):
        for rank, pid in ((0, 1), (1, 2)):
            calls = random.choice([INIT, DESTROY, QUERY], 4)
            handles = random.integers(1, 9, 4)
            side.control(about(pid, calls, handles, 100 * turn + np.arange(4)))
            for call, handle in zip(calls.tolist(), handles.tolist(), strict=True):
                if call != QUERY:
                    (alive[rank].discard if call == DESTROY else alive[rank].add)(handle)
            comms = random.choice(sorted(alive[rank]), 3) if alive[rank] else []
            if len(comms):
                side.collectives(called(pid, comms, 100 * turn + 10 + np.arange(3)))
        if random.random() < 0.5:
            job.forget_old_communicators()
        seen = {(rank, row["handle"]) for rank, events in job.control.items() for row in events if row["call"] == INIT}
        every = [(rank, comm) for rank in (0, 1) for comm in range(1, 9)]
        keys = [key for key in every if key in seen or random.random() < 0.3]
        found = placed(keys) if keys else job.placed[:0]
        found["comm_group"], found["nranks"] = random.integers(1, 4, len(found)), 2
        found["joined_by"] = random.choice(["unique_id", "traffic", "memory"], len(found))
        job.communicators = found
        rows = {key: row for key, row in rows.items() if key not in keys} | dict(zip(keys, found, strict=True))
        job.find_mesh()
        ever = np.array([*rows.values()], COMMUNICATOR) if rows else found
        assert job.mesh == find_mesh(ever, job.traffic, world=0)
        assert set(job_module._keys(job.placed)) <= rows.keys()


# ---- communicators that are asked about


class Asked:
    """A process that answers for each of its communicators and groups; how often it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, sizes: int = 1) -> None:
        self.places: list[int] = []
        self.groups: list[int] = []
        self.sizes = sizes
        monkeypatch.setattr(job_module, "rank_offset", lambda _: 24)
        monkeypatch.setattr(job_module, "read_place", self._place)
        monkeypatch.setattr(job_module, "read_group", self._group)

    def _place(self, _pid: int, handle: int, _offset: int) -> Place:
        self.places.append(handle)
        return Place(handle, 0, 2)

    def _group(self, _pid: int, handle: int, _layout: Any) -> Membership:
        self.groups.append(handle)
        return Membership("0", 0, 2 + handle % self.sizes)

    def side(self) -> Side:
        side = Side(Job("job", 1, owner=(1000, "")), {1: 0})
        side.members[1].target.libraries.append(
            SimpleNamespace(roles=("libnccl",), file=None, layout=SimpleNamespace(group=()))  # type: ignore[arg-type]
        )
        return side


def of_group(comms: Any, ts_ns: Any) -> NDArray[np.void]:
    """COLLECTIVE rows of PyTorch's process groups, with the groups' own counts."""
    rows = called(1, comms, ts_ns)
    rows["call"] = next(call.id for call in CALLS if call.layer is Layer.TORCH and call.kind == "AllReduce")
    rows["stream"] = 1
    return rows


def test_of_new_communicators_a_few_are_asked_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others when they are called again: each is, once."""
    asked = Asked(monkeypatch)
    side = asked.side()
    for turn in range(1, 5):
        side.collectives(called(1, 1 + np.arange(200), turn), of_group(1001 + np.arange(200), turn))
        asked_for = min(turn * MOST_ASKED, 200)
        assert asked.places == list(range(1, 1 + asked_for))
        assert asked.groups == list(range(1001, 1001 + asked_for))
    side.collectives(called(1, 1 + np.arange(200), 9), of_group(1001 + np.arange(200), 9))
    assert (len(asked.places), len(asked.groups)) == (200, 200)
    assert len(side.job.handles) == 400
    assert [group.turn for group in side.job.named[0].values()] == list(range(200))


def beside_another(asked: Asked) -> Any:
    """A job whose owner's account for look-ups is empty, while another owner's is traced."""
    side = asked.side()
    side.session.roster.jobs.append(Job("another", 1, owner=(1001, "")))
    side.session.fill_look_ups(1000.0)
    side.session.look_ups.spend((1000, ""), 100.0)
    return side


def test_the_first_communicators_of_a_rank_are_asked_about_whatever_else_its_owner_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job that begins has thousands of stacks that are new, which take from the same account."""
    asked = Asked(monkeypatch)
    side = beside_another(asked)
    for turn in range(1, 5):
        side.collectives(called(1, 1 + np.arange(40 * turn), turn), of_group(1001 + np.arange(40 * turn), turn))
    assert len(asked.places) + len(asked.groups) == 256
    assert set(range(1, 121)) <= set(asked.places)
    assert set(range(1001, 1121)) <= set(asked.groups)
    assert side.session.losses.of(side.job)["look_ups_over_share"] == 2 * 160 - 256


def test_communicators_beyond_an_owner_s_share_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "ALWAYS_ASKED", 0)
    asked = Asked(monkeypatch)
    side = beside_another(asked)
    for turn in range(1, 5):
        side.collectives(called(1, 1 + np.arange(40), turn), of_group(1001 + np.arange(40), turn))
    assert asked.places == asked.groups == []
    assert side.session.losses.of(side.job)["look_ups_over_share"] == 80
    side.session.fill_look_ups(9000.0)
    side.collectives(called(1, [41], 9), of_group([1041], 9))
    assert (asked.places, asked.groups) == ([41], [1041])


@pytest.mark.parametrize("seed", range(20))
def test_turns_of_groups_are_what_they_were_one_by_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(seed)
    side = Asked(monkeypatch, sizes=3).side()
    plain: dict[int, Membership] = {}
    for turn in range(8):
        comms = random.integers(1, 60, 12)
        side.collectives(of_group(comms, turn))
        for handle in sorted(set(comms.tolist()) - plain.keys()):
            size = 2 + handle % 3
            alike = [one.turn for one in plain.values() if one.size == size]
            plain[handle] = Membership("0", 0, size, max(alike, default=-1) + 1)
        assert side.job.named[0] == plain
        gone = random.choice(sorted(plain), 5)
        side.job._forget_communicators({(0, int(handle)) for handle in gone})
        for handle in gone.tolist():
            plain.pop(handle, None)


class Watched(dict[int, Membership]):
    """Groups; how often they were gone through."""

    times = 0

    def values(self) -> Any:
        self.times += 1
        return super().values()


def test_groups_of_a_rank_are_gone_through_once_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Asked(monkeypatch).side()
    groups = side.job.named[0] = Watched()
    for turn in range(4):
        side.collectives(of_group(1 + 50 * turn + np.arange(50), turn))
    assert groups.times == 4
    assert len(groups) == 200


# ---- many jobs of an owner


class Ending:
    """Jobs of owner 1000 that are over, beside one of owner 1001; what it takes to store their last steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, took_s: float, *, alone: bool = False) -> None:
        self.cpu_s, self.took_s = 0.0, took_s
        self.jobs = [Job(f"over {k}", 1, owner=(1000, "")) for k in range(number)]
        for job in self.jobs:
            job.over_since = 100.0
        self.other = Job("other", 1, owner=(1001, ""))
        jobs = self.jobs if alone else [*self.jobs, self.other]
        self.session: Any = a_session(SimpleNamespace(append=lambda *_: None), jobs=jobs)
        gpu: Any = SimpleNamespace(collects=False)
        probing: Any = SimpleNamespace(take_note=lambda _: None)
        self.calls = CallSide(self.session, gpu, probing, *[SimpleNamespace()] * 2)  # type: ignore[arg-type]
        self.stored: list[str] = []
        monkeypatch.setattr(self.calls._steps, "store", self._store)
        monkeypatch.setattr(call_shares, "time", SimpleNamespace(thread_time=lambda: self.cpu_s))

    def _store(self, job: Job, *_: Any, final: bool) -> None:
        assert final
        self.cpu_s += self.took_s
        self.stored.append(job.name)

    def turn(self, now_s: float) -> float:
        before_s = self.cpu_s
        self.calls.work(now_s)
        return self.cpu_s - before_s

    def left_out(self) -> list[int]:
        return [self.session.losses.of(job).get("last_steps_over_share", 0) for job in self.jobs]


def test_jobs_that_end_together_take_their_owner_s_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may have tens of thousands of ends of steps that wait."""
    ending = Ending(monkeypatch, 40, 0.8)
    took = [ending.turn(100.0 + 0.25 * turn) for turn in range(3, 40)]
    assert max(took) <= 2 * 0.8
    assert sum(took) <= call_shares.OF_LOOP * 10 + 2 * 0.8
    assert len(ending.stored) == len(set(ending.stored)) == sum(job.finished for job in ending.jobs) >= 5
    assert ending.left_out() == [0] * 40
    # For those that it has no time for until then, it will have none.
    for turn in range(40, 60):
        ending.turn(100.0 + 0.25 * turn)
    assert all(job.finished for job in ending.jobs)
    assert sum(ending.left_out()) == 40 - len(ending.stored)
    assert not any(ending.session.losses.of(ending.other).values())


def test_jobs_of_who_is_alone_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = Ending(monkeypatch, 40, 0.8, alone=True)
    ending.turn(101.0)
    assert len(ending.stored) == 40
    assert ending.left_out() == [0] * 40


# ---- how often rings are drained


@pytest.mark.parametrize(
    ("what", "longest_s"), [("nothing", 0.1), ("children", 0.05), ("new", 0.02), ("gpu", 0.02), ("many", 0.02)]
)
def test_rings_that_bring_little_are_drained_less_often(what: str, longest_s: float) -> None:
    """With --children 500 quiet ranks were gone through 50 times a second, for forks that nobody made."""
    side = Side(Job("job", 1), {7: 0}, a_session(children=what == "children"))
    calls = side.calls
    calls._gpu = SimpleNamespace(collects=what == "gpu")  # type: ignore[assignment]
    calls._rings = SimpleNamespace(used=0.1 if what == "many" else 0.0, take=lambda: ({"launches": []}, 1))  # type: ignore[assignment]
    calls.soon = what == "new"
    for _ in range(20):
        calls.drain()
    assert calls.poll_s == pytest.approx(longest_s)


def test_a_window_is_taken_note_of_before_calls_are_fed_that_were_made_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    job, done = Job("job", 1), list[Any]()
    calls = Side(job, {7: 0}).calls
    calls._gpu = SimpleNamespace(collects=True, feed_calls=lambda _: None, feed_products=lambda _: None)  # type: ignore[assignment]
    calls._probing.take_note = done.append  # type: ignore[method-assign]
    monkeypatch.setattr(calls, "_work", lambda *_, **__: done.append("fed"))
    calls.drained_ns = 123
    calls.work(1.0)
    assert done == [123, "fed"]
