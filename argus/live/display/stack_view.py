"""What the live view shows of stacks: the hottest lines on the CPU, what main threads wait for, and whole stacks."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from argus.model.stacks import Frame, Stack
from argus.model.text import printable
from argus.model.units import rank_text

LINES = 12
"""Hottest lines kept, on the CPU and off it."""
QUEUED = "runqueue"
"""Reason of a thread that could have run (:func:`argus.capture.offcpu.reason`)."""
STACKS = 6
"""Hottest whole stacks kept."""


@dataclass(frozen=True)
class HotLine:
    """A line of Python, or a function without one, as the live view shows it.

    Attributes:
        text: Function, file and line.
        share: On the CPU: part of the CPU time of all ranks in the last seconds, 0 to 1. Off the CPU: part of the time
            of the main threads that were there.
        ranks: How many ranks were seen there.
        who: Which ranks: ``0-3,7``.
        reason: Off the CPU: why, as :func:`argus.capture.offcpu.reason` has it; empty: on the CPU.
    """

    text: str
    share: float
    ranks: int
    who: str = ""
    reason: str = ""


@dataclass(frozen=True)
class HotStack:
    """A whole stack, root first, with the line that :class:`HotLine` would show for it."""

    line: HotLine
    frames: Sequence[str]


@dataclass(frozen=True)
class StackView:
    """The stack side for the live view.

    Attributes:
        lines, off_lines: The hottest first: of all threads on the CPU, of main threads off the CPU.
        waits: (reason, seconds a second).
        stacks: The hottest of main threads, on the CPU and off it.
        main: PID → shares of its main thread's last seconds: on the CPU, waiting off it, and queued for a CPU; the
            latter two for longer than the threshold each time.
    """

    state: str
    samples: int
    lines: list[HotLine]
    waits: list[tuple[str, float]]
    off_lines: list[HotLine] = field(default_factory=list)
    stacks: list[HotStack] = field(default_factory=list)
    main: Mapping[int, tuple[float, float, float]] = field(default_factory=dict)


NO_STACKS = StackView("off", 0, [], [])


@dataclass
class Recent:
    """What became rows at one time.

    Attributes:
        since, until: When it was counted, as ``time.monotonic`` has it.
        counts: ``records.STACK_COUNT``, shape (n,).
        ranks: Rank of each.
        ids: ``Stack.id`` of each; 0: none.
        reasons: Why the thread was off the CPU.
    """

    since: float
    until: float
    counts: NDArray[np.void]
    ranks: NDArray[np.uint32]
    ids: NDArray[np.uint64]
    reasons: list[str]


class _Sum:
    def __init__(self) -> None:
        self.ns = 0
        self.ranks: set[int] = set()
        self.stacks: Tally[int] = Tally()

    def add(self, rank: int, stack: int, ns: int) -> None:
        self.ns += ns
        self.ranks.add(rank)
        self.stacks[stack] += ns

    def line(self, text: str, whole: float, reason: str = "") -> HotLine:
        return HotLine(text, self.ns / max(whole, 1), len(self.ranks), rank_text(self.ranks), reason)


def summarize(
    state: str,
    samples: int,
    recent: Sequence[Recent],
    stack_of: Callable[[int], Stack | None],
    line_of: Callable[[int], str],
) -> StackView:
    """The last seconds.

    Args:
        state, samples: As they are.
        recent: What became rows in these seconds.
        stack_of: ``Stack.id`` → the stack; None: not known any more.
        line_of: ``Stack.id`` → its line; empty: not known.
    """
    on: dict[str, _Sum] = {}
    off: dict[tuple[str, str], _Sum] = {}
    waits: Tally[str] = Tally()
    main: dict[int, list[int]] = {}
    for one in recent:
        columns = one.ids, one.ranks, one.counts["ns"], one.counts["pid"], one.counts["tid"]
        rows = zip(*(column.tolist() for column in columns), one.reasons, strict=True)
        for stack, rank, ns, pid, tid, reason in rows:
            if tid == pid:
                main.setdefault(pid, [0, 0, 0])[bool(reason) + (reason == QUEUED)] += ns
            if reason:
                waits[reason] += ns
                if tid != pid:
                    continue
            if not (text := line_of(stack)):
                continue
            sums = off.setdefault((text, reason), _Sum()) if reason else on.setdefault(text, _Sum())
            sums.add(rank, stack, ns)
    span_ns = 1e9 * max(recent[-1].until - recent[0].since, 0.25) if recent else 1e9
    total = sum(each.ns for each in on.values())
    lines = sorted(on.items(), key=lambda item: -item[1].ns)
    # Of two lines off the CPU the one that fewer ranks are at is the odd one: shares are of the ranks that were there.
    off_lines = sorted(off.items(), key=lambda item: -item[1].ns / max(len(item[1].ranks), 1))
    hot = [(each.line(text, total), each) for text, each in lines]
    cold = [(each.line(text, span_ns * len(each.ranks), reason), each) for (text, reason), each in off_lines]
    return StackView(
        state,
        samples,
        [line for line, _ in hot[:LINES]],
        [(reason, ns / span_ns) for reason, ns in waits.most_common(5)],
        [line for line, _ in cold[:LINES]],
        [
            HotStack(line, [describe(frame) for frame in stack.frames])
            for line, each in [*hot[: STACKS // 2], *cold[: STACKS // 2]]
            if (stack := stack_of(each.stacks.most_common(1)[0][0])) is not None
        ],
        {pid: (on_ns / span_ns, off_ns / span_ns, queued / span_ns) for pid, (on_ns, off_ns, queued) in main.items()},
    )


def hot_line(stack: Stack) -> str:
    """The deepest Python line of a stack, or its native leaf."""
    for frame in reversed(stack.frames):
        if frame.kind == "python":
            return describe(frame)
    return describe(stack.frames[-1]) if stack.frames else ""


def describe(frame: Frame) -> str:
    """A frame for people: text of others, made fit to be printed."""
    name, file = printable(frame.function.strip()) or "?", printable(Path(frame.file).name)
    if frame.kind == "python":
        return f"{name} ({file}:{frame.line})" if frame.line else name
    return f"{name} ({file})" if file else name
