"""Where the probes of a file go: behind dear first instructions, exits only where they are worth their price."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from argus.capture.attachment import Attachment, subject_of
from argus.capture.kernel.links import Backend
from argus.capture.kernel.programs import Module
from argus.capture.link_room import LinkRoom
from argus.capture.prices import Prices
from argus.capture.process.instructions import REGISTER_ARGUMENTS, Code, RemoteCode
from argus.capture.process.targets import FileKey, Library
from argus.capture.torch_layouts import TorchLayouts
from argus.model import calls
from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.model.losses import Owner

DEAR_EXIT = 3.0
"""A collective's exit is left out, unless somebody needs it, if entry and exit together cost more than so many times
what the entry costs alone: it is single-stepped for its exit's sake."""
LAST_METHOD_BYTES = 16 << 10
"""No method of ProcessGroupGloo is longer: the longest, allgather, has 6.6 KiB in PyTorch 2.13."""
FILE_SLOTS = calls.FILE_SLOTS
"""The last one is shared by all files for which there is none of their own: of their code nothing is known there."""
_ANY_FILE_BYTES = 1 << 32
"""Size of a file in the shared slot: a call from inside another one is then distinguished by its stack alone."""


@dataclass
class _Slot:
    """What one file has for itself in the maps.

    Attributes:
        number: In the cookies of its probes.
        owner: User and container for whose processes it counts: they map the file.
        users: Attachments that have it.
    """

    number: int
    owner: tuple[int, str]
    users: int = 0


class _Entry(NamedTuple):
    """Where a function's entry is probed, and what a hit costs (ns)."""

    offset: int
    cookie: int
    price: int


