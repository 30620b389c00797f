"""What TAB completes: verbs without importing them, jobs, runs and ranks from the store, and silence on failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from argus.cli import completion
from argus.cli.completion import asked_for, choices, find_names, names_file, refresh
from argus.cli.main import VERBS, main
from argus.store.open import open_store
from argus.store.writer import Writer
from tests.stores import new_store

NAMES = [
    {"job": "llama", "run": 9, "ranks": [0, 1, 10]},
    {"job": "bert", "run": 8, "ranks": [0]},
    {"job": "llama", "run": 7, "ranks": [0, 1]},
]


@pytest.mark.parametrize(
    ("line", "begun", "kind"),
    [
        ("diagnose --job", "", "job"),
        ("export svg --job x --run", "", "run"),
        ("stacks --rank", "1,", "rank"),
        ("jobs", "ll", "job"),
        ("jobs llama", "", "job"),
        ("store rm", "", "job"),
        ("store rm --run", "", "run"),
        ("store rm llama", "", None),
        ("store rm", "--y", None),
        ("jobs", "--f", None),
        ("jobs --format", "", None),
        ("trace --job", "", None),
        ("run -- python --job", "", None),
        ("diagnose", "", None),
        ("", "di", None),
    ],
)
def test_what_stands_at_the_end_of_a_line(line: str, begun: str, kind: str | None) -> None:
    assert asked_for(line.split(), begun) == kind


@pytest.mark.parametrize(
    ("kind", "line", "begun", "expected"),
    [
        ("job", "diagnose --job", "", ["llama", "bert"]),
        ("job", "diagnose --job", "b", ["bert"]),
        ("run", "diagnose --run", "", ["9", "8", "7"]),
        ("run", "diagnose --job llama --run", "", ["9", "7"]),
        ("run", "store rm llama --run", "", ["9", "7"]),
        ("rank", "diagnose --rank", "", ["0", "1", "10"]),
        ("rank", "diagnose --rank", "1", ["1", "10"]),
        ("rank", "diagnose --rank", "0,1", ["0,1", "0,10"]),
        ("rank", "diagnose --job llama --run 7 --rank", "", ["0", "1"]),
        ("rank", "diagnose --job none --rank", "", []),
    ],
)
def test_choices(kind: str, line: str, begun: str, expected: list[str]) -> None:
    assert choices(kind, NAMES, line.split(), begun) == expected


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = new_store(tmp_path)
    with open_store(url) as store, Writer(store, source="test") as writer:
        writer.append("ranks", {
            "job": "llama", "run": 9, "host": "h", "rank": range(2), "pid": range(2), "local_rank": 0,
            "rank_source": "torchrun", "started": 0, "exe": "", "command": "", "libraries": [[]] * 2, "probes": 1,
            "state": "traced", "version": 1,
        })  # fmt: skip
        assert writer.flush()
    return url


def complete(shell: str, line: str, **more: str) -> subprocess.CompletedProcess[str]:
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - (not line.endswith(" ")))}
    environment = {**os.environ, **words, "_ARGUS_COMPLETE": f"{shell}_complete", **more}
    return subprocess.run(
        [sys.executable, "-m", "argus.cli.main"], env=environment, capture_output=True, text=True, check=False
    )


def test_an_engine_that_runs_is_asked_and_what_it_answered_is_kept(
    stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion, "ANSWER_S", 20.0)  # however busy the machine is
    with open_store(stored) as store, store.lease():
        assert find_names(stored) == [{"job": "llama", "run": 9, "ranks": [0, 1]}]
    kept = json.loads(names_file(stored).read_text())
    assert kept == [{"job": "llama", "run": 9, "ranks": [0, 1]}]


def test_where_no_engine_runs_the_names_that_were_kept_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    aside: list[str] = []
    monkeypatch.setattr(completion, "_refresh_aside", aside.append)
    url = f"chdb://{tmp_path}/none"
    completion._write(names_file(url), NAMES)
    os.utime(names_file(url), (0, 0))
    assert find_names(url) == NAMES
    assert aside == [url], "newer ones are fetched for the next time"
    completion._write(names_file(url), NAMES)
    assert find_names(url) == NAMES
    assert aside == [url], "fresh ones are not"


def test_a_refresh_writes_them(stored: str, tmp_path: Path) -> None:
    refresh(stored)
    assert json.loads(names_file(stored).read_text()) == [{"job": "llama", "run": 9, "ranks": [0, 1]}]
    refresh(f"chdb://{tmp_path}/none")
    assert json.loads(names_file(f"chdb://{tmp_path}/none").read_text()) == []


def test_a_shell_gets_its_answer(stored: str) -> None:
    refresh(stored)
    for shell, line in (("bash", "plain,llama"), ("zsh", "plain\nllama\n_")):
        done = complete(shell, "argus diagnose --job l", ARGUS_STORE=stored)
        assert (done.returncode, done.stdout.strip(), done.stderr) == (0, line, "")
    done = complete("bash", "argus diagnose --store " + stored + " --rank ", ARGUS_STORE="")
    assert done.stdout.split() == ["plain,0", "plain,1"]


@pytest.mark.parametrize("store", ["bogus://x", "chdb:///proc/none", "clickhouse://127.0.0.1:1/x"])
def test_a_failure_says_nothing(store: str, tmp_path: Path) -> None:
    done = complete("bash", "argus diagnose --job ", ARGUS_STORE=store, XDG_CACHE_HOME=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_verbs_are_completed_without_being_imported() -> None:
    script = (
        "import sys; from argus.cli.main import main; code = main([]); "
        "heavy = {'numpy', 'pyarrow', 'rich', 'argus.cli.trace', 'argus.cli.sql'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else code)"
    )
    environment = {**os.environ, "COMP_WORDS": "argus ", "COMP_CWORD": "1", "_ARGUS_COMPLETE": "bash_complete"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert {line.partition(",")[2] for line in done.stdout.splitlines()} >= set(VERBS)


@pytest.mark.parametrize(
    ("shell", "words"), [("bash", "complete -o nosort -F"), ("zsh", "#compdef argus"), ("fish", "complete --no-files")]
)
def test_the_scripts(shell: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    assert main(["completion", shell]) == 0
    output = capsys.readouterr().out
    assert words in output
    assert f"_ARGUS_COMPLETE={shell}_complete" in output
