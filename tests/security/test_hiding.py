"""What a process can keep to itself: its own GPU times, by a lock on the memory that it shares with Argus. That is
reported, and hides nothing of others."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from argus.capture.process import cupti
from argus.cupti import buffers, shared
from argus.cupti import collector as collector_module
from argus.cupti.buffers import Damaged
from argus.cupti.collector import Collector, CollectorState, CuptiOptions
from tests.security.mapping_process import AS_NOBODY

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="map_files is root's")

# Locks the memory if it is told to, and lets go of it at a line.
PROGRAM = """
import fcntl, mmap, os, sys
fd = os.memfd_create("argus-cupti", os.MFD_ALLOW_SEALING)
os.ftruncate(fd, 65536)
fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
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


LEASED = """
import fcntl, mmap, os, signal, sys
fd = os.memfd_create("argus-cupti", os.MFD_ALLOW_SEALING)
os.ftruncate(fd, 65536)
signal.signal(signal.SIGIO, signal.SIG_IGN)
leased = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
os.close(fd)
head = mmap.mmap(leased, 65536, prot=mmap.PROT_READ)
fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_RDLCK)
print("ready", flush=True)
sys.stdin.readline()
"""


def test_a_memory_with_a_lease_is_not_waited_for() -> None:
    """Whoever has one may keep others from opening the file for 45 s (/proc/sys/fs/lease-break-time)."""
    words = [*AS_NOBODY, "/usr/bin/python3", "-I", "-S", "-c", LEASED]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            collector, began = Collector(process.pid), time.monotonic()
            collector.poll(began)
            assert time.monotonic() - began < 5
            assert collector.state == CollectorState.FAILED
            assert "temporarily unavailable" in collector.text
        finally:
            process.kill()


def test_few_locks_of_others_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may have any number of them."""
    fd = os.memfd_create("argus-test")
    status = os.fstat(fd)
    own = f"1: FLOCK  ADVISORY  WRITE 77 00:{os.minor(status.st_dev):02x}:{status.st_ino} 0 EOF\n"
    other_device = own.replace("77 00:", "78 08:")
    monkeypatch.setattr(collector_module, "PROC", tmp_path)
    for text, found in ((other_device + own, 77), (other_device * 5000 + own, 0)):
        (tmp_path / "locks").write_text(text)
        assert collector_module._lock_holder(fd) == found
    os.close(fd)


def test_buffers_are_as_large_as_was_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "memory"
    file.touch()
    fd = os.open(file, os.O_RDWR)
    os.truncate(fd, shared.total_bytes(256, 1 << 28))
    memory = shared.Memory(fd)
    collector = Collector(os.getpid(), CuptiOptions(buffers=8, buffer_bytes=1 << 20))
    collector._fd = fd
    for slots, buffer_bytes, fits in ((8, 1 << 20, True), (128, 1 << 18, True), (256, 1 << 18, True),
                                      (257, 1 << 18, False), (256, 1 << 28, False), (256, 1 << 19, False),
                                      (2, 1 << 21, True), (1, 1 << 22, False)):  # fmt: skip
        memory.store("slots", slots)
        memory.store("buffer_bytes", buffer_bytes)
        with contextlib.nullcontext() if fits else pytest.raises(Damaged):
            collector._map(memory)
    os.close(fd)


def test_names_of_a_process_have_bounded_length_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that are no UTF-8 become four characters each."""
    monkeypatch.setattr(buffers, "MAX_NAMES_BYTES", 40_000)
    found = buffers.Buffers(os.getpid())
    ids = [found._named(1000 + number, (b"\xff" * 2000 + b"%d" % number).decode(errors="backslashreplace"))
           for number in range(9)]  # fmt: skip
    assert ids == [1, 2, 3, 4, 0, 0, 0, 0, 0]
    assert found.names_unread == 5
    wide = buffers.Buffers(os.getpid())
    assert [wide._named(n, "\U0001f600" * (7000 + n)) for n in (1, 2)] == [1, 0], "four bytes each"


def test_memory_that_nobody_has_written_is_not_made_by_reading_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages would count as Argus's own, and the process's limits would not hold for them."""
    slots, buffer_bytes = 64, 1 << 18
    fd = os.memfd_create("argus-test")
    os.truncate(fd, shared.total_bytes(slots, buffer_bytes))
    memory = shared.Memory(fd, shared.total_bytes(slots, buffer_bytes))
    memory.slots["state"][:slots] = shared.SlotState.READY
    memory.slots["valid"][:slots] = buffer_bytes
    begun = os.fstat(fd).st_blocks
    found = buffers.Buffers(os.getpid())
    found.geometry = slots, buffer_bytes
    with pytest.raises(Damaged, match="nobody has written"):
        found.take(memory, [])
    memory.slots["state"][:slots] = shared.SlotState.LENT
    found.layouts = SimpleNamespace(table=lambda: None)  # type: ignore[assignment]
    found.take_left(memory, [])
    found.count_kept(memory)
    memory.store("names_used", shared.NAMES_BYTES)
    with pytest.raises(Damaged, match="nobody has written"):
        found._read_names(memory)
    assert os.fstat(fd).st_blocks <= begun + 16, "the head"
    os.close(fd)


def test_a_process_does_not_say_what_observing_it_costs() -> None:
    """Where that is too much, everybody is observed less."""
    with armed("show") as process:
        collector = Collector(process.pid)
        began = time.monotonic()
        collector.poll(began)
        assert collector.armed
        assert collector._memory is not None
        collector._memory.store("callback_ns", 10**12)
        spent_ns, _ = collector.counters()["cupti_callback_ns"]
        assert 0 < spent_ns <= 0.001 * (time.monotonic() - began + 1) * 1e9
        collector.buffers.records = 1000
        assert collector.counters()["cupti_callback_ns"][0] >= 2_000_000
        collector.close()
