"""What the reader process answers: whoever has taken it over by a file may have it say anything."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from argus.capture.process import c_library, cupti, environment, instructions, nccl, pytorch, targets
from argus.capture.python import interpreter
from argus.capture.reader import reader
from argus.capture.reader.reader import Answer, Reader
from argus.capture.reader.remote import RemotePython, RemoteSymbols
from argus.model import records
from tests.fuzz.harness import Bytes

ALLOWED = ()
CODE = ["argus.capture.reader.reader", "argus.capture.reader.remote", "argus.capture.process.targets"]
PID = 4242
LAYOUT = next(each.group for each in pytorch.LAYOUTS.values() if each.group is not None)
STACK = ["complete", "complete", [["python", "f", "/a.py", 7], ["native", "g", "", 0], ["native", "_ZN1aE", "", 0]]]
LIBRARY = {
    "path": "/usr/lib/libnccl.so.2", "device": "08:01", "inode": 7, "on_overlay": False, "deleted": False,
    "text_bytes": 4096, "roles": ["libnccl"],
    "status": [0o100644, 7, 1, 1, 0, 0, 4096, 1, 1], "offsets": {"ncclAllReduce": 4096}, "rank_offset": 64,
    "layout": [8, 16, [1, 2, 3]],
}  # fmt: skip
ANSWERS: dict[str, dict[str, Any]] = {
    "interpreter": {"found": {"version": [3, 11, 2], "state": "on", "path": "/p", "settled": True}},
    "facts": {"facts": {"nccl.version": "2.21"}},
    "libraries": {"libraries": [LIBRARY], "unread": 0, "entries": []},
    "c_library": {"found": [4096, 8192, 12288]},
    "cupti": {"paths": ["/usr/lib/libcupti.so.13"]},
    "helper": {"where": "7f00-7f01"},
    "group": {"found": ["name", 0, 2]},
    "place": {"found": [1, 0, 2]},
    "probed": {"found": True},
    "instructions": {"heads": ["55", "c3"], "places": [[[16, "55", 0, [0, 1]], [17, "90", 1, [0]]]]},
    "texts": {"lengths": [4], "found": [4]},
    "refresh": {"moved": True, "grows": False},
    "find_python": {"found": {"version": [3, 11, 2], "state": "on", "path": "/p", "settled": True}},
    "resolve": {"stacks": [[STACK, [16, 32]]]},
    "blocked": {"found": [True, 7, STACK]},
    "threads": {},
    "collections": {"counts": [1, 2, 3]},
    "gil_holder": {"holder": 7},
}
"""What the reader says to each question, if it is one."""
ODD: list[Any] = [
    None, True, 0, -1, 7, 1 << 32, 1 << 64, 10**30, 0.5, float("inf"), float("nan"), "", "x", "\0", "\ud800",
    "/" * 70_000, [], {}, [[]], [None], ["a", 1], {"a": {}}, [1, 2], [1, 2, 3], [0] * 70_000, "8:1", "complete",
]  # fmt: skip
MORE = [{}, {"error": [2, "there is none"]}, {"failed": "no memory"}, {"left_out": [["mappings_cut", 3]]},
        {"missed": ["08:01"]}, {"counters": {"a": 1}}]  # fmt: skip


class _Liar(Reader):
    """One that is there, and says what it is told to."""

    def __init__(self, input_: Bytes) -> None:
        super().__init__()
        self._nursery, self._sock, self._pid = object(), object(), os.getpid()  # type: ignore[assignment]
        self._input = input_

    def _exchange(self, request: dict[str, Any], data: bytes, places: Sequence[int] = ()) -> Answer:
        if request["op"] in ("open", "close", "learn"):
            return Answer({}, b"", [])
        take = self._input
        what = copy.deepcopy({**ANSWERS.get(request["op"], {}), **MORE[take.number() % len(MORE)]})
        for _ in range(take.number() % 4):
            _spoil(what, take)
        more = take.take(take.number())[: take.number()]
        fds = [os.open("/dev/null", os.O_PATH)] if take.number() % 8 else []
        return Answer(what, more, fds)

    def _end(self, *_: Any) -> None:
        pass  # the next one lies as well

    def close(self) -> None:
        pass


def _spoil(what: Any, take: Bytes) -> None:
    """Puts something odd in a place of an answer."""
    while isinstance(what, list | dict) and what:
        keys = list(what) if isinstance(what, dict) else list(range(len(what)))
        key = keys[take.number() % len(keys)]
        if not isinstance(what[key], list | dict) or not what[key] or take.number() % 2:
            what[key] = copy.deepcopy(ODD[take.number() % len(ODD)])
            if take.number() % 16 == 0:
                del what[key]
            return
        what = what[key]


def _open_helper() -> None:
    _, place = cupti.open_helper(PID)
    if place >= 0:
        os.close(place)


def _look_at_functions() -> list[instructions.Place]:
    library: Any = SimpleNamespace(pid=PID, file=SimpleNamespace(fd=0, device="08:01"))
    code = instructions.RemoteCode(library)
    code.look_ahead([0, 16])
    found = code.places(16, throws=False)
    assert found[0].offset == 16
    assert all(0 <= each.offset - 16 < instructions.LINE_BYTES for each in found)
    assert all(len(each) <= instructions.LONGEST for each in (code.at(0), *(one.code for one in found)))
    return found


def _questions(symbols: RemoteSymbols) -> list[Callable[[], object]]:
    no_frames, address = np.empty(0, records.FRAME), np.array([1 << 40], np.uint64)
    python = RemotePython(symbols)
    return [
        lambda: interpreter.find_interpreter(PID),
        lambda: environment.read_facts(PID),
        lambda: targets.find_libraries(PID),
        lambda: c_library.find_functions(PID),
        lambda: cupti.candidates(PID),
        _open_helper,
        lambda: pytorch.read_group(PID, 1 << 40, LAYOUT),
        lambda: nccl.read_place(PID, 1 << 40, 64),
        lambda: instructions.has_probes(PID, ("08:01", 7), [4096]),
        _look_at_functions,
        lambda: reader.proc_file(PID, "environ"),
        lambda: reader.maps(PID),
        symbols.refresh,
        symbols.find_python,
        lambda: symbols.assemble(no_frames, address, 0),
        lambda: symbols.blocked(PID),
        python.thread_states,
        python.collections,
        python.gil_holder,
    ]


def _texts(found: object) -> Iterator[str]:
    """What of an answer is stored or shown."""
    if isinstance(found, str):
        yield found
    elif isinstance(found, dict):
        yield from _texts([*found, *found.values()])
    elif isinstance(found, tuple | list):
        for each in found:
            yield from _texts(each)
    elif dataclasses.is_dataclass(found):
        yield from _texts([getattr(found, one.name) for one in dataclasses.fields(found)])


def seeds() -> list[bytes]:
    return [bytes(8 * 20), bytes([0, 1, 1, 0, 16, 1, 0, 0]) * 20, bytes(range(256))]


def run(data: bytes) -> None:
    with mock.patch.object(reader, "shared", _Liar(Bytes(data))):
        symbols = RemoteSymbols(PID)
        for ask in _questions(symbols):
            reader.shared._strikes.clear()
            with contextlib.suppress(OSError):
                for found in _texts(ask()):
                    assert len(found) <= 1 << 16, "names of files may be no Unicode, but not of any length"
