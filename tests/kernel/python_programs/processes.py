"""Forks, workers, and another program in its place: ``processes.py LOG [--when=FILE --then=PROGRAM]``, once the file is
there.

Every process says who it is. The children end when their parent does.
"""

import ctypes
import os
import sys
import time

from announce import OPTIONS, STARTED, announce, say, start


def parent():
    burn_parent(400)  # -> burn_parent


def burn_parent(n):
    total = 0
    for i in range(n):
        total += i
    return total


def forked():
    list(map(burn_forked, [300, 400]))  # => burn_forked


def burn_forked(n):
    total = 1
    for _ in range(n):
        total *= 1
    return total


def grandchild():
    grandchild_two(3)  # -> grandchild_two


def grandchild_two(n):
    if n:
        return grandchild_two(n - 1)  # -> grandchild_two
    return burn_forked(300)  # -> burn_forked


def beside():  # depth 2
    burn_forked(200)  # -> burn_forked


def worker(kind, mother):
    end_with_parent(mother)  # -> end_with_parent
    announce(kind)  # -> announce
    while True:
        worker_step(200)  # -> worker_step


def worker_step(n):
    total = 0
    for i in range(n):
        total -= i
    return total


def threader():  # depth 2
    """A thread that is not the first forks: its child's only thread was this one."""
    mother = os.getpid()
    if os.fork() == 0:
        end_with_parent(mother)  # -> end_with_parent
        announce("threader")  # -> announce
        while True:
            burn_forked(150)  # -> burn_forked
    while True:
        time.sleep(10)


def end_with_parent(mother):
    ctypes.CDLL(None).prctl(1, 9)  # -> [ctypes]
    if os.getppid() != mother:
        os._exit(0)  # it was too late


def main():
    announce("main:parent")  # -> announce
    start("beside", beside)  # -> start
    start("threader", threader)  # -> start
    mother = os.getpid()
    if os.fork() == 0:  # -> [threading random]
        end_with_parent(mother)  # -> end_with_parent
        announce("main:forked")  # -> announce
        start("beside", beside)  # -> start
        mother = os.getpid()
        if os.fork() == 0:  # -> [threading random]
            end_with_parent(mother)  # -> end_with_parent
            announce("main:grandchild")  # -> announce
            return loop(grandchild)  # -> loop
        return loop(forked)  # -> loop
    return workers()  # -> workers


def workers():
    import multiprocessing  # -> [importlib multiprocessing]

    mother = os.getpid()
    fork = multiprocessing.get_context("fork").Process(target=worker, args=("main:worker", mother), daemon=True)
    fork.start()  # -> [multiprocessing threading random logging weakref] worker
    spawn = multiprocessing.get_context("spawn").Process(target=worker, args=("spawn:worker", mother), daemon=True)
    spawn.start()  # -> [multiprocessing]
    say("ready", len(STARTED) + 1)  # -> say
    return loop(parent)  # -> loop


def loop(work):
    while True:
        work()  # -> $role


if __name__ == "__main__":
    then = [option[7:] for option in OPTIONS if option.startswith("--then=")]
    if then:
        announce("main:parent")  # -> announce
        say("ready", 1)  # -> say
        (when,) = [option[7:] for option in OPTIONS if option.startswith("--when=")]
        while not os.path.exists(when):  # -> [genericpath]
            parent()  # -> parent
        os.execv(then[0], [then[0], *then[1:], sys.argv[1] + ".then"])
    main()  # -> main
