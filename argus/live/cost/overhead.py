"""What a live trace costs its job, measured while it runs, and kept within ``--max-overhead``.

The kernel measures the run time of Argus's BPF programs, and counts their runs. What surrounds a run has a price: of
the traps into the kernel, by function, as they were measured on this machine (``capture.prices``), of a sampling
interrupt, and CUPTI's own of each operation.
``argus.live.cost.budget`` gives it what else is counted, and has the sides carry out what ``live.governor`` decides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from argus.capture.attachment import Subject, subject_of
from argus.capture.call_prices import REFILL
from argus.capture.process.targets import cpu_ns, queued_ns
from argus.capture.sampler import run_time_statistics
from argus.live.cost.governor import OF_PROBES, Change, Governor, Part, Reading, Rung
from argus.live.cost.ladders import Ladders, OwnChange
from argus.model import calls
from argus.model.losses import Owner
from argus.model.units import seconds

WINDOW_S = 2.0
"""How often the cost is looked at: many steps of most jobs."""
RUN_NS = 300
"""A program's run, where the kernel does not measure it."""
INTERRUPT_NS = 9_000
"""A sampling interrupt, besides the program's run: ``scripts/bench stacks``, ``interrupt_us``, at rest."""
AT_SWITCHES = ("_switch", "_switched", "_wakeup")
"""Ends of the names of programs that follow threads off the CPU."""
STATISTICS_NS = 50
"""What measuring adds to a run (two readings of the clock)."""
OPERATION_NS, LAUNCHED_NS = 500, 300
"""CUPTI's own price of an operation of the GPU, and of the record of the call that launched it, in the process:
docs/gpu.md (725 kernels: 0.35 ms, and 0.57 ms with launches)."""
FIRST_LOOKS_S = (0.01, 0.1, 0.2, 0.5, 1.0)
"""After probes were put on: so soon, so that no job is far above its budget for long. Then every ``WINDOW_S``."""
AGAIN_S = 0.4
"""The same after a look that found probes above the budget."""
OF_OTHERS, LEAST_HITS = 0.05, 10_000
"""Where hits of processes that are not traced are more than this part of all, the programs' run time is no longer that
of the traced ones: it is estimated from then on."""
LEAST_SEEN_NS = 5_000_000
"""What windows cost is known from so much of them on."""
MOST_OFF = 4.0
"""Times that prices may be off, either way: more is not believed of the job's steps."""
LEAST_SHARE = 0.03
"""Of the job's time: probes that cost less are too little to be seen in its steps."""
_SUBJECT = [subject_of(call) for call in calls.CALLS]
_IS_MARK = np.array([call.program == "mark" for call in calls.CALLS] + [False] * (256 - len(calls.CALLS)))
"""By a call's number: whether it makes marks."""


