"""Diagnoses of synthetic jobs: pure parts, hundreds of random jobs in memory, and the SQL in a real store."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argus.cli.main import main
from argus.diagnose.causes.cpu_time import attribute_by_phases
from argus.diagnose.iteration.regression import Regression, find_regression, more_to_do, without_work
from argus.diagnose.ranks.lateness import Straggler, by_chance, find_episode, find_onset, find_stragglers, lateness_of
from argus.diagnose.read import queries
from argus.diagnose.read.query import runnable_sql
from argus.diagnose.reason import _stored_apart
from argus.diagnose.run import diagnose
from argus.diagnose.save import save
from argus.diagnose.stored import diagnose_store
from argus.diagnose.verdict import Verdict, json_schema
from argus.store.open import Store, open_store
from argus.store.reader import query_columns
from argus.store.writer import Writer
from tests.builders.memory_query import MemoryQuery
from tests.builders.stored_job import store_job
from tests.builders.synthetic_job import Fault, Job, Op, ddp, simulate
from tests.stores import new_store


@cache
def validator() -> Any:
    """Checks a verdict against the schema. That the schema is one is checked once: it takes longer than a diagnosis."""
    schema = json_schema()
    kind = jsonschema.validators.validator_for(schema)
    kind.check_schema(schema)
    return kind(schema)


def judge(job: Job, **options: Any) -> Verdict:
    verdict = diagnose(MemoryQuery(job), "job", 1, **options)
    validator().validate(verdict)
    return verdict


# ---- pure parts


@given(seed=st.integers(0, 1 << 30), jump=st.floats(1.15, 4), onset=st.integers(30, 150), noise=st.floats(0.001, 0.04))
@settings(max_examples=100, deadline=None)
def test_a_regression_is_found_where_it_begins(seed: int, jump: float, onset: int, noise: float) -> None:
    rng = np.random.default_rng(seed)
    durations = 1e8 * rng.lognormal(0, noise, 200)
    durations[onset:] *= jump
    # A spike within a few steps of the onset would rightly be taken for its beginning.
    durations[[onset - 15, onset - 20, onset + 12]] *= 5
    found = find_regression(durations)
    assert found is not None
    # k steps lie nearer to the other level where their noise, of sqrt(k) times that of one, adds up to k times half of
    # the jump: at five standard deviations that is k below.
    assert abs(found.index - onset) <= max(3, math.ceil((10 * noise / math.log(jump)) ** 2))
    assert found.after_ns / found.before_ns == pytest.approx(jump, rel=0.06)


@given(seed=st.integers(0, 1 << 30), noise=st.floats(0.001, 0.15), count=st.integers(0, 400))
@settings(max_examples=150, deadline=None)
def test_noise_is_no_regression(seed: int, noise: float, count: int) -> None:
    rng = np.random.default_rng(seed)
    durations = 1e8 * rng.lognormal(0, noise, count)
    durations[rng.random(count) < 0.05] *= 4
    assert find_regression(durations) is None


def test_1500_noisy_jobs_have_no_regression() -> None:
    rng = np.random.default_rng(7)
    for _ in range(1500):
        durations = 1e8 * rng.lognormal(0, rng.uniform(0.001, 0.15), int(rng.integers(20, 400)))
        durations[rng.random(len(durations)) < 0.05] *= 4
        assert find_regression(durations) is None


def test_step_times_that_swing_or_wander_have_no_regression() -> None:
    steps, wandered = np.arange(400), 0
    kept = np.tril(0.95 ** (steps[:, None] - steps[None, :]).clip(0))
    for seed in range(60):
        rng = np.random.default_rng(seed)
        swing = 1 + 0.15 * np.sin(2 * np.pi * (steps / rng.uniform(80, 150) + rng.random()))
        assert find_regression(swing * (1 + 0.01 * rng.standard_normal(400))) is None
        pushes = 0.04 * np.sqrt(1 - 0.95**2) * rng.standard_normal(400)
        wandered += find_regression(1 + kept @ pushes, least=0.05) is not None
    # Growth that is 1.25 of their standard deviations; were steps independent of one another it would be certain.
    assert wandered <= 3


@pytest.mark.parametrize("begins", [0, 60])
def test_a_warm_up_or_a_restart_does_not_hide_a_regression(begins: int) -> None:
    durations = np.random.default_rng(1).normal(1, 0.02, 120)
    durations[90:] *= 1.25
    durations[begins : begins + 5] *= [20, 5, 3, 2, 1.3]
    found = find_regression(durations)
    assert found is not None
    assert found.index == 90


def test_a_job_that_recovered_or_grew_by_little_has_no_regression() -> None:
    rng = np.random.default_rng(0)
    durations = 1e8 * rng.lognormal(0, 0.01, 200)
    assert find_regression(durations * np.where(np.arange(200) < 100, 1, 1.07)) is None
    between = (np.arange(200) > 60) & (np.arange(200) < 120)
    assert find_regression(durations * np.where(between, 2, 1)) is None
    again = between | (np.arange(200) >= 150)
    found = find_regression(durations * np.where(again, 2, 1))
    assert found is not None
    assert abs(found.index - 150) <= 2


class Working(MemoryQuery):
    """A job whose steps have so much to do, each rank."""

    work: Mapping[str, Any] = {}

    def __call__(self, text: str, params: Mapping[str, Any]) -> dict[str, Any]:
        found = super().__call__(text, params)
        if text == queries.WORK:
            found |= {name: values[found["step"]] for name, values in self.work.items()}
        return found


def test_longer_steps_that_have_more_to_do_are_no_regression() -> None:
    query = Working(STORED["regression"])
    onset = next(f for f in diagnose(query, "job", 1)["findings"] if f["kind"] == "regression")["steps"][0]
    steps = np.arange(1000)
    # As many launches as ever, but longer sequences: more bytes.
    query.work = {"bytes": np.where(steps < onset, 1e6, 2e6)}
    verdict = diagnose(query, "job", 1)
    assert verdict["status"] == "healthy"
    assert verdict["findings"] == []
    assert "has more to do: 2.00 times as many bytes of collectives" in verdict["reason"]
    # A little more work does not explain it.
    query.work = {"bytes": np.where(steps < onset, 1e6, 1.02e6)}
    assert [f["kind"] for f in diagnose(query, "job", 1)["findings"]] == ["regression"]
    # Nor does work that varied as much before.
    query.work = {"bytes": np.where(steps % 3 == 0, 3e6, np.where(steps < onset, 1e6, 2e6))}
    assert [f["kind"] for f in diagnose(query, "job", 1)["findings"]] == ["regression"]


def test_work_is_taken_out_of_step_times() -> None:
    rng = np.random.default_rng(5)
    length = np.exp(0.3 * rng.standard_normal(200))
    noise = np.exp(0.01 * rng.standard_normal(200))
    slower = np.where(np.arange(200) < 120, 1.0, 1.12)
    work = np.stack([np.full(200, 500.0), length * 1e6], axis=1)
    durations = 1e8 * length**1.3 * noise * slower
    assert find_regression(durations) is None, "lengths hide it"
    found = find_regression(without_work(durations, work))
    assert found is not None
    assert abs(found.index - 120) <= 2
    assert found.after_ns / found.before_ns == pytest.approx(1.12, rel=0.03)
    # Work that explains nothing changes nothing.
    other = np.exp(0.3 * rng.standard_normal((200, 1)))
    np.testing.assert_array_equal(without_work(durations, other), durations)
    assert more_to_do(found, work) is None


def test_more_work_explains_a_change_near_the_end() -> None:
    work = np.where(np.arange(24) < 16, 1e6, 1.3e6)[:, None]
    assert more_to_do(Regression(16, 1e8, 1.3e8, 0.8), work) == (0, pytest.approx(1.3))
    work[18:] = np.nan
    assert more_to_do(Regression(16, 1e8, 1.3e8, 0.8), work) is None, "of too few steps it is known"


def test_onset_and_episode() -> None:
    lead = np.zeros(100)
    lead[40:] = 10
    lead[[45, 60, 61]] = 0
    lead[5] = 10
    assert find_onset(lead, 10) == 40
    assert find_onset(np.full(5, 10.0), 10) == 0
    # Late in every other step from the first on, and by chance in three of the last five.
    turns = np.where(np.arange(200) % 2 == 0, 20.0, 0.0)
    turns[-5:] = [20, 0, 20, 20, 20]
    assert find_onset(turns, 10) <= 2
    turns[:100] = 0
    assert abs(find_onset(turns, 10) - 100) <= 2
    hit = np.zeros(100, np.bool_)
    hit[20:50] = True
    hit[30] = False
    assert find_episode(hit) == (20, 50)
    assert find_episode(hit[:25]) is None


def test_a_rank_that_is_last_in_every_other_step_is_no_straggler() -> None:
    def stragglers(late_steps: int) -> list[Straggler]:
        late = np.where(np.arange(20) < late_steps, 10.0, 0.0)
        columns = {
            "comm_group": np.zeros(40, np.uint64), "rank": np.repeat([0, 1], 20), "step": np.tile(np.arange(20), 2),
        }  # fmt: skip
        for name in ("peak_ns", "first_ns", "last_ns"):
            columns[name] = np.concatenate([10.0 - late, late])
        return find_stragglers(lateness_of(columns, np.arange(20)), np.full(20, 100.0), 0.05)

    assert stragglers(11) == []
    assert [straggler.ranks for straggler in stragglers(20)] == [(1,)]


def test_a_rank_that_is_always_a_little_late_is_no_straggler() -> None:
    late = np.repeat([0.0, 1.0, 0.0], 20)
    columns: dict[str, Any] = {"comm_group": np.zeros(60), "rank": np.repeat([0, 1, 2], 20)}
    columns |= {"step": np.tile(np.arange(20), 3), "peak_ns": late, "first_ns": late, "last_ns": late}
    lateness = lateness_of(columns, np.arange(20))
    assert find_stragglers(lateness, np.full(20, 100.0), 0.05) == []
    assert find_stragglers(lateness, np.full(20, 100.0), 0.005)[0].ranks == (1,)


def test_a_rank_that_waits_for_another_one_is_not_blamed() -> None:
    """Rank 1 is late; rank 3 waits for it in one communicator, and so comes late to its other one."""
    parts = [(0, {0: 0.0, 1: 10.0}), (1, {1: 10.0, 3: 0.0}), (2, {2: 0.0, 3: 10.0})]
    rows = [(g, rank, step, late) for g, members in parts for rank, late in members.items() for step in range(20)]
    group, rank, step, late = (np.array(column) for column in zip(*rows, strict=True))
    columns = {"comm_group": group, "rank": rank, "step": step, "peak_ns": late, "first_ns": late, "last_ns": late}
    found = find_stragglers(lateness_of(columns, np.arange(20)), np.full(20, 100.0), 0.05)
    assert [straggler.ranks for straggler in found] == [(1,)]


TIMES = {"data_loading": 2.0, "forward": 10.0, "backward": 20.0, "communication": 8.0, "optimizer": 3.0, "other": 1.0}


def phase_time(
    slow: dict[str, float], *, steps: int = 9, ranks: int = 4, rare: dict[str, int] | None = None
) -> dict[str, Any]:
    """Phases of some ranks' steps, of which rank 1's take so many ms longer.

    Args:
        slow: Excess by phase.
        steps: Steps.
        ranks: Ranks.
        rare: Phases that are there in every so many steps only.
    """
    rows = []
    for step in range(steps):
        for rank in range(ranks):
            for i, (phase, usual) in enumerate(TIMES.items()):
                if step % (rare or {}).get(phase, 1):
                    continue
                late = slow.get(phase, 0.0) if rank == 1 else 0.0
                rows.append((rank, step, phase, (usual + late + 0.01 * ((step + rank + i) % 3)) * 1e6))
    columns = zip(*rows, strict=True)
    return dict(zip(("rank", "step", "phase", "duration_ns"), map(np.array, columns), strict=True))


@pytest.mark.parametrize(
    ("phase", "kind", "text"),
    [
        ("data_loading", "data_loading", "12.0 ms a step in data loading, the others 2.01 ms"),
        ("forward", "compute_straggler", "20.0 ms a step in forward, the others 10.0 ms"),
        ("backward", "compute_straggler", "30.0 ms a step in backward, the others 20.0 ms"),
        ("optimizer", "compute_straggler", "13.0 ms a step in optimizer, the others 3.01 ms"),
        ("other", "compute_straggler", "11.0 ms a step outside the phases that PyTorch marks, the others 1.01 ms"),
    ],
)
def test_the_phase_that_is_longer_is_the_cause(phase: str, kind: str, text: str) -> None:
    cause = attribute_by_phases(phase_time({phase: 10.0}), (1,), 10e6)
    assert cause is not None
    assert (cause.kind, cause.phase, cause.known) == (kind, phase, True)
    assert text in cause.text


@pytest.mark.parametrize(
    ("slow", "selective"),
    [
        ({"forward": 21.0}, True),
        ({"forward": 19.0}, False),  # less than three times
        ({"forward": 21.0, "backward": 5.0}, True),  # the rest takes 29 instead of 24 ms
        ({"forward": 21.0, "backward": 7.0}, False),  # all of it takes longer
        ({"forward": 21.0, "data_loading": 9.0}, True),  # which is no work of the CPU
    ],
)
def test_a_phase_that_alone_takes_several_times_as_long_is_selective(slow: dict[str, float], selective: bool) -> None:
    cause = attribute_by_phases(phase_time(slow), (1,), 20e6)
    assert cause is not None
    assert cause.selective is selective


def test_of_two_longer_phases_the_one_with_more_is_the_cause() -> None:
    cause = attribute_by_phases(phase_time({"data_loading": 6.0, "forward": 4.0}), (1,), 10e6)
    assert cause is not None
    assert cause.phase == "data_loading"


def test_communication_is_never_the_cause() -> None:
    """Who is waited for does not wait; a rank that waits longer is no cause but has one."""
    assert attribute_by_phases(phase_time({"communication": 30.0}), (1,), 10e6) is None
    cause = attribute_by_phases(phase_time({"communication": 30.0, "forward": 9.0}), (1,), 10e6)
    assert cause is not None
    assert cause.phase == "forward"


def test_a_phase_that_is_not_longer_by_half_the_lateness_explains_nothing() -> None:
    assert attribute_by_phases(phase_time({"forward": 4.9}), (1,), 10e6) is None
    assert attribute_by_phases(phase_time({"forward": 5.1}), (1,), 10e6) is not None
    assert attribute_by_phases(phase_time({}), (1,), 10e6) is None
    assert attribute_by_phases(phase_time({"forward": -8.0}), (1,), 10e6) is None


def test_a_phase_that_few_steps_have_counts_as_none_in_the_others() -> None:
    assert attribute_by_phases(phase_time({"data_loading": 50.0}, rare={"data_loading": 4}), (1,), 10e6) is None
    most = phase_time({"data_loading": 50.0})
    kept = (most["phase"] != "data_loading") | (most["step"] % 4 > 0)
    cause = attribute_by_phases({name: column[kept] for name, column in most.items()}, (1,), 10e6)
    assert cause is not None
    assert cause.phase == "data_loading"


def test_a_phase_that_only_the_slow_rank_has_is_compared_with_nothing() -> None:
    columns = phase_time({"data_loading": 10.0})
    kept = (columns["phase"] != "data_loading") | (columns["rank"] == 1)
    cause = attribute_by_phases({name: column[kept] for name, column in columns.items()}, (1,), 10e6)
    assert cause is not None
    assert "12.0 ms a step in data loading, the others 0 ns" in cause.text


def test_without_phases_of_both_there_is_no_cause_by_phases() -> None:
    columns = phase_time({"forward": 10.0})
    slow = columns["rank"] == 1
    nobody = np.zeros(len(slow), np.bool_)
    for kept in (slow, ~slow, nobody):
        assert attribute_by_phases({name: column[kept] for name, column in columns.items()}, (1,), 10e6) is None


def test_several_slow_ranks_are_taken_together() -> None:
    columns = phase_time({"forward": 10.0})
    columns["duration_ns"][(columns["rank"] == 3) & (columns["phase"] == "forward")] += 10e6
    cause = attribute_by_phases(columns, (1, 3), 10e6)
    assert cause is not None
    assert cause.phase == "forward"


def test_the_chance_of_being_last_by_turns() -> None:
    # 20 of 20 with two ranks: 2 ranks x 6 windows x 2^-20.
    assert by_chance(20, 20, 1, 2) == pytest.approx(12 / 2**20, rel=1e-6)
    assert by_chance(12, 20, 1, 2) == 1.0
    assert by_chance(12, 20, 1, 64) < 1e-12
    # One of all ranks is last in every step.
    assert by_chance(20, 20, 2, 2) == 1.0
    assert by_chance(0, 20, 1, 4) == 1.0


# ---- many jobs


def random_job(seed: int, slow: bool) -> tuple[Job, int, float]:
    """(job, slow rank, factor): 2 to 64 ranks, 0.2 to 3 % jitter a kernel, a 20-200 ms stall of some rank in 5 % of the
    steps, one rank always 1 % late; half of them attached late, at random moments."""
    rng = np.random.default_rng(seed)
    nranks = int(rng.choice([2, 3, 4, 8, 16, 32, 64], p=[0.2, 0.2, 0.2, 0.2, 0.1, 0.06, 0.04]))
    steps = int(rng.integers(28, 50))
    forward = float(rng.uniform(10, 60))
    program = ddp(
        int(rng.integers(2, 6)),
        int(rng.integers(2, 5)),
        forward,
        equal=bool(rng.random() < 0.3),
        end_sync=bool(rng.random() < 0.3),
    )
    late = {int(rng.integers(nranks)): 0.031 * forward}
    attach = rng.uniform(0, 25 * forward, nranks) if rng.random() < 0.5 else None
    rank, factor = int(rng.integers(nranks)), float(rng.uniform(1.1, 3))
    start = int(rng.choice([0, steps // 3]))
    job = simulate(
        nranks,
        steps,
        program,
        jitter=float(rng.uniform(0.002, 0.03)),
        spikes=0.05,
        lateness_ms=late,
        seed=seed,
        faults=(Fault("compute", (rank,), factor, start=start),) if slow else (),
        attach_ms=attach,
        inits=attach is None,
    )
    return job, rank, factor


JOBS = int(os.environ.get("ARGUS_JOBS", "100"))
"""Random jobs that are judged, and half as many with a slow rank. False alarms are counted with many more:
``ARGUS_JOBS=2000 pytest -k random_jobs``."""


@pytest.mark.thorough
def test_random_jobs_that_are_healthy_raise_no_alarm() -> None:
    for seed in range(JOBS):
        verdict = judge(random_job(seed, slow=False)[0])
        assert verdict["status"] == "healthy", (seed, verdict)


@pytest.mark.thorough
def test_random_jobs_that_have_a_slow_rank_name_it() -> None:
    for seed in range(JOBS // 2):
        job, rank, factor = random_job(100_000 + seed, slow=True)
        verdict = judge(job)
        assert verdict["status"] == "degraded", (seed, rank, factor, verdict)
        found = verdict["findings"][0]
        assert found["ranks"] == [rank], (seed, factor, verdict)
        assert found["kind"] == "compute_straggler"
        assert verdict["slowdown"] == pytest.approx(factor, rel=0.1)
        assert found["share"] == 1.0


def test_a_large_job_names_its_one_slow_rank() -> None:
    verdict = judge(simulate(512, 25, ddp(2, 1), faults=(Fault("compute", (300,), 1.3),)))
    assert verdict["findings"][0]["ranks"] == [300]
    assert verdict["findings"][0]["hosts"] == ["node-37"]


# ---- single faults

CASES: dict[str, tuple[dict[str, Any], str, list[int]]] = {
    "two slow ranks": ({"nranks": 8, "faults": (Fault("compute", (2, 5), 1.5),)}, "compute_straggler", [2, 5]),
    "half of four": ({"faults": (Fault("compute", (0, 3), 1.5),)}, "compute_straggler", [0, 3]),
    "data": ({"faults": (Fault("data", (3,), ms=120),)}, "data_loading", [3]),
    "jit": ({"faults": (Fault("jit", (0,), ms=120),)}, "jit_stall", [0]),
    "issue": ({"nranks": 2, "faults": (Fault("issue", (1,), 200),)}, "kernel_issue_stall", [1]),
    "pairs": (
        {
            "groups": {"dp": [(0, 2), (1, 3)], "tp": [(0, 1), (2, 3)]},
            "program": [*ddp(), Op("collective", 0.3, group="tp", count=5), Op("wait")],
            "faults": (Fault("data", (1,), ms=120),),
        },
        "data_loading",
        [1],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_kind_of_a_straggler(name: str) -> None:
    options, kind, ranks = CASES[name]
    verdict = judge(simulate(steps=60, **options))
    assert [(f["kind"], f["ranks"]) for f in verdict["findings"]] == [(kind, ranks)]
    assert verdict["findings"][0]["confidence"] > 0.9


def test_two_faults_are_two_findings_in_order() -> None:
    faults = (Fault("compute", (1,), 3.0), Fault("compute", (6,), 1.7))
    verdict = judge(simulate(8, 60, faults=faults))
    assert [f["ranks"] for f in verdict["findings"]] == [[1], [6]]
    assert verdict["findings"][0]["share"] > verdict["findings"][1]["share"] > 0
    assert sum(f["share"] for f in verdict["findings"]) == pytest.approx(1, abs=1e-3)


def test_delays_that_the_gpu_hides_cost_nothing() -> None:
    assert judge(simulate(steps=60, faults=(Fault("data", (3,), ms=40),)))["status"] == "healthy"


def test_onset_in_mid_run() -> None:
    verdict = judge(simulate(steps=300, faults=(Fault("compute", (2,), 1.5, start=279),)))
    first, last = verdict["findings"][0]["steps"]
    assert (abs(first - 278), last) == (0, verdict["steps"][1])  # step 0 is the second true one
    assert verdict["slowdown"] == pytest.approx(1.5, rel=0.05)


def test_a_job_that_recovered_is_healthy_and_says_so() -> None:
    verdict = judge(simulate(steps=150, faults=(Fault("compute", (2,), 1.5, start=30, stop=90),)))
    assert verdict["status"] == "healthy"
    assert "rank 2 held the job up in steps 29 to 88" in verdict["reason"]
    earlier = judge(simulate(steps=150, faults=(Fault("compute", (2,), 1.5, start=30, stop=90),)), steps=(None, 80))
    assert earlier["findings"][0]["ranks"] == [2]
    assert earlier["steps"] == [0, 80]


def test_all_ranks_slower_is_a_regression_and_blames_nobody() -> None:
    verdict = judge(simulate(steps=150, faults=(Fault("compute", (0, 1, 2, 3), 1.3, start=70),)))
    assert [(f["kind"], f["ranks"]) for f in verdict["findings"]] == [("regression", [])]
    assert abs(verdict["findings"][0]["steps"][0] - 70) <= 1
    assert verdict["slowdown"] == pytest.approx(1.3, rel=0.03)


def test_a_slow_network_blames_no_rank() -> None:
    assert judge(simulate(steps=60, program=ddp(comm_ms=60)))["status"] == "healthy"


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (simulate(steps=8), "whole steps were seen, 10 are needed"),
        (simulate(1, 40), "fewer than 2 ranks"),
        (simulate(2, 40, ddp(loss_sync=False, equal=True), attach_ms=np.array([0, 3.0]), inits=False), "needed"),
    ],
)
def test_too_little_is_inconclusive(job: Job, reason: str) -> None:
    verdict = judge(job)
    assert verdict["status"] == "inconclusive"
    assert reason in verdict["reason"]


def test_unknown_alignment_is_inconclusive() -> None:
    query = MemoryQuery(simulate(4, 40))
    query.groups["error"] = "made before Argus attached"
    verdict = diagnose(query, "job", 1)
    assert verdict["status"] == "inconclusive"
    assert "made before Argus attached" in verdict["reason"]


def test_without_cuda_calls_the_rank_is_named_and_the_cause_is_not_sure() -> None:
    job = simulate(4, 60, faults=(Fault("compute", (1,), 2.0),))
    query = MemoryQuery(job)
    for rank in job.ranks:
        rank.cuda = rank.cuda[:0]
    finding = diagnose(query, "job", 1)["findings"][0]
    assert finding["ranks"] == [1]
    assert finding["confidence"] <= 0.7
    assert "no CUDA calls" in finding["evidence"][1]["text"]


def test_the_threshold_decides() -> None:
    job = simulate(steps=60, faults=(Fault("compute", (2,), 1.5),))
    assert judge(job, threshold=0.5)["status"] == "healthy"
    data = simulate(steps=60, faults=(Fault("data", (3,), ms=120),))
    assert judge(data, threshold=0.2)["status"] == "degraded"
    assert judge(data, threshold=0.9)["status"] == "healthy"
    assert judge(job, threshold=0.2)["status"] == "degraded"


# ---- the SQL, in a real store

STORED = {
    "healthy": simulate(steps=60, spikes=0.05),
    "slow": simulate(
        4, 60, faults=(Fault("compute", (2,), 1.5),), attach_ms=np.array([0, 300, 500, 90.0]), inits=False
    ),
    "data": simulate(steps=60, faults=(Fault("data", (3,), ms=120, start=30),)),
    "recovered": simulate(steps=100, faults=(Fault("compute", (1,), 2.0, start=20, stop=60),)),
    "regression": simulate(steps=100, faults=(Fault("compute", (0, 1, 2, 3), 1.5, start=60),)),
    "short": simulate(steps=6),
    "single": simulate(1, 40),
    "late loader": simulate(2, 40, ddp(loss_sync=False, equal=True), attach_ms=np.array([0, 3.0]), inits=False),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with open_store(new_store(tmp_path_factory.mktemp("diagnose"))) as opened:
        for name, job in STORED.items():
            store_job(opened, name, job)
        store_job(opened, "blind", STORED["slow"], launches=False)
        with Writer(opened, source="test") as writer:
            for counter, value in (("launches_dropped", 3), ("pending_full", 0)):
                writer.append(
                    "coverage",
                    {
                        "job": "slow",
                        "run": 1,
                        "host": ["node"],
                        "counter": counter,
                        "value": value,
                        "loss": True,
                        "ts": 1_700_000_000_000_000_000,
                        "version": 1,
                    },
                )
        yield opened


@pytest.fixture(scope="module")
def diagnosed(store: Store) -> Callable[[str], Verdict]:
    """Verdicts: each job is diagnosed once, and each test has a copy."""
    verdict = cache(lambda name: diagnose_store(store, name, 1))
    return lambda name: copy.deepcopy(verdict(name))


@pytest.mark.thorough(first=3)
@pytest.mark.parametrize("name", ["healthy", "slow", "data", "recovered", "regression", "short"])
def test_sql_and_numpy_agree(store: Store, name: str) -> None:
    memory, stored = MemoryQuery(STORED[name]), partial(query_columns, store)
    span = stored(queries.SPAN, {"job": name, "run": 1, "since_ns": 0})
    params = {"job": name, "run": 1, "first": int(span["first"][0]), "last": int(span["last"][0]), "left_out": []}
    cases = [
        (queries.STEPS, params),
        (queries.LATENESS, params),
        (queries.LEAD, {**params, "ranks": [1, 2], "members": list(range(64))}),
        (queries.LAST, params),
        (queries.CPU_TIME, {**params, "ranks": [0, 2]}),
        (queries.SLOWER, {**params, "onset": params["last"] - 2}),
        (queries.WORK, {**params, "ranks": [0, 1]}),
    ]
    for text, values in cases:
        ours, theirs = memory(text, values), stored(text, values)
        assert len(next(iter(theirs.values())))
        keys = [n for n in ("comm_group", "step", "rank") if n in ours and not (text == queries.LAST and n == "rank")]
        orders = [np.lexsort([columns[n].astype(np.uint64) for n in keys]) for columns in (ours, theirs)]
        for column in ours:
            np.testing.assert_allclose(
                ours[column][orders[0]].astype(np.float64),
                theirs[column][orders[1]].astype(np.float64),
                err_msg=column,
                rtol=1e-9,
                atol=1,
            )


def test_the_alignment_query_says_why(store: Store) -> None:
    rows = query_columns(store, queries.ALIGNMENT, {"job": "late loader", "run": 1})
    assert (int(rows["ranks"][0]), int(rows["aligned_ranks"][0])) == (2, 0)
    assert "ambiguous" in rows["why"][0]
    assert "needed" in diagnose_store(store, "late loader", 1)["reason"]


def test_ranks_of_several_users_under_one_name_are_mentioned(store: Store) -> None:
    """Somebody on another node has a job of that name, or a process beside the job was given it (--job)."""
    columns = "SELECT * REPLACE(3 AS rank, '{host}' AS host, {uid} AS uid) FROM ranks WHERE job = 'slow' AND pid = 100"
    reason = diagnose_store(store, "slow", 1)["reason"]
    with store.lease() as client:
        try:
            for host, uid in (("node7", 1000), ("node8", 2000)):
                client.command(f"INSERT INTO ranks {columns.format(host=host, uid=uid)}")
            found = diagnose_store(store, "slow", 1)["reason"]
        finally:
            client.command("DELETE FROM ranks WHERE host IN ('node7', 'node8')")
    assert "several users" not in reason
    assert "(uid 1000 on node7; uid 2000 on node8): are all of them this job's?" in found


def test_ranks_that_a_node_stored_under_another_name_are_mentioned(store: Store) -> None:
    """Another user's job had the name there. Each of both names leads to the other one."""
    columns = "SELECT * REPLACE('{job}' AS job, {rank} AS rank, '{host}' AS host, {uid} AS uid) FROM ranks"
    where = "WHERE ranks.job = 'slow' AND ranks.pid = 100 AND ranks.host = 'node-0'"
    made = (("slow", 3, "node7", 1000), ("slow#uid1000", 4, "node8", 1000), ("slow#uid1000", 5, "node7", 1000))
    made += (("slow#uid2000", 6, "node9", 2000), ("slow#2", 7, "node9", 1000), ("slow#uid1000", 8, "node9", 3000))
    made += (("slow", 9, "node6", 1000),)
    with store.lease() as client:
        try:
            for job, number, host, uid in made:
                values = columns.format(job=job, rank=number, host=host, uid=uid)
                client.command(f"INSERT INTO ranks {values} {where}")
            found = diagnose_store(store, "slow", 1)["reason"]
            case: Any = SimpleNamespace(params={"job": "slow#uid1000", "run": 1}, query=partial(query_columns, store))
            other = _stored_apart(case, [1000])
            case.params["run"] = 2
            none = _stored_apart(case, [1000])
        finally:
            client.command("DELETE FROM ranks WHERE host IN ('node6', 'node7', 'node8', 'node9')")
    why = ": where another user's job has the name, a job is stored under another one"
    assert found.endswith(f"ranks of uid 1000 on node8 are stored as 'slow#uid1000'{why}")
    assert "several users" not in found
    assert (other, none) == (f"ranks of uid 1000 on node6 are stored as 'slow'{why}", "")


