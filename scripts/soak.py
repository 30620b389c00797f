"""Memory of a trace over a long time, of tracer and engine: its slope with a 95 % interval, and what a week would take.

`argus trace --children` follows a launcher whose jobs come and go, on the fake GPU: attempts of a job, jobs of new
names, threads and forks that come and go, and kernels, functions, source files and libraries that were never there
before (scripts/benches/programs/soaking.py). All of it uses this machine alone: the store is embedded, and nothing
listens on a network. Every 10 s the memory of tracer (with what it started) and engine is read: Pss of
/proc/PID/smaps, without pages of files. After the warm-up a line is fitted: least squares, the interval widened for
readings that follow each other.

The tables whose keys are code, kernels and shapes take days to fill, and grow until then, as they are meant to. So do,
for hours, the engine's lists of each table's newest batches (1,000; of steps 20,000), 270 bytes each, by which it knows
what it has stored. `--tables 64` divides their sizes (docs/trace.md lists them), so that they are full after the
warm-up: what is to be shown is that memory stays as it is from then on.

Exit codes: 0: flat (the interval lies below the bound); 1: a process grows (its interval lies above the bound), or the
trace ended; 2: unclear (the bound lies in the interval): let it last longer.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from benches._processes import Slope, Watched, cpu_s, engine_of, family  # noqa: E402
from benches.memory import with_smaller_tables  # noqa: E402

from argus.model.errors import ArgusError  # noqa: E402
from argus.store.open import open_store  # noqa: E402
from argus.store.reader import query_columns  # noqa: E402

INTERVAL_S = 10.0
BOUND_MB_MIN = 0.2
"""2 GB in a week: half of what a tracer may ask for (argus/system/limits.py, DATA_BYTES)."""
WEEK_MIN = 7 * 24 * 60
STORE_MAX = "4G"
"""Bound of the store on disk while it lasts."""
CACHES = "'MarkCacheBytes', 'IndexMarkCacheBytes', 'PrimaryIndexCacheBytes', 'CompiledExpressionCacheBytes'"
ENGINE_STATE = f"""
SELECT
  (SELECT sum(value) FROM system.metrics WHERE metric IN ({CACHES})) AS caches,
  (SELECT sum(value) FROM system.metrics WHERE metric = 'MemoryTracking') AS tracked,
  (SELECT toUInt64(extract(stats, 'Allocated: ([0-9]+)')) FROM system.jemalloc_stats) AS allocated,
  (SELECT toUInt64(extract(stats, 'resident: ([0-9]+)')) FROM system.jemalloc_stats) AS resident,
  countIf(active) AS parts, countIf(NOT active) AS inactive
FROM system.parts
"""
"""Why an engine has its memory: caches (``argus.store.engine.CONFIG`` bounds them), what its allocator gave out and
what that holds of the system's, and what each part needs."""
WINDOW = "non_replicated_deduplication_window"
"""Of schemas/*.sql: 1,000 batches, of steps 20,000."""
LAUNCHER = ROOT / "scripts" / "benches" / "programs" / "soaking.py"


@dataclass(frozen=True)
class Verdict:
    """What was found of one process.

    Attributes:
        word: "flat", "grows" or "unclear".
        line: For people.
    """

    word: str
    line: str


def judge(who: str, watched: Watched, warm_up: float, bound: float) -> Verdict:
    """What a process's memory did after the warm-up.

    Args:
        who: For people.
        watched: Its readings.
        warm_up: Minutes that are left out.
        bound: MB a minute.

    Raises:
        ArgusError: There are too few readings.
    """
    found = watched.slope_from(warm_up)
    word = verdict_of(found, bound)
    begin = next(mb for minute, mb in zip(watched.minutes, watched.own_mb, strict=True) if minute >= warm_up)
    week = found.gain * WEEK_MIN / 1024, found.error * WEEK_MIN / 1024
    parts = ", ".join(f"{kind} {mb}" for kind, mb in watched.parts.most_common() if mb)
    line = (
        f"{who}: {word}: {begin:.1f} MB after {warm_up:g} min, {watched.own_mb[-1]:.1f} after"
        f" {watched.minutes[-1]:.0f}; {found.gain:+.3f} ± {found.error:.3f} MB/min (bound {bound:g}), in a week"
        f" {week[0]:+.2f} ± {week[1]:.2f} GB ({parts})"
    )
    return Verdict(word, line)


def verdict_of(found: Slope, bound: float) -> str:
    """ "flat": the interval lies below the bound; "grows": above it; "unclear": the bound lies in it."""
    return "flat" if found.high < bound else "grows" if found.low > bound else "unclear"


def exit_code(verdicts: list[Verdict]) -> int:
    """Of the program: see its description."""
    words = {verdict.word for verdict in verdicts}
    return 1 if "grows" in words else 2 if "unclear" in words else 0


