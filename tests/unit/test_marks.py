"""Records of PyTorch's probes become marks."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from argus import records
from argus.capture.calls import BY_SYMBOL, CALLS, Shape
from argus.semantics.marks import marks_of
from argus.semantics.phases import MARK, Role, What

Array = NDArray[np.void]

OF_KIND = {call.kind: call.id for call in CALLS if call.shape is Shape.MARK}


def seen(kind: str, ts_ns: int, *, name: bytes = b"", handle: int = 0, at_exit: int = 0, tid: int = 9) -> Array:
    row = np.zeros(1, records.MARK)
    row["ts_ns"], row["handle"], row["tid"], row["call"], row["at_exit"] = ts_ns, handle, tid, OF_KIND[kind], at_exit
    kept = name[: records.MARK_NAME_LEN]
    row["name_len"] = len(kept)
    row["name"][0, : len(kept)] = np.frombuffer(kept, np.uint8)
    return row


def marks(*rows: Array, ends_of_backward: bool = True) -> Array:
    return marks_of(np.concatenate([np.empty(0, records.MARK), *rows]), ends_of_backward=ends_of_backward)


def test_every_kind_of_record_has_its_mark() -> None:
    kinds = ("range_begin", "range_end", "backward", "wait", "work_begin", "work_end")
    found = marks(*(seen(kind, ts, handle=100 + ts, tid=ts) for ts, kind in enumerate(kinds, 1)))
    assert found.dtype == MARK
    assert found["what"].tolist() == [
        What.RANGE_BEGIN, What.RANGE_END, What.BACKWARD_BEGIN, What.WAIT, What.WORK_BEGIN, What.WORK_END,
    ]  # fmt: skip
    assert found["ts_ns"].tolist() == found["tid"].tolist() == [1, 2, 3, 4, 5, 6]
    assert found["handle"].tolist() == [101, 102, 103, 104, 105, 106]
    assert set(OF_KIND) == {*kinds, "backward_begin"}


def test_a_backward_pass_is_told_once() -> None:
    """Python's call goes through the engine: both have probes."""
    rows = [seen("backward", 1), seen("backward_begin", 2), seen("backward", 3, at_exit=1)]
    both = marks(*rows)
    assert list(zip(both["ts_ns"].tolist(), both["what"].tolist(), strict=True)) == [
        (1, What.BACKWARD_BEGIN),
        (3, What.BACKWARD_END),
    ]
    engine = marks(rows[1], ends_of_backward=False)
    assert engine["what"].tolist() == [What.BACKWARD_BEGIN]


@pytest.mark.parametrize(
    ("name", "role"),
    [
        (b"enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", Role.DATA),
        (b"DistributedDataParallel.forward", Role.FORWARD),
        (b"Optimizer.step#AdamW.step", Role.OPTIMIZER),
        (b"Optimizer.zero_grad#AdamW.zero_grad", Role.ZERO_GRAD),
        (b"Optimizer.step#" + b"x" * 200, Role.OPTIMIZER),
        (b"my own range", Role.NONE),
        ("Schlüssel".encode()[:5], Role.NONE),  # cut inside of a character
        (b"", Role.NONE),
    ],
)
def test_a_range_has_the_role_of_its_name(name: bytes, role: Role) -> None:
    assert marks(seen("range_begin", 1, name=name))["role"].tolist() == [role]


def test_roles_go_to_the_ranges_they_belong_to() -> None:
    names = [b"Optimizer.step#SGD.step", b"user", b"enumerate(DataLoader)#x", b"user", b"Optimizer.step#SGD.step"]
    rows = [seen("range_begin", 10 * i, name=name) for i, name in enumerate(names)]
    rows += [seen("range_end", 10 * i + 5) for i in range(len(names))]
    found = marks(*rows)
    expected = [Role.OPTIMIZER, Role.NONE, Role.DATA, Role.NONE, Role.OPTIMIZER]
    assert found["role"][found["what"] == What.RANGE_BEGIN].tolist() == expected
    assert not found["role"][found["what"] == What.RANGE_END].any(), "an end takes its begin's"


def test_marks_come_in_order_of_time_and_those_of_one_moment_as_they_were() -> None:
    rows = [seen("wait", 5, handle=1), seen("range_end", 2), seen("wait", 5, handle=2), seen("range_begin", 1)]
    found = marks(*rows)
    assert found["ts_ns"].tolist() == [1, 2, 5, 5]
    assert found["handle"].tolist() == [0, 0, 1, 2]


def test_what_is_no_mark_is_left_out() -> None:
    row = seen("wait", 1)
    row["call"] = BY_SYMBOL["cudaMalloc"].id
    assert len(marks(row)) == 0
    # Of these only the entry is probed.
    assert len(marks(seen("wait", 1, at_exit=1), seen("range_begin", 2, at_exit=1))) == 0
    assert len(marks()) == 0
