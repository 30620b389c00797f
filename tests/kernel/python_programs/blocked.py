"""Threads that wait, each in a place of its own: ``blocked.py LOG``. ``forever_…`` never come back."""

import _thread
import os
import queue
import select
import socket
import threading
import time

from announce import STARTED, announce, say, start

SECONDS = 0.03
HELD = _thread.allocate_lock()
HELD.acquire()
EMPTY = queue.Queue()
SIMPLE = queue.SimpleQueue()
NEAR, FAR = socket.socketpair()
NEAR.settimeout(SECONDS)
SILENT, SPEAKER = socket.socketpair()
READ, WRITE = os.pipe()
NEVER = threading.Event()


def deeper(function):  # depth 3
    return function()  # -> wait_lock wait_queue wait_simple wait_sleep wait_select wait_socket wait_event


def in_lock():  # depth 2
    deeper(wait_lock)  # -> deeper


def wait_lock():  # depth 4
    HELD.acquire(True, SECONDS)  # blocks


def in_queue():  # depth 2
    deeper(wait_queue)  # -> deeper


def wait_queue():  # depth 4
    try:
        EMPTY.get(timeout=SECONDS)  # blocks -> [queue threading]
    except queue.Empty:
        pass


def in_simple():  # depth 2
    deeper(wait_simple)  # -> deeper


def wait_simple():  # depth 4
    try:
        SIMPLE.get(timeout=SECONDS)  # blocks
    except queue.Empty:
        pass


def in_sleep():  # depth 2
    deeper(wait_sleep)  # -> deeper


def wait_sleep():  # depth 4
    time.sleep(SECONDS)  # blocks


def in_select():  # depth 2
    deeper(wait_select)  # -> deeper


def wait_select():  # depth 4
    select.select([NEAR], [], [], SECONDS)  # blocks


def in_socket():  # depth 2
    deeper(wait_socket)  # -> deeper


def wait_socket():  # depth 4
    try:
        NEAR.recv(10)  # blocks
    except OSError:
        pass


def in_event():  # depth 2
    deeper(wait_event)  # -> deeper


def wait_event():  # depth 4
    NEVER.wait(SECONDS)  # blocks -> [threading]


def forever_lock():  # depth 2
    HELD.acquire()  # blocks


def forever_read():  # depth 2
    list(map(read_one, [READ]))  # => read_one


def read_one(descriptor):  # depth 3
    return os.read(descriptor, 1)  # blocks


def forever_recv():  # depth 2
    sorted([1], key=lambda n: SILENT.recv(n))  # blocks => <lambda>


def forever_join():  # depth 2
    for item in waiting(3):  # ~> waiting
        print(item)


def waiting(n):  # depth 3
    HELD.acquire()  # blocks
    yield n


def forever_poll():  # depth 2
    select.select([SILENT], [], [])  # blocks


TIMED = [in_lock, in_queue, in_simple, in_sleep, in_select, in_socket, in_event]
FOREVER = [forever_lock, forever_read, forever_recv, forever_join, forever_poll]


if __name__ == "__main__":
    announce("main:wait_main")  # -> announce
    for role in TIMED + FOREVER:
        start(role.__name__, role)  # -> start
    say("ready", len(STARTED) + 1)  # -> say
    while True:
        time.sleep(SECONDS)  # blocks
