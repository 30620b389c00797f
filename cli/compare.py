"""``argus compare``: what changed between runs, and how sure that is."""

from __future__ import annotations

from collections.abc import Iterator

import click

from argus.compare.profile import baseline_side, read_side, stored_verdicts
from argus.compare.verdict import EXIT_CODES, CauseFacts, Comparison, RunFacts, compare, to_json
from argus.model.errors import EXIT_USAGE, ArgusError
from argus.model.text import counted, named, printable
from argus.model.units import duration
from argus.store.open import open_store

from .options import format_option, store_option
from .selection import RUNS_HINT, parse_runs

BASELINE = "baseline"
ENVIRONMENT = 12
"""Changes of the environment that are printed."""


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option(
    "--against",
    multiple=True,
    metavar="RUN|baseline",
    help="The runs before; repeat it for several. Default: baseline, the healthy runs of the same job class.",
)
@click.option(
    "--exit-code",
    is_flag=True,
    help="Report the result by the exit code: 0 same, 10 changed, 12 inconclusive. Without it: 0.",
)
@format_option()
@store_option
def command(
    runs: tuple[str, ...], against: tuple[str, ...], exit_code: bool, output_format: str, store_url: str | None
) -> int:
    """Compare runs: is it the same workload, what changed by what it costs, and how sure that is.

    RUN is JOB (its newest run), JOB@RUN, JOB@RUN,RUN or JOB@last:3 (its three newest). Give several runs a side: one
    does not show how much runs differ.

    \b
      argus compare llama@last:3 --against baseline
      argus compare llama@1790000300,1790000400 --against llama@1790000000,1790000100
      argus compare new-image@last:3 --against old-image@last:3 --exit-code
      argus compare llama --format json | jq '.causes[0]'
    """
    with open_store(store_url, create=False) as store:
        chosen = parse_runs(store, runs)
        words = against or (BASELINE,)
        if BASELINE in words and len(words) > 1:
            raise ArgusError("--against baseline cannot be combined with other runs", RUNS_HINT, EXIT_USAGE)
        others = [] if words == (BASELINE,) else parse_runs(store, words)
        if both := sorted(set(chosen) & set(others)):
            raise ArgusError(f"run {both[0][1]} of job '{named(both[0][0])}' is on both sides", RUNS_HINT, EXIT_USAGE)
        after = read_side(store, chosen)
        before = read_side(store, others) if others else baseline_side(store, after)
        verdicts = stored_verdicts(store, [(one.job, one.run) for one in (*before, *after)])
    result = compare(before, after, verdicts)
    if output_format == "json":
        click.echo(to_json(result))
    else:
        for line in lines_of(result):
            click.echo(line)
    return EXIT_CODES[result["status"]] if exit_code else 0


def lines_of(result: Comparison) -> Iterator[str]:
    """The comparison as text."""
    status = result["status"].upper() + (f", {result['direction']}" if result["direction"] else "")
    sure = f" (confidence {result['confidence']:.0%})" if result["status"] != "inconclusive" else ""
    yield f"{status}{sure}: {result['reason']}"
    low, high = (value / max(result["step_ns"]["before"], 1.0) for value in result["interval_ns"])
    yield f"  step  {low:+.1%} to {high:+.1%} (95 % interval)"
    for name, side in (("before", result["before"]), ("after", result["after"])):
        yield f"  {name:<6}  {_runs_line(side)}"
    workload = result["workload"]
    known = "the same" if workload["same"] else "not known: only the number of ranks was observed on both sides"
    yield "  workload  " + (printable("; ".join(workload["differences"])) or known)
    if scaling := workload["scaling"]:
        other = f"a rank does {scaling['work']:.2f} times the work"
        kind = "weak" if scaling["weak"] else "strong" if scaling["strong"] else other
        parts = ", ".join(f"{one['part']} {duration(one['cost_ns'])}" for one in scaling["eaten"]) or "nothing"
        yield f"  scaling   {kind}, {scaling['efficiency']:.0%} efficient; a step spends more on: {parts}"
    costly = [cause for cause in result["causes"] if cause["cost_ns"]]
    if costly:
        yield "what changed, by what it costs a step:"
        for number, cause in enumerate(costly, 1):
            yield from _cause_lines(number, cause)
    free = [cause for cause in result["causes"] if not cause["cost_ns"]]
    for cause in free:
        yield f"  also: {_values(cause)}"
    if changes := result["environment"]:
        yield "what changed in the environment:"
        for change in changes[:ENVIRONMENT]:
            values = (
                f"{printable(change['before']) or 'not set'} before, {printable(change['after']) or 'not set'} after"
            )
            yield f"  {printable(change['name'])}: {values}"
        if len(changes) > ENVIRONMENT:
            yield f"  and {len(changes) - ENVIRONMENT} more: --format json"
    elif changes is not None:
        yield "environment: no recorded difference"
    for note in result["notes"]:
        yield f"note: {printable(note)}"


def _runs_line(side: list[RunFacts]) -> str:
    jobs = list(dict.fromkeys(one["job"] for one in side))
    names = ", ".join(
        f"{printable(job)}@{','.join(str(one['run']) for one in side if one['job'] == job)}" for job in jobs[:4]
    )
    more = f" and {counted(len(jobs) - 4, 'more job')}" if len(jobs) > 4 else ""
    steps = " ".join(duration(one["step_ns"]) for one in side[:8])
    return f"{names}{more}  a step: {steps}"


def _cause_lines(number: int, cause: CauseFacts) -> Iterator[str]:
    low, high = (duration(value, signed=True) for value in cause["interval_ns"])
    cost = duration(cause["cost_ns"], signed=True)
    share = f", {cause['share']:.0%} of the change" if cause["share"] else ""
    name = f"{cause['kind'].replace('_', ' ')} {cause['subject']}".rstrip()
    yield f"  {number}. {printable(name)}: {cost} ({low} to {high}){share}"
    yield f"     {_values(cause)}"


def _values(cause: CauseFacts) -> str:
    values = f"{duration(cause['before'])} before, {duration(cause['after'])} after"
    text, _, note = cause["text"].partition("; ")
    return f"{printable(text)}: {values}" + (f"; {printable(note)}" if note else "")
