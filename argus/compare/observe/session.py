"""An observation: runs a plan's slots one after another, and records each as soon as it has ended."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from argus.compare.observe import evaluate
from argus.compare.observe.execute import Outcome, Usage, end, end_now, execute, start
from argus.compare.observe.exposed import Histogram, chosen, read_page
from argus.compare.observe.gpu import Gpus
from argus.compare.observe.latency import LONGEST_LINE, exposed_latencies, read_latencies
from argus.compare.observe.machine import Machine, during, read_machine
from argus.compare.observe.plan import Plan, Server, Slot, schedule
from argus.compare.observe.records import OUTPUT, Records, lines_of
from argus.compare.observe.report import report_of
from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.model.units import duration, span_text
from argus.system import descendants

Execute = Callable[..., Outcome]
READY_EVERY_S = 0.02


@dataclass
class Session:
    """What an observation needs besides its plan; each can be replaced where there is no machine.

    Attributes:
        plan, records: What is run, and where it is recorded.
        meta: For run_meta.json: facts of the machine, the user, versions.
        environment: Of the command, before an arm's variables.
        say: Gets a line after each run.
        begun: Gets each run that begins: "run 3 of 12".
        execute, machine, wall_clock, cpu_clock, gpus: How a run is made, the machine's state, Unix time in seconds, CPU
            seconds of this process, and the state of its GPUs.
        traced: Makes the runs that are traced: all but those for warm-up (``traced.Traced``); None: none is.
    """

    plan: Plan
    records: Records
    meta: dict[str, Any]
    environment: Mapping[str, str]
    say: Callable[[str], None] = lambda _line: None
    begun: Callable[[str], None] = lambda _name: None
    execute: Execute = execute
    machine: Callable[[], Machine] = read_machine
    wall_clock: Callable[[], float] = time.time
    cpu_clock: Callable[[], float] = time.process_time
    gpus: Callable[[], dict[str, float | None]] = field(default_factory=Gpus)
    traced: Callable[[Slot, Mapping[str, str], int, int], tuple[Outcome, dict[str, Any], float]] | None = None
    runs: list[dict[str, Any]] = field(default_factory=list)

    def carry_out(self) -> dict[str, Any]:
        """Makes all runs, and returns what metrics.json holds.

        Raises:
            ArgusError: The command cannot be started, or a file cannot be written.
            KeyboardInterrupt: It was interrupted; what was done is recorded.
        """
        slots = schedule(self.plan)
        began_s = round(self.wall_clock(), 3)
        self.meta |= {"started_s": began_s, "ended_s": None, "status": "running", "runs": len(slots)}
        self.records.begin(self.plan, self.meta)
        self.records.write_metrics(self._metrics(decided=False))
        descendants.adopt(True)
        try:
            for slot in slots:
                self._one(slot)
                if self.runs[-1]["status"] == "not_started":
                    error = self.runs[-1]["error"]
                    hint = "Runs before it are recorded" if len(self.runs) > 1 else "Check its name and permissions"
                    raise ArgusError(f"'{self.plan.command[0]}' did not start: {error}", hint, EXIT_UNAVAILABLE)
        except KeyboardInterrupt:
            self._close("interrupted")
            raise
        except ArgusError:
            with suppress(ArgusError):  # a full disk takes no more
                self._close("stopped")
            raise
        finally:
            descendants.adopt(False)
        return self._close("finished")

    def _close(self, status: str) -> dict[str, Any]:
        """Writes all files for the last time. Interrupted, nothing is decided: the prompt is waited for."""
        self.meta |= {"status": status, "ended_s": round(self.wall_clock(), 3)}
        self.records.write_meta(self.meta)
        metrics = self._metrics(decided=status == "finished")
        self.records.write_metrics(metrics)
        self.records.write_report(report_of(metrics, self.meta, self.plan))
        return metrics

    def _metrics(self, *, decided: bool) -> dict[str, Any]:
        return evaluate.metrics_of(self.runs, self.plan, decided=decided)

    def _one(self, slot: Slot) -> None:
        """Makes one run and records it."""
        name = f"{slot.number:05d}"
        self.begun(name_of(slot.number, self.meta["runs"], slot.arm.name))
        run: dict[str, Any] = {
            "number": slot.number, "block": slot.block, "arm": slot.arm.name, "warmup": slot.warmup,
            "status": "interrupted", "exit_code": None, "signal": None, "error": "",
            "started_s": round(self.wall_clock(), 3), "figures": {}, "latency": None, "noise": {},
            "output": {"stdout": f"{OUTPUT}/{name}.out", "stderr": f"{OUTPUT}/{name}.err"},
        }  # fmt: skip
        environment = {**self.environment, **dict(slot.arm.environment)}
        with ExitStack() as stack:
            out, err = (stack.enter_context(self.records.output(f"{name}.{kind}")) for kind in ("out", "err"))
            try:
                server = None
                if self.plan.server is not None:
                    server = stack.enter_context(_Running(self.plan.server, self.records, name, environment))
                exposed = self._exposed()
                before, own_before = self.machine(), self.cpu_clock() + (server.cpu_s() if server else 0.0)
                argus_s = 0.0
                if self.traced is not None and not slot.warmup:
                    outcome, run["trace"], argus_s = self.traced(slot, self.environment, out, err)
                else:
                    outcome = self.execute(self.plan.command, environment, out, err, self.plan.timeout_s)
                own = argus_s + self.cpu_clock() + (server.cpu_s() if server else 0.0) - own_before
                after = self.machine()
                read = self._latencies(out, exposed, int(outcome.figures.get("wall_ns") or 0))
            except KeyboardInterrupt:
                self.runs.append(run)
                raise
            figures = dict(outcome.figures)
            wall_ns, queue_ns = figures.get("wall_ns"), figures.get("run_queue_ns")
            spent_s = ((figures.get("user_ns") or 0) + (figures.get("system_ns") or 0)) / 1e9
            noise = during(before, after, spent_s + own)
            noise |= self.gpus()
            noise["run_queue_share"] = round(queue_ns / wall_ns, 6) if queue_ns is not None and wall_ns else None
            run |= {
                "status": outcome.status, "exit_code": outcome.exit_code, "signal": outcome.signal,
                "error": outcome.error, "figures": figures, "noise": noise,
                "latency": read,
            }  # fmt: skip
        self.runs.append(run)
        self.records.write_metrics(self._metrics(decided=False))
        self.say(line_of(run, self.meta["runs"]))

    def _exposed(self) -> tuple[str, Histogram] | None:
        """The histogram of latencies that a server exposes, with its name; None: none is to be read."""
        readings = self.plan.readings
        if not readings.metrics:
            return None
        found = read_page(readings.metrics)
        name = chosen(found, readings)
        return name, found[name]

    def _latencies(self, out: int, exposed: tuple[str, Histogram] | None, wall_ns: int) -> dict[str, Any] | None:
        """What a run's output, or the server's page since the run began, reports."""
        readings = self.plan.readings
        if exposed is None:
            return read_latencies(lines_of(out, LONGEST_LINE), readings, wall_ns)
        name, before = exposed
        try:
            after = read_page(readings.metrics).get(name)
        except ArgusError:  # it ended with the run
            after = None
        figures = exposed_latencies(before, after, name, readings, wall_ns)
        printed = read_latencies(lines_of(out, LONGEST_LINE), readings, wall_ns) or {}
        return {**figures, **{kind: printed.get(kind) for kind in ("errors", "retries")}}


def name_of(number: int, total: int, arm: str) -> str:
    """Which run it is: ``run 3 of 12  workers=8``."""
    return f"run {number} of {total}" + (f"  {arm}" if arm else "")


def line_of(run: Mapping[str, Any], total: int) -> str:
    """A run in one line."""
    wall_ns = run["figures"].get("wall_ns")
    took = duration(wall_ns) if wall_ns else "-"
    ended = {"ok": "", "timeout": "  ended after the timeout", "not_started": f"  did not start: {run['error']}"}.get(
        run["status"],
        f"  signal {run['signal']}" if run["signal"] is not None else f"  exit code {run['exit_code']}",
    )
    return f"{name_of(run['number'], total, run['arm'])}  {took}{ended}{'  warm-up' if run['warmup'] else ''}"


class _Running:
    """A server beside one run.

    Raises:
        ArgusError: It does not start, or is not ready in time.
    """

    def __init__(self, server: Server, records: Records, name: str, environment: Mapping[str, str]) -> None:
        self._server, self._records, self._name, self._environment = server, records, name, environment
        self._stack = ExitStack()

    def __enter__(self) -> _Running:
        try:
            out = self._stack.enter_context(self._records.output(f"{self._name}.server"))
            self._child = start(self._server.command, self._environment, out, out)
        except OSError as failure:
            self._stack.close()
            message = f"the server '{self._server.command[0]}' did not start: {failure.strerror}"
            raise ArgusError(message, "Check its name and permissions", EXIT_UNAVAILABLE) from None
        try:
            self._wait(out)
        except BaseException:
            end_now(self._child)
            self._stack.close()
            raise
        return self

    def cpu_s(self) -> float:
        """CPU time that the server and its children used so far."""
        return Usage(self._child.pid).cpu_s()

    def _wait(self, out: int) -> None:
        until = time.monotonic() + self._server.ready_s
        ready = self._server.ready.encode()
        while ready and ready not in os.pread(out, 1 << 20, 0):
            over = os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            if over or time.monotonic() > until:
                late = f"did not print '{self._server.ready}' within {span_text(self._server.ready_s)}"
                why = "ended" if over else late
                where = f"{self._records.folder}/{OUTPUT}/{self._name}.server"
                raise ArgusError(f"the server {why}", f"Its output is in {where}", EXIT_UNAVAILABLE)
            time.sleep(READY_EVERY_S)

    def __exit__(self, kind: object, *_: object) -> None:
        end_now(self._child) if kind is KeyboardInterrupt else end(self._child)
        self._stack.close()