@contextlib.contextmanager
def _launcher(build: Path) -> Iterator[int]:
    sys.path.insert(0, str(ROOT / "tests" / "fakegpu"))
    import run

    run.build(build)
    environment = {**os.environ, **run.armed(), "PROGRAMS": str(build)}
    with subprocess.Popen(
        [sys.executable, str(LAUNCHER)], env=environment, start_new_session=True, stdout=subprocess.DEVNULL
    ) as process:
        try:
            time.sleep(1.0)
            yield process.pid
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def _trace(pid: int, folder: Path, tables: int) -> Iterator[subprocess.Popen[bytes]]:
    words = ["trace", "--children", "--pid", str(pid), "--plain", "--store", f"chdb://{folder}/store"]
    environment = {**os.environ, "ARGUS_STORE_MAX": os.environ.get("ARGUS_STORE_MAX", STORE_MAX)}
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(
            [sys.executable, *with_smaller_tables(tables), *words],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        ) as tracing,
    ):
        try:
            yield tracing
        finally:
            tracing.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                tracing.wait(60)
            tracing.kill()


def engine_state(url: str) -> str:
    """What the engine has in memory, for people, or why it does not answer."""
    try:
        with open_store(url) as store:
            rows = query_columns(store, ENGINE_STATE)
    except ArgusError as failure:
        return f" ({failure.message})"
    sizes = ", ".join(
        f"{name} {int(rows[name][0]) / 1e6:.1f}" for name in ("caches", "tracked", "allocated", "resident")
    )
    return f" ({sizes} MB, {int(rows['parts'][0])} active parts, {int(rows['inactive'][0])} inactive)"


def shorten_lists(url: str, tables: int) -> None:
    """Has the engine remember fewer batches of each table.

    Raises:
        ArgusError: The store cannot be reached.
    """
    with open_store(url) as store, store.lease() as client:
        size = f"toUInt32OrZero(extract(create_table_query, '{WINDOW} = ([0-9]+)'))"
        rows = query_columns(store, f"SELECT name, {size} AS size FROM system.tables WHERE size > 0")
        for name, size in zip(rows["name"].tolist(), rows["size"].tolist(), strict=True):
            client.command(f"ALTER TABLE `{name}` MODIFY SETTING {WINDOW} = {max(size // tables, 10)}")


def soak(minutes: float, warm_up: float, bound: float, tables: int) -> int:
    """Runs it. Returns the exit code."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        launcher = stack.enter_context(_launcher(Path(os.environ.get("FAKEGPU_BUILD") or ROOT / "build" / "fakegpu")))
        tracing = stack.enter_context(_trace(launcher, folder, tables))
        watched = {"tracer": Watched(), "engine": Watched()}
        spent = {"tracer": 0.0, "engine": 0.0}
        begin = last_report = time.monotonic()
        while (at := (time.monotonic() - begin) / 60) < minutes:
            if tracing.poll() is not None:
                print(f"the trace ended: {(folder / 'log').read_text(errors='replace')[-3000:]}", file=sys.stderr)
                return 1
            for who, pids in (("tracer", family(tracing.pid)), ("engine", [engine_of(folder / "store")])):
                watched[who].look(at, *pids)
                spent[who] = max(spent[who], sum(map(cpu_s, pids)))
            if time.monotonic() >= last_report + 60:
                if last_report == begin:
                    shorten_lists(f"chdb://{folder}/store", tables)
                last_report = time.monotonic()
                now = ", ".join(f"{who} {one.own_mb[-1]:.1f} MB" for who, one in watched.items() if one.own_mb)
                print(f"{at:.0f} min: {now}{engine_state(f'chdb://{folder}/store')}", flush=True)
            time.sleep(max(0.0, min(INTERVAL_S, begin + 60 * minutes - time.monotonic())))
        verdicts = [judge(who, one, warm_up, bound) for who, one in watched.items()]
        lasted = time.monotonic() - begin
    for verdict in verdicts:
        print(verdict.line)
    print(", ".join(f"{who}: {100 * cpu / lasted:.1f} % of a core" for who, cpu in spent.items()))
    return exit_code(verdicts)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=80.0, help="how long (80)")
    parser.add_argument("--warm-up", type=float, help="minutes that are left out (a quarter)")
    parser.add_argument("--bound", type=float, default=BOUND_MB_MIN, help=f"MB a minute ({BOUND_MB_MIN})")
    parser.add_argument("--tables", type=int, default=64, help="what sizes of tables are divided by (64)")
    options = parser.parse_args()
    warm_up = options.minutes / 4 if options.warm_up is None else options.warm_up
    if not 0 <= warm_up < options.minutes:
        parser.error("the warm-up is longer than the whole")
    try:
        return soak(options.minutes, warm_up, options.bound, options.tables)
    except ArgusError as failure:
        print(f"soak: {failure}", file=sys.stderr)
        return failure.exit_code


if __name__ == "__main__":
    sys.exit(main())
