"""What a mistyped word may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import click

OTHER_WORDS = {
    "analyse": "diagnose", "analyze": "diagnose", "why": "diagnose", "watch": "trace", "attach": "trace",
    "record": "trace", "top": "trace", "profile": "trace", "start": "run", "exec": "run", "flamegraph": "export",
    "flame": "export", "timeline": "export", "perfetto": "export", "query": "sql", "ls": "jobs", "list": "jobs",
    "ps": "jobs", "runs": "jobs", "job": "jobs", "rm": "store rm", "remove": "store rm", "delete": "store rm",
    "db": "store", "html": "report", "page": "report",
    "doctor": "check", "preflight": "check", "bt": "dump", "backtrace": "dump", "pstack": "dump", "node": "health",
    "load": "store load", "help": "--help", "version": "--version",
}  # fmt: skip
"""Words of other tools, and the verb that does it here."""


def closest(word: str, names: Iterable[str]) -> str | None:
    """The name that a word is most like, or begins; None: none is near."""
    listed = list(names)
    begun = [name for name in listed if len(word) >= 2 and name.startswith(word)]
    if len(begun) == 1:
        return begun[0]
    near = difflib.get_close_matches(word, listed, n=1, cutoff=0.6)
    return near[0] if near else None


def close_names(word: str, names: Iterable[str]) -> list[str]:
    """The names that a word may have meant, the likeliest first; at most three."""
    listed = list(names)
    near = difflib.get_close_matches(word, listed, n=3, cutoff=0.6)
    return near or [name for name in listed if len(word) >= 3 and word in name][:3]


class SuggestingGroup(click.Group):
    """Names the command that a mistyped one may have meant, as click does for options."""

    other_words: dict[str, str] = {}  # noqa: RUF012 - a subclass may name its own

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0]
        if ctx.resilient_parsing or word.startswith("-") or word in self.list_commands(ctx):
            return super().resolve_command(ctx, args)
        near = self.other_words.get(word) or closest(word, self.list_commands(ctx))
        meant = f" Did you mean '{ctx.command_path} {near}'?" if near else ""
        raise click.UsageError(f"No such command '{word}'.{meant}", ctx)
