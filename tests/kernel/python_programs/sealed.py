"""Kills itself for any system call but the few that it needs (seccomp): ``sealed.py LOG``. x86-64 and aarch64."""

import ctypes
import platform
import struct
import sys

from announce import STARTED, announce, say, start

sys.setswitchinterval(0.0007)
# read, write, futex, sched_yield, nanosleep, clock_nanosleep, clock_gettime, memory, exit, signals' return
ALLOWED = {
    "x86_64": (0xC000003E, (0, 1, 202, 24, 35, 230, 228, 9, 10, 11, 12, 25, 28, 60, 231, 15, 13, 14)),
    "aarch64": (0xC00000B7, (63, 64, 98, 124, 101, 115, 113, 222, 226, 215, 214, 216, 233, 93, 94, 139, 134, 135)),
}


def seal():
    machine, numbers = ALLOWED[platform.machine()]
    filters = [(0x20, 0, 0, 4), (0x15, 1, 0, machine), (0x06, 0, 0, 0x80000000), (0x20, 0, 0, 0)]
    for at, number in enumerate(numbers):
        filters.append((0x15, len(numbers) - at, 0, number))
    filters += [(0x06, 0, 0, 0x80000000), (0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *one) for one in filters))
    program = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(filters), ctypes.addressof(code)))
    libc = ctypes.CDLL(None)
    # PR_SET_NO_NEW_PRIVS; then SECCOMP_SET_MODE_FILTER with SECCOMP_FILTER_FLAG_TSYNC by PR_SET_SECCOMP
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, program) == 0


def sealed():  # depth 2
    down(9)  # -> down


def down(n):  # depth 3-12
    if n:
        return down(n - 1)  # -> down
    return burn(2000)  # -> burn


def burn(n):  # depth 13
    total = 0
    for i in range(n):
        total += i
    return total


if __name__ == "__main__":
    announce("main:sealed")  # -> announce
    start("sealed", sealed)  # -> start
    seal()
    say("ready", len(STARTED) + 1)  # -> say
    while True:
        sealed()  # -> sealed
