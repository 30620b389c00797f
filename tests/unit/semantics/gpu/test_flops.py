"""The work of operators from the shapes of their inputs."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.cli.options import flops as step_and_peak
from argus.model.errors import ArgusError
from argus.semantics.gpu import flops
from argus.semantics.gpu.flops import OPERATORS, work_of
from tests.unit.semantics.gpu.counted import calls_made

BHSD, BSHD = [2, 8, 128, 64], [2, 128, 8, 64]
PAIRS = 2 * 8 * 128 * 128


@pytest.mark.parametrize(
    ("name", "dims", "expected", "shape"),
    [
        ("aten::mm", [[3, 5], [5, 7]], 2 * 3 * 5 * 7, "3 x 5 x 7"),
        ("aten::addmm", [[7], [3, 5], [5, 7], [], []], 2 * 3 * 5 * 7, "3 x 5 x 7"),
        ("aten::bmm", [[11, 3, 5], [11, 5, 7]], 2 * 11 * 3 * 5 * 7, "11 x 3 x 5 x 7"),
        ("aten::baddbmm", [[11, 3, 7], [11, 3, 5], [11, 5, 7]], 2 * 11 * 3 * 5 * 7, "11 x 3 x 5 x 7"),
        ("aten::mm", [[3, 5], [6, 7]], 0, ""),
        ("aten::mm", [[3, 5]], 0, ""),
        ("aten::mm", [[3, 0], [0, 7]], 0, ""),
        ("aten::mm", ["x", None], 0, ""),
    ],
)
def test_products(name: str, dims: list[object], expected: float, shape: str) -> None:
    work = work_of(name, dims)
    assert (work.flops, work.kind, work.shape, work.guessed) == (expected, "gemm", shape, False)


@pytest.mark.parametrize(
    ("name", "dims", "causal_at", "products"),
    [
        ("aten::_scaled_dot_product_flash_attention", [BHSD] * 3, 4, 2),
        ("aten::_scaled_dot_product_efficient_attention", [BHSD] * 3, 6, 2),
        ("aten::_flash_attention_forward", [BSHD] * 3, 8, 2),
        ("flash_attn::_flash_attn_forward", [BSHD] * 3, 5, 2),
        ("aten::_scaled_dot_product_flash_attention_backward", [BHSD] * 6, 11, 5),
        ("flash_attn::_flash_attn_backward", [BSHD] * 6, 11, 5),
    ],
)
def test_attention(name: str, dims: list[object], causal_at: int, products: int) -> None:
    whole = products * 2.0 * PAIRS * 64
    arguments = [""] * 16
    for output, work in (("False", whole), ("True", whole / 2)):
        arguments[causal_at] = output
        found = work_of(name, dims, arguments)
        assert (found.flops, found.guessed) == (work, False)
        assert found.shape == "2 x 8 x 128 x 128 x 64" + (" causal" if output == "True" else "")
    assert work_of(name, dims).guessed
    assert work_of(name, dims).flops == whole


def test_keys_of_another_length_and_values_of_another_size() -> None:
    dims = [[2, 8, 128, 64], [2, 2, 512, 64], [2, 2, 512, 32]]
    pairs = 2 * 8 * 128 * 512
    assert work_of("aten::_scaled_dot_product_flash_attention", dims).flops == 2 * pairs * (64 + 32)
    backward = work_of("aten::_scaled_dot_product_flash_attention_backward", [dims[0], *dims])
    assert backward.flops == 2 * pairs * (3 * 64 + 2 * 32)


def test_what_shapes_do_not_determine() -> None:
    packed = [[256, 8, 64], [256, 8, 64], [256, 8, 64], [3], [3]]
    assert work_of("aten::_flash_attention_forward", packed).flops == 0
    assert work_of("aten::_flash_attention_forward", [BSHD, BSHD, BSHD, [3], [3]]).flops == 0
    arguments = [*[""] * 5, "True", "128", "0"]
    assert work_of("flash_attn::_flash_attn_forward", [BSHD] * 3, arguments).flops == 0
    arguments[6] = "-1"
    assert work_of("flash_attn::_flash_attn_forward", [BSHD] * 3, arguments).flops > 0


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="pip install torch (ARGUS_WITH_TORCH=1)")
def test_places_of_arguments_are_those_of_pytorch() -> None:
    """And the work is what PyTorch's own counter says, where nothing is causal."""
    import torch
    from torch.utils import flop_counter

    def names(operator: str) -> list[str]:
        overload = getattr(torch.ops.aten, operator.removeprefix("aten::")).default
        return [argument.name for argument in overload._schema.arguments]

    checked = 0
    for operator in sorted(name for name in OPERATORS if name.startswith("aten::") and not name.endswith("_")):
        found = names(operator)
        where = flops._ATTENTION.get(operator)
        if where is None:
            first = flops._PRODUCTS[operator]
            assert found[first] in ("self", "mat1", "batch1"), operator
            assert found[first + 1] in ("mat2", "batch2"), operator
            continue
        assert found[where.query : where.query + 3] == ["query", "key", "value"], operator
        assert found[where.causal] in ("is_causal", "custom_mask_type"), operator
        if where.lengths >= 0:
            assert found[where.lengths] in ("cum_seq_q", "cu_seqlens_q"), operator
        if where.window >= 0:
            assert found[where.window] == "window_size_left", operator
        checked += 1
    assert checked == 14
    dims = [[2, 8, 128, 64], [2, 8, 512, 64], [2, 8, 512, 32]]
    assert flop_counter.sdpa_flop_count(*dims) == work_of("aten::_scaled_dot_product_flash_attention", dims).flops
    backward = work_of("aten::_scaled_dot_product_flash_attention_backward", [[2, 8, 128, 32], *dims])
    assert flop_counter.sdpa_backward_flop_count([2, 8, 128, 32], *dims) == backward.flops


