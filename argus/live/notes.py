"""What a trace has to say to its user."""

from __future__ import annotations

from collections import deque


class Notes(deque[str]):
    """The newest 100 of what there was to say.

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
