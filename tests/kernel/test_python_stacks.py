"""Python stacks against programs that know their own: on every CPython at hand, under load, and where it is hard.

Interpreters: those of ``tests.pythons``. ``python_truth`` explains how the programs define which stacks can be;
``python -m tests.kernel.test_python_stacks SECONDS [PYTHON ...]`` runs the same for longer and prints a table.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from argus.capture.python.code import HIDDEN, CodeResolver, PythonFrame
from argus.capture.python.interpreter import Interpreter, PythonProcess, find_interpreter
from argus.capture.sampler import RawStack, StackProbes
from argus.model import records
from argus.model.records import StackCounter
from tests.kernel.conftest import wait_until
from tests.kernel.python_truth import Grammar, Judgement, Tally
from tests.pythons import pythons

pytestmark = [pytest.mark.kernel, pytest.mark.alone]

PROGRAMS = Path(__file__).resolve().parent / "python_programs"
RATE_HZ = 1_999
SECONDS = 1.2
LONG_OFF_NS = 15_000_000
"""The programs wait for twice as long. In ``blocked``, where no thread is busy, nothing else takes one off for so long
but a busy machine, which preempts it."""
CHURN = "<churn "
Tids = dict[tuple[int, int], tuple[int, int]]
CHURN_ROLES = ("churn_lines", "churn_same", "phases")


# --- interpreters


@cache
def version_of(python: str) -> tuple[int, int]:
    output = subprocess.run([python, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, text=True)
    if output.returncode:
        pytest.skip(f"{python} does not run: {output.stderr.strip()[-200:]}")
    major, minor = output.stdout.split()
    return int(major), int(minor)


PYTHONS = list(pythons().values())
every_python = pytest.mark.parametrize("python", PYTHONS or [pytest.param("", marks=pytest.mark.skip("no CPython"))])


def newest() -> str:
    """An interpreter for tests that need only one."""
    if not PYTHONS:
        pytest.skip("no CPython was found (tests/pythons.py)")
    return PYTHONS[-1]


# --- programs that run


@dataclass
class Program:
    """A program of ``python_programs``, and what its threads announced of themselves."""

    python: str
    name: str
    log: Path
    process: subprocess.Popen[bytes]
    grammar: Grammar
    roles: dict[tuple[int, int], str] = field(default_factory=dict)
    """(PID, thread) -> role, as the process numbers them."""
    pids: set[int] = field(default_factory=set)
    _expected: int = 1 << 30
    _read: int = 0

    @property
    def ready(self) -> bool:
        """Whether all its threads have announced themselves."""
        return len(self.roles) >= self._expected

    def read(self) -> None:
        """What it has written since the last call."""
        with open(self.log, "rb") as file:
            file.seek(self._read)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        self._read += len(text)
        for line in text.decode().splitlines():
            words = line.split()
            if words[0] == "ready":
                self._expected = int(words[1])
            else:
                self.roles[int(words[1]), int(words[2])] = words[3]
                self.pids.add(int(words[1]))

    def diary(self, name: str) -> tuple[list[int], list[int]]:
        """Times, ascending, and the numbers noted at each."""
        data = Path(f"{self.log}.{name}").read_bytes()
        notes = sorted(pair for pair in struct.iter_unpack("<qq", data) if pair[0])
        return [at for at, _ in notes], [number for _, number in notes]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(20)


@cache
def grammar_of(name: str, version: tuple[int, int]) -> Grammar:
    return Grammar(PROGRAMS / f"{name}.py", version)


def start(
    folder: Path, python: str, name: str, *arguments: str, command: Sequence[str] | None = None, wait: bool = True
) -> Program:
    """Runs a program, until its threads are up."""
    log = folder / f"{name}.{len(list(folder.iterdir()))}.log"
    log.touch()
    line = [*(command or [python, str(PROGRAMS / f"{name}.py")]), str(log), *arguments]
    # the sampler has to keep up with a dozen busy processes
    process = subprocess.Popen(line, stdin=subprocess.DEVNULL, preexec_fn=lambda: os.nice(15))
    program = Program(python, name, log, process, grammar_of(name, version_of(python)))
    try:
        if wait:

            def up() -> bool:
                program.read()
                assert process.poll() is None, f"{line} ended"
                return program.ready

            wait_until(up, 60, f"{name}.py on {python}")
    except BaseException:
        program.end()
        raise
    return program


# --- samples


@dataclass
class Target:
    interpreter: Interpreter
    process: PythonProcess
    resolver: CodeResolver


@dataclass
class Stack:
    frames: list[PythonFrame | None]
    entries: list[bool]
    flags: int
    pid: int


class Samples:
    """Drains the probes and resolves at once, as a live session does."""

    def __init__(self, probes: StackProbes) -> None:
        self.probes = probes
        self.targets: dict[int, Target] = {}
        self.stacks: dict[int, Stack] = {}
        self.counts = np.empty(0, records.STACK_COUNT)
        self.resent = 0
        self.spent = np.zeros(2)
        """Seconds in drain, and in resolving."""
        self._refreshed_s = 0.0
        self._flush()  # what an earlier test left
        self.counts = self.counts[:0]
        self._before = probes.counters()

    def add(self, pid: int) -> Interpreter | None:
        """Follows a process. None: there is no CPython in it (yet)."""
        found = find_interpreter(pid)
        if found is None or found.layout is None:
            return found
        old = self.targets.pop(pid, None)
        if old:
            old.process.close()
        process = PythonProcess(pid, found)
        self.targets[pid] = Target(found, process, CodeResolver(process, found.layout))
        # last what lets samples through; first what forgets the threads of an earlier program
        self.probes.set_python(pid, found.layout)
        self.probes.set_threads(pid, process.thread_states())
        self.probes.add_target(pid)
        return found

    def poll(self, *, final: bool = False) -> None:
        begin = time.monotonic()
        drained = self.probes.drain(final=final)
        between = time.monotonic()
        for pid, code in drained.codes:
            if pid in self.targets:
                self.targets[pid].resolver.learn(code)
        for raw in drained.stacks:
            self._take(raw)
        self.spent += [between - begin, time.monotonic() - between]
        if len(drained.counts):
            self.counts = np.concatenate([self.counts, drained.counts])
        if time.monotonic() - self._refreshed_s > 0.25:
            self._refreshed_s = time.monotonic()
            for pid, target in self.targets.items():
                self.probes.set_threads(pid, target.process.thread_states())

    def _take(self, raw: RawStack) -> None:
        target = self.targets.get(int(raw.head["pid"]))
        number = int(raw.head["stack"])
        if number in self.stacks:
            self.resent += 1
            return
        frames = target.resolver.resolve(raw.frames) if target else [None] * len(raw.frames)
        entries = ((raw.frames["firstlineno"] & records.FRAME_ENTRY) != 0).tolist()
        shown = [(frame, entry) for frame, entry in zip(frames, entries, strict=True) if frame is not HIDDEN]
        flags, pid = int(raw.head["flags"]), int(raw.head["pid"])
        self.stacks[number] = Stack([frame for frame, _ in shown], [entry for _, entry in shown], flags, pid)

    def follow(self, seconds: float, also: Callable[[], None] = lambda: None) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.poll()
            also()
            time.sleep(0.02)

    def finish(self) -> dict[StackCounter, int]:
        """No more samples of these processes. What the kernel counted of them."""
        for pid in self.targets:
            self.probes.remove_target(pid)
        self._flush()
        after = self.probes.counters()
        return {counter: after[counter] - self._before[counter] for counter in StackCounter}

    def _flush(self) -> None:
        # what was counted comes after two changes of the maps, each of which takes a window and two calls
        for _ in range(8):
            self.poll()
            time.sleep(0.06)

    def close(self) -> None:
        for target in self.targets.values():
            target.process.close()


# --- verdicts


@dataclass
class Verdict:
    on: Tally = field(default_factory=Tally)
    """Samples on the CPU."""
    off: Tally = field(default_factory=Tally)
    """Times off the CPU."""
    misplaced: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Long times off the CPU where the program does not wait."""
    strangers: Counter[tuple[int, int, str]] = field(default_factory=Counter)
    """Samples of threads that did not say who they are."""
    examples: dict[tuple[str, str], Stack] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Samples on the CPU of threads that run Python code: not of those that begin or end, nor where the stack was
        lost since this test was not quick enough."""
        lost = self.on.samples["no stack"]
        for role, kinds in self.on.by_role.items():
            lost += kinds["none"] + kinds["idle"] if role.startswith("short:") else 0
            # code that is gone before anybody can look
            lost += kinds["unresolved"] if role in CHURN_ROLES else 0
        return sum(self.on.samples[kind] for kind in KINDS) - lost

    @property
    def right(self) -> float:
        """Share of samples that are right, or right as far as they go and marked as cut."""
        return (self.on.samples["right"] + self.on.samples["cut"]) / max(self.total, 1)

    def __str__(self) -> str:
        wrong = [
            f"  {count} x {role}: {why}" for (role, why), count in (self.on.wrong + self.off.wrong).most_common(20)
        ]
        wrong += [f"{role}:\n{stack}" for (role, _), stack in itertools.islice(self.examples.items(), 8)]
        roles = {role: dict(kinds) for role, kinds in self.on.by_role.items() if set(kinds) - {"right", "cut"}}
        return "\n".join(
            [
                f"{self.right:.3%} of {self.total}",
                f"by role: {roles}",
                f"on CPU: {self.on}",
                f"off CPU: {self.off}",
                f"misplaced: {dict(self.misplaced)}",
                str(self.strangers.most_common(5)),
                *wrong,
            ]
        )


KINDS = ("right", "cut", "unresolved", "wrong", "rejected", "idle", "none", "no stack", "stranger")


def judge(samples: Samples, programs: Sequence[Program], root_tids: Tids | None = None) -> Verdict:
    """Every sample against the grammar of its thread.

    Args:
        samples: What was taken.
        programs: What ran.
        root_tids: (PID, thread) as the process numbers them -> as the kernel's root namespace does.
    """
    verdict = Verdict()
    roles = {
        (root_tids or {}).get(key, key): (program, role) for program in programs for key, role in program.roles.items()
    }
    comers = {pid: program for program in programs if program.name == "comers" for pid in program.pids}
    diaries = {}
    for program in programs:
        program.read()
        if program.name == "churn":
            diaries = {role: program.diary(role) for role in CHURN_ROLES}
    known: dict[tuple[object, ...], Judgement] = {}
    for row in samples.counts:
        pid, tid, number, count = int(row["pid"]), int(row["tid"]), int(row["stack"]), int(row["count"])
        off = bool(row["what"] & records.WHAT_OFF)
        tally = verdict.off if off else verdict.on
        if (pid, tid) not in roles and pid in comers:
            roles[pid, tid] = comers[pid], "short:short"  # it did not come to say so yet
        if (pid, tid) not in roles:
            strange = samples.stacks.get(number)
            verdict.strangers[pid, tid, str(strange.frames[-2:]) if strange else ""] += count
            tally.add("?", Judgement("stranger"), count)
            continue
        program, role = roles[pid, tid]
        stack = samples.stacks.get(number)
        if stack is None:
            tally.add(role, Judgement("no stack"), count)
            continue
        # many stacks differ in their native frames only
        key = (role, stack.flags, *map(id, stack.frames), *stack.entries)
        judgement = known.get(key)
        if judgement is None:
            judgement = known[key] = _judge(program, role, stack)
        times = (int(row["first_ns"]),) if off else (int(row["first_ns"]), int(row["last_ns"]))
        name = role.rpartition(":")[2]
        if judgement.kind in ("right", "cut") and name in diaries:
            judgement = _judge_times(judgement, diaries[name], stack, times)
        tally.add(role, judgement, count)
        if judgement.kind == "wrong":
            verdict.examples.setdefault((role, judgement.why), stack)
        long_off = off and row["max_ns"] >= LONG_OFF_NS and program.name == "blocked"
        long_off = long_off and not row["what"] & (records.WHAT_PREEMPTED | records.WHAT_GIL_WAIT)
        if long_off and judgement.kind == "right" and not program.grammar.blocks(stack.frames):
            verdict.misplaced[role, str(stack.frames[0])] += count
    return verdict


def _judge(program: Program, role: str, stack: Stack) -> Judgement:
    if stack.flags & records.STACK_PYTHON_REJECTED:
        return Judgement("rejected")
    if stack.flags & records.STACK_IDLE_PYTHON:
        return Judgement("idle")
    if not stack.flags & (records.STACK_PYTHON | records.STACK_PYTHON_CUT):
        return Judgement("none")
    if any(frame is None or frame.file.startswith(CHURN) for frame in stack.frames) and "churn" in role:
        return _judge_churn(program, role, stack)
    cut = bool(stack.flags & records.STACK_PYTHON_CUT)
    return program.grammar.judge(role, stack.frames, stack.entries, cut=cut)


def _judge_churn(program: Program, role: str, stack: Stack) -> Judgement:
    """Frames of one generation of ``churn.SOURCE``, above the line that executes it."""
    code = stack.frames[: len(stack.frames) - 2]
    outer = program.grammar.judge(role, stack.frames[-2:], stack.entries[-2:])
    if outer.kind != "right":
        return Judgement("wrong", f"generated code below {stack.frames[-2:]}: {outer.why}")
    text = (PROGRAMS / "churn.py").read_text().splitlines()
    caller = stack.frames[-2]
    if caller is None or "exec(c" not in text[caller.line - 1]:
        return Judgement("wrong", f"generated code called from {caller}")
    if None in code:
        return Judgement("unresolved")
    generation = int(code[-1].file[len(CHURN) :].rstrip(">"))  # type: ignore[union-attr]
    base = 1 + (generation % 40 if role == "churn_lines" else 0)
    # leaf at base + 1 to base + 5, top at base + 6 and 7, module at base + 1, 6, 8
    expected = [("<module>", {base + 8}), (f"top_{generation:06d}", {base + 7}), (f"leaf_{generation:06d}", set())]
    leaf_lines = [{base + 1, base + 6, base + 8, 1, 0}, {base + 6, base + 7}, {base + n for n in range(1, 6)}]
    if len(code) > 3:
        return Judgement("wrong", f"{len(code)} frames of generated code")
    for at, frame in enumerate(code[::-1]):
        assert frame is not None
        name, lines_here = expected[at]
        allowed = leaf_lines[at] if at == len(code) - 1 else lines_here
        if frame.function != name or frame.line not in allowed or frame.file != f"{CHURN}{generation:06d}>":
            return Judgement("wrong", f"mixed: {frame} in generation {generation}")
    if program.grammar.version >= (3, 11) and stack.entries[: len(code)] != [False] * (len(code) - 1) + [True]:
        return Judgement("wrong", "generated code: entries")
    return Judgement("right")


def _judge_times(
    judgement: Judgement, diary: tuple[list[int], list[int]], stack: Stack, times: tuple[int, ...]
) -> Judgement:
    """Whether it is a stack of that time: code of its generation, functions of its phase."""
    number = None
    for frame in stack.frames:
        assert frame is not None
        if frame.file.startswith(CHURN):
            number = int(frame.file[len(CHURN) :].rstrip(">"))
        elif frame.function.startswith("phase_"):
            number = int(frame.function[6:])
    if number is None:
        return judgement
    when, noted = diary
    for at in times:
        position = bisect_right(when, at) - 1
        if position < 0 or noted[position] != number:
            now = noted[position] if position >= 0 else None
            what = "generation" if stack.frames[0] and stack.frames[0].file.startswith(CHURN) else "phase"
            return Judgement("wrong", f"stale {what}: {abs(number - now) if now else now} off")
    return judgement


# --- tests


@pytest.fixture(scope="module")
def probes() -> Iterator[StackProbes]:
    probes = StackProbes(rate_hz=RATE_HZ, off_cpu_ns=5_000_000, walk_ns=50_000_000)
    assert probes.state == {"sampling": "on", "off-cpu": "on"}
    yield probes
    probes.close()


@pytest.fixture
def samples(probes: StackProbes) -> Iterator[Samples]:
    taken = Samples(probes)
    yield taken
    for pid in taken.targets:
        probes.remove_target(pid)
    taken.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """Starts programs, and ends them with the test."""
    started: list[Program] = []

    def start_one(python: str, name: str, *arguments: str, **more: object) -> Program:
        started.append(start(tmp_path, python, name, *arguments, **more))  # type: ignore[arg-type]
        return started[-1]

    yield start_one
    for program in started:
        program.end()


def conserved(samples: Samples, counted: dict[StackCounter, int]) -> None:
    """What came is what the kernel counted, to the sample."""
    off = samples.counts["what"] & records.WHAT_OFF != 0
    on_cpu = samples.counts["count"][~off].sum()
    both = on_cpu + samples.counts["count"][off].sum()
    assert both == counted[StackCounter.SAMPLES] + counted[StackCounter.OFF_CPU] - counted[StackCounter.SAMPLES_DROPPED]
    assert on_cpu <= counted[StackCounter.SAMPLES]


NAMES = ("grammar", "aio", "churn", "comers", "blocked", "processes")


def watch(samples: Samples, programs: Sequence[Program], seconds: float) -> None:
    """Samples programs, and the processes they make."""

    def look() -> None:
        for program in programs:
            program.read()
            for pid in program.pids - samples.targets.keys():
                samples.add(pid)

    look()
    samples.follow(seconds, look)


def own_account(folder: Path, python: str, name: str, *roles: str) -> dict[str, list[list[PythonFrame]]]:
    """Stacks of a program by the interpreter's own account (sys.settrace), leaf first, by role."""
    log = folder / f"account.{name}.log"
    subprocess.run([python, str(PROGRAMS / f"{name}.py"), str(log), "--account=1", *roles], check=True, timeout=60)
    account = json.loads(Path(f"{log}.account").read_text())
    return {role: [[PythonFrame(*frame) for frame in stack] for stack in stacks] for role, stacks in account.items()}


