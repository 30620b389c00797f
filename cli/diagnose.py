"""``argus diagnose``: name what slows a job down, with evidence."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timezone

import click

from argus.diagnose.case import HANG_S, THRESHOLD
from argus.diagnose.follow.follow import INTERVAL_S, Follower, Round, follow
from argus.diagnose.learn import learn
from argus.diagnose.save import save
from argus.diagnose.stored import diagnose_store
from argus.diagnose.verdict import Finding, Verdict, to_json
from argus.model.errors import EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError
from argus.model.text import named
from argus.model.units import ranks_text
from argus.store.open import Store, open_store
from argus.store.reader import latest_run, list_runs, no_run, query_columns

from . import interrupt
from .grammar import parse_open_steps, parse_ranks, parse_since
from .options import NumberRange, Span, format_option, store_option
from .output import styled
from .selection import job_option, last_option, run_option, since_option

EXIT_CODES = {"healthy": 0, "degraded": 10, "hung": 11, "inconclusive": 12}
"""Exit codes with --exit-code."""
_RANKS = "SELECT DISTINCT rank FROM ranks WHERE job = {job:String} AND run = {run:UInt32} ORDER BY rank"


def steps_of(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int | None, int | None]:
    """``--steps A:B`` as an option's callback."""
    return (None, None) if value is None else parse_open_steps(value)


@click.command()
@job_option
@run_option
@click.option(
    "--rank",
    "ranks",
    multiple=True,
    metavar="R",
    help="Print only findings about these ranks (3, or 0-7,12) or about all. The verdict is the whole job's.",
)
@click.option("--steps", "--step", "steps", metavar="A:B", callback=steps_of, help="Only steps A to B; A:, :B, or one.")
@since_option
@last_option
@click.option("--follow", "following", is_flag=True, help="Diagnose repeatedly while the job runs, and print changes.")
@click.option(
    "--interval",
    "interval_s",
    type=Span(0.5),
    default=INTERVAL_S,
    show_default=True,
    metavar="SPAN",
    help="With --follow: how often.",
)
@click.option(
    "--threshold",
    type=NumberRange(0, 1, min_open=True, max_open=True),
    default=THRESHOLD,
    show_default=True,
    help="Least share of the step time that a fault must cost to be reported. Faults that cost no time yet (a slow GPU "
    "in a pipeline, a slow link behind other work) have lower limits of their own.",
)
@click.option(
    "--hang-after",
    type=Span(),
    default=HANG_S,
    show_default=True,
    metavar="SPAN",
    help="Time without any call after which a job is reported as hung.",
)
@format_option(("text", "json"))
@store_option
@click.option("--no-store", is_flag=True, help="Store neither the verdict nor the alignment of hosts.")
@click.option(
    "--sql", "with_sql", is_flag=True, help="Print every query behind the findings, to paste into `argus sql`."
)
@click.option("-v", "--verbose", is_flag=True, help="Print all of the evidence, statistics too.")
@click.option(
    "--exit-code",
    is_flag=True,
    help="Report the verdict by the exit code: 0 healthy, 10 degraded, 11 hung, 12 inconclusive. Without it: 0.",
)
def command(
    job: str | None,
    run: int | None,
    ranks: tuple[str, ...],
    steps: tuple[int | None, int | None],
    since: str | None,
    last: str | None,
    following: bool,
    interval_s: float,
    threshold: float,
    hang_after: float,
    output_format: str,
    store_url: str | None,
    no_store: bool,
    with_sql: bool,
    verbose: bool,
    exit_code: bool,
) -> int:
    """Name what slows a job down, with evidence.

    The newest steps decide: a job that became slow 20 steps ago is degraded, one that recovered is healthy.

    \b
      argus diagnose                          the job traced last
      argus diagnose --job llama --steps 500:
      argus diagnose --last 10m               its last ten minutes
      argus diagnose --rank 3,8-15            what is found about these ranks
      argus diagnose --follow                 while the job runs: print changes until the trace ends
      argus diagnose -v                       with all of the evidence
      argus diagnose --sql                    with the queries behind it
      argus diagnose --format json | jq '.findings[0]'
      argus diagnose --exit-code || alert     for scripts
    """
    if following and steps != (None, None):
        raise ArgusError("--follow and --steps cannot be combined", "Use --since, or leave out --follow", EXIT_USAGE)
    if since is not None and last is not None:
        raise ArgusError("--last is --since with a span", "Give one of them", EXIT_USAGE)
    since = last if since is None else since
    shown = parse_ranks(ranks)
    with open_store(store_url, create=False) as store:
        given, ended_ns = run, 0
        if job is None or run is None:
            run_number = latest_run(store, job)
            job, run = run_number[0], run_number[1] if run is None else run
        # All runs are looked through only if that is needed: of a large job it takes seconds.
        if given is not None or since is not None:
            runs = list_runs(store, job)
            chosen = next((known for known in runs if known.run == run), None)
            if chosen is None:
                raise no_run(job, run, [known.run for known in runs])
            ended_ns = chosen.ended_ns
        since_ns = since_of(since, ended_ns)
        _check_ranks(store, job, run, shown)
        if following:
            follower = Follower(store, job, run, threshold, hang_after, since_ns, keep=not no_store)
            codes = EXIT_CODES if exit_code else {}
            status = _follow(
                follower, interval_s, output_format, with_sql, verbose, codes, keep=not no_store, ranks=shown
            )
            return codes.get(status, 0)
        verdict = diagnose_store(
            store,
            job,
            run,
            steps=steps,
            threshold=threshold,
            hang_after_s=hang_after,
            keep=not no_store,
            since_ns=since_ns,
        )
        part = _about(verdict, shown)
        try:
            if output_format == "json":
                click.echo(to_json(part))
            else:
                print_verdict(part, with_sql, verbose)
                if (others := len(verdict["findings"]) - len(part["findings"])) > 0:
                    click.echo(f"{others} finding{'s' * (others > 1)} about other ranks: leave out --rank")
        finally:  # also where nobody reads on: argus diagnose | head -1
            if not no_store:
                save(store, verdict)
                if steps == (None, None) and not since_ns:
                    learn(store, verdict)
    return EXIT_CODES[verdict["status"]] if exit_code else 0


