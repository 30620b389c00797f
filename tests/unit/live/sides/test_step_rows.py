"""Steps and phases as rows, where marks are given up meanwhile."""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.capture.call_prices import CallPrices
from argus.live.cost.governor import Plan, Rung
from argus.live.job import Job, Member
from argus.live.sides.probing import ProbingSide
from argus.live.sides.step_rows import StepRows
from argus.model import records
from argus.model.calls import BY_SYMBOL
from argus.semantics.groups.communicators import COMMUNICATOR
from argus.semantics.phases.cpu import MARK, What
from argus.semantics.steps.range_names import Role
from tests.builders.sessions import Rows, a_session

MS = 10**6
STEP_MS, STEPS = 10, 60


class Target:
    """A process that has loaded PyTorch."""

    pid = 7
    identity = SimpleNamespace(world_size=1)

    def has(self, _library: str) -> bool:
        return True


class Nothing:
    """GPU times that nobody takes."""

    wants_math = False

    def feed_steps(self, *_: Any) -> None: ...

    def feed_segments(self, *_: Any) -> None: ...


def marks_of_step(number: int) -> list[tuple[int, int, int, int, int, int]]:
    """Backward from 2 to 6 ms of a step, the optimiser from 6 to 9."""
    begin = (100 + number * STEP_MS) * MS
    return [
        (begin + 2 * MS, 0, 7, What.BACKWARD_BEGIN, 0, 0),
        (begin + 6 * MS, 0, 7, What.BACKWARD_END, 0, 0),
        (begin + 6 * MS + 1, 0, 7, What.RANGE_BEGIN, Role.OPTIMIZER, 0),
        (begin + 9 * MS, 0, 7, What.RANGE_END, 0, 0),
    ]