def test_ranks_are_found_also_where_other_users_had_both_names(store: Store) -> None:
    columns = "SELECT * REPLACE('{job}' AS job, {rank} AS rank, '{host}' AS host, {uid} AS uid) FROM ranks"
    where = "WHERE ranks.job = 'slow' AND ranks.pid = 100 AND ranks.host = 'node-0'"
    made = [("slow", "node6", 1000), ("slow#uid1000", "node7", 1000), ("slow#uid1000#3", "node8", 1000)]
    others = ("#uid10001", "#uid100", "#uid1000#x", "#uid1000#2#uid1000", "#2", "s")
    made += [(f"slow{end}", "node9", 1000) for end in others]
    made += [("slow#uid1000#2", "node9", 3000)]
    found = {}
    with store.lease() as client:
        try:
            for number, (job, host, uid) in enumerate(made, 3):
                client.command(f"INSERT INTO ranks {columns.format(job=job, rank=number, host=host, uid=uid)} {where}")
            for job in ("slow", "slow#uid1000", "slow#uid1000#3"):
                case: Any = SimpleNamespace(params={"job": job, "run": 1}, query=partial(query_columns, store))
                found[job] = _stored_apart(case, [1000])
        finally:
            client.command("DELETE FROM ranks WHERE host IN ('node6', 'node7', 'node8', 'node9')")
    own = {"slow": "node6", "slow#uid1000": "node7", "slow#uid1000#3": "node8"}
    for job, text in found.items():
        each = [f"ranks of uid 1000 on {host} are stored as '{one}'" for one, host in own.items() if one != job]
        assert text.startswith(", ".join(each) + ": "), job


