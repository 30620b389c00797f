"""ELF files of some hundred bytes, made by hand: the smallest that have each table that Argus reads."""

from __future__ import annotations

import lzma
import struct

BASE = 0x10000
"""Virtual address of the file's beginning."""
FUNCTIONS = (("cuLaunchKernel", 0x1000, 32), ("ncclCommUserRank", 0x1020, 48), ("_Z3fooILi3EEvT_", 0x1050, 0))


def _symbols(functions: tuple[tuple[str, int, int], ...], section: int) -> tuple[bytes, bytes]:
    """A table of symbols and its strings."""
    strings, rows = b"\0", [bytes(24)]
    for name, address, size in functions:
        rows.append(struct.pack("<IBBHQQ", len(strings), 0x12, 0, section, BASE + address, size))
        strings += name.encode() + b"\0"
    return b"".join(rows), strings


def _unwind(at: int, frames_at: int) -> tuple[bytes, bytes]:
    """``.eh_frame_hdr`` at ``at`` and ``.eh_frame`` at ``frames_at``, of all functions."""
    frames, rows = struct.pack("<II", 12, 0) + b"\x01zR\0\x01\x78\x10\x01", []
    for _, address, size in FUNCTIONS:
        here = len(frames)
        begin = BASE + address - (BASE + frames_at + here + 8)
        frames += struct.pack("<IIii", 16, here + 4, begin, max(size, 16)) + bytes(4)
        rows.append(struct.pack("<ii", address - at, frames_at + here - at))
    head = bytes((1, 0x1B, 0x03, 0x3B)) + struct.pack("<iI", frames_at - at - 4, len(rows))
    return head + b"".join(rows), frames


def small_elf(*, stripped: bool = False, debug: str = "") -> bytes:
    """A file.

    Args:
        stripped: It has no ``.symtab``, but unwind tables.
        debug: ``link``: with ``.gnu_debuglink``; ``data``: with ``.gnu_debugdata``.
    """
    build_id = struct.pack("<III", 4, 20, 3) + b"GNU\0" + bytes(range(20))
    dynamic, dynamic_names = _symbols(FUNCTIONS[:2], 1)
    static, static_names = _symbols(FUNCTIONS, 1)
    text = bytes(0x1080)
    unwind_at, frames_at = 0x2000, 0x2100
    header, frames = _unwind(unwind_at, frames_at)
    places = [
        (b".text", 1, 0x1000, 0x80, 0),
        (b".dynsym", 11, None, dynamic, 3),
        (b".dynstr", 3, None, dynamic_names, 0),
        (b".note.gnu.build-id", 7, None, build_id, 0),
    ]
    if stripped:
        places += [(b".eh_frame_hdr", 1, unwind_at, len(header), 0), (b".eh_frame", 1, frames_at, len(frames), 0)]
    else:
        places += [(b".symtab", 2, None, static, 6), (b".strtab", 3, None, static_names, 0)]
    if debug == "link":
        places.append((b".gnu_debuglink", 1, None, b"hidden.debug\0\0\0\0" + struct.pack("<I", 0x1234), 0))
    elif debug == "data":
        inside = lzma.compress(small_elf(), lzma.FORMAT_XZ, preset=0)
        places.append((b".gnu_debugdata", 1, None, inside, 0))
    body = bytearray(max(0x2200, len(text)))
    body[unwind_at : unwind_at + len(header)] = header
    body[frames_at : frames_at + len(frames)] = frames
    names, rows, note_at = b"\0", [bytes(64)], 0
    for name, kind, at, content, link in [*places, (b".shstrtab", 3, None, b"", 0)]:
        name_at = len(names)
        names += name + b"\0"
        if name == b".shstrtab":
            content = names
        size = content if isinstance(content, int) else len(content)
        if at is None:
            at = len(body)
            assert isinstance(content, bytes)
            body += content + bytes(-len(content) % 8)
        note_at = at if kind == 7 else note_at
        rows.append(struct.pack("<IIQQQQIIQQ", name_at, kind, 2, BASE + at, at, size, link, 0, 8, 24))
    sections_at = len(body)
    body += b"".join(rows)
    segments = [(1, 5, 0, BASE, len(body)), (1, 6, 0, BASE + 0x100000, 4096), (4, 4, note_at, BASE + note_at, 36)]
    table = b"".join(
        struct.pack("<IIQQQQQQ", kind, flags, at, address, address, size, size, 4096 if kind == 1 else 4)
        for kind, flags, at, address, size in segments
    )
    head = b"\x7fELF\x02\x01\x01" + bytes(9)
    head += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, sections_at, 0, 64, 56, len(segments), 64, len(rows),
                        len(rows) - 1)  # fmt: skip
    body[: len(head) + len(table)] = head + table
    return bytes(body)