@pytest.mark.parametrize("name", ["grammar", "aio"])
def test_the_grammars_take_what_an_interpreter_says_of_itself(name: str, tmp_path: Path) -> None:
    for python in {PYTHONS[0], newest()}:
        tally = Tally()
        grammar = grammar_of(name, version_of(python))
        for role, stacks in own_account(tmp_path, python, name).items():
            for stack in stacks:
                tally.add(role, grammar.judge(role, stack))
        assert not tally.wrong, (python, tally.wrong)
        assert tally.samples["right"] > 300


def test_the_checker_finds_every_kind_of_fault(tmp_path: Path) -> None:
    """Right stacks, with one thing wrong in each."""
    python = newest()
    grammar = grammar_of("grammar", version_of(python))
    stacks = own_account(tmp_path, python, "grammar", "recursion", "callbacks")
    deep = next(stack for stack in stacks["recursion"] if stack[0].function == "burn" and len(stack) == 45)
    called = next(stack for stack in stacks["callbacks"] if stack[0].function == "by_nested_key")
    entries = [frame.function in ("by_nested_key", "nested", "thread") for frame in called]
    assert grammar.judge("recursion", deep).kind == "right"
    assert grammar.judge("callbacks", called, entries).kind == "right"

    def verdict(stack: Sequence[PythonFrame | None], role: str = "recursion", cut: bool = False) -> str:
        return grammar.judge(role, stack, cut=cut).kind

    assert verdict([]) == "wrong"
    assert verdict(deep, "callbacks") == "wrong"
    assert verdict(deep, cut=True) == "wrong"
    assert verdict(deep[:-1]) == "wrong"
    assert verdict(deep[1:]) == "right"  # its caller, at its call
    for at in range(1, len(deep) - 1):
        assert verdict([*deep[:at], *deep[at + 1 :]]) == "wrong", at
        assert verdict([*deep[:at], deep[at], *deep[at:]]) == "wrong", at
        assert verdict([*deep[:at], replace(deep[at], line=deep[at].line - 1), *deep[at + 1 :]]) == "wrong", at
        assert verdict([*deep[:at], replace(deep[at], file="other.py"), *deep[at + 1 :]]) == "wrong", at
        assert verdict([*deep[:at], replace(deep[at], function="up"), *deep[at + 1 :]]) == "wrong", at
        assert verdict([*deep[:at], None, *deep[at + 1 :]]) == "unresolved", at
    assert verdict([replace(deep[0], line=deep[0].line + 9), *deep[1:]]) == "wrong"
    if grammar.version >= (3, 11):
        for at in range(len(called)):
            flipped = [entry != (at == number) for number, entry in enumerate(entries)]
            assert grammar.judge("callbacks", called, flipped).kind == "wrong", at


