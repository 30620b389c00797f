"""What a range of a program is for, by its name: PyTorch's own names, and those that people give."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

STEP_WORD = re.compile(r"(^|[^a-z])(step|iter|iteration|batch|microstep|epoch_step)([^a-z]|$)", re.IGNORECASE)
"""Names of what may be a step."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_PARTS_OF_STEPS = {"micro", "microbatch", "microstep", "ubatch", "sub", "substep", "accum", "accumulate"}
_PARTS_OF_STEPS |= {"accumulation", "layer", "block", "head", "token", "decode"}
_NO_TRAINING = {"eval", "evaluate", "evaluation", "val", "valid", "validate", "validation", "test", "infer"}
_NO_TRAINING |= {"inference", "predict"}
_LOADER = {"dataloader", "dataloading"}
_LOADS = {"load", "loading", "loader", "get", "getting", "next", "fetch", "fetching", "wait", "read", "reading"}
_LOADS |= {"generator"}
_OPTIMIZER = {"optimizer", "optimiser", "optim", "opt"}
_NO_UPDATE = {"init", "save", "load", "checkpoint", "state", "setup", "build", "create", "zero"}
_CHECKPOINT = {"checkpoint", "checkpoints", "checkpointing", "ckpt", "ckpts"}
_SAVE = {"save", "saving"}
_SAVED = {*_CHECKPOINT, "state", "states", "model", "models", "weights", "params", "parameters", "snapshot", "torch"}
_SAVED |= {"dcp", "pretrained", *_OPTIMIZER}
"""With a word of :data:`_SAVE` a checkpoint: ``torch.save``, ``save_state_dict``."""
_WITH_CHECKPOINT = {*_SAVE, "write", "writing", "dump", "store", "storing", "persist", "upload", "load", "loading"}
_WITH_CHECKPOINT |= {"restore", "restoring", "model", "manager"}
_BESIDE = {*_SAVE, *_CHECKPOINT, "step", "iter", "iteration", "epoch", "at", "async", "sync", "begin", "start", "end"}
_BESIDE |= {"wait", "finish", "finalize", "hook", "callback", "train", "training", "distributed", "dist", "sharded"}
"""A name of these alone is one, too, if it has a word of :data:`_CHECKPOINT` or :data:`_SAVE`."""
_COMPUTED_AGAIN = {"activation", "activations", "wrapper", "recompute", "recomputation", "selective", "rng", "tensor"}
_COMPUTED_AGAIN |= {"tensors", "function"}
"""Checkpoints of activations are part of forward and backward."""
_FORWARD = {"forward", "fwd", "fprop"}
_BACKWARD = {"backward", "bwd", "bprop", "backprop"}


class Role(IntEnum):
    """What a range is for, by its name."""

    NONE = 0
    DATA = 1
    FORWARD = 2
    OPTIMIZER = 3
    ZERO_GRAD = 4
    BACKWARD = 5
    """Only as people name it: PyTorch's own has marks of another kind."""
    CHECKPOINT = 6
    """Parameters on their way to a disk, or from one: as people name it."""


@dataclass(frozen=True)
class Meaning:
    """The meaning of a name that a user gave.

    Attributes:
        role: Of a part of a step.
        base: The name without its numbers: the same in every step.
        is_step: Whether it is called a step of training.
        part: Whether it is called a part of one, or no training at all: it is never taken for a step.
    """

    role: Role
    base: str
    is_step: bool
    part: bool


def role_of(name: str) -> Role:
    """The role of a ``record_function`` range of PyTorch's own."""
    if name.startswith("enumerate(DataLoader)"):
        return Role.DATA
    if name.endswith("Parallel.forward"):  # DistributedDataParallel's, FullyShardedDataParallel's
        return Role.FORWARD
    if name.startswith("Optimizer.step#"):
        return Role.OPTIMIZER
    if name.startswith("Optimizer.zero_grad#"):
        return Role.ZERO_GRAD
    return Role.NONE


def meaning_of(name: str) -> Meaning:
    """The meaning of the name of a user's range (NVTX), by its words.

    A name with two parts of a step ("forward_backward") means neither.
    """
    base = base_of(name)
    words = {word.lower() for word in _WORD.findall(name)}
    part = bool(words & (_PARTS_OF_STEPS | _NO_TRAINING))
    roles = [
        role
        for role, matches in (
            (Role.FORWARD, words & _FORWARD),
            (Role.BACKWARD, words & _BACKWARD),
            (Role.ZERO_GRAD, {"zero", "grad"} <= words),
            (Role.OPTIMIZER, words & _OPTIMIZER and not words & _NO_UPDATE),
            (Role.DATA, words & _LOADER or words == {"data"} or (words & {"data", "batch"} and words & _LOADS)),
        )
        if matches
    ]
    if not roles and _is_checkpoint(words):
        roles = [Role.CHECKPOINT]
    role = roles[0] if len(roles) == 1 and not words & _NO_TRAINING else Role.NONE
    is_step = not roles and not part and bool(STEP_WORD.search(separated(base)))
    return Meaning(role, base, is_step, part or bool(roles))


def _is_checkpoint(words: set[str]) -> bool:
    """Whether a name with these words is that of a checkpoint of the parameters, not of activations."""
    if words & _COMPUTED_AGAIN:
        return False
    if (words & _SAVE and words & _SAVED) or (words & _CHECKPOINT and words & _WITH_CHECKPOINT):
        return True
    return bool(words & (_CHECKPOINT | _SAVE)) and words <= _BESIDE


def base_of(name: str) -> str:
    """A name without its numbers."""
    return re.sub(r"\d+", "N", name)


def separated(name: str) -> str:
    """A name whose words in CamelCase are parted."""
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name)
