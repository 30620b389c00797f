"""Who is traced: processes, the jobs and ranks they stand for, and the probes on the libraries they map.

A process becomes a rank when its user names it, or when it makes a call: mapping libcuda says little, since data-loader
workers inherit it and launchers import it. Until then it is a candidate: let through, its libraries probed.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial

from argus.capture.attachment import Attachment
from argus.capture.process.follow import Family
from argus.capture.process.names import KernelNames
from argus.capture.process.targets import (
    Identity,
    Libraries,
    Target,
    find_libraries,
    identity_of,
    inspect,
    parent_of,
    runs_as_another,
)
from argus.capture.python.interpreter import find_interpreter
from argus.capture.reader import reader
from argus.live.cost.admission import Admission
from argus.live.gpu.room import max_min
from argus.live.job import Job, Member
from argus.live.mapped_libraries import MappedLibraries
from argus.live.probed_files import ProbedFiles
from argus.live.session import Session
from argus.live.side import Counters
from argus.model.errors import ArgusError
from argus.model.given_names import GivenNames
from argus.model.losses import EVERYBODY, UNKNOWN, Owner, Whom
from argus.system.proc import owner_of

CPU_RANK_S = 3.0
"""After so long a candidate that maps no traceable library, and of which its environment says that it is a rank, is one
on CPUs."""
KEPT_OVER = 8
"""Attempts of jobs that are over and were superseded, remembered for the end's summary: of a launcher that restarts its
ranks for weeks, the newest. What older ones did is in the store, and in ``Roster.past``."""
KEPT_OVER_S = 600.0
"""A job that has been over for so long is forgotten as if its ranks had started again, whatever its name: a node that
runs a job after the other, each of another name, has any number."""
KEPT_OVER_OF_USER, KEPT_OVER_OF_ALL = 64, 512
"""Jobs that are over, of a user and of all: a script may start any number within ``KEPT_OVER_S``. Beyond, the oldest
whose last steps were stored are forgotten before that. A rank of one that comes after all begins a new run."""
MOST_RANKS = 4096
"""Ranks of a job on this host. A script that numbers what it starts without end begins a new run every so many."""
KEPT_HELPERS = 64
"""The same of a job's helpers that ended: data-loader workers, started anew each epoch."""
QUICK_SHARE = 1 / 40
"""Of its age: how soon a young candidate is looked at again between the rounds."""
YOUNG_S = 60.0
"""How long a candidate is looked at in every round: libraries are loaded early in a program's life."""


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
    owner: Owner | None = None
    """Whose it was when it was looked at first."""