@every_python
def test_every_stack_is_one_that_was(python: str, samples: Samples, run: Callable[..., Program]) -> None:
    """Right, marked as incomplete, or not given at all; and the last two are few."""
    every = {"recursion", "generators", "callbacks", "runs", "elder", "churn_same", "main:forked", "spawn:worker"}
    programs = [run(python, name) for name in NAMES]
    watch(samples, programs, SECONDS)

    def each_process() -> bool:
        watch(samples, programs, 0.1)
        on_cpu = samples.counts[samples.counts["what"] & records.WHAT_OFF == 0]
        sampled = set(zip(on_cpu["pid"].tolist(), on_cpu["tid"].tolist(), strict=True))
        if not every <= {role for program in programs for key, role in program.roles.items() if key in sampled}:
            return False  # one has not begun yet, or had no CPU
        return all(on_cpu["count"][on_cpu["pid"] == pid].sum() > 30 for program in busy for pid in program.pids)

    busy = [program for program in programs if program.name != "blocked"]
    wait_until(each_process, 30, "each process to run")
    counted = samples.finish()
    for program in programs:
        program.end()
    verdict = judge(samples, programs)
    print(f"{python}: {verdict}\n{ {counter.name: value for counter, value in counted.items() if value} }")
    conserved(samples, counted)
    assert not verdict.on.samples["wrong"] + verdict.off.samples["wrong"], str(verdict)
    assert not verdict.misplaced, str(verdict)
    assert verdict.total > 1000, str(verdict)
    assert verdict.right >= 0.995, str(verdict)
    # each kind of program contributes
    for role in sorted(every):
        assert verdict.on.by_role[role]["right"] > 0, f"{role}: {verdict}"
    assert verdict.on.by_role["abyss"]["cut"] > 0, str(verdict)
    for role in ("in_lock", "in_queue", "in_simple", "in_sleep", "in_select", "in_socket", "in_event"):
        assert verdict.off.by_role[role]["right"] > 0, f"{role}: {verdict}"


