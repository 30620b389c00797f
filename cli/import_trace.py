"""``argus import``: take in what other profilers recorded."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click

from argus.diagnose.read.query import quoted
from argus.importers import iterations_csv, kineto, nsys, whatif_parquet
from argus.importers.recordings import convert
from argus.importers.recordings.clocks import compare_clocks, find_hosts, hosts_given
from argus.importers.recordings.groups import find_communicators
from argus.importers.recordings.recording import Progress, Recording, find_files
from argus.importers.recordings.steps import find_all_steps
from argus.importers.rows import ImportReport
from argus.model.errors import EXIT_USAGE, ArgusError
from argus.model.text import counted, named, printable
from argus.model.units import duration
from argus.semantics.gpu.flops import utilization as flops_utilization
from argus.store.failures import load_command
from argus.store.open import open_store
from argus.store.url import parse_url
from argus.system import privileges

from .options import flops, format_option, new_job_name, peak_tflops_option, step_flops_option, store_option
from .output import styled
from .suggest import SuggestingGroup

Command = TypeVar("Command", bound=Callable[..., Any])

_PATHS = click.Path(path_type=Path)
_job = click.option(
    "--job",
    type=new_job_name,
    metavar="NAME",
    help="The job's name. Default: that of the folder or the first file.",
)
_host_of = click.option(
    "--host-of",
    "host_of",
    multiple=True,
    metavar="RANKS=HOST|PATTERN",
    help="The host of ranks (0-7=node1), or a pattern whose first group in a file's path is its host. Repeatable.",
)
_ignore = click.option(
    "--ignore-annotations", is_flag=True, help="Find steps by the calls alone, without the trace's annotations."
)


@click.group(cls=SuggestingGroup)
def command() -> None:
    """Take in what other profilers recorded, and diagnose it as a traced job.

    \b
      argus import kineto traces/ --job llama      PyTorch profiler traces, one file a rank
      argus import nsys report.sqlite              Nsight Systems, exported to SQLite
      argus import whatif trace.parquet            operations of pipeline stages, as StragglerAnalysis has them
      argus import iterations times.csv --rank-column worker --step-column step --duration-column ms
      argus import flight-recorder dumps/          a job that hung: what PyTorch dumped of each rank
      argus import ras first.json second.json      a job that hung, by NCCL's RAS
      argus import inspector logs/                 how long collectives took, by NCCL's Inspector
      argus import iterations rank*.jsonl --step-column step --phase data_loading=data_s --phase compute=gpu_s
      argus diagnose --job llama
    """
    privileges.keep_for_files()


@command.command("kineto")
@click.argument("paths", metavar="PATH...", type=_PATHS, nargs=-1, required=True)
@_job
@_ignore
@_host_of
@step_flops_option
@peak_tflops_option
@format_option()
@store_option
def import_kineto(
    paths: tuple[Path, ...],
    job: str | None,
    ignore_annotations: bool,
    host_of: tuple[str, ...],
    step_flops: float,
    peak_tflops: float,
    output_format: str,
    store_url: str | None,
) -> None:
    """Import traces of the PyTorch profiler (Kineto): .json or .json.gz files, one a rank, or folders of them.

    \b
      argus import kineto rank0.json.gz rank1.json.gz --job llama
      argus import kineto ./log/profile --job llama
      argus import kineto rank0.json --ignore-annotations    steps by the calls alone
      argus import kineto traces/ --host-of 0-7=node0 --host-of 8-15=node1
    """
    utilization = flops(step_flops, peak_tflops)
    recordings: list[Recording] = []
    with _progress() as progress:
        for place, file in enumerate(find_files(paths, kineto.SUFFIXES, kineto.EXPORT_HINT)):
            recordings.append(kineto.read(file, place, progress))
        convert.check_ranks(recordings)
        hosts = hosts_given(host_of, recordings)
        stored = _store(recordings, job or _name(paths), ignore_annotations, hosts, utilization, store_url, progress)
    _show(stored, recordings, utilization, output_format)


@command.command("nsys")
@click.argument("paths", metavar="PATH...", type=_PATHS, nargs=-1, required=True)
@_job
@_ignore
@_host_of
@step_flops_option
@peak_tflops_option
@format_option()
@store_option
def import_nsys(
    paths: tuple[Path, ...],
    job: str | None,
    ignore_annotations: bool,
    host_of: tuple[str, ...],
    step_flops: float,
    peak_tflops: float,
    output_format: str,
    store_url: str | None,
) -> None:
    """Import recordings of Nsight Systems, exported to SQLite: files, or folders of them. Each process that used a GPU
    is a rank.

    \b
      nsys export --type sqlite report.nsys-rep
      argus import nsys report.sqlite --job llama
    """
    utilization = flops(step_flops, peak_tflops)
    recordings: list[Recording] = []
    with _progress() as progress:
        for file in find_files(paths, nsys.SUFFIXES, nsys.EXPORT_HINT):
            recordings += nsys.read(file, len(recordings), progress)
        convert.check_ranks(recordings)
        hosts = hosts_given(host_of, recordings)
        stored = _store(recordings, job or _name(paths), ignore_annotations, hosts, utilization, store_url, progress)
    _show(stored, recordings, utilization, output_format)


@command.command("whatif")
@click.argument("path", metavar="FILE", type=_PATHS)
@click.option(
    "--meta", type=_PATHS, metavar="FILE", help="YAML file with dp_size, pp_size, tp_size, dsp_size, world_size."
)
@_job
@format_option()
@store_option
def import_whatif(path: Path, meta: Path | None, job: str | None, output_format: str, store_url: str | None) -> None:
    """Import a trace in the format of StragglerAnalysis: a Parquet file with one row an operation of a step.

    \b
      argus import whatif trace-AR.parquet --meta meta-AR.yaml --job ar
      argus diagnose --job ar --format json | jq .whatif
    """
    trace = whatif_parquet.read(path, meta)
    job = job or trace.name or _name((path,))
    with open_store(store_url) as store:
        run = whatif_parquet.write(store, job, trace)
        url = store.url
    summary = {
        "job": job, "run": run, "store": url, "file": str(path), "operations": len(trace.operations),
        "ranks": len(trace.report.ranks), "steps": len(set(trace.operations.step.tolist())),
        "step_ns": whatif_parquet.median_step_ns(trace), "counters": dict(trace.report.counters), "notes": trace.notes,
    }  # fmt: skip
    if output_format == "json":
        click.echo(json.dumps(summary, indent=2))
        return
    click.echo(
        f"{printable(path.name)}: {summary['operations']:,} operations of {summary['ranks']} ranks in "
        f"{summary['steps']} steps of {duration(whatif_parquet.median_step_ns(trace))}"
    )
    _print_stored(job, run, url, trace.report, trace.notes)


@command.command("iterations")
@click.argument("paths", metavar="PATH...", type=_PATHS, nargs=-1, required=True)
@click.option(
    "--rank-column",
    metavar="NAME",
    help="Column with the rank, a number or a name. Default: the number in each file's name.",
)
@click.option("--step-column", required=True, metavar="NAME", help="Column with the number of the step.")
@click.option(
    "--epoch-column", metavar="NAME", help="Column with the number of the epoch, if step numbers begin again in each."
)
@click.option(
    "--duration-column",
    metavar="NAME",
    help="Column with how long the step took. Default: the time since the step before (--time-column), or the phases' "
    "sum.",
)
@click.option(
    "--phase",
    "phases",
    multiple=True,
    metavar="NAME=COLUMN",
    help="A timer of the training loop, and its column; repeatable. Names as data_loading, forward, backward, compute, "
    "optimizer, communication, waiting.",
)
@click.option("--host-column", metavar="NAME", help="Column with the rank's host.")
@click.option(
    "--time-column",
    metavar="NAME",
    help="Column with the time at which the step was logged, when it ended: since 1970 (s, ms, us or ns), or ISO 8601.",
)
@click.option(
    "--unit",
    type=click.Choice(list(iterations_csv.UNITS)),
    help="Unit of durations and phases. Default: ms; what is compared are ratios, so normalised times need none.",
)
@_job
@format_option()
@store_option
def import_iterations(
    paths: tuple[Path, ...],
    rank_column: str | None,
    step_column: str,
    epoch_column: str | None,
    duration_column: str | None,
    phases: tuple[str, ...],
    host_column: str | None,
    time_column: str | None,
    unit: str | None,
    job: str | None,
    output_format: str,
    store_url: str | None,
) -> None:
    """Import step times, and timers of the training loop: CSV, JSON lines or Parquet files, one row a rank and step; of
    all ranks, or one file a rank. They may be larger than the memory.

    \b
      argus import iterations times.csv --rank-column worker --step-column iteration \\
        --duration-column seconds --unit s --job resnet
      argus import iterations logs/rank*.jsonl --step-column step --duration-column step_ms \\
        --phase data_loading=data_ms --phase compute=compute_ms \\
        --phase communication=comm_ms --phase waiting=wait_ms --time-column ts
    """
    columns = iterations_csv.Columns(
        rank_column, step_column, duration_column, unit or "ms", _phases(phases), host_column, time_column, epoch_column
    )
    job = job or _name(paths)
    with open_store(store_url) as store:
        stored = iterations_csv.write(store, job, paths, columns)
        url = store.url
    notes = [] if unit else ["durations are taken as ms (--unit)"]
    notes += stored.notes
    if stored.names is not None:
        listed = ", ".join(f"{rank} is {name}" for rank, name in enumerate(stored.names[:8]))
        notes.append(f"ranks are numbered in order of appearance: {listed}" + ", …" * (len(stored.names) > 8))
    shown = paths[0].name if len(paths) == 1 else f"{stored.files} files"
    if output_format == "json":
        summary = {
            "job": job, "run": stored.run, "store": url, "file": str(paths[0]), "files": stored.files,
            "rows": stored.rows, "ranks": len(stored.report.ranks), "steps": list(stored.steps), "names": stored.names,
            "phases": list(columns.phases), "counters": {**stored.report.losses, **stored.report.counters},
            "notes": notes,
        }  # fmt: skip
        click.echo(json.dumps(summary, indent=2))
        return
    timers = f", phases {printable(', '.join(columns.phases))}" if columns.phases else ""
    click.echo(f"{printable(shown)}: {stored.rows:,} rows, steps {stored.steps[0]} to {stored.steps[1]}{timers}")
    _print_stored(job, stored.run, url, stored.report, notes)


def _phases(given: tuple[str, ...]) -> dict[str, str]:
    """``NAME=COLUMN`` as names and columns.

    Raises:
        ArgusError: One is of another form, or a name is there twice.
    """
    columns: dict[str, str] = {}
    for text in given:
        name, equals, column = text.partition("=")
        if not (name and equals and column):
            raise ArgusError(f"--phase {text[:60]!r} is not NAME=COLUMN", "--phase data_loading=data_ms", EXIT_USAGE)
        if name in columns:
            raise ArgusError(f"the phase {name!r} is named twice", "Each timer is a phase of its own", EXIT_USAGE)
        columns[name] = column
    return columns


def _print_stored(job: str, run: int, url: str, report: ImportReport, notes: list[str]) -> None:
    for note in notes:
        click.echo(f"  {printable(note)}")
    counts = {**report.losses, **report.counters}
    if counts:
        click.echo("  counted: " + ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in counts.items()))
    click.echo(f"{printable(job)}: {counted(len(report.ranks), 'rank')} stored as run {run} in {url}")
    _print_next(job, url)


def _print_next(job: str, url: str) -> None:
    target = parse_url(url)
    if target.spool is not None:
        click.echo(f"  {load_command(target)}")
    click.echo("  argus diagnose" + (f" --job {shlex.quote(job)}" if job.isprintable() else ""))


def _name(paths: tuple[Path, ...]) -> str:
    first = paths[0].absolute()
    return (
        re.sub(r"(\.pt)?(\.trace)?\.(json|jsonl|ndjson|sqlite|db|parquet|csv|tsv)(\.gz)?$", "", first.name)
        or "imported"
    )


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on a terminal, nothing else where."""
    if not sys.stderr.isatty():
        yield lambda what, share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(file=styled(sys.stderr))
    text = TextColumn("{task.description}", markup=False)
    # Nothing is printed meanwhile: rich would put streams in the place of those that print text only.
    bar = Progress(text, BarColumn(), console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
    with bar as shown:
        task = shown.add_task("", total=1.0)
        yield lambda what, share: shown.update(task, description=named(what), completed=share)


def _store(
    recordings: list[Recording],
    job: str,
    ignore_annotations: bool,
    hosts: dict[int, str],
    utilization: tuple[float, float],
    store_url: str | None,
    progress: Progress,
) -> dict[str, Any]:
    """Stores recordings, and returns what is printed of it as JSON."""
    progress("comparing clocks", 0.0)
    clocks = compare_clocks(recordings)
    for each in recordings:
        each.clock_ns = clocks[each.rank].offset_ns if each.rank in clocks else 0
    progress("finding steps", 0.0)
    communicators = find_communicators(recordings)
    steps = find_all_steps(recordings, communicators, ignore_annotations=ignore_annotations)
    notes = find_hosts(recordings, clocks, hosts)
    with open_store(store_url) as store:
        run = convert.write(store, job, recordings, steps, communicators, progress, utilization)
        url = store.url
    summaries = [convert.summary(each, steps[each.rank]) for each in recordings]
    progress("done", 1.0)
    return {"job": job, "run": run, "store": url, "recordings": summaries, "notes": notes}


def _show(
    stored: dict[str, Any], recordings: list[Recording], utilization: tuple[float, float], output_format: str
) -> None:
    if output_format == "json":
        click.echo(json.dumps(stored, indent=2))
        return
    summaries = stored["recordings"]
    measured_ns = [each["step_ns"] for each in summaries if each["steps"]]
    ranks = max(len(summaries), *(each.world_size for each in recordings))
    if utilization[0] and measured_ns:
        utilized = [flops_utilization(*utilization, ranks, sum(measured_ns) / len(measured_ns))]
    else:
        utilized = []
    _print(summaries, [*stored["notes"], *utilized], stored["job"], stored["run"], stored["store"])


def _print(summaries: list[dict[str, Any]], notes: list[str], job: str, run: int, url: str) -> None:
    for each in summaries:
        click.echo(f"{printable(Path(each['file']).name)}: rank {each['rank']} (by {each['rank_source']})")
        click.echo(
            f"  {each['gpu_operations']:,} GPU operations ({each['kernels']:,} kernels, "
            f"{each['nccl_kernels']:,} of NCCL), {each['launches']:,} calls, {each['collectives']:,} collectives"
        )
        if each["steps"]:
            steps = counted(each["steps"], "step")
            click.echo(
                f"  {steps} of {duration(each['step_ns'])}, by {each['method']}: {printable(each['why'])} "
                f"(confidence {each['confidence']:.0%})"
            )
        else:
            click.echo(f"  no steps found: {printable(each['why'])}")
        if each["flops"]:
            work, rate = each["flops"] / 1e12, each["flops_per_s"] / 1e12
            click.echo(
                f"  matrix products and attention: {work:,.4g} TFLOP in {duration(each['flops_ns'])} of their kernels, "
                f"{rate:,.4g} TFLOP/s"
            )
        if each["zero"] != "1970 (UTC)":
            click.echo(f"  time zero is {printable(each['zero'])}")
        for note in each["notes"]:
            click.echo(f"  {printable(note)}")
        if each["counters"]:
            counts = ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in each["counters"].items())
            click.echo(f"  counted: {counts}")
    ranks = counted(len(summaries), "rank")
    for line in notes:
        click.echo(printable(line))
    click.echo(f"{printable(job)}: {ranks} stored as run {run} in {url}")
    _print_next(job, url)
    click.echo(f'  argus sql "SELECT * FROM gpu_steps WHERE job = {quoted(job)} AND run = {run} ORDER BY rank, step"')


# The importers of what a hung job left behind: a file of their own, which adds them to the group above.
importlib.import_module(".import_dumps", __package__)
