"""What a rank's main thread did in each step, from the marks that PyTorch itself makes.

torch names its own parts: the data loader's, the wrapped model's and the optimiser's calls are ``record_function``
ranges, the autograd engine has an entry and an exit, and a process group's works have a begin, an end and somebody who
waits. Time that one of these covers is attributed by marks; the loss between forward and backward or a batch's way to
the device have no marks of their own and are inferred from their neighbours. What is left is "other".

Only time on the CPU is attributed: on a GPU job the kernels of a forward may run while the main thread is in its
backward.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from argus.semantics.steps import by_calls as steps_by
from argus.semantics.steps.range_names import Role


class What(IntEnum):
    """What a mark is."""

    RANGE_BEGIN = 0
    """``record_function`` entered. Ranges pair like a stack, per thread."""
    RANGE_END = 1
    BACKWARD_BEGIN = 2
    """The autograd engine's ``execute`` entered."""
    BACKWARD_END = 3
    """``run_backward`` returned."""
    WAIT = 4
    """A thread begins to wait for the work ``handle``; 0: for all that are not finished."""
    WORK_BEGIN = 5
    """A communication thread starts to carry out the work ``handle``."""
    WORK_END = 6
    """It has finished it; same thread as the begin's."""
    STEP_BEGIN = 7
    """A range that may be a step begins: ``handle`` is what it is called, ``role`` 1 where it is called a step,
    ``depth`` how many ranges it lies in. No phase is made of these."""
    STEP_END = 8


MARK = np.dtype(
    [
        ("ts_ns", "<u8"),
        ("handle", "<u8"),
        ("tid", "<u4"),
        ("what", "u1"),
        ("role", "u1"),
        ("depth", "<u2"),
    ]
)
"""One event of a process. ``handle``: of waits and works; ``role``: of a range's begin. An end may leave it NONE: it
takes its begin's. ``depth``: of what may be a step only."""

PHASE = np.dtype(
    [
        ("rank", "<u4"),
        ("step", "<u4"),
        ("phase", "u1"),
        ("method", "u1"),
        ("spans", "<u4"),
        ("duration_ns", "<u8"),
        ("overlapped_ns", "<u8"),
        ("confidence", "<f4"),
    ]
)
"""One phase of one step of one rank. Durations of a step's phases sum to the step's. ``spans``: uninterrupted stretches
that ``duration_ns`` is made of. ``overlapped_ns``: communication behind the other phases, of communication only."""


SEGMENT = np.dtype([("begin_ns", "<i8"), ("end_ns", "<i8"), ("phase", "u1")])
"""A stretch of the training thread's time in one :class:`Phase`."""


class Phase(IntEnum):
    """``PHASE["phase"]``."""

    DATA_LOADING = 0
    FORWARD = 1
    BACKWARD = 2
    COMMUNICATION = 3
    OPTIMIZER = 4
    CHECKPOINT = 5
    OTHER = 6


PHASES = ("data_loading", "forward", "backward", "communication", "optimizer", "checkpoint", "other")
"""Names of ``PHASE["phase"]``, as the table ``phases`` spells them."""
METHODS = ("marks", "between_marks", "remainder")
"""Names of ``PHASE["method"]``: from marks of the phase itself, from its neighbours, what nothing explained."""
BY_MARKS, BETWEEN_MARKS, REMAINDER = range(3)

MARKS = 65_536
"""Marks kept while no step comes: 650 steps of 100 marks, 1.5 MiB a rank. Steps come at the latest when their period
has held for a few dozen units (:mod:`argus.semantics.steps.by_calls`)."""
WORKS = 4_096
"""Works remembered after their last mark, to know a wait for a finished one. Waits come within the step, and a step has
10 to 100 marks, so that this is 40 steps and more."""
THREADS = 64
"""Threads whose marks are counted, to find the main one. A process that starts a thread a step must not pile them up;
the main one is among those with most marks."""
DEPTH = 256
"""Ranges open in one another. Deeper is a sign of lost ends: Python itself stops at 1,000 frames."""
OFFSETS = 32
"""Newest distances from the optimiser's end to the boundary's collective, whose median stands in for a missing end:
enough for one slow step not to matter, and gone 32 steps after a change of batch size."""
BOUNDARIES = 64
"""Chosen boundaries remembered. The newest is enough for a rank's steps in order."""
PIECES = 1_024
"""Fed arrays joined at the latest when there are so many: an array's own cost is 5 marks'."""

_ESTIMATED = 0.5
"""At most this confidence in a step whose end has no mark: what :class:`argus.semantics.steps.by_calls.StepTracker`
gives to steps that it could not separate either."""


