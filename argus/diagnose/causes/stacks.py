"""Where the threads of some ranks are, or spend their time, that the others' do not: the part of a finding that names
functions and lines."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from argus.model.errors import ArgusError
from argus.model.stacks import Frame
from argus.model.units import rank_text
from argus.semantics.stacks.profile import QUEUED
from argus.semantics.stacks.stack import label
from argus.store.open import Store
from argus.store.read.stacks import Selection, Thread, read_profile, read_threads

CALLERS = 2
"""Callers that are reported with a place."""
ROLES = 3
"""Kinds of threads that a finding reports, at most."""


@dataclass(frozen=True)
class Place:
    """Where threads of some ranks are while those of others are elsewhere.

    Attributes:
        role: Which threads: ``main``, ``main of helpers``, or a name.
        ranks: Whose.
        frames: Their stack, root first; those of one of them where they differ.
        odd: The frame in which they part from the others' threads, index of ``frames``; -1: they have no frames.
        reason: What they wait for; empty: they run.
        peers: The other ranks whose threads of this role are compared with.
        peers_frames: Where most of those are, root first; empty: no such threads.
        peers_odd: Where they part from these, index of ``peers_frames``; -1: none.
        peers_reason: What they wait for.
        differs: Whether it is another place at all.
    """

    role: str
    ranks: tuple[int, ...]
    frames: tuple[Frame, ...]
    odd: int
    reason: str
    peers: tuple[int, ...]
    peers_frames: tuple[Frame, ...]
    peers_odd: int
    peers_reason: str
    differs: bool

    @property
    def text(self) -> str:
        """In words."""
        whose = f"rank{'s' * (len(self.ranks) > 1)} {rank_text(self.ranks)}"
        plural = len(self.ranks) > 1
        what = {"main": "the main thread", "main of helpers": "the main thread of a helper"}.get(
            self.role, f"thread {self.role}"
        )
        text = f"{what}{'s' * plural} of {whose} {_doing(self.reason, plural)} {_where(self.frames, self.odd)}"
        if self.peers:
            them = f"rank{'s' * (len(self.peers) > 1)} {rank_text(self.peers)}"
            where = _where(self.peers_frames, self.peers_odd)
            text += f"; of {them} most" if len(self.peers) > 1 else f"; of {them} it"
            text += f" {_doing(self.peers_reason, len(self.peers) > 1)} {where}"
        return text


def _doing(reason: str, plural: bool) -> str:
    if not reason:
        return "run in" if plural else "runs in"
    return ("wait" if plural else "waits") + f" ({reason}) in"


def _where(frames: Sequence[Frame], odd: int) -> str:
    if odd < 0:
        return "an unknown place (no stack was taken)"
    text = label(frames[odd], lines=True)
    callers = [label(frame, lines=True) for frame in frames[:odd][::-1] if frame.kind == "python"][:CALLERS]
    if callers:
        text += f", called by {', by '.join(callers)}"
    return text


def _key(frame: Frame) -> tuple[str, str, str]:
    return frame.kind, frame.function, frame.file


def parting(frames: Sequence[Frame], others: Sequence[Frame]) -> int:
    """The frame in which a stack parts from another one.

    That is the first Python frame from the root whose function the other stack does not have there; where they have the
    same functions, the deepest Python frame, of those with another line if there are any; without Python, the first
    frame that differs.

    Args:
        frames, others: Root first.

    Returns:
        Index in ``frames``; -1: it is empty.
    """
    same = 0
    while same < min(len(frames), len(others)) and _key(frames[same]) == _key(others[same]):
        same += 1
    python = [place for place, frame in enumerate(frames) if frame.kind == "python"]
    apart = [place for place in python if place >= same]
    moved = [place for place in python if place < same and frames[place].line != others[place].line]
    if apart:
        return apart[0]
    if moved or python:
        return (moved or python)[-1]
    return min(same, len(frames) - 1)


def compare(threads: Iterable[Thread], ranks: Sequence[int]) -> list[Place]:
    """Where threads of some ranks are, against those of the others.

    Args:
        threads: Of these ranks and of others.
        ranks: Those in question.

    Returns:
        A place a role of threads: first those that differ, main threads before others.
    """
    by_role: dict[str, tuple[list[Thread], list[Thread]]] = defaultdict(lambda: ([], []))
    wanted = set(ranks)
    for thread in threads:
        by_role[thread.role][thread.rank not in wanted].append(thread)
    places_of_roles = []
    for role, (of_ranks, others) in by_role.items():
        if not of_ranks:
            continue
        usual = _usual(others)
        typical = _usual(of_ranks)
        # Threads of a pool do what they like: one that is where any of the others' is, is not elsewhere.
        places = {tuple(map(_key, thread.stack.frames)) for thread in others}
        elsewhere = [thread for thread in of_ranks if tuple(map(_key, thread.stack.frames)) not in places]
        shown = _usual(elsewhere) if elsewhere and others else typical
        assert shown is not None
        frames, theirs = shown.stack.frames, usual.stack.frames if usual is not None else ()
        # Without others to part from, it is where the thread itself is.
        odd, peers_odd = parting(frames, theirs if others else frames), parting(theirs, frames)
        lines = {tuple((*_key(f), f.line) for f in thread.stack.frames if f.kind == "python") for thread in others}
        other_lines = tuple((*_key(f), f.line) for f in frames if f.kind == "python") not in lines
        places_of_roles.append(
            Place(
                role,
                tuple(sorted({thread.rank for thread in (elsewhere if elsewhere and others else of_ranks)})),
                frames,
                odd,
                shown.reason,
                tuple(sorted({thread.rank for thread in others})),
                theirs,
                peers_odd,
                usual.reason if usual is not None else "",
                bool(others) and bool(frames) and (bool(elsewhere) or other_lines),
            )
        )
    return sorted(places_of_roles, key=lambda place: (not place.differs, place.role != "main", place.role))


def _usual(threads: Sequence[Thread]) -> Thread | None:
    """One of those that are where most are."""
    known = [thread for thread in threads if thread.stack.frames] or list(threads)
    if not known:
        return None
    counts = Counter(tuple(map(_key, thread.stack.frames)) for thread in known)
    most = counts.most_common(1)[0][0]
    return next(thread for thread in known if tuple(map(_key, thread.stack.frames)) == most)


@dataclass(frozen=True)
class Excess:
    """Where some ranks spend more time than the others.

    Attributes:
        frame: The function that was running, or the Python function that waits there, with its line.
        share: Part of the ranks' time that they spend there, 0 to 1.
        others: The same of the others.
        excess_ns: How much more than the others, in all of the time looked at, on one rank.
        queued: The part of ``share`` in which the ranks are ready to run there, and no CPU is free.
    """

    frame: Frame
    share: float
    others: float
    excess_ns: float
    queued: float = 0.0

    @property
    def text(self) -> str:
        """In words."""
        return f"{label(self.frame, lines=True)}: {self.share:.0%} of its time, against {self.others:.0%} of theirs"


class StackReader:
    """Reads the stacks of a run.

    Args:
        store: The store.
        job, run: Whose.
    """

    def __init__(self, store: Store, job: str, run: int) -> None:
        self._store = store
        self._all = Selection(job, run, kind="all")

    def threads(self, ranks: Sequence[int], from_ns: int, to_ns: int) -> list[Thread]:
        """Where each thread of some ranks was for most of a time (wall time, ns); empty: nothing is known."""
        chosen = replace(self._all, ranks=tuple(ranks), from_ns=from_ns, to_ns=to_ns)
        try:
            return read_threads(self._store, chosen)
        except ArgusError:
            return []

    def excess(self, ranks: Sequence[int], others: Sequence[int], from_ns: int, to_ns: int) -> list[Excess]:
        """Where ranks spend more time than others do, by the function that ran, or that called what waits.

        Args:
            ranks: The ranks in question.
            others: Whom they are compared with.
            from_ns, to_ns: When, wall time.

        Returns:
            The places, the largest difference first; empty: no stacks of both are stored.
        """
        chosen = replace(self._all, ranks=(*ranks, *others), from_ns=from_ns, to_ns=to_ns)
        try:
            profile = read_profile(self._store, chosen, by={"rank"}, lines=True)
        except ArgusError:
            return []
        spent: dict[bool, Counter[tuple[str, str, str]]] = {True: Counter(), False: Counter()}
        queued: Counter[tuple[str, str, str]] = Counter()
        lines: dict[tuple[str, str, str], Counter[int]] = defaultdict(Counter)
        seen: dict[bool, set[int]] = {True: set(), False: set()}
        for sample in profile.samples:
            in_question = sample.rank in set(ranks)
            seen[in_question].add(sample.rank)
            frame = _shown_frame(sample.frames)
            if frame is None:
                continue
            spent[in_question][_key(frame)] += sample.ns
            if in_question:
                lines[_key(frame)][frame.line] += sample.ns
                queued[_key(frame)] += sample.ns * (QUEUED in sample.frames)
        if not seen[True] or not seen[False]:
            return []
        span = max(to_ns - from_ns, 1)
        excesses = []
        for key, ns in spent[True].items():
            own, theirs = ns / len(seen[True]), spent[False][key] / len(seen[False])
            if own > theirs:
                frame = Frame(*key, line=lines[key].most_common(1)[0][0])
                late = queued[key] / len(seen[True]) / span
                excesses.append(Excess(frame, own / span, theirs / span, own - theirs, late))
        return sorted(excesses, key=lambda one: -one.excess_ns)


def _shown_frame(frames: Sequence[Frame]) -> Frame | None:
    """The frame that a person looks for: the deepest Python one, or, in a program without Python, the deepest."""
    python = [frame for frame in frames if frame.kind == "python"]
    named = [frame for frame in frames if frame.kind in ("native", "jit")]
    return python[-1] if python else named[-1] if named else None
