"""What slows down a job whose operations are known: from the answers of :mod:`argus.diagnose.whatif` to findings.

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
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose import sql
from argus.diagnose.phase import ALPHA, find_onset
from argus.diagnose.verdict import Evidence, Finding, named
from argus.diagnose.whatif import BACKWARD, COMMUNICATION, FORWARD, P2P, Layout, Model, Operations, WhatIf

Float = NDArray[np.float64]
Bool = NDArray[np.bool_]

MIN_STEPS = 3
"""Steps that must be there to tell what persists from what happened once."""
CERTAIN = 5.0
"""Standard errors by which a worker's typical excess must stand out of its own variation from step to step: one in two
million by chance, and there are thousands of workers."""
SAME_DATA = 0.71
"""Correlation of the forward and backward times of micro-batches from which their data is the reason: half of the
variance is shared. (StragglerAnalysis, OSDI '25, takes 0.9 for jobs of which this is the only trouble.)"""
MOSTLY = 0.5
"""M_W or M_S from which few workers, or the last stage, count as explaining a slowdown: most of it (OSDI '25, 5.1). So
does any cause if none alone costs the threshold."""
MOST_TOLD = 256
"""Ranks, stages and data-parallel ranks whose S a verdict has: those that cost most."""
SPIKE = 1.5
"""A forward of so many times the typical length is a pause in it rather than more work."""


def read(query: sql.Query, params: Mapping[str, Any]) -> tuple[Operations, Layout] | None:
    """The operations of a run, and how it is split; None: none are stored.

    Args:
        query: Runs SQL.
        params: job, run, first and last (steps).
    """
    rows = query(sql.OPERATIONS, params)
    if not len(rows["step"]):
        return None
    names, op = np.unique(rows["op"].astype(str), return_inverse=True)
    begin = int(rows["ts"].min())
    start, end = rows["ts"].astype(np.int64) - begin, rows["ts_end"].astype(np.int64) - begin
    told = query(sql.LAYOUT, params)
    sizes = (
        {name: int(told[name][0]) for name in ("dp", "pp", "tp", "sp", "vpp", "world_size")} if len(told["dp"]) else {}
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
        most = sorted(values.items(), key=lambda item: -item[1])[:MOST_TOLD]
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


@dataclass
class _Part:
    """One cause: what it costs a step (ns), and the finding without what depends on the others."""

    lost_ns: float
    finding: Finding


def judge(
    model: Model, answers: WhatIf, params: Mapping[str, Any], hosts: Mapping[int, str], threshold: float
) -> list[Finding]:
    """Names what slows the job down, the costliest first.

    Args:
        model: The step, and what its operations took.
        answers: Of :func:`argus.diagnose.whatif.answer`.
        params: job, run, first and last, for the queries that are cited.
        hosts: Of each rank.
        threshold: Lost share of the step that counts.
    """
    actual_ns, ideal_ns = answers.workers.actual_ns, answers.workers.ideal_ns
    least_ns = threshold * actual_ns
    if actual_ns - ideal_ns < least_ns or len(model.steps) < MIN_STEPS:
        return []
    context = _Context(model, answers, params, hosts)
    parts: list[_Part] = []
    small: list[tuple[float, Callable[[_Context, float, Float], _Part]]] = []
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
    for made, told in (
        *workers,
        (by_type, _stages),
        (None, _links),
    ):
        now_ns = ideal_ns if made is None else _mean_ns(model, made)
        if before_ns - now_ns >= least_ns:
            parts.append(told(context, before_ns - now_ns, times))
        small.append((before_ns - now_ns, told))
        before_ns = now_ns
    parts = [part for part in parts if part.lost_ns >= least_ns]
    if not parts:
        # Several small causes: together they count. One that is most of it is told; else the op type that costs most.
        most_ns, tell = max(small, key=lambda one: one[0])
        mostly = most_ns >= MOSTLY * (actual_ns - ideal_ns)
        parts = [tell(context, most_ns, times) if mostly else _mixed(context, actual_ns - ideal_ns)]
    total = max(sum(part.lost_ns for part in parts), actual_ns - ideal_ns)
    for part in parts:
        part.finding["share"] = round(min(1.0, part.lost_ns / total), 4)
        part.finding["slowdown"] = round(max(1.0, actual_ns / max(actual_ns - part.lost_ns, 1.0)), 4)
    parts.sort(key=lambda part: -part.lost_ns)
    return [part.finding for part in parts]


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

    def finding(
        self, kind: str, ranks: list[int], lost_ns: float, *, phase: str, confidence: float, texts: list[str],
        action: str, onset: int = 0,
    ) -> _Part:  # fmt: skip
        steps = self.model.steps
        step_ns = self.answers.workers.actual_ns
        texts.append(f"it costs {_ms(lost_ns)} of {_ms(step_ns)} a step")
        shown = sql.shown(sql.COMPUTE_TIME if kind != "link_degradation" else sql.TRANSFER_TIME, self.params)
        evidence: list[Evidence] = [{"text": text, "sql": shown} for text in texts]
        return _Part(lost_ns, Finding(
            kind=kind, ranks=ranks, hosts=list(dict.fromkeys(self.hosts[r] for r in ranks if r in self.hosts)),
            steps=[int(steps[onset]), int(steps[-1])], phase=phase, kernels=[], slowdown=1.0, share=0.0,
            confidence=round(float(np.clip(confidence, 0.0, 1.0)), 4), level="phase", evidence=evidence, action=action,
        ))  # fmt: skip


def _is(model: Model, *names: str) -> Bool:
    return np.array([name in names for name in model.names])[model.op]


def _work(model: Model, times: Float, *names: str) -> Float:
    """What each worker computed in each step, shape (stages, dp, steps), ns."""
    stages = int(model.stage.max()) + 1
    found = np.zeros((stages, *times.shape[1:]))
    mine = _is(model, *names)
    np.add.at(found, model.stage[mine], times[mine])
    return found


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
    # 1.4826 MAD is the standard deviation of normal values, 1.2533 / sqrt(n) of it the error of their median.
    error = 1.4826 * 1.2533 * np.median(np.abs(newest - typical[:, :, None]), axis=2) / np.sqrt(newest.shape[2])
    found: Bool = (typical >= 1 + threshold) & (typical - 1 >= CERTAIN * error)
    return found, ratio


def _relieved(model: Model, suspects: Bool, ratio: Float) -> Float:
    """The times if suspects computed as fast as their peers."""
    times: Float = model.actual_ns.copy()
    mine = _is(model, FORWARD, BACKWARD)
    factor = np.where(suspects[:, :, None], np.maximum(ratio, 1.0), 1.0)
    times[mine] /= factor[model.stage[mine]]
    return times


def _mean_ns(model: Model, times: Float) -> float:
    """Mean step time with other times."""
    everything = np.ones((1, *times.shape[:2]), bool)
    return float(replace(model, actual_ns=times).times_ns(everything)[0].mean())


def _means(times: Float, model: Model, computes: Bool, by: tuple[str, ...]) -> Float:
    """The times with each computation's replaced by the mean of its type (of its stage, data-parallel rank if told)."""
    made: Float = times.copy()
    stages = model.stage if "stage" in by else np.zeros_like(model.stage)
    for code in np.unique(model.op[computes]).tolist():
        for stage in np.unique(stages).tolist():
            mine = computes & (model.op == code) & (stages == stage)
            if mine.any():
                made[mine] = times[mine].mean(axis=(0, 2) if "dp" in by else None, keepdims=True)
    return made


def _workers(context: _Context, suspects: Bool, ratio: Float, lost_ns: float) -> list[_Part]:
    """Findings on workers that are slower than their peers."""
    model, answers = context.model, context.answers
    half = max(MIN_STEPS, (ratio.shape[2] + 1) // 2)
    excess = np.median(ratio[:, :, -half:], axis=2) - 1
    # Data makes all stages of a data-parallel rank slower alike; a GPU only its own.
    widely = suspects.shape[0] > 1 and suspects.all(axis=0)
    data = suspects & widely if suspects.shape[0] > 1 else np.zeros_like(suspects)
    parts = []
    cost = {True: float(excess[data].sum()), False: float(excess[suspects & ~data].sum())}
    for of_data, mine in ((False, suspects & ~data), (True, data)):
        if not mine.any():
            continue
        ranks = context.ranks(mine)
        worst = np.unravel_index(int(np.argmax(np.where(mine, excess, -1.0))), mine.shape)
        series = ratio[worst] - 1
        onset = find_onset(series, float(excess[worst]))
        lost = lost_ns * cost[of_data] / sum(cost.values())
        grown = {name: float(_growth(model, mine, name)) for name in (FORWARD, BACKWARD) if _is(model, name).any()}
        phase = max(grown, key=lambda name: grown[name]).split("-")[0]
        held = float(np.mean(series[onset:] >= excess[worst] / 2))
        who = named(ranks)
        where = f"rank {model.rank[model.stage == worst[0]][0, worst[1]]} (stage {worst[0]}, data-parallel rank "
        where += f"{model.dp_ranks[worst[1]]})" + (f", the slowest of {who}," if len(ranks) > 1 else "")
        texts = [
            f"{where} computes {1 + excess[worst]:.2f} times as long as the other data-parallel ranks of the stage, "
            f"in {held:.0%} of the steps from {model.steps[onset]} on"
        ]
        if not of_data:
            texts.append(
                f"with the slowest {len(answers.slowest)} of {len(answers.by_rank)} workers ({named(answers.slowest)}) "
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
        parts.append(context.finding(
            "sequence_imbalance" if of_data else "compute_straggler", ranks, lost, phase=phase, confidence=held,
            texts=texts, action=action, onset=onset,
        ))  # fmt: skip
    return parts


def _growth(model: Model, mine: Bool, name: str) -> float:
    """How much longer a kind of computation of some workers takes a step than their peers' does, ns."""
    work = _work(model, model.actual_ns, name)
    usual = np.quantile(work, 0.5, axis=1, keepdims=True, method="lower")
    return float((work - usual).mean(axis=2)[mine].sum())


def _variation(context: _Context, lost_ns: float, times: Float) -> _Part:
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
        return context.finding(
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
        return context.finding(
            "gc_pause", everyone, lost_ns, phase="forward", confidence=lost_in_spikes,
            texts=[
                f"{len(spikes):,} of {forward.size:,} forwards take more than {SPIKE} times as long as others of their "
                "worker, backwards do not: the interpreter launches forwards, and pauses"
            ],
            action="Collect garbage at the same step on all ranks: gc.disable(), then gc.collect() every 100 steps.",
        )  # fmt: skip
    return context.finding(
        "jitter", everyone, lost_ns, phase="", confidence=0.5,
        texts=[
            f"computations take {1 + low:.2f} to {1 + high:.2f} times their worker's mean, forwards and backwards not "
            f"together (correlation {together:.2f}), on no rank more than on others for long"
        ],
        action="See what else runs on the hosts in the slow steps, and whether clocks of the GPUs change.",
    )  # fmt: skip


def _passes(model: Model, times: Float, name: str) -> Float:
    """How much longer each pass takes than its worker's mean (0: as long), in the order of chunks and numbers."""
    mine = np.flatnonzero(_is(model, name))
    mine = mine[np.lexsort((model.seq[mine], model.chunk[mine], model.stage[mine]))]
    found = times[mine]
    if not len(mine):
        return found
    usual = np.empty_like(found)
    for stage in np.unique(model.stage[mine]).tolist():
        here = model.stage[mine] == stage
        usual[here] = found[here].mean(axis=(0, 2), keepdims=True)
    return np.asarray(found / np.maximum(usual, 1.0) - 1)


def _differ(model: Model, times: Float) -> bool:
    """Whether any worker computes longer on average than others of its stage, by more than its steps vary."""
    work = _work(model, times, FORWARD, BACKWARD)
    excess = work.mean(axis=2) - np.quantile(work.mean(axis=2), 0.5, axis=1, keepdims=True, method="lower")
    error = work.std(axis=2, ddof=1) / np.sqrt(work.shape[2])
    errors = NormalDist().inv_cdf(1 - ALPHA / excess.size)
    return bool(np.any(excess > errors * np.maximum(error, np.median(error))))


def _workers_left(context: _Context, lost_ns: float, times: Float) -> _Part:
    """Workers that differ, but none so much or so steadily that it was taken for a straggler of its own."""
    work = _work(context.model, times, FORWARD, BACKWARD).mean(axis=2)
    ratio = work / np.maximum(np.quantile(work, 0.5, axis=1, keepdims=True, method="lower"), 1.0)
    most = float(ratio.max()) - 1
    mine = ratio - 1 >= most / 2
    ranks = context.ranks(mine)
    return context.finding(
        "compute_straggler", ranks, lost_ns, phase="", confidence=0.5,
        texts=[f"{named(ranks)} compute up to {1 + most:.2f} times as long as others of their stage, on average"],
        action=f"Check the GPUs of {named(ranks)} (nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE,ECC).",
    )  # fmt: skip


def _stages(context: _Context, lost_ns: float, times: Float) -> _Part:
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
        f"{which} ({named(ranks)}) computes {1 + float(excess.max()):.2f} times as long as the median stage, "
        "on all its data-parallel ranks"
    ]
    if last:
        texts.append(
            f"with the last stage at ideal speed, {answers.last_stage.share:.0%} of the lost time is won back (M_S)"
        )
    if len(model.dp_ranks) == 1:
        texts.append("there is one data-parallel rank: a slow GPU would look the same")
        held /= 2
    return context.finding(
        "stage_imbalance", ranks, lost_ns, phase="", confidence=held, texts=texts,
        action=f"Give {which} fewer layers"
        + (": it also computes the logits and the loss." if last else ", or the others more."),
    )  # fmt: skip


def _links(context: _Context, lost_ns: float, times: Float) -> _Part:
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
    mine = np.isin(model.op, family)
    np.add.at(place, model.stage[mine], excess[mine])
    slow = place >= 0.5 * float(place.max())
    # Where half of the ranks or more are slow, it is not a matter of single links.
    ranks = context.ranks(slow) if 2 * slow.sum() <= slow.size or slow.size <= 2 else []
    where = named(ranks) if ranks else "most ranks"
    mine = model.op == code
    typical = float(np.median(times[mine][:, slow.any(axis=0)]))
    long = np.median(times[mine].max(axis=(0, 1)))
    held = float(np.mean(times[mine].max(axis=(0, 1)) >= 2 * model.ideal_ns[mine][0]))
    return context.finding(
        "link_degradation", ranks, lost_ns, phase="communication", confidence=held,
        texts=[
            f"{model.names[code]} of {where} transfers for up to {_ms(float(long))} a step, typically {_ms(typical)}; "
            f"the median over all ranks and steps is {_ms(float(model.ideal_ns[mine][0]))}"
        ],
        action=f"Check the network between {where} and the next stages and replicas: port counters, link speed, "
        "retransmits, NCCL_DEBUG=INFO for the transport used.",
    )  # fmt: skip


def _mixed(context: _Context, lost_ns: float) -> _Part:
    answers = context.answers
    name, slower = max(answers.by_op.items(), key=lambda item: item[1])
    return context.finding(
        "jitter", [], lost_ns, phase="", confidence=0.3,
        texts=[f"several small causes; of the types of operations, {name} costs most (S {slower:.3f})"],
        action="See which ranks and stages differ: the table phase_ops has every operation.",
    )  # fmt: skip


def _ms(ns: float) -> str:
    return f"{ns / 1e6:,.1f} ms"
