"""Calls of CUDA and NCCL, and marks of steps: what the rings bring, as rows and as steps."""

from __future__ import annotations

import time
from collections import Counter as Tally

import numpy as np
from numpy.typing import NDArray

from argus.capture.attachment import subject_of
from argus.capture.process.names import KernelNames
from argus.capture.process.targets import TORCH_PYTHON
from argus.live.gpu.rows import KEPT_NAMES
from argus.live.job import Job, Member, is_waiting
from argus.live.session import Session
from argus.live.session_rows import OVER_S, SessionRows
from argus.live.side import Counters, Side
from argus.live.sides.alignment import INTERVAL_S
from argus.live.sides.by_job import ByJob, Together, by_pid
from argus.live.sides.call_room import CallRoom
from argus.live.sides.call_shares import CONTROL, CallShares
from argus.live.sides.draining import CallRings, join_records
from argus.live.sides.gpu_times import GpuSide
from argus.live.sides.probing import ProbingSide
from argus.live.sides.step_rows import StepRows
from argus.model import calls, event_kinds, records
from argus.model.losses import Owner, Whom
from argus.model.records import LOSS_COUNTERS
from argus.semantics.phases.gpu import OF_NCCL, Calls, call_rows
from argus.semantics.steps.by_calls import CALL, calls_of
from argus.semantics.steps.by_marks import drop_ends
from argus.semantics.steps.marks import Marks
from argus.semantics.steps.range_names import Meaning, meaning_of
from argus.tables import collectives, launches

POLL_S = 0.02
"""How often the rings are drained while calls are probed."""
QUIET_POLL_S = 0.1
"""The same while few calls come, no GPU's records, and no process is new."""
FORKS_POLL_S = 0.05
"""The same where children are followed: a fork is seen so late."""
QUIET_FILL = 1 / 256
"""Below this fill level of the fullest ring few calls come."""
KEEP_COLLECTIVES = 4096
"""Recent collectives, and waits, of a rank kept to line communicators up."""
FINISHED_S = 0.5
"""After so long nothing more is expected of a job that is over. Its GPU times want its last steps before they end
(``gpu.process.LAST_STEPS_S``)."""

_WHAT = np.array([OF_NCCL.get(call.kind, 0) if call.layer is calls.Layer.NCCL else 0 for call in calls.CALLS], np.uint8)
"""What each probed call does, ``semantics.phases.gpu.What``; 0: no collective of NCCL."""
_TRAINS = np.array([call.kind in ("backward", "backward_begin") for call in calls.CALLS])
_RANGES = np.array([subject_of(call) == "ranges" for call in calls.CALLS])


class _Meanings:
    """What names of a process's ranges mean, as long as its owner's part of the loop's time lasts. For one turn."""

    def __init__(self, session: Session, pid: int) -> None:
        self._session = session
        self._pid = pid
        self._refused = 0

    def of(self, name: str) -> Meaning | None:
        """The meaning of a name; None: there is no time for it."""
        if not self._refused and self._session.may_look_up(self._pid):
            with self._session.looking_up(self._pid):
                return meaning_of(name)
        self._refused += 1
        return None

    def count(self) -> None:
        """Counts names for which there was no time, but the first: the session has counted that."""
        if self._refused > 1:
            whom = self._session.whom(self._pid)
            self._session.losses.count("look_ups_over_share", whom, number=self._refused - 1)


