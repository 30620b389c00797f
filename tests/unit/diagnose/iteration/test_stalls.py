"""Stalls of one rank, in whole verdicts: since when they are, and what they cost."""

from __future__ import annotations

import numpy as np
import pytest

from argus.diagnose.stored import diagnose_store
from argus.simulate.faults import parse
from argus.simulate.mesh import Mesh
from argus.simulate.write import Spec, write
from argus.store.open import Store
from argus.store.reader import query_columns

START_NS = 1_700_000_000 * 10**9
BEGUN = 30
STEPS = """
SELECT step, duration_ns FROM iterations WHERE job = {job:String} AND run = 1 AND rank = {rank:UInt32} ORDER BY step
"""


@pytest.mark.parametrize("kind", ["gc_pause", "jit_stall", "jitter"])
def test_stalls_of_one_rank_have_one_begin_and_one_cost(shared: Store, kind: str) -> None:
    fault = parse(f"{kind}:loud:ranks=6:from={BEGUN}")
    write(shared, kind, Spec(Mesh(dp=8), faults=[fault], steps=100, seed=0), run=1, start_ns=START_NS)
    verdict = diagnose_store(shared, kind, 1, keep=False)
    (finding,) = verdict["findings"]
    assert finding["ranks"] == [6]
    own = query_columns(shared, STEPS, {"job": kind, "rank": 6})
    long = own["duration_ns"] > 1.5 * np.median(own["duration_ns"])
    # The others, and with them the job's step time, learn of it a step later.
    assert finding["steps"][0] == own["step"][long][0]
    # Steps before the first stall are no part of what a step takes now.
    assert finding["share"] == 1.0
    assert verdict["slowdown"] == pytest.approx(finding["slowdown"], rel=0.01)
