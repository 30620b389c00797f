"""The functions Argus hooks, as data: which library exports them and where their arguments lie.

Argument numbers count integer arguments from 0 in the public C signatures of the CUDA driver API, the CUDA runtime API,
NCCL 2.29, cuBLAS 13 and NVTX 3, and of C++ functions of PyTorch 2.13 (attention: 2.0 to 2.15); a 12-byte ``dim3`` by
value counts as two.
``Call.cookie`` packs a row into the 64-bit attach cookie that the BPF programs read (``bpf/argus.h``).
"""

from __future__ import annotations

import enum
import platform
from dataclasses import dataclass
from typing import Literal

ABSENT = 15
"""Argument number of an argument that a function does not have."""
EXIT_BIT = 17
"""Of a cookie: whether the call's exit is probed too."""

ENTRY_ONLY_NEEDS_RETURN_ADDRESS = platform.machine() in ("x86_64", "AMD64")
"""Whether a call can be seen to be over without probing its exit: its return address lies on the stack (x86_64)."""


class Layer(enum.IntEnum):
    """Which library a call belongs to; a call inside a higher or equal CUDA layer is not counted again."""

    DRIVER = 0
    RUNTIME = 1
    NCCL = 2
    TORCH = 3
    CUBLAS = 4
    NVTX = 5


class NameForm(enum.IntEnum):
    """``enum argus_name_form``: how a mark's name is passed."""

    STRING = 0
    """``std::string *``."""
    CHARS = 1
    WIDE = 2
    ATTRIBUTES = 3
    """``nvtxEventAttributes_t *``, in which it is CHARS, WIDE or a registered string, which has no text."""
    OLD_STRING = 4
    """``std::string *`` of libstdc++'s ABI from before C++11: the object is one pointer, to the characters."""


class Shape(enum.IntEnum):
    """``enum argus_shape``: how a call's arguments are laid out."""

    ARGS = 0
    LAUNCH_DRIVER = 1
    LAUNCH_DRIVER_EX = 2
    LAUNCH_RUNTIME = 3
    LAUNCH_RUNTIME_EX = 4
    AREA = 5
    EXTENT = 6
    COLLECTIVE = 7
    P2P = 8
    GROUP_START = 9
    GROUP_END = 10
    COMM_INIT = 11
    COMM_INIT_SCALABLE = 12
    COMM_INIT_ALL = 13
    COMM_SPLIT = 14
    COMM_SHRINK = 15
    COMM_END = 16
    COMM_COUNT = 17
    COMM_RANK = 18
    NAME_OUT = 19
    KERNEL_OUT = 20
    NAME_HOST = 21
    C10D = 22
    C10D_P2P = 23
    MARK = 24
    GEMM = 25
    MATMUL = 26
    ATTENTION = 27


Program = Literal["cuda", "nccl", "control", "torch", "mark", "math"]
"""The BPF functions, ``<program>_enter`` and, where exits are probed, ``<program>_exit``, that a call goes through."""


