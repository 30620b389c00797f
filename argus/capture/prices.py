"""What a hit of a probe costs the traced thread on this machine, measured before anything is attached.

The trap into the kernel is most of a hit's price, and what follows it depends on the instruction under the probe, the
kernel, the CPU and the hypervisor. Instructions that the kernel emulates (``push``, ``nop``, near jumps and calls;
which others depends on its version) are left behind at once. All others are single-stepped out of line: a second trap,
two to ten times the price. So Argus probes small functions of its own, one for each kind of instruction, calls them,
and keeps the result on disk until the machine is booted again. Beside other load a trap takes up to a third longer, so
the first ``MEASUREMENTS`` starts measure, and the least of their values is used: one of them may be at rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import mmap
import os
import platform
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from argus.system import disk_cache

FORMAT = 2
MEASURABLE = platform.machine() in ("x86_64", "AMD64")
"""Elsewhere the functions are not written; ``FALLBACK`` holds there."""

STEPPED = "stepped"
"""Kind of all that are not named in ``INSTRUCTIONS``: the kernel single-steps them, or so it is assumed."""
INSTRUCTIONS: Final[dict[str, bytes]] = {
    "push": b"\x55\x5d\xc3",
    "nop": b"\x90\xc3",
    "nop5": b"\x0f\x1f\x44\x00\x00\xc3",
    "long nop": b"\x0f\x1f\x40\x00\xc3",
    "endbr64": b"\xf3\x0f\x1e\xfa\xc3",
    "sub rsp": b"\x48\x83\xec\x08\x48\x83\xc4\x08\xc3",
    "mov": b"\x48\x89\xf8\xc3",
    "jmp": b"\xeb\x00\xc3",
    "jcc": b"\x74\x00\xc3",
    "call": b"\xe8\x01\x00\x00\x00\xc3\xc3",
    STEPPED: b"\x31\xc0\xc3",
}
"""Kinds of instructions, each with a function that begins with one."""
_CALLER: Final = bytes.fromhex("53 55 4883ec08 4889fb 4889f5 ffd3 48ffcd 75f9 4883c408 5d 5b c3")
"""``void caller(void (*function)(), long times)``: calls it so often."""
_ROOM = 64
"""Bytes for each function."""
_BATCH, _ROUNDS = 24, 10
"""Calls that are timed together, and how often. The fastest round counts: nothing else ran meanwhile."""
MEASUREMENTS = 5
"""So many starts measure."""
KEPT = 8
"""Files that are kept: a machine boots other kernels now and then."""


@dataclass(frozen=True)
class Prices:
    """Nanoseconds that a hit costs, the program's run excepted.

    Attributes:
        entry: By kind of the instruction under the probe.
        exit: Of a return, besides the entry's: the kernel's trampoline.
        measured: On this machine; else these are ``FALLBACK``.
    """

    entry: Mapping[str, int]
    exit: int
    measured: bool = True

    def least(self, other: Prices) -> Prices:
        """The lower price of each kind, of two measurements on one machine."""
        entry = {kind: min(ns, other.entry[kind]) for kind, ns in self.entry.items()}
        both = min(each.exit + each.entry["push"] for each in (self, other))  # as it was measured
        return Prices(entry, max(both - entry["push"], 0))

    def of(self, code: bytes) -> int:
        """Price of an entry probe on the instruction that these bytes begin with."""
        return self.entry.get(kind_of(code), self.entry[STEPPED])

    @property
    def cheap(self) -> int:
        """What a probe on an emulated instruction costs at most: far from a single step."""
        return (self.entry["push"] + self.entry[STEPPED]) // 2


EMULATED: Final = frozenset({"push", "nop", "jmp", "jcc", "call"})
"""By every kernel since 5.15."""
FEW_KINDS: Final = ("push", STEPPED)
"""What is measured where a link has one probe: taking one away takes 0.1 s, and kernels that emulate more than
``EMULATED`` have better links."""

_EMULATED_NS, _STEPPED_NS, _EXIT_NS = 1_300, 9_000, 1_800
FALLBACK: Final = Prices(
    {kind: _EMULATED_NS if kind in EMULATED else _STEPPED_NS for kind in INSTRUCTIONS},
    _EXIT_NS,
    measured=False,
)
"""A virtual machine's (AMD EPYC, Linux 6.18): where nothing can be measured it is better to expect too much."""


def kind_of(code: bytes) -> str:
    """Which of ``INSTRUCTIONS`` the instruction is that these bytes begin with.

    On x86-64 the kernel emulates what arch/x86/kernel/uprobes.c has in ``branch_xol_ops`` and ``push_xol_ops``; newer
    kernels more. Elsewhere every instruction is ``push``: nothing was measured there.
    """
    if not MEASURABLE:
        return "push"
    if not code:
        return STEPPED
    first = code[0]
    push = code[1] if first in (0x41, 0x48) and len(code) > 1 else first
    if 0x50 <= push <= 0x57:
        return "push"
    for start, kind in _STARTS:
        if code.startswith(start):
            return kind
    if first & 0xF0 == 0x70 or (first == 0x0F and len(code) > 1 and code[1] & 0xF0 == 0x80):
        return "jcc"
    if first in (0x48, 0x49, 0x4C, 0x4D) and len(code) > 2 and code[1] in (0x89, 0x8B) and code[2] >= 0xC0:
        return "mov"
    return STEPPED


