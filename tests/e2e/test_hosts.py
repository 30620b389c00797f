"""A job of two hosts: real processes, traced by one Argus for each host, into one store, from different moments on.

The hosts are one machine under two names (UTS namespaces), so that the truth is known: their clocks are one clock.
"""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from argus.store.open import open_store
from argus.store.reader import query_columns
from tests.e2e.conftest import ARGUS, Log, argus_with, attached, pid_words
from tests.kernel.conftest import wait_for_cuda
from tests.stores import new_store

pytestmark = [pytest.mark.kernel, pytest.mark.alone]

HOSTS = {"node-a": (0, 1), "node-b": (2, 3)}
LATER_S = 2.0
"""How much later the second host is attached to."""
TOGETHER_S = 8.0


def trace_on(host: str, store_url: str, *words: str) -> subprocess.Popen[str]:
    """``argus trace`` on a host of this name."""
    command = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host, *ARGUS, "trace", *words]
    return subprocess.Popen(
        [*command, "--store", store_url], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@dataclass
class Cluster:
    url: str
    folder: Path
    output: dict[str, str]

    def query(self, sql: str) -> dict[str, Any]:
        with open_store(self.url, create=False) as store:
            return query_columns(store, sql)

    def diagnose(self) -> dict[str, Any]:
        answer = argus_with(self.url)("diagnose", "--format", "json")
        assert answer.returncode == 0, answer.stderr
        verdict: dict[str, Any] = json.loads(answer.stdout)
        return verdict


@pytest.fixture(scope="module")
def cluster(fakegpu: Path, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """Four ranks that had trained for a while; the GPU of rank 3 is slow."""
    from run import Job

    folder = tmp_path_factory.mktemp("hosts")
    url = new_store(folder)
    log = Log(folder, 4)
    faults = {"FAKEGPU_SLOW_RANK": "3", "FAKEGPU_SLOW_FACTOR": "1.8"}
    with Job(4, ["--steps", "100000", *log.args], faults, cupti=True) as job:
        wait_for_cuda(job.pids)
        log.wait_for_steps(30)
        traces = {}
        for host, ranks in HOSTS.items():
            pids = pid_words([job.pids[rank] for rank in ranks])
            seconds = TOGETHER_S + (LATER_S if not traces else 0)
            words = ["--job", "cluster", "--run", "7", "--no-stacks", "--duration", str(seconds), "--plain"]
            traces[host] = trace_on(host, url, *pids, *words)
            attached(traces[host])
            if len(traces) == 1:
                time.sleep(LATER_S)
        output = {host: trace.communicate(timeout=60)[0] for host, trace in traces.items()}
        assert all(trace.returncode == 0 for trace in traces.values()), output
    return Cluster(url, folder, output)


def test_the_slow_rank_is_named_across_hosts(cluster: Cluster) -> None:
    verdict = cluster.diagnose()
    assert (verdict["status"], verdict["ranks"]) == ("degraded", 4), verdict
    (finding,) = verdict["findings"]
    assert (finding["kind"], finding["ranks"], finding["hosts"]) == ("compute_straggler", [3], ["node-b"])
    assert finding["phase"] == "backward"
    assert finding["kernels"][0].startswith("gemm")
    assert finding["level"] == "kernel"
    output = " ".join(evidence["text"] for evidence in finding["evidence"])
    assert "clocks of node-" in output
    # What was cited shows it again.
    for evidence in finding["evidence"]:
        assert len(next(iter(cluster.query(evidence["sql"]).values())))


def test_clocks_of_one_machine_agree(cluster: Cluster) -> None:
    cluster.diagnose()
    rows = cluster.query(
        "SELECT c.offset_ns AS offset, c.error_ns AS error, toString(c.method) AS method,"
        " toInt64(j.mono) AS truth FROM clocks AS c"
        " CROSS JOIN (SELECT maxIf(mono_offset_ns, host = 'node-a') - maxIf(mono_offset_ns, host = 'node-b') AS mono"
        " FROM jobs FINAL) AS j WHERE c.host = 'node-b'"
    )
    assert len(rows["offset"])
    assert set(rows["method"].tolist()) == {"gpu"}
    assert (rows["error"] >= 0).all()
    assert (rows["error"] < 2_000_000).all(), rows
    assert (abs(rows["offset"] - rows["truth"]) <= rows["error"]).all(), rows


def test_steps_have_one_number_on_both_hosts(cluster: Cluster) -> None:
    """The program's own log shows which step each of Argus's is."""
    cluster.diagnose()
    rows = cluster.query(
        "SELECT i.rank AS rank, i.step AS step, i.host_step AS own, toUnixTimestamp64Nano(i.ts) - j.offset"
        " + toInt64(i.duration_ns) AS end FROM iterations_across AS i"
        " JOIN (SELECT host, any(mono_offset_ns) AS offset FROM jobs FINAL GROUP BY host) AS j ON i.host = j.host"
        " ORDER BY rank, step"
    )
    shifts, own = set(), set()
    for rank in range(4):
        lines = [json.loads(line) for line in (cluster.folder / f"steps-{rank}").read_text().splitlines()]
        steps = [line for line in lines if "step" in line]
        begins = np.array([line["start_ns"] for line in steps])
        selected = rows["rank"] == rank
        assert selected.sum() > 60, rank
        numbers = np.array([line["step"] for line in steps])
        true = numbers[np.searchsorted(begins, rows["end"][selected].astype(np.int64), side="right") - 1]
        shifts |= set((true - rows["step"][selected].astype(int)).tolist())
        own |= set((true - rows["own"][selected].astype(int)).tolist())
    assert len(shifts) == 1, shifts
    assert len(own) == 2, "the second host was attached to later, and began to count then"