@dataclass(frozen=True)
class Call:
    """One hooked function.

    Attributes:
        id: Its number in records (``call``).
        symbol: The name a library exports.
        layer: The library it belongs to.
        kind: What it does, as the ``launches`` table says it; for NCCL the operation.
        shape: How its arguments are laid out.
        args: Argument numbers whose meaning depends on ``shape``.
        exit: Whether its exit is probed too: it can block, or it returns a handle. Never where a C++ exception may
            leave it: a return probe takes the place of the return address, no unwinder finds its way past that, and
            the program is terminated (``tests/e2e/test_gloo.py``).
        scale: log2 of the bytes of one element, for calls that count elements.
        offset: Offset of the extent inside the struct that argument 0 points at; of a GEMM the argument that tells how
            many there are, 0: it is one; of attention a second one that is to be empty, 0: there is none.
        dims: Dimensions of that extent.
    """

    id: int
    symbol: str
    layer: Layer
    kind: str
    shape: Shape
    args: tuple[int, ...] = ()
    exit: bool = True
    scale: int = 0
    offset: int = 0
    dims: int = 0

    @property
    def program(self) -> Program:
        if self.shape >= Shape.GEMM:
            return "math"
        if self.shape >= Shape.C10D:
            return "mark" if self.shape is Shape.MARK else "torch"
        if self.layer is not Layer.NCCL and self.shape <= Shape.EXTENT:
            return "cuda"
        return "nccl" if self.shape <= Shape.GROUP_END else "control"

    @property
    def reads(self) -> frozenset[int]:
        """Numbers of the arguments that the BPF programs read at entry: those in registers must still be there."""
        args, shape = self.args, self.shape
        if shape is Shape.LAUNCH_DRIVER:
            return frozenset(range(9))
        if shape is Shape.LAUNCH_RUNTIME:
            return frozenset(range(8))
        if shape in (Shape.LAUNCH_DRIVER_EX, Shape.LAUNCH_RUNTIME_EX):
            return frozenset((0, 1))
        if shape is Shape.GROUP_START or shape is Shape.GROUP_END:
            return frozenset()
        if Shape.COMM_INIT <= shape <= Shape.NAME_HOST:
            return frozenset(range(5))
        if shape in (Shape.C10D, Shape.C10D_P2P):
            numbers = {args[0], args[3], args[4]}  # the second is how many vectors the first one is behind
        elif shape is Shape.MARK:
            numbers = {args[0], args[1]}  # what follows are no arguments
        elif shape is Shape.AREA:
            numbers = {*args, args[2] + 1}
        elif shape is Shape.EXTENT:
            numbers = {*args, 0}
        elif shape is Shape.GEMM:
            numbers = {*args, self.offset}
        elif shape is Shape.ATTENTION:
            numbers = {*args, args[0] + 1, args[0] + 2, self.offset}
        else:
            numbers = set(args)
        return frozenset(numbers - {ABSENT})

    def cookie(self, with_exit: bool, file_slot: int = 0, moved: bool = False) -> int:
        """The attach cookie, as ``bpf/argus.h`` unpacks it.

        Args:
            with_exit: Whether the exit is probed too.
            file_slot: Where maps hold what is known of the file, 0 to 15.
            moved: Whether the stack pointer is below the entry's where the probe is (map ``below``).
        """
        word = self.id | self.shape << 8 | self.layer << 14 | int(with_exit) << EXIT_BIT | self.scale << 18
        numbers = self.args + (ABSENT,) * (6 - len(self.args))
        for place, number in enumerate(numbers):
            word |= number << (20 + 4 * place)
        word |= file_slot << 44 | int(self.kind == "module") << 62 | int(moved) << 63
        return word | self.offset << 48 | self.dims << 60


