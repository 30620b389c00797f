#!/usr/bin/env python3
"""Jobs of every parallel shape, as plans for fake_plan.

    shapes.py                       # lists them
    shapes.py tp_dp /tmp/plans      # writes the plans of one, and prints how to run it

The model is a transformer whose layers take about 1.7 ms forward and 2.5 ms backward on the fake GPU, so that a step
takes 15 to 40 ms.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

Groups = dict[str, list[list[int]]]
Lines = list[str]

# The numbers of the kernels in programs/plan_kernels.h.
EMBED, GEMM, GEMM_WIDE, ATTENTION, NORM, GELU, LOSS, LOSS_BACK = range(8)
GEMM_NT, GEMM_TN, ATTENTION_BACK, NORM_BACK, GELU_BACK, L2NORM, ADAMW, ROUTER = range(8, 16)

ACTIVATION = 2048 * 2048  # elements between layers, of one micro-batch
BUCKETS = (6_250_000, 6_250_000, 2_097_152)  # PyTorch fills 25 MB; what is left is the last one


@dataclass
class Shape:
    """A job.

    Attributes:
        ranks: How many.
        plans: One a rank.
        groups: By dimension, which global ranks its communicators join. "world" is there where that one is made too.
    """

    name: str
    ranks: int
    plans: list[str]
    groups: Groups

    def write(self, directory: Path) -> str:
        """Writes the plans and returns what fake_plan takes."""
        directory.mkdir(parents=True, exist_ok=True)
        for rank, plan in enumerate(self.plans):
            (directory / f"{self.name}.{rank}.plan").write_text(plan)
        return str(directory / f"{self.name}.{{rank}}.plan")

    def of(self, rank: int) -> dict[str, list[int]]:
        """The groups that a rank is in."""
        return {name: next(part for part in parts if rank in part) for name, parts in self.groups.items()}


SHAPES: dict[str, Shape] = {}


def _add(name: str, ranks: int, groups: Groups, step: Callable[[int], Lines], split: Sequence[str] = ()) -> None:
    """Groups in ``split`` are split off the world; the others have unique ids of their own."""
    plans = []
    for rank in range(ranks):
        lines = []
        for group, parts in groups.items():
            if group == "world":
                continue
            color, part = next((number, part) for number, part in enumerate(parts) if rank in part)
            place = part.index(rank)
            made = f"split {color} {place}" if group in split else f"init {len(part)} {place} {group}{color}"
            lines.append(f"group {group} {made}")
        plans.append("\n".join([*lines, "step", *step(rank), "end", ""]))
    SHAPES[name] = Shape(name, ranks, plans, groups)


def _run(*kernels: int) -> Lines:
    return [f"kernel {kernel} 1" for kernel in kernels]


def _block(head: str, body: Lines) -> Lines:
    return [head, *body, "done"]


READ_BACK = ["d2h 4", "sync"]  # what .item() does
FORWARD = _run(NORM, GEMM, ATTENTION, GEMM_WIDE, GELU)
BACKWARD = _run(GELU_BACK, GEMM_NT, ATTENTION_BACK, GEMM_TN, NORM_BACK)
OPTIMIZER = _run(ADAMW, ADAMW)


def _passes(layers: int) -> Lines:
    """Forward and backward of a whole model."""
    return [*_run(EMBED), *FORWARD * layers, *_run(LOSS, LOSS_BACK), *BACKWARD * layers]


def _reduce(group: str, buckets: Sequence[int] = BUCKETS) -> Lines:
    return [f"allreduce {group} {count} f32" for count in buckets]


def _norm(group: str = "") -> Lines:
    """The gradients' norm, over the ranks that share the model, read back to clip by it."""
    return [*_run(L2NORM), *([f"allreduce {group} 1 f32"] if group else []), *READ_BACK]


# ---- one dimension ----


def _one_gpu(rank: int) -> Lines:
    return ["data 3000", *_passes(4), *_norm(), *OPTIMIZER, *READ_BACK]


def _dp(rank: int) -> Lines:
    """A bucket goes when its layers' gradients are there."""
    first, second, last = _reduce("dp")
    backward = [*BACKWARD, first, *BACKWARD * 2, second, *BACKWARD, last]
    return ["data 3000", *_run(EMBED), *FORWARD * 4, *_run(LOSS, LOSS_BACK), *backward, *OPTIMIZER, *READ_BACK]


