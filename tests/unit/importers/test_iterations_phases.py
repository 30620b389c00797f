"""Logs of training loops as CSV, JSON lines and Parquet: what is stored, what is refused, and labelled runs."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from argus.cli.main import main
from argus.importers import iterations_csv, tables
from argus.importers.iterations_csv import Columns
from argus.importers.rows import ImportReport
from argus.model.errors import ArgusError
from tests.builders.logged_job import LAYOUTS, Fault, Log, judge_rows, make
from tests.stores import stored

DATA = (
    Path(os.environ.get("ARGUS_REFERENCE_DATA", Path(__file__).parents[4] / "shared" / "data")) / "accelerator-faults"
)
reference = pytest.mark.skipif(not DATA.is_dir(), reason=f"the labelled runs are not at {DATA} (ARGUS_REFERENCE_DATA)")
OPTIONS = [
    "--rank-column", "rank", "--step-column", "step", "--duration-column", "step_ms", "--unit", "ms",
    "--phase", "data_loading=data_ms", "--phase", "compute=compute_ms",
]  # fmt: skip
HEAD = "rank,step,step_ms,data_ms,compute_ms"


def imported(url: str, *paths: Path, more: tuple[str, ...] = (), options: list[str] = OPTIONS) -> int:
    return main(["import", "iterations", *map(str, paths), *options, "--job", "logged", "--store", url, *more])


def verdict(url: str, capsys: pytest.CaptureFixture[str], job: str = "logged") -> dict[str, Any]:
    capsys.readouterr()
    assert main(["diagnose", "--job", job, "--format", "json", "--store", url]) in (0, 10)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def table(log: Log) -> pa.Table:
    ranks, steps = log.step.shape
    rank, step = (each.ravel() for each in np.meshgrid(np.arange(ranks), np.arange(steps), indexing="ij"))
    columns = {"rank": rank, "step": step, "step_ms": log.step.ravel()}
    return pa.table(
        columns | {f"{name.removesuffix('_loading')}_ms": values.ravel() for name, values in log.phases.items()}
    )


def test_timers_are_stored_as_phases(tmp_path: Path, url: str) -> None:
    path = tmp_path / "log.csv"
    path.write_text(f"{HEAD}\n0,0,10,1,7.5\n1,0,10,,8\n0,1,10,4,7\n0,1,10,4,7\n")
    assert imported(url, path) == 0
    rows = stored(url, "SELECT rank, step, phase, duration_ns, method FROM phases ORDER BY rank, step, phase")
    assert rows == [
        (0, 0, "compute", 7_500_000, "imported"), (0, 0, "data_loading", 1_000_000, "imported"),
        (0, 0, "other", 1_500_000, "remainder"),
        # Timers that overlap leave nothing.
        (0, 1, "compute", 7_000_000, "imported"), (0, 1, "data_loading", 4_000_000, "imported"),
        (1, 0, "compute", 8_000_000, "imported"), (1, 0, "other", 2_000_000, "remainder"),
    ]  # fmt: skip
    counted = {"phase_values_missing": 1, "rows_repeated": 1, "timers_longer_than_the_step": 1}
    assert dict(stored(url, "SELECT counter, value FROM coverage FINAL WHERE NOT loss")) == counted


def test_without_step_times_a_step_is_its_phases(tmp_path: Path, url: str) -> None:
    path = tmp_path / "log.csv"
    path.write_text(f"{HEAD}\n0,0,10,1,7.5\n0,1,10,,8\n")
    options = [each for each in OPTIONS if each not in ("--duration-column", "step_ms")]
    assert imported(url, path, options=options) == 0
    assert stored(url, "SELECT step, duration_ns FROM iterations ORDER BY step") == [(0, 8_500_000), (1, 8_000_000)]


def written(folder: Path, log: Log) -> dict[str, list[Path]]:
    """The same log in each form, by name."""
    rows = table(log)
    found: dict[str, list[Path]] = {"csv": [folder / "log.csv"], "parquet": [folder / "log.parquet"]}
    pcsv.write_csv(rows, folder / "log.csv")
    pq.write_table(rows, folder / "log.parquet", row_group_size=100)
    found["csv.gz"] = [folder / "packed.csv.gz"]
    found["csv.gz"][0].write_bytes(gzip.compress(found["csv"][0].read_bytes()))
    lines = [json.dumps(row) for row in rows.to_pylist()]
    found["jsonl"] = [folder / "log.jsonl"]
    found["jsonl"][0].write_text("\n".join(lines) + "\n\n")
    ranks = folder / "ranks"
    ranks.mkdir()
    for rank in range(log.step.shape[0]):
        own = [{k: v for k, v in row.items() if k != "rank"} for row in rows.to_pylist() if row["rank"] == rank]
        (ranks / f"run7-rank{rank}.jsonl").write_text("\n".join(map(json.dumps, own)))
    found["one a rank"] = [ranks]
    found["pattern"] = [ranks / "*rank*.jsonl"]
    return found


def test_every_form_stores_the_same(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROWS", 64)
    log = make(LAYOUTS["only compute"], ranks=3, steps=40, seed=1)
    options = ["--step-column", "step", "--duration-column", "step_ms", "--phase", "compute=compute_ms", "--unit", "ms"]
    answers = {}
    for name, paths in written(tmp_path, log).items():
        by_name = [] if name in ("one a rank", "pattern") else ["--rank-column", "rank"]
        assert imported(url, *paths, options=[*options, *by_name]) == 0, name
        run = "run = (SELECT max(run) FROM jobs)"
        answers[name] = stored(
            url,
            f"SELECT rank, step, phase, intDiv(duration_ns, 1000) FROM phases WHERE {run} ORDER BY rank, step, phase",
        ) + stored(url, f"SELECT rank, step, intDiv(duration_ns, 1000) FROM iterations WHERE {run} ORDER BY rank, step")
    assert len(answers["csv"]) == 3 * 40 * 3
    assert all(rows == answers["csv"] for rows in answers.values())


@pytest.mark.thorough(first=2)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("1700000000.5", "1700000060"), ("1700000000500", "1700000060000"),
        ("2023-11-14T22:13:20.5Z", "2023-11-14T22:14:20Z"),
        ("2023-11-14 22:13:20.5", "2023-11-14 22:14:20"), ("1700000000500000000", "1700000060000000000"),
    ],
)  # fmt: skip
def test_hosts_and_times_are_kept(tmp_path: Path, url: str, first: str, second: str) -> None:
    path = tmp_path / "log.csv"
    path.write_text(f"{HEAD},node,at\n0,0,500,1,7,n1,{first}\n1,0,500,1,7,n2,{first}\n0,1,100,1,7,n1,{second}\n")
    assert imported(url, path, more=("--host-column", "node", "--time-column", "at")) == 0
    begins = stored(url, "SELECT rank, step, host, toUnixTimestamp64Milli(ts) FROM iterations ORDER BY step, rank")
    assert begins == [
        (0, 0, "n1", 1_700_000_000_000), (1, 0, "n2", 1_700_000_000_000), (0, 1, "n1", 1_700_000_059_900),
    ]  # fmt: skip
    assert stored(url, "SELECT rank, host, rank_source FROM ranks FINAL ORDER BY rank") == [
        (0, "n1", "trace"), (1, "n2", "trace"),
    ]  # fmt: skip


def refused(url: str, capsys: pytest.CaptureFixture[str], *paths: Path, options: list[str] = OPTIONS) -> str:
    capsys.readouterr()
    assert imported(url, *paths, options=options) == 2
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    assert stored(url, "SELECT (SELECT count() FROM iterations), (SELECT count() FROM jobs)") == [(0, 0)]
    return shown


def test_files_that_make_no_sense_are_refused(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    def file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    ok = file("ok.csv", f"{HEAD}\n0,0,10,1,7\n")
    assert "row 2: data_ms is '-1'" in refused(url, capsys, file("a.csv", f"{HEAD}\n0,0,10,1,7\n0,1,10,-1,7\n"))
    assert "has no column 'compute_ms'" in refused(url, capsys, file("b.csv", "rank,step,step_ms,data_ms\n0,0,1,1\n"))
    assert "line 2 is not JSON" in refused(url, capsys, file("c.jsonl", '{"rank": 0, "step": 0}\n{"rank": \n'))
    assert "line 2 is not an object" in refused(url, capsys, file("c2.jsonl", '{"rank": 0}\n[]\n'))
    assert "has no column" in refused(url, capsys, file("d.jsonl", '{"a": 1}\n'))
    assert "jq -c" in refused(url, capsys, file("e.json", '[{"rank": 0}]'))
    assert "longer than" in refused(url, capsys, file("f.jsonl", '{"a": "' + "x" * (2 << 20)))
    assert "no file matches" in refused(url, capsys, tmp_path / "*.nothing")
    by_name = [each for each in OPTIONS if each not in ("--rank-column", "rank")]
    assert "the name of" in refused(url, capsys, ok, options=by_name)
    one, two = file("rank1.csv", ok.read_text()), file("also-rank1.csv", ok.read_text())
    assert "are both of rank 1" in refused(url, capsys, one, two, options=by_name)
    assert "named twice" in refused(url, capsys, ok, options=[*OPTIONS, "--phase", "more=data_ms"])
    assert "cannot be a phase's name" in refused(url, capsys, ok, options=[*OPTIONS, "--phase", "other=x"])
    assert "is not NAME=COLUMN" in refused(url, capsys, ok, options=[*OPTIONS, "--phase", "data"])
    times = [*OPTIONS, "--time-column", "at"]
    far = file("far.csv", f"{HEAD},at\n0,0,10,1,7,1700000000\n0,1,10,1,7,1800000000\n")
    assert "days apart" in refused(url, capsys, far, options=times)
    odd = file("odd.csv", f"{HEAD},at\n0,0,10,1,7,2026-01-01\n0,1,10,1,7,soon\n")
    assert "row 2: at is 'soon'" in refused(url, capsys, odd, options=times)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("1790000000.07", ""),
        ("1790000000.07", "soon"),
        ("1790000000.07", "2026-01-01"),
        ("0.5", "-"),
        ("2026-01-31T12:00:00", ""),
        ("2026-01-31T12:00:00", "1790000000"),
        ("2026-01-31T12:00:00", "2026-13-45T12:00:00"),
        ("2026-01-31T12:00:00Z", "2026-01-31T12:00:00"),
        ("2026-01-31", "2026-01-31T12:00:00Z"),
    ],
)
def test_the_row_without_a_time_is_named(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str], good: str, bad: str
) -> None:
    path = tmp_path / "times.csv"
    rows = [f"0,{step},10,1,7,{bad if step == 5 else good}" for step in range(9)]
    path.write_text("\n".join([f"{HEAD},at", *rows]) + "\n")
    shown = refused(url, capsys, path, options=[*OPTIONS, "--time-column", "at"])
    assert f"row 6: at is '{bad}', not a time" in shown


def test_a_log_is_diagnosed(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    fault = Fault("data_loading", 11, 0.4)
    pq.write_table(table(make(LAYOUTS["wait inside compute"], faults=(fault,), seed=3)), tmp_path / "log.parquet")
    assert imported(url, tmp_path / "log.parquet") == 0
    found = verdict(url, capsys)
    (one,) = found["findings"]
    assert (found["status"], one["kind"], one["ranks"], one["hosts"]) == ("degraded", "data_loading", [11], [])
    assert found["slowdown"] == pytest.approx(1.4, abs=0.06)
    assert "FROM phases" in one["evidence"][0]["sql"]


def test_steps_that_were_longer_for_a_while_are_mentioned(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the recording: what is usual is what steps take since."""
    log = make(LAYOUTS["wait inside compute"], steps=200, faults=(Fault("compute", None, 0.4, 0.25, 0.75),), seed=2)
    pcsv.write_csv(table(log), tmp_path / "log.csv")
    assert imported(url, tmp_path / "log.csv") == 0
    found = verdict(url, capsys)
    assert (found["status"], found["findings"]) == ("healthy", [])
    assert "steps 50 to 149 took 1" in found["reason"]
    assert float(found["reason"].split("x what steps take since")[0][-4:]) == pytest.approx(1.4, abs=0.03)
    assert "by less than 11% may have been missed" in found["reason"]


