"""What ``argus trace`` does while it watches."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from argus.roster import Notes
from argus.trace import Tracer
from cli import session


class Traced:
    """Stands in for a tracer: ends after some polls."""

    pace_s = 0.0
    jobs = (SimpleNamespace(name="j", run=7),)

    def __init__(self) -> None:
        self.polls = 0
        self.heeded: list[list[str]] = []

    def done(self) -> bool:
        return self.polls >= 2

    def poll(self) -> None:
        self.polls += 1

    def heed(self, matters: list[str]) -> None:
        self.heeded.append(matters)

    def news(self) -> list[str]:
        return ["stacks: 97 samples a second now: x"] if self.heeded else []

    def gpu_times(self) -> list[str]:
        return []

    def view(self) -> Any:
        raise AssertionError("it is not time for a line")


@pytest.mark.parametrize("judged", [True, False])
def test_what_is_the_matter_is_heeded_and_what_changes_is_said(judged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: 100.0, sleep=lambda seconds: None)
    monkeypatch.setattr(session, "time", clock)
    looked: list[list[tuple[str, int]]] = []
    watch: Any = SimpleNamespace(
        look=lambda runs: looked.append(list(runs)), lines=lambda: ["jitter: rank 3"], take=list
    )
    tracer: Any = Traced()
    said = io.StringIO()
    console = Console(file=said)
    session._watch(console, tracer, [], 160.0, None, True, watch if judged else None)
    # Whoever asked for a closer look (argus flag) is forgotten in time, even if nobody judges.
    assert tracer.heeded == [["jitter: rank 3"] if judged else []]
    assert looked == ([[("j", 7)]] if judged else [])
    assert "note: stacks: 97 samples a second now: x\n" in said.getvalue()


def test_a_tracer_notes_that_the_rate_has_changed() -> None:
    asked: list[str] = []

    def heed(why: str, now: float) -> str:
        asked.append(why)
        return f"changed: {why}" if why else ""

    notes: list[str] = []
    tracer: Any = SimpleNamespace(_stacks=SimpleNamespace(heed=heed), _note=notes.append)
    Tracer.heed(tracer, ["first", "second"])
    Tracer.heed(tracer, [])
    assert (asked, notes) == (["first", ""], ["changed: first"])


def test_every_note_is_news_once_however_many_there_are() -> None:
    notes = Notes()
    tracer: Any = SimpleNamespace(_roster=SimpleNamespace(notes=notes), _told=0)
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
