"""Runs that are traced: each is an ``argus run`` into a store, and its steps are a figure.

The tracer is ``argus run`` itself, in processes of its own. What the command took is taken from its account, so that
Argus's start and the storing of rows are not part of the figures.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from argus.compare.observe.execute import Child, Outcome, Usage, end_now, ended_within, reap, start
from argus.compare.observe.plan import Plan, Slot
from argus.diagnose.read.profile import mean_step_ns
from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.store.open import Store
from argus.store.reader import query_columns
from argus.system import descendants, installation, secrets

READY_S = 120.0
"""A run that has not begun by then is given up; ``argus run`` itself waits half as long for its probes."""
STORED_S = 120.0
"""How long rows may take to be stored after the command has ended."""
GRACE_S = 2.0
LOOKED_EVERY_S = 0.05
_FROM_ACCOUNT = ("wall_ns", "user_ns", "system_ns", "voluntary_switches", "involuntary_switches")


@dataclass
class Traced:
    """Makes the runs of a session, traced.

    Attributes:
        plan: Its ``trace`` is the name of the jobs.
        store: Where rows go. It is kept open: an engine that a run starts would end with that run.
        output: The folder of the runs' output, which gets a log of each.
        argus: How Argus is called.
        wall_clock: Unix time in seconds: runs are numbered by it.
    """

    plan: Plan
    store: Store
    output: Path
    argus: tuple[str, ...] = field(default_factory=lambda: tuple(installation.program()))
    wall_clock: Callable[[], float] = time.time
    _last: int = 0
    _on: bool = False

    def __call__(
        self, slot: Slot, environment: Mapping[str, str], out: int, err: int
    ) -> tuple[Outcome, dict[str, Any], float]:
        """Makes a run.

        Args:
            slot: Which.
            environment: Of the command, without its arm's variables.
            out, err: Descriptors that get its output.

        Returns:
            What became of it, with ``step_ns`` among its figures; ``trace`` of its record; CPU seconds that Argus used.

        Raises:
            ArgusError: The first one cannot be traced, or a store cannot be asked.
            KeyboardInterrupt: It was ended.
        """
        job, number = job_of(self.plan, slot), max(int(self.wall_clock()), self._last + 1)
        self._last = number
        children_s, engine_s = _children_s(), self.store.engine_cpu_s()
        with tempfile.TemporaryDirectory(prefix="argus-observe-") as folder:
            account = Path(folder) / "account"
            words = self._words(slot, job, number, account)
            with_store = {name: value for name, value in os.environ.items() if name.startswith(secrets.VARIABLE)}
            if (password := secrets.password()) is not None:
                with_store[secrets.VARIABLE] = password
            try:
                child = start(words, {**environment, **with_store}, out, err)
            except (OSError, ValueError) as failure:
                raise ArgusError(f"'{words[0]}' did not start: {failure}", "", EXIT_UNAVAILABLE) from None
            usage = Usage(child.pid, beneath=True)
            try:
                timed_out = _follow(child, account, usage, self.plan.timeout_s)
            except BaseException:
                end_now(child)
                raise
            reap(child)
            entries = _read(account)
        state = str(entries.get("tracing", "off: argus run ended before the command began"))
        if state != "on" and not self._on:
            why = state.removeprefix("off: ")
            raise ArgusError(f"the command cannot be traced: {why}", "Leave --trace out, or see `argus check`",
                             EXIT_UNAVAILABLE)  # fmt: skip
        self._on = True
        outcome = outcome_of(entries, usage, timed_out, f"{self._log(slot)} may say why")
        figures = dict(outcome.figures)
        figures["step_ns"] = self._step_ns(job, number) if state == "on" else None
        argus_s = _children_s() - children_s + self.store.engine_cpu_s() - engine_s
        argus_s = max(0.0, argus_s - ((figures.get("user_ns") or 0.0) + (figures.get("system_ns") or 0.0)) / 1e9)
        trace = {"job": job, "run": number, "state": state, "argus_cpu_ns": round(argus_s * 1e9)}
        return (
            Outcome(outcome.status, outcome.exit_code, outcome.signal, outcome.error, figures), trace, argus_s,
        )  # fmt: skip

    def _log(self, slot: Slot) -> Path:
        return self.output / f"{slot.number:05d}.trace"

    def _words(self, slot: Slot, job: str, number: int, account: Path) -> list[str]:
        variables = [f"{name}={value}" for name, value in slot.arm.environment]
        return [
            *self.argus, "run", "--job", job, "--run", str(number), "--log", str(self._log(slot)), "--account",
            str(account), "--no-diagnose", *([] if self._on else ["--strict"]), "--store", self.store.url,
            "--", *(["env", *variables] if variables else []), *self.plan.command,
        ]  # fmt: skip

    def _step_ns(self, job: str, number: int) -> float | None:
        return mean_step_ns(partial(query_columns, self.store), job, number)


def job_of(plan: Plan, slot: Slot) -> str:
    """The job that a run is of: an arm's runs are one, so that those of two can be compared."""
    arm = re.sub(r"[^\w.=+-]", "_", slot.arm.name)
    return f"{plan.trace}+{arm}" if arm else plan.trace


def _follow(child: Child, account: Path, usage: Usage, timeout_s: float | None) -> bool:
    """Waits until ``argus run`` has ended; returns whether the command took too long."""
    until = time.monotonic() + READY_S
    while not account.exists():
        if ended_within(child.pid, LOOKED_EVERY_S, None) or time.monotonic() > until:
            return False
    if ended_within(child.pid, timeout_s, usage):
        return False
    timed_out = not _read(account).get("ended")
    if timed_out:
        _end_command(child, account, usage)
    ended_within(child.pid, STORED_S, None)
    return timed_out


def _end_command(child: Child, account: Path, usage: Usage) -> None:
    """Asks the command to end, and ends it; ``argus run`` hands the signal on, and stores what there is."""
    descendants.send(child.pid, signal.SIGTERM)
    until = time.monotonic() + GRACE_S
    while time.monotonic() < until and not _read(account).get("ended"):
        time.sleep(LOOKED_EVERY_S)
    if not _read(account).get("ended"):
        for pid in usage.processes():
            descendants.send(pid, signal.SIGKILL)


def outcome_of(entries: Mapping[str, Any], usage: Usage, timed_out: bool, hint: str) -> Outcome:
    """What became of the command, by its account. Without one it did not start; one that lacks its end (the disk is
    full, ``argus run`` was killed) says nothing of what it took."""
    if not entries:
        return Outcome("not_started", error=f"argus run did not begin: {hint}")
    if not entries.get("ended"):
        return Outcome("failed", error=f"argus run did not report how it ended: {hint}")
    figures: dict[str, float | None] = {name: float(entries[name]) for name in _FROM_ACCOUNT}
    code, number = entries["exit_code"], entries["signal"]
    status = "timeout" if timed_out else "ok" if code == 0 else "failed"
    return Outcome(status, code, number, "", figures | usage.figures())  # type: ignore[arg-type]


def _read(account: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(account.read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}


def _children_s() -> float:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime
