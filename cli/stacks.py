"""``argus stacks``: groups ranks by their stacks, and marks those that differ."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import click

from argus.model.errors import EXIT_USAGE, ArgusError
from argus.model.text import FRAME_WIDTH, printable, shortened
from argus.model.units import duration, rank_text
from argus.semantics.stacks.profile import frame_text
from argus.semantics.stacks.stack import Group, group_by_stack
from argus.store.open import open_store
from argus.store.read.stacks import Selection, Thread, read_threads, resolved

from .grammar import parse_time
from .options import format_option, store_option
from .selection import make_selection, selection_options

WINDOW_NS = 2_000_000_000
"""What "now" means: a thread that has waited for so long is included with the newest samples, so every thread is in
it."""


@click.command()
@selection_options
@click.option("--at", metavar="TIME", help="Where they were then (UTC, or Unix time). Default: at the end of the run.")
@click.option("--frames", "most", default=15, show_default=True, help="The most frames of a stack; 0: all.")
@format_option()
@store_option
def command(at: str | None, most: int, output_format: str, store_url: str | None, **choice: Any) -> None:
    """Group ranks by their stacks, and mark those that differ: the first thing to look at when a job hangs.

    For each kind of thread, main threads first, ranks with the same stack are one group; a rank whose stack differs
    from that of most ranks is marked. Stacks are printed with the innermost frame first.

    \b
      argus stacks                       at the end of the job traced last, or now
      argus stacks --thread main --rank 0-15
      argus stacks --at 2026-05-01T12:00:30
      argus stacks --steps 1200          where they were for most of that step
      argus stacks --format json | jq '.roles[0].groups[] | select(.odd)'
    """
    if at and (choice["since"] or choice["until"] or choice["last"] or choice["steps"]):
        raise ArgusError(
            "--at cannot be combined with --since, --until, --last or --steps", "Give one of them", EXIT_USAGE
        )
    with open_store(store_url, create=False) as store:
        selection = replace(make_selection(store, **choice), kind="all")
        if at:
            when = parse_time(at)
            # As much before as after: what was going on then is known from both.
            selection = replace(selection, from_ns=when - WINDOW_NS // 2, to_ns=when + WINDOW_NS // 2)
        elif not selection.steps and selection.from_ns is None and selection.last_ns is None:
            selection = replace(selection, last_ns=WINDOW_NS)
        selection = resolved(store, selection)
        threads = read_threads(store, selection)
    roles = _roles(threads)
    if output_format == "json":
        click.echo(json.dumps(_json(selection, threads, roles), indent=2))
        return
    for line in _lines(selection, threads, roles, most):
        click.echo(line)


_Role = tuple[str, list[tuple[Group, list[Thread]]]]


def _roles(threads: list[Thread]) -> list[_Role]:
    """Threads by role, main threads first, then those that most ranks have; each in groups."""
    by_role: dict[str, list[Thread]] = {}
    for thread in threads:
        by_role.setdefault(thread.role, []).append(thread)
    order = sorted(by_role, key=lambda role: (role != "main", -len({t.rank for t in by_role[role]}), role))
    roles = []
    for role in order:
        own = {(thread.rank, f"{thread.pid}/{thread.tid}"): thread for thread in by_role[role]}
        groups = group_by_stack([(*key, thread.stack) for key, thread in own.items()])
        roles.append((role, [(group, [own[key] for key in group.members]) for group in groups]))
    return roles


def _time(ns: int) -> str:
    return datetime.fromtimestamp(ns / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + " UTC"


def _lines(selection: Selection, threads: list[Thread], roles: list[_Role], most: int) -> Iterator[str]:
    ranks = {thread.rank for thread in threads}
    where = selection.describe() if selection.steps else ""
    if selection.from_ns is not None and selection.to_ns is not None:
        where = f"run {selection.run}, {duration(selection.to_ns - selection.from_ns)} up to {_time(selection.to_ns)}"
    yield f"{printable(selection.job)}: {where or selection.describe()}"
    count = f"{len(ranks)} rank{'s' * (len(ranks) != 1)} ({rank_text(ranks)})"
    yield f"{count}, {len(threads)} thread{'s' * (len(threads) != 1)}"
    for role, groups in roles:
        yield ""
        yield printable(
            {"main": "main threads", "main of helpers": "main threads of helpers"}.get(role, f"threads {role}")
        )
        for number, (group, own) in enumerate(groups):
            yield from _group_lines(group, own, groups[0][0] if number else None, most)


def _group_lines(group: Group, own: list[Thread], first: Group | None, most: int) -> Iterator[str]:
    ranks = {thread.rank for thread in own}
    who = f"rank{'s' * (len(ranks) > 1)} {group.ranks}"
    how_many = f"{len(ranks)} rank{'s' * (len(ranks) > 1)}" + (f", {len(own)} threads" if len(own) > len(ranks) else "")
    mark = "   <-- elsewhere" if group.odd else ""
    yield printable(f"  {who} ({how_many}): {_doing(own)}{mark}")
    if group.odd and len(ranks) <= 4:
        yield printable(f"    {', '.join(_where(thread) for thread in own)}")
    if group.alike != "stack":
        yield {
            "functions": "    (the same functions; lines differ where none is shown)",
            "prefix": "    (in different places below this)",
        }[group.alike]
    frames = [shortened(frame_text(frame), FRAME_WIDTH) for frame in group.frames]
    if first is not None and 0 < group.common < len(group.frames):
        # What they share with the first group has been shown there.
        frames = frames[max(group.common - 1, 0) :]
        shared = f"... {group.common - 1} more as above" if group.common > 1 else ""
    else:
        shared = ""
    shown = frames[::-1]
    cut = len(shown) - most if most and len(shown) > most else 0
    for text in shown[: len(shown) - cut]:
        yield f"    {text}"
    if cut:
        yield f"    ... {cut} more (--frames)"
    if shared:
        yield f"    {shared}"
    if not frames:
        yield "    (nothing in common)" if group.alike == "prefix" else "    (no stack was taken)"


def _where(thread: Thread) -> str:
    return f"rank {thread.rank}: {thread.host}, process {thread.pid}, thread {thread.tid}"


def _doing(own: Iterable[Thread]) -> str:
    """What they wait for, the most common first, and how long some have been silent."""
    own = list(own)
    states = Counter(_state(thread) for thread in own)
    words = [text if number == len(own) else f"{number} {text}" for text, number in states.most_common(4)]
    silent = [thread.age_ns for thread in own if thread.age_ns]
    if silent:
        words.append(f"{len(silent)} last seen {duration(min(silent))} ago or earlier")
    return ", ".join(words)


def _state(thread: Thread) -> str:
    if thread.reason == "runqueue":
        return "waiting for a CPU"
    if thread.reason:
        return f"waiting: {thread.reason}"
    return "running with the GIL" if thread.gil else "running"


def _json(selection: Selection, threads: list[Thread], roles: list[_Role]) -> dict[str, Any]:
    return {
        "job": selection.job,
        "run": selection.run,
        "from_ns": selection.from_ns,
        "to_ns": selection.to_ns,
        "steps": list(selection.steps) if selection.steps else None,
        "ranks": sorted({thread.rank for thread in threads}),
        "roles": [
            {
                "role": role,
                "groups": [
                    {
                        "ranks": sorted({thread.rank for thread in own}),
                        "ranks_text": group.ranks,
                        "odd": group.odd,
                        "alike": group.alike,
                        "frames": [
                            {"kind": f.kind, "function": f.function, "file": f.file, "line": f.line}
                            for f in group.frames
                        ],
                        "common_with_first": group.common,
                        "threads": [
                            {
                                "rank": thread.rank,
                                "host": thread.host,
                                "pid": thread.pid,
                                "tid": thread.tid,
                                "name": thread.name,
                                "reason": thread.reason,
                                "share": round(thread.share, 4),
                                "on_cpu_ns": thread.cpu_ns,
                                "off_cpu_ns": thread.off_ns,
                                "silent_ns": thread.age_ns,
                                "gil": thread.gil,
                                "stack_id": str(thread.stack.id) if thread.stack.frames else None,
                            }
                            for thread in own
                        ],
                    }
                    for group, own in groups
                ],
            }
            for role, groups in roles
        ],
    }
