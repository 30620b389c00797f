"""Windows: stretches of time in which some functions are probed. Their probes are put on, and taken away, by threads of
their own: however long a file, or a kernel that is busy, takes, rings are drained meanwhile."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from argus.capture.attachment import Attachment, Subject
from argus.capture.kernel.links import PATIENCE_S, Closing, LateError, Links, close_links, link_in_time
from argus.capture.probing.accounts import Users
from argus.capture.probing.patience import Patience
from argus.system.aside import Aside

Points = dict[str, list[tuple[int, int]]]
"""Programs, with file offsets and cookies."""
GOING_NS = 1_000_000_000
"""Within that a window's probes are gone where everybody answers, or those of one file after those of another: before,
no other window begins."""
LONGEST_GOING_NS = 8_000_000_000
"""However many there are, none is waited for longer. On a busy node those of 30 files took 6.3 s. A window that begins
before is none of a job whose files still have theirs."""


class NotPutError(Exception):
    """Probes are not on a file.

    Attributes:
        failure: Why.
        note: To be called by the thread that looks after files that were late. Returns whether that is one more of what
            the file lacked.
    """

    def __init__(self, failure: OSError, note: Callable[[], int]) -> None:
        super().__init__(failure)
        self.failure, self.note = failure, note


def put_in_time(attachment: Attachment, make: Callable[[], list[int]], patience: Patience) -> list[int]:
    """Probes a file, which is waited for a while, and not at all while it is not known that it answers.

    Args:
        attachment: The file.
        make: Returns links.
        patience: How long it is waited for.

    Raises:
        NotPutError: It does not answer, or did not, or there is no time for it.
        OSError: Its process has ended.
    """
    if not attachment.answers:
        raise NotPutError(TimeoutError(errno.ETIMEDOUT, "the file did not answer before"), attachment.count_left_out)
    seconds, begun = patience.seconds(attachment), time.monotonic()
    if not seconds or patience.hangs(attachment):
        raise NotPutError(TimeoutError(errno.ETIMEDOUT, "others have taken the time"), attachment.skip)
    came = False
    try:
        links = link_in_time(make, seconds)
        came = True
    except OSError as failure:
        came = failure.errno == errno.ESRCH
        if came:
            raise
        late = failure.wait if isinstance(failure, LateError) else lambda _: True
        patience.note_late(attachment, late)
        raise NotPutError(failure, partial(attachment.note_late, late)) from failure
    finally:
        patience.spend(attachment, time.monotonic() - begun, came=came)
    return links


class Late(NamedTuple):
    """A file that lacks its probes, or some, in a window.

    Attributes:
        attachment: The file.
        note: As ``NotPutError`` has it.
    """

    attachment: Attachment
    note: Callable[[], int]


class Window:
    """A stretch of time for which some subjects are probed, at their entries. It begins once the probes are on that
    come in time, and ends by itself, both on a thread of its own: whoever polls may be late, and the job would pay for
    it.

    Args:
        subjects: Which.
        files: Files, with what is to be probed of them, in the order to go through them.
        put: Returns links that hold a program's probes on a file, or raises as ``put_in_time``.
        seconds: For how long.
        hits: Calls of each function so far, shape (256,), by its number.
        only: Numbers of the calls that are probed; None: all of these subjects.

    Attributes:
        subjects, only: As above.
        begin_ns: When all probes were on that came, CLOCK_MONOTONIC; 0: they are not yet, or none came.
        end_ns: When they began to go; 0: they have not. Of later calls only some were seen.
        hits: Calls of each function meanwhile, shape (256,), by its number, once it has ended.
        closing: Of its probes, once it has ended.
        late: Files that lack their probes, or some, once it has begun, or ended: what processes called that map them
            was seen in part.
        came: Files that came while it was opened, and have none of its probes.
        unsettled: Whether these are to be taken note of (``Probes.settle_window``).
        failure: What broke it.
    """

    def __init__(
        self,
        subjects: frozenset[Subject],
        files: Sequence[tuple[Attachment, Points]],
        put: Callable[[Attachment, str, list[tuple[int, int]]], list[int]],
        seconds: float,
        hits: Callable[[], NDArray[np.int64]],
        only: Collection[int] | None = None,
    ) -> None:
        self.subjects, self.only = subjects, only
        self._files, self._put, self._count = files, put, hits
        self._known = {id(attachment) for attachment, _ in files}
        self.hits = np.zeros(256, np.int64)
        self.begin_ns = self.end_ns = 0
        self.late: list[Late] = []
        self.came: list[Attachment] = []
        self.unsettled = True
        self.failure: BaseException | None = None
        self._links: list[tuple[Attachment, list[int]]] = []
        self.closing = Closing(())
        self._over, self._closes = threading.Event(), threading.Event()
        self._gone = False
        self._looked_ns = 0
        self._thread = threading.Thread(target=self._run, args=(seconds,), name="argus-window", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether its thread has nothing left to do: what broke it is known."""
        return self._closes.is_set()

    @property
    def lacking(self) -> list[Attachment]:
        """Files of ``late`` and ``came``."""
        return [*(each.attachment for each in self.late), *self.came]

    def lacks(self, attachment: Attachment, pulse: Collection[int]) -> bool:
        """Whether a file with functions of it came while it was opened. ``pulse``: calls that are probed anyway."""
        return id(attachment) not in self._known and bool(window_points(attachment, self.subjects, pulse, self.only))

    def _run(self, seconds: float) -> None:
        try:
            self._open()
            if self._links and not self._over.is_set():
                before = self._count()
                self.begin_ns = time.monotonic_ns()
                self._over.wait(seconds)
                self.hits = self._count() - before
        except BaseException as failure:
            self.failure = failure
            if not self.begin_ns:
                known = {id(each.attachment): each for each in self.late}
                self.late = [known.get(id(each), Late(each, lambda: 0)) for each, _ in self._files]
        finally:
            self.end_ns = time.monotonic_ns()  # threads that close are begun later: calls meanwhile are in no window
            try:
                self.closing = Closing(by_user((attachment, (links, [])) for attachment, links in self._links))
            except BaseException as failure:
                self.failure = failure
                with contextlib.suppress(BaseException):  # a file that hangs holds nobody up
                    Aside(partial(close_links, [(links, []) for _, links in self._links]), "argus-unlink")
            finally:  # whatever fails, other windows begin
                self._closes.set()

    def _open(self) -> None:
        """Puts the probes on. If that breaks, all files lack theirs."""
        try:
            for attachment, by_program in self._files:
                links: list[int] = []
                self._links.append((attachment, links))
                try:
                    self._probe(attachment, by_program, links)
                except NotPutError as why:
                    self.late.append(Late(attachment, why.note))
        finally:
            self._links = [(attachment, links) for attachment, links in self._links if links]

    def _probe(self, attachment: Attachment, by_program: Points, links: list[int]) -> None:
        for name, points in by_program.items():
            if self._over.is_set():
                return
            try:
                links += self._put(attachment, name, points)
            except OSError as failure:
                if failure.errno != errno.ESRCH:  # its process has ended
                    raise NotPutError(failure, lambda: 0) from failure

    def gone(self, patience: Patience | None = None, alone: Users = frozenset()) -> bool:
        """Whether it has ended, and its probes are gone, but for those that are not waited for: once this is so, it
        stays so. Not waited for are those of files that hang, and those of users who have no time left.

        Args:
            patience: Of windows, if another one waits for it: users have that time.
            alone: Who trains alone, if somebody does, whose files are waited for anyway.
        """
        if self._gone or not self.over:
            return self._gone
        now_ns, end_ns, moved_ns = time.monotonic_ns(), self.end_ns, self.closing.moved_ns
        hang = bool(moved_ns) and now_ns - max(moved_ns, end_ns) > GOING_NS
        self._gone = self.closing.wait(0) or hang or now_ns - end_ns > LONGEST_GOING_NS
        if not self._gone and now_ns - end_ns > GOING_NS and patience is not None:
            waited_s = (now_ns - max(self._looked_ns, end_ns + GOING_NS)) / 1e9
            going = {attachment.users for attachment, _ in self.there()}
            bounded = {account for account in going if not account <= alone}
            have_time = patience.charge_going(bounded, waited_s)
            self._gone = bounded == going and not have_time
        self._looked_ns = now_ns
        return self._gone

    def there(self) -> list[tuple[Attachment, Callable[[float], bool]]]:
        """Files whose probes are not gone, and what returns whether they are; all, if it has not ended."""
        if not self.over:
            return [(each, partial(self._closed, each)) for each, _ in self._files]
        closing, files = self.closing, enumerate(self._links)
        return [(each, partial(closing.closed, number)) for number, (each, _) in files if not closing.closed(number)]

    def _closed(self, attachment: Attachment, _: float = 0.0) -> bool:
        if not self.over:
            return False
        numbers = (number for number, (each, _) in enumerate(self._links) if each is attachment)
        return all(map(self.closing.closed, numbers))

    def end(self) -> None:
        """Has it end now, or not begin."""
        self._over.set()

    def let_go(self, seconds: float) -> None:
        """Ends it, and waits for so long at most until its probes are gone."""
        begun = time.monotonic()
        self.end()
        self._thread.join(seconds)
        if self.over:
            self.closing.wait(max(seconds - (time.monotonic() - begun), 0.0))

    def close(self) -> None:
        """Ends it now, if it has not ended, and waits until its probes are gone, or for a while."""
        self.end()
        self._thread.join(PATIENCE_S)
        self.closing.wait(PATIENCE_S)


def by_user(links: Iterable[tuple[Attachment, Links]]) -> list[tuple[frozenset[int], Links]]:
    """Those of a file that several users map do not wait for what one of them has besides."""
    return [(attachment.users, both) for attachment, both in links]


def window_points(
    attachment: Attachment, subjects: Iterable[Subject], pulse: Collection[int], only: Collection[int] | None
) -> Points:
    """What a window probes of a file (``Probes.open_window``)."""
    by_program: Points = {}
    for subject in sorted(subjects):
        for name, points in attachment.entries_of(subject).items():
            by_program.setdefault(name, []).extend(
                (offset, cookie)
                for offset, cookie in points
                if (call := cookie & 0xFF) not in pulse and (only is None or call in only)
            )
    return {name: points for name, points in by_program.items() if points}
