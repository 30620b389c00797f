"""Manual pages: one a verb, from the text of --help, in roff that man reads without complaint."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from argus.cli.main import VERBS, cli, main
from argus.cli.man import all_pages, escape
from argus.diagnose.kinds import EXPLANATIONS

MACROS = {"TH", "SH", "SS", "TP", "PP", "B", "BR", "br", "nf", "fi", "nh", "ad"}


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return all_pages()


def test_there_is_a_page_for_each_verb(pages: dict[str, str]) -> None:
    assert set(pages) == {"argus", *(f"argus-{verb}" for verb in VERBS)}


def test_pages_are_plain_roff(pages: dict[str, str]) -> None:
    for name, text in pages.items():
        lines = text.splitlines()
        assert lines[0].startswith(f'.TH "{escape(name.upper())}" "1"')
        assert {".SH NAME", ".SH SYNOPSIS", ".SH DESCRIPTION"} <= set(lines), name
        for line in lines:
            if line.startswith("."):
                assert line[1:].split()[0] in MACROS, (name, line)
            assert line.isascii(), (name, line)
            assert not re.search(r"(?<!\\)-", line.replace('"-"', "")), (name, line)
        assert lines.count(".nf") == lines.count(".fi")


def test_every_option_and_finding_is_there(pages: dict[str, str]) -> None:
    context = cli.make_context("argus", ["--help"], resilient_parsing=True)
    for verb in VERBS:
        command = cli.get_command(context, verb)
        assert command is not None
        for parameter in command.params:
            for word in parameter.opts if parameter.param_type_name == "option" else ():
                assert escape(word) in pages[f"argus-{verb}"], (verb, word)
    for one in EXPLANATIONS:
        assert f".B {one.name}" in pages["argus"]
    assert ".SS argus store rm" in pages["argus-store"]


def test_lines_that_begin_like_a_request_are_text() -> None:
    assert escape(".so /etc/passwd\n'x\na-b\\n") == "\\&.so /etc/passwd\n\\&'x\na\\-b\\en"


def test_they_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["man", "--out", str(tmp_path / "new")]) == 0
    assert len(list((tmp_path / "new" / "man1").glob("argus*.1"))) == len(VERBS) + 1
    assert f"{len(VERBS) + 1} pages" in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    assert main(["man", "--out", str(tmp_path / "file")]) == 2


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_groff_finds_nothing_wrong(pages: dict[str, str]) -> None:
    words = ["groff", "-man", "-Tascii", "-ww", "-z"]
    done = subprocess.run(words, input="\n".join(pages.values()), capture_output=True, text=True, check=True)
    assert done.stderr == ""
