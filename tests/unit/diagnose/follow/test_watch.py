"""The diagnosis beside a trace: what it says, stores and has looked at."""

from __future__ import annotations

import threading
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from argus.diagnose import save as save_module
from argus.diagnose.follow import follow as follow_module
from argus.diagnose.follow import watch as watch_module
from argus.diagnose.follow.follow import Follower, Round
from argus.diagnose.follow.standing import News, Standing, in_words
from argus.diagnose.follow.watch import EARLY_S, INTERVAL_S, KEPT_NEWS, Watch
from argus.diagnose.iteration.hang import SEEN_S
from argus.diagnose.verdict import Finding
from argus.model.errors import ArgusError
from argus.store.open import Store
from argus.store.url import parse_url


def nowhere(url: str = "chdb:///nowhere") -> Store:
    return Store(parse_url(url), create=False)


def finding(kind: str, ranks: list[int], hosts: list[str]) -> Finding:
    return Finding(
        kind=kind, ranks=ranks, hosts=hosts, steps=[7, 9], phase="", kernels=[], slowdown=1.5, share=1.0,
        confidence=1.0, level="phase", id=f"{kind}{ranks}", owner="platform", evidence=[], action="Look.",
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


def test_a_hang_is_looked_for_in_the_moment_in_which_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def wait(_: object, seconds: float) -> bool:
        waits.append(seconds)
        return len(waits) > 1

    monkeypatch.setattr(threading.Event, "wait", wait)
    monkeypatch.setattr(Watch, "diagnose_run", lambda *_: 0.0)
    watch = Watch(nowhere(), "node-0", interval_s=5e6)
    follower = Follower(nowhere(), "job", 1, hang_after_s=1e6)
    follower._newest_ns = now_ns = 1_700_000_000_000_000_000
    monkeypatch.setattr(follow_module, "time", SimpleNamespace(time=lambda: now_ns / 1e9))
    monkeypatch.setattr(watch_module, "EARLY_S", (5e6,))
    watch._runs, watch._followers = {("job", 1)}, {("job", 1): follower}
    watch._go_on()
    assert waits == pytest.approx([5e6, 1e6 + SEEN_S])


def test_news_that_nobody_takes_are_bounded() -> None:
    """The live view shows what is the matter now, and takes none."""
    watch = Watch(nowhere(), "node-0")
    watch._news.extend(News("over", text=str(number)) for number in range(10_000))
    news = watch.take()
    assert len(news) == KEPT_NEWS
    assert news[-1].text == "9999"


def test_the_first_rounds_come_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def wait(_: object, seconds: float) -> bool:
        waits.append(seconds)
        return len(waits) > 6

    monkeypatch.setattr(threading.Event, "wait", wait)
    monkeypatch.setattr(Watch, "diagnose_run", lambda *_: 0.25)
    watch = Watch(nowhere(), "node-0")
    watch._runs = {("job", 1)}
    watch._go_on()
    assert waits[0] == EARLY_S[0]
    assert waits[1:4] == pytest.approx([seconds - 0.25 for seconds in EARLY_S[1:]])
    assert waits[4:] == pytest.approx([INTERVAL_S - 0.25] * 3)
    assert sum(EARLY_S) <= INTERVAL_S, "what is reported for good comes no later than before"


class Beside:
    """A job whose rounds take half a second, beside those of another user, whose rounds may take longer. Time passes
    where they are judged or waited for.

    Attributes:
        seen: When rounds of the honest job began, s.
        limits: How long those of the others might take.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, others: dict[tuple[str, int], float], until_s: float) -> None:
        self.now = 0.0
        self.seen: list[float] = []
        self.limits: list[float] = []
        self.hung_at: float | None = None
        self.found_at: float | None = None
        honest = ("z honest", 1)

        def wait(_: object, seconds: float) -> bool:
            self.now += seconds
            return self.now > until_s

        def judge(watch: Watch, job: str, run: int) -> float:
            took, limit_s = 0.5, float("inf")
            assert watch._store.bounds is not None
            if (job, run) == honest:
                self.seen.append(self.now)
                if self.hung_at is not None and self.found_at is None and self.due_s() == float("inf"):
                    self.found_at = self.now + took
            else:
                took, limit_s = others[job, run], watch._store.bounds.until_s - self.now
                self.limits.append(limit_s)
            self.now += took
            if took > limit_s:
                raise ArgusError("it took too long")
            return took

        monkeypatch.setattr(threading.Event, "wait", wait)
        monkeypatch.setattr(Watch, "diagnose_run", judge)
        monkeypatch.setattr(watch_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.watch = Watch(nowhere(), "node-0")
        self.watch._owners = {honest: (1000, ""), **dict.fromkeys(others, (1001, ""))}
        self.watch._runs = set(self.watch._owners)
        follower: Any = SimpleNamespace(due_s=self.due_s)
        self.watch._followers = {honest: follower}

    def due_s(self) -> float:
        """As the follower's: when silence since the newest step counts as a hang."""
        if self.hung_at is None:
            return 20.0 + SEEN_S
        left = self.hung_at + 20.0 + SEEN_S - self.now
        return left if left > 0 else float("inf")


def test_a_user_with_a_hundred_jobs_does_not_delay_what_is_found_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = Beside(monkeypatch, {(f"a{number:03}", 1): 1.0 for number in range(100)}, 600.0)
    beside.watch._go_on()
    pauses = [after - before for before, after in pairwise(beside.seen)]
    assert beside.seen[0] <= EARLY_S[0] + 1.0
    assert max(pauses) <= INTERVAL_S + 1.5
    assert len(beside.limits) > 50, "the others are judged as well"
    assert len(beside.limits) * 1.0 + len(beside.seen) * 0.5 <= 600 / 4, "for about a fifth of the time"


@pytest.mark.parametrize("hung_at", [100.0, 103.0, 111.5])
def test_a_hang_beside_a_hundred_jobs_is_named_within_half_a_minute(
    monkeypatch: pytest.MonkeyPatch, hung_at: float
) -> None:
    beside = Beside(monkeypatch, {(f"a{number:03}", 1): 3.0 for number in range(100)}, 300.0)
    beside.hung_at = hung_at
    beside.watch._go_on()
    assert beside.found_at is not None
    assert beside.found_at - hung_at <= 30.0


def test_a_job_whose_rounds_fail_is_judged_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time counts, too: what a store could not answer has kept it as busy."""
    beside = Beside(monkeypatch, {("a", 1): 50.0}, 3600.0)
    beside.watch._go_on()
    assert beside.limits[:4] == [4.0, 8.0, 16.0, 32.0]
    assert 50.0 * len(beside.limits) <= 3600 / 5


def test_what_many_containers_of_a_user_take(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = Beside(monkeypatch, {(f"a{number:03}", 1): 1.0 for number in range(100)}, 600.0)
    for number in range(100):
        beside.watch._owners[f"a{number:03}", 1] = (1001, f"pod {number}")
    beside.watch._go_on()
    assert max(after - before for before, after in pairwise(beside.seen)) <= INTERVAL_S + 1.5


NOTHING: list[Finding] = []


def rounds(*seen: tuple[str, list[Finding]]) -> Watch:
    """A watch after rounds with these verdicts: status and findings."""
    watch = Watch(nowhere(), "node-0")
    before: dict[str, Finding] = {}
    for status, findings in seen:
        now = {each["kind"]: each for each in findings}
        new = [each for name, each in now.items() if name not in before]
        gone = [each for name, each in before.items() if name not in now]
        verdict: Any = {"status": status, "findings": findings, "reason": ""}
        watch._report("job", 1, Round(0, 0.1, verdict, new, gone, True, False))
        before = now
    return watch


def test_what_is_found_early_is_reported_once_two_rounds_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its first seconds Argus itself starts."""
    saved: list[object] = []
    monkeypatch.setattr(save_module, "save", lambda _, verdict: saved.append(verdict))
    slow, late = finding("regression", [], []), finding("data_loading", [1], ["a"])
    once = rounds(("degraded", [slow]))
    assert once.standing("job", 1) == Standing("degraded", [slow], provisional=True)
    assert (once.take(), once.lines(), saved) == ([], [], [])
    passed = rounds(("degraded", [slow]), ("healthy", NOTHING))
    assert passed.standing("job", 1) == Standing("healthy", provisional=True)
    assert (passed.take(), saved) == ([], [])
    again = rounds(("inconclusive", NOTHING), ("degraded", [late]), ("degraded", [late, slow]))
    assert [(news.what, news.finding) for news in again.take()] == [("found", late)]
    assert again.lines() == [in_words(late)]
    assert len(saved) == 1
    settled = rounds(*[("healthy", NOTHING)] * (len(EARLY_S) - 1), ("degraded", [slow]), ("healthy", NOTHING))
    assert [news.what for news in settled.take()] == ["found", "over"]
    assert settled.standing("job", 1) == Standing("healthy")


def test_what_could_not_be_examined_is_counted_and_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = iter([("late_ranks",), ("late_ranks",), ("late_ranks", "growth"), ()])
    verdict: Any = {"status": "inconclusive", "findings": [], "reason": "late ranks could not be examined"}
    monkeypatch.setattr(watch_module, "in_charge", lambda *_: "node-0")
    monkeypatch.setattr(
        Follower, "next_round", lambda _: Round(0, 0.1, verdict, [], [], True, False, failed=next(failed))
    )
    watch = Watch(nowhere(), "node-0")
    counts = []
    for _ in range(4):
        watch.diagnose_run("job", 1)
        counts.append((watch.detectors_failed("job", 1), len(watch.take())))
    assert counts == [(1, 1), (1, 0), (2, 1), (2, 0)]
    assert watch.detectors_failed("job", 2) == 0


def test_that_no_step_was_seen_yet_is_no_early_verdict() -> None:
    assert rounds(("inconclusive", NOTHING)).standing("job", 1) is None
    known = rounds(*[("inconclusive", NOTHING)] * len(EARLY_S)).standing("job", 1)
    assert known == Standing("inconclusive")
