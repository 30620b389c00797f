"""Step numbers that a log has more than once: what is numbered on, superseded, a copy, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv
import pytest

from argus.cli.main import main
from argus.importers.numbering import Numbering, Rows, number
from argus.model.errors import ArgusError
from tests.builders.logged_job import LAYOUTS, Fault, Log, make
from tests.stores import stored

OPTIONS = ["--rank-column", "rank", "--step-column", "step", "--duration-column", "step_ms", "--unit", "ms",
           "--phase", "data_loading=data_ms", "--phase", "compute=compute_ms"]  # fmt: skip


def of(*steps: Any, ranks: int = 1, content: Any = None, time: Any = None, epoch: Any = None) -> Numbering:
    """Rows of each rank, step by step, as a loop logs them."""
    step = np.concatenate([np.atleast_1d(part) for part in steps]).astype(np.int64)
    count = len(step)
    what = np.arange(count) if content is None else np.asarray(content)
    return number(Rows(
        np.tile(np.arange(ranks), count), np.repeat(step, ranks), np.repeat(what, ranks) * 100 + 7,
        None if time is None else np.repeat(np.asarray(time), ranks),
        None if epoch is None else np.repeat(np.asarray(epoch), ranks),
    ))  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 3])
def test_epochs_are_numbered_on(ranks: int) -> None:
    found = of(range(100), range(100), range(40), ranks=ranks)
    assert found.steps.tolist() == np.repeat(np.arange(240), ranks).tolist()
    assert (found.counters, found.losses) == ({}, {})
    assert found.notes == ["step numbers begin again 2 times: taken as 3 epochs, whose steps are numbered on, to 239"]


def test_epochs_of_which_every_tenth_step_is_logged_keep_the_distance() -> None:
    assert of(range(0, 100, 10), range(0, 100, 10)).steps.tolist() == list(range(0, 200, 10))


def test_a_log_may_begin_in_the_middle_of_an_epoch() -> None:
    assert of(range(50, 100), range(100), range(100)).steps.tolist() == list(range(50, 300))


def test_epochs_of_ranks_go_together() -> None:
    """One rank has a batch less in each epoch: equal steps stay equal."""
    rank = np.repeat([0, 1], [200, 198])
    step = np.concatenate([np.arange(100), np.arange(100), np.arange(99), np.arange(99)])
    found = number(Rows(rank, step, np.arange(398)))
    assert found.steps[rank == 1].tolist() == [*range(99), *range(100, 199)]


@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_of_a_resumed_job_supersede_earlier_ones(ranks: int) -> None:
    found = of(range(250), range(100, 300), ranks=ranks)
    assert found.steps.tolist() == np.repeat([*range(100), *[-1] * 150, *range(100, 300)], ranks).tolist()
    assert found.counters == {"rows_superseded": 150 * ranks}
    assert found.losses == {}
    assert found.notes == [
        f"the job was resumed at step 100: {150 * ranks} earlier rows, of steps 100 to 249, do not count"
    ]


def test_a_job_resumed_twice_or_not_as_far_as_before() -> None:
    assert of(range(250), range(100, 180), range(150, 300)).steps.tolist() == [
        *range(100), *[-1] * 150, *range(100, 150), *[-1] * 30, *range(150, 300)
    ]  # fmt: skip
    assert of(range(250), range(100, 180)).steps.tolist() == [*range(100), *[-1] * 150, *range(100, 180)]
    assert of(range(30), range(300)).steps.tolist() == [*[-1] * 30, *range(300)]


def test_the_later_time_decides_if_it_is_logged() -> None:
    found = of(range(100, 300), range(250), time=[*range(1000, 1200), *range(250)])
    assert found.steps.tolist() == [*range(100, 300), *range(100), *[-1] * 150]


def test_copies_are_counted_as_repeated() -> None:
    half = [*range(20), *range(10, 30)]
    found = of(half, content=half)
    assert found.steps.tolist() == [*range(20), *[-1] * 10, *range(20, 30)]
    assert (found.counters, found.notes) == ({"rows_repeated": 10}, [])
    assert of(np.repeat(np.arange(20), 2), content=np.repeat(np.arange(20), 2)).counters == {"rows_repeated": 20}
    shuffled = np.random.default_rng(3).permutation(np.tile(np.arange(40), 2))
    assert of(shuffled, content=shuffled).counters == {"rows_repeated": 40}


def test_times_in_whole_seconds_are_no_copies() -> None:
    slow = np.where(np.arange(300) < 250, 1, 2)
    found = of(range(100), range(100), range(100), content=slow)
    assert (found.steps.tolist(), found.counters) == (list(range(300)), {})


def test_few_rows_that_contradict_others_are_a_loss() -> None:
    found = of(range(40), [5], [5], range(40, 60))
    assert (found.steps.tolist(), found.losses) == ([*range(40), -1, -1, *range(40, 60)], {"rows_contradicting": 2})


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([range(100), range(60), range(40, 100), range(100)], "begin again at 0, 40, 0 after 99, 59, 99: epochs and"),
        ([range(100), range(60), range(80)], "begin again at 0, 0 after 99, 59: epochs and attempts"),
        ([np.repeat(np.arange(50), 2)], "50 of 100 rows are of a rank and step with another row and other times"),
        ([np.random.default_rng(3).permutation(np.tile(np.arange(40), 2))], "its rows are in no order"),
    ],
)
def test_what_is_not_clear_is_refused(steps: list[Any], message: str) -> None:
    with pytest.raises(ArgusError, match=message) as failure:
        of(*steps)
    assert "column" in failure.value.hint


def test_a_column_of_epochs_decides() -> None:
    steps = [*range(100), *range(60), *range(40, 100), *range(100)]
    epoch = np.repeat([0, 1, 1, 2], [100, 60, 60, 100])
    found = of(steps, epoch=epoch)
    assert found.steps.tolist() == [*range(140), *[-1] * 20, *range(140, 300)]
    assert found.notes[0] == "step numbers begin again in each of 3 epochs: they are numbered on, to 299"
    assert of(range(200), epoch=np.arange(200) // 100).notes == []


def table(log: Log) -> pa.Table:
    ranks, steps = log.step.shape
    rank, step = (each.T.ravel() for each in np.meshgrid(np.arange(ranks), np.arange(steps), indexing="ij"))
    columns = {"rank": rank, "step": step, "step_ms": log.step.T.ravel()}
    names = {"data_loading": "data_ms", "compute": "compute_ms"}
    return pa.table(columns | {column: log.phases[name].T.ravel() for name, column in names.items()})


def diagnosed(
    path: Path, url: str, capsys: pytest.CaptureFixture[str], *more: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the import says, and the verdict."""
    job = ["--job", "logged", "--store", url, "--format", "json"]
    assert main(["import", "iterations", str(path), *OPTIONS, *more, *job]) == 0
    said = json.loads(capsys.readouterr().out)
    assert main(["diagnose", *job]) in (0, 10)
    return said, json.loads(capsys.readouterr().out)


