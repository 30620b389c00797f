"""Every way in which PyTorch programs launch kernels, each used N times on command.

    python callers.py [--only NAME,…] [--device cpu]

Prints one line of JSON when all are warmed up. Then each line on standard input, ``run N`` or ``profile N``, runs them
one after the other, N calls each between two synchronisations, and prints a line for each: its times (CLOCK_MONOTONIC,
ns), and with ``profile`` how many kernels torch.profiler counted.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Call = Callable[[], Any]


def matmul(device: str) -> Call:
    a = torch.randn(256, 256, device=device, dtype=torch.bfloat16)
    return lambda: a @ a


def pointwise(device: str) -> Call:
    a = torch.randn(4096, device=device)
    return lambda: a.add_(1.0)


def convolution(device: str) -> Call:
    layer = torch.nn.Conv2d(16, 16, 3, padding=1).to(device)
    image = torch.randn(4, 16, 32, 32, device=device)

    def call() -> None:
        with torch.no_grad():
            layer(image)

    return call


def attention(device: str) -> Call:
    a = torch.randn(1, 4, 128, 64, device=device, dtype=torch.bfloat16)
    return lambda: F.scaled_dot_product_attention(a, a, a, is_causal=True)


def fused_adam(device: str) -> Call:
    parameters = [torch.randn(1000, device=device, requires_grad=True) for _ in range(7)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return torch.optim.AdamW(parameters, fused=True).step


def compiled(device: str) -> Call:
    a = torch.randn(4096, device=device)
    function = torch.compile(lambda x: torch.sin(x) * 2 + torch.cos(x))
    return lambda: function(a)


def triton_kernel(device: str) -> Call:
    import triton_add

    return triton_add.caller(device)


def graph(device: str) -> Call:
    a = torch.randn(4096, device=device)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        a.add_(1.0)
    side.synchronize()
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made):
        for _ in range(5):
            a.add_(1.0)
    return made.replay


def nccl_all_reduce(device: str) -> Call:
    import torch.distributed as distributed

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    backend = "nccl" if device == "cuda" else "gloo"
    distributed.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    a = torch.randn(4096, device=device)
    return lambda: distributed.all_reduce(a)


def nccl_average(device: str) -> Call:
    """An average of one rank is a kernel of NCCL's; a sum of one rank is nothing at all."""
    import torch.distributed as distributed

    a = torch.randn(4096, device=device)
    operation = distributed.ReduceOp.AVG if device == "cuda" else distributed.ReduceOp.SUM
    return lambda: distributed.all_reduce(a, op=operation)


def cupy_kernel(device: str) -> Call:
    import cupy

    a = cupy.ones(4096, dtype=cupy.float32)

    def call() -> None:
        cupy.add(a, 1.0, out=a)

    return call


CALLERS: dict[str, Callable[[str], Call]] = {
    "matmul (cuBLAS)": matmul,
    "pointwise": pointwise,
    "convolution (cuDNN)": convolution,
    "attention (SDPA)": attention,
    "fused AdamW": fused_adam,
    "Triton kernel": triton_kernel,
    "torch.compile": compiled,
    "CUDA graph of 5": graph,
    "NCCL sum": nccl_all_reduce,
    "NCCL average": nccl_average,
    "CuPy": cupy_kernel,
}


def profiled(call: Call, count: int, sync: Call) -> int:
    from torch.profiler import ProfilerActivity, profile

    kind = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    with profile(activities=[kind]) as profiler:
        sync()
        for _ in range(count):
            call()
        sync()
    events = profiler.profiler.kineto_results.events()
    return sum("CUDA" in str(e.device_type()) and not e.name().startswith(("Memcpy", "Memset")) for e in events)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    sync = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    chosen = [name for name in CALLERS if not options.only or any(w in name for w in options.only.split(","))]
    calls: dict[str, Call] = {}
    failures: dict[str, str] = {}
    for name in chosen:
        try:
            call = CALLERS[name](options.device)
            for _ in range(3):
                call()
            sync()
            calls[name] = call
        except Exception as failure:
            failures[name] = f"{type(failure).__name__}: {failure}"[:500]
    print(json.dumps({"ready": True, "pid": os.getpid(), "failures": failures}), flush=True)
    for line in sys.stdin:
        verb, _, number = line.strip().partition(" ")
        if verb == "exit":
            break
        count = int(number)
        for name, call in calls.items():
            report: dict[str, Any] = {"caller": name, "calls": count}
            try:
                sync()
                time.sleep(0.01)
                report["begin_ns"] = time.monotonic_ns()
                if verb == "profile":
                    report["kernels"] = profiled(call, count, sync)
                else:
                    for _ in range(count):
                        call()
                    sync()
            except Exception as failure:
                report["error"] = f"{type(failure).__name__}: {failure}"[:500]
            report["end_ns"] = time.monotonic_ns()
            print(json.dumps(report), flush=True)
        print(json.dumps({"done": verb}), flush=True)


if __name__ == "__main__":
    main()
