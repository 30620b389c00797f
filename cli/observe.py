"""``argus observe``: does the same workload behave the same when it is repeated?"""

from __future__ import annotations

import os
import pwd
import secrets as random_numbers
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from argus import __version__
from argus.compare.observe import settings
from argus.model.errors import EXIT_FAILURE, EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError
from argus.model.text import counted, harmless, printable
from argus.model.units import elapsed
from argus.system import debug, files, privileges, secrets, toml
from argus.system.host import host_name

from . import interrupt
from .options import format_option, new_job_name, store_option
from .output import redraw
from .suggest import SuggestingGroup

if TYPE_CHECKING:
    from argus.compare.observe.plan import Plan
    from argus.compare.observe.records import Records, Stored
    from argus.compare.observe.traced import Traced

SIGNALLED = 128
"""Added to a signal's number: the exit code of what it ended, as shells have it."""
_MAX_CONFIG = 1 << 20
NOISY = 13
"""Exit code of ``observe doctor`` where something disturbs: that of ``noise-dominated``."""


class _Observe(SuggestingGroup):
    """``argus observe --out DIR -- CMD`` is ``argus observe run --out DIR -- CMD``."""

    other_words = {"check": "doctor", "zip": "export", "start": "run"}  # noqa: RUF012

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {name for param in self.get_params(ctx) for name in param.opts}
        if args and args[0].startswith("-") and args[0] not in own:
            args = ["run", *args]
        return super().parse_args(ctx, args)


class _Setting(click.ParamType[Any]):
    """A number or a time as a file has it; a margin in percent."""

    def __init__(self, setting: str) -> None:
        self.name = self._setting = setting

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return (
                settings.margin(value, percent=True)
                if self._setting == "margin"
                else settings.read(self._setting, value)
            )
        except ValueError as wrong:
            self.fail(f"it is {wrong}", param, ctx)


@click.group(cls=_Observe)
def command() -> None:
    """Repeat a command, and decide whether it behaves the same each time.

    Without a subcommand, `run` is meant. The exit code is 0 for stable, 10 for unstable, 12 for inconclusive, 13 for
    noise-dominated: then it is the machine that varies, and the workload cannot be judged.

    \b
      argus observe --repeat 10 --warmup 2 --out DIR -- ./bench --size 4
      argus observe report DIR                    report.md anew, from the records
      argus observe export DIR --sanitize         an archive that names nobody
      argus observe doctor                        is this machine quiet enough?
    """


