"""A job that is diagnosed again and again: what is reported, when it ends, what it reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from argus.cli.diagnose import command
from argus.diagnose.follow import follow as module
from argus.diagnose.follow.follow import Follower, follow
from argus.diagnose.iteration.hang import SEEN_S
from argus.diagnose.verdict import Finding, Verdict
from argus.model.errors import ArgusError
from argus.store.open import Store, open_store
from argus.store.url import parse_url
from tests.builders.stored_job import WALL, store_job
from tests.builders.synthetic_job import Fault, ddp, simulate
from tests.stores import new_store


def finding(kind: str, rank: int, slowdown: float, step: int = 40) -> Finding:
    return Finding(
        kind=kind, ranks=[rank], hosts=[], steps=[step, 99], phase="", kernels=[], slowdown=slowdown, share=1.0,
        confidence=1.0, level="phase", id=f"{kind}{rank}", owner="platform", evidence=[], action="",
    )  # fmt: skip


def verdict(status: Any, *findings: Finding, ended: bool = False, **dropped: int) -> Verdict:
    return Verdict(
        schema="argus.verdict/1", job="job", run=1, ranks=2, steps=[0, 99], status=status, slowdown=1.0,
        findings=list(findings), coverage={"complete": True, "dropped": dropped, "ended": ended}, reason="",
    )  # fmt: skip


@pytest.fixture
def follower() -> Follower:
    return Follower(Store(parse_url("chdb:///nowhere"), create=False), "job", 1)


def reported_findings(follower: Follower, found: Verdict) -> tuple[bool, list[str], list[str]]:
    round_ = follower._round(found, 0.1)
    return round_.changed, [f["kind"] for f in round_.new], [f["kind"] for f in round_.gone]


def test_only_what_changed_is_reported(follower: Follower) -> None:
    slow = finding("data_loading", 1, 1.5)
    assert reported_findings(follower, verdict("healthy")) == (True, [], [])
    assert reported_findings(follower, verdict("healthy")) == (False, [], [])
    assert reported_findings(follower, verdict("degraded", slow)) == (True, ["data_loading"], [])
    assert reported_findings(follower, verdict("degraded", finding("data_loading", 1, 1.6))) == (False, [], [])
    assert reported_findings(follower, verdict("degraded", finding("data_loading", 1, 2.0))) == (
        True,
        ["data_loading"],
        [],
    )
    other = finding("gc_pause", 0, 1.2)
    assert reported_findings(follower, verdict("degraded", slow, other)) == (True, ["data_loading", "gc_pause"], [])
    assert reported_findings(follower, verdict("degraded", other)) == (True, [], ["data_loading"])
    assert reported_findings(follower, verdict("healthy")) == (True, [], ["gc_pause"])
    # Again.
    assert reported_findings(follower, verdict("degraded", slow)) == (True, ["data_loading"], [])


def ids(follower: Follower, *findings: Finding) -> list[str]:
    return [one["id"] for one in follower._round(verdict("degraded", *findings), 0.1).verdict["findings"]]


def with_ranks(kind: str, *ranks: int) -> Finding:
    return {**finding(kind, ranks[0], 1.5), "ranks": list(ranks)}


def test_a_finding_keeps_its_id_for_as_long_as_it_is_open(follower: Follower) -> None:
    (first,) = ids(follower, with_ranks("data_loading", 3))
    assert ids(follower, with_ranks("data_loading", 3)) == [first]
    # Ranks join, also one before it, and leave.
    assert ids(follower, with_ranks("data_loading", 3, 4)) == [first]
    other, same = ids(follower, with_ranks("data_loading", 9), with_ranks("data_loading", 1, 3, 4))
    assert same == first != other
    grown = follower._round(verdict("degraded", with_ranks("data_loading", 1, 4)), 0.1)
    assert [one["id"] for one in grown.verdict["findings"]] == [first]
    assert [one["ranks"] for one in grown.new] == [[1, 4]]
    assert [one["ranks"] for one in grown.gone] == [[9]], "what has other ranks now is not over"
    # It parts: the larger one goes on, and the other is new.
    apart = ids(follower, with_ranks("data_loading", 1), with_ranks("data_loading", 4))
    assert first in apart
    assert len(set(apart)) == 2
    kinds = ids(follower, with_ranks("gc_pause", 1))
    assert not set(kinds) & {*apart, first, other}


def test_a_hang_that_lasts_is_reported_once(follower: Follower) -> None:
    assert reported_findings(follower, verdict("hung", finding("hang", 1, 100.0)))[1] == ["hang"]
    assert reported_findings(follower, verdict("hung", finding("hang", 1, 900.0))) == (False, [], [])


def test_the_step_since_when_stays_when_the_window_moves_on(follower: Follower) -> None:
    follower._round(verdict("degraded", finding("jitter", 1, 1.5, step=40)), 0.1)
    later = follower._round(verdict("degraded", finding("jitter", 1, 1.5, step=70)), 0.1)
    assert later.verdict["findings"][0]["steps"] == [40, 99]


def test_since_when_all_steps_are_longer_is_what_the_evidence_says(follower: Follower) -> None:
    """Load came, went, and came again: the second time is not since the first."""
    for step in (40, 70):
        longer = finding("host_contention", 1, 1.5, step=step)
        longer["evidence"] = [{"text": f"from step {step} on a step takes 4.10 ms instead of 3.00 ms", "sql": ""}]
        found = follower._round(verdict("degraded", longer), 0.1)
        assert found.verdict["findings"][0]["steps"] == [step, 99]


def test_it_ends_with_the_trace(follower: Follower) -> None:
    assert not follower._round(verdict("healthy"), 0.1).ended
    assert follower._round(verdict("healthy", ended=True), 0.1).ended
    assert follower._round(verdict("healthy", trace_cut_off=1), 0.1).ended


class Scripted(Follower):
    """Takes so long, or fails."""

    def __init__(self, script: list[float | str]) -> None:
        super().__init__(Store(parse_url("chdb:///nowhere"), create=False), "job", 1)
        self.script = script

    def next_round(self) -> module.Round:
        what = self.script.pop(0)
        if isinstance(what, str):
            raise ArgusError(what)
        return self._round(verdict("healthy", ended=not self.script), what)


def test_rounds_go_on_when_the_store_is_away_and_a_slow_one_is_spared() -> None:
    waits: list[float] = []
    output: list[str] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return False

    rounds = list(follow(Scripted([0.0, "away", 2.0, 0.0]), wait, lambda failure: output.append(failure.message), 5.0))
    assert len(rounds) == 3
    assert output == ["away"]
    assert waits == pytest.approx([5.0, 5.0, 8.0], abs=0.1)
    assert len(list(follow(Scripted([0.0, 0.0]), lambda _: True, print, 5.0))) == 1


def test_a_hang_is_looked_for_in_the_moment_in_which_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the pauses are."""
    now_ns = 1_700_000_000_000_000_000
    clock = SimpleNamespace(time=lambda: now_ns / 1e9, time_ns=lambda: now_ns, monotonic=lambda: 0.0)
    monkeypatch.setattr(module, "time", clock)
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return False

    follower = Scripted([0.0, 1e6, 0.0])
    follower.hang_after_s, follower._newest_ns = 1e6, now_ns
    list(follow(follower, wait, print, 5e6))
    assert waits == pytest.approx([1e6 + SEEN_S] * 2)
    # Once it is past, or before any step, pauses are what they are.
    for newest_ns in (now_ns - int(1.1e15), 0):
        waits.clear()
        follower.script, follower._newest_ns = [0.0, 0.0], newest_ns
        list(follow(follower, wait, print, 5e6))
        assert waits == pytest.approx([5e6])


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    url = new_store(tmp_path_factory.mktemp("follow"))
    job = simulate(4, 120, ddp(), faults=(Fault("compute", (2,), 1.8, start=60),))
    with open_store(url) as store:
        store_job(store, "ddp", job)
        yield url


