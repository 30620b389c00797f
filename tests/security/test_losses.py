"""What the process of one user costs Argus is no loss of another user's job."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from argus.capture.process.targets import Identity
from argus.capture.python.layouts import LAYOUTS
from argus.capture.reader import left_out, progress
from argus.capture.reader.reader import Reader
from argus.cupti.collector import CollectorState
from argus.live.gpu.process import GpuProcess
from argus.live.job import Job, Member
from argus.live.options import Options
from argus.live.roster import Roster, _Candidate
from argus.live.session_rows import SessionRows
from argus.live.sides.gpu_times import GpuSide
from argus.live.tracer import Tracer
from argus.model.losses import EVERYBODY, OWNERS, Losses, Whom
from argus.store.open import open_store
from argus.store.reader import query
from tests.builders.sessions import a_session
from tests.kernel.conftest import wait_until
from tests.security.mapping_process import AS_NOBODY, NOBODY, mapping
from tests.stores import new_store

HOSTILE = Path(__file__).parent / "hostile_everything.py"
FILES = 4200
"""More than are considered of a process."""


# ---- whom a loss concerns


def test_a_loss_of_a_process_without_a_job_concerns_its_owner_s_jobs() -> None:
    losses = Losses()
    jobs = {name: Job(name, 1, owner=owner) for name, owner in {"a": (5, ""), "b": (5, "pod b"), "c": (6, "")}.items()}
    losses.count("mapped_files_unread", Whom(None, (5, "")), number=7)
    losses.count("mapped_files_unread", Whom(jobs["c"]), number=2)
    assert {name: losses.of(job)["mapped_files_unread"] for name, job in jobs.items()} == {"a": 7, "b": 0, "c": 2}
    losses.count("mapped_files_unread", number=1)
    assert {name: losses.of(job)["mapped_files_unread"] for name, job in jobs.items()} == {"a": 8, "b": 1, "c": 3}
    assert losses.totals == {"mapped_files_unread": 10}


def test_a_named_job_has_its_user_s_containers() -> None:
    losses = Losses(any_container=True)
    losses.count("memory_hung", Whom(None, (5, "pod b")))
    assert losses.of(Job("a", 1, owner=(5, "pod a"))) == {"memory_hung": 1}
    assert losses.of(Job("a", 1, owner=(6, "pod b"))) == {"memory_hung": 0}


def test_a_user_in_many_containers_costs_no_other_user() -> None:
    """Each PID namespace is a container. Of those beyond 64 it is not known which lost something."""
    losses = Losses()
    for number in range(3 * OWNERS):
        losses.count("memory_hung", Whom(None, (5, f"pid:[{number}]")))
    for uid in (6, 7):
        losses.count("memory_hung", Whom(None, (uid, "")))
        losses.count("memory_hung", Whom(None, (uid, "pod")))
    assert losses.of(Job("honest", 1, owner=(6, ""))) == {"memory_hung": 1}
    assert losses.of(Job("honest", 1, owner=(8, ""))) == {"memory_hung": 0}
    assert losses.of(Job("first", 1, owner=(5, "pid:[0]"))) == {"memory_hung": 1 + 3 * OWNERS - 64}
    assert losses.of(Job("last", 1, owner=(5, f"pid:[{3 * OWNERS - 1}]"))) == {"memory_hung": 3 * OWNERS - 64}
    assert losses.totals["memory_hung"] == 3 * OWNERS + 4
    assert len(losses._of_owner) == 65 + 4
    # What was none after all goes from where it was counted.
    losses.count("memory_hung", Whom(None, (5, "pid:[99]")), number=-1)
    assert losses.of(Job("first", 1, owner=(5, "pid:[0]"))) == {"memory_hung": 3 * OWNERS - 64}


def test_users_in_many_containers_leave_accounts_to_others() -> None:
    losses = Losses()
    for number in range(100):
        for uid in range(100):
            losses.count("memory_hung", Whom(None, (uid, f"pid:[{number}]")))
    for uid in range(100, 200):
        losses.count("memory_hung", Whom(None, (uid, "")))
    assert {losses.of(Job("j", 1, owner=(uid, "")))["memory_hung"] for uid in range(100, 200)} == {1}
    assert losses.of(Job("j", 1, owner=(300, ""))) == {"memory_hung": 0}
    assert losses.totals["memory_hung"] == 100 * 100 + 100


def test_losses_of_who_has_gone_are_forgotten() -> None:
    """Those of owners of whom neither a process nor a job is there: a user who comes and goes fills no table."""
    session = a_session(run=1)
    there = {(2, ""), (3, "pod"), (4, "*")}
    session.probes = MagicMock()
    session.probes.owners.there.return_value = there
    roster = session.roster = Roster(session, MagicMock())
    roster.jobs.append(Job("kept", 1, owner=(1, "")))
    everyone = [(1, ""), (2, ""), (3, "pod"), (4, "pod"), (3, "*"), (3, "gone"), (5, "*")]
    for owner in everyone:
        session.losses.count("memory_hung", Whom(None, owner))
    roster.retire([])
    assert len(session.losses._of_owner) == 7, "there is room"
    for uid in range(100, 100 + OWNERS):
        session.losses.count("memory_hung", Whom(None, (uid, "")))
    roster.retire([])
    assert session.losses._of_owner.keys() == {(1, ""), (2, ""), (3, "pod"), (4, "pod"), (3, "*")}
    assert session.losses.totals["memory_hung"] == 7 + OWNERS
    session.losses.count("memory_hung", Whom(None, (9, "")))
    assert session.losses.of(Job("new", 1, owner=(9, "")))["memory_hung"] == 1 + 7  # beyond 1,024 they were anybody's


def test_a_file_of_two_jobs_is_one_loss_of_each() -> None:
    losses = Losses()
    one, other = Job("one", 1, owner=(5, "")), Job("other", 1, owner=(6, ""))
    losses.count("attach_failed", Whom(one), Whom(one), Whom(other))
    assert (losses.totals["attach_failed"], losses.of(one), losses.of(other)) == (
        1, {"attach_failed": 1}, {"attach_failed": 1},
    )  # fmt: skip


def a_target(pid: int, owner: tuple[int, str]) -> Any:
    identity = Identity(-1, 0, -1, "j", "unknown", "", *owner)
    return SimpleNamespace(pid=pid, start_ticks=1, identity=identity, on_gpu=True, libraries=[])


def test_whom_a_loss_of_a_process_concerns() -> None:
    """Its job; the owner of a candidate; of a child that has ended, whoever forked it."""
    session = a_session(run=1)
    session.probes = MagicMock()
    roster = session.roster = Roster(session, MagicMock())
    job = Job("j", 1, owner=(5, "pod"))
    gone = [(1 << 22) + number for number in range(4)]
    roster.by_pid[gone[0]] = job, Member(a_target(gone[0], (5, "pod")), 0, "order")
    roster._candidates[gone[1]] = _Candidate(0.0, a_target(gone[1], (6, "")))
    roster.family._parents |= {gone[2]: gone[0], gone[3]: gone[2]}
    assert session.whom(gone[0]) == Whom(job)
    assert session.whom(gone[1]) == Whom(None, (6, ""))
    assert session.whom(gone[2]) == session.whom(gone[3]) == Whom(None, (5, "pod"))
    assert session.whom(os.getpid()) == Whom(None, (os.geteuid(), ""))
    assert session.whom(gone[3] + 1) == EVERYBODY


def test_files_that_wait_to_be_read_are_counted_for_who_maps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a candidate becomes a rank, and for good when it ends."""
    session = a_session(run=1)
    session.probes = MagicMock()
    roster = session.roster = Roster(session, MagicMock())
    job, pid = Job("j", 1, owner=(5, "")), 1 << 22
    roster._candidates[pid] = _Candidate(0.0, a_target(pid, (5, "")))
    libraries = roster._libraries
    libraries._count(pid, {"mapped_files_unread": 300})
    assert session.losses.of(job) == {"mapped_files_unread": 300}
    del roster._candidates[pid]
    roster.by_pid[pid] = job, Member(a_target(pid, (5, "")), 0, "order")
    libraries._count(pid, {"mapped_files_unread": 200})
    assert (session.losses.of(job), job.losses["mapped_files_unread"]) == ({"mapped_files_unread": 200}, 200)
    libraries.forget(pid)
    assert session.losses.totals["mapped_files_unread"] == 200
    libraries._count(pid, {"mapped_files_unread": 0})
    assert session.losses.totals["mapped_files_unread"] == 200


