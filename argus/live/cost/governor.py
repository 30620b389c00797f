"""Keeps what observing costs the traced job within a budget: where it is more, less is observed, in fixed steps.

What is taken from a job's threads (probes, interrupts, CUPTI) is CPU time. A probe delays the thread that calls, and a
step waits for that thread: what probes take is set against W, the time of all ranks' processes, less that in which
their first threads waited for a CPU (they make no calls then). Interrupts and CUPTI hit all threads alike: they are set
against all of the time, or the CPU time C where that is more. A thread that waits for its GPU loses
nothing by coming to the wait later, but only if it would have waited for long enough: with S the time spent in calls
that wait for a GPU, what probes take counts

    taken · (1 - min(S / W, 3/4)) / W       where S is at least twice what was taken, else taken / W

Time asleep hides nothing: a thread that sleeps between its calls pays for each of them.

There are two kinds of steps down. Stacks, waits and GPU times have a ladder each (``LADDERS``), one rung at a time.
Probes have a plan (``plan``): what each subject costs is known by its hits and prices, so that the rungs that are
needed are taken at once, the most expendable first. Nothing that marks steps is ever taken away altogether: what a rung
names is seen in **windows**, for which its probes are put on and taken away again, so that cost times duty is within
the budget. (A switch in the programs would save little: the trap is the price.) What marks only phases is seen in
**samples**: of a few steps now and then, in windows of their own.

``Governor`` is a pure function of such measurements over time. ``argus.live.cost.overhead`` measures;
``argus.live.cost.budget`` has the sides carry out what is decided.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from argus.capture import DEFAULT_RATE_HZ

DEFAULT_BUDGET = 0.01
"""Of the job's time (``--max-overhead``)."""
LOW_RATE_HZ = 7
"""Samples of stacks a second and CPU where stacks cost too much."""
PATIENCE = 2
"""Windows in a row that must be above the budget, since loading a module makes thousands of calls, once."""
URGENT = 3.0
"""Times the budget: where the cost is that high, no second window is awaited."""
AT_ONCE = 0.1
"""Of the job's time: where probes cost more, the first measurement is enough. Otherwise the second one is awaited, a
few hundred milliseconds later, which is based on more, such as the number of backward passes a step."""
ROOM = 0.5
"""What was given up is taken up again while the cost is below this part of the budget."""
RETURN_S, LONGEST_RETURN_S = 60.0, 3600.0
"""For how long the cost must stay below ``ROOM``: it is doubled each time that a rung was taken back too early."""


class Part(str, enum.Enum):
    """What costs. Equal to its text."""

    CALLS = "calls"
    MARKS = "marks"
    STACKS = "stacks"
    OFF_CPU = "off_cpu"
    GPU = "gpu"

    __str__ = str.__str__


How = Literal["off", "entries", "windows", "samples"]
"""What becomes of a subject's probes: none; at entries only; seen in windows; of a few steps now and then."""
IN_PART = ("windows", "samples")


