"""Probes of the pulse, by which steps are counted: they stay where nothing changes, and while a file lacks them no step
is counted by them."""

from __future__ import annotations

import errno
import itertools
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from argus.capture.probing.late_probes import LateProbes
from argus.live.cost.governor import Plan, Rung
from argus.live.job import Job, Member
from argus.live.sides import probing
from argus.live.sides.probing import ProbingSide, _OfJob
from argus.model import calls, records
from argus.semantics.steps.thinned import Pulse
from tests.builders.sessions import a_session
from tests.security.test_attaching import (
    Hanging,
    Kernel,
    closings_have_ended,  # noqa: F401
    hanging,  # noqa: F401
    join,
    kernel,  # noqa: F401
    with_windows,
)

LAUNCH = calls.BY_SYMBOL["cudaLaunchKernel"].id
OTHER = calls.BY_SYMBOL["cudaMemcpyAsync"].id
COLLECTIVE = calls.BY_SYMBOL["ncclAllReduce"].id


def pulsed(paths: list[str]) -> Any:
    """Files in which nothing is probed throughout, with two functions that may be the pulse."""
    probes = with_windows(paths)
    for attachment in probes.attachments:
        for at, (subject, call) in enumerate((("launches", LAUNCH), ("copies", OTHER))):
            attachment.optional_points[subject] = {"cuda_enter": [(16 + 16 * at, call)]}
            attachment.entry_points[call] = 16 + 16 * at, call
    return probes


def has_closed(probes: Any) -> None:
    for closing in probes._closing:
        assert closing.wait(10)


def test_probes_of_the_pulse_stay_where_they_are_to_stand(hanging: Hanging) -> None:  # noqa: F811
    """They were taken away and put on again at each change of plan: a file whose probes go slowly had none for seconds,
    and its ranks a step as long as that."""
    probes = pulsed(["shared", "other"])
    assert probes.set_pulse([LAUNCH]) == probes.attachments
    there = dict(hanging.made)
    hanging.paths = {"shared", "other"}
    assert probes.set_pulse([LAUNCH]) == []
    assert (hanging.made, hanging.closed, probes.unanswered) == (there, [], 0)
    assert not any(map(probes.lacks_pulse, probes.attachments))


@pytest.mark.parametrize("seed", range(20))
def test_what_stands_is_what_would_if_all_were_put_on_anew(seed: int, kernel: Kernel) -> None:  # noqa: F811
    draw = random.Random(seed)
    probes = pulsed([str(number) for number in range(draw.randrange(1, 6))])
    for attachment in probes.attachments:
        for subject in draw.sample(["launches", "copies"], draw.randrange(3)):
            del attachment.optional_points[subject]
    wanted: dict[int, list[Any]] = {id(each): [] for each in probes.attachments}
    for _ in range(8):
        probes.probed = set(draw.sample(["launches", "copies"], draw.randrange(3)))
        pulse = draw.sample([LAUNCH, OTHER], draw.randrange(3))
        changed = probes.set_pulse(pulse)
        before, wanted = wanted, {}
        for attachment in probes.attachments:
            wanted[id(attachment)] = sorted(
                point
                for subject, by_program in attachment.optional_points.items()
                if subject not in probes.probed
                for point in by_program["cuda_enter"]
                if point[1] in pulse
            )
            standing = [place for link in probes._pulse_links[id(attachment)] for place in kernel.made[link]]
            assert sorted(standing) == [offset for offset, _ in wanted[id(attachment)]]
            assert not probes.lacks_pulse(attachment)
        assert {id(each) for each in changed} == {which for which in wanted if wanted[which] != before[which]}
        held = {link for links in probes._pulse_links.values() for link in links}
        has_closed(probes)
        assert not held & set(kernel.closed)


class Steps:
    """In the place of a job's ``ThinnedSteps``."""

    def __init__(self) -> None:
        self.gaps: list[tuple[int, int]] = []
        self.fed: list[int] = []

    def unseen(self, begin_ns: int, end_ns: int) -> None:
        self.gaps.append((begin_ns, end_ns))

    def feed(self, rank: int, ts: Any) -> None:
        self.fed += ts.tolist()


