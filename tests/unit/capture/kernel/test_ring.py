"""The columnar ring reader against a ring laid out as the kernel lays it out.

The kernel maps the data area twice in a row; the double here is a plain file that holds the area twice, both written by
hand. What it does not reproduce: a producer running at the same time on another CPU (tests/kernel does that with real
BPF).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from argus.capture.kernel import ring as ring_module
from argus.capture.kernel.ring import BUSY, DISCARDED, HEADER_BYTES, Ring

RECORD = np.dtype([("value", "<u8"), ("check", "<u8"), ("small", "<u2"), ("pad", "u1", (14,))])
STRIDE = HEADER_BYTES + RECORD.itemsize


class Producer:
    """Writes as kernel/bpf/ringbuf.c does: header with the busy bit, data, then the length without it."""

    def __init__(self, size: int) -> None:
        page = mmap.PAGESIZE
        self.size = size
        self.fd = os.memfd_create("ring")
        # consumer page, producer page, data, data again: the second copy is kept equal by hand.
        os.ftruncate(self.fd, 2 * page + 2 * size)
        self.map = mmap.mmap(self.fd, 2 * page + 2 * size)
        self.memory = np.frombuffer(self.map, "u1")
        self.consumer = self.memory[:8].view("<u8")
        self.producer = self.memory[page : page + 8].view("<u8")
        self.data = self.memory[2 * page :]

    def _put(self, position: int, raw: NDArray[np.uint8]) -> None:
        at = np.arange(position, position + len(raw)) % self.size
        self.data[at] = raw
        self.data[at + self.size] = raw

    def reserve(self, value: int) -> int | None:
        """The record's position, or None when the ring is full."""
        position = int(self.producer[0])
        if position + STRIDE - int(self.consumer[0]) > self.size:
            return None
        record = np.zeros(1, RECORD)
        record["value"], record["check"], record["small"] = value, value ^ 0x5555, value % 65521
        header = np.array([RECORD.itemsize | int(BUSY), 0], "<u4")
        self._put(position, header.view("u1"))
        self._put(position + HEADER_BYTES, record.view("u1"))
        self.producer[0] = position + STRIDE
        return position

    def commit(self, position: int, discard: bool = False) -> None:
        length = RECORD.itemsize | (int(DISCARDED) if discard else 0)
        self._put(position, np.array([length], "<u4").view("u1"))

    def close(self) -> None:
        del self.memory, self.consumer, self.producer, self.data
        self.map.close()
        os.close(self.fd)


@pytest.fixture
def producer() -> Iterator[Producer]:
    made = Producer(mmap.PAGESIZE)
    yield made
    made.close()


def values(taken: NDArray[np.void]) -> list[int]:
    assert np.array_equal(taken["check"], taken["value"] ^ 0x5555)
    assert np.array_equal(taken["small"], taken["value"] % 65521)
    return [int(value) for value in taken["value"]]


def test_nothing_is_read_from_an_empty_ring(producer: Producer) -> None:
    ring = Ring(producer.fd, producer.size, RECORD)
    assert len(ring.drain()) == 0
    assert ring.drain().dtype == RECORD
    ring.close()


def test_records_come_once_and_in_order_across_many_wraps(producer: Producer) -> None:
    ring = Ring(producer.fd, producer.size, RECORD)
    sent: list[int] = []
    got: list[int] = []
    rng = np.random.default_rng(1)
    while len(sent) < 5000:
        for _ in range(int(rng.integers(1, 90))):
            position = producer.reserve(len(sent))
            if position is None:
                break
            producer.commit(position)
            sent.append(len(sent))
        got += values(ring.drain())
    assert got == sent
    assert ring.most_used_bytes <= producer.size
    ring.close()


def test_a_batch_may_lie_across_the_end_of_the_ring(producer: Producer) -> None:
    ring = Ring(producer.fd, producer.size, RECORD)
    fill = producer.size // STRIDE - 2
    for value in range(fill):
        producer.commit(producer.reserve(value) or 0)
    ring.drain()
    for value in range(fill):
        position = producer.reserve(1000 + value)
        assert position is not None
        producer.commit(position)
    assert producer.size % STRIDE, "records must not fit the ring evenly, or nothing wraps"
    assert values(ring.drain()) == [1000 + value for value in range(fill)]
    ring.close()


