"""What a trace keeps for long is bounded: docs/performance.md lists every store, what bounds it, and the test of it;
those that no other test covers are tested here."""

from __future__ import annotations

import ast
import os
import re
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from argus.capture.process import demangler, symbols
from argus.capture.process.symbols import Symbols
from argus.live import job as job_module
from argus.live.cost.neighbours import Neighbours, Spent
from argus.live.gpu.rows import KEPT_NAMES
from argus.live.job import Job, Member
from argus.live.sampling import processes
from argus.live.sides import calls as live_calls
from argus.live.sides import flags
from argus.live.sides.calls import CallSide
from argus.live.sides.early_calls import EARLY_CALLS
from argus.live.sides.flags import KEPT_NS, FlagWatcher
from argus.live.sides.gpu_times import GpuSide
from argus.live.sides.probing import ProbingSide, _OfJob
from argus.model import records
from argus.model.calls import BY_SYMBOL
from argus.model.losses import UNKNOWN
from argus.semantics.gpu import correlation
from argus.semantics.gpu.correlation import Correlator
from tests.builders.sessions import a_session
from tests.unit.live.sides.test_stack_samples import PID, Session

CLASSES = {
    "live/tracer": ("Tracer",),
    "live/session": ("Session",),
    "live/session_rows": ("SessionRows",),
    "live/sides/calls": ("CallSide",),
    "live/sides/alignment": ("Aligner",),
    "live/sides/call_shares": ("CallShares",),
    "live/cost/budget": ("BudgetSide",),
    "live/signals": ("Signals",),
    "live/display/viewer": ("Viewer",),
    "live/roster": ("Roster",),
    "model/given_names": ("GivenNames",),
    "live/probed_files": ("ProbedFiles",),
    "capture/torch_layouts": ("TorchLayouts",),
    "live/cost/file_users": ("FileUsers",),
    "live/cost/attaching": ("Attaching",),
    "live/mapped_libraries": ("MappedLibraries",),
    "live/last_rows": ("LastRows",),
    "live/job": ("Job",),
    "live/sides/stack_samples": ("StackSide",),
    "live/sampling/children": ("Descendants", "_Search", "_Branch"),
    "live/sampling/dictionary": ("StackDictionary", "_Kept"),
    "live/sampling/process": ("SampledProcess",),
    "live/sampling/processes": ("SampledProcesses",),
    "live/sampling/programs": ("StackPrograms",),
    "live/sampling/rows": ("StackRows",),
    "live/sampling/symbolize": ("Symbolizer",),
    "live/sampling/waits": ("Waits",),
    "live/sides/gpu_times": ("GpuSide",),
    "live/gpu/duty_cycle": ("DutyCycle", "DutyCycles"),
    "live/gpu/process": ("GpuProcess", "CuptiProgram"),
    "live/gpu/injection": ("Injector",),
    "live/gpu/rows": ("GpuRows",),
    "live/gpu/threads": ("HostTids",),
    "live/sides/kernel_rows": ("KernelSide", "_Process"),
    "live/sides/probing": ("ProbingSide", "_OfJob", "_Searched"),
    "live/sides/windows_seen": ("WindowsSeen",),
    "live/sides/early_calls": ("EarlyCalls",),
    "live/cost/overhead": ("Overhead",),
    "live/cost/neighbours": ("Neighbours",),
    "live/cost/ladders": ("Ladders",),
    "live/cost/admission": ("Admission",),
    "live/cost/turns": ("_Accounts",),
    "live/coverage": ("SignalCoverage",),
    "live/display/recent": ("RecentSteps",),
    "live/sides/environment": ("EnvironmentSide",),
    "live/sides/flags": ("FlagWatcher", "FlagSide"),
    "live/sides/recorder": ("FlightRecorder",),
    "live/bulkhead": ("Bulkheads",),
    "cupti/inject_apart": ("Children",),
    "model/losses": ("Losses",),
    "model/shares": ("Shares",),
    "capture/process/follow": ("Family",),
    "live/cost/mapped_elsewhere": ("MappedElsewhere",),
    "capture/probes": ("Probes",),
    "capture/probing/late_probes": ("LateProbes",),
    "capture/probing/accounts": ("Accounts",),
    "capture/probing/patience": ("Patience",),
    "capture/probing/windows": ("Window",),
    "capture/owners": ("Owners", "ThreadOwners"),
    "capture/placement": ("Placement",),
    "capture/link_room": ("LinkRoom",),
    "capture/call_prices": ("TrapPrices",),
    "capture/library_room": ("_Kept",),
    "capture/sampler": ("StackProbes",),
    "tables/collectives": ("Generations", "_Process"),
    "capture/process/names": ("KernelNames",),
    "capture/kernel_books": ("Books", "Texts", "Book"),
    "capture/reader/reader": ("Reader",),
    "capture/process/demangler": ("Demangler",),
    "cupti/names_room": ("NamesRoom",),
    "capture/process/symbols": ("Symbols",),
    "capture/bounded": ("Bounded",),
    "capture/python/code": ("CodeResolver",),
    "capture/process/threads": ("ThreadWatch",),
    "capture/process/host_cpu": ("HostCpuReader",),
    "store/writer": ("Writer",),
    "store/spill": ("Others",),
    "diagnose/follow/watch": ("Watch",),
}
"""What lives as long as the session, or as a job or process in it."""
KINDS = {"dict", "set", "list", "deque", "Tally", "Counter", "OrderedDict", "Notes"}


