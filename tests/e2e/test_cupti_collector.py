"""CUPTI in one process, seen from outside. The process and its memory are real; its helper is played by the test."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.capture.process import cupti
from argus.cupti import buffers, build, collector, layouts, shared
from argus.cupti.collector import Collector, CuptiOptions
from argus.cupti.shared import Command, SlotState, State

pytest.importorskip("cupti.cupti")
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="map_files is root's")

VERSION = 130200
OPTIONS = CuptiOptions(buffers=4, buffer_bytes=16384)

# Maps the memory as the helper does, and other files as a process with CUDA would; then executes commands.
PROCESS = """
import fcntl, mmap, os, sys
flags, total, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
fd = os.memfd_create("argus-cupti", flags)
os.ftruncate(fd, total)
if how != "unsealed":
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
head = mmap.mmap(fd, 65536)
os.close(fd)
kept = []
for path in sys.argv[4:]:
    with open(path) as file:
        kept.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
print("ready", flush=True)
for line in sys.stdin:
    if line.strip() == "fork":
        child = os.fork()
        if child == 0:
            sys.stdin.read()
            os._exit(0)
        print(child, flush=True)
    elif line.strip() == "exec":
        os.execv(sys.executable, [sys.executable, "-c", "print('ready', flush=True); input()"])
