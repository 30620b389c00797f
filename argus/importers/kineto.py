"""PyTorch profiler (Kineto) traces: Chrome's trace format, as JSON or gzipped JSON, one file a rank.

Times are decimal microseconds, some with three decimals beside sixteen digits: more than a float64 holds. They are
read digit by digit into nanoseconds. Events are read one at a time, from a window of the text, so that memory holds the
columns of what is kept, however long the file is.
"""

from __future__ import annotations

import codecs
import gzip
import json
import os
import re
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import numpy as np

from argus.importers.packed import Unpacked, too_large
from argus.importers.recordings.clocks import host_in_path
from argus.importers.recordings.collectives import operation_name, take_collectives
from argus.importers.recordings.facts import kineto_facts
from argus.importers.recordings.flops import works_of
from argus.importers.recordings.recording import (
    CALL,
    MOST_NS,
    UNKNOWN_TYPE,
    CpuRange,
    Progress,
    Recording,
    connect,
)
from argus.importers.recordings.steps import marks_from
from argus.importers.regular import open_regular
from argus.model.calls import TORCH_DTYPE
from argus.model.errors import EXIT_UNAVAILABLE, EXIT_USAGE, ArgusError
from argus.model.ranks import HIGHEST_RANK
from argus.model.records import GPU_OP, GpuKind
from argus.model.units import UNKNOWN_HOST
from argus.semantics.gpu.flops import OPERATORS, work_of
from argus.semantics.steps.range_names import role_of

SUFFIXES = (".json", ".json.gz")
"""How names of traces end."""
EXPORT_HINT = "Export one with torch.profiler: profiler.export_chrome_trace('rank0.json.gz')"
WINDOW = 8 << 20
"""Characters that are read at once."""
LONGEST_EVENT = 4 << 20
"""Characters of an event at most, or it cannot be read. Names of kernels have some thousand."""
LONGEST_VALUE = 4 << 20
"""Characters of a value of the head at most, and of what is skipped to find the next event. The ranks of ten process
groups of 16,384 each have 1 MiB. A packed file of 2 MB can hold one string of 2 GB, and empty objects take 24 bytes a
character."""
SEEN_AGAIN = 4 << 20
"""Characters that may be looked at again behind the beginnings of events that cannot be read, beside as many as there
were until then: such an event may hold others, each of which may go on for as long."""
SEPARATOR = 4096
"""Characters between two events at most, where one cannot be read."""
UNPACKED_BYTES = 4096
"""Of a damaged gzip stream, unpacked at once to find where."""
UNREADABLE = 0.01
"""Share of the events that may be unreadable: some versions of Kineto write names that are not JSON."""
PROGRESS_EVENTS = 20_000
MOST_DIGITS = 18
"""Of a time in microseconds before the point: more nanoseconds than 64 bits have."""
ENGINE = "autograd::engine::evaluate_function"
"""How ranges begin that autograd's engine makes of what it evaluates."""
EPOCH_2000_NS = 946_684_800 * 10**9

