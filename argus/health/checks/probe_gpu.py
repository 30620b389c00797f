"""GPUs: how fast each multiplies matrices, and whether rightly; how fast it copies (measured)."""

from __future__ import annotations

import ctypes
import os
import time
from typing import TYPE_CHECKING, Any

from argus.health.check import Absent, Blind, Found, Look, Result
from argus.health.checks._idle import BUSY, wait_for_nobody
from argus.health.checks._nvml import devices
from argus.health.limit import Limit

if TYPE_CHECKING:
    from argus.health.checks._gemm import Kernel

LIMITS: dict[str, Limit] = {
    "busy": BUSY,
    "tflops": Limit(0.0, "TFLOP/s that each GPU must reach: warning below; 0: not checked", "models differ"),
    "slow": Limit(
        0.85,
        "share of the TFLOP/s of the node's median GPU: warning below",
        "GPUs of a node are alike; their power limits and silicon make some 5 % of difference under this load",
    ),
}
SIZE, ROUNDS = 256 << 20, 4
"""Bytes of a copy, more than a GPU's cache holds, and how many are timed together."""
WARM_S, LASTS_S = 0.1, 0.4
"""Seconds that a GPU multiplies before and while it is timed: clocks rise within some 10 ms, power capping follows."""
_BROKEN = {
    214: "an uncorrected memory error",
    220: "an uncorrected NVLink error",
    714: "a hardware stack error",
    719: "a kernel that cannot fail failed",
}
"""CUresults (cuda.h) for which the hardware is to blame: the probe's own calls give no reason for them."""
_HINT = "Drain the node; see dmesg for Xids, run dcgmi diag -r 3, reset the GPU; if it comes again, replace it."
_SM_COUNT, _MAJOR, _MINOR = 16, 75, 76  # CUdevice_attribute


def check(look: Look) -> Result:
    """By libcuda alone: a product of integer matrices on every multiprocessor for half a second, whose exact sums are
    known (``_gemm``), and copies of 256 MiB. PCIe's width and errors are other checks'."""
    wait_for_nobody(look)
    for device in devices(look):
        if device.ask("GetComputeRunningProcesses"):
            raise Absent(f"not measured: programs use {device.name}")
    return measure(look)


