"""What PyTorch's probes saw, as the moments that phases are made of."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from argus.capture.calls import CALLS
from argus.semantics.phases import MARK, What, role_of

_NONE = 255
_ENTRY = {
    "range_begin": What.RANGE_BEGIN,
    "range_end": What.RANGE_END,
    "backward_begin": What.BACKWARD_BEGIN,
    "backward": What.BACKWARD_BEGIN,
    "wait": What.WAIT,
    "work_begin": What.WORK_BEGIN,
    "work_end": What.WORK_END,
}
_EXIT = {"backward": What.BACKWARD_END}
_WHAT = np.array([[table.get(call.kind, _NONE) for call in CALLS] for table in (_ENTRY, _EXIT)], np.uint8)
_ENGINE = next(call.id for call in CALLS if call.kind == "backward_begin")


def marks_of(events: NDArray[np.void], *, ends_of_backward: bool) -> NDArray[np.void]:
    """Marks of one process.

    Args:
        events: :data:`argus.records.MARK` rows, shape (n,).
        ends_of_backward: Whether the process's backward calls have probes of their own, which tell their ends, too. The
            engine's tell beginnings only, and would tell them twice.

    Returns:
        :data:`argus.semantics.phases.MARK` rows in order of time, shape (m,).
    """
    what = _WHAT[np.minimum(events["at_exit"], 1), events["call"]]
    kept = what != _NONE
    if ends_of_backward:
        kept &= events["call"] != _ENGINE
    rows, what = events[kept], what[kept]
    out = np.zeros(len(rows), MARK)
    out["ts_ns"], out["handle"], out["tid"], out["what"] = rows["ts_ns"], rows["handle"], rows["tid"], what
    ranges = np.flatnonzero(what == What.RANGE_BEGIN)
    if len(ranges):
        names, which = np.unique(rows["name"][ranges], axis=0, return_inverse=True)
        lengths = np.zeros(len(names), np.int64)
        lengths[which.ravel()] = rows["name_len"][ranges]
        roles = [
            role_of(name[:length].tobytes().decode(errors="replace"))
            for name, length in zip(names, lengths.tolist(), strict=True)
        ]
        out["role"][ranges] = np.array(roles, np.uint8)[which.ravel()]
    return out[np.argsort(out["ts_ns"], kind="stable")]
