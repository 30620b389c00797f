"""``argus trace``: traces running processes until they end or the user has seen enough."""

from __future__ import annotations

import os

import click

from argus.capture import DEFAULT_OFF_CPU_NS
from argus.capture.reader import reader
from argus.model.errors import EXIT_USAGE, ArgusError
from argus.store.open import open_store
from argus.system import debug, privileges

from .grammar import parse_open_steps
from .options import (
    CountRange,
    NumberRange,
    Span,
    all_pids,
    diagnose_option,
    flops,
    gpu_share_option,
    host_option,
    max_overhead_option,
    name_given,
    new_job_name,
    peak_tflops_option,
    pid_options,
    rate_option,
    raw_option,
    raw_rate_option,
    redact_option,
    step_flops_option,
    store_option,
)
from .status import Status


def _steps(_: click.Context, __: click.Parameter, value: str | None) -> int | None:
    """The last step that is waited for. A trace begins with step 0, so that only an end can be chosen."""
    if value is None:
        return None
    first, last = parse_open_steps(value)
    if not last or (first and first != last):
        hint = "Write --steps :200, or --steps 200; which steps are shown is chosen later, by argus diagnose --steps"
        raise ArgusError(f"a trace cannot begin at a step: '{value}'", hint, EXIT_USAGE)
    return last


@click.command()
@pid_options("Process to trace")
@click.option("--all-gpu", is_flag=True, help="Trace every process that maps libcuda now.")
@click.option(
    "--name",
    metavar="TEXT",
    callback=name_given,
    help="Trace every program whose command line contains TEXT; with --all-gpu only those that map libcuda.",
)
@click.option("--children", is_flag=True, help="Follow forks and execs: give the launcher's PID (torchrun, mpirun).")
@click.option("--duration", type=Span(), metavar="SPAN", help="End the trace after 30s, 5m, 2h.")
@click.option(
    "--steps", callback=_steps, metavar=":N", help="End the trace once every rank has made N steps: :200, or 200."
)
@click.option("--run", type=CountRange(1, 2**32 - 1), help="Number of the run; the same on all nodes.")
@click.option(
    "--job",
    type=new_job_name,
    metavar="NAME",
    help="Name of the job. Default: from the launcher's environment.",
)
@click.option("--launch-durations", is_flag=True, help="Time launches too (a full launch queue); costs 2 µs each.")
@click.option(
    "--buffer-mb",
    type=CountRange(1, 1024),
    default=16,
    show_default=True,
    help="Size of the ring buffer for CUDA calls.",
)
@click.option(
    "--cupti",
    type=click.Choice(["auto", "off", "inject"]),
    default="auto",
    show_default=True,
    help="GPU times of armed processes; inject: arm running ones first, which stops them for milliseconds.",
)
@gpu_share_option
@click.option("--inject", is_flag=True, help="The same as --cupti inject.")
@click.option(
    "--cupti-launches/--no-cupti-launches",
    default=True,
    show_default=True,
    help="Match kernels with the calls that launched them.",
)
@click.option(
    "--stacks/--no-stacks",
    default=True,
    show_default=True,
    help="Sample the stacks of threads, on the CPU and waiting.",
)
@rate_option
@click.option(
    "--off-cpu-ms",
    type=NumberRange(min=0),
    default=DEFAULT_OFF_CPU_NS / 1e6,
    show_default=True,
    metavar="MS",
    help="Record waits off the CPU of this length or longer, with stack and reason; 0: none.",
)
@raw_option
@raw_rate_option
@step_flops_option
@peak_tflops_option
@max_overhead_option
@host_option
@redact_option
@diagnose_option
@click.option("--plain", is_flag=True, help="Print plain lines, also on a terminal.")
@store_option
def command(
    given_pids: tuple[tuple[int, ...], ...],
    pids: tuple[tuple[int, ...], ...],
    all_gpu: bool,
    name: str | None,
    children: bool,
    duration: float | None,
    steps: int | None,
    job: str | None,
    run: int | None,
    launch_durations: bool,
    buffer_mb: int,
    cupti: str,
    cupti_launches: bool,
    gpu_share: float,
    inject: bool,
    stacks: bool,
    rate_hz: int | None,
    off_cpu_ms: float,
    raw: str,
    raw_rate: float,
    step_flops: float,
    peak_tflops: float,
    max_overhead: float,
    host: str,
    redact: tuple[str, ...],
    diagnose: bool,
    plain: bool,
    store_url: str | None,
) -> int:
    """Trace running processes: kernel launches, copies, waits, collectives, and what their threads do.

    The processes are neither stopped nor changed: eBPF probes on libcuda, libcudart and libnccl report their calls, and
    are removed with Argus, even if it is killed. Rows go to the store while the trace runs.

    Kernels, copies and fills are timed on the GPU in processes that are armed (`argus run`, `argus arm`). Others are
    traced without GPU times, which Argus reports.

    The stacks of all threads, Python and native, are sampled in the kernel, and time off the CPU is recorded with its
    reason, so that programs that use no GPU can be traced, too.

    Cost to the target: about 1 to 3 µs for each traced call (`scripts/bench probe`).

    \b
      sudo argus trace                       lists what could be traced, and asks
      sudo argus trace 4821
      sudo argus trace -p 4821,4822 --duration 60s
      sudo argus trace --name train.py
      sudo argus trace --children $(pgrep -o torchrun)
      sudo argus trace --all-gpu --steps :200 && sudo argus diagnose
    """
    chosen = all_pids(given_pids, pids)
    # Before anything has a thread, and before the engine of an embedded store begins. The reader keeps other rights.
    reader.shared.begin()
    if not (chosen or all_gpu or name):
        from .pick import pick_pids

        reader.shared.settle()
        chosen = pick_pids("trace")
        reader.shared.begin()  # where there was none for the list, the trace says why
    privileges.keep_for_trace(inject=inject or cupti == "inject")
    utilization = flops(step_flops, peak_tflops)
    store = open_store(store_url)
    status = Status(_what_begins(chosen), plain=plain)
    try:
        # Not for what may not be there: it would leave a store without a trace.
        if chosen and all(os.path.exists(f"/proc/{pid}") for pid in chosen):
            store.begin()
        # What follows imports for half a second.
        from argus.cupti.collector import CuptiOptions
        from argus.live.options import Options

        from .session import trace_session
    except BaseException:
        status.done()
        raise
    debug.note("start: imported")
    options = Options(
        pids=chosen,
        all_gpu=all_gpu,
        name=name,
        children=children,
        job=job,
        run=run,
        launch_durations=launch_durations,
        launch_ring_bytes=1 << (buffer_mb * (1 << 20) - 1).bit_length(),
        cupti="inject" if inject else cupti,
        cupti_options=CuptiOptions(api=cupti_launches, share=gpu_share),
        stacks=stacks,
        rate_hz=rate_hz,
        off_cpu_ns=round(off_cpu_ms * 1e6) or None,
        step_flops=utilization[0],
        peak_flops=utilization[1],
        raw=raw,
        raw_rows_s=raw_rate,
        max_overhead=max_overhead / 100,
        host=host,
        redact=redact,
    )
    return trace_session(store, options, duration=duration, steps=steps, plain=plain, diagnose=diagnose, status=status)


def _what_begins(pids: tuple[int, ...]) -> str:
    if not pids:
        return "looking for processes"
    shown = ", ".join(map(str, pids[:8])) + (", …" if len(pids) > 8 else "")
    return f"attaching to process {shown}" if len(pids) == 1 else f"attaching to processes {shown}"
