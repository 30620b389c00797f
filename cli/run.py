"""``argus run``: starts a command and traces it from its first call."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from argus.cupti.arm import NVTX_VARIABLE, Arming, arm, find_cupti
from argus.cupti.collector import CuptiOptions
from argus.live.account import Account
from argus.live.command import HELD_S, SIGNALLED, Holder, Watched, Watcher, find_user
from argus.live.command import run as run_command
from argus.model.errors import EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError
from argus.model.text import harmless, printable
from argus.model.units import span_text
from argus.system import files, secrets

from . import interrupt
from .options import (
    CountRange,
    diagnose_option,
    flops,
    gpu_share_option,
    host_option,
    max_overhead_option,
    new_job_name,
    peak_tflops_option,
    raw_option,
    redact_option,
    step_flops_option,
    store_option,
)
from .output import styled

if TYPE_CHECKING:
    from argus.diagnose.follow.watch import Watch
    from argus.live.tracer import Tracer
    from argus.store.open import Store

READY_TIMEOUT_S = 60.0
"""A command does not wait longer than this for Argus."""
CUPTI_WAIT_MS = 1000
"""``cuInit`` of a traced process does not wait longer than this for GPU times to begin."""

ROUND_EVERY_S = 1.0
"""How often the diagnosis, which has a pace of its own, is given the jobs and asked for its findings."""

DID_NOT_START = "the helper did not start in it: ARGUS_CUPTI=0, a launcher, or it could make no shared memory"


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] COMMAND [ARGUMENT]...")
@click.option(
    "--job",
    type=new_job_name,
    metavar="NAME",
    help="Name of the job. Default: from the launcher's environment.",
)
@click.option("--run", "run", type=CountRange(1, 2**32 - 1), help="Number of the run.")
@click.option("--log", metavar="FILE", help="Write Argus's own lines to this file instead of standard error.")
@click.option(
    "--account",
    "account_file",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write whether it is traced, and what the command alone took (wall and CPU time, exit code), as JSON.",
)
@click.option("--user", metavar="NAME", help="Run the command as this user. Default: as Argus itself runs.")
@gpu_share_option
@click.option("--nvtx", is_flag=True, help="Record NVTX ranges of the command as markers.")
@raw_option
@step_flops_option
@peak_tflops_option
@max_overhead_option
@host_option
@redact_option
@diagnose_option
@click.option("--strict", is_flag=True, help="Do not run the command if it cannot be traced.")
@store_option
def command(
    words: tuple[str, ...],
    job: str | None,
    run: int | None,
    log: str | None,
    account_file: Path | None,
    user: str | None,
    gpu_share: float,
    nvtx: bool,
    raw: str,
    step_flops: float,
    peak_tflops: float,
    max_overhead: float,
    host: str,
    redact: tuple[str, ...],
    diagnose: bool,
    strict: bool,
    store_url: str | None,
) -> int:
    """Run a command and trace it: its GPU times, launches, copies, waits and collectives.

    The command waits until the probes are attached, and then runs as it would without Argus: same input, output,
    signals and exit code. Every process that it starts is followed, so it may be a launcher (torchrun, mpirun, a
    script). If Argus cannot trace, it reports that in one line, and the command runs untraced, unless --strict.

    Under sudo the command runs as root, as with any sudo; --user gives it another user.

    \b
      sudo argus run -- python train.py
      sudo argus run --user $USER --log argus.log -- torchrun --nproc-per-node 8 train.py
      sudo argus run --job pretrain --run 7 -- mpirun -np 4 ./solver
    """
    utilization = flops(step_flops, peak_tflops)
    try:
        output = 2 if log is None else files.open_log(Path(log))
    except OSError as failure:
        raise ArgusError(f"{log} cannot be written: {failure.strerror}", "", EXIT_USAGE) from failure

    def say(text: str) -> None:
        os.write(output, harmless(f"argus: {text}\n").encode(errors="backslashreplace"))

    environment = secrets.without(os.environ)
    run_as = find_user(user) if user else None
    cupti = CuptiOptions(markers=nvtx, share=gpu_share)
    arming = arm(environment, wait_ms=CUPTI_WAIT_MS)
    holder = Holder(words, environment, run_as, lambda: find_cupti(environment, words) if nvtx else None)
    try:
        root = os.getpid()
        watcher = Watcher(
            lambda watched: _trace(
                watched,
                root,
                job,
                run,
                store_url,
                cupti,
                arming,
                utilization,
                raw,
                max_overhead,
                host,
                redact,
                diagnose,
                log is not None,
            ),
            output,
        )
        try:
            state = watcher.wait_until_ready(READY_TIMEOUT_S)
        except BaseException:
            watcher.give_up()
            raise
    finally:
        holder.let_go()
    try:
        account = None if account_file is None else Account(account_file, state)
    except ArgusError:
        watcher.give_up()
        raise
    if holder.gave_up:
        say(f"what the command loads was not found within {span_text(HELD_S)}: its first calls may be missing")
    if state == "on":
        environment.update(arming.changes)
        also = f", NVTX ranges: {_record_nvtx(environment, holder.found)}" if nvtx else ""
        say(f"tracing; GPU times: {'armed' if arming.on else arming.state}{also}")
    elif strict:
        raise ArgusError(f"the command was not run: tracing is {state}", "", EXIT_UNAVAILABLE)
    else:
        say(f"tracing is {state}")
    try:
        code = run_command(words, environment, run_as, account)
    except BaseException:
        watcher.give_up()
        raise
    if state == "on":
        _finish(watcher, say, signalled=code > SIGNALLED)
    return code


def _finish(watcher: Watcher, say: Callable[[str], None], *, signalled: bool) -> None:
    """Waits until what was traced is stored. ``signalled``: a signal ended the command, such as a Ctrl-C; whoever waits
    for the prompt learns what for."""
    notice = None
    if signalled:
        notice = interrupt.in_a_while(interrupt.GRACE_S / 2, lambda: say("storing what is left (Ctrl-C gives it up)"))
    try:
        watcher.finish()
    except KeyboardInterrupt:
        watcher.give_up()
        say("stopped at once; rows that were not stored yet are lost")
    else:
        if watcher.code is None:
            say("tracing ended before the command did")
    finally:
        if notice is not None:
            notice.cancel()


def _record_nvtx(environment: dict[str, str], library: Path | None) -> str:
    """Lets NVTX load CUPTI, which records its ranges; returns the state."""
    if environment.get(NVTX_VARIABLE):
        return f"off: {NVTX_VARIABLE} is taken by {environment[NVTX_VARIABLE]}"
    if library is None:
        return f"off: no libcupti was found; set {NVTX_VARIABLE} to yours"
    environment[NVTX_VARIABLE] = str(library)
    return f"on, by {library}"


def _trace(
    watched: Watched,
    root: int,
    job: str | None,
    run: int | None,
    store_url: str | None,
    cupti: CuptiOptions,
    arming: Arming,
    utilization: tuple[float, float],
    raw: str,
    max_overhead: float,
    host: str,
    redact: tuple[str, ...],
    diagnose: bool,
    meanwhile: bool,
) -> int:
    """What the watcher does: traces a process and its descendants until the command has ended.

    Args:
        watched: Whoever starts the command.
        root: The process.
        job, run, store_url: As the user gave them.
        cupti: How to collect GPU times.
        arming: Whether the command has the helper.
        utilization: FLOPs of a step, and what a GPU can do in a second; 0: not given.
        raw: Which GPU operations are stored one by one.
        max_overhead: What observing may cost the job, percent of its time.
        host: Name of this node; empty: its own.
        redact: What is not stored besides secrets.
        diagnose: Diagnose the job while it is traced.
        meanwhile: Print notes and findings at once, not at the end: it would stand amid the command's own output.
    """
    # Here, not above: whoever starts the command stays small, and must have no threads when it forks.
    from argus.diagnose.follow.watch import Watch
    from argus.live.options import Options
    from argus.live.tracer import Tracer
    from argus.store.open import open_store
    from argus.system.limits import frugal

    options = Options(
        pids=(root,),
        children=True,
        job=job,
        run=run,
        cupti_options=cupti,
        not_armed=DID_NOT_START if arming.on else arming.state.removeprefix("off: "),
        all_armed=arming.on,
        stacks=True,
        step_flops=utilization[0],
        peak_flops=utilization[1],
        raw=raw,
        max_overhead=max_overhead / 100,
        host=host,
        redact=redact,
    )
    store = open_store(store_url)
    tracer = Tracer(store, options)
    watch = Watch(store, tracer.host) if diagnose else None
    with frugal():  # this process alone: the command is another one's child
        return _until_over(tracer, store, watch, watched, meanwhile=meanwhile)


def _until_over(tracer: Tracer, store: Store, watch: Watch | None, watched: Watched, *, meanwhile: bool) -> int:
    from rich.console import Console

    from .closing import sum_up
    from .verdict_text import news_lines

    tracer.start()
    watched.ready()
    next_round_s = 0.0
    while not watched.over():
        begun = time.monotonic()
        tracer.poll()
        if watch is not None and begun >= next_round_s:
            next_round_s = begun + ROUND_EVERY_S
            with tracer.bulkheads.part("the diagnosis"):
                watch.look({(job.name, job.run): job.owner for job in tracer.jobs})
                tracer.raise_sampling(watch.lines())
                for job in tracer.jobs:
                    tracer.bulkheads.diagnosed(job, watch.detectors_failed(job.name, job.run))
        if meanwhile:
            for note in tracer.news():
                click.echo(printable(f"note: {note}"))
            for line in news_lines(watch.take() if watch is not None else ()):
                click.echo(printable(line))
        time.sleep(max(0.0, tracer.pace_s - (time.monotonic() - begun)))
    if watch is not None:
        watch.end()
    lost = tracer.stop()
    if watch is not None:
        watch.close()
    return sum_up(Console(file=styled(sys.stdout)), tracer, lost, store if watch is not None else None)