def test_gpu_times_that_fail_are_no_loss_of_another_job() -> None:
    session = a_session(run=1)
    side = GpuSide(session, MagicMock())
    jobs = [Job(name, 1, owner=(uid, "")) for name, uid in (("hostile", NOBODY), ("honest", 0))]
    for number, job in enumerate(jobs):
        target = a_target(number + 1, job.owner)
        process = GpuProcess(target, 0.0)
        process.job, process.member = job, Member(target, 0, "order")
        collector = MagicMock(state=CollectorState.ON if number else CollectorState.FAILED)
        collector.counters.return_value = {
            "cupti_bytes_unknown": (0 if number else 9, True),
            "cupti_records": (1, False),
        }
        process.program = MagicMock(collector=collector)
        process.program.correlator.counters = {}
        side._processes.append(process)
    assert side.counters()["cupti_bytes_unknown"] == (9, True)
    assert [side.own_losses(job)["cupti_bytes_unknown"] for job in jobs] == [9, 0]
    assert [side.own_losses(job)["gpu_times_failed"] for job in jobs] == [1, 0]
    assert "cupti_records" not in side.own_losses(jobs[0])
    process = side._processes[0]
    side._count(process, process.program)  # type: ignore[arg-type]
    process.over = True
    assert [side.own_losses(job)["cupti_bytes_unknown"] for job in jobs] == [9, 0]


