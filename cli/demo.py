"""``argus demo``: a job that never ran, with a fault that is not shown, diagnosed. Needs no root, GPU or program."""

from __future__ import annotations

import random

import click

from argus.diagnose.verdict import Verdict
from argus.model.units import ranks_text
from argus.simulate.faults import Fault, parse
from argus.simulate.mesh import Mesh
from argus.simulate.program import Program
from argus.simulate.write import Spec, truth, write
from argus.store.failures import spool_not_queried
from argus.store.open import open_store

from .options import CountRange, store_option

JOB = "demo"
KINDS = ("compute_straggler", "data_loading", "gc_pause", "host_contention", "kernel_issue_stall", "link_degradation")
"""Faults of ranks, each with a cause of its own."""
STEPS = 120
EXIT_WRONG = 1
_SEEDS = 1_000_000


@click.command()
@click.option("--seed", type=CountRange(min=0), help="The same seed, the same job. Default: another each time.")
@store_option
def command(seed: int | None, store_url: str | None) -> int:
    """Simulate a job of 16 ranks with a hidden fault, diagnose it, and show whether that was right.

    The job is stored like any other, under the name demo: look at it with the commands that are printed.

    \b
      argus demo
      argus demo --seed 3
      argus store rm demo                     removes what it stored
    """
    seed = random.randrange(_SEEDS) if seed is None else seed
    mesh = Mesh.of(16, None, 2, 2, 1, 1, 8)
    fault = parse(f"{KINDS[seed % len(KINDS)]}:loud:from={STEPS // 3}")
    spec = Spec(mesh, Program(micro_batches=4), faults=[fault], steps=STEPS, seed=seed, kernels=4)
    with open_store(store_url) as store:
        if store.spooled:
            raise spool_not_queried(store.target)
        click.echo(f"A job of 16 ranks on 2 hosts, {STEPS} steps, with a fault somewhere (--seed {seed}) …\n")
        made = write(store, JOB, spec)
        # After the job is made: diagnosis is not needed to say that a store cannot be had.
        from argus.diagnose.save import save
        from argus.diagnose.stored import diagnose_store

        from .diagnose import print_verdict

        verdict = diagnose_store(store, JOB, made.run)
        save(store, verdict)
        print_verdict(verdict, with_sql=False, detail=False)
        planted = truth(spec, JOB, made)["faults"][0]
    where = ranks_text(fault.ranks)
    click.echo(f"\nplanted: {fault.kind} of {where} from step {planted['steps'][0]} on, {planted['slowdown']:.2f}x")
    right = found(verdict, fault)
    click.echo(f"the first finding is {'right' if right else 'not what was planted'}")
    return 0 if right else EXIT_WRONG


def found(verdict: Verdict, fault: Fault) -> bool:
    """Whether the first finding is of the fault's kind and names a rank of it."""
    if not verdict["findings"]:
        return False
    first = verdict["findings"][0]
    return first["kind"] == fault.kind and not set(first["ranks"]).isdisjoint(fault.ranks)
