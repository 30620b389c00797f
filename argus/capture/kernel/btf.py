"""Reads types of the running kernel from its BTF: where a field lies in a struct, what a tracepoint passes.

Format: Documentation/bpf/btf.rst of the Linux tree. A header, a section of type records of varying length, and a
section of names.
"""

from __future__ import annotations

import struct
from array import array
from functools import cache
from pathlib import Path

import numpy as np

VMLINUX = Path("/sys/kernel/btf/vmlinux")

_MAGIC = 0xEB9F
# BTF_KIND_*, include/uapi/linux/btf.h
_PTR, _STRUCT, _UNION, _TYPEDEF, _FUNC_PROTO = 2, 4, 5, 8, 13
_MODIFIERS = frozenset({_TYPEDEF, 9, 10, 11, 18})  # typedef, volatile, const, restrict, type tag
_HEADER_WORDS = 3
# Words that follow a record's header: (a fixed number, words a member).
_TAIL = {
    1: (1, 0),
    3: (3, 0),
    4: (0, 3),
    5: (0, 3),
    6: (0, 2),
    13: (0, 2),
    14: (1, 0),
    15: (0, 3),
    17: (1, 0),
    19: (0, 3),
}
_KINDS = 32


def why_unreadable(path: Path, failure: OSError | BtfError) -> str:
    """Why the kernel's types cannot be had, as a feature's state: "off: why"."""
    if isinstance(failure, FileNotFoundError):
        return "off: the kernel has no BTF (CONFIG_DEBUG_INFO_BTF)"
    if isinstance(failure, BtfError):
        return f"off: the kernel's BTF is not understood: {failure}"
    return f"off: {path} cannot be read: {failure.strerror}"


class BtfError(Exception):
    """The types are not in a form that is understood, or something asked for is not among them."""


class Btf:
    """One BTF file.

    Args:
        data: Its bytes, as in ``/sys/kernel/btf/vmlinux``.

    Raises:
        BtfError: It is not BTF, or of a later form.
    """

    def __init__(self, data: bytes) -> None:
        if len(data) < 24:
            raise BtfError("too short to be BTF")
        magic, version, _, header, types_at, types_bytes, names_at, names_bytes = struct.unpack_from("<HBBIIIII", data)
        if magic != _MAGIC or version != 1:
            raise BtfError(f"not BTF of version 1 (magic {magic:#x}, version {version})")
        if header + max(types_at + types_bytes, names_at + names_bytes) > len(data) or types_bytes % 4:
            raise BtfError("cut off")
        self._names = data[header + names_at : header + names_at + names_bytes]
        self._words = np.frombuffer(data, "<u4", types_bytes // 4, header + types_at)
        self._starts = self._find_starts()

    def _find_starts(self) -> array[int]:
        """Where each type's record begins, in words; index: type id - 1.

        The length of a record is known only from the record, so they must be followed one by one: what each word would
        make the length if it were a header's is worked out for all words at once, which leaves one addition a type.
        """
        words = self._words
        info = np.append(words[1:], 0)
        fixed = np.zeros(_KINDS, np.int64)
        each = np.zeros(_KINDS, np.int64)
        for number, (some, per_member) in _TAIL.items():
            fixed[number], each[number] = some, per_member
        kinds = info >> 24 & 31
        lengths = (_HEADER_WORDS + fixed[kinds] + each[kinds] * (info & 0xFFFF)).tolist()
        starts = array("I")
        at, end = 0, len(words)
        while at < end:
            starts.append(at)
            at += lengths[at]
        if at != end:
            raise BtfError("its last type is cut off")
        return starts

    def _kind(self, type_id: int) -> int:
        return int(self._words[self._starts[type_id - 1] + 1]) >> 24 & 31

    def _name(self, offset: int) -> str:
        return self._names[offset : self._names.index(b"\0", offset)].decode()

    def _find(self, name: str, kind: int) -> int:
        """Type id. The names hold each string once."""
        at = self._names.find(b"\0" + name.encode() + b"\0") + 1
        if at:
            starts = np.asarray(self._starts)
            places = np.flatnonzero((self._words[starts] == at) & ((self._words[starts + 1] >> 24 & 31) == kind))
            if len(places):
                return int(places[0]) + 1
        raise BtfError(f"no type {name}")

    def offset(self, struct_name: str, member: str) -> int:
        """Where a member lies in a struct, in bytes; members of its anonymous structs and unions included.

        Raises:
            BtfError: There is no such struct or member, or it is a bit field.
        """
        bits = self._member_bits(self._find(struct_name, _STRUCT), member)
        if bits is None:
            raise BtfError(f"struct {struct_name} has no {member}")
        if bits % 8:
            raise BtfError(f"{member} of struct {struct_name} is a bit field")
        return bits // 8

    def _member_bits(self, type_id: int, member: str) -> int | None:
        at = self._starts[type_id - 1]
        info = int(self._words[at + 1])
        members = self._words[at + _HEADER_WORDS : at + _HEADER_WORDS + 3 * (info & 0xFFFF)].reshape(-1, 3).tolist()
        bit_mask = 0xFFFFFF if info >> 31 else 0xFFFFFFFF
        for name, inner, offset in members:
            if name:
                if self._name(name) == member:
                    return int(offset & bit_mask)
            elif self._kind(inner) in (_STRUCT, _UNION):
                inside = self._member_bits(inner, member)
                if inside is not None:
                    return int(offset & bit_mask) + inside
        return None

    def tracepoint_arguments(self, tracepoint: str) -> int:
        """How many arguments a raw tracepoint passes.

        Source: ``btf_trace_<name>``, the type of its probe function, whose first argument is the probe's own.

        Raises:
            BtfError: There is no such tracepoint.
        """
        type_id = self._find(f"btf_trace_{tracepoint}", _TYPEDEF)
        while self._kind(type_id) in _MODIFIERS or self._kind(type_id) == _PTR:
            type_id = int(self._words[self._starts[type_id - 1] + 2])
        if self._kind(type_id) != _FUNC_PROTO:
            raise BtfError(f"btf_trace_{tracepoint} is not a function")
        return (int(self._words[self._starts[type_id - 1] + 1]) & 0xFFFF) - 1


def forget() -> None:
    """Gives back what ``kernel`` keeps: some 10 MB. It may be asked for again."""
    kernel.cache_clear()


@cache
def kernel(path: Path = VMLINUX) -> Btf:
    """The running kernel's types; read once a process.

    Raises:
        OSError: The kernel has none (CONFIG_DEBUG_INFO_BTF), or they may not be read.
        BtfError: Not understood.
    """
    return Btf(path.read_bytes())
