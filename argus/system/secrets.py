"""The store's password: kept from every other program that Argus starts."""

from __future__ import annotations

import os
from collections.abc import Mapping

VARIABLE = "ARGUS_STORE_PASSWORD"
"""So the variables begin that other programs do not get: the password, and the name of its file."""
_taken: str | None = None


def take() -> None:
    """Takes the password out of ``os.environ``, which child processes inherit. For a process that is Argus's own."""
    global _taken
    _taken = os.environ.pop(VARIABLE, _taken)


def give(password: str) -> None:
    """What another process of Argus's had taken."""
    global _taken
    _taken = password


def password() -> str | None:
    """The password that ``ARGUS_STORE_PASSWORD`` gives or gave; None: it was not set."""
    return os.environ.get(VARIABLE, _taken)


def without(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for another program, without the password and the name of the file that holds it."""
    return {name: value for name, value in environment.items() if not name.startswith(VARIABLE)}
