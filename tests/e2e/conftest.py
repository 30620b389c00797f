"""Real processes and the real command line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fakegpu"))

ARGUS = [sys.executable, "-m", "argus.cli.main"]

Argus = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    """An embedded store of the test's own."""
    return f"chdb://{tmp_path}/store"


@pytest.fixture
def argus(store_url: str) -> Argus:
    """Runs ``argus VERB …`` against the test's store and returns what came of it."""

    def run(verb: str, *words: str, timeout: float = 90) -> subprocess.CompletedProcess[str]:
        command = [*ARGUS, verb, *words]
        if verb != "check":
            command += ["--store", store_url]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)

    return run