def sampled(samples: Samples, programs: Sequence[Program], seconds: float = 0.7) -> Verdict:
    """Samples programs, and asks that nothing is wrong."""
    watch(samples, programs, seconds)
    counted = samples.finish()
    verdict = judge(samples, programs)
    conserved(samples, counted)
    assert not verdict.on.samples["wrong"] + verdict.off.samples["wrong"], str(verdict)
    return verdict


@every_python
def test_threads_that_wait_are_seen_from_outside_and_as_being_off_now(
    python: str, samples: Samples, run: Callable[..., Program]
) -> None:
    """What a look at a hang is made of: all threads, each exactly where it waits."""
    program = run(python, "blocked")
    pid = program.process.pid
    watch(samples, [program], 0.1)
    target = samples.targets[pid]
    forever = {tid: role for (_, tid), role in program.roles.items() if role.startswith("forever")}
    assert len(forever) == 5
    for tid, role in forever.items():
        frames = target.process.walk(tid)
        assert frames is not None, role
        stack = target.resolver.resolve(frames)
        judgement = program.grammar.judge(role, stack, ((frames["firstlineno"] & records.FRAME_ENTRY) != 0).tolist())
        assert judgement.kind == "right", (role, judgement, stack)
        assert program.grammar.blocks(stack), (role, stack)
    # Those that slept already when they were added are not known to be off; those that come back are.
    seen: set[str] = set()

    def look() -> None:
        for row in samples.probes.off_now(10_000_000):
            role = program.roles.get((int(row["pid"]), int(row["tid"])))
            stack = samples.stacks.get(int(row["stack"]))
            if role and stack:
                judgement = _judge(program, role, stack)
                assert judgement.kind == "right", (role, judgement, stack)
                assert program.grammar.blocks(stack.frames), (role, stack)
                seen.add(role)

    wait_until(lambda: (samples.follow(0.05), look(), len(seen) >= 8)[-1], 30, "threads to be off")  # type: ignore[func-returns-value]


