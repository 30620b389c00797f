"""The diagnosis beside a trace: what it says, stores and has looked at."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from argus.diagnose.follow import Follower
from argus.diagnose.hang import SEEN_S
from argus.diagnose.standing import in_words
from argus.diagnose.verdict import Finding
from argus.diagnose.watch import Watch
from argus.errors import ArgusError
from argus.store.open import Store, open_store, parse_url
from argus.store.reader import query_columns
from argus.store.writer import Writer
from tests.stores import new_store

from .stored_job import WALL, store_job
from .synthetic_job import Fault, ddp, simulate


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A job of ten ranks on two hosts, of which one is slow, and whose trace goes on."""
    job = simulate(10, 40, ddp(), faults=(Fault("compute", (9,), 1.8),))
    with open_store(new_store(tmp_path_factory.mktemp("watch"))) as store:
        store_job(store, "ddp", job)
        with Writer(store, source="test") as writer:
            writer.append("jobs", {
                "job": "ddp", "run": 1, "host": "node-0", "started": [WALL], "ended": None, "world_size": 10,
                "launcher": "torchrun", "mono_offset_ns": 0, "argus_version": "0", "version": 1,
            })  # fmt: skip
        yield store


def count(store: Store, table: str) -> int:
    return int(query_columns(store, f"SELECT count() AS n FROM {table}")["n"][0])


def test_what_it_finds_is_told_stored_and_flagged(store: Store) -> None:
    other = Watch(store, "node-1")
    assert other.judge("ddp", 1) == 0.0  # another host has the lowest rank
    assert (other.rounds, other.take(), count(store, "findings")) == (0, [], 0)
    watch = Watch(store, "node-0", interval_s=0.1)
    try:
        watch.look([("ddp", 1)])
        deadline = time.monotonic() + 60
        while watch.rounds < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        (news,) = watch.take()
        assert news.what == "found"
        assert news.finding is not None
        assert "Check the GPU" in news.finding["action"]
        (line,) = watch.lines()
        assert line.startswith("compute straggler: rank 9 on node-1 since step ")
        assert line == in_words(news.finding)
        standing = watch.standing("ddp", 1)
        assert standing is not None
        assert standing.status == "degraded"
        assert in_words(standing.findings[0]) == line
        assert standing.findings[0]["evidence"]
        assert watch.standing("another", 1) is None
        assert watch.state == "on"
    finally:
        watch.close(timeout_s=30)
    # Once, however often it was seen.
    assert count(store, "findings") == 1
    assert other.lines() == []
    assert other.judge("ddp", 1) == 0.0
    assert other.lines() == [line], "the other host's tracer knows what is the matter, too"
    (taken_over,) = other._found.values()
    assert taken_over.status == "degraded"
    assert taken_over.findings[0]["action"] == news.finding["action"]
    flagged = query_columns(store, "SELECT ranks, why FROM raw_requests")
    assert flagged["why"].tolist() == ["compute_straggler"]
    assert next(iter(flagged["ranks"][0])) == 9


def nowhere(url: str = "chdb:///nowhere") -> Store:
    return Store(parse_url(url), create=False)


def finding(kind: str, ranks: list[int], hosts: list[str]) -> Finding:
    return Finding(
        kind=kind, ranks=ranks, hosts=hosts, steps=[7, 9], phase="", kernels=[], slowdown=1.5, share=1.0,
        confidence=1.0, level="phase", evidence=[], action="Look.",
    )  # fmt: skip


def test_findings_in_a_line() -> None:
    assert in_words(finding("gc_pause", [2, 3, 4], ["a"])) == "gc pause: ranks 2-4 on a since step 7, 1.50x"
    assert in_words(finding("regression", [], [])) == "regression: since step 7, 1.50x"
    assert in_words(finding("hang", [1], ["b"])) == "hang: rank 1 on b since step 7"


def test_a_spool_is_not_judged(tmp_path: object) -> None:
    watch = Watch(nowhere(f"spool://{tmp_path}"), "node-0")
    watch.look([("job", 1)])
    assert watch.state.startswith("off: ")
    watch.close()


@pytest.mark.parametrize(("failure", "state"), [(ArgusError("away"), "on"), (ValueError("a defect"), "off: it failed")])
def test_a_failure_does_not_reach_the_trace(monkeypatch: pytest.MonkeyPatch, failure: Exception, state: str) -> None:
    rounds = []

    def judge(self: Watch, job: str, run: int) -> float:
        rounds.append(job)
        raise failure

    monkeypatch.setattr(Watch, "judge", judge)
    watch = Watch(nowhere(), "node-0", interval_s=0.01)
    watch.look([("job", 1)])
    deadline = time.monotonic() + 30
    while len(rounds) < (2 if state == "on" else 1) and time.monotonic() < deadline:
        time.sleep(0.01)
    if state != "on":
        assert watch._thread is not None
        watch._thread.join(30)
        assert not watch._thread.is_alive()
    watch.close(timeout_s=30)
    assert watch.state.startswith(state)
    assert len(rounds) >= 2 if state == "on" else len(rounds) == 1
    assert bool(watch.take()) == (state != "on")


def test_a_hang_is_looked_for_in_the_moment_in_which_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def wait(_: object, seconds: float) -> bool:
        waits.append(seconds)
        return len(waits) > 1

    monkeypatch.setattr(threading.Event, "wait", wait)
    monkeypatch.setattr(Watch, "judge", lambda *_: 0.0)
    watch = Watch(nowhere(), "node-0", interval_s=5e6)
    follower = Follower(nowhere(), "job", 1, hang_after_s=1e6)
    follower._newest_ns = time.time_ns()
    watch._runs, watch._followers = {("job", 1)}, {("job", 1): follower}
    watch._go_on()
    assert waits == pytest.approx([5e6, 1e6 + SEEN_S], abs=60)
