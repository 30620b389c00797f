"""Calls that have been entered and have not returned, as the programs' maps hold them."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from argus.capture.kernel.programs import Module
from argus.model import calls, records

# Where the record begins in "struct pending" and "struct control_pending" of bpf/.
_PENDING_AT = 32
_CONTROL_AT = 24


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
