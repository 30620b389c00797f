"""A tracing session as a person sees it: begin, watch, end in good order, sum up. ``argus trace`` and ``argus run``."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

from rich.console import Console

from argus.capture.attachment import Attachment
from argus.capture.process.targets import FileKey
from argus.diagnose.follow.standing import Standing
from argus.live.display.view import View
from argus.live.options import Options
from argus.live.tracer import Tracer
from argus.model.text import counted, printable
from argus.store.open import Store
from argus.system.limits import frugal

from . import interrupt
from .closing import say, sum_up
from .live import Scene, frame, plain_line
from .outlet import Outlet
from .output import styled
from .screen import Screen, is_possible, stdin_fd
from .status import Status
from .verdict_text import news_lines

if TYPE_CHECKING:
    from argus.diagnose.follow.watch import Watch

PLAIN_INTERVAL_S = 5.0
LAST_LINES_S = 1.0
"""How long the last line may take to be read, before the verdict is printed."""
DRAWN_EVERY_S = 0.5
DRAWN_SHARE = 0.1
"""Of the time, for drawing, at most: a view of hundreds of ranks takes a tenth of a second."""
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
    """Traces until there is a reason to stop, and reports what happened.

    Args:
        store: Where rows go.
        options: What to trace.
        duration: End after so many seconds; None: when the targets end or somebody stops it.
        steps: End once every rank has so many steps; None: do not.
        plain: Plain lines even on a terminal.
        diagnose: Diagnose the job while it is traced.
        status: Shows what goes on until the trace has begun.

    Returns:
        The exit code.

    Raises:
        ArgusError: Nothing can be traced, no rank was seen, or rows could not be stored.
    """
    status = status or Status("attaching", plain=plain)
    console = Console(file=styled(sys.stdout))
    watch = None

    def give_up() -> str:
        return tracer.give_up(GIVE_UP_S)

    with interrupt.stopping(give_up, _report_storing) as stop, frugal():
        interrupt.restore = status.done
        try:
            tracer = Tracer(store, options)
            tracer.start(status.stage, wait_for_stacks=False)
            stop.attached()
        finally:
            status.done()
        deadline = None if duration is None else time.monotonic() + duration
        try:
            _report_attached(console, tracer)
            if diagnose:
                from argus.diagnose.follow.watch import Watch  # half of what there is to import

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
    try:
        return sum_up(console, tracer, lost, store if diagnose else None)
    except KeyboardInterrupt:
        if not tracer.store_error:
            say(console, "interrupted; all rows are stored", style="yellow")
        raise


def _report_stall(text: str) -> None:
    """At once: what would report it later is what hangs."""
    with contextlib.suppress(OSError):
        os.write(2, f"note: {printable(text)}\n".encode())


def _report_storing() -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"storing what is left (a second Ctrl-C gives it up)\n")


def _report_attached(console: Console, tracer: Tracer) -> None:
    for job in tracer.jobs:
        ranks = sorted(job.ranks(), key=lambda member: member.rank)
        world = max((member.target.identity.world_size for member in ranks), default=0)
        of = f" of {world}" if world else ""
        launcher = ranks[0].target.identity.launcher if ranks else "unknown"
        started = "" if launcher == "unknown" else f" ({launcher})"
        say(console, f"job {job.name}: {counted(len(ranks), 'rank')}{of} here{started}", style="bold")
        for member in ranks:
            source = "" if member.rank_source != "order" else ", rank guessed from order"
            say(console, f"  rank {member.rank}: process {member.target.pid}, {member.probes} probes{source}")
    if not tracer.jobs:
        say(console, "no rank yet: a child becomes one when it makes its first call")
    by_library: dict[FileKey, list[Attachment]] = {}
    for attachment in tracer.attached:
        by_library.setdefault(attachment.library.key, []).append(attachment)
    for attachments in by_library.values():
        pids = [str(attachment.pid) for attachment in attachments if attachment.pid is not None]
        # Probes of a file that only targets map serve all of them.
        where = f"in process {', '.join(pids)}" if pids else "in every process that maps it"
        say(console, f"  probes on {attachments[0].library.describe()}, {where}")
    if not tracer.attached and tracer.live():
        say(console, "  none of them has loaded libcuda, libcudart or libnccl: stacks only, until one does")
    elif not tracer.attached:
        say(console, "no library to probe yet: waiting for children to load one")


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
    scene = Scene()
    shown = time.monotonic()
    next_round_s, drawn_every_s = 0.0, DRAWN_EVERY_S
    with contextlib.ExitStack() as until_end:
        screen = None
        printed = _outlet(console)
        if printed is not None:
            until_end.callback(printed.drain, LAST_LINES_S)
        if not plain and is_possible(console):
            screen, shown = until_end.enter_context(Screen(console, stdin_fd())), float("-inf")
            interrupt.restore = screen.close  # a second Ctrl-C ends the process at once
        while not stopping and not tracer.done():
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                return
            tracer.poll()
            if round_is_due := now >= next_round_s:
                next_round_s = now + 1.0
                with tracer.bulkheads.part("the diagnosis"):
                    if watch is not None:
                        watch.look({(job.name, job.run): job.owner for job in tracer.jobs})
                    tracer.raise_sampling(watch.lines() if watch is not None else [])
                    if watch is not None:
                        for job in tracer.jobs:
                            tracer.bulkheads.diagnosed(job, watch.detectors_failed(job.name, job.run))
            if steps is not None and _all_have(tracer, steps):
                return
            until = now + tracer.pace_s if deadline is None else min(now + tracer.pace_s, deadline)
            if screen is not None:
                try:
                    if now - shown >= drawn_every_s:
                        view, shown = tracer.view(), now
                        _draw(screen, scene, view, tracer, watch)
                        drawn_every_s = max(DRAWN_EVERY_S, (time.monotonic() - now) / DRAWN_SHARE)
                    _react(screen, scene, view, tracer, watch, until, stopping)
                except OSError:
                    raise  # the terminal has gone
                except Exception as failure:
                    # What is shown failed, not what is traced: plain lines from here on.
                    with tracer.bulkheads.part("the live view"):
                        raise failure
                    screen.close()
                    screen = None
                continue
            tracer.on_stall = _report_stall
            lines = [f"note: {note}" for note in tracer.news()]
            lines += news_lines(watch.take() if watch is not None else [])
            known = tracer.gpu_times() if round_is_due else []
            lines += [line for line in known if line not in gpu_times]
            gpu_times = known or gpu_times
            if now - shown >= PLAIN_INTERVAL_S:
                lines.append(plain_line(tracer.view(), _standings(tracer, watch)))
                shown = now
            with console.capture() if printed is not None else contextlib.nullcontext() as capture:
                for line in lines:
                    say(console, line)
            if printed is not None and capture is not None:
                printed.write(capture.get())
            interrupt.pause(stopping, until - time.monotonic())


def _outlet(console: Console) -> Outlet | None:
    """What lines are written by while a trace runs; None: the console is no file of the system's."""
    try:
        return Outlet(console.file.fileno())
    except (AttributeError, OSError, ValueError):
        return None