class _Label(IntEnum):
    """Explanations of the main thread's time, the strongest first; the last one is no explanation but goes along."""

    WAIT = 0
    WAIT_GUESSED = 1
    DATA = 2
    OPTIMIZER = 3
    BACKWARD = 4
    BACKWARD_GUESSED = 5
    FORWARD = 6
    CHECKPOINT = 7
    """Weaker than what it lies in: there "checkpoint" is one of activations."""
    DATA_GUESSED = 8
    FORWARD_GUESSED = 9
    NOTHING = 10
    WORK = 11


# Phase, method and confidence of each. A wait's end is seen on another thread, hence a little less than 1.
_MEANING = {
    _Label.WAIT: (Phase.COMMUNICATION, BY_MARKS, 0.95),
    _Label.WAIT_GUESSED: (Phase.COMMUNICATION, BETWEEN_MARKS, 0.8),
    _Label.DATA: (Phase.DATA_LOADING, BY_MARKS, 1.0),
    _Label.OPTIMIZER: (Phase.OPTIMIZER, BY_MARKS, 1.0),
    _Label.BACKWARD: (Phase.BACKWARD, BY_MARKS, 1.0),
    _Label.BACKWARD_GUESSED: (Phase.BACKWARD, BETWEEN_MARKS, 0.8),
    _Label.FORWARD: (Phase.FORWARD, BY_MARKS, 1.0),
    _Label.CHECKPOINT: (Phase.CHECKPOINT, BY_MARKS, 1.0),
    _Label.DATA_GUESSED: (Phase.DATA_LOADING, BETWEEN_MARKS, 0.8),
    _Label.FORWARD_GUESSED: (Phase.FORWARD, BETWEEN_MARKS, 0.8),
    _Label.NOTHING: (Phase.OTHER, REMAINDER, 0.8),
}
_OF_ROLE = {
    int(Role.DATA): _Label.DATA,
    int(Role.FORWARD): _Label.FORWARD,
    int(Role.OPTIMIZER): _Label.OPTIMIZER,
    int(Role.ZERO_GRAD): _Label.OPTIMIZER,
    int(Role.CHECKPOINT): _Label.CHECKPOINT,
}
_OUTSIDE = (Role.OPTIMIZER, Role.CHECKPOINT)
"""Roles that are no part of the sequence while they are open: closures of optimisers hold whole steps, and checkpoints
come anywhere."""
_INSIDE = tuple(role for role in _OF_ROLE if role not in _OUTSIDE)
_BACKWARD = -1  # beside the roles, where a backward is one of the things that follow one another

_Span = tuple[_Label, int, int]
"""Label, begin and end, ns. An empty or reversed one (a late mark's) counts for nothing."""


def innermost(roles: list[int], role: int) -> int:
    """The open range that an end closes; those above it lost theirs. -1: none."""
    if role == Role.NONE:
        return len(roles) - 1
    return next((i for i in range(len(roles) - 1, -1, -1) if roles[i] == role), -1)


class _Roles:
    """The roles of ranges open in one another, the outermost first. None is searched for: hundreds may stay open while
    others begin and end in them."""

    def __init__(self, roles: Iterable[int] = ()) -> None:
        self._roles: list[int] = []
        self._dropped = 0
        self._places: dict[int, list[int]] = {}
        """Where the ranges of each role are, in order; those that were dropped are counted, too."""
        for role in roles:
            self.push(role)

    def __len__(self) -> int:
        return len(self._roles)

    def __getitem__(self, place: int) -> int:
        return self._roles[place]

    def push(self, role: int) -> None:
        """A range began inside of all."""
        self._places.setdefault(role, []).append(self._dropped + len(self._roles))
        self._roles.append(role)

    def pop(self) -> None:
        """The innermost one ended."""
        self._places[self._roles.pop()].pop()

    def drop(self) -> None:
        """The outermost one is forgotten."""
        del self._places[self._roles.pop(0)][0]
        self._dropped += 1

    def innermost(self, role: int) -> int:
        """As the function :func:`innermost`."""
        if role == Role.NONE:
            return len(self._roles) - 1
        places = self._places.get(role)
        return places[-1] - self._dropped if places else -1

    def outermost(self, role: int) -> int:
        """The first range of a role. -1: none."""
        places = self._places.get(role)
        return places[0] - self._dropped if places else -1


