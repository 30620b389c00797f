"""Threads that do nothing but call, each in ways of its own: ``grammar.py LOG [role ...]``."""

import ctypes
import functools
import re
import sys
import time

from announce import CHOSEN, STARTED, announce, say, start

sys.setswitchinterval(0.0007)
sys.setrecursionlimit(5000)


def burn(n):
    total = 0
    for i in range(n):
        total += i & 3
    return total


# ---- recursion: the depth of each call is known


def recursion():  # depth 2
    down(40)  # -> down


def down(n):  # depth 3-43
    if n == 0:
        return bottom()  # -> bottom
    result = down(n - 1)  # -> down
    return result + 1


def bottom():  # depth 44
    return burn(300)  # -> burn


def shallow():  # depth 2
    even(6)  # -> even


def even(n):  # depth 3-9/2
    x = burn(20)  # -> burn
    if n == 0:
        return x
    return odd(n - 1)  # -> odd


def odd(n):  # depth 4-8/2
    y = even(n - 1)  # -> even
    return y + burn(10)  # -> burn


def tree():  # depth 2
    fib(11)  # -> fib


def fib(n):  # depth 3-13
    if n < 2:
        return 1
    left = fib(n - 1)  # -> fib
    right = fib(n - 2)  # -> fib
    return left + right


def abyss():  # depth 2
    fall(330)  # -> fall
    time.sleep(0.02)


def fall(n):  # depth 3-333
    if n:
        fall(n - 1)  # -> fall
        return
    landing()  # -> landing


def landing():  # depth 334
    splash()  # -> splash


def splash():  # depth 335
    for _ in range(2000):
        drop(3)  # -> drop


def drop(n):  # depth 336
    return [n] * 3


# ---- generators


def generators():  # depth 2
    total = 0
    for x in outer_generator(30):  # ~> outer_generator
        total += x
    for x in countdown(30):  # ~> countdown
        total += x
    total += sum(plain_generator(30))  # ~> plain_generator
    total += sum(i * square(i) for i in range(20))  # ~> <genexpr>; <genexpr> -> square
    return total


def outer_generator(n):
    yield 1
    yield from inner_generator(n)  # ~> inner_generator
    yield 2
    result = yield from last_generator(n)  # ~> last_generator
    yield result


def inner_generator(n):
    for i in range(n):
        yield square(i)  # -> square


def last_generator(n):
    for i in range(n):  # noqa: UP028
        yield i
    return cube(n)  # -> cube


def countdown(n):  # depth 3-34
    if n:
        yield n
        yield from countdown(n - 1)  # ~> countdown


def plain_generator(n):
    i = 0
    while i < n:
        i += 1
        yield cube(i)  # -> cube


def square(n):
    m = n * n
    return m + 0


def cube(n):
    return square(n) * n  # -> square


# ---- coroutines, driven by hand


class Pause:
    def __init__(self, value):
        self.value = value

    def __await__(self):
        answer = yield self.value
        return answer


def coroutines():  # depth 2
    task = top_coroutine()  # -> top_coroutine
    answer = None
    while True:
        try:
            answer = task.send(answer)  # => top_coroutine
        except StopIteration:
            break
    drain = collect()  # -> collect
    try:
        drain.send(None)  # => collect
    except StopIteration:
        pass


async def top_coroutine():  # depth 3
    for i in range(20):
        await middle_coroutine(i)  # ~> middle_coroutine
    return 1


async def middle_coroutine(n):  # depth 4
    a = await low_coroutine(n)  # ~> low_coroutine
    b = await low_coroutine(n + 1)  # ~> low_coroutine
    return a + b


async def low_coroutine(n):  # depth 5
    pause = Pause(n)  # ~> Pause.__init__
    got = await pause  # ~> Pause.__await__
    return square(got)  # -> square


async def collect():  # depth 3
    total = 0
    async for x in numbers(12):  # ~> numbers
        total += x
    async with Guard():  # ~> Guard.__aenter__ Guard.__aexit__
        total += square(3)  # -> square; ~> Guard.__aexit__
    return total


