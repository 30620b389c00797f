"""``argus simulate``: store the trace of a training job that never ran, with faults that are known."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path

import click

from argus.model.errors import EXIT_FAILURE, EXIT_USAGE, ArgusError
from argus.model.text import counted
from argus.model.units import ranks_text, seconds
from argus.simulate.changes import parse_change
from argus.simulate.faults import DOSES, FAULTS, parse
from argus.simulate.mesh import Mesh
from argus.simulate.noise import Noise
from argus.simulate.program import Program
from argus.simulate.write import Spec, truth, write
from argus.store.failures import load_command
from argus.store.open import open_store
from argus.system import files

from .options import CountRange, NumberRange, format_option, new_job_name, store_option
from .output import redraw


@click.command()
@click.option("--ranks", type=CountRange(min=1), help="Ranks of the job: dp x tp x pp.")
@click.option("--dp", type=CountRange(min=1), help="Data-parallel ranks. Default: what --ranks leaves.")
@click.option("--tp", type=CountRange(min=1), default=1, show_default=True, help="Tensor-parallel ranks.")
@click.option("--pp", type=CountRange(min=1), default=1, show_default=True, help="Pipeline stages.")
@click.option("--ep", type=CountRange(min=1), default=1, show_default=True, help="Expert-parallel ranks, of --dp.")
@click.option("--vpp", type=CountRange(min=1), default=1, show_default=True, help="Model chunks of a stage.")
@click.option("--ranks-per-host", type=CountRange(min=1), default=8, show_default=True, help="GPUs of a host.")
@click.option("--micro-batches", type=CountRange(min=1), help="Of a step. Default: 2 for each stage.")
@click.option("--steps", type=CountRange(min=1), default=100, show_default=True, help="Steps that are traced.")
@click.option("--seed", type=CountRange(min=0), default=0, show_default=True, help="The same seed, the same job.")
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="KIND[:DOSE][:WHERE...]",
    help=f"What is wrong; repeat it for several. KIND: {', '.join(FAULTS)}. DOSE: {', '.join(DOSES)}. "
    "WHERE: ranks=0,3-5 or half (of the data-parallel ranks of a stage), from=STEP, steps=N, ramp=N.",
)
@click.option(
    "--change",
    "changes",
    multiple=True,
    metavar="WHAT=SIZE",
    help="What is different from the first step on, for `argus compare`: kernel=NAME:1.1, compute=1.05, "
    "bandwidth=dp:0.5, void=0.05, loader=0.1, host=1:1.1.",
)
@click.option("--run-spread", type=NumberRange(0, 0.2), default=0.0, show_default=True,
              help="By how much runs of one job differ (standard deviation): clusters, 0.005 to 0.015.")  # fmt: skip
@click.option("--model", type=CountRange(min=0), metavar="SEED",
              help="What the job's kernels are: runs of one program have the same. Default: --seed.")  # fmt: skip
@click.option("--variable-length", is_flag=True, help="Sequences vary in length.")
@click.option("--collectives-per-step", type=CountRange(min=1), default=8, show_default=True,
              help="Collectives of a rank and step that are stored, roughly.")  # fmt: skip
@click.option("--kernels", type=CountRange(min=0), default=0, show_default=True,
              help="Ranks whose kernels are summed up, those of faults first: some ms each a step.")  # fmt: skip
@click.option(
    "--environment",
    multiple=True,
    metavar="FACT=VALUE",
    help="What all ranks ran on and with, such as torch.version=2.9 or env.NCCL_ALGO=Ring; repeat it for several.",
)
@click.option("--layout", is_flag=True, help="Also store the parallel layout, which a real trace does not contain.")
@click.option("--one-clock", is_flag=True, help="Give all hosts the same clock. Otherwise their clocks are ms apart.")
@click.option(
    "--job", type=new_job_name, default="simulated", show_default=True, metavar="NAME", help="The job's name."
)
@click.option(
    "--truth",
    "truth_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the faults that were simulated, and who has them, to this file.",
)
@format_option()
@store_option
def command(
    ranks: int | None, dp: int | None, tp: int, pp: int, ep: int, vpp: int, ranks_per_host: int,
    micro_batches: int | None, steps: int, seed: int, faults: tuple[str, ...], changes: tuple[str, ...],
    run_spread: float, model: int | None, variable_length: bool, environment: tuple[str, ...],
    collectives_per_step: int, kernels: int, layout: bool, one_clock: bool, job: str, truth_file: Path | None,
    output_format: str, store_url: str | None,
) -> None:  # fmt: skip
    """Store the trace of a training job that never ran, with faults that are known.

    \b
      argus simulate --ranks 8 --fault compute_straggler
      argus simulate --ranks 64 --tp 4 --pp 4 --fault data_loading:quiet:ranks=30:from=40 --truth truth.json
      argus simulate --ranks 10240 --tp 8 --pp 16
      argus diagnose
    """
    mesh = Mesh.of(ranks, dp, tp, pp, ep, vpp, ranks_per_host)
    batches = micro_batches or (2 * mesh.pp if mesh.pp > 1 else 1)
    program = Program(micro_batches=batches, variable=variable_length)
    spec = Spec(
        mesh, program, Noise(run=run_spread), changes=[parse_change(one) for one in changes], model=model,
        faults=[parse(one) for one in faults], steps=steps, seed=seed, calls=collectives_per_step,
        skewed=not one_clock, layout=layout, kernels=kernels, environment=facts_of(environment),
    )  # fmt: skip
    shown = sys.stderr.isatty()

    def progress(what: str, share: float) -> None:
        if shown:
            redraw(f"{what}: {share:4.0%}")
            if share >= 1:
                click.echo(err=True)

    began = time.perf_counter()
    with open_store(store_url) as store:
        made = write(store, job, spec, progress)
        url = store.url
        following = f"argus diagnose --job {shlex.quote(job)}"
        if store.spooled:
            following = f"{load_command(store.target)} && {following}"
    took_s = time.perf_counter() - began
    known = truth(spec, job, made)
    if truth_file is not None:
        try:
            with files.replacing(truth_file) as file:
                file.write(json.dumps(known, indent=1).encode() + b"\n")
        except OSError as failure:
            raise ArgusError(f"{truth_file} cannot be written: {failure.strerror}", "", EXIT_FAILURE) from None
    if output_format == "json":
        click.echo(json.dumps({**known, "store": url, "rows": made.rows, "seconds": round(took_s, 2)}, indent=2))
        return
    total = sum(made.rows.values())
    click.echo(
        f"job {job}, run {made.run}: {counted(mesh.size, 'rank')} on {counted(mesh.hosts, 'host')} "
        f"(dp {mesh.dp}, tp {mesh.tp}, pp {mesh.pp}, ep {mesh.ep}, vpp {mesh.vpp}), {counted(known['steps'], 'step')}"
    )
    for fault in known["faults"]:
        click.echo(
            f"  {fault['kind']} ({fault['dose']}: {fault['size']:g}) of {ranks_text(fault['ranks'])}, "
            f"steps {fault['steps'][0]} to {fault['steps'][1]}: {fault['slowdown']:.2f}x"
        )
    click.echo(f"{total:,} rows in {seconds(took_s)}, stored in {url}. Next: {following}")


def facts_of(words: tuple[str, ...]) -> dict[str, str]:
    """Facts of an environment as the command line gives them.

    Raises:
        ArgusError: One has no name or no ``=``.
    """
    pairs = [word.partition("=") for word in words]
    if wrong := next(
        (word for word, (name, equals, _) in zip(words, pairs, strict=True) if not name or not equals), None
    ):
        raise ArgusError(f"'{wrong}' is no fact of an environment", "FACT=VALUE, such as torch.version=2.9", EXIT_USAGE)
    return {name: value for name, _, value in pairs}
