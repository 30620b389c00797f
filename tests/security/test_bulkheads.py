"""What fails for one process, one job, one part or one row costs that alone, and is counted."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
import warnings
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from rich.console import Console

from argus.capture.process.targets import Identity
from argus.cli import session
from argus.cupti import buffers, shared
from argus.cupti.buffers import Buffers
from argus.diagnose.follow.standing import News
from argus.diagnose.follow.watch import Watch
from argus.diagnose.iteration.changes import Detector
from argus.live import bulkhead
from argus.live import tracer as trace
from argus.live.bulkhead import STALL_S, Bulkheads, Watchdog
from argus.live.job import Job, Member
from argus.live.options import Options
from argus.live.roster import Roster
from argus.live.sides import flags
from argus.live.sides.flags import FlagWatcher
from argus.live.sides.gpu_times import GpuSide
from argus.live.tracer import Tracer
from argus.model import losses, records
from argus.model.calls import BY_SYMBOL
from argus.model.errors import ArgusError
from argus.model.losses import EVERYBODY, Whom
from argus.model.records import LOSS_COUNTERS
from argus.model.units import seconds
from argus.store.arrow import to_arrow
from argus.store.open import open_store
from argus.store.writer import Writer
from argus.system import limits
from argus.tables.arrow import Origin
from tests.builders.live_views import a_view
from tests.builders.sessions import a_session
from tests.stores import new_store, rows
from tests.unit.live.sides.test_stack_samples import PID, Session


@pytest.fixture(autouse=True)
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted faults leave no tracebacks in the user's folder."""
    monkeypatch.setattr(bulkhead.debug, "crash", lambda failure: None)


# ---- the parts


def test_a_part_that_fails_is_counted_and_reported_once() -> None:
    output: list[str] = []
    heads = Bulkheads(output.append)
    for _ in range(5):
        with heads.part("stacks"):
            assert heads.doing == "stacks"
            raise ValueError("\x1b]0;owned\x07")
    assert heads.counters == {"turns_failed": 5}
    assert output == ["stacks failed (ValueError: \\x1b]0;owned\\x07); the rest of the trace goes on"]
    assert heads.doing == ""
    with heads.part("stacks"), heads.job(Job("j", 1)), heads.process(7, "stacks", list):
        pass
    assert sum(heads.counters.values()) == 5


def test_an_interrupt_passes() -> None:
    heads = Bulkheads()
    with pytest.raises(KeyboardInterrupt), heads.part("stacks"):
        raise KeyboardInterrupt
    assert not heads.counters


def test_what_fails_of_one_job_is_no_other_jobs_loss() -> None:
    """What failed of no job that is known concerns those of its user; what failed of Argus concerns all."""
    heads = Bulkheads()
    hostile, honest, same_user = (Job(name, 1, owner=(uid, "")) for name, uid in (("x", 5), ("y", 6), ("z", 5)))

    def fail(guard: Any) -> None:
        with guard:
            raise ValueError

    fail(heads.job(hostile))
    fail(heads.part("stacks of process 7", hostile))
    fail(heads.process(7, "stacks", list, hostile))
    fail(heads.process(8, "libraries", list, None, lambda pid: {8: (5, "")}[pid]))
    assert heads.counters == {"job_turns_failed": 1, "turns_failed": 1, "processes_quarantined": 2}
    assert heads.losses.of(hostile) == {"job_turns_failed": 1, "turns_failed": 1, "processes_quarantined": 2}
    assert heads.losses.of(same_user) == {"job_turns_failed": 0, "turns_failed": 0, "processes_quarantined": 1}
    assert not any(heads.losses.of(honest).values())
    fail(heads.part("the store"))
    fail(heads.process(9, "libraries", list))
    assert heads.losses.of(honest) == {"job_turns_failed": 0, "turns_failed": 1, "processes_quarantined": 1}


def test_users_that_are_counted_apart_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "OWNERS", 2)
    heads = Bulkheads()
    for uid in range(4):
        with heads.process(7, "libraries", list, None, lambda pid, uid=uid: (uid, "")):  # type: ignore[misc]
            raise ValueError
    assert len(heads.losses._of_owner) == 2
    assert (
        heads.losses.of(Job("j", 1, owner=(0, "")))["processes_quarantined"] == 3
    )  # its own, and two that are nobody's


def test_a_quarantine_that_fails_too_ends_nothing() -> None:
    heads = Bulkheads()

    def quarantine() -> None:
        raise MemoryError

    with heads.process(7, "stacks", quarantine):
        raise ValueError
    assert heads.counters == {"processes_quarantined": 1, "turns_failed": 1}


# ---- stacks


