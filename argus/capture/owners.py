"""Users and containers whose processes are traced together: of each ring, none takes the others' room."""

from __future__ import annotations

from argus.capture.kernel.programs import Module

OWNERS = 1024
"""Room for so many (``ARGUS_OWNERS``). Those beyond share the first place with processes whose owner is not known."""


class Owners:
    """Numbers owners for the kernel, and says there of how many processes are traced.

    Args:
        module: The programs' maps.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._of: dict[int, int] = {}
        self._numbers: dict[tuple[int, str], int] = {}

    def add(self, pid: int, owner: tuple[int, str]) -> int:
        """The number of a process's owner, from now on counted among those that are traced."""
        number = 0
        if owner[0] >= 0:
            if owner not in self._numbers:
                self._forget_gone()
                free = set(range(1, OWNERS)).difference(self._numbers.values())
                self._numbers[owner] = min(free, default=0)
            number = self._numbers[owner]
        self._of[pid] = number
        self._publish()
        return number

    def remove(self, pid: int) -> None:
        """A process is not traced any more."""
        if self._of.pop(pid, None) is not None:
            self._publish()

    def _forget_gone(self) -> None:
        there = set(self._of.values())
        self._numbers = {owner: number for owner, number in self._numbers.items() if number in there}

    def _publish(self) -> None:
        self._module["owners_traced"].set(0, len(set(self._of.values())))
