"""What a run runs on and with: names of the facts, and which of them must be alike on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

VARIABLES = (
    *("NCCL_", "CUDA_", "TORCH_", "PYTORCH_", "TORCHINDUCTOR_", "TRITON_", "OMP_", "MKL_", "KMP_", "GLOO_", "UCX_"),
    *("FI_", "NVIDIA_", "CUBLAS_", "CUDNN_", "MALLOC_", "PYTHONHASHSEED", "PYTHONOPTIMIZE", "LD_PRELOAD"),
)
"""Variables of the environment that are stored: those that begin so. They set how training runs; no other is read."""
OWN = (
    "env.CUDA_VISIBLE_DEVICES",
    "env.NVIDIA_VISIBLE_DEVICES",
    "numa.cpus",
    "numa.memory",
    "container.id",
    "host.boot",
)
"""Facts that differ between ranks or hosts of a healthy job: no part of the digest."""
UNREADABLE = "unreadable"
"""The fact that lists what could not be read, by commas. What is neither there nor in this list is not set."""
LONGEST = 256
"""Characters of a fact that are kept."""
MOST = 256
"""Facts of a process that are kept, in order of their names."""


def is_stored(variable: str) -> bool:
    """Whether a variable of this name is stored, as ``env.NAME``."""
    return variable.startswith(VARIABLES)


def bounded(facts: Mapping[str, str]) -> dict[str, str]:
    """Facts in order of their names, at most :data:`MOST`, of at most :data:`LONGEST` printable characters each."""
    kept = {}
    for name in sorted(facts)[:MOST]:
        value = facts[name][: LONGEST + 1]
        text = "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in value[:LONGEST])
        kept[name[:LONGEST]] = text + "…" * (len(value) > LONGEST)
    return kept


def digest(facts: Mapping[str, str]) -> int:
    """64 bits that are the same wherever all facts but :data:`OWN` are; 0: there are none."""
    alike = sorted((name, value) for name, value in facts.items() if name not in OWN)
    if not alike:
        return 0
    text = "\0".join(f"{name}={value}" for name, value in alike)
    return int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest(), "little")
