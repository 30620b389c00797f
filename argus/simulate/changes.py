"""What is different in a whole run, from its first step on, on all ranks alike or on one host: a setting, an image, a
host that was swapped. A fault (:mod:`argus.simulate.faults`) is of some ranks, a change is of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from argus.model.errors import EXIT_USAGE, ArgusError
from argus.simulate.engine import COPY_NS
from argus.simulate.kernels import CATALOG
from argus.simulate.mesh import Mesh
from argus.simulate.program import BACKWARD_WORK, Program

KINDS = ("kernel", "compute", "bandwidth", "void", "loader", "host")
"""What can be changed: see :func:`parse_change`."""
_HINT = (
    "kernel=NAME:FACTOR, compute=FACTOR, bandwidth=dp|tp|ep|pp:FACTOR, void=SHARE, loader=SHARE or host=NUMBER:FACTOR"
)


@dataclass(frozen=True)
class Change:
    """One thing that is different.

    Attributes:
        kind: One of :data:`KINDS`.
        subject: The kernel, the dimension, or the number of the host; empty: all.
        size: Of a kernel, of computation, of a host: factor of its time. Of a bandwidth: factor of it. Of void and the
            loader: share of a step that the GPUs wait longer.
    """

    kind: str
    subject: str
    size: float


@dataclass(frozen=True)
class Setup:
    """What the changes make of a run: its program, and the names of its hosts (empty: the usual ones)."""

    program: Program
    hosts: tuple[str, ...] = ()


def parse_change(text: str) -> Change:
    """A change as the command line gives it: ``kernel=NAME:1.1``, ``compute=1.05``, ``bandwidth=dp:0.5``,
    ``void=0.05``, ``loader=0.1`` or ``host=1:1.1``.

    Raises:
        ArgusError: It is none.
    """
    kind, _, rest = text.partition("=")
    subject, _, number = rest.rpartition(":")
    try:
        size = float(number)
    except ValueError:
        size = -1.0
    if kind not in KINDS or not 0 < size < 1000 or bool(subject) != (kind in ("kernel", "bandwidth", "host")):
        raise ArgusError(f"'{text}' is not a change", _HINT, EXIT_USAGE)
    if kind == "kernel" and subject not in (name for _, name, *_ in CATALOG):
        raise ArgusError(f"there is no kernel '{subject}'", ", ".join(name for _, name, *_ in CATALOG), EXIT_USAGE)
    if kind == "bandwidth" and subject not in ("dp", "tp", "ep", "pp"):
        raise ArgusError(f"there is no dimension '{subject}'", "dp, tp, ep or pp", EXIT_USAGE)
    if kind == "host" and not subject.isdecimal():
        raise ArgusError(f"'{subject}' is not the number of a host", _HINT, EXIT_USAGE)
    return Change(kind, subject, size)


def set_up(program: Program, mesh: Mesh, changes: Sequence[Change]) -> Setup:
    """The run with these changes.

    Raises:
        ArgusError: The job has no such host.
    """
    setup = Setup(program)
    for change in changes:
        setup = _with(setup, mesh, change)
    return setup


def _with(setup: Setup, mesh: Mesh, change: Change) -> Setup:
    program = setup.program
    if change.kind == "kernel":
        phase, share = next((phase, share) for phase, name, share, *_ in CATALOG if name == change.subject)
        factors = dict(zip(("forward", "backward", "optimizer"), program.phase_factors, strict=True))
        factors[phase] *= 1 + share * (change.size - 1)
        program = replace(
            program, phase_factors=(factors["forward"], factors["backward"], factors["optimizer"]),
            kernel_factors=(*program.kernel_factors, (change.subject, change.size)),
        )  # fmt: skip
    elif change.kind == "compute":
        forward, backward, optimizer = (factor * change.size for factor in program.phase_factors)
        program = replace(program, phase_factors=(forward, backward, optimizer))
    elif change.kind == "bandwidth":
        of = {"dp": "grad_ms", "tp": "tp_ms", "ep": "ep_ms", "pp": "p2p_ms"}[change.subject]
        program = replace(program, **{of: getattr(program, of) / change.size})
    elif change.kind == "void":
        program = replace(program, void_ms=program.void_ms + change.size * _step_ms(program, mesh))
    elif change.kind == "loader":
        # The optimiser hides a part of what loading takes: a share that shows comes on top of it.
        hidden = max(0.0, program.optimizer_ms - program.data_ms)
        program = replace(program, data_ms=program.data_ms + hidden + change.size * _step_ms(program, mesh))
    else:
        host = int(change.subject)
        if host >= mesh.hosts:
            raise ArgusError(f"there is no host {host} of {mesh.hosts}", "They are numbered from 0", EXIT_USAGE)
        names = list(setup.hosts or (f"node{number:04d}" for number in range(mesh.hosts)))
        names[host] = f"spare{host:04d}"
        ranks = np.flatnonzero(mesh.host == host).tolist()
        program = replace(program, slow_ranks=(*program.slow_ranks, *((rank, change.size) for rank in ranks)))
        return Setup(program, tuple(names))
    return replace(setup, program=program)


def _step_ms(program: Program, mesh: Mesh) -> float:
    """A step, about: computation, and of the communication what nothing hides."""
    passes = program.micro_batches * (1 + BACKWARD_WORK)
    tensor = program.tp_ms * passes if mesh.tp > 1 else 0.0
    gradients = program.grad_ms / program.buckets if mesh.dp > 1 else 0.0
    return program.step_ns(mesh) / 1e6 + tensor + gradients + COPY_NS / 1e6
