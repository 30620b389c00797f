"""Attends on CPUs in every way that PyTorch has, forward and backward.

    python attention.py TIMES

Prints "ready", and begins with the first line of input.
Operators that only GPUs have compute nothing here, but are dispatched, and differentiated, as everywhere.
"""

from __future__ import annotations

import sys

import torch
from torch.nn import functional

NOTHING = torch.empty(0)
DENSE = "_scaled_dot_product_"


def forward_of(results: int, lengths: bool) -> object:
    """A stand-in that returns so many tensors; ``lengths``: the fifth and sixth are numbers instead."""

    def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object) -> object:
        rest = [torch.zeros(1) for _ in range(results - 1)]
        numbers = (query.shape[2], key.shape[2]) if lengths else ()
        rest[3:5] = numbers or rest[3:5]
        return torch.zeros(*query.shape[:3], value.shape[3], dtype=query.dtype), *rest

    return forward


def backward_of(bias: bool) -> object:
    """A stand-in for its derivative; ``bias``: the last result is the bias's."""

    def backward(
        grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
    ) -> object:
        found = tuple(torch.zeros_like(each) for each in (query, key, value))
        return (*found, NOTHING) if bias else found

    return backward


def tensors(dtype: torch.dtype, *sizes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.zeros(size, dtype=dtype, requires_grad=True) for size in sizes]


def main(times: int) -> None:
    torch.set_num_threads(1)
    library = torch.library.Library("aten", "IMPL")
    for kind, results, lengths in (("flash", 9, True), ("efficient", 4, False), ("cudnn", 9, True)):
        name = f"{DENSE}{kind}_attention"
        library.impl(name, forward_of(results, lengths), "CPU")
        library.impl(f"{name}_backward", backward_of(kind == "efficient"), "CPU")
    same = tensors(torch.float32, *[(1, 2, 16, 8)] * 3)
    mixed = tensors(torch.bfloat16, (2, 4, 16, 8), (2, 2, 32, 8), (2, 2, 32, 16))
    strided = [each.transpose(1, 2) for each in tensors(torch.float16, *[(3, 24, 2, 8)] * 3)]
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(times):
        functional.scaled_dot_product_attention(*same, is_causal=True).sum().backward()
        functional.scaled_dot_product_attention(*strided)
        torch._scaled_dot_product_flash_attention(*mixed, 0.0, True)[0].sum().backward()
        torch._scaled_dot_product_flash_attention(*strided)
        torch._scaled_dot_product_efficient_attention(*mixed, None, True, 0.0, False)[0].sum().backward()
        torch._scaled_dot_product_efficient_attention(*strided, None, False, 0.0, True)
        torch._scaled_dot_product_cudnn_attention(*mixed, None, True, 0.0, True)[0].sum().backward()


if __name__ == "__main__":
    main(int(sys.argv[1]))
