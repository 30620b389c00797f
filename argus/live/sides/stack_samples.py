"""The stack side of a live trace: what the threads of every rank were doing on the CPU, and what they waited for.

A side (``argus.live.side``): new stacks are resolved as they are fetched, while their code is still there. It decides
when what is due is done; ``argus.live.sampling`` holds what does it.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter as Tally
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from argus.live.cost.governor import Part, Rung
from argus.live.coverage import Seen
from argus.live.display.stack_view import StackView, summarize
from argus.live.job import Job, Member
from argus.live.sampling.dictionary import StackDictionary
from argus.live.sampling.process import SampledProcess
from argus.live.sampling.processes import SampledProcesses
from argus.live.sampling.programs import PARTS, StackPrograms
from argus.live.sampling.rows import StackRows
from argus.live.sampling.symbolize import Symbolizer
from argus.live.sampling.waits import WAITING_S, Waits
from argus.live.session import Session
from argus.live.side import Counters, Side
from argus.live.sides.draining import RELIEVE_S
from argus.model.losses import UNKNOWN, Owner, Whom
from argus.model.records import STACK_LOSS_COUNTERS, StackCounter
from argus.model.units import elapsed
from argus.system import debug

NAMES_S = 10.0
"""How often names, mappings and thread states of all threads are read again; at once if there are new threads."""
ROWS_S, CALM_ROWS_S = 5.0, 10.0
"""How often the threads' times are read and counts become rows: while something is the matter or somebody watches, and
else. That takes some four milliseconds however few they are, since by then no cache holds what does it. At first it is
more often."""
FIRST_ROWS_S = 1.0
POLL_S = 0.1
"""How often new stacks are fetched while there are many, or a process is new."""
LONGEST_POLL_S = CALM_ROWS_S
"""The same when there are few. What their frames are called comes with them, so that there is no hurry; and a stack
that is resolved alone, with all that it takes in no cache, costs thrice what one of many does."""
MANY, FEW = 1 / 16, 1 / 64
"""Parts of a ring."""
FULL = 1 / 2
"""Part of what a CPU can count that is fetched whatever is due."""
SLACK_S = 0.03
"""What is due so soon is done at once: a turn costs more than what it does."""
WATCHED_S = 2.0
"""Who asks for the view twice within this time is watching it."""
LATE_S = 3.0
"""Sampling that began so long after the trace is reported: on a busy node, when programs are compiled first."""


_LOST = (
    "stacks_without_rank",
    "stack_samples_without_rank",
    "stack_samples_without_stack",
    "stack_samples_over_share",
    "stack_rows_over_share",
    "stack_processes_of_others",
)
"""Counted as they come, in ``Session.losses``."""


class StackSide(Side):
    """Stacks of the processes of a session.

    Args:
        session: The trace. Of its options: ``stacks`` (whether they are sampled at all), ``rate_hz`` (None:
            ``DEFAULT_RATE_HZ``, and more while ``raise_sampling`` is given a reason), ``off_cpu_ns``.
    """

    name = "stacks"
    parts = (Part.STACKS, Part.OFF_CPU)

    def __init__(self, session: Session) -> None:
        self._session = session
        self._counters: Tally[str] = Tally()
        self._programs = StackPrograms(session.options, self._counters)
        self._processes = SampledProcesses(session, self._programs, self._counters)
        self._dictionary = StackDictionary()
        self._symbolizer = Symbolizer(self._programs, self._processes, self._dictionary, session)
        self._waits = Waits(self._programs, self._processes, self._dictionary, session)
        self._rows = StackRows(session, self._processes, self._dictionary, time.monotonic())
        self._kernel: dict[StackCounter, int] = dict.fromkeys(StackCounter, 0)
        self._begun_after_s = 0.0
        self._counts: list[NDArray[np.void]] = []
        self._pauses: list[NDArray[np.void]] = []
        self._usage: list[tuple[SampledProcess, NDArray[np.void]]] = []
        self._turned = time.monotonic()
        self._names_due = self._waiting_due = self._rows_due = self._poll_due = 0.0
        self._viewed = self._watched = float("-inf")
        self._rows_s, self._poll_s = FIRST_ROWS_S, POLL_S

    # ---- begin

    def begin_loading(self) -> None:
        """Loads the programs in a thread of its own; ``poll`` begins to sample once that is done."""
        self._programs.begin_loading()

    @property
    def loading(self) -> bool:
        """Whether that goes on, or was not noticed to be done."""
        return self._programs.loading

    def loaded(self, timeout_s: float) -> bool:
        """Whether it is done within so long."""
        return self._programs.loaded(timeout_s)

    def wait_until_loaded(self) -> None:
        """Until it is done."""
        self._programs.wait_until_loaded()

    def begin_sampling(self, now: float) -> None:
        """Samples stacks from here on, if the programs have been loaded."""
        if self._programs.end_loading():
            self.start()
            self._begun_after_s = (time.monotonic_ns() - self._session.started_ns) / 1e9
            self.look(now)
            debug.note("start: stacks sampled")

    def start(self) -> None:
        """Begins, with the programs that were loaded, or loads them."""
        if self._programs.start():
            self._processes.open()

    @property
    def due(self) -> float:
        """When ``poll`` has something to do, as ``time.monotonic`` has it."""
        return self._poll_due if self.on else float("inf")

    @property
    def on(self) -> bool:
        """Whether threads are sampled."""
        return self._programs.on

    @property
    def not_started(self) -> dict[str, str]:
        """Of ``PARTS``, those that were asked for and did not start: "failed: why" or "off: why"."""
        return self._programs.not_started

    @property
    def state(self) -> str:
        """In words for people."""
        return self._programs.state

    # ---- how often

    def raise_sampling(self, why: str, now: float) -> str:
        """Samples more often while something is the matter, unless the rate was chosen. Call it now and then.

        Args:
            why: What is the matter; empty: nothing was detected.
            now: ``time.monotonic()``.

        Returns:
            What has changed, for people; empty: nothing.
        """
        if why and not self._programs.is_raised(now) and self._rows_due > now + ROWS_S:
            self._soon_rows(now)
        changes = self._counters["stack_rate_changes"]
        text = self._programs.raise_rate(why, now)
        self._write_rate(changes)
        return text

    def _write_rate(self, changes: int) -> None:
        """Stores the rate as a feature of each process, if it has changed since there were so many changes."""
        if self._counters["stack_rate_changes"] != changes:
            self._processes.write_sampling()

    @property
    def rate_hz(self) -> int:
        """Samples a second and CPU; 0: none."""
        return self._programs.rate_hz

    def reducible(self, owner: Owner) -> set[Rung]:
        """Rungs that would make a difference now."""
        return self._programs.reducible(owner)

    def reduce(self, rung: Rung, now: float, owner: Owner = UNKNOWN) -> None:
        """Samples less often, or follows no thread of an owner off the CPU."""
        changes = self._counters["stack_rate_changes"]
        self._programs.reduce(rung, now, owner)
        self._write_rate(changes)

    def restore(self, rung: Rung, now: float, owner: Owner = UNKNOWN) -> None:
        """Takes that back."""
        changes = self._counters["stack_rate_changes"]
        self._programs.restore(rung, now, owner)
        self._write_rate(changes)

    def spent_by_owner(self) -> dict[Part, dict[Owner, int]]:
        """What its programs took of each owner's threads."""
        if not self.on:
            return {}
        times = self._programs.probes.owners.times()
        return {
            Part.STACKS: {owner: sampled for owner, (sampled, _) in times.items()},
            Part.OFF_CPU: {owner: switched for owner, (_, switched) in times.items()},
        }

    # ---- a turn

    def poll(self, now: float, slack_s: float = SLACK_S) -> None:
        """Fetches counts and resolves stacks that are new, at once: code objects are freed, libraries unloaded.

        Args:
            now: ``time.monotonic()``.
            slack_s: What is due so soon is done now, since others have something to do; half of its interval at most.
        """
        self.begin_sampling(now)
        self._fetch(now, slack_s)

    def _fetch(self, now: float, slack_s: float = SLACK_S, *, final: bool = False) -> None:
        """``final``: nothing comes after it."""
        if not self.on:
            return
        self._turned = time.monotonic()
        now += max(SLACK_S, min(slack_s, self._poll_s / 2))
        waits_due = final or now >= self._waiting_due
        probes = self._programs.probes
        used = probes.used
        if now < self._poll_due and not waits_due and used < FEW and probes.counts_used < FULL:
            return
        if waits_due:
            self._waiting_due = float("inf")  # until there are rows
            self._keep(self._waits.ongoing(final=final))
        drained = probes.drain(final=final)
        self._symbolizer.feed(drained, self._waits.asked_for)
        if len(drained.counts):
            self._counts.append(self._waits.without_reported(drained.counts))
        if len(drained.pauses):
            self._pauses.append(drained.pauses)
        if used > MANY:
            self._poll_s = POLL_S
        elif used < FEW:
            self._poll_s = min(2 * self._poll_s, max(min(probes.longest_poll_s, LONGEST_POLL_S), POLL_S))
        self._poll_due = now + self._poll_s
        if self._waits.behind:
            self._poll_due = min(self._poll_due, now + WAITING_S)
            self._waiting_due = min(self._waiting_due, now + WAITING_S)
        for process in self._processes.by_pid.values():
            process.drained = process.ended and probes.counted_ns > process.ended_ns

    def _keep(self, rows: NDArray[np.void]) -> None:
        """``records.STACK_COUNT`` that become rows with the others."""
        if len(rows):
            self._counts.append(rows)

    def look(self, now: float) -> None:
        """Takes note of who is traced: ranks, their helpers, and what those have forked."""
        if not self.on:
            if self.not_started:
                self._processes.write_not_started(self._session.jobs)
            return
        found = self._processes.find(self._session.jobs, now + SLACK_S)
        for process in self._waits.begin_turn(found) if found else ():
            self._poll_s, self._poll_due = POLL_S, 0.0
            self._soon_rows(time.monotonic())
            self._read_threads(process, with_names=True)

    def _read_threads(self, process: SampledProcess, *, with_names: bool) -> None:
        """Reads the times of a process's threads, and keeps rows for those that wait since before Argus came."""
        self._waits.next_is(process)
        if process.quarantined or not self._session.may_look_up(process.pid):
            return
        with self._processes.guard(process.pid, process.job):
            if process.ended:
                with self._session.looking_up(process.pid):
                    self._keep(self._waits.asleep_until_the_end(process, self._counts))
                return
            with contextlib.suppress(OSError):
                with self._session.looking_up(process.pid):
                    usage = self._processes.read_threads(process, with_names=with_names)
                if len(usage):
                    self._keep(self._waits.asleep(process, usage, self._counts))
                    self._usage.append((process, usage))

    def relieve(self, now: float) -> None:
        """Reads what is new while the loop does not turn, if there is much: any thread may call it.

        Args:
            now: ``time.monotonic()``.
        """
        if now > self._turned + RELIEVE_S:
            self._programs.relieve()

    def _soon_rows(self, now: float) -> None:
        """Counts become rows soon, whatever was due before."""
        self._rows_due = min(self._rows_due, now + FIRST_ROWS_S)
        self._waiting_due = min(self._waiting_due, self._rows_due)

    def work(self, now: float, *, final: bool = False) -> None:
        """Reads the threads' times, and turns what was fetched into rows, when that is due."""
        now += SLACK_S
        if not self.on or (now < self._rows_due and not final):
            return
        longest = ROWS_S if self._programs.is_raised(now) or now < self._watched + ROWS_S else CALM_ROWS_S
        self._rows_s = min(self._rows_s, longest)
        self._rows_due = self._waiting_due = now + self._rows_s
        self._rows_s = min(1.5 * self._rows_s, longest)
        with_names = now >= self._names_due
        if with_names:
            self._names_due = now + NAMES_S - 2 * SLACK_S  # with every other rows, or with all
        self._processes.begin_listing()
        for process in self._waits.begin_turn(final=final):
            self._read_threads(process, with_names=with_names)
        for (owner, counter), number in self._programs.probes.owners.take_refused().items():
            self._session.losses.count(counter, Whom(None, owner), number=number)
        counts, pauses = self._counts, self._pauses
        self._counts, self._pauses = [], []
        self._rows.write(counts, pauses, self._usage, now, slack_s=SLACK_S)
        self._usage.clear()
        if not final:
            self._processes.remove_drained()

    def forget(self, job: Job) -> None:
        """Drops what is left of a job that is over."""
        self._dictionary.forget(job)
        self._processes.forget(job)

    # ---- the end

    def begin_stop(self) -> None:
        """Begins at last, if the programs were still being loaded: what is not observed is reported as such."""
        self.wait_until_loaded()
        self.begin_sampling(time.monotonic())

    def stop(self) -> None:
        """Fetches the last samples and takes the programs away."""
        if not self.on:
            return
        self._fetch(time.monotonic(), final=True)
        self.work(time.monotonic(), final=True)
        self.close()

    def close(self) -> None:
        """Lets go of everything."""
        self._processes.close()
        if self.on:
            self._kernel = self._programs.probes.counters()
        self._programs.close()

    # ---- what was observed

    def observed(self, members: Sequence[Member]) -> dict[int, dict[str, Seen]]:
        """Whether threads are sampled, and followed off the CPU."""
        if not self.on:
            return {}
        stacks = Seen() if self.rate_hz else Seen(0.0, 0, self.state)
        off_cpu = {True: Seen(), False: Seen(0.0, 0, "threads are not followed off the CPU")}
        by_pid = self._session.roster.by_pid
        owners = {pid: by_pid[pid][0].owner for member in members if (pid := member.target.pid) in by_pid}
        return {
            member.target.pid: {
                "stacks": stacks,
                "off_cpu": off_cpu[self._programs.follows_waits(owners.get(member.target.pid, UNKNOWN))],
            }
            for member in members
        }

    def run_times(self) -> dict[str, tuple[int, int]]:
        """``Module.run_times`` of what takes stacks."""
        return self._programs.probes.run_times() if self.on else {}

    def over_share(self, pid: int) -> int:
        """Samples and switches of a process's threads beyond the share of one process."""
        return self._programs.probes.over_share(pid) if self.on else 0

    def counters(self) -> Counters:
        """Every counter of the stack side: value, and whether a value above 0 is a loss."""
        absent = {PARTS[part][0]: (1, True) for part in self.not_started}
        if self.on:
            self._kernel = self._programs.probes.counters()
        elif not self._programs.begun:
            return absent
        absent["python_stacks_not_read"] = (self._processes.unread_pythons().total(), True)
        absent["python_lists_cut"] = (self._session.losses.totals["python_lists_cut"], True)
        counters = {f"stack_{c.name.lower()}": (value, c in STACK_LOSS_COUNTERS) for c, value in self._kernel.items()}
        counted = Tally(self._counters)
        for process in self._processes.by_pid.values():
            counted.update(process.counters())
        for name, value in counted.items():
            counters[name] = (value, False)
        totals = self._session.losses.totals
        counters |= {name: (totals[name], True) for name in _LOST if totals[name]}
        return counters | absent

    def own_losses(self, job: Job) -> dict[str, int]:
        """Processes of a job whose CPython is not understood."""
        return {"python_stacks_not_read": self._processes.unread_pythons_of(job)} if self._programs.begun else {}

    def view(self) -> StackView:
        """The last seconds. Rows come more often while somebody asks for it all the time."""
        now = time.monotonic()
        if now < self._viewed + WATCHED_S:
            if now >= self._watched + ROWS_S and self._rows_due > now + ROWS_S:
                self._soon_rows(now)
            self._watched = now
        self._viewed = now
        samples = self.counters().get("stack_samples", (0, False))[0]
        return summarize(self.state, samples, self._rows.recent, self._dictionary.get, self._dictionary.hot_line)

    def summary(self) -> list[str]:
        """How stacks went, in lines for people: failures beside the count of samples, and what did not start."""
        lines = self._summary()
        if lines and self._begun_after_s > LATE_S:
            lines[0] += f", from {elapsed(self._begun_after_s)} on: their BPF programs were being loaded until then"
        return lines

    def _summary(self) -> list[str]:
        absent = [f"{part}: {state}; {PARTS[part][1]}" for part, state in self.not_started.items()]
        for reason, count in self._processes.unread_pythons().items():
            which = "a process" if count == 1 else f"{count} processes"
            absent.append(f"Python stacks of {which}: off: {reason}")
        if not self._programs.begun:
            return absent or ([f"stacks: {self._programs.reason}"] if self._programs.reason else [])
        values = {name: value for name, (value, _) in self.counters().items()}
        parts = []
        if "sampling" not in self.not_started:
            parts.append(f"{values['stack_samples']:,} samples")
        if "off-cpu" not in self.not_started:
            parts.append(f"{values['stack_off_cpu']:,} times off the CPU")
        for name, words in (
            ("stack_python", "Python stacks taken"),
            ("stack_python_cut", "cut"),
            ("stack_python_rejected", "rejected"),
            ("stack_python_fault", "unreadable"),
            ("python_frames_unresolved", "frames without a name"),
            ("stack_samples_dropped", "lost"),
        ):
            if values.get(name) or name in ("stack_python", "stack_samples_dropped"):
                parts.append(f"{values.get(name, 0):,} {words}")
        return ["stacks: " + ", ".join(parts), *absent]
