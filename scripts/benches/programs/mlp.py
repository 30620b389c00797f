"""A small training script, as a beginner writes it: a few milliseconds a step, on one thread.

    python mlp.py LOG

The log has four 64-bit numbers a step: its end (CLOCK_MONOTONIC), its duration, the thread's CPU time in it, and how
long two forward passes took, of which Argus sees nothing: the machine's speed at that moment; ns. The script ends when
standard input does.
"""

from __future__ import annotations

import select
import sys
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = TensorDataset(torch.randn(6400, 256), torch.randint(0, 10, (6400,)))
    loader = DataLoader(data, batch_size=64, shuffle=True)
    loss_of = nn.CrossEntropyLoss()
    gauge = torch.randn(64, 256)
    with open(sys.argv[1], "wb", buffering=0) as log:
        print("ready", flush=True)
        rows: list[tuple[int, int, int, int]] = []
        at, cpu = time.monotonic_ns(), time.thread_time_ns()
        while True:
            for inputs, labels in loader:
                optimizer.zero_grad()
                loss = loss_of(model(inputs), labels)
                loss.backward()
                optimizer.step()
                begin = time.monotonic_ns()
                with torch.no_grad():
                    model(gauge), model(gauge)
                at_now, cpu_now = time.monotonic_ns(), time.thread_time_ns()
                rows.append((at_now, at_now - at, cpu_now - cpu, at_now - begin))
                at, cpu = at_now, cpu_now
                if len(rows) >= 32:
                    log.write(np.array(rows, np.uint64).tobytes())
                    rows.clear()
                    if select.select([sys.stdin], [], [], 0)[0]:
                        return


main()