@pytest.mark.parametrize(("share", "kinds"), [(0.2, ["jitter"]), (0.01, [])])
@pytest.mark.thorough(first=1)
def test_long_steps_by_turns_are_jitter_of_nobody(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str], share: float, kinds: list[str]
) -> None:
    log = make(LAYOUTS["wait inside compute"], ranks=8, steps=200, spikes=0.0, seed=3)
    rng = np.random.default_rng(4)
    long = np.where(rng.random(200) < share, 80.0, 0.0)
    whose = rng.integers(0, 8, 200)
    late = long * (whose == np.arange(8)[:, None])
    log.phases["data_loading"][:] += late
    log.phases["compute"][:] += long - late
    log.step[:] += long
    pcsv.write_csv(table(log), tmp_path / "log.csv")
    assert imported(url, tmp_path / "log.csv") == 0
    found = verdict(url, capsys)
    assert [(one["kind"], one["ranks"]) for one in found["findings"]] == [(kind, []) for kind in kinds]
    assert all("several ranks by turns" in one["evidence"][0]["text"] for one in found["findings"])


@pytest.mark.parametrize("rank", [5, None])
@pytest.mark.thorough(first=1)
def test_long_steps_that_the_log_shows_to_be_one_ranks_are(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str], rank: int | None
) -> None:
    """They cost less than the threshold over the ranks' usual times, and more over the typical step."""
    log = make(LAYOUTS["wait inside compute"], ranks=8, steps=200, spikes=0.02, seed=3)
    long = np.where(np.arange(200) % 20 == 7, 84.0, 0.0)
    late = np.ones(8, np.bool_) if rank is None else np.arange(8) == rank
    log.phases["data_loading"][late] += long
    log.phases["compute"][~late] += long
    log.step[:] += long
    pcsv.write_csv(table(log), tmp_path / "log.csv")
    assert imported(url, tmp_path / "log.csv") == 0
    found = verdict(url, capsys)
    if rank is None:
        assert found["findings"] == []
        assert "no single rank is behind it by its own time; delays inside timers" in found["reason"]
        return
    (one,) = found["findings"]
    assert (one["kind"], one["ranks"], one["hosts"]) == ("jitter", [5], [])
    assert re.search(r"rank 5 alone was late in (91|100)% of them", one["evidence"][1]["text"])


