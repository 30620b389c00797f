"""Stalls of one rank, in whole verdicts: since when they are, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.diagnose.iteration.stalls import _explain_by_cpu, _stalling_rank
from argus.diagnose.read import queries
from argus.diagnose.run import diagnose
from argus.diagnose.stored import diagnose_store
from argus.diagnose.verdict import Finding, Verdict
from argus.simulate.faults import parse
from argus.simulate.mesh import Mesh
from argus.simulate.write import Spec, write
from argus.store.open import Store
from argus.store.reader import query_columns

START_NS = 1_700_000_000 * 10**9
BEGUN = 30
STEPS = """
SELECT step, duration_ns FROM iterations WHERE job = {job:String} AND run = 1 AND rank = {rank:UInt32} ORDER BY step
"""
NOTHING_LOADED = {"rank": np.empty(0), "loading_ns": np.empty(0)}
GPU_STEPS = "SELECT duration_ns AS step_ns FROM gpu_steps WHERE job = {job:String} AND rank = 0 ORDER BY step"


@pytest.mark.parametrize("kind", ["gc_pause", "jit_stall", "jitter"])
@pytest.mark.thorough(first=1)
def test_stalls_of_one_rank_have_one_begin_and_one_cost(shared: Store, kind: str) -> None:
    fault = parse(f"{kind}:loud:ranks=6:from={BEGUN}")
    write(shared, kind, Spec(Mesh(dp=8), faults=[fault], steps=100, seed=0), run=1, start_ns=START_NS)
    verdict = diagnose_store(shared, kind, 1, keep=False)
    (finding,) = verdict["findings"]
    assert finding["ranks"] == [6]
    own = query_columns(shared, STEPS, {"job": kind, "rank": 6})
    long = own["duration_ns"] > 1.5 * np.median(own["duration_ns"])
    # The others, and with them the job's step time, learn of it a step later.
    assert finding["steps"][0] == own["step"][long][0]
    # Steps before the first stall are no part of what a step takes now.
    assert finding["share"] == 1.0
    assert verdict["slowdown"] == pytest.approx(finding["slowdown"], rel=0.01)


def running_ahead(
    store: Store, job: str, stalls: Mapping[int, float] | None = None, loading_ns: float = 0.0
) -> list[Finding]:
    """The findings of :func:`verdict_ahead`."""
    return verdict_ahead(store, job, stalls, loading_ns)["findings"]


def verdict_ahead(
    store: Store,
    job: str,
    stalls: Mapping[int, float] | None = None,
    loading_ns: float = 0.0,
    whose: tuple[int, ...] = (5,),
) -> Verdict:
    """The verdict on a job whose loop never waits for its GPU: the CPUs' steps are all alike, whatever the GPUs do.
    ``stalls``: of the GPUs of these ranks, which all wait for, in ns by step; ``loading_ns``: rank 5 waits for its data
    longer."""

    def query(text: str, params: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        columns = query_columns(store, text, params)
        if text == queries.STEPS:
            columns["duration_ns"] = np.full_like(columns["duration_ns"], np.median(columns["duration_ns"]))
        if text == queries.GPU_TIMES:
            extra = np.array([(stalls or {}).get(step, 0.0) for step in columns["step"].tolist()])
            idles = np.isin(columns["rank"], whose)
            columns["step_ns"] = columns["step_ns"] + extra
            columns["idle_ns"] = columns["idle_ns"] + extra * idles
            columns["collective_ns"] = columns["collective_ns"] + extra * ~idles
        if text == queries.CPU_TIME:
            columns["data_ns"] = columns["data_ns"] + loading_ns * (columns["rank"] == 5)
        return columns

    return diagnose(query, job, 1)


def test_stalls_of_a_loop_that_never_waits_for_its_gpu_are_seen_by_the_gpus(shared: Store) -> None:
    fault = parse("gc_pause:loud:ranks=6")
    write(shared, "ahead", Spec(Mesh(dp=8), faults=[fault], steps=60), run=1, start_ns=START_NS)
    (finding,) = running_ahead(shared, "ahead")
    assert (finding["kind"], finding["ranks"]) == ("gc_pause", [6])
    assert "its GPU had nothing to do: its CPU was late" in finding["evidence"][1]["text"]
    own = query_columns(shared, GPU_STEPS, {"job": "ahead"})["step_ns"].astype(float)
    assert finding["slowdown"] == pytest.approx(np.mean(own) / np.median(own), rel=0.05)


@pytest.mark.parametrize("steps", [20, 60])
@pytest.mark.thorough
def test_two_stalls_are_enough_in_few_steps_only(shared: Store, steps: int) -> None:
    """Nobody saves a checkpoint every ten steps; every thirty somebody may."""
    job = f"two-{steps}"
    write(shared, job, Spec(Mesh(dp=16), steps=steps, seed=3), run=1, start_ns=START_NS)
    assert running_ahead(shared, job) == []
    step_ns = float(np.median(query_columns(shared, GPU_STEPS, {"job": job})["step_ns"]))
    found = running_ahead(shared, job, dict.fromkeys((steps // 2, steps - 3), 0.1 * steps * step_ns))
    assert [(one["kind"], one["ranks"]) for one in found] == ([("jitter", [5])] if steps == 20 else [])


def test_three_stalls_are_no_less_than_two() -> None:
    """Among four ranks all three are one's by chance in one of 16 jobs that have three."""
    step_ns = 50e6
    case = SimpleNamespace(across=None, threshold=0.05, gpus=None, query=lambda *_: NOTHING_LOADED)
    window = SimpleNamespace(durations=np.full(18, step_ns), numbers=np.arange(18), extra_ns=np.full(18, step_ns))
    latest = SimpleNamespace(
        by_step=dict.fromkeys((4, 10, 16), (1, step_ns, 4)), ranks=4, own=True, words="was slow in", sql=""
    )
    found = [_stalling_rank(case, window, latest, {}, dense=dense) for dense in (True, False)]  # type: ignore[arg-type]
    assert [one and one.rank for one in found] == [1, None]
    latest.by_step[10] = (2, step_ns, 10)
    assert _stalling_rank(case, window, latest, {}, dense=True) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("whose", [(5,), tuple(range(16))], ids=["one rank's", "a checkpoint"])