class Rung(enum.Enum):
    """A step down: what is given up. In each ladder, and of the probes, the most expendable comes first.

    To add one: a member here, where it belongs in the order. Of probes of a known subject that is all; else a branch
    in ``reducible``, ``reduce`` and ``restore`` of the side whose ``parts`` has its part (``argus.live.side``).

    Attributes:
        feature: The feature that changes, as table ``features`` has it.
        part: The part that its cost is counted in.
        text: What is so from then on, for people.
        back: What is so again when it is taken back; empty: it is not.
        counter: The loss that counts how often it was taken; empty: nothing is lost by it.
        subject: Of which probes (``capture.attachment.Subject``); empty: of none.
        how: What becomes of these.
    """

    SAMPLE_OFTEN = (
        "sampling more often",
        Part.STACKS,
        f"stacks are sampled {DEFAULT_RATE_HZ} times a second at most",
        "stacks may be sampled more often again",
    )
    SAMPLE_USUALLY = (
        "sampling at the usual rate",
        Part.STACKS,
        f"stacks are sampled {LOW_RATE_HZ} times a second",
        f"stacks are sampled {DEFAULT_RATE_HZ} times a second again",
    )
    FOLLOW_WAITS = (
        "following waits",
        Part.OFF_CPU,
        "time off the CPU is not followed",
        "time off the CPU is followed again",
        "waits_not_followed",
    )
    GPU_ALWAYS = (
        "GPU times for all of the time",
        Part.GPU,
        "GPU times are recorded for a quarter of the time",
        "GPU times are recorded as before",
    )
    GPU_QUARTER = (
        "GPU times for a quarter of the time",
        Part.GPU,
        "GPU times are recorded for a tenth of the time",
        "GPU times are recorded for a quarter of the time",
    )
    PRODUCTS = (
        "products",
        Part.CALLS,
        "cuBLAS and attention are not probed, FLOP/s are not reported",
        "cuBLAS and attention are probed",
        "math_probes_detached",
        "math",
        "off",
    )
    COPY_DURATIONS = (
        "durations of copies",
        Part.CALLS,
        "how long copies and allocations take is not measured",
        "copies are timed again",
        "",
        "copies",
        "entries",
    )
    LAUNCHES = (
        "launches",
        Part.CALLS,
        "launches are seen in windows",
        "launches are probed again",
        "launch_probes_detached",
        "launches",
        "windows",
    )
    COPIES = (
        "copies",
        Part.CALLS,
        "copies and allocations are seen in windows",
        "copies are probed again",
        "call_probes_detached",
        "copies",
        "windows",
    )
    # Steps that were marked by ranges have other bounds than those that are found otherwise: there is no way back.
    NVTX_RANGES = (
        "NVTX ranges",
        Part.MARKS,
        "NVTX's ranges are not probed any more; steps marked by them are found by calls from here on",
        "",
        "nvtx_probes_detached",
        "nvtx",
        "off",
    )
    RANGES = (
        "ranges",
        Part.MARKS,
        "PyTorch's ranges are probed in samples only, and so only some steps have phases; steps are counted by their "
        "backward passes",
        "",
        "range_probes_detached",
        "ranges",
        "samples",
    )
    BACKWARD_ENDS = (
        "ends of backward passes",
        Part.MARKS,
        "of backward passes the begins are seen",
        "backward passes are timed again",
        "",
        "backward",
        "entries",
    )
    WAIT_DURATIONS = (
        "durations of waits",
        Part.CALLS,
        "how long waits for the GPU take is not measured",
        "waits are timed again",
        "",
        "waits",
        "entries",
    )
    # Calls of a communicator are numbered as they are seen. Where some were missed the numbers mean nothing, and those
    # of the time before would be read wrongly with them: there is no way back.
    COLLECTIVES = (
        "collectives",
        Part.CALLS,
        "collectives are seen in windows; steps are counted by one call of each",
        "",
        "collective_probes_detached",
        "collectives",
        "windows",
    )
    WAITS = (
        "waits",
        Part.CALLS,
        "waits for the GPU are seen in windows",
        "waits for the GPU are probed again",
        "call_probes_detached",
        "waits",
        "windows",
    )
    BACKWARD = (
        "backward passes",
        Part.MARKS,
        "backward passes are seen in windows; steps between them are counted by their length",
        "",
        "",
        "backward",
        "windows",
    )
    # What becomes of them where nothing else marks steps.
    NVTX_IN_WINDOWS = (
        "NVTX ranges in windows",
        Part.MARKS,
        "NVTX's ranges are seen in windows, since nothing else marks steps",
        "",
        "nvtx_probes_detached",
        "nvtx",
        "windows",
    )

    def __init__(
        self,
        feature: str,
        part: Part,
        text: str,
        back: str = "",
        counter: str = "",
        subject: str = "",
        how: How | None = None,
    ) -> None:
        self.feature, self.part, self.text, self.back = feature, part, text, back
        self.counter, self.subject, self.how = counter, subject, how


