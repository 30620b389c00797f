"""What a first trial of Argus ends in: ordinary programs, traced by PID with defaults, then diagnosed.

Healthy ones (PyTorch on CPUs in one process and two, evaluation pauses, idle moments, a loop of plain Python, the fake
GPU), alone and beside busy loops, must not be called hung, and degraded only because of the load. Those with a planted
fault must have it named. Each step that was stored is compared with the program's own log: number of steps and
durations. A line of JSON a trace is appended to --out; what is there is not run again.

  scripts/healthy                        40 healthy traces and 20 with a fault: some 45 minutes
  scripts/healthy --programs mlp-3 --busy 0 --seconds 30
  scripts/healthy --faults --rounds 1    one of each fault
  scripts/healthy --table                only the table of what was run
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from demo import ARGUS, ROOT, Job
from numpy.typing import NDArray

PROGRAM = ROOT / "tests" / "e2e" / "programs" / "small_train.py"
DURATIONS = (10, 20, 30, 60)
"""Seconds of traces, in turns."""
LOAD_KINDS = ("host_contention",)
"""What a healthy program beside busy loops may be found to have."""
FAKE_GPU = "fake-gpu"


@dataclass(frozen=True)
class Program:
    """An ordinary program.

    Attributes:
        words: Arguments of small_train.py; empty: the fake GPU.
        ranks: Processes; 1: no launcher.
    """

    words: tuple[str, ...] = ()
    ranks: int = 1


HEALTHY = {
    **{f"mlp-{ms}": Program(("mlp", "--step-ms", str(ms))) for ms in (1, 3, 10, 60)},
    **{f"ddp-{ms}": Program(("mlp", "--step-ms", str(ms)), 2) for ms in (3, 10, 60)},
    "evaluation": Program(("mlp", "--step-ms", "10", "--evaluate-every", "200", "--evaluate-s", "3")),
    "ddp-evaluation": Program(("mlp", "--step-ms", "10", "--evaluate-every", "150", "--evaluate-s", "3"), 2),
    "notebook": Program(("mlp", "--step-ms", "10", "--burst-s", "4", "--idle-s", "8")),
    "loop": Program(("loop", "--step-ms", "20")),
    FAKE_GPU: Program(ranks=4),
}


@dataclass(frozen=True)
class Fault:
    """A fault of one rank of two.

    Attributes:
        words: What plants it.
        kinds: Findings that name it.
    """

    words: tuple[str, ...]
    kinds: tuple[str, ...]


FAULTS = {
    "slow data": Fault(("--fault", "data", "--fault-ms", "20"), ("data_loading",)),
    "slow compute": Fault(
        ("--fault", "compute", "--fault-ms", "20"), ("compute_straggler", "masked_compute_straggler")
    ),
    "collections": Fault(("--fault", "gc"), ("gc_pause",)),
    "hang": Fault(("--fault", "hang", "--fault-from", "600"), ("hang",)),
}


@dataclass
class Trace:
    """One to be run."""

    program: str
    busy: int
    seconds: int
    fault: str = ""
    number: int = 0
    words: tuple[str, ...] = field(default=(), repr=False)

    @property
    def key(self) -> str:
        return f"{self.program}/{self.fault}/{self.busy}/{self.seconds}/{self.number}"


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """So many processes that use a CPU each."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@contextlib.contextmanager
def running(program: Program, words: tuple[str, ...], folder: Path) -> Iterator[list[int]]:
    """The program's processes, once each has made some steps."""
    if not program.words:
        with Job(ranks=program.ranks, args=["--steps", "0"], env={}, cupti=True) as job:
            time.sleep(1.5)
            yield list(job.pids)
        return
    port = str(_free_port())
    started = []
    try:
        for rank in range(program.ranks):
            env = dict(os.environ)
            if program.ranks > 1:
                env |= {"RANK": str(rank), "WORLD_SIZE": str(program.ranks), "LOCAL_RANK": str(rank)}
                env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            command = [sys.executable, str(PROGRAM), *program.words, *words, "--log", str(folder / f"steps-{rank}")]
            started.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
        for process in started:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(f"{' '.join(program.words)} did not start")
        yield [process.pid for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


def argus(*words: str) -> subprocess.CompletedProcess[str]:
    """``argus``, as a user types it."""
    return subprocess.run([ARGUS, *words], capture_output=True, text=True, check=False)


def duration_error(found: NDArray[np.int64], marks: NDArray[np.int64]) -> float:
    """The median of how far stored durations are from those of the program's log, as a share of these.

    Args:
        found: Begin and duration of stored steps, ns, shape (steps, 2).
        marks: When the program was where stored steps begin, by its log, ascending, ns, shape (n,). Two clocks of steps
            that begin elsewhere differ by what varies between a step's parts, which is no error of either.
    """
    place = np.searchsorted(marks, found[:, 0])
    place = np.clip(place, 1, len(marks) - 2)
    place -= found[:, 0] - marks[place - 1] < marks[place] - found[:, 0]  # the nearest one
    own_ns = marks[place + 1] - marks[place]
    return float(np.median(np.abs(found[:, 1] / own_ns - 1)))


def counted(url: str, folder: Path, ranks: int) -> dict[str, Any]:
    """Steps that were stored against those of the programs' own logs, between the first and the last stored one."""
    stored, own, errors, spans = 0, 0, [], []
    for rank in range(ranks):
        log = folder / f"steps-{rank}"
        if not log.exists():
            continue
        lines = [line.split() for line in log.read_text().splitlines()]
        truth = np.array([line for line in lines if len(line) == 3], np.int64).reshape(-1, 3)
        answer = argus(
            "sql", "--store", url, "--format", "json", "--max-rows", "0",
            "SELECT step, toUnixTimestamp64Nano(i.ts) - j.mono_offset_ns AS begin, duration_ns, method"
            " FROM iterations AS i"
            f" JOIN (SELECT job, run, any(mono_offset_ns) AS mono_offset_ns FROM jobs GROUP BY job, run) AS j"
            f" ON i.job = j.job AND i.run = j.run WHERE rank = {rank} ORDER BY begin",
        )  # fmt: skip
        rows = json.loads(answer.stdout) if answer.stdout.startswith("[") else []
        if not rows or len(truth) < 3:
            continue
        found = np.array([[int(row["step"]), int(row["begin"]), int(row["duration_ns"])] for row in rows], np.int64)
        middle = truth[:, 0] + (truth[:, 1] - truth[:, 0]) // 2
        first, last = found[0, 1], found[-1, 1] + found[-1, 2]
        stored += int(found[-1, 0] - found[0, 0] + 1)
        own += int(np.sum((middle >= first) & (middle < last)))
        # Where ranges are not probed a step begins with its backward pass, else where the optimiser ends.
        by_pulses = np.array([row["method"] == "pulses" for row in rows])
        for method, column in ((by_pulses, 2), (~by_pulses, 1)):
            if method.any() and truth[:, column].all():
                errors.append(duration_error(found[method, 1:], truth[:, column]))
        spans.append(len(found) / max(int(found[-1, 0] - found[0, 0] + 1), 1))
    return {
        "steps": stored, "steps_of_log": own, "seen": round(float(np.mean(spans)), 4) if spans else None,
        "duration_error": round(float(np.max(np.abs(errors))), 4) if errors else None,
    }  # fmt: skip


def run(trace: Trace) -> dict[str, Any]:
    """Runs a program, traces it, diagnoses it.

    Raises:
        RuntimeError: The program or ``argus`` failed.
    """
    program = HEALTHY[trace.program]
    with tempfile.TemporaryDirectory(prefix="argus-healthy-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        url = f"chdb://{folder}/store"
        # A program that is beside something from its start has not changed while it was traced.
        with busy_loops(trace.busy), running(program, trace.words, folder) as pids:
            named = [word for pid in pids for word in ("--pid", str(pid))]
            began = time.monotonic()
            done = argus("trace", "--store", url, "--plain", "--duration", str(trace.seconds), *named)
            took = time.monotonic() - began
        if done.returncode != 0:
            raise RuntimeError(f"argus trace failed ({done.returncode}): {done.stdout}{done.stderr}")
        answer = argus("diagnose", "--store", url, "--format", "json")
        if not answer.stdout.startswith("{"):
            raise RuntimeError(f"argus diagnose failed ({answer.returncode}): {answer.stdout}{answer.stderr}")
        verdict: dict[str, Any] = json.loads(answer.stdout)
        steps = counted(url, folder, program.ranks)
    overhead = re.search(r"overhead: ([\d.]+)%", done.stdout)
    row = {
        "status": verdict["status"],
        "found": [[finding["kind"], finding["ranks"]] for finding in verdict["findings"]],
        "reason": verdict.get("reason", ""),
        "overhead": float(overhead[1]) if overhead else None,
        "took_s": round(took, 1),
        "load": round(os.getloadavg()[0], 1),
        **steps,
    }
    row["right"] = named_right(trace, verdict) if trace.fault else not_blamed(trace, verdict)
    if not row["right"]:
        row |= {"verdict": verdict, "output": done.stdout[-4000:]}
    return row


def not_blamed(trace: Trace, verdict: dict[str, Any]) -> bool:
    """Whether a healthy program was not blamed, or only for the load beside it."""
    if verdict["status"] == "degraded":
        return bool(trace.busy) and all(finding["kind"] in LOAD_KINDS for finding in verdict["findings"])
    return bool(verdict["status"] != "hung")


def named_right(trace: Trace, verdict: dict[str, Any]) -> bool:
    """Whether the first finding is the fault, of the rank that has it."""
    first = verdict["findings"][0] if verdict["findings"] else {"kind": "", "ranks": []}
    return first["kind"] in FAULTS[trace.fault].kinds and first["ranks"] == [1]


def plans(options: argparse.Namespace) -> list[Trace]:
    """What is to be run: each program beside each number of busy loops, durations in turns; faults."""
    chosen: list[Trace] = []
    if not options.faults or options.programs != list(HEALTHY):
        durations = itertools.cycle([options.seconds] if options.seconds else DURATIONS)
        for number in range(options.rounds):
            for program, busy in itertools.product(options.programs, options.busy):
                chosen.append(Trace(program, busy, next(durations), number=number))
    if not options.no_faults and options.programs == list(HEALTHY):
        rng = random.Random(options.rounds)
        for number, fault in itertools.product(range(5 if not options.faults else options.rounds), FAULTS):
            words = (*FAULTS[fault].words, "--fault-rank", "1")
            program = rng.choice(("ddp-3", "ddp-10", "ddp-60")) if fault != "hang" else "ddp-10"
            chosen.append(Trace(program, 0, 45 if fault == "hang" else 20, fault, number, words))
    return chosen


def show(rows: list[dict[str, Any]]) -> None:
    """A line a trace."""
    print(f"{'program':<16}{'fault':<14}{'busy':>4}{'s':>4}  {'status':<13}{'steps':>8}{'of log':>8}{'seen':>7}"
          f"{'error':>8}{'says':>7}  found")  # fmt: skip
    for row in rows:
        found = ", ".join(f"{kind} {ranks}" for kind, ranks in row["found"])
        seen = "" if row["seen"] is None else f"{row['seen']:.1%}"
        error = "" if row["duration_error"] is None else f"{row['duration_error']:.1%}"
        overhead = "" if row["overhead"] is None else f"{row['overhead']:.2f}%"
        print(
            f"{row['program']:<16}{row['fault']:<14}{row['busy']:>4}{row['seconds']:>4}  {row['status']:<13}"
            f"{row['steps']:>8}{row['steps_of_log']:>8}{seen:>7}{error:>8}{overhead:>7}  {found}"
            f"{'' if row['right'] else '  WRONG'}"
        )
    healthy, faulty = ([row for row in rows if bool(row["fault"]) is faulty] for faulty in (False, True))
    for what, those in (("healthy", healthy), ("with a fault", faulty)):
        if those:
            states = ", ".join(
                f"{sum(row['status'] == state for row in those)} {state}"
                for state in ("healthy", "inconclusive", "degraded", "hung")
            )
            print(f"{what}: {sum(row['right'] for row in those)} of {len(those)} right ({states})")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/healthy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(HEALTHY)
    parser.add_argument("--programs", type=lambda t: t.split(","), default=names, help=f"of {', '.join(names)}")
    parser.add_argument("--busy", type=lambda t: [int(n) for n in t.split(",")], default=[0, 1, 2], help="busy loops")
    parser.add_argument("--seconds", type=int, help=f"of each trace (default: {DURATIONS} in turns)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--faults", action="store_true", help="only those with a fault")
    parser.add_argument("--no-faults", action="store_true", help="only healthy ones")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "healthy.jsonl")
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    options = parser.parse_args()
    if unknown := set(options.programs) - set(names):
        parser.error(f"not known: {', '.join(sorted(unknown))}")
    if not options.table and os.geteuid() != 0:
        print("healthy: loading eBPF programs needs root: sudo scripts/healthy", file=sys.stderr)
        return 3
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    done = {row["key"] for row in rows}
    todo = [] if options.table else [trace for trace in plans(options) if trace.key not in done]
    with options.out.open("a") as out:
        for number, trace in enumerate(todo, 1):
            try:
                row = {"key": trace.key, **vars(trace), **run(trace)}
            except RuntimeError as failure:
                print(f"healthy: {trace.key}: {failure}", file=sys.stderr)
                return 1
            rows.append(row)
            out.write(json.dumps(row) + "\n")
            out.flush()
            print(f"{number}/{len(todo)} {trace.key}: {row['status']}{'' if row['right'] else ': WRONG'}", flush=True)
    show(rows)
    return 0 if all(row["right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