def test_a_process_whose_stacks_cannot_be_read_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its memory makes Argus raise what nobody foresaw."""
    session = Session(monkeypatch)
    session.sampler.stack(11, "getppid")
    session.sampler.row(11, count=3)
    session.go()
    assert session.functions == ["getppid"]
    process = session.side._processes.by_pid[PID]
    removed: list[int] = []
    monkeypatch.setattr(session.sampler, "remove_target", removed.append)

    def refresh() -> bool:
        raise OverflowError("a planted fault")

    monkeypatch.setattr(process.threads, "usage", lambda now_ns: refresh())
    for _ in range(3):
        session.go(20.0)
        session.side.look(session.now)
    assert process.quarantined
    assert removed == [PID]
    assert session.side._session.bulkheads.counters == {"processes_quarantined": 1}
    output = [row for row in session.features if row["feature"] == "sampling"][-1]
    assert output["state"] == ["failed"]


def test_a_process_that_cannot_even_be_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(monkeypatch)

    def add(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(session.side._processes, "_add", add)
    job: Any = Job("k", 7)
    job.members[1] = SimpleNamespace(rank=0, state="traced")
    session.shared.roster.jobs.append(job)
    for _ in range(4):
        session.side.look(session.now)
    assert session.side._session.bulkheads.counters == {"processes_quarantined": 1}
    assert PID in session.side._processes.by_pid


def test_a_job_whose_rows_cannot_be_made_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(monkeypatch)

    def write(*_: Any) -> None:
        raise ValueError("a planted fault")

    monkeypatch.setattr(session.side._rows, "_write_counts", write)
    session.sampler.stack(11, "getppid")
    session.sampler.row(11)
    session.go()
    session.go()
    assert session.side._session.bulkheads.counters["job_turns_failed"] >= 1
    assert not session.side._processes.by_pid[PID].quarantined


# ---- GPU times


def a_gpu_side() -> Any:
    side = GpuSide(a_session(MagicMock()), MagicMock())
    for pid in (7, 8):
        target: Any = SimpleNamespace(pid=pid, start_ticks=1, on_gpu=True, identity=Identity())
        side._add(_process(side, target))
    return side


def _process(side: Any, target: Any) -> Any:
    from argus.live.gpu.process import GpuProcess

    member: Any = SimpleNamespace(rank=target.pid, state="traced", target=target, launches=0)
    job: Any = Job("j", 1)
    return GpuProcess(target, 0.0, job=job, member=member)


@pytest.mark.parametrize("failure", [IndexError("a planted fault"), MemoryError()])
def test_a_process_whose_records_cannot_be_read_is_left_alone(failure: Exception) -> None:
    side = a_gpu_side()
    bad, good = side._processes
    polled: list[float] = []

    def poll(now: float) -> None:
        raise failure

    bad.program.poll = poll
    good.program.poll = polled.append
    good.program.collector._next_look = 0.0
    for now in (1.0, 2.0, 3.0):
        side.poll(now)
    assert polled == [1.0, 2.0, 3.0]
    assert side._session.bulkheads.counters == {"processes_quarantined": 1}
    assert bad.state == ("failed", "what its memory holds could not be read")
    assert side.shares()[7] == (0.0, "what its memory holds could not be read")


class Flipping:
    """The helper's memory, of which the process changes a record between the walk and what follows."""

    def __init__(self, buffer: np.ndarray[Any, Any], kind: int) -> None:
        self.kind = kind
        self.bytes = buffer
        self.index = np.zeros(len(buffer) // 8, np.uint32)
        self.slots = np.zeros(1, shared.SLOT)
        self.slots["state"], self.slots["valid"] = shared.SlotState.FULL, len(buffer)
        self.slot_states = self.slots["state"]

    def buffer(self, slot: int, nbytes: int) -> tuple[Any, Any]:
        return self.bytes, self.index

    def buffer_there(self, slot: int, nbytes: int) -> tuple[int, int]:
        return nbytes, 4 * len(self.index)

    def load(self, name: str) -> int:
        return 0

    def fence(self) -> None: ...


def test_records_that_change_between_walk_and_look_up_do_no_harm() -> None:
    pytest.importorskip("cupti.cupti")
    from argus.cupti import layouts

    known = layouts.for_version(130400)
    small, large = known.kind("MEMSET"), max(known.names, key=lambda kind: max(known.names[kind], default=0))
    size = known.dtype(small).itemsize
    assert max(known.names[large]) + 8 > 8, "it holds a pointer"
    data = np.zeros(-(-size // 8) * 8 + 8, np.uint8)
    memory: Any = Flipping(data, large)
    last = len(data) - 8
    made: Any = Buffers(7)
    made.layouts, made.geometry = known, (1, len(data))
    made.texts = SimpleNamespace(at=lambda pointers: [b"name"] * len(pointers), close=lambda: None)
    made.claim = lambda address: 1

    def walk(buffer: Any, table: Any) -> tuple[Any, int]:
        # What the walk saw was a record of a kind without a name; by now it is one with a name beyond the end.
        data[last : last + 4] = np.array([large], "<u4").view(np.uint8)
        buffer[last : last + 4] = data[last : last + 4]  # as if it had been flipped before the copy
        return np.array([0, last], np.uint32), 0

    made.walk = walk
    batches: list[Any] = []
    made.take(memory, batches)
    assert len(batches) == 1


@pytest.mark.parametrize(("state", "left"), [("READY", False), ("FULL", False), ("FULL", True), ("LENT", True)])
def test_what_was_checked_is_what_is_read(monkeypatch: pytest.MonkeyPatch, state: str, left: bool) -> None:
    """Whoever walked the buffer, while the process lives or after: what it goes on writing there has no effect."""
    pytest.importorskip("cupti.cupti")
    from argus.cupti import layouts

    known = layouts.for_version(130400)
    total = shared.total_bytes(1, 1 << 14)
    fd = os.memfd_create("argus-test")
    os.truncate(fd, total)
    memory = shared.Memory(fd, total)
    buffer, index = memory.buffer(0, 1 << 14)
    made = np.zeros(7, known.dtype(known.kind("CONCURRENT_KERNEL")))
    ended = time.monotonic_ns()
    made["kind"], made["correlation_id"] = known.kind("CONCURRENT_KERNEL"), range(7)
    made["start"], made["end"] = ended - 100, ended
    buffer[: made.nbytes], index[:7] = made.view("u1"), np.arange(0, made.nbytes, made.itemsize)
    memory.slots[0]["valid"], memory.slots[0]["count"] = made.nbytes, 7
    memory.slot_states[0] = shared.SlotState[state]

    def meanwhile(function: Any) -> Any:
        def changed(*words: Any, **options: Any) -> Any:
            buffer[:], index[:] = 0xFF, 0xFFFFFFFF
            return function(*words, **options)

        return changed

    walk = meanwhile(buffers.load_walk())
    monkeypatch.setattr(buffers, "load_walk", lambda: walk)
    monkeypatch.setattr(buffers, "decode", meanwhile(buffers.decode))
    found = Buffers(7)
    found.layouts, found.geometry, found.since_ns = known, (1, 1 << 14), ended - 1000
    found.claim, found.walk = lambda address: 1, walk
    batches: list[Any] = []
    (found.take_left if left else found.take)(memory, batches)
    assert [batch.gpu["correlation"].tolist() for batch in batches] == [list(range(7))]
    assert not found.rejected
    os.close(fd)


# ---- the session


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(trace.spill, "place", lambda target: None)
    store: Any = SimpleNamespace(target=None, spooled=True, close=lambda: None)
    made: Any = Tracer(store, Options(stacks=True))
    made.session.writer = MagicMock()
    made.session.writer.close.return_value = SimpleNamespace(dropped={}, on_disk={}, last_error="")
    made.session.writer.counters.return_value = {}
    made.rows = {}

    def append(table: str, rows: Any) -> int:
        made.rows.setdefault(table, []).append(rows)
        return 1

    made.session.writer.append = append
    for name in ("_gpu", "_stacks", "_kernels", "_probing", "_flags", "_budget"):
        real = getattr(made, name)
        one = MagicMock()
        one.name, one.parts, one.punctual, one.due = real.name, real.parts, real.punctual, float("inf")
        one.counters.return_value = one.own_losses.return_value = {}
        one.summary.return_value = []
        one.observed.return_value = {}
        one.loading = False
        setattr(made, name, one)
        made.sides[made.sides.index(real)] = one
    made._calls._gpu = made._calls._steps._gpu = made._gpu
    made._calls._probing = made._probing
    made._gpu.stopped = True
    probes = made.session.probes = MagicMock()
    probes.counters.return_value = dict.fromkeys(LOSS_COUNTERS, 0)
    probes.in_progress.return_value = []
    rings = probes.rings.return_value = {}
    for name, dtype in (
        ("launches", records.LAUNCH),
        ("collectives", records.COLLECTIVE),
        ("control", records.CONTROL),
        ("marks", records.MARK),
        ("math", records.MATH),
    ):
        ring = rings[name] = getattr(probes, name)
        ring.discarded = ring.used = 0
        ring.drain.return_value = np.empty(0, dtype)
    roster = made._roster = made.session.roster = MagicMock()
    identity = Identity()
    target = SimpleNamespace(
        pid=7, identity=identity, exe="x", command="x", started_unix=0.0, libraries=[], on_gpu=False
    )
    job = Job("j", 1)
    job.members[7] = Member(target, 0, "order")  # type: ignore[arg-type]
    roster.jobs, roster.by_pid, roster.attached = [job], {}, []
    roster.leaving.return_value = []
    roster.candidates.return_value = []
    roster.family.missed_calls = roster.family.missed_events = roster.family.failures = 0
    roster.family.state = "on"
    probes.refused = {}
    roster.counters.return_value = roster.own_losses.return_value = {}
    roster.whom.return_value = EVERYBODY
    made._calls.open()
    return made


SIDES = {
    "_gpu.poll": "GPU times",
    "_probing.poll": "windows",
    "_budget.poll": "overhead",
    "_stacks.poll": "stacks",
    "_stacks.work": "stacks",
    "_stacks.look": "stacks",
    "session.roster.look": "processes",
    "session.roster.retire": "processes",
    "_kernels.work": "kernels",
    "_gpu.work": "GPU times",
    "session.writer.maybe_flush": "the store",
}


def test_the_turns_of_these_tests_fail_for_what_is_planted_alone(tracer: Any) -> None:
    for _ in range(3):
        tracer._work_due = tracer._look_due = tracer._quick_look_due = 0.0
        tracer.poll()
    assert tracer.bulkheads.counters["turns_failed"] == 0, tracer.notes()


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("failure", [ValueError("a planted fault"), MemoryError(), ArgusError("no", "")])
def test_a_side_that_raises_ends_no_turn(tracer: Any, side: str, failure: Exception) -> None:
    attrgetter(side)(tracer).side_effect = failure
    for _ in range(3):
        tracer._work_due = tracer._look_due = tracer._quick_look_due = 0.0
        tracer.poll()
    assert tracer.bulkheads.counters["turns_failed"] >= 3
    if side != "_stacks.work":
        assert tracer._stacks.work.call_count == 3
    assert tracer.lost()["turns_failed"] >= 3


STOPS = (
    "_gpu.begin_stop", "session.roster.family.close", "session.probes.detach", "_stacks.stop", "session.roster.look",
    "session.probes.in_progress", "_gpu.work", "_kernels.work", "_budget.close", "_gpu.close", "session.probes.close",
    "session.roster.close",
)  # fmt: skip


@pytest.mark.parametrize("side", STOPS)
def test_the_last_coverage_is_written_whatever_fails_at_the_end(tracer: Any, side: str) -> None:
    attrgetter(side)(tracer).side_effect = ValueError("a planted fault")
    tracer.stop()
    assert len(tracer.rows["coverage"]) == 1
    found = tracer.rows["coverage"][0]
    to_arrow("coverage", found)
    if not side.endswith(".close") or side == "session.roster.family.close":
        at = found["counter"].index("turns_failed")
        assert (found["value"][at] > 0, found["loss"][at]) == (True, True)
    assert tracer.rows["jobs"][-1]["ended"] is not None
    assert tracer.session.writer.close.call_count == 1


def test_the_last_coverage_is_written_though_no_counter_can_be_read(tracer: Any) -> None:
    tracer.session.probes.counters.side_effect = OSError("gone")
    lost = tracer.stop()
    found = tracer.rows["coverage"][-1]
    assert "turns_failed" in found["counter"]
    assert "hits" not in found["counter"]
    assert lost["turns_failed"] >= 1


def test_the_last_coverage_is_written_though_a_side_raised_in_the_middle(tracer: Any) -> None:
    """As Tracer.stop is called when whoever polls has failed."""
    tracer._gpu.counters.side_effect = OverflowError("a planted fault")
    tracer.poll()
    tracer.stop()
    assert "turns_failed" in tracer.rows["coverage"][-1]["counter"]


def test_a_job_that_cannot_be_worked_on_costs_no_other(tracer: Any) -> None:
    jobs = [Job("bad", 1), Job("good", 1)]
    tracer.session.roster.jobs = jobs
    tracer.session.roster.by_pid = {7: (jobs[0], MagicMock(rank=0)), 8: (jobs[1], MagicMock(rank=0))}
    worked: list[str] = []

    def store(job: Job, now: float, drained_ns: int, *, final: bool) -> None:
        worked.append(job.name)
        if job.name == "bad":
            raise ValueError("a planted fault")

    tracer._calls._steps.store = store
    tracer._calls._drained["control"] = [np.zeros(1, records.CONTROL)]
    tracer._gpu.callers.return_value = set()
    tracer.session.roster.adopt_callers.return_value = False
    tracer._calls._work(1.0, final=False)
    assert worked == ["bad", "good"]
    assert tracer.bulkheads.counters == {"job_turns_failed": 1}
    tracer._write_coverage(jobs)
    failed = {}
    for row in tracer.rows["coverage"][-2:]:
        failed[row["job"]] = row["value"][row["counter"].index("job_turns_failed")]
    assert failed == {"bad": 1, "good": 0}


def test_calls_beyond_an_owner_s_part_of_the_time_are_left_out_and_counted(tracer: Any) -> None:
    jobs = [Job("heavy", 1, owner=(1000, "")), Job("light", 1, owner=(1001, ""))]
    tracer.session.roster.jobs = jobs
    members = [Member(SimpleNamespace(pid=pid, has=lambda role: False), 0, "order") for pid in (7, 8)]  # type: ignore[arg-type]
    tracer.session.roster.by_pid = {7: (jobs[0], members[0]), 8: (jobs[1], members[1])}
    tracer.session.roster.whom = lambda pid: Whom(tracer.session.roster.by_pid[pid][0])
    tracer._calls._steps.store = lambda *_, **__: None
    tracer._gpu.callers.return_value = set()
    tracer._calls._probing.until_ns.return_value = 1 << 62
    tracer.session.roster.adopt_callers.return_value = False
    launches = np.zeros(5000, records.LAUNCH)
    launches["pid"], launches["call"] = [*[7] * 4000, *[8] * 1000], BY_SYMBOL["cuLaunchKernel"].id
    launches["ts_ns"] = np.arange(5000) + 1
    shares = tracer._calls._shares
    shares.begin_turn(1.0)
    shares._turns.spend(jobs[0].owner, 100.0)
    for final in (False, True):
        tracer._calls._drained["launches"] = [launches]
        tracer._calls._work(1.0, final=final)
        assert tracer._gpu.feed_calls.call_count == 0
        assert [member.launches for member in members] == ([4000, 2000] if final else [0, 1000])
    assert tracer.bulkheads.losses.of(jobs[0])["calls_over_share"] == 4000
    assert tracer.bulkheads.losses.of(jobs[1]).get("calls_over_share", 0) == 0
    assert tracer.counters()["calls_over_share"] == (4000, True)
    assert shares._turns.left_s(jobs[1].owner) < 4.0, "what is worked on is taken off"


def test_detectors_that_failed_are_in_the_coverage_of_their_job(tracer: Any) -> None:
    jobs = [Job("bad", 1), Job("good", 1)]
    for failed in (1, 1, 3, 2):
        tracer.bulkheads.diagnosed(jobs[0], failed)
    assert tracer.bulkheads.counters == {"detectors_failed": 3}
    tracer._write_coverage(jobs)
    rows = {row["job"]: dict(zip(row["counter"], row["value"], strict=True)) for row in tracer.rows["coverage"][-2:]}
    assert (rows["bad"]["detectors_failed"], rows["good"]["detectors_failed"]) == (3, 0)


def test_a_job_whose_last_steps_fail_costs_no_other(tracer: Any) -> None:
    over = [Job("bad", 1), Job("good", 1)]
    tracer.session.roster.jobs = over
    stored: list[tuple[str, bool]] = []

    def store(job: Job, now: float, drained_ns: int, *, final: bool) -> None:
        stored.append((job.name, final))
        if job.name == "bad":
            raise ValueError("a planted fault")

    tracer._calls._steps.store = store
    for job in over:
        job.over_since = 1.0
    for now in (1.1, 2.0, 3.0):
        tracer._calls.work(now)
    assert stored == [("bad", True), ("good", True)], "once, and not at once"
    assert tracer.bulkheads.counters == {"job_turns_failed": 1}
    assert all(job.finished for job in over)


def test_nothing_is_kept_of_a_job_that_is_over(tracer: Any) -> None:
    over = Job("over", 3)
    for rank in range(100):
        tracer._rows._parts_written |= {("over", 3, rank), ("j", 1, rank)}
    tracer.session.roster.take_over.return_value = [over]
    tracer._forget_jobs(1.0)
    assert tracer._rows._parts_written == {("j", 1, rank) for rank in range(100)}
    for side in (tracer._gpu, tracer._stacks, tracer._kernels, tracer._probing):
        side.forget.assert_called_with(over)
    assert over.finished


# ---- who is traced


def test_a_process_whose_libraries_cannot_be_read_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    session = a_session(run=1)
    session.probes = MagicMock()
    roster = Roster(session, MagicMock())
    roster.family.refresh = lambda: ([], [])  # type: ignore[method-assign]
    looked: list[int] = []

    def look(pid: int, target: Any) -> bool:
        looked.append(pid)
        if pid == 7:
            raise RecursionError
        return False

    monkeypatch.setattr(roster, "_look_for_libraries", look)
    job = Job("j", 1)
    for pid in (7, 8):
        member: Any = SimpleNamespace(state="traced", target=SimpleNamespace(identity=Identity(-1, 0, -1, "j")))
        roster.by_pid[pid] = (job, member)
    roster.look(1.0)
    roster.look(2.0)
    assert looked == [7, 8, 8]
    assert session.bulkheads.counters == {"processes_quarantined": 1}


def test_jobs_that_are_forgotten_together_have_their_last_rows_and_the_counters_are_read_once(tracer: Any) -> None:
    """Thousands may end in one second: a few are forgotten in each look. One that fails costs itself."""
    over = [Job(f"over {number}", 1) for number in range(5)]
    written: list[Job] = []
    forgotten: list[Job] = []
    tracer._roster.take_over.side_effect = lambda now, linger_s, most: over if most < 50 else pytest.fail("so many")

    def write_job(job: Job, *, ended: bool) -> None:
        if job is over[1]:
            raise ValueError("a planted fault")
        written.append(job)

    tracer._rows.write_job, tracer._rows.forget = write_job, forgotten.append
    tracer.rows.clear()
    tracer._forget_jobs(1000.0)
    assert [rows["job"] for rows in tracer.rows["coverage"]] == [job.name for job in over]
    assert written == [job for job in over if job is not over[1]]
    assert tracer.session.probes.spent_of_all.call_count == 1
    assert forgotten == over
    assert over[1].losses == {"job_turns_failed": 1}


def test_a_job_that_comes_again_after_it_was_forgotten_is_a_new_run() -> None:
    session = a_session(run=5)
    session.probes = MagicMock()
    roster = Roster(session, MagicMock())
    for number in range(20):
        job = Job(f"job {number}", 5)
        job.over_since = 1.0
        roster.jobs.append(job)
        roster._current[job.name] = job
    assert len(roster.take_over(1000.0, 10.0)) == 12
    target: Any = SimpleNamespace(identity=Identity(0, 0, 0, "job 3"))
    again, _ = roster._place(target)
    assert again.run > 5, "rows of run 5 are there"
    other: Any = SimpleNamespace(identity=Identity(0, 0, 0, "never seen"))
    assert roster._place(other)[0].run == 5


# ---- the diagnosis


def test_the_diagnosis_of_one_job_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = SimpleNamespace(target=None, spooled=False)
    monkeypatch.setattr("argus.diagnose.follow.watch.Store", lambda *_, **__: store)
    watch = Watch(store, "host", interval_s=0.0)
    watch._runs = {("bad\x1b[2J", 1), ("good", 1)}
    judged: list[str] = []

    def judge(job: str, run: int) -> float:
        judged.append(job)
        if len(judged) >= 5:
            watch._stop.set()
        if job.startswith("bad"):
            raise KeyError("a planted fault")
        return 0.0

    monkeypatch.setattr(watch, "diagnose_run", judge)
    watch._go_on()
    assert judged == ["bad\x1b[2J", *["good"] * 4]
    assert watch.state == "on"
    assert watch.take() == [News("off", text="diagnosis of bad\\x1b[2J off: it failed (KeyError: 'a planted fault')")]


def test_series_without_a_number_raise_no_warning() -> None:
    """Of a job whose steps say nothing of their work: numpy warns of an all-NaN slice."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        detector = Detector(3, alarms=1000, work=2)
        rng = np.random.default_rng(1)
        for step in range(300):
            times = 1 + 0.01 * rng.random(3) + (step > 150)
            times[2] = np.nan
            detector.feed(step, times, np.full((3, 2), np.nan))
            detector.newest  # noqa: B018 - what is computed when it is asked for


# ---- the loop, the clock, the memory


def test_a_loop_that_hangs_is_reported_once_and_counted() -> None:
    output: list[str] = []
    dog = Watchdog(lambda: "stacks of process 7\x07", output.append)
    dog.expect(100.0)
    now = 99.0
    while now < 105.0:
        dog.look(now, cpu=now)
        now += 0.25
    assert dog.stalls == 1
    assert dog.longest_s > 4.0
    assert output == [
        f"the loop has not turned for {seconds(STALL_S + 0.25)}, at: stacks of process 7\\x07;"
        " the rings are read meanwhile"
    ]
    dog.expect(106.0)
    for now in (105.0, 105.25, 105.5):
        dog.look(now, cpu=now)
    assert dog.stalls == 1
    for now in np.arange(105.75, 108, 0.25).tolist():
        dog.look(now, cpu=now)
    assert dog.stalls == 2


def test_a_suspended_argus_has_not_stalled() -> None:
    """Ctrl-Z: nothing of it ran. Where it used its CPU meanwhile, it has."""
    for cpu, stalls in ((10.0, 0), (60.0, 1)):
        dog = Watchdog(lambda: "", lambda line: None)
        dog.expect(100.5)
        dog.look(100.0, cpu=10.0)
        dog.look(160.0, cpu=cpu)
        dog.look(160.25, cpu=cpu)
        assert dog.stalls == stalls


def test_a_trace_is_watched_while_it_turns_and_between_turns(tracer: Any) -> None:
    """Also its first turn, before which nothing is expected."""
    dog = tracer._watchdog

    def look(now: float, slack_s: float = 0.0) -> None:
        dog.look(now + 2 * STALL_S, cpu=now)

    tracer._stacks.poll.side_effect = look
    tracer.poll()
    assert any("the loop has not turned for 2.0 s, at: stacks;" in line for line in tracer.session.notes)
    look(tracer._polled + tracer.pace_s - 1.1 * STALL_S)
    assert dog.stalls == 1, "the next turn is not due yet"
    look(tracer._polled + tracer.pace_s)
    assert dog.stalls == 2, "it does not come"
    tracer._stacks.poll.side_effect, tracer._look_due, tracer._work_due = None, 0.0, 0.0
    tracer.poll()
    tracer.stop()
    look(tracer._polled + 100 * STALL_S)
    assert dog.stalls == 2, "after the end no turn is due"


def test_the_rings_of_a_trace_are_read_by_its_watchdog(tracer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the moment at which they are loaded, whether the loop turns or not."""
    monkeypatch.setattr(trace, "Probes", lambda **_: tracer.session.probes)
    monkeypatch.setattr(trace, "Roster", lambda *_, **__: tracer.session.roster)
    relieved = [threading.Event() for _ in tracer.sides]
    for side, event in zip(tracer.sides, relieved, strict=True):
        monkeypatch.setattr(side, "relieve", lambda now, event=event: event.set())
    tracer._load()
    try:
        assert all(event.wait(10) for event in relieved)
    finally:
        tracer._watchdog.close()


def test_a_clock_that_jumps_is_taken_over_and_reported(tracer: Any) -> None:
    before = tracer.session.mono_offset_ns
    tracer._compare_clocks(before + 900_000)
    assert tracer.session.mono_offset_ns == before, "a measurement is good to less than a millisecond"
    tracer._compare_clocks(before + 3_600_000_000_000)
    assert tracer.session.origin(tracer.jobs[0]) == Origin("j", 1, tracer.host, before + 3_600_000_000_000)
    assert tracer.session.now_ns() > before + 3_600_000_000_000
    job = tracer.rows["jobs"][-1]
    assert job["mono_offset_ns"] == before + 3_600_000_000_000
    assert job["started"][0] == tracer.started_ns + before, "it has not begun later"
    assert tracer.counters()["clock_jumps"] == (1, False)
    noted = tracer.session.notes[-1]
    assert noted.startswith("the wall clock jumped by +3,600 s")


def test_clocks_are_compared_each_minute(tracer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(tracer, "_compare_clocks", asked.append)
    tracer._clock_due = 1000.0
    for now in (900.0, 1000.0, 1030.0, 1059.9, 1060.0):
        tracer._see_to_itself(now, now)
    assert len(asked) == 2


def test_argus_dies_before_the_job() -> None:
    program = """
import resource
from argus.system.limits import frugal, unbounded
with frugal():
    score, limit = open("/proc/self/oom_score_adj").read().strip(), resource.getrlimit(resource.RLIMIT_DATA)[0]
    try:
        print(score, limit, len(bytearray(limit + (1 << 30))))
    except MemoryError:
        print(score, limit, "refused")
print(open("/proc/self/oom_score_adj").read().strip(), resource.getrlimit(resource.RLIMIT_DATA)[0])
with frugal():
    unbounded()
    print(resource.getrlimit(resource.RLIMIT_DATA)[0])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    inside, after, free = done.stdout.splitlines()
    assert inside == f"{limits.OOM_SCORE} {limits.DATA_BYTES} refused"
    assert after.split()[1] == free == "-1"
    assert int(after.split()[0]) < limits.OOM_SCORE


def test_the_engine_dies_before_the_tracer_and_leaves_the_job_most_memory(tmp_path: Path) -> None:
    with open_store(new_store(tmp_path)) as store:
        settings = dict(rows(store, "SELECT name, value FROM system.server_settings"))
        engine = (tmp_path / "store" / "lock").read_text().split()[0]
        score = int(Path(f"/proc/{engine}/oom_score_adj").read_text())
    assert settings["max_server_memory_usage_to_ram_ratio"] == "0.25"
    assert score == 500 > limits.OOM_SCORE


# ---- rows


def test_rows_that_are_too_large_cost_no_others() -> None:
    writer = Writer(open_store("clickhouse://127.0.0.1:1/argus"), source="test", max_bytes=200_000)

    def features(reason: str) -> dict[str, Any]:
        return {
            "job": "j", "run": 1, "rank": 0, "host": "h", "feature": "f", "state": ["on"], "reason": [reason],
            "version": 1,
        }  # fmt: skip

    for number in range(20):
        assert writer.append("features", features(str(number))) == 1
    assert writer.append("features", features("x" * 150_000)) == 0
    assert writer.append("features", features("x" * 10_000_000)) == 0
    assert not writer.rows_dropped
    assert writer.counters() == {"rows_too_large": (2, True)}
    assert sum(part.rows.num_rows for part in writer._pending["features"]) == 20


def test_text_that_is_no_unicode_is_stored_all_the_same() -> None:
    """Names of files that are no UTF-8 come as lone surrogates, and stand in reasons."""
    table = to_arrow(
        "features",
        {
            "job": "j", "run": 1, "rank": np.zeros(2, np.uint32), "host": "h\udcff", "feature": ["f", "g"],
            "state": ["off", "off"], "reason": ["/tmp/\udcff.so lacks the symbols", "fine"], "version": 1,
        },
    )  # fmt: skip
    assert table["reason"].to_pylist() == ["/tmp/\\udcff.so lacks the symbols", "fine"]
    assert table["host"].to_pylist() == ["h\\udcff"] * 2


def test_flags_are_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finding that stays flags a moment every few seconds, for weeks."""
    watcher = FlagWatcher(SimpleNamespace(spooled=False))  # type: ignore[arg-type]
    job: Any = SimpleNamespace()
    watcher._jobs = {("j", 1): job}
    clock = [10**18]
    rows: list[tuple[Any, ...]] = []
    settings: list[dict[str, Any]] = []

    def query(store: Any, sql: str, names: dict[str, Any], settings: Any) -> dict[str, Any]:
        columns = list(zip(*rows, strict=True)) or [()] * 7
        words = ("job", "run", "begin_ns", "end_ns", "ranks", "why", "asked_ms")
        found: dict[str, Any] = {}
        for word, column in zip(words, columns, strict=True):
            array = np.empty(len(column), object)
            array[:] = column
            found[word] = array
        assert names["most"] == flags.MOST
        return found

    monkeypatch.setattr(flags, "query_columns", query)
    monkeypatch.setattr(flags, "time", SimpleNamespace(time_ns=lambda: clock[0]))
    taken = 0
    for number in range(2000):
        clock[0] += 5 * 10**9
        rows.append(("j", 1, clock[0] - 10**9, clock[0], (), "slow", number))
        rows[:] = rows[-120:]  # of the last ten minutes
        watcher.ask()
        taken += len(watcher.take())
        assert len(watcher._seen) <= 250
    assert taken == 2000, "each once"
    assert not settings


def test_a_live_view_that_fails_becomes_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """As rich's markup once did, at a function called ``x[/bold]``."""
    closed: list[bool] = []

    class Broken:
        size = (80, 24)

        def __init__(self, *_: Any) -> None: ...

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            self.close()

        def close(self) -> None:
            closed.append(True)

        def draw(self, lines: Any) -> None:
            raise ValueError("a planted fault")

    class Traced:
        pace_s = 0.0
        jobs = ()
        polls = 0
        on_stall = None

        def __init__(self) -> None:
            self.notes: list[str] = []
            self.bulkheads = Bulkheads(self.notes.append)

        def done(self) -> bool:
            return self.polls >= 4

        def poll(self) -> None:
            self.polls += 1

        def raise_sampling(self, matters: list[str]) -> None: ...

        def news(self) -> list[str]:
            found, self.notes = self.notes, []
            return found

        def gpu_times(self) -> list[str]:
            return []

        def view(self) -> Any:
            return a_view()

    monkeypatch.setattr(session, "Screen", Broken)
    monkeypatch.setattr(session, "is_possible", lambda console: True)
    monkeypatch.setattr(session, "stdin_fd", lambda: -1)
    monkeypatch.setattr(session.interrupt, "pause", lambda stopping, seconds: None)
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: 100.0))
    output = io.StringIO()
    tracer: Any = Traced()
    session._watch(Console(file=output), tracer, [], None, None, False, None)
    assert tracer.polls == 4, "the trace went on"
    assert closed
    assert "note: the live view failed (ValueError: a planted fault)" in output.getvalue()
    assert tracer.bulkheads.counters == {"turns_failed": 1}
