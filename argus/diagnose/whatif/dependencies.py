"""How fast a training job would be if some of its operations took their normal time.

A step is a graph of operations: the computations of each pipeline stage one after the other, sends and receives
between stages, collectives over data-parallel ranks, the optimiser. It is the same for every step and every
data-parallel rank, so it is built once, and evaluated level by level for all of them and all scenarios at once.

The model, S, S_t, S_w, M_W and M_S are those of "Understanding Stragglers in Large Model Training Using What-if
Analysis" (OSDI '25; artefact ByteDance-Seed/StragglerAnalysis, whose published answers the tests compare with):

* An operation starts as soon as everything that it depends on has ended; what happens between (launch delays) is
  left out.
* A communication of several ranks transfers from the moment the last of them is there: its *transfer time* is its end
  minus that moment. It is its own, what comes before is somebody else's.
* The *ideal* time of an operation is, by type, the mean of computations, the median of transfers: means keep the total
  work of computations, medians leave out what a few slow transfers add.
* S = mean step time as it was / mean ideal step time. S_x: only x (an op type, DP rank, stage) takes the time it took,
  all else is ideal. S_w of a worker is the lesser of its DP rank's and its stage's S.
* M_W (M_S): the share of the lost time that is won back if only the slowest 3 % of the workers (the last stage)
  become ideal.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.model.errors import EXIT_USAGE, ArgusError
from argus.model.ranks import Gaps

Int = NDArray[np.int64]
Float = NDArray[np.float64]
Bool = NDArray[np.bool_]

FORWARD, BACKWARD = "forward-compute", "backward-compute"
SENDS = {"forward-send": ("forward-recv", 1), "backward-send": ("backward-recv", -1)}
"""Each kind of send: the receive it meets, and where the other stage lies."""
P2P = tuple(name for send, (receive, _) in SENDS.items() for name in (send, receive))
PARAMS, GRADS, SEPARATE = "params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce"
LAYERNORM, EMBEDDING = "layernorm-grads-all-reduce", "embedding-grads-all-reduce"
CLIP, OPTIMIZER, GC = "optimizer-clip-main-grad", "optimizer", "gc"
COMMUNICATION = (*P2P, PARAMS, GRADS, SEPARATE, LAYERNORM, EMBEDDING, CLIP)
"""Types whose ideal time is the median; of all others it is the mean."""
KNOWN = (FORWARD, BACKWARD, *COMMUNICATION, OPTIMIZER, GC)
MERGED = {name: f"{name.split('-')[0]}-pp-comm" for name in P2P}
"""Sends and receives of one direction are one op type where time is attributed, as in the artefact."""

SLOWEST_PERCENT = 3
"""Workers that M_W removes: the slowest 3 % (OSDI '25, Eq. 5), at least one."""
CLOCKS_NS = 50_000
"""Clocks may differ by so much when a send is matched with its computation (the artefact's EPS)."""
MAX_EMPTY = 20
"""Cells of (operation, step, DP rank) for each that is recorded, at most: else the numbering never starts anew."""
NO_TRANSFER_NS = -10_000_000
"""A transfer that ends so long before its last rank came is wrong, and taken as 0; shorter ones are the clocks'."""
CELLS = 1 << 22
"""Cells (operations x scenarios x steps x DP ranks) evaluated at once, 8 bytes each: 32 MiB. More gain nothing, fewer
cost more passes through the levels (AR, median of 8: 2^17 305 ms, 2^20 55 ms, 2^22 36 ms, 2^23 36 ms)."""


@dataclass(frozen=True)
class Layout:
    """How the job is split: sizes of its data, pipeline, tensor and data-sequence parallel groups.

    Attributes:
        virtual: Model chunks a stage has (interleaved schedules).
        world: Ranks of the whole job; 0: not known.
    """

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    sequence: int = 1
    virtual: int = 1
    world: int = 0


@dataclass(frozen=True)
class Operations:
    """What the workers did: one row an operation, in any order. All columns have the shape (operations,).

    Attributes:
        step: Step number.
        rank: Global rank of the worker.
        stage: Its pipeline stage, 0 to pp - 1.
        dp_rank: Its data-parallel rank.
        op: Type: a place in ``names``.
        seq: Number among the worker's operations of this type in the step, in order of time.
        chunk: Model chunk within the stage; -1: none.
        global_chunk: Model chunk within the model; -1: none.
        start_ns: Begin, on a clock that all ranks of a step share.
        end_ns: End as the recording has it: a recording in single precision rounds it, so it may differ from
            ``start_ns + duration_ns``.
        duration_ns: Length.
        names: Op types.
    """

    step: Int
    rank: Int
    stage: Int
    dp_rank: Int
    op: Int
    seq: Int
    chunk: Int
    global_chunk: Int
    start_ns: Int
    end_ns: Int
    duration_ns: Int
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.step)

    def take(self, kept: Bool) -> Operations:
        """Some of the rows."""
        columns: dict[str, Any] = {n: v[kept] for n, v in vars(self).items() if isinstance(v, np.ndarray)}
        return replace(self, **columns)


