"""A pipeline-parallel training job whose operations, and what slows it down, are known: rows as StragglerAnalysis has
them. The schedule is 1F1B; begins follow from what each operation waits for, worked out operation by operation."""

from __future__ import annotations

from collections.abc import Callable
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

Float = NDArray[np.float64]
Key = tuple[str, int, int, int]
"""Op type, stage, data-parallel rank, number."""
Fault = Callable[[Key, Float], Float]
"""Takes an operation and its seconds in each step, returns what it takes with the fault."""

FORWARD_S, BACKWARD_S = 0.05, 0.1
CLOSING = (
    "gc", "layernorm-grads-all-reduce", "embedding-grads-all-reduce", "grads-reduce-scatter",
    "optimizer-clip-main-grad", "optimizer",
)  # fmt: skip
TAKES_S = {
    "forward-compute": FORWARD_S, "backward-compute": BACKWARD_S, "forward-send": 4e-4, "forward-recv": 4e-4,
    "backward-send": 4e-4, "backward-recv": 4e-4, "params-all-gather": 0.02, "gc": 0.0,
    "layernorm-grads-all-reduce": 5e-5, "embedding-grads-all-reduce": 0.003, "grads-reduce-scatter": 0.03,
    "optimizer-clip-main-grad": 0.004, "optimizer": 0.015,
}  # fmt: skip


def healthy(key: Key, seconds: Float) -> Float:
    return seconds


def rows(
    *,
    dp: int = 4,
    pp: int = 4,
    microbatches: int = 8,
    steps: int = 16,
    fault: Fault = healthy,
    noise: float = 0.01,
    seed: int = 0,
    width: int = 1,
) -> dict[str, Any]:
    """Columns of a trace. ``noise``: relative standard deviation of every operation; ``width``: ranks a worker stands
    for (tensor parallel)."""
    random = np.random.default_rng(seed)
    before: dict[Any, list[Any]] = {}
    order: dict[Key, int] = {}

    def chain(keys: list[Any]) -> None:
        for earlier, later in pairwise(keys):
            before.setdefault(later, []).append(earlier)

    for d in range(dp):
        for stage in range(pp):
            warm = min(pp - stage - 1, microbatches)
            passes = [("forward-compute", stage, d, i) for i in range(warm)]
            for i in range(microbatches - warm):
                passes += [("forward-compute", stage, d, warm + i), ("backward-compute", stage, d, i)]
            passes += [("backward-compute", stage, d, i) for i in range(microbatches - warm, microbatches)]
            chain(passes)
            closing = [(name, stage, d, 0) for name in CLOSING]
            if stage not in (0, pp - 1):
                closing = [key for key in closing if key[0] != "embedding-grads-all-reduce"]
            chain([passes[-1], *closing])
            gather = ("params-all-gather", stage, d, 0)
            before.setdefault(gather, [])
            before.setdefault(passes[0], []).append(gather)
            chain([gather, ("grads-reduce-scatter", stage, d, 0)])
            first = next(place for place, key in enumerate(passes) if key[0] == "backward-compute")
            for kind, to in (("forward", 1), ("backward", -1)):
                other = stage + to
                if not 0 <= other < pp:
                    continue
                for i in range(microbatches):
                    send, recv = (f"{kind}-send", stage, d, i), (f"{kind}-recv", other, d, i)
                    before.setdefault(send, []).append((f"{kind}-compute", stage, d, i))
                    before.setdefault((f"{kind}-compute", other, d, i), []).append(recv)
                    before.setdefault(recv, [])
                    if i:
                        before[send].append((f"{kind}-send", stage, d, i - 1))
                        before[recv] += [(f"{kind}-recv", other, d, i - 1), (f"{kind}-compute", other, d, i - 1)]
            if first >= 2:
                for name in ("backward-recv", "backward-send"):
                    if (name == "backward-recv" and stage < pp - 1) or (name == "backward-send" and stage > 0):
                        before.setdefault((name, stage, d, 0), []).append(passes[first - 2])
    together = _groups(dp, pp, microbatches)
    graph: dict[Any, list[Any]] = {key: list(those) for key, those in before.items()}
    for number, members in enumerate(together):
        graph["there", number] = [other for key in members for other in before.get(key, [])]
        for key in members:
            graph[key] = [("there", number)]
    starts: dict[Any, Float] = {}
    ends: dict[Any, Float] = {}
    for node in TopologicalSorter(graph).static_order():
        after = [ends[other] for other in graph.get(node, [])]
        starts[node] = np.max(after, axis=0) if after else np.zeros(steps)
        if node[0] == "there":
            ends[node] = starts[node]
            continue
        order[node] = len(order)
        usual = TAKES_S[node[0]] * np.maximum(1 + noise * random.standard_normal(steps), 0.5)
        ends[node] = starts[node] + fault(node, usual)
    for key in order:
        own = [ends[other] for other in before.get(key, [])]
        starts[key] = np.max(own, axis=0) if own else np.zeros(steps)
    found: dict[str, list[Any]] = {
        name: [] for name in ("optype", "stage", "dp_rank", "rank", "seq_id", "mc", "gmc", "mb_id")
    }
    begin, took = [], []
    for name, stage, d, i in order:
        compute = name.endswith("compute")
        for column, value in (
            ("optype", name), ("stage", stage), ("dp_rank", d), ("rank", (stage * dp + d) * width), ("seq_id", i),
            ("mc", 0 if compute or "params" in name or "reduce-scatter" in name else -1),
            ("gmc", stage if compute else -1), ("mb_id", i if compute else -1),
        ):  # fmt: skip
            found[column] += [value] * steps
        begin.append(starts[name, stage, d, i])
        took.append(ends[name, stage, d, i] - starts[name, stage, d, i])
    return {
        **found,
        "step": np.tile(np.arange(10, 10 + steps), len(order)),
        "start_ts": np.concatenate(begin),
        "duration": np.concatenate(took),
    }


