"""``argus trace`` on running processes: attach by PID, end in every way a trace can end, and leave nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from run import BUILD, Job

from argus.capture.process.elf import Elf
from argus.capture.process.targets import executable_mappings, find_libraries
from argus.store.open import open_store
from argus.store.reader import query_columns
from tests.e2e.conftest import Argus, Log, attached, pid_words, start_trace, wait_for_silence
from tests.kernel.conftest import wait_for_cuda, wait_until
from tests.lacking import needs_mounts
from tests.stores import new_store

pytestmark = pytest.mark.kernel


# Host stubs are named by their symbol. A function the program looked up before the trace began has no name to be found.
UNNAMED = "SELECT countIf(call LIKE 'cuda%' AND startsWith(kernel, 'kernel@')) AS n FROM launches"


def breakpoints(pid: int) -> list[str]:
    """Functions of a process whose first byte in memory is not that of its file: where a probe sits."""
    found = []
    with open(f"/proc/{pid}/mem", "rb") as memory:
        for library in find_libraries(pid):
            mappings = [m for m in executable_mappings(pid) if (m.device, m.inode) == (library.device, library.inode)]
            with open(library.open_path, "rb") as file:
                for symbol, offset in library.offsets.items():
                    file.seek(offset)
                    expected = file.read(1)
                    for mapping in mappings:
                        if mapping.offset <= offset < mapping.offset + mapping.end - mapping.start:
                            memory.seek(mapping.start + offset - mapping.offset)
                            if memory.read(1) != expected:
                                found.append(symbol)
    return found


ALL = ("--max-overhead", "100")
"""Where coverage is to be complete: on a busy machine following threads off the CPU may cost more than the budget."""


def count(store_url: str, sql: str) -> int:
    with open_store(store_url, create=False) as store:
        return int(query_columns(store, sql)["n"][0])


@pytest.mark.alone  # a machine that is busy with other tests may slow one rank down, and Argus says so
def test_a_running_job_is_traced_and_diagnosed(argus: Argus, store_url: str, tmp_path: Path) -> None:
    log = tmp_path / "steps-{rank}"
    with Job(ranks=4, args=["--log", str(log)]) as job:
        wait_for_cuda(job.pids)
        done = argus("trace", *pid_words(job.pids), "--steps", "70")
        assert done.returncode == 0, done.stderr
        assert [breakpoints(pid) for pid in job.pids] == [[], [], [], []]
        assert job.poll() == [None] * 4
    assert "coverage: complete, nothing was lost" in done.stdout
    assert "rank 3: process" in done.stdout
    assert "libnccl.so.2 (24 functions)" in done.stdout
    verdict = json.loads(argus("diagnose", "--format", "json").stdout)
    assert (verdict["status"], verdict["findings"], verdict["ranks"]) == ("healthy", [], 4)
    assert verdict["coverage"] == {"complete": True, "dropped": {}, "ended": True}
    ran_on = "SELECT count() AS n FROM environments FINAL WHERE facts['kernel.release'] != '' AND digest != 0"
    assert count(store_url, ran_on) == 4
    used = "SELECT min(job_ns) > 0 AND min(busy_ns) > 0 AND max(busy_ns) <= max(interval_ns * cpus) AS n"
    assert count(store_url, f"{used} FROM host_usage") == 1
    steps = json.loads(
        argus("sql", "SELECT rank, count() n, median(duration_ns) d FROM iterations GROUP BY rank ORDER BY rank",
              "--format", "json").stdout
    )  # fmt: skip
    own = [
        [json.loads(line) for line in Path(str(log).format(rank=rank)).read_text().splitlines()] for rank in range(4)
    ]
    assert [row["rank"] for row in steps] == [0, 1, 2, 3]
    when = "SELECT toUnixTimestamp64Nano(min(ts)) - any(j.mono_offset_ns) AS begin, begin + sum(duration_ns) AS until"
    traced = f"{when} FROM iterations AS i CROSS JOIN (SELECT mono_offset_ns FROM jobs FINAL) AS j WHERE rank = 0"
    (window,) = json.loads(argus("sql", traced, "--format", "json").stdout)
    for row in steps:
        # Of the traced time only: on a busy machine steps take longer at times.
        lengths = sorted(
            step["end_ns"] - step["start_ns"]
            for step in own[row["rank"]]
            if "end_ns" in step and window["begin"] <= step["start_ns"] <= window["until"]
        )
        assert len(lengths) == pytest.approx(row["n"], abs=3)
        assert row["n"] > 60
        # the program's steps are cut elsewhere than Argus's, so only the typical length can agree
        assert row["d"] == pytest.approx(lengths[len(lengths) // 2], rel=0.05)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_trace_in_good_order(store_url: str, tmp_path: Path, how: signal.Signals) -> None:
    log = Log(tmp_path, 2)
    with Job(ranks=2, args=log.args) as job:
        wait_for_cuda(job.pids)
        tracing = start_trace(store_url, *pid_words(job.pids), *ALL)
        attached(tracing)
        log.wait_for_steps(10)
        tracing.send_signal(how)
        output, _ = tracing.communicate(timeout=60)
        assert tracing.returncode == 0
        assert "coverage: complete" in output
        assert "next: argus diagnose" in output
        assert breakpoints(job.pids[0]) == []
    assert count(store_url, "SELECT count() AS n FROM launches") > 1000
    assert count(store_url, "SELECT count() AS n FROM jobs FINAL WHERE ended IS NOT NULL") == 1


def test_killing_argus_leaves_no_probe_and_a_sound_store(argus: Argus, store_url: str) -> None:
    with Job(ranks=2) as job:
        wait_for_cuda(job.pids)
        tracing = start_trace(store_url, *pid_words(job.pids))
        attached(tracing)
        assert "cudaLaunchKernel" in breakpoints(job.pids[0]), "the check itself must see probes that are there"
        launches = "SELECT count() AS n FROM launches"
        wait_until(lambda: count(store_url, launches) > 1000, 60, "launches in the store")
        tracing.kill()
        tracing.communicate(timeout=60)
        wait_until(lambda: breakpoints(job.pids[0]) == [], what="the kernel to take the probes away")
        assert breakpoints(job.pids[1]) == []
        assert job.poll() == [None, None]
        before = count(store_url, launches)
        assert before > 1000
        assert count(store_url, "SELECT count() AS n FROM jobs FINAL WHERE ended IS NULL") == 1
        again = argus("trace", *pid_words(job.pids), "--steps", "10", *ALL)
        assert again.returncode == 0, again.stderr
        assert "coverage: complete" in again.stdout
    assert count(store_url, launches) > before


def test_targets_that_end_while_traced_are_reported(argus: Argus, store_url: str, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with Job(ranks=2, args=["--steps", "40", "--go", str(go)]) as job:
        wait_for_cuda(job.pids)
        tracing = start_trace(store_url, *pid_words(job.pids), *ALL)
        attached(tracing)
        go.touch()
        output, _ = tracing.communicate(timeout=60)
        assert job.wait(10) == [0, 0]
    assert tracing.returncode == 0
    assert f"ended meanwhile: processes {job.pids[0]}, {job.pids[1]}" in output
    assert "coverage: complete" in output
    assert count(store_url, "SELECT uniqExact(rank) AS n FROM ranks FINAL WHERE state = 'exited'") == 2
    # all calls up to the last one are there: 4 buckets a step
    assert count(store_url, "SELECT count() AS n FROM collectives WHERE op = 'AllReduce'") == 2 * 40 * 4


def test_a_target_killed_inside_a_call_leaves_that_call_unfinished(store_url: str, tmp_path: Path) -> None:
    log = Log(tmp_path, 1)  # rank 0's
    with Job(ranks=2, args=log.args) as job:
        wait_for_cuda(job.pids)
        tracing = start_trace(store_url, *pid_words(job.pids))
        attached(tracing)
        log.wait_for_steps(5)
        job.processes[1].kill()
        # its peer now waits for ever in the next synchronise
        wait_for_silence(log, 1)
        tracing.send_signal(signal.SIGINT)
        output, _ = tracing.communicate(timeout=60)
        assert tracing.returncode == 0, output
    waiting = "SELECT count() AS n FROM launches WHERE kind = 'sync' AND duration_ns = -1 AND rank = 0"
    assert count(store_url, waiting) == 1


def test_wrong_pids_get_a_line_each(argus: Argus, store_url: str) -> None:
    idle = subprocess.Popen(["sleep", "30"])
    try:
        for pid, words, *more in (
            ("4194303", "there is no process 4194303"),
            ("2", "process 2 is a kernel thread"),
            (str(idle.pid), "maps none of libcuda, libcudart and libnccl", "--no-stacks"),
        ):
            done = argus("trace", "--pid", pid, "--duration", "1", *more)
            assert done.returncode == 3
            assert words in done.stderr
            assert "Traceback" not in done.stderr + done.stdout
            first, *others = done.stderr.splitlines()
            assert first == f"argus: attaching to process {pid} …"
            assert len(others) <= 2
    finally:
        idle.kill()
        idle.wait()
    nothing = argus("trace")
    assert nothing.returncode == 2
    assert "nothing to trace" in nothing.stderr


def test_without_privileges_it_says_sudo(store_url: str) -> None:
    with Job(ranks=1) as job:
        wait_for_cuda(job.pids)
        script = (
            "import os, sys\n"
            "import argus.cli.trace\n"
            "from argus.cli.main import main\n"
            "os.setgid(65534); os.setuid(65534)\n"  # after the imports: the source may lie in root's home
            "sys.exit(main(sys.argv[1:]))"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, "trace", "--pid", str(job.pids[0])],
            capture_output=True, text=True, check=False, env={**os.environ, "HOME": "/nonexistent"},
        )  # fmt: skip
        assert done.returncode == 3
        assert "belongs to root and cannot be inspected" in done.stderr
        assert "sudo" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_launcher_s_children_are_followed_from_their_first_call(store_url: str, tmp_path: Path) -> None:
    """Traced before its ranks exist. The first ones load libraries that have no probes yet, and are reported as probed
    late; of those that come after them (a restarted job) nothing is missed."""
    go, again = tmp_path / "go", tmp_path / "again"
    job = [sys.executable, str(BUILD.parent.parent / "tests/fakegpu/run.py"), "--ranks", "3", "--"]
    script = f"""import os, signal, subprocess, time
