"""What CUPTI recorded, as columns of the tables ``kernel_events``, ``gpu_usage`` and ``gpu_host_events``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from argus.capture.process.demangler import shared as demangler
from argus.capture.process.names import demangle_all
from argus.model import records
from argus.model.event_kinds import EVENT_KINDS, op_kinds
from argus.model.records import GpuKind, HostKind
from argus.tables.arrow import Origin, constant, dictionary, triples

_WORDS: dict[HostKind, dict[int, str]] = {
    HostKind.SYNCHRONIZATION: {  # CUpti_ActivitySynchronizationType
        1: "event_synchronize",
        2: "stream_wait_event",
        3: "stream_synchronize",
        4: "context_synchronize",
    },
    HostKind.OVERHEAD: {  # CUpti_ActivityOverheadKind
        1: "driver_compiler",
        1 << 16: "buffer_flush",
        2 << 16: "instrumentation",
        3 << 16: "resource",
        4 << 16: "module_loading",
        5 << 16: "function_loading",
        6 << 16: "command_buffer_full",
        7 << 16: "buffer_request",
        8 << 16: "uvm_init",
    },
    HostKind.JIT: {1: "cache_load", 2: "cache_store", 3: "compile"},  # CUpti_ActivityJitOperationType
}
_EVENTS = [HostKind.SYNCHRONIZATION, HostKind.OVERHEAD, HostKind.JIT, HostKind.MODULE, HostKind.MARKER]


_AT_ONCE = 256
"""Names that are demangled before there has to be room for them."""


class Room(Protocol):
    """What names may take (``argus.cupti.names_room.Part``)."""

    def take(self, text: str) -> str | None:
        """Takes room for a text. Returns the one that is kept; None: there is no room."""


class Names:
    """The names of one process: by the ids in its records, demangled as ``launches.kernel`` is.

    Args:
        pid: The process.
        room: For what they are called when demangled; where there is none they stay as they are. None: any.

    Attributes:
        codes: By id: place in ``words``. Shape (ids,).
        words: Each name once.
    """

    def __init__(self, pid: int = 0, room: Room | None = None) -> None:
        self._pid = pid
        self._room = room
        self.words: list[str] = [""]
        self.codes = np.zeros(1, np.int32)
        self._places = {"": 0}

    def learn(self, symbols: Sequence[str]) -> None:
        """Takes the names that are new. ``symbols``: all names by id, the first is of none."""
        if len(symbols) <= len(self.codes):
            return
        fresh = []
        for first in range(len(self.codes), len(symbols), _AT_ONCE):
            part = symbols[first : first + _AT_ONCE]
            for symbol, name in zip(part, demangle_all(part, self._pid), strict=True):
                word = name if name is symbol or name in self._places else self._kept(name) or symbol
                place = self._places.setdefault(word, len(self.words))
                if place == len(self.words):
                    self.words.append(word)
                fresh.append(place)
        self.codes = np.concatenate([self.codes, np.array(fresh, np.int32)])

    def _kept(self, name: str) -> str:
        """The one that is kept; empty: there is no room for it."""
        kept = name if self._room is None else self._room.take(name)
        demangler.given_up += kept is None
        return kept or ""

    def of(self, ids: NDArray[np.uint32]) -> NDArray[np.int32]:
        """Places in ``words`` of names by id; 0, which is empty, for an id that nobody named."""
        places: NDArray[np.int32] = self.codes[np.where(ids < len(self.codes), ids, 0)]
        return places


def _used(codes: NDArray[np.int32], words: Sequence[str]) -> pa.DictionaryArray:
    """A dictionary of the words that occur: a process may know thousands of kernels, and a batch have ten."""
    present = np.flatnonzero(np.bincount(codes, minlength=1))
    place = np.zeros(len(words), np.int32)
    place[present] = np.arange(len(present), dtype=np.int32)
    return dictionary(place[codes], [words[code] for code in present.tolist()])


def _times(ns: NDArray[np.int64], offset_ns: int) -> pa.Array:
    return pa.array(ns + offset_ns, pa.int64()).cast(pa.timestamp("ns", tz="UTC"))


def _common(origin: Origin, rank: int, pid: int, count: int) -> dict[str, object]:
    return {
        "job": constant(origin.job, count),
        "run": np.full(count, origin.run, np.uint32),
        "rank": np.full(count, rank, np.uint32),
        "host": constant(origin.host, count),
        "pid": np.full(count, pid, np.uint32),
    }


def kernel_events(ops: NDArray[np.void], origin: Origin, rank: int, pid: int, names: Names) -> pa.Table:
    """Rows of the table ``kernel_events``.

    Args:
        ops: ``records.GPU_OP`` of one process, shape (n,).
        origin: Where they come from.
        rank: The process's rank.
        pid: The process, as the host numbers it.
        names: Its names.
    """
    kernel = ops["kind"] == GpuKind.KERNEL
    start, launch = ops["start_ns"].astype(np.int64), ops["launch_ns"].astype(np.int64)
    matched = (ops["flags"] & records.GPU_LAUNCH_MATCHED) != 0
    return pa.table(
        {
            **_common(origin, rank, pid, len(ops)),
            **{name: np.ascontiguousarray(ops[name]) for name in ("device", "context", "stream")},
            "kind": dictionary(op_kinds(ops), EVENT_KINDS),
            "name": _used(names.of(ops["name"]), names.words),
            "ts": _times(start, origin.mono_offset_ns),
            "duration_ns": ops["end_ns"].astype(np.int64) - start,
            "launch_ts": _times(np.where(matched, launch + origin.mono_offset_ns, 0), 0),
            "issue_latency_ns": np.where(matched, start - launch, records.NOT_MEASURED),
            "launch_tid": np.ascontiguousarray(ops["launch_tid"]),
            "launch_probed": (ops["flags"] & records.GPU_LAUNCH_PROBED) != 0,
            **{name: np.ascontiguousarray(ops[name]) for name in ("correlation", "graph", "graph_node")},
            "grid": triples(ops["grid"], kernel, pa.uint32()),
            "block": triples(ops["block"].astype(np.uint16), kernel, pa.uint16()),
            **{name: np.ascontiguousarray(ops[name]) for name in ("registers", "shared_static", "shared_dynamic")},
            "bytes": np.ascontiguousarray(ops["bytes"]),
        }
    )


def is_event(host: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which records of the CPU side are rows of ``gpu_host_events``: all but calls. Shape (n,)."""
    return np.isin(host["kind"], _EVENTS)