_SPACE = re.compile(r"[ \t\r\n]*")
_NEXT_EVENT = re.compile(r"\}\s*,\s*(?=\{)")
_OPERATIONS = {
    "kernel": GpuKind.KERNEL,
    "gpu_memcpy": GpuKind.MEMCPY,
    "memcpy": GpuKind.MEMCPY,
    "gpu_memset": GpuKind.MEMSET,
    "memset": GpuKind.MEMSET,
}
_CALLS = {"cuda_runtime", "cuda_driver", "runtime", "driver", "hip_runtime", "privateuse1_runtime"}
_RANGES = {"cpu_op", "operator", "user_annotation"}
_HOST_KEYS = ("hostname", "host_name", "host", "HOSTNAME", "node", "pod", "POD_NAME", "NODE_NAME")
_COPIES = {"htod": 1, "dtoh": 2, "dtod": 8, "htoh": 9, "ptop": 10}
"""By CUpti_ActivityMemcpyKind."""
_TYPES = {
    "byte": 0, "uint8": 0, "unsigned char": 0, "char": 1, "int8": 1, "signed char": 1, "short": 2, "int16": 2,
    "int": 3, "int32": 3, "long": 4, "int64": 4, "long int": 4, "half": 5, "float16": 5, "c10::half": 5, "float": 6,
    "float32": 6, "double": 7, "float64": 7, "complexfloat": 9, "complexdouble": 10, "bool": 11, "bfloat16": 15,
    "c10::bfloat16": 15, "float8_e5m2": 23, "float8_e4m3fn": 24,
}  # fmt: skip
"""Names that PyTorch writes, and C++'s in older versions, to c10::ScalarType."""
_OP_FIELDS = ("start", "end", "correlation", "device", "context", "stream", "name", "kind", "copy", "bytes",
              "shared", "registers", "graph", "graph_node", "gx", "gy", "gz", "bx", "by", "bz")  # fmt: skip
_CALL_FIELDS = ("ts", "duration", "correlation", "tid", "function", "pid")


@dataclass
class _Columns:
    """Rows under construction, as flat arrays of int64."""

    ops: array[int] = field(default_factory=lambda: array("q"))
    calls: array[int] = field(default_factory=lambda: array("q"))
    symbols: dict[str, int] = field(default_factory=lambda: {"": 0})
    functions: dict[str, int] = field(default_factory=dict)
    detail: dict[int, CpuRange] = field(default_factory=dict)
    """Of NCCL's kernels, by number of the operation in the file."""
    ranges: list[tuple[str, CpuRange]] = field(default_factory=list)
    """Names and arguments of ranges that may be collectives."""
    annotations: list[tuple[str, int, int, int]] = field(default_factory=list)
    engine: array[int] = field(default_factory=lambda: array("q"))
    """Begin, end and thread of what autograd's engine evaluated."""
    works: list[tuple[int, int, int, float, int]] = field(default_factory=list)
    """Begin, end, thread, floating-point operations and place in ``operators``."""
    operators: dict[tuple[str, str, str, str], int] = field(default_factory=dict)
    without_shapes: int = 0
    unknown_work: int = 0
    guessed_work: int = 0
    processes: dict[int, str] = field(default_factory=dict)
    events: int = 0
    unreadable: int = 0
    negative: int = 0
    other: int = 0


def rank_in_name(name: str) -> int | None:
    """The rank in a file's name: "rank" and a number, or a name that ends in one; None: neither."""
    stem = re.sub(r"(\.pt)?(\.trace)?\.(json|sqlite|db)(\.gz)?$", "", name)
    match = re.search(r"rank[-_.]?(\d{1,6})(?!\d)", stem, re.IGNORECASE) or re.fullmatch(r"\D*?[-_.]?(\d{1,5})", stem)
    return int(match[1]) if match else None


def read(path: Path, place: int, progress: Progress = lambda what, share: None) -> Recording:
    """Reads one trace.

    Args:
        path: The file.
        place: Its place among those imported together: its rank where nothing else gives one.
        progress: Called with how far it is.

    Raises:
        ArgusError: It cannot be read, is cut off, or is not a trace; in one line.
    """
    try:
        return _read(path, place, progress)
    except MemoryError:
        raise too_large(path) from None


def _read(path: Path, place: int, progress: Progress) -> Recording:
    columns = _Columns()
    head: dict[str, Any] = {}
    with _Text(path) as text:
        try:
            head.update(_members(text, columns, lambda share: progress(f"reading {path.name}", share)))
        except RecursionError:
            raise _not_json(path, "it is nested too deeply") from None
        text.finish()
    if "traceEvents" not in head:
        has = ", ".join(list(head)[:4])
        raise ArgusError(
            f"{path} is JSON, but not a Kineto trace: it has no traceEvents" + (f" (it has {has})" if has else ""),
            EXPORT_HINT,
            EXIT_USAGE,
        )
    if columns.unreadable > max(1, UNREADABLE * columns.events):
        raise _not_json(path, f"{columns.unreadable:,} of {columns.events:,} events cannot be read")
    return _recording(path, place, head, columns)


