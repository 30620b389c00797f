"""``argus dump``: what every thread of some processes does at this instant."""

from __future__ import annotations

import json
import sys
from collections import Counter as Tally

import click
from rich.console import Console

from argus.capture.process.targets import (
    descendants,
    find_gpu_processes,
    find_named_processes,
    identity_of,
    parent_of,
    sees_host_pids,
)
from argus.capture.reader import reader
from argus.live.dump import ThreadStack, dump
from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.model.stacks import Frame
from argus.model.text import FRAME_WIDTH, counted, printable, shortened
from argus.semantics.stacks.stack import Group, group_by_stack, label, thread_role
from argus.system import privileges

from .options import all_pids, format_option, name_given, pid_options
from .output import styled

FRAMES_SHOWN = 40
"""Of a thread; the frames nearest to the leaf."""


@click.command()
@pid_options("Process to inspect")
@click.option("--all-gpu", is_flag=True, help="Every process that maps libcuda now.")
@click.option(
    "--name",
    metavar="TEXT",
    callback=name_given,
    help="Every program whose command line contains TEXT; with --all-gpu only those that map libcuda.",
)
@click.option("--children", is_flag=True, help="Also everything that was forked by them: give the launcher's PID.")
@click.option("--each", is_flag=True, help="Print each thread, also where several ranks have the same stack.")
@format_option()
def command(
    given_pids: tuple[tuple[int, ...], ...],
    pids: tuple[tuple[int, ...], ...],
    all_gpu: bool,
    name: str | None,
    children: bool,
    each: bool,
    output_format: str,
) -> int:
    """Show what every thread does at this instant: its stack, and what it waits for.

    No thread is stopped. A waiting thread's stack is read from outside, and read again if it ran meanwhile; a running
    thread is sampled in the kernel. With several processes, threads with the same stack are printed once, with their
    ranks, so that in a job that hangs the rank that differs stands out.

    \b
      sudo argus dump                        lists processes, and asks which
      sudo argus dump 4821
      sudo argus dump --all-gpu
      sudo argus dump --children $(pgrep -o torchrun) --format json
    """
    reader.shared.begin()  # with other rights than those that are kept
    privileges.keep_for_trace(inject=False)
    click.get_current_context().with_resource(reader.shared.entered())
    named = list(all_pids(given_pids, pids))
    others: list[int] = []
    if all_gpu or name is not None:
        named_only = name is not None and not all_gpu
        candidates = find_named_processes(name or "", roots=children) if named_only else find_gpu_processes(name)
        others = [pid for pid in candidates if pid not in named]
        if not named + others:
            kind = "process" if named_only else "process that maps libcuda"
            what = f" whose command line contains '{name}'" if name is not None else ""
            raise ArgusError(f"no {kind}{what} is running", "Name one: argus dump PID", EXIT_UNAVAILABLE)
    if not named + others:
        from .pick import pick_pids

        named = list(pick_pids("dump"))
    if not sees_host_pids():
        raise ArgusError(
            "Argus runs in a PID namespace of its own, while the kernel reports the host's PIDs",
            "Start the container with --pid=host, or run Argus on the host",
            EXIT_UNAVAILABLE,
        )
    if children:
        others += [pid for pid in descendants(named + others) if pid not in named + others]
    threads = dump(named, others)
    if output_format == "json":
        click.echo(json.dumps({"schema": "argus.live.dump/1", "threads": [_json(thread) for thread in threads]}))
        for line in reader.unread():
            click.echo(line, err=True)
        return 0
    console = Console(file=styled(sys.stdout))
    if len(named + others) > 1 and not each:
        _grouped(console, threads)
    else:
        _each(console, threads)
    without = sum(thread.stack is None for thread in threads)
    rejected = sum(thread.stack is not None and thread.stack.python == "rejected" for thread in threads)
    parts = [counted(len(threads), "thread")]
    parts += [f"{without} without a stack"] if without else []
    parts += [f"{rejected} whose Python frames were rejected"] if rejected else []
    _print_line(console, ", ".join(parts), "dim")
    for pid, note in dict.fromkeys((thread.pid, thread.note) for thread in threads if thread.stack and thread.note):
        _print_line(console, f"process {pid}: {note}", "dim")
    for line in reader.unread():
        _print_line(console, line, "dim")
    return 0


def _print_line(console: Console, text: str, style: str | None = None) -> None:
    console.print(printable(text), style=style, highlight=False, markup=False, soft_wrap=True)


def _where(thread: ThreadStack) -> str:
    what = f"waits: {thread.reason}" if thread.state == "waiting" and thread.reason else thread.state
    return f"{what}, holds the GIL" if thread.gil else what


def _text(frame: Frame) -> str:
    return shortened(label(frame, lines=True), FRAME_WIDTH)


