"""The rule of ``argus observe`` over arrays: each kind of workload is called what it is.

``scripts/stability`` counts the same over many more trials and sizes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from argus.compare.observe import nulls
from argus.compare.observe.rule import EXTERNAL, FAMILY, Decision, decide, runs_needed, undetected
from argus.compare.observe.series import Array, Series, arm_numbers
from argus.compare.observe.signs import KINDS, applicable, errors_of, signs_of

SCRIPTS = Path(__file__).parents[4] / "scripts"
TRIALS = 25


@pytest.fixture(scope="module")
def stability() -> Iterator[ModuleType]:
    sys.path.insert(0, str(SCRIPTS))
    yield importlib.import_module("stability")
    sys.path.remove(str(SCRIPTS))
    sys.modules.pop("stability", None)


def series(values: Array, **more: object) -> Series:
    n = len(values)
    return Series("wall_ns", values, np.arange(n), np.zeros(n, np.intp), **more)  # type: ignore[arg-type]


def noise(n: int, seed: int = 3, cv: float = 0.01) -> Array:
    return np.exp(cv * np.random.default_rng(seed).standard_normal(n))


def kinds(decision: Decision) -> list[str]:
    return [sign.kind for sign in decision.signs]


@pytest.mark.thorough
def test_workloads_are_called_what_they_are(stability: ModuleType) -> None:
    """Of 25 trials each: where 5 % are wrong, five or more are with a chance of 0.7 %."""
    for workload in stability.WORKLOADS:
        if workload.counts and "wide body" not in workload.name:
            statuses, named = stability.count(workload, TRIALS, seed=5)
            assert statuses[workload.aim] >= TRIALS - 4, (workload.name, statuses)
            assert named >= 0.75 * TRIALS or not workload.kind, (workload.name, named)
            if workload.aim == "stable":
                assert statuses["unstable"] <= 4, (workload.name, statuses)


def test_runs_within_the_margin_are_stable_and_say_what_they_cannot_show() -> None:
    decision = decide([series(noise(10))])
    assert (decision.status, decision.signs, decision.runs_needed) == ("stable", (), None)
    assert decision.level == FAMILY / decision.tests
    assert decision.spread < decision.spread_upper < 0.05
    assert decision.undetected == pytest.approx(0.2589, abs=1e-4)  # 0.05 ** (1 / 10): the rule of three is 0.3
    assert undetected(300) == pytest.approx(0.01, rel=0.01)


@pytest.mark.parametrize(
    ("n", "failed", "reason"), [(0, 0, "no runs"), (0, 4, "none of 4"), (1, 0, "1 run"), (4, 0, "4 runs")]
)
def test_too_few_runs_decide_nothing(n: int, failed: int, reason: str) -> None:
    decision = decide([series(noise(n))], failed=failed)
    assert decision.status == "inconclusive"
    assert reason in decision.reason
    assert decision.runs_needed == (5 if n else None)


def test_runs_that_vary_about_as_much_as_the_margin_need_more() -> None:
    values = series(noise(10, cv=0.04))
    decision = decide([values])
    assert decision.status == "inconclusive"
    assert decision.runs_needed is not None
    assert 10 < decision.runs_needed < 100
    spread = values.spread()
    tight = [0.5 * spread, 0.8 * spread, 0.99 * spread, 1.01 * spread, 1.3 * spread, 2 * spread]
    needed = [runs_needed(values, margin, 0.01, None) for margin in tight]
    assert needed[0] < needed[1] < needed[2] == 1000 == needed[3] > needed[4] > needed[5]


def test_identical_values_are_stable() -> None:
    assert decide([series(np.full(8, 2.0))]).status == "stable"


def test_one_failed_run_is_unstable_however_alike_the_others_are() -> None:
    decision = decide([series(noise(9))], failed=1)
    assert (decision.status, kinds(decision)) == ("unstable", ["failures"])
    assert "1 of 10 runs failed" in decision.reason
    assert decide([series(noise(2))], failed=1).status == "unstable", "also of few"


def test_errors_count_if_they_are_more_than_one_in_a_thousand() -> None:
    many = errors_of("errors", [0, 10, 0], [30, 30, 30])
    assert many is not None
    decision = decide([series(noise(9))], counted=[many])
    assert (decision.status, decision.reason) == ("unstable", "10 errors in 100 requests (10.00%)")
    few = errors_of("errors", [0, 2, 0], [1000, 1000, 1000])
    assert few is not None
    assert decide([series(noise(9))], counted=[few]).status == "stable"
    assert errors_of("retries", [0, 0], [5, 5]) is None


def test_the_runs_of_a_sign_are_named() -> None:
    slow = np.where(np.arange(24) % 4 == 1, 1.2, 1.0)
    (sign,) = decide([series(noise(24) * slow)]).signs
    assert (sign.kind, sign.runs) == ("periodic", (1, 5, 9, 13, 17, 21))
    assert sign.text.startswith("every 4th run is 2")
    far = noise(20)
    far[7] = 10
    (sign,) = decide([series(far)]).signs
    assert (sign.kind, sign.runs) == ("outliers", (7,))


def test_a_period_is_found_by_the_runs_numbers_where_failed_ones_are_missing() -> None:
    at = np.array([one for one in range(40) if one not in (2, 3, 11, 30)])
    values = noise(len(at)) * np.where(at % 5 == 0, 1.1, 1.0)
    found = signs_of(Series("wall_ns", values, at, np.zeros(len(at), np.intp)), 0.05, 0.01)
    assert [sign.kind for sign in found] == ["periodic"]
    assert found[0].runs == (0, 5, 10, 15, 20, 25, 35)


def test_a_trifle_is_no_finding_however_sure() -> None:
    tiny = np.exp(1e-5 * np.random.default_rng(1).standard_normal(40)) * (1 + 0.005 * np.linspace(0, 1, 40))
    assert decide([series(tiny)]).status == "stable"


def test_a_drift_and_a_shift_are_one_thing() -> None:
    assert kinds(decide([series(noise(30) * (1 + 0.2 * np.linspace(0, 1, 30)))])) == ["drift"]
    assert kinds(decide([series(noise(30) * np.where(np.arange(30) >= 15, 1.2, 1.0))])) == ["shift"]


def test_arms_that_differ_by_name_count_both_ways_and_by_number_only_the_worse() -> None:
    arms = np.tile([0, 1], 10)

    def of(names: tuple[str, ...], factors: tuple[float, ...]) -> Decision:
        return decide([Series("wall_ns", noise(20) * np.array(factors)[arms], np.arange(20), arms, names)])

    assert kinds(of(("off", "on"), (1, 1.2))) == ["arms_differ"]
    assert kinds(of(("off", "on"), (1.2, 1))) == ["arms_differ"]
    assert kinds(of(("workers=1", "workers=8"), (1, 1.2))) == ["worse_with_more"]
    assert of(("workers=1", "workers=8"), (1.2, 1)).status == "stable", "more workers that are faster"
    assert kinds(of(("workers=8", "workers=1"), (1.2, 1))) == ["worse_with_more"], "in whatever order they are named"
    open_ = of(("off", "on"), (1, 1.045))
    assert open_.status == "inconclusive"
    assert "whether arms off and on differ by more than 5.0% is open" in open_.reason


@pytest.mark.parametrize(
    ("names", "numbers"),
    [
        (("workers=1", "workers=16"), [1, 16]),
        (("w1.5", "w2"), [1.5, 2]),
        (("off", "on"), None),
        (("a=1,b=2", "a=2,b=3"), None),
        (("a=1", "b=1"), None),
        (("all",), None),
    ],
)
def test_numbers_of_arms(names: tuple[str, ...], numbers: list[float] | None) -> None:
    found = arm_numbers(names)
    assert (None if found is None else found.tolist()) == numbers


def test_noise_needs_a_disturbance_from_outside() -> None:
    busy = np.where(np.arange(30) % 3 == np.arange(30) // 7 % 3, 0.5, 0.0) + 0.001 * np.arange(30) % 7
    values = noise(30) * (1 + busy)
    assert decide([series(values, disturbance={EXTERNAL: busy})]).status == "noise-dominated"
    assert decide([series(values)]).status == "unstable"
    own = {"run_queue_share": busy}
    assert decide([series(values, disturbance=own)]).status == "unstable", "it may wait for its own threads"
    unknown = busy.copy()
    unknown[3] = np.nan
    assert decide([series(values, disturbance={EXTERNAL: unknown})]).status == "unstable", "unknown is not 0"


def test_a_tail_shows_in_two_runs_at_least() -> None:
    """One stall delays many requests of one run: they are one event."""
    samples = [np.random.default_rng(run).lognormal(0, 0.3, 500) for run in range(8)]
    samples[3][:20] *= 30
    assert signs_of(series(noise(8), samples=samples), 0.05, 0.01) == []
    samples[6][:2] *= 30
    (sign,) = signs_of(series(noise(8), samples=samples), 0.05, 0.01)
    assert (sign.kind, sign.runs) == ("tail", (3, 6))


def test_skewed_values_have_one_mode() -> None:
    """The widest gap of an exponential law is in its tail, on whichever side that is; three in 200 are 1.5 %."""
    random = np.random.default_rng(17)
    for side in (1, -1):
        found = [nulls.widest_gap(side * random.exponential(size=25))[0] for _ in range(200)]
        assert sum(chance <= 0.005 for chance in found) <= 3


def test_what_may_be_a_disturbance_decides_nothing() -> None:
    """Eight runs, two of them slow and disturbed: one in 28 by chance."""
    busy = np.array([0.0, 0.001, 0.6, 0.002, 0.003, 0.001, 0.5, 0.0])
    values = noise(8) * (1 + busy)
    decision = decide([series(values, disturbance={EXTERNAL: busy})])
    assert decision.status == "inconclusive"
    assert (
        decision.reason == "runs vary, which may be due to CPU time of other processes and guests; 16 runs would decide"
    )
    assert decide([series(values)]).status == "unstable"


def test_runs_that_follow_one_another_are_less_sure_of_a_drift() -> None:
    random = np.random.default_rng(31)
    wander = np.cumsum(random.standard_normal(24))
    rising = 0.01 * random.standard_normal(24) + 0.012 * np.arange(24) / 24
    assert decide([series(np.exp(0.004 * wander))]).status == "stable", "a random walk has no trend"
    assert abs(np.corrcoef(wander, np.arange(24))[0, 1]) > 0.5, "though it looks like one"
    assert decide([series(np.exp(rising + 0.03 * np.arange(24) / 24))]).status == "unstable"


def test_what_is_left_without_the_disturbance_is_still_a_sign() -> None:
    random = np.random.default_rng(8)
    busy = np.where(random.random(40) < 0.4, random.uniform(0.2, 0.8, 40), 0.01)
    values = noise(40) * (1 + 0.1 * busy) * (1 + 0.5 * np.linspace(0, 1, 40))
    decision = decide([series(values, disturbance={EXTERNAL: busy})])
    assert (decision.status, kinds(decision)) == ("unstable", ["drift"])


def test_a_second_figure_is_asked_for_signs_alone() -> None:
    wide = Series("latency_p99_ns", noise(10, 4, cv=0.3), np.arange(10), np.zeros(10, np.intp), primary=False)
    assert decide([series(noise(10)), wide]).status == "stable"
    rising = Series(
        "latency_p99_ns", noise(10, 4) * np.linspace(1, 2, 10), np.arange(10), np.zeros(10, np.intp), primary=False
    )
    decision = decide([series(noise(10)), rising])
    assert [(sign.kind, sign.figure) for sign in decision.signs] == [("drift", "latency_p99_ns")]
    assert decision.tests == len(applicable(rising)) + len(applicable(series(noise(10))))


def test_every_kind_has_its_place() -> None:
    assert len(set(KINDS)) == len(KINDS)
