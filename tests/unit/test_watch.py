"""The diagnosis beside a trace: what it says, stores and has looked at."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from argus.diagnose import follow as follow_module
from argus.diagnose.follow import Follower
from argus.diagnose.hang import SEEN_S
from argus.diagnose.standing import News, in_words
from argus.diagnose.verdict import Finding
from argus.diagnose.watch import KEPT_NEWS, Watch
from argus.store.open import Store, parse_url


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


def test_a_hang_is_looked_for_in_the_moment_in_which_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def wait(_: object, seconds: float) -> bool:
        waits.append(seconds)
        return len(waits) > 1

    monkeypatch.setattr(threading.Event, "wait", wait)
    monkeypatch.setattr(Watch, "judge", lambda *_: 0.0)
    watch = Watch(nowhere(), "node-0", interval_s=5e6)
    follower = Follower(nowhere(), "job", 1, hang_after_s=1e6)
    follower._newest_ns = now_ns = 1_700_000_000_000_000_000
    monkeypatch.setattr(follow_module, "time", SimpleNamespace(time=lambda: now_ns / 1e9))
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
