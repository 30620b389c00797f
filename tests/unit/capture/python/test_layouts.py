"""The tables of offsets are what a C compiler says of each CPython's own headers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from argus.capture.python import layouts
from argus.model.records import NO_OFFSET, PYTHON
from tests.pythons import prefixes

R, I, T, F, C, G = "_PyRuntimeState", "PyInterpreterState", "PyThreadState", "FRAME", "PyCodeObject", "GC"  # noqa: E741


def _headers() -> dict[str, Path]:
    """Version → include folder of every CPython whose internal headers are there.

    Those beside the interpreters of pyenv and build/pythons, those of the system, and those that ``ARGUS_TEST_HEADERS``
    names: include folders, separated by colons.
    """
    folders = [folder for prefix in prefixes() for folder in prefix.glob("include/python3.*")]
    folders += Path("/usr/include").glob("python3.*")
    folders += [Path(folder) for folder in os.environ.get("ARGUS_TEST_HEADERS", "").split(":") if folder]
    by_version = {}
    for folder in sorted(folders):
        patchlevel, internal = folder / "patchlevel.h", folder / "internal" / "pycore_runtime.h"
        if patchlevel.exists() and (internal.exists() or (folder / "internal" / "pycore_pystate.h").exists()):
            words = [line.split() for line in patchlevel.read_text().splitlines() if "define PY_VERSION " in line]
            version = words[0][2].strip('"')
            if _minor(version) in layouts.LAYOUTS:
                by_version[f"{version}-{len(by_version)}"] = folder
    return by_version


def _minor(version: str) -> tuple[int, int]:
    major, minor, *_ = version.split("-")[0].split(".")
    return int(major), int(minor)


HEADERS = _headers()


def _places(version: tuple[int, int]) -> dict[str, tuple[str, str]]:
    """Field of ``Layout`` → struct and member in that version's headers."""
    v = version[1]
    places = {
        "interp_head": (R, "interpreters.head"),
        "interp_next": (I, "next"),
        "interp_id": (I, "id"),
        "threads_head": (I, "threads.head" if v >= 11 else "tstate_head"),
        "thread_next": (T, "next"),
        "thread_id": (T, "thread_id"),
        "thread_frame": (T, "current_frame" if v >= 13 else "cframe" if v >= 11 else "frame"),
        "frame_code": (F, "f_executable" if v >= 13 else "f_code"),
        "frame_previous": (F, "previous" if v >= 11 else "f_back"),
        "frame_instr": (F, "instr_ptr" if v >= 13 else "prev_instr" if v >= 11 else "f_lasti"),
        "code_firstlineno": (C, "co_firstlineno"),
        "code_filename": (C, "co_filename"),
        "code_name": (C, "co_name"),
        "code_linetable": (C, "co_linetable" if v >= 10 else "co_lnotab"),
        "gil_holder": ("struct _gil_runtime_state", "last_holder") if v >= 12 else (R, "ceval.gil.last_holder"),
        "gil_locked": ("struct _gil_runtime_state", "locked") if v >= 12 else (R, "ceval.gil.locked"),
        "gil_interval": ("struct _gil_runtime_state", "interval") if v >= 12 else (R, "ceval.gil.interval"),
        "gc": (I if v >= 9 else R, "gc"),
        "gc_collecting": (G, "collecting"),
        "gc_statistics": (G, "generation_stats"),
        "unicode_length": ("PyASCIIObject", "length"),
        "unicode_state": ("PyASCIIObject", "state"),
        "bytes_size": ("PyVarObject", "ob_size"),
        "bytes_data": ("PyBytesObject", "ob_sval"),
    }
    if v >= 11:
        places |= {
            "native_thread_id": (T, "native_thread_id"),
            "frame_owner": (F, "owner" if v >= 12 else "is_entry"),
            "code_qualname": (C, "co_qualname"),
            "code_adaptive": (C, "co_code_adaptive"),
        }
    if v in (11, 12):
        places["cframe_frame"] = ("_PyCFrame", "current_frame")
    if v >= 12:
        places |= {"gil": (I, "ceval.gil"), "code_version": (C, "co_version")}
    if v <= 12:
        places |= {"gc_generations": (G, "generations"), "gc_generation0": (G, "generation0")}
    return places


