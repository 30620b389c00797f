"""One process, one user, one container: what it takes from the others that are traced with it. Nothing."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter as Tally
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from argus.capture import attachment, owners, placement, sampler, under_way
from argus.capture import probes as bpf
from argus.capture.call_prices import CallPrices
from argus.capture.kernel.ring import HEADER_BYTES
from argus.capture.placement import Placement
from argus.capture.probes import Probes
from argus.capture.probing.patience import Patience
from argus.capture.process.mapped import Allowance
from argus.capture.process.names import KernelNames
from argus.capture.process.pytorch import LAYOUTS
from argus.capture.process.targets import Identity, Libraries, Target, find_libraries
from argus.capture.sampler import StackProbes
from argus.live import job as live_job
from argus.live import roster as live_roster
from argus.live import session as live_session
from argus.live.cost import admission
from argus.live.cost.budget import BudgetSide
from argus.live.cost.neighbours import PATIENCE_S, Neighbours, Spent
from argus.live.options import Options
from argus.live.preflight import own_library
from argus.live.roster import Roster, _Candidate
from argus.live.session_rows import SessionRows
from argus.live.sides import calls as live_calls
from argus.live.tracer import Tracer
from argus.model import records
from argus.model.calls import Layer
from argus.model.errors import ArgusError
from argus.model.losses import UNKNOWN
from argus.model.records import Counter, StackCounter
from argus.semantics.steps.marks import Marks
from argus.semantics.steps.range_names import Meaning, Role, meaning_of
from argus.store.open import open_store
from argus.store.reader import query
from argus.store.schema_files import table_columns
from argus.system.proc import container_of
from tests.builders.sessions import Rows, a_session
from tests.kernel.conftest import poll_until, wait_for_cuda, wait_until
from tests.stores import new_store

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fakegpu"))

NOBODY = 65534
AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--inh-caps=-all")
BUDGET = 0.01
HIT_NS = 1500.0


# ---- who is ignored (argus/live/cost/neighbours.py)


def spent(owner: str, rate: float, *, job: str = "", refused: int = 0, elapsed_s: float = 0.5) -> Spent:
    hits = round(rate * elapsed_s)
    return Spent(job or owner, owner, hits, hits * HIT_NS, refused, elapsed_s, elapsed_s)


def looks(neighbours: Neighbours, processes: dict[int, Spent], seconds: float) -> dict[int, str]:
    found: dict[int, str] = {}
    elapsed_s = next(iter(processes.values())).elapsed_s
    for _ in range(round(seconds / elapsed_s)):
        found |= neighbours.look({pid: one for pid, one in processes.items() if pid not in found})
    return found


def test_who_floods_is_ignored_and_nobody_else() -> None:
    neighbours = Neighbours(budget=1e6)
    processes = {1: spent("a", 400_000, job="flood"), 2: spent("a", 50_000, job="train"), 3: spent("b", 90_000)}
    assert looks(neighbours, processes, 5).keys() == {1}


def test_a_burst_is_no_flood() -> None:
    neighbours = Neighbours(budget=1e6)
    assert not looks(neighbours, {1: spent("a", 250_000), 2: spent("b", 100)}, 0.5)
    assert not looks(neighbours, {1: spent("a", 20_000), 2: spent("b", 100)}, 60)


def test_a_job_alone_is_never_ignored() -> None:
    assert not looks(Neighbours(BUDGET), {1: spent("a", 400_000), 2: spent("a", 400_000)}, 60)


def test_an_owner_takes_no_observation_from_another() -> None:
    """90,000 calls a second are no flood, and cost 13 % of the process's time."""
    neighbours = Neighbours(BUDGET)
    processes = {1: spent("a", 90_000), 2: spent("b", 1_000), 3: spent("b", 1_000)}
    assert not neighbours.look(processes)
    assert neighbours.suspects  # until then the governor changes nothing for it
    assert looks(neighbours, processes, PATIENCE_S).keys() == {1}
    assert not neighbours.look({2: processes[2], 3: processes[3]})
    assert not neighbours.suspects


def test_who_idles_has_nobody_ignored() -> None:
    """A notebook that has loaded PyTorch, beside a job that makes many calls: that one is seen in windows."""
    neighbours = Neighbours(BUDGET)
    assert not looks(neighbours, {1: spent("a", 90_000), 2: spent("b", 4), 3: spent("b", 0)}, 60)
    assert not neighbours.suspects


def test_calls_cost_what_the_files_of_their_process_say() -> None:
    """90,000 dear calls a second: as many cheap ones of another are not above the budget."""
    neighbours = Neighbours(BUDGET)
    processes = {1: spent("a", 9_000), 2: replace(spent("b", 9_000), cost_ns=9_000 * 0.5 * 1_000)}
    assert looks(neighbours, processes, PATIENCE_S + 0.5).keys() == {1}


def test_prices_are_of_those_who_call_and_are_counted() -> None:
    """Neither an idle process, nor one whose calls are ignored, makes those of others dear."""
    tables = {pid: CallPrices(*np.full((3, 256), ns)) for pid, ns in ((1, 9_000.0), (2, 1_000.0), (3, 90_000.0))}
    hits = {1: 0, 2: 500, 3: 10**6}
    roster = SimpleNamespace(
        by_pid={pid: (None, SimpleNamespace(pid=pid, ignored="it floods" if pid == 3 else "")) for pid in tables},
        attachments_of=lambda member: [member.pid],
    )
    probes = SimpleNamespace(prices_of=lambda files: tables[files[0]])
    side = BudgetSide.__new__(BudgetSide)
    side._session, side._hits = SimpleNamespace(roster=roster, probes=probes), {}  # type: ignore[assignment]

    def prices() -> set[float]:
        return set(side._prices({pid: (number, 0, 0) for pid, number in hits.items()}).now)

    assert prices() == {1_000.0}
    hits[1] = 1_000
    assert prices() == {9_000.0}, "since the last time it alone has called"


def test_time_without_a_cpu_hides_nothing() -> None:
    starved = replace(spent("a", 4_000), ran_s=0.02)
    assert looks(Neighbours(BUDGET), {1: starved, 2: spent("b", 1_000)}, PATIENCE_S + 0.5).keys() == {1}


def test_within_one_owner_s_jobs_the_governor_decides() -> None:
    neighbours = Neighbours(BUDGET)
    processes = {1: spent("a", 90_000, job="one"), 2: spent("a", 1_000, job="other")}
    assert not looks(neighbours, processes, 60)
    assert not neighbours.suspects


def test_all_above_the_budget_is_the_governor_s_too() -> None:
    neighbours = Neighbours(BUDGET)
    assert not looks(neighbours, {1: spent("a", 90_000), 2: spent("b", 20_000)}, 60)
    assert not neighbours.suspects


def test_refused_records_at_two_looks_are_a_flood() -> None:
    neighbours = Neighbours(budget=1e6)
    processes = {1: spent("a", 1, refused=1), 2: spent("b", 1)}
    assert not neighbours.look(processes)
    assert neighbours.look(processes).keys() == {1}


# ---- one job or two (argus/live/roster.py)


def rank(pid: int, number: int, owner: tuple[int, str]) -> Target:
    identity = Identity(number, 4, -1, "llama", "torchrun", "node0/29500", *owner)
    target: Any = SimpleNamespace(pid=pid, identity=identity, alive=lambda: True, close=lambda: None)
    return target  # type: ignore[no-any-return]


def placed(*ranks: Target, job: str | None = None) -> list[str]:
    probes: Any = SimpleNamespace(remove_target=lambda pid: None)
    session = a_session(job=job, run=1)
    session.probes = probes
    roster = Roster(session, KernelNames())
    return [roster._adopt(each)[0].name for each in ranks]


def test_users_are_distinguished_whatever_their_environments_say() -> None:
    ranks = rank(1 << 22, 0, (1000, "")), rank(1 + (1 << 22), 3, (NOBODY, "")), rank(2 + (1 << 22), 1, (1000, ""))
    assert placed(*ranks) == ["llama", "llama#uid65534", "llama"]
    assert placed(*ranks, job="mine") == ["mine", "mine#uid65534", "mine"]


def ranks_of(*owners: tuple[int, str], first: int = 1 << 22) -> list[Target]:
    """A rank of each, in the order in which they start, numbered for each of the users."""
    seen: Tally[int] = Tally()
    ranks = []
    for place, owner in enumerate(owners):
        ranks.append(rank(first + place, seen[owner[0]], owner))
        seen[owner[0]] += 1
    return ranks


@pytest.mark.parametrize("job", [None, "mine"])
def test_a_name_that_is_held_becomes_the_same_on_all_nodes_and_in_all_runs(job: str | None) -> None:
    """Whoever comes first has the name. What the others' jobs are called does not depend on who came when."""
    a, b, c = (1000, ""), (NOBODY, ""), (1001, "")
    wanted = job or "llama"
    first, second = placed(*ranks_of(b, c, a, a), job=job), placed(*ranks_of(b, a, c, a), job=job)
    assert first == [wanted, f"{wanted}#uid1001", f"{wanted}#uid1000", f"{wanted}#uid1000"]
    assert second == [wanted, f"{wanted}#uid1000", f"{wanted}#uid1001", f"{wanted}#uid1000"]


def test_whose_the_name_of_a_job_is_is_noted_once() -> None:
    session = a_session(run=1)
    session.probes = SimpleNamespace(remove_target=lambda pid: None)  # type: ignore[assignment]
    roster = Roster(session, KernelNames())
    for each in ranks_of((NOBODY, ""), (1000, ""), (1000, ""), (1000, "")):
        roster._adopt(each)
    said = [note for note in session.notes if "has the name" in note]
    assert said == ["a job of uid 65534 has the name llama: ranks of uid 1000 are stored as llama#uid1000"]


def test_who_calls_a_job_what_another_one_would_be_called_gets_no_ranks_of_it() -> None:
    squatter = rank(1 << 22, 0, (NOBODY, ""))
    squatter.identity = replace(squatter.identity, job="llama#uid1000")  # type: ignore[misc]
    theirs = ranks_of((1000, ""), (1000, ""), first=2 + (1 << 22))
    assert placed(squatter, *theirs) == ["llama#uid1000", "llama", "llama"]
    both = ranks_of((NOBODY, ""), (1000, ""), (1000, ""), first=2 + (1 << 22))
    assert placed(squatter, *both) == ["llama#uid1000", "llama", *["llama#uid1000#2"] * 2]


def test_ranks_join_their_job_also_once_the_name_is_free() -> None:
    session = a_session(run=1)
    session.probes = SimpleNamespace(remove_target=lambda pid: None)  # type: ignore[assignment]
    roster = Roster(session, KernelNames())
    other, first, second, third = ranks_of((NOBODY, ""), (1000, ""), (1000, ""), (1000, ""))
    jobs = [roster._adopt(each)[0] for each in (other, first)]
    del roster._current["llama"]  # as take_over does
    assert roster._adopt(second)[0] is jobs[1]
    del roster._current["llama#uid1000"]
    again, _ = roster._adopt(third)
    assert again.name == "llama#uid1000", "rows of the other user's are under the name"
    assert again.run > 1, "and rows of its own are there"


def test_jobs_are_distinguished_as_by_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the names of other users' jobs differ, and of one user's none does."""

    def numbered(wanted: str, *_: object) -> Iterator[str]:
        return (wanted if number == 1 else f"{wanted}#{number}" for number in itertools.count(1))

    random = Random(11)
    for turn in range(200):
        users, job = [1000] if turn % 2 else [1000, 1001, NOBODY], random.choice([None, "mine"])
        targets = []
        for place in range(random.randint(1, 12)):
            owner = random.choice(users), random.choice(["", "", "pod a", "pod b"])
            target = rank(place + (1 << 22), random.randint(-1, 3), owner)
            lineage, called = random.choice(["node0/29500", "node0/29501"]), random.choice(["llama", "llama", "gpt"])
            target.identity = replace(target.identity, lineage=lineage, job=called)  # type: ignore[misc]
            target.alive = random.choice([lambda: True, lambda: True, lambda: False])  # type: ignore[method-assign]
            targets.append(target)
        found = placed(*targets, job=job)
        with monkeypatch.context() as patch:
            patch.setattr(live_roster, "_names", numbered)
            expected = placed(*targets, job=job)
        assert len(set(zip(found, expected, strict=True))) == len(set(found)) == len(set(expected))
        if len(users) == 1:
            assert found == expected


def test_a_name_that_was_given_is_that_of_ranks_with_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of another user's process beside them, whatever its number."""
    targets = [
        rank(1 << 22, -1, (NOBODY, "")),
        *(rank(1 + number + (1 << 22), number, (1000, "")) for number in (0, 1)),
    ]
    session = a_session(job="llama", run=7)
    session.probes = SimpleNamespace(remove_target=lambda pid: None)  # type: ignore[assignment]
    roster = Roster(session, KernelNames())
    by_pid = {target.pid: target for target in targets}
    for target in targets:
        target.libraries, target.on_gpu = [], True  # type: ignore[misc]
    monkeypatch.setattr("argus.live.roster.inspect", lambda pid, wait: by_pid[pid])
    monkeypatch.setattr("argus.live.roster.find_libraries", lambda pid: [])
    monkeypatch.setattr(roster.family, "includes", lambda pid: True)
    monkeypatch.setattr(roster, "_attach", lambda running: None)
    assert roster.adopt_callers(set(by_pid))
    names = {pid: (job.name, member.rank) for pid, (job, member) in roster.by_pid.items()}
    assert [names[target.pid] for target in targets] == [("llama#uid65534", 0), ("llama", 0), ("llama", 1)]


def test_a_name_that_was_given_is_that_of_the_user_with_most_ranks() -> None:
    """It is on each node, whoever's processes are older there: else a job's ranks would have two names."""
    a, b = (1000, ""), (1001, "")
    for users in ((b, a, a, a), (a, b, a, a), (a, a, b, a), (b, a), (a, b)):
        targets = ranks_of(*users)
        found = live_roster._in_order(targets, named=True)
        names = placed(*found, job="mine")
        assert {each.identity.owner: name for each, name in zip(found, names, strict=True)} == {
            a: "mine",
            b: "mine#uid1001",
        }
        assert live_roster._in_order(targets, named=False) == targets
    alone = [rank(place + (1 << 22), number, a) for place, number in enumerate((2, -1, 0, 1, -1))]
    for given in (True, False):
        assert [each.pid - (1 << 22) for each in live_roster._in_order(alone, named=given)] == [0, 2, 3, 1, 4]


def test_containers_are_distinguished_unless_the_job_is_named() -> None:
    ranks = rank(1 << 22, 0, (0, "pod a")), rank(1 + (1 << 22), 1, (0, "pod b"))
    assert placed(*ranks) == ["llama", "llama#2"]
    assert placed(*ranks, job="llama") == ["llama", "llama"]


def test_a_container_that_starts_again_is_the_same_job() -> None:
    first, second = rank(1 << 22, 0, (0, "pid:[1]")), rank(1 + (1 << 22), 0, (0, "pid:[2]"))
    first.alive = lambda: False  # type: ignore[method-assign]
    assert placed(first, second) == ["llama", "llama"]


@pytest.mark.parametrize(
    ("cgroup", "expected"),
    [
        ("0::/kubepods.slice/kubepods-pod0f3a1c52_9f6e_4a53_8d1c_3b2f7f0c9a11.slice/cri-containerd-ab.scope\n",
         "pod 0f3a1c52-9f6e-4a53-8d1c-3b2f7f0c9a11"),
        ("12:memory:/slurm/uid_1000/job_42/step_0/task_1\n", "slurm 42"),
        ("0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0\n", "slurm 42"),
        ("0::/user.slice/user-1000.slice/job_42\n", ""),
    ],
)  # fmt: skip
def test_what_a_process_runs_in(cgroup: str, expected: str) -> None:
    assert container_of(os.getpid(), cgroup) == expected


# ---- in the kernel


@contextlib.contextmanager
def running(*command: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


CALLER = "import ctypes, sys\nlibc = ctypes.CDLL(None)\nprint(flush=True)\nfor n in sys.stdin:\n"
CALLER += "    [libc.getppid() for _ in range(int(n))]\n    print(flush=True)\n"


def call(process: subprocess.Popen[bytes], times: int) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"%d\n" % times)
    process.stdin.flush()
    assert process.stdout.readline() == b"\n"


FUNCTION = (
    'asm(".globl cuLaunchKernel\\n.type cuLaunchKernel,@function\\ncuLaunchKernel:\\n{}\\nret\\n'
    '.size cuLaunchKernel,.-cuLaunchKernel\\n");'
)
"""A driver of one function, whose code is single-stepped, or not."""


@pytest.mark.kernel
def test_a_process_pays_the_prices_of_the_files_that_it_maps(tmp_path: Path) -> None:
    """A file of one process that is dear to probe makes no other one's calls dear."""
    processes, attached = [], []
    with contextlib.ExitStack() as stack:
        for name, code in (("dear", "xor %eax,%eax"), ("cheap", "push %rbp\\npop %rbp\\nxor %eax,%eax")):
            source, library = tmp_path / f"{name}.c", tmp_path / name / "libcuda.so.1"
            library.parent.mkdir()
            source.write_text(FUNCTION.format(code))
            subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
            script = f"import ctypes, sys\nf = ctypes.CDLL('{library}').cuLaunchKernel\nprint(flush=True)\n"
            script += "for line in sys.stdin: [f(0) for _ in range(int(line))]; print(flush=True)"
            process = stack.enter_context(running("/usr/bin/python3", "-c", script))
            assert process.stdout is not None
            process.stdout.readline()
            processes.append(process)
        probes = Probes()
        stack.callback(probes.close)
        for process in processes:
            probes.add_target(process.pid)
            (library,) = find_libraries(process.pid)
            attached.append(probes.attach(library, None))
        for process, calls in zip(processes, (100, 3000), strict=True):
            call(process, calls)
        (launch,) = attached[0].prices
        dear, cheap = (each.prices[launch] for each in attached)
        assert dear > 1.5 * cheap
        assert [probes.spent(process.pid)[::2] for process in processes] == [(100, 100 * dear), (3000, 3000 * cheap)]
        assert probes.spent_of_all() == {process.pid: probes.spent(process.pid) for process in processes}
        dears, cheaps = (probes.prices_of([each]) for each in attached)
        assert CallPrices.mean([(dears, 0), (cheaps, 3000)]).now[launch] == cheap, "who does not call has no say"
        assert CallPrices.mean([(dears, 3000), (cheaps, 3000)]).now[launch] == pytest.approx((dear + cheap) / 2)
        nothing = CallPrices(*np.zeros((3, 256)))
        assert CallPrices.mean([(nothing, 9000), (cheaps, 1)]).whole[launch] == cheap, "it has no such function"


