"""What a node's GPUs may do, by a stand-in for the module ``pynvml``, with its names and units."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from argus.capture.gpu_limits import SM, ask, gpu_limits


class NVMLError(Exception):
    """What a GPU does not support."""


def nvml(clocks: dict[int, tuple[int, int, int]]) -> Any:
    """By GPU: highest and application clock, MHz, and power limit, mW; 0: not supported."""

    def of(place: int) -> Any:
        def answer(gpu: int, *kind: int) -> int:
            assert kind in ((), (SM,))
            if not clocks[gpu][place]:
                raise NVMLError
            return clocks[gpu][place]

        return answer

    return SimpleNamespace(
        NVMLError=NVMLError, nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: len(clocks),
        nvmlDeviceGetHandleByIndex=lambda place: place, nvmlDeviceGetMaxClockInfo=of(0),
        nvmlDeviceGetApplicationsClock=of(1), nvmlDeviceGetEnforcedPowerLimit=of(2),
    )  # fmt: skip


def test_clocks_and_power_of_each_gpu() -> None:
    assert ask(nvml({0: (1980, 1410, 700_000), 1: (1980, 0, 699_600)})) == {
        "gpu.clock_max": ["1980 MHz", "1980 MHz"], "gpu.clock_application": ["1410 MHz"],
        "gpu.power_limit": ["700 W", "700 W"],
    }  # fmt: skip


@pytest.mark.parametrize(
    "script", ["exit 3", "echo nonsense", "echo '[]'", "echo '{\"gpu.clock_max\": 5}'", "kill -9 $$"]
)
def test_a_library_that_fails_is_no_answer(script: str) -> None:
    with pytest.raises(OSError, match="NVIDIA's library does not answer"):
        gpu_limits(["sh", "-c", script])


def test_a_library_that_never_answers_is_given_up() -> None:
    with pytest.raises(OSError, match="timed out"):
        gpu_limits(["sleep", "600"], answer_s=0.05)


def test_what_the_process_prints_is_taken_by_name() -> None:
    printed = '{"gpu.clock_max": ["1980 MHz"], "other": ["x"]}'
    found = gpu_limits(["echo", printed], answer_s=60.0)
    assert found == {"gpu.clock_max": ["1980 MHz"], "gpu.clock_application": [], "gpu.power_limit": []}