class Roster:
    """Keeps track of processes.

    Args:
        session: The trace: where processes are let through and files are probed.
        names: Forgets which processes go, and remembers which come.
        timed: Whether a process may have GPU times.

    Attributes:
        admission: Time for each owner's new processes.
    """

    def __init__(self, session: Session, names: KernelNames, *, timed: Callable[[int], bool] = lambda _: False) -> None:
        self._session = session
        self._left_alone: set[int] = set()
        """Processes whose libraries could not be read, though they should have been."""
        self._no_ranks: set[int] = set()
        """Processes that could not be made ranks, though they should have been."""
        self.jobs: list[Job] = []
        self.by_pid: dict[int, tuple[Job, Member]] = {}
        self.past: Tally[str] = Tally()
        """What the jobs and helpers that are no longer remembered did: jobs, launches, collectives."""
        self._late: dict[int, Whom] = {}
        """Processes that were probed late, and whom that concerns."""
        self._follow = session.options.children
        self.family = Family(session.probes, follow=self._follow)
        self.files = ProbedFiles(session, self.family, timed)
        self._libraries = MappedLibraries(session)
        self.admission = Admission(session.losses)
        self._names = names
        self._job_name = session.options.job
        self._run = session.run
        self._current: dict[str, Job] = {}
        self._given = GivenNames()
        self._candidates: dict[int, _Candidate] = {}
        self._leaving: list[int] = []

    # ---- begin and end

    def start(self, targets: list[Target], named: set[int]) -> None:
        """Takes the first processes in and attaches to what they map.

        Args:
            targets: The processes.
            named: PIDs that the user asked for one by one: their end is an error, that of others is not.

        Raises:
            ArgusError: The kernel refuses, or a named process has ended.
        """
        self.files.named = named
        if self._follow and self.family.state != "on":
            self._session.note(f"forks are noticed twice a second only: {self.family.state}")
        pids = {target.pid for target in targets}
        now = time.monotonic()
        self.admission.fill((), (target.identity.owner for target in targets), now)
        for target in _in_order(targets, named=self._job_name is not None):
            # A child of another target with its parent's rank is a helper; a launcher has no rank. Either is a rank
            # only once it makes calls.
            helper = parent_of(target.pid) in pids and target.identity.rank >= 0
            launcher = self._follow and (target.identity.rank < 0 or not target.on_gpu)
            chosen = target.pid in named or self.admission.may_join(target.pid, target.identity.owner)
            if helper or launcher or not chosen:
                self._candidates[target.pid] = _Candidate(now, target, from_the_start=True)
            else:
                self._adopt(target)
        # Let through first: a launcher maps PyTorch, and probes on it hit its running ranks at once.
        self.family.admit([target.pid for target in targets])
        if self._follow:
            joined, _ = self.family.refresh()
            for pid in joined:
                self._candidates[pid] = _Candidate(now, from_the_start=True)
            # All are looked at before the first file is probed: by its own files a process's PyTorch is read.
            self._look_at_candidates(now, all_of_them=True)
        self._attach(running=False)

    def renumber(self, run: int) -> None:
        """Gives the jobs another run, before any row of them was made."""
        for job in self.jobs:
            job.run += run - self._run
        self._given.renumber(run - self._run)
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
            if candidate.target is not None and candidate.target.on_gpu
            if pid not in self._leaving and self._parent_of(pid) not in self.by_pid
        ]

    def young(self, now: float) -> bool:
        """Whether there are candidates that may be about to make their first calls."""
        return any(now - candidate.since <= YOUNG_S for candidate in self._candidates.values())

    def _parent_of(self, pid: int) -> int:
        """A candidate's parent: it has another one only after that has ended."""
        candidate = self._candidates[pid]
        if candidate.parent < 0:
            candidate.parent = 0
            with self._guard(pid), suppress(OSError):
                candidate.parent = parent_of(pid)
        return candidate.parent

    # ---- go on

    def look_quickly(self, now: float) -> bool:
        """Looks at young candidates only. Cheap enough for 20 times a second. Whether something changed."""
        self._add_candidates(self.family.new(), now)
        self.admission.fill(self.jobs, (self._owner_of(pid) for pid in self._candidates), now)
        changed = self._look_at_candidates(now)
        return ((changed or self.files.due()) and self._attach(running=True)) or changed

    def _owner_of(self, pid: int) -> Owner:
        """Whose a process is that may be a rank, or whose that was which forked it, if it has ended."""
        candidate = self._candidates.get(pid) or _Candidate(0.0)
        if candidate.target is not None:
            return candidate.target.identity.owner
        if candidate.owner is None:
            candidate.owner = UNKNOWN
            with self._guard(pid):
                whom = self.whom(pid)
                candidate.owner = whom.owner if whom.job is None else whom.job.owner
        return candidate.owner

    def _add_candidates(self, pids: list[int], now: float) -> None:
        self._candidates.update((pid, _Candidate(now)) for pid in pids if pid not in self.by_pid)

    def look(self, now: float) -> bool:
        """Looks at every process: who came, who ended, who loaded what. Whether something changed."""
        joined, ended = self.family.refresh()
        self._add_candidates(joined, now)
        self.count_losses_of_forks()
        changed = False
        self._libraries.begin_round()
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
        for pid in sorted(self.by_pid, key=self._libraries.read_at):
            member = self.by_pid[pid][1]
            if member.state == "traced" and pid not in self._left_alone:
                with self._guard(pid):
                    changed |= self._look_for_libraries(pid, member.target)
        if changed := changed | self._look_at_candidates(now, all_of_them=True):
            self._attach(running=True)
        return changed

    def _has_new_owner(self, pid: int) -> bool:
        """Whether a rank runs as another user now, by executing a setuid program or of its own will. What it does is
        nobody's of its job then: it leaves the trace. Where children are followed it may come back as another job's."""
        job, member = self.by_pid[pid]
        changed = True  # also if whose it is cannot be had
        with self._guard(pid):
            changed = member.state == "traced" and runs_as_another(member.target)
            if changed:
                self._session.losses.count("processes_changed_owner", Whom(job))
                self._session.note(f"process {pid} runs as another user now: it is no longer rank {member.rank}")
        return changed

    def counters(self) -> Counters:
        """Every counter of what becomes of processes: value, and whether a value above 0 is a loss."""
        family, losses = self.family, self._session.losses.totals
        counters: Counters = {"files_released": (self.files.released, False)}
        counters["calls_before_follow"] = (family.missed_calls, True)
        counters["fork_events_missed"] = (family.missed_events, True)
        counters["follow_failed"] = (family.failures + (family.state != "on"), True)
        counters["attach_failed"] = (losses["attach_failed"] + self._session.probes.unanswered, True)
        ignored = sum(bool(member.ignored) for job in self.jobs for member in job.members.values())
        counters["processes_ignored"] = (ignored, True)
        return counters

    def own_losses(self, job: Job) -> dict[str, int]:
        """Of ``counters``, what concerns a job, of those that are not counted in ``Session.losses`` alone."""
        of_job = self._session.losses.of(job)
        probed = {id(each): each for member in job.members.values() for each in self.attachments_of(member)}
        unanswered = sum(each.unanswered for each in probed.values())
        return {
            "attach_failed": of_job.get("attach_failed", 0) + unanswered,
            "calls_before_follow": of_job.get("calls_before_follow", 0),
            "follow_failed": of_job.get("follow_failed", 0) + (self.family.state != "on"),
        }

    def whom(self, pid: int) -> Whom:
        """Whom a loss of a process concerns. Any thread may ask."""
        below: set[int] = set()
        while pid and pid not in below:
            if held := self.by_pid.get(pid):
                return Whom(held[0]) if not below else Whom(None, held[0].owner)
            candidate = self._candidates.get(pid)
            target = candidate.target if candidate is not None else None
            owner = target.identity.owner if target is not None else owner_of(pid)
            if owner[0] >= 0:
                return Whom(None, owner)
            # It has ended: who forked it may be there.
            below.add(pid)
            pid = self.family.parent(pid)
        return EVERYBODY

    def count_losses_of_forks(self) -> None:
        """Counts what could not be had of processes when they were forked."""
        for counter, pid, number in self.family.take_losses():
            self._session.losses.count(counter, self.whom(pid), number=number)

    def leaving(self) -> list[int]:
        """Processes that ended and whose last records may not have been read yet."""
        return list(self._leaving)

    def retire(self, pids: list[int]) -> None:
        """Forgets processes that ended and whose records have been read: their PIDs may be others' soon."""
        for pid in pids:
            self._leaving.remove(pid)
            self.family.dismiss(pid)
            self._names.forget(pid)
            self.admission.forget(pid)
            reader.shared.forget(pid)
            self._libraries.forget(pid)
            candidate = self._candidates.pop(pid, None)
            if candidate is not None and candidate.target is not None:
                candidate.target.close()
                self.files.was_used(candidate.target)
            self._late.pop(pid, None)
            self._left_alone.discard(pid)
            self._no_ranks.discard(pid)
            if pid in self.by_pid:
                job, member = self.by_pid.pop(pid)
                member.target.close()
                self.files.was_used(member.target)
                self._settle(job)
        if pids:
            users = [member.target for _, member in self.by_pid.values()]
            users += [candidate.target for candidate in self._candidates.values() if candidate.target is not None]
            self.files.release(users)
        self._session.forget_losses()

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

    def take_over(self, now: float, linger_s: float, most: int | None = None) -> list[Job]:
        """Forgets the oldest jobs, ``most`` or all, that have been over for so long and whose ranks have started again,
        or that have been over for ``KEPT_OVER_S``, and returns them. The newest ``KEPT_OVER`` of these stay. Of a user
        who has too many (``KEPT_OVER_OF_USER``) the oldest go before that.

        Args:
            now: ``time.monotonic()``.
            linger_s: For so long their last rows may come.
        """
        current = {id(job) for job in self._current.values()}
        over = [job for job in self.jobs if job.over_since]
        old = [job for job in over if id(job) not in current or now - job.over_since > KEPT_OVER_S]
        forgotten = {id(job) for job in old[:-KEPT_OVER]} | _too_many(over)
        gone = [job for job in over if id(job) in forgotten and now - job.over_since > linger_s][:most]
        for job in gone:
            self.jobs.remove(job)
            if self._current.get(job.name) is job:
                del self._current[job.name]
                self._given.give(job.name, job.owner[0], job.run)
            self.past["jobs"] += 1
            for member in job.members.values():
                self._put_by(member)
        return gone

    def adopt_callers(self, pids: set[int]) -> bool:
        """Makes ranks of processes whose calls have arrived. Whether there was one."""
        changed = False
        found: list[Target] = []
        for pid in pids:
            if pid in self.by_pid or pid in self._no_ranks or not self.family.includes(pid):
                continue
            owner = self._owner_of(pid)
            if not self.admission.may_join(pid, owner):
                continue
            with self._guard(pid, ranks=True), self.admission.joining(owner), suppress(OSError, ArgusError):
                # One that ended before anybody knew it: its records are counted as records_without_rank.
                known = self._candidates.get(pid)
                found.append(known.target if known is not None and known.target is not None else _inspected(pid))
        for target in _in_order(found, named=self._job_name is not None):
            owner = target.identity.owner
            with self._guard(target.pid, ranks=True), self.admission.joining(owner), suppress(OSError):
                job, member = self._adopt(target)
                candidate = self._candidates.pop(target.pid, None)
                if candidate is None or not candidate.from_the_start or not target.on_gpu:
                    self._session.note(_following(job, member, on_gpu=target.on_gpu))
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
            if candidate.no_rank or pid in self._no_ranks or now - candidate.since < CPU_RANK_S or pid in self._leaving:
                continue
            if candidate.target is not None and candidate.target.on_gpu:
                continue
            above = self._candidates.get(self._parent_of(pid))
            if above is not None and not above.no_rank and self._parent_of(pid) not in self._no_ranks:
                continue  # its turn comes once it is known what its parent is
            if not self.admission.may_join(pid, owner := self._owner_of(pid)):
                continue
            with self._guard(pid, ranks=True), self.admission.joining(owner):
                below = (identity_of(child) for child in children.get(pid, ()) if child in self._candidates)
                if (target := _cpu_rank(pid, candidate, below)) is not None:
                    del self._candidates[pid]
                    self._session.note(_following(*self._adopt(target), on_gpu=False))
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
        job.over_since, job.finishing, job.finished = 0.0, False, False
        self.by_pid[pid] = (job, member)
        self._names.remember(pid)
        return job, member

    def _place(self, target: Target) -> tuple[Job, int]:
        """The attempt and the rank that a process belongs to."""
        wanted = self._job_name or target.identity.job or "job"
        numbered, uid = target.identity.rank >= 0, target.identity.uid
        for name in _names(wanted, uid, whose := partial(_whose, self._current, self._given), self._given):
            # Two jobs of one name on a node (the same script twice): a rank that is held belongs to another one.
            job = self._current.get(name)
            if job is None:
                if self._given.owner(name) not in (None, uid):
                    continue  # rows of another user's are there
                _say_whose(self._session, whose(wanted), wanted, name, uid)
                run, before = self._run, self._given.newest_run(name)
                if before or not self._given.give(name, uid, run):
                    run = max(int(time.time()), run + 1, before + 1)  # rows of that name are there, or may be
                return self._open(name, run, target), max(target.identity.rank, 0)
            if not _may_join(job, target, named=self._job_name is not None):
                continue
            if not numbered and any(member.rank_source != "order" for member in job.ranks()):
                continue  # a stray process among ranks that a launcher numbered
            if (
                numbered
                and job.lineage
                and job.lineage != target.identity.lineage
                and any(member.target.alive() for member in job.ranks())
            ):
                continue  # started apart from the ranks of that job
            held = {member.rank for member in job.ranks() if member.target.alive()}
            rank = target.identity.rank if numbered else next(n for n in range(len(held) + 1) if n not in held)
            if rank in held:
                continue
            if job.holder(rank) is None and len(job.members) < MOST_RANKS:
                return job, rank
            again = f"rank {rank} of {name} has started again"
            why = f"{name} has had {MOST_RANKS} processes" if job.holder(rank) is None else again
            self._session.note(f"{why}: a new run")
            return self._open(name, max(int(time.time()), job.run + 1), target), rank
        raise AssertionError("names do not end")

    def _open(self, name: str, run: int, target: Target) -> Job:
        job = Job(name, run, target.identity.lineage, target.identity.owner)
        self.admission.begin_job(job.owner)
        self._current[name] = job
        self.jobs.append(job)
        return job

    def waited(self, pid: int) -> None:
        """Takes note that a process had made no CUDA call when its libraries got their probes."""
        if (whom := self._late.pop(pid, None)) is not None:
            self._session.losses.count("processes_probed_late", whom, number=-1)

    # ---- libraries and probes

    def _look_at_candidates(self, now: float, *, all_of_them: bool = False) -> bool:
        """Whether a candidate has loaded a library."""
        changed = False
        # Whose turn it has been for longest comes first: there may be no time for all.
        for pid, candidate in sorted(self._candidates.items(), key=lambda item: item[1].due):
            if pid in self._left_alone:
                continue
            if not all_of_them and (now < candidate.due or now - candidate.since > YOUNG_S):
                continue
            owner = self._owner_of(pid)
            if self.admission.may_look(pid, owner, again=candidate.due > 0):
                candidate.due = now + (now - candidate.since) * QUICK_SHARE
                with self._guard(pid), self.admission.looking(owner):
                    changed |= self._look_at_candidate(pid, candidate, young=now - candidate.since <= YOUNG_S)
        return changed

    def _guard(self, pid: int, *, ranks: bool = False) -> AbstractContextManager[None]:
        """What fails for a process costs that process. ``ranks``: it is what makes it a rank."""
        job, left = self.by_pid[pid][0] if pid in self.by_pid else None, self._no_ranks if ranks else self._left_alone
        return self._session.bulkheads.process(pid, "libraries", lambda: left.add(pid), job, owner_of)

    def _look_at_candidate(self, pid: int, candidate: _Candidate, *, young: bool) -> bool:
        if candidate.target is None:
            libraries = self._libraries.changed(pid, hurry=young)
            if not libraries:
                return False
            try:
                candidate.target = inspect(pid, wait=False)
            except (OSError, ArgusError):
                self._libraries.read_anew(pid)
                return False
            self._set_libraries(pid, candidate.target, libraries)
        elif not self._look_for_libraries(pid, candidate.target, hurry=young):
            return False
        # Between PyTorch's load and its first collective lie seconds.
        new = [lib.key for lib in candidate.target.libraries if lib.on_gpu]
        unprobed = [key for key in new if not self.files.probes(key)]
        if unprobed and not candidate.from_the_start:
            # Calls that it made before its libraries had probes went unseen. They cannot be counted one by one.
            self._late[pid] = self.whom(pid)
            self._session.losses.count("processes_probed_late", self._late[pid])
        return True

    def _look_for_libraries(self, pid: int, target: Target, *, hurry: bool = False) -> bool:
        """Whether a process maps other traceable libraries than when it was read last."""
        libraries = self._libraries.changed(pid, hurry=hurry)
        return libraries is not None and self._set_libraries(pid, target, libraries)

    def _set_libraries(self, pid: int, target: Target, libraries: Libraries) -> bool:
        """Notes what a process maps. Whether that has changed."""
        before = {library.key for library in target.libraries}
        now = {library.key for library in libraries}
        if before and not before & now:
            self._names.forget(pid)  # exec: handles mean something else now
        self._names.remember(pid)
        target.libraries = libraries
        return now != before or not all(map(self.files.decided, now))

    def _attach(self, *, running: bool) -> bool:
        """As ``ProbedFiles.attach``."""
        users = [member.target for _, member in self.by_pid.values() if member.state == "traced"]
        users += [candidate.target for candidate in self._candidates.values() if candidate.target is not None]
        new = self.files.attach(users, {*self.by_pid, *self._candidates}, running=running)
        self.files.count_probes(member for _, member in self.by_pid.values())
        return new

    def attachments_of(self, member: Member) -> list[Attachment]:
        """Probes on the files that a process maps."""
        return self.files.of(member.target)

    @property
    def attached(self) -> list[Attachment]:
        """Probes on files."""
        return self.files.attached


