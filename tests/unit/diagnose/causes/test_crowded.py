"""Ranks and steps that other programs on the node slow, where no thread waits for a CPU; and /proc/stat."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from argus.capture import host_cpu
from argus.capture.host_cpu import HostCpuReader, parse_stat
from argus.diagnose.run import diagnose_store
from argus.store.open import Store, open_store
from argus.store.reader import query_columns
from argus.store.writer import Writer
from tests.stores import new_store

from .stored_job import store_job
from .synthetic_job import Fault, simulate

S = 10**9
SLOW = simulate(4, 60, faults=(Fault("compute", (2,), 1.5),))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with open_store(new_store(tmp_path_factory.mktemp("crowded"))) as opened:
        yield opened


def used(store: Store, job: str, busy: float, others: float, stolen: float = 0.0) -> None:
    """A node of 4 CPUs from before the job's first step until after its last."""
    at = query_columns(store, "SELECT toUnixTimestamp64Nano(min(ts)) AS n FROM iterations WHERE job = '" + job + "'")
    begin, most = int(at["n"][0]) - 2 * S, 4 * 2 * S
    with Writer(store, source="test") as writer:
        writer.append("host_usage", {
            "job": job, "run": 1, "host": "node-0", "ts": [begin + 2 * S * turn for turn in range(40)],
            "interval_ns": 2 * S, "cpus": 4, "busy_ns": int(busy * most), "stolen_ns": int(stolen * most),
            "job_ns": int((busy - others) * most), "argus_ns": 0,
        })  # fmt: skip


@pytest.mark.parametrize(
    ("job", "busy", "others", "kind"),
    [
        ("crowded", 0.98, 0.3, "host_contention"),
        ("crowded by itself", 0.98, 0.02, "compute_straggler"),
        ("room", 0.6, 0.3, "compute_straggler"),
    ],
)
def test_a_rank_on_cpus_that_others_use_is_not_blamed(
    store: Store, job: str, busy: float, others: float, kind: str
) -> None:
    store_job(store, job, SLOW, launches=False)
    used(store, job, busy, others)
    (finding,) = diagnose_store(store, job, 1)["findings"]
    assert (finding["kind"], finding["ranks"]) == (kind, [2])
    assert finding["confidence"] <= 0.7
    if kind == "host_contention":
        assert "the CPUs of node-0 are busy for 98% of the time, other programs take 30%" in str(finding["evidence"])
        assert "what else runs on node-0" in finding["action"]
        for evidence in finding["evidence"]:
            assert len(next(iter(query_columns(store, evidence["sql"]).values()))) or "no CUDA" in evidence["text"]
    else:
        assert "nvidia-smi" not in finding["action"], "nothing says that it has a GPU"
        assert "argus export svg --rank 2" in finding["action"]


def test_gpus_are_not_slowed_by_a_crowd(store: Store) -> None:
    store_job(store, "gpus", SLOW)
    used(store, "gpus", 0.98, 0.5)
    (finding,) = diagnose_store(store, "gpus", 1)["findings"]
    assert finding["kind"] == "compute_straggler"


def test_what_a_crowd_cannot_explain_is_blamed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store_job(store, "far slower", SLOW, launches=False)
    used(store, "far slower", 0.98, 0.5)
    monkeypatch.setattr("argus.diagnose.run.SLOWED", 0.1)
    (finding,) = diagnose_store(store, "far slower", 1)["findings"]
    assert (finding["kind"], finding["ranks"]) == ("compute_straggler", [2])


STAT = b"cpu  100 10 50 800 20 1 2 17 30 5\ncpu0 50 5 25 400 10 0 1 9 15 2\ncpu1 50 5 25 400 10 1 1 8 15 3\nintr 5\n"


def test_what_the_kernel_says_of_all_cpus() -> None:
    tick = host_cpu._TICK_NS
    assert parse_stat(STAT) == (180 * tick, 17 * tick, 2)
    for text in (b"", b"intr 5\n", b"cpu  1 2 3\ncpu0 1 2 3\n", b"cpu  a b c d e f g h\ncpu0 1\n"):
        with pytest.raises(ValueError, match=r"/proc/stat|invalid literal"):
            parse_stat(text)


def test_shares_are_of_the_time_between_two_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, cpu, own, text = [10 * S], {7: 5 * S, 8: 0}, [0], [STAT]
    monkeypatch.setattr(host_cpu, "cpu_ns", lambda pid: cpu.get(pid, -1))
    monkeypatch.setattr(host_cpu, "read_file", lambda path: text[0])
    monkeypatch.setattr(host_cpu.time, "monotonic_ns", lambda: clock[0])
    monkeypatch.setattr(host_cpu.time, "process_time_ns", lambda: own[0])
    reader = HostCpuReader()
    assert reader.read([7]) is None
    clock[0], cpu[7], cpu[8], own[0] = 12 * S, 6 * S, 3 * S, S // 10
    text[0] = STAT.replace(b"cpu  100", b"cpu  350").replace(b" 17 30", b" 27 30")
    found = reader.read([7, 8, 9])
    assert found is not None
    tick = host_cpu._TICK_NS
    assert (found.begin_ns, found.interval_ns, found.cpus) == (10 * S, 2 * S, 2)
    assert (found.busy_ns, found.stolen_ns) == (260 * tick, 10 * tick)
    assert (found.job_ns, found.argus_ns) == (S, S // 10), "the second process counts from now on"
    text[0] = b""
    assert reader.read([7]) is None
