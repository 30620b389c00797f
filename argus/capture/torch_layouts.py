"""Where each process's PyTorch keeps what the programs read of its objects: by the process's own files."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np

from argus.capture.kernel.programs import Map
from argus.capture.process.pytorch import Layout
from argus.capture.process.targets import FileKey
from argus.model import records


class TorchLayouts:
    """Tells the kernel how objects of a process's PyTorch are read. Several users may map one library and have each
    another version beside it: nothing that one says is used for another. Any thread may call.

    Args:
        table: ``torch_layouts`` of bpf/common.bpf.h.
    """

    def __init__(self, table: Map) -> None:
        self._table = table
        self._lock = threading.Lock()
        self._slots: dict[FileKey, int] = {}
        """Of the files that have one."""
        self._of: dict[int, dict[FileKey, Layout | None]] = {}
        """By process: of the files with PyTorch that it maps."""
        self._users: dict[FileKey, set[int]] = {}
        """Processes that map each."""
        self._again: set[int] = set()
        """Processes for which the table had no room."""

    def set(self, pid: int, layouts: Mapping[FileKey, Layout | None]) -> None:
        """What the files with PyTorch say that a process maps, those where its probes stand; no file: it maps none.
        ``forget`` the process when it has ended."""
        with self._lock:
            if self._of.get(pid, {}) == layouts and pid not in self._again:
                return
            self._drop(pid)
            if layouts:
                self._of[pid] = dict(layouts)
            for key in layouts:
                self._users.setdefault(key, set()).add(pid)
            self._write(pid)

    def forget(self, pid: int) -> None:
        """A process has ended."""
        with self._lock:
            self._drop(pid)
            self._table.delete(pid)

    def give(self, key: FileKey, slot: int) -> None:
        """A file has a slot from now on: before there are probes with it."""
        with self._lock:
            self._slots[key] = slot
            for pid in self._users.get(key, ()):
                self._write(pid)

    def take(self, key: FileKey) -> None:
        """A file's slot may be another's."""
        with self._lock:
            if self._slots.pop(key, None) is not None:
                for pid in self._users.get(key, ()):
                    self._write(pid)

    def _drop(self, pid: int) -> None:
        self._again.discard(pid)
        for key in self._of.pop(pid, ()):
            self._users[key].discard(pid)
            if not self._users[key]:
                del self._users[key]

    def _write(self, pid: int) -> None:
        rows, place = np.zeros(records.TORCHES, records.TORCH), 0
        for key, layout in self._of.get(pid, {}).items():
            if key not in self._slots:
                continue
            counter = layout.group.counter if layout is not None and layout.group is not None else 0
            read = (layout.numel, counter, layout.sizes) if layout is not None else (0, 0, 0)
            rows[place] = *read, self._slots[key] + 1
            place += 1
            if place == records.TORCHES:
                break
        if not place:
            self._table.delete(pid)
            return
        try:
            self._table.set(pid, rows.tobytes())
        except OSError:  # the table is full: what the process calls is counted as of no known layout
            self._again.add(pid)
