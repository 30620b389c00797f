"""The interface of detectors, and how they are asked.

A diagnosis goes through :data:`argus.diagnose.detectors.DETECTORS` in order, in one thread, and calls ``detect(case)``
of each at most once. The case (:mod:`argus.diagnose.case`) answers what was asked for and what is stored, each read
once, and has the suspects of the detectors before. What a detector returns is added to them, in place of those that it
``replaces``. When all were asked, :mod:`argus.diagnose.whatif.relief`, :mod:`argus.diagnose.causes.behaviour` and
:mod:`argus.diagnose.causes.node_health` add what else was found out about the suspects that are left, and
:func:`argus.diagnose.findings.findings_of` makes one finding of each.

A detector is one file with a function ``detect``, and one line of the list. One that raises what it should not is left
out and named (:func:`examining`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from argus.diagnose.case import Case
from argus.diagnose.suspect import Suspect
from argus.model.errors import ArgusError
from argus.system import debug

_logged: set[tuple[str, type[Exception]]] = set()
"""Defects whose traceback was written: a job that is followed meets them each round."""

ANY = "any"
"""Every detector: for :attr:`Entry.unless`."""


class Detector(Protocol):
    """Something that can be wrong with a job. A module with this function is one."""

    def detect(self, case: Case) -> list[Suspect]:
        """Whom or what it suspects; empty: nobody, or what it needs is not stored. What readers of the verdict should
        know all the same goes into :attr:`argus.diagnose.case.Case.notes`.

        Raises:
            ArgusError: The store cannot be asked.
        """


@dataclass(frozen=True)
class Entry:
    """A detector in the list, and when it is asked.

    Attributes:
        name: Of :attr:`argus.diagnose.suspect.Suspect.detector`.
        detector: It.
        unless: It is not asked where one of these detectors suspects something already.
        only: It is asked where this detector suspects something, and no other; empty: always.
        other_ranks: What it suspects of just the ranks of an earlier suspect is left out.
        last: Where it suspects something, no other detector is asked.
    """

    name: str
    detector: Detector
    unless: tuple[str, ...] = ()
    only: str = ""
    other_ranks: bool = False
    last: bool = False

    def applies(self, case: Case) -> bool:
        before = {suspect.detector for suspect in case.suspects}
        if before and (ANY in self.unless or before & set(self.unless)):
            return False
        return not self.only or (before == {self.only} and len(case.suspects) == 1)


def ask(detectors: Iterable[Entry], case: Case) -> None:
    """Asks the detectors in order; their suspects are then those of the case."""
    for entry in detectors:
        if not entry.applies(case):
            continue
        fresh: list[Suspect] = []
        with examining(case, entry.name):
            fresh = entry.detector.detect(case)
        if entry.other_ranks:
            named = [suspect.ranks for suspect in case.suspects]
            fresh = [suspect for suspect in fresh if suspect.ranks not in named]
        replaced = [old for suspect in fresh for old in suspect.replaces]
        for suspect in fresh:
            # Of another detector's suspect it may only add details.
            suspect.detector = suspect.detector or entry.name
        case.suspects = [old for old in case.suspects if old not in replaced] + fresh
        if fresh and entry.last:
            return


@contextlib.contextmanager
def examining(case: Case, name: str) -> Iterator[None]:
    """Surrounds a part of a diagnosis: a defect in it ends here, its traceback is logged, and ``case.failed`` names it.

    Raises:
        ArgusError: The store cannot be asked.
    """
    try:
        yield
    except ArgusError:
        raise
    except Exception as failure:
        case.failed.append(name)
        if (name, type(failure)) not in _logged:
            _logged.add((name, type(failure)))
            debug.crash(failure)
