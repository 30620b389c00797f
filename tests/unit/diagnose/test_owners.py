"""Who has to act on a finding: the kind's owner, unless this site names another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from argus.cli.main import main
from argus.diagnose import owners
from argus.model.errors import ArgusError


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(owners, "FILE", tmp_path / "owners.toml")
    return tmp_path / "owners.toml"


def test_without_a_file_it_is_the_kinds_owner_or_what_was_derived(file: Path) -> None:
    assert owners.owner_of("host_contention") == "platform"
    assert owners.owner_of("regression", "infrastructure") == "infrastructure"


def test_what_the_site_names_counts_before_both(file: Path) -> None:
    file.write_text('host_contention = "infrastructure"\nregression = "platform"\n')
    assert owners.owner_of("host_contention") == "infrastructure"
    assert owners.owner_of("regression", "infrastructure") == "platform"
    assert owners.owner_of("data_loading") == "data"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('host_contentoin = "data"', "there is no kind of finding 'host_contentoin'"),
        ('hang = "us"', "there is no owner 'us' (of hang)"),
        ('hang = ["data"]', "there is no owner ['data'] (of hang)"),
        ("[hang]", "there is no owner {} (of hang)"),
        ("hang = ", "is no TOML"),
    ],
)
def test_what_there_is_not_is_one_line(file: Path, text: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(text)
    with pytest.raises(ArgusError, match=r"owners\.toml") as raised:
        owners.owner_of("hang")
    assert line in raised.value.message
    assert main(["explain", "hang"]) == raised.value.exit_code
    assert line in capsys.readouterr().err


def test_explain_shows_the_sites_owner(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text('hang = "infrastructure"\n')
    assert main(["explain", "hang", "--format", "json"]) == 0
    assert [one["owner"] for one in json.loads(capsys.readouterr().out)] == ["infrastructure"]
    assert main(["explain", "hang"]) == 0
    assert "infrastructure (GPUs, links and hosts)" in capsys.readouterr().out