def since_of(word: str | None, ended_ns: int) -> int:
    """``--since`` as wall time; 0: no limit. ``ended_ns``: the end of the run."""
    if word is None:
        return 0
    span_ns, at_ns = parse_since(word)
    return at_ns if at_ns is not None else max(ended_ns - (span_ns or 0), 0)


def _check_ranks(store: Store, job: str, run: int, asked: tuple[int, ...]) -> None:
    """Raises ArgusError if none of the ranks that were requested is stored."""
    if not asked:
        return
    params = {"job": job, "run": run}
    stored = query_columns(store, _RANKS, params)["rank"].tolist()
    if stored and set(stored).isdisjoint(asked):
        raise ArgusError(
            f"job '{named(job)}' has no {ranks_text(asked)}", f"Stored are: {ranks_text(stored)}", EXIT_UNAVAILABLE
        )


def _about(verdict: Verdict, ranks: tuple[int, ...]) -> Verdict:
    """The verdict with those of its findings that concern one of these ranks, or all; no ranks: as it is."""
    return {**verdict, "findings": _those_about(verdict["findings"], ranks)} if ranks else verdict


def _those_about(findings: list[Finding], ranks: tuple[int, ...]) -> list[Finding]:
    return [one for one in findings if not one["ranks"] or not set(ranks).isdisjoint(one["ranks"])]


