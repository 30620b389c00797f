"""Step times from a table of text: what is stored, what is refused, and which ranks are named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from argus.cli.main import main
from argus.importers import tables
from tests.stores import stored

DATA = Path(os.environ.get("ARGUS_REFERENCE_DATA", Path(__file__).parents[4] / "shared" / "data")) / "alibaba-minibatch"
reference = pytest.mark.skipif(
    not DATA.is_dir(), reason=f"the published step times are not at {DATA} (ARGUS_REFERENCE_DATA)"
)
OPTIONS = ["--rank-column", "worker", "--step-column", "step", "--duration-column", "took"]


def table(path: Path, times: Any, *, names: Any = None) -> Path:
    """``times``: shape (ranks, steps); NaN: no row."""
    lines = ["step,worker,took"]
    for step in range(times.shape[1]):
        for rank in range(times.shape[0]):
            if np.isfinite(times[rank, step]):
                lines.append(f"{step},{names[rank] if names else rank},{times[rank, step]:.4f}")
    path.write_text("\n".join(lines) + "\n")
    return path


def verdict(url: str, job: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["diagnose", "--job", job, "--format", "json", "--store", url]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def judged(tmp_path: Path, url: str, times: Any, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    path = table(tmp_path / "times.csv", times)
    assert main(["import", "iterations", str(path), *OPTIONS, "--job", "made", "--store", url, *more]) == 0
    return verdict(url, "made", capsys)


def steady(ranks: int = 10, steps: int = 200, noise: float = 0.02, seed: int = 0) -> Any:
    return 100 * (1 + noise * np.random.default_rng(seed).standard_normal((ranks, steps)))


def test_rows_are_stored_as_steps(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "BLOCK_BYTES", 64)  # many blocks
    times = np.arange(1, 31, dtype=float).reshape(3, 10)
    times[1, 4] = np.nan
    path = table(tmp_path / "times.csv", times)
    assert main(["import", "iterations", str(path), *OPTIONS, "--unit", "us", "--store", url]) == 0
    rows = stored(url, "SELECT rank, step, duration_ns, method, job FROM iterations ORDER BY rank, step")
    assert rows == [
        (rank, step, int(times[rank, step] * 1000), "imported", "times")
        for rank in range(3) for step in range(10) if np.isfinite(times[rank, step])
    ]  # fmt: skip
    # A rank's step begins where its step before ended, across blocks.
    ends = stored(
        url,
        "SELECT rank, groupArray(toUnixTimestamp64Nano(ts)) AS begins, groupArray(duration_ns) AS took FROM "
        "(SELECT * FROM iterations ORDER BY step) GROUP BY rank ORDER BY rank",
    )
    for _, begins, took in ends:
        assert np.diff(begins).tolist() == list(took)[:-1]
    assert stored(url, "SELECT countIf(ended IS NULL), any(launcher) FROM jobs FINAL") == [(0, "iterations")]


def test_rows_that_contradict_others_are_a_loss(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "BLOCK_BYTES", 64)
    path = table(tmp_path / "times.csv", steady(2, 20))
    path.write_text(path.read_text() + "3,1,77\n3,1,78\n19,0,79\n")
    assert main(["import", "iterations", str(path), *OPTIONS, "--store", url]) == 0
    assert stored(url, "SELECT count(), uniqExact(rank, step) FROM iterations") == [(40, 40)]
    assert stored(url, "SELECT counter, value, loss FROM coverage FINAL") == [("rows_contradicting", 3, True)]


def test_ranks_with_names_are_numbered(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(tmp_path / "times.csv", steady(3, 12), names=["node-b", "node-a", "7"])
    assert main(["import", "iterations", str(path), *OPTIONS, "--unit", "ms", "--store", url]) == 0
    assert "0 is node-b, 1 is node-a, 2 is 7" in capsys.readouterr().out
    assert stored(url, "SELECT rank, host, rank_source FROM ranks FINAL ORDER BY rank") == [
        (0, "node-b", "order"), (1, "node-a", "order"), (2, "7", "order"),
    ]  # fmt: skip


@pytest.mark.thorough(first=4)
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("1,0,5\n2,0,abc\n", "row 2: took is 'abc', not a number"),
        ("1,0,5\n2,0,\n", "row 2: took is '', not a number"),
        ("1,0,5\n2,0,nan\n", "row 2: took is 'nan', not a duration"),
        ("1,0,-5\n", "row 1: took is '-5', not a duration"),
        ("1,0,1e12\n", "not a duration in ms (it is over 53 days"),
        ("1.5,0,5\n", "row 1: step is '1.5', not the number of a step"),
        ("1,,5\n", "row 1: worker is '', not a rank"),
        ("1,0,5\n1,1,5\n2,-5,5\n2,1,5\n", "row 3: worker is '-5', not the number of a rank, as others are"),
        ("1,0,5\n1,1,5\n2,0,5\n2,nan,5\n", "row 4: worker is 'nan', not the number of a rank, as others are"),
        ("1,x,5\n1,1,5\n2,0,5\n2,1,5\n", "row 1: worker is 'x', not the number of a rank, as others are"),
        ("1,0,5\n1,1.5,5\n", "row 2: worker is '1.5', not the number of a rank, as others are"),
        ("1,0,1e308\n", "row 1: took is '1e308', not a duration"),
        ("1,0,5\n2,0\n", "row 2 at byte 23: CSV parse error: Expected 3 columns, got 2"),
        ("1,0,5\n2,0,6\n2,0\n", "row 3 at byte 29: CSV parse error: Expected 3 columns, got 2"),  # not row 2
        ("", "has no rows"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_files_that_make_no_sense_are_refused(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str], rows: str, message: str
) -> None:
    path = tmp_path / "times.csv"
    path.write_text("step,worker,took\n" + rows)
    assert main(["import", "iterations", str(path), *OPTIONS, "--store", url]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown
    # Nothing is half stored.
    assert stored(url, "SELECT (SELECT count() FROM iterations), (SELECT count() FROM jobs)") == [(0, 0)]


def test_column_that_lacks_is_named(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(tmp_path / "times.csv", steady(2, 12))
    wrong = ["--rank-column", "gpu", "--step-column", "step", "--duration-column", "took", "--store", url]
    assert main(["import", "iterations", str(path), *wrong]) == 2
    shown = capsys.readouterr().err
    assert "has no column 'gpu'" in shown
    assert "step, worker, took" in shown
    assert main(["import", "iterations", str(tmp_path / "none.csv"), *OPTIONS, "--store", url]) == 2


@pytest.mark.thorough(first=2)
@pytest.mark.parametrize(("ranks", "noise"), [(2, 0.02), (4, 0.05), (10, 0.02), (64, 0.1)])
def test_healthy_jobs(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str], ranks: int, noise: float) -> None:
    found = judged(tmp_path, url, steady(ranks, 150, noise), capsys)
    assert (found["status"], found["findings"], found["slowdown"]) == ("healthy", [], 1.0)


def test_rank_that_becomes_slow_is_an_event(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    times = steady()
    times[6, 120:] *= 1.3
    found = judged(tmp_path, url, times, capsys)
    (one,) = found["findings"]
    assert (found["status"], one["kind"], one["ranks"]) == ("degraded", "compute_straggler", [6])
    assert abs(one["steps"][0] - 120) <= 2
    assert one["slowdown"] == pytest.approx(1.3, abs=0.03)


def test_ranks_that_become_slow_one_after_the_other(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    times = steady()
    times[3, 60:] *= 1.2
    times[[5, 7], 140:] *= 1.5
    found = judged(tmp_path, url, times, capsys)
    assert [(one["ranks"], round(one["steps"][0], -1)) for one in found["findings"]] == [([5, 7], 140), ([3], 60)]


def test_nearly_half_of_the_ranks_slow_at_the_end_do_not_hide_each_other(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    times = steady()
    times[[0, 1]] *= 1.1
    times[6:, 170:] *= 1.27
    found = judged(tmp_path, url, times, capsys)
    assert [one["ranks"] for one in found["findings"]] == [[6, 7, 8, 9], [0, 1]]
    assert found["findings"][1]["steps"][0] == 0
    assert "a constant difference, not an event" in found["findings"][1]["evidence"][0]["text"]


def test_ranks_that_differ_all_along_are_no_event(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    times = steady() * np.linspace(0.8, 1.1, 10)[:, None]
    found = judged(tmp_path, url, times, capsys)
    assert (found["status"], found["findings"]) == ("healthy", [])
    assert "ranks differ by a constant, from the first step to the last: rank 9 takes 1.3" in found["reason"]


@pytest.mark.thorough(first=1)
@pytest.mark.parametrize("slower", [4, 5, 3])
def test_two_kinds_of_machines_are_no_stragglers(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str], slower: int
) -> None:
    times = steady(8, 150, 0.01)
    times[:slower] *= 1.3
    found = judged(tmp_path, url, times, capsys)
    assert (found["status"], found["findings"]) == ("healthy", [])
    assert "ranks differ by a constant" in found["reason"]


def test_ranks_that_wait_for_one_another_cannot_be_distinguished(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    times = np.repeat(steady(1, 150, 0.05), 8, axis=0)
    found = judged(tmp_path, url, times, capsys)
    assert (found["status"], found["findings"]) == ("inconclusive", [])
    assert "a slow one would not show" in found["reason"]


def test_one_column_is_not_two(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "times.csv"
    path.write_text("step,worker,took,took\n1,0,5,6\n")
    assert main(["import", "iterations", str(path), *OPTIONS, "--store", url]) == 2
    assert "has the column 'took' twice" in capsys.readouterr().err
    same = ["--rank-column", "step", "--step-column", "step", "--duration-column", "took", "--store", url]
    assert main(["import", "iterations", str(path), *same]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_rank_that_recovered_is_reported(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    times = steady()
    times[2, 50:90] *= 1.5
    found = judged(tmp_path, url, times, capsys)
    assert found["status"] == "healthy"
    assert "rank 2 was slow in steps 50 to 89 (up to 1." in found["reason"]
    assert "x, which cost it the time of 19." in found["reason"]


def test_short_episode_is_mentioned_beside_a_finding(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    times = steady(10, 240)
    times[6, 40:49] *= np.linspace(1.4, 2.4, 9)
    times[2, 150:] *= 1.3
    found = judged(tmp_path, url, times, capsys)
    assert [one["ranks"] for one in found["findings"]] == [[2]]
    assert "rank 6 was slow in steps 40 to 48 (up to 2.3" in found["reason"]


def test_rank_that_is_slow_now_and_then_is_reported_whatever_it_costs(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    times = steady(8, 200)
    # Its own spread, of steps three times as long, is no reason to doubt them: no other rank has any.
    times[5, 60:] *= np.where(np.random.default_rng(1).random(140) < 0.3, 3.0, 1.0)
    (one,) = judged(tmp_path, url, times, capsys)["findings"]
    assert (one["kind"], one["ranks"]) == ("jitter", [5])
    assert 60 <= one["steps"][0] < 75


def test_noisy_rank_that_is_always_slow_is_no_jitter(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    times = 100 * np.exp(0.25 * np.random.default_rng(3).standard_normal((16, 100)))
    times[4] *= 1.25
    (one,) = judged(tmp_path, url, times, capsys)["findings"]
    assert (one["kind"], one["ranks"]) == ("compute_straggler", [4])


@pytest.mark.thorough
def test_recovered_rank_is_reported_beside_checkpoints(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    times = steady(4, 100)
    times[2, 20:50] *= 1.5
    times[:, ::20] *= 3
    found = judged(tmp_path, url, times, capsys)
    assert found["status"] == "healthy"
    assert "whose they are was not determined: step times that are alike on all ranks do not show" in found["reason"]
    assert "rank 2 was slow in steps 20 to 49" in found["reason"]


def test_all_ranks_slower_are_a_regression(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    times = steady()
    times[:, 100:] *= 1.4
    found = judged(tmp_path, url, times, capsys)
    (one,) = found["findings"]
    assert (one["kind"], one["ranks"], one["steps"][0]) == ("regression", [], 100)
    text = one["evidence"][0]["text"]
    assert text.endswith("100% of the ranks; step times that are alike on all ranks do not show who is behind it: "
                         "import timers (--phase)")  # fmt: skip


def test_few_steps_or_one_rank_are_inconclusive(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert judged(tmp_path, url, steady(4, 9), capsys)["status"] == "inconclusive"
    assert judged(tmp_path, url, steady(1, 50), capsys)["status"] == "inconclusive"


@reference
def test_published_jobs(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Alibaba's words: in job 2 "different workers have different mini-batch times", which "seems stable during the
    training process"; in job 3 "there could be multiple stragglers"."""
    options = [
        "--rank-column",
        "worker",
        "--step-column",
        "time",
        "--duration-column",
        "batch_time_norm",
        "--store",
        url,
    ]
    for name in ("job_2", "job_3"):
        assert main(["import", "iterations", str(DATA / f"{name}_norm.csv"), *options, "--job", name]) == 0
    second, third = (verdict(url, name, capsys) for name in ("job_2", "job_3"))
    assert (second["status"], second["findings"]) == ("healthy", [])
    assert "differ by a constant, from the first step to the last" in second["reason"]
    assert third["status"] == "degraded"
    always = [one for one in third["findings"] if one["steps"][0] == 1]
    assert [one["ranks"] for one in always] == [[0, 1]]
    late = [one for one in third["findings"] if one["steps"][0] > 2000]
    assert sorted(rank for one in late for rank in one["ranks"]) == [6, 7, 8, 9]
    assert len(always) + len(late) == len(third["findings"])
