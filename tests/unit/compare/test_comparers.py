"""Each comparer: the change that it is for comes first, and costs what it was made to cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from argus.compare.changes import find_causes
from argus.compare.comparers.order import COMPARERS, KINDS
from argus.compare.verdict import compare
from argus.diagnose.read.profile import Kernel, Profile
from argus.diagnose.variation import Mean
from tests.builders.profiles import KERNELS, MS, profile, side

ALL_KERNELS = {name: 0.1 * ms for name, ms in KERNELS.items()}
SLOW_HOST = {"node0": Mean(31 * MS), "spare": Mean(34 * MS)}
NEW_KERNEL = {**profile().kernels, "extra": Kernel(10.0, Mean(2 * MS, 1e3), 9)}
CHANGES: dict[str, tuple[str, float, dict[str, Any]]] = {
    "host": ("host spare", 2.9, {"computed": SLOW_HOST, "hosts": ("node0", "spare"), "phases": {"all_reduce": 1.5}}),
    "communicators": ("bandwidth dp AllReduce", 4.0, {"transfers": {"dp": 8.0}, "phases": {"all_reduce": 4.0}}),
    "kernels": ("kernel attention", 0.8, {"kernels": {"attention": 0.8}, "phases": {"forward": 0.8}}),
    "new kernel": ("new_kernel extra", 2.0, {"kernels": NEW_KERNEL, "phases": {"backward": 2.0}}),
    "loading": ("data_loading", 3.0, {"phases": {"data_loading": 3.0, "all_reduce": 0.5}}),
    "collections": (
        "collections", 2.0,
        {"phases": {"idle": 2.0}, "figures": {**profile().figures, "collections": Mean(2.2 * MS, 1e3)}},
    ),
    "runqueue": (
        "runqueue", 2.0,
        {"phases": {"idle": 2.0}, "figures": {**profile().figures, "runqueue": Mean(2.1 * MS, 1e3)}},
    ),
    "void": ("void", 2.0, {"phases": {"idle": 2.0}}),
    "gpu_speed": (
        "gpu_speed", 3.1, {"kernels": ALL_KERNELS, "phases": {"forward": 1.0, "backward": 1.8, "optimizer": 0.3}},
    ),
    "phases": ("phase checkpoint", 3.0, {"phases": {}, "_checkpoint": 3.0}),
}  # fmt: skip
"""By comparer: the first cause, its cost in ms, and what is different."""


def changed(place: int, different: dict[str, Any]) -> Any:
    fields: dict[str, Any] = {
        name: dict(value) if isinstance(value, dict) else value for name, value in different.items()
    }
    extra: float = fields.pop("_checkpoint", 0.0)
    kernels: dict[str, Any] = fields.pop("kernels", {})
    whole = kernels if any(isinstance(one, Kernel) for one in kernels.values()) else None
    made = profile(place, **fields, **({} if whole else {"kernels": kernels}))
    values = dict(made.__dict__)
    if whole:
        values["kernels"] = {**made.kernels, "extra": whole["extra"]}
    if extra:
        values["phases"] = {**made.phases, "checkpoint": Mean(extra * MS, 1e3)}
        values["step"] = Mean(made.step.value + extra * MS, made.step.error)
    return type(made)(**values)


@pytest.mark.parametrize("name", CHANGES)
def test_the_change_that_it_is_for_comes_first(name: str) -> None:
    key, cost_ms, different = CHANGES[name]
    before = side(1)
    after = [changed(10 + place, different) for place in range(3)]
    found = compare(before, after)
    assert (found["status"], found["direction"]) == ("changed", "slower"), found["reason"]
    first = found["causes"][0]
    assert f"{first['kind']} {first['subject']}".rstrip() == key
    assert first["cost_ns"] / MS == pytest.approx(cost_ms, rel=0.15, abs=0.1)
    assert first["interval_ns"][0] < first["cost_ns"] < first["interval_ns"][1]


@pytest.mark.parametrize("name", CHANGES)
def test_the_other_way_round_it_is_faster(name: str) -> None:
    _, _, different = CHANGES[name]
    found = compare([changed(10 + place, different) for place in range(3)], side(1))
    assert (found["status"], found["direction"]) == ("changed", "faster")
    assert found["causes"][0]["cost_ns"] < 0


@pytest.mark.thorough
def test_runs_that_do_not_differ_are_hardly_ever_called_changed() -> None:
    """The rule's own rate is 0.75 %: of 150 pairs, 1.1 are expected at most, and 5 have a chance of 0.6 %."""
    false = 0
    for seed in range(150):
        before, after = side(1, seed=seed, spread=0.015), side(20, seed=seed, spread=0.015)
        false += compare(before, after)["status"] == "changed"
        assert find_causes(before, after, 39 * MS)[1] > 10
    assert false <= 4


