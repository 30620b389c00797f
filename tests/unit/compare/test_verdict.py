"""The status of a comparison, its schema, and workloads."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from argus.cli.compare import lines_of
from argus.compare.changes import ASSUMED
from argus.compare.comparers.order import KINDS
from argus.compare.verdict import compare, schema, to_json
from argus.compare.workload import compare_workloads
from argus.diagnose.read.profile import Profile
from argus.diagnose.variation import Mean
from tests.builders.profiles import MS, profile, side


def test_the_schema_is_kept() -> None:
    for after in (side(10), side(10, phases={"idle": 3.0}), side(10, 1), side(10, world_size=16, ranks=16)):
        jsonschema.validate(json.loads(to_json(compare(side(1), after))), schema())
    assert schema()["properties"]["causes"]["items"]["properties"]["kind"]["enum"] == list(KINDS)


def test_runs_alike_are_the_same() -> None:
    found = compare(side(1), side(10))
    assert (found["status"], found["causes"], found["runs_needed"]) == ("same", [], None)
    assert found["confidence"] > 0.95


def test_runs_that_scatter_are_inconclusive_and_say_how_many_would_do() -> None:
    found = compare(side(1, spread=0.0), side(10, step_ms=1.1, spread=0.02))
    assert found["status"] == "inconclusive"
    assert found["runs_needed"] is not None
    assert found["runs_needed"] > 3
    assert str(found["runs_needed"]) in found["reason"]


def test_one_run_a_side_says_that_it_assumes_how_much_runs_differ() -> None:
    found = compare(side(1, 1), side(10, 1, phases={"idle": 8.0}))
    assert found["status"] == "changed"
    assert found["confidence"] <= ASSUMED
    assert "one run a side" in found["notes"][0]
    assert compare(side(1, 1), side(2, 1, spread=0.0))["status"] != "changed"


def test_a_step_that_is_longer_for_no_known_cause_is_changed() -> None:
    found = compare(side(1), side(10, step_ms=4.0))
    assert (found["status"], found["direction"], found["causes"]) == ("changed", "slower", [])
    assert found["notes"] == [
        "no single figure changed by more than it varies between runs, so where the change comes from is not known: "
        "what would show it was not observed"
    ]


def test_a_change_whose_cause_varies_too_much_names_the_nearest_and_how_many_runs_would_do() -> None:
    before = side(1)
    before = [
        replace(one, phases={"forward": Mean((10 + 6 * place) * MS)}, kernels={}) for place, one in enumerate(before)
    ]
    after = [
        replace(one, phases={"forward": Mean((14 + 6 * place) * MS)}, kernels={})
        for place, one in enumerate(side(10, step_ms=4.0))
    ]
    found = compare(before, after)
    assert (found["status"], found["causes"]) == ("changed", [])
    note = found["notes"][0]
    assert "the largest change is phase forward, +4.00 ms (-9.60 ms to +17.6 ms)" in note
    assert "runs a side would show it" in note


def test_one_run_against_three_has_causes() -> None:
    """Three runs that differ by 1 %: of them alone it is not known what the fourth's phases may scatter by."""
    for seed in range(8):
        found = compare(side(1, spread=0.01, seed=seed), side(10, 1, spread=0.01, seed=seed, phases={"forward": 4.0}))
        assert found["status"] == "changed"
        assert found["causes"][0]["subject"] == "forward"


@pytest.mark.parametrize(("verdict", "status"), [("hung (hang of rank 1)", "inconclusive"), ("healthy", "same")])
def test_a_run_that_hung_is_not_the_same(verdict: str, status: str) -> None:
    found = compare(side(1), side(10), {("llama", 11): verdict})
    assert found["status"] == status
    assert ("llama@11 hung: until then the step time differs by" in found["reason"]) is (status != "same")
    assert ("the verdict on llama@11 is hung (hang of rank 1)" in found["notes"]) is (status != "same")
    jsonschema.validate(json.loads(to_json(found)), schema())


def test_a_workload_of_which_nothing_was_observed_is_not_the_same() -> None:
    def bare(first: int) -> list[Profile]:
        return [replace(one, mesh={}, work={}, kernels={}) for one in side(first)]

    found = compare(bare(1), bare(10))
    assert found["workload"]["same"] is None
    assert "  workload  not known: only the number of ranks was observed on both sides" in list(lines_of(found))
    jsonschema.validate(json.loads(to_json(found)), schema())
    assert compare(bare(1), side(10))["workload"]["same"] is None


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("mesh", {"dp": 4, "tp": 2}, "mesh dp 8, and dp 4, tp 2 after"),
        ("work", {"launches": 3300.0, "collectives": 3.0, "bytes": 1e8}, "3,000 launches a step, and 3,300 after"),
        ("work", {"launches": 3000.0, "collectives": 3.0, "bytes": 2e8}, "bytes of collectives"),
    ],
)
def test_another_workload_is_said(field: str, value: Any, words: str) -> None:
    found = compare_workloads(side(1), side(10, **{field: value}))
    assert not found.same
    assert any(words in one for one in found.differences)


