"""Small programs that are slow for what they wait for. None prints a time, and what they print is the same each time.

    waits.py backend            asks another process, which takes its time
    waits.py starved CPU        computes on a CPU that it shares with two others
    waits.py sometimes STATE    takes several times as long in every few runs, whichever they are
    waits.py paused STATE       is stopped for a while in every few runs, whichever they are

STATE is a folder that lasts from run to run.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path


def slow_run(folder: str) -> bool:
    """Whether this run is one of the slow ones: irregularly three in ten."""
    journal = Path(folder) / "journal"
    with journal.open("a") as file:
        file.write("run\n")
    return journal.read_text().count("\n") - 1 in random.Random(4).sample(range(200), 60)


def compute(seconds: float) -> None:
    """Until it has had so much CPU time."""
    while time.process_time() < seconds:
        pass


def backend() -> None:
    asked, answers = os.pipe(), os.pipe()
    if os.fork() == 0:
        for _ in range(6):
            os.read(asked[0], 1)
            time.sleep(0.15)
            os.write(answers[1], b".")
        os._exit(0)
    for _ in range(6):
        os.write(asked[1], b"?")
        os.read(answers[0], 1)
    os.wait()


def starved(cpu: str) -> None:
    os.sched_setaffinity(0, {int(cpu)})
    others = []
    for _ in range(2):
        if (other := os.fork()) == 0:
            while True:
                pass
        others.append(other)
    compute(0.2)
    for other in others:
        os.kill(other, signal.SIGKILL)  # and not waited for: what they used is not this program's
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def sometimes(folder: str) -> None:
    time.sleep(0.8 if slow_run(folder) else 0.1)  # starting Python takes 0.03 to 0.3 s


def paused(folder: str) -> None:
    own = os.getpid()
    if slow_run(folder) and os.fork() == 0:
        time.sleep(0.02)
        os.kill(own, signal.SIGSTOP)
        time.sleep(0.8)
        os.kill(own, signal.SIGCONT)
        os._exit(0)
    time.sleep(0.1)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
    print("done")