def measure(look: Look) -> Result:
    """The same, whoever else uses the node.

    Raises:
        Blind: There is no driver.
    """
    # As NVML numbers them, and all of them.
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    cuda = Cuda(look)
    found = look.found()
    count = ctypes.c_int()
    cuda.call("cuDeviceGetCount", ctypes.byref(count))
    gpus: dict[int, Gpu] = {}
    for number in range(count.value):
        with _ReportsFailure(found, number):
            gpus[number] = Gpu(cuda, number)
    for number, gpu in gpus.items():
        with _ReportsFailure(found, number):
            _one(found, gpus, number, gpu)
    rates = {number: rate for number in gpus if (rate := found.figures.get(f"gemm_tflops/gpu{number}")) is not None}
    usual = sorted(rates.values())[len(rates) // 2] if rates else 0.0
    for number, rate in rates.items():
        least = max(look.limits["tflops"], look.limits["slow"] * usual)
        if rate < least:
            text = f"gpu{number} multiplies at {rate:.3g} TFLOP/s, less than {least:.3g}"
            found.warning(text, "See its clocks, power and heat under load: nvidia-smi -q -d PERFORMANCE,POWER.")
    slowest = min(rates.values(), default=0.0)
    return found.result(f"{len(gpus)} GPUs compute rightly, the slowest at {slowest:.3g} TFLOP/s")


class Failed(Blind):
    """A call of the driver that failed."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} failed: CUresult {code}")
        self.code = code


class _ReportsFailure:
    """Reports a GPU whose calls fail, so that the others are measured."""

    def __init__(self, found: Found, number: int) -> None:
        self._found, self._number = found, number

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, failure: BaseException | None, trace: object) -> bool:
        if not isinstance(failure, Failed):
            return False
        if failure.code in _BROKEN:
            self._found.critical(f"gpu{self._number} is broken: {_BROKEN[failure.code]} ({failure})", _HINT)
        else:
            self._found.unknown(f"gpu{self._number}: {failure}")
        return True


def _one(found: Found, gpus: dict[int, Gpu], number: int, gpu: Gpu) -> None:
    gpu.use()
    rate, bad = gpu.multiply()
    found.figures[f"gemm_tflops/gpu{number}"] = rate
    if bad:
        where = ", ".join(map(str, bad[:4])) + (", …" if len(bad) > 4 else "")
        which = f"wrong sums on {len(bad)} of its multiprocessors (SM {where})" if bad[0] >= 0 else "blocks are missing"
        found.critical(f"gpu{number} computes wrongly: {which}", _HINT)
    host, size = ctypes.c_void_p(), ctypes.c_size_t(SIZE)
    gpu.call("cuMemHostAlloc", ctypes.byref(host), size, ctypes.c_uint(0))
    figures = {
        "copy_gb_per_s": gpu.speed(SIZE, "cuMemcpyHtoDAsync_v2", gpu.there, host, size, None),
        # Read and written bytes both count.
        "device_gb_per_s": gpu.speed(2 * SIZE, "cuMemcpyDtoDAsync_v2", gpu.here, gpu.there, size, None),
    }
    after = [other for other in gpus if other > number] + [other for other in gpus if other < number]
    if after:
        to = gpus[after[0]]
        figures["peer_gb_per_s"] = gpu.speed(
            SIZE, "cuMemcpyPeerAsync", to.there, to.context, gpu.here, gpu.context, size, None
        )
    gpu.call("cuMemFreeHost", host)
    found.figures |= {f"{name}/gpu{number}": value for name, value in figures.items()}


class Cuda:
    """libcuda; a call that fails is reported by its name and CUresult."""

    def __init__(self, look: Look) -> None:
        self._look = look
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as failure:
            raise Blind(f"libcuda.so.1 cannot be loaded: {failure}") from None
        self.call("cuInit", ctypes.c_uint(0))

    def call(self, name: str, *arguments: Any, who: str = "") -> None:
        """Calls a function.

        Raises:
            Failed: It failed.
        """
        self._look.note(f"{who}{name}")
        if code := int(getattr(self._library, name)(*arguments)):
            raise Failed(name, code)


class Gpu:
    """A GPU with two pieces of memory."""

    def __init__(self, cuda: Cuda, number: int) -> None:
        self._cuda, self._number = cuda, number
        self.context, self.here, self.there = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self._device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(self._device), ctypes.c_int(number))
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), self._device)
        self.use()
        for memory in (self.here, self.there):
            self.call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(SIZE))

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function of the driver, for this GPU."""
        self._cuda.call(name, *arguments, who=f"gpu{self._number}: ")

    def use(self) -> None:
        """Makes it the one that calls are for."""
        self.call("cuCtxSetCurrent", self.context)

    def speed(self, nbytes: int, name: str, *arguments: Any) -> float:
        """Of a copy, in GB/s; the first one is not timed."""
        self.call(name, *arguments)
        self.call("cuCtxSynchronize")
        begun = time.perf_counter()
        for _ in range(ROUNDS):
            self.call(name, *arguments)
        self.call("cuCtxSynchronize")
        return ROUNDS * nbytes / (time.perf_counter() - begun) / 1e9

    def attribute(self, attribute: int) -> int:
        """Of the device: cuDeviceGetAttribute."""
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), self._device)
        return value.value

    def multiply(self, kernel: Kernel | None = None) -> tuple[float, list[int]]:
        """Products on all multiprocessors for ``WARM_S`` + ``LASTS_S``, or three launches where these take longer.

        Args:
            kernel: Instead of the one for this GPU.

        Returns:
            TFLOP/s, and the multiprocessors that computed wrongly (``_gemm.wrong``).
        """
        import numpy as np  # every run of argus health imports this file

        from argus.health.checks import _gemm

        kernel = kernel or _gemm.kernel((self.attribute(_MAJOR), self.attribute(_MINOR)))
        grid = self.attribute(_SM_COUNT) * _gemm.BLOCKS_PER_SM
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(kernel.ptx.encode()))
        self.call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(kernel.name.encode()))
        shape = (_gemm.SMS, _gemm.WARPS, *kernel.sums.shape)
        sums = int(np.prod(shape))
        memory = np.zeros(sums + _gemm.SMS + kernel.operands.size, np.uint32)
        memory[sums + _gemm.SMS :] = kernel.operands.ravel()
        host, nbytes = ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes)
        base = self.here.value or 0
        parameters = [ctypes.c_uint64(base + 4 * place) for place in (0, sums, sums + _gemm.SMS)]
        parameters_of = (ctypes.c_void_p * 4)(
            *map(ctypes.addressof, [*parameters, rounds := ctypes.c_uint32(kernel.rounds)])
        )
        launches = 0

        def launch(times: int) -> float:
            nonlocal launches
            begun = time.perf_counter()
            for _ in range(times):
                self.call("cuLaunchKernel", function, grid, 1, 1, _gemm.THREADS, 1, 1, 0, None, parameters_of, None)
            self.call("cuCtxSynchronize")
            launches += times
            return time.perf_counter() - begun

        self.call("cuMemcpyHtoD_v2", self.here, host, nbytes)
        begun, took = time.perf_counter(), launch(1)
        while time.perf_counter() - begun < WARM_S:
            took = launch(1)
        times = max(1, round(LASTS_S / took))
        took = launch(times)
        self.call("cuMemcpyDtoH_v2", host, self.here, nbytes)
        self.call("cuModuleUnload", module)
        del parameters, rounds
        bad = _gemm.wrong(kernel, launches, grid, memory[:sums].reshape(shape), memory[sums : sums + _gemm.SMS])
        return times * grid * _gemm.WARPS * kernel.flop / took / 1e12, bad
