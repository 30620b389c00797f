"""The smallest training loop with a DataLoader, an MLP and AdamW, some milliseconds a step: its log has a line a step,
when the optimiser has ended (CLOCK_MONOTONIC, ns). It ends with SIGTERM."""

from __future__ import annotations

import signal
import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

over: list[int] = []
signal.signal(signal.SIGTERM, lambda number, _: over.append(number))
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
with open(sys.argv[1], "w", encoding="ascii") as log:
    print("ready", flush=True)
    while not over:
        for batch, label in DataLoader(data, batch_size=64):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(batch), label).backward()
            optimizer.step()
            log.write(f"{time.monotonic_ns()}\n")
            if over:
                break
