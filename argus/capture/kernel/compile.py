"""Compiles the BPF programs with bcc, once: what comes out is kept on disk for the next start.

LLVM takes 2 s of a CPU for each of the two modules, and 120 MB that it never gives back. So it runs in a process of its
own, and only where ``/var/cache/argus`` does not have its answer for just these sources, flags, bcc and kernel
(``scripts/bench start``). This module imports no numpy: the child does nothing but compile.

Run as a program it reads a request from standard input and writes the answer to standard output, both JSON.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import json
import os
import platform
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from argus.capture.kernel import bcc
from argus.system import child, disk_cache
from argus.system.resources import resource_dir
from argus.system.syscalls import bpf

FORMAT = 1
KIND = "bpf"
KEPT = 16
"""Answers that are kept, newest first: a few sets of options of a few versions. Each has some 100 KB."""
_TIME_LIMIT_S = 300
INSTRUCTION_BYTES = 8
LOAD_64 = 0x18
"""``BPF_LD | BPF_IMM | BPF_DW``: the only instruction that can name a map (include/uapi/linux/bpf.h)."""
BY_DESCRIPTOR = 1
"""``BPF_PSEUDO_MAP_FD``: its source register then."""
_MAP_INFO = struct.Struct("<6I16s")
"""The beginning of ``struct bpf_map_info``: type, id, key size, value size, entries, flags, name."""
_BPF_OBJ_GET_INFO_BY_FD = 15


class CompileError(Exception):
    """Messages of clang or bcc."""


@dataclass(frozen=True)
class MapSpec:
    """What a map is made of: as in ``BPF_MAP_CREATE``."""

    name: str
    kind: int
    key_bytes: int
    value_bytes: int
    entries: int
    flags: int


@dataclass(frozen=True)
class Compiled:
    """Programs without a kernel.

    Attributes:
        maps: Those that the programs use, and those that only user space does.
        programs: Name -> instructions. One that loads the address of a map has the map's place in ``maps`` there.
        license: As the programs declare it.
        seconds: What compiling took. 0: nothing was compiled.
    """

    maps: tuple[MapSpec, ...]
    programs: dict[str, bytes]
    license: str
    seconds: float = 0.0


def compiled(text: str, flags: list[str]) -> Compiled:
    """Sources as programs and maps, from disk if they were compiled before.

    Args:
        text: C, as bcc takes it.
        flags: For clang. The folder of the BPF sources is added.

    Raises:
        CompileError: They do not compile.
        ArgusError: bcc is not installed.
    """
    where = disk_cache.folder(KIND)
    path = None if where is None else where / f"{_key(text, flags)}.json"
    if path is not None:
        cached = _read(path)
        if cached is not None:
            return cached
    answer = _ask_child(text, flags)
    if path is not None:
        disk_cache.keep(path, json.dumps(answer).encode(), KEPT)
    return _understood(answer)


def _key(text: str, flags: list[str]) -> str:
    """A name for all that an answer depends on. bcc asks the running kernel for some of it."""
    package = bcc.find()
    library = package / "libbcc.py" if package else None
    seen = hashlib.sha256()
    words = [str(FORMAT), platform.machine(), os.environ.get("ARCH", ""), os.uname().release, os.uname().version]
    for path in _headers():
        words += [path.name, path.read_text()]
    for path in [*([library] if library else []), *_shared_libraries()]:
        status = path.stat()
        words += [str(path), str(status.st_size), str(status.st_mtime_ns)]
    for word in [*words, *flags, text]:
        seen.update(f"{len(word)}:{word}".encode())
    return seen.hexdigest()[:32]


def _headers() -> list[Path]:
    return sorted(path for path in resource_dir("bpf").rglob("*.h") if path.is_file())


def _shared_libraries() -> list[Path]:
    """libbcc, wherever the loader has it: an upgrade of it compiles otherwise."""
    places = ("/usr/lib/*-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib", "/usr/local/lib64")
    return sorted(path for place in places for path in Path("/").glob(f"{place[1:]}/libbcc.so.0"))


# --- kept on disk


def _read(path: Path) -> Compiled | None:
    """What was kept, if it can be believed. Anything else is no error: it is compiled again."""
    body = disk_cache.read(path)
    if body is None:
        return None
    try:
        cached = _understood(json.loads(body))
    except (ValueError, KeyError, TypeError):
        return None
    return Compiled(cached.maps, cached.programs, cached.license)


def _understood(answer: dict[str, Any]) -> Compiled:
    return Compiled(
        tuple(MapSpec(**spec) for spec in answer["maps"]),
        {name: base64.b64decode(code, validate=True) for name, code in answer["programs"].items()},
        answer["license"],
        answer["seconds"],
    )


# --- with bcc


def _ask_child(text: str, flags: list[str]) -> dict[str, Any]:
    bcc.require()
    request = {"text": text, "flags": [f"-I{resource_dir('bpf')}", *flags]}
    try:
        answer: dict[str, Any] = child.ask("argus.capture.kernel.compile", request, _TIME_LIMIT_S)
    except child.ChildError as failure:
        raise CompileError(str(failure)) from failure
    return answer


def _map_info(fd: int) -> tuple[int, int, int, int, int]:
    """Kind, key bytes, value bytes, entries and flags of a map."""
    info = ctypes.create_string_buffer(128)
    bpf(_BPF_OBJ_GET_INFO_BY_FD, struct.pack("<IIQ", fd, len(info), ctypes.addressof(info)))
    kind, _, key, value, entries, flags, _ = _MAP_INFO.unpack_from(info.raw)
    return kind, key, value, entries, flags


def _maps_of(library: Any, module: int) -> Iterator[tuple[int, MapSpec]]:
    library.bpf_num_tables.restype = ctypes.c_size_t
    library.bpf_num_tables.argtypes = [ctypes.c_void_p]
    library.bpf_table_name.restype = ctypes.c_char_p
    library.bpf_table_fd_id.restype = ctypes.c_int
    for function in (library.bpf_table_name, library.bpf_table_fd_id):
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    for number in range(library.bpf_num_tables(module)):
        fd = library.bpf_table_fd_id(module, number)
        yield fd, MapSpec(library.bpf_table_name(module, number).decode(), *_map_info(fd))


def _with_places(code: bytes, places: dict[int, int]) -> bytes:
    """Instructions with maps' places instead of the descriptors that bcc wrote into them."""
    out = bytearray(code)
    for at in range(0, len(code), INSTRUCTION_BYTES):
        opcode, registers, _, value = struct.unpack_from("<BBhi", code, at)
        source = registers >> 4
        if opcode == LOAD_64 and source:
            if source != BY_DESCRIPTOR:
                raise CompileError(f"error: instruction {at // INSTRUCTION_BYTES} refers to {source}, not to a map")
            struct.pack_into("<i", out, at + 4, places[value])
    return bytes(out)


def _compile(text: str, flags: list[str]) -> dict[str, Any]:
    begin = time.monotonic()
    module = bcc.load()
    made = module.BPF(text=text.encode(), cflags=flags)
    library = sys.modules["bcc"].lib
    maps = list(_maps_of(library, made.module))
    places = {fd: place for place, (fd, _) in enumerate(maps)}
    names = [library.bpf_function_name(made.module, n).decode() for n in range(library.bpf_num_functions(made.module))]
    return {
        "maps": [asdict(spec) for _, spec in maps],
        "programs": {
            name: base64.b64encode(_with_places(made.dump_func(name.encode()), places)).decode() for name in names
        },
        "license": library.bpf_module_license(made.module).decode(),
        "seconds": time.monotonic() - begin,
    }


if __name__ == "__main__":
    raise SystemExit(child.serve(lambda request: _compile(request["text"], request["flags"])))
