"""Who is traced: processes, the jobs and ranks they stand for, and the probes on the libraries they map.

A process becomes a rank when its user names it, or when it makes a call: mapping libcuda says little, since data-loader
workers inherit it and launchers import it. Until then it is a candidate: let through, its libraries probed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from argus import records
from argus.aside import Aside
from argus.bulkhead import Bulkheads
from argus.capture import reader
from argus.capture.bpf import Attachment, Probes
from argus.capture.calls import CALLS, Layer, Shape
from argus.capture.follow import Family
from argus.capture.names import KernelNames
from argus.capture.nccl import Place, rank_offset, read_place
from argus.capture.python import find_interpreter
from argus.capture.pytorch import Membership, read_group
from argus.capture.targets import (
    NVTX,
    PROC,
    TORCH,
    TORCH_PYTHON,
    FileKey,
    Libraries,
    Library,
    Target,
    cpu_ns,
    executable_mappings,
    find_libraries,
    identity_of,
    inspect,
    mapped_pages,
    mappings_signature,
    parent_of,
    processes,
    user_of,
)
from argus.errors import EXIT_UNAVAILABLE, ArgusError
from argus.recent import RecentSteps
from argus.semantics.flops import Counted
from argus.semantics.gpu_phases import OF_NCCL, Calls, Transfers
from argus.semantics.groups import COMMUNICATOR
from argus.semantics.marked_steps import MarkedSteps
from argus.semantics.marks import Marks
from argus.semantics.mesh import Group, Traffic, find_mesh
from argus.semantics.phases import PhaseTracker, What
from argus.semantics.steps import ITERATION, StepTracker
from argus.semantics.thinned_steps import ThinnedSteps

CPU_RANK_S = 3.0
"""After so long a candidate that maps no traceable library, and of which its environment says that it is a rank, is one
on CPUs."""
KEPT_COMMUNICATORS = 1024
"""Communicators of a job that are remembered, on this host. Large jobs have some thirty a rank; one that makes new ones
for ever has as many as it lives long."""
KEPT_OVER = 8
"""Attempts of jobs that are over and were superseded, remembered for the end's summary: of a launcher that restarts its
ranks for weeks, the newest. What older ones did is in the store, and in ``Roster.past``."""
KEPT_OVER_S = 600.0
"""A job that has been over for so long is forgotten as if its ranks had started again, whatever its name: a node that
runs a job after the other, each of another name, has any number."""
KEPT_NAMES = 4096
KEPT_FILES = 64
"""Files that no traced process maps any more and whose probes stay: a job that starts again maps the same ones, and the
calls that it makes before it was noticed are recorded. Of others (a container's, that is made anew for each job) there
are as many as the trace lives long."""
MOST_RANKS = 4096
"""Ranks of a job on this host. A script that numbers what it starts without end begins a new run every so many."""
KEPT_HELPERS = 64
"""The same of a job's helpers that ended: data-loader workers, started anew each epoch."""
ATTACH_S = 5.0
"""Longest wait for probes on a file: tens of ms where its pages can be read, more on a busy node. What comes later is
taken over."""
MAPS_S, MOST_MAPS_S = 5.0, 60.0
"""After so long the mappings of a process that runs are read, though it has mapped as much as before; longer each time
that nothing was new."""
MAPS_SHARE_S = 0.02
"""For so long mappings are read in one look: a process that allocates has mapped another amount each time, and the
mappings of a large one take a millisecond to read. The others' turn comes in the next look."""
QUICK_SHARE = 1 / 40
"""Of its age: how soon a young candidate is looked at again between the rounds."""
YOUNG_S = 60.0
"""How long a candidate is looked at in every round: libraries are loaded early in a program's life."""


class Notes(deque[str]):
    """The newest 100 of what there was to say.

    Attributes:
        said: How many there were.
    """

    def __init__(self) -> None:
        super().__init__(maxlen=100)
        self.said = 0

    def append(self, text: str) -> None:
        super().append(text)
        self.said += 1

    def since(self, said: int) -> list[str]:
        """Those after so many, as far as they are kept."""
        return list(self)[max(len(self) - (self.said - said), 0) :]


@dataclass
class Member:
    """One traced process of a job.

    Attributes:
        rank: Global rank.
        rank_source: The launcher whose variable told it; "order": guessed; "parent": a helper of that rank.
        state: "traced" or "exited".
        launches, collectives, steps: Counted so far.
        probes: Probes on the libraries it maps.
        refused: Records that its budgets had no room for (``Probes.spent``).
        over_share: Samples and switches of threads beyond its share.
        ignored: Why nothing of its calls is recorded any more; empty: they are.
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
    ignored: str = ""

    @property
    def helper(self) -> bool:
        """Whether it is a child of the rank's own process (a data-loader worker): its calls are no steps."""
        return self.rank_source == "parent"


_WHAT = np.array([OF_NCCL.get(call.kind, 0) if call.layer is Layer.NCCL else 0 for call in CALLS], np.uint8)
"""What each probed call does, ``semantics.gpu_phases.What``; 0: no collective of NCCL."""
_COLLECTIVE = [call.shape in (Shape.COLLECTIVE, Shape.C10D) for call in CALLS]
"""By number: whether a call is a collective."""


@dataclass(eq=False)
class Job:
    """One attempt of one job, and what its steps are made from. Ranks that start again make a new one: a new run.

    ``by_marks``: whether steps are told by marks of PyTorch or NVTX; None: not known yet. ``marks``: of each rank, what
    is known to make them. ``phase_ns``: time of all ranks' steps by phase; ``hidden_ns``: of communication behind other
    phases; ``gpu_phase_ns``: as ``phase_ns``, of their GPUs.
    ``step_ns``, ``step_count``: all ranks' steps, and how many they are. ``counted``: the FLOPs of some.
    ``placed``: the newest row of each handle there was. ``traffic``: by rank and handle, those called last at the end.
    ``ended``: rank and handle of communicators that are no more. ``forgotten``: how many others were too many.
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
    phase_ns: Tally[str] = field(default_factory=Tally)
    hidden_ns: int = 0
    step_ns: int = 0
    step_count: int = 0
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
    told: dict[int, dict[int, Place | None]] = field(default_factory=dict)
    traffic: dict[tuple[int, int], Traffic] = field(default_factory=dict)
    ended: set[tuple[int, int]] = field(default_factory=set)
    forgotten: int = 0
    placed: NDArray[np.void] = field(default_factory=lambda: np.empty(0, COMMUNICATOR))
    mesh: list[Group] = field(default_factory=list)
    recent_steps: RecentSteps = field(default_factory=RecentSteps)
    losses: Tally[str] = field(default_factory=Tally)
    """What failed of this job alone, by counter (``Bulkheads.of``)."""
    groups_due: float = 0.0
    _pulse_what: What = What.BACKWARD_BEGIN
    pulse_spans: list[tuple[int, int]] | None = None
    """When backward passes were seen, the end 0 as long as they are; None: throughout."""
    _ranges_until: int = 0
    _thinned_by: str = ""
    """"marks", "calls", or empty: ``thinned`` has not taken over."""
    _left: NDArray[np.void] = field(default_factory=lambda: np.empty(0, ITERATION))
    _early: dict[int, list[NDArray[np.void]]] = field(default_factory=dict)
    """Marks from ``thin_since`` on, of the time before ``thinned`` takes over, by rank."""
    _main: dict[int, int] = field(default_factory=dict)
    """The thread whose backward passes count, by rank."""
    _ended: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Number and end of each rank's newest step."""
    over_since: float = 0.0
    """When the last of its processes was forgotten, ``time.monotonic()``; 0: one is left."""

    def holder(self, rank: int) -> Member | None:
        """The process that is this rank, or was."""
        found = [m for m in self.members.values() if m.rank == rank and not m.helper]
        return found[-1] if found else None

    def ranks(self) -> list[Member]:
        """Its ranks' processes, without helpers."""
        return [member for member in self.members.values() if not member.helper]

    @property
    def _on_other_hosts(self) -> bool:
        return any(member.target.identity.world_size > len(self.ranks()) for member in self.ranks())

    @property
    def by_calls(self) -> bool:
        """Whether steps are told by the sequence of calls: no marks tell them, or will."""
        marks = any(member.target.has(TORCH[0]) or member.target.has(NVTX) for member in self.ranks())
        return self.by_marks is False or (self.by_marks is None and not marks)

    def feed(self, member: Member, launched: NDArray[np.void] | None, called: NDArray[np.void] | None) -> None:
        """Takes a rank's launches (LAUNCH rows) or collectives (COLLECTIVE rows), for its steps."""
        nothing = np.empty(0, records.LAUNCH), np.empty(0, records.COLLECTIVE)
        if not self.by_marks:
            self.tracker.feed(
                member.rank,
                nothing[0] if launched is None else launched,
                nothing[1] if called is None else called,
            )
        if self.by_marks is not False and (member.target.has(TORCH[0]) or member.target.has(NVTX)):
            self.marked.feed_calls(member.rank, None if launched is None else launched["ts_ns"], called)

    def feed_marks(self, member: Member, marks: NDArray[np.void]) -> None:
        """Takes a rank's marks (``semantics.phases.MARK`` rows), for its steps and phases."""
        if self.thin_since and self._thinned_by != "calls":
            late = marks["ts_ns"] >= self.thin_since
            if late.any():
                self._early.setdefault(member.rank, []).append(marks[late])
                marks = marks[~late]
        of_phases = marks[marks["what"] < What.STEP_BEGIN]
        if len(of_phases):
            self.phases.setdefault(member.rank, PhaseTracker()).feed(of_phases)
        if self.by_marks is not False:
            self.marked.feed_marks(member.rank, marks)
        if not self.by_marks:
            began = marks["ts_ns"][marks["what"] == What.BACKWARD_BEGIN]
            self.tracker.feed(member.rank, np.empty(0, records.LAUNCH), np.empty(0, records.COLLECTIVE), began)

    def steps(self, until_ns: int, *, final: bool) -> NDArray[np.void]:
        """ITERATION rows of the steps completed since the last call, by marks where all ranks have them.

        Args:
            until_ns: What happened before this has been fed.
            final: Nothing more will come.
        """
        if self.thin_since and not self._thinned_by and (until_ns >= self.thin_since or final):
            self._hand_over()
        if self.thinned is not None and self._thinned_by:
            self._feed_pulses()
            left, self._left = self._left, np.empty(0, ITERATION)
            return np.concatenate([left, self.thinned.advance(until_ns, final=final)])
        found = self._steps(until_ns, final=final)
        for rank, step, begin, duration in zip(
            *(found[n].tolist() for n in ("rank", "step", "ts_ns", "duration_ns")), strict=True
        ):
            self._ended[rank] = step, begin + duration
        return found

    def _steps(self, until_ns: int, *, final: bool) -> NDArray[np.void]:
        if self.by_marks is None:
            marked = self.marked.ranks
            ranks = {m.rank for m in self.ranks() if m.launches or m.collectives or m.rank in marked}
            if self.marked.ready(ranks):
                self.by_marks = True
            elif not final and self.marked.expects(ranks):
                return np.empty(0, ITERATION)  # micro-batches repeat, too
        if not self.by_marks:
            found = self.tracker.advance(until_ns=until_ns, final=final)
            found["step"] += self.step_base
            if self.by_marks is None and len(found):
                self.by_marks = self.marked.agree(found)
            if self.by_marks is None and final and self.marked.ready(self.marked.ranks, final=True):
                self.by_marks = True
            if not self.by_marks:
                return found
        return self.marked.advance(until_ns, final=final)

    @property
    def ranges_until(self) -> int:
        """Until when PyTorch's ranges were seen throughout; 0: they are."""
        return self._ranges_until

    def thin_marks(self, since_ns: int) -> None:
        """From now on PyTorch's ranges are seen in windows, and the begins of backward passes throughout: steps that
        are told by marks go on by these. Others are found as before."""
        self.phases.clear()
        self._ranges_until = since_ns
        if self.by_marks is not False and not self.thin_since:
            self.thin_since = since_ns

    def thin_ranges(self, since_ns: int) -> None:
        """From now on NVTX's ranges are seen in windows, and nothing else tells steps."""
        self.phases.clear()
        self.pulse_spans = [(0, since_ns)]
        if self.by_marks and not self.thin_since:
            self.thin_since, self._pulse_what = since_ns, What.STEP_BEGIN

    def thin_calls(self, since_ns: int) -> bool:
        """From now on collectives are seen in windows. Whether steps have been told by calls: then they go on by a
        pulse, once one is found (``begin_pulses``)."""
        if self.by_marks or self.thin_since:
            return False
        self.by_marks, self.thin_since, self._thinned_by = False, since_ns, "calls"
        self._left = self._steps(since_ns, final=True)
        for rank, step, begin, duration in zip(
            *(self._left[n].tolist() for n in ("rank", "step", "ts_ns", "duration_ns")), strict=True
        ):
            self._ended[rank] = step, begin + duration
        self.thinned = ThinnedSteps(other_hosts=self._on_other_hosts)
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
            self.by_marks, self.thin_since = False, 0  # calls tell
            for rank, parts in self._early.items():
                marks = np.concatenate(parts)
                began = marks["ts_ns"][marks["what"] == What.BACKWARD_BEGIN]
                self.tracker.feed(rank, np.empty(0, records.LAUNCH), np.empty(0, records.COLLECTIVE), began)
            self._early.clear()
            return
        self._left = self.marked.advance(self.thin_since, final=True)
        self.thinned = ThinnedSteps(other_hosts=self._on_other_hosts)
        self._thinned_by, self.by_marks = "marks", True
        for rank in sorted(marked):
            found = self.marked.hand_over(rank)
            self._main[rank] = found.tid
            self.thinned.begin(
                rank,
                found.per_step,
                number=found.number,
                after_ns=found.after_ns,
                step_ns=found.step_ns,
                pulses=found.pulses,
                collectives=found.collectives,
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
        """Counts a rank's calls by communicator, operation, size and peer: what its communicators are told by.

        Args:
            rank: Global rank.
            called: COLLECTIVE rows, those point to point included, shape (n,).
            nbytes: Their payloads, shape (n,).
        """
        self.calls.setdefault(rank, Calls()).feed(
            called["ts_ns"],
            called["tid"],
            _WHAT[called["call"]],
            nbytes.astype(np.int64),
            called["comm"],
            called["peer"],
        )
        columns = (called["comm"], called["call"].astype(np.uint64), nbytes, called["peer"].astype(np.uint64))
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
        now = np.isin(_handles(self.placed), _handles(self.communicators))
        self.placed = np.concatenate([self.placed[~now], self.communicators])
        before, self.mesh = self.mesh, find_mesh(self.placed, self.traffic, world=world, command=command)
        return before != self.mesh

    def forget_old_communicators(self) -> None:
        """Drops what is kept of communicators that were ended and of which no call is remembered any more, and of those
        that were called longest ago where there are more than :data:`KEPT_COMMUNICATORS`."""
        remembered = {(rank, comm) for rank, calls in self.recent.items() for comm in np.unique(calls["comm"]).tolist()}
        most = max(len(self.traffic) - KEPT_COMMUNICATORS, 0)
        longest_ago = set(itertools.islice(self.traffic, most))
        self.forgotten += len(longest_ago - self.ended)
        gone = (self.ended - remembered) | longest_ago
        if gone:
            self._forget_communicators(gone)

    def _forget_communicators(self, gone: set[tuple[int, int]]) -> None:
        for rank, comm in gone:
            self.traffic.pop((rank, comm), None)
            self.named.get(rank, {}).pop(comm, None)
            self.told.get(rank, {}).pop(comm, None)
        self.handles -= gone
        self.ended -= gone
        for rank in {rank for rank, _ in gone} & self.recent.keys():
            calls = self.recent[rank]
            self.recent[rank] = calls[~np.isin(calls["comm"], [comm for each, comm in gone if each == rank])]
        kept = [key not in gone for key in zip(self.placed["rank"].tolist(), self.placed["comm"].tolist(), strict=True)]
        self.placed = self.placed[kept]

    def drop_marks(self) -> None:
        """Goes on without marks: steps are found by calls, and go on counting."""
        if self.by_marks:
            self.step_base = 1 + max((member.last_step for member in self.ranks()), default=-1)
            self.tracker = StepTracker()
            self.tracker.align(self.communicators)
        self.by_marks = False
        self.phases.clear()

    def drop_ranges(self) -> None:
        """Goes on without NVTX's ranges: with PyTorch's marks alone if its steps are these, else without marks."""
        if self.by_marks is not True or self.marked.wanted or any(each.optimizers for each in self.marks.values()):
            self.drop_marks()
        for each in self.marks.values():
            each.forget()

    def ask_groups(self, member: Member, handles: Iterable[int]) -> None:
        """Asks a process of PyTorch's for the names of process groups that were not called before."""
        layouts = (library.layout for library in member.target.libraries if library.layout is not None)
        layout = next((layout.group for layout in layouts if layout.group is not None), None)
        if layout is None:
            return
        known = self.named.setdefault(member.rank, {})
        for handle in handles:
            if (
                handle not in known
                and (found := read_group(member.target.pid, handle & (1 << 48) - 1, layout)) is not None
            ):
                alike = [one.turn for one in known.values() if (one.name, one.size) == (found.name, found.size)]
                known[handle] = replace(found, turn=max(alike, default=-1) + 1)

    def ask_communicators(self, member: Member, handles: Iterable[int]) -> None:
        """Asks a process for its place in NCCL communicators that were not called before."""
        known = self.told.setdefault(member.rank, {})
        fresh = [handle for handle in handles if handle and handle not in known]
        if not fresh:
            return
        offsets = (rank_offset(each.file) for each in member.target.libraries if "libnccl" in each.roles)
        offset = next((found for found in offsets if found is not None), None)
        for handle in fresh:
            known[handle] = None if offset is None else read_place(member.target.pid, handle, offset)

    def keep_control(self, rank: int, events: NDArray[np.void]) -> None:
        """Remembers calls about communicators.

        Args:
            rank: Global rank.
            events: CONTROL rows, in order.
        """
        for call, handle in zip(events["call"].tolist(), events["handle"].tolist(), strict=True):
            key = rank, handle
            if CALLS[call].kind == "comm_end":
                self.ended.add(key)
            elif CALLS[call].kind in ("comm_init", "comm_split"):
                self.told.get(rank, {}).pop(handle, None)  # another object has had this address
                if key in self.ended:
                    self._forget_communicators({key})
        before = self.control.get(rank, np.empty(0, records.CONTROL))
        self.control[rank] = np.concatenate([before, events])[-1024:]


_NEVER_READ = (b"", 0.0, 0.0)
"""Of mappings: ``Roster._mapped``."""


def _handles(rows: NDArray[np.void]) -> NDArray[np.void]:
    """(rank, handle) of COMMUNICATOR rows, to be compared, shape (n,)."""
    return np.rec.fromarrays([rows["rank"], rows["comm"]])


@dataclass
class _Candidate:
    since: float
    target: Target | None = None
    from_the_start: bool = False
    no_rank: bool = False
    due: float = 0.0
    """When it is looked at again between the rounds."""
    parent: int = -1
    """Its parent, -1: to be looked up (``Roster._parent_of``)."""


class Roster:
    """Keeps track of processes.

    Args:
        probes: Where processes are let through and files are probed.
        names: Told which processes come and go.
        follow: Whether children are followed.
        job: Name of the job, over what the environment says.
        run: Number of the first run.
        bulkheads: Count what fails.
        timed: Whether a process may have GPU times.
    """

    def __init__(
        self,
        probes: Probes,
        names: KernelNames,
        *,
        follow: bool,
        job: str | None,
        run: int,
        bulkheads: Bulkheads | None = None,
        timed: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._bulkheads = bulkheads or Bulkheads()
        self._left_alone: set[int] = set()
        """Processes whose libraries could not be read, though they should have been."""
        self.jobs: list[Job] = []
        self.by_pid: dict[int, tuple[Job, Member]] = {}
        self.attached: list[Attachment] = []
        self.losses: Tally[str] = Tally()
        self.files_released = 0
        """Times that probes were taken off a file that no traced process maps any more."""
        self.past: Tally[str] = Tally()
        """What the jobs and helpers that are no longer remembered did: jobs, launches, collectives."""
        self._late: set[int] = set()
        self.notes = Notes()
        self.family = Family(probes, follow=follow)
        self._probes = probes
        self._names = names
        self._follow = follow
        self._job_name = job
        self._run = run
        self._timed = timed
        self._current: dict[str, Job] = {}
        self._forgotten: dict[str, int] = {}
        """Names of jobs that are over and forgotten, and their newest runs; full: any name may be one of these."""
        self._candidates: dict[int, _Candidate] = {}
        self._signatures: dict[int, int] = {}
        self._ran: dict[int, int] = {}
        """CPU time of each process when its mappings were read: what has not run has loaded nothing."""
        self._mapped: dict[int, tuple[bytes, float, float]] = {}
        """How much each process had mapped, when its mappings were read, and how soon they are read again."""
        self._maps_s = 0.0
        """For how long mappings of processes that are not young were read in this look."""
        self._shared: dict[FileKey, bool] = {}
        self._twins: dict[FileKey, FileKey] = {}
        """Files of overlays in which the probes of another one stand (``_has_twin``)."""
        self._unused: dict[FileKey, None] = {}
        """Files with probes that no traced process maps, the one that was mapped last comes last."""
        self._unread: dict[int, int] = {}
        """Files of each process that wait to be read (``targets.Libraries``)."""
        self._attaching: dict[tuple[FileKey, int | None], Aside[Attachment]] = {}
        """Probes that the kernel has been putting on a file for longer than ``ATTACH_S``."""
        self._never_read = 0
        """Of processes that have ended."""
        self._leaving: list[int] = []
        self._named: set[int] = set()

    # ---- begin and end

    def start(self, targets: list[Target], named: set[int]) -> None:
        """Takes the first processes in and attaches to what they map.

        Args:
            targets: The processes.
            named: PIDs that the user asked for one by one: their end is an error, that of others is not.

        Raises:
            ArgusError: The kernel refuses, or a named process has ended.
        """
        self._named = named
        if self._follow and self.family.state != "on":
            self.notes.append(f"forks are noticed twice a second only: {self.family.state}")
        pids = {target.pid for target in targets}
        now = time.monotonic()
        for target in targets:
            # A child of another target with its parent's rank is a helper; a launcher has no rank. Either is a rank
            # only once it makes calls.
            helper = parent_of(target.pid) in pids and target.identity.rank >= 0
            launcher = self._follow and (target.identity.rank < 0 or not target.on_gpu)
            if helper or launcher:
                self._candidates[target.pid] = _Candidate(now, target, from_the_start=True)
            else:
                self._adopt(target)
        # Let through first: a launcher maps PyTorch, and probes on it hit its running ranks at once.
        self.family.admit([target.pid for target in targets])
        if self._follow:
            joined, _ = self.family.refresh()
            for pid in joined:
                self._candidates[pid] = _Candidate(now, from_the_start=True)
        self._attach(running=False)
        if self._follow:
            self._look_at_candidates(now, all_of_them=True)
            self._attach(running=False)

    def renumber(self, run: int) -> None:
        """Gives the jobs another run, before any row of them was made."""
        for job in self.jobs:
            job.run += run - self._run
        self._run = run

    def close(self) -> None:
        """Lets go of every process. Probes are the caller's to take away."""
        self.family.let_go()
        for candidate in self._candidates.values():
            if candidate.target is not None:
                candidate.target.close()
        for job in self.jobs:
            for member in job.members.values():
                member.target.close()

    def done(self) -> bool:
        """Whether every rank has ended, and, when children are followed, every process that could still start one."""
        if any(member.state == "traced" for _, member in self.by_pid.values()):
            return False
        return not self._follow or not any(pid not in self._leaving for pid in self._candidates)

    def live(self) -> list[Member]:
        """Ranks whose process runs."""
        return [member for _, member in self.by_pid.values() if member.state == "traced" and not member.helper]

    def candidates(self) -> list[Target]:
        """Processes that have loaded a library of the GPU and may yet be ranks of their own."""
        return [
            candidate.target
            for pid, candidate in self._candidates.items()
            if candidate.target is not None
            and candidate.target.on_gpu
            and pid not in self._leaving
            and self._parent_of(pid) not in self.by_pid
        ]

    def young(self, now: float) -> bool:
        """Whether there are candidates that may be about to make their first calls."""
        return any(now - candidate.since <= YOUNG_S for candidate in self._candidates.values())

    def _parent_of(self, pid: int) -> int:
        """A candidate's parent: it has another one only after that has ended."""
        candidate = self._candidates[pid]
        if candidate.parent < 0:
            candidate.parent = parent_of(pid)
        return candidate.parent

    # ---- go on

    def look_quickly(self, now: float) -> bool:
        """Looks at young candidates only. Cheap enough for 20 times a second. Whether something changed."""
        for pid in self.family.new():
            self._candidates[pid] = _Candidate(now)
        return self._look_at_candidates(now) and self._attach(running=True)

    def look(self, now: float) -> bool:
        """Looks at every process: who came, who ended, who loaded what. Whether something changed."""
        joined, ended = self.family.refresh()
        for pid in joined:
            self._candidates[pid] = _Candidate(now)
        changed = False
        self._maps_s = 0.0
        if ended:
            for candidate in self._candidates.values():
                candidate.parent = -1
        for pid in ended + [pid for pid in self.by_pid if self._has_new_owner(pid)]:
            if pid in self._leaving:
                continue
            self._leaving.append(pid)
            if pid in self.by_pid:
                self.by_pid[pid][1].state = "exited"
                changed = True
        # Whose mappings were read longest ago comes first: there may be no time for all.
        for pid in sorted(self.by_pid, key=lambda pid: self._mapped.get(pid, _NEVER_READ)[1]):
            member = self.by_pid[pid][1]
            if member.state == "traced" and pid not in self._left_alone:
                with self._guard(pid):
                    changed |= self._look_for_libraries(pid, member.target)
        changed |= self._look_at_candidates(now, all_of_them=True)
        if changed:
            self._attach(running=True)
        return changed

    def _has_new_owner(self, pid: int) -> bool:
        """Whether a rank runs as another user now, by executing a setuid program or of its own will. What it does is
        nobody's of its job then: it leaves the trace. Where children are followed it may come back as another job's."""
        _, member = self.by_pid[pid]
        if member.state != "traced" or member.target.identity.uid < 0:
            return False
        try:
            # Of a process that cannot be dumped the files of /proc are root's, whoever it runs as.
            if os.stat(f"{PROC}/{pid}").st_uid == member.target.identity.uid:
                return False
        except OSError:
            return False
        if user_of(pid) in (-1, member.target.identity.uid):
            return False
        self.losses["processes_changed_owner"] += 1
        self.notes.append(f"process {pid} runs as another user now: it is no longer traced as rank {member.rank}")
        return True

    def leaving(self) -> list[int]:
        """Processes that ended and whose last records may not have been read yet."""
        return list(self._leaving)

    def retire(self, pids: list[int]) -> None:
        """Forgets processes that ended and whose records have been read: their PIDs may be others' soon."""
        for pid in pids:
            self._leaving.remove(pid)
            self.family.dismiss(pid)
            self._names.forget(pid)
            reader.shared.forget(pid)
            self._signatures.pop(pid, None)
            self._ran.pop(pid, None)
            self._mapped.pop(pid, None)
            self._never_read += self._unread.pop(pid, 0)
            candidate = self._candidates.pop(pid, None)
            if candidate is not None and candidate.target is not None:
                candidate.target.close()
                self._was_used(candidate.target)
            self._late.discard(pid)
            self._left_alone.discard(pid)
            if pid in self.by_pid:
                job, member = self.by_pid.pop(pid)
                member.target.close()
                self._was_used(member.target)
                self._settle(job)
        if pids:
            self._release_files()

    def _was_used(self, target: Target) -> None:
        """A process that mapped these files has ended: they are the last to lose their probes."""
        for library in target.libraries:
            if library.key in self._shared:
                self._unused.pop(library.key, None)
                self._unused[library.key] = None

    def _release_files(self) -> None:
        """Takes the probes off files that no traced process maps any more, but for the newest ``KEPT_FILES``."""
        users = [member.target for _, member in self.by_pid.values()]
        users += [candidate.target for candidate in self._candidates.values() if candidate.target is not None]
        used = {library.key for target in users for library in target.libraries}
        used |= {self._twins[key] for key in used & self._twins.keys()}
        there = {target.pid for target in users}
        for key in used:
            self._unused.pop(key, None)
        for key in self._shared.keys() - used:
            self._unused.setdefault(key)
        old = set(itertools.islice(self._unused, max(len(self._unused) - KEPT_FILES, 0)))
        gone = [each for each in self.attached if each.library.key in old or each.pid not in (None, *there)]
        for key in old:
            del self._unused[key], self._shared[key]
        if old:
            self._twins = {key: of for key, of in self._twins.items() if key not in old and of not in old}
        if gone:
            self.files_released += len(gone)
            released = set(map(id, gone))
            self.attached = [each for each in self.attached if id(each) not in released]
            self._probes.release(gone)

    def _settle(self, job: Job) -> None:
        """A process of this job was forgotten: so are its oldest helpers, and it is over when that was the last one."""
        ended = [pid for pid, member in job.members.items() if member.helper and pid not in self.by_pid]
        for pid in ended[:-KEPT_HELPERS]:
            self._put_by(job.members.pop(pid))
        if not any(pid in self.by_pid for pid in job.members):
            job.over_since = time.monotonic()

    def _put_by(self, member: Member) -> None:
        self.past["launches"] += member.launches
        self.past["collectives"] += member.collectives

    def take_over(self, now: float, linger_s: float) -> list[Job]:
        """Forgets the oldest jobs that have been over for so long and whose ranks have started again, or that have been
        over for ``KEPT_OVER_S``, and returns them. The newest ``KEPT_OVER`` stay.

        Args:
            now: ``time.monotonic()``.
            linger_s: For so long their last rows may come.
        """
        current = {id(job) for job in self._current.values()}
        over = [
            job
            for job in self.jobs
            if job.over_since and (id(job) not in current or now - job.over_since > KEPT_OVER_S)
        ]
        gone = [job for job in over[:-KEPT_OVER] if now - job.over_since > linger_s]
        for job in gone:
            self.jobs.remove(job)
            if self._current.get(job.name) is job:
                del self._current[job.name]
                if len(self._forgotten) < KEPT_NAMES or job.name in self._forgotten:
                    self._forgotten[job.name] = max(job.run, self._forgotten.get(job.name, 0))
            self.past["jobs"] += 1
            for member in job.members.values():
                self._put_by(member)
        return gone

    def adopt_callers(self, pids: set[int]) -> bool:
        """Makes ranks of processes whose calls have arrived. Whether there was one."""
        changed = False
        for pid in pids:
            if pid in self.by_pid or pid not in self.family:
                continue
            candidate = self._candidates.get(pid)
            target = candidate.target if candidate is not None else None
            if target is None:
                try:
                    target = inspect(pid)
                    target.libraries = find_libraries(pid)
                except (OSError, ArgusError):
                    continue  # it ended before anybody knew it: its records are counted as records_without_rank
            self._candidates.pop(pid, None)
            job, member = self._adopt(target)
            if candidate is None or not candidate.from_the_start or not target.on_gpu:
                what = "a helper of rank" if member.helper else "rank"
                where = "" if target.on_gpu else ", on CPUs"
                self.notes.append(f"following process {pid}, {what} {member.rank} of {job.name}{where}")
            changed = True
        if changed:
            self._attach(running=True)
        return changed

    def adopt_cpu_ranks(self, now: float) -> bool:
        """Makes ranks of followed processes that use no GPU: their calls will never arrive. Whether there was one.

        A launcher's own number (Slurm's task, which starts torchrun) makes it no rank: others below it have theirs. Nor
        is a shell a rank that starts a program with the same environment.
        """
        changed = False
        children: dict[int, list[int]] = {}
        for pid in self._candidates:
            children.setdefault(self._parent_of(pid), []).append(pid)
        for pid, candidate in sorted(self._candidates.items()):
            if candidate.no_rank or now - candidate.since < CPU_RANK_S or pid in self._leaving:
                continue
            if candidate.target is not None and candidate.target.on_gpu:
                continue
            above = self._candidates.get(self._parent_of(pid))
            if above is not None and not above.no_rank:
                continue  # its turn comes once it is known what its parent is
            try:
                target = candidate.target or inspect(pid)
                python = find_interpreter(pid) is not None
            except (OSError, ArgusError):
                continue
            mine = target.identity
            theirs = [identity_of(child) for child in children.get(pid, ()) if child in self._candidates]
            starts_ranks = any(
                one.rank >= 0 and (one.rank, one.launcher) != (mine.rank, mine.launcher) for one in theirs
            )
            if mine.rank < 0 or not python or starts_ranks:
                candidate.target, candidate.no_rank = target, True
                continue
            del self._candidates[pid]
            job, member = self._adopt(target)
            what = "a helper of rank" if member.helper else "rank"
            self.notes.append(f"following process {pid}, {what} {member.rank} of {job.name}, on CPUs")
            changed = True
        return changed

    # ---- jobs and ranks

    def _adopt(self, target: Target) -> tuple[Job, Member]:
        pid, rank = target.pid, target.identity.rank
        job, source = None, target.identity.launcher
        parent = self.by_pid.get(parent_of(pid)) if rank >= 0 else None
        if parent is not None and parent[1].rank == rank and parent[0].owner[0] == target.identity.uid:
            job, source = parent[0], "parent"
        if job is None:
            if rank < 0:
                source = "order"
            job, rank = self._place(target)
        member = Member(target, rank, source)
        job.members[pid] = member
        job.over_since = 0.0
        self.by_pid[pid] = (job, member)
        self._names.remember(pid)
        return job, member

    def _place(self, target: Target) -> tuple[Job, int]:
        """The attempt and the rank that a process belongs to."""
        wanted = self._job_name or target.identity.job or "job"
        known = target.identity.rank >= 0
        for number in range(1, len(self.jobs) + 2):
            # Two jobs of one name on a node (the same script twice): a rank that is held belongs to another one.
            name = wanted if number == 1 else f"{wanted}#{number}"
            job = self._current.get(name)
            if job is None:
                run = self._run
                if self.past["jobs"] and (name in self._forgotten or len(self._forgotten) == KEPT_NAMES):
                    # Rows of that name are there.
                    run = max(int(time.time()), run + 1, self._forgotten.get(name, 0) + 1)
                return self._open(name, run, target), max(target.identity.rank, 0)
            if not self._may_join(job, target):
                continue
            if not known and any(member.rank_source != "order" for member in job.ranks()):
                continue  # a stray process among ranks that a launcher numbered
            if (
                known
                and job.lineage
                and job.lineage != target.identity.lineage
                and any(member.target.alive() for member in job.ranks())
            ):
                continue  # started apart from the ranks of that job
            held = {member.rank for member in job.ranks() if member.target.alive()}
            rank = target.identity.rank if known else next(n for n in range(len(held) + 1) if n not in held)
            if rank in held:
                continue
            if job.holder(rank) is None and len(job.members) < MOST_RANKS:
                return job, rank
            again = f"rank {rank} of {name} has started again"
            why = f"{name} has had {MOST_RANKS} processes" if job.holder(rank) is None else again
            self.notes.append(f"{why}: a new run")
            return self._open(name, max(int(time.time()), job.run + 1), target), rank
        raise AssertionError("there is one name more than there are jobs")

    def _may_join(self, job: Job, target: Target) -> bool:
        """Whether a process may be a rank of a job that has begun, whatever it says of itself: it belongs to the same
        user, and runs in the same container, unless that one is no more or who runs Argus named the job."""
        uid, container = target.identity.owner
        if uid != job.owner[0]:
            return False
        over = not any(member.target.alive() for member in job.ranks())
        return container == job.owner[1] or over or self._job_name is not None

    def _open(self, name: str, run: int, target: Target) -> Job:
        job = Job(name, run, target.identity.lineage, target.identity.owner)
        self._current[name] = job
        self.jobs.append(job)
        return job

    def waited(self, pid: int) -> None:
        """Takes note that a process had made no CUDA call when its libraries got their probes."""
        if pid in self._late:
            self._late.discard(pid)
            self.losses["processes_probed_late"] -= 1

    # ---- libraries and probes

    def _look_at_candidates(self, now: float, *, all_of_them: bool = False) -> bool:
        """Whether a candidate has loaded a library."""
        changed = False
        for pid, candidate in list(self._candidates.items()):
            if pid in self._left_alone:
                continue
            if not all_of_them:
                if now < candidate.due or now - candidate.since > YOUNG_S:
                    continue
                candidate.due = now + (now - candidate.since) * QUICK_SHARE
            with self._guard(pid):
                changed |= self._look_at_candidate(pid, candidate, young=now - candidate.since <= YOUNG_S)
        return changed

    def _guard(self, pid: int) -> AbstractContextManager[None]:
        """What fails for a process costs that process."""
        job = self.by_pid[pid][0] if pid in self.by_pid else None
        return self._bulkheads.process(pid, "libraries", lambda: self._left_alone.add(pid), job, user_of)

    def _look_at_candidate(self, pid: int, candidate: _Candidate, *, young: bool) -> bool:
        if candidate.target is None:
            found = self._fresh_libraries(pid, hurry=young)
            if not found:
                return False
            try:
                candidate.target = inspect(pid)
            except (OSError, ArgusError):
                for known in (self._signatures, self._ran, self._mapped):
                    known.pop(pid, None)
                return False
            self._take_libraries(pid, candidate.target, found)
        elif not self._look_for_libraries(pid, candidate.target, hurry=young):
            return False
        # Between PyTorch's load and its first collective lie seconds.
        new = [lib.key for lib in candidate.target.libraries if lib.on_gpu]
        unprobed = [key for key in new if not self._shared.get(key)]
        if unprobed and not candidate.from_the_start:
            # Calls that it made before its libraries had probes went unseen. They cannot be counted one by one.
            self.losses["processes_probed_late"] += 1
            self._late.add(pid)
        return True

    def _look_for_libraries(self, pid: int, target: Target, *, hurry: bool = False) -> bool:
        """Whether a process maps other traceable libraries than when it was last looked at."""
        found = self._fresh_libraries(pid, hurry=hurry)
        return found is not None and self._take_libraries(pid, target, found)

    def _fresh_libraries(self, pid: int, *, hurry: bool) -> Libraries | None:
        """The traceable libraries of a process; None: it maps nothing that it did not map when it was last looked
        at, or there was no time to see.

        Args:
            pid: The process.
            hurry: It is looked at whatever the others took.
        """
        ran = cpu_ns(pid)
        if 0 <= ran == self._ran.get(pid):
            return None
        try:
            pages, looked = mapped_pages(pid), time.monotonic()
            mapped, read, again_s = self._mapped.get(pid, _NEVER_READ)
            late = mapped and not hurry and self._maps_s > MAPS_SHARE_S
            if late or (pages == mapped and looked - read < again_s):
                return None
            signature = mappings_signature(pid)
            self._maps_s += time.monotonic() - looked if mapped else 0.0
            known = self._signatures.get(pid) == signature
            self._mapped[pid] = pages, looked, min(2 * again_s, MOST_MAPS_S) if known and again_s else MAPS_S
            if known:
                self._ran[pid] = ran
                return None
            found = find_libraries(pid)
        except OSError:
            return None
        if found.unread:
            self._unread[pid] = found.unread  # read at the next look
        else:
            self._unread.pop(pid, None)
            self._signatures[pid], self._ran[pid] = signature, ran
        self.losses["mapped_files_unread"] = self._never_read + sum(self._unread.values())
        return found

    def _take_libraries(self, pid: int, target: Target, found: Libraries) -> bool:
        """Takes what a process maps. Whether that has changed."""
        before = {library.key for library in target.libraries}
        now = {library.key for library in found}
        if before and not before & now:
            self._names.forget(pid)  # exec: handles mean something else now
        self._names.remember(pid)
        target.libraries = found
        return now != before or not all(key in self._shared for key in now)

    def _attach(self, *, running: bool) -> bool:
        """Puts probes on every library in use that has none yet.

        Whether a file is probed once for all processes, or for each target apart, is decided when it is first seen and
        kept: both at once would record every call twice.

        Args:
            running: The trace has begun: what cannot be probed is counted and noted, and the rest goes on.

        Raises:
            ArgusError: The kernel refuses, and the trace has not begun.
        """
        self._adopt_attached()
        wanted: dict[FileKey, list[tuple[Library, Target]]] = {}
        users = [member.target for _, member in self.by_pid.values() if member.state == "traced"]
        users += [candidate.target for candidate in self._candidates.values() if candidate.target is not None]
        for target in users:
            for library in target.libraries:
                wanted.setdefault(library.key, []).append((library, target))
        # Decided for all files before the first is probed: that takes long, and probes cost the job meanwhile.
        fresh = {key: uses[0][0] for key, uses in wanted.items() if key not in self._shared}
        elsewhere = set() if self._follow or not fresh else self._mapped_elsewhere(fresh)
        self._shared.update({key: key not in elsewhere for key in fresh})
        for key, uses in wanted.items():
            probed = {attachment.pid for attachment in self.attached if attachment.library.key == key}
            probed |= {pid for at, pid in self._attaching if at == key}
            if not probed and self._has_twin(key, uses):
                continue
            if self._shared[key]:
                if not probed:
                    self._attach_one(uses, None, running)
                continue
            for library, target in uses:
                if target.pid not in probed:
                    self._attach_one([(library, target)], target.pid, running)
        for _, member in self.by_pid.values():
            member.probes = sum(attachment.probes for attachment in self.attachments_of(member))
        return True

    def _has_twin(self, key: FileKey, uses: list[tuple[Library, Target]]) -> bool:
        """Whether probes stand in a file already, by another name: two overlays may show one file below them, whose
        device /proc/PID/maps tells apart from Linux 6.8 on."""
        if key in self._twins:
            return True
        library = uses[0][0]
        # All of its users: one alone could make its own memory look so.
        pids = [target.pid for _, target in uses if target.alive()]
        if not pids or not library.file.on_overlay:
            return False
        for other in self.attached:
            alike = other.pid is None and other.library.file.on_overlay and other.library.stamp == library.stamp
            if alike and all(self._probes.stands_in(other, library, pid) for pid in pids):
                self._twins[key] = other.library.key
                return True
        return False

    def _attach_one(self, uses: list[tuple[Library, Target]], pid: int | None, running: bool) -> None:
        """Attaches to a file by the path of the first of its users that still runs."""
        # Where Python's own function for backward passes is probed, the engine's would tell each begin twice.
        named = all(target.has(TORCH_PYTHON) for _, target in uses)
        without = ("backward_begin",) if named else ()
        timed = any(self._timed(target.pid) for _, target in uses)
        for library, target in uses:
            if not target.alive():
                continue  # its file can still be probed, and nobody would call it
            try:
                self._probe(library, pid, without, timed)
                return
            except ArgusError as failure:
                if not target.alive():
                    continue
                if not running and (library.key, pid) not in self._attaching:
                    raise
                self.losses["attach_failed"] += 1
                self.notes.append(failure.message)
                return
        ended = [target.pid for _, target in uses if target.pid in self._named]
        if not running and ended:
            which = ", ".join(map(str, ended))
            raise ArgusError(f"process {which} ended before it could be probed", "", EXIT_UNAVAILABLE)

    def _probe(self, library: Library, pid: int | None, without: tuple[str, ...], timed: bool) -> None:
        """Probes a file, in a thread of its own: the kernel reads the file's pages, which may never come.

        Raises:
            ArgusError: The kernel refuses, or the file does not answer.
        """
        attaching = Aside(lambda: self._probes.attach(library, pid, without=without, timed=timed), "argus-attach")
        if attaching.wait(ATTACH_S):
            self.attached.append(attaching.result())
            return
        self._attaching[library.key, pid] = attaching
        raise ArgusError(f"{library.shown_path} cannot be probed: its file system does not answer", "")

    def _adopt_attached(self) -> None:
        """Takes over probes on files that answered late."""
        for key, attaching in list(self._attaching.items()):
            if attaching.wait(0):
                del self._attaching[key]
                with contextlib.suppress(ArgusError, OSError):
                    self.attached.append(attaching.result())

    def attachments_of(self, member: Member) -> list[Attachment]:
        """Probes on the files that a process maps."""
        keys = {self._twins.get(library.key, library.key) for library in member.target.libraries}
        return [a for a in self.attached if a.library.key in keys and a.pid in (None, member.target.pid)]

    def _mapped_elsewhere(self, libraries: Mapping[FileKey, Library]) -> set[FileKey]:
        """Which files a process maps that is not let through."""
        mine = {*self.by_pid, *self._candidates}
        sought = {(library.device, library.inode): key for key, library in libraries.items()}
        found: set[FileKey] = set()
        for pid in processes():
            if pid in mine or pid in self.family:
                continue
            try:
                mappings = executable_mappings(pid)
            except OSError:
                continue
            found.update(sought[file] for m in mappings if (file := (m.device, m.inode)) in sought)
            if len(found) == len(libraries):
                break
        return found
