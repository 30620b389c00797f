"""Ranks and steps that other programs on the node slow, where no thread waits for a CPU; and /proc/stat."""

from __future__ import annotations

import numpy as np
import pytest

from argus.capture.process import host_cpu
from argus.capture.process.host_cpu import HostCpuReader, parse_stat
from argus.diagnose.stored import diagnose_store
from argus.store.open import Store
from argus.store.reader import query_columns
from argus.store.writer import Writer
from tests.builders.stored_job import store_job
from tests.builders.synthetic_job import Fault, simulate

S = 10**9
SLOW = simulate(4, 60, faults=(Fault("compute", (2,), 1.5),))


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


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("job", "busy", "others", "kind"),
    [
        ("crowded", 0.98, 0.3, "host_contention"),
        ("crowded by itself", 0.98, 0.02, "compute_straggler"),
        ("room", 0.6, 0.3, "compute_straggler"),
    ],
)
def test_a_rank_on_cpus_that_others_use_is_not_blamed(
    shared: Store, job: str, busy: float, others: float, kind: str
) -> None:
    store_job(shared, job, SLOW, launches=False)
    used(shared, job, busy, others)
    (finding,) = diagnose_store(shared, job, 1)["findings"]
    assert (finding["kind"], finding["ranks"]) == (kind, [2])
    assert finding["confidence"] <= 0.7
    if kind == "host_contention":
        assert "the CPUs of node-0 are busy for 98% of the time, other programs take 30%" in str(finding["evidence"])
        assert "what else runs on node-0" in finding["action"]
        for evidence in finding["evidence"]:
            assert len(next(iter(query_columns(shared, evidence["sql"]).values()))) or "no CUDA" in evidence["text"]
    else:
        assert "nvidia-smi" not in finding["action"], "nothing says that it has a GPU"
        assert "argus export svg --rank 2" in finding["action"]


@pytest.mark.parametrize(("slow", "kind"), [((6, 2), "compute_straggler"), ((6, 5), "host_contention")])
def test_a_rank_whose_forward_alone_is_longer_is_not_slowed_by_a_crowd(
    shared: Store, slow: tuple[int, int], kind: str
) -> None:
    """Tenths of a step in forward and backward, 1 and 2 of the other ranks: a crowd would slow both."""
    job = f"crowded {slow}"
    store_job(shared, job, SLOW, launches=False)
    used(shared, job, 0.98, 0.3)
    steps = query_columns(
        shared, f"SELECT rank, step, toUnixTimestamp64Nano(ts) AS at, duration_ns FROM iterations WHERE job = '{job}'"
    )
    with Writer(shared, source="test") as writer:
        for phase, usual, own in (("forward", 1, slow[0]), ("backward", 2, slow[1])):
            tenths = np.where(steps["rank"] == 2, own, usual)
            writer.append("phases", {
                "job": job, "run": 1, "host": "node-0", "rank": steps["rank"], "step": steps["step"], "ts": steps["at"],
                "phase": phase, "method": "marks", "duration_ns": steps["duration_ns"] * tenths // 10, "spans": 1,
                "overlapped_ns": 0, "confidence": 1.0,
            })  # fmt: skip
    (finding,) = diagnose_store(shared, job, 1)["findings"]
    assert (finding["kind"], finding["ranks"], finding["phase"]) == (kind, [2], "forward")


def test_programs_that_came_late_are_seen_in_the_steps_that_are_compared(shared: Store) -> None:
    store_job(shared, "late crowd", simulate(4, 200, faults=(Fault("compute", (2,), 1.5),)), launches=False)
    steps = query_columns(
        shared,
        "SELECT toUnixTimestamp64Nano(min(ts)) AS first, toUnixTimestamp64Nano(max(ts)) AS last FROM iterations "
        "WHERE job = 'late crowd'",
    )
    begin, last = int(steps["first"][0]), int(steps["last"][0])
    since = last - (last - begin) // 4
    with Writer(shared, source="test") as writer:
        writer.append("host_usage", {
            "job": "late crowd", "run": 1, "host": "node-0", "ts": [begin - S, since],
            "interval_ns": [since - begin + S, last - since + S], "cpus": 4, "stolen_ns": 0, "argus_ns": 0,
            "busy_ns": [int(0.5 * 4 * (since - begin + S)), int(0.98 * 4 * (last - since + S))],
            "job_ns": [int(0.5 * 4 * (since - begin + S)), int(0.5 * 4 * (last - since + S))],
        })  # fmt: skip
    (finding,) = diagnose_store(shared, "late crowd", 1)["findings"]
    assert (finding["kind"], finding["ranks"]) == ("host_contention", [2])
    assert "other programs take 48%" in str(finding["evidence"])