def test_what_one_side_did_not_observe_is_not_compared() -> None:
    before, after = side(1), side(10, kernels={}, figures={}, clock="", computed={})
    after = [type(one)(**{**one.__dict__, "kernels": {}, "phases": {}, "transfers": {}}) for one in after]
    assert find_causes(before, after, 39 * MS) == ([], 0, [])


def test_a_swapped_host_is_named_with_the_one_it_came_for() -> None:
    after = [changed(10 + place, CHANGES["host"][2]) for place in range(3)]
    text = compare(side(1), after)["causes"][0]["text"]
    assert "spare" in text
    assert "node1 instead" in text


def test_a_slow_rank_is_named_and_explains_the_waiting_of_the_others() -> None:
    """One GPU of a host of eight: on average its ranks compute hardly longer."""
    slow = {"node0": Mean(31 * MS, 1e3), "node1": Mean(55 * MS, 1e3)}
    before = side(
        1, slowest={"node0": Mean(31 * MS, 1e3), "node1": Mean(31 * MS, 1e3)}, slowest_ranks={"node0": 2, "node1": 5}
    )
    different = {
        "slowest": slow,
        "slowest_ranks": {"node0": 1, "node1": 6},
        "phases": {"all_reduce": 21.0, "forward": 3.0},
        "computed": {"node0": Mean(31 * MS, 1e3), "node1": Mean(34 * MS, 1e3)},
    }
    (first, *others) = compare(before, [changed(10 + place, different) for place in range(3)])["causes"]
    assert (first["kind"], first["subject"]) == ("host", "node1")
    assert first["cost_ns"] == pytest.approx(24 * MS, rel=0.02)
    assert "most of all rank 6" in first["text"]
    assert all(one["cost_ns"] < 2 * MS for one in others)
    # A baseline that an older Argus kept has only the mean of a host's ranks.
    (first, *_) = compare(
        side(1), [changed(10 + place, {**different, "phases": {"all_reduce": 3.0}}) for place in range(3)]
    )["causes"]
    assert first["subject"] == "node1"
    assert first["cost_ns"] == pytest.approx(2.9 * MS, rel=0.1)


def test_a_slow_rank_of_the_only_host_is_named() -> None:
    def of_one(slowest_ms: float) -> dict[str, Any]:
        return {"computed": {"node0": Mean(31 * MS, 1e3)}, "slowest": {"node0": Mean(slowest_ms * MS, 1e3)},
                "slowest_ranks": {"node0": 3}, "hosts": ("node0",)}  # fmt: skip

    different = {**of_one(54.0), "phases": {"all_reduce": 20.0}}
    (first, *others) = compare(side(1, **of_one(31.5)), [changed(10 + place, different) for place in range(3)])[
        "causes"
    ]
    assert (first["kind"], first["subject"], others) == ("host", "node0", [])
    assert first["cost_ns"] == pytest.approx(22.5 * MS, rel=0.02)
    assert "compute longer than the others on it; most of all rank 3" in first["text"]


def test_what_a_slow_kernel_explains_is_no_cause_of_its_own() -> None:
    after = [changed(10 + place, CHANGES["kernels"][2]) for place in range(3)]
    assert [one["kind"] for one in compare(side(1), after)["causes"]] == ["kernel"]


def test_what_is_left_of_a_phase_that_a_kernel_explains_may_be_chance() -> None:
    """0.3 ms of 3.3, where runs differ by as much."""
    different = {"kernels": {"attention": 3.0}, "phases": {"forward": 3.3}}
    after = [replace(changed(10 + place, different), step=Mean(42.3 * MS)) for place in range(3)]
    causes = compare(side(1, spread=0.015), after)["causes"]
    assert [one["kind"] for one in causes] == ["kernel"]
    assert all(min(one["interval_ns"]) > 0 or max(one["interval_ns"]) < 0 for one in causes)