def _each(console: Console, threads: list[ThreadStack]) -> None:
    pid = -1
    for thread in threads:
        if thread.pid != pid:
            pid = thread.pid
            rank = identity_of(pid).rank
            _print_line(console, f"process {pid}" + (f", rank {rank}" if rank >= 0 else ""), "bold")
        _print_line(console, f"  thread {thread.tid} {thread.name!r}: {_where(thread)}", "cyan")
        if thread.stack is None:
            _print_line(console, f"      ({thread.note or 'no stack'})", "dim")
            continue
        frames = thread.stack.frames[::-1]
        for frame in frames[:FRAMES_SHOWN]:
            _print_line(console, f"      {_text(frame)}")
        if len(frames) > FRAMES_SHOWN:
            _print_line(console, f"      … {len(frames) - FRAMES_SHOWN} more, up to {_text(frames[-1])}", "dim")


def _grouped(console: Console, threads: list[ThreadStack]) -> None:
    """Threads of one role together: those in the same place once."""
    ranks = _ranks(threads)
    aside = {pid: _aside(pid, ranks) for pid in ranks}
    roles: dict[str, list[ThreadStack]] = {}
    for thread in threads:
        role = thread_role(thread.name, main=thread.pid == thread.tid)
        roles.setdefault(f"{role}{aside[thread.pid]}" if role == "main" else role, []).append(thread)
    for role, of_role in sorted(roles.items(), key=lambda item: (not item[0].startswith("main"), item[0])):
        known = [thread for thread in of_role if thread.stack is not None]
        by_member = {(ranks[thread.pid], str(thread.tid)): thread for thread in known}
        processes = len({thread.pid for thread in of_role})
        members = [(rank, tid, thread.stack) for (rank, tid), thread in by_member.items() if thread.stack is not None]
        _print_line(console, f"{role}: {counted(len(of_role), 'thread')} of {counted(processes, 'process')}", "bold")
        for group in group_by_stack(members):
            _group(console, group, [by_member[member] for member in group.members])
        for thread in of_role:
            if thread.stack is None:
                _print_line(
                    console, f"  process {thread.pid} thread {thread.tid}: {_where(thread)} ({thread.note})", "dim"
                )


def _group(console: Console, group: Group, threads: list[ThreadStack]) -> None:
    doing = ", ".join(f"{text}" + (f" ({n})" if n < len(threads) else "") for text, n in _tally(threads))
    odd = "  ← the odd one out" if group.odd else ""
    pids = ", ".join(str(thread.pid) for thread in threads[:4]) + (", …" if len(threads) > 4 else "")
    named = (
        [] if group.ranks == "-1" else [f"rank {group.ranks}"]
    )  # -1: a launcher, or another process that has no rank
    who = " ".join([*named, f"(process {pids})"]) if named else f"process {pids}"
    _print_line(console, f"  {who}: {doing}{odd}", "yellow" if group.odd else "cyan")
    frames = group.frames[::-1]
    if group.alike == "prefix":
        _print_line(console, "      (they part below this)", "dim")
    for frame in frames[:FRAMES_SHOWN]:
        _print_line(console, f"      {_text(frame)}")
    if len(frames) > FRAMES_SHOWN:
        _print_line(console, f"      … {len(frames) - FRAMES_SHOWN} more, up to {_text(frames[-1])}", "dim")


def _tally(threads: list[ThreadStack]) -> list[tuple[str, int]]:
    return Tally(_where(thread) for thread in threads).most_common(3)


def _ranks(threads: list[ThreadStack]) -> dict[int, int]:
    """Ranks by process: from the environment, else by their order."""
    pids = sorted({thread.pid for thread in threads})
    known = {pid: identity_of(pid).rank for pid in pids}
    if any(rank < 0 for rank in known.values()):
        return {pid: place for place, pid in enumerate(pids)} if all(r < 0 for r in known.values()) else known
    return known


def _aside(pid: int, ranks: dict[int, int]) -> str:
    """What distinguishes the main thread of a process from those of ranks: a data-loader worker's is never where theirs
    are."""
    if ranks[pid] < 0:
        launches = any(parent_of(other) == pid for other in ranks if ranks[other] >= 0)
        return (" of the launcher" if launches else " without a rank") if any(r >= 0 for r in ranks.values()) else ""
    parent = parent_of(pid)
    helper = parent in ranks and ranks[parent] == ranks[pid] and identity_of(parent).rank >= 0
    return " of helpers" if helper else ""


def _json(thread: ThreadStack) -> dict[str, object]:
    stack = thread.stack
    return {
        "pid": thread.pid,
        "tid": thread.tid,
        "rank": identity_of(thread.pid).rank,
        "name": thread.name,
        "state": thread.state,
        "reason": thread.reason,
        "gil": thread.gil,
        "note": thread.note,
        "python": stack.python if stack else "",
        "native": stack.native if stack else "",
        "frames": [
            {"kind": frame.kind, "function": frame.function, "file": frame.file, "line": frame.line}
            for frame in (stack.frames if stack else ())
        ],
    }
