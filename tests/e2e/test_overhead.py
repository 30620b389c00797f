"""``--max-overhead``: a job that makes calls at an extreme rate is observed less, and that is reported; a usual one
never is."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from run import BUILD, Job

from argus.live.cost import governor
from argus.live.cost.overhead import FIRST_LOOKS_S
from argus.live.options import Options
from argus.live.tracer import Tracer
from argus.store.open import open_store
from argus.store.reader import query_columns
from tests.e2e.conftest import Argus, pid_words, start_trace
from tests.kernel.conftest import wait_for_cuda, wait_until

pytestmark = pytest.mark.kernel

SHARE = re.compile(r"overhead ([0-9.]+)%")


def counters(store_url: str) -> dict[str, int]:
    with open_store(store_url, create=False) as store:
        rows = query_columns(store, "SELECT counter, value FROM coverage FINAL ORDER BY counter")
    return dict(zip(rows["counter"].tolist(), rows["value"].astype(int).tolist(), strict=True))


def lines_until(tracing: subprocess.Popen[str], shares: int) -> list[str]:
    """What a trace prints until it has printed so often what it costs."""
    assert tracing.stdout is not None
    lines: list[str] = []
    for line in tracing.stdout:
        lines.append(line)
        if sum(bool(SHARE.search(each)) for each in lines) == shares or len(lines) > 60:
            break
    return lines


def test_a_job_that_launches_all_the_time_is_seen_in_windows(store_url: str) -> None:
    """As much as it launches, probes on launches would cost it many times what they may."""
    with Job(1, ["--launches", "1000000000", "--rate", "20000"], program=BUILD / "fake_burst") as job:
        wait_for_cuda(job.pids)
        tracing = start_trace(
            store_url, *pid_words(job.pids), "--max-overhead", "0.05", "--no-stacks", "--no-diagnose", "--plain"
        )
        output = lines_until(tracing, 4)
        tracing.send_signal(signal.SIGINT)
        rest, _ = tracing.communicate(timeout=60)
    (note,) = [line for line in output if line.startswith("note: overhead: launches")]
    assert re.fullmatch(
        r"note: overhead: launches are seen in windows \((?:\d{3} ms|\d{2}\.\d ms|1\.0 s) every [\d.]+ m?s\): "
        r"observing takes [0-9.]+% of the job's time, [0-9.]+% of it for this, above --max-overhead 0.05\n",
        note,
    )
    assert "overhead: launches are seen in windows, since it was above 0.05%" in rest
    assert re.search(r"overhead: launches were seen in [0-9.]+% of the time: [0-9,]+; ", rest)
    assert counters(store_url)["launch_probes_detached"] == 1
    with open_store(store_url, create=False) as store:
        features = query_columns(store, "SELECT rank, state, reason FROM features FINAL WHERE feature = 'launches'")
        seen = query_columns(
            store, "SELECT seen, period_ns FROM signal_coverage FINAL WHERE signal = 'launches' ORDER BY ts"
        )
    assert features["state"].tolist() == ["off"]
    assert note == f"note: {features['reason'][0]}\n"
    assert seen["seen"].tolist()[-1] == 0, "the trace has ended"
    assert any(0 < share < 0.5 and period > 0 for share, period in zip(seen["seen"], seen["period_ns"], strict=True))


def test_steps_stay_right_where_launches_are_seen_in_windows(store_url: str) -> None:
    """A job without marks: its steps were found by launches and collectives together, and its collectives, alone, look
    as if each were a step."""
    with Job(2, ["--steps", "0"]) as job:
        wait_for_cuda(job.pids)
        tracing = start_trace(
            store_url, *pid_words(job.pids), "--max-overhead", "0.1", "--no-stacks", "--no-diagnose", "--plain"
        )
        output = lines_until(tracing, 3)
        tracing.send_signal(signal.SIGINT)
        rest, _ = tracing.communicate(timeout=60)
    assert any(line.startswith("note: overhead: launches are seen in windows") for line in output), output
    with open_store(store_url, create=False) as store:
        steps = query_columns(store, "SELECT step, duration_ns, confidence, method FROM iterations WHERE rank = 0")
        calls = query_columns(store, "SELECT count() AS n FROM collectives WHERE rank = 0 AND op = 'AllReduce'")
        gap_ns = query_columns(
            store, "SELECT toUnixTimestamp64Nano(max(ts)) - toUnixTimestamp64Nano(min(ts)) AS n FROM collectives"
        )
    assert "pulses" in steps["method"].tolist(), output
    # Four all-reduces a step.
    per_step = int(calls["n"][0]) / len(steps["step"])
    assert 3.5 < per_step < 5.5, rest
    assert np.median(steps["duration_ns"]) == pytest.approx(gap_ns["n"][0] / (calls["n"][0] / 4), rel=0.3)
    assert (steps["confidence"] >= 0.8).all()


def test_a_job_that_its_launches_bound_is_slowed_for_a_moment_only(store_url: str, tmp_path: Path) -> None:
    """101 launches, 13 copies, 17 collectives and a wait in 740 µs, whose first instructions are single-stepped.

    What it was slowed is measured by how many of its calls were seen, which other programs do not change. The limit is
    generous: ``scripts/bench overhead`` has figures."""
    program, log = tmp_path / "launch_bound", tmp_path / "log"
    source = Path(__file__).parent / "programs" / "launch_bound.c"
    subprocess.run(["gcc", "-O2", "-fno-ipa-icf", "-rdynamic", "-o", program, source], check=True)
    with subprocess.Popen([program, "300", log], stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == b"ready\n"
        time.sleep(2)
        tracing = start_trace(store_url, "--pid", str(job.pid), "--no-stacks", "--no-diagnose", "--plain")
        assert tracing.stdout is not None
        output = []
        for line in tracing.stdout:
            output.append(line)
            # Beside other programs windows may be cut short, and a pulse is found in a later one.
            counted = next((at for at, line in enumerate(output) if "are counted by" in line), len(output))
            if len([line for line in output[counted:] if SHARE.search(line)]) == 2 or len(output) > 200:
                break
        until_ns = time.monotonic_ns()
        tracing.send_signal(signal.SIGINT)
        rest, _ = tracing.communicate(timeout=60)
        job.terminate()
    begins = np.loadtxt(log, dtype=np.int64)[:-1, 0]
    with open_store(store_url, create=False) as store:
        (offset,) = query_columns(store, "SELECT mono_offset_ns AS n FROM jobs FINAL")["n"].tolist()
        rows = query_columns(
            store, "SELECT signal, toUnixTimestamp64Nano(ts) AS ts, seen FROM signal_coverage FINAL ORDER BY ts"
        )
        steps = query_columns(
            store, "SELECT step, toUnixTimestamp64Nano(ts) AS ts, duration_ns, method FROM iterations ORDER BY step"
        )
    (since, *_) = [ts - offset for ts, seen in zip(rows["ts"].tolist(), rows["seen"].tolist(), strict=True) if seen]
    of_launches = (rows["signal"] == "launches") & (rows["seen"] > 0)
    in_windows = rows["seen"][of_launches] <= governor.MOST_DUTY
    first = int(np.argmax(in_windows))
    assert in_windows[first:].all()
    # The first look is 10 ms after the probes came: it sees what a job did that did not wait for a CPU all the while.
    of_look = begins[(begins > since) & (begins < since + FIRST_LOOKS_S[0] * 1e9)]
    assert first == 0 or len(of_look) <= 1, "launches are seen in windows from the start"
    throughout = begins[(begins > since) & (begins < rows["ts"][of_launches][first] - offset)]
    assert len(throughout) < 150
    # Of its 132 calls a step, seen throughout from the first moment on, a few are left.
    made = 132 * int(np.sum((begins > since) & (begins < until_ns)))
    assert counters(store_url)["hits"] < 0.25 * made
    assert "collectives are seen in windows; steps are counted by one call of each" in "".join(output)
    # What is counted are the program's own steps, in order: by pulses, but for those until a first look that came late.
    early = steps["ts"] - offset < (throughout[-1] if len(throughout) else since)
    assert set(steps["method"][~early].tolist()) == {"pulses"}, rest
    assert set(steps["method"][early].tolist()) <= {"collectives"}, rest
    own = np.searchsorted(begins, steps["ts"] - offset)
    assert len(np.unique(own)) == len(own)
    assert (np.diff(steps["step"].astype(np.int64)) > 0).all()


@contextlib.contextmanager
def tracing_a_small_script(
    store_url: str, log: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[subprocess.Popen[bytes], Tracer]]:
    """A PyTorch script and its trace, of which nothing but its ranges can be given up."""
    pytest.importorskip("torch")
    monkeypatch.setattr(governor, "LADDERS", {})
    ranges = tuple(rung for rung in governor.PROBE_RUNGS if rung.subject == "ranges")
    monkeypatch.setattr(governor, "PROBE_RUNGS", ranges)
    program = Path(__file__).parent / "programs" / "small_script.py"
    with subprocess.Popen([sys.executable, program, log], stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == b"ready\n"
        tracer = Tracer(open_store(store_url), Options(pids=(job.pid,), stacks=True, max_overhead=1.0))
        tracer.start()
        yield job, tracer


def test_steps_of_a_small_script_are_counted_though_its_ranges_are_not_probed(
    store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    with tracing_a_small_script(store_url, log, monkeypatch) as (job, tracer):

        def polled(steps: int) -> bool:
            tracer.poll()
            return tracer.jobs[0].ranks()[0].steps >= steps

        wait_until(lambda: polled(8), timeout_s=60, what="steps by marks")
        tracer._budget.overhead.governor.budget = 1e-9
        wait_until(lambda: polled(0) and tracer.jobs[0].thinned is not None, timeout_s=60, what="the rung")
        before = tracer.jobs[0].ranks()[0].steps
        wait_until(lambda: polled(before + 100), timeout_s=60, what="steps by backward passes")
        assert "PyTorch's ranges are probed in samples only" in "".join(tracer.notes())
        assert tracer.stop()["range_probes_detached"] == 1
        job.terminate()
    own = np.loadtxt(log, dtype=np.int64)
    with open_store(store_url, create=False) as store:
        (offset,) = query_columns(store, "SELECT mono_offset_ns AS n FROM jobs FINAL")["n"].tolist()
        steps = query_columns(
            store, "SELECT step, toUnixTimestamp64Nano(ts) AS ts, duration_ns, method FROM iterations ORDER BY step"
        )
        seen = query_columns(store, "SELECT seen FROM signal_coverage FINAL WHERE signal = 'ranges' ORDER BY ts")
    assert seen["seen"].tolist()[-1] == 0
    chosen = steps["method"] == "pulses"
    assert chosen.sum() > 50
    begins = steps["ts"][chosen] - offset
    # From one backward pass to the next lies the end of one optimiser: numbers and steps are the program's own.
    ended = np.searchsorted(own, begins)
    numbers = steps["step"][chosen].astype(np.int64)
    assert (ended - ended[0]).tolist() == (numbers - numbers[0]).tolist()


def test_samples_give_phases_where_ranges_cost_too_much(
    store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tracing_a_small_script(store_url, tmp_path / "log", monkeypatch) as (job, tracer):

        def polled() -> bool:
            tracer.poll()
            return True

        overhead = tracer._budget.overhead
        wait_until(lambda: polled() and overhead.costs.get("ranges", 0.0) > 0, timeout_s=60, what="their cost")
        overhead.governor.budget = overhead.costs["ranges"] / 2
        wait_until(lambda: polled() and tracer.jobs[0].thinned is not None, timeout_s=60, what="the rung")
        before = tracer.jobs[0].phased_steps
        wait_until(lambda: polled() and tracer.jobs[0].phased_steps > before + 10, timeout_s=60, what="samples")
        assert tracer.stop()["range_probes_detached"] == 1
        job.terminate()
    with open_store(store_url, create=False) as store:
        rows = query_columns(
            store,
            "SELECT i.step AS step, any(i.duration_ns) AS whole, sum(p.duration_ns) AS parts, "
            "groupUniqArray(p.phase) AS names FROM iterations AS i JOIN phases AS p ON i.rank = p.rank "
            "AND i.step = p.step WHERE i.method = 'pulses' GROUP BY step",
        )
        (seen,) = query_columns(
            store, "SELECT max(seen) AS s FROM signal_coverage WHERE signal = 'ranges' AND period_ns > 0"
        )["s"]
    assert len(rows["step"]) > 10
    assert (rows["whole"] == rows["parts"]).all()
    assert sum({"forward", "backward", "optimizer"} <= set(names) for names in rows["names"].tolist()) > 10
    assert 0 < seen < 0.5


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
