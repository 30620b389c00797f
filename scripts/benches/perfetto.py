"""A timeline of a million operations: time, size and memory of Perfetto's packets and of JSON.

Of a made-up job (`tests/builders/timeline_job.py`) with half a million kernels and as many launches `argus export
perfetto` writes both formats, one after the other, each as a process of its own. Reported are the time of each, the
size of its file, and the most memory of the process and of the store's engine (resident; each has an
engine of its own). The ratio is JSON's time over that of packets.

Also: what one slice with four arguments takes to encode by hand (argus.export.packets) and with the protobuf library
and Perfetto's own descriptors (the package ``perfetto``), in the same run. ``ARGUS_BENCH_OPERATIONS`` (1,000,000)
shapes it.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from argus.export.packets import TraceFile
from argus.store.open import open_store
from argus.store.schema import ensure_schema
from benches import Result
from benches._processes import engine_of

ROOT = Path(__file__).resolve().parents[2]
OPERATIONS = int(os.environ.get("ARGUS_BENCH_OPERATIONS", "1000000"))
RANKS, KERNELS = 4, 1248
FORMATS = {"packets": "t.pftrace", "JSON": "t.json"}
SLICES = 100_000


def run(rounds: int) -> Result:
    """Exports the same job in each format."""
    sys.path.insert(0, str(ROOT))
    from tests.builders.timeline_job import TimelineJob, store_timeline

    os.environ["ARGUS_ENGINE_NICE"] = "0"
    steps = OPERATIONS // (RANKS * 2 * (KERNELS + 2))
    rows: dict[str, list[float]] = {name: [] for name in FORMATS}
    more: dict[str, float] = {"operations": 2 * RANKS * steps * (KERNELS + 2)}
    with tempfile.TemporaryDirectory() as folder:
        with open_store(f"chdb://{folder}/store") as store:
            ensure_schema(store)
            store_timeline(store, TimelineJob(ranks=RANKS, steps=steps, kernels=KERNELS, kernel_ns=20_000))
        for _ in range(rounds):
            for name, file in FORMATS.items():
                took, own, engine = _export(Path(folder), f"chdb://{folder}/store", steps, file)
                rows[name].append(took)
                more[f"{name}: MB"] = Path(folder, file).stat().st_size / 1e6
                more[f"{name}: memory of argus, MB"] = max(own, more.get(f"{name}: memory of argus, MB", 0))
                more[f"{name}: memory of the engine, MB"] = max(
                    engine, more.get(f"{name}: memory of the engine, MB", 0)
                )
    more["a slice by hand, us"], more["a slice by the protobuf library, us"] = _by_hand(), _by_library()
    ratio = min(rows["JSON"]) / min(rows["packets"])
    return Result(f"a timeline of {more['operations']:,.0f} operations", "s", rows, ratio, more)


def _export(folder: Path, url: str, steps: int, file: str) -> tuple[float, float, float]:
    """Seconds, and the most memory of the process and of its engine, MB."""
    while engine := engine_of(folder / "store"):  # each has an engine of its own
        if not Path(f"/proc/{engine}").exists():
            break
        time.sleep(0.1)
    words = [sys.executable, "-m", "argus.cli.main", "export", "perfetto", "--store", url, "--steps", f"0:{steps}"]
    begin = time.monotonic()
    process = subprocess.Popen([*words, "-o", str(folder / file)], stdout=subprocess.DEVNULL, cwd=ROOT)
    own = engine_mb = 0.0
    while process.poll() is None:
        own = max(own, _peak_mb(process.pid))
        engine_mb = max(engine_mb, _peak_mb(engine_of(folder / "store")))
        time.sleep(0.02)
    took = time.monotonic() - begin
    if process.returncode:
        raise SystemExit(f"argus export ended with {process.returncode}")
    return took, own, engine_mb


def _peak_mb(pid: int) -> float:
    """The most memory that a process has had so far; 0: it is not there."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmHWM")), 0.0)


def _by_hand() -> float:
    trace = TraceFile(io.BytesIO(), 0)
    track = trace.track(0, "stream", 0)
    begin = time.perf_counter()
    for place in range(SLICES):
        arguments = [("bytes", place), ("grid", "4x1x1"), ("block", "128x1x1"), ("issue_latency_us", 1.5)]
        trace.slice(track, place * 1000, 900, "gemm", "kernel", arguments, (place + 1,))
    trace.flush()
    return (time.perf_counter() - begin) / SLICES * 1e6


def _by_library() -> float:
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as perfetto

    out = io.BytesIO()
    begin = time.perf_counter()
    for place in range(SLICES):
        trace = perfetto.Trace()
        packet = trace.packet.add(timestamp=place * 1000, trusted_packet_sequence_id=1, sequence_flags=2)
        event = packet.track_event
        event.type, event.track_uuid, event.name_iid = 1, 1, 2
        event.category_iids.append(1)
        event.flow_ids.append(place + 1)
        event.debug_annotations.add(name_iid=1, int_value=place)
        event.debug_annotations.add(name_iid=2, string_value_iid=3)
        event.debug_annotations.add(name_iid=3, string_value_iid=4)
        event.debug_annotations.add(name_iid=4, double_value=1.5)
        packet = trace.packet.add(timestamp=place * 1000 + 900, trusted_packet_sequence_id=1)
        packet.track_event.type, packet.track_event.track_uuid = 2, 1
        out.write(trace.SerializeToString())
    return (time.perf_counter() - begin) / SLICES * 1e6
