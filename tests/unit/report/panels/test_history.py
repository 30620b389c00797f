"""The panel of a job class: its runs in order, the baseline's, and where the environment changed."""

from __future__ import annotations

import numpy as np
import pytest

from argus.diagnose.learn import keep, put
from argus.diagnose.read.profile import read_class, read_profile
from argus.report.build import build_page
from argus.report.panel import Panel
from argus.store.open import Store
from argus.store.reader import query_columns
from argus.store.writer import Writer
from tests.unit.report.conftest import Made

T0 = 1_700_000_000
MS = 1_000_000


def write_run(store: Store, job: str, run: int, step_ms: float, *, ranks: int = 2, digest: int = 7) -> None:
    """30 steps of some ranks, each as long."""
    rank, step = np.repeat(np.arange(ranks), 30), np.tile(np.arange(30), ranks)
    began = (T0 + run) * 10**9
    with Writer(store, source="test") as writer:
        writer.append("jobs", {
            "job": job, "run": run, "host": "n", "started": began, "ended": began + 10**9, "world_size": ranks,
            "launcher": "test", "mono_offset_ns": 0, "argus_version": "0",
            "version": 1,
        })  # fmt: skip
        writer.append("iterations", {
            "job": job, "run": run, "rank": rank, "step": step, "host": "n",
            "ts": began + step * int(step_ms * MS), "duration_ns": int(step_ms * MS), "method": "test",
            "collectives": 1, "launches": 1,
            "confidence": 1.0,
        })  # fmt: skip
        writer.append("environments", {
            "job": job, "run": run, "rank": np.arange(ranks), "host": "n", "pid": 1, "ts": began,
            "facts": [{"torch.version": str(digest)}] * ranks, "digest": digest, "version": 1,
        })  # fmt: skip
        assert writer.flush(), writer.last_error


def learn(store: Store, job: str, run: int, step_ms: float) -> None:
    ident = read_class(lambda sql, params: query_columns(store, sql, params), job, run)
    put(store, {
        "class": ident, "job": job, "run": run, "profile": "{}", "step_ns": step_ms * MS, "step_error_ns": 0.0,
        "steps": 30, "source": "healthy", "removed": 0,
    })  # fmt: skip


def history(store: Store, job: str, run: int) -> tuple[Made, Panel]:
    made = Made(store, *build_page(store, job, run))
    return made, made.panel("history")


def test_runs_of_a_class_are_in_order(store: Store) -> None:
    for run, step_ms in ((11, 40.0), (12, 42.0), (13, 41.0)):
        write_run(store, f"llama-2026112{run % 10}", run, step_ms)
        learn(store, f"llama-2026112{run % 10}", run, step_ms)
    write_run(store, "llama-20261124", 14, 50.0, digest=8)
    write_run(store, "llama-20261125", 15, 9.0, ranks=1)  # of another size
    write_run(store, "llama-long-20261126", 16, 1.0)  # another job
    made, panel = history(store, "llama-20261124", 14)
    assert not panel["absent"]
    view = panel["views"][0]
    assert view["view"] == "series"
    typical, learned, low, high = (made.array(line["y"]) / MS for line in view["lines"])
    np.testing.assert_allclose(typical, [40, 42, 41, 50])
    np.testing.assert_allclose([learned[0], low[0], high[0]], [41, 40, 42])
    assert made.array(view["x"]).tolist() == [1, 2, 3, 4]
    assert [(mark["step"], mark["text"]) for mark in view["marks"]] == [
        (4, "this run"), (4, "another environment than the run before"),
    ]  # fmt: skip
    assert "4 runs" in panel["lead"]
    assert "22.0% longer than that of its 3 baselines" in panel["lead"]
    assert "1 run with another number of ranks, or another mesh, left out" in panel["lead"]
    assert panel["table"] is not None
    assert [row[0] for row in panel["table"]["rows"]] == [14, 13, 12, 11]
    assert [row[-2:] for row in panel["table"]["rows"]] == [["", "changed"], ["yes", ""], ["yes", ""], ["yes", ""]]
    # What the panel's SQL answers are the numbers of the picture.
    answer = query_columns(store, panel["sql"][0]["text"])
    kept = answer["ranks"] == 2
    np.testing.assert_allclose(answer["step_ns"][kept] / MS, typical)
    for sql in panel["sql"]:
        query_columns(store, sql["text"])


