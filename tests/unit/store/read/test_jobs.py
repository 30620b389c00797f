"""``argus jobs`` and ``argus store rm``: what was traced, and the removal of one job and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from argus.cli.main import main
from argus.cli.selection import parse_runs
from argus.model.errors import EXIT_UNAVAILABLE, EXIT_USAGE
from argus.model.units import narrow
from argus.store.open import Store, open_store
from argus.store.read.jobs import list_job_runs
from argus.store.reader import query, query_columns
from argus.store.writer import Writer
from tests.stores import new_store

T0 = 1_700_000_000_000_000_000
S = 10**9
MS = 10**6
RUNS = (("llama", 7, 4), ("llama", 9, 4), ("o'brien `x`", 7, 2), ("o'brien `x`", 8, 2))


def session(job: str, run: int, **more: Any) -> dict[str, Any]:
    return {
        "job": job, "run": run, "host": "node-0", "started": [T0 + run * 100 * S], "ended": [T0 + (run * 100 + 62) * S],
        "world_size": 4, "launcher": "torchrun", "mono_offset_ns": 0, "argus_version": "0", "version": 1, **more,
    }  # fmt: skip


def write(store: Store) -> None:
    with Writer(store, source="test") as writer:
        for job, run, ranks in RUNS:
            of_run: dict[str, Any] = {"job": job, "run": run, "host": "node-0"}
            ended: dict[str, Any] = {"ended": None} if (job, run) == ("llama", 9) else {}
            writer.append("jobs", session(job, run, **ended))
            every = [(rank, step) for rank in range(ranks) for step in range(20)]
            writer.append("iterations", {
                **of_run, "rank": [rank for rank, _ in every], "step": [step for _, step in every],
                "ts": [T0 + run * 100 * S + step * S for _, step in every], "collectives": 1, "launches": 2,
                "method": "test", "duration_ns": run * 10 * MS, "confidence": 1.0,
            })  # fmt: skip
            for version in (1, 2):
                writer.append("ranks", {
                    **of_run, "rank": range(ranks), "pid": range(100, 100 + ranks), "local_rank": range(ranks),
                    "rank_source": "torchrun", "started": T0, "exe": "python", "command": "train.py",
                    "libraries": [[]] * ranks, "probes": 1, "state": "traced", "version": version,
                })  # fmt: skip
        for at, (status, kind, ranks_of) in enumerate(
            (("healthy", "", []), ("degraded", "data_loading", [3]), ("degraded", "jitter", [1]))
        ):
            writer.append("findings", {
                "job": "llama", "run": 9, "created": [T0 + min(at, 1) * S], "status": status, "kind": kind,
                "ranks": [ranks_of], "hosts": [[]], "step_from": 0, "step_to": 19, "phase": "", "slowdown": 1.2,
                "share": 0.9 - at / 10, "confidence": 0.9, "evidence": "{}", "action": "",
            })  # fmt: skip
        writer.append("health", {
            "host": "node-0", "ts": T0, "kind": "x", "check": ["xid"], "status": "ok", "text": "", "hint": "",
            "facts": [{}], "duration_ns": 1,
        })  # fmt: skip
        assert writer.flush(), writer.last_error


LATER = ("environments", "parallel_layout")
"""Tables that a test fills itself."""


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """One engine for all tests: starting one takes long on a busy machine."""
    with open_store(new_store(tmp_path_factory.mktemp("jobs"))) as store, store.lease():
        yield store


@pytest.fixture
def store(opened: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("ARGUS_STORE", opened.url)
    with opened.lease() as client:
        for table in ("jobs", "ranks", "iterations", "iteration_rollup", "findings", "health", *LATER):
            client.command(f"TRUNCATE TABLE {table}")
    write(opened)
    return opened


def rows(store: Store) -> dict[tuple[str, str, int], int]:
    """Rows by table, job and run; of tables without a job all."""
    found: dict[tuple[str, str, int], int] = {}
    for table in ("jobs", "ranks", "iterations", "iteration_rollup", "findings"):
        for row in query(store, f"SELECT job, run, count() AS n FROM {table} GROUP BY job, run").to_pylist():
            found[table, row["job"], row["run"]] = row["n"]
    found["health", "", 0] = int(query_columns(store, "SELECT count() AS n FROM health")["n"][0])
    return found


def test_jobs_are_listed_newest_first(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    runs = list_job_runs(store)
    assert [(one.job, one.run) for one in runs] == [("llama", 9), RUNS[3][:2], ("llama", 7), RUNS[2][:2]]
    newest = runs[0]
    assert (newest.ranks, newest.world_size, newest.hosts, newest.open) == (4, 4, 1, True)
    assert (newest.steps, newest.step_ns) == (20, 90 * MS)
    assert (newest.status, newest.kind, newest.finding_ranks) == ("degraded", "data_loading", [3])
    assert runs[2].ended_ns - runs[2].started_ns == 62 * S
    assert main(["jobs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "job",
        "run",
        "ranks",
        "hosts",
        "started",
        "(UTC)",
        "took",
        "steps",
        "a",
        "step",
        "verdict",
    ]
    assert lines[1].split() == [
        "llama", "9", "4", "1", "2023-11-14", "22:28:20", "19s+", "20", "90.0", "ms", "degraded:", "data", "loading",
        "of", "rank", "3",
    ]  # fmt: skip
    assert lines[2].split()[3:5] == ["2/4", "1"], "two of four ranks were seen"
    assert lines[3].split()[6] == "1m02s"
    assert lines[3].split()[-1] == "-"


def test_jobs_are_chosen_by_name(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["jobs", "ll*", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "argus.jobs/1"
    assert [(one["job"], one["run"]) for one in found["jobs"]] == [("llama", 9), ("llama", 7)]
    assert main(["jobs", "bert"]) == 3
    assert "Stored are: llama, o'brien `x`" in capsys.readouterr().err


def test_nothing_stored_is_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["jobs"], ["store", "rm", "x", "--yes"]):
        assert main([*words, "--store", f"chdb://{tmp_path}/none"]) == 3
        assert "nothing is stored yet" in capsys.readouterr().err


@pytest.mark.parametrize("run", [None, 7])
def test_a_job_is_removed_and_nothing_else(store: Store, run: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    job = RUNS[2][0]
    before = rows(store)
    words = ["--yes"] + ([] if run is None else ["--run", str(run)])
    assert main(["store", "rm", job, *words]) == 0
    out = capsys.readouterr().out
    gone = {key: count for key, count in before.items() if key[1] == job and run in (None, key[2])}
    assert len({table for table, *_ in gone}) == 4
    assert rows(store) == {key: count for key, count in before.items() if key not in gone}
    assert (
        f"removed job {job}, {'all runs' if run is None else 'run 7'}: {sum(gone.values()):,} rows of 4 tables" in out
    )
    assert out.splitlines()[0].split() == ["iteration_rollup", str(20 * (2 if run is None else 1))]


LONG = "long" * 750


@pytest.mark.parametrize(
    "words",
    [
        ["compare", LONG],
        ["compare", "new\nline"],
        ["compare", "llama", "--against", f"{LONG}@3"],
        ["compare", "llama@new\nline"],
        ["baseline", "list", LONG],
        ["jobs", "new\nline"],
        ["diagnose", "--job", "new\nline"],
        ["export", "svg", "--job", LONG],
        ["store", "rm", LONG, "--yes"],
    ],
)
def test_names_in_messages_are_a_line_and_short(
    store: Store, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with Writer(store, source="test") as writer:
        writer.append("jobs", session(f"{LONG} stored", 3))
    assert main([*words, "--store", store.url]) in (EXIT_USAGE, EXIT_UNAVAILABLE)
    lines = capsys.readouterr().err.splitlines()
    assert [line[:7] for line in lines] in (["argus: ", " " * 7], ["argus: "]), lines
    assert max(map(len, lines)) < 400


def test_a_long_name_leaves_room_for_the_other_columns(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    with Writer(store, source="test") as writer:
        writer.append("jobs", session(LONG, 3))
    assert main(["jobs", "--store", store.url]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) < 300
    assert main(["jobs", "--store", store.url, "--format", "json"]) == 0
    assert LONG in capsys.readouterr().out


def test_more_runs_than_there_are(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_runs(store, ("llama@last:99",)) == [("llama", 9), ("llama", 7)]
    assert capsys.readouterr().err == "argus: job 'llama' has 2 runs, not 99: all are taken\n"
    assert parse_runs(store, ("llama@last:2",)) == [("llama", 9), ("llama", 7)]
    assert capsys.readouterr().err == ""


def test_without_a_yes_nothing_is_removed(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    before = rows(store)
    assert main(["store", "rm", "llama"]) == 2
    err = capsys.readouterr().err
    assert "nothing was removed" in err
    assert "--yes" in err
    assert "run 9 has no end: a trace that goes on will write more" in err
    for words, why in ((["bert"], "no job 'bert'"), (["llama", "--run", "8"], "job 'llama' has no run 8")):
        assert main(["store", "rm", "--yes", *words]) == 3
        assert why in capsys.readouterr().err
    assert rows(store) == before


def test_on_a_terminal_it_asks(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def confirm(text: str, *, abort: bool) -> None:
        asked.append(text)
        raise click.Abort

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(click, "confirm", confirm)
    before = rows(store)
    assert main(["store", "rm", "llama", "--run", "7"]) == 130
    assert re.match(r"Remove \d+ rows of job llama, run 7 from chdb://", asked[0])
    assert rows(store) == before


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59, "59s"), (62, "1m02s"), (3720, "1h02m"), (180000, "2d02h"), (-5, "0s")]
)
def test_times_for_people(seconds: int, text: str) -> None:
    assert narrow(seconds) == text


def test_every_table_of_jobs_has_runs(store: Store) -> None:
    """What is removed is found by both columns. Names of nodes are of no job, and expire."""
    found = query(
        store,
        "SELECT table FROM system.columns WHERE database = currentDatabase() AND name IN ('job', 'run')"
        " GROUP BY table HAVING count() = 1",
    )
    assert found.column("table").to_pylist() == ["host_names"]


@pytest.mark.parametrize(
    ("words", "runs"),
    [
        (["--verdict", "degraded"], [9]),
        (["--verdict", "degraded", "--verdict", "healthy"], [9]),
        (["--user", "nobody-here"], []),
        (["--limit", "1"], [9]),
        (["--since", "1999-01-01T00:00:00", "--limit", "2"], None),
        (["--since", "2199-01-01T00:00:00"], []),
    ],
)
def test_runs_are_chosen(
    store: Store, capsys: pytest.CaptureFixture[str], words: list[str], runs: list[int] | None
) -> None:
    assert main(["jobs", "--format", "json", *words]) == 0
    listed = json.loads(capsys.readouterr().out)["jobs"]
    if runs is not None:
        assert [one["run"] for one in listed] == runs
    else:
        assert len(listed) == 2


def test_environment_mesh_and_user_have_columns_where_they_are_known(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["jobs"]) == 0
    assert not {"mesh", "environment"} & {*capsys.readouterr().out.splitlines()[0].split()}
    with Writer(store, source="test") as writer:
        for run, digests in ((9, [5, 5]), (7, [5, 6])):
            writer.append(
                "environments",
                {
                    "job": "llama", "run": run, "rank": np.arange(2, dtype=np.uint32), "host": "n", "pid": 1,
                    "ts": np.zeros(2, np.int64), "facts": [{}, {}], "digest": np.array(digests, np.uint64),
                    "version": 1,
                },
            )  # fmt: skip
        writer.append(
            "parallel_layout",
            {
                "job": "llama", "run": 9, "dp": 4, "pp": 2, "tp": 1, "sp": 1, "vpp": 1, "world_size": 8,
                "source": "test", "version": np.array([1], np.uint64),
            },
        )  # fmt: skip
        assert writer.flush(20), writer.last_error
    known = {one.run: one for one in list_job_runs(store) if one.job == "llama"}
    assert known[9].mesh == "4x2x1"
    assert len(known[9].environment) == len(known[7].environment) == 8
    assert known[9].environment != known[7].environment
    assert main(["jobs", "llama"]) == 0
    head, newest = capsys.readouterr().out.splitlines()[:2]
    assert {"mesh", "environment"} <= {*head.split()}
    assert {"4x2x1", known[9].environment} <= {*newest.split()}


def test_the_mesh_of_a_trace_is_that_of_its_communicators(store: Store) -> None:
    with Writer(store, source="test") as writer:
        names = ("world", "tp", "tp", "dp", "dp", "unknown", "ep")
        writer.append(
            "parallel_groups",
            {
                "job": "llama", "run": 7, "host": ["n", "n", "m", "n", "m", "n", "n"],
                "comm_group": np.array([1, 2, 3, 4, 4, 5, 6], np.uint64),
                "dimension": list(names),
                "ranks": [[0, 1], [0, 1], [2, 3], [0, 1], [2, 3], [0], [0]],
                "nranks": np.array([32, 2, 2, 16, 16, -1, -1], np.int32), "confidence": 0.9, "why": "test",
                "version": 1, "superseded": 0,
            },
        )  # fmt: skip
        assert writer.flush(20), writer.last_error
    known = {one.run: one.mesh for one in list_job_runs(store) if one.job == "llama"}
    assert known[7] == "dp 16 x tp 2"
    assert not known[9]
