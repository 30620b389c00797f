"""Programs of another user that do what they can to end, blind or swell a trace, beside one that does nothing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from argus.capture.python.layouts import LAYOUTS
from argus.system import limits
from tests.e2e.conftest import ARGUS, argus_with
from tests.kernel.conftest import wait_until
from tests.security.test_demangling import bomb
from tests.stores import new_store

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from benches._processes import Peaks

HERE = Path(__file__).parent
AS_NOBODY = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
HONEST = "def work():\n    while True:\n        sum(range(1000))\nprint('ready', flush=True)\nwork()"
HIDES = """
import ctypes, sys
runtime = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
def concealed():
    print("ready", flush=True)
    while True:
        sum(range(1000))
ctypes.c_uint64.from_address(runtime + int(sys.argv[1])).value = 0
concealed()
"""
"""It takes its interpreter out of the list of interpreters."""
SAMPLED_S = 8
"""For so long stacks are taken: each program has a share of one CPU."""
MOST_BYTES = 1536 << 20
"""Of the tracer, its reader, its engine and what else it starts, together."""
pytestmark = pytest.mark.kernel


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that anybody may read."""
    folder = Path(tempfile.mkdtemp(prefix="argus-hostile-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def processes(place: Path) -> Iterator[dict[str, int]]:
    spin = place / "spin"
    source = HERE / "hostile_spin.c"
    subprocess.run(["cc", "-O1", f'-DSYMBOL="{bomb(33)}"', "-o", spin, source], check=True)
    shutil.copy(HERE / "hostile_lines.py", place)
    python = os.path.realpath(sys.executable)
    commands = {
        "names": [*AS_NOBODY, str(spin)],
        "lines": [*AS_NOBODY, python, "-I", str(place / "hostile_lines.py")],
        "hides": [*AS_NOBODY, python, "-I", "-c", HIDES, str(LAYOUTS[sys.version_info[:2]].interp_head)],
        "honest": [python, "-I", "-c", HONEST],
    }
    started = {}
    try:
        for name, command in commands.items():
            started[name] = subprocess.Popen(command, stdout=subprocess.PIPE)
            os.sched_setaffinity(started[name].pid, {min(os.sched_getaffinity(0))})  # the tests' machine has few CPUs
        for name in ("lines", "hides", "honest"):
            stdout = started[name].stdout
            assert stdout is not None
            assert stdout.readline() == b"ready\n"
        wait_until(lambda: os.path.realpath(f"/proc/{started['names'].pid}/exe") == str(spin), 60, "the program")
        yield {name: process.pid for name, process in started.items()}
    finally:
        for process in started.values():
            process.kill()
            process.wait()


def _samples(pid: int) -> bool:
    """Whether a tracer has events that sample: these programs call nothing that is probed."""
    events = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            events.add(os.readlink(descriptor))
    return "anon_inode:[perf_event]" in events


def test_a_trace_of_hostile_programs_ends_well(processes: dict[str, int], tmp_path: Path) -> None:
    store = new_store(tmp_path)
    words = ["trace", "--pid", ",".join(map(str, processes.values())), "--plain", "--store", store]
    tracing = subprocess.Popen([*ARGUS, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    score = Path(f"/proc/{tracing.pid}/oom_score_adj")
    wait_until(lambda: score.read_text().strip() == str(limits.OOM_SCORE), 60, "the trace's offer to be ended first")
    assert f"{limits.DATA_BYTES}" in Path(f"/proc/{tracing.pid}/limits").read_text()
    assert tracing.stdout is not None
    peaks, over = Peaks(), threading.Event()

    def measure() -> None:
        while not over.wait(0.25):
            peaks.look(tracing.pid, Path(store.removeprefix("chdb://")))

    measuring = threading.Thread(target=measure)
    measuring.start()
    try:
        # Loading the programs that take stacks is beside the trace, and takes 14 s where the CPUs are busy.
        wait_until(lambda: _samples(tracing.pid), 60, "the first sampling event")
        time.sleep(SAMPLED_S)
        tracing.send_signal(signal.SIGINT)
        output = tracing.stdout.read()
        assert tracing.wait(60) == 0, output
    finally:
        over.set()
        measuring.join()
    assert 20 << 20 < peaks.each["tracer"] < 500 << 20
    assert peaks.each["reader"] > 0
    assert max(peaks.each.values()) < peaks.whole < MOST_BYTES, str(peaks)
    assert not re.search(r"[^\n -~\u00a0-\uffff]", output), "nothing but text reaches the terminal"
    assert "internal error" not in output
    ask = argus_with(store)

    def rows(sql: str) -> list[dict[str, object]]:
        done = ask("sql", "--format", "json", sql)
        assert done.returncode == 0, done.stderr
        found: list[dict[str, object]] = json.loads(done.stdout)
        return found

    sampled = rows("SELECT pid, toUInt32(sum(count)) AS n FROM stack_samples WHERE kind = 'cpu' GROUP BY pid")
    assert {row["pid"] for row in sampled} >= set(processes.values())
    lost = rows("SELECT counter, max(value) AS n FROM latest_coverage WHERE loss AND value > 0 GROUP BY counter")
    bad = re.compile("quarantined|turns_failed|rows_")
    assert not [row for row in lost if bad.search(str(row["counter"]))]
    given_up = rows("SELECT max(value) AS n FROM latest_coverage WHERE counter = 'names_given_up'")
    assert int(str(given_up[0]["n"])) >= 1
    if sys.version_info >= (3, 11):
        lines = rows("SELECT max(arrayMax(lines)) AS n FROM stacks WHERE has(functions, 'x[/bold]\\x1b]0;owned\\x07')")
        assert 0 < int(str(lines[0]["n"])) < 2**32
    honest = rows("SELECT count() AS n FROM stacks WHERE has(functions, 'work')")
    assert int(str(honest[0]["n"])) >= 1
    # All four were sampled (above): this one has native frames alone.
    assert rows("SELECT functions FROM stacks WHERE has(functions, 'concealed')") == []
