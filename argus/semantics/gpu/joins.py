"""Rows joined by thread, or by id, and by time: for all threads at once.

How many threads or ids there are is up to the process that is traced, so nothing here takes a pass for each of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def last_of(group: NDArray[Any], time: NDArray[np.int64], of: NDArray[Any], at: NDArray[np.int64]) -> NDArray[np.int64]:
    """The last row of its group that is no later than each moment; of rows at one time the last one.

    Args:
        group: Of each row, shape (n,): integers.
        time: When each row is, shape (n,), in any order.
        of: The group that is looked in, shape (m,): of the same type as ``group``.
        at: The moment, shape (m,).

    Returns:
        Places in ``group``, -1: there is none. Shape (m,).
    """
    if not len(group):
        return np.full(len(of), -1)
    order = np.lexsort((time, group))
    groups, number = np.unique(group[order], return_inverse=True)
    moments = np.sort(time)
    # A group's number and the place of the time in all times, as one number: 1 to n, and 0 is before all.
    each = len(group) + 1
    keys = number * each + np.searchsorted(moments, time[order], side="right")
    asked = np.minimum(np.searchsorted(groups, of), len(groups) - 1)
    place = np.searchsorted(keys, asked * each + np.searchsorted(moments, at, side="right"), side="right") - 1
    there = (groups[asked] == of) & (place >= 0) & (number[place] == asked)
    return np.where(there, order[place], -1)


def running_max(values: NDArray[np.int64], first: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The largest value up to each row, that included, since its group began. Shape (n,).

    Args:
        values: Shape (n,).
        first: Which rows begin a group, shape (n,).
    """
    order = np.argsort(values, kind="stable")
    rank = np.empty(len(values), np.int64)
    rank[order] = np.arange(len(values))
    # Ranks of later groups are raised above those of all before.
    raised = np.cumsum(first) * len(values)
    largest: NDArray[np.int64] = values[order[np.maximum.accumulate(rank + raised) - raised]]
    return largest
