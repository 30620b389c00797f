"""Which traceable libraries processes map, read again as seldom as it can be: reading mappings takes a millisecond."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from argus.capture.process.targets import Libraries, cpu_ns, find_libraries, mapped_pages, mappings_signature
from argus.live.session import Session
from argus.model.losses import Whom

MAPS_S, MOST_MAPS_S = 5.0, 60.0
"""After so long the mappings of a process that runs are read, though it has mapped as much as before; longer each time
that nothing was new."""
MAPS_SHARE_S = 0.02
"""For so long mappings are read in one round: a process that allocates has mapped another amount each time, and the
mappings of a large one take a millisecond to read. The others' turn comes in the next round."""


@dataclass
class Reading:
    """When something of a process was read that mostly changes as it maps more or less, and how soon it is read again
    if it has mapped as much as before: later each time that nothing was new."""

    pages: bytes = b""
    at: float = 0.0
    again_s: float = 0.0

    def due(self, pages: bytes, now: float) -> bool:
        """Whether it is to be read. ``pages``: ``targets.mapped_pages``; ``now``: ``time.monotonic()``."""
        return pages != self.pages or now - self.at >= self.again_s

    def read(self, pages: bytes, now: float, *, same: bool, most_s: float = MOST_MAPS_S) -> None:
        """It was read; ``same``: nothing was new; ``most_s``: it is read again after so long in any case."""
        self.again_s = min(2 * self.again_s if same and self.again_s else MAPS_S, most_s)
        self.pages, self.at = pages, now


class MappedLibraries:
    """The libraries that processes map.

    Args:
        session: The trace: what is not read is counted there.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._signatures: dict[int, int] = {}
        self._ran: dict[int, int] = {}
        """CPU time of each process when its mappings were read: what has not run has loaded nothing."""
        self._readings: dict[int, Reading] = {}
        self._spent_s = 0.0
        """For how long mappings of processes that are not young were read in this round."""
        self._unread: dict[int, dict[str, tuple[int, Whom]]] = {}
        """Of each process what of its files is not read, by counter (``targets.Libraries``), and whom that concerns."""

    def begin_round(self) -> None:
        """``changed`` is called for all processes from here on."""
        self._spent_s = 0.0

    def read_at(self, pid: int) -> float:
        """When the mappings of a process were read last, ``time.monotonic()``; 0: never."""
        return self._readings[pid].at if pid in self._readings else 0.0

    def changed(self, pid: int, *, hurry: bool) -> Libraries | None:
        """The traceable libraries of a process; None: it maps nothing that it did not map when it was read last, or
        there was no time to see.

        Args:
            pid: The process.
            hurry: It is read whatever the others took.
        """
        ran = cpu_ns(pid)
        if 0 <= ran == self._ran.get(pid):
            return None
        try:
            pages, now = mapped_pages(pid), time.monotonic()
            reading = self._readings.get(pid)
            late = reading is not None and not hurry and self._spent_s > MAPS_SHARE_S
            if late or (reading is not None and not reading.due(pages, now)):
                return None
            signature = mappings_signature(pid)
            self._spent_s += time.monotonic() - now if reading is not None else 0.0
            same = self._signatures.get(pid) == signature
            self._readings.setdefault(pid, Reading()).read(pages, now, same=same)
            if same:
                self._ran[pid] = ran
                return None
            libraries = find_libraries(pid)
        except OSError:
            return None
        if not libraries.unread:  # else they are read in the next round
            self._signatures[pid], self._ran[pid] = signature, ran
        self._count(pid, {"mapped_files_unread": libraries.unread})
        return libraries

    def _count(self, pid: int, now: Mapping[str, int]) -> None:
        """Counts what of a process's files is not read, in the place of what was not when it was looked at last."""
        if not any(now.values()) and pid not in self._unread:
            return
        losses = self._session.losses
        for counter, (number, whom) in self._unread.pop(pid, {}).items():
            losses.count(counter, whom, number=-number)
        whom = self._session.whom(pid)
        for counter, number in now.items():
            losses.count(counter, whom, number=number)
        if any(now.values()):
            self._unread[pid] = {counter: (number, whom) for counter, number in now.items()}

    def read_anew(self, pid: int) -> None:
        """Reads a process's mappings again, whether or not it has mapped something since."""
        for by_pid in (self._signatures, self._ran, self._readings):
            by_pid.pop(pid, None)

    def forget(self, pid: int) -> None:
        """Drops what is kept of a process that has ended. What was not read of it never will be."""
        self.read_anew(pid)
        self._unread.pop(pid, None)
