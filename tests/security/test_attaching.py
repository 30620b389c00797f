"""No process keeps a trace from putting probes on the others' files: by files that the kernel refuses, that are slow to
probe, or that come without end."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from argus.capture.attachment import LONGEST_RETRY_S, RETRY_S, SOON_S, Attachment
from argus.capture.kernel.links import PATIENCE_S, LateError
from argus.capture.placement import Placement
from argus.capture.probes import Probes
from argus.capture.probing import patience
from argus.capture.probing.accounts import OF_A_USER
from argus.capture.probing.late_probes import MOST, MOST_OF_OWNER, MOST_USERS, LateProbes
from argus.capture.probing.patience import Patience
from argus.capture.probing.pulse_probes import PulseLinks
from argus.capture.probing.windows import GOING_NS
from argus.capture.process.targets import find_libraries
from argus.live import probed_files as module
from argus.live.cost import attaching, mapped_elsewhere
from argus.live.job import Job
from argus.live.probed_files import ProbedFiles
from argus.model import calls
from argus.model.errors import ArgusError
from argus.model.losses import UNKNOWN, Owner
from argus.system.aside import Aside
from tests.builders.sessions import a_session
from tests.security.mapping_process import mapping, needs_root

HONEST, HOSTILE = (1000, ""), (65534, "")


class FakeProbes:
    """Probes without a kernel.

    Attributes:
        refuses: Numbers of files that the kernel refuses.
        attached: Numbers of files that were probed, in order, with the process.
        holding: Numbers of files that are not probed before ``held`` is set.
        probed: As of ``Probes``.
        later: What was probed, or no longer, on all files.
        others: Of each file that was probed, as which other processes map it.
        without_room: Who may have no more links.
    """

    def __init__(self) -> None:
        self.refuses: set[int] = set()
        self.attached: list[tuple[int, int | None]] = []
        self.held = threading.Event()
        self.holding: set[int] = set()
        self.probed: set[str] = {"launches"}
        self.entries_only: set[str] = set()
        self.refused: dict[str, str] = {}
        self.attachments: list[Any] = []
        self.pulse_turn = 0
        self.later: list[tuple[Any, ...]] = []
        self.others: dict[int, list[int]] = {}
        self.unanswered = 0
        self.without_room: set[Owner] = set()
        self.layouts = SimpleNamespace(set=lambda pid, layouts: None)

    @property
    def placement(self) -> Any:
        return SimpleNamespace(links=self)

    def who_has(self, library: Any, owners: Iterable[Owner]) -> list[Owner]:
        return [owner for owner in owners if owner not in self.without_room]

    def attach(self, library: Any, pid: int | None, *, others: Sequence[Any], owner: Owner = UNKNOWN, **_: Any) -> Any:
        number = library.key[1]
        if owner in self.without_room:
            raise ArgusError(f"{owner[0]} has as many links as it may")
        self.others[number] = [library.pid, *(other.pid for other in others)]
        probed = set(self.probed)
        self.attached.append((number, pid))
        if number in self.holding:
            self.held.wait(60)
        if number in self.refuses:
            raise ArgusError(f"the kernel refuses to probe {number}")
        attachment: Any = Attachment(library, pid, owner=owner)
        for subject in probed:
            attachment.put(subject, ([1], []), self.entries_only)
        attachment.functions = ["one"]
        self.attachments.append(attachment)
        return attachment

    def let_go(self, links: list[Any]) -> None:
        self.later.append(("off", len(links)))

    def links_for(self, attachment: Any, subject: str, entries_only: Any) -> Any:
        self.later.append(("on", subject, subject in entries_only))
        return [2], []

    def write_prices(self, new: Any = None) -> None: ...

    def mapped_by(self, attachment: Any, owners: frozenset[Owner]) -> None:
        attachment.mapped_by(owners)

    def lacks_pulse(self, attachment: Any, call: int | None = None) -> bool:
        return False

    def pulse_of(self, attachment: Any, *, in_time: bool) -> PulseLinks:
        return PulseLinks()


def a_target(pid: int, owner: Owner, numbers: Sequence[int]) -> Any:
    """A process that maps these files."""
    libraries = [
        SimpleNamespace(
            key=("08:01", n, 1, 1),
            device="08:01",
            inode=n,
            shown_path=str(n),
            file=SimpleNamespace(on_overlay=False),
            roles=(),
            pid=pid,
        )
        for n in numbers
    ]
    return SimpleNamespace(
        pid=pid, libraries=libraries, alive=lambda: True, has=lambda _: False, identity=SimpleNamespace(owner=owner)
    )


def probed_files(probes: Any) -> ProbedFiles:
    """As of a trace that follows children: nobody's mappings are read."""
    session = a_session(children=True)
    session.probes = probes
    family: Any = set()
    return ProbedFiles(session, family)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Time that passes only while somebody waits for probes. ``waited``: for how long each time; ``slow_s``: for so
    long probes on a file take."""
    state = SimpleNamespace(now=1000.0, waited=[], slow_s=0.0)

    class Waiting(Aside[Any]):
        begun = 0.0

        def wait(self, seconds: float) -> bool:
            self.begun = self.begun or state.now
            if seconds:
                super().wait(0.3)  # what needs no time ends
                state.waited.append(seconds if self._thread.is_alive() else min(seconds, state.slow_s))
                state.now += state.waited[-1]
            return not self._thread.is_alive() and state.now >= self.begun + state.slow_s

    monkeypatch.setattr("argus.live.cost.attaching.Aside", Waiting)
    monkeypatch.setattr(mapped_elsewhere, "Aside", Waiting)
    monkeypatch.setattr(time, "monotonic", lambda: state.now)
    return state


# ---- files that the kernel refuses


def test_a_file_that_cannot_be_probed_keeps_no_trace_of_others_from_beginning() -> None:
    probes = FakeProbes()
    probes.refuses = {1}
    files = probed_files(probes)
    users = [a_target(1, HOSTILE, [1]), a_target(2, HONEST, [2])]
    files.attach(users, {1, 2}, running=False)
    assert [attachment.library.key[1] for attachment in files.attached] == [2]
    assert files._session.losses.totals == {"attach_failed": 1}
    assert list(files._session.notes) == ["the kernel refuses to probe 1"]


def test_nor_one_beside_a_process_that_has_loaded_nothing_yet() -> None:
    probes = FakeProbes()
    probes.refuses = {1}
    files = probed_files(probes)
    files.attach([a_target(1, HOSTILE, [1])], {1, 2}, running=False)
    assert files._session.losses.totals == {"attach_failed": 1}


def test_a_trace_of_what_cannot_be_probed_does_not_begin() -> None:
    probes = FakeProbes()
    probes.refuses = {1, 2}
    files = probed_files(probes)
    users = [a_target(1, HONEST, [1]), a_target(2, HONEST, [2])]
    with pytest.raises(ArgusError, match="refuses to probe 1"):
        files.attach(users, {1, 2}, running=False)
    named = probed_files(probes)
    named.named = {1}
    with pytest.raises(ArgusError, match="refuses to probe 1"):
        named.attach(users[:1], {1, 3}, running=False)
    one_of_two = probed_files(probes)
    one_of_two.named = {1, 3}
    one_of_two.attach([*users, a_target(3, HONEST, [3])], {1, 2, 3}, running=False)
    assert one_of_two._session.losses.totals == {"attach_failed": 2}


def test_a_file_is_read_for_one_process_of_each_owner_first_then_for_the_others() -> None:
    """Who maps it first may not be read any more, or have had its share of that."""
    probes = FakeProbes()
    files = probed_files(probes)
    users = [a_target(n, HOSTILE, [1]) for n in (1, 2, 3)] + [a_target(n, HONEST, [1]) for n in (4, 5)]
    files.attach(users, {1, 2, 3, 4, 5}, running=False)
    assert probes.others[1] == [1, 4, 2, 3, 5]


@pytest.mark.parametrize("later", [False, True])
def test_a_file_is_probed_on_account_of_any_who_maps_it(clock: SimpleNamespace, later: bool) -> None:
    """Whoever mapped it first had used up all links of its own, and nobody's calls of the shared file were seen."""
    probes = FakeProbes()
    probes.without_room = {HOSTILE}
    files = probed_files(probes)
    hostile, honest = a_target(1, HOSTILE, [1, 2]), a_target(2, HONEST, [1])
    if later:
        files.attach([hostile], {1}, running=True)
        assert not files.attached
        clock.now += 1
    files.attach([hostile, honest], {1, 2}, running=True)
    clock.now += SOON_S
    files.attach([hostile, honest], {1, 2}, running=True)
    assert [attachment.library.key[1] for attachment in files.attached] == [1]
    assert "65534 has as many links as it may" in list(files._session.notes)
    tried = len(probes.attached)
    files.attach([hostile, honest], {1, 2}, running=True)
    assert len(probes.attached) == tried, "what is refused rests"


def test_who_comes_to_a_refused_file_does_not_put_it_off(clock: SimpleNamespace) -> None:
    """A dozen containers of a stranger made a minute an hour: each was tried for, and each refusal waited longer."""
    probes = FakeProbes()
    probes.refuses = {1}
    files = probed_files(probes)
    users = [a_target(1, HONEST, [1])]
    files.attach(users, {1}, running=True)
    begun = clock.now
    for number in range(24):
        clock.now += 0.5
        users.append(a_target(2 + number, (65534 + number % 3, f"pid:[{number}]"), [1]))
        assert len(probes.attached) >= 1 + min(number, 3), "each may be the one for which it comes"
        files.attach(users, set(range(30)), running=True)
    assert len(probes.attached) == 1 + 3 * module.EARLY_TRIES, "for some containers of each user"
    probes.refuses.clear()
    clock.now = begun + RETRY_S + 0.1
    files.attach(users, set(range(20)), running=True)
    assert [attachment.library.key[1] for attachment in files.attached] == [1]


REFUSED = """
__asm__(".text\\n.globl cudaLaunchKernel\\n.type cudaLaunchKernel,@function\\ncudaLaunchKernel: int3\\n ret\\n"
        ".size cudaLaunchKernel,2\\n");
"""


def build(path: Path, source: str) -> Path:
    command = ["gcc", "-O1", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=source.encode(), check=True)
    path.chmod(0o755)
    return path


@pytest.mark.kernel
@needs_root()
def test_a_function_that_begins_with_a_breakpoint_costs_its_file_alone(folder: Path) -> None:
    """The kernel refuses it, with an error that has no name (``ENOTSUPP``)."""
    hostile = build(folder / "libcudart.so.12", REFUSED)
    honest = build(folder / "libcuda.so.1", "int cuLaunchKernel(int n) { return n * 3; }")
    probes = Probes()
    try:
        with mapping([hostile, honest]) as pid:
            files = probed_files(probes)
            target = a_target(pid, HOSTILE, [])
            target.libraries = find_libraries(pid)
            files.attach([target], {pid}, running=False)
            assert [Path(each.library.path).name for each in files.attached] == [honest.name]
            (note,) = files._session.notes
            assert "libcudart.so.12" in note
            assert "begins with an instruction on which no probe can stand" in note
    finally:
        probes.close()


# ---- files that are slow to probe


def test_files_that_do_not_answer_hold_no_turn_of_the_loop(clock: SimpleNamespace) -> None:
    """A thousand files of a process may come at once, each of which held it for five seconds."""
    probes = FakeProbes()
    probes.holding = set(range(1000))
    files = probed_files(probes)
    users = [a_target(1, HOSTILE, range(1000)), a_target(2, HONEST, [1000])]
    try:
        for _ in range(20):
            before = sum(clock.waited)
            files.attach(users, {1, 2}, running=True)
            assert sum(clock.waited) - before <= attaching.TURN_S
            clock.now += 0.05
        assert [each.library.key[1] for each in files.attached] == [1000], "the honest job's file"
        assert sum(clock.waited) < 20 * attaching.TURN_S / 2 + attaching.SAVED_S
        assert len(probes.attached) == attaching.MOST_OF_OWNER + 1
        clock.now += attaching.ATTACH_S
        files.attach(users, {1, 2}, running=True)
        assert files._session.losses.totals == {"attach_failed": 1000}
        files.attach(users, {1, 2}, running=True)
        assert files._session.losses.totals == {"attach_failed": 1000}, "once"
    finally:
        probes.held.set()


def test_nor_do_they_keep_a_trace_from_beginning(clock: SimpleNamespace) -> None:
    probes = FakeProbes()
    probes.holding = set(range(100))
    files = probed_files(probes)
    users = [a_target(1, HOSTILE, range(100)), a_target(2, HONEST, range(1000, 1010))]
    try:
        for _ in range(2):
            files.attach(users, {1, 2}, running=False)
        assert sum(clock.waited) <= attaching.ATTACH_S
        clock.now += 0.1
        files.attach(users, {1, 2}, running=True)
        assert {each.library.key[1] for each in files.attached} == set(range(1000, 1010))
    finally:
        probes.held.set()


def test_files_that_take_long_hold_the_loop_for_their_owner_s_part(clock: SimpleNamespace) -> None:
    """Mapped four thousand times, each takes 0.6 s."""
    files = probed_files(FakeProbes())
    users = [a_target(1, HOSTILE, range(2000)), a_target(2, HONEST, [2001])]
    clock.slow_s = 0.2
    files.attach(users, {1, 2}, running=False)
    assert sum(clock.waited) <= 2 * attaching.ATTACH_S
    assert 2001 in {each.library.key[1] for each in files.attached}, "owners take turns"
    begun, waited = clock.now, sum(clock.waited)
    while clock.now - begun < 60:
        before = sum(clock.waited)
        files.attach(users, {1, 2}, running=True)
        assert sum(clock.waited) - before <= attaching.TURN_S
        clock.now += 0.05
    assert sum(clock.waited) - waited <= attaching.SAVED_S + 60 * attaching.OF_LOOP + attaching.TURN_S


def test_files_under_way_are_bounded_for_each_owner_and_in_all(clock: SimpleNamespace) -> None:
    probes = FakeProbes()
    probes.holding = set(range(10_000))
    files = probed_files(probes)
    users = [a_target(pid, (pid, ""), range(100 * pid, 100 * pid + 50)) for pid in range(1, 20)]
    try:
        files.attach(users, set(range(1, 20)), running=True)
        owners = Counter(each.owner for each in files._attaching.under_way.values())
        assert sum(owners.values()) == attaching.MOST - 1, "who has one has as many as are left"
        assert set(owners.values()) <= set(range(attaching.MOST_OF_OWNER + 1))
        assert len(owners) == 19, "owners take turns"
        users += [a_target(pid, (pid, ""), [100 * pid]) for pid in range(20, 40)]
        files.attach(users, set(range(1, 40)), running=True)
        owners = Counter(each.owner for each in files._attaching.under_way.values())
        assert set(owners) == {(pid, "") for pid in range(1, 40)}, "each user has one"
        users += [a_target(pid, (pid, ""), [100 * pid]) for pid in range(40, 90)]
        files.attach(users, set(range(1, 90)), running=True)
        assert len(files._attaching.under_way) == attaching.MOST_USERS
    finally:
        probes.held.set()