def test_what_was_not_observed_is_no_difference() -> None:
    found = compare_workloads(side(1), side(10, work={}, mesh={}))
    assert found.same
    assert set(found.unobserved) >= {"launches", "the mesh"}


def test_scaling_says_what_eats_it() -> None:
    found = compare(side(1), side(10, world_size=16, ranks=16, phases={"all_reduce": 6.0}))
    scaling = found["workload"]["scaling"]
    assert scaling["weak"]
    assert scaling["ranks"] == [8, 16]
    assert scaling["efficiency"] == pytest.approx(39 / 45, rel=0.02)
    assert scaling["eaten"][0]["part"] == "communication"
    assert scaling["eaten"][0]["cost_ns"] == pytest.approx(6 * MS, rel=0.05)


def test_strong_scaling_counts_the_work_of_a_rank() -> None:
    half = {"launches": 1500.0, "collectives": 3.0, "bytes": 1e8}
    after = side(10, world_size=16, ranks=16, work=half, step=Mean(19.5 * MS, 1e4))
    scaling = compare(side(1), after)["workload"]["scaling"]
    assert not scaling["weak"]
    assert scaling["efficiency"] == pytest.approx(1.0, rel=0.02)


def test_a_rank_that_does_other_work_is_neither_weak_nor_strong_scaling() -> None:
    more = {"launches": 9000.0, "collectives": 3.0, "bytes": 1e8}
    found = compare(side(1), side(10, world_size=16, ranks=16, work=more, step=Mean(130 * MS, 1e4)))
    scaling = found["workload"]["scaling"]
    assert (scaling["weak"], scaling["work"]) == (False, 3.0)
    assert scaling["efficiency"] == pytest.approx(3 * 39 / 130, rel=0.02)
    assert any("a rank does 3.00 times the work, 90% efficient" in line for line in lines_of(found))


def test_work_of_a_rank_is_counted_in_flop_where_both_sides_know_them() -> None:
    """Halved batches launch as many kernels."""
    half = {"launches": 3000.0, "collectives": 3.0, "bytes": 1e8, "flops": 1e12}
    after = side(10, world_size=16, ranks=16, work=half, step=Mean(19.5 * MS, 1e4))
    scaling = compare(side(1, work=half), after)["workload"]["scaling"]
    assert (scaling["weak"], scaling["work"]) == (False, 0.5)
    assert scaling["efficiency"] == pytest.approx(1.0, rel=0.02)


def test_more_ranks_whose_step_takes_as_long_are_not_called_faster() -> None:
    found = compare(side(1), side(1, world_size=16, ranks=16))
    assert (found["status"], found["direction"]) == ("same", "")
    assert found["reason"].startswith("scaling from 8 to 16 ranks is 100% efficient: ")
    assert found["confidence"] > 0.95


def test_runs_of_different_sizes_on_one_side_are_not_compared() -> None:
    found = compare([*side(1, 2), profile(3, world_size=32, ranks=32)], side(10, world_size=16, ranks=16))
    assert (found["status"], found["runs_needed"], found["workload"]["scaling"]) == ("inconclusive", None, None)
    assert found["reason"] == "the runs before have different numbers of ranks (8, 32): compare them size by size"
    jsonschema.validate(json.loads(to_json(found)), schema())


def test_what_changed_in_the_environment_is_named() -> None:
    before = [profile(run, environment={"torch.version": "2.9", "env.NCCL_ALGO": "Ring"}) for run in (1, 2)]
    after = [profile(run, environment={"torch.version": "2.10", "env.NCCL_ALGO": "Ring"}) for run in (3, 4)]
    changed = compare(before, after)
    assert changed["environment"] == [{"name": "torch.version", "before": "2.9", "after": "2.10"}]
    assert "  torch.version: 2.9 before, 2.10 after" in lines_of(changed)
    same = compare(before[:1], before[1:])
    assert same["environment"] == []
    assert "environment: no recorded difference" in lines_of(same)
    assert compare([profile(1)], after)["environment"] is None
