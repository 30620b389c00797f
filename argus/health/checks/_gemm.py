"""Matrix products of integers on every multiprocessor (SM) of a GPU, whose sums are known exactly.

Two kernels, as PTX, which the driver compiles for the GPU that is there (PTX ISA 7.0 and 6.0, which drivers since CUDA
11.0 know): ``argus_gemm_f16`` multiplies on tensor cores (mma.sync.m16n8k16 of half-precision numbers, sums in single
precision; sm_80 and newer), ``argus_gemm_f32`` by fused multiply-add on GPUs before that. Operands stay in registers
and are multiplied again and again: nothing waits for memory, so the rate follows the clock under full load, and every
SM computes all of it. That is not the rate of a GEMM library: mma.sync reaches some 60 % of Hopper's dense peak, which
only wgmma reaches; and caches and memory are the copies' to test. What counts is the difference to peers and past.

Each warp adds its sums, as integers, to those of its SM, and each block counts itself there. All products are integers
below 2^24, which single precision holds exactly; so after any number of launches an SM's sums are the number of blocks
that ran there times what one block gives, modulo 2^32, and a single wrong bit in any of them shows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

THREADS, WARPS, BLOCKS_PER_SM = 256, 8, 2
"""Of a block; 16 warps keep the four tensor cores of an SM busy, and their registers fit."""
SMS = 512
"""SMs that are distinguished, by %smid modulo this: a GPU of today has 160 at most."""


@dataclass(frozen=True)
class Kernel:
    """A kernel, its operands and what comes out.

    Attributes:
        name: Its name in ``ptx``.
        ptx: Text for cuModuleLoadData. Parameters: sums (u32[SMS][WARPS][words][32]), blocks that ran (u32[SMS]),
            operands, rounds (u32).
        operands: u32[words of a thread][32 lanes].
        rounds: So often each launch multiplies.
        sums: What a warp adds in a launch: int64[words of a thread][32 lanes].
        flop: Floating-point operations of a warp in a launch.
    """

    name: str
    ptx: str
    operands: NDArray[np.uint32]
    rounds: int
    sums: NDArray[np.int64]
    flop: int


def kernel(capability: tuple[int, int]) -> Kernel:
    """The kernel for GPUs of a compute capability."""
    return _tensor_cores() if capability >= (8, 0) else _plain()


def wrong(of: Kernel, launches: int, grid: int, sums: NDArray[np.uint32], ran: NDArray[np.uint32]) -> list[int]:
    """The SMs whose sums are not what they must be, as %smid names them; [-1]: blocks are missing, nobody knows where.

    Args:
        of: What ran.
        launches: How often.
        grid: Blocks of each launch.
        sums, ran: What it left: u32[SMS, WARPS, words, 32] and u32[SMS].
    """
    one = (of.sums & 0xFFFFFFFF).astype(np.uint32)
    bad = np.flatnonzero((sums != ran[:, None, None, None] * one).reshape(SMS, -1).any(1)).tolist()
    return bad or ([] if int(ran.sum(dtype=np.int64)) == launches * grid else [-1])


def _ptx(version: str, target: str, name: str, registers: str, words: int, load: list[str], body: list[str]) -> str:
    """A kernel: ``load`` after %operand points to the lane's operands, ``body`` again and again, %c<words> added up."""
    lines = [
        f".version {version}", f".target {target}", ".address_size 64",
        f".visible .entry {name}(.param .u64 sums, .param .u64 ran, .param .u64 operands, .param .u32 rounds)",
        f".maxntid {THREADS}, 1, 1", f".minnctapersm {BLOCKS_PER_SM}", "{",
        ".reg .pred %more, %first;", ".reg .b32 %lane, %thread, %warp, %sm, %left, %sum;",
        ".reg .b64 %operand, %to, %counter, %offset;", registers,
        "mov.u32 %thread, %tid.x;", "and.b32 %lane, %thread, 31;", "shr.u32 %warp, %thread, 5;",
        "mov.u32 %sm, %smid;", f"and.b32 %sm, %sm, {SMS - 1};",
        "ld.param.u64 %operand, [operands];", "cvta.to.global.u64 %operand, %operand;",
        "mad.wide.u32 %operand, %lane, 4, %operand;", *load,
        *(f"mov.f32 %c{k}, 0f00000000;" for k in range(words)),
        "ld.param.u32 %left, [rounds];",
        "again:", *body, "sub.u32 %left, %left, 1;", "setp.ne.u32 %more, %left, 0;", "@%more bra again;",
        "ld.param.u64 %to, [sums];", "cvta.to.global.u64 %to, %to;",
        f"mad.lo.u32 %warp, %sm, {WARPS}, %warp;", f"mad.wide.u32 %to, %warp, {words * 128}, %to;",
        "mad.wide.u32 %to, %lane, 4, %to;",
    ]  # fmt: skip
    for k in range(words):
        lines += [f"cvt.rni.s32.f32 %sum, %c{k};", f"red.global.add.u32 [%to+{k * 128}], %sum;"]
    lines += [
        "setp.eq.u32 %first, %thread, 0;", "ld.param.u64 %counter, [ran];", "cvta.to.global.u64 %counter, %counter;",
        "mad.wide.u32 %counter, %sm, 4, %counter;", "@%first red.global.add.u32 [%counter], 1;", "ret;", "}", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _tensor_cores() -> Kernel:
    """C[k] = (A[0] + A[1]) B[k], 16 x 16 by 16 x 8, eight of them in a warp: eight chains of products hide the latency
    of each, and two A in turn make bits change. Which thread holds what: PTX ISA, matrix fragments for mma.m16n8k16."""
    rounds, chains = 4096, 8
    rng = np.random.default_rng(16816)
    a, b = rng.integers(-3, 4, (2, 16, 16)), rng.integers(-3, 4, (chains, 16, 8))
    lane = np.arange(32)
    group, pair = lane // 4, lane % 4 * 2
    halves = []  # pairs of columns of A and of rows of B, as the words of a thread hold them
    for each in a:
        for row, column in ((0, 0), (8, 0), (0, 8), (8, 8)):
            halves.append([each[group + row, pair + column + k] for k in (0, 1)])
    for each in b:
        for row in (0, 8):
            halves.append([each[pair + row + k, group] for k in (0, 1)])
    words = np.array(halves).astype(np.float16).view(np.uint16).astype(np.uint32)
    c = (a[0] + a[1]) @ b * rounds
    sums = [each[group + row, pair + k] for each in c for row in (0, 8) for k in (0, 1)]
    load = [f"ld.global.u32 %a{k}, [%operand+{k * 128}];" for k in range(8)]
    load += [f"ld.global.u32 %b{k}, [%operand+{(8 + k) * 128}];" for k in range(2 * chains)]
    body = []
    for first in (0, 4):
        for chain in range(chains):
            to = ", ".join(f"%c{4 * chain + k}" for k in range(4))
            left = ", ".join(f"%a{first + k}" for k in range(4))
            right = f"%b{2 * chain}, %b{2 * chain + 1}"
            body.append(
                f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{{to}}}, {{{left}}}, {{{right}}}, {{{to}}};"
            )
    registers = f".reg .b32 %a<8>, %b<{2 * chains}>; .reg .f32 %c<{4 * chains}>;"
    ptx = _ptx("7.0", "sm_80", "argus_gemm_f16", registers, 4 * chains, load, body)
    operands = words[:, 0] | words[:, 1] << np.uint32(16)
    return Kernel("argus_gemm_f16", ptx, operands, rounds, np.array(sums), rounds * len(body) * 2 * 16 * 16 * 8)


def _plain() -> Kernel:
    """Outer products of 4 by 4 numbers in every thread, two in turn."""
    rounds = 8192
    numbers = np.random.default_rng(32).integers(-3, 4, (12, 32))
    a, b = numbers[:8].reshape(2, 4, 32), numbers[8:]
    sums = ((a[0] + a[1])[:, None] * b[None] * rounds).reshape(16, 32)
    load = [f"ld.global.f32 %{'ab'[k > 7]}{k % 8}, [%operand+{k * 128}];" for k in range(12)]
    body = [
        f"fma.rn.f32 %c{4 * row + column}, %a{first + row}, %b{column}, %c{4 * row + column};"
        for first in (0, 4)
        for row in range(4)
        for column in range(4)
    ]
    ptx = _ptx("6.0", "sm_50", "argus_gemm_f32", ".reg .f32 %a<8>, %b<4>, %c<16>;", 16, load, body)
    operands = numbers.astype(np.float32).view(np.uint32)
    return Kernel("argus_gemm_f32", ptx, operands, rounds, sums, rounds * len(body) * 2 * 32)
