"""Options that choose stacks: which ranks, threads, steps and times."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from argus.model.errors import EXIT_USAGE, ArgusError
from argus.model.text import counted, named

from .grammar import parse_ranks, parse_since, parse_span, parse_steps, parse_time
from .options import CountRange, job_name

if TYPE_CHECKING:
    from argus.store.open import Store
    from argus.store.read.stacks import Selection

Command = TypeVar("Command", bound=Callable[..., Any])


job_option = click.option(
    "--job",
    type=job_name,
    metavar="NAME",
    help="The job. Default: the one traced last.",
)
run_option = click.option(
    "--run",
    type=CountRange(min=0),
    metavar="N",
    help="Number of the run (`argus jobs` lists them). Default: the newest.",
)
ranks_option = click.option(
    "--rank",
    "ranks",
    multiple=True,
    metavar="R",
    help="Ranks, such as 3 or 0-7,12. Default: all.",
)
since_option = click.option(
    "--since",
    "--from",
    "since",
    metavar="WHEN",
    help="Begin of the span: 30s (before the run's end), 2026-05-01T12:00:30 (UTC), or Unix time.",
)
last_option = click.option("--last", metavar="SPAN", help="The last 30s, 5m, 2h of the run; as --since SPAN.")
"""``--job --run --rank --since --last``: the same in every verb that reads the store."""


def selection_options(command: Command) -> Command:
    """``--job --run --rank --thread --steps --since --until --last``, for ``make_selection``."""
    for option in reversed(
        (
            job_option,
            run_option,
            ranks_option,
            click.option(
                "--thread",
                "threads",
                multiple=True,
                metavar="NAME",
                help="Threads by name, * and ? as in a shell; main: the main thread. Default: all.",
            ),
            click.option("--steps", "--step", "steps", metavar="A:B", help="Steps A to B; A:, :B, or one."),
            since_option,
            click.option(
                "--until",
                "--to",
                "until",
                metavar="TIME",
                help="End of the span: 2026-05-01T12:01:30 (UTC), or Unix time.",
            ),
            last_option,
        )
    ):
        command = option(command)
    return command


def is_one_of(job: str, patterns: Sequence[str]) -> bool:
    """Whether a job is one that the words of a verb name: whole, or by ``*`` and ``?`` as in a shell."""
    return any(fnmatch.fnmatchcase(job, pattern) for pattern in patterns)


def parse_runs(store: Store, words: tuple[str, ...]) -> list[tuple[str, int]]:
    """Runs as ``argus compare`` and ``argus baseline`` name them: ``JOB`` (its newest run), ``JOB@RUN``,
    ``JOB@RUN,RUN`` or ``JOB@last:3`` (its three newest). A job whose name holds an ``@`` is found by its whole name.

    Returns:
        (job, run), each once, in the order given.

    Raises:
        ArgusError: There is no such run.
    """
    from argus.store.reader import list_runs

    stored = [(one.job, one.run) for one in list_runs(store)]
    found: list[tuple[str, int]] = []
    for word in words:
        found += _runs_of(word, stored)
    return list(dict.fromkeys(found))


def _runs_of(word: str, stored: list[tuple[str, int]]) -> list[tuple[str, int]]:
    from argus.store.reader import no_job, no_run

    jobs = {job for job, _ in stored}
    job, at, runs = (word, "", "") if word in jobs else word.rpartition("@")
    if not at:
        job = word
    if job not in jobs:
        raise no_job(job, sorted(jobs))
    of_job = sorted((run for name, run in stored if name == job), reverse=True)
    if not at:
        return [(job, of_job[0])]
    kind, colon, count = runs.partition(":")
    if colon and kind == "last" and count.isdecimal() and int(count):
        if int(count) > len(of_job):
            fewer = f"job '{named(job)}' has {counted(len(of_job), 'run')}, not {count}: all are taken"
            click.echo(f"argus: {fewer}", err=True)
        return [(job, run) for run in of_job[: int(count)]]
    numbers = runs.split(",")
    if not all(number.isdecimal() for number in numbers):
        raise ArgusError(f"'{named(word)}' names no run", RUNS_HINT, EXIT_USAGE)
    for number in numbers:
        if int(number) not in of_job:
            raise no_run(job, int(number), of_job)
    return [(job, int(number)) for number in numbers]


RUNS_HINT = "Write JOB, JOB@RUN, JOB@RUN,RUN or JOB@last:3"


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
    from argus.store.read.stacks import Selection
    from argus.store.reader import latest_run

    when = parse_when(steps, since, until, last)
    if job is None or run is None:
        latest = latest_run(store, job)
        job, run = latest[0], latest[1] if run is None else run
    _check_run(store, job, run)
    return Selection(
        job,
        run,
        ranks=parse_ranks(ranks),
        threads=threads,
        **when,
    )


def parse_when(steps: str | None, since: str | None, until: str | None, last: str | None) -> dict[str, Any]:
    """What ``--steps --since --until --last`` mean, by the names of ``Selection``.

    Raises:
        ArgusError: They make no sense together.
    """
    if last and (since or steps):
        raise ArgusError("--last cannot be combined with --since or --steps", "Give one of them", EXIT_USAGE)
    if steps and (since or until):
        raise ArgusError("--steps cannot be combined with --since or --until", "Give one of them", EXIT_USAGE)
    last_ns, from_ns = parse_since(since) if since else (None, None)
    return {
        "steps": parse_steps(steps) if steps else None,
        "from_ns": from_ns,
        "to_ns": parse_time(until) if until else None,
        "last_ns": parse_span(last) if last else last_ns,
    }


def _check_run(store: Store, job: str, run: int) -> None:
    from argus.store.reader import list_runs, no_run

    runs = [known.run for known in list_runs(store, job)]
    if run not in runs:
        raise no_run(job, run, runs)


def compared_with(store: Store, shown: Selection, parts: tuple[str, ...]) -> Selection:
    """What ``--diff`` means: the shown selection with some parts of it changed.

    Args:
        store: The store.
        shown: What is shown.
        parts: KEY=VALUE each: rank (``others``: all but those shown), thread, steps, since, until, last, job, run or
            kind.

    Raises:
        ArgusError: They make no sense, or mean what is shown.
    """
    from argus.store.reader import latest_run

    base = shown
    ranks: list[str] = []
    threads: list[str] = []
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or not value:
            raise ArgusError(f"'{part}' does not name what to compare with", _DIFF_HINT, EXIT_USAGE)
        if key == "rank" and value == "others":
            if not shown.ranks:
                raise ArgusError("--diff rank=others needs --rank", _DIFF_HINT, EXIT_USAGE)
            base = replace(base, other_ranks=True)
        elif key == "rank":
            ranks.append(value)
        elif key == "thread":
            threads.append(value)
        elif key in ("step", "steps"):
            base = replace(base, steps=parse_steps(value), from_ns=None, to_ns=None, last_ns=None)
        elif key in ("from", "since"):
            last_ns, from_ns = parse_since(value)
            base = replace(base, from_ns=from_ns, last_ns=last_ns, steps=None)
        elif key in ("to", "until"):
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
            raise ArgusError(f"'{part}' does not name what to compare with", _DIFF_HINT, EXIT_USAGE)
    if ranks:
        base = replace(base, ranks=parse_ranks(tuple(ranks)), other_ranks=False)
    if threads:
        base = replace(base, threads=tuple(threads))
    if base == shown:
        raise ArgusError("--diff compares the selection with itself", _DIFF_HINT, EXIT_USAGE)
    _check_run(store, base.job, base.run)
    return base


_DIFF_HINT = (
    "Write what differs as KEY=VALUE: rank=0, rank=others, steps=0:100, thread=, since=, until=, last=, run=, job= or "
    "kind="
)
