"""What recordings say of the environment."""

from __future__ import annotations

from typing import Any

import pytest

from argus.importers.recordings.facts import cuda_version, gpu_model, kineto_facts, nsys_facts


@pytest.mark.parametrize(
    ("number", "version"),
    [(12060, "12.6"), ("13000", "13.0"), (11080, "11.8"), (0, ""), (None, ""), (True, ""), ("12.4", ""), (10**30, ""),
     ([], ""), (-12060, "")],
)  # fmt: skip
def test_versions_as_cuda_counts_them(number: Any, version: str) -> None:
    assert cuda_version(number) == version


def test_models_of_gpus() -> None:
    assert gpu_model(["H100", "H100"]) == "H100"
    assert gpu_model(["H100", "A100", "H100", 7, "", None]) == "2 x H100, 1 x A100"
    assert gpu_model([]) == ""


def test_the_head_of_a_trace() -> None:
    head = {
        "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}] * 8, "cuda_runtime_version": 12060,
        "cuda_driver_version": 12040, "distributedInfo": {"backend": "nccl", "nccl_version": "2.21.5"},
    }  # fmt: skip
    assert kineto_facts(head) == {
        "gpu.model": "NVIDIA H100 80GB HBM3", "gpu.cuda": "12.6", "gpu.cuda_driver": "12.4", "nccl.version": "2.21.5",
    }  # fmt: skip


@pytest.mark.parametrize(
    "head",
    [{}, {"deviceProperties": [None, 3, {"name": 4}], "distributedInfo": {"nccl_version": [2, 21]}},
     {"deviceProperties": {"name": "x"}, "distributedInfo": [], "cuda_runtime_version": "new"}],
)  # fmt: skip
def test_a_head_that_says_nothing(head: dict[str, Any]) -> None:
    assert kineto_facts(head) == {}


def test_properties_of_a_target() -> None:
    environment = "PATH=/bin;NCCL_ALGO=Ring;HF_TOKEN=hunter2;NCCL_API_KEY=hunter2;broken;OMP_NUM_THREADS=4"
    properties = {
        "NvDriverVersion": "580.95.05", "CudaDriverVersion": "13000", "CpuCores": "18", "CpuDescription": "unknown",
        "OsDescription": "Ubuntu 22.04.5 LTS", "Hostname": "modal", "DeviceEnvironment": environment,
    }  # fmt: skip
    assert nsys_facts(properties, ["NVIDIA H100"]) == {
        "gpu.driver": "580.95.05", "gpu.cuda_driver": "13.0", "cpu.count": "18", "os.name": "Ubuntu 22.04.5 LTS",
        "gpu.model": "NVIDIA H100", "env.NCCL_ALGO": "Ring", "env.OMP_NUM_THREADS": "4", "env.NCCL_API_KEY": "***",
    }  # fmt: skip
    assert nsys_facts({}, []) == {}
