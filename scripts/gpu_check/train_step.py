"""A small GPT in PyTorch that trains on command: the program that the checks trace.

    python train_step.py --mode eager|graphs|compile [--size small] [--device cpu]

It imports nothing of Argus. Each line on standard input is a command, each answered by one line of JSON:

    steps K            K steps between two synchronisations
    go                 step until the next command; `pause` answers with every step's begin and duration, and the CPU
                       time that the process had used at the end of each
    pause
    profile K FILE     K steps under torch.profiler; what it saw of the GPU goes to FILE
    profiler on|off    torch.profiler around whatever happens meanwhile
    traffic            copies, fills, waits, a graph: a little of everything, numbers of each answered
    loader N           N batches from a DataLoader with forked workers
    exit

Times are CLOCK_MONOTONIC in nanoseconds. A step is counted as done when the GPU has done it: the CPU runs at most two
steps ahead. Under ``torchrun``-like variables (RANK, WORLD_SIZE) gradients are averaged by DistributedDataParallel;
``--slow-rank R --slow-from S`` makes rank R compute more in the backward pass from step S on.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from protocol import answer, serve

VOCABULARY = 8192
RUN_AHEAD = 2


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    length: int
    batch: int


SIZES = {
    "base": Size(12, 1024, 16, 1024, 8),
    "host": Size(12, 256, 4, 128, 1),
    "small": Size(4, 256, 4, 128, 2),
    "tiny": Size(2, 64, 2, 16, 2),
}
"""``base`` keeps the GPU busy; ``host`` is bound by the CPU that launches."""


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.before_attention = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.before_mlp = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, size.width)
        self.places = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Profiler:
    """torch.profiler around whatever happens between ``start`` and ``stop``."""

    def __init__(self, gpu: bool) -> None:
        from torch.profiler import ProfilerActivity, profile

        kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if gpu else [ProfilerActivity.CPU]
        self._profile = profile(activities=kinds, acc_events=False)
        self.start, self.stop = self._profile.start, self._profile.stop

    def seen(self) -> int:
        """Operations of the GPU."""
        results = self._profile.profiler.kineto_results.events()
        return sum("CUDA" in str(event.device_type()) for event in results)


class Trainer:
    """The model, its data and one step of training."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = torch.device(options.device)
        self.gpu = self.device.type == "cuda"
        self.size = SIZES[options.size]
        self.mode = options.mode
        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.slow_rank, self.slow_from, self.slow_matmuls = options.slow_rank, options.slow_from, options.slow_matmuls
        self.backend = ""
        self.done = 0
        if self.world > 1:
            import torch.distributed as distributed

            self.backend = options.backend
            distributed.init_process_group(self.backend)
        torch.manual_seed(1234)
        model: nn.Module = GPT(self.size).to(self.device)
        if self.mode == "compile":
            for block in model.blocks:  # one compilation serves all
                block.compile()
        if self.world > 1:
            model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=8, gradient_as_bucket_view=True)
        self.model = model
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-4, fused=self.gpu or None, capturable=self.mode == "graphs" and self.gpu
        )
        generator = torch.Generator().manual_seed(self.rank)
        shape = (2, 16, self.size.batch, self.size.length)
        data = torch.randint(0, VOCABULARY, shape, generator=generator)
        self.data = data.pin_memory() if self.gpu else data
        self.tokens, self.targets = (data[k, 0].to(self.device) for k in range(2))
        self.burden = torch.randn(2048 if self.gpu else 64, 2048 if self.gpu else 64, device=self.device)
        self.graph: Any = None
        self.recent: list[Any] = []
        if self.slow_rank == self.rank:
            inner = getattr(model, "module", model)
            inner.blocks[self.size.layers // 2].register_full_backward_hook(self._burden)
        if self.mode == "graphs":
            self._capture()

    def _burden(self, *_: Any) -> None:
        if self.done >= self.slow_from:
            for _ in range(self.slow_matmuls):
                self.burden @ self.burden

    def _work(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=self.mode != "graphs")
        # A graph must not hold casts that were cached before it.
        with torch.autocast(self.device.type, dtype=torch.bfloat16, cache_enabled=self.mode != "graphs"):
            loss: torch.Tensor = self.model(self.tokens, self.targets)
        loss.backward()
        self.optimizer.step()
        return loss

    def _capture(self) -> None:
        if not self.gpu:
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._work()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._work()

    def step(self) -> None:
        batch = self.done % self.data.shape[1]
        self.tokens.copy_(self.data[0, batch], non_blocking=True)
        self.targets.copy_(self.data[1, batch], non_blocking=True)
        if self.graph is not None:
            self.graph.replay()
        else:
            self._work()
        self.done += 1
        if self.gpu:
            event = torch.cuda.Event(blocking=False)
            event.record()
            self.recent.append(event)
            if len(self.recent) > RUN_AHEAD:
                self.recent.pop(0).synchronize()

    def sync(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()
        self.recent.clear()

    def steps(self, count: int) -> dict[str, Any]:
        """Steps between two synchronisations. Each step's time is that between the ends of two."""
        self.sync()
        time.sleep(0.005)  # a gap on the GPU, so that what belongs to the steps is separated by time
        begin = time.monotonic_ns()
        marks = [begin]
        for _ in range(count):
            self.step()
            marks.append(time.monotonic_ns())
        self.sync()
        end = time.monotonic_ns()
        time.sleep(0.005)
        return {
            "begin_ns": begin,
            "end_ns": end,
            "steps": count,
            "step_ns": [b - a for a, b in itertools.pairwise(marks)],
        }

    # ---- profiler

    def profiler(self) -> Profiler:
        return Profiler(self.gpu)

    def profile(self, count: int, file: str) -> dict[str, Any]:
        """Steps under torch.profiler, CUDA activity only, so that it disturbs the GPU least."""
        from torch.profiler import ProfilerActivity, profile

        self.sync()
        kinds = [ProfilerActivity.CUDA if self.gpu else ProfilerActivity.CPU]
        with profile(activities=kinds) as profiler:
            # A first kernel and a pause: CUPTI is at work before what counts.
            self.sync()
            answer = self.steps(count)
        profiler.export_chrome_trace(file + ".trace")
        return {**answer, **_condense(file)}

    # ---- a little of everything

    def traffic(self) -> dict[str, Any]:
        """Copies, fills, waits and a graph in known numbers."""
        made = {"memcpy_htod": 0, "memcpy_dtoh": 0, "memcpy_dtod": 0, "memset": 0, "graph_kernels": 0}
        begin = time.monotonic_ns()
        if self.gpu:
            host = torch.zeros(1 << 16, pin_memory=True)
            device = torch.empty(1 << 16, device=self.device)
            other = torch.empty_like(device)
            self.sync()
            begin = time.monotonic_ns()
            for _ in range(7):
                device.copy_(host, non_blocking=True)
                host.copy_(device, non_blocking=True)
                other.copy_(device)
                _memset(other)
            made.update(memcpy_htod=7, memcpy_dtoh=7, memcpy_dtod=7, memset=7)
            self.sync()
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                other.mul_(1.5)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(5):
                    other.add_(1.0)
            for _ in range(3):
                graph.replay()
            made["graph_kernels"] = 15
            event = torch.cuda.Event()
            event.record()
            event.synchronize()
            torch.cuda.current_stream().synchronize()
        self.sync()
        return {"begin_ns": begin, "end_ns": time.monotonic_ns(), **made}

    def load(self, batches: int) -> dict[str, Any]:
        from torch.utils.data import DataLoader, TensorDataset

        data = TensorDataset(torch.arange(batches * 4))
        loader = DataLoader(data, batch_size=4, num_workers=2, pin_memory=self.gpu)
        seen, begin = 0, time.monotonic_ns()
        for (batch,) in loader:
            seen += len(batch.to(self.device))
            self.step()
        self.sync()
        return {"items": seen, "expected": batches * 4, "begin_ns": begin, "end_ns": time.monotonic_ns()}


def _memset(tensor: torch.Tensor) -> None:
    """cudaMemsetAsync on the current stream; torch's own zero_() may be a kernel."""
    runtime = _runtime()
    stream = torch.cuda.current_stream().cuda_stream
    assert runtime.cudaMemsetAsync(tensor.data_ptr(), 0, tensor.nbytes, stream) == 0


def _runtime() -> Any:
    import ctypes

    with open("/proc/self/maps") as maps:
        path = next(line.split()[-1] for line in maps if "libcudart.so" in line)
    runtime = ctypes.CDLL(path)
    runtime.cudaMemsetAsync.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p]
    return runtime


def _condense(file: str) -> dict[str, Any]:
    """What torch.profiler wrote as [category, name, begin µs, duration µs, correlation], GPU side only."""
    with open(file + ".trace") as trace:
        found = json.load(trace)
    events = [
        [e["cat"], e["name"], e["ts"], e["dur"], e.get("args", {}).get("correlation", 0)]
        for e in found["traceEvents"]
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    with open(file, "w") as out:
        json.dump({"events": events}, out)
    bytes_written = os.stat(file + ".trace").st_size
    os.unlink(file + ".trace")
    return {
        "kernels": sum(e[0] == "kernel" for e in events),
        "copies": sum(e[0] != "kernel" for e in events),
        "trace_bytes": bytes_written,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=("eager", "graphs", "compile"), default="eager")
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--backend", default="nccl", help="of torch.distributed, where WORLD_SIZE > 1")
    parser.add_argument("--slow-rank", type=int, default=-1)
    parser.add_argument("--slow-from", type=int, default=20)
    parser.add_argument("--slow-matmuls", type=int, default=40)
    options = parser.parse_args()
    began = time.monotonic()
    trainer = Trainer(options)
    for _ in range(options.warmup):
        trainer.step()
    trainer.sync()
    parameters = sum(p.numel() for p in trainer.model.parameters())
    answer(
        ready=True,
        pid=os.getpid(),
        rank=trainer.rank,
        backend=trainer.backend,
        startup_s=round(time.monotonic() - began, 2),
        parameters=parameters,
        torch=torch.__version__,
        armed=bool(os.environ.get("CUDA_INJECTION64_PATH")),
    )
    serve(trainer)
    with contextlib.suppress(Exception):
        if trainer.world > 1:
            import torch.distributed as distributed

            distributed.destroy_process_group()


if __name__ == "__main__":
    main()