@command.command()
@click.argument("words", nargs=-1, metavar="[--] [CMD]...", type=click.UNPROCESSED)
@click.option(
    "-f",
    "--file",
    "config",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Read settings from a YAML file, such as a resolved_config.yaml. Options go before it.",
)
@click.option(
    "-o",
    "--out",
    "folder",
    metavar="DIR",
    type=click.Path(path_type=Path),
    required=True,
    help="Where to: a new or empty folder.",
)
@click.option("--repeat", type=_Setting("repeat"), metavar="N", help="Runs of each arm that count. Default: 10.")
@click.option(
    "--warmup", type=_Setting("warmup"), metavar="N", help="Runs of each arm before them, left out. Default: 0."
)
@click.option(
    "--arm",
    "arms",
    multiple=True,
    metavar="NAME=ENV=VALUE[,ENV=VALUE]",
    help="Also run the command with these variables, interleaved at random; ENV=VALUE names itself. "
    "Repeat it for each arm; NAME alone sets nothing.",
)
@click.option(
    "--seed", type=_Setting("seed"), metavar="N", help="Of the random order. Default: a new one, which is recorded."
)
@click.option(
    "--timeout", type=_Setting("timeout"), metavar="SPAN", help="End a run after so long: 90s, 5m. It counts as failed."
)
@click.option(
    "--margin",
    metavar="PERCENT",
    type=_Setting("margin"),
    help="How much runs, and arms, may differ and still be alike. Default: 5.",
)
@click.option(
    "--pattern",
    type=click.Choice(("latency", "step", "ping")),
    help="Read latencies from what it prints: latency=3.2 ms, step_time: 120 ms, time=0.4 ms.",
)
@click.option(
    "--latency-regex",
    metavar="REGEX",
    help="The same by a pattern: its groups are the number and, if there are two, the unit.",
)
@click.option("--latency-key", metavar="KEY", help="The same from lines of JSON: a key such as request.latency_ms.")
@click.option(
    "--latency-unit", type=click.Choice(tuple(settings.UNITS)), help="Where nothing else says it. Default: s."
)
@click.option(
    "--metrics",
    metavar="URL",
    help="Read latencies from a server's page of metrics (Prometheus): a histogram, before and after each run.",
)
@click.option(
    "--metric", metavar="NAME", help="Its histogram, such as request_duration_seconds. Default: the only one."
)
@click.option("--error-regex", metavar="REGEX", help="Lines of its output that report an error.")
@click.option("--retry-regex", metavar="REGEX", help="Lines of its output that report that something is tried again.")
@click.option("--serve", "server", metavar="CMD", help="A server that is started before each run, and ended after it.")
@click.option("--ready", metavar="TEXT", help="What the server prints once it is ready.")
@click.option(
    "--ready-timeout", type=_Setting("ready_timeout"), metavar="SPAN", help="How long that may take. Default: 30s."
)
@click.option(
    "--trace",
    is_flag=True,
    help="Trace each run, as argus run does, into the store: a training job's steps are compared, and argus diagnose "
    "and argus compare have each run. Needs root.",
)
@click.option(
    "--job", type=new_job_name, metavar="NAME", help="Name of the traced job. Default: the command's program."
)
@store_option
@format_option()
def run(config: Path | None, folder: Path, output_format: str, store_url: str | None, **options: Any) -> int:
    """Run a command again and again, and record what each run did.

    The command is run without a shell; its output goes to files. Each run is recorded as soon as it has ended, so that
    a Ctrl-C or a kill leaves what was done. Arms take turns in random order.

    \b
      argus observe run --repeat 20 --warmup 2 --out DIR -- ./bench --size 4
      argus observe run --arm off=CACHE=0 --arm on=CACHE=1 --out DIR -- ./bench
      argus observe run --arm workers=1 --arm workers=8 --pattern latency --out DIR -- ./load
      argus observe run --serve './server --port 80' --ready listening --out DIR -- ./load
      argus observe run -f config.yaml --out DIR
      sudo argus observe run --trace --repeat 10 --out DIR -- torchrun --nproc-per-node 8 train.py
    """
    from argus.compare.observe.plan import check
    from argus.compare.observe.records import Records
    from argus.compare.observe.rule import EXIT_CODES

    plan = check(_plan(config, options))
    _find(plan.command[0])
    if plan.trace:
        _may_trace()
    files.share()  # files of the command have the mode that the user wants; those of Argus are for their owner alone
    records = Records(folder)
    try:
        metrics = _carry_out(plan, records, store_url)
    finally:
        records.close()
    _print(metrics, folder, output_format)
    return EXIT_CODES[metrics["decision"]["status"]]