def test_gpus_are_not_slowed_by_a_crowd(shared: Store) -> None:
    store_job(shared, "gpus", SLOW)
    used(shared, "gpus", 0.98, 0.5)
    (finding,) = diagnose_store(shared, "gpus", 1)["findings"]
    assert finding["kind"] == "compute_straggler"


@pytest.mark.thorough(first=1)
@pytest.mark.parametrize(
    ("job", "own", "others", "asleep", "kind"),
    [
        ("works longer", 0.9, 0.6, 0.0, "host_contention"),
        ("does not work longer", 0.3, 0.3, 0.0, "compute_straggler"),
        ("works less than others", 0.3, 0.5, 0.0, "compute_straggler"),
        ("others spin", 1.0, 1.0, 0.0, "host_contention"),
        ("sleeps", 0.9, 0.6, 0.3, "compute_straggler"),
        ("sleeps where others spin", 1.0, 1.0, 0.3, "compute_straggler"),
        ("sleeps a little", 0.9, 0.6, 0.05, "host_contention"),
    ],
)
def test_a_rank_that_is_late_asleep_is_not_slowed_by_a_crowd(
    shared: Store, job: str, own: float, others: float, asleep: float, kind: str
) -> None:
    """Half of the time that threads work is a wait for a CPU. All sleep, rank 2 for longer."""
    store_job(shared, job, SLOW, launches=False)
    used(shared, job, 0.98, 0.3)
    at = query_columns(shared, f"SELECT toUnixTimestamp64Nano(min(ts)) AS n FROM iterations WHERE job = '{job}'")
    with Writer(shared, source="test") as writer:
        for rank in range(4):
            half = int((own if rank == 2 else others) * S / 2)
            writer.append("thread_usage", {
                "job": job, "run": 1, "rank": rank, "host": "node-0", "pid": 100 + rank, "tid": 100 + rank,
                "thread": "main", "ts": [int(at["n"][0]) - S + S * turn for turn in range(40)], "interval_ns": S,
                "cpu_ns": half, "runqueue_ns": half, "io_ns": 0, "voluntary": 1,
                "involuntary": 1,
            })  # fmt: skip
            starts = [int(at["n"][0]) + S // 10 * turn for turn in range(200)]
            slept = int((0.1 + (asleep if rank == 2 else 0.0)) * S / 10)
            writer.append("stack_samples", {
                "job": job, "run": 1, "rank": rank, "host": "node-0", "pid": 100 + rank, "tid": 100 + rank,
                "thread": "main", "ts": starts, "last_ts": [start + S // 20 for start in starts], "kind": "off",
                "reason": "sleep", "gil": False, "gc": False, "in_kernel": False, "count": 1, "ns": slept + S // 100,
                "runqueue_ns": S // 100, "max_ns": slept, "stack_id": 0,
            })  # fmt: skip
    (finding,) = diagnose_store(shared, job, 1)["findings"]
    assert (finding["kind"], finding["ranks"]) == (kind, [2])


def test_what_a_crowd_cannot_explain_is_blamed(shared: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store_job(shared, "far slower", SLOW, launches=False)
    used(shared, "far slower", 0.98, 0.5)
    monkeypatch.setattr("argus.diagnose.causes.crowded.SLOWED", 0.1)
    (finding,) = diagnose_store(shared, "far slower", 1)["findings"]
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
