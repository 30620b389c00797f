"""The BPF programs that sample stacks: loaded in a thread of their own, at a rate that changes while they run."""

from __future__ import annotations

from collections import Counter as Tally

from argus.capture import DEFAULT_RATE_HZ, RAISED_RATE_HZ
from argus.capture.sampler import StackProbes
from argus.live.cost.governor import LOW_RATE_HZ, Rung
from argus.live.options import Options
from argus.model.errors import ArgusError
from argus.model.losses import Owner
from argus.model.units import span_text
from argus.system.aside import Aside

CALM_S = 60.0
"""For so long nothing must be the matter before the rate is lowered again: several diagnoses."""
PARTS = {
    "sampling": ("stacks_not_sampled", "no stacks are sampled, and no garbage collections seen"),
    "off-cpu": (
        "off_cpu_not_followed",
        "waits for data, locks, I/O and CPUs, and short garbage collections, are not seen",
    ),
    "forks": ("forks_not_followed", "children are found up to 5 s late"),
    "thread ends": ("thread_ends_not_followed", "garbage collections of threads that end are not seen"),
    "execs": ("execs_not_followed", "a program that a process executes is found up to 5 s late"),
}
"""What may fail to start while the rest goes on: its counter, and what that means."""
_NOT_ASKED = "off: not asked for"