@pytest.mark.thorough(first=4)
@pytest.mark.parametrize(
    ("name", "status", "kind", "ranks"),
    [
        ("healthy", "healthy", "", []),
        ("slow", "degraded", "compute_straggler", [2]),
        ("data", "degraded", "data_loading", [3]),
        ("recovered", "healthy", "", []),
        ("regression", "degraded", "regression", []),
        ("short", "inconclusive", "", []),
        ("single", "inconclusive", "", []),
        ("blind", "degraded", "compute_straggler", [2]),
    ],
)
def test_verdicts_from_a_store(
    store: Store, diagnosed: Callable[[str], Verdict], name: str, status: str, kind: str, ranks: list[int]
) -> None:
    verdict = diagnosed(name)
    validator().validate(verdict)
    assert verdict["status"] == status
    assert [(f["kind"], f["ranks"]) for f in verdict["findings"]] == ([(kind, ranks)] if kind else [])
    for finding in verdict["findings"]:
        for evidence in finding["evidence"]:
            assert (
                len(next(iter(query_columns(store, evidence["sql"]).values()))) or "no CUDA calls" in evidence["text"]
            )
    assert verdict["coverage"] == (
        {"complete": name != "slow", "dropped": {"launches_dropped": 3} if name == "slow" else {}, "ended": True}
    )