@pytest.mark.parametrize("within_ms", [1, 4, 8])
def test_steps_after_ranges_were_given_up_have_no_phases(within_ms: int) -> None:
    """Wherever in a step that was: marks from before it that come late open nothing that never ends."""
    writer = Rows()
    job = Job("job", 1, groups_due=float("inf"))
    job.members[0] = member = Member(Target(), 0, "order")  # type: ignore[arg-type]
    rows = StepRows(a_session(writer, jobs=[job]), Nothing())  # type: ignore[arg-type]
    since = (100 + STEPS // 2 * STEP_MS + within_ms) * MS
    for number in range(STEPS):
        marks = np.array(marks_of_step(number), MARK)
        if number == STEPS // 2:
            early = marks["ts_ns"] < since
            job.thin_marks(since)
            job.feed_marks(member, marks[early])
            marks = marks[~early]
        if number >= STEPS // 2:
            marks = marks[marks["what"] == What.BACKWARD_BEGIN]
        job.feed_marks(member, marks)
        rows.store(job, float(number), (110 + (number + 1) * STEP_MS) * MS, final=False)
    steps, phased = (sorted({row["step"] for row in writer[table]}) for table in ("iterations", "phases"))
    assert len(steps) >= STEPS - 4
    assert STEPS // 2 - 3 <= len(phased) <= STEPS // 2 + 1
    assert phased == steps[: len(phased)]
    assert set(job.phase_ns) >= {"backward", "optimizer"}
    assert job.phase_ns["optimizer"] == pytest.approx(3 * MS * len(phased), rel=0.2)
    assert not job.phases


def test_the_time_before_a_first_window_counts_though_it_opened_before_steps_were_asked_for() -> None:
    """While the store opens nothing asks for steps: by then the first window may have begun."""
    writer = Rows()
    job = Job("job", 1, groups_due=float("inf"))
    job.members[0] = member = Member(Target(), 0, "order")  # type: ignore[arg-type]
    rows = StepRows(a_session(writer, jobs=[job]), Nothing())  # type: ignore[arg-type]
    begins = [(100 + number * STEP_MS) * MS for number in range(STEPS)]
    since = begins[20] + MS
    job.feed_marks(member, np.array([mark for number in range(20) for mark in marks_of_step(number)], MARK))
    job.thin_marks(since)
    job.pulse_spans = [(0, since)]
    ProbingSide._begin_passes(job, begins[40], seen=True)
    seen = [mark for number in range(40, STEPS) for mark in marks_of_step(number) if mark[3] == What.BACKWARD_BEGIN]
    job.feed_marks(member, np.array(seen, MARK))
    rows.store(job, 0.0, begins[-1] + STEP_MS * MS, final=False)
    stored = writer["iterations"]
    steps, ts = np.array([row["step"] for row in stored]), np.array([row["ts"].value for row in stored])
    assert len(steps) >= 35
    # Ends of optimisers divide steps at first, begins of backward passes, 3 ms later in each, thereafter.
    assert np.abs((ts - ts[0]) / (STEP_MS * MS) - (steps - steps[0])).max() < 1
    assert job.counters()["steps_not_observed"] == pytest.approx(20, abs=1)


def test_a_job_that_begins_after_backward_passes_are_seen_in_windows_has_steps() -> None:
    """As when a launcher starts its program again."""
    writer = Rows()
    session = a_session(writer)
    session.probes = SimpleNamespace(
        probed=set(), refused={}, pulse=set(), window_goes=False, wait_for_window=lambda: None
    )
    side = ProbingSide(session, Nothing())  # type: ignore[arg-type]
    side.plan = Plan((Rung.RANGES, Rung.BACKWARD), duty=0.25, length_s=0.1, period_s=0.4)
    side._due = float("inf")
    job = Job("job", 1, groups_due=float("inf"))
    job.members[0] = member = Member(Target(), 0, "order")  # type: ignore[arg-type]
    session.roster.jobs.append(job)
    rows = StepRows(session, Nothing())  # type: ignore[arg-type]
    side.poll(0.0)
    since = job.thin_since
    assert since > 0
    for number in range(200):
        begin = since + number * STEP_MS * MS
        if number % 40 == 10:
            side._begin_passes(job, begin, seen=True)
        if number % 40 == 20:
            assert job.pulse_spans is not None
            job.pulse_spans[-1] = job.pulse_spans[-1][0], begin
        if 10 <= number % 40 < 20:
            job.feed_marks(member, np.array([(begin + 2 * MS, 0, 7, What.BACKWARD_BEGIN, 0, 0)], MARK))
        rows.store(job, float(number), begin + STEP_MS * MS, final=False)
    stored = writer["iterations"]
    assert len(stored) == 5 * 9
    assert {row["duration_ns"] for row in stored} == {STEP_MS * MS}
    assert stored[-1]["step"] - stored[0]["step"] == pytest.approx(168, abs=1)


def test_windows_do_not_grow_in_search_of_a_pulse_of_a_job_that_is_over() -> None:
    """They do for one that runs, in which none is found."""
    lengths: dict[bool, list[float]] = {}
    for over in (False, True):
        session = a_session()
        opened = lengths.setdefault(over, [])

        def open_window(_subjects: Any, length: float, _only: Any, opened: list[float] = opened) -> Any:
            opened.append(length)
            return SimpleNamespace(
                begin_ns=len(opened) * 10**9,
                end_ns=0,
                subjects=("collectives",),
                hits=0,
                lacking=(),
                failure=None,
                over=True,
            )

        session.probes = SimpleNamespace(
            probed=set(),
            refused={},
            pulse=set(),
            open_window=open_window,
            settle_window=lambda _: None,
            window_goes=False,
            wait_for_window=lambda: None,
            prices_of=lambda files: CallPrices(*np.zeros((3, 256))),
        )
        side = ProbingSide(session, Nothing())  # type: ignore[arg-type]
        side.plan = Plan((Rung.COLLECTIVES,), duty=0.25, length_s=0.02, period_s=0.08)
        job = Job("job", 1, by_marks=False)
        session.roster.jobs.append(job)
        side._begin_search(job, 0, 1)
        job.calls_end = None  # the last by calls were taken
        side._jobs[id(job)][1].searched = None
        job.over_since = float(over)
        for turn in range(4):
            side._due = 0.0
            side.poll(float(turn))
            assert side._window is not None
            side._window.end_ns = side._window.begin_ns + 10**7
            side._end_window(side._window)
            side.find_pulses(1 << 62)
    assert lengths[True] == [0.02] * 4
    assert lengths[False] == [0.02, 0.04, 0.08, 0.16]


@pytest.mark.parametrize("by_marks", [None, True, False])
def test_ends_that_wait_when_a_trace_ends_are_counted_where_they_are_steps(
    by_marks: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of a job whose steps are found by its calls."""
    job = Job("job", 1, groups_due=float("inf"))
    job.members[0] = member = Member(Target(), 0, "order")  # type: ignore[arg-type]
    rows = StepRows(a_session(Rows(), jobs=[job]), Nothing())  # type: ignore[arg-type]
    job.feed_marks(member, np.array([mark for number in range(20) for mark in marks_of_step(number)], MARK))
    job.by_marks = by_marks
    monkeypatch.setattr("argus.live.sides.step_rows.is_waiting", lambda _: True)
    monkeypatch.setattr(rows, "store", lambda *_, **__: None)
    rows.store_last(job, 0.0, 0)
    assert job.counters()["step_ends_dropped"] == (0 if by_marks is False else 19)


def test_steps_whose_marks_were_dropped_are_stored_without_phases() -> None:
    writer = Rows()
    job = Job("job", 1, groups_due=float("inf"))
    job.members[0] = member = Member(Target(), 0, "order")  # type: ignore[arg-type]
    rows = StepRows(a_session(writer, jobs=[job]), Nothing())  # type: ignore[arg-type]
    job.feed_marks(member, np.array([mark for number in range(20) for mark in marks_of_step(number)], MARK))
    job.phases[0].keep(40)
    rows.store(job, 0.0, (110 + 20 * STEP_MS) * MS, final=False)
    stored = sorted((row["ts"].value, row["step"]) for row in writer["iterations"])
    dropped_ns = marks_of_step(9)[-1][0]
    assert len(stored) >= 17
    phased = sorted({row["step"] for row in writer["phases"]})
    begins = [ts - stored[0][0] + marks_of_step(0)[-1][0] for ts, _ in stored]
    assert phased == [step for (_, step), begin in zip(stored, begins, strict=True) if begin > dropped_ns]
    assert job.phased_steps == len(phased) >= 7
    assert job.counters()["steps_without_phases"] == len(stored) - len(phased) == 10
    assert job.phase_ns["optimizer"] == pytest.approx(3 * MS * len(phased), rel=0.01)


@pytest.mark.parametrize("counted_by", ["calls", "marks", "marks in a sample"])
def test_a_window_without_probes_on_a_file_is_no_window_of_its_jobs(counted_by: str) -> None:
    """Calls and marks of some of its ranks were not seen in it: steps would be counted that never were."""
    sample = counted_by == "marks in a sample"
    session = a_session()
    files = {"whole": SimpleNamespace(), "lacking": SimpleNamespace()}
    session.roster.attachments_of = lambda member: [files["whole"], *([files["lacking"]] if member.rank else [])]  # type: ignore[method-assign,list-item]
    lacking: list[Any] = []

    def open_window(*_: Any) -> Any:
        begin_ns = 10**9 * (1 + len(begun))
        begun.append(begin_ns)
        return SimpleNamespace(
            begin_ns=begin_ns, end_ns=0, subjects=("backward",), hits=0, lacking=list(lacking), failure=None, over=True
        )

    begun: list[int] = []
    session.probes = SimpleNamespace(  # type: ignore[assignment]
        probed=set(),
        refused={},
        pulse=set(),
        open_window=open_window,
        settle_window=lambda _: None,
        window_goes=False,
        wait_for_window=lambda: None,
    )
    side = ProbingSide(session, Nothing())  # type: ignore[arg-type]
    rungs = (Rung.RANGES,) if sample else (Rung.RANGES, Rung.BACKWARD)
    side.plan = Plan(rungs, duty=0.25, length_s=0.1, period_s=0.4, sample_s=0.1, sample_period_s=0.4)
    side._due, side._sample_due = (float("inf"), 0.0) if sample else (0.0, float("inf"))
    watched: list[list[int]] = [[], []]
    jobs = [Job(f"job {rank}", 1, groups_due=float("inf")) for rank in range(2)]
    for rank, job in enumerate(jobs):
        job.members[0] = Member(Target(), rank, "order")  # type: ignore[arg-type]
        session.roster.jobs.append(job)
        job.thinned = SimpleNamespace(  # type: ignore[assignment]
            unseen=lambda *_: None,
            disturbed=lambda *_: None,
            watched=lambda begin, end, rank=rank: watched[rank].append(begin),
        )
    if counted_by == "calls":
        side._thinned.update(jobs)
    for turn in range(6):
        lacking[:] = [files["lacking"]] * (turn % 2)
        if sample:
            side._sample_due = 0.0
        else:
            side._due = 0.0
        side.poll(1.0)
        assert side._window is not None
        side._window.end_ns = side._window.begin_ns + 10**8
        side._end_window(side._window)
    if counted_by == "calls":
        seen = watched
    elif sample:
        seen = [[begin for begin, _ in job.sampled._windows] for job in jobs]
        assert all(end for job in jobs for _, end in job.sampled._windows)
    else:
        seen = [[begin for begin, _ in job.pulse_spans or () if begin in begun] for job in jobs]
        assert all(end for job in jobs for _, end in job.pulse_spans or ())
    assert seen == [begun, begun[::2]]


OP_COUNTS = (100, 300, 300, 700)


def collectives_of(rank: int, first: int, until: int) -> NDArray[np.void]:
    """Steps of four all-reduces. Rank 1 is seen from its third call on."""
    calls = np.arange(4 * first, 4 * until)[2 * rank * (first == 0) :]
    rows = np.zeros(len(calls), records.COLLECTIVE)
    rows["call"], rows["comm"], rows["seq"] = BY_SYMBOL["ncclAllReduce"].id, 7 + rank, calls - 2 * rank
    rows["count"] = np.array(OP_COUNTS)[calls % 4]
    rows["ts_ns"] = 100 * MS + calls // 4 * STEP_MS * MS + calls % 4 * 2 * MS + rank * 1000
    rows["duration_ns"], rows["pid"] = 1000, rank
    return rows


@pytest.mark.parametrize("steps", [7, 40])
def test_the_last_steps_by_calls_go_by_all_that_is_known_of_communicators(steps: int) -> None:
    """Of a job of which launches are soon seen in windows: they had been lined up when few calls were there, and
    wrongly, a second before that."""
    writer = Rows()
    job = Job("job", 1)
    for rank in range(2):
        target: Any = SimpleNamespace(
            pid=rank, command="", libraries=[], identity=SimpleNamespace(world_size=2), has=lambda _: False
        )
        job.members[rank] = Member(target, rank, "order")
    rows = StepRows(a_session(writer, jobs=[job]), Nothing())  # type: ignore[arg-type]

    def call(first: int, until: int) -> int:
        for rank, member in job.members.items():
            called = collectives_of(rank, first, until)
            job.feed(member, None, called)
            job.recent[rank] = np.concatenate([job.recent.get(rank, called[:0]), called])
            job.handles |= {(rank, 7 + rank)}
        return (100 + until * STEP_MS) * MS

    until = call(0, 2)
    for turn in itertools.takewhile(lambda _: not len(job.communicators), itertools.count(1)):
        rows.begin_turn(float(turn))
        rows.store(job, float(turn), until, final=False)
    assert set(job.communicators["error"]) != {""}
    since = call(2, 2 + steps)
    job.thin_calls(since)
    call(2 + steps, 4 + steps)
    job.groups_due = float("inf")  # soon, but not yet
    rows.store(job, 1000.0, since - MS, final=False)
    rows.store(job, 1001.0, since + 100 * MS, final=False)
    assert job.calls_end is None
    stored = writer["iterations"]
    assert {row["rank"] for row in stored} == {0, 1}
    assert len(stored) >= 2 * (steps - 3)
    assert min(row["confidence"] for row in stored) > 0.8
    assert len({(row["step"], row["ts"].value // MS) for row in stored}) <= len(stored) // 2 + 1
    assert max(row["ts"].value + row["duration_ns"] for row in stored) <= since + MS


@pytest.mark.parametrize("found", [True, False])
def test_the_last_steps_by_calls_wait_for_communicators_for_ten_seconds(
    found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = a_session(Rows())
    job, rows = Job("job", 1), StepRows(session, Nothing())  # type: ignore[arg-type]
    session.roster.jobs.append(job)
    asked: list[bool] = []
    monkeypatch.setattr(rows._aligner, "begin_anew", lambda _: asked.append(True))
    results = iter([None, None, np.zeros(1, COMMUNICATOR) if found else None, None])
    monkeypatch.setattr(rows._aligner, "run", lambda *_, **__: next(results))
    monkeypatch.setattr(rows._aligner, "using", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(rows, "_align", lambda *_: None)
    job.thin_calls(100 * MS)
    ends = []
    for now, drained_ms in ((50.0, 50), (50.5, 200), (60.0, 300), (60.5, 400)):
        rows.store(job, now, drained_ms * MS, final=False)
        ends.append(job.calls_end)
        if found and now == 60.0:
            break
    assert asked == [True], "once all calls were fed"
    assert ends[-1] is None
    assert all(ends[:-1])
    assert session.losses.of(job).get("communicators_over_share", 0) == (0 if found else 1)
