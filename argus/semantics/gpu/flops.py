"""Floating-point operations of matrix products and attention, derived from the shapes of their inputs.

Counted as PyTorch's own counter counts (``torch.utils.flop_counter``): a multiplication and an addition are two. A
product of m x k and k x n matrices is 2mnk; attention is two products a head forward, and five backward, where the
scores are computed again. Causal attention is half of it, since kernels leave the other half out (as in
FlashAttention's own benchmarks; PyTorch's counter takes the whole).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from argus.semantics.gpu.joins import last_of

Int = NDArray[np.int64]
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5
OUTSIDE = -1
"""A step of what was launched outside every step."""
WORK = np.dtype([("begin_ns", "<i8"), ("end_ns", "<i8"), ("tid", "<i8"), ("flops", "<f8"), ("text", "<i8")])
"""One operation on the CPU whose work is known from its shapes. ``text``: place in a list of what they are: kind, name,
type and shape, as in the table ``kernel_flops``."""


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
    "aten::_scaled_dot_product_flash_attention_for_cpu": _Attention(0, 4, True),
    "aten::_scaled_dot_product_efficient_attention": _Attention(0, 6, True),
    "aten::_scaled_dot_product_cudnn_attention": _Attention(0, 6, True),
    "aten::_flash_attention_forward": _Attention(0, 8, False, 3, 11),
    "aten::_efficient_attention_forward": _Attention(0, 9, False, 4),
    "aten::_cudnn_attention_forward": _Attention(0, 10, True, 4),
    "aten::_scaled_dot_product_flash_attention_backward": _Attention(1, 11, True, 6),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _Attention(1, 7, True),
    "aten::_scaled_dot_product_efficient_attention_backward": _Attention(1, 11, True),
    "aten::_scaled_dot_product_cudnn_attention_backward": _Attention(1, 14, True, 9),
    "aten::_flash_attention_backward": _Attention(1, 11, False, 6, 15),
    "aten::_efficient_attention_backward": _Attention(1, 14, False, 6),
    "aten::_cudnn_attention_backward": _Attention(1, 14, True, 9),
    "flash_attn::_flash_attn_forward": _Attention(0, 5, False, -1, 6),
    "flash_attn::_flash_attn_backward": _Attention(1, 11, False, -1, 12),
}
"""Operators of attention: those of PyTorch 2.1 to 2.13 as their schemas are (``tests/unit/semantics/gpu/test_flops.py``
compares with the PyTorch that is installed), and those that the package flash_attn registers since 2.7."""
OPERATORS = frozenset([*_PRODUCTS, *_ATTENTION])
"""Those whose work is known where the shapes of their inputs are."""
_NOT_CAUSAL, _NO_WINDOW = ("", "0", "False", "None"), ("", "None", "-1")


@dataclass(frozen=True)
class Work:
    """What one operation has to do.

    Attributes:
        flops: Floating-point operations; 0: the shapes do not determine them.
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
    return _attention(name, dims, [str(each) for each in arguments])


def product(sizes: Sequence[int]) -> Work:
    """The work of a product of matrices. ``sizes``: m, k and n, and before them how many there are in a batch."""
    return Work(2.0 * prod(sizes), "gemm", " x ".join(map(str, sizes)))


def attention(name: str, query: Sequence[int], key: Sequence[int], value: Sequence[int], causal: bool) -> Work:
    """The work of attention.

    Args:
        name: One of :data:`OPERATORS`, which determines the order of the sizes, and whether it is the backward pass.
        query, key, value: Their four sizes.
        causal: Whether half of it is left out.

    Raises:
        KeyError: Another name.
    """
    heads, length = (1, 2) if _ATTENTION[name].heads_first else (2, 1)
    backward = name.endswith("backward")
    # As many products are of the query's size as of the value's, but for one more of the former backward.
    of_value = 2 if backward else 1
    of_query = (BACKWARD_PRODUCTS if backward else FORWARD_PRODUCTS) - of_value
    pairs = float(query[0]) * query[heads] * query[length] * key[length]
    flops = 2.0 * pairs * (of_query * query[3] + of_value * value[3])
    shape = " x ".join(map(str, (query[0], query[heads], query[length], key[length], query[3])))
    return Work(flops / 2 if causal else flops, "attention", shape + (" causal" if causal else ""))


def _sizes(dims: Sequence[object], place: int) -> tuple[int, ...]:
    sizes = dims[place] if place < len(dims) else ()
    if not isinstance(sizes, (list, tuple)) or not all(isinstance(size, int) and size > 0 for size in sizes):
        return ()
    return tuple(sizes)


def _product(dims: Sequence[object], first: int) -> Work:
    left, right = _sizes(dims, first), _sizes(dims, first + 1)
    if len(left) != len(right) or len(left) not in (2, 3) or left[-1] != right[-2] or left[:-2] != right[:-2]:
        return Work(0.0, "gemm")
    return product((*left, right[-1]))


def _attention(name: str, dims: Sequence[object], arguments: Sequence[str]) -> Work:
    where = _ATTENTION[name]
    query, key, value = (_sizes(dims, where.query + k) for k in range(3))
    packed = where.lengths >= 0 and _sizes(dims, where.lengths)
    if packed or not len(query) == len(key) == len(value) == 4:
        return Work(0.0, "attention")
    if 0 <= where.window < len(arguments) and arguments[where.window] not in _NO_WINDOW:
        return Work(0.0, "attention")
    is_given = where.causal < len(arguments) and arguments[where.causal] != ""
    causal = is_given and arguments[where.causal] not in _NOT_CAUSAL
    return replace(attention(name, query, key, value, causal), guessed=not is_given)