def test_a_stopped_process_gives_no_samples_and_then_right_ones(samples: Samples, run: Callable[..., Program]) -> None:
    program = run(newest(), "grammar")
    pid = program.process.pid
    watch(samples, [program], 0.3)
    os.kill(pid, signal.SIGSTOP)
    state = Path(f"/proc/{pid}/stat")
    wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", what="it to stop")
    for _ in range(8):
        samples.poll()
        time.sleep(0.05)
    before = samples.probes.counters()[StackCounter.SAMPLES]
    stacks = {tid: samples.targets[pid].process.walk(tid) for _, tid in program.roles}
    for (_, tid), role in program.roles.items():
        frames = stacks[tid]
        if frames is not None and len(frames) <= records.PYTHON_FRAMES:
            found = [frame for frame in samples.targets[pid].resolver.resolve(frames) if frame is not HIDDEN]
            assert program.grammar.judge(role, found).kind == "right", (role, found)
    samples.follow(0.3)
    assert samples.probes.counters()[StackCounter.SAMPLES] == before
    assert sum(frames is not None for frames in stacks.values()) >= len(stacks) - 2
    os.kill(pid, signal.SIGCONT)
    verdict = sampled(samples, [program], 0.5)
    assert verdict.right >= 0.99, str(verdict)


