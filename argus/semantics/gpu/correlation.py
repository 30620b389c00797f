"""Which call launched an operation on the GPU: by CUPTI's correlation ids, then by the probes on the same call.

CUPTI hands out records in buffers, seconds late and in no order between threads: an operation may come before the
record of the call that launched it, or long after. Calls are kept for the operations that may still come; operations
wait a moment for their call.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from argus.model import records
from argus.model.calls import CALLS
from argus.semantics.gpu.joins import last_of, running_max

WAIT_NS = 3_000_000_000
"""How long an operation waits for the record of its call: three rounds of delivered buffers."""
KEEP_CALLS = 2_000_000
"""Calls of a process kept for operations that have not come: 26 bytes each."""
KEEP_CALLS_NS = 120_000_000_000
"""The same by age, against the newest call: a process that is stuck makes no newer one. And by when they came, however
old they say they are, but for the newest ``KEEP_NEWEST``."""
KEEP_NEWEST = 65_536
"""Calls that may wait for their operations for as long as a process is stuck: more than a GPU's queues hold."""
KEEP_BATCHES = 128
"""Batches that these calls are kept in, by when they came: operations are compared with each. Calls come about once a
second, so that there are 120 of them; where there are more, small ones are put together."""
KEEP_PROBED = 500_000
"""Probes' launches kept for calls whose record has not come."""
KEEP_PROBED_NS = 15_000_000_000
KEEP_THREADS = 4096
PROBE_REACH_NS = 100_000
"""A probe fires at a function's first instruction, CUPTI's own clock reading follows in the same call."""
ASK_TIDS_NS = 1_000_000_000
"""How often the PID namespace is looked up, at most; a thirtieth of that where it explains nothing."""
SKEW_NS = 1_000_000
"""A call that began so much later than the operation did not launch it: the id was another call's before."""

_CALL = np.dtype(
    [
        ("correlation", "<u4"),
        ("tid", "<u4"),
        ("begin_ns", "<i8"),
        ("end_ns", "<i8"),
        ("probed", "?"),
        ("matched", "?"),
    ]
)
"""``matched``: an operation of it has come; a graph has more than one."""
_NO_IDS = 1 << 32, 0
KEPT_BYTES = records.GPU_OP.itemsize + 8, _CALL.itemsize, 12
"""Bytes of each of ``Correlator.kept``."""
_MAKES_WORK = np.array([call.kind in ("kernel", "graph", "memset") or call.kind.startswith("memcpy") for call in CALLS])


@dataclass
class _Batch:
    """Calls as ``_outermost`` orders them, one at least.

    Attributes:
        came_ns: When the newest of them came.
        matched: How many are ``matched``.
    """

    calls: NDArray[np.void]
    came_ns: int
    matched: int

    def __len__(self) -> int:
        return len(self.calls)


