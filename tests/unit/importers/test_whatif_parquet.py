"""Traces in the format of StragglerAnalysis: read, stored, and judged from the store."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from argus.cli.main import main
from argus.diagnose.verdict import json_schema
from argus.diagnose.whatif import dependencies
from argus.importers import whatif_parquet
from tests.builders import training_job as made
from tests.stores import stored

DATA = (
    Path(os.environ.get("ARGUS_REFERENCE_DATA", Path(__file__).parents[4] / "shared" / "data")) / "straggler-analysis"
)
reference = pytest.mark.skipif(
    not DATA.is_dir(), reason=f"the published traces are not at {DATA} (ARGUS_REFERENCE_DATA)"
)


def verdict(url: str, job: str, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["diagnose", "--job", job, "--format", "json", "--store", url, *more]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, json_schema())
    return found


@reference
def test_published_jobs_are_judged(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name, slow in (("AR", ("compute_straggler", [0])), ("ST", ("stage_imbalance", [6, 7]))):
        files = [str(DATA / f"trace-{name}.parquet"), "--meta", str(DATA / f"meta-{name}.yaml")]
        assert main(["import", "whatif", *files, "--store", url]) == 0
        found = verdict(url, name, capsys)
        assert found["status"] == "degraded"
        (one,) = found["findings"]
        assert (one["kind"], one["ranks"]) == slow
        reported, workers, last = (
            json.loads((DATA / f"{kind}-{name}.json").read_text()) for kind in ("result", "mw", "ms")
        )
        assert found["whatif"]["S"] == pytest.approx(reported["blocking_slowdown"], abs=1e-6)
        assert found["whatif"]["M_W"] == pytest.approx(workers["Mw"], abs=1e-6)
        assert found["whatif"]["M_S"] == pytest.approx(last["Ms"], abs=1e-6)
        for own, theirs in (("S_optype", "optype"), ("S_stage", "stage"), ("S_dp_rank", "dp_rank")):
            assert found["whatif"][own] == pytest.approx(reported[f"blocking_decompose_by_{theirs}"], abs=1e-6)


def test_what_is_stored_gives_the_same_model(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    path, meta = made.write(tmp_path, made.rows(steps=6, fault=made.slow_worker(2, 1, 1.5), width=2), tp_size=2)
    trace = whatif_parquet.read(path, meta)
    answers = dependencies.answer(dependencies.build(trace.operations, trace.layout))
    assert main(["import", "whatif", str(path), "--meta", str(meta), "--store", url]) == 0
    assert "4,464 operations of 16 ranks in 6 steps" in capsys.readouterr().out
    found = verdict(url, "made", capsys)
    assert found["whatif"]["S"] == pytest.approx(answers.slowdown, rel=1e-9)
    assert found["whatif"]["S_rank"] == pytest.approx({str(r): v for r, v in answers.by_rank.items()}, rel=1e-9)
    assert (found["ranks"], found["steps"], found["findings"][0]["ranks"]) == (16, [10, 15], [18])
    assert stored(url, "SELECT dp, pp, tp, sp, vpp, world_size FROM parallel_layout FINAL") == [(4, 4, 2, 1, 1, 32)]
    assert stored(url, "SELECT count(), uniqExact(rank), min(step), max(step), any(method) FROM iterations") == [
        (96, 16, 10, 15, "imported")
    ]
    assert stored(url, "SELECT countIf(microbatch >= 0), countIf(op LIKE '%compute') FROM phase_ops") == [
        (16 * 16 * 6, 16 * 16 * 6)
    ]
    some = verdict(url, "made", capsys, "--steps", "12:14")
    assert some["steps"] == [12, 14]
    query = found["findings"][0]["evidence"][0]["sql"]
    capsys.readouterr()
    assert main(["sql", query, "--store", url, "--format", "json"]) == 0
    assert "compute_ms_a_step" in capsys.readouterr().out


def test_healthy_job_is_healthy(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    path, meta = made.write(tmp_path, made.rows(steps=5))
    assert main(["import", "whatif", str(path), "--meta", str(meta), "--store", url]) == 0
    found = verdict(url, "made", capsys)
    assert (found["status"], found["findings"], found["slowdown"]) == ("healthy", [], 1.0)
    assert 1.0 <= found["whatif"]["S"] < 1.02


def test_two_steps_are_too_few(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    path, meta = made.write(tmp_path, made.rows(steps=2, fault=made.slow_stage(1, 2)))
    assert main(["import", "whatif", str(path), "--meta", str(meta), "--store", url]) == 0
    found = verdict(url, "made", capsys)
    assert found["status"] == "inconclusive"
    assert found["whatif"]["S"] > 1.1


def test_columns_that_others_imply_may_be_missing(tmp_path: Path) -> None:
    columns = made.rows(steps=3, fault=made.slow_worker(1, 2, 1.4))
    whole = whatif_parquet.read(*made.write(tmp_path, columns))
    expected = dependencies.answer(dependencies.build(whole.operations, whole.layout))
    for gone in (("seq_id", "mc", "gmc", "mb_id"), ("rank",), ("stage", "dp_rank")):
        path, meta = made.write(tmp_path, {name: v for name, v in columns.items() if name not in gone})
        trace = whatif_parquet.read(path, meta)
        assert {name for name in trace.report.counters if "missing" in name} == {f"column_{g}_missing" for g in gone}
        found = dependencies.answer(dependencies.build(trace.operations, trace.layout))
        assert found.by_rank == pytest.approx(expected.by_rank)
    bare = whatif_parquet.read(path, None)
    assert "no metadata" in bare.notes[0]


def test_double_precision_and_other_types_are_read(tmp_path: Path) -> None:
    columns = made.rows(steps=3)
    one = whatif_parquet.read(*made.write(tmp_path, columns, single=False))
    table = pa.table(columns)
    table = table.set_column(0, "optype", pa.chunked_array([table["optype"].combine_chunks().dictionary_encode()]))
    table = table.set_column(table.column_names.index("mb_id"), "mb_id", pa.array([None] * table.num_rows, pa.int8()))
    pq.write_table(table, tmp_path / "other.parquet", row_group_size=1000)
    other = whatif_parquet.read(tmp_path / "other.parquet", tmp_path / "meta.yaml")
    answers = [dependencies.answer(dependencies.build(t.operations, t.layout)) for t in (one, other)]
    assert answers[0].slowdown == answers[1].slowdown
    assert set(other.microbatch.tolist()) == {-1}


def spoiled(name: str, row: int, value: Any) -> dict[str, Any]:
    columns = made.rows(dp=1, pp=1, microbatches=1, steps=3)
    values = np.array(columns[name], object)
    values[row] = value
    return {**columns, name: values.tolist()}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (spoiled("duration", 3, float("nan")), "row 3: duration is nan"),
        (spoiled("start_ts", 4, None), "row 4: start_ts is empty"),
        (spoiled("step", 5, -7), "row 5: step is -7"),
        (spoiled("optype", 2, None), "row 2: optype is empty"),
        (spoiled("stage", 1, 9), "row 1: stage is 9, but"),
        ({"step": [1], "optype": ["gc"], "stage": [0]}, "lacks the columns start_ts, duration"),
        ({name: [] for name in made.rows(dp=1, pp=1, microbatches=1, steps=1)}, "has no rows"),
    ],
)
def test_traces_that_make_no_sense_are_refused(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str], columns: dict[str, Any], message: str
) -> None:
    path, meta = made.write(tmp_path, columns, single=False, shuffled=False, dp_size=1, pp_size=1)
    assert main(["import", "whatif", str(path), "--meta", str(meta), "--store", url]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp_size: 4\npp_size four\n", "line 2: 'pp_size four' is not 'name: value'"),
        ("dp_size: many\n", "line 1: dp_size is 'many'"),
        ("dp_size: 0\n", "line 1: dp_size is '0'"),
        ("dp_size: 4\nworld_size: 5\n", "world_size is 5, but dp x pp x tp x dsp is 4"),
        ("# nothing\n---\n", "names no size"),
    ],
)
def test_metadata_that_makes_no_sense_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path, meta = made.write(tmp_path, made.rows(dp=1, pp=1, microbatches=1, steps=1))
    meta.write_text(text)
    assert main(["import", "whatif", str(path), "--meta", str(meta)]) == 2
    assert message in capsys.readouterr().err


def test_file_that_is_no_parquet_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, meta = made.write(tmp_path, made.rows(dp=1, pp=1, microbatches=1, steps=1))
    whole = path.read_bytes()
    column = pq.ParquetFile(path).metadata.row_group(0).column(0)
    first, name = column.dictionary_page_offset or column.data_page_offset, column.path_in_schema
    path.write_bytes(whole[:first] + b"\xff" * 20 + whole[first + 20 :])
    assert main(["import", "whatif", str(path), "--meta", str(meta)]) == 2
    assert f"column '{name}' is damaged, in row group 0" in capsys.readouterr().err
    path.write_bytes(whole[:-30] + b"\xff" * 20 + whole[-10:])
    assert main(["import", "whatif", str(path), "--meta", str(meta)]) == 2
    assert f"its footer, before byte {len(whole):,}, is damaged" in capsys.readouterr().err
    path.write_bytes(whole[:100])
    assert main(["import", "whatif", str(path), "--meta", str(meta)]) == 2
    assert "it ends at byte 100 without a footer" in capsys.readouterr().err
    for wrong in (path, tmp_path / "none.parquet"):
        assert main(["import", "whatif", str(wrong), "--meta", str(meta)]) == 2
        assert "cannot be read as Parquet" in capsys.readouterr().err


def test_metadata_as_yaml_writes_it(tmp_path: Path) -> None:
    meta = tmp_path / "meta.yaml"
    meta.write_text("---\n# a job\ntrial_name: 'SE: 1'  # a name\nrun_id: 0\ndp_size: 32\npp_size: 2\ndsp_size: 2\n")
    name, layout = whatif_parquet.read_meta(meta)
    assert name == "SE: 1"
    assert layout == dependencies.Layout(data=32, pipeline=2, sequence=2)