def _build() -> tuple[Call, ...]:
    calls: list[Call] = []

    def add(
        symbols: str,
        layer: Layer,
        kind: str,
        shape: Shape,
        args: tuple[int, ...] = (),
        exit: bool = True,
        scale: int = 0,
        offset: int = 0,
        dims: int = 0,
    ) -> None:
        for symbol in symbols.split():
            calls.append(Call(len(calls), symbol, layer, kind, shape, args, exit, scale, offset, dims))

    def plain(
        symbols: str,
        kind: str,
        *,
        handle: int = ABSENT,
        stream: int = ABSENT,
        nbytes: int = ABSENT,
        out: int = ABSENT,
        direction: int = ABSENT,
        exit: bool = True,
        shape: Shape = Shape.ARGS,
        scale: int = 0,
        offset: int = 0,
        dims: int = 0,
    ) -> None:
        layer = Layer.RUNTIME if symbols.startswith("cuda") else Layer.DRIVER
        add(symbols, layer, kind, shape, (handle, stream, nbytes, out, direction), exit, scale, offset, dims)

    # Launches. A launch returns at once unless its queue is full, so its exit is probed only on request.
    add("cuLaunchKernel cuLaunchKernel_ptsz", Layer.DRIVER, "kernel", Shape.LAUNCH_DRIVER, exit=False)
    add(
        "cuLaunchCooperativeKernel cuLaunchCooperativeKernel_ptsz",
        Layer.DRIVER,
        "kernel",
        Shape.LAUNCH_DRIVER,
        exit=False,
    )
    add("cuLaunchKernelEx cuLaunchKernelEx_ptsz", Layer.DRIVER, "kernel", Shape.LAUNCH_DRIVER_EX, exit=False)
    add(
        "cudaLaunchKernel cudaLaunchKernel_ptsz cudaLaunchCooperativeKernel cudaLaunchCooperativeKernel_ptsz",
        Layer.RUNTIME,
        "kernel",
        Shape.LAUNCH_RUNTIME,
        exit=False,
    )
    # Not __cudaLaunchKernel, to which nvcc 13 compiles <<<>>>: it calls the exported cudaLaunchKernel, both in the
    # runtime's layer, so each launch would count twice (measured with CUDA 13: 360,000 hits for 180,000 launches).
    add("cudaLaunchKernelExC cudaLaunchKernelExC_ptsz", Layer.RUNTIME, "kernel", Shape.LAUNCH_RUNTIME_EX, exit=False)
    plain("cuGraphLaunch cuGraphLaunch_ptsz", "graph", handle=0, stream=1, exit=False)
    plain("cudaGraphLaunch cudaGraphLaunch_ptsz", "graph", handle=0, stream=1, exit=False)

    # Copies and fills. "Async" copies of pageable memory block, so their exits count.
    plain("cuMemcpyAsync cuMemcpyAsync_ptsz", "memcpy", handle=0, nbytes=2, stream=3)
    plain("cuMemcpyHtoDAsync_v2 cuMemcpyHtoDAsync_v2_ptsz", "memcpy_h2d", handle=0, nbytes=2, stream=3)
    plain("cuMemcpyDtoHAsync_v2 cuMemcpyDtoHAsync_v2_ptsz", "memcpy_d2h", handle=0, nbytes=2, stream=3)
    plain("cuMemcpyDtoDAsync_v2 cuMemcpyDtoDAsync_v2_ptsz", "memcpy_d2d", handle=0, nbytes=2, stream=3)
    plain("cuMemcpyPeerAsync cuMemcpyPeerAsync_ptsz", "memcpy_d2d", handle=0, nbytes=4, stream=5)
    plain(
        "cuMemcpy2DAsync_v2 cuMemcpy2DAsync_v2_ptsz",
        "memcpy",
        handle=0,
        stream=1,
        shape=Shape.EXTENT,
        offset=112,
        dims=2,
    )
    plain(
        "cuMemcpy3DAsync_v2 cuMemcpy3DAsync_v2_ptsz",
        "memcpy",
        handle=0,
        stream=1,
        shape=Shape.EXTENT,
        offset=176,
        dims=3,
    )
    plain("cuMemcpy cuMemcpy_ptds", "memcpy", handle=0, nbytes=2)
    plain("cuMemcpyHtoD_v2 cuMemcpyHtoD_v2_ptds", "memcpy_h2d", handle=0, nbytes=2)
    plain("cuMemcpyDtoH_v2 cuMemcpyDtoH_v2_ptds", "memcpy_d2h", handle=0, nbytes=2)
    plain("cuMemsetD8Async cuMemsetD8Async_ptsz", "memset", handle=0, nbytes=2, stream=3)
    plain("cuMemsetD16Async cuMemsetD16Async_ptsz", "memset", handle=0, nbytes=2, stream=3, scale=1)
    plain("cuMemsetD32Async cuMemsetD32Async_ptsz", "memset", handle=0, nbytes=2, stream=3, scale=2)
    plain("cudaMemcpyAsync cudaMemcpyAsync_ptsz", "memcpy", handle=0, nbytes=2, direction=3, stream=4)
    plain("cudaMemcpyPeerAsync", "memcpy_d2d", handle=0, nbytes=4, stream=5)
    plain(
        "cudaMemcpy2DAsync cudaMemcpy2DAsync_ptsz",
        "memcpy",
        handle=0,
        nbytes=4,
        direction=6,
        stream=7,
        shape=Shape.AREA,
    )
    plain(
        "cudaMemcpy3DAsync cudaMemcpy3DAsync_ptsz", "memcpy", handle=0, stream=1, shape=Shape.EXTENT, offset=128, dims=3
    )
    plain("cudaMemcpy cudaMemcpy_ptds", "memcpy", handle=0, nbytes=2, direction=3)
    plain("cudaMemsetAsync cudaMemsetAsync_ptsz", "memset", handle=0, nbytes=2, stream=3)
    plain("cudaMemset cudaMemset_ptds", "memset", handle=0, nbytes=2)

    # Waiting for the GPU.
    plain("cuStreamSynchronize cuStreamSynchronize_ptsz", "sync", handle=0, stream=0)
    plain("cuEventSynchronize", "sync", handle=0)
    plain("cuCtxSynchronize cuCtxSynchronize_v2", "sync")
    plain("cudaStreamSynchronize cudaStreamSynchronize_ptsz", "sync", handle=0, stream=0)
    plain("cudaEventSynchronize", "sync", handle=0)
    plain("cudaDeviceSynchronize", "sync")

    # Loading code: where just-in-time compilation happens.
    plain("cuModuleLoad cuModuleLoadData cuModuleLoadDataEx cuModuleLoadFatBinary", "module", out=0)
    plain("cuLibraryLoadData cuLibraryLoadFromFile", "module", out=0)
    plain("cudaLibraryLoadData cudaLibraryLoadFromFile", "module", out=0)
    plain("cuLinkComplete", "module", handle=0)

    # Memory.
    plain("cuMemAlloc_v2 cuMemAllocManaged cuMemHostAlloc cuMemAllocHost_v2", "alloc", out=0, nbytes=1)
    plain("cuMemAllocAsync cuMemAllocAsync_ptsz", "alloc", out=0, nbytes=1, stream=2)
    plain("cuMemCreate", "alloc", out=0, nbytes=1)
    plain("cudaMalloc cudaMallocManaged cudaMallocHost cudaHostAlloc", "alloc", out=0, nbytes=1)
    plain("cudaMallocAsync cudaMallocAsync_ptsz", "alloc", out=0, nbytes=1, stream=2)
    plain("cuMemFree_v2 cuMemFreeHost", "free", handle=0)
    plain("cuMemFreeAsync cuMemFreeAsync_ptsz", "free", handle=0, stream=1)
    plain("cudaFree cudaFreeHost", "free", handle=0)
    plain("cudaFreeAsync cudaFreeAsync_ptsz", "free", handle=0, stream=1)

    # NCCL: count, dtype, redop, peer, comm, stream.
    no = ABSENT
    add("ncclAllReduce", Layer.NCCL, "AllReduce", Shape.COLLECTIVE, (2, 3, 4, no, 5, 6))
    add("ncclReduce", Layer.NCCL, "Reduce", Shape.COLLECTIVE, (2, 3, 4, 5, 6, 7))
    add("ncclBroadcast", Layer.NCCL, "Broadcast", Shape.COLLECTIVE, (2, 3, no, 4, 5, 6))
    add("ncclBcast", Layer.NCCL, "Broadcast", Shape.COLLECTIVE, (1, 2, no, 3, 4, 5))
    add("ncclReduceScatter", Layer.NCCL, "ReduceScatter", Shape.COLLECTIVE, (2, 3, 4, no, 5, 6))
    add("ncclAllGather", Layer.NCCL, "AllGather", Shape.COLLECTIVE, (2, 3, no, no, 4, 5))
    add("ncclAlltoAll", Layer.NCCL, "AlltoAll", Shape.COLLECTIVE, (2, 3, no, no, 4, 5))
    add("ncclGather", Layer.NCCL, "Gather", Shape.COLLECTIVE, (2, 3, no, 4, 5, 6))
    add("ncclScatter", Layer.NCCL, "Scatter", Shape.COLLECTIVE, (2, 3, no, 4, 5, 6))
    add("ncclSend", Layer.NCCL, "Send", Shape.P2P, (1, 2, no, 3, 4, 5))
    add("ncclRecv", Layer.NCCL, "Recv", Shape.P2P, (1, 2, no, 3, 4, 5))
    add("ncclGroupStart", Layer.NCCL, "GroupStart", Shape.GROUP_START)
    add("ncclGroupEnd", Layer.NCCL, "GroupEnd", Shape.GROUP_END)
    add("ncclCommInitRank ncclCommInitRankConfig", Layer.NCCL, "comm_init", Shape.COMM_INIT)
    add("ncclCommInitRankScalable", Layer.NCCL, "comm_init", Shape.COMM_INIT_SCALABLE)
    add("ncclCommInitAll", Layer.NCCL, "comm_init", Shape.COMM_INIT_ALL)
    add("ncclCommSplit", Layer.NCCL, "comm_split", Shape.COMM_SPLIT)
    add("ncclCommShrink", Layer.NCCL, "comm_split", Shape.COMM_SHRINK)
    add("ncclCommDestroy ncclCommAbort ncclCommFinalize", Layer.NCCL, "comm_end", Shape.COMM_END, exit=False)
    add("ncclCommCount", Layer.NCCL, "comm_query", Shape.COMM_COUNT)
    add("ncclCommUserRank", Layer.NCCL, "comm_query", Shape.COMM_RANK)

    # PyTorch's process group for gloo (torch/csrc/distributed/c10d/ProcessGroupGloo.hpp): tensors, how many vectors
    # they lie in, none, peer, process group. The result is returned through a pointer, which takes the first register
    # on x86_64 and one of its own on aarch64.
    first = 1 if platform.machine() in ("aarch64", "arm64") else 2

    def gloo(method: str, op: str, parameters: str, at: int | None, depth: int, *, peer: int = ABSENT) -> None:
        """``at``: which parameter, from 0, has the tensors that count as the call's; None: none has."""
        shape = Shape.C10D_P2P if peer != ABSENT else Shape.C10D
        tensors = ABSENT if at is None else first + at
        name = f"_ZN4c10d16ProcessGroupGloo{len(method)}{method}E{parameters}"
        args = (tensors, depth, ABSENT, peer if peer == ABSENT else first + peer, first - 1)
        add(name, Layer.TORCH, op, shape, args, exit=False)

    tensor, vector = "RN2at6TensorE", "RSt6vectorIN2at6TensorESaIS3_EE"
    nested = "RSt6vectorIS1_IN2at6TensorESaIS3_EESaIS5_EE"
    gloo("allreduce", "AllReduce", f"{vector}RKNS_16AllreduceOptionsE", 0, 1)
    gloo("allreduce_coalesced", "AllReduce", f"{vector}RKNS_25AllreduceCoalescedOptionsE", 0, 1)
    gloo("broadcast", "Broadcast", f"{vector}RKNS_16BroadcastOptionsE", 0, 1)
    gloo("reduce", "Reduce", f"{vector}RKNS_13ReduceOptionsE", 0, 1)
    gloo("allgather", "AllGather", f"{nested}RS5_RKNS_16AllgatherOptionsE", 1, 1)
    gloo("_allgather_base", "AllGather", f"{tensor}S3_RKNS_16AllgatherOptionsE", 1, 0)
    gloo("allgather_into_tensor_coalesced", "AllGather", f"{vector}S6_RKNS_16AllgatherOptionsE", 1, 1)
    gloo("reduce_scatter", "ReduceScatter", f"{vector}RS1_IS5_SaIS5_EERKNS_20ReduceScatterOptionsE", 0, 1)
    gloo("_reduce_scatter_base", "ReduceScatter", f"{tensor}S3_RKNS_20ReduceScatterOptionsE", 0, 0)
    gloo("reduce_scatter_tensor_coalesced", "ReduceScatter", f"{vector}S6_RKNS_20ReduceScatterOptionsE", 0, 1)
    gloo("gather", "Gather", f"{nested}RS5_RKNS_13GatherOptionsE", 1, 1)
    gloo("scatter", "Scatter", f"{vector}RS1_IS5_SaIS5_EERKNS_14ScatterOptionsE", 0, 1)
    gloo("alltoall", "AlltoAll", f"{vector}S6_RKNS_15AllToAllOptionsE", 1, 1)
    gloo("alltoall_base", "AlltoAll", f"{tensor}S3_RSt6vectorIlSaIlEES7_RKNS_15AllToAllOptionsE", 1, 0)
    gloo("barrier", "Barrier", "RKNS_14BarrierOptionsE", None, 0)
    gloo("send", "Send", f"{vector}ii", 0, 1, peer=1)
    gloo("recv", "Recv", f"{vector}ii", 0, 1, peer=1)
    add("_ZN4c10d16ProcessGroupGlooD1Ev _ZN4c10d16ProcessGroupGlooD2Ev", Layer.TORCH, "comm_end", Shape.COMM_END, (),
        exit=False)  # fmt: skip

    # What PyTorch does, step by step: handle, name (a std::string), whether the handle is behind a pointer, and how the
    # name is passed.
    string = "RKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
    pointer = "RKN3c1013intrusive_ptrI{}NS{}_6detail34intrusive_target_default_null_typeI{}EEEE"

    def mark(
        symbol: str,
        kind: str,
        handle: int = ABSENT,
        name: int = ABSENT,
        behind: int = 0,
        form: NameForm = NameForm.STRING,
    ) -> None:
        add(symbol, Layer.TORCH, kind, Shape.MARK, (handle, name, behind, form), exit=False)

    # As in PyPI's wheels of 2.0 to 2.15: those up to 2.6 have the ABI from before C++11, which other builds of these
    # versions need not have; std::optional came with 2.2, what is static in C++ with 2.1, and in C with 2.8.
    profiler, work = "_ZN5torch8autograd8profiler", "_ZN4c10d4Work"
    for text, again, form in ((string, "S7_", NameForm.STRING), ("RKSs", "Ss", NameForm.OLD_STRING)):
        for optional in (f"RKSt8optionalI{again}E", f"RKN3c108optionalI{again}EE"):
            mark(f"{profiler}25record_function_enter_newE{text}{optional}", "range_begin", name=first - 1, form=form)
    for static in ("L", ""):
        instance = pointer.format("NS1_20PythonRecordFunctionE", 2, "S4_")
        mark(f"{profiler}{static}24record_function_exit_newE{instance}", "range_end")
    mark(
        "_ZN5torch8autograd6Engine7executeERKSt6vectorINS0_4EdgeESaIS3_EERKS2_IN2at6TensorESaIS9_EEbbbS7_",
        "backward_begin",
    )
    # A function in C, from which no exception comes.
    backward = "22THPEngine_run_backwardP7_objectS0_S0_"
    add(f"_ZL{backward} _Z{backward}", Layer.TORCH, "backward", Shape.MARK, (ABSENT, ABSENT, 0, 0))
    mark("_ZN4c10d7Reducer17finalize_backwardEv", "wait")
    mark(f"{work}4waitENSt6chrono8durationIlSt5ratioILl1ELl1000EEEE", "wait", handle=0)
    run = pointer.format("S1_", 2, "S1_")
    for passed in (run, run.removeprefix("RK")):  # by value up to 2.3, which is by reference, too: it has a destructor
        mark(f"_ZN4c10d16ProcessGroupGloo9AsyncWork7executeE{passed}", "work_begin", handle=0, behind=1)
    mark(f"{work}6finishENSt15__exception_ptr13exception_ptrE", "work_end", handle=0)

    # NVTX 2 and 3 (nvtx3/nvToolsExt.h): domain, name. The domain is NULL where there is no tool, and so is what the
    # functions return: their exits would tell nothing.
    def nvtx(symbols: str, kind: str, form: NameForm | None = None, domain: bool = False) -> None:
        name = ABSENT if form is None else int(domain)
        for symbol in symbols.split():
            add(symbol, Layer.NVTX, kind, Shape.MARK, (0 if domain else ABSENT, name, 0, form or 0), exit=False)

    for verb, kind in (("RangePush", "nvtx_push"), ("RangeStart", "nvtx_start"), ("Mark", "nvtx_mark")):
        nvtx(f"nvtx{verb}A", kind, NameForm.CHARS)
        nvtx(f"nvtx{verb}W", kind, NameForm.WIDE)
        nvtx(f"nvtx{verb}Ex", kind, NameForm.ATTRIBUTES)
        nvtx(f"nvtxDomain{verb}Ex", kind, NameForm.ATTRIBUTES, domain=True)
    for verb, kind in (("RangePop", "nvtx_pop"), ("RangeEnd", "nvtx_end")):
        nvtx(f"nvtx{verb}", kind)
        nvtx(f"nvtxDomain{verb}", kind, domain=True)

    # cuBLAS, row by row of the public headers: m, n, k and, where the function's name does not tell it, A's type. Those
    # for complex numbers, and of groups of different sizes, are left out.
    def gemm(symbol: str, dtype: int = ABSENT, batch: int = 0) -> None:
        for name in (symbol, f"{symbol}_64"):
            add(name, Layer.CUBLAS, "gemm", Shape.GEMM, (3, 4, 5, dtype), offset=batch)

    for letter in "SDH":
        gemm(f"cublas{letter}gemm" + ("" if letter == "H" else "_v2"))
        gemm(f"cublas{letter}gemmBatched", batch=14)
        gemm(f"cublas{letter}gemmStridedBatched", batch=17)
    gemm("cublasSgemmEx", 8)
    gemm("cublasGemmEx", 8)
    gemm("cublasGemmBatchedEx", 8, 17)
    gemm("cublasGemmStridedBatchedEx", 8, 20)
    add("cublasLtMatmul", Layer.CUBLAS, "gemm", Shape.MATMUL, (4, 6, 11))

    # PyTorch's attention: the query (key and value follow it), whether it is causal, and up to two that are to be
    # empty, since they make sizes mean something else: lengths of packed sequences, a window. Of the forms of an
    # operator a version of PyTorch has one. The result is returned through a pointer. Where an exit would have to be
    # probed to know that the call is over, they are left out, since exceptions may leave them.
    def attention(operator: str, parameters: str, query: int, causal: int, empty: int = ABSENT, also: int = 0) -> None:
        name = f"_ZN2at4_ops{len(operator)}{operator}4callERKNS_6TensorE{parameters}"
        if ENTRY_ONLY_NEEDS_RETURN_ADDRESS:
            add(name, Layer.TORCH, "attention", Shape.ATTENTION, (query, causal, empty, ABSENT, ABSENT), False, 0, also)

    dense, size, maybe, seven = "_scaled_dot_product", "N3c106SymIntE", "RKSt8optionalIS2_E", "S4_" * 7
    attention(f"{dense}_flash_attention", "S4_S4_dbb", 1, 4)  # 2.0
    attention(f"{dense}_flash_attention", "S4_S4_dbbN3c108optionalIdEE", 1, 4)  # 2.1
    attention(f"{dense}_flash_attention", "S4_S4_dbbSt8optionalIdE", 1, 4)
    attention(f"{dense}_flash_attention_backward", f"{seven}lldbll", 2, 11)  # 2.0
    attention(f"{dense}_flash_attention_backward", f"{seven}lldbS4_S4_N3c108optionalIdEE", 2, 11)  # 2.1
    attention(f"{dense}_flash_attention_backward", f"{seven}{size}S6_dbS4_S4_St8optionalIdE", 2, 11)
    attention(f"{dense}_efficient_attention", "S4_S4_bb", 1, 5)  # 2.0
    attention(f"{dense}_efficient_attention", "S4_S4_RKN3c108optionalIS2_EEbdbNS6_IdEE", 1, 6)  # 2.1
    attention(f"{dense}_efficient_attention", f"S4_S4_{maybe}bdbS5_IdE", 1, 6)
    attention(f"{dense}_efficient_attention_backward", "S4_S4_S4_S4_S4_bb", 2, 7)  # 2.0
    for optional in ("N3c108optionalIdEE", "St8optionalIdE"):  # 2.1, and since
        attention(f"{dense}_efficient_attention_backward", f"{seven}S4_dSt5arrayIbLm4EEb{optional}", 2, 11)
    attention(f"{dense}_cudnn_attention", "S4_S4_dbbSt8optionalIdE", 1, 4)  # 2.3 and 2.4
    attention(f"{dense}_cudnn_attention", f"S4_S4_{maybe}bdbbS5_IdE", 1, 6)
    attention(f"{dense}_cudnn_attention_backward", f"{seven}{size}S6_dbS4_S4_St8optionalIdE", 2, 11)  # 2.4
    attention(f"{dense}_cudnn_attention_backward", f"{seven}S4_S4_S4_{size}S6_dbSt8optionalIdE", 2, 14)
    attention(f"{dense}_flash_attention_for_cpu", f"S4_S4_db{maybe}S5_IdE", 1, 4)
    attention(f"{dense}_flash_attention_for_cpu_backward", f"S4_S4_S4_S4_S4_db{maybe}S5_IdE", 2, 7)
    # What those call, and what compiled programs call alone; as they are since 2.4.
    for tail in ("", "S8_S5_IlE"):  # the latter since 2.12
        tail = f"S4_S4_{maybe}S8_{size}SA_dbbS5_IdES5_ISA_ESC_S8_S8_{tail}"
        attention("_flash_attention_forward", tail, 1, 8, also=12)
    attention("_flash_attention_backward", f"{seven}{size}S6_dbS4_S4_St8optionalIdES7_IS6_ES9_", 2, 11, also=16)
    attention("_efficient_attention_forward", f"S4_S4_{maybe}S8_S8_S5_I{size}ESB_dlbS5_IdES8_S5_IlE", 1, 9, 5, 13)
    tail = f"S4_S4_S4_{maybe}S4_S8_S8_{size}SA_S4_dS4_S4_lbS5_IdES5_IlESC_b"
    attention("_efficient_attention_backward", tail, 2, 14, 7)
    for tail in ("", "S8_S8_"):  # the latter since 2.14
        attention("_cudnn_attention_forward", f"S4_S4_{maybe}S8_S8_{size}SA_bdbbS5_IdE{tail}", 1, 10)
    attention("_cudnn_attention_backward", f"{seven}S4_S4_S4_{size}S6_dbSt8optionalIdE", 2, 14)

    # Names of kernels, as they become known.
    add("cuModuleGetFunction", Layer.DRIVER, "name", Shape.NAME_OUT)
    add("cuLibraryGetKernel", Layer.DRIVER, "name", Shape.NAME_OUT)
    add("cuKernelGetFunction", Layer.DRIVER, "name", Shape.KERNEL_OUT)
    add("__cudaRegisterFunction", Layer.RUNTIME, "name", Shape.NAME_HOST, exit=False)
    return tuple(calls)


