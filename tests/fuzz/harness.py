"""What all fuzzed parsers share: how a case is run within bounds, and how inputs are made where atheris is not used.

A parser is a module of ``tests/fuzz/parsers``. Its ``run(data)`` gives bytes to the code under test and raises
``AssertionError`` where an answer breaks a promise; anything but the exceptions of ``ALLOWED`` is a failure. So is a
case that takes longer than ``SECONDS`` of CPU, or more memory than the process may have.
"""

from __future__ import annotations

import importlib
import math
import os
import pkgutil
import random
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType

from argus.capture.process.mapped import File
from tests.fuzz import parsers

SECONDS = 2.0
"""CPU time of a case at most. Atheris' instrumentation makes Python several times slower."""
ROOM_BYTES = 1 << 30
"""Address space that a case may take beyond what the process has after its seeds were run."""
MOST_BYTES = 1 << 16
"""Of an input."""


class TooSlow(BaseException):
    """A case exceeded ``SECONDS``. No parser catches it by ``except Exception``."""


@dataclass
class Parser:
    """A module of ``tests/fuzz/parsers``.

    Attributes:
        name: Its name.
        about: First line of its docstring.
        run: Gives bytes to the code under test.
        seeds: Small inputs that it accepts, made by code.
        allowed: The exceptions that it may raise.
        tokens: Pieces of its language, for mutations.
        code: Modules whose coverage guides atheris.
        seconds: CPU time of a case at most.
    """

    name: str
    about: str
    run: Callable[[bytes], object]
    seeds: list[bytes]
    allowed: tuple[type[BaseException], ...]
    tokens: list[bytes]
    code: list[str]
    seconds: float


def names() -> list[str]:
    """All parsers."""
    return sorted(found.name for found in pkgutil.iter_modules(parsers.__path__) if not found.name.startswith("_"))


def load(name: str) -> Parser:
    """The parser of a name.

    Raises:
        ModuleNotFoundError: There is none.
    """
    return describe(name, importlib.import_module(f"tests.fuzz.parsers.{name}"))


def describe(name: str, module: ModuleType) -> Parser:
    """What is in a parser's module."""
    return Parser(
        name,
        (module.__doc__ or "").strip().splitlines()[0],
        module.run,
        [bytes(seed) for seed in module.seeds()],
        tuple(module.ALLOWED),
        list(getattr(module, "TOKENS", ())),
        list(module.CODE),
        getattr(module, "SECONDS", SECONDS),
    )


@dataclass
class Tally:
    """What a run found.

    Attributes:
        cases: Inputs that were run.
        refused: Of these, how many ended in an allowed exception.
        worst_s: CPU time of the slowest.
        worst: The slowest input.
        start_bytes, most_bytes: Resident memory after the seeds, and its highest since.
        failure: Why the run ended early; empty: it did not.
        failing: The input that made it fail.
    """

    cases: int = 0
    refused: int = 0
    worst_s: float = 0.0
    worst: bytes = b""
    start_bytes: int = 0
    most_bytes: int = 0
    failure: str = ""
    failing: bytes = b""
    kept: list[bytes] = field(default_factory=list)

    def look_at_memory(self) -> None:
        self.most_bytes = max(self.most_bytes, _status("VmHWM"))


class Failed(Exception):
    """A case failed; the tally says how."""


class Bounded:
    """Runs cases within bounds.

    Args:
        parser: What is run.
        limit_memory: Whether this process may be given less address space. Not in a process of others, such as pytest.
    """

    def __init__(self, parser: Parser, *, limit_memory: bool) -> None:
        self.parser = parser
        self.tally = Tally()
        signal.signal(signal.SIGPROF, _too_slow)
        for seed in parser.seeds:
            self.case(seed)
        self.tally.start_bytes = self.tally.most_bytes = _status("VmRSS")
        if limit_memory:
            room = _status("VmSize") + ROOM_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (room, room))

    def case(self, data: bytes) -> bool:
        """Runs one; returns whether it was accepted.

        Raises:
            Failed: It raised what it may not, or took too long.
        """
        tally = self.tally
        tally.cases += 1
        accepted = True
        began = time.process_time()
        # A process's CPU time: what waits for a busy machine's CPU is not slow.
        signal.setitimer(signal.ITIMER_PROF, self.parser.seconds)
        try:
            self.parser.run(data)
        except self.parser.allowed:
            accepted = False
            tally.refused += 1
        except TooSlow:
            self._fail(data, f"more than {self.parser.seconds} s of CPU")
        except BaseException as failure:
            if isinstance(failure, (KeyboardInterrupt, SystemExit)):
                raise
            self._fail(data, "".join(traceback.format_exception(failure)))
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        took = time.process_time() - began
        if took > tally.worst_s:
            tally.worst_s, tally.worst = took, data
        if took > self.parser.seconds:
            self._fail(data, f"{took:.1f} s of CPU")
        if tally.cases % 256 == 0:
            tally.look_at_memory()
        return accepted

    def _fail(self, data: bytes, why: str) -> None:
        self.tally.failure, self.tally.failing = why, data
        raise Failed(f"{self.parser.name}: {why}")


