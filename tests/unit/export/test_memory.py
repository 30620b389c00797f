"""What a timeline holds all along, whatever it is made of."""

from __future__ import annotations

import subprocess
import sys

LAUNCHES = 2_000_000
PROGRAM = f"""
import resource
from types import SimpleNamespace

import numpy as np

from argus.export import timeline

BATCH, made = timeline.BATCH, []


def answer(store, sql, values):
    # Each launch once as a call and once as a kernel.
    first = len(made) * BATCH % {LAUNCHES}
    made.append(sql)
    called = np.arange(first, first + BATCH, dtype=np.int64)
    return {{"rank": np.zeros(BATCH, np.uint32), "thread": np.full(BATCH, 7, np.uint32), "called": called}}


def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


timeline.query_columns = answer
shown = timeline.Timeline.__new__(timeline.Timeline)
shown._store, shown._run = None, {{}}
piece = SimpleNamespace(rows={{"launches": BATCH, "kernel_events": BATCH}}, values={{}})
shown.__dict__["pieces"] = [piece] * ({LAUNCHES} // BATCH)
before = peak_mb()
keys = shown.launches_shown()
assert len(keys) == {LAUNCHES} and (keys[1:] >= keys[:-1]).all()
print(peak_mb() - before)
"""


def test_arrows_hold_few_bytes_of_each_launch() -> None:
    """Two million of them: 16 MB as calls, as many as kernels, and what lining them up takes."""
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert float(ran.stdout) < 100
