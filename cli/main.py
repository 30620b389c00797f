"""The ``argus`` command: finds the verb, runs it, and turns an expected failure into one line and an exit code."""

from __future__ import annotations

from . import interrupt

if __name__ == "__main__":
    interrupt.quit_at_once()  # before what takes time to import

import importlib
import io
import os
import sys
import traceback
from typing import Any

import click
from click.shell_completion import CompletionItem

from argus import __version__
from argus.model.errors import EXIT_FAILURE, ArgusError
from argus.model.text import harmless
from argus.system import debug, files, privileges, secrets
from argus.system.lean import hide_pandas

from .completion import answer_from_store
from .output import print_text_only
from .suggest import OTHER_WORDS, SuggestingGroup

VERBS = {
    "check": "Check whether tracing works on this machine, and what to do if not.",
    "trace": "Trace running processes by PID.",
    "run": "Run a command and trace it from its first call.",
    "arm": "Prepare programs so that their GPU times can be traced at any time.",
    "dump": "Show what every thread does at this instant.",
    "import": "Import traces of the PyTorch profiler and Nsight Systems.",
    "demo": "Diagnose a simulated job with a hidden fault: needs no root and no GPU.",
    "simulate": "Store the trace of a job that never ran, with known faults.",
    "diagnose": "Name what slows a job down, with evidence.",
    "report": "Write a page about a job: one HTML file that any browser opens.",
    "serve": "Show the runs of a store in a browser, kept up to date.",
    "compare": "Compare runs: the same workload, what changed, and how sure that is.",
    "baseline": "Healthy runs that later runs of the same job are compared with.",
    "observe": "Repeat a command, and decide whether it behaves the same each time.",
    "explain": "Explain what a kind of finding means, and what to do.",
    "stacks": "Group ranks by their stacks, and mark those that differ.",
    "export": "Write flame graphs, timelines, and stacks for other tools.",
    "flag": "Keep every GPU operation of a time span.",
    "jobs": "List what has been traced: jobs, runs, ranks, steps, verdicts.",
    "sql": "Query everything Argus stored.",
    "health": "Check the health of this node, and rank nodes to drain.",
    "store": "Create the tables, load what was spooled, show what is stored, remove jobs.",
    "completion": "Print the script that completes commands, jobs, runs and ranks by TAB.",
    "man": "Write manual pages.",
}
"""Every verb and its one-line help: kept here so that ``argus --help`` imports no verb."""
MODULES = {"import": "import_trace"}
"""Where a verb's module cannot have its name."""

OF_STORES = (
    "demo", "simulate", "diagnose", "report", "compare", "baseline", "explain", "stacks", "export", "flag", "jobs",
    "sql", "store", "completion",
)  # fmt: skip
"""Verbs that need no right of root but to files."""
FOR_OTHERS = ("arm", "man")
"""Verbs that write what other users are to read."""


class _Verbs(SuggestingGroup):
    """Imports a verb's module only when that verb runs: numpy, chdb and bcc take seconds together."""

    other_words = OTHER_WORDS

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f".{MODULES.get(cmd_name, cmd_name)}", __package__)
        command = getattr(module, "command")  # noqa: B009 - mypy cannot know the module
        assert isinstance(command, click.Command)
        if not any(param.name == "debug" for param in command.params):
            command.params.append(_debug_option())
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the verb. What root writes from here on is for root alone, but for verbs whose files others need."""
        resolved = super().resolve_command(ctx, args)
        if resolved[0] not in FOR_OTHERS:
            files.keep_private()
        if resolved[0] in OF_STORES:
            privileges.keep_for_rows()
        return resolved

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Verbs with their help, and options; no module is imported for it."""
        items = [CompletionItem(name, help=text) for name, text in VERBS.items() if name.startswith(incomplete)]
        return items + click.Command.shell_complete(self, ctx, incomplete)

    def invoke(self, ctx: click.Context) -> Any:
        debug.capture_logging()
        interrupt.interrupt_verbs()
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            # Not left to click, which prints an empty line into pipes and logs, too.
            if sys.stderr is not None and sys.stderr.isatty() and not interrupt.announced:
                click.echo(err=True)
            raise click.exceptions.Exit(interrupt.INTERRUPTED) from None
        except BrokenPipeError:
            # Here, not around click, which ends with 1: the reader has seen enough (`argus sql … | head`).
            _print_no_more()
            raise click.exceptions.Exit(0) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