async def numbers(n):
    for i in range(n):
        yield await double(i)  # ~> double


async def double(n):
    return square(n) * 2  # -> square


class Guard:
    async def __aenter__(self):
        return square(4)  # -> square

    async def __aexit__(self, *error):
        return square(5) < 0  # -> square


# ---- C code that calls Python

ITEMS = list(range(23))
PATTERN = re.compile("[a-c]")
COMPARE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int))
QSORT = ctypes.CDLL(None).qsort
NUMBERS = (ctypes.c_int * 9)(*range(9))


def callbacks():  # depth 2
    sorted(ITEMS, key=by_key)  # => by_key
    functools.reduce(add, ITEMS)  # => add
    list(map(mapped, ITEMS))  # => mapped
    PATTERN.sub(replaced, "abcabcxyz")  # => replaced
    max(ITEMS, key=lambda n: square(n))  # => <lambda>; <lambda> -> square
    partial(7)  # ~> partially
    list(filter(None, map(nested, ITEMS)))  # => nested
    QSORT(NUMBERS, 9, 4, compare_c)  # => compare


def by_key(n):  # depth 3
    return square(-n)  # -> square


def add(a, b):  # depth 3
    c = a + b
    return c + 0


def mapped(n):  # depth 3
    return cube(n)  # -> cube


def replaced(match):  # depth 3
    return match.group().upper()


def partially(a, b):  # depth 3
    return square(a) + b  # -> square


def nested(n):  # depth 3
    return sorted(ITEMS[:3], key=by_nested_key)  # => by_nested_key


def by_nested_key(n):  # depth 4
    return cube(n)  # -> cube


def compare(a, b):  # depth 3
    first = a[0]
    return first - b[0]


compare_c = COMPARE(compare)
partial = functools.partial(partially, 1)


# ---- methods that the interpreter calls


class Base:
    def __init__(self, n):
        self.n = n
        self.more = square(n)  # -> square


class Thing(Base):
    count = 0

    def __init__(self, n):
        super().__init__(n)  # ~> Base.__init__
        self.value = n  # ~> Thing.value_set

    def value_get(self):
        return square(self.n)  # -> square

    def value_set(self, value):
        self._value = cube(value)  # -> cube

    value = property(value_get, value_set)

    @property
    def size(self):
        return self.n + 1

    @classmethod
    def make(cls, n):
        return cls(n)  # ~> Thing.__init__

    @staticmethod
    def help(n):
        return square(n)  # -> square

    def __getattr__(self, name):
        return square(len(name))  # -> square

    def __getitem__(self, index):
        return square(index)  # -> square

    def __len__(self):
        return square(2)  # -> square

    def __add__(self, other):
        return square(other)  # -> square

    def __eq__(self, other):
        return square(1) == 1  # -> square

    def __hash__(self):
        return square(7)  # -> square

    def __call__(self, n):
        return square(n)  # -> square

    def __iter__(self):
        return self

    def __next__(self):
        self.n -= 1
        if self.n < 0:
            raise StopIteration
        return square(self.n)  # -> square

    def __contains__(self, item):
        return square(item) > 3  # -> square

    def __bool__(self):
        return square(1) == 1  # -> square

    def __str__(self):
        return str(square(3))  # -> square

    def __del__(self):
        self._value = square(2)  # -> square


def methods():  # depth 2
    for n in range(5):
        drop_thing(n)  # -> drop_thing


def drop_thing(n):  # depth 3
    thing = Thing(n)  # ~> Thing.__init__
    other = Thing.make(n)  # -> Thing.make
    thing.value = 3  # ~> Thing.value_set
    a = thing.value  # ~> Thing.value_get
    b = thing.size  # ~> Thing.size
    c = thing.absent  # ~> Thing.__getattr__
    d = thing[n]  # ~> Thing.__getitem__
    e = len(thing)  # => Thing.__len__
    f = thing + 5  # => Thing.__add__
    g = thing == other  # => Thing.__eq__
    h = {thing: 1}  # => Thing.__hash__
    i = thing(4)  # ~> Thing.__call__
    j = n in thing  # => Thing.__contains__
    k = not thing  # => Thing.__bool__
    text = str(thing)  # => Thing.__str__
    text = f"{thing.help(n)}"  # -> Thing.help
    total = 0
    for item in thing:  # => Thing.__next__ Thing.__iter__
        total += item
    last = (a, b, c, d, e, f, g, i, j, k, text, total)
    del h
    del thing  # => Thing.__del__
    del other  # => Thing.__del__
    return last


