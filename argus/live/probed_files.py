"""Which files have probes: each that a traced process maps, once for all processes or for each target apart."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence

from argus.capture.attachment import Attachment
from argus.capture.process.follow import Family
from argus.capture.process.targets import TORCH_PYTHON, FileKey, Library, Target, executable_mappings, processes
from argus.live.session import Session
from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.system.aside import Aside

KEPT_FILES = 64
"""Files that no traced process maps any more and whose probes stay: a job that starts again maps the same ones, and the
calls that it makes before it was noticed are recorded. Of others (a container's, that is made anew for each job) there
are as many as the trace lives long."""
ATTACH_S = 5.0
"""Longest wait for probes on a file: tens of ms where its pages can be read, more on a busy node. What comes later is
taken over."""


class ProbedFiles:
    """Puts probes on files, and takes them off.

    Args:
        session: The trace.
        family: Which processes are let through.
        timed: Whether a process may have GPU times.

    Attributes:
        attached: Probes on files.
        released: Times that probes were taken off a file that no traced process maps any more.
        named: PIDs that the user asked for one by one.
    """

    def __init__(self, session: Session, family: Family, timed: Callable[[int], bool] = lambda _: False) -> None:
        self._session = session
        self._family = family
        self._timed = timed
        self.attached: list[Attachment] = []
        self.released = 0
        self.named: set[int] = set()
        self._shared: dict[FileKey, bool] = {}
        """Whether a file is probed once for all processes."""
        self._twins: dict[FileKey, FileKey] = {}
        """Files of overlays in which the probes of another one stand (``_has_twin``)."""
        self._unused: dict[FileKey, None] = {}
        """Files with probes that no traced process maps, the one that was mapped last comes last."""
        self._attaching: dict[tuple[FileKey, int | None], Aside[Attachment]] = {}
        """Probes that the kernel has been putting on a file for longer than ``ATTACH_S``."""

    def probes(self, key: FileKey) -> bool:
        """Whether a file is probed once for all processes."""
        return self._shared.get(key, False)

    def decided(self, key: FileKey) -> bool:
        """Whether it is known how a file is probed."""
        return key in self._shared

    def attach(self, users: Sequence[Target], pids: set[int], *, running: bool) -> None:
        """Puts probes on every library in use that has none yet.

        Whether a file is probed once for all processes, or for each target apart, is decided when it is first seen and
        kept: both at once would record every call twice.

        Args:
            users: Processes whose libraries are probed.
            pids: All processes that are traced, or may be.
            running: The trace has begun.

        Raises:
            ArgusError: The trace has not begun, and nothing at all can be probed of the processes that the user named,
                or of all. What cannot be probed otherwise is counted and noted, and the rest goes on: a file that the
                kernel refuses may be anybody's.
        """
        self._adopt_attached()
        wanted: dict[FileKey, list[tuple[Library, Target]]] = {}
        for target in users:
            for library in target.libraries:
                wanted.setdefault(library.key, []).append((library, target))
        # Decided for all files before the first is probed: that takes long, and probes cost the job meanwhile.
        fresh = {key: uses[0][0] for key, uses in wanted.items() if key not in self._shared}
        elsewhere = set() if self._session.options.children or not fresh else self._mapped_elsewhere(fresh, pids)
        self._shared.update({key: key not in elsewhere for key in fresh})
        failures: list[tuple[ArgusError, set[int]]] = []
        for key, uses in wanted.items():
            probed = {attachment.pid for attachment in self.attached if attachment.library.key == key}
            probed |= {pid for at, pid in self._attaching if at == key}
            if not probed and self._has_twin(key, uses):
                continue
            if self._shared[key]:
                if not probed:
                    failures += self._attach_one(uses, None, running)
                continue
            for library, target in uses:
                if target.pid not in probed:
                    failures += self._attach_one([(library, target)], target.pid, running)
        if failures and not running and not self.attached and not self._attaching:
            concerned = set[int]().union(*(users for _, users in failures))
            if concerned & self.named if self.named else pids <= concerned:
                raise failures[0][0]

    def _has_twin(self, key: FileKey, uses: list[tuple[Library, Target]]) -> bool:
        """Whether probes stand in a file already, by another name: two overlays may show one file below them, whose
        device /proc/PID/maps distinguishes from Linux 6.8 on."""
        if key in self._twins:
            return True
        library = uses[0][0]
        # All of its users: one alone could make its own memory look so.
        pids = [target.pid for _, target in uses if target.alive()]
        if not pids or not library.file.on_overlay:
            return False
        for other in self.attached:
            alike = other.pid is None and other.library.file.on_overlay and other.library.stamp == library.stamp
            if alike and all(self._session.probes.stands_in(other, library, pid) for pid in pids):
                self._twins[key] = other.library.key
                return True
        return False

    def _attach_one(
        self, uses: list[tuple[Library, Target]], pid: int | None, running: bool
    ) -> list[tuple[ArgusError, set[int]]]:
        """Attaches to a file by the path of the first of its users that still runs. Returns why it cannot be probed,
        and whom that concerns, if that is so."""
        # Where Python's own function for backward passes is probed, the engine's would report each begin twice.
        named = all(target.has(TORCH_PYTHON) for _, target in uses)
        without = ("backward_begin",) if named else ()
        timed = any(self._timed(target.pid) for _, target in uses)
        for library, target in uses:
            if not target.alive():
                continue  # its file can still be probed, and nobody would call it
            try:
                self._probe(library, pid, without, timed, target.identity.owner)
                return []
            except ArgusError as failure:
                if not target.alive():
                    continue
                self._session.losses.count("attach_failed", *(self._session.whom(each.pid) for _, each in uses))
                self._session.note(failure.message)
                return [(failure, {each.pid for _, each in uses})]
        ended = [target.pid for _, target in uses if target.pid in self.named]
        if not running and ended:
            which = ", ".join(map(str, ended))
            raise ArgusError(f"process {which} ended before it could be probed", "", EXIT_UNAVAILABLE)
        return []

    def _probe(
        self, library: Library, pid: int | None, without: tuple[str, ...], timed: bool, owner: tuple[int, str]
    ) -> None:
        """Probes a file, in a thread of its own: the kernel reads the file's pages, which may never come.

        Raises:
            ArgusError: The kernel refuses, or the file does not answer.
        """
        attaching = Aside(
            lambda: self._session.probes.attach(library, pid, without=without, timed=timed, owner=owner),
            "argus-attach",
        )
        if attaching.wait(ATTACH_S):
            self.attached.append(attaching.result())
            return
        self._attaching[library.key, pid] = attaching
        raise ArgusError(f"{library.shown_path} cannot be probed: its file system does not answer", "")

    def _adopt_attached(self) -> None:
        """Takes over probes on files that answered late."""
        for key, attaching in list(self._attaching.items()):
            if attaching.wait(0):
                del self._attaching[key]
                with contextlib.suppress(ArgusError, OSError):
                    self.attached.append(attaching.result())

    def of(self, target: Target) -> list[Attachment]:
        """Probes on the files that a process maps."""
        keys = {self._twins.get(library.key, library.key) for library in target.libraries}
        return [a for a in self.attached if a.library.key in keys and a.pid in (None, target.pid)]

    def _mapped_elsewhere(self, libraries: Mapping[FileKey, Library], pids: set[int]) -> set[FileKey]:
        """Which files a process maps that is not let through."""
        sought = {(library.device, library.inode): key for key, library in libraries.items()}
        mapped: set[FileKey] = set()
        for pid in processes():
            if pid in pids or pid in self._family:
                continue
            try:
                mappings = executable_mappings(pid)
            except OSError:
                continue
            mapped.update(sought[file] for m in mappings if (file := (m.device, m.inode)) in sought)
            if len(mapped) == len(libraries):
                break
        return mapped

    def was_used(self, target: Target) -> None:
        """A process that mapped these files has ended: they are the last to lose their probes."""
        for library in target.libraries:
            if library.key in self._shared:
                self._unused.pop(library.key, None)
                self._unused[library.key] = None

    def release(self, users: Sequence[Target]) -> None:
        """Takes the probes off files that no traced process maps any more, but for the newest ``KEPT_FILES``.

        Args:
            users: Processes that are there.
        """
        used = {library.key for target in users for library in target.libraries}
        used |= {self._twins[key] for key in used & self._twins.keys()}
        there = {target.pid for target in users}
        for key in used:
            self._unused.pop(key, None)
        for key in self._shared.keys() - used:
            self._unused.setdefault(key)
        old = set(itertools.islice(self._unused, max(len(self._unused) - KEPT_FILES, 0)))
        gone = [each for each in self.attached if each.library.key in old or each.pid not in (None, *there)]
        for key in old:
            del self._unused[key], self._shared[key]
        if old:
            self._twins = {key: of for key, of in self._twins.items() if key not in old and of not in old}
        if gone:
            self.released += len(gone)
            released = set(map(id, gone))
            self.attached = [each for each in self.attached if id(each) not in released]
            self._session.probes.release(gone)
