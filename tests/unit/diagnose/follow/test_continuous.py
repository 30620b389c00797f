"""Growth of the step time that is remembered while a job is followed, from the store on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from argus.diagnose.follow import follow as module
from argus.diagnose.follow.continuous import Continuous
from argus.diagnose.follow.follow import Follower
from argus.diagnose.read import queries
from argus.diagnose.verdict import Verdict
from argus.store.open import Store, open_store
from argus.store.writer import Writer
from tests.stores import new_store


class Steps:
    """Answers as a store with so many steps would."""

    def __init__(self, durations: np.ndarray[Any, Any], **work: np.ndarray[Any, Any]) -> None:
        self.durations, self.work, self.read = durations, work, list[int]()

    def __call__(self, text: str, params: Mapping[str, Any]) -> dict[str, Any]:
        steps = np.arange(params["first"], params["last"] + 1)
        if text == queries.STEPS:
            self.read += steps.tolist()
            sure = np.where(steps % 100 == 37, 0.5, 1.0)
            return {"step": steps, "duration_ns": self.durations[steps], "confidence": sure}
        assert text == queries.WORK
        measures = {name: self.work.get(name, np.ones(len(self.durations)))[steps] for name in sql_measures}
        return {"step": steps, **measures}


sql_measures = ("launches", "calls", "bytes")


def quiet(steps: int = 600) -> np.ndarray[Any, Any]:
    return np.asarray(1e8 * np.exp(0.02 * np.random.default_rng(1).standard_normal(steps)))


def followed(query: Steps, until: int, every: int = 7) -> Continuous:
    watch = Continuous()
    for last in range(every, until, every):
        watch.read_steps(query, {"job": "j", "run": 1}, last, list(range(8)))
    return watch


def verdict(last: int, status: Any = "healthy") -> Verdict:
    return Verdict(
        schema="argus.verdict/1", job="j", run=1, ranks=8, steps=[last - 100, last], status=status, slowdown=1.0,
        findings=[], coverage={"complete": True, "dropped": {}, "ended": False}, reason="",
    )  # fmt: skip


def test_each_step_is_read_once_and_growth_stays_reported() -> None:
    durations = quiet()
    durations[200:] *= 1.3
    durations[37::100] *= 10
    query = Steps(durations)
    watch = followed(query, 600)
    assert query.read == list(range(len(query.read)))
    assert watch.growth is not None
    assert watch.growth.step == pytest.approx(200, abs=2)
    found = verdict(594)
    watch.add(found, {"job": "j", "run": 1})
    (finding,) = found["findings"]
    assert (found["status"], finding["kind"], finding["steps"]) == ("degraded", "regression", [watch.growth.step, 594])
    assert finding["slowdown"] == pytest.approx(1.3, abs=0.02)
    assert " ms instead of " in finding["evidence"][0]["text"]
    # Whoever knows who is to blame knows better.
    for status in ("degraded", "hung", "inconclusive"):
        known = verdict(594, status)
        watch.add(known, {"job": "j", "run": 1})
        assert known["findings"] == []


def test_a_job_that_recovered_is_healthy_again() -> None:
    durations = quiet()
    durations[200:400] *= 1.3
    assert followed(Steps(durations), 390).growth is not None
    watch = followed(Steps(durations), 600)
    assert watch.growth is None
    found = verdict(594)
    watch.add(found, {"job": "j", "run": 1})
    assert found["status"] == "healthy"


def test_longer_sequences_are_no_growth() -> None:
    length = np.exp(0.3 * np.random.default_rng(2).standard_normal(600)) * np.where(np.arange(600) < 300, 1.0, 1.5)
    watch = followed(Steps(quiet() * length, bytes=length), 600)
    assert watch.growth is None
    assert watch.detector.slope[0] == pytest.approx([0, 0, 1], abs=0.05)


class Gpus:
    """Eight ranks' GPUs, of which one gets slower by 0.1 % of its time a step, until it recovers."""

    def __init__(self, rank: int, begin: int, end: int, steps: int = 400) -> None:
        noise = np.exp(0.02 * np.random.default_rng(4).standard_normal((8, steps)))
        # The work varies, for all alike.
        self.own = 5e7 * noise * np.exp(0.3 * np.random.default_rng(5).standard_normal(steps))
        self.own[rank] *= np.exp(1e-3 * np.clip(np.arange(steps) - begin, 0, 150) * (np.arange(steps) < end))
        self.read: list[int] = []

    def __call__(self, text: str, params: Mapping[str, Any]) -> dict[str, Any]:
        if text == queries.GROUPS:
            return {name: np.empty(0, object) for name in ("host", "comm_group", "dimension", "ranks")}
        assert text == queries.GPU_TIMES
        steps = np.arange(params["first"], params["last"] + 1)
        self.read += steps[:-1].tolist()
        rank, step = (values.ravel() for values in np.meshgrid(np.arange(8), steps, indexing="ij"))
        zero = np.zeros(len(rank))
        names = ("backward", "optimizer", "compute", "collective", "pipeline", "transfer", "idle", "step")
        return {
            "rank": rank, "step": step, "forward_ns": self.own[rank, step], "kernels": zero + 100,
            **{f"{name}_ns": zero for name in names},
        }  # fmt: skip


