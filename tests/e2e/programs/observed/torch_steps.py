"""Training steps of a small network of wide activations with PyTorch on CPUs; prints what CPU time each took, of all
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
    model = nn.Sequential(nn.Linear(64, 4096), nn.Tanh(), nn.Softplus(), nn.Sigmoid(), nn.Linear(4096, 10))
    inputs, labels = torch.randn(64, 64), torch.randint(0, 10, (64,))
    for number in range(int(sys.argv[1]) if len(sys.argv) > 1 else 12):
        begin = time.process_time()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():  # by hand: the first step of an optimizer imports for a second
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
        took_ms = (time.process_time() - begin) * 1e3
        if number >= 2:  # the first ones choose and build kernels
            print(f"step_time: {took_ms:.3f} ms")


if __name__ == "__main__":
    main()