def slow_log(seed: int = 3) -> pa.Table:
    return table(make(LAYOUTS["wait inside compute"], ranks=8, faults=(Fault("data_loading", 5, 0.8, 0.5),), seed=seed))


@pytest.mark.parametrize("by_column", [False, True])
def test_a_fault_in_a_later_epoch_is_seen(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str], by_column: bool
) -> None:
    rows = slow_log()
    step = rows["step"].to_numpy()
    rows = rows.set_column(1, "step", pa.array(step % 100)).append_column("epoch", pa.array(step // 100))
    pcsv.write_csv(rows, tmp_path / "log.csv")
    said, found = diagnosed(tmp_path / "log.csv", url, capsys, *(["--epoch-column", "epoch"] if by_column else []))
    assert (said["counters"], said["steps"]) == ({}, [0, 299])
    assert any("numbered on, to 299" in note for note in said["notes"])
    (one,) = found["findings"]
    assert (found["status"], one["ranks"], one["kind"]) == ("degraded", [5], "data_loading")
    assert abs(one["steps"][0] - 150) <= 2
    assert stored(url, "SELECT count(), uniqExact(rank, step) FROM iterations") == [(2400, 2400)]


def test_the_attempt_that_was_resumed_counts(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The fault is there from the resumption on: rows of the first attempt would hide its first 50 steps."""
    first = table(make(LAYOUTS["wait inside compute"], ranks=8, seed=4)).slice(0, 8 * 200)
    second = slow_log().slice(8 * 150)
    pcsv.write_csv(pa.concat_tables([first, second]), tmp_path / "log.csv")
    said, found = diagnosed(tmp_path / "log.csv", url, capsys)
    assert said["counters"] == {"rows_superseded": 400}
    assert "the job was resumed at step 150: 400 earlier rows, of steps 150 to 199, do not count" in said["notes"]
    (one,) = found["findings"]
    assert (one["ranks"], one["steps"][0]) == ([5], 150)
    assert found["coverage"]["complete"]


def test_rows_left_out_keep_a_verdict_from_being_healthy(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = table(make(LAYOUTS["wait inside compute"], ranks=8, seed=4))
    twice = rows.slice(800, 8).set_column(2, "step_ms", pa.array(np.full(8, 500.0)))
    pcsv.write_csv(pa.concat_tables([rows.slice(0, 808), twice, rows.slice(808)]), tmp_path / "log.csv")
    said, found = diagnosed(tmp_path / "log.csv", url, capsys)
    assert said["counters"]["rows_contradicting"] == 8
    assert (found["status"], found["findings"]) == ("inconclusive", [])
    assert "8 rows of a log left out: their rank and step had another row, with other times" in found["reason"]
