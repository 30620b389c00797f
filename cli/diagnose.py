"""``argus diagnose``: name what slows a job down, with evidence."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timezone

import click

from argus.diagnose.breakdown import heading
from argus.diagnose.follow import INTERVAL_S, Follower, Round, follow
from argus.diagnose.hang import HANG_S
from argus.diagnose.run import THRESHOLD, diagnose_store, save
from argus.diagnose.verdict import Breakdown, Finding, Verdict, to_json
from argus.errors import EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError
from argus.store.open import open_store
from argus.store.reader import latest_run, list_runs

from . import interrupt
from .grammar import parse_open_steps, parse_ranks, parse_since
from .options import NumberRange, Span, format_option, store_option
from .selection import job_option, last_option, run_option, since_option

EXIT_CODES = {"healthy": 0, "degraded": 10, "hung": 11, "inconclusive": 12}
"""Exit codes with --exit-code."""

_STYLES = {"healthy": "bold green", "degraded": "bold red", "hung": "bold red", "inconclusive": "bold yellow"}


def _steps(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int | None, int | None]:
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
@click.option("--steps", "--step", "steps", metavar="A:B", callback=_steps, help="Only steps A to B; A:, :B, or one.")
@since_option
@last_option
@click.option("--follow", "following", is_flag=True, help="Judge it again and again, and print what changes.")
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
    help="Lost share of the step time that counts. What nobody waits for yet (a slow GPU in a pipeline, a slow link "
    "behind other work) is told from less on.",
)
@click.option(
    "--hang-after",
    type=Span(),
    default=HANG_S,
    show_default=True,
    metavar="SPAN",
    help="Silence after the last step that counts as a hang.",
)
@format_option(("text", "json"))
@store_option
@click.option("--no-store", is_flag=True, help="Store neither the verdict nor how hosts go together.")
@click.option(
    "--sql", "with_sql", is_flag=True, help="Print every query behind the findings, to paste into `argus sql`."
)
@click.option(
    "--exit-code",
    is_flag=True,
    help="Tell the verdict by the exit code: 0 healthy, 10 degraded, 11 hung, 12 inconclusive. Without it: 0.",
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
    exit_code: bool,
) -> int:
    """Name what slows a job down, with evidence.

    The newest steps decide: a job that became slow 20 steps ago is degraded, one that recovered is healthy.

    \b
      argus diagnose                          the job traced last
      argus diagnose --job llama --steps 500:
      argus diagnose --last 10m               its last ten minutes
      argus diagnose --rank 3,8-15            what is found about these ranks
      argus diagnose --follow                 while it runs: what changes, until the trace ends
      argus diagnose --sql                    with the queries behind it
      argus diagnose --format json | jq '.findings[0]'
      argus diagnose --exit-code || alert     for scripts
    """
    if following and steps != (None, None):
        raise ArgusError("--follow goes not with --steps", "Use --since, or leave out --follow", EXIT_USAGE)
    if since is not None and last is not None:
        raise ArgusError("--last is --since with a span", "Give one of them", EXIT_USAGE)
    since = last if since is None else since
    shown = parse_ranks(ranks)
    with open_store(store_url, create=False) as store:
        given, ended_ns = run, 0
        if job is None or run is None:
            found = latest_run(store, job)
            job, run = found[0], found[1] if run is None else run
        # All runs are looked through only if that is needed: of a large job it takes seconds.
        if given is not None or since is not None:
            runs = list_runs(store, job)
            chosen = next((known for known in runs if known.run == run), None)
            if chosen is None:
                stored = ", ".join(str(known.run) for known in runs[:8])
                raise ArgusError(f"job '{job}' has no run {run}", f"Stored are: {stored or 'none'}", EXIT_UNAVAILABLE)
            ended_ns = chosen.ended_ns
        since_ns = _since(since, ended_ns)
        if following:
            follower = Follower(store, job, run, threshold, hang_after, since_ns, keep=not no_store)
            codes = EXIT_CODES if exit_code else {}
            status = _follow(follower, interval_s, output_format, with_sql, codes, keep=not no_store, ranks=shown)
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
        if output_format == "json":
            click.echo(to_json(part))
        else:
            _print(part, with_sql)
            if (others := len(verdict["findings"]) - len(part["findings"])) > 0:
                click.echo(f"{others} finding{'s' * (others > 1)} about other ranks: leave out --rank")
        if not no_store:
            save(store, verdict)
    return EXIT_CODES[verdict["status"]] if exit_code else 0


def _since(word: str | None, ended_ns: int) -> int:
    """Wall time; 0: no limit."""
    if word is None:
        return 0
    span_ns, at_ns = parse_since(word)
    return at_ns if at_ns is not None else max(ended_ns - (span_ns or 0), 0)


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
    codes: dict[str, int],
    *,
    keep: bool,
    ranks: tuple[int, ...],
) -> str:
    """Prints what changes until the trace ends or somebody stops it; returns the last status. ``codes``: exit codes by
    status."""
    status, told = "inconclusive", ""

    def trouble(failure: ArgusError) -> None:
        nonlocal told
        if failure.message != told:
            told = failure.message
            click.echo(f"argus: {failure.message}; trying again", err=True)

    with _until_stopped(lambda: codes.get(status, 0)) as stop:
        for found in follow(follower, stop.wait, trouble, interval_s):
            status, told, whole = found.verdict["status"], "", found.verdict
            if ranks:
                found = replace(
                    found,
                    verdict=_about(whole, ranks),
                    new=_those_about(found.new, ranks),
                    gone=_those_about(found.gone, ranks),
                )
            if output_format == "json" and (found.changed or found.ended):
                click.echo(_json_line(found))
            elif output_format == "text" and found.changed:
                _print_round(found, with_sql)
            if keep and found.changed:
                save(follower.store, whole)
            if stop.is_set():
                break
        else:
            if output_format == "text" and not stop.is_set():
                click.echo("the trace has ended")
    return status


def _json_line(found: Round) -> str:
    change = {
        "at_ns": found.at_ns,
        "took_ms": round(found.took_s * 1e3),
        "new": [{"kind": finding["kind"], "ranks": finding["ranks"]} for finding in found.new],
        "gone": [{"kind": finding["kind"], "ranks": finding["ranks"]} for finding in found.gone],
        "ended": found.ended,
    }
    return json.dumps({**found.verdict, "change": change}, ensure_ascii=False, allow_nan=False)


def _print_round(found: Round, with_sql: bool) -> None:
    at = datetime.fromtimestamp(found.at_ns / 1e9, timezone.utc).strftime("%H:%M:%S UTC")
    click.echo(f"---- {at}")
    for finding in found.gone:
        click.echo(f"over: {finding['kind'].replace('_', ' ')}  {_ranks(finding['ranks'])}".rstrip())
    _print({**found.verdict, "findings": found.new}, with_sql, hints=False)


def _print(verdict: Verdict, with_sql: bool, *, hints: bool = True) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console(highlight=False)

    def line(text: Text | str = "", indent: int = 0, style: str = "") -> None:
        styled = Text(text, style=style) if isinstance(text, str) else text
        if console.is_terminal:
            console.print(Padding(styled, (0, 0, 0, indent), expand=False))
        else:
            # Not folded when piped: grep wants whole lines, and a query must survive copying.
            for part in styled.plain.splitlines() or [""]:
                click.echo(" " * indent + part if part else "")

    status = verdict["status"]
    head = Text(status.upper(), style=_STYLES[status])
    head.append(f"  {verdict['job']}", style="bold not dim")
    steps = verdict["steps"]
    ranks = "1 rank" if verdict["ranks"] == 1 else f"{verdict['ranks']} ranks"
    head.append(f"  {ranks}" + (f", steps {steps[0]} to {steps[1]}" if steps else ""), style="dim")
    if status == "hung":
        head.append(f", no step since step {steps[1]}", style="bold")
    elif status == "degraded":
        guessed = any(e["text"].startswith("estimated") for f in verdict["findings"] for e in f["evidence"])
        about = "about " if guessed else ""
        head.append(f", {about}{verdict['slowdown']:.2f}x slower than it could be", style="bold")
    line(head)
    if verdict["reason"]:
        line(verdict["reason"], 2)
    for number, finding in enumerate(verdict["findings"], 1):
        line()
        who = _ranks(finding["ranks"]) + (f" on {', '.join(finding['hosts'][:4])}" if finding["hosts"] else "")
        title = Text(f"{number}. {finding['kind'].replace('_', ' ')}", style="bold")
        title.append(f"  {who}" if who else "", style="bold red")
        line(title)
        first = finding["steps"][0]
        since = f"since step {first}" if first > steps[0] else "in all steps seen"
        cost = f" · {finding['slowdown']:.2f}x · {finding['share']:.0%} of the lost time" if status != "hung" else ""
        line(f"{since}{cost} · confidence {finding['confidence']:.0%}", 3)
        for evidence in finding["evidence"]:
            line(f"· {evidence['text']}", 3)
        line(Text.assemble(("→ ", "bold"), finding["action"]), 3)
        if with_sql:
            for evidence in finding["evidence"]:
                line()
                line(evidence["sql"], 5, "dim")
    if "breakdown" in verdict:
        _print_breakdown(verdict["breakdown"], line, with_sql)
    if verdict["findings"] and hints:
        line()
        if not with_sql:
            line("argus diagnose --sql prints the queries that show this again.", style="dim")
    coverage = verdict["coverage"]
    if coverage["complete"] and not hints:
        return
    if coverage["complete"]:
        so_far = "" if coverage["ended"] else " so far (the trace goes on, or was cut off)"
        line(f"coverage: complete{so_far}", style="dim")
    else:
        lost = ", ".join(f"{name} {count:,}" for name, count in coverage["dropped"].items())
        line(f"coverage: incomplete ({lost})", style="yellow")


_PARTS = {
    "phases": "phases of a step",
    "gpu": "GPU",
    "gpu_phases": "GPU, by phase",
    "ranks": "ranks",
    "kernels": "kernels",
    "main_thread": "main thread",
    "lines_on_cpu": "on the CPU",
    "lines_off_cpu": "off the CPU",
    "garbage": "garbage collection",
}
"""What each part of a breakdown is called."""


def _print_breakdown(found: Breakdown, line: Callable[..., None], with_sql: bool) -> None:
    line()
    line(f"where the time goes ({heading(found)})", style="bold")
    width = max(len(_PARTS[part["part"]]) for part in found["parts"])
    for part in found["parts"]:
        line(f"{_PARTS[part['part']]:{width}}  {part['text']}", 3)
        if with_sql:
            line()
            line(part["sql"], 5, "dim")
            line()
    for number, text in enumerate(found["advice"], 1):
        if number == 1:
            line("worth trying first", style="bold")
        line(f"{number}. {text}", 3)


def _ranks(ranks: list[int]) -> str:
    if not ranks:
        return ""
    listed = ", ".join(str(rank) for rank in ranks[:8]) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
