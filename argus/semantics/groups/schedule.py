"""The order in which pipeline stages compute: 1F1B, and interleaved (Narayanan et al., SC '21, as Megatron-LM does
it)."""

from __future__ import annotations

from dataclasses import dataclass

from argus.model.errors import EXIT_USAGE, ArgusError

FORWARD, BACKWARD = 0, 1


@dataclass(frozen=True)
class Op:
    """One computation of a stage.

    Attributes:
        stage: Who computes.
        kind: ``FORWARD`` or ``BACKWARD``.
        chunk: Model chunk within the stage.
        batch: Micro-batch.
        number: Place in its stage's order.
        needs: Stage and place of the computation whose result it receives; None: it needs none, or its own stage's.
    """

    stage: int
    kind: int
    chunk: int
    batch: int
    number: int
    needs: tuple[int, int] | None


def order_of(stage: int, pp: int, vpp: int, batches: int) -> list[tuple[int, int, int]]:
    """(kind, chunk, micro-batch) of a stage's computations, in order.

    Raises:
        ArgusError: An interleaved schedule of micro-batches that are no multiple of the stages.
    """
    total = batches * vpp
    if vpp > 1 and batches % pp:
        raise ArgusError(
            f"{batches} micro-batches are no multiple of {pp} pipeline stages",
            "An interleaved schedule (--vpp) needs one: change --micro-batches", EXIT_USAGE,
        )  # fmt: skip
    warm = pp - stage - 1 if vpp == 1 else (pp - stage - 1) * 2 + (vpp - 1) * pp
    warm = min(warm, total)

    def forward(k: int) -> tuple[int, int, int]:
        return FORWARD, k % (pp * vpp) // pp, k // (pp * vpp) * pp + k % pp

    def backward(k: int) -> tuple[int, int, int]:
        return BACKWARD, vpp - 1 - k % (pp * vpp) // pp, k // (pp * vpp) * pp + k % pp

    steady = [one for k in range(total - warm) for one in (forward(warm + k), backward(k))]
    return [forward(k) for k in range(warm)] + steady + [backward(k) for k in range(total - warm, total)]


def schedule(pp: int, vpp: int, batches: int) -> list[Op]:
    """All computations of a step, each after those it needs.

    Args:
        pp: Pipeline stages.
        vpp: Model chunks of a stage.
        batches: Micro-batches of a step.

    Raises:
        ArgusError: As :func:`order_of`.
    """
    orders = [order_of(stage, pp, vpp, batches) for stage in range(pp)]
    places = [{one: place for place, one in enumerate(order)} for order in orders]

    def needs(stage: int, kind: int, chunk: int, batch: int) -> tuple[int, int] | None:
        step = 1 if kind == BACKWARD else -1
        other = stage + step
        if not 0 <= other < pp:
            other, chunk = other % pp, chunk + step
        if pp == 1 or not 0 <= chunk < vpp:
            return None
        return other, places[other][kind, chunk, batch]

    done = [0] * pp
    ops: list[Op] = []
    while len(ops) < sum(map(len, orders)):
        before = len(ops)
        for stage, order in enumerate(orders):
            while done[stage] < len(order):
                kind, chunk, batch = order[done[stage]]
                after = needs(stage, kind, chunk, batch)
                if after is not None and done[after[0]] <= after[1]:
                    break
                ops.append(Op(stage, kind, chunk, batch, done[stage], after))
                done[stage] += 1
        assert len(ops) > before, "the schedule waits for itself"
    return ops
