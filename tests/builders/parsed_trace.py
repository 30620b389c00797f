"""Reads a trace with Perfetto's own descriptors, and checks what its trace processor relies on."""

from __future__ import annotations

import gzip
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as perfetto

CLEARED, NEEDED = 1, 2
BOOTTIME, REALTIME = 6, 1


@dataclass
class Slice:
    begin: int
    end: int
    name: str
    category: str
    arguments: dict[str, Any]
    flows: tuple[int, ...]
    depth: int


@dataclass
class TrackOf:
    """A track and what is on it."""

    uuid: int
    name: str
    parent: int
    process: Any = None
    thread: Any = None
    unit: str = ""
    order: int = 0
    slices: list[Slice] = field(default_factory=list)
    instants: list[Slice] = field(default_factory=list)
    values: list[tuple[int, float]] = field(default_factory=list)


@dataclass
class Parsed:
    """A whole trace.

    Attributes:
        origin_ns: Wall time of its time 0.
        tracks: By number.
        restarts: How often names were numbered anew.
        packets: How many there are.
    """

    origin_ns: int = -1
    tracks: dict[int, TrackOf] = field(default_factory=dict)
    restarts: int = 0
    packets: int = 0

    def named(self, name: str) -> list[TrackOf]:
        return [track for track in self.tracks.values() if track.name == name]

    def of(self, process: str, name: str) -> list[Slice]:
        """Slices of the tracks of a name below a process whose name begins so."""
        return [
            one
            for track in self.tracks.values()
            if track.name == name and track.parent and self.tracks[track.parent].name.startswith(process)
            for one in track.slices
        ]

    def category(self, category: str) -> list[Slice]:
        return [one for track in self.tracks.values() for one in track.slices if one.category == category]

    @property
    def slices(self) -> list[Slice]:
        return [one for track in self.tracks.values() for one in track.slices]

    @property
    def texts(self) -> list[str]:
        """All that a viewer shows."""
        out = [track.name for track in self.tracks.values()]
        for track in self.tracks.values():
            for one in [*track.slices, *track.instants]:
                out += [one.name, one.category, *one.arguments]
                out += [value for value in one.arguments.values() if isinstance(value, str)]
        return out


def parse(file: Path) -> Parsed:
    """The whole file. Fails where a packet refers to what was not sent, an end has no begin, or an arrow one end."""
    data = file.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    trace = perfetto.Trace.FromString(data)
    size = trace.ByteSize()
    trace.DiscardUnknownFields()
    assert trace.ByteSize() == size, "every field is one of Perfetto's"
    out = Parsed(packets=len(trace.packet))
    names: dict[str, dict[int, str]] = {}
    events: dict[int, list[tuple[int, int, Any]]] = defaultdict(list)
    for number, packet in enumerate(trace.packet):
        assert packet.trusted_packet_sequence_id == 1
        if packet.HasField("clock_snapshot"):
            clocks = {clock.clock_id: clock.timestamp for clock in packet.clock_snapshot.clocks}
            assert clocks[BOOTTIME] == 0
            out.origin_ns = clocks[REALTIME]
        if packet.sequence_flags & CLEARED:
            out.restarts += 1
            names = {"categories": {}, "names": {}, "arguments": {}, "texts": {}}
        if packet.HasField("interned_data"):
            sent = packet.interned_data
            for kind, entries in (
                ("categories", [(entry.iid, entry.name) for entry in sent.event_categories]),
                ("names", [(entry.iid, entry.name) for entry in sent.event_names]),
                ("arguments", [(entry.iid, entry.name) for entry in sent.debug_annotation_names]),
                ("texts", [(entry.iid, entry.str.decode()) for entry in sent.debug_annotation_string_values]),
            ):
                for iid, text in entries:
                    assert iid > 0
                    assert iid not in names[kind], "sent once"
                    names[kind][iid] = text
        if packet.HasField("track_descriptor"):
            _describe(out, packet.track_descriptor)
        if packet.HasField("track_event"):
            event = packet.track_event
            assert event.track_uuid in out.tracks, "described before it is used"
            if event.type in (1, 3):
                assert packet.sequence_flags & NEEDED
                shown = Slice(
                    packet.timestamp, -1, names["names"][event.name_iid], names["categories"][event.category_iids[0]],
                    _arguments(event, names), tuple(event.flow_ids), 0,
                )  # fmt: skip
                events[event.track_uuid].append((packet.timestamp, number, (event.type, shown)))
            elif event.type == 2:
                events[event.track_uuid].append((packet.timestamp, number, (2, None)))
            else:
                assert event.type == 4
                out.tracks[event.track_uuid].values.append((packet.timestamp, event.double_counter_value))
    _nest(out, events)
    ends: dict[int, int] = defaultdict(int)
    for track in out.tracks.values():
        assert not track.parent or track.parent in out.tracks
        for one in [*track.slices, *track.instants]:
            for flow in one.flows:
                ends[flow] += 1
    assert all(count >= 2 for count in ends.values()), "an arrow has two ends"
    return out


def _describe(out: Parsed, described: Any) -> None:
    assert described.uuid not in out.tracks
    name = described.name
    process = thread = None
    if described.HasField("process"):
        process, name = described.process, described.process.process_name
    if described.HasField("thread"):
        thread, name = described.thread, described.thread.thread_name
    out.tracks[described.uuid] = TrackOf(
        described.uuid, name, described.parent_uuid, process, thread, described.counter.unit_name,
        described.sibling_order_rank,
    )  # fmt: skip


def _arguments(event: Any, names: dict[str, dict[int, str]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for one in event.debug_annotations:
        kind = one.WhichOneof("value")
        value = getattr(one, kind)
        out[names["arguments"][one.name_iid]] = names["texts"][value] if kind == "string_value_iid" else value
    return out


def _nest(out: Parsed, events: dict[int, list[tuple[int, int, Any]]]) -> None:
    """Pairs begins and ends as Perfetto does: in order of time, of equal ones as they come, the newest begin first."""
    for uuid, own in events.items():
        track = out.tracks[uuid]
        stack: list[Slice] = []
        for at, _, (kind, shown) in sorted(own, key=lambda event: event[:2]):
            if kind == 3:
                track.instants.append(shown)
            elif kind == 1:
                shown.depth = len(stack)
                stack.append(shown)
                track.slices.append(shown)
            else:
                assert stack, "an end has a begin"
                stack.pop().end = at
        assert not stack, "a begin has an end"
