"""One process whose GPU times are recorded, and CUPTI in each program that it runs."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from argus.capture.process.names import LookUps
from argus.capture.process.targets import Target, mapped_pages
from argus.cupti.collector import Collector, CuptiOptions
from argus.cupti.decode import Batch
from argus.cupti.names_room import Part
from argus.live.gpu.room import MOST_OPS, OP_BYTES, max_min
from argus.live.gpu.threads import HostTids
from argus.live.job import Job, Member
from argus.live.session_rows import OVER_S
from argus.model import records
from argus.model.losses import Owner
from argus.semantics.gpu.achieved_flops import GpuFlops
from argus.semantics.gpu.correlation import KEPT_BYTES, Correlator
from argus.semantics.gpu.usage import GpuSteps, GpuUsage
from argus.semantics.phases.gpu import kinds_of, what_of
from argus.system.aside import Aside
from argus.tables import gpu as gpu_rows

LINGER_S = 3.0
"""How long after its end a process's last records are waited for."""
LAST_STEPS_S = OVER_S + LINGER_S
"""How long after the end of a process, or of its job, the last steps are: the job has them stored within ``OVER_S``."""
RECENT_WINDOWS = 5
"""Seconds that the live view averages over."""
_CALLS = 5
"""Which of ``GpuProcess._held`` are calls."""


class CuptiProgram:
    """CUPTI in one program: a process has several when it execs.

    Args:
        pid: The process.
        options: How it is collected.
        look_ups: When its threads may be read.
        owner: Whose it is.
    """

    def __init__(self, pid: int, options: CuptiOptions, look_ups: LookUps, owner: Owner) -> None:
        self.collector = Collector(pid, options, owner)
        self.correlator = Correlator(api=options.api, host_tids=HostTids(pid, look_ups))
        self.names = gpu_rows.Names(pid, Part(pid, owner))
        self.batches: list[Batch] = []
        self._kinds = np.zeros(0, np.uint8)

    def poll(self, now: float) -> None:
        """Fetches what was recorded. ``now``: ``time.monotonic()``."""
        self.batches += self.collector.poll(now)

    @property
    def nbytes(self) -> int:
        """Bytes of the records that nobody has taken."""
        return sum(batch.gpu.nbytes + batch.host.nbytes for batch in self.batches)

    def keep(self, most_bytes: int) -> int:
        """Drops the oldest batches where there is more. Returns how many records these had."""
        dropped = 0
        while self.nbytes > most_bytes:
            dropped += len(self.batches[0].gpu) + len(self.batches[0].host)
            del self.batches[0]
        return dropped

    def take(self) -> tuple[NDArray[np.void], NDArray[np.void]]:
        """What has come since the last call: operations, and records of the CPU side."""
        batches, self.batches = self.batches, []
        self.names.learn(self.collector.names)
        return (
            np.concatenate([np.empty(0, records.GPU_OP), *(batch.gpu for batch in batches)]),
            np.concatenate([np.empty(0, records.HOST_OP), *(batch.host for batch in batches)]),
        )

    def kinds(self, ops: NDArray[np.void], words: NDArray[np.int32]) -> NDArray[np.uint8]:
        """What operations are, ``semantics.phases.gpu.What``. ``words``: their names."""
        fresh = [what_of(word) for word in self.names.words[len(self._kinds) :]]
        self._kinds = np.concatenate([self._kinds, np.array(fresh, np.uint8)])
        return kinds_of(ops, self._kinds[words])


