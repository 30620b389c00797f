"""One session of Argus as a process of its own, on command.

    python -m scripts.gpu_check.session --pid N --layers uprobes,kernels,api --spool DIR

It answers ``{"prepared": …}`` once all is loaded and compiled, so that what follows ``start`` is what a target feels.
Then, on lines of standard input: ``start`` (attach and begin), ``state``, ``stop``. Meanwhile it polls as
``argus trace`` does. With ``--again`` it is ``prepared`` anew after each ``stop``, with the same programs in the
kernel, and what it traced is thrown away.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import select
import shutil
import struct
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

import argus.live.tracer as trace_module
from argus.capture.probes import Probes
from argus.cupti import layouts
from argus.cupti.collector import Collector, CuptiOptions
from argus.live.clock import mono_offset_ns
from argus.live.cost.governor import DEFAULT_BUDGET
from argus.live.options import Options
from argus.live.tracer import Tracer
from argus.model.errors import ArgusError
from argus.model.records import GPU_LAUNCH_MATCHED, HostKind
from argus.store.open import Store, open_store
from argus.store.schema import ensure_schema
from argus.store.writer import Writer

POLL_S = 0.02
KEEP_ALL = 100.0
"""A budget that nothing exceeds: a burst of calls in an idle program may cost more than 1 % of its time, and then some
are no longer probed."""


def answer(**values: Any) -> None:
    print(json.dumps(values, default=str), flush=True)


class Tap:
    """Writes each raw buffer to a file: records as CUPTI wrote them, compressed. ``read_tap`` reads it."""

    def __init__(self, file: Path) -> None:
        self.file = open(file, "ab")  # noqa: SIM115 - for as long as the process lives

    def put_on(self, collector: Any) -> None:
        decode = collector.buffers._decode

        def tapped(buffer: Any, index: Any, replaced: bool) -> Any:
            raw, places = buffer.tobytes(), index.tobytes()
            packed = zlib.compress(raw, 9), zlib.compress(places, 9)
            self.file.write(_TAP.pack(len(raw), len(index), int(replaced), len(packed[0]), len(packed[1])))
            self.file.write(packed[0] + packed[1])
            self.file.flush()
            return decode(buffer, index, replaced)

        collector.buffers._decode = tapped


_TAP = struct.Struct("<IIIII")


def read_tap(file: Path) -> list[tuple[bytes, bytes, bool]]:
    """The buffers of a tap: records, index (u32 a record), whether names are ids."""
    found, data, at = [], file.read_bytes(), 0
    while at < len(data):
        _, _, replaced, packed, places = _TAP.unpack_from(data, at)
        at += _TAP.size
        records, index = data[at : at + packed], data[at + packed : at + packed + places]
        found.append((zlib.decompress(records), zlib.decompress(index), bool(replaced)))
        at += packed + places
    return found


class Direct:
    """GPU times alone: a collector a process, without the probes and the rest of a tracing session.

    It has the part of ``Tracer`` that is needed here, and writes ``jobs`` and ``kernel_events``.
    """

    def __init__(self, store: Store, options: argparse.Namespace, api: bool) -> None:
        self.attached: list[Any] = []
        self.store_error = ""
        self._store, self._job, self._discard = store, options.job, options.again
        # Recordings for tests have ids of names, which the helper puts there.
        how = CuptiOptions(api=api, walks_outside=options.tap is None)
        self.collectors = [Collector(pid, how) for pid in options.pid]
        self._batches: dict[int, list[Any]] = {pid: [] for pid in options.pid}
        self._offset = mono_offset_ns()

    def start(self) -> None:
        ensure_schema(self._store)

    def poll(self) -> None:
        for collector in self.collectors:
            self._batches[collector.pid] += collector.poll(time.monotonic())

    def done(self) -> bool:
        return False

    def notes(self) -> list[str]:
        return []

    def lost(self) -> dict[str, int]:
        return {name: value for name, (value, loss) in self.counters().items() if loss and value}

    def counters(self) -> dict[str, tuple[int, bool]]:
        found: dict[str, tuple[int, bool]] = {}
        for collector in self.collectors:
            for name, (value, loss) in collector.counters().items():
                found[name] = (found.get(name, (0, False))[0] + value, loss)
        return found

    def stop(self) -> dict[str, int]:
        for collector in self.collectors:
            self._batches[collector.pid] += collector.stop()
        if not self._discard:
            self._write()
        return self.lost()

    def _write(self) -> None:
        from argus.tables import gpu as gpu_rows
        from argus.tables.arrow import Origin

        origin = Origin(self._job, int(time.time()), "gpu-check", self._offset)
        writer = Writer(self._store, source="gpu-check")
        writer.append(
            "jobs",
            {"job": origin.job, "run": origin.run, "host": origin.host, "started": [self._offset], "ended": [None],
             "world_size": 1, "launcher": "", "mono_offset_ns": self._offset, "argus_version": "", "version": 1},
        )  # fmt: skip
        for rank, collector in enumerate(self.collectors):
            batches = self._batches[collector.pid]
            if not batches:
                continue
            gpu = np.concatenate([batch.gpu for batch in batches])
            host = np.concatenate([batch.host for batch in batches])
            calls = host[np.isin(host["kind"], (HostKind.RUNTIME, HostKind.DRIVER))]
            # A runtime call has the number of the driver call within it: the earlier one counts.
            calls = calls[np.lexsort((calls["start_ns"], calls["correlation"]))]
            numbers, first = np.unique(calls["correlation"], return_index=True)
            if len(numbers):
                place = np.minimum(np.searchsorted(numbers, gpu["correlation"]), len(numbers) - 1)
                same = numbers[place] == gpu["correlation"]
                gpu["launch_ns"][same] = calls["start_ns"][first[place[same]]]
                gpu["launch_tid"][same] = calls["tid"][first[place[same]]]
                gpu["flags"][same] |= GPU_LAUNCH_MATCHED
            names = gpu_rows.Names()
            names.learn(collector.names)
            writer.append("kernel_events", gpu_rows.kernel_events(gpu, origin, rank, collector.pid, names))
        report = writer.close()
        self.store_error = report.last_error if report.dropped else ""


_made: Probes | None = None


def _close_later(probes: Any) -> None:
    """For several sessions, one after the other: only what is put on files goes at the end of each."""
    probes.close = probes.detach


def make_tracer(options: argparse.Namespace, layers: set[str]) -> Any:
    """The session for the layers asked for."""
    store = open_store(f"spool://{options.spool.resolve()}")
    gpu_times = bool(layers & {"kernels", "api"})
    if "uprobes" not in layers:
        return Direct(store, options, "api" in layers)
    chosen = Options(
        pids=tuple(options.pid),
        job=options.job,
        run=options.run,
        children=options.children,
        cupti="auto" if gpu_times else "off",
        cupti_options=CuptiOptions(api="api" in layers),
        max_overhead=KEEP_ALL if options.whole else options.max_overhead / 100,
    )
    # Compiling takes seconds, and is no part of what a target feels: it is done before ``start``.
    global _made
    if _made is None:
        _made = Probes()
        if options.again:
            _close_later(_made)
    trace_module.Probes = lambda **_: _made
    return Tracer(store, chosen)


def collectors(tracer: Any) -> list[Any]:
    """The collectors of GPU times of a session, wherever it keeps them."""
    found: dict[int, Any] = {}
    seen: set[int] = set()

    def look(value: Any, depth: int) -> None:
        if id(value) in seen or depth > 5:
            return
        seen.add(id(value))
        if type(value).__name__ == "Collector":
            found[id(value)] = value
        elif isinstance(value, (list, tuple, set, dict)):
            for one in list(value.values() if isinstance(value, dict) else value)[:1000]:
                look(one, depth + 1)
        elif type(value).__module__.startswith(("argus", "__main__", "tests")) and hasattr(value, "__dict__"):
            for one in vars(value).values():
                look(one, depth + 1)

    look(tracer, 0)
    return list(found.values())


def states(tracer: Any, known: list[Any] | None = None) -> dict[str, Any]:
    """What Argus reports about itself."""
    found: dict[str, Any] = {}
    for collector in collectors(tracer) if known is None else known:
        found[f"process {collector.pid}"] = collector.text
        if collector.library:
            found["library"] = collector.library
    if notes := tracer.notes():
        found["notes"] = notes
    return found


def settled(tracer: Any, gpu_times: bool) -> bool:
    """Whether all that was asked for is on, or never will be."""
    known = collectors(tracer)
    return not gpu_times or (bool(known) and all(collector.state != "waiting" for collector in known))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pid", type=int, action="append", required=True)
    parser.add_argument("--layers", required=True)
    parser.add_argument("--spool", type=Path, required=True)
    parser.add_argument("--job", default="gpu-check")
    parser.add_argument("--run", type=int)
    parser.add_argument("--children", action="store_true")
    parser.add_argument("--tap", type=Path)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--max-overhead", type=float, default=100 * DEFAULT_BUDGET, metavar="PERCENT")
    parser.add_argument("--whole", action="store_true", help="keep every probe, whatever it costs: calls are counted")
    options = parser.parse_args()
    while (code := one(options)) == 0 and options.again:
        shutil.rmtree(options.spool, ignore_errors=True)
    return max(code, 0)


def one(options: argparse.Namespace) -> int:
    """One session. Returns the exit code; -1: none was wanted."""
    layers = set(options.layers.split(","))
    gpu_times = bool(layers & {"kernels", "api"})
    began = time.monotonic()
    try:
        tracer = make_tracer(options, layers)
        if gpu_times:
            layouts.load()  # 150 ms that are no part of a start either
        answer(prepared=True, took_s=round(time.monotonic() - began, 3))
        if sys.stdin.readline().strip() != "start":
            return -1
        cpu, began = _cpu_s(), time.monotonic()
        if options.tap:
            for collector in tracer.collectors:
                Tap(options.tap).put_on(collector)
        tracer.start()
        while time.monotonic() < began + 8.0:
            tracer.poll()
            if settled(tracer, gpu_times):
                break
            time.sleep(0.005)
    except ArgusError as failure:
        answer(error=f"argus: {failure}")
        return failure.exit_code
    answer(
        on=True,
        took_s=round(time.monotonic() - began, 3),
        attached=[f"{a.library.describe()}: {a.probes} probes" for a in tracer.attached],
        states=states(tracer),
    )
    while True:
        begun = time.monotonic()
        tracer.poll()
        if select.select([sys.stdin], [], [], max(0.0, POLL_S - (time.monotonic() - begun)))[0]:
            if sys.stdin.readline().strip() != "state":
                break
            answer(states=states(tracer), done=tracer.done(), lost=tracer.lost(), lasted_s=time.monotonic() - began)
    stopping, cpu_on = time.monotonic(), _cpu_s()
    known = collectors(tracer)
    counters = {name: value for name, (value, _) in tracer.counters().items()}
    before = states(tracer)
    lost = tracer.stop()
    with contextlib.suppress(Exception):  # a session that was stopped may have let go of its counters
        if hasattr(tracer, "_gpu"):
            counters.update({name: value for name, (value, _) in tracer._gpu.counters().items()})
        counters.update({name: value for c in known for name, (value, _) in c.counters().items() if len(known) == 1})
    if options.tap:
        options.tap.with_suffix(".names").write_text(json.dumps([collector.names for collector in known]))
    answer(
        off=True,
        took_s=round(time.monotonic() - stopping, 3),
        lasted_s=round(stopping - began, 3),
        counters=counters,
        lost=lost,
        states=before,
        states_after=states(tracer, known),
        cupti_versions=[c.buffers.layouts.version for c in known if c.buffers.layouts is not None],
        seen={
            str(m.rank): {"launches": m.launches, "collectives": m.collectives, "steps": m.steps}
            for job in getattr(tracer, "jobs", [])
            for m in job.ranks()
        },
        store_error=tracer.store_error,
        cpu_share=round((cpu_on - cpu) / max(1e-3, stopping - began), 4),
        peak_rss_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    )
    return 0


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system


if __name__ == "__main__":
    sys.exit(main())
