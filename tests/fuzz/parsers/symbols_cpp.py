"""C++ symbols, which libstdc++ demangles: the short ones in this process, others in a child with limits."""

from __future__ import annotations

import zlib

from argus.capture.process import demangler
from argus.capture.process.symbols import readable
from tests.fuzz.harness import is_text

ALLOWED = ()
CODE = ["argus.capture.process.demangler", "argus.capture.process.symbols", "argus.capture.process.rust"]
TOKENS = [b"S_", b"S0_", b"St", b"NSt3__112basic_stringIcE", b"IS_S_E", b"T_", b"DpT_", b"L_Z1fvE", b"N2at6TensorE",
          b"17h0123456789abcdefE", b"$u20$", b"$LT$", b"cv", b"fL0p_", b"UlvE_", b"Z1fvE"]  # fmt: skip
SECONDS = 4.0
LONGEST = demangler.MAX_NAME + 64


def seeds() -> list[bytes]:
    return [
        b"_Z3fooILi3EEvT_",
        b"_ZN2at6native12_GLOBAL__N_116vectorized_kernelILi4EZNS0_21CUDAFunctor_addIfEEvEEvT_",
        b"_ZNSt6vectorIiSaIiEE9push_backEOi",
        b"_ZN4core3fmt9Formatter3pad17h0123456789abcdefE",
        b"_ZN4main7$u20$as17h0123456789abcdefE",
        b"_Z1f1A1BIS_S_ES0_IS1_S1_E",
        b"_RNvC6my_app4main",
        b"cuLaunchKernel",
    ]


def run(data: bytes) -> None:
    symbol = data.decode(errors="replace")
    # Of other processes now and then: one whose symbols are too much is given up for good.
    name = readable(symbol, zlib.crc32(data) & 0xFFF)
    is_text(name, LONGEST)