@dataclass
class GpuProcess:
    """A process, from when it was first seen until its last record is stored.

    Attributes:
        target, since: Which, and since when, ``time.monotonic()``.
        job, member: Whose rank it is; None: of nobody yet.
        program: CUPTI in the program that it runs; None: the helper is not in it.
        usage, steps, flops: What becomes of its operations.
        waiting: Of how many the kernels' times are not summed up yet (``KernelSide.waiting``).
        windows: Rows of ``gpu_usage`` of the last seconds, for the live view.
        injection: Puts the helper into it (``--cupti inject``).
        failure: Why its GPU times cannot be had; empty: they can.
        was_on: Whether something was recorded, or might have been.
        kernels: How many it ran.
        first_ns: When its first operation began; 0: there was none.
        unanswered: Times of launches, since GPU times are on, after the newest one of which an operation is known: the
            newest ``KEEP_PROBED``, as many as an operation can still be matched with.
        written: State and reason that its feature has.
        again_at: When another program is tried; 0: that is not due.
        ended_at: When it was seen to have ended; 0: it has not.
        over: Whether its last record is stored.
        due: When there may be something to fetch, ``time.monotonic()``.
        put_off_at: Since when what was fetched waits, as its owner's time is used up; infinity: it does not.
        last: State and reason, once it is over.
    """

    target: Target
    since: float
    job: Job | None = None
    member: Member | None = None
    program: CuptiProgram | None = None
    usage: GpuUsage = field(default_factory=lambda: GpuUsage(MOST_OPS))
    steps: GpuSteps = field(default_factory=lambda: GpuSteps(MOST_OPS))
    flops: GpuFlops = field(default_factory=GpuFlops)
    waiting: int = 0
    windows: deque[NDArray[np.void]] = field(default_factory=lambda: deque(maxlen=4 * RECENT_WINDOWS))
    injection: Aside[str] | None = None
    failure: str = ""
    was_on: bool = False
    kernels: int = 0
    first_ns: int = 0
    unanswered: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    written: tuple[str, str] = ("", "")
    again_at: float = 0.0
    ended_at: float = 0.0
    over: bool = False
    due: float = 0.0
    put_off_at: float = math.inf
    last: tuple[str, str] | None = None
    _over_share: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """What no other process has."""
        return key_of(self.target)

    @property
    def state(self) -> tuple[str, str]:
        """State and reason, for people."""
        if self.last is not None:
            return self.last
        if self.failure:
            return "failed", self.failure
        if self.program is None:
            return "waiting", "the helper is being put into the process"
        collector = self.program.collector
        state, reason = str(collector.state), collector.reason
        return state, reason

    @property
    def may_have(self) -> bool:
        """Whether operations may have come, or may yet: a program without the helper has none."""
        return self.program is not None and (self.was_on or self.program.collector.armed)

    @property
    def owner(self) -> Owner:
        """Whose it is, as its job has it."""
        return self.target.identity.owner if self.job is None else self.job.owner

    @property
    def early(self) -> bool:
        """Whether operations of it have come though it is no rank yet."""
        return self.member is None and self.program is not None and any(len(each.gpu) for each in self.program.batches)

    @property
    def has_ended(self) -> bool:
        """Whether it is no rank any more."""
        return self.ended_at > 0 or (self.member is not None and self.member.state != "traced")

    @property
    def collects(self) -> bool:
        """Whether records of it may come."""
        return self.program is not None and not self.over

    @property
    def timed(self) -> bool:
        """Whether its records are taken, or may be."""
        return self.program is not None and not self.over and self.program.collector.armed

    @property
    def held(self) -> int:
        """Operations that are kept of it, for windows or for steps, and all else that is, in operations."""
        operations, *others = self._held()
        return operations + sum(others) // OP_BYTES

    def _held(self) -> list[int]:
        """Operations, and bytes of what ``keep`` names after them."""
        operations = max(self.usage.size, self.steps.size, self.waiting)
        others = [self.flops.nbytes, self.unanswered.nbytes]
        if self.program is not None:
            kept = self.program.correlator.kept
            others += [self.program.nbytes, *(size * number for size, number in zip(KEPT_BYTES, kept, strict=True))]
        return [operations, *others]

    def keep(self, most: int) -> int:
        """Keeps no more than so many operations for windows and for steps, and of all else that counts as such: where
        one of these takes little it is all kept, and the others share the rest. Calls that came long ago have what is
        left then: their operations have come. Returns for how many operations there is room: so many may wait to be
        summed up."""
        operations, *others = self._held()
        if self.program is not None:
            others[_CALLS - 1] = KEPT_BYTES[1] * self.program.correlator.young_calls
        wanted = [operations, *(-(-nbytes // OP_BYTES) for nbytes in others)]
        given = max_min(wanted, [1.0] * len(wanted), most)
        if self.program is not None:
            given[_CALLS] += most - sum(given)
        room, *rooms = given
        self.usage.keep(room)
        self.steps.keep(room)
        flops, unanswered, *of_program = (OP_BYTES * each for each in rooms)
        self.flops.keep(flops)
        left = min(unanswered // self.unanswered.itemsize, len(self.unanswered))
        self._over_share += len(self.unanswered) - left
        self.unanswered = self.unanswered[len(self.unanswered) - left :].copy()
        if self.program is not None:
            batches, *correlated = of_program
            waiting, calls, probed = (room // size for room, size in zip(correlated, KEPT_BYTES, strict=True))
            self._over_share += self.program.keep(batches) + self.program.correlator.keep(waiting, calls, probed)
        return room

    def take_over_share(self) -> int:
        """Operations, and records about them, that were dropped since the last call, as there was no room for them."""
        dropped = max(self.usage.over_share, self.steps.over_share) + self._over_share
        self.usage.over_share = self.steps.over_share = self._over_share = 0
        if self.program is not None:
            dropped += self.program.correlator.without_call
            self.program.correlator.without_call = 0
        return dropped

    def has_last_steps(self, now: float) -> bool:
        """Whether no step of it is expected any more, once it has ended."""
        if self.job is None:
            return now > self.ended_at + LINGER_S
        return self.job.finished or now > max(self.ended_at, self.job.over_since) + LAST_STEPS_S

    def drop_records(self) -> None:
        """Keeps of a process that is over, or failed, only what is reported of it."""
        self.last = self.state
        self.program = self.injection = None
        if self.over:
            self.usage, self.steps, self.flops = _NONE
            self.waiting = 0
            self.windows = deque([np.concatenate(self.windows)] if self.windows else [], 1)
        else:
            self.usage, self.steps, self.flops = GpuUsage(MOST_OPS), GpuSteps(MOST_OPS), GpuFlops()
        self.unanswered = self.unanswered[:0].copy()


_NONE = GpuUsage(0), GpuSteps(0), GpuFlops()
"""Of all processes that are over: nothing is fed to them any more, and they are many."""


def key_of(target: Target) -> tuple[int, int]:
    """What no other process has: PIDs are used again."""
    return target.pid, target.start_ticks


def mapped_now(pid: int) -> bytes:
    """``targets.mapped_pages``; empty: the process has ended."""
    try:
        return mapped_pages(pid)
    except OSError:
        return b""
