"""Options that several verbs share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from argus.capture import DEFAULT_RATE_HZ, RAISED_RATE_HZ
from argus.cupti import MINIMUM_SHARE, RAW_MODES, RAW_ROWS_S
from argus.live.cost.governor import DEFAULT_BUDGET
from argus.model.errors import EXIT_USAGE, ArgusError
from argus.system.host import LONGEST
from argus.system.redact import MORE

from .grammar import parse_pids, parse_span

Command = TypeVar("Command", bound=Callable[..., Any])


def _warned(url: str | None) -> str | None:
    """A store's URL as it is, with a warning where its password would go over the network for all to read."""
    if url and url.startswith("clickhouse:"):
        from argus.store.url import clear_text_warning

        if warning := clear_text_warning(url):
            click.echo(f"argus: warning: {warning}", err=True)
    return url


store_option = click.option(
    "--store",
    "store_url",
    metavar="URL",
    envvar="ARGUS_STORE",
    callback=lambda context, _, url: url if context.resilient_parsing else _warned(url),
    help="Where the data is: chdb:///folder, or clickhouse://user@host:8443/db?secure=true with the password in "
    "ARGUS_STORE_PASSWORD or ARGUS_STORE_PASSWORD_FILE; spool:///folder writes files for `argus store load`. Default: "
    "$ARGUS_STORE, else a folder of yours.",
)
"""``--store URL``, passed as ``store_url`` (None: the default). Give it to ``argus.store.open.open_store``."""


class CountRange(click.IntRange):
    """A whole number within bounds."""

    def get_metavar(self, *_: object, **__: object) -> str:
        return "N"


class NumberRange(click.FloatRange):
    """A number within bounds. ``nan`` lies within all of them, and no option means it, nor without end."""

    def get_metavar(self, *_: object, **__: object) -> str:
        return "NUMBER"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"'{value}' is not a number", param, ctx)
        return number


class Span(click.ParamType[float]):
    """A span of time as everywhere (``grammar.parse_span``), in seconds.

    Args:
        shortest_s: Less is refused.
    """

    name = "SPAN"

    def __init__(self, shortest_s: float = 0.0) -> None:
        self._shortest_s = shortest_s

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, (int, float)):
            return float(value)
        try:
            seconds = parse_span(value) / 1e9
        except ArgusError as wrong:
            self.fail(f"{wrong.message}. {wrong.hint}", param, ctx)
        if seconds < self._shortest_s:
            self.fail(f"'{value}' is too short: at least {self._shortest_s:g}s", param, ctx)
        return seconds


class Pids(click.ParamType[tuple[int, ...]]):
    """Process ids, by comma: ``4821,4822``."""

    name = "PID"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return parse_pids([value])
        except ArgusError as wrong:
            self.fail(f"{wrong.message}. {wrong.hint}", param, ctx)


def pid_options(what: str) -> Callable[[Command], Command]:
    """``[PID]...`` and ``-p/--pid``, passed as ``given_pids`` and ``pids``: put them together by ``all_pids``."""

    def decorate(command: Command) -> Command:
        command = click.option(
            "--pid", "-p", "pids", type=Pids(), multiple=True, metavar="PID", help=f"{what}, such as 4821 or 4821,4822."
        )(command)
        return click.argument("given_pids", metavar="[PID]...", nargs=-1, type=Pids())(command)

    return decorate


