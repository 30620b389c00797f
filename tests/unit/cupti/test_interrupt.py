"""Where a stack may lie, and what of it is read."""

from __future__ import annotations

import mmap
import os
import random
from pathlib import Path

import pytest

from argus.cupti import interrupt
from argus.cupti.interrupt import Stopped, stacks_of

PAGE = 4096
ROOM = interrupt._STACK_BYTES // PAGE
FIRST = 0x7F0000000
"""Page from which mappings are made here."""


def maps_of(mappings: list[tuple[int, int, str, str]]) -> bytes:
    lines = [f"{begin * PAGE:x}-{end * PAGE:x} {perms} {rest}\n" for begin, end, perms, rest in mappings]
    return "".join(lines).encode()


ANONYMOUS, FILE = "00000000 00:00 0 ", "00000000 08:01 77                 /tmp/a file"


def test_a_stack_has_room_of_no_file_below_and_ends_with_its_memory() -> None:
    """As found page by page, in random mappings."""
    draw = random.Random(1)
    for _ in range(200):
        mappings, free, page = [], set(), FIRST
        for _ in range(draw.randrange(12)):
            page += draw.choice((0, 0, 3))
            end = page + draw.choice((1, ROOM - 1, ROOM, ROOM + 1, 2 * ROOM))
            perms, rest = draw.choice((("rw-p", ANONYMOUS), ("rw-p", ANONYMOUS), ("rw-p", FILE), ("r--p", ANONYMOUS)))
            mappings.append((page, end, perms, rest))
            if (perms, rest) == ("rw-p", ANONYMOUS):
                free |= set(range(page, end))
            page = end
        stacks = stacks_of(maps_of(mappings))
        for at in range(FIRST, page + 2):
            found = [stack for stack in stacks if at * PAGE in stack]
            assert bool(found) == all(below in free for below in range(at - ROOM, at + 1))
            if found:
                assert found[0].stop == PAGE * next(above for above in range(at, page + 2) if above not in free)


def test_the_main_thread_s_stack_grows_but_not_into_a_file() -> None:
    stack = (FIRST + 100, FIRST + 133, "rw-p", ANONYMOUS + "                  [stack]")
    for below, first in ((FIRST + 100, FIRST + 100 + ROOM), (FIRST + 95, FIRST + 95 + ROOM), (FIRST, FIRST + 100)):
        (found,) = stacks_of(maps_of([(FIRST - 1, below, "r--p", FILE), stack]))
        assert (found.start, found.stop) == (first * PAGE, (FIRST + 133) * PAGE)
    assert stacks_of(maps_of([stack])) == [range((FIRST + 100) * PAGE, (FIRST + 133) * PAGE)]


@pytest.mark.parametrize("asked", [True, False], ids=["one mapping", "all of them"])
def test_a_stack_that_is_asked_for_is_one_of_these(monkeypatch: pytest.MonkeyPatch, asked: bool) -> None:
    """Of this process, which has mappings of every kind; with what kernels answer from 6.11 on, and without."""
    if not asked:
        monkeypatch.setattr(interrupt, "_QUERY", 0)
    held = [mmap.mmap(-1, size * PAGE, flags=mmap.MAP_PRIVATE) for size in (1, ROOM, ROOM + 1, 9 * ROOM)]
    maps = Path("/proc/self/maps").read_bytes()
    ends = {}
    for line in maps.splitlines():
        begin, _, end = line.split(b" ")[0].partition(b"-")
        for at in (int(begin, 16), int(begin, 16) + interrupt._STACK_BYTES, int(end, 16) - 8, int(end, 16)):
            ends[at] = interrupt.stack_end(os.getpid(), at)
    if Path("/proc/self/maps").read_bytes() == maps:  # the test itself may have taken memory
        stacks = stacks_of(maps)
        assert ends == {at: next((each.stop for each in stacks if at in each), 0) for at in ends}
    assert sum(end > 0 for end in ends.values()) >= 4
    for memory in held:
        memory.close()


@pytest.mark.parametrize("pages", [1, 100])
def test_no_more_is_read_than_the_memory_that_the_stack_lies_in(monkeypatch: pytest.MonkeyPatch, pages: int) -> None:
    """What lies above it may be a file that never comes."""
    read: list[tuple[int, int]] = []

    def pread(_: int, size: int, address: int) -> bytes:
        read.append((address, size))
        return bytes(size)

    pointer = FIRST * PAGE
    thread = Stopped.__new__(Stopped)
    thread.tid, thread._memory = 77, -1
    thread.registers = {"rsp": pointer + 12, "rip": 5, "orig_rax": (1 << 64) - 1}
    memory = range(pointer, pointer + pages * PAGE)
    monkeypatch.setattr(interrupt, "stack_end", lambda tid, at: memory.stop if at in memory else 0)
    monkeypatch.setattr(os, "pread", pread)
    assert thread.at_rest([interrupt.Code(0, 9, "python3")], 1234)
    assert read == [(pointer + 8, min(pages * PAGE - 8, interrupt._HANDLER_BYTES))]
    assert not thread.at_rest([interrupt.Code(0, 9, "libc.so.6")], 1234)
    thread.registers["rsp"] = pointer - 8
    assert not thread.at_rest([interrupt.Code(0, 9, "python3")], 1234)
    assert len(read) == 1, "of memory that is no stack nothing is read"
