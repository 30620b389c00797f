"""The logs in which each CPU counts, in a file that stands in for the kernel's memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest

from argus.capture.kernel.counts import GRACE_NS, CountLogs, value_bytes
from argus.model import records

WINDOW_NS = 1 << records.WINDOW_BITS
ROWS, CPUS = 8, 3
LATE = GRACE_NS + 1


class Kernel:
    """Writes as ``tally`` of bpf/stacks_count.bpf.h does."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("logs")
        size = -(-CPUS * value_bytes(ROWS) // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(self.fd, size)
        self.memory = mmap.mmap(self.fd, size)
        self.dropped = 0

    def log(self, cpu: int) -> tuple[np.ndarray, np.ndarray]:
        at = cpu * value_bytes(ROWS)
        head = np.ndarray(1, records.LOG, self.memory, at)
        return head, np.ndarray(ROWS, records.STACK_COUNT, self.memory, at + records.LOG.itemsize)

    def count(self, cpu: int, now_ns: int, stack: int) -> None:
        head, rows = self.log(cpu)
        window = now_ns >> records.WINDOW_BITS
        if head["window"][0] != window:
            head["window_begin"], head["window"] = head["written"], window
        written, taken = int(head["written"][0]), int(head["taken"][0])
        for number in range(max(int(head["window_begin"][0]), taken), written):
            if rows[number % ROWS]["stack"] == stack:
                rows[number % ROWS]["count"] += 1
                return
        if written - taken >= ROWS:
            self.dropped += 1
            return
        row = rows[written % ROWS]
        row["stack"], row["window"], row["count"] = stack, window, 1
        head["written"] += 1


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    made = Kernel()
    yield made
    os.close(made.fd)


@pytest.fixture
def logs(kernel: Kernel) -> Iterator[CountLogs]:
    made = CountLogs(kernel.fd, CPUS, ROWS)
    yield made
    made.close()


def test_rows_are_taken_once_their_window_is_over(kernel: Kernel, logs: CountLogs) -> None:
    kernel.count(1, 5 * WINDOW_NS, 11)
    kernel.count(1, 5 * WINDOW_NS + 3, 11)
    assert logs.used == 1 / ROWS
    assert len(logs.take(6 * WINDOW_NS + GRACE_NS - 1)) == 0, "a program may have begun in it, and count yet"
    assert logs.until_ns == 5 * WINDOW_NS
    kernel.count(1, 6 * WINDOW_NS, 11)
    rows = logs.take(6 * WINDOW_NS)
    assert rows[["stack", "count", "window"]].tolist() == [(11, 2, 5)], "the CPU itself is in the next one"
    rows = logs.take(7 * WINDOW_NS + LATE)
    assert rows[["stack", "count", "window"]].tolist() == [(11, 1, 6)]
    assert logs.until_ns == 7 * WINDOW_NS
    assert logs.used == 0
    kernel.count(1, 7 * WINDOW_NS + LATE, 11)
    assert len(logs.take(7 * WINDOW_NS + LATE)) == 0
    assert len(logs.take(7 * WINDOW_NS + LATE, final=True)) == 1, "nobody counts any more"
    assert logs.until_ns == 7 * WINDOW_NS + LATE


def test_what_is_counted_after_its_window_was_taken_comes_later(kernel: Kernel, logs: CountLogs) -> None:
    """A virtual CPU can be away for longer than the grace."""
    kernel.count(0, WINDOW_NS, 11)
    assert logs.take(2 * WINDOW_NS + LATE)["count"].tolist() == [1]
    kernel.count(0, 2 * WINDOW_NS - 1, 11)
    assert logs.take(2 * WINDOW_NS + LATE)["count"].tolist() == [1]


def test_all_that_finds_room_is_taken_once(kernel: Kernel, logs: CountLogs) -> None:
    rng = np.random.default_rng(4)
    now, counted, taken = WINDOW_NS, 0, []
    for _ in range(1000):
        now += int(rng.integers(WINDOW_NS // 4))
        kernel.count(int(rng.integers(CPUS)), now, int(rng.integers(3)))
        counted += 1
        if rng.random() < 0.2:
            taken.append(logs.take(now))
    taken.append(logs.take(now, final=True))
    rows = np.concatenate(taken)
    assert 0 < kernel.dropped < counted / 4
    assert int(rows["count"].sum()) + kernel.dropped == counted
    assert len(rows) < counted - kernel.dropped, "equal ones are counted"