def test_a_user_in_many_containers_leaves_files_under_way_for_others(clock: SimpleNamespace) -> None:
    probes = FakeProbes()
    probes.holding = set(range(5000))
    files = probed_files(probes)
    users = [a_target(pid, (65534, f"pid:[{pid}]"), range(100 * pid, 100 * pid + 50)) for pid in range(1, 20)]
    try:
        for _ in range(3):
            files.attach(users, set(range(1, 20)), running=True)
            clock.now += 1
        assert len(files._attaching.under_way) == attaching.MOST // 2
        files.attach([*users, a_target(50, HONEST, range(5000, 5003))], set(range(1, 51)), running=True)
        assert {each.library.key[1] for each in files.attached} == {5000, 5001, 5002}
    finally:
        probes.held.set()


def begins(going: attaching.Attaching, owner: Owner) -> bool:
    """Has a file of an owner under way, if it may."""
    if may := going.may(owner):
        number = 1 + max((int(key[0]) for key, _ in going.under_way), default=0)
        going.under_way[(str(number), 0, 0, 0), None] = SimpleNamespace(owner=owner)  # type: ignore[assignment]
    return may


def containers(user: int) -> list[Owner]:
    return [(user, f"pid:[{number}]") for number in range(50)]


def test_how_many_files_users_may_have_under_way() -> None:
    """Each has half of what others left."""
    going = attaching.Attaching()
    going.begin([*containers(1), *containers(2), *containers(3), HONEST], running=True)
    assert sum(begins(going, HONEST) for _ in range(10)) == 4, "of one owner"
    of_users = [sum(begins(going, owner) for owner in containers(user) * 4) for user in (1, 2, 3)]
    assert of_users == [14, 7, 4]
    others = [(user, "") for user in range(10, 100)]
    assert [begins(going, owner) for owner in others] == [True] * 35 + [False] * 55, "one of each, 64 in all"
    assert not begins(going, HONEST)


def test_whose_time_is_used_up_has_one_file_under_way() -> None:
    going = attaching.Attaching()
    going.begin([HOSTILE, HONEST], running=True)
    going._turns.spend(HOSTILE, 3600.0)
    assert [begins(going, HOSTILE) for _ in range(3)] == [True, False, False]
    assert [begins(going, HONEST) for _ in range(5)] == [True] * 4 + [False]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_others_have_under_way_a_user_may_have_its_part(seed: int) -> None:
    draw = random.Random(seed)
    going = attaching.Attaching()
    flood = [owner for user in (1, 2) for owner in containers(user)]
    going.begin([*flood, HONEST], running=True)
    if draw.random() < 0.5:
        going._turns.spend(flood[0], 3600.0)
    for _ in range(300):
        begins(going, draw.choice(flood))
        if draw.random() < 0.2 and going.under_way:
            del going.under_way[draw.choice(list(going.under_way))]
        owners = Counter(each.owner for each in going.under_way.values())
        users = Counter(each.owner[0] for each in going.under_way.values())
        assert max(owners.values(), default=0) <= 4
        assert max(users.values(), default=0) <= 16
        assert users.total() < 32
        assert going.may(HONEST)


def test_an_owner_has_one_file_at_a_time_probed_whatever_its_account_says(clock: SimpleNamespace) -> None:
    """What it takes depends on others: who maps the file 20,000 times has the kernel walk all of that."""
    probes = FakeProbes()
    probes.holding = set(range(5))
    files = probed_files(probes)
    users = [a_target(1, HOSTILE, []), a_target(2, HONEST, range(5))]
    files.attach(users[:1], {1, 2}, running=True)
    files._attaching._turns.spend(HONEST, 3600.0)
    for turn in range(5):
        probes.held.clear()
        files.attach(users, {1, 2}, running=True)
        (each,) = files._attaching.under_way.values()
        probes.held.set()
        each.making._thread.join(10)
        assert len(probes.attached) == turn + 1
        clock.now += module.LATER_S + 0.01
        assert files.due()
    files.attach(users, {1, 2}, running=True)
    assert {each.library.key[1] for each in files.attached} == set(range(5))
    assert not files._session.losses.totals


