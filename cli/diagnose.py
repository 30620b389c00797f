"""``argus diagnose``: name what slows a job down, with evidence."""

from __future__ import annotations

import re

import click

from argus.diagnose.hang import HANG_S
from argus.diagnose.run import THRESHOLD, diagnose_store, save
from argus.diagnose.verdict import Verdict, to_json
from argus.errors import EXIT_UNAVAILABLE, ArgusError
from argus.store.open import open_store
from argus.store.reader import latest_run, list_runs

from .options import format_option, store_option

EXIT_CODES = {"healthy": 0, "degraded": 10, "hung": 11, "inconclusive": 12}
"""Exit codes with --exit-code."""

_STYLES = {"healthy": "bold green", "degraded": "bold red", "hung": "bold red", "inconclusive": "bold yellow"}


def _steps(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int | None, int | None]:
    if value is None:
        return None, None
    match = re.fullmatch(r"(\d*):(\d*)", value)
    if match is None or match[0] == ":":
        raise click.BadParameter("write A:B, A: or :B, such as 100:500")
    first, last = (int(part) if part else None for part in match.groups())
    if first is not None and last is not None and first > last:
        raise click.BadParameter(f"step {first} lies after step {last}")
    return first, last


@click.command()
@click.option("--job", metavar="NAME", help="The job. Default: the one traced last.")
@click.option("--run", type=click.IntRange(min=0), metavar="N", help="Its tracing session. Default: the newest.")
@click.option("--steps", metavar="A:B", callback=_steps, help="Look only at steps A to B; either may be missing.")
@click.option(
    "--threshold",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=THRESHOLD,
    show_default=True,
    help="Lost share of the step time that counts as degraded.",
)
@click.option(
    "--hang-after",
    type=click.FloatRange(min=0, min_open=True),
    default=HANG_S,
    show_default=True,
    metavar="SECONDS",
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
    steps: tuple[int | None, int | None],
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
      argus diagnose --sql                    with the queries behind it
      argus diagnose --format json | jq '.findings[0]'
      argus diagnose --exit-code || alert     for scripts
    """
    with open_store(store_url, create=False) as store:
        if job is None or run is None:
            found = latest_run(store, job)
            job, run = found[0], found[1] if run is None else run
        if run not in [known.run for known in list_runs(store, job)]:
            stored = ", ".join(str(known.run) for known in list_runs(store, job)[:8])
            raise ArgusError(f"job '{job}' has no run {run}", f"Stored are: {stored or 'none'}", EXIT_UNAVAILABLE)
        verdict = diagnose_store(
            store, job, run, steps=steps, threshold=threshold, hang_after_s=hang_after, keep=not no_store
        )
        if output_format == "json":
            click.echo(to_json(verdict))
        else:
            _print(verdict, with_sql)
        if not no_store:
            save(store, verdict)
    return EXIT_CODES[verdict["status"]] if exit_code else 0


def _print(verdict: Verdict, with_sql: bool) -> None:
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
    if verdict["findings"]:
        line()
        if not with_sql:
            line("argus diagnose --sql prints the queries that show this again.", style="dim")
    coverage = verdict["coverage"]
    if coverage["complete"]:
        so_far = "" if coverage["ended"] else " so far (the trace goes on, or was cut off)"
        line(f"coverage: complete{so_far}", style="dim")
    else:
        lost = ", ".join(f"{name} {count:,}" for name, count in coverage["dropped"].items())
        line(f"coverage: incomplete ({lost})", style="yellow")


def _ranks(ranks: list[int]) -> str:
    if not ranks:
        return ""
    listed = ", ".join(str(rank) for rank in ranks[:8]) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
