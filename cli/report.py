"""``argus report``: a page about a job, in one file that any browser opens."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import click

from argus.diagnose.verdict import Verdict
from argus.model.errors import EXIT_FAILURE, EXIT_USAGE, ArgusError
from argus.model.text import harmless, printable
from argus.model.units import size
from argus.store.open import Store, open_store
from argus.store.reader import latest_run, list_runs, no_run
from argus.system import files

from .diagnose import since_of, steps_of
from .options import store_option
from .output import redraw
from .selection import job_option, last_option, run_option, since_option

STDOUT = "-"
_LONGEST_NAME = 80
"""Characters of a job's name in the name of a file."""


@click.command()
@job_option
@run_option
@click.option("--steps", "--step", "steps", metavar="A:B", callback=steps_of, help="Only steps A to B; A:, :B, or one.")
@since_option
@last_option
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Where to; - prints it. Default: argus-JOB-RUN.html, here.",
)
@store_option
def command(
    job: str | None,
    run: int | None,
    steps: tuple[int | None, int | None],
    since: str | None,
    last: str | None,
    output: str | None,
    store_url: str | None,
) -> None:
    """Write a page about a job: one HTML file that any browser opens, without a network.

    The verdict, ranks by steps, step times, kernels, communicators, stacks, and what was not seen. Each picture has its
    numbers as a table and the SQL behind it.

    \b
      argus report                            the job traced last
      argus report --job llama -o llama.html
      argus report --last 10m                 its last ten minutes
      argus report -o - | ssh desk 'cat > llama.html'
    """
    if since is not None and last is not None:
        raise ArgusError("--last is --since with a span", "Give one of them", EXIT_USAGE)
    if output == STDOUT and sys.stdout.isatty():
        raise ArgusError("a page is not for a terminal", "Name a file: -o report.html", EXIT_USAGE)
    with open_store(store_url, create=False) as store:
        job, run, since_ns = _chosen(store, job, run, last if since is None else since)
        # After the store: what is asked for may not exist, and numpy takes a moment.
        from argus.report.build import build_page
        from argus.report.page import html

        with _Progress() as progress:
            page, arrays = build_page(store, job, run, steps=steps, since_ns=since_ns, progress=progress.show)
            progress.show("writing", 1.0)
            target = output if output is not None else file_name(job, run)
            written = _write(target, html(page, arrays))
    if target == STDOUT:
        return
    verdict: Verdict = page["verdict"]  # type: ignore[assignment]
    click.echo(f"{harmless(target)}: {size(written)}, job {printable(page['job'])}, run {run}")
    click.echo(printable(page["summary"]))
    # That a job does not hang is no lack of the page.
    if missing := [panel["title"] for panel in page["panels"] if panel["absent"] and panel["id"] != "hang"]:
        click.echo(f"without: {', '.join(missing)} (the page says why)")
    if not verdict["coverage"]["complete"]:
        click.echo("coverage: incomplete (argus diagnose says what was lost)")


def _chosen(store: Store, job: str | None, run: int | None, since: str | None) -> tuple[str, int, int]:
    """The job, its run, and the wall time from which on it is shown (0: all).

    Raises:
        ArgusError: There is no such run.
    """
    given = run
    if job is None or run is None:
        newest = latest_run(store, job)
        job, run = newest[0], newest[1] if run is None else run
    if given is None and since is None:
        return job, run, 0
    runs = list_runs(store, job)
    chosen = next((known for known in runs if known.run == run), None)
    if chosen is None:
        raise no_run(job, run, [known.run for known in runs])
    return job, run, since_of(since, chosen.ended_ns)


def file_name(job: str, run: int) -> str:
    """The name of a page's file: letters, digits, dots and dashes only, whatever a job is called."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", job)[:_LONGEST_NAME].strip(".-")
    return f"argus-{safe or 'job'}-{run}.html"


def _write(target: str, parts: Iterable[bytes]) -> int:
    """Writes a page; returns its bytes. Not half a page under the name, should the disk be full."""
    written = 0
    if target == STDOUT:
        sys.stdout.flush()
        for part in parts:
            written += sys.stdout.buffer.write(part)
        sys.stdout.buffer.flush()
        return written
    try:
        with files.replacing(Path(target)) as file:
            for part in parts:
                written += file.write(part)
    except OSError as failure:
        hint = "Name another file: -o FILE"
        raise ArgusError(f"{harmless(target)} cannot be written: {failure.strerror}", hint, EXIT_FAILURE) from None
    return written


class _Progress:
    """A line on a terminal that says what is worked on, once it takes longer than a moment."""

    PATIENCE_S = 0.5

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._shown = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def show(self, what: str, part: float) -> None:
        """Called with what comes next, and what part of all is done."""
        if self._shown and time.monotonic() - self._began > self.PATIENCE_S:
            redraw(f"{part:4.0%} {what[:60]} …")

    def __enter__(self) -> _Progress:
        self.show("diagnosing", 0.0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            redraw()
