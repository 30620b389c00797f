"""``argus explain``: what a kind of finding means, and what to do about it."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from dataclasses import asdict, replace

import click

from argus.diagnose.kinds import EXPLANATIONS, OWNERS, STATUSES, Explanation, explanation
from argus.diagnose.owners import owner_of
from argus.model.errors import EXIT_USAGE, ArgusError

from .options import format_option
from .output import styled
from .suggest import closest

WIDEST = 100
"""Longer lines are hard to read."""
_PARTS = (("detected", "detected"), ("evidence", "evidence"), ("do", "what to do"), ("owner", "who has to act"))


def _complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    return [name for name in (*(one.name for one in EXPLANATIONS), *STATUSES) if name.startswith(incomplete)]


@click.command()
@click.argument("kind", nargs=-1, metavar="[KIND]", shell_complete=_complete)
@format_option()
def command(kind: tuple[str, ...], output_format: str) -> None:
    """Explain what a kind of finding means, how it is detected, and what to do.

    Without KIND: all kinds in a line each, and what the verdicts mean.

    \b
      argus explain
      argus explain compute_straggler
      argus explain data loading
      argus explain --format json | jq -r '.[] | .name + ": " + .do'
    """
    name = " ".join(kind)
    found = explanation(name) if name else None
    explained = found and _of_the_site(found)
    if output_format == "json":
        chosen = [_of_the_site(one) for one in EXPLANATIONS] if not name else [explained or _unknown(name)]
        click.echo(json.dumps([asdict(one) for one in chosen], indent=2, ensure_ascii=False))
    elif explained is not None:
        _print(explained)
    elif name.lower() in STATUSES:
        click.echo(textwrap.fill(f"{name.lower()}: {STATUSES[name.lower()]}", _width()))
    elif name:
        _unknown(name)
    else:
        _list()


def _of_the_site(explained: Explanation) -> Explanation:
    """With the owner that this site names."""
    return replace(explained, owner=owner_of(explained.name))


def _unknown(name: str) -> Explanation:
    names = [*(one.name for one in EXPLANATIONS), *STATUSES]
    near = closest(name.lower().replace("-", "_").replace(" ", "_"), names)
    hint = f"Did you mean {near}?" if near else f"There are: {', '.join(names)}"
    raise ArgusError(f"no finding is of the kind '{name}'", hint, EXIT_USAGE)


def _print(explained: Explanation) -> None:
    click.echo(click.style(explained.name, bold=True), file=styled(sys.stdout))
    click.echo(_wrapped(explained.means, 2))
    for part, title in _PARTS:
        click.echo()
        click.echo(f"  {title}")
        text = getattr(explained, part)
        click.echo(_wrapped(f"{text} ({OWNERS[text]})" if part == "owner" else text, 4))


def _list() -> None:
    width = max(len(one.name) for one in EXPLANATIONS)
    for one in EXPLANATIONS:
        click.echo(_hanging(one.name, one.means, width))
    click.echo("\nverdicts")
    for name, means in STATUSES.items():
        click.echo(_hanging(name, means, width))
    click.echo("\nargus explain KIND shows how it is detected, and what to do.")


def _width() -> int:
    return min(shutil.get_terminal_size().columns, WIDEST) if sys.stdout.isatty() else WIDEST


def _hanging(name: str, text: str, width: int) -> str:
    return textwrap.fill(text, _width(), initial_indent=f"{name:<{width}}  ", subsequent_indent=" " * (width + 2))


def _wrapped(text: str, indent: int) -> str:
    return textwrap.fill(text, _width(), initial_indent=" " * indent, subsequent_indent=" " * indent)