def test_long_steps_of_a_rank_that_recovered_are_said_once(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    log = make(LAYOUTS["wait inside compute"], ranks=8, steps=200, spikes=0.0, seed=3)
    long = np.where((np.arange(200) >= 100) & (np.arange(200) < 105), 240.0, 0.0)
    log.phases["data_loading"][5] += long
    log.phases["compute"][np.arange(8) != 5] += long
    log.step[:] += long
    pcsv.write_csv(table(log), tmp_path / "log.csv")
    assert imported(url, tmp_path / "log.csv") == 0
    found = verdict(url, capsys)
    assert (found["status"], found["findings"]) == ("healthy", [])
    assert found["reason"].startswith("rank 5 was slow in steps 100 to 104 (a step of up to")


@pytest.mark.parametrize(
    ("name", "rank"),
    [("rank3.csv", 3), ("worker_12.jsonl.gz", 12), ("worker-3 (1).jsonl", 3), ("worker1-rank7.csv", 7), ("2.csv", 2),
     ("run5_gpu4.csv", 4), ("times.csv", None), ("run_5-4.csv", 4)],
)  # fmt: skip
def test_the_rank_in_the_name_of_a_file(name: str, rank: int | None) -> None:
    assert tables.number_in(Path(name)) == rank


@pytest.mark.thorough
def test_a_warm_up_and_two_evaluations_are_no_jitter(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    log = make(LAYOUTS["wait inside compute"], ranks=4, steps=80, spikes=0.0, seed=3)
    for step, more in {0: 500.0, 1: 200.0, 2: 90.0, 29: 250.0, 59: 250.0}.items():
        log.phases["compute"][:, step] += more
        log.step[:, step] += more
    pcsv.write_csv(table(log), tmp_path / "log.csv")
    assert imported(url, tmp_path / "log.csv") == 0
    found = verdict(url, capsys)
    assert (found["status"], found["findings"]) == ("healthy", [])
    assert "2 of the newest 77 steps" in found["reason"]
    assert "an evaluation" in found["reason"]


@pytest.mark.parametrize(
    ("layout", "where", "owner", "action", "claim"),
    [
        ("wait inside compute", "compute", "model", "batch or sequence length", "compute and waiting contain the"),
        ("wait inside compute", "data_loading", "data", "workers and prefetching", "more than before"),
        ("wait inside communication", "communication", "infrastructure", "network of all ranks", "more than before"),
    ],
)  # fmt: skip
@pytest.mark.thorough(first=1)
def test_all_slower_is_a_regression_of_nobody(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str], layout: str, where: str, owner: str, action: str,
    claim: str,
) -> None:  # fmt: skip
    """The timer that grew is named, who has to act follows from it, and what the timers cannot show is said."""
    log = make(LAYOUTS[layout], ranks=8, faults=(Fault(where, None, 0.4),), seed=3)
    pcsv.write_csv(table(log), tmp_path / "log.csv")
    names = {name: f"{name.removesuffix('_loading')}_ms" for name in log.phases}
    options = [*OPTIONS[:8], *(each for name, column in names.items() for each in ("--phase", f"{name}={column}"))]
    assert imported(url, tmp_path / "log.csv", options=options) == 0
    (one,) = verdict(url, capsys)["findings"]
    assert (one["kind"], one["ranks"], one["phase"], one["owner"]) == ("regression", [], where, owner)
    assert action in one["action"]
    assert claim in one["evidence"][0]["text"]
    grown = re.fullmatch(rf"a step has {where.replace('_', ' ')} ([\d.]+) ms instead of ([\d.]+) ms",
                         one["evidence"][1]["text"].replace(" µs", "e-3 ms"))  # fmt: skip
    assert grown is not None
    assert float(grown[1]) - float(grown[2]) == pytest.approx(32, abs=4)


def test_who_is_behind_a_regression_is_not_known_where_a_rank_is_not_logged(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = table(make(LAYOUTS["wait inside compute"], ranks=8, faults=(Fault("data_loading", 5, 0.8),), seed=3))
    pcsv.write_csv(rows.filter(pc.not_equal(rows["rank"], 5)), tmp_path / "log.csv")
    capsys.readouterr()
    assert imported(url, tmp_path / "log.csv") == 0
    assert "  rank 5 of 0 to 7 has no rows\n" in capsys.readouterr().out
    (one,) = verdict(url, capsys)["findings"]
    assert (one["kind"], one["ranks"]) == ("regression", [])
    assert "rank 5 is not in the log of the newest steps: whether it holds up the others" in one["evidence"][0]["text"]


def test_a_rank_whose_rows_end_early_is_said(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = table(make(LAYOUTS["wait inside compute"], ranks=4, steps=40, seed=3))
    ended = pc.and_(pc.equal(rows["rank"], 2), pc.greater_equal(rows["step"], 20))
    pcsv.write_csv(rows.filter(pc.invert(ended)), tmp_path / "log.csv")
    capsys.readouterr()
    assert imported(url, tmp_path / "log.csv") == 0
    assert "  rank 2 has no rows after step 19\n" in capsys.readouterr().out


@pytest.mark.parametrize("at", ["", "0.001", "10"])
@pytest.mark.thorough(first=1)
def test_without_step_times_the_slow_rank_is_named(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str], at: str
) -> None:
    """Its timers are the shortest: no timer covers what it takes longer. Times of rows show it, unless they are too
    coarse; else what its timers lack of those of the others."""
    log = make(LAYOUTS["wait inside compute"], ranks=8, faults=(Fault("", 5, 0.8),), seed=3)
    rows = table(log)
    more = []
    if at:
        ends = 1.79e9 + np.cumsum(log.step, axis=1).ravel() / 1e3
        rows = rows.append_column("ts", pa.array(np.round(ends / float(at)) * float(at)))
        more = ["--time-column", "ts"]
    pcsv.write_csv(rows.drop_columns(["step_ms"]), tmp_path / "log.csv")
    capsys.readouterr()
    options = [each for each in OPTIONS if each not in ("--duration-column", "step_ms")]
    assert imported(url, tmp_path / "log.csv", options=[*options, *more]) == 0
    said = capsys.readouterr().out
    assert ("a step is as long as ts is after that of the step before" in said) == (at == "0.001")
    assert ("as long as its phases together: ts is not precise enough" in said) == (at == "10")
    (one,) = verdict(url, capsys)["findings"]
    assert (one["kind"], one["ranks"], one["phase"]) == ("compute_straggler", [5], "other")
    assert one["slowdown"] == pytest.approx(1.8, abs=0.15)


def test_a_rank_whose_backward_pass_is_slow_too_is_the_reason_alone(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The backward pass contains the wait: only the forward pass shows the rank, and a third of what steps grew by."""
    faults = (Fault("forward", 5, 0.12), Fault("backward", 5, 0.28))
    pcsv.write_csv(table(make(LAYOUTS["wait inside backward"], ranks=8, faults=faults, seed=3)), tmp_path / "log.csv")
    options = [*OPTIONS[:-4], "--phase", "dataloader=dataloader_ms", "--phase", "forward=forward_ms",
               "--phase", "backward=backward_ms", "--phase", "optimizer=optimizer_ms"]  # fmt: skip
    assert imported(url, tmp_path / "log.csv", options=options) == 0
    found = verdict(url, capsys)
    (one,) = found["findings"]
    assert (one["kind"], one["ranks"], one["steps"][0]) == ("compute_straggler", [5], 99)
    assert one["slowdown"] == pytest.approx(1.4, abs=0.06)
    assert found["slowdown"] == pytest.approx(1.4, abs=0.06)


def test_long_steps_of_one_rank_are_no_regression_of_all(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A third of the steps first, and then half of them: the typical step is a long one since."""
    log = make(LAYOUTS["wait inside communication"], ranks=8, spikes=0.0, seed=3)
    share = np.where(np.arange(300) < 50, 0.0, np.where(np.arange(300) < 180, 0.35, 0.54))
    long = np.where(np.random.default_rng(6).random(300) < share, 160.0, 0.0)
    log.phases["input"][3] += long
    log.phases["communication"][np.arange(8) != 3] += long
    log.step[:] += long
    pcsv.write_csv(table(log), tmp_path / "log.csv")
    options = [*OPTIONS[:-4], "--phase", "data=input_ms", "--phase", "compute=compute_ms",
               "--phase", "communication=communication_ms"]  # fmt: skip
    assert imported(url, tmp_path / "log.csv", options=options) == 0
    assert [one["ranks"] for one in verdict(url, capsys)["findings"]] == [[3]]


def test_gradual_growth_has_its_first_and_last_step(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    noise = np.exp(0.005 * np.random.default_rng(4).standard_normal((4, 400)))
    log = Log(np.interp(np.arange(400), [100, 300], [76.0, 92.0]) * noise)
    path = tmp_path / "log.csv"
    pcsv.write_csv(table(log), path)
    assert imported(url, path, options=OPTIONS[:8]) == 0
    (found,) = verdict(url, capsys)["findings"]
    assert (found["kind"], found["ranks"]) == ("regression", [])
    assert 88 <= found["steps"][0] <= 112
    assert re.search(r"it grew gradually from step \d+ to step (29|30|31)\d", found["evidence"][0]["text"])
    assert re.search(r"for all ranks from step \d+ to step (29|30|31)\d: batch", found["action"])


def test_healthy_says_what_would_not_have_shown(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(table(make(LAYOUTS["wait inside compute"], seed=3)), tmp_path / "log.parquet")
    assert imported(url, tmp_path / "log.parquet") == 0
    found = verdict(url, capsys)
    assert found["status"] == "healthy"
    assert "growth of the newer half's steps by less than 11% may have been missed" in found["reason"]
    assert "of a step) more than it did" in found["reason"]


@pytest.mark.thorough(first=1)
@pytest.mark.parametrize("timers", [True, False])
@pytest.mark.parametrize(("gone", "reason"), [
    (2, "rank 2 is not {}: whether it holds up the others is not known"),
    (0, ""),  # a log may number ranks from 1 on, or be of a part of a job
])  # fmt: skip
def test_a_job_without_a_rank_is_not_called_healthy(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str], gone: int, reason: str, timers: bool
) -> None:
    log = table(make(LAYOUTS["wait inside compute"], seed=3))
    pq.write_table(log.filter(pc.not_equal(log["rank"], gone)), tmp_path / "log.parquet")
    assert imported(url, tmp_path / "log.parquet", options=OPTIONS if timers else OPTIONS[:8]) == 0
    found = verdict(url, capsys)
    assert not found["findings"]
    if reason:
        place = "in the log of the newest steps" if timers else "among those stored (0 to 15)"
        assert (found["status"], found["reason"]) == ("inconclusive", reason.format(place))
    else:
        assert found["status"] == "healthy"


def test_many_ranks_that_lack_are_counted(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    log = table(make(LAYOUTS["wait inside compute"], seed=3))
    ranks = pc.if_else(pc.equal(log["rank"], 15), 5000, log["rank"])
    pq.write_table(log.set_column(log.column_names.index("rank"), "rank", ranks), tmp_path / "log.parquet")
    assert imported(url, tmp_path / "log.parquet", options=OPTIONS[:8]) == 0
    assert verdict(url, capsys)["reason"] == "4985 of ranks 0 to 5000 are not stored"


SOURCE = ["--rank-column", "rank", "--step-column", "step", "--duration-column", "step_ms", "--unit", "ms",
          "--phase", "data_loading=data_ms", "--phase", "compute=compute_ms", "--phase", "communication=comm_ms",
          "--phase", "waiting=wait_ms", "--time-column", "ts"]  # fmt: skip
HOST_KINDS = ("data_loading", "gc_pause", "kernel_issue_stall", "host_contention", "jit_stall")


SOURCE_COLUMNS = Columns(
    "rank", "step", "step_ms", "ms",
    {"data_loading": "data_ms", "compute": "compute_ms", "communication": "comm_ms", "waiting": "wait_ms"}, None, "ts",
)  # fmt: skip


Rows = dict[str, Any]
Ints = NDArray[np.int64]


@cache
def labelled() -> list[tuple[str, dict[str, Any], Rows, Rows]]:
    """Name, truth, step times and phases of each labelled run. They are for all tests: nothing may be written to."""
    out = []
    for run, truth in json.loads((DATA / "truth.json").read_text()).items():
        reading, reported = iterations_csv._Reading(), ImportReport(begin_ns=10**18)
        (found,) = iterations_csv._blocks([DATA / f"{run}.csv.gz"], {}, SOURCE_COLUMNS, reading, reported)
        times, phases = (
            {name: np.array(values) for name, values in found[table].items() if name in ("rank", "step", "phase")}
            | {"duration_ns": found[table]["duration_ns"].astype(float)}
            for table in ("iterations", "phases")
        )
        for values in (*times.values(), *phases.values()):
            values.setflags(write=False)
        out.append((run, truth, times, phases))
    return out


def blamed_in(times: Rows, phases: Rows) -> list[tuple[list[int], bool]]:
    """The ranks that are named, and whether by their host's side."""
    newest = float(np.median(times["duration_ns"][times["step"] > times["step"].max() - 20]))
    return [(one.ranks, one.kind in HOST_KINDS) for one in judge_rows(times, phases, newest)[0]]


@reference
def test_labelled_runs() -> None:
    """GPT-2 on 16 accelerators: the rank at fault and its side, and nobody where all are alike or nothing is wrong."""
    for run, truth, times, phases in labelled():
        wanted = [([truth["rank"]], truth["host_side"])] if truth["kind"] == "rank" else []
        assert blamed_in(times, phases) == wanted, (run, truth)


def disturbed(how: str, rows: Rows, random: np.random.Generator, ranks: Ints) -> Rows:
    if how == "noise":
        return rows | {"duration_ns": rows["duration_ns"] * (1 + 0.01 * random.standard_normal(len(rows["step"])))}
    if how == "ranks":
        return rows | {"rank": ranks[rows["rank"]]}
    chosen = {
        "order": random.permutation(len(rows["step"])), "no beginning": rows["step"] >= 60,
        "no end": rows["step"] < 240, "every other step": rows["step"] % 2 == 0,
    }[how]  # fmt: skip
    return {name: values[chosen] for name, values in rows.items()}


@reference
@pytest.mark.thorough(first=1)
@pytest.mark.parametrize("how", ["noise", "ranks", "order", "no beginning", "no end", "every other step"])
def test_labelled_runs_that_are_disturbed(how: str) -> None:
    """1 % of noise, ranks renumbered, rows in any order, a fifth of the steps cut off: the same rank and side."""
    random = np.random.default_rng(7)
    for run, truth, times, phases in labelled():
        ranks = random.permutation(16)
        wanted = [([ranks[truth["rank"]] if how == "ranks" else truth["rank"]], truth["host_side"])]
        disturbed_rows = (disturbed(how, rows, random, ranks) for rows in (times, phases))
        assert blamed_in(*disturbed_rows) == (wanted if truth["kind"] == "rank" else []), (run, truth)


@reference
def test_the_quietest_labelled_run_through_the_store(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    job = ["--job", "quietest", "--store", url]
    assert main(["import", "iterations", str(DATA / "run584059.csv.gz"), *SOURCE, *job]) == 0
    found = verdict(url, capsys, "quietest")
    (one,) = found["findings"]
    assert (one["kind"], one["ranks"], one["steps"][0], one["phase"]) == ("compute_straggler", [0], 100, "other")
    assert 1.01 < found["slowdown"] < 1.05


COLUMNS = Columns("rank", "step", "step_ms", "ms", {"data": "data_ms", "compute": "compute_ms"}, None, "ts")
CASES = 10_000


def damaged(whole: bytes, rng: random.Random) -> bytes:
    """Cut off, with flipped bits, with a part that is missing, doubled, nested or replaced."""
    data = bytearray(whole)
    for _ in range(rng.randint(1, 3)):
        if not data:
            break
        at, end = rng.randrange(len(data)), rng.randrange(len(data))
        kind = rng.randrange(7)
        if kind == 0:
            del data[at:]
        elif kind == 1:
            for _ in range(rng.randint(1, 8)):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del data[min(at, end) : min(at, end) + rng.randint(1, 64)]
        elif kind == 3:
            data[at:at] = data[min(at, end) : min(at, end) + 256]
        elif kind == 4:
            data[at:at] = rng.choice([b"[" * 3000, b'{"a":' * 3000, b'"', b"\n", b"\0", b"\xff\xfe", b",", b"\r"])
        elif kind == 5:
            odd = [b"1e999", b"-0", b"nan", b"inf", b"9" * 400, b"1_0", b"0x1", "\u0663".encode(), b"null", b"true"]
            data[at : at + rng.randint(0, 6)] = rng.choice(odd)
        else:
            data[at : at + 64] = rng.randbytes(rng.randint(1, 64))
    return bytes(data)


@pytest.mark.thorough
def test_damaged_files_end_with_one_line(tmp_path: Path) -> None:
    """10,000 damaged files: each is read whole, or refused with one line; no other exception, and in little memory."""
    log = make(LAYOUTS["wait inside compute"], ranks=2, steps=12, seed=1)
    rows = table(log).append_column("ts", pa.array(1.7e9 + np.arange(24)))
    pcsv.write_csv(rows, tmp_path / "a.csv")
    pq.write_table(rows, tmp_path / "a.parquet", row_group_size=10)
    lines = "\n".join(json.dumps(row) for row in rows.to_pylist())
    forms = {
        "csv": (tmp_path / "a.csv").read_bytes(), "csv.gz": gzip.compress((tmp_path / "a.csv").read_bytes()),
        "jsonl": lines.encode(), "jsonl.gz": gzip.compress(lines.encode()),
        "parquet": (tmp_path / "a.parquet").read_bytes(),
    }  # fmt: skip
    read = refused = unclear = 0
    for case in range(CASES):
        rng = random.Random(case)
        form = rng.choice(list(forms))
        path = tmp_path / f"damaged.{form}"
        path.unlink(missing_ok=True)  # a file that is cut off and written again is written to the disk at once
        path.write_bytes(damaged(forms[form], rng))
        try:
            found = iterations_csv._Reading()
            for _ in iterations_csv._blocks([path], {}, COLUMNS, found, ImportReport(begin_ns=10**18)):
                pass
            read += 1
        except ArgusError as failure:
            refused += 1
            unclear += not failure.message.strip() or "\n" in failure.message
    assert not unclear
    assert read > CASES // 100
    assert refused > CASES // 3