def test_what_the_kernel_takes_beside_the_loop_is_nobody_s_to_pay(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = itertools.count(0, 100)
    monkeypatch.setattr(time, "thread_time", lambda: float(next(cpu)))
    files = probed_files(FakeProbes())
    users = [a_target(1, HOSTILE, []), a_target(2, HONEST, range(5))]
    files.attach(users, {1, 2}, running=True)
    assert len(files.attached) == 5
    assert files._attaching.has_time(HONEST)


@pytest.mark.parametrize(("after_s", "refused", "missed"), [(0.1, False, 0), (1.5, False, 1), (0.1, True, 1)])
def test_probes_that_a_process_never_had_are_counted_when_it_ends(
    after_s: float, refused: bool, missed: int, clock: SimpleNamespace
) -> None:
    """Those that had no turn, or not in time: each attempt of a job that starts again every few seconds."""
    probes = FakeProbes()
    probes.holding = set(range(10))
    files = probed_files(probes)
    job = Job("train", 1, owner=HONEST)
    job_of: Any = files._session.roster
    users = [a_target(1, HOSTILE, [100]), a_target(2, HONEST, [1])]
    job_of.by_pid[2] = (job, None)
    try:
        if refused:
            files._attaching.under_way |= {
                ((str(n), 0, 0, 0), None): SimpleNamespace(owner=HONEST, making=Aside(probes.held.wait, "held"))
                for n in range(attaching.MOST_OF_OWNER)
            }  # type: ignore[arg-type]
        files.attach(users, {1, 2}, running=True)
        clock.now += after_s
        del job_of.by_pid[2]
        for _ in range(2):
            files.attach(users[:1], {1}, running=True)
            assert files._session.losses.of(job).get("attach_failed", 0) == missed
    finally:
        probes.held.set()


def test_files_that_wait_for_a_turn_are_not_looked_at_one_by_one(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may map thousands of them. The longer a look takes, the later the next one comes."""
    probes = FakeProbes()
    probes.holding = set(range(2000))
    files = probed_files(probes)
    hostile, honest = a_target(1, HOSTILE, range(2000)), a_target(2, HONEST, [5000])
    polled: list[int] = []
    hostile.alive = lambda: polled.append(1) is None
    cpu_s = iter(number * 3.0 for number in range(100))
    monkeypatch.setattr(time, "thread_time", lambda: next(cpu_s))
    try:
        for _ in range(3):
            polled.clear()
            files.attach([hostile, honest], {1, 2}, running=True)
            assert len(polled) <= 3 * attaching.MOST_OF_OWNER
            clock.now += 15.0
            assert not files.due()
            clock.now += 20.0
            assert files.due()
        assert probes.attached.count((5000, None)) == 1, "the other's file has its probes"
    finally:
        probes.held.set()


class Libraries(list[Any]):
    """Of a process; counts how often they are gone through."""

    gone_through = 0

    def __iter__(self) -> Iterator[Any]:
        self.gone_through += 1
        return super().__iter__()


@pytest.mark.parametrize("alone", [True, False])
def test_going_through_files_is_its_owner_s_to_pay(
    alone: bool, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each turn a few of its many files have their probes, and others come: all of them were gone through each time."""
    files, cpu_s = probed_files(FakeProbes()), [0.0]
    hostile, honest = a_target(1, HOSTILE, []), a_target(2, HONEST, [])
    failed = Aside(lambda: 1 // 0, "failed")
    failed._thread.join(10)
    users = [hostile] if alone else [hostile, honest]

    class Costly(Libraries):
        def __iter__(self) -> Iterator[Any]:
            cpu_s[0] += 0.5
            return super().__iter__()

    hostile.libraries = Costly(a_target(1, HOSTILE, range(100)).libraries)
    monkeypatch.setattr(time, "thread_time", lambda: cpu_s[0])
    for turn in range(400):
        if not alone:
            honest.libraries = a_target(2, HONEST, [1000 + turn // 20]).libraries
        ended: Any = SimpleNamespace(owner=HOSTILE, use=None, making=failed)
        files._attaching.under_way[("", turn, 0, 0), None] = ended
        if files.due() or (not alone and turn % 20 == 0):
            files.attach(users, {1, 2}, running=True)
        if not alone:
            assert (("08:01", 1000 + turn // 20, 1, 1), None) in {(a.library.key, a.pid) for a in files.attached}
        clock.now += 0.05
    # 1 s that was saved, and a tenth of 20 s and of what was waited meanwhile.
    assert hostile.libraries.gone_through * 0.5 <= 1.0 + 0.1 * (clock.now - 1000.0) + 1.0


def test_files_that_wait_are_bounded_and_counted(clock: SimpleNamespace) -> None:
    """Those beyond have their turn when others have their probes."""
    probes = FakeProbes()
    probes.holding = set(range(10_000))
    files = probed_files(probes)
    hostile = [a_target(pid, HOSTILE, range(1000 * pid, 1000 * pid + 1000)) for pid in range(1, 6)]
    honest = a_target(9, HONEST, range(20_000, 20_100))
    again = a_target(8, (HOSTILE[0], "pod"), range(30_000, 30_010))
    users, pids = [*hostile, honest, again], {1, 2, 3, 4, 5, 8, 9}
    job, other = Job("flood", 1, owner=HOSTILE), Job("train", 1, owner=HONEST)
    job_of: Any = files._session.roster
    job_of.by_pid |= dict.fromkeys(range(1, 6), (job, None))
    try:
        for _ in range(3):
            files.attach(users, pids, running=True)
            clock.now += 1.0
        assert len(files._missing) <= module.MOST_WAITING
        assert {*range(20_000, 20_100), *range(30_000, 30_010)} <= {each.library.key[1] for each in files.attached}
        assert files._session.losses.totals == {"files_over_share": 5000 - module.MOST_WAITING}, "once"
        assert files._session.losses.of(job)["files_over_share"] == 5000 - module.MOST_WAITING
        assert not files._session.losses.of(other)["files_over_share"]
    finally:
        probes.held.set()
    files.attach(hostile[:1], {1}, running=True)
    assert files._left_out.keys() <= {1}


def test_files_beyond_the_bound_have_their_probes_in_the_end(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 10)
    files = probed_files(FakeProbes())
    users = [a_target(1, HOSTILE, range(100))]
    for _ in range(12):
        files.attach(users, {1}, running=True)
        clock.now += 1.0
    assert {each.library.key[1] for each in files.attached} == set(range(100))


def test_a_user_in_very_many_containers_has_few_more_files_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 50)
    files = probed_files(FakeProbes())
    users = [a_target(pid, (7, str(pid)), range(100 * pid, 100 * pid + 100)) for pid in range(100)]
    places, left_out = files._places([*users, a_target(100, HONEST, range(20_000, 20_040))])
    most = 8 * 50 + 92 * module.LEAST_WAITING
    assert (len(places), left_out.total()) == (most + 40, 100 * 100 - most)


@pytest.mark.parametrize("seed", range(30))
def test_files_that_lack_probes_are_found_as_by_asking_for_each(seed: int) -> None:
    draw = random.Random(seed)
    files = probed_files(FakeProbes())
    key = lambda n: ("08:01", n, 1, 1)  # noqa: E731
    files._shared = {key(n): draw.random() < 0.5 for n in range(15) if draw.random() < 0.8}
    files._twins = {key(n): key(0) for n in range(1, 15) if draw.random() < 0.2}
    places = [(n, None if shared else draw.randrange(6)) for (_, n, _, _), shared in files._shared.items()]
    files.attached = [
        Attachment(library, pid)
        for number, pid in draw.sample(places, len(places) // 2)
        for library in a_target(1, HONEST, [number]).libraries
    ]
    users = [a_target(pid, draw.choice([HONEST, HOSTILE]), draw.sample(range(15), 8)) for pid in range(6)]
    wanted: dict[Any, list[Any]] = {}
    for target in users:
        for library in target.libraries:
            wanted.setdefault(library.key, []).append((library, target))
    expected: list[Any] = []
    for file, uses in wanted.items():
        pids = {each.pid for each in files.attached if each.library.key == file}
        if file not in files._shared or files._shared[file]:
            if file not in files._shared or not (pids or file in files._twins):
                expected.append(((file, None), uses))
        elif pids or file not in files._twins:
            expected += [((file, use[1].pid), [use]) for use in uses if use[1].pid not in pids]
    found, left_out = files._places(users)
    assert [*found.items()] == expected
    assert not left_out


def test_a_process_whose_owner_has_no_time_keeps_what_is_counted_of_it(clock: SimpleNamespace) -> None:
    probes = FakeProbes()
    probes.refuses = {1}
    files = probed_files(probes)
    users = [a_target(1, HOSTILE, [1, 2]), a_target(2, HONEST, [1, 3])]
    for turn in range(6):
        if turn % 2:
            files._looks.spend(HOSTILE, 100.0)
        files.attach(users, {1, 2}, running=True)
        assert files._session.losses.totals == {"attach_failed": 1}
        clock.now += 10_000.0
    files._looks.spend(HOSTILE, 1e6)
    files.attach(users[1:], {2}, running=True)
    assert {pid for missing in files._missing.values() for pid in missing.whom} == {2}


def test_a_file_of_a_process_that_ended_meanwhile_is_not_refused(clock: SimpleNamespace) -> None:
    probes = FakeProbes()
    probes.holding = probes.refuses = {1}
    files = probed_files(probes)
    users = [a_target(1, HOSTILE, []), a_target(2, HONEST, [1])]
    files.attach(users, {1, 2}, running=True)
    users[1].alive = lambda: False
    (each,) = files._attaching.under_way.values()
    probes.held.set()
    each.making._thread.join(10)
    files.attach(users, {1, 2}, running=True)
    assert (dict(files._session.losses.totals), list(files._session.notes)) == ({}, [])


def test_probes_that_come_late_are_those_that_are_wanted_by_then(clock: SimpleNamespace) -> None:
    probes = FakeProbes()
    probes.holding = {1}
    files = probed_files(probes)
    users = [a_target(1, HONEST, [1])]
    files.attach(users, {1}, running=True)
    assert not files.due()
    probes.probed = {"waits", "copies"}
    probes.entries_only = {"copies", "launches"}
    (under_way,) = files._attaching.under_way.values()
    probes.held.set()
    under_way.making._thread.join(10)
    assert files.due()
    assert files.attach(users, {1}, running=True)
    assert [each.pid for each in files.attached] == [None]
    assert probes.later == [("off", 1)], "nobody waits for others"
    for _ in range(2):
        assert not files.due()
        join(files._late_probes)
    assert not files._late_probes.under_way
    assert probes.later[1:] == [("on", "copies", True), ("on", "waits", False)]
    (attachment,) = files.attached
    assert attachment.optional_links.keys() == probes.probed
    assert attachment.answers
    assert not files.attach(users, {1}, running=True)


@pytest.mark.parametrize("seed", range(20))
def test_a_file_that_comes_late_is_probed_as_all_are_by_then(
    seed: int, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With exits or without, too. While that is done nobody waits for the kernel."""
    draw = random.Random(seed)
    subjects = ["launches", "copies", "waits"]
    probes, late = probes_on(["a"]), LateProbes()
    (attachment,) = probes.attachments
    attachment.optional_links.clear()
    attachment.entry_points[1] = 16, 1
    attachment.optional_points |= dict.fromkeys(subjects, attachment.optional_points["launches"])
    for setting in range(2):
        probes.probed = {each for each in subjects if draw.random() < 0.6}
        probes.entries_only = {each for each in subjects if draw.random() < 0.5}
        if not setting:
            for subject in sorted(probes.probed):
                probes._attach_optional(attachment, subject, in_time=False)
    monkeypatch.delattr("argus.capture.probing.windows.link_in_time")
    monkeypatch.delattr("argus.capture.probes.Probes._close_soon")
    late.settle(probes, attachment)
    for _ in range(2):
        late.go_on(probes)
        join(late)
    assert {subject: bool(exits) for subject, (_, exits) in attachment.optional_links.items()} == {
        subject: subject not in probes.entries_only for subject in probes.probed
    }
    for closing in probes._closing:
        closing.wait(10)
    there = {link for both in attachment.optional_links.values() for links in both for link in links}
    assert {*kernel.made} - {*kernel.closed} == there


def test_a_file_that_the_kernel_refuses_is_tried_again_ever_more_seldom(clock: SimpleNamespace) -> None:
    probes = FakeProbes()
    probes.refuses = {1}
    files = probed_files(probes)
    users = [a_target(1, HOSTILE, [1])]
    begun = clock.now
    while clock.now - begun < 2 * LONGEST_RETRY_S:
        if files.due() or clock.now == begun:
            files.attach(users, {1}, running=True)
        clock.now += 5
    assert len(probes.attached) == 7, "after 0, 1, 3, 7, 15, 31 and 63 minutes"
    assert files._session.losses.totals == {"attach_failed": 1}
    assert files._session.notes.total == 1
    probes.refuses = set()
    clock.now += LONGEST_RETRY_S
    assert files.due()
    files.attach(users, {1}, running=True)
    assert len(files.attached) == 1
    assert RETRY_S < LONGEST_RETRY_S


def test_an_overlay_s_file_is_not_probed_while_it_may_be_another_s(clock: SimpleNamespace) -> None:
    """Two overlays show one file: probes by either name are probes in both."""
    probes: Any = FakeProbes()
    probes.holding = {1}
    probes.stands_in = lambda *_: True
    files = probed_files(probes)
    users = [a_target(1, HONEST, [1]), a_target(2, HONEST, [2])]
    for target in users:
        for library in target.libraries:
            library.file.on_overlay, library.stamp = True, (1, 1)
    files.attach(users, {1, 2}, running=True)
    assert probes.attached == [(1, None)]
    probes.held.set()
    next(iter(files._attaching.under_way.values())).making._thread.join(10)
    clock.now += 1
    files.attach(users, {1, 2}, running=True)
    assert probes.attached == [(1, None)]
    assert files._twins == {("08:01", 2, 1, 1): ("08:01", 1, 1, 1)}


def on_overlay(target: Any) -> Any:
    for library in target.libraries:
        library.file.on_overlay, library.stamp = True, (1, 1)
    return target


def test_an_overlay_s_file_does_not_wait_for_what_is_under_way_for_long(clock: SimpleNamespace) -> None:
    """Overlays can be mounted by anybody, and size and time of change are public: each attempt of a job lost its
    first 5 s, uncounted."""
    probes: Any = FakeProbes()
    probes.holding, probes.stands_in = {1}, lambda *_: False
    files = probed_files(probes)
    users = [on_overlay(a_target(1, HOSTILE, [1]))]
    try:
        files.attach(users, {1}, running=True)
        clock.now += attaching.ALIKE_S
        for number in (2, 3):
            users.append(on_overlay(a_target(number, HONEST, [number])))
            files.attach(users, {1, 2, 3}, running=True)
            assert number in {each.library.key[1] for each in files.attached}
        assert not files._session.losses.totals
    finally:
        probes.held.set()


@pytest.mark.parametrize(("owner", "wait_s"), [(HOSTILE, attaching.ALIKE_S), (HONEST, attaching.ATTACH_S)])
def test_an_overlay_s_file_waits_a_second_for_another_user_s(
    owner: Owner, wait_s: float, clock: SimpleNamespace
) -> None:
    """Though others come all the time. That it waited is counted; of its own user's it may well be the same file."""
    probes: Any = FakeProbes()
    probes.holding, probes.stands_in = set(range(100, 1000)), lambda *_: False
    files = probed_files(probes)
    job = Job("train", 1, owner=HONEST)
    job_of: Any = files._session.roster
    job_of.by_pid[2] = (job, None)
    users = [on_overlay(a_target(1, owner, [100])), on_overlay(a_target(2, HONEST, [2]))]
    begun, number = clock.now, 100
    try:
        while not files.attached and clock.now - begun < 20:
            files.attach(users, {1, 2}, running=True)
            clock.now += 0.05
            # Another one, which is young.
            files._attaching.under_way.clear()
            number += 1
            users[0] = on_overlay(a_target(1, owner, [number]))
        assert [each.library.key[1] for each in files.attached] == [2]
        assert wait_s <= clock.now - begun <= wait_s + module.LATER_S + attaching.TURN_S + 0.3
        assert files._session.losses.of(job).get("attach_failed", 0) == 1
    finally:
        probes.held.set()


def test_an_overlay_s_file_does_not_wait_for_one_of_no_overlay(clock: SimpleNamespace) -> None:
    """Size and time of change are as its owner likes."""
    probes: Any = FakeProbes()
    probes.holding, probes.stands_in = {1}, lambda *_: False
    files = probed_files(probes)
    users = [a_target(1, HOSTILE, [1]), a_target(2, HONEST, [2])]
    users[1].libraries[0].file.on_overlay, users[1].libraries[0].stamp = True, (1, 1)
    try:
        files.attach(users, {1, 2}, running=True)
        assert probes.attached == [(1, None), (2, None)]
    finally:
        probes.held.set()


@pytest.mark.parametrize("seed", range(20))
def test_the_same_files_are_probed_as_one_after_the_other(
    seed: int, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where everything answers at once: which files, for whom, in which order of each owner."""
    draw = random.Random(seed)
    probes = FakeProbes()
    probes.refuses = set(draw.sample(range(12), 2))
    files = probed_files(probes)
    monkeypatch.setattr(module, "TORCH_PYTHON", "")
    files._shared = {("08:01", n, 1, 1): draw.random() < 0.7 for n in range(12)}
    users: list[Any] = []
    expected: list[tuple[int, int | None]] = []
    for pid in range(1, 8):
        users.append(a_target(pid, HONEST, draw.sample(range(12), draw.randrange(5))))
        files.attach(users, set(range(1, pid + 1)), running=True)
        by_file: dict[int, list[int]] = {}
        for target in users:
            for library in target.libraries:
                by_file.setdefault(library.key[1], []).append(target.pid)
        for number, pids in by_file.items():
            wanted = [None] if files._shared["08:01", number, 1, 1] else pids
            expected += [(number, of) for of in wanted if (number, of) not in expected]
    assert probes.attached == expected
    assert {(each.library.key[1], each.pid) for each in files.attached} == {
        place for place in expected if place[0] not in probes.refuses
    }


@pytest.mark.parametrize("seed", range(20))
def test_probes_of_each_rank_are_those_of_its_files(seed: int) -> None:
    draw = random.Random(seed)
    files = probed_files(FakeProbes())
    places = [(n, draw.choice([None, *range(5)])) for n in range(15) for _ in range(draw.randrange(3))]
    files.attached = [
        SimpleNamespace(library=library, pid=pid, probes=draw.randrange(9))
        for number, pid in places
        for library in a_target(1, HONEST, [number]).libraries
    ]  # type: ignore[misc]
    files._twins = {("08:01", 20 + n, 1, 1): ("08:01", n, 1, 1) for n in range(15)}
    members = [SimpleNamespace(target=a_target(pid, HONEST, draw.sample(range(35), 9)), probes=-1) for pid in range(5)]
    files.count_probes(members)  # type: ignore[arg-type]
    for member in members:
        assert member.probes == sum(attachment.probes for attachment in files.of(member.target))


def test_counting_probes_looks_at_each_file_once() -> None:
    files = probed_files(FakeProbes())
    looked: Counter[int] = Counter()

    class Seen:
        pid, probes = None, 1

        def __init__(self, number: int) -> None:
            self.number, (self._library,) = number, a_target(1, HONEST, [number]).libraries

        @property
        def library(self) -> Any:
            looked[self.number] += 1
            return self._library

    files.attached = [Seen(number) for number in range(500)]  # type: ignore[misc]
    members = [SimpleNamespace(target=a_target(pid, HONEST, range(5)), probes=0) for pid in range(400)]
    files.count_probes(members)  # type: ignore[arg-type]
    assert {member.probes for member in members} == {5}
    assert set(looked.values()) == {1}


# ---- files without end, where children are not followed


class Node:
    """Processes of a node, by PID the files that each maps.

    Attributes:
        read: In which thread the mappings of one were read, in order.
        take_s: For so long that takes.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace) -> None:
        self.mapped: dict[int, set[int]] = {}
        self.read: list[str] = []
        self.take_s, self._clock = 0.0, clock
        monkeypatch.setattr(mapped_elsewhere, "processes", lambda: list(self.mapped))
        monkeypatch.setattr(mapped_elsewhere, "executable_mappings", self._mappings)

    def _mappings(self, pid: int) -> list[Any]:
        self.read.append(threading.current_thread().name)
        self._clock.now += self.take_s
        return [SimpleNamespace(device="08:01", inode=number) for number in self.mapped[pid]]


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace) -> Node:
    return Node(monkeypatch, clock)


def without_children(probes: Any) -> ProbedFiles:
    session = a_session()
    session.probes = probes
    family: Any = set()
    return ProbedFiles(session, family)


def settle(files: ProbedFiles) -> None:
    """Waits until all processes have been looked at."""
    looking: Any = files._elsewhere.looking
    if looking is not None:
        looking._thread.join(10)


def test_files_without_end_have_the_node_s_processes_looked_at_seldom(clock: SimpleNamespace, node: Node) -> None:
    """One of 256 processes maps another copy of a library every 0.3 s: each had all others read, in the loop."""
    files = without_children(FakeProbes())
    node.mapped = {pid: {7} for pid in range(1, 257)}
    node.take_s = 0.004
    hostile = a_target(1, HOSTILE, [])
    begun, number = clock.now, 1000
    while clock.now - begun < 120:
        number += 1
        hostile.libraries += a_target(1, HOSTILE, [number]).libraries
        files.attach([hostile, a_target(2, HONEST, [7])], {1, 2}, running=True)
        clock.now += 0.3
        settle(files)
    assert set(node.read) == {"argus-mappings"}
    assert len(node.read) * node.take_s < 0.05 * 120
    assert len(files.attached) >= number - 1000


def test_a_file_waits_for_a_look_and_not_the_loop(
    clock: SimpleNamespace, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = without_children(FakeProbes())
    node.mapped = {1: {1, 2, 3}, 2: {2}, 9: {3}}
    clock.slow_s = 1.0
    users, began = [a_target(1, HONEST, [1, 2, 3]), a_target(2, HONEST, [2])], clock.now
    files.attach(users, {1, 2}, running=True)
    assert sum(clock.waited) <= attaching.TURN_S
    assert (files.attached, len(files._missing), files.due()) == ([], 3, False)
    settle(files)
    waited_s = clock.now - began
    clock.now += 0.3
    assert not files.due()
    clock.slow_s = waited_s + 0.3
    assert files.due()
    assert clock.now - began < module.MISSED_S
    clock.slow_s = 0.0
    files.attach(users, {1, 2}, running=True)
    assert [(each.library.key[1], each.pid) for each in files.attached] == [(1, None), (2, None), (3, 1)]
    read = len(node.read)
    assert read == 1, "nobody's who is let through"
    files.attach([*users, a_target(1, HONEST, [4])], {1, 2}, running=True)
    assert (len(node.read), files.probes(("08:01", 4, 1, 1))) == (read, True), "what was just found is believed"


def test_a_file_is_probed_apart_where_nobody_was_looked_at(clock: SimpleNamespace, node: Node) -> None:
    """Its owner, or the node, has had its part of the time."""
    files = without_children(FakeProbes())
    node.mapped = {9: set()}
    node.take_s = 10.0
    files.attach([a_target(1, HONEST, [1])], {1}, running=True)
    settle(files)
    files.attach([a_target(1, HONEST, [1])], {1}, running=True)
    clock.now += mapped_elsewhere.BELIEVED_S + 1
    files.attach([a_target(1, HONEST, [1, 2])], {1}, running=True)
    assert [(each.library.key[1], each.pid) for each in files.attached] == [(1, None), (2, 1)]
    assert len(node.read) == 1
    clock.now += mapped_elsewhere.REST * node.take_s
    files.attach([a_target(1, HONEST, [1, 2, 3])], {1}, running=True)
    settle(files)
    assert len(node.read) == 2


@pytest.mark.parametrize("owners", [(HOSTILE, HONEST), (HONEST, HOSTILE)])
def test_a_look_is_nobody_s_to_pay(owners: tuple[Owner, Owner], clock: SimpleNamespace, node: Node) -> None:
    """How long it takes is up to who has many mappings, and need not be traced."""
    files = without_children(FakeProbes())
    node.mapped = {9: set()}
    node.take_s = 20.0
    users = [a_target(1, owners[0], [1]), a_target(2, owners[1], [])]
    files.attach(users, {1, 2}, running=True)
    settle(files)
    files.attach(users, {1, 2}, running=True)
    assert all(map(files._attaching.has_time, owners))
    assert [each.pid for each in files.attached] == [None]


def test_a_file_waits_a_second_for_a_look_and_is_probed_apart(clock: SimpleNamespace, node: Node) -> None:
    files = without_children(FakeProbes())
    node.mapped = {9: set()}
    clock.slow_s = 60.0
    users = [a_target(1, HOSTILE, [1]), a_target(2, HONEST, [])]
    files.attach(users, {1, 2}, running=True)
    settle(files)
    clock.slow_s = 0.0
    looking: Any = files._elsewhere.looking
    looking.wait = lambda _: False
    users[1].libraries = a_target(2, HONEST, [5]).libraries
    files.attach(users, {1, 2}, running=True)
    assert {place[0][1] for place in files._missing} == {1, 5}
    clock.now += module.MISSED_S
    assert files.due()
    files.attach(users, {1, 2}, running=True)
    assert {(each.library.key[1], each.pid) for each in files.attached} == {(1, 1), (5, 2)}


def test_one_user_s_files_cause_a_few_looks_a_minute(clock: SimpleNamespace, node: Node) -> None:
    files = without_children(FakeProbes())
    node.mapped = {9: set()}
    hostile = a_target(1, HOSTILE, [])
    for number in range(100, 109):
        hostile.libraries = a_target(1, HOSTILE, [number]).libraries
        files.attach([hostile, a_target(2, HONEST, [])], {1, 2}, running=True)
        settle(files)
        clock.now += mapped_elsewhere.BELIEVED_S + 0.5
    assert len(node.read) == mapped_elsewhere.MOST_OF_USER
    files.attach([hostile, a_target(2, HONEST, [7])], {1, 2}, running=True)
    settle(files)
    assert len(node.read) == mapped_elsewhere.MOST_OF_USER + 1, "another user's file"


@pytest.mark.parametrize("apart", [False, True])
def test_a_file_is_not_probed_for_all_and_apart(apart: bool, clock: SimpleNamespace) -> None:
    """It was released while its probes were under way, and is decided anew."""
    probes: Any = FakeProbes()
    probes.holding, released = {1}, []
    probes.release = released.extend
    files = probed_files(probes)
    key = ("08:01", 1, 1, 1)
    files._shared = {key: not apart}
    users = [a_target(1, HONEST, [1])]
    files.attach(users, {1}, running=True)
    (each,) = files._attaching.under_way.values()
    files._shared[key] = apart
    probes.held.set()
    each.making._thread.join(10)
    files.attach(users, {1}, running=True)
    clock.now += 1
    files.attach(users, {1}, running=True)
    assert [attachment.pid for attachment in released] == [1 if apart else None]
    assert [attachment.pid for attachment in files.attached] == [None if apart else 1]


def test_what_others_map_is_remembered_within_a_bound(clock: SimpleNamespace, node: Node) -> None:
    elsewhere = mapped_elsewhere.MappedElsewhere(lambda pid: False)
    node.mapped = {pid: set(range(1000 * pid, 1000 * pid + 1000)) for pid in range(1, 100)}
    looking: Any = elsewhere.begin()
    looking._thread.join(10)
    elsewhere.take()
    assert len(elsewhere._found) == mapped_elsewhere.MOST_FILES
    (library,) = a_target(1, HONEST, [1]).libraries
    assert elsewhere.among({library.key: library}) == {library.key}, "it may be"


@pytest.mark.parametrize("seed", range(20))
def test_files_of_others_are_found_as_by_reading_all_for_each(seed: int, clock: SimpleNamespace, node: Node) -> None:
    draw = random.Random(seed)
    node.mapped = {pid: set(draw.sample(range(20), draw.randrange(8))) for pid in range(1, 12)}
    traced = set(draw.sample(range(1, 12), 4))
    expected = {n for pid, numbers in node.mapped.items() if pid not in traced for n in numbers}
    libraries = {library.key: library for library in a_target(1, HONEST, range(20)).libraries}
    elsewhere = mapped_elsewhere.MappedElsewhere(traced.__contains__)
    assert {key[1] for key in elsewhere.now(libraries)} == expected
    looking: Any = elsewhere.begin()
    looking._thread.join(10)
    elsewhere.take()
    assert {key[1] for key in elsewhere.among(libraries)} == expected


# ---- files that did not answer while their probes were changed


class Kernel:
    """In the place of ``link``: descriptors that hold probes.

    Attributes:
        made: Of each, where its probes are.
        closed: Descriptors that were closed.
        free: Cleared while somebody holds a lock of a process that maps the files.
        asked: Set once it was asked for a link.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: dict[int, tuple[int, ...]] = {}
        self.closed: list[int] = []
        self.free = threading.Event()
        self.free.set()
        self.asked = threading.Event()
        monkeypatch.setattr("argus.capture.probes.link", self._link)
        monkeypatch.setattr("argus.capture.kernel.links._close_all", lambda links: self.closed.extend(links) or [])

    def _link(self, backend: Any, program: int, path: str, points: Any, at_exit: bool, pid: Any) -> list[int]:
        self.asked.set()
        self.free.wait(60)
        self.made[number := len(self.made) + 100] = tuple(offset for offset, _ in points)
        return [number]


def probes_on(paths: Sequence[str], owner: Owner = HONEST) -> Any:
    """Probes of launches on files, at their entries and exits, without a kernel's maps."""
    probes: Any = Probes.__new__(Probes)
    probes._module = SimpleNamespace(programs={"cuda_enter": 3, "cuda_exit": 4})
    probes.probed, probes.refused, probes.entries_only = {"launches"}, {}, set()
    probes.backend, probes.unanswered, probes._closing, probes.lacking = "multi", 0, [], []
    probes._pulse, probes._pulse_links, probes.pulse_turn, probes.closed = frozenset(), {}, 0, False
    probes._lock, probes._patience, probes._window_patience = threading.Lock(), Patience(), Patience(in_loop=False)
    probes._window, probes.write_prices = None, lambda new=None: None
    probes.attachments = [Attachment(SimpleNamespace(open_path=path, roles=()), None, owner=owner) for path in paths]  # type: ignore[arg-type]
    for attachment in probes.attachments:
        attachment.optional_points["launches"] = {"cuda_enter": [(16, 1)], "cuda_exit": [(16, 1)]}
        attachment.optional_links["launches"] = [1], [2]
    return probes


def join(late: LateProbes) -> None:
    for each in late._trying:
        each.making._thread.join(10)


@pytest.fixture(autouse=True)
def closings_have_ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Before the fake kernel goes: links here are numbers, which real closings would take for descriptors."""
    yield
    deadline = time.monotonic() + 30
    names = ("argus-window", "argus-unlink", "held")  # windows begin closings, which begin others
    while there := [thread for thread in threading.enumerate() if thread.name in names]:
        for thread in there:
            with contextlib.suppress(RuntimeError):  # another thread is just starting it
                thread.join(1)
        if time.monotonic() > deadline:
            break


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(patience, "SAVED_S", 0.05)
    return Kernel(monkeypatch)


def test_a_file_that_did_not_answer_has_its_probes_later(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody held a lock of a process of his that maps it, for as long as the probes were waited for: the honest job
    had none for the rest of the trace."""
    probes, late = probes_on(["a"]), LateProbes()
    (attachment,) = probes.attachments
    probes.detach_optional("launches")
    kernel.free.clear()
    assert probes.attach_optional("launches") == 1
    assert not attachment.seen("launches")
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    now += RETRY_S + 1
    late.go_on(probes)
    assert late._trying == [], "the kernel has not let go of the first ones"
    kernel.free.set()
    while not attachment.late(0.1):
        pass
    late.go_on(probes)
    join(late)
    late.go_on(probes)
    assert attachment.seen("launches")
    assert attachment.answers
    entries, exits = attachment.optional_links["launches"]
    assert (len(entries), len(exits)) == (1, 1)
    assert not {*entries, *exits} & set(kernel.closed)
    probes.detach_optional("launches")
    assert probes.attach_optional("launches") == 0


def test_what_a_file_lacks_is_reported_and_counted(kernel: Kernel) -> None:
    probes = probes_on(["a", "b"])
    probes.detach_optional("launches")
    kernel.free.clear()
    try:
        assert probes.attach_optional("launches") == 2
        assert probes.attach_optional("launches") == 2, "they are not waited for again"
        assert [attachment.unanswered for attachment in probes.attachments] == [1, 1]
        assert probes.unanswered == 2
        assert not probes.probes_of("launches")
    finally:
        kernel.free.set()


def test_what_is_no_longer_wanted_when_it_comes_is_taken_away(kernel: Kernel) -> None:
    probes, late = probes_on(["a"]), LateProbes()
    (attachment,) = probes.attachments
    probes.detach_optional("launches")
    probes.probed.add("launches")
    attachment.answers = False
    late.go_on(probes)
    join(late)
    probes.probed.discard("launches")
    late.go_on(probes)
    assert not attachment.optional_links
    for closing in probes._closing:
        closing.wait(10)
    assert set(kernel.made) <= set(kernel.closed)


@pytest.mark.parametrize("stands", [True, False])
def test_probes_of_the_pulse_are_not_put_on_twice(stands: bool, kernel: Kernel) -> None:
    """Each call would be seen twice for as long as both are there."""
    probes, late = probes_on(["a"]), LateProbes()
    (attachment,) = probes.attachments
    attachment.entry_points[1] = 16, 1
    attachment.optional_points["waits"] = {"cuda_enter": [(64, 2)]}
    attachment.optional_links.clear()
    probes.probed = {"waits"}
    probes.set_pulse([1])
    assert [*kernel.made.values()] == [(16,)]
    if not stands:
        probes.let_go([(probes._pulse_links.pop(id(attachment)), [])])
    attachment.answers = False
    late.go_on(probes)
    join(late)
    assert sorted(kernel.made.values()) == ([(16,), (64,)] if stands else [(16,), (16,), (64,)])
    late.go_on(probes)
    assert attachment.answers
    assert not probes.lacks_pulse(attachment)
    assert len(probes._pulse_links[id(attachment)]) == 1


def test_files_that_are_tried_again_are_bounded(kernel: Kernel) -> None:
    probes, late = probes_on([str(number) for number in range(50)], HOSTILE), LateProbes()
    probes.attachments += probes_on(["honest"]).attachments
    for attachment in probes.attachments:
        attachment.answers = False
        del attachment.optional_links["launches"]
    kernel.free.clear()
    try:
        late.go_on(probes)
        owners = Counter(each.attachment.owner for each in late._trying)
        assert owners == {HOSTILE: MOST_OF_OWNER, HONEST: 1}
    finally:
        kernel.free.set()
        join(late)


@pytest.mark.parametrize("users", [1, 2, 30, 100])
def test_no_user_takes_all_turns_of_files_that_are_tried_again(users: int, kernel: Kernel) -> None:
    """Whatever containers it makes, and though its files come first."""
    probes, late = probes_on([str(number) for number in range(40)], HOSTILE), LateProbes()
    for number, attachment in enumerate(probes.attachments):
        attachment.owner = HOSTILE[0], f"pid:[{number}]"
        attachment.mapped_by(frozenset())
    for user in range(users):
        probes.attachments += probes_on([f"honest {user}"], (1000 + user, "")).attachments
    for attachment in probes.attachments:
        attachment.answers = False
        del attachment.optional_links["launches"]
    kernel.free.clear()
    try:
        for _ in range(3):
            late.go_on(probes)
            tries = Counter(each.attachment.owner[0] for each in late._trying)
            assert tries[HOSTILE[0]] <= MOST // 2
            assert len(tries) == min(1 + users, MOST_USERS)
            assert len(late._trying) <= MOST_USERS
    finally:
        kernel.free.set()
        join(late)


@pytest.mark.parametrize("first", [HONEST, HOSTILE])
def test_a_shared_file_has_its_turn_whoever_mapped_it_first(first: Owner, kernel: Kernel) -> None:
    """Two files of the other one's that hang took all of its turns."""
    probes, late = probes_on(["h0", "h1", "h2", "h3"], HOSTILE), LateProbes()
    for attachment in probes.attachments:
        del attachment.optional_links["launches"]
        attachment.skip()
    kernel.free.clear()
    try:
        late.go_on(probes)
        assert len(late._trying) == MOST_OF_OWNER
        shared = probes_on(["libcuda"], first).attachments[0]
        shared.mapped_by(frozenset([HONEST, HOSTILE]))
        del shared.optional_links["launches"]
        shared.skip()
        probes.attachments.append(shared)
        late.go_on(probes)
        assert shared in [each.attachment for each in late._trying]
        assert len(late._trying) == MOST_OF_OWNER + 1
    finally:
        kernel.free.set()
        join(late)


def test_a_refused_file_is_put_off(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> list[int]:
        raise ProcessLookupError(3, "it has ended")

    monkeypatch.setattr("argus.capture.probes.link", refuse)
    probes, late = probes_on(["a"]), LateProbes()
    (attachment,) = probes.attachments
    attachment.answers, attachment.optional_links = False, {}
    for _ in range(3):
        late.go_on(probes)
        join(late)
    assert (attachment.wait_s, attachment.answers) == (2 * RETRY_S, False)


def test_where_no_thread_begins_files_are_tried_again_later(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the loop's turn was lost, each time."""
    probes, late = probes_on(["a"]), LateProbes()
    (attachment,) = probes.attachments
    attachment.optional_links.clear()
    attachment.skip()
    clock = SimpleNamespace(now=time.monotonic())
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)

    def no_thread(*_: Any) -> Any:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr("argus.capture.probing.late_probes.Aside", no_thread)
        for _ in range(3):
            late.go_on(probes)
    assert (late.under_way, attachment.again_at) == (False, clock.now + SOON_S)
    clock.now += SOON_S
    late.go_on(probes)
    join(late)
    late.go_on(probes)
    assert attachment.seen("launches")


# ---- files that are released


def with_placement(probes: Any) -> Any:
    maps: Any = dict.fromkeys(("text_bytes", "torch_layouts"), SimpleNamespace(set=lambda key, value: None))
    probes.placement = Placement(maps, maps, launch_durations=False)
    return probes


@pytest.mark.parametrize("how", ["release", "detach"])
def test_files_of_a_process_that_was_ignored_keep_no_others_from_being_released(kernel: Kernel, how: str) -> None:
    probes = with_placement(probes_on(["a", "b", "c"]))
    probes._target = lambda pid: None
    gone, here, stays = files = list(probes.attachments)
    for number, attachment in enumerate(files):
        attachment.pid, attachment.entry_links = number, [10 + number]
        attachment.optional_links.clear()
    probes.ignore(0)
    getattr(probes, how)([gone, here])
    for closing in probes._closing:
        closing.wait(10)
    assert sorted(kernel.closed) == [10, 11]
    assert probes.attachments == [stays]
    assert not here.entry_links


@pytest.mark.parametrize("seed", range(10))
def test_what_stays_is_what_was_not_released(seed: int, kernel: Kernel) -> None:
    draw = random.Random(seed)
    probes = with_placement(probes_on([str(number) for number in range(20)]))
    gone = draw.sample(probes.attachments, draw.randrange(20))
    expected = list(probes.attachments)
    for attachment in gone:
        expected.remove(attachment)
    probes.release(gone)
    assert probes.attachments == expected
    assert not any(attachment.optional_links for attachment in gone)


# ---- changes of plan while files do not answer


class Clocked(Kernel):
    """A kernel of which some files never answer, and for how long it was waited for. Nobody waits really."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.now, self.held, self.takes_s = 1000.0, set[str](), 0.02
        self.slow = dict[str, float]()
        self.meanwhile: Any = lambda: None
        monkeypatch.setattr("argus.capture.probing.windows.link_in_time", self._in_time)
        clock = SimpleNamespace(monotonic=lambda: self.now, monotonic_ns=lambda: int(self.now * 1e9))
        for name in ("probes", "probing.windows"):
            monkeypatch.setattr(f"argus.capture.{name}.time", clock)

    def _in_time(self, make: Any, seconds: float) -> list[int]:
        self.meanwhile()
        takes_s = self.slow.get(make.args[2], self.takes_s)
        if make.args[2] in self.held or takes_s > seconds:
            self.now += seconds
            raise LateError(Aside(list, "late"))
        self.now += takes_s
        return list(make())

    def patience(self, *, in_loop: bool = True) -> Patience:
        return Patience(lambda: self.now, in_loop=in_loop)


def bare(paths: Sequence[str], owner: Owner = HONEST) -> Any:
    """Files with a function that nothing probes yet."""
    probes = probes_on(paths, owner)
    probes._window = None
    probes.hits = lambda: np.zeros(256, np.int64)
    for attachment in probes.attachments:
        attachment.optional_links.clear()
        attachment.entry_points[1] = 16, 1
    return probes


def without_probes(paths: Sequence[str], clocked: Clocked, owner: Owner = HONEST) -> Any:
    probes = bare(paths, owner)
    probes._patience, probes._window_patience = clocked.patience(), clocked.patience(in_loop=False)
    return probes


def of_users(clocked: Clocked, users: int, files: int) -> Any:
    """So many files of each of so many users."""
    probes = without_probes([], clocked)
    for user in range(users):
        paths = [f"{user} {file}" for file in range(files)]
        probes.attachments += without_probes(paths, clocked, (1000 + user, "")).attachments
    return probes


def end(window: Any) -> None:
    window._thread.join(10)
    assert window.closing.wait(10)


def open_window(probes: Any) -> Any:
    """Opens one that ends at once."""
    if (window := probes.open_window(["launches"], 0.0)) is not None:
        window._thread.join(10)
        assert window.end_ns
        probes.settle_window(window)
    return window


CHANGES: dict[str, Any] = {
    "plan": lambda probes: probes.attach_optional("launches"),
    "pulse": lambda probes: (probes.probed.clear(), probes.set_pulse([1])),
    "window": lambda probes: (probes.probed.clear(), open_window(probes)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("number", [2, 8])
def test_files_that_do_not_answer_hold_no_change(number: int, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clocked = Clocked(monkeypatch)
    hostile = [f"hostile {number}" for number in range(24)]
    clocked.held = set(hostile)
    probes = without_probes(hostile, clocked, HOSTILE)
    honest = without_probes([str(number) for number in range(number)], clocked).attachments
    probes.attachments += honest
    begun = clocked.now
    CHANGES[change](probes)
    assert clocked.now - begun <= patience.OF_USER_S + number * 2 * clocked.takes_s + 0.001
    assert probes.unanswered == 24, "each is counted"
    assert [each.answers for each in probes.attachments] == [False] * 24 + [True] * number
    waited_s = 0.0
    for _ in range(20):
        for each in probes.attachments:
            each.answers = True
        if probes._window is not None:
            end(probes._window)
        waited_s -= clocked.now
        CHANGES[change](probes)
        waited_s += clocked.now
        clocked.now += 2.0
        assert all(each.answers for each in honest)
    of_honest_s = 20 * number * clocked.takes_s
    assert waited_s <= patience.OF_LOOP * (clocked.now - begun) + patience.OF_USER_S + of_honest_s


@pytest.mark.parametrize("number", [8, 16, 32])
def test_new_files_that_do_not_answer_take_no_window_of_others(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four a window took it of all but two files of an honest job, each time: those that had been left out counted as
    late, and came behind new ones ever after."""
    clocked = Clocked(monkeypatch)
    probes = without_probes([str(file) for file in range(number)], clocked)
    honest = list(probes.attachments)
    for window in range(10):
        paths = [f"{window} {file}" for file in range(4)]
        clocked.held |= {*paths}
        probes.attachments = [*without_probes(paths, clocked, HOSTILE).attachments, *honest]
        clocked.made.clear()
        CHANGES["window"](probes)
        end(probes._window)
        assert len(clocked.made) == number
        assert all(each.answers for each in honest)
        clocked.now += 5.0


def whole_windows(probes: Any, clocked: Clocked, number: int, period_s: float = 5.0) -> dict[int, int]:
    """Of so many windows, in how many each user had all of its files: a job that lacks one has none. What is left out
    is put on until the next one."""
    whole = dict.fromkeys((each.owner[0] for each in probes.attachments), 0)
    for _ in range(number):
        CHANGES["window"](probes)
        lacking = {each.owner[0] for each in probes._window.lacking}
        end(probes._window)
        for user in whole.keys() - lacking:
            whole[user] += 1
        for each in probes.attachments:
            each.answered()
        clocked.now += period_s
    return whole


@pytest.mark.parametrize(
    ("users", "files", "takes_s", "least"),
    [(1, 8, 0.02, 40), (1, 8, 0.15, 40), (1, 8, 0.35, 40), (1, 8, 0.6, 40), (1, 30, 0.15, 40), (2, 8, 0.02, 40),
     (2, 8, 0.1, 40), (2, 8, 0.15, 30), (2, 12, 0.1, 30), (2, 30, 0.04, 30), (2, 30, 0.06, 20), (2, 8, 0.24, 20),
     (5, 8, 0.04, 40), (33, 8, 0.007, 40)],
)  # fmt: skip
def test_slow_files_have_their_windows(
    users: int, files: int, takes_s: float, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy node. If the time does not suffice, each user has fewer windows, not parts of each."""
    clocked = Clocked(monkeypatch)
    clocked.takes_s = takes_s
    probes = of_users(clocked, users, files)
    assert min(whole_windows(probes, clocked, 40).values()) >= least


def test_files_of_jobs_that_are_over_take_no_time_of_who_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that nobody maps keep their probes for a while: one user alone counted as two."""
    clocked = Clocked(monkeypatch)
    clocked.takes_s = 0.35
    probes = without_probes([str(file) for file in range(8)], clocked)
    kept = without_probes(["kept"], clocked, (1001, "")).attachments
    kept[0].unused = True
    probes.attachments += kept
    assert whole_windows(probes, clocked, 40)[HONEST[0]] == 40


@pytest.mark.parametrize("users", [1, 2])
def test_a_file_that_does_not_answer_costs_no_other_user(users: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger may map it and hold his own lock."""
    clocked = Clocked(monkeypatch)
    clocked.held, clocked.takes_s = {"0"}, 0.045
    probes = without_probes([str(file) for file in range(9)], clocked)
    probes.attachments[8].mapped_by(frozenset([(1000 + users - 1, "")]))
    begun, missed, windows, waited_s = clocked.now, 0, 0, 0.0
    lost: Counter[int] = Counter()
    for _ in range(50):
        waited_s -= clocked.now
        CHANGES["window"](probes)
        waited_s += clocked.now
        end(probes._window)
        if probes._window.begin_ns:
            windows += 1
            missed += sum(each.library.open_path != "0" for each in probes._window.lacking if users == 1)
            missed += probes.attachments[8] in probes._window.lacking
        lost.update(map(id, probes._window.lacking))
        for each in probes.attachments:
            each.answered()
        clocked.now += 2.0
    assert missed == 0
    assert windows == 50 if users > 1 else windows >= 20
    assert [each.unanswered for each in probes.attachments] == [lost[id(each)] for each in probes.attachments]
    assert lost[id(probes.attachments[0])] == 50
    assert lost[id(probes.attachments[8])] == 50 - windows
    assert probes.unanswered == lost.total()
    assert waited_s <= patience.OF_LOOP * (clocked.now - begun) + patience.OF_USER_S + 50 * 8 * clocked.takes_s


@pytest.mark.parametrize("users", [1, 2])
def test_windows_that_a_resting_user_loses_are_counted(users: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that none could begin. They were counted nowhere."""
    clocked = Clocked(monkeypatch)
    probes = without_probes([f"a{file}" for file in range(12)], clocked)
    if users == 1:
        clocked.held = {"a0"}
    else:
        clocked.takes_s = 0.15
        probes.attachments += without_probes(["b0", "b1"], clocked, (1001, "")).attachments
    nothing = without_probes(["nothing to probe"], clocked).attachments[0]
    nothing.optional_points.clear()
    probes.attachments.append(nothing)
    whole, lost = 0, Counter[int]()
    for _ in range(60):
        before = [each.unanswered for each in probes.attachments]
        CHANGES["window"](probes)
        lacking = {id(each) for each in probes._window.lacking}
        end(probes._window)
        whole += bool(probes._window.begin_ns) and not lacking
        after = [each.unanswered for each in probes.attachments]
        grew = {id(each) for each, a, b in zip(probes.attachments, before, after, strict=True) if b == a + 1}
        assert grew == lacking, "each once"
        lost.update(lacking)
        for each in probes.attachments:
            each.answered()
        clocked.now += 2.0
    assert lost.total() == probes.unanswered > 0
    assert lost[id(nothing)] == 0, "it has all that it is to have"
    assert whole == (0 if users == 1 else 60 - lost[id(probes.attachments[1])])


@pytest.mark.parametrize("first", [HONEST, HOSTILE])
def test_a_shared_file_is_not_up_to_who_mapped_it_first(first: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another user did, who rests, as many have the driver's library mapped, each of its windows lacked it."""
    clocked = Clocked(monkeypatch)
    probes = without_probes(["libcuda", "libnccl"], clocked)
    honest = list(probes.attachments)
    honest[0].owner = first
    honest[0].mapped_by(frozenset([HONEST, HOSTILE]))
    probes.attachments += without_probes(["h0", "h1", "h2"], clocked, HOSTILE).attachments
    clocked.held = {"h0", "h1", "h2"}
    begun, waited_s = clocked.now, 0.0
    for _ in range(30):
        waited_s -= clocked.now
        CHANGES["window"](probes)
        waited_s += clocked.now
        assert not {*map(id, honest)} & {*map(id, probes._window.lacking)}
        end(probes._window)
        for each in probes.attachments:
            each.answered()
        clocked.now += 2.0
    most_s = patience.OF_LOOP * (clocked.now - begun) + patience.OF_USER_S + patience.SAVED_S
    assert waited_s <= most_s + 30 * 2 * clocked.takes_s


@pytest.mark.parametrize("seed", range(20))
def test_time_of_files_that_nobody_shares_is_as_that_of_their_owners(seed: int) -> None:
    """As before files could have several users. One whose owners are known is as one of whom they are not."""
    draw = random.Random(seed)
    clock = SimpleNamespace(now=1000.0)
    plain, known = Patience(lambda: clock.now), Patience(lambda: clock.now)
    files = [probes_on([str(n)], (draw.randrange(1000, 1004), "")).attachments[0] for n in range(12)]
    twins = [probes_on([str(n)], file.owner).attachments[0] for n, file in enumerate(files)]
    for file in twins:
        file.mapped_by(frozenset([file.owner, (file.owner[0], "pod")]))
    for _ in range(60):
        chosen = draw.sample(range(12), draw.randrange(1, 12))
        order = plain.begin([files[n] for n in chosen], files)
        again = known.begin([twins[n] for n in chosen], twins)
        assert [each.library.open_path for each in order] == [each.library.open_path for each in again]
        for one, other in zip(order, again, strict=True):
            seconds = plain.seconds(one)
            assert seconds == known.seconds(other)
            assert plain.has_turn(one) == known.has_turn(other)
            assert one.users == {one.owner[0]}
            waited_s, came = min(seconds, draw.choice([0.01, 0.2, 9.0])), draw.random() < 0.7
            clock.now += waited_s
            for waits, file in ((plain, one), (known, other)):
                waits.spend(file, waited_s, came=came)
        clock.now += draw.choice([0.0, 0.05, 3.0])
    assert plain._accounts._left == known._accounts._left


@pytest.mark.parametrize("seed", range(20))
def test_no_user_pays_more_for_a_shared_file_than_for_its_own(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever shares files has at least the windows that it had if it had mapped them first, whatever others do."""
    draw = random.Random(seed)
    shared, own, takes_s = draw.randrange(1, 4), draw.randrange(4), draw.choice([0.02, 0.05])
    whole: dict[bool, int] = {}
    for alone in (True, False):
        with monkeypatch.context() as patched:
            clocked = Clocked(patched)
            clocked.takes_s = takes_s
            probes = without_probes([str(file) for file in range(shared + own)], clocked)
            honest = list(probes.attachments)
            for file in honest[:shared]:
                file.mapped_by(frozenset([HONEST] if alone else [HONEST, HOSTILE]))
            hostile = without_probes([f"h{file}" for file in range(5)], clocked, HOSTILE).attachments
            clocked.held = {"h1", "h3"}
            probes.attachments += hostile
            whole[alone] = 0
            for _ in range(30):
                CHANGES["window"](probes)
                whole[alone] += not {*map(id, honest)} & {*map(id, probes._window.lacking)}
                end(probes._window)
                for each in probes.attachments:
                    each.answered()
                clocked.now += 2.0
    assert whole[False] >= whole[True] >= 25


OTHER: Owner = (1001, "")


def shared_by(files: Iterable[Any], *owners: Owner) -> list[Any]:
    chosen = list(files)
    for file in chosen:
        file.mapped_by(frozenset(owners))
    return chosen


def test_a_lock_on_shared_files_takes_no_time_of_others_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once one user's 2 s were used, each of the others paid as much: 5 s a change, and then their own files had no
    turn in three windows."""
    clocked = Clocked(monkeypatch)
    clocked.takes_s = 0.01
    probes = without_probes([f"shared {file}" for file in range(8)], clocked, HOSTILE)
    shared = shared_by(probes.attachments, HONEST, OTHER, HOSTILE)
    clocked.held = {each.library.open_path for each in shared}
    own: list[Any] = []
    for owner in (HONEST, OTHER):
        own += without_probes([f"{owner[0]} {file}" for file in range(3)], clocked, owner).attachments
    probes.attachments += own
    begun = clocked.now
    CHANGES["window"](probes)
    assert clocked.now - begun <= patience.OF_USER_S + len(own) * clocked.takes_s + 0.001
    assert list(map(id, probes._window.lacking)) == list(map(id, shared))
    end(probes._window)
    for _ in range(20):  # a job may map none of the shared ones
        for each in probes.attachments:
            each.answered()
        clocked.now += 2.0
        CHANGES["window"](probes)
        assert not {*map(id, own)} & {*map(id, probes._window.lacking)}
        end(probes._window)
    clocked.held.clear()
    clocked.now += 10.0
    whole = whole_windows(probes, clocked, 12, 2.0)
    assert whole[HONEST[0]] == whole[OTHER[0]] >= 11


@pytest.mark.parametrize("held", [False, True])
def test_who_maps_files_without_ranks_is_nobody_beside_who_is_alone(
    held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle process of root's that maps one of them took each of 30 windows: 3 s of files that answer, 2 s for two
    users. If files of its own hang they hold a change for 2 s at most, and of the loop's time a fifth."""
    clocked = Clocked(monkeypatch)
    clocked.takes_s = 0.09
    probes = without_probes([f"own {file}" for file in range(30)], clocked, HONEST)
    files, root = list(probes.attachments), (0, "")
    shared_by(files[:1], HONEST, root)
    if held:
        probes.attachments += without_probes([f"root {file}" for file in range(5)], clocked, root).attachments
        clocked.held = {each.library.open_path for each in probes.attachments[30:]}
    probes.trains({HONEST[0]})
    whole, begun, waited_s = 0, clocked.now, 0.0
    for _ in range(30):
        before = clocked.now
        CHANGES["window"](probes)
        waited_s += clocked.now - before - 30 * clocked.takes_s
        whole += not {*map(id, files)} & {*map(id, probes._window.lacking)}
        end(probes._window)
        for each in probes.attachments:
            each.answered()
        clocked.now += 2.0
    assert whole == 30
    assert waited_s <= patience.OF_LOOP * (clocked.now - begun) + patience.OF_USER_S + patience.SAVED_S
    probes.trains({HONEST[0], root[0]})
    clocked.held.clear()
    clocked.now += 100.0
    assert whole_windows(probes, clocked, 1)[HONEST[0]] == 0, "where both have ranks it has 2 s"


@pytest.mark.parametrize(("own", "slow_s"), [(8, 0.9), (8, 0.3), (0, 0.9)])
def test_who_lets_files_of_one_alone_answer_slowly_is_waited_for_as_if_they_hung(
    own: int, slow_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ranks, and for nothing: 4.5 s each time."""
    clocked = Clocked(monkeypatch)
    probes = without_probes([f"own {file}" for file in range(own)], clocked, HONEST)
    files = list(probes.attachments)
    shared = shared_by(
        without_probes([f"shared {file}" for file in range(5)], clocked, HONEST).attachments, HONEST, HOSTILE
    )
    clocked.slow = {each.library.open_path: slow_s for each in shared}
    probes.attachments = [*shared, *files]
    probes.trains({HONEST[0]})
    begun, waited_s = clocked.now, 0.0
    for _ in range(60):
        before = clocked.now
        CHANGES["window"](probes)
        waited_s += clocked.now - before
        assert not {*map(id, files)} & {*map(id, probes._window.lacking)}
        end(probes._window)
        for each in probes.attachments:
            each.answered()
        clocked.now += 2.0
    most_s = patience.OF_LOOP * (clocked.now - begun) + patience.LONGEST_S + patience.SAVED_S
    assert waited_s <= most_s + 60 * (own * clocked.takes_s + len(shared) * patience.ANSWERS_S)


def test_who_maps_files_while_a_window_is_opened_takes_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The account was that of who maps them by now, which had none of this change."""
    clocked = Clocked(monkeypatch)
    probes = without_probes([f"h{file}" for file in range(8)], clocked)
    probes.attachments += without_probes(["other"], clocked, OTHER).attachments
    flips = itertools.cycle([frozenset([HONEST, HOSTILE]), frozenset([HONEST])])

    def flip() -> None:
        owners = next(flips)
        for each in probes.attachments[:8]:
            each.mapped_by(owners)

    for _ in range(20):
        clocked.meanwhile = flip
        CHANGES["window"](probes)
        clocked.meanwhile = lambda: None
        assert not probes._window.lacking
        end(probes._window)
        clocked.now += 5.0


@pytest.mark.parametrize("how", ["forgotten", "fresh", "flip"])
@pytest.mark.parametrize(("files", "takes_s"), [(8, 0.05), (8, 0.1), (12, 0.1), (30, 0.05)])
def test_users_that_come_and_go_take_no_windows_of_who_needs_little(
    files: int, takes_s: float, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an account needs was forgotten with it: new ones came first, each time. So it was where another user mapped
    the files now and then, to make the account a new one."""
    clocked = Clocked(monkeypatch)
    clocked.takes_s = takes_s
    probes = without_probes([f"h{file}" for file in range(files)], clocked)
    honest, users = list(probes.attachments), [(3000 + user, "") for user in range(12)]
    quick = without_probes(["quick"], clocked, (2000, "")).attachments
    lost = 0
    for window in range(40):
        probes.attachments = [*honest, *(quick if how == "forgotten" else ())]
        for part in range(3 if window else 0):
            user, paths = users[(3 * window + part) % 12], [f"{window} {part} {file}" for file in range(4)]
            clocked.slow |= dict.fromkeys(paths, 60.0 if how == "fresh" else 0.9)
            new = without_probes(paths, clocked, user).attachments
            probes.attachments += new if how == "fresh" else shared_by(new, (2000, ""), user)
        if how == "flip":
            shared_by(honest, HONEST, *([HOSTILE] if window % 2 else []))
        CHANGES["window"](probes)
        lost += bool({*map(id, honest)} & {*map(id, probes._window.lacking)})
        end(probes._window)
        for each in probes.attachments:
            each.answered()
        clocked.now += 15.0
    assert lost == 0


@pytest.mark.parametrize(("users", "files", "takes_s"), [(5, 6, 0.15), (3, 8, 0.2), (40, 2, 0.05), (60, 1, 0.06)])
def test_what_is_kept_for_some_leaves_room_for_all(
    users: int, files: int, takes_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A margin for some was withheld from others, always the same, where all together just have room."""
    clocked = Clocked(monkeypatch)
    clocked.takes_s = takes_s
    probes = of_users(clocked, users, files)
    assert min(whole_windows(probes, clocked, 20, 20.0).values()) == 20


@pytest.mark.parametrize("between", [0, 1, 7])
@pytest.mark.parametrize("period_s", [5.0, 15.0])
@pytest.mark.parametrize(
    "each_s",
    [(0.46, 0.465, 0.47, 0.475), (0.4, 0.41, 0.42, 0.43), (0.3, 0.31, 0.32, 0.33, 0.34),
     (0.22, 0.23, 0.24, 0.24, 0.24, 0.24, 0.26), (0.23, 0.23, 0.23, 0.23, 0.23, 0.45)],
)  # fmt: skip
def test_where_not_all_have_room_all_have_their_turn(
    each_s: tuple[float, ...], period_s: float, between: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever needs most had none, for good; so it was where other windows lie between, which see nothing of those."""
    clocked = Clocked(monkeypatch)
    probes = without_probes([], clocked)
    for user, takes_s in enumerate(each_s):
        paths = [f"{user} {file}" for file in range(4)]
        clocked.slow |= dict.fromkeys(paths, takes_s)
        probes.attachments += without_probes(paths, clocked, (1000 + user, "")).attachments
    others, whole = without_probes(["other"], clocked, (999, "")).attachments, Counter[int]()
    files = list(probes.attachments)
    for _ in range(40):
        for part in range(1 + between):
            probes.attachments = [*files, *others]
            for each in files:
                each.optional_points["launches"] = {"cuda_enter": [(16, 1)]} if not part else {}
            whole.update(user for user, had in whole_windows(probes, clocked, 1, period_s).items() if had and not part)
    assert min(whole[1000 + user] for user in range(len(each_s))) >= 5


@pytest.mark.parametrize("how", ["slow", "held"])
def test_a_user_whose_shared_files_were_slow_has_its_turn_with_new_ones(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next job was taken for slow, and had no window beside others that need much."""
    clocked = Clocked(monkeypatch)
    clocked.takes_s = 0.05
    probes = without_probes([], clocked)
    for user in range(3):
        paths = [f"{user} {file}" for file in range(4)]
        clocked.slow |= dict.fromkeys(paths, 0.48)
        probes.attachments += without_probes(paths, clocked, (2000 + user, "")).attachments
    others, paths = list(probes.attachments), [f"shared {file}" for file in range(4)]
    shared = shared_by(without_probes(paths, clocked, HONEST).attachments, HONEST, HOSTILE)
    clocked.slow |= dict.fromkeys(paths, 0.9 if how == "slow" else 60.0)
    for _ in range(2):
        probes.attachments = [*others, *shared]
        CHANGES["window"](probes)
        end(probes._window)
        clocked.now += 15.0
    new = without_probes([f"new {file}" for file in range(8)], clocked).attachments
    probes.attachments = [*others, *new]
    assert whole_windows(probes, clocked, 10, 15.0)[HONEST[0]] == 10


@pytest.mark.parametrize("seed", range(20))
def test_whatever_slow_users_do_others_have_windows(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to seven users, some with lower numbers, share files in all ways that come and go, answer, are slow or hang,
    and now and then map those of others. Who needs little loses none, who needs much no more than half."""
    draw, clocked, honest = random.Random(seed), Clocked(monkeypatch), dict[int, tuple[list[Any], float]]()
    for user in range(1000, 1000 + draw.randrange(1, 5)):
        paths, takes_s = (
            [f"{user} {file}" for file in range(draw.randrange(1, 12))],
            draw.choice([0.01, 0.03, 0.06, 0.1]),
        )
        clocked.slow |= dict.fromkeys(paths, takes_s)
        honest[user] = without_probes(paths, clocked, (user, "")).attachments, len(paths) * takes_s
    hostile = [(draw.choice([100, 5000]) + user, "") for user in range(draw.randrange(1, 8))]
    pool = without_probes([f"x {file}" for file in range(draw.randrange(1, 40))], clocked, hostile[0]).attachments
    for file in pool:
        shared_by([file], *draw.sample(hostile, draw.randrange(1, len(hostile) + 1)))
    probes, maps, period_s = without_probes([], clocked), draw.random() < 0.5, draw.choice([10.0, 15.0, 30.0])
    if draw.random() < 0.5:
        probes.trains({*honest, *(user for user, _ in hostile)})
    lost = Counter[int]()
    for window in range(45):
        used = [file for file in pool if draw.random() < 0.7]
        clocked.slow |= {file.library.open_path: draw.choice([0.01, 0.3, 0.6, 0.95, 60.0]) for file in used}
        for files, _ in honest.values():
            for file in files:
                file.mapped_by(frozenset([file.owner, hostile[0]] if maps and window % 2 else [file.owner]))
        probes.attachments = [*used, *(file for files, _ in honest.values() for file in files)]
        CHANGES["window"](probes)
        lacking = {*map(id, probes._window.lacking)} if window >= 5 else set[int]()
        lost.update(user for user, (files, _) in honest.items() if lacking & {*map(id, files)})
        end(probes._window)
        for each in probes.attachments:
            each.answered()
        clocked.now += period_s
    for user, (_, needs_s) in honest.items():
        assert lost[user] <= (0 if needs_s < 0.3 else 20), needs_s


def test_files_without_functions_of_a_window_need_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others of their account need was taken for theirs, and kept."""
    clocked = Clocked(monkeypatch)
    probes = without_probes([], clocked)
    for user in range(4):
        paths = [f"{user} {file}" for file in range(8 if user < 2 else 4)]
        files = without_probes(paths, clocked, (1000 + user, "")).attachments
        clocked.slow |= dict.fromkeys(paths, 0.2 if user < 2 else 0.45)
        for file in files[1:] if user < 2 else ():
            file.optional_points.clear()
        probes.attachments += files
    assert min(whole_windows(probes, clocked, 20, 20.0).values()) == 20


def test_who_needs_little_has_its_probes_on_for_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """They stood for five seconds before the window began."""
    clocked = Clocked(monkeypatch)
    probes = without_probes([f"h{file}" for file in range(8)], clocked)
    honest = [each.library.open_path for each in probes.attachments]
    probes.attachments += without_probes([f"slow {file}" for file in range(4)], clocked, OTHER).attachments
    clocked.slow = {f"slow {file}": 0.4 for file in range(4)}
    for _ in range(2):
        CHANGES["window"](probes)
        end(probes._window)
        clocked.now += 20.0
    assert not probes._window.lacking
    assert [each.library.open_path for each, _ in probes._window._files][-8:] == honest


@pytest.mark.parametrize("answers", [True, False])
def test_what_a_window_has_of_a_late_file_changes_nothing_that_came_later(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was late while the plan changed: it was put off twice, and its newest probes forgotten, which may come."""
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    (attachment,) = probes_on(["a"]).attachments
    if not answers:
        attachment.did_not_answer(lambda _: False)
    before = attachment.again_at, attachment.wait_s
    assert (attachment.note_late(lambda _: True), attachment.skip()) == (1, 1)
    assert attachment.unanswered == 2 + (not answers)
    assert not attachment.answers
    if answers:
        assert (attachment.again_at, attachment.late(0)) == (1000.0 + SOON_S, True)
    else:
        assert ((attachment.again_at, attachment.wait_s), attachment.late(0)) == (before, False)


@pytest.mark.parametrize("takes_s", [0.1, 0.3, 0.45])
def test_two_users_of_one_installation_have_windows_on_a_busy_node(
    takes_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files took more than the 2 s that one user has: neither had any."""
    clocked = Clocked(monkeypatch)
    clocked.takes_s = takes_s
    shared = without_probes([f"shared {file}" for file in range(8)], clocked, HONEST).attachments
    probes = without_probes(["own 0"], clocked, HONEST)
    probes.attachments += [*without_probes(["own 1"], clocked, OTHER).attachments, *shared_by(shared, HONEST, OTHER)]
    whole, begun = 0, clocked.now
    while clocked.now < begun + 300:
        CHANGES["window"](probes)
        whole += not probes._window.lacking
        end(probes._window)
        for each in probes.attachments:
            each.answered()
        clocked.now += 5.0
    assert whole >= patience.OF_LOOP * (clocked.now - begun) / (len(shared) * takes_s + 1)


@pytest.mark.parametrize("first", [100, 2000])
@pytest.mark.parametrize("seed", range(10))
def test_users_that_share_files_in_all_ways_take_no_time_of_others(
    seed: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each set of users has an account: six users have 63, and all together no more of the time than others. Those with
    lower numbers took whole changes before it came to others. Until it is known that these need little they may lose
    a window or two."""
    draw, clocked = random.Random(seed), Clocked(monkeypatch)
    probes = without_probes([f"own {file}" for file in range(6)], clocked, HONEST)
    honest = [*probes.attachments, *without_probes(["libcuda"], clocked, HONEST).attachments]
    shared_by(honest[-1:], HONEST, OTHER)
    users = [(first + user, "") for user in range(6)]
    hostile = without_probes([f"held {file}" for file in range(200)], clocked, HOSTILE).attachments
    for file in hostile:
        shared_by([file], *draw.sample(users, draw.randrange(1, 7)))
    clocked.held = {each.library.open_path for each in hostile}
    probes.attachments = [*hostile, *honest]
    begun, waited_s, lost = clocked.now, 0.0, list[int]()
    for window in range(200):
        before = clocked.now
        CHANGES["window"](probes)
        waited_s += clocked.now - before - len(honest) * clocked.takes_s
        assert clocked.now - before <= patience.LONGEST_S + 0.001
        lost += [window] * bool({*map(id, honest)} & {*map(id, probes._window.lacking)})
        end(probes._window)
        for each in probes.attachments:
            each.answered()
        clocked.now += 4.0
    assert lost == [*range(len(lost))]
    assert len(lost) <= 3
    most = OF_A_USER * len(users)
    assert len(probes._window_patience._accounts._left) <= most + 2
    assert waited_s <= patience.OF_USERS * (clocked.now - begun) + most * (patience.OF_USER_S + patience.SAVED_S)


@pytest.mark.parametrize("seed", range(20))
def test_accounts_are_filled_as_a_simple_count_says(seed: int) -> None:
    """Of all that lack some, in small parts: none has more than it needs, nor than a fifth of the time."""
    draw, clock = random.Random(seed), SimpleNamespace(now=1000.0)
    waits, passed_s = Patience(lambda: clock.now), draw.choice([0.5, 2.0])
    accounts = [frozenset(draw.sample(range(5), draw.randrange(1, 4))) for _ in range(draw.randrange(1, 8))]
    for account in dict.fromkeys(accounts):
        waits._accounts._left[account] = draw.uniform(-5, 0.99)
        waits._accounts._of_user.update(account)
    before = dict(waits._accounts._left)
    many = Counter(user for account in before for user in account)
    weights = {a: 1.0 if len(a) == 1 else 1 / max(min(many[user] for user in a) - 1, 1) for a in before}
    expected, left_s, parts = dict(before), passed_s * patience.OF_USERS, 20_000
    for _ in range(parts):
        needy = {
            a: weights[a]
            for a in before
            if expected[a] < patience.SAVED_S and expected[a] - before[a] < passed_s * patience.OF_LOOP
        }
        for account, weight in needy.items():
            expected[account] += left_s / parts * weight / sum(needy.values())
    clock.now += passed_s
    waits._accounts.fill()
    for account in before:
        assert waits._accounts._left.get(account, patience.SAVED_S) == pytest.approx(expected[account], abs=0.002)
    assert waits._accounts._of_user == Counter(user for account in waits._accounts._left for user in account)


@pytest.mark.parametrize("hang", [False, True])
def test_shared_files_that_hang_take_no_turn_of_others_own(hang: bool, kernel: Kernel) -> None:
    """Two of each user's turns were taken: its own file was never tried again."""
    probes, late = probes_on([f"shared {file}" for file in range(8)], HONEST), LateProbes()
    shared_by(probes.attachments, HONEST, OTHER, HOSTILE)
    own = probes_on(["own"], OTHER).attachments[0]
    for attachment in [*probes.attachments, own]:
        attachment.optional_links.pop("launches")
        attachment.skip()
    if hang:
        kernel.free.clear()
    try:
        late.go_on(probes)
        assert len(late._trying) == MOST_OF_OWNER
        probes.attachments.append(own)
        late.go_on(probes)
        assert own in [each.attachment for each in late._trying]
    finally:
        kernel.free.set()
        join(late)


@pytest.mark.parametrize("seed", range(10))
def test_users_that_share_files_in_all_ways_leave_turns_for_others(seed: int, kernel: Kernel) -> None:
    draw = random.Random(seed)
    users = [(2000 + user, "") for user in range(6)]
    probes, late = probes_on([f"held {file}" for file in range(200)], HOSTILE), LateProbes()
    for file in probes.attachments:
        shared_by([file], *draw.sample(users, draw.randrange(1, 7)))
    honest = probes_on(["own", "libcuda"], HONEST).attachments
    shared_by(honest[1:], HONEST, OTHER)
    probes.attachments += honest
    for attachment in probes.attachments:
        attachment.optional_links.pop("launches")
        attachment.skip()
    kernel.free.clear()
    try:
        for _ in range(3):
            late.go_on(probes)
            tried = [each.attachment for each in late._trying]
            assert len(tried) <= MOST + 2 * len(users)
            assert {id(each) for each in honest} <= {id(each) for each in tried}
    finally:
        kernel.free.set()
        join(late)


def test_a_file_of_many_users_is_looked_at_once(kernel: Kernel) -> None:
    """Twenty times a second all users of all files were gone through."""

    class Counted(frozenset[int]):
        gone_through = 0

        def __iter__(self) -> Iterator[int]:
            Counted.gone_through += 1
            return super().__iter__()

    probes, late, owners = probes_on(map(str, range(300)), HONEST), LateProbes(), [(user, "") for user in range(256)]
    users = Counted(user for user, _ in owners)
    for attachment in shared_by(probes.attachments, *owners):
        assert attachment.users is probes.attachments[0].users
        attachment.optional_links.pop("launches")
        attachment.skip()
    for attachment in probes.attachments:
        attachment.users = users
    kernel.free.clear()
    try:
        for _ in range(3):
            Counted.gone_through = 0
            late.go_on(probes)
            assert len(late._trying) == MOST_OF_OWNER
            assert Counted.gone_through <= 3 * MOST_OF_OWNER + 1
        Counted.gone_through = 0
        waits = Patience(lambda: 1000.0)
        for file in waits.begin(probes.attachments):
            assert waits.has_turn(file) == (waits.seconds(file) > 0)
            waits.spend(file, 0.0, came=False)
        assert Counted.gone_through <= 2 * 300 + 10, "whether it has room, and a turn, may be asked of each file"
    finally:
        kernel.free.set()
        join(late)


def test_a_file_s_links_go_over_to_who_maps_it_and_back(kernel: Kernel) -> None:
    """With the probes' own books: whoever mapped it first has gone."""
    probes = with_placement(probes_on(["libcuda"], HOSTILE))
    (file,), room = probes.attachments, probes.placement.links
    file.library.offsets = dict.fromkeys(list(calls.BY_SYMBOL)[:5], 16)
    room.take(file)
    kept = file.links_kept
    assert dict(room._of_owner) == {HOSTILE: kept}
    probes.mapped_by(file, frozenset([HOSTILE, HONEST, OTHER]))
    assert (file.owner, file.users) == (HOSTILE, {HOSTILE[0], HONEST[0], OTHER[0]})
    probes.mapped_by(file, frozenset([OTHER]))
    assert (file.owner, file.users) == (OTHER, {OTHER[0]})
    assert dict(room._of_owner) == {OTHER: kept}
    probes.mapped_by(file, frozenset())
    assert (file.owner, file.users, file.owners) == (OTHER, {OTHER[0]}, frozenset())
    probes.release([file])
    for closing in probes._closing:
        assert closing.wait(10)
    assert not room._of_owner
    assert file.links_kept == 0


@pytest.mark.parametrize("seed", range(20))
def test_who_maps_a_file_is_known(seed: int, clock: SimpleNamespace) -> None:
    """It is another one's once its owner's processes do not map it any more."""
    draw = random.Random(seed)
    probes: Any = FakeProbes()
    handed: list[Any] = []

    def mapped_by(attachment: Any, owners: frozenset[Owner]) -> None:
        attachment.mapped_by(owners)
        if owners and attachment.owner not in owners:
            attachment.owner = min(owners)
            handed.append(attachment)

    probes.mapped_by, probes.release = mapped_by, lambda gone: None
    files = probed_files(probes)
    there: list[Any] = []
    pids = itertools.count(1)
    for _ in range(60):
        if there and draw.random() < 0.4:
            files.was_used(there.pop(draw.randrange(len(there))))
            files.release(there)
        else:
            there.append(a_target(next(pids), (draw.randrange(1000, 1004), ""), draw.sample(range(6), 2)))
            files.attach(there, {target.pid for target in there}, running=True)
        clock.now += 1.0
        for attachment in files.attached:
            mapping = [each for each in there if attachment.library.key in {file.key for file in each.libraries}]
            owners = {target.identity.owner for target in mapping}
            assert attachment.owners == owners
            assert not owners or attachment.owner in owners
    assert handed


@pytest.mark.parametrize("unused", [False, True])
def test_files_that_nobody_maps_hold_no_change_either(unused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their user counted for nothing: neither its part of a change nor its part of the time held for them."""
    clocked = Clocked(monkeypatch)
    probes = without_probes([f"hostile {number}" for number in range(6)], clocked, HOSTILE)
    clocked.held = {each.library.open_path for each in probes.attachments}
    for each in probes.attachments:
        each.unused = unused
    honest = without_probes([str(number) for number in range(6)], clocked).attachments
    probes.attachments += honest
    begun, waited_s = clocked.now, 0.0
    for _ in range(30):
        before = clocked.now
        CHANGES["window"](probes)
        waited_s += clocked.now - before
        assert clocked.now - before <= patience.OF_USER_S + 6 * 0.02 + 0.001
        assert all(each not in probes._window.lacking for each in honest)
        end(probes._window)
        for each in probes.attachments:
            each.answered()
        clocked.now += 2.0
    assert waited_s <= patience.OF_LOOP * (clocked.now - begun) + patience.OF_USER_S + 30 * 6 * 0.02


def test_probes_that_go_and_come_are_one_change() -> None:
    """Each of four waits took five seconds: one change of plan held the loop for 18."""
    clock = SimpleNamespace(now=1000.0)
    waits = Patience(lambda: clock.now)
    files = probes_on([str(number) for number in range(30)]).attachments
    for moving in (True, True):
        waited_s = waits.closing_s(moving=moving)
        clock.now += min(waited_s, 3.0)
        waits.spend_closing(min(waited_s, 3.0), gone=True)
        for file in waits.begin(files):
            waited_s = min(waits.seconds(file), 0.3)
            clock.now += waited_s
            waits.spend(file, waited_s, came=True)
    assert clock.now - 1000.0 <= patience.LONGEST_S + 0.001
    clock.now += 2 * patience.SAME_S
    assert waits.closing_s(moving=True) == patience.LONGEST_S - patience.FOR_NEW_S


@pytest.mark.parametrize("change", CHANGES)
def test_files_that_fail_slowly_are_late_as_well(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that answers with an error, each time after a while, was waited for each time, and uncounted."""
    clocked = Clocked(monkeypatch)

    def in_time(make: Any, seconds: float) -> list[int]:
        if make.args[2].startswith("hostile"):
            clocked.now += min(0.4, seconds)
            raise OSError(errno.EIO, "an error")
        clocked.now += 0.02
        return list(make())

    monkeypatch.setattr("argus.capture.probing.windows.link_in_time", in_time)
    probes = without_probes([f"hostile {file}" for file in range(16)], clocked, HOSTILE)
    honest = without_probes([str(file) for file in range(8)], clocked).attachments
    probes.attachments += honest
    begun = clocked.now
    CHANGES[change](probes)
    assert clocked.now - begun <= patience.OF_USER_S + 0.4 + 8 * 0.02
    assert [each.answers for each in probes.attachments] == [False] * 16 + [True] * 8, "they are tried again"
    assert probes.unanswered == 16
    if change == "window":
        assert {each.owner for each in probes._window.lacking} == {HOSTILE}
        end(probes._window)


@pytest.mark.parametrize("change", ["plan", "window"])
def test_processes_that_have_ended_are_not_late(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clocked = Clocked(monkeypatch)
    probes = without_probes(["0", "1"], clocked)

    def in_time(make: Any, seconds: float) -> list[int]:
        if make.args[2] == "0":
            raise OSError(errno.ESRCH, "no such process")
        return list(make())

    monkeypatch.setattr("argus.capture.probing.windows.link_in_time", in_time)
    CHANGES[change](probes)
    assert probes.unanswered == 0
    assert all(each.answers for each in probes.attachments)
    if change == "window":
        assert not probes._window.lacking
        end(probes._window)


def test_files_that_answer_slowly_hold_no_change_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each took a little less than what was free: 300 of them held the loop for 5 s a subject."""
    clocked = Clocked(monkeypatch)
    clocked.takes_s = 0.049
    probes = without_probes([f"hostile {number}" for number in range(300)], clocked, HOSTILE)
    honest = without_probes([str(number) for number in range(8)], clocked).attachments
    probes.attachments += honest
    begun = clocked.now
    CHANGES["window"](probes)
    assert clocked.now - begun <= patience.OF_USER_S + 8 * 0.05
    assert all(each.answers for each in honest)
    subjects = ["launches", "copies", "waits", "collectives", "ranges", "backward"]
    for each in probes.attachments:
        each.answered()
        each.optional_points |= dict.fromkeys(subjects, each.optional_points["launches"])
    begun = clocked.now
    assert probes.attach_optional(*subjects) > 0
    assert clocked.now - begun <= 2 * patience.OF_USER_S + 0.05, "windows are not the loop's"


@pytest.mark.parametrize("seed", range(20))
def test_no_user_takes_the_time_of_another(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its files do: one that has few that answer has all of them probed, and others hold a change for no
    longer than their part, all together for no more than theirs of the loop's time."""
    draw = random.Random(seed)
    clocked = Clocked(monkeypatch)
    honest = without_probes([str(number) for number in range(draw.randrange(1, 10))], clocked).attachments
    probes = without_probes([], clocked)
    users = draw.randrange(1, 5)
    probes.probed.clear()
    takes: dict[str, float] = {}

    def in_time(make: Any, seconds: float) -> list[int]:
        takes_s = takes.get(make.args[2], 0.02)
        clocked.now += min(takes_s, seconds)
        if takes_s > seconds:
            raise LateError(Aside(list, "late"))
        return list(make())

    monkeypatch.setattr("argus.capture.probing.windows.link_in_time", in_time)
    first, waited_s = clocked.now, 0.0
    for turn in range(40):
        probes.attachments = list(honest)
        for user in range(users):
            paths = [f"{turn if draw.random() < 0.5 else 0} {user} {file}" for file in range(draw.randrange(60))]
            takes |= {path: draw.choice([0.0, 0.03, 0.049, 0.2, 60.0]) for path in paths}
            probes.attachments += without_probes(paths, clocked, (2000 + user, "")).attachments
        draw.shuffle(probes.attachments)
        begun = clocked.now
        CHANGES["window"](probes)
        assert clocked.now - begun <= patience.LONGEST_S + 0.001
        assert clocked.now - begun <= (patience.OF_USER_S + 0.001) * users + len(honest) * 0.02
        waited_s += clocked.now - begun - len(honest) * 0.02
        assert all(each.answers for each in honest)
        assert not {id(each) for each in honest} & {id(each) for each in probes._window.lacking}
        end(probes._window)
        clocked.now += 2 + draw.random() * 5
    assert waited_s <= patience.OF_USERS * (clocked.now - first) + users * (patience.OF_USER_S + patience.SAVED_S)


def test_users_who_have_taken_time_are_forgotten() -> None:
    waits = Patience(lambda: 1000.0)
    for user in range(2 * patience.ACCOUNTS):
        (file,) = probes_on(["a"], (user, "")).attachments
        waits.begin([file])
        waits.spend(file, 0.5, came=False)
    assert len(waits._accounts._left) == len(waits._accounts._of_user) == patience.ACCOUNTS
    assert min(map(min, waits._accounts._left)) == patience.ACCOUNTS


def test_what_does_not_close_takes_no_time_of_what_is_probed() -> None:
    """And however little is left of it, others' probes are waited for until they are gone."""
    waits = Patience(lambda: 1000.0)
    for _ in range(5):
        waits.spend_closing(waits.closing_s(), gone=False)
    assert waits.closing_s() == patience.CLOSING_S
    (file,) = waits.begin(probes_on(["a"]).attachments)
    assert waits.seconds(file) == patience.OF_FILE_S


@pytest.mark.parametrize("takes_s", [0.02, 0.04])
def test_closings_that_are_quick_are_waited_for(takes_s: float) -> None:
    clock = SimpleNamespace(now=1000.0)
    patient = Patience(lambda: clock.now)
    for _ in range(1000):
        assert patient.closing_s() == patience.SAVED_S
        clock.now += takes_s
        patient.spend_closing(takes_s, gone=True)
        clock.now += 0.2


def test_closings_that_end_in_time_do_not_add_up() -> None:
    """Who holds his lock for a while, again and again, had each change of plan wait for that: 0.7 s each."""
    clock = SimpleNamespace(now=1000.0)
    waits, held = Patience(lambda: clock.now), list[float]()
    for _ in range(100):
        held.append(min(waits.closing_s(), 0.7))
        clock.now += held[-1]
        waits.spend_closing(held[-1], gone=held[-1] == 0.7)
    assert held[0] == 0.7
    assert held[5:] == [patience.CLOSING_S] * 95
    clock.now += 1.0
    (file,) = waits.begin(probes_on(["a"]).attachments)
    assert waits.seconds(file) == patience.OF_FILE_S, "files that are probed have time of their own"


def test_processes_that_are_ignored_at_once_are_waited_for_not_at_all(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each was waited for until its probes were gone: 20 processes of one look held the loop for 6 s."""
    probes = with_placement(probes_on([str(number) for number in range(40)]))
    monkeypatch.setattr(probes, "_close_soon", lambda *_: pytest.fail("they are waited for"))
    probes._target = lambda pid: None
    files = list(probes.attachments)
    for number, attachment in enumerate(files):
        attachment.pid, attachment.entry_links = number // 2, [10 + number]
        attachment.optional_links.clear()
    probes.ignore(*range(10, 20))
    assert probes.attachments == files[:20]
    (closing,) = probes._closing
    assert closing.wait(10)
    assert sorted(kernel.closed) == list(range(30, 50))


@pytest.mark.parametrize("seed", range(10))
def test_files_that_answer_have_all_their_probes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    clocked = Clocked(monkeypatch)
    probes = without_probes([str(number) for number in range(draw.randrange(1, 25))], clocked)
    for attachment in probes.attachments:
        attachment.mapped_by(frozenset([draw.choice([HONEST, HOSTILE])]))
    assert probes.attach_optional("launches") == probes.unanswered == 0
    assert all(map(all, (each.optional_links["launches"] for each in probes.attachments)))


def test_a_lock_that_is_held_now_and_then_takes_no_window_for_long(kernel: Kernel) -> None:
    probes, late = probes_on(["a"]), LateProbes()
    (attachment,) = probes.attachments
    probes.probed.clear()
    attachment.did_not_answer(lambda _: False)
    late.go_on(probes)
    assert not attachment.answers, "the kernel has not let go"
    for _ in range(5):
        attachment.did_not_answer(lambda _: True)
        late.go_on(probes)
        assert (attachment.answers, attachment.wait_s, late._trying) == (True, RETRY_S, [])


@pytest.mark.parametrize("before", ["nothing", "skipped", "skipped twice", "late, and answered since"])
def test_a_file_that_is_late_once_is_tried_again_soon(before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether others took its time before, or it was late long ago."""
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    (attachment,) = probes_on(["a"]).attachments
    for _ in range(before.startswith("skipped") + before.endswith("twice")):
        attachment.skip()
        assert attachment.again_at == 1000.0
    if before.startswith("late"):
        attachment.did_not_answer(lambda _: True)
        attachment.answered()
    attachment.did_not_answer(lambda _: True)
    assert attachment.again_at == 1000.0 + SOON_S
    attachment.did_not_answer(lambda _: True)
    assert attachment.again_at == 1000.0 + 2 * RETRY_S


def test_a_file_that_comes_while_the_pulse_changes_has_its_probes_once(kernel: Kernel) -> None:
    probes = probes_on(["a"])
    (attachment,) = probes.attachments
    probes.attachments, probes.probed = [], set()
    attachment.entry_points[1] = 16, 1
    probes.set_pulse([1])
    kernel.free.clear()
    joining = Aside(lambda: probes._join(attachment), "argus-attach")
    assert kernel.asked.wait(10)
    probes.set_pulse([])
    kernel.free.set()
    assert joining.wait(10)
    assert probes.attachments == [attachment]
    for closing in probes._closing:
        closing.wait(10)
    assert {*kernel.made} == {*kernel.closed} != set(), "it is no longer probed"
    assert list(probes._pulse_links.values()) == [[]]


def test_a_file_that_comes_after_the_end_keeps_no_probes(kernel: Kernel) -> None:
    probes = probes_on(["a"])
    (attachment,) = probes.attachments
    probes.attachments, probes.probed, probes.closed = [], set(), True
    attachment.entry_points[1] = 16, 1
    probes._pulse = frozenset([1])
    with pytest.raises(OSError, match="ended"):
        probes._join(attachment)
    assert probes.attachments == []
    for closing in probes._closing:
        closing.wait(10)
    assert {*kernel.made} == {*kernel.closed} != set()


def test_what_fails_beside_the_kernel_leaves_no_probes(kernel: Kernel) -> None:
    probes, late = probes_on(["a"]), LateProbes()
    (attachment,) = probes.attachments
    attachment.answers = False
    attachment.optional_links.clear()
    attachment.optional_points["waits"] = {"unknown_enter": [(16, 1)]}
    probes.probed.add("waits")
    late.go_on(probes)
    join(late)
    late.go_on(probes)
    assert (attachment.answers, late._trying) == (False, [])
    for closing in probes._closing:
        closing.wait(10)
    assert {*kernel.made} == {*kernel.closed} != set()


def test_closings_that_hang_share_one_deadline(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    class Hung:
        def wait(self, seconds: float) -> bool:
            nonlocal now
            now += seconds
            return False

    probes = probes_on([])
    probes.detach = probes._end_follow_forks = lambda: None
    probes.rings, probes._at_exit = dict, os.open("/", os.O_RDONLY)
    probes._module.close = lambda: None
    probes._closing = [Hung() for _ in range(40)]
    probes.close()
    assert now - 1000.0 <= PATIENCE_S
    assert probes.closed


# ---- probes that do not go


class Hanging(Kernel):
    """A kernel that does not take the probes of some files away before ``go`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.paths, self.go, self.of = set[str](), threading.Event(), dict[int, str]()
        monkeypatch.setattr("argus.capture.kernel.links._close_all", self._close)

    def _link(self, backend: Any, program: int, path: str, points: Any, at_exit: bool, pid: Any) -> list[int]:
        (number,) = super()._link(backend, program, path, points, at_exit, pid)
        self.of[number] = path
        return [number]

    def _close(self, links: Sequence[int]) -> list[OSError]:
        for link in links:
            if self.of.get(link) in self.paths:
                self.go.wait(60)
            self.closed.append(link)
        return []

    def there(self, path: str) -> int:
        """How many links stand on a file."""
        return sum(self.of[number] == path for number in self.made.keys() - {*self.closed})


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    kernel = Hanging(monkeypatch)
    yield kernel
    kernel.go.set()


def with_windows(paths: Sequence[str], owner: Owner = HONEST) -> Any:
    probes = bare(paths, owner)
    probes.probed = set()
    return probes


def test_a_file_whose_probes_do_not_go_ends_no_windows(hanging: Hanging) -> None:
    """It is left out itself, and counted, until they have gone."""
    probes = with_windows(["held"], HOSTILE)
    (held,) = probes.attachments
    honest = with_windows([str(number) for number in range(8)]).attachments
    probes.attachments += honest
    hanging.paths = {"held"}
    late = LateProbes()
    for turn in range(5):
        window = open_window(probes)
        assert window is not None
        assert list(window.lacking) == [held] * (turn > 0)
        window._thread.join(10)
        assert window.end_ns
        deadline = time.monotonic() + 10
        while any(hanging.there(each.library.open_path) for each in honest) and time.monotonic() < deadline:
            time.sleep(0.01)
        if not turn:
            assert open_window(probes) is None, "they may be about to go"
        window.end_ns -= 2 * GOING_NS
        window.closing.moved_ns -= 2 * GOING_NS
        late.go_on(probes)
        assert hanging.there("held") == 1
    assert (held.unanswered, probes.unanswered) == (4, 4)
    assert [each.unanswered for each in honest] == [0] * 8
    assert not held.late(0)
    hanging.go.set()
    deadline = time.monotonic() + 10
    while not held.late(0) and time.monotonic() < deadline:
        time.sleep(0.01)
    late.go_on(probes)
    window = open_window(probes)
    assert list(window.lacking) == []
    end(window)


@pytest.mark.parametrize("ended", [False, True])
def test_what_is_kept_for_a_file_is_there_for_others_once_its_probes_are_gone(ended: bool, hanging: Hanging) -> None:
    """Its slot was another one's while its probes stood, and its room waited for all files let go with it."""
    probes = probes_on(["held", "quick", "bare"])
    held, quick, bare = files = list(probes.attachments)
    for number, each in enumerate(files):
        hanging.of[number] = each.library.open_path
        each.optional_links.clear()
        each.entry_links = [number] if each is not bare else []
    released: list[Any] = []
    probes.placement = SimpleNamespace(
        release=released.append, links=SimpleNamespace(give_back=lambda each: released.append(each))
    )
    hanging.paths = {"held"}
    probes.release(files)
    probes.release([held])  # as one of a process that is ignored, and ends
    assert probes.attachments == []
    deadline = time.monotonic() + 10
    while len(released) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(map(id, released)) == sorted(map(id, [bare, bare, quick, quick]))
    probes.closed = ended
    hanging.go.set()
    assert all(closing.wait(10) for closing in probes._closing)
    probes.release([held])
    assert released[4:] == ([] if ended else [held, held]), "where the trace has ended the maps are gone"


def test_a_window_is_opened_beside_the_loop(kernel: Kernel) -> None:
    """However long the kernel takes. A file that comes meanwhile has none of its probes."""
    probes = with_windows(["0", "1"])
    kernel.free.clear()
    window = probes.open_window(["launches"], 0.0)
    assert window.begin_ns == window.end_ns == 0
    assert probes.window_goes
    assert probes.open_window(["launches"], 0.0) is None
    probes.attachments += [*with_windows(["2"]).attachments, Attachment(SimpleNamespace(), None)]  # type: ignore[arg-type]
    kernel.free.set()
    window._thread.join(10)
    assert window.begin_ns
    probes.settle_window(window)
    assert window.lacking == probes.attachments[2:3]
    assert probes.unanswered == 0, "it has not been late"
    end(window)
    assert len(kernel.made) == 2


def test_a_window_that_is_ended_while_it_is_opened_leaves_no_probes(kernel: Kernel) -> None:
    probes = with_windows(["0", "1"])
    kernel.free.clear()
    window = probes.open_window(["launches"], 60.0)
    assert kernel.asked.wait(10)
    window._over.set()
    kernel.free.set()
    window.close()
    assert (window.begin_ns, len(kernel.made)) == (0, 1)
    assert kernel.closed == [*kernel.made]


def test_a_shared_file_s_probes_go_whatever_else_hangs_of_who_mapped_it_first(hanging: Hanging) -> None:
    """They waited behind those of its own files."""
    probes = with_windows([f"held {file}" for file in range(100)], HOSTILE)
    shared = with_windows(["libcuda"], HOSTILE).attachments[0]
    shared.mapped_by(frozenset([HONEST, HOSTILE]))
    probes.attachments.append(shared)
    hanging.paths = {each.library.open_path for each in probes.attachments} - {"libcuda"}
    window = open_window(probes)
    window._thread.join(10)
    assert window.end_ns
    deadline = time.monotonic() + 10
    while hanging.there("libcuda") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not hanging.there("libcuda")
    assert shared not in [attachment for attachment, _ in window.there()]


def test_probes_that_have_not_gone_are_not_put_on_twice(hanging: Hanging) -> None:
    """Each call would be seen twice. They are put on once the others are gone."""
    probes, late = with_windows(["held", "other"]), LateProbes()
    held, other = probes.attachments
    assert probes.attach_optional("launches") == 0
    probes._patience.spend_closing(1.0, gone=False)
    hanging.paths = {"held"}
    for turn in range(3):
        probes.detach_optional("launches")
        probes.entries_only.symmetric_difference_update({"launches"})
        assert probes.attach_optional("launches") == 1
        assert hanging.there("held") == 2
        assert other.seen("launches")
        assert not held.seen("launches")
        late.go_on(probes)
        assert not late._trying
        assert (held.unanswered, probes.unanswered, other.unanswered) == (1, 1, 0), turn
    hanging.go.set()
    deadline = time.monotonic() + 10
    while hanging.there("held") and time.monotonic() < deadline:
        time.sleep(0.01)
    hanging.paths = set()
    while not held.answers and time.monotonic() < deadline:
        late.go_on(probes)
        join(late)
    assert held.seen("launches")
    assert 1 <= hanging.there("held") <= 2
    assert hanging.there("held") == sum(map(len, held.optional_links["launches"]))


@pytest.mark.parametrize(("resting", "has"), [((), True), ((1,), True), ((1, 2), False)])
def test_shared_files_wait_where_all_who_share_them_have_none_of_their_own(resting: tuple[int, ...], has: bool) -> None:
    """Without their own files a window is none of theirs: shared ones would only hold the loop."""
    now = 1000.0
    patience, library = Patience(lambda: now), SimpleNamespace()
    own = {user: Attachment(library, None, owner=(user, ""), owners=frozenset({(user, "")})) for user in (1, 2)}  # type: ignore[arg-type]
    both = Attachment(library, None, owner=(1, ""), owners=frozenset({(1, ""), (2, "")}))  # type: ignore[arg-type]
    files = [*own.values(), both]
    patience.begin(files)
    for user in resting:
        patience.spend(own[user], 2.0, came=False)
    now += 1.0
    patience.begin(files)
    assert [patience.has_turn(own[user]) for user in (1, 2)] == [1 not in resting, 2 not in resting]
    assert patience.has_turn(both) == has
