"""Comparisons that are right: pairs of groups of simulated runs with a known change, compared as `argus compare` does,
and runs after healthy ones, diagnosed as `argus diagnose` does.

Runs of one job differ by a spread that each pair draws between 0.5 and 1.5 % (--spread fixes it), in computation, in
transfers and in loading, each for itself. A line of JSON a pair is appended to --out, and pairs that are there are not
run again. --minutes bounds the time; what was not reached is not in the table, which says how many there are.

  scripts/pairs --pairs 30                pairs alone
  scripts/pairs --pairs 0 --histories 20  baselines alone
  scripts/pairs --unchanged               only what has no change, as often as a rate of 1 % needs: 400 pairs, 400 runs
  scripts/pairs --table                   only the table of what was run
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import beta

from argus.compare.verdict import compare
from argus.diagnose.learn import SET, keep
from argus.diagnose.read.profile import Profile, read_profile
from argus.diagnose.stored import diagnose_store
from argus.simulate.changes import parse_change
from argus.simulate.mesh import Mesh
from argus.simulate.noise import Noise
from argus.simulate.write import Spec, write
from argus.store.open import Store, open_store
from argus.store.reader import query_columns
from argus.store.schema_files import tables

SIDE = 3
"""Runs a side."""
EARLIER, FRESH = 5, 2
"""Healthy runs before, and healthy new ones after them, in each history; of each slowness there is one more."""
STEPS, MESH = 120, Mesh(dp=8, per_host=4)
KERNELS = ("gemm_bf16_128x128_tn", "flash_bwd_kernel", "gemm_bf16_128x128_nt", "elementwise_backward_kernel")
CHANGES = {
    "none": ((), ()),
    "kernel 10 % slower": (tuple(f"kernel={name}:1.1" for name in KERNELS), ("kernel",)),
    "bandwidth halved": (("bandwidth=dp:0.5",), ("bandwidth",)),
    "5 % more void": (("void=0.05",), ("void",)),
    "loader slower": (("loader=0.05",), ("data_loading",)),
    "host swapped": (("host=1:1.08", "host=0:1.08"), ("host",)),
}
"""By name: what it may be, seeds take turns; and kinds of a first cause that are right."""
SLOWER = ("compute=1.06", "bandwidth=dp:0.66", "void=0.05")
"""What makes a step about 5 % longer on all ranks."""


@dataclass(frozen=True)
class Cell:
    kind: str
    seed: int

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.seed}"


def spread_of(options: argparse.Namespace, seed: int) -> float:
    return options.spread or float(np.random.default_rng([seed, 99]).uniform(0.005, 0.015))


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """Kinds take turns, so that a run that was stopped has some of each."""
    kinds = ["none"] if options.unchanged else list(CHANGES)
    for place in range(max(options.pairs, options.histories)):
        if place < options.pairs:
            yield Cell(kinds[place % len(kinds)], place)
        if place < options.histories:
            yield Cell("history", 10_000 + place)


class Runs:
    """Simulated runs of one job, of which each is read once."""

    def __init__(self, store: Store, seed: int, spread: float, name: str = "job") -> None:
        self.store, self.seed, self.spread, self.name, self.count = store, seed, spread, name, 0
        self.query = partial(query_columns, store)

    def add(self, change: str = "") -> tuple[str, int]:
        self.count += 1
        spec = Spec(
            MESH, noise=Noise(run=self.spread), steps=STEPS, seed=self.seed * 100 + self.count, kernels=2,
            model=self.seed, changes=[parse_change(change)] if change else [],
        )  # fmt: skip
        job = f"{self.name}-{self.count}"
        made = write(self.store, job, spec, run=self.seed * 100 + self.count, start_ns=1_700_000_000 * 10**9)
        return job, made.run

    def profile(self, change: str = "") -> Profile:
        return read_profile(self.query, *self.add(change))


def run_pair(store: Store, cell: Cell, spread: float) -> dict[str, Any]:
    changes, kinds = CHANGES[cell.kind]
    change = changes[cell.seed // len(CHANGES) % len(changes)] if changes else ""
    runs = Runs(store, cell.seed, spread)
    before = [runs.profile() for _ in range(SIDE)]
    after = [runs.profile(change) for _ in range(SIDE)]
    found = compare(before, after)
    causes = [one for one in found["causes"] if one["cost_ns"]]
    first = causes[0] if causes else None
    subject = change.partition("=")[2].rpartition(":")[0] if cell.kind.startswith("kernel") else ""
    right = first is not None and first["kind"] in kinds and (not subject or first["subject"] == subject)
    return {
        "change": change, "status": found["status"], "right": right and found["status"] == "changed",
        "first": first and [first["kind"], first["subject"], round(first["cost_ns"])], "reason": found["reason"],
        "took": round(found["step_ns"]["change"] / found["step_ns"]["before"], 4),
    }  # fmt: skip


def run_history(store: Store, cell: Cell, spread: float, slower: tuple[str, ...] = SLOWER) -> dict[str, Any]:
    """Healthy runs become the baseline; then healthy new ones and slow ones are diagnosed, and not added."""
    runs = Runs(store, cell.seed, spread)
    for _ in range(EARLIER):
        keep(store, runs.profile(), SET)
    fresh = [_flagged(store, runs.add()) for _ in range(FRESH)]
    slow = {change: _flagged(store, runs.add(change)) for change in slower}
    return {"fresh": fresh, "slow": slow}


def _flagged(store: Store, run: tuple[str, int]) -> bool:
    verdict = diagnose_store(store, *run, keep=False)
    found = [one["evidence"][0]["text"] for one in verdict["findings"] if one["kind"] == "regression"]
    return any("healthy runs" in text for text in found)


def clear(store: Store) -> None:
    with store.lease() as client:
        for name in tables():
            if name != "schema_migrations":
                client.command(f"TRUNCATE TABLE {name}")


def interval(hits: int, of: int) -> str:
    """95 % interval of a rate (Clopper-Pearson)."""
    low = float(beta.ppf(0.025, hits, of - hits + 1)) if hits else 0.0
    high = float(beta.ppf(0.975, hits + 1, of - hits)) if hits < of else 1.0
    return f"{low:.1%} to {high:.1%}"


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'pairs of 3 and 3 runs':<28}{'n':>5}{'right':>8}   95 % interval     same  changed  inconclusive")
    for kind in CHANGES:
        chosen = [row for row in rows if row["kind"] == kind]
        if not chosen:
            continue
        status = [sum(row["status"] == one for row in chosen) for one in ("same", "changed", "inconclusive")]
        right = len(chosen) - status[1] if kind == "none" else sum(row["right"] for row in chosen)
        counts = f"{status[0]:>7}{status[1]:>9}{status[2]:>14}"
        print(f"{kind:<28}{len(chosen):>5}{right / len(chosen):>8.1%}   {interval(right, len(chosen)):<16}{counts}")
    histories = [row for row in rows if row["kind"] == "history"]
    if histories:
        print(f"\n{'runs after 5 healthy ones':<28}{'n':>5}{'flagged':>8}   95 % interval")
        fresh = [one for row in histories for one in row["fresh"]]
        print(f"{'healthy':<28}{len(fresh):>5}{sum(fresh) / len(fresh):>8.1%}   {interval(sum(fresh), len(fresh))}")
        for change in SLOWER:
            hits = [row["slow"][change] for row in histories if change in row["slow"]]
            if not hits:
                continue
            print(f"{change:<28}{len(hits):>5}{sum(hits) / len(hits):>8.1%}   {interval(sum(hits), len(hits))}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, help="200; 400 with --unchanged")
    parser.add_argument("--histories", type=int, help="40; 200 with --unchanged")
    parser.add_argument("--unchanged", action="store_true", help="pairs without a change and healthy runs only")
    parser.add_argument("--spread", type=float, default=0.0, help="of runs; default: 0.005 to 0.015, drawn")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=Path("build/pairs.jsonl"))
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    pairs, histories = (400, 200) if options.unchanged else (200, 40)
    options.pairs = pairs if options.pairs is None else options.pairs
    options.histories = histories if options.histories is None else options.histories
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    done = {row["key"] for row in rows}
    began = time.monotonic()
    if not options.table:
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        with tempfile.TemporaryDirectory(dir=memory) as folder, open_store(f"chdb://{folder}/store") as store:
            for cell in cells(options):
                if cell.key in done:
                    continue
                if time.monotonic() - began > 60 * options.minutes:
                    print(f"stopped after {options.minutes:g} minutes", file=sys.stderr)
                    break
                spread = spread_of(options, cell.seed)
                if cell.kind == "history":
                    figures = run_history(store, cell, spread, () if options.unchanged else SLOWER)
                else:
                    figures = run_pair(store, cell, spread)
                row = {"key": cell.key, "kind": cell.kind, "spread": round(spread, 5), **figures}
                clear(store)
                rows.append(row)
                with options.out.open("a") as out:
                    out.write(json.dumps(row) + "\n")
    show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
