"""Made-up pages: what panels of Python would send to the front end, of several sizes and characters."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from argus.report.panel import PAGE_SCHEMA, ArrayRef, Heatmap, HeatRow, Page, Panel, Table, View

HOSTILE = (
    "</script><script>document.title='owned'</script>",
    "\"'><img src=x onerror=\"document.title='owned'\">",
    "__proto__",
    "constructor",
    "\x00\x1b[31m\x07\x9b red",
    "\u202eelif\u2066\u200f \u05d0\u05d1",
    "<!--<script>",
    "]]>&lt;&#60;",
    "\u2028\u2029\ufeff\ud800 lone",
    "javascript:alert(1)",
    "https://example.com/x.png",
    "%s${1}{{7*7}}`",
    "x" * 1_000_000,
)
"""Texts that would do harm as markup, as code, or on a screen."""
KIND = {"u1": np.uint8, "u4": np.uint32, "i4": np.int32, "f4": np.float32, "f8": np.float64}


class Packing:
    """Arrays one after another."""

    def __init__(self) -> None:
        self.content = bytearray()

    def add(self, values: Any, dtype: str = "f4") -> ArrayRef:
        array = np.ascontiguousarray(values, dtype=np.dtype(KIND[dtype]).newbyteorder("<"))
        raw = array.tobytes()
        offset = len(self.content)
        self.content += raw
        return {"dtype": dtype, "shape": list(array.shape), "offset": offset, "length": len(raw)}  # type: ignore[typeddict-item]

    def packed(self) -> bytes:
        """All of them, as pages have them."""
        return zlib.compress(bytes(self.content))


def panel(name: str, *views: View, table: Table | None = None, absent: str = "", lead: str = "") -> Panel:
    title = name.replace("_", " ").capitalize()
    sql = [{"title": "the rows", "text": f"SELECT rank, avg(step_ns) FROM latest_steps /* {name} */\nGROUP BY rank"}]
    return {
        "id": name,
        "title": title,
        "lead": lead or f"What {title.lower()} shows, in a sentence.",
        "absent": absent,
        "views": list(views),
        "table": table,
        "sql": [] if absent else sql,  # type: ignore[typeddict-item]
    }


def finding(rank: int, **changed: Any) -> dict[str, Any]:
    return {
        "kind": "compute_straggler",
        "ranks": [rank],
        "hosts": ["node-0"],
        "steps": [40, 99],
        "phase": "forward",
        "kernels": ["gemm_bf16"],
        "slowdown": 1.84,
        "share": 0.31,
        "confidence": 0.93,
        "level": "kernel",
        "id": "0123456789ab",
        "owner": "infrastructure",
        "action": "Drain node-0 and check the clocks of its GPU 3.",
        "evidence": [
            {"text": f"rank {rank} arrives last in 58 of 60 steps, 182 ms after the median", "sql": "SELECT 1"},
            {"text": "gemm_bf16 takes 1.9x as long as on its peers", "sql": "SELECT kernel,\n  count()\nFROM gpu_ops"},
        ],
        **changed,
    }


def page(panels: list[Panel], verdict: dict[str, Any] | None = None, **changed: Any) -> Page:
    made: Page = {
        "schema": PAGE_SCHEMA,
        "argus": "0.9.0",
        "job": "llama-70b",
        "run": 7,
        "made_ns": "1795513925000000000",
        "live": False,
        "window": {
            "first_step": 0,
            "last_step": 99,
            "begin_ns": "1795513325000000000",
            "end_ns": "1795513925000000000",
        },
        "summary": "Rank 5 on node-0 computes 1.84x slower than its peers since step 40.",
        "verdict": verdict if verdict is not None else verdict_of("degraded", [finding(5)]),
        "panels": panels,
    }
    made.update(changed)  # type: ignore[typeddict-item]
    return made


def verdict_of(status: str, findings: list[dict[str, Any]], **changed: Any) -> dict[str, Any]:
    return {
        "schema": "argus.verdict/1",
        "job": "llama-70b",
        "run": 7,
        "ranks": 8,
        "steps": [0, 99],
        "status": status,
        "slowdown": 1.31 if findings else 1.0,
        "reason": "",
        "findings": findings,
        "coverage": {"complete": True, "ended": True, "dropped": {}},
        **changed,
    }


MEASURES = (
    ("step", "Step time", True),
    ("late", "Lateness", True),
    ("compute", "Computing", True),
    ("exposed", "Exposed communication", True),
    ("utilization", "GPU busy", False),
)


def heat_map(
    packing: Packing,
    ranks: int,
    columns: int,
    *,
    width: int = 1,
    seed: int = 1,
    named: tuple[int, ...] = (),
    per_group: int = 8,
) -> Heatmap:
    """Calm cells between 60 and 90 of 254, named ranks above; ``width``: steps of a column."""
    random = np.random.default_rng(seed)
    rows: list[HeatRow] = [
        {
            "rank": r,
            "host": f"node-{r // 8}",
            "gpu": f"GPU {r % 8}",
            "group": f"stage {r // per_group}",
            "pinned": r in named,
        }
        for r in range(ranks)
    ]
    measures = []
    for key, title, bad in MEASURES:
        cells = random.integers(60, 90, (ranks, columns), dtype=np.uint8)
        for rank in named:
            cells[rank, columns * 2 // 5 :] = 230
        cells = cells if bad else 254 - cells
        unit, low, high = ("ns", 0.0, 1.27e9) if key != "utilization" else ("share", 0.0, 1.0)
        measures.append(
            {
                "key": key,
                "title": title,
                "unit": unit,
                "low": low,
                "high": high,
                "high_is_bad": bad,
                "cells": packing.add(cells, "u1"),
            }
        )
    return {
        "view": "heatmap",
        "rows": rows,
        "edges": [c * width for c in range(columns + 1)],
        "full": width == 1,
        "measures": measures,
        "marks": [{"step": columns * width * 2 // 5, "kind": "change", "text": "compute straggler begins"}],
    }  # type: ignore[typeddict-item]


def _series(packing: Packing, steps: int) -> View:
    random = np.random.default_rng(2)
    x = np.arange(steps)
    typical = 600e6 + random.normal(0, 8e6, steps)
    named = typical + np.where(x >= steps * 2 // 5, 180e6, 0) + random.normal(0, 6e6, steps)
    typical[steps // 3] = np.nan
    lines = [
        ("95 % of ranks", "high", typical + 25e6),
        ("5 % of ranks", "low", typical - 25e6),
        ("median of ranks", "typical", typical),
        ("rank 5 on node-0", "named", named),
        ("baseline", "baseline", np.full(steps, 598e6)),
    ]
    return {
        "view": "series",
        "x_title": "step",
        "x_unit": "",
        "x": packing.add(x),
        "y_title": "step time",
        "y_unit": "ns",
        "lines": [{"title": t, "role": r, "y": packing.add(y)} for t, r, y in lines],
        "marks": [
            {"step": steps * 2 // 5, "kind": "change", "text": "compute straggler begins"},
            {"step": steps * 3 // 4, "kind": "more_work", "text": "longer sequences"},
        ],
    }  # type: ignore[typeddict-item,return-value]


def _densities(packing: Packing) -> View:
    x = np.linspace(1e6, 4e6, 200)
    curves = []
    for rank, middle in enumerate([1.8e6, 1.85e6, 1.82e6, 1.9e6, 1.78e6, 3.2e6]):
        y = np.exp(-(((x - middle) / 1.5e5) ** 2))
        curves.append({"title": f"rank {rank}", "named": rank == 5, "x": packing.add(x), "y": packing.add(y)})
    return {"view": "densities", "title": "gemm_bf16", "x_unit": "ns", "curves": curves}  # type: ignore[return-value,typeddict-item]


def frames(depth: int = 6, wide: int = 3) -> list[dict[str, Any]]:
    """A tree in which the first child of each frame is the widest."""
    made: list[dict[str, Any]] = [
        {"name": "all", "parent": -1, "total_ns": 9e9, "self_ns": 0.0, "change_ns": 0.0, "language": ""}
    ]
    level = [0]
    for d in range(1, depth):
        below = []
        for parent in level:
            total = made[parent]["total_ns"]
            for i in range(wide):
                made.append(
                    {
                        "name": f"{('train.py:step', 'torch::autograd', 'futex_wait')[d % 3]} {d}.{i}",
                        "parent": parent,
                        "total_ns": total * (0.6, 0.25, 0.1)[i % 3],
                        "self_ns": total * 0.02,
                        "change_ns": None if i == 2 else (1.2e9 if d == 2 and i == 0 else -2e8),
                        "language": ("python", "native", "kernel")[d % 3],
                    }
                )
                below.append(len(made) - 1)
        level = below[:4]
    return made


# Over 100 lines: a list of panels, data only.
def _rest(packing: Packing) -> list[Panel]:
    """Every view but the heat map."""
    stages, replicas = 4, 8
    slow = np.ones((stages, replicas), dtype=np.float32)
    slow[2, 5] = 1.84
    slow[0, 0] = np.nan
    ring = [f"rank {r} on node-{r // 8}" for r in range(8)]
    phases = ["data", "forward", "backward", "communication", "optimizer", "idle"]
    stacks: dict[str, Any] = {"view": "flame", "title": "rank 5", "compared": "", "frames": frames()}
    return [
        panel(
            "mesh",
            {
                "view": "grid",
                "row_title": "stage",
                "column_title": "data-parallel rank",
                "rows": [f"stage {s}" for s in range(stages)],
                "columns": [str(r) for r in range(replicas)],
                "unit": "ratio",
                "middle": 1.0,
                "least": 0.0,
                "cells": packing.add(slow),
                "details": [[f"rank {s * replicas + r} on node-{s}" for r in range(replicas)] for s in range(stages)],
            },
        ),
        panel("steps", _series(packing, 100)),
        panel(
            "phases",
            {
                "view": "stacked",
                "unit": "ns",
                "parts": phases,
                "rows": [
                    {"title": "rank 5 on node-0", "named": True, "values": [2e7, 3.1e8, 3.4e8, 4e7, 3e7, None]},
                    {"title": "median", "named": False, "values": [2e7, 1.7e8, 2.1e8, 2.9e8, 3e7, 2e7]},
                    {"title": "95 %", "named": False, "values": [4e7, 1.8e8, 2.2e8, 2.8e8, 3e7, 1e7]},
                ],
            },
        ),
        panel("kernels", _densities(packing)),
        panel(
            "links",
            {
                "view": "graph",
                "title": "ring of dp-0",
                "unit": "bytes_per_s",
                "nodes": ring,
                "edges": [
                    {
                        "source": i,
                        "target": (i + 1) % 8,
                        "value": 1.2e10 if i == 5 else 4.1e10,
                        "detail": "NVLink",
                        "named": i == 5,
                    }
                    for i in range(8)
                ],
            },
        ),
        panel("stacks", stacks, {**stacks, "title": "rank 5 against its peers", "compared": "its peers"}),  # type: ignore[arg-type]
        panel(
            "path",
            {
                "view": "timeline",
                "title": "step 57",
                "tracks": [
                    {
                        "title": f"rank {r}, {what}",
                        "spans": [(k * 1e8 + r * 1e7, k * 1e8 + 9e7, f"{what} {k}", int(r == 5)) for k in range(6)],
                    }
                    for r in (4, 5)
                    for what in ("compute", "all-reduce")
                ],
            },
        ),
        panel(
            "whatif",
            {
                "view": "bars",
                "unit": "ratio",
                "origin": 1.0,
                "least": 0.1,
                "bars": [
                    {
                        "title": "rank 5 as its peers",
                        "value": 1.31,
                        "detail": "the step would take 458 ms",
                        "named": True,
                    },
                    {"title": "no communication", "value": 1.08, "detail": "", "named": False},
                    {"title": "data", "value": None, "detail": "no such phase", "named": False},
                ],
            },
            table={
                "columns": [
                    {"title": "rank", "unit": ""},
                    {"title": "without it", "unit": "ratio"},
                    {"title": "lost", "unit": "ns"},
                ],
                "rows": [[5, 1.31, 1.4e8], [6, 1.01, None], [7, 1.0, 3e5]],
                "of": 1024,
            },
        ),
        panel(
            "environment",
            {
                "view": "facts",
                "facts": [
                    {"name": "driver", "text": "580.65.06 on all hosts", "state": "good"},
                    {
                        "name": "clocks",
                        "text": "GPU 5 of node-0 runs at 1,110 MHz, its peers at 1,980 MHz",
                        "state": "bad",
                    },
                    {"name": "NVLink errors", "text": "could not be read", "state": "unknown"},
                    {"name": "PyTorch", "text": "2.13.0", "state": ""},
                ],
            },
        ),
        panel("baselines", absent="No earlier run of this job is stored."),
    ]


def full_page(
    ranks: int = 8, columns: int = 100, *, width: int = 1, named: tuple[int, ...] = (5,)
) -> tuple[Page, bytes]:
    """Every view once."""
    packing = Packing()
    heat = heat_map(packing, ranks, columns, width=width, named=named, per_group=max(8, ranks // 16))
    table: Table = {
        "columns": [
            {"title": "rank", "unit": ""},
            {"title": "host", "unit": ""},
            {"title": "median step", "unit": "ns"},
        ],
        "rows": [[r, f"node-{r // 8}", 6e8 + r * 1e6] for r in range(min(ranks, 20))],
        "of": ranks,
    }
    panels = [panel("heatmap", heat, table=table), *_rest(packing)]
    return page(panels, verdict_of("degraded", [finding(5)], ranks=ranks)), packing.packed()


def one_cell(ranks: int, columns: int, rank: int, column: int, *, high_is_bad: bool = True) -> tuple[Page, bytes]:
    """A heat map in which one cell is extreme and all others are equal."""
    packing = Packing()
    heat = heat_map(packing, 1, 1)
    cells = np.full((ranks, columns), 40 if high_is_bad else 214, dtype=np.uint8)
    cells[rank, column] = 254 if high_is_bad else 0
    heat["rows"] = [
        {"rank": r, "host": f"node-{r // 8}", "gpu": f"GPU {r % 8}", "group": f"stage {r // 640}", "pinned": False}
        for r in range(ranks)
    ]
    heat["edges"] = list(range(columns + 1))
    heat["marks"] = []
    heat["measures"] = [{**heat["measures"][0], "high_is_bad": high_is_bad, "cells": packing.add(cells, "u1")}]
    return page([panel("heatmap", heat)]), packing.packed()


def empty_page() -> tuple[Page, bytes]:
    """A run without ranks and steps: every view, with nothing in it."""
    packing = Packing()
    none = packing.add([])
    heat = heat_map(packing, 1, 1)
    views: list[Any] = [
        {**heat, "rows": [], "edges": [], "measures": [], "marks": []},
        {
            "view": "series",
            "x_title": "step",
            "x_unit": "",
            "x": none,
            "y_title": "y",
            "y_unit": "ns",
            "lines": [],
            "marks": [],
        },
        {"view": "stacked", "unit": "ns", "parts": [], "rows": []},
        {"view": "bars", "unit": "ns", "origin": 0.0, "least": 0.0, "bars": []},
        {
            "view": "grid",
            "row_title": "",
            "column_title": "",
            "rows": [],
            "columns": [],
            "unit": "",
            "middle": None,
            "least": 0.0,
            "cells": none,
            "details": [],
        },
        {"view": "densities", "title": "", "x_unit": "ns", "curves": []},
        {"view": "flame", "title": "", "compared": "", "frames": []},
        {"view": "graph", "title": "", "unit": "", "nodes": [], "edges": []},
        {"view": "timeline", "title": "", "tracks": []},
        {"view": "facts", "facts": []},
    ]
    verdict = verdict_of("inconclusive", [], ranks=0, steps=[], reason="No rank has steps.")
    window = {"first_step": None, "last_step": None, "begin_ns": "0", "end_ns": "0"}
    panels = [panel(f"empty_{view['view']}", view) for view in views]
    return page(panels, verdict, window=window, summary="Nothing can be said of this run."), packing.packed()


def small_page() -> tuple[Page, bytes]:
    """One rank, one step, and numbers that are not known: in each view one thing."""
    packing = Packing()
    one, unknown = packing.add([5.0]), packing.add([np.nan])
    heat = heat_map(packing, 1, 1)
    heat["edges"] = [5, 6]
    heat["measures"].append(
        {**heat["measures"][0], "key": "none", "title": "None", "cells": packing.add([[255]], "u1")}
    )
    views: list[Any] = [
        heat,
        {
            "view": "series",
            "x_title": "step",
            "x_unit": "",
            "x": one,
            "y_title": "y",
            "y_unit": "ns",
            "marks": [],
            "lines": [
                {"title": "rank 0", "role": "named", "y": packing.add([6e8])},
                {"title": "median", "role": "typical", "y": unknown},
            ],
        },
        {
            "view": "stacked",
            "unit": "ns",
            "parts": ["a"],
            "rows": [{"title": "rank 0", "named": True, "values": [None]}],
        },
        {
            "view": "bars",
            "unit": "ratio",
            "origin": 1.0,
            "least": 0.0,
            "bars": [{"title": "rank 0", "value": None, "detail": "", "named": True}],
        },
        {
            "view": "grid",
            "row_title": "r",
            "column_title": "c",
            "rows": ["a"],
            "columns": ["b"],
            "unit": "ratio",
            "middle": 1.0,
            "least": 0.0,
            "cells": unknown,
            "details": [[""]],
        },
        {
            "view": "densities",
            "title": "k",
            "x_unit": "ns",
            "curves": [{"title": "rank 0", "named": True, "x": one, "y": one}],
        },
        {
            "view": "flame",
            "title": "t",
            "compared": "",
            "frames": [
                {"name": "main", "parent": -1, "total_ns": 1.0, "self_ns": 1.0, "change_ns": None, "language": "python"}
            ],
        },
        {
            "view": "graph",
            "title": "g",
            "unit": "bytes_per_s",
            "nodes": ["rank 0"],
            "edges": [{"source": 0, "target": 0, "value": None, "detail": "", "named": False}],
        },
        {"view": "timeline", "title": "t", "tracks": [{"title": "rank 0", "spans": [(0.0, 0.0, "x", 0)]}]},
        {"view": "facts", "facts": [{"name": "a", "text": "b", "state": ""}]},
    ]
    verdict = verdict_of("healthy", [], ranks=1, steps=[5, 5], reason="")
    return page([panel(f"small_{view['view']}", view) for view in views], verdict), packing.packed()


def absent_page() -> tuple[Page, bytes]:
    """A page on which all panels are absent."""
    names = ("heatmap", "mesh", "kernels", "links")
    panels = [panel(name, absent=f"This job has no {name}.") for name in names]
    return page(panels, verdict_of("healthy", []), summary="Nothing slows this job down."), Packing().packed()


def hostile_page(texts: tuple[str, ...], begin: int = 0) -> tuple[Page, bytes]:
    """The full page with these texts, in turn, in every place that text of others could reach: all but keys and kinds.

    Args:
        texts: What to write; of long ones the start, but in queries and evidence, as panels do.
        begin: Which of them comes first.
    """
    made, arrays = full_page()
    kept = {
        "view",
        "dtype",
        "unit",
        "x_unit",
        "y_unit",
        "schema",
        "role",
        "kind",
        "language",
        "state",
        "status",
        "made_ns",
        "begin_ns",
        "end_ns",
        "x_title",
    }
    places = 0

    def replaced(value: Any, key: str) -> Any:
        nonlocal places
        if isinstance(value, dict):
            return {name: replaced(each, name) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [replaced(each, key) for each in value]
        if not isinstance(value, str) or key in kept or (key == "absent" and not value):
            return value
        text = texts[(begin + places) % len(texts)]
        places += 1
        # Ids differ, as panels' do.
        return f"{text[:2000]}{value}" if key == "id" else text if key == "text" else text[:2000]

    changed = replaced(made, "")
    changed["verdict"]["coverage"] = {
        "complete": False,
        "ended": True,
        "dropped": {**{text[:2000]: 3 for text in texts}, "__proto__": 1},
    }
    return changed, arrays
