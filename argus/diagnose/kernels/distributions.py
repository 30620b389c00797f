"""Kernels that take longer on some ranks, or longer than they did: by their stored distributions.

Phases hide them: a kernel that takes 3 % of a step may take twice as long and nobody sees it in the sum. The mean of
each kernel (name, stream, grid, block) on each rank is compared first; of those that stand out the distributions are
rebuilt from their summaries and compared by the first Wasserstein distance, as ARGUS (arXiv 2606.20374) does. Its mean
over all pairs of ranks shows nothing where half of them are slow: here the reference is the low median of the ranks'
quantile functions, point by point, which a slow half does not move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.compress.decode import Decoded, decode_escapes, decode_summaries
from argus.diagnose.case import Case
from argus.diagnose.read import queries
from argus.diagnose.read.peers import Mesh
from argus.diagnose.read.query import Query, runnable_sql
from argus.diagnose.suspect import Suspect, slowdown_of
from argus.diagnose.verdict import Evidence
from argus.model.statistics import mad
from argus.model.units import duration, ranks_on, ranks_text

Float = NDArray[np.float64]
Int = NDArray[np.int64]

LEAST = 0.2
"""Excess of a kernel's mean that counts: single kernels of GPUs of one model that are well differ by up to 8 % and more
where caches and clocks are shared ("Not All GPUs Are Created Equal", SC '22); EROICA's delta is 0.4."""
COST = 0.01
"""Share of the step that it must cost."""
SPREADS = 4.0
"""How many times the scatter of the mean among the other ranks the excess must be, and how many times their distances
the rank's."""
RANKS = 128
"""Ranks that are compared, at most: of more, evenly chosen ones."""
STEPS = 20
"""Newest steps, and first ones: of 300 kernels on so many ranks three quarters of a million rows."""
BLOCKS = 60
"""Of so many stretches of steps it is examined since when a kernel is slow."""
CHECKED = 3
"""Kernels whose distributions are rebuilt, at most, by what they cost."""
SAMPLE = 48
"""Ranks whose distributions are rebuilt, at most."""
QUANTILES = (np.arange(64) + 0.5) / 64
SAME_TIME, SAME_KERNELS = 0.9, 0.8
"""Part of the time in kernels, and of the kernels, that must take longer for the GPU to be what is slow: its clocks
show in all that computes."""
UNIT_KERNELS, UNIT_ALIKE = 4, 0.05
"""Or so many kernels by the same factor, this far apart, while the others take as long as elsewhere: a unit of the GPU
is slow, such as the one that multiplies matrices. Kernels that are called with larger shapes differ in their factor."""
COUNTED = 0.01
"""Share of that time from which a kernel counts as one."""
FEWEST = 3
"""Kernels that must be known of both."""
COMMON = 0.6
"""Part of the time of kernels that the others must launch, too: embedding and loss are of one stage alone."""
AS_OFTEN = 0.05
"""By how much launches may be more, where it is their durations that are longer."""
EXPLAINED = 0.8
"""Part of what is computed longer, in logarithms, that durations must explain to be the reason. More launches are, if
durations explain no more than the rest, and all kernels together so much."""
BY_KERNELS = 0.8
"""Confidence of GPUs that are called slow by their kernels' durations alone, against those of other stages or their own
past: the same kernels may have other data."""


@dataclass(frozen=True)
class SlowKernel:
    """A kernel that takes longer on some ranks.

    Attributes:
        kernel_id, kernel: Which.
        ranks: Where.
        factor: Its mean there over that of the peers (or its own past).
        cost_ns: What it takes longer in a step there.
        w1: Distance of its durations from the reference's, over the mean: median over ``ranks``.
        others: The largest of any other rank.
        before: Whether it is compared with its own past: all ranks became slower, or there is no peer.
    """

    kernel_id: int
    kernel: str
    ranks: tuple[int, ...]
    factor: float
    cost_ns: float
    w1: float
    others: float
    before: bool


@dataclass(frozen=True)
class Launches:
    """Kernels of some ranks against the same ones of other ranks, or as they were.

    Attributes:
        kernels: How many both launch.
        slower: Time of a launch over the others': 1 if it is the same.
        more: Launches in a step over the others', by the time they take there.
        reason: "slower" if durations explain what is computed longer, "more" if they do not, "" if it is not clear.
    """

    kernels: int
    slower: float
    more: float
    reason: str


def compared(columns: Mapping[str, NDArray[Any]], ranks: Sequence[int], excess: float) -> Launches | None:
    """Whether some ranks compute for longer since their kernels take longer, or since they have more of them.

    Args:
        columns: As :data:`argus.diagnose.read.queries.KERNEL_TIME` returns them, of these ranks and of those to compare
        with. ranks: Those that compute for longer.
        excess: How many times as long.

    Returns:
        None: not enough is known of both.
    """
    rank = columns["rank"].astype(np.int64)
    numbers, place = np.unique(rank, return_inverse=True)
    kernels, column = np.unique(columns["kernel_id"], return_inverse=True)
    launches, spent = np.zeros((2, len(numbers), len(kernels)))
    steps = np.zeros(len(numbers))
    np.add.at(launches, (place, column), columns["launches"].astype(np.float64))
    np.add.at(spent, (place, column), columns["spent_ns"].astype(np.float64))
    np.maximum.at(steps, place, columns["steps"].astype(np.float64))
    chosen = np.isin(numbers, ranks)
    if not chosen.any() or chosen.all() or excess <= 1:
        return None
    often = launches / np.maximum(steps, 1.0)[:, None]
    known = launches > 0
    both = (known[chosen].mean(axis=0) >= 0.5) & (known[~chosen].mean(axis=0) >= 0.5)
    if both.sum() < FEWEST:
        return None
    mean = np.where(known, spent / np.maximum(launches, 1.0), np.nan)[:, both]
    took, usual = np.nanmedian(mean[chosen], axis=0), np.nanmedian(mean[~chosen], axis=0)
    often = np.where(known, often, np.nan)[:, both]
    here, there = np.nanmedian(often[chosen], axis=0), np.nanmedian(often[~chosen], axis=0)
    cost = here * took
    slower, more = float(cost.sum() / (here @ usual)), float(here @ usual / (there @ usual))
    each = (spent / np.maximum(steps, 1.0)[:, None]).sum(axis=1)
    whole, theirs = float(np.median(each[chosen])), float(np.median(each[~chosen]))
    longer = took >= usual * (1 + (excess - 1) / 2)
    counts = cost >= COUNTED * cost.sum()
    explained, in_all = (float(np.log(max(one, 1e-9)) / np.log(excess)) for one in (slower, whole / max(theirs, 1.0)))
    ratio, beyond = took / usual, longer & counts
    same = ratio[counts & ~longer]
    unit = beyond.sum() >= UNIT_KERNELS and bool(np.ptp(ratio[beyond]) <= UNIT_ALIKE * np.median(ratio[beyond]))
    unit = unit and (not len(same) or float(np.abs(same - 1).max()) <= UNIT_ALIKE)
    reason = ""
    if explained <= 1 - EXPLAINED and in_all >= EXPLAINED:
        reason = "more"
    elif (
        explained >= EXPLAINED
        and abs(more - 1) <= AS_OFTEN
        and cost.sum() >= COMMON * whole
        and (unit or (cost[longer].sum() >= SAME_TIME * cost.sum() and longer[counts].mean() >= SAME_KERNELS))
    ):
        reason = "slower"
    return Launches(int(both.sum()), slower, more, reason)


def kernel_times(query: Query, window: Mapping[str, Any], steps: int) -> tuple[Mapping[str, NDArray[Any]], str]:
    """Launches and time of each kernel by rank in a window of so many steps, and the SQL that shows it: from the
    summaries, or of a recording, which has none, from the kernels themselves."""
    columns = query(queries.KERNEL_TIME, window)
    if len(columns["rank"]):
        return columns, runnable_sql(queries.KERNEL_TIME, window)
    asked = {**window, "steps": steps}
    return query(queries.RECORDED_KERNELS, asked), runnable_sql(queries.RECORDED_KERNELS, asked)


def against_stages(
    query: Query, params: Mapping[str, Any], mesh: Mesh, numbers: Int, ranks: Sequence[int], excess: float
) -> tuple[Launches | None, str]:
    """:func:`compared` with ranks of other stages, in the newest steps; and the SQL that shows it. ``numbers``: sure
    steps, ascending."""
    stages = mesh.stage[np.isin(mesh.ranks, ranks)]
    others = mesh.ranks[~np.isin(mesh.stage, stages)].tolist()
    window = _window(params, numbers[-STEPS:], [*_some(list(ranks), RANKS // 2), *_some(others, RANKS // 2)])
    columns, shown = kernel_times(query, window, len(numbers[-STEPS:]))
    return compared(columns, ranks, excess), shown


def against_past(
    query: Query, params: Mapping[str, Any], numbers: Int, onset: int, ranks: Sequence[int], excess: float
) -> tuple[Launches | None, str]:
    """:func:`compared` with themselves before a step; and the SQL that shows it. ``numbers``: as above."""
    chosen = _some(list(ranks), RANKS // 2)
    now = _window(params, numbers[-STEPS:], chosen)
    here, shown = kernel_times(query, now, len(numbers[-STEPS:]))
    earlier = numbers[numbers < onset][-STEPS:]
    if not len(earlier):
        return None, shown
    parts = [kernel_times(query, _window(params, earlier, chosen), len(earlier))[0], here]
    names = ("kernel_id", "launches", "spent_ns", "steps")
    columns = {name: np.concatenate([part[name] for part in parts]) for name in names}
    # What they were is not a rank's own number.
    columns["rank"] = np.concatenate([-1 - parts[0]["rank"].astype(np.int64), parts[1]["rank"].astype(np.int64)])
    return compared(columns, ranks, excess), shown


def explain_stage(suspect: Suspect, launches: Launches | None, shown: str, there: str) -> str:
    """Distinguishes a stage with more to do from one whose GPUs are slow.

    Args:
        suspect: A ``stage_imbalance``, changed in place.
        launches: Its kernels against others; None: not known.
        shown: SQL of it.
        there: Where the others are.

    Returns:
        :attr:`Launches.reason`.
    """
    if launches is None or not launches.reason:
        return ""
    one, where = len(suspect.ranks) == 1, ranks_text(suspect.ranks)
    if launches.reason == "more":
        text = (
            f"a launch of {launches.kernels} kernels takes as long as {there} ({launches.slower:.2f}x): more work, "
            f"{'not a slow GPU' if one else 'not slow GPUs'}"
        )
    else:
        text = (
            f"{launches.kernels} kernels are launched as often as {there} ({launches.more:.2f}x), and a launch takes "
            f"{launches.slower:.2f} times as long: {'a slow GPU' if one else 'slow GPUs'}, not more layers"
        )
        suspect.kind, suspect.level, suspect.confidence = "compute_straggler", "kernel", BY_KERNELS
        suspect.action = (
            f"Check the GPU{'' if one else 's'} of {where} (nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE,ECC), and "
            f"move the rank{'' if one else 's'} if {'it stays' if one else 'they stay'} slow."
        )
    suspect.further.append({"text": text, "sql": shown})
    return launches.reason


def _window(params: Mapping[str, Any], steps: Int, ranks: list[int]) -> dict[str, Any]:
    return {**params, "first": int(steps[0]), "last": int(steps[-1]), "ranks": ranks}


def _some(ranks: list[int], most: int) -> list[int]:
    """At most so many of them, evenly chosen."""
    return ranks[:: max(1, -(-len(ranks) // most))]


def quantiles(value: Float, weight: Float) -> Float:
    """:data:`QUANTILES` of weighted points, a row each: shape (rows, 64)."""
    order = np.argsort(value, axis=1)
    value, weight = np.take_along_axis(value, order, 1), np.take_along_axis(weight, order, 1)
    upto = np.cumsum(weight, axis=1)
    out = np.empty((len(value), len(QUANTILES)))
    for row in range(len(value)):
        place = np.searchsorted(upto[row], QUANTILES * upto[row, -1])
        out[row] = value[row, np.minimum(place, value.shape[1] - 1)]
    return out


def distances(each: Float) -> Float:
    """W1 of each rank's durations from the low median of all, over its mean: shape (ranks,).

    The area between two quantile functions (Vallender 1974). ``each``: quantiles, shape (ranks, points), ns.
    """
    low = np.sort(each, axis=0)[(len(each) - 1) // 2]
    return np.asarray(np.abs(each - low).mean(axis=1) / max(float(low.mean()), 1.0))


def candidates(columns: Mapping[str, NDArray[Any]], stage: Mapping[int, int], step_ns: float) -> list[SlowKernel]:
    """Kernels whose mean is longer on some ranks than on those with the same work, those that cost most first.

    Args:
        columns: As :data:`argus.diagnose.read.queries.KERNEL_TIME` returns them.
        stage: Which ranks have the same work: a label of each.
        step_ns: A step.

    Returns:
        With ``w1`` 0: nothing of the distributions is known yet.
    """
    slow_kernels = []
    rank = columns["rank"].astype(np.int64)
    label = np.array([stage.get(one, -1) for one in rank.tolist()], np.int64)
    launches = np.maximum(columns["launches"].astype(np.float64), 1.0)
    mean = columns["spent_ns"].astype(np.float64) / launches
    often = launches / np.maximum(columns["steps"].astype(np.float64), 1.0)
    keys = np.stack([columns["kernel_id"].astype(np.uint64).view(np.int64), label], axis=1)
    _, which = np.unique(keys, axis=0, return_inverse=True)
    order = np.argsort(which, kind="stable")
    edges = np.flatnonzero(np.diff(which[order], prepend=-1, append=-2))
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        rows = order[begin:end]
        if len(rows) < 2 or label[rows[0]] < 0:
            continue
        norm = float(np.sort(mean[rows])[(len(rows) - 1) // 2])
        ratio = mean[rows] / max(norm, 1.0)
        cost = (mean[rows] - norm) * often[rows]
        high = (ratio >= 1 + LEAST) & (cost >= COST * step_ns)
        others = ratio[~high]
        if not high.any() or not len(others):
            continue
        high &= ratio - 1 >= SPREADS * mad(others)
        # Ranks that launch it more or less often do not do the same with it.
        usual = float(np.median(often[rows][ratio < 1 + LEAST]))
        high &= np.abs(often[rows] / max(usual, 1e-9) - 1) < LEAST / 2
        if high.any():
            name = str(columns["kernel"][rows[0]])
            ranks = tuple(np.sort(rank[rows][high]).tolist())
            number = int(columns["kernel_id"][rows[0]])
            median = float(np.median(ratio[high]))
            slow_kernels.append(
                SlowKernel(number, name, ranks, median, float(np.median(cost[high])), 0.0, 0.0, before=False)
            )
    return sorted(slow_kernels, key=lambda one: -one.cost_ns * len(one.ranks))


def by_distribution(query: Query, window: Mapping[str, Any], kernel_id: int, ranks: Sequence[int]) -> tuple[Int, Float]:
    """Quantiles of a kernel's durations on some ranks in some steps, spikes left out.

    Args:
        query: Runs SQL with parameters, returns columns.
        window: job, run, first, last.
        kernel_id: Which kernel.
        ranks: Whose.

    Returns:
        Ranks that have some, ascending, shape (n,); quantiles, shape (n, 64), ns.
    """
    asked = {**window, "ranks": list(ranks), "kernel": kernel_id}
    parts: list[tuple[Int, Decoded]] = []
    rows = query(queries.KERNEL_ROWS, asked)
    if len(rows["rank"]):
        parts.append((rows["rank"].astype(np.int64), decode_summaries(rows, query(queries.KERNEL_TEMPLATES, asked))))
    escaped = query(queries.KERNEL_ESCAPED, asked)
    if len(escaped["rank"]):
        parts.append((escaped["rank"].astype(np.int64), decode_escapes(escaped)))
    known = np.unique(np.concatenate([np.empty(0, np.int64), *(part[0] for part in parts)]))
    out = np.zeros((len(known), len(QUANTILES)))
    for place, one in enumerate(known.tolist()):
        points, weights = [], []
        for rank, decoded in parts:
            value, weight = decoded.points()
            points.append(value[rank == one].ravel())
            weights.append(weight[rank == one].ravel())
        out[place] = quantiles(np.concatenate(points)[None], np.concatenate(weights)[None])[0]
    return known, out


def confirmed(one: SlowKernel, ranks: Int, each: Float) -> SlowKernel | None:
    """With the distance of its distributions; None: these do not distinguish the ranks from the others."""
    slow = np.isin(ranks, one.ranks)
    if not slow.any() or slow.all():
        return None
    distance = distances(each)
    slow_distance, other_distance = float(np.median(distance[slow])), float(distance[~slow].max())
    if slow_distance < LEAST / 2 or slow_distance < 1.5 * other_distance:
        return None
    return SlowKernel(
        one.kernel_id, one.kernel, one.ranks, one.factor, one.cost_ns, slow_distance, other_distance, one.before
    )


def detect(case: Case) -> list[Suspect]:
    """Kernels that take longer on some ranks, where nothing else was found on them."""
    if case.gpus is None:
        return []
    query, mesh = case.query, case.gpus.mesh
    named_ranks = {rank for suspect in case.suspects for rank in suspect.ranks}
    newest = case.numbers[-STEPS:]
    step_ns = float(np.median(case.durations[-STEPS:]))
    ranks = _some(mesh.ranks.tolist(), RANKS)
    window = {**case.params, "first": int(newest[0]), "last": int(newest[-1]), "ranks": ranks}
    stage = dict(zip(mesh.ranks.tolist(), mesh.stage.tolist(), strict=True))
    columns = query(queries.KERNEL_TIME, window)
    by_ranks: dict[tuple[int, ...], list[SlowKernel]] = {}
    for one in candidates(columns, stage, step_ns)[:CHECKED]:
        if named_ranks & set(one.ranks):
            continue
        peers = [rank for rank in ranks if stage[rank] == stage[one.ranks[0]] and rank not in one.ranks]
        chosen = [*one.ranks[: SAMPLE // 2], *_some(peers, SAMPLE // 2)]
        if (sure := confirmed(one, *by_distribution(query, window, one.kernel_id, chosen))) is not None:
            by_ranks.setdefault(sure.ranks, []).append(sure)
    suspects = []
    for slow, kernels in by_ranks.items():
        since, past = _since(query, case.params, case.numbers, kernels[0])
        suspects.append(_suspect(case, slow, kernels, since, past, step_ns, window))
    return suspects


def _since(query: Query, params: Mapping[str, Any], numbers: Int, one: SlowKernel) -> tuple[int, float]:
    """The step since which a kernel is slow, to a sixtieth of all steps, and how far its durations are from
    what they were in the first steps (W1 over the mean; 0: not known, or as ever)."""
    first = numbers[:STEPS] if len(numbers) >= 2 * STEPS else numbers[: len(numbers) // 3]
    whole = {**params, "first": int(numbers[0]), "last": int(numbers[-1]), "ranks": list(one.ranks[:8])}
    rows = query(queries.KERNEL_STEPS, {**whole, "kernel": one.kernel_id, "width": max(1, len(numbers) // BLOCKS)})
    if len(rows["since"]) < 3:
        return int(numbers[0]), 0.0
    mean = rows["mean_ns"].astype(np.float64)
    now = float(np.median(mean[-max(1, len(mean) // 5) :]))
    late = mean >= now * (1 + 1 / one.factor) / 2
    if late.all() or not len(first):
        return int(numbers[0]), 0.0
    changed = int(np.flatnonzero(~late)[-1]) + 1
    if changed >= len(late):
        return int(numbers[0]), 0.0
    since = int(rows["since"][changed])
    before = {**params, "first": int(first[0]), "last": int(first[-1])}
    after = {**params, "first": since, "last": int(numbers[-1])}
    was, then = by_distribution(query, before, one.kernel_id, one.ranks[:8])
    is_, here = by_distribution(query, after, one.kernel_id, one.ranks[:8])
    both, a, b = np.intersect1d(was, is_, return_indices=True)
    if not len(both):
        return since, 0.0
    apart = np.abs(here[b] - then[a]).mean(axis=1) / np.maximum(then[a].mean(axis=1), 1.0)
    return since, float(np.median(apart))


def _suspect(
    case: Case,
    slow: tuple[int, ...],
    kernels: list[SlowKernel],
    since: int,
    past: float,
    step_ns: float,
    window: Mapping[str, Any],
) -> Suspect:
    names = case.hosts_of(slow)
    where = ranks_on(slow, names)
    cost = sum(one.cost_ns for one in kernels)
    visible = cost >= case.threshold * step_ns
    shown = runnable_sql(queries.KERNEL_TIME, window)
    compared: list[Evidence] = [
        {
            "text": f"{one.kernel} takes {one.factor:.2f} times as long on {where} as on ranks with the same work, "
            f"{duration(one.cost_ns)} more a step; its durations are {one.w1:.2f} of the mean away from theirs "
            f"(W1), of any other rank {one.others:.2f} at most",
            "sql": shown,
        }
        for one in kernels
    ]
    if past:
        text = f"from step {since} on they are {past:.2f} of the mean away from what they were in the first steps"
        compared.append({"text": text, "sql": shown})
    return Suspect(
        kind="compute_straggler" if visible else "masked_compute_straggler",
        ranks=list(slow),
        hosts=names,
        since=since,
        last=case.last,
        kernels=[one.kernel for one in kernels],
        lost_ns=cost if visible else 0.0,
        slowdown=slowdown_of(step_ns, cost),
        confidence=0.9,
        level="kernel",
        evidence=compared,
        action=f"See what is different about {kernels[0].kernel} on {where}: inputs, libraries, "
        "clocks and memory of the GPU (nvidia-smi -q -d CLOCK,PERFORMANCE,ECC).",
    )
