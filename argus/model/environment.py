"""What a run runs on and with: names of the facts, and which of them must be alike on every rank."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

VARIABLES = (
    *("NCCL_", "CUDA_", "TORCH_", "PYTORCH_", "TORCHINDUCTOR_", "TRITON_", "OMP_", "MKL_", "KMP_", "GLOO_", "UCX_"),
    *("FI_", "NVIDIA_", "CUBLAS_", "CUDNN_", "MALLOC_", "PYTHONHASHSEED", "PYTHONOPTIMIZE", "LD_PRELOAD"),
)
"""Variables of the environment that are stored: those that begin so. They set how training runs; no other is read."""
_NOT_STORED = frozenset({"NCCL_COMM_ID", "NCCL_HOSTID", "NVIDIA_REQUIRE_CUDA"})
"""But for these: an address, a host's name, and a page of conditions that say nothing of the run."""
OWN = (
    "env.CUDA_VISIBLE_DEVICES",
    "env.NVIDIA_VISIBLE_DEVICES",
    "numa.cpus",
    "numa.memory",
    "container.id",
    "host.boot",
)
"""Facts that differ between ranks or hosts of a healthy job: no part of the digest."""
COMMAND = "command"
"""The fact that is the command line, without secrets and without what differs between ranks."""
UNREADABLE = "unreadable"
"""The fact that lists what could not be read, by commas. What is neither there nor in this list is not set."""
OF_PROCESS = r"^(env|numa|cgroup|container|git|nccl|cudnn|torch|python)[.]|^gpu[.](cuda|driver)$|^command$"
"""Facts that are read of a process, as RE2 takes it, too; the others are read of its node."""
LONGEST = 256
"""Characters of a fact that are kept."""
MOST = 256
"""Facts of a process that are kept: of more, the last variables by name go, and ``unreadable`` has ``settings``."""


def is_stored(variable: str) -> bool:
    """Whether a variable of this name is stored, as ``env.NAME``."""
    return variable.startswith(VARIABLES) and variable not in _NOT_STORED


def bounded(facts: Mapping[str, str]) -> dict[str, str]:
    """Facts by name, at most :data:`MOST`, of at most :data:`LONGEST` printable characters each. Longer
    ones end with a hash of the whole: two that differ stay two."""
    kept = {}
    if len(facts) > MOST:
        names = sorted(facts, key=lambda name: (name.startswith("env."), name))[: MOST - 1]
        unread = ",".join(filter(None, (facts.get(UNREADABLE), "settings")))
        facts = {**{name: facts[name] for name in names}, UNREADABLE: unread}
    for name in sorted(facts):
        value = facts[name]
        if len(value) > LONGEST:
            whole = hashlib.blake2b(value.encode(errors="replace"), digest_size=4).hexdigest()
            value = f"{value[: LONGEST - len(whole) - 1]}…{whole}"
        kept[name[:LONGEST]] = "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in value)
    return kept


def is_unread(fact: str, facts: Mapping[str, str]) -> bool:
    """Whether a fact that is missing among those of a process could not be read: then nothing is known of it, and it is
    not "not set"."""
    unread = set(facts.get(UNREADABLE, "").split(","))
    whole = "process" if re.search(OF_PROCESS, fact) else "node"
    return bool(unread & {fact, whole, _read_with(fact)})


def _read_with(fact: str) -> str:
    """What :data:`UNREADABLE` calls the facts that are read together with this one."""
    if fact.startswith("cgroup.") or fact == "container.id":
        return "cgroup"
    if fact.startswith("env."):
        return "settings"
    return "versions" if fact.endswith(".version") or fact in ("gpu.cuda", "gpu.driver") else fact


def digest(facts: Mapping[str, str]) -> int:
    """64 bits that are the same wherever all facts are, but for :data:`OWN` and the command (which has names of runs in
    it, and folders); 0: there are none."""
    alike = sorted((name, value) for name, value in facts.items() if name not in (*OWN, COMMAND, UNREADABLE))
    if not alike:
        return 0
    text = "\0".join(f"{name}={value}" for name, value in alike)
    return int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest(), "little")
