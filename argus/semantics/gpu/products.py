"""What calls of cuBLAS, and of PyTorch's attention, multiply, from what the probes saw of their arguments.

``cublasLtMatmul`` gets its matrices by descriptors. ``cublasLt.h`` publishes their size (``uint64_t data[8]``), and
not what lies where. It was found by having the library's own functions make descriptors of known numbers, and looking
for these: the same places in 11.11, 12.1, 12.9, 13.0 and 13.10 (``tests/e2e/programs/cublas_layout.py``). A version
that has others is noticed: A, B and D must fit each other.

Attention is given tensors, whose sizes the probes have read in the objects (``argus/capture/process/pytorch.py``): they
are 0 where they did not make up the number of elements.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from argus.model import calls
from argus.model.records import DESCRIPTOR_WORDS, MATH_WORDS
from argus.semantics.gpu.flops import WORK, Work, attention, product

TYPE, ROWS, COLUMNS, BATCH = 0, 1, 2, 4
"""Words of a layout descriptor: type (the lower 32 bits), rows, columns, matrices in the batch (the lower 32 bits)."""
DTYPES = {
    0: "float", 1: "double", 2: "half", 3: "int8", 8: "uint8", 14: "bfloat16", 28: "float8_e4m3fn", 29: "float8_e5m2",
    31: "float6_e2m3fn", 32: "float6_e3m2fn", 33: "float4_e2m1fn_x2",
}  # fmt: skip
"""``cudaDataType_t`` of real numbers, by value (library_types.h), by PyTorch's names."""
TENSOR_DTYPES = {
    5: "half", 6: "float", 7: "double", 15: "bfloat16", 23: "float8_e5m2", 24: "float8_e4m3fn",
}  # fmt: skip
"""``c10::ScalarType`` by value (torch/headeronly/core/ScalarType.h), by the same names."""
_BY_NAME = {"S": 0, "D": 1, "H": 2}
_LOW = np.uint64(0xFFFFFFFF)
_MATMUL = np.array([call.shape is calls.Shape.MATMUL for call in calls.CALLS])
_ATTENTION = np.array([call.shape is calls.Shape.ATTENTION for call in calls.CALLS])
_WIDE = np.array([call.symbol.endswith("_64") for call in calls.CALLS])
_TYPE = np.array(
    [
        _BY_NAME[call.symbol.removeprefix("cublas")[0]]
        if call.shape is calls.Shape.GEMM and call.args[3] == calls.ABSENT
        else -1
        for call in calls.CALLS
    ]
)
"""The type by the function's name; -1: an argument has it."""
_OPERATOR = re.compile(r"_ZN2at4_ops\d\d(\w+?)4call")
_KIND = np.dtype([("call", "u1"), *((f"word_{place}", "<u8") for place in range(MATH_WORDS))])
_SIZES = np.dtype([("call", "u1"), ("dtype", "<i8"), *((name, "<u8") for name in ("m", "n", "k", "batch"))])

MAX_TEXTS = 4096
"""Different products that are distinguished; further ones count as unknown. A job has some dozens."""


def sizes_of(records: NDArray[np.void]) -> NDArray[np.void]:
    """What calls of cuBLAS multiplied: ``call``, ``dtype`` (cudaDataType_t), ``m``, ``n``, ``k`` and ``batch``; ``k``
    is 0 where the arguments make no sense. ``found``: ``records.MATH``, shape (n,); returns shape (n,)."""
    words, matmul = records["words"], _MATMUL[records["call"]]
    sizes = np.zeros(len(records), _SIZES)
    sizes["call"] = records["call"]
    narrow = ~matmul & ~_WIDE[records["call"]]  # an int, whose register's upper half may hold anything
    for place, name in enumerate(("m", "n", "k")):
        sizes[name] = np.where(narrow, words[:, place] & _LOW, words[:, place])
    sizes["batch"] = np.where(narrow, words[:, 4] & _LOW, words[:, 4])
    by_name = _TYPE[records["call"]]
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


