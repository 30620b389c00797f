"""What of a job was observed, and since when: what was thinned out, detached or not attached yet is unknown.

Argus attaches its probes one after the other, and takes some away, or watches in windows, where they cost too much
(``signal_coverage``). Nothing may be concluded from the silence of a signal that was not observed throughout, nor from
a step time that changed when Argus itself did. Stores without such rows count as observed throughout.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.diagnose.read import queries
from argus.diagnose.read.query import Query
from argus.model.errors import ArgusError

WINDOWS = 3
"""Windows that must have passed without anything until what is observed in windows only counts as silent."""
THROUGHOUT = 0.999
"""Share of the time (a float of 32 bits) from which on a signal is observed throughout."""
SETTLED_S = 5.0
"""So long after Argus came, its own start (symbols, a store that is set up) may take CPUs from the job."""
ENDING_S = 5.0
"""What was not observed in the last moments before Argus looked last is no reason for doubt: a trace takes seconds to
end."""
AROUND_S = 2.0
"""A change of the step time that is so close to one of Argus's own probes may be its doing: the position of a change
point is a few steps off, and what is attached takes a second to be attached everywhere."""


def on_cpus_alone(query: Query, params: Mapping[str, Any]) -> bool:
    """Whether a job that was traced uses no GPU: then no advice is to be about one.

    Args:
        query: Runs SQL with parameters, returns columns.
        params: job, run.
    """
    alone = query(queries.ON_CPUS, {"job": params["job"], "run": params["run"]})["alone"]
    return bool(len(alone) and alone[0])


@dataclass(frozen=True)
class Silence:
    """How long the signals that a job's steps consist of were observed to be silent.

    Attributes:
        observed_s: The longest such time of a signal that was observed throughout it; 0: none was.
        windows: It was observed in windows only.
        unobserved: What was not observed all of the time, since when and why; empty: all signals were. Then only what
            others wait for shows that nothing goes on.
    """

    observed_s: float
    windows: bool = False
    unobserved: str = ""


class Observed:
    """What was observed of one run.

    Args:
        query: Runs SQL with parameters, returns columns.
        params: job, run.
    """

    def __init__(self, query: Query, params: Mapping[str, Any]) -> None:
        try:
            rows = query(queries.SIGNALS, params)
        except ArgusError:
            rows = {}  # the store is of an Argus that did not write this yet; if it is away, the next query fails
        self._rows: dict[str, NDArray[Any]] = rows if len(rows.get("signal", ())) else {}

    def __bool__(self) -> bool:
        return bool(self._rows)

    @property
    def attached_ns(self) -> int:
        """When the first signal was observed, wall time; 0: not known."""
        return int(self._rows["ts_ns"].min()) if self else 0

    def has(self, signal: str) -> bool:
        """Whether a signal has a source in any rank."""
        return bool(self) and bool(np.any(self._rows["signal"] == signal))

    def stayed(self, signal: str, to_ns: int) -> bool:
        """Whether a signal was observed throughout on all ranks, once it was attached, up to a moment (wall time). It
        counts as observed where nothing was stored of it."""
        if not self.has(signal):
            return True
        chosen = self._rows["signal"] == signal
        thinned = chosen & (self._rows["seen"] < THROUGHOUT)
        return not bool(np.any(self._rows["ts_ns"][thinned] < to_ns - ENDING_S * 1e9))

    def until(self, signal: str, since_ns: int, ranks: Collection[int] | None = None) -> tuple[int, float, int, str]:
        """Until when a signal was observed throughout, from a moment on, on all of some ranks.

        Args:
            signal: Its name, as in the table ``signal_coverage``.
            since_ns: From when on, wall time.
            ranks: None: all.

        Returns:
            The time (:data:`FOREVER`: no change was stored; ``since_ns``: it was not observed then), the share of the
            time that it is observed from then on, the period of its windows in ns, and why.
        """
        first: tuple[int, float, int, str] = (FOREVER, 1.0, 0, "")
        if not self:
            return first
        chosen = self._rows["signal"] == signal
        if ranks is not None:
            chosen &= np.isin(self._rows["rank"], list(ranks))
        by_rank: dict[int, list[int]] = {}
        for place in np.flatnonzero(chosen).tolist():
            by_rank.setdefault(int(self._rows["rank"][place]), []).append(place)
        for places in by_rank.values():
            for number, place in enumerate(places):
                ends = int(self._rows["ts_ns"][places[number + 1]]) if number + 1 < len(places) else FOREVER
                if ends <= since_ns or self._rows["seen"][place] >= THROUGHOUT:
                    continue
                lost = max(int(self._rows["ts_ns"][place]), since_ns)
                if lost < first[0]:
                    seen, period = float(self._rows["seen"][place]), int(self._rows["period_ns"][place])
                    first = lost, seen, period, str(self._rows["reason"][place])
                break
            if places and int(self._rows["ts_ns"][places[0]]) > since_ns and since_ns < first[0]:
                first = since_ns, 0.0, 0, "it was not attached yet"
        return first

    def changes(self) -> list[tuple[int, str]]:
        """When Argus changed what it observes, after it came: wall time in ns, and why."""
        if not self:
            return []
        changes: dict[int, str] = {}
        begun: set[tuple[int, str]] = set()
        for rank, signal, ts, reason in zip(
            *(self._rows[name].tolist() for name in ("rank", "signal", "ts_ns", "reason")), strict=True
        ):
            if (rank, signal) in begun or ts > self.attached_ns + SETTLED_S * 1e9:
                changes[int(ts)] = changes.get(int(ts)) or str(reason) or f"{signal} are observed"
            begun.add((rank, signal))
        return sorted(changes.items())


FOREVER = 1 << 62
"""A moment that does not come, ns."""


def step_signals(
    observed: Observed, method: str, launches: float, collectives: float, last_ns: int, ranks: Collection[int]
) -> list[str]:
    """The signals that a step of a job consists of: if one of them is silent, no step is made.

    Args:
        observed: What there is.
        method: How the newest steps were found, as in the table ``iterations``.
        launches, collectives: How many a step has.
        last_ns: When there was one last. What was not observed since may be one of them as well.
        ranks: Those that still have a process.
    """
    signals = []
    if method == "marks":
        # One mark a step is enough: where ranges were thinned out, backward passes are counted.
        marks = [name for name in ("ranges", "backward", "nvtx") if observed.has(name)] or ["ranges"]
        signals.append(max(marks, key=lambda name: observed.until(name, last_ns, ranks)[0]))
    for name, calls in (("launches", launches), ("collectives", collectives)):
        if calls > 0 or observed.until(name, last_ns, ranks)[0] < FOREVER:
            signals.append(name)
    return signals


def silence(
    query: Query,
    params: Mapping[str, Any],
    observed: Observed,
    ranks: Collection[int],
    last_ns: int,
    looked_ns: int,
) -> Silence:
    """How long a job has been silent, as far as that was observed.

    Args:
        query: Runs SQL with parameters, returns columns.
        params: job, run, last.
        observed: What was observed.
        ranks: Those that still have a process.
        last_ns: When the last step ended, or the last call was made, whichever is later, wall time.
        looked_ns: When Argus last looked.
    """
    whole = (looked_ns - last_ns) / 1e9
    if not observed:
        return Silence(whole)
    source = query(queries.STEP_SOURCE, params)
    method, launches, collectives = str(source["method"][0]), float(source["launches"][0]), source["collectives"][0]
    signals = step_signals(observed, method, launches, float(collectives), last_ns, ranks)
    best, why = Silence(0.0), ""
    for signal in signals:
        until, seen, period_ns, reason = observed.until(signal, last_ns, ranks)
        until = min(until, looked_ns)
        here = Silence((until - last_ns) / 1e9)
        windowed = 0 < seen < THROUGHOUT
        if windowed and 0 < WINDOWS * period_ns <= looked_ns - until:
            here = Silence(whole, windows=True)
        # When the trace ends, nothing is observed any more: that it ended is no reason for anything.
        elif until < looked_ns - ENDING_S * 1e9 and not why:
            at = time.strftime("%H:%M:%S", time.gmtime(until / 1e9))
            state = "are observed in windows only" if windowed else "are not observed"
            why = f"{signal} {state} since {at} UTC" + (f" ({reason})" if reason else "")
        if (here.observed_s, not here.windows) > (best.observed_s, not best.windows):
            best = here
    return Silence(best.observed_s if signals else whole, best.windows, why)
