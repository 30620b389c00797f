"""Rust symbols of the mangling "v0", and what the older one leaves."""

from __future__ import annotations

from argus.capture.process import demangler, rust
from tests.fuzz.harness import is_text

ALLOWED = ()
CODE = ["argus.capture.process.rust"]
TOKENS = [b"NvC", b"INv", b"B_", b"B0_", b"C3abc", b"u", b"s_", b"Kj1_", b"KB_", b"TB_B_E", b"FEu", b"DNtC1a1bEL_",
          b"RL0_", b"$ud800$", b"17h0123456789abcdefE", b"::h0123456789abcdef"]  # fmt: skip
LONGEST = demangler.MAX_NAME + 64


def seeds() -> list[bytes]:
    return [
        b"_RNvC6my_app4main",
        b"_RNvMC6my_appNtB2_3Foo3bar",
        b"_RINvNtC3std3mem8align_ofjE",
        b"_RNCNvC6my_app4main0B3_",
        b"_RINvC1a1bKj1_Kb1_Kca_E",
        b"_RNvCs1234_7mycrateu8fa_1b",
        b"_RINvC1a1bTjmFUKCjEuRL0_aDNtC1c1dEL_EE",
        b"_ZN4core::fmt::$LT$impl$u20$core..fmt$GT$::h0123456789abcdef",
    ]


def run(data: bytes) -> None:
    symbol = data[: demangler.MAX_SYMBOL].decode(errors="replace")
    name = rust.demangle_v0(symbol)
    if name is not None:
        is_text(name, LONGEST)
    is_text(rust.strip_legacy(symbol), len(symbol))
