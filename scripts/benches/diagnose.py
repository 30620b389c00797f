"""A diagnosis of simulated jobs of 64, 1,024 and 10,240 ranks with a slow GPU: wall time from opening the store to the
verdict, CPU time and memory of both processes, level by level, and whether the rank was named. And rounds of those who
follow the job: `argus diagnose --follow`, and `argus trace` with the settings that it has.

Each measurement is a process of its own with an engine of its own. A plot shows the CPU time of both against ranks and
steps, which other work on the machine changes less than the wall time. There is no reference to compare with: the ratio
is the five seconds that a diagnosis may take, over the longest that one took (median of the rounds).

``ARGUS_BENCH_STEPS`` is how many steps the jobs have (100); of longer ones prefixes are diagnosed as well. What goes
beyond 100 steps repeats the second half of them, slow steps all, in the tables that a diagnosis reads: simulating 1,000
steps of 10,240 ranks would take ten minutes. ``ARGUS_BENCH_STORES`` names a folder that keeps the jobs for the next
time (those of 10,240 ranks and 1,000 steps have 1 GB each); else they are dropped. ``ARGUS_BENCH_RANKS`` chooses among
the sizes.

Each job is there twice: its hosts share a clock, or each has one of its own, as in live jobs, up to 5 ms off and
drifting by up to 20 ppm. Then a diagnosis lines them up first. ``ARGUS_BENCH_CLOCKS`` chooses: ``one`` or ``own``.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import multiprocessing
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from argus.diagnose.follow.follow import Follower
from argus.diagnose.follow.watch import SETTINGS
from argus.diagnose.stored import diagnose_store
from argus.model.errors import ArgusError
from argus.simulate.faults import parse
from argus.simulate.mesh import Mesh
from argus.simulate.program import Program
from argus.simulate.write import Spec, write
from argus.store.open import Store, open_store
from benches import Result

MAY_TAKE_S = 5.0
GIVEN_UP_S = 300.0
"""A measurement that takes longer is given up."""
MERGED_S = 900.0
"""So long the engine may take to merge what was stored; then it is diagnosed as it is."""
MESHES = (Mesh(dp=4, tp=4, pp=4), Mesh(dp=16, tp=8, pp=8), Mesh(dp=80, tp=8, pp=16))
PREFIXES = (100, 300, 1000)
SINCE = 50
SIMULATED = 100
REPEATED = ("iterations", "collectives", "launches", "gpu_steps", "gpu_phases", "gpu_collectives", "kernel_events")
BY_TIME = {"collectives": "ts", "launches": "ts", "kernel_events": "launch_ts"}
"""Tables without steps, and the time by which their rows belong to one."""
LEVELS = {
    "hosts": ("stored.prepare",),
    "hang": ("iteration.hang.detect",),
    "lateness": ("ranks.late_ranks.detect",),
    "gpus": ("read.gpu_times.read", "ranks.slow_gpus.detect"),
    "links": ("read.transfers.read", "ranks.links.detect"),
    "why": ("ranks.late_ranks.onset_of", "causes.lost_time.explain"),
    "regression": ("iteration.growth.detect",),
    "kernels": ("kernels.distributions.detect",),
    "jitter": ("iteration.stalls.detect",),
    "what if": ("whatif.relief.add",),
    "behaviour": ("causes.behaviour.add",),
    "health": ("causes.node_health.add",),
}
"""Functions of argus.diagnose by the level of the diagnosis that they are; ``start`` is the engine's, and what is left
is ``steps``."""


def _progress(text: str) -> None:
    print(f"bench: {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _job(mesh: Mesh, steps: int, skewed: bool) -> Iterator[tuple[str, int, list[int]]]:
    """A store with the job: its URL, the run and the slow ranks. ``skewed``: each host has a clock of its own."""
    kept = os.environ.get("ARGUS_BENCH_STORES")
    with contextlib.ExitStack() as stack:
        folder = Path(kept or stack.enter_context(tempfile.TemporaryDirectory()))
        folder /= f"{mesh.size}x{steps}{'-clocks' * skewed}"
        url, whole = f"chdb://{folder}/store", folder / "run"
        faults = [parse(f"compute_straggler:loud:from={SINCE}")]
        spec = Spec(mesh, Program(micro_batches=2 * mesh.pp), faults=faults, steps=SIMULATED, calls=4, skewed=skewed)
        if not whole.exists():
            # What another one began lacks some of its rows.
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            with open_store(url) as store:
                _progress(f"{folder.name}: {SIMULATED} steps are simulated")
                made = write(store, "bench", spec)
                _repeat(store, spec, made.run, steps)
                _merged(store)
            _ended(url)
            whole.write_text(str(made.run))
        yield url, int(whole.read_text()), list(spec.faults[0].ranks)


def _repeat(store: Store, spec: Spec, run: int, steps: int) -> None:
    """Makes the job that long. Each host's clock goes on as it went."""
    block = SIMULATED - SINCE
    turns = range(1, (steps - SIMULATED) // block + 1)
    if not turns:
        return
    rows = spec.rows(run * 10**9)
    names = "[" + ", ".join(f"'{host}'" for host in rows.hosts) + "]"

    def of_host(values: list[int]) -> str:
        return f"transform(toString(host), {names}, {values}, toInt64(0))" if any(values) else "0"

    ahead, drift = of_host(rows.offset_ns.tolist()), of_host(rows.drift_ppb.tolist())
    of_run = f"job = 'bench' AND run = {run}"
    with store.lease() as client:
        ends = "max(toUnixTimestamp64Nano(ts)) - min(toUnixTimestamp64Nano(ts))"
        first, took = client.query(
            f"SELECT minIf(toUnixTimestamp64Nano(ts), step = {SINCE}), toInt64(({ends}) / {block - 1}) * {block} "
            f"FROM iterations WHERE {of_run} AND rank = 0 AND step >= {SINCE} AND step < {SIMULATED}"
        ).result_rows[0]
        for table in REPEATED:
            _progress(f"{table}: {len(turns)} times {block} steps more")
            own = f"toUnixTimestamp64Nano({BY_TIME.get(table, 'ts')}) - {ahead}"
            of_block = f"step >= {SINCE} AND step < {SIMULATED}"
            if table in BY_TIME:
                of_block = f"{own} > {first} AND {own} <= {first} + {took}"
            # Once: the table grows.
            client.command(f"CREATE OR REPLACE TABLE bench_block AS {table}")
            client.command(f"INSERT INTO bench_block SELECT * FROM {table} WHERE {of_run} AND {of_block}")
            for turn in turns:
                later = f"{turn * took} + intDiv({turn * took} * {drift}, 1000000000)"
                changed = [f"addNanoseconds(ts, {later}) AS ts"]
                changed += [] if table in BY_TIME else [f"toUInt32(step + {turn * block}) AS step"]
                changed += [f"seq + {turn * 10_000_000} AS seq"] if table == "collectives" else []
                changed += [f"addNanoseconds(launch_ts, {later}) AS launch_ts"] if table == "kernel_events" else []
                client.command(f"INSERT INTO {table} SELECT * REPLACE ({', '.join(changed)}) FROM bench_block")
            client.command("DROP TABLE bench_block")


def _merged(store: Store) -> None:
    """Waits for the engine to have merged what was stored, as it has in a store that was filled over hours."""
    _progress("merging")
    until, idle = time.monotonic() + MERGED_S, 0
    with store.lease() as client:
        while idle < 5 and time.monotonic() < until:
            time.sleep(1)
            busy = client.query("SELECT count() FROM system.merges").result_rows[0][0]
            idle = 0 if busy else idle + 1


def _ended(url: str) -> None:
    """Waits for the engine of a store to end, which outlives its last client by some seconds."""
    with open_store(url, create=False) as store:
        until = time.monotonic() + 60
        while store.engine_peak_bytes() and time.monotonic() < until:
            time.sleep(0.1)


@dataclass
class _Cost:
    """Of some part of a diagnosis: wall time and CPU time of Python and of the engine, s; the most memory that both had
    had by its end, MiB."""

    wall_s: float = 0.0
    python_s: float = 0.0
    engine_s: float = 0.0
    python_mib: float = 0.0
    engine_mib: float = 0.0

    @property
    def cpu_s(self) -> float:
        """Of both."""
        return self.python_s + self.engine_s


@dataclass
class _Meter:
    """Shares the cost of a diagnosis out over its levels. A query that was begun ahead counts for the level in which
    the engine answered it."""

    store: Store
    by_level: dict[str, _Cost] = field(default_factory=dict)
    _level: str = "steps"
    _last: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def now(self) -> tuple[float, float, float]:
        """Wall time, CPU time of Python and of the engine."""
        return time.perf_counter(), time.process_time(), self.store.engine_cpu_s()

    def turn(self, level: str) -> str:
        """Another level begins; returns the one that was."""
        now, cost = self.now(), self.by_level.setdefault(self._level, _Cost())
        wall, python, engine = (a - b for a, b in zip(now, self._last, strict=True))
        cost.wall_s, cost.python_s, cost.engine_s = cost.wall_s + wall, cost.python_s + python, cost.engine_s + engine
        cost.python_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        cost.engine_mib = self.store.engine_peak_bytes() / 2**20
        before, self._level, self._last = self._level, level, now
        return before

    def begin(self) -> None:
        """From here on."""
        self._last = self.now()

    def wrapped(self, level: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its cost counted for a level."""

        def call(*args: Any, **options: Any) -> Any:
            before = self.turn(level)
            try:
                return function(*args, **options)
            finally:
                self.turn(before)

        return call


def _connect(store: Store) -> None:
    """Starts the engine."""
    with store.lease() as client:
        client.command("SELECT 1")


def _diagnosed(url: str, run: int, until: int | None, known: list[int]) -> tuple[dict[str, _Cost], bool]:
    """Judges the first steps of a job: cost by level and in all (``""``), and whether the slow ranks were named."""
    with contextlib.ExitStack() as stack:
        store = open_store(url, create=False)
        meter = _Meter(store)
        meter.begin()
        stack.enter_context(store)
        for level, names in LEVELS.items():
            for name in names:
                owner, _, attribute = name.rpartition(".")
                place = importlib.import_module(f"argus.diagnose.{owner}")
                whole = getattr(place, attribute)
                stack.enter_context(patch.object(place, attribute, meter.wrapped(level, whole)))
        meter.wrapped("start", _connect)(store)
        verdict = diagnose_store(store, "bench", run, steps=(None, until), keep=True)
        meter.turn("")
        costs = meter.by_level
    last = list(costs.values())
    costs[""] = _Cost(
        *(sum(getattr(one, name) for one in last) for name in ("wall_s", "python_s", "engine_s")),
        *(max(getattr(one, name) for one in last) for name in ("python_mib", "engine_mib")),
    )
    return costs, bool(verdict["findings"]) and verdict["findings"][0]["ranks"] == known


def _followed(url: str, run: int, settings: dict[str, int], keep: bool, rounds: int) -> list[_Cost]:
    """Rounds of one who follows the job; the first one lines hosts up."""
    with open_store(url, create=False) as store:
        follower = Follower(store, "bench", run, keep=keep, settings=settings)
        out = []
        for _ in range(1 + rounds):
            meter = _Meter(store)
            meter.begin()
            follower.next_round()
            meter.turn("")
            out += meter.by_level.values()
    return out


def _alone(function: Callable[..., Any], url: str, *args: Any) -> Any:
    """The function's result, from a process of its own and with an engine that has to start."""
    _ended(url)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        try:
            return pool.apply_async(function, (url, *args)).get(GIVEN_UP_S)
        except multiprocessing.TimeoutError:
            raise ArgusError(f"a measurement took longer than {GIVEN_UP_S:.0f} s") from None


def run(rounds: int) -> Result:
    rows: dict[str, list[float]] = {}
    more: dict[str, float] = {}
    cpu_s: dict[str, list[float]] = {}
    lines: list[str] = []
    most = int(os.environ.get("ARGUS_BENCH_STEPS", "100"))
    sizes = os.environ.get("ARGUS_BENCH_RANKS", "")
    chosen = [mesh for mesh in MESHES if not sizes or str(mesh.size) in sizes.split(",")]
    clocks = os.environ.get("ARGUS_BENCH_CLOCKS", "")
    rounds = min(rounds, 3)
    for mesh, skewed in itertools.product(
        chosen, [own for own in (False, True) if clocks in ("", ("one", "own")[own])]
    ):
        with _job(mesh, most, skewed) as (url, number, known):
            for steps in sorted({*(prefix for prefix in PREFIXES if prefix < most), most}):
                name = f"{mesh.size}x{steps}{'_clocks' * skewed}"
                title = f"{mesh.size:,} ranks x {steps:,} steps{', own clocks' * skewed}"
                _progress(title)
                until = None if steps == most else steps - 1
                found = [_alone(_diagnosed, url, number, until, known) for _ in range(rounds)]
                rows[title] = [costs[""].wall_s for costs, _ in found]
                cpu_s[title] = [costs[""].cpu_s for costs, _ in found]
                more[f"cpu_s_{name}"] = statistics.median(cpu_s[title])
                more[f"engine_peak_mib_{name}"] = max(costs[""].engine_mib for costs, _ in found)
                more[f"peak_mib_{name}"] = max(costs[""].python_mib for costs, _ in found)
                more[f"named_{name}"] = float(all(right for _, right in found))
                if steps == most:
                    typical = sorted((costs for costs, _ in found), key=lambda costs: costs[""].cpu_s)[rounds // 2]
                    lines += ["", *_by_level(title, typical)]
            for who, settings, keep in (("diagnose --follow", {}, True), ("trace", dict(SETTINGS), False)):
                _progress(f"{mesh.size:,} ranks, rounds of argus {who}")
                costs = _alone(_followed, url, number, settings, keep, rounds)
                lines.append(f"  a round of argus {who}: {_middle(costs[1:])}; the first one: {_middle(costs[:1])}")
                key = f"{who.split()[-1].strip('-')}_{mesh.size}{'_clocks' * skewed}"
                more[f"wall_s_{key}"] = statistics.median(cost.wall_s for cost in costs[1:])
                more[f"cpu_s_{key}"] = statistics.median(cost.cpu_s for cost in costs[1:])
                more[f"cpu_s_first_{key}"] = costs[0].cpu_s
                more[f"engine_peak_mib_{key}"] = max(cost.engine_mib for cost in costs)
    longest = max(statistics.median(took) for took in rows.values())
    return Result("a slow GPU", "s", rows, MAY_TAKE_S / longest, more, _plot(cpu_s) + lines)


def _middle(costs: list[_Cost]) -> str:
    wall, cpu = (statistics.median(getattr(cost, name) for cost in costs) for name in ("wall_s", "cpu_s"))
    return f"{wall:.2f} s, CPU {cpu:.2f} s"


def _by_level(title: str, costs: dict[str, _Cost]) -> list[str]:
    """A line a level, those that cost most first."""
    lines = [f"{title}: wall, CPU of Python and of the engine (s), most memory so far (MiB)"]
    for level, cost in sorted(costs.items(), key=lambda item: (not item[0], -item[1].cpu_s)):
        values = f"{cost.wall_s:6.2f} {cost.python_s:6.2f} {cost.engine_s:6.2f}"
        lines.append(f"  {level or 'in all':<11}{values} {cost.python_mib:7.0f} {cost.engine_mib:6.0f}")
    return lines


def _plot(cpu_s: dict[str, list[float]]) -> list[str]:
    """Median CPU time of each job, a bar each."""
    middle = {title: statistics.median(used) for title, used in cpu_s.items()}
    width, most = max(map(len, cpu_s)), max(middle.values())
    return ["CPU time"] + [
        f"{title:>{width}}  {used:5.1f} s  {'#' * round(40 * used / most)}" for title, used in middle.items()
    ]
