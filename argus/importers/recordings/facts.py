"""What recordings have of the environment: GPU, driver, CUDA, NCCL, CPUs, settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from argus.model.environment import LONGEST
from argus.system.settings import settings

_MOST = 64
"""GPUs of a node, at most."""
NSYS = {
    "NvDriverVersion": "gpu.driver", "CudaDriverVersion": "gpu.cuda_driver", "CpuCores": "cpu.count",
    "CpuDescription": "cpu.model", "OsDescription": "os.name",
}  # fmt: skip
"""Rows of Nsight's TARGET_INFO_SYSTEM_ENV, and the facts that they are."""
NSYS_VARIABLES = "DeviceEnvironment"
"""The row that has the profiler's environment, which the processes inherited: NAME=VALUE, by semicolons."""


def kineto_facts(head: Mapping[str, Any]) -> dict[str, str]:
    """Facts in the head of a Kineto trace."""
    distributed = head.get("distributedInfo")
    nccl = distributed.get("nccl_version") if isinstance(distributed, dict) else None
    devices = head.get("deviceProperties")
    devices = devices[:_MOST] if isinstance(devices, list) else []
    facts = {
        "gpu.model": gpu_model(one.get("name") for one in devices if isinstance(one, dict)),
        "gpu.cuda": cuda_version(head.get("cuda_runtime_version")),
        "gpu.cuda_driver": cuda_version(head.get("cuda_driver_version")),
        "nccl.version": nccl[:LONGEST] if isinstance(nccl, str) else "",
    }
    return {name: value for name, value in facts.items() if value}


def nsys_facts(properties: Mapping[str, str], gpus: Iterable[Any]) -> dict[str, str]:
    """Facts of an export of Nsight Systems.

    Args:
        properties: Rows of TARGET_INFO_SYSTEM_ENV: name, value.
        gpus: Names of GPUs.
    """
    facts = {fact: properties.get(name, "").strip() for name, fact in NSYS.items()}
    facts["gpu.cuda_driver"] = cuda_version(facts["gpu.cuda_driver"])
    facts["gpu.model"] = gpu_model(gpus)
    pairs = (one.partition("=") for one in properties.get(NSYS_VARIABLES, "").split(";"))
    facts |= settings((name.strip(), value) for name, equals, value in pairs if equals)
    return {name: value[: 4 * LONGEST] for name, value in facts.items() if value and value != "unknown"}


def cuda_version(number: Any) -> str:
    """A version as CUDA counts them (12060 is 12.6); empty: it is none."""
    text = str(number)
    if isinstance(number, bool) or not text.isdecimal() or not 1000 <= int(text[:9]) < 1_000_000:
        return ""
    return f"{int(text) // 1000}.{int(text) % 1000 // 10}"


def gpu_model(names: Iterable[Any]) -> str:
    """The model of GPUs; where they differ, how many are what."""
    counted = Counter(name[:LONGEST] for name in names if isinstance(name, str) and name)
    if len(counted) < 2:
        return next(iter(counted), "")
    return ", ".join(f"{many} x {name}" for name, many in counted.most_common(8))
