"""Collective calls (NCCL, and gloo in PyTorch) as columns of the table ``collectives``."""

from __future__ import annotations

from collections import Counter as Tally
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from argus.model import calls, records
from argus.model.event_kinds import DTYPE_CODES, DTYPE_WORDS, GROUP_CALLS, NO_DTYPE, TORCH_CALLS, payload_bytes
from argus.model.losses import UNKNOWN, Owner
from argus.model.shares import Shares
from argus.tables.arrow import Origin, dictionary

_Ints = NDArray[np.integer]

_OPS = [call.kind for call in calls.CALLS]
_OP_WORDS = list(dict.fromkeys(_OPS))
_OP_CODE = np.array([_OP_WORDS.index(op) for op in _OPS], dtype=np.int32)
_NO_TENSORS = np.array([call.kind == "Barrier" for call in calls.CALLS])
GENERATION_BITS = 48
"""Addresses of user space have no more; the bits above count the process groups that were at one address."""
KEPT_ENDS = 64
"""Ends of process groups at one address: calls of groups before these have been drained."""
KEPT_ADDRESSES = 4096
"""Addresses of a process at which groups were called or ended last: four times as many as communicators are remembered
(``argus.live.job``)."""
ROOM, OF_ADDRESS = 1 << 19, 8
"""Ends of process groups that are kept in all, of some 40 B each; an address takes as much as so many. That is room for
65,000 addresses, of which an owner may have as many as stay free."""
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


@dataclass(slots=True)
class _Address:
    """Process groups of PyTorch that were at one address of a process in turn.

    Attributes:
        before: Generation of the group that the first of ``ends`` ended.
        ends: When groups here ended, ns, ascending, the newest.
        used: Whether the group that is here now has been called.
    """

    before: int
    ends: list[int] = field(default_factory=list)
    used: bool = False

    @property
    def now(self) -> int:
        """Generation of the group that is here now, or comes next."""
        return self.before + len(self.ends)


class _Process:
    """What is known of one process.

    Attributes:
        first: Generation at an address that is met now: no address that was forgotten has had it.
        addresses: Those that were used last at the end.
        size: What they take of the room. counted: The same when it was counted last.
    """

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.first = self.size = self.counted = 0
        self.addresses: OrderedDict[int, _Address] = OrderedDict()

    def use(self, handle: int) -> _Address:
        """An address is used now."""
        if (address := self.addresses.get(handle)) is None:
            address = self.addresses[handle] = _Address(self.first)
            self.size += OF_ADDRESS
        else:
            self.addresses.move_to_end(handle)
        return address

    def forget_oldest(self) -> bool:
        """Forgets the address that was used longest ago. Returns whether its group may still be called."""
        _, address = self.addresses.popitem(last=False)
        self.size -= OF_ADDRESS + len(address.ends)
        self.first = max(self.first, address.now + 1)
        return address.used