while not os.path.exists({str(go)!r}): time.sleep(0.01)
first = subprocess.Popen({job!r}, start_new_session=True)
while not os.path.exists({str(again)!r}): time.sleep(0.01)
os.killpg(first.pid, signal.SIGKILL)
first.wait()
subprocess.run({[*job, "--exact", "211", "47", "--hold", "1"]!r}, check=True)
"""
    launcher = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL)
    try:
        tracing = start_trace(store_url, "--pid", str(launcher.pid), "--children", "--duration", "40")
        assert tracing.stdout is not None
        while (line := tracing.stdout.readline()).startswith("argus: "):
            pass  # what takes time
        assert "no rank yet" in line
        assert "waiting for children" in tracing.stdout.readline()
        go.touch()
        followed = 0
        while followed < 3:
            line = tracing.stdout.readline()
            assert line, "it ended"
            followed += "following process" in line
        again.touch()
        assert launcher.wait(60) == 0
        output, _ = tracing.communicate(timeout=60)
    finally:
        launcher.kill()
        launcher.wait()
    assert tracing.returncode == 0, output
    assert "probed after " in output
    with open_store(store_url) as store:
        ranks = query_columns(
            store,
            "SELECT pid, any(rank) AS r, countIf(call = 'cudaLaunchKernel' AND NOT in_nccl) AS n FROM launches "
            "WHERE run = (SELECT max(run) FROM launches) GROUP BY pid ORDER BY r",
        )
    assert ranks["r"].tolist() == [0, 1, 2], output
    assert "before they were followed" not in output
    assert ranks["n"].tolist() == [211] * 3, output


def test_a_library_deleted_after_it_was_loaded_is_traced(argus: Argus, store_url: str, tmp_path: Path) -> None:
    copy = tmp_path / "gone"
    shutil.copytree(BUILD, copy, ignore=shutil.ignore_patterns("obj"))
    with Job(ranks=2, program=copy / "fake_train") as job:
        wait_for_cuda(job.pids)
        shutil.rmtree(copy)
        done = argus("trace", *pid_words(job.pids), "--steps", "10", *ALL)
    assert done.returncode == 0, done.stderr
    assert "deleted on disk" in done.stdout
    assert "coverage: complete" in done.stdout
    assert count(store_url, "SELECT uniqExact(rank) AS n FROM launches") == 2
    assert count(store_url, UNNAMED) == 0


def test_a_process_in_another_mount_namespace_is_traced(argus: Argus, store_url: str, tmp_path: Path) -> None:
    """As in a container: its files lie at paths that do not exist for Argus."""
    needs_mounts()
    inside = tmp_path / "inside"
    inside.mkdir()
    program = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", f"mount --bind {BUILD} {inside} && exec {inside}/fake_train"],
        env={**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
    )
    try:
        wait_for_cuda([program.pid])
        assert not (inside / "fake_train").exists()
        done = argus("trace", "--pid", str(program.pid), "--steps", "10")
    finally:
        program.terminate()
        program.wait()
    assert done.returncode == 0, done.stderr
    assert f"{inside}/libcuda.so.1" in done.stdout
    assert count(store_url, "SELECT count() AS n FROM launches WHERE kind = 'kernel'") > 500
    assert count(store_url, UNNAMED) == 0


def test_two_argus_at_once_both_see_everything(argus: Argus, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with Job(ranks=2, args=["--exact", "503", "101", "--go", str(go), "--hold", "1"]) as job:
        wait_for_cuda(job.pids)
        urls = [new_store(tmp_path / str(number)) for number in (1, 2)]
        tracers = [start_trace(url, *pid_words(job.pids), *ALL) for url in urls]
        for tracing in tracers:
            attached(tracing)
        go.touch()
        for tracing in tracers:
            output, _ = tracing.communicate(timeout=60)
            assert "coverage: complete" in output
    for url in urls:
        assert count(url, "SELECT count() AS n FROM launches WHERE call = 'cudaLaunchKernel'") == 2 * 503
        assert count(url, "SELECT count() AS n FROM collectives WHERE op = 'AllReduce'") == 2 * 101


def test_bystanders_that_map_the_same_library_get_no_probes(store_url: str) -> None:
    with Job(ranks=1) as bystander, Job(ranks=1) as job:
        wait_for_cuda(bystander.pids + job.pids)
        tracing = start_trace(store_url, *pid_words(job.pids))
        output = attached(tracing)
        assert f"process {job.pids[0]}" in output[-1]
        assert breakpoints(job.pids[0])
        assert breakpoints(bystander.pids[0]) == []
        tracing.send_signal(signal.SIGINT)
        tracing.communicate(timeout=60)
    assert count(store_url, "SELECT uniqExact(pid) AS n FROM launches") == 1


@pytest.mark.alone
def test_all_gpu_finds_the_processes_that_map_libcuda(argus: Argus, store_url: str) -> None:
    with Job(ranks=2, args=["--layers", "3"]) as job:
        wait_for_cuda(job.pids)
        done = argus("trace", "--all-gpu", "--duration", "1")
        assert done.returncode == 0, done.stderr
        assert all(f"process {pid}," in done.stdout for pid in job.pids)
        named = argus("trace", "--name", "--layers 3", "--duration", "1")
        assert all(f"process {pid}," in named.stdout for pid in job.pids)
        missing = argus("trace", "--name", "no such program", "--duration", "1")
        listed = argus("trace")
        both = argus("trace", str(job.pids[0]), "-p", f"{job.pids[0]},{job.pids[1]}", "--duration", "1s")
    assert missing.returncode == 3
    assert "no process whose command line contains 'no such program'" in missing.stderr
    assert "sudo" not in missing.stderr
    # Nobody can be asked: the candidates are listed, those that train first, without their launcher.
    assert listed.returncode == 2
    rows = [line.split() for line in listed.stdout.splitlines()]
    assert rows[0] == ["pid", "rank", "job", "user", "CPU", "age", "command"]
    assert [row[:2] for row in rows if row[0] in map(str, job.pids)] == [
        [str(job.pids[0]), "0"],
        [str(job.pids[1]), "1"],
    ]
    assert "nothing to trace was named" in listed.stderr
    assert both.returncode == 0, both.stderr
    assert all(f"process {pid}," in both.stdout for pid in job.pids)


@pytest.mark.alone
def test_a_name_finds_any_program_and_not_what_runs_it(argus: Argus, store_url: str, tmp_path: Path) -> None:
    """A program in Python without CUDA, under a shell and beside ``tail`` with the script's name in their words."""
    script = tmp_path / "named_program.py"
    script.write_text("import time\nwhile True: sum(range(1000)); time.sleep(0.001)\n")
    shell = subprocess.Popen(["sh", "-c", f"{sys.executable} {script}; true"], start_new_session=True)
    tail = subprocess.Popen(["tail", "-f", str(script)], stdout=subprocess.DEVNULL)
    try:
        children = Path(f"/proc/{shell.pid}/task/{shell.pid}/children")
        wait_until(lambda: bool(children.read_text()))
        own = int(children.read_text())
        done = argus("trace", "--name", script.name, "--duration", "1")
        assert done.returncode == 0, done.stderr
        assert f"process {own}," in done.stdout
        assert "1 rank here" in done.stdout
        assert done.stdout.startswith("job named_program: ")
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        tail.kill()
        shell.wait()
        tail.wait()


def test_check_passes_where_these_tests_run(argus: Argus) -> None:
    done = argus("check", "--format", "json")
    assert done.returncode == 0, done.stdout
    answer = json.loads(done.stdout)
    assert answer["tracing"] is True
    features = {feature["name"]: feature for feature in answer["features"]}
    assert features["eBPF"]["on"]
    assert "7 of 7 calls" in features["eBPF"]["detail"]
    assert all(feature["detail"] for feature in features.values())
    assert all(feature["on"] or not feature["needed"] for feature in features.values())


def test_the_program_s_symbols_are_those_that_are_probed() -> None:
    """A guard for ``breakpoints``: it must look at the places where probes go."""
    assert Elf(BUILD / "libcudart.so.13").functions(["cudaLaunchKernel"])