def _plan(config: Path | None, options: dict[str, Any]) -> Plan:
    """What the options say, over what a file says."""
    from argus.compare.observe.plan import PATTERNS, Plan, Server, command_words, from_yaml, parse_arm

    plan = Plan((), seed=random_numbers.randbelow(2**32))
    if config is not None:
        try:
            text = files.read_settings(config, _MAX_CONFIG).decode("utf-8")
        except files.Untrusted as failure:
            raise toml.refused(config, failure) from None
        except (OSError, UnicodeDecodeError) as failure:
            reason = failure.strerror if isinstance(failure, OSError) else "it is not UTF-8"
            raise ArgusError(f"{config} cannot be read: {reason}", "Give -f a YAML file", EXIT_USAGE) from None
        plan = from_yaml(text, str(config))
    changes: dict[str, Any] = {
        "command": options["words"] or None, "repeat": options["repeat"], "warmup": options["warmup"],
        "seed": options["seed"], "timeout_s": options["timeout"],
        "margin": options["margin"],
        "arms": tuple(map(parse_arm, options["arms"])) or None,
    }  # fmt: skip
    pattern = options["latency_regex"] or PATTERNS.get(options["pattern"] or "")
    if len(by := [one for one in (pattern, options["latency_key"], options["metrics"]) if one]) > 1:
        message = "latencies are read by a pattern, by a key or from metrics, not both ways"
        raise ArgusError(message, "Leave one out", EXIT_USAGE)
    readings = {
        **({"pattern": pattern or "", "key": options["latency_key"] or "", "metrics": options["metrics"] or ""} if by
           else {}),
        "metric": options["metric"],
        "unit": options["latency_unit"], "errors": options["error_regex"], "retries": options["retry_regex"],
    }  # fmt: skip
    changes["readings"] = replace(plan.readings, **{name: one for name, one in readings.items() if one is not None})
    server = plan.server
    if options["server"] is not None:
        server = Server(tuple(command_words(options["server"])))
    parts = {"ready": options["ready"], "ready_s": options["ready_timeout"]}
    if given := {name: one for name, one in parts.items() if one is not None}:
        if server is None:
            raise ArgusError("--ready is about a server", "Add --serve CMD", EXIT_USAGE)
        server = replace(server, **given)
    command = changes["command"] or plan.command
    if options["trace"] or (options["job"] and plan.trace):
        changes["trace"] = options["job"] or plan.trace or (Path(command[0]).name if command else "")
    elif options["job"]:
        raise ArgusError("--job names a job that is traced", "Add --trace", EXIT_USAGE)
    return replace(plan, server=server, **{name: one for name, one in changes.items() if one is not None})


def _find(program: str) -> None:
    if shutil.which(program) is None:
        there = Path(program).exists() and "/" in program
        why = "cannot be executed" if there else "was not found"
        hint = f"Allow it: chmod +x {program}" if there else "Check its name, or give its path"
        raise ArgusError(f"the command '{printable(program)}' {why}", hint, EXIT_UNAVAILABLE)


def _may_trace() -> None:
    if lacking := privileges.lacking():
        rights = ", ".join(f"CAP_{name}" for name in sorted(lacking))
        hint = "Run it with sudo, or leave --trace out: wall times, memory and latencies need no rights"
        raise ArgusError(
            f"--trace needs root: {rights} {'are' if len(lacking) > 1 else 'is'} lacking", hint, EXIT_UNAVAILABLE
        )


def _carry_out(plan: Plan, records: Records, store_url: str | None) -> dict[str, Any]:
    from argus.capture.host_environment import host_facts
    from argus.compare.observe.session import Session

    meta = {
        "argus": __version__, "user": _user(), "home": str(Path.home()), "host": host_name(), "folder": os.getcwd(),
        "facts": host_facts(),
    }  # fmt: skip
    progress = _Progress()
    session = Session(plan, records, meta, secrets.without(os.environ), say=progress.say, begun=progress.begin)
    with _ended_by_signals() as came, _tracing(plan, records, store_url) as session.traced, progress:
        try:
            return session.carry_out()
        except KeyboardInterrupt:
            made = sum(run["status"] != "interrupted" for run in session.runs)
            recorded = f"what was recorded: argus observe report {records.folder}"
            progress.say(f"argus: stopped after {counted(made, 'run')}; {recorded}")
            if came:
                raise click.exceptions.Exit(SIGNALLED + came[0]) from None
            interrupt.announced = True
            raise


