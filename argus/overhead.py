"""What a live trace costs its job, measured while it runs, and kept within ``--max-overhead``.

The kernel measures the run time of Argus's BPF programs, and counts their runs. What surrounds a run has a price: of
the traps into the kernel, by function, as they were measured on this machine (``capture.prices``), of a sampling
interrupt, and CUPTI's own of each operation.
``Tracer`` tells ``look`` what else it knows, and carries out what ``capture.governor`` decides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from argus.capture import calls
from argus.capture.governor import Change, Governor, Part, Reading
from argus.capture.stacks import run_time_statistics
from argus.capture.targets import cpu_ns

WINDOW_S = 2.0
"""How often the cost is looked at: many steps of most jobs."""
RUN_NS = 300
"""A program's run, where the kernel does not measure it."""
INTERRUPT_NS = 9_000
"""A sampling interrupt, besides the program's run: ``scripts/bench stacks``, ``interrupt_us``, at rest."""
STATISTICS_NS = 50
"""What measuring adds to a run (two readings of the clock)."""
OPERATION_NS, LAUNCHED_NS = 500, 300
"""CUPTI's own price of an operation of the GPU, and of the record of the call that launched it, in the process:
docs/gpu.md (725 kernels: 0.35 ms, and 0.57 ms with launches)."""
_IS_MARK = np.array([call.program == "mark" for call in calls.CALLS] + [False] * (256 - len(calls.CALLS)))
"""By a call's number: whether it makes marks."""