@dataclass(frozen=True)
class Achieved:
    """Rows of the table ``kernel_flops``, columns of shape (n,).

    Attributes:
        step: OUTSIDE: in none.
        text: As ``WORK["text"]``.
        symbol: The kernel that took longest, as in the kernels' ``name``.
        ts_ns: When the first kernel began.
    """

    step: Int
    device: Int
    text: Int
    symbol: Int
    ts_ns: Int
    calls: Int
    kernels: Int
    flops: NDArray[np.float64]
    duration_ns: Int


def launched_by(works: NDArray[np.void], kernels: NDArray[np.void]) -> Int:
    """In which operation its thread launched each kernel: places in ``works``, -1: in none. Shape (kernels,).

    Args:
        works: ``WORK``; none lies in another one of its thread.
        kernels: ``launch_ns`` and ``launch_tid`` of each.
    """
    launched = kernels["launch_ns"].astype(np.int64)
    place = last_of(works["tid"], works["begin_ns"], kernels["launch_tid"].astype(np.int64), launched)
    ends = np.append(works["end_ns"], 0)  # of what is in none, -1
    return np.where((place >= 0) & (launched <= ends[place]), place, -1)


def step_of(ts_ns: Int, begin_ns: Int, end_ns: Int) -> Int:
    """In which step each moment lies: places in the steps, which are in order of time, -1: in none."""
    place = np.searchsorted(begin_ns, ts_ns, side="right") - 1
    if not len(begin_ns):
        return place
    return np.where((place >= 0) & (ts_ns < end_ns[place]), place, -1)


def sum_up(works: NDArray[np.void], step: Int, kernels: NDArray[np.void], owner: Int) -> Achieved:
    """What operations took on the GPU, by step, GPU and text. Those without kernels are left out.

    Args:
        works: ``WORK``.
        step: Of each of them.
        kernels: ``start_ns``, ``end_ns``, ``device`` and ``name`` of each.
        owner: The place in ``works`` of each kernel's operation.
    """
    device = np.zeros(len(works), np.int64)
    device[owner] = kernels["device"]
    seen = np.bincount(owner, minlength=len(works)) > 0
    keys, row_of = np.unique(np.stack([step, device, works["text"]])[:, seen], axis=1, return_inverse=True)
    count = keys.shape[1]
    row = np.full(len(works), -1)
    row[seen] = row_of.reshape(-1)
    of_kernel = row[owner]
    start = kernels["start_ns"].astype(np.int64)
    spent = kernels["end_ns"].astype(np.int64) - start
    first = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(first, of_kernel, start)
    duration, symbol = np.zeros(count, np.int64), np.zeros(count, np.int64)
    np.add.at(duration, of_kernel, spent)
    by_name, name_of = np.unique(np.stack([of_kernel, kernels["name"]]), axis=1, return_inverse=True)
    most = np.bincount(name_of.reshape(-1), weights=spent, minlength=by_name.shape[1])
    rising = np.argsort(most, kind="stable")
    symbol[by_name[0][rising]] = by_name[1][rising]
    flops = np.zeros(count)
    np.add.at(flops, row[seen], works["flops"][seen])
    return Achieved(
        step=keys[0], device=keys[1], text=keys[2], symbol=symbol, ts_ns=first,
        calls=np.bincount(row[seen], minlength=count), kernels=np.bincount(of_kernel, minlength=count),
        flops=flops, duration_ns=duration,
    )  # fmt: skip


@dataclass
class Counted:
    """What the products and the attention of some steps come to, all GPUs together.

    Attributes:
        flops: Floating-point operations of those whose shapes are known.
        with_flops_ns, without_flops_ns: Time of the kernels of these, and of kernels that are such by their names
            alone.
        steps, steps_ns: How many steps these are, each rank's apart, and how long they took.
    """

    flops: float = 0.0
    with_flops_ns: int = 0
    without_flops_ns: int = 0
    steps: int = 0
    steps_ns: int = 0

    def add(self, other: Counted) -> None:
        """Adds what other steps come to."""
        self.flops += other.flops
        self.with_flops_ns += other.with_flops_ns
        self.without_flops_ns += other.without_flops_ns
        self.steps += other.steps
        self.steps_ns += other.steps_ns

    def describe(self, peak_flops: float) -> str:
        """In words; empty: nothing was counted. ``peak_flops``: what a GPU can do at most in a second; 0: not given."""
        if not (self.flops and self.steps_ns):
            return ""
        achieved = self.flops / self.steps_ns * 1e9
        share = self.with_flops_ns / (self.with_flops_ns + self.without_flops_ns)
        of_peak = f" of {peak_flops / 1e12:.4g}" if peak_flops else ""
        utilized = f" ({achieved / peak_flops:.1%})" if peak_flops else ""
        return (
            f"counted FLOPs: {self.flops / self.steps:.3g} a step and GPU, {achieved / 1e12:.4g}{of_peak} TFLOP/s a GPU"
            f"{utilized}; shapes were known of {int(1e3 * share) / 10}% of the time of matrix products and attention"
        )


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