@contextmanager
def _tracing(plan: Plan, records: Records, store_url: str | None) -> Iterator[Traced | None]:
    """What makes the runs that are traced, with its store; None: none is."""
    if not plan.trace:
        yield None
        return
    from argus.compare.observe.records import OUTPUT
    from argus.compare.observe.traced import Traced
    from argus.store.failures import spool_not_queried
    from argus.store.open import open_store
    from argus.store.schema import ensure_schema

    with open_store(store_url) as store:
        if store.spooled:
            raise spool_not_queried(store.target)
        ensure_schema(store)
        yield Traced(plan, store, records.folder / OUTPUT)


class _Progress:
    """Lines about runs on standard error. On a terminal the last one is the run that goes on, and how long: its seconds
    are drawn by a thread, as runs may take minutes."""

    EVERY_S = 1.0

    def __init__(self) -> None:
        self._shown = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._run, self._since_s = "", 0.0
        self._thread = threading.Thread(target=self._draw, daemon=True)

    def begin(self, run: str) -> None:
        """A run begins."""
        with self._lock:
            self._run, self._since_s = run, time.monotonic()

    def say(self, line: str) -> None:
        """Prints a line that stays; no run goes on."""
        with self._lock:
            self._run = ""
            self._clear()
            click.echo(printable(line), err=True)

    def _draw(self) -> None:
        while not self._over.wait(self.EVERY_S):
            with self._lock, suppress(OSError):  # the terminal may be gone
                if self._run:
                    width = shutil.get_terminal_size().columns
                    line = f"{printable(self._run)}  {elapsed(time.monotonic() - self._since_s)} …"
                    redraw(line[: width - 1])

    def _clear(self) -> None:
        if self._shown:
            redraw()

    def __enter__(self) -> _Progress:
        if self._shown:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._shown:
            self._thread.join()
        with suppress(OSError):
            self._clear()


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


@contextmanager
def _ended_by_signals() -> Iterator[list[int]]:
    """Lets SIGTERM and SIGHUP end an observation as Ctrl-C does: the run that goes on would outlive Argus. Gets the
    number of the one that came."""
    came: list[int] = []

    def end(number: int, _frame: object) -> None:
        if not came:
            came.append(number)
            raise KeyboardInterrupt

    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, end)
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@command.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@format_option()
def report(folder: Path, output_format: str) -> int:
    """Decide and write report.md anew, from the records of DIR. Nothing is measured.

    The exit code is the decision's, also of an observation that was interrupted.

    \b
      argus observe report DIR
      argus observe report DIR --format json | jq .decision
    """
    from argus.compare.observe.evaluate import metrics_of
    from argus.compare.observe.records import METRICS_SCHEMA, REPORT, writing
    from argus.compare.observe.report import report_of
    from argus.compare.observe.rule import EXIT_CODES

    stored = _read(folder)
    with _damaged(folder):
        metrics = {"schema": METRICS_SCHEMA, **metrics_of(stored.metrics["runs"], stored.plan, decided=True)}
        text = report_of(metrics, stored.meta, stored.plan)
    unchanged = f"Its records are unchanged: copy {folder} to where you may write, and report on the copy"
    with writing(folder, unchanged), files.opened(folder) as fd:
        files.write_at(fd, REPORT, text.encode(errors="backslashreplace"))
    _print(metrics, folder, output_format)
    return EXIT_CODES[metrics["decision"]["status"]]