@pytest.mark.kernel
def test_no_process_fills_a_ring_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads the ring meanwhile, so that what is in it at the end is all that was written."""
    monkeypatch.setattr(bpf, "RECORDS_S", 100)
    library, _ = own_library("getppid")
    with contextlib.ExitStack() as stack:
        flood, honest = (stack.enter_context(running("/usr/bin/python3", "-c", CALLER)) for _ in range(2))
        for process in (flood, honest):
            assert process.stdout is not None
            process.stdout.readline()
        probes = Probes(launch_ring_bytes=1 << 20)
        stack.callback(probes.close)
        for process in (flood, honest):
            probes.add_target(process.pid)
        probes.attach(library, None)
        call(flood, 40_000)
        call(honest, 1009)
        call(flood, 10_007)
        call(honest, 1009)
        seen = probes.launches.drain()
        counters = probes.counters()
        hits, refused, _ = probes.spent(flood.pid)
        assert counters[Counter.LAUNCHES_DROPPED] == 0
        assert int((seen["pid"] == honest.pid).sum()) == 2018
        assert probes.spent(honest.pid)[:2] == (2018, 0)
        assert hits == 50_007
        assert refused == counters[Counter.RECORDS_OVER_BUDGET] == hits - int((seen["pid"] == flood.pid).sum())
        assert refused > 30_000
        # Read in time, it loses nothing: it is above its budget, and the ring is empty.
        call(flood, 1009)
        assert int((probes.launches.drain()["pid"] == flood.pid).sum()) == 1009
        # Ignored, it leaves no record, and its hits are counted.
        before = probes.counters()[Counter.HITS_IGNORED]
        probes.ignore(flood.pid)
        call(flood, 1009)
        call(honest, 101)
        assert set(probes.launches.drain()["pid"].tolist()) == {honest.pid}
        assert probes.spent(flood.pid)[0] == 52_025
        # Other programs of this machine may call it, too.
        assert probes.counters()[Counter.HITS_IGNORED] >= before + 1009


@pytest.mark.kernel
def test_no_program_that_may_be_preempted_works_in_memory_of_the_cpu() -> None:
    """Another task on that CPU would overwrite it. Counters are added to in one instruction. Programs that take stacks
    run with interrupts off (a timer's, and the scheduler's tracepoints): none of them interrupts another."""
    found = []
    for probes in (Probes(), StackProbes(rate_hz=97, off_cpu_ns=1_000_000)):
        try:
            found.append({name for name, each in probes._module._maps.items() if each.spec.kind in (5, 6, 10)})
        finally:
            probes.close()
    assert found == [{"counters", "hits_of"}, {"scratches", "stack_counters"}]


THREADS = "import sys, threading, time\nstop = threading.Event()\n"
THREADS += "many = [threading.Thread(target=lambda: [time.sleep(0.002) for _ in iter(stop.is_set, True)])"
THREADS += (
    " for _ in range(int(sys.argv[1]))]\n[each.start() for each in many]\nprint(flush=True)\ninput()\nstop.set()\n"
)
THREADS += "[each.join() for each in many]\nprint(flush=True)\ninput()\n"


@pytest.mark.kernel
def test_nobody_can_make_a_stack_with_the_number_of_another_s() -> None:
    """Its number is a hash that can be inverted: what it begins with is drawn by chance, and drawn again at an exec."""
    drawn = []
    with running("/usr/bin/python3", "-c", "import os; print(flush=True); input(); os.execl('/bin/cat', 'cat')") as one:
        assert one.stdin is not None
        for again in range(2):
            probes = StackProbes(rate_hz=97, off_cpu_ns=1_000_000)
            try:
                probes.add_target(one.pid)
                drawn.append(probes._target(one.pid)[-1])
                if again:
                    one.stdin.write(b"\n")
                    one.stdin.flush()
                    wait_until(lambda: probes._target(one.pid)[-1] != drawn[-1], what="the exec")  # noqa: B023
                    drawn.append(probes._target(one.pid)[-1])
            finally:
                probes.close()
    for number, space in enumerate(drawn):
        others = drawn[:number] + drawn[number + 1 :]
        assert all(bin(space ^ other).count("1") > 8 for other in others), "of 64 bits some 32 differ"
        assert bin(space ^ (1 << 32 | one.pid)).count("1") > 8


@pytest.mark.kernel
def test_no_process_takes_the_room_for_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "THREADS_EACH", 8)
    with (
        running("/usr/bin/python3", "-c", THREADS, "40") as many,
        running("/usr/bin/python3", "-c", THREADS, "3") as few,
    ):
        for process in (many, few):
            assert process.stdout is not None
            process.stdout.readline()
        probes = StackProbes(rate_hz=97, off_cpu_ns=1_000_000)
        try:

            def followed(pid: int) -> int:
                rows = probes._thread_rows()
                return int((rows["pid"] == pid).sum())

            for process in (many, few):
                probes.add_target(process.pid)
            wait_until(lambda: followed(few.pid) >= 3 and probes.over_share(many.pid) > 0, 60, "both to be followed")
            assert followed(many.pid) == 8
            assert probes.over_share(few.pid) == 0
            refused = probes.over_share(many.pid)  # before the sum is read: both go on
            counters = probes.counters()
            assert counters[StackCounter.THREADS_OVER_SHARE] >= refused > 0
            assert counters[StackCounter.THREADS_FULL] == 0
            # Threads that end make room for others.
            assert many.stdin is not None
            many.stdin.write(b"\n")
            many.stdin.flush()
            wait_until(lambda: followed(many.pid) <= 1, 60, "its threads to end")
            value = probes._module["stack_targets"].get(many.pid)
            assert value is not None
            assert int.from_bytes(value[8:12], sys.byteorder) == followed(many.pid)
        finally:
            probes.close()


@pytest.mark.kernel
@pytest.mark.parametrize("owners", [2, 1])
def test_no_owner_takes_the_room_for_all_threads(monkeypatch: pytest.MonkeyPatch, owners: int) -> None:
    """However many processes it has, and also if it comes first: an eighth is kept for others."""
    monkeypatch.setattr(sampler, "THREAD_ENTRIES", 96)
    with contextlib.ExitStack() as stack:
        hostile = [stack.enter_context(running("/usr/bin/python3", "-c", THREADS, "40")) for _ in range(4)]
        honest = stack.enter_context(running("/usr/bin/python3", "-c", THREADS, "8"))
        for process in (*hostile, honest):
            assert process.stdout is not None
            process.stdout.readline()
        probes = StackProbes(rate_hz=97, off_cpu_ns=1_000_000)
        stack.callback(probes.close)

        def followed(*processes: subprocess.Popen[str]) -> int:
            return int(np.isin(probes._thread_rows()["pid"], [process.pid for process in processes]).sum())

        if owners == 2:  # known before there is little room
            probes.add_target(honest.pid, (1001, ""))
        for process in hostile:
            probes.add_target(process.pid, (1000, ""))
        if owners == 1:
            wait_until(lambda: followed(*hostile) == 84, 60, "all of the room to be taken, but an eighth")
            probes.add_target(honest.pid, (1001, ""))
            wait_until(lambda: followed(honest) >= 5, 60, "another's threads to be followed")
            assert followed(*hostile) == 84
            return
        wait_until(lambda: followed(honest) >= 8 and sum(map(probes.over_share, map(pid_of, hostile))) > 0, 60, "both")
        assert 40 <= followed(*hostile) <= 48, "half of it, and one remains free"
        assert probes.over_share(honest.pid) == 0
        assert probes.counters()[StackCounter.THREADS_FULL] == 0
        # Those of a process that is forgotten make room for the others of its owner.
        before = {process.pid: followed(process) for process in hostile}
        largest = max(hostile, key=lambda process: before[process.pid])
        probes.remove_target(largest.pid)
        hostile.remove(largest)
        wait_until(lambda: followed(*hostile) >= 40, 60, "the others to have its room")
        assert followed(*hostile) <= 48


def pid_of(process: subprocess.Popen[str]) -> int:
    return process.pid


def callers(stack: contextlib.ExitStack, number: int) -> list[subprocess.Popen[bytes]]:
    """Processes that wait to be told how often to call."""
    found = [stack.enter_context(running("/usr/bin/python3", "-c", CALLER)) for _ in range(number)]
    for process in found:
        assert process.stdout is not None
        process.stdout.readline()
    return found


@pytest.mark.kernel
@pytest.mark.parametrize("shared", [True, False])
def test_no_owner_fills_a_ring_for_the_others(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five processes that each write what one may. Nobody reads the ring meanwhile."""
    monkeypatch.setattr(bpf, "RECORDS_S", 100)
    library, _ = own_library("getppid")
    with contextlib.ExitStack() as stack:
        *flood, honest = callers(stack, 6)
        probes = Probes(launch_ring_bytes=1 << 18)
        stack.callback(probes.close)
        for process in flood:
            probes.add_target(process.pid, (1000, ""))
        if shared:
            probes.add_target(honest.pid, (1000, "pod"))
        probes.attach(library, None)
        for process in flood:
            call(process, 5000)
        call(honest, 500)
        seen = probes.launches.drain()
        of_flood = [int((seen["pid"] == process.pid).sum()) for process in flood]
        room = (1 << 18) / (records.LAUNCH.itemsize + HEADER_BYTES)
        counters = probes.counters()
        if not shared:  # one owner has all
            assert sum(of_flood) >= 0.98 * room
            assert counters[Counter.RECORDS_OVER_SHARE] == 0
            return
        assert (seen["pid"] == honest.pid).sum() == 500
        assert 0.48 * room <= sum(of_flood) <= 0.51 * room
        assert counters[Counter.LAUNCHES_DROPPED] == 0
        refused = [probes.over_share(process.pid)[2] for process in flood]
        assert counters[Counter.RECORDS_OVER_SHARE] == sum(refused) > 0
        assert probes.over_share(honest.pid)[2] == 0
        lost = sum(refused) + sum(probes.spent(process.pid)[1] for process in flood)
        assert sum(of_flood) + lost == 5 * 5000
        # All was read, so that there is room again.
        call(flood[-1], 200)
        call(honest, 200)
        assert len(probes.launches.drain()) == 400


@pytest.mark.kernel
@pytest.mark.parametrize("other", [True, False])
def test_a_user_with_many_containers_leaves_a_part_of_a_ring_to_others(
    other: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the user's 16 containers has a share of the ring: they would leave one part in 17."""
    monkeypatch.setattr(bpf, "RECORDS_S", 100)
    library, _ = own_library("getppid")
    with contextlib.ExitStack() as stack:
        *flood, honest = callers(stack, 17)
        probes = Probes(launch_ring_bytes=1 << 18)
        stack.callback(probes.close)
        for number, process in enumerate(flood):
            probes.add_target(process.pid, (1000, f"pod {number}"))
        probes.add_target(honest.pid, (1001 if other else 1000, "pod"))
        probes.attach(library, None)
        for process in flood:
            call(process, 4000)
        room = (1 << 18) / (records.LAUNCH.itemsize + HEADER_BYTES)
        call(honest, int(room / 2 / 9) - 4)  # half of what is free: then it has as much as remains
        seen = probes.launches.drain()
        of_honest = int((seen["pid"] == honest.pid).sum())
        of_flood = len(seen) - of_honest
        if other:
            assert of_honest == int(room / 2 / 9) - 4
            assert room * (8 / 9 - 0.01) <= of_flood <= room * (8 / 9 + 0.01)
        else:  # there is nobody to whom he leaves it
            assert of_flood >= room * (16 / 17 - 0.01)
        assert probes.counters()[Counter.LAUNCHES_DROPPED] == 0


@pytest.mark.kernel
def test_a_user_for_whom_there_is_no_room_takes_nothing_from_unknown_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bpf, "RECORDS_S", 100)
    monkeypatch.setattr(owners, "OWNERS", 4)
    library, _ = own_library("getppid")
    with contextlib.ExitStack() as stack:
        first, *flood, unknown = callers(stack, 6)
        probes = Probes(launch_ring_bytes=1 << 18)
        stack.callback(probes.close)
        probes.add_target(first.pid, (1000, ""))
        for process in flood:
            probes.add_target(process.pid, (1001, ""))  # the last number is its owner's
        probes.add_target(unknown.pid)
        probes.attach(library, None)
        for process in flood:
            call(process, 5000)
        call(unknown, 400)
        assert int((probes.launches.drain()["pid"] == unknown.pid).sum()) == 400


def test_owners_are_numbered_and_those_that_left_forgotten() -> None:
    published: dict[int, int] = {}
    there = SimpleNamespace(get=lambda number: bytes(records.OWNER.itemsize))
    module: Any = {"owners_traced": SimpleNamespace(set=published.__setitem__), "owners": there}
    made = owners.Owners(module)
    assert [made.add(1, (7, "")), made.add(2, (7, ""))] == [(1, 2), (1, 2)]
    assert published == {0: 1, 1: 1}
    assert [made.add(3, (7, "pod")), made.add(4, (8, ""))] == [(3, 2), (4, 5)]
    assert published == {0: 3, 1: 2}
    for pid in (1, 2, 2):
        made.remove(pid)
    assert published == {0: 2, 1: 2}
    assert made.add(5, (7, "new")) == (1, 2)  # that of the one that left
    assert made.add(6, (-1, "")) == (0, 0)
    for pid in (3, 4, 5, 6):
        made.remove(pid)
    assert published == {0: 0, 1: 0}
    # Room is made with one number of two given.
    numbers = [made.add(100 + uid, (100 + uid, "")) for uid in range(owners.OWNERS)]
    given = [number for both in numbers for number in both if number]
    assert sorted(given) == list(range(1, owners.OWNERS))
    assert numbers[-1] == (0, 0)


def test_a_user_in_many_containers_leaves_numbers_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "OWNERS", 256)
    monkeypatch.setattr(owners, "CONTAINERS", 32)
    lost = np.zeros(1, records.OWNER)
    lost["lost"][0, Counter.READ_FAULT] = 1
    there = SimpleNamespace(get=lambda number: lost.tobytes())
    module: Any = {"owners_traced": SimpleNamespace(set=lambda *_: None), "owners": there}
    made = owners.Owners(module)
    (_, user), *others = [made.add(pid, (NOBODY, f"pid:[{pid}]")) for pid in range(3 * owners.OWNERS)]
    shared = others[-1][0]
    assert {numbers[1] for numbers in others} == {user}
    assert [numbers[0] for numbers in others].count(shared) == len(others) + 1 - owners.CONTAINERS
    honest = made.add(1 << 22, (1000, ""))
    assert 0 not in honest
    assert not {user, shared, *(numbers[0] for numbers in others)}.intersection(honest)
    assert (NOBODY, f"pid:[{owners.OWNERS}]") in made.there()
    # What is lost of those that share a number concerns all jobs of their user.
    losses = [owner for owner, _, _ in made.take_losses()]
    assert {(1000, ""), (NOBODY, "*"), (NOBODY, "pid:[0]")} <= set(losses)
    assert len(losses) == owners.CONTAINERS + 3
    # Nor do several such users leave none.
    for uid in range(2000, 2040):
        for number in range(40):
            made.add((1 << 23) + uid * 40 + number, (uid, f"pid:[{number}]"))
    assert 0 not in made.add((1 << 22) + 1, (1001, ""))
    # Numbers of processes that have gone are given again.
    for pid in range(3 * owners.OWNERS):
        made.remove(pid)
    assert not {number for number, _ in made._of.values()} & {shared}
    assert made.add(7, (NOBODY, "pid:[new]"))[0] not in (0, made.add(8, (NOBODY, "pid:[newer]"))[0])


