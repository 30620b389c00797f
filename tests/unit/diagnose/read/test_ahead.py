"""Queries that are begun before their answers are needed."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from argus.diagnose.read.ahead import AT_ONCE, Ahead

STEP = "SELECT {step:UInt32} AS step"
LONG_S = 60.0
"""Nothing waits for so long but a test that fails."""


class Asked:
    """A query that answers when it is let."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self.begun, self.let = threading.Semaphore(0), threading.Event()

    def __call__(self, text: str, params: Mapping[str, Any]) -> dict[str, Any]:
        self.seen.append((params["step"], threading.get_ident()))
        self.begun.release()
        assert self.let.wait(LONG_S)
        if params["step"] < 0:
            raise ValueError(params["step"])
        return {"step": np.array([params["step"]])}


def test_a_query_that_was_begun_runs_beside_and_once() -> None:
    query = Asked()
    with Ahead(query) as ahead:
        ahead.start(STEP, {"step": 1, "job": "of other queries"})
        assert query.begun.acquire(timeout=LONG_S)  # it runs, and nobody has asked for its answer
        query.let.set()
        # Another one, and the same again, are asked there and then.
        assert [ahead(STEP, {"step": step})["step"].tolist() for step in (2, 1, 1)] == [[2], [1], [1]]
    (first, beside), *others = query.seen
    assert first == 1
    assert beside != threading.get_ident()
    assert others == [(2, threading.get_ident()), (1, threading.get_ident())]


def test_what_fails_is_raised_where_it_is_asked_for() -> None:
    query = Asked()
    query.let.set()
    with Ahead(query) as ahead:
        ahead.start(STEP, {"step": -1})
        with pytest.raises(ValueError, match="-1"):
            ahead(STEP, {"step": -1})


def test_what_nobody_waits_for_is_not_begun_at_the_end() -> None:
    query = Asked()
    ahead = Ahead(query)
    for step in range(AT_ONCE + 3):
        ahead.start(STEP, {"step": step})
    for _ in range(AT_ONCE):
        assert query.begun.acquire(timeout=LONG_S)
    futures = [future for those in ahead._begun.values() for future in those]
    cancelled = threading.Semaphore(0)
    for future in futures:
        future.add_done_callback(lambda future: future.cancelled() and cancelled.release())
    ended = threading.Thread(target=ahead.__exit__)
    ended.start()
    for _ in range(3):
        assert cancelled.acquire(timeout=LONG_S)
    assert ended.is_alive()  # it waits for those that run
    query.let.set()
    ended.join(LONG_S)
    assert sorted(step for step, _ in query.seen) == list(range(AT_ONCE))
