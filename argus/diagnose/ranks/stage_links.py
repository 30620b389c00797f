"""A slow link between two stages of a pipeline of one rank a stage, which has no other like it between the same stages
(:mod:`argus.diagnose.ranks.links`).

Each boundary of a pipeline carries the same data, as often. Of a transfer the shortest kernel of either rank waits for
nobody. Boundaries between hosts are compared with one another, those inside hosts with all: their links are no slower.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from argus.diagnose.case import Case, evidence
from argus.diagnose.ranks.lateness import find_onset
from argus.diagnose.ranks.links import SlowLink, exposed_ns, nccl_test, onset
from argus.diagnose.read import queries
from argus.diagnose.read.gpu_times import WINDOWS, GpuWindow, levels
from argus.diagnose.read.transfers import P2P
from argus.diagnose.suspect import Suspect, slowdown_of
from argus.model.units import duration, ranks_on

LEAST = 2.0
"""Times as long as on the other boundaries. Links of one kind differ by less."""
ALIKE = 0.1
"""Bytes of a transfer differ by less than this where as much is sent."""
FEWEST = 2
"""Other boundaries that it is compared with."""


@dataclass(frozen=True)
class _Boundary:
    """Attributes:
    comm: The handle that both ranks have; 0: one of several ranks.
    ranks: Of its two stages.
    took_ns: One transfer, of which nobody waited for the other.
    calls: Transfers in a step.
    nbytes: Of one; 0: unknown.
    sql: The query that shows it.
    number: Among the transfers of pairs; -1: it is none of them.
    """

    comm: int
    ranks: tuple[int, int]
    took_ns: float
    calls: float
    nbytes: float
    sql: str
    number: int = -1


def detect(case: Case) -> list[Suspect]:
    """The slowest boundary, if it costs enough: one suspect at most."""
    gpus = case.gpus
    if gpus is None or not gpus.mesh.staged or len(np.unique(gpus.mesh.stage)) < len(gpus.mesh.stage):
        return []
    window = _window(gpus)
    step_ns = float(np.median(levels(gpus.now.step)[0]))
    worst, usual_ns, others = None, 0.0, 0
    for one, norm_ns, count in _compared(case, _boundaries(case, gpus)):
        more_ns = (one.took_ns - norm_ns) * one.calls
        counts = one.took_ns >= LEAST * norm_ns and more_ns >= case.threshold * step_ns
        if counts and (worst is None or more_ns > (worst.took_ns - usual_ns) * worst.calls):
            worst, usual_ns, others = one, norm_ns, count
    if worst is None:
        return []
    since = _since(case, worst, usual_ns)
    cost_ns = min((worst.took_ns - usual_ns) * worst.calls, float(exposed_ns(case, worst.ranks, since).max()))
    hosts = case.hosts_of(worst.ranks)
    text = (
        f"a transfer between ranks {worst.ranks[0]} and {worst.ranks[1]} takes {duration(worst.took_ns)} "
        f"without anybody waiting, {worst.took_ns / usual_ns:.2f}x what it takes on the {others} other boundaries of "
        f"the pipeline, {worst.calls:.0f} times a step"
    )
    return [
        Suspect(
            kind="link_degradation",
            ranks=list(worst.ranks),
            hosts=hosts,
            since=since,
            last=case.last,
            phase=P2P,
            lost_ns=cost_ns,
            slowdown=slowdown_of(case.taken_ns(since), cost_ns),
            confidence=0.9 if others > FEWEST else 0.7,
            level="phase",
            evidence=[evidence(text, worst.sql, window)],
            action=f"Check the link between {ranks_on(worst.ranks, hosts)}: nvidia-smi nvlink -e, ibstat and the "
            f"ports' error counters, ethtool -S; run NCCL's test there: "
            f"{nccl_test(P2P, worst.nbytes, 1)}.",
        )
    ]


def _since(case: Case, slow: _Boundary, usual_ns: float) -> int:
    """The step since which a boundary takes longer."""
    if slow.number >= 0 and (carried := case.transfers) is not None:
        link = SlowLink(slow.number, slow.took_ns / usual_ns, 0.0, slow.took_ns, 0)
        return onset(carried.now, None, link, carried.newest, case.numbers, carried.read, case.hosts)
    asked = {**case.params, "first": int(case.numbers[0]), "last": case.last}
    rows = case.query(queries.STAGE_TRANSFER_STEPS, {**asked, "comm": slow.comm, "ranks": list(slow.ranks)})
    kept = np.isin(rows["step"].astype(np.int64), case.numbers)
    since = find_onset(rows["took_ns"][kept] / usual_ns - 1, slow.took_ns / usual_ns - 1)
    return int(rows["step"][kept][since] if since else case.numbers[0])


def all_alike(case: Case, gpus: GpuWindow) -> bool:
    """Whether transfers take equally long on all boundaries of a pipeline of one rank a stage, of which there are two
    at least."""
    found = _boundaries(case, gpus)
    if len(found) < max(FEWEST, len(np.unique(gpus.mesh.stage)) - 1):
        return False
    return max(one.took_ns for one in found) < LEAST * min(one.took_ns for one in found)


def _window(gpus: GpuWindow) -> dict[str, Any]:
    return {**gpus.window, "first": int(gpus.now.steps[-WINDOWS[0] :][0])}


def _boundaries(case: Case, gpus: GpuWindow) -> list[_Boundary]:
    """Those whose handle both ranks share, as in recordings that name communicators of two; else those of which it is
    known who sends to whom, as in a communicator of the whole pipeline."""
    stage = dict(zip(gpus.mesh.ranks.tolist(), gpus.mesh.stage.tolist(), strict=True))
    rows = case.query(queries.STAGE_TRANSFERS, _window(gpus))
    comm, rank = rows["comm"], rows["rank"].astype(np.int64)
    found = []
    for one in np.unique(comm).tolist():
        at = np.flatnonzero(comm == one)
        ranks = tuple(rank[at].tolist())
        if len(ranks) == 2 and len({stage.get(each) for each in ranks} - {None}) == 2:
            took, calls, nbytes = (float(rows[name][at].min()) for name in ("took_ns", "calls", "nbytes"))
            found.append(_Boundary(one, (ranks[0], ranks[1]), took, calls, nbytes, queries.STAGE_TRANSFERS))
    return found or _pairs(case, stage)


def _pairs(case: Case, stage: Mapping[int, int]) -> list[_Boundary]:
    """Pairs of stages that hand on to one another in a communicator of several. ``stage``: of each rank."""
    if case.transfers is None:
        return []
    now, found = case.transfers.now, []
    for number, ((_, op, _), ranks) in enumerate(zip(now.names, now.members, strict=True)):
        took = now.took[number, -WINDOWS[0] :]
        if op == P2P and len({stage.get(each) for each in ranks} - {None}) == len(ranks) == 2 and ~np.isnan(took).all():
            calls = max(float(now.calls[number]), 1.0)
            each = now.nbytes[number] / calls
            took_ns = float(np.nanmedian(took))
            found.append(_Boundary(0, (ranks[0], ranks[1]), took_ns, calls, each, queries.TRANSFERS, number))
    return found


def _compared(case: Case, boundaries: list[_Boundary]) -> list[tuple[_Boundary, float, int]]:
    """Each boundary with what a transfer takes on the others that are like it, and how many those are."""

    def crosses(one: _Boundary) -> bool:
        return len({case.hosts.get(rank) for rank in one.ranks}) > 1

    out = []
    for one in boundaries:
        like = [
            other.took_ns
            for other in boundaries
            if other is not one and crosses(other) >= crosses(one)
            and abs(other.nbytes - one.nbytes) <= ALIKE * one.nbytes
        ]  # fmt: skip
        if len(like) >= FEWEST:
            out.append((one, float(np.median(like)), len(like)))
    return out
