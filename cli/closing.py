"""The end of a trace: the verdict with its evidence and action, then what was recorded, its coverage and its cost."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any

from rich.console import Console
from rich.text import Text

from argus.live.job import Job, Member
from argus.live.tracer import Tracer
from argus.model.counters import describe_all, numbered
from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.model.text import counted, printable
from argus.model.units import elapsed
from argus.store.limits import QueryBounds
from argus.store.open import Store

from .verdict_text import show, verdict_lines

JOBS = 4
"""Verdicts on an owner's jobs, of the newest."""
VERDICTS = 16
"""Verdicts in all. Users have them by turns, and so have the containers of each."""
WITHIN_S = 300.0
"""How long all verdicts may take; each as long as the others leave it, and where there is only one all of it."""
SETTINGS = {"max_execution_time": 120, "max_memory_usage": 4_000_000_000}
"""Of a verdict's queries. No trace waits for them any more, but other jobs run."""
NAMED = 8
"""Jobs without a verdict that are named."""
WHOLE_S = 3600.0
"""A trace up to so long is diagnosed as a whole, as `argus diagnose` does; of a longer one the newest part."""
MOST_STEPS = 500_000
"""Of more steps the newest are diagnosed: the 1.1 million that a flood makes in five minutes (``scripts/hostile``) take
190 MB, and 150 MB of the store's engine."""


def say(console: Console, text: str, style: str | None = None) -> None:
    """A line, not coloured by its words, at once: whole where it is piped (lines are for grep, too), on a terminal
    folded between words, so that what goes on is indented and paths stay whole."""
    lines = [printable(text)]
    if console.is_terminal:
        indent = " " * (len(text) - len(text.lstrip()) + 2)
        lines = textwrap.wrap(
            lines[0], console.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
    for line in lines or [""]:
        console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)
    sys.stdout.flush()


def sum_up(console: Console, tracer: Tracer, lost: dict[str, int], store: Store | None) -> int:
    """Prints how a trace has ended. ``tracer`` has stopped.

    Args:
        console: Where to.
        tracer: What has traced.
        lost: As ``Tracer.stop`` returned it.
        store: Where the rows are, for the verdict; None: there is to be none.

    Returns:
        The exit code.

    Raises:
        ArgusError: No rank was seen, or rows could not be stored.
    """
    members = [member for job in tracer.jobs for member in job.ranks()]
    if not members:
        raise ArgusError(
            "no rank was seen: no process made a call of CUDA, NCCL or gloo, or trained", "", EXIT_UNAVAILABLE
        )
    seen = _anything(tracer, members)
    if not seen:
        say(console, "nothing to diagnose: no call of CUDA, NCCL or gloo, no step and no code on a CPU was seen")
    elif store is not None:
        _conclude(console, tracer, store)
    _recorded(console, tracer, members)
    if lost:
        say(console, f"coverage: incomplete ({describe_all(lost)})", style="yellow")
    elif seen:
        say(console, "coverage: complete, nothing was lost", style="green")
    for line in tracer.overhead():
        say(console, line)
    if tracer.store_error:
        raise ArgusError(f"rows could not be stored: {tracer.store_error}", "See `argus store status`")
    if seen:
        # Root's default store is not the user's.
        argus = "sudo argus" if os.environ.get("SUDO_USER") else "argus"
        names = {job.name for job in tracer.jobs}
        which = f" --job {shlex.quote(tracer.jobs[-1].name)}" if len(names) > 1 else ""
        all_of_it = " -v" if store is not None else ""
        say(console, f"next: {argus} diagnose{all_of_it}{which}   or: {argus} sql")
    return 0


def _anything(tracer: Tracer, members: list[Member]) -> bool:
    """Whether there is anything to diagnose."""
    past = tracer.past
    calls = past["launches"] + past["collectives"] + tracer.samples
    return bool(calls + sum(member.launches + member.collectives + member.steps for member in members))


def _recorded(console: Console, tracer: Tracer, members: list[Member]) -> None:
    past = tracer.past
    launches = past["launches"] + sum(member.launches for job in tracer.jobs for member in job.members.values())
    collectives = past["collectives"] + sum(m.collectives for job in tracer.jobs for m in job.members.values())
    exited = [str(member.target.pid) for member in members if member.state == "exited"]
    if exited:
        shown = ", ".join(exited[:16]) + (f" and {len(exited) - 16} more" if len(exited) > 16 else "")
        say(console, f"ended meanwhile: process{'' if len(exited) == 1 else 'es'} {shown}")
    fewest, most = min(member.steps for member in members), max(member.steps for member in members)
    each = "" if len(members) == 1 else " a rank"
    steps = numbered("{n} step[s]" + each, most) if fewest == most else f"{fewest:,} to {most:,} steps a rank"
    parts = [counted(len(members), "rank")]
    if past["jobs"]:
        parts.append(f"and {counted(past['jobs'], 'run')} before")
    if launches:
        parts.append(numbered("{n} launch[es]", launches))
    if collectives:
        parts.append(counted(collectives, "collective"))
    say(console, ", ".join([*parts, steps]))
    for line in tracer.steps_go() + tracer.utilization() + tracer.mesh():
        say(console, line)
    for line in tracer.gpu_times(done=True):
        say(console, line)
    for line in tracer.stacks():
        say(console, line)
    for line in tracer.not_started():
        say(console, line, style="yellow")


