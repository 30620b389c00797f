"""What a check is given, and what it hands back."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OK, WARNING, CRITICAL, UNKNOWN, ABSENT = "ok", "warning", "critical", "unknown", "absent"
EXIT_CODES = {OK: 0, WARNING: 1, CRITICAL: 2, UNKNOWN: 3, ABSENT: 3}
"""Exit codes of Nagios plug-ins (monitoring-plugins.org, development guidelines)."""
_WORST = (CRITICAL, WARNING, UNKNOWN, OK, ABSENT)
MAX_TEXT = 400
"""Characters of a text that are kept: it must fit in a line of mail."""
_REPORTED_AT_ONCE = 50
"""So many findings outlive the check that made them; more would fill its pipe."""
_NOTHING_THERE = (errno.EINVAL, errno.ENODEV, errno.ENXIO, errno.EOPNOTSUPP, errno.ENODATA)
"""Errors by which sysfs shows that a device lacks something. Other errors, such as EIO or ENFILE, mean that it cannot
be read."""


class Absent(Exception):
    """There is nothing of the kind here: no such device, or a kernel without the feature. Not a fault, and not OK."""


class Blind(Exception):
    """The thing may be there, but cannot be looked at: ``unknown``, with this reason."""


@dataclass
class Result:
    """What a check found.

    Attributes:
        name: The check's.
        status: ``ok``, ``warning``, ``critical``, ``unknown`` (it could not look) or ``absent`` (nothing to look at).
        text: What was found, in one line.
        hint: What to do about it, in one line; may be empty.
        figures: Numbers by ``figure`` or ``figure/device``; a unit ends the figure's name. What ends in ``_total`` only
            counts up while the node runs.
        facts: Words by name, such as versions, which are to be alike on nodes of one kind.
        seconds: How long it took.
    """

    name: str
    status: str
    text: str
    hint: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


def worst(statuses: list[str]) -> str:
    """The status of a run: critical before warning before unknown. Nothing looked at is unknown."""
    status_found = next((status for status in _WORST if status in statuses), ABSENT)
    return UNKNOWN if status_found == ABSENT else status_found


def clean(text: object) -> str:
    """One line of printable characters, at most ``MAX_TEXT``: messages of devices and plug-ins go into mails."""
    line = "".join(c if c.isprintable() else " " for c in str(text))
    return " ".join(line.split())[:MAX_TEXT]


class Found:
    """Gathers what a check finds; the worst of it is its status."""

    def __init__(self, report: Callable[[str, str, str], None] = lambda *_: None) -> None:
        self.figures: dict[str, float] = {}
        self.facts: dict[str, str] = {}
        self._findings: list[tuple[str, str, str]] = []
        self._report = report

    def add(self, status: str, text: str, hint: str = "") -> None:
        """Something of that status."""
        self._findings.append((status, text, hint))
        if len(self._findings) <= _REPORTED_AT_ONCE:
            self._report(status, text, hint)

    def warning(self, text: str, hint: str = "") -> None:
        """Something to look at in working hours."""
        self.add(WARNING, text, hint)

    def critical(self, text: str, hint: str = "") -> None:
        """Something that makes jobs fail or crawl: the node is to be drained."""
        self.add(CRITICAL, text, hint)

    def unknown(self, text: str, hint: str = "") -> None:
        """A part could not be looked at."""
        self.add(UNKNOWN, text, hint)

    @contextlib.contextmanager
    def part(self) -> Iterator[None]:
        """For one of several devices: an error is reported as unknown, and the others are checked all the same."""
        try:
            yield
        except Blind as reason:
            self.unknown(str(reason))

    def above(self, value: float, warning: float, critical: float, text: str, hint: str = "") -> None:
        """Grades a value that is bad when high: from ``warning`` and from ``critical`` on."""
        if value >= critical:
            self.critical(text, hint)
        elif value >= warning:
            self.warning(text, hint)

    def result(self, fine: str) -> Result:
        """The result; ``fine`` is its text where nothing was found."""
        by_severity = sorted(self._findings, key=lambda one: _WORST.index(one[0]))
        if not by_severity:
            return Result("", OK, fine, figures=self.figures, facts=self.facts)
        texts = [text for _, text, _ in by_severity[:6]]
        texts += [f"and {len(by_severity) - 6} more"] * (len(by_severity) > 6)
        hints = list(dict.fromkeys(hint for _, _, hint in by_severity if hint))
        return Result("", by_severity[0][0], "; ".join(texts), " ".join(hints[:3]), self.figures, self.facts)


@dataclass
class Look:
    """Where a check looks: every source can be put elsewhere.

    Attributes:
        limits: The check's thresholds, by name.
        root: Below it lie ``proc``, ``sys``, ``etc``: ``/``, or where a container has the host's.
        kmsg: The kernel log.
        before: Older figures of this check by Unix time, oldest first, of this boot only.
        note: Called with what is being done, so that a hanging check that is killed can be reported with where it hung.
        now: Unix time, s.
        report: Reports a finding at once (status, text, hint), so that it counts though the check may crash or hang
            later.
    """

    limits: Mapping[str, Any]
    root: Path = Path("/")
    kmsg: Path = Path("/dev/kmsg")
    before: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    note: Callable[[str], None] = lambda text: None
    now: float = field(default_factory=time.time)
    report: Callable[[str, str, str], None] = lambda *_: None

    def found(self) -> Found:
        """Where to put what is found; nothing of it is lost, whatever happens to the check."""
        return Found(self.report)

    def path(self, path: str) -> Path:
        """A path such as ``proc/stat`` below the root."""
        return self.root / path

    def read(self, path: str) -> str:
        """A file's text.

        Raises:
            Absent: It does not exist, or its device has none.
            Blind: It may not, or cannot be read.
        """
        where = self.path(path)
        try:
            return where.read_bytes().decode("utf-8", "surrogateescape").strip()
        except (FileNotFoundError, NotADirectoryError):
            raise Absent(f"there is no {where}") from None
        except PermissionError:
            who = "" if os.geteuid() == 0 else ": run it as root"
            raise Blind(f"{where} may not be read{who}") from None
        except OSError as failure:
            kind = Absent if failure.errno in _NOTHING_THERE else Blind
            raise kind(f"{where}: {failure.strerror}") from None

    def number(self, path: str) -> int:
        """A file that holds one integer; raises as ``read``."""
        text = self.read(path)
        try:
            return int(text, 0)
        except ValueError:
            raise Blind(f"{self.path(path)} holds '{clean(text)[:40]}', which is no number") from None

    def optional(self, path: str) -> int | None:
        """The same, None where it cannot be had."""
        try:
            return self.number(path)
        except (Absent, Blind):
            return None

    def folders(self, pattern: str) -> list[Path]:
        """What matches below the root, sorted."""
        return sorted(self.root.glob(pattern))

    def moved(self, figures: Mapping[str, float], name: str) -> float | None:
        """By how much a counter rose since the oldest look in memory (an hour by default); None: first look.

        A counter that fell was reset: it counts from 0.
        """
        for _, past in self.before:
            if name in past:
                rise = figures[name] - past[name]
                return rise if rise >= 0 else figures[name]
        return None

    @property
    def span_s(self) -> float:
        """How long ago the oldest look in memory was, s; 0: this is the first."""
        return max(0.0, self.now - self.before[0][0]) if self.before else 0.0

    def since(self) -> str:
        """The same in words, for texts."""
        return f"in the last {self.span_s / 60:.0f} min"


def numbers(text: str) -> Iterator[tuple[str, int]]:
    """Lines such as ``MemFree:  123 kB`` or ``oom_kill 0`` as name and number."""
    for line in text.splitlines():
        words = line.replace(":", " ").split()
        if len(words) > 1 and words[1].lstrip("-").isdigit():
            yield words[0], int(words[1])


def readable(result: dict[str, Any], name: str) -> Result:
    """A result from what a child or plug-in sent; what does not fit is ``unknown``."""
    status = result.get("status")
    if not isinstance(status, str) or status not in EXIT_CODES:
        return Result(name, UNKNOWN, clean(f"gave the status {status!r}, which is none"))
    figures, facts = result.get("figures"), result.get("facts")
    return Result(
        name,
        status,
        clean(result.get("text", "")),
        clean(result.get("hint", "")),
        {
            clean(key): float(value)
            for key, value in (figures.items() if isinstance(figures, dict) else ())
            if isinstance(value, int | float) and abs(value) <= sys.float_info.max  # neither NaN nor a huge integer
        },
        {clean(key): clean(value) for key, value in (facts.items() if isinstance(facts, dict) else ())},
    )
