"""What is probed of a file, by subject, and what each probe costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, TypeVar

from argus.capture.process.targets import Library
from argus.model import calls
from argus.model.losses import UNKNOWN, Owner

RETRY_S, LONGEST_RETRY_S = 60.0, 3600.0
"""Probes that the kernel refused, or that did not come, are tried again so much later: twice as long each time."""
SOON_S = 1.0
"""The first time it is tried again so soon."""
Subject = Literal["ranges", "backward", "nvtx", "math", "launches", "copies", "waits", "collectives"]
"""What may be probed or not while the rest is: PyTorch's ranges, the begin of its backward passes, NVTX's ranges, math
(cuBLAS and attention), launches of kernels and graphs, copies and allocations, waits for the GPU, collectives. What is
in none (code that is loaded, communicators, names) is rare, and stays."""
SUBJECT_OF: dict[str, Subject] = {
    **dict.fromkeys(("range_begin", "range_end", "wait", "work_begin", "work_end"), "ranges"),
    "backward_begin": "backward",
    "backward": "backward",
    **dict.fromkeys(("nvtx_push", "nvtx_pop", "nvtx_start", "nvtx_end", "nvtx_mark"), "nvtx"),
    "gemm": "math",
    "attention": "math",
    "kernel": "launches",
    "graph": "launches",
    **dict.fromkeys(("memcpy", "memcpy_h2d", "memcpy_d2h", "memcpy_d2d", "memset", "alloc", "free"), "copies"),
    "sync": "waits",
}
"""By kind of call. Collectives, of NCCL and of gloo, are the rest of the programs "nccl" and "torch"."""


def subject_of(call: calls.Call) -> Subject | None:
    """What a function's probe belongs to; None: to what is always probed."""
    if call.program in ("nccl", "torch"):
        return "collectives"
    return SUBJECT_OF.get(call.kind)


