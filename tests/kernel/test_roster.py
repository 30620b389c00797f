"""Who is a rank: processes that come, go, fork, start again and share libraries while a trace runs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from argus.capture.process.targets import Target
from argus.live.choose import find_targets
from argus.live.options import Options
from argus.live.tracer import Tracer
from argus.store.open import open_store
from argus.store.reader import query
from tests.kernel.conftest import poll_until, wait_for_cuda

pytestmark = pytest.mark.kernel


@contextlib.contextmanager
def tracing(store_url: str, **options: object) -> Iterator[Tracer]:
    """With a budget so large that nothing is thinned, however long a busy machine makes a hit."""
    options = {"max_overhead": 1e6} | options
    tracer = Tracer(open_store(store_url), Options(**options))  # type: ignore[arg-type]
    tracer.start()
    try:
        yield tracer
    finally:
        tracer.lost_at_end = tracer.stop()  # type: ignore[attr-defined]


def poll_for(tracer: Tracer, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        tracer.poll()
        time.sleep(0.01)


def test_probes_are_not_doubled_when_a_bystander_ends(store_url: str, tmp_path: Path) -> None:
    """A bystander maps the libraries, so each rank has its own probes. They stay the only ones when it is gone."""
    from run import Job

    go = tmp_path / "go"
    with Job(ranks=1) as bystander, Job(ranks=2, args=["--exact", "503", "101", "--go", str(go), "--hold", "1"]) as job:
        wait_for_cuda(bystander.pids + job.pids)
        with tracing(store_url, pids=tuple(job.pids)) as tracer:
            assert {attachment.pid for attachment in tracer.attached} == set(job.pids)
            bystander.processes[0].kill()
            bystander.processes[0].wait()
            job.processes[1].kill()
            job.processes[1].wait()
            poll_until(tracer, lambda: len(tracer.live()) == 1, what="the end of a rank to be noticed")
            go.touch()
            # rank 0 waits for ever for its dead peer in its first all-reduce, but its launches come first
            poll_until(tracer, lambda: tracer.live() == [] or tracer.live()[0].launches >= 1)
            poll_for(tracer, 1.5)
            assert None not in {attachment.pid for attachment in tracer.attached}
    with open_store(store_url) as store:
        (row,) = query(
            store, "SELECT count() AS n, uniqExact(ts, tid) AS distinct FROM launches WHERE kind = 'kernel'"
        ).to_pylist()
    assert row["n"] == row["distinct"] > 0


def test_data_loader_workers_are_no_ranks(store_url: str) -> None:
    """They are forked from the ranks, map the same libraries and have the same environment."""
    from run import Job

    with Job(ranks=2, args=["--fork-workers", "2"]) as job:
        wait_for_cuda(job.pids)
        time.sleep(0.5)
        with tracing(store_url, name="--fork-workers 2") as tracer:
            poll_until(tracer, lambda: all(m.steps >= 30 for m in tracer.live()) and len(tracer.live()) == 2)
            names = [member.rank for its in tracer.jobs for member in its.ranks()]
            assert sorted(names) == [0, 1]
            assert len(tracer.jobs) == 1
    assert tracer.lost_at_end == {}  # type: ignore[attr-defined]


def test_ranks_that_start_again_are_a_new_run(store_url: str) -> None:
    import subprocess
    import sys

    from run import HERE

    command = [sys.executable, str(HERE / "run.py"), "--ranks", "2", "--", "--steps", "60"]
    script = f"import subprocess\ninput()\nfor _ in range(2): subprocess.run({command!r}, check=True)"
    launcher = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        with tracing(store_url, pids=(launcher.pid,), children=True) as tracer:
            assert launcher.stdin is not None
            launcher.stdin.write(b"begin\n")
            launcher.stdin.close()
            poll_until(tracer, tracer.done, 60, "both attempts to end")
            notes = tracer.notes()
    finally:
        launcher.kill()
        launcher.wait()
    assert [sorted(member.rank for member in job.ranks()) for job in tracer.jobs] == [[0, 1], [0, 1]]
    first, second = tracer.jobs
    assert first.name == second.name
    assert second.run > first.run
    assert any("started again" in note for note in notes)
    with open_store(store_url) as store:
        runs = query(
            store,
            "SELECT run, uniqExact(pid) AS pids, countIf(op = 'AllReduce') AS n FROM collectives "
            "GROUP BY run ORDER BY run",
        ).to_pylist()
    assert [row["run"] for row in runs] == [first.run, second.run]
    assert [row["pids"] for row in runs] == [2, 2]
    # The second attempt finds probes in place: 4 all-reduces in each of 60 steps on both ranks. The kernel lets a rank
    # through when it is forked, whether or not Argus has a CPU then.
    lost = tracer.lost_at_end  # type: ignore[attr-defined]
    assert runs[1]["n"] == 2 * 60 * 4, lost
    assert "calls_before_follow" not in lost


def test_two_jobs_of_one_name_are_kept_apart(store_url: str) -> None:
    from run import Job

    with Job(ranks=2) as small, Job(ranks=3) as large:
        wait_for_cuda(small.pids + large.pids)
        # interleaved, as a scan of /proc may find them
        pids = (small.pids[0], large.pids[0], large.pids[1], small.pids[1], large.pids[2])
        with tracing(store_url, pids=pids) as tracer:
            poll_for(tracer, 1)
    members = [sorted(member.target.pid for member in job.ranks()) for job in tracer.jobs]
    assert sorted(members) == sorted([sorted(small.pids), sorted(large.pids)])


def test_the_last_steps_of_a_job_that_is_over_are_stored_while_others_go_on(store_url: str, tmp_path: Path) -> None:
    """They were when the trace ended, and never of a job that was forgotten before. Their GPU times are, too."""
    from run import Job

    ends = "SELECT rank, max(toUnixTimestamp64Nano(ts) + duration_ns) AS ns FROM iterations WHERE job = 'short'"
    calls = "SELECT rank, max(toUnixTimestamp64Nano(ts)) AS ns FROM collectives WHERE job = 'short'"
    newest = "SELECT rank, max(step) AS step FROM {} WHERE job = 'short'"
    by_rank = " GROUP BY rank ORDER BY rank"
    go = tmp_path / "go"
    short_args = ["--steps", "40", "--go", str(go)]
    with (
        Job(1, env={"JOB_NAME": "stays"}) as stays,
        Job(2, short_args, env={"JOB_NAME": "short"}, cupti=True) as short,
    ):
        wait_for_cuda(stays.pids + short.pids)
        with tracing(store_url, pids=(*stays.pids, *short.pids)) as tracer:
            (job,) = [job for job in tracer.jobs if job.name == "short"]
            go.touch()
            poll_until(tracer, lambda: bool(job.over_since), what="the end of the job")
            kept = [len(rank.room) for rank in job.tracker._ranks.values()]
            poll_until(tracer, lambda: job.finished, what="its last steps")
            assert [len(rank.room) for rank in job.tracker._ranks.values()] == [0, 0], kept
            tracer.session.writer.flush()
            with open_store(store_url) as store:
                found = [query(store, each + by_rank).to_pylist() for each in (ends, calls)]
    assert found[0] == found[1], "a step ends with its last collective"
    assert [row["rank"] for row in found[0]] == [0, 1]
    assert min(kept) > 0
    with open_store(store_url) as store:
        of_gpus = query(store, newest.format("gpu_steps") + by_rank).to_pylist()
        assert of_gpus == query(store, newest.format("iterations") + by_rank).to_pylist()


def test_a_target_that_is_gone_before_it_is_probed_is_reported(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from run import Job

    from argus.model.errors import ArgusError

    with Job(ranks=1) as job:
        wait_for_cuda(job.pids)
        tracer = Tracer(open_store(store_url), Options(pids=tuple(job.pids)))

        def find_and_lose(options: Options, note: Callable[[str], None]) -> list[Target]:
            found = find_targets(options, note)
            job.processes[0].kill()
            job.processes[0].wait()
            return found

        monkeypatch.setattr("argus.live.tracer.find_targets", find_and_lose)
        with pytest.raises(ArgusError, match=f"process {job.pids[0]} ended before it could be probed"):
            tracer.start()


CALLING_CHILD = """
import ctypes, os, sys, time
library = ctypes.CDLL(sys.argv[1])
if os.fork():
    print("ready", flush=True)
    time.sleep(60)
end = time.monotonic() + 60
while time.monotonic() < end:
    for _ in range(5):
        library.cuCtxSynchronize()
    time.sleep(0.0001)
"""


def test_children_that_call_already_lose_nothing_when_the_trace_begins(store_url: str) -> None:
    """A launcher that maps the library has it probed at once, and with it its running children."""
    from run import BUILD

    command = [sys.executable, "-c", CALLING_CHILD, str(BUILD / "libcuda.so.1")]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"ready\n"
        # Up to 50,000 calls a second, below a process's budget (RECORDS_S), to which a reader that comes late on a busy
        # machine would hold a faster one; nor is what the governor would leave out what this is about.
        with tracing(store_url, pids=(launcher.pid,), children=True) as tracer:
            poll_until(tracer, lambda: bool(tracer.live()), what="the child's calls")
            assert [member.target.pid for member in tracer.live()] != [launcher.pid]
        assert tracer.lost_at_end == {}  # type: ignore[attr-defined]
    finally:
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
