"""Two ranks that make known calls of PyTorch's gloo process group, once a file says so.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python gloo_calls.py FOLDER
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    other = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1))  # connections are made with the first call
    dist.all_reduce(torch.ones(1), group=other)
    (folder / f"ready-{rank}").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
    for _ in range(7):
        dist.all_reduce(torch.ones(1000))
    for _ in range(3):
        dist.broadcast(torch.ones(17, dtype=torch.int64), src=1)
    for _ in range(2):
        dist.barrier()
    for _ in range(4):
        dist.all_gather([torch.ones(5, dtype=torch.float64) for _ in range(2)], torch.ones(5, dtype=torch.float64))
    for _ in range(2):
        dist.all_gather_into_tensor(torch.ones(12, 2), torch.ones(6, 2))
    for _ in range(2):
        dist.reduce(torch.ones(11), dst=0)
    parts = [torch.ones(13) for _ in range(2)]
    dist.gather(torch.ones(13), parts if rank == 0 else None, dst=0)
    dist.scatter(torch.ones(13), parts if rank == 0 else None, src=0)
    for _ in range(5):
        message = torch.ones(9, dtype=torch.int32)
        if rank == 0:
            dist.send(message, dst=1)
        else:
            dist.recv(message, src=0)
    for _ in range(6):
        dist.all_reduce(torch.ones(8, dtype=torch.bfloat16), group=other)
    # Exceptions of C++ pass through functions that have probes.
    group = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    options = dist.BroadcastOptions()
    options.rootRank = 99
    used = torch.ones(2, requires_grad=True)
    loss = (used * used).sum()
    loss.backward()
    for attempt in (lambda: group.broadcast([torch.ones(1)], options), loss.backward):
        try:
            attempt()
        except (RuntimeError, ValueError) as error:
            with (folder / f"caught-{rank}").open("a") as file:
                print(str(error).splitlines()[0], file=file)
    (folder / f"done-{rank}").touch()
    time.sleep(300)


if __name__ == "__main__":
    main()