def test_whose_a_single_stall_was_is_said(shared: Store, whose: tuple[int, ...]) -> None:
    job = f"single-{len(whose)}"
    write(shared, job, Spec(Mesh(dp=16), steps=20, seed=3), run=1, start_ns=START_NS)
    step_ns = float(np.median(query_columns(shared, GPU_STEPS, {"job": job})["step_ns"]))
    verdict = verdict_ahead(shared, job, {12: 2.0 * step_ns}, whose=whose)
    assert verdict["status"] == "healthy"
    assert "1 of the newest" in verdict["reason"]
    assert ("only rank 5 was slow in it" in verdict["reason"]) is (len(whose) == 1)


def test_stalls_in_most_of_a_few_steps(shared: Store) -> None:
    """Six of twelve in a row: too few steps to be a level of their own."""
    write(shared, "row", Spec(Mesh(dp=16), steps=12, seed=3), run=1, start_ns=START_NS)
    step_ns = float(np.median(query_columns(shared, GPU_STEPS, {"job": "row"})["step_ns"]))
    (finding,) = running_ahead(shared, "row", dict.fromkeys(range(6), 0.8 * step_ns))
    assert (finding["kind"], finding["ranks"]) == ("jitter", [5])
    assert finding["slowdown"] == pytest.approx(1 + 6 * 0.8 / 12, rel=0.02)


RECOVERED = "rank 5 held the job up in steps 0 to 5"


def test_a_rank_that_recovered_in_a_short_recording(shared: Store) -> None:
    """Six slow steps in a row, and ten since in which nothing is slow."""
    write(shared, "over", Spec(Mesh(dp=16), steps=16, seed=3), run=1, start_ns=START_NS)
    step_ns = float(np.median(query_columns(shared, GPU_STEPS, {"job": "over"})["step_ns"]))
    slow = dict.fromkeys(range(6), 0.3 * step_ns)
    verdict = verdict_ahead(shared, "over", slow)
    assert (verdict["status"], verdict["slowdown"]) == ("healthy", 1.0)
    assert RECOVERED in verdict["reason"]
    assert f"({6 * 0.3 / (16 + 6 * 0.3):.0%} of the time), and no longer does" in verdict["reason"]