def test_the_verdict_is_stored(store: Store, diagnosed: Callable[[str], Verdict]) -> None:
    save(store, diagnosed("slow"), created_ns=1_800_000_000_000_000_000)
    save(store, diagnosed("short"), created_ns=1_800_000_001_000_000_000)
    rows = query_columns(
        store,
        "SELECT job, status, kind, ranks, hosts, evidence FROM findings WHERE created >= '2027-01-01' ORDER BY created",
    )
    assert rows["job"].tolist() == ["slow", "short"]
    assert rows["kind"].tolist() == ["compute_straggler", ""]
    assert rows["ranks"].tolist() == [[2], []]
    assert rows["hosts"].tolist() == [["node-0"], []]
    assert json.loads(rows["evidence"][0])["ranks"] == [2]
    assert "10 are needed" in rows["evidence"][1]


def test_of_a_job_that_runs_the_next_moment_is_kept_of_ranks_to_compare(
    store: Store, diagnosed: Callable[[str], Verdict]
) -> None:
    verdict = diagnosed("slow")
    save(store, verdict)
    asked = "SELECT job, run, ranks, why, dateDiff('second', ts, until) AS s FROM raw_requests"
    assert not len(query_columns(store, asked)["job"]), "it has ended"
    verdict["coverage"]["ended"] = False
    save(store, verdict)
    (row,) = zip(*query_columns(store, asked).values(), strict=True)
    assert row == ("slow", 1, [2, 0, 1, 3], "compute_straggler", 5)


