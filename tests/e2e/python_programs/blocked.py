# ruff: noqa: C400, UP036 (it runs on CPython 3.8 and later)
"""Threads that block at known lines in every kind of code, and what CPython itself says of their stacks.

Prints one line of JSON: thread number → [function, file, line (0: none), offset of the instruction] of each frame, leaf
first. Then waits for its standard input to end. Runs on CPython 3.8 and later.
"""

import _thread
import asyncio
import functools
import json
import os
import sys
import threading
import time
import traceback

GATE = _thread.allocate_lock()
GATE.acquire()


def block(*_, **__):
    GATE.acquire()
    return 0


def plain():
    x = 1
    block()
    return x


def nested():
    def inner():
        class Local:
            def method(self):
                return (lambda: block())()

        Local().method()

    inner()


def comprehensions():
    return [
        y
        for y in [1, 2]
        if not block()
    ]  # fmt: skip


def dictionary():
    return {
        key: block(
            key
        )
        for key in "ab"
    }  # fmt: skip


def generators():
    def leaf():
        yield 1
        yield block()

    def middle():
        yield 0
        yield from leaf()

    return list(x for x in middle())


def coroutines():
    async def leaf():
        await asyncio.sleep(0)
        block()

    async def items():
        yield 1
        await leaf()
        yield 2

    async def middle():
        async for _ in items():
            pass

    async def outer():
        await asyncio.gather(middle())

    asyncio.run(outer())


def decorate(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(
            *args
        )  # fmt: skip

    return wrapper


@decorate
@decorate
def decorated(a=1,
              b=2):  # fmt: skip
    return block(
        a,
        b,
    )


def class_body():
    class Body:
        x = 1
        y = block()

        def z(self):
            return 0

    return Body


class Built:
    def __init__(self, last):
        self.x = 1
        self.y = block() if last else 0


class Derived(Built):
    def __init__(self):
        super().__init__(True)

    @property
    def value(self):
        return 1


def constructor():
    return Derived()


def inlined_constructor():
    # Often enough for CPython to inline the call: it then has a frame of its own below __init__.
    for number in range(5000):
        Built(number == 4999)


def from_c():
    return sorted(
        [3, 2, 1],
        key=lambda x: (
            x
            + block()
        ),
    )  # fmt: skip


def backwards():
    return max(
        1,
        min(
            2,
            3,
        ),
        block(
            1,
            2,
        ),
        4,
    )  # fmt: skip


class Manager:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        block()


def leaving():
    with Manager():
        for _ in range(3):
            pass


def handling():
    try:
        raise ValueError
    except ValueError:
        try:
            pass
        finally:
            block()


def closing():
    def generator():
        try:
            yield 1
        finally:
            block()

    running = generator()
    next(running)
    running.close()


def deep(n=400):
    return deep(n - 1) if n else block()


def recursion():
    sys.setrecursionlimit(10_000)
    deep()


class Lazy:
    def __getattr__(self, name):
        return block()


def attribute():
    return Lazy().nothing


def made(name, source, file):
    scope = {"block": block}
    exec(compile(source, file, "exec"), scope)
    return scope[name]


def without_lines():
    block()


def strip_lines(function):
    code = function.__code__
    half = len(code.co_code) // 2
    if sys.version_info >= (3, 11):
        table = bytes([0xF8 | 7]) * (half // 8) + (bytes([0xF8 | half % 8 - 1]) if half % 8 else b"")
    elif sys.version_info >= (3, 10):
        table = bytes([254, 128]) * (2 * half // 254) + bytes([2 * half % 254, 128])
    else:
        return function
    function.__code__ = code.replace(co_linetable=table)
    return function


FUNCTIONS = [
    plain,
    nested,
    comprehensions,
    dictionary,
    generators,
    coroutines,
    decorated,
    class_body,
    constructor,
    inlined_constructor,
    from_c,
    backwards,
    leaving,
    handling,
    closing,
    recursion,
    attribute,
    strip_lines(without_lines),
    # More lines than one step of a line table holds, forward and back.
    made(
        "far", "def far():\n    x = [\n" + "\n" * 700 + "    block(\n" + "\n" * 500 + "    )]\n    return x\n", "<far>"
    ),
    # Farther into the code than 16 bits count.
    made(
        "long", "def long(x=0):\n" + "    x = x + x * 3\n" * 12_000 + "    block()\n" + "    x += 1\n" * 100, "<long>"
    ),
    made("caf\u00e9", "def caf\u00e9():\n    block()\n", "/tmp/\u00fcbung.py"),
    made("\u53d8\u91cf", "def \u53d8\u91cf():\n\n    block()\n", "/tmp/\u8def\u5f84/\u4ee3\u7801.py"),
    made("\U00010400", "def \U00010400():\n    return (\n        block())\n", "/tmp/\U0001f40d.py"),
    made("odd", "def odd():\n    block()\n", "/tmp/not-utf8-\udc80.py"),
    made("a" * 300, "def " + "a" * 300 + "():\n    block()\n", "/tmp/" + "b" * 600 + ".py"),
    # A function that has its file's name is no hidden frame of CPython's.
    made("same", "def same():\n    block()\n", "same"),
]


def shown(text):
    return text.encode("utf-8", "backslashreplace").decode()


def stacks():
    found = {}
    for thread in threads:
        frame = sys._current_frames().get(thread.ident)
        rows = []
        output = [(entry.name, entry.lineno) for entry in reversed(traceback.extract_stack(frame))]
        while frame is not None:
            code = frame.f_code
            row = [shown(getattr(code, "co_qualname", code.co_name)), shown(code.co_filename), frame.f_lineno or 0]
            assert output[len(rows)] == (code.co_name, frame.f_lineno), (output[len(rows)], row)
            rows.append([*row, frame.f_lasti])
            frame = frame.f_back
        tid = thread.native_id
        found[tid] = rows
    return found


threads = [threading.Thread(target=function, daemon=True) for function in FUNCTIONS]
for thread in threads:
    thread.start()
before = None
while True:
    now = stacks()
    if now == before and all(rows and rows[0][0] == "block" for rows in now.values()):
        break
    before = now
    time.sleep(0.05)
print(json.dumps(now), flush=True)
sys.stdin.buffer.read()
os._exit(0)
