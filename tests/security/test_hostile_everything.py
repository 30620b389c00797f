"""``scripts/hostile`` for a moment: what Argus says of honest jobs is the same beside hostile processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.alone  # verdicts of jobs that other tests disturb differ
@pytest.mark.kernel
def test_honest_jobs_are_the_same_beside_hostile_processes(fakegpu: Path) -> None:
    words = ["--minutes", "0.4", "--alone", "0.3", "--json"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "hostile.py"), *words], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == []
    assert all(honest["launches"][0] > 0 for honest in found["beside"]["honest"].values())
    assert found["beside"]["hostile_losses"], "they did attack"
