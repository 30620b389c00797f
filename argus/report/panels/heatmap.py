"""Ranks by steps: which rank was slow, when, and in what."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.case import MOST_CALLS
from argus.diagnose.ranks.lateness import lateness_of
from argus.diagnose.read import queries
from argus.diagnose.read.query import ITERATIONS, by_hosts
from argus.model.units import duration
from argus.report.arrays import UNKNOWN, Arrays
from argus.report.look import Look, absent, panel
from argus.report.panel import Column, Heatmap, HeatRow, Measure, Panel, Sql, Table

ID = "heatmap"
TITLE = "Ranks by steps"

Float: TypeAlias = "NDArray[np.float32]"

MOST_COLUMNS = 256
MOST_CELLS = 10_000_000
"""Of all measures together: 10,240 ranks have 195 columns of five. (`scripts/bench report`)"""
MOST_ZOOMED = 4_000_000
"""Cells of a part of the map that a live page asks for: 10,240 ranks have 390 columns."""
MOST_BYTES = 5_500_000
"""Of all cells, compressed; two columns become one until they fit. In base64 a third is added."""
AT_ONCE = 500_000
"""Cells that the store groups at once: two million take it 250 MB more (`scripts/bench report`, 10,240 ranks)."""
FINE, COARSE = 254, 63
"""Levels between the lowest and the highest colour: the eye distinguishes some sixty, and in large maps more of them
only store the noise (a third of the bytes)."""
LARGE = 1_000_000
"""Cells of a measure from which on its levels are coarse."""
SAMPLED_ROWS = 512
"""Rows by which it is estimated what cells take compressed."""
SAMPLED = 200_000
"""Cells, about, by which it is estimated what is usual."""
USUAL, FAR = 6.0, 20.0
"""The scale spans so many spreads above the usual value at least, and at most."""
OF_QUARTERS = 2.44
"""The 95 % quantile of a normal distribution over its upper quartile: 1.645 / 0.674."""
OF_CHANGES = 1.72
"""The same over the median difference of two values one after the other: 1.645 / 0.954."""
LEAST_SPREAD = 0.01
"""Of the usual step: less is not worth a colour."""
CONTRASTED = 64
"""Newest columns by which the measure is chosen that is shown first."""
LISTED = 10
"""Cells of each measure in the table."""

_STEP_CELLS = by_hosts(f"""
SELECT rank, intDiv(step - {{origin:UInt32}}, {{width:UInt32}}) AS place, toFloat32(max(duration_ns)) AS step_ns
FROM {ITERATIONS}
GROUP BY rank, place
""")
"""The longest step of each rank in each column. In no order."""

_GPU_CELLS = by_hosts("""
SELECT rank, intDiv(step - {origin:UInt32}, {width:UInt32}) AS place, toFloat32(max(compute_ns)) AS compute_ns,
       toFloat32(max(exposed_communication_ns)) AS exposed_ns, toFloat32(max(idle_ns)) AS idle_ns
