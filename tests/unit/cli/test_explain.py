"""``argus explain``: every kind of the contract has its text, and docs/diagnose.md has the same."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest

from argus.cli.main import main
from argus.diagnose.kinds import EXPLANATIONS, STATUSES, explanation
from argus.diagnose.verdict import FINDING_KINDS, json_schema

ROOT = Path(__file__).parents[3]


def test_every_kind_and_status_of_the_contract_is_explained() -> None:
    assert {one.name for one in EXPLANATIONS} == set(FINDING_KINDS)
    assert len(EXPLANATIONS) == len(FINDING_KINDS)
    assert set(STATUSES) == set(json_schema()["properties"]["status"]["enum"])
    for one in EXPLANATIONS:
        for text in (one.means, one.detected, one.evidence, one.do, one.owner):
            assert text.strip() == text != ""
        assert one.means.endswith(".")
        assert one.detected.endswith(".")
        assert one.do.endswith(".")


def test_the_table_of_the_documentation_says_the_same() -> None:
    lines = (ROOT / "docs" / "diagnose.md").read_text().splitlines()
    rows = {line.split("|")[1].strip(" `"): line for line in lines if line.startswith("| `")}
    for one in EXPLANATIONS:
        cells = [cell.strip() for cell in rows[one.name].strip("|").split("|")]
        assert cells == [f"`{one.name}`", one.means, one.evidence, one.do, one.owner]


@pytest.mark.parametrize("words", [["data_loading"], ["data-loading"], ["Data", "loading"], ["DATA_LOADING"]])
def test_a_kind_is_found_however_it_is_spelled(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *words]) == 0
    output = capsys.readouterr().out
    one = explanation("data_loading")
    assert one is not None
    assert output.startswith("data_loading\n")
    for text in (one.means, one.detected, one.evidence, one.do, one.owner):
        assert text in " ".join(output.split())


def test_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    output = capsys.readouterr().out
    assert all(f"\n{name} " in f"\n{output}" for name in (*FINDING_KINDS, *STATUSES))
    assert max(map(len, output.splitlines())) <= 100
    assert main(["explain", "--format", "json"]) == 0
    assert {one["name"] for one in json.loads(capsys.readouterr().out)} == set(FINDING_KINDS)
    assert main(["explain", "inconclusive"]) == 0
    assert capsys.readouterr().out.startswith("inconclusive: ")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("words", [[], ["compute_straggler"], ["healthy"]])
def test_lines_fit_a_terminal(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys, "stdout", shown := Terminal())
    assert main(["explain", *words]) == 0
    assert 40 < max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in shown.getvalue().splitlines()) <= 60


def test_an_unknown_kind_is_answered_with_what_is_near(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "straggler"]) == 2
    assert "Did you mean compute_straggler?" in capsys.readouterr().err
    assert main(["explain", "xyzzy"]) == 2
    assert "There are: compute_straggler, " in capsys.readouterr().err
