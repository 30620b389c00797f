"""Windows of a user whose files answer, beside somebody with several user IDs who knows how turns are taken."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from argus.capture.kernel.links import LateError
from argus.capture.probing import windows
from argus.capture.probing.patience import LATE, LATE_OF_ACCOUNT, LATE_THAT_CAME, LONGEST_S, Patience
from argus.system.aside import Aside
from tests.security.test_attaching import (  # noqa: F401
    CHANGES,
    HONEST,
    Clocked,
    Hanging,
    end,
    kernel,
    probes_on,
    shared_by,
    with_windows,
    without_probes,
)

UIDS = [(5000 + number, "") for number in range(8)]
GUEST = (900, "")


def all_sets(uids: int, least: int = 1) -> list[tuple[tuple[int, str], ...]]:
    return [one for size in range(least, uids + 1) for one in itertools.combinations(UIDS[:uids], size)]


class Node:
    """An honest user's files, which take ``need_s`` together, and others'. A window is due every ``period_s``, from its
    opening on.

    Attributes:
        trains: Whether all have ranks; else the honest user and a guest alone.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, need_s: float, files: int, period_s: float) -> None:
        self.clocked, self.period_s = Clocked(monkeypatch), period_s
        self.probes = without_probes([f"h{number}" for number in range(files)], self.clocked)
        self.honest = list(self.probes.attachments)
        self.clocked.slow |= {f"h{number}": need_s / files for number in range(files)}
        self.trains = True

    def add(self, names: Iterable[str], owners: Sequence[tuple[int, str]], takes_s: float) -> list[Any]:
        paths = list(names)
        self.clocked.slow |= dict.fromkeys(paths, takes_s)
        files = without_probes(paths, self.clocked, owners[0]).attachments
        shared_by(files, *owners)
        self.probes.attachments += files
        return list(files)

    def window(self) -> bool:
        """Whether the honest user had it."""
        begun = self.clocked.now
        users = {user for each in self.probes.attachments for user in each.users}
        self.probes._window_patience.training = users if self.trains else {HONEST[0], GUEST[0]}
        CHANGES["window"](self.probes)
        had = not {*map(id, self.honest)} & {*map(id, self.probes._window.lacking)}
        end(self.probes._window)
        for each in self.probes.attachments:
            each.answered()
        self.clocked.now = max(begun + self.period_s, self.clocked.now)
        return had

    def had(self, number: int) -> int:
        return sum(self.window() for _ in range(number))


