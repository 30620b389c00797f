"""Notes for the user of a trace: events that are reported in a line each."""

from __future__ import annotations

from collections import deque


class Notes(deque[str]):
    """The newest 100 notes.

    Attributes:
        total: How many there were.
    """

    def __init__(self) -> None:
        super().__init__(maxlen=100)
        self.total = 0

    def append(self, text: str) -> None:
        super().append(text)
        self.total += 1

    def since(self, reported: int) -> list[str]:
        """Those after so many, as far as they are kept."""
        return list(self)[max(len(self) - (self.total - reported), 0) :]