def gpu_host_events(
    events: NDArray[np.void], origin: Origin, rank: int, pid: int, names: Names, now_ns: int
) -> pa.Table:
    """Rows of the table ``gpu_host_events``.

    Args:
        events: ``records.HOST_OP`` of one process, those that ``is_event`` chooses.
        origin: Where they come from.
        rank: The process's rank.
        pid: The process, as the host numbers it.
        names: Its names.
        now_ns: The time that records without one get.
    """
    words, codes = [*names.words], names.of(events["name"])
    places = {word: place for place, word in enumerate(words)}
    for kind, known in _WORDS.items():
        of_kind = events["kind"] == kind
        for code in np.unique(events["code"][of_kind]).tolist():
            word = known.get(code, "")
            place = places.setdefault(word, len(words))
            if place == len(words):
                words.append(word)
            codes[of_kind & (events["code"] == code)] = place
    start, end = events["start_ns"].astype(np.int64), events["end_ns"].astype(np.int64)
    timed = start > 0
    return pa.table(
        {
            **_common(origin, rank, pid, len(events)),
            "tid": np.ascontiguousarray(events["tid"]),
            "kind": dictionary(events["kind"].astype(np.int32), ["", *(kind.name.lower() for kind in HostKind)]),
            "name": _used(codes, words),
            "code": np.ascontiguousarray(events["code"]),
            "ts": _times(np.where(timed, start, now_ns), origin.mono_offset_ns),
            "duration_ns": np.where(timed, end - start, records.NOT_MEASURED),
            **{name: np.ascontiguousarray(events[name]) for name in ("correlation", "stream", "result")},
        }
    )


def gpu_steps(steps: NDArray[np.void], origin: Origin, rank: int, pid: int) -> pa.Table:
    """Rows of the table ``gpu_steps``. ``steps``: ``semantics.gpu.usage.STEP_USAGE`` of one process."""
    void = steps["idle_ns"] / np.maximum(steps["duration_ns"], 1)
    return gpu_usage(steps, origin, rank, pid).append_column("void_share", pa.array(void.astype(np.float32)))


def gpu_phases(
    phases: NDArray[np.void], origin: Origin, rank: int, pid: int, words: Sequence[str], methods: Sequence[str]
) -> pa.Table:
    """Rows of the table ``gpu_phases``. ``phases``: ``semantics.phases.gpu.GPU_PHASE`` of one process; ``words``,
    ``methods``: what its codes are called."""
    same = ("device", "step", "duration_ns", "overlapped_ns", "operations", "confidence")
    return pa.table(
        {
            **_common(origin, rank, pid, len(phases)),
            "ts": _times(phases["start_ns"], origin.mono_offset_ns),
            "phase": dictionary(phases["phase"].astype(np.int32), list(words)),
            "method": dictionary(phases["method"].astype(np.int32), list(methods)),
            **{name: np.ascontiguousarray(phases[name]) for name in same},
        }
    )


def gpu_collectives(
    collectives: NDArray[np.void], origin: Origin, rank: int, pid: int, words: Sequence[str]
) -> pa.Table:
    """Rows of the table ``gpu_collectives``. ``collectives``: ``semantics.phases.gpu.GPU_COLLECTIVE`` of one process;
    ``words``: what its codes are called."""
    same = ("device", "step", "comm", "peer", "calls", "bytes", "duration_ns", "shortest_ns")
    distinct = list(dict.fromkeys(words))
    place = np.array([distinct.index(word) for word in words], np.int32)
    return pa.table(
        {
            **_common(origin, rank, pid, len(collectives)),
            "ts": _times(collectives["start_ns"], origin.mono_offset_ns),
            "op": dictionary(place[collectives["what"]], distinct),
            **{name: np.ascontiguousarray(collectives[name]) for name in same},
        }
    )


def gpu_usage(windows: NDArray[np.void], origin: Origin, rank: int, pid: int) -> pa.Table:
    """Rows of the table ``gpu_usage``. ``windows``: ``semantics.gpu.usage.USAGE`` of one process."""
    fields = [name for name in windows.dtype.names or () if name != "start_ns"]
    return pa.table(
        {
            **_common(origin, rank, pid, len(windows)),
            "ts": _times(windows["start_ns"], origin.mono_offset_ns),
            **{name: np.ascontiguousarray(windows[name]) for name in fields},
        }
    )