def test_owners_of_threads_are_forgotten_with_their_processes() -> None:
    counted: dict[int, int] = {}
    there: dict[int, int] = {}
    module: Any = {
        "owner_threads": SimpleNamespace(set=counted.__setitem__),
        "thread_owners": SimpleNamespace(set=there.__setitem__),
        "owner_uses": SimpleNamespace(get=lambda number: None),
        "owners_resting": SimpleNamespace(set=lambda number, resting: None),
    }
    made = owners.ThreadOwners(module)
    assert [made.add(1, (7, "")), made.add(2, (7, "")), made.add(3, (7, "pod"))] == [1, 1, 2]
    assert [made.add(1, (7, "")), made.add(4, UNKNOWN)] == [1, 0]
    assert there == {0: 2}
    made.remove(1, np.array([1, 2, 2, 0], np.uint32))
    assert (counted, there) == ({0: 4, 1: 1, 2: 2}, {0: 2})
    made.remove(2, np.array([2, 0], np.uint32))
    assert (counted, there) == ({0: 2, 1: 0, 2: 1}, {0: 1})
    made.remove(4, np.array([], np.uint32))
    assert made.add(5, (8, "")) == 1, "that of the one that left"
    for pid in (3, 5, 5):
        made.remove(pid, np.array([], np.uint32))
    assert there == {0: 0}
    assert [made.add(100 + uid, (100 + uid, "")) for uid in range(owners.OWNERS)] == [*range(1, owners.OWNERS), 0]
    assert not made._of.keys() & {1, 2, 3, 4, 5}


def test_a_user_in_many_containers_leaves_numbers_for_stacks_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "OWNERS", 256)
    monkeypatch.setattr(owners, "CONTAINERS", 32)
    resting: dict[int, int] = {}
    uses = np.zeros(owners.OWNERS, owners._USE)
    module: Any = {
        "owner_threads": SimpleNamespace(set=lambda *_: None),
        "thread_owners": SimpleNamespace(set=lambda *_: None),
        "owner_uses": SimpleNamespace(get=lambda number: uses[number].tobytes()),
        "owners_resting": SimpleNamespace(set=resting.__setitem__),
    }
    made = owners.ThreadOwners(module)
    numbers = [made.add(pid, (NOBODY, f"pid:[{pid}]")) for pid in range(3 * owners.OWNERS)]
    shared = numbers[-1]
    assert numbers.count(shared) == len(numbers) - owners.CONTAINERS
    assert made.add(len(numbers), (NOBODY, "pid:[40]")) == shared
    honest = made.add(1 << 22, (1000, ""))
    assert honest not in (0, *numbers)
    assert made.add((1 << 22) + 1, (NOBODY, "pid:[new]")) == shared
    # What the shared number's threads cost is nobody else's.
    uses["switched_ns"][[honest, shared]] = 7, 9
    assert made.times()[1000, ""] == (0, 7)
    assert made.times()[NOBODY, "*"] == (0, 9)
    uses["refused"][shared] = 3
    assert made.take_refused() == {((NOBODY, "*"), "stack_samples_over_share"): 3}
    made.rest((1000, ""), on=True)
    assert [resting[honest], resting[shared]] == [1, 0]
    for container, on in (("50", True), ("51", True), ("50", False)):
        made.rest((NOBODY, f"pid:[{container}]"), on=on)
        assert resting[shared] == 1
    left = np.array([], np.uint32)
    made.remove(51, left)
    assert resting[shared] == 0
    # Nor do several such users leave none.
    for uid in range(2000, 2040):
        for number in range(40):
            made.add((1 << 23) + uid * 40 + number, (uid, f"pid:[{number}]"))
    assert made.add((1 << 22) + 2, (1001, ""))
    for pid in range(len(numbers) + 1):
        made.remove(pid, left)
    assert made._counted_as[NOBODY, "pid:[new]"] == (NOBODY, "*")
    made.remove((1 << 22) + 1, left)
    assert NOBODY not in {uid for uid, _ in (*made._counted_as, *made._numbers)}


def test_the_kernel_hears_of_owners_in_their_order() -> None:
    """Forks are noticed on a thread of their own: what it publishes last is what there is."""
    published: list[int] = []
    threads: list[threading.Thread] = []

    def publish(place: int, number: int) -> None:
        if place:
            return  # of users
        if not threads:
            threads.append(threading.Thread(target=made.add, args=(2, (8, ""))))
            threads[0].start()
            threads[0].join(0.2)  # without a lock it is through by then
        published.append(number)

    made = owners.Owners({"owners_traced": SimpleNamespace(set=publish)})  # type: ignore[arg-type]
    made.add(1, (7, ""))
    threads[0].join(10)
    assert published == [1, 2]


CALLS = "import ctypes, sys\nlib = ctypes.CDLL(sys.argv[1])\nprint(flush=True)\n"
CALLS += "for line in sys.stdin:\n    print(eval(line), flush=True)\n"
"""Evaluates calls of stuck_target.c."""


@pytest.fixture(scope="module")
def stuck_library() -> Iterator[str]:
    source = Path(__file__).with_name("stuck_target.c")
    flags = ("-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # pytest's are for root alone
        library = f"{folder}/libnccl.so.2"
        subprocess.run(["gcc", *flags, "-o", library, source, "-lpthread"], check=True)
        yield library


class Callers:
    """Processes that call what is in stuck_target.c, with probes on it."""

    def __init__(self, stack: contextlib.ExitStack, library: str, *before: tuple[str, ...]) -> None:
        self._of = [
            stack.enter_context(running(*each, "/usr/bin/python3", "-c", CALLS, library, bufsize=0)) for each in before
        ]
        for process in self._of:
            assert process.stdout is not None
            process.stdout.readline()
        self.pids = [process.pid for process in self._of]
        self.probes = Probes(launch_ring_bytes=1 << 20)
        stack.callback(self.probes.close)
        for which, pid in enumerate(self.pids):
            self.probes.add_target(pid, (1000 + which, ""))
        (found,) = (each for each in find_libraries(self.pids[0], Allowance(100, 1)) if each.path == library)
        self.probes.attach(found, None)
        self.probes.attach_optional("math")

    def call(self, which: int, what: str) -> int:
        process = self._of[which]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"lib.{what}\n".encode())
        return int(process.stdout.readline())

    def held(self, which: int) -> list[int]:
        target = self.probes._target(self.pids[which])
        assert target is not None
        return target["held"][0].tolist()  # type: ignore[no-any-return]

    def granted(self, *which: int) -> list[int]:
        """What counts for the owners of processes."""
        targets = [self.probes._target(self.pids[each]) for each in which]
        return np.sum([target["granted"][0] for target in targets if target is not None], axis=0).tolist()  # type: ignore[no-any-return]

    def room(self, place: int) -> list[int]:
        """What was granted to an owner or user by its number, and to all (``owners.OWNERS``)."""
        value = self.probes._module["rooms"].get(place)
        assert value is not None
        return np.frombuffer(value, records.ROOM)["granted"][0].tolist()  # type: ignore[no-any-return]

    def claim(self, owner: tuple[int, str], granted: list[int]) -> None:
        """As if another process of an owner had so many entries."""
        pid = (1 << 22) + len(self.pids)
        self.pids.append(pid)
        self.probes.add_target(pid, owner)
        target = self.probes._target(pid)
        assert target is not None
        target["granted"] = granted
        self.probes._module["targets"].set(pid, target.tobytes())
        self.probes.owners.count_rooms()

    def entries(self, which: int) -> list[int]:
        """The same, as the maps have them."""
        pid, counts = self.pids[which], []
        for name in ("inflight", "control_inflight", "math_inflight", "group_depth", "sequences"):
            keys, values = self.probes._module[name].read()
            counts.append(int((under_way._pids(name, keys, values) == pid).sum()))
        return counts

    def end(self, which: int) -> None:
        self._of[which].kill()
        self._of[which].wait()


@pytest.mark.kernel
def test_no_process_takes_the_room_for_calls_under_way(stuck_library: str) -> None:
    with contextlib.ExitStack() as stack:
        callers = Callers(stack, stuck_library, AS_NOBODY, ())
        hostile, honest = callers.pids
        assert callers.call(0, "stay_in_init(2100)") == 2100
        assert callers.call(1, "init_many(10)") == 10
        made = callers.probes.control.drain()
        assert made[made["pid"] == honest]["handle"].tolist() == [0x1234] * 10
        counters = callers.probes.counters()
        assert counters[Counter.PENDING_FULL] == 0
        each = 8192 // bpf.SHARES
        assert callers.held(0) == callers.entries(0) == [0, each, 0, 0, 0]
        assert callers.probes.over_share(hostile) == (2100 - each, 0, 0)
        assert callers.probes.over_share(honest) == (0, 0, 0)
        assert counters[Counter.PENDING_OVER_SHARE] == 2100 - each
        # Calls that return make room, and threads that end while they are in one.
        assert callers.call(0, "leave_all()") == 0
        assert callers.held(0) == callers.entries(0) == [0] * 5
        assert callers.call(0, "stay_in_init(101)") == 101
        assert callers.held(0)[1] == 101
        callers.end(0)
        wait_until(lambda: callers.entries(0) == [0] * 5, 10, "its threads to end")
        assert callers.held(0) == [0] * 5


@pytest.mark.kernel
def test_no_process_takes_the_room_for_numbers_of_collectives(
    stuck_library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bpf, "SHARES", 256)
    each = 65536 // 256
    with contextlib.ExitStack() as stack:
        callers = Callers(stack, stuck_library, AS_NOBODY, ())
        hostile, honest = callers.pids
        assert callers.call(0, "reduce_many(0, 70000)") == 70000
        for _ in range(3):
            assert callers.call(1, "reduce_many(0, 101)") == 101
        seen = callers.probes.collectives.drain()
        of_honest = seen[seen["pid"] == honest]
        assert sorted(of_honest["seq"].tolist()) == [0] * 101 + [1] * 101 + [2] * 101
        assert callers.held(0)[4] == callers.entries(0)[4] == each
        assert callers.probes.over_share(hostile) == (0, 70000 - each, 0)
        assert callers.probes.over_share(honest) == (0, 0, 0)
        assert callers.probes.counters()[Counter.SEQ_FULL] == 0
        # Communicators that end make room, those that were not numbered too little of it.
        assert callers.call(0, f"end_many({each - 100}, 200)") == 200
        assert callers.held(0)[4] == callers.entries(0)[4] == each - 100
        # A process that is no target any more leaves nothing.
        callers.probes.remove_target(hostile)
        assert callers.entries(0) == [0] * 5
        assert callers.held(1)[4] == callers.entries(1)[4] == 101


