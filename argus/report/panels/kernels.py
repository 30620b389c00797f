"""Kernels against peers: whose durations are longer, with their distributions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.kernels.distributions import QUANTILES, by_distribution
from argus.diagnose.read import queries
from argus.model.text import counted
from argus.report.arrays import Arrays
from argus.report.look import Columns, Look, absent, bounded, panel, some
from argus.report.panel import Column, Curve, Densities, Panel, Sql, Table

ID = "kernels"
TITLE = "Kernels against their peers"

SHOWN = 4
"""Kernels whose distributions are drawn."""
OF_NAMED, OF_PEERS = 4, 12
"""Ranks that are compared."""
DRAWN_PEERS = 5
LISTED = 30
POINTS = 128
"""Of a curve."""
NARROWEST = 0.004
"""Bandwidth of a density at least, of logarithms: durations are stored with errors of a percent and less, and a kernel
that always takes equally long is no spike of zero width."""
TRIFLE = 0.02
"""Part of a step that the kernels of a named rank take longer together, up to which they are no reason for anything:
GPUs of one kind differ by as much."""
LAST = 2**31 - 1
"""Steps above are seconds of the trace."""

_RECORDED = """
SELECT rank, quantilesExactInclusive($levels)(duration_ns) AS own FROM kernel_events
WHERE job = {job:String} AND run = {run:UInt32} AND rank IN {ranks:Array(UInt32)} AND kind = 'kernel'
  AND cityHash64(name, grid, block) = {kernel:UInt64}
GROUP BY rank ORDER BY rank
"""

_HAS_ROWS = """
SELECT DISTINCT rank FROM $table WHERE job = {job:String} AND run = {run:UInt32} ORDER BY rank
"""

_STATISTICS = """
SELECT kernel, rank, sum(s.count) AS launches, sum(s.total_ns) / sum(s.count) AS mean_ns, median(p50_ns) AS p50_ns,
       median(p99_ns) AS p99_ns, max(max_ns) AS max_ns
FROM kernel_stats AS s
WHERE job = {job:String} AND run = {run:UInt32} AND kernel_id = {kernel:UInt64} AND rank IN {ranks:Array(UInt32)}
  AND step_from BETWEEN {first:UInt32} AND {last:UInt32}
