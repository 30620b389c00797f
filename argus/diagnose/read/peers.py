"""Which ranks do the same work: those that the job's parallel groups put on one pipeline stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

Int = NDArray[np.int64]

SAME_STAGE = ("tp", "cp", "ep", "fsdp", "dp")
"""Dimensions along which ranks have the same layers."""
LOCKSTEP = ("tp", "cp")
"""Dimensions whose ranks wait for one another in every layer."""
REPLICA = (*LOCKSTEP, "pp")
"""Dimensions whose ranks work on the same data."""


@dataclass(frozen=True)
class Mesh:
    """How ranks belong together. Labels are arbitrary numbers, the same for ranks that do.

    Attributes:
        ranks: Global ranks, ascending, shape (n,).
        stage: Ranks with the same layers, shape (n,).
        lockstep: Ranks that work on the same layer of the same data together, shape (n,).
        replica: Ranks that work on the same data, in lockstep or stage after stage, and so wait for one another, shape
            (n,).
        staged: Whether the job has pipeline stages that are known.
    """

    ranks: Int
    stage: Int
    lockstep: Int
    replica: Int
    staged: bool


def mesh_of(
    groups: Mapping[str, NDArray[Any]], ranks: Int, work: Int, joined: Mapping[tuple[str, int], int] | None = None
) -> Mesh:
    """How the ranks of a job belong together.

    Args:
        groups: As :data:`argus.diagnose.read.queries.GROUPS` returns them.
        ranks: Global ranks, ascending, shape (n,).
        work: Kernels that each launches in a step. Ranks that no group puts on a stage with others are compared with
            those among them that launch as many, shape (n,).
        joined: The number that a communicator has on all hosts, by (host, number on that host).
    """
    stage = _connected(groups, ranks, SAME_STAGE, joined)
    staged = "pp" in groups["dimension"].tolist()
    alone = np.bincount(stage, minlength=len(ranks))[stage] == 1
    if alone.any() and not staged:
        stage[alone] = len(ranks) + np.unique(work[alone], return_inverse=True)[1]
    lockstep, replica = (_connected(groups, ranks, dimensions, joined) for dimensions in (LOCKSTEP, REPLICA))
    return Mesh(ranks, stage, lockstep, replica, staged)


def _members(
    groups: Mapping[str, NDArray[Any]], rows: Int, joined: Mapping[tuple[str, int], int] | None
) -> tuple[dict[int, int], Int, Int]:
    """Who is in some of the groups: the place of each communicator by its number on all hosts; and a communicator's
    place and a rank, shape (members of all rows,) each."""
    numbers: dict[int, int] = {}
    hosts, names = (groups[name][rows].tolist() for name in ("host", "comm_group"))
    one = [
        numbers.setdefault((joined or {}).get((str(host), int(group)), int(group)), len(numbers))
        for host, group in zip(hosts, names, strict=True)
    ]
    parts = [np.asarray(members, np.int64) for members in groups["ranks"][rows]]
    node = np.repeat(np.array(one, np.int64), [len(part) for part in parts])
    return numbers, node, np.concatenate([np.empty(0, np.int64), *parts])


def _connected(
    groups: Mapping[str, NDArray[Any]],
    ranks: Int,
    dimensions: tuple[str, ...],
    joined: Mapping[tuple[str, int], int] | None,
) -> Int:
    """A label for each rank, the same for those that groups of these dimensions connect: the place of the first, shape
    (n,)."""
    chosen = np.flatnonzero(np.isin(groups["dimension"], dimensions))
    numbers, node, rank = _members(groups, chosen, joined)
    known = np.isin(rank, ranks)
    rank, node = np.searchsorted(ranks, rank[known]), node[known]
    # Ranks, and after them groups, are the nodes.
    nodes = len(ranks) + len(numbers)
    edges = coo_array((np.ones(len(rank), np.int32), (rank, len(ranks) + node)), (nodes, nodes))
    label = connected_components(edges, directed=False)[1][: len(ranks)]
    _, first, again = np.unique(label, return_index=True, return_inverse=True)
    return np.asarray(first[again], np.int64)


def between_stages(
    groups: Mapping[str, NDArray[Any]], joined: Mapping[tuple[str, int], int] | None = None
) -> list[int]:
    """Communicators among ranks of several pipeline stages, by their number on all hosts: who comes late there shows
    the order of the stages and no fault. Arguments as for :func:`mesh_of`; empty where there are no stages."""
    dimension = np.asarray(groups["dimension"], object)
    if "pp" not in dimension.tolist():
        return []
    numbers, node, member = _members(groups, np.arange(len(dimension)), joined)
    ranks, at = np.unique(member, return_inverse=True)
    stage = _connected(groups, ranks, SAME_STAGE, joined)[at]
    least, most = np.full(len(numbers), len(ranks)), np.full(len(numbers), -1)
    np.minimum.at(least, node, stage)
    np.maximum.at(most, node, stage)
    return sorted(number for number, place in numbers.items() if least[place] < most[place])
