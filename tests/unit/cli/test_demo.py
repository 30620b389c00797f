"""``argus demo``: what counts as right."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner

from argus.cli.demo import command, found
from argus.diagnose.verdict import Verdict
from argus.model.errors import ArgusError
from argus.simulate.faults import parse


@pytest.mark.parametrize(
    ("findings", "right"),
    [
        ([("gc_pause", [3])], True),
        ([("gc_pause", [2, 3])], True),
        ([("gc_pause", [2])], False),
        ([("data_loading", [3]), ("gc_pause", [3])], False),
        ([], False),
    ],
)
def test_the_first_finding_counts(findings: list[tuple[str, list[int]]], right: bool) -> None:
    verdict = cast("Verdict", {"findings": [{"kind": kind, "ranks": ranks} for kind, ranks in findings]})
    assert found(verdict, parse("gc_pause:ranks=3")) is right


def test_a_spool_cannot_be_diagnosed(tmp_path: Path) -> None:
    result: Any = CliRunner().invoke(command, ["--store", f"spool://{tmp_path}/spool"])
    assert isinstance(result.exception, ArgusError)
    assert "is a spool" in result.exception.message
