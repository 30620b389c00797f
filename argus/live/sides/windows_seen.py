"""How much of what is probed in windows was seen: of each job, and in all.

A window is none of a job of which a file lacks its probes. Who has fewer of them is reported to have seen less, and
what its calls add up to is extrapolated from those that it had.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from argus.capture.attachment import Attachment, Subject
from argus.capture.probing.windows import Window
from argus.live.cost.governor import Plan, Rung
from argus.live.coverage import Seen
from argus.live.job import Job, Member
from argus.live.session import Session
from argus.live.side import Side
from argus.model.units import seconds

RECENT = 64
"""A job's share of windows is that of about so many of the last ones."""
LEAST_SHARE = 1 / RECENT
Kind = Literal["windows", "samples"]
_ON_TIME = 0.9
"""As many windows as that are all."""
LACKING = "its files lacked their probes in each of the last windows"


class WindowsHad:
    """Of the windows of each kind, how many a job had."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[Job, dict[Kind, tuple[float, float]]] = WeakKeyDictionary()
        self._shown: WeakKeyDictionary[Job, dict[Kind, float]] = WeakKeyDictionary()

    def add(self, job: Job, kind: Kind, window_ns: float, *, had: bool) -> None:
        """A window is over, or could not begin. ``had``: nothing of the job's was lacking in it."""
        of_job = self._of.setdefault(job, {})
        of_it, of_all = (part * (1 - 1 / RECENT) for part in of_job.get(kind, (0.0, 0.0)))
        of_job[kind] = of_it + window_ns * had, of_all + window_ns

    def share(self, job: Job, kind: Kind) -> float:
        """Of the time of the last windows, that of those that a job had."""
        of_it, of_all = self._of.get(job, {}).get(kind, (0.0, 0.0))
        return of_it / of_all if of_all else 1.0

    def shown(self, job: Job, kind: Kind) -> float:
        """The same, to be reported: small changes are not worth a row."""
        new, shown = self.share(job, kind), self._shown.setdefault(job, {})
        new, old = 1.0 if new > 1 - LEAST_SHARE / 2 else new, shown.get(kind, 1.0)
        if new in (0.0, 1.0) or not old or not 2 / 3 < new / old < 1.5:
            shown[kind] = old = new
        return old


class WindowsPace:
    """How often windows are opened, against what a plan says: probes may be slow to come, or to go."""

    def __init__(self) -> None:
        self._opened_at = self._period_s = 0.0
        self._planned_s = self._took_s = 0.0
        self._shown = 1.0

    def begin(self, now: float, period_s: float) -> float:
        """One is opened, and the next one is to be after so long. Returns when that is."""
        if self._opened_at:
            self._planned_s = self._planned_s * (1 - 1 / RECENT) + self._period_s
            self._took_s = self._took_s * (1 - 1 / RECENT) + max(now - self._opened_at, self._period_s)
        self._opened_at, self._period_s = now, period_s
        return now + period_s

    def rest(self) -> None:
        """There are none for a while."""
        self._opened_at = 0.0

    def shown(self) -> float:
        """Of the windows that a plan says, how many there are, 0 to 1, to be reported: small changes are not worth a
        row."""
        new = self._planned_s / self._took_s if self._took_s else 1.0
        new = 1.0 if new > _ON_TIME else new
        if new == 1.0 or not 2 / 3 < new / self._shown < 1.5:
            self._shown = new
        return self._shown


@dataclass
class _Calls:
    """A job's calls of a subject in windows.

    Attributes:
        inside: How many were seen in those that it had.
        had_ns, all_ns: How long these were, and all since it began.
    """

    inside: int = 0
    had_ns: int = 0
    all_ns: int = 0

    def in_all(self) -> float:
        """How many it made in all windows, as far as is known."""
        return self.inside * self.all_ns / self.had_ns if self.had_ns else float(self.inside)


_SIGNALS: dict[str, tuple[Subject, ...]] = {
    "ranges": ("ranges",),
    "nvtx": ("nvtx",),
    "backward": ("backward",),
    "launches": ("launches",),
    "calls": ("copies", "waits"),
    "collectives": ("collectives",),
    "products": ("math",),
}
"""Of ``coverage.SIGNALS``, those that are probed: the subjects of their probes."""