"""
TOTAL = shared.total_bytes(8, 65536)


class Process:
    """A process that maps the memory, and its helper."""

    def __init__(self, *paths: Path, how: str = "sealed") -> None:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        self.child = subprocess.Popen(
            [sys.executable, "-S", "-c", PROCESS, str(flags), str(TOTAL), how, *map(str, paths)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.child.stdout
        assert self.child.stdout.readline() == "ready\n"
        self.pid = self.child.pid
        fd = os.open(f"/proc/{self.pid}/map_files/{cupti.helper_mapping(self.pid)}", os.O_RDWR)
        self.memory = shared.Memory(fd, TOTAL)
        os.close(fd)
        self.memory.store("head_bytes", shared.HEAD_BYTES)
        self.memory.store("pid", self.pid)
        self.memory.store("file_bytes", TOTAL)
        self.memory.store("state", State.DORMANT)
        self.memory.store("magic", shared.MAGIC)
        self.known = layouts.for_version(VERSION)
        self.sequence = 0

    def send(self, word: str) -> str:
        assert self.child.stdin
        assert self.child.stdout
        self.child.stdin.write(word + "\n")
        self.child.stdin.flush()
        return self.child.stdout.readline().strip()

    def end(self) -> None:
        self.child.kill()
        self.child.wait()

    def waiting(self) -> Command | None:
        """The command that was not obeyed yet."""
        if self.memory.load("command_seq") == self.memory.load("done_seq"):
            return None
        return Command(self.memory.load("command"))

    def obey(self, expected: Command, state: State, **numbers: int) -> None:
        """Plays the helper."""
        assert self.waiting() is expected
        if expected is Command.PROBE and state is State.PROBED:
            self.memory.store("cupti_version", VERSION)
        if expected is Command.START and state is State.ON and not self.memory.load("slots"):
            self.memory.store("slots", self.memory.load("want_slots"))
            self.memory.store("buffer_bytes", self.memory.load("want_buffer_bytes"))
        for name, value in numbers.items():
            self.memory.store(name, value)
        self.memory.store("state", state)
        self.memory.store("done_seq", self.memory.load("command_seq"))

    def count(self, name: str, more: int = 1) -> None:
        self.memory.store(name, self.memory.load(name) + more)

    def kernels(self, *correlations: int, **fields: int) -> NDArray[np.void]:
        kind = self.known.kind("CONCURRENT_KERNEL")
        made = np.zeros(len(correlations), self.known.dtype(kind))
        now = time.monotonic_ns()
        made["kind"], made["correlation_id"], made["start"], made["end"] = kind, correlations, now - 100, now
        for name, value in fields.items():
            made[name] = value
        return made

    def name(self, number: int, pointer: int, text: bytes) -> None:
        used = self.memory.load("names_used")
        entry = np.array([(pointer, number, len(text))], shared.NAME).tobytes() + text
        entry += bytes(-len(entry) % 8)
        self.memory.view(shared.NAMES_OFFSET + used, len(entry))[:] = np.frombuffer(entry, "u1")
        self.count("names_count")
        self.memory.store("names_used", used + len(entry))

    def fill(self, slot: int, records: NDArray[np.void], state: SlotState = SlotState.READY, flags: int = 1) -> None:
        buffer, index = self.memory.buffer(slot, self.memory.load("buffer_bytes"))
        size = records.dtype.itemsize
        buffer[: records.nbytes] = records.view("u1")
        header = self.memory.slots[slot]
        if state is not SlotState.LENT:
            self.sequence += 1
            header["sequence"], header["valid"] = self.sequence, records.nbytes
        if state is SlotState.READY:
            index[: len(records)] = np.arange(0, records.nbytes, size)
            header["count"], header["flags"] = len(records), flags
        self.memory.slot_states[slot] = state


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Iterator[Callable[..., Process]]:
    made: list[Process] = []

    def begin(*paths: Path, **more: Any) -> Process:
        made.append(Process(*paths, **more))
        return made[-1]

    yield begin
    for one in made:
        one.end()
        for pipe in (one.child.stdin, one.child.stdout):
            if pipe:
                pipe.close()


@pytest.fixture
def process(start: Callable[..., Process]) -> Process:
    return start()


def now() -> float:
    return time.monotonic()


def switch_on(process: Process, options: CuptiOptions = OPTIONS) -> Collector:
    one = Collector(process.pid, options)
    assert one.poll(now()) == []
    process.obey(Command.PROBE, State.PROBED)
    one.poll(now())
    process.obey(Command.START, State.ON)
    one.poll(now())
    assert one.text == "on"
    return one


def values(one: Collector) -> dict[str, int]:
    return {name: value for name, (value, _) in one.counters().items()}


def losses(one: Collector) -> dict[str, int]:
    return {name: value for name, (value, loss) in one.counters().items() if loss and value}


def test_a_process_that_is_not_armed_is_looked_at_again() -> None:
    one = Collector(os.getpid(), OPTIONS)
    assert one.poll(1.0) == []
    assert (one.state, one.text) == ("waiting", "waiting: the process is not armed")
    assert Collector.find(os.getpid()) is None
    assert Collector.find(2**22 + 1) is None
    assert not one.stopped
    one.begin_stop()
    assert one.stopped
    assert one.poll(2.0) == []
    assert set(values(one).values()) == {0}


def test_the_whole_course(process: Process) -> None:
    found = Collector.find(process.pid, OPTIONS)
    assert found is not None
    one = found
    one.poll(now())
    assert one.state == "waiting"
    process.obey(Command.PROBE, State.PROBED)
    one.poll(now())
    control = process.memory.control
    known = process.known
    assert control["kinds"][: control["kinds_count"]].tolist() == known.kinds()
    assert control["runtime_calls"][: control["runtime_calls_count"]].tolist() == known.runtime_calls()
    assert control["driver_calls"][: control["driver_calls_count"]].tolist() == known.driver_calls()
    assert (control["layouts"] == known.table()).all()
    assert control["attributes"][: control["attributes_count"]].tolist() == known.attributes().tolist()
    assert [int(control[name]) for name in ("want_slots", "want_buffer_bytes", "flush_ms")] == [
        *(OPTIONS.buffers, OPTIONS.buffer_bytes, OPTIONS.flush_ms)
    ]
    process.count("completed", 5)  # before Argus was on: not its
    process.obey(Command.START, State.ON)
    one.poll(now())
    assert (one.state, one.text) == ("on", "on")

    process.name(1, 0x1000, b"ampere_gemm")
    process.name(2, 0x2000, b"bad\xffname\n")
    process.fill(2, process.kernels(1, 2, 3, name=1))
    process.fill(0, process.kernels(4, name=2))
    process.count("refused", 2)
    beat = process.memory.load("heartbeat")
    batches = one.poll(now())
    assert [batch.gpu["correlation"].tolist() for batch in batches] == [[1, 2, 3], [4]]
    assert [one.names[batch.gpu["name"][0]] for batch in batches] == ["ampere_gemm", "bad\\xffname\n"]
    assert (batches[0].gpu["pid"] == process.pid).all()
    assert one.names[0] == ""
    assert process.memory.load("heartbeat") != beat
    assert not process.memory.slot_states[:4].any()
    for slot in (0, 2):
        buffer, index = process.memory.buffer(slot, OPTIONS.buffer_bytes)
        assert not buffer.any()
        assert not index.any()
    assert one.poll(now()) == []

    one.begin_stop()
    assert not one.stopped
    process.fill(1, process.kernels(5))
    process.obey(Command.STOP, State.OFF)
    assert [batch.gpu["correlation"].tolist() for batch in one.poll(now())] == [[5]]
    one.poll(now())
    process.obey(Command.RELEASE, State.DORMANT)
    one.poll(now())
    assert one.stopped
    assert one.text == "off"
    seen = values(one)
    assert (seen["cupti_records"], seen["cupti_buffers_refused"]) == (5, 2)
    assert losses(one) == {"cupti_buffers_refused": 2}
    assert values(one)["cupti_buffers"] == 5
    # Nobody holds it any more.
    again = switch_on(process)
    again.close()


class Memory:
    """Texts of a process by where they lie, as ``capture.process.cupti.Texts`` reads them."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}

    def at(self, pointers: Sequence[int]) -> list[bytes | None]:
        return [text.encode() if (text := self.texts.get(pointer)) is not None else None for pointer in pointers]

    def close(self) -> None:
        pass


