"""The live view's hottest lines, waits and stacks."""

from __future__ import annotations

import numpy as np
import pytest

from argus.live.display.stack_view import Recent, hot_line, summarize
from argus.model import records
from argus.model.stacks import Frame, Stack

STACKS = {
    1: Stack((Frame("python", "main", "/t/train.py", 5), Frame("native", "gemm", "/libx.so")), "complete", "complete"),
    2: Stack((Frame("python", "load", "/t/train.py", 10),), "complete", "none"),
    3: Stack((Frame("native", "", ""),), "none", "leaf"),
}  # fmt: skip
ROWS = (
    # stack, rank, pid, tid, ns, reason
    (1, 0, 10, 10, 600, ""),
    (1, 1, 20, 20, 300, ""),
    (3, 0, 10, 11, 100, ""),
    (2, 1, 20, 20, 700, "sleep"),
    (1, 0, 10, 10, 400, "runqueue"),
    (2, 0, 10, 11, 1000, "poll"),
    (0, 0, 10, 10, 50, ""),
)


def test_lines_on_and_off_the_cpu() -> None:
    counts = np.zeros(len(ROWS), records.STACK_COUNT)
    ids, ranks, pids, tids, spent, reasons = map(list, zip(*ROWS, strict=True))
    counts["pid"], counts["tid"], counts["ns"] = pids, tids, spent
    recent = Recent(0.0, 1e-6, counts, np.array(ranks, np.uint32), np.array(ids, np.uint64), reasons)  # type: ignore[arg-type]
    recent.until = 2.0
    counts["ns"] = counts["ns"].astype(np.uint64) * 1_000_000
    view = summarize("on", 7, [recent], STACKS.get, lambda one: hot_line(STACKS[one]) if one else "")
    assert [(line.text, round(line.share, 2), line.who) for line in view.lines] == [
        ("main (train.py:5)", 0.9, "0,1"),
        ("?", 0.1, "0"),
    ]
    # Of main threads only: what a helper waits for is no news.
    assert [(line.text, round(line.share, 2), line.who, line.reason) for line in view.off_lines] == [
        ("load (train.py:10)", 0.35, "1", "sleep"),
        ("main (train.py:5)", 0.2, "0", "runqueue"),
    ]
    assert view.main == {10: pytest.approx((0.325, 0.0, 0.2)), 20: pytest.approx((0.15, 0.35, 0.0))}
    assert [stack.frames[-1] for stack in view.stacks] == [
        "gemm (libx.so)", "?", "load (train.py:10)", "gemm (libx.so)",
    ]  # fmt: skip
    assert view.waits == [("poll", 0.5), ("sleep", 0.35), ("runqueue", 0.2)]


def test_nothing_seen() -> None:
    assert summarize("off", 0, [], STACKS.get, str).lines == []
