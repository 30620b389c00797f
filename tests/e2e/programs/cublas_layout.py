"""Shows where a real cuBLASLt keeps what ``argus.semantics.gpu.products`` reads of a layout descriptor: has the
library's own functions make descriptors of known numbers, and looks for these in the 64 bytes that its header calls
opaque.

    cublas_layout.py /path/to/libcublasLt.so.13

needs no GPU, and prints the library's version and the offsets in bytes that fit, as JSON.
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys

BATCH_COUNT = 5
"""CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT"""
BYTES = 64
NUMBERS = ((14, 7919, 104_729, 1_299_709, 611), (2, 6_700_417, 8191, 524_287, 127))
"""Type, rows, columns, leading dimension, matrices."""


def descriptor(library: ctypes.CDLL, kind: int, rows: int, columns: int, ld: int, batch: int) -> bytes:
    made, count = ctypes.c_void_p(), ctypes.c_int32(batch)
    sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(max(ld, rows))
    failed = library.cublasLtMatrixLayoutCreate(ctypes.byref(made), ctypes.c_int(kind), *sizes)
    size = ctypes.c_size_t(ctypes.sizeof(count))
    failed |= library.cublasLtMatrixLayoutSetAttribute(made, ctypes.c_int(BATCH_COUNT), ctypes.byref(count), size)
    if failed or made.value is None:
        raise SystemExit(f"cuBLASLt refuses: {failed}")
    try:
        return ctypes.string_at(made.value, BYTES)
    finally:
        library.cublasLtMatrixLayoutDestroy(made)


def main(path: str) -> None:
    library = ctypes.CDLL(path)
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    seen = [descriptor(library, *numbers) for numbers in NUMBERS]

    def places(field: int, form: str) -> list[int]:
        step = struct.calcsize(form)
        wanted = [numbers[field] for numbers in NUMBERS]
        return [at for at in range(0, BYTES, step) if [struct.unpack_from(form, one, at)[0] for one in seen] == wanted]

    fields = (("type", 0, "<I"), ("rows", 1, "<Q"), ("columns", 2, "<Q"), ("batch", 4, "<I"))
    found = {name: places(field, form) for name, field, form in fields}
    print(json.dumps({"version": library.cublasLtGetVersion(), **found}))


if __name__ == "__main__":
    main(sys.argv[1])
