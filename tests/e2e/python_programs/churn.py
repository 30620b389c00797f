# ruff: noqa: UP031 (it runs on CPython 3.8 and later)
"""Makes a function, waits in it, forgets it, and makes another one, which comes to lie where the old one was.

Prints its thread's number, then function, file and line that each function waits at. Each byte of input lets it go on.
With an argument all functions have the same name, so that only contents distinguish two of them.
"""

import os
import sys

NAMES = ["alpha"] * 4 if len(sys.argv) > 1 else ["alpha", "bravo", "cargo", "delta"]


def wait(text):
    os.write(1, text)
    if not os.read(0, 1):
        os._exit(0)


def main():
    os.write(1, b"%d\n" % os.getpid())
    number = 0
    while True:
        name = NAMES[number * 7 % 4]
        blank = number * 5 % 9
        file = "<made-%03d>" % (number * 31 % 1000)
        # The first line is the same for all, so it does not distinguish them.
        source = "def %s(wait, text):\n%s    wait(text)\n" % (name, "\n" * blank)
        scope = {}
        exec(compile(source, file, "exec"), scope)
        scope.pop(name)(wait, ("%s %s %d\n" % (name, file, blank + 2)).encode())
        scope.clear()
        number += 1


main()