@dataclass(frozen=True)
class _Schedule:
    """The graph in order of evaluation. Row 0 is the begin of the step; then come levels, each of which depends on
    earlier ones only: operations, and rows of no length that stand for "all are there" of a communication.

    Attributes:
        row: Of each node, shape (nodes,).
        levels: Of each level: its first row and the one after its last; the first predecessor of each row; of further
            predecessors, which rows of the level have one and which it is; and which rows wait for all data-parallel
            ranks.
    """

    row: Int
    rows: int
    levels: list[tuple[int, int, Int, list[tuple[Int, Int]], Int]]


@dataclass(frozen=True)
class Model:
    """The graph of a step with the times that were measured. Its nodes are the operations of one step and one
    data-parallel rank.

    Attributes:
        names: Op types.
        steps: Step numbers, shape (steps,).
        dp_ranks: Shape (dp,).
        op, stage, seq, chunk: Type (place in ``names``), stage, number and model chunk of each node, shape (nodes,).
        rank: Global rank of each node, shape (nodes, dp).
        actual_ns: What each took (transfer time where others take part), shape (nodes, dp, steps).
        ideal_ns: What each would take, shape (nodes,).
        recorded_ns: Length of the steps as recorded, shape (steps,).
        counters: What was left out or had to be guessed, by name.
        notes: The same in words.
    """

    names: tuple[str, ...]
    steps: Int
    dp_ranks: Int
    op: Int
    stage: Int
    seq: Int
    chunk: Int
    rank: Int
    actual_ns: Float
    ideal_ns: Float
    recorded_ns: Float
    schedule: _Schedule
    counters: Tally[str] = field(default_factory=Tally)
    notes: list[str] = field(default_factory=list)

    def times_ns(self, kept: Bool) -> tuple[Float, Float]:
        """Step times of scenarios.

        Args:
            kept: Which operations take the time that they took (others the ideal), shape (scenarios, nodes, dp).

        Returns:
            When the last operation, and when the last optimiser ends, each of shape (scenarios, steps), ns.
        """
        scenarios, _, ranks = kept.shape
        steps, plan = len(self.steps), self.schedule
        actual = np.zeros((plan.rows, ranks, steps))
        actual[plan.row] = self.actual_ns
        ideal = np.zeros(plan.rows)
        ideal[plan.row] = self.ideal_ns
        chosen = np.zeros((plan.rows, ranks, scenarios), bool)
        chosen[plan.row] = kept.transpose(1, 2, 0)
        optimizers = np.isin(self.op, [place for place, name in enumerate(self.names) if name == OPTIMIZER])
        closing = plan.row[optimizers] if optimizers.any() else plan.row
        last = np.empty((scenarios, steps))
        optimized = np.empty((scenarios, steps))
        at_once = max(1, CELLS // (plan.rows * ranks))
        few = min(steps, at_once)
        many = max(1, at_once // few)
        for first in range(0, scenarios, many):
            for begin in range(0, steps, few):
                here = (slice(first, first + many), slice(begin, begin + few))
                ends = self._ends(chosen[:, :, here[0], None], actual[:, :, None, here[1]], ideal)
                last[here] = ends.max(axis=(0, 1))
                optimized[here] = ends[closing].max(axis=(0, 1))
        return last, optimized

    def _ends(self, chosen: Bool, actual: Float, ideal: Float) -> Float:
        """When each row ends, shape (rows, dp, scenarios, steps). The arguments broadcast to it, but for ``ideal``."""
        ends = np.empty(np.broadcast_shapes(chosen.shape, actual.shape))
        ends[0] = 0.0
        for begin, end, first, further, together in self.schedule.levels:
            here = ends[begin:end]
            np.take(ends, first, axis=0, out=here, mode="clip")
            for rows, before in further:
                here[rows] = np.maximum(here[rows], ends[before])
            if len(together):
                here[together] = here[together].max(axis=1, keepdims=True)
            here += np.where(chosen[begin:end], actual[begin:end], ideal[begin:end, None, None, None])
        return ends

    def of(self, *, op: Iterable[int] = (), stage: int | None = None, dp: int | None = None) -> Bool:
        """A scenario that keeps the operations of some types, a stage or a data-parallel rank (its place in
        ``dp_ranks``), shape (nodes, dp)."""
        kept = np.ones((len(self.op), len(self.dp_ranks)), bool)
        chosen = list(op)
        if chosen:
            kept &= np.isin(self.op, chosen)[:, None]
        if stage is not None:
            kept &= (self.stage == stage)[:, None]
        if dp is not None:
            kept &= np.arange(len(self.dp_ranks)) == dp
        return kept


@dataclass(frozen=True)
class Explained:
    """What a part of the operations costs. Mean step times, ns.

    Attributes:
        actual_ns, ideal_ns: All as it was; all ideal.
        removed_ns: Only these operations ideal.
        added_ns: Only these as they were.
        share: (actual - removed) / (actual - ideal): M_W of the slowest workers, M_S of the last stage; 0 where nothing
            is lost.
    """

    actual_ns: float
    ideal_ns: float
    removed_ns: float
    added_ns: float

    @property
    def share(self) -> float:
        return _share(self.actual_ns - self.removed_ns, self.actual_ns - self.ideal_ns)

    @property
    def added_share(self) -> float:
        """(added - ideal) / (actual - ideal)."""
        return _share(self.added_ns - self.ideal_ns, self.actual_ns - self.ideal_ns)


@dataclass(frozen=True)
class WhatIf:
    """The answers.

    Attributes:
        slowdown: S.
        actual_ns, ideal_ns: Step times without launch delays, as they were and ideal, shape (steps,).
        by_op, by_dp, by_stage, by_rank: S_t, S of DP ranks and stages, S_w.
        step_by_op, step_by_dp, step_by_stage: The same of single steps, shape (steps,) each.
        slowest: The workers (global ranks) that M_W removes, the slowest first.
        workers, last_stage: What they cost.
    """

    slowdown: float
    steps: Int
    recorded_ns: Float
    actual_ns: Float
    ideal_ns: Float
    by_op: dict[str, float]
    by_dp: dict[int, float]
    by_stage: dict[int, float]
    by_rank: dict[int, float]
    step_by_op: dict[str, Float]
    step_by_dp: dict[int, Float]
    step_by_stage: dict[int, Float]
    slowest: list[int]
    workers: Explained
    last_stage: Explained

    @property
    def launch_slowdown(self) -> float:
        """Mean recorded step time over the mean without launch delays."""
        return float(self.recorded_ns.mean() / self.actual_ns.mean())


def _share(part: float, whole: float) -> float:
    # Below a nanosecond of loss, the ratio is one of rounding errors.
    return part / whole if whole > 1.0 else 0.0


def answer(model: Model) -> WhatIf:
    """Everything that the artefact publishes of a job.

    Args:
        model: From :func:`build`.
    """
    types = _types(model)
    stages = np.unique(model.stage).tolist()
    places = range(len(model.dp_ranks))
    everything = np.ones((len(model.op), len(model.dp_ranks)), bool)
    scenarios = [everything, ~everything]
    scenarios += [model.of(op=chosen) for chosen in types.values()]
    scenarios += [model.of(dp=place) for place in places]
    scenarios += [model.of(stage=stage) for stage in stages]
    last_stage = model.of(stage=stages[-1])
    scenarios += [~last_stage]
    last, optimized = model.times_ns(np.array(scenarios))
    actual, ideal = last[0], optimized[1]
    floor = max(float(ideal.mean()), 1.0)
    kept = iter(range(2, len(scenarios)))

    def slower(names: Iterable[object]) -> tuple[dict[object, float], dict[object, Float]]:
        whole: dict[object, float] = {}
        each: dict[object, Float] = {}
        for name in names:
            times = optimized[next(kept)]
            whole[name] = float(times.mean()) / floor
            each[name] = times / np.maximum(ideal, 1.0)
        return whole, each

    by_op, step_by_op = slower(types)
    by_dp, step_by_dp = slower(model.dp_ranks.tolist())
    by_stage, step_by_stage = slower(stages)
    worker = np.minimum(
        np.array([by_stage[stage] for stage in model.stage.tolist()])[:, None],
        np.array([by_dp[dp] for dp in model.dp_ranks.tolist()])[None, :],
    )
    ranks, first = np.unique(model.rank, return_index=True)
    scores = worker.ravel()[first]
    # The slowest first; of equal ones the lowest rank, as in the artefact.
    order = np.lexsort((ranks, -scores))
    slowest = ranks[order[: -(-len(ranks) * SLOWEST_PERCENT // 100)]]
    theirs = np.isin(model.rank, slowest)
    of_workers, _ = model.times_ns(np.array([~theirs, theirs]))
    place = 2 + len(types) + len(places) + stages.index(stages[-1])
    tori, tideal = float(actual.mean()), float(last[1].mean())
    return WhatIf(
        slowdown=tori / floor,
        steps=model.steps,
        recorded_ns=model.recorded_ns,
        actual_ns=actual,
        ideal_ns=ideal,
        by_op={str(name): value for name, value in by_op.items()},
        by_dp={int(str(name)): value for name, value in by_dp.items()},
        by_stage={int(str(name)): value for name, value in by_stage.items()},
        by_rank=dict(zip(ranks.tolist(), scores.tolist(), strict=True)),
        step_by_op={str(name): value for name, value in step_by_op.items()},
        step_by_dp={int(str(name)): value for name, value in step_by_dp.items()},
        step_by_stage={int(str(name)): value for name, value in step_by_stage.items()},
        slowest=slowest.tolist(),
        workers=Explained(tori, tideal, float(of_workers[0].mean()), float(of_workers[1].mean())),
        last_stage=Explained(tori, tideal, float(last[-1].mean()), float(last[place].mean())),
    )


def explain(model: Model, part: Bool) -> Explained:
    """What a part of the operations costs; ``part``: shape (nodes, dp)."""
    everything = np.ones(part.shape, bool)
    last, _ = model.times_ns(np.array([everything, ~everything, ~part, part]))
    actual, ideal, removed, added = (float(times.mean()) for times in last)
    return Explained(actual, ideal, removed, added)


def _types(model: Model) -> dict[str, list[int]]:
    """Op types as time is attributed to them, and which places in ``names`` they are."""
    by_name: dict[str, list[int]] = {}
    for place in np.unique(model.op).tolist():
        name = model.names[place]
        by_name.setdefault(MERGED.get(name, name), []).append(place)
    return by_name


# ---- building the graph


@dataclass(frozen=True)
class _Nodes:
    """The operations of one data-parallel rank in one step: the template of the graph."""

    op: Int
    stage: Int
    seq: Int
    chunk: Int
    global_chunk: Int
    start_ns: Int
    end_ns: Int
    names: tuple[str, ...]

    def find(self, stage: int, *names: str) -> list[int]:
        """Nodes of a stage of some types, in order of time."""
        chosen = np.array([name in names for name in self.names])
        here = np.flatnonzero((self.stage == stage) & chosen[self.op])
        order = {name: place for place, name in enumerate(sorted(names))}
        alphabetic = np.array([order.get(name, 0) for name in self.names])[self.op[here]]
        return [int(node) for node in here[np.lexsort((alphabetic, self.seq[here], self.start_ns[here]))]]

    def name(self, node: int) -> str:
        return self.names[int(self.op[node])]


def build(operations: Operations, layout: Layout) -> Model:
    """The graph of a job's steps, and what its operations took.

    The graph is that of the first step; steps whose operations differ from those of most steps are left out, and
    counted.

    Args:
        operations: Of all workers. At least one step that is whole.
        layout: ``sequence``: gradients are reduced although there is one data-parallel rank.

    Raises:
        ArgusError: No operations, twice the same one, or dependencies that run in a circle.
    """
    counters: Tally[str] = Tally()
    notes: list[str] = []
    known = np.array([name in KNOWN for name in operations.names], bool)[operations.op]
    if not known.all():
        strange = sorted({operations.names[place] for place in np.unique(operations.op[~known]).tolist()})
        counters["operations_of_unknown_type"] = int((~known).sum())
        notes.append(f"operations of types that the model does not know were left out: {', '.join(strange[:8])}")
        operations = operations.take(known)
    if not len(operations):
        raise ArgusError("the recording has no operation that the model knows", "Known are: " + ", ".join(KNOWN))
    node, lane, steps, dp_ranks, rows, keys = _grid(operations, counters, notes)
    nodes = len(keys)
    place = np.empty((nodes, len(dp_ranks), len(steps)), np.int64)
    place.reshape(nodes, -1)[node, lane] = rows
    start, end, took = (
        values[place].astype(np.float64) for values in (operations.start_ns, operations.end_ns, operations.duration_ns)
    )
    first = place[:, 0, 0]
    template = _Nodes(
        op=operations.op[first],
        stage=operations.stage[first],
        seq=operations.seq[first],
        chunk=operations.chunk[first],
        global_chunk=operations.global_chunk[first],
        start_ns=operations.start_ns[first],
        end_ns=operations.end_ns[first],
        names=operations.names,
    )
    stages = np.unique(template.stage)
    if lacking := Gaps(stages.tolist(), 0, int(stages[-1])):
        raise ArgusError(
            f"pipeline stage {lacking[0]} has no operations", "Record at least one rank of every stage", EXIT_USAGE
        )
    depends, groups = _dependencies(template, len(stages), len(dp_ranks) * layout.sequence > 1, counters)
    actual = took
    for members, across in groups:
        there = start[members].max(axis=0)
        if across:
            there = there.max(axis=0, keepdims=True)
        transfer = end[members] - there
        late = transfer <= NO_TRANSFER_NS
        if late.any():
            counters["transfers_before_all_were_there"] += int(late.sum())
            transfer[late] = 0.0
        actual[members] = transfer
    ideal = np.empty(nodes)
    for code in np.unique(template.op).tolist():
        of_type = template.op == code
        values = actual[of_type]
        ideal[of_type] = np.median(values) if operations.names[code] in COMMUNICATION else values.mean()
    return Model(
        names=operations.names,
        steps=steps,
        dp_ranks=dp_ranks,
        op=template.op,
        stage=template.stage,
        seq=template.seq,
        chunk=template.chunk,
        rank=operations.rank[place[:, :, 0]],
        actual_ns=actual,
        ideal_ns=ideal,
        recorded_ns=end.max(axis=(0, 1)) - start.min(axis=(0, 1)),
        schedule=graph(nodes, depends, groups),
        counters=counters,
        notes=notes,
    )


def _grid(operations: Operations, counters: Tally[str], notes: list[str]) -> tuple[Int, Int, Int, Int, Int, Int]:
    """Numbers the operations: nodes by (stage, type, number), lanes by (step, DP rank).

    Returns:
        Node and lane of each row that is kept, steps, DP ranks, the rows, and a key for each node.
    """
    stage_span = int(operations.stage.max()) + 1
    seq_span = int(operations.seq.max()) + 1
    key = (operations.op * stage_span + operations.stage) * seq_span + operations.seq
    keys, node = _numbered(key)
    steps, step = _numbered(operations.step)
    dp_ranks, dp = _numbered(operations.dp_rank)
    lane = dp * len(steps) + step
    if len(keys) * len(steps) * len(dp_ranks) > MAX_EMPTY * len(key) + 1_000_000:
        raise ArgusError(
            f"{len(keys):,} operations are numbered in {len(steps):,} steps of which each has few",
            "seq_id must start again in each step",
            EXIT_USAGE,
        )
    cell = node * (len(steps) * len(dp_ranks)) + lane
    seen = np.bincount(cell, minlength=len(keys) * len(steps) * len(dp_ranks)).reshape(len(keys), -1, len(steps))
    if seen.max() > 1:
        row = int(np.flatnonzero(seen.ravel()[cell] > 1)[1])
        raise ArgusError(
            f"row {row}: {operations.names[int(operations.op[row])]} number {operations.seq[row]} of rank "
            f"{operations.rank[row]} in step {operations.step[row]} occurs twice",
            "Each rank, step, op type and seq_id must be one row",
            EXIT_USAGE,
        )
    # Steps are alike if the same operations are there on the same ranks.
    patterns: dict[bytes, list[int]] = {}
    for index in range(len(steps)):
        patterns.setdefault(np.packbits(seen[:, :, index].astype(bool)).tobytes(), []).append(index)
    usual = max(patterns.values(), key=len)
    present = seen[:, :, usual[0]].astype(bool)
    whole: Bool = np.asarray(present.any(axis=1))
    if not present[whole].all():
        lacking = int(dp_ranks[~present[whole].all(axis=0)][0])
        raise ArgusError(
            f"data-parallel rank {lacking} lacks operations that others have in step {int(steps[usual[0]])}",
            "Record the same operations on all data-parallel ranks",
            EXIT_USAGE,
        )
    if len(usual) < len(steps):
        counters["steps_with_other_operations"] = len(steps) - len(usual)
        notes.append(f"{len(steps) - len(usual)} of {len(steps)} steps, with other operations than most, are left out")
    kept = np.asarray(np.isin(step, usual) & whole[node])
    rows = np.flatnonzero(kept)
    new_step = np.cumsum(np.isin(np.arange(len(steps)), usual)) - 1
    new_node = np.cumsum(whole) - 1
    return (
        new_node[node[kept]],
        dp[kept] * len(usual) + new_step[step[kept]],
        steps[usual],
        dp_ranks,
        rows,
        keys[whole],
    )


def _numbered(values: Int) -> tuple[Int, Int]:
    """The distinct values in order, and the place of each value among them: ``np.unique``, without sorting where values
    lie close together."""
    least = int(values.min())
    span = int(values.max()) - least + 1
    if span > 4 * len(values):
        distinct, place = np.unique(values, return_inverse=True)
        return distinct, place
    there = np.zeros(span, bool)
    there[values - least] = True
    return np.flatnonzero(there) + least, (np.cumsum(there) - 1)[values - least]


Groups = list[tuple[list[int], bool]]
"""Nodes that communicate with one another, and whether with the other data-parallel ranks as well."""


def _dependencies(
    nodes: _Nodes, stages: int, data_parallel: bool, counters: Tally[str]
) -> tuple[dict[int, list[int]], Groups]:
    """What each node waits for, and who communicates with whom."""
    depends: dict[int, list[int]] = {}
    groups: Groups = []
    together: dict[tuple[str, int], list[int]] = {}
    halves: dict[tuple[str, int, int], int] = {}
    overlapped = SEPARATE in {nodes.names[code] for code in np.unique(nodes.op).tolist()}

    def chain(ordered: Iterable[int], after: Iterable[int] = ()) -> None:
        before = list(after)
        for node in ordered:
            depends.setdefault(node, []).extend(before)
            before = [node]

    for stage in range(stages):
        compute = nodes.find(stage, FORWARD, BACKWARD)
        chain(compute)
        for name in P2P:
            chain(nodes.find(stage, name))
        _after_warm_up(nodes, stage, compute, depends)
        _match(nodes, stage, stages, depends, groups, halves, counters)
        reduces = nodes.find(stage, GRADS)
        gathers = nodes.find(stage, PARAMS)
        chain(nodes.find(stage, PARAMS, GRADS))
        for node in (*gathers, *reduces, *nodes.find(stage, SEPARATE)):
            groups.append(([node], True))
        # The first forward of a model chunk needs its parameters: those gathered last for it.
        served: set[int] = set()
        for node in reversed(gathers):
            forward = [c for c in compute if nodes.name(c) == FORWARD and nodes.chunk[c] == nodes.chunk[node]]
            if forward and int(nodes.chunk[node]) not in served:
                served.add(int(nodes.chunk[node]))
                depends.setdefault(forward[0], []).append(node)
        if overlapped:
            served = set()
            for node in reduces:
                backward = [c for c in compute if nodes.name(c) == BACKWARD and nodes.chunk[c] == nodes.chunk[node]]
                if backward and int(nodes.chunk[node]) not in served:
                    served.add(int(nodes.chunk[node]))
                    depends.setdefault(node, []).append(max(backward, key=lambda c: int(nodes.end_ns[c])))
        # After the last computation.
        collected = nodes.find(stage, GC)
        ending = [max(compute, key=lambda c: int(nodes.end_ns[c]))] if compute else []
        chain(collected, ending)
        ending = collected[-1:] or ending
        embedding = nodes.find(stage, EMBEDDING)
        closing = [*nodes.find(stage, LAYERNORM), *embedding]
        if data_parallel and overlapped:
            ending = reduces[-1:] + ending
            closing += nodes.find(stage, SEPARATE)
        else:
            closing += reduces
        clips = nodes.find(stage, CLIP)
        chain([*closing, *clips, *nodes.find(stage, OPTIMIZER)], ending)
        for number, node in enumerate(embedding):
            # Stages that hold the embedding and its transpose: the first and the last.
            if stage in (0, stages - 1):
                together.setdefault((EMBEDDING, number), []).append(node)
            else:
                groups.append(([node], False))
        for number, node in enumerate(clips):
            together.setdefault((CLIP, number), []).append(node)
    groups += [(members, name == CLIP) for (name, _), members in together.items()]
    _pair(stages, halves, groups, counters)
    return depends, groups


def _after_warm_up(nodes: _Nodes, stage: int, compute: list[int], depends: dict[int, list[int]]) -> None:
    """The first backward send and receive are posted after the last but one forward before the first backward."""
    first = next((place for place, node in enumerate(compute) if nodes.name(node) == BACKWARD), 0)
    if first < 2:
        return
    for name in ("backward-recv", "backward-send"):
        for node in nodes.find(stage, name)[:1]:
            depends.setdefault(node, []).append(compute[first - 2])


def _match(
    nodes: _Nodes,
    stage: int,
    stages: int,
    depends: dict[int, list[int]],
    groups: Groups,
    halves: dict[tuple[str, int, int], int],
    counters: Tally[str],
) -> None:
    """Which computation each send sends the result of, and each receive receives for.

    Profilers also record sends and receives that were never launched: before the first computation of their direction
    ends (sends), after the last one begins (receives), and beyond the model's first and last chunk.
    """
    chunks = stages * (int(nodes.chunk.max(initial=0)) + 1)
    for send, (receive, towards) in SENDS.items():
        compute = nodes.find(stage, FORWARD if send.startswith("forward") else BACKWARD)
        compute.sort(key=lambda c: int(nodes.seq[c]))
        for kind, step in ((send, towards), (receive, -towards)):
            communications = nodes.find(stage, kind)
            if compute and kind == receive:
                latest = max(int(nodes.start_ns[c]) for c in compute) + CLOCKS_NS
                real = [c for c in communications if int(nodes.start_ns[c]) <= latest]
            elif compute:
                earliest = min(int(nodes.end_ns[c]) for c in compute) - CLOCKS_NS
                real = [c for c in communications if int(nodes.end_ns[c]) >= earliest]
            else:
                real = []
            groups.extend(([node], False) for node in communications if node not in set(real))
            # The first receive of the first stage may not have been recorded: nothing comes to it.
            skipped = 1 if kind == receive and len(real) + 1 == len(compute) else 0
            numbered = 0
            for place, node in enumerate(real, skipped):
                if place >= len(compute):
                    counters["communications_without_computation"] += 1
                    groups.append(([node], False))
                    continue
                matched = compute[place]
                if kind == send:
                    depends.setdefault(node, []).append(matched)
                else:
                    depends.setdefault(matched, []).append(node)
                    if place:
                        depends.setdefault(node, []).append(compute[place - 1])
                if 0 <= int(nodes.global_chunk[matched]) + step < chunks:
                    halves[kind, stage, numbered] = node
                    numbered += 1
                else:
                    groups.append(([node], False))


def _pair(stages: int, halves: Mapping[tuple[str, int, int], int], groups: Groups, counters: Tally[str]) -> None:
    """The n-th send of a stage meets the n-th receive of the next one in its direction."""
    met: set[int] = set()
    for (kind, stage, number), node in halves.items():
        if kind not in SENDS:
            continue
        receive, step = SENDS[kind]
        other = halves.get((receive, (stage + step) % stages, number))
        if other is not None:
            groups.append(([node, other], False))
            met |= {node, other}
    for node in halves.values():
        if node not in met:
            counters["communications_without_other_side"] += 1
            groups.append(([node], False))


def graph(nodes: int, depends: Mapping[int, list[int]], groups: Groups) -> _Schedule:
    """Orders a graph by levels.

    Args:
        nodes: How many there are.
        depends: What each waits for.
        groups: Who communicates with whom.

    Raises:
        ArgusError: Nodes wait for one another in a circle.
    """
    before: list[list[int]] = [list(dict.fromkeys(depends.get(node, ()))) for node in range(nodes)]
    synchronized = set()
    for members, across in groups:
        if len(members) == 1:
            there = members[0]
        else:
            # "All are there" waits for what its members wait for; they wait for it alone.
            there = len(before)
            before.append(list(dict.fromkeys(other for node in members for other in before[node])))
            for node in members:
                before[node] = [there]
        if across:
            synchronized.add(there)
    after: list[list[int]] = [[] for _ in before]
    waits_for = [len(those) for those in before]
    for node, those in enumerate(before):
        for other in those:
            after[other].append(node)
    row = np.zeros(len(before), np.int64)
    levels: list[tuple[int, int, Int, list[tuple[Int, Int]], Int]] = []
    level = [node for node, count in enumerate(waits_for) if not count]
    begin = 1
    while level:
        end = begin + len(level)
        row[level] = np.arange(begin, end)
        first = np.array([row[before[node][0]] if before[node] else 0 for node in level], np.int64)
        further = []
        for column in range(1, max(len(before[node]) for node in level)):
            having = [place for place, node in enumerate(level) if len(before[node]) > column]
            further.append((np.array(having), row[[before[level[place]][column] for place in having]]))
        together = np.array([place for place, node in enumerate(level) if node in synchronized], np.int64)
        levels.append((begin, end, first, further, together))
        begin = end
        following: list[int] = []
        for node in level:
            for other in after[node]:
                waits_for[other] -= 1
                if not waits_for[other]:
                    following.append(other)
        level = following
    if begin <= len(before):
        raise ArgusError(
            f"the operations of a step wait for one another in a circle ({len(before) + 1 - begin} of {len(before)})",
            "Is the order of begins in the recording right, and do the clocks of the ranks agree?",
        )
    return _Schedule(row[:nodes], begin, levels)