def test_the_newest_runs_and_the_one_that_is_shown(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from argus.report.panels import history as module

    monkeypatch.setattr(module, "_RUNS", module._RUNS.replace(f"LIMIT {module.RUNS}", "LIMIT 2"))
    monkeypatch.setattr(module, "RUNS", 2)
    for run in (11, 12, 13, 14):
        write_run(store, "job", run, 40.0)
    _, panel = history(store, "job", 11)
    assert panel["table"] is not None
    assert [row[0] for row in panel["table"]["rows"]] == [14, 13, 11]
    assert "3 healthy runs make a baseline; 0 are there" in panel["lead"]
    assert "the newest 2 runs are looked at" in panel["lead"]
    assert panel["views"][0]["view"] == "series"
    assert len(panel["views"][0]["lines"]) == 1


def test_runs_of_another_mesh_are_left_out(store: Store) -> None:
    for run, dimension in ((11, "dp"), (12, "tp"), (13, "dp"), (14, "")):
        write_run(store, "job", run, 40.0)
        if dimension:
            with Writer(store, source="test") as writer:
                writer.append("parallel_groups", {
                    "job": "job", "run": run, "host": "n", "comm_group": 5, "dimension": dimension, "ranks": [[0, 1]],
                    "nranks": 2, "confidence": 1.0, "why": "", "version": 1, "superseded": 0,
                })  # fmt: skip
                assert writer.flush(), writer.last_error
    _, panel = history(store, "job", 13)
    assert panel["table"] is not None
    assert [row[0] for row in panel["table"]["rows"]] == [14, 13, 11]
    assert "1 run with another number of ranks, or another mesh, left out" in panel["lead"]


def test_runs_of_other_users_are_left_out(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from argus.report.panels import history as module

    monkeypatch.setattr(module, "_RUNS", module._RUNS.replace(f"LIMIT {module.RUNS}", "LIMIT 2"))
    for run, uid in ((11, 1000), (12, 1000), (13, -1), (14, 1001), (15, 1001)):
        write_run(store, "job", run, 40.0)
        learn(store, "job", run, 40.0)
        with Writer(store, source="test") as writer:
            writer.append("ranks", {
                "job": "job", "run": run, "rank": 0, "host": "n", "pid": [4], "local_rank": 0, "rank_source": "test",
                "started": T0, "exe": "", "command": "", "libraries": [[]], "probes": 1, "state": "exited",
                "version": 1, "uid": uid,
            })  # fmt: skip
    for shown, runs in ((12, [12, 11]), (15, [15, 14])):
        _, panel = history(store, "job", shown)
        assert panel["table"] is not None
        assert [(row[0], row[-2]) for row in panel["table"]["rows"]] == [(run, "yes") for run in runs]
        assert panel["lead"].endswith(" Runs of other users are left out.")
        for sql in panel["sql"]:
            query_columns(store, sql["text"])
    assert history(store, "job", 13)[1]["absent"], "whose it is is not known"


def test_runs_whose_name_another_user_had_first_are_of_the_same_class(store: Store) -> None:
    """A trace then stores them under another name: whoever comes first would take a user's history away."""
    runs = (("llama", 11, 1000), ("llama#2", 12, 1000), ("llama#uid1000", 13, 1000), ("llama", 12, 65534))
    runs += (("llama", 14, 1000), ("llama#uid1000", 15, 1000), ("llama-4711#uid1000", 16, 1000), ("llama", 16, 65534))
    for job, run, uid in runs:
        write_run(store, job, run, 40.0)
        learn(store, job, run, 40.0)
        with Writer(store, source="test") as writer:
            writer.append("ranks", {
                "job": job, "run": run, "rank": 0, "host": "n", "pid": [4], "local_rank": 0, "rank_source": "test",
                "started": T0, "exe": "", "command": "", "libraries": [[]], "probes": 1, "state": "exited",
                "version": 1, "uid": uid,
            })  # fmt: skip
    for job, run in (("llama-4711#uid1000", 16), ("llama", 14)):
        _, panel = history(store, job, run)
        assert panel["table"] is not None
        rows = [(row[1], row[0], row[-2]) for row in panel["table"]["rows"]]
        assert rows == [(of, number, "yes") for of, number, uid in reversed(runs) if uid == 1000]
    _, panel = history(store, "llama", 16)
    assert panel["table"] is not None
    assert [(row[1], row[0]) for row in panel["table"]["rows"]] == [("llama", 16), ("llama", 12)]


def test_a_run_without_others_says_so(store: Store) -> None:
    write_run(store, "alone", 11, 40.0)
    _, panel = history(store, "alone", 11)
    assert panel["absent"] == "it is the only run of this job class (name without ids, ranks, mesh) that is stored"


def test_step_times_are_beside_those_of_the_baseline(store: Store) -> None:
    for run, step_ms in ((11, 40.0), (12, 41.0), (13, 42.0), (14, 43.0)):
        write_run(store, "job", run, step_ms)
        if run < 14:
            keep(store, read_profile(lambda sql, params: query_columns(store, sql, params), "job", run), "set")
    made, _ = history(store, "job", 14)
    lines = {line["title"]: line for line in made.view("steps")["lines"]}
    healthy = made.array(lines["3 healthy runs of this job class"]["y"])
    np.testing.assert_allclose(healthy, 41.0 * MS, rtol=1e-6)