LADDERS: dict[Part, tuple[Rung, ...]] = {
    part: tuple(rung for rung in Rung if rung.part is part) for part in (Part.STACKS, Part.OFF_CPU, Part.GPU)
}
"""Steps of the parts that are no probes, in order. What is next is the next step of the part that costs most."""
IN_WINDOWS = {"nvtx": Rung.NVTX_IN_WINDOWS}
"""What becomes of ranges where nothing else marks steps, by subject. PyTorch's mark none without backward passes."""
PROBE_RUNGS: tuple[Rung, ...] = tuple(rung for rung in Rung if rung.how and rung not in IN_WINDOWS.values())
"""The most expendable first: fewer functions, then windows; what marks steps last, and never to nothing."""
STEP_SUBJECTS = ("backward", "launches", "collectives", "waits", "copies")
"""Subjects by which steps can be counted. Ranges go altogether only where one of these is called; PyTorch's always."""
OF_BUDGET = 0.6
"""Part of the budget for what is probed throughout, once something is seen in windows: they get the rest."""
NEGLIGIBLE = 0.02
"""Of the budget: a rung that saves less is passed over."""
LEAST_DUTY, MOST_DUTY = 1e-4, 0.5
"""Share of the time that windows may cover."""
WINDOW_S, LONGEST_WINDOW_S = 0.02, 1.0
"""Length of a window: probes are put on in 5 to 10 ms, and found steps need a dozen repetitions."""
WINDOW_STEPS = 12
"""So many steps a window is to have, where their length is known."""
LEAST_PERIOD_S, LONGEST_PERIOD_S = 2.0, 60.0
"""From the begin of one window to the next: putting probes on and off takes Argus 1.1 ms of CPU for a subject
(``scripts/bench probe``), and a change of the job is to be seen within a minute."""
SAMPLE_STEPS, SAMPLE_PERIOD_S = 12, 5.0
"""So many steps a sample is to have, and how often there is one, at most."""
LEAST_SAMPLE_S, UNKNOWN_SAMPLE_S, LONGEST_SAMPLE_S = 0.02, 0.1, 10.0
"""Length of a sample: at least; where the length of steps is not known; at most."""
OF_SAMPLES = 0.05
"""Part of the budget that samples may cost. If they cost more even once in ``LONGEST_PERIOD_S``, there are none."""


@dataclass(frozen=True)
class Plan:
    """What is probed.

    Attributes:
        rungs: Those that are in force, in the order of ``PROBE_RUNGS``.
        duty: Share of the time that windows cover; 1: there are none.
        length_s, period_s: Of the windows.
        sample_s, sample_period_s: Of the samples; 0: there are none.
    """

    rungs: tuple[Rung, ...] = ()
    duty: float = 1.0
    length_s: float = 0.0
    period_s: float = 0.0
    sample_s: float = 0.0
    sample_period_s: float = 0.0

    @property
    def windowed(self) -> frozenset[str]:
        """Subjects that are seen in windows."""
        return frozenset(rung.subject for rung in self.rungs if rung.how == "windows")

    @property
    def off(self) -> frozenset[str]:
        """Subjects that are not seen, but in samples."""
        return frozenset(rung.subject for rung in self.rungs if rung.how in ("off", "samples"))

    @property
    def sampled(self) -> frozenset[str]:
        """Subjects that are seen in samples."""
        return frozenset(rung.subject for rung in self.rungs if rung.how == "samples" and self.sample_s)

    @property
    def entries(self) -> frozenset[str]:
        """Subjects that are probed at entries only, throughout."""
        of = frozenset(rung.subject for rung in self.rungs if rung.how == "entries")
        return of - self.windowed


