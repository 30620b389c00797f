"""``argus store``: create the tables, load what was spooled, show what is stored."""

from __future__ import annotations

import dataclasses
import json
import sys
from datetime import datetime, timezone
from pathlib import Path

import click

from argus.model.errors import EXIT_FAILURE, EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError
from argus.model.text import counted, printable
from argus.model.units import binary_size
from argus.store import spill
from argus.store.load import load_spilled, load_spool
from argus.store.open import open_store
from argus.store.read.jobs import count_job, list_job_runs, remove_job
from argus.store.read.status import StoreStatus, store_status
from argus.store.schema import DEFAULT_RAW_TTL, DEFAULT_TTL, init_schema
from argus.system.limits import frugal

from .options import CountRange, format_option, job_name, store_option
from .output import redraw
from .suggest import SuggestingGroup


@click.group(cls=SuggestingGroup)
def command() -> None:
    """Create the tables, load what was spooled, show what is stored, remove jobs.

    \b
      argus store status
      argus store rm llama --run 1790000000
      argus store load /var/spool/llama
      argus store init --store clickhouse://argus@db:8443/argus --ttl 90d
    """


@command.command()
@store_option
@click.option("--ttl", metavar="SPAN", help=f"How long rows are kept: 30d, 12h, 6months. Default: {DEFAULT_TTL[9:]}.")
@click.option("--raw-ttl", metavar="SPAN", help=f"The same for single CUDA calls. Default: {DEFAULT_RAW_TTL[9:]}.")
@click.option("--cluster", metavar="NAME", default="", help="Make them on every node of this cluster, sharded by rank.")
@click.option(
    "--no-replicas", is_flag=True, help="With --cluster, without Keeper: make this shard's only. Run it on each."
)
def init(store_url: str | None, ttl: str | None, raw_ttl: str | None, cluster: str, no_replicas: bool) -> None:
    """Create the tables, or upgrade those of an older Argus.

    A server needs this once; an embedded store does it by itself. Safe to run again: what is stored stays, and --ttl
    and --raw-ttl change how long it is kept.

    With --cluster, tables are replicated within each shard, and rows are spread over the shards.

    \b
      argus store init --store clickhouse://argus@db:8443/argus
      argus store init --store clickhouse://argus@db:8443/argus --cluster main
      argus store init --ttl 90d --raw-ttl 12h
    """
    with open_store(store_url) as store:
        if no_replicas and not cluster:
            raise ArgusError("--no-replicas needs --cluster", "Add --cluster NAME", EXIT_USAGE)
        state = init_schema(store, ttl=ttl, raw_ttl=raw_ttl, cluster=cluster, replicas=not no_replicas)
        click.echo(f"{store.url}: schema {state.version} is in place")
        for name in state.changed:
            click.echo(f"warning: {name} has changed since it was applied here", err=True)


@command.command()
@click.argument("folder", metavar="[DIR]", type=click.Path(path_type=Path), required=False)
@store_option
@click.option("--remove", is_flag=True, help="Delete each file once it is stored.")
@click.option("--trusted", is_flag=True, help="Store all that DIR holds, of whatever job and node.")
def load(folder: Path | None, store_url: str | None, remove: bool, trusted: bool) -> int:
    """Load a spool: the files that a trace with --store spool:///DIR wrote.

    Without DIR: load the rows that traces wrote to disk because the store was away, and that are not stored yet. Rows
    that are loaded twice are stored once, so a load that was cut short can be run again.

    A spool brings rows of hosts of which the store has nothing of that run from elsewhere, and no runs to come,
    verdicts, baselines, health of nodes or users. If you trust whoever wrote it, --trusted loads all of it.

    \b
      argus trace --pid 4821 --store spool:///var/spool/llama   where there is no store
      argus store load /var/spool/llama && argus diagnose        at home
      argus store load --store clickhouse://argus@db/argus  what waits for that store
    """
    with frugal(), open_store(store_url) as store:
        terminal = sys.stderr.isatty()

        def progress(done: int, files: int) -> None:
            if terminal:
                redraw(f"{done} of {counted(files, 'file')}")
                if done == files:
                    click.echo(err=True)
            elif done % 500 == 0 and 0 < done < files:
                click.echo(f"{done} of {counted(files, 'file')}", err=True)

        place = spill.place(store.target) if folder is None else None
        if folder is None and place is None:
            raise ArgusError("nothing is kept on disk for this store", "Name the folder of a spool", EXIT_USAGE)
        left = place.folder if place is not None else folder
        assert left is not None
        if place is not None or spill.is_root(left):
            own = spill.place(store.target)
            here = own is not None and left.resolve().parent == own.folder.parent.resolve()
            if not (trusted or here):
                raise ArgusError(
                    f"{left} is not loaded: it is what traces left elsewhere, and may hold rows of any run",
                    "If you trust whoever wrote it, add --trusted",
                    EXIT_UNAVAILABLE,
                )
            loaded = load_spilled(store, left, progress=progress)
        else:
            loaded = load_spool(left, store, remove=remove, trusted=trusted, progress=progress)
    for table, rows in sorted(loaded.rows.items()):
        click.echo(f"{table:<24}{rows:>14,}")
    known = f", {loaded.known:,} were there already" if loaded.known else ""
    click.echo(f"{loaded.files:,} files loaded into {store.url}{known}")
    if loaded.unfinished:
        click.echo(f"{loaded.unfinished} unfinished: a trace still writes them, or was killed", err=True)
    if folder is None and (writers := spill.waiting(left).writers):
        click.echo(f"{writers} traces still run, and store what is theirs themselves", err=True)
    for line in loaded.trouble:
        click.echo(f"not loaded: {printable(line)}", err=True)
    return EXIT_FAILURE if loaded.trouble else 0