class _Window(str):
    """Text of which nobody asks for lines. JSONDecodeError counts those before each failure, which takes as long as
    all that was read."""

    __slots__ = ()

    def count(self, *_: object) -> int:
        """None."""
        return 0

    def rfind(self, *_: object) -> int:
        """Nowhere."""
        return -1


class _Text:
    """The JSON text of a file, packed or not, of which memory holds a window.

    Attributes:
        path: The file.
        window: What can be looked at.
        place: Of the next character, in the window.
        ended: Nothing comes after the window.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.window, self.place, self.ended = "", 0, False
        self._before = self._again = 0
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._scan = json.JSONDecoder(parse_float=str, strict=False).scan_once  # type: ignore[attr-defined]
        try:
            self._raw = open_regular(path)
            self._size = max(os.fstat(self._raw.fileno()).st_size, 1)
            packed = self._raw.read(2) == b"\x1f\x8b"
            self._raw.seek(0)
        except OSError as failure:
            raise _unreadable(path, failure) from None
        self._file: Unpacked | BinaryIO = (
            Unpacked(path, gzip.GzipFile(fileobj=self._raw), self._size) if packed else self._raw
        )

    def __enter__(self) -> _Text:
        self.read_on()
        if self.ended and not self.window.strip():
            self._raw.close()
            why = "The profiler may have been killed while it wrote"
            raise ArgusError(f"{self.path} is empty", why, EXIT_USAGE)
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()

    @property
    def share(self) -> float:
        """How much of the file was read, 0 to 1."""
        return min(self._raw.tell() / self._size, 1.0)

    def read_on(self, least: int = 0) -> None:
        """Moves the window on to the next character. ``least``: so many characters at least, if there are."""
        parts = [self.window[self.place :]]
        self._before, self.place = self._before + self.place, 0
        missing = max(WINDOW, least - len(parts[0]))
        while missing > 0 and not self.ended:
            data = self._read()
            self.ended = not data
            parts.append(self._decode(data, final=self.ended))
            missing -= len(parts[-1])
        self.window = _Window("".join(parts))

    def _read(self) -> bytes:
        try:
            return self._file.read(WINDOW)
        except (EOFError, zlib.error, gzip.BadGzipFile) as failure:
            raise ArgusError(
                f"{self.path} is cut off or damaged at byte {_unpacked(self._raw):,} of {self._size:,}: {failure}",
                "Copy it again, or import the others",
                EXIT_USAGE,
            ) from None
        except OSError as failure:
            raise _unreadable(self.path, failure) from None

    def finish(self) -> None:
        """Reads what is left: a packed file is whole only if its end was reached."""
        while not self.ended:
            self.place = len(self.window)
            self.read_on()

    def next(self) -> str:
        """The next character that is no space; empty: the end."""
        while True:
            self.place = _SPACE.match(self.window, self.place).end()  # type: ignore[union-attr]
            if self.place < len(self.window) or self.ended:
                return self.window[self.place : self.place + 1]
            self.read_on()

    def value(self) -> Any:
        """The value that begins here.

        Raises:
            ArgusError: There is none, it is cut off, or too long.
        """
        while True:
            try:
                parsed, end = self._scan(self.window, self.place)
            except StopIteration as stop:
                where = int(stop.value) if stop.value is not None else self.place
            except json.JSONDecodeError as failure:
                where = failure.pos
            except ValueError:  # a number of more digits than Python reads
                raise self.wrong() from None
            else:
                # A number may go on.
                if end < len(self.window) or self.ended:
                    self.place = end
                    return parsed
                where = end
            if self.ended:
                raise self.wrong(where)
            # It may be longer than what is there.
            left = len(self.window) - self.place
            if left >= LONGEST_VALUE:
                raise self._too_long("a value")
            self.read_on(2 * left)

    def event(self) -> Any:
        """The event that begins here; None, and the next one begins here: it cannot be read."""
        while True:
            try:
                event, self.place = self._scan(self.window, self.place)
                return event
            except (StopIteration, json.JSONDecodeError) as failure:
                left = len(self.window) - self.place
                if self.ended or left >= LONGEST_EVENT:
                    seen = self._before + self._seen(failure)
                    break
                self.read_on(2 * left)
            except ValueError:  # a number of more digits than Python reads
                seen = self._before + len(self.window)
                break
        begun = self._before + self.place
        while (following := _NEXT_EVENT.search(self.window, self.place)) is None:
            if self.ended:
                raise self.wrong(len(self.window))
            if self._before + len(self.window) - begun >= LONGEST_VALUE:
                raise self._too_long("an event", begun)
            # What separates events may be parted.
            self.place = max(self.place, len(self.window) - SEPARATOR)
            self.read_on()
        self.place = following.end()
        here = self._before + self.place
        self._again += max(seen - here, 0)
        if self._again > SEEN_AGAIN + here:
            raise _not_json(self.path, f"events that cannot be read, up to the one at character {begun:,}, hold others")
        return None

    def _seen(self, failure: StopIteration | json.JSONDecodeError) -> int:
        """The place of the window up to which the reader came."""
        if isinstance(failure, StopIteration):
            return self.place if failure.value is None else int(failure.value)
        return len(self.window) if failure.msg.startswith("Unterminated") else failure.pos

    def _too_long(self, what: str, begun: int | None = None) -> ArgusError:
        """What to raise of a value that begins at a character, by default the next one."""
        begun = self._before + self.place if begun is None else begun
        return _not_json(self.path, f"{what} of more than {LONGEST_VALUE:,} characters begins at character {begun:,}")

    def wrong(self, where: int | None = None) -> ArgusError:
        """What to raise of text that is not as it should be from a place of the window on."""
        where = self.place if where is None else where
        if self.ended and where >= len(self.window.rstrip()) - 1:
            many = self._before + len(self.window)
            hint = "Copy it again, or import the others"
            return ArgusError(f"{self.path} is cut off after {many:,} characters", hint, EXIT_USAGE)
        return _not_json(self.path, f"character {self._before + where:,} is {self.window[where : where + 20]!r}")


def _unreadable(path: Path, failure: OSError) -> ArgusError:
    return ArgusError(f"{path} cannot be read: {failure.strerror or failure}", "", EXIT_UNAVAILABLE)


def _not_json(path: Path, why: str) -> ArgusError:
    return ArgusError(f"{path} is not a JSON trace: {why}", EXPORT_HINT, EXIT_USAGE)


def _unpacked(file: BinaryIO) -> int:
    """How many bytes of a gzip file can be unpacked: where its damage shows."""
    decoder = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    done = 0
    file.seek(0)
    while packed := file.read(UNPACKED_BYTES):
        before = decoder.copy()
        try:
            decoder.decompress(packed)
        except zlib.error:
            for place in range(len(packed)):
                try:
                    before.decompress(packed[place : place + 1])
                except zlib.error:
                    return done + place
        done += len(packed)
    return done


def _members(text: _Text, columns: _Columns, progress: Callable[[float], None]) -> Iterator[tuple[str, Any]]:
    """The members of the outermost object; of traceEvents the number of events, which go to ``columns``."""
    first = text.next()
    if first == "[":
        _events(text, columns, progress)
        yield "traceEvents", columns.events
        return
    if first != "{":
        raise _not_json(text.path, f"it begins with {text.window[text.place : text.place + 20]!r}")
    text.place += 1
    while text.next() != "}":
        key = text.value()
        if text.next() != ":" or not isinstance(key, str):
            raise text.wrong()
        text.place += 1
        if text.next() == "[" and key == "traceEvents":
            _events(text, columns, progress)
            yield key, columns.events
        else:
            ranks = text.value()
            if key != "traceEvents":
                yield key, ranks
        following = text.next()
        if following == ",":
            text.place += 1
        elif following != "}":
            raise text.wrong()


def _events(text: _Text, columns: _Columns, progress: Callable[[float], None]) -> None:
    """Takes the events of the array that begins here."""
    text.place += 1
    while text.next() != "]":
        event = text.event()
        columns.events += 1
        if event is None:
            columns.unreadable += 1
            continue
        if isinstance(event, dict):
            try:
                _take(event, columns)
            except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError):
                columns.unreadable += 1
        if columns.events % PROGRESS_EVENTS == 0:
            progress(text.share)
        following = text.next()
        if following == ",":
            text.place += 1
        elif following != "]":
            raise text.wrong()
    text.place += 1


def _ns(value: Any) -> int:
    """Microseconds as the file has them (an int, or the digits of a number) in nanoseconds, exactly; half a nanosecond
    and more is cut off."""
    if _is_whole(value):
        return value * 1000
    if isinstance(value, str):
        whole, _, part = value.partition(".")
        if part.isdigit() and whole.isdigit():
            return int(whole) * 1000 + int((part + "00")[:3])
        number = Decimal(value)
        if number.adjusted() < MOST_DIGITS:  # an integer of a large exponent takes as long as whoever wrote it likes
            return int(number * 1000)
    raise ValueError(f"{value!r} is not a time")


def _is_whole(value: Any) -> TypeGuard[int]:
    """Whether JSON has a whole number there: true and false, which Python counts as 1 and 0, are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> int:
    """A number; 0: there is none.

    Raises:
        ValueError: It is true or false, or a text that is no number.
    """
    if isinstance(value, bool):
        raise ValueError(f"{value} is not a number")
    if isinstance(value, str):
        return int(float(value))
    return int(value or 0)


