"""The page of simulated jobs of 8 and 1,024 ranks: wall and CPU time, bytes, memory of Argus and of its engine.

The reference is what a page without thought would hold: every cell of the heat map (step time, and of GPUs computing,
exposed communication, idle time) as a number in one JSON, written from the same store in the same run. The ratio is its
bytes over the page's, of the largest job.

Each measurement is a process of its own with an engine of its own. ``ARGUS_BENCH_REPORT_STORES`` names stores of other
jobs, by comma, whose newest run is measured as well: 1,000 steps of 10,240 ranks take twenty minutes to simulate
(``argus simulate --ranks 10240 --tp 8 --pp 16 --steps 1000 --store chdb:///folder``).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from argus.report.build import build_page
from argus.report.page import html
from argus.simulate.faults import parse
from argus.simulate.mesh import Mesh
from argus.simulate.program import Program
from argus.simulate.write import Spec, write
from argus.store.open import Store, open_store
from argus.store.reader import latest_run, query_columns
from benches import Result

JOBS = ((Mesh(dp=2, tp=2, pp=2), 120), (Mesh(dp=16, tp=8, pp=8), 100))
BLOCK_RANKS = 256
"""Ranks whose cells the reference reads at once."""
_CELLS = """
SELECT i.rank AS rank, i.step AS step, i.duration_ns AS step_ns, g.compute_ns AS compute_ns,
       g.exposed_communication_ns AS exposed_ns, g.idle_ns AS idle_ns
FROM
(
  SELECT rank, step, duration_ns FROM iterations
  WHERE job = {job:String} AND run = {run:UInt32} AND rank >= {low:UInt32} AND rank < {high:UInt32}
) AS i
LEFT ANY JOIN
(
  SELECT rank, step, compute_ns, exposed_communication_ns, idle_ns FROM gpu_steps
  WHERE job = {job:String} AND run = {run:UInt32} AND rank >= {low:UInt32} AND rank < {high:UInt32}
) AS g ON i.rank = g.rank AND i.step = g.step
"""


class Cost(NamedTuple):
    """Of a page: wall time, and CPU time of both processes, s; bytes of the file; the most memory of this process and
    of the engine, MiB."""

    wall_s: float
    cpu_s: float
    nbytes: int
    own_mib: float
    engine_mib: float


def _peak_mib() -> float:
    """The most memory of this process: what ``getrusage`` has begins with its parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


def _measured(url: str, parts: Callable[[Store, str, int], Iterator[bytes]]) -> Cost:
    began = time.perf_counter()
    with open_store(url, create=False) as store, tempfile.TemporaryFile() as file:
        job, run = latest_run(store)
        written = sum(file.write(part) for part in parts(store, job, run))
        took = time.perf_counter() - began
        cpu_s = time.process_time() + store.engine_cpu_s()
        return Cost(took, cpu_s, written, _peak_mib(), store.engine_peak_bytes() / 2**20)


def _page(store: Store, job: str, run: int) -> Iterator[bytes]:
    return html(*build_page(store, job, run))


def _every_cell(store: Store, job: str, run: int) -> Iterator[bytes]:
    most = int(query_columns(store, "SELECT max(rank) AS rank FROM iterations")["rank"][0])
    for low in range(0, most + 1, BLOCK_RANKS):
        rows = query_columns(store, _CELLS, {"job": job, "run": run, "low": low, "high": low + BLOCK_RANKS})
        yield json.dumps({name: values.tolist() for name, values in rows.items()}, separators=(",", ":")).encode()


def page_of(url: str) -> Cost:
    return _measured(url, _page)


def reference_of(url: str) -> Cost:
    return _measured(url, _every_cell)


def _alone(function: Callable[[str], Cost], url: str) -> Cost:
    """The function's result, from a process of its own and with an engine that has to start."""
    with open_store(url, create=False) as store:
        until = time.monotonic() + 60
        while store.engine_peak_bytes() and time.monotonic() < until:
            time.sleep(0.1)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, (url,))


def run(rounds: int) -> Result:
    rows: dict[str, list[float]] = {}
    more: dict[str, float] = {}
    ratio = 0.0
    with tempfile.TemporaryDirectory() as folder:
        stores: list[tuple[str, str]] = []
        for mesh, steps in JOBS if rounds > 1 else JOBS[:1]:
            url = f"chdb://{folder}/{mesh.size}"
            Path(folder, str(mesh.size)).mkdir(mode=0o700)
            fault = parse(f"compute_straggler:quiet:from={steps // 2}")
            program = Program(micro_batches=2 * mesh.pp)
            with open_store(url) as store:
                write(store, "bench", Spec(mesh, program, faults=[fault], steps=steps, kernels=8))
            stores.append((f"{mesh.size}x{steps}", url))
        for url in filter(None, os.environ.get("ARGUS_BENCH_REPORT_STORES", "").split(",")):
            stores.append((Path(url.split("://")[-1]).name, url))
        for name, url in stores:
            pages, references = [], []
            for _ in range(min(rounds, 3)):
                pages.append(_alone(page_of, url))
                references.append(_alone(reference_of, url))
            rows[f"{name}, page"] = [one.wall_s for one in pages]
            rows[f"{name}, every cell in JSON"] = [one.wall_s for one in references]
            more[f"page_cpu_s_{name}"] = statistics.median(one.cpu_s for one in pages)
            more[f"reference_cpu_s_{name}"] = statistics.median(one.cpu_s for one in references)
            more[f"page_bytes_{name}"] = statistics.median(one.nbytes for one in pages)
            more[f"reference_bytes_{name}"] = statistics.median(one.nbytes for one in references)
            more[f"page_peak_mib_{name}"] = max(one.own_mib for one in pages)
            more[f"page_engine_peak_mib_{name}"] = max(one.engine_mib for one in pages)
            more[f"reference_peak_mib_{name}"] = max(one.own_mib for one in references)
            ratio = more[f"reference_bytes_{name}"] / more[f"page_bytes_{name}"]
    return Result("the page of a job", "s", rows, ratio, more)
