# ruff: noqa: UP031 (it runs on CPython 3.8 and later)
"""A process that executes commands, one line of input at a time, and answers each with a line of JSON.

"threads": its threads' numbers. "more N": N more threads, blocked. "fewer": they end. "spin": a thread that spins; its
number. "collect": a thread that collects garbage without end; its number. "stop": both stop. "statistics": collections
of garbage. "fork": a child that blocks; its number. "interpreter": a thread whose code, in an interpreter of its own,
blocks; its number. "exec": becomes sleep.
"""

import gc
import json
import os
import sys
import threading
import time

stop = threading.Event()
blocked = []
release = threading.Event()


def spin():
    while not stop.is_set():
        pass


def collect():
    heap = [[number] for number in range(300_000)]
    while not stop.is_set():
        gc.collect()
    return heap


def interpreter():
    try:
        import _interpreters as interpreters
    except ImportError:
        try:
            import _xxsubinterpreters as interpreters
        except ImportError:
            return
    source = "def inside():\n    import os\n    os.read(%d, 1)\ninside()\n" % pipe[0]
    made = interpreters.create()
    (getattr(interpreters, "run_string", None) or interpreters.exec)(made, source)


def start(function, *args):
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


gc.disable()
pipe = os.pipe()
running = []
while True:
    answer = None
    words = sys.stdin.readline().split()
    if not words:
        os._exit(0)
    if words[0] == "threads":
        answer = [thread.native_id for thread in threading.enumerate()]
    elif words[0] == "more":
        blocked += [start(release.wait) for _ in range(int(words[1]))]
    elif words[0] == "fewer":
        release.set()
        for thread in blocked:
            thread.join()
    elif words[0] in ("spin", "collect", "interpreter"):
        stop.clear()
        running.append(start({"spin": spin, "collect": collect, "interpreter": interpreter}[words[0]]))
        answer = running[-1].native_id
    elif words[0] == "stop":
        stop.set()
        for thread in running:
            thread.join()
        running.clear()
    elif words[0] == "statistics":
        answer = [generation["collections"] for generation in gc.get_stats()]
    elif words[0] == "fork":
        answer = os.fork()
        if not answer:
            while True:
                time.sleep(1000)
    elif words[0] == "exec":
        os.execv("/bin/sleep", ["/bin/sleep", "1000"])
    print(json.dumps(answer), flush=True)