def test_hidden_transfers_cost_nothing() -> None:
    """Twice the time behind the backward pass makes no step longer."""
    causes = compare(side(1), side(10, transfers={"dp": 8.0}))["causes"]
    assert [one["kind"] for one in causes] == [] or causes[0]["cost_ns"] == 0


def test_every_kind_has_words() -> None:
    figures = [figure for comparer in COMPARERS for figure in comparer.figures(side(1), side(10))]
    assert {figure.kind for figure in figures} <= KINDS.keys()


def with_tail(one: Profile, factor: float, speed: float = 1.0) -> Profile:
    """A run whose kernel "attention" has launches that last this many times as long, one in a hundred, and whose
    durations differ from other runs' as its speed does."""
    rng = np.random.default_rng(one.run)
    quantiles = 1e5 * speed * (1 + 0.004 * rng.standard_normal() + 0.1 * np.arange(64) / 64)
    quantiles[-1] *= factor * (1 + 0.005 * rng.standard_normal())
    kernel = replace(one.kernels["attention"], quantiles=tuple(quantiles.tolist()))
    return replace(one, kernels={**one.kernels, "attention": kernel})


def test_a_tail_that_grew_is_seen_though_the_median_is_the_same() -> None:
    before, after = ([with_tail(one, factor) for one in side(first)] for first, factor in ((1, 1.0), (10, 2.0)))
    found = compare(before, after)
    (tail,) = found["causes"]
    assert (tail["kind"], tail["subject"], tail["cost_ns"], tail["unit"]) == ("kernel_tail", "attention", 0.0, "ns")
    assert tail["after"] / tail["before"] == pytest.approx(2.0, rel=0.1)
    assert "the median of a launch changed by " in tail["text"]
    assert found["status"] == "same", "no step is longer"
    assert compare(after, before)["causes"][0]["kind"] == "kernel_tail"
    assert compare(before[:1], after)["causes"] == [], "one run does not show what tails scatter by"


def test_a_kernel_that_is_slower_as_a_whole_has_no_longer_tail() -> None:
    before, after = ([with_tail(one, 1.0, speed) for one in side(first)] for first, speed in ((1, 1.0), (10, 2.0)))
    assert "kernel_tail" not in [one["kind"] for one in compare(before, after)["causes"]]
    after = [with_tail(one, 2.0, 1.2) for one in side(10)]
    kinds = [one["kind"] for one in compare(before, after)["causes"]]
    assert "kernel_tail" not in kinds, "a median that is a fifth longer is another kernel, or launches of other sizes"
    after = [with_tail(one, 1.2) for one in side(10)]
    assert compare(before, after)["causes"] == [], "a fifth is within what such a percentile scatters by"


def with_long_steps(one: Profile, factor: float, median: float = 1.0) -> Profile:
    """A run of which one step in a hundred takes this many times as long as its median."""
    usual = one.step.value * median
    scattered = 1 + 0.005 * np.random.default_rng(one.run).standard_normal()
    more = {"step_median": Mean(usual), "step_p99": Mean(usual * factor * scattered)}
    return replace(one, figures={**one.figures, **more})


def test_steps_whose_tail_grew_are_seen_though_the_step_is_no_longer() -> None:
    before, after = ([with_long_steps(one, by) for one in side(first)] for first, by in ((1, 1.04), (10, 1.4)))
    found = compare(before, after)
    (tail,) = found["causes"]
    assert (tail["kind"], tail["cost_ns"], found["status"]) == ("step_tail", 0.0, "same")
    assert tail["after"] / tail["before"] == pytest.approx(1.4 / 1.04, rel=0.02)
    assert tail["text"].startswith("99th percentile of a step; the median changed by ")
    many = [with_long_steps(one, 1.04) for one in side(1, 5)]
    assert compare(many, after[:1])["causes"][0]["kind"] == "step_tail", "five runs show what tails scatter by"
    assert compare(before[:2], after[:1])["causes"] == []
    slower = [with_long_steps(one, 1.04, 1.5) for one in side(10)]
    assert compare(before, slower)["causes"] == [], "steps that are longer as a whole have no longer tail"
    assert compare(side(1), after)["causes"] == [], "a baseline of an older Argus does not have it"