class StackPrograms:
    """Loads the programs, and sets how often they sample and whether they follow threads off the CPU.

    Args:
        options: Of the trace: ``stacks`` (whether they are sampled at all), ``rate_hz`` (None: ``DEFAULT_RATE_HZ``, and
            more while something is the matter), ``off_cpu_ns``.
        counters: ``stack_rate_changes`` is counted here.

    Attributes:
        begun: Whether it has begun to sample, though it may have ended since.
        not_started: Of ``PARTS``, those that were asked for and did not start: "failed: why" or "off: why".
        rate_reason: Why the rate is not the usual one; empty: it is, or was chosen.
        reason: Why nothing is sampled: "failed: why" or "off: why"; empty: that is not so.
    """

    def __init__(self, options: Options, counters: Tally[str]) -> None:
        self._chosen_hz = options.rate_hz
        self._rate_hz, self.off_cpu_ns = options.rate_hz or DEFAULT_RATE_HZ, options.off_cpu_ns
        self._counters = counters
        self._loading: Aside[None] | None = None
        """Loads the programs (``begin_loading``); None: that was not begun, or is done."""
        self._loaded: StackProbes | None = None
        """What ``load`` has loaded, until ``start``."""
        self._probes: StackProbes | None = None
        self._most_hz: int | None = None
        self._rate_refused = False
        self._resting: set[Owner] = set()
        self._calm_due = 0.0
        self.reason = "" if options.stacks else "off: switched off with --no-stacks"
        self.rate_reason = ""
        self.begun = False
        self.not_started: dict[str, str] = {}
        self._reduced: set[Rung] = set()

    # ---- loading

    def load(self) -> None:
        """Loads the programs, which takes the kernel most of a second: any thread may do so. What does not work is in
        ``not_started``: the trace goes on without."""
        if self.reason or self._loaded is not None:
            return
        try:
            self._loaded = StackProbes(rate_hz=self._rate_hz, off_cpu_ns=self.off_cpu_ns)
            states = self._loaded.state
        except ArgusError as failure:
            self.reason = f"failed: {failure.message}" + (f" ({failure.hint})" if failure.hint else "")
            states = {"sampling": self.reason}
            if self.off_cpu_ns is not None:
                states["off-cpu"] = self.reason
        self.not_started = {part: state for part, state in states.items() if state not in ("on", _NOT_ASKED)}

    def begin_loading(self) -> None:
        """Loads the programs in a thread of its own, until ``end_loading`` finds that done."""
        self._loading = Aside(self.load, "argus-load")

    @property
    def loading(self) -> bool:
        """Whether that goes on, or was not noticed to be done."""
        return self._loading is not None

    def loaded(self, timeout_s: float) -> bool:
        """Whether it is done within so long."""
        return self._loading is None or self._loading.wait(timeout_s)

    def wait_until_loaded(self) -> None:
        """Until it is done."""
        if self._loading is not None:
            self._loading.result()

    def end_loading(self) -> bool:
        """Whether the programs have been loaded since ``begin_loading``; once. Raises what loading them raised."""
        if (loading := self._loading) is None or not loading.wait(0):
            return False
        self._loading = None
        loading.result()
        return True

    def start(self) -> bool:
        """Begins, with the programs that ``load`` has loaded, or loads them. Whether there are any."""
        self.load()
        if self._loaded is None:
            return False
        self._probes, self._loaded = self._loaded, None
        self.begun = True
        return True

    @property
    def on(self) -> bool:
        """Whether threads are sampled."""
        return self._probes is not None

    @property
    def probes(self) -> StackProbes:
        """The programs, while they are ``on``."""
        assert self._probes is not None
        return self._probes

    @property
    def state(self) -> str:
        """In words for people."""
        return self.reason or "waiting: not begun" if self._probes is None else self._probes.state["sampling"]

    def relieve(self) -> None:
        """``StackProbes.relieve``, of any thread."""
        if (probes := self._probes) is not None:
            probes.relieve()

    def close(self) -> None:
        """Takes the programs away."""
        if self._probes is not None:
            self._probes.close()
            self._probes = None
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None

    # ---- how often

    @property
    def rate_hz(self) -> int:
        """Samples a second and CPU; 0: none."""
        return 0 if self._probes is None or self._probes.state["sampling"] != "on" else self._rate_hz

    def is_raised(self, now: float) -> bool:
        """Whether something was the matter in the last ``CALM_S``. ``now``: ``time.monotonic()``."""
        return now < self._calm_due

    def raise_rate(self, why: str, now: float) -> str:
        """As ``StackSide.raise_sampling``."""
        if why:
            self._calm_due = now + CALM_S
        return self._set_rate(why or f"nothing was the matter for {span_text(CALM_S)}", now, why)

    def _limit_rate(self, now: float) -> str:
        """Samples as often as the rungs that are taken allow, whatever was chosen."""
        usual = DEFAULT_RATE_HZ if Rung.SAMPLE_OFTEN in self._reduced else None
        self._most_hz = LOW_RATE_HZ if Rung.SAMPLE_USUALLY in self._reduced else usual
        return self._set_rate("what it costs", now, "" if self._most_hz is None else "kept low for what it costs")

    def _set_rate(self, reason: str, now: float, why: str) -> str:
        wanted = self._chosen_hz or (RAISED_RATE_HZ if self.is_raised(now) else DEFAULT_RATE_HZ)
        wanted = min(wanted, self._most_hz or wanted)
        if self._probes is None or wanted == self._rate_hz or self._rate_refused:
            return ""
        try:
            self._probes.set_rate(wanted)
        except OSError as refusal:
            self._rate_refused = True
            return f"stacks: the rate stays at {self._rate_hz} a second: {refusal.strerror}"
        self._rate_hz, self.rate_reason = wanted, why
        self._counters["stack_rate_changes"] += 1
        return f"stacks: {wanted} samples a second now: {reason}"

    # ---- the governor

    def follows_waits(self, owner: Owner) -> bool:
        """Whether an owner's threads are followed off the CPU."""
        return self._probes is not None and self._probes.state["off-cpu"] == "on" and owner not in self._resting

    def reducible(self, owner: Owner) -> set[Rung]:
        """Rungs that would make a difference now."""
        could = {
            Rung.SAMPLE_OFTEN: self.rate_hz > DEFAULT_RATE_HZ,
            Rung.SAMPLE_USUALLY: self.rate_hz > LOW_RATE_HZ,
            Rung.FOLLOW_WAITS: self.follows_waits(owner),
        }
        return {rung for rung, can in could.items() if can}

    def reduce(self, rung: Rung, now: float, owner: Owner) -> None:
        """Samples less often, or follows no thread of an owner off the CPU."""
        if rung is Rung.FOLLOW_WAITS:
            self._follow_waits(owner, on=False)
        else:
            self._reduced.add(rung)
            self._limit_rate(now)

    def restore(self, rung: Rung, now: float, owner: Owner) -> None:
        """Takes that back."""
        if rung is Rung.FOLLOW_WAITS:
            self._follow_waits(owner, on=True)
        else:
            self._reduced.discard(rung)
            self._limit_rate(now)

    def _follow_waits(self, owner: Owner, *, on: bool) -> None:
        if self._probes is not None:
            (self._resting.discard if on else self._resting.add)(owner)
            self._probes.follow_waits(owner, on)
