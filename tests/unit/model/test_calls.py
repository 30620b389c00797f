"""The table of hooked functions."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path

import pytest

from argus.capture.process.elf import Elf
from argus.model import calls


def test_no_return_probe_where_an_exception_may_leave() -> None:
    # PyTorch's functions are C++; run_backward is called by CPython, and catches what comes.
    assert {call.kind for call in calls.CALLS if call.layer is calls.Layer.TORCH and call.exit} == {"backward"}
    assert not [call.symbol for call in calls.CALLS if call.symbol.startswith("_ZN") and call.exit]


def test_every_call_fits_its_cookie() -> None:
    assert len(calls.CALLS) <= 256
    for call in calls.CALLS:
        word = call.cookie(call.exit, calls.FILE_SLOTS - 1)
        assert word < 1 << 63
        assert (word & 0xFF, word >> 8 & 0x3F, word >> 14 & 7) == (call.id, call.shape, call.layer)
        assert word >> 44 & 0xFF == calls.FILE_SLOTS - 1


REGISTERS = 6
"""For integers, in the System V ABI for x86_64."""


def numbers(arguments: list[tuple[str, str]]) -> dict[str, int]:
    """Which integer argument each of an operator's is, by (name, type): where its result goes is the first."""
    found, number = {}, 1
    for name, kind in arguments:
        if kind == "Optional[float]":  # two words, of which one is an integer, or both are on the stack
            number += 1 if number < REGISTERS else 2
        elif kind != "float":  # a c10::SymInt, also one that may be absent, is behind a pointer
            found[name], number = number, number + 1
    return found


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="pip install torch (ARGUS_WITH_TORCH=1)")
@pytest.mark.skipif(not calls.ENTRY_ONLY_NEEDS_RETURN_ADDRESS, reason="attention is probed on x86_64")
def test_attention_s_arguments_are_where_pytorch_s_schemas_say() -> None:
    import torch

    hooked = {call.symbol: call for call in calls.CALLS if call.shape is calls.Shape.ATTENTION}
    exported = Elf(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).functions(hooked)
    assert len(exported) == 14
    for symbol in exported:
        call, name = hooked[symbol], "".join(itertools.takewhile(str.isdigit, symbol[11:]))
        operator = symbol[11 + len(name) :][: int(name)]
        schema = getattr(torch.ops.aten, operator).default._schema
        at = numbers([(each.name, str(each.type)) for each in schema.arguments])
        assert [at["query"] + place for place in range(3)] == [at["query"], at["key"], at["value"]]
        causal = at.get("is_causal", at.get("custom_mask_type"))
        packed = at["cu_seqlens_q"] if operator.startswith("_efficient") else calls.ABSENT
        also = at.get("window_size_left", at.get("seqlen_k", 0))
        assert (*call.args[:3], call.offset) == (at["query"], causal, packed, also), operator
