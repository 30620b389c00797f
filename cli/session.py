"""A tracing session as a person sees it: begin, watch, end in good order, sum up. ``argus trace`` and ``argus run``."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live

from argus.capture.bpf import Attachment
from argus.capture.targets import FileKey
from argus.errors import EXIT_UNAVAILABLE, ArgusError
from argus.store.open import Store
from argus.trace import Options, Tracer

from . import interrupt
from .live import picture, plain_line
from .status import Status

if TYPE_CHECKING:
    from argus.diagnose.watch import Watch

PLAIN_INTERVAL_S = 5.0
GIVE_UP_S = 0.3
"""What a second Ctrl-C leaves for bringing rows to disk."""


def trace_session(
    store: Store,
    options: Options,
    *,
    duration: float | None,
    steps: int | None,
    plain: bool,
    diagnose: bool = True,
    status: Status | None = None,
) -> int:
    """Traces until there is a reason to stop, and says what happened.

    Args:
        store: Where rows go.
        options: What to trace.
        duration: End after so many seconds; None: when the targets end or somebody stops it.
        steps: End once every rank has so many steps; None: do not.
        plain: Plain lines even on a terminal.
        diagnose: Judge the job while it is traced.
        status: Shows what goes on until the trace has begun.

    Returns:
        The exit code.

    Raises:
        ArgusError: Nothing can be traced, no rank was seen, or rows could not be stored.
    """
    status = status or Status("attaching", plain=plain)
    console = Console(stderr=False)
    watch = None

    def give_up() -> str:
        return tracer.give_up(GIVE_UP_S)

    with interrupt.stopping(give_up, _say_storing) as stop:
        interrupt.restore = status.done
        try:
            tracer = Tracer(store, options)
            tracer.start(status.stage, wait_for_stacks=False)
            stop.attached()
        finally:
            status.done()
        deadline = None if duration is None else time.monotonic() + duration
        try:
            _say_what_is_attached(console, tracer)
            if diagnose:
                from argus.diagnose.watch import Watch  # half of what there is to import

                watch = Watch(store, tracer.host)
            _watch(console, tracer, stop, deadline, steps, plain or not console.is_terminal, watch)
        finally:
            if watch is not None:
                watch.end()
            if stop:
                stop.storing()
            lost = tracer.stop()
            if watch is not None:
                watch.close()
    return sum_up(console, tracer, lost)


def _say_storing() -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"storing what is left (a second Ctrl-C gives it up)\n")


def _say(console: Console, text: str, style: str | None = None) -> None:
    """A line as it is: not wrapped (lines are for grep, too), not coloured by its words, at once."""
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)
    sys.stdout.flush()


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
            interrupt.pause(stopping, until - time.monotonic())


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
    for line in tracer.not_started():
        _say(console, line, style="yellow")
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