def containers(tree: ast.ClassDef) -> set[str]:
    """Attributes of a class that hold any number of things."""
    attributes = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.AnnAssign) or ast.unparse(node.annotation).partition("[")[0] not in KINDS:
            continue
        target = node.target
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
            attributes.add(target.attr)
        elif isinstance(target, ast.Name) and node in tree.body:
            attributes.add(target.id)
    return attributes


def rows(root: Path) -> list[list[str]]:
    text = (root / "docs" / "performance.md").read_text()
    lines = text.split("| store | at most | test |\n")[1].split("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_store_is_listed(root: Path) -> None:
    listed: set[str] = set()
    for names, _, _ in rows(root):
        for owner, attributes in re.findall(r"`([\w/]+\.\w+)`: ([^;]+)", names):
            listed |= {f"{owner}.{name}" for name in re.findall(r"\w+", attributes)}
    there = set()
    for module, classes in CLASSES.items():
        tree = ast.parse((root / "argus" / f"{module}.py").read_text())
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in classes:
                there |= {f"{module}.{node.name}.{name}" for name in containers(node)}
    assert not there - listed, "without a bound in docs/performance.md"
    assert not listed - there, "listed, and not there"


def test_each_bound_names_a_test(root: Path) -> None:
    there = set()
    for path in (root / "tests").rglob("test_*.py"):
        there |= {f"{path.stem}::{name}" for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)}
    for _, bound, tests in rows(root):
        assert bound
        named = re.findall(r"\b(test_\w+::test_\w+)", tests)
        assert named or tests == "–", tests
        assert not set(named) - there


# ---- those without a test elsewhere


def test_kernels_that_the_view_counts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    side: Any = CallSide(a_session(SimpleNamespace(append=lambda *_: None)), *[SimpleNamespace()] * 4)  # type: ignore[arg-type]
    side._probing = SimpleNamespace(count=lambda *_: None, until_ns=lambda _: 1 << 62)
    called = np.zeros(1, records.LAUNCH)
    called["pid"], called["call"] = 7, BY_SYMBOL["cuLaunchKernel"].id
    for turn in range(30):
        names = [f"kernel {turn} {number}" for number in range(1000)]
        words = pa.DictionaryArray.from_arrays(np.arange(1000, dtype=np.int32), names)
        table = pa.table({"kernel": pa.chunked_array([words])})
        monkeypatch.setattr(live_calls.launches, "to_table", lambda *_, table=table: table)
        members: Any = {7: SimpleNamespace(helper=True, launches=0)}
        side._feed_launches(Job("j", 1), members, called, np.zeros(1, np.uint32))
    assert len(side.kernel_launches) <= 2 * KEPT_NAMES


def test_early_calls_are_bounded() -> None:
    side = ProbingSide(a_session(), SimpleNamespace())  # type: ignore[arg-type]
    events = np.zeros(1000, records.COLLECTIVE)
    jobs = [Job(f"j{number}", 1) for number in range(100)]
    for job in jobs:
        for rank in range(4):
            side.feed(job, rank, events)
    kept = sum(len(part) for of_job in side._early._kept.values() for parts in of_job.values() for part in parts)
    assert kept == EARLY_CALLS
    for job in jobs:
        side.forget(job)
    assert not side._early._kept
    side.feed(jobs[0], 0, np.zeros(4 * EARLY_CALLS, records.COLLECTIVE))  # of one turn
    assert sum(map(len, side._early.take(jobs[0])[0])) == EARLY_CALLS


def test_early_calls_of_one_owner_leave_room_to_others() -> None:
    side = ProbingSide(a_session(), SimpleNamespace())  # type: ignore[arg-type]
    events = np.zeros(1000, records.COLLECTIVE)

    def kept(job: Job) -> int:
        return sum(len(part) for parts in side._early._kept.get(id(job), {}).values() for part in parts)

    flood = [Job(f"flood{number}", 1, owner=(7, f"pid:[{number}]")) for number in range(20)]
    honest, pod = Job("honest", 1, owner=(8, "")), Job("pod", 1, owner=(7, "pod"))
    for job in [*flood, honest] * 20:
        side.feed(job, 0, events)
    assert kept(honest) == 20_000
    for _ in range(3):
        side.feed(pod, 0, events)
    assert kept(pod) == 3000
    assert EARLY_CALLS - 5000 <= sum(map(kept, [*flood, honest, pod])) <= EARLY_CALLS + 1000
    # Nobody has all, whoever calls on.
    for job in [*flood, honest] * 20:
        side.feed(job, 0, events)
    assert kept(honest) >= 20_000
    assert sum(map(kept, flood)) >= 20_000
    # A job that is over makes room.
    for job in flood:
        side.forget(job)
    before = kept(honest)
    side.feed(honest, 0, events)
    assert kept(honest) == before + 1000


