"""Packets of Perfetto: what its trace processor relies on holds for any slices, and names stay inert and bounded."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

from argus.export import packets, protobuf
from argus.export.packets import LONGEST, TraceFile, bounded
from tests.builders.parsed_trace import Parsed, parse

HOSTILE = (
    "<script>alert(1)</script>", "\"'`;--", "\x1b[31m\x07\x00\r\n\t", "a\u202eb\u200f\u2066", "\ud800lone\udfff",
    "x" * 1_000_000, "\U000e0001" * 5000, "", "\ufeff", "𝔘" * 600,
)  # fmt: skip


def written(file: Path, origin: int = 0) -> tuple[TraceFile, io.BytesIO]:
    out = io.BytesIO()
    return TraceFile(out, origin), out


def parsed(trace: TraceFile, out: io.BytesIO, folder: Path) -> Parsed:
    trace.flush()
    file = folder / "t.pftrace"
    file.write_bytes(out.getvalue())
    return parse(file)


@pytest.mark.parametrize(
    "value", [0, 1, 127, 128, 16383, 16384, 2**21, 2**31, 2**35 - 1, 2**63, 2**64 - 1, -1, -(2**63)]
)
def test_numbers_are_encoded_as_the_library_does(value: int) -> None:
    from google.protobuf.internal import encoder

    out: list[bytes] = []
    encoder._VarintEncoder()(out.append, value % 2**64)
    assert protobuf.varint(value) == b"".join(out)


def test_slices_that_lie_inside_one_another_are_on_one_track(tmp_path: Path) -> None:
    trace, out = written(tmp_path, 1000)
    track = trace.track(trace.process(1, "rank 0", 0), "stream", 0)
    for begin, took, name in ((1000, 100, "outer"), (1000, 50, "first"), (1050, 50, "last"), (1100, 0, "moment"),
                              (1100, 7, "next")):  # fmt: skip
        trace.slice(track, begin, took, name, "kernel", {"bytes": 0, "share": 0.5, "less": -3, "text": name})
    shown = parsed(trace, out, tmp_path)
    assert shown.origin_ns == 1000
    (only,) = shown.named("stream")
    assert [(one.name, one.begin, one.end, one.depth) for one in only.slices] == [
        ("outer", 0, 100, 0), ("first", 0, 50, 1), ("last", 50, 100, 1), ("moment", 100, 100, 0), ("next", 100, 107, 0),
    ]  # fmt: skip
    assert only.slices[0].arguments == {"bytes": 0, "share": 0.5, "less": -3, "text": "outer"}


def test_slices_that_only_overlap_take_another_track_of_the_same_name(tmp_path: Path) -> None:
    trace, out = written(tmp_path)
    thread = trace.thread(trace.process(1, "rank 0", 0), 1, 77, "main thread", 0)
    for begin, took in ((0, 10), (5, 10), (8, 1), (15, 5)):
        trace.slice(thread, begin, took, f"at {begin}", "cuda")
    shown = parsed(trace, out, tmp_path)
    first, second = shown.named("main thread")
    assert first.thread.tid == 77
    assert [one.name for one in first.slices] == ["at 0", "at 8", "at 15"]
    assert [one.name for one in second.slices] == ["at 5"]
    assert first.parent == 0 or second.parent in shown.tracks


@pytest.mark.thorough(first=2)
@pytest.mark.parametrize("seed", range(5))
def test_any_slices_nest(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packets, "MOST_LANES", 20)
    rng = np.random.default_rng(seed)
    trace, out = written(tmp_path)
    track = trace.track(0, "any", 0)
    begins = np.sort(rng.integers(0, 2000, 3000))
    tooks = rng.integers(0, 200, 3000)
    order = np.lexsort((-tooks, begins))
    for begin, took in zip(begins[order].tolist(), tooks[order].tolist(), strict=True):
        trace.slice(track, begin, took, "s", "c")
    assert trace.cut > 0, "hundreds overlap"
    shown = parsed(trace, out, tmp_path)
    assert len(shown.named("any")) == packets.MOST_LANES
    slices = shown.slices
    assert len(slices) == 3000
    assert all(one.end >= one.begin for one in slices)
    expected = sorted(zip(begins.tolist(), (begins + tooks).tolist(), strict=True))
    assert sum((one.begin, one.end) in set(expected) for one in slices) >= 3000 - trace.cut


def test_names_are_inert_and_bounded(tmp_path: Path) -> None:
    trace, out = written(tmp_path)
    for number, name in enumerate(HOSTILE):
        process = trace.process(number + 1, name, number, [name])
        track = trace.thread(process, number + 1, 1, name, 0)
        trace.slice(track, 0, 5, name, name, {name: name}, (7,))
        trace.instant(trace.track(process, name, 0, name), 3, name, name, [(name, name)], (7,))
        trace.value(trace.counter(process, name, "%", 0), 1, 0.5)
    shown = parsed(trace, out, tmp_path)
    assert len(out.getvalue()) < 300_000
    for text in shown.texts:
        assert len(text) <= LONGEST
        assert text.isprintable()
        assert not any("\ud800" <= character <= "\udfff" for character in text)
    assert "<script>alert(1)</script>" in shown.texts, "a viewer shows text as text"
    assert r"\ud800lone\udfff" in shown.texts
    assert bounded(bounded(HOSTILE[-1])) == bounded(HOSTILE[-1])


def test_what_is_kept_of_names_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packets, "MOST_NAMES", 50)
    trace, out = written(tmp_path)
    track = trace.track(0, "stream", 0)
    for number in range(300):
        trace.slice(track, number, 1, f"kernel {number}", "kernel", {"text": f"value {number % 7}", "n": number})
        assert trace._numbered <= 60
    shown = parsed(trace, out, tmp_path)
    assert shown.restarts > 5
    assert [one.name for one in shown.slices] == [f"kernel {number}" for number in range(300)]
    assert [one.arguments["text"] for one in shown.slices] == [f"value {number % 7}" for number in range(300)]
