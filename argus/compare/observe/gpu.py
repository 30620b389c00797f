"""GPUs as a run leaves them: temperature, utilization, and whether heat slows them down; by NVML."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

THERMAL = 0x20 | 0x40
"""Reasons for lower clocks that are heat: software's and the hardware's thermal slowdown (nvml.h,
nvmlClocksEventReasonSwThermalSlowdown and nvmlClocksThrottleReasonHwThermalSlowdown)."""
UNKNOWN = {"gpu_temperature_c": None, "gpu_utilization_share": None, "gpu_thermal_share": None}


class Gpus:
    """The GPUs of this machine, found when first asked for.

    Args:
        load: Gives the module ``pynvml``.
    """

    def __init__(self, load: Callable[[], Any] | None = None) -> None:
        self._load = load or _pynvml
        self._nvml: Any = None
        self._tried = False

    def __call__(self) -> dict[str, float | None]:
        """The hottest GPU's temperature, the mean utilization of all in the last moment, and the share of them that
        heat slows down; None: there is no GPU, or its driver does not say it."""
        if not self._tried:
            self._tried = True
            try:
                nvml = self._load()
                nvml.nvmlInit()
                self._nvml = nvml
            except Exception:  # no module, no driver, no GPU: each with an exception of its own
                self._nvml = None
        if self._nvml is None:
            return dict(UNKNOWN)
        nvml = self._nvml
        handles = self._asked(lambda: [nvml.nvmlDeviceGetHandleByIndex(at) for at in range(nvml.nvmlDeviceGetCount())])
        degrees, used, slowed = [], [], []
        for handle in handles or ():
            degrees.append(self._asked(nvml.nvmlDeviceGetTemperature, handle, 0))
            used.append(self._asked(lambda one: nvml.nvmlDeviceGetUtilizationRates(one).gpu, handle))
            slowed.append(self._asked(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle))
        return {
            "gpu_temperature_c": _of(max, degrees),
            "gpu_utilization_share": _of(lambda values: sum(values) / len(values) / 100, used),
            "gpu_thermal_share": _of(lambda values: sum(bool(one & THERMAL) for one in values) / len(values), slowed),
        }

    def _asked(self, question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(*arguments)
        except self._nvml.NVMLError:
            return None


def _of(combine: Callable[[list[Any]], float], values: list[Any]) -> float | None:
    """The figures of all GPUs combined."""
    known = [value for value in values if value is not None]
    return round(float(combine(known)), 4) if known else None


def _pynvml() -> Any:
    import pynvml

    return pynvml
