"""Small programs that misbehave when they are repeated, each in one way. Their requests sleep, and print what that
took: other load on the machine hardly lengthens it.

    symptoms.py two_speeds STATE    every few runs take twice as long, whichever they are
    symptoms.py tail                one request in fifty takes twenty times as long
    symptoms.py grows STATE         each run has more to do, by what all runs before it left behind
    symptoms.py workers             a request of one of WORKERS threads waits for all of them
    symptoms.py fails STATE         one run in four ends with an error
    symptoms.py stable              none of that

STATE is a folder that lasts from run to run.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from pathlib import Path

UNIT_S = 0.01


def request(seconds: float) -> str:
    """Serves a request; returns the line on it."""
    begin = time.perf_counter()
    time.sleep(seconds)
    return f"latency={(time.perf_counter() - begin) * 1e3:.3f} ms"


def count(folder: str) -> int:
    """How many runs were made before, this one left out."""
    journal = Path(folder) / "journal"
    before = journal.read_text().count("\n") if journal.exists() else 0
    with journal.open("a") as file:
        file.write("run\n")
    return before


def two_speeds(folder: str) -> None:
    slow = random.Random(7).sample(range(200), 60)  # irregular: nothing comes back every k-th time
    factor = 2 if count(folder) in slow else 1
    for _ in range(10):
        print(request(UNIT_S * factor))


def tail() -> None:
    for number in range(200):
        print(request(0.04 if number % 50 == 17 else 0.002))


def grows(folder: str) -> None:
    done = count(folder)
    for _ in range(10):
        print(request(UNIT_S * (1 + done / 20)))


def workers() -> None:
    lock, number = threading.Lock(), int(os.environ.get("WORKERS", "1"))
    lines: list[str] = []

    def work() -> None:
        for _ in range(80 // number):
            with lock:
                lines.append(request(0.004 * number))
            time.sleep(0.001)  # or the same thread would have the lock again and again

    threads = [threading.Thread(target=work) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("\n".join(lines))


def fails(folder: str) -> None:
    print(request(UNIT_S))
    if count(folder) % 4 == 3:
        sys.exit("error: connection reset by peer")


def stable() -> None:
    for _ in range(20):
        print(request(UNIT_S))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
