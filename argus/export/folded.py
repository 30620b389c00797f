"""Folded stacks: a line a stack, frames from the root on with semicolons between, and its weight.

The format of Brendan Gregg's FlameGraph (https://github.com/brendangregg/FlameGraph), which inferno, speedscope and
many others read. Of two profiles a line has both weights, as its difffolded.pl writes them.
"""

from __future__ import annotations

from collections.abc import Iterator

from argus.semantics.stacks.profile import Difference, Key, Profile, folded, frame_text


def write_folded(profile: Profile) -> Iterator[str]:
    """Lines with weights in microseconds, the heaviest first. What has less than half of one counts as one."""
    merged: dict[str, int] = {}
    for frames, ns in folded(profile.samples).items():
        text = _line(frames)
        merged[text] = merged.get(text, 0) + ns
    for text, ns in sorted(merged.items(), key=lambda item: (-item[1], item[0])):
        if ns > 0:
            yield f"{text} {max(round(ns / 1000), 1)}\n"


def write_difference(two: Difference) -> Iterator[str]:
    """Lines with both weights in nanoseconds of ``two.unit``: before, then after."""
    merged: dict[str, list[float]] = {}
    for column, stacks in enumerate((two.before, two.after)):
        for frames, ns in stacks.items():
            merged.setdefault(_line(frames), [0.0, 0.0])[column] += ns
    for text, (before, after) in sorted(merged.items(), key=lambda item: (-item[1][1], item[0])):
        if round(before) or round(after):
            yield f"{text} {round(before)} {round(after)}\n"


def _line(frames: Key) -> str:
    # The format knows no escape: a semicolon in a name would be a frame of its own.
    return ";".join(frame_text(frame).replace(";", ",") for frame in frames)
