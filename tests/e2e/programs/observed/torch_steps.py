"""Training steps of a small convolutional network with PyTorch on CPUs; prints what CPU time each took, of all
threads, which other load on the machine lengthens less than the time that went by.

torch_steps.py [STEPS]
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn


def main() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images, labels = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    for number in range(int(sys.argv[1]) if len(sys.argv) > 1 else 12):
        begin = time.process_time()
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        took_ms = (time.process_time() - begin) * 1e3
        if number >= 2:  # the first ones choose and build kernels
            print(f"step_time: {took_ms:.3f} ms")


if __name__ == "__main__":
    main()
