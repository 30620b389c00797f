"""Stacks of real Python programs, traced and looked at by the command line: no GPU in it at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from argus.store.open import open_store
from argus.store.reader import query
from tests.e2e.conftest import ARGUS, Argus, pid_words, start_trace
from tests.kernel.conftest import wait_until
from tests.stores import new_store

pytestmark = pytest.mark.kernel

PROGRAMS = Path(__file__).with_name("programs")
PATIENCE_S = 150.0
"""On a machine that is very busy."""


@contextmanager
def program(name: str, *words: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A program of ``PROGRAMS`` that has printed that it is ready."""
    running = subprocess.Popen(
        [sys.executable, str(PROGRAMS / name), *words],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        yield running
    finally:
        running.kill()
        running.wait()


def rows(url: str, text: str) -> list[dict[str, Any]]:
    with open_store(url) as store:
        return query(store, text).to_pylist()


def dump(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*ARGUS, "dump", *words], capture_output=True, text=True, timeout=90, check=False)


def traced_until(url: str, pids: list[int], condition: str, *words: str) -> str:
    """Traces until a query gives true, and returns what the trace printed."""
    tracing = start_trace(url, *pid_words(pids), *words)

    def there() -> bool:
        assert tracing.poll() is None, tracing.stdout.read()  # type: ignore[union-attr]
        try:
            return bool(next(iter(rows(url, f"SELECT {condition} AS found")[0].values())))
        except Exception:  # the store is not there yet
            return False

    try:
        wait_until(there, PATIENCE_S, condition)
        tracing.terminate()
        output, _ = tracing.communicate(timeout=PATIENCE_S)
    finally:
        tracing.kill()
        tracing.wait()
    assert tracing.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, int]:
    """A traced run of busy.py: the store's URL, what the trace printed, and the process."""
    folder = tmp_path_factory.mktemp("busy")
    url = new_store(folder)
    with program("busy.py", str(folder / "stop")) as running:
        output = traced_until(
            url,
            [running.pid],
            "(SELECT count() FROM gc_pauses) > 0 AND (SELECT sum(count) FROM stack_samples WHERE kind = 'cpu') > 60"
            " AND (SELECT count() FROM off_cpu_by_reason WHERE reason = 'sleep') > 0"
            " AND (SELECT count() FROM thread_usage) > 0",
        )
        return url, output, running.pid


def test_the_hottest_line_is_where_the_program_computes(busy: tuple[str, str, int]) -> None:
    url, _, _ = busy
    hot = rows(
        url, "SELECT function, file, sum(self_ns) AS ns FROM hot_lines WHERE kind = 'cpu' GROUP BY ALL ORDER BY ns DESC"
    )
    assert hot[0]["function"] == "inner"
    assert hot[0]["file"] == str(PROGRAMS / "busy.py")
    stacks = rows(url, "SELECT functions, python FROM stacks WHERE has(functions, 'inner')")
    assert stacks
    for stack in stacks:
        assert stack["python"] == "complete"
        assert stack["functions"][:3] == ["<module>", "outer", "inner"]


def test_a_sleep_is_reported_with_its_line_and_reason(busy: tuple[str, str, int]) -> None:
    url, _, pid = busy
    found = rows(
        url,
        "SELECT s.python_function AS function, median(max_ns) AS usual, any(pid) AS process, any(tid) AS thread_id "
        "FROM stack_samples LEFT ANY JOIN stacks AS s USING (job, run, stack_id) "
        "WHERE kind = 'off' AND reason = 'sleep' AND stack_id != 0 GROUP BY function",
    )
    assert [row["function"] for row in found] == ["sleeps_again_and_again"]
    assert found[0]["usual"] >= 20_000_000
    assert found[0]["process"] == pid != found[0]["thread_id"]