class _WorkMarks:
    """The marks of one work. Thousands of waits may be for the same one: none goes through all of them."""

    def __init__(self, last: tuple[int, bool] | None) -> None:
        self._times: list[int] = []
        self._begins: list[int] = []
        """Which of the marks are begins."""
        self._ends: list[int] = []
        """Which are ends."""
        if last:
            self.append(*last)

    def append(self, ts: int, end: bool) -> None:
        """The next mark."""
        (self._ends if end else self._begins).append(len(self._times))
        self._times.append(ts)

    def wait_end(self, since: int, limit: int) -> tuple[int, bool]:
        """As that of :class:`_Works`."""
        at = bisect_right(self._times, since)
        # An address is used again: a work seen to end may be an older one's, and the one waited for still in a queue.
        ends = bisect_left(self._ends, at)
        done = ends > 0 and self._ends[ends - 1] == at - 1
        if at < len(self._times) and self._times[at] <= limit:
            if done:
                begin = self._first(self._begins, at, limit)
                if begin < 0:
                    return since, True
                at = begin + 1
            end = self._first(self._ends, at, limit)
            return (limit if end < 0 else self._times[end]), True
        return (since if done else limit), True

    def _first(self, marks: list[int], at: int, limit: int) -> int:
        """The first of some marks from ``at`` on, at the latest at the time ``limit``. -1: none."""
        found = bisect_left(marks, at)
        return marks[found] if found < len(marks) and self._times[marks[found]] <= limit else -1


class _Works:
    """The communication threads' works of one process."""

    def __init__(self, counters: Counter[str]) -> None:
        self.seen = False
        self._counters = counters
        self._open: dict[int, tuple[int, int]] = {}
        """Thread and begin, by handle."""
        self._of_thread: dict[int, set[int]] = {}
        """Handles of those, by thread."""
        self._begun: list[tuple[int, int]] = []
        """Begin and handle of those, the first one in front (``heapq``), among others that are no longer open."""
        self._last: dict[int, tuple[int, bool]] = {}
        """Time and whether an end, of each handle's last mark; the handle marked last comes last."""
        self._marks: dict[int, _WorkMarks] = {}
        """Those of the newest stretch, after what was last before it."""
        self._ends: list[int] = []

    def advance(self, marks: NDArray[np.void], begin: int, until: int) -> list[_Span]:
        """Takes the works' marks of a stretch, in order, and returns when works ran in it.

        A work open throughout the stretch though its thread began others lost its end: threads carry out one at a
        time.
        """
        spans: list[_Span] = []
        self._marks, self._ends = {}, []
        busy: set[int] = set()
        self.seen |= bool(len(marks))
        columns = (marks[name].tolist() for name in ("ts_ns", "handle", "tid", "what"))
        for ts, handle, tid, what in zip(*columns, strict=True):
            end = what == What.WORK_END
            last = self._last.pop(handle, None)
            if handle not in self._marks:
                self._marks[handle] = _WorkMarks(last)
            self._marks[handle].append(ts, end)
            self._last[handle] = (ts, end)
            since = self._close(handle)
            if since is not None:
                spans.append((_Label.WORK, since, ts))
            if end:
                self._ends.append(ts)
            else:
                self._open[handle] = (tid, ts)
                self._of_thread.setdefault(tid, set()).add(handle)
                heapq.heappush(self._begun, (ts, handle))
                busy.add(tid)
        since = self._first_open()
        if since is not None:  # those begun later run at the same time, up to the same end
            spans.append((_Label.WORK, since, until))
        for handle in [handle for tid in busy for handle in self._of_thread.get(tid, ())]:
            if self._open[handle][1] <= begin:
                self._close(handle)
                self._counters["works_unfinished"] += 1
        for handle in list(islice(self._last, max(0, len(self._last) - WORKS))):
            del self._last[handle]
            self._close(handle)
        return spans

    def _close(self, handle: int) -> int | None:
        """A work is open no longer. Returns since when it was, None if it was not."""
        opened = self._open.pop(handle, None)
        if opened is None:
            return None
        tid, since = opened
        of_thread = self._of_thread[tid]
        of_thread.remove(handle)
        if not of_thread:
            del self._of_thread[tid]
        return since

    def _first_open(self) -> int | None:
        """When the first of the open works began."""
        if len(self._begun) > 2 * len(self._open) + THREADS:
            self._begun = [(since, handle) for handle, (_, since) in self._open.items()]
            heapq.heapify(self._begun)
        while self._begun:
            since, handle = self._begun[0]
            if handle in self._open and self._open[handle][1] == since:
                return since
            heapq.heappop(self._begun)
        return None

    def wait_end(self, since: int, handle: int, limit: int, *, over: bool) -> tuple[int, bool]:
        """When a wait of the newest stretch ended, at the latest at ``limit``, and whether marks show it.

        Args:
            since: Begin of the wait.
            handle: Work waited for; 0: all.
            limit: The main thread's next mark, or the stretch's end.
            over: Whether it is the former, so that the wait did end.
        """
        if not self.seen:
            return limit, False
        if not handle:
            if not over and self._open:
                return limit, True
            at = bisect_right(self._ends, limit)
            return max(since, self._ends[at - 1]) if at else since, True
        marks = self._marks.get(handle)
        if marks is None:
            if handle not in self._last:
                return limit, False
            marks = _WorkMarks(self._last[handle])
        return marks.wait_end(since, limit)