class Overhead:
    """The cost of one trace.

    Args:
        budget: Share of the job's time, above 0.

    Attributes:
        governor: What is given up for now, of everybody.
        ladders: What is given up for one owner.
        measured: Whether the kernel measures the programs' run time; else it is estimated.
        share: Of the job's time, in the last window; None: none was long enough.
        changes: Steps that were taken, down and up.
        correction: What prices are multiplied with, by the job's own steps.
        queued: Of each process: for how long its threads have waited for a CPU, ns, when that was last looked at.
    """

    def __init__(self, budget: float) -> None:
        self.governor = Governor(budget)
        self.ladders = Ladders(self.governor)
        self.measured = False
        self.share: float | None = None
        self.changes = 0
        self.correction = 1.0
        self.queued: dict[int, int] = {}
        self._fresh = False
        """Whether windows were weighed since the last correction."""
        self._statistics = contextlib.ExitStack()
        self._due = 0.0
        self._looked = 0.0
        self._wall = self._cpu = self._waited_for_cpu = 0
        self._hits = np.zeros(256, np.int64)
        self._new = np.zeros(256, np.int64)
        """Hits since the last look."""
        self._programs: dict[str, tuple[int, int]] = {}
        self._run_ns_before: dict[str, float] = {}
        """Run time of the programs for each call while only traced processes ran them."""
        self._estimated: tuple[int, int, int, int] | None = None
        """Hits, marks, and the run time of both, when others began to run them as well."""
        self._on: dict[str, int] = {}
        self.costs: dict[str, float] = {}
        """Of each subject: what its probes cost while they are on, as a share of the job's time. Of those in windows,
        with what they cost while they come and go."""
        self.inside: dict[str, float] = {}
        """The same without that."""
        self._on_hits = np.zeros(256, np.int64)
        self.entries: dict[str, float] = {}
        self.pulse = 0.0
        """What calls cost that are seen throughout though their subject is not, in the last window."""
        self._looks: list[float] = []
        self._trapped = {Part.CALLS: 0, Part.MARKS: 0}
        self._begun: Reading | None = None
        self._before = Reading()
        self._window: Reading | None = None
        self._others = 0.0
        """What the owner in the middle lost in the last window by other than probes."""
        self._cpu_of: dict[int, int] = {}

    def start(self) -> None:
        """Asks the kernel to measure. It does so for all BPF programs of the machine: some 50 ns a run."""
        with contextlib.suppress(OSError):
            self._statistics.enter_context(run_time_statistics())
            self.measured = True

    def close(self) -> None:
        """Ends that."""
        self._statistics.close()

    def count_hits(self, hits: NDArray[np.int64], prices: NDArray[np.float64]) -> None:
        """Takes hits of probes. To be called before prices change: before any probe is taken away or put on.

        Args:
            hits: Calls of each function so far (``Probes.hits``), shape (256,), by its number.
            prices: What a call has cost since the last time, ns, shape (256,) (``CallPrices.now``).
        """
        self._new += hits - self._hits
        new, self._hits = (hits - self._hits) * (prices * self.correction + REFILL), hits
        self._trapped[Part.MARKS] += int(new[_IS_MARK].sum())
        self._trapped[Part.CALLS] += int(new[~_IS_MARK].sum())

    def correct(self, measured: float) -> None:
        """Takes what the probes that are seen in windows cost while they are on, as the job's own steps have it. Prices
        are measured on functions of Argus's own: caches, and other threads, make them more or less in a job.

        Args:
            measured: Share of the job's time; 0: not known.
        """
        expected = self.lost_inside
        fresh, self._fresh = self._fresh, False
        if fresh and measured > 0 and expected >= LEAST_SHARE:
            # The root: half of the way at a time, as measurements vary.
            corrected = self.correction * (measured / expected) ** 0.5
            self.correction = min(max(corrected, 1 / MOST_OFF), MOST_OFF)

    @property
    def lost_inside(self) -> float:
        """What is lost while all is probed that is seen in windows, as a share of the job's time."""
        windowed = self.governor.plan.windowed
        return sum(self.inside.get(subject, self.entries.get(subject, 0.0)) for subject in windowed)

    def restart(self, now: float) -> None:
        """Probes were put on: looks soon, and again soon after."""
        self._looks = [now + after for after in FIRST_LOOKS_S]
        self._due = now

    def look(
        self,
        now: float,
        owners: Mapping[int, Owner],
        programs: Mapping[str, tuple[int, int]],
        samplers: Mapping[str, tuple[int, int]],
        counted: Mapping[str, int],
        able: Mapping[Owner, Collection[Rung]] | None,
        spent: Mapping[Part, Mapping[Owner, int]] | None = None,
    ) -> list[OwnChange]:
        """Looks at what was spent, when that is due. Returns the steps that are to be carried out.

        Args:
            now: ``time.monotonic()``.
            owners: The ranks' processes, and whose they are.
            programs: Run time in ns, and runs, of the programs behind probes, by name, since they were loaded.
            samplers: The same of those that take stacks.
            counted: ``hits``, ``marks``, ``stack_samples``, ``gpu_ops``, ``cupti_callback_ns`` and whether launches are
                recorded, ``cupti_api``; ``waited_ns``, the time that threads spent in calls that wait for a GPU.
            able: As ``Ladders.look`` has it; None: nothing is to change any more.
            spent: As ``Ladders.split`` has it; None: nothing is known.
        """
        elapsed_ns = round((now - self._looked) * 1e9) if self._looked else 0
        pids = list(owners)
        cpu_of = {pid: ns for pid in pids if (ns := cpu_ns(pid)) >= 0}
        queued = {pid: queued_ns(pid) for pid in pids}
        both = cpu_of.keys() & self._cpu_of.keys()
        # While a thread waits for a CPU it makes no calls: a share of that time would be too small. The kernel adds a
        # wait when it is over: some of it may have been before.
        times: dict[Owner, Reading] = {}
        for pid in both:
            delay = max(queued[pid] - self.queued.get(pid, queued[pid]), 0)
            computed = max(cpu_of[pid] - self._cpu_of[pid], 0)
            ran = max(elapsed_ns - delay, elapsed_ns // 20, min(computed, elapsed_ns))
            of = times.get(owners[pid], Reading())
            times[owners[pid]] = Reading(of.wall + ran, of.cpu + computed, queued=of.queued + elapsed_ns - ran)
        self._wall += sum(time.wall for time in times.values())
        self._waited_for_cpu += sum(time.queued for time in times.values())
        self.queued = queued
        self._cpu += sum(time.cpu for time in times.values())
        self._looks = [at for at in self._looks if at > now]
        self._looked, self._cpu_of, self._due = now, cpu_of, min([now + WINDOW_S, *self._looks])
        taken = self._taken(programs, samplers, counted)
        reading = Reading(
            self._wall, self._cpu, min(counted.get("waited_ns", 0), self._wall), taken, self._waited_for_cpu
        )
        window, self._before = reading.since(self._before), reading
        if self._begun is None:
            self._begun = reading
            return []
        shares = window.shares()
        if not shares or able is None:
            return []
        self.share = sum(shares.values())
        self._window = window
        of_owners = self.ladders.split(window, times, spent or {})
        self._others = sum(share for part, share in self.ladders.middle(of_owners).items() if part not in OF_PROBES)
        changes = self.ladders.look(of_owners, now, able)
        self.changes += len(changes)
        return changes

    def look_at_probes(
        self,
        now: float,
        programs: Mapping[str, tuple[int, int]],
        prices: NDArray[np.float64],
        entry_prices: NDArray[np.float64],
        on_ns: Mapping[Subject, int | None],
        on_hits: NDArray[np.int64],
        pulses: Collection[int],
        apart: Collection[int],
        *,
        step_s: float,
    ) -> list[Change]:
        """Decides what is probed from now on, after ``look``. Returns what changes; ``governor.plan`` has the plan.

        Args:
            now: ``time.monotonic()``.
            programs: As ``look`` has them.
            prices, entry_prices: Of a call with its exit, and of its entry, ns, shape (256,), by number.
            on_ns: For how long each subject has been seen in windows so far, ns; None: it is seen throughout.
            on_hits: Calls of each function in windows so far, shape (256,), by number.
            pulses: Numbers of the calls that are seen throughout though their subject is not.
            apart: Numbers of those that are seen in windows of their own, too.
            step_s: How long a step takes; 0: not known.
        """
        window, new = self._window, self._new
        price, entry_price = (each * self.correction + REFILL for each in (prices, entry_prices))
        self._new = np.zeros(256, np.int64)
        before, self._programs = self._programs, dict(programs)
        if window is None or window.wall <= 0:
            self._on = {subject: on or 0 for subject, on in on_ns.items()}
            return []
        self._window = None
        run_ns = self._run_ns(before, new)
        exposed = window.exposed(sum(window.taken.get(part, 0) for part in OF_PROBES))
        inside, self._on_hits = on_hits - self._on_hits, on_hits.copy()
        windowed = [call for call, of in enumerate(_SUBJECT) if of and on_ns.get(of) is not None and call not in apart]
        # Calls while probes come and go.
        around = min(max(float(new[windowed].sum()) / max(float(inside[windowed].sum()), 1.0), 1.0), MOST_OFF)
        for subject, on in on_ns.items():
            of_subject = [call for call, of in enumerate(_SUBJECT) if of == subject and call not in pulses]
            hits = new[of_subject]
            runs = run_ns.get(calls.CALLS[of_subject[0]].program, RUN_NS) if of_subject else 0
            entry_ns = entry_price[of_subject] + runs
            if on is None:
                entries = float((hits * entry_ns).sum()) * exposed / window.wall
                cost = float((hits * (price[of_subject] + runs)).sum()) * exposed / window.wall
            else:
                seen_ns = on - self._on.get(subject, 0)
                if seen_ns < LEAST_SEEN_NS:
                    continue
                self._fresh = True
                self.inside[subject] = float((inside[of_subject] * entry_ns).sum()) * exposed / seen_ns
                entries = cost = self.inside[subject] * around
            self._on[subject] = on or 0
            measured = self.costs.get(subject)
            if on is not None and measured:  # windows are short: what several of them say counts
                entries, cost = (entries + self.entries[subject]) / 2, (cost * 1.0 + measured) / 2
            self.costs[subject], self.entries[subject] = cost, entries
        of_pulses = [call for call in pulses if call < len(_SUBJECT)]
        runs = max((run_ns.get(calls.CALLS[call].program, RUN_NS) for call in of_pulses), default=0)
        self.pulse = float((new[of_pulses] * (entry_price[of_pulses] + runs)).sum()) * exposed / window.wall
        pulse = self.pulse
        changes = self.governor.probe_changes(self.costs, self.entries, self._others, now, pulse=pulse, step_s=step_s)
        self.changes += len(changes)
        if self.governor.hesitates:
            self._due = min(self._due, now + AGAIN_S)
        return changes

    def leave_out(
        self,
        programs: Mapping[str, tuple[int, int]],
        on_ns: Mapping[Subject, int | None],
        on_hits: NDArray[np.int64],
    ) -> None:
        """Lets the last window decide nothing about probes: what was counted in it is not all of processes that stay.

        Args:
            programs, on_ns, on_hits: As ``look_at_probes`` has them.
        """
        self._window = None
        self._new = np.zeros(256, np.int64)
        self._programs = dict(programs)
        self._on = {subject: on or 0 for subject, on in on_ns.items()}
        self._on_hits = on_hits.copy()
        self._due = min(self._due, self._looked + AGAIN_S)

    def _run_ns(self, before: Mapping[str, tuple[int, int]], new: NDArray[np.int64]) -> dict[str, float]:
        """Run time of the programs for each call since the last look, entry and exit, ns, by family."""
        by_family = {}
        for family in ("cuda", "nccl", "mark", "math", "torch"):
            hits = sum(int(new[call.id]) for call in calls.CALLS if call.program == family)
            both = [name for name in self._programs if name.partition("_")[0] == family]
            ns = sum(self._programs[name][0] - before.get(name, (0, 0))[0] for name in both)
            runs = sum(self._programs[name][1] - before.get(name, (0, 0))[1] for name in both)
            if hits and self.measured:
                by_family[family] = (ns + runs * STATISTICS_NS) / hits
        if self._estimated is not None:
            return {family: self._run_ns_before.get(family, float(RUN_NS)) for family in by_family}
        self._run_ns_before |= by_family
        return by_family

    @property
    def due_at(self) -> float:
        """When ``look`` is to be called, as ``time.monotonic`` has it."""
        return self._due

    def due(self, now: float) -> bool:
        """Whether ``look`` is to be called."""
        return now >= self._due

    def _taken(
        self,
        programs: Mapping[str, tuple[int, int]],
        samplers: Mapping[str, tuple[int, int]],
        counted: Mapping[str, int],
    ) -> dict[Part, int]:
        def of_probes(chosen: Iterable[str]) -> int:
            ns, runs = np.array([(0, 0), *(programs[name] for name in chosen)], np.int64).sum(axis=0).tolist()
            return int(ns + runs * STATISTICS_NS)

        marks = {name for name in programs if name.startswith("mark_")}
        if self.measured:
            of_calls, of_marks = of_probes(programs.keys() - marks), of_probes(marks)
            hits, made = counted["hits"] - counted["marks"], counted["marks"]
            if self._estimated is None and counted.get("hits_ignored", 0) > OF_OTHERS * max(
                counted["hits"], LEAST_HITS
            ):
                self._estimated = hits, made, of_calls, of_marks
            if self._estimated is not None:
                before = self._estimated
                of_calls, of_marks = (
                    ns + max(now - then, 0) * RUN_NS
                    for ns, now, then in ((before[2], hits, before[0]), (before[3], made, before[1]))
                )
            at_switches = {name for name in samplers if name.endswith(AT_SWITCHES)}
            waits, stacks = (
                sum(ns + runs * STATISTICS_NS for ns, runs in (samplers[name] for name in names))
                for names in (at_switches, samplers.keys() - at_switches)
            )
        else:
            of_marks = counted["marks"] * RUN_NS
            of_calls = max(counted["hits"] - counted["marks"], 0) * RUN_NS
            stacks, waits = counted["stack_samples"] * INTERRUPT_NS, 0
        operation = OPERATION_NS + (LAUNCHED_NS if counted["cupti_api"] else 0)
        return {
            Part.CALLS: of_calls + self._trapped[Part.CALLS],
            Part.MARKS: of_marks + self._trapped[Part.MARKS],
            Part.STACKS: stacks + counted["stack_samples"] * INTERRUPT_NS,
            Part.OFF_CPU: waits,
            Part.GPU: counted["gpu_ops"] * operation + counted["cupti_callback_ns"],
        }

    # ---- results

    @property
    def _whole(self) -> Reading:
        return Reading() if self._begun is None else self._before.since(self._begun)

    def counters(self) -> dict[str, tuple[int, bool]]:
        """Value of each counter, and whether a value above 0 is a loss."""
        whole = self._whole
        counters = {f"overhead_{part}_ns": (whole.taken.get(part, 0), False) for part in Part}
        counters["overhead_job_ns"] = (max(whole.wall, whole.cpu), False)
        counters["overhead_ppm"] = (round(1e6 * sum(whole.shares().values())), False)
        counters["overhead_steps"] = (self.changes, False)
        counters["overhead_correction_ppm"] = (round(1e6 * self.correction), False)
        return counters

    def summary(self, *, several: bool = False) -> list[str]:
        """What it cost, and what was given up for it, in lines for people. ``several``: there are several owners."""
        shares = self._whole.shares()
        if not shares:
            return []
        words = {
            Part.CALLS: "probes",
            Part.MARKS: "marks",
            Part.STACKS: "stacks",
            Part.OFF_CPU: "waits",
            Part.GPU: "GPU times",
        }
        parts = ", ".join(f"{words[part]} {shares[part]:.2%}" for part in Part if shares.get(part, 0) >= 5e-5)
        parts = f" ({parts})" if parts else ""
        how = "" if self.measured else ", all of it estimated: the kernel does not measure"
        lines = [f"overhead: {sum(shares.values()):.2%} of the job's time{parts}{how}"]
        taken = [("", rung) for rung in self.governor.taken]
        taken += [(whose(owner) if several else "", rung) for owner, rung in self.ladders.taken]
        lines += [
            f"overhead: {of}{rung.text}, since it was above {100 * self.governor.budget:g}%" for of, rung in taken
        ]
        return lines


def whose(owner: Owner) -> str:
    """An owner, before what is said of its jobs."""
    user, container = owner
    return f"of user {user}{f' in {container[:12]}' if container else ''}: "


def describe_change(change: Change, budget: float, of: str = "") -> str:
    """A step of the governor, in a line for people. ``of``: as ``whose`` has it; empty: of all."""
    rung, plan = change.rung, change.plan
    if not change.down:
        return f"overhead: {of}{rung.back}: it is {change.share:.2%} of the job's time"
    windows = ""
    if plan is not None and rung.how == "windows":
        windows = f" ({seconds(plan.length_s)} every {seconds(plan.period_s)})"
    elif plan is not None:
        windows = f" ({seconds(plan.sample_s)} every {seconds(plan.sample_period_s)})" if plan.sample_s else " (none)"
    return (
        f"overhead: {of}{rung.text}{windows}: observing takes {change.share:.2%} of the job's time, "
        f"{change.part_share:.2%} of it for this, above --max-overhead {100 * budget:g}"
    )
