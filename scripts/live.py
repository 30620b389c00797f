"""Every fault that the fake GPU can plant, in running jobs: each job is traced by PID with real eBPF and diagnosed, and
the verdict is compared with what was planted. The job's shape, the rank, the dose and whether the fault is there from
the start are drawn at random; a fault that is not begins in the middle of the trace. Every job had made its
communicators before it was attached to.

A line of JSON a job is appended to --out, and what is there is not run again: what was stopped goes on. The verdict
of a job that is judged wrong is in its line. A job takes some 15 s. Run it on a machine that is idle: on a busy one
ranks are slow that nobody slowed; each line has the load.

  scripts/live --rounds 20            20 jobs of each kind, 20 healthy ones
  scripts/live --kinds hang --rounds 2
  scripts/live --table                only the table of what was run
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo import ARGUS, ROOT, Job
from run import BUILD
from shapes import SHAPES

HEALTHY = "healthy"
TRAIN = "train"
"""fake_train, data-parallel with 3 to 6 ranks; other jobs are shapes of tests/fakegpu/shapes.py."""
MANY = (TRAIN, "fsdp", "tp_dp", "pp_1f1b", "tp_pp_dp", "moe_ep")
SOUND = tuple(job for job in MANY if job != "pp_1f1b")
"""Those that are healthy if nothing is planted. pp_1f1b has a micro-batch for each stage: that is reported."""
BEFORE_S, AFTER_S = 6.0, 8.0
"""How long a job is traced before and after its fault begins."""
SILENCE_S = 12.0
"""How long one is traced that hangs; ``argus diagnose --hang-after`` is set to 5 s, as waiting for 20 s shows no
more."""


@dataclass(frozen=True)
class Fault:
    """One the fake GPU can plant (tests/fakegpu/README.md).

    Attributes:
        kinds: Names of findings that are right.
        env: What plants it on a rank, by a number from 0 (mild) to 1 (loud).
        dose: The number in words.
        jobs: Those that can have it, and in which it can be seen whose fault it is.
    """

    kinds: tuple[str, ...]
    env: Callable[[int, float], dict[str, str]]
    dose: Callable[[float], str]
    jobs: tuple[str, ...] = MANY


def _between(low: float, high: float, dose: float) -> float:
    return low + (high - low) * dose


FAULTS = {
    "slow GPU": Fault(
        ("compute_straggler", "masked_compute_straggler"),
        lambda rank, dose: {
            "FAKEGPU_SLOW_RANK": str(rank), "FAKEGPU_SLOW_FACTOR": f"{_between(1.15, 2.5, dose):.2f}"
        },
        lambda dose: f"{_between(1.15, 2.5, dose):.2f}x",
    ),
    "slow data": Fault(
        ("data_loading",),
        lambda rank, dose: {
            "FAKEGPU_DATA_STALL_RANK": str(rank), "FAKEGPU_DATA_STALL_MS": f"{_between(10, 60, dose):.0f}"
        },
        lambda dose: f"{_between(10, 60, dose):.0f} ms a step",
        (TRAIN, "fsdp", "tp_dp"),
    ),
    "compiling": Fault(
        ("jit_stall",),
        lambda rank, dose: {
            "FAKEGPU_JIT_STALL_RANK": str(rank), "FAKEGPU_JIT_STALL_MS": f"{_between(10, 60, dose):.0f}",
            "FAKEGPU_JIT_STALL_EVERY": "1",
        },
        lambda dose: f"{_between(10, 60, dose):.0f} ms a step",
        (TRAIN,),
    ),
    "stalls": Fault(
        ("jit_stall",),
        lambda rank, dose: {
            "FAKEGPU_JIT_STALL_RANK": str(rank), "FAKEGPU_JIT_STALL_MS": f"{_between(80, 250, dose):.0f}",
            "FAKEGPU_JIT_STALL_EVERY": "10",
        },
        lambda dose: f"{_between(80, 250, dose):.0f} ms every 10 steps",
        (TRAIN,),
    ),
    "slow link": Fault(
        ("link_degradation",),
        lambda rank, dose: {
            "FAKEGPU_SLOW_LINK_RANK": str(rank), "FAKEGPU_SLOW_LINK_FACTOR": f"{_between(4, 20, dose):.1f}"
        },
        lambda dose: f"{_between(4, 20, dose):.1f}x",
        # In a job's only communicator, a ring of all ranks, one slow link slows all of them alike.
        ("tp_dp", "tp_pp_dp"),
    ),
    "hang": Fault(("hang",), lambda rank, dose: {"FAKEGPU_HANG_RANK": str(rank)}, lambda dose: "stops calling"),
}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """A job to be run."""

    name: str
    round: int
    job: str
    ranks: int
    rank: int
    dose: float
    from_the_start: bool

    @property
    def key(self) -> str:
        return f"{self.name}/{self.round}"

    def __str__(self) -> str:
        if self.name == HEALTHY:
            return f"{self.job} of {self.ranks} ranks, nothing wrong"
        since = "from the start" if self.from_the_start else "in the middle"
        dose = FAULTS[self.name].dose(self.dose)
        return f"{self.job} of {self.ranks} ranks, {self.name} at rank {self.rank}, {dose}, {since}"


def draw(name: str, number: int, seed: int) -> Plan:
    """The same for the same arguments."""
    rng = random.Random(f"{seed}/{name}/{number}")
    job = rng.choice(SOUND if name == HEALTHY else FAULTS[name].jobs)
    ranks = rng.randint(3, 6) if job == TRAIN else SHAPES[job].ranks
    return Plan(name, number, job, ranks, rng.randrange(ranks), rng.random(), name != "hang" and rng.random() < 0.5)


def _wait_until_attached(tracing: subprocess.Popen[bytes], output: Path) -> None:
    deadline = time.monotonic() + 60
    while "probes on" not in output.read_text():
        if tracing.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"argus trace did not attach: {output.read_text()}")
        time.sleep(0.1)


def run(plan: Plan) -> dict[str, Any]:
    """Runs a job, traces it and returns its verdict.

    Raises:
        RuntimeError: ``argus`` failed.
    """
    fault = FAULTS[plan.name].env(plan.rank, plan.dose) if plan.name != HEALTHY else {}
    lines = "".join(f"{name}={value}\n" for name, value in fault.items())
    with tempfile.TemporaryDirectory(prefix="argus-live-", ignore_cleanup_errors=True) as folder:
        url, control = f"chdb://{folder}/store", Path(folder, "faults")
        control.write_text(lines if plan.from_the_start else "")
        env = {"FAKEGPU_CONTROL": str(control), "FAKEGPU_SEED": str(plan.round)}
        words = ["--steps", "0" if plan.job == TRAIN else "1000000"]
        program = None
        if plan.job != TRAIN:
            words, program = [SHAPES[plan.job].write(Path(folder)), *words], BUILD / "fake_plan"
        with Job(ranks=plan.ranks, args=words, env=env, program=program, cupti=True) as job:
            time.sleep(1.5)
            pids = [word for pid in job.pids for word in ("--pid", str(pid))]
            log = Path(folder, "trace.log")
            with log.open("w") as output:
                tracing = subprocess.Popen(
                    [ARGUS, "trace", "--store", url, *pids], stdout=output, stderr=subprocess.STDOUT
                )
            try:
                _wait_until_attached(tracing, log)
                time.sleep(BEFORE_S)
                if not plan.from_the_start:
                    fresh = Path(folder, "fresh")
                    fresh.write_text(lines)
                    fresh.rename(control)
                time.sleep(SILENCE_S if plan.name == "hang" else AFTER_S)
                tracing.send_signal(signal.SIGINT)
                tracing.wait(60)
            finally:
                tracing.kill()
                tracing.wait()
        if tracing.returncode != 0:
            raise RuntimeError(f"argus trace failed ({tracing.returncode}): {log.read_text()}")
        words = ["--hang-after", "5"] if plan.name == "hang" else []
        answer = subprocess.run(
            [ARGUS, "diagnose", "--store", url, "--format", "json", *words], capture_output=True, text=True, check=False
        )
    if answer.returncode != 0:
        raise RuntimeError(f"argus diagnose failed: {answer.stderr.strip()}")
    verdict: dict[str, Any] = json.loads(answer.stdout)
    return verdict


def judge(plan: Plan, verdict: dict[str, Any]) -> dict[str, Any]:
    """What of the verdict is right: its status, and the kind and the ranks of its first finding."""
    findings = verdict["findings"]
    row: dict[str, Any] = {
        "status": verdict["status"],
        "found": [[finding["kind"], finding["ranks"]] for finding in findings],
        "slowdown": verdict["slowdown"],
        "reason": verdict.get("reason", ""),
        "load": round(os.getloadavg()[0], 1),
    }
    if plan.name == HEALTHY:
        return {**row, "right": verdict["status"] == "healthy" and not findings}
    first = findings[0] if findings else {"kind": "", "ranks": []}
    status = "hung" if plan.name == "hang" else "degraded"
    kind = verdict["status"] == status and first["kind"] in FAULTS[plan.name].kinds
    rank = first["ranks"] == [plan.rank]
    return {**row, "kind_right": kind, "rank_right": rank, "right": kind and rank}


def show(rows: list[dict[str, Any]]) -> None:
    by: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by[row["name"]].append(row)
    print(f"{'':<12}{'jobs':>6}{'kind':>6}{'rank':>6}{'right':>7}{'slowdown':>10}")
    for name, those in by.items():
        line = f"{name:<12}{len(those):>6}"
        line += "".join(f"{sum(row.get(part, 0) for row in those) or '':>6}" for part in ("kind_right", "rank_right"))
        print(f"{line}{sum(row['right'] for row in those):>7}{statistics.median(r['slowdown'] for r in those):>9.2f}x")
    print(f"right: {sum(row['right'] for row in rows)} of {len(rows)}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/live", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [HEALTHY, *FAULTS]
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=names, help=f"of {', '.join(names)}")
    parser.add_argument("--rounds", type=int, default=20, help="jobs of each kind (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="draw other jobs")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "live.jsonl")
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    options = parser.parse_args()
    if unknown := set(options.kinds) - set(names):
        parser.error(f"not known: {', '.join(sorted(unknown))}")
    if not options.table and os.geteuid() != 0:
        print("live: loading eBPF programs needs root: sudo scripts/live", file=sys.stderr)
        return 3
    plans = [draw(name, number, options.seed) for number in range(options.rounds) for name in options.kinds]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    rows = [row for line in lines if line.endswith("}") and (row := json.loads(line))["seed"] == options.seed]
    done = {row["key"] for row in rows}
    todo = [] if options.table else [plan for plan in plans if plan.key not in done]
    with options.out.open("a") as out:
        for number, plan in enumerate(todo, 1):
            try:
                verdict = run(plan)
                judged = judge(plan, verdict)
            except RuntimeError as failure:
                print(f"live: {plan.key}: {failure}", file=sys.stderr)
                return 1
            row = {"key": plan.key, "seed": options.seed, **vars(plan), **judged}
            if not row["right"]:
                row["verdict"] = verdict
            rows.append(row)
            out.write(json.dumps(row) + "\n")
            out.flush()
            found = ", ".join(f"{kind} {ranks}" for kind, ranks in row["found"]) or "nothing"
            print(f"{number}/{len(todo)} {plan}: {row['status']}, {found}: {'right' if row['right'] else 'WRONG'}")
    show(rows)
    return 0 if all(row["right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
