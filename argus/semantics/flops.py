"""Floating-point operations of matrix products and attention, told from the shapes of their inputs.

Counted as PyTorch's own counter counts (``torch.utils.flop_counter``): a multiplication and an addition are two. A
product of m x k and k x n matrices is 2mnk; attention is two products a head forward, and five backward, where the
scores are computed again. Causal attention is half of it, since kernels leave the other half out (as in
FlashAttention's own benchmarks; PyTorch's counter takes the whole).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5


@dataclass(frozen=True)
class _Attention:
    """Where an operator of attention has what: places among its arguments.

    Attributes:
        query: Of the query; key and value follow.
        causal: Of ``is_causal``, or of a mask's type, where 0 is none.
        heads_first: Inputs are (batch, heads, length, size), else (batch, length, heads, size).
        lengths: Of the lengths of sequences that are packed; -1: it takes none.
        window: Of the window on the left, -1 or empty where there is none; -1: it has none.
    """

    query: int
    causal: int
    heads_first: bool
    lengths: int = -1
    window: int = -1


_PRODUCTS = {
    "aten::mm": 0, "aten::bmm": 0, "aten::_int_mm": 0, "aten::_scaled_mm": 0, "aten::addmm": 1, "aten::addmm_": 1,
    "aten::_addmm_activation": 1, "aten::baddbmm": 1, "aten::baddbmm_": 1, "aten::addbmm": 1,
}  # fmt: skip
"""Operators that multiply matrices, and which of the arguments is the first factor; the second follows it."""
_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention": _Attention(0, 4, True),
    "aten::_scaled_dot_product_efficient_attention": _Attention(0, 6, True),
    "aten::_scaled_dot_product_cudnn_attention": _Attention(0, 6, True),
    "aten::_flash_attention_forward": _Attention(0, 8, False, 3, 11),
    "aten::_efficient_attention_forward": _Attention(0, 9, False, 4),
    "aten::_cudnn_attention_forward": _Attention(0, 10, True, 4),
    "aten::_scaled_dot_product_flash_attention_backward": _Attention(1, 11, True, 6),
    "aten::_scaled_dot_product_efficient_attention_backward": _Attention(1, 11, True),
    "aten::_scaled_dot_product_cudnn_attention_backward": _Attention(1, 14, True, 9),
    "aten::_flash_attention_backward": _Attention(1, 11, False, 6, 15),
    "aten::_efficient_attention_backward": _Attention(1, 14, False, 6),
    "aten::_cudnn_attention_backward": _Attention(1, 14, True, 9),
    "flash_attn::_flash_attn_forward": _Attention(0, 5, False, -1, 6),
    "flash_attn::_flash_attn_backward": _Attention(1, 11, False, -1, 12),
}
"""Operators of attention: those of PyTorch 2.1 to 2.13 as their schemas are (``tests/unit/test_flops.py`` compares with
the PyTorch that is installed), and those that the package flash_attn registers since 2.7."""
OPERATORS = frozenset([*_PRODUCTS, *_ATTENTION])
"""Those whose work is known where the shapes of their inputs are."""
_NOT_CAUSAL, _NO_WINDOW = ("", "0", "False", "None"), ("", "None", "-1")


@dataclass(frozen=True)
class Work:
    """What one operation has to do.

    Attributes:
        flops: Floating-point operations; 0: the shapes do not tell.
        kind: "gemm" or "attention".
        shape: Of a product, "b x m x k x n" without b where there is none; of attention
            "batch x heads x queries x keys x size", with "causal" where half is left out.
        guessed: Whether attention is causal was not recorded, and it was taken for not.
    """

    flops: float
    kind: str
    shape: str = ""
    guessed: bool = False


def work_of(name: str, dims: Sequence[object], arguments: Sequence[object] = ()) -> Work:
    """The work of one operation.

    Args:
        name: One of :data:`OPERATORS`.
        dims: Sizes of each argument, as Kineto's "Input Dims"; of what is no tensor an empty list.
        arguments: Values of arguments that are no tensors, as Kineto's "Concrete Inputs"; may be empty.

    Raises:
        KeyError: Another name.
    """
    if name in _PRODUCTS:
        return _product(dims, _PRODUCTS[name])
    return _attention(dims, [str(each) for each in arguments], _ATTENTION[name], name.endswith("backward"))


def _sizes(dims: Sequence[object], place: int) -> tuple[int, ...]:
    found = dims[place] if place < len(dims) else ()
    if not isinstance(found, (list, tuple)) or not all(isinstance(size, int) and size > 0 for size in found):
        return ()
    return tuple(found)


def _product(dims: Sequence[object], first: int) -> Work:
    left, right = _sizes(dims, first), _sizes(dims, first + 1)
    if len(left) != len(right) or len(left) not in (2, 3) or left[-1] != right[-2] or left[:-2] != right[:-2]:
        return Work(0.0, "gemm")
    sizes = (*left, right[-1])
    return Work(2.0 * prod(sizes), "gemm", " x ".join(map(str, sizes)))


def _attention(dims: Sequence[object], arguments: Sequence[str], where: _Attention, backward: bool) -> Work:
    query, key, value = (_sizes(dims, where.query + k) for k in range(3))
    packed = where.lengths >= 0 and _sizes(dims, where.lengths)
    if packed or not len(query) == len(key) == len(value) == 4:
        return Work(0.0, "attention")
    if 0 <= where.window < len(arguments) and arguments[where.window] not in _NO_WINDOW:
        return Work(0.0, "attention")
    heads, length = (1, 2) if where.heads_first else (2, 1)
    told = where.causal < len(arguments) and arguments[where.causal] != ""
    causal = told and arguments[where.causal] not in _NOT_CAUSAL
    # As many products are of the query's size as of the value's, but for one more of the former backward.
    of_value = 2 if backward else 1
    of_query = (BACKWARD_PRODUCTS if backward else FORWARD_PRODUCTS) - of_value
    pairs = float(query[0]) * query[heads] * query[length] * key[length]
    flops = 2.0 * pairs * (of_query * query[3] + of_value * value[3])
    shape = " x ".join(map(str, (query[0], query[heads], query[length], key[length], query[3])))
    return Work(flops / 2 if causal else flops, "attention", shape + (" causal" if causal else ""), not told)


def utilization(step_flops: float, peak_flops: float, ranks: int, step_ns: float) -> str:
    """Model FLOPs utilisation in words.

    Args:
        step_flops: Floating-point operations of the model in a step, of all ranks.
        peak_flops: What a GPU can do at most in a second.
        ranks: Ranks of the job, a GPU each.
        step_ns: How long a step takes.
    """
    achieved = step_flops / ranks / (step_ns / 1e9)
    return (
        f"model FLOPs utilization: {achieved / peak_flops:.1%}, "
        f"{achieved / 1e12:.4g} of {peak_flops / 1e12:.4g} TFLOP/s a GPU on {ranks} ranks"
    )
