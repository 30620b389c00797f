"""How many calls a function makes, Python's and NumPy's: what a loop that should not be there shows by."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def calls_made(function: Callable[[], Any]) -> int:
    """The number of calls, those inside calls included. Each is counted with its end."""
    count = 0

    def see(*_: Any) -> None:
        nonlocal count
        count += 1

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count
