"""What calls cost the threads that make them, file by file: each file has code, and so prices, of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from argus.capture.attachment import Attachment, subject_of
from argus.capture.kernel.programs import Map
from argus.model.calls import CALLS, FILE_SLOTS
from argus.model.records import PRICES

REFILL_NS = 5_000
"""What a program loses after a hit of PyTorch's marks, until caches and branch predictors hold its own code and data
again. Besides traps and runs it is 3.6 us of each of 7 hits a step, and some 6 us where one hit a step is left and
each meets cold caches (``scripts/bench overhead``, PyTorch: 5 and 24 rounds, and twice 30). A loop that fits the caches
loses nothing (the same bench, 1,000 and 10,000 launches a second)."""
REFILL: NDArray[np.int64] = np.zeros(256, np.int64)
"""By a call's number, ns."""
REFILL[[call.id for call in CALLS if subject_of(call) in ("backward", "ranges")]] = REFILL_NS


class CallPrices(NamedTuple):
    """What traps cost, ns by the call's number, shape (256,) each; 0: it is not probed.

    Attributes:
        now: As calls are probed now: whole, or entries alone.
        whole: With the exit, where that may be probed.
        entry: Of an entry alone.
    """

    now: NDArray[np.float64]
    whole: NDArray[np.float64]
    entry: NDArray[np.float64]

    @classmethod
    def of(cls, attachments: Iterable[Attachment], entries: Callable[[int], bool]) -> CallPrices:
        """Of whoever maps these files; the highest, where several have a function. ``entries``: whether a call's entry
        alone is probed."""
        whole, entry = np.zeros(256), np.zeros(256)
        for attachment in attachments:
            for into, prices in ((whole, attachment.prices), (entry, attachment.entry_prices)):
                for call, price in prices.items():
                    into[call] = max(into[call], price)
        alone = [call.id for call in CALLS if entries(call.id)]
        now = whole.copy()
        now[alone] = entry[alone]
        return cls(now, whole, entry)

    @classmethod
    def mean(cls, groups: Iterable[tuple[CallPrices, float]]) -> CallPrices:
        """Of several whose calls were so many: each function's, of those who can call it."""
        groups = list(groups)
        weights = np.array([weight for _, weight in groups])
        if not weights.any():
            weights = np.ones(len(groups))
        columns = []
        for column in zip(*(prices for prices, _ in groups), strict=True):
            table = np.array(column)
            share = weights[:, None] * (table > 0)
            columns.append((table * share).sum(axis=0) / np.maximum(share.sum(axis=0), 1e-9))
        return cls(*columns) if columns else cls(*np.zeros((3, 256)))


class TrapPrices:
    """Has the kernel count what each process spends on traps, and loses after them (``REFILL``). Of files in the last
    slot each owner's processes pay the highest price of those that they map themselves; until it is known which these
    are, the least of all. Any thread may write.

    Args:
        table: ``trap_prices`` of bpf/common.bpf.h.
        of_owners: ``shared_prices``.
        attachments: All files with probes.
        entries: As ``CallPrices.of`` has it.
    """

    def __init__(
        self,
        table: Map,
        of_owners: Map,
        attachments: Callable[[], Iterable[Attachment]],
        entries: Callable[[int], bool],
    ) -> None:
        self._table, self._of_owners = table, of_owners
        self._attachments, self._entries = attachments, entries
        self._shared: dict[int, int] = {}
        """The least prices in the last slot since all were written, by the call's number."""
        self._own: dict[int, Mapping[int, Attachment]] = {}
        """By an owner's number: files in the last slot that its processes map, by their ``id``."""
        self._lock = threading.Lock()

    def write(self, new: Iterable[Attachment] | None = None) -> None:
        """Writes the prices of new files, or anew those of all, which is needed when others are probed by their entries
        alone. Each place in the table is written once, however many files share it."""
        with self._lock:
            if new is None:
                self._shared = {}
            written: dict[int, int] = {}
            entries = cache(self._entries)
            for attachment in self._attachments() if new is None else new:
                for call, whole in attachment.prices.items():
                    price = attachment.entry_prices[call] if entries(call) else whole
                    if attachment.slot == FILE_SLOTS - 1:
                        price = self._shared[call] = min(self._shared.get(call, price), price)
                    written[attachment.slot << 8 | call] = price + int(REFILL[call])
            for place, price in written.items():
                self._table.set(place, price)
            if new is None:
                self._write_own(self._own)

    def share(self, files: Mapping[int, Mapping[int, Attachment]]) -> None:
        """Which files in the last slot the processes of each owner map, by its number, and by their ``id``. Others map
        none."""
        with self._lock:
            before, self._own = self._own, dict(files)
            nothing: Mapping[int, Attachment] = {}
            changed = [
                number
                for number in before.keys() | files.keys()
                if before.get(number, nothing).keys() != files.get(number, nothing).keys()
            ]
            self._write_own({number: files.get(number, nothing) for number in changed})

    def _write_own(self, files: Mapping[int, Mapping[int, Attachment]]) -> None:
        """Many owners may map thousands of the same files: what each costs is looked up once."""
        number_of, rows = dict[int, int](), list[NDArray[np.uint32]]()
        entries = np.array([self._entries(call.id) for call in CALLS])
        for each in files.values():
            for name, attachment in each.items():
                if name not in number_of:
                    number_of[name] = len(rows)
                    rows.append(_row_of(attachment, entries))
        table = np.array(rows, np.uint32).reshape(-1, 256)
        for number, each in files.items():
            row = np.zeros(1, PRICES)
            if each:
                row["of"] = table[[number_of[name] for name in each]].max(axis=0)
            self._of_owners.set(number, row.tobytes())


def _row_of(attachment: Attachment, entries: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """What a hit costs by the call's number, ns, shape (256,). ``entries``: of calls whether the entry alone is probed,
    shape (n,)."""
    row = np.zeros(256, np.uint32)
    whole, entry = attachment.prices, attachment.entry_prices
    called = [*whole]
    row[called] = [entry[call] if entries[call] else whole[call] for call in called] + REFILL[called]
    return row
