"""``argus arm``: prepares programs that will be traced later, perhaps."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from argus.capture.reader import reader
from argus.cupti import build
from argus.cupti.arm import (
    arm_interpreter,
    armed_processes,
    copy_to,
    disarm_interpreter,
    export_text,
)
from argus.model.errors import EXIT_USAGE, ArgusError
from argus.model.text import printable

from .options import Pids, all_pids


@click.command()
@click.option("--python", metavar="EXE", help="Arm all that this interpreter runs, by a .pth in its site-packages.")
@click.option("--remove", is_flag=True, help="With --python: take the .pth away.")
@click.option(
    "--copy-to",
    "copy_folder",
    metavar="DIR",
    help="Copy the helper there (shared folder, image), and arm with the copy.",
)
@click.option("--status", is_flag=True, help="List the armed processes that run now.")
@click.option(
    "--pid", "-p", "pids", type=Pids(), multiple=True, metavar="PID", help="With --status: only these processes."
)
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["env", "json", "k8s"]),
    default="env",
    show_default=True,
    help="Print the setting for a shell, a program or a pod; json also with --status.",
)
def command(
    python: str | None,
    remove: bool,
    copy_folder: str | None,
    status: bool,
    pids: tuple[tuple[int, ...], ...],
    output_format: str,
) -> int:
    """Arm programs, so that their GPU times can be traced: CUDA loads Argus's helper when they start to use the GPU.

    In an armed process the helper is one mapping and one sleeping thread. `argus trace` wakes it to record GPU times,
    and lets it sleep again when the trace ends.

    \b
      eval "$(argus arm)"                    this shell, and all it starts
      argus arm --python .venv/bin/python    all that this Python runs, until --remove
      argus arm --copy-to /shared/argus      print the setting for a copy that every node and container sees
      argus arm --format k8s                 env: of a pod
      sudo argus arm --status                who is armed
    """
    if remove and python is None:
        raise ArgusError("--remove needs --python", "Name the interpreter that was armed", EXIT_USAGE)
    if pids and not status:
        raise ArgusError("--pid needs --status", "", EXIT_USAGE)
    if sum((python is not None, copy_folder is not None, status)) > 1:
        raise ArgusError("--python, --copy-to and --status cannot be combined", "", EXIT_USAGE)
    if status:
        return _status(all_pids(pids), output_format)
    if python is not None:
        return _python(python, remove)
    path = build.library() if copy_folder is None else copy_to(Path(copy_folder))
    click.echo(export_text(path, output_format))
    return 0


def _python(python: str, remove: bool) -> int:
    if remove:
        removed = disarm_interpreter(python)
        click.echo(f"removed {removed}" if removed else f"{python} was not armed")
        return 0
    place = arm_interpreter(python)
    click.echo(f"wrote {place}: all that {python} starts from now on is armed")
    click.echo(f"undo: argus arm --python {python} --remove   not this process: ARGUS_CUPTI=0", err=True)
    return 0


def _status(pids: tuple[int, ...], output_format: str) -> int:
    reader.shared.begin()
    with reader.shared.entered():
        armed = list(armed_processes(pids))
        unread = reader.unread()
    for line in unread:
        click.echo(line, err=True)
    if output_format == "json":
        # JSON leaves one control character as it is.
        click.echo(json.dumps([vars(process) for process in armed]).replace("\x7f", "\\u007f"))
        return 0
    for process in armed:
        reason = f" ({printable(process.reason)})" if process.reason else ""
        click.echo(f"{process.pid:>8}  {process.state}{reason}  {printable(process.command)[:200]}")
    if not armed:
        which = f"process {', '.join(map(str, pids))} is not armed" if pids else "no armed process is running"
        which += ", as far as could be read" if unread else ""
        click.echo(which + ("" if os.geteuid() == 0 else " (of those that you may look at)"))
    return 0
