"""Steps that became longer when Argus changed, or when others took the CPUs, are no regression of the job."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from argus.diagnose.stored import diagnose_store
from argus.diagnose.verdict import Verdict
from argus.store.open import Store
from argus.store.writer import Writer
from tests.builders.stack_data import MS, T0, store_run

S = 1000 * MS
STEPS, ONSET, BEFORE_MS = 200, 100, 100


def judged(
    store: Store,
    job: str,
    after_ms: int,
    *,
    queued: tuple[float, float] | None = None,
    signals: Sequence[tuple[str, float, float]] = (),
    ranks: int = 1,
    steps: int = STEPS,
) -> Verdict:
    """A job whose steps take longer from the hundredth, 10 s after the first, on.

    Args:
        queued: Share of the time in which the main thread waits for a CPU, before and since.
        signals: (signal, s after the first step, share that is observed).
    """
    length = [BEFORE_MS] * ONSET + [after_ms] * (steps - ONSET)
    begins = np.concatenate([[0], np.cumsum(length)[:-1]])
    with Writer(store, source="test") as writer:
        store_run(writer, range(ranks), job=job)
        writer.append("jobs", {
            "job": job, "run": 1, "host": "node-0", "started": [T0], "ended": [T0 + 100 * S], "world_size": ranks,
            "launcher": "unknown", "mono_offset_ns": 0, "argus_version": "0", "version": 2,
        })  # fmt: skip
        every = [(rank, step) for rank in range(ranks) for step in range(steps)]
        writer.append("iterations", {
            "job": job, "run": 1, "rank": [rank for rank, _ in every], "step": [step for _, step in every],
            "host": "node-0", "ts": [T0 + int(begins[step]) * MS for _, step in every],
            "duration_ns": [length[step] * MS + step % 3 for _, step in every], "collectives": 0, "launches": 0,
            "method": "marks", "confidence": 1.0,
        })  # fmt: skip
        if queued is not None:
            seconds = range(int(begins[-1]) // 1000)
            share = [queued[second >= 10] for second in seconds]
            writer.append("thread_usage", {
                "job": job, "run": 1, "rank": 0, "host": "node-0", "pid": 1000, "tid": 1000, "thread": "python",
                "ts": [T0 + second * S for second in seconds], "interval_ns": S,
                "cpu_ns": [int((0.95 - part) * S) for part in share],
                "runqueue_ns": [int(part * S) for part in share], "io_ns": -1, "voluntary": 1, "involuntary": 9,
            })  # fmt: skip
        if signals:
            writer.append("signal_coverage", {
                "job": job, "run": 1, "rank": 0, "host": "node-0", "signal": [name for name, _, _ in signals],
                "ts": [int(T0 + at * S) for _, at, _ in signals],
                "seen": np.array([seen for _, _, seen in signals], np.float32), "period_ns": np.uint64(0),
                "reason": ["" if seen == 1 else "ranges thinned out" for _, _, seen in signals], "version": 1,
            })  # fmt: skip
    return diagnose_store(store, job, 1)


def kinds(verdict: Verdict) -> list[str]:
    return [finding["kind"] for finding in verdict["findings"]]


def test_steps_that_became_longer_by_themselves_are_a_regression(shared: Store) -> None:
    verdict = judged(shared, "slower", 150, queued=(0.01, 0.01), signals=[("ranges", -20, 1)])
    assert kinds(verdict) == ["regression"]
    assert verdict["slowdown"] == pytest.approx(1.5, rel=0.02)
    assert "batch or sequence length" in verdict["findings"][0]["action"]


@pytest.mark.thorough
def test_busy_neighbours_are_named_instead(shared: Store) -> None:
    verdict = judged(shared, "neighbours", 190, queued=(0.01, 0.5))
    (finding,) = verdict["findings"]
    assert (finding["kind"], finding["hosts"]) == ("host_contention", ["node-0"])
    assert "batch" not in finding["action"]
    assert "what else runs on the CPUs of node-0" in finding["action"]
    text = " ".join(evidence["text"] for evidence in finding["evidence"])
    assert "a thread waits 95.0 ms a step for a free CPU, and waited 1.00 ms before step 100" in text
    # Waiting for a CPU that has always been so, and one that explains little, are no reason.
    assert kinds(judged(shared, "always busy", 190, queued=(0.3, 0.2))) == ["regression"]
    assert kinds(judged(shared, "a little busy", 190, queued=(0.01, 0.05))) == ["regression"]


def test_growth_when_argus_changes_is_not_the_jobs(shared: Store) -> None:
    changed = judged(shared, "changed", 150, signals=[("ranges", -20, 1), ("ranges", 10.4, 0.1)])
    assert (changed["status"], changed["findings"]) == ("healthy", [])
    assert "Argus changed what it observes" in changed["reason"]
    assert "ranges thinned out" in changed["reason"]
    came = judged(shared, "came", 150, signals=[("ranges", 6, 1)])
    assert came["findings"] == []
    assert "Argus had just attached" in came["reason"]
    # A change long before, or after, has nothing to do with it.
    signals = [("ranges", -20, 1), ("ranges", 4, 0.1), ("ranges", 20, 1)]
    other = judged(shared, "other", 150, signals=signals, queued=(0.01, 0.01))
    assert kinds(other) == ["regression"]


@pytest.mark.thorough
def test_one_rank_on_cpus_is_held_to_more(shared: Store) -> None:
    """Clocks and caches move its times; nobody else's confirm it."""
    verdict = judged(shared, "a little slower", 115)
    assert (verdict["status"], verdict["findings"]) == ("healthy", [])
    assert "from step 100 on a step takes 115 ms instead of 100 ms" in verdict["reason"]
    assert kinds(judged(shared, "a little slower beside others", 115, queued=(0.01, 0.1))) == []


