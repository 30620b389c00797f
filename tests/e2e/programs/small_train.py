"""The smallest training scripts that people have, on a CPU: what a first trial of Argus looks at.

Prints "ready", then trains until it is killed or ``--seconds`` are over. Each step is a line of ``--log``: its begin
and end, and when it began its backward pass (0: it has none), CLOCK_MONOTONIC in ns. A step takes about ``--step-ms``
on an idle CPU: the model is made so large.

    small_train.py mlp --step-ms 3 --log steps
    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 small_train.py mlp --log steps-0
    small_train.py loop --log steps        the same without PyTorch: a loop of plain Python
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Iterator
from typing import IO, Any

BATCH = 32


def steps_of_plain_python(step_ms: float) -> Iterator[int]:
    """A loop that parses and sums, as scripts that prepare data do. Yields 0 for each step."""
    text = json.dumps([{"id": number, "value": number * 0.5} for number in range(200)])
    while True:
        until = time.monotonic() + step_ms / 1e3
        while time.monotonic() < until:
            sum(row["value"] for row in json.loads(text))
        yield 0


class Samples:
    """A data set whose samples may be slow to read from a step on: rows of a tensor."""

    def __init__(self, width: int, slow_ms: float, from_step: int) -> None:
        import torch

        self.rows = torch.randn(1024, width)
        self.slow_s, self.from_step = slow_ms / 1e3, from_step

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, place: int) -> Any:
        if self.slow_s and place % BATCH == 0 and place >= self.from_step * BATCH:
            self.read_slowly()
        return self.rows[place % len(self.rows)]

    def read_slowly(self) -> None:
        time.sleep(self.slow_s)


def steps_of_training(options: argparse.Namespace) -> Iterator[int]:
    """An MLP with AdamW and a DataLoader; with RANK in the environment by DistributedDataParallel over gloo. Yields
    when each step began its backward pass."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    width = options.width or {1: 96, 3: 240, 10: 352, 60: 768}.get(int(options.step_ms), 256)
    rank = int(os.environ.get("RANK", "-1"))
    faulty = options.fault if rank == options.fault_rank else ""
    model: Any = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    if rank >= 0:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    slow_ms = options.fault_ms if faulty == "data" else 0.0
    loader = DataLoader(Samples(width, slow_ms, options.fault_from), batch_size=BATCH)  # type: ignore[type-var]
    ballast = [[number] for number in range(400_000)] if faulty == "gc" else []
    for step, batch in enumerate(loader):
        optimizer.zero_grad()
        loss = (model(batch) - batch).square().mean()
        if faulty == "compute" and step >= options.fault_from:
            work_harder(batch, options.fault_ms)
        backward_ns = time.monotonic_ns()
        loss.backward()
        optimizer.step()
        if faulty == "hang" and step >= options.fault_from:
            wait_for_ever()
        if ballast and step >= options.fault_from:
            gc.collect()
        yield backward_ns
        if options.evaluate_every and step % options.evaluate_every == options.evaluate_every - 1:
            evaluate(model, batch, options.evaluate_s)


def work_harder(batch: Any, ms: float) -> None:
    """Computes for so long."""
    until = time.monotonic() + ms / 1e3
    while time.monotonic() < until:
        batch.exp().sum()


def wait_for_ever() -> None:
    time.sleep(1e6)


def evaluate(model: Any, batch: Any, seconds: float) -> None:
    """Forward passes alone, as between epochs."""
    import torch

    until = time.monotonic() + seconds
    with torch.no_grad():
        while time.monotonic() < until:
            model(batch)


def train(options: argparse.Namespace, log: IO[str]) -> None:
    """Runs steps and writes down when each was."""
    steps = steps_of_plain_python(options.step_ms) if options.program == "loop" else steps_of_training(options)
    next(steps)  # imports, and what happens once
    end = time.monotonic() + options.seconds
    burst = time.monotonic()
    began = time.monotonic_ns()
    for number, backward_ns in enumerate(steps, 1):
        now = time.monotonic_ns()
        log.write(f"{began} {now} {backward_ns}\n")
        if number == 20:
            print("ready", flush=True)
        if number % 16 == 0:
            log.flush()
            if time.monotonic() > end:
                return
        if options.idle_s and time.monotonic() - burst > options.burst_s:
            time.sleep(options.idle_s)  # somebody reads what a cell of a notebook has printed
            burst = time.monotonic()
        began = time.monotonic_ns()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("program", choices=("mlp", "loop"))
    parser.add_argument("--step-ms", type=float, default=3.0)
    parser.add_argument("--width", type=int, default=0, help="of the model, over what --step-ms chooses")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--log", required=True)
    parser.add_argument("--evaluate-every", type=int, default=0, metavar="STEPS")
    parser.add_argument("--evaluate-s", type=float, default=2.0)
    parser.add_argument("--idle-s", type=float, default=0.0, help="pause after each --burst-s")
    parser.add_argument("--burst-s", type=float, default=4.0)
    parser.add_argument("--fault", choices=("data", "compute", "gc", "hang"), default="")
    parser.add_argument("--fault-rank", type=int, default=-1, help="-1: of a program without ranks")
    parser.add_argument("--fault-ms", type=float, default=20.0)
    parser.add_argument("--fault-from", type=int, default=0, metavar="STEP")
    options = parser.parse_args()
    with open(options.log, "w", encoding="utf-8") as log:
        train(options, log)


if __name__ == "__main__":
    main()
    os._exit(0)  # without the interpreter's finalization, in which threads of gloo abort now and then
