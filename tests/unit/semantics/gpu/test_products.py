"""What is multiplied, from the arguments of cuBLAS, and what its kernels took."""

from __future__ import annotations

import glob
import json
import os
import site
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.model import calls, records
from argus.semantics.gpu import achieved_flops, products
from argus.semantics.gpu.achieved_flops import GpuFlops, kind_of
from argus.semantics.gpu.flops import Counted
from argus.semantics.gpu.products import MAX_TEXTS, Products, sizes_of

MS = 1_000_000
DIRT = 0xDEAD << 32
BF16, HALF, COMPLEX = 14, 2, 4


def call(symbol: str, *words: int, ts: int = 0, took: int = 100, tid: int = 7, result: int = 0) -> NDArray[np.void]:
    """One record as the probes make it."""
    found = np.zeros(1, records.MATH)
    found["words"][0, : len(words)] = np.array(words, np.uint64)
    found["ts_ns"], found["duration_ns"], found["tid"], found["result"] = ts, took, tid, result
    found["call"] = calls.BY_SYMBOL[symbol].id
    return found


def matmul(a: tuple[int, int], b: tuple[int, int], d: tuple[int, int], batch: int = 1, **more: int) -> NDArray[np.void]:
    words = []
    for rows, columns in (a, b, d):
        words += [DIRT | BF16, rows, columns, rows, 0x10000 << 32 | batch]
    return call("cublasLtMatmul", *words, **more)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (call("cublasGemmEx", DIRT | 5, DIRT | 7, DIRT | 3, DIRT | BF16, 1), (5, 7, 3, 1, BF16)),
        (call("cublasGemmEx_64", 5 << 32, 7, 3, DIRT | BF16, 1), (5 << 32, 7, 3, 1, BF16)),
        (call("cublasHgemm", 5, 7, 3, 0, 1), (5, 7, 3, 1, HALF)),
        (call("cublasDgemmStridedBatched_64", 5, 7, 3, 0, 9), (5, 7, 3, 9, 1)),
        (call("cublasSgemmEx", 5, 7, 3, BF16, 1), (5, 7, 3, 1, BF16)),
        (call("cublasGemmBatchedEx", 5, 7, 3, HALF, DIRT | 6), (5, 7, 3, 6, HALF)),
        (matmul((5, 3), (3, 7), (5, 7)), (5, 7, 3, 1, BF16)),
        (matmul((3, 5), (3, 7), (5, 7)), (5, 7, 3, 1, BF16)),
        (matmul((5, 3), (7, 3), (5, 7)), (5, 7, 3, 1, BF16)),
        (matmul((3, 5), (7, 3), (5, 7), 6), (5, 7, 3, 6, BF16)),
        (matmul((5, 5), (5, 5), (5, 5)), (5, 5, 5, 1, BF16)),
        (matmul((5, 3), (4, 7), (5, 7)), (5, 7, 0, 1, BF16)),
        (matmul((4, 3), (3, 7), (5, 7)), (5, 7, 0, 1, BF16)),
    ],
)
def test_sizes(found: NDArray[np.void], expected: tuple[int, ...]) -> None:
    (sizes,) = sizes_of(found)
    assert tuple(int(sizes[name]) for name in ("m", "n", "k", "batch", "dtype")) == expected


def test_the_real_library_s_descriptors_are_laid_out_so() -> None:
    """Of an installed cuBLAS (pip install nvidia-cublas), or that in the folder ARGUS_CUBLAS."""
    folders = [os.environ.get("ARGUS_CUBLAS", ""), *(f"{each}/nvidia/*/lib" for each in site.getsitepackages())]
    libraries = [path for folder in folders if folder for path in glob.glob(f"{folder}/libcublasLt.so.*")]
    if not libraries:
        pytest.skip("no cuBLAS here: pip install nvidia-cublas, or ARGUS_CUBLAS=/folder/of/libcublasLt")
    program = Path(__file__).parents[3] / "e2e" / "programs" / "cublas_layout.py"
    for path in libraries:
        done = subprocess.run([sys.executable, program, path], capture_output=True, text=True, check=True)
        reported = json.loads(done.stdout)
        print(path, reported)
        for name, word in (("type", products.TYPE), ("rows", products.ROWS), ("columns", products.COLUMNS)):
            assert reported[name] == [8 * word]
        assert reported["batch"] == [8 * products.BATCH]


