"""An elder thread, 200 younger ones that wait, and others that come and go: ``comers.py LOG``."""

import _thread
import sys
import time

from announce import STARTED, announce, say, short_thread, start

sys.setswitchinterval(0.0007)
HELD = _thread.allocate_lock()
HELD.acquire()


def elder():  # depth 2
    burn(500)  # -> burn


def younger():  # depth 2
    HELD.acquire()  # blocks


def short():  # depth 2
    for n in range(30):
        step(n)  # -> step


def step(n):  # depth 3
    burn(300)  # -> burn
    return n


def burn(n):
    total = 0
    for i in range(n):
        total += i
    return total


if __name__ == "__main__":
    announce("main:elder")  # -> announce
    start("elder", elder)  # -> start
    for _ in range(200):
        start("younger", younger)  # -> start
    say("ready", len(STARTED) + 1)  # -> say
    while True:
        _thread.start_new_thread(short_thread, ("short:short", short))
        time.sleep(0.004)
