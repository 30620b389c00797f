"""GPUs as NVML has them, by a module that is made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from argus.compare.observe.gpu import UNKNOWN, Gpus


class Failure(Exception):
    pass


def nvml(degrees: list[int], used: list[int], reasons: list[int | None]) -> Any:
    def reason(at: int) -> int:
        value = reasons[at]
        if value is None:
            raise Failure
        return value

    return SimpleNamespace(
        NVMLError=Failure, nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: len(degrees),
        nvmlDeviceGetHandleByIndex=lambda at: at, nvmlDeviceGetTemperature=lambda at, _sensor: degrees[at],
        nvmlDeviceGetUtilizationRates=lambda at: SimpleNamespace(gpu=used[at]),
        nvmlDeviceGetCurrentClocksThrottleReasons=reason,
    )  # fmt: skip


def test_the_hottest_the_mean_and_those_that_heat_slows_down() -> None:
    found = Gpus(lambda: nvml([40, 83], [100, 50], [0x4, 0x40]))()
    assert found == {"gpu_temperature_c": 83, "gpu_utilization_share": 0.75, "gpu_thermal_share": 0.5}


def test_what_a_driver_does_not_say_is_not_known() -> None:
    found = Gpus(lambda: nvml([40], [1], [None]))()
    assert found["gpu_thermal_share"] is None
    assert found["gpu_temperature_c"] == 40


def test_a_machine_without_gpus_is_asked_once() -> None:
    asked = []

    def load() -> Any:
        asked.append(1)
        raise ImportError

    gpus = Gpus(load)
    assert gpus() == gpus() == UNKNOWN
    assert asked == [1]
    assert Gpus(lambda: nvml([], [], []))() == UNKNOWN