def attend(symbol: str, *words: int, dtype: int = 15, causal: int = 0, more: int = 0, **rest: int) -> NDArray[np.void]:
    """A record of attention: ``symbol`` begins so, ``words`` are the sizes of query, key and value."""
    full = next(each for each in calls.BY_SYMBOL if each.startswith(f"_ZN2at4_ops{len(symbol)}{symbol}4call"))
    return call(full, *words, dtype, causal, more, **rest)


Q, K, V = (2, 8, 128, 64), (2, 4, 512, 64), (2, 4, 512, 32)
PAIRS = 2 * 8 * 128 * 512


def test_attention_by_its_operator_s_order_of_sizes() -> None:
    by_length = [(a, c, b, d) for a, b, c, d in (Q, K, V)]
    found = np.concatenate([
        attend("_scaled_dot_product_flash_attention", *Q, *K, *V, causal=1),
        attend("_flash_attention_forward", *(size for sizes in by_length for size in sizes), dtype=5),
        attend("_efficient_attention_backward", *(size for sizes in by_length for size in sizes), causal=2),
    ])  # fmt: skip
    taken = Products()
    works = taken.take(found)
    shape = "2 x 8 x 128 x 512 x 64"
    assert sorted(text[1:] for text in taken.texts) == [
        ("aten::_efficient_attention_backward", "bfloat16", f"{shape} causal"),
        ("aten::_flash_attention_forward", "half", shape),
        ("aten::_scaled_dot_product_flash_attention", "bfloat16", f"{shape} causal"),
    ]
    by_text = {taken.texts[work["text"]][1]: work["flops"] for work in works}
    assert by_text == {
        "aten::_scaled_dot_product_flash_attention": PAIRS * (64 + 32),
        "aten::_flash_attention_forward": 2 * PAIRS * (64 + 32),
        "aten::_efficient_attention_backward": PAIRS * (3 * 64 + 2 * 32),
    }


def test_attention_of_which_something_is_not_known_is_counted() -> None:
    name = "_scaled_dot_product_flash_attention"
    taken = Products()
    complex_numbers = 9
    for found in (
        attend(name, *Q, *K, 0, 0, 0, 0), attend(name, *Q, 2, 4, 0, 64, *V), attend(name, *Q, *K, *V, more=1),
        attend(name, *Q, *K, *V, dtype=complex_numbers),
    ):  # fmt: skip
        assert len(taken.take(found)) == 0
    assert (taken.unknown, taken.texts) == (4, [])


def test_attention_that_launched_nothing_is_a_moment() -> None:
    found = np.concatenate([
        attend("_scaled_dot_product_cudnn_attention", *Q, *K, *V, ts=1000, took=-1),
        attend("_scaled_dot_product_cudnn_attention", *Q, *K, *V, ts=2000, took=50),
    ])  # fmt: skip
    works = Products().take(found)
    assert works[["begin_ns", "end_ns"]].tolist() == [(1000, 1000), (2000, 2050)]


def test_batches_that_differ_are_no_product() -> None:
    found = matmul((5, 3), (3, 7), (5, 7), 6)
    found["words"][0, 4] = 2
    assert sizes_of(found)["k"].tolist() == [0]


def test_only_what_is_known_and_over_is_taken() -> None:
    good = call("cublasGemmEx", 5, 7, 3, BF16, 1, ts=10)
    found = np.concatenate([
        good, call("cublasGemmEx", 5, 7, 3, BF16, 4, ts=200), call("cublasGemmEx", 5, 7, 3, BF16, 1, took=-1),
        call("cublasGemmEx", 5, 7, 3, BF16, 1, result=13), call("cublasGemmEx", 5, 7, 3, COMPLEX, 1),
        call("cublasGemmEx", 5, 0, 3, BF16, 1), matmul((4, 3), (3, 7), (5, 7)), good,
    ])  # fmt: skip
    taken = Products()
    works = taken.take(found)
    assert taken.texts == [
        ("gemm", "cublasGemmEx", "bfloat16", "5 x 3 x 7"), ("gemm", "cublasGemmEx", "bfloat16", "4 x 5 x 3 x 7"),
    ]  # fmt: skip
    assert works["text"].tolist() == [0, 1, 0]
    assert works["flops"].tolist() == [2.0 * 105, 2.0 * 4 * 105, 2.0 * 105]
    assert works[["begin_ns", "end_ns", "tid"]].tolist() == [(10, 110, 7), (200, 300, 7), (10, 110, 7)]
    # What failed multiplied nothing; what has not ended is not known to have.
    assert taken.unknown == 3


