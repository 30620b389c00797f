"""Coroutines under asyncio, one event loop a thread: ``aio.py LOG``."""

import asyncio
import sys

from announce import STARTED, announce, say, start

sys.setswitchinterval(0.0007)


def runs():  # depth 2
    asyncio.run(top())  # -> top; ~> [*] top low child


def loops():  # depth 2
    loop = asyncio.new_event_loop()  # -> [*]
    while True:
        loop.run_until_complete(top())  # -> top; ~> [*] top low child
        loop.call_soon(scheduled, 3)  # -> [*]
        loop.run_until_complete(single())  # -> single; ~> [*] scheduled single


async def top():
    for n in range(40):
        await middle(n)  # ~> middle
        # a coroutine that has waited is resumed from its task, through those that wait for it
        await asyncio.gather(child(1), child(2))  # -> child; ~> [*]
        await asyncio.wait_for(low(3), 5)  # -> low; ~> [*] low


async def middle(n):
    await asyncio.sleep(0)  # ~> [*]
    return await low(n)  # ~> low


async def low(n):
    square(n)  # -> square
    await asyncio.sleep(0)  # ~> [*]
    return square(n)  # -> square


async def child(n):
    async for x in numbers(n):  # ~> numbers; ~> [*]
        square(x)  # -> square; ~> [*]
    return await low(n)  # ~> low


async def numbers(n):
    for i in range(n):
        await asyncio.sleep(0)  # ~> [*]
        yield square(i)  # -> square


async def single():
    await asyncio.sleep(0.0001)  # ~> [*]


def scheduled(n):
    square(n)  # -> square


def square(n):
    total = 0
    for i in range(n + 20):
        total += i
    return total


def main():  # depth 2
    announce("main:runs")  # -> announce
    start("runs", runs)  # -> start
    start("loops", loops)  # -> start
    say("ready", len(STARTED) + 1)  # -> say


if __name__ == "__main__":
    main()  # -> main
    while True:
        runs()  # -> runs
