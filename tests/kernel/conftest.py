"""Real BPF programs on real processes of the fake GPU."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from argus.capture.process.targets import maps_cuda
from tests.stores import new_store

if TYPE_CHECKING:
    from argus.live.tracer import Tracer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fakegpu"))


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0, what: str = "it") -> None:
    """Waits for something another process does; fails if it does not."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {timeout_s} s for {what}")
        time.sleep(0.01)


def poll_until(tracer: Tracer, condition: Callable[[], bool], timeout_s: float = 60.0, what: str = "it") -> None:
    """Polls a tracer until something happens; fails if it does not."""

    def polled() -> bool:
        tracer.poll()
        return condition()

    wait_until(polled, timeout_s, what)


def wait_for_cuda(pids: list[int]) -> None:
    """Waits until processes have loaded their libraries: before exec they still look like this test."""
    wait_until(lambda: all(maps_cuda(pid) for pid in pids), what="the job to load libcuda")


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    """An embedded store of the test's own."""
    return new_store(tmp_path)
