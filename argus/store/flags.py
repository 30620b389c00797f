"""Marks in the store which moments are kept kernel by kernel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from argus.model.errors import ArgusError
from argus.store.open import Store
from argus.store.writer import Writer


@dataclass(frozen=True)
class Flag:
    """A moment whose operations are wanted one by one.

    Attributes:
        begin_ns, end_ns: Wall time.
        ranks: Whose; none: all.
        why: What for, in words.
    """

    begin_ns: int
    end_ns: int
    ranks: tuple[int, ...]
    why: str


def flag(store: Store, job: str, run: int, wanted: Flag) -> None:
    """Asks for a moment.

    Raises:
        ArgusError: The store cannot be written to.
    """
    writer = Writer(store, source="flag")
    writer.append(
        "raw_requests",
        {
            "job": job,
            "run": run,
            "ts": np.array([wanted.begin_ns], np.int64),
            "until": np.array([wanted.end_ns], np.int64),
            "ranks": [list(wanted.ranks)],
            "why": wanted.why,
        },
    )
    report = writer.close(timeout_s=10.0)
    if report.dropped:
        raise ArgusError(f"the flag was not stored: {report.last_error}", "See: argus store status")