def test_processes_that_die_under_the_sampler(samples: Samples, run: Callable[..., Program]) -> None:
    """Killed at any instruction, between a sample and its resolution: unresolved, never wrong."""
    programs = [run(newest(), "grammar", "callbacks", "generators", "methods") for _ in range(4)]

    def kill_one() -> None:
        if len(samples.stacks) > 100 and programs[turn[0] % 4].process.poll() is None:
            programs[turn[0] % 4].process.kill()
        turn[0] += 1

    turn = [0]
    for program in programs:
        samples.add(program.process.pid)
    samples.follow(1.0, kill_one)
    verdict = sampled(samples, programs, 0.1)
    assert verdict.on.samples["right"] > 100, str(verdict)


@every_python
def test_a_process_that_has_ended_is_named_all_the_same(
    python: str, samples: Samples, run: Callable[..., Program]
) -> None:
    """Nothing is fetched while it lives: what its code was called came from the kernel."""
    program = run(python, "grammar", "callbacks", "generators", "methods")
    before = samples.probes.counters()[StackCounter.SAMPLES]
    samples.add(program.process.pid)
    wait_until(lambda: samples.probes.counters()[StackCounter.SAMPLES] > before + 200, 30, "samples")
    program.read()
    program.process.kill()
    program.process.wait()
    verdict = sampled(samples, [program], 0.1)
    assert verdict.on.samples["right"] > 100, str(verdict)
    assert verdict.on.samples["unresolved"] == 0, str(verdict)


