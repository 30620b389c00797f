"""The dependency model of a training step: its answers are those published for real jobs, and true of made-up ones."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from argus.diagnose.findings import findings_of
from argus.diagnose.verdict import Finding
from argus.diagnose.whatif import dependencies
from argus.diagnose.whatif import operations as causes
from argus.diagnose.whatif.dependencies import Layout, Model, Operations, WhatIf
from argus.importers import whatif_parquet
from argus.model.errors import ArgusError
from tests.builders import training_job as made

DATA = (
    Path(os.environ.get("ARGUS_REFERENCE_DATA", Path(__file__).parents[5] / "shared" / "data")) / "straggler-analysis"
)
reference = pytest.mark.skipif(
    not DATA.is_dir(), reason=f"the published traces are not at {DATA} (ARGUS_REFERENCE_DATA)"
)
PARAMS = {"job": "made", "run": 1, "first": 0, "last": 100}


def solved(folder: Path, columns: dict[str, Any], **sizes: int) -> tuple[Model, WhatIf]:
    path, meta = made.write(folder, columns, **sizes)
    trace = whatif_parquet.read(path, meta)
    model = dependencies.build(trace.operations, trace.layout)
    return model, dependencies.answer(model)


def findings(folder: Path, threshold: float = 0.05, **job: Any) -> list[Finding]:
    sizes = {"dp_size": job.get("dp", 4), "pp_size": job.get("pp", 4)}
    model, answers = solved(folder, made.rows(**job), **sizes)
    # The graph is the generator's: without launch delays the steps take as long as recorded.
    assert answers.launch_slowdown == pytest.approx(1.0, abs=1e-5)
    suspects, lost_ns = causes.causes(model, answers, PARAMS, {}, threshold)
    return findings_of(suspects, "whatif", 1, lost_ns)


@reference
@pytest.mark.parametrize("name", ["AR", "ST"])
def test_published_answers_are_reproduced(name: str) -> None:
    trace = whatif_parquet.read(DATA / f"trace-{name}.parquet", DATA / f"meta-{name}.yaml")
    answers = dependencies.answer(dependencies.build(trace.operations, trace.layout))
    reported, workers, last = (
        json.loads((DATA / f"{kind}-{name}.json").read_text()) for kind in ("result", "mw", "ms")
    )
    close = pytest.approx(reported["blocking_slowdown"], abs=1e-6)
    assert answers.slowdown == close
    assert answers.launch_slowdown == pytest.approx(reported["launch_slowdown"], abs=1e-6)
    for own, theirs in ((answers.by_op, "optype"), (answers.by_dp, "dp_rank"), (answers.by_stage, "stage")):
        assert {str(key): value for key, value in own.items()} == pytest.approx(
            reported[f"blocking_decompose_by_{theirs}"], abs=1e-6
        )
    steps = [str(step) for step in answers.steps.tolist()]
    assert dict(zip(steps, (answers.actual_ns * 1e-9).tolist(), strict=True)) == pytest.approx(
        reported["step_t_nodelay"], abs=1e-6
    )
    for by_step, theirs in ((answers.step_by_dp, "dp_rank"), (answers.step_by_stage, "stage")):
        own = {int(key): values for key, values in by_step.items()}
        for place, step in enumerate(steps):
            published = reported[f"blocking_decompose_by_{theirs}_per_step"][step]
            assert {str(key): float(values[place]) for key, values in own.items()} == pytest.approx(published, abs=1e-6)
    for part, theirs, key in ((answers.workers, workers, "Mw"), (answers.last_stage, last, "Ms")):
        assert part.share == pytest.approx(theirs[key], abs=1e-6)
        assert part.added_share == pytest.approx(theirs["add"], abs=1e-6)
        assert part.removed_ns * 1e-9 == pytest.approx(theirs["trem"], abs=1e-6)


def test_each_worker_has_the_lesser_of_its_groups(tmp_path: Path) -> None:
    _, answers = solved(tmp_path, made.rows(fault=made.slow_worker(2, 1, 1.5)))
    assert max(answers.by_rank, key=lambda rank: answers.by_rank[rank]) == 2 * 4 + 1
    assert answers.by_rank[9] == min(answers.by_stage[2], answers.by_dp[1]) > 1.2
    assert answers.slowest == [9]
    assert answers.workers.share > 0.9 > 0.2 > answers.last_stage.share


def test_what_part_costs_is_reported(tmp_path: Path) -> None:
    model, answers = solved(tmp_path, made.rows(fault=made.slow_worker(2, 1, 1.5)))
    part = model.rank == 9
    assert dependencies.explain(model, part) == answers.workers


def test_few_cells_at_once_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, answers = solved(tmp_path, made.rows(steps=5, fault=made.uneven_sequences(0.3)))
    for cells in (1, 3000, 10_000):
        monkeypatch.setattr(dependencies, "CELLS", cells)
        again = dependencies.answer(model)
        assert again.slowdown == answers.slowdown
        assert again.by_stage == answers.by_stage
        assert np.array_equal(again.actual_ns, answers.actual_ns)


@pytest.mark.parametrize("shape", [(4, 4), (1, 4), (4, 1), (16, 2), (2, 2), (1, 1)])
@pytest.mark.parametrize("seed", [1, 2])
def test_healthy_jobs_have_no_findings(tmp_path: Path, shape: tuple[int, int], seed: int) -> None:
    assert findings(tmp_path, dp=shape[0], pp=shape[1], noise=0.02, seed=seed) == []


def test_slow_worker_is_named_and_since_when(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, fault=made.slow_worker(2, 1, 1.5, since=8))
    assert (found["kind"], found["ranks"], found["steps"]) == ("compute_straggler", [9], [18, 25])
    assert found["share"] > 0.9
    assert "rank 9" in found["evidence"][0]["text"]
    assert "phase_ops" in found["evidence"][0]["sql"]


def test_slow_worker_that_is_most_of_what_counts_together_is_named(tmp_path: Path) -> None:
    # What variation costs lifts the whole over the threshold, and neither does alone.
    (found,) = findings(tmp_path, 0.12, fault=made.slow_worker(1, 1, 1.3), noise=0.05, seed=0)
    assert (found["kind"], found["ranks"]) == ("compute_straggler", [5])
    assert 0.5 < found["share"] < 0.97


def test_pauses_that_add_up_by_chance_make_no_slow_worker(tmp_path: Path) -> None:
    for seed in (2, 3):
        found = findings(tmp_path, dp=8, pp=1, steps=8, fault=made.pauses(0.03, 0.5, seed=seed), noise=0.005, seed=seed)
        assert [one["kind"] for one in found] == ["gc_pause"]


@pytest.mark.parametrize("shape", [(2, 4), (8, 1)])
def test_slow_worker_of_few_peers_or_without_stages(tmp_path: Path, shape: tuple[int, int]) -> None:
    (found,) = findings(tmp_path, dp=shape[0], pp=shape[1], fault=made.slow_worker(0, 1, 1.4))
    assert (found["kind"], found["ranks"]) == ("compute_straggler", [1])


def test_more_slow_workers_than_are_removed_for_m_w(tmp_path: Path) -> None:
    one, other = made.slow_worker(1, 1, 1.4), made.slow_worker(2, 3, 1.4)
    (found,) = findings(tmp_path, fault=lambda key, seconds: one(key, other(key, seconds)))
    assert (found["kind"], found["ranks"]) == ("compute_straggler", [5, 11])


@pytest.mark.parametrize(("stage", "dp"), [(3, 4), (1, 4), (3, 1)])
def test_slow_stage_is_an_imbalance(tmp_path: Path, stage: int, dp: int) -> None:
    (found,) = findings(tmp_path, dp=dp, fault=made.slow_stage(stage, 1.5))
    assert found["kind"] == "stage_imbalance"
    assert found["ranks"] == list(range(stage * dp, stage * dp + dp))
    assert (found["confidence"] > 0.6) == (dp > 1)


@pytest.mark.parametrize("shape", [(4, 4), (8, 1), (16, 2)])
def test_uneven_sequences_are_found_by_both_passes(tmp_path: Path, shape: tuple[int, int]) -> None:
    found = findings(tmp_path, dp=shape[0], pp=shape[1], fault=made.uneven_sequences(0.3))
    assert found[0]["kind"] == "sequence_imbalance"
    assert not found[1:]


def test_two_causes_are_distinguished(tmp_path: Path) -> None:
    def both(key: made.Key, seconds: made.Float) -> made.Float:
        return made.slow_stage(1, 1.3)(key, made.uneven_sequences(0.3)(key, seconds))

    found = findings(tmp_path, dp=16, pp=2, fault=both)
    assert [one["kind"] for one in found] == ["sequence_imbalance", "stage_imbalance"]
    # The rest: workers whose share of long sequences happens to differ.
    assert 0.8 < sum(one["share"] for one in found) <= 1.0


def test_whole_replica_that_is_slow_has_more_data(tmp_path: Path) -> None:
    def fault(key: made.Key, seconds: made.Float) -> made.Float:
        return seconds * 1.3 if key[0].endswith("compute") and key[2] == 2 else seconds

    (found,) = findings(tmp_path, fault=fault)
    assert (found["kind"], found["ranks"]) == ("sequence_imbalance", [2, 6, 10, 14])


def test_slow_link_is_named_at_both_ends(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, fault=made.slow_link(1, 2, 100))
    assert (found["kind"], found["ranks"]) == ("link_degradation", [6, 10])


def test_pauses_in_forwards_are_garbage_collection(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, fault=made.pauses(0.02, 0.3))
    assert found["kind"] == "gc_pause"


def test_threshold_decides_what_counts(tmp_path: Path) -> None:
    assert findings(tmp_path, threshold=0.3, fault=made.slow_worker(2, 1, 1.3)) == []


def operations(folder: Path, **job: Any) -> tuple[Operations, Layout]:
    path, meta = made.write(folder, made.rows(**job))
    trace = whatif_parquet.read(path, meta)
    return trace.operations, trace.layout


def test_order_of_rows_has_no_meaning(tmp_path: Path) -> None:
    columns = made.rows(steps=4)
    _, one = solved(tmp_path, columns)
    path, meta = made.write(tmp_path, columns, shuffled=False)
    trace = whatif_parquet.read(path, meta)
    other = dependencies.answer(dependencies.build(trace.operations, trace.layout))
    assert (one.slowdown, one.by_op, one.by_rank) == (other.slowdown, other.by_op, other.by_rank)


def test_step_that_lacks_an_operation_is_left_out_and_counted(tmp_path: Path) -> None:
    rows, layout = operations(tmp_path, steps=6)
    gone = (rows.step == 12) & (rows.rank == 5) & (rows.seq == 7)
    model = dependencies.build(rows.take(~gone), layout)
    assert model.steps.tolist() == [10, 11, 13, 14, 15]
    assert model.counters["steps_with_other_operations"] == 1
    assert "1 of 6 steps" in model.notes[0]


def test_unknown_operations_are_left_out_and_named(tmp_path: Path) -> None:
    rows, layout = operations(tmp_path, steps=4)
    before = dependencies.answer(dependencies.build(rows, layout)).slowdown
    names = tuple("moe-dispatch" if name == "gc" else name for name in rows.names)
    model = dependencies.build(replace(rows, names=names), layout)
    assert model.counters["operations_of_unknown_type"] == 4 * 16
    assert "moe-dispatch" in model.notes[0]
    assert dependencies.answer(model).slowdown == pytest.approx(before, rel=1e-6)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda rows: rows.take(np.repeat(True, len(rows)) & (rows.stage != 2)), "stage 2 has no operations"),
        (lambda rows: replace(rows, seq=np.zeros_like(rows.seq)), "occurs twice"),
        (lambda rows: rows.take(~((rows.dp_rank == 3) & (rows.stage == 1))), "data-parallel rank 3 lacks"),
        (lambda rows: rows.take(rows.step < 0), "no operation that the model knows"),
    ],
)
def test_recordings_that_are_no_job_are_refused(tmp_path: Path, spoil: Any, message: str) -> None:
    rows, layout = operations(tmp_path, steps=3)
    with pytest.raises(ArgusError, match=message):
        dependencies.build(spoil(rows), layout)
