"""What transfers took in some steps: of each communicator and operation, and of each pair of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.read import queries
from argus.diagnose.read.gpu_times import FEWEST, WINDOWS, GpuWindow, joined
from argus.diagnose.read.hosts import Hosts
from argus.diagnose.read.peers import Mesh
from argus.diagnose.read.query import Query
from argus.model.statistics import row_medians

Float = NDArray[np.float64]
Int = NDArray[np.int64]

P2P = "SendRecv"
MOST_ROWS = 120_000
"""Steps of ranks that are read at once: some five rows each, which the store makes fewer."""


@dataclass(frozen=True)
class Transfers:
    """What transfers took in some steps, by communicator and operation, or by pair of ranks.

    Attributes:
        steps: Shape (steps,).
        names: What each is: (communicator, operation, pair of its ranks), shape (links,).
        members: Global ranks of each.
        alike: The same number for those that should take equally long, shape (links,).
        across: The same number for those that should take about as long, on whatever stages, shape (links,).
        took: Shape (links, steps), ns; NaN where not known.
        calls: Of a step, shape (links,).
        nbytes: That are sent in a step at most, shape (links,).
        sent: In each step, shape (links, steps); None: only the most is known. 0 where a step has none.
    """

    steps: Int
    names: list[tuple[int, str, tuple[int, int]]]
    members: list[tuple[int, ...]]
    alike: Int
    across: Int
    took: Float
    calls: Float
    nbytes: Float
    sent: Float | None = None


def transfers_of(
    columns: Mapping[str, NDArray[Any]],
    ranks: Mapping[str, NDArray[Any]],
    steps: Int,
    dimensions: Mapping[int, str],
    mesh: Mesh,
) -> Transfers:
    """Arranges the rows of :data:`argus.diagnose.read.queries.TRANSFERS`.

    Args:
        columns: Each shape (rows,).
        ranks: As :data:`argus.diagnose.read.queries.TRANSFER_RANKS` returns them.
        steps: Those to keep, ascending, shape (steps,).
        dimensions: Of each communicator: what it is for.
        mesh: Which ranks are on one stage.
    """
    numbers: dict[tuple[int, str, int, int], int] = {}

    def places(rows: Mapping[str, NDArray[Any]], kept: Any) -> Int:
        """The number of each row's link."""
        coded: list[Any] = []
        back: list[Int] = []
        for column in (rows[name][kept] for name in ("comm_group", "op", "one", "other")):
            if column.dtype == object:
                # Few different words: far quicker than to sort them.
                words = column.tolist()
                values: Any = list(dict.fromkeys(words))
                number_of = {word: number for number, word in enumerate(values)}
                place = np.fromiter(map(number_of.__getitem__, words), np.int64, len(words))
            else:
                values, place = np.unique(column, return_inverse=True)
            coded.append(values)
            back.append(place)
        code = np.zeros(len(back[0]), np.int64)
        for values, place in zip(coded, back, strict=True):
            code = code * max(len(values), 1) + place
        _, first, row = np.unique(code, return_index=True, return_inverse=True)
        matched = []
        for at in first.tolist():
            group, op, one, other = (values[place[at]] for values, place in zip(coded, back, strict=True))
            matched.append(numbers.setdefault((int(group), str(op), int(one), int(other)), len(numbers)))
        return np.array(matched, np.int64)[row] if matched else np.empty(0, np.int64)

    # What all ranks exchange, such as a norm, is too little to detect a slow link.
    small = [number for number, dimension in dimensions.items() if dimension == "world"]
    kept = np.isin(columns["step"], steps) & ~np.isin(columns["comm_group"], small)
    link = places(columns, kept)
    of_ranks = places(ranks, ~np.isin(ranks["comm_group"], small))
    least = np.full((len(numbers), len(steps)), np.inf)
    np.minimum.at(least, (link, np.searchsorted(steps, columns["step"][kept])), columns["took_ns"][kept])
    together: list[set[int]] = [set() for _ in numbers]
    large = ranks["ranks"][~np.isin(ranks["comm_group"], small)]
    for place, those in zip(of_ranks.tolist(), large.tolist(), strict=True):
        together[place].update(int(rank) for rank in those)
    members = [tuple(sorted(those)) for those in together]
    # Of one rank alone it is not known how long it waited.
    least[[len(part) < 2 for part in members]] = np.inf
    least[np.isinf(least)] = np.nan
    per_step = np.zeros(len(numbers))
    np.maximum.at(per_step, link, columns["calls"][kept])
    sent = np.zeros(least.shape)
    np.maximum.at(sent, (link, np.searchsorted(steps, columns["step"][kept])), columns["bytes"][kept])
    size = sent.max(axis=1, initial=0.0)
    stage = dict(zip(mesh.ranks.tolist(), mesh.stage.tolist(), strict=True))
    classes: dict[Any, int] = {}
    alike, across = [], []
    for number, ((group, op, one, _), part) in enumerate(zip(numbers, members, strict=True)):
        volume = round(float(per_step[number]), 1), round(float(np.log(max(size[number], 1.0))), 1)
        stages = tuple(sorted({stage.get(rank, -1) for rank in part}))
        kind: Any = (dimensions.get(group, "unknown"), op, len(part), *volume)
        if one >= 0:
            kind, stages = (P2P,), tuple(sorted(stage.get(rank, -1) for rank in part))
        alike.append(classes.setdefault((*kind, stages), len(classes)))
        across.append(classes.setdefault(kind if one < 0 else (*kind, stages), len(classes)))
    names = [(group, op, (one, other)) for group, op, one, other in numbers]
    labels = np.array([alike, across], np.int64)
    return Transfers(steps, names, members, labels[0], labels[1], least, per_step, size, sent)


