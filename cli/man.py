"""``argus man``: manual pages, one a verb, from the same text as ``--help`` and ``argus explain``."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import click

from argus import __version__
from argus.diagnose.kinds import EXPLANATIONS, STATUSES
from argus.model.errors import EXIT_FAILURE, ArgusError
from argus.system import files

EXIT_CODES = (
    ("0", "Done."),
    ("1", "Something failed that should have worked."),
    ("2", "Wrong usage."),
    ("3", "Something needed is not there: a process, a permission, a kernel feature, the store."),
    ("130", "Stopped by Ctrl-C."),
)
"""Of every verb that names none of its own."""
_OWN_CODES = ("health",)
_ENVIRONMENT = (
    ("ARGUS_STORE", "The store where --store names none."),
    ("ARGUS_STORE_MAX", "What an embedded store may take up on disk: 500M, 20G. Default: 100G."),
    ("ARGUS_STORE_PASSWORD, ARGUS_STORE_PASSWORD_FILE", "The password of a server's user, or the file that has it."),
    ("ARGUS_SPILL_DIR, ARGUS_SPILL_MAX", "Where rows wait while the store is away, and how much may."),
    ("ARGUS_CACHE_DIR", "Where compiled programs are kept; off: nowhere."),
    ("ARGUS_DEBUG", "Set: an internal error shows its traceback."),
)


@click.command()
@click.option(
    "--out",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    metavar="DIR",
    help="Where to: a folder man1 is made there.",
)
def command(folder: Path) -> None:
    """Write manual pages: argus(1), and one for each verb.

    \b
      sudo argus man --out /usr/local/share/man && man argus-trace
      argus man --out ~/.local/share/man
    """
    pages = all_pages()
    try:
        files.make_folder(folder / "man1")
        for name, text in pages.items():
            with files.replacing(folder / "man1" / f"{name}.1") as file:
                file.write(text.encode())
    except OSError as failure:
        raise ArgusError(f"{folder}/man1 cannot be written: {failure.strerror}", "", EXIT_FAILURE) from None
    click.echo(f"{len(pages)} pages in {folder}/man1: man -l {folder}/man1/argus.1")


def all_pages() -> dict[str, str]:
    """Pages by name, without ``.1``."""
    from .main import VERBS, cli

    pages = {"argus": _page("argus", "find out why a distributed GPU training job is slow", _of_argus(cli, VERBS))}
    for verb, about in VERBS.items():
        command = cli.get_command(click.Context(cli, info_name="argus"), verb)
        assert command is not None
        pages[f"argus-{verb}"] = _page(f"argus-{verb}", _small(about), _of_verb(command, verb, list(VERBS)))
    return pages


def escape(text: str) -> str:
    """Text as roff takes it: backslashes, hyphens that are to be copied, and what would begin a request, escaped."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("…", "...").replace("→", "->").replace("µ", "u")
    return "\n".join("\\&" + line if line.startswith((".", "'")) else line for line in text.split("\n"))


def _page(name: str, about: str, sections: list[str]) -> str:
    head = f'.TH "{escape(name.upper())}" "1" "" "Argus {escape(__version__)}" "Argus Manual"'
    return "\n".join([head, ".nh", ".ad l", ".SH NAME", f"{escape(name)} \\- {escape(about)}", *sections]) + "\n"


def _small(text: str) -> str:
    return text[0].lower() + text[1:].removesuffix(".")


def _of_argus(cli: click.Group, verbs: dict[str, str]) -> list[str]:
    lines = [".SH SYNOPSIS", ".B argus", "[OPTIONS] COMMAND [ARGUMENTS]", ".SH DESCRIPTION", *_help(cli)]
    lines += [".SH COMMANDS"]
    for verb, about in verbs.items():
        lines += [".TP", f".BR argus\\-{escape(verb)} (1)", escape(about)]
    lines += _options(_top(cli), cli, ".SH OPTIONS")
    lines += [".SH FINDINGS"]
    for one in EXPLANATIONS:
        lines += [".TP", f".B {escape(one.name)}", escape(one.means), f".br\nDetected: {escape(one.detected)}"]
        lines += [f".br\nWhat to do: {escape(one.do)}"]
    lines += [".SH VERDICTS"]
    for status, means in STATUSES.items():
        lines += [".TP", f".B {status}", escape(means)]
    lines += [".SH ENVIRONMENT"]
    for variable, means in _ENVIRONMENT:
        lines += [".TP", f".B {escape(variable)}", escape(means)]
    return lines + _exits()


def _of_verb(command: click.Command, verb: str, verbs: list[str]) -> list[str]:
    context = click.Context(command, info_name=verb, parent=_top(click.Group("argus")))
    lines = [".SH SYNOPSIS", *_synopsis(command, context), ".SH DESCRIPTION", *_help(command)]
    lines += _options(context, command, ".SH OPTIONS")
    if isinstance(command, click.Group):
        lines += [".SH COMMANDS"]
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            inner = click.Context(below, info_name=name, parent=context)
            lines += [f".SS argus {escape(verb)} {escape(name)}", *_synopsis(below, inner), ".PP", *_help(below)]
            lines += _options(inner, below, ".PP")
    if verb not in _OWN_CODES:
        lines += _exits()
    others = ["argus", *(f"argus-{other}" for other in verbs if other != verb)]
    return [*lines, ".SH SEE ALSO", ",\n".join(f".BR {escape(other)} (1)" for other in others)]


def _top(cli: click.Group) -> click.Context:
    return click.Context(cli, info_name="argus", help_option_names=["-h", "--help"])


def _synopsis(command: click.Command, context: click.Context) -> list[str]:
    return [f".B {escape(context.command_path)}", escape(" ".join(command.collect_usage_pieces(context)))]


def _exits() -> list[str]:
    lines = [".SH EXIT STATUS"]
    for code, means in EXIT_CODES:
        lines += [".TP", f".B {code}", escape(means)]
    return lines


def _help(command: click.Command) -> list[str]:
    """The paragraphs of a command's help; those after a line with ``\\b`` keep their lines."""
    lines: list[str] = []
    for number, part in enumerate(re.split(r"\n\s*\n", command.help or "")):
        text = part.strip("\n")
        if number:
            lines.append(".PP")
        if text.lstrip().startswith("\b"):
            body = textwrap.dedent(text.lstrip().removeprefix("\b").strip("\n")).rstrip()
            lines += [".nf", *(escape(line) for line in body.split("\n")), ".fi"]
        else:
            lines.append(escape(" ".join(text.split())))
    return lines


def _options(context: click.Context, command: click.Command, head: str) -> list[str]:
    lines = []
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None:
            names, means = record
            lines += [".TP", f".B {escape(names)}", escape(" ".join(means.split())) or "\\&"]
    return [head, *lines] if lines else []
