"""Calls Python from a library that is loaded and unloaded again and again: ``unload.py LOG LIBRARY``."""

import _ctypes
import ctypes
import sys

from announce import CHOSEN, STARTED, announce, say, start

sys.setswitchinterval(0.0007)
CALLBACK = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_long)


def unloads():  # depth 2
    handle = _ctypes.dlopen(CHOSEN[0], 0)
    call = PROTOTYPE(_ctypes.dlsym(handle, "call"))
    call(on_call, 40)  # => called
    _ctypes.dlclose(handle)


def called(n):  # depth 3
    return burn(n + 50)  # -> burn


def burn(n):  # depth 4
    total = 0
    for i in range(n):
        total += i
    return total


on_call = CALLBACK(called)
PROTOTYPE = ctypes.CFUNCTYPE(ctypes.c_long, CALLBACK, ctypes.c_long)

if __name__ == "__main__":
    announce("main:unloads")  # -> announce
    start("unloads", unloads)  # -> start
    say("ready", len(STARTED) + 1)  # -> say
    while True:
        unloads()  # -> unloads
