"""Files that did not answer while their probes were changed: they are tried again, in threads of their own.

The kernel takes a lock of each process that maps a file, traced or not. Who holds his own, with a page that never
comes, has the probes of others' jobs on that file come late. They come once he lets go.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from argus.capture.attachment import SOON_S, Attachment, Subject
from argus.capture.probing.pulse_probes import PulseLinks
from argus.model.losses import Owner
from argus.system.aside import Aside

if TYPE_CHECKING:
    from argus.capture.probes import Probes

MOST, MOST_OF_OWNER = 16, 2
"""Files that are tried at one time, in all and of those who map them, as a set: each holds a thread, maybe for ever. Of
its own, and of those that it shares, a user has at most as many as are left for others, whatever containers it makes,
and one in any case, up to ``MOST_USERS``. A shared file is tried if that is so for one of its users."""
MOST_USERS = 64
MOST_SLOW_TO_GO = 8
"""So many of those if they have answered so far, and only their last probes were slow to go."""
_Links = dict[Subject, tuple[list[int], list[int]]]


@dataclass
class _Trying:
    attachment: Attachment
    entries_only: frozenset[Subject]
    pulse: int
    """``Probes.pulse_turn`` when it began."""
    lacked_pulse: bool
    making: Aside[tuple[_Links, PulseLinks]]


class LateProbes:
    """Puts probes on that are missing. One thread asks."""

    def __init__(self) -> None:
        self._trying: list[_Trying] = []

    @property
    def under_way(self) -> bool:
        """Whether a file is tried."""
        return bool(self._trying)

    def settle(self, probes: Probes, attachment: Attachment) -> None:
        """Has a new file probed as all are now, which may have changed since its probes were begun. Nobody waits."""
        unwanted = {
            subject
            for subject in attachment.optional_links
            if subject not in probes.probed or (subject in attachment.entries_only) != (subject in probes.entries_only)
        }
        if gone := [both for subject in unwanted if any(both := attachment.optional_links.pop(subject))]:
            probes.let_go(gone)
        if unwanted:
            probes.write_prices([attachment])
        if (lacks_pulse := probes.lacks_pulse(attachment)) or _missing(probes, attachment):
            if lacks_pulse and attachment.answers:  # the kernel refuses them for now
                attachment.unanswered += 1
                probes.unanswered += 1
            attachment.answers, attachment.again_at = False, 0.0

    def go_on(self, probes: Probes) -> None:
        """Takes over probes that have come, and tries files whose turn it is."""
        for trying in [each for each in self._trying if each.making.wait(0)]:
            self._trying.remove(trying)
            self._take(probes, trying)
        now = time.monotonic()
        tried = {id(each.attachment) for each in self._trying}
        waiting: list[Attachment] = []
        for attachment in probes.attachments:
            if attachment.answers or not attachment.late(0) or id(attachment) in tried:
                continue
            if not _missing(probes, attachment) and not probes.lacks_pulse(attachment):
                attachment.answered()  # it was a window's
                continue
            if now >= attachment.again_at:
                waiting.append(attachment)
        turns = _Turns(each.attachment for each in self._trying)
        for attachment in in_turns(sorted(waiting, key=lambda each: each.again_at)):
            if turns.under_way >= MOST_USERS:
                break
            if turns.has(attachment) and self._try(probes, attachment):
                turns.take(attachment)

    def _try(self, probes: Probes, attachment: Attachment) -> bool:
        entries_only = frozenset(probes.entries_only)
        missing, pulse = _missing(probes, attachment), probes.pulse_turn
        lacks_pulse = probes.lacks_pulse(attachment)

        def make() -> tuple[_Links, PulseLinks]:
            links: _Links = {}
            try:
                for subject in missing:
                    links[subject] = probes.links_for(attachment, subject, entries_only)
                return links, probes.pulse_of(attachment, in_time=False) if lacks_pulse else PulseLinks()
            except BaseException:
                probes.let_go(list(links.values()))
                raise

        try:
            making = Aside(make, "argus-attach")
        except RuntimeError:  # no thread can be started
            attachment.again_at = time.monotonic() + SOON_S
            return False
        self._trying.append(_Trying(attachment, entries_only, pulse, lacks_pulse, making))
        return True

    def _take(self, probes: Probes, trying: _Trying) -> None:
        attachment = trying.attachment
        try:
            links, pulse = trying.making.result()
        except Exception:  # its process has ended, most likely; what fails for a file costs that file
            attachment.put_off()
            return
        there = any(each is attachment for each in probes.attachments)
        changed = trying.entries_only ^ probes.entries_only
        for subject, both in links.items():
            if there and subject in probes.probed and subject not in attachment.optional_links.keys() | changed:
                attachment.put(subject, both, trying.entries_only)
            elif any(both):
                probes.let_go([both])
        taken = trying.lacked_pulse and there and probes.take_pulse(attachment, pulse, trying.pulse)
        if pulse and not taken:
            probes.let_go([(pulse, [])])
        if not there:
            return
        # What has changed meanwhile is tried next.
        if not _missing(probes, attachment) and not probes.lacks_pulse(attachment):
            attachment.answered()
        elif trying.lacked_pulse and probes.lacks_pulse(attachment) and trying.pulse == probes.pulse_turn:
            attachment.put_off()  # the kernel refuses them, or some
        probes.write_prices([attachment])


class _Turns:
    """Who may have one more file tried. Whom that is refused has none until this one is forgotten.

    Args:
        tried: Files that are tried now.
    """

    def __init__(self, tried: Iterable[Attachment]) -> None:
        self.under_way = 0
        self._of_owners = Tally[frozenset[Owner]]()
        self._of_user = Tally[tuple[int, bool]]()
        """Those of its own, and those that it shares."""
        self._refused: set[frozenset[int]] = set()
        for each in tried:
            self.take(each)

    def has(self, attachment: Attachment) -> bool:
        """Whether this file may be tried."""
        users = attachment.users
        if users in self._refused:
            return False
        most = MOST_SLOW_TO_GO if attachment.slow_to_go else MOST_OF_OWNER
        if self._of_owners[attachment.shared_by] >= most:
            return False
        has = min(self._of_user[user, len(users) > 1] for user in users)
        if has < MOST - self.under_way or (not has and self.under_way < MOST_USERS):
            return True
        self._refused.add(users)
        return False

    def take(self, attachment: Attachment) -> None:
        """It is tried."""
        self.under_way += 1
        self._of_owners[attachment.shared_by] += 1
        self._of_user.update((user, len(attachment.users) > 1) for user in attachment.users)


def in_turns(attachments: Iterable[Attachment]) -> list[Attachment]:
    """Of each set of users one file, then of each another one."""
    before = Tally[frozenset[int]]()
    turns: list[tuple[int, Attachment]] = []
    for each in attachments:
        turns.append((before[each.users], each))
        before[each.users] += 1
    return [each for _, each in sorted(turns, key=lambda turn: turn[0])]


def _missing(probes: Probes, attachment: Attachment) -> list[Subject]:
    """Subjects whose probes a file lacks."""
    return sorted(probes.probed - probes.refused.keys() - attachment.optional_links.keys())
