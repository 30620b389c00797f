"""Why a rank's GPU has nothing to compute: its copies, between the host and the GPU above all, take longer than the
others'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.causes.cpu_time import ALIKE, HALF, Cause
from argus.diagnose.read import queries
from argus.diagnose.read.query import Query
from argus.model.units import bandwidth, duration, size

COPIES = "memcpy"
"""The phase of a GPU in which it does nothing but copy."""
OVER_THE_BUS = ("memcpy_h2d", "memcpy_d2h", "memcpy")
"""Copies that go over PCIe, by their kind: those of unknown direction count among them."""
WAYS = {
    "memcpy_h2d": "from the host to the GPU", "memcpy_d2h": "from the GPU to the host",
    "memcpy_d2d": "within the GPU's memory", "memcpy_p2p": "from one GPU to another",
}  # fmt: skip
COPY_ACTION = (
    "Check the PCIe link of the GPU of {where} under load (nvidia-smi --query-gpu=pcie.link.gen.current,"
    "pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max --format=csv), whether the process runs on the NUMA "
    "node of that GPU (nvidia-smi topo -m, numactl --show), and whether it copies from pinned memory as the others do "
    "(pin_memory=True)."
)


@dataclass(frozen=True)
class SlowCopies:
    """Copies that make a GPU late.

    Attributes:
        cause: With the phase :data:`COPIES`.
        sql: The query that shows it.
    """

    cause: Cause
    sql: str


@dataclass(frozen=True)
class _Kind:
    """Copies of one kind, of the late ranks and of the others: the median rank of each.

    Attributes:
        name: As ``kernel_events.kind``.
        took_ns: In a step; NaN where no times of single copies are stored.
        nbytes: In a step.
    """

    name: str
    took_ns: tuple[float, float]
    nbytes: tuple[float, float]

    def excess(self) -> float:
        """Time more of the late ranks in a step, ns; where it is not known, bytes."""
        late, others = self.nbytes if np.isnan(self.took_ns).any() else self.took_ns
        return late - others


def slow_copies(
    query: Query, params: Mapping[str, Any], late: Sequence[int], others: Sequence[int], late_ns: float
) -> SlowCopies | None:
    """Copies that take half of the lateness or more, which is time in which the GPU does nothing else.

    Where as much is copied, what carries it is slower; where more is, there is more to carry.

    Args:
        query: Runs SQL with parameters.
        params: job, run, first, last, ranks.
        late, others: The late ranks, and those that they are compared with.
        late_ns: How late they are.
    """
    times = query(queries.COPY_TIME, params)
    exposed, took = (_typical(times, name, late, others) for name in ("exposed_ns", "copy_ns"))
    # A copy that others hide behind kernels, and a late rank does not, takes as long as theirs.
    if exposed is None or took is None or min(exposed[0] - exposed[1], took[0] - took[1]) < HALF * late_ns:
        return None
    text = f"its GPU does nothing but copy for {duration(exposed[0])} a step, the others for {duration(exposed[1])}"
    shown = queries.COPIES
    kinds = _kinds(query(shown, params), late, others)
    if not kinds:
        shown = queries.COPY_CALLS
        kinds = _kinds(query(shown, params), late, others)
    if not kinds:
        return SlowCopies(Cause("link_degradation", text, True, COPIES), queries.COPY_TIME)
    most = max(kinds, key=_Kind.excess)
    more = most.nbytes[0] > ALIKE * most.nbytes[1]
    way = WAYS.get(most.name, "")
    what = f"copies {way}" if way else "copies"
    parts = [f"{size(nbytes)} a step" for nbytes in most.nbytes]
    if not np.isnan(most.took_ns).any():
        rates = [1e9 * nbytes / max(ns, 1.0) for nbytes, ns in zip(most.nbytes, most.took_ns, strict=True)]
        parts = [f"{part} at {bandwidth(rate)}" for part, rate in zip(parts, rates, strict=True)]
        # The larger of the two factors is the cause.
        more = more and most.nbytes[0] / max(most.nbytes[1], 1.0) >= rates[1] / max(rates[0], 1.0)
    text += f": {what} of {parts[0]}, theirs of {parts[1]}"
    if most.name not in OVER_THE_BUS and most.name != "memcpy_p2p":
        kind = "compute_straggler"
    elif more:
        kind = "data_loading" if most.name != "memcpy_d2h" else "compute_straggler"
    else:
        kind = "link_degradation"
    return SlowCopies(Cause(kind, text, True, COPIES), shown)


def _typical(
    columns: Mapping[str, NDArray[Any]], name: str, late: Sequence[int], others: Sequence[int]
) -> tuple[float, float] | None:
    """The median over steps and ranks of the late ranks and of the others; None: one is not known."""
    values = np.asarray(columns[name], np.float64)
    both = tuple(values[np.isin(columns["rank"], list(ranks))] for ranks in (late, others))
    if not all(len(part) for part in both):
        return None
    return float(np.median(both[0])), float(np.median(both[1]))


def _kinds(columns: Mapping[str, NDArray[Any]], late: Sequence[int], others: Sequence[int]) -> list[_Kind]:
    """The kinds of copies that both have."""
    found = []
    for name in np.unique(columns["kind"]).tolist():
        rows = {column: values[columns["kind"] == name] for column, values in columns.items()}
        took, nbytes = (_typical(rows, column, late, others) for column in ("took_ns", "nbytes"))
        if took is not None and nbytes is not None:
            found.append(_Kind(str(name), took, nbytes))
    return found