def test_products_are_bounded() -> None:
    taken = Products()
    taken.take(np.concatenate([call("cublasGemmEx", size, 7, 3, BF16, 1) for size in range(1, MAX_TEXTS + 11)]))
    assert (len(taken.texts), taken.unknown) == (MAX_TEXTS, 10)
    assert len(taken.take(call("cublasGemmEx", 1, 7, 3, BF16, 1))) == 1


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTN", "gemm"),
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", "gemm"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "gemm"),
        ("triton_tem_fused_mm_0", "gemm"),
        (
            "void pytorch_flash::flash_fwd_kernel<Flash_kernel_traits<128, 64, cutlass::bfloat16_t>>",
            "attention",
        ),
        ("fmha_cutlassB_bf16_aligned_64x64_k128_sm80", "attention"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>>", ""),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", ""),
        ("multi_tensor_apply_kernel", ""),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy", ""),
    ],
)
def test_names(name: str, kind: str) -> None:
    assert achieved_flops._KINDS[kind_of(name)] == kind


NAMES = ["", "gemm", "reduce", "elementwise", "flash"]


def ops(*rows: tuple[int, int, int], tid: int = 7, flags: int = records.GPU_LAUNCH_MATCHED) -> NDArray[np.void]:
    """Kernels: launch, time on the GPU, name."""
    found = np.zeros(len(rows), records.GPU_OP)
    found["launch_ns"], took, found["name"] = np.array(rows).T
    found["start_ns"] = found["launch_ns"] + 1000
    found["end_ns"] = found["start_ns"] + took
    found["kind"], found["launch_tid"], found["flags"] = records.GpuKind.KERNEL, tid, flags
    return found


def feed(into: GpuFlops, found: NDArray[np.void]) -> None:
    into.feed(found, found["name"].astype(np.int32), NAMES)


def columns(into: GpuFlops, *, final: bool = True) -> tuple[list[tuple[object, ...]], Counted]:
    rows, counted = into.take(final=final)
    names = ("step", "steps", "operator", "kernel", "calls", "kernels", "flops", "duration_ns")
    return sorted(zip(*(list(rows.get(name, [])) for name in names), strict=True)), counted


def test_a_kernel_is_of_the_call_that_launched_it() -> None:
    flops = GpuFlops()
    flops.feed_calls(np.concatenate([
        call("cublasGemmEx", 5, 7, 3, BF16, 1, ts=ts, tid=tid) for ts, tid in ((1000, 7), (5000, 7), (5000, 8))
    ]))  # fmt: skip
    # The sum of a split product is its own; what follows the call, and what another thread launches, is not.
    feed(flops, ops((1050, 40, 1), (1100, 2, 2), (1101, 9, 3), (5050, 50, 1), (9000, 30, 1)))
    feed(flops, ops((5060, 20, 1), tid=8))
    feed(flops, ops((1060, 70, 1), tid=9))
    # Of a graph, and of no known launch.
    graph = ops((1070, 5, 1))
    graph["graph"] = 3
    feed(flops, graph)
    feed(flops, ops((0, 6, 4), (0, 7, 3), flags=0))
    flops.settle([(900, 10_000, 41)])
    rows, counted = columns(flops)
    assert rows == [
        (41, 1, "", "flash", 0, 1, 0.0, 6),
        (41, 1, "", "gemm", 0, 3, 0.0, 30 + 70 + 5),
        (41, 1, "cublasGemmEx", "gemm", 3, 4, 3 * 210.0, 40 + 2 + 50 + 20),
    ]
    assert counted == Counted(630.0, 112, 111, 1, 9_100)


