"""docs/security.md: each promise names a test that is there, in the file that it names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from argus.cli.main import VERBS
from argus.system import privileges
from tests.e2e.verbs import CASES

ROOT = Path(__file__).resolve().parents[2]
_TEST = re.compile(r"(?:\b([\w/]+)::|(…)|\b)(test_\w+)")
"""A test of a file, one of the file that was named before, or a test or a file alone."""


def defined() -> dict[str, set[str]]:
    """The tests of each file, by its path in ``tests`` and, of tests/security, by its name."""
    found = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        place = str(path.relative_to(ROOT / "tests").with_suffix("")).removeprefix("security/")
        found[place] = set(re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE))
    return found


def missing(text: str, files: Mapping[str, set[str]]) -> Iterator[str]:
    """What a page names that is not there."""
    anywhere = {name for names in files.values() for name in names} | {place.split("/")[-1] for place in files}
    before = ""
    for place, continued, name in _TEST.findall(text):
        before = place or before
        if not (name in files.get(before, ()) if place or continued else name in anywhere):
            yield f"{before if place or continued else ''}::{name}"


def test_each_test_that_is_named_exists() -> None:
    text, files = (ROOT / "docs" / "security.md").read_text(), defined()
    assert len(_TEST.findall(text)) > 100
    assert list(missing(text, files)) == []


def test_a_test_that_is_in_another_file_is_missing() -> None:
    files = {"test_a": {"test_x", "test_y"}, "e2e/test_b": {"test_z"}}
    assert list(missing("test_a::test_x, …test_y, e2e/test_b::test_z; `test_z` of test_b", files)) == []
    assert list(missing("test_a::test_z, …test_z, test_b::test_z, test_none", files)) == [
        "test_a::test_z", "test_a::test_z", "test_b::test_z", "::test_none",
    ]  # fmt: skip


def test_each_promise_names_a_test() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    rows = [line for part in text.split("| promise | test |")[1:] for line in part.split("\n\n")[0].splitlines()[2:]]
    assert rows
    assert not [row for row in rows if "test_" not in row]


def test_each_bound_on_traced_processes_names_its_counter() -> None:
    """Or says that there is none."""
    text = (ROOT / "docs" / "security.md").read_text().split("## Traced processes")[1].split("\n## ")[0]
    rows = text.split("| bound | value | beyond it |\n")[1].split("\n\n")[0].splitlines()[1:]
    assert len(rows) > 10
    table = (ROOT / "docs" / "trace.md").read_text().split("## Counters")[1].split("\n## ")[0]
    counters = {
        name.strip() for line in table.splitlines() if line.startswith("| ") for name in line.split("|")[1].split(",")
    }
    for row in rows:
        named = set(re.findall(r"`(\w+)`", row.split("|")[3]))
        assert named <= counters, f"no counter: {named - counters}"
        assert named or "no counter" in row, row


def test_each_verb_is_listed_with_what_it_needs() -> None:
    """In the words of ``argus check``, as they are from Linux 6.6 on."""
    text = (ROOT / "docs" / "security.md").read_text().split("## What each verb touches")[1].split("\n## ")[0]
    lines = text.split("| verb | capabilities |")[1].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[0] for row in rows] == [f"`{verb}`" for verb in VERBS]
    assert {words.split()[0] for words in CASES} == set(VERBS)
    assert all(len(row) == 6 and all(row) for row in rows)
    needs = {verb: names for verbs, names in privileges.of_verbs().items() for verb in verbs.split(", ")}
    for row in rows:
        found = re.findall(r"CAP_\w+", row[1])
        assert found == [name for name in needs.get(row[0].strip("`"), needs["others"]) if name != "CAP_SYS_ADMIN"]
        assert found or row[1].startswith("none"), row
    for words in set(needs) - set(VERBS) - {"others"}:
        assert f"`{words}`" in text, words