FROM $gpusteps
WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}$near
GROUP BY rank, place
""")
"""The same of what GPUs did. Of several GPUs of a rank the highest value."""

_EXTREME = """
SELECT rank, {origin:UInt32} + place * {width:UInt32} AS step_from, $value FROM
(
$inner
)
ORDER BY $value DESC LIMIT 50
"""

_WHERE_GPU = """
SELECT count() AS n FROM
(
  SELECT 1 FROM gpu_steps WHERE job = {job:String} AND run = {run:UInt32} AND step >= {first:UInt32} LIMIT 1
)
"""

TITLES = {
    "step": ("step_ns", "step time"),
    "lateness": ("late_ns", "lateness to collectives"),
    "computing": ("compute_ns", "computing on the GPU"),
    "exposed": ("exposed_ns", "exposed communication"),
    "idle": ("idle_ns", "GPU is idle"),
}
"""Column of the query and title of each measure."""


@dataclass(frozen=True)
class Cells:
    """Values of a measure, shape (ranks, columns), ns; NaN: not known."""

    key: str
    values: Float

    @property
    def title(self) -> str:
        return TITLES[self.key][1]


@dataclass(frozen=True)
class Scale:
    """What the lowest and the highest colour stand for, ns; ``above``: cells that are higher."""

    low: float
    high: float
    above: int

    def levels(self, values: Float, steps: int) -> NDArray[np.uint8]:
        """Values as 0 to 254, in so many steps; 255: not known."""
        span = max(self.high - self.low, 1.0)
        with np.errstate(invalid="ignore"):
            part = np.clip((values - self.low) / span, 0.0, 1.0)
            level = np.rint(np.rint(part * steps) * (254 / steps))
        return np.where(np.isnan(values), UNKNOWN, np.nan_to_num(level)).astype(np.uint8)


def scale_of(values: Float, least_ns: float = 0.0) -> Scale:
    """A linear scale on which the usual spread is a part of the colours and what stands out has the rest.

    It begins where nearly all values do, and ends at the highest, but not further than :data:`FAR` spreads above the
    usual value, unless a hundredth of the values are higher: a single step of a minute would leave one colour to all
    others. It spans more than noise; what lies between two regimes, or between ranks, is none.

    Args:
        values: Shape (n,) or (ranks, columns); NaN: not known.
        least_ns: The spread is this at least.
    """
    known = values[~np.isnan(values)]
    if not len(known):
        return Scale(0.0, 1.0, 0)
    # By the middle half: an eighth of the ranks that are slow must not count as the usual spread.
    sample = known[:: 2 * (len(known) // SAMPLED) + 1]
    few, usual, many, nearly_all = (float(one) for one in np.quantile(sample, (0.25, 0.5, 0.75, 0.99)))
    spread = max(OF_QUARTERS * (many - usual), OF_QUARTERS * (usual - few), least_ns, 1.0)
    low = max(float(known.min()), usual - USUAL * spread, 0.0)
    changes = np.abs(np.diff(values[:: 2 * (len(known) // SAMPLED) + 1]))
    noise = (
        OF_CHANGES * float(np.median(known_changes)) if len(known_changes := changes[~np.isnan(changes)]) else spread
    )
    high = max(
        usual + USUAL * min(spread, max(noise, least_ns, 1.0)),
        min(float(known.max()), max(usual + FAR * spread, nearly_all)),
    )
    return Scale(low, high, int((known > high).sum()))


def pooled(values: Float) -> Float:
    """Two columns as one, each cell the higher of the two."""
    if values.shape[1] % 2:
        values = np.concatenate([values, np.full((len(values), 1), np.nan, np.float32)], axis=1)
    with np.errstate(invalid="ignore"):
        return np.fmax(values[:, ::2], values[:, 1::2])


def build(look: Look, arrays: Arrays) -> Panel:
    """The heat map of the steps that are shown."""
    if not look.steps:
        return absent(ID, TITLE, "no whole step was seen; `argus trace --steps 60` records some")
    count = look.steps[1] - look.steps[0] + 1
    has_gpu = bool(int(look.read(_WHERE_GPU)["n"][0]))
    measures = 2 + 3 * has_gpu
    columns = int(np.clip(MOST_CELLS // (max(len(look.ranks), 1) * measures), 16, MOST_COLUMNS))
    width = -(-count // min(columns, count))
    ranks = _order(look)
    cells = _step_cells(look, ranks, width)
    cells += _late_cells(look, ranks, width)
    cells += _gpu_cells(look, ranks, width) if has_gpu else []
    if not cells:
        return absent(ID, TITLE, "no rank's steps are stored")
    least_ns = LEAST_SPREAD * float(np.nanmedian(cells[0].values[:: max(1, len(ranks) // 512)]))
    sql = _queries(look, width, has_gpu, late=any(one.key == "lateness" for one in cells))
    width, cells, packed = _fitted(cells, width, least_ns)
    view = _view(look, arrays, ranks, width, packed)
    lead = _lead(look, cells, packed, width)
    return panel(ID, TITLE, lead, [view], table=_table(look, ranks, cells, width), sql=sql)


Packed: TypeAlias = "list[tuple[Cells, Scale, NDArray[np.uint8]]]"


def _fitted(cells: list[Cells], width: int, least_ns: float) -> tuple[int, list[Cells], Packed]:
    """Cells with fewer columns until they are small enough: (steps of a column, cells, colours)."""
    while True:
        packed: Packed = []
        size = 0.0
        for one in cells:
            scale = scale_of(one.values, least_ns)
            levels = scale.levels(one.values, COARSE if one.values.size > LARGE else FINE)
            every = max(1, len(levels) // SAMPLED_ROWS)
            size += len(zlib.compress(levels[::every].tobytes())) * len(levels) / len(levels[::every])
            packed.append((one, scale, levels))
        if size <= MOST_BYTES or cells[0].values.shape[1] <= 16:
            return width, cells, packed
        cells, width = [Cells(one.key, pooled(one.values)) for one in cells], 2 * width


def zoomed(look: Look, key: str, low: float, high: float, arrays: Arrays) -> Heatmap | None:
    """One measure of the steps that are shown, with as many columns as may be; None: it is not known of them.

    Args:
        look: The run, with the steps of the part (:meth:`argus.report.look.Look.part`).
        key: The measure.
        low, high: What its lowest and highest colour stand for on the page.
        arrays: Where its cells go.
    """
    if not look.steps or key not in TITLES:
        return None
    count, ranks = look.steps[1] - look.steps[0] + 1, _order(look)
    width = -(-count // int(np.clip(MOST_ZOOMED // max(len(ranks), 1), 16, count if count > 16 else 16)))
    read = {"step": _step_cells, "lateness": _late_cells}.get(key, _gpu_cells)
    cells = [one for one in read(look, ranks, width) if one.key == key]
    if not cells:
        return None
    scale = Scale(low, high, 0)
    return _view(look, arrays, ranks, width, [(cells[0], scale, scale.levels(cells[0].values, FINE))])


def _order(look: Look) -> NDArray[np.int64]:
    """Ranks as they are drawn: block by block, in each in order."""
    ranks = look.ranks
    if look.stages:
        block = np.array([look.stages.get(rank, -1) for rank in ranks.tolist()])
        return np.asarray(ranks[np.lexsort((ranks, block))], np.int64)
    first: dict[str, int] = {}
    block = np.array([first.setdefault(look.group(rank), len(first)) for rank in ranks.tolist()])
    return np.asarray(ranks[np.lexsort((ranks, block))], np.int64)


def _filled(look: Look, text: str, names: Sequence[str], order: NDArray[np.int64], width: int) -> dict[str, Float]:
    """Columns of a query as matrices of the ranks in their order, shape (ranks, columns). It is asked for some columns
    at a time, so that the store groups so many cells at once and no more."""
    first, last = look.steps
    columns = _columns(look, width)
    by_rank = np.argsort(order)
    ranks = order[by_rank]
    found = {name: np.full((len(order), columns), np.nan, np.float32) for name in names}
    at_once = max(1, AT_ONCE // max(len(order), 1))
    for begin in range(0, columns, at_once):
        block = {"first": first + begin * width, "last": min(last, first + (begin + at_once) * width - 1)}
        rows = look.read_large(text, width=width, origin=first, **block)
        rank, place = rows["rank"].astype(np.int64), rows["place"].astype(np.int64)
        at = np.searchsorted(ranks, rank)
        kept = at < len(ranks)
        kept[kept] &= ranks[at[kept]] == rank[kept]
        row = by_rank[at[kept]]
        for name, matrix in found.items():
            matrix[row, place[kept]] = rows[name][kept]
    return found


def _columns(look: Look, width: int) -> int:
    return -(-(look.steps[1] - look.steps[0] + 1) // width)


def _step_cells(look: Look, order: NDArray[np.int64], width: int) -> list[Cells]:
    matrix = _filled(look, _STEP_CELLS, ["step_ns"], order, width)["step_ns"]
    return [] if np.isnan(matrix).all() else [Cells("step", matrix)]


def _gpu_cells(look: Look, order: NDArray[np.int64], width: int) -> list[Cells]:
    keys = ("computing", "exposed", "idle")
    found = _filled(look, _GPU_CELLS, [TITLES[key][0] for key in keys], order, width)
    cells = [Cells(key, found[TITLES[key][0]]) for key in keys]
    known = [one for one in cells if not np.isnan(one.values).all()]
    return [one for one in known if one.key != "exposed" or float(np.nanmax(one.values)) > 0]


def _late_window(look: Look) -> dict[str, int]:
    """Steps whose calls are compared: all, or of large jobs the newest, as the verdict does."""
    case = look.case
    if case is None or case.calls * (look.steps[1] - look.steps[0] + 1) <= MOST_CALLS:
        return {"first": look.steps[0], "last": look.steps[1]}
    return {"first": int(case.numbers[-case.reach :][0]), "last": look.steps[1]}


def _late_cells(look: Look, order: NDArray[np.int64], width: int) -> list[Cells]:
    """Lateness against the median rank of each collective; empty: calls cannot be compared."""
    case = look.case
    if case is None or "left_out" not in look.params:
        return []
    window = _late_window(look)
    if window["first"] == int(case.numbers[-case.reach :][0]) and case.lateness is not None:
        late = case.lateness
    else:
        late = lateness_of(look.read(queries.LATENESS, **window), case.numbers)
    if len(late.ranks) < 2:
        return []
    columns = _columns(look, width)
    place = (late.steps - look.steps[0]) // width
    peak = np.full((len(late.ranks), columns), np.nan, np.float32)
    values = np.maximum(late.peak, 0.0).astype(np.float32)
    for column in np.unique(place).tolist():
        with np.errstate(invalid="ignore"):
            peak[:, column] = np.fmax.reduce(values[:, place == column], axis=1)
    whole = np.full((len(order), columns), np.nan, np.float32)
    at = {rank: row for row, rank in enumerate(order.tolist())}
    known = [row for row, rank in enumerate(late.ranks.tolist()) if rank in at]
    whole[[at[int(late.ranks[row])] for row in known]] = peak[known]
    return [Cells("lateness", whole)]


def _view(look: Look, arrays: Arrays, order: NDArray[np.int64], width: int, packed: Packed) -> Heatmap:
    place, named = look.place, set(look.named)
    rows: list[HeatRow] = [
        {
            "rank": rank, "host": place.host.get(rank, ""), "gpu": place.gpu.get(rank, ""),
            "group": look.group(rank), "pinned": rank in named,
        }
        for rank in order.tolist()
    ]  # fmt: skip
    stands_out = np.isin(order, look.named)
    measures: list[Measure] = [
        {
            "key": one.key, "title": one.title, "unit": "ns", "low": scale.low, "high": scale.high,
            "high_is_bad": True, "cells": arrays.add(levels, "u1"),
        }
        for one, scale, levels in sorted(packed, key=lambda each: -_contrast(each[0].values, stands_out))
    ]  # fmt: skip
    first, last = look.steps
    edges = [*range(first, last + 1, width), last + 1]
    return {
        "view": "heatmap", "rows": rows, "edges": edges, "full": width == 1, "measures": measures, "marks": look.marks
    }  # fmt: skip


def _contrast(values: Float, named: NDArray[np.bool_]) -> int:
    """By how many spreads of the others the named ranks are above them, 3 or more as one: the measure in which they
    stand out is shown first; 0: they do not."""
    if not named.any() or named.all():
        return 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # ranks of which nothing is known
        typical = np.nanmedian(values[:, -CONTRASTED:], axis=1)
    theirs = typical[~named]
    if np.isnan(theirs).all() or np.isnan(typical[named]).all():
        return 0
    low, usual, high = np.nanquantile(theirs, (0.05, 0.5, 0.95))
    spread = max(float(high - low), LEAST_SPREAD * float(usual), 1.0)
    return int(np.clip((float(np.nanmax(typical[named])) - float(usual)) / spread, 0, 3))


def _lead(look: Look, cells: list[Cells], packed: Packed, width: int) -> str:
    parts = ["Each row is a rank, each column " + ("a step." if width == 1 else f"{width} steps, the highest of them.")]
    clipped = [
        f"{one.title} above {duration(scale.high)} has the last colour "
        f"({scale.above:,} cell{'s' * (scale.above > 1)}, the highest {duration(float(np.nanmax(one.values)))})"
        for one, scale, _ in packed
        if scale.above
    ]
    if clipped:
        text = "; ".join(clipped)
        parts.append(f"{text[0].upper()}{text[1:]}.")
    missing = [title for key, (_, title) in TITLES.items() if key not in {one.key for one in cells}]
    if missing:
        parts.append(f"Not known of this job: {', '.join(missing)}.")
    first = _late_window(look)["first"]
    if first > look.steps[0] and any(one.key == "lateness" for one in cells):
        parts.append(f"Lateness was compared from step {first} on, as for the verdict: older calls are too many.")
    return " ".join(parts)


def _table(look: Look, order: NDArray[np.int64], cells: list[Cells], width: int) -> Table:
    """The cells that stand out most of each measure."""
    columns: list[Column] = [
        {"title": "measure", "unit": ""}, {"title": "rank", "unit": ""}, {"title": "host", "unit": ""},
        {"title": "GPU", "unit": ""}, {"title": "from step", "unit": ""}, {"title": "value", "unit": "ns"},
        {"title": "usual", "unit": "ns"},
    ]  # fmt: skip
    rows: list[list[str | float | int | None]] = []
    first = look.steps[0]
    for one in cells:
        flat = np.nan_to_num(one.values, nan=-1.0).ravel()
        most = np.argpartition(-flat, min(LISTED, len(flat) - 1))[:LISTED]
        usual = float(np.nanmedian(one.values[:: max(1, len(order) // 2048)]))
        for at in most[np.argsort(-flat[most], kind="stable")].tolist():
            row, column = divmod(at, one.values.shape[1])
            if flat[at] < 0:
                continue
            rank = int(order[row])
            rows.append([
                one.title, rank, look.place.host.get(rank, ""), look.place.gpu.get(rank, ""), first + column * width,
                float(flat[at]), usual,
            ])  # fmt: skip
    return {"columns": columns, "rows": rows[:50], "of": len(rows)}


def _queries(look: Look, width: int, has_gpu: bool, *, late: bool) -> list[Sql]:
    def extreme(inner: str, key: str) -> Sql:
        text = look.within(_EXTREME.replace("$value", TITLES[key][0]), inner)
        return look.sql(f"The highest cells: {TITLES[key][1]}", text, width=width, origin=look.steps[0])

    found = [
        look.sql("Step time, the highest of each column", _STEP_CELLS, width=width, origin=look.steps[0]),
        extreme(_STEP_CELLS, "step"),
    ]
    if late:
        found.append(look.sql("Lateness by communicator, rank and step", queries.LATENESS, **_late_window(look)))
    if has_gpu:
        found.append(
            look.sql("What GPUs did, the highest of each column", _GPU_CELLS, width=width, origin=look.steps[0])
        )
        found += [extreme(_GPU_CELLS, key) for key in ("computing", "exposed", "idle")]
    return found
