"""What-if answers of a training job: Argus's levels of columns against a dataframe simulated operation by operation.

The reference is what one would write first: a pandas frame with a row an operation, transfer times by grouping, and for
each question a copy of the frame in which some durations are replaced, evaluated operation by operation with vectors
over steps and data-parallel ranks. It gets which operations wait for which from the same code as Argus, so that both
have the same model. Both start from the same columns in memory, and must agree to 1e-9.

The traces are those of StragglerAnalysis where ``ARGUS_REFERENCE_DATA`` has them (AR: 117,216 operations), else a
made-up one of the same size. The ratio is of the times of the largest trace, the median of rounds; the smaller one is
reported beside it.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import numpy as np

from argus.diagnose.whatif import dependencies
from argus.diagnose.whatif.dependencies import COMMUNICATION, MERGED, OPTIMIZER, Layout, Operations
from argus.importers import whatif_parquet
from benches import Result

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("ARGUS_REFERENCE_DATA", ROOT.parent / "shared" / "data")) / "straggler-analysis"


def run(rounds: int) -> Result:
    traces = {
        name: whatif_parquet.read(DATA / f"trace-{name}.parquet", DATA / f"meta-{name}.yaml")
        for name in ("AR", "ST")
        if (DATA / f"trace-{name}.parquet").exists()
    } or {"made": _made()}
    rows: dict[str, list[float]] = {}
    ratios: dict[str, list[float]] = {name: [] for name in traces}
    for turn in range(rounds + 1):
        for name, trace in traces.items():
            began = time.perf_counter()
            ours = dependencies.answer(dependencies.build(trace.operations, trace.layout))
            middle = time.perf_counter()
            theirs = _Reference(trace.operations, trace.layout).answer()
            end = time.perf_counter()
            our_answers = _flat(ours)
            worst = max(abs(our_answers[key] - theirs[key]) for key in theirs)
            if our_answers.keys() != theirs.keys() or worst > 1e-9:
                raise SystemExit(f"whatif bench: the answers on {name} differ by {worst:g}")
            if turn:  # the first round pays for imports and page faults on both sides
                rows.setdefault(f"{name}: Argus", []).append(middle - began)
                rows.setdefault(f"{name}: dataframe, op by op", []).append(end - middle)
                ratios[name].append((end - middle) / (middle - began))
    largest = max(traces, key=lambda name: len(traces[name].operations))
    more = {f"ratio_{name}": statistics.median(values) for name, values in ratios.items()}
    more |= {f"operations_{name}": float(len(trace.operations)) for name, trace in traces.items()}
    title = "S by op type, rank and stage, M_W and M_S of " + ", ".join(traces)
    return Result(title, "s", rows, more[f"ratio_{largest}"], more)


def _made() -> whatif_parquet.Trace:
    sys.path.insert(0, str(ROOT))
    from tests.builders import training_job

    columns = training_job.rows(microbatches=32, steps=44, fault=training_job.slow_worker(0, 0, 2.4))
    with tempfile.TemporaryDirectory() as folder:
        return whatif_parquet.read(*training_job.write(Path(folder), columns))


def _flat(answers: dependencies.WhatIf) -> dict[str, float]:
    found = {"S": answers.slowdown, "M_W": answers.workers.share, "M_S": answers.last_stage.share}
    for what, values in (("op", answers.by_op), ("dp", answers.by_dp), ("stage", answers.by_stage)):
        found |= {f"{what} {key}": value for key, value in values.items()}
    return found


class _Reference:
    """The simulation over a dataframe."""

    def __init__(self, operations: Operations, layout: Layout) -> None:
        import pandas

        columns = {name: values for name, values in vars(operations).items() if isinstance(values, np.ndarray)}
        frame = pandas.DataFrame(columns)
        frame["optype"] = np.array(operations.names, object)[operations.op]
        frame["name"] = frame.optype + "_" + frame.seq.astype(str) + "_" + frame.stage.astype(str)
        self.frame = frame.sort_values(["name", "step", "dp_rank"]).reset_index(drop=True)
        self.dp = operations.dp_rank.max() + 1
        self.depends, self.groups, self.across = self._graph(operations, layout)

    def _graph(self, operations: Operations, layout: Layout) -> tuple[dict[str, list[str]], list[list[str]], set[str]]:
        """What waits for what, by names."""
        one = operations.take((operations.dp_rank == 0) & (operations.step == operations.step.min()))
        names = [f"{one.names[o]}_{q}_{s}" for o, q, s in zip(one.op, one.seq, one.stage, strict=True)]
        template = dependencies._Nodes(
            one.op, one.stage, one.seq, one.chunk, one.global_chunk, one.start_ns, one.end_ns, one.names
        )
        stages = int(one.stage.max()) + 1
        depends, groups = dependencies._dependencies(
            template, stages, self.dp * layout.sequence > 1, dependencies.Tally()
        )
        return (
            {name: [names[other] for other in depends.get(node, [])] for node, name in enumerate(names)},
            [[names[node] for node in members] for members, _ in groups],
            {names[node] for members, across in groups if across for node in members},
        )

    def answer(self) -> dict[str, float]:
        import pandas

        frame = self.frame
        group_of = {name: number for number, members in enumerate(self.groups) for name in members}
        rows = {name: values.to_numpy() for name, values in frame.groupby("name").groups.items()}
        order = self._order(group_of)
        communicates = frame.name.isin(group_of)
        some = frame[communicates].copy()
        some["group"] = some.name.map(group_of).astype(str)
        alone = ~some.name.isin(self.across)
        some.loc[alone, "group"] += "/" + some.dp_rank[alone].astype(str)
        transfer = some.end_ns - some.groupby(["step", "group"]).start_ns.transform("max")
        frame = frame.assign(took=frame.duration_ns.astype(float))
        frame.loc[communicates, "took"] = transfer.where(transfer > dependencies.NO_TRANSFER_NS, 0).astype(float)
        usual = frame.optype.isin(COMMUNICATION)
        ideal = frame.took.copy()
        ideal[~usual] = frame[~usual].groupby("optype").took.transform("mean")
        ideal[usual] = frame[usual].groupby("optype").took.transform("median")

        def simulate(kept: Any) -> tuple[float, float]:
            scenario = frame.assign(took=ideal)
            scenario.loc[kept, "took"] = frame.took[kept]
            return self._simulate(scenario, rows, order, group_of)

        everything = pandas.Series(True, index=frame.index)
        actual, _ = simulate(everything)
        ideal_last, ideal_optimized = simulate(~everything)
        found = {"S": actual / ideal_optimized}
        merged = frame.optype.replace(MERGED)
        for what, values in (("op", merged), ("dp", frame.dp_rank), ("stage", frame.stage)):
            for key in values.unique():
                found[f"{what} {key}"] = simulate(values == key)[1] / ideal_optimized
        workers = frame[["rank", "dp_rank", "stage"]].drop_duplicates()
        scores = {
            rank: min(found[f"dp {dp}"], found[f"stage {stage}"])
            for rank, dp, stage in workers.itertuples(index=False, name=None)
        }
        slowest = sorted(scores, key=lambda rank: (-scores[rank], rank))[: -(-len(scores) * 3 // 100)]
        for what, part in (("M_W", frame["rank"].isin(slowest)), ("M_S", frame.stage == frame.stage.max())):
            found[what] = (actual - simulate(~part)[0]) / (actual - ideal_last)
        return found

    def _order(self, group_of: dict[str, int]) -> list[Any]:
        graph: dict[Any, list[Any]] = {}
        for name, before in self.depends.items():
            graph.setdefault(group_of.get(name, name), []).extend(group_of.get(other, other) for other in before)
        return list(TopologicalSorter(graph).static_order())

    def _simulate(
        self, frame: Any, rows: dict[str, Any], order: list[Any], group_of: dict[str, int]
    ) -> tuple[float, float]:
        took = frame.took.to_numpy()
        ends: dict[str, Any] = {}
        for node in order:
            members = self.groups[node] if isinstance(node, int) else [node]
            start: Any = np.zeros(len(rows[members[0]]))
            for name in members:
                for other in self.depends[name]:
                    start = np.maximum(start, ends[other])
            if members[0] in self.across:
                start = np.repeat(start.reshape(-1, self.dp).max(axis=1), self.dp)
            for name in members:
                ends[name] = start + took[rows[name]]
        last = np.max(list(ends.values()), axis=0).reshape(-1, self.dp).max(axis=1)
        closing = [values for name, values in ends.items() if name.startswith(f"{OPTIMIZER}_")]
        optimized = np.max(closing, axis=0).reshape(-1, self.dp).max(axis=1)
        return float(last.mean()), float(optimized.mean())
