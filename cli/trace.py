"""``argus trace``: traces running processes until they end or the user has seen enough."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import click
from rich.console import Console
from rich.live import Live

from argus.capture.bpf import Attachment
from argus.capture.targets import FileKey
from argus.errors import EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError
from argus.store.open import open_store
from argus.trace import Options, Tracer

from .live import picture, plain_line
from .options import store_option

POLL_S = 0.02
PLAIN_INTERVAL_S = 5.0
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""


@click.command()
@click.option("--pid", "pids", type=click.IntRange(1, 2**22), multiple=True, help="Process to trace; repeat for more.")
@click.option("--all-gpu", is_flag=True, help="Trace every process that maps libcuda now.")
@click.option("--name", metavar="TEXT", help="Trace every such process whose command line contains TEXT.")
@click.option("--children", is_flag=True, help="Follow forks and execs: give the launcher's PID (torchrun, mpirun).")
@click.option("--duration", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="End by itself.")
@click.option("--steps", "steps", type=click.IntRange(min=1), metavar="N", help="End once every rank has N steps.")
@click.option("--run", type=click.IntRange(1, 2**32 - 1), metavar="N", help="Number of the run; the same on all nodes.")
@click.option("--job", metavar="NAME", help="Name of the job. Default: what the launcher's environment says.")
@click.option("--launch-durations", is_flag=True, help="Time launches too (a full launch queue); costs 2 µs each.")
@click.option("--buffer-mb", type=click.IntRange(1, 1024), default=16, show_default=True, help="Ring of CUDA calls.")
@click.option("--plain", is_flag=True, help="Plain lines even on a terminal.")
@store_option
def command(
    pids: tuple[int, ...],
    all_gpu: bool,
    name: str | None,
    children: bool,
    duration: float | None,
    steps: int | None,
    job: str | None,
    run: int | None,
    launch_durations: bool,
    buffer_mb: int,
    plain: bool,
    store_url: str | None,
) -> int:
    """Trace running processes: kernel launches, copies, waits and collectives.

    The processes are neither stopped nor changed: eBPF probes on libcuda, libcudart and libnccl report their calls, and
    vanish with Argus, even if it is killed. Rows go to the store while the trace runs.

    Cost to the target: about 1 to 3 µs for each traced call (`scripts/bench probe`).

    \b
      sudo argus trace --pid 4821
      sudo argus trace --pid 4821 --pid 4822 --duration 60
      sudo argus trace --pid $(pgrep -o torchrun) --children
      sudo argus trace --all-gpu --steps 200 && sudo argus diagnose
    """
    if not (pids or all_gpu or name):
        raise ArgusError("nothing to trace", "Name a process: --pid PID, --name TEXT or --all-gpu", EXIT_USAGE)
    store = open_store(store_url)
    options = Options(
        pids=pids,
        all_gpu=all_gpu,
        name=name,
        children=children,
        job=job,
        run=run,
        launch_durations=launch_durations,
        launch_ring_bytes=1 << (buffer_mb * (1 << 20) - 1).bit_length(),
    )
    tracer = Tracer(store, options)
    console = Console(stderr=False)
    with _stop_on_signals() as stopping:
        tracer.start()
        deadline = None if duration is None else time.monotonic() + duration
        try:
            try:
                _say_what_is_attached(console, tracer)
                _watch(console, tracer, stopping, deadline, steps, plain or not console.is_terminal)
            finally:
                if stopping:
                    click.echo("storing what is left (a second Ctrl-C gives it up)", err=True)
                lost = tracer.stop()
        except KeyboardInterrupt:
            tracer.abort()
            click.echo("argus: stopped at once; rows that were not stored yet are lost", err=True)
            return EXIT_INTERRUPTED
    return _sum_up(console, tracer, lost)


def _say(console: Console, text: str, style: str | None = None) -> None:
    """A line as it is: not wrapped (lines are for grep, too), not coloured by its words, at once."""
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)
    sys.stdout.flush()


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM end the trace in good order, a second one ends it at once.

    Yields a list that holds the signal once it came.
    """
    came: list[int] = []
    before: dict[signal.Signals, Any] = {}

    def note(received: int, _frame: object) -> None:
        came.append(received)
        if len(came) > 1:
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        before[number] = signal.signal(number, note)
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say_what_is_attached(console: Console, tracer: Tracer) -> None:
    for job in tracer.jobs:
        ranks = sorted(job.ranks(), key=lambda member: member.rank)
        world = max((member.target.identity.world_size for member in ranks), default=0)
        of = f" of {world}" if world else ""
        launcher = ranks[0].target.identity.launcher if ranks else "unknown"
        count = "1 rank" if len(ranks) == 1 else f"{len(ranks)} ranks"
        _say(console, f"job {job.name}: {count}{of} here ({launcher})", style="bold")
        for member in ranks:
            source = "" if member.rank_source != "order" else ", rank guessed from order"
            _say(console, f"  rank {member.rank}: process {member.target.pid}, {member.probes} probes{source}")
    if not tracer.jobs:
        _say(console, "no rank yet: a child becomes one when it makes its first call")
    by_library: dict[FileKey, list[Attachment]] = {}
    for attachment in tracer.attached:
        by_library.setdefault(attachment.library.key, []).append(attachment)
    for attachments in by_library.values():
        pids = [str(attachment.pid) for attachment in attachments if attachment.pid is not None]
        # Probes of a file that only targets map serve all of them.
        where = f"in process {', '.join(pids)}" if pids else "in every process that maps it"
        _say(console, f"  probes on {attachments[0].library.describe()}, {where}")
    if not tracer.attached:
        _say(console, "no library to probe yet: waiting for children to load one")


