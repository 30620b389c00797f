"""``argus import flight-recorder``, ``ras``, ``inspector``: take in what PyTorch and NCCL report of their
collectives."""

from __future__ import annotations

import json
from pathlib import Path

import click

from argus.importers.dumps import dumps, flight_recorder, inspector, moments, ras
from argus.importers.recordings.recording import find_files
from argus.model.text import printable
from argus.store.open import open_store

from .import_trace import _PATHS, _job, _name, _print_stored, _progress, command
from .options import format_option, store_option


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" + "s" * (number != 1)


@click.command("flight-recorder")
@click.argument("paths", metavar="PATH...", type=_PATHS, nargs=-1, required=True)
@click.option("--any-time", is_flag=True, help="Keep dumps whose times are far from the others': only clocks differ.")
@_job
@format_option()
@store_option
def import_flight_recorder(
    paths: tuple[Path, ...], any_time: bool, job: str | None, output_format: str, store_url: str | None
) -> None:
    """Import dumps of PyTorch's NCCL flight recorder, pickled or as JSON: files, one a rank, or folders of them. Then
    `argus diagnose` names the ranks that held up the others, and in which collective.

    \b
      argus import flight-recorder /tmp/nccl_trace_rank_* --job llama
      argus import flight-recorder dumps/ --job llama && argus diagnose --job llama
    """
    with _progress() as progress:
        read_dumps, counters = flight_recorder.read_all(paths, progress)
    kept, notes = (read_dumps, []) if any_time else moments.of_one_time(read_dumps)
    if len(kept) < len(read_dumps):
        counters["dumps_of_another_time"] = len(read_dumps) - len(kept)
    read_dumps = kept
    job = job or _name(paths)
    with open_store(store_url) as store:
        run, stored = dumps.write(store, job, read_dumps, counters)
        url = store.url
    calls = sum(len(dump.calls.get("seq", [])) for dump in read_dumps)
    pending = sum(state != "completed" for dump in read_dumps for state in dump.calls.get("state", []))
    if output_format == "json":
        click.echo(json.dumps({
            "job": job, "run": run, "store": url, "ranks": [dump.rank for dump in read_dumps],
            "without_dump": sorted(set(flight_recorder.all_ranks(read_dumps)) - {dump.rank for dump in read_dumps}),
            "calls": calls, "pending": pending, "formats": sorted({dump.version for dump in read_dumps}),
            "counters": dict(stored.counters), "notes": notes,
        }, indent=2))  # fmt: skip
        return
    click.echo(
        f"{printable(_name(paths))}: {calls:,} calls of {_counted(len(read_dumps), 'rank')}, {pending:,} of which "
        f"had not completed; format {printable(', '.join(sorted({dump.version or '?' for dump in read_dumps})))}"
    )
    _print_stored(job, run, url, stored, notes)


@click.command("ras")
@click.argument("paths", metavar="FILE...", type=_PATHS, nargs=-1, required=True)
@_job
@format_option()
@store_option
def import_ras(paths: tuple[Path, ...], job: str | None, output_format: str, store_url: str | None) -> None:
    """Import reports of NCCL's RAS, as JSON (NCCL 2.28.7 and later). Two, some seconds apart, show whether a job moves;
    `argus diagnose` then names the ranks that the others wait for.

    \b
      ncclras -f json -v > first.json; sleep 10; ncclras -f json -v > second.json
      argus import ras first.json second.json --job llama
    """
    reports = [ras.read(path) for path in find_files(paths, (".json",), ras.HINT)]
    job = job or _name(paths)
    with open_store(store_url) as store:
        run, stored, processes = ras.write(store, job, reports)
        url = store.url
    last = max(reports, key=lambda one: one.at_ns)
    states = [member.state for members in last.communicators.values() for member in members.values()]
    if output_format == "json":
        click.echo(json.dumps({
            "job": job, "run": run, "store": url, "reports": len(reports), "communicators": len(last.communicators),
            "ranks": {
                str(rank): {"host": host, "pid": pid, "gpu": gpu} for rank, (host, pid, gpu) in processes.items()
            },
            "not_answering": sum(state != "dumped" for state in states), "counters": dict(stored.counters),
        }, indent=2))  # fmt: skip
        return
    click.echo(
        f"{printable(_name(paths))}: {_counted(len(reports), 'report')}, "
        f"{_counted(len(last.communicators), 'communicator')} of {_counted(len(processes), 'rank')}, "
        f"{sum(state != 'dumped' for state in states)} that do not answer"
    )
    _print_stored(job, run, url, stored, [])


@click.command("inspector")
@click.argument("paths", metavar="PATH...", type=_PATHS, nargs=-1, required=True)
@_job
@format_option()
@store_option
def import_inspector(paths: tuple[Path, ...], job: str | None, output_format: str, store_url: str | None) -> None:
    """Import logs of NCCL's Inspector: JSON lines, one a completed collective; files, or folders of them.

    \b
      argus import inspector nccl-inspector-4711/ --job llama
      argus sql "SELECT rank, op, avg(waited_ns) FROM latest_collective_waits GROUP BY rank, op ORDER BY rank, op"
    """
    with _progress() as progress:
        log = inspector.read_all(find_files(paths, inspector.SUFFIXES, inspector.HINT), progress)
    job = job or _name(paths)
    with open_store(store_url) as store:
        run, stored = inspector.write(store, job, log, str(paths[0]))
        url = store.url
    rows = len(log.columns["seq"]) - stored.counters["collectives_repeated"]
    if output_format == "json":
        click.echo(json.dumps({
            "job": job, "run": run, "store": url, "collectives": rows, "communicators": len(log.communicators),
            "ranks": stored.ranks, "counters": {**stored.losses, **stored.counters},
        }, indent=2))  # fmt: skip
        return
    click.echo(f"{printable(_name(paths))}: {rows:,} collectives of {_counted(len(log.communicators), 'communicator')}")
    _print_stored(job, run, url, stored, [])


for each in (import_flight_recorder, import_ras, import_inspector):
    command.add_command(each)
