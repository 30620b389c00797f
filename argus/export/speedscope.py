"""speedscope's own format (https://www.speedscope.app, file-format-spec.ts): one profile a thread, frames shared."""

from __future__ import annotations

import json
from typing import Any

from argus.model.stacks import Frame
from argus.model.text import printable
from argus.semantics.stacks.profile import Profile, Sample

_SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def speedscope(profile: Profile) -> dict[str, Any]:
    """The file as an object. Samples are not in the order of time: each stack comes once, with all of its time."""
    numbers: dict[Frame, int] = {}
    known: dict[int, tuple[int, ...]] = {}
    threads: dict[tuple[int, int, str], list[Sample]] = {}
    for sample in profile.samples:
        threads.setdefault((sample.rank, sample.tid, sample.thread), []).append(sample)
    profiles = []
    for key in sorted(threads):
        stacks: dict[tuple[int, ...], int] = {}
        for sample in threads[key]:
            # By identity first: samples of a thousand ranks share their stacks, and hashing all frames takes long.
            stack = known.get(id(sample.frames))
            if stack is None:
                stack = tuple(numbers.setdefault(frame, len(numbers)) for frame in sample.frames)
                known[id(sample.frames)] = stack
            stacks[stack] = stacks.get(stack, 0) + sample.ns
        order = sorted(stacks, key=lambda stack: (-stacks[stack], stack))
        profiles.append(
            {
                "type": "sampled",
                "name": _name(*key) or profile.title,
                "unit": "nanoseconds",
                "startValue": 0,
                "endValue": sum(stacks.values()),
                "samples": [list(stack) for stack in order],
                "weights": [stacks[stack] for stack in order],
            }
        )
    return {
        "$schema": _SCHEMA,
        "shared": {"frames": [_frame(frame) for frame in numbers]},
        "profiles": profiles,
        "name": printable(f"{profile.title}: {profile.subtitle}" if profile.subtitle else profile.title),
        "activeProfileIndex": 0,
        "exporter": "argus",
    }


def write_speedscope(profile: Profile) -> str:
    """The file as text."""
    return json.dumps(speedscope(profile), ensure_ascii=True, separators=(",", ":"))


def _name(rank: int, tid: int, thread: str) -> str:
    parts = [f"rank {rank}" if rank >= 0 else "", printable(thread), f"({tid})" if tid else ""]
    return " ".join(part for part in parts if part)


def _frame(frame: Frame) -> dict[str, str | int]:
    fields: dict[str, str | int] = {"name": printable(frame.function)}
    if frame.file:
        fields["file"] = printable(frame.file)
    if frame.line:
        fields["line"] = frame.line
    return fields