def _left(costs: Mapping[str, float], entries: Mapping[str, float], rungs: Iterable[Rung]) -> float:
    """What is spent throughout, as a share of the job's time."""
    less = {rung.subject for rung in rungs if rung.how == "entries"}
    gone = {rung.subject for rung in rungs if rung.how != "entries"}
    return sum(
        entries.get(subject, cost) if subject in less else cost
        for subject, cost in costs.items()
        if subject not in gone
    )


def plan(
    costs: Mapping[str, float],
    entries: Mapping[str, float],
    budget: float,
    *,
    fixed: Collection[Rung] = (),
    pulse: float = 0.0,
    step_s: float = 0.0,
) -> Plan:
    """The least that has to be given up.

    Args:
        costs: Of each subject, what its probes cost while they are on, as a share of the job's time.
        entries: The same of their entries alone.
        budget: Share of the job's time for all of them.
        fixed: Rungs that are in force and stay.
        pulse: What the one call a step costs that is probed throughout where collectives are not.
        step_s: How long a step takes; 0: not known.
    """
    taken = [rung for rung in (*PROBE_RUNGS, *IN_WINDOWS.values()) if rung in fixed]
    if not taken and sum(costs.values()) <= budget:
        return Plan()
    limit = OF_BUDGET * budget

    def spent(rungs: Sequence[Rung]) -> float:
        last = any(rung.subject == "collectives" for rung in rungs)
        return _left(costs, entries, rungs) + pulse * last

    steps_are_counted = any(costs.get(subject, 0.0) > 0 for subject in STEP_SUBJECTS)
    for rung in PROBE_RUNGS:
        if spent(taken) <= limit:
            break
        if rung.subject in IN_WINDOWS and not steps_are_counted:
            rung = IN_WINDOWS[rung.subject]
        if rung not in taken and spent(taken) - spent([*taken, rung]) >= NEGLIGIBLE * budget:
            taken.append(rung)
    for rung in reversed(PROBE_RUNGS):  # what went first and would not have had to
        kept = [each for each in taken if each is not rung]
        if rung in taken and rung not in fixed and spent(kept) <= limit:
            taken = kept
    made = Plan(tuple(rung for rung in (*PROBE_RUNGS, *IN_WINDOWS.values()) if rung in taken))
    in_samples = sum(costs.get(rung.subject, 0.0) for rung in made.rungs if rung.how == "samples")
    if in_samples:
        sample_s = max(SAMPLE_STEPS * step_s, LEAST_SAMPLE_S) if step_s else UNKNOWN_SAMPLE_S
        sample_s = min(sample_s, LONGEST_SAMPLE_S)
        # Shorter ones, before they become rare.
        sample_s = max(min(sample_s, OF_SAMPLES * budget * SAMPLE_PERIOD_S / in_samples), LEAST_SAMPLE_S, 3 * step_s)
        every_s = max(sample_s * in_samples / (OF_SAMPLES * budget), SAMPLE_PERIOD_S, 2 * sample_s)
        if every_s <= LONGEST_PERIOD_S:
            made = replace(made, sample_s=sample_s, sample_period_s=every_s)
    in_windows = sum(costs.get(subject, 0.0) for subject in made.windowed)
    if not made.windowed:
        return made
    duty = max(budget - spent(taken), 0.1 * budget) / max(in_windows, budget)
    duty = min(max(duty, LEAST_DUTY), MOST_DUTY)
    wanted = max(WINDOW_S, WINDOW_STEPS * step_s * (1 + in_windows), duty * LEAST_PERIOD_S)
    length = max(min(wanted, LONGEST_WINDOW_S, duty * LONGEST_PERIOD_S), WINDOW_S)
    return replace(made, duty=duty, length_s=length, period_s=length / duty)


OF_PROBES = (Part.CALLS, Part.MARKS)
WAITED_TIMES = 2.0
"""Waiting for the GPU hides what probes take only where it is so many times as long."""
MOST_HIDDEN = 0.75
"""More is not believed to be hidden: the GPU may wait for the thread in some steps, and for longer in others."""