@command.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--sanitize",
    is_flag=True,
    help="Leave out users, homes, hosts, addresses, values of variables, secrets, and what the command printed.",
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where to. Default: DIR.zip or DIR.sanitized.zip beside it.",
)
def export(folder: Path, sanitize: bool, output: Path | None) -> None:
    """Write the records of DIR as one archive, to be passed on.

    \b
      argus observe export DIR
      argus observe export DIR --sanitize -o for-the-issue.zip
    """
    from argus.compare.observe.records import OUTPUT
    from argus.compare.observe.sanitize import Sanitizer, sanitized, write_zip

    stored = _read(folder)
    outputs = {f"{OUTPUT}/{path.name}": path for path in sorted((folder / OUTPUT).glob("*")) if not path.is_symlink()}
    with _damaged(folder):
        if sanitize:
            meta = stored.meta
            stored = sanitized(
                stored,
                Sanitizer(
                    users=[str(meta.get("user", "")), _user(), os.environ.get("SUDO_USER", "")],
                    hosts=[str(meta.get("host", "")), host_name(), os.uname().nodename],
                    homes=[str(meta.get("home", "")), str(Path.home())],
                ),
            )
            outputs = {}
    target = output or folder.resolve().parent / f"{folder.resolve().name}{'.sanitized' if sanitize else ''}.zip"
    try:
        with _damaged(folder), files.replacing(target) as file:
            names = write_zip(file, stored, outputs)
    except OSError as failure:
        raise ArgusError(f"{target} cannot be written: {failure.strerror}", "Give -o another", EXIT_FAILURE) from None
    click.echo(f"{printable(str(target))}: {counted(len(names), 'file')}")


@command.command()
@format_option()
def doctor(output_format: str) -> int:
    """Is this machine quiet enough to observe on, and what disturbs it?

    Times a loop of fixed work for a second and watches the machine meanwhile. The exit code is 0, or 13 where something
    disturbs.

    \b
      argus observe doctor && argus observe --out DIR -- ./bench
    """
    import json
    from dataclasses import asdict

    from argus.capture.host_environment import host_facts
    from argus.compare.observe.doctor import examine, measure, quiet

    loops, noise, cpus, busy = measure()
    items = examine(loops, noise, host_facts(), cpus, busy)
    calm = quiet(items)
    if output_format == "json":
        document = {"schema": "argus.observe.doctor/1", "quiet": calm, "items": [asdict(item) for item in items]}
        click.echo(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        marks = {"ok": "+", "noted": "-", "disturbs": "!", "unknown": "?"}
        for item in items:
            hint = f". {item.hint}" if item.hint and item.level in ("noted", "disturbs") else ""
            click.echo(harmless(f"{marks[item.level]} {item.name:<9} {item.text}{hint}"))
        click.echo("quiet enough" if calm else "NOT quiet: what is marked ! disturbs")
    return 0 if calm else NOISY


def _read(folder: Path) -> Stored:
    from argus.compare.observe.records import read

    return read(folder)


@contextmanager
def _damaged(folder: Path) -> Iterator[None]:
    """Turns records of which each is as it must be, and which make no sense together, into one line."""
    from argus.compare.observe.records import UNCHANGED

    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as failure:
        debug.note("".join(traceback.format_exception(failure)))
        message = f"the records in {folder} are damaged: their values cannot be computed with"
        raise ArgusError(message, UNCHANGED, EXIT_FAILURE) from None


def _print(metrics: dict[str, Any], folder: Path, output_format: str) -> None:
    if output_format == "json":
        import json

        click.echo(json.dumps(metrics, indent=2, ensure_ascii=False, allow_nan=False))
        return
    from argus.compare.observe.evaluate import COUNTED, failure_text
    from argus.compare.observe.report import named_figure

    decision = metrics["decision"]
    click.echo(printable(f"{decision['status'].upper()}: {decision['reason']}"))
    for sign in decision["signs"]:
        runs = (
            f" (runs {', '.join(map(str, sign['runs'][:8]))}{' …' if len(sign['runs']) > 8 else ''})"
            if sign["runs"]
            else ""
        )
        kind = sign["kind"].replace("_", " ")
        figure = "" if sign["kind"] in COUNTED else f", {named_figure(sign['figure'])}"
        click.echo(printable(f"  {kind}{figure}: {sign['text']}{runs}"))
    for note in decision["notes"]:
        click.echo(printable(f"  note: {note}"))
    if metrics["partial_failure"]:
        click.echo("  " + ": ".join(failure_text(metrics["runs"])))
    click.echo(f"  {printable(str(folder / 'report.md'))}")