def _too_slow(number: int, frame: FrameType | None) -> None:
    raise TooSlow


def _status(word: str) -> int:
    """A size of this process in bytes, as /proc/self/status has it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{word}:"):
            return int(line.split()[1]) << 10
    return 0


def mutations(parser: Parser, seed: int) -> Iterator[bytes]:
    """Inputs without end, the same for the same seed: mixtures of the parser's seeds, with places changed."""
    rng = random.Random(seed)
    while True:
        data = bytearray(rng.choice(parser.seeds))
        if rng.random() < 0.1:
            other = rng.choice(parser.seeds)
            at = rng.randrange(len(data) + 1)
            data[at:] = other[rng.randrange(len(other) + 1) :]
        for _ in range(1 << rng.randrange(5)):
            _change(data, rng, parser.tokens)
        yield bytes(data[:MOST_BYTES])


_NUMBERS = [0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, (1 << 62), (1 << 63) - 1,
            1 << 63, (1 << 64) - 1, (1 << 64) - 8]  # fmt: skip
_DECIMALS = (b"0", b"-1", b"1e400", b"9" * 20, b"9" * 5000, b"0.5", b"nan", b"18446744073709551616", b"2147483648")


def _change(data: bytearray, rng: random.Random, tokens: Sequence[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    length = min(math.floor(rng.expovariate(1 / 8)) + 1, 256)
    kind = rng.randrange(9)
    if kind == 0 and data:
        data[at % len(data)] ^= 1 << rng.randrange(8)
    elif kind == 1 and data:
        data[at % len(data)] = rng.randrange(256)
    elif kind == 2:
        size = rng.choice((1, 2, 4, 8))
        number = rng.choice([*_NUMBERS, len(data), rng.randrange(1 << 16)]) & ((1 << 8 * size) - 1)
        if rng.random() < 0.7:
            at -= at % size
        data[at : at + size] = number.to_bytes(size, rng.choice(("little", "little", "big")))
    elif kind == 3:
        del data[at : at + length]
    elif kind == 4:
        data[at:at] = data[at : at + length] * rng.choice((1, 1, 2, 50))
    elif kind == 5:
        data[at:at] = rng.randbytes(length)
    elif kind == 6 and tokens:
        data[at:at] = rng.choice(tokens)
    elif kind == 7 and tokens:
        token = rng.choice(tokens)
        data[at : at + len(token)] = token
    else:
        end = at
        while end < len(data) and chr(data[end]).isdigit():
            end += 1
        data[at:end] = rng.choice(_DECIMALS) if end > at else data[:length]


def fuzz(name: str, cases: int, seed: int) -> Tally:
    """Runs a number of cases of a parser in this process, without a bound of memory.

    Raises:
        Failed: One failed.
    """
    parser = load(name)
    bounded = Bounded(parser, limit_memory=False)
    made = mutations(parser, seed)
    for _ in range(cases):
        bounded.case(next(made))
    bounded.tally.look_at_memory()
    return bounded.tally


def memory_file(data: bytes) -> File:
    """A file that holds these bytes, as one that a process has mapped."""
    fd = os.memfd_create("argus-fuzz", os.MFD_CLOEXEC)
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], done)
    return File(fd)


class Bytes:
    """Takes numbers and pieces from an input, from its beginning; zeros once it is used up."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, size: int) -> bytes:
        """So many bytes."""
        piece = self._data[self._at : self._at + size]
        self._at += size
        return piece.ljust(size, b"\0")

    def number(self, size: int = 1) -> int:
        """A number of so many bytes, little-endian."""
        return int.from_bytes(self.take(size), "little")

    def rest(self) -> bytes:
        """What is left."""
        piece, self._at = self._data[self._at :], len(self._data)
        return piece

    def pieces(self, count: int) -> list[bytes]:
        """What is left, as so many pieces, each behind its length (two bytes); the last one takes the rest."""
        found = []
        for _ in range(count - 1):
            size = self.number(2)
            found.append(self._data[self._at : self._at + size])
            self._at += size
        return [*found, self.rest()]


def joined(*pieces: bytes) -> bytes:
    """What ``Bytes.pieces`` takes apart."""
    return b"".join(len(piece).to_bytes(2, "little") + piece for piece in pieces[:-1]) + pieces[-1]


def is_text(text: str, most: int) -> None:
    """Asserts that a text is one that any table takes, and of bounded length."""
    text.encode()  # a lone surrogate is none
    assert len(text) <= most, f"{len(text)} characters"
