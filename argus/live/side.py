"""The interface of a trace's sides: each observes one thing of all traced processes, and turns it into rows.

``Tracer`` holds the sides in a list and loops over them. All methods are called by the thread that runs the tracer,
except ``relieve``, and none may block: a store, a file or a process that does not answer must not delay the others. An
exception of a method is caught by a bulkhead, and that side loses its turn (``argus.live.bulkhead``).

A turn (``Tracer.poll``, 10 to 50 times a second while calls are probed, else one to ten times) calls, in this order:

* ``poll`` of every side, **from the last to the first**: fetch what was recorded. Sides are listed in the order in
  which they work, causes before effects; what is fetched is fetched the other way round, so that a launch is there
  when the operation that it launched is worked on;
* ``look_quickly`` up to 20 times a second while a process is young: it may be about to make its first call;
* ``work`` of every side, first to last, some four times a second: records become rows;
* ``look`` of every side, twice a second, after the roster has seen which processes came and went.

While it turns, ``argus.live.cost.budget`` asks the sides what they cost (``counters``, ``run_times``,
``spent_by_owner``), and has the side with a rung's part carry it out: ``reduce``, and later ``restore``, among those
that are ``reducible``; of an owner where the rung is ``OF_OWNERS``.
``end_job`` is called for each job that is over for good, and ``forget`` once its coverage is stored.

At the end (``Tracer.stop``): ``begin_stop`` of every side; then the probes go; ``stop``; a last ``work`` with
``final``; and ``close``, once the last rows are stored. ``close`` alone is called if a trace fails to begin.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from argus.live.cost.governor import Part, Rung
from argus.live.coverage import Seen
from argus.model.losses import UNKNOWN, Owner

if TYPE_CHECKING:
    from argus.live.job import Job, Member

Counters = dict[str, tuple[int, bool]]
"""By name: the value, and whether a value above 0 is a loss."""


class Side(Protocol):
    """What a trace observes of one kind. A class that names it as its base inherits what it does not define.

    Attributes:
        name: For people, and for the bulkhead.
        parts: Of what costs, those that this side can reduce (``Rung.part``); empty: none.
        punctual: Whether ``due`` sets the pace while calls are probed, and not only while none are.
    """

    name: str
    parts: tuple[Part, ...] = ()
    punctual: bool = False

    @property
    def due(self) -> float:
        """When ``poll`` has something to do, as ``time.monotonic`` has it; infinity: whenever it is called."""
        return float("inf")

    def poll(self, now: float, slack_s: float = 0.0) -> None:
        """Fetches what was recorded.

        Args:
            now: ``time.monotonic()`` at the begin of the turn.
            slack_s: What is due so soon may be done now, since the turn does something anyway.
        """
        return

    def look_quickly(self, now: float) -> None:
        """Looks whether young processes are about to be traced."""
        return

    def look(self, now: float) -> None:
        """Looks at who is traced: ``Session.jobs``, ``Session.roster``."""
        return

    def work(self, now: float, *, final: bool = False) -> None:
        """Turns what was fetched into rows. ``final``: nothing more will come."""
        return

    def relieve(self, now: float) -> None:
        """Reads what would overflow, if the loop hangs. Called by the watchdog's thread four times a second."""
        return

    def observed(self, members: Sequence[Member]) -> Mapping[int, Mapping[str, Seen]]:
        """What this side observes of ranks now: by PID and signal (``coverage.SIGNALS``)."""
        return {}

    def counters(self) -> Counters:
        """Every counter of this side."""
        return {}

    def own_losses(self, job: Job) -> Mapping[str, int]:
        """Of ``counters`` that are losses, those that processes cause: what of them concerns a job. What is left out
        concerns all jobs, or is counted in ``Session.losses``."""
        return {}

    def summary(self) -> list[str]:
        """How it went, in lines for people."""
        return []

    def run_times(self) -> dict[str, tuple[int, int]]:
        """Of its BPF programs that are run by no call: run time in ns, and runs, since they were loaded, by name."""
        return {}

    def spent_by_owner(self) -> Mapping[Part, Mapping[Owner, int]]:
        """What observing took of each owner's processes so far, of its parts that are no probes: to be compared with
        one another, in any unit."""
        return {}

    def reducible(self, owner: Owner) -> Collection[Rung]:
        """Rungs of its ladder that would make a difference to an owner's processes now."""
        return ()

    def reduce(self, rung: Rung, now: float, owner: Owner = UNKNOWN) -> None:
        """Observes less: one rung of ``parts``.

        Args:
            rung: Which.
            now: ``time.monotonic()``.
            owner: Of whose processes, where the rung is one of ``OF_OWNERS``; else it is of all.
        """
        return

    def restore(self, rung: Rung, now: float, owner: Owner = UNKNOWN) -> None:
        """Takes that back."""
        return

    def end_job(self, job: Job) -> None:
        """Stores the last rows of a job that is over, and counts what is dropped of it: its coverage is stored next."""
        return

    def forget(self, job: Job) -> None:
        """Drops what is kept of a job that is over."""
        return

    def begin_stop(self) -> None:
        """The trace ends: probes are still there."""
        return

    def stop(self) -> None:
        """Probes are gone: fetches the last of what was recorded."""
        return

    def close(self) -> None:
        """Lets go of everything."""
        return
