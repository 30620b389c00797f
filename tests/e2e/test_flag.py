"""Of a job whose operations are not all stored one by one, those of a moment that somebody flags are."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import run as fakegpu

from tests.e2e.conftest import Argus, pid_words, start_trace
from tests.kernel.conftest import wait_for_cuda, wait_until

pytestmark = [pytest.mark.kernel]


def test_a_moment_that_is_flagged_is_stored_whole(argus: Argus, store_url: str, tmp_path: Path) -> None:
    log = tmp_path / "ops"
    with fakegpu.Job(2, ["--steps", "100000"], {"FAKEGPU_OPS_LOG": str(log)}, cupti=True) as job:
        wait_for_cuda(job.pids)
        tracing = start_trace(store_url, *pid_words(job.pids), "--raw", "flagged", "--no-stacks")
        asked = "WHERE why = 'asked for: a test'"  # a step that is slow on a busy machine is kept, too
        counted = "SELECT countIf(name NOT LIKE 'nccl%') AS own, count() AS n FROM kernel_events"

        def rows(sql: str) -> list[dict[str, int]]:
            done = argus("sql", sql, "--format", "json")
            return json.loads(done.stdout) if done.returncode == 0 else []

        wait_until(lambda: any(row["n"] > 0 for row in rows(counted)), 60, "kernels of NCCL, which always are stored")
        time.sleep(1)
        assert rows(counted)[0]["own"] == 0
        done = argus("flag", "--last", "1s", "--why", "a test")
        assert done.returncode == 0, done.stderr
        assert "flagged 1 s of job" in done.stdout
        wait_until(
            lambda: len(rows(f"SELECT rank FROM raw_windows {asked}")) == 2, 60, "the moment to be stored on both ranks"
        )
        job.send_signal(signal.SIGTERM)
        output, _ = tracing.communicate(timeout=60)
        assert tracing.returncode == 0, output
        assert "coverage: complete" in output
    windows = rows(
        f"SELECT rank, toUnixTimestamp64Nano(ts) - o AS begin, duration_ns, why, whole, operations FROM raw_windows"
        f" CROSS JOIN (SELECT any(mono_offset_ns) AS o FROM jobs FINAL) AS j {asked} ORDER BY rank"
    )
    stored = rows(
        "SELECT rank, toUnixTimestamp64Nano(ts) - o AS begin, duration_ns FROM kernel_events"
        " CROSS JOIN (SELECT any(mono_offset_ns) AS o FROM jobs FINAL) AS j WHERE name NOT LIKE 'nccl%'"
    )
    summed = rows("SELECT rank, sum(count) AS n, sum(total_ns) AS ns FROM kernel_stats GROUP BY rank ORDER BY rank")
    for window, total, pid in zip(windows, summed, job.pids, strict=True):
        assert window["whole"]
        begin, end = window["begin"], window["begin"] + window["duration_ns"]
        ops, names = fakegpu.ops_log(log, pid)
        nccl = np.isin(ops["name"], [n + 1 for n, name in enumerate(names) if name.startswith("ncclDevKernel")])
        ran = ~nccl & (ops["end_ns"] > begin) & (ops["start_ns"] < end)
        of_rank = [(row["begin"], row["duration_ns"]) for row in stored if row["rank"] == window["rank"]]
        own = sorted(at for at, took in of_rank if at < end and at + took > begin)
        assert own == sorted(ops["start_ns"][ran].tolist())
        assert 0 < window["operations"] <= len(own)
        # the summaries have what was recorded, one by one or not
        recorded = ops[-int(total["n"]) :]
        assert 0 < len(recorded) <= len(ops)
        assert total["ns"] == pytest.approx(int((recorded["end_ns"] - recorded["start_ns"]).sum()), rel=0.02)
    file = tmp_path / "moment.json.gz"
    done = argus("export", "perfetto", "--rank", "1", "-o", str(file), "--last", "60s")
    assert done.returncode == 0, done.stderr
    assert "events" in done.stdout