def test_threads_that_come_and_go_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "KEPT_THREADS", 100)
    session = Session(monkeypatch)
    process = session.side._processes.by_pid[PID]
    process.names.update({10_000_000 + number: "loader" for number in range(5000)})
    process.awake.update(process.names)
    for _ in range(8):
        process.ran = True
        session.go(20.0)
    assert len(process.names) < 200
    assert len(process.awake) < 200


def test_functions_of_files_are_bounded_by_files_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbols, "_tables", OrderedDict())
    for number in range(2 * symbols._MAX_TABLES):
        symbols._remembered(b"%d" % number, None)
    assert len(symbols._tables) == symbols._MAX_TABLES
    large: Any = SimpleNamespace(nbytes=symbols._MAX_TABLE_BYTES // 4)
    for number in range(20):
        symbols._remembered(b"large %d" % number, large)
    assert sum(table is large for table in symbols._tables.values()) == 4


def test_addresses_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbols, "_MAX_KNOWN", 1000)
    monkeypatch.setattr(symbols, "_MISS_REFRESH_NS", 1 << 62)
    its = Symbols(os.getpid())
    try:
        for first in range(0, 20_000, 500):
            its._frames(list(range(first, first + 500)))
    finally:
        its.close()
    assert len(its._known) <= 1500


def test_threads_that_launched_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correlation, "KEEP_THREADS", 100)
    correlator = Correlator()
    calls = np.zeros(10, correlation._CALL)
    for first in range(0, 2000, 10):
        calls["tid"] = np.arange(first, first + 10)
        correlator._find_probed(calls, 0)
    assert len(correlator._last_end) <= 110


def test_processes_whose_symbols_are_not_tried_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demangler, "_KEPT_SOURCES", 100)
    monkeypatch.setattr(demangler, "is_small", lambda symbol: False)
    names = demangler.Demangler()
    names._child = SimpleNamespace(begin=int, ask=lambda symbols: [(None, 0.0)] * len(symbols))  # type: ignore[assignment]
    for pid in range(1000):
        names.names([f"_Z{pid}"], pid)
    assert len(names._strikes) <= 100
    assert len(names._accounts) <= 100
    assert names.given_up == 1000


def test_accounts_are_of_processes_that_are_there() -> None:
    side = Neighbours(0.01)
    for pid in range(1000):
        side.look({pid: Spent(1, (pid, ""), 10, 1e4, 0, 1.0, 1.0), pid + 1: Spent(2, (0, ""), 10**6, 1e9, 0, 1.0, 1.0)})
    assert side._accounts.keys() == {999, 1000}
    assert len(side._heavy_s) <= 2


def test_windows_and_shares_of_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = GpuSide(a_session(), SimpleNamespace())  # type: ignore[arg-type]
    side = ProbingSide(a_session(), gpu)
    job, state = Job("j", 1), _OfJob()
    monkeypatch.setattr(job_module, "queued_ns", lambda pid: 1)
    job.members[PID] = Member(SimpleNamespace(pid=PID), 0, "order")  # type: ignore[arg-type]
    for number in range(1000):
        gpu.set_share(0.25, number, UNKNOWN)
        side._begin_span(job, state, number)
        job.note_queues()
    assert len(gpu._duties.of(UNKNOWN)._regimes) == 16
    assert len(state.spans) == 64
    assert len(job.queues[0]) == 256


def test_flags_that_were_taken_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = [10**18]
    rows: dict[str, Any] = {}
    monkeypatch.setattr(flags, "time", SimpleNamespace(time_ns=lambda: now_ns[0]))
    monkeypatch.setattr(flags, "query_columns", lambda *_, **__: rows)
    watcher = FlagWatcher(SimpleNamespace(spooled=False))  # type: ignore[arg-type]
    watcher._jobs = {("j", 1): Job("j", 1)}
    for number in range(200):
        now_ns[0] += KEPT_NS // 20
        begin = [now_ns[0] - 1000 + number]
        flag = {"job": ["j"], "run": [1], "begin_ns": begin, "end_ns": [begin[0] + 10], "why": ["x"], "asked_ms": [0]}
        rows.update({name: np.array(values, object) for name, values in flag.items()})
        rows["ranks"] = SimpleNamespace(tolist=lambda: [[]])
        watcher.ask()
        assert len(watcher.take()) == 1
    assert len(watcher._seen) <= 22
