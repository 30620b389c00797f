"""Plays the steps of a job: what each GPU and each CPU does when.

A GPU computes in its stage's order. A computation begins when the one before it is over, its input has come and its
first kernel was launched. Tensor-parallel (and expert-parallel) peers end it together: whoever is early waits in
communication. Gradients are reduced in buckets among data-parallel ranks, behind the last backward pass as far as that
goes, and the norm of all gradients at the end of the step among all ranks.

A CPU launches kernels ahead of its GPU until :attr:`Program.queue` of them wait, and waits for the GPU where the
program does: it reads the norm every :attr:`Program.sync_every` steps. Loading a batch, compiling and pauses are the
CPU's.

Everything is an array over (pp, dp, tp) or, for one stage, (dp, tp), in float64 ns since the job's begin.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from argus.semantics.groups.schedule import BACKWARD, Op, schedule
from argus.simulate.faults import Effects, Fault
from argus.simulate.mesh import Mesh
from argus.simulate.noise import Dice, Noise, StepNoise
from argus.simulate.program import BACKWARD_WORK, Program

Float = NDArray[np.float64]
Bool = NDArray[np.bool_]

LATENCY_NS = 8e3
"""From a launch to the kernel's begin on an idle GPU: 5 to 10 us (NVIDIA, "Getting started with CUDA graphs")."""
CALL_NS = 5e3
"""Time inside a call of NCCL that only enqueues."""
COPY_NS = 50e3
"""Copy of a batch of tokens to the GPU."""
P2P_ELEMENTS, TP_ELEMENTS, EP_ELEMENTS, BUCKET_ELEMENTS = 4 << 20, 8 << 20, 2 << 20, 64 << 20
"""Elements of what is sent: activations of 1,024 tokens and 4,096 channels; gradients."""
NORM_NS = 60e3
"""An all-reduce of one number."""
OPTIMIZER_KERNELS = 30
PHASES = (
    "forward", "backward", "optimizer", "all_reduce", "all_to_all", "send_recv", "pipeline_bubble", "memcpy",
    "data_loading", "idle",
)  # fmt: skip
"""What a GPU's time goes to, as ``gpu_phases.phase`` has it."""


@dataclass(frozen=True)
class Call:
    """A collective, send or receive that every rank of a stage makes once a step.

    Attributes:
        dimension: Whose communicator, as in :attr:`Mesh.groups`.
        op: As ``collectives.op`` has it.
        count: Elements.
        peer: Stage that is sent to or received from; -1: none.
    """

    dimension: str
    op: str
    count: int
    peer: int = -1


@dataclass
class Made:
    """A call of all ranks of a stage: when it was made (NaN: it was not), and when its kernel began and ended on the
    GPU, shape (dp, tp)."""

    call: Call
    at: Float
    begin: Float
    end: Float


@dataclass
class Step:
    """One step of all ranks. Times in ns; shapes (pp, dp, tp) unless noted.

    Attributes:
        number: From 0.
        cpu_begin, cpu_end: Calls of the last collective of the step before, and of this one.
        gpu_begin, gpu_end: When the norm before, and this one, was there on the GPU.
        phases: Of each of :data:`PHASES` but the last: (phases, pp, dp, tp).
        hidden: Communication behind computation: gradients' all-reduces, sends and receives.
        calls: Of each stage, in the program's order.
        launches: By (kind, kernel): when it was made, and the time inside (-1: not measured).
        module_ns, pause_ns, queued_ns: Loading code, collecting garbage, without a CPU; 0: none.
        layers: Of each rank, over what the program has.
        spent: Whether no rank came to the end of the step; then only ``calls`` count, NaN where not made.
    """

    number: int
    cpu_begin: Float
    cpu_end: Float
    gpu_begin: Float
    gpu_end: Float
    phases: Float
    hidden: dict[str, Float]
    calls: list[list[Made]]
    launches: dict[tuple[str, str], tuple[Float, Float]]
    module_ns: Float
    pause_ns: Float
    queued_ns: Float
    layers: Float
    spent: bool = False