def _too_many(over: Iterable[Job]) -> set[int]:
    """Which jobs that are over are too many (their ``id``): of each user the oldest, and of all together the oldest of
    those users who have most. Who has few keeps all."""
    of_user: dict[int, list[Job]] = {}
    for job in sorted(over, key=lambda job: job.over_since):
        of_user.setdefault(job.owner[0], []).append(job)
    wanted = [min(len(jobs), KEPT_OVER_OF_USER) for jobs in of_user.values()]
    rooms = max_min(wanted, [1.0] * len(wanted), KEPT_OVER_OF_ALL)
    return {
        id(job)
        for jobs, room in zip(of_user.values(), rooms, strict=True)
        for job in jobs[: len(jobs) - room]
        if job.finished
    }


def _whose(current: Mapping[str, Job], given: GivenNames, name: str) -> int | None:
    """The user who has a name; None: nobody."""
    job, owner = current.get(name), given.owner(name)
    return owner if owner is not None or job is None else job.owner[0]


def _names(wanted: str, uid: int, whose: Callable[[str], int | None], given: GivenNames) -> Iterator[str]:
    """Names under which a user's job is stored, without end: what it is called, or, where another user's job has that
    name or had it, the user's number behind it. All nodes agree on that, and so do all runs; whose job came first they
    do not. Further jobs of the user are numbered.

    Args:
        wanted: What the job is called.
        uid: Of the user; below 0: not known.
        whose: The user who has a name, or None.
        given: Names that are remembered. Of one that cannot be the next user's rows would be in an older run.
    """
    apart = f"{wanted}#uid{uid}"
    has, has_apart = whose(wanted), whose(apart)
    # Where the other job's name was not remembered it is free once that is forgotten, and ranks may yet join.
    free = has is None and has_apart != uid and given.has_room(wanted, uid)
    first = wanted if uid < 0 or free or has == uid else apart
    yield first
    yield from (f"{first}#{number}" for number in itertools.count(2))


