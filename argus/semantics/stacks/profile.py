"""Weighted stacks, which are exported and compared, and the ranks and threads that they are from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from argus.model.stacks import Frame
from argus.semantics.stacks.stack import label

KERNEL = Frame("kernel", "[kernel]")
COLLECTING = Frame("marker", "(collecting garbage)")
NO_STACK = Frame("marker", "(no stack was taken)")
QUEUED = Frame("marker", "(waiting for a CPU)")


@dataclass(frozen=True)
class Sample:
    """One stack of one thread, or of several together.

    Attributes:
        frames: Root first.
        ns: Time.
        count: Samples, or times off the CPU.
        kind: cpu or off.
        rank: -1: of several ranks.
        thread: Its name; empty: not known, or of several threads.
        tid: 0: of several threads.
    """

    frames: tuple[Frame, ...]
    ns: int
    count: int
    kind: str = "cpu"
    rank: int = -1
    thread: str = ""
    tid: int = 0


@dataclass(frozen=True)
class Profile:
    """What is exported.

    Attributes:
        samples: Stacks with weights.
        title: The job.
        subtitle: What was chosen of it: ranks, threads, steps, time.
        begin_ns: Wall time of the first sample.
        end_ns: Of the last.
        period_ns: The time that one sample of a running thread stands for; 0: not known.
        rank_steps: Steps in it, each rank's counted; 0: none are known.
        rank_ns: Its length, each rank's counted.
    """

    samples: list[Sample] = field(default_factory=list)
    title: str = ""
    subtitle: str = ""
    begin_ns: int = 0
    end_ns: int = 0
    period_ns: int = 0
    rank_steps: int = 0
    rank_ns: int = 0

    @property
    def total_ns(self) -> int:
        """The time of all samples."""
        return sum(sample.ns for sample in self.samples)


def annotated(frames: tuple[Frame, ...], *, kind: str, reason: str, gc: bool, in_kernel: bool) -> tuple[Frame, ...]:
    """A stack with the other properties of its samples: collecting garbage, in the kernel, waiting for what."""
    out = list(frames) or [NO_STACK]
    if gc:
        last = max((n for n, frame in enumerate(out) if frame.kind == "python"), default=len(out) - 1)
        out.insert(last + 1, COLLECTING)
    if kind == "off":
        out.append(QUEUED if reason == "runqueue" else Frame("marker", f"(waiting: {reason or '?'})"))
    elif in_kernel:
        out.append(KERNEL)
    return tuple(out)


def without_lines(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """The same functions, whatever the line."""
    return tuple(replace(frame, line=0) if frame.line else frame for frame in frames)


def frame_text(frame: Frame) -> str:
    """A frame as one line of text; with its line where it has one."""
    return label(frame, lines=True)


Key = tuple[Frame, ...]


def folded(samples: Iterable[Sample]) -> dict[Key, int]:
    """Time by stack, ns."""
    out: dict[Key, int] = {}
    for sample in samples:
        out[sample.frames] = out.get(sample.frames, 0) + sample.ns
    return out


@dataclass(frozen=True)
class Difference:
    """Two profiles on one scale.

    Attributes:
        before: Time by stack of what is compared with.
        after: Time by stack of what is shown.
        unit: What the numbers are: ns per step and rank, ns per second and rank, or parts of a billion.
    """

    before: dict[Key, float]
    after: dict[Key, float]
    unit: str


UNITS = {
    "step": "per step and rank",
    "second": "per second and rank",
    "total": "of all time, as if it were 1 s",
}


def difference(before: Profile, after: Profile, per: str | None = None) -> Difference:
    """Brings two profiles of different length, ranks and steps onto one scale.

    Args:
        before: What is compared with.
        after: What is shown.
        per: step, second or total; None: by step where both have steps, else by second.
    """
    if per is None:
        per = "step" if before.rank_steps and after.rank_steps else "second"
    scaled = []
    for profile in (before, after):
        sizes = {"step": profile.rank_steps, "second": profile.rank_ns / 1e9, "total": profile.total_ns / 1e9}
        size = sizes[per] or 1
        scaled.append({frames: ns / size for frames, ns in folded(profile.samples).items()})
    return Difference(scaled[0], scaled[1], UNITS[per])


@dataclass(frozen=True)
class Change:
    """What became of one frame. ``self``: at the end of the stack, notes aside; ``total``: anywhere in it."""

    frame: Frame
    self_before: float
    self_after: float
    total_before: float
    total_after: float

    @property
    def gained(self) -> float:
        """Difference of the time in the frame itself."""
        return self.self_after - self.self_before


def changes(two: Difference, *, python: bool = False) -> list[Change]:
    """Every frame's change, the largest gain first.

    Args:
        two: What is compared.
        python: Time counts for the deepest Python frame of a stack, where it has any: what somebody can change.
            Without, for the last frame.
    """
    sums: dict[Frame, list[float]] = {}
    for column, stacks in enumerate((two.before, two.after)):
        for frames, ns in stacks.items():
            own = next((frame for frame in reversed(frames) if python and frame.kind == "python"), None)
            own = own or next(
                (frame for frame in reversed(frames) if frame.kind not in ("marker", "kernel")), frames[-1]
            )
            sums.setdefault(own, [0.0] * 4)[column] += ns
            for frame in set(frames):
                sums.setdefault(frame, [0.0] * 4)[2 + column] += ns
    all_changes = [Change(frame, *values) for frame, values in sums.items()]
    return sorted(all_changes, key=lambda change: (-change.gained, frame_text(change.frame)))
