"""What of a process was left out since it is beyond what any process brings, counted for that process.

Counted where it is read: in the reader, whose answers have it, or in the tracer itself where there is no reader.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable

COUNTERS = ("python_lists_cut", "mappings_cut", "files_refused", "cupti_libraries_refused")
_MOST = 4096
"""Processes and counters that are kept until they are taken; what is of others meanwhile is nobody's (process 0)."""
_REMEMBERED = 16_384
_counted: Counter[tuple[str, int]] = Counter()
_seen: OrderedDict[tuple[str, int, int, Hashable], None] = OrderedDict()


def count(counter: str, pid: int) -> None:
    """Counts one of ``COUNTERS``."""
    key = (counter, pid)
    _counted[key if key in _counted or len(_counted) < _MOST else (counter, 0)] += 1


def count_once(counter: str, pid: int, what: Hashable = ()) -> None:
    """Counts something that is found again each time it is looked at: once for each process."""
    key = (counter, pid, _started(pid), what)
    if key not in _seen:
        count(counter, pid)
    _seen[key] = None
    _seen.move_to_end(key)
    while len(_seen) > _REMEMBERED:
        _seen.popitem(last=False)


def take() -> list[tuple[str, int, int]]:
    """What was counted since the last call: counter, process, how many."""
    taken = [(counter, pid, number) for (counter, pid), number in _counted.items()]
    _counted.clear()
    return taken


def _started(pid: int) -> int:
    """When a process started, in ticks; 0: it has ended. Numbers of processes are used again."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read(4096).rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0
