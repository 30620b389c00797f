"""Starts programs that are gone soon, until it is killed: some use the fake GPU, most do not. What launchers that
restart their ranks, data loaders, and programs that call ``nvidia-smi`` now and then look like to a tracer."""

from __future__ import annotations

import itertools
import os
import subprocess
import time

EACH_S = 0.5
BURST = (os.path.join(os.environ["PROGRAMS"], "fake_burst"), "--launches", "200", "--rate", "500")


def main() -> None:
    running: list[subprocess.Popen[bytes]] = []
    for number in itertools.count():
        begin = time.monotonic()
        words = BURST if number % 4 == 0 else ("/bin/sleep", "0.3")
        running.append(subprocess.Popen(words, stdout=subprocess.DEVNULL))
        running = [process for process in running if process.poll() is None]
        if not os.fork():  # a worker of the same program
            time.sleep(0.3)
            os._exit(0)
        while True:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    break
            except ChildProcessError:
                break
        time.sleep(max(0.0, begin + EACH_S - time.monotonic()))


main()
