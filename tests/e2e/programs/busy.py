"""Computes in one thread, sleeps in another, collects garbage now and then, until its file is there or it is killed."""

import gc
import os
import sys
import threading
import time


def inner(n):
    total = 0
    for number in range(n):
        total += number * number
    return total


def outer():
    return inner(20_000)


def sleeps_again_and_again():
    while True:
        time.sleep(0.02)


def collects(heap):
    return gc.collect() if heap else 0


if __name__ == "__main__":
    stop = sys.argv[1]
    threading.Thread(target=sleeps_again_and_again, daemon=True).start()
    heap = [[number] for number in range(400_000)]
    gc.disable()
    print("ready", flush=True)
    turn = 0
    while not os.path.exists(stop):
        outer()
        turn += 1
        if turn % 100 == 0:
            collects(heap)
    if len(sys.argv) > 2:
        os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
