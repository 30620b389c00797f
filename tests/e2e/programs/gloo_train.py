"""A small DistributedDataParallel job on CPUs that times its own phases, with faults that come by turns.

FAULTS names a phase for each rank: with ",forward,data_loading,optimizer" all are healthy for SEGMENT steps, then
rank 1 sleeps in its forward for SEGMENT steps, then rank 2 in its data loading, rank 3 in its optimiser, and so on
again. Each rank writes a line of JSON for each step: begin and end on CLOCK_MONOTONIC, and where the time went, in ns.

RANK=0 WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python gloo_train.py FOLDER FAULTS SEGMENT SLEEP_S

Without WORLD_SIZE it trains alone, with no process group at all.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from time import monotonic_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

USUAL_S = {"data_loading": 0.004, "forward": 0.008, "backward": 0.008, "optimizer": 0.008}
"""What each phase of every rank takes besides some work: asleep, so that the ranks do not compete for a few CPUs."""
WIDTH = 128
LAST = 20_000
"""Steps, should nobody say stop."""


class Fault:
    """Sleeps where it is called, if that is this rank's fault now."""

    def __init__(self, rank: int, faults: str, segment: str, sleep_s: str) -> None:
        self.rank = rank
        self.step = 0
        self.faults = faults.split(",")
        self.segment = int(segment)
        self.sleep_s = float(sleep_s)

    def at(self, place: str) -> None:
        turn = self.step // self.segment % len(self.faults)
        slow = turn == self.rank and self.faults[turn] == place
        time.sleep(USUAL_S[place] + self.sleep_s * slow)


class Numbers(Dataset):  # type: ignore[misc]
    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def __len__(self) -> int:
        return LAST

    def __getitem__(self, place: int) -> torch.Tensor:
        self.fault.at("data_loading")
        return torch.full((16, WIDTH), float(place % 7))


class Slowly(torch.autograd.Function):
    """Passes its input on, and takes its time on the way back."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, fault: Fault) -> torch.Tensor:
        ctx.fault = fault
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.fault.at("backward")
        return gradient, None


class Net(nn.Module):
    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.fault.at("forward")
        return Slowly.apply(self.layers(batch), self.fault)


class Optimizer(torch.optim.SGD):
    fault: Fault

    def step(self, closure: Any = None) -> Any:
        self.fault.at("optimizer")
        return super().step(closure)


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    alone = "WORLD_SIZE" not in os.environ
    if not alone:
        dist.init_process_group("gloo")
    rank = 0 if alone else dist.get_rank()
    fault = Fault(rank, *sys.argv[2:5])
    model = Net(fault) if alone else DistributedDataParallel(Net(fault))
    optimizer = Optimizer(model.parameters(), lr=1e-3)
    optimizer.fault = fault
    stop = torch.zeros(1)
    with (folder / f"truth-{rank}").open("w", buffering=1) as file:
        batches = iter(DataLoader(Numbers(fault), batch_size=None))
        for step in range(LAST):
            fault.step = step
            times = [monotonic_ns()]
            batch = next(batches)
            times.append(monotonic_ns())
            optimizer.zero_grad()
            times.append(monotonic_ns())
            loss = model(batch).square().mean()
            times.append(monotonic_ns())
            loss.backward()
            times.append(monotonic_ns())
            optimizer.step()
            times.append(monotonic_ns())
            data, zero, forward, backward, update = (b - a for a, b in pairwise(times))
            line = {
                "step": step,
                "begin_ns": times[0],
                "end_ns": times[-1],
                "data_loading": data,
                "forward": forward,
                "backward": backward,
                "optimizer": zero + update,
            }
            file.write(json.dumps(line) + "\n")
            if step % 50 == 49:  # all of them end with the same step
                stop[0] = (folder / "stop").exists()
                if not alone:
                    dist.all_reduce(stop, op=dist.ReduceOp.MAX)
                if stop.item():
                    break
    if not alone:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # A thread of gloo's that still lets go of a tensor while the interpreter ends aborts the process now and then.
    os._exit(0)