GROUP BY kernel, rank ORDER BY mean_ns DESC
"""
"""Durations of a kernel by rank, decoded in the store."""


@dataclass(frozen=True)
class Compared:
    """A kernel on some ranks.

    Attributes:
        number, name: Which.
        ranks: Shape (ranks,).
        mean_ns: Of a launch, shape (ranks,).
        launches: Of a step, shape (ranks,).
        usual_ns: Median of the means of the peers.
        excess_ns: What the slowest named rank, else the slowest rank, spends more than the peers in a step.
        slowest: Its place.
    """

    number: int
    name: str
    ranks: NDArray[np.int64]
    mean_ns: NDArray[np.float64]
    launches: NDArray[np.float64]
    usual_ns: float
    excess_ns: float
    slowest: int


def build(look: Look, arrays: Arrays) -> Panel:
    """The kernels in which named ranks lose most; where none is named, those that take most time."""
    source = next((one for one in ("kernel_summaries", "kernel_escapes", "kernel_events") if _ranks(look, one)), "")
    if not source:
        return absent(ID, TITLE, "no durations of kernels are stored: arm the job (argus run …) to have GPU times")
    stored = sorted({*_ranks(look, source), *(_ranks(look, "kernel_escapes") if source != "kernel_events" else ())})
    named = [rank for rank in look.named if rank in set(stored)][:OF_NAMED]
    ranks = named + _peers(look, stored, named)
    window = {**look.newest(), "ranks": ranks} if look.steps else {
        "first": 0, "last": LAST, "ranks": ranks
    }  # fmt: skip
    text = queries.RECORDED_KERNELS if source == "kernel_events" else queries.KERNEL_TIME
    steps = max(look.steps[1] - look.steps[0] + 1, 1) if look.steps else 1
    rows = look.read(text, **window, steps=steps)
    kernels = compared(rows, named)
    if not kernels:
        return absent(
            ID, TITLE, "in these steps no kernel of the ranks that are compared was recorded: --steps chooses others"
        )
    views: list[Densities] = []
    sql: list[Sql] = [look.sql("Launches and time of each kernel, by rank", text, **window, steps=steps)]
    for one in kernels[:SHOWN]:
        known, each = _quantiles(look, source, one, window)
        curves = _curves(look, arrays, known, each, named)
        if curves:
            views.append({"view": "densities", "title": bounded(one.name), "x_unit": "ns", "curves": curves})
        if source != "kernel_events":
            sql.append(look.sql(f"Durations of {bounded(one.name, 60)}", _STATISTICS, **window, kernel=one.number))
        else:
            sql.append(look.sql(f"Durations of {bounded(one.name, 60)}", _recorded(), **window, kernel=one.number))
    trifling = bool(named) and _is_trifle(look, kernels)
    worst = f"those in which {look.place.of(named[0])} loses most" if named else "those that take most time"
    first = "the few in which it differs most" if trifling else worst
    several = f"{len(ranks)} of {counted(len(stored), 'rank')}"
    lead = f"Durations of single launches, {first}, on {several} whose kernels are stored" + (
        f", steps {window['first']} to {window['last']}." if look.steps and source != "kernel_events" else "."
    )
    if trifling:
        lead = f"The kernels of {look.place.of(named[0])} are as fast as those of its peers. {lead}"
    return panel(ID, TITLE, lead, views, table=_table(look, kernels), sql=sql)


def _is_trifle(look: Look, kernels: list[Compared]) -> bool:
    """Whether kernels of a named rank take hardly longer than those of its peers, all together."""
    step_ns = look.case.recent_ns if look.case is not None else 0.0
    return sum(max(one.excess_ns, 0.0) for one in kernels) < TRIFLE * step_ns


def _ranks(look: Look, table: str) -> list[int]:
    rows = look.read(_HAS_ROWS.replace("$table", table))
    return [int(rank) for rank in rows["rank"].tolist()]


def _peers(look: Look, stored: list[int], named: list[int]) -> list[int]:
    """Ranks with the same work as the first that is named, evenly chosen."""
    mesh = look.mesh
    stage = dict(zip(mesh.ranks.tolist(), mesh.stage.tolist(), strict=True))
    others = [rank for rank in stored if rank not in named and rank not in look.named]
    alike = [rank for rank in others if named and stage.get(rank) == stage.get(named[0])]
    return some(alike or others, OF_PEERS)


def compared(rows: Columns, named: list[int]) -> list[Compared]:
    """Kernels by what they cost the named ranks more than the others; without a named rank by their time.

    Args:
        rows: As :data:`argus.diagnose.read.queries.KERNEL_TIME` returns them.
        named: Ranks of findings.
    """
    found: list[Compared] = []
    identity = rows["kernel_id"]
    for number in dict.fromkeys(identity.tolist()):
        at = np.flatnonzero(identity == number)
        ranks = rows["rank"][at].astype(np.int64)
        count = np.maximum(rows["launches"][at].astype(np.float64), 1.0)
        mean = rows["spent_ns"][at].astype(np.float64) / count
        often = count / np.maximum(rows["steps"][at].astype(np.float64), 1.0)
        suspect = np.isin(ranks, named)
        usual = float(np.median(mean[~suspect])) if (~suspect).any() else float(np.median(mean))
        cost = (mean - usual) * often
        chosen = np.flatnonzero(suspect) if suspect.any() else np.arange(len(ranks))
        slowest = int(chosen[np.argmax(mean[chosen])])
        found.append(
            Compared(int(number), str(rows["kernel"][at[0]]), ranks, mean, often, usual, float(cost[slowest]), slowest)
        )
    if named and any(one.excess_ns > 0 and one.ranks[one.slowest] in named for one in found):
        return sorted(found, key=lambda one: -(one.excess_ns if one.ranks[one.slowest] in named else -np.inf))
    return sorted(found, key=lambda one: -float(np.mean(one.mean_ns * one.launches)))


def _recorded() -> str:
    return _RECORDED.replace("$levels", ", ".join(f"{one:.6g}" for one in QUANTILES.tolist()))


def _quantiles(
    look: Look, source: str, one: Compared, window: dict[str, object]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Ranks, and 64 quantiles of their durations: shape (ranks,) and (ranks, 64), ns."""
    ranks = one.ranks.tolist()
    if source != "kernel_events":
        asked = {**look.params, **window}

        def read(text: str, params: object) -> Columns:
            given = dict(params)  # type: ignore[call-overload]
            return look.read(text, **{name: given[name] for name in ("first", "last", "ranks", "kernel")})

        return by_distribution(read, asked, one.number, ranks)
    rows = look.read(_recorded(), ranks=ranks, kernel=one.number)
    each = np.array([np.asarray(own, np.float64) for own in rows["own"].tolist()]).reshape(-1, len(QUANTILES))
    return rows["rank"].astype(np.int64), each