def _bounded(value: Any, most: int, other: int) -> int:
    """A number from 0 to below ``most``; ``other``: it is none."""
    number = _number(value)
    return number if 0 <= number < most else other


def _take(event: dict[str, Any], columns: _Columns) -> None:
    phase = event.get("ph")
    if phase == "M":
        if event.get("name") == "process_name" and _is_whole(event.get("pid")):
            columns.processes[event["pid"]] = str(event.get("args", {}).get("name", ""))
        return
    if phase != "X":
        columns.other += phase not in ("s", "t", "f", "i", "I", "C")
        return
    category = str(event.get("cat", "")).lower()
    name = str(event.get("name", ""))
    kind = _OPERATIONS.get(category)
    if kind is None and category not in _CALLS and category not in _RANGES:
        return
    works = category in _RANGES and name in OPERATORS
    evaluated = category in _RANGES and name.startswith(ENGINE)
    if category in _RANGES and not (
        works
        or evaluated
        or category == "user_annotation"
        or role_of(name)
        or name == "record_param_comms"
        or name.startswith(("nccl:", "ProfilerStep"))
    ):
        return
    begin, duration = _ns(event["ts"]), _ns(event.get("dur", 0))
    if not 0 <= begin < MOST_NS or duration >= MOST_NS:
        raise ValueError("a time below 0, or too late")
    if duration < 0:
        columns.negative += 1
        duration = 0
    if begin < 0 or begin + duration > MOST_NS:
        raise ValueError("no time")
    arguments = event.get("args") or {}
    if not isinstance(arguments, dict):
        raise ValueError("arguments have no names")
    if kind is not None:
        _take_operation(name, kind, begin, duration, arguments, event, columns)
    elif category in _CALLS:
        function = columns.functions.setdefault(name, len(columns.functions))
        correlation = _number(arguments.get("correlation")) & 0xFFFFFFFF
        tid, pid = _number(event.get("tid")) & 0xFFFFFFFF, _number(event.get("pid"))
        # As an array first: a number too large must not leave half a row.
        columns.calls.extend(array("q", (begin, duration, correlation, tid, function, pid)))
    elif evaluated:
        columns.engine.extend(array("q", (begin, begin + duration, _number(event.get("tid")) & 0xFFFFFFFF)))
    elif works:
        _take_work(name, begin, begin + duration, _number(event.get("tid")) & 0xFFFFFFFF, arguments, columns)
    else:
        tid = _number(event.get("tid")) & 0xFFFFFFFF
        if name == "record_param_comms" or name.startswith("nccl:"):
            columns.ranges.append((name, _described(arguments, begin, begin + duration, tid)))
        else:
            columns.annotations.append((name, begin, begin + duration, tid))


