"""What calls and operations of a recording become once they are connected."""

from __future__ import annotations

import numpy as np

from argus.importers.recordings.recording import CALL, Recording, connect
from argus.model.records import GPU_OP, GPU_START_CLAMPED


def test_operations_stay_in_order_where_one_cannot_have_begun_before_its_launch() -> None:
    """Its start is moved behind its launch, which may be behind the start of others."""
    ops = np.zeros(3, GPU_OP)
    ops["start_ns"], ops["correlation"] = (1_000, 2_000, 3_000), (1, 2, 3)
    ops["end_ns"] = ops["start_ns"] + 500
    calls = np.zeros(3, CALL)
    calls["ts_ns"], calls["correlation"] = (2_500, 1_500, 2_600), (1, 2, 3)
    recording = Recording("t.sqlite", "nsys", 0, "order", 1)
    recording.functions = ["cudaLaunchKernel"]
    connect(recording, calls, ops)
    assert recording.ops["start_ns"].tolist() == [2_000, 2_500, 3_000]
    assert recording.ops["correlation"].tolist() == [2, 1, 3]
    assert (recording.ops["flags"] & GPU_START_CLAMPED > 0).tolist() == [False, True, False]
    assert recording.counters["starts_clamped"] == 1
    # Each call has the operation of its number.
    assert recording.ops["correlation"][recording.calls["op"]].tolist() == recording.calls["correlation"].tolist()
