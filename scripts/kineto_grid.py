"""Makes profiler traces of faulty and healthy jobs, imports and diagnoses them, and counts what was right."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from argus.cli.main import main as argus
from tests.builders.kineto_job import FAULTS, FORMATS, Job, make, right, step_times

CLOCKS = ("one", "apart", "drift")
MUCH = {"pipe": 6.0, "gpu": 1.35, "gemm": 1.4, "loader": 7.0, "stall": 8.0, "link": 3.0, "regression": 1.3}
LONGER = 0.25
"""Of a step, what slow launches, a slow optimizer and a slow copy cost: what the GPU still has to do hides as much as
slow launches take."""
COSTS = 1.1
"""How many times as long a stall makes steps at least: in a pipeline, 8 ms may hide behind other micro-batches."""


def jobs(faults: list[str], clocks: list[str], each: int, seed: int, steps: int) -> list[tuple[str, Job]]:
    """So many jobs of each fault and kind of clocks, their other properties drawn by chance."""
    found = []
    for fault in faults:
        for clock in clocks:
            for number in range(each):
                random = np.random.default_rng([seed, FAULTS.index(fault), CLOCKS.index(clock), number])

                def pick(*values: object, random: np.random.Generator = random) -> object:
                    return values[int(random.integers(len(values)))]

                shapes = [(8, 1, 1), (4, 1, 1), (4, 2, 1), (2, 4, 1), (2, 1, 4), (2, 2, 2)]
                if fault == "link":
                    shapes = [(4, 2, 1), (2, 4, 1)]
                if fault == "pipe":
                    shapes = [(2, 1, 4), (2, 2, 2)]
                dp, tp, pp = shapes[int(random.integers(len(shapes)))]
                victims = dp * tp * (pp - (fault == "pipe"))
                job = Job(
                    dp=dp, tp=tp, pp=pp, steps=steps, fault=fault, victim=int(random.integers(victims)),
                    much=MUCH.get(fault, 1.0), version=str(pick(*FORMATS)), seed=int(random.integers(1 << 30)),
                    names=str(pick("rank", "host", "same", "number")), described=bool(pick(True, True, False)),
                    seq=bool(pick(True, False)), copies=bool(pick(True, True, False)),
                    layers=int(pick(8, 12)), onset=8 if fault == "regression" else int(pick(0, 0, steps // 2)),
                    microbatches=max(4, 2 * pp),  # with fewer a healthy pipeline has a bubble that is worth a finding
                )  # fmt: skip
                if fault == "pipe":  # the others do not name who sends to whom
                    job = replace(job, version=str(pick("2.3", "2.6")), described=True)
                if job.names in ("host", "same"):
                    job = replace(job, distributed=True)
                if fault == "copy":
                    job = replace(job, copies=True)
                if fault in ("host", "optimizer", "copy"):
                    step_ms = float(np.median(step_times(replace(job, fault="healthy", steps=6)))) / 1000
                    job = replace(job, much=(1 + LONGER) * step_ms)
                if fault == "stall":
                    short = replace(job, steps=6, onset=0)
                    well = float(np.median(step_times(replace(short, fault="healthy"))))
                    while float(np.median(step_times(replace(short, much=job.much)))) < COSTS * well:
                        job = replace(job, much=2 * job.much)
                if clock != "one":
                    job = replace(job, hosts=job.ranks, apart_us=300.0, drift_ppm=10.0 if clock == "drift" else 0.0)
                found.append((f"{fault}-{clock}-{number}", job))
    return found


def diagnosed(job: Job, folder: Path, name: str) -> dict[str, object]:
    """Imports a job's traces and returns the verdict."""
    make(job, folder / name)
    store = ["--store", f"chdb:///{folder / 'store'}"]
    for words in (["import", "kineto", str(folder / name), "--job", name, *store],
                  ["diagnose", "--job", name, "--format", "json", "--no-store", *store]):  # fmt: skip
        for _ in range(4):
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = argus(words)
            if "does not answer" not in err.getvalue():
                break  # a busy machine
        if code not in (0, 10, 11, 12) and not out.getvalue().startswith("{"):
            return {"status": f"exit {code}", "findings": [], "reason": err.getvalue().strip()[-300:]}
    return json.loads(out.getvalue())  # type: ignore[no-any-return]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", action="append", choices=FAULTS)
    parser.add_argument("--clocks", action="append", choices=CLOCKS)
    parser.add_argument("--each", type=int, default=2, help="jobs of each fault and kind of clocks")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true")
    chosen = parser.parse_args()
    count: Counter[tuple[str, str, bool]] = Counter()
    with tempfile.TemporaryDirectory(prefix="argus-kineto-") as folder:
        for name, job in jobs(chosen.fault or list(FAULTS), chosen.clocks or list(CLOCKS), chosen.each, chosen.seed,
                              chosen.steps):  # fmt: skip
            verdict = diagnosed(job, Path(folder), name)
            wrong = right(job, verdict)
            _, clock, _ = name.split("-")
            count[job.fault, clock, not wrong] += 1
            if wrong or chosen.verbose:
                shape = (f"dp{job.dp} tp{job.tp} pp{job.pp} {job.version} names={job.names} described={job.described} "
                         f"seq={job.seq} copies={job.copies} layers={job.layers} victim={job.victim} "
                         f"onset={job.onset} seed={job.seed}")  # fmt: skip
                print(f"{name}: {wrong or 'right'} ({shape})", flush=True)
    print(f"{'fault':12s} " + " ".join(f"{clock:>8s}" for clock in CLOCKS))
    for fault in FAULTS:
        cells = [
            (count[fault, clock, True], count[fault, clock, True] + count[fault, clock, False]) for clock in CLOCKS
        ]
        if any(many for _, many in cells):
            print(f"{fault:12s} " + " ".join(f"{good:>4d}/{many:<3d}" if many else " " * 8 for good, many in cells))
    good = sum(many for (_, _, fine), many in count.items() if fine)
    print(f"right: {good} of {sum(count.values())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
