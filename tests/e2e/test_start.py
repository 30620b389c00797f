"""How a trace begins: what it says at once, what it keeps for the next start, and what a failed one leaves behind."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import ARGUS
from tests.lacking import open_terminal

PROGRAM = "import time, pyarrow\nprint('runs', flush=True)\nwhile True:\n    sum(range(20000)); time.sleep(0.01)\n"


@pytest.fixture(scope="module")
def target() -> Iterator[int]:
    """A Python program that maps a large library and computes a little."""
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


@pytest.mark.kernel
def test_it_speaks_at_once_and_logs_what_takes_how_long(target: int, store_url: str, tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "ARGUS_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [*ARGUS, "trace", "--debug", "--pid", str(target), "--duration", "3", "--store", store_url],
        capture_output=True, text=True, env=environment, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second, *others = done.stderr.splitlines()
    assert second == f"argus: attaching to process {target} …"
    assert all(re.fullmatch(r"argus: [a-z][^…]* …", line) for line in others), "stages that took long, and nothing else"
    assert done.stdout.startswith("job "), "standard output has none of it"
    log = Path(first.removeprefix("argus: debug log: "))
    assert log.parent == tmp_path / "state" / "argus"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    at = {text: float(when) for when, _, text in (line.split(" ", 2) for line in log.read_text().splitlines())}
    stages = [f"start: {stage}" for stage in ("targets found", "programs loaded", "probes attached", "store open")]
    assert sorted(stages, key=at.__getitem__) == stages
    assert {"start: stacks sampled", "stored: first rows of jobs", "stored: first rows of ranks"} <= at.keys()
    assert at["stored: first rows of jobs"] - at["start: probes attached"] < 60
    entries = list((tmp_path / "cache" / "symbols").iterdir())
    assert entries, "libarrow's names are many megabytes"
    assert all(stat.S_IMODE(entry.stat().st_mode) == 0o600 for entry in entries)


@pytest.mark.kernel
def test_on_a_terminal_the_line_is_wiped_away(target: int, store_url: str) -> None:
    ours, theirs = open_terminal()
    with subprocess.Popen(
        [*ARGUS, "trace", "--pid", str(target), "--duration", "0.5", "--store", store_url],
        stdout=subprocess.PIPE, stderr=theirs, text=True,
    ) as tracing:  # fmt: skip
        os.close(theirs)
        drawn = b""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                more = os.read(ours, 4096)
            except OSError:
                break
            if not more:
                break
            drawn += more
        os.close(ours)
        assert tracing.stdout is not None
        assert tracing.stdout.read().startswith("job ")
    assert tracing.returncode == 0
    assert drawn.startswith(f"\r\x1b[Kattaching to process {target} …".encode())
    assert drawn.endswith(b"\r\x1b[K")
    assert b"\n" not in drawn


@pytest.mark.parametrize("words", [("--pid", str(2**22)), ("--name", "a name that no program has")])
def test_what_is_not_there_leaves_no_store(words: tuple[str, ...], tmp_path: Path) -> None:
    done = subprocess.run(
        [*ARGUS, "trace", *words, "--store", f"chdb://{tmp_path}/store"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert "there is no process" in done.stderr or "no process whose command line contains" in done.stderr
    assert not (tmp_path / "store").exists()


def test_a_store_that_cannot_be_had_is_reported(target: int, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = subprocess.run(
        [*ARGUS, "trace", "--pid", str(target), "--store", f"chdb://{tmp_path}/file/store"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert "cannot create the store's folder" in done.stderr or "no permission" in done.stderr
    assert "Traceback" not in done.stderr
