"""A cache whose entries have different sizes: bounded in bytes, and in number."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Bounded(Generic[Key, Value]):
    """Keeps what was used last. Any thread may use it.

    Args:
        most: Entries.
        most_bytes: Their sizes together, as ``keep`` is told them. What is larger than all of it is not kept.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Key) -> Value | None:
        """None: it is not kept."""
        with self._lock:
            kept = self._kept.get(key)
            if kept is None:
                return None
            self._kept.move_to_end(key)
            return kept[0]

    def keep(self, key: Key, value: Value, nbytes: int) -> None:
        """Keeps a value of so many bytes; what was used longest ago goes, if there is no room."""
        with self._lock:
            _, before = self._kept.pop(key, (None, 0))
            self.nbytes -= before
            if nbytes > self._most_bytes:
                return
            self._kept[key] = value, nbytes
            self.nbytes += nbytes
            while self.nbytes > self._most_bytes or len(self._kept) > self._most:
                _, (_, gone) = self._kept.popitem(last=False)
                self.nbytes -= gone


def text_bytes(text: str) -> int:
    """What a text takes in memory at most, the same for equal texts."""
    return len(text) * (1 if text.isascii() else 4)
