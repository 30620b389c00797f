"""What ``scripts/test`` runs by default leaves no verb out."""

from __future__ import annotations

from argus.cli.main import cli
from tests.e2e.verbs import CASES, commands


def test_the_core_runs_every_command_once() -> None:
    found = commands(cli)  # type: ignore[arg-type]
    assert {"trace", "health", "health report", "import kineto"} <= set(found)
    assert set(CASES) == set(found), "tests/e2e/verbs.py says how each command is run"
