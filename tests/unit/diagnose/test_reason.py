"""What the reason of a healthy verdict says of ranks that held the job up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from argus.diagnose.case import Asked, Case, Logged, Notes
from argus.diagnose.reason import _history, _of_healthy

STEPS = 40


def test_a_few_slow_steps_in_a_row_are_mentioned() -> None:
    """More in a row than a stall has."""
    numbers = np.arange(STEPS)
    for count, text in ((5, ""), (7, "rank 2 held the job up in steps 4 to 10, and no longer does")):
        slow = (numbers >= 4) & (numbers < 4 + count)
        rows = {"step": numbers, "rank": np.where(slow, 2, numbers % 8), "lead_ns": np.where(slow, 3e6, 1e5)}
        case = SimpleNamespace(
            query=lambda text, params, rows=rows: rows, params={}, numbers=numbers,
            durations=np.where(slow, 12e6, 10e6), threshold=0.05, across=None, reach=STEPS, calls=10.0,
        )  # fmt: skip
        assert _history(cast("Case", cast("Any", case))) == text


@pytest.mark.parametrize(
    ("until", "text"),
    [
        (24, "rank 2 held the job up in steps 0 to 23, and no longer does"),
        (STEPS, "rank 2 is the last since step 0, which costs too little of the newest steps to count"),
    ],
)
def test_a_rank_that_still_is_the_last_is_not_said_to_have_recovered(until: int, text: str) -> None:
    """Steps 4 to 23 are longer; after them its lead hides that it comes late."""
    numbers = np.arange(STEPS)
    lead = np.where(numbers < until, 3e6, 0.0)
    rows = {"step": numbers, "rank": np.full(STEPS, 2), "lead_ns": lead}
    durations = np.where((numbers >= 4) & (numbers < 24), 12e6, 10e6)
    case = SimpleNamespace(
        query=lambda text, params: rows, params={}, numbers=numbers, durations=durations, threshold=0.05,
        across=None, reach=STEPS, calls=10.0,
    )  # fmt: skip
    assert _history(cast("Case", cast("Any", case))) == text


@pytest.mark.parametrize(
    ("waits", "partial", "text"),
    [
        (
            ("backward",),
            True,
            "; backward contains the wait for other ranks, and a rank that is slower inside would not show",
        ),
        (
            ("backward", "communication"),
            True,
            "; backward and communication contain the wait for other ranks, and a rank",
        ),
        (("communication",), False, ""),
    ],
)
def test_a_bound_on_ranks_has_its_exception(waits: tuple[str, ...], partial: bool, text: str) -> None:
    """A rank that is slower inside a timer that contains the wait looks like the others, by however much."""
    logged = Logged(synchronous=True, least="a rank that needs less than 2.00 ms", partial=partial, waits=waits)
    case = SimpleNamespace(
        notes=Notes(logged=logged), across=None, lateness=None, gpus=None, transfers=None, baseline=None,
        asked=Asked(), numbers=np.arange(STEPS), durations=np.full(STEPS, 10e6), threshold=0.05,
    )  # fmt: skip
    reason = _of_healthy(cast("Case", cast("Any", case)), 10e6)
    bound = "as may a rank that needs less than 2.00 ms"
    assert bound in reason
    assert reason.partition(bound)[2].startswith(text)
    assert ("would not show" in reason) is partial
