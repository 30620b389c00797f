"""Raw CUPTI buffers of our own program, with what they must decode to: `fixtures.tar`."""

from __future__ import annotations

import io
import json
import tarfile
import zlib
from collections import Counter
from typing import Any

import numpy as np

from scripts.gpu_check.common import Child, Context, Session, normal_name, tally, traced_kernels, training
from scripts.gpu_check.session import read_tap

STEPS = 2
MOST_BYTES = 200 << 10


def run(ctx: Context) -> None:
    tar = tarfile.open(ctx.out / "fixtures.tar", "w")  # noqa: SIM115 - closed below, whatever happens
    try:
        armed = training(ctx, "--size", "tiny", armed=True, name="armed")
        graphs = training(ctx, "--size", "tiny", "--mode", "graphs", armed=True, name="graphs")
        plain = training(ctx, "--size", "tiny", name="plain")
        try:
            for child in (armed, graphs, plain):
                child.answer(45)
            _fixture(ctx, tar, "eager", armed, plain, traffic=True)
            _fixture(ctx, tar, "graphs", graphs, None, traffic=False)
        finally:
            for child in (armed, graphs, plain):
                child.kill()
    finally:
        tar.close()


def _fixture(
    ctx: Context, tar: tarfile.TarFile, name: str, child: Child, plain: Child | None, *, traffic: bool
) -> None:
    tap = ctx.scratch / f"fixtures-{name}.tap"
    session = Session(ctx, [child.pid], "kernels,api", name, tap=str(tap))
    try:
        session.start()
        window = child.ask(f"steps {STEPS}")
        made = child.ask("traffic") if traffic else {}
        ended = session.stop()
    finally:
        session.kill()
    expected: dict[str, int] = {}
    if plain is not None:
        file = ctx.scratch / f"fixtures-{name}.json"
        plain.ask(f"profile {STEPS} {file}")
        expected = Counter(normal_name(e[1]) for e in json.loads(file.read_text())["events"] if e[0] == "kernel")
    traced = traced_kernels(session.spool)
    counted = Counter(map(normal_name, traced.within(window["begin_ns"], window["end_ns"]).kernels().name))
    buffers = read_tap(tap)
    names = json.loads(tap.with_suffix(".names").read_text())
    meta: dict[str, Any] = {
        "program": "scripts/gpu_check/train_step.py --size tiny"
        f"{'' if name == 'eager' else ' --mode ' + name}, {STEPS} steps{', traffic' if traffic else ''}",
        "cupti_version": ended["cupti_versions"], "steps_window_ns": [window["begin_ns"], window["end_ns"]],
        "traffic": made, "names": names, "counters": ended["counters"],
        "operations_by_kind": tally(list(traced.kind)),
        "kernels_by_name": tally(list(map(normal_name, traced.kernels().name))),
        "kernels_in_steps": dict(counted), "kernels_in_steps_by_torch_profiler": dict(expected),
        "layouts": _layouts(ended["cupti_versions"]), "buffers": [],
    }  # fmt: skip
    total = 0
    for number, (raw, index, replaced) in enumerate(buffers):
        packed = zlib.compress(raw, 9)
        place = zlib.compress(index, 9)
        if total + len(packed) + len(place) > MOST_BYTES:
            meta["left_out"] = len(buffers) - number
            break
        total += len(packed) + len(place)
        for kind, data in (("records", packed), ("index", place)):
            _add(tar, f"{name}/{number:03}.{kind}.z", data)
        meta["buffers"].append({"bytes": len(raw), "records": len(index) // 4, "names_are_ids": replaced})
    _add(tar, f"{name}/meta.json", json.dumps(meta, indent=1).encode())
    rows = ctx.values.setdefault("rows", [])
    records = sum(b["records"] for b in meta["buffers"])
    raw_bytes = sum(b["bytes"] for b in meta["buffers"])
    rows.append([name, len(meta["buffers"]), raw_bytes, records, total, str(meta["cupti_version"])])
    ctx.table("fixtures", ["name", "buffers", "bytes", "records", "compressed", "CUPTI"], rows)
    ctx.check(f"{name}: there are records", records > 0, f"{records:,} in {total:,} bytes")
    if expected:
        ctx.check(
            f"{name}: kernels as torch.profiler counts them",
            counted == expected,
            f"{sum(counted.values())} of {sum(expected.values())}",
        )
    if traffic:
        kinds = Counter(traced.within(made["begin_ns"], made["end_ns"]).kind)
        expected_counts = {
            k: made[f"memcpy_{w}"] for k, w in (("memcpy_h2d", "htod"), ("memcpy_d2h", "dtoh"), ("memcpy_d2d", "dtod"))
        }
        expected_counts["memset"] = made["memset"]
        ctx.check(
            f"{name}: copies and fills",
            all(kinds[k] == n for k, n in expected_counts.items()),
            f"{dict(kinds)}; made {expected_counts}",
        )


def _layouts(versions: list[int]) -> dict[str, Any]:
    from argus.cupti.layouts import for_version

    found: dict[str, Any] = {}
    for version in versions:
        known = for_version(version)
        found[str(version)] = {
            "generations": known.generations,
            "records": {str(kind): _fields(dtype) for kind, dtype in known.dtypes.items()},
        }
    return found


def _fields(dtype: np.dtype[Any]) -> dict[str, Any]:
    """Size of a record, and each field's type and offset."""
    fields = {name: [str(field[0]), field[1]] for name, field in (dtype.fields or {}).items()}
    return {"bytes": dtype.itemsize, "fields": fields}


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))