def density(quantiles: NDArray[np.float64], grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """Density of durations over their logarithms: a Gaussian kernel estimate with Scott's bandwidth.

    The same as ``scipy.stats.gaussian_kde`` (a test compares), whose import takes 1.3 s: longer than all panels of a
    small job.

    Args:
        quantiles: Durations that stand for equal parts, shape (n,), ns.
        grid: Logarithms at which it is known, shape (points,).

    Returns:
        Shape (points,); it integrates to 1 over the logarithms.
    """
    logs = np.log(np.maximum(quantiles, 1.0))
    width = max(float(logs.std(ddof=1)) * len(logs) ** -0.2, NARROWEST) if len(logs) > 1 else NARROWEST
    apart = (grid[:, None] - logs[None, :]) / width
    return np.asarray(np.exp(-0.5 * apart**2).mean(axis=1) / (width * np.sqrt(2 * np.pi)))


def _curves(
    look: Look, arrays: Arrays, ranks: NDArray[np.int64], each: NDArray[np.float64], named: list[int]
) -> list[Curve]:
    rows = [row for row in range(len(ranks)) if np.isfinite(each[row]).all() and each[row].max() > 0]
    if not rows:
        return []
    peers = some([row for row in rows if int(ranks[row]) not in named], DRAWN_PEERS)
    shown = [row for row in rows if int(ranks[row]) in named] + peers
    logs = np.log(np.maximum(each[shown], 1.0))
    margin = max(3 * NARROWEST, 1.4 * float(logs.std(axis=1).max()))
    grid = np.linspace(float(logs.min()) - margin, float(logs.max()) + margin, POINTS)
    axis = arrays.add(np.exp(grid))
    return [
        {
            "title": look.place.of(int(ranks[row])), "named": int(ranks[row]) in named, "x": axis,
            "y": arrays.add(density(each[row], grid)),
        }
        for row in shown
    ]  # fmt: skip


def _table(look: Look, kernels: list[Compared]) -> Table:
    columns: list[Column] = [
        {"title": "kernel", "unit": ""}, {"title": "rank", "unit": ""}, {"title": "host", "unit": ""},
        {"title": "mean", "unit": "ns"}, {"title": "usual mean", "unit": "ns"},
        {"title": "of the usual", "unit": "ratio"}, {"title": "launches a step", "unit": "count"},
        {"title": "more a step", "unit": "ns"},
    ]  # fmt: skip
    rows: list[list[str | float | int | None]] = []
    for one in kernels[:LISTED]:
        rank, mean = int(one.ranks[one.slowest]), float(one.mean_ns[one.slowest])
        rows.append([
            bounded(one.name), rank, look.place.host.get(rank, ""), mean, one.usual_ns, mean / max(one.usual_ns, 1.0),
            float(one.launches[one.slowest]), one.excess_ns,
        ])  # fmt: skip
    return {"columns": columns, "rows": rows, "of": len(kernels)}
