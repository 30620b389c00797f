"""Where CPython keeps threads, frames and code objects: one table a version, data only.

Every number is an offset in bytes on a 64-bit little-endian machine, of a release build with the GIL.
``tests/unit/capture/python/test_layouts.py`` compiles the headers of every CPython it finds and compares. From 3.13 on
CPython publishes most of them itself (``_Py_DebugOffsets``); the process's own numbers are then used, and the table
here serves for what they leave out.

Sources (files of CPython's repository, read at the tags v3.8.18, v3.9.18, v3.10.13, v3.11.7, v3.12.1, v3.13.0 and as
Debian ships 3.11.2, 3.13.18, 3.14.10, 3.15.2):

* runtime, interpreter: ``Include/internal/pycore_runtime.h``, ``pycore_interp.h`` (3.8: ``pycore_pystate.h``; 3.14:
  ``pycore_runtime_structs.h``, ``pycore_interp_structs.h``);
* thread state: ``Include/cpython/pystate.h`` (3.8: ``Include/pystate.h`` with it), cframe: ``struct _cframe``,
  ``struct _PyCFrame`` there;
* frame: ``Include/frameobject.h``, 3.9 ``Include/cpython/frameobject.h``, 3.11 ``Include/internal/pycore_frame.h``,
  3.14 ``pycore_interpframe_structs.h``;
* code object: ``Include/code.h``, 3.9 ``Include/cpython/code.h``;
* GIL: ``Include/internal/pycore_gil.h``, where it lies: ``pycore_ceval.h`` / ``pycore_interp.h``;
* garbage collector: ``Include/internal/pycore_gc.h`` (3.8: ``pycore_pymem.h``; 3.14: ``pycore_interp_structs.h``);
* strings: ``Include/cpython/unicodeobject.h``; bytes: ``Include/cpython/bytesobject.h``;
* ``_Py_DebugOffsets``: ``pycore_runtime.h``, 3.14 ``pycore_debug_offsets.h``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from argus.model.records import NO_OFFSET


@dataclass(frozen=True)
class Layout:
    """The structures of one minor version of CPython.

    Attributes:
        interp_head, interp_next, interp_id: ``_PyRuntime.interpreters.head``; in an interpreter: the next one, its id
            (the main one's is 0).
        threads_head, thread_next, thread_id, native_thread_id, thread_frame, cframe_frame, frame_code, frame_previous,
            frame_instr, frame_owner, code_*, owner_entry*, entry_is_frame, instr_shift, code_tag_bits: As
            ``struct argus_python`` has them.
        code_version: In a code object: a number that no two code objects of a process share; NO_OFFSET: none.
        gil: In an interpreter: the pointer to its GIL (3.12); NO_OFFSET: ``gil_holder`` and ``gil_locked`` are in
            ``_PyRuntime``, else in the GIL.
        gil_interval: Beside them: the switch interval in microseconds, to check the place by.
        gc_in_runtime: Whether the collector's state lies in ``_PyRuntime`` or in the interpreter.
        gc: The collector's state; the other ``gc_*`` are offsets in it.
        gc_generations, gc_generation0: The list heads and the pointer to the first, to check the place by; NO_OFFSET:
            not needed, the process gives the place itself.
        gc_statistics: Number of collections for each generation.
        gc_collections: Places of the three numbers: from ``gc_statistics``, or from what it points to (3.15).
        unicode_length, unicode_state: In a string.
        unicode_ascii, unicode_compact: Where the characters of an ASCII, another compact string begin.
        unicode_kind_shift: First bit of the kind in the state; compact and ASCII follow its three bits.
        bytes_size, bytes_data: In a bytes object.
        line_table: Which of the three formats: "lnotab", "pairs" (3.10), "locations" (3.11).
    """

    interp_head: int
    interp_next: int
    interp_id: int
    threads_head: int
    thread_next: int
    thread_id: int
    native_thread_id: int
    thread_frame: int
    cframe_frame: int
    frame_code: int
    frame_previous: int
    frame_instr: int
    frame_owner: int
    code_firstlineno: int
    code_filename: int
    code_name: int
    code_qualname: int
    code_linetable: int
    code_adaptive: int
    code_version: int
    owner_entry: int
    owner_entry_2: int
    entry_is_frame: int
    instr_shift: int
    code_tag_bits: int
    gil: int
    gil_holder: int
    gil_locked: int
    gil_interval: int
    gc_in_runtime: bool
    gc: int
    gc_collecting: int
    gc_generations: int
    gc_generation0: int
    gc_statistics: int
    gc_collections: tuple[int, int, int]
    gc_statistics_is_pointer: bool
    unicode_length: int
    unicode_state: int
    unicode_ascii: int
    unicode_compact: int
    unicode_kind_shift: int
    bytes_size: int
    bytes_data: int
    line_table: str


_3_8 = Layout(
    interp_head=32,
    interp_next=0,
    interp_id=16,
    threads_head=8,
    thread_next=8,
    thread_id=176,
    native_thread_id=NO_OFFSET,
    thread_frame=24,
    cframe_frame=NO_OFFSET,
    frame_code=32,
    frame_previous=24,
    frame_instr=104,
    frame_owner=NO_OFFSET,
    code_firstlineno=40,
    code_filename=104,
    code_name=112,
    code_qualname=NO_OFFSET,
    code_linetable=120,
    code_adaptive=NO_OFFSET,
    code_version=NO_OFFSET,
    owner_entry=0,
    owner_entry_2=0,
    entry_is_frame=0,
    instr_shift=0,
    code_tag_bits=0,
    gil=NO_OFFSET,
    gil_holder=1160,
    gil_locked=1168,
    gil_interval=1152,
    gc_in_runtime=True,
    gc=344,
    gc_collecting=200,
    gc_generations=24,
    gc_generation0=96,
    gc_statistics=128,
    gc_collections=(0, 24, 48),
    gc_statistics_is_pointer=False,
    unicode_length=16,
    unicode_state=32,
    unicode_ascii=48,
    unicode_compact=72,
    unicode_kind_shift=2,
    bytes_size=16,
    bytes_data=32,
    line_table="lnotab",
)

# The collector moved into the interpreter; the GIL's place in _PyRuntime changed.
_3_9 = replace(_3_8, interp_id=24, gil_holder=360, gil_locked=368, gil_interval=352, gc_in_runtime=False, gc=616)

# f_lasti counts instructions of two bytes; co_linetable replaced co_lnotab.
_3_10 = replace(_3_9, frame_instr=96, instr_shift=1, line_table="pairs")

# Frames left the heap; is_entry marks the frame that C code called in.
_3_11 = replace(
    _3_10,
    interp_head=40,
    interp_id=48,
    threads_head=16,
    thread_id=152,
    native_thread_id=160,
    thread_frame=56,
    cframe_frame=8,
    frame_code=32,
    frame_previous=48,
    frame_instr=56,
    frame_owner=68,
    code_firstlineno=72,
    code_filename=112,
    code_name=120,
    code_qualname=128,
    code_linetable=136,
    code_adaptive=184,
    owner_entry=1,
    owner_entry_2=1,
    entry_is_frame=1,
    instr_shift=0,
    gil_holder=368,
    gil_locked=376,
    gil_interval=360,
    gc=648,
    line_table="locations",
)

# A GIL of its own for each interpreter; a frame of its own (FRAME_OWNED_BY_CSTACK, 3) where C code calls in.
_3_12 = replace(
    _3_11,
    interp_id=8,
    threads_head=72,
    thread_id=136,
    native_thread_id=144,
    cframe_frame=0,
    frame_code=0,
    frame_previous=8,
    frame_owner=70,
    code_firstlineno=68,
    code_adaptive=192,
    code_version=92,
    owner_entry=3,
    owner_entry_2=3,
    entry_is_frame=0,
    gil=384,
    gil_holder=8,
    gil_locked=16,
    gil_interval=0,
    gc=112,
    unicode_ascii=40,
    unicode_compact=56,
)

# No cframe any more. instr_ptr is the instruction that runs, or is about to.
_3_13 = replace(
    _3_12,
    interp_head=632,
    interp_next=7264,
    interp_id=7272,
    threads_head=7344,
    thread_id=152,
    native_thread_id=160,
    thread_frame=72,
    cframe_frame=NO_OFFSET,
    code_adaptive=200,
    gil=16,
    gc=7400,
    gc_generations=NO_OFFSET,
    gc_generation0=NO_OFFSET,
)

# The frame's code is a tagged reference (pycore_stackref.h: Py_TAG_BITS, 1 or 3 as built; objects are aligned to 16).
# FRAME_OWNED_BY_INTERPRETER is 3, FRAME_OWNED_BY_CSTACK 4.
_3_14 = replace(
    _3_13,
    interp_head=808,
    interp_next=7272,
    interp_id=7280,
    frame_owner=74,
    code_adaptive=208,
    owner_entry=3,
    owner_entry_2=4,
    code_tag_bits=2,
    gc=7408,
    gc_collecting=192,
    gc_statistics=120,
)

# Statistics became rings of records of 64 bytes with an index each: young has 11, the two old ones 3.
_3_15 = replace(
    _3_14,
    interp_head=936,
    interp_next=7264,
    interp_id=7272,
    threads_head=7336,
    thread_id=176,
    native_thread_id=184,
    owner_entry_2=3,
    gc=7400,
    gc_collecting=112,
    gc_statistics=104,
    gc_collections=(0, 712, 912),
    gc_statistics_is_pointer=True,
)

LAYOUTS: dict[tuple[int, int], Layout] = {
    (3, 8): _3_8,
    (3, 9): _3_9,
    (3, 10): _3_10,
    (3, 11): _3_11,
    (3, 12): _3_12,
    (3, 13): _3_13,
    (3, 14): _3_14,
    (3, 15): _3_15,
}
"""By (major, minor)."""

GC_RINGS = ((0, 704), (712, 904), (912, 1104))
"""3.15: where the records of each generation's ring begin, and the byte that says which is the newest
(``struct gc_stats`` in ``pycore_interp_structs.h``)."""
GC_RING_RECORD = 64
GC_RING_COLLECTIONS = 16
"""Size of such a record, and its count of collections (``struct gc_generation_stats``)."""

DEBUG_COOKIE = b"xdebugpy"
"""First eight bytes of ``_PyRuntime`` from 3.13 on."""
DEBUG_VERSION = 8
DEBUG_FREE_THREADED = 16

# Where each minor version's _Py_DebugOffsets holds the offset of a field.
_DEBUG_3_14 = {
    "interp_head": 40,
    "interp_id": 56,
    "interp_next": 64,
    "threads_head": 72,
    "gc": 88,
    "gil": 120,
    "gil_begin": 128,
    "gil_locked": 144,
    "gil_holder": 152,
    "thread_next": 192,
    "thread_frame": 208,
    "thread_id": 216,
    "native_thread_id": 224,
    "frame_previous": 256,
    "frame_code": 264,
    "frame_instr": 272,
    "frame_owner": 288,
    "code_filename": 320,
    "code_name": 328,
    "code_qualname": 336,
    "code_linetable": 344,
    "code_firstlineno": 352,
    "code_adaptive": 384,
    "object_type": 408,
    "bytes_size": 600,
    "bytes_data": 608,
    "unicode_state": 624,
    "unicode_length": 632,
    "unicode_ascii": 640,
    "gc_collecting": 656,
}
DEBUG_OFFSETS: dict[tuple[int, int], dict[str, int]] = {
    (3, 13): {
        "interp_head": 40,
        "interp_id": 56,
        "interp_next": 64,
        "threads_head": 72,
        "gc": 80,
        "gil": 112,
        "gil_begin": 120,
        "gil_locked": 136,
        "gil_holder": 144,
        "thread_next": 168,
        "thread_frame": 184,
        "thread_id": 192,
        "native_thread_id": 200,
        "frame_previous": 232,
        "frame_code": 240,
        "frame_instr": 248,
        "frame_owner": 264,
        "code_filename": 280,
        "code_name": 288,
        "code_qualname": 296,
        "code_linetable": 304,
        "code_firstlineno": 312,
        "code_adaptive": 344,
        "object_type": 360,
        "bytes_size": 520,
        "bytes_data": 528,
        "unicode_state": 544,
        "unicode_length": 552,
        "unicode_ascii": 560,
        "gc_collecting": 576,
    },
    (3, 14): _DEBUG_3_14,
    (3, 15): {
        **_DEBUG_3_14,
        "thread_id": 240,
        "native_thread_id": 248,
        "frame_previous": 320,
        "frame_code": 328,
        "frame_instr": 336,
        "frame_owner": 352,
        "code_filename": 384,
        "code_name": 392,
        "code_qualname": 400,
        "code_linetable": 408,
        "code_firstlineno": 416,
        "code_adaptive": 448,
        "object_type": 472,
        "bytes_size": 696,
        "bytes_data": 704,
        "unicode_state": 720,
        "unicode_length": 728,
        "unicode_ascii": 736,
        "gc_collecting": 760,
    },
}
"""By (major, minor): field of ``Layout`` → place of its offset in ``_Py_DebugOffsets``. ``gil_begin``: the GIL in the
interpreter, to which ``gil_locked`` and ``gil_holder`` are relative. ``object_type``: ``ob_type`` in an object."""
DEBUG_OFFSETS_BYTES = 1024
"""More than the part of it that any version's table reads."""

OBJECT_TYPE = 8
"""``ob_type`` in an object (``Include/object.h``), all versions."""
OBJECT_SIZE = 16
"""``ob_size`` in an object of variable size."""