_PROLOGUE = """
#define Py_BUILD_CORE 1
#include <stddef.h>
#include <stdio.h>
#include <Python.h>
#include <frameobject.h>
#if PY_VERSION_HEX < 0x030b0000
#include <code.h>
#endif
#include "internal/pycore_pystate.h"
#if PY_VERSION_HEX >= 0x03090000
#include "internal/pycore_runtime.h"
#include "internal/pycore_interp.h"
#endif
#include "internal/pycore_gil.h"
#if PY_VERSION_HEX >= 0x030b0000
#include "internal/pycore_frame.h"
typedef _PyInterpreterFrame FRAME;
#else
typedef PyFrameObject FRAME;
#endif
typedef struct _gc_runtime_state GC;
#define OWN(m) printf("own " #m " %zu\\n", offsetof(_Py_DebugOffsets, m));
int main(void) {
"""


def _compile(folder: Path, tmp_path: Path, body: str) -> dict[str, int]:
    if not shutil.which("gcc"):
        pytest.skip("no gcc")
    source = tmp_path / "offsets.c"
    source.write_text(_PROLOGUE + body + "return 0; }\n")
    # Distributions keep pyconfig.h by architecture, beside the folder.
    command = [
        "gcc",
        "-w",
        f"-I{folder}",
        f"-I{folder / 'internal'}",
        f"-I{folder.parent}",
        "-o",
        "offsets",
        source.name,
    ]
    subprocess.run(command, check=True, cwd=tmp_path)
    lines = subprocess.run([tmp_path / "offsets"], check=True, capture_output=True, text=True).stdout.splitlines()
    return {line.rpartition(" ")[0]: int(line.rpartition(" ")[2]) for line in lines}


@pytest.mark.parametrize("name", HEADERS)
def test_offsets_are_those_of_the_headers(name: str, tmp_path: Path) -> None:
    version = _minor(name)
    table, places = layouts.LAYOUTS[version], _places(version)
    body = "".join(
        f'printf("{field} %zu\\n", offsetof({struct}, {member}));\n' for field, (struct, member) in places.items()
    )
    body += (
        'printf("unicode_ascii %zu\\nunicode_compact %zu\\n", sizeof(PyASCIIObject), sizeof(PyCompactUnicodeObject));\n'
    )
    body += """
    printf("type %zu\\nsize %zu\\n", offsetof(PyObject, ob_type), offsetof(PyVarObject, ob_size));
    #if PY_VERSION_HEX >= 0x030e0000
    printf("entry %d\\nentry_2 %d\\n", FRAME_OWNED_BY_INTERPRETER,
    #if PY_VERSION_HEX >= 0x030f0000
        FRAME_OWNED_BY_INTERPRETER
    #else
        FRAME_OWNED_BY_CSTACK
    #endif
    );
    #elif PY_VERSION_HEX >= 0x030c0000
    printf("entry %d\\nentry_2 %d\\n", FRAME_OWNED_BY_CSTACK, FRAME_OWNED_BY_CSTACK);
    #endif
    PyASCIIObject text = {0};
    text.state.kind = 7;
    printf("state %u\\n", *(unsigned *)&text.state);
    text.state.kind = 0; text.state.compact = 1;
    printf("compact %u\\n", *(unsigned *)&text.state);
    text.state.compact = 0; text.state.ascii = 1;
    printf("ascii %u\\n", *(unsigned *)&text.state);
    #if PY_VERSION_HEX >= 0x030f0000
    for (int i = 0; i < 3; i++) {
        struct gc_stats *stats = 0;
        size_t at[] = {(size_t)&stats->young, (size_t)&stats->old[0], (size_t)&stats->old[1]};
        size_t index[] = {(size_t)&stats->young.index, (size_t)&stats->old[0].index, (size_t)&stats->old[1].index};
        printf("ring %d %zu\\nindex %d %zu\\n", i, at[i], i, index[i]);
    }
    printf("record %zu\\ncollections %zu\\n", sizeof(struct gc_generation_stats),
           offsetof(struct gc_generation_stats, collections));
    #else
    printf("record %zu\\ncollections %zu\\n", sizeof(struct gc_generation_stats),
           offsetof(struct gc_generation_stats, collections));
    #endif
    """
    offsets = _compile(HEADERS[name], tmp_path, body)
    fields = {*places, "unicode_ascii", "unicode_compact"}
    assert {field: getattr(table, field) for field in fields} == {field: offsets[field] for field in fields}
    assert (offsets["type"], offsets["size"]) == (layouts.OBJECT_TYPE, layouts.OBJECT_SIZE)
    assert (offsets["state"], offsets["compact"], offsets["ascii"]) == tuple(
        bits << table.unicode_kind_shift for bits in (7, 8, 16)
    )
    if "entry" in offsets:
        assert (offsets["entry"], offsets["entry_2"]) == (table.owner_entry, table.owner_entry_2)
    if table.gc_statistics_is_pointer:
        assert tuple((offsets[f"ring {i}"], offsets[f"index {i}"]) for i in range(3)) == layouts.GC_RINGS
        assert (offsets["record"], offsets["collections"]) == (layouts.GC_RING_RECORD, layouts.GC_RING_COLLECTIONS)
    else:
        assert offsets["collections"] == 0
        assert table.gc_collections == tuple(offsets["record"] * generation for generation in range(3))