class _Queue:
    """Kernels of a stage that were launched: when the n-th one ended on the GPU, shape (dp, tp)."""

    def __init__(self) -> None:
        self._parts: deque[tuple[float, float, Float, Float]] = deque()
        self.count = 0.0

    def add(self, kernels: float, start: Float, end: Float) -> None:
        self._parts.append((self.count, self.count + kernels, start, end))
        self.count += kernels

    def ended(self, number: float) -> Float | float:
        parts = self._parts
        while parts and parts[0][1] < number:
            parts.popleft()
        if not parts or number <= parts[0][0]:
            return -np.inf
        first, last, start, end = parts[0]
        return start + (number - first) / (last - first) * (end - start)


@dataclass
class _State:
    cpu: Float
    gpu: Float
    """When each GPU has done all that it was given."""
    begin: Float
    """The last collective's call."""
    gpu_begin: Float
    queues: list[_Queue]


def play(
    mesh: Mesh,
    program: Program,
    noise: Noise,
    faults: Sequence[Fault],
    steps: int,
    seed: int,
    p2p_calls: int = 2,
    tp_calls: int = 2,
) -> Iterator[Step]:
    """The steps of a job.

    Args:
        mesh: Its ranks.
        program: What they run.
        noise: What differs without faults.
        faults: What is wrong; their ranks are chosen (:func:`argus.simulate.faults.choose`).
        steps: How many.
        seed: Of the noise, which faults do not change.
        p2p_calls, tp_calls: Micro-batches whose sends and receives, and tensor-parallel all-reduces, are recorded.

    Raises:
        ArgusError: The schedule does not fit the mesh.
    """
    ops = schedule(mesh.pp, mesh.vpp, program.micro_batches)
    dice = Dice(noise, mesh, program.micro_batches, seed, variable=program.variable)
    cpu, gpu, begin, gpu_begin = np.zeros((4, *mesh.shape))
    state = _State(cpu, gpu, begin, gpu_begin, [_Queue() for _ in range(mesh.pp)])
    player = _Player(mesh, program, ops, p2p_calls, tp_calls)
    # One step goes before: a trace begins in the middle of a job.
    for number in range(-1, steps):
        effects = Effects.none(mesh, program.micro_batches, program.step_ns(mesh))
        for stage, share in program.light:
            effects.layers[stage] *= share
        for rank, factor in program.slow_ranks:
            effects.compute.reshape(-1)[rank] *= factor
        for fault in faults:
            fault.put(number, effects, mesh)
        done = player.step(number, state, effects, dice.step(number))
        if number >= 0:
            yield done
        if done.spent:
            return


@dataclass
class _Turn:
    """A step that is being played."""

    state: _State
    effects: Effects
    noise: StepNoise
    launch: Float
    phases: dict[str, Float]
    hidden: dict[str, Float]
    calls: list[list[Made]]
    ends: list[list[Float]]
    """When the computations of each stage ended, shape (dp, tp)."""


