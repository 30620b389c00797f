"""What a process and its children take: CPU time, memory, and how fast that grows."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections import Counter as Tally
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from scipy import special

from argus.model.errors import ArgusError

LEAST_READINGS = 20
"""Fewer do not show how they scatter."""
_MOST_CORRELATION = 0.9
"""Of one reading with the next: what is left of twenty readings is one then."""


@dataclass(frozen=True)
class Slope:
    """Growth of a value, with its 95 % interval.

    Attributes:
        gain: What is gained in a unit of time.
        error: Half of the interval.
    """

    gain: float
    error: float

    @property
    def low(self) -> float:
        """The lower end of the interval."""
        return self.gain - self.error

    @property
    def high(self) -> float:
        """The upper end of the interval."""
        return self.gain + self.error


def slope(times: Sequence[float], values: Sequence[float]) -> Slope:
    """Least squares, with an interval that holds for readings that follow each other.

    Residuals that follow each other (memory does) carry less information than as many that do not: n readings with the
    correlation r from one to the next count as n (1 - r) / (1 + r), in the variance and in Student's t.

    Raises:
        ArgusError: There are too few readings.
    """
    x, y = np.array(times, float), np.array(values, float)
    if len(x) < LEAST_READINGS:
        raise ArgusError("too few readings for a slope", "Let it last longer")
    x = x - x.mean()
    gain = float((x * (y - y.mean())).sum() / (x * x).sum())
    left = y - y.mean() - gain * x
    spread = float((left * left).sum())
    r = float((left[1:] * left[:-1]).sum() / spread) if spread else 0.0
    # Of residuals, in which a line was fitted, it is too small by (2 + 4 r) / n (Marriott and Pope, Biometrika 41).
    r = min(max((r + 2 / len(x)) / (1 - 4 / len(x)), 0.0), _MOST_CORRELATION) if spread else 0.0
    freedom = max(len(x) * (1 - r) / (1 + r) - 2, 1.0)
    error = math.sqrt(spread / (len(x) - 2) / float((x * x).sum()) * (1 + r) / (1 - r))
    return Slope(gain, _student(freedom) * error)


def _student(freedom: float) -> float:
    """The 97.5 % point of Student's t."""
    return float(special.stdtrit(freedom, 0.975))


@dataclass
class Watched:
    """What a process, or several, had, time after time. ``parts``: MB by kind of mapping, the newest."""

    minutes: list[float] = field(default_factory=list)
    own_mb: list[float] = field(default_factory=list)
    parts: Tally[str] = field(default_factory=Tally)

    def look(self, minutes: float, *pids: int) -> None:
        """Reads what processes have now, together; nothing if none is there."""
        parts: Tally[str] = Tally()
        for pid in pids:
            with contextlib.suppress(OSError):
                kind = ""
                for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
                    name, _, rest = line.partition(":")
                    if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                        kind = _kind(line)
                    elif name == "Pss":
                        parts[kind] += int(rest.split()[0])
        if parts:
            self.minutes.append(minutes)
            self.own_mb.append((parts.total() - parts["files"]) / 1024)
            self.parts = Tally({kind: kib // 1024 for kind, kib in parts.items()})

    def slope_from(self, minutes: float) -> Slope:
        """Growth in MB a minute from this minute on."""
        chosen = [at for at, when in enumerate(self.minutes) if when >= minutes]
        return slope([self.minutes[at] for at in chosen], [self.own_mb[at] for at in chosen])


def _kind(mapping: str) -> str:
    words = mapping.split(maxsplit=5)
    path = words[5] if len(words) > 5 else ""
    if not path or path.startswith("[anon"):
        return "anonymous"
    if path == "[heap]":
        return "heap"
    if "bpf-map" in path:
        return "rings of the kernel"
    return "shared with the job" if "memfd" in path or path.startswith("/dev/shm") else "files"


def cpu_s(pid: int) -> float:
    """CPU time of a process so far, s; 0: it is not there."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def family(pid: int) -> list[int]:
    """A process and everything below it."""
    found, queue = [], [pid]
    while queue:
        found.append(queue.pop())
        for task in Path(f"/proc/{found[-1]}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                queue += map(int, task.read_text().split())
    return found


def pss_bytes(pid: int) -> tuple[int, int]:
    """Memory of a process, what it shares in part (PSS): its own, and that with pages that files have (code, which the
    system takes back when it needs room). 0: it has ended."""
    with contextlib.suppress(OSError):
        return own_and_whole(Path(f"/proc/{pid}/smaps").read_bytes())
    return 0, 0


def own_and_whole(smaps: bytes) -> tuple[int, int]:
    """The same of the text of /proc/PID/smaps."""
    own = whole = pss = 0
    of_file = False
    for line in smaps.split(b"\n"):
        if re.match(rb"[0-9a-f]+-[0-9a-f]+ ", line):
            of_file = _kind(os.fsdecode(line)) == "files"
        elif line.startswith(b"Pss:"):
            pss = int(line.split()[1]) << 10
            whole += pss
            own += 0 if of_file else pss
        elif line.startswith(b"Anonymous:") and of_file:  # written to since: relocations
            own += min(int(line.split()[1]) << 10, pss)
    return own, whole


PARTS = ("tracer", "reader", "engine", "others")
"""Of Argus's processes. Others: the one that demangles names, compilers, what else a trace starts."""


class Peaks:
    """The most memory that a trace has had: all of its processes together, and each kind apart.

    The reader's kind has its nursery too. What readings a quarter of a second apart do not see is missing.

    Attributes:
        own: Of all processes at once, bytes, without pages that files have.
        whole: The same with these.
        parts: Of each of ``PARTS``, own bytes at the moment of ``own``.
        each: The most of each by itself.
    """

    def __init__(self) -> None:
        self.own = self.whole = 0
        self.parts: Tally[str] = Tally(dict.fromkeys(PARTS, 0))
        self.each: Tally[str] = Tally(dict.fromkeys(PARTS, 0))

    def look(self, tracer: int, store: Path | None = None) -> None:
        """Reads what there is now.

        Args:
            tracer: PID of ``argus trace``.
            store: Folder of its embedded store, whose engine is no child of it.
        """
        engine = 0 if store is None else engine_of(store)
        now: Tally[str] = Tally()
        with_files = 0
        for pid in {*family(tracer), *(family(engine) if engine else ())}:
            own, whole = pss_bytes(pid)
            now[self._part(pid, tracer, engine)] += own
            with_files += whole
        if now.total() > self.own:
            self.own, self.parts = now.total(), now
        self.whole = max(self.whole, with_files)
        self.each |= now

    @staticmethod
    def _part(pid: int, tracer: int, engine: int) -> str:
        if pid in (tracer, engine):
            return "tracer" if pid == tracer else "engine"
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"capture/reader/process.py" in command:
                return "reader"
            if b"argus.store.engine" in command:
                return "engine"
        return "others"

    def __str__(self) -> str:
        parts, each = (", ".join(f"{part} {of[part] >> 20}" for part in PARTS) for of in (self.parts, self.each))
        return f"{self.own >> 20} MiB ({parts}); each at most {each}; with pages of files {self.whole >> 20} MiB"


def engine_of(store: Path) -> int:
    """The process that owns the embedded store in a folder; 0: none does."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int((store / "lock").read_text().split()[0])
    return 0
