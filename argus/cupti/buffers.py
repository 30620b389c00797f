"""Buffers of records in the shared memory: taken, walked, their names read, decoded, given back."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import cast

import numpy as np
from numpy.typing import NDArray

from argus.capture.process.cupti import RemoteTexts, Texts, texts_of
from argus.cupti import build, shared
from argus.cupti.decode import Batch, apart, decode
from argus.cupti.layouts import Layouts
from argus.cupti.names_room import NAME_BYTES, Part
from argus.cupti.shared import SlotState
from argus.model.errors import ArgusError
from argus.model.losses import Owner

_MAX_NAME_BYTES = 1 << 16
MAX_NAMES, MAX_NAMES_BYTES = 1 << 17, 32 << 20
"""Names of a process that are known at most, 20 MB as names go, and what they take in all: further ones are lost, and
counted. And where they lay: that is looked up anew. A program that makes kernels as it runs never stops making
others."""


class Damaged(Exception):
    """The shared memory holds impossible values."""


_NAME_HEADER = struct.Struct("<QII")
MOST_LOOKED_UP = 1 << 14
"""Pointers to names that are looked up in one turn, but for those of its last buffer. A program has some thousands of
kernels; buffers that remain come in the next turn."""
MOST_WITHOUT = 2048
"""Pointers that are remembered since their names are lost: 0.3 MB. Those beyond count whenever they are looked up."""
MOST_BYTES_AT_ONCE = 16 << 20
"""Of buffers that are taken in one turn: some 100,000 records. Further ones come in the next."""


Walk = Callable[[NDArray[np.uint8], NDArray[np.void]], tuple[NDArray[np.uint32], int]]
"""A buffer and a table of layouts -> the places of its records, and bytes that could not be read."""


@cache
def _helper(path: str) -> ctypes.CDLL:
    """Loaded once: each CDLL brings a Python class of its own."""
    return ctypes.CDLL(path)


def load_walk() -> Walk:
    """The helper's own walk over a buffer, for buffers that it did not live to walk.

    Raises:
        ArgusError, OSError, AttributeError: The helper is not compiled, or is no library of this machine.
    """
    function = _helper(str(build.library())).argus_cupti_walk
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


def load_claim() -> Callable[[int], int]:
    """Takes a full buffer for Argus alone; given the address of its state.

    Raises:
        ArgusError, OSError, AttributeError: As ``load_walk``.
    """
    function = _helper(str(build.library())).argus_cupti_claim
    function.restype = ctypes.c_uint32
    function.argtypes = [ctypes.c_void_p]
    return cast("Callable[[int], int]", function)


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


class Buffers:
    """The buffers of one process, and the names that their records refer to.

    Attributes:
        room: What the names and the pointers to them take.
        names: Texts by id; ``names[0]`` is empty. Ids in a batch are always below its length.
        records: Records taken.
        layouts: How the process's CUPTI lays records out; None: not known yet.
        geometry: Number of buffers and bytes of each; (0, 0): not mapped yet.
        since_ns: Records that ended before are not of this session.
        walk, claim: Walks a full buffer outside the process, and takes it for Argus alone; None: the helper does it.
        unknown_bytes, names_unread, unfinished_buffers, unfinished, salvaged, rejected: Counted, see docs/gpu-times.md.
    """

    def __init__(self, pid: int, owner: Owner | None = None) -> None:
        self._pid = pid
        self.names: list[str] = [""]
        self.records = 0
        self.layouts: Layouts | None = None
        self.geometry = (0, 0)
        self.since_ns = time.monotonic_ns()
        self.texts: Texts | RemoteTexts | None = None
        self.walk: Walk | None = None
        self.claim: Callable[[int], int] | None = None
        self.pointers: dict[int, int] = {}
        """Addresses of names in the process -> their ids; twice ``MAX_NAMES`` at most."""
        self._places = {"": 0}
        self._names_bytes = 0
        self.room = Part(pid, owner)
        self._helper_ids: list[int] = [0]  # the helper's id of a name -> its place in ``names``
        self._names_read = 0
        self._copy = np.empty(0, np.uint8)
        self._looked_up: set[int] = set()
        """Pointers whose text was looked up for this flush, or that have none."""
        self._without: dict[int, int] = {}
        """Pointers whose names are lost, and the flush in which they were last looked up."""
        self._looked_up_now = 0  # in this turn
        self._flushes = -1
        self.names_unread = 0
        self.rejected: Counter[str] = Counter()
        self.unfinished_buffers = 0
        self.unfinished = 0
        self.salvaged = 0
        self.unknown_bytes = 0

    def walk_outside(self) -> None:
        """Buffers are walked here from now on, if the process's memory may be read and the library is there."""
        with contextlib.suppress(ArgusError, OSError, AttributeError):
            self.texts = texts_of(self._pid)
            self.claim, self.walk = load_claim(), load_walk()

    def map(self, fd: int, memory: shared.Memory, most_bytes: int, most_each: int) -> shared.Memory:
        """The whole shared memory, of which ``memory`` is the head.

        Raises:
            Damaged: The head describes impossible buffers, or more than ``most_bytes`` of them, or one of more than
                ``most_each``: to read them takes as long, and makes pages of what the process has never touched.
        """
        slots, buffer_bytes = memory.load("slots"), memory.load("buffer_bytes")
        if not 0 < slots <= shared.MAX_SLOTS or buffer_bytes < 4096 or buffer_bytes % 4096:
            raise Damaged("impossible buffers")
        if slots * buffer_bytes > most_bytes or buffer_bytes > most_each:
            raise Damaged("more buffers than were asked for")
        total = shared.total_bytes(slots, buffer_bytes)
        if total > os.fstat(fd).st_size:
            raise Damaged("shorter than its buffers")
        try:
            whole = shared.Memory(fd, total)
        except (OSError, ValueError) as reason:
            raise Damaged(f"its buffers cannot be mapped: {reason}") from reason
        self.geometry = (slots, buffer_bytes)
        return whole

    def take(self, memory: shared.Memory, batches: list[Batch], most_bytes: int = MOST_BYTES_AT_ONCE) -> None:
        """Decodes the buffers that are ready, or full and nobody else's to walk, and gives them back: the oldest ones
        first, ``most_bytes`` in one call."""
        slots, buffer_bytes = self.geometry
        states = memory.slot_states[:slots].copy()
        memory.fence()
        if (states > SlotState.CLAIMED).any():
            raise Damaged("a buffer has no state")
        readable = states == SlotState.READY
        if self.walk is not None and self.layouts is not None:
            readable |= states == SlotState.FULL
        chosen = np.flatnonzero(readable)
        if not len(chosen):
            return
        # After the states: a name is in its table before a buffer that uses it is ready.
        self._read_names(memory)
        chosen = chosen[np.argsort(memory.slots["sequence"][chosen], kind="stable")]
        self._looked_up_now = 0
        for slot in chosen[: max(most_bytes // buffer_bytes, 1)].tolist():
            if self._looked_up_now > MOST_LOOKED_UP:
                return
            header = memory.slots[slot].copy()
            buffer, index = memory.buffer(slot, buffer_bytes)
            valid, count = int(header["valid"]), int(header["count"])
            if valid > buffer_bytes or count > len(index):
                raise Damaged("a buffer holds more than fits")
            of_records, of_index = memory.buffer_there(slot, buffer_bytes)
            if valid > of_records or (states[slot] == SlotState.READY and 4 * count > of_index):
                raise Damaged("a buffer that nobody has written")
            if states[slot] == SlotState.FULL:
                assert self.claim is not None
                if not self.claim(memory.slot_states[slot : slot + 1].ctypes.data):
                    continue  # the helper has it: the process is exiting
                batch = self._decode_full(memory, self._own(buffer[:valid]))
            else:
                replaced = bool(int(header["flags"]) & shared.NAMES_REPLACED)
                own, of_own = self._own(buffer[:valid]), index[:count].copy()
                fits = apart(own, of_own, self.layouts) if self.layouts is not None else np.ones(count, np.bool_)
                batch = self._decode(own, of_own[fits], replaced)
                if not fits.all():
                    batch.rejected["bad_offset"] += int(np.count_nonzero(~fits))
                index[:count] = 0
            self.rejected.update(batch.rejected)
            self.records += len(batch.gpu) + len(batch.host)
            batches.append(batch)
            buffer[:valid] = 0
            memory.fence()
            memory.slot_states[slot] = SlotState.FREE

    def _own(self, buffer: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """A copy that nobody else writes to: what was checked is what is read. It is good until the next one."""
        if len(self._copy) < len(buffer):
            self._copy = np.empty(max(len(buffer), self.geometry[1]), np.uint8)
        own = self._copy[: len(buffer)]
        own[:] = buffer
        return own

    def _decode_full(self, memory: shared.Memory, buffer: NDArray[np.uint8]) -> Batch:
        """What is in a buffer that nobody has walked."""
        assert self.walk is not None
        assert self.layouts is not None
        index, lost = self.walk(buffer, self.layouts.table())
        self.unknown_bytes += lost
        flushes = memory.load("flushes")
        if flushes != self._flushes:  # CUPTI may use the memory of a name again, once all buffers with it are out
            self._flushes = flushes
            self._looked_up.clear()
            if len(self.pointers) > MAX_NAMES:
                self.pointers.clear()
        self._look_up(buffer, index)
        return self._decode(buffer, index, False)

    def _look_up(self, buffer: NDArray[np.uint8], index: NDArray[np.uint32]) -> None:
        """Reads the names that records point at, each pointer once for a flush."""
        assert self.layouts is not None
        if not len(index) or self.texts is None:
            return
        words = buffer[: len(buffer) // 8 * 8].view("<u8")
        kinds = buffer[: len(buffer) // 4 * 4].view("<u4")[index >> 2]
        words_of_ops = [np.empty(0, np.uint64)]
        for kind, offsets in self.layouts.names.items():
            at = index[kinds == kind] if offsets else index[:0]
            words_of_ops += [words[place[place < len(words)]] for place in ((at + offset) >> 3 for offset in offsets)]
        pointers = np.unique(np.concatenate(words_of_ops)).tolist()
        pointers = [pointer for pointer in pointers if pointer and self._without.get(pointer) != self._flushes]
        fresh = [pointer for pointer in pointers if pointer not in self._looked_up]
        if len(self._looked_up) + len(fresh) > MAX_NAMES:  # whatever the process says of its flushes
            self._looked_up.clear()
            self.pointers.clear()
            fresh = pointers
        self._looked_up_now += len(fresh)
        for pointer, text in zip(fresh, self.texts.at(fresh) if fresh else [], strict=True):
            if text is not None:
                place = self.pointers[pointer] = self._named(pointer, text.decode(errors="backslashreplace"))
                if place:
                    self._without.pop(pointer, None)
            elif pointer not in self.pointers:
                self._lose(pointer)
        self._looked_up.update(fresh)
        if not self.room.hold(len(self.pointers) + len(self._looked_up) // 2):
            # The next buffer's are looked up anew; what this one's are called has to be known until it is decoded.
            self._looked_up.clear()
            for pointer in self.pointers.keys() - pointers:
                del self.pointers[pointer]

    def _lose(self, pointer: int) -> None:
        """The name at a pointer is lost. It is not looked up again in this flush, and counts once."""
        self.names_unread += pointer not in self._without
        if pointer in self._without or len(self._without) < MOST_WITHOUT:
            self._without[pointer] = self._flushes

    def _named(self, pointer: int, text: str) -> int:
        """The id of a name; 0: there is no room for another one."""
        known = self.pointers.get(pointer, 0)
        if known and self.names[known] == text:
            return known
        place = self._places.get(text)
        if place is not None:
            return place
        size = sys.getsizeof(text)  # of each character one, two or four bytes
        over = len(self.names) >= MAX_NAMES or self._names_bytes + size > MAX_NAMES_BYTES
        kept = None if over else self.room.take(text, NAME_BYTES)
        if kept is None:
            if self.pointers.get(pointer) != 0:
                self._lose(pointer)
            return 0
        self._names_bytes += size
        place = self._places[kept] = len(self.names)
        self.names.append(kept)
        return place

    def _decode(self, buffer: NDArray[np.uint8], index: NDArray[np.uint32], replaced: bool) -> Batch:
        assert self.layouts is not None
        batch = decode(
            buffer,
            index,
            self.layouts,
            self._pid,
            replaced,
            self.pointers,
            names=len(self._helper_ids) if replaced else len(self.names),
            since_ns=self.since_ns,
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
            raise Damaged("its names")
        if used == self._names_read:
            return
        if used - self._names_read > memory.there(shared.NAMES_OFFSET + self._names_read):
            raise Damaged("names that nobody has written")
        raw = memory.view(shared.NAMES_OFFSET + self._names_read, used - self._names_read).tobytes()
        at = 0
        while at < len(raw):
            if len(raw) - at < shared.NAME.itemsize:
                raise Damaged("its names")
            pointer, number, length = _NAME_HEADER.unpack_from(raw, at)
            at += shared.NAME.itemsize
            # Ids are given in order, so that a list holds them.
            if number != len(self._helper_ids) or length > _MAX_NAME_BYTES or length > len(raw) - at:
                raise Damaged("its names")
            place = self._named(pointer, raw[at : at + length].decode(errors="backslashreplace"))
            self._helper_ids.append(place)
            if len(self.pointers) < MAX_NAMES or pointer in self.pointers:
                self.pointers[pointer] = place
            at += (length + 7) // 8 * 8
        self._names_read = used
        if not self.room.hold(len(self.pointers)):
            self.pointers.clear()  # the records have ids

    def take_left(self, memory: shared.Memory, batches: list[Batch]) -> None:
        """Takes what a process that is no more has left: buffers not walked yet, and those that CUPTI still had."""
        slots, buffer_bytes = self.geometry
        if not slots or self.layouts is None:
            return
        self.walk = None  # names cannot be read any more: below, what is known has to do
        self.take(memory, batches, slots * buffer_bytes)
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
                self.pointers.setdefault(number, place)
        try:
            walk = load_walk()
        except (ArgusError, OSError, AttributeError):
            self.unfinished_buffers += len(full) + len(lent)
            self.unfinished += len(full) + len(lent)
            return
        table = self.layouts.table()
        for slot in (*full.tolist(), *lent.tolist()):
            buffer, _ = memory.buffer(slot, buffer_bytes)
            valid = min(memory.buffer_there(slot, buffer_bytes)[0], buffer_bytes)
            buffer = buffer[:valid]
            if left["state"][slot] == SlotState.FULL:
                valid = min(int(left["valid"][slot]), valid)
            elif not _written(buffer):
                continue
            own = self._own(buffer[:valid])
            index, lost = walk(own, table)
            if left["state"][slot] == SlotState.LENT:
                # How much is valid is not recorded: what lies behind the last record that could be read, if anything
                # does.
                lost = _written(own) - (_end(own, index, table) if len(index) else 0)
            self.unknown_bytes += max(lost, 0)
            batch = self._decode(own, index, False)
            # A record whose times are missing was written when its kernel was launched, and that did not end.
            unfinished = batch.rejected.pop("start_zero", 0)
            if left["state"][slot] == SlotState.LENT:
                self.unfinished_buffers += 1
            self.unfinished += unfinished
            self.rejected.update(batch.rejected)
            self.salvaged += len(batch.gpu) + len(batch.host)
            self.records += len(batch.gpu) + len(batch.host)
            batches.append(batch)

    def count_kept(self, memory: shared.Memory) -> None:
        """Counts what CUPTI did not give back though it was forced to: it may still write there, so it is not read."""
        slots, buffer_bytes = self.geometry
        for slot in np.flatnonzero(memory.slot_states[:slots] == SlotState.LENT).tolist():
            there = min(memory.buffer_there(slot, buffer_bytes)[0], buffer_bytes)
            kept = _written(memory.buffer(slot, buffer_bytes)[0][:there])
            self.unfinished_buffers += kept > 0
            self.unknown_bytes += kept

    def count_left(self, memory: shared.Memory) -> None:
        """Counts what was written and will not be taken."""
        states = memory.slot_states[: self.geometry[0]]
        left = int(np.count_nonzero((states == SlotState.READY) | (states == SlotState.FULL)))
        self.unfinished_buffers += left
        self.unfinished += left

    def close(self) -> None:
        """Lets go of the process's memory."""
        if self.texts is not None:
            self.texts.close()
            self.texts = None