class _Player:
    """Plays one step after the other."""

    def __init__(self, mesh: Mesh, program: Program, ops: list[Op], p2p_calls: int, tp_calls: int) -> None:
        self.mesh, self.program, self.ops = mesh, program, ops
        self.p2p_calls, self.tp_calls = p2p_calls, tp_calls
        self.last = [max(op.number for op in ops if op.stage == stage) for stage in range(mesh.pp)]

    def step(self, number: int, state: _State, effects: Effects, noise: StepNoise) -> Step:
        mesh, program = self.mesh, self.program
        launch = program.launch_us * 1e3 * effects.launch
        phases = {name: np.zeros(mesh.shape) for name in PHASES}
        hidden = {"all_reduce": np.zeros(mesh.shape), "send_recv": np.zeros(mesh.shape)}
        calls: list[list[Made]] = [[] for _ in range(mesh.pp)]
        launches: dict[tuple[str, str], tuple[Float, Float]] = {}
        begin, gpu_begin = state.begin.copy(), state.gpu_begin.copy()
        silent = np.full(mesh.shape, -1.0)

        # The end of the step before: its norm is read, the optimiser runs.
        if (number + 1) % program.sync_every == 0:
            waited = np.maximum(state.cpu, state.gpu) + 10e3
            launches["sync", ""] = state.cpu, waited - state.cpu
            state.cpu = waited + 5e3
        launches["kernel", "multi_tensor_adam"] = state.cpu.copy(), silent
        start = np.maximum(state.gpu, state.cpu + LATENCY_NS)
        took = program.optimizer_ms * 1e6 * program.phase_factors[2] * (effects.compute * effects.layers) * noise.op[0]
        end = np.maximum(start + took, state.cpu + OPTIMIZER_KERNELS * launch + LATENCY_NS)
        phases["optimizer"] += took
        state.cpu = state.cpu + OPTIMIZER_KERNELS * launch
        state.gpu = end
        # The batch.
        state.cpu = state.cpu + program.data_ms * 1e6 * noise.data + effects.data_ns
        launches["memcpy_h2d", ""] = state.cpu.copy(), np.full(mesh.shape, 20e3)
        copied = np.maximum(state.gpu, state.cpu + LATENCY_NS)
        phases["data_loading"] += copied - state.gpu
        phases["memcpy"] += COPY_NS
        state.gpu = copied + COPY_NS
        state.cpu = state.cpu + 25e3
        if effects.module_ns.any():
            launches["module", ""] = state.cpu.copy(), effects.module_ns
            state.cpu = state.cpu + effects.module_ns
        state.cpu = state.cpu + effects.pause_ns + effects.queued_ns + effects.stall_ns + noise.spike_ns
        if program.void_ms:
            state.cpu = np.maximum(state.cpu, state.gpu) + program.void_ms * 1e6
        launches["kernel", "first"] = state.cpu.copy(), silent

        turn = _Turn(state, effects, noise, launch, phases, hidden, calls, [[] for _ in range(mesh.pp)])
        for op in self.ops:
            self._compute(op, turn)
        launches["kernel", "last"] = state.cpu.copy(), silent
        # The norm of all gradients.
        everybody = Call("world" if "world" in mesh.groups else "dp", "AllReduce", 1)
        norm_call = state.cpu + 30e3
        state.cpu = norm_call + CALL_NS
        ready = np.maximum(state.gpu + 20e3, norm_call + LATENCY_NS)
        over = np.full(mesh.shape, ready.max() + NORM_NS)
        for stage in range(mesh.pp):
            calls[stage].append(Made(everybody, norm_call[stage].copy(), ready[stage], over[stage]))
        phases["all_reduce"] += over - ready
        state.gpu, state.begin, state.gpu_begin = over, norm_call, over
        dead = effects.dead
        if dead.any():
            self._silence(dead, calls)
        return Step(
            number, begin, norm_call, gpu_begin, over,
            np.stack([phases[name] for name in PHASES[:-1]]), hidden, calls, launches,
            effects.module_ns, effects.pause_ns, effects.queued_ns + noise.spike_ns, effects.layers, bool(dead.any()),
        )  # fmt: skip

    def _silence(self, dead: Bool, calls: list[list[Made]]) -> None:
        """Takes away the calls that are not made when ranks stop: theirs, what their tensor-parallel peers would have
        called after the first two, and what the other stages of their pipelines would have after they first wait for
        what comes from the side of the dead. The others' CPUs run ahead to the end of the step."""
        peers = np.asarray(dead.any(axis=(0, 2)))[:, None]
        where = int(np.flatnonzero(dead.any(axis=(1, 2)))[0])
        for stage, made in enumerate(calls):
            received = [
                place
                for place, one in enumerate(made)
                if one.call.op == "Recv" and (one.call.peer > stage) == (where > stage)
            ]
            last = 1 if dead[stage].any() or not received else received[0]
            for place, one in enumerate(made):
                one.at[dead[stage] | (peers & (place > last))] = np.nan

    def _compute(self, op: Op, turn: _Turn) -> None:
        mesh, program, stage = self.mesh, self.program, op.stage
        state, effects, noise = turn.state, turn.effects, turn.noise
        phases, calls, launch = turn.phases, turn.calls[stage], turn.launch[stage]
        backward = op.kind == BACKWARD
        work = BACKWARD_WORK if backward else 1.0
        kernels = work * program.kernels / mesh.vpp
        queue = state.queues[stage]
        cpu = state.cpu[stage]
        ready = np.maximum(state.gpu[stage], cpu + LATENCY_NS)
        start = ready
        records_p2p = op.batch < self.p2p_calls
        if op.needs is not None:
            sender, place = op.needs
            sent = turn.ends[sender][place]
            link = np.maximum(effects.link[stage], effects.link[sender])
            transfer = program.p2p_ms * 1e6 * link * noise.transfer[op.number % 64]
            # Interleaved schedules receive ahead; 1F1B receives when it has nothing else to do.
            ahead = mesh.vpp > 1
            start = np.maximum(ready, sent + transfer) if ahead else np.maximum(ready, sent) + transfer
            exposed = np.minimum(start - ready, transfer)
            phases["send_recv"][stage] += exposed
            phases["pipeline_bubble"][stage] += start - ready - exposed
            turn.hidden["send_recv"][stage] += transfer - exposed
            if records_p2p:
                # What is received ahead takes as long, on a stream of its own.
                begin, end = (np.minimum(ready, sent), sent + transfer) if ahead else (ready, start)
                calls.append(Made(Call("pp", "Recv", P2P_ELEMENTS, sender), cpu.copy(), begin, end))
        took = (
            program.forward_ms * 1e6 * program.phase_factors[int(backward)] * work / mesh.vpp
            * (effects.compute * effects.layers)[stage]
            * noise.op[op.number, stage]
            * (noise.lengths[op.batch] * effects.lengths[op.batch])[:, None]
        )  # fmt: skip
        phases["backward" if backward else "forward"][stage] += took
        end = np.maximum(start + took, cpu + kernels * launch + LATENCY_NS)
        reduced: Made | None = None
        exchanged: Made | None = None
        if mesh.tp > 1:
            comm = program.tp_ms * 1e6 * work / mesh.vpp
            together = end.max(axis=1, keepdims=True) + comm * noise.transfer[(op.number + 7) % 64]
            phases["all_reduce"][stage] += together - end
            own, end = end, np.broadcast_to(together, end.shape)
            if op.number < self.tp_calls:
                reduced = Made(Call("tp", "AllReduce", TP_ELEMENTS), cpu, own, end)
        if mesh.ep > 1:
            split = end.reshape(-1, mesh.ep, mesh.tp)
            together = split.max(axis=1, keepdims=True) + program.ep_ms * 1e6 * work / mesh.vpp
            together = np.broadcast_to(together, split.shape).reshape(end.shape)
            phases["all_to_all"][stage] += together - end
            own, end = end, together
            if op.number < self.tp_calls:
                exchanged = Made(Call("ep", "AlltoAll", EP_ELEMENTS), cpu, own, end)
        queue.add(kernels, start, end)

        def called(share: float) -> Float:
            """When the CPU has launched that share of the kernels."""
            behind = queue.ended(queue.count - (1 - share) * kernels - program.queue)
            at: Float = np.maximum(cpu + share * kernels * launch, behind)
            return at

        for share, made in ((0.95, reduced), (0.97, exchanged)):
            if made is not None:
                calls.append(replace(made, at=called(share)))
        gpu = end
        if op.number == self.last[stage] and mesh.dp > 1:
            gpu = self._reduce(turn, stage, start, end, called)
        after = called(1.0)
        turn.ends[stage].append(end)
        towards = -1 if backward else 1
        passed_on = 0 <= stage + towards < mesh.pp or (mesh.pp > 1 and 0 <= op.chunk + towards < mesh.vpp)
        if records_p2p and passed_on:
            to = (stage + towards) % mesh.pp
            slower = np.maximum(effects.link[stage], effects.link[to])
            call = Call("pp", "Send", P2P_ELEMENTS, to)
            calls.append(Made(call, after.copy(), end, end + program.p2p_ms * 1e6 * slower))
        state.cpu[stage] = after + (CALL_NS if records_p2p and passed_on else 0)
        state.gpu[stage] = gpu

    def _reduce(self, turn: _Turn, stage: int, start: Float, end: Float, called: Callable[[float], Float]) -> Float:
        """Gradients, bucket after bucket as the last backward pass makes them. Returns when all are there."""
        program = self.program
        link = turn.effects.link[stage].max(axis=0, keepdims=True)
        each = program.grad_ms * 1e6 / program.buckets * link
        over = start
        spent = np.zeros_like(start)
        for bucket in range(program.buckets):
            share = (bucket + 1) / program.buckets
            ready = np.maximum(start + share * (end - start), over)
            over = ready.max(axis=0, keepdims=True) + each * turn.noise.transfer[(20 + bucket) % 64]
            over = np.broadcast_to(over, start.shape)
            spent = spent + over - ready
            turn.calls[stage].append(Made(Call("dp", "AllReduce", BUCKET_ELEMENTS), called(share - 0.01), ready, over))
        exposed = np.maximum(over - end, 0)
        turn.phases["all_reduce"][stage] += exposed
        turn.hidden["all_reduce"][stage] += spent - exposed
        done: Float = np.maximum(over, end)
        return done
