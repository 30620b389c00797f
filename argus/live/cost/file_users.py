"""What probed files and their processes get: by all who map a file, whoever mapped it first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from argus.capture.process.targets import TORCH, FileKey, Target
from argus.live.session import Session


class FileUsers:
    """Says of processes what follows from the files that they map.

    Args:
        session: The trace.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def note_layouts(self, users: Iterable[Target], twins: Mapping[FileKey, FileKey]) -> None:
        """How PyTorch's objects of these processes are read, by the version beside the library that each maps itself.

        Args:
            users: Processes.
            twins: Files in which the probes of another one stand.
        """
        layouts = self._session.probes.layouts
        for target in users:
            own = {twins.get(each.key, each.key): each.layout for each in target.libraries if TORCH[0] in each.roles}
            layouts.set(target.pid, own)