class Generations:
    """Distinguishes process groups of PyTorch that were at one address in turn: a program may destroy all of its
    groups and begin again, for ever.

    A handle stays what it is as long as its address is remembered, and no other owner's process makes it forgotten. A
    group at an address that was forgotten has a generation that the address has not had before.

    Args:
        whose: The owner of a process: asked once of each that calls groups.
        on_loss: Called with a process, and how many of its groups that may still be called were forgotten: they become
            others.
    """

    def __init__(
        self,
        whose: Callable[[int], Owner] = lambda _: UNKNOWN,
        on_loss: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        self._whose = whose
        self._on_loss = on_loss
        self._processes: dict[int, _Process] = {}
        self._of_owner: dict[Owner, OrderedDict[int, None]] = {}
        """Processes that have addresses, those that used one last at the end."""
        self._shares = Shares()
        self._size = 0

    def number(self, control: NDArray[np.void], called: NDArray[np.void]) -> None:
        """Puts the generation above the address, in place.

        Args:
            control: CONTROL rows: in ``handle`` of ends of process groups.
            called: COLLECTIVE rows: in ``comm`` of what PyTorch called.
        """
        ended = np.flatnonzero(np.isin(control["call"], _PROCESS_GROUP_ENDED))
        of_torch = np.flatnonzero(TORCH_CALLS[called["call"]])
        pids: set[int] = set()
        if len(ended):
            control["handle"][ended] += _above(self._end(control[["pid", "handle", "ts_ns"]][ended], pids))
        if len(of_torch):
            called["comm"][of_torch] += _above(self._of_calls(called[["pid", "comm", "ts_ns"]][of_torch], pids))
        if pids:
            self._make_room(pids)

    def _end(self, events: NDArray[np.void], used: set[int]) -> NDArray[np.uint64]:
        """Takes ends, shape (n,). Returns the generation of the group that each ended. ``used``: processes, added."""
        pids, handles, times = events["pid"], events["handle"], events["ts_ns"]
        order, starts, stops = _by_address(pids, handles, times)
        times = times[order]
        first = np.zeros(len(starts), np.int64)
        firsts = order[starts]
        rows = zip(*(each.tolist() for each in (pids[firsts], handles[firsts], starts, stops)), strict=True)
        for place, (pid, handle, start, stop) in enumerate(rows):
            process = self._process(pid, used)
            address = process.use(handle)
            first[place] = now = address.now
            ends = sorted([*address.ends, *times[start:stop][-KEPT_ENDS:].tolist()])[-KEPT_ENDS:]
            process.size += len(ends) - len(address.ends)
            address.before, address.ends, address.used = now + stop - start - len(ends), ends, False
        out = np.empty(len(order), np.uint64)
        out[order] = np.arange(len(order)) + np.repeat(first - starts, stops - starts)
        return out

    def _of_calls(self, calls: NDArray[np.void], used: set[int]) -> NDArray[np.uint64]:
        """Of calls, shape (n,), the generation of the group that each called. ``used``: processes, added."""
        pids, handles, times = calls["pid"], calls["comm"], calls["ts_ns"]
        order, starts, stops = _by_address(pids, handles, times)
        firsts, lasts = order[starts], times[order[stops - 1]].tolist()
        before = np.zeros(len(starts), np.int64)
        ends: list[int] = []
        have: list[int] = []
        counts: list[int] = []
        for place, (pid, handle) in enumerate(zip(pids[firsts].tolist(), handles[firsts].tolist(), strict=True)):
            address = self._process(pid, used).use(handle)
            before[place] = address.before
            if address.ends:
                ends += address.ends
                have.append(place)
                counts.append(len(address.ends))
                address.used |= lasts[place] > address.ends[-1]
            else:
                address.used = True
        out = np.empty(len(order), np.uint64)
        of = np.repeat(np.arange(len(starts)), stops - starts)
        out[order] = before[of]
        if ends:
            with_ends = np.zeros(len(starts), bool)
            with_ends[have] = True
            chosen = with_ends[of]
            of_ends = np.repeat(have, counts), np.array(ends, np.uint64)
            out[order[chosen]] += _ended_before((of[chosen], times[order[chosen]]), of_ends)
        return out

    def _process(self, pid: int, used: set[int]) -> _Process:
        process = self._processes.get(pid)
        if process is None:
            process = self._processes[pid] = _Process(self._whose(pid))
        if pid not in used:
            used.add(pid)
            its = self._of_owner.setdefault(process.owner, OrderedDict())
            its[pid] = None
            its.move_to_end(pid)
        return process

    def _make_room(self, pids: set[int]) -> None:
        """Forgets addresses of these processes beyond those of one process, and of their owners beyond their shares."""
        owners: Tally[Owner] = Tally()
        lost: Tally[int] = Tally()
        for pid in pids:
            process = self._processes[pid]
            while len(process.addresses) > KEPT_ADDRESSES:
                lost[pid] += process.forget_oldest()
            self._count(process)
            owners[process.owner] += process.size
        # Whose processes used most now comes first: who floods makes room before others are looked at.
        for owner, size in owners.most_common():
            its = self._of_owner[owner]
            while its and not self._fits(owner):
                goal = self._size - max(size // 16, 1)
                while its and self._size > goal:
                    pid = next(iter(its))
                    process = self._processes[pid]
                    lost[pid] += process.forget_oldest()
                    self._count(process)
                    if not process.addresses:
                        del its[pid]
            if not its:
                del self._of_owner[owner]
        for pid, number in lost.items():
            if number:
                self._on_loss(pid, number)

    def _fits(self, owner: Owner) -> bool:
        return 2 * self._size <= ROOM or self._shares.fits(owner, self._size / ROOM, several=True)

    def _count(self, process: _Process) -> None:
        more, process.counted = process.size - process.counted, process.size
        self._size += more
        if more > 0:
            self._shares.add(process.owner, more)
        elif more < 0:
            self._shares.remove({process.owner: -more})

    def forget(self, pids: Collection[int]) -> None:
        """Drops what is known of processes that have ended."""
        for pid in pids:
            if (process := self._processes.pop(pid, None)) is None:
                continue
            process.size = 0
            self._count(process)
            its = self._of_owner.get(process.owner, OrderedDict())
            its.pop(pid, None)
            if not its:
                self._of_owner.pop(process.owner, None)


def _by_address(pids: _Ints, handles: _Ints, times: _Ints) -> tuple[_Ints, _Ints, _Ints]:
    """(order by process, address and time, where each address begins in it, and where it ends)."""
    order = np.lexsort((times, handles, pids))
    pids, handles = pids[order], handles[order]
    begins = np.flatnonzero((pids[1:] != pids[:-1]) | (handles[1:] != handles[:-1])) + 1
    return order, np.concatenate([[0], begins]), np.append(begins, len(order))


def _ended_before(calls: tuple[_Ints, _Ints], ends: tuple[_Ints, _Ints]) -> NDArray[np.uint64]:
    """How many ends at its address are before each call. Both: (number of the address, ascending, time)."""
    number = len(calls[0])
    at, times = (np.concatenate(both) for both in zip(calls, ends, strict=True))
    is_end = np.arange(len(at)) >= number
    order = np.lexsort((is_end, times, at))  # an end at the time of a call is after it
    so_far = np.empty(len(at), np.int64)
    so_far[order] = np.cumsum(is_end[order])
    return (so_far[:number] - np.searchsorted(ends[0], calls[0])).astype(np.uint64)


def _above(generation: Any) -> Any:
    """Those beyond 65,535 are counted from 0 again: the first ones are forgotten by then."""
    return generation % (1 << 64 - GENERATION_BITS) << GENERATION_BITS
