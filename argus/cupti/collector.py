"""CUPTI in one process, seen from outside: finds the helper's memory, switches CUPTI on and off, takes what comes.

Nothing here waits: ``poll`` looks, does what can be done, and returns. A command is written into the shared memory and
the helper woken; a later ``poll`` sees its answer. The process may be stopped, end, replace itself, or write nonsense
into the memory at any moment; none of this is an error of Argus, and each has words of its own in ``text``.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import fcntl
import fnmatch
import os
import re
import select
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from argus.capture.mapped import names_in_root, open_root
from argus.capture.targets import PROC, mapped_pages
from argus.cupti import MINIMUM_SHARE, build, layouts, shared
from argus.cupti.decode import REJECTIONS, Batch, decode
from argus.cupti.shared import Command, SlotState, State
from argus.errors import ArgusError

LOOK_S = 1.0
"""Between looks for a helper, and for whether the process still maps it."""
LOOK_LATER_S = 5.0
"""Between looks once ``LOOK_OFTEN`` were in vain: a large process's list of mappings takes milliseconds to read."""
LOOK_ANYWAY = 10
"""Every so often the mappings are read though the process has mapped as much as before."""
LOOK_OFTEN = 60
ANSWER_S = 5.0
"""A helper that has not answered for so long is said to be silent. It is waited for all the same."""
AGAIN_S = 30.0
"""Between tries to have CUPTI while another profiler holds it."""
DRAIN_S = 2.0
"""For buffers that the helper has still to walk after CUPTI was switched off."""

_NOT_ARMED = "the process is not armed"
_SILENT = "the helper does not answer (process stopped?)"

PERIOD_MS = 20_000
"""CUPTI records at the begin of every so many milliseconds, where it does so for a share of the time."""
MINIMUM_ON_MS = round(MINIMUM_SHARE * PERIOD_MS)

MULTIPLE_SUBSCRIBERS = 39
"""CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED."""
_DRIVER_OF_CUDA_13 = 580
_MAX_NAME_BYTES = 1 << 16
_MAX_TEXT_BYTES = 4096
MAX_NAMES = 1 << 17
"""Names of a process that are known at most, 20 MB: further ones are lost, and counted. And where they lay: that is
looked up anew. A program that makes kernels as it runs never stops making others."""
_PAGE_BYTES = 4096
_MAX_COUNT = 2**62


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
        api: Record the calls that launch, which say when and by which thread.
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


class _Damaged(Exception):
    """The shared memory says what cannot be."""


