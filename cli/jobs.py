"""``argus jobs``: what has been traced."""

from __future__ import annotations

import dataclasses
import json
import pwd
import time
from datetime import datetime, timezone

import click

from argus.model.text import named
from argus.model.units import duration, narrow, ranks_text
from argus.store.open import open_store
from argus.store.read.jobs import JobRun, list_job_runs
from argus.store.reader import no_job

from .grammar import parse_since
from .options import CountRange, format_option, store_option
from .selection import is_one_of

_HEAD = (
    "job",
    "run",
    "ranks",
    "hosts",
    "mesh",
    "user",
    "environment",
    "started (UTC)",
    "took",
    "steps",
    "a step",
    "verdict",
)
_RIGHT = (False, True, True, True, False, False, False, False, True, True, True, False)
STATUSES = ("healthy", "degraded", "hung", "inconclusive")
_OPTIONAL = ("mesh", "user", "environment")
"""Columns that are left out where no run has anything in them."""


@click.command()
@click.argument("names", metavar="[JOB]...", nargs=-1)
@click.option(
    "--verdict",
    "statuses",
    multiple=True,
    type=click.Choice(STATUSES),
    help="Only runs with this verdict.",
)
@click.option("--user", "users", multiple=True, metavar="NAME", help="Only runs of this user (name or number).")
@click.option("--since", metavar="WHEN", help="Only runs with rows since then: 2h, 2026-05-01T12:00:30 (UTC).")
@click.option("--last", metavar="SPAN", help="The same: 30m, 2h, 7d.")
@click.option("--limit", type=CountRange(min=1), help="Only the newest N.")
@format_option()
@store_option
def command(
    names: tuple[str, ...],
    statuses: tuple[str, ...],
    users: tuple[str, ...],
    since: str | None,
    last: str | None,
    limit: int | None,
    output_format: str,
    store_url: str | None,
) -> None:
    """List what has been traced: every run of every job, the newest first.

    Ranks: how many were traced, of the launcher's world size. Step: median duration over ranks and steps. Verdict: the
    newest one stored by argus diagnose or by the trace. A + after the time: the trace still runs, or was cut off. Mesh:
    ranks of a communicator of each dimension, or data x pipeline x tensor parallel where a recording has that.
    Environment: runs with the same one had the same hardware, software and settings.

    \b
      argus jobs
      argus jobs llama 'resnet*'
      argus jobs --last 1d --verdict degraded --user alice
      argus jobs --format json | jq '.jobs[] | select(.status == "degraded") | .job'
    """
    with open_store(store_url, create=False) as store:
        listed = list_job_runs(store)
    runs = [one for one in listed if not names or is_one_of(one.job, names)]
    if not runs:
        raise no_job(names[0], list(dict.fromkeys(one.job for one in listed)))
    runs = _chosen(runs, statuses, users, _since_ns(since or last))[:limit]
    if output_format == "json":
        rows = [dataclasses.asdict(one) for one in runs]
        click.echo(json.dumps({"schema": "argus.jobs/1", "jobs": rows}, indent=2, ensure_ascii=False))
        return
    for line in table(runs):
        click.echo(line)


def table(runs: list[JobRun]) -> list[str]:
    """A line for each run below the head."""
    rows = [_HEAD, *(_row(one) for one in runs)]
    shown = [at for at, name in enumerate(_HEAD) if name not in _OPTIONAL or any(row[at] != "-" for row in rows[1:])]
    rows = [tuple(row[at] for at in shown) for row in rows]
    widths = [max(len(row[at]) for row in rows) for at in range(len(shown))]
    lines = []
    for row in rows:
        padded = zip(row, widths, [_RIGHT[at] for at in shown], strict=True)
        lines.append("  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in padded))
    return [line.rstrip() for line in lines]


def _row(one: JobRun) -> tuple[str, ...]:
    started = "-"
    if one.started_ns:
        started = datetime.fromtimestamp(one.started_ns // 10**9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    verdict = one.status or "-"
    if one.kind:
        whom = f" of {ranks_text(one.finding_ranks, 4)}" if one.finding_ranks else ""
        verdict += f": {one.kind.replace('_', ' ')}{whom}"
    return (
        named(one.job),
        str(one.run),
        str(one.ranks) + (f"/{one.world_size}" if one.world_size not in (0, one.ranks) else ""),
        str(one.hosts or "-"),
        one.mesh or "-",
        ", ".join(map(user_name, one.uids[:4])) or "-",
        one.environment or "-",
        started,
        narrow((one.ended_ns - one.started_ns) / 1e9) + "+" * one.open,
        str(one.steps or "-"),
        duration(one.step_ns) if one.steps else "-",
        verdict,
    )


def _chosen(runs: list[JobRun], statuses: tuple[str, ...], users: tuple[str, ...], since_ns: int) -> list[JobRun]:
    """Runs with one of the verdicts, of one of the users, whose last rows came since then; what is empty, or 0, chooses
    all."""
    return [
        one
        for one in runs
        if (not statuses or one.status in statuses)
        and (not users or {str(uid) for uid in one.uids} & {*users} or {user_name(uid) for uid in one.uids} & {*users})
        and one.ended_ns >= since_ns
    ]


def _since_ns(word: str | None) -> int:
    """Wall time that ``--since`` means; 0: all runs."""
    if word is None:
        return 0
    span_ns, at_ns = parse_since(word)
    return at_ns if at_ns is not None else time.time_ns() - (span_ns or 0)


def user_name(uid: int) -> str:
    """The name that this host has for a user, else the number."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)