_STARTS: Final = (
    (b"\x90", "nop"),
    (b"\xe8", "call"),
    (b"\xe9", "jmp"),
    (b"\xeb", "jmp"),
    (b"\x0f\x1f\x44\x00\x00", "nop5"),
    (b"\x0f\x1f", "long nop"),
    (b"\xf3\x0f\x1e\xfa", "endbr64"),
    (b"\x48\x83\xec", "sub rsp"),
    (b"\x48\x81\xec", "sub rsp"),
)

Attach = Callable[[str, list[int], bool], AbstractContextManager[None]]
"""Probes the functions at these offsets of a file, in this process alone, for as long as the context lasts: entries, or
(True) exits."""


def prices(backend: str, attach: Attach) -> Prices:
    """This machine's prices: from disk if they were measured often enough since it was booted, else measured now (some
    30 ms).

    Args:
        backend: How probes are attached, "multi" or "perf": part of the name under which prices are kept.
        attach: Attaches a program that does as good as nothing.
    """
    if not MEASURABLE:
        return FALLBACK
    where = disk_cache.folder("prices")
    name = f"{_machine(backend)}.json"
    stored, times = (None, 0) if where is None else _read(where / name)
    if stored is not None and times >= MEASUREMENTS:
        return stored
    try:
        measured = measure(attach, tuple(INSTRUCTIONS) if backend == "multi" else FEW_KINDS)
    except (OSError, ValueError):
        return stored or FALLBACK
    if stored is not None:
        measured = measured.least(stored)
    if where is not None:
        body = json.dumps({"entry": dict(measured.entry), "exit": measured.exit, "times": times + 1}).encode()
        disk_cache.keep(where / name, body, KEPT)
    return measured


def measure(attach: Attach, kinds: Collection[str] = tuple(INSTRUCTIONS)) -> Prices:
    """Probes functions of this process's own, and calls them.

    Args:
        attach: Attaches a program that does as good as nothing; its run (some 40 ns) is part of the price.
        kinds: Which to measure: "push" and ``STEPPED``, and of the rest what is not to be taken for one of them.

    Raises:
        OSError: They cannot be mapped or probed.
        ValueError: The times make no sense.
    """
    code = _CALLER.ljust(_ROOM, b"\xcc")
    places: dict[str, int] = {}
    for kind in (*kinds, "exit"):
        places[kind] = len(code)
        code += INSTRUCTIONS["push" if kind == "exit" else kind].ljust(_ROOM, b"\xcc")
    # In memory: /tmp may be mounted so that nothing in it runs.
    with open(os.memfd_create("argus-prices", os.MFD_CLOEXEC), "r+b") as file:
        file.write(code.ljust(mmap.PAGESIZE, b"\xcc"))
        file.flush()
        path = f"/proc/self/fd/{file.fileno()}"
        # Not writable: the kernel puts no probes where code may be written.
        memory = mmap.mmap(file.fileno(), mmap.PAGESIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
        base = np.frombuffer(memory, np.uint8).ctypes.data
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_long)(base)
        plain = {kind: _fastest(call, base + place) for kind, place in places.items()}
        with attach(path, [places["exit"]], True), attach(path, list(places.values()), False):
            probed = {kind: _fastest(call, base + place) for kind, place in places.items()}
        memory.close()
    more = {kind: max(round(probed[kind] - plain[kind]), 0) for kind in places}
    exit_ns = max(more.pop("exit") - more["push"], 0)
    if not 50 <= more["push"] <= 10**6 or more[STEPPED] < more["push"] // 2:
        raise ValueError(f"these are no prices of probes: {more}")
    others = {kind: more["push" if kind in EMULATED else STEPPED] for kind in INSTRUCTIONS}
    return Prices(others | more, exit_ns)


def _fastest(call: Callable[[int, int], None], function: int) -> float:
    """Nanoseconds of one call."""
    call(function, 2)
    best = float("inf")
    for _ in range(_ROUNDS):
        begin = time.perf_counter_ns()
        call(function, _BATCH)
        best = min(best, (time.perf_counter_ns() - begin) / _BATCH)
    return best


# --- kept on disk: prices decide what is probed, not what the kernel runs, so a wrong file does no harm but that


def _machine(backend: str) -> str:
    """A name for this machine since it was booted: another kernel or hypervisor may be under it next time."""
    words = [str(FORMAT), backend, *os.uname()]
    with contextlib.suppress(OSError):
        words.append(Path("/proc/sys/kernel/random/boot_id").read_text())
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
        words += [line for line in lines if line.startswith(("model name", "stepping", "microcode"))]
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:32]


def _read(path: Path) -> tuple[Prices | None, int]:
    """Prices, and how often they were measured."""
    body = disk_cache.read(path)
    if body is None:
        return None, 0
    try:
        fields = json.loads(body)
        stored = Prices({kind: int(fields["entry"][kind]) for kind in INSTRUCTIONS}, int(fields["exit"]))
        return stored, int(fields["times"])
    except (ValueError, KeyError, TypeError):
        return None, 0
