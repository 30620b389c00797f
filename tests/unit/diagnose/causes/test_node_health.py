"""What argus health reported on a finding's nodes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from argus.diagnose.causes.node_health import add
from argus.diagnose.suspect import Suspect
from argus.store.open import open_store
from argus.store.reader import query_columns
from argus.store.schema import ensure_schema
from argus.store.writer import Writer
from tests.stores import new_store

T0 = 1_760_000_000_000_000_000
HOUR = 3_600_000_000_000
ROWS = [
    ("a", 0, "gpu_heat", "warning", "gpu3 84 degrees"),
    ("a", HOUR // 2, "gpu_heat", "critical", "gpu3 91 degrees"),
    ("a", HOUR // 2, "argus", "critical", "1 critical"),
    ("a", HOUR // 2, "clock", "critical", "not synchronised"),
    ("a", HOUR // 2, "gpu_ecc", "ok", "no errors"),
    ("a", HOUR // 2, "xid", "warning", "Xid 94"),
    ("a", HOUR // 2, "disk_slow", "critical", "sda 3 s"),
    ("a", -2 * HOUR, "gpu_power", "critical", "before"),
    ("a", 2 * HOUR, "gpu_clocks", "critical", "after"),
    ("b", 0, "gpu_pages", "critical", "another node"),
    ("b", 0, "infiniband", "warning", "mlx5_0 at 100 Gbit/s"),
]


def suspect(kind: str, hosts: list[str]) -> Suspect:
    return Suspect(kind, [0, 1, 2, 3], hosts, 0, 1, 1.0, 1.0, 1.0, "phase", [], "Check them.")


def test_a_finding_cites_what_can_explain_it(tmp_path: Path) -> None:
    with open_store(new_store(tmp_path)) as store:
        ensure_schema(store)
        with Writer(store, source="test") as writer:
            step = {"job": "j", "run": 1, "rank": 0, "host": "a", "collectives": 1, "launches": 1, "method": "launches"}
            writer.append(
                "iterations", {**step, "step": [0, 1], "ts": [T0, T0 + HOUR], "duration_ns": 1, "confidence": 1.0}
            )
            columns = dict(zip(("host", "ts", "check", "status", "text"), zip(*ROWS, strict=True), strict=True))
            rows: dict[str, Any] = {name: list(values) for name, values in columns.items()}
            rows["ts"] = [T0 + ts for ts in rows["ts"]]
            writer.append("health", {**rows, "kind": "k", "hint": "", "facts": [{}] * len(ROWS), "duration_ns": 1})
            assert not writer.close().dropped
        reported = [suspect("compute_straggler", ["a"]), suspect("data_loading", ["a"]), suspect("regression", ["a"]),
                suspect("compute_straggler", ["c"])]  # fmt: skip
        links = [suspect("link_degradation", hosts) for hosts in (["a", "b", "c"], ["b"], ["a", "c"])]
        add(partial(query_columns, store), {"job": "j", "run": 1}, reported + links, {0: "a", 1: "b", 2: "c", 3: "b"})
    texts = [[one["text"].split("UTC: ")[1] for one in each.further] for each in reported]
    assert texts == [["gpu_heat critical: gpu3 91 degrees", "xid warning: Xid 94"],
                     ["disk_slow critical: sda 3 s"], [], []]  # fmt: skip
    assert "WHERE h.host IN ['a']" in reported[0].further[0]["sql"]
    # Of a communicator's nodes that one whose links complain is named; where none or all do, nothing is known better.
    assert [(one.ranks, one.hosts) for one in links] == [([1, 3], ["b"]), ([0, 1, 2, 3], ["b"]),
                                                               ([0, 1, 2, 3], ["a", "c"])]  # fmt: skip
    assert [one.action for one in links] == ["Begin with b. Check them.", "Check them.", "Check them."]
    assert links[0].further[0]["text"].endswith("infiniband warning: mlx5_0 at 100 Gbit/s")
