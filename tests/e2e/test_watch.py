"""The diagnosis beside a trace, in its own thread."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from argus.diagnose.follow.standing import in_words
from argus.diagnose.follow.watch import Watch
from argus.model.errors import ArgusError
from argus.store.open import Store, open_store
from argus.store.reader import query_columns
from argus.store.url import parse_url
from argus.store.writer import Writer
from tests.builders.stored_job import WALL, store_job
from tests.builders.synthetic_job import Fault, ddp, simulate
from tests.stores import new_store

pytestmark = pytest.mark.core


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


def test_what_it_finds_is_reported_stored_and_flagged(store: Store) -> None:
    other = Watch(store, "node-1")
    assert other.diagnose_run("ddp", 1) == 0.0  # another host has the lowest rank
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
    assert other.diagnose_run("ddp", 1) == 0.0
    assert other.lines() == [line], "the other host's tracer knows what is the matter, too"
    (taken_over,) = other._found.values()
    assert taken_over.status == "degraded"
    assert taken_over.findings[0]["action"] == news.finding["action"]
    flagged = query_columns(store, "SELECT ranks, why FROM raw_requests")
    assert flagged["why"].tolist() == ["compute_straggler"]
    assert next(iter(flagged["ranks"][0])) == 9


def nowhere(url: str = "chdb:///nowhere") -> Store:
    return Store(parse_url(url), create=False)


@pytest.mark.parametrize(("failure", "state"), [(ArgusError("away"), "on"), (ValueError("a defect"), "off: it failed")])
def test_a_failure_does_not_reach_the_trace(monkeypatch: pytest.MonkeyPatch, failure: Exception, state: str) -> None:
    rounds = []

    def judge(self: Watch, job: str, run: int) -> float:
        rounds.append(job)
        raise failure

    monkeypatch.setattr(Watch, "diagnose_run", judge)
    watch = Watch(nowhere(), "node-0", interval_s=0.01)
    watch.look([("job", 1)])
    deadline = time.monotonic() + 30
    while (len(rounds) < 2 if state == "on" else watch.state == "on") and time.monotonic() < deadline:
        time.sleep(0.01)
    if state != "on":
        time.sleep(0.1)  # ten rounds
    watch.close(timeout_s=30)
    assert watch.state.startswith(state)
    assert len(rounds) >= 2 if state == "on" else len(rounds) == 1
    assert bool(watch.take()) == (state != "on")
