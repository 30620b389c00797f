"""Every verb of ``argus`` once, as a user types it. What each can do, other tests have."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from run import Job

from tests.builders import flight_dumps, training_job
from tests.e2e.conftest import ARGUS, attached, pid_words, start_trace
from tests.e2e.verbs import CASES
from tests.kernel.conftest import wait_for_cuda, wait_until
from tests.stores import new_store
from tests.unit.importers import test_kineto as kineto
from tests.unit.importers import test_nsys as nsys
from tests.unit.importers.dumps import test_ras

pytestmark = [pytest.mark.kernel, pytest.mark.core]

Run = Callable[[str], tuple[int, str]]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory, fakegpu: Path) -> dict[str, str]:
    """What the command lines refer to, made."""
    folder = tmp_path_factory.mktemp("core")
    (folder / "kineto").mkdir()
    kineto.write(folder / "kineto" / "rank0.json", kineto.trace(0))
    nsys.export(folder / "report.sqlite")
    trace, meta = training_job.write(folder, training_job.rows(steps=3))
    trace.rename(folder / "made.parquet")
    meta.rename(folder / "made.yaml")
    lines = [f"{rank},{step},{50 + step % 3},5" for rank in range(2) for step in range(20)]
    (folder / "times.csv").write_text("\n".join(["rank,step,ms,data", *lines]) + "\n")
    flight_dumps.write(folder / "dumps", flight_dumps.run(flight_dumps.job(1, 1, 4), [flight_dumps.Fault("cpu", 2, 9)]))
    (folder / "ras.json").write_text(json.dumps(test_ras.report([5, 5, 4])))
    (folder / "inspector").mkdir()
    test_ras.inspect(folder / "inspector" / "node-pid1.log", rank=0)
    (folder / "health.toml").write_text(f'state_dir = "{folder}/health"\n')
    return {"folder": str(folder), "fakegpu": str(fakegpu)}


@pytest.fixture(scope="module")
def argus(names: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs a command of ``CASES`` against the store of a job that is traced, flagged, and still runs."""
    store = new_store(tmp_path_factory.mktemp("store"))
    spool = f"spool://{names['folder']}/spool"

    def run(name: str, store: str = store) -> tuple[int, str]:
        case = CASES[name]
        words = shlex.split(case.words.format(**names))
        at = words.index("--") if "--" in words else len(words)
        words[at:at] = ["--store", store] * case.stores
        environment = {**os.environ, "ARGUS_SPILL_DIR": f"{names['folder']}/spill"}
        done = subprocess.run([*ARGUS, *words], capture_output=True, text=True, check=False, env=environment)
        return done.returncode, done.stdout + done.stderr

    assert run("simulate", spool)[0] == 0
    with Job(ranks=2, args=["--steps", "1000000"], cupti=True) as job:
        wait_for_cuda(job.pids)
        names["pids"] = " ".join(pid_words(job.pids))
        tracing = start_trace(store, *shlex.split(CASES["trace"].words.format(**names))[1:])
        output = "".join(attached(tracing))
        flagged: list[tuple[int, str]] = []
        wait_until(lambda: flagged.append(run("flag")) or flagged[-1][0] == 0, 60, "a run that can be flagged")
        output += tracing.communicate()[0]
        ran = {"flag": flagged[-1], "trace": (tracing.returncode, output), "dump": run("dump")}
        ran["serve"] = served(store)
        yield lambda name: ran[name] if name in ran else run(name)


def served(store: str) -> tuple[int, str]:
    """``argus serve``, which goes on until a signal comes."""
    words = [*ARGUS, *shlex.split(CASES["serve"].words), "--store", store]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.terminate()
        rest = process.stdout.read()
    return process.returncode, line + rest


@pytest.mark.parametrize("name", CASES)
def test_a_command_runs(argus: Run, name: str) -> None:
    code, output = argus(name)
    assert code in CASES[name].codes, output
    assert re.search(CASES[name].prints, output, re.MULTILINE), output
    assert "Traceback" not in output