def test_a_window_sums_up_steps_and_what_lies_outside_stays_apart() -> None:
    flops, step = GpuFlops(), 3_000 * MS
    for number in range(5):
        at = number * step
        flops.feed_calls(call("cublasGemmEx", 5, 7, 3, BF16, 1, ts=at + 1000))
        feed(flops, ops((at + 1050, 10, 1)))
    assert columns(flops, final=False) == ([], Counted())
    flops.settle([(number * step, (number + 1) * step, 10 + number) for number in range(2)])
    assert columns(flops, final=False) == ([], Counted())
    # The third lies in no step: an evaluation.
    flops.settle([(number * step, (number + 1) * step, 9 + number) for number in (3, 4)])
    rows, counted = columns(flops, final=False)
    assert rows == [(-1, 0, "cublasGemmEx", "gemm", 1, 1, 210.0, 10), (10, 4, "cublasGemmEx", "gemm", 4, 4, 840.0, 40)]
    assert (counted.steps, counted.steps_ns, counted.flops) == (4, 4 * step, 840.0)
    assert columns(flops) == ([], Counted())


def test_what_is_kept_is_bounded_and_nothing_of_it_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(achieved_flops, "KEPT", 100)
    flops = GpuFlops()
    for number in range(500):
        flops.feed_calls(call("cublasGemmEx", 5, 7, 3, BF16, 1, ts=number * 1000))
        feed(flops, ops((number * 1000 + 50, 10, 1)))
        assert flops._kept <= 100
    rows, _ = columns(flops)
    assert rows == [(-1, 0, "cublasGemmEx", "gemm", 500, 500, 500 * 210.0, 5000)]


def test_calls_without_kernels_and_kernels_without_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(achieved_flops, "KEPT", 100)
    calling, running = GpuFlops(), GpuFlops()
    for number in range(500):
        calling.feed_calls(call("cublasGemmEx", 5, 7, 3, BF16, 1, ts=number * 1000))
        feed(running, ops((number * 1000 + 50, 10, 1)))
        assert sum(map(len, calling._works)) <= 100
        assert sum(map(len, running._kernels)) <= 100
    assert columns(running)[0] == [(-1, 0, "", "gemm", 0, 500, 0.0, 5000)]


def test_counted_in_words() -> None:
    counted = Counted(3e15, 970, 30, 4, 8 * 10**9)
    assert counted.describe(1e15) == (
        "counted FLOPs: 7.5e+14 a step and GPU, 375 of 1000 TFLOP/s a GPU (37.5%); "
        "shapes were known of 97.0% of the time of matrix products and attention"
    )
    assert "375 TFLOP/s a GPU; shapes" in counted.describe(0)
    # Never rounded up to all.
    assert "known of 99.9%" in Counted(1.0, 99_999, 1, 1, 1).describe(0)
    assert Counted().describe(1e15) == ""


def test_where_others_need_the_room_the_oldest_products_are_in_no_step() -> None:
    def fed() -> GpuFlops:
        flops = GpuFlops()
        for at in range(0, 20_000, 1000):
            flops.feed_calls(call("cublasGemmEx", 5, 7, 3, BF16, 1, ts=at))
            feed(flops, ops((at + 50, 10, 1)))
        return flops

    flops = fed()
    before = flops.nbytes
    flops.keep(before)
    assert flops.nbytes == before
    most = before // 2 + achieved_flops.SUM_BYTES
    flops.keep(most)
    assert flops.nbytes <= most
    assert flops._kept > 5
    flops.settle([(0, 1_000_000, 3)])
    rows, counted = columns(flops)
    assert [row[0] for row in rows] == [-1, 3]
    assert sum(row[4] for row in rows) == sum(row[5] for row in rows) == 20, "none is lost"
    assert 0 < counted.flops <= 10 * 210
    flops = fed()
    flops.keep(0)
    assert flops.nbytes == achieved_flops.SUM_BYTES


def test_very_many_shapes_make_rows_before_the_window_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(achieved_flops, "MOST_SUMS", 10)
    flops = GpuFlops()
    for number in range(10):
        flops.feed_calls(call("cublasGemmEx", 5 + number, 7, 3, BF16, 1, ts=1000 * number + 10))
        feed(flops, ops((1000 * number + 50, 10, 1)))
        assert columns(flops, final=False)[0] == []
        flops.settle([(1000 * number, 1000 * number + 900, number)])
    rows, counted = columns(flops, final=False)
    assert len(rows) == counted.steps == 10
    assert columns(flops) == ([], Counted())
