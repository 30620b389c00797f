"""What the programs' maps hold of traced processes: calls that have not returned, and numbers of calls."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from argus.capture.kernel.programs import Module
from argus.model import calls, records

# Where the record begins in "struct pending", "struct control_pending" and "struct math_pending" of bpf/.
_PENDING_AT = 32
_CONTROL_AT = 24
_MATH_AT = 16
_SEQUENCE_KEY = np.dtype([("comm", "<u8"), ("tgid", "<u4"), ("p2p", "<u4")])


def in_progress(module: Module) -> tuple[NDArray[np.void], NDArray[np.void], NDArray[np.void]]:
    """Calls entered and not returned: (CUDA calls, NCCL calls, about communicators), flagged unfinished."""
    launches: list[bytes] = []
    collectives: list[bytes] = []
    _, values = module["control_inflight"].read()
    control = [value[_CONTROL_AT:].tobytes() for value in values]
    for key, value in zip(*module["inflight"].read(), strict=True):
        raw = value.tobytes()
        cookie = struct.unpack_from("<Q", raw, _PENDING_AT - 8)[0]
        if cookie >> calls.EXIT_BIT & 1:
            is_collective = int(key[0]) & 3 == 1
            kind, into = (records.COLLECTIVE, collectives) if is_collective else (records.LAUNCH, launches)
            into.append(raw[_PENDING_AT : _PENDING_AT + kind.itemsize])
    result = (
        np.frombuffer(b"".join(launches), records.LAUNCH).copy(),
        np.frombuffer(b"".join(collectives), records.COLLECTIVE).copy(),
        np.frombuffer(b"".join(control), records.CONTROL).copy(),
    )
    for array in result:
        array["flags"] |= records.FLAG_UNFINISHED
    return result


def forget(module: Module, pid: int) -> None:
    """Removes all entries of a process that is no target any more."""
    for name in ("inflight", "control_inflight", "math_inflight", "group_depth", "sequences"):
        table = module[name]
        keys, values = table.read()
        for key in keys[_pids(name, keys, values) == pid] if len(keys) else ():
            table.delete(key.tobytes())


def _pids(name: str, keys: NDArray[np.uint8], values: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Whose the entries of a map are: shape (entries,)."""
    if name == "sequences":
        return keys.view(_SEQUENCE_KEY)[:, 0]["tgid"]
    if name == "group_depth":
        return _words(values, 4)
    if name == "inflight":
        launches, collectives = (
            _words(values, _PENDING_AT + _pid_at(kind)) for kind in (records.LAUNCH, records.COLLECTIVE)
        )
        return np.where(keys[:, 0] & 3 == 1, collectives, launches)
    at, kind = (_CONTROL_AT, records.CONTROL) if name == "control_inflight" else (_MATH_AT, records.MATH)
    return _words(values, at + _pid_at(kind))


def _pid_at(kind: np.dtype[np.void]) -> int:
    fields = kind.fields
    assert fields is not None
    return fields["pid"][1]


def _words(values: NDArray[np.uint8], at: int) -> NDArray[np.uint32]:
    return np.ascontiguousarray(values[:, at : at + 4]).view(np.uint32)[:, 0]
