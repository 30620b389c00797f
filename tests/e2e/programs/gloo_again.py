"""Two ranks that train, destroy their process group, begin again, and so on; each writes the end of every step.

RANK=0 WORLD_SIZE=2 python gloo_again.py FOLDER RANK
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 30


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    number = 0
    done = False
    with (folder / f"ends-{sys.argv[2]}").open("w", buffering=1) as file:
        while not done:
            meeting = f"file://{folder}/meeting-{number}"
            dist.init_process_group("gloo", init_method=meeting, rank=int(sys.argv[2]), world_size=2)
            model = DistributedDataParallel(nn.Linear(64, 64))
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            for _ in range(STEPS):
                optimizer.zero_grad()
                model(torch.ones(4, 64)).sum().backward()
                time.sleep(0.005)
                optimizer.step()
                print(number, time.monotonic_ns(), file=file)
                number += 1
            stop = torch.tensor([float((folder / "stop").exists())])
            dist.all_reduce(stop, op=dist.ReduceOp.MAX)
            done = bool(stop.item())
            del model, optimizer
            dist.barrier()
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
