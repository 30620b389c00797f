"""``argus baseline``: the healthy runs that later runs of a job class are compared with."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime, timezone

import click

from argus.compare.baseline import Entry, list_baselines, remove_baselines, set_baseline, stored_profile
from argus.compare.profile import stored_verdicts
from argus.diagnose.read.profile import class_name, to_text
from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.model.text import counted, named, printable
from argus.model.units import duration, size
from argus.store.open import open_store
from argus.store.reader import list_jobs, no_job

from .options import format_option, store_option
from .selection import is_one_of, parse_runs
from .suggest import SuggestingGroup


@click.group(cls=SuggestingGroup)
def command() -> None:
    """Healthy runs that later runs of the same job class are compared with.

    A class is a job's name without the ids at its end, its ranks, its mesh and the GPU model. A finished run that argus
    diagnose calls healthy becomes a baseline by itself; from three on, a run that is slow from its first step is a
    finding.

    \b
      argus baseline list
      argus baseline set llama@1790000000       also if it was not called healthy
      argus baseline show llama@1790000000
      argus baseline rm llama@1790000000        it does not come back by itself
    """


@command.command("list")
@click.argument("names", nargs=-1, metavar="[JOB]...")
@format_option()
@store_option
def list_command(names: tuple[str, ...], output_format: str, store_url: str | None) -> None:
    """List the baselines: all, or those of these jobs and their classes. JOB may hold * and ?, as for argus jobs."""
    of_class = [*names, *map(class_name, names)]
    with open_store(store_url, create=False) as store:
        entries = [
            one
            for one in list_baselines(store)
            if not names or is_one_of(one.name, of_class) or is_one_of(one.job, names)
        ]
        if names and not entries:
            jobs = list_jobs(store)
            if not any(is_one_of(job, names) or is_one_of(class_name(job), of_class) for job in jobs):
                raise no_job(names[0], jobs)
    if output_format == "json":
        rows = [asdict(one) for one in entries]
        click.echo(json.dumps({"schema": "argus.baselines/1", "baselines": rows}, indent=2, ensure_ascii=False))
        return
    if not entries:
        click.echo("no run is a baseline" + (" of these jobs" if names else ""))
    for one in entries:
        click.echo(_line(one))


def _line(one: Entry) -> str:
    added = datetime.fromtimestamp(one.added_ns // 10**9, timezone.utc).strftime("%Y-%m-%d %H:%M")
    mesh = f" ({printable(one.mesh)})" if one.mesh else ""
    gpu = f"  {printable(one.gpu)}" if one.gpu else ""
    return (
        f"{named(one.name)}  {counted(one.size, 'rank')}{mesh}{gpu}  {named(one.job)}@{one.run}  "
        f"{duration(one.step_ns)} a step, {counted(one.steps, 'step')}  {printable(one.source)} since {added}"
    )


@command.command("set")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@store_option
def set_command(runs: tuple[str, ...], store_url: str | None) -> None:
    """Make runs baselines, whatever their verdicts are."""
    with open_store(store_url, create=False) as store:
        for job, run in parse_runs(store, runs):
            profile = set_baseline(store, job, run)
            click.echo(f"{printable(job)}@{run} is a baseline: {duration(profile.step.value)} a step")
            verdict = stored_verdicts(store, [(job, run)]).get((job, run), "healthy")
            if not verdict.startswith("healthy"):
                click.echo(f"note: the verdict on it is {printable(verdict)}: runs like it will not be reported")


@command.command("rm")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@store_option
def remove_command(runs: tuple[str, ...], store_url: str | None) -> None:
    """Take runs out of the baseline. They do not become part of it again by themselves."""
    with open_store(store_url, create=False) as store:
        chosen = parse_runs(store, runs)
        remove_baselines(store, chosen)
    for job, run in chosen:
        click.echo(f"{printable(job)}@{run} is no longer a baseline")


@command.command("show")
@click.argument("run", metavar="RUN")
@format_option()
@store_option
def show_command(run: str, output_format: str, store_url: str | None) -> None:
    """Show what is kept of a baseline."""
    with open_store(store_url, create=False) as store:
        chosen = parse_runs(store, (run,))
        if len(chosen) != 1:
            raise ArgusError(f"'{named(run)}' names several runs", "Name one", EXIT_UNAVAILABLE)
        profile = stored_profile(store, *chosen[0])
    if output_format == "json":
        click.echo(to_text(profile))
        return
    ranks = counted(profile.ranks, "rank")
    click.echo(f"{printable(profile.job)}@{profile.run}: {ranks}, {counted(profile.steps, 'step')}")
    click.echo(f"  step  {duration(profile.step.value)}")
    for name, mean in sorted(profile.phases.items(), key=lambda one: -one[1].value):
        click.echo(f"  {printable(name)}  {duration(mean.value)}")
    for name, transfer in sorted(profile.transfers.items()):
        spent = duration(transfer.transfer_ns.value)
        click.echo(f"  {printable(name)}  {size(transfer.bytes)} in {spent}")
