"""One attempt of a job, its ranks, and the state that its steps and communicators are made from."""

from __future__ import annotations

import itertools
import time
from collections import Counter as Tally
from collections import defaultdict, deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from argus.capture.attachment import Subject
from argus.capture.process.names import LookUps
from argus.capture.process.nccl import rank_offset, read_place
from argus.capture.process.pytorch import read_group
from argus.capture.process.targets import NVTX, TORCH, Target, queued_ns
from argus.live.display.recent import LATE_CALLS, RecentSteps
from argus.model import records
from argus.model.calls import CALLS, Shape
from argus.model.groups import Membership, Place
from argus.semantics.gpu.flops import Counted
from argus.semantics.groups.communicators import COMMUNICATOR
from argus.semantics.groups.mesh import GUESSED, Group, Traffic, find_mesh
from argus.semantics.phases.cpu import PhaseTracker, What
from argus.semantics.phases.gpu import Calls, Transfers
from argus.semantics.phases.sampled import SampledPhases
from argus.semantics.steps.by_calls import ITERATION, StepTracker, backward_calls, calls_of
from argus.semantics.steps.by_marks import MarkedSteps, drop_ends, forget_calls, forget_marks
from argus.semantics.steps.marks import Marks
from argus.semantics.steps.thinned import ThinnedSteps

KEPT_COMMUNICATORS = 1024
"""Communicators of a job that are remembered, on this host. Large jobs have some thirty a rank; one that makes new ones
for ever has as many as it lives long."""
KEPT_CONTROL = 1024
"""Newest calls about communicators that are kept of a rank."""
KEPT_GROUPS = 256
"""Groups of the mesh that are remembered of a job that is over, those that the view would show alike as one."""
MADE_OF_RANK = 64
"""Communicators that were not called are remembered for so many a rank, where that is more."""
ALWAYS_ASKED = 256
"""Communicators and groups that a rank is asked about whatever its owner's account holds: large jobs have thirty."""
MOST_ASKED = 64
"""New communicators of which a rank is asked in a turn: each time that takes 0.1 ms."""
QUEUE_NOTES = 256
"""Newest moments at which it is remembered for how long a rank had waited for a CPU: of more than a hundred windows."""


@dataclass
class Member:
    """One traced process of a job.

    Attributes:
        rank: Global rank.
        rank_source: The launcher whose variable named it; "order": guessed; "parent": a helper of that rank.
        state: "traced" or "exited".
        launches, collectives, steps: Counted so far.
        probes: Probes on the libraries it maps.
        refused: Records that its budgets had no room for (``Probes.spent``).
        over_share: Samples and switches of threads beyond its share.
        calls_over_share: Calls without a duration, collectives without a number, refused records
            (``Probes.over_share``).
        without_slot: Files that it maps and for which there was no slot (``Attachment.lacks_slot``).
        without_code: Files that it maps and whose instructions could not be read (``Attachment.lacks_code``).
        ignored: Why nothing of its calls is recorded any more; empty: they are.
        asked: Communicators and groups that it was asked about.
    """

    target: Target
    rank: int
    rank_source: str
    state: str = "traced"
    launches: int = 0
    collectives: int = 0
    steps: int = 0
    last_step: int = -1
    last_step_ns: int = 0
    probes: int = 0
    refused: int = 0
    over_share: int = 0
    calls_over_share: tuple[int, int, int] = (0, 0, 0)
    without_slot: int = 0
    without_code: int = 0
    ignored: str = ""
    asked: int = 0

    @property
    def helper(self) -> bool:
        """Whether it is a child of the rank's own process (a data-loader worker): its calls are no steps."""
        return self.rank_source == "parent"

    def may_ask(self, look_ups: LookUps) -> bool:
        """Whether it may be asked about one more communicator: the first ones decide what a job is."""
        self.asked += 1
        return self.asked <= ALWAYS_ASKED or look_ups.may_look_up(self.target.pid)


_COLLECTIVE = [call.shape in (Shape.COLLECTIVE, Shape.C10D) for call in CALLS]
"""By number: whether a call is a collective."""
_ENDS = frozenset(call.id for call in CALLS if call.kind == "comm_end")
_MAKES = frozenset(call.id for call in CALLS if call.kind in ("comm_init", "comm_split"))
_SPLITS = [call.id for call in CALLS if call.kind == "comm_split"]
_OF_LIFE = np.array(sorted(_ENDS | _MAKES))
"""Calls that end or make a communicator."""


