"""``argus health``: checks of this node, their history, and which nodes to drain."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from argus.health import config, cron, history, output
from argus.health.check import CRITICAL, EXIT_CODES, OK, UNKNOWN, WARNING, clean, worst
from argus.health.config import Check, Settings
from argus.health.run import run
from argus.model.errors import EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError
from argus.model.text import counted, harmless
from argus.system import debug, files, secrets
from argus.system.host import host_name

from .options import CountRange, format_option, store_option
from .suggest import SuggestingGroup

if TYPE_CHECKING:
    from argus.health.report import NodeReport

_CARRIED = ("ARGUS_STORE_PASSWORD_FILE", "ARGUS_SPILL_DIR", "ARGUS_SPILL_MAX")
"""Variables that cron's entry takes over from the environment of the user who installs it."""

config_option = click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    help="Settings. Default: /etc/argus/health.toml, if any.",
)


class _Exits(SuggestingGroup):
    """Failures of ``argus health`` itself end with exit code 3: for Nagios 1 is a warning and 2 a critical node."""

    def invoke(self, ctx: click.Context) -> Any:
        with _unknown():
            return super().invoke(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with _unknown():
            return super().parse_args(ctx, args)


@contextlib.contextmanager
def _unknown() -> Iterator[None]:
    try:
        yield
    except (ArgusError, click.ClickException) as failure:
        vars(failure)["exit_code"] = EXIT_CODES[UNKNOWN]
        raise
    except (click.exceptions.Exit, click.Abort):
        raise
    except BrokenPipeError:
        _print_no_more()
        raise click.exceptions.Exit(EXIT_CODES[UNKNOWN]) from None
    except Exception as failure:
        if isinstance(failure, OSError):
            _print_no_more()
            where = f": {failure.filename}" if failure.filename else ""
            raise ArgusError(f"{failure.strerror or failure}{where}", "", EXIT_CODES[UNKNOWN]) from None
        hint = f"This is a defect of Argus. {debug.traceback_of(failure)}"
        text = f"internal error: {type(failure).__name__}: {clean(failure)}"
        raise ArgusError(text, hint, EXIT_CODES[UNKNOWN]) from None


def _print_no_more() -> None:
    """What could not be printed is not tried again at exit, which would end with an exit code of Python's."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.group(cls=_Exits, invoke_without_command=True)
@click.option("--quiet", "-q", is_flag=True, help="Print nothing where all is well: for cron.")
@click.option("--verbose", "-v", is_flag=True, help="A line for each check, with what to do.")
@click.option("--format", "output_format", type=click.Choice(list(output.FORMATS)), default="text", show_default=True)
@click.option(
    "--output", "-o", "file", type=click.Path(path_type=Path), help="Write there, at once, instead of printing."
)
@click.option("--only", multiple=True, metavar="NAME", help="Run only this check; may be repeated.")
@click.option("--skip", multiple=True, metavar="NAME", help="Leave this check out; may be repeated.")
@click.option("--active", is_flag=True, help="Also measure the node: seconds of load, and only while it is idle.")
@click.option("--list", "listing", is_flag=True, help="List checks with their thresholds, and run none.")
@click.option("--trend", is_flag=True, help="Compare with this node's history and its peers; runs no check.")
@click.option("--no-store", is_flag=True, help="Keep no history.")
@config_option
@store_option
@click.pass_context
def command(
    context: click.Context,
    quiet: bool,
    verbose: bool,
    output_format: str,
    file: Path | None,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    active: bool,
    listing: bool,
    trend: bool,
    no_store: bool,
    config_file: Path | None,
    store_url: str | None,
) -> int:
    """Check this node: GPUs, network, CPUs, memory, disks.

    Exit codes are those of Nagios: 0 ok, 1 warning, 2 critical, 3 unknown. Each check runs in a process of its own
    with a time limit; two runs never overlap. No root is needed; checks that need it report unknown without it.

    \b
      argus health                    one line
      argus health -v                 a line for each check, and what to do
      argus health --quiet            for cron: silent when healthy
      argus health --trend            does this node get worse, or differ from its peers?
      argus health report --all       which nodes to drain, and why
      argus health install-cron       run it every 5 minutes
    """
    if context.invoked_subcommand is not None:
        return 0
    settings = config.load(config_file)
    settings.store = store_url or settings.store
    checks = _chosen(settings, only, skip, active)
    if listing:
        _list(checks, settings)
        return 0
    if trend:
        return _trend(settings, output_format)
    keeps = not no_store and settings.store != "off"
    if keeps and settings.store:
        from argus.store.url import parse_url

        parse_url(settings.store)  # a wrong one would lose the history of years
    done = run(settings, checks)
    if keeps and not done.again:
        done.stored = history.keep(done, settings)
    text = output.details(done) if verbose and output_format == "text" else output.FORMATS[output_format](done)
    if file is not None:
        try:
            _write(file, text + "\n")
        except ArgusError as failure:  # a full disk, perhaps: what was found is printed all the same
            click.echo(output.line(done))
            click.echo(f"argus: {failure.message}\n       {failure.hint}", err=True)
            return EXIT_CODES[worst([done.status, UNKNOWN])]
    elif not (quiet and (done.status == OK or done.again)):
        try:
            click.echo(text)
        except BrokenPipeError:  # `argus health -v | head -1`: the exit code reports the node's state all the same
            _print_no_more()
    return EXIT_CODES[done.status]


@command.command()
@click.option("--all", "everything", is_flag=True, help="Also nodes that are well.")
@click.option("--days", type=CountRange(1, 365), default=28, show_default=True, help="History that trends look at.")
@config_option
@format_option()
@store_option
def report(everything: bool, days: int, config_file: Path | None, output_format: str, store_url: str | None) -> int:
    """Rank nodes to be drained, with reasons, from the history of all nodes.

    Exit codes: 0 no node to be drained, 2 one or more, 3 there is no history.

    \b
      argus health report --store clickhouse://argus@db/argus
      argus health report --all --format json | jq '.nodes[] | select(.advice == "drain") | .host'
    """
    settings = config.load(config_file)
    settings.store = store_url or settings.store
    nodes = _report(settings, days)
    shown = [node for node in nodes if everything or node.reasons]
    if output_format == "json":
        click.echo(
            json.dumps({"schema": "argus.health.report/1", "nodes": [node.as_json() for node in shown]}, indent=2)
        )
    else:
        for node in shown:
            # Whatever another node has stored must not move this terminal's cursor.
            click.echo(
                f"{node.advice:<6} {node.score:>5.0f}  {clean(node.host)}  ({clean(node.kind) or 'kind not known'})"
            )
            for reason in node.reasons:
                click.echo(f"{'':<14}{reason.status:<9} {clean(f'{reason.name}: {reason.text}')}")
                if reason.hint:
                    click.echo(f"{'':<24}→ {clean(reason.hint)}")
        drain = sum(node.advice == "drain" for node in nodes)
        watch = sum(node.advice == "watch" for node in nodes)
        click.echo(f"{counted(len(nodes), 'node')}: {drain} to be drained, {watch} to be watched")
    return EXIT_CODES[CRITICAL] if any(node.advice == "drain" for node in nodes) else 0


@command.command("install-cron")
@click.option("--every", "minutes", type=int, default=5, show_default=True, metavar="MINUTES")
@click.option("--systemd-timer", "systemd", is_flag=True, help="A timer of systemd instead of cron's file.")
@click.option("--remove", is_flag=True, help="Take away what this wrote.")
@click.option("--print", "printing", is_flag=True, help="Print what would be written, and write nothing.")
@click.option("--user", default="root", show_default=True)
@click.option(
    "--mail", default="", metavar="ADDRESS", help="Cron mails what is wrong there. Default: to the system's log."
)
@click.option("--jitter", type=CountRange(0, 3600), default=60, show_default=True, metavar="SECONDS")
@click.option("--cron-file", type=click.Path(path_type=Path), default=cron.CRON_FILE, show_default=True)
@click.option("--unit-folder", type=click.Path(path_type=Path), default=cron.UNIT_FOLDER, show_default=True)
@config_option
@store_option
def install_cron(
    minutes: int,
    systemd: bool,
    remove: bool,
    printing: bool,
    user: str,
    mail: str,
    jitter: int,
    cron_file: Path,
    unit_folder: Path,
    config_file: Path | None,
    store_url: str | None,
) -> None:
    """Run argus health every 5 minutes from now on.

    No password of the store is written to the entry: put it in a file. ARGUS_STORE_PASSWORD_FILE, ARGUS_SPILL_DIR and
    ARGUS_SPILL_MAX are written as they are set for this command.

    \b
      sudo argus health install-cron --store clickhouse://argus@db/argus
      sudo ARGUS_STORE_PASSWORD_FILE=/etc/argus/password argus health install-cron --store clickhouse://argus@db/argus
      argus health install-cron --print              what would be written
      sudo argus health install-cron --systemd-timer --every 10
      sudo argus health install-cron --remove
    """
    if remove and printing:
        raise ArgusError("--print shows what would be written, --remove writes nothing", "Give one of them", EXIT_USAGE)
    if remove:
        for file in (removed := cron.remove(cron_file=cron_file, folder=unit_folder)):
            click.echo(f"removed {file}")
        if not removed:
            click.echo("nothing was installed")
        return
    from argus.store.url import parse_url

    settings = config.load(config_file)  # errors that cron would run into are reported here
    store = store_url or settings.store
    server = bool(store and store != "off" and parse_url(store).host)
    if server and secrets.password() is not None and "ARGUS_STORE_PASSWORD_FILE" not in os.environ:
        hint = "Put it in a file that only its user may read: ARGUS_STORE_PASSWORD_FILE=/etc/argus/password"
        raise ArgusError("cron does not have your ARGUS_STORE_PASSWORD", hint, EXIT_USAGE)
    environment = tuple((name, os.environ[name]) for name in _CARRIED if os.environ.get(name))
    words = ["--config", str(config_file.resolve())] if config_file else []
    words += ["--store", store_url] if store_url else []
    password = os.environ.get("ARGUS_STORE_PASSWORD_FILE")
    reads = (
        config_file.resolve() if config_file else config.DEFAULT_FILE,
        Path(settings.plugins),
        *([Path(password)] if password else []),
    )
    plan = cron.Plan(minutes, tuple(words), user, mail, jitter, environment, reads)
    if printing:
        for file, text in cron.planned(plan, systemd=systemd, cron_file=cron_file, folder=unit_folder).items():
            click.echo(f"# {file}\n{text}".rstrip())
        return
    for file in cron.install(plan, systemd=systemd, cron_file=cron_file, folder=unit_folder):
        click.echo(f"wrote {file}")


def _report(settings: Settings, days: int) -> list[NodeReport]:
    from argus.health.report import report as of_all
    from argus.store.open import open_store
    from argus.store.reader import nothing_stored

    if settings.store == "off":
        hint = "The settings say so (store): name the store that has it, --store URL"
        raise ArgusError("there is no history: store is off", hint, EXIT_USAGE)
    history.load(settings)
    with open_store(settings.store or None, create=False) as store:
        nodes = of_all(store, days=days)
        if not nodes:
            failure = nothing_stored(store)
            raise ArgusError("the store has no results of argus health", "Run argus health first", failure.exit_code)
    return nodes


def _trend(settings: Settings, output_format: str) -> int:
    host = host_name()
    nodes = [node for node in _report(settings, 28) if node.host == host]
    reasons = [reason for node in nodes for reason in node.reasons if reason.kind in ("trend", "facts", "recent")]
    if output_format == "json":
        click.echo(json.dumps({"host": host, "reasons": [vars(reason) for reason in reasons]}, indent=2))
        return EXIT_CODES[WARNING if reasons else OK if nodes else UNKNOWN]
    if not nodes:
        raise ArgusError(f"the store has no results of {host}", "Run argus health first", EXIT_UNAVAILABLE)
    for reason in reasons:
        click.echo(clean(f"{reason.name}: {reason.text}"))
    if not reasons:
        click.echo(f"{host}: nothing stands out, against its past and its peers")
    return EXIT_CODES[WARNING if reasons else OK]


def _chosen(settings: Settings, only: tuple[str, ...], skip: tuple[str, ...], active: bool) -> list[Check]:
    every = config.available(settings)
    for name in (*only, *skip):
        config.known_check(name, every)
    chosen = [
        check
        for check in every
        if (check.name in only if only else check.name not in settings.skip and (active or check.kind != "probe"))
        and check.name not in skip
    ]
    if not chosen:
        raise ArgusError("no check is left to run", "Leave out --skip", EXIT_USAGE)
    for check in chosen:
        if check.kind == "probe" and not active:
            raise ArgusError(f"{check.name} puts load on the node", "Add --active", EXIT_USAGE)
    return chosen


def _list(checks: list[Check], settings: Settings) -> None:
    for check in checks:
        click.echo(f"{check.name:<16} {check.about}")
        for name, value in config.limits_of(check, settings).items():
            limit = check.limits.get(name)
            changed = f" (default {limit.default!r})" if limit and limit.default != value else ""
            click.echo(f"{'':<16}   {name} = {value!r}{changed}  {limit.meaning if limit else ''}".rstrip())


def _write(file: Path, text: str) -> None:
    """At once, so that a collector never reads half of it. The standard output is written to, and so is a device or
    pipe in a folder that is root's or the user's own; anything else is replaced, never written to: the folder may be
    one that others write to."""
    data = harmless(text).encode("utf-8", "backslashreplace")
    try:
        fd = _special(file)
        if fd is not None:
            with open(fd, "wb") as opened:
                opened.write(data)
            return
        with files.replacing(file) as new:
            new.write(data)
            os.fchmod(new.fileno(), 0o644)  # a collector is another user
    except OSError as failure:
        hint = "Name a file in a folder that this user may write to: --output FILE"
        raise ArgusError(f"cannot write {file}: {failure.strerror}", hint, EXIT_UNAVAILABLE) from None


def _special(file: Path) -> int | None:
    """A descriptor of what is no regular file, and is written to as it is; None: there is none of that name.

    Raises:
        OSError: It may not be written to.
    """
    if (own := files.own_descriptor(file)) is not None:
        return own
    folder = files.open_output_folder(file.parent)
    try:
        return files.open_special(folder, file.name, pipes=True)
    finally:
        os.close(folder)