class Collector:
    """CUPTI in one process. Made for any process, armed or not.

    Args:
        pid: The process.
        options: How to collect.

    Attributes:
        state: ``CollectorState``.
        reason: Why, in words; may be empty.
        names: Texts by id; ``names[0]`` is empty. Ids in a batch are always below its length.
        records: Records taken.
        library: The CUPTI that the process uses; empty: not known yet.
        armed: The helper was found in it.
        from_the_start: The process waited for CUPTI before its first CUDA call (`argus run`).
    """

    def __init__(self, pid: int, options: CuptiOptions | None = None) -> None:
        self.pid = pid
        self.options = options or CuptiOptions()
        self.state = CollectorState.WAITING
        self.reason = _NOT_ARMED
        self.names: list[str] = [""]
        self.records = 0
        self.library = ""
        self.from_the_start = False
        self.armed = False
        self._step = _Step.LOOKING
        self._fd = -1
        self._pidfd = -1
        self._range = ""
        self._memory: shared.Memory | None = None
        self._layouts: layouts.Layouts | None = None
        self._geometry = (0, 0)
        self._since_ns = time.monotonic_ns()
        self._looks = 0
        self._pages = b""
        """How much the process had mapped when the helper was not in it; empty: it was, or nobody has looked."""
        self._next_look = 0.0
        self._next_check = 0.0
        self._command: Command | None = None
        self._sequence = 0
        self._deadline = 0.0
        self._silent: tuple[CollectorState, str] | None = None  # what was true before the helper fell silent
        self._names_read = 0
        self._places = {"": 0}
        self._pointers: dict[int, int] = {}
        self._helper_ids: list[int] = [0]  # the helper's id of a name -> its place in ``names``
        self._texts: Texts | None = None
        self._copy = np.empty(0, np.uint8)
        self._walk: Callable[[NDArray[np.uint8], NDArray[np.void]], tuple[NDArray[np.uint32], int]] | None = None
        self._claim: Callable[[int], int] | None = None
        self._looked_up = np.empty(0, np.uint64)  # pointers whose text is known for this flush, in order
        self._flushes = -1
        self._names_unread = 0
        self._base: dict[str, int] = {}
        self._last: dict[str, int] = {}
        self._rejected: Counter[str] = Counter()
        self._unfinished_buffers = 0
        self._unfinished = 0
        self._salvaged = 0
        self._unknown_bytes = 0
        self._interruptions = 0
        self._refused_kinds = 0
        self._again_at = 0.0

    @classmethod
    def find(cls, pid: int, options: CuptiOptions | None = None) -> Collector | None:
        """A collector for a process that is armed; None: it is not."""
        collector = cls(pid, options)
        try:
            return collector if _mapping(pid) else None
        except OSError:
            return None

    # ---- what others see ----

    @property
    def text(self) -> str:
        """State and reason in one line."""
        return f"{self.state.value}: {self.reason}" if self.reason else self.state.value

    @property
    def due(self) -> float:
        """When ``poll`` has something to do, as ``time.monotonic`` tells it."""
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
            "cupti_records": (self.records, False),
            "cupti_buffers": (seen["completed"], False),
            "cupti_buffers_refused": (seen["refused"], True),
            "cupti_buffers_of_others": (seen["strangers"], False),
            "cupti_records_dropped": (seen["cupti_dropped"], True),
            "cupti_bytes_unknown": (min(seen["unknown_bytes"] + self._unknown_bytes, _MAX_COUNT), True),
            "cupti_names_lost": (seen["names_lost"] + self._names_unread, True),
            "cupti_interruptions": (self._interruptions, True),
            "cupti_buffers_unfinished": (self._unfinished_buffers, self._unfinished > 0),
            "cupti_records_salvaged": (self._salvaged, False),
            "cupti_records_unfinished": (self._unfinished, True),
            "cupti_flushes": (seen["flushes"], False),
            "cupti_callback_ns": (seen["callback_ns"], False),
            "cupti_walk_ns": (seen["walk_ns"], False),
            "cupti_kinds_refused": (self._refused_kinds, True),
        }
        for reason in REJECTIONS:
            counters[f"cupti_rejected_{reason}"] = (self._rejected[reason], True)
        return counters

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
        except _Damaged as reason:
            self._interruptions += self._geometry[0] > 0
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
        if self._texts is not None:
            self._texts.close()
            self._texts = None
        self._step = _Step.DONE

    # ---- the course of things ----

    def _advance(self, now: float, batches: list[Batch]) -> None:
        if self._memory is None:
            if now >= self._next_look:
                self._looks += 1
                self._next_look = now + (LOOK_S if self._looks < LOOK_OFTEN else LOOK_LATER_S)
                self._look(now)
            return
        memory = self._memory
        memory.store("heartbeat", (memory.load("heartbeat") + 1) & 0xFFFFFFFF)
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
        if self._geometry[0] and not gone:
            self._take(memory, batches)
        if gone:
            if not self._geometry[0] and memory.load("slots") and self._layouts is not None:
                self._map_buffers(memory)  # it was switched on, and ended before that was seen
                memory = self._memory
            self._bury(memory, batches)
            if self.state in (CollectorState.IGNORED, CollectorState.FAILED) and self.reason != _SILENT:
                self._finish(self.state, self.reason)  # which is what there is to know of it
            else:
                self._finish(CollectorState.OFF, gone)
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
            self._say(CollectorState.WAITING, "CUPTI is being switched on again")
            self._send(Command.PROBE, now)
        elif self._step is _Step.DRAINING:
            left = memory.slot_states[: self._geometry[0]]
            if not ((left == SlotState.READY) | (left == SlotState.FULL)).any() or now > self._deadline:
                self._unfinished_buffers += int(np.count_nonzero(left == SlotState.FULL))
                self._count_kept(memory)
                self._step = _Step.RELEASING
                self._send(Command.RELEASE, now)

    def _look(self, now: float) -> None:
        """Finds the helper's memory, opens and locks it."""
        try:
            pages = mapped_pages(self.pid)
            if pages == self._pages and self._looks % LOOK_ANYWAY:
                return
            found = _mapping(self.pid)
            self._pages = b"" if found else pages
            if not found:
                self._say(CollectorState.WAITING, _NOT_ARMED)
                return
            pidfd = os.pidfd_open(self.pid)
        except OSError:
            self._say(CollectorState.WAITING, _NOT_ARMED)
            return
        fd = -1
        try:
            fd = os.open(PROC / str(self.pid) / "map_files" / found, os.O_RDWR | os.O_CLOEXEC)
            if os.fstat(fd).st_size < shared.HEAD_BYTES:
                raise _Damaged("too short")
            if not _sealed(fd):
                raise _Damaged("it could be cut under Argus: the helper did not allow sealing")
            memory = shared.Memory(fd)
            if memory.load("magic") == 0:
                self._say(CollectorState.WAITING, _NOT_ARMED)  # not yet: a moment later
                return
            if memory.load("magic") != shared.MAGIC or memory.load("head_bytes") != shared.HEAD_BYTES:
                raise _Damaged("it is of another version of Argus")
            if memory.load("pid") not in _own_pids(self.pid):
                # Inherited: CUDA does not work in a forked child, nor does the helper.
                self._say(CollectorState.WAITING, f"{_NOT_ARMED} (its parent was)")
                return
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _lock_holder(fd)
                other = f"another Argus (PID {holder})" if holder else "another Argus"
                self._say(CollectorState.IGNORED, f"{other} traces it")
                return
            self._fd, self._pidfd, self._range = fd, pidfd, found
            fd = pidfd = -1
        except OSError as reason:
            why = os.strerror(reason.errno or 0)
            self._say(CollectorState.FAILED, f"cannot open the helper's memory: {why}")
            return
        finally:
            for opened in (fd, pidfd):
                if opened >= 0:
                    os.close(opened)
        self.armed = True
        self._memory = memory
        self._base = {name: memory.load(name) for name in _COUNTED}
        self._since_ns = time.monotonic_ns()
        self._next_check = now + LOOK_S
        memory.store("heartbeat", (memory.load("heartbeat") + 1) & 0xFFFFFFFF)
        layouts.load_ahead()
        if self.options.walks_outside:
            # Where the process's memory may not be read, or the library is missing, the helper does it.
            with contextlib.suppress(ArgusError, OSError, AttributeError):
                self._texts = Texts(self.pid)
                self._claim, self._walk = _load_claim(), _load_walk()
        self._step = _Step.ASKING
        self._say(CollectorState.WAITING, "CUPTI is being switched on")
        if memory.load("state") == State.ON:
            # An Argus was killed a moment ago.
            self._send(Command.STOP, now)
        elif (memory.slot_states >= SlotState.FULL).any():
            # Or some time ago: what it left behind is not of this session.
            self._send(Command.RELEASE, now)
        else:
            self._probe(memory, now)

    def _probe(self, memory: shared.Memory, now: float) -> None:
        memory.store_text("candidates", _candidate_lines(candidates(self.pid)))
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
                self._say(CollectorState.OFF, "the process ended" if ended else "")
            if not self._geometry[0] and memory.load("slots") and self._layouts is not None:
                self._map_buffers(memory)  # it was on its way to be switched on
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
        self._layouts = known
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
        memory.store("walks_outside", self._walk is not None)
        memory.store("on_ms", options.on_ms)
        memory.store("period_ms", PERIOD_MS if options.share < 1 else 0)
        self.from_the_start = bool(memory.load("holding"))
        self._send(Command.START, now)

    def _started(self, memory: shared.Memory) -> None:
        self._map_buffers(memory)
        self._step = _Step.ON
        self._say_on(memory)

    def set_share(self, share: float) -> None:
        """Records for this share of the time from now on: ``CuptiOptions.share``."""
        self.options = replace(self.options, share=share)
        if self._memory is not None:
            self._memory.store("on_ms", self.options.on_ms)
            self._memory.store("period_ms", PERIOD_MS if share < 1 else 0)
            if self._step is _Step.ON:
                self._say_on(self._memory)

    def _say_on(self, memory: shared.Memory) -> None:
        refused = memory.load("refused_kinds")
        kinds = [kind for kind in range(shared.MAX_KINDS) if refused >> kind & 1]
        self._refused_kinds = len(kinds)
        names = [self._layouts.kind_name(kind) for kind in kinds] if self._layouts is not None else []
        said = [f"{self.options.on_ms // 1000} of every {PERIOD_MS // 1000} s"] if self.options.share < 1 else []
        said += [f"without {', '.join(names)}, which CUPTI refused"] if names else []
        self._say(CollectorState.ON, "; ".join(said))

    def _map_buffers(self, memory: shared.Memory) -> None:
        slots, buffer_bytes = memory.load("slots"), memory.load("buffer_bytes")
        if not 0 < slots <= shared.MAX_SLOTS or buffer_bytes < 4096 or buffer_bytes % 4096:
            raise _Damaged("impossible buffers")
        total = shared.total_bytes(slots, buffer_bytes)
        if total > os.fstat(self._fd).st_size:
            raise _Damaged("shorter than its buffers")
        try:
            self._memory = shared.Memory(self._fd, total)
        except (OSError, ValueError) as reason:
            raise _Damaged(f"its buffers cannot be mapped: {reason}") from reason
        self._geometry = (slots, buffer_bytes)

    def _refused(self, memory: shared.Memory, state: int, now: float) -> None:
        reason, result = memory.text("reason"), memory.load("cupti_result")
        if state == State.IGNORED or result == MULTIPLE_SUBSCRIBERS:
            self._taken(now)
        elif state == State.ENDED and memory.load("slots") and self._layouts is not None:
            self._map_buffers(memory)  # it was on for a moment: what it left is taken once it is gone
            self._step = _Step.ON
        elif state == State.ENDED:
            self._rest(CollectorState.OFF, "the process ended")
        else:
            self._rest(CollectorState.FAILED, reason or f"CUPTI could not be switched on (error {result})")

    def _taken(self, now: float) -> None:
        """Another profiler holds CUPTI. It may let go of it later: torch.profiler traces a few steps."""
        torch = any("/libtorch" in path for path in _mapped_paths(self.pid))
        holder = "torch.profiler" if torch else "another profiler (nsys, ncu, …)"
        self._say(CollectorState.IGNORED, f"{holder} holds CUPTI")
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
            self._say(CollectorState.FAILED, _SILENT)

    def _gone(self, now: float) -> str:
        """Why there is no helper any more; empty: there is."""
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        if ended.poll(0):
            return "the process ended"
        if now < self._next_check:
            return ""
        self._next_check = now + LOOK_S
        files = PROC / str(self.pid) / "map_files"
        if _same_file(files / self._range, self._fd):
            return ""
        with contextlib.suppress(OSError):
            self._range = _mapping(self.pid) or self._range
            if _same_file(files / self._range, self._fd):
                return ""
        return "the process ended" if ended.poll(0) else "the process runs another program now (exec)"

    def _check(self, memory: shared.Memory) -> None:
        if memory.load("magic") != shared.MAGIC:
            raise _Damaged("no magic number")
        if not State.DORMANT <= memory.load("state") <= State.ENDED:
            raise _Damaged(f"no state {memory.load('state')}")
        if self._geometry[0] and (memory.load("slots"), memory.load("buffer_bytes")) != self._geometry:
            raise _Damaged("its buffers changed")

    # ---- buffers ----

    def _take(self, memory: shared.Memory, batches: list[Batch]) -> None:
        """Decodes the buffers that are ready, or full and nobody else's to walk, and gives them back."""
        slots, buffer_bytes = self._geometry
        states = memory.slot_states[:slots].copy()
        memory.fence()
        if (states > SlotState.CLAIMED).any():
            raise _Damaged("a buffer has no state")
        mine = states == SlotState.READY
        if self._walk is not None and self._layouts is not None:
            mine |= states == SlotState.FULL
        chosen = np.flatnonzero(mine)
        if not len(chosen):
            return
        # After the states: a name is in its table before a buffer that uses it is ready.
        self._read_names(memory)
        for slot in chosen[np.argsort(memory.slots["sequence"][chosen], kind="stable")].tolist():
            header = memory.slots[slot].copy()
            buffer, index = memory.buffer(slot, buffer_bytes)
            valid, count = int(header["valid"]), int(header["count"])
            if valid > buffer_bytes or count > len(index):
                raise _Damaged("a buffer holds more than fits")
            if states[slot] == SlotState.FULL:
                assert self._claim is not None
                if not self._claim(memory.slot_states[slot : slot + 1].ctypes.data):
                    continue  # the helper has it: the process is exiting
                batch = self._decode_full(memory, self._own(buffer[:valid]))
            else:
                replaced = bool(int(header["flags"]) & shared.NAMES_REPLACED)
                batch = self._decode(self._own(buffer[:valid]), index[:count].copy(), replaced)
                index[:count] = 0
            self._rejected.update(batch.rejected)
            self.records += len(batch.gpu) + len(batch.host)
            batches.append(batch)
            buffer[:valid] = 0
            memory.fence()
            memory.slot_states[slot] = SlotState.FREE

    def _own(self, buffer: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """A copy that nobody else writes to: what was checked is what is read. It is good until the next one."""
        if len(self._copy) < len(buffer):
            self._copy = np.empty(max(len(buffer), self._geometry[1]), np.uint8)
        own = self._copy[: len(buffer)]
        own[:] = buffer
        return own

    def _decode_full(self, memory: shared.Memory, buffer: NDArray[np.uint8]) -> Batch:
        """What is in a buffer that nobody has walked."""
        assert self._walk is not None
        assert self._layouts is not None
        index, lost = self._walk(buffer, self._layouts.table())
        self._unknown_bytes += lost
        flushes = memory.load("flushes")
        if flushes != self._flushes:  # CUPTI may use the memory of a name again, once all buffers with it are out
            self._flushes, self._looked_up = flushes, np.empty(0, np.uint64)
            if len(self._pointers) > MAX_NAMES:
                self._pointers.clear()
        self._look_up(buffer, index)
        return self._decode(buffer, index, False)

    def _look_up(self, buffer: NDArray[np.uint8], index: NDArray[np.uint32]) -> None:
        """Reads the names that records point at, each pointer once for a flush."""
        assert self._layouts is not None
        if not len(index) or self._texts is None:
            return
        words = buffer[: len(buffer) // 8 * 8].view("<u8")
        kinds = buffer[: len(buffer) // 4 * 4].view("<u4")[index >> 2]
        found = [np.empty(0, np.uint64)]
        for kind, offsets in self._layouts.names.items():
            at = index[kinds == kind] if offsets else index[:0]
            found += [words[place[place < len(words)]] for place in ((at + offset) >> 3 for offset in offsets)]
        pointers = np.concatenate(found)
        if len(self._looked_up):
            place = np.minimum(np.searchsorted(self._looked_up, pointers), len(self._looked_up) - 1)
            pointers = pointers[self._looked_up[place] != pointers]
        fresh = np.unique(pointers[pointers != 0])
        for pointer in fresh.tolist():
            text = self._texts.at(pointer)
            if text is None:
                self._names_unread += pointer not in self._pointers
            else:
                self._pointers[pointer] = self._named(pointer, text)
        if len(fresh):
            self._looked_up = np.union1d(self._looked_up, fresh)

    def _named(self, pointer: int, text: str) -> int:
        """The id of a name; 0: there is no room for another one."""
        known = self._pointers.get(pointer, 0)
        if known and self.names[known] == text:
            return known
        place = self._places.get(text)
        if place is not None:
            return place
        if len(self.names) >= MAX_NAMES:
            self._names_unread += pointer not in self._pointers
            return 0
        place = self._places[text] = len(self.names)
        self.names.append(text)
        return place

    def _decode(self, buffer: NDArray[np.uint8], index: NDArray[np.uint32], replaced: bool) -> Batch:
        assert self._layouts is not None
        batch = decode(
            buffer,
            index,
            self._layouts,
            self.pid,
            replaced,
            self._pointers,
            names=len(self._helper_ids) if replaced else len(self.names),
            since_ns=self._since_ns,
            now_ns=time.monotonic_ns(),
        )
        if replaced:
            ids = np.array(self._helper_ids, np.uint32)
            for rows in (batch.gpu, batch.host):
                rows["name"] = ids[rows["name"]]
        return batch

    def _read_names(self, memory: shared.Memory) -> None:
        """Takes the names that are new in the helper's table."""
        used = memory.load("names_used")
        memory.fence()
        if used > shared.NAMES_BYTES or used < self._names_read:
            raise _Damaged("its names")
        if used == self._names_read:
            return
        raw = memory.view(shared.NAMES_OFFSET + self._names_read, used - self._names_read).tobytes()
        at = 0
        while at < len(raw):
            if len(raw) - at < shared.NAME.itemsize:
                raise _Damaged("its names")
            pointer, number, length = _NAME_HEADER.unpack_from(raw, at)
            at += shared.NAME.itemsize
            # Ids are given in order, so that a list holds them.
            if number != len(self._helper_ids) or length > _MAX_NAME_BYTES or length > len(raw) - at:
                raise _Damaged("its names")
            place = self._named(pointer, raw[at : at + length].decode(errors="backslashreplace"))
            self._helper_ids.append(place)
            self._pointers[pointer] = place
            at += (length + 7) // 8 * 8
        self._names_read = used

    def _bury(self, memory: shared.Memory, batches: list[Batch]) -> None:
        """Takes what a process that is no more has left: buffers not walked yet, and those that CUPTI still had."""
        slots, buffer_bytes = self._geometry
        if not slots or self._layouts is None:
            return
        self._walk = None  # names cannot be read any more: below, what is known has to do
        self._take(memory, batches)
        self._read_names(memory)
        left = memory.slots[:slots].copy()
        left["state"][left["state"] == SlotState.CLAIMED] = SlotState.FULL
        full = np.flatnonzero(left["state"] == SlotState.FULL)
        full = full[np.argsort(left["sequence"][full], kind="stable")]
        lent = np.flatnonzero(left["state"] == SlotState.LENT)
        if not len(full) and not len(lent):
            return
        # The helper may have been in the middle of putting ids where pointers are; no pointer is that small.
        for number, place in enumerate(self._helper_ids):
            if number:
                self._pointers.setdefault(number, place)
        try:
            walk = _load_walk()
        except (ArgusError, OSError, AttributeError):
            self._unfinished_buffers += len(full) + len(lent)
            self._unfinished += len(full) + len(lent)
            return
        table = self._layouts.table()
        for slot in (*full.tolist(), *lent.tolist()):
            buffer, _ = memory.buffer(slot, buffer_bytes)
            valid = buffer_bytes
            if left["state"][slot] == SlotState.FULL:
                valid = min(int(left["valid"][slot]), buffer_bytes)
            elif not _written(buffer):
                continue
            own = self._own(buffer[:valid])
            index, lost = walk(own, table)
            if left["state"][slot] == SlotState.LENT:
                # How much is valid nobody said: what lies behind the last record that could be read, if anything does.
                lost = _written(own) - (_end(own, index, table) if len(index) else 0)
            self._unknown_bytes += max(lost, 0)
            batch = self._decode(own, index, False)
            # A record whose times are missing was written when its kernel was launched, and that did not end.
            unfinished = batch.rejected.pop("start_zero", 0)
            if left["state"][slot] == SlotState.LENT:
                self._unfinished_buffers += 1
            self._unfinished += unfinished
            self._rejected.update(batch.rejected)
            self._salvaged += len(batch.gpu) + len(batch.host)
            self.records += len(batch.gpu) + len(batch.host)
            batches.append(batch)

    def _count_kept(self, memory: shared.Memory) -> None:
        """Counts what CUPTI did not give back though it was forced to: it may still write there, so it is not read."""
        slots, buffer_bytes = self._geometry
        for slot in np.flatnonzero(memory.slot_states[:slots] == SlotState.LENT).tolist():
            kept = _written(memory.buffer(slot, buffer_bytes)[0])
            self._unfinished_buffers += kept > 0
            self._unknown_bytes += kept

    # ---- small things ----

    def _say(self, state: CollectorState, reason: str) -> None:
        self.state, self.reason = state, reason

    def _rest(self, state: CollectorState, reason: str) -> None:
        """Nothing more can be done for this process."""
        self._finish(state, reason)
        self._step = _Step.IDLE

    def _finish(self, state: CollectorState, reason: str) -> None:
        self._command = None
        self._silent = None
        self._say(state, reason)
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

_NAME_HEADER = struct.Struct("<QII")
_NAME_OF_HELPER = f"/memfd:{shared.MEMFD}".encode()


def _mapping(pid: int) -> str:
    """Where a process maps the beginning of the helper's memory, as map_files calls it; empty: nowhere.

    Raises:
        OSError: The process is gone, or may not be looked at.
    """
    with open(PROC / str(pid) / "maps", "rb") as lines:
        for line in lines:
            if _NAME_OF_HELPER not in line:
                continue
            fields = line.split(None, 5)
            named = len(fields) == 6 and fields[5].rstrip(b"\n").removesuffix(b" (deleted)") == _NAME_OF_HELPER
            if named and int(fields[2], 16) == 0:
                return fields[0].decode()
    return ""


def _same_file(path: Path, fd: int) -> bool:
    try:
        there = os.stat(path)
    except OSError:
        return False
    here = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _sealed(fd: int) -> bool:
    """Makes sure that the file never becomes shorter: to read what was cut off would kill Argus (SIGBUS)."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False


def _own_pids(pid: int) -> tuple[int, ...]:
    """The process's id in every PID namespace that has one for it."""
    try:
        status = (PROC / str(pid) / "status").read_text(errors="replace")
    except OSError:
        return (pid,)
    found = re.search(r"^NSpid:\s*([\d\s]+?)$", status, re.MULTILINE)
    return (pid, *map(int, found[1].split())) if found else (pid,)


def _lock_holder(fd: int) -> int:
    """Who holds the lock on a file; 0: not known."""
    inode = os.fstat(fd).st_ino
    try:
        lines = (PROC / "locks").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        fields = line.split()
        if "FLOCK" in fields[1:2] and len(fields) > 5 and fields[5].rpartition(":")[2] == str(inode):
            return int(fields[4]) if fields[4].isdigit() else 0
    return 0


def _put(memory: shared.Memory, name: str, count: str, values: Iterable[int]) -> None:
    chosen = list(values)
    memory.control[name][: len(chosen)] = chosen
    memory.store(count, len(chosen))


def _load_walk() -> Callable[[NDArray[np.uint8], NDArray[np.void]], tuple[NDArray[np.uint32], int]]:
    """The helper's own walk over a buffer, for buffers that it did not live to walk.

    Raises:
        ArgusError, OSError, AttributeError: The helper is not compiled, or is no library of this machine.
    """
    function = ctypes.CDLL(str(build.library())).argus_cupti_walk
    function.restype = ctypes.c_uint32
    function.argtypes = [
        *(ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32),
        ctypes.POINTER(ctypes.c_uint64),
    ]

    def walk(buffer: NDArray[np.uint8], table: NDArray[np.void]) -> tuple[NDArray[np.uint32], int]:
        index = np.zeros(len(buffer) // 8, np.uint32)
        lost = ctypes.c_uint64()
        count = function(
            buffer.ctypes.data, len(buffer), table.ctypes.data, index.ctypes.data, len(index), ctypes.byref(lost)
        )
        return index[:count], int(lost.value)

    return walk


def _load_claim() -> Callable[[int], int]:
    """Takes a full buffer for Argus alone; given the address of its state.

    Raises:
        ArgusError, OSError, AttributeError: As ``_load_walk``.
    """
    function = ctypes.CDLL(str(build.library())).argus_cupti_claim
    function.restype = ctypes.c_uint32
    function.argtypes = [ctypes.c_void_p]
    return cast("Callable[[int], int]", function)


class Texts:
    """Texts in a process's memory. Opened once: it stays with the program that runs now, also beyond an exec.

    Raises:
        OSError: Its memory may not be read.
    """

    def __init__(self, pid: int) -> None:
        self._fd = os.open(PROC / str(pid) / "mem", os.O_RDONLY | os.O_CLOEXEC)

    def at(self, pointer: int) -> str | None:
        """The text at an address, up to its end or ``_MAX_TEXT_BYTES``; None: there is nothing to read."""
        text = b""
        while len(text) < _MAX_TEXT_BYTES:
            at = pointer + len(text)
            try:
                part = os.pread(self._fd, _PAGE_BYTES - at % _PAGE_BYTES, at)
            except (OSError, OverflowError):
                part = b""
            if not part:
                return None
            end = part.find(0)
            if end >= 0:
                return (text + part[:end]).decode(errors="backslashreplace")
            text += part
        return text[:_MAX_TEXT_BYTES].decode(errors="backslashreplace")

    def close(self) -> None:
        os.close(self._fd)


def _written(buffer: NDArray[np.uint8]) -> int:
    """Where in a zeroed buffer the last word lies that was written; 0: nowhere."""
    words: NDArray[np.uint64] = buffer.view("<u8")
    used = np.flatnonzero(words)
    return (int(used[-1]) + 1) * 8 if len(used) else 0


def _end(buffer: NDArray[np.uint8], index: NDArray[np.uint32], table: NDArray[np.void]) -> int:
    """Where the last record of an index ends."""
    last = int(index[-1])
    if last + 4 > len(buffer):
        return len(buffer)
    kind = int(buffer[last : last + 4].view("<u4")[0])
    return last + int(table["size"][kind]) if kind < shared.MAX_KINDS else last


# ---- where CUPTI may be ----

_CUPTI = re.compile(r"libcupti\.so\.(1[2-9])$")
_RUNTIME = re.compile(r"lib(?:cudart|cublas|nvrtc)[^/]*\.so\.(\d+)")
_DRIVER = re.compile(r"libcuda\.so\.(\d+)\.")
_BESIDE = re.compile(r"lib(cudart|cublas|cublasLt|nvrtc|cudnn|nccl|torch|torch_cuda|c10_cuda|jaxlib)\b[^/]*\.so")
_SYSTEM = (
    "usr/local/cuda*/extras/CUPTI/lib64",
    "usr/local/cuda*/lib64",
    "usr/local/cuda*/targets/*/lib",
    "usr/local/cuda*/lib",
    "usr/lib/*-linux-gnu",
    "opt/conda/lib",
)
_MOST_NAMES, _MOST_IN_ALL = 1 << 14, 1 << 16
"""Names of a folder that are read, and of all folders of a process: it may have made a folder of millions."""
_MOST_FOLDERS, _MOST_ALIKE = 64, 16
"""Folders that its mappings name, and those that one part of a pattern fits."""


def candidates(pid: int) -> list[str]:
    """Where CUPTI may be, as the process sees it, best first: mapped already, beside its CUDA, the system's.

    Only files that exist, and only of the major version of the process's CUDA where that is known.
    """
    paths = _mapped_paths(pid)
    majors = _majors(paths)
    found: list[str] = [path for path in paths if Path(path).name.startswith("libcupti.so")]
    folders: dict[str, None] = {}
    for path in sorted(paths, key=lambda path: not Path(path).name.startswith("libcudart")):
        if len(folders) >= _MOST_FOLDERS:
            break
        if not _BESIDE.match(Path(path).name):
            continue
        folder = Path(path).parent
        folders[str(folder)] = None
        folders[str(folder.parent / "extras" / "CUPTI" / "lib64")] = None
        # Wheels: site-packages/nvidia/<part>/lib, site-packages/torch/lib.
        for above in folder.parents:
            packages = above if above.name == "nvidia" else above / "nvidia"
            if above.name in ("nvidia", "site-packages", "dist-packages"):
                for part in ("cu13", "cuda_cupti"):
                    folders[str(packages / part / "lib")] = None
    with contextlib.suppress(OSError):
        root = open_root(pid)
        left = _MOST_IN_ALL

        def names(folder: str) -> list[str]:
            nonlocal left
            inside = names_in_root(root, folder, min(_MOST_NAMES, left))
            left -= len(inside)
            return inside

        try:
            for folder_name in folders:
                found += _cuptis(folder_name, names(folder_name))
            for pattern in _SYSTEM:
                for folder_name in _folders_like(pattern, names):
                    found += _cuptis(folder_name, names(folder_name))
        finally:
            os.close(root)
    chosen = []
    for path in dict.fromkeys(found):
        version = _CUPTI.search(path)
        if not version or not majors or int(version[1]) in majors:
            chosen.append(path)
    return chosen


def _majors(paths: Iterable[str]) -> set[int]:
    """Major versions of CUPTI that fit the process's CUDA; empty: not known."""
    names = [Path(path).name for path in paths]
    runtime = {int(match[1]) for name in names if (match := _RUNTIME.match(name))}
    if runtime:
        return runtime
    driver = [int(match[1]) for name in names if (match := _DRIVER.match(name))]
    return {12} if driver and max(driver) < _DRIVER_OF_CUDA_13 else set()


def _folders_like(pattern: str, names: Callable[[str], list[str]]) -> list[str]:
    """Paths that a pattern with stars fits, newest version first. Those without a star may not exist.

    Args:
        pattern: Relative to the root folder.
        names: What lies in a folder of the process.
    """
    folders = [""]
    for part in pattern.split("/"):
        if "*" in part:
            alike = {folder: fnmatch.filter(names(folder or "/"), part) for folder in folders}
            folders = [
                f"{folder}/{name}" for folder in folders for name in sorted(alike[folder], reverse=True)[:_MOST_ALIKE]
            ]
        else:
            folders = [f"{folder}/{part}" for folder in folders]
    return folders


def _cuptis(folder: str, names: list[str]) -> list[str]:
    """CUPTI's libraries among what lies in a folder of the process, newest first."""
    versions = sorted(((int(match[1]), name) for name in names if (match := _CUPTI.match(name))), reverse=True)
    return [f"{folder}/{name}" for _, name in versions]


def _mapped_paths(pid: int) -> list[str]:
    """Files that a process maps, each once."""
    try:
        raw = (PROC / str(pid) / "maps").read_bytes()
    except OSError:
        return []
    paths: dict[bytes, None] = {}
    for line in raw.split(b"\n"):
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[5].startswith(b"/"):
            paths[fields[5]] = None
    return [os.fsdecode(path) for path in paths if not path.endswith(b" (deleted)")]


def _candidate_lines(paths: Iterable[str]) -> bytes:
    """As the helper wants them: one a line, as many as fit."""
    lines = b""
    for path in paths:
        line = os.fsencode(path)
        if b"\n" not in line and len(lines) + len(line) + 2 <= shared.CANDIDATES_BYTES:
            lines += line + b"\n"
    return lines
