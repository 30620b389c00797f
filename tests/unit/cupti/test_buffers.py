"""Names that records point at: each is read once for a flush, and what is kept of them is bounded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from argus.cupti import buffers, layouts, shared
from argus.cupti.buffers import Buffers
from argus.cupti.decode import Batch
from argus.cupti.shared import SlotState

pytest.importorskip("cupti.cupti")
KNOWN = layouts.for_version(130400)
KIND = KNOWN.kind("CONCURRENT_KERNEL")


class Texts:
    """The process's memory: what lies at each address."""

    def __init__(self) -> None:
        self.texts: dict[int, bytes | None] = {}
        self.asked: list[int] = []

    def at(self, pointers: Sequence[int]) -> list[bytes | None]:
        self.asked += pointers
        return [self.texts.get(pointer, b"kernel %d" % pointer) for pointer in pointers]


def made(texts: Texts) -> Buffers:
    one = Buffers(1)
    one.layouts, one.texts = KNOWN, texts  # type: ignore[assignment]
    size = KNOWN.dtype(KIND).itemsize
    one.walk = lambda buffer, table: (np.arange(0, len(buffer), size, dtype=np.uint32), 0)
    one.since_ns = 0
    return one


def buffer_of(pointers: Sequence[int]) -> Any:
    records = np.zeros(len(pointers), KNOWN.dtype(KIND))
    records["kind"], records["start"], records["end"], records["name"] = KIND, 5 * 10**9, 6 * 10**9, pointers
    return records.view("u1")


def taken(one: Buffers, pointers: Sequence[int], flush: int) -> list[str]:
    """Takes a buffer of kernels with these names, and returns what they are called."""
    memory: Any = SimpleNamespace(load=lambda name: flush)
    batch = one._decode_full(memory, buffer_of(pointers))
    return [one.names[place] for place in batch.gpu["name"].tolist()]


def test_names_are_those_that_a_look_up_of_each_flush_finds() -> None:
    rng = random.Random(1)
    for _ in range(20):
        texts = Texts()
        one = made(texts)
        looked_up: set[int] = set()
        known: dict[int, str] = {}
        expected_asked: list[int] = []
        flush = 0
        for _ in range(40):
            if rng.random() < 0.3:
                flush += 1
                looked_up.clear()
                for pointer in rng.sample(range(40), 10):
                    texts.texts[pointer] = rng.choice([None, b"", b"other %d" % rng.randrange(5)])
            pointers = [rng.randrange(40) for _ in range(rng.randrange(12))]
            fresh = sorted({pointer for pointer in pointers if pointer} - looked_up)
            expected_asked += fresh
            looked_up.update(fresh)
            for pointer in fresh:
                text = texts.texts.get(pointer, b"kernel %d" % pointer)
                if text is not None:
                    known[pointer] = text.decode()
            assert taken(one, pointers, flush) == [known.get(pointer, "") for pointer in pointers]
        assert texts.asked == expected_asked


def test_pointers_are_bounded_while_no_flush_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "MAX_NAMES", 100)
    texts = Texts()
    one = made(texts)
    for first in range(1, 5001, 50):
        named = taken(one, range(first, first + 50), 1)
        assert len(one.pointers) <= 200
        assert len(one._looked_up) <= 100
        assert named == [f"kernel {pointer}" if pointer < 100 else "" for pointer in range(first, first + 50)]
    assert taken(one, [1, 99, 4999], 1) == ["kernel 1", "kernel 99", ""], "they are looked up anew"


def test_what_the_helper_named_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "MAX_NAMES", 100)
    one = made(Texts())
    header = buffers._NAME_HEADER
    raw = b"".join(header.pack(0x1000 + number, number, 0) for number in range(1, 5000))
    memory: Any = SimpleNamespace(
        load=lambda name: len(raw),
        fence=int,
        there=lambda offset: shared.NAMES_BYTES,
        view=lambda offset, count: np.frombuffer(raw, "u1")[:count],
    )
    one._read_names(memory)
    assert len(one.pointers) <= 100


def test_a_turn_looks_up_so_many_and_the_rest_comes_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "MOST_LOOKED_UP", 100)
    texts = Texts()
    one = made(texts)
    one.claim = lambda address: 1
    one.geometry = (16, 1 << 16)
    slots = np.zeros(16, shared.SLOT)
    data = [buffer_of(range(1 + 60 * slot, 61 + 60 * slot)).copy() for slot in range(16)]
    slots["state"], slots["sequence"], slots["valid"] = SlotState.FULL, np.arange(16), [len(each) for each in data]
    memory: Any = SimpleNamespace(
        slots=slots,
        slot_states=slots["state"],
        fence=int,
        load=lambda name: 0,
        buffer=lambda slot, size: (np.pad(data[slot], (0, size - len(data[slot]))), np.zeros(size // 16, np.uint32)),
        buffer_there=lambda slot, size: (size, size),
    )
    batches: list[Batch] = []
    turns = 0
    while (slots["state"] == SlotState.FULL).any():
        before = len(texts.asked)
        one.take(memory, batches)
        assert len(texts.asked) - before <= 160
        turns += 1
    assert turns == 8
    names = [one.names[place] for batch in batches for place in batch.gpu["name"].tolist()]
    assert names == [f"kernel {pointer}" for pointer in range(1, 961)]
