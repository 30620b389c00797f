"""``argus flag``: keeps every GPU operation of a time span."""

from __future__ import annotations

import time
from typing import Any

import click

from argus.model.errors import EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError
from argus.model.text import printable
from argus.model.units import span_text
from argus.store.flags import Flag, flag
from argus.store.open import Store, open_store
from argus.store.reader import query_columns

from .grammar import parse_span
from .options import store_option
from .selection import make_selection, selection_options

_STEPS = """
SELECT toUnixTimestamp64Nano(min(ts)) AS begin_ns, max(toUnixTimestamp64Nano(ts) + toInt64(duration_ns)) AS end_ns,
       count() AS known
FROM iterations WHERE job = {job:String} AND run = {run:UInt32} AND step BETWEEN {first:UInt32} AND {last:UInt32}
"""

_TIMED = """
SELECT (SELECT count() FROM kernel_summaries WHERE job = {job:String} AND run = {run:UInt32})
     + (SELECT count() FROM kernel_events WHERE job = {job:String} AND run = {run:UInt32}) AS known
"""


@click.command()
@selection_options
@click.option("--next", "following", metavar="SPAN", help="The next 10s, 1m of the run.")
@click.option("--why", metavar="TEXT", default="by hand", show_default=True, help="The reason, stored with the rows.")
@store_option
def command(following: str | None, why: str, store_url: str | None, **choice: Any) -> None:
    """Keep every GPU operation of a time span.

    Of a job with more kernels than are stored one by one, `argus trace` stores those of some steps, and summaries of
    all. Within a flagged span it stores every one, on all hosts, as far back as it holds them in memory (seconds of a
    large job). Diagnosis flags spans by itself; so does the tracer, for steps that are suddenly slow.

    \b
      argus flag --last 5s                    what just happened
      argus flag --next 10s --rank 0-7        what happens next, on some ranks
      argus flag --steps 812 && argus export perfetto --steps 812 -o step.json.gz
    """
    if choice["threads"]:
        raise ArgusError("--thread does not apply to GPU operations", "Leave it out", EXIT_USAGE)
    if following and (choice["last"] or choice["steps"] or choice["since"] or choice["until"]):
        raise ArgusError("--next cannot be combined with another time", "Give one of them", EXIT_USAGE)
    with open_store(store_url, create=False) as store:
        shown = make_selection(store, **choice)
        now = time.time_ns()
        if following:
            begin_ns, end_ns = now, now + parse_span(following)
        elif shown.steps is not None:
            begin_ns, end_ns = _of_steps(store, shown.job, shown.run, shown.steps)
        elif shown.last_ns is not None:
            end_ns = shown.to_ns if shown.to_ns is not None else now
            begin_ns = end_ns - shown.last_ns
        elif shown.from_ns is not None:
            begin_ns, end_ns = shown.from_ns, shown.to_ns if shown.to_ns is not None else now
        else:
            raise ArgusError(
                "no time span is given", "Give --last 5s, --next 10s, --steps 812, or --since and --until", EXIT_USAGE
            )
        if begin_ns >= end_ns:
            raise ArgusError("the time span ends before it begins", "", EXIT_USAGE)
        timed = query_columns(store, _TIMED, {"job": shown.job, "run": shown.run})
        flag(store, shown.job, shown.run, Flag(begin_ns, end_ns, shown.ranks, why))
    click.echo(f"flagged {span_text((end_ns - begin_ns) / 1e9)} of job {printable(shown.job)}, run {shown.run}")
    if not int(timed["known"][0]):
        click.echo("no GPU operation of this run is stored: unless GPU times are recorded, there is nothing to keep")
        click.echo("GPU times need a process that was started by `argus run` or armed by `argus arm`")
        return
    click.echo("its GPU operations that are not stored yet will be, within seconds")
    click.echo('next: argus sql "SELECT rank, ts, whole, operations FROM latest_raw_windows ORDER BY ts DESC LIMIT 8"')


def _of_steps(store: Store, job: str, run: int, steps: tuple[int, int]) -> tuple[int, int]:
    span = query_columns(store, _STEPS, {"job": job, "run": run, "first": steps[0], "last": steps[1]})
    if not int(span["known"][0]):
        raise ArgusError(f"no step {steps[0]} of job {job} is stored yet", "Give --next 10s", EXIT_UNAVAILABLE)
    return int(span["begin_ns"][0]), int(span["end_ns"][0])