class Correlator:
    """Finds the launches of one process's GPU operations.

    Args:
        api: Whether there will be records of calls. Without them nothing waits, and nothing is matched.
        host_tids: Maps the process's own thread ids, of its PID namespace, to the host's; None: not now. Called, with
            the threads of the probes' launches, when none of these is on a thread that CUPTI names.
    """

    def __init__(
        self, *, api: bool = True, host_tids: Callable[[Sequence[int]], Mapping[int, int] | None] | None = None
    ) -> None:
        self.counters: Tally[str] = Tally()
        """gpu_ops, gpu_launch_matched, gpu_launch_unmatched, gpu_launch_probed, gpu_start_clamped,
        gpu_started_before_launch_returned: operations handed out, and what is known of them."""
        self._api = api
        self._host_tids = host_tids
        self._tids: Mapping[int, int] = {}
        self._ask_tids_ns = 0
        self.without_call = 0
        """Operations handed out without a launch, as their call had been dropped for want of room (``keep``)."""
        self._calls: deque[_Batch] = deque()
        self._calls_kept = 0
        self._now_ns = 0
        """When something was fed last."""
        self._gone, self._gone_until_ns = _NO_IDS, 0
        """The lowest and the highest id of calls that ``keep`` dropped without counting them, and until when that
        matters: by then they are dropped anyway."""
        self._newest_call_ns = 0
        self._last_end: dict[int, int] = {}
        self._waiting = np.empty(0, records.GPU_OP)
        self._since = np.empty(0, np.int64)
        self._probe_ts = np.empty(0, np.int64)
        self._probe_tid = np.empty(0, np.uint32)

    @property
    def waiting(self) -> int:
        """Operations that have not been handed out."""
        return len(self._waiting)

    @property
    def kept(self) -> tuple[int, int, int]:
        """Operations that wait, calls, and the probes' launches: how many are kept, ``KEPT_BYTES`` each."""
        return len(self._waiting), self._calls_kept, len(self._probe_ts)

    @property
    def young_calls(self) -> int:
        """Calls whose operations are still to be expected: those that came within ``WAIT_NS``."""
        since = self._now_ns - WAIT_NS
        return sum(len(batch) for batch in self._calls if batch.came_ns > since)

    def keep(self, waiting: int, calls: int, probed: int) -> int:
        """Keeps less, as others need the room. Operations beyond wait no longer: they are handed out next time.

        Of the calls that came more than ``WAIT_NS`` ago those go first of which an operation has come. Nothing is lost
        with old calls but the launches of operations that come yet: ``without_call`` counts these.

        Args:
            waiting: Operations that may wait; the newest do.
            calls: Calls that are kept: those that came last.
            probed: The probes' launches that are kept, the newest.

        Returns:
            How many it dropped of the probes' launches, and of the calls that came within ``WAIT_NS`` and of which no
            operation has come.
        """
        self._since[: max(len(self._since) - waiting, 0)] -= WAIT_NS
        first = max(len(self._probe_ts) - probed, 0)
        self._probe_ts, self._probe_tid = self._probe_ts[first:].copy(), self._probe_tid[first:].copy()
        lost = first
        for batch in self._drop_matched(calls) + self._leave(calls):
            counted = ~batch.calls["matched"] & (batch.came_ns > self._now_ns - WAIT_NS)
            lost += int(counted.sum())
            ids = batch.calls["correlation"][~counted]
            if len(ids):
                self._gone = min(self._gone[0], int(ids.min())), max(self._gone[1], int(ids.max()))
                self._gone_until_ns = self._now_ns + KEEP_CALLS_NS
        return lost

    @property
    def match_rate(self) -> float:
        """Share of the operations whose launch is known; -1: there were none."""
        total = self.counters["gpu_ops"]
        return self.counters["gpu_launch_matched"] / total if total else -1.0

    def feed(
        self, gpu: NDArray[np.void], host: NDArray[np.void], probed: NDArray[np.void], now_ns: int
    ) -> NDArray[np.void]:
        """Takes what has come, and hands out the operations that are ready.

        Args:
            gpu: ``records.GPU_OP``, new ones.
            host: ``records.HOST_OP``, new ones; what is not a call is skipped.
            probed: ``records.LAUNCH`` of this process by the probes, by time. All that were made before the newest call
                in ``host`` must have been given by now.
            now_ns: The time.

        Returns:
            ``records.GPU_OP`` with ``launch_*`` filled where the launch is known.
        """
        self.feed_probed(probed, now_ns)
        self._now_ns = now_ns
        if now_ns > self._gone_until_ns:
            self._gone = _NO_IDS
        if not self._api:
            return self._hand_out(gpu.copy())
        calls = self._learn(host, now_ns)
        gpu = gpu.copy()
        if len(gpu):
            first, last = gpu["correlation"].min(), gpu["correlation"].max()
            for batch in self._calls:
                if batch.calls["correlation"][0] <= last and first <= batch.calls["correlation"][-1]:
                    batch.matched += _match(gpu, batch.calls)
        if calls is not None:
            # Those that wait have been compared with the older calls already.
            matched = _match(self._waiting, calls)
            self._keep(_Batch(calls, now_ns, matched + _match(gpu, calls)))
        self._drop_old(now_ns)
        known = np.concatenate([self._waiting, gpu])
        since = np.concatenate([self._since, np.full(len(gpu), now_ns)])
        ready = (
            ((known["flags"] & records.GPU_LAUNCH_MATCHED) != 0)
            | (since + WAIT_NS <= now_ns)
            | (known["correlation"] == 0)
        )
        self._waiting, self._since = known[~ready], since[~ready]
        return self._hand_out(known[ready])

    def flush(self) -> NDArray[np.void]:
        """Hands out what still waits: no more records will come."""
        rest, self._waiting = self._waiting, self._waiting[:0]
        self._since = self._since[:0]
        return self._hand_out(rest)

    def on_host(self, tids: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Threads as the host numbers them, where that is known to differ."""
        host: NDArray[np.uint32] = tids.copy()
        if self._tids:
            distinct, place = np.unique(tids, return_inverse=True)
            for at in np.flatnonzero(np.isin(distinct, list(self._tids))).tolist():
                distinct[at] = self._tids[int(distinct[at])]
            host = distinct[place]
        return host

    # ---- calls

    def _learn(self, host: NDArray[np.void], now_ns: int) -> NDArray[np.void] | None:
        """The outermost calls among new records, by correlation id, with the probes' launches."""
        api = host[(host["kind"] == records.HostKind.RUNTIME) | (host["kind"] == records.HostKind.DRIVER)]
        if not len(api):
            return None
        calls = np.zeros(len(api), _CALL)
        calls["correlation"], calls["tid"] = api["correlation"], api["tid"]
        calls["begin_ns"], calls["end_ns"] = api["start_ns"], api["end_ns"]
        calls = _outermost(calls)
        self._find_probed(calls, now_ns)
        own = ~calls["probed"]
        calls["tid"][own] = self.on_host(calls["tid"][own])
        return calls

    def _drop_oldest(self) -> _Batch:
        batch = self._calls.popleft()
        self._calls_kept -= len(batch)
        return batch

    def _leave(self, calls: int) -> list[_Batch]:
        """Keeps no more than so many calls: those that came last, and of a batch those that began last. Returns the
        others."""
        gone = []
        while self._calls and self._calls_kept - len(self._calls[0]) >= calls:
            gone.append(self._drop_oldest())
        if self._calls_kept > calls:
            oldest = self._calls[0]
            order = np.argsort(oldest.calls["begin_ns"], kind="stable")
            left = np.ones(len(oldest), bool)
            left[order[: self._calls_kept - calls]] = False
            gone.append(self._take_out(oldest, ~left))
        return gone

    def _drop_matched(self, calls: int) -> list[_Batch]:
        """Where there are more than so many calls, drops those that came long ago and of which an operation has come,
        a batch after the other. Returns them. Batches that have few of them are left: to copy the others is dear."""
        gone: list[_Batch] = []
        for batch in [*self._calls]:
            if self._calls_kept <= calls or batch.came_ns > self._now_ns - WAIT_NS:
                break
            if 4 * batch.matched >= len(batch):
                gone.append(self._take_out(batch, batch.calls["matched"]))
        self._calls = deque(batch for batch in self._calls if len(batch))
        return gone

    def _take_out(self, batch: _Batch, chosen: NDArray[np.bool_]) -> _Batch:
        """Takes calls out of a batch, and returns them."""
        out = _Batch(batch.calls[chosen], batch.came_ns, int(batch.calls["matched"][chosen].sum()))
        batch.calls, batch.matched = batch.calls[~chosen], batch.matched - out.matched
        self._calls_kept -= len(out)
        return out

    def _drop_old(self, now_ns: int) -> None:
        """Drops calls that came long ago, but for the newest."""
        since = now_ns - KEEP_CALLS_NS
        if self._calls_kept > KEEP_NEWEST and self._calls[0].came_ns < since:
            self._leave(max(sum(len(batch) for batch in self._calls if batch.came_ns >= since), KEEP_NEWEST))

    def _keep(self, batch: _Batch) -> None:
        self._calls.append(batch)
        self._calls_kept += len(batch)
        self._newest_call_ns = max(self._newest_call_ns, int(batch.calls["begin_ns"].max()))
        oldest = self._newest_call_ns - KEEP_CALLS_NS
        while self._calls_kept > KEEP_CALLS or int(self._calls[0].calls["end_ns"].max()) < oldest:
            if len(self._calls) == 1:
                break
            self._drop_oldest()
        if len(self._calls) > KEEP_BATCHES:
            sizes = np.array([len(batch) for batch in self._calls])
            at = int(np.argmin(sizes[1:] + sizes[:-1]))
            first, second = self._calls[at], self._calls[at + 1]
            both = _outermost(np.concatenate([first.calls, second.calls]))
            self._calls[at] = _Batch(both, second.came_ns, int(both["matched"].sum()))
            del self._calls[at + 1]
            self._calls_kept -= len(first) + len(second) - len(both)

    # ---- the probes' launches

    def feed_probed(self, probed: NDArray[np.void], now_ns: int) -> None:
        """Takes the probes' launches alone; arguments as for ``feed``."""
        probed = probed[_MAKES_WORK[probed["call"]]]
        if not len(probed):
            return
        ts = np.concatenate([self._probe_ts, probed["ts_ns"].astype(np.int64)])
        tid = np.concatenate([self._probe_tid, probed["tid"]])
        # A call that is timed is reported when it returns: after later ones of other threads.
        order = np.argsort(ts, kind="stable")
        first = max(int(np.searchsorted(ts, now_ns - KEEP_PROBED_NS, sorter=order)), len(ts) - KEEP_PROBED)
        self._probe_ts, self._probe_tid = ts[order[first:]], tid[order[first:]]

    def _find_probed(self, calls: NDArray[np.void], now_ns: int) -> None:
        """Gives calls the probes' time of the same call: what joins them with rows of ``launches``."""
        order = np.lexsort((calls["begin_ns"], calls["tid"]))
        tid, begin = calls["tid"][order], calls["begin_ns"][order]
        first = np.append(True, tid[1:] != tid[:-1])
        starts = np.flatnonzero(first)
        tids = tid[starts].tolist()
        earlier = np.zeros(len(tids), np.int64)
        for at in np.flatnonzero(np.isin(tid[starts], list(self._last_end))).tolist():
            earlier[at] = self._last_end[tids[at]]
        ends = running_max(calls["end_ns"][order], first)
        self._last_end.update(zip(tids, np.maximum(ends[np.append(starts[1:], 0) - 1], earlier).tolist(), strict=True))
        if len(self._last_end) > KEEP_THREADS:
            self._last_end.clear()
        of_before = earlier[np.cumsum(first) - 1]
        before = np.where(first, of_before, np.maximum(np.roll(ends, 1), of_before))
        after = np.empty(len(calls), np.int64)
        # The call before this one on its thread; one that has not ended is around it, and gives no bound.
        after[order] = np.where(before <= begin, before, 0)
        if not len(self._probe_ts):
            return
        matched = self._look_up(calls, after)
        strange = not matched and not self._tids
        if strange or (self._tids and not set(tids) <= self._tids.keys()):
            if self._host_tids is None or now_ns < self._ask_tids_ns:
                return
            self._ask_tids_ns = now_ns + ASK_TIDS_NS
            there = self._host_tids(np.unique(self._probe_tid).tolist())
            if there is None:
                return
            before, self._tids = self._tids, there
            if not self._look_up(calls, after) and strange:
                self._tids = before
                self._ask_tids_ns += 29 * ASK_TIDS_NS

    def _look_up(self, calls: NDArray[np.void], after: NDArray[np.int64]) -> bool:
        """Whether the probe of any of the calls was found."""
        chosen = np.flatnonzero(~calls["probed"])
        if not len(chosen):
            return False
        threads, begin = self.on_host(calls["tid"][chosen]), calls["begin_ns"][chosen]
        reach = np.array([begin.min(), begin.max()]) - np.array([PROBE_REACH_NS, 0])
        near = slice(*np.searchsorted(self._probe_ts, reach, side="right"))
        ts = self._probe_ts[near]
        if not len(ts):
            return False
        place = last_of(self._probe_tid[near], ts, threads, begin)
        last = ts[place]
        good = (place >= 0) & (last > begin - PROBE_REACH_NS) & (last > after[chosen])
        calls["begin_ns"][chosen[good]] = last[good]
        calls["probed"][chosen[good]] = True
        calls["tid"][chosen[good]] = threads[good]
        return bool(good.any())

    # ---- operations

    def _hand_out(self, ops: NDArray[np.void]) -> NDArray[np.void]:
        matched = (ops["flags"] & records.GPU_LAUNCH_MATCHED) != 0
        if self._gone != _NO_IDS:
            ids = ops["correlation"][~matched]
            self.without_call += int(np.sum((ids >= self._gone[0]) & (ids <= self._gone[1])))
        early = matched & (ops["start_ns"] < ops["launch_ns"])
        if early.any():
            ops["start_ns"][early] = ops["launch_ns"][early]
            ops["end_ns"][early] = np.maximum(ops["end_ns"][early], ops["launch_ns"][early])
            ops["flags"][early] |= records.GPU_START_CLAMPED
        self.counters.update(
            gpu_ops=len(ops),
            gpu_launch_matched=int(matched.sum()),
            gpu_launch_unmatched=int(np.sum(~matched)),
            gpu_launch_probed=int(np.sum((ops["flags"] & records.GPU_LAUNCH_PROBED) != 0)),
            gpu_start_clamped=int(early.sum()),
            gpu_started_before_launch_returned=int(np.sum(matched & (ops["start_ns"] < ops["launch_end_ns"]))),
        )
        return ops


def _outermost(calls: NDArray[np.void]) -> NDArray[np.void]:
    """Calls by (correlation id, begin), without those made inside another one of the same id."""
    calls = calls[np.lexsort((-calls["end_ns"], calls["begin_ns"], calls["correlation"]))]
    same = calls["correlation"][1:] == calls["correlation"][:-1]
    if not np.any(same & (calls["begin_ns"][1:] < calls["end_ns"][:-1])):
        return calls
    first = np.append(True, ~same)
    ended = running_max(calls["end_ns"], first)
    outside: NDArray[np.void] = calls[first | np.append(True, calls["begin_ns"][1:] >= ended[:-1])]
    return outside


def _match(ops: NDArray[np.void], calls: NDArray[np.void]) -> int:
    """Fills in the launches of operations, from calls as ``_outermost`` orders them. Of several calls of one id (ids
    begin again when a process loads CUPTI again) it is the last one before the operation.

    Returns:
        How many calls more have become ``matched``.
    """
    ids = calls["correlation"]
    candidates = np.flatnonzero((ops["correlation"] >= ids[0]) & (ops["correlation"] <= ids[-1]))
    if not len(candidates):
        return 0
    wanted = ops["correlation"][candidates]
    latest = ops["start_ns"][candidates].astype(np.int64) + SKEW_NS
    begins = calls["begin_ns"]
    low, high = (np.searchsorted(ids, wanted, side=side) for side in ("left", "right"))
    several = np.flatnonzero(low < high)
    while len(several):
        middle = (low[several] + high[several]) // 2
        late = begins[middle] > latest[several]
        high[several[late]] = middle[late]
        low[several[~late]] = middle[~late] + 1
        several = several[low[several] < high[several]]
    place = low - 1
    good = (place >= 0) & (ids[place] == wanted) & (begins[place] <= latest)
    chosen, found = candidates[good], np.unique(place[good])
    more = int(np.sum(~calls["matched"][found]))
    calls["matched"][found] = True
    matched = calls[place[good]]
    begin, end = ops["launch_ns"][chosen].astype(np.int64), ops["launch_end_ns"][chosen].astype(np.int64)
    fresh = (ops["flags"][chosen] & records.GPU_LAUNCH_MATCHED) == 0
    nested = (matched["begin_ns"] < end) & (begin < matched["end_ns"])
    better = fresh | np.where(nested, matched["begin_ns"] < begin, matched["begin_ns"] > begin)
    chosen, matched = chosen[better], matched[better]
    ops["launch_ns"][chosen], ops["launch_end_ns"][chosen] = matched["begin_ns"], matched["end_ns"]
    ops["launch_tid"][chosen] = matched["tid"]
    flags = ops["flags"][chosen] & ~np.uint32(records.GPU_LAUNCH_PROBED) | records.GPU_LAUNCH_MATCHED
    ops["flags"][chosen] = np.where(matched["probed"], flags | records.GPU_LAUNCH_PROBED, flags)
    return more
