"""``argus export``: where the CPU time went, for flame graphs and other tools."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from argus.export import folded, pprof, speedscope, svg, tables
from argus.export.perfetto import Moment, moment_of, write_perfetto
from argus.model.errors import EXIT_FAILURE, EXIT_USAGE, ArgusError
from argus.model.text import printable, shortened
from argus.model.units import duration, span_text
from argus.semantics.stacks.profile import Change, Difference, Profile, changes, difference, frame_text
from argus.store.open import Store, open_store
from argus.store.read.stacks import PROFILE_KINDS, Selection, read_profile
from argus.system import files, memory

from .grammar import parse_ranks
from .options import store_option
from .selection import compared_with, make_selection, parse_when, selection_options
from .suggest import close_names

FORMATS = ("svg", "folded", "speedscope", "pprof", "perfetto", "parquet", "csv")
_APART = {"svg": (), "folded": (), "speedscope": ("rank", "thread"), "pprof": ("rank", "thread")}
"""What each format distinguishes."""
_LISTED = 8
_FRAME_WIDTH = 100
"""Characters of a function's name on the terminal; the file has it whole."""


@click.command()
@click.argument("output_format", metavar="FORMAT", type=click.Choice(FORMATS))
@click.argument("table", required=False)
@selection_options
@click.option(
    "--kind",
    type=click.Choice(PROFILE_KINDS),
    default="cpu",
    show_default=True,
    help="Threads on the CPU (samples), off it (waits of 1 ms and more), or both.",
)
@click.option("--gil", is_flag=True, help="Only threads that held Python's GIL.")
@click.option("--lines/--functions", default=None, help="Distinguish lines of a function. Default: only for pprof.")
@click.option(
    "--diff",
    "parts",
    multiple=True,
    metavar="KEY=VALUE",
    help="Compare with the same selection, except for: rank=0, rank=others, steps=0:100, run=N, … May be repeated.",
)
@click.option(
    "--per",
    type=click.Choice(("step", "second", "total")),
    help="Compare time per step, per second, or as a part of all time. Default: per step where steps are known.",
)
@click.option("-o", "--output", metavar="FILE", type=click.Path(dir_okay=False), help="File to write. Default: stdout.")
@store_option
def command(
    output_format: str,
    table: str | None,
    kind: str,
    gil: bool,
    lines: bool | None,
    parts: tuple[str, ...],
    per: str | None,
    output: str | None,
    store_url: str | None,
    **choice: Any,
) -> None:
    """Export stacks with the time that went into them, a timeline, or a table.

    FORMAT is svg (a flame graph for any browser), folded (text for flamegraph.pl and inferno), speedscope
    (https://speedscope.app), pprof (`go tool pprof`), perfetto (https://ui.perfetto.dev: steps, CUDA calls,
    collectives, GPU operations, counters and the critical path; by default of the last 2 s), parquet or csv (rows of
    TABLE, any table or view of the store).

    A timeline is written as Perfetto's own packets, or as Trace Event JSON where the file's name ends in .json or
    .json.gz. Names that end in .gz are compressed.

    \b
      argus export svg -o flame.svg                       the job traced last, all ranks
      argus export svg --rank 3 --steps 100:200 -o flame.svg
      argus export svg --rank 3 --diff rank=others -o diff.svg    what rank 3 does more of
      argus export svg --steps 500:600 --diff steps=0:100 -o diff.svg    what became slower
      argus export folded --kind off --thread main --last 30s     what main threads wait for
      argus export pprof -o job.pb.gz; go tool pprof -tagroot=rank job.pb.gz
      argus export perfetto --steps 812:814 -o steps.pftrace      what ran when
      argus export perfetto --steps 812:814 -o steps.json.gz      the same as JSON, without counters
      argus export parquet gpu_steps -o gpu_steps.parquet         a table; argus sql --tables lists them
      argus export csv collectives --rank 3 --last 10s -o calls.csv
    """
    used = bool(parts or per or gil or lines is not None or kind != "cpu")
    if output_format in tables.FORMATS:
        _table_of_store(output_format, table, output, store_url, choice, used=used)
        return
    if table is not None:
        raise ArgusError(f"{output_format} exports stacks or a timeline, not a table", _TABLE_HINT, EXIT_USAGE)
    if output_format in _TIMELINES:
        _timeline(output_format, output, store_url, choice, used=used)
        return
    if parts and output_format not in ("svg", "folded"):
        hint = "Use svg or folded; pprof compares two files itself: go tool pprof -diff_base"
        raise ArgusError(f"{output_format} does not support --diff", hint, EXIT_USAGE)
    if per and not parts:
        raise ArgusError("--per says how to compare, but there is no --diff", "Add --diff", EXIT_USAGE)
    if output is None and output_format == "pprof" and sys.stdout.isatty():
        raise ArgusError("pprof's format is binary", "Name a file: -o job.pb.gz", EXIT_USAGE)
    lines = output_format == "pprof" if lines is None else lines
    with open_store(store_url, create=False) as store:
        shown = replace(make_selection(store, **choice), kind=kind, gil=gil)
        base = compared_with(store, shown, parts) if parts else None
        profile = read_profile(store, shown, by=_APART[output_format], lines=lines)
        before = None if base is None else read_profile(store, base, lines=lines)
    if before is None:
        _write(output, _WRITERS[output_format](profile))
    else:
        two = _compare(before, profile, per)
        if output_format == "svg":
            base_words = before.subtitle if before.title == profile.title else f"{before.title}: {before.subtitle}"
            _write(output, svg.write_difference(two, profile, base_words))
        else:
            _write(output, "".join(folded.write_difference(two)))
        for line in _changed(changes(two, python=True), two.unit):
            click.echo(printable(line), err=output is None)
    if output is not None:
        times = sum(sample.count for sample in profile.samples)
        click.echo(
            f"{printable(output)}: {printable(profile.title)}, {printable(profile.subtitle)}; {times:,} samples, "
            f"{duration(profile.total_ns)}"
        )


