"""What probed files and their processes get: by all who map a file, whoever mapped it first."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

from argus.capture.attachment import Attachment
from argus.capture.kernel.links import Closing
from argus.capture.process.targets import TORCH, FileKey, Library, Target
from argus.live.session import Session
from argus.model import calls
from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.model.losses import Owner

GONE_S = 10.0
"""For so long other probes on a file wait for those that are to go. They take tens of ms."""
AGAIN_S = 60.0
_ATTENTION = frozenset(call.symbol for call in calls.CALLS if call.shape is calls.Shape.ATTENTION)
_Use = TypeVar("_Use")
_Place = tuple[FileKey, int | None]
"""A file, in one process or in all."""


class FileUsers:
    """Says of processes what follows from the files that they map, and which files could have more than they have.

    Args:
        session: The trace.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._anew: dict[_Place, tuple[Library, Closing, Owner]] = {}
        """Files that get other probes, with the slot that is kept for them, and for whom: the old ones go."""
        self._read_again_at: dict[_Place, float] = {}
        """Of files that were probed anew for who shows how tensors are read: before, they are not again."""
        self._poor: dict[int, list[Attachment]] = {}
        """By process: of the files that it maps, those that could have more."""

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

    def improve(
        self, users: Iterable[Target], attached: Iterable[Attachment], twins: Mapping[FileKey, FileKey]
    ) -> list[Attachment]:
        """Takes the probes off files that get more from now on: one of those who map such a file may have a slot, or
        shows how its tensors are read. They are to be probed anew. What processes call meanwhile that had them is not
        seen, which is counted.

        Args:
            users: Processes.
            attached: Probes on all files.
            twins: As ``note_layouts`` has it.
        """
        poor = _poor(attached)
        if not poor:
            return []
        owners: dict[_Place, dict[Owner, None]] = {}
        direct, read = set[_Place](), dict[_Place, Owner]()
        for target in users:
            for library in target.libraries:
                key = twins.get(library.key, library.key)
                for place in _places(key, target.pid):
                    if place not in poor:
                        continue
                    owners.setdefault(place, {})[target.identity.owner] = None
                    if key == library.key and target.alive():  # by whom it can be probed anew
                        direct.add(place)
                        if library.layout is not None:
                            read.setdefault(place, target.identity.owner)
        now, better, refused = time.monotonic(), [], set[Owner]()
        for place in direct:
            attachment = poor[place]
            if not attachment.lacks_slot:
                if place not in read or now < self._read_again_at.get(place, 0.0):
                    continue
                self._read_again_at[place] = now + AGAIN_S
            ask = dict.fromkeys([read[place]] if place in read else []) | owners[place]
            if (owner := self._whose_slot(attachment.library, ask, refused)) is not None:
                better.append(attachment)
                self._anew[place] = attachment.library, self._session.probes.release([attachment]), owner
        if better:
            self._count(better)
        return better

    def _whose_slot(self, library: Library, owners: Iterable[Owner], refused: set[Owner]) -> Owner | None:
        for owner in owners:
            if owner in refused:
                continue
            if self._session.probes.placement.keep(library, owner):
                return owner
            refused.add(owner)
        return None

    def _count(self, better: Iterable[Attachment]) -> None:
        """Counts that processes lack the probes for a while that they had on files."""
        gone = set(map(id, better))
        for pid, files in self._poor.items():
            if lacks := sum(id(each) in gone for each in files):
                self._session.losses.count("attach_failed", self._session.whom(pid), number=lacks)

    def in_order(self, place: _Place, owners: Mapping[Owner, _Use]) -> dict[Owner, _Use]:
        """By whom a file is probed, and for whose account: first for whom it is probed anew, since another one may not
        have it probed a second time."""
        _, _, first = self._anew.get(place, (None, None, None))
        return dict(sorted(owners.items(), key=lambda item: item[0] != first))

    def after_old_probes(self, key: FileKey, work: Callable[[], Attachment]) -> Callable[[], Attachment]:
        """What puts probes on a file, once those are gone that were taken off it, or off one of an overlay that may be
        the same: else calls would be seen twice."""
        going = [closing for (other, _), (_, closing, _) in self._anew.items() if other[2:] == key[2:]]
        if not going:
            return work

        def later() -> Attachment:
            if not all(closing.wait(GONE_S) for closing in going):
                raise ArgusError("a file has no probes for a while: its old ones do not go", "", EXIT_UNAVAILABLE)
            return work()

        return later

    def settle(self, attached: Iterable[Attachment], awaited: Collection[_Place]) -> None:
        """Keeps no slot for a file any longer that has its probes, or will not have any.

        Args:
            attached: Probes on all files.
            awaited: Files that lack theirs.
        """
        if not self._anew:
            return
        there = {(each.library.key, each.pid) for each in attached}
        for place, (library, closing, _) in [*self._anew.items()]:
            if (place in there or place not in awaited) and closing.wait(0):
                del self._anew[place]
                self._session.probes.placement.let_go(library)

    def note_poor(
        self, users: Iterable[Target], attached: Iterable[Attachment], twins: Mapping[FileKey, FileKey]
    ) -> None:
        """Which of the files that could have more each process maps. Arguments as ``improve`` has them."""
        poor = _poor(attached)
        if not poor and not self._poor:
            return
        changed = False
        for target in users:
            pid, keys = target.pid, dict.fromkeys(twins.get(each.key, each.key) for each in target.libraries)
            found = [poor[place] for key in keys for place in _places(key, pid) if place in poor]
            if found != self._poor.get(pid, []):
                changed = True
                self._poor[pid] = found
                if not found:
                    del self._poor[pid]
        if changed:
            self._price()

    def _price(self) -> None:
        without = {pid: [each for each in files if each.lacks_slot] for pid, files in self._poor.items()}
        self._session.probes.price_without_slots({pid: files for pid, files in without.items() if files})

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
        if not self._poor.keys() <= there:
            self._poor = {pid: files for pid, files in self._poor.items() if pid in there}
            self._price()
        places = {(each.library.key, each.pid) for each in attached}
        self._read_again_at = {place: at for place, at in self._read_again_at.items() if place in places}


def _places(key: FileKey, pid: int) -> tuple[_Place, _Place]:
    return (key, None), (key, pid)


def _poor(attached: Iterable[Attachment]) -> dict[_Place, Attachment]:
    """Files that could have more than they have, if others map them."""
    return {(each.library.key, each.pid): each for each in attached if each.lacks_slot or _lacks_attention(each)}


def _lacks_attention(attachment: Attachment) -> bool:
    library = attachment.library
    return not attachment.has_layout and TORCH[0] in library.roles and not _ATTENTION.isdisjoint(library.offsets)