@contextlib.contextmanager
def _until_stopped(code: Callable[[], int]) -> Iterator[threading.Event]:
    """An event that the first Ctrl-C, or SIGTERM, sets; a second one ends the program.

    Args:
        code: The exit code, for the case that a round takes too long to be waited for.
    """
    stop = threading.Event()
    ending = []

    def note(_received: int, _frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        ending.append(interrupt.in_a_while(interrupt.GRACE_S, lambda: interrupt.leave(code())))

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for timer in ending:
            timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def _follow(
    follower: Follower,
    interval_s: float,
    output_format: str,
    with_sql: bool,
    detail: bool,
    codes: dict[str, int],
    *,
    keep: bool,
    ranks: tuple[int, ...],
) -> str:
    """Prints what changes until the trace ends or somebody stops it; returns the last status. ``codes``: exit codes by
    status."""
    status, last_error = "inconclusive", ""

    def trouble(failure: ArgusError) -> None:
        nonlocal last_error
        if failure.message != last_error:
            last_error = failure.message
            click.echo(f"argus: {failure.message}; trying again", err=True)

    with _until_stopped(lambda: codes.get(status, 0)) as stop:
        for latest in follow(follower, stop.wait, trouble, interval_s):
            status, last_error, whole = latest.verdict["status"], "", latest.verdict
            if ranks:
                latest = replace(
                    latest,
                    verdict=_about(whole, ranks),
                    new=_those_about(latest.new, ranks),
                    gone=_those_about(latest.gone, ranks),
                )
            if output_format == "json" and (latest.changed or latest.ended):
                click.echo(_json_line(latest))
            elif output_format == "text" and latest.changed:
                _print_round(latest, with_sql, detail)
            if keep and latest.changed:
                save(follower.store, whole)
            if stop.is_set():
                break
        else:
            if output_format == "text" and not stop.is_set():
                click.echo("the trace has ended")
    return status


def _json_line(latest: Round) -> str:
    change = {
        "at_ns": latest.at_ns,
        "took_ms": round(latest.took_s * 1e3),
        "new": [_brief(finding) for finding in latest.new],
        "gone": [_brief(finding) for finding in latest.gone],
        "ended": latest.ended,
    }
    return json.dumps({**latest.verdict, "change": change}, ensure_ascii=False, allow_nan=False)


def _brief(finding: Finding) -> dict[str, object]:
    return {"id": finding["id"], "kind": finding["kind"], "ranks": finding["ranks"]}


def _print_round(latest: Round, with_sql: bool, detail: bool) -> None:
    from .verdict_text import kind

    at = datetime.fromtimestamp(latest.at_ns / 1e9, timezone.utc).strftime("%H:%M:%S UTC")
    click.echo(f"---- {at}")
    for finding in latest.gone:
        click.echo(f"over: {kind(finding)}  {ranks_text(finding['ranks'])}".rstrip())
    print_verdict({**latest.verdict, "findings": latest.new}, with_sql, detail, hints=False)


def print_verdict(verdict: Verdict, with_sql: bool, detail: bool, *, hints: bool = True) -> None:
    """Prints a verdict. ``hints``: and what to call next."""
    from rich.console import Console
    from rich.text import Text

    from .verdict_text import coverage_line, has_more, show, verdict_lines

    console = Console(file=styled(sys.stdout), highlight=False)
    detail = detail or with_sql
    # A terminal that cannot write blocks shows no bars.
    bars = console.is_terminal and console.encoding.lower().startswith("utf")
    show(console, verdict_lines(verdict, detail=detail, with_sql=with_sql, bars=bars))
    if verdict["findings"] and hints and not with_sql:
        show(console, [(Text(), 0)])
        if not detail and has_more(verdict):
            show(console, [(Text("argus diagnose -v has all of the evidence.", style="dim"), 0)])
        show(console, [(Text("argus diagnose --sql prints the queries that show this again.", style="dim"), 0)])
    if hints or not verdict["coverage"]["complete"]:
        show(console, [coverage_line(verdict["coverage"])])
    if hints and not with_sql:
        show(console, [(Text(f"{_report_command(verdict)} writes a page about it, with pictures.", style="dim"), 0)])


def _report_command(verdict: Verdict) -> str:
    """What makes the page of this run."""
    job = verdict["job"]
    return f"argus report --job {shlex.quote(job)}" if job.isprintable() and 0 < len(job) <= 60 else "argus report"
