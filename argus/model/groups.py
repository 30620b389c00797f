"""A process's own data on its communicators and process groups."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """A rank's place in a communicator: a number that is the same on all of its ranks, and rank and size in it."""

    key: int
    rank: int
    size: int


@dataclass(frozen=True)
class Membership:
    """A process's place in a process group: the group's name, the same on all of its ranks, and rank and size in it.

    Attributes:
        turn: How many groups of this name and size the process was seen in before: a program may destroy all of its
            groups and begin again.
    """

    name: str
    rank: int
    size: int
    turn: int = 0
