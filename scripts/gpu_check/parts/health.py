"""The active probe of `argus health`: exact products, their rate, copies; and that wrong sums are reported."""

from __future__ import annotations

import dataclasses
import statistics

from argus.health.check import Blind, Look
from argus.health.checks import _gemm, probe_gpu
from scripts.gpu_check.common import Context

TIMES = 3
PEAK_TFLOPS = {(8, 0): 312.0, (9, 0): 989.0, (10, 0): 2500.0}
"""Dense half-precision peaks by NVIDIA's data sheets (A100, H100 and H200, B200)."""


def run(ctx: Context) -> None:
    if ctx.fake:
        import ctypes
        import os

        from scripts.gpu_check.common import FAKE_BUILD

        # It reads its settings when it is loaded; libcuda.so.1 is then found by its soname.
        os.environ |= {"FAKEGPU_COMPUTE": "1", "FAKEGPU_DEVICES": "2", "FAKEGPU_KERNEL_NS": "argus_gemm=20000000"}
        ctypes.CDLL(str(FAKE_BUILD / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
    limits = {name: limit.default for name, limit in probe_gpu.LIMITS.items()}
    result = probe_gpu.measure(Look(limits))
    ctx.check("probe_gpu finds the GPU well", result.status == "ok", f"{result.status}: {result.text}")
    ctx.table("probe_gpu", ["figure", "value"], sorted([name, value] for name, value in result.figures.items()))
    gpu = probe_gpu.Gpu(probe_gpu.Cuda(Look(limits)), 0)
    capability = gpu.attribute(75), gpu.attribute(76)
    count = gpu.attribute(16)
    kernel = _gemm.kernel(capability)
    rates = []
    for _ in range(TIMES):
        rate, bad = gpu.multiply()
        rates.append(rate)
        ctx.check("all sums are right", bad == [], str(bad))
    spread = statistics.pstdev(rates) / statistics.fmean(rates)
    ctx.table(
        f"{kernel.name}, {TIMES} times",
        ["TFLOP/s", "spread"],
        [[f"{min(rates):.1f} to {max(rates):.1f}", f"{spread:.2%}"]],
    )
    if not ctx.fake:
        ctx.check("its rate repeats within 5 %", spread < 0.05, f"{spread:.2%}")
        if peak := PEAK_TFLOPS.get(capability):
            share = max(rates) / peak
            ctx.check("it keeps tensor cores busy: 30 to 100 % of their peak", 0.3 < share <= 1.0, f"{share:.0%}")
    sums = kernel.sums.copy()
    sums[3, 5] += 1
    _, bad = gpu.multiply(dataclasses.replace(kernel, sums=sums))
    ctx.check(
        "a sum that differs by 1 is reported for every multiprocessor", len(bad) == count, f"{len(bad)} of {count}"
    )
    # The kernel for old GPUs runs on new ones, too.
    rate, bad = gpu.multiply(_gemm.kernel((7, 0)))
    ctx.check("the kernel without tensor cores computes rightly", bad == [], f"{rate:.1f} TFLOP/s")
    try:
        gpu.multiply(dataclasses.replace(kernel, name="not_there"))
        ctx.check("a function that is missing is reported", ctx.fake, "it was found")
    except Blind as failure:
        ctx.check("a function that is missing is reported", "cuModuleGetFunction failed" in str(failure), str(failure))
