"""The live pipeline: probes → columns → steps → store. One ``Tracer`` is one run of ``argus trace``.

It owns no thread but the writer's and the fork watcher's: whoever runs it calls ``poll`` a few times a second. ``poll``
never waits for the store.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import Counter as Tally
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from argus import __version__, records
from argus.capture import calls, collectives, launches
from argus.capture.bpf import DEFAULT_LAUNCH_RING_BYTES, Attachment, Backend, Probes
from argus.capture.hosts import ForkWatcher
from argus.capture.names import KernelNames
from argus.capture.targets import (
    Library,
    Target,
    descendants,
    executable_mappings,
    find_gpu_processes,
    find_libraries,
    inspect,
    open_target,
    processes,
    same_process,
)
from argus.errors import EXIT_UNAVAILABLE, ArgusError
from argus.records import LOSS_COUNTERS
from argus.semantics.groups import COMMUNICATOR, RankCalls, find_groups
from argus.semantics.steps import METHODS, StepTracker
from argus.store.open import Store
from argus.store.schema import ensure_schema
from argus.store.writer import Writer

WORK_INTERVAL_S = 0.25
"""How often drained records become rows. The ring holds a second of the densest load, and is drained more often."""
GROUPS_INTERVAL_S = 1.0
"""How often the communicators are lined up while something about them is unknown."""
SETTLED_GROUPS_INTERVAL_S = 60.0
"""The same once all is known; a communicator not seen before brings it forward."""
SETTLED_CALLS = 256
"""Collectives of each rank before an alignment counts as settled: dozens of steps."""
RESCAN_INTERVAL_S = 0.5
"""How often targets are looked at for libraries they loaded since, and for children."""
FOLLOW_INTERVAL_S = 0.05
"""How often a followed child is looked at until it has loaded a library: calls before that go unseen."""
COVERAGE_INTERVAL_S = 2.0
KEEP_COLLECTIVES = 4096
"""Recent collectives, and waits, of a rank kept to line communicators up."""


@dataclass(frozen=True)
class Options:
    """What to trace, and how.

    Attributes:
        pids: Processes named by the user.
        all_gpu: Every process that maps libcuda.
        name: Those of them whose command line contains this.
        children: Follow forks and execs of the targets.
        job: Name of the job, over what the environment says.
        launch_durations: Probe the exits of launches too.
        launch_ring_bytes: Size of the ring of CUDA calls.
        backend: Force a way to attach; None: the best the kernel has.
    """

    pids: tuple[int, ...] = ()
    all_gpu: bool = False
    name: str | None = None
    children: bool = False
    job: str | None = None
    launch_durations: bool = False
    launch_ring_bytes: int = DEFAULT_LAUNCH_RING_BYTES
    backend: Backend | None = None


@dataclass
class Member:
    """One traced process of a job."""

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


@dataclass
class Job:
    """One job of the session and what its steps are made from."""

    name: str
    members: dict[int, Member] = field(default_factory=dict)
    tracker: StepTracker = field(default_factory=StepTracker)
    communicators: NDArray[np.void] = field(default_factory=lambda: np.empty(0, COMMUNICATOR))
    recent: dict[int, NDArray[np.void]] = field(default_factory=dict)
    syncs: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    control: dict[int, list[NDArray[np.void]]] = field(default_factory=dict)
    handles: set[tuple[int, int]] = field(default_factory=set)
    groups_due: float = 0.0


@dataclass(frozen=True)
class RankView:
    """A rank as the live view shows it. Rates are per second since the last view."""

    job: str
    rank: int
    pid: int
    state: str
    launch_rate: float
    collective_rate: float
    steps: int
    last_step: int
    step_ms: float


@dataclass(frozen=True)
class View:
    """A moment of the session, for people."""

    elapsed_s: float
    ranks: list[RankView]
    kernels: list[tuple[str, int]]
    collectives: list[tuple[str, int, int]]
    launches: int
    collective_calls: int
    lost: dict[str, int]
    waiting_bytes: int
    store_error: str
    cpu_share: float
    ring_fill: float
    notes: list[str]


class Tracer:
    """One tracing session.

    Args:
        store: Where rows go. It may be away: rows wait in memory, bounded and counted.
        options: What to trace.

    Use: ``start``, then ``poll`` until ``done``, then ``stop``.
    """

    def __init__(self, store: Store, options: Options) -> None:
        self.options = options
        self.host = socket.gethostname()
        self.run = int(time.time())
        self.mono_offset_ns = mono_offset_ns()
        self.started_ns = time.monotonic_ns()
        self.jobs: dict[str, Job] = {}
        self.losses: Tally[str] = Tally()
        self.attached: list[Attachment] = []
        self.notes: list[str] = []
        self._store = store
        self._writer = Writer(store, source=f"trace/{self.host}")
        self._probes: Probes | None = None
        self._names = KernelNames()
        self._watcher: ForkWatcher | None = None
        self._kernel_launches: Tally[str] = Tally()
        self._collective_bytes: Tally[str] = Tally()
        self._collective_calls: Tally[str] = Tally()
        self._drained: dict[str, list[NDArray[np.void]]] = {"launches": [], "collectives": [], "control": []}
        self._work_due = self._rescan_due = self._coverage_due = self._follow_due = 0.0
        self._map_signature: dict[int, int] = {}
        # Children let through that are not members yet: they have loaded no library so far. By time of the last look.
        self._followed: dict[int, float] = {}
        # Targets that use no GPU themselves, followed for their children.
        self._launchers: list[Target] = []
        self._written_jobs: set[str] = set()
        self._view_before: tuple[float, float, dict[int, tuple[int, int]]] = (time.monotonic(), 0.0, {})
        self._version = time.time_ns()

    # ---- begin

    def start(self) -> list[Member]:
        """Finds the targets, loads the programs and attaches.

        Returns:
            The processes traced.

        Raises:
            ArgusError: Nothing can be traced, with the reason. Nothing is left attached.
        """
        targets = self._find_targets()
        try:
            # A store that cannot be had is told now, not at the end. One that goes away later is waited for.
            ensure_schema(self._store)
            self._probes = Probes(
                launch_ring_bytes=self.options.launch_ring_bytes,
                launch_durations=self.options.launch_durations,
                backend=self.options.backend,
            )
            if self.options.children:
                self._watcher = ForkWatcher(self._forked)
                if self._watcher.state != "on":
                    self.notes.append(f"instant following of forks {self._watcher.state}; looking twice a second")
            for target in targets:
                if target.libraries:
                    self._adopt(target)
                else:
                    self._launchers.append(target)
                    self._followed[target.pid] = 0.0
            self._attach_all()
            # All at once, so that the ranks' calls are counted from nearly the same moment on. What they did while
            # probes went in one by one belongs to the time before the trace.
            for target in targets:
                self._probes.add_target(target.pid)
            if self.options.children:
                for pid in descendants([target.pid for target in targets]):
                    self._forked(None, pid)
                if self._adopt_followed(set(self._followed), from_the_start=True):
                    self._attach_all()
            self._writer.start()
            self._write_jobs()
            self._write_ranks()
        except BaseException:
            self.abort()
            for target in targets:
                target.close()
            raise
        self.started_ns = time.monotonic_ns()
        self._view_before = (time.monotonic(), self._cpu_s(), {})
        return [member for job in self.jobs.values() for member in job.members.values()]

    def _find_targets(self) -> list[Target]:
        options = self.options
        pids = list(dict.fromkeys(options.pids))
        targets: list[Target] = []
        if options.all_gpu or options.name is not None:
            found = [pid for pid in find_gpu_processes(options.name) if pid not in pids]
            if not found and not pids:
                what = f" whose command line contains '{options.name}'" if options.name is not None else ""
                raise ArgusError(f"no process that maps libcuda{what} is running", "", EXIT_UNAVAILABLE)
            for pid in found:
                with contextlib.suppress(ArgusError):  # it ended meanwhile
                    targets.append(open_target(pid))
        try:
            look = _open_launcher if options.children else open_target
            targets.extend(map(look, pids))
        except ArgusError:
            for target in targets:
                target.close()
            raise
        if not targets:
            raise ArgusError("every process found ended before it could be traced", "", EXIT_UNAVAILABLE)
        return targets

    def _adopt(self, target: Target) -> Member:
        """Takes a process into its job."""
        job = self._job_of(target)
        used = {member.rank for member in job.members.values()}
        rank, source = target.identity.rank, target.identity.launcher
        if rank < 0 or rank in used:
            rank, source = next(number for number in range(len(used) + 1) if number not in used), "order"
        member = Member(target, rank, source)
        job.members[target.pid] = member
        self._names.remember(target.pid)
        return member

    def _job_of(self, target: Target) -> Job:
        name = self.options.job or target.identity.job or "job"
        # Two jobs of one name on a node (the same script twice): a rank that is taken belongs to another one.
        for attempt in range(1, 1000):
            candidate = name if attempt == 1 else f"{name}#{attempt}"
            job = self.jobs.setdefault(candidate, Job(candidate))
            rank = target.identity.rank
            if rank < 0 or all(member.rank != rank or member.state != "traced" for member in job.members.values()):
                return job
        raise ArgusError(f"a thousand processes claim to be rank {target.identity.rank} of job '{name}'")

    def _attach_all(self) -> None:
        """Puts probes on every library of the targets that has none yet."""
        wanted: dict[tuple[str, int], list[tuple[Library, Member]]] = {}
        for job in self.jobs.values():
            for member in job.members.values():
                if member.state == "traced":
                    for library in member.target.libraries:
                        wanted.setdefault(library.key, []).append((library, member))
        for key, users in wanted.items():
            if any(attachment.library.key == key and attachment.pid is None for attachment in self.attached):
                continue
            if self.options.children or not self._mapped_elsewhere(key):
                # One set of probes serves all ranks; nobody else runs into them.
                self._attach_one(users, shared=True)
                continue
            for user in users:
                if not any(a.pid == user[1].target.pid and a.library.key == key for a in self.attached):
                    self._attach_one([user], shared=False)
        for member in (member for job in self.jobs.values() for member in job.members.values()):
            member.probes = sum(attachment.probes for attachment in self._attachments_of(member))

    def _attach_one(self, users: list[tuple[Library, Member]], *, shared: bool) -> None:
        """Attaches to a file through the first of its users that still runs."""
        assert self._probes is not None
        for library, member in users:
            try:
                self.attached.append(self._probes.attach(library, None if shared else member.target.pid))
                return
            except ArgusError:
                if member.target.alive():
                    raise
                member.state = "exited"

    def _attachments_of(self, member: Member) -> list[Attachment]:
        keys = {library.key for library in member.target.libraries}
        return [a for a in self.attached if a.library.key in keys and a.pid in (None, member.target.pid)]

    def _mapped_elsewhere(self, key: tuple[str, int]) -> bool:
        """Whether a process that is not a target maps a file."""
        mine = {pid for job in self.jobs.values() for pid in job.members}
        for pid in processes():
            if pid in mine:
                continue
            with contextlib.suppress(OSError):
                if any((mapping.device, mapping.inode) == key for mapping in executable_mappings(pid)):
                    return True
        return False

    # ---- go on

    def poll(self) -> None:
        """Drains the rings, and, when due, turns records into rows and steps. Call it every 20 to 50 ms."""
        assert self._probes is not None
        for name, ring in (
            ("control", self._probes.control),
            ("launches", self._probes.launches),
            ("collectives", self._probes.collectives),
        ):
            taken = ring.drain()
            if len(taken):
                self._drained[name].append(taken)
        now = time.monotonic()
        if self._followed and now >= self._follow_due:
            self._follow_due = now + FOLLOW_INTERVAL_S
            if self._adopt_followed(set(self._followed)):
                self._attach_all()
                self._write_ranks()
        if now >= self._work_due:
            self._work_due = now + WORK_INTERVAL_S
            self._work(now)
        if now >= self._rescan_due:
            self._rescan_due = now + RESCAN_INTERVAL_S
            self._rescan()
        if now >= self._coverage_due:
            self._coverage_due = now + COVERAGE_INTERVAL_S
            self._write_coverage()
        self._writer.maybe_flush(now)

    def done(self) -> bool:
        """Whether every target has ended, and every launcher whose children are followed."""
        if any(member.state == "traced" for job in self.jobs.values() for member in job.members.values()):
            return False
        return not any(launcher.alive() for launcher in self._launchers)

    def _take(self, name: str, dtype: np.dtype[np.void]) -> NDArray[np.void]:
        parts, self._drained[name] = self._drained[name], []
        return np.concatenate(parts) if parts else np.empty(0, dtype)

    def _work(self, now: float, *, final: bool = False) -> None:
        control = self._take("control", records.CONTROL)
        cuda = self._take("launches", records.LAUNCH)
        nccl = self._take("collectives", records.COLLECTIVE)
        self._names.learn(control)
        if self._followed:
            seen = {int(pid) for events in (cuda, nccl, control) for pid in np.unique(events["pid"])}
            if self._adopt_followed(seen & self._followed.keys()):
                self._attach_all()
                self._write_ranks()
        known = np.zeros(len(cuda), bool), np.zeros(len(nccl), bool)
        for job in self.jobs.values():
            pids = np.array(sorted(job.members), np.uint32)
            ranks = np.array([job.members[int(pid)].rank for pid in pids], np.uint32)
            known[0][:] |= self._take_launches(job, cuda, pids, ranks)
            known[1][:] |= self._take_collectives(job, nccl, pids, ranks)
            self._take_control(job, control, pids, ranks)
            self._steps(job, now, final=final)
        self.losses["records_without_rank"] += int(np.sum(~known[0]) + np.sum(~known[1]))

    @staticmethod
    def _select(
        events: NDArray[np.void], pids: NDArray[np.uint32], ranks: NDArray[np.uint32]
    ) -> tuple[NDArray[np.bool_], NDArray[np.uint32]]:
        """Which events are of these processes, and the ranks of those that are."""
        if not len(pids) or not len(events):
            return np.zeros(len(events), bool), np.empty(0, np.uint32)
        place = np.minimum(np.searchsorted(pids, events["pid"]), len(pids) - 1)
        mine = pids[place] == events["pid"]
        return mine, ranks[place[mine]]

    def _take_launches(
        self, job: Job, cuda: NDArray[np.void], pids: NDArray[np.uint32], ranks: NDArray[np.uint32]
    ) -> NDArray[np.bool_]:
        mine, rank = self._select(cuda, pids, ranks)
        if not mine.any():
            return mine
        events = cuda[mine]
        table = launches.to_table(
            events,
            job=job.name,
            run=self.run,
            host=self.host,
            ranks=rank,
            names=self._names,
            mono_offset_ns=self.mono_offset_ns,
        )
        self._writer.append("launches", table)
        kernels = table["kernel"].combine_chunks()
        counts = np.bincount(kernels.indices.to_numpy(), minlength=len(kernels.dictionary))
        for word, count in zip(kernels.dictionary.to_pylist(), counts.tolist(), strict=True):
            if word and count:
                self._kernel_launches[word] += count
        launching = launches.is_launch(events)
        outside = launching & ((events["flags"] & records.FLAG_IN_NCCL) == 0)
        waiting = launches.is_sync(events)
        for pid, member in job.members.items():
            of_rank = events["pid"] == pid
            member.launches += int(np.sum(of_rank & launching))
            chosen = events[of_rank & outside]
            if len(chosen):
                job.tracker.feed(member.rank, np.ascontiguousarray(chosen), np.empty(0, records.COLLECTIVE))
            waits = events[of_rank & waiting]
            if len(waits):
                pair = np.column_stack([waits["ts_ns"].astype(np.int64), waits["duration_ns"]])
                pair = pair[np.argsort(pair[:, 0], kind="stable")]
                before = job.syncs.get(member.rank)
                joined = pair if before is None else np.concatenate([before, pair])
                job.syncs[member.rank] = joined[-KEEP_COLLECTIVES:]
        return mine

    def _take_collectives(
        self, job: Job, nccl: NDArray[np.void], pids: NDArray[np.uint32], ranks: NDArray[np.uint32]
    ) -> NDArray[np.bool_]:
        mine, rank = self._select(nccl, pids, ranks)
        if not mine.any():
            return mine
        events = nccl[mine]
        self._writer.append(
            "collectives",
            collectives.to_table(
                events, job=job.name, run=self.run, host=self.host, ranks=rank, mono_offset_ns=self.mono_offset_ns
            ),
        )
        nbytes = collectives.payload_bytes(events)
        for code in np.unique(events["call"]):
            chosen = events["call"] == code
            op = calls.CALLS[int(code)].kind
            if op.startswith("Group"):
                continue
            self._collective_calls[op] += int(np.sum(chosen))
            self._collective_bytes[op] += int(np.sum(nbytes[chosen]))
        together = collectives.is_collective(events)
        for pid, member in job.members.items():
            of_rank = events["pid"] == pid
            member.collectives += int(np.sum(of_rank & together))
            chosen = events[of_rank & together]
            if not len(chosen):
                continue
            chosen = np.ascontiguousarray(chosen[np.argsort(chosen["ts_ns"], kind="stable")])
            job.tracker.feed(member.rank, np.empty(0, records.LAUNCH), chosen)
            before = job.recent.get(member.rank)
            joined = chosen if before is None else np.concatenate([before, chosen])
            job.recent[member.rank] = joined[-KEEP_COLLECTIVES:]
            handles = {(member.rank, comm) for comm in np.unique(chosen["comm"]).tolist()}
            if not handles <= job.handles:
                job.handles |= handles
                job.groups_due = min(job.groups_due, time.monotonic() + GROUPS_INTERVAL_S)
        return mine

    def _take_control(
        self, job: Job, control: NDArray[np.void], pids: NDArray[np.uint32], ranks: NDArray[np.uint32]
    ) -> None:
        chosen = control[collectives.about_communicators(control)]
        mine, rank = self._select(chosen, pids, ranks)
        if not mine.any():
            return
        events = chosen[mine]
        self._writer.append(
            "communicator_calls",
            collectives.communicator_calls(
                events, job=job.name, run=self.run, host=self.host, ranks=rank, mono_offset_ns=self.mono_offset_ns
            ),
        )
        for pid in np.unique(events["pid"]):
            of_pid = events[events["pid"] == pid]
            job.control.setdefault(job.members[int(pid)].rank, []).append(of_pid)
        job.groups_due = 0.0

    def _steps(self, job: Job, now: float, *, final: bool) -> None:
        if now >= job.groups_due or final:
            self._groups(job)
            job.groups_due = now + (SETTLED_GROUPS_INTERVAL_S if _settled(job) else GROUPS_INTERVAL_S)
        found = job.tracker.advance(final=final)
        if not len(found):
            return
        by_rank = {member.rank: member for member in job.members.values()}
        for rank in np.unique(found["rank"]):
            member = by_rank[int(rank)]
            mine = found[found["rank"] == rank]
            member.steps += len(mine)
            member.last_step = int(mine["step"][-1])
            member.last_step_ns = int(mine["duration_ns"][-1])
        self._writer.append(
            "iterations",
            {
                "job": job.name,
                "run": np.full(len(found), self.run, np.uint32),
                "rank": found["rank"].copy(),
                "step": found["step"].copy(),
                "host": self.host,
                "ts": found["ts_ns"].astype(np.int64) + self.mono_offset_ns,
                "duration_ns": found["duration_ns"].copy(),
                "collectives": found["collectives"].copy(),
                "launches": found["launches"].copy(),
                "method": launches.dictionary(found["method"].astype(np.int32), list(METHODS)),
                "confidence": found["confidence"].copy(),
            },
        )

    def _groups(self, job: Job) -> None:
        nothing = np.empty((0, 2), np.int64)
        known = [
            RankCalls(
                rank=rank,
                collectives=recent,
                sync_ts=job.syncs.get(rank, nothing)[:, 0],
                sync_duration=job.syncs.get(rank, nothing)[:, 1],
                control=_joined(job.control.get(rank, [])),
            )
            for rank, recent in sorted(job.recent.items())
        ]
        found = find_groups(known)
        job.tracker.align(found)
        if np.array_equal(found, job.communicators):
            return
        job.communicators = found
        self._writer.append(
            "communicators",
            {
                "job": job.name,
                "run": np.full(len(found), self.run, np.uint32),
                **{name: found[name].copy() for name in ("rank", "comm", "comm_group", "comm_rank", "nranks")},
                "seq_offset": found["seq_offset"].copy(),
                "joined_by": found["joined_by"].tolist(),
                "error": found["error"].tolist(),
                "version": np.full(len(found), self._next_version(), np.uint64),
            },
        )

    # ---- processes that come and go

    def _forked(self, parent: int | None, child: int) -> None:
        """A target's child is traced from its first call on: its probes are those of the library files."""
        if self._probes is None:
            return
        mine = {pid for job in self.jobs.values() for pid in list(job.members)} | self._followed.keys()
        if child in mine or (parent is not None and parent not in mine):
            return
        missed = self._probes.add_target(child)
        if missed:
            self.losses["calls_before_follow"] += missed
        self._followed[child] = time.monotonic()

    def _rescan(self) -> None:
        assert self._probes is not None
        changed = False
        for job in self.jobs.values():
            for member in job.members.values():
                if member.state != "traced":
                    continue
                if not member.target.alive():
                    member.state = "exited"
                    self._probes.remove_target(member.target.pid)
                    changed = True
                    continue
                changed |= self._look_for_libraries(member)
        if self.options.children:
            roots = [pid for job in self.jobs.values() for pid in job.members] + [t.pid for t in self._launchers]
            for pid in descendants(roots):
                self._forked(None, pid)
        if changed:
            self._attach_all()
            self._write_ranks()

    def _look_for_libraries(self, member: Member) -> bool:
        """Whether a process has loaded (or, by exec, replaced) traceable libraries since it was last looked at."""
        pid = member.target.pid
        try:
            mappings = executable_mappings(pid)
            signature = hash(tuple((m.device, m.inode) for m in mappings))
            if self._map_signature.get(pid) == signature:
                return False
            self._map_signature[pid] = signature
            self._names.remember(pid)
            found = find_libraries(pid)
        except OSError:
            return False
        before = {library.key for library in member.target.libraries}
        if {library.key for library in found} == before:
            return False
        if before and not before & {library.key for library in found}:
            # exec: handles mean something else now
            self._names.forget(pid)
            self._names.remember(pid)
        member.target.libraries = found
        return True

    def _adopt_followed(self, candidates: set[int], *, from_the_start: bool = False) -> bool:
        """Followed children among ``candidates`` that have loaded a library become members of their job.

        A library that nobody loaded before has no probes yet: calls that its process made meanwhile went unseen. That
        cannot be counted call by call, so the processes concerned are (not those that ran when the trace began: there
        the user knows).
        """
        changed = False
        for pid in candidates:
            try:
                found = find_libraries(pid)
                if not found:
                    continue
                target = inspect(pid)
            except (OSError, ArgusError):
                if not os.path.exists(f"/proc/{pid}"):
                    self._followed.pop(pid, None)
                    if self._probes is not None:
                        self._probes.remove_target(pid)
                continue
            target.libraries = found
            self._followed.pop(pid, None)
            member = self._adopt(target)
            probed = {attachment.library.key for attachment in self.attached if attachment.pid is None}
            if not from_the_start:
                if any(library.key not in probed for library in found):
                    self.losses["processes_probed_late"] += 1
                self.notes.append(f"following process {pid} as rank {member.rank}")
            changed = True
        return changed

    # ---- end

    def stop(self) -> dict[str, int]:
        """Takes the probes away, stores what is left, and returns the loss counters that are not 0."""
        assert self._probes is not None
        if self._watcher is not None:
            self._watcher.close()
        self._probes.detach()
        self._rescan_states()
        unfinished = self._probes.in_progress()
        for name, ring in (
            ("control", self._probes.control),
            ("launches", self._probes.launches),
            ("collectives", self._probes.collectives),
        ):
            self._drained[name].append(ring.drain())
        self._drained["launches"].append(unfinished[0])
        self._drained["collectives"].append(unfinished[1])
        self._work(time.monotonic(), final=True)
        self._write_ranks()
        self._write_jobs(ended=True)
        self._write_coverage()
        report = self._writer.close()
        for table, rows in report.dropped.items():
            self.losses[f"rows_dropped_{table}"] += rows
        self.store_error = report.last_error if report.dropped else ""
        lost = self.lost()
        if report.dropped and not report.last_error:
            self.store_error = "the store was away for too long"
        self._probes.close()
        self._probes = None
        self._close_targets()
        self._store.close()
        return lost

    store_error = ""

    def abort(self) -> None:
        """Lets go of everything at once, storing nothing more."""
        if self._watcher is not None:
            self._watcher.close()
        if self._probes is not None:
            self._probes.close()
            self._probes = None
        self._close_targets()

    def _close_targets(self) -> None:
        for launcher in self._launchers:
            launcher.close()
        for job in self.jobs.values():
            for member in job.members.values():
                member.target.close()

    def _rescan_states(self) -> None:
        for job in self.jobs.values():
            for member in job.members.values():
                if member.state == "traced" and not member.target.alive():
                    member.state = "exited"

    # ---- what was seen and lost

    def counters(self) -> dict[str, tuple[int, bool]]:
        """Every counter of the session: value, and whether a value above 0 is a loss."""
        assert self._probes is not None
        kernel = self._probes.counters()
        found = {counter.name.lower(): (value, counter in LOSS_COUNTERS) for counter, value in kernel.items()}
        for name, ring in (("launches", self._probes.launches), ("collectives", self._probes.collectives)):
            found[f"{name}_ring_discarded"] = (ring.discarded, True)
        found["kernels_without_name"] = (self._names.unresolved, False)
        if self._watcher is not None:
            found["fork_events_missed"] = (self._watcher.missed, True)
        for job in self.jobs.values():
            for name, value in job.tracker.counters.items():
                found[name] = (found.get(name, (0, False))[0] + value, False)
        for name, value in self.losses.items():
            found[name] = (value, True)
        for table, rows in self._writer.rows_dropped.items():
            found[f"rows_dropped_{table}"] = (rows, True)
        return found

    def lost(self) -> dict[str, int]:
        """The loss counters that are not 0. Coverage is complete if there is none."""
        return {name: value for name, (value, loss) in self.counters().items() if loss and value}

    def view(self) -> View:
        """The session as people see it now; rates since the previous call."""
        assert self._probes is not None
        now, cpu = time.monotonic(), self._cpu_s()
        before, cpu_before, counts_before = self._view_before
        span = max(now - before, 1e-3)
        ranks, counts = [], {}
        for job in self.jobs.values():
            for pid, member in job.members.items():
                counts[pid] = (member.launches, member.collectives)
                old = counts_before.get(pid, counts[pid])
                ranks.append(
                    RankView(
                        job.name,
                        member.rank,
                        pid,
                        member.state,
                        (member.launches - old[0]) / span,
                        (member.collectives - old[1]) / span,
                        member.steps,
                        member.last_step,
                        member.last_step_ns / 1e6,
                    )
                )
        self._view_before = (now, cpu, counts)
        ring = self._probes.launches
        return View(
            elapsed_s=(time.monotonic_ns() - self.started_ns) / 1e9,
            ranks=sorted(ranks, key=lambda rank: (rank.job, rank.rank)),
            kernels=self._kernel_launches.most_common(8),
            collectives=[(op, self._collective_calls[op], size) for op, size in self._collective_bytes.most_common(6)],
            launches=sum(count[0] for count in counts.values()),
            collective_calls=sum(count[1] for count in counts.values()),
            lost=self.lost(),
            waiting_bytes=self._writer.bytes_waiting,
            store_error=self._writer.trouble,
            cpu_share=(cpu - cpu_before) / span,
            ring_fill=ring.most_used_bytes / ring.size_bytes,
            notes=list(self.notes),
        )

    def _cpu_s(self) -> float:
        """CPU time of Argus so far, s: its own and that of the embedded engine."""
        times = os.times()
        return times.user + times.system + self._store.engine_cpu_s()

    # ---- rows about the session itself

    def _next_version(self) -> int:
        self._version += 1
        return self._version

    def _write_jobs(self, *, ended: bool = False) -> None:
        started = self.started_ns + self.mono_offset_ns
        for job in self.jobs.values():
            members = list(job.members.values())
            if not members:
                continue
            self._written_jobs.add(job.name)
            self._writer.append(
                "jobs",
                {
                    "job": job.name,
                    "run": self.run,
                    "host": self.host,
                    "started": np.array([started], np.int64),
                    "ended": np.array([time.time_ns()], np.int64) if ended else [None],
                    "world_size": max((m.target.identity.world_size for m in members), default=0),
                    "launcher": members[0].target.identity.launcher,
                    "mono_offset_ns": self.mono_offset_ns,
                    "argus_version": __version__,
                    "version": self._next_version(),
                },
            )

    def _write_ranks(self) -> None:
        if self.jobs.keys() - self._written_jobs:
            self._write_jobs()
        for job in self.jobs.values():
            members = list(job.members.values())
            if not members:
                continue
            self._writer.append(
                "ranks",
                {
                    "job": job.name,
                    "run": self.run,
                    "rank": np.array([m.rank for m in members], np.uint32),
                    "host": self.host,
                    "pid": np.array([m.target.pid for m in members], np.uint32),
                    "local_rank": np.array([m.target.identity.local_rank for m in members], np.int32),
                    "rank_source": [m.rank_source for m in members],
                    "started": np.array([int(m.target.started_unix * 1e9) for m in members], np.int64),
                    "exe": [m.target.exe for m in members],
                    "command": [m.target.command for m in members],
                    "libraries": [[library.path for library in m.target.libraries] for m in members],
                    "probes": np.array([m.probes for m in members], np.uint32),
                    "state": [m.state for m in members],
                    "version": self._next_version(),
                },
            )

    def _write_coverage(self) -> None:
        found = self.counters()
        for job in self.jobs.values():
            self._writer.append(
                "coverage",
                {
                    "job": job.name,
                    "run": self.run,
                    "host": self.host,
                    "counter": list(found),
                    "value": np.array([value for value, _ in found.values()], np.uint64),
                    "loss": np.array([loss for _, loss in found.values()], bool),
                    "ts": np.full(len(found), time.time_ns(), np.int64),
                    "version": self._next_version(),
                },
            )