def _timeline(
    output_format: str, output: str | None, store_url: str | None, choice: dict[str, Any], used: bool
) -> None:
    if used or choice["threads"]:
        hint = "A timeline is selected by ranks and time only: --rank, --steps, --since, --until, --last"
        raise ArgusError(f"{output_format} is a timeline, not a profile of stacks", hint, EXIT_USAGE)
    example, write = _TIMELINES[output_format]
    if not output:
        raise ArgusError("a timeline needs a file", f"Name it: -o {example}", EXIT_USAGE)
    with open_store(store_url, create=False) as store:
        moment, count, notes = write(store, make_selection(store, **choice), Path(output))
    span = span_text((moment.end_ns - moment.begin_ns) / 1e9)
    click.echo(f"{printable(output)}: job {printable(moment.job)}, run {moment.run}, {span}, {count:,} events")
    for note in notes:
        click.echo(printable(note))


def _perfetto(store: Store, chosen: Selection, output: Path) -> tuple[Moment, int, list[str]]:
    if output.name.lower().endswith((".json", ".json.gz")):
        moment = moment_of(store, chosen)
        count, notes = write_perfetto(store, moment, output), []
    else:
        import pyarrow

        from argus.export.pftrace import export_trace  # with a part of the diagnosis: it takes a moment

        # Pieces of all sizes come and go: none that was freed stays.
        memory.settle()
        pyarrow.set_memory_pool(pyarrow.system_memory_pool())
        moment, written = export_trace(store, chosen, output)
        count, notes = written.slices, list(written.notes)
    return moment, count, [*notes, "open it at https://ui.perfetto.dev"]


_TIMELINES: dict[str, tuple[str, Callable[[Store, Selection, Path], tuple[Moment, int, list[str]]]]] = {
    "perfetto": ("job.pftrace", _perfetto)
}
"""By format: a file's name, as an example, and what writes one and returns what it shows, the number of events, and
notes for people."""
_TABLE_HINT = "Rows of a table: argus export parquet TABLE -o FILE.parquet, or csv"


def _table_of_store(
    output_format: str, name: str | None, output: str | None, store_url: str | None, choice: dict[str, Any], used: bool
) -> None:
    if used or choice["threads"]:
        hint = "Rows are chosen by --job, --run, --rank, --steps, --since, --until and --last"
        raise ArgusError("a table has no stacks to select", hint, EXIT_USAGE)
    if not name:
        raise ArgusError(f"{output_format} needs a table", "argus sql --tables lists them", EXIT_USAGE)
    if not output:
        raise ArgusError("a table needs a file", f"Name it: -o {printable(name)}.{output_format}", EXIT_USAGE)
    with open_store(store_url, create=False) as store:
        found = tables.find_table(store, name)
        if found is None:
            near = close_names(name, tables.table_names(store))
            hint = f"Did you mean {' or '.join(near)}?" if near else "argus sql --tables lists them"
            raise ArgusError(f"there is no table '{printable(name)}'", hint, EXIT_USAGE)
        if {"job", "run"} <= set(found.types):
            chosen = tables.Chosen.of(make_selection(store, **choice))
        else:
            when = parse_when(*(choice[word] for word in ("steps", "since", "until", "last")))
            chosen = tables.Chosen(choice["job"], choice["run"], parse_ranks(choice["ranks"]), **when)
        rows = tables.write_table(store, tables.narrow(store, found, chosen), Path(output), output_format)
    click.echo(f"{printable(output)}: {rows:,} rows of {found.name}, {len(found.types)} columns")


_WRITERS: dict[str, Callable[[Profile], str | bytes]] = {
    "svg": svg.write_svg,
    "folded": lambda profile: "".join(folded.write_folded(profile)),
    "speedscope": speedscope.write_speedscope,
    "pprof": pprof.write_pprof,
}


def _compare(before: Profile, after: Profile, per: str | None) -> Difference:
    if per == "step" and not (before.rank_steps and after.rank_steps):
        raise ArgusError("there are no steps in what is compared", "Use --per second", EXIT_USAGE)
    return difference(before, after, per)


def _write(output: str | None, content: str | bytes) -> None:
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    if output is None:
        sys.stdout.flush()
        if isinstance(content, str) or not hasattr(sys.stdout, "buffer"):
            sys.stdout.write(data.decode("utf-8", "replace"))
        else:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        return
    # Not half a file under the name, should the disk be full.
    try:
        with files.replacing(Path(output)) as file:
            file.write(data)
    except OSError as failure:
        raise ArgusError(f"{output} cannot be written: {failure.strerror}", "", EXIT_FAILURE) from None


def _changed(rows_shown: list[Change], unit: str) -> list[str]:
    worth = [change for change in rows_shown if round(change.gained)]
    lines = [f"time {unit}, by Python function: before, after, change"]
    for title, listed in (
        ("more", [change for change in worth if change.gained > 0][:_LISTED]),
        ("less", [change for change in reversed(worth) if change.gained < 0][:_LISTED]),
    ):
        for change in listed:
            numbers = [duration(value) for value in (change.self_before, change.self_after)]
            sign = "+" if change.gained > 0 else ""
            lines.append(
                f"  {title}  {numbers[0]:>9}  {numbers[1]:>9}  {sign + duration(change.gained):>10}  "
                f"{shortened(frame_text(change.frame), _FRAME_WIDTH)}"
            )
    return lines if len(lines) > 1 else [*lines, "  no difference"]
