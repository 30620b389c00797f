"""A simulated job of 10,240 ranks and 100 steps, stored: wall time, rows a second, memory.

There is no reference to compare with: the ratio is the minute that it may take, over the time that it takes. The engine
alone is reported as well, and CPU time, which other work on the machine does not change.
"""

from __future__ import annotations

import resource
import tempfile
import time
from pathlib import Path

from argus.simulate.mesh import Mesh
from argus.simulate.program import Program
from argus.simulate.write import Spec, write
from argus.store.open import open_store
from benches import Result

MAY_TAKE_S = 60.0


def run(rounds: int) -> Result:
    spec = Spec(Mesh(dp=80, tp=8, pp=16), Program(micro_batches=32), steps=100, calls=4, skewed=False)
    rows: dict[str, list[float]] = {name: [] for name in ("engine alone", "stored", "CPU, with the store's")}
    count = 0
    for _ in range(min(rounds, 3)):
        began = time.perf_counter()
        for _ in spec.play():
            pass
        rows["engine alone"].append(time.perf_counter() - began)
        shared = Path("/dev/shm")
        with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
            with open_store(f"chdb://{folder}/store") as store:
                began, cpu = time.perf_counter(), time.process_time()
                made = write(store, "bench", spec)
                rows["stored"].append(time.perf_counter() - began)
                rows["CPU, with the store's"].append(time.process_time() - cpu + store.engine_cpu_s())
            count = sum(made.rows.values())
    took = min(rows["stored"])
    more = {
        "rows": float(count),
        "rows_per_s": count / took,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    return Result("10,240 ranks (dp 80, tp 8, pp 16), 32 micro-batches, 100 steps", "s", rows, MAY_TAKE_S / took, more)