def test_a_shell_that_becomes_python_and_python_that_becomes_another(
    samples: Samples, run: Callable[..., Program], tmp_path: Path
) -> None:
    """After exec nothing of the old program's layout is used: it has no Python stack until somebody has looked."""
    python, other = newest(), PYTHONS[0]
    added = tmp_path / "added"
    words = [str(added), python, str(PROGRAMS / "grammar.py")]
    shell = run(
        python,
        "grammar",
        command=["bash", "-c", 'until [ -e "$0" ]; do sleep 0.02; done; exec "$@"', *words],
        wait=False,
    )
    twice = run(python, "processes", f"--when={added}", f"--then={other}", f"--then={PROGRAMS / 'grammar.py'}")
    second = Program(
        other, "grammar", Path(f"{twice.log}.then"), twice.process, grammar_of("grammar", version_of(other))
    )
    second.log.touch()
    for program in (shell, twice):
        samples.probes.add_target(program.process.pid)
        samples.add(program.process.pid)
    wait_until(lambda: (samples.poll(), twice.process.pid in samples.counts["pid"])[-1], 30, "samples of the first")
    added.touch()
    looked: dict[int, tuple[int, int]] = {}

    def look() -> None:
        for program in (shell, second):
            program.read()
            if program.ready and program.process.pid not in looked:
                # From the first time on stacks are the new program's; from the second on they must be there.
                before = time.monotonic_ns()
                samples.add(program.process.pid)
                looked[program.process.pid] = (before, time.monotonic_ns())

    wait_until(lambda: (samples.follow(0.05, look), len(looked) == 2)[-1], 30, "both to become Python")  # type: ignore[func-returns-value]
    samples.follow(0.7, look)
    changed, _ = looked[twice.process.pid]
    counted = samples.finish()
    conserved(samples, counted)
    assert counted[StackCounter.EXECS] >= 1
    every = samples.counts
    old = every["pid"] == twice.process.pid
    samples.counts = every[old & (every["last_ns"] < changed)]
    first = judge(samples, [twice])
    samples.counts = every[~old | (every["first_ns"] > changed)]
    then = judge(samples, [second, shell])
    there = [(every["pid"] == pid) & (every["first_ns"] > since) for pid, (_, since) in looked.items()]
    samples.counts = every[np.logical_or.reduce(there)]
    known = judge(samples, [second, shell])
    assert first.on.samples["right"] > 0, str(first)
    for verdict in (first, then):
        assert not verdict.on.samples["wrong"] + verdict.off.samples["wrong"], str(verdict)
    assert known.on.by_role["main"]["right"] > 0, str(known)
    assert known.right > 0.9, str(known)


