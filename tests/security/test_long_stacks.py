"""Stacks of many frames with long names are cut where they are read, and what is kept of them is bounded in bytes."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest

from argus.capture import blocked
from argus.capture.blocked import assemble, stack_bytes
from argus.capture.bounded import Bounded, text_bytes
from argus.capture.process.symbols import NativeFrame
from argus.capture.python import code, interpreter, layouts
from argus.capture.python.code import CHAIN_BYTES, CHAIN_FRAMES, CodeResolver
from argus.capture.reader import remote
from argus.model.records import FRAME, STACK_PYTHON, STACK_PYTHON_CUT
from argus.model.stacks import CUT, Stack

WIDE = "\U0001f600" + "n" * 4094
"""As long as a name is kept, and each character takes four bytes."""


class Code:
    """A process whose code objects are called as ``names`` says, by address."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, names: dict[int, str]) -> None:
        record = np.zeros((), interpreter.PYTHON)
        for field in interpreter._SAME:
            record[field] = getattr(layouts.LAYOUTS[3, 11], field)
        record["major"], record["minor"] = 3, 11
        self.read: list[int] = []
        self.resolver = CodeResolver(-1, record)
        self.names = names
        monkeypatch.setattr(self.resolver, "_code_at", self._at)

    def _at(self, address: int) -> code._Code:
        self.read.append(address)
        header = [0] * (len(self.resolver._order) + 1)
        header[self.resolver._name] = header[self.resolver._first] = address
        return code._Code(tuple(header), self.names[address], self.names[address], b"")

    def frames(self, addresses: list[int]) -> np.ndarray:
        frames = np.zeros(len(addresses), FRAME)
        frames["code"] = frames["firstlineno"] = addresses
        frames["instruction"] = 0xFFFFFFFF
        return frames


@pytest.mark.parametrize("seed", range(20))
def test_a_chain_is_what_all_of_its_frames_are_up_to_the_bound(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    names = {at: rng.choice("aä") * rng.randrange(1, 20) for at in range(1, 40)}
    process = Code(monkeypatch, names)
    most_frames, most_bytes = rng.randrange(1, 80), rng.randrange(1, 2000)
    monkeypatch.setattr(code, "CHAIN_FRAMES", most_frames)
    monkeypatch.setattr(code, "CHAIN_BYTES", most_bytes)
    for _ in range(20):
        frames = process.frames([rng.randrange(1, 40) for _ in range(rng.randrange(1, 90))])
        every, left = process.resolver.resolve(frames), most_bytes
        assert len(every) == len(frames), "who asks for all of them has them"
        kept = []
        for frame in every[:most_frames]:
            if left <= 0:
                break
            assert frame is not None
            kept.append(frame)
            left -= text_bytes(frame.function) + text_bytes(frame.file)
        chain = process.resolver.chain(frames)
        assert chain.frames == tuple(kept)
        assert chain.cut == (len(kept) < len(frames))


def test_a_recursion_of_a_thousand_frames_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython's own bound, with names that are longer than most."""
    process = Code(monkeypatch, {at: "/repo/src/package/module" + "." * 200 + str(at) for at in range(1, 1001)})
    chain = process.resolver.chain(process.frames(list(range(1, 1001))))
    assert not chain.cut
    assert len(chain.frames) == 1000


def test_a_stack_with_long_names_is_cut_where_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Code(monkeypatch, dict.fromkeys(range(1, 2001), WIDE))
    frames = process.frames(list(range(1, 2001)))
    none = np.empty(0, np.uint64)
    stack = assemble(None, process.resolver, frames, none, STACK_PYTHON)  # type: ignore[arg-type]
    assert stack.python == "cut"
    assert stack.frames[0].function == CUT
    assert stack.frames[-1].line == 1, "the leaf stays"
    assert stack_bytes(stack) < CHAIN_BYTES + (64 << 10)
    assert len(process.read) < 32, "nor are the others read"


def test_a_stack_that_is_cut_is_as_one_that_the_kernel_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Code(monkeypatch, dict.fromkeys(range(1, CHAIN_FRAMES + 11), "f"))
    frames, none = process.frames(list(range(1, CHAIN_FRAMES + 11))), np.empty(0, np.uint64)
    cut = assemble(None, process.resolver, frames, none, STACK_PYTHON)  # type: ignore[arg-type]
    first = frames[:CHAIN_FRAMES]
    assert cut == assemble(None, process.resolver, first, none, STACK_PYTHON | STACK_PYTHON_CUT)  # type: ignore[arg-type]
    assert assemble(None, process.resolver, first, none, STACK_PYTHON).python == "complete"  # type: ignore[arg-type]


def test_caches_of_stacks_and_frames_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Code(monkeypatch, dict.fromkeys(range(1, 5100), WIDE))
    none = np.empty(0, np.uint64)
    for begin in range(1, 5000, 16):
        frames = process.frames(list(range(begin, begin + 16)))
        stack = assemble(None, process.resolver, frames, none, STACK_PYTHON)  # type: ignore[arg-type]
        for frame in stack.frames:
            assert remote._frame(frame.kind, frame.function, frame.file, frame.line) == frame
    assert 0 < blocked._merged_stacks.nbytes <= 64 << 20
    assert 0 < remote._frames.nbytes <= 16 << 20
    assert sum(text_bytes(one[1]) + text_bytes(one[2]) for one in remote._frames._kept) <= 16 << 20


def test_what_is_kept_of_whole_stacks_counts_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 3.12 on a code object's version stands for its names, so that they are not among what is compared."""
    process = Code(monkeypatch, dict.fromkeys(range(1, 2000), WIDE))
    process.resolver._pid = 1
    for begin in range(1, 1900):
        process.resolver.chain(process.frames(list(range(begin, begin + 8))))
    held = {id(frame) for chain, _ in process.resolver._chains.values() for frame in chain}
    assert len(held) * 2 * text_bytes(WIDE) <= 2 * code.MAX_CHAIN_BYTES
    assert process.resolver._chains


def test_a_stack_that_is_kept_takes_about_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took twice as much: it is kept with the frames that it was made of."""
    kept = Bounded[tuple[code.Chain, tuple[NativeFrame, ...], bool, int], Stack](8192, 64 << 20)
    monkeypatch.setattr(blocked, "_merged_stacks", kept)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(100):
            frames = tuple(code.PythonFrame(f"{number}.{at}", "", 1000 + at) for at in range(256))
            blocked._merged(code.Chain(frames, (False,) * 256), (), False, STACK_PYTHON)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(kept) == 100
    assert taken / 1.1 < kept.nbytes < 2 * taken