def _fsdp(rank: int) -> Lines:
    """Each unit is gathered before its forward and again before its backward, whose gradients are then scattered."""
    sizes = [8_192_000, *[3_145_728] * 4, 8_196_096]  # embedding, blocks, head
    forward = [_run(EMBED), *[FORWARD] * 4, _run(LOSS)]
    backward = [_run(NORM_BACK), *[BACKWARD] * 4, _run(LOSS_BACK)]
    lines = ["data 3000"]
    for size, kernels in zip(sizes, forward, strict=True):
        lines += [f"allgather fsdp {size // 4} bf16", *kernels]
    for size, kernels in reversed(list(zip(sizes, backward, strict=True))):
        lines += [f"allgather fsdp {size // 4} bf16", *kernels, f"reducescatter fsdp {size // 4} f32"]
    return [*lines, *_norm("fsdp"), *OPTIMIZER, *READ_BACK]


def _tensor_parallel(count: int) -> tuple[Lines, Lines]:
    """A layer's forward and backward: activations are summed behind the attention and behind the MLP."""
    summed = [f"allreduce tp {count} bf16"]
    forward = [*_run(NORM, GEMM, ATTENTION), *summed, *_run(GEMM_WIDE, GELU), *summed]
    backward = [*_run(GELU_BACK, GEMM_NT), *summed, *_run(ATTENTION_BACK, GEMM_TN, NORM_BACK), *summed]
    return forward, backward


def _tp_dp(rank: int) -> Lines:
    forward, backward = _tensor_parallel(ACTIVATION)
    step = [*_run(EMBED), *forward * 4, *_run(LOSS, LOSS_BACK), *backward * 4]
    return ["data 2000", *step, *_reduce("dp"), *_norm("tp"), *OPTIMIZER, *READ_BACK]


def _moe_ep(rank: int) -> Lines:
    """Tokens travel to their experts and back; what is no expert is the same on all ranks."""
    travel = [f"alltoall ep {ACTIVATION // 4} bf16"]
    forward = [*_run(NORM, ATTENTION, ROUTER), *travel, *_run(GEMM_WIDE, GELU), *travel]
    backward = [*travel, *_run(GELU_BACK, GEMM_NT), *travel, *_run(ATTENTION_BACK, NORM_BACK)]
    step = [*_run(EMBED), *forward * 4, *_run(LOSS, LOSS_BACK), *backward * 4]
    return ["data 2000", *step, *_reduce("dp", BUCKETS[1:]), *_norm("dp"), *OPTIMIZER, *READ_BACK]


# ---- pipelines ----


def _together(*operations: str) -> Lines:
    return ["groupstart", *operations, "groupend"] if len(operations) > 1 else list(operations)


def _one_forward_one_backward(stage: int, stages: int, micro: int, forward: Lines, backward: Lines) -> Lines:
    """Megatron's schedule without interleaving. The ends of the pipeline load the batch: tokens and labels."""
    first, last = stage == 0, stage == stages - 1
    if first:
        forward = ["data 400", *_run(EMBED), *forward]
    if last:
        forward = ["data 400", *forward, *_run(LOSS)]
        backward = [*_run(LOSS_BACK), *backward]
    size = f"{ACTIVATION} bf16"
    receive_forward = [] if first else [f"recv pp {stage - 1} {size}"]
    send_backward = [] if first else [f"send pp {stage - 1} {size}"]
    send_forward = [] if last else [f"send pp {stage + 1} {size}"]
    receive_backward = [] if last else [f"recv pp {stage + 1} {size}"]

    ahead = min(stages - stage - 1, micro)
    lines: Lines = []
    for _ in range(ahead):
        lines += [*receive_forward, *forward, *send_forward]
    for number in range(micro - ahead):
        if number == 0:
            lines += receive_forward
        lines += [*forward, *_together(*send_forward, *receive_backward), *backward]
        more = receive_forward if number < micro - ahead - 1 else []
        lines += _together(*send_backward, *more)
    for _ in range(ahead):
        lines += [*receive_backward, *backward, *send_backward]
    return lines