def test_libraries_that_come_and_go(samples: Samples, run: Callable[..., Program], tmp_path: Path) -> None:
    library = tmp_path / "callback.so"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", library, PROGRAMS / "callback.c"], check=True)
    verdict = sampled(samples, [run(newest(), "unload", str(library))])
    assert verdict.right >= 0.99, str(verdict)
    assert verdict.on.by_role["unloads"]["right"] > 0, str(verdict)


def test_a_process_that_may_do_next_to_nothing(samples: Samples, run: Callable[..., Program]) -> None:
    """Its filter kills it for almost any system call: it must not be made to do one."""
    program = run(newest(), "sealed")
    verdict = sampled(samples, [program])
    assert program.process.poll() is None, f"it was killed: {program.process.returncode}"
    assert verdict.right >= 0.99, str(verdict)


ENTER = """
for d in usr lib lib64 bin proc dev {more}; do
    [ -e /$d ] && mkdir -p {root}/$d && mount --rbind /$d {root}/$d || true
done
mount -t proc proc {root}/proc
exec chroot {root} "$0" "$@"
"""


@every_python
def test_a_container_of_other_mounts_numbers_and_users(
    python: str, samples: Samples, run: Callable[..., Program], tmp_path: Path
) -> None:
    """Where threads have other numbers, and files other paths, than out here."""
    root = tmp_path / "root"
    root.mkdir()
    inside = root / "programs"
    shutil.copytree(PROGRAMS, inside)
    home = Path(python).resolve().parents[1]
    more = "" if str(home).startswith("/usr") else str(home).lstrip("/")
    script = ENTER.format(root=root, more=more)
    new = ["unshare", "--mount", "--pid", "--user", "--map-root-user", "--fork", "--kill-child", "--"]
    if subprocess.run([*new, "true"], capture_output=True).returncode:
        pytest.skip("unshare is not allowed here")
    log = root / "log"
    log.touch()
    command = [*new, "sh", "-c", script, str(Path(python).resolve()), "/programs/grammar.py", "/log"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    program = Program(
        python, "grammar", log, process, Grammar(PROGRAMS / "grammar.py", version_of(python), "/programs")
    )
    try:

        def up() -> bool:
            program.read()
            assert process.poll() is None
            return program.ready

        wait_until(up, 60, "the container")
        pid = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
        outside = {}
        for task in Path(f"/proc/{pid}/task").iterdir():
            numbers = next(line for line in (task / "status").read_text().splitlines() if line.startswith("NSpid:"))
            outside[1, int(numbers.split()[-1])] = pid, int(task.name)
        assert (pid, pid) in outside.values()
        assert samples.add(pid) is not None
        samples.follow(0.5)
        counted = samples.finish()
        conserved(samples, counted)
        verdict = judge(samples, [program], outside)
    finally:
        process.kill()
        process.wait(20)
    assert not verdict.on.samples["wrong"] + verdict.off.samples["wrong"], str(verdict)
    assert verdict.right >= 0.99, str(verdict)
    assert verdict.total > 100, str(verdict)


def main(arguments: list[str]) -> None:
    """A long run by hand."""
    import tempfile

    seconds = float(arguments[0])
    probes = StackProbes(rate_hz=int(os.environ.get("RATE_HZ", RATE_HZ)), off_cpu_ns=1_000_000)
    for python in arguments[1:] or PYTHONS:
        with tempfile.TemporaryDirectory() as folder:
            samples = Samples(probes)
            names = os.environ.get("PROGRAMS", " ".join(NAMES)).split()
            programs = [start(Path(folder), python, name) for name in names]
            try:
                watch(samples, programs, seconds)
                counted = samples.finish()
                verdict = judge(samples, programs)
            finally:
                for program in programs:
                    program.end()
            unresolved = Counter[str]()
            for target in samples.targets.values():
                unresolved.update(target.resolver.counters)
            samples.close()
            print(f"== {python} {version_of(python)}: {len(samples.stacks)} stacks\n{verdict}")
            print("seconds", samples.spent.round(2), "of", seconds, "sent again", samples.resent)
            print({counter.name: value for counter, value in counted.items() if value}, dict(unresolved))
            sys.stdout.flush()
    probes.close()


if __name__ == "__main__":
    main(sys.argv[1:])