# ---- bodies of comprehensions, classes, lambdas, closures


def bodies():  # depth 2
    a = [square(x) for x in range(9)]  # -> square
    b = {cube(x) for x in range(9)}  # -> cube
    c = {x: square(x) for x in range(9)}  # -> square
    d = [[square(x + y) for x in range(3)] for y in range(3)]  # -> square

    class Local:  # => Local
        attribute = square(3)  # -> square
        other = cube(3)  # -> cube

        def method(self):
            return square(4)  # -> square

    e = Local().method()  # -> Local.method
    f = (lambda n: cube(n))(5)  # -> <lambda>; <lambda> -> cube
    g = closure(3)()  # -> closure closure.<locals>.inside
    h = starred(*ITEMS[:3], key=2)  # ~> starred
    i = starred(1, 2, 3, key=2)  # -> starred
    return a, b, c, d, e, f, g, h, i


def closure(n):  # depth 3
    def inside():  # depth 3
        return square(n)  # -> square

    return inside


def starred(*numbers, key):  # depth 3
    return square(len(numbers)) + key  # -> square


# ---- exceptions


class Manager:
    def __enter__(self):
        return square(1)  # -> square

    def __exit__(self, *error):
        return square(2) == 4  # -> square


def exceptions():  # depth 2
    for n in range(6):
        try:
            risky(n)  # -> risky
        except ValueError:
            handled(n)  # -> handled
        finally:
            cleanup(n)  # -> cleanup
    with Manager():  # ~> Manager.__enter__ Manager.__exit__
        raise_now(3)  # -> raise_now; ~> Manager.__exit__
    returning(2)  # -> returning


def risky(n):  # depth 3
    try:
        return raise_now(n)  # -> raise_now
    finally:
        cleanup(n)  # -> cleanup


def raise_now(n):
    if n & 1:
        raise ValueError(n)
    return square(n)  # -> square


def handled(n):
    return cube(n)  # -> cube


def cleanup(n):
    return square(n)  # -> square


def returning(n):
    with Manager() as m:  # ~> Manager.__enter__ Manager.__exit__
        return m + square(n)  # -> square; ~> Manager.__exit__


# ---- decorated functions


def decorate(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        before = square(1)  # -> square
        result = function(*args, **kwargs)  # ~> decorated recursive
        return result + before

    return wrapper


def decorators():  # depth 2
    decorated(3)  # -> decorate.<locals>.wrapper
    recursive(5)  # -> decorate.<locals>.wrapper
    remembered.cache_clear()
    remembered(9)  # => remembered


@decorate
def decorated(n):  # depth 4
    return cube(n)  # -> cube


@decorate
def recursive(n):  # depth 4-14/2
    if n == 0:
        return square(n)  # -> square
    return recursive(n - 1)  # -> decorate.<locals>.wrapper


@functools.lru_cache(maxsize=None)  # noqa: UP033 (3.8)
def remembered(n):  # depth 3-12
    if n == 0:
        return 0
    return remembered(n - 1) + 1  # => remembered


ROLES = {
    role.__name__: role
    for role in (
        recursion,
        shallow,
        tree,
        abyss,
        generators,
        coroutines,
        callbacks,
        methods,
        bodies,
        exceptions,
        decorators,
    )
}


def main():  # depth 2
    announce("main")  # -> announce
    for role in CHOSEN or ROLES:
        start(role, ROLES[role])  # -> start
    say("ready", len(STARTED) + 1)  # -> say


if __name__ == "__main__":
    main()  # -> main
    while True:
        tree()  # -> tree
