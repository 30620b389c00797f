"""The runs of a side, read from the store or from the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from argus.compare.distributions import with_distributions
from argus.diagnose.read.baseline import baseline_of
from argus.diagnose.read.profile import Profile, class_name, read_profile, same_work
from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.store.open import Store
from argus.store.reader import query_columns


def read_side(store: Store, runs: Sequence[tuple[str, int]]) -> list[Profile]:
    """The figures of runs, each (job, run).

    Raises:
        ArgusError: One is too short, or the store cannot be asked.
    """
    query = partial(query_columns, store)
    return [with_distributions(query, read_profile(query, job, run)) for job, run in runs]


def baseline_side(store: Store, side: Sequence[Profile]) -> list[Profile]:
    """The baseline of runs: of the first one's class, with the same work, and none of the runs themselves.

    Raises:
        ArgusError: There is none.
    """
    among = {(one.job, one.run) for one in side}
    baseline = baseline_of(partial(query_columns, store), side[0])
    runs = [one for one in baseline.runs if (one.job, one.run) not in among and same_work(one, side[0])]
    if not runs:
        many, differing = baseline.elsewhere
        other = f" ({many} of '{class_name(side[0].job)}' have {differing})" if many else ""
        raise ArgusError(
            f"no earlier run of the class of '{side[0].job}' is a baseline{other}",
            "Name runs to compare with (--against JOB@RUN), or make one a baseline: argus baseline set",
            EXIT_UNAVAILABLE,
        )  # fmt: skip
    return runs
