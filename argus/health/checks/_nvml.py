"""NVIDIA's management library (nvidia-ml-py), device by device; what a device does not support is None."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from argus.health.check import Absent, Blind, Look

NVIDIA, DISPLAY = "0x10de", "0x03"  # PCI vendor, and the class of GPUs


@dataclass(frozen=True)
class Device:
    """A GPU: ``ask`` is NVML's function of that name for it."""

    name: str
    """``gpu0``, by NVML's index, which is the order of PCI addresses."""
    handle: Any
    nvml: Any
    look: Look

    def ask(self, function: str, *arguments: Any) -> Any:
        """The result of ``nvmlDevice<function>``; None: not supported by this GPU, driver or user.

        Raises:
            Blind: It fails otherwise, as for a GPU that is lost.
        """
        self.look.note(f"{self.name}: nvmlDevice{function}")
        nvml = self.nvml
        try:
            return getattr(nvml, f"nvmlDevice{function}")(self.handle, *arguments)
        except nvml.NVMLError as failure:
            nothing = (
                nvml.NVML_ERROR_NOT_SUPPORTED,
                nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
                nvml.NVML_ERROR_NO_PERMISSION,
                nvml.NVML_ERROR_INVALID_ARGUMENT,
                nvml.NVML_ERROR_NO_DATA,
                nvml.NVML_ERROR_NOT_FOUND,
            )
            if failure.value in nothing:
                return None
            raise Blind(f"{self.name}: nvmlDevice{function}: {failure}") from None


def on_bus(look: Look) -> int:
    """How many NVIDIA GPUs the PCI bus has."""
    gpus = 0
    for folder in look.folders("sys/bus/pci/devices/*"):
        try:
            vendor, kind = (folder / "vendor").read_text().strip(), (folder / "class").read_text()
        except OSError:
            continue
        gpus += vendor == NVIDIA and kind.startswith(DISPLAY)
    return gpus


def library(look: Look) -> Any:
    """NVML, ready to be asked. It is loaded in this process: a check's.

    Raises:
        Absent: No GPU and no driver.
        Blind: There are GPUs, but the driver does not answer.
    """
    import pynvml

    look.note("nvmlInit")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as failure:
        if not on_bus(look):
            raise Absent("no NVIDIA GPU") from None
        raise Blind(f"{on_bus(look)} NVIDIA GPUs on the PCI bus, but NVML says: {failure}") from None
    return pynvml


def devices(look: Look) -> Iterator[Device]:
    """Every GPU that can be opened. One that cannot is reported by the check ``gpu``.

    Raises:
        Absent, Blind: As ``library``; Blind also where no GPU can be opened.
    """
    nvml = library(look)
    opened = 0
    count = nvml.nvmlDeviceGetCount()
    for index in range(count):
        look.note(f"gpu{index}: nvmlDeviceGetHandleByIndex")
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError:
            continue
        opened += 1
        yield Device(f"gpu{index}", handle, nvml, look)
    if not opened:
        raise Absent("no NVIDIA GPU") if not count else Blind(f"none of {count} GPUs can be opened")
