"""Threads of a process as its own PID namespace numbers them, which is how CUPTI reports them, and as the host does."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from argus.capture.process.names import LookUps
from argus.capture.process.targets import PROC
from argus.system.proc import field_of, numbers, read_file

MOST_READ = 4096
"""Threads that are read at once, 20 to 40 µs each."""


class HostTids:
    """Finds the host's numbers of a process's threads. Each thread is read once, and few at a time: a process may have
    30,000.

    Args:
        pid: The process.
        look_ups: When they may be read; ``look_ups_over_share`` counts when not.
    """

    def __init__(self, pid: int, look_ups: LookUps) -> None:
        self._pid = pid
        self._look_ups = look_ups
        self._inside: dict[int, int] = {}
        """By the host's number."""
        self._been_read: set[int] = set()

    def __call__(self, first: Sequence[int]) -> dict[int, int] | None:
        """Thread ids of the namespace → the host's, of the threads that live and have been read. Empty: there is no
        difference, or the process has ended. None: its owner has had its part of the time; ask again.

        Args:
            first: Threads, as the host numbers them, that are read before others.
        """
        if not self._look_ups.may_look_up(self._pid):
            return None
        with self._look_ups.looking_up(self._pid):
            self._read(first)
        found = {inside: host for host, inside in self._inside.items() if inside}
        return {} if all(inside == host for inside, host in found.items()) else found

    def _read(self, first: Sequence[int]) -> None:
        try:
            there = dict.fromkeys(int(tid) for tid in os.listdir(f"{PROC}/{self._pid}/task"))
        except OSError:
            there = {}
        self._inside = {host: inside for host, inside in self._inside.items() if host in there}
        if self._been_read >= there.keys():
            self._been_read = set()  # what is asked for is not there, or a thread has the number of one that has ended
        self._been_read &= there.keys()
        ordered = [tid for tid in dict.fromkeys([*first, *there]) if tid in there and tid not in self._been_read]
        for tid in ordered[:MOST_READ]:
            self._been_read.add(tid)
            with contextlib.suppress(OSError, ValueError):
                inside = numbers(field_of(read_file(f"{PROC}/{self._pid}/task/{tid}/status"), b"NSpid"))
                self._inside[tid] = inside[-1] if inside else 0