@dataclass
class Alignment:
    """Of a job's communicators: it waits for its turn, is under way, or is found.

    Attributes:
        parts: What does some of it each time; None: it has not begun.
        of: Rank and handle of all that may be found.
        gone: Those of these that were forgotten since it began: what has their addresses now is another.
        found: ``COMMUNICATOR`` rows; None: not yet.
        took_s: CPU time so far.
    """

    parts: Generator[None, None, NDArray[np.void]] | None = None
    of: set[tuple[int, int]] = field(default_factory=set)
    gone: set[tuple[int, int]] = field(default_factory=set)
    found: NDArray[np.void] | None = None
    took_s: float = 0.0


@dataclass
class CallsEnd:
    """The end of steps that are inferred from calls. Communicators are lined up before the last ones are taken, as at
    the end of a job: nothing more will show how they are.

    Attributes:
        until: Until when that is waited for, ``time.monotonic()``; 0: not all calls from before it were fed.
        lined_up: Whether they are, or were waited for long enough.
    """

    until: float = 0.0
    lined_up: bool = False


@dataclass
class Alignments:
    """The last one that was found.

    Attributes:
        at: When, ``time.monotonic()``.
        rests: No other begins before this: they take time.
        calls: How many calls it went by, if all communicators are known, and it found nothing new; else 0.
        in_vain: How often it was so in a row that some are not known, and nothing new was found.
        rests_in_vain: As ``rests``, while nothing is new: no other handles, and not twice as many calls.
        went_by: The handles, and how many collectives had been called.
    """

    at: float = 0.0
    rests: float = 0.0
    calls: int = 0
    in_vain: int = 0
    rests_in_vain: float = 0.0
    went_by: tuple[frozenset[tuple[int, int]], int] = frozenset(), 0


