"""Commands on standard input, answers on standard output: what a program needs to be traced on command."""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

WARM_STEPS = 3
"""After ``go``, before steps are recorded."""


class Commands:
    """Standard input as a queue of lines."""

    def __init__(self) -> None:
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            self.lines.put(line.strip())
        self.lines.put("exit")

    def waiting(self) -> bool:
        return not self.lines.empty()

    def next(self) -> str:
        return self.lines.get()


def answer(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def serve(trainer: Any) -> None:
    commands = Commands()
    profiler: Any = None
    recorded: list[list[int]] = []
    used: list[int] = []
    stepping = False
    handlers: dict[str, Callable[..., dict[str, Any]]] = {
        "steps": lambda count: trainer.steps(int(count)),
        "profile": lambda count, file: trainer.profile(int(count), file),
        "traffic": lambda: trainer.traffic(),
        "loader": lambda count: trainer.load(int(count)),
    }
    before = 0
    while True:
        if stepping and not commands.waiting():
            trainer.step()
            now = time.monotonic_ns()
            recorded.append([before, now - before])
            used.append(time.process_time_ns())
            before = now
            continue
        verb, *words = commands.next().split()
        try:
            if verb == "exit":
                trainer.sync()
                return
            if verb == "go":
                recorded, used, stepping = [], [], True
                for _ in range(WARM_STEPS):
                    trainer.step()
                before = time.monotonic_ns()
                answer(ok=True)
            elif verb == "pause":
                stepping = False
                trainer.sync()
                answer(steps=recorded, cpu_ns=used)
            elif verb == "profiler":
                began = time.monotonic_ns()
                if words[0] == "on":
                    profiler = trainer.profiler()
                    profiler.start()
                    answer(ok=True, took_ns=time.monotonic_ns() - began)
                else:
                    trainer.sync()
                    profiler.stop()
                    seen = profiler.seen()
                    profiler = None
                    answer(ok=True, took_ns=time.monotonic_ns() - began, gpu_events=seen)
                before = time.monotonic_ns()
            else:
                answer(**handlers[verb](*words))
                before = time.monotonic_ns()
        except Exception as failure:
            answer(error=f"{type(failure).__name__}: {failure}"[:2000])