@pytest.mark.kernel
@pytest.mark.parametrize("alone", [False, True])
def test_no_owner_takes_the_room_for_numbers_of_collectives(stuck_library: str, alone: bool) -> None:
    """Sixteen processes that each take what one may, before another user's begins."""
    with contextlib.ExitStack() as stack:
        callers = Callers(stack, stuck_library, *[AS_NOBODY] * 16, ())
        honest = callers.pids[16]
        for pid in callers.pids[:16]:
            callers.probes.add_target(pid, (NOBODY, ""))
        if alone:
            callers.probes.remove_target(honest)
        for which in range(16):
            callers.call(which, "reduce_many(0, 4096)")
            callers.probes.collectives.drain()
        held = sum(callers.held(which)[4] for which in range(16))
        # Half of the room, and eight parts in nine while nobody else's are traced.
        assert held == pytest.approx(65536 * (8 / 9 if alone else 1 / 2), abs=8)
        if alone:
            callers.probes.add_target(honest, (1016, ""))
        for _ in range(3):
            callers.call(16, "reduce_many(0, 3000)")
        seen = callers.probes.collectives.drain()
        of_honest = seen[seen["pid"] == honest]
        assert np.bincount(of_honest["seq"].astype(int)).tolist() == [3000] * 3
        assert callers.probes.over_share(honest) == (0, 0, 0)
        counters = callers.probes.counters()
        assert sum(callers.probes.over_share(pid)[1] for pid in callers.pids[:16]) == 65536 - held
        assert counters[Counter.SEQ_OVER_SHARE] == 65536 - held
        assert counters[Counter.SEQ_FULL] == 0
        assert callers.probes.owners.take_losses() == []


