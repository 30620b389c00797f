"""What cuBLAS and attention multiply in a running job, and how fast: against the program's own sizes, and the fake
GPU's times."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from argus.store.open import open_store
from argus.store.reader import query_columns
from tests.e2e.conftest import ARGUS

# GPU times come on too late for short jobs where others have the CPUs.
pytestmark = [pytest.mark.kernel, pytest.mark.alone]

DENSE, SHAPE, PAIRS = "aten::_scaled_dot_product_", "2 x 8 x 128 x 128 x 64", 2 * 8 * 128 * 128
PRODUCTS = {
    ("cublasGemmEx", "bfloat16", "512 x 256 x 384"): (2 * 512 * 256 * 384, 1, 30_000),
    ("cublasGemmEx_64", "half", "768 x 256 x 384"): (2 * 768 * 256 * 384, 1, 50_000),
    ("cublasSgemm_v2", "float", "128 x 64 x 96"): (2 * 128 * 64 * 96, 1, 30_000),
    ("cublasGemmStridedBatchedEx", "bfloat16", "24 x 64 x 32 x 48"): (2 * 24 * 64 * 32 * 48, 1, 30_000),
    ("cublasHgemmBatched", "half", "12 x 80 x 32 x 48"): (2 * 12 * 80 * 32 * 48, 1, 30_000),
    ("cublasLtMatmul", "bfloat16", "1024 x 512 x 640"): (2 * 1024 * 512 * 640, 1, 50_000),
    ("cublasLtMatmul", "bfloat16", "6 x 256 x 512 x 640"): (2 * 6 * 256 * 512 * 640, 1, 50_000),
    ("cublasLtMatmul", "bfloat16", "256 x 8192 x 640"): (2 * 256 * 8192 * 640, 2, 57_000),
    (f"{DENSE}flash_attention", "bfloat16", f"{SHAPE} causal"): (4 * 64 * PAIRS / 2, 1, 40_000),
    (f"{DENSE}flash_attention_backward", "bfloat16", f"{SHAPE} causal"): (10 * 64 * PAIRS / 2, 2, 51_000),
    ("aten::_flash_attention_forward", "bfloat16", SHAPE): (4 * 64 * PAIRS, 1, 40_000),
    ("aten::_efficient_attention_forward", "bfloat16", f"{SHAPE} causal"): (4 * 64 * PAIRS / 2, 1, 25_000),
    (f"{DENSE}efficient_attention_backward", "half", "3 x 4 x 96 x 160 x 32"): (
        2 * 3 * 4 * 96 * 160 * (3 * 32 + 2 * 48), 1, 25_000,
    ),
    (f"{DENSE}cudnn_attention_backward", "bfloat16", f"{SHAPE} causal"): (10 * 64 * PAIRS / 2, 1, 35_000),
}  # fmt: skip
"""What a step of ``fake_products`` multiplies: operations, kernels and their time in ns."""
NS = {
    "s16816gemm": 30_000, "nvjet": 50_000, "splitK": 7_000, "triton": 20_000, "flash": 40_000, "fmha": 25_000,
    "sdpa": 35_000, "elementwise": 11_000,
}  # fmt: skip
UNKNOWN = {"attention": (5, 4 * 40_000 + 25_000), "gemm": (1, 20_000)}
"""Kernels of a step, and their time, that no call describes."""
CALLS_UNKNOWN = 4
"""Calls of a step whose work is not known: a window, packed sequences, tensors that do not add up."""
STEPS, PEAK = 250, 20e12


def test_flops_are_the_program_s_and_times_the_gpu_s(fakegpu: Path, root: Path, store_url: str) -> None:
    lengths = ",".join(f"{name}={ns}" for name, ns in NS.items())
    job = [sys.executable, f"{root}/tests/fakegpu/run.py", "--ranks", "1", "--cupti", "--env", "FAKEGPU_JITTER=0"]
    job += ["--env", f"FAKEGPU_KERNEL_NS={lengths}", "--program", f"{fakegpu}/fake_products", "--", str(STEPS), "10000"]
    # What the governor would leave out of so short a job is not what this is about.
    command = [*ARGUS, "run", "--store", store_url, "--max-overhead", "100", "--peak-tflops", str(PEAK / 1e12)]
    command += ["--", *job]
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
        fast = query_columns(
            store, "SELECT flops_per_s, peak_share FROM achieved_flops ORDER BY operator, dtype, shape"
        )
        counted = query_columns(
            store, "SELECT step_flops, told_share, mfu, flops_per_s * step_ns / 1e9 AS again FROM counted_flops"
        )
        reported = query_columns(
            store, "SELECT counter, value FROM coverage FINAL WHERE counter LIKE 'math%' ORDER BY 1"
        )
    keys = list(zip(*(rows[name].tolist() for name in ("operator", "dtype", "shape")), strict=True))
    assert sorted(PRODUCTS) == keys
    times = dict(zip(keys, rows["n"].tolist(), strict=True))
    calls = min(times.values())
    # The probes come with the GPU times, in the first steps: maybe amid one.
    assert STEPS // 2 <= calls <= max(times.values()) <= min(calls + 1, STEPS)
    assert rows["kernels"].tolist() == [times[key] * PRODUCTS[key][1] for key in keys]
    assert rows["ns"].tolist() == [times[key] * PRODUCTS[key][2] for key in keys]
    assert rows["work"].tolist() == [float(times[key] * PRODUCTS[key][0]) for key in keys]
    # What nothing describes, and what came before the probes, but for the kernel that is no attention by its name.
    assert unknown["kind"].tolist() == list(UNKNOWN)
    for place, column in enumerate(("kernels", "ns")):
        before = dict.fromkeys(UNKNOWN, 0)
        for key, value in PRODUCTS.items():
            kind, of_step = "attention" if key[0].startswith("aten") else "gemm", value[1 + place]
            if value[2] == NS["flash"] + NS["elementwise"]:
                of_step -= (1, NS["elementwise"])[place]
            before[kind] += (STEPS - times[key]) * of_step
        assert unknown[column].tolist() == [STEPS * UNKNOWN[kind][place] + before[kind] for kind in UNKNOWN]
    per_s = [PRODUCTS[key][0] / PRODUCTS[key][2] * 1e9 for key in keys]
    assert fast["flops_per_s"].tolist() == pytest.approx(per_s)
    assert fast["peak_share"].tolist() == pytest.approx([each / PEAK for each in per_s])
    # The first step that is reported is not the program's first, and the last one not its last.
    step = sum(values[0] for values in PRODUCTS.values())
    assert counted["step_flops"][0] == pytest.approx(step * calls / STEPS, rel=0.02)
    assert counted["again"][0] == pytest.approx(counted["step_flops"][0])
    assert counted["mfu"][0] > 0
    all_ns, unknown_ns = (sum(values[place] for values in of.values()) for of, place in ((PRODUCTS, 2), (UNKNOWN, 1)))
    share = calls * all_ns / (STEPS * (all_ns + unknown_ns))
    assert counted["told_share"][0] == pytest.approx(share, rel=0.02)
    assert "counted FLOPs: " in done.stdout + done.stderr
    # The calls inside cublasGemmEx_64, and of one attention inside another, are none of their own.
    a_step = len(PRODUCTS) + CALLS_UNKNOWN
    assert dict(zip(*(column.tolist() for column in reported.values()), strict=True)) == {
        "math": pytest.approx(a_step * calls, abs=a_step), "math_dropped": 0,
        "math_calls_unknown": pytest.approx(CALLS_UNKNOWN * calls, abs=CALLS_UNKNOWN),
        "math_probes_detached": 0, "math_ring_discarded": 0,
    }  # fmt: skip