def test_a_job_s_coverage_has_its_own_in_the_place_of_all() -> None:
    rows: list[dict[str, Any]] = []
    writer = SimpleNamespace(append=lambda table, columns: rows.append(columns))
    jobs = [Job("hostile", 1, owner=(5, "")), Job("honest", 1, owner=(6, ""))]
    session = a_session(writer, jobs=jobs, run=1)
    session.losses.count("python_lists_cut", Whom(jobs[0]), number=3)
    counters = {"python_lists_cut": (3, True), "launches_dropped": (1, True)}
    SessionRows(session).write_coverage(counters, 0, lambda pid: 0, [], jobs)
    found = [dict(zip(row["counter"], row["value"].tolist(), strict=True)) for row in rows]
    assert [row["python_lists_cut"] for row in found] == [3, 0]
    assert [row["launches_dropped"] for row in found] == [1, 1]


# ---- what the reader reports


def test_a_reader_s_losses_are_of_the_process_that_was_asked_for() -> None:
    found: list[tuple[object, ...]] = []
    reader = Reader()
    reader.on_loss = lambda *loss: found.append(loss)
    reader._dead = {"08:01": 1.0}
    reader._note(7, {"left_out": [["python_lists_cut", 2]], "missed": ["08:01"]})
    assert found == [("python_lists_cut", 7, 2, ""), ("file_systems_hung", 7, 1, "08:01")]
    found.clear()
    for nonsense in (
        [["processes_quarantined", 1]],
        [["mappings_cut", -1]],
        [["mappings_cut", True]],
        [[[], 1]],
        5,
        [5],
    ):
        reader._note(7, {"left_out": nonsense, "missed": [["08:01"], "08:02", 3]})
    assert found == []
    for _ in range(3):
        reader._strike(7)
    assert found == [("processes_unreadable", 7, 1, "")]


