"""Options that choose stacks: which ranks, threads, steps and times."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any, TypeVar

import click

from argus.errors import EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError
from argus.store.open import Store
from argus.store.reader import latest_run, list_runs
from argus.store.stacks import Selection

from .options import job_name

Command = TypeVar("Command", bound=Callable[..., Any])

MAX_SPAN_NS = 366 * 86400 * 10**9
_UNITS = {"ms": 1e-3, "s": 1, "m": 60, "h": 3600, "d": 86400}


def selection_options(command: Command) -> Command:
    """``--job --run --rank --thread --step --from --to --last``, for ``make_selection``."""
    for option in reversed(
        (
            click.option("--job", type=job_name, metavar="NAME", help="The job. Default: the one traced last."),
            click.option("--run", type=click.IntRange(min=0), metavar="N", help="Its session. Default: the newest."),
            click.option(
                "--rank", "ranks", multiple=True, metavar="R", help="Ranks, such as 3 or 0-7,12. Default: all."
            ),
            click.option(
                "--thread",
                "threads",
                multiple=True,
                metavar="NAME",
                help="Threads by name, * and ? as in a shell; main: the main thread. Default: all.",
            ),
            click.option("--step", "steps", metavar="A-B", help="Steps A to B, or one."),
            click.option(
                "--from", "since", metavar="TIME", help="From then on: 2026-05-01T12:00:30 (UTC), or Unix time."
            ),
            click.option("--to", "until", metavar="TIME", help="Before then."),
            click.option("--last", metavar="SPAN", help="The last 30s, 5m, 2h of the run."),
        )
    ):
        command = option(command)
    return command


def make_selection(
    store: Store,
    *,
    job: str | None,
    run: int | None,
    ranks: tuple[str, ...],
    threads: tuple[str, ...],
    steps: str | None,
    since: str | None,
    until: str | None,
    last: str | None,
) -> Selection:
    """The selection that the options mean.

    Raises:
        ArgusError: They make no sense, or there is no such run.
    """
    if last and (since or steps):
        raise ArgusError("--last goes neither with --from nor with --step", "Give one of them", EXIT_USAGE)
    if steps and (since or until):
        raise ArgusError("--step goes neither with --from nor with --to", "Give one of them", EXIT_USAGE)
    if job is None or run is None:
        found = latest_run(store, job)
        job, run = found[0], found[1] if run is None else run
    _check_run(store, job, run)
    return Selection(
        job,
        run,
        ranks=parse_ranks(ranks),
        threads=threads,
        steps=parse_steps(steps) if steps else None,
        from_ns=parse_time(since) if since else None,
        to_ns=parse_time(until) if until else None,
        last_ns=parse_span(last) if last else None,
    )


def _check_run(store: Store, job: str, run: int) -> None:
    runs = [known.run for known in list_runs(store, job)]
    if run not in runs:
        stored = ", ".join(map(str, runs[:8]))
        raise ArgusError(f"job '{job}' has no run {run}", f"Stored are: {stored or 'none'}", EXIT_UNAVAILABLE)


def compared_with(store: Store, shown: Selection, parts: tuple[str, ...]) -> Selection:
    """What ``--diff`` means: the shown selection with some parts of it changed.

    Args:
        store: The store.
        shown: What is shown.
        parts: KEY=VALUE each: rank (``others``: all but those shown), thread, step, from, to, last, job, run, kind.

    Raises:
        ArgusError: They make no sense, or mean what is shown.
    """
    base = shown
    ranks: list[str] = []
    threads: list[str] = []
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or not value:
            raise ArgusError(f"'{part}' says not what to compare with", _DIFF_HINT, EXIT_USAGE)
        if key == "rank" and value == "others":
            if not shown.ranks:
                raise ArgusError("--diff rank=others needs --rank: whose others?", _DIFF_HINT, EXIT_USAGE)
            base = replace(base, other_ranks=True)
        elif key == "rank":
            ranks.append(value)
        elif key == "thread":
            threads.append(value)
        elif key == "step":
            base = replace(base, steps=parse_steps(value), from_ns=None, to_ns=None, last_ns=None)
        elif key == "from":
            base = replace(base, from_ns=parse_time(value), steps=None, last_ns=None)
        elif key == "to":
            base = replace(base, to_ns=parse_time(value), steps=None, last_ns=None)
        elif key == "last":
            base = replace(base, last_ns=parse_span(value), steps=None, from_ns=None, to_ns=None)
        elif key == "job":
            # Another job's runs have numbers of their own.
            base = replace(base, job=value, run=latest_run(store, value)[1])
        elif key == "run" and value.isdigit():
            base = replace(base, run=int(value))
        elif key == "kind" and value in ("cpu", "off", "all"):
            base = replace(base, kind=value)
        else:
            raise ArgusError(f"'{part}' says not what to compare with", _DIFF_HINT, EXIT_USAGE)
    if ranks:
        base = replace(base, ranks=parse_ranks(tuple(ranks)), other_ranks=False)
    if threads:
        base = replace(base, threads=tuple(threads))
    if base == shown:
        raise ArgusError("--diff compares the selection with itself", _DIFF_HINT, EXIT_USAGE)
    _check_run(store, base.job, base.run)
    return base


_DIFF_HINT = (
    "Write what differs as KEY=VALUE: rank=0, rank=others, step=0-100, thread=, from=, to=, last=, run=, job=, kind="
)


def parse_ranks(words: tuple[str, ...]) -> tuple[int, ...]:
    """``("3", "0-2,7")`` → (0, 1, 2, 3, 7)."""
    ranks: set[int] = set()
    for word in ",".join(words).split(",") if words else []:
        match = re.fullmatch(r"\s*(\d{1,7})(?:-(\d{1,7}))?\s*", word)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise ArgusError(f"'{word}' names no ranks", "Write 3, 0-7 or 0-3,8", EXIT_USAGE)
        ranks |= set(range(first, last + 1))
    return tuple(sorted(ranks))


def parse_steps(word: str) -> tuple[int, int]:
    """``"100-200"``, ``"100:200"`` or ``"100"`` → (100, 200) or (100, 100)."""
    match = re.fullmatch(r"(\d{1,9})(?:[-:](\d{1,9}))?", word)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if first > last:
        raise ArgusError(f"'{word}' names no steps", "Write 100-200, or 100", EXIT_USAGE)
    return first, last


def parse_span(word: str) -> int:
    """``"30s"``, ``"500ms"``, ``"5m"`` → nanoseconds."""
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,9})?)\s*(ms|[smhd])?", word)
    ns = int(float(match[1]) * _UNITS[match[2] or "s"] * 1e9) if match else 0
    if not 0 < ns <= MAX_SPAN_NS:
        raise ArgusError(f"'{word}' is no span of time", "Write 30s, 500ms, 5m or 2h; at most a year", EXIT_USAGE)
    return ns


def parse_time(word: str) -> int:
    """A time of day and date in UTC, or Unix time in seconds → nanoseconds."""
    if match := re.fullmatch(r"(\d{9,11})(?:\.(\d{1,9}))?", word):
        return int(match[1]) * 10**9 + int((match[2] or "").ljust(9, "0"))
    # datetime holds microseconds only.
    match = re.fullmatch(r"(.*?:\d\d)\.(\d{1,9})(\D.*)?", word)
    text, fraction = (match[1] + (match[3] or ""), match[2]) if match else (word, "")
    try:
        when = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        hint = "Write 2026-05-01T12:00:30, 2026-05-01T12:00:30.5+02:00, or Unix time"
        raise ArgusError(f"'{word}' is no time", hint, EXIT_USAGE) from None
    when = when.replace(tzinfo=timezone.utc) if when.tzinfo is None else when
    if not 1970 <= when.year < 2200:
        raise ArgusError(f"'{word}' is no time of a trace", "Write a year between 1970 and 2199", EXIT_USAGE)
    return int(when.timestamp()) * 10**9 + int(fraction.ljust(9, "0"))