@dataclass(slots=True)
class _Range:
    role: int
    begin: int
    part: bool = False
    """Whether it stands for itself in the sequence of parts, not inside of another."""
    closures: int = 0
    """How many closures of optimisers had begun before."""


class _Main:
    """The main thread's ranges, backwards and waits: turns marks in order into spans."""

    def __init__(self, tid: int, works: _Works, counters: Counter[str]) -> None:
        self.tid = tid
        self.open: list[_Range] = []
        self._roles = _Roles()
        """Those of ``open``."""
        self._works = works
        self._counters = counters
        self._spans: list[_Span] = []
        self._attributed_until = 0
        self._begun = False
        self._ends_known = False
        """Whether backwards have ends. Where they do, an optimiser inside a backward is a hook's."""
        self._depth = 0
        self._backward_since = 0
        self._backward_inside = 0
        """Ranges open when the backward began: it ends before any of them does."""
        self._newest_backward = -1
        self._newest_optimizer = -1
        self._closures = 0
        """How many have begun. An optimiser that was open then holds the newest one; others hold none."""
        self._resumed: tuple[int, bool] | None = None
        """Of optimisers that hold it: since when their time is the optimiser's, and whether it is even if another
        forward or backward follows inside of them. None: not now, the closure runs."""
        self._wait: tuple[int, int] | None = None
        self._after: int | None = None
        """The part before the open gap where that decides what the gap is: DATA or FORWARD."""
        self._since = 0
        self._zeroed = False
        """Whether a ZERO_GRAD came since that part."""
        self._pending: list[_Span] = []
        """Gaps that count if a forward or backward follows."""
        self._awaiting: list[_Span] = []
        """Gaps that count if a backward follows in the step."""

    def advance(self, marks: NDArray[np.void], begin: int, until: int) -> list[_Span]:
        """Takes the thread's marks of a stretch, in order, and returns what its time until ``until`` was spent on."""
        self._spans = []
        self._ends_known |= bool((marks["what"] == What.BACKWARD_END).any())
        if self._depth and not self._ends_known:  # attributed up to the step's end, and over with it
            self._depth = 0
            self._resume_optimizers(self._attributed_until, sure=True)
        self._attributed_until = until
        columns = (marks[name].tolist() for name in ("ts_ns", "what", "role", "handle"))
        for ts, what, role, handle in zip(*columns, strict=True):
            if self._wait:
                self._end_wait(ts, over=True)
                self._wait = None
            if what == What.RANGE_BEGIN:
                self._enter(ts, role)
            elif what == What.RANGE_END:
                self._leave(ts, role)
            elif what == What.BACKWARD_BEGIN:
                self._begin_backward(ts)
            elif what == What.BACKWARD_END:
                self._end_backward(ts)
            elif what == What.WAIT:
                self._wait = (ts, handle)
        self._cut(until)
        self._forget(begin)
        return self._spans

    def _cut(self, until: int) -> None:
        """Counts what is open up to the step's end."""
        if self._wait:
            since, handle = self._wait
            end = self._end_wait(until, over=False)
            if handle and since < end < until:
                self._wait = None
        first: dict[_Label, int] = {}  # all of them last until then
        for entry in self.open:
            shown = self._since_of(entry)
            if shown is not None:
                label = _OF_ROLE[entry.role]
                first[label] = min(shown, first.get(label, shown))
        self._spans += [(label, shown, until) for label, shown in first.items()]
        if self._depth:
            label = _Label.BACKWARD if self._ends_known else _Label.BACKWARD_GUESSED
            self._spans.append((label, self._backward_since, until))
        self._pending, self._awaiting = [], []

    def _forget(self, begin: int) -> None:
        """Gives up what was open throughout the step though the loop went round inside of it: its end was lost.

        A range keeps its place, in case its end does come.
        """
        optimizer, backward = self._newest_optimizer > begin, self._newest_backward > begin
        unfinished = 0
        for entry in self.open:
            # An optimiser may hold steps in a closure (LBFGS), but no further optimiser.
            around = optimizer or (backward and entry.role != Role.OPTIMIZER)
            if entry.role in _OF_ROLE and entry.begin < begin and around:
                entry.role, entry.part = int(Role.NONE), False
                unfinished += 1
        if unfinished:
            self._roles = _Roles(entry.role for entry in self.open)
            self._counters["ranges_unfinished"] += unfinished
        if self._depth and self._backward_since < begin and optimizer:
            self._depth = 0
            self._counters["backwards_unfinished"] += 1

    def _end_wait(self, limit: int, *, over: bool) -> int:
        assert self._wait is not None
        since, handle = self._wait
        end, seen = self._works.wait_end(since, handle, limit, over=over)
        self._spans.append((_Label.WAIT if seen else _Label.WAIT_GUESSED, since, end))
        return end

    def _inside(self) -> bool:
        """Whether a range of a role is open, those of :data:`_OUTSIDE` aside."""
        return any(self._roles.outermost(role) >= 0 for role in _INSIDE)

    def _enter(self, ts: int, role: int) -> None:
        self._begun = True
        if role in (Role.OPTIMIZER, Role.ZERO_GRAD) and self._depth and not self._ends_known:
            self._close_backward(ts, _Label.BACKWARD_GUESSED)
        if role == Role.DATA and self._depth:  # no hook loads data: the end was lost
            self._close_backward(ts, _Label.BACKWARD_GUESSED)
        entry = _Range(role, ts, closures=self._closures)
        if role in _OF_ROLE and role != Role.CHECKPOINT:
            entry.part = not self._depth and not self._inside()
        if role == Role.OPTIMIZER:
            self._newest_optimizer = ts
        elif entry.part:
            if role == Role.FORWARD:
                self._suspend_optimizers(ts)
            self._arrive(role, ts)
        self.open.append(entry)
        self._roles.push(role)
        if len(self.open) > DEPTH:
            del self.open[0]
            self._roles.drop()
            self._backward_inside = max(0, self._backward_inside - 1)
            self._counters["ranges_unfinished"] += 1

    def _leave(self, ts: int, role: int) -> None:
        at = self._roles.innermost(role)
        if at < 0:
            self._counters["ranges_unmatched"] += self._begun
            return
        if self._depth and at < self._backward_inside:
            self._close_backward(ts, _Label.BACKWARD_GUESSED)
        while len(self.open) > at:
            entry = self.open.pop()
            self._roles.pop()
            since = self._since_of(entry)
            if since is not None:
                self._spans.append((_OF_ROLE[entry.role], since, ts))
            if entry.part and entry.role == Role.OPTIMIZER:
                self._after, self._pending = None, []
            elif entry.part:
                self._depart(entry.role, ts)

    def _since_of(self, entry: _Range) -> int | None:
        """Since when an open range's time is that of its role. None: it is not now."""
        if entry.role not in _OF_ROLE:
            return None
        if entry.role != Role.OPTIMIZER or entry.closures == self._closures:
            return entry.begin
        return self._resumed[0] if self._resumed else None

    def _begin_backward(self, ts: int) -> None:
        self._newest_backward = ts
        if not self._depth:
            self._suspend_optimizers(ts)
            self._arrive(_BACKWARD, ts)  # inside of a forward there is no gap before it, but those before count
            self._backward_since, self._backward_inside = ts, len(self.open)
        self._depth += 1

    def _end_backward(self, ts: int) -> None:
        if not self._depth:
            self._counters["backwards_unmatched"] += 1
        elif self._depth == 1:
            self._close_backward(ts, _Label.BACKWARD)
        else:
            self._depth -= 1

    def _close_backward(self, ts: int, label: _Label) -> None:
        self._spans.append((label, self._backward_since, ts))
        self._depth = 0
        if not self._inside():
            self._resume_optimizers(ts, sure=True)

    # Lightning and LBFGS hand the whole step to the optimiser as a closure. Such an optimiser's own time begins after
    # its first backward. Optimisers in one another are suspended and resumed as one.

    def _suspend_optimizers(self, ts: int) -> None:
        outermost = self._roles.outermost(Role.OPTIMIZER)
        if outermost < 0:
            return
        if self._resumed and self._resumed[1] and self.open[outermost].closures < self._closures:
            self._spans.append((_Label.OPTIMIZER, self._resumed[0], ts))
        self._closures += 1
        self._resumed = None

    def _resume_optimizers(self, ts: int, *, sure: bool) -> None:
        self._resumed = self._resumed or (ts, sure)

    # Parts follow one another: DATA, FORWARD, ZERO_GRAD, backward. An optimiser that held no closure is noticed when
    # it ends. The gap between two is inferred from both; a ZERO_GRAD parts a gap and changes what is after it.

    def _arrive(self, role: int, ts: int) -> None:
        if role == Role.DATA:
            self._pending, self._after = [], None
            return
        if self._after == Role.ZERO_GRAD and role != _BACKWARD:
            self._after = None  # what comes before a wrapped model's forward may as well be a batch
        if self._after is not None:
            loading = self._after == Role.DATA and not self._zeroed and role != _BACKWARD
            self._pending.append((_Label.DATA_GUESSED if loading else _Label.FORWARD_GUESSED, self._since, ts))
        if role == Role.ZERO_GRAD:
            return
        self._awaiting += self._pending
        self._pending, self._after = [], None
        if role == _BACKWARD:
            self._spans += self._awaiting
            self._awaiting = []

    def _depart(self, role: int, ts: int) -> None:
        self._since = ts
        if role == Role.ZERO_GRAD:
            self._zeroed = True
            # With no batch and no wrapped model to go by, the forward is what lies before the backward.
            if self._after is None:
                self._after = Role.ZERO_GRAD
            return
        self._after, self._zeroed = role, False
        if role == Role.FORWARD:
            self._resume_optimizers(ts, sure=False)