def _conclude(console: Console, tracer: Tracer, store: Store) -> None:
    """The verdicts on the newest jobs. One that cannot be reached costs no other."""
    newest = {(job.owner, job.name): job for job in tracer.jobs if job.ranks()}
    jobs = _by_turns(list(newest.values()))
    chosen = {id(job) for job in jobs}
    left = [job.name for job in newest.values() if id(job) not in chosen]
    try:
        if store.target.spool is not None:
            raise ArgusError("rows are in a spool: `argus store load` brings them into a store, for argus diagnose")
        until_s = time.monotonic() + WITHIN_S
        with contextlib.closing(Store(store.target, create=False)) as again:
            for place, job in enumerate(jobs):
                now = time.monotonic()
                if now >= until_s:
                    left += [one.name for one in jobs[place:]]
                    break
                again.bounds = QueryBounds(SETTINGS, now + (until_s - now) / (len(jobs) - place))
                _conclude_one(console, tracer, again, job, len(newest) > 1)
        if left:
            few = ", ".join(left[:NAMED]) + (f" and {len(left) - NAMED} more" if len(left) > NAMED else "")
            what = f"{counted(len(left), 'more job')}: {few}: argus diagnose --job {shlex.quote(left[0])}"
            say(console, f"not diagnosed: {what}", style="yellow")
    except ArgusError as failure:
        say(console, f"not diagnosed: {failure.message}", style="yellow")
    except KeyboardInterrupt:
        say(console, "not diagnosed: interrupted; all rows are stored", style="yellow")


def _conclude_one(console: Console, tracer: Tracer, store: Store, job: Job, named: bool) -> None:
    """The verdict on a job, or why there is none. ``named``: the line says of which job."""
    try:
        with _busy(console):
            lines = _verdict(store, tracer, job)
        show(console, lines)
        show(console, [(Text(), 0)])
        return
    except ArgusError as failure:
        why = failure.message
    except Exception as failure:  # a defect: what was recorded is still to be summed up
        why = f"it failed ({type(failure).__name__}: {failure})"
    again = f"{job.name}: not diagnosed: {why}: argus diagnose --job {shlex.quote(job.name)}"
    say(console, again if named else f"not diagnosed: {why}", style="yellow")


def _by_turns(jobs: list[Job]) -> list[Job]:
    """The jobs that get a verdict: a few of each owner, the newest of it, one of each user after the other."""

    def split(some: list[Job], key: Callable[[Job], Any]) -> list[list[Job]]:
        groups: dict[Any, list[Job]] = {}
        for job in some:
            groups.setdefault(key(job), []).append(job)
        return list(groups.values())

    def by_turns(groups: list[list[Job]]) -> list[Job]:
        return [job for turn in zip_longest(*groups) for job in turn if job is not None]

    users = split(jobs, lambda job: job.owner[0])
    each = [by_turns([some[-JOBS:] for some in split(user, lambda job: job.owner)]) for user in users]
    return by_turns(each)[:VERDICTS]


def _verdict(store: Store, tracer: Tracer, job: Job) -> list[tuple[Text, int]]:
    # Here, not above: a trace shows its first line sooner without.
    from argus.diagnose.follow.follow import SPAN_NS
    from argus.diagnose.follow.watch import in_charge
    from argus.diagnose.learn import learn
    from argus.diagnose.read.queries import SPAN
    from argus.diagnose.save import save
    from argus.diagnose.stored import diagnose_store
    from argus.store.reader import query_columns

    host = in_charge(store, job.name, job.run)
    if host != tracer.host:
        return [(Text(f"{job.name}: the verdict is {host or 'another host'}'s, which traces the lowest rank"), 0)]
    lasted_s = (time.monotonic_ns() - tracer.started_ns) / 1e9
    since_ns = time.time_ns() - SPAN_NS if lasted_s > WHOLE_S else 0
    span = query_columns(store, SPAN, {"job": job.name, "run": job.run, "since_ns": since_ns})
    first, last = (int(span[name][0]) for name in ("first", "last"))
    begin = last - MOST_STEPS + 1 if last - first >= MOST_STEPS else None
    verdict = diagnose_store(store, job.name, job.run, steps=(begin, None), since_ns=since_ns)
    save(store, verdict)
    if not since_ns and begin is None:
        learn(store, verdict)
    lines = list(verdict_lines(verdict, detail=False))
    if since_ns or begin is not None:
        part = f"the last {elapsed(SPAN_NS / 1e9)}" if begin is None else f"the newest {MOST_STEPS:,} steps"
        lines.append((Text(f"of {part}; argus diagnose covers all of it", style="dim"), 2))
    return lines


@contextlib.contextmanager
def _busy(console: Console) -> Iterator[None]:
    """Says that it takes a moment, on a terminal."""
    shown = console.is_terminal and not console.is_dumb_terminal and sys.stderr is not None and sys.stderr.isatty()
    if shown:
        os.write(2, b"diagnosing ...")
    try:
        yield
    finally:
        if shown:
            os.write(2, b"\r\x1b[K")
