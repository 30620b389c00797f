"""Which processes a trace begins with."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from argus.capture.process.targets import (
    Target,
    Tree,
    find_gpu_processes,
    find_libraries,
    find_named_processes,
    hidden_processes,
    inspect,
    open_target,
    same_process,
)
from argus.live.options import Options
from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.model.text import printable
from argus.system import debug


def find_targets(options: Options, note: Callable[[str], None] = lambda _: None) -> list[Target]:
    """The processes that a trace begins with, looked at.

    Args:
        options: Which ones.
        note: Called with a line for each that is left out, though nobody expected it.

    Raises:
        ArgusError: There is none, or one that was named cannot be traced.
    """
    pids = list(dict.fromkeys(options.pids))
    targets: list[Target] = []
    tree = Tree()

    def opened(pid: int) -> Target:
        return _open_launcher(pid) if options.children else open_target(pid, any_program=options.stacks, tree=tree)

    refused: list[ArgusError] = []
    odd: list[ArgusError] = []
    if options.all_gpu or options.name is not None:
        pids_chosen = [pid for pid in _choose(options) if pid not in pids]
        if not pids_chosen and not pids:
            raise _no_target(options)
        for pid in pids_chosen:
            try:
                # Any process can map a file of that name, and have children: what is below it matters to nobody.
                targets.append(open_target(pid, tree=tree, hints=False) if options.all_gpu else opened(pid))
            except ArgusError as failure:  # it ended meanwhile, or starts those that are meant
                refused.append(failure)
            except Exception as failure:  # what fails for a process costs that process
                what = f"process {pid} cannot be inspected ({type(failure).__name__}: {str(failure)[:200]})"
                odd.append(ArgusError(printable(what), debug.traceback_of(failure), EXIT_UNAVAILABLE))
                note(f"{odd[-1].message}: it is not traced")
    try:
        for pid in pids:
            targets.append(opened(pid))
    except ArgusError:
        for target in targets:
            target.close()
        raise
    if not targets:
        if odd or (refused and options.name is not None):
            raise (odd or refused)[0]
        raise ArgusError("every process found ended before it could be traced", "", EXIT_UNAVAILABLE)
    return targets


def _choose(options: Options) -> list[int]:
    """The processes that ``all_gpu`` and ``name`` mean now."""
    if options.name is None or options.all_gpu:
        return find_gpu_processes(options.name)
    return find_named_processes(options.name, roots=options.children)


def _no_target(options: Options) -> ArgusError:
    kind = "process that maps libcuda" if options.all_gpu else "process"
    what = f" whose command line contains '{options.name}'" if options.name is not None else ""
    hidden = hidden_processes() if options.all_gpu and os.geteuid() != 0 else 0
    processes = "1 process" if hidden == 1 else f"{hidden} processes"
    hint = f"{processes} cannot be inspected: run Argus with sudo" if hidden else ""
    return ArgusError(f"no {kind}{what} is running", hint or "`argus trace` alone lists what could be traced",
                      EXIT_UNAVAILABLE)  # fmt: skip


def _open_launcher(pid: int) -> Target:
    """A process whose children are followed: it need not use the GPU itself."""
    target = inspect(pid)
    with contextlib.suppress(OSError):
        target.libraries = find_libraries(pid)
    if not same_process(pid, target.start_ticks):
        raise ArgusError(f"process {pid} ended while Argus inspected it", "", EXIT_UNAVAILABLE)
    return target
