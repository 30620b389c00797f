"""Observations of commands that never ran: what each run took is given, and files are written as by real ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from argus.compare.observe.execute import Outcome
from argus.compare.observe.gpu import UNKNOWN
from argus.compare.observe.machine import Machine
from argus.compare.observe.plan import Plan
from argus.compare.observe.records import Records
from argus.compare.observe.session import Session

FACTS = {"cpu.count": "4", "host.boot": "0b5c1f6e", "kernel.release": "6.1.0"}


def took(wall_s: float, **more: Any) -> Outcome:
    """A run that succeeded, unless ``more`` has another status."""
    figures = {
        "wall_ns": wall_s * 1e9, "user_ns": wall_s * 8e8, "system_ns": wall_s * 1e8, "peak_memory_bytes": 5e6,
        "mean_memory_bytes": 4e6, "voluntary_switches": 3.0, "involuntary_switches": 1.0, "run_queue_ns": 1e6,
        "block_io_ns": None,
    }  # fmt: skip
    values: dict[str, Any] = {"status": "ok", "exit_code": 0, "figures": figures, **more}
    return Outcome(**values)


class Machines:
    """States of a machine with four CPUs, of which others use so many during each run."""

    def __init__(self, others: Sequence[float], outcomes: Sequence[Outcome]) -> None:
        self._others, self._outcomes = others, outcomes
        self._calls, self._at_s, self._busy_s = 0, 100.0, 50.0

    def __call__(self) -> Machine:
        number, ends = divmod(self._calls, 2)
        self._calls += 1
        if ends:
            figures = self._outcomes[number].figures
            span = (figures.get("wall_ns") or 0.0) / 1e9
            own = ((figures.get("user_ns") or 0.0) + (figures.get("system_ns") or 0.0)) / 1e9
            self._at_s += span
            self._busy_s += own + self._others[number % len(self._others)] * span
        return Machine(self._at_s, 4, self._busy_s, steal_s=0.0, load=0.5, memory_share=0.25)


def session(
    folder: Path,
    plan: Plan,
    outcomes: Sequence[Outcome | BaseException],
    *,
    output: Callable[[int], str] = lambda _number: "",
    others: Sequence[float] = (0.0,),
    meta: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda _line: None,
) -> Session:
    """A session whose runs take what ``outcomes`` say and print what ``output`` gives for their number, from 1 on.
    An outcome that is an exception is raised."""
    made: list[Mapping[str, str]] = []

    def run(_command: object, environment: Mapping[str, str], out: int, _err: int, _timeout_s: object) -> Outcome:
        made.append(environment)
        os.write(out, output(len(made)).encode())
        outcome = outcomes[len(made) - 1]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    times = iter(range(1_800_000_000, 1_900_000_000))
    facts = {"argus": "0.1.0", "user": "alice", "home": "/home/alice", "host": "node7", "folder": "/home/alice/job"}
    return Session(
        plan, Records(folder), {**facts, "facts": dict(FACTS), **(meta or {})}, {"HOME": "/home/alice"}, say=say,
        execute=run, machine=Machines(others, [one for one in outcomes if isinstance(one, Outcome)]),
        wall_clock=lambda: float(next(times)), cpu_clock=lambda: 0.0, gpus=lambda: dict(UNKNOWN),
    )  # fmt: skip
