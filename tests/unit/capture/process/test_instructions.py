"""Where the probe of a function's entry may stand, by its instructions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from argus.capture import prices
from argus.capture.process.instructions import FRAME_WORDS, MOST_INSTRUCTIONS, Code, places
from argus.capture.process.mapped import open_file
from argus.model import calls

pytestmark = pytest.mark.skipif(not prices.MEASURABLE, reason="x86-64 only")

RDI, RSI, RDX, RCX, R8, R9 = range(6)
AT = 3
"""Where functions begin in these files."""


def found(tmp_path: Path, code: str, *, throws: bool = False) -> list[tuple[int, int, set[int]]]:
    """Of each place: bytes behind the entry, words that the stack pointer is below, arguments that were overwritten."""
    file = tmp_path / "code"
    file.write_bytes(b"\xcc" * AT + bytes.fromhex(code) + b"\xcc" * 16)
    made = places(Code(open_file(file)), AT, throws=throws)
    return [(place.offset - AT, place.below, set(range(6)) - place.intact) for place in made]


def test_the_stack_pointer_is_followed(tmp_path: Path) -> None:
    # sub $0x38,%rsp; push %rbx; push %r15; add $-8,%rsp; sub $0x100,%rsp; pop %rax; ret
    code = "4883ec38 53 4157 4883c4f8 4881ec00010000 58 c3"
    assert [(at, below) for at, below, _ in found(tmp_path, code)] == [
        (0, 0), (4, 7), (5, 8), (7, 9), (11, 10), (18, 42), (19, 41),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "code",
    [
        "4889e5 4883e4f0 90 c3",  # mov %rsp,%rbp; and $-16,%rsp
        "4889e5 4829c4 90 c3",  # sub %rax,%rsp
        "4889e5 488d6424f8 90 c3",  # lea -8(%rsp),%rsp
        "4889e5 48c70700000000 90 c3",  # movq $0,(%rdi): what the caller passed would be read too late
        "4889e5 58 90 c3",  # pop: above the entry's
    ],
)
def test_where_more_is_not_certain_the_line_ends(tmp_path: Path, code: str) -> None:
    assert [at for at, *_ in found(tmp_path, code)] == [0, 3]


def test_a_stack_pointer_beyond_any_frame_is_not_followed(tmp_path: Path) -> None:
    """Such a number is none that an answer of the reader may have: all that was asked with it would be refused."""
    half = "4881ecf8ffff3f"  # sub $0x3ffffff8,%rsp
    whole = "4881c400000080"  # add $-0x80000000,%rsp
    most = FRAME_WORDS // 2 - 1
    assert [(at, below) for at, below, _ in found(tmp_path, f"{half} {half} 90 c3")] == [
        (0, 0), (7, most), (14, 2 * most), (15, 2 * most),
    ]  # fmt: skip
    assert [(at, below) for at, below, _ in found(tmp_path, half * 5 + "90 c3")] == [
        (0, 0), (7, most), (14, 2 * most),
    ]  # fmt: skip
    assert [(at, below) for at, below, _ in found(tmp_path, f"{whole} 90 c3")] == [(0, 0)]


def test_arguments_are_intact_until_they_are_overwritten(tmp_path: Path) -> None:
    # xor %ecx,%ecx; mov %rdi,%rax; mov $1,%r8b; xchg %rdi,%rsi; ret
    lost = [gone for _, _, gone in found(tmp_path, "31c9 4889f8 41b001 4887fe c3")]
    assert lost == [set(), {RCX}, {RCX}, {RCX, R8}, {RCX, R8, RDI, RSI}]


def test_a_line_ends_with_what_branches_or_calls(tmp_path: Path) -> None:
    assert [at for at, *_ in found(tmp_path, "4885ff 7401 90 c3")] == [0, 3]  # test; je
    assert [at for at, *_ in found(tmp_path, "4889f8 e800000000 90 c3")] == [0, 3]  # mov; call
    assert [at for at, *_ in found(tmp_path, "4889f8 ff2500000000")] == [0, 3]  # mov; jmp *(%rip), out of the function


def test_nothing_that_a_jump_leads_to_is_good_nor_what_follows_it(tmp_path: Path) -> None:
    # 0: mov; 3: nop; 4: nop; 5: dec %ecx; 7: jnz
    assert [at for at, *_ in found(tmp_path, "4889f8 90 90 ffc9 75fa c3")] == [0]  # to 3
    assert [at for at, *_ in found(tmp_path, "4889f8 90 90 ffc9 75fb c3")] == [0, 3]  # to 4
    assert [at for at, *_ in found(tmp_path, "4889f8 90 90 ffc9 75f7 c3")] == [0, 3, 4, 5, 7]  # to 0: a new turn
    # From a part that lies elsewhere, as compilers put what is seldom needed.
    assert [at for at, *_ in found(tmp_path, "4889f8 90 85ff 7401 c3 ffc7 ebf6")] == [0]  # jmp to 3


def test_what_cannot_be_followed_keeps_its_entry(tmp_path: Path) -> None:
    # jmp *%rax: by a table, which is read with an index, or to what lea took the address of (7)
    assert [at for at, *_ in found(tmp_path, "488d0500000000 90 ffe0")] == [0]
    assert [at for at, *_ in found(tmp_path, "488b04fd00000000 90 ffe0")] == [0]
    assert [at for at, *_ in found(tmp_path, "4889f8 90 ff24fd00000000")] == [0]
    # NVTX without a tool: mov (%rip),%rax; test %rax,%rax; je; jmp *%rax, to another function
    assert [at for at, *_ in found(tmp_path, "488b0500000000 4885c0 7402 ffe0 c3")] == [0, 7, 10]
    assert [at for at, *_ in found(tmp_path, "488d0500001000 488b00 4885c0 7402 ffe0 c3")] == [0, 7, 10, 13]
    assert [at for at, *_ in found(tmp_path, "4889f8 90 7400" + "90" * MOST_INSTRUCTIONS + "c3")] == [0]
    assert [at for at, *_ in found(tmp_path, "4889f8 90 7400" + "90" * 1000 + "c3")] == [0, 3, 4]
    late = "4889f8 90 7400" + "90" * 1000 + "e9" + (-1005 - 3 & 0xFFFFFFFF).to_bytes(4, "little").hex()
    assert [at for at, *_ in found(tmp_path, late)] == [0]  # back to 3, a thousand instructions later
    calling = "4889f8 90 7400 e800000000 c3"
    assert [at for at, *_ in found(tmp_path, calling)] == [0, 3, 4]
    assert [at for at, *_ in found(tmp_path, calling, throws=True)] == [0]  # a handler may come back anywhere
    assert [at for at, *_ in found(tmp_path, "4889f8 90 7400 c3", throws=True)] == [0, 3, 4]
    assert [at for at, *_ in found(tmp_path, "06")] == [0]  # no instruction
    (tmp_path / "none").touch()
    assert len(places(Code(open_file(tmp_path / "none")), 0, throws=False)) == 1


def test_the_disassemblers_tables_of_names_are_not_imported(tmp_path: Path) -> None:
    """They take 0.1 s and 20 MB."""
    found(tmp_path, "4889f8 90 c3")
    assert "iced_x86._iced_x86_py" in sys.modules
    assert "iced_x86.Code" not in sys.modules


def test_what_is_read_of_every_call_is_listed() -> None:
    """What the programs read is in bpf/: here only that no call is forgotten, and some are as they are there."""
    reads = {call.symbol: call.reads for call in calls.CALLS}
    assert all(numbers <= set(range(21)) - {calls.ABSENT} for numbers in reads.values())
    assert reads["cuLaunchKernel"] == set(range(9))
    assert reads["cudaMemcpyAsync"] == {0, 2, 3, 4}
    assert reads["cudaMemcpy2DAsync"] == {0, 4, 5, 6, 7}
    assert reads["cuMemcpy3DAsync_v2"] == {0, 1}
    assert reads["ncclAllReduce"] == {2, 3, 4, 5, 6}
    assert reads["ncclGroupEnd"] == frozenset()
    assert reads[calls.symbol_of("range_end")] == frozenset()
    assert reads[calls.symbol_of("range_begin")] == {1}
    assert reads["cublasGemmStridedBatchedEx"] == {3, 4, 5, 8, 20}
    assert reads["_ZN4c10d16ProcessGroupGloo4sendERSt6vectorIN2at6TensorESaIS3_EEii"] == {1, 2, 3}
