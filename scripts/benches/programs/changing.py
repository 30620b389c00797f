"""Launches kernels that nobody has seen before, in grids that nobody has seen before, from code made a moment ago.

What ``torch.compile`` and Triton do on inputs whose shapes keep changing; on the fake GPU, until it is killed.
"""

from __future__ import annotations

import ctypes
import itertools
import time

LAUNCHES = 24
STEP_S = 0.05
SOURCE = """
def step_{number}(launch, busy_until):
    for place in range({launches}):
        launch({number} * {launches} + place)
    while time.perf_counter() < busy_until:
        pass
"""


def main() -> None:
    cuda = ctypes.CDLL("libcuda.so.1")
    context, module = ctypes.c_void_p(), ctypes.c_void_p()
    for result in (
        cuda.cuInit(0),
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
        cuda.cuCtxSetCurrent(context),
        cuda.cuModuleLoadData(ctypes.byref(module), b"any"),
    ):
        assert result == 0, result
    for number in itertools.count(1):
        begin = time.perf_counter()
        function = ctypes.c_void_p()
        assert not cuda.cuModuleGetFunction(ctypes.byref(function), module, b"triton_fused_kernel_%d" % number)

        def launch(grid: int, function: ctypes.c_void_p = function) -> None:
            cuda.cuLaunchKernel(function, grid % 2**31 + 1, 1, 1, 128, 1, 1, 0, None, None, None)

        scope: dict[str, object] = {"time": time}
        source = SOURCE.format(number=number, launches=LAUNCHES)
        exec(compile(source, f"/tmp/generated_{number}.py", "exec"), scope)
        scope[f"step_{number}"](launch, begin + 0.01)  # type: ignore[operator]
        cuda.cuCtxSynchronize()
        time.sleep(max(0.0, begin + STEP_S - time.perf_counter()))


main()
