"""The commands ``window`` and ``gpu`` of launcher.cu on the fake GPU, to try ``launches`` where there is none."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from fake_step import Trainer


def main() -> None:
    os.environ["FAKEGPU_KERNEL_NS"] = "layer0=2000,gemm_0=20000,*=1000"
    trainer = Trainer(argparse.Namespace(backend="fake", slow_rank=-1, slow_from=-1))
    functions = dict(trainer.kernels)
    kernels = {2_000: functions["_Z6layer0Pf"], 20_000: functions["gemm_0"]}
    print(json.dumps({"ready": True, "pid": os.getpid()}), flush=True)
    for line in sys.stdin:
        verb, *words = line.split()
        if verb == "exit":
            break
        numbers = [int(word) for word in words]
        settle, length, batch, pause = numbers if verb == "window" else (0, *numbers[:2], 0)
        kernel = functions["pointwise"] if verb == "window" else kernels[numbers[2]]
        begin = time.monotonic_ns() + settle * 1_000_000
        found: list[float] = []
        while (before := time.monotonic_ns()) < begin + length * 1_000_000:
            for _ in range(batch):
                trainer.launch(kernel)
            launched = time.monotonic_ns()
            trainer.sync()
            if before >= begin:
                found.append(((launched if verb == "window" else time.monotonic_ns()) - before) / batch)
            time.sleep(pause / 1e6)
        summary = {"batches": len(found), "late": 0, "launches": len(found) * batch}
        median, least = (statistics.median(found), min(found)) if found else (0, 0)
        print(json.dumps({**summary, "median_ns": median, "min_ns": least}), flush=True)


if __name__ == "__main__":
    main()