class OverheadSide:
    """The cost of one trace.

    Args:
        budget: Share of the job's time, above 0.

    Attributes:
        governor: What is given up for now.
        measured: Whether the kernel measures the programs' run time; else it is estimated.
        share: Of the job's time, in the last window; None: none was long enough.
        changes: Steps that were taken, down and up.
    """

    def __init__(self, budget: float) -> None:
        self.governor = Governor(budget)
        self.measured = False
        self.share: float | None = None
        self.changes = 0
        self._statistics = contextlib.ExitStack()
        self._due = 0.0
        self._looked = 0.0
        self._wall = self._cpu = self._waited = 0
        self._hits = np.zeros(256, np.int64)
        self._trapped = {Part.CALLS: 0, Part.MARKS: 0}
        self._begun: Reading | None = None
        self._before = Reading()
        self._cpu_of: dict[int, int] = {}

    def start(self) -> None:
        """Asks the kernel to measure. It does so for all BPF programs of the machine: some 50 ns a run."""
        with contextlib.suppress(OSError):
            self._statistics.enter_context(run_time_statistics())
            self.measured = True

    def close(self) -> None:
        """Ends that."""
        self._statistics.close()

    def count_waits(self, called: NDArray[np.void], waits: NDArray[np.bool_]) -> None:
        """Takes CUDA calls that were recorded: those that wait for a GPU have room for what a probe costs.

        Args:
            called: Records with ``duration_ns``, shape (n,).
            waits: Which of them wait, shape (n,).
        """
        self._waited += int(np.maximum(called["duration_ns"][waits], 0).sum())

    def count_hits(self, hits: NDArray[np.int64], prices: NDArray[np.int64]) -> None:
        """Takes hits of probes. To be called before prices change: before any probe is taken away or put on.

        Args:
            hits: Calls of each function so far (``Probes.hits``), shape (256,), by its number.
            prices: What a call has cost since the last time, ns, shape (256,) (``Probes.call_prices``).
        """
        new, self._hits = (hits - self._hits) * prices, hits
        self._trapped[Part.MARKS] += int(new[_IS_MARK].sum())
        self._trapped[Part.CALLS] += int(new[~_IS_MARK].sum())

    def look(
        self,
        now: float,
        pids: Iterable[int],
        programs: Mapping[str, tuple[int, int]],
        samplers: Mapping[str, tuple[int, int]],
        counted: Mapping[str, int],
        able: Collection[str] | None,
    ) -> Change | None:
        """Looks at what was spent, when that is due. Returns the step that is to be carried out, if there is one.

        Args:
            now: ``time.monotonic()``.
            pids: The ranks' processes.
            programs: Run time in ns, and runs, of the programs behind probes, by name, since they were loaded.
            samplers: The same of those that take stacks.
            counted: ``hits``, ``marks``, ``stack_samples``, ``gpu_ops``, ``cupti_callback_ns`` and whether launches are
                recorded, ``cupti_api``.
            able: As ``Governor.judge`` has it; None: nothing is to change any more.
        """
        elapsed_ns = round((now - self._looked) * 1e9) if self._looked else 0
        cpu_of = {pid: ns for pid in pids if (ns := cpu_ns(pid)) >= 0}
        both = cpu_of.keys() & self._cpu_of.keys()
        self._wall += elapsed_ns * len(both)
        self._cpu += sum(max(cpu_of[pid] - self._cpu_of[pid], 0) for pid in both)
        self._looked, self._cpu_of, self._due = now, cpu_of, now + WINDOW_S
        taken = self._taken(programs, samplers, counted)
        reading = Reading(self._wall, self._cpu, min(self._waited, self._wall), taken)
        window, self._before = reading.since(self._before), reading
        if self._begun is None:
            self._begun = reading
            return None
        shares = window.shares()
        if not shares or able is None:
            return None
        self.share = sum(shares.values())
        change = self.governor.judge(shares, now, able)
        self.changes += change is not None
        return change

    def gave_up(self, name: str) -> bool:
        """Whether the step down of that name is in force."""
        return any(rung.name == name for rung in self.governor.taken)

    def why_not(self, signal: str) -> str:
        """Why a probed signal is not observed, for people."""
        if signal == "products" and not self.gave_up("products"):
            return "GPU times are off"
        return "what it would cost is above --max-overhead"

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
            stacks = sum(ns + runs * STATISTICS_NS for ns, runs in samplers.values())
        else:
            of_marks = counted["marks"] * RUN_NS
            of_calls = max(counted["hits"] - counted["marks"], 0) * RUN_NS
            stacks = counted["stack_samples"] * INTERRUPT_NS
        operation = OPERATION_NS + (LAUNCHED_NS if counted["cupti_api"] else 0)
        return {
            Part.CALLS: of_calls + self._trapped[Part.CALLS],
            Part.MARKS: of_marks + self._trapped[Part.MARKS],
            Part.STACKS: stacks + counted["stack_samples"] * INTERRUPT_NS,
            Part.GPU: counted["gpu_ops"] * operation + counted["cupti_callback_ns"],
        }

    # ---- what is known of it

    @property
    def _whole(self) -> Reading:
        return Reading() if self._begun is None else self._before.since(self._begun)

    def counters(self) -> dict[str, tuple[int, bool]]:
        """Value of each counter, and whether a value above 0 is a loss."""
        whole = self._whole
        found = {f"overhead_{part}_ns": (whole.taken.get(part, 0), False) for part in Part}
        found["overhead_job_ns"] = (max(whole.wall, whole.cpu), False)
        found["overhead_ppm"] = (round(1e6 * sum(whole.shares().values())), False)
        found["overhead_steps"] = (self.changes, False)
        return found

    def summary(self) -> list[str]:
        """What it cost, and what was given up for it, in lines for people."""
        shares = self._whole.shares()
        if not shares:
            return []
        words = {Part.CALLS: "probes", Part.MARKS: "marks", Part.STACKS: "stacks", Part.GPU: "GPU times"}
        parts = ", ".join(f"{words[part]} {shares[part]:.2%}" for part in Part if shares.get(part, 0) >= 5e-5)
        parts = f" ({parts})" if parts else ""
        how = "" if self.measured else ", all of it estimated: the kernel does not measure"
        lines = [f"overhead: {sum(shares.values()):.2%} of the job's time{parts}{how}"]
        lines += [
            f"overhead: {rung.text}, since it was above {100 * self.governor.budget:g}%" for rung in self.governor.taken
        ]
        return lines


def words(change: Change, budget: float) -> str:
    """A step, for people."""
    rung = change.rung
    if not change.down:
        return f"overhead: {rung.back}: it is {change.share:.2%} of the job's time"
    return (
        f"overhead: {rung.text}: observing takes {change.share:.2%} of the job's time, {change.part_share:.2%} of it "
        f"for this, above --max-overhead {100 * budget:g}"
    )
