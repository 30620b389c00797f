"""Finding steps as calls come in: Argus's trackers against autocorrelation of the newest calls, batch by batch.

Four ranks make 56 launches and 4 all-reduces a step of 25 ms, and come in batches of a quarter of a second. Ours:
``StepTracker`` (period, verified, numbered alike on all ranks), and, for jobs of PyTorch, ``MarkedSteps`` and
``PhaseTracker`` (13 marks a step). Reference: the period of the call types by autocorrelation through FFT over the
newest 4,096 calls, which is what GREYHOUND (ATC '25) describes; it finds a length, and neither boundaries nor numbers.
The ratio is of time per call, median of rounds.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc

import numpy as np
from numpy.typing import NDArray

from argus.capture.calls import BY_SYMBOL
from argus.records import COLLECTIVE, LAUNCH
from argus.semantics.groups import COMMUNICATOR
from argus.semantics.marked_steps import MarkedSteps
from argus.semantics.phases import MARK, PhaseTracker, Role, What
from argus.semantics.steps import StepTracker
from benches import Result

RANKS = 4
STEPS = 2000
STEP_NS = 25_000_000
BATCH_STEPS = 10
LAUNCHES = 56
REDUCES = 4
WINDOW = 4096


def _calls(rank: int) -> tuple[NDArray[np.void], NDArray[np.void]]:
    per_step = LAUNCHES + REDUCES
    ts = (np.arange(STEPS)[:, None] * STEP_NS + np.arange(per_step) * (STEP_NS // 80)).astype(np.uint64) + 10**9
    place = np.arange(per_step)
    reduces = place % (per_step // REDUCES) == per_step // REDUCES - 1
    launches = np.zeros(STEPS * LAUNCHES, LAUNCH)
    launches["ts_ns"] = ts[:, ~reduces].ravel()
    launches["handle"] = np.tile(np.arange(LAUNCHES) * 64 + 4096, STEPS)
    launches["call"] = BY_SYMBOL["cudaLaunchKernel"].id
    collectives = np.zeros(STEPS * REDUCES, COLLECTIVE)
    collectives["ts_ns"] = ts[:, reduces].ravel()
    collectives["call"] = BY_SYMBOL["ncclAllReduce"].id
    collectives["count"] = np.tile(np.arange(REDUCES) + 1000, STEPS)
    collectives["comm"] = 7_000_000 + rank
    collectives["seq"] = np.arange(len(collectives))
    return launches, collectives


def _communicators() -> NDArray[np.void]:
    rows = np.zeros(RANKS, COMMUNICATOR)
    rows["rank"] = rows["comm_rank"] = np.arange(RANKS)
    rows["comm"] = 7_000_000 + np.arange(RANKS)
    rows["comm_group"], rows["nranks"], rows["joined_by"] = 1, RANKS, "unique_id"
    return rows


def _marks() -> NDArray[np.void]:
    """One rank's: data, zero_grad, forward, backward with a wait and two works, optimiser."""
    one = np.zeros(14, MARK)
    one["what"] = [
        What.RANGE_BEGIN, What.RANGE_END, What.RANGE_BEGIN, What.RANGE_END, What.RANGE_BEGIN, What.RANGE_END,
        What.BACKWARD_BEGIN, What.WORK_BEGIN, What.WAIT, What.WORK_END, What.BACKWARD_END,
        What.RANGE_BEGIN, What.RANGE_END, What.RANGE_END,
    ]  # fmt: skip
    one = one[:13]
    one["role"][[0, 2, 4, 11]] = [Role.DATA, Role.ZERO_GRAD, Role.FORWARD, Role.OPTIMIZER]
    one["tid"] = np.where(np.isin(one["what"], (What.WORK_BEGIN, What.WORK_END)), 2, 1)
    one["handle"][[7, 9]] = 99
    out = np.tile(one, STEPS)
    out["ts_ns"] = 10**9 + np.repeat(np.arange(STEPS) * STEP_NS, 13) + np.tile(np.arange(13) * (STEP_NS // 14), STEPS)
    return out


def _batches(times: NDArray[np.uint64]) -> NDArray[np.int64]:
    edges = 10**9 + np.arange(0, STEPS + BATCH_STEPS, BATCH_STEPS) * STEP_NS
    return np.searchsorted(times, edges)


def _track(jobs: list[tuple[NDArray[np.void], NDArray[np.void]]]) -> tuple[float, int]:
    cuts = [(_batches(launches["ts_ns"]), _batches(collectives["ts_ns"])) for launches, collectives in jobs]
    tracker = StepTracker()
    tracker.align(_communicators())
    found = 0
    begin = time.perf_counter()
    for batch in range(STEPS // BATCH_STEPS):
        for rank, (launches, collectives) in enumerate(jobs):
            first, second = cuts[rank]
            tracker.feed(
                rank,
                launches[first[batch] : first[batch + 1]],
                collectives[second[batch] : second[batch + 1]],
            )
        found += len(tracker.advance())
    found += len(tracker.advance(final=True))
    return time.perf_counter() - begin, found


def _follow_marks(marks: NDArray[np.void]) -> tuple[float, int]:
    cuts = _batches(marks["ts_ns"])
    steps, phases = MarkedSteps(), [PhaseTracker() for _ in range(RANKS)]
    steps.align(np.empty(0, COMMUNICATOR))
    found = 0
    begin = time.perf_counter()
    for batch in range(STEPS // BATCH_STEPS):
        part = marks[cuts[batch] : cuts[batch + 1]]
        for rank in range(RANKS):
            phases[rank].feed(part)
            steps.feed_marks(rank, part)
        if not steps.ready(range(RANKS)):
            continue
        rows = steps.advance(int(part["ts_ns"][-1]))
        for rank in range(RANKS):
            found += len(phases[rank].split(rows[rows["rank"] == rank]))
    return time.perf_counter() - begin, found


def _autocorrelate(jobs: list[tuple[NDArray[np.void], NDArray[np.void]]]) -> float:
    spent = 0.0
    for launches, collectives in jobs:
        types = np.concatenate([launches["handle"], collectives["count"]]).astype(np.float64)
        order = np.argsort(np.concatenate([launches["ts_ns"], collectives["ts_ns"]]), kind="stable")
        types = types[order]
        per_batch = BATCH_STEPS * (LAUNCHES + REDUCES)
        begin = time.perf_counter()
        for end in range(per_batch, len(types) + 1, per_batch):
            window = types[max(0, end - WINDOW) : end]
            window = window - window.mean()
            spectrum = np.fft.rfft(window, 2 * len(window))
            correlation = np.fft.irfft(spectrum * spectrum.conj())[: len(window)]
            if len(window) > 200:
                assert np.argmax(correlation[30 : len(window) // 2]) + 30 > 0
        spent += time.perf_counter() - begin
    return spent


def run(rounds: int) -> Result:
    jobs = [_calls(rank) for rank in range(RANKS)]
    marks = _marks()
    calls = RANKS * STEPS * (LAUNCHES + REDUCES)
    rows: dict[str, list[float]] = {"calls (ours)": [], "calls (autocorrelation)": [], "marks (ours)": []}
    for _ in range(rounds):
        seconds, found = _track(jobs)
        assert found >= RANKS * (STEPS - 3), found
        rows["calls (ours)"].append(seconds / calls * 1e9)
        rows["calls (autocorrelation)"].append(_autocorrelate(jobs) / calls * 1e9)
        seconds, found = _follow_marks(marks)
        assert found >= RANKS * (STEPS - 10) * 5, found
        rows["marks (ours)"].append(seconds / (RANKS * len(marks)) * 1e9)
    tracemalloc.start()
    _track(jobs)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    ratio = statistics.median(rows["calls (autocorrelation)"]) / statistics.median(rows["calls (ours)"])
    return Result(
        f"finding the steps of {RANKS} ranks in {calls:,} calls",
        "ns a call or mark",
        rows,
        ratio,
        {"peak_mib_a_rank": peak / RANKS / 2**20},
    )
