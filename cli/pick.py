"""What to trace where nobody has named it: a table of candidates, and on a terminal a choice."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable

import click

from argus.capture.process.candidates import Candidate, find_candidates
from argus.model.errors import EXIT_USAGE, ArgusError
from argus.model.text import printable
from argus.model.units import narrow
from argus.system.redact import command_line

_HEAD = ("", "pid", "rank", "job", "user", "CPU", "age", "command")
_RIGHT = (True, True, True, False, False, True, True, False)
_WIDEST_JOB = 24


def pick_pids(verb: str, candidates: Callable[[], list[Candidate]] = find_candidates) -> tuple[int, ...]:
    """The processes that the user chooses among the candidates.

    Args:
        verb: What is to be done with them: ``trace``, ``dump``.
        candidates: Finds them.

    Raises:
        ArgusError: There are none, or nobody can be asked: they have been listed.
    """
    listed = candidates()
    hint = f"Name a process: argus {verb} PID, -p PID, --name TEXT or --all-gpu"
    if not listed:
        raise ArgusError(f"nothing to {verb}: no training process was found", hint, EXIT_USAGE)
    asks = sys.stdin.isatty() and sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if asks else 0
    for line in candidate_lines(listed, width, numbered=asks):
        click.echo(line)
    if not asks:
        raise ArgusError(f"nothing to {verb} was named", hint, EXIT_USAGE)
    if os.geteuid() != 0 and verb == "trace":
        click.echo("Tracing needs root: choose, or run this with sudo.", err=True)
    default = _default(listed)
    while True:
        answer = click.prompt(f"{verb} which? (such as 1, 2-4 or all; q: none)", default=default)
        if answer.strip().lower() in ("q", "quit"):
            raise click.Abort
        chosen = parse_choice(answer, len(listed))
        if chosen:
            return tuple(listed[number - 1].pid for number in chosen)
        click.echo(f"'{answer}' is none of them", err=True)


def parse_choice(answer: str, count: int) -> tuple[int, ...]:
    """``"1,3-4"`` or ``"all"`` → numbers from 1 to ``count``, in order; empty: the answer names none of them."""
    if answer.strip().lower() in ("all", "a"):
        return tuple(range(1, count + 1))
    chosen: set[int] = set()
    for part in answer.replace(" ", ",").split(","):
        first, dash, last = part.partition("-")
        if not part:
            continue
        if not (first.isascii() and first.isdigit() and (not dash or (last.isascii() and last.isdigit()))):
            return ()
        numbers = range(int(first), int(last or first) + 1)
        if not numbers or numbers[0] < 1 or numbers[-1] > count:
            return ()
        chosen |= set(numbers)
    return tuple(sorted(chosen))


def _default(listed: list[Candidate]) -> str:
    """All ranks of the first job, or the first process."""
    first = listed[0]
    count = 1
    if first.identity.rank >= 0:
        together = [(one.identity.rank >= 0, one.identity.job, one.identity.lineage) for one in listed]
        count = next((at for at, one in enumerate(together) if one != together[0]), len(listed))
    return "1" if count == 1 else f"1-{count}"


def candidate_lines(listed: list[Candidate], width: int, *, numbered: bool) -> list[str]:
    """The table, a line each.

    Args:
        listed: The candidates.
        width: Columns of the terminal; 0: lines are not cut.
        numbered: Whether each begins with its number.
    """
    rows = [_HEAD]
    started: dict[str, list[str]] = {}
    for number, one in enumerate(listed, 1):
        rank = str(one.identity.rank) if one.identity.rank >= 0 else "-"
        job = printable(one.identity.job)
        job = job if len(job) <= _WIDEST_JOB else job[: _WIDEST_JOB - 1] + "…"
        if one.identity.rank >= 0:  # jobs of one name at a time are numbered, as a trace does
            lineages = started.setdefault(one.identity.job, [])
            if one.identity.lineage not in lineages:
                lineages.append(one.identity.lineage)
            if place := lineages.index(one.identity.lineage):
                job += f"#{place + 1}"
        cpu = f"{one.cpu:.0%}" if one.cpu >= 0 else "-"
        command = printable(command_line(one.words))
        rows.append((str(number), str(one.pid), rank, job, one.user, cpu, narrow(one.age_s), command))
    first = 0 if numbered else 1
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(widths[at]) if _RIGHT[at] else cell.ljust(widths[at])
            for at, cell in enumerate(row)
            if at >= first
        ]
        line = "  ".join(cells).rstrip()
        lines.append(line if not width or len(line) <= width else line[: width - 1] + "…")
    return lines
