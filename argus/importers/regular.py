"""Opening what a user names: regular files only. A pipe without a writer would be waited for, and a device never
ends."""

from __future__ import annotations

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
    try:
        return files.open_regular(path)
    except files.NotRegular:
        raise ArgusError(f"{path} is not a file", HINT, EXIT_USAGE) from None
