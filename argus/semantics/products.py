"""What calls of cuBLAS multiply, from what the probes saw of their arguments.

``cublasLtMatmul`` is told its matrices by descriptors. ``cublasLt.h`` publishes their size (``uint64_t data[8]``), and
not what lies where. It was found by having the library's own functions make descriptors of known numbers, and looking
for these: the same places in 11.11, 12.1, 12.9, 13.0 and 13.10 (``tests/e2e/programs/cublas_layout.py``). A version
that has others is noticed: A, B and D must fit each other.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from argus.capture import calls
from argus.records import DESCRIPTOR_WORDS
from argus.semantics.flops import WORK, product

TYPE, ROWS, COLUMNS, BATCH = 0, 1, 2, 4
"""Words of a layout descriptor: type (the lower 32 bits), rows, columns, matrices in the batch (the lower 32 bits)."""
DTYPES = {
    0: "float", 1: "double", 2: "half", 3: "int8", 8: "uint8", 14: "bfloat16", 28: "float8_e4m3fn", 29: "float8_e5m2",
    31: "float6_e2m3fn", 32: "float6_e3m2fn", 33: "float4_e2m1fn_x2",
}  # fmt: skip
"""``cudaDataType_t`` of real numbers, by value (library_types.h), by PyTorch's names."""
_BY_NAME = {"S": 0, "D": 1, "H": 2}
_LOW = np.uint64(0xFFFFFFFF)
_MATMUL = np.array([call.shape is calls.Shape.MATMUL for call in calls.CALLS])
_WIDE = np.array([call.symbol.endswith("_64") for call in calls.CALLS])
_TYPE = np.array(
    [
        _BY_NAME[call.symbol.removeprefix("cublas")[0]]
        if call.shape is calls.Shape.GEMM and call.args[3] == calls.ABSENT
        else -1
        for call in calls.CALLS
    ]
)
"""What the function's name tells of the type; -1: an argument does."""
_SIZES = np.dtype([("call", "u1"), ("dtype", "<i8"), *((name, "<u8") for name in ("m", "n", "k", "batch"))])

MAX_TEXTS = 4096
"""Different products that are told apart; further ones count as unknown. A job has some dozens."""


def sizes_of(found: NDArray[np.void]) -> NDArray[np.void]:
    """What was multiplied: ``call``, ``dtype`` (cudaDataType_t), ``m``, ``n``, ``k`` and ``batch``; ``k`` is 0 where
    the arguments make no sense. ``found``: ``records.MATH``, shape (n,); returns shape (n,)."""
    words, matmul = found["words"], _MATMUL[found["call"]]
    sizes = np.zeros(len(found), _SIZES)
    sizes["call"] = found["call"]
    narrow = ~matmul & ~_WIDE[found["call"]]  # an int, whose register's upper half may hold anything
    for place, name in enumerate(("m", "n", "k")):
        sizes[name] = np.where(narrow, words[:, place] & _LOW, words[:, place])
    sizes["batch"] = np.where(narrow, words[:, 4] & _LOW, words[:, 4])
    by_name = _TYPE[found["call"]]
    sizes["dtype"] = np.where(by_name >= 0, by_name, (words[:, 3] & _LOW).astype(np.int64))
    if matmul.any():
        a, b, d = (words[matmul][:, DESCRIPTOR_WORDS * place :] for place in range(3))
        m, n = d[:, ROWS], d[:, COLUMNS]
        # Either may be transposed: what is not m, or n, is k.
        k_of_a = np.where(a[:, ROWS] == m, a[:, COLUMNS], np.where(a[:, COLUMNS] == m, a[:, ROWS], 0))
        k_of_b = np.where(b[:, COLUMNS] == n, b[:, ROWS], np.where(b[:, ROWS] == n, b[:, COLUMNS], 0))
        batch = d[:, BATCH] & _LOW
        fits = (k_of_a == k_of_b) & (k_of_a > 0)
        fits &= ((a[:, BATCH] & _LOW) == batch) & ((b[:, BATCH] & _LOW) == batch)
        for name, values in (("m", m), ("n", n), ("k", np.where(fits, k_of_a, 0)), ("batch", batch)):
            sizes[name][matmul] = values
        sizes["dtype"][matmul] = (a[:, TYPE] & _LOW).astype(np.int64)
    return sizes


class Products:
    """The products of one process.

    Attributes:
        texts: Kind, function, type and shape of each product, as in the table ``kernel_flops``.
        unknown: Calls whose arguments told no product.
    """

    def __init__(self) -> None:
        self.texts: list[tuple[str, str, str, str]] = []
        self.unknown = 0
        self._places: dict[tuple[str, str, str, str], int] = {}

    def take(self, found: NDArray[np.void]) -> NDArray[np.void]:
        """Calls of which the product is known, and whose end was seen.

        Args:
            found: ``records.MATH`` of the process, shape (n,).

        Returns:
            ``WORK``, in the same order, by places in ``texts``.
        """
        sizes = sizes_of(found)
        kinds, kind_of = np.unique(sizes, return_inverse=True)
        place, flops = np.full(len(kinds), -1), np.zeros(len(kinds))
        for number, kind in enumerate(kinds):
            m, n, k, batch = (int(kind[name]) for name in ("m", "n", "k", "batch"))
            dtype = DTYPES.get(int(kind["dtype"]))
            if dtype is None or not m or not n or not k or not batch:
                continue
            work = product((m, k, n) if batch == 1 else (batch, m, k, n))
            text = work.kind, calls.CALLS[int(kind["call"])].symbol, dtype, work.shape
            if text in self._places or len(self.texts) < MAX_TEXTS:
                place[number] = self._places.setdefault(text, len(self._places))
                flops[number] = work.flops
                if place[number] == len(self.texts):
                    self.texts.append(text)
        kind_of = kind_of.reshape(-1)
        ended = (found["duration_ns"] >= 0) & (found["result"] == 0)
        known = (place[kind_of] >= 0) & ended
        self.unknown += int(np.sum(ended & ~known))
        works = np.zeros(int(known.sum()), WORK)
        begin = found["ts_ns"][known].astype(np.int64)
        works["begin_ns"], works["end_ns"] = begin, begin + found["duration_ns"][known]
        works["tid"], works["text"] = found["tid"][known], place[kind_of[known]]
        works["flops"] = flops[kind_of[known]]
        return works