def name_given(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    """``--name``'s callback: a text that does not match every program."""
    if value is not None and not value.strip():
        raise ArgusError("--name is empty, which every program matches", "Write a part of its command line", EXIT_USAGE)
    return value


def all_pids(*groups: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Each process once, in the order given."""
    return tuple(dict.fromkeys(pid for group in groups for pids in group for pid in pids))


def job_name(value: str) -> str:
    """A job's name as somebody gave it, for ``type`` of an option."""
    if not value.strip():
        raise click.BadParameter("a job's name cannot be empty")
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise click.BadParameter(f"{value!a} is not UTF-8")
    return value


def new_job_name(value: str) -> str:
    """The same of a job that gets this name."""
    if not job_name(value).isprintable():
        raise click.BadParameter(f"{value!a} holds what cannot be printed")
    return value


def new_host_name(value: str) -> str:
    """The type of an option that names a node."""
    if not value.isprintable() or len(value) > LONGEST:
        raise click.BadParameter(f"{value[:80]!a} is no name of a node")
    return value.strip()


def format_option(
    choices: Sequence[str] = ("text", "json"), default: str | None = "text"
) -> Callable[[Command], Command]:
    """``--format``, passed as ``output_format``."""
    return click.option(
        "--format",
        "output_format",
        type=click.Choice(list(choices)),
        default=default,
        show_default=default is not None,
        help="How results are printed.",
    )


gpu_share_option = click.option(
    "--gpu-share",
    type=NumberRange(MINIMUM_SHARE, 1),
    default=1.0,
    show_default=True,
    metavar="SHARE",
    help="Record GPU times for that share of the time, at that share of the cost: 0.25 is 5 s of every 20.",
)

step_flops_option = click.option(
    "--step-flops",
    type=NumberRange(min=0),
    default=0.0,
    metavar="FLOPS",
    help="Floating-point operations of a step on all ranks, such as 3.2e17 (6 x parameters x tokens for a dense "
    "transformer): with --peak-tflops, model FLOPs utilization is reported.",
)
peak_tflops_option = click.option(
    "--peak-tflops",
    type=NumberRange(min=0),
    default=0.0,
    metavar="TFLOPS",
    help="Peak of a GPU, such as 989 for bf16 on an H100: FLOP/s are also reported as a share of it.",
)
"""``--step-flops``, ``--peak-tflops``: the former with the latter (``flops``)."""


def flops(step_flops: float, peak_tflops: float) -> tuple[float, float]:
    """FLOPs of a step, and a GPU's peak in FLOP/s; 0: not given.

    Raises:
        ArgusError: The former was given alone.
    """
    if step_flops and not peak_tflops:
        raise ArgusError("--step-flops takes --peak-tflops, too", "", EXIT_USAGE)
    return step_flops, peak_tflops * 1e12


raw_option = click.option(
    "--raw",
    type=click.Choice(RAW_MODES),
    default="auto",
    show_default=True,
    help="GPU operations that are stored one by one, besides summaries of all. auto: all of a small job; of a large "
    "job those of some steps, and of flagged time spans (`argus flag`). all: all. flagged: only flagged ones.",
)
host_option = click.option(
    "--host",
    type=new_host_name,
    default="",
    metavar="NAME",
    help="Name of this node (or ARGUS_HOST). Needed where nodes share a name: their rows could not be distinguished.",
)
redact_option = click.option(
    "--redact",
    type=click.Choice(MORE),
    multiple=True,
    help="Do not store, besides secrets in command lines: arguments, all of a command line but the program and its "
    "script; paths, the folders in paths; hosts, their names. May be repeated.",
)
raw_rate_option = click.option(
    "--raw-rate",
    type=NumberRange(min=1),
    default=RAW_ROWS_S,
    show_default=True,
    metavar="ROWS",
    help="With --raw auto: the most per second.",
)
"""``--raw``, ``--raw-rate``."""

rate_option = click.option(
    "--rate",
    "rate_hz",
    type=CountRange(1, 10_000),
    metavar="HZ",
    help=f"Stack samples per second and CPU. Default: {DEFAULT_RATE_HZ}, and {RAISED_RATE_HZ} while the job "
    "has findings.",
)
"""``--rate HZ``, passed as ``rate_hz``."""


class _Percent(click.ParamType[float]):
    name = "PERCENT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            percent = float(value)
        except ValueError:
            percent = math.nan
        if not 0 < percent <= 100:
            self.fail(f"{value!r} is no percentage above 0, up to 100", param, ctx)
        return percent


max_overhead_option = click.option(
    "--max-overhead",
    type=_Percent(),
    default=100 * DEFAULT_BUDGET,
    show_default=True,
    metavar="PERCENT",
    help="Most of the job's time that observing it may cost: above that, Argus observes less, and reports what.",
)
"""``--max-overhead PERCENT``."""

diagnose_option = click.option(
    "--diagnose/--no-diagnose",
    default=True,
    show_default=True,
    help="Diagnose the job every 10 s, and report findings, as argus diagnose --follow does.",
)
"""``--diagnose/--no-diagnose``, passed as ``diagnose``."""