@pytest.mark.parametrize("stalls", [(0, 1, 2, 3, 4, 5, 9), (1, 2, 3, 4, 5, 6), (0, 1, 2, 6, 7, 8)])
@pytest.mark.thorough(first=1)
def test_a_rank_that_was_slow_again_or_until_now_has_not_recovered(shared: Store, stalls: tuple[int, ...]) -> None:
    job = f"again-{stalls}"
    write(shared, job, Spec(Mesh(dp=16), steps=16, seed=3), run=1, start_ns=START_NS)
    step_ns = float(np.median(query_columns(shared, GPU_STEPS, {"job": job})["step_ns"]))
    (finding,) = running_ahead(shared, job, dict.fromkeys(stalls, 0.3 * step_ns))
    assert (finding["kind"], finding["ranks"]) == ("jitter", [5])


def test_stalls_in_most_of_six_steps(shared: Store) -> None:
    """The two steps without one show what is usual."""
    write(shared, "six", Spec(Mesh(dp=8), steps=6, seed=3), run=1, start_ns=START_NS)
    step_ns = float(np.median(query_columns(shared, GPU_STEPS, {"job": "six"})["step_ns"]))
    (finding,) = running_ahead(shared, "six", {0: 0.9 * step_ns, **dict.fromkeys((1, 2, 3), 0.4 * step_ns)})
    assert (finding["kind"], finding["ranks"]) == ("jitter", [5])


def test_a_loader_that_a_cpu_ahead_of_its_gpu_mostly_makes_up_for(shared: Store) -> None:
    """Half of a step longer in every step; in three of twelve the GPU runs dry for a third of a step."""
    write(shared, "loader", Spec(Mesh(dp=16), steps=12, seed=3), run=1, start_ns=START_NS)
    step_ns = float(np.median(query_columns(shared, GPU_STEPS, {"job": "loader"})["step_ns"]))
    stalls = dict.fromkeys((2, 6, 9), 0.3 * step_ns)
    assert [one["kind"] for one in running_ahead(shared, "loader", stalls)] == ["jitter"]
    (finding,) = running_ahead(shared, "loader", stalls, loading_ns=0.5 * step_ns)
    assert (finding["kind"], finding["ranks"], finding["phase"]) == ("data_loading", [5], "data_loading")


def test_five_of_eight_steps_are_not_every_step(shared: Store) -> None:
    """Recordings of fewer than ten steps: a rank that is late in each is kept waiting, in most it stalls."""
    write(shared, "five", Spec(Mesh(dp=16), steps=8, seed=3), run=1, start_ns=START_NS)
    step_ns = float(np.median(query_columns(shared, GPU_STEPS, {"job": "five"})["step_ns"]))
    five, eight = (
        [one["kind"] for one in running_ahead(shared, "five", dict.fromkeys(steps, 0.8 * step_ns))]
        for steps in ((1, 2, 4, 5, 7), range(8))
    )
    assert (five, eight) == (["jitter"], ["kernel_issue_stall"])


@pytest.mark.parametrize(
    ("phase", "kind", "action"),
    [
        ("data_loading", "data_loading", "Look at the data loader of rank 1"),
        ("checkpoint", "kernel_issue_stall", "See why rank 1 saves checkpoints"),
        ("my_logging", "kernel_issue_stall", "See what rank 1 does in my_logging"),
    ],
)
def test_what_a_rank_does_before_the_copy_of_its_batch_is_seen_by_its_phases(
    phase: str, kind: str, action: str
) -> None:
    """Rank 1 takes 8 ms longer than rank 0 before the copy, in one of its phases."""
    places = [(rank, step) for step in range(10) for rank in (0, 1)]
    rank, step = (np.array(column) for column in zip(*places, strict=True))
    none = np.zeros(len(rank))
    calls = {"rank": rank, "step": step, "sync_ns": none, "module_ns": none, "data_ns": 8e6 * rank, "other_ns": none}
    spent = {"rank": rank, "step": step, "phase": np.full(len(rank), phase), "duration_ns": 1e5 + 8e6 * rank}
    case: Any = SimpleNamespace(
        hosts={0: "a", 1: "a"}, params={"job": "j", "run": 1}, last=9,
        query=lambda sql, _: calls if sql == queries.CPU_TIME else spent,
    )  # fmt: skip
    suspect: Any = SimpleNamespace(kind="jitter", phase="", level="iteration", evidence=[], action="")
    stalling: Any = SimpleNamespace(rank=1, since=0, lead_ns=8e6)
    _explain_by_cpu(case, suspect, stalling)
    assert (suspect.kind, suspect.phase, suspect.level) == (kind, phase, "phase")
    assert suspect.action.startswith(action)