def a_side(probes: Any, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> tuple[ProbingSide, list[Any]]:
    """A job for each file, whose pulse is seen throughout."""
    monkeypatch.setattr("argus.live.sides.probing.time.monotonic_ns", lambda: clock.ns)
    session = a_session()
    session.probes = probes
    session.roster.attachments_of = lambda member: [probes.attachments[member.rank]]  # type: ignore[method-assign]
    side = ProbingSide(session, SimpleNamespace(wants_math=False))  # type: ignore[arg-type]
    side.plan = Plan((Rung.LAUNCHES,), duty=0.25, length_s=0.1, period_s=0.4)
    side._due = float("inf")
    probes.set_pulse([LAUNCH])
    jobs = []
    for rank in range(len(probes.attachments)):
        job = Job(f"job {rank}", 1)
        job.members[0] = Member(SimpleNamespace(pid=rank, queued_ns=0), rank, "order")  # type: ignore[arg-type]
        job.thinned = Steps()  # type: ignore[assignment]
        side._jobs[id(job)] = job, (state := _OfJob(pulse=Pulse(LAUNCH, 1, 10**7, {LAUNCH: 1})))
        side._begin_span(job, state, clock.ns)
        job.thinned.gaps.clear()  # type: ignore[union-attr]
        jobs.append((job, state))
    return side, jobs


def test_no_steps_are_counted_while_a_file_lacks_its_pulse(
    hanging: Hanging,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its rank seemed to make one step for all of that time, and later ones had too small numbers."""
    probes, late = pulsed(["held", "other"]), LateProbes()
    held, other = probes.attachments
    clock = SimpleNamespace(ns=1_000)
    side, ((first, of_first), (second, of_second)) = a_side(probes, clock, monkeypatch)
    hanging.paths = {"held"}
    clock.ns = 5_000
    side._set_pulse({LAUNCH, OTHER}, 4_000)
    assert probes.lacks_pulse(held)
    assert not probes.lacks_pulse(other)
    assert probes.unanswered == held.unanswered == 1, "it is counted"
    assert (of_first.seen, of_first.lacking, of_first.spans) == (False, [held], [(1_000, 4_000)])
    assert (of_second.seen, of_second.lacking) == (True, [])
    clock.ns = 9_000
    side.poll(0.0)
    assert (of_first.seen, first.thinned.gaps) == (False, [])
    hanging.go.set()
    while probes.lacks_pulse(held):
        held.late(0.1)
        late.go_on(probes)
        join(late)
    side.poll(0.0)
    assert of_first.spans == [(1_000, 4_000), (9_000, 0)]
    assert (first.thinned.gaps, second.thinned.gaps) == ([(4_000, 9_000)], [(4_000, 5_000)])


@pytest.mark.parametrize("then", ["the file is gone", "too dear", "a window"])
def test_a_job_that_waits_for_its_pulse_waits_no_longer_than_for_that(
    then: str,
    hanging: Hanging,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probes = pulsed(["held"])
    (held,) = probes.attachments
    side, ((job, state),) = a_side(probes, SimpleNamespace(ns=1_000), monkeypatch)
    hanging.paths = {"held"}
    side._set_pulse({LAUNCH, OTHER}, 2_000)
    assert state.lacking == [held]
    if then == "the file is gone":
        probes._forget([held])
        side._session.roster.attachments_of = lambda member: []
        side.poll(0.0)
        assert state.seen
    elif then == "too dear":
        monkeypatch.setattr("argus.live.sides.probing.PATIENCE", 1)
        side.weigh(1.0)
        side.poll(0.0)
        assert (state.seen, state.lacking, state.spans) == (False, [], [(1_000, 2_000)])
    else:
        probes.open_window = lambda *_: SimpleNamespace(begin_ns=3_000, end_ns=0, lacking=(), failure=None, over=True)
        probes.settle_window = lambda _: None
        monkeypatch.setattr(job, "note_queues", lambda: None)
        side._session.roster.jobs.append(job)
        side._thinned.add(job)
        side._session.probes.prices_of = lambda files: SimpleNamespace(entry=[0.0] * 256)
        side._due = 0.0
        side.poll(1.0)
        assert side._window is not None
        assert state.spans == [(1_000, 2_000)], "nor in windows: these leave the pulse to its own probes"


def test_a_window_of_a_pulse_goes_on_while_others_are_changed(
    kernel: Kernel,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was taken for one that is seen throughout, and the time between windows for one long step."""
    probes = pulsed(["a", "b"])
    side, ((_, throughout), (_, in_windows)) = a_side(probes, SimpleNamespace(ns=1_000), monkeypatch)
    in_windows.pulse = Pulse(OTHER, 1, 10**7, {OTHER: 1})
    side._set_pulse({LAUNCH}, 2_000, everywhere=True)
    assert throughout.spans == [(1_000, 2_000), (1_000, 0)]
    assert in_windows.spans == [(1_000, 0)]


def test_a_pulse_that_the_kernel_refuses_is_put_off(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """It was tried again each turn, for ever. What else the file lacks it gets all the same."""
    probes, late = pulsed(["a"]), LateProbes()
    (attachment,) = probes.attachments
    probes.probed, probes._pulse = {"copies"}, frozenset([LAUNCH])
    attachment.answers = False
    tries, clock = list[int](), SimpleNamespace(now=1000.0)

    def refuse(backend: Any, program: int, path: str, points: Any, at_exit: bool, pid: Any) -> list[int]:
        (_, call) = points[0]
        if call == LAUNCH:
            tries.append(call)
            raise OSError(5, "it cannot be read")
        return kernel._link(backend, program, path, points, at_exit, pid)

    monkeypatch.setattr("argus.capture.probes.link", refuse)
    monkeypatch.setattr("argus.capture.probing.late_probes.time.monotonic", lambda: clock.now)
    for _ in range(20):
        late.go_on(probes)
        join(late)
    assert tries == [LAUNCH]
    assert attachment.seen("copies")
    assert attachment.again_at > clock.now
    clock.now = attachment.again_at
    for _ in range(20):
        late.go_on(probes)
        join(late)
    assert tries == [LAUNCH] * 2, "ever more seldom"
    monkeypatch.setattr("argus.capture.probes.link", kernel._link)
    clock.now = attachment.again_at
    for _ in range(2):
        late.go_on(probes)
        join(late)
    assert attachment.answers
    assert not probes.lacks_pulse(attachment)


def of_two_programs(attachment: Any, probes: Any) -> None:
    """Its pulse is a launch and a collective, which programs of their own see."""
    probes._module.programs["nccl_enter"] = 5
    attachment.optional_points = {
        "launches": {"cuda_enter": [(16, LAUNCH)]},
        "collectives": {"nccl_enter": [(32, COLLECTIVE)]},
    }
    attachment.entry_points = {LAUNCH: (16, LAUNCH), COLLECTIVE: (32, COLLECTIVE)}


def tried_again(probes: Any, late: LateProbes, *, times: int = 1) -> None:
    for _ in range(times):
        for attachment in probes.attachments:
            attachment.again_at = 0.0
        late.go_on(probes)
        join(late)


@pytest.mark.parametrize("refused", [3, 5])
@pytest.mark.parametrize("code", [errno.EMFILE, errno.EAGAIN, errno.EIO])
def test_a_pulse_that_is_there_in_part_is_completed(
    refused: int,
    code: int,
    kernel: Kernel,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program that the kernel refused for a moment, beside another one, was never attached again. What stands is not
    attached twice: calls would be seen twice."""
    probes, late = with_windows(["jax"]), LateProbes()
    (attachment,) = probes.attachments
    of_two_programs(attachment, probes)

    def refuse(backend: Any, program: int, *more: Any) -> list[int]:
        if program == refused:
            raise OSError(code, "refused")
        return kernel._link(backend, program, *more)

    monkeypatch.setattr("argus.capture.probes.link", refuse)
    probes.set_pulse([LAUNCH, COLLECTIVE])
    tried_again(probes, late, times=3)
    lacks, has = (LAUNCH, COLLECTIVE) if refused == 3 else (COLLECTIVE, LAUNCH)
    assert [probes.lacks_pulse(attachment, call) for call in (None, lacks, has)] == [True, True, False]
    assert attachment.unanswered == probes.unanswered > 0
    monkeypatch.setattr("argus.capture.probes.link", kernel._link)
    tried_again(probes, late, times=4)
    assert not probes.lacks_pulse(attachment)
    assert attachment.answers
    standing = [place for link in probes._pulse_links[id(attachment)] for place in kernel.made[link]]
    assert sorted(standing) == [16, 32]
    has_closed(probes)
    assert {*kernel.made} - {*kernel.closed} == {*probes._pulse_links[id(attachment)]}
    there = dict(kernel.made)
    assert (probes.set_pulse([LAUNCH, COLLECTIVE]), kernel.made) == ([], there), "they stay"


@pytest.mark.parametrize("refused", [[3], [5], [3, 5]])
def test_a_new_file_whose_pulse_is_refused_lacks_it(
    refused: list[int],
    kernel: Kernel,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It counted as there for the rest of the trace, and nothing of it was counted."""
    probes, late = with_windows(["new"]), LateProbes()
    attachment = probes.attachments.pop()
    of_two_programs(attachment, probes)
    probes._pulse = frozenset({LAUNCH, COLLECTIVE})

    def refuse(backend: Any, program: int, *more: Any) -> list[int]:
        if program in refused:
            raise OSError(errno.EMFILE, "too many open files")
        return kernel._link(backend, program, *more)

    monkeypatch.setattr("argus.capture.probes.link", refuse)
    probes._join(attachment)
    late.settle(probes, attachment)
    assert probes.lacks_pulse(attachment)
    assert (attachment.unanswered, probes.unanswered) == (1, 1)
    monkeypatch.setattr("argus.capture.probes.link", kernel._link)
    tried_again(probes, late, times=4)
    assert not probes.lacks_pulse(attachment)
    assert attachment.answers
    assert sorted(kernel.made.values()) == [(16,), (32,)]


def test_a_process_that_has_ended_lacks_no_pulse(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    probes = pulsed(["0"])
    (attachment,) = probes.attachments

    def ended(*_: Any) -> list[int]:
        raise ProcessLookupError(errno.ESRCH, "it has ended")

    monkeypatch.setattr("argus.capture.probes.link", ended)
    probes.set_pulse([LAUNCH])
    assert not probes.lacks_pulse(attachment)
    assert (attachment.answers, probes.unanswered) == (True, 0)


def test_a_pulse_that_its_subject_brings_is_not_seen_without_it(
    kernel: Kernel,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a change of plan left a file out, its jobs counted as seen."""
    probes, clock = pulsed(["0", "1"]), SimpleNamespace(ns=10**9)
    side, states = a_side(probes, clock, monkeypatch)
    side.plan = Plan()
    probes.probed = {"launches"}
    for attachment in probes.attachments:
        attachment.optional_links["launches"] = [1], []
    del probes.attachments[0].optional_links["launches"]
    for job, state in side._jobs.values():
        state.end(clock.ns)
        side._see(job, state)
    assert [state.seen for _, state in side._jobs.values()] == [False, True]
    side._see_again()
    assert [state.seen for _, state in side._jobs.values()] == [False, True]
    probes.attachments[0].optional_links["launches"] = [2], []
    side._see_again()
    assert [state.seen for _, state in side._jobs.values()] == [True, True]
    assert states


def all_is_probed_again(
    probes: Any, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> tuple[ProbingSide, Job, _OfJob]:
    """A job of launches that were seen in windows, before a plan in which nothing is."""
    side, ((job, state),) = a_side(probes, clock, monkeypatch)
    monkeypatch.setattr(job, "note_queues", lambda: None)
    side._session.roster.jobs.append(job)
    probes.prices_of = lambda files: SimpleNamespace(entry=np.full(256, 100.0))
    clock.ns += 10**9
    return side, job, state


def a_step(side: ProbingSide, job: Job, clock: SimpleNamespace, step_ns: int = 10**7) -> int:
    """A step of two launches and a copy. Returns when its copy was."""
    rows = np.zeros(3, records.LAUNCH)
    rows["call"], rows["ts_ns"] = [LAUNCH, LAUNCH, OTHER], clock.ns + np.arange(1, 4) * step_ns // 4
    clock.ns += step_ns
    side.feed(job, 0, rows)
    return int(rows["ts_ns"][2])


@pytest.mark.parametrize("counted", ["throughout", "in windows", "in a window that goes on", "waits for a file"])
def test_steps_go_on_where_launches_are_probed_throughout_again(
    counted: str,
    kernel: Kernel,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where they were counted in windows, no window came and no span began: the job had no steps any more."""
    probes, clock = pulsed(["0"]), SimpleNamespace(ns=10**9)
    side, job, state = all_is_probed_again(probes, clock, monkeypatch)
    steps: Any = job.thinned
    begin_ns = state.spans[-1][0]
    window = SimpleNamespace(
        begin_ns=clock.ns, end_ns=0, subjects=("launches",), hits=0, lacking=(), failure=None, over=True
    )
    if counted != "throughout":
        probes.set_pulse(())
        state.end(clock.ns)
    if counted == "in a window that goes on":
        side._window, side._noted = window, True  # type: ignore[assignment]
        side._begin_span(job, state, window.begin_ns)
    elif counted == "waits for a file":
        state.lacking = list(probes.attachments)
    clock.ns += 10**6
    applied_ns = clock.ns
    side.apply(Plan(), 1.0)
    assert probes.probed == {"launches"}
    assert not probes._pulse_points(probes.attachments[0])
    if counted == "in a window that goes on":
        assert not state.seen, "each call is seen twice"
        side.poll(0.0)
        assert not state.seen
        clock.ns += 10**6
        window.end_ns = clock.ns
        steps.watched = steps.disturbed = lambda *_: None
        side.poll(0.1)
    assert state.seen
    assert all(begin <= end for begin, end in state.spans[:-1])
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(state.spans))
    if counted == "throughout":
        assert state.spans == [(begin_ns, applied_ns), (applied_ns, 0)]
    steps.fed.clear()
    for turn in range(20):
        side.poll(1.0 + turn)
        a_step(side, job, clock)
    assert len(steps.fed) == 40


def test_a_span_that_is_begun_anew_ends_after_its_begin(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Where the pulse had probes of its own it was ended a second time, at the moment in which the change began."""
    probes, clock = pulsed(["0"]), SimpleNamespace(ns=10**9)
    side, job, state = all_is_probed_again(probes, clock, monkeypatch)

    def tick() -> int:
        clock.ns += 1000
        return int(clock.ns)

    monkeypatch.setattr("argus.live.sides.probing.time.monotonic_ns", tick)
    side.apply(Plan(), 1.0)
    assert state.seen
    assert len(state.spans) == 2
    assert all(begin <= end for begin, end in (*state.spans[:-1], *job.thinned.gaps))  # type: ignore[union-attr]


@pytest.mark.parametrize("finds", [0, 3])
def test_a_pulse_that_is_not_known_is_looked_for_where_all_is_seen(
    finds: int,
    kernel: Kernel,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was looked for in windows only, of which none came any more. Where none is found, in what is longer, and not
    all the time."""
    probes, clock = pulsed(["0"]), SimpleNamespace(ns=10**9)
    side, job, state = all_is_probed_again(probes, clock, monkeypatch)
    probes.set_pulse(())
    state.end(clock.ns)
    state.pulse, begun = None, list[int]()
    monkeypatch.setattr(job, "begin_pulses", lambda *words: begun.append(words[0]))
    side.apply(Plan(), 1.0)
    steps: Any = job.thinned
    searched, draw = dict[int, float](), random.Random(finds)
    first_s = clock.ns / 1e9
    for _ in range(4000):
        side.poll(clock.ns / 1e9)
        if state.searched is not None and state.searched.begin_ns not in searched:
            searched[state.searched.begin_ns] = (state.searched.end_ns - state.searched.begin_ns) / 1e9
        if len(searched) <= finds:  # no step is like another one
            rows = np.zeros(9, records.LAUNCH)
            rows["call"], rows["ts_ns"] = draw.choices([LAUNCH, OTHER], k=9), clock.ns + np.arange(9)
            side.feed(job, 0, rows)
            clock.ns += 10**7
        else:
            a_step(side, job, clock)
        side.find_pulses(clock.ns)
    assert begun == [0]
    assert state.seen
    assert [*searched.values()] == [probing.SEARCH_S * 2**number for number in range(finds + 1)]
    assert len(searched) <= 1 + (clock.ns / 1e9 - first_s) / (probing.SEARCH_S * probing.SEARCH_EVERY)
    assert len(steps.fed) > 1000


def test_a_job_that_idles_makes_no_searches_longer(
    kernel: Kernel,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job that called nothing for 120 s had failed 15 times, and that was never forgotten: later windows of all jobs
    were 1 s each."""
    probes, clock = pulsed(["0", "1"]), SimpleNamespace(ns=10**9)
    side, ((job, state), (other, hostile)) = a_side(probes, clock, monkeypatch)
    probes.prices_of = lambda files: SimpleNamespace(entry=np.full(256, 100.0))
    for each in (job, other):
        side._session.roster.jobs.append(each)
        monkeypatch.setattr(each, "note_queues", lambda: None)
        monkeypatch.setattr(each, "begin_pulses", lambda *_: None)
    probes.set_pulse(())
    draw = random.Random(1)
    for each in (state, hostile):
        each.end(clock.ns)
        each.pulse = None
    side.apply(Plan(), 1.0)

    def pass_time(turns: int, *, idle: bool) -> int:
        for turn in range(turns):
            side.poll(clock.ns / 1e9)
            rows = np.zeros(9, records.LAUNCH)  # of the other one, of which no step is like another
            rows["call"], rows["ts_ns"] = draw.choices([LAUNCH, OTHER], k=9), clock.ns + np.arange(9)
            side.feed(other, 1, rows)
            if idle:
                clock.ns += 10**7
            else:
                a_step(side, job, clock)
            side.find_pulses(clock.ns)
            if state.pulse is not None:
                return turn
        return turns

    assert pass_time(12_000, idle=True) == 12_000
    assert (state.failed, hostile.failed > 3) == (0, True)
    assert pass_time(12_000, idle=False) < 300, "it does not wait for the other one's"
    hostile.failed, state.failed, state.pulse = 0, 3, None
    assert pass_time(12_000, idle=False) < 2_000
    assert state.failed == 0


def test_no_turn_is_taken_while_probes_of_the_last_window_are_going(
    kernel: Kernel,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A turn in which no window could be opened was one all the same: where probes go slowly, it was always that in
    which all is seen."""
    probes, clock = pulsed(["0"]), SimpleNamespace(ns=10**9)
    side, _ = a_side(probes, clock, monkeypatch)
    opened: list[Any] = []
    probes = SimpleNamespace(
        probed=set(), refused={}, pulse=frozenset({LAUNCH}), attachments=[],
        window_goes=True, wait_for_window=lambda: None,
        open_window=lambda *words: opened.append(words), lacks_pulse=lambda _: False, lacking=[],
    )  # fmt: skip
    side._session.probes = probes
    side.plan = Plan((Rung.LAUNCHES,), duty=0.25, length_s=0.1, period_s=0.4)
    side._due, turn = 1.0, side._turn
    monkeypatch.setattr(side, "_pulse_share", lambda: 0.0)
    side.poll(5.0)
    assert (side._due, side._turn, opened) == (1.0, turn, [])
    assert side.due > 5.0
    probes.window_goes = False
    side.poll(5.1)
    assert len(opened) == 1
    assert (side._turn, side._due > 5.1) == (turn + 1, True)
    assert side.due == side._due


@pytest.mark.parametrize("wanted", ["window", "sample"])
def test_the_loop_asks_more_seldom_the_longer_probes_go(
    wanted: str,
    kernel: Kernel,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It turned every millisecond for as long as that took, up to 8 s a window. A window is not much later for it."""
    side, _ = a_side(pulsed(["0"]), SimpleNamespace(ns=10**9), monkeypatch)
    side._session.probes = SimpleNamespace(
        probed=set(),
        refused={},
        pulse=frozenset(),
        attachments=[],
        window_goes=True,
        wait_for_window=lambda: None,
        lacks_pulse=lambda _: False,
    )
    rung = Rung.LAUNCHES if wanted == "window" else Rung.RANGES
    side.plan = Plan((rung,), duty=0.25, length_s=0.1, period_s=0.4, sample_s=0.1, sample_period_s=5.0)
    assert bool(side.plan.windowed) == (wanted == "window")
    assert bool(side.plan.sampled) == (wanted == "sample")
    side._due = side._sample_due = 100.0
    asked = list[float]()
    now = 100.0
    while now < 108.0:
        side.poll(now)
        asked.append(now)
        assert now < side.due <= now + max(0.0021, (now - 100.0) / 8) + 0.0001
        now = side.due
    assert len(asked) < 8 / (probing.GONE_NS / 1e9) + 60
    side._session.probes.window_goes = False
    side._due = side._sample_due = 200.0
    side.poll(now)
    assert side.due == 200.0
