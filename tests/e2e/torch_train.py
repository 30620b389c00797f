"""A small but real PyTorch job on CPUs: DistributedDataParallel over gloo, data-loader workers, a thread that stages
batches.

Started by torchrun, or as plain processes with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Each rank writes a line
of JSON for each step and each garbage collection: the truth that tests compare with.

    torchrun --nproc-per-node 2 torch_train.py --truth 'steps-{rank}'
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

WIDTH = 384
SAMPLES = 1 << 20
BATCH = 32


class Numbers(Dataset):  # type: ignore[misc]
    """Samples that cost some Python to make, in the workers' processes."""

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, place: int) -> torch.Tensor:
        if self.pause_s and place % BATCH == 0:
            self.read_slowly()
        return self.decode(place)

    def read_slowly(self) -> None:
        time.sleep(self.pause_s)  # a slow disk

    def decode(self, place: int) -> torch.Tensor:
        total = 0
        for digit in range(3000):
            total = (total * 31 + place + digit) % 65537
        return torch.full((WIDTH,), total / 65537.0)


class Net(nn.Module):
    """Three layers with names of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, 2 * WIDTH)
        self.last = nn.Linear(2 * WIDTH, 1)

    def embed(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.first(batch))

    def mix(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(hidden))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.last(self.mix(self.embed(batch)))


class Stager(threading.Thread):
    """Takes a batch further while the rank computes, as the thread does that pins memory for a GPU."""

    def __init__(self) -> None:
        super().__init__(name="stager", daemon=True)
        self.waiting: queue.Queue[torch.Tensor | None] = queue.Queue(2)
        self.ready: queue.Queue[torch.Tensor] = queue.Queue(2)

    def run(self) -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("stager")
        while (batch := self.waiting.get()) is not None:
            self.ready.put(self.stage(batch))

    def stage(self, batch: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            batch = (batch - batch.mean()) / (batch.std() + 1.0)
        return batch


class Log:
    """What this rank says of itself, a line at a time."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._began = 0
        self._collections: list[dict[str, int]] = []
        self._called = 0

    def write(self, **values: Any) -> None:
        lines, self._collections = [*self._collections, values], []
        self._file.writelines([json.dumps(line) + "\n" for line in lines])
        self._file.flush()

    def collection(self, phase: str, info: dict[str, int]) -> None:
        """For gc.callbacks, which CPython calls while it is collecting already, and still."""
        if phase == "start":
            self._began = time.monotonic_ns()
        else:
            # Written later: CPython is not done before this has returned, and a write may take its time.
            line = {
                "gc": info["generation"],
                "start_ns": self._began,
                "end_ns": time.monotonic_ns(),
                "pid": os.getpid(),
            }
            self._collections.append(line)

    def calling(self) -> None:
        """A collection is about to be asked for."""
        self._called = time.monotonic_ns()

    def called(self) -> None:
        """It is over. The thread may have been without a CPU between it and the callbacks, on either side."""
        returned_ns = time.monotonic_ns()
        for line in self._collections:
            if line["start_ns"] >= self._called:
                line |= {"called_ns": self._called, "returned_ns": returned_ns}
                break


def read_batches(loader: DataLoader, stager: Stager, pause_s: float) -> Iterator[torch.Tensor]:
    """Batches one step late, staged meanwhile."""
    for batch in loader:
        stager.waiting.put(batch)
        if pause_s:
            wait_for_data(pause_s)
        yield stager.ready.get()


def wait_for_data(pause_s: float) -> None:
    time.sleep(pause_s)  # a slow network


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = (model(batch) - batch.sum()).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def clean_up(log: Log) -> None:
    log.calling()
    gc.collect()
    log.called()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--truth", required=True, help="file of each rank, with {rank} in it")
    parser.add_argument("--until", type=Path, help="end once this file exists")
    parser.add_argument("--seconds", type=float, default=300.0, help="end then at the latest")
    parser.add_argument("--slow-rank", type=int, default=-1)
    parser.add_argument("--slow-ms", type=float, default=60.0)
    parser.add_argument("--slow-where", choices=("main", "worker"), default="main")
    parser.add_argument("--ballast", type=int, default=400_000, help="objects that each garbage collection looks at")
    parser.add_argument("--collect-every", type=int, default=10, help="steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    pause_s = options.slow_ms / 1e3 if rank == options.slow_rank else 0.0
    in_worker = options.slow_where == "worker"
    ballast = [[number] for number in range(options.ballast)]
    with open(options.truth.format(rank=rank), "w", encoding="utf-8") as file:
        log = Log(file)
        gc.callbacks.append(log.collection)
        stager = Stager()
        model = DistributedDataParallel(Net(), bucket_cap_mb=1)
        optimizer = torch.optim.AdamW(model.parameters())
        # Every rank reads samples of its own: no sampler is needed to see that they work.
        loader = DataLoader(
            Numbers(pause_s if in_worker else 0.0), BATCH, num_workers=2, multiprocessing_context="fork"
        )
        batches = read_batches(loader, stager, 0.0 if in_worker else pause_s)
        stager.start()
        until = time.monotonic() + options.seconds
        stop = torch.zeros(1)
        for step, batch in enumerate(batches):
            began = time.monotonic_ns()
            train_step(model, optimizer, batch)
            if step % options.collect_every == 0:
                clean_up(log)
            log.write(step=step, start_ns=began, end_ns=time.monotonic_ns(), pid=os.getpid())
            stop[0] = time.monotonic() > until or (options.until is not None and options.until.exists())
            torch.distributed.all_reduce(stop)  # all of them end with the same step
            if stop.item():
                break
        stager.waiting.put(None)
        assert len(ballast) == options.ballast
        gc.callbacks.remove(log.collection)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
    # A thread of gloo's that still lets go of a tensor while the interpreter ends aborts the process now and then.
    os._exit(0)
