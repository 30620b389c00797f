"""docs/security.md: each promise names a test that is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_each_test_that_is_named_exists() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    named = set(re.findall(r"\btest_\w+", text))
    assert len(named) > 30
    files = list((ROOT / "tests").rglob("test_*.py"))
    there = {path.stem for path in files}
    for path in files:
        there |= set(re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE))
    assert not named - there


def test_each_promise_names_a_test() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    rows = [line for part in text.split("| promise | test |")[1:] for line in part.split("\n\n")[0].splitlines()[2:]]
    assert rows
    assert not [row for row in rows if "test_" not in row]