def test_a_peak_alone_is_enough_and_work_alone_is_not() -> None:
    assert step_and_peak(0, 989) == (0, 989e12)
    assert step_and_peak(1e15, 989) == (1e15, 989e12)
    with pytest.raises(ArgusError, match="--peak-tflops"):
        step_and_peak(1e15, 0)


def works_and_kernels(random: np.random.Generator, number: int, threads: int) -> list[NDArray[np.void]]:
    """Operations of threads one after another, and kernels launched before, in and between them."""
    works = np.zeros(number, flops.WORK)
    works["tid"] = random.integers(1, threads + 1, number)
    works["begin_ns"] = 10 * random.permutation(number)
    works["end_ns"] = works["begin_ns"] + random.integers(0, 9, number)
    kernels = np.zeros(2 * number, [("launch_ns", "<i8"), ("launch_tid", "<u4")])
    kernels["launch_ns"] = random.integers(-5, 10 * number + 5, len(kernels))
    kernels["launch_tid"] = random.integers(0, threads + 2, len(kernels))
    return [works, kernels]


@pytest.mark.parametrize("seed", range(30))
def test_a_kernel_is_of_the_operation_that_its_thread_was_in(seed: int) -> None:
    random = np.random.default_rng(seed)
    works, kernels = works_and_kernels(random, int(random.integers(0, 40)), 3)
    expected = []
    for kernel in kernels:
        at = kernel["launch_ns"]
        within = (works["tid"] == kernel["launch_tid"]) & (works["begin_ns"] <= at) & (at <= works["end_ns"])
        expected.append(int(np.flatnonzero(within)[0]) if within.any() else -1)
    assert flops.launched_by(works, kernels).tolist() == expected


def test_a_thread_for_each_operation_takes_no_pass_each() -> None:
    works, kernels = works_and_kernels(np.random.default_rng(7), 10_000, 10_000)
    assert calls_made(lambda: flops.launched_by(works, kernels)) < 500