def test_names_of_a_program_that_never_stops_making_kernels_are_bounded(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules that are loaded again have their names elsewhere; names that are new have no room in the end."""
    monkeypatch.setattr(buffers, "MAX_NAMES", 20)
    one = switch_on(process)
    memory = one.buffers.texts = Memory()  # type: ignore[assignment]
    one.buffers.walk = lambda buffer, table: (np.zeros(1, np.uint32), 0)

    def named(flush: int, pointer: int, text: str) -> str:
        """What a kernel is called whose record points at a text."""
        memory.texts[pointer] = text
        process.memory.store("flushes", flush)
        batch = one.buffers._decode_full(process.memory, process.kernels(1, name=pointer).view("u1"))
        return one.names[int(batch.gpu["name"][0])]

    for flush in range(1, 200):
        assert named(flush, 0x1000 * flush, f"gemm_{flush % 3}") == f"gemm_{flush % 3}"
        assert len(one.buffers.pointers) <= 21
    assert len(one.names) == 4, "each text once, and the empty one"
    for flush in range(200, 400):
        text = f"fused_{flush}"
        assert named(flush, 0x1000 * flush, text) == (text if flush < 216 else "")
    assert len(one.names) == 20
    assert one.counters()["cupti_names_lost"] == (184, True)
    assert named(400, 0x1000, "gemm_1") == "gemm_1"
    process.memory.store("names_lost", 2**64 - 1)  # what the program says it lost is bounded, with what was lost here
    assert one.counters()["cupti_names_lost"] == (2**62, True)


def test_an_index_that_names_a_record_often_has_it_once(process: Process) -> None:
    one = switch_on(process)
    process.fill(0, process.kernels(1, 2, 3))
    header, (_, index) = process.memory.slots[0], process.memory.buffer(0, process.memory.load("buffer_bytes"))
    header["count"] = len(index)
    index[3:] = np.resize(index[:3], len(index) - 3)
    (batch,) = one.poll(time.monotonic())
    assert batch.gpu["correlation"].tolist() == [1, 2, 3]
    assert one.counters()["cupti_rejected_bad_offset"] == (len(index) - 3, True)


def test_a_blocking_stop_takes_what_is_left(process: Process) -> None:
    one = switch_on(process)

    def play() -> None:
        for command, state in ((Command.STOP, State.OFF), (Command.RELEASE, State.DORMANT)):
            while process.waiting() is not command:
                time.sleep(0.001)
            if command is Command.STOP:
                process.fill(3, process.kernels(9))
            process.obey(command, state)

    helper = threading.Thread(target=play)
    helper.start()
    batches = one.stop()
    helper.join()
    assert [batch.gpu["correlation"].tolist() for batch in batches] == [[9]]
    assert one.stopped
    assert one.text == "off"


def test_another_profiler_is_named(start: Callable[..., Process], tmp_path: Path) -> None:
    torch = tmp_path / "libtorch_cpu.so"
    torch.write_bytes(b"x")
    for paths, words in (((), "another profiler (nsys, ncu, …)"), ((torch,), "torch.profiler")):
        process = start(*paths)
        one = Collector(process.pid, OPTIONS)
        one.poll(now())
        process.obey(Command.PROBE, State.PROBED)
        one.poll(now())
        process.obey(Command.START, State.IGNORED, cupti_result=collector.MULTIPLE_SUBSCRIBERS)
        one.poll(now())
        assert one.text == f"ignored: {words} holds CUPTI"
        assert one.poll(now()) == []
        assert process.waiting() is None
        assert losses(one) == {}
        # It may be free later.
        one.poll(now() + 31)
        process.obey(Command.START, State.IGNORED, cupti_result=collector.MULTIPLE_SUBSCRIBERS)
        one.poll(now() + 31)
        assert one.text == f"ignored: {words} holds CUPTI"
        one.begin_stop()
        process.obey(Command.STOP, State.OFF)
        one.poll(now())
        process.obey(Command.RELEASE, State.DORMANT)
        one.poll(now())
        assert one.stopped
        assert one.text == f"ignored: {words} holds CUPTI"


def test_a_profiler_that_comes_later_is_let_have_it(process: Process) -> None:
    one = switch_on(process)
    process.fill(0, process.kernels(1))
    process.memory.store("state", State.IGNORED)
    assert [batch.gpu["correlation"].tolist() for batch in one.poll(now())] == [[1]]
    assert one.state == "ignored"
    assert losses(one) == {"cupti_interruptions": 1}
    one.poll(now() + 20)
    assert process.waiting() is None
    one.poll(now() + 31)
    process.obey(Command.START, State.ON)
    process.fill(0, process.kernels(2))
    one.poll(now() + 32)
    assert one.text == "on"
    assert one.records == 2


def test_kinds_that_cupti_refuses_are_named(process: Process) -> None:
    one = Collector(process.pid, OPTIONS)
    one.poll(now())
    process.obey(Command.PROBE, State.PROBED)
    one.poll(now())
    refused = 1 << process.known.kind("JIT") | 1 << process.known.kind("MEMCPY2")
    process.obey(Command.START, State.ON, refused_kinds=refused)
    one.poll(now())
    assert one.state == "on"
    assert one.text == "on: without MEMCPY2, JIT, which CUPTI refused"
    assert losses(one) == {"cupti_kinds_refused": 2}


def test_the_helper_s_own_reason_is_passed_on(process: Process) -> None:
    one = Collector(process.pid, OPTIONS)
    one.poll(now())
    process.memory.store_text("reason", b"no libcupti found")
    process.obey(Command.PROBE, State.FAILED)
    one.poll(now())
    assert one.text == "failed: no libcupti found"


def test_a_cupti_that_argus_does_not_know_is_left_alone(process: Process) -> None:
    one = Collector(process.pid, OPTIONS)
    one.poll(now())
    process.obey(Command.PROBE, State.PROBED, cupti_version=140100)
    process.memory.store("cupti_version", 140100)
    one.poll(now())
    assert one.state == "off"
    assert "CUPTI 14.1 is newer than this Argus knows" in one.text
    assert process.waiting() is None


def test_a_silent_helper_is_reported_silent_and_may_answer_later(process: Process) -> None:
    one = Collector(process.pid, OPTIONS)
    one.poll(now())
    one.poll(now() + 4)
    assert one.state == "waiting"
    one.poll(now() + 6)
    assert one.text == "failed: the helper does not answer (process stopped?)"
    process.obey(Command.PROBE, State.PROBED)
    one.poll(now() + 60)
    assert one.state == "waiting"
    process.obey(Command.START, State.ON)
    one.poll(now() + 61)
    assert one.text == "on"
    one.begin_stop()
    one.poll(now() + 4)
    assert not one.stopped
    one.poll(now() + 20)
    assert one.stopped
    assert one.text == "failed: the helper does not answer (process stopped?)"
    assert losses(one) == {"cupti_interruptions": 1}


def test_stopping_while_being_switched_on_leaves_nothing_behind(process: Process) -> None:
    one = Collector(process.pid, OPTIONS)
    one.poll(now())
    process.obey(Command.PROBE, State.PROBED)
    one.poll(now())
    assert process.waiting() is Command.START
    one.begin_stop()
    # It had begun with the first command when the second came.
    process.memory.store("slots", 4)
    process.memory.store("buffer_bytes", 16384)
    process.fill(0, process.kernels(1))
    process.obey(Command.STOP, State.OFF)
    assert [batch.gpu["correlation"].tolist() for batch in one.poll(now())] == [[1]]
    one.poll(now())
    process.obey(Command.RELEASE, State.DORMANT)
    one.poll(now())
    assert one.stopped


def test_two_argus_do_not_share_a_process(process: Process) -> None:
    first = switch_on(process)
    second = Collector(process.pid, OPTIONS)
    second.poll(now())
    assert second.text == f"ignored: another Argus (PID {os.getpid()}) traces it"
    first.close()
    # It is still on: the first did not stop it. What that one left is not ours.
    process.fill(1, process.kernels(1))
    second.poll(now() + 2)
    process.obey(Command.STOP, State.OFF)
    second.poll(now())
    process.memory.slot_states[1] = SlotState.FREE
    process.obey(Command.RELEASE, State.DORMANT)
    second.poll(now())
    process.obey(Command.PROBE, State.PROBED)
    second.poll(now())
    process.obey(Command.START, State.ON)
    second.poll(now())
    assert second.text == "on"
    assert losses(second) == {}


def test_argus_that_was_stopped_for_too_long_starts_again(process: Process) -> None:
    one = switch_on(process)
    process.memory.store("state", State.DORMANT)
    one.poll(now())
    assert one.state == "waiting"
    process.obey(Command.PROBE, State.PROBED)
    one.poll(now())
    process.obey(Command.START, State.ON)
    one.poll(now())
    assert one.text == "on"
    assert losses(one) == {"cupti_interruptions": 1}


@pytest.mark.parametrize("nonsense", ["magic", "state", "slots", "valid", "count", "slot", "names", "name", "early"])
def test_nonsense_in_the_memory_is_no_error_of_argus(process: Process, nonsense: str) -> None:
    one = switch_on(process)
    memory = process.memory
    process.fill(0, process.kernels(1, 2))
    if nonsense == "magic":
        memory.store("magic", 0)
    elif nonsense == "state":
        memory.store("state", 99)
    elif nonsense == "slots":
        memory.store("slots", 1 << 31)
    elif nonsense == "valid":
        memory.slots["valid"][0] = (1 << 64) - 1
    elif nonsense == "count":
        memory.slots["count"][0] = (1 << 32) - 1
    elif nonsense == "slot":
        memory.slot_states[3] = 9
    elif nonsense == "names":
        memory.store("names_used", shared.NAMES_BYTES + 8)
    elif nonsense == "name":
        process.name(1, 5, b"good")
        process.name(7, 5, b"not the next")
    else:
        memory.store("names_used", 8)
    assert one.poll(now()) == []
    assert one.state == "failed"
    assert one.text.startswith("failed: the shared memory is damaged")
    assert losses(one) == {"cupti_interruptions": 1}
    assert one.poll(now()) == []
    one.begin_stop()
    assert one.stopped


def test_random_bytes_do_not_break_it(process: Process) -> None:
    rng = np.random.default_rng(3)
    states = set()
    for _ in range(60):
        memory = process.memory
        memory.view(0, shared.HEAD_BYTES)[:] = 0
        memory.store("head_bytes", shared.HEAD_BYTES)
        memory.store("pid", process.pid)
        memory.store("state", State.DORMANT)
        memory.store("magic", shared.MAGIC)
        one = switch_on(process)
        places = rng.integers(8, shared.HEAD_BYTES, int(rng.integers(1, 4000)))
        memory.view(0, shared.HEAD_BYTES)[places] = rng.integers(0, 256, len(places))
        if rng.random() < 0.7:
            memory.store("state", State.ON)
            memory.store("slots", OPTIONS.buffers)
            memory.store("buffer_bytes", OPTIONS.buffer_bytes)
            memory.slots["state"][:4] = rng.integers(0, 4, 4)
            memory.slots["valid"][:4] = rng.integers(0, OPTIONS.buffer_bytes, 4)
            memory.slots["count"][:4] = rng.integers(0, 1000, 4)
            memory.store("names_used", 0)
            buffer, index = memory.buffer(1, OPTIONS.buffer_bytes)
            buffer[:] = rng.integers(0, 256, len(buffer))
            index[:] = rng.integers(0, 1 << 32, len(index))
        one.poll(now())
        one.poll(now() + 1)
        one.begin_stop()
        one.poll(now() + 60)
        one.poll(now() + 120)
        assert one.stopped
        assert all(0 <= value < 1 << 63 for value in values(one).values())
        states.add(one.state)
        one.close()
    assert "failed" in states


def test_what_an_ended_process_left_is_taken(process: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.compile_helper(tmp_path)
    monkeypatch.setattr(build, "library", lambda: tmp_path / build.LIBRARY)
    one = switch_on(process)
    process.name(1, 0x7F0000001000, b"gemm")
    process.fill(0, process.kernels(1, name=1))
    process.fill(1, process.kernels(2, 3, name=0x7F0000001000), SlotState.FULL)
    half_named = process.kernels(4, 5, name=1)
    half_named["name"][1] = 0x7F0000001000
    process.fill(3, half_named, SlotState.FULL)
    lent = process.kernels(6, 7, 8, name=0x7F0000009000)
    lent["end"][1] = 0
    process.fill(2, lent, SlotState.LENT)
    process.end()
    batches = one.poll(now())
    assert [batch.gpu["correlation"].tolist() for batch in batches] == [[1], [2, 3], [4, 5], [6, 8]]
    assert [batch.gpu["name"].tolist() for batch in batches] == [[1], [1, 1], [1, 1], [0, 0]]
    assert one.stopped
    assert one.text == "off: the process ended"
    seen = values(one)
    assert (seen["cupti_records"], seen["cupti_records_salvaged"], seen["cupti_buffers_unfinished"]) == (7, 6, 1)
    assert losses(one) == {"cupti_records_unfinished": 1, "cupti_buffers_unfinished": 1}


def test_buffers_of_which_nothing_is_missing_are_no_loss(
    process: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.compile_helper(tmp_path)
    monkeypatch.setattr(build, "library", lambda: tmp_path / build.LIBRARY)
    one = switch_on(process)
    process.fill(2, process.kernels(1), SlotState.LENT)
    process.memory.slot_states[0] = SlotState.LENT  # lent, and nothing was written
    process.end()
    (batch,) = one.poll(now())
    assert batch.gpu["correlation"].tolist() == [1]
    assert values(one)["cupti_buffers_unfinished"] == 1
    assert losses(one) == {}


def test_an_unknown_record_in_a_lent_buffer_is_counted(
    process: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.compile_helper(tmp_path)
    monkeypatch.setattr(build, "library", lambda: tmp_path / build.LIBRARY)
    one = switch_on(process)
    records = process.kernels(1, 2, 3)
    records["kind"][1] = 60
    process.fill(2, records, SlotState.LENT)
    hole = process.kernels(4, 5, 6)
    hole[1:2].view("u1")[:] = 0  # begun, and not written when the process ended
    process.fill(1, hole, SlotState.LENT)
    process.end()
    batches = one.poll(now())
    assert sorted(n for batch in batches for n in batch.gpu["correlation"].tolist()) == [1, 4]
    # No further than what was written: two records each, of which the last words are 0.
    size = records.dtype.itemsize
    assert 3 * size < losses(one)["cupti_bytes_unknown"] + 2 * 24 <= 4 * size


def test_without_the_compiled_helper_what_is_left_is_a_loss(
    process: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "library", lambda: tmp_path / "none.so")
    one = switch_on(process)
    process.fill(2, process.kernels(1), SlotState.LENT)
    process.end()
    assert one.poll(now()) == []
    assert losses(one) == {"cupti_buffers_unfinished": 1, "cupti_records_unfinished": 1}


def test_a_process_that_runs_another_program_is_let_go(process: Process) -> None:
    one = switch_on(process)
    process.fill(0, process.kernels(1))
    assert process.send("exec") == "ready"
    batches = one.poll(now() + 2)
    assert [batch.gpu["correlation"].tolist() for batch in batches] == [[1]]
    assert one.text == "off: the process runs another program now (exec)"
    assert one.stopped


def test_a_forked_child_is_not_armed(process: Process) -> None:
    one = Collector(int(process.send("fork")), OPTIONS)
    one.poll(now())
    assert one.text == "waiting: the process is not armed (its parent was)"
    one.close()


def test_a_memory_that_could_be_cut_is_not_read(start: Callable[..., Process]) -> None:
    """Nor does Argus seal it: whoever writes to the file would keep it waiting."""
    process = start(how="unsealed")
    one = Collector(process.pid, OPTIONS)
    one.poll(now())
    assert one.state == "failed"
    assert "did not seal it" in one.text
    os.truncate(f"/proc/{process.pid}/map_files/{cupti.helper_mapping(process.pid)}", 4096)


def test_where_cupti_may_be(start: Callable[..., Process], tmp_path: Path) -> None:
    packages = tmp_path / "site-packages"
    files = [
        packages / "nvidia" / "cu13" / "lib" / "libcudart.so.13",
        packages / "nvidia" / "cu13" / "lib" / "libcupti.so.13",
        packages / "nvidia" / "cuda_cupti" / "lib" / "libcupti.so.12",
        packages / "torch" / "lib" / "libtorch_cuda.so",
        tmp_path / "cuda" / "lib64" / "libcublas.so.13.1",
        tmp_path / "cuda" / "extras" / "CUPTI" / "lib64" / "libcupti.so.13",
        tmp_path / "cuda" / "extras" / "CUPTI" / "lib64" / "libcupti.so",
    ]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x")
    in_wheel, of_12, in_toolkit = (str(files[place]) for place in (1, 2, 5))
    found = cupti.candidates(start(files[0], files[4]).pid)
    assert found[:2] == [in_wheel, in_toolkit]
    assert not any(path.endswith(".so.12") for path in found)
    # Without a runtime either may be right.
    found = cupti.candidates(start(files[3]).pid)
    assert found[:2] == [in_wheel, of_12]
    # What is loaded already comes first, whatever its name.
    assert cupti.candidates(start(files[3], files[6]).pid)[0] == str(files[6])
    assert collector.candidate_lines(["/a\nb", "/c", "/" + "d" * 5000, "/e"]) == b"/c\n/e\n"
    assert cupti.candidates(2**22 + 1) == []


@pytest.mark.parametrize(
    ("names", "majors"),
    [
        (["libcudart.so.12"], {12}),
        (["libcudart-d0da41ae.so.11.0"], {11}),
        (["libcublas.so.13.1.0", "libcuda.so.570.1"], {13}),
        (["libcuda.so.570.124.06"], {12}),
        (["libcuda.so.580.65.06"], set()),
        (["libtorch.so"], set()),
    ],
)
def test_the_major_version_comes_of_the_runtime(names: list[str], majors: set[int]) -> None:
    assert cupti._majors(names) == majors


def test_options_that_cannot_be_are_refused() -> None:
    for wrong in ({"buffers": 0}, {"buffers": 257}, {"buffer_bytes": 1000}, {"buffer_bytes": 0}):
        with pytest.raises(ValueError, match="must be"):
            CuptiOptions(**wrong)


def test_windows_of_a_share_are_whole_seconds_that_were_recorded_from_end_to_end() -> None:
    options = CuptiOptions(share=0.25)
    assert options.on_ms == 5_000
    second = 1_000_000_000
    start = np.arange(0, 40, dtype=np.int64) * second
    whole = options.records_whole(start, np.full(40, second))
    assert np.flatnonzero(whole).tolist() == [1, 2, 3, 4, 21, 22, 23, 24]
    assert CuptiOptions().records_whole(start, np.full(40, second)).all()
    with pytest.raises(ValueError, match="a share of"):
        CuptiOptions(share=0.05)
