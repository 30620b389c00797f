"""Active probes: what they measure, and that they leave a busy node alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from argus.health.checks import _gemm
from tests.e2e.health_node import Node
from tests.e2e.test_health_gpu import Gpus, library

__all__ = ["library"]

FIGURES = {
    "probe_cpu": {"operations_per_s": (1e3, 1e7)},
    "probe_memory": {"copy_gb_per_s": (0.2, 2000)},
    "probe_loopback": {"gb_per_s": (0.02, 500)},
}
IDLE, LOADED = "0.05 0.1 0.1 1/500 4711", "64.0 0.1 0.1 1/500 4711"


def results(output: str) -> dict[str, dict[str, object]]:
    return {result["name"]: result for result in json.loads(output)["results"]}


def only(*names: str) -> list[str]:
    return [word for name in names for word in ("--only", name)]


def test_an_idle_node_is_measured(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.file("proc/loadavg", IDLE)
    node.limits["probe_disk"] = {"paths": [str(tmp_path), str(tmp_path / "nothing")]}
    code, output, _ = node.health("--active", "--format", "json", *only(*FIGURES, "probe_disk"))
    found = results(output)
    assert (code, {result["status"] for result in found.values()}) == (0, {"ok"})
    for name, figures in FIGURES.items():
        measured = found[name]["figures"]
        assert isinstance(measured, dict)
        assert set(measured) == set(figures)
        for figure, (low, high) in figures.items():
            assert low < measured[figure] < high
    written = found["probe_disk"]["figures"]
    assert isinstance(written, dict)
    assert list(written) == [f"write_s/{tmp_path}"]
    assert 0 < written[f"write_s/{tmp_path}"] < 2


def test_a_busy_node_is_left_alone(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.file("proc/loadavg", LOADED)
    code, output, _ = node.health("--active", "--format", "json", *only(*FIGURES, "probe_disk", "probe_gpu"))
    assert code == 3
    for result in results(output).values():
        assert (result["status"], result["text"]) == ("absent", "not measured: the node is busy (load 64.0)")
        assert not result["figures"]


def test_nothing_is_measured_unless_asked(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.file("proc/loadavg", IDLE)
    code, _, complaint = node.health(*only("probe_cpu"))
    assert code == 3
    assert "--active" in complaint


def test_a_disk_that_takes_no_writes_is_critical(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.file("proc/loadavg", IDLE)
    file = tmp_path / "no folder"
    file.write_text("")
    node.limits["probe_disk"] = {"paths": [str(file)]}
    code, output, _ = node.health("--active", "--format", "json", *only("probe_disk"))
    assert code == 2
    assert f"{file} cannot be written: Not a directory" in str(results(output)["probe_disk"]["text"])


MULTIPLIES = {"FAKEGPU_COMPUTE": "1", "FAKEGPU_DEVICES": "3", "FAKEGPU_KERNEL_NS": "argus_gemm=20000000"}


@pytest.mark.alone  # rates are measured, in seconds that pass
@pytest.mark.parametrize(
    ("fault", "status", "texts"),
    [
        ({}, "ok", ["3 GPUs compute rightly, the slowest at "]),
        ({"FAKEGPU_CAPABILITY": "70"}, "ok", ["3 GPUs compute rightly"]),
        ({"FAKEGPU_WRONG_DEVICE": "2", "FAKEGPU_BROKEN_DEVICE": "1"}, "critical",
         ["gpu2 computes wrongly: wrong sums on 1 of its multiprocessors (SM 17)",
          "gpu1 is broken: a kernel that cannot fail failed"]),
        ({"FAKEGPU_SLOW_DEVICE": "1", "FAKEGPU_SLOW_FACTOR": "1.3"}, "warning", ["gpu1 multiplies at "]),
    ],
)  # fmt: skip
def test_gpus_multiply(
    tmp_path: Path, library: Path, fakegpu: Path, fault: dict[str, str], status: str, texts: list[str]
) -> None:
    """On the fake GPU's libcuda, which computes the products, and does it wrongly or slowly where that is planted."""
    node = Gpus(tmp_path)
    node.environment = {"LD_LIBRARY_PATH": f"{library}:{fakegpu}", "FAKE_NVML": str(tmp_path / "nvml")}
    node.environment |= {**MULTIPLIES, **fault}
    node.say()
    node.file("proc/loadavg", IDLE)
    code, output, _ = node.health("--active", "--format", "json", *only("probe_gpu"))
    result = results(output)["probe_gpu"]
    assert (result["status"], [text in str(result["text"]) for text in texts]) == (status, [True] * len(texts)), result
    assert code == {"ok": 0, "warning": 1, "critical": 2}[status]
    assert (status == "ok") != bool(result["hint"])
    figures = result["figures"]
    assert isinstance(figures, dict)
    well = {0, 1, 2} - ({1} if "FAKEGPU_BROKEN_DEVICE" in fault else set())
    kinds = ("gemm_tflops", "copy_gb_per_s", "device_gb_per_s", "peer_gb_per_s")
    assert set(figures) == {f"{kind}/gpu{gpu}" for kind in kinds for gpu in well}
    assert all(value > 0 for value in figures.values())


def test_gpus_that_are_used_are_left_alone(tmp_path: Path, library: Path, fakegpu: Path) -> None:
    node = Gpus(tmp_path)
    node.environment = {"LD_LIBRARY_PATH": f"{library}:{fakegpu}", "FAKE_NVML": str(tmp_path / "nvml")}
    node.say("gpu1.ComputeRunningProcesses 1")
    node.file("proc/loadavg", IDLE)
    code, output, _ = node.health("--active", "--format", "json", *only("probe_gpu"))
    result = results(output)["probe_gpu"]
    assert (code, result["status"], result["figures"]) == (3, "absent", {})
    assert result["text"] == "not measured: programs use gpu1"


@pytest.mark.parametrize("capability", [(9, 0), (7, 0)])
def test_a_wrong_sum_is_found_wherever_it_is(capability: tuple[int, int]) -> None:
    kernel = _gemm.kernel(capability)
    rng = np.random.default_rng(1)
    ran = np.zeros(_gemm.SMS, np.uint32)
    ran[rng.choice(200, 132, replace=False)] = 2000  # sums beyond 32 bits
    right = (ran[:, None, None, None] * np.broadcast_to(kernel.sums, (_gemm.WARPS, *kernel.sums.shape))).astype(
        np.uint32
    )
    assert np.unique(kernel.sums).size > 20
    assert np.abs(kernel.sums).max() < 1 << 24
    assert _gemm.wrong(kernel, 1000, 264, right, ran) == []
    for _ in range(20):
        sums = right.copy()
        place = (int(rng.choice(np.flatnonzero(ran))), *(int(rng.integers(size)) for size in right.shape[1:]))
        sums[place] ^= np.uint32(1 << int(rng.integers(32)))
        assert _gemm.wrong(kernel, 1000, 264, sums, ran) == [place[0]]
    missing = ran.copy()
    first = int(np.flatnonzero(ran)[0])
    missing[first] = 0
    sums = right.copy()
    sums[first] = 0
    assert _gemm.wrong(kernel, 1000, 264, sums, missing) == [-1]
