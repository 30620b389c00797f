"""A tracing session as a person sees it: begin, watch, end in good order, sum up. ``argus trace`` and ``argus run``."""

from __future__ import annotations

import contextlib
import os
import shlex
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
from argus.diagnose.watch import Watch
from argus.errors import EXIT_UNAVAILABLE, ArgusError
from argus.store.open import Store
from argus.trace import Options, Tracer

from .live import picture, plain_line

PLAIN_INTERVAL_S = 5.0
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""


def trace_session(
    store: Store, options: Options, *, duration: float | None, steps: int | None, plain: bool, diagnose: bool = True
) -> int:
    """Traces until there is a reason to stop, and says what happened.

    Args:
        store: Where rows go.
        options: What to trace.
        duration: End after so many seconds; None: when the targets end or somebody stops it.
        steps: End once every rank has so many steps; None: do not.
        plain: Plain lines even on a terminal.
        diagnose: Judge the job while it is traced.

    Returns:
        The exit code.

    Raises:
        ArgusError: Nothing can be traced, no rank was seen, or rows could not be stored.
    """
    tracer = Tracer(store, options)
    console = Console(stderr=False)
    watch = Watch(store, tracer.host) if diagnose else None
    with _stop_on_signals() as stopping:
        tracer.start()
        deadline = None if duration is None else time.monotonic() + duration
        try:
            try:
                _say_what_is_attached(console, tracer)
                _watch(console, tracer, stopping, deadline, steps, plain or not console.is_terminal, watch)
            finally:
                if watch is not None:
                    watch.end()
                if stopping:
                    click.echo("storing what is left (a second Ctrl-C gives it up)", err=True)
                lost = tracer.stop()
                if watch is not None:
                    watch.close()
        except KeyboardInterrupt:
            tracer.abort()
            click.echo("argus: stopped at once; rows that were not stored yet are lost", err=True)
            return EXIT_INTERRUPTED
    return sum_up(console, tracer, lost)


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
    if not tracer.attached and tracer.live():
        _say(console, "  none of them has loaded libcuda, libcudart or libnccl: stacks only, until one does")
    elif not tracer.attached:
        _say(console, "no library to probe yet: waiting for children to load one")


def _watch(
    console: Console,
    tracer: Tracer,
    stopping: list[int],
    deadline: float | None,
    steps: int | None,
    plain: bool,
    watch: Watch | None,
) -> None:
    """Polls until there is a reason to stop."""
    gpu_times: list[str] = []
    live = None if plain else Live(console=console, refresh_per_second=4, transient=True, auto_refresh=False)
    shown = time.monotonic()
    judged = 0.0
    with live or contextlib.nullcontext():
        while not stopping and not tracer.done():
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                return
            tracer.poll()
            if now >= judged:
                judged = now + 1.0
                if watch is not None:
                    watch.look((job.name, job.run) for job in tracer.jobs)
                tracer.heed(watch.lines() if watch is not None else [])
            if steps is not None and _all_have(tracer, steps):
                return
            if live is not None and now - shown >= 0.5:
                live.update(picture(tracer.view(), console.width, watch.lines() if watch else []), refresh=True)
                shown = now
            elif live is None:
                for note in tracer.news():
                    _say(console, f"note: {note}")
                for line in watch.take() if watch is not None else []:
                    _say(console, line)
                known = tracer.gpu_times()
                for line in known:
                    if line not in gpu_times:
                        _say(console, line)
                gpu_times = known or gpu_times
                if now - shown >= PLAIN_INTERVAL_S:
                    _say(console, plain_line(tracer.view()))
                    shown = now
            until = now + tracer.pace_s if deadline is None else min(now + tracer.pace_s, deadline)
            time.sleep(max(0.0, until - time.monotonic()))


def _all_have(tracer: Tracer, steps: int) -> bool:
    live = tracer.live()
    return bool(live) and all(member.steps >= steps for member in live)


def sum_up(console: Console, tracer: Tracer, lost: dict[str, int]) -> int:
    members = [member for job in tracer.jobs for member in job.ranks()]
    if not members:
        raise ArgusError(
            "no rank was seen: no process made a call of CUDA, NCCL or gloo, or trained", "", EXIT_UNAVAILABLE
        )
    past = tracer.past
    launches = past["launches"] + sum(member.launches for job in tracer.jobs for member in job.members.values())
    collectives = past["collectives"] + sum(m.collectives for job in tracer.jobs for m in job.members.values())
    exited = [str(member.target.pid) for member in members if member.state == "exited"]
    if exited:
        shown = ", ".join(exited[:16]) + (f" and {len(exited) - 16} more" if len(exited) > 16 else "")
        _say(console, f"ended meanwhile: process {shown}")
    fewest, most = min(member.steps for member in members), max(member.steps for member in members)
    steps = f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}"
    count = "1 rank" if len(members) == 1 else f"{len(members)} ranks"
    earlier = f", and {past['jobs']:,} runs before" if past["jobs"] else ""
    _say(console, f"{count}{earlier}, {launches:,} launches, {collectives:,} collectives, {steps} steps a rank")
    for line in tracer.steps_go() + tracer.utilization() + tracer.mesh():
        _say(console, line)
    for line in tracer.gpu_times(done=True):
        _say(console, line)
    for line in tracer.stacks():
        _say(console, line)
    for line in tracer.overhead():
        _say(console, line)
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
    which = f" --job {shlex.quote(tracer.jobs[-1].name)}" if len(names) > 1 else ""
    _say(console, f"next: {argus} diagnose{which}   or: {argus} sql")
    return 0