def _groups(dp: int, pp: int, microbatches: int) -> list[list[Key]]:
    groups: list[list[Key]] = [[("optimizer-clip-main-grad", s, d, 0) for s in range(pp) for d in range(dp)]]
    for stage in range(pp):
        groups += [[(name, stage, d, 0) for d in range(dp)] for name in ("params-all-gather", "grads-reduce-scatter")]
    for d in range(dp):
        groups.append([("embedding-grads-all-reduce", s, d, 0) for s in sorted({0, pp - 1})])
        for kind, to in (("forward", 1), ("backward", -1)):
            for stage in range(pp):
                if 0 <= stage + to < pp:
                    groups += [
                        [(f"{kind}-send", stage, d, i), (f"{kind}-recv", stage + to, d, i)] for i in range(microbatches)
                    ]
    return groups


def write(
    folder: Path, columns: dict[str, Any], *, single: bool = True, shuffled: bool = True, **sizes: int
) -> tuple[Path, Path]:
    """Stores a trace and its metadata. ``single``: times in single precision, as in the published ones."""
    table = pa.table(columns)
    if single:
        for name in ("start_ts", "duration"):
            table = table.set_column(table.column_names.index(name), name, table[name].cast(pa.float32()))
    if shuffled:
        table = table.take(np.random.default_rng(1).permutation(table.num_rows))
    path, meta = folder / "trace.parquet", folder / "meta.yaml"
    pq.write_table(table, path)
    known = {"dp_size": 4, "pp_size": 4, "tp_size": 1, "dsp_size": 1, "vpp_size": 1, **sizes}
    world = known["dp_size"] * known["pp_size"] * known["tp_size"] * known["dsp_size"]
    lines = ["trial_name: made", *(f"{name}: {value}" for name, value in {**known, "world_size": world}.items())]
    meta.write_text("\n".join(lines) + "\n")
    return path, meta


# ---- what can be wrong


def slow_worker(stage: int, dp: int, factor: float, since: int = 0) -> Fault:
    def fault(key: Key, seconds: Float) -> Float:
        if key[0].endswith("compute") and key[1:3] == (stage, dp):
            seconds = np.where(np.arange(len(seconds)) >= since, seconds * factor, seconds)
        return seconds

    return fault


def slow_stage(stage: int, factor: float) -> Fault:
    return lambda key, seconds: seconds * factor if key[0].endswith("compute") and key[1] == stage else seconds


def uneven_sequences(spread: float, seed: int = 5) -> Fault:
    """Each micro-batch of each data-parallel rank has its own amount of work, the same in all stages."""

    def fault(key: Key, seconds: Float) -> Float:
        if not key[0].endswith("compute"):
            return seconds
        random = np.random.default_rng([seed, key[2], key[3]])
        return np.asarray(seconds * np.exp(spread * random.standard_normal(len(seconds))))

    return fault


def slow_link(stage: int, dp: int, factor: float) -> Fault:
    """What data-parallel rank ``dp`` sends between a stage and the next one takes longer."""
    ends = {
        ("forward-send", stage),
        ("forward-recv", stage + 1),
        ("backward-send", stage + 1),
        ("backward-recv", stage),
    }
    return lambda key, seconds: seconds * factor if key[:2] in ends and key[2] == dp else seconds


def pauses(chance: float, long_s: float, seed: int = 9) -> Fault:
    """Garbage collection now and then, in forwards."""

    def fault(key: Key, seconds: Float) -> Float:
        if key[0] != "forward-compute":
            return seconds
        random = np.random.default_rng([seed, *key[1:]])
        return np.asarray(seconds + long_s * (random.random(len(seconds)) < chance))

    return fault