def _pp_1f1b(rank: int) -> Lines:
    return [*_one_forward_one_backward(rank, 4, 4, FORWARD, BACKWARD), *_norm("world"), *OPTIMIZER]


def _interleaved(stage: int, stages: int, chunks: int, micro: int, forward: Lines, backward: Lines) -> Lines:
    """Megatron's schedule with virtual stages: each rank has several parts of the model, passed through in turn."""
    first, last = stage == 0, stage == stages - 1
    before, after = (stage - 1) % stages, (stage + 1) % stages
    total = micro * chunks
    warm_up = min((stages - stage - 1) * 2 + (chunks - 1) * stages, total)

    def chunk(number: int, back: bool = False) -> int:
        at = number % (stages * chunks) // stages
        return chunks - 1 - at if back else at

    def go_forward(number: int) -> Lines:
        start = ["data 400", *_run(EMBED)] if first and chunk(number) == 0 else []
        return [*start, *forward, *(["data 400", *_run(LOSS)] if last and chunk(number) == chunks - 1 else [])]

    def go_backward(number: int) -> Lines:
        return [*(_run(LOSS_BACK) if last and chunk(number, True) == chunks - 1 else []), *backward]

    def exchange(to_next: bool, from_previous: bool, to_previous: bool = False, from_next: bool = False) -> Lines:
        """Forward first on both sides: with two stages, both directions have the same peer."""
        size = f"{ACTIVATION} bf16"
        wanted = [
            (to_next, f"send pp {after} {size}"),
            (from_previous, f"recv pp {before} {size}"),
            (to_previous, f"send pp {before} {size}"),
            (from_next, f"recv pp {after} {size}"),
        ]
        operations = [operation for want, operation in wanted if want]
        return ["groupstart", *operations, "groupend"] if operations else []

    lines = exchange(False, not first)
    for k in range(warm_up):
        lines += go_forward(k)
        to_next = not (last and chunk(k) == chunks - 1)
        from_previous = k < total - 1 and not (first and chunk(k + 1) == 0)
        turning = k == warm_up - 1 and warm_up < total
        lines += exchange(to_next, from_previous, from_next=turning and not last)
    for k in range(total - warm_up):
        ahead = k + warm_up
        lines += [*go_forward(ahead), *go_backward(k)]
        to_next = not (last and chunk(ahead) == chunks - 1)
        to_previous = not (first and chunk(k, True) == 0)
        # The first rank is ahead of the last by all stages but one, and so is the last in the backward pass.
        from_previous = not (first and chunk(ahead - (stages - 1)) == chunks - 1) and k < total - warm_up - 1
        from_next = not (last and chunk(k - (stages - 1), True) == 0)
        lines += exchange(to_next, from_previous, to_previous, from_next)
    if warm_up == total:
        lines += exchange(False, False, from_next=not last)
    for k in range(total - warm_up, total):
        lines += go_backward(k)
        to_previous = not (first and chunk(k, True) == 0)
        from_next = k < total - 1 and not (last and chunk(k + 1, True) == chunks - 1)
        lines += exchange(False, False, to_previous, from_next)
    return lines


def _pp_interleaved(rank: int) -> Lines:
    forward, backward = _run(NORM, GEMM, ATTENTION), _run(GEMM_NT, ATTENTION_BACK, NORM_BACK)
    return [*_interleaved(rank, 2, 2, 4, forward, backward), *_norm("world"), *OPTIMIZER]


