"""History of argus health: what is stored, what stands out in it, which nodes to drain."""

from __future__ import annotations

import importlib
import json
import time
from pathlib import Path

import numpy as np
import pytest

from argus.health.check import Result
from argus.health.history import rows
from argus.health.report import report
from argus.health.run import Run
from argus.health.trend import Matrix, Watch, busy_share, deviations, rising
from argus.store.open import open_store
from argus.store.reader import query_columns
from argus.store.writer import Writer
from tests.e2e.health_node import Node

LOW = Watch(-1, 0.05, False, "its speed")


def speeds(nodes: int, hours: int = 20 * 24) -> Matrix:
    rng = np.random.default_rng(nodes)
    return 1000 + rng.normal(0, 5, (nodes, 1)) + 20 * np.sin(np.arange(hours)) + rng.standard_t(3, (nodes, hours)) * 3


@pytest.mark.parametrize("nodes", [2, 3, 4, 30])
def test_a_sudden_and_a_slow_change_are_reported_and_nothing_else(nodes: int) -> None:
    values = speeds(nodes)
    assert deviations(values, LOW) == []
    sudden = values.copy()
    sudden[1, -10:] *= 0.88
    assert [found.node for found in deviations(sudden, LOW)] == [1]
    slow = values.copy()
    slow[0] *= 1 - 0.12 * np.clip(np.arange(20 * 24) / (20 * 24), 0, 1)
    assert [(found.node, "past" in found.how) for found in deviations(slow, LOW)] == [(0, True)]
    common = values * np.where(np.arange(20 * 24) > 19 * 24, 0.8, 1.0)
    assert nodes == 2 or deviations(common, LOW) == []  # all alike: another job
    better = values.copy()
    better[1, -10:] *= 1.2
    assert [found.node for found in deviations(better, LOW) if found.node == 1] == []


def test_a_node_that_was_always_worse_than_its_peers() -> None:
    values = speeds(6)
    values[4] *= 0.85
    assert [(found.node, found.how) for found in deviations(values, LOW)] == [(4, "peers")]
    assert deviations(values[:3], LOW) == []


@pytest.mark.parametrize("hours", [0, 1, 2, 11, 25, 40])
def test_little_history_says_nothing(hours: int) -> None:
    assert deviations(speeds(5, hours), LOW) == []
    assert rising(np.cumsum(np.ones((5, hours)), 1), 50) == []
    alone = np.full((3, 400), np.nan)
    alone[:, -2:] = [[1000, 1000], [1000, 1000], [10, 10]]
    assert deviations(alone, LOW) == []


def test_a_counter_that_rises_on_one_node_while_jobs_run() -> None:
    rng = np.random.default_rng(2)
    busy = np.arange(240) % 3 > 0
    rises = rng.poisson(2, (5, 240)) * 1.0
    assert rising(np.cumsum(rises, 1), 100) == []
    rises[3, -12:] += 400 * busy[-12:]
    counts = np.cumsum(rises, 1)
    counts[2, 100:] -= counts[2, 100]  # a restart
    counts[:, 50:60] = np.nan
    found = rising(counts, 100)
    assert [one.node for one in found] == [3]
    assert busy_share(counts[3], busy) > 0.95
    assert busy_share(counts[0], ~busy) < 0.9
    everywhere = np.cumsum(rng.poisson(2, (5, 240)) + 400.0 * (np.arange(240) > 228), 1)
    assert rising(everywhere, 100) == []  # the network's, not a node's