def test_without_a_word_on_waits_for_a_cpu_a_traced_job_on_cpus_is_not_blamed(shared: Store) -> None:
    """Threads' times are stored every 10 s: the busy loop that has just begun is not in them yet."""
    verdict = judged(shared, "not-yet", 180, signals=[("ranges", -20.0, 1.0)])
    assert kinds(verdict) == []
    assert "whether its threads wait for a free CPU is not known" in verdict["reason"]


def store_usage(store: Store, job: str, before: float, since: float, *, own: float = 0.55) -> None:
    """A node of 2 CPUs: shares of them that other programs take before the hundredth step and since; and the job."""
    seconds = range(0, 28, 2)
    others = [since if second >= 10 else before for second in seconds]
    with Writer(store, source="test") as writer:
        writer.append("host_usage", {
            "job": job, "run": 1, "host": "node-0", "ts": [T0 + second * S for second in seconds],
            "interval_ns": 2 * S, "cpus": 2, "busy_ns": [int((own + part) * 4 * S) for part in others],
            "stolen_ns": 0, "job_ns": int(own * 4 * S), "argus_ns": 0,
        })  # fmt: skip


def test_programs_that_came_are_named_though_no_thread_waits_for_a_cpu(shared: Store) -> None:
    """Cores and caches are shared, and the threads of two CPUs may run on one core."""
    store_usage(shared, "crowd came", 0.0, 0.4)
    (finding,) = judged(shared, "crowd came", 180, signals=[("ranges", -20.0, 1.0)])["findings"]
    assert (finding["kind"], finding["hosts"]) == ("host_contention", ["node-0"])
    assert "the CPUs of node-0 are busy for 95% of the time, other programs take 40%" in str(finding["evidence"])
    store_usage(shared, "crowd stayed", 0.4, 0.4)
    assert kinds(judged(shared, "crowd stayed", 180, queued=(0.01, 0.01))) == ["regression"]


@pytest.mark.thorough
def test_programs_that_take_more_of_shared_cores_are_named(shared: Store) -> None:
    store_usage(shared, "crowd grew", 0.02, 0.2, own=0.5)
    (finding,) = judged(shared, "crowd grew", 145, queued=(0.001, 0.01))["findings"]
    assert (finding["kind"], finding["confidence"] < 0.7) == ("host_contention", True)
    assert "other programs take 20% of the CPUs of node-0, and took 2% before" in str(finding["evidence"])
    # Where other cores are free they are no reason, nor where they took as much before.
    store_usage(shared, "crowd elsewhere", 0.02, 0.2, own=0.1)
    assert kinds(judged(shared, "crowd elsewhere", 145, queued=(0.001, 0.01))) == ["regression"]
    store_usage(shared, "crowd as before", 0.15, 0.2, own=0.5)
    assert kinds(judged(shared, "crowd as before", 145, queued=(0.001, 0.01))) == ["regression"]


def test_a_moment_beside_programs_that_were_there_before_is_no_regression(shared: Store) -> None:
    store_usage(shared, "a moment", 0.4, 0.4)
    verdict = judged(shared, "a moment", 180, queued=(0.01, 0.01), steps=145)
    assert verdict["findings"] == []
    assert "for 8.1 s so far, on CPUs that other programs keep busy before and since" in verdict["reason"]