def _tp_pp_dp(rank: int) -> Lines:
    forward, backward = _tensor_parallel(ACTIVATION)
    schedule = _one_forward_one_backward(rank // 4, 2, 4, forward, backward)
    return [*schedule, *_reduce("dp", BUCKETS[1:]), *_norm("world"), *OPTIMIZER]


# ---- steps that are not all alike ----


def _grad_accumulation(rank: int) -> Lines:
    return [*_block("repeat 4", ["data 800", *_passes(1)]), *_reduce("dp"), *OPTIMIZER, *READ_BACK]


def _small_dp() -> Lines:
    return ["data 2000", *_passes(3), *_reduce("dp"), *OPTIMIZER, *READ_BACK]


def _evaluation(rank: int) -> Lines:
    batch = ["data 2000", *_run(EMBED), *FORWARD * 3, *_run(LOSS)]
    return [*_small_dp(), *_block("every 10", [*_block("repeat 3", batch), "allreduce dp 1 f32", *READ_BACK])]


def _checkpoint(rank: int) -> Lines:
    """The parameters go to the host and to disk; then all ranks wait for each other."""
    saved = [*["d2h 50000000"] * 4, "sync", "host 60000", "allreduce dp 1 f32", "sync"]
    return [*_small_dp(), *_block("every 15", saved)]


def _variable_length(rank: int) -> Lines:
    """All kernels of a micro-batch have its length; a key has another number in each repetition."""

    def sized(kernel: int, most: int) -> str:
        return f"kernelv {kernel} {most // 4} {most} @1"

    forward = [sized(NORM, 4096), sized(GEMM, 96), sized(ATTENTION, 32), sized(GEMM_WIDE, 64), sized(GELU, 16384)]
    backward = [
        *[sized(GELU_BACK, 16384), sized(GEMM_NT, 128), sized(ATTENTION_BACK, 32), sized(GEMM_TN, 32)],
        sized(NORM_BACK, 4096),
    ]
    micro = [sized(EMBED, 4096), *forward * 2, sized(LOSS, 4096), sized(LOSS_BACK, 4096), *backward * 2]
    return ["data 2000", *_block("repeat 2-4", micro), *_reduce("dp"), *OPTIMIZER, *READ_BACK]


def _parts(ranks: int, size: int) -> list[list[int]]:
    """Neighbours."""
    return [list(range(start, start + size)) for start in range(0, ranks, size)]


def _across(start: int, ranks: int, stride: int) -> list[list[int]]:
    """Those ``stride`` apart, among so many ranks from ``start``."""
    return [list(range(start + offset, start + ranks, stride)) for offset in range(stride)]


_add("one_gpu", 1, {}, _one_gpu)
_add("dp", 4, {"dp": _parts(4, 4)}, _dp)
_add("fsdp", 4, {"fsdp": _parts(4, 4)}, _fsdp)
_add("tp_dp", 4, {"world": _parts(4, 4), "tp": _parts(4, 2), "dp": _across(0, 4, 2)}, _tp_dp, split=("tp", "dp"))
_add("pp_1f1b", 4, {"world": _parts(4, 4), "pp": _parts(4, 4)}, _pp_1f1b, split=("pp",))
_add("pp_interleaved", 2, {"world": _parts(2, 2), "pp": _parts(2, 2)}, _pp_interleaved)
_add(
    "tp_pp_dp",
    8,
    {
        "world": _parts(8, 8),
        "dp": [*_across(0, 4, 2), *_across(4, 4, 2)],
        "tp": _parts(8, 2),
        "pp": _across(0, 8, 4),
    },
    _tp_pp_dp,
)
_add("moe_ep", 4, {"dp": _parts(4, 4), "ep": _parts(4, 4)}, _moe_ep)
_add("grad_accumulation", 2, {"dp": _parts(2, 2)}, _grad_accumulation)
_add("evaluation", 2, {"dp": _parts(2, 2)}, _evaluation)
_add("checkpoint", 2, {"dp": _parts(2, 2)}, _checkpoint)
_add("variable_length", 2, {"dp": _parts(2, 2)}, _variable_length)


def main() -> int:
    if len(sys.argv) == 1:
        for shape in SHAPES.values():
            print(f"{shape.name}: {shape.ranks} ranks, {', '.join(shape.groups) or 'no groups'}")
        return 0
    if len(sys.argv) != 3 or sys.argv[1] not in SHAPES:
        print(f"usage: {sys.argv[0]} [NAME DIRECTORY]", file=sys.stderr)
        return 2
    shape = SHAPES[sys.argv[1]]
    plan = shape.write(Path(sys.argv[2]))
    here = Path(__file__).resolve().parent
    program = here.parent.parent / "build" / "fakegpu" / "fake_plan"
    print(f"{here / 'run.py'} --ranks {shape.ranks} --program {program} -- '{plan}' --steps 100")
    return 0


if __name__ == "__main__":
    sys.exit(main())
