"""How much of a disk Argus may fill: the bound of an embedded store, and the room that is left to everybody else. And
what queries of one piece of work may take."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argus.model.errors import EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError

STORE_BYTES = 100 << 30
"""What an embedded store may take up where ``ARGUS_STORE_MAX`` says nothing: two days of single CUDA calls at 50,000
operations a second (42 GB a day), and their sums for a month."""
FREE_SHARE = 0.05
FREE_BYTES = 5 << 30
"""What is left free on the disk of a store, a spool or a spill: 5 % of it, or 5 GiB where that is less. The tables of a
job's checkpoint, logs and the system are on the same disk more often than not."""
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def bytes_from(variable: str, default: int) -> int:
    """A size in bytes that an environment variable gives as ``500M`` or ``20G``; the default where it is not set.

    Raises:
        ArgusError: It is no size.
    """
    text = os.environ.get(variable, "")
    if not text:
        return default
    match = re.fullmatch(r"(\d{1,15})\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not match:
        raise ArgusError(f"{variable} is '{text}', which is no size", "Write it like 500M or 20G", EXIT_USAGE)
    return int(match.group(1)) * _UNITS[match.group(2).upper()]


def store_bytes() -> int:
    """What an embedded store may take up on disk (``ARGUS_STORE_MAX``).

    Raises:
        ArgusError: The variable is no size.
    """
    return bytes_from("ARGUS_STORE_MAX", STORE_BYTES)


def kept_free(place: int | Path) -> int:
    """Bytes that are to stay free on the disk of a folder."""
    disk = os.statvfs(place)
    return min(int(disk.f_blocks * disk.f_frsize * FREE_SHARE), FREE_BYTES)


def has_room(place: int | Path, size: int) -> bool:
    """Whether so many bytes may be written to a folder: enough is still free then."""
    disk = os.statvfs(place)
    return disk.f_bavail * disk.f_frsize - size >= kept_free(place)


@dataclass(frozen=True)
class QueryBounds:
    """What the queries of one piece of work may take (``Store.bounds``).

    Attributes:
        settings: ClickHouse's, of each of them; what a query brings itself counts before.
        until_s: When the last one ends (``time.monotonic``).
    """

    settings: Mapping[str, int]
    until_s: float = math.inf

    def of_query(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a query that begins now.

        Raises:
            ArgusError: It is too late.
        """
        bounded = {**self.settings, **settings}
        if self.until_s < math.inf:
            left_s = self.until_s - time.monotonic()
            if left_s <= 0:
                raise ArgusError("it took too long", "", EXIT_UNAVAILABLE)
            bounded["max_execution_time"] = min(math.ceil(left_s), bounded.get("max_execution_time") or math.inf)
        return bounded