def _open_launcher(pid: int) -> Target:
    """A process whose children are followed: it need not use the GPU itself."""
    target = inspect(pid)
    with contextlib.suppress(OSError):
        target.libraries = find_libraries(pid)
    if not same_process(pid, target.start_ticks):
        raise ArgusError(f"process {pid} ended while Argus looked at it", "", EXIT_UNAVAILABLE)
    return target


def _settled(job: Job) -> bool:
    """Whether every communicator seen is lined up, on enough calls to stay so."""
    known = {(int(row["rank"]), int(row["comm"])) for row in job.communicators if not row["error"]}
    calls_seen = min((len(recent) for recent in job.recent.values()), default=0)
    return len(job.recent) == len(job.members) and calls_seen >= SETTLED_CALLS and job.handles <= known


def _joined(parts: Iterable[NDArray[np.void]]) -> NDArray[np.void]:
    present = list(parts)
    return np.concatenate(present) if present else np.empty(0, records.CONTROL)


def mono_offset_ns() -> int:
    """Wall time minus CLOCK_MONOTONIC, ns: of 32 readings, the one taken in the shortest time."""
    best = (1 << 62, 0)
    for _ in range(32):
        before = time.monotonic_ns()
        wall = time.time_ns()
        after = time.monotonic_ns()
        best = min(best, (after - before, wall - (before + after) // 2))
    return best[1]
