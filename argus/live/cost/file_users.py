"""What follows for a process, and for a probed file, from who maps it: whoever mapped it first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from argus.capture.attachment import Attachment
from argus.capture.process.targets import TORCH, FileKey, Target
from argus.live.session import Session
from argus.model.losses import Owner

_Place = tuple[FileKey, int | None]
"""A file, in one process or in all."""


class FileUsers:
    """Says of processes what follows from the files that they map.

    Args:
        session: The trace.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._without_slot: dict[int, dict[int, Attachment]] = {}
        """By process: of the files that it maps, those that have no slot of their own, by their ``id``."""

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

    def price(self, users: Iterable[Target], attached: Iterable[Attachment], twins: Mapping[FileKey, FileKey]) -> None:
        """What calls cost each process in files without a slot: by those that it maps.

        Args:
            users: Processes.
            attached: Probes on all files.
            twins: As ``note_layouts`` has it.
        """
        poor: dict[_Place, Attachment] = {(each.library.key, each.pid): each for each in attached if each.lacks_slot}
        if not poor and not self._without_slot:
            return
        changed = False
        for target in users:
            pid, keys = target.pid, {twins.get(each.key, each.key) for each in target.libraries}
            mapped = (poor[place] for key in keys for place in ((key, None), (key, pid)) if place in poor)
            found = {id(each): each for each in mapped}
            if found.keys() != self._without_slot.pop(pid, {}).keys():
                changed = True
            if found:
                self._without_slot[pid] = found
        if changed:
            self._session.probes.price_without_slots(self._without_slot)

    def retain(self, users: Iterable[Target], attached: Iterable[Attachment], twins: Mapping[FileKey, FileKey]) -> None:
        """Some processes have gone. Files' slots count for those who map them now.

        Args:
            users: Those that are there.
            attached: Probes on all files.
            twins: As ``note_layouts`` has it.
        """
        owners: dict[FileKey, dict[Owner, None]] = {}
        there = set()
        for target in users:
            there.add(target.pid)
            for library in target.libraries:
                owners.setdefault(twins.get(library.key, library.key), {})[target.identity.owner] = None
        for attachment in attached:
            if attachment.has_slot:
                self._session.probes.placement.charge(attachment.library.key, owners.get(attachment.library.key, {}))
        if not self._without_slot.keys() <= there:
            self._without_slot = {pid: files for pid, files in self._without_slot.items() if pid in there}
            self._session.probes.price_without_slots(self._without_slot)
