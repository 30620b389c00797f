"""Opening what a user names: regular files only. A pipe without a writer would be waited for, and a device never
ends."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from argus.model.errors import EXIT_USAGE, ArgusError

HINT = "Pipes and devices are not read: write it to a file first"


def open_regular(path: Path) -> BinaryIO:
    """Opens a file to read its bytes.

    Raises:
        ArgusError: It is a pipe, a socket or a device.
        OSError: It cannot be opened, or is a folder.
    """
    if stat.S_ISSOCK(path.stat().st_mode):  # open would only say: no such device or address
        raise _other(path)
    # O_NONBLOCK: opening a pipe would wait for its writer.
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise _other(path)
    return file


def _other(path: Path) -> ArgusError:
    return ArgusError(f"{path} is not a file", HINT, EXIT_USAGE)