@dataclass(eq=False)
class Attachment:
    """Probes on one file, for one process or for all that map it.

    Attributes:
        library: The file.
        pid: The process, or None for every process that maps the file (hits of others are filtered in the kernel).
        entry_links, exit_links: Descriptors that hold the probes; closing them takes the probes away.
        optional_links: The same of those that may be put on and taken away while the others stay, by their subject:
            of entries and of exits.
        entries_only: Of those, subjects whose exits were left out.
        optional_points: Where those are or would be: by subject, the programs with file offsets and cookies.
        prices: What a call costs its thread, ns, by the call's number: the traps into the kernel at its entry and exit.
            The programs' run time is not part of it.
        exit_prices: What of it the trampoline at the exit costs, for calls whose exits are probed.
        entry_points: Where to probe a call's entry alone, and the cookie, by the call's number: may be a cheaper place
            than with its exit.
        entry_prices: What a call costs then.
        places: File offsets of entries that are probed throughout.
        owner: User and container of a process that mapped the file first, or of another one since its own do not any
            more.
        owners: Those of all processes that map it now; empty: it is not known yet, or nobody does.
        users: Users who map it. They share an account of the time and turns that their files take (``Patience``,
            ``LateProbes``, ``Closing``), apart from those of other files of each.
        answers: Whether the last probes on the file came in time. While they have not, others are not waited for:
            ``LateProbes`` puts them on.
        unanswered: How often they did not, or were not waited for.
        unused: Whether no traced process maps it any more.
        late_in_row: How often they did not since it had all its probes.
        left_out: Whether it was left out for probes that are not gone, which is not counted yet.
        slow_to_go: Whether it lacks probes only since others there were slow to go: it has answered so far.
        late: Whether those that did not come in time have come since, or will not.
        again_at: When it is tried again, ``time.monotonic()``.
        wait_s: How long after that if it does not answer then.
        slot: Where maps hold what is known of the file; the last one, which others may have, too: it has none.
        has_slot: Whether maps hold what is known of the file (``Placement``), until its probes are gone.
        lacks_slot: They had no room for it: its probes may cost more.
        lacks_code: Its instructions could not be read: its probes stand on the functions' entries, whatever they cost.
        links_kept: Descriptors that are kept for its links (``link_room.LinkRoom``).
        let_go: Whether its links are being closed, all of them.
        functions: Symbols with a probe at their entry, those included that may have one.
        exits: Symbols with one at their exit too.
    """

    library: Library
    pid: int | None
    entry_links: list[int] = field(default_factory=list)
    exit_links: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    exits: list[str] = field(default_factory=list)
    optional_links: dict[Subject, tuple[list[int], list[int]]] = field(default_factory=dict)
    entries_only: set[Subject] = field(default_factory=set)
    optional_points: dict[Subject, dict[str, list[tuple[int, int]]]] = field(default_factory=dict)
    prices: dict[int, int] = field(default_factory=dict)
    exit_prices: dict[int, int] = field(default_factory=dict)
    entry_points: dict[int, tuple[int, int]] = field(default_factory=dict)
    entry_prices: dict[int, int] = field(default_factory=dict)
    owner: Owner = UNKNOWN
    owners: frozenset[Owner] = frozenset()
    users: frozenset[int] = field(init=False)
    answers: bool = True
    unanswered: int = 0
    unused: bool = False
    late_in_row: int = 0
    left_out: bool = False
    slow_to_go: bool = False
    late: Callable[[float], bool] = lambda _: True
    again_at: float = 0.0
    wait_s: float = RETRY_S
    slot: int = calls.FILE_SLOTS - 1
    has_slot: bool = False
    lacks_slot: bool = False
    lacks_code: bool = False
    links_kept: int = 0
    let_go: bool = False

    def __post_init__(self) -> None:
        self.mapped_by(self.owners)

    def mapped_by(self, owners: frozenset[Owner]) -> None:
        """Takes who maps it now; nobody: it counts as its last owner's."""
        self.owners = the_same(owners)
        self.users = the_same(frozenset(user for user, _ in owners) or frozenset([self.owner[0]]))

    def entries_of(self, subject: Subject) -> dict[str, list[tuple[int, int]]]:
        """A subject's functions without their exits: programs with file offsets and cookies."""
        return {
            name: [self.entry_points[cookie & 0xFF] for _, cookie in places]
            for name, places in self.optional_points.get(subject, {}).items()
            if name.endswith("_enter")
        }

    def did_not_answer(self, late: Callable[[float], bool]) -> None:
        """Probes on it have not come in time. ``late``: as the attribute."""
        self.answers, self.late, self.slow_to_go = False, late, False
        self.unanswered += 1
        self.late_in_row += 1
        self.put_off()
        if self.late_in_row == 1:  # it may just be slow
            self.again_at = time.monotonic() + SOON_S

    def note_late(self, late: Callable[[float], bool]) -> int:
        """The same, of probes of some time ago: it may have been late since. Returns that this is one more time."""
        if self.answers:
            self.did_not_answer(late)
        else:
            self.left_out_until(late)
            self.unanswered += 1
        return 1

    def left_out_until(self, gone: Callable[[float], bool]) -> None:
        """Nothing is put on it before probes are gone that stand there: calls would be seen twice. ``gone``: as
        ``late``."""
        before = self.late
        self.late = gone if before(0) else lambda seconds: before(seconds) and gone(seconds)
        if self.answers:
            self.answers, self.again_at, self.left_out, self.slow_to_go = False, 0.0, True, True

    def count_left_out(self) -> int:
        """1: it was left out for probes that are not gone, which is counted from now on."""
        counts, self.left_out = int(self.left_out), False
        self.unanswered += counts
        return counts

    def skip(self) -> int:
        """Its probes were not waited for, since others' were: they are put on beside the loop, as soon as may be, or
        later if it was late since. Returns that this is one more time."""
        if self.answers:
            self.answers, self.again_at = False, time.monotonic()
        self.unanswered += 1
        return 1

    def put(self, subject: Subject, links: tuple[list[int], list[int]], entries_only: AbstractSet[Subject]) -> None:
        """It has a subject's probes now. ``entries_only``: subjects whose exits were to be left out."""
        self.optional_links[subject] = links
        self.entries_only = (self.entries_only - {subject}) | (entries_only & {subject})

    def answered(self) -> None:
        """It has all its probes."""
        self.answers, self.wait_s, self.late_in_row = True, RETRY_S, 0
        self.left_out = self.slow_to_go = False

    def put_off(self) -> None:
        """It is tried again later, and each time after twice as long."""
        self.again_at, self.wait_s = time.monotonic() + self.wait_s, min(2 * self.wait_s, LONGEST_RETRY_S)

    @property
    def shared_by(self) -> frozenset[Owner]:
        """Those who map it, or its owner."""
        return self.owners or frozenset([self.owner])

    @property
    def probes(self) -> int:
        return len(self.functions) + len(self.exits)

    def seen(self, subject: Subject) -> bool | None:
        """Whether a subject's functions are probed now; None: the file has none."""
        if not self.optional_points.get(subject):
            return None
        return any(self.optional_links.get(subject, ()))


_Those = TypeVar("_Those", frozenset[int], frozenset[Owner])


@lru_cache(512)
def the_same(those: _Those) -> _Those:
    """One object for equal sets, which may be large: they are compared by their identity."""
    return those
