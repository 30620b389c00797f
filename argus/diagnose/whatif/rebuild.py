"""The step of a running job as a graph, from what is stored of its GPUs step by step: for "what if" questions.

A recording of each operation (argus.diagnose.whatif.operations) is rare. Of a traced job the time of each GPU is known
by phase and step, the transfers by communicator, and the number of sends: with the schedule of the pipeline that is
enough. A worker is the ranks that work on one layer of one batch together (tensor parallel); the one that takes longest
stands for it. Its time of a step is shared out evenly over the micro-batches.

The schedule is only assumed, so the graph must prove it: the steps that follow from it must take as long as the
recorded ones. Otherwise there is no graph.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.read import queries
from argus.diagnose.read.gpu_times import MIN_STEPS, WINDOWS, GpuTimes, GpuWindow
from argus.diagnose.read.peers import LOCKSTEP
from argus.diagnose.read.query import Query
from argus.diagnose.read.transfers import P2P, Transfers
from argus.diagnose.whatif.dependencies import BACKWARD, FORWARD, OPTIMIZER, Groups, Model, graph
from argus.model.errors import ArgusError
from argus.model.statistics import low_median
from argus.semantics.groups.schedule import BACKWARD as BACK
from argus.semantics.groups.schedule import schedule

Float = NDArray[np.float64]
Int = NDArray[np.int64]
Bool = NDArray[np.bool_]

SYNC, LAYERS, IDLE = "grads-sync", "layers-comm", "idle"
FORWARD_P2P, BACKWARD_P2P = "forward-pp-comm", "backward-pp-comm"
NAMES = (FORWARD, BACKWARD, OPTIMIZER, FORWARD_P2P, BACKWARD_P2P, LAYERS, SYNC, IDLE)
COMPUTED = (FORWARD, BACKWARD, OPTIMIZER)
"""Types whose ideal time is the mean; of all others it is the median (argus.diagnose.whatif.dependencies)."""
CODE = {name: code for code, name in enumerate(NAMES)}
FITS = 0.1
"""A graph whose steps take as long as those that were seen, but for this, is believed. Healthy simulated pipelines are
off by 1 %; where micro-batches differ, which sums do not show, by 13 % and more."""
MOST_CHUNKS = 4
"""Model chunks of a stage that are tried."""
STEPS = 3
"""Steps whose sends are counted."""
MOST_CELLS = 1 << 24
"""Operations x workers x scenarios x steps that are evaluated: 0.2 s. Where that is too few for the newest steps, their
medians stand for them."""


@dataclass(frozen=True)
class Workers:
    """What the workers of a job did in some steps, ns. Shapes (stages, lanes, steps), where a lane is a data-parallel
    rank.

    Attributes:
        forward, backward, optimizer, idle: Of the rank that takes longest.
        layers: Communication within layers, less waiting.
        sync: Exposed reduction of gradients, less waiting: shape (stages, steps).
        transfer: From a stage to the next one, shape (stages - 1, lanes, steps).
        step: Shape (steps,).
        steps: Their numbers, shape (steps,).
        rank: Who stands for each worker, shape (stages, lanes).
        members: Global ranks of each worker, shape (stages, lanes, members).
    """

    forward: Float
    backward: Float
    optimizer: Float
    idle: Float
    layers: Float
    sync: Float
    transfer: Float
    step: Float
    steps: Int
    rank: Int
    members: Int


@dataclass(frozen=True)
class Rebuilt:
    """A step as a graph that takes what was seen.

    Attributes:
        model: Its operations.
        workers: What they are made from.
        chunks, batches, at_once: As given to :func:`build`.
    """

    model: Model
    workers: Workers
    chunks: int
    batches: int
    at_once: bool


def workers_of(seen: GpuWindow, carried: Transfers | None, dimensions: Mapping[int, str]) -> Workers | None:
    """Arranges what is known by rank; None: the mesh is not whole.

    Args:
        seen: What the GPUs did.
        carried: What transfers took in the same steps; None: not known.
        dimensions: Of each communicator: what it is for.
    """
    now = _newest(seen)
    members = _places(seen)
    if members is None or len(now.steps) < MIN_STEPS:
        return None
    stages, lanes, _ = members.shape
    own = now.compute + now.idle
    rows = members.reshape(stages * lanes, -1)
    # The slowest of those in lockstep, step by step.
    longest = np.take_along_axis(rows[:, :, None], own[rows].argmax(axis=1)[:, None, :], axis=1)[:, 0, :]
    column = np.arange(len(now.steps))

    def of(values: Float) -> Float:
        return values[longest, column].reshape(stages, lanes, -1)

    usually = np.take_along_axis(rows, np.median(own[rows], axis=2).argmax(axis=1)[:, None], axis=1)[:, 0]
    least = now.collective[rows].min(axis=1).reshape(stages, lanes, -1)
    layers, reduced, transfer = _carried(now, seen, members, carried, dimensions)
    layers = np.minimum(layers, least)
    sync = (least - layers).min(axis=1)
    # A stage that is through waits for the others in what it reduces: that is no transfer.
    sync = np.where(np.isnan(reduced), sync, np.minimum(sync, np.nan_to_num(reduced)))
    return Workers(
        of(now.parts["forward"] + now.parts["compute"]), of(now.parts["backward"]), of(now.parts["optimizer"]),
        of(now.idle), layers, sync, transfer, np.median(now.step, axis=0), now.steps,
        now.ranks[usually].reshape(stages, lanes), now.ranks[members],
    )  # fmt: skip


def _newest(seen: GpuWindow) -> GpuTimes:
    """The newest steps of which everything is known."""
    return _whole(seen.now.cut(slice(-WINDOWS[0], None)))


def _whole(now: GpuTimes) -> GpuTimes:
    """The steps of which everything is known of every rank."""
    known = ~np.isnan(now.compute + now.collective + now.pipeline + now.idle + now.step).any(axis=0)
    if known.all():
        return now
    return now.cut(np.asarray(known))


def _places(seen: GpuWindow) -> Int | None:
    """Places of the ranks of each worker, shape (stages, lanes, members); None: workers have different sizes. Stages
    are in the order of their first ranks, as all launchers number them."""
    mesh = seen.mesh
    stage = _in_order(mesh.stage) if mesh.staged else np.zeros(len(mesh.ranks), np.int64)
    lane = _in_order(mesh.replica)
    if not mesh.staged and len(np.unique(mesh.stage)) > 1:
        return None
    stages, lanes = int(stage.max()) + 1, int(lane.max()) + 1
    order = np.lexsort((np.arange(len(stage)), lane, stage))
    size, rest = divmod(len(order), stages * lanes)
    if rest or not size:
        return None
    placed = order.reshape(stages, lanes, size)
    right = (stage[placed] == np.arange(stages)[:, None, None]) & (lane[placed] == np.arange(lanes)[None, :, None])
    return placed if right.all() else None


def _in_order(labels: Int) -> Int:
    """Labels as numbers from 0, in the order in which they come first."""
    _, first, place = np.unique(labels, return_index=True, return_inverse=True)
    return np.asarray(np.argsort(np.argsort(first))[place], np.int64)


def _carried(
    now: GpuTimes, seen: GpuWindow, members: Int, carried: Transfers | None, dimensions: Mapping[int, str]
) -> tuple[Float, Float, Float]:
    """Communication within layers, shape (stages, lanes, steps); of gradients, (stages, steps), NaN where not known;
    and of a transfer between stages, (stages - 1, lanes, steps)."""
    stages, lanes, _ = members.shape
    layers = np.zeros((stages, lanes, len(now.steps)))
    reduced = np.full((stages, len(now.steps)), np.nan)
    transfer = np.full((max(stages - 1, 0), lanes, len(now.steps)), np.nan)
    if carried is None:
        return layers, reduced, np.nan_to_num(transfer)
    there = np.isin(now.steps, carried.steps)
    column = np.searchsorted(carried.steps, now.steps[there])
    stage_of, lane_of = np.empty((2, len(seen.mesh.ranks)), np.int64)
    for stage in range(stages):
        for lane in range(lanes):
            stage_of[members[stage, lane]], lane_of[members[stage, lane]] = stage, lane
    for number, ((group, op, _), part) in enumerate(zip(carried.names, carried.members, strict=True)):
        places = np.minimum(np.searchsorted(seen.mesh.ranks, part), len(seen.mesh.ranks) - 1)
        places = places[seen.mesh.ranks[places] == part]
        if not len(places):
            continue
        took = carried.took[number, column]
        on, of = sorted(set(stage_of[places].tolist())), sorted(set(lane_of[places].tolist()))
        if op == P2P:
            if len(on) == 2 and on[1] == on[0] + 1:
                # Of ranks in lockstep the slowest transfer counts: the others wait for what it brings.
                for lane in of:
                    transfer[on[0], lane, there] = np.fmax(transfer[on[0], lane, there], took)
        elif dimensions.get(group) in (*LOCKSTEP, "ep"):
            for stage, lane in {(int(stage_of[place]), int(lane_of[place])) for place in places.tolist()}:
                layers[stage, lane, there] += np.nan_to_num(took)
        elif len(on) == 1:
            reduced[on[0], there] = np.fmax(reduced[on[0], there], took)
    # What is not known of one pipeline is taken from the others.
    usual = np.nanmedian(transfer) if np.isfinite(transfer).any() else 0.0
    return layers, reduced, np.where(np.isnan(transfer), usual, transfer)


def read(
    query: Query,
    params: Mapping[str, Any],
    seen: GpuWindow,
    carried: Transfers | None,
    dimensions: Mapping[int, str],
) -> Rebuilt | None:
    """The graph of the newest steps of a run; None: it cannot be rebuilt.

    Args:
        query: Runs SQL with parameters, returns columns.
        params: job, run.
        seen: What the GPUs did.
        carried: What transfers took in the same steps.
        dimensions: Of each communicator: what it is for.
    """
    workers = workers_of(seen, carried, dimensions)
    if workers is None:
        return None
    stages = len(workers.forward)
    tried = [(1, 1)] if stages == 1 else _schedules(query, params, workers)
    best: Rebuilt | None = None
    off = FITS
    # Where in the step a GPU was idle is not stored: as its batch was loaded, or all along.
    for (chunks, batches), at_once in product(tried, (True, False) if stages > 1 else (True,)):
        try:
            model = build(workers, chunks, batches, at_once=at_once)
        except ArgusError:
            continue
        wrong = abs(_step_ns(model) / float(model.recorded_ns.mean()) - 1)
        if wrong <= off:
            best, off = Rebuilt(model, workers, chunks, batches, at_once), wrong
    return best


def _step_ns(model: Model) -> float:
    """What the steps of a graph take, their mean."""
    return float(model.times_ns(np.ones((1, *model.actual_ns.shape[:2]), bool))[0].mean())


def _schedules(query: Query, params: Mapping[str, Any], workers: Workers) -> list[tuple[int, int]]:
    """(chunks, micro-batches) that make as many sends as the ranks of one pipeline do."""
    chosen = {"first": int(workers.steps[-STEPS:][0]), "last": int(workers.steps[-1])}
    rows = query(queries.SENDS, {**params, **chosen, "ranks": workers.members[:, 0, 0].tolist()})
    sent = round(float(np.sum(rows["sent"])))
    stages = len(workers.forward)
    schedules = []
    for chunks in range(1, MOST_CHUNKS + 1):
        batches, rest = divmod(sent, 2 * (stages * chunks - 1))
        if not rest and batches and (chunks == 1 or batches % stages == 0):
            schedules.append((chunks, batches))
    return schedules


def build(workers: Workers, chunks: int, batches: int, *, at_once: bool = False) -> Model:
    """The graph of a step.

    Args:
        workers: What they did.
        chunks: Model chunks of a stage.
        batches: Micro-batches of a step.
        at_once: Idle times come before a stage's first forward pass, not before each.

    Raises:
        ArgusError: There is no such schedule.
    """
    stages, lanes, _ = workers.forward.shape
    nodes: list[tuple[int, int, int, int, int]] = []  # type, stage, number, chunk, boundary
    depends: dict[int, list[int]] = {}

    def add(name: str, stage: int, number: int, after: list[int], chunk: int = -1, boundary: int = -1) -> int:
        depends[len(nodes)] = after
        nodes.append((CODE[name], stage, number, chunk, boundary))
        return len(nodes) - 1

    last: list[list[int]] = [[] for _ in range(stages)]
    results: list[list[int]] = [[] for _ in range(stages)]
    within = bool(workers.layers.any())
    sent = 0
    for op in schedule(stages, chunks, batches):
        back = op.kind == BACK
        waits = list(last[op.stage])
        if not back and (not at_once or not waits):
            waits = [add(IDLE, op.stage, op.number, waits)]
        if op.needs is not None:
            sender, place = op.needs
            # Interleaved schedules receive ahead; 1F1B receives when it has nothing else to do.
            ready = [results[sender][place], *(waits if chunks == 1 else ())]
            towards = BACKWARD_P2P if back else FORWARD_P2P
            between = min(sender, op.stage) if abs(sender - op.stage) == 1 else 0
            waits.append(add(towards, op.stage, sent, ready, boundary=between))
            sent += 1
        done = add(BACKWARD if back else FORWARD, op.stage, op.number, waits, op.chunk)
        if within:
            done = add(LAYERS, op.stage, op.number, [done], op.chunk)
        results[op.stage].append(done)
        last[op.stage] = [done]
    groups: Groups = []
    closing = []
    for stage in range(stages):
        reduces = add(SYNC, stage, 0, last[stage])
        groups.append(([reduces], True))
        closing.append(add(OPTIMIZER, stage, 0, [reduces]))
    # The norm of all gradients, or the next batch's first pass: nobody begins before all have ended.
    groups.append((closing, True))
    kind, stage, number, chunk, boundary = np.array(nodes, np.int64).T
    steps = _fewer(workers, len(nodes))
    actual = np.empty((len(nodes), lanes, steps.shape[1]))
    passes = chunks * batches
    shares = {
        FORWARD: workers.forward / passes, BACKWARD: workers.backward / passes, OPTIMIZER: workers.optimizer,
        IDLE: workers.idle / (1 if at_once else passes),
        SYNC: np.broadcast_to(workers.sync[:, None, :], workers.forward.shape),
    }  # fmt: skip
    for name, values in shares.items():
        of_kind = kind == CODE[name]
        actual[of_kind] = _mean(values, steps)[stage[of_kind]]
    of_kind = kind == CODE[LAYERS]
    if of_kind.any():
        # Communication within layers grows with what is computed in them.
        forward = workers.layers * workers.forward / np.maximum(workers.forward + workers.backward, 1.0)
        each = np.stack([_mean(forward, steps), _mean(workers.layers - forward, steps)]) / passes
        before = kind[np.flatnonzero(of_kind) - 1] == CODE[BACKWARD]
        actual[of_kind] = each[before.astype(np.int64), stage[of_kind]]
    of_kind = boundary >= 0
    if of_kind.any():
        actual[of_kind] = _mean(workers.transfer, steps)[boundary[of_kind]]
    ideal = np.empty(len(nodes))
    for code, name in enumerate(NAMES):
        of_kind = kind == code
        if of_kind.any():
            ideal[of_kind] = actual[of_kind].mean() if name in COMPUTED else np.median(actual[of_kind])
    return Model(
        names=NAMES,
        steps=workers.steps[steps[0]],
        dp_ranks=np.arange(lanes),
        op=kind,
        stage=stage,
        seq=number,
        chunk=chunk,
        rank=workers.rank[stage],
        actual_ns=actual,
        ideal_ns=ideal,
        recorded_ns=_mean(workers.step, steps),
        schedule=graph(len(nodes), depends, groups),
        counters=Tally(),
        notes=[],
    )


def _fewer(workers: Workers, nodes: int) -> Int:
    """Which steps are put together, shape (steps of one, such steps): as few as the scenarios leave room for."""
    stages, lanes, count = workers.forward.shape
    room = MOST_CELLS // (nodes * lanes * (len(NAMES) + lanes + stages + 4))
    many = int(np.clip(room, 1, count))
    size = count // many
    return np.asarray(np.arange(count - size * many, count).reshape(many, size).T, np.int64)


def _mean(values: Float, steps: Int) -> Float:
    """Mean over the steps that are put together."""
    mean: Float = values[..., steps].mean(axis=-2)
    return mean


def relieved_ns(model: Model, workers: Workers, ranks: list[int]) -> tuple[float, float] | None:
    """What a step takes, and what it would if some ranks took as long as their peers do: those of the same stage on
    other data; None: they have none. The means over the steps, ns.

    Args:
        model: From :func:`read`.
        workers: The same.
        ranks: Global ranks.
    """
    relieved_lanes: Bool = np.asarray(np.isin(workers.members, ranks).any(axis=2))
    if not relieved_lanes.any() or (~relieved_lanes).sum(axis=1)[relieved_lanes.any(axis=1)].min() < 1:
        return None
    times = model.actual_ns.copy()
    for stage in np.flatnonzero(relieved_lanes.any(axis=1)).tolist():
        for name in (*COMPUTED, IDLE):
            nodes = np.flatnonzero((model.stage == stage) & (model.op == CODE[name]))
            norm = low_median(np.where(relieved_lanes[stage][:, None], np.nan, times[nodes[0]]))
            relieved = np.minimum(times[nodes][:, relieved_lanes[stage]], norm)
            times[np.ix_(nodes, np.flatnonzero(relieved_lanes[stage]))] = relieved
    return _step_ns(model), _step_ns(replace(model, actual_ns=times))


def unburdened_ns(
    rebuilt: Rebuilt, seen: GpuWindow, carried: Transfers, unburdened: Transfers, dimensions: Mapping[int, str]
) -> tuple[float, float, float]:
    """What a step takes, and what it would at least and at most if transfers took something less: the means over the
    steps, ns.

    How much of the shorter transfers other work would hide is not known. It hides no more time than of the longer ones,
    which gives the least; and no lesser share, for they begin no later, which gives the most.

    Args:
        rebuilt: From :func:`read`.
        seen: What the GPUs did.
        carried: What transfers took, as given to :func:`read`.
        unburdened: What they would take.
        dimensions: Of each communicator: what it is for.
    """
    workers, members = rebuilt.workers, _places(seen)
    assert members is not None  # or there were no workers
    was, would = (_carried(_newest(seen), seen, members, each, dimensions) for each in (carried, unburdened))
    layers, sync = workers.layers, workers.sync

    def taken(layers: Float, sync: Float) -> float:
        changed = replace(workers, layers=layers, sync=sync, transfer=would[2])
        return _step_ns(build(changed, rebuilt.chunks, rebuilt.batches, at_once=rebuilt.at_once))

    def share(place: int) -> Float:
        return np.asarray(np.nan_to_num(would[place] / np.maximum(was[place], 1.0), nan=1.0))

    least = (np.maximum(now - np.nan_to_num(was[at] - would[at]), 0.0) for at, now in enumerate((layers, sync)))
    return _step_ns(rebuilt.model), taken(*least), taken(layers * share(0), sync * share(1))
