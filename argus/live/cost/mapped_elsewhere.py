"""Which files are mapped by processes that are not traced: probes that all processes have would cost these, too."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping

from argus.capture.process.targets import FileKey, Library, executable_mappings, processes
from argus.system.aside import Aside

BELIEVED_S = 5.0
"""For so long what was found is believed."""
REST = 50
"""After that nobody is looked at for so many times as long as it took: each process's list of mappings is read, some ms
of a large one, of the time that its owner has for being read."""
MOST_OF_USER, MINUTE_S = 4, 60.0
"""Of looks in a minute, those that one user's files may cause where there are several owners: others wait for them."""
MOST_FILES = 65_536
"""Files that are remembered. Others count as mapped."""
_File = tuple[str, int]


class MappedElsewhere:
    """Looks at all processes of the node, seldom, and in a thread of its own.

    Args:
        let_through: Whether a process is traced, or may be. Any thread may ask.
    """

    def __init__(self, let_through: Callable[[int], bool]) -> None:
        self._let_through = let_through
        self.looking: Aside[tuple[set[_File], float]] | None = None
        """The look that goes on."""
        self._found: set[_File] = set()
        self._found_at = -math.inf
        self._again_at = -math.inf
        self._looks: list[tuple[float, int]] = []
        """Of the last minute: when, and of whose file."""

    def now(self, libraries: Mapping[FileKey, Library]) -> set[FileKey]:
        """Which of these files such a process maps, seen at once."""
        sought = {(library.device, library.inode): key for key, library in libraries.items()}
        mapped: set[FileKey] = set()
        for file in self._files():
            if file in sought:
                mapped.add(sought[file])
            if len(mapped) == len(libraries):
                break
        return mapped

    def may(self, user: int) -> bool:
        """Whether a user's files may have all processes looked at once more."""
        now = time.monotonic()
        self._looks = [(at, of) for at, of in self._looks if now - at < MINUTE_S]
        return sum(of == user for _, of in self._looks) < MOST_OF_USER

    def begin(self, user: int = -1) -> Aside[tuple[set[_File], float]] | None:
        """Has all processes looked at, for a user's file. None: they are not, since that was done not long ago."""
        if self.looking is None and time.monotonic() >= self._again_at:
            self.looking = Aside(self._look, "argus-mappings")
            self._looks.append((time.monotonic(), user))
        return self.looking

    def take(self) -> None:
        """Takes over what a look has found that has ended."""
        if self.looking is None or not self.looking.wait(0):
            return
        looked, self.looking = self.looking, None
        self._found, took_s = looked.result()
        self._found_at = time.monotonic()
        self._again_at = self._found_at + max(BELIEVED_S, REST * took_s)

    @property
    def known(self) -> bool:
        """Whether ``among`` has what was found lately."""
        return time.monotonic() - self._found_at <= BELIEVED_S

    def among(self, libraries: Mapping[FileKey, Library]) -> set[FileKey]:
        """Which of these files such a process maps, or may map."""
        if not self.known or len(self._found) >= MOST_FILES:
            return set(libraries)
        return {key for key, library in libraries.items() if (library.device, library.inode) in self._found}

    def _look(self) -> tuple[set[_File], float]:
        begun, found = time.monotonic(), set[_File]()
        for file in self._files():
            found.add(file)
            if len(found) >= MOST_FILES:
                break
        return found, time.monotonic() - begun

    def _files(self) -> Iterator[_File]:
        for pid in processes():
            if self._let_through(pid):
                continue
            try:
                mappings = executable_mappings(pid)
            except OSError:
                continue
            yield from ((mapping.device, mapping.inode) for mapping in mappings)