def _standings(tracer: Tracer, watch: Watch | None) -> dict[tuple[str, int], Standing]:
    if watch is None:
        return {}
    standings = {(job.name, job.run): watch.standing(job.name, job.run) for job in tracer.jobs}
    return {run: standing for run, standing in standings.items() if standing is not None}


def _draw(screen: Screen, scene: Scene, view: View, tracer: Tracer, watch: Watch | None) -> None:
    columns, lines = screen.size
    diagnosis = "off: --no-diagnose" if watch is None else watch.state
    screen.draw(frame(view, _standings(tracer, watch), scene, columns, lines, diagnosis=diagnosis))


def _react(
    screen: Screen,
    scene: Scene,
    view: View,
    tracer: Tracer,
    watch: Watch | None,
    until: float,
    stopping: list[int],
) -> None:
    """Until the next turn: keys, which take effect at once, and another size of the terminal."""
    size = screen.size
    while not stopping:
        keys = screen.keys(until - time.monotonic(), stopping)
        for key in keys:
            scene.press(key, screen.size[1])
        if scene.quit:
            stopping.append(signal.SIGINT)  # the same as Ctrl-C
        elif keys or screen.size != size:
            size = screen.size
            _draw(screen, scene, view, tracer, watch)
        if time.monotonic() >= until:
            return


def _all_have(tracer: Tracer, steps: int) -> bool:
    live = tracer.live()
    return bool(live) and all(member.steps >= steps for member in live)
