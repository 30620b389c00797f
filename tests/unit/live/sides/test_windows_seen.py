"""What was seen in windows: of a job that lacked some of them less than of others."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from argus.capture.attachment import Attachment
from argus.live.cost.governor import PATIENCE, Plan, Rung
from argus.live.job import Job, Member
from argus.live.sides.probing import SEARCHED_S, ProbingSide, _OfJob, _Searched
from argus.live.sides.windows_seen import LACKING, RECENT, WindowsHad
from argus.model.calls import BY_SYMBOL
from argus.semantics.steps.thinned import Pulse
from tests.builders.sessions import a_session

S = 10**9
KERNEL = BY_SYMBOL["cudaLaunchKernel"].id


def a_target(pid: int) -> Any:
    return SimpleNamespace(pid=pid, queued_ns=0, has=lambda _: False)


class Node:
    """A rank of each job, which maps a file of its own, and windows of 0.1 s in which some files lack their probes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, jobs: int = 2) -> None:
        self.session = session = a_session()
        self.files: list[Any] = [Attachment(SimpleNamespace(), None) for _ in range(jobs)]  # type: ignore[arg-type]
        for file in self.files:
            file.optional_points["launches"] = {"cuda_enter": [(16, 1)]}
        self.lacking: list[Any] = []
        self.begun, self.ns = 0, S
        self.settled: list[Any] = []
        self.probes = SimpleNamespace(
            probed=set(), refused={}, pulse=frozenset(), window_goes=False, wait_for_window=lambda: None,
            attachments=self.files,
            open_window=self._open, settle_window=self.settled.append, lacking=[],
        )  # fmt: skip
        session.probes = self.probes
        session.roster.attachments_of = lambda member: [self.files[member.target.pid]]  # type: ignore[method-assign]
        self.side = ProbingSide(session, SimpleNamespace(wants_math=False))  # type: ignore[arg-type]
        self.side.plan = Plan((Rung.LAUNCHES,), duty=0.25, length_s=0.1, period_s=0.4)
        self.side.thinned_since_ns["launches"] = S
        self.jobs = [Job(f"job {pid}", 1) for pid in range(jobs)]
        for pid, job in enumerate(self.jobs):
            job.by_marks = True
            job.members[0] = member = Member(a_target(pid), 0, "order")  # type: ignore[arg-type]
            session.roster.by_pid[pid] = job, member
            session.roster.jobs.append(job)
            self.side._thinned.add(job)
            monkeypatch.setattr(job, "note_queues", lambda: None)

    def _open(self, subjects: Any, seconds: float, only: Any = None) -> Any:
        self.probes.lacking = list(self.lacking)
        if len(self.lacking) == len(self.files):
            return None
        return SimpleNamespace(
            begin_ns=self.ns, end_ns=0, subjects=subjects, lacking=self.probes.lacking, hits=np.zeros(256, np.int64),
            failure=None, over=True,
        )  # fmt: skip

    def turn(self, *lacking: int, calls: int = 100) -> None:
        """A window in which these jobs lack their probes. The others make so many calls, these half."""
        self.lacking = [self.files[number] for number in lacking]
        self.side._due = 0.0
        self.side.poll(1.0)
        if (window := self.side._window) is not None:
            for number, job in enumerate(self.jobs):
                ts = np.full(calls // (2 if number in lacking else 1), self.ns + S // 20, np.uint64)
                self.side.count("launches", ts, job)
                job.members[0].launches += len(ts)
            window.end_ns = self.ns + S // 10
            self.side._end_window(window)
        self.ns += 4 * S // 10

    def seen(self) -> list[Any]:
        seen = self.side.observed([job.members[0] for job in self.jobs])
        return [seen[pid]["launches"] for pid in range(len(self.jobs))]

    def text(self) -> str:
        made = sum(job.members[0].launches for job in self.jobs)
        (text,) = self.side.describe({"launches": made}, self.ns, S)
        return text


def test_jobs_that_had_all_windows_have_seen_them(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch)
    for _ in range(40):
        node.turn()
    first, second = node.seen()
    assert first == second == node.side.seen(["launches"])
    assert (first.share, first.period_ns) == (0.25, 4 * S // 10)
    assert "25.0% of the time: 8,000; about 32,000 were made" in node.text()


def test_a_job_that_lost_windows_has_seen_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """All jobs were reported to have seen all of them, and what was made in all was too little."""
    node = Node(monkeypatch)
    for turn in range(60):
        node.turn(*([1] if turn % 2 else []))
    first, second = node.seen()
    assert (first.share, first.period_ns) == (0.25, 4 * S // 10)
    assert second.share == pytest.approx(0.125, rel=0.1)
    assert second.period_ns == pytest.approx(8 * S // 10, rel=0.1)
    assert "since its files lacked their probes in others" in second.reason
    share, _, rest = node.text().partition("% of the time")
    assert 17 < float(share.split()[-1]) < 20
    made = int(rest.split("about ")[1].split()[0].replace(",", ""))
    assert made == pytest.approx(2 * 60 * 400, rel=0.05)


def made(text: str) -> int:
    return int(text.split("about ")[1].split()[0].replace(",", ""))


@pytest.mark.parametrize(
    ("lost", "had"), [(1, 20), (3, 30), (30, 30), (100, 64), (0, 60)], ids=lambda number: str(number)
)
@pytest.mark.parametrize("over", [False, True])
def test_what_was_made_is_extrapolated_by_the_windows_that_a_job_had(
    lost: int, had: int, over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was divided by the share of the last windows as it was when calls were drained, before this one was counted:
    with one lost and 20 had it was four times too much. A job that is over counts all the same."""
    node = Node(monkeypatch, jobs=1)
    node.side.plan = Plan((Rung.LAUNCHES,), duty=0.25, length_s=0.1, period_s=0.4)
    node.files.append(Attachment(SimpleNamespace(), None))  # type: ignore[arg-type]  # others' windows begin
    for _ in range(lost):
        node.turn(0, calls=0)
    for _ in range(had):
        node.turn()
    if over:
        node.side.forget(node.jobs[0])
    assert made(node.text()) == pytest.approx((lost + had) * 400, rel=0.01)


@pytest.mark.parametrize("seed", range(10))
def test_what_was_made_is_as_a_simple_count_says(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, node = random.Random(seed), Node(monkeypatch, jobs=3)
    inside, windows, turns = [0, 0, 0], [0, 0, 0], draw.randrange(20, 90)
    for _ in range(turns):
        lacking = draw.sample(range(3), draw.choice([0, 0, 1, 2]))
        node.turn(*lacking, calls=2 * draw.randrange(100))
        _, left_out = node.side._windows[-1]
        assert left_out == {id(node.jobs[number]) for number in lacking}
        for number, job in enumerate(node.jobs):
            windows[number] += number not in lacking
            inside[number] = node.side._of_jobs[job]["launches"].inside
    expected = sum(of_job * turns / had for of_job, had in zip(inside, windows, strict=True))
    assert made(node.text()) == pytest.approx(expected * 4, rel=0.01)


def test_windows_that_could_not_begin_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """One user alone, whose files have taken their time."""
    node = Node(monkeypatch, jobs=1)
    node.turn(0)
    assert [each.reason for each in node.seen()] == [LACKING]
    assert "what was made since is not known" in node.text()
    for turn in range(60):
        node.turn(*([0] if turn % 2 else []))
    (seen,) = node.seen()
    assert seen.share == pytest.approx(0.125, rel=0.1)


@pytest.mark.parametrize("kind", ["windows", "samples"])
def test_a_window_that_breaks_is_lost_and_has_had_its_turn(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was tried again at once, and counted nowhere."""
    node = Node(monkeypatch)

    def fail(*_: Any) -> Any:
        node.probes.lacking = [node.files[1]]
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(node.probes, "open_window", fail)
    node.side._sample_due = node.side._due = float("inf")
    if kind == "samples":
        node.side.plan = Plan((Rung.RANGES,), sample_s=0.1, sample_period_s=10.0)
        node.side._sample_due = 1.0
    else:
        node.side._due = 1.0
    for now in (1.0, 1.001):
        if now == 1.0:
            with pytest.raises(RuntimeError):
                node.side.poll(now)
        else:
            node.side.poll(now)
        assert node.side.due > 1.3
        assert [node.side.had.share(job, kind) for job in node.jobs] == [1.0, 0.0]


def test_a_window_in_which_nothing_was_to_be_probed_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch)
    monkeypatch.setattr(node.probes, "open_window", lambda *_: None)
    node.turn()
    assert [each.share for each in node.seen()] == [0.25, 0.25]


@pytest.mark.parametrize("seed", range(20))
def test_a_share_is_that_of_the_last_windows(seed: int) -> None:
    draw = random.Random(seed)
    had, job, windows = WindowsHad(), Job("job", 1), list[tuple[float, bool]]()
    rows = 0
    before = had.shown(job, "windows")
    assert before == 1.0
    for part in range(4):
        likely = (1.0, draw.random(), 0.0, draw.random())[part]
        for _ in range(draw.randrange(1, 3 * RECENT)):
            windows.append((draw.uniform(1, 100), draw.random() < likely))
            had.add(job, "windows", windows[-1][0], had=windows[-1][1])
            weights = [length * (1 - 1 / RECENT) ** age for age, (length, _) in enumerate(reversed(windows))]
            whole = [weight for weight, (_, there) in zip(weights, reversed(windows), strict=True) if there]
            share = had.share(job, "windows")
            assert share == pytest.approx(sum(whole) / sum(weights))
            shown = had.shown(job, "windows")
            assert shown == share or 2 / 3 < share / shown < 1.5
            assert shown == 1.0 or share < 1 - 1 / RECENT / 2
            assert (shown == 0.0) is (share == 0.0)
            rows += shown != before
            before = shown
        if not part:
            assert share == 1.0, "exactly, as if nothing were counted"
    assert rows < len(windows) / 2
    assert had.share(job, "samples") == 1.0


def opening(node: Node) -> SimpleNamespace:
    """A window whose probes are being put on."""
    window = SimpleNamespace(
        begin_ns=0, end_ns=0, subjects=("launches",), lacking=[], hits=np.zeros(256, np.int64), failure=None, over=True
    )
    node.probes.open_window = lambda *_: window
    node.side._due = 0.0
    node.side.poll(1.0)
    assert node.side._window is window
    return window


def test_a_window_is_waited_for_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its probes took up to five seconds of the loop's time on a busy node."""
    node = Node(monkeypatch)
    window, job = opening(node), node.jobs[0]
    node.side.count("launches", np.array([S + 1], np.uint64), job)
    node.side.poll(2.0)
    window.begin_ns = 2 * S
    node.side.take_note(3 * S)
    node.side.count("launches", np.array([2 * S - 1, 2 * S, 3 * S], np.uint64), job)
    window.end_ns = 4 * S
    node.side.take_note(5 * S)
    node.side.count("launches", np.array([4 * S - 1, 4 * S + 1], np.uint64), job)
    assert node.side._window is None
    assert node.side._in_windows["launches"] == 3
    assert node.side.on_ns["launches"] == 2 * S


@pytest.mark.parametrize(("fed_ns", "begin_ns"), [(2 * S, 3 * S), (3 * S + 5, 3 * S + 5), (9 * S, 4 * S)])
def test_calls_that_were_fed_before_it_was_known_that_a_window_had_begun_are_in_none(
    fed_ns: int, begin_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be missing in it: steps would be counted that took longer."""
    node = Node(monkeypatch)
    window = opening(node)
    node.side.take_note(fed_ns)
    window.begin_ns, window.end_ns = 3 * S, 4 * S
    node.side.take_note(10 * S)
    assert window.begin_ns == begin_ns
    assert node.side.on_ns["launches"] == 4 * S - begin_ns


@pytest.mark.parametrize("comes", [False, True])
def test_a_window_is_none_of_a_job_that_came_while_it_was_opened(comes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor of one that was there, and of which a file came."""
    node = Node(monkeypatch)
    late = node.jobs[1]
    if comes:
        node.session.roster.jobs.remove(late)
    window = opening(node)
    if comes:
        node.session.roster.jobs.append(late)
    else:
        window.lacking = [node.files[1]]
    passes: list[Job] = []
    monkeypatch.setattr(node.side, "_begin_passes", lambda job, *_, **__: passes.append(job))
    window.begin_ns, window.end_ns = 2 * S, 3 * S
    node.side.take_note()
    assert passes == node.jobs[:1]
    assert (late in node.side.had._of) is not comes
    assert node.settled == [window]
    assert [node.side.had.share(job, "windows") for job in node.jobs] == [1.0, 1.0 if comes else 0.0]


def test_a_window_that_breaks_while_it_is_opened_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch)
    window = opening(node)
    window.lacking, window.failure, window.end_ns = list(node.files), MemoryError(), 3 * S
    node.side.take_note()
    with pytest.raises(MemoryError):
        node.side.poll(3.0)
    node.side.poll(3.0)
    assert node.side._window is None
    assert [node.side.had.share(job, "windows") for job in node.jobs] == [0.0, 0.0]


def with_pulse(node: Node, monkeypatch: pytest.MonkeyPatch, spans: list[tuple[int, int]]) -> _OfJob:
    job, nothing = node.jobs[0], lambda *_: None
    thinned = SimpleNamespace(unseen=nothing, watched=nothing, disturbed=nothing, slowdown=lambda: 0.0)
    monkeypatch.setattr(job, "thinned", thinned)
    state = _OfJob(pulse=Pulse(KERNEL, 1, 10**9), spans=spans)
    node.side._jobs[id(job)] = job, state
    node.probes.attachments = []
    node.probes.set_pulse = lambda chosen: setattr(node.probes, "pulse", frozenset(chosen)) or []
    node.probes.lacks_pulse = lambda *_: False
    node.probes.prices_of = lambda _: SimpleNamespace(entry=np.zeros(256))
    node.probes.detach_optional = node.probes.attach_optional = lambda *_: 0
    node.probes.entries_only = set()
    return state


@pytest.mark.parametrize("begins", [True, False])
def test_a_window_is_none_where_other_subjects_are_probed_by_then(
    begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps were counted by what it did not see, or twice. Another one is opened at once."""
    node = Node(monkeypatch)
    window, ended = opening(node), list[bool]()
    window.end = lambda: ended.append(True)
    state = with_pulse(node, monkeypatch, [])
    monkeypatch.setattr("argus.live.sides.probing.time.monotonic", lambda: 1.2)
    assert node.side._due == 1.4
    node.side.apply(Plan((Rung.LAUNCHES, Rung.COPIES), duty=0.25, length_s=0.1, period_s=0.4), 1.0)
    assert ended
    assert node.side._due == 1.2
    window.begin_ns, window.end_ns = 2 * S if begins else 0, 3 * S
    node.side.take_note()
    assert node.side._window is None
    assert (state.spans, state.searched) == ([], None)
    assert not node.side._windows
    assert node.side.on_ns["launches"] == 0
    assert [node.side.had.share(each, "windows") for each in node.jobs] == [0.0, 0.0]
    assert node.settled == [window]


def test_a_look_at_costs_spoils_no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """How often they come changes with each: where it took two seconds to open one, there was none any more."""
    node = Node(monkeypatch)
    window = opening(node)
    with_pulse(node, monkeypatch, [])
    for look in range(5):
        node.side.apply(Plan((Rung.LAUNCHES,), duty=0.2 + look / 1000, length_s=0.1, period_s=0.5), 1.0)
    window.begin_ns, window.end_ns = 2 * S, 3 * S
    node.side.take_note()
    assert [begun for begun, _ in node.side._windows] == [window]
    assert node.side.on_ns["launches"] == S


def test_samples_that_are_given_up_spoil_no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """No probe of it differs. A window is spoiled once, whatever changes while it is opened."""
    node = Node(monkeypatch)
    rungs = (Rung.LAUNCHES, Rung.RANGES)
    node.side.plan = Plan(rungs, duty=0.25, length_s=0.1, period_s=0.4)
    window, ended = opening(node), list[bool]()
    window.end = lambda: ended.append(True)
    with_pulse(node, monkeypatch, [])
    turn = node.side._turn
    node.side.apply(Plan(rungs, duty=0.25, length_s=0.1, period_s=0.4, sample_s=0.1, sample_period_s=20.0), 1.0)
    assert not ended
    for more in (Rung.COPIES, Rung.WAITS):
        node.side.apply(Plan((*rungs, more), duty=0.25, length_s=0.1, period_s=0.4), 1.0)
    assert ended == [True]
    assert node.side._turn == turn - 1


@pytest.mark.parametrize("of_pulse", [True, False])
def test_in_a_window_of_others_pulses_none_is_searched(of_pulse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One function alone was seen in it."""
    node = Node(monkeypatch)
    window = opening(node)
    node.side._of_pulse = of_pulse
    node.side._jobs[id(node.jobs[0])] = node.jobs[0], _OfJob()
    window.begin_ns = 2 * S
    node.side.take_note()
    assert (node.side._jobs[id(node.jobs[0])][1].searched is None) is of_pulse


@pytest.mark.parametrize("go_s", [0.06, 2.2, 6.3])
def test_searches_go_on_however_slowly_probes_go(go_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that takes longer than from one window to the next there was no moment for them."""
    node = Node(monkeypatch, jobs=1)
    node.side.plan = Plan((Rung.LAUNCHES,), duty=0.05, length_s=0.1, period_s=2.0)
    job, at, searched = node.jobs[0], SimpleNamespace(s=10.0, gone=0.0, window=None, windows=0), list[float]()
    monkeypatch.setattr(node.side, "_search", lambda _: (searched.append(at.s), setattr(state, "searched", None)))
    state = _OfJob()
    node.side._jobs[id(job)] = job, state

    class Going(SimpleNamespace):
        @property
        def window_goes(self) -> bool:
            return bool(at.s < at.gone)

    def open_window(subjects: Any, *_: Any) -> Any:
        at.gone, at.windows = at.s + 0.1 + go_s, at.windows + 1
        at.window = SimpleNamespace(
            begin_ns=int(at.s * S),
            end_ns=0,
            subjects=subjects,
            lacking=[],
            hits=np.zeros(256, np.int64),
            failure=None,
            over=True,
        )
        return at.window

    kept = {name: value for name, value in vars(node.probes).items() if name != "window_goes"}
    node.session.probes = Going(**{**kept, "open_window": open_window})
    node.side._due = at.s
    for turn in range(4000):
        at.s += 0.01
        if at.window is not None and not at.window.end_ns and at.s >= at.gone - go_s:
            at.window.end_ns = int(at.s * S)
        node.side.poll(at.s)
        if turn % 25 == 0:
            node.side.take_note(int(at.s * S))
    assert at.windows > 5
    assert len(searched) >= at.windows - 1


@pytest.mark.parametrize(("go_s", "share", "period_s"), [(0.06, 0.25, 2.0), (1.0, 0.25, 2.0), (5.5, 0.083, 6.0)])
def test_windows_that_come_less_often_than_planned_are_reported_so(
    go_s: float, share: float, period_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where probes were slow to go, a quarter of the time was said to be seen, and was a twelfth."""
    node = Node(monkeypatch, jobs=1)
    node.side.plan = Plan((Rung.LAUNCHES,), duty=0.25, length_s=0.5, period_s=2.0)
    at = SimpleNamespace(s=10.0, gone=0.0, window=None)

    class Going(SimpleNamespace):
        @property
        def window_goes(self) -> bool:
            return bool(at.s < at.gone)

    def open_window(subjects: Any, *_: Any) -> Any:
        at.gone, words = at.s + 0.5 + go_s, {"lacking": [], "hits": np.zeros(256, np.int64), "failure": None}
        at.window = SimpleNamespace(begin_ns=int(at.s * S), end_ns=0, subjects=subjects, over=True, **words)
        return at.window

    kept = {name: value for name, value in vars(node.probes).items() if name != "window_goes"}
    node.session.probes = Going(**{**kept, "open_window": open_window})
    node.side._due = at.s
    for _ in range(12_000):
        at.s += 0.01
        if at.window is not None and not at.window.end_ns and at.s >= at.gone - go_s:
            at.window.end_ns = int(at.s * S)
        node.side.poll(at.s)
    (seen,) = node.side.observed([node.jobs[0].members[0]]).values()
    launches = seen["launches"]
    assert node.side.on_ns["launches"] / 120e9 == pytest.approx(share, rel=0.1)
    assert launches.share == pytest.approx(share, rel=0.1)
    assert launches.period_ns / 1e9 == pytest.approx(period_s, rel=0.1)
    assert ("as often as planned" in launches.reason) is (share < 0.25)


@pytest.mark.parametrize("sees", [True, False])
def test_a_pulse_that_costs_too_much_is_counted_in_windows_that_see_it(
    sees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in one that was opened while its own probes saw it."""
    node = Node(monkeypatch)
    node.probes.pulse = frozenset([] if sees else [KERNEL])
    window = opening(node)
    state = with_pulse(node, monkeypatch, [(S, 0)])
    node.probes.pulse = frozenset([KERNEL])
    for _ in range(PATIENCE):
        node.side.weigh(1.0)
    ((_, end),) = state.spans
    window.begin_ns, window.end_ns = 2 * S, 3 * S
    node.side.take_note()
    assert state.spans[1:] == ([(2 * S, 3 * S)] if sees else [])
    assert end


def test_a_pulse_that_is_found_is_not_seen_before_the_window_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call is seen twice until then."""
    node = Node(monkeypatch)
    node.probes.window_goes = True
    state = with_pulse(node, monkeypatch, [])
    node.side._count_by(node.jobs[0], state)
    assert node.probes.pulse == {KERNEL}
    assert not state.seen
    node.probes.window_goes = False
    node.side._see_again()
    assert state.seen


def test_calls_are_searched_while_no_window_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window waits for it a moment, and does not take their place."""
    node = Node(monkeypatch)
    job, searched = node.jobs[0], list[Job]()
    monkeypatch.setattr(node.side, "_search", searched.append)
    node.side._jobs[id(job)] = job, _OfJob(searched=_Searched(S, S + 1))
    node.side._due = 1.0
    opened: list[bool] = []
    node.probes.open_window = lambda *_: opened.append(True)
    node.side.poll(1.0)
    assert not opened
    node.probes.window_goes = True
    node.side.find_pulses(10 * S)
    assert not searched
    node.probes.window_goes = False
    node.side.find_pulses(10 * S)
    assert searched == [job]
    node.side.poll(1.0 + 1.01 * SEARCHED_S)
    assert opened
    del node.side._jobs[id(job)]
    window = opening(node)
    node.side._jobs[id(job)] = job, _OfJob(searched=_Searched(S, S + 1))
    window.begin_ns = 2 * S
    node.side.take_note()
    found = node.side._jobs[id(job)][1].searched
    assert found is not None
    assert found.begin_ns == S


def test_a_window_that_has_begun_is_noted_before_what_is_probed_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its span began before one that had just ended: pulses were counted twice."""
    node = Node(monkeypatch)
    window = opening(node)
    state = with_pulse(node, monkeypatch, [])
    node.probes.pulse = frozenset([2])
    window.begin_ns = 2 * S
    for _ in range(PATIENCE):
        node.side.weigh(1.0)
    ((begin, end),) = state.spans
    assert begin == 2 * S
    assert end == 0 or end > begin
