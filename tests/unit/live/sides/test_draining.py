"""Rings are read for a loop that does not turn, and nothing is taken twice or lost."""

from __future__ import annotations

import mmap
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest

from argus.capture.kernel.ring import Ring
from argus.live.sides import draining
from argus.live.sides.draining import CallRings
from argus.model import records
from tests.unit.capture.kernel.test_ring import RECORD, STRIDE, Producer, values


@pytest.fixture
def producer() -> Iterator[Producer]:
    made = Producer(mmap.PAGESIZE)
    yield made
    made.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(draining.time, "monotonic", lambda: now[0])
    return now


def put(producer: Producer, *numbers: int) -> None:
    for number in numbers:
        position = producer.reserve(number)
        assert position is not None, "the ring is full"
        producer.commit(position)


def taken(rings: CallRings) -> list[int]:
    return [value for part in rings.take()[0]["launches"] for value in values(part)]


def test_a_loop_that_turns_is_not_relieved(producer: Producer, clock: list[float]) -> None:
    rings = CallRings({"launches": Ring(producer.fd, producer.size, RECORD)})
    rings.take()
    put(producer, 1, 2)
    clock[0] += draining.RELIEVE_S / 2
    rings.relieve(clock[0])
    assert rings.relieved == 0
    assert taken(rings) == [1, 2]


def test_a_loop_that_is_held_loses_nothing_and_gets_it_in_order(producer: Producer, clock: list[float]) -> None:
    """Several times what the ring holds."""
    rings = CallRings({"launches": Ring(producer.fd, producer.size, RECORD)})
    fill = producer.size // STRIDE
    rings.take()
    for turn in range(5):
        put(producer, *range(turn * fill, (turn + 1) * fill))
        clock[0] += 1.0
        rings.relieve(clock[0])
    put(producer, 5 * fill)
    assert taken(rings) == list(range(5 * fill + 1))
    assert rings.relieved == 5 * fill
    assert taken(rings) == []


def test_beyond_the_bound_the_ring_is_left_to_fill(producer: Producer, clock: list[float]) -> None:
    """Then the kernel counts what it has no room for."""
    rings = CallRings({"launches": Ring(producer.fd, producer.size, RECORD)}, kept_bytes=STRIDE * 2)
    for number in range(4):
        put(producer, number)
        clock[0] += 1.0
        rings.relieve(clock[0])
    assert rings.relieved == 2
    assert rings.used == 2 * STRIDE / producer.size
    assert taken(rings) == [0, 1, 2, 3], "the loop takes all of it"
    put(producer, 4)
    clock[0] += 1.0
    rings.relieve(clock[0])
    assert rings.relieved == 3, "there is room again"


def test_parts_are_given_up_as_they_are_joined() -> None:
    """64 MB that came in pieces of 1 MB: both never stand side by side."""
    parts = []
    tracemalloc.start()
    try:
        for number in range(64):
            part = np.zeros((1 << 20) // records.LAUNCH.itemsize, records.LAUNCH)
            part["ts_ns"] = number
            parts.append(part)
        del part
        before = tracemalloc.get_traced_memory()[0]
        sizes = list(map(len, parts))
        whole = draining.join_records(parts, records.LAUNCH)
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert parts == []
    assert after < before + (2 << 20)
    assert whole["ts_ns"].tolist() == np.repeat(np.arange(64), sizes).tolist()


def test_closed_rings_are_not_read(producer: Producer, clock: list[float]) -> None:
    ring = Ring(producer.fd, producer.size, RECORD)
    rings = CallRings({"launches": ring})
    rings.close()
    ring.close()
    clock[0] += 10.0
    rings.relieve(clock[0])