class CallSide(Side):
    """What processes call.

    Args:
        session: The trace.
        gpu: Is given the launches, for the operations that they launched.
        probing: Is given the calls that are seen in windows.
        rows: Stores ranks that are noticed by their calls.
        names: Of kernels.

    Attributes:
        poll_s: How soon the rings are to be drained again.
        soon: Whether processes are looked at meanwhile that may be about to make their first calls.
        drained_ns: What was called before this has been drained, CLOCK_MONOTONIC.
        seen_ns: What was called until then has become rows; 0: nothing has.
        waited_ns: Time that threads spent in calls that wait for a GPU, so far.
        kernel_launches, collective_bytes, collective_calls: For the live view, by name.
    """

    name = "calls"

    def __init__(
        self, session: Session, gpu: GpuSide, probing: ProbingSide, rows: SessionRows, names: KernelNames
    ) -> None:
        self._session = session
        self._gpu = gpu
        self._probing = probing
        self._rows = rows
        self._names = names
        self._steps = StepRows(session, gpu)
        self._shares = CallShares(session)
        self._room = CallRoom(session, self._shares)
        self._rings: CallRings | None = None
        self._drained: dict[str, list[NDArray[np.void]]] = {
            "launches": [],
            "collectives": [],
            "control": [],
            "marks": [],
            "math": [],
        }
        self.poll_s, self.soon = POLL_S, False
        self.drained_ns = self.seen_ns = self.waited_ns = 0
        self.kernel_launches: Tally[str] = Tally()
        self.collective_bytes: Tally[str] = Tally()
        self.collective_calls: Tally[str] = Tally()
        self._generations = collectives.Generations(self._owner_of, self._count_groups)
        self._marks_without_rank = 0
        self._calls_after_end = self._calls_in_progress = 0

    def open(self) -> None:
        """Reads the rings of the session's probes from here on."""
        self._rings = CallRings(self._session.probes.rings())

    def poll(self, now: float, slack_s: float = 0.0) -> None:
        """Drains the rings, and goes on with communicators that are being lined up."""
        self.drain()
        self._steps.go_on(now)

    def drain(self) -> None:
        """Reads what the rings hold, to be worked on later."""
        assert self._rings is not None
        if self.soon or self._gpu.collects or self._rings.used > QUIET_FILL:
            self.poll_s = POLL_S
        else:
            longest = FORKS_POLL_S if self._session.options.children else QUIET_POLL_S
            self.poll_s = min(1.25 * self.poll_s, longest)
        taken, self.drained_ns = self._rings.take()
        for name, parts in taken.items():
            self._drained[name] += parts
        for launched in taken["launches"]:
            waits = launched["duration_ns"][event_kinds.is_sync(launched)]
            self.waited_ns += int(np.maximum(waits, 0).sum())

    def relieve(self, now: float) -> None:
        """Drains the rings while the loop hangs."""
        if self._rings is not None:
            self._rings.relieve(now)

    def _taken(self, name: str, dtype: np.dtype[np.void]) -> NDArray[np.void]:
        parts, self._drained[name] = self._drained[name], []
        return join_records(parts, dtype)

    def work(self, now: float, *, final: bool = False) -> None:
        """Turns what the rings brought into rows and steps, and gives the GPU side its part."""
        self.seen_ns = self.drained_ns
        with self._session.bulkheads.part(ProbingSide.name):
            self._probing.take_note(self.drained_ns)
        self._session.fill_look_ups(now)
        if not final:
            self._shares.begin_turn(now)
        for job in self._session.roster.jobs:
            if job.over_since and now - job.over_since > FINISHED_S:
                self._finish(job, now)
        self._room.make(now)
        if final or self._session.calls_come or self._gpu.collects or any(self._drained.values()):
            try:
                self._gpu.feed_calls(self._work(now, final=final))
            finally:
                self._gpu.feed_products(self._taken("math", records.MATH))

    def _finish(self, job: Job, now: float) -> None:
        """Stores the last steps of a job that is over, in turns in which its owner has time for that. If it has none
        for long, they are left out."""
        if job.finished:
            return
        if self._shares.may(job):
            with self._session.bulkheads.job(job), self._shares.working(job):
                self._steps.store(job, now, self.drained_ns, final=True)
                if is_waiting(job):
                    return
            job.finish()
        elif now - job.over_since > OVER_S:
            self._leave_out(job)

    def _leave_out(self, job: Job) -> None:
        self._session.losses.count("last_steps_over_share", Whom(job))
        if job.by_marks is not False:
            drop_ends(job.marked)
        job.finish()

    def _work(self, now: float, *, final: bool) -> NDArray[np.void]:
        """Returns the CUDA calls among what the rings brought."""
        control = self._taken("control", records.CONTROL)
        cuda = self._taken("launches", records.LAUNCH)
        nccl = self._taken("collectives", records.COLLECTIVE)
        marks = self._taken("marks", records.MARK)
        self._names.learn(control)
        control = control[event_kinds.about_communicators(control)]
        callers = {int(pid) for events in (cuda, nccl, control) for pid in np.unique(events["pid"])}
        callers |= self._gpu.callers()
        callers |= set(np.unique(marks["pid"][_TRAINS[marks["call"]]]).tolist())
        if not final:
            kept = self._shares.within({"launches": cuda, "collectives": nccl, "marks": marks, CONTROL: control})
            cuda, nccl, marks, control = kept["launches"], kept["collectives"], kept["marks"], kept[CONTROL]
        marks = self._names.complete(marks)
        launched = cuda
        if self._session.end_ns is not None:
            cuda, nccl, marks = (self._before_the_end(events) for events in (cuda, nccl, marks))
        with self._session.bulkheads.part("process groups"):
            self._generations.number(control, nccl)
        with self._session.bulkheads.part("new ranks"):  # calls of the others are worked on
            if self._session.roster.adopt_callers(callers - self._session.roster.by_pid.keys()):
                self._rows.ranks_changed(now)
        whose = ByJob(self._session.roster.by_pid)
        kinds = (
            ("launches", cuda, self._feed_launches),
            ("collectives", nccl, self._feed_collectives),
            (CONTROL, control, self._feed_control),
        )
        of_jobs = {kind: whose.split(events) for kind, events, _ in kinds}
        with_rank = {kind: np.zeros(len(events), bool) for kind, events, _ in kinds}
        self._steps.begin_turn(now)
        marks_of = {pid: marks[places] for pid, places in by_pid(marks)}
        for job in self._shares.in_turns(self._session.roster.jobs):
            members = whose.members.get(id(job), {})
            if not members and (not final or job.finished):
                continue
            with self._session.bulkheads.job(job), self._shares.working(job) as working:
                for kind, events, feed in kinds:
                    if id(job) not in of_jobs[kind]:
                        continue
                    places, ranks = of_jobs[kind][id(job)]
                    parts = self._shares.parts(job, kind, len(places), working) if not final else [(0, len(places))]
                    for begin, end in parts:
                        with working.on(kind):
                            feed(job, members, events[places[begin:end]], ranks[begin:end])
                        working.calls[kind] += end - begin
                    with_rank[kind][places] = True
                for pid, member in members.items():
                    if pid not in marks_of or member.helper:
                        continue
                    number = len(marks_of[pid])
                    for begin, end in self._shares.parts(job, "marks", number, working) if not final else [(0, number)]:
                        with working.on("marks"):
                            self._feed_marks(job, member, marks_of[pid][begin:end])
                        working.calls["marks"] += end - begin
                if final:
                    self._steps.store_last(job, now, self.drained_ns)
                elif self._shares.may_store(job, working):
                    self._steps.store(job, now, self.drained_ns, final=False)
        self._probing.find_pulses(self.drained_ns)
        self._marks_without_rank += int(np.sum(~np.isin(marks["pid"], list(self._session.roster.by_pid))))
        for kind, events, _ in kinds:
            if not with_rank[kind].all():
                ones = np.ones(len(events), np.int64)
                self._session.count_losses("records_without_rank", events["pid"], ones, ~with_rank[kind])
        return launched

    def _owner_of(self, pid: int) -> Owner:
        whom = self._session.whom(pid)
        return whom.owner if whom.job is None else whom.job.owner

    def _count_groups(self, pid: int, number: int) -> None:
        self._session.losses.count("groups_over_share", self._session.whom(pid), number=number)

    def _before_the_end(self, events: NDArray[np.void]) -> NDArray[np.void]:
        """Without calls made while the probes went: some functions had theirs yet, and steps would look otherwise."""
        before = events["ts_ns"] < self._session.end_ns
        self._calls_after_end += int(np.sum(~before))
        return events[before]

    def _feed_launches(
        self, job: Job, members: dict[int, Member], events: NDArray[np.void], rank: NDArray[np.uint32]
    ) -> None:
        table = launches.to_table(events, self._session.origin(job), rank, self._names)
        self._session.writer.append("launches", table)
        kernels = table["kernel"].combine_chunks()
        counts = np.bincount(kernels.indices.to_numpy(), minlength=len(kernels.dictionary))
        for word, count in zip(kernels.dictionary.to_pylist(), counts.tolist(), strict=True):
            if word and count:
                self.kernel_launches[word] += count
        if len(self.kernel_launches) > 2 * KEPT_NAMES:
            self.kernel_launches = Tally(dict(self.kernel_launches.most_common(KEPT_NAMES)))
        by_process = Together(events)
        events = by_process.events
        launching, waiting = event_kinds.is_launch(events), event_kinds.is_sync(events)
        self._probing.count("launches", events["ts_ns"][launching], job)
        outside = (events["flags"] & records.FLAG_IN_NCCL) == 0
        of_steps = launching & outside & (events["ts_ns"] < self._probing.until_ns("launches"))
        seen, launched, waits = events[outside], events[of_steps], events[waiting]
        calls_made = _calls_for(job, launched)
        pairs = np.column_stack([waits["ts_ns"].astype(np.int64), waits["duration_ns"]])
        for pid, number, its_seen, its_launches, its_waits in zip(
            by_process.pids,
            by_process.count(launching),
            by_process.places(outside),
            by_process.places(of_steps),
            by_process.places(waiting),
            strict=True,
        ):
            member = members[pid]
            member.launches += number
            if member.helper:
                continue
            self._probing.feed(job, member.rank, seen[its_seen])
            if its_launches.stop > its_launches.start:
                job.feed(member, launched[its_launches], None, calls_made[its_launches])
            if its_waits.stop > its_waits.start:
                before = job.syncs.get(member.rank, pairs[:0])
                job.syncs[member.rank] = np.concatenate([before, pairs[its_waits]])[-KEEP_COLLECTIVES:]

    def _feed_collectives(
        self, job: Job, members: dict[int, Member], events: NDArray[np.void], rank: NDArray[np.uint32]
    ) -> None:
        in_windows = events["ts_ns"] >= self._probing.until_ns("collectives")
        if in_windows.any():
            # Calls of a communicator are numbered as they are seen: those numbers mean nothing now.
            self._count_collectives(job, members, events[in_windows])
            events, rank = events[~in_windows], rank[~in_windows]
            if not len(events):
                return
        self._session.writer.append(
            "collectives",
            collectives.to_table(events, self._session.origin(job), rank),
        )
        nbytes = event_kinds.payload_bytes(events)
        for code in np.unique(events["call"]):
            chosen = events["call"] == code
            op = calls.CALLS[int(code)].kind
            if op.startswith("Group"):
                continue
            self.collective_calls[op] += int(np.sum(chosen))
            self.collective_bytes[op] += int(np.sum(nbytes[chosen]))
        by_process = Together(events)
        events = by_process.events
        nbytes, of_nccl = event_kinds.payload_bytes(events), event_kinds.of_nccl(events)
        chosen = event_kinds.is_collective(events)
        called = events[chosen]
        counted, calls_made, comm = event_kinds.has_count(called), _calls_for(job, called), called["comm"]
        what = _WHAT[events["call"]]
        ts, tid, sizes = events["ts_ns"].astype(np.int64), events["tid"].astype(np.int64), nbytes.astype(np.int64)
        rows = call_rows(ts, tid, what, sizes, events["comm"], events["peer"])
        for pid, its, its_rows, its_calls in zip(
            by_process.pids,
            by_process.places(),
            by_process.places(what > 0),
            by_process.places(chosen),
            strict=True,
        ):
            member, own = members[pid], called[its_calls]
            member.collectives += len(own)
            if member.helper:
                continue
            job.count_traffic(member.rank, events[its], nbytes[its])
            job.calls.setdefault(member.rank, Calls()).feed_rows(rows[its_rows])
            handles = set(events["comm"][its][of_nccl[its]].tolist())
            job.ask_communicators(member, sorted(handles), self._session)
            if not len(own):
                continue
            self._probing.feed(job, member.rank, own)
            job.feed(member, None, own, calls_made[its_calls])
            job.recent[member.rank] = _newest(job.recent.get(member.rank, own[:0]), own)
            handles = {(member.rank, handle) for handle in comm[its_calls].tolist()}
            if not handles <= job.handles:
                new = np.isin(own["comm"], np.array([handle for _, handle in handles - job.handles], np.uint64))
                of_groups = own["comm"][new & counted[its_calls]]
                later = job.ask_groups(member, np.unique(of_groups).tolist(), self._session)
                job.handles |= {(rank_of, handle) for rank_of, handle in handles if handle not in later}
                job.groups_due = min(job.groups_due, time.monotonic() + INTERVAL_S)
        job.make_room()

    def _count_collectives(self, job: Job, members: dict[int, Member], events: NDArray[np.void]) -> None:
        """Counts collectives that are seen in windows. Their rows would have numbers that mean nothing."""
        nbytes = event_kinds.payload_bytes(events)
        together = event_kinds.is_collective(events)
        self._probing.count("collectives", events["ts_ns"][together], job)
        for code in np.unique(events["call"]):
            op = calls.CALLS[int(code)].kind
            if not op.startswith("Group"):
                self.collective_calls[op] += int(np.sum(events["call"] == code))
                self.collective_bytes[op] += int(np.sum(nbytes[events["call"] == code]))
        for pid, places in by_pid(events):
            member, of_rank = members[pid], places[together[places]]
            member.collectives += len(of_rank)
            if not member.helper and len(of_rank):
                self._probing.feed(job, member.rank, events[of_rank])

    def _feed_control(
        self, job: Job, members: dict[int, Member], events: NDArray[np.void], rank: NDArray[np.uint32]
    ) -> None:
        self._session.writer.append(
            "communicator_calls",
            collectives.communicator_calls(events, self._session.origin(job), rank),
        )
        order = np.argsort(events["pid"], kind="stable")
        job.keep_control(rank[order], events[order])
        job.make_room()
        job.groups_due = job.alignments.rests_in_vain = 0.0

    def _feed_marks(self, job: Job, member: Member, marks: NDArray[np.void]) -> None:
        its_marks = job.marks.setdefault(member.rank, Marks())
        its_marks.steps = 0 if job.by_marks is False else job.marked.wanted
        whole = marks["ts_ns"] < (job.ranges_until or 1 << 62)
        ends, meanings = member.target.has(TORCH_PYTHON), _Meanings(self._session, member.target.pid)
        job.feed_marks(member, its_marks.take(marks[whole], ends_of_backward=ends, meaning=meanings.of))
        if not whole.all():
            # Some of the ranges' probes are there for a moment longer than others.
            seen = ~_RANGES[marks["call"]] | job.sampled.covers(marks["ts_ns"])
            late = marks[~whole & seen]
            job.feed_marks(member, its_marks.take(late, ends_of_backward=ends, meaning=meanings.of))
        meanings.count()

    # ---- the end

    def end_job(self, job: Job) -> None:
        """Stores the last steps of a job that is over, if that was not done yet."""
        self._finish(job, time.monotonic())
        if not job.finished:
            self._leave_out(job)

    def forget_processes(self, pids: list[int]) -> None:
        """Drops what is kept of processes that have ended."""
        self._generations.forget(pids)

    def stop(self) -> None:
        """Drains the rings for the last time, and takes the calls that have not returned."""
        unfinished = self._session.probes.in_progress()
        self._calls_in_progress = sum(map(len, unfinished))
        self.drain()
        for name, events in zip(("launches", "collectives", "control"), unfinished, strict=True):
            if len(events):
                self._drained[name].append(events)

    def close(self) -> None:
        """Drains nothing any more."""
        if self._rings is not None:
            self._rings.close()

    # ---- what was observed

    def counters(self) -> Counters:
        """Every counter of calls, and of the steps that are made of them."""
        probes, jobs = self._session.probes, self._session.jobs
        counters = {c.name.lower(): (value, c in LOSS_COUNTERS) for c, value in probes.counters().items()}
        for name, ring in probes.rings().items():
            counters[f"{name}_ring_discarded"] = (ring.discarded, True)
        counters["records_read_meanwhile"] = (0 if self._rings is None else self._rings.relieved, False)
        counters["marks_without_rank"] = (self._marks_without_rank, False)
        counters["calls_in_progress"] = (self._calls_in_progress, False)
        counters["calls_after_end"] = (self._calls_after_end, False)
        counters["kernels_without_name"] = (self._names.unresolved, False)
        counters["kernel_names_cut"] = (self._names.cut, False)
        counters["mark_names_unread"] = (self._names.unread, False)
        not_aligned = sum(job.not_aligned for job in jobs)
        counters["communicators_not_aligned"] = (not_aligned, False)
        counters["communicators_forgotten"] = (sum(job.forgotten for job in jobs), False)
        for subject in probes.refused:
            counters[f"{subject}_not_probed"] = (1, True)
        for job in jobs:
            for name, value in job.counters().items():
                counters[name] = (counters.get(name, (0, False))[0] + value, False)
        if without_rank := self._session.losses.totals["records_without_rank"]:
            counters["records_without_rank"] = (without_rank, True)
        return counters


def _calls_for(job: Job, events: NDArray[np.void]) -> NDArray[np.void]:
    """LAUNCH or COLLECTIVE rows as ``CALL`` rows, shape (n,), if a job's steps are found by them; else as many that say
    nothing."""
    return np.zeros(len(events), CALL) if job.by_marks else calls_of(events)


def _newest(before: NDArray[np.void], called: NDArray[np.void]) -> NDArray[np.void]:
    """A rank's newest collectives, nothing else in their memory: those from ``before``, and those called since then."""
    kept = before[max(len(before) + len(called) - KEEP_COLLECTIVES, 0) :]
    return records.join(kept, called[-KEEP_COLLECTIVES:])
