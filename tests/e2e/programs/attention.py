"""Attends on CPUs in every way that PyTorch has, forward and backward.

    python attention.py TIMES LIBRARIES

Prints "ready", and begins with the first line of input.
Operators that only GPUs have are dispatched, and differentiated, as everywhere, but compute nothing: they launch a
kernel of the fake GPU whose grid is 1. After each there is one whose grid is 2.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch
from torch.nn import functional

NOTHING = torch.empty(0)
IN_IT, AFTER_IT = 1, 2
DENSE = "_scaled_dot_product_"


class Gpu:
    """The fake GPU, whose libraries are in a folder."""

    def __init__(self, libraries: Path) -> None:
        assert ctypes.CDLL(str(libraries / "libcudart.so.13")).cudaSetDevice(0) == 0
        self.cuda = ctypes.CDLL(str(libraries / "libcuda.so.1"))
        module, self.kernel = ctypes.c_void_p(), ctypes.c_void_p()
        assert self.cuda.cuModuleLoadData(ctypes.byref(module), b"image") == 0
        assert self.cuda.cuModuleGetFunction(ctypes.byref(self.kernel), module, b"kernel") == 0

    def launch(self, grid: int) -> None:
        assert self.cuda.cuLaunchKernel(self.kernel, grid, 1, 1, 1, 1, 1, 0, None, None, None) == 0


def forward_of(gpu: Gpu, results: int, lengths: bool) -> object:
    """A stand-in that returns so many tensors; ``lengths``: the fifth and sixth are numbers instead."""

    def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object) -> object:
        gpu.launch(IN_IT)
        rest = [torch.zeros(1) for _ in range(results - 1)]
        numbers = (query.shape[2], key.shape[2]) if lengths else ()
        rest[3:5] = numbers or rest[3:5]
        return torch.zeros(*query.shape[:3], value.shape[3], dtype=query.dtype), *rest

    return forward


def backward_of(gpu: Gpu, bias: bool) -> object:
    """A stand-in for its derivative; ``bias``: the last result is the bias's."""

    def backward(
        grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
    ) -> object:
        gpu.launch(IN_IT)
        found = tuple(torch.zeros_like(each) for each in (query, key, value))
        return (*found, NOTHING) if bias else found

    return backward


def tensors(dtype: torch.dtype, *sizes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.zeros(size, dtype=dtype, requires_grad=True) for size in sizes]


def main(times: int, libraries: Path) -> None:
    torch.set_num_threads(1)
    gpu = Gpu(libraries)
    library = torch.library.Library("aten", "IMPL")
    for kind, results, lengths in (("flash", 9, True), ("efficient", 4, False), ("cudnn", 9, True)):
        name = f"{DENSE}{kind}_attention"
        library.impl(name, forward_of(gpu, results, lengths), "CPU")
        library.impl(f"{name}_backward", backward_of(gpu, kind == "efficient"), "CPU")
    same = tensors(torch.float32, *[(1, 2, 16, 8)] * 3)
    mixed = tensors(torch.bfloat16, (2, 4, 16, 8), (2, 2, 32, 8), (2, 2, 32, 16))
    strided = [each.transpose(1, 2) for each in tensors(torch.float16, *[(3, 24, 2, 8)] * 3)]
    print("ready", flush=True)
    sys.stdin.readline()
    steps = (
        lambda: functional.scaled_dot_product_attention(*same, is_causal=True),
        lambda: functional.scaled_dot_product_attention(*strided),
        lambda: torch._scaled_dot_product_flash_attention(*mixed, 0.0, True)[0],
        lambda: torch._scaled_dot_product_flash_attention(*strided)[0],
        lambda: torch._scaled_dot_product_efficient_attention(*mixed, None, True, 0.0, False)[0],
        lambda: torch._scaled_dot_product_efficient_attention(*strided, None, False, 0.0, True)[0],
        lambda: torch._scaled_dot_product_cudnn_attention(*mixed, None, True, 0.0, True)[0],
    )
    for _ in range(times):
        for attend in steps:
            found = attend()
            gpu.launch(AFTER_IT)
            if found.dtype is not torch.float16:
                found.sum().backward()
                gpu.launch(AFTER_IT)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