@dataclass(frozen=True)
class Reading:
    """What was spent since the trace began, ns.

    Attributes:
        wall: Time of all ranks' processes, one after the other, less that in which they waited for a CPU.
        cpu: CPU time of these processes.
        waited: Time that their threads spent in calls that wait for a GPU.
        taken: Time that observing took from their threads, by part.
        queued: Time in which they waited for a CPU.
    """

    wall: int = 0
    cpu: int = 0
    waited: int = 0
    taken: Mapping[Part, int] = field(default_factory=dict)
    queued: int = 0

    def since(self, before: Reading) -> Reading:
        """What was spent since another reading."""
        taken = {part: max(ns - before.taken.get(part, 0), 0) for part, ns in self.taken.items()}
        return Reading(
            self.wall - before.wall,
            self.cpu - before.cpu,
            self.waited - before.waited,
            taken,
            self.queued - before.queued,
        )

    def exposed(self, taken: int) -> float:
        """Part of what probes take from the job's threads that the job loses: the module says how."""
        hides = self.waited >= WAITED_TIMES * taken
        return 1 - min(self.waited / self.wall, MOST_HIDDEN) if hides else 1.0

    def shares(self) -> dict[Part, float]:
        """Shares of the job's time that the job loses, by part: the module says how. Empty: there was no job."""
        if self.wall <= 0:
            return {}
        exposed = self.exposed(sum(self.taken.get(part, 0) for part in OF_PROBES))
        return {
            part: ns * exposed / self.wall if part in OF_PROBES else ns / max(self.wall + self.queued, self.cpu)
            for part, ns in self.taken.items()
        }


@dataclass(frozen=True)
class Change:
    """One step of a ladder.

    Attributes:
        rung: Which.
        down: Whether it is taken, or taken back.
        share: What observing cost in the last window.
        part_share: Of that, the part that the step belongs to; of probes, what they cost while they are on.
        plan: Of a step to windows or samples: how long, and how often.
    """

    rung: Rung
    down: bool
    share: float
    part_share: float
    plan: Plan | None = None