def test_a_record_being_written_holds_back_itself_and_what_follows(producer: Producer) -> None:
    ring = Ring(producer.fd, producer.size, RECORD)
    positions = [producer.reserve(value) for value in range(5)]
    for index in (0, 1, 3, 4):
        producer.commit(positions[index] or 0)
    assert values(ring.drain()) == [0, 1]
    assert values(ring.drain()) == []
    producer.commit(positions[2] or 0)
    assert values(ring.drain()) == [2, 3, 4]
    ring.close()


def test_discarded_records_are_left_out_and_counted(producer: Producer) -> None:
    ring = Ring(producer.fd, producer.size, RECORD)
    for value in range(7):
        producer.commit(producer.reserve(value) or 0, discard=value in (0, 3, 6))
    assert values(ring.drain()) == [1, 2, 4, 5]
    assert ring.discarded == 3
    ring.close()


def test_room_is_given_back_only_for_what_was_taken(producer: Producer) -> None:
    ring = Ring(producer.fd, producer.size, RECORD)
    positions = [producer.reserve(value) for value in range(4)]
    producer.commit(positions[0] or 0)
    ring.drain()
    assert int(producer.consumer[0]) == STRIDE
    ring.close()


def test_a_second_reader_goes_on_where_the_first_stopped(producer: Producer) -> None:
    first = Ring(producer.fd, producer.size, RECORD)
    producer.commit(producer.reserve(1) or 0)
    first.drain()
    producer.commit(producer.reserve(2) or 0)
    second = Ring(producer.fd, producer.size, RECORD)
    assert values(second.drain()) == [2]
    first.close()
    second.close()


def test_a_record_of_another_size_is_refused(producer: Producer) -> None:
    ring = Ring(producer.fd, producer.size, RECORD)
    position = producer.reserve(1) or 0
    producer._put(position, np.array([RECORD.itemsize - 8], "<u4").view("u1"))
    with pytest.raises(RuntimeError, match="another size"):
        ring.drain()


def test_sizes_that_cannot_be_mapped_are_refused(producer: Producer) -> None:
    for size in (1000, mmap.PAGESIZE * 3, mmap.PAGESIZE // 2):
        with pytest.raises(ValueError, match="power of two"):
            Ring(producer.fd, size, RECORD)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["reserve", "commit", "discard", "drain"]), st.integers(0, 7)), max_size=400))
def test_any_interleaving_delivers_each_committed_record_once(actions: list[tuple[str, int]]) -> None:
    producer = Producer(mmap.PAGESIZE)
    ring = Ring(producer.fd, producer.size, RECORD)
    open_records: list[tuple[int, int]] = []
    kept: set[int] = set()
    got: list[int] = []
    value = 0
    for action, which in actions:
        if action == "reserve":
            position = producer.reserve(value)
            if position is not None:
                open_records.append((position, value))
                value += 1
        elif action == "drain":
            got += values(ring.drain())
        elif open_records:
            position, number = open_records.pop(which % len(open_records))
            producer.commit(position, discard=action == "discard")
            if action == "commit":
                kept.add(number)
    for position, number in open_records:
        producer.commit(position)
        kept.add(number)
    got += values(ring.drain())
    assert got == sorted(kept)
    ring.close()
    producer.close()


def test_weakly_ordered_machines_get_a_real_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ring_module.make_fence("x86_64") is ring_module._no_fence
    fence = ring_module.make_fence("aarch64")
    assert fence is not ring_module._no_fence
    fence()  # the system call itself works on this kernel, whatever the machine


def test_each_drain_has_its_three_barriers_in_order(producer: Producer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Position before headers, headers before data, data before the release of the room."""
    released_at: list[int] = []
    monkeypatch.setattr(
        ring_module, "make_fence", lambda machine=None: lambda: released_at.append(int(producer.consumer[0]))
    )
    ring = Ring(producer.fd, producer.size, RECORD)
    producer.commit(producer.reserve(1) or 0)
    ring.drain()
    assert released_at == [0, 0, 0]
    assert int(producer.consumer[0]) == STRIDE
    ring.close()