def _may_join(job: Job, target: Target, *, named: bool) -> bool:
    """Whether a process may be a rank of a job that has begun, whatever it says of itself: it belongs to the same user,
    and runs in the same container, unless that one is no more or who runs Argus named the job."""
    uid, container = target.identity.owner
    if uid != job.owner[0]:
        return False
    over = not any(member.target.alive() for member in job.ranks())
    return container == job.owner[1] or over or named


def _in_order(targets: Sequence[Target], *, named: bool) -> list[Target]:
    """Those that a launcher numbered first: a name that was given is theirs. ``named``: who runs Argus gave it, perhaps
    on several nodes. On each it is the user's who has most ranks there, not whose process is the oldest."""
    ranks = Tally(target.identity.uid for target in targets if target.identity.rank >= 0)

    def place(target: Target) -> tuple[bool, int, int]:
        uid = target.identity.uid
        return target.identity.rank < 0, -ranks[uid] * named, uid * named

    return sorted(targets, key=place)


def _say_whose(session: Session, owner: int | None, wanted: str, name: str, uid: int) -> None:
    """A note, if a user's job gets another name since another user has its own. ``owner``: who has that."""
    if owner is not None and owner != uid:
        session.note(f"a job of uid {owner} has the name {wanted}: ranks of uid {uid} are stored as {name}")
    elif owner is None and name != wanted:
        session.note(f"jobs of uid {uid} have had too many names: those called {wanted} are stored as {name}")


def _cpu_rank(pid: int, candidate: _Candidate, below: Iterable[Identity]) -> Target | None:
    """The process, if it is a rank; None: it is none, which is noted, or cannot be seen. ``below``: its children."""
    try:
        target, python = candidate.target or inspect(pid, wait=False), find_interpreter(pid) is not None
    except (OSError, ArgusError):
        return None
    identity = target.identity
    if identity.rank < 0 or not python or any(_is_another_rank(child, identity) for child in below):
        candidate.target, candidate.no_rank = target, True
        return None
    return target


def _is_another_rank(one: Identity, other: Identity) -> bool:
    return one.rank >= 0 and (one.rank, one.launcher) != (other.rank, other.launcher)


def _following(job: Job, member: Member, *, on_gpu: bool) -> str:
    what = "a helper of rank" if member.helper else "rank"
    return f"following process {member.target.pid}, {what} {member.rank} of {job.name}{'' if on_gpu else ', on CPUs'}"


def _inspected(pid: int) -> Target:
    target = inspect(pid, wait=False)
    target.libraries = find_libraries(pid)
    return target
