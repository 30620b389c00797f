"""What a node's GPUs may do: clocks and power, as its operators set them. NVIDIA says that by a library alone, whose
driver may never answer: it is asked in a process of its own, which is killed if it does not. Run as a module, this is
that process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

ANSWER_S = 4.0
"""So long the driver may take: a loaded one takes a tenth of a second, and 2 s where nothing keeps it awake."""
SM = 1
"""NVML_CLOCK_SM of nvml.h: the clock that kernels run at."""
NAMES = ("gpu.clock_max", "gpu.clock_application", "gpu.power_limit")
"""The facts: the highest clock, the one that applications are set to, and the power limit in force."""


def gpu_limits(
    command: Sequence[str] = (sys.executable, "-I", "-m", "argus.capture.gpu_limits"), answer_s: float = ANSWER_S
) -> dict[str, list[str]]:
    """Of each of :data:`NAMES` what the GPUs have, one after the other; what they do not say is missing.

    Raises:
        OSError: NVIDIA's library does not answer.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=answer_s, check=True, stdin=subprocess.DEVNULL, env={}, cwd="/"
        )
        answer = json.loads(done.stdout)
        return {name: [str(one) for one in answer.get(name, ())] for name in NAMES}
    except (subprocess.SubprocessError, ValueError, TypeError, AttributeError) as failure:
        raise OSError(f"NVIDIA's library does not answer: {failure}") from None


def ask(nvml: Any) -> dict[str, list[str]]:
    """The same of the module ``pynvml``, in this process."""
    nvml.nvmlInit()
    questions: tuple[Callable[[Any], str], ...] = (
        lambda gpu: f"{nvml.nvmlDeviceGetMaxClockInfo(gpu, SM)} MHz",
        lambda gpu: f"{nvml.nvmlDeviceGetApplicationsClock(gpu, SM)} MHz",
        lambda gpu: f"{round(nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000)} W",
    )
    found: dict[str, list[str]] = {}
    for place in range(nvml.nvmlDeviceGetCount()):
        gpu = nvml.nvmlDeviceGetHandleByIndex(place)
        for name, question in zip(NAMES, questions, strict=True):
            try:
                found.setdefault(name, []).append(question(gpu))
            except nvml.NVMLError:  # not supported by this GPU, driver or user
                continue
    return found


def _main() -> None:
    import pynvml

    json.dump(ask(pynvml), sys.stdout)


if __name__ == "__main__":
    _main()
