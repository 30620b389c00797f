"""Opening what a user names: regular files only. A pipe without a writer would be waited for, and a device never
ends."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from argus.model.errors import EXIT_USAGE, ArgusError
from argus.system import files

HINT = "Pipes and devices are not read: write it to a file first"


def open_regular(path: Path) -> BinaryIO:
    """Opens a file to read its bytes.

    Raises:
        ArgusError: It is a pipe, a socket or a device.
        OSError: It cannot be opened, or is a folder.
    """
    # As a place first: a pipe would be waited for, and some devices act when they are opened.
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        kind = os.fstat(place).st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
            raise _other(path)
        return open(path, "rb", opener=lambda name, flags: files.open_place(place, flags))
    finally:
        os.close(place)


def _other(path: Path) -> ArgusError:
    return ArgusError(f"{path} is not a file", HINT, EXIT_USAGE)