@dataclass(eq=False)
class Job:
    """One attempt of one job, and what its steps are made from. Ranks that start again make a new one: a new run.

    ``by_marks``: whether steps are named by marks of PyTorch or NVTX; None: not yet known. ``marks``: of each rank,
    what makes them. ``phase_ns``: time of all ranks' steps by phase; ``hidden_ns``: of communication behind other
    phases; ``gpu_phase_ns``: as ``phase_ns``, of their GPUs.
    ``step_ns``, ``step_count``: all ranks' steps, and how many they are; ``phased_steps``: those with phases;
    ``phases_until``: from when on only those of samples have, 0: all do. ``sampled``: phases of these.
    ``queues``: as ``ThinnedSteps`` has them. ``counted``: the FLOPs of some.
    ``placed``: the newest row of each handle that may be called. ``traffic``: by rank and handle, those called last at
    the end. ``ended``: rank and handle of communicators that are no more. ``forgotten``: how many others were too many.
    """

    name: str
    run: int
    lineage: str = ""
    owner: tuple[int, str] = (-1, "")
    members: dict[int, Member] = field(default_factory=dict)
    tracker: StepTracker = field(default_factory=StepTracker)
    marked: MarkedSteps = field(default_factory=MarkedSteps)
    by_marks: bool | None = None
    thinned: ThinnedSteps | None = None
    thin_since: int = 0
    marks: dict[int, Marks] = field(default_factory=dict)
    step_base: int = 0
    phases: dict[int, PhaseTracker] = field(default_factory=dict)
    phases_until: int = 0
    sampled: SampledPhases = field(default_factory=SampledPhases)
    queues: dict[int, deque[tuple[int, int]]] = field(default_factory=dict)
    phase_ns: Tally[str] = field(default_factory=Tally)
    hidden_ns: int = 0
    step_ns: int = 0
    step_count: int = 0
    phased_steps: int = 0
    gpu_phase_ns: Tally[str] = field(default_factory=Tally)
    counted: Counted = field(default_factory=Counted)
    transfers: Transfers = field(default_factory=Transfers)
    calls: dict[int, Calls] = field(default_factory=dict)
    communicators: NDArray[np.void] = field(default_factory=lambda: np.empty(0, COMMUNICATOR))
    recent: dict[int, NDArray[np.void]] = field(default_factory=dict)
    syncs: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    control: dict[int, NDArray[np.void]] = field(default_factory=dict)
    handles: set[tuple[int, int]] = field(default_factory=set)
    named: dict[int, dict[int, Membership]] = field(default_factory=dict)
    places: dict[int, dict[int, Place | None]] = field(default_factory=dict)
    traffic: dict[tuple[int, int], Traffic] = field(default_factory=dict)
    ended: set[tuple[int, int]] = field(default_factory=set)
    forgotten: int = 0
    placed: NDArray[np.void] = field(default_factory=lambda: np.empty(0, COMMUNICATOR))
    mesh: list[Group] = field(default_factory=list)
    recent_steps: RecentSteps = field(default_factory=RecentSteps)
    losses: Tally[str] = field(default_factory=Tally)
    """What failed of this job alone, by counter (``Bulkheads.of``)."""
    groups_due: float = 0.0
    alignment: Alignment | None = None
    alignments: Alignments = field(default_factory=Alignments)
    _pulse_what: What = What.BACKWARD_BEGIN
    pulse_spans: list[tuple[int, int]] | None = None
    """When backward passes were seen, the end 0 as long as they are; None: throughout."""
    _ranges_until: int = 0
    _thinned_by: str = ""
    """"marks", "calls", or empty: ``thinned`` has not taken over."""
    calls_end: CallsEnd | None = None
    """Steps are still inferred from calls before ``thin_since``: the last of them were not taken."""
    _left: NDArray[np.void] = field(default_factory=lambda: np.empty(0, ITERATION))
    _early: dict[int, list[NDArray[np.void]]] = field(default_factory=dict)
    """Marks from ``thin_since`` on, of the time before ``thinned`` takes over, by rank."""
    _main: dict[int, int] = field(default_factory=dict)
    """The thread whose backward passes count, by rank."""
    _ended: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Number and end of each rank's newest step."""
    over_since: float = 0.0
    """When the last of its processes was forgotten, ``time.monotonic()``; 0: one is left."""
    _not_aligned: int = 0
    """``not_aligned`` when it was over, of those that were forgotten then."""
    covered_at: float = 0.0
    """When its coverage was stored last, ``time.monotonic()``."""
    finishing: bool = False
    """Whether some of its last steps were stored."""
    finished: bool = False
    """Whether its last steps were stored: it is over, and nothing more is expected."""

    def counters(self) -> Tally[str]:
        """What was counted while its steps were made; none is a loss."""
        parts = [self.tracker.counters, self.marked.counters, self.sampled.counters]
        parts += [self.thinned.counters] if self.thinned is not None else []
        parts += [phases.counters for phases in self.phases.values()]
        parts += [marks.counters for marks in self.marks.values()]
        return sum(parts, Tally())

    def holder(self, rank: int) -> Member | None:
        """The process that is this rank, or was."""
        members = [m for m in self.members.values() if m.rank == rank and not m.helper]
        return members[-1] if members else None

    def ranks(self) -> list[Member]:
        """Its ranks' processes, without helpers."""
        return [member for member in self.members.values() if not member.helper]

    @property
    def by_calls(self) -> bool:
        """Whether steps are inferred from the sequence of calls: no marks name them, or will."""
        marks = any(member.target.has(TORCH[0]) or member.target.has(NVTX) for member in self.ranks())
        return self.by_marks is False or (self.by_marks is None and not marks)

    def feed(
        self,
        member: Member,
        launched: NDArray[np.void] | None,
        called: NDArray[np.void] | None,
        calls: NDArray[np.void] | None = None,
    ) -> None:
        """Takes a rank's launches (LAUNCH rows) or collectives (COLLECTIVE rows), by time, for its steps. ``calls``:
        the same as ``CALL`` rows, if they are known; not looked at where marks name the steps."""
        if not self.by_marks:
            calls = (
                np.concatenate([calls_of(each) for each in (launched, called) if each is not None])
                if calls is None
                else calls
            )
            if self._thinned_by == "calls":
                calls = calls[calls["ts"] < self.thin_since]
            self.tracker.feed_calls(member.rank, calls)
        if self.by_marks is not False and (member.target.has(TORCH[0]) or member.target.has(NVTX)):
            self.marked.feed_calls(member.rank, None if launched is None else launched["ts_ns"], called)

    def feed_marks(self, member: Member, marks: NDArray[np.void]) -> None:
        """Takes a rank's marks (``semantics.phases.cpu.MARK`` rows), for its steps and phases."""
        if self.sampled:
            self.sampled.feed(member.rank, marks)
        if self.thin_since and self._thinned_by != "calls":
            late = marks["ts_ns"] >= self.thin_since
            if late.any():
                self._early.setdefault(member.rank, []).append(marks[late])
                marks = marks[~late]
        of_phases = marks[marks["what"] < What.STEP_BEGIN]
        if self.phases_until:
            of_phases = of_phases[of_phases["ts_ns"] < self.phases_until]
        if len(of_phases):
            self.phases.setdefault(member.rank, PhaseTracker()).feed(of_phases)
        if self.by_marks is not False:
            self.marked.feed_marks(member.rank, marks)
        if not self.by_marks:
            began = marks["ts_ns"][(marks["what"] == What.BACKWARD_BEGIN) & (marks["ts_ns"] < _calls_until(self))]
            self.tracker.feed_calls(member.rank, backward_calls(np.sort(began)))

    def steps(self, until_ns: int, *, final: bool) -> NDArray[np.void]:
        """ITERATION rows of the steps completed since the last call, by marks where all ranks have them.

        Args:
            until_ns: What happened before this has been fed.
            final: Nothing more will come.
        """
        if self.thin_since and not self._thinned_by and (until_ns >= self.thin_since or final):
            self._hand_over()
            if self.by_marks and self.marked.waiting:  # it goes on with the next ones
                return self._left
        if self.thinned is not None and self._thinned_by and self.calls_end is None:
            self._feed_pulses()
            left, self._left = self._left, np.empty(0, ITERATION)
            return np.concatenate([left, self.thinned.advance(until_ns, final=final)])
        last = self.calls_end is not None and self.calls_end.lined_up
        steps = self._steps(until_ns, final=final or last)
        self.calls_end = None if last and not self.tracker.waiting else self.calls_end
        for rank, step, begin, duration in zip(
            *(steps[n].tolist() for n in ("rank", "step", "ts_ns", "duration_ns")), strict=True
        ):
            self._ended[rank] = step, begin + duration
        return steps

    def _steps(self, until_ns: int, *, final: bool) -> NDArray[np.void]:
        if self.by_marks is None:
            marked = self.marked.ranks
            ranks = {m.rank for m in self.ranks() if m.launches or m.collectives or m.rank in marked}
            if self.marked.ready(ranks):
                self.by_marks = True
            elif not final and self.marked.expects(ranks):
                return np.empty(0, ITERATION)  # micro-batches repeat, too
        if not self.by_marks:
            steps = self.tracker.advance(until_ns=until_ns, final=final)
            steps["step"] += self.step_base
            if self.by_marks is None and len(steps):
                self.by_marks = self.marked.agree(steps)
            if self.by_marks is None and final and self.marked.ready(self.marked.ranks, final=True):
                self.by_marks = True
            if not self.by_marks:
                return steps
        return self.marked.advance(until_ns, final=final)

    def finish(self) -> None:
        """Takes note that its last steps were stored, and gives back what they were made from. If a rank joins later
        after all, what it calls is lined up with the last calls alone that the view shows."""
        self.finished = True
        _give_back(self)

    @property
    def not_aligned(self) -> int:
        """Communicators that could not be lined up."""
        return int(np.sum(self.communicators["error"] != "")) + (self._not_aligned if self.finished else 0)

    def note_queues(self) -> None:
        """Takes for how long each rank's first thread has waited for a CPU so far. To be called as windows begin and
        end, and when something begins to be seen in part."""
        for member in self.ranks():
            if member.state == "traced" and (waited := queued_ns(member.target.pid)):
                of_rank = self.queues.setdefault(member.rank, deque(maxlen=QUEUE_NOTES))
                of_rank.append((time.monotonic_ns(), waited))

    @property
    def pulse_subject(self) -> Subject:
        """Whose probes report the marks by which ``thinned`` counts."""
        return "backward" if self._pulse_what == What.BACKWARD_BEGIN else "nvtx"

    @property
    def ranges_until(self) -> int:
        """Until when PyTorch's ranges were seen throughout; 0: they are."""
        return self._ranges_until

    def thin_marks(self, since_ns: int) -> None:
        """From now on PyTorch's ranges are seen in windows, and the begins of backward passes throughout: steps that
        are named by marks go on by these. Others are inferred as before."""
        self._ranges_until = since_ns
        self.phases_until = self.phases_until or since_ns
        if self.by_marks is not False and not self.thin_since:
            self.thin_since = since_ns

    def thin_ranges(self, since_ns: int) -> None:
        """From now on NVTX's ranges are seen in windows, and nothing else marks steps."""
        self.pulse_spans = [(0, since_ns)]
        self.phases_until = self.phases_until or since_ns
        if self.by_marks and not self.thin_since:
            self.thin_since, self._pulse_what = since_ns, What.STEP_BEGIN

    def thin_calls(self, since_ns: int) -> bool:
        """From now on calls are seen in windows. Whether steps have been inferred from them: then they go on by a
        pulse, once one is found (``begin_pulses``), and the last by calls were taken."""
        if self.by_marks or self.thin_since:
            return False
        self.by_marks, self.thin_since, self._thinned_by, self.calls_end = False, since_ns, "calls", CallsEnd()
        self.thinned = ThinnedSteps(other_hosts=_on_other_hosts(self), queues=self.queues)
        return True

    def begin_pulses(self, rank: int, per_step: int, step_ns: int, made: Mapping[int, int]) -> None:
        """Counts a rank's steps by a call from now on.

        Args:
            rank: Global rank.
            per_step: How often a step makes it.
            step_ns: How long one takes.
            made: How often a step makes each call, by number.
        """
        assert self.thinned is not None
        step, end = self._ended.get(rank, (-1, 0))
        self.thinned.begin(
            rank,
            per_step,
            number=step + 1,
            after_ns=end,
            step_ns=step_ns,
            collectives=sum(count for call, count in made.items() if _COLLECTIVE[call]),
            launches=sum(count for call, count in made.items() if CALLS[call].kind in ("kernel", "graph")),
        )

    def _hand_over(self) -> None:
        """Steps by marks end here: all marks from before are there."""
        marked = self.marked.ranks
        ranks = {m.rank for m in self.ranks() if m.launches or m.collectives or m.rank in marked}
        if not ranks and not any(
            (each["what"] == What.BACKWARD_BEGIN).any() for of in self._early.values() for each in of
        ):
            self._early.clear()
            return  # it has not begun to train
        if self.by_marks is None and self.marked.ready(ranks, final=True):
            self.by_marks = True
        if not self.by_marks and any(m.launches or m.collectives for m in self.ranks()):
            self.by_marks, self.thin_since = False, 0  # calls give
            for rank, parts in self._early.items():
                marks = np.concatenate(parts)
                began = marks["ts_ns"][marks["what"] == What.BACKWARD_BEGIN]
                self.tracker.feed_calls(rank, backward_calls(np.sort(began)))
            self._early.clear()
            return
        self._left = self.marked.advance(self.thin_since, final=True)
        if self.marked.waiting:
            return
        self.thinned = ThinnedSteps(other_hosts=_on_other_hosts(self), queues=self.queues)
        self._thinned_by, self.by_marks = "marks", True
        for (_, end), (begin, _) in itertools.pairwise(self.pulse_spans or ()):  # windows may have opened before
            self.thinned.unseen(end, begin)
        for rank in sorted(marked):
            handed = self.marked.hand_over(rank)
            self._main[rank] = handed.tid
            self.thinned.begin(
                rank,
                handed.per_step,
                number=handed.number,
                after_ns=handed.after_ns,
                step_ns=handed.step_ns,
                pulses=handed.pulses,
                collectives=handed.collectives,
            )

    def _feed_pulses(self) -> None:
        """Begins of backward passes, of the thread that trains."""
        assert self.thinned is not None
        for rank, parts in self._early.items():
            marks = np.concatenate(parts)
            marks = marks[marks["what"] == self._pulse_what]
            if self.pulse_spans is not None:
                inside = [
                    (marks["ts_ns"] >= begin) & (marks["ts_ns"] < (end or 1 << 62)) for begin, end in self.pulse_spans
                ]
                marks = marks[np.logical_or.reduce(inside)]
            if not len(marks):
                continue
            if rank not in self.thinned.ranks:
                self.thinned.begin(rank, 1)
            tids, counts = np.unique(marks["tid"], return_counts=True)
            main = self._main.get(rank) or int(tids[counts.argmax()])
            self._main[rank] = main if main in tids else int(tids[counts.argmax()])
            self.thinned.feed(rank, marks["ts_ns"][marks["tid"] == self._main[rank]].astype(np.int64))
        self._early.clear()

    def count_traffic(self, rank: int, called: NDArray[np.void], nbytes: NDArray[np.uint64]) -> None:
        """Counts a rank's calls by communicator, operation, size and peer: what its communicators are distinguished by.

        Args:
            rank: Global rank.
            called: COLLECTIVE rows, those point to point included, shape (n,).
            nbytes: Their payloads, shape (n,).
        """
        columns = (called["comm"], called["call"], nbytes, called["peer"].astype(np.uint64))
        # Of a few calls: np.unique of rows takes ten times as long.
        counts = Tally(zip(*(column.tolist() for column in columns), strict=True))
        for comm in sorted({comm for comm, *_ in counts}):
            self.traffic[rank, comm] = self.traffic.pop((rank, comm), Traffic())
        for (comm, call, size, peer), count in counts.items():
            op = CALLS[call].kind
            if not op.startswith("Group"):
                self.traffic[rank, comm].add(op, size, peer, count)

    def find_mesh(self) -> bool:
        """Says anew what the communicators are for. Whether that has changed."""
        targets = [member.target for member in self.ranks()]
        world = max((target.identity.world_size for target in targets), default=0)
        command = targets[0].command if targets else ""
        # What was called long ago is lined up no more, and stays where it was.
        now = set(_keys(self.communicators))
        earlier = self.placed[np.array([key not in now for key in _keys(self.placed)], bool)]
        placed = np.concatenate([earlier, self.communicators])
        before, self.mesh = self.mesh, find_mesh(placed, self.traffic, world=world, command=command)
        over = {(rank, handle) for rank, events in self.control.items() for handle in _over(events)}
        idle = {key: place for place, key in enumerate(_keys(placed)) if key not in self.traffic}
        # Who is called no more needs none; of those that were not called yet the newest are kept.
        drop = [idle.pop(key) for key in idle.keys() & over]
        most = max(len(idle) - self._most_uncalled, 0)
        self.forgotten += most
        self.placed = np.delete(placed, [*drop, *itertools.islice(idle.values(), most)])
        return before != self.mesh

    def forget_old_communicators(self) -> None:
        """Drops what is kept of communicators that were ended and of which no call is remembered any more, and of those
        that were called longest ago where there are more than :data:`KEPT_COMMUNICATORS`."""
        remembered = {(rank, comm) for rank, calls in self.recent.items() for comm in np.unique(calls["comm"]).tolist()}
        most = max(len(self.traffic) - KEPT_COMMUNICATORS, 0)
        longest_ago = set(itertools.islice(self.traffic, most))
        self.forgotten += len(longest_ago - self.ended)
        uncalled = _forget_made(self.control, self.traffic, self._most_uncalled)
        self.forgotten += len(uncalled - self.ended)
        gone = (self.ended - remembered) | longest_ago | uncalled
        self.ended -= gone
        self._forget_communicators(gone)

    @property
    def _most_uncalled(self) -> int:
        return max(KEPT_COMMUNICATORS, MADE_OF_RANK * len(self.ranks()))

    def make_room(self) -> None:
        """As :meth:`forget_old_communicators`, where so many were met that it is worth it. To be called in each turn:
        an alignment may be far off, or take long."""
        if max(len(self.traffic), len(self.ended)) > 2 * KEPT_COMMUNICATORS:
            self.forget_old_communicators()

    def _forget_communicators(self, gone: set[tuple[int, int]]) -> None:
        if not gone:
            return
        if self.alignment is not None and self.alignment.parts is not None:
            self.alignment.gone |= self.alignment.of & gone
        for rank, comm in gone:
            self.traffic.pop((rank, comm), None)
            self.named.get(rank, {}).pop(comm, None)
            self.places.get(rank, {}).pop(comm, None)
        self.handles -= gone
        for rank, comms in _by_rank(gone).items():
            if (calls := self.recent.get(rank)) is not None:
                self.recent[rank] = calls[~np.isin(calls["comm"], np.array(comms, np.uint64))]
        self.placed = self.placed[np.array([key not in gone for key in _keys(self.placed)], bool)]
        # What was said of them stays as it is, whatever has their addresses next.
        self.mesh = [replace(group, provisional=group.provisional and not group.handles & gone) for group in self.mesh]

    def drop_marks(self) -> None:
        """Goes on without marks: steps are found by calls, and go on counting."""
        if self.by_marks:
            self.step_base = 1 + max((member.last_step for member in self.ranks()), default=-1)
            self.tracker = StepTracker()
            self.tracker.align(self.communicators)
        self.by_marks = False
        self.phases.clear()
        drop_ends(self.marked)

    def drop_ranges(self) -> None:
        """Goes on without NVTX's ranges: with PyTorch's marks alone if its steps are these, else without marks."""
        if self.by_marks is not True or self.marked.wanted or any(each.optimizers for each in self.marks.values()):
            self.drop_marks()
        for each in self.marks.values():
            each.forget()

    def ask_groups(self, member: Member, handles: Iterable[int], look_ups: LookUps) -> set[int]:
        """Asks a process of PyTorch's for the names of process groups that were not called before.

        Returns:
            Those that are to be asked when they are called again: they were too many for a turn.
        """
        layouts = (library.layout for library in member.target.libraries if library.layout is not None)
        layout = next((layout.group for layout in layouts if layout.group is not None), None)
        if layout is None:
            return set()
        groups, pid = self.named.setdefault(member.rank, {}), member.target.pid
        turns: dict[tuple[str, int], int] = {}
        for one in groups.values():
            turns[one.name, one.size] = max(one.turn, turns.get((one.name, one.size), -1))
        fresh = [handle for handle in handles if handle not in groups]
        for handle in fresh[:MOST_ASKED]:
            if not member.may_ask(look_ups):
                continue
            with look_ups.looking_up(pid):
                group = read_group(pid, handle & (1 << 48) - 1, layout)
            if group is not None:
                turns[group.name, group.size] = turn = turns.get((group.name, group.size), -1) + 1
                groups[handle] = replace(group, turn=turn)
        return set(fresh[MOST_ASKED:])

    def ask_communicators(self, member: Member, handles: Iterable[int], look_ups: LookUps) -> None:
        """Asks a process for its place in NCCL communicators that were not called before; of very many in one turn,
        when they are called again."""
        places, pid = self.places.setdefault(member.rank, {}), member.target.pid
        fresh = [handle for handle in handles if handle and handle not in places]
        if not fresh:
            return
        offsets = (rank_offset(each.file) for each in member.target.libraries if "libnccl" in each.roles)
        offset = next((one for one in offsets if one is not None), None)
        if offset is None:
            places.update(dict.fromkeys(fresh))
            return
        for handle in fresh[:MOST_ASKED]:
            places[handle] = None
            if member.may_ask(look_ups):
                with look_ups.looking_up(pid):
                    places[handle] = read_place(pid, handle, offset)

    def keep_control(self, ranks: int | NDArray[np.uint32], events: NDArray[np.void]) -> None:
        """Remembers calls about communicators. What was called before one was made at an address is not its own.

        All that is kept is gone through once, however many there are.

        Args:
            ranks: Global rank of each, shape (n,), or of all.
            events: CONTROL rows, each rank's in order, shape (n,).
        """
        if not len(events):
            return
        ranks = np.broadcast_to(np.asarray(ranks), len(events))
        of_life = np.isin(events["call"], _OF_LIFE)
        columns = (ranks[of_life], *(events[name][of_life] for name in ("call", "handle", "ts_ns")))
        made: dict[tuple[int, int], int] = {}
        others: set[tuple[int, int]] = set()
        """Of which another one, that was seen to end, had the address."""
        for rank, call, handle, ts_ns in zip(*(column.tolist() for column in columns), strict=True):
            key = rank, handle
            if call in _ENDS:
                self.ended.add(key)
                continue
            made[key] = max(ts_ns, made.get(key, 0))
            if key in self.ended:
                self.ended.remove(key)
                others.add(key)
        for rank, handle in made:
            self.places.get(rank, {}).pop(handle, None)  # another object has had this address
        if self.alignment is not None and self.alignment.parts is not None:
            self.alignment.gone |= self.alignment.of & made.keys()
        self._forget_communicators(others)
        for rank, handles in _by_rank(made).items():
            if (calls := self.recent.get(rank)) is not None:
                self.recent[rank] = calls[~_before(calls, {handle: made[rank, handle] for handle in handles})]
        order = np.argsort(ranks, kind="stable")
        of_ranks, starts = np.unique(ranks[order], return_index=True)
        for rank, places in zip(of_ranks.tolist(), np.split(order, starts[1:]), strict=True):
            before = self.control.get(rank, np.empty(0, records.CONTROL))
            self.control[rank] = np.concatenate([before, events[places[-KEPT_CONTROL:]]])[-KEPT_CONTROL:]