def test_garbage_collections_are_pauses_in_the_right_place(busy: tuple[str, str, int]) -> None:
    url, _, pid = busy
    found = rows(
        url,
        "SELECT duration_ns, uncertainty_ns, tid, s.functions AS functions FROM gc_pauses "
        "LEFT ANY JOIN stacks AS s USING (job, run, stack_id)",
    )
    for pause in found:
        assert pause["tid"] == pid
        assert "collects" in pause["functions"]
        assert 0 < pause["duration_ns"] < 3_000_000_000


def test_the_trace_says_how_sampling_went(busy: tuple[str, str, int]) -> None:
    url, output, _ = busy
    (line,) = [line for line in output.splitlines() if line.startswith("stacks: ")]
    assert "samples" in line
    assert "times off the CPU" in line
    counters = {row["counter"]: row for row in rows(url, "SELECT counter, value, loss FROM coverage FINAL")}
    samples = rows(url, "SELECT sum(count) AS n FROM stack_samples WHERE kind = 'cpu'")[0]["n"]
    assert counters["stack_samples"]["value"] == samples > 0
    assert counters["gc_collections_generation_2"]["value"] > 0
    assert f"{samples:,} samples" in line
    states = {row["feature"]: row["state"] for row in rows(url, "SELECT feature, state FROM features FINAL")}
    assert states["python_stacks"] == states["sampling"] == states["off-cpu"] == "on"


def test_threads_account_for_their_time(busy: tuple[str, str, int]) -> None:
    url, _, pid = busy
    usage = rows(
        url,
        "SELECT tid, sum(cpu_ns) AS cpu, sum(interval_ns) AS wall, any(thread) AS name FROM thread_usage GROUP BY tid",
    )
    main = next(row for row in usage if row["tid"] == pid)
    assert len(usage) == 2
    assert 0 < main["cpu"] <= main["wall"] * 1.1
    assert all(row["cpu"] < main["cpu"] for row in usage if row is not main)
    assert main["name"].startswith("python")


def test_a_job_that_hung_before_argus_came_is_seen(argus: Argus, store_url: str) -> None:
    with (
        program("hang.py", RANK="0", WORLD_SIZE="3") as first,
        program("hang.py", RANK="1", WORLD_SIZE="3") as second,
        program("hang.py", "odd", RANK="2", WORLD_SIZE="3") as odd,
    ):
        pids = [first.pid, second.pid, odd.pid]
        traced_until(store_url, pids, "uniqExact(rank, tid) = 9 FROM stack_samples")
        shown = json.loads(argus("stacks", "--format", "json").stdout)
        text = argus("stacks").stdout
        instant = dump(*pid_words(pids)).stdout
        threads = json.loads(dump(*pid_words(pids), "--format", "json").stdout)["threads"]
    assert shown
    for picture in (text, instant):
        assert "waits_in_a_barrier" in picture
        assert "sleeps" in picture
        assert "0,1" in picture
    reasons = {
        (thread["rank"], frame["function"]): thread["reason"]
        for thread in threads
        for frame in thread["frames"]
        if frame["file"].endswith("hang.py")
    }
    for rank in (0, 1, 2):
        assert reasons[(rank, "waits_for_a_lock")] == "futex"
        assert reasons[(rank, "waits_for_data")] == "read"
    assert reasons[(2, "sleeps")] == "sleep"
    assert reasons[(0, "waits_in_a_barrier")] == "futex"
    assert {thread["state"] for thread in threads} == {"waiting"}
    assert {thread["python"] for thread in threads} == {"complete"}


def test_dump_shows_threads_that_run_and_those_that_do_not(tmp_path: Path) -> None:
    with program("busy.py", str(tmp_path / "stop")) as running:
        threads = json.loads(dump("--pid", str(running.pid), "--format", "json").stdout)["threads"]
        main = next(thread for thread in threads if thread["tid"] == running.pid)
        other = next(thread for thread in threads if thread["tid"] != running.pid)
        assert main["frames"][0]["function"] == "<module>"
        assert any(frame["function"] in ("inner", "outer", "collects") for frame in main["frames"])
        assert any(frame["function"] == "sleeps_again_and_again" for frame in other["frames"])
        text = dump("--pid", str(running.pid))
        assert text.returncode == 0
        assert f"process {running.pid}" in text.stdout
    gone = dump("--pid", str(running.pid))
    assert gone.returncode == 3
    assert gone.stderr.startswith(f"argus: there is no process {running.pid}\n")
    assert "Traceback" not in gone.stderr


