"""What cuBLAS multiplies in a running job, and how fast: against the program's own sizes, and the fake GPU's times."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from argus.store.open import open_store
from argus.store.reader import query_columns

from .conftest import ARGUS

# GPU times come on too late for short jobs where others have the CPUs.
pytestmark = [pytest.mark.kernel, pytest.mark.alone]

PRODUCTS = {
    ("cublasGemmEx", "bfloat16", "512 x 256 x 384"): (2 * 512 * 256 * 384, 1, 30_000),
    ("cublasGemmEx_64", "half", "768 x 256 x 384"): (2 * 768 * 256 * 384, 1, 50_000),
    ("cublasSgemm_v2", "float", "128 x 64 x 96"): (2 * 128 * 64 * 96, 1, 30_000),
    ("cublasGemmStridedBatchedEx", "bfloat16", "24 x 64 x 32 x 48"): (2 * 24 * 64 * 32 * 48, 1, 30_000),
    ("cublasHgemmBatched", "half", "12 x 80 x 32 x 48"): (2 * 12 * 80 * 32 * 48, 1, 30_000),
    ("cublasLtMatmul", "bfloat16", "1024 x 512 x 640"): (2 * 1024 * 512 * 640, 1, 50_000),
    ("cublasLtMatmul", "bfloat16", "6 x 256 x 512 x 640"): (2 * 6 * 256 * 512 * 640, 1, 50_000),
    ("cublasLtMatmul", "bfloat16", "256 x 8192 x 640"): (2 * 256 * 8192 * 640, 2, 57_000),
}
"""What a step of ``fake_products`` multiplies: operations, kernels and their time in ns."""
NS = {"s16816gemm": 30_000, "nvjet": 50_000, "splitK": 7_000, "triton": 20_000, "flash": 40_000, "elementwise": 11_000}
STEPS, PEAK = 250, 20e12


def test_flops_are_the_program_s_and_times_the_gpu_s(fakegpu: Path, root: Path, store_url: str) -> None:
    times = ",".join(f"{name}={ns}" for name, ns in NS.items())
    job = [sys.executable, f"{root}/tests/fakegpu/run.py", "--ranks", "1", "--cupti", "--env", "FAKEGPU_JITTER=0"]
    job += ["--env", f"FAKEGPU_KERNEL_NS={times}", "--program", f"{fakegpu}/fake_products", "--", str(STEPS), "10000"]
    command = [*ARGUS, "run", "--store", store_url, "--peak-tflops", str(PEAK / 1e12), "--", *job]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    with open_store(store_url, create=False) as store:
        rows = query_columns(
            store,
            "SELECT operator, dtype, shape, sum(calls) AS n, sum(kernels) AS kernels, sum(flops) AS work,"
            " sum(duration_ns) AS ns FROM kernel_flops WHERE flops > 0 GROUP BY ALL ORDER BY operator, dtype, shape",
        )
        unknown = query_columns(
            store,
            "SELECT kind, sum(kernels) AS kernels, sum(duration_ns) AS ns FROM kernel_flops WHERE flops = 0"
            " GROUP BY kind ORDER BY kind",
        )
        fast = query_columns(store, "SELECT shape, flops_per_s, peak_share FROM achieved_flops ORDER BY shape")
        counted = query_columns(
            store, "SELECT step_flops, told_share, mfu, flops_per_s * step_ns / 1e9 AS again FROM counted_flops"
        )
        told = query_columns(store, "SELECT counter, value FROM coverage FINAL WHERE counter LIKE 'math%' ORDER BY 1")
    keys = list(zip(*(rows[name].tolist() for name in ("operator", "dtype", "shape")), strict=True))
    assert sorted(PRODUCTS) == keys
    calls = int(rows["n"][0])
    # The probes come with the GPU times, in the first steps.
    assert STEPS // 2 <= calls <= STEPS
    assert rows["n"].tolist() == [calls] * len(PRODUCTS)
    assert rows["kernels"].tolist() == [calls * PRODUCTS[key][1] for key in keys]
    assert rows["ns"].tolist() == [calls * PRODUCTS[key][2] for key in keys]
    assert rows["work"].tolist() == [float(calls * PRODUCTS[key][0]) for key in keys]
    # Nothing tells the sizes of a kernel of Triton's, and of attention; and what came before the probes.
    before = STEPS - calls
    all_kernels, all_ns = (sum(values[place] for values in PRODUCTS.values()) for place in (1, 2))
    assert unknown["kind"].tolist() == ["attention", "gemm"]
    assert unknown["kernels"].tolist() == [STEPS, STEPS + before * all_kernels]
    assert unknown["ns"].tolist() == [STEPS * NS["flash"], STEPS * NS["triton"] + before * all_ns]
    per_s = {key[2]: PRODUCTS[key][0] / PRODUCTS[key][2] * 1e9 for key in PRODUCTS}
    assert fast["flops_per_s"].tolist() == [pytest.approx(per_s[shape]) for shape in fast["shape"].tolist()]
    assert fast["peak_share"].tolist() == [pytest.approx(per_s[shape] / PEAK) for shape in fast["shape"].tolist()]
    # The first step that is told is not the program's first, and the last one not its last.
    step = sum(values[0] for values in PRODUCTS.values())
    assert counted["step_flops"][0] == pytest.approx(step * calls / STEPS, rel=0.02)
    assert counted["again"][0] == pytest.approx(counted["step_flops"][0])
    assert counted["mfu"][0] > 0
    share = calls * all_ns / (STEPS * (all_ns + NS["flash"] + NS["triton"]))
    assert counted["told_share"][0] == pytest.approx(share, rel=0.02)
    assert "counted FLOPs: " in done.stdout + done.stderr
    # The calls inside cublasGemmEx_64 are none of their own.
    assert dict(zip(*(column.tolist() for column in told.values()), strict=True)) == {
        "math": pytest.approx(len(PRODUCTS) * calls, abs=len(PRODUCTS)), "math_calls_unknown": 0, "math_dropped": 0,
        "math_probes_detached": 0, "math_ring_discarded": 0,
    }  # fmt: skip
