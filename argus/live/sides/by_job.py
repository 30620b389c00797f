"""Which records are of which process, and of which job."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from argus.live.job import Job, Member


class ByJob:
    """The processes of a turn, by job. Jobs without records cost nothing, however many they are.

    Args:
        by_pid: The job and what it is there of each process.

    Attributes:
        members: By the ``id`` of a job: its processes, by PID.
    """

    def __init__(self, by_pid: Mapping[int, tuple[Job, Member]]) -> None:
        self.members: dict[int, dict[int, Member]] = {}
        for pid, (job, member) in by_pid.items():
            self.members.setdefault(id(job), {})[pid] = member
        number_of = {key: number for number, key in enumerate(self.members)}
        self._pids = np.array(sorted(by_pid), np.uint32)
        in_order = [by_pid[int(pid)] for pid in self._pids]
        self._ranks = np.array([member.rank for _, member in in_order], np.uint32)
        self._numbers = np.array([number_of[id(job)] for job, _ in in_order], np.int32)

    def split(self, events: NDArray[np.void]) -> dict[int, tuple[NDArray[np.int64], NDArray[np.uint32]]]:
        """The records of each job that has some, by its ``id``: their places, in their order, and the rank of each.

        Args:
            events: Records with ``pid``, of any processes.
        """
        if not len(events) or not len(self._pids):
            return {}
        place = np.minimum(np.searchsorted(self._pids, events["pid"]), len(self._pids) - 1)
        found = np.flatnonzero(self._pids[place] == events["pid"])
        place = place[found]
        number = self._numbers[place]
        order = np.argsort(number, kind="stable")
        ends = np.cumsum(np.bincount(number, minlength=len(self.members)))
        split: dict[int, tuple[NDArray[np.int64], NDArray[np.uint32]]] = {}
        begin = 0
        for key, end in zip(self.members, ends.tolist(), strict=True):
            if end > begin:
                chosen = order[begin:end]
                split[key] = found[chosen], self._ranks[place[chosen]]
            begin = end
        return split


def by_pid(events: NDArray[np.void]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """The places of each process's records, in their order: what each costs does not grow with the others'."""
    if not len(events):
        return
    order = np.argsort(events["pid"], kind="stable")
    pids, starts = np.unique(events["pid"][order], return_index=True)
    yield from zip(pids.tolist(), np.split(order, starts[1:]), strict=True)


class Together:
    """Records of some processes, those of each together, by ``ts_ns``: what can be is done once for all of them. One
    job's turn costs by its records, not by its processes.

    Args:
        events: Records with ``pid`` and ``ts_ns``, in any order.

    Attributes:
        events: The same, shape (n,).
        pids: The processes, in the order of their records.
    """

    def __init__(self, events: NDArray[np.void]) -> None:
        order = np.lexsort((events["ts_ns"], events["pid"]))
        self.events = events[order]
        pid = np.ascontiguousarray(self.events["pid"])
        first = np.concatenate([[True], pid[1:] != pid[:-1]])[: len(pid)]
        self.pids: list[int] = pid[first].tolist()
        self._bounds = np.append(np.flatnonzero(first), len(pid))

    def places(self, chosen: NDArray[np.bool_] | None = None) -> Iterator[slice]:
        """Where each process's records are, among those chosen, shape (n,), or all."""
        bounds = self._bounds
        if chosen is not None:
            bounds = np.concatenate([[0], np.cumsum(chosen)])[bounds]
        return itertools.starmap(slice, itertools.pairwise(bounds.tolist()))

    def count(self, chosen: NDArray[np.bool_]) -> list[int]:
        """How many of each process's are chosen, shape (n,)."""
        return [each.stop - each.start for each in self.places(chosen)]


class ByProcess:
    """Records of each process, found in one pass when they are asked for first.

    Args:
        events: Records with ``pid``, of any processes.
    """

    def __init__(self, events: NDArray[np.void]) -> None:
        self._events = events
        self._places: dict[int, NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        """How many there are of all processes."""
        return len(self._events)

    def of(self, pid: int) -> NDArray[np.void]:
        """Those of a process, in their order."""
        if self._places is None:
            self._places = dict(by_pid(self._events))
        places = self._places.get(pid)
        return self._events[:0] if places is None else self._events[places]

    def by_time(self, pid: int) -> NDArray[np.void]:
        """The same, by ``ts_ns``."""
        own = self.of(pid)
        return own[np.argsort(own["ts_ns"], kind="stable")]
