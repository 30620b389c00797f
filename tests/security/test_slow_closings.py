"""Probes that are slow to go, on a busy node or with many files: they are waited for as long as some go."""

from __future__ import annotations

import errno
import itertools
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from argus.capture import probes as module_of_probes
from argus.capture.kernel.links import PATIENCE_S, STEADY_S, Closing, LateError, link_in_time
from argus.capture.probing import windows
from argus.capture.probing.late_probes import MOST, MOST_OF_OWNER, MOST_SLOW_TO_GO, LateProbes
from argus.capture.probing.patience import FOR_NEW_S, LONGEST_S, Patience
from argus.system.aside import Aside
from tests.security.test_attaching import (
    HONEST,
    HOSTILE,
    Kernel,
    closings_have_ended,  # noqa: F401
    join,
    kernel,  # noqa: F401
    open_window,
    probes_on,
    with_windows,
)


class Slow:
    """In the place of a closing's event: each wait closes some of its files.

    Attributes:
        waited: For how long each time.
        now: Passes while somebody waits.
    """

    def __init__(self, closing: Closing, closes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        self.closing, self.closes, self.waited, self.now = closing, closes, list[float](), 1000.0
        monkeypatch.setattr("argus.capture.kernel.links.time.monotonic", lambda: self.now)

    def wait(self, seconds: float) -> bool:
        self.waited.append(seconds)
        self.now += seconds
        for _ in range(self.closes.pop(0) if self.closes else 0):
            self.closing._left.pop()
        return self.is_set()

    def is_set(self) -> bool:
        return not self.closing._left


@pytest.mark.parametrize(
    ("closes", "waits", "gone"),
    [
        ([8], 1, True),
        ([3, 3, 2], 3, True),
        ([3, 0, 5], 2, False),
        ([0, 8], 1, False),
        ([1] * 8, 8, True),
        ([], 1, False),
    ],
)
def test_closings_are_waited_for_while_some_end(
    closes: list[int], waits: int, gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing = Closing(())
    closing._left = set(range(8))
    slow: Any = Slow(closing, closes, monkeypatch)
    closing._over = slow
    assert closing.wait_on(PATIENCE_S - 1) is gone
    assert slow.waited == [STEADY_S] * waits
    closing._left = set(range(1000))
    slow.closes = [1] * 1000
    slow.waited.clear()
    assert not closing.wait_on(PATIENCE_S - 1)
    assert sum(slow.waited) == PATIENCE_S - 1, "not for long, however many there are"


@pytest.mark.parametrize("users", [1, 2])
def test_a_lone_user_s_closings_are_waited_for(users: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two thirds of the files of 64 ranks that are probed apart lost their probes for 18 s."""
    probes = probes_on([str(number) for number in range(8)])
    if users > 1:
        probes.attachments += probes_on(["another"], HOSTILE).attachments
    asked: list[float] = []

    def closing(_: Any) -> Any:
        return SimpleNamespace(
            wait=lambda seconds: False,
            wait_on=lambda seconds, numbers: asked.append(seconds),
            closed=lambda number, _=0.0: bool(asked),
            moved_ns=0,
        )

    monkeypatch.setattr(module_of_probes, "Closing", closing)
    probes.detach_optional("launches")
    assert asked == pytest.approx([LONGEST_S - FOR_NEW_S] * (users == 1), abs=0.5)
    assert [each.answers for each in probes.attachments] == [users == 1] * len(probes.attachments)


def test_files_whose_probes_have_gone_have_new_ones_soon(kernel: Kernel) -> None:  # noqa: F811
    """But not one that does not answer, and others have their turns."""
    probes, late = probes_on([str(number) for number in range(40)], HOSTILE), LateProbes()
    probes.attachments += probes_on(["honest"]).attachments
    for attachment in probes.attachments:
        attachment.left_out_until(lambda _: True)
        del attachment.optional_links["launches"]
    kernel.free.clear()
    try:
        for _ in range(3):
            late.go_on(probes)
        tries = Counter(each.attachment.owner for each in late._trying)
        assert tries == {HOSTILE: MOST_SLOW_TO_GO, HONEST: 1}
        assert MOST_SLOW_TO_GO <= MOST // 2
    finally:
        kernel.free.set()
        join(late)
    late.go_on(probes)
    assert probes.attachments[-1].answers
    assert not probes.attachments[-1].slow_to_go
    join(late)
    late = LateProbes()
    for attachment in probes.attachments[:40]:
        attachment.left_out_until(lambda _: True)
        attachment.did_not_answer(lambda _: True)
        attachment.again_at = 0.0
        attachment.optional_links.pop("launches", None)
    kernel.free.clear()
    try:
        late.go_on(probes)
        assert len(late._trying) == MOST_OF_OWNER
    finally:
        kernel.free.set()
        join(late)


@pytest.mark.parametrize(
    ("users", "moved_s", "now_s", "gone"),
    [
        (1, 0.0, 3.0, False),
        (1, 0.0, 8.1, True),
        (1, 5.5, 6.3, False),
        (1, 1.5, 2.6, True),
        (2, 0.0, 1.5, False),
        (2, 1.5, 1.9, False),
        (2, 0.1, 1.2, True),
        (2, 1.9, 1.95, False),
        (2, 2.0, 2.1, True),
        (2, 7.5, 8.1, True),
    ],
)
def test_no_window_begins_while_probes_of_the_last_one_are_going(
    users: int, moved_s: float, now_s: float, gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of files that hang are not waited for: none has gone for a second since others went. A job whose files
    still have theirs would have no part in the next window. Where several train, each has a second in which those of
    its files are waited for, and a fifth of the time."""
    window: Any = windows.Window.__new__(windows.Window)
    window._links = [(SimpleNamespace(users=frozenset([user])), [1]) for user in range(users)]
    window.end_ns, window._looked_ns, window._gone, window._closes = 10**12, 0, False, threading.Event()
    window._closes.set()
    moved_ns = 10**12 + int(moved_s * 1e9) if moved_s else 0
    window.closing = SimpleNamespace(wait=lambda _: False, moved_ns=moved_ns, closed=lambda _: False)
    monkeypatch.setattr(windows.time, "monotonic_ns", lambda: 10**12 + int(now_s * 1e9))
    alone = frozenset([0]) if users == 1 else frozenset()
    assert window.gone(Patience(lambda: 1000.0), alone) is gone
    window.closing.wait = lambda _: True
    assert window.gone(Patience(lambda: 1000.0), alone)


class Going:
    """Windows whose probes go so slowly that one of them is always there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.every_s = 1000.0, 0.9
        self.patience = Patience(lambda: self.now_s)
        monkeypatch.setattr(windows.time, "monotonic_ns", lambda: int(self.now_s * 1e9))

    def waits_s(self, users: Sequence[int], alone: Collection[int] = ()) -> float:
        """For how long the next window waits, where those of files of these users have not gone."""
        window: Any = windows.Window.__new__(windows.Window)
        window._links = [(SimpleNamespace(users=frozenset([user])), [1]) for user in users]
        window._looked_ns, window._gone, window._closes = 0, False, threading.Event()
        window._closes.set()
        window.end_ns, begun_s = int(self.now_s * 1e9), self.now_s
        window.closing = SimpleNamespace(wait=lambda _: False, moved_ns=0, closed=lambda _: False)
        while not window.gone(self.patience, frozenset(alone)):
            self.now_s += 0.02
            window.closing.moved_ns = window.end_ns + int((self.now_s - begun_s) / self.every_s) * 900_000_000
        return self.now_s - begun_s


@pytest.mark.parametrize(("users", "alone"), [([1], []), ([1] * 20, []), ([1, 2], []), ([1], [2])])
def test_whose_probes_go_one_by_one_does_not_hold_windows_of_others(
    users: list[int], alone: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each was waited for for 8 s, and three of four windows were lost. After a second for everybody, each account has
    a fifth of the time."""
    going, waits = Going(monkeypatch), list[float]()
    for _ in range(60):
        begun_s = going.now_s
        waits.append(going.waits_s(users, alone))
        going.now_s = max(going.now_s, begun_s + 2.0)
    assert waits[0] == pytest.approx(2.2, abs=0.1)
    assert sum(waits[5:]) / 55 == pytest.approx(1.4, abs=0.1)


def test_who_trains_alone_has_all_its_probes_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy node those of 30 files took 6.3 s. Those of others are not waited for."""
    going = Going(monkeypatch)
    assert going.waits_s([1, 1, 2], [1]) == pytest.approx(8.0, abs=0.1)
    assert going.waits_s([1, 1, 2], [1]) == pytest.approx(8.0, abs=0.1)
    going.now_s += 100.0
    assert going.waits_s([2, 2], [1]) == pytest.approx(2.2, abs=0.1)


class FewThreads:
    """In the place of ``Aside``: no more threads begin than there may be.

    Attributes:
        may: How many.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, may: int) -> None:
        self.may = may
        monkeypatch.setattr("argus.capture.kernel.links.Aside", self)

    def __call__(self, work: Any, name: str) -> Any:
        if not self.may:
            raise RuntimeError("can't start new thread")
        self.may -= 1
        return Aside(work, name)


@pytest.mark.parametrize("may", [0, 1, 3, 50])
@pytest.mark.parametrize("numbers", [[1], [40], [40, 1, 3], [1] * 30])
def test_links_are_closed_however_few_threads_there_may_be(
    may: int,
    numbers: list[int],
    kernel: Kernel,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What did not begin was never closed, and a window whose closing did not begin was the last one."""
    threads, ended = FewThreads(monkeypatch, may), list[int]()
    links = [list(range(1000 * n, 1000 * n + number)) for n, number in enumerate(numbers, 1)]
    closing = Closing([(frozenset(), (each, [])) for each in links], ended.append)
    if not may:
        assert not closing.wait(0)
        assert kernel.closed == []
        threads.may = 1
    assert closing.wait(10)
    assert sorted(kernel.closed) == sorted(itertools.chain(*links))
    assert sorted(ended) == [*range(len(links))]
    assert all(map(closing.closed, range(len(links))))


def test_a_file_that_cannot_be_closed_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    closed, ended = list[int](), list[int]()

    def close(links: Any) -> list[OSError]:
        if 1 in links:
            raise MemoryError
        closed.extend(links)
        return []

    monkeypatch.setattr("argus.capture.kernel.links._close_all", close)
    FewThreads(monkeypatch, 1)
    closing = Closing([(frozenset(), ([number], [])) for number in range(5)], ended.append)
    assert closing.wait(10)
    assert (closed, ended) == ([0, 2, 3, 4], [0, 1, 2, 3, 4])


@pytest.mark.parametrize("what", ["Closing", "by_user"])
def test_a_window_whose_probes_cannot_be_taken_away_is_not_the_last(
    what: str,
    kernel: Kernel,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probes = with_windows(["0"])

    def fail(*_: Any) -> Any:
        raise MemoryError

    nothing = Closing(())
    monkeypatch.setattr(windows, what, lambda *words: fail() if words != ((),) else nothing)
    window = open_window(probes)
    assert window.begin_ns
    assert isinstance(window.failure, MemoryError)
    assert window.gone(Patience())


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_calls_of_a_window_are_those_that_came_in_it(fails: int, kernel: Kernel) -> None:  # noqa: F811
    """If they could not be counted at its end, those of before were taken off: its cost was negative."""
    probes, counted = with_windows(["0"]), iter([1000, 1007])

    def hits() -> Any:
        number = next(counted)
        if fails and number == (1000, 1007)[fails - 1]:
            raise MemoryError
        return np.full(256, number, np.int64)

    probes.hits = hits
    window = open_window(probes)
    assert window.end_ns
    assert bool(window.begin_ns) == (fails != 1)
    assert isinstance(window.failure, MemoryError) == bool(fails)
    assert window.hits.tolist() == [0 if fails else 7] * 256
    assert [each.unanswered for each in probes.attachments] == [int(fails == 1)]
    assert window.closing.wait(10)
    assert sorted(kernel.closed) == sorted(kernel.made)


def test_a_window_without_a_thread_is_counted(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    probes = with_windows(["0", "1"])

    def fail(*_: Any) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(module_of_probes, "Window", fail)
    with pytest.raises(RuntimeError):
        probes.open_window(["launches"], 0.0)
    assert [each.unanswered for each in probes.attachments] == [1, 1]
    assert probes.unanswered == 2
    assert probes.lacking == probes.attachments


def test_what_is_opened_before_the_last_window_is_gone_lacks_nothing(kernel: Kernel) -> None:  # noqa: F811
    """Files of the window before were lost once more."""
    probes = with_windows(["0"])
    probes.lacking = list(probes.attachments)
    probes._window = SimpleNamespace(gone=lambda *_: False)
    assert probes.open_window(["launches"], 0.0) is None
    assert probes.lacking == []
    probes._window = None


@pytest.mark.parametrize("breaks", [0, 1, 2])
def test_a_window_that_breaks_leaves_no_probes(
    breaks: int,
    kernel: Kernel,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What had been put on before stayed."""
    probes = with_windows(["0", "1", "2"])
    put = probes._put_in_window

    def fail(attachment: Any, *words: Any) -> Any:
        if attachment is probes.attachments[breaks]:
            raise MemoryError
        return put(attachment, *words)

    monkeypatch.setattr(probes, "_put_in_window", fail)
    window = open_window(probes)
    assert not window.begin_ns
    assert isinstance(window.failure, MemoryError)
    assert window.closing.wait(10)
    assert sorted(kernel.closed) == sorted(kernel.made)
    assert len(kernel.made) == breaks
    assert {*map(id, window.lacking)} == {*map(id, probes.attachments)}, "nor was anything seen of the last one"
    assert [each.unanswered for each in probes.attachments] == [1, 1, 1]
    assert not probes.window_goes


def test_where_no_thread_begins_a_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    FewThreads(monkeypatch, 0)
    with pytest.raises(OSError, match="no thread") as failure:
        link_in_time(lambda: [1], 1.0)
    assert failure.value.errno == errno.EAGAIN


def test_late_probes_are_taken_away_by_the_thread_that_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no other could begin they stayed for ever."""
    threads, go, closed = FewThreads(monkeypatch, 1), threading.Event(), list[Any]()
    monkeypatch.setattr("argus.capture.kernel.links.close_links", closed.append)

    def make() -> list[int]:
        assert go.wait(10)
        return [7]

    with pytest.raises(LateError) as late:
        link_in_time(make, 0.01)
    assert (threads.may, closed) == (0, [])
    go.set()
    assert late.value.wait(10)
    assert closed == [[([7], [])]]
