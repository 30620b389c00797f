"""Each detector of the list is needed: a small job of each that no other one explains."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from argus.diagnose import run as run_module
from argus.diagnose.case import Case
from argus.diagnose.detector import ask
from argus.diagnose.detectors import DETECTORS
from argus.diagnose.learn import HEALTHY, keep
from argus.diagnose.read.profile import read_profile
from argus.diagnose.stored import diagnose_store
from argus.simulate import write as write_module
from argus.simulate.changes import parse_change
from argus.simulate.faults import parse
from argus.simulate.mesh import Mesh
from argus.simulate.noise import Noise
from argus.simulate.program import Program
from argus.simulate.write import Spec, write
from argus.store.open import Store
from argus.store.reader import latest_run, query_columns
from argus.store.writer import Writer
from tests.builders import logged_job

STEPS = 60
START_NS = 1_700_000_000 * 10**9
DATA = Mesh(dp=8)
PIPELINE = Mesh(dp=2, pp=4)

Columns = dict[str, Any]


def simulated(
    fault: str = "",
    mesh: Mesh = DATA,
    batches: int = 0,
    kernels: int = 0,
    change: Callable[[str, Columns], Columns] | None = None,
) -> Callable[[Store, str, Path, pytest.MonkeyPatch], None]:
    """Stores a simulated job.

    Args:
        fault: Its fault; empty: it is healthy.
        mesh: Its ranks.
        batches: Micro-batches; 0: as the program has them.
        kernels: Ranks whose kernels are summed up.
        change: What becomes of the rows of a table, where they are not as simulated.
    """

    class Changed(Writer):
        def append(self, table: str, rows: Any) -> int:
            return super().append(table, rows if change is None else change(table, dict(rows)))

    def make(store: Store, job: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(write_module, "Writer", Changed)
        program = Program(micro_batches=batches) if batches else Program()
        spec = Spec(mesh, program, faults=[parse(fault)] if fault else [], steps=STEPS, seed=1, kernels=kernels)
        write(store, job, spec, run=1, start_ns=START_NS)

    return make


def slower_kernel(table: str, columns: Columns) -> Columns:
    """The kernel that takes most takes half as long again on rank 3. The GPUs' sums do not show it."""
    if table == "kernel_summaries":
        total = np.array(columns["total_ns"])
        kernels, place = np.unique(columns["kernel_id"], return_inverse=True)
        most = np.bincount(place, total, len(kernels)).argmax()
        total[(place == most) & (columns["rank"] == 3)] *= 3
        total[(place == most) & (columns["rank"] == 3)] //= 2
        columns["total_ns"] = total
    return columns


def slow_boundary(table: str, columns: Columns) -> Columns:
    """As a recording, whose communicators both ranks call by one name: transfers between ranks 1 and 2 are slow."""
    if table == "gpu_collectives":
        rank, peer = (np.array(columns[name]).astype(np.int64) for name in ("rank", "peer"))
        handed = np.array(columns["op"]) == "SendRecv"
        boundary = np.minimum(rank, peer)
        columns["comm"] = np.where(handed, 1000 + boundary, columns["comm"])
        columns["shortest_ns"] = np.where(handed & (boundary == 1), 9_000_000, columns["shortest_ns"])
    return columns


def later_calls(table: str, columns: Columns) -> Columns:
    """From the middle on rank 3 makes its calls 25 ms later than before, and its GPU loses nothing by it."""
    if table == "collectives":
        ts, rank = np.array(columns["ts"]), np.array(columns["rank"])
        middle = START_NS + (ts.max() - START_NS) / 2
        columns["ts"] = np.where(rank == 3, ts + np.where(ts < middle, -5_000_000, 20_000_000), ts)
    return columns


def logged(store: Store, job: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step times and timers of a log, of ranks that wait for one another: rank 5 computes for longer."""
    fault = logged_job.Fault("forward", 5, 0.3)
    log = logged_job.make(logged_job.LAYOUTS["wait inside backward"], faults=(fault,))
    times, phases = logged_job.rows(log)
    with Writer(store, source="test") as writer:
        for table, rows in (("iterations", times), ("phases", phases)):
            ts = START_NS + rows["step"] * 10**8
            columns = {**rows, "job": job, "run": 1, "host": "node", "ts": ts, "confidence": 1.0, "method": "imported"}
            rest = {"iterations": {"collectives": 0, "launches": 0}, "phases": {"overlapped_ns": 0, "spans": 1}}
            columns["duration_ns"] = columns["duration_ns"].astype(np.int64)
            writer.append(table, {**columns, **rest[table]})
        assert writer.flush()


def slow_from_the_start(store: Store, job: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four healthy runs of a class, and one whose transfers take twice as long from its first step on."""
    query = partial(query_columns, store)
    for number in range(1, 6):
        changes = [parse_change("bandwidth=dp:0.5")] if number == 5 else []
        spec = Spec(DATA, noise=Noise(run=0.005), steps=STEPS, seed=number, changes=changes)
        write(store, job, spec, run=number, start_ns=START_NS)
        if number < 5:
            keep(store, read_profile(query, job, number), HEALTHY)


JOBS: dict[str, tuple[Callable[[Store, str, Path, pytest.MonkeyPatch], None], str]] = {
    "hang": (simulated("hang:ranks=3"), "hang"),
    "slow_gpus": (simulated("masked_compute_straggler:ranks=3:from=20", PIPELINE, 4), "masked_compute_straggler"),
    "logged_times": (logged, "compute_straggler"),
    "late_ranks": (simulated("data_loading:ranks=3:from=20"), "data_loading"),
    "slow_links": (simulated("link_degradation:ranks=3:from=20", PIPELINE, 8), "link_degradation"),
    "stage_links": (simulated(mesh=Mesh(pp=4), change=slow_boundary), "link_degradation"),
    "growth": (simulated("regression"), "regression"),
    "slow_kernels": (simulated(kernels=8, change=slower_kernel), "compute_straggler"),
    "layout": (simulated("stage_imbalance", PIPELINE, 8), "stage_imbalance"),
    "layout_change": (simulated("sequence_imbalance:from=30"), "sequence_imbalance"),
    "stalls": (simulated("jitter:ranks=3"), "jitter"),
    "lost_lead": (simulated(change=later_calls), "kernel_issue_stall"),
    "against_baseline": (slow_from_the_start, "regression"),
}
"""Of each detector: what stores a job that it explains, and the kind of what it finds there."""


@pytest.mark.thorough(first=5)
@pytest.mark.parametrize("name", JOBS)
def test_a_job_that_only_this_detector_explains(
    shared: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    make, kind = JOBS[name]
    make(shared, name, tmp_path, monkeypatch)
    asked: list[Case] = []

    def noted(entries: Any, case: Case) -> None:
        ask(entries, case)
        asked.append(case)

    monkeypatch.setattr(run_module, "ask", noted)
    verdict = diagnose_store(shared, *latest_run(shared, name), keep=False)
    assert [(one.detector, one.kind) for one in asked[-1].suspects] == [(name, kind)]
    assert [finding["kind"] for finding in verdict["findings"]] == [kind]


def test_each_detector_has_such_a_job() -> None:
    assert [entry.name for entry in DETECTORS] == list(JOBS)