@pytest.mark.parametrize("files", [8, 17, 20, 30])
def test_files_that_others_map_in_all_ways_have_their_windows(files: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of users who all are part of 16 accounts another one had nothing, and nobody knew that it was passed over: the
    17th file of a world-readable installation, and with it all windows."""
    node = Node(monkeypatch, 0.25, files, 10.0)
    node.had(5)
    sets = all_sets(5)
    for number, each in enumerate(node.honest):
        each.mapped_by(frozenset([HONEST, *sets[-1 - number % len(sets)]]))
    for number, owners in enumerate(all_sets(5, 2)):
        node.add([f"x{number}"], owners, 0.3)
    node.had(3)
    assert node.had(40) >= 39


@pytest.mark.parametrize(
    ("uids", "takes_s", "period_s"), [(5, 0.2, 15.0), (6, 0.12, 15.0), (6, 0.24, 5.0), (5, 0.4, 2.0)]
)
def test_a_file_in_each_set_of_users_takes_no_windows(
    uids: int, takes_s: float, period_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept went to those that need little one by one, however many of them the same users had: half of the
    windows were lost, or more."""
    node = Node(monkeypatch, 0.25, 8, period_s)
    node.had(8)
    for number, owners in enumerate(all_sets(uids)):
        node.add([f"x{number}"], owners, takes_s)
    node.had(5)
    assert node.had(40) >= 39


@pytest.mark.parametrize(
    ("users", "period_s", "need_s"),
    [(3, 2.0, 0.25), (10, 2.0, 0.25), (20, 5.0, 0.25), (40, 15.0, 0.25), (30, 2.0, 0.1)],
)
@pytest.mark.parametrize("trains", [True, False])
def test_users_with_slow_files_leave_time_to_who_needs_little(
    users: int, period_s: float, need_s: float, trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was charged for what was kept for it, and what all together have of the time was divided by all."""
    node = Node(monkeypatch, need_s, 8, period_s)
    for user in range(users):
        node.add([f"x{user} {number}" for number in range(2)], [(6000 + user, "")], 0.4)
    node.add(["guest"], [GUEST], 0.01)
    node.trains = trains
    node.had(20)
    assert node.had(40) >= 39


@pytest.mark.parametrize("strikers", ["one each", "sets"])
def test_who_was_known_to_need_little_takes_no_more(strikers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eighty accounts with quick files filled what is kept; two others, known for as little, hung in each window."""
    node = Node(monkeypatch, 0.25, 8, 15.0)
    several = iter(all_sets(8, 2)) if strikers == "sets" else iter([((7000 + number, ""),) for number in range(1000)])
    for number in range(80):
        node.add([f"k{number}"], next(several), 0.003)
    struck: Iterator[list[Any]] = iter(
        [node.add([f"s{number} {part}" for part in range(3)], next(several), 0.001) for number in range(60)]
    )
    node.had(10)
    had = 0
    for _ in range(30):
        new = [each for _ in range(2) for each in next(struck)]
        node.clocked.slow |= {each.library.open_path: 60.0 for each in new}
        had += node.window()
        node.probes.attachments = [each for each in node.probes.attachments if each not in new]
    assert had >= 29


@pytest.mark.parametrize("uids", [2, 3, 4])
def test_probes_of_who_needs_little_do_not_stand_for_others(uids: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that were quick once hang in the next window, of another account each time: they come after it, since they
    need less. Its probes stood for five seconds before every window."""
    node, sets = Node(monkeypatch, 0.25, 4, 15.0), itertools.cycle(all_sets(uids))
    stood, primed, inner = list[float](), list[Any](), node.clocked._link
    on = dict[str, float]()

    def link(backend: Any, program: int, path: str, *words: Any) -> list[int]:
        on[path] = node.clocked.now
        return inner(backend, program, path, *words)

    monkeypatch.setattr("argus.capture.probes.link", link)
    for turn in range(30):
        node.clocked.slow |= {each.library.open_path: 60.0 for each in primed}
        new = [
            each for part in range(3) for each in node.add([f"{turn} {part} {n}" for n in range(2)], next(sets), 0.002)
        ]
        on.clear()
        begun = node.clocked.now
        CHANGES["window"](node.probes)
        assert node.clocked.now - begun <= LONGEST_S + 0.001
        stood.append(node.clocked.now - min(on.get(f"h{number}", node.clocked.now) for number in range(4)))
        end(node.probes._window)
        for each in node.probes.attachments:
            each.answered()
        node.clocked.now += 15.0
        node.probes.attachments = [each for each in node.probes.attachments if each not in primed]
        primed = new
    assert sum(stood[5:]) / 25 <= 1.0


@pytest.mark.parametrize("users", [19, 20])
def test_who_needs_a_little_more_than_the_others_has_as_many_turns(users: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all together need a little more than a change has: one lost half of its windows, the others 7 %."""
    node = Node(monkeypatch, 0.26, 8, 20.0)
    for user in range(users):
        node.add([f"x{user}"], [(6000 + user, "")], 0.24 + 0.01 * (users == 19))
    node.had(10)
    assert node.had(80) >= 64


@pytest.mark.parametrize(
    ("others", "other_s", "need_s", "least"),
    [(8, 0.53, 0.8, 30), (6, 0.68, 0.95, 30), (20, 0.24, 0.3, 30), (3, 1.2, 1.9, 20)],
)
def test_who_needs_most_is_not_left_out_for_ever(
    others: int, other_s: float, need_s: float, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All together need a little more than a window has. Who came last used up for nothing what was left, and was taken
    for served: so it was last again, in each window."""
    node = Node(monkeypatch, need_s, 4, 15.0)
    for user in range(others):
        node.add([f"x{user}"], [(6000 + user, "")], other_s)
    node.had(20)
    assert node.had(40) >= least


@pytest.mark.parametrize(
    ("honest", "own_s", "sharing", "shared_s", "period_s"),
    [(8, 0.3, 5, 0.6, 20.0), (7, 0.3, 6, 0.6, 10.0), (10, 1.9, 4, 0.3, 15.0), (12, 0.97, 0, 0.0, 15.0)],
)
def test_two_users_with_many_accounts_take_no_windows_of_others(
    honest: int, own_s: float, sharing: int, shared_s: float, period_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They map files of a few others in three ways each: each of these accounts counted in full beside those who need
    little; and who needs three times an equal part was alike."""
    node = Node(monkeypatch, 0.3, 4, period_s)
    for user in range(honest - 1):
        node.add([f"h{user} {number}" for number in range(4)], [(3000 + user, "")], 0.3 / 4)
    for user in range(sharing):
        node.add([f"v{user}"], [(2000 + user, "")], 0.02)
    node.had(20)
    for number, owners in enumerate(all_sets(2)):
        node.add([f"x{number}"], owners, own_s)
        for user in range(sharing):
            node.add([f"s{number} {user}"], [(2000 + user, ""), *owners], shared_s)
    node.had(20)
    assert node.had(40) >= 36


@pytest.mark.parametrize("own_s", [0.95, 1.9])
def test_who_maps_files_of_others_does_not_have_them_counted_for_more(
    own_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two users map the files of eight in all ways, which share libraries besides: each account of these counted for
    three or four times what it needs, and equal parts for less."""
    node, draw = Node(monkeypatch, 0.3, 4, 10.0), random.Random(5)
    users = [HONEST, *((1001 + user, "") for user in range(7))]
    of_user = {users[0]: node.honest}
    for user in users[1:]:
        of_user[user] = node.add([f"h{user[0]} {part}" for part in range(4)], [user], 0.0)
    shared = {user: list[Any]() for user in users}
    needs = dict.fromkeys(users, 0.3)
    for number, (part, takes_s) in enumerate([(0.7, 0.1), (0.5, 0.15)]):
        those = [user for user in users if draw.random() < part]
        library = node.add([f"l{number} {file}" for file in range(2 - number)], those, takes_s / (2 - number))
        for user in those:
            needs[user] = max(needs[user] - takes_s, 0.03)
            shared[user] += library
    for user, own in of_user.items():
        node.clocked.slow |= {each.library.open_path: needs[user] / 4 for each in own}
    for user in range(4):
        node.add([f"v{user}"], [(2000 + user, "")], 0.02)
    node.had(10)
    sets = all_sets(2)
    for user, own in of_user.items():
        for number, each in enumerate(own):
            each.mapped_by(frozenset([user, *sets[number % 3]]))
    for number, owners in enumerate(sets):
        node.add([f"x{number}"], owners, own_s)
        for user in range(4):
            node.add([f"s{number} {user} {part}" for part in range(2)], [(2000 + user, ""), *owners], 0.15)
    lost = Tally[tuple[int, str]]()
    for window in range(60):
        node.window()
        lacking = {*map(id, node.probes._window.lacking)}
        for user, own in of_user.items():
            lost[user] += window >= 10 and bool(lacking & {*map(id, [*own, *shared[user]])})
    assert max(lost.values()) <= 5


@pytest.mark.parametrize(("held", "every"), [(2, 20), (6, 60)])
def test_a_lock_that_was_held_costs_no_window_once_it_is_free(
    held: int, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a file may need that did not come in time is a guess. It stayed, though the file came at once later."""
    node = Node(monkeypatch, 0.1, 2, 15.0)
    shared: list[str] = []
    for number, owners in enumerate([*all_sets(2), *all_sets(2)]):
        node.honest += node.add([f"s{number}"], [HONEST, *owners], 0.1 / 6)
        shared.append(f"s{number}")
    for number, owners in enumerate(all_sets(2)):
        node.add([f"x{number} {part}" for part in range(2)], owners, 0.95)
    node.had(20)
    lost = free = 0
    for window in range(2 * every):
        is_held = window % every < held
        node.clocked.slow |= dict.fromkeys(shared, 60.0 if is_held else 0.1 / 6)
        had = node.window()
        lost, free = lost + (not had and not is_held), free + (not is_held)
    assert lost <= free / 20


@dataclass(eq=False)
class Mapped:
    """What of an attachment turns go by."""

    users: frozenset[int]
    unused: bool = False
    answers: bool = True


def test_files_that_came_before_and_hang_are_tried_until_many_threads_wait() -> None:
    """A stock of quick files, one of which hangs in each change, left a thread each without an end."""
    patience = Patience(lambda: 0.0, in_loop=False)
    owner = frozenset({5000})
    files: list[Any] = [Mapped(owner) for _ in range(2 * LATE_THAT_CAME)]
    for file in files:
        patience.spend(file, 0.001, came=True)
        if not patience.hangs(file):
            patience.note_late(file, lambda _: False)
    assert LATE_THAT_CAME <= len(patience._late) <= LATE_THAT_CAME + LATE


def test_a_change_in_which_probes_go_is_no_turn_of_files_that_come() -> None:
    """It made who was passed over one that was not."""
    now = [1000.0]
    patience = Patience(lambda: now[0])
    patience.training = {1, 2}
    files: list[Any] = [Mapped(frozenset({1 + (number == 9)})) for number in range(10)]
    for _ in range(4):
        now[0] += 30
        patience.closing_s()
        patience.spend_closing(0.01, gone=True)
        now[0] += 5
        patience.begin(files)
        patience._passed_over.add(files[9])
    now[0] += 30
    patience.begin(files)
    assert patience._passed[files[9]] == 4


def test_the_end_of_a_window_is_known_before_its_probes_go(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Threads that close them are begun first, which took up to a second: calls of that time counted as inside."""
    goes_on, inner = threading.Event(), windows.Closing

    def closing(files: Any) -> Any:
        assert goes_on.wait(10)
        return inner(files)

    probes = with_windows(["0", "1"])
    window = probes.open_window(["launches"], 0.0)
    window._thread.join(10)
    monkeypatch.setattr(windows, "Closing", lambda files: closing(files) if files else inner(()))
    assert window.closing.wait(10)
    later = probes.open_window(["launches"], 0.0)
    try:
        deadline = time.monotonic() + 10
        while not later.end_ns and time.monotonic() < deadline:
            time.sleep(0.001)
        assert later.end_ns
        assert not later.over
        assert probes.window_goes, "no other begins"
    finally:
        goes_on.set()
    end(later)
    assert not probes.window_goes


@pytest.mark.parametrize("period_s", [12.0, 20.0, 30.0])
@pytest.mark.parametrize("how", ["two programs", "one file", "too many"])
def test_who_is_served_is_not_passed_over(how: str, period_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that take more than one may be waited for, or more than a change has, were thought to be passed over each
    time, however much they had: two users with such were first for good, and a job that began later had no window."""
    node = Node(monkeypatch, 0.2, 4, period_s)
    honest, node.probes.attachments = node.honest, []
    node.probes._module.programs["other_enter"] = 5
    for number, owners in enumerate(((UIDS[0],), (UIDS[1],), UIDS[:2])):
        takes_s = {"two programs": [0.7, 0.7], "one file": [0.95], "too many": [0.95] * 5}[how]
        files = [each for part, s in enumerate(takes_s) for each in node.add([f"x{number} {part}"], owners, s)]
        for each in files if how != "too many" else ():
            each.optional_points["launches"]["other_enter"] = [(16, 1)]
    node.honest = []
    node.had(30)
    node.honest = honest
    node.probes.attachments += honest
    node.had(5)
    assert node.had(40) >= 36


@pytest.mark.parametrize("alone", [True, False])
def test_files_of_a_job_that_is_over_take_no_windows_of_the_next_one(
    alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file system is dead, and threads wait for it for ever: the user's next job lost all windows."""
    node = Node(monkeypatch, 0.2, 6, 10.0)
    if not alone:
        node.add(["guest"], [GUEST], 0.01)
    honest, node.probes.attachments = node.honest, [*node.probes.attachments[6:]]
    node.honest = []
    for number in range(2 * LATE_OF_ACCOUNT):
        node.probes._window_patience.note_late(honest[number % 6], lambda _: False)
    node.honest = honest
    node.probes.attachments += honest
    node.had(8)  # one more file each time
    assert node.had(20) == 20


def standing(hanging: Hanging, path: str) -> list[Any]:
    """Where probes stand in a file."""
    return [what for link, what in hanging.made.items() if hanging.of[link] == path and link not in hanging.closed]


@pytest.mark.parametrize("when", ["open", "being opened", "over"])
@pytest.mark.parametrize("hangs", [True, False])
def test_a_subject_that_comes_back_is_not_probed_twice(when: str, hangs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a window saw it, or its probes went: each call was counted twice, uncounted."""
    hanging = Hanging(monkeypatch)
    probes = with_windows(["a", "b"])
    for each in probes.attachments:
        each.optional_points["launches"] = {"cuda_enter": [(16, 1)]}
    opens, inner = threading.Event(), probes._put_in_window
    if when == "being opened":
        monkeypatch.setattr(probes, "_put_in_window", lambda *words: (opens.wait(10), inner(*words))[1])
        monkeypatch.setattr(probes._patience, "closing_s", lambda **_: 0.1)
    window = probes.open_window(["launches"], 30.0 if when == "open" else 0.0)
    if when != "being opened":
        while not (window.begin_ns if when == "open" else window.over):
            time.sleep(0.001)
    hanging.paths = {"a", "b"} if hangs else set()
    probes.attach_optional("launches")
    assert not {path: places for path in ("a", "b") if len(places := standing(hanging, path)) != len({*places})}
    opens.set()
    window._thread.join(10)
    waits = (hangs and when == "open") or when == "being opened"
    assert [each.answers for each in probes.attachments] == [not waits] * 2
    hanging.go.set()
    assert window.closing.wait(10)
    assert all(each.late(0) for each in probes.attachments), "they are put on later"
    assert window.end_ns
    assert [bool(standing(hanging, path)) for path in ("a", "b")] == [not waits] * 2


def test_threads_that_wait_for_probes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that hang came anew with processes that ended: each left a thread, for ever; once none could be started,
    nobody had probes in a window."""
    node = Node(monkeypatch, 0.05, 4, 10.0)
    go, waiting = threading.Event(), list[Any]()

    def in_time(make: Any, seconds: float) -> list[int]:
        if not make.args[2].startswith("g"):
            return list(make())
        node.clocked.now += min(seconds, 0.1)
        waiting.append(Aside(lambda: [go.wait(60)][1:], "late"))
        raise LateError(waiting[-1])

    monkeypatch.setattr("argus.capture.probing.windows.link_in_time", in_time)
    lacking = list[int]()
    try:
        for turn in range(150):
            new = node.add([f"g{turn} {number}" for number in range(3)], [UIDS[turn % 2]], 0.0)
            assert node.window()
            lacking.append(sum(each.unanswered for each in new))
            node.probes.attachments = [each for each in node.probes.attachments if each not in new]
        assert len(waiting) == 2 * LATE
        assert lacking == [3] * 150, "each is counted"
    finally:
        go.set()
    for each in waiting:
        each.result()
    new = node.add(["g more"], [UIDS[0]], 0.0)
    node.window()
    assert len(waiting) == 2 * LATE + 1, "they are tried again"


def test_accounts_without_a_thread_that_waits_have_one_whoever_has_more() -> None:
    patience = Patience(lambda: 1000.0)
    files = [each for number in range(LATE) for each in probes_on([f"{number}"], (5000 + number, "")).attachments]
    for each in files:
        patience.note_late(each, lambda _: False)
    honest = probes_on(["honest"]).attachments[0]
    assert [patience.hangs(each) for each in (files[0], files[0], honest, honest)] == [False, True, False, False]
    patience.note_late(honest, lambda _: False)
    assert [patience.hangs(each) for each in (honest, honest)] == [False, True], "one more in each change"


def test_a_pulse_is_not_put_on_where_a_window_s_probes_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of somebody who has no time left are not waited for: steps were counted twice."""
    hanging = Hanging(monkeypatch)
    probes = with_windows(["a", "b"])
    for each in probes.attachments:
        each.optional_points["launches"] = {"cuda_enter": [(16, 1)]}
    window = probes.open_window(["launches"], 30.0)
    while not window.begin_ns:
        time.sleep(0.001)
    hanging.paths = {"a"}
    window.end()
    while not window.over:
        time.sleep(0.001)
    while window._closed(probes.attachments[1]) is False:
        time.sleep(0.001)
    window._gone = True
    assert not probes.window_goes
    probes.set_pulse([1])
    assert [len(standing(hanging, path)) for path in ("a", "b")] == [1, 1]
    assert [each.answers for each in probes.attachments] == [False, True]
    hanging.go.set()
    assert window.closing.wait(10)


def test_probes_that_nobody_waits_for_cost_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """While no window was due, users were charged for what took time to go, and none was left once one was."""
    clocked = Clocked(monkeypatch)
    probes, patience = with_windows(["a"]), clocked.patience(in_loop=False)
    probes._window_patience = patience
    window: Any = windows.Window.__new__(windows.Window)
    window._links = window._files = [(each, [1]) for each in probes.attachments]
    window._looked_ns, window._gone, window._closes = 0, False, threading.Event()
    window._closes.set()
    window.end_ns = int(clocked.now * 1e9)
    window.closing = SimpleNamespace(wait=lambda _: False, moved_ns=0, closed=lambda _: False)
    probes._window = window
    for _ in range(50):
        clocked.now += 0.1
        window.closing.moved_ns = int(clocked.now * 1e9)
        assert probes.window_goes
    assert patience._going.left(probes.attachments[0].users) == 1.0
    probes.trains({HONEST[0], GUEST[0]})
    probes.attachments += with_windows(["guest"], GUEST).attachments
    for _ in range(15):
        clocked.now += 0.1
        window.closing.moved_ns = int(clocked.now * 1e9)
        probes.wait_for_window()
    assert not probes.window_goes
