"""What a process can keep to itself: its own GPU times, by a lock on the memory that it shares with Argus. That is
reported, and hides nothing of others."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator

import pytest

from argus.capture.process import cupti
from argus.cupti import shared
from argus.cupti.collector import Collector, CollectorState
from tests.security.mapping_process import AS_NOBODY

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="map_files is root's")

# Locks the memory if it is told to, and lets go of it at a line.
PROGRAM = """
import fcntl, mmap, os, sys
fd = os.memfd_create("argus-cupti", os.MFD_ALLOW_SEALING)
os.ftruncate(fd, 65536)
head = mmap.mmap(fd, 65536)
if sys.argv[1] == "hide":
    fcntl.flock(fd, fcntl.LOCK_EX)
print("ready", flush=True)
sys.stdin.readline()
fcntl.flock(fd, fcntl.LOCK_UN)
print("open", flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def armed(how: str) -> Iterator[subprocess.Popen[str]]:
    """A process of another user that has a helper's memory."""
    words = [*AS_NOBODY, "/usr/bin/python3", "-I", "-S", "-c", PROGRAM, how]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            _, place = cupti.open_helper(process.pid)
            fd = cupti.open_memory(place)
            memory = shared.Memory(fd)
            memory.store("head_bytes", shared.HEAD_BYTES)
            memory.store("pid", process.pid)
            memory.store("state", shared.State.DORMANT)
            memory.store("magic", shared.MAGIC)
            for opened in (place, fd):
                os.close(opened)
            yield process
        finally:
            process.kill()


def test_a_process_that_locks_its_memory_hides_its_own_gpu_times_alone() -> None:
    with armed("hide") as hider, armed("show") as honest:
        assert hider.stdin is not None
        assert hider.stdout is not None
        hidden, shown, now = Collector(hider.pid), Collector(honest.pid), time.monotonic()
        begun = time.monotonic()
        for turn in range(5):
            assert hidden.poll(now + 2 * turn) == []
        assert time.monotonic() - begun < 2, "nobody waits for the lock"
        assert hidden.state is CollectorState.IGNORED
        assert hidden.text == f"ignored: another Argus (PID {hider.pid}) traces it", "its own number is reported"
        assert not hidden.stopped, "it is looked at again"
        shown.poll(now)
        assert (shown.state, shown.armed) == (CollectorState.WAITING, True)
        assert shown.text == "waiting: CUPTI is being switched on"
        hider.stdin.write("\n")
        hider.stdin.flush()
        assert hider.stdout.readline() == "open\n"
        hidden.poll(now + 20)
        assert hidden.text == "waiting: CUPTI is being switched on"
        hidden.close()
        shown.close()