def without_partners(seen: GpuWindow, carried: Carried, least: float) -> list[int]:
    """Ranks whose collectives take this share of a step or more, of which it is not known with whom: their links are
    compared with nobody's."""
    joined = {rank for part in carried.now.members if len(part) > 1 for rank in part}
    times = seen.now
    share = row_medians(times.collective) / np.maximum(row_medians(times.step), 1.0)
    slow = np.nan_to_num(share) >= least
    return [rank for rank in times.ranks[slow].tolist() if rank not in joined]


def chunks(query: Query, params: Mapping[str, Any], numbers: Int) -> int:
    """Model chunks a stage, at least: 2 where the last stage hands on to the first one (the interleaved schedule of
    Megatron-LM, SC '21), else 1. Two stages hand on to one another in either case.

    Args:
        query: Runs SQL with parameters, returns columns.
        params: job, run.
        numbers: Sure steps, ascending, shape (steps,).
    """
    rows = query(queries.TRANSFER_RANKS, {**params, "first": int(numbers[-3:][0]), "last": int(numbers[-1])})
    pairs: dict[int, set[tuple[int, int]]] = {}
    names = ("comm_group", "op", "one", "other")
    for group, op, one, other in zip(*(rows[name].tolist() for name in names), strict=True):
        if op == P2P:
            pairs.setdefault(int(group), set()).add((int(one), int(other)))
    last = {key: max(other for _, other in those) for key, those in pairs.items()}
    return 2 if any(last[key] > 1 and (0, last[key]) in those for key, those in pairs.items()) else 1


def _newest(numbers: Int, ranks: int) -> Int:
    return numbers[-int(np.clip(MOST_ROWS // max(ranks, 1), FEWEST, WINDOWS[-1])) :]


def _asked(params: Mapping[str, Any], steps: Int) -> list[tuple[str, dict[str, Any]]]:
    """The queries for the transfers of some steps: who takes part, by the last of them, and what they took."""
    last = int(steps[-1])
    return [
        (queries.TRANSFER_RANKS, {**params, "first": int(steps[-3:][0]), "last": last}),
        (queries.TRANSFERS, {**params, "first": int(steps[0]), "last": last}),
    ]


def newest(params: Mapping[str, Any], numbers: Int, ranks: int) -> list[tuple[str, dict[str, Any]]]:
    """The queries that :func:`read` asks first, of a job of about so many ranks."""
    return _asked(params, _newest(numbers, ranks))


@dataclass(frozen=True)
class Carried:
    """What transfers took.

    Attributes:
        now: In the newest steps.
        dimensions: Of each communicator: what it is for.
        read: The transfers of other steps.
        newest: The steps of ``now``, ascending, shape (steps,).
        window: Parameters of the query that ``now`` comes from.
    """

    now: Transfers
    dimensions: Mapping[int, str]
    read: Callable[[Int], Transfers]
    newest: Int
    window: Mapping[str, Any]


def read(
    seen: GpuWindow, query: Query, params: Mapping[str, Any], numbers: Int, ranks: int, across: Hosts | None
) -> Carried:
    """Reads what transfers took in the newest steps.

    Args:
        seen: What the GPUs of the job did.
        query: Runs SQL with parameters, returns columns.
        params: job, run, first, last.
        numbers: Sure steps, ascending, shape (steps,).
        ranks: How many there are, roughly.
        across: How the hosts go together; None: it is one.
    """
    one = joined(across)
    groups = query(queries.GROUPS, params)
    rows = zip(groups["host"].tolist(), groups["comm_group"].tolist(), groups["dimension"].tolist(), strict=True)
    dimensions = {one.get((str(host), int(group)), int(group)): str(what) for host, group, what in rows}
    newest = _newest(numbers, ranks)

    def read(steps: Int) -> Transfers:
        ranks, rows = (query(text, asked) for text, asked in _asked(params, steps))
        return transfers_of(rows, ranks, steps, dimensions, seen.mesh)

    return Carried(read(newest), dimensions, read, newest, _asked(params, newest)[1][1])