class PhaseTracker:
    """The phases of one rank's steps. ``feed`` marks, ``snap`` the steps' boundaries, then ``split`` the steps.

    A step is split by the marks up to its end, so these should have come: drained buffers may be 50 ms apart. Marks
    that come later still close what they close, but change no phase already reported.

    Attributes:
        counters: What was lost or odd: ``marks_dropped_old``, ``marks_late``, ``main_thread_changed``,
            ``ranges_unmatched`` (ends without a begin), ``ranges_unfinished``, ``backwards_unmatched``,
            ``backwards_unfinished``, ``works_unfinished`` (begins without an end), ``steps_without_phases``.
    """

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self._pieces: list[NDArray[np.void]] = []
        self._kept = 0
        self._tallies: tuple[Counter[int], ...] = tuple(Counter() for _ in range(6))
        """Of each thread: optimisers, backwards, loaded batches, waits, forwards, checkpoints."""
        self._done = 0
        """Marks up to this time are taken."""
        self._dropped_ns = -1
        """Marks up to this time were dropped before their step came; -1: none."""
        self._works = _Works(self.counters)
        self._main: _Main | None = None
        self._chosen: dict[int, int] = {}
        """The boundary chosen for a collective's, newest last."""
        self._offsets: list[int] = []
        self._segments: list[tuple[int, int, int]] = []

    @property
    def marks_kept(self) -> int:
        """Marks that wait for their step."""
        return self._kept

    def feed(self, marks: NDArray[np.void]) -> None:
        """Takes marks of the rank's process: :data:`MARK`, shape (n,), in any order within 50 ms of time."""
        if not len(marks):
            return
        self._pieces.append(np.array(marks, MARK))
        self._kept += len(marks)
        begins = marks["what"] == What.RANGE_BEGIN
        for count, counted in zip(
            self._tallies,
            (
                begins & (marks["role"] == Role.OPTIMIZER),
                marks["what"] == What.BACKWARD_BEGIN,
                begins & (marks["role"] == Role.DATA),
                marks["what"] == What.WAIT,
                begins & (marks["role"] == Role.FORWARD),
                begins & (marks["role"] == Role.CHECKPOINT),
            ),
            strict=True,
        ):
            count.update(marks["tid"][counted].tolist())
        self.prune()

    def prune(self) -> None:
        """Keeps to the bounds above; ``feed`` calls it. Marks of steps that were split are gone already."""
        if len(self._pieces) > PIECES:
            self._pieces = [np.concatenate(self._pieces)]
        if self._kept > MARKS:
            # An eighth more than needed, so that a rank without steps does not sort for every feed.
            self._take_oldest(MARKS - MARKS // 8)
        for count in self._tallies:
            if len(count) > THREADS:
                kept = dict(count.most_common(THREADS // 2))
                count.clear()
                count.update(kept)

    def keep(self, most: int) -> None:
        """Keeps so many of the newest marks at most; the others are ``marks_dropped_old``. It goes on as if the process
        was traced only from then on: what was open is not known any more. No mark is gone through one by one, so that
        hundreds of ranks drop theirs at once."""
        if self._kept <= most:
            return
        marks = _joined(self._pieces)
        last = self._kept - most - 1
        until = int(np.partition(marks["ts_ns"], last)[last])
        left = marks.compress(marks["ts_ns"] > np.uint64(until))
        self._note_dropped(self._kept - len(left), until)
        self._done = max(self._done, until)
        self._pieces, self._kept = [left], len(left)
        works_seen = self._works.seen
        self._works, self._main = _Works(self.counters), None
        self._works.seen = works_seen

    def _take_oldest(self, most: int) -> None:
        """As :meth:`keep`, but what was open stays known: the marks go the way of a step's."""
        marks = self._sorted()
        until = int(marks["ts_ns"][self._kept - most - 1])
        dropped = int(np.searchsorted(marks["ts_ns"], np.uint64(until), side="right"))
        self._advance(marks[:dropped], self._done, until)
        self._keep(marks[dropped:])
        self._note_dropped(dropped, until)

    def _note_dropped(self, number: int, until: int) -> None:
        self.counters["marks_dropped_old"] += number
        self._dropped_ns = max(self._dropped_ns, until)

    def forget_marks(self) -> None:
        """Gives back the marks that wait for a step: none comes any more."""
        self._keep(np.empty(0, MARK))

    def snap(self, steps: NDArray[np.void]) -> NDArray[np.void]:
        """Moves the boundaries of steps from a collective back to the last optimiser's end before it.

        The end must be newer than the boundary before. Where there is none (gradients overflowed, attached just now),
        the boundary moves by the median of known distances. Continuous steps stay so, across calls too.

        Args:
            steps: Rows of ``steps.ITERATION``, shape (n,), of this rank.

        Returns:
            A copy, same order. Unchanged where no optimiser was ever marked.
        """
        out: NDArray[np.void] = steps.copy()
        ends = self._optimizer_ends() if len(steps) else []
        unmarked = not self._tallies[0]
        for i in np.argsort(steps["ts_ns"], kind="stable").tolist():
            begin = int(steps["ts_ns"][i])
            end = begin + int(steps["duration_ns"][i])
            if unmarked:
                self._choose(end, end)
                continue
            newest = max(self._chosen, default=0)
            nearest = self._last_between(ends, begin, end)
            if nearest is not None:
                self._learn(end - nearest)
            if begin not in self._chosen:
                # What the step before would have been is not known: taken to be as long as this one.
                after = max(begin - (end - begin), newest if newest < begin else 0)
                moved = self._last_between(ends, after, begin)
                if moved is None:
                    floor = max((m for b, m in self._chosen.items() if b <= begin), default=0)
                    moved = max(begin - self._offset(), floor)
                else:
                    self._learn(begin - moved)
                self._choose(begin, moved)
            start = self._chosen[begin]
            stop = max(end - self._offset() if nearest is None else nearest, start + 1)
            self._choose(end, stop)
            out["ts_ns"][i] = start
            out["duration_ns"][i] = stop - start
            if nearest is not None:
                out["method"][i] = steps_by.BY_MARKS
            elif stop != end:
                out["confidence"][i] = min(_ESTIMATED, float(out["confidence"][i]))
        return out

    def split(self, steps: NDArray[np.void]) -> NDArray[np.void]:
        """The phases of steps, whose marks are dropped.

        Args:
            steps: Rows of ``steps.ITERATION``, shape (n,), of this rank, after ``snap``; not older than those of
                earlier calls.

        Returns:
            :data:`PHASE`, shape (m,), by step and phase: none without time. Durations sum exactly to each step's. None
            of steps of which marks may have been dropped (``steps_without_phases``).
        """
        rows: list[tuple[float, ...]] = []
        marks = self._sorted() if len(steps) else np.empty(0, MARK)
        taken = 0
        for i in np.argsort(steps["ts_ns"], kind="stable").tolist():
            begin = int(steps["ts_ns"][i])
            end = begin + int(steps["duration_ns"][i])
            first, taken = taken, max(taken, int(np.searchsorted(marks["ts_ns"], np.uint64(end), side="right")))
            spans = self._advance(marks[first:taken], begin, end)
            if begin <= self._dropped_ns:
                self.counters["steps_without_phases"] += 1
                continue
            phases, segments = _phases(spans, begin, end)
            rows += [(int(steps["rank"][i]), int(steps["step"][i]), *phase) for phase in phases]
            self._segments += segments
        if taken:
            self._keep(marks[taken:])
        return np.array(rows, PHASE)

    def take_segments(self) -> NDArray[np.void]:
        """When each phase was, in the steps that were split since the last call: :data:`SEGMENT`, in order of time."""
        segments, self._segments = self._segments, []
        return np.array(segments, SEGMENT)

    def _keep(self, marks: NDArray[np.void]) -> None:
        self._pieces = [marks.copy()]
        self._kept = len(marks)

    def _advance(self, marks: NDArray[np.void], begin: int, until: int) -> list[_Span]:
        """Takes the ordered marks up to ``until``, a step's end, and returns what happened until then."""
        self.counters["marks_late"] += int(np.searchsorted(marks["ts_ns"], np.uint64(self._done), side="right"))
        self._done = max(self._done, until)
        spans = self._works.advance(marks[marks["what"] >= What.WORK_BEGIN], begin, until)
        tid = self._main_thread()
        if tid is None:
            return spans
        if self._main is None or self._main.tid != tid:
            self.counters["main_thread_changed"] += self._main is not None
            self._main = _Main(tid, self._works, self.counters)
        return spans + self._main.advance(marks[marks["tid"] == tid], begin, until)

    def _sorted(self) -> NDArray[np.void]:
        """All marks kept, in order of time; shape (n,)."""
        marks = np.concatenate(self._pieces) if self._pieces else np.empty(0, MARK)
        times = marks["ts_ns"]
        if (times[1:] < times[:-1]).any():
            marks = marks[np.argsort(times, kind="stable")]
        self._pieces = [marks]
        return marks

    def _main_thread(self) -> int | None:
        """The thread that trains: most optimisers, else backwards, batches, waits, forwards, checkpoints; of equals the
        first."""
        count = next((count for count in self._tallies if count), None)
        return min(count, key=lambda tid: (-count[tid], tid)) if count else None

    def _optimizer_ends(self) -> list[int]:
        """When optimisers ended on the main thread, of the marks not yet taken, in order."""
        tid = self._main_thread()
        if tid is None:
            return []
        roles = _Roles(entry.role for entry in self._main.open) if self._main and self._main.tid == tid else _Roles()
        marks = self._sorted()
        marks = marks[(marks["tid"] == tid) & (marks["what"] <= What.RANGE_END)]
        ends = []
        for ts, what, role in zip(*(marks[name].tolist() for name in ("ts_ns", "what", "role")), strict=True):
            if what == What.RANGE_BEGIN:
                roles.push(role)
                if len(roles) > DEPTH:
                    roles.drop()
                continue
            at = roles.innermost(role)
            if at >= 0:
                if roles[at] == Role.OPTIMIZER:
                    ends.append(ts)
                while len(roles) > at:
                    roles.pop()
        return ends

    @staticmethod
    def _last_between(times: list[int], after: int, until: int) -> int | None:
        """The last of ordered times in (after, until]."""
        at = bisect_right(times, until)
        return times[at - 1] if at and times[at - 1] > after else None

    def _learn(self, offset: int) -> None:
        self._offsets = [*self._offsets, offset][-OFFSETS:]

    def _offset(self) -> int:
        return int(np.median(self._offsets)) if self._offsets else 0

    def _choose(self, boundary: int, moved: int) -> None:
        self._chosen.pop(boundary, None)
        self._chosen[boundary] = moved
        if len(self._chosen) > BOUNDARIES:
            del self._chosen[next(iter(self._chosen))]


def _joined(pieces: list[NDArray[np.void]]) -> NDArray[np.void]:
    """Marks of several arrays in one. They are copied as bytes: numpy copies each field apart, in 40 times the time."""
    return np.concatenate([piece.view(f"V{MARK.itemsize}") for piece in pieces]).view(MARK)


def _phases(
    spans: list[_Span], begin: int, end: int
) -> tuple[list[tuple[int, int, int, int, int, float]], list[tuple[int, int, int]]]:
    """The rows of one step, :data:`PHASE` without rank and step: the strongest label of each moment wins. And when each
    phase was, :data:`SEGMENT`."""
    segments: list[tuple[int, int, int]] = []
    edges: list[tuple[int, int, int]] = []
    for label, since, until in spans:
        since, until = max(since, begin), min(until, end)
        if since < until:
            edges += [(since, label, 1), (until, label, -1)]
    edges.append((end, _Label.NOTHING, 0))
    edges.sort()
    active = [0] * len(_Label)
    active[_Label.NOTHING] = 1
    times = dict.fromkeys(_MEANING, 0)
    runs = [0] * len(Phase)
    overlapped, at, previous = 0, begin, -1
    for ts, edge, change in edges:
        if ts > at:
            label = next(label for label in _MEANING if active[label])
            phase = _MEANING[label][0]
            times[label] += ts - at
            runs[phase] += phase != previous
            if active[_Label.WORK] and phase != Phase.COMMUNICATION:
                overlapped += ts - at
            if phase == previous:
                segments[-1] = segments[-1][0], ts, int(phase)
            else:
                segments.append((at, ts, int(phase)))
            at, previous = ts, phase
        active[edge] += change
    rows = []
    for phase in Phase:
        parts = [(times[label], method, sure) for label, (of, method, sure) in _MEANING.items() if of == phase]
        duration = sum(time for time, _, _ in parts)
        behind = overlapped if phase == Phase.COMMUNICATION else 0
        if not duration and not behind:
            continue
        method = max(parts, key=lambda part: part[0])[1]  # the first of equals: by marks
        sure = sum(time * sure for time, _, sure in parts) / duration if duration else parts[0][2]
        rows.append((int(phase), method, runs[phase], duration, behind, sure))
    return rows, segments
