"""CUPTI in one process, seen from outside: finds the helper's memory, switches CUPTI on and off, takes what comes.

Nothing here waits: ``poll`` looks, does what can be done, and returns. A command is written into the shared memory and
the helper woken; a later ``poll`` sees its answer. The process may be stopped, end, replace itself, or write nonsense
into the memory at any moment; none of this is an error of Argus, and each has words of its own in ``text``.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import os
import select
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from argus.capture.process import cupti
from argus.capture.process.targets import PROC, mapped_pages, numbers_of
from argus.capture.reader import reader
from argus.cupti import MINIMUM_SHARE, layouts, shared
from argus.cupti.buffers import Buffers, Damaged
from argus.cupti.decode import REJECTIONS, Batch
from argus.cupti.shared import Command, SlotState, State
from argus.model.errors import ArgusError
from argus.model.losses import Owner

LOOK_S = 1.0
"""Between looks for a helper, and for whether the process still maps it."""
LOOK_LATER_S = 5.0
"""Between looks once ``LOOK_OFTEN`` were in vain: a large process's list of mappings takes milliseconds to read."""
LOOK_ANYWAY = 10
"""Every so often the mappings are read though the process has mapped as much as before."""
LOOK_OFTEN = 60
ANSWER_S = 5.0
"""A helper that has not answered for so long is reported as silent. It is waited for all the same."""
AGAIN_S = 30.0
"""Between tries to have CUPTI while another profiler holds it."""
DRAIN_S = 2.0
"""For buffers that the helper has still to walk after CUPTI was switched off."""

_NOT_ARMED = "the process is not armed"
_SILENT = "the helper does not answer (process stopped?)"

PERIOD_MS = 20_000
"""CUPTI records at the begin of every so many milliseconds, where it does so for a share of the time."""
MINIMUM_ON_MS = round(MINIMUM_SHARE * PERIOD_MS)

CALLBACK_NS, CALLBACK_SHARE = 2_000, 0.001
"""What a process's word on the time in CUPTI's callbacks is believed up to: so much for a record that was taken (they
take 50 to 100 ns where they walk a buffer), and this share of the time (a flush of an idle GPU takes some 20 us)."""

MULTIPLE_SUBSCRIBERS = 39
"""CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED."""
_MAX_COUNT = 2**62
_LOCKS_BYTES = 1 << 16
"""Of /proc/locks: the kernel walks all that come before for each 4 KiB."""


class CollectorState(str, enum.Enum):
    """What ``Collector.state`` may be. Equal to its text."""

    WAITING = "waiting"
    ON = "on"
    OFF = "off"
    IGNORED = "ignored"
    FAILED = "failed"

    __str__ = str.__str__


