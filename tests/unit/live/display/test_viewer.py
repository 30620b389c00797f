"""What people read of a running trace."""

from __future__ import annotations

from collections import Counter

import pytest

from argus.live.display.viewer import describe_phases
from argus.live.job import Job


@pytest.mark.parametrize(
    ("phased", "of"), [(2000, ""), (1801, ""), (23, " (of 23 of 2,000 steps whose phases were seen)")]
)
def test_where_steps_go_says_of_how_many_it_is(phased: int, of: str) -> None:
    job = Job("job", 1)
    job.phase_ns, job.hidden_ns, job.step_count, job.phased_steps = Counter(backward=3, data_loading=1), 2, 2000, phased
    assert describe_phases(job) == [
        f"where steps go: backward 75.0%, data loading 25.0%; communication behind them 50.0%{of}"
    ]