def _print_no_more() -> None:
    """Keeps Python from complaining at exit that nobody reads its output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _begin_debugging(_ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and debug.path() is None:
        where = debug.begin()
        click.echo(f"argus: debug log: {where or f'none, {debug.folder()} cannot be used'}", err=True)


def _debug_option() -> click.Option:
    """``--debug``, which every verb has."""
    return click.Option(
        ["--debug"],
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=_begin_debugging,
        help="Log warnings of libraries, and what takes how long, to a file.",
    )


@click.command(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, "-V", "--version", prog_name="argus")
def cli() -> None:
    """Find out why a distributed GPU training job is slow, while it runs.

    \b
      sudo argus check               does tracing work here?
      sudo argus trace               choose a running process, and trace it
      argus diagnose                 who is slow, and why
      argus explain KIND             what a finding means, and what to do
      argus jobs                     what has been traced
    """


def main(argv: list[str] | None = None) -> int:
    """Runs ``argus`` with ``argv`` (default: the process's own arguments) and returns its exit code.

    Without ``argv`` the process is Argus's: an interrupted one ends here.
    """
    own = argv is None
    if own:
        privileges.own_process = True
        interrupt.quit_at_once()
        debug.capture()
        hide_pandas()
        secrets.take()
        interrupt.ignore_at_exit()
    for stream in (sys.stdout, sys.stderr):
        # A locale of the last century, or a byte from a database, must not end a command.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if own:
        print_text_only()
    if sys.stdout is None:  # started with its output closed
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for as long as the process lives
    if debug.wanted():
        _begin_debugging(click.Context(cli), click.Option(["--debug"]), True)
    try:
        code = _run(argv)
    finally:
        if not own:
            files.share()  # the process is somebody else's
    if own and interrupt.came:
        interrupt.flush_and_leave(code)
    if own:
        interrupt.leave_with(code)
    return code


def _run(argv: list[str] | None) -> int:
    """Runs a verb, and turns what it raises into lines for people and an exit code."""
    try:
        if (asked := os.environ.get("_ARGUS_COMPLETE")) and answer_from_store(asked):
            return 0
        result: Any = cli.main(args=argv, prog_name="argus", standalone_mode=False)
        return int(result) if isinstance(result, int) else 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as wrong:
        wrong.show()
        return wrong.exit_code
    except (click.Abort, KeyboardInterrupt):
        return interrupt.INTERRUPTED
    except ArgusError as failure:
        if interrupt.came:
            return interrupt.INTERRUPTED  # what was cut short fails in many ways
        click.echo(harmless(f"argus: {failure.message}"), err=True)
        if failure.hint:
            click.echo(harmless(f"       {failure.hint}"), err=True)
        return failure.exit_code
    except BrokenPipeError:
        _print_no_more()
        return 0
    except Exception as failure:
        return interrupt.INTERRUPTED if interrupt.came else _failed(failure)


def _failed(failure: Exception) -> int:
    """Reports an unexpected error in a line or two. The traceback goes to a file."""
    if isinstance(failure, OSError):
        # Ours become ArgusError where they arise; what is left is the terminal, pipe or file that we print to.
        debug.note("".join(traceback.format_exception(failure)))
        click.echo(
            f"argus: {failure.strerror or failure}" + (f": {failure.filename}" if failure.filename else ""), err=True
        )
    else:
        click.echo(harmless(f"argus: internal error: {type(failure).__name__}: {failure}"), err=True)
        click.echo(f"       This is a defect of Argus. {debug.traceback_of(failure)}", err=True)
    return EXIT_FAILURE


if __name__ == "__main__":
    sys.exit(main())