class WindowsSeen(Side):
    """What was seen: the part of ``ProbingSide`` that is about that."""

    _session: Session
    plan: Plan
    on_ns: dict[str, int]
    thinned_since_ns: dict[str, int]
    _slowed: float

    def __init__(self) -> None:
        self.had = WindowsHad()
        self._pace = WindowsPace()
        self._in_windows: Tally[str] = Tally()
        self._gone: Tally[str] = Tally()
        """Calls that were seen while probes came or went, and are in no window."""
        self._in_all_windows: dict[str, float] = dict.fromkeys(get_args(Subject), 0.0)
        """Calls of jobs that are over in windows, as if each had had all of them."""
        self._of_jobs: WeakKeyDictionary[Job, dict[str, _Calls]] = WeakKeyDictionary()
        """Of the others."""
        self._windows: deque[tuple[Window, Collection[int]]] = deque(maxlen=8)
        """The last ones, and jobs of which not all was seen in them (their ``id``)."""
        self._shown = Plan()
        """The plan that was reported last: small changes of windows are not worth a row."""
        self._shown_samples = Plan()

    def measured_share(self) -> float:
        raise NotImplementedError

    def observed(self, members: Sequence[Member]) -> dict[int, dict[str, Seen]]:
        """What is probed in the files that each process maps."""
        roster = self._session.roster
        of, pids = roster.attachments_of, [member.target.pid for member in members]
        jobs = {pid: roster.by_pid[pid][0] for pid in pids if pid in roster.by_pid}
        had = {job: (self.had.shown(job, "windows"), self.had.shown(job, "samples")) for job in {*jobs.values()}}
        all_of_them = 1.0, 1.0
        keys = {
            pid: (member.ignored, tuple(of(member)), had[jobs[pid]] if pid in jobs else all_of_them)
            for pid, member in zip(pids, members, strict=True)
        }
        alike = {key: self._observed(*key) for key in {*keys.values()}}
        return {pid: alike[key] for pid, key in keys.items()}

    def _observed(self, ignored: str, attached: Sequence[Attachment], had: tuple[float, float]) -> dict[str, Seen]:
        observed: dict[str, Seen] = {}
        refused = self._session.probes.refused
        for signal, subjects in _SIGNALS.items():
            probed = [seen for each in attached for subject in subjects if (seen := each.seen(subject)) is not None]
            if not probed:
                continue
            if ignored:
                observed[signal] = Seen(0.0, 0, ignored)
            elif (windows := self.seen(subjects, *had)) is not None:
                observed[signal] = windows
            else:
                why = next((refused[subject] for subject in subjects if subject in refused), "")
                observed[signal] = Seen() if all(probed) else Seen(0.0, 0, why or _why_not(signal, self.plan))
        return observed

    def seen(self, subjects: Iterable[Subject], of_windows: float = 1.0, of_samples: float = 1.0) -> Seen | None:
        """How much of subjects is seen; None: as they are probed. ``of_windows``, ``of_samples``: the share of
        them that a job had."""
        if any(subject in self.plan.sampled for subject in subjects):
            new, old = self.plan, self._shown_samples
            if not old.sample_s or not 2 / 3 < new.sample_period_s / old.sample_period_s < 1.5:
                self._shown_samples = old = new
            text = f"what it costs is above --max-overhead: seen for about {seconds(old.sample_s)} now and then"
            return _seen_in(old.sample_s / old.sample_period_s, old.sample_period_s, text, of_samples)
        if not any(subject in self.plan.windowed for subject in subjects):
            return None
        if self._shown.windowed != self.plan.windowed or not 2 / 3 < self.plan.duty / self._shown.duty < 1.5:
            self._shown = self.plan
        shown, pace = self._shown, self._pace.shown()
        text = f"what it costs is above --max-overhead: seen in windows of about {seconds(shown.length_s)}"
        text += f", {pace:.0%} as often as planned, since probes are slow to come and go" if pace < 1 else ""
        return _seen_in(shown.duty * pace, shown.period_s / pace, text, of_windows)

    def until_ns(self, subject: Subject) -> int:
        """Until when a subject was seen throughout, if it is seen in windows now, CLOCK_MONOTONIC."""
        return self.thinned_since_ns[subject] if subject in self.plan.windowed else 1 << 62

    def count(self, subject: Subject, ts_ns: NDArray[np.uint64], job: Job) -> None:
        """Takes when calls of a job were made, of a subject: those that came while it is seen in windows are counted
        apart."""
        if (until_ns := self.until_ns(subject)) == 1 << 62:
            return
        late = ts_ns[ts_ns >= until_ns].astype(np.int64)
        inside = np.zeros(len(late), bool)
        for window, left_out in self._windows:
            if id(job) not in left_out:
                inside |= (late >= window.begin_ns) & (late < (window.end_ns or 1 << 62))
        self._in_windows[subject] += int(inside.sum())
        self._of_jobs.setdefault(job, {}).setdefault(subject, _Calls()).inside += int(inside.sum())
        self._gone[subject] += len(late) - int(inside.sum())

    def _add_window(self, job: Job, kind: Kind, window: Window, *, had: bool) -> None:
        """A window is over. ``had``: nothing of the job's was lacking in it."""
        window_ns = window.end_ns - window.begin_ns
        self.had.add(job, kind, window_ns, had=had)
        for subject in window.subjects if kind == "windows" else ():
            calls = self._of_jobs.setdefault(job, {}).setdefault(subject, _Calls())
            calls.had_ns, calls.all_ns = calls.had_ns + window_ns * had, calls.all_ns + window_ns

    def _sum_up(self, job: Job) -> None:
        """A job is over: its calls stay in the sums."""
        for subject, calls in self._of_jobs.pop(job, {}).items():
            self._in_all_windows[subject] += calls.in_all()

    def describe(self, counts: Mapping[Subject, int], now_ns: int, started_ns: int) -> list[str]:
        """What was seen in windows, in lines for people.

        Args:
            counts: How many calls of each subject were seen in all.
            now_ns, started_ns: Now, and when the trace began, CLOCK_MONOTONIC.
        """
        lines = []
        for subject, count in counts.items():
            since = self.thinned_since_ns.get(subject)
            if since is None or subject not in self.plan.windowed:
                continue
            thinned_ns, on_ns = max(now_ns - since, 1), self.on_ns[subject]
            inside, in_all = self._in_windows[subject], self._in_all_windows[subject]
            in_all += sum(of_job[subject].in_all() for of_job in self._of_jobs.values() if subject in of_job)
            had_ns = on_ns * (inside / in_all if in_all else self._mean_share())
            share = min((max(since - started_ns, 0) + had_ns) / max(now_ns - started_ns, 1), 1.0)
            # While it is seen the job makes fewer of them.
            lost = self.measured_share()
            slowed = 1 / (1 - lost) if lost else self._slowed
            before = count - inside - self._gone[subject]
            made = before + in_all * slowed * thinned_ns / on_ns if had_ns else float(count)
            how = f"about {made:,.0f} were made (extrapolated)" if had_ns else "what was made since is not known"
            lines.append(f"overhead: {subject} were seen in {share:.1%} of the time: {count:,}; {how}")
        return lines

    def _mean_share(self) -> float:
        """Of windows, those that a job had."""
        shares = [self.had.share(job, "windows") for job in self._session.jobs]
        return sum(shares) / len(shares) if shares else 1.0


def _seen_in(duty: float, period_s: float, text: str, had: float) -> Seen:
    """What a job sees of windows, of which it had this share."""
    if not had:
        return Seen(0.0, 0, LACKING)
    text += f", {had:.0%} of them, since its files lacked their probes in others" if had < 1 else ""
    return Seen(duty * had, round(1e9 * period_s / had), text)


def _why_not(signal: str, plan: Plan) -> str:
    if signal == "products" and Rung.PRODUCTS not in plan.rungs:
        return "GPU times are off"
    return "what it would cost is above --max-overhead"