def _product_of(size: np.void) -> tuple[str, str, Work] | None:
    """Function, type and work of a product. ``size``: one of ``sizes_of``. None: it makes no sense."""
    m, n, k, batch = (int(size[name]) for name in ("m", "n", "k", "batch"))
    dtype = DTYPES.get(int(size["dtype"]))
    if dtype is None or not m or not n or not k or not batch:
        return None
    return calls.CALLS[int(size["call"])].symbol, dtype, product((m, k, n) if batch == 1 else (batch, m, k, n))


def _attention_of(kind: np.void) -> tuple[str, str, Work] | None:
    """The same of attention. ``kind``: ``_KIND``."""
    call, *words = (int(kind[name]) for name in kind.dtype.names or ())
    dtype, causal, more = TENSOR_DTYPES.get(words[12]), words[13] != 0, words[14]
    operator = _OPERATOR.match(calls.CALLS[call].symbol)
    if dtype is None or more or not all(words[:12]) or operator is None:
        return None
    name = f"aten::{operator[1]}"
    return name, dtype, attention(name, words[:4], words[4:8], words[8:12], causal)


def _kinds_of(records: NDArray[np.void]) -> NDArray[np.void]:
    """``_KIND`` of each call of attention."""
    kinds = np.zeros(len(records), _KIND)
    kinds["call"] = records["call"]
    for place in range(MATH_WORDS):
        kinds[f"word_{place}"] = records["words"][:, place]
    return kinds


class Products:
    """The products and the attention of one process.

    Attributes:
        texts: Kind, function, type and shape of each product, as in the table ``kernel_flops``.
        unknown: Calls whose arguments did not give a product.
    """

    def __init__(self) -> None:
        self.texts: list[tuple[str, str, str, str]] = []
        self.unknown = 0
        self._places: dict[tuple[str, str, str, str], int] = {}

    def take(self, records: NDArray[np.void]) -> NDArray[np.void]:
        """Calls of which the product is known, and whose end was seen; of attention, which cannot fail unseen, all.

        Args:
            records: ``records.MATH`` of the process, shape (n,).

        Returns:
            ``WORK``, in the same order, by places in ``texts``.
        """
        place, flops = np.full(len(records), -1), np.zeros(len(records))
        of_attention = _ATTENTION[records["call"]]
        for chosen, kinds_of, read in (
            (np.flatnonzero(~of_attention), sizes_of, _product_of),
            (np.flatnonzero(of_attention), _kinds_of, _attention_of),
        ):
            kinds, kind_of = np.unique(kinds_of(records[chosen]), return_inverse=True)
            place_of, flops_of = np.full(len(kinds), -1), np.zeros(len(kinds))
            for number, kind in enumerate(kinds):
                if (product := read(kind)) is not None:
                    name, dtype, work = product
                    place_of[number] = self._place((work.kind, name, dtype, work.shape))
                    flops_of[number] = work.flops
            place[chosen], flops[chosen] = place_of[kind_of.reshape(-1)], flops_of[kind_of.reshape(-1)]
        ended = of_attention | ((records["duration_ns"] >= 0) & (records["result"] == 0))
        known = (place >= 0) & ended
        self.unknown += int(np.sum(ended & ~known))
        works = np.zeros(int(known.sum()), WORK)
        begin = records["ts_ns"][known].astype(np.int64)
        # One that launched nothing has no duration: no kernel is its.
        works["begin_ns"], works["end_ns"] = begin, begin + np.maximum(records["duration_ns"][known], 0)
        works["tid"], works["text"], works["flops"] = records["tid"][known], place[known], flops[known]
        return works

    def _place(self, text: tuple[str, str, str, str]) -> int:
        """The text's place; -1: there are too many."""
        if text not in self._places and len(self.texts) < MAX_TEXTS:
            self._places[text] = len(self.texts)
            self.texts.append(text)
        return self._places.get(text, -1)
