"""What ``argus trace`` does while it watches."""

from __future__ import annotations

import io
import signal
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from argus.cli import session
from argus.cli.live import Scene
from argus.live.bulkhead import Bulkheads
from argus.live.notes import Notes
from argus.live.tracer import Tracer
from tests.builders.live_views import JOB, a_view, degraded


class Traced:
    """Stands in for a tracer: ends after some polls."""

    pace_s = 0.0
    jobs = (SimpleNamespace(name="j", run=7, owner=(1000, "")),)

    def __init__(self) -> None:
        self.polls = 0
        self.bulkheads = Bulkheads()
        self.matters_seen: list[list[str]] = []

    def done(self) -> bool:
        return self.polls >= 2

    def poll(self) -> None:
        self.polls += 1

    def raise_sampling(self, matters: list[str]) -> None:
        self.matters_seen.append(matters)

    def news(self) -> list[str]:
        return ["stacks: 97 samples a second now: x"] if self.matters_seen else []

    def gpu_times(self) -> list[str]:
        return []

    def view(self) -> Any:
        raise AssertionError("it is not time for a line")


@pytest.mark.parametrize("judged", [True, False])
def test_what_is_the_matter_raises_sampling_and_what_changes_is_reported(
    judged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: 100.0))
    monkeypatch.setattr(session.interrupt, "pause", lambda stopping, seconds: None)
    looked: list[list[tuple[str, int]]] = []
    watch: Any = SimpleNamespace(
        look=lambda runs: looked.append(list(runs)), lines=lambda: ["jitter: rank 3"], take=list, state="on"
    )
    tracer: Any = Traced()
    output = io.StringIO()
    console = Console(file=output)
    session._watch(console, tracer, [], 160.0, None, True, watch if judged else None)
    # Whoever asked for a closer look (argus flag) is forgotten in time, even if nobody judges.
    assert tracer.matters_seen == [["jitter: rank 3"] if judged else []]
    assert looked == ([[("j", 7)]] if judged else [])
    assert "note: stacks: 97 samples a second now: x\n" in output.getvalue()


def test_a_tracer_notes_that_the_rate_has_changed() -> None:
    asked: list[str] = []

    def raise_sampling(why: str, now: float) -> str:
        asked.append(why)
        return f"changed: {why}" if why else ""

    notes: list[str] = []
    tracer: Any = SimpleNamespace(
        _stacks=SimpleNamespace(raise_sampling=raise_sampling), session=SimpleNamespace(note=notes.append)
    )
    Tracer.raise_sampling(tracer, ["first", "second"])
    Tracer.raise_sampling(tracer, [])
    assert (asked, notes) == (["first", ""], ["changed: first"])


def test_every_note_is_news_once_however_many_there_are() -> None:
    notes = Notes()
    tracer: Any = SimpleNamespace(session=SimpleNamespace(notes=notes), _reported_notes=0)
    seen: list[str] = []
    for number in range(250):
        notes.append(str(number))
        if number % 50 == 49:
            seen += Tracer.news(tracer)
    assert seen == [str(number) for number in range(250)]
    assert Tracer.news(tracer) == []
    for number in range(150):
        notes.append(str(number))
    assert Tracer.news(tracer) == [str(number) for number in range(50, 150)], "those that are kept"


class Screenful:
    """Stands in for a screen: its keys come one after the other."""

    size = (80, 24)

    def __init__(self, *keys: str) -> None:
        self.left = list(keys)
        self.drawn: list[list[str]] = []

    def keys(self, seconds: float, stopping: list[int]) -> list[str]:
        return [self.left.pop(0)] if self.left else []

    def draw(self, lines: list[Text]) -> None:
        self.drawn.append([line.plain for line in lines])


def test_keys_take_effect_at_once_and_q_ends_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: 100.0))
    tracer: Any = SimpleNamespace(jobs=[SimpleNamespace(name=JOB, run=7)])
    watch: Any = SimpleNamespace(standing=lambda job, run: degraded(1)[job, run], state="on")
    screen: Any = Screenful("?", "?", "q")
    scene, stopping = Scene(), []
    session._react(screen, scene, a_view(4), tracer, watch, 160.0, stopping)
    assert "this help" in "\n".join(screen.drawn[0])
    assert screen.drawn[1][0].startswith(" DEGRADED ")
    assert (len(screen.drawn), stopping) == (2, [signal.SIGINT])
