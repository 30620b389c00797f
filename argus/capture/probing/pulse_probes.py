"""Probes of the pulse: functions that are probed at their entries throughout, whatever becomes of their subjects. Steps
are counted by them."""

from __future__ import annotations

import contextlib
import errno
import itertools
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from argus.capture.attachment import Attachment, Subject

if TYPE_CHECKING:
    from argus.capture.kernel.links import Links
    from argus.capture.probing.patience import Patience
    from argus.capture.probing.windows import Window

Points = dict[str, list[tuple[int, int]]]
"""Programs, with file offsets and cookies."""


class PulseLinks(list[int]):
    """Links that hold a file's probes of the pulse.

    Attributes:
        points: Where these stand, or would if the file's process had not ended.
    """

    def __init__(self) -> None:
        super().__init__()
        self.points: Points = {}

    def add(self, more: PulseLinks) -> None:
        """Takes others of the same file over."""
        self += more
        for name, points in more.points.items():
            self.points[name] = self.points.get(name, []) + points

    def lacks(self, wanted: Points) -> Points:
        """Of these places, those where none stands."""
        lacking = {name: [each for each in at if each not in self.points.get(name, ())] for name, at in wanted.items()}
        return {name: points for name, points in lacking.items() if points}

    def stand_at(self, wanted: Points) -> bool:
        """Whether they stand at these places and nowhere else."""
        return _in_order(self.points) == _in_order(wanted)


def _in_order(points: Points) -> Points:
    return {name: sorted(at) for name, at in points.items()}


class PulseProbes:
    """The part of ``Probes`` that is about the pulse.

    Attributes:
        pulse_turn: Grows as ``set_pulse`` is called: probes of an earlier one are not taken over.
    """

    attachments: list[Attachment]
    probed: set[Subject]
    refused: dict[str, str]
    pulse_turn = 0
    _pulse: frozenset[int]
    _pulse_links: dict[int, PulseLinks]
    _lock: threading.Lock
    _patience: Patience
    _window: Window | None

    def let_go(self, links: list[Links]) -> None:
        raise NotImplementedError

    def _attach_program(
        self,
        attachment: Attachment,
        name: str,
        points: list[tuple[int, int]],
        links: list[int],
        *,
        in_time: bool = True,
    ) -> None:
        raise NotImplementedError

    def _close_soon(self, links: list[tuple[Attachment, Links]]) -> None:
        raise NotImplementedError

    @property
    def pulse(self) -> frozenset[int]:
        """Numbers of the calls that are probed throughout, at their entries, whatever becomes of their subjects."""
        return self._pulse

    def set_pulse(self, chosen: Iterable[int]) -> list[Attachment]:
        """Probes the entries of these functions from now on, and no longer those of before. Those whose subjects are
        probed throughout are left to them: call it again when that changes. Probes that stand where they are to stand
        stay. Returns the other files that had some or get some: not all calls were seen meanwhile."""
        with self._lock:
            files, before = list(self.attachments), self._pulse_links
            self._pulse = frozenset(chosen)
            self._pulse_links = {
                id(each): links
                for each in files
                if (links := before.get(id(each))) is not None and links.stand_at(self._pulse_points(each))
            }
            self.pulse_turn += 1
        changed = [each for each in files if id(each) not in self._pulse_links]
        self._close_soon([(each, (links, [])) for each in changed if (links := before.get(id(each)))])
        if self._window is not None and self._window.over:
            for attachment, gone in self._window.there():  # they would be counted twice
                attachment.left_out_until(gone)
        for attachment in self._patience.begin(changed, files):
            with contextlib.suppress(TimeoutError):  # ``LateProbes`` goes on
                self.take_pulse(attachment, self.pulse_of(attachment), self.pulse_turn)
        return [each for each in changed if before.get(id(each)) or self._pulse_points(each)]

    def pulse_of(self, attachment: Attachment, *, in_time: bool = True) -> PulseLinks:
        """Links that hold the probes of ``pulse`` that a file lacks, but for those that the kernel refuses. They are
        the caller's to keep.

        Raises:
            TimeoutError: The kernel does not answer. Nothing is left attached.
        """
        links = PulseLinks()
        try:
            for name, points in self._lacking_points(attachment).items():
                try:
                    self._attach_program(attachment, name, points, links, in_time=in_time)
                except TimeoutError:
                    raise
                except OSError as failure:
                    if failure.errno != errno.ESRCH:  # its process has ended: nobody calls what is there
                        continue
                links.points[name] = points
        except BaseException:
            self.let_go([(links, [])])
            raise
        return links

    def take_pulse(self, attachment: Attachment, links: PulseLinks, turn: int) -> bool:
        """Takes over such links, if they are of the last ``set_pulse`` and none stand where these do."""
        with self._lock:
            there = self._pulse_links.get(id(attachment), PulseLinks())
            if turn != self.pulse_turn or there.lacks(links.points) != links.points:
                return False
            self._pulse_links[id(attachment)] = there
            there.add(links)
            return True

    def lacks_pulse(self, attachment: Attachment, call: int | None = None) -> bool:
        """Whether a file has functions of the pulse, or this one, that have no probes there."""
        lacking = itertools.chain(*self._lacking_points(attachment).values())
        return any(call is None or cookie & 0xFF == call for _, cookie in lacking)

    def _lacking_points(self, attachment: Attachment) -> Points:
        return self._pulse_links.get(id(attachment), PulseLinks()).lacks(self._pulse_points(attachment))

    def _pulse_points(self, attachment: Attachment) -> Points:
        """Programs, with the places in a file that are probed for the pulse alone."""
        by_program: Points = {}
        subjects = attachment.optional_points.keys() - self.probed - self.refused.keys() if self._pulse else ()
        for subject in sorted(subjects):
            for name, entries in attachment.entries_of(subject).items():
                if pulsed := [point for point in entries if point[1] & 0xFF in self._pulse]:
                    by_program.setdefault(name, []).extend(pulsed)
        return by_program