@command.command()
@click.argument("job", type=job_name)
@click.option("--run", type=CountRange(min=0), help="Only this run of it.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@store_option
def rm(job: str, run: int | None, yes: bool, store_url: str | None) -> None:
    """Remove a job: all its rows in all tables, verdicts included. Other jobs are not touched.

    Rows of the job that still wait on disk for the store (argus store status shows them) are stored later even so.

    \b
      argus store rm llama
      argus store rm llama --run 1790000000 --yes
    """
    with open_store(store_url, create=False) as store:
        rows = count_job(store, job, run)
        what = f"job {job}, " + (f"run {run}" if run is not None else "all runs")
        total = sum(rows.values())
        going = [one.run for one in list_job_runs(store) if one.job == job and one.open and run in (None, one.run)]
        if going:
            several = ", ".join(map(str, going[:4]))
            click.echo(f"run {several} has no end: a trace that goes on will write more", err=True)
        if not yes:
            if not sys.stdin.isatty():
                raise ArgusError(f"{what} has {total:,} rows; nothing was removed", "Confirm with --yes", EXIT_USAGE)
            click.confirm(f"Remove {total:,} rows of {what} from {store.url}?", abort=True)
        removed = remove_job(store, job, run)
        for table, count in removed.items():
            click.echo(f"{table:<24}{count:>14,}")
        click.echo(f"removed {what}: {sum(removed.values()):,} rows of {_count(len(removed), 'table')} in {store.url}")


@command.command()
@store_option
@format_option()
def status(store_url: str | None, output_format: str) -> None:
    """Show the engine, the tables with rows and bytes, and how many jobs there are.

    \b
      argus store status
      argus store status --format json | jq '.tables[] | {name, rows}'
    """
    with open_store(store_url, create=False) as store:
        state = store_status(store)
    if output_format == "json":
        click.echo(json.dumps(dataclasses.asdict(state), indent=2))
    else:
        _print(state)


def _print(state: StoreStatus) -> None:
    click.echo(f"store   {state.url}")
    if state.schema is None:
        click.echo("engine  none: nothing is stored here yet; run `argus trace --pid PID`")
        _print_spill(state)
        return
    click.echo(f"engine  {state.engine}")
    notes = [f"{name} has changed since it was applied" for name in state.schema.changed]
    if state.schema.missing:
        notes.append(f"this Argus knows {state.schema.known}: run `argus store init`")
    click.echo(f"schema  {state.schema.version}" + "".join(f"; {note}" for note in notes))
    _print_spill(state)
    click.echo()
    click.echo(f"{'table':<24}{'rows':>14}{'on disk':>11}  {'kept':<9}  {'oldest (UTC)':<19}  newest (UTC)")
    for table in state.tables:
        if table.rows is None:
            click.echo(f"{table.name:<24}{'view':>14}")
        else:
            kept = table.kept or "for ever"
            click.echo(
                f"{table.name:<24}{table.rows:>14,}{binary_size(table.bytes or 0):>11}  "
                f"{kept:<9}  {_time(table.oldest_ns):<19}  {_time(table.newest_ns)}".rstrip()
            )
    click.echo()
    jobs = list(dict.fromkeys(run.job for run in state.runs))
    if not jobs:
        click.echo("jobs    none yet")
        return
    few = ", ".join(map(printable, jobs[:5])) + (", …" if len(jobs) > 5 else "")
    click.echo(f"jobs    {_count(len(jobs), 'job')}, {_count(len(state.runs), 'run')}: {few}; `argus jobs` lists them")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _print_spill(state: StoreStatus) -> None:
    waiting = state.spill
    if waiting is None:
        return
    if waiting.files:
        whose = f"; {waiting.writers} traces still run" if waiting.writers else "; `argus store load` stores them"
        click.echo(f"waiting {waiting.files:,} files, {binary_size(waiting.bytes)} in {waiting.folder}{whose}")
    if waiting.aside:
        click.echo(f"aside   {waiting.aside:,} files that could not be stored, in {waiting.folder}/aside")


def _time(ns: int | None) -> str:
    if ns is None:
        return "-"
    return datetime.fromtimestamp(ns // 10**9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
