"""The main job, shown on a fake GPU: a running job is traced by PID, one rank is made slow, and Argus names it.

Everything is real but the GPU: processes, eBPF probes, ClickHouse, the diagnosis. Which rank is slow, and how much, is
drawn at random; the verdict is compared with it at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "fakegpu"))

from run import Job  # noqa: E402 - the folder is not a package

ARGUS = str(ROOT / ".venv" / "bin" / "argus")
PAGE = ROOT / "build" / "demo-report.html"
HEALTHY_S = 5.0
FAULTY_S = 5.0
PATIENCE_S = 180.0
"""A trace ends some seconds after its time, on a machine that stands still later."""


@dataclass(frozen=True)
class Plan:
    """What will be wrong with a job."""

    ranks: int
    slow_rank: int | None
    factor: float

    def __str__(self) -> str:
        return "nothing" if self.slow_rank is None else f"rank {self.slow_rank} computes {self.factor:.2f}x slower"


def draw(rng: random.Random, ranks: int, healthy: bool) -> Plan:
    return Plan(ranks, None if healthy else rng.randrange(ranks), round(rng.uniform(1.3, 2.5), 2))


def say(text: str, quiet: bool) -> None:
    if not quiet:
        print(f"\n\033[1m» {text}\033[0m" if sys.stdout.isatty() else f"\n» {text}", flush=True)


def run_once(plan: Plan, store: Path, quiet: bool) -> bool:
    """Runs one job and returns whether the verdict is right."""
    shutil.rmtree(store, ignore_errors=True)
    url = f"chdb://{store}"
    with tempfile.TemporaryDirectory(prefix="argus-demo-") as folder:
        control = Path(folder, "faults")
        control.write_text("")
        env = {"FAKEGPU_CONTROL": str(control)}
        with Job(ranks=plan.ranks, args=["--steps", "0"], env=env, cupti=True) as job:
            say(f"a training job of {plan.ranks} ranks is running: processes {', '.join(map(str, job.pids))}", quiet)
            time.sleep(1.0)
            duration = HEALTHY_S + FAULTY_S
            command = [ARGUS, "trace", "--store", url, "--duration", str(duration)]
            command += [word for pid in job.pids for word in ("--pid", str(pid))]
            say(
                "sudo argus trace " + " ".join(f"--pid {pid}" for pid in job.pids) + f" --duration {duration:.0f}",
                quiet,
            )
            tracing = subprocess.Popen(command, stdout=subprocess.PIPE if quiet else None, text=True)
            try:
                time.sleep(HEALTHY_S)
                if plan.slow_rank is not None:
                    control.write_text(f"FAKEGPU_SLOW_RANK={plan.slow_rank}\nFAKEGPU_SLOW_FACTOR={plan.factor}\n")
                    if not quiet:
                        print("  (a fault was planted now)", flush=True)
                output, _ = tracing.communicate(timeout=duration + PATIENCE_S)
            except subprocess.TimeoutExpired:
                print(
                    f"argus trace has not ended after {duration + PATIENCE_S:.0f} s: busy machine?",
                    file=sys.stderr,
                )
                return False
            finally:
                tracing.kill()
                tracing.wait()
            if tracing.returncode != 0:
                print(f"argus trace failed ({tracing.returncode})\n{output or ''}", file=sys.stderr)
                return False
    if not quiet:
        say("argus diagnose", quiet)
        subprocess.run([ARGUS, "diagnose", "--store", url, "--no-store"], check=False)
        say("argus report", quiet)
        subprocess.run([ARGUS, "report", "--store", url, "-o", str(PAGE)], check=False)
    answer = subprocess.run(
        [ARGUS, "diagnose", "--store", url, "--format", "json"], capture_output=True, text=True, check=False
    )
    if answer.returncode != 0:
        print(f"argus diagnose failed: {answer.stderr.strip()}", file=sys.stderr)
        return False
    return judge(plan, json.loads(answer.stdout), quiet)


def judge(plan: Plan, verdict: dict[str, object], quiet: bool) -> bool:
    """Compares the verdict with what was planted."""
    findings = verdict["findings"]
    assert isinstance(findings, list)
    named = sorted({rank for finding in findings for rank in finding["ranks"]})
    if plan.slow_rank is None:
        right = verdict["status"] == "healthy"
    else:
        first = findings[0] if findings else {}
        right = verdict["status"] == "degraded" and first.get("ranks") == [plan.slow_rank] and named == first["ranks"]
    kinds = ", ".join(str(finding["kind"]) for finding in findings)
    text = f"planted: {plan}; verdict: {verdict['status']}"
    if named:
        text += f", {kinds}, rank {', '.join(map(str, named))}"
    text += f", {verdict['slowdown']:.2f}x — {'right' if right else 'WRONG'}"
    if quiet:
        print(text, flush=True)
    else:
        say(text, quiet)
    return right


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="processes of the job (default 4)")
    parser.add_argument("--seed", type=int, help="draw the same fault again")
    parser.add_argument("--healthy", action="store_true", help="plant nothing")
    parser.add_argument("--slow-runs", type=int, default=0, metavar="N", help="N runs with a slow rank, a line each")
    parser.add_argument("--healthy-runs", type=int, default=0, metavar="N", help="N healthy runs, a line each")
    options = parser.parse_args()
    if os.geteuid() != 0:
        print("demo: loading eBPF programs needs root: sudo scripts/demo", file=sys.stderr)
        return 3
    if options.ranks < 2:
        print("demo: a slow rank needs another one to be compared with: --ranks 2 or more", file=sys.stderr)
        return 2
    seed = options.seed if options.seed is not None else random.randrange(1 << 32)
    rng = random.Random(seed)
    store = ROOT / "build" / "demo-store"
    if options.slow_runs or options.healthy_runs:
        plans = [draw(rng, options.ranks, False) for _ in range(options.slow_runs)]
        plans += [draw(rng, options.ranks, True) for _ in range(options.healthy_runs)]
        # A folder a run: the last one's database closes only when the next run has begun.
        shutil.rmtree(store, ignore_errors=True)
        right = sum(run_once(plan, store / f"run-{number}", quiet=True) for number, plan in enumerate(plans))
        print(f"{right} of {len(plans)} verdicts right (seed {seed})")
        return 0 if right == len(plans) else 1
    PAGE.unlink(missing_ok=True)
    right = run_once(draw(rng, options.ranks, options.healthy), store, quiet=False)
    print(f"\nThe data stays: {ARGUS} sql --store chdb://{store}   (seed {seed})")
    if PAGE.exists():
        print(f"What was found, as a page: {PAGE}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