CALLS: tuple[Call, ...] = _build()
"""Every hooked function; ``CALLS[n].id == n``."""

BY_SYMBOL: dict[str, Call] = {call.symbol: call for call in CALLS}

NCCL_DTYPES = (
    "int8",
    "uint8",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "bfloat16",
    "float8e4m3",
    "float8e5m2",
)
"""``ncclDataType_t`` by value."""
NCCL_DTYPE_BYTES = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)
NCCL_REDOPS = ("sum", "prod", "max", "min", "avg")
"""``ncclRedOp_t`` by value; larger ones are made by the program (ncclRedOpCreatePreMulSum)."""
TORCH_DTYPE = 64
"""Added to a ``c10::ScalarType`` in ``COLLECTIVE["dtype"]``, beside NCCL's types."""
TORCH_DTYPES = {
    0: ("uint8", 1),
    1: ("int8", 1),
    2: ("int16", 2),
    3: ("int32", 4),
    4: ("int64", 8),
    5: ("float16", 2),
    6: ("float32", 4),
    7: ("float64", 8),
    8: ("complex32", 4),
    9: ("complex64", 8),
    10: ("complex128", 16),
    11: ("bool", 1),
    15: ("bfloat16", 2),
    23: ("float8e5m2", 1),
    24: ("float8e4m3", 1),
}
"""``c10::ScalarType`` by value (torch/headeronly/core/ScalarType.h): name and bytes."""
DIRECTIONS = {0: "memcpy_h2h", 1: "memcpy_h2d", 2: "memcpy_d2h", 3: "memcpy_d2d"}
"""``cudaMemcpyKind`` by value; 4 leaves it to the addresses."""


def symbols_of(kind: str) -> tuple[str, ...]:
    """All functions that do the same."""
    return tuple(call.symbol for call in CALLS if call.kind == kind)


def symbol_of(kind: str) -> str:
    """The first symbol of a kind of call."""
    return next(call.symbol for call in CALLS if call.kind == kind)


def probes_exit(call: Call, launch_durations: bool) -> bool:
    """Whether this call's exit is probed.

    On a machine whose return addresses travel in a register, a runtime call can be known to be over only by its exit.
    """
    if call.exit or launch_durations:
        return True
    return call.layer is Layer.RUNTIME and call.program == "cuda" and not ENTRY_ONLY_NEEDS_RETURN_ADDRESS
