"""How far chance goes, against exact numbers; and that a trace that starts does not load scipy."""

from __future__ import annotations

import math
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argus.diagnose.chance import binomial_tail, log_choose, outlier_limit
from argus.diagnose.iteration.changes import SLACK, threshold
from argus.diagnose.ranks.lateness import by_chance


@pytest.mark.thorough
@given(trials=st.integers(1, 250), share=st.floats(1e-4, 0.99), part=st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_the_tail_of_the_binomial_distribution(trials: int, share: float, part: float) -> None:
    hits, chance = 1 + int(part * (trials - 1)), Fraction(share)
    exact = sum(math.comb(trials, k) * chance**k * (1 - chance) ** (trials - k) for k in range(hits, trials + 1))
    assert isinstance(exact, Fraction)
    expected = math.log(exact.numerator) - math.log(exact.denominator)
    # Below the least number there is only its first term.
    close = 0.1 if expected < -700 else 1e-9
    assert binomial_tail(hits, trials, share) == pytest.approx(expected, rel=1e-9, abs=close)


def test_a_tail_too_small_for_a_number_is_still_one() -> None:
    """300 of 10,240 ranks that are last in 250 of 250 steps: which 300 they are is anybody's choice."""
    tail = binomial_tail(250, 250, 300 / 10240)
    assert tail == pytest.approx(250 * math.log(300 / 10240))
    assert math.exp(tail) == 0.0
    assert log_choose(10240, 300) > -tail
    assert by_chance(250, 250, 300, 10240) == 1.0
    assert by_chance(250, 250, 1, 10240) == 0.0


def test_how_far_one_of_many_must_be() -> None:
    assert outlier_limit(0.05, 1, 0.0) == pytest.approx(1.6449, abs=1e-4)
    assert outlier_limit(1e-3, 1000, 3.5) == pytest.approx(4.7534, abs=1e-4)
    assert outlier_limit(1e-3, 2, 3.5) == 3.5


def test_where_a_sum_alarms_is_siegmunds() -> None:
    limit = threshold(1e6)
    x = 2 * SLACK * (limit + 1.166)
    assert (math.exp(x) - x - 1) / (2 * SLACK**2) == pytest.approx(1e6, rel=1e-9)


def test_a_trace_that_starts_does_not_load_scipy() -> None:
    """It costs 0.2 s of CPU time and 30 MB, and is first needed when a job has ten steps."""
    code = (
        "import sys, argus.cli.trace, argus.cli.run, argus.cli.session, argus.cli.live, argus.cli.closing; "
        "import argus.live.tracer, argus.diagnose.follow.watch; "
        "print(sorted(name for name in sys.modules if name.split('.')[0] == 'scipy'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
