"""Collective calls (NCCL, and gloo in PyTorch) as columns of the table ``collectives``."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from argus.model import calls, records
from argus.model.event_kinds import DTYPE_CODES, DTYPE_WORDS, GROUP_CALLS, NO_DTYPE, TORCH_CALLS, payload_bytes
from argus.tables.arrow import Origin, dictionary

_OPS = [call.kind for call in calls.CALLS]
_OP_WORDS = list(dict.fromkeys(_OPS))
_OP_CODE = np.array([_OP_WORDS.index(op) for op in _OPS], dtype=np.int32)
_NO_TENSORS = np.array([call.kind == "Barrier" for call in calls.CALLS])
GENERATION_BITS = 48
"""Addresses of user space have no more; the bits above count the process groups that were at one address."""
KEPT_ENDS = 64
"""Ends of process groups at one address: calls of groups before these have been drained."""
KEPT_ADDRESSES = 4096
"""Addresses of which ends are known, those where a group ended last: four times as many as communicators are remembered
(``argus.live.roster``), so that groups at an address that begins with the first generation again meet no older ones."""
_PROCESS_GROUP_ENDED = [call.id for call in calls.CALLS if call.kind == "comm_end" and call.layer is calls.Layer.TORCH]
_REDOP_WORDS = [*calls.NCCL_REDOPS, "custom", ""]
_NO_REDOP = 255


def to_table(collectives: NDArray[np.void], origin: Origin, ranks: NDArray[np.uint32]) -> pa.Table:
    """Rows of the table ``collectives``. Arguments as in ``argus.tables.launches.to_table``."""
    group = GROUP_CALLS[collectives["call"]]
    dtype = DTYPE_CODES[collectives["dtype"]]
    dtype[group | _NO_TENSORS[collectives["call"]]] = NO_DTYPE
    redop = np.minimum(collectives["redop"], len(calls.NCCL_REDOPS)).astype(np.int32)
    redop[collectives["redop"] == _NO_REDOP] = len(_REDOP_WORDS) - 1
    return pa.table(
        {
            **origin.columns(collectives, ranks),
            "comm": np.ascontiguousarray(collectives["comm"]),
            "op": dictionary(_OP_CODE[collectives["call"]], _OP_WORDS),
            "seq": np.ascontiguousarray(collectives["seq"]),
            "bytes": payload_bytes(collectives),
            "count": np.ascontiguousarray(collectives["count"]),
            "dtype": dictionary(dtype, DTYPE_WORDS),
            "redop": dictionary(redop, _REDOP_WORDS),
            "peer": np.ascontiguousarray(collectives["peer"]),
            "stream": np.where(TORCH_CALLS[collectives["call"]], 0, collectives["stream"]).astype(np.uint64),
            "in_group": (collectives["flags"] & records.FLAG_IN_GROUP) != 0,
        }
    )


def communicator_calls(control: NDArray[np.void], origin: Origin, ranks: NDArray[np.uint32]) -> pa.Table:
    """Rows of the table ``communicator_calls``, from control records about communicators: a few a process.

    Arguments as in ``argus.tables.launches.to_table``.
    """
    ids = [row["data"][: int(row["name_len"])].tobytes().hex() for row in control]
    return pa.table(
        {
            **origin.columns(control, ranks),
            "call": dictionary(control["call"].astype(np.int32), [call.symbol for call in calls.CALLS]),
            "comm": np.ascontiguousarray(control["handle"]),
            "parent": np.ascontiguousarray(control["parent"]),
            "comm_rank": np.ascontiguousarray(control["rank"]),
            "nranks": np.ascontiguousarray(control["nranks"]),
            "color": np.ascontiguousarray(control["color"]),
            "key": np.ascontiguousarray(control["key"]),
            "unique_id": pa.array(ids, pa.string()),
        }
    )


class Generations:
    """Distinguishes process groups of PyTorch that were at one address in turn: a program may destroy all of its
    groups and begin again, for ever."""

    def __init__(self) -> None:
        self._ended: dict[tuple[int, int], tuple[int, list[int]]] = {}
        """By process and address: when process groups there ended, ns, the newest; and how many did before these."""

    def number(self, control: NDArray[np.void], called: NDArray[np.void]) -> None:
        """Puts the generation above the address, in place.

        Args:
            control: CONTROL rows: in ``handle`` of ends of process groups.
            called: COLLECTIVE rows: in ``comm`` of what PyTorch called.
        """
        ended = np.flatnonzero(np.isin(control["call"], _PROCESS_GROUP_ENDED))
        for place in ended[np.argsort(control["ts_ns"][ended], kind="stable")].tolist():
            event = control[place]
            key = int(event["pid"]), int(event["handle"])
            before, ends = self._ended.pop(key, (0, []))
            ends = sorted([*ends, int(event["ts_ns"])])
            more = max(len(ends) - KEPT_ENDS, 0)
            self._ended[key] = before + more, ends[more:]
            event["handle"] += _above(before + len(ends) - 1)
        for key in list(itertools.islice(self._ended, max(len(self._ended) - KEPT_ADDRESSES, 0))):
            del self._ended[key]
        of_torch = np.flatnonzero(TORCH_CALLS[called["call"]]) if self._ended else ()
        if not len(of_torch):
            return
        columns = called["pid"][of_torch].astype(np.uint64), called["comm"][of_torch]
        keys, which = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
        for place, (pid, handle) in enumerate(keys.tolist()):
            if (known := self._ended.get((pid, handle))) is not None:
                before, ends = known
                of_place = of_torch[which.ravel() == place]
                generation = before + np.searchsorted(ends, called["ts_ns"][of_place])
                called["comm"][of_place] += _above(generation.astype(np.uint64))

    def forget(self, pids: Collection[int]) -> None:
        """Drops what is known of processes that have ended."""
        for key in [key for key in self._ended if key[0] in pids]:
            del self._ended[key]


def _above(generation: Any) -> Any:
    """Those beyond 65,535 are counted from 0 again: the first ones are forgotten by then."""
    return generation % (1 << 64 - GENERATION_BITS) << GENERATION_BITS