def _by_rank(keys: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    """Handles by rank."""
    handles: dict[int, list[int]] = defaultdict(list)
    for rank, handle in keys:
        handles[rank].append(handle)
    return handles


def _before(calls: NDArray[np.void], made: Mapping[int, int]) -> NDArray[np.bool_]:
    """Which COLLECTIVE rows are of these handles, and not later than the time given of them, ns. Shape (n,)."""
    handles = np.array(sorted(made), np.uint64)
    times = np.array([made[handle] for handle in handles.tolist()], np.uint64)
    place = np.minimum(np.searchsorted(handles, calls["comm"]), len(handles) - 1)
    return np.asarray((handles[place] == calls["comm"]) & (calls["ts_ns"] <= times[place]))


def kept_early(job: Job, rank: int) -> int:
    """Bytes of a rank's marks that wait until ``Job.thinned`` takes over."""
    return sum(marks.nbytes for marks in job._early.get(rank, ()))


def keep_early(job: Job, rank: int, most: int) -> int:
    """Keeps so many bytes of the newest of these. Returns how many go."""
    marks = np.concatenate(job._early[rank])
    gone = len(marks) - most // marks.itemsize
    job._early[rank] = [marks[gone:].copy()]
    return gone


def _give_back(job: Job) -> None:
    """Gives back what only a job that runs needs."""
    job.tracker.forget_calls()
    forget_calls(job.marked)
    forget_marks(job.marked)
    job.sampled.forget_marks()
    for phases in job.phases.values():
        phases.forget_marks()
    for marks in job.marks.values():
        marks.forget_names()
    job.recent = {rank: calls[-LATE_CALLS:].copy() for rank, calls in job.recent.items()}
    _forget_all_communicators(job)
    for kept in (job.syncs, job.control, job._early, job.queues):
        kept.clear()
    job._left = np.empty(0, ITERATION)


def _forget_all_communicators(job: Job) -> None:
    """Gives back what is known of communicators but what the view shows: by how much ranks are late to their last
    calls, and the mesh in words. They are found anew where a rank joins later."""
    job.mesh = _as_described(job.mesh)[:KEPT_GROUPS]
    called = {(rank, comm) for rank, calls in job.recent.items() for comm in np.unique(calls["comm"]).tolist()}
    clear = job.communicators["error"] == ""
    job._not_aligned = int(np.sum(~clear))
    shown = [sure and key in called for key, sure in zip(_keys(job.communicators), clear.tolist(), strict=True)]
    job.communicators = job.communicators[np.array(shown, bool)]
    job.placed = np.empty(0, COMMUNICATOR)
    for steps in (job.tracker, job.marked):
        steps.align(job.placed)
    for kept in (job.traffic, job.handles, job.ended, job.named, job.places):
        kept.clear()


def _as_described(mesh: Iterable[Group]) -> list[Group]:
    """Groups, one of those that are alike to the reader (``mesh.describe``), without their handles."""
    alike: dict[tuple[str, tuple[int, ...], int, bool], Group] = {}
    for group in mesh:
        guess = group.confidence <= GUESSED and group.concluded
        alike.setdefault((group.dimension, group.ranks, group.size, guess), replace(group, handles=frozenset()))
    return list(alike.values())


def _keys(rows: NDArray[np.void]) -> Iterator[tuple[int, int]]:
    """(rank, handle) of COMMUNICATOR rows."""
    return zip(rows["rank"].tolist(), rows["comm"].tolist(), strict=True)


def _over(control: NDArray[np.void]) -> set[int]:
    """Handles that were ended, and not made again since. ``control``: CONTROL rows of a rank, in order."""
    of_life = control[np.isin(control["call"], _OF_LIFE)]
    last = dict(zip(of_life["handle"].tolist(), of_life["call"].tolist(), strict=True))
    return {handle for handle, call in last.items() if call in _ENDS}


def _made(control: NDArray[np.void], called: Sequence[int]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """(handles that a rank made and did not call, when there was something about each last, ns), both shape (n,)."""
    handles = np.unique(control["handle"][np.isin(control["call"], list(_MAKES))])
    handles = handles[(handles > 0) & ~np.isin(handles, np.array(called, np.uint64))]
    about = np.concatenate([control["handle"], control["parent"]])
    times = np.tile(control["ts_ns"], 2)
    order = np.lexsort((times, about))
    return handles, times[order[np.searchsorted(about[order], handles, side="right") - 1]]


def _forget_made(
    control: dict[int, NDArray[np.void]], called: Iterable[tuple[int, int]], most: int
) -> set[tuple[int, int]]:
    """Drops from CONTROL rows, by rank, the making of communicators that were not called, beyond so many: of those that
    were made, split or asked about last it stays.

    Returns:
        Rank and handle of those that it was dropped of and that were not seen to end.
    """
    if sum(map(len, control.values())) <= most:
        return set()
    of_ranks = _by_rank(called)
    made = {rank: _made(events, of_ranks.get(rank, ())) for rank, events in control.items()}
    times = np.concatenate([ts_ns for _, ts_ns in made.values()])
    ranks = np.repeat(np.array(list(made)), [len(handles) for handles, _ in made.values()])
    handles = np.concatenate([handles for handles, _ in made.values()])
    oldest = np.argsort(times, kind="stable")[: max(len(times) - most, 0)]
    gone: set[tuple[int, int]] = set()
    for rank, dropped in _by_rank(zip(ranks[oldest].tolist(), handles[oldest].tolist(), strict=True)).items():
        gone |= {(rank, handle) for handle in set(dropped) - _over(control[rank])}
        control[rank] = _without(control[rank], np.array(dropped, np.uint64))
    return gone


def _without(control: NDArray[np.void], handles: NDArray[np.uint64]) -> NDArray[np.void]:
    """CONTROL rows without those of these communicators. Splits stay, as if they had given none: they are counted."""
    theirs, splits = np.isin(control["handle"], handles), np.isin(control["call"], _SPLITS)
    kept = control[~theirs | splits]
    kept["handle"][np.isin(kept["handle"], handles)] = 0
    return kept


def is_waiting(job: Job) -> bool:
    """Whether a job has more steps than the last call of ``steps`` gave."""
    return job.marked.waiting if job.by_marks else job.tracker.waiting


def _calls_until(job: Job) -> int:
    """Steps are inferred from calls until then."""
    return job.thin_since if job._thinned_by == "calls" else 1 << 62


def _on_other_hosts(job: Job) -> bool:
    return any(member.target.identity.world_size > len(job.ranks()) for member in job.ranks())