class Governor:
    """Decides, window by window, whether less is to be observed, or more again.

    Args:
        budget: Share of the job's time, above 0.

    Attributes:
        taken: The steps that are in force, oldest first.
        plan: What is probed.
    """

    def __init__(self, budget: float = DEFAULT_BUDGET) -> None:
        self.budget = budget
        self.taken: list[Rung] = []
        self.plan = Plan()
        self._above = self._probes_above = 0
        self._room_since: float | None = None
        self._probes_room_since: float | None = None
        self._wait_s: dict[Rung, float] = {}
        self._returned: set[Rung] = set()

    def next_change(
        self, shares: Mapping[Part, float], now: float, able: Collection[Rung], *, shared: Collection[Rung] = ()
    ) -> Change | None:
        """Takes a window's costs. One step of the ladders at most comes of it.

        Args:
            shares: ``Reading.shares`` of the window.
            now: When it ended, seconds.
            able: Steps down that would make a difference now.
            shared: Of these, steps that are not this governor's to take: it says that it would.
        """
        total = sum(shares.values())
        others = sum(share for part, share in shares.items() if part not in OF_PROBES)
        # Probes have a plan of their own. The rest goes down for what it costs itself.
        if total > self.budget and others > self.budget / 2:
            self._room_since = None
            self._above += 1
            enough = self._above >= PATIENCE or others > URGENT * self.budget
            return self._down(shares, total, able, shared) if enough else None
        self._above = 0
        if not any(rung.how is None for rung in self.taken) or total > ROOM * self.budget:
            self._room_since = None
            return None
        self._room_since = now if self._room_since is None else self._room_since
        return self._up(shares, total, now - self._room_since)

    def _down(
        self, shares: Mapping[Part, float], total: float, able: Collection[Rung], shared: Collection[Rung]
    ) -> Change | None:
        for part in sorted(LADDERS, key=lambda part: -shares.get(part, 0.0)):
            if not shares.get(part):
                break
            rungs = (rung for rung in LADDERS[part] if rung not in self.taken and rung in able)
            rung = next(rungs, None)
            if rung is None:
                continue
            if rung not in shared:
                self._above = 0
                self._take(rung)
            return Change(rung, True, total, shares[part])
        return None

    def was_heard(self) -> None:
        """A step that it does not take itself has been taken: what comes of it is waited for."""
        self._above = 0

    def _take(self, rung: Rung) -> None:
        self.taken.append(rung)
        if rung in self._returned:
            self._wait_s[rung] = min(2 * self._wait_s.get(rung, RETURN_S), LONGEST_RETURN_S)

    def _return(self, rung: Rung) -> None:
        self.taken.remove(rung)
        self._returned.add(rung)

    def _up(self, shares: Mapping[Part, float], total: float, for_s: float) -> Change | None:
        """Takes the newest step of the ladders back, once there has been room for long enough."""
        for rung in reversed(self.taken):
            if not rung.back or rung.how is not None:
                continue
            if for_s < self._wait_s.get(rung, RETURN_S):
                return None
            self._return(rung)
            self._room_since = None
            return Change(rung, False, total, shares.get(rung.part, 0.0))
        return None

    def probe_changes(
        self,
        costs: Mapping[str, float],
        entries: Mapping[str, float],
        others: float,
        now: float,
        *,
        pulse: float = 0.0,
        step_s: float = 0.0,
    ) -> list[Change]:
        """Takes what probes cost, and changes ``plan`` if need be: all rungs that are needed at once.

        Args:
            costs, entries, pulse, step_s: As ``plan`` has them.
            others: What else observing costs, as a share of the job's time.
            now: When that was measured, seconds.
        """
        budget = max(self.budget - others, self.budget / 2)
        spent = _left(costs, entries, self.plan.rungs) + pulse * ("collectives" in self.plan.windowed)
        total = others + spent
        if self.plan.windowed or self.plan.sampled:
            # Windows go with what they cost, which is no change that anybody has to hear of.
            in_force = self.plan.rungs
            again = plan(costs, entries, budget, fixed=in_force, pulse=pulse, step_s=step_s)
            if again.rungs == in_force:
                self.plan = again
        if spent > budget:
            self._probes_room_since = None
            self._probes_above += 1
            if self._probes_above < PATIENCE and spent <= max(URGENT * self.budget, AT_ONCE):
                return []
            self._probes_above = 0
            return self._change(plan(costs, entries, budget, fixed=self.plan.rungs, pulse=pulse, step_s=step_s),
                                costs, total)  # fmt: skip
        self._probes_above = 0
        if not self.plan.rungs:
            return []
        stay = [rung for rung in self.plan.rungs if not rung.back]
        less = plan(costs, entries, ROOM * budget, fixed=stay, pulse=pulse, step_s=step_s)
        back = [rung for rung in self.plan.rungs if rung not in less.rungs]
        if not back or any(rung not in self.plan.rungs for rung in less.rungs):
            self._probes_room_since = None
            return []
        self._probes_room_since = now if self._probes_room_since is None else self._probes_room_since
        if now - self._probes_room_since < max(self._wait_s.get(rung, RETURN_S) for rung in back):
            return []
        self._probes_room_since = None
        return self._change(less, costs, total)

    @property
    def hesitates(self) -> bool:
        """Whether probes were above the budget at the last look, and the next one decides."""
        return self._probes_above > 0

    def _change(self, new: Plan, costs: Mapping[str, float], total: float) -> list[Change]:
        old, self.plan = self.plan, new
        down = [each for each in new.rungs if each not in old.rungs]
        up = [each for each in old.rungs if each not in new.rungs]
        for each in down:
            self._take(each)
        for each in up:
            self._return(each)
        return [
            Change(each, each in down, total, costs.get(each.subject, 0.0), new if each.how in IN_PART else None)
            for each in (*down, *up)
        ]
