"""Hangs: its main thread in the given way, others in a lock and a pipe. Prints "ready" once all of them do."""

import os
import sys
import threading
import time


def waits_for_a_lock(lock):
    with lock:
        pass


def waits_for_data(pipe):
    os.read(pipe, 1)


def sleeps():
    time.sleep(600)


def waits_in_a_barrier():
    threading.Barrier(2).wait(600)


if __name__ == "__main__":
    held = threading.Lock()
    held.acquire()
    reading, writing = os.pipe()
    threading.Thread(target=waits_for_a_lock, args=(held,), daemon=True).start()
    threading.Thread(target=waits_for_data, args=(reading,), daemon=True).start()
    time.sleep(0.2)
    print("ready", flush=True)
    (sleeps if "odd" in sys.argv else waits_in_a_barrier)()