def test_the_newest_steps_are_judged(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEPS", 50)
    with open_store(url) as store:
        found = Follower(store, "ddp", 1).next_round()
        assert found.ended
        assert found.verdict["status"] == "degraded"
        first, last = found.verdict["steps"]
        assert last - first == 49
        # From a time on: the last second has few steps.
        newest = Follower(store, "ddp", 1)
        newest.next_round()
        late = Follower(store, "ddp", 1, since_ns=newest._newest_ns - 1_000_000_000).next_round()
        assert first < late.verdict["steps"][0] <= last
    assert newest._newest_ns > WALL


def test_the_verb_prints_a_line_of_json_a_change(url: str) -> None:
    done = CliRunner().invoke(command, ["--follow", "--format", "json", "--store", url, "--no-store"])
    assert done.exit_code == 0, done.output
    (line,) = done.output.splitlines()
    answer = json.loads(line)
    assert answer["status"] == "degraded"
    assert answer["change"]["ended"] is True
    (found,) = answer["findings"]
    assert answer["change"]["new"] == [{"id": found["id"], "kind": found["kind"], "ranks": [2]}]
    text = CliRunner().invoke(command, ["--follow", "--store", url, "--no-store"]).output
    assert text.startswith("---- ")
    assert text.endswith("the trace has ended\n")


def test_since_is_a_span_before_the_end_or_a_time(url: str) -> None:
    def steps(*words: str) -> list[int]:
        done = CliRunner().invoke(command, ["--format", "json", "--store", url, "--no-store", *words])
        assert done.exit_code == 0, done.output
        found: list[int] = json.loads(done.output)["steps"]
        return found

    first, last = steps()
    late = steps("--since", "1s")
    assert first < late[0] <= late[1] == last
    assert steps("--since", "2000-01-01T00:00:00") == [first, last]
    assert steps("--since", "2100-01-01T00:00:00") == []


def test_follow_and_steps_exclude_each_other(tmp_path: Path) -> None:
    done = CliRunner().invoke(command, ["--follow", "--steps", "1:5", "--store", f"chdb://{tmp_path}"])
    assert isinstance(done.exception, ArgusError)
    assert "--steps" in done.exception.message
