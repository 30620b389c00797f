"""Where libraries have the functions that Argus probes: read from their symbol tables once, and kept on disk.

libtorch_cpu has half a million symbols, with 80 MB of names. An entry says in which rows of the tables the functions
are that were looked for, and each row is read again from the library before it is used: whatever an entry says, a probe
is put only where the library itself has that function. What an entry cannot prove is that nothing was left out, and
anybody can make a file of any build id and layout: so an entry is for one file alone, by device and inode, and for one
version of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from argus.capture.process.elf import Beyond, Elf, NotElf, Place, Source, SymbolFile
from argus.system import disk_cache

FORMAT = 3
KIND = "symbols"
KEPT = 256
"""Entries that are kept, newest first, of some KB each: a node's images have a few large libraries each."""
LARGE_BYTES = 1 << 20
"""Tables of names smaller than this are read in less time than an entry."""


on_slow: Callable[[str], None] | None = None
"""Called with the path of a library before its tables are read, if that takes long."""


@dataclass(frozen=True)
class Functions:
    """Functions of a file.

    Attributes:
        offsets: File offset of each that was found, by symbol.
        text_bytes: Size of the file's code.
        kept: Whether an entry of the cache had where they are.
        places: Which row of the file's tables says so, for ``confirmed``.
    """

    offsets: dict[str, int]
    text_bytes: int
    kept: bool = False
    places: dict[str, Place] = field(default_factory=dict)


def confirmed(path: Source, offsets: dict[str, int], places: dict[str, Place]) -> bool:
    """Whether a file itself says that these functions are there: probes elsewhere would end who runs it. Rows are read,
    no tables."""
    try:
        file = SymbolFile(path)
        return all(name in places and file.function(name, places[name]) == offset for name, offset in offsets.items())
    except (NotElf, OSError, ValueError, IndexError, OverflowError):
        return False


def functions(path: Source, names: Collection[str], shown: str = "", owner: str = "") -> Functions:
    """Looks for functions in a library.

    Args:
        path: The library.
        names: The functions' symbols.
        shown: Its path for people.
        owner: For whose processes alone an entry is (``mapped.lasting``); empty: for all.

    Raises:
        NotElf: It is no 64-bit little-endian ELF file.
        OSError: It cannot be read.
    """
    file = SymbolFile(path)
    where = disk_cache.folder(KIND) if file.name_bytes >= LARGE_BYTES else None
    entry = None if where is None else where / f"{_key(file, names, owner)}.json"
    if entry is not None and (verified := _verified(file, entry, names)) is not None:
        return Functions(verified[0], file.text_bytes, kept=True, places=verified[1])
    if file.name_bytes >= LARGE_BYTES and on_slow is not None:
        on_slow(shown or str(path))
    elf = Elf(file.file)
    located = elf.located(names)
    places = {name: place for name, (place, _) in located.items()}
    read = Functions({name: offset for name, (_, offset) in located.items()}, elf.text_bytes, places=places)
    # Not, if it was written to meanwhile: the entry's name would be that of its former version.
    if entry is not None and entry.stem == _key(file, names, owner):
        disk_cache.keep(entry, json.dumps({"places": places}).encode(), KEPT)
    return read


def _key(file: SymbolFile, names: Collection[str], owner: str) -> str:
    """A name for all that an entry depends on."""
    status = file.file.status_now()
    version = (status.st_dev, status.st_ino, status.st_size, status.st_uid, status.st_mtime_ns, status.st_ctime_ns)
    seen = hashlib.sha256(file.layout)
    for word in [str(FORMAT), owner, file.build_id, *map(str, version), *sorted(names)]:
        seen.update(f"{len(word)}:{word}".encode())
    return seen.hexdigest()[:32]


def _verified(file: SymbolFile, entry: Path, names: Collection[str]) -> tuple[dict[str, int], dict[str, Place]] | None:
    """What an entry says, if the library says so too, and which rows do; None: there is no such entry."""
    body = disk_cache.read(entry)
    if body is None:
        return None
    try:
        places: dict[str, Place] = {
            str(name): (int(section), int(row)) for name, (section, row) in json.loads(body)["places"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if not places.keys() <= set(names):
        return None
    offsets: dict[str, int] = {}
    for name, place in places.items():
        try:
            offset = file.function(name, place)
        except (ValueError, IndexError, OverflowError) as reason:
            raise Beyond(f"damaged: {reason}") from reason
        if offset is None:
            return None
        offsets[name] = offset
    return offsets, places