def test_a_name_with_quotes_survives_in_the_shown_sql(store: Store) -> None:
    shown = runnable_sql(queries.SPAN, {"job": "a'; DROP TABLE jobs --\\", "run": 1, "since_ns": 0})
    assert int(query_columns(store, shown)["n"][0]) == 0


def test_diagnose_prints_text(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "--job", "slow", "--store", store.url, "--no-store"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("DEGRADED  slow  4 ranks, steps 0 to ")
    assert "1. compute straggler  rank 2 on node-0" in text
    assert "→ Check the GPU of rank 2 on node-0" in text
    assert "coverage: incomplete (3 CUDA calls lost: their ring was full (--buffer-mb makes it larger))" in text
    assert "SELECT" not in text
    assert main(["diagnose", "--job", "slow", "--store", store.url, "--no-store", "--sql"]) == 0
    assert "SELECT" in capsys.readouterr().out
    assert main(["diagnose", "--job", "healthy", "--store", store.url, "--no-store"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "coverage: complete", "argus report --job healthy writes a page about it, with pictures.",
    ]  # fmt: skip


def test_diagnose_prints_json_and_stores(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    before = int(query_columns(store, "SELECT count() AS n FROM findings")["n"][0])
    assert main(["diagnose", "--job", "data", "--store", store.url, "--format", "json"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    validator().validate(verdict)
    assert verdict["findings"][0]["kind"] == "data_loading"
    assert int(query_columns(store, "SELECT count() AS n FROM findings")["n"][0]) == before + 1
    assert (
        main(["diagnose", "--job", "data", "--steps", ":25", "--store", store.url, "--format", "json", "--no-store"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["steps"] == [0, 25]
    assert int(query_columns(store, "SELECT count() AS n FROM findings")["n"][0]) == before + 1


@pytest.mark.parametrize(("job", "code"), [("healthy", 0), ("slow", 10), ("short", 12)])
def test_exit_codes(store: Store, capsys: pytest.CaptureFixture[str], job: str, code: int) -> None:
    assert main(["diagnose", "--job", job, "--store", store.url, "--no-store", "--exit-code"]) == code
    capsys.readouterr()


def test_ranks_that_the_job_has_not_are_refused(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["diagnose", "--job", "slow", "--store", store.url, "--no-store", "--rank"]
    assert main([*asked, "9"]) == 3
    assert capsys.readouterr().err.splitlines() == [
        "argus: job 'slow' has no rank 9",
        "       Stored are: ranks 0, 1, 2, 3",
    ]
    assert main([*asked, "2,9"]) == 0


@pytest.mark.parametrize("steps", [":", "9:3", "a:b", "-1:5"])
def test_wrong_steps_are_refused(steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", f"--steps={steps}"]) == 2
    assert f"'{steps}' names no steps" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--threshold", "--hang-after", "--interval"])
@pytest.mark.parametrize("number", ["nan", "inf"])
def test_what_is_no_number_is_refused(option: str, number: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", option, number]) == 2
    assert f"Invalid value for '{option}'" in capsys.readouterr().err


def test_an_empty_store_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "--store", f"chdb://{tmp_path}/none"]) == 3
    assert capsys.readouterr().err.startswith("argus: ")
