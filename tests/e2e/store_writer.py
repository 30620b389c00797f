"""A writer under load, for test_store_faults.py: ``python store_writer.py URL SESSION FIRST_BATCH``.

Prints ``ack N`` once batch N is acknowledged: stored, or on disk. Ends when its standard input is closed.
"""

from __future__ import annotations

import select
import sys
import time

import numpy as np

from argus.store import spill
from argus.store.open import open_store
from argus.store.writer import Writer

ROWS = 500
T0 = 1_700_000_000_000_000_000


def main() -> None:
    url, first = sys.argv[1], int(sys.argv[2])
    store = open_store(url)
    writer = Writer(store, source="faults", flush_s=0.0, place=spill.place(store.target))
    writer.start()
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
