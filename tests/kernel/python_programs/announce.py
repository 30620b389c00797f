"""What every program of this folder shares: it says which thread is which, and starts
threads whose first frame is known.

The programs run on CPython 3.8 to 3.15 and import nothing that runs Python code behind their back. Comments after
``# ->`` are their call grammar; tests/kernel/python_truth.py reads it, and says how it is written.
"""

import _thread
import mmap
import os
import struct
import sys
import time

LOG = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
OPTIONS = [argument for argument in sys.argv[2:] if argument.startswith("--")]
CHOSEN = [argument for argument in sys.argv[2:] if not argument.startswith("--")]
ACCOUNT = None
if OPTIONS and OPTIONS[0].startswith("--account="):
    import account as ACCOUNT

    ACCOUNT.finish_after(float(OPTIONS[0][10:]), sys.argv[1])


def say(*words):
    os.write(LOG, (" ".join(str(word) for word in words) + "\n").encode())  # ~> <genexpr>


def announce(role):
    say("thread", os.getpid(), _thread.get_native_id(), role)  # -> say
    if ACCOUNT:
        ACCOUNT.follow(role)


def thread(role, work):
    announce(role)  # -> announce
    while True:
        work()  # -> $role


def short_thread(role, work):
    announce(role)  # -> announce
    work()  # -> $role


STARTED = []


def start(role, work):
    STARTED.append(role)
    _thread.start_new_thread(thread, (role, work))


class Diary:
    """When a thread did what: (CLOCK_MONOTONIC ns, number) pairs in a file, written before the thing begins."""

    def __init__(self, path, size):
        with open(path, "wb") as file:
            file.truncate(size)
        with open(path, "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), size)
        self.at = 0

    def note(self, number):
        struct.pack_into("<qq", self.memory, self.at, time.monotonic_ns(), number)
        self.at = (self.at + 16) % len(self.memory)
