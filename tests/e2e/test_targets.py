"""Inspecting real processes: their libraries, threads, ends, owners and descendants."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from argus.capture.process import targets
from argus.model.errors import ArgusError

pytestmark = pytest.mark.core


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={**os.environ, "RANK": "1"})
    yield process
    process.kill()
    process.wait()


def test_a_process_without_the_libraries_is_refused_by_name(sleeper: subprocess.Popen[bytes]) -> None:
    with pytest.raises(ArgusError, match=rf"process {sleeper.pid} \(python3.*maps none of libcuda") as failure:
        targets.open_target(sleeper.pid)
    assert "\n" not in str(failure.value)


def test_a_thread_leads_to_its_process() -> None:
    script = (
        "import threading, time\nt = threading.Thread(target=time.sleep, args=(30,)); t.start()\n"
        "print(t.native_id, flush=True)\nt.join()"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        thread = int(process.stdout.readline())
        with pytest.raises(ArgusError, match=f"{thread} is a thread of process {process.pid}"):
            targets.open_target(thread)
    finally:
        process.kill()
        process.wait()


def test_a_zombie_is_named_as_such() -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    try:
        with pytest.raises(ArgusError, match=f"process {process.pid} has ended"):
            targets.open_target(process.pid)
    finally:
        process.wait()


def test_the_end_of_a_process_is_noticed_even_if_its_pid_lives_on(sleeper: subprocess.Popen[bytes]) -> None:
    target = targets.inspect(sleeper.pid)
    assert target.alive()
    assert target.identity.rank == 1
    sleeper.kill()
    sleeper.wait()
    # As if the number had been given to a new process at once: the descriptor still means the old one.
    target.pid = os.getpid()
    assert not target.alive()
    target.close()


def test_a_process_in_the_midst_of_an_exec_is_waited_for() -> None:
    """Then it has neither arguments nor an environment, and would be of no rank for good."""
    for _ in range(20):
        process = subprocess.Popen(["sleep", "60"], env={**os.environ, "RANK": "1"})
        try:
            target = targets.inspect(process.pid)
            assert target.identity.rank == 1
            target.close()
        finally:
            process.kill()
            process.wait()


def test_a_loop_does_not_wait_for_an_exec(sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take as long as somebody's file system wants."""
    slept: list[float] = []
    monkeypatch.setattr(targets, "_of_memory", lambda pid, name: b"")
    monkeypatch.setattr(targets, "_is_executed", lambda pid: True)
    monkeypatch.setattr(targets.time, "sleep", slept.append)
    open_files = len(os.listdir("/proc/self/fd"))
    for wait in (False, True):
        with pytest.raises(ArgusError, match=f"process {sleeper.pid} is being executed"):
            targets.inspect(sleeper.pid, wait=wait)
        assert len(slept) == (targets.EXEC_TRIES - 1) * wait
    assert sum(slept) < 0.1
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_a_process_that_removed_its_arguments_is_not_waited_for(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever does that to many of its processes must not stop the loop."""
    monkeypatch.setattr(targets, "_of_memory", lambda pid, name: b"")
    monkeypatch.setattr(targets.time, "sleep", lambda seconds: pytest.fail("waits"))
    target = targets.inspect(sleeper.pid)
    assert (target.identity.rank, target.command) == (-1, "")
    target.close()


def test_another_start_time_is_another_process(sleeper: subprocess.Popen[bytes]) -> None:
    target = targets.inspect(sleeper.pid)
    assert targets.same_process(sleeper.pid, target.start_ticks)
    assert not targets.same_process(sleeper.pid, target.start_ticks + 1)
    target.close()


def test_a_foreign_process_asks_for_sudo(sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    script = (
        "import os, sys\n"
        "from argus.capture.process import targets\n"
        "from argus.model.errors import ArgusError\n"
        "os.setgid(65534); os.setuid(65534)\n"  # after the imports: the source may lie in root's home
        "try: targets.open_target(int(sys.argv[1]))\n"
        "except ArgusError as e: print(e)"
    )
    output = subprocess.run(
        [sys.executable, "-c", script, str(sleeper.pid)], capture_output=True, text=True, check=True
    ).stdout
    assert "belongs to root and cannot be inspected" in output
    assert "sudo" in output


def test_descendants_are_found_through_generations() -> None:
    process = subprocess.Popen(["sh", "-c", "sh -c 'sleep 30 & wait' & wait"], start_new_session=True)
    try:
        names: list[str] = []
        deadline = time.monotonic() + 20
        while sorted(names) != ["sh", "sleep"] and time.monotonic() < deadline:
            time.sleep(0.01)
            below = targets.descendants([process.pid])
            names = [Path(f"/proc/{pid}/comm").read_text().strip() for pid in below]
        assert sorted(names) == ["sh", "sleep"]
        assert process.pid not in below
    finally:
        os.killpg(process.pid, 9)
        process.wait()