class Placement:
    """Where the probes of a file go, and what each costs.

    Args:
        module: The programs, whose maps get files and places.
        prices: What probes cost on this machine.
        launch_durations: Whether exits of launches are probed too.
        backend: How probes are attached.

    Attributes:
        links: Descriptors that each owner's files may take.
        layouts: How each process's PyTorch is read.
    """

    def __init__(self, module: Module, prices: Prices, *, launch_durations: bool, backend: Backend = "multi") -> None:
        self._module = module
        self._prices = prices
        self._launch_durations = launch_durations
        self.links = LinkRoom(backend, launch_durations=launch_durations)
        self.layouts = TorchLayouts(module["torch_layouts"])
        self._file_slots: dict[FileKey, _Slot] = {}
        self._lock = threading.Lock()
        self._module["text_bytes"].set(FILE_SLOTS - 1, _ANY_FILE_BYTES)

    def release(self, *attachments: Attachment) -> None:
        """The slots of files on which there are no probes any more are others'."""
        with self._lock:
            for attachment in attachments:
                if not attachment.has_slot:
                    continue
                attachment.has_slot = False
                self._give_back(attachment.library.key)

    def choose(
        self,
        attachment: Attachment,
        by_program: dict[str, list[tuple[int, int]]],
        code: Code | RemoteCode,
        without: Collection[str],
        timed: bool,
        *owners: Owner,
    ) -> None:
        """Where probes go, and what each costs. ``release`` the attachment when it has no probes any more, and give
        back its ``links`` when those are closed.

        Args:
            owners: Of the processes that map the file: it has a slot if one of them may have one more.

        Raises:
            ArgusError: Its owner's files have as many links as they may; or it has functions that cannot be probed
                without a slot, and none of those may have one more.
        """
        library = attachment.library
        self.links.take(attachment)
        slot = self._file_slot(attachment, *owners)
        if attachment.lacks_slot and any(_needs_slot(calls.BY_SYMBOL[symbol]) for symbol in library.offsets):
            # Not in part: who maps it later, and may have one, would have to wait until those probes are gone.
            raise ArgusError(
                f"{library.shown_path} is not probed: there is room for no more files of its user", "", EXIT_UNAVAILABLE
            )
        chosen = self._functions(attachment, without)
        code.look_ahead(offset for _, offset in chosen)
        dear = [one for one in chosen if self._prices.of(code.at(one[1])) > self._prices.cheap]
        code.follow((offset, _throws(call)) for call, offset in dear)
        for call, offset in chosen:
            with_exit = calls.probes_exit(call, self._launch_durations)
            alone = self._choose_entry(code, call, offset, slot, library)
            entry = self._choose_entry(code, call, offset, slot, library, with_exit=True) if with_exit else alone
            ends = with_exit and call.shape in (calls.Shape.COLLECTIVE, calls.Shape.P2P)
            if ends and not timed and entry.price + self._prices.exit > DEAR_EXIT * alone.price:
                with_exit, entry = False, alone
            cookie = call.cookie(with_exit, slot)
            subject = subject_of(call)
            points = by_program if subject is None else attachment.optional_points.setdefault(subject, {})
            points.setdefault(f"{call.program}_enter", []).append((entry.offset, entry.cookie))
            attachment.functions.append(call.symbol)
            attachment.prices[call.id] = entry.price
            attachment.entry_points[call.id] = alone.offset, alone.cookie
            attachment.entry_prices[call.id] = alone.price
            if with_exit:
                points.setdefault(f"{call.program}_exit", []).append((entry.offset, cookie))
                attachment.exits.append(call.symbol)
                attachment.exit_prices[call.id] = self._prices.exit
                attachment.prices[call.id] += self._prices.exit
        attachment.lacks_code = code.unread

    @staticmethod
    def _functions(attachment: Attachment, without: Collection[str]) -> list[tuple[calls.Call, int]]:
        """Which functions of a file are probed, and their offsets in it."""
        library = attachment.library
        chosen: dict[int, calls.Call] = {}
        for symbol, offset in sorted(library.offsets.items(), key=lambda item: calls.BY_SYMBOL[item[0]].id):
            call = calls.BY_SYMBOL[symbol]
            if call.kind in without:
                continue
            chosen.setdefault(offset, call)  # another name of a function is no other probe
        return [(call, offset) for offset, call in chosen.items()]

    def _choose_entry(
        self,
        code: Code | RemoteCode,
        call: calls.Call,
        offset: int,
        slot: int,
        library: Library,
        with_exit: bool = False,
    ) -> _Entry:
        """Where the entry of a function is probed: behind its first instructions, if these are dear.

        Args:
            with_exit: Whether the exit is probed too. The kernel takes the return address from where the stack pointer
                points, at the same place: that must be the entry's.
        """
        price = self._prices.of(code.at(offset))
        if price <= self._prices.cheap:
            return _Entry(offset, call.cookie(with_exit, slot), price)
        others = {other for other in library.offsets.values() if other != offset}
        shared = slot == FILE_SLOTS - 1  # by several files, maybe
        needed = call.reads & set(range(REGISTER_ARGUMENTS))
        fit = [
            place
            for place in code.places(offset, throws=_throws(call))
            if needed <= place.intact
            and (not place.below or not (with_exit or shared))
            and not others & set(range(offset + 1, place.offset + 1))
        ]
        best = min(fit, key=lambda place: (self._prices.of(place.code), place.offset))
        if best.below:
            self._module["below"].set(slot << 8 | call.id, 8 * best.below)
        return _Entry(best.offset, call.cookie(with_exit, slot, bool(best.below)), self._prices.of(best.code))

    def charge(self, key: FileKey, owners: Collection[Owner]) -> None:
        """A file's slot counts for one of those whose processes map it. None: for whom it has counted."""
        with self._lock:
            slot = self._file_slots.get(key)
            if slot is not None and owners and slot.owner not in owners:
                slot.owner = next(iter(owners))

    def _file_slot(self, attachment: Attachment, *owners: Owner) -> int:
        """The cookie's slot for a file. An owner may take as many as are left then, and a user with several containers
        twice as many: so nobody's files take the slots of all. Files for which there is none share the last one, where
        nothing is known of any of them."""
        with self._lock:
            slot = self._slot_of(attachment.library, owners)
            if slot is None:
                attachment.lacks_slot = True
                return FILE_SLOTS - 1
            slot.users += 1
            attachment.has_slot, attachment.slot = True, slot.number
            return slot.number

    def _slot_of(self, library: Library, owners: Iterable[Owner]) -> _Slot | None:
        """A file's slot: its own, or the first that one of these may have. None: none may."""
        if (slot := self._file_slots.get(library.key)) is not None:
            return slot
        others = self._file_slots.values()
        left = FILE_SLOTS - 1 - len(others)
        for owner in owners:
            of_owner = sum(other.owner == owner for other in others)
            of_user = sum(other.owner[0] == owner[0] for other in others)
            if of_owner >= left or of_user >= 2 * left:
                continue
            used = {other.number for other in others}
            slot = _Slot(next(number for number in range(FILE_SLOTS) if number not in used), owner)
            self._set_file(library, slot.number)
            self._file_slots[library.key] = slot
            return slot
        return None

    def _give_back(self, key: FileKey) -> None:
        self._file_slots[key].users -= 1
        if not self._file_slots[key].users:
            del self._file_slots[key]
            self.layouts.take(key)

    def _set_file(self, library: Library, slot: int) -> None:
        """Notes what is known of a file, in the place of what was known of another."""
        self._module["text_bytes"].set(slot, library.text_bytes)
        self._set_family(library, slot)
        self.layouts.give(library.key, slot)

    def _set_family(self, library: Library, slot: int) -> None:
        """Notes where the methods of PyTorch's process group lie, so that calls among them are known."""
        table = self._module["family_reach"]
        methods = {
            symbol: offset for symbol, offset in library.offsets.items() if calls.BY_SYMBOL[symbol].program == "torch"
        }
        if not methods:
            return
        first, last = min(methods.values()), max(methods.values()) + LAST_METHOD_BYTES
        for symbol, offset in methods.items():
            table.set(slot << 8 | calls.BY_SYMBOL[symbol].id, (last - offset) << 32 | (offset - first))


def _needs_slot(call: calls.Call) -> bool:
    """Whether more has to be known of a function's file than where it is: which of its calls come from others, or how
    tensors are read."""
    return call.program == "torch" or call.shape is calls.Shape.ATTENTION


def _throws(call: calls.Call) -> bool:
    """Whether exceptions may pass a function: one of C++."""
    return call.symbol.startswith("_Z")