def _take_work(name: str, begin: int, end: int, tid: int, arguments: dict[str, Any], columns: _Columns) -> None:
    dims = arguments.get("Input Dims", arguments.get("Input dims"))
    if not isinstance(dims, list):
        columns.without_shapes += 1
        return
    if any(isinstance(size, bool) for each in dims if isinstance(each, list) for size in each):
        raise ValueError("a size is no number")
    work = work_of(name, dims, arguments.get("Concrete Inputs") or [])
    columns.unknown_work += not work.flops
    columns.guessed_work += work.guessed and work.flops > 0
    if not work.flops:
        return
    types = arguments.get("Input type") or [""]
    # The first that is named: a bias, or the gradient, has the type of the factors.
    dtype = str(types[0]).lower().removeprefix("c10::")
    key = work.kind, name, dtype, work.shape
    columns.works.append((begin, end, tid, work.flops, columns.operators.setdefault(key, len(columns.operators))))


def _take_operation(
    name: str,
    kind: GpuKind,
    begin: int,
    duration: int,
    arguments: dict[str, Any],
    event: dict[str, Any],
    columns: _Columns,
) -> None:
    grid, block = arguments.get("grid") or (0, 0, 0), arguments.get("block") or (0, 0, 0)
    symbol, copy = 0, 0
    if kind is GpuKind.KERNEL:
        symbol = columns.symbols.setdefault(name, len(columns.symbols))
        if "Collective name" in arguments:
            columns.detail[len(columns.ops) // len(_OP_FIELDS)] = _described(arguments, 0, 0, 0)
    elif kind is GpuKind.MEMCPY:
        direction = re.search(r"[HDP]to[HDP]", name)
        copy = _COPIES.get(direction[0].lower(), 0) if direction else 0
    device = arguments.get("device", event.get("pid"))
    stream = arguments.get("stream", event.get("tid"))
    row = (
        begin, begin + duration, _number(arguments.get("correlation")) & 0xFFFFFFFF,
        _number(device) if (_is_whole(device) or isinstance(device, str)) and str(device).isdigit() else 0,
        _number(arguments.get("context")), _number(stream) & 0xFFFFFFFF, symbol, int(kind), copy,
        _number(arguments.get("bytes")), _number(arguments.get("shared memory")),
        _number(arguments.get("registers per thread")), _number(arguments.get("graph id")),
        _number(arguments.get("graph node id")), *(_number(size) for size in (*grid, *block)),
    )  # fmt: skip
    if len(row) != len(_OP_FIELDS):
        raise ValueError("grid and block have three dimensions")
    columns.ops.extend(array("q", row))


def _described(arguments: dict[str, Any], begin: int, end: int, tid: int) -> CpuRange:
    """A collective from its arguments. NCCL counts what a rank receives of a reduce-scatter, else what it
    sends."""
    op = operation_name(str(arguments.get("Collective name", "")))
    count = arguments.get("Out msg nelems" if op == "ReduceScatter" else "In msg nelems", 0)
    code = _TYPES.get(str(arguments.get("dtype", "")).lower().replace("at::", ""))
    if "In msg nelems" not in arguments and (dims := arguments.get("Input Dims")):
        count, code = _elements(dims, arguments.get("Input type") or [])
    numbers = {key.lower(): value for key, value in arguments.items() if key.lower() in ("seq", "sequence number")}
    peer = arguments.get("Dst Rank" if op == "Send" else "Src Rank" if op == "Recv" else "Root rank", -1)
    return CpuRange(
        op, begin, end, tid,
        group=(str(arguments.get("Process Group Name", "")), str(arguments.get("Process Group Ranks", ""))),
        count=_bounded(count, 1 << 62, 0) if code is not None else 0,
        dtype=UNKNOWN_TYPE if code is None else TORCH_DTYPE + code,
        size=_bounded(arguments.get("Group size", -1), 1 << 31, -1) or -1,
        number=_bounded(numbers["seq"], 1 << 62, -1) if "seq" in numbers else -1,
        peer=_bounded(peer, 1 << 31, -1) if _is_whole(peer) else -1,
    )  # fmt: skip


def _elements(dims: Any, types: Any) -> tuple[int, int | None]:
    """Elements and type of the first tensor, from "Input Dims" and "Input type"."""
    first = dims[0] if isinstance(dims, list) and dims else []
    kind = types[0] if isinstance(types, list) and types else ""
    if not first or not all(_is_whole(size) for size in first):
        return 0, None
    return int(np.prod(first, dtype=np.int64)), _TYPES.get(str(kind).lower())


def _recording(path: Path, place: int, head: dict[str, Any], columns: _Columns) -> Recording:
    distributed = head.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    rank, source = distributed.get("rank"), "trace"
    if not _is_whole(rank) or not 0 <= rank <= HIGHEST_RANK:
        rank, source = rank_in_name(path.name), "file name"
    if rank is None:
        rank, source = place, "order"
    world = distributed.get("world_size")
    world = world if _is_whole(world) and 0 < world <= HIGHEST_RANK else 0
    base = _base_ns(path, head)
    calls = np.frombuffer(columns.calls, np.int64).reshape(-1, len(_CALL_FIELDS))
    rows = np.frombuffer(columns.ops, np.int64).reshape(-1, len(_OP_FIELDS))
    pids, uses = np.unique(calls[:, 5], return_counts=True)
    named = [pid for pid, name in columns.processes.items() if name and "python" in name]
    pid = int(pids[np.argmax(uses)]) if len(pids) else (named or [*columns.processes, 0])[0]
    recording = Recording(
        str(path), "kineto", rank, source, pid & 0xFFFFFFFF, world, _host(path, head),
        columns.processes.get(pid, ""),
    )  # fmt: skip
    recording.facts = kineto_facts(head)
    recording.functions = list(columns.functions)
    recording.symbols = list(columns.symbols)
    recording.works, recording.operators = works_of(columns.works), list(columns.operators)
    for field_name in ("begin_ns", "end_ns"):
        recording.works[field_name] += base
    if columns.works or columns.unknown_work:
        recording.counters["operations_without_shapes"] = columns.without_shapes
    elif columns.without_shapes:
        recording.notes.append("no shapes: with record_shapes=True the profiler's recording gives FLOP/s, too")
    recording.counters["operations_of_unknown_work"] = columns.unknown_work
    recording.counters["attention_taken_for_not_causal"] = columns.guessed_work
    recording.losses["events_unreadable"] = columns.unreadable
    recording.counters["events_of_other_phases"] = columns.other
    recording.counters["durations_below_zero"] = columns.negative

    taken = np.zeros(len(calls), CALL)
    for target, column in (("ts_ns", 0), ("duration_ns", 1), ("correlation", 2), ("tid", 3), ("function", 4)):
        taken[target] = calls[:, column]
    ops = np.zeros(len(rows), GPU_OP)
    fields = dict(zip(_OP_FIELDS, rows.T, strict=True))
    for target, name in (("start_ns", "start"), ("end_ns", "end"), ("shared_dynamic", "shared")):
        ops[target] = fields[name]
    for name in ("correlation", "device", "context", "stream", "name", "kind", "copy", "bytes", "registers", "graph"):
        ops[name] = fields[name]
    ops["graph_node"], ops["pid"] = fields["graph_node"], recording.pid
    ops["grid"], ops["block"] = rows[:, 14:17], rows[:, 17:20]
    # Places in the file, to find a kernel's own words again.
    order = np.argsort(ops["start_ns"], kind="stable")
    where = np.empty(len(order), np.int64)
    where[order] = np.arange(len(order))
    if base:
        for target in ("start_ns", "end_ns"):
            ops[target] += np.uint64(base)
        taken["ts_ns"] += base
    connect(recording, taken, ops)
    take_collectives(
        recording, _outer(columns.ranges, base), {int(where[k]): each for k, each in columns.detail.items()}
    )
    recording.ranges = [(name, begin + base, end + base, tid) for name, begin, end, tid in columns.annotations]
    recording.engine = np.frombuffer(columns.engine, np.int64).reshape(-1, 3) + np.array([base, base, 0])
    recording.marks, recording.marked_by = marks_from(recording.ranges)
    begin, end = recording.span
    if end == 0:
        raise ArgusError(
            f"{path} is a Chrome trace of {columns.events:,} events, but none is a CUDA call, a GPU operation, "
            "a collective or a step", EXPORT_HINT, EXIT_USAGE,
        )  # fmt: skip
    if begin < EPOCH_2000_NS:
        recording.zero = "unknown: times are stored as if they counted from 1970"
    if not len(recording.ops):
        recording.notes.append("no GPU operations")
    return recording


def _host(path: Path, head: dict[str, Any]) -> str:
    """The host that the head names, as add_metadata_json puts it there, or that the file's name or folder does."""
    distributed = head.get("distributedInfo")
    for fields in (head, distributed if isinstance(distributed, dict) else {}):
        for key in _HOST_KEYS:
            if isinstance(name := fields.get(key), str) and name.strip():
                return name.strip()[:256]
    return host_in_path(str(path.absolute())) or UNKNOWN_HOST


def _base_ns(path: Path, head: dict[str, Any]) -> int:
    """The trace's time 0, ns since 1970; 0: the trace does not have it.

    Raises:
        ArgusError: The value is not a time.
    """
    try:
        base = _number(head.get("baseTimeNanoseconds"))
        if 0 <= base <= MOST_NS:
            return base
    except (ValueError, TypeError, ArithmeticError):
        pass
    raise _not_json(path, f"baseTimeNanoseconds is {str(head['baseTimeNanoseconds'])[:40]}")


def _outer(ranges: list[tuple[str, CpuRange]], base: int) -> list[CpuRange]:
    """Collectives of ``record_param_comms`` and ``nccl:`` ranges. The latter lie in the former, which have the
    arguments in newer versions; in older ones the latter have the name alone."""
    out: list[CpuRange] = []
    for name, cpu_range in sorted(ranges, key=lambda each: (each[1].tid, each[1].begin_ns, -each[1].end_ns)):
        end = cpu_range.end_ns + base
        op = cpu_range.op or (operation_name(name) if name.startswith("nccl:") else "")
        around = out[-1] if out and out[-1].tid == cpu_range.tid and out[-1].end_ns >= end else None
        if around is None:
            out.append(replace(cpu_range, op=op, begin_ns=cpu_range.begin_ns + base, end_ns=end))
        elif op and not around.op:
            detailed = around if around.count or around.group[0] else cpu_range
            out[-1] = replace(detailed, op=op, begin_ns=around.begin_ns, end_ns=around.end_ns)
    return out
