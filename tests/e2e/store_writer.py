"""A writer under load, for test_store_faults.py: ``python store_writer.py URL FIRST_BATCH``.

Each batch is a rank of its own: rows of steps and calls, and kernels' durations as they are compressed (templates, rows
of several steps, histograms, spikes). Prints ``ack N HOW`` once batch N is acknowledged: stored, or on disk. Ends when
its standard input is closed.
"""

from __future__ import annotations

import select
import sys
import time

import numpy as np
from numpy.typing import NDArray

from argus.compress.kernels import Compressor
from argus.store import spill
from argus.store.open import open_store
from argus.store.writer import Writer

ROWS = 500
T0 = 1_700_000_000_000_000_000
COVERED, STEPS, LAUNCHES = 4, 8, 40
"""Steps that a row of kernels may cover; of a batch; launches a step."""
SPIKE = (6, 17)
"""The step and launch of each batch that takes 40 times as long. It begins at T0 + batch · 1 ms + step · 10 µs
+ launch · 1 µs."""
CHANGED = 7
"""The step of every third batch whose durations are like no other's: it has a histogram of its own."""


def durations(batch: int) -> NDArray[np.int64]:
    """How long a batch's kernels took, ns, shape (STEPS, LAUNCHES)."""
    rng = np.random.default_rng(batch)
    took = np.exp(9.0 + 0.3 * (np.arange(LAUNCHES) % 2) + 0.01 * rng.standard_normal((STEPS, LAUNCHES)))
    if batch % 3 == 0:
        took[CHANGED] = np.exp(9.0 + rng.random(LAUNCHES))
    took[SPIKE] = 40 * np.exp(9.0)
    return took.astype(np.int64)


def feed(compressor: Compressor, group: int, batch: int) -> None:
    start = T0 + batch * 1_000_000
    for step, took in enumerate(durations(batch)):
        began = start + step * 10_000
        groups = np.full(LAUNCHES, group)
        compressor.feed(batch, step, began, began + 10_000, groups, began + np.arange(LAUNCHES) * 1000, took)
    compressor.release(batch)


def main() -> None:
    url, first = sys.argv[1], int(sys.argv[2])
    store = open_store(url)
    writer = Writer(store, source="faults", flush_s=0.0, place=spill.place(store.target))
    writer.start()
    compressor = Compressor(steps_per_row=COVERED, pool=4)
    group = compressor.group("k", 7, 0, (1, 1, 1), (1, 1, 1))
    batch = first
    while not select.select([sys.stdin], [], [], 0)[0]:
        steps = np.arange(ROWS)
        common = {"job": "faults", "run": 1, "rank": batch, "host": "h", "ts": T0 + batch * 1_000_000 + steps * 1000}
        writer.append("iterations", {
            **common, "step": steps, "duration_ns": 1000 + batch, "collectives": 0, "launches": 0, "method": "test",
            "confidence": 1.0,
        })  # fmt: skip
        writer.append("launches", {
            **common, "pid": batch, "tid": 1, "call": "cuLaunchKernel", "kind": "kernel", "kernel": "k", "bytes": 0,
            "handle": 1, "stream": 0, "shared_bytes": 0, "grid": [[1, 1, 1]] * ROWS, "block": [[1]] * ROWS,
            "duration_ns": -1, "result": 0, "in_nccl": False,
        })  # fmt: skip
        feed(compressor, group, batch)
        for table, columns in compressor.take().items():
            host = {} if table in ("kernel_groups", "kernel_templates") else {"host": "h"}
            writer.append(table, {"job": "faults", "run": 1, **host, **columns})
        stored = writer.flush(timeout_s=0.5)
        while not (stored or writer.safe):
            time.sleep(0.01)
            stored = writer.flush(timeout_s=0.0)
        if not writer.rows_dropped:
            print(f"ack {batch} {'stored' if stored else 'disk'}", flush=True)
        batch += 1
    report = writer.close(timeout_s=60.0)
    print(f"end {sum(report.dropped.values())} {report.last_error}", flush=True)


if __name__ == "__main__":
    main()
