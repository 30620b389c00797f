"""Perfetto's trace format: ``TracePacket`` of https://perfetto.dev, from its protos/perfetto/trace; field numbers are
those of these files.

All packets are of one sequence. Names, categories and repeated texts are sent once and numbered from then on; when many
were, the numbers start anew, so that what is kept stays bounded however many names there are.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

from argus.export.protobuf import double, fixed64, given, key, message, number, text, varint
from argus.model.text import printable, shortened

Value = int | float | str
Arguments = Mapping[str, Value] | Iterable[tuple[str, Value]]

LONGEST = 512
"""Characters of a name or a text: a viewer shows fewer, and kernels of templates have thousands."""
MOST_NAMES = 1 << 15
"""Names and texts that are numbered before the numbers start anew: 32 MB, were all as long as they may be."""
MOST_LANES = 64
"""Tracks that slices of one track take that overlap without one being inside the other."""
BUFFER_BYTES = 1 << 20

_PACKET, _BEGIN, _END, _INSTANT, _COUNTER = key(1, 2), 1, 2, 3, 4
_SEQUENCE = given(10, 1)
_NEEDS_NAMES, _NAMES_START = 2, 1
_REALTIME, _BOOTTIME = 1, 6
_EXPLICIT = 3
"""Child tracks are in the order of their ranks."""
_SLICE_BEGIN = given(9, _BEGIN)
_SLICE_END = given(9, _END)
_TIMESTAMP, _EVENT, _TRACK = key(8), key(11, 2), key(11)
_ARGUMENT, _INT, _DOUBLE, _TEXT = key(4, 2), key(4), key(5, 1), key(17)
_FLOW = key(47, 1)
_PACK_DOUBLE = struct.Struct("<d").pack
_PACK_FIXED = struct.Struct("<Q").pack


def bounded(name: str) -> str:
    """A name as it may be shown: of bounded length, without control characters or what is no Unicode."""
    if len(name) <= LONGEST and name.isprintable():
        return name
    return shortened(printable(shortened(name, LONGEST)), LONGEST)


@dataclass
class _Lane:
    """One track of those that a track's slices are on.

    Attributes:
        uuid: Its number.
        ends: Of the slices that are open, the outermost first.
        begun: Begin of the newest.
    """

    uuid: int
    ends: list[int] = field(default_factory=list)
    begun: int = 0

    def takes(self, begin: int, end: int) -> bool:
        """Whether a slice lies inside the newest that is open, or none is; those that are over are closed."""
        if begin < self.begun:
            return False
        ends = self.ends
        while ends and ends[-1] <= begin:
            ends.pop()
        if ends and end > ends[-1]:
            return False
        ends.append(end)
        self.begun = begin
        return True


@dataclass
class Track:
    """A track of slices.

    Attributes:
        parent: Number of the track it belongs to; 0: none.
        name: As it was given.
        order: Place among its siblings.
        lanes: The tracks it takes.
    """

    parent: int
    name: str
    order: int
    lanes: list[_Lane]

    @property
    def uuid(self) -> int:
        return self.lanes[0].uuid


class TraceFile:
    """Writes one trace.

    Args:
        out: Where to.
        origin_ns: Wall time that counts as 0.

    Attributes:
        slices, instants, values: How many were written.
        cut: Slices that were cut short where more than ``MOST_LANES`` overlapped.
    """

    def __init__(self, out: BinaryIO, origin_ns: int) -> None:
        self._out = out
        self._origin = origin_ns
        self._buffer: list[bytes] = []
        self._buffered = 0
        self._flags = self._flags_after = b""
        self._tracks = 0
        self.slices = self.instants = self.values = self.cut = 0
        self._restart()
        # Times are those of the boot clock here, which began at the origin: a viewer shows the time of day from that.
        clocks = message(1, given(1, _BOOTTIME) + given(2, 0)) + message(1, given(1, _REALTIME) + given(2, origin_ns))
        self._packet(given(8, 0) + message(6, clocks + given(2, _BOOTTIME)) + _SEQUENCE)

    # ---- tracks

    def process(self, pid: int, name: str, order: int, labels: Sequence[str] = ()) -> int:
        """A process, to which tracks belong; ``pid`` only has to be its alone."""
        uuid = self._new()
        shown = bounded(name)
        about = given(1, pid) + text(6, shown) + b"".join(text(8, bounded(label)) for label in labels)
        self._describe(uuid, message(3, about) + given(11, _EXPLICIT) + given(12, order))
        return uuid

    def thread(self, process: int, pid: int, tid: int, name: str, order: int) -> Track:
        """A thread of a process: a track of slices."""
        uuid = self._new()
        shown = bounded(name)
        about = given(1, pid) + given(2, tid) + text(5, shown)
        self._describe(uuid, number(5, process) + message(4, about) + given(12, order))
        return Track(process, shown, order, [_Lane(uuid)])

    def track(self, parent: int, name: str, order: int, description: str = "") -> Track:
        """Another track of slices; ``parent``: a process or a group, 0: none."""
        shown = bounded(name)
        return Track(parent, shown, order, [_Lane(self._named(parent, shown, order, description))])

    def group(self, name: str, order: int) -> int:
        """A track that only holds others."""
        uuid = self._new()
        self._describe(uuid, text(2, bounded(name)) + given(11, _EXPLICIT) + given(12, order))
        return uuid

    def counter(self, parent: int, name: str, unit: str, order: int) -> int:
        """A track of values."""
        uuid = self._new()
        about = number(5, parent) + text(2, bounded(name)) + given(12, order) + message(8, text(6, bounded(unit)))
        self._describe(uuid, about)
        return uuid

    def _named(self, parent: int, name: str, order: int, description: str = "") -> int:
        uuid = self._new()
        about = number(5, parent) + text(2, name) + given(12, order)
        self._describe(uuid, about + (text(14, bounded(description)) if description else b""))
        return uuid

    def _new(self) -> int:
        self._tracks += 1
        return self._tracks

    def _describe(self, uuid: int, body: bytes) -> None:
        self._packet(message(60, given(1, uuid) + body) + _SEQUENCE)

    # ---- events

    def slice(
        self,
        track: Track,
        begin_ns: int,
        took_ns: int,
        name: str,
        category: str,
        arguments: Arguments = (),
        flows: Sequence[int] = (),
    ) -> None:
        """A stretch of time on a track. Slices of a track come in the order of their begins, of equal ones the longest
        first.

        Args:
            begin_ns: Wall time.
            took_ns: Length; not negative.
            flows: Arrows that it is an end of: unsigned 64-bit numbers, one an arrow, which joins all slices that have
                it in the order of their begins.
        """
        begin = begin_ns - self._origin
        if begin < 0:
            begin = 0
        end = begin + took_ns
        for lane in track.lanes:
            if lane.takes(begin, end):
                break
        else:
            lane, begin, end = self._another(track, begin, end)
        if len(name) > LONGEST:
            name = bounded(name)  # what is kept of it is what is shown
        head = self._heads.get((lane.uuid, category, name))
        if head is None:
            head = self._head(lane.uuid, category, name)
        body = head
        if flows:
            body += b"".join(_FLOW + _PACK_FIXED(flow) for flow in flows)
        if arguments:
            body += self._arguments(arguments)
        self._event(begin, body)
        closing = _TIMESTAMP + varint(end) + _EVENT + self._closing[lane.uuid]
        self._add(_PACKET + varint(len(closing)) + closing)
        self.slices += 1

    def instant(
        self, track: Track, at_ns: int, name: str, category: str, arguments: Arguments = (), flows: Sequence[int] = ()
    ) -> None:
        """A moment on a track."""
        uuid = track.lanes[0].uuid
        body = given(9, _INSTANT) + _TRACK + varint(uuid) + self._category(category) + self._name(bounded(name))
        body += b"".join(fixed64(47, flow) for flow in flows) + self._arguments(arguments)
        self._event(max(at_ns - self._origin, 0), body)
        self.instants += 1

    def value(self, counter: int, at_ns: int, value: float) -> None:
        """What a counter is from then on."""
        event = given(9, _COUNTER) + _TRACK + varint(counter) + double(44, value)
        self._packet(
            _TIMESTAMP + varint(max(at_ns - self._origin, 0)) + _SEQUENCE + _EVENT + varint(len(event)) + event
        )
        self.values += 1

    def _another(self, track: Track, begin: int, end: int) -> tuple[_Lane, int, int]:
        """A further lane; where there are too many, the last one, in which the slice is cut so that it nests."""
        if len(track.lanes) < MOST_LANES:
            lane = _Lane(self._named(track.parent, track.name, track.order))
            track.lanes.append(lane)
            lane.takes(begin, end)
            return lane, begin, end
        self.cut += 1
        lane = track.lanes[-1]
        begin = max(begin, lane.begun)
        end = max(begin, min(end, lane.ends[-1])) if lane.ends else end
        lane.takes(begin, end)
        return lane, begin, end

    def _event(self, at: int, event: bytes) -> None:
        body = _TIMESTAMP + varint(at) + self._flags + _EVENT + varint(len(event)) + event
        if self._news:
            body += message(12, b"".join(self._news))
            self._news.clear()
        self._flags = self._flags_after
        self._add(_PACKET + varint(len(body)) + body)
        if self._numbered > MOST_NAMES:
            self._restart()

    # ---- what is sent once

    def _restart(self) -> None:
        self._heads: dict[tuple[int, str, str], bytes] = {}
        self._closing = _Closing()
        self._categories: dict[str, bytes] = {}
        self._names: dict[str, bytes] = {}
        self._argument_names: dict[str, bytes] = {}
        self._texts: dict[tuple[str, str], bytes] = {}
        self._text_numbers: dict[str, int] = {}
        self._news: list[bytes] = []
        self._numbered = 0
        self._flags = _SEQUENCE + given(13, _NAMES_START | _NEEDS_NAMES)
        self._flags_after = _SEQUENCE + given(13, _NEEDS_NAMES)

    def _send(self, kind: int, value: str) -> int:
        """The number of a text that was not sent yet."""
        self._numbered += 1
        self._news.append(message(kind, given(1, self._numbered) + text(2, bounded(value))))
        return self._numbered

    def _head(self, uuid: int, category: str, name: str) -> bytes:
        head = _SLICE_BEGIN + _TRACK + varint(uuid) + self._category(category) + self._name(name)
        self._heads[uuid, category, name] = head
        self._numbered += 1  # it takes memory, too
        return head

    def _category(self, category: str) -> bytes:
        known = self._categories.get(category)
        if known is None:
            known = self._categories[category] = given(3, self._send(1, category))
        return known

    def _name(self, name: str) -> bytes:
        known = self._names.get(name)
        if known is None:
            known = self._names[name] = given(10, self._send(2, name))
        return known

    def _arguments(self, arguments: Arguments) -> bytes:
        body = b""
        for name, value in arguments.items() if isinstance(arguments, Mapping) else arguments:
            kind = type(value)
            if kind is str:
                known = self._texts.get((name, value))  # type: ignore[arg-type]
                body += self._argument_text(name, str(value)) if known is None else known
                continue
            head = self._argument_names.get(name)
            if head is None:
                head = self._argument_name(name)
            head += _DOUBLE + _PACK_DOUBLE(value) if kind is float else _INT + varint(int(value))
            body += _ARGUMENT + varint(len(head)) + head
        return body

    def _argument_name(self, name: str) -> bytes:
        head = self._argument_names[name] = given(1, self._send(3, name))
        return head

    def _argument_text(self, name: str, value: str) -> bytes:
        """A text with its name, which mostly come again together."""
        if len(value) > LONGEST:
            value = bounded(value)
        if (known := self._texts.get((name, value))) is not None:
            return known
        head = self._argument_names.get(name) or self._argument_name(name)
        number = self._text_numbers.get(value)
        if number is None:
            number = self._text_numbers[value] = self._send(29, value)
        head += _TEXT + varint(number)
        whole = self._texts[name, value] = _ARGUMENT + varint(len(head)) + head
        self._numbered += 1  # it takes memory, too
        return whole

    # ---- the file

    def _packet(self, body: bytes) -> None:
        self._add(_PACKET + varint(len(body)) + body)

    def _add(self, packet: bytes) -> None:
        self._buffer.append(packet)
        self._buffered += len(packet)
        if self._buffered > BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes what is left."""
        self._out.write(b"".join(self._buffer))
        self._buffer.clear()
        self._buffered = 0


class _Closing(dict[int, bytes]):
    """What ends a slice, by its track."""

    def __missing__(self, uuid: int) -> bytes:
        event = _SLICE_END + _TRACK + varint(uuid)
        closing = self[uuid] = varint(len(event)) + event + _SEQUENCE
        return closing
