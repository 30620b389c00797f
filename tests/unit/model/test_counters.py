"""Every loss in words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from argus.model.counters import SENTENCES, describe, describe_all


def test_every_loss_counter_of_the_docs_has_a_sentence() -> None:
    text = (Path(__file__).parents[3] / "docs" / "trace.md").read_text()
    named = {
        name
        for cells in (line.split("|") for line in text.splitlines())
        if len(cells) > 3 and cells[2].strip() == "yes" and re.fullmatch(r" [a-z_, ]+ ", cells[1])
        for name in cells[1].strip().split(", ")
        if "_" in name
    }
    assert len(named) > 40
    assert named - SENTENCES.keys() == set()


@pytest.mark.parametrize("value", [1, 2, 12_345])
def test_numbers_and_plurals(value: int) -> None:
    for name in SENTENCES:
        sentence = describe(name, value)
        assert not re.search(r"[][{}|]|_", sentence.replace("--", "")), sentence
        assert "{n}" not in SENTENCES[name] or f"{value:,}" in sentence


def test_one_and_many() -> None:
    assert describe("processes_probed_late", 1) == "1 process probed after its first calls"
    assert describe("processes_probed_late", 2) == "2 processes probed after their first calls"
    assert describe("rows_dropped_launches", 1) == "1 row of the table launches lost: the store did not take it"
    assert describe("a_new_counter", 1234) == "a_new_counter 1,234"
    assert describe_all({"b_new": 1, "a_new": 2}) == "a_new 2; b_new 1"