def test_what_is_stored_and_who_is_to_be_drained(tmp_path: Path) -> None:
    now = time.time() // 3600 * 3600 + 1800
    with open_store(f"chdb://{tmp_path}/store") as store, Writer(store, source="test") as writer:
        for node in range(6):
            host = f"node{node}"
            for hour in range(60 if node != 5 else 50, -1, -1):
                slow = 0.8 if node == 2 and hour < 8 else 1.0
                figures = {"busy_clock_mhz/gpu0": (1900 + node + hour % 5) * slow, "crc_total/gpu0": 0.0}
                if node == 3 and hour < 6:
                    figures["crc_total/gpu0"] = 5000.0 * (6 - hour)
                failed = node == 1 and hour == 0
                results = [
                    Result(
                        "gpu_clocks", "ok", "fine", figures=figures, facts={"driver": "570" if node != 4 else "535"}
                    ),
                    Result("gpu_nvlink", "ok", "", figures={"crc_total/gpu0": figures["crc_total/gpu0"]}),
                    Result("xid", "critical" if failed else "ok", "Xid 79" if failed else "none", "Drain it."),
                ]
                at = now - 3600 * (hour + (10 if node == 5 else 0))
                for table, columns in rows(Run(host, at, results, kind="8 x H100")).items():
                    writer.append(table, columns)
        writer.flush()
        found = {node.host: node for node in report(store, now=now + 60)}
    advice = {host: node.advice for host, node in found.items()}
    assert advice == {"node0": "ok", "node1": "drain", **dict.fromkeys(["node2", "node3", "node4", "node5"], "watch")}
    assert next(iter(found)) == "node1"
    reported = {host: [(r.kind, r.name, r.text) for r in node.reasons] for host, node in found.items()}
    assert reported["node1"] == [("check", "xid", "Xid 79")]
    assert reported["node2"][0][:2] == ("trend", "gpu_clocks.busy_clock_mhz/gpu0")
    assert "its clock under load of gpu0 is 15" in reported["node2"][0][2]
    assert reported["node3"][0][:2] == ("trend", "gpu_nvlink.crc_total/gpu0")
    assert "only while jobs ran" in reported["node3"][0][2]
    assert reported["node4"] == [("facts", "driver", "driver is 535; 5 of 6 nodes of its kind have 570")]
    assert reported["node5"] == [("silent", "argus", "nothing came for 10 h 01 min")]


def test_results_wait_on_disk_and_are_stored_once(tmp_path: Path) -> None:
    node, store = Node(tmp_path), f"chdb://{tmp_path}/store"
    node.plugin("bad", "echo 'broken | x_c=17'; exit 2")
    node.environment["ARGUS_HOST"] = "node7"  # all verbs name the node so
    for _ in range(3):
        code, output, _ = node.health("-v", "--only", "bad", "--only", "memory", store=store)
        assert (code, "kept on disk" in output) == (2, True)
    assert not (tmp_path / "store").exists()
    code, output, _ = node.health("report", "--all", "--format", "json", store=store)
    (found,) = json.loads(output)["nodes"]
    assert (code, found["advice"], found["reasons"][0]["text"]) == (2, "drain", "broken")
    assert node.health("report", store=store)[0] == 2
    assert node.health("--trend", store=store)[:2] == (0, "node7: nothing stands out, against its past and its peers\n")
    with open_store(store) as opened:
        stored = query_columns(opened, "SELECT check, count() AS n FROM health GROUP BY check ORDER BY check")
        assert dict(zip(stored["check"], stored["n"].tolist(), strict=True)) == {"argus": 3, "bad": 3, "memory": 3}
        value = query_columns(opened, "SELECT any(value) AS v FROM health_figures WHERE figure = 'x_c'")["v"]
        assert value.tolist() == [17.0]


def test_a_store_that_is_away_harms_no_run(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.settings["store_s"] = 30.0
    code, output, _ = node.health("-v", "--only", "memory", store="clickhouse://127.0.0.1:1/argus")
    assert (code, "kept on disk: " in output) == (0, True), output
    assert len(list((tmp_path / "spill").glob("*/*/*.arrow"))) == 2
    node.settings["store_s"] = 0.01
    code, output, _ = node.health("-v", "--only", "memory", store="clickhouse://127.0.0.1:1/argus")
    assert (code, "history: did not answer" in output) == (0, True)


def test_the_bench_finds_what_it_plants(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small round of scripts/bench health. 200 nodes and every sixth hour take half a minute."""
    monkeypatch.syspath_prepend(str(root / "scripts"))
    bench = importlib.import_module("benches.health")
    monkeypatch.setattr(bench, "KINDS", (24, 6))
    monkeypatch.setattr(bench, "EVERY", 12)
    result = bench.run(1)
    assert result.title == "10 faults planted in 1 times 30 nodes x 30 days"
    assert result.more["found_percent"] >= 99.0
    assert result.more["false_per_1000_node_days"] <= 2.3  # one of 900 is chance, two may be
    assert result.ratio > 50