@dataclass(frozen=True)
class CuptiOptions:
    """How to collect.

    Attributes:
        buffers: Buffers in a process, at most ``shared.MAX_SLOTS``.
        buffer_bytes: Size of one, a multiple of 16384.
        flush_ms: How often CUPTI is asked for buffers that are not full.
        api: Record the calls that launch, which record when and by which thread.
        markers: Record NVTX ranges.
        walks_outside: Buffers are walked and names read by Argus, not in the process.
        share: Share of the time in which CUPTI records, from ``MINIMUM_SHARE`` to 1: so is its cost.
    """

    # A profiler that comes while CUPTI is on loses what goes into buffers that are lent by then: small ones.
    buffers: int = 128
    buffer_bytes: int = 1 << 18
    flush_ms: int = 1000
    api: bool = True
    markers: bool = False
    walks_outside: bool = True
    share: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.buffers <= shared.MAX_SLOTS:
            raise ValueError(f"{self.buffers} buffers: must be 1 to {shared.MAX_SLOTS}")
        if self.buffer_bytes < 16384 or self.buffer_bytes % 16384:
            raise ValueError(f"buffers of {self.buffer_bytes} bytes: must be a multiple of 16384")
        if not MINIMUM_SHARE <= self.share <= 1:
            raise ValueError(f"a share of {self.share}: must be {MINIMUM_SHARE} to 1")

    @property
    def on_ms(self) -> int:
        """How long it records in every ``PERIOD_MS``, in whole seconds, from the first one on."""
        return max(MINIMUM_ON_MS, round(self.share * PERIOD_MS / 1000) * 1000)

    def records_whole(self, start_ns: NDArray[np.int64], duration_ns: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which windows of CLOCK_MONOTONIC were recorded from end to end. Shapes (n,)."""
        if self.share == 1:
            return np.ones(len(start_ns), bool)
        phase_ns = start_ns % (PERIOD_MS * 1_000_000)
        # The first second is incomplete: what was launched before it is not recorded.
        whole: NDArray[np.bool_] = (phase_ns >= 1_000_000_000) & (phase_ns + duration_ns <= self.on_ms * 1_000_000)
        return whole


class _Step(enum.Enum):
    LOOKING = enum.auto()
    ASKING = enum.auto()  # a command is on its way, on the way to ON
    ON = enum.auto()
    TAKEN = enum.auto()  # another profiler holds CUPTI
    STOPPING = enum.auto()
    DRAINING = enum.auto()
    RELEASING = enum.auto()
    IDLE = enum.auto()  # off, ignored or failed for good
    DONE = enum.auto()


class Collector:
    """CUPTI in one process. Made for any process, armed or not.

    Args:
        pid: The process.
        options: How to collect.
        owner: Whose it is; None: it is asked for when names first take room.

    Attributes:
        state: ``CollectorState``.
        reason: Why, in words; may be empty.
        buffers: Where records come from; counts them.
        library: The CUPTI that the process uses; empty: not known yet.
        armed: The helper was found in it.
        takes: Whether ``poll`` takes buffers; they are left as they are meanwhile, also after the process has ended.
        from_the_start: The process waited for CUPTI before its first CUDA call (`argus run`).
    """

    def __init__(self, pid: int, options: CuptiOptions | None = None, owner: Owner | None = None) -> None:
        self.pid = pid
        self.options = options or CuptiOptions()
        self.state = CollectorState.WAITING
        self.reason = _NOT_ARMED
        self.library = ""
        self.from_the_start = False
        self.armed = False
        self.takes = True
        self.buffers = Buffers(pid, owner)
        self._step = _Step.LOOKING
        self._fd = -1
        self._pidfd = -1
        self._range = ""
        self._memory: shared.Memory | None = None
        self._looks = 0
        self._pages = b""
        """How much the process had mapped when the helper was not in it; empty: it was, or nobody has looked."""
        self._next_look = 0.0
        self._next_check = 0.0
        self._command: Command | None = None
        self._sequence = 0
        self._deadline = 0.0
        self._silent: tuple[CollectorState, str] | None = None  # what was true before the helper fell silent
        self._base: dict[str, int] = {}
        self._last: dict[str, int] = {}
        self._interruptions = 0
        self._refused_kinds = 0
        self._again_at = 0.0

    @classmethod
    def find(cls, pid: int, options: CuptiOptions | None = None) -> Collector | None:
        """A collector for a process that is armed; None: it is not."""
        collector = cls(pid, options)
        try:
            return collector if cupti.helper_mapping(pid) else None
        except OSError:
            return None

    # ---- what others see ----

    @property
    def names(self) -> list[str]:
        """Texts by id; the first is empty. Ids in a batch are always below its length."""
        return self.buffers.names

    @property
    def records(self) -> int:
        """Records taken."""
        return self.buffers.records

    @property
    def text(self) -> str:
        """State and reason in one line."""
        return f"{self.state.value}: {self.reason}" if self.reason else self.state.value

    @property
    def due(self) -> float:
        """When ``poll`` has something to do, on the clock of ``time.monotonic``."""
        if self._step in (_Step.IDLE, _Step.DONE):
            return float("inf")
        return self._next_look if self._memory is None else 0.0

    @property
    def stopped(self) -> bool:
        """Nothing more will come."""
        return self._step is _Step.DONE

    def counters(self) -> dict[str, tuple[int, bool]]:
        """What was counted since Argus came: value, and whether it is a loss."""
        self._count()
        seen = {name: self._difference(name) for name in _COUNTED}
        counters = {
            "cupti_records": (self.buffers.records, False),
            "cupti_buffers": (seen["completed"], False),
            "cupti_buffers_refused": (seen["refused"], True),
            "cupti_buffers_of_others": (seen["strangers"], False),
            "cupti_records_dropped": (seen["cupti_dropped"], True),
            "cupti_bytes_unknown": (min(seen["unknown_bytes"] + self.buffers.unknown_bytes, _MAX_COUNT), True),
            "cupti_names_lost": (min(seen["names_lost"] + self.buffers.names_unread, _MAX_COUNT), True),
            "cupti_interruptions": (self._interruptions, True),
            "cupti_buffers_unfinished": (self.buffers.unfinished_buffers, self.buffers.unfinished > 0),
            "cupti_records_salvaged": (self.buffers.salvaged, False),
            "cupti_records_unfinished": (self.buffers.unfinished, True),
            "cupti_flushes": (seen["flushes"], False),
            "cupti_callback_ns": (min(seen["callback_ns"], self._most_callback_ns()), False),
            "cupti_walk_ns": (seen["walk_ns"], False),
            "cupti_kinds_refused": (self._refused_kinds, True),
        }
        for reason in REJECTIONS:
            counters[f"cupti_rejected_{reason}"] = (self.buffers.rejected[reason], True)
        return counters

    def _most_callback_ns(self) -> int:
        """What CUPTI's callbacks may have taken: the process writes the sum itself, and what observing costs is reduced
        for everybody where it is too much."""
        since_ns = max(time.monotonic_ns() - self.buffers.since_ns, 0)
        return CALLBACK_NS * self.buffers.records + int(CALLBACK_SHARE * since_ns)

    def poll(self, now: float) -> list[Batch]:
        """Looks, and takes what is there. To be called every 20 ms or so; never blocks.

        Args:
            now: ``time.monotonic()``.

        Returns:
            One batch for each buffer, oldest first.
        """
        if self._step in (_Step.IDLE, _Step.DONE):
            return []
        batches: list[Batch] = []
        try:
            self._advance(now, batches)
        except Damaged as reason:
            self._interruptions += self.buffers.geometry[0] > 0
            self._rest(CollectorState.FAILED, f"the shared memory is damaged ({reason})")
        return batches

    def begin_stop(self) -> None:
        """Switches CUPTI off. ``poll`` has to be called on, until ``stopped``."""
        if self._memory is None or self._step in (_Step.IDLE, _Step.LOOKING):
            self._step = _Step.DONE
            self.close()
        elif self._step in (_Step.ASKING, _Step.ON, _Step.TAKEN):
            self._send(Command.STOP, time.monotonic())
            self._step = _Step.STOPPING

    def stop(self, timeout_s: float = 15.0) -> list[Batch]:
        """Switches CUPTI off, waits until it is, and returns the last batches."""
        deadline = time.monotonic() + timeout_s
        self.begin_stop()
        batches: list[Batch] = []
        while not self.stopped and time.monotonic() < deadline:
            batches += self.poll(time.monotonic())
            time.sleep(0.005)
        self.close()
        return batches

    def close(self) -> None:
        """Lets go of the memory. A helper that is still on notices that nobody reads, and switches itself off."""
        self._count()
        self._memory = None
        for fd in (self._fd, self._pidfd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._pidfd = -1
        self.buffers.close()
        self._step = _Step.DONE

    def abandon(self) -> None:
        """Lets go of the memory, whatever is left in it: that is counted."""
        if self._memory is not None and self.buffers.geometry[0]:
            self.buffers.count_left(self._memory)
        self.close()

    # ---- the course of things ----

    def _advance(self, now: float, batches: list[Batch]) -> None:
        if self._memory is None:
            if now >= self._next_look:
                self._looks += 1
                self._next_look = now + (LOOK_S if self._looks < LOOK_OFTEN else LOOK_LATER_S)
                self._look(now)
            return
        memory = self._memory
        self.beat()
        gone = self._gone(now)
        self._check(memory)
        if self._command is not None:
            if memory.load("done_seq") == self._sequence:
                memory.fence()
                # The answer to a probe can be understood once cupti-python is there; its import takes a while.
                if self._command is not Command.PROBE or layouts.load_ahead():
                    self._answered(now)
            elif now > self._deadline:
                self._wait_in_vain()
        if self._memory is None:
            return
        memory = self._memory  # answers map more of it
        if self.buffers.geometry[0] and not gone and self.takes:
            self.buffers.take(memory, batches)
        if gone:
            if self.takes:
                self._take_left(gone, batches)
        elif self._step is _Step.ON and memory.load("state") == State.IGNORED:
            # A profiler of the program's own took it over.
            self._interruptions += 1
            self._taken(now)
        elif self._step is _Step.TAKEN and self._command is None and now >= self._again_at:
            self._send(Command.START, now)
        elif self._step is _Step.ON and memory.load("state") in (State.OFF, State.DORMANT, State.PROBED):
            # Argus was stopped for longer than the helper waits for it.
            self._interruptions += 1
            self._step = _Step.ASKING
            self._set_state(CollectorState.WAITING, "CUPTI is being switched on again")
            self._send(Command.PROBE, now)
        elif self._step is _Step.DRAINING:
            left = memory.slot_states[: self.buffers.geometry[0]]
            if not ((left == SlotState.READY) | (left == SlotState.FULL)).any() or now > self._deadline:
                self.buffers.unfinished_buffers += int(np.count_nonzero(left == SlotState.FULL))
                self.buffers.count_kept(memory)
                self._step = _Step.RELEASING
                self._send(Command.RELEASE, now)

    def beat(self) -> None:
        """Lets the helper know that Argus lives. Any thread may."""
        if (memory := self._memory) is not None:
            memory.store("heartbeat", (memory.load("heartbeat") + 1) & 0xFFFFFFFF)

    def _take_left(self, gone: str, batches: list[Batch]) -> None:
        """Takes what a process has left that is gone, in words."""
        memory = self._memory
        assert memory is not None
        if not self.buffers.geometry[0] and memory.load("slots") and self.buffers.layouts is not None:
            self._memory = memory = self._map(memory)  # it was switched on, and ended before that was seen
        self.buffers.take_left(memory, batches)
        if self.state in (CollectorState.IGNORED, CollectorState.FAILED) and self.reason != _SILENT:
            self._finish(self.state, self.reason)  # which is what there is to know of it
        else:
            self._finish(CollectorState.OFF, gone)

    def _look(self, now: float) -> None:
        """Finds the helper's memory, opens and locks it."""
        try:
            pages = mapped_pages(self.pid)
            if pages == self._pages and self._looks % LOOK_ANYWAY:
                return
            mapping, place = cupti.open_helper(self.pid)
            self._pages = b"" if mapping else pages
            if not mapping:
                self._set_state(CollectorState.WAITING, _NOT_ARMED)
                return
        except OSError as reason:
            if reason.errno == errno.EPERM:  # of map_files alone
                self._set_state(CollectorState.FAILED, f"cannot open the helper's memory: {os.strerror(errno.EPERM)}")
            else:
                self._set_state(CollectorState.WAITING, _NOT_ARMED)
            return
        fd = pidfd = -1
        try:
            pidfd = os.pidfd_open(self.pid)
            fd = cupti.open_memory(place)
            if os.fstat(fd).st_size < shared.HEAD_BYTES:
                raise Damaged("too short")
            if not _sealed(fd):
                raise Damaged("it could be cut under Argus: the helper did not seal it (an older one? start it again)")
            memory = shared.Memory(fd)
            if memory.load("magic") == 0:
                self._set_state(CollectorState.WAITING, _NOT_ARMED)  # not yet: a moment later
                return
            if memory.load("magic") != shared.MAGIC or memory.load("head_bytes") != shared.HEAD_BYTES:
                raise Damaged("it is of another version of Argus")
            if memory.load("pid") not in numbers_of(self.pid):
                # Inherited: CUDA does not work in a forked child, nor does the helper.
                self._set_state(CollectorState.WAITING, f"{_NOT_ARMED} (its parent was)")
                return
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _lock_holder(fd)
                other = f"another Argus (PID {holder})" if holder else "another Argus"
                self._set_state(CollectorState.IGNORED, f"{other} traces it")
                return
            self._fd, self._pidfd, self._range = fd, pidfd, mapping
            fd = pidfd = -1
        except OSError as reason:
            why = os.strerror(reason.errno or 0)
            self._set_state(CollectorState.FAILED, f"cannot open the helper's memory: {why}")
            return
        finally:
            for opened in (fd, pidfd, place):
                if opened >= 0:
                    os.close(opened)
        self.armed = True
        self._memory = memory
        self._base = {name: memory.load(name) for name in _COUNTED}
        self.buffers.since_ns = time.monotonic_ns()
        self._next_check = now + LOOK_S
        memory.store("heartbeat", (memory.load("heartbeat") + 1) & 0xFFFFFFFF)
        layouts.load_ahead()
        if self.options.walks_outside:
            self.buffers.walk_outside()
        self._step = _Step.ASKING
        self._set_state(CollectorState.WAITING, "CUPTI is being switched on")
        if memory.load("state") == State.ON:
            # An Argus was killed a moment ago.
            self._send(Command.STOP, now)
        elif (memory.slot_states >= SlotState.FULL).any():
            # Or some time ago: what it left behind is not of this session.
            self._send(Command.RELEASE, now)
        else:
            self._probe(memory, now)

    def _probe(self, memory: shared.Memory, now: float) -> None:
        memory.store_text("candidates", candidate_lines(cupti.candidates(self.pid)))
        self._send(Command.PROBE, now)

    def _send(self, command: Command, now: float) -> None:
        memory = self._memory
        assert memory is not None
        self._sequence = (memory.load("command_seq") + 1) & 0xFFFFFFFF
        self._command = command
        self._deadline = now + ANSWER_S
        memory.store("command", command)
        memory.fence()
        memory.store("command_seq", self._sequence)
        memory.fence()
        memory.wake("command_seq")

    def _answered(self, now: float) -> None:
        """The helper has obeyed."""
        memory, command = self._memory, self._command
        assert memory is not None
        self._command = None
        if self._silent is not None:
            self.state, self.reason = self._silent
            self._silent = None
        state = memory.load("state")
        if self._step is _Step.STOPPING:
            ended = memory.load("state") == State.ENDED
            if self.state is not CollectorState.IGNORED:
                self._set_state(CollectorState.OFF, "the process ended" if ended else "")
            if not self.buffers.geometry[0] and memory.load("slots") and self.buffers.layouts is not None:
                self._memory = self._map(memory)  # it was on its way to be switched on
            self._step = _Step.DRAINING
            self._deadline = now + DRAIN_S
        elif self._step is _Step.RELEASING:
            self._finish(self.state, self.reason)
        elif command is Command.STOP:
            self._send(Command.RELEASE, now)
        elif command is Command.RELEASE:
            self._probe(memory, now)
        elif command is Command.PROBE:
            self._probed(memory, state, now)
        elif state == State.ON:
            self._started(memory)
        else:
            self._refused(memory, state, now)

    def _probed(self, memory: shared.Memory, state: int, now: float) -> None:
        version = memory.load("cupti_version")
        if state not in (State.PROBED, State.ON) or not version:
            self._refused(memory, state, now)
            return
        self.library = memory.text("library")
        try:
            known = layouts.for_version(version)
        except ArgusError as reason:
            self._rest(CollectorState.OFF, str(reason))
            return
        self.buffers.layouts = known
        options, control = self.options, memory.control
        api = options.api and known.chooses_calls
        _put(memory, "kinds", "kinds_count", known.kinds(options.api, options.markers))
        _put(memory, "runtime_calls", "runtime_calls_count", known.runtime_calls() if api else [])
        _put(memory, "driver_calls", "driver_calls_count", known.driver_calls() if api else [])
        attributes = known.attributes()
        control["attributes"][: len(attributes)] = attributes
        memory.store("attributes_count", len(attributes))
        control["layouts"][:] = known.table()
        memory.store("want_slots", options.buffers)
        memory.store("want_buffer_bytes", options.buffer_bytes)
        memory.store("flush_ms", options.flush_ms)
        memory.store("walks_outside", self.buffers.walk is not None)
        memory.store("on_ms", options.on_ms)
        memory.store("period_ms", PERIOD_MS if options.share < 1 else 0)
        self.from_the_start = bool(memory.load("holding"))
        self._send(Command.START, now)

    def _map(self, memory: shared.Memory) -> shared.Memory:
        """With its buffers, of twice what was asked for, or is by default: an Argus before may have asked."""
        asked = self.options, CuptiOptions()
        most = 2 * max(options.buffers * options.buffer_bytes for options in asked)
        return self.buffers.map(self._fd, memory, most, 2 * max(options.buffer_bytes for options in asked))

    def _started(self, memory: shared.Memory) -> None:
        self._memory = self._map(memory)
        self._step = _Step.ON
        self._set_on(memory)

    def set_share(self, share: float) -> None:
        """Records for this share of the time from now on: ``CuptiOptions.share``."""
        self.options = replace(self.options, share=share)
        if self._memory is not None:
            self._memory.store("on_ms", self.options.on_ms)
            self._memory.store("period_ms", PERIOD_MS if share < 1 else 0)
            if self._step is _Step.ON:
                self._set_on(self._memory)

    def _set_on(self, memory: shared.Memory) -> None:
        refused = memory.load("refused_kinds")
        kinds = [kind for kind in range(shared.MAX_KINDS) if refused >> kind & 1]
        self._refused_kinds = len(kinds)
        names = [self.buffers.layouts.kind_name(kind) for kind in kinds] if self.buffers.layouts is not None else []
        notes = [f"{self.options.on_ms // 1000} of every {PERIOD_MS // 1000} s"] if self.options.share < 1 else []
        notes += [f"without {', '.join(names)}, which CUPTI refused"] if names else []
        self._set_state(CollectorState.ON, "; ".join(notes))

    def _refused(self, memory: shared.Memory, state: int, now: float) -> None:
        reason, result = memory.text("reason"), memory.load("cupti_result")
        if state == State.IGNORED or result == MULTIPLE_SUBSCRIBERS:
            self._taken(now)
        elif state == State.ENDED and memory.load("slots") and self.buffers.layouts is not None:
            # It was on for a moment: what it left is taken once it is gone.
            self._memory = self._map(memory)
            self._step = _Step.ON
        elif state == State.ENDED:
            self._rest(CollectorState.OFF, "the process ended")
        else:
            self._rest(CollectorState.FAILED, reason or f"CUPTI could not be switched on (error {result})")

    def _taken(self, now: float) -> None:
        """Another profiler holds CUPTI. It may let go of it later: torch.profiler traces a few steps."""
        torch = any("/libtorch" in path for path in cupti.mapped_paths(self.pid))
        holder = "torch.profiler" if torch else "another profiler (nsys, ncu, …)"
        self._set_state(CollectorState.IGNORED, f"{holder} holds CUPTI")
        self._step = _Step.TAKEN
        self._again_at = now + AGAIN_S

    def _wait_in_vain(self) -> None:
        if self._step is _Step.RELEASING:
            self._finish(self.state, self.reason)
        elif self._step is _Step.STOPPING:
            # Whatever it is busy with: without a heartbeat it switches itself off.
            self._interruptions += 1
            self._finish(CollectorState.FAILED, _SILENT)
        elif self._silent is None:
            self._silent = (self.state, self.reason)
            self._set_state(CollectorState.FAILED, _SILENT)

    def _gone(self, now: float) -> str:
        """Why there is no helper any more; empty: there is."""
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        if ended.poll(0):
            return "the process ended"
        if now < self._next_check:
            return ""
        self._next_check = now + LOOK_S
        for where in (self._range, ""):
            try:
                mapping, place = cupti.open_helper(self.pid, where)
            except reader.Unreadable:
                return ""  # not known now; a helper that is gone is detected by its silence
            except OSError:
                continue
            if mapping and _same_file(place, self._fd):
                self._range = mapping
                return ""
        return "the process ended" if ended.poll(0) else "the process runs another program now (exec)"

    def _check(self, memory: shared.Memory) -> None:
        if memory.load("magic") != shared.MAGIC:
            raise Damaged("no magic number")
        if not State.DORMANT <= memory.load("state") <= State.ENDED:
            raise Damaged(f"no state {memory.load('state')}")
        if self.buffers.geometry[0] and (memory.load("slots"), memory.load("buffer_bytes")) != self.buffers.geometry:
            raise Damaged("its buffers changed")

    # ---- small things ----

    def _set_state(self, state: CollectorState, reason: str) -> None:
        self.state, self.reason = state, reason

    def _rest(self, state: CollectorState, reason: str) -> None:
        """Nothing more can be done for this process."""
        self._finish(state, reason)
        self._step = _Step.IDLE

    def _finish(self, state: CollectorState, reason: str) -> None:
        self._command = None
        self._silent = None
        self._set_state(state, reason)
        self.close()

    def _count(self) -> None:
        if self._memory is not None:
            self._last = {name: self._memory.load(name) for name in _COUNTED}

    def _difference(self, name: str) -> int:
        """What a counter of the helper grew by since Argus came; nonsense becomes something that can be stored."""
        return min(max(self._last.get(name, 0) - self._base.get(name, 0), 0), _MAX_COUNT)


_COUNTED = (
    "completed",
    "refused",
    "strangers",
    "cupti_dropped",
    "unknown_bytes",
    "names_lost",
    "flushes",
    "callback_ns",
    "walk_ns",
)


def _same_file(place: int, fd: int) -> bool:
    """Whether an O_PATH descriptor, which is closed, leads to the file in memory that another one has open."""
    try:
        return cupti.is_memory(place) and os.path.samestat(os.fstat(place), os.fstat(fd))
    finally:
        os.close(place)


def _sealed(fd: int) -> bool:
    """Whether the file never becomes shorter: to read what was cut off would kill Argus (SIGBUS)."""
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False


def _lock_holder(fd: int) -> int:
    """Who holds the lock on a file; 0: not known. Anybody may have made any number of locks: few are looked at."""
    status = os.fstat(fd)
    where = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        with open(PROC / "locks", "rb") as file:
            lines = file.read(_LOCKS_BYTES).decode(errors="replace").split("\n")
    except OSError:
        return 0
    for line in lines:
        fields = line.split()
        if "FLOCK" in fields[1:2] and len(fields) > 5 and fields[5] == where:
            return int(fields[4]) if fields[4].isdigit() else 0
    return 0


def _put(memory: shared.Memory, name: str, count: str, values: Iterable[int]) -> None:
    chosen = list(values)
    memory.control[name][: len(chosen)] = chosen
    memory.store(count, len(chosen))


# ---- where CUPTI may be ----


def candidate_lines(paths: Iterable[str]) -> bytes:
    """As the helper wants them: one a line, as many as fit."""
    lines = b""
    for path in paths:
        line = os.fsencode(path)
        if b"\n" not in line and len(lines) + len(line) + 2 <= shared.CANDIDATES_BYTES:
            lines += line + b"\n"
    return lines