_OWN = {
    "interp_head": "runtime_state.interpreters_head",
    "interp_id": "interpreter_state.id",
    "interp_next": "interpreter_state.next",
    "threads_head": "interpreter_state.threads_head",
    "gc": "interpreter_state.gc",
    "gil": "interpreter_state.ceval_gil",
    "gil_begin": "interpreter_state.gil_runtime_state",
    "gil_locked": "interpreter_state.gil_runtime_state_locked",
    "gil_holder": "interpreter_state.gil_runtime_state_holder",
    "thread_next": "thread_state.next",
    "thread_frame": "thread_state.current_frame",
    "thread_id": "thread_state.thread_id",
    "native_thread_id": "thread_state.native_thread_id",
    "frame_previous": "interpreter_frame.previous",
    "frame_code": "interpreter_frame.executable",
    "frame_instr": "interpreter_frame.instr_ptr",
    "frame_owner": "interpreter_frame.owner",
    "code_filename": "code_object.filename",
    "code_name": "code_object.name",
    "code_qualname": "code_object.qualname",
    "code_linetable": "code_object.linetable",
    "code_firstlineno": "code_object.firstlineno",
    "code_adaptive": "code_object.co_code_adaptive",
    "object_type": "pyobject.ob_type",
    "bytes_size": "bytes_object.ob_size",
    "bytes_data": "bytes_object.ob_sval",
    "unicode_state": "unicode_object.state",
    "unicode_length": "unicode_object.length",
    "unicode_ascii": "unicode_object.asciiobject_size",
    "gc_collecting": "gc.collecting",
}


@pytest.mark.parametrize("name", [name for name in HEADERS if _minor(name) in layouts.DEBUG_OFFSETS])
def test_places_of_the_debug_offsets_are_those_of_the_headers(name: str, tmp_path: Path) -> None:
    table = layouts.DEBUG_OFFSETS[_minor(name)]
    assert table.keys() == _OWN.keys()
    members = {**_OWN, "version": "version", "free": "free_threaded"}
    offsets = _compile(HEADERS[name], tmp_path, "".join(f"OWN({member})\n" for member in members.values()))
    assert {field: offsets[f"own {member}"] for field, member in _OWN.items()} == table
    assert offsets["own version"] == layouts.DEBUG_VERSION
    assert offsets["own free_threaded"] == layouts.DEBUG_FREE_THREADED
    assert max(table.values()) + 8 <= layouts.DEBUG_OFFSETS_BYTES


def test_some_cpython_was_compared() -> None:
    if not HEADERS:
        pytest.skip("no CPython 3.8 or later with its internal headers")


@pytest.mark.parametrize("version", layouts.LAYOUTS)
def test_every_table_fits_the_kernel_s_record(version: tuple[int, int]) -> None:
    table = layouts.LAYOUTS[version]
    for field in PYTHON.names or ():
        if field in layouts.Layout.__dataclass_fields__ and PYTHON[field] == np.dtype("<u2"):
            assert 0 <= getattr(table, field) <= NO_OFFSET, field
    # What the kernel reads of a frame and of a code object at once (bpf/stacks.h).
    assert max(table.frame_code, table.frame_previous, table.frame_instr) + 8 <= 128
    assert table.code_linetable + 8 <= 256
