"""What slows down a job whose operations are known: from answers of :mod:`argus.diagnose.whatif.dependencies` to
findings.

The lost time (S - 1 of the ideal step) is taken apart by making the operations ideal one cause after the other:

1. workers that compute slower than the other data-parallel ranks of their stage, step after step, are brought to the
   others' speed (``compute_straggler``; ``sequence_imbalance`` if all stages of the data-parallel rank are slower);
2. each computation takes its worker's mean: what goes is variation from micro-batch to micro-batch
   (``sequence_imbalance``, ``gc_pause`` or ``jitter``);
3. each takes its stage's mean: what is left of differences between workers;
4. each takes the mean of its type: what goes is imbalance between stages (``stage_imbalance``);
5. transfers take the median of their type (``link_degradation``).

A cause is a finding if it costs the threshold's share of the step or more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.chance import outlier_limit
from argus.diagnose.ranks.lateness import ALPHA, find_onset
from argus.diagnose.read import queries
from argus.diagnose.read.query import Query, runnable_sql
from argus.diagnose.suspect import Suspect
from argus.diagnose.verdict import Evidence
from argus.diagnose.whatif.dependencies import BACKWARD, COMMUNICATION, FORWARD, P2P, Layout, Model, Operations, WhatIf
from argus.model.statistics import MEDIAN_ERROR
from argus.model.units import duration, ranks_text

Float = NDArray[np.float64]
Bool = NDArray[np.bool_]

MIN_STEPS = 3
"""Steps that are needed to distinguish what persists from what happened once."""
CERTAIN = 5.0
"""Standard errors by which a worker's typical excess must stand out of its own variation from step to step: one in two
million by chance, and there are thousands of workers."""
SAME_DATA = 0.71
"""Correlation of the forward and backward times of micro-batches from which their data is the reason: half of the
variance is shared. (StragglerAnalysis, OSDI '25, takes 0.9 for jobs of which this is the only trouble.)"""
MOSTLY = 0.5
"""M_W or M_S from which few workers, or the last stage, count as explaining a slowdown: most of it (OSDI '25, 5.1). So
does any cause if none alone costs the threshold."""
MAX_LISTED = 256
"""Ranks, stages and data-parallel ranks whose S a verdict has: those that cost most."""
SPIKE = 1.5
"""A forward of so many times the typical length is a pause in it rather than more work."""


def read(query: Query, params: Mapping[str, Any]) -> tuple[Operations, Layout] | None:
    """The operations of a run, and how it is split; None: none are stored.

    Args:
        query: Runs SQL.
        params: job, run, first and last (steps).
    """
    rows = query(queries.OPERATIONS, params)
    if not len(rows["step"]):
        return None
    names, op = np.unique(rows["op"].astype(str), return_inverse=True)
    begin = int(rows["ts"].min())
    start, end = rows["ts"].astype(np.int64) - begin, rows["ts_end"].astype(np.int64) - begin
    stored_layout = query(queries.LAYOUT, params)
    sizes = (
        {name: int(stored_layout[name][0]) for name in ("dp", "pp", "tp", "sp", "vpp", "world_size")}
        if len(stored_layout["dp"])
        else {}
    )
    layout = (
        Layout(sizes["dp"], sizes["pp"], sizes["tp"], sizes["sp"], sizes["vpp"], sizes["world_size"])
        if sizes
        else Layout()
    )
    whole = {
        name: rows[name].astype(np.int64)
        for name in ("step", "rank", "stage", "dp_rank", "seq", "chunk", "global_chunk", "duration_ns")
    }
    return Operations(**whole, op=op, start_ns=start, end_ns=end, names=tuple(names.tolist())), layout


def in_verdict(answers: WhatIf) -> dict[str, Any]:
    """The ``whatif`` of a verdict."""

    def ordered(values: Mapping[Any, float]) -> dict[str, float]:
        most = sorted(values.items(), key=lambda item: -item[1])[:MAX_LISTED]
        return {str(key): value for key, value in most}

    return {
        "S": answers.slowdown,
        "M_W": answers.workers.share,
        "M_S": answers.last_stage.share,
        "S_optype": ordered(answers.by_op),
        "S_rank": ordered(answers.by_rank),
        "S_dp_rank": ordered(answers.by_dp),
        "S_stage": ordered(answers.by_stage),
        "slowest": answers.slowest,
    }


def causes(
    model: Model, answers: WhatIf, params: Mapping[str, Any], hosts: Mapping[int, str], threshold: float
) -> tuple[list[Suspect], float]:
    """Names what slows the job down, the costliest first.

    Args:
        model: The step, and what its operations took.
        answers: Of :func:`argus.diagnose.whatif.dependencies.answer`.
        params: job, run, first and last, for the queries that are cited.
        hosts: Of each rank.
        threshold: Lost share of the step that counts.

    Returns:
        Suspects; and what a step loses in all, ns.
    """
    actual_ns, ideal_ns = answers.workers.actual_ns, answers.workers.ideal_ns
    least_ns = threshold * actual_ns
    if actual_ns - ideal_ns < least_ns or len(model.steps) < MIN_STEPS:
        return [], 0.0
    context = _Context(model, answers, params, hosts)
    parts: list[Suspect] = []
    small: list[tuple[float, Callable[[_Context, float, Float], Suspect]]] = []
    times = model.actual_ns
    before_ns = actual_ns
    suspects, ratio = _suspects(model, threshold)
    if suspects.any():
        times = _relieved(model, suspects, ratio)
        now_ns = _mean_ns(model, times)
        parts += _workers(context, suspects, ratio, before_ns - now_ns)
        small += [(part.lost_ns, lambda *_, part=part: part) for part in parts]
        before_ns = now_ns
    computes = np.array([name not in COMMUNICATION for name in model.names])[model.op]
    by_worker = _means(times, model, computes, ("stage", "dp"))
    by_stage = _means(times, model, computes, ("stage",))
    by_type = _means(times, model, computes, ())
    # Pauses that come at random add up to more on some workers: that is variation, too.
    workers = (
        ((by_worker, _variation), (by_stage, _workers_left)) if _differ(model, times) else ((by_stage, _variation),)
    )
    for replaced_ns, explain in (
        *workers,
        (by_type, _stages),
        (None, _links),
    ):
        now_ns = ideal_ns if replaced_ns is None else _mean_ns(model, replaced_ns)
        if before_ns - now_ns >= least_ns:
            parts.append(explain(context, before_ns - now_ns, times))
        small.append((before_ns - now_ns, explain))
        before_ns = now_ns
    parts = [part for part in parts if part.lost_ns >= least_ns]
    if not parts:
        # Several small causes: together they count. One that is most of it, or the op type that costs most.
        most_ns, part_of = max(small, key=lambda one: one[0])
        mostly = most_ns >= MOSTLY * (actual_ns - ideal_ns)
        parts = [part_of(context, most_ns, times) if mostly else _mixed(context, actual_ns - ideal_ns)]
    total = max(sum(part.lost_ns for part in parts), actual_ns - ideal_ns)
    for part in parts:
        part.slowdown = max(1.0, actual_ns / max(actual_ns - part.lost_ns, 1.0))
    return parts, total


# ---- the parts


@dataclass(frozen=True)
class _Context:
    model: Model
    answers: WhatIf
    params: Mapping[str, Any]
    hosts: Mapping[int, str]

    def ranks(self, workers: Bool) -> list[int]:
        """Global ranks of workers, shape (stages, dp)."""
        chosen = workers[self.model.stage]
        return [int(rank) for rank in np.unique(self.model.rank[chosen])]

    def suspect(
        self, kind: str, ranks: list[int], lost_ns: float, *, phase: str, confidence: float, texts: list[str],
        action: str, onset: int = 0,
    ) -> Suspect:  # fmt: skip
        steps = self.model.steps
        step_ns = self.answers.workers.actual_ns
        texts.append(f"it costs {duration(lost_ns)} of {duration(step_ns)} a step")
        shown = runnable_sql(queries.COMPUTE_TIME if kind != "link_degradation" else queries.TRANSFER_TIME, self.params)
        evidence: list[Evidence] = [{"text": text, "sql": shown} for text in texts]
        return Suspect(
            kind=kind, ranks=ranks, hosts=list(dict.fromkeys(self.hosts[r] for r in ranks if r in self.hosts)),
            since=int(steps[onset]), last=int(steps[-1]), phase=phase, lost_ns=lost_ns, slowdown=1.0,
            confidence=float(np.clip(confidence, 0.0, 1.0)), level="phase", evidence=evidence, action=action,
        )  # fmt: skip


def _is(model: Model, *names: str) -> Bool:
    return np.array([name in names for name in model.names])[model.op]


def _work(model: Model, times: Float, *names: str) -> Float:
    """What each worker computed in each step, shape (stages, dp, steps), ns."""
    stages = int(model.stage.max()) + 1
    work = np.zeros((stages, *times.shape[1:]))
    chosen = _is(model, *names)
    np.add.at(work, model.stage[chosen], times[chosen])
    return work


def _suspects(model: Model, threshold: float) -> tuple[Bool, Float]:
    """Workers that are slower than their peers step after step, in the newer half of the steps.

    Returns:
        Which, shape (stages, dp), and each worker's time over that of its stage's (low) median, shape (stages, dp,
        steps). With one data-parallel rank there are no peers.
    """
    work = _work(model, model.actual_ns, FORWARD, BACKWARD)
    ratio: Float = work / np.maximum(np.quantile(work, 0.5, axis=1, keepdims=True, method="lower"), 1.0)
    newest = ratio[:, :, -max(MIN_STEPS, (ratio.shape[2] + 1) // 2) :]
    typical = np.median(newest, axis=2)
    error = MEDIAN_ERROR * np.median(np.abs(newest - typical[:, :, None]), axis=2) / np.sqrt(newest.shape[2])
    slow: Bool = (typical >= 1 + threshold) & (typical - 1 >= CERTAIN * error)
    return slow, ratio


def _relieved(model: Model, suspects: Bool, ratio: Float) -> Float:
    """The times if suspects computed as fast as their peers."""
    times: Float = model.actual_ns.copy()
    computes = _is(model, FORWARD, BACKWARD)
    factor = np.where(suspects[:, :, None], np.maximum(ratio, 1.0), 1.0)
    times[computes] /= factor[model.stage[computes]]
    return times


def _mean_ns(model: Model, times: Float) -> float:
    """Mean step time with other times."""
    everything = np.ones((1, *times.shape[:2]), bool)
    return float(replace(model, actual_ns=times).times_ns(everything)[0].mean())


def _means(times: Float, model: Model, computes: Bool, by: tuple[str, ...]) -> Float:
    """The times with each computation's replaced by the mean of its type (of its stage, of its data-parallel rank if
    ``by`` names them)."""
    made: Float = times.copy()
    stages = model.stage if "stage" in by else np.zeros_like(model.stage)
    for code in np.unique(model.op[computes]).tolist():
        for stage in np.unique(stages).tolist():
            replaced = computes & (model.op == code) & (stages == stage)
            if replaced.any():
                made[replaced] = times[replaced].mean(axis=(0, 2) if "dp" in by else None, keepdims=True)
    return made


def _workers(context: _Context, suspects: Bool, ratio: Float, lost_ns: float) -> list[Suspect]:
    """Findings on workers that are slower than their peers."""
    model, answers = context.model, context.answers
    half = max(MIN_STEPS, (ratio.shape[2] + 1) // 2)
    excess = np.median(ratio[:, :, -half:], axis=2) - 1
    # Data makes all stages of a data-parallel rank slower alike; a GPU only its own.
    widely = suspects.shape[0] > 1 and suspects.all(axis=0)
    data = suspects & widely if suspects.shape[0] > 1 else np.zeros_like(suspects)
    parts = []
    cost = {True: float(excess[data].sum()), False: float(excess[suspects & ~data].sum())}
    for of_data, workers in ((False, suspects & ~data), (True, data)):
        if not workers.any():
            continue
        ranks = context.ranks(workers)
        worst = np.unravel_index(int(np.argmax(np.where(workers, excess, -1.0))), workers.shape)
        series = ratio[worst] - 1
        onset = find_onset(series, float(excess[worst]))
        lost = lost_ns * cost[of_data] / sum(cost.values())
        grown = {name: float(_growth(model, workers, name)) for name in (FORWARD, BACKWARD) if _is(model, name).any()}
        phase = max(grown, key=lambda name: grown[name]).split("-")[0]
        held = float(np.mean(series[onset:] >= excess[worst] / 2))
        who = ranks_text(ranks)
        where = f"rank {model.rank[model.stage == worst[0]][0, worst[1]]} (stage {worst[0]}, data-parallel rank "
        where += f"{model.dp_ranks[worst[1]]})" + (f", the slowest of {who}," if len(ranks) > 1 else "")
        texts = [
            f"{where} computes {1 + excess[worst]:.2f} times as long as the other data-parallel ranks of the stage, "
            f"in {held:.0%} of the steps from {model.steps[onset]} on"
        ]
        if not of_data:
            texts.append(
                f"with the slowest {len(answers.slowest)} of {len(answers.by_rank)} workers "
                f"({ranks_text(answers.slowest)}) "
                f"at ideal speed, {answers.workers.share:.0%} of the lost time is won back (M_W)"
            )
            action = (
                f"Check the GPU of {who} (nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE,ECC), and what else runs on "
                "its host; move the rank if it stays slow."
            )
        else:
            action = (
                f"Compare the lengths of the sequences that {who} get with those of other data-parallel ranks, and "
                "balance them; if they are equal, look at the host they share."
            )
        parts.append(context.suspect(
            "sequence_imbalance" if of_data else "compute_straggler", ranks, lost, phase=phase, confidence=held,
            texts=texts, action=action, onset=onset,
        ))  # fmt: skip
    return parts


def _growth(model: Model, workers: Bool, name: str) -> float:
    """How much longer a kind of computation of some workers takes a step than their peers' does, ns."""
    work = _work(model, model.actual_ns, name)
    usual = np.quantile(work, 0.5, axis=1, keepdims=True, method="lower")
    return float((work - usual).mean(axis=2)[workers].sum())


def _variation(context: _Context, lost_ns: float, times: Float) -> Suspect:
    """Computations of one worker that differ from micro-batch to micro-batch."""
    model = context.model
    forward, backward = _passes(model, times, FORWARD), _passes(model, times, BACKWARD)
    together = 0.0
    if forward.shape == backward.shape and forward.size > 1 and forward.std() > 0 and backward.std() > 0:
        clipped = [np.clip(values, *np.quantile(values, [0.01, 0.99])).ravel() for values in (forward, backward)]
        if all(values.std() > 0 for values in clipped):
            together = float(np.corrcoef(clipped[0], clipped[1])[0, 1])
    spread = np.concatenate([forward.ravel(), backward.ravel()])
    low, high = np.quantile(spread, [0.05, 0.95]) if len(spread) else (0.0, 0.0)
    everyone: list[int] = []
    if together >= SAME_DATA:
        return context.suspect(
            "sequence_imbalance", everyone, lost_ns, phase="forward", confidence=together,
            texts=[
                f"micro-batches take {1 + low:.2f} to {1 + high:.2f} times their worker's mean, and whose forward is "
                f"long has a long backward (correlation {together:.2f})"
            ],
            action="Balance the work of micro-batches and data-parallel ranks: sort or pack sequences by the sum of "
            "their squared lengths instead of their number of tokens.",
        )  # fmt: skip
    spikes = forward[forward >= SPIKE - 1]
    lost_in_spikes = float(spikes.sum()) / max(float(forward[forward > 0].sum()), 1e-9) if forward.size else 0.0
    calm = not len(backward) or float(np.mean(backward >= SPIKE - 1)) < float(np.mean(forward >= SPIKE - 1)) / 10
    if len(spikes) and lost_in_spikes >= MOSTLY and calm:
        return context.suspect(
            "gc_pause", everyone, lost_ns, phase="forward", confidence=lost_in_spikes,
            texts=[
                f"{len(spikes):,} of {forward.size:,} forwards take more than {SPIKE} times as long as others of their "
                "worker, backwards do not: the interpreter launches forwards, and pauses"
            ],
            action="Collect garbage at the same step on all ranks: gc.disable(), then gc.collect() every 100 steps.",
        )  # fmt: skip
    return context.suspect(
        "jitter", everyone, lost_ns, phase="", confidence=0.5,
        texts=[
            f"computations take {1 + low:.2f} to {1 + high:.2f} times their worker's mean, forwards and backwards not "
            f"together (correlation {together:.2f}), on no rank more than on others for long"
        ],
        action="See what else runs on the hosts in the slow steps, and whether clocks of the GPUs change.",
    )  # fmt: skip


def _passes(model: Model, times: Float, name: str) -> Float:
    """How much longer each pass takes than its worker's mean (0: as long), in the order of chunks and numbers."""
    passes = np.flatnonzero(_is(model, name))
    passes = passes[np.lexsort((model.seq[passes], model.chunk[passes], model.stage[passes]))]
    times_ns = times[passes]
    if not len(passes):
        return times_ns
    usual = np.empty_like(times_ns)
    for stage in np.unique(model.stage[passes]).tolist():
        here = model.stage[passes] == stage
        usual[here] = times_ns[here].mean(axis=(0, 2), keepdims=True)
    return np.asarray(times_ns / np.maximum(usual, 1.0) - 1)


def _differ(model: Model, times: Float) -> bool:
    """Whether any worker computes longer on average than others of its stage, by more than its steps vary."""
    work = _work(model, times, FORWARD, BACKWARD)
    excess = work.mean(axis=2) - np.quantile(work.mean(axis=2), 0.5, axis=1, keepdims=True, method="lower")
    error = work.std(axis=2, ddof=1) / np.sqrt(work.shape[2])
    errors = outlier_limit(ALPHA, excess.size, 0.0)
    return bool(np.any(excess > errors * np.maximum(error, np.median(error))))


def _workers_left(context: _Context, lost_ns: float, times: Float) -> Suspect:
    """Workers that differ, but none so much or so steadily that it was taken for a straggler of its own."""
    work = _work(context.model, times, FORWARD, BACKWARD).mean(axis=2)
    ratio = work / np.maximum(np.quantile(work, 0.5, axis=1, keepdims=True, method="lower"), 1.0)
    most = float(ratio.max()) - 1
    slow = ratio - 1 >= most / 2
    ranks = context.ranks(slow)
    return context.suspect(
        "compute_straggler", ranks, lost_ns, phase="", confidence=0.5,
        texts=[f"{ranks_text(ranks)} compute up to {1 + most:.2f} times as long as others of their stage, on average"],
        action=f"Check the GPUs of {ranks_text(ranks)} (nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE,ECC).",
    )  # fmt: skip


def _stages(context: _Context, lost_ns: float, times: Float) -> Suspect:
    """Stages that compute longer than others on all data-parallel ranks."""
    model, answers = context.model, context.answers
    work = _work(model, times, FORWARD, BACKWARD).mean(axis=(1, 2))
    usual = max(float(np.quantile(work, 0.5, method="lower")), 1.0)
    excess = work / usual - 1
    slow = excess >= 0.8 * float(excess.max())
    stages = np.flatnonzero(slow).tolist()
    ranks = context.ranks(np.broadcast_to(slow[:, None], (len(slow), len(model.dp_ranks))))
    last = stages == [len(work) - 1]
    which = "the last stage" if last else f"stage {', '.join(map(str, stages))}"
    worst = stages[int(np.argmax(excess[stages]))]
    series = answers.step_by_stage[worst] - 1
    held = float(np.mean(series >= (answers.by_stage[worst] - 1) / 2))
    texts = [
        f"{which} ({ranks_text(ranks)}) computes {1 + float(excess.max()):.2f} times as long as the median stage, "
        "on all its data-parallel ranks"
    ]
    if last:
        texts.append(
            f"with the last stage at ideal speed, {answers.last_stage.share:.0%} of the lost time is won back (M_S)"
        )
    if len(model.dp_ranks) == 1:
        texts.append("there is one data-parallel rank: a slow GPU would look the same")
        held /= 2
    return context.suspect(
        "stage_imbalance", ranks, lost_ns, phase="", confidence=held, texts=texts,
        action=f"Give {which} fewer layers"
        + (": it also computes the logits and the loss." if last else ", or the others more."),
    )  # fmt: skip


def _links(context: _Context, lost_ns: float, times: Float) -> Suspect:
    """Transfers that take longer than is usual for their type."""
    model = context.model
    moves = _is(model, *COMMUNICATION)
    excess = np.where(moves[:, None, None], np.maximum(times - model.ideal_ns[:, None, None], 0.0), 0.0).mean(axis=2)
    by_type = {code: float(excess[model.op == code].sum()) for code in np.unique(model.op[moves]).tolist()}
    code = max(by_type, key=lambda one: by_type[one])
    stages = int(model.stage.max()) + 1
    place = np.zeros((stages, excess.shape[1]))
    # Both ends of a link show it.
    family = [one for one in by_type if one == code or {model.names[one], model.names[code]} <= set(P2P)]
    of_type = np.isin(model.op, family)
    np.add.at(place, model.stage[of_type], excess[of_type])
    slow = place >= 0.5 * float(place.max())
    # Where half of the ranks or more are slow, it is not a matter of single links.
    ranks = context.ranks(slow) if 2 * slow.sum() <= slow.size or slow.size <= 2 else []
    where = ranks_text(ranks) if ranks else "most ranks"
    of_type = model.op == code
    typical = float(np.median(times[of_type][:, slow.any(axis=0)]))
    long = np.median(times[of_type].max(axis=(0, 1)))
    held = float(np.mean(times[of_type].max(axis=(0, 1)) >= 2 * model.ideal_ns[of_type][0]))
    return context.suspect(
        "link_degradation", ranks, lost_ns, phase="communication", confidence=held,
        texts=[
            f"{model.names[code]} of {where} transfers for up to {duration(float(long))} a step, typically "
            f"{duration(typical)}; "
            f"the median over all ranks and steps is {duration(float(model.ideal_ns[of_type][0]))}"
        ],
        action=f"Check the network between {where} and the next stages and replicas: port counters, link speed, "
        "retransmits, NCCL_DEBUG=INFO for the transport used.",
    )  # fmt: skip


def _mixed(context: _Context, lost_ns: float) -> Suspect:
    answers = context.answers
    name, slower = max(answers.by_op.items(), key=lambda item: item[1])
    return context.suspect(
        "jitter", [], lost_ns, phase="", confidence=0.3,
        texts=[f"several small causes; of the types of operations, {name} costs most (S {slower:.3f})"],
        action="See which ranks and stages differ: the table phase_ops has every operation.",
    )  # fmt: skip
