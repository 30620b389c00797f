"""The table of hooked functions."""

from __future__ import annotations

from argus.capture import calls


def test_no_return_probe_where_an_exception_may_leave() -> None:
    # PyTorch's functions are C++; run_backward is called by CPython, and catches what comes.
    assert [call.kind for call in calls.CALLS if call.layer is calls.Layer.TORCH and call.exit] == ["backward"]
    assert not [call.symbol for call in calls.CALLS if call.symbol.startswith("_ZN") and call.exit]


def test_every_call_fits_its_cookie() -> None:
    assert len(calls.CALLS) <= 256
    for call in calls.CALLS:
        word = call.cookie(call.exit, 15)
        assert word < 1 << 63
        assert (word & 0xFF, word >> 8 & 0x3F, word >> 14 & 7, word >> 44 & 15) == (call.id, call.shape, call.layer, 15)