def _watch(
    console: Console, tracer: Tracer, stopping: list[int], deadline: float | None, steps: int | None, plain: bool
) -> None:
    """Polls until there is a reason to stop."""
    told = 0
    live = None if plain else Live(console=console, refresh_per_second=4, transient=True, auto_refresh=False)
    shown = time.monotonic()
    with live or contextlib.nullcontext():
        while not stopping and not tracer.done():
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                return
            tracer.poll()
            if steps is not None and _all_have(tracer, steps):
                return
            if live is not None and now - shown >= 0.5:
                live.update(picture(tracer.view(), console.width), refresh=True)
                shown = now
            elif live is None:
                notes = tracer.notes()
                for note in notes[told:]:
                    _say(console, f"note: {note}")
                told = len(notes)
                if now - shown >= PLAIN_INTERVAL_S:
                    _say(console, plain_line(tracer.view()))
                    shown = now
            time.sleep(max(0.0, POLL_S - (time.monotonic() - now)))


def _all_have(tracer: Tracer, steps: int) -> bool:
    live = tracer.live()
    return bool(live) and all(member.steps >= steps for member in live)


def _sum_up(console: Console, tracer: Tracer, lost: dict[str, int]) -> int:
    members = [member for job in tracer.jobs for member in job.ranks()]
    if not members:
        raise ArgusError("no process that uses the GPU was seen", "", EXIT_UNAVAILABLE)
    launches = sum(member.launches for job in tracer.jobs for member in job.members.values())
    collectives = sum(member.collectives for job in tracer.jobs for member in job.members.values())
    exited = [str(member.target.pid) for member in members if member.state == "exited"]
    if exited:
        shown = ", ".join(exited[:16]) + (f" and {len(exited) - 16} more" if len(exited) > 16 else "")
        _say(console, f"ended meanwhile: process {shown}")
    fewest, most = min(member.steps for member in members), max(member.steps for member in members)
    steps = f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}"
    count = "1 rank" if len(members) == 1 else f"{len(members)} ranks"
    _say(console, f"{count}, {launches:,} launches, {collectives:,} collectives, {steps} steps a rank")
    if lost:
        what = ", ".join(f"{name} {value:,}" for name, value in sorted(lost.items()))
        _say(console, f"coverage: incomplete ({what})", style="yellow")
    else:
        _say(console, "coverage: complete, nothing was lost", style="green")
    if tracer.store_error:
        raise ArgusError(f"rows could not be stored: {tracer.store_error}", "See `argus store status`")
    # Root's default store is not the user's.
    argus = "sudo argus" if os.environ.get("SUDO_USER") else "argus"
    names = {job.name for job in tracer.jobs}
    which = f" --job '{tracer.jobs[-1].name}'" if len(names) > 1 else ""
    _say(console, f"next: {argus} diagnose{which}   or: {argus} sql")
    return 0