def test_a_stopped_process_is_dumped_as_stopped(tmp_path: Path) -> None:
    with program("busy.py", str(tmp_path / "stop")) as running:
        running.send_signal(19)
        wait_until(lambda: " T " in Path(f"/proc/{running.pid}/stat").read_text(), what="the process to stop")
        threads = json.loads(dump("--pid", str(running.pid), "--format", "json").stdout)["threads"]
    assert {thread["state"] for thread in threads} == {"stopped"}
    assert all(thread["frames"] for thread in threads)


def test_exec_begins_anew(tmp_path: Path, store_url: str) -> None:
    """Its frames are those of the program that runs, before and after."""
    stop = tmp_path / "stop"
    after = str(PROGRAMS / "hang.py")
    with program("busy.py", str(stop), after) as running:
        # What is not observed since it costs too much on a busy machine is not what this is about.
        tracing = start_trace(store_url, "--pid", str(running.pid), "--max-overhead", "100")
        try:

            def seen(file: str) -> bool:
                try:
                    text = f"SELECT count() AS n FROM stacks WHERE has(files, '{file}')"
                    return bool(rows(store_url, text)[0]["n"])
                except Exception:  # the store is not there yet
                    return False

            wait_until(lambda: seen(str(PROGRAMS / "busy.py")), PATIENCE_S, "stacks of the first program")
            stop.touch()
            wait_until(lambda: seen(after), PATIENCE_S, "stacks of the second program")
            tracing.terminate()
            output, _ = tracing.communicate(timeout=PATIENCE_S)
        finally:
            tracing.kill()
            tracing.wait()
    assert "coverage: complete" in output, output
    mixed = rows(
        store_url,
        f"SELECT functions FROM stacks WHERE has(files, '{after}') AND has(files, '{PROGRAMS / 'busy.py'}')",
    )
    assert mixed == []
    assert rows(store_url, "SELECT value FROM coverage FINAL WHERE counter = 'stack_execs'")[0]["value"] == 1


def test_a_launcher_s_children_on_cpus_are_ranks(tmp_path: Path, store_url: str, argus: Argus) -> None:
    script = " ".join(
        f"RANK={rank} WORLD_SIZE=2 LOCAL_RANK={rank} {sys.executable} {PROGRAMS / 'busy.py'} {tmp_path / 'stop'} &"
        for rank in range(2)
    )
    launcher = subprocess.Popen(["sh", "-c", f"{script} wait"], stdout=subprocess.DEVNULL)
    try:
        refused = argus("trace", "--pid", str(launcher.pid))
        if refused.returncode == 3:  # its children had begun
            assert "--children" in refused.stderr
        traced_until(
            store_url,
            [launcher.pid],
            "(SELECT uniqExact(rank) FROM stack_samples WHERE kind = 'cpu') = 2",
            "--children",
        )
    finally:
        (tmp_path / "stop").touch()
        launcher.wait(30)
    found = rows(store_url, "SELECT rank, rank_source FROM ranks FINAL ORDER BY rank")
    assert found == [{"rank": 0, "rank_source": "torchrun"}, {"rank": 1, "rank_source": "torchrun"}]


def test_no_stacks_is_as_before(argus: Argus, tmp_path: Path) -> None:
    with program("busy.py", str(tmp_path / "stop")) as running:
        refused = argus("trace", "--pid", str(running.pid), "--no-stacks")
    assert refused.returncode == 3
    assert "maps none of libcuda" in refused.stderr