@pytest.mark.kernel
@pytest.mark.parametrize("containers", [1, 40])
def test_no_owner_takes_the_room_for_calls_under_way(stuck_library: str, containers: int) -> None:
    """Of none of the maps: an owner may have as much as stays free, a user in all containers eight times as much."""
    entries = np.array([65536, 8192, 8192, 16384, 65536])
    with contextlib.ExitStack() as stack:
        callers = Callers(stack, stuck_library, AS_NOBODY, ())
        hostile, honest = callers.pids
        callers.probes.add_target(hostile, (NOBODY, ""))
        share = entries * 8 // 9 if containers > 1 else entries // 2
        for number in range(containers):
            owner = NOBODY, f"pid:[{number}]" if number else ""
            callers.claim(owner, (share // containers + (share % containers > number)).tolist())
        for calls in ("stay_in_groups", "stay_in_products", "stay_in_init"):
            callers.call(0, f"{calls}(40)")
            callers.call(1, f"{calls}(40)")
        assert callers.held(1) == [40, 40, 40, 40, 1]
        assert callers.probes.over_share(honest) == (0, 0, 0)
        # What is left over by the division may be granted once.
        assert all(held <= most for held, most in zip(callers.held(0), [8, 1, 1, 2, 1], strict=True))
        pending, numbers, _ = callers.probes.over_share(hostile)
        if containers == 1:
            assert callers.held(0) == [0] * 5
            # Products, calls about communicators, collectives and beginnings of groups; groups and communicators.
            assert (pending, numbers) == (4 * 40, 2 * 40)
        assert callers.probes.counters()[Counter.PENDING_FULL] == 0
        # A process that goes leaves its room to the others of its owner.
        callers.call(0, "leave_all()")
        for pid in callers.pids[2:]:
            callers.probes.remove_target(pid)
        callers.call(0, "stay_in_products(7)")
        assert callers.held(0)[2] == 7


@pytest.mark.kernel
def test_what_counts_for_an_owner_is_what_its_processes_hold(stuck_library: str) -> None:
    """And little in advance, whoever comes and goes."""
    with contextlib.ExitStack() as stack:
        callers = Callers(stack, stuck_library, AS_NOBODY, AS_NOBODY, ())
        numbers = [
            callers.probes.add_target(pid, (NOBODY, "")) or callers.probes._target(pid) for pid in callers.pids[:2]
        ]
        (owner,), (user,) = ({int(target[name][0]) for target in numbers} for name in ("owner", "user"))  # type: ignore[index]

        def are_counted() -> bool:
            both, every = callers.granted(0, 1), callers.granted(0, 1, 2)
            return [callers.room(place) for place in (owner, user, owners.OWNERS)] == [both, both, every]

        for which in (0, 1, 2):
            for calls in ("stay_in_groups", "stay_in_products", "stay_in_init"):
                callers.call(which, f"{calls}(30)")
            callers.call(which, "reduce_many(0, 500)")
            assert callers.held(which) == [30, 30, 30, 30, 501]
            # CPUs that look at once see the same that is spare: each may hold one more than was granted.
            missing = np.array([32, 30, 30, 30, 504]) - callers.granted(which)
            assert ((missing >= 0) & (missing < (os.cpu_count() or 1))).all()
            assert are_counted()
        callers.call(0, "end_many(0, 400)")
        callers.call(0, "leave_all()")
        wait_until(lambda: callers.held(0) == [0, 0, 0, 0, 101], 10, "the threads to end")
        spare = np.array(callers.granted(0)) - callers.held(0)
        assert (spare < 2 * np.array([8, 1, 1, 2, 8])).all()
        assert are_counted()
        # A process that becomes another owner's takes along what it holds.
        callers.probes.add_target(callers.pids[1], (NOBODY, "pod"))
        assert callers.held(1) == callers.entries(1) == [30, 30, 30, 30, 501]
        assert callers.room(owner) == callers.granted(0)
        assert callers.room(user) == callers.granted(0, 1)
        for which in (0, 1):
            callers.probes.remove_target(callers.pids[which])
        assert callers.room(owner) == callers.room(user) == [0] * 5
        assert callers.room(owners.OWNERS) == callers.granted(2)
        for which in (1, 2):
            callers.call(which, "leave_all()")


@pytest.mark.kernel
def test_what_the_kernel_loses_of_a_process_is_its_owner_s_loss(stuck_library: str) -> None:
    with contextlib.ExitStack() as stack:
        callers = Callers(stack, stuck_library, AS_NOBODY, ())
        for times in (3, 2):
            for _ in range(times):
                callers.call(0, "ncclCommCount(None, 8)")  # nothing is there
            callers.call(1, "init_many(2)")
            assert callers.probes.owners.take_losses() == [((1000, ""), Counter.READ_FAULT, times)]
            assert callers.probes.owners.take_losses() == []
        assert callers.probes.counters()[Counter.READ_FAULT] == 5

        callers.call(0, "ncclCommCount(None, 8)")
        callers.probes.remove_target(callers.pids[0])
        assert callers.probes.add_target(os.getpid(), (7, "")) == 0  # in the place of the one that has gone
        assert callers.probes.owners.take_losses() == [((1000, ""), Counter.READ_FAULT, 1)]
        callers.probes.add_target(callers.pids[0], (7, ""))
        callers.call(0, "ncclCommCount(None, 8)")

        session = a_session()
        session.probes = callers.probes
        hostile, honest = live_job.Job("hostile", 1, owner=(7, "")), live_job.Job("honest", 1, owner=(1001, ""))
        session.count_left_out()
        assert [session.losses.of(job)["read_fault"] for job in (hostile, honest)] == [1, 0]


@pytest.mark.kernel
def test_what_is_held_is_counted_exactly(stuck_library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all maps, whoever comes and goes, above its share and below."""
    monkeypatch.setattr(bpf, "SHARES", 512)
    with contextlib.ExitStack() as stack:
        callers = Callers(stack, stuck_library, AS_NOBODY, ())
        hostile = callers.pids[0]
        shares = [65536 // 512, 8192 // 512, 8192 // 512, 16384 // 512]
        for calls in ("stay_in_groups", "stay_in_products", "stay_in_init"):
            callers.call(0, f"{calls}(150)")
        assert callers.held(0) == callers.entries(0) == [*shares, 1]
        pending, numbers, _ = callers.probes.over_share(hostile)
        least = 150 * 3 - sum(shares[:3])
        assert least <= pending <= least + 150  # begins of groups that returned at once
        assert numbers == 150 - shares[3]
        callers.call(1, "stay_in_groups(7)")
        assert callers.held(1) == callers.entries(1) == [7, 0, 0, 7, 1]
        for which in (0, 1):
            callers.call(which, "leave_all()")
            # Their groups were never ended: their threads were.
            wait_until(lambda one=which: callers.held(one) == [0, 0, 0, 0, 1], 10, "the threads to end")  # type: ignore[misc]
            assert callers.entries(which) == [0, 0, 0, 0, 1]
        # One that leaves the trace while its threads are in calls leaves nothing either.
        callers.call(0, "stay_in_groups(11)")
        callers.call(0, "stay_in_products(5)")
        callers.call(0, "stay_in_init(3)")
        callers.probes.remove_target(hostile)
        assert callers.entries(0) == [0] * 5
        callers.call(0, "leave_all()")
        assert callers.entries(0) == [0] * 5


@pytest.mark.kernel
def test_an_entry_of_a_thread_that_ended_unseen_is_forgotten(stuck_library: str) -> None:
    """As if its end had been missed and its number given to another process's thread."""
    with contextlib.ExitStack() as stack:
        callers = Callers(stack, stuck_library, AS_NOBODY, ())
        callers.call(0, "stay_in_groups(1)")
        callers.call(0, "stay_in_products(1)")
        callers.call(0, "stay_in_init(1)")
        other = callers.pids[1]
        for name in ("inflight", "control_inflight", "math_inflight", "group_depth"):
            table = callers.probes._module[name]
            keys, values = (array.copy() for array in table.read())
            (key,) = keys[under_way._pids(name, keys, values) == callers.pids[0]]
            (value,) = values[under_way._pids(name, keys, values) == callers.pids[0]]
            family = {"inflight": 1, "control_inflight": 0}.get(name)
            number = other if family is None else other << (2 if family else 1) | family
            table.delete(key.tobytes())
            table.set(number, value.tobytes())
        assert callers.held(0) == [1, 1, 1, 1, 1]
        callers.call(1, "ncclGroupStart()")
        callers.call(1, "init_many(1)")
        callers.call(1, "cublasGemmEx(0, 0, 0, 8, 8, 8)")
        assert callers.held(0) == callers.entries(0) == [0, 0, 0, 0, 1]
        assert callers.held(1) == callers.entries(1) == [0, 0, 0, 1, 0]


MAPPER = "import mmap, os, sys\nkept = []\nfor path in sys.argv[1:]:\n    file = os.open(path, os.O_RDONLY)\n"
MAPPER += "    kept.append(mmap.mmap(file, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC))\n"
MAPPER += "print(flush=True)\ninput()\n"


@pytest.mark.kernel
def test_no_owner_takes_the_slots_for_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files without one change nothing for others, nor for each other; those that need one are not probed without."""
    from run import BUILD

    monkeypatch.setattr(placement, "FILE_SLOTS", 16)

    def torch(name: str, version: str) -> str:
        folder = tmp_path / name / "torch"
        (folder / "lib").mkdir(parents=True)
        (folder / "version.py").write_text(f"__version__ = '{version}'\n")
        return str(shutil.copy(BUILD / "torch/lib/libtorch_cpu.so", folder / "lib"))

    many = [str(shutil.copy(BUILD / "libnccl.so.2", tmp_path / f"libnccl{n}.so")) for n in range(16)]
    evil = [torch(f"evil{n}", f"2.{n}.1") for n in range(2)]
    honest = torch("honest", "2.8.0")
    with contextlib.ExitStack() as stack:
        probes = Probes(launch_ring_bytes=1 << 20)
        stack.callback(probes.close)

        def attached(owner: tuple[int, str], *files: str) -> list[attachment.Attachment]:
            mapper = stack.enter_context(running("/usr/bin/python3", "-c", MAPPER, *files))
            assert mapper.stdout is not None
            mapper.stdout.readline()
            found = {each.path: each for each in find_libraries(mapper.pid, Allowance(100, 1))}
            probes.layouts.set(mapper.pid, {found[path].key: found[path].layout for path in files})
            return [probes.attach(found[path], mapper.pid, owner=owner) for path in files]

        def layout(of: attachment.Attachment) -> bytes | None:
            found = probes._module["torch_layouts"].get(of.pid or 0)
            return found and found[: records.TORCH.itemsize]

        before = attached((NOBODY, ""), *many)
        (ours,) = attached((0, ""), honest)
        for library in evil:  # in part it would have to be taken off again for who may have a slot
            with pytest.raises(ArgusError, match="there is room for no more files of its user"):
                attached((NOBODY, ""), library)
        known = LAYOUTS["x86_64", 2, 8]
        assert not ours.lacks_slot
        own = known.numel, 0, known.sizes, ours.slot + 1
        assert layout(ours) == b"".join(n.to_bytes(4, sys.byteorder) for n in own)
        assert [each.lacks_slot for each in before] == [False] * 8 + [True] * 8
        assert {symbol for symbol in ours.functions if "attention" in symbol}
        # Files that go make room, and leave nothing of themselves.
        probes.detach(before)
        (next_one,) = attached((NOBODY, ""), torch("later", "1.0"))
        assert not next_one.lacks_slot
        assert layout(next_one) == bytes(12) + (next_one.slot + 1).to_bytes(4, sys.byteorder)


def a_placement() -> Placement:
    class Maps:
        def __getitem__(self, name: str) -> Any:
            return SimpleNamespace(set=lambda key, value: None)

    nothing: Any = None
    return Placement(Maps(), nothing, launch_durations=False)  # type: ignore[arg-type]


def slots(placed: Placement, owner: tuple[int, str], files: int) -> list[attachment.Attachment]:
    """New files of an owner."""
    of: list[attachment.Attachment] = []
    for n in range(files):
        library: Any = SimpleNamespace(key=(owner, n, object()), layout=None, text_bytes=n, offsets={})
        of.append(attachment.Attachment(library, None))
        placed._file_slot(of[-1], owner)
    return of


def test_a_user_with_many_containers_leaves_slots_to_others() -> None:
    """Any user can make namespaces, and each is a container."""
    placed = a_placement()
    taken = [each for n in range(64) for each in slots(placed, (NOBODY, f"pid:[{n}]"), 64)]
    assert sum(not each.lacks_slot for each in taken) == 170
    assert sum(not each.lacks_slot for each in slots(placed, (1000, ""), 24)) == 24


def test_a_file_keeps_its_slot_as_long_as_one_process_has_probes_on_it() -> None:
    placed = a_placement()
    library: Any = SimpleNamespace(key="file", layout=None, text_bytes=1, offsets={})
    two = [attachment.Attachment(library, pid) for pid in (1, 2)]
    assert {placed._file_slot(each, (0, "")) for each in two} == {0}
    placed.release(two[0])
    placed.release(two[0])
    assert len(placed._file_slots) == 1
    placed.release(two[1])
    assert not placed._file_slots


def test_a_file_has_a_slot_if_one_of_its_users_may_have_one_and_it_counts_for_that_one() -> None:
    placed = a_placement()
    slots(placed, (NOBODY, ""), 200)
    library: Any = SimpleNamespace(key="file", layout=None, text_bytes=1, offsets={})
    poor, rich = (attachment.Attachment(library, None) for _ in range(2))
    placed._file_slot(poor, (NOBODY, ""))
    assert poor.lacks_slot
    placed._file_slot(rich, (NOBODY, ""), (1000, ""))
    assert placed._file_slots["file"].owner == (1000, "")  # type: ignore[index]
    # It counts for those who map it: who has left can take as many as before.
    placed.charge("file", [(1001, ""), (NOBODY, "")])  # type: ignore[arg-type]
    assert placed._file_slots["file"].owner == (1001, "")  # type: ignore[index]
    placed.charge("file", [])  # type: ignore[arg-type]
    assert placed._file_slots["file"].owner == (1001, "")  # type: ignore[index]
    placed.release(poor, rich)
    assert "file" not in placed._file_slots


def test_probes_of_an_ignored_process_alone_are_taken_away(tmp_path: Path) -> None:
    """Those of files that others map, too, stay: they are the others'."""
    probes = Probes.__new__(Probes)
    kept: dict[str, Any] = {"targets": SimpleNamespace(get=lambda pid: None)}
    probes._module = kept  # type: ignore[assignment]
    library: Any = SimpleNamespace()

    def links(count: int) -> list[int]:
        return [os.open(tmp_path, os.O_RDONLY) for _ in range(count)]

    own, shared, other = (attachment.Attachment(library, pid, entry_links=links(2)) for pid in (7, None, 8))
    own.optional_links["launches"] = (links(1), links(1))
    pulse = links(1)
    probes.attachments = [own, shared, other]
    probes._pulse_links = {id(own): pulse}
    probes._lock, probes._patience, probes._closing, probes.closed = threading.Lock(), Patience(), [], False
    probes.placement = a_placement()
    gone = [*own.entry_links, *own.optional_links["launches"][0], *own.optional_links["launches"][1], *pulse]
    stay = [*shared.entry_links, *other.entry_links]
    probes.ignore(7)
    assert all(closing.wait(10) for closing in probes._closing)
    assert probes.attachments == [shared, other]
    for fd in gone:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)
    for fd in stay:
        os.close(fd)


# ---- a whole trace


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    return new_store(tmp_path)


@contextlib.contextmanager
def tracing(store_url: str, **options: Any) -> Iterator[Tracer]:
    tracer = Tracer(open_store(store_url), Options(**options))
    tracer.start()
    try:
        yield tracer
    finally:
        tracer.stop()


FLOOD = "import ctypes, sys\nlibrary = ctypes.CDLL(sys.argv[1])\nprint(flush=True)\ninput()\n"
FLOOD += "while True: library.cuCtxSynchronize()\n"
PACED = ["--steps", "20", "--layers", "2", "--buckets", "2", "--data-ms", "50"]
"""What costs a tenth of the budget to observe, so that a busy machine leaves it below. It launches 39 kernels a step
through the runtime, four through the driver, and one for each of its two all-reduces."""
PACED_LAUNCHES = 20 * (39 + 4 + 2)
RANK = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "JOB_NAME": "llama"}


@pytest.mark.kernel
def test_a_flood_beside_a_job_takes_nothing_from_it(store_url: str, tmp_path: Path) -> None:
    """Another user's process that calls as fast as it can, and says that it is a rank of the same job."""
    from run import BUILD, Job

    go, log = tmp_path / "go", tmp_path / "log-{rank}"
    flood_command = (*AS_NOBODY, "/usr/bin/python3", "-c", FLOOD, str(BUILD / "libcuda.so.1"))
    with (
        Job(
            ranks=2, args=[*PACED, "--log", str(log), "--go", str(go), "--hold", "60"], env={"JOB_NAME": "llama"}
        ) as job,
        # Beside whom the flood is one also where the machine is too busy for 100,000 calls a second.
        Job(ranks=1, args=["--steps", "0", *PACED[2:]], env={"JOB_NAME": "steady"}) as steady,
        running(*flood_command, env={"PATH": os.environ["PATH"], **RANK}, start_new_session=True) as flood,
    ):
        assert flood.stdin is not None
        assert flood.stdout is not None
        flood.stdout.readline()
        wait_for_cuda([*job.pids, *steady.pids, flood.pid])
        with tracing(store_url, pids=(*job.pids, *steady.pids, flood.pid), stacks=False) as tracer:
            flood.stdin.write(b"\n")
            flood.stdin.flush()
            of_flood = next(m for its in tracer.jobs for m in its.ranks() if m.target.pid == flood.pid)
            poll_until(tracer, lambda: bool(of_flood.ignored), 120, "the flood to be ignored")
            assert not tracer._budget.overhead.governor.plan.rungs
            go.touch()
            launched = [m for its in tracer.jobs for m in its.ranks() if m.target.pid in job.pids]
            poll_until(tracer, lambda: all(m.launches >= PACED_LAUNCHES for m in launched), 120, "the job's launches")
    with open_store(store_url) as store:
        ranks = query(store, "SELECT job, rank, uid, pid FROM ranks FINAL ORDER BY rank").to_pylist()
        losses = query(
            store, "SELECT job, counter, value FROM coverage FINAL WHERE loss AND value > 0 ORDER BY counter"
        ).to_pylist()
        seen = query(
            store, "SELECT job, signal, argMax(seen, ts) AS share FROM signal_coverage FINAL "
            "WHERE reason NOT LIKE 'the trace%' GROUP BY job, signal"
        ).to_pylist()  # fmt: skip
        (counted,) = query(
            store, "SELECT count() AS n FROM launches WHERE job = 'llama' AND kind = 'kernel'"
        ).to_pylist()
    assert {row["pid"]: (row["job"], row["uid"]) for row in ranks} == {
        **dict.fromkeys(job.pids, ("llama", os.geteuid())),
        **dict.fromkeys(steady.pids, ("steady", os.geteuid())),
        flood.pid: ("llama#uid65534", NOBODY),
    }
    assert {row["counter"] for row in losses if row["job"] in ("llama", "steady")} == set()
    assert "processes_ignored" in {row["counter"] for row in losses if row["job"] == "llama#uid65534"}
    shares = {(row["job"], row["signal"]): row["share"] for row in seen}
    assert shares["llama", "launches"] == shares["llama", "collectives"] == 1
    assert shares["llama#uid65534", "calls"] == 0
    assert counted["n"] == 2 * PACED_LAUNCHES
    for rank in range(2):
        counts = json.loads((tmp_path / f"log-{rank}").read_text().splitlines()[-1])["counts"]
        assert counts["cudaLaunchKernel"] + counts["cuLaunchKernel"] + counts["ncclAllReduce"] == PACED_LAUNCHES


LAUNCHES = """
import ctypes, sys, time
library = ctypes.CDLL(sys.argv[1])
context, module, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
library.cuInit(0)
library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
library.cuCtxSetCurrent(context)
library.cuModuleLoadData(ctypes.byref(module), b"image")
print(flush=True)
while True:
    library.cuModuleGetFunction(ctypes.byref(function), module, b"own_kernel")
    library.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, None, None, None)
    sum(range(100_000))
    time.sleep(0.01)
"""


@pytest.mark.kernel
def test_who_traces_their_own_gets_nothing_of_others(store_url: str, tmp_path: Path) -> None:
    """Another user's ranks say that they are of the same job, have the same libraries, and are children of the same
    process."""
    from run import BUILD, Job

    said = f"{tmp_path}/what-others-are-called-with"
    command = (*AS_NOBODY, "/usr/bin/python3", "-c", LAUNCHES, str(BUILD / "libcuda.so.1"))
    others = ["--steps", "0", "--data-ms", "5", "--log", f"{said}-{{rank}}"]
    with (
        Job(ranks=2, args=others, env={"JOB_NAME": RANK["JOB_NAME"]}) as job,
        running(*command, env={"PATH": os.environ["PATH"], **RANK}) as own,
    ):
        assert own.stdout is not None
        own.stdout.readline()
        wait_for_cuda([*job.pids, own.pid])
        log = Path(f"{said}-0")
        wait_until(log.exists, what="the others' log")
        made = log.stat().st_size
        with tracing(store_url, pids=(own.pid,), stacks=True) as tracer:
            (member,) = tracer.live()
            poll_until(tracer, lambda: member.launches >= 300, 120, "its own launches")
            wait_until(lambda: log.stat().st_size > made + 1000, what="steps of the others")
            tracer.poll()
    with open_store(store_url) as store:
        found = {table: query(store, f"SELECT * FROM {table}").to_pylist() for table in table_columns()}
    whose = {table: {row[key] for row in its for key in ("pid", "tid") if key in row} for table, its in found.items()}
    assert {table for table, its in whose.items() if own.pid in its} >= {"ranks", "launches", "stack_samples"}
    assert set().union(*whose.values()) <= {own.pid, 0}
    assert {row["kernel"] for row in found["launches"] if row["kind"] == "kernel"} == {"own_kernel"}
    assert {row["uid"] for row in found["ranks"]} == {NOBODY}
    assert said not in str(found)


@pytest.mark.kernel
def test_who_becomes_another_user_leaves_the_trace(store_url: str) -> None:
    """What a setuid program does is not for those who trace the program that executed it."""
    from run import BUILD

    program = "import ctypes, os, sys\nlibrary = ctypes.CDLL(sys.argv[1])\nprint(flush=True)\ninput()\n"
    program += "os.setuid(65534)\nprint(flush=True)\nimport time\nwhile True:\n    library.cuCtxSynchronize()\n"
    program += "    time.sleep(0.01)\n"
    with running("/usr/bin/python3", "-c", program, str(BUILD / "libcuda.so.1"), env=dict(RANK)) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        with tracing(store_url, pids=(process.pid,), stacks=False) as tracer:
            tracer.poll()
            (member,) = tracer.live()
            process.stdin.write(b"\n")
            process.stdin.flush()
            process.stdout.readline()
            poll_until(tracer, lambda: member.state == "exited", 120, "the process to leave")
            assert tracer.lost()["processes_changed_owner"] == 1
            deadline = time.monotonic() + 60
            while process.pid in tracer._roster.family and time.monotonic() < deadline:
                tracer.poll()
            assert tracer.session.probes._target(process.pid) is None


# ---- new processes


class Starting:
    """A roster beside which time goes on as much as each look at a process takes; callers are whoever it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.spent_s: Tally[int] = Tally()
        self.look_s: dict[int, float] = {}
        self.looked_at: set[int] = set()
        self.owners: dict[int, tuple[int, str]] = {}
        monkeypatch.setattr(live_session.time, "monotonic", lambda: self.now)
        monkeypatch.setattr("argus.live.roster.owner_of", self.owners.__getitem__)
        monkeypatch.setattr("argus.live.roster.inspect", self._inspect)
        monkeypatch.setattr("argus.live.roster.find_libraries", lambda pid: Libraries())
        self.session = a_session(run=1)
        self.session.probes = SimpleNamespace(remove_target=lambda pid: None)
        self.session.roster = self.roster = Roster(self.session, KernelNames())
        monkeypatch.setattr(self.roster.family, "includes", lambda pid: True)
        monkeypatch.setattr(self.roster, "_attach", lambda running: True)
        monkeypatch.setattr(self.roster._libraries, "changed", self._changed)

    def _take(self, pid: int) -> None:
        uid = self.owners[pid][0]
        took_s = self.look_s.get(uid, 0.01)
        self.now += took_s
        self.spent_s[uid] += took_s  # type: ignore[assignment]
        self.looked_at.add(pid)

    def _inspect(self, pid: int, *, wait: bool) -> Target:
        self._take(pid)
        identity = Identity(-1, 1, -1, f"job of {pid}", "", "", *self.owners[pid])
        target: Any = SimpleNamespace(
            pid=pid, identity=identity, alive=lambda: True, close=lambda: None, on_gpu=False, libraries=[]
        )
        return target  # type: ignore[no-any-return]

    def _changed(self, pid: int, *, hurry: bool) -> None:
        self._take(pid)

    def start(self, uid: int, *pids: int, container: str = "") -> set[int]:
        self.owners.update(dict.fromkeys(pids, (uid, container)))
        self.roster._add_candidates(list(pids), self.now)
        return set(pids)

    def not_taken_in(self, uid: int) -> int:
        losses = self.session.losses.of(live_job.Job("", 1, "", (uid, "")))
        return losses.get("processes_over_share", 0)

    def turn(self, callers: set[int]) -> None:
        self.roster.look_quickly(self.now)
        self.roster.adopt_callers(callers)
        self.now += 0.25


def test_jobs_that_an_owner_starts_without_end_do_not_hold_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Starting(monkeypatch)
    begun, first = of.now, 1 << 22
    for turn in range(100):
        pids = range(first + 100 * turn, first + 100 * turn + 50)
        modest = first + 100 * turn + 99
        of.turn(of.start(NOBODY, *pids) | of.start(1000, modest))
        assert modest in of.roster.by_pid, "others' ranks are ranks at once"
    ranks = sum(member.target.identity.uid == NOBODY for _, member in of.roster.by_pid.values())
    saved_s, passed_s = 2 * admission.SAVED_S, of.now - begun
    assert of.spent_s[NOBODY] < saved_s + 2 * admission.OF_LOOP * passed_s + 0.1
    assert 50 < ranks < (admission.SAVED_S + admission.OF_LOOP * passed_s) / admission.JOB_S
    assert of.not_taken_in(NOBODY) > 100
    assert of.not_taken_in(1000) == 0


def test_jobs_that_an_owner_has_run_on_do_not_hold_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has rows in each turn, however little it does."""
    of = Starting(monkeypatch)
    first = 1 << 22
    of.turn(of.start(1000, 1))
    for turn in range(4000):
        of.turn(of.start(NOBODY, first + turn))
        of.roster._candidates.pop(first + turn, None)
    jobs = Tally(job.owner[0] for job in of.roster.jobs)
    most = (admission.SAVED_S + 100) / (admission.JOB_S + admission.LIVE_JOB_SHARE)
    assert (
        admission.OF_LOOP / admission.LIVE_JOB_SHARE < jobs[NOBODY] < 3 * admission.OF_LOOP / admission.LIVE_JOB_SHARE
    )
    assert jobs[NOBODY] < most / 10
    of.turn(of.start(1000, 2))
    assert 2 in of.roster.by_pid


def test_jobs_that_began_while_their_owner_was_alone_do_not_hold_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has rows now and then, of which all have their turn; the last one whatever it takes."""
    of = Starting(monkeypatch)
    writer = Rows()
    of.session.writer = writer  # type: ignore[assignment]
    of.session.end_ns = None
    jobs = [live_job.Job(f"job {number}", 1, "", (NOBODY, "")) for number in range(2000)]
    of.roster.jobs += [*jobs, modest := live_job.Job("modest", 1, "", (1000, ""))]
    rows = SessionRows(of.session)
    monkeypatch.setattr(rows, "count_refused", lambda over_share: None)

    def append(table: str, columns: Any) -> int:
        of.now += 0.002
        written[columns["job"]] += 1
        return 1

    written: Tally[str] = Tally()
    monkeypatch.setattr(of.session.writer, "append", append)
    begun, turns = of.now, 100
    for _ in range(turns):
        of.roster.look_quickly(of.now)
        rows.write_coverage({}, 0, lambda pid: 0, [])
        of.now += 4.0
    assert written[modest.name] == turns
    of_jobs = [written[job.name] for job in jobs]
    assert 0.002 * sum(of_jobs) < 2 * admission.SAVED_S + admission.OF_LOOP * (of.now - begun)
    assert max(of_jobs) - min(of_jobs) <= 1
    assert min(of_jobs) > 5
    used = SimpleNamespace(begin_ns=0, busy=0.5)
    monkeypatch.setattr(rows._host_cpu, "read", lambda pids: used)
    before = sum(written.values())
    rows.write_host_usage()
    lost = sum(of.session.losses.of(job).get("rows_over_share", 0) for job in jobs)
    assert sum(written.values()) - before + lost == len(of.roster.jobs), "what is left out is counted"
    assert lost > 1000
    of_jobs = [written[job.name] for job in jobs]
    of.session.end_ns = 1
    rows.write_coverage({}, 0, lambda pid: 0, [])
    assert sum(written[job.name] for job in jobs) == sum(of_jobs) + len(jobs)


def test_of_what_a_trace_finds_no_owner_s_jobs_are_all_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Starting(monkeypatch)
    owners = {1: (1000, ""), **{(1 << 22) + number: (NOBODY, "") for number in range(2000)}}
    of.owners.update(owners)
    monkeypatch.setattr("argus.live.roster.parent_of", lambda pid: 1)
    monkeypatch.setattr(of.roster.family, "admit", lambda pids: None)
    targets = [of._inspect(pid, wait=False) for pid in owners]
    named = {targets[-1].pid}
    of.roster.start(targets, named)
    taken_in = of.roster.by_pid.keys()
    assert {1, *named} <= taken_in, "who is named is traced, and who has few"
    assert 100 < len(taken_in) < 300


@pytest.mark.parametrize(("look_s", "alive"), [(0.01, 8), (0.6, 8), (0.6, 1)])
def test_namespaces_without_end_do_not_hold_the_loop(
    monkeypatch: pytest.MonkeyPatch, look_s: float, alive: int
) -> None:
    """Each process in one of its own, as anybody may have: each is an owner of its own. Whose mappings have been read,
    which takes long of 60,000, makes room for the next."""
    of = Starting(monkeypatch)
    of.look_s[NOBODY] = look_s
    pids, living = iter(range(1 << 22, 1 << 24)), set[int]()
    of.turn(of.start(1000, 1))
    for turn in range(900):
        if turn == 600:
            begun, spent_s = of.now, of.spent_s[NOBODY]
        for pid in itertools.islice(pids, alive - len(living)):
            living |= of.start(NOBODY, pid, container=f"pid:[{pid}]")
        of.turn(set())
        done = living & of.looked_at
        of.roster._leaving += done
        of.roster.retire(list(done))
        living -= done
    of.turn(of.start(1000, 2))
    assert 2 in of.roster.by_pid
    assert of.spent_s[NOBODY] - spent_s < 2 * admission.OF_LOOP * (of.now - begun) + look_s


def test_children_in_bursts_do_not_hold_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are all gone before the next come; the launcher stays."""
    of = Starting(monkeypatch)
    first, begun = 1 << 22, of.now
    of.turn(of.start(1000, 1))
    of.owners[7] = NOBODY, ""
    of.roster._candidates[7] = _Candidate(of.now, of._inspect(7, wait=False))
    for burst in range(60):
        pids = of.start(NOBODY, *range(first + 1000 * burst, first + 1000 * burst + 400))
        of.turn(set())
        of.roster._leaving += pids
        of.roster.retire(list(pids))
        of.now += 0.25
    assert of.spent_s[NOBODY] < admission.SAVED_S + admission.OF_LOOP * (of.now - begun) + 0.5


def test_processes_that_ended_are_their_forkers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are gone before they are looked at cost whoever forked them, and lose nobody anything."""
    of = Starting(monkeypatch)
    first = 1 << 22
    of.turn(of.start(1000, 1))
    of.turn(of.start(NOBODY, 7))
    ended = range(first, first + 4000)
    of.owners |= dict.fromkeys(ended, UNKNOWN)
    monkeypatch.setattr(of.roster.family, "parent", lambda pid: 7)
    of.roster._add_candidates(list(ended), of.now)
    of.turn(set())
    assert of.roster._owner_of(first) == (NOBODY, "")
    assert 0 < of.spent_s[UNKNOWN[0]] < admission.SAVED_S + 0.1, "of the forker's account"
    assert of.not_taken_in(1000) == 0
    monkeypatch.setattr(of.roster.family, "parent", lambda pid: 0)
    of.roster._add_candidates(orphans := list(range(first + 5000, first + 9000)), of.now)
    of.owners |= dict.fromkeys(orphans, UNKNOWN)
    of.turn(set())
    assert of.not_taken_in(1000) == 0, "nothing is lost of who has ended, whosever it was"


def test_who_starts_processes_without_end_has_its_ranks_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that make no call, such as a build's, are no ranks."""
    of = Starting(monkeypatch)
    first = 1 << 22
    of.turn(of.start(1000, 1))
    for turn in range(60):
        of.start(NOBODY, *range(first + 100 * turn, first + 100 * turn + 50))
        of.turn(set())
    of.turn(of.start(NOBODY, 2))
    assert of.not_taken_in(NOBODY) > 1000
    assert 2 in of.roster.by_pid


def test_who_is_alone_may_start_any_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Starting(monkeypatch)
    first = 1 << 22
    for turn in range(20):
        of.turn(of.start(NOBODY, *range(first + 100 * turn, first + 100 * turn + 50)))
    assert len(of.roster.by_pid) == 20 * 50
    assert "processes_over_share" not in of.session.losses.totals


# ---- names of processes


class Names:
    """A session with a job of each of two users, whose clock goes on as much as each look-up takes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(live_session.time, "monotonic", lambda: self.now)
        jobs = [live_job.Job(name, 1, "", (uid, "")) for name, uid in (("greedy", NOBODY), ("modest", 1000))]
        self.session = a_session(jobs=jobs)
        self.session.roster.by_pid = {7 + place: (job, None) for place, job in enumerate(jobs)}
        self.names = KernelNames(self.session)
        monkeypatch.setattr(self.names, "_symbol", self._symbol)
        self.asked: list[int] = []

    def _symbol(self, pid: int, address: int) -> str:
        self.now += 0.05  # of a name that takes long to demangle
        self.asked.append(pid)
        return f"kernel_{address}"

    def launch(self, pid: int, *handles: int) -> list[str]:
        return [self.names.name(pid, handle, Layer.RUNTIME) for handle in handles]


def test_names_of_an_owner_do_not_hold_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Names(monkeypatch)
    begun = of.now
    for turn in range(40):
        of.session.fill_look_ups(of.now)
        of.launch(7, *range(1000 * turn, 1000 * turn + 300))
        assert of.launch(8, turn) == [f"kernel_{turn}"], "others have theirs"
        of.now += 0.25
    greedy_s = 0.05 * of.asked.count(7)
    assert greedy_s < live_session.SAVED_S + live_session.OF_LOOP * (of.now - begun) + 0.1
    refused = 40 * 300 - of.asked.count(7)
    greedy, modest = of.session.jobs
    assert of.session.losses.of(greedy)["look_ups_over_share"] == refused
    assert of.session.losses.of(modest)["look_ups_over_share"] == 0
    of.now += 60
    of.session.fill_look_ups(of.now)
    last = 39 * 1000 + 299
    assert of.launch(7, last) == [f"kernel_{last}"], "there is time for it now"


def test_names_of_ranges_of_an_owner_do_not_hold_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Names(monkeypatch)
    begun = of.now
    asked: list[str] = []

    def meaning(name: str) -> Meaning:
        of.now += 0.05
        asked.append(name)
        return meaning_of(name)

    monkeypatch.setattr(live_calls, "meaning_of", meaning)
    push = next(call.id for call in live_calls.calls.CALLS if call.kind == "nvtx_push")
    of_pid = {7: Marks(), 8: Marks()}

    def take(pid: int, *names: str) -> list[int]:
        rows = np.zeros(len(names), records.MARK)
        rows["call"], rows["name_len"] = push, [len(name) for name in names]
        for row, name in zip(rows, names, strict=True):
            row["name"][: len(name)] = np.frombuffer(name.encode(), np.uint8)
        meanings = live_calls._Meanings(of.session, pid)
        marks = of_pid[pid].take(rows, ends_of_backward=True, meaning=meanings.of)
        meanings.count()
        return list(marks["role"].tolist())

    for turn in range(40):
        of.session.fill_look_ups(of.now)
        word = "".join(chr(97 + int(digit)) for digit in str(turn))
        take(7, *(f"{word} {'x' * number}" for number in range(80)))
        assert take(8, f"forward {word}") == [Role.FORWARD], "others have theirs"
        of.now += 0.25
    greedy_s = 0.05 * (len(asked) - 40)
    assert greedy_s < live_session.SAVED_S + live_session.OF_LOOP * (of.now - begun) + 0.1
    greedy, modest = of.session.jobs
    assert of.session.losses.of(greedy)["look_ups_over_share"] == 40 * 80 - (len(asked) - 40)
    assert of.session.losses.of(modest)["look_ups_over_share"] == 0
    of.now += 60
    of.session.fill_look_ups(of.now)
    assert take(7, "forward at last") == [Role.FORWARD], "there is time for it now"


def test_names_of_who_is_alone_are_all_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Names(monkeypatch)
    del of.session.roster.jobs[1]
    of.session.fill_look_ups(of.now)
    of.launch(7, *range(300))
    assert len(of.asked) == 300


@pytest.mark.kernel
def test_new_stacks_of_an_owner_leave_room_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its waits is of another stack: beside others it has 50 a second, and 20 at once, here."""
    monkeypatch.setattr(sampler, "STACK_NS", 20_000_000)
    monkeypatch.setattr(sampler, "STACKS_NS", 400_000_000)
    program = tmp_path / "stack_flood"
    source = Path(__file__).with_name("stack_flood.c")
    subprocess.run(["cc", "-O0", "-fno-omit-frame-pointer", "-o", str(program), str(source)], check=True)
    flood = subprocess.Popen([str(program)])
    honest = subprocess.Popen([sys.executable, "-c", "import time\nwhile True: time.sleep(0.02)"])
    probes = StackProbes(rate_hz=0, off_cpu_ns=1000, walk_ns=1)
    greedy, modest = (NOBODY, ""), (1000, "")
    stacks: Tally[int] = Tally()

    def taken() -> int:
        stacks.update(int(raw.head["pid"]) for raw in probes.drain().stacks)
        return stacks[flood.pid]

    try:
        probes.add_target(flood.pid, greedy)
        wait_until(lambda: taken() > 300, what="stacks of one that is alone")
        assert probes.owners.take_refused() == {}
        begun = time.monotonic()
        probes.add_target(honest.pid, modest)
        taken()
        stacks.clear()
        time.sleep(1)
        wait_until(lambda: taken() > 0 and stacks[honest.pid] > 0, what="stacks of both")
        assert stacks[flood.pid] <= 50 * (time.monotonic() - begun) + 20 + 10
        what = "stack_samples_over_share"
        assert (refused := probes.owners.take_refused()).keys() == {(greedy, what)}
        assert refused[greedy, what] > 100
        assert probes.owners.take_refused().get((modest, what)) is None
    finally:
        probes.close()
        for process in (flood, honest):
            process.kill()
            process.wait()


SLEEPERS = "import sys, threading, time\ndef sleep():\n    while True: time.sleep(0.02)\n"
SLEEPERS += "[threading.Thread(target=sleep).start() for _ in range(int(sys.argv[1]))]\nprint(flush=True)\n"


@pytest.mark.kernel
@pytest.mark.parametrize("alone", [False, True])
def test_no_owner_fills_the_logs_of_samples_for_the_others(monkeypatch: pytest.MonkeyPatch, alone: bool) -> None:
    """Each of its threads has a row in each window of each CPU's log. Nobody reads the logs meanwhile."""
    monkeypatch.setattr(sampler, "LEAST_ROWS", 128)
    hostile, modest = (NOBODY, ""), (NOBODY if alone else 1000, "")
    with contextlib.ExitStack() as stack:
        many = [stack.enter_context(running("/usr/bin/python3", "-c", SLEEPERS, "30")) for _ in range(2)]
        honest = stack.enter_context(running("/usr/bin/python3", "-c", SLEEPERS, "1"))
        for process in (*many, honest):
            assert process.stdout is not None
            process.stdout.readline()
        probes = StackProbes(rate_hz=0, off_cpu_ns=1000)
        stack.callback(probes.close)
        probes.add_target(honest.pid, modest)
        for process in many:
            probes.add_target(process.pid, hostile)
        probes.drain()
        before = probes.counters()[StackCounter.SAMPLES_DROPPED]
        time.sleep(2.5)
        refused, counters = probes.owners.take_refused(), probes.counters()
        rows = probes.drain().counts
        if alone:
            assert refused == {}
            assert counters[StackCounter.SAMPLES_DROPPED] > before
            return
        assert refused.keys() == {(hostile, "stack_rows_over_share")}
        assert counters[StackCounter.SAMPLES_DROPPED] == before
        windows = np.unique(rows["window"][rows["pid"] == honest.pid])
        assert len(windows) >= 2.5e9 // (1 << records.WINDOW_BITS) - 2, "each of them"
        # Rows are given back once they are read.
        time.sleep(0.3)
        rows = probes.drain().counts
        assert np.isin(rows["pid"], [process.pid for process in many]).any()


# A child as another user, or one that becomes one by an exec once there is a line; and one that stays the rank's own.
STARTS = """
import subprocess, sys, time
late = "import os, sys; sys.stdin.readline(); os.setuid(65534); os.execv('/usr/bin/sleep', ['sleep', '1000'])"
if sys.argv[1] == "late":
    one = subprocess.Popen(["/usr/bin/python3", "-c", late])
else:
    one = subprocess.Popen(["/usr/bin/sleep", "1000"], user=65534, group=65534, extra_groups=[])
print(one.pid, subprocess.Popen(["/usr/bin/sleep", "1000"]).pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("how", ["at once", "late"])
def test_what_a_rank_starts_as_another_user_is_not_sampled(store_url: str, how: str) -> None:
    """A password dialogue that root runs for a rank was sampled as the rank's."""
    with running("/usr/bin/python3", "-c", STARTS, how, env=dict(RANK)) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        one, two = map(int, process.stdout.readline().split())
        try:
            with tracing(store_url, pids=(process.pid,), stacks=True) as tracer:
                sampled = tracer._stacks._processes.by_pid
                poll_until(tracer, lambda: two in sampled, 60, "a child to be sampled")
                if how == "late":
                    poll_until(tracer, lambda: one in sampled, 60, "the other child to be sampled")
                    process.stdin.write(b"\n")
                    process.stdin.flush()
                poll_until(tracer, lambda: bool(tracer.lost().get("stack_processes_of_others")), 60, "it to be counted")
                assert one not in sampled
                assert {process.pid, two} <= sampled.keys()
                tracer.poll()
                assert tracer.lost()["stack_processes_of_others"] == 1
        finally:
            for pid in (one, two):
                os.kill(pid, signal.SIGKILL)
