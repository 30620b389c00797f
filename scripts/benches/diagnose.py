"""A diagnosis of simulated jobs of 64, 1,024 and 10,240 ranks with a slow GPU: wall time from opening the store to the
verdict, CPU time and memory of both processes, and whether the rank was named.

The engine is started anew each time. A plot shows the CPU time of both processes against ranks and steps, which other
work on the machine changes less than the wall time. There is no reference to compare with: the ratio is the five
seconds that the largest may take, over what it takes.

``ARGUS_BENCH_STEPS`` is how many steps the jobs have (100); of longer ones prefixes are judged as well. What goes
beyond 100 steps repeats the second half of them, slow steps all, in the tables that a diagnosis reads: simulating 1,000
steps of 10,240 ranks would take ten minutes. Jobs are made in memory and dropped, unless ``ARGUS_BENCH_STORES`` names a
folder, which keeps them for the next time. ``ARGUS_BENCH_RANKS`` chooses among the sizes.

Each job is there twice: its hosts share a clock, or each has one of its own, as in live jobs, up to 5 ms off and
drifting by up to 20 ppm. Then a diagnosis lines them up first. ``ARGUS_BENCH_CLOCKS`` chooses: ``one`` or ``own``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from argus.diagnose.run import diagnose_store
from argus.simulate.faults import parse
from argus.simulate.mesh import Mesh
from argus.simulate.program import Program
from argus.simulate.write import Spec, write
from argus.store.open import Store, open_store
from benches import Result

MAY_TAKE_S = 5.0
MESHES = (Mesh(dp=4, tp=4, pp=4), Mesh(dp=16, tp=8, pp=8), Mesh(dp=80, tp=8, pp=16))
PREFIXES = (100, 300, 1000)
SINCE = 50
SIMULATED = 100
REPEATED = ("iterations", "collectives", "launches", "gpu_phases", "gpu_collectives", "kernel_events")


@contextlib.contextmanager
def _job(mesh: Mesh, steps: int, skewed: bool) -> Iterator[tuple[str, int, list[int]]]:
    """A store with the job: its URL, the run and the slow ranks. ``skewed``: each host has a clock of its own."""
    kept = os.environ.get("ARGUS_BENCH_STORES")
    shared = Path("/dev/shm")
    with contextlib.ExitStack() as stack:
        temporary = stack.enter_context(tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None))
        folder = Path(kept) / f"{mesh.size}x{steps}{'-clocks' * skewed}" if kept else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        url, whole = f"chdb://{folder}/store", folder / "run"
        faults = [parse(f"compute_straggler:loud:from={SINCE}")]
        spec = Spec(mesh, Program(micro_batches=2 * mesh.pp), faults=faults, steps=SIMULATED, calls=4, skewed=skewed)
        if not whole.exists():
            with open_store(url) as store:
                made = write(store, "bench", spec)
                _repeat(store, spec, made.run, steps)
                whole.write_text(str(made.run))
        yield url, int(whole.read_text()), list(spec.faults[0].ranks)


def _repeat(store: Store, spec: Spec, run: int, steps: int) -> None:
    """Makes the job that long. Each host's clock goes on as it went."""
    block = SIMULATED - SINCE
    rows = spec.rows(run * 10**9)
    names = "[" + ", ".join(f"'{host}'" for host in rows.hosts) + "]"

    def of_host(values: list[int]) -> str:
        return f"transform(toString(host), {names}, {values}, toInt64(0))" if any(values) else "0"

    ahead, drift = of_host(rows.offset_ns.tolist()), of_host(rows.drift_ppb.tolist())
    with store.lease() as client:
        mine = f"job = 'bench' AND run = {run}"
        ends = "max(toUnixTimestamp64Nano(ts)) - min(toUnixTimestamp64Nano(ts))"
        took = (
            f"(SELECT toInt64(({ends}) / {block - 1}) * {block} FROM iterations "
            f"WHERE {mine} AND rank = 0 AND step >= {SINCE} AND step < {SIMULATED})"
        )
        first = f"(SELECT min(ts) FROM iterations WHERE {mine} AND step = {SINCE})"
        for table in REPEATED:
            told = "step" if table not in ("collectives", "launches", "kernel_events") else ""
            for turn in range(1, (steps - SIMULATED) // block + 1):
                later = f"{turn} * {took} + intDiv({turn} * {took} * {drift}, 1000000000)"
                changed = [f"addNanoseconds(ts, {later}) AS ts"]
                changed += [f"toUInt32(step + {turn * block}) AS step"] if told else []
                changed += [f"seq + {turn * 10_000_000} AS seq"] if table == "collectives" else []
                changed += [f"addNanoseconds(launch_ts, {later}) AS launch_ts"] if table == "kernel_events" else []
                own = f"addNanoseconds({'launch_ts' if table == 'kernel_events' else 'ts'}, -{ahead})"
                since = (
                    f"step >= {SINCE} AND step < {SIMULATED}"
                    if told
                    else f"{own} > {first} AND {own} <= addNanoseconds({first}, {took})"
                )
                client.command(
                    f"INSERT INTO {table} SELECT * REPLACE ({', '.join(changed)}) "
                    f"FROM (SELECT * FROM {table} WHERE {mine} AND {since})"
                )


def run(rounds: int) -> Result:
    rows: dict[str, list[float]] = {}
    more: dict[str, float] = {}
    cpu_s: dict[str, list[float]] = {}
    most = int(os.environ.get("ARGUS_BENCH_STEPS", "100"))
    sizes = os.environ.get("ARGUS_BENCH_RANKS", "")
    chosen = [mesh for mesh in MESHES if not sizes or str(mesh.size) in sizes.split(",")]
    clocks = os.environ.get("ARGUS_BENCH_CLOCKS", "")
    for mesh, skewed in itertools.product(
        chosen, [own for own in (False, True) if clocks in ("", ("one", "own")[own])]
    ):
        with _job(mesh, most, skewed) as (url, number, known):
            for steps in sorted({*(prefix for prefix in PREFIXES if prefix < most), most}):
                name = f"{mesh.size}x{steps}{'_clocks' * skewed}"
                title = f"{mesh.size:,} ranks x {steps:,} steps{', own clocks' * skewed}"
                took, used = rows.setdefault(title, []), cpu_s.setdefault(title, [])
                until = None if steps == most else steps - 1
                for _ in range(min(rounds, 3)):
                    _ended(url)
                    began, cpu = time.perf_counter(), time.process_time()
                    with open_store(url, create=False) as store:
                        verdict = diagnose_store(store, "bench", number, steps=(None, until), keep=skewed)
                        took.append(time.perf_counter() - began)
                        used.append(time.process_time() + store.engine_cpu_s() - cpu)
                        more[f"engine_peak_mib_{name}"] = store.engine_peak_bytes() / 2**20
                more[f"cpu_s_{name}"] = min(used)
                named = bool(verdict["findings"]) and verdict["findings"][0]["ranks"] == known
                more[f"named_{name}"] = float(named)
                more[f"peak_mib_{name}"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Result("a slow GPU", "s", rows, MAY_TAKE_S / min(took), more, _plot(cpu_s))


def _ended(url: str) -> None:
    """Waits for the engine of a store to end, which outlives its last client by some seconds."""
    with open_store(url, create=False) as store:
        until = time.monotonic() + 60
        while store.engine_peak_bytes() and time.monotonic() < until:
            time.sleep(0.1)


def _plot(cpu_s: dict[str, list[float]]) -> list[str]:
    """Least CPU time of each job, a bar each."""
    width, most = max(map(len, cpu_s)), max(min(used) for used in cpu_s.values())
    return ["CPU time"] + [
        f"{title:>{width}}  {min(used):5.1f} s  {'#' * round(40 * min(used) / most)}" for title, used in cpu_s.items()
    ]