def watched_ranks(query: Gpus, until: int) -> Continuous:
    watch = Continuous()
    for last in range(7, until, 7):
        watch.read_ranks(query, {"job": "j", "run": 1}, last, None)
    return watch


@pytest.mark.thorough
def test_a_rank_that_gets_slower_bit_by_bit() -> None:
    query = Gpus(3, 100, 400)
    watch = watched_ranks(query, 330)
    assert query.read == list(range(len(query.read)))
    assert list(watch.slower) == [3]
    found = verdict(329)
    watch.add_ranks(found, {"job": "j", "run": 1}, {3: "node-0"})
    (finding,) = found["findings"]
    assert (finding["kind"], finding["ranks"], finding["hosts"]) == ("masked_compute_straggler", [3], ["node-0"])
    assert finding["steps"][0] == pytest.approx(100, abs=35)
    assert "gradually" in finding["evidence"][0]["text"]
    for status in ("degraded", "hung", "inconclusive"):
        known = verdict(329, status)
        watch.add_ranks(known, {"job": "j", "run": 1}, {})
        assert known["findings"] == []
    assert watched_ranks(Gpus(3, 100, 300), 400).slower == {}, "it recovered"
    assert watched_ranks(Gpus(3, 400, 400), 400).slower == {}


@pytest.fixture
def store(tmp_path: Any) -> Any:
    with open_store(new_store(tmp_path)) as opened:
        yield opened


@pytest.mark.thorough
def test_growth_that_no_window_shows_is_reported_by_who_follows(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.05 % a step, of which a window of 60 steps shows 3 %."""
    monkeypatch.setattr(module, "STEPS", 60)
    steps, ranks = 500, 2
    durations = quiet(steps) * np.exp(np.maximum(np.arange(steps) - 100, 0) * 5e-4)
    begins = 1_700_000_000_000_000_000 + np.concatenate([[0], np.cumsum(durations)[:-1]]).astype(np.int64)
    with Writer(store, source="test") as writer:
        for rank in range(ranks):
            writer.append("iterations", {
                "job": "slow", "run": 1, "rank": rank, "step": np.arange(steps), "host": "n", "ts": begins,
                "duration_ns": durations.astype(np.int64), "collectives": 4, "launches": 100, "method": "collectives",
                "confidence": 1.0,
            })  # fmt: skip
            writer.append("ranks", {
                "job": "slow", "run": 1, "rank": [rank], "host": "n", "pid": rank + 1, "local_rank": rank,
                "rank_source": "torchrun", "started": 1_700_000_000_000_000_000, "exe": "", "command": "",
                "libraries": [[]], "probes": 1, "state": "traced", "version": 1,
            })  # fmt: skip
            writer.append("collectives", {
                "job": "slow", "run": 1, "rank": rank, "host": "n", "pid": 1, "tid": 1, "comm": 7 + rank,
                "op": "AllReduce", "seq": np.arange(steps), "bytes": 8, "count": 4, "dtype": "float16", "redop": "sum",
                "peer": -1, "stream": 1, "ts": begins + 1_000_000, "duration_ns": 1000, "result": 0, "in_group": False,
            })  # fmt: skip
        writer.append("communicators", {
            "job": "slow", "run": 1, "rank": np.arange(ranks), "comm": 7 + np.arange(ranks), "comm_group": 5,
            "comm_rank": np.arange(ranks).astype(np.int32), "nranks": ranks, "seq_offset": 0, "joined_by": "unique_id",
            "error": "", "version": 1,
        })  # fmt: skip
    follower = Follower(store, "slow", 1, keep=False)
    found = follower.next_round()
    (finding,) = found.verdict["findings"]
    assert finding["kind"] == "regression"
    assert finding["steps"][0] == pytest.approx(100, abs=40)
    assert finding["slowdown"] == pytest.approx(1.2, abs=0.05)
    assert "gradually" in finding["evidence"][0]["text"]
    assert found.changed