def test_a_dead_file_system_that_would_have_been_opened_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    of_owner, of_process = progress.of_owner("08:01", (7, "pod 1")), progress.of_process(progress.PATHS, 9)
    monkeypatch.setattr(progress, "dead", {of_owner, of_process})
    monkeypatch.setattr(progress, "missed", set())
    for others in ((8, "pod 1"), (7, "pod 2"), (7, "")):
        monkeypatch.setattr(progress, "owner", others)
        progress.file("08:01")
    monkeypatch.setattr(progress, "owner", (7, "pod 1"))
    progress.file("08:02")
    progress.look_up()
    assert progress.missed == set()
    with pytest.raises(TimeoutError):
        progress.file("08:01")
    assert progress.missed == {of_owner}
    monkeypatch.setattr(progress, "process", 9)
    with pytest.raises(TimeoutError):
        progress.look_up()
    assert progress.missed == {of_owner, of_process}


def test_what_is_left_out_is_counted_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(left_out, "_MOST", 2)
    left_out.take()
    for pid in (1 << 22, (1 << 22) + 1, (1 << 22) + 2):
        left_out.count_once("mappings_cut", pid)
        left_out.count_once("mappings_cut", pid)
    assert left_out.take() == [("mappings_cut", 1 << 22, 1), ("mappings_cut", (1 << 22) + 1, 1), ("mappings_cut", 0, 1)]
    assert left_out.take() == []


# ---- a whole trace


@contextlib.contextmanager
def forging(folder: Path) -> Iterator[int]:
    """A process of nobody's with thread states that are none, of another job."""
    program = folder / HOSTILE.name
    shutil.copy(HOSTILE, program)
    python = os.path.realpath("/usr/bin/python3")
    version = subprocess.check_output([python, "-c", "import sys; print(*sys.version_info[:2])"], text=True)
    layout = LAYOUTS[tuple(map(int, version.split()))]  # type: ignore[index]
    offsets = (layout.interp_head, layout.threads_head, layout.thread_next, layout.thread_frame)
    words = ["nice", "-n", "19", *AS_NOBODY, python, "-I", str(program), "lists", str(folder), str(folder)]
    environment = {"PATH": os.environ["PATH"], "OFFSETS": ",".join(map(str, offsets)), "JOB_NAME": "hostile"}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process.pid
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that anybody may read."""
    path = Path(tempfile.mkdtemp(prefix="argus-hostile-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.mark.kernel
def test_a_hostile_user_s_process_makes_no_other_job_s_coverage_incomplete(folder: Path, tmp_path: Path) -> None:
    files = [folder / f"{number}.so" for number in range(FILES)]
    for number, path in enumerate(files):
        path.write_bytes(b"no library" + number.to_bytes(4, "little"))
    honest_program = [sys.executable, "-I", "-c", "print(flush=True)\nwhile True: sum(range(1000))"]
    url = new_store(tmp_path)
    with (
        forging(folder) as forger,
        mapping(files, ("prlimit", "--nofile=8192", "env", "JOB_NAME=hostile", *AS_NOBODY)) as mapper,
        subprocess.Popen(honest_program, stdout=subprocess.PIPE, env={**os.environ, "JOB_NAME": "honest"}) as honest,
    ):
        try:
            assert honest.stdout is not None
            honest.stdout.readline()
            tracer = Tracer(open_store(url), Options(pids=(forger, mapper, honest.pid), stacks=True, cupti="off"))
            tracer.start()
            try:

                def both() -> bool:
                    tracer.poll()
                    return {"python_lists_cut", "mapped_files_unread"} <= tracer.lost().keys()

                wait_until(both, 60, "losses of both kinds")
            finally:
                total = tracer.stop()
        finally:
            honest.kill()
    with open_store(url) as store:
        rows = query(store, "SELECT job, counter, value FROM coverage FINAL WHERE loss AND value > 0").to_pylist()
    of_honest = {row["counter"]: row["value"] for row in rows if row["job"] == "honest"}
    of_hostile = {row["counter"]: row["value"] for row in rows if row["job"].startswith("hostile")}
    assert of_honest == {}
    assert {"python_lists_cut", "mapped_files_unread"} <= of_hostile.keys() <= total.keys()
