"""``--max-overhead``: a job that makes calls at an extreme rate is observed less, and told so; a usual one never is."""

from __future__ import annotations

import re
import signal
import subprocess

import pytest
from run import BUILD, Job

from argus.store.open import open_store
from argus.store.reader import query_columns

from ..kernel.conftest import wait_for_cuda
from .conftest import Argus, pid_words, start_trace

pytestmark = pytest.mark.kernel

SHARE = re.compile(r"overhead ([0-9.]+)%")


def counters(store_url: str) -> dict[str, int]:
    with open_store(store_url, create=False) as store:
        rows = query_columns(store, "SELECT counter, value FROM coverage FINAL ORDER BY counter")
    return dict(zip(rows["counter"].tolist(), rows["value"].astype(int).tolist(), strict=True))


def test_a_job_that_launches_all_the_time_is_let_alone(store_url: str) -> None:
    """As much as it launches, probes on launches would cost it many times what they may."""
    with Job(1, ["--launches", "1000000000", "--rate", "20000"], program=BUILD / "fake_burst") as job:
        wait_for_cuda(job.pids)
        tracing = start_trace(
            store_url, *pid_words(job.pids), "--max-overhead", "0.05", "--no-stacks", "--no-diagnose", "--plain"
        )
        assert tracing.stdout is not None
        said: list[str] = []
        shares: list[float] = []
        for line in tracing.stdout:
            said.append(line)
            # The first line after the step may still tell of a window that it fell into.
            if any("launches are not probed" in told for told in said) and (found := SHARE.search(line)):
                shares.append(float(found[1]))
            if len(shares) == 3 or len(said) > 60:
                break
        tracing.send_signal(signal.SIGINT)
        rest, _ = tracing.communicate(timeout=60)
    (note,) = [line for line in said if line.startswith("note: overhead")]
    assert re.fullmatch(
        r"note: overhead: launches are not probed: observing takes [0-9.]+% of the job's time, [0-9.]+% of it for "
        r"this, above --max-overhead 0.05\n",
        note,
    )
    assert float(re.findall(r"takes ([0-9.]+)%", note)[0]) > 0.05
    assert max(shares[1:]) <= 0.05, "".join(said)
    assert "overhead: launches are not probed, since it was above 0.05%" in rest
    assert "launch_probes_detached 1" in rest
    assert counters(store_url)["overhead_steps"] == 1
    with open_store(store_url, create=False) as store:
        features = query_columns(store, "SELECT rank, state, reason FROM features FINAL WHERE feature = 'launches'")
    assert features["state"].tolist() == ["off"]
    assert note == f"note: {features['reason'][0]}\n"


def test_a_usual_job_is_observed_as_it_was_asked_for(argus: Argus, store_url: str) -> None:
    """4 ranks that launch 3,400 times a second each."""
    with Job(4) as job:
        wait_for_cuda(job.pids)
        done = argus("trace", *pid_words(job.pids), "--steps", "250", "--no-diagnose")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("overhead:")]
    assert re.match(r"overhead: 0\.[0-9]{2}% of the job's time", line)
    found = counters(store_url)
    assert found["overhead_steps"] == 0
    assert found["overhead_ppm"] < 10_000
    assert found["overhead_job_ns"] > 4 * 10**9  # but for the first and the last 2 s
    assert found["overhead_calls_ns"] > 0.001 * found["overhead_job_ns"]  # each launch takes a microsecond


@pytest.mark.parametrize("value", ["0", "-1", "101", "nan", "much"])
def test_what_is_no_percentage_is_refused_in_a_line(argus: Argus, value: str) -> None:
    done: subprocess.CompletedProcess[str] = argus("trace", "--pid", "1", "--max-overhead", value)
    assert done.returncode == 2
    assert f"'{value}' is no percentage above 0, up to 100" in done.stderr
    assert "Traceback" not in done.stderr
