"""The judged grid: every kind of fault at every dose on meshes of several sizes, and healthy jobs. Each cell simulates
a job, diagnoses it from the store as any other, and compares the verdict with the truth.

All cells share one store, in memory where there is some; a job's rows are dropped before the next. A line of JSON a
cell is appended to --out, and cells that are there are not run again: a grid that was stopped goes on.

  scripts/grid --ranks 8 --kinds compute_straggler,data_loading --seeds 3     a small part
  scripts/grid --part 1/4 --out part1.jsonl                                  a quarter, for one of four machines
  scripts/grid --table                                                       only the table of what was run
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from argus.diagnose.stored import diagnose_store
from argus.model.errors import ArgusError
from argus.simulate.faults import DOSES, FAULTS, parse
from argus.simulate.mesh import Mesh
from argus.simulate.noise import Noise
from argus.simulate.program import Program
from argus.simulate.write import Spec, truth, write
from argus.store.open import Store, open_store

HEALTHY, VARIABLE = "healthy", "healthy variable"
SHAPES = {
    8: [(Mesh(dp=8, per_host=4), 1), (Mesh(dp=2, tp=2, pp=2, per_host=4), 4)],
    64: [(Mesh(dp=4, tp=4, pp=4), 8), (Mesh(dp=16, tp=4), 2), (Mesh(dp=8, pp=4, vpp=2, tp=2), 8), (Mesh(dp=64), 1)],
    1024: [(Mesh(dp=16, tp=8, pp=8), 16)],
    10240: [(Mesh(dp=80, tp=8, pp=16), 32)],
}
"""By ranks: mesh and micro-batches; seeds take turns."""
NOISES = {
    "": Noise(),
    "interrupted": Noise(spike=0.01, spike_ms=8),
    "scattered": Noise(op=0.03, gpu=0.01, data=0.6, transfer=0.2, drift=0.004),
    "unlike": Noise(gpu=0.015, spike=2e-3, data=0.4),
}
"""Other noise than the simulator's own: rules must hold for it, too. Operating systems that interrupt fifty times as
often, for longer; everything scatters about four times as much; GPUs differ by four times as much."""
SEEDS = {8: 20, 64: 20, 1024: 3, 10240: 1}
STEPS = {8: 60, 64: 60, 1024: 60, 10240: 60}
FROM_THE_START = ("pipeline_bubble",)
ALIKE = [{"compute_straggler", "masked_compute_straggler"}]
"""Kinds of which either name is right: where a slow GPU hides depends on the mesh."""
EVERYBODY = ("regression", "pipeline_bubble", "sequence_imbalance")
"""Nobody in particular is to blame: naming nobody, or all, is right."""


@dataclass(frozen=True)
class Cell:
    kind: str
    dose: str
    ranks: int
    seed: int
    noise: str = ""

    @property
    def key(self) -> str:
        return "/".join([self.kind, self.dose, str(self.ranks), str(self.seed), *filter(None, [self.noise])])


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    for ranks in options.ranks:
        seeds = options.seeds or SEEDS[ranks]
        for kind in options.kinds:
            healthy = kind in (HEALTHY, VARIABLE)
            doses = [""] if healthy else ["loud"] if ranks == 10240 else options.doses
            for dose in doses:
                first, many = options.first_seed, seeds * (3 if healthy and ranks < 1024 else 1)
                for seed in range(first, first + many):
                    yield Cell(kind, dose, ranks, seed, options.noise)


def spec_of(cell: Cell) -> Spec | None:
    """The job; None: no mesh of that size can have the fault."""
    shapes, steps = SHAPES[cell.ranks], STEPS[cell.ranks]
    program = Program(variable=cell.kind == VARIABLE)
    for turn in range(len(shapes)):
        mesh, batches = shapes[(cell.seed + turn) % len(shapes)]
        faults = []
        if cell.dose:
            # A fault begins in the second fifth of the steps, or where its kind defines it.
            since = steps // 5 + int(np.random.default_rng(cell.seed).integers(steps // 5))
            since_option = "" if FAULTS[cell.kind].begins or cell.kind in FROM_THE_START else f":from={since}"
            faults = [parse(f"{cell.kind}:{cell.dose}{since_option}")]
        job = Program(**{**asdict(program), "micro_batches": batches})
        try:
            calls = 8 if cell.ranks < 1024 else 4
            return Spec(mesh, job, NOISES[cell.noise], faults, steps=steps, seed=cell.seed, calls=calls)
        except ArgusError:
            continue
    return None


def judge(cell: Cell, known: dict[str, Any], verdict: dict[str, Any]) -> dict[str, Any]:
    """What was right. ``unplaced``: just the ranks were named that no record distinguishes from those of the truth."""
    findings = verdict["findings"]
    found: dict[str, Any] = {
        "status": verdict["status"], "found": [[f["kind"], f["ranks"][:16], f["steps"][0]] for f in findings[:3]],
        "cost": known["slowdown"], "reported_cost": verdict["slowdown"],
        "alarm": verdict["status"] in ("degraded", "hung"),
    }  # fmt: skip
    if not known["faults"]:
        return found
    fault = known["faults"][0]
    names = next((alike for alike in ALIKE if cell.kind in alike), {cell.kind})
    everybody = set(range(known["mesh"]["ranks"]))

    def right(finding: dict[str, Any]) -> tuple[bool, bool]:
        ranks = set(finding["ranks"])
        blamed = ranks in (set(), everybody) if cell.kind in EVERYBODY else ranks == set(fault["ranks"])
        return finding["kind"] in names, blamed

    checked = [right(finding) for finding in findings]
    first = checked[0] if checked else (False, False)
    onset = abs(findings[0]["steps"][0] - fault["steps"][0]) if findings and findings[0]["steps"] else None
    return {
        **found, "kind_right": first[0], "ranks_right": first[1], "top1": all(first),
        "anywhere": any(all(one) for one in checked), "onset": onset, "fault_cost": fault["slowdown"],
        "unplaced": first[0] and not first[1] and findings[0]["ranks"] == fault["alike"],
    }  # fmt: skip


def run_cell(store: Store, cell: Cell, spec: Spec) -> dict[str, Any]:
    began = time.perf_counter()
    made = write(store, "grid", spec)
    known = truth(spec, "grid", made)
    middle = time.perf_counter()
    verdict = diagnose_store(store, "grid", made.run, keep=False)
    done = time.perf_counter()
    with store.lease() as client:
        for table in made.rows:
            client.command(f"TRUNCATE TABLE {table}")
    return {
        **asdict(cell), "simulate_s": round(middle - began, 2), "diagnose_s": round(done - middle, 2),
        **judge(cell, known, dict(verdict)),
    }  # fmt: skip


def show(rows: list[dict[str, Any]]) -> None:
    by: dict[tuple[str, str, int], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by[row["kind"], row["dose"], row["ranks"]].append(row)
    print(
        f"{'kind':<26}{'dose':<8}{'ranks':>6}{'n':>4}{'cost':>7}{'alarm':>7}"
        f"{'kind':>6}{'ranks':>7}{'top-1':>7}{'alike':>7}{'onset':>7}"
    )
    for (kind, dose, ranks), those in sorted(by.items(), key=lambda item: (item[0][2], item[0][0], item[0][1])):
        line = f"{kind:<26}{dose:<8}{ranks:>6}{len(those):>4}{statistics.mean(r['cost'] for r in those):>7.2f}"
        line += f"{statistics.mean(r['alarm'] for r in those):>7.0%}"
        if dose:
            onsets = [row["onset"] for row in those if row["onset"] is not None]
            line += "".join(
                f"{statistics.mean(row.get(name, False) for row in those):>{width}.0%}"
                for name, width in (("kind_right", 6), ("ranks_right", 7), ("top1", 7), ("unplaced", 7))
            )
            line += f"{statistics.median(onsets):>7.0f}" if onsets else f"{'':>7}"
        print(line)
    faulty = [row for row in rows if row["dose"]]
    healthy = [row for row in rows if not row["dose"]]
    if faulty:
        for dose in dict.fromkeys(row["dose"] for row in faulty):
            those = [row for row in faulty if row["dose"] == dose]
            right, unplaced = sum(row["top1"] for row in those), sum(row.get("unplaced", False) for row in those)
            wrong = len(those) - right - unplaced
            print(f"{dose}: top-1 right {right} of {len(those)} ({right / len(those):.1%}), wrong {wrong}")
            if unplaced:
                print(f"{'':>{len(dose)}}  communicator named, the rank is not in the records: {unplaced}")
    if healthy:
        print(f"false alarms: {sum(r['alarm'] for r in healthy)} of {len(healthy)}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/grid", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--ranks", type=lambda text: [int(n) for n in words(text)], default=list(SHAPES))
    parser.add_argument("--kinds", type=words, default=[HEALTHY, VARIABLE, *FAULTS])
    parser.add_argument("--doses", type=words, default=list(DOSES))
    parser.add_argument("--seeds", type=int, help="seeds of each cell (default: 20 up to 64 ranks, then 3, then 1)")
    parser.add_argument(
        "--first-seed", type=int, default=0, help="they are counted from (others than any that rules were mended with)"
    )
    parser.add_argument("--noise", choices=NOISES, default="", help="other noise than the simulator's own")
    parser.add_argument("--part", default="1/1", help="K/N: every N-th cell, from the K-th")
    parser.add_argument("--out", type=Path, default=Path("build/grid.jsonl"))
    parser.add_argument("--store", help="where to (default: in memory)")
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    options = parser.parse_args()
    unknown = set(options.kinds) - {HEALTHY, VARIABLE, *FAULTS} | set(options.doses) - set(DOSES)
    if unknown or set(options.ranks) - set(SHAPES):
        parser.error(f"not known: {', '.join(sorted(unknown)) or options.ranks}")
    part, parts = map(int, options.part.split("/"))
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    done = {row["key"] for row in rows}
    todo = [] if options.table else [cell for cell in list(cells(options))[part - 1 :: parts] if cell.key not in done]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    shared = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder,
        open_store(options.store or f"chdb://{folder}/store") as store,
        options.out.open("a") as out,
    ):
        for number, cell in enumerate(todo):
            spec = spec_of(cell)
            if spec is None:
                continue
            try:
                row = {"key": cell.key, **run_cell(store, cell, spec)}
            except ArgusError as failure:
                print(f"grid: {cell.key}: {failure}", file=sys.stderr)
                return failure.exit_code
            rows.append(row)
            out.write(json.dumps(row) + "\n")
            out.flush()
            named = ", ".join(f"{kind} {ranks}" for kind, ranks, _ in row["found"]) or row["status"]
            print(f"{number + 1}/{len(todo)} {cell.key}: {row['cost']:.2f}x {'right' if row.get('top1') else named}")
    show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
