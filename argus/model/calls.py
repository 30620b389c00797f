"""The functions Argus hooks, as data: which library exports them and where their arguments lie.

Argument numbers count integer arguments from 0 in the public C signatures of the CUDA driver API, the CUDA runtime API,
NCCL 2.29, cuBLAS 13 and NVTX 3, and of C++ functions of PyTorch 2.13 (attention: 2.0 to 2.15); a 12-byte ``dim3`` by
value counts as two.
``Call.cookie`` packs a row into the 64-bit attach cookie that the BPF programs read (``bpf/argus.h``).
"""

from __future__ import annotations

import enum
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

ABSENT = 15
"""Argument number of an argument that a function does not have."""
EXIT_BIT = 17
"""Of a cookie: whether the call's exit is probed too."""
FILE_SLOTS = 256
"""``ARGUS_FILES`` of bpf/argus.h: slots of a cookie for what is known of a file."""

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
        kind: What it does, as the ``launches`` table names it; for NCCL the operation.
        shape: How its arguments are laid out.
        args: Argument numbers whose meaning depends on ``shape``.
        exit: Whether its exit is probed too: it can block, or it returns a handle. Never where a C++ exception may
            leave it: a return probe takes the place of the return address, no unwinder finds its way past that, and
            the program is terminated (``tests/e2e/test_gloo.py``).
        scale: log2 of the bytes of one element, for calls that count elements.
        offset: Offset of the extent inside the struct that argument 0 points at; of a GEMM the argument with how
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
            file_slot: Where maps hold what is known of the file, less than ``FILE_SLOTS``.
            moved: Whether the stack pointer is below the entry's where the probe is (map ``below``).
        """
        word = self.id | self.shape << 8 | self.layer << 14 | int(with_exit) << EXIT_BIT | self.scale << 18
        numbers = self.args + (ABSENT,) * (6 - len(self.args))
        for place, number in enumerate(numbers):
            word |= number << (20 + 4 * place)
        word |= file_slot << 44 | int(self.kind == "module") << 62 | int(moved) << 63
        return word | self.offset << 52 | self.dims << 60


@dataclass(frozen=True)
class Row:
    """A line of a table: functions that are hooked alike. The fields are those of ``Call``, which gets a number too."""

    symbols: str
    """Names that a library exports, with spaces between."""
    layer: Layer
    kind: str
    shape: Shape
    args: tuple[int, ...] = ()
    exit: bool = True
    scale: int = 0
    offset: int = 0
    dims: int = 0

    def calls(self, first: int) -> list[Call]:
        """Its functions, numbered from ``first``."""
        return [
            Call(first + k, symbol, self.layer, self.kind, self.shape, self.args, self.exit, self.scale, self.offset,
                 self.dims)
            for k, symbol in enumerate(self.symbols.split())
        ]  # fmt: skip


# ---- CUDA: the driver (libcuda) and the runtime (libcudart)


def _launch(symbols: str, shape: Shape) -> Row:
    """A launch returns at once unless its queue is full, so its exit is probed only on request."""
    return Row(symbols, _cuda_layer(symbols), "kernel", shape, exit=False)


def _cuda(
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
) -> Row:
    """``handle`` … ``direction``: numbers of the arguments that mean this; ``out``: a pointer to what is made."""
    args = (handle, stream, nbytes, out, direction)
    return Row(symbols, _cuda_layer(symbols), kind, shape, args, exit, scale, offset, dims)


def _name(symbols: str, shape: Shape, *, exit: bool = True) -> Row:
    return Row(symbols, _cuda_layer(symbols), "name", shape, exit=exit)


def _cuda_layer(symbols: str) -> Layer:
    return Layer.RUNTIME if symbols.startswith(("cuda", "__cuda")) else Layer.DRIVER


DRIVER: dict[str, tuple[Row, ...]] = {
    "launch": (
        _launch("cuLaunchKernel cuLaunchKernel_ptsz", Shape.LAUNCH_DRIVER),
        _launch("cuLaunchCooperativeKernel cuLaunchCooperativeKernel_ptsz", Shape.LAUNCH_DRIVER),
        _launch("cuLaunchKernelEx cuLaunchKernelEx_ptsz", Shape.LAUNCH_DRIVER_EX),
    ),
    "graph": (_cuda("cuGraphLaunch cuGraphLaunch_ptsz", "graph", handle=0, stream=1, exit=False),),
    # "Async" copies of pageable memory block, so their exits count.
    "copy": (
        _cuda("cuMemcpyAsync cuMemcpyAsync_ptsz", "memcpy", handle=0, nbytes=2, stream=3),
        _cuda("cuMemcpyHtoDAsync_v2 cuMemcpyHtoDAsync_v2_ptsz", "memcpy_h2d", handle=0, nbytes=2, stream=3),
        _cuda("cuMemcpyDtoHAsync_v2 cuMemcpyDtoHAsync_v2_ptsz", "memcpy_d2h", handle=0, nbytes=2, stream=3),
        _cuda("cuMemcpyDtoDAsync_v2 cuMemcpyDtoDAsync_v2_ptsz", "memcpy_d2d", handle=0, nbytes=2, stream=3),
        _cuda("cuMemcpyPeerAsync cuMemcpyPeerAsync_ptsz", "memcpy_d2d", handle=0, nbytes=4, stream=5),
        _cuda(
            "cuMemcpy2DAsync_v2 cuMemcpy2DAsync_v2_ptsz",
            "memcpy",
            handle=0,
            stream=1,
            shape=Shape.EXTENT,
            offset=112,
            dims=2,
        ),
        _cuda(
            "cuMemcpy3DAsync_v2 cuMemcpy3DAsync_v2_ptsz",
            "memcpy",
            handle=0,
            stream=1,
            shape=Shape.EXTENT,
            offset=176,
            dims=3,
        ),
        _cuda("cuMemcpy cuMemcpy_ptds", "memcpy", handle=0, nbytes=2),
        _cuda("cuMemcpyHtoD_v2 cuMemcpyHtoD_v2_ptds", "memcpy_h2d", handle=0, nbytes=2),
        _cuda("cuMemcpyDtoH_v2 cuMemcpyDtoH_v2_ptds", "memcpy_d2h", handle=0, nbytes=2),
        _cuda("cuMemsetD8Async cuMemsetD8Async_ptsz", "memset", handle=0, nbytes=2, stream=3),
        _cuda("cuMemsetD16Async cuMemsetD16Async_ptsz", "memset", handle=0, nbytes=2, stream=3, scale=1),
        _cuda("cuMemsetD32Async cuMemsetD32Async_ptsz", "memset", handle=0, nbytes=2, stream=3, scale=2),
    ),
    "wait": (
        _cuda("cuStreamSynchronize cuStreamSynchronize_ptsz", "sync", handle=0, stream=0),
        _cuda("cuEventSynchronize", "sync", handle=0),
        _cuda("cuCtxSynchronize cuCtxSynchronize_v2", "sync"),
    ),
    # Where just-in-time compilation happens.
    "module": (
        _cuda("cuModuleLoad cuModuleLoadData cuModuleLoadDataEx cuModuleLoadFatBinary", "module", out=0),
        _cuda("cuLibraryLoadData cuLibraryLoadFromFile", "module", out=0),
    ),
    "link": (_cuda("cuLinkComplete", "module", handle=0),),
    "alloc": (
        _cuda("cuMemAlloc_v2 cuMemAllocManaged cuMemHostAlloc cuMemAllocHost_v2", "alloc", out=0, nbytes=1),
        _cuda("cuMemAllocAsync cuMemAllocAsync_ptsz", "alloc", out=0, nbytes=1, stream=2),
        _cuda("cuMemCreate", "alloc", out=0, nbytes=1),
    ),
    "free": (
        _cuda("cuMemFree_v2 cuMemFreeHost", "free", handle=0),
        _cuda("cuMemFreeAsync cuMemFreeAsync_ptsz", "free", handle=0, stream=1),
    ),
    # Names of kernels, as they become known.
    "name": (
        _name("cuModuleGetFunction", Shape.NAME_OUT),
        _name("cuLibraryGetKernel", Shape.NAME_OUT),
        _name("cuKernelGetFunction", Shape.KERNEL_OUT),
    ),
}
"""The driver's functions by what they do."""

RUNTIME: dict[str, tuple[Row, ...]] = {
    # Not __cudaLaunchKernel, to which nvcc 13 compiles <<<>>>: it calls the exported cudaLaunchKernel, both in the
    # runtime's layer, so each launch would count twice (measured with CUDA 13: 360,000 hits for 180,000 launches).
    "launch": (
        _launch(
            "cudaLaunchKernel cudaLaunchKernel_ptsz cudaLaunchCooperativeKernel cudaLaunchCooperativeKernel_ptsz",
            Shape.LAUNCH_RUNTIME,
        ),
        _launch("cudaLaunchKernelExC cudaLaunchKernelExC_ptsz", Shape.LAUNCH_RUNTIME_EX),
    ),
    "graph": (_cuda("cudaGraphLaunch cudaGraphLaunch_ptsz", "graph", handle=0, stream=1, exit=False),),
    "copy": (
        _cuda("cudaMemcpyAsync cudaMemcpyAsync_ptsz", "memcpy", handle=0, nbytes=2, direction=3, stream=4),
        _cuda("cudaMemcpyPeerAsync", "memcpy_d2d", handle=0, nbytes=4, stream=5),
        _cuda(
            "cudaMemcpy2DAsync cudaMemcpy2DAsync_ptsz",
            "memcpy",
            handle=0,
            nbytes=4,
            direction=6,
            stream=7,
            shape=Shape.AREA,
        ),
        _cuda(
            "cudaMemcpy3DAsync cudaMemcpy3DAsync_ptsz",
            "memcpy",
            handle=0,
            stream=1,
            shape=Shape.EXTENT,
            offset=128,
            dims=3,
        ),
        _cuda("cudaMemcpy cudaMemcpy_ptds", "memcpy", handle=0, nbytes=2, direction=3),
        _cuda("cudaMemsetAsync cudaMemsetAsync_ptsz", "memset", handle=0, nbytes=2, stream=3),
        _cuda("cudaMemset cudaMemset_ptds", "memset", handle=0, nbytes=2),
    ),
    "wait": (
        _cuda("cudaStreamSynchronize cudaStreamSynchronize_ptsz", "sync", handle=0, stream=0),
        _cuda("cudaEventSynchronize", "sync", handle=0),
        _cuda("cudaDeviceSynchronize", "sync"),
    ),
    "module": (_cuda("cudaLibraryLoadData cudaLibraryLoadFromFile", "module", out=0),),
    "alloc": (
        _cuda("cudaMalloc cudaMallocManaged cudaMallocHost cudaHostAlloc", "alloc", out=0, nbytes=1),
        _cuda("cudaMallocAsync cudaMallocAsync_ptsz", "alloc", out=0, nbytes=1, stream=2),
    ),
    "free": (
        _cuda("cudaFree cudaFreeHost", "free", handle=0),
        _cuda("cudaFreeAsync cudaFreeAsync_ptsz", "free", handle=0, stream=1),
    ),
    "name": (_name("__cudaRegisterFunction", Shape.NAME_HOST, exit=False),),
}
"""The runtime's functions by what they do."""


def _of_cuda(*sections: str) -> list[Row]:
    """Rows of the driver and the runtime, section by section."""
    return [row for name in sections for table in (DRIVER, RUNTIME) for row in table.get(name, ())]


# ---- NCCL


def _nccl(
    symbol: str,
    operation: str,
    shape: Shape = Shape.COLLECTIVE,
    *,
    count: int,
    dtype: int,
    comm: int,
    stream: int,
    redop: int = ABSENT,
    peer: int = ABSENT,
) -> Row:
    """Numbers of arguments. ``peer``: the other rank, or the root."""
    return Row(symbol, Layer.NCCL, operation, shape, (count, dtype, redop, peer, comm, stream))


def _communicator(symbols: str, kind: str, shape: Shape, *, exit: bool = True) -> Row:
    return Row(symbols, Layer.NCCL, kind, shape, exit=exit)


NCCL: tuple[Row, ...] = (
    _nccl("ncclAllReduce", "AllReduce", count=2, dtype=3, redop=4, comm=5, stream=6),
    _nccl("ncclReduce", "Reduce", count=2, dtype=3, redop=4, peer=5, comm=6, stream=7),
    _nccl("ncclBroadcast", "Broadcast", count=2, dtype=3, peer=4, comm=5, stream=6),
    _nccl("ncclBcast", "Broadcast", count=1, dtype=2, peer=3, comm=4, stream=5),
    _nccl("ncclReduceScatter", "ReduceScatter", count=2, dtype=3, redop=4, comm=5, stream=6),
    _nccl("ncclAllGather", "AllGather", count=2, dtype=3, comm=4, stream=5),
    _nccl("ncclAlltoAll", "AlltoAll", count=2, dtype=3, comm=4, stream=5),
    _nccl("ncclGather", "Gather", count=2, dtype=3, peer=4, comm=5, stream=6),
    _nccl("ncclScatter", "Scatter", count=2, dtype=3, peer=4, comm=5, stream=6),
    _nccl("ncclSend", "Send", Shape.P2P, count=1, dtype=2, peer=3, comm=4, stream=5),
    _nccl("ncclRecv", "Recv", Shape.P2P, count=1, dtype=2, peer=3, comm=4, stream=5),
    _communicator("ncclGroupStart", "GroupStart", Shape.GROUP_START),
    _communicator("ncclGroupEnd", "GroupEnd", Shape.GROUP_END),
    _communicator("ncclCommInitRank ncclCommInitRankConfig", "comm_init", Shape.COMM_INIT),
    _communicator("ncclCommInitRankScalable", "comm_init", Shape.COMM_INIT_SCALABLE),
    _communicator("ncclCommInitAll", "comm_init", Shape.COMM_INIT_ALL),
    _communicator("ncclCommSplit", "comm_split", Shape.COMM_SPLIT),
    _communicator("ncclCommShrink", "comm_split", Shape.COMM_SHRINK),
    _communicator("ncclCommDestroy ncclCommAbort ncclCommFinalize", "comm_end", Shape.COMM_END, exit=False),
    _communicator("ncclCommCount", "comm_query", Shape.COMM_COUNT),
    _communicator("ncclCommUserRank", "comm_query", Shape.COMM_RANK),
)


# ---- PyTorch's process group for gloo (torch/csrc/distributed/c10d/ProcessGroupGloo.hpp)

_FIRST = 1 if platform.machine() in ("aarch64", "arm64") else 2
"""The first parameter of a C++ method that returns an object through a pointer, which takes the first register on
x86_64 and one of its own on aarch64."""
_THIS = _FIRST - 1
_TENSOR, _VECTOR = "RN2at6TensorE", "RSt6vectorIN2at6TensorESaIS3_EE"
_NESTED = "RSt6vectorIS1_IN2at6TensorESaIS3_EESaIS5_EE"


def _gloo(
    method: str, operation: str, parameters: str, *, tensors: int | None = 0, vectors: int = 1, peer: int = ABSENT
) -> Row:
    """A method of the process group.

    Args:
        method, operation: Its name, and the operation as records have it.
        parameters: Their types, mangled.
        tensors: Which parameter, from 0, has the tensors that count as the call's; None: none has.
        vectors: How many vectors they lie in.
        peer: Which parameter is the other rank.
    """
    shape = Shape.C10D if peer == ABSENT else Shape.C10D_P2P
    at = ABSENT if tensors is None else _FIRST + tensors
    other = ABSENT if peer == ABSENT else _FIRST + peer
    name = f"_ZN4c10d16ProcessGroupGloo{len(method)}{method}E{parameters}"
    return Row(name, Layer.TORCH, operation, shape, (at, vectors, ABSENT, other, _THIS), exit=False)


GLOO: tuple[Row, ...] = (
    _gloo("allreduce", "AllReduce", f"{_VECTOR}RKNS_16AllreduceOptionsE"),
    _gloo("allreduce_coalesced", "AllReduce", f"{_VECTOR}RKNS_25AllreduceCoalescedOptionsE"),
    _gloo("broadcast", "Broadcast", f"{_VECTOR}RKNS_16BroadcastOptionsE"),
    _gloo("reduce", "Reduce", f"{_VECTOR}RKNS_13ReduceOptionsE"),
    _gloo("allgather", "AllGather", f"{_NESTED}RS5_RKNS_16AllgatherOptionsE", tensors=1),
    _gloo("_allgather_base", "AllGather", f"{_TENSOR}S3_RKNS_16AllgatherOptionsE", tensors=1, vectors=0),
    _gloo("allgather_into_tensor_coalesced", "AllGather", f"{_VECTOR}S6_RKNS_16AllgatherOptionsE", tensors=1),
    _gloo("reduce_scatter", "ReduceScatter", f"{_VECTOR}RS1_IS5_SaIS5_EERKNS_20ReduceScatterOptionsE"),
    _gloo("_reduce_scatter_base", "ReduceScatter", f"{_TENSOR}S3_RKNS_20ReduceScatterOptionsE", vectors=0),
    _gloo("reduce_scatter_tensor_coalesced", "ReduceScatter", f"{_VECTOR}S6_RKNS_20ReduceScatterOptionsE"),
    _gloo("gather", "Gather", f"{_NESTED}RS5_RKNS_13GatherOptionsE", tensors=1),
    _gloo("scatter", "Scatter", f"{_VECTOR}RS1_IS5_SaIS5_EERKNS_14ScatterOptionsE"),
    _gloo("alltoall", "AlltoAll", f"{_VECTOR}S6_RKNS_15AllToAllOptionsE", tensors=1),
    _gloo(
        "alltoall_base", "AlltoAll", f"{_TENSOR}S3_RSt6vectorIlSaIlEES7_RKNS_15AllToAllOptionsE", tensors=1, vectors=0
    ),
    _gloo("barrier", "Barrier", "RKNS_14BarrierOptionsE", tensors=None, vectors=0),
    _gloo("send", "Send", f"{_VECTOR}ii", peer=1),
    _gloo("recv", "Recv", f"{_VECTOR}ii", peer=1),
    Row("_ZN4c10d16ProcessGroupGlooD1Ev _ZN4c10d16ProcessGroupGlooD2Ev", Layer.TORCH, "comm_end", Shape.COMM_END,
        exit=False),
)  # fmt: skip


# ---- What PyTorch does, step by step. As in PyPI's wheels of 2.0 to 2.15: those up to 2.6 have the ABI from before
# C++11, which other builds of these versions need not have; std::optional came with 2.2, what is static in C++ with
# 2.1, and in C with 2.8.

_STRING = "RKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
_PROFILER, _WORK = "_ZN5torch8autograd8profiler", "_ZN4c10d4Work"
_BACKWARD = "22THPEngine_run_backwardP7_objectS0_S0_"


def _pointer(to: str, number: int, again: str) -> str:
    """``const c10::intrusive_ptr<…>&``, mangled."""
    return f"RKN3c1013intrusive_ptrI{to}NS{number}_6detail34intrusive_target_default_null_typeI{again}EEEE"


def _mark(
    symbol: str,
    kind: str,
    *,
    handle: int = ABSENT,
    name: int = ABSENT,
    behind: int = 0,
    form: NameForm | int = NameForm.STRING,
    layer: Layer = Layer.TORCH,
    exit: bool = False,
) -> Row:
    """``handle``, ``name``: numbers of arguments; ``behind``: whether the handle is behind a pointer; ``form``: how the
    name is passed."""
    return Row(symbol, layer, kind, Shape.MARK, (handle, name, behind, form), exit=exit)


def _range_marks() -> list[Row]:
    rows = []
    for text, again, form in ((_STRING, "S7_", NameForm.STRING), ("RKSs", "Ss", NameForm.OLD_STRING)):
        for optional in (f"RKSt8optionalI{again}E", f"RKN3c108optionalI{again}EE"):
            symbol = f"{_PROFILER}25record_function_enter_newE{text}{optional}"
            rows.append(_mark(symbol, "range_begin", name=_THIS, form=form))
    for static in ("L", ""):
        instance = _pointer("NS1_20PythonRecordFunctionE", 2, "S4_")
        rows.append(_mark(f"{_PROFILER}{static}24record_function_exit_newE{instance}", "range_end"))
    return rows


def _work_marks() -> list[Row]:
    run = _pointer("S1_", 2, "S1_")
    return [
        _mark(f"_ZN4c10d16ProcessGroupGloo9AsyncWork7executeE{passed}", "work_begin", handle=0, behind=1)
        for passed in (
            run,
            run.removeprefix("RK"),
        )  # by value up to 2.3, which is by reference, too: it has a destructor
    ]


TORCH: tuple[Row, ...] = (
    *_range_marks(),
    _mark(
        "_ZN5torch8autograd6Engine7executeERKSt6vectorINS0_4EdgeESaIS3_EERKS2_IN2at6TensorESaIS9_EEbbbS7_",
        "backward_begin",
    ),
    # A function in C, from which no exception comes.
    _mark(f"_ZL{_BACKWARD} _Z{_BACKWARD}", "backward", exit=True),
    _mark("_ZN4c10d7Reducer17finalize_backwardEv", "wait"),
    _mark(f"{_WORK}4waitENSt6chrono8durationIlSt5ratioILl1ELl1000EEEE", "wait", handle=0),
    *_work_marks(),
    _mark(f"{_WORK}6finishENSt15__exception_ptr13exception_ptrE", "work_end", handle=0),
)


# ---- NVTX 2 and 3 (nvtx3/nvToolsExt.h). The domain is NULL where there is no tool, and so is what the functions
# return: their exits would add nothing.


def _nvtx(symbol: str, kind: str, form: NameForm | None = None, *, domain: bool = False) -> Row:
    """``form``: how the name is passed, None: there is none. ``domain``: whether the first argument is one."""
    name = ABSENT if form is None else int(domain)
    return _mark(symbol, kind, handle=0 if domain else ABSENT, name=name, form=form or 0, layer=Layer.NVTX)


def _nvtx_named(verb: str, kind: str) -> tuple[Row, ...]:
    return (
        _nvtx(f"nvtx{verb}A", kind, NameForm.CHARS),
        _nvtx(f"nvtx{verb}W", kind, NameForm.WIDE),
        _nvtx(f"nvtx{verb}Ex", kind, NameForm.ATTRIBUTES),
        _nvtx(f"nvtxDomain{verb}Ex", kind, NameForm.ATTRIBUTES, domain=True),
    )


NVTX: tuple[Row, ...] = (
    *_nvtx_named("RangePush", "nvtx_push"),
    *_nvtx_named("RangeStart", "nvtx_start"),
    *_nvtx_named("Mark", "nvtx_mark"),
    _nvtx("nvtxRangePop", "nvtx_pop"),
    _nvtx("nvtxDomainRangePop", "nvtx_pop", domain=True),
    _nvtx("nvtxRangeEnd", "nvtx_end"),
    _nvtx("nvtxDomainRangeEnd", "nvtx_end", domain=True),
)


# ---- cuBLAS, row by row of the public headers. Functions for complex numbers, and of groups of different sizes, are
# left out.


def _gemm(symbol: str, *, m: int = 3, n: int = 4, k: int = 5, dtype: int = ABSENT, batch: int = 0) -> Row:
    """Numbers of arguments. ``dtype``: A's type, where the function's name does not give it; ``batch``: how many there
    are, 0: it is one."""
    return Row(f"{symbol} {symbol}_64", Layer.CUBLAS, "gemm", Shape.GEMM, (m, n, k, dtype), offset=batch)


def _gemms_of(letter: str, suffix: str = "_v2") -> tuple[Row, ...]:
    """``letter``: of the type of the numbers."""
    return (
        _gemm(f"cublas{letter}gemm{suffix}"),
        _gemm(f"cublas{letter}gemmBatched", batch=14),
        _gemm(f"cublas{letter}gemmStridedBatched", batch=17),
    )


CUBLAS: tuple[Row, ...] = (
    *_gemms_of("S"),
    *_gemms_of("D"),
    *_gemms_of("H", suffix=""),
    _gemm("cublasSgemmEx", dtype=8),
    _gemm("cublasGemmEx", dtype=8),
    _gemm("cublasGemmBatchedEx", dtype=8, batch=17),
    _gemm("cublasGemmStridedBatchedEx", dtype=8, batch=20),
    # The layouts of the three matrices.
    Row("cublasLtMatmul", Layer.CUBLAS, "gemm", Shape.MATMUL, (4, 6, 11)),
)


# ---- PyTorch's attention. Of the forms of an operator a version of PyTorch has one. The result is returned through a
# pointer. Where an exit would have to be probed to know that the call is over, they are left out, since exceptions may
# leave them.


def _attention(
    operator: str, parameters: str, *, query: int = 1, causal: int, empty: int = ABSENT, also_empty: int = 0
) -> Row:
    """Numbers of arguments. ``query``: key and value follow it; ``empty``, ``also_empty``: are to be, since they make
    sizes mean something else: lengths of packed sequences, a window."""
    name = f"_ZN2at4_ops{len(operator)}{operator}4callERKNS_6TensorE{parameters}"
    args = (query, causal, empty, ABSENT, ABSENT)
    return Row(name, Layer.TORCH, "attention", Shape.ATTENTION, args, exit=False, offset=also_empty)


_DENSE, _SIZE, _MAYBE, _SEVEN = "_scaled_dot_product", "N3c106SymIntE", "RKSt8optionalIS2_E", "S4_" * 7
_FORWARD = f"S4_S4_{_MAYBE}S8_{_SIZE}SA_dbbS5_IdES5_ISA_ESC_S8_S8_"
_EFFICIENT = f"S4_S4_S4_{_MAYBE}S4_S8_S8_{_SIZE}SA_S4_dS4_S4_lbS5_IdES5_IlESC_b"
_CUDNN = f"S4_S4_{_MAYBE}S8_S8_{_SIZE}SA_bdbbS5_IdE"

ATTENTION: tuple[Row, ...] = (
    _attention(f"{_DENSE}_flash_attention", "S4_S4_dbb", causal=4),  # 2.0
    _attention(f"{_DENSE}_flash_attention", "S4_S4_dbbN3c108optionalIdEE", causal=4),  # 2.1
    _attention(f"{_DENSE}_flash_attention", "S4_S4_dbbSt8optionalIdE", causal=4),
    _attention(f"{_DENSE}_flash_attention_backward", f"{_SEVEN}lldbll", query=2, causal=11),  # 2.0
    _attention(
        f"{_DENSE}_flash_attention_backward", f"{_SEVEN}lldbS4_S4_N3c108optionalIdEE", query=2, causal=11
    ),  # 2.1
    _attention(f"{_DENSE}_flash_attention_backward", f"{_SEVEN}{_SIZE}S6_dbS4_S4_St8optionalIdE", query=2, causal=11),
    _attention(f"{_DENSE}_efficient_attention", "S4_S4_bb", causal=5),  # 2.0
    _attention(f"{_DENSE}_efficient_attention", "S4_S4_RKN3c108optionalIS2_EEbdbNS6_IdEE", causal=6),  # 2.1
    _attention(f"{_DENSE}_efficient_attention", f"S4_S4_{_MAYBE}bdbS5_IdE", causal=6),
    _attention(f"{_DENSE}_efficient_attention_backward", "S4_S4_S4_S4_S4_bb", query=2, causal=7),  # 2.0
    # 2.1, and since.
    _attention(
        f"{_DENSE}_efficient_attention_backward", f"{_SEVEN}S4_dSt5arrayIbLm4EEbN3c108optionalIdEE", query=2, causal=11
    ),
    _attention(
        f"{_DENSE}_efficient_attention_backward", f"{_SEVEN}S4_dSt5arrayIbLm4EEbSt8optionalIdE", query=2, causal=11
    ),
    _attention(f"{_DENSE}_cudnn_attention", "S4_S4_dbbSt8optionalIdE", causal=4),  # 2.3 and 2.4
    _attention(f"{_DENSE}_cudnn_attention", f"S4_S4_{_MAYBE}bdbbS5_IdE", causal=6),
    # 2.4, and since.
    _attention(f"{_DENSE}_cudnn_attention_backward", f"{_SEVEN}{_SIZE}S6_dbS4_S4_St8optionalIdE", query=2, causal=11),
    _attention(
        f"{_DENSE}_cudnn_attention_backward", f"{_SEVEN}S4_S4_S4_{_SIZE}S6_dbSt8optionalIdE", query=2, causal=14
    ),
    _attention(f"{_DENSE}_flash_attention_for_cpu", f"S4_S4_db{_MAYBE}S5_IdE", causal=4),
    _attention(f"{_DENSE}_flash_attention_for_cpu_backward", f"S4_S4_S4_S4_S4_db{_MAYBE}S5_IdE", query=2, causal=7),
    # What those call, and what compiled programs call alone; as they are since 2.4.
    _attention("_flash_attention_forward", _FORWARD, causal=8, also_empty=12),
    _attention("_flash_attention_forward", f"{_FORWARD}S8_S5_IlE", causal=8, also_empty=12),  # since 2.12
    _attention(
        "_flash_attention_backward",
        f"{_SEVEN}{_SIZE}S6_dbS4_S4_St8optionalIdES7_IS6_ES9_",
        query=2,
        causal=11,
        also_empty=16,
    ),
    _attention(
        "_efficient_attention_forward",
        f"S4_S4_{_MAYBE}S8_S8_S5_I{_SIZE}ESB_dlbS5_IdES8_S5_IlE",
        causal=9,
        empty=5,
        also_empty=13,
    ),
    _attention("_efficient_attention_backward", _EFFICIENT, query=2, causal=14, empty=7),
    _attention("_cudnn_attention_forward", _CUDNN, causal=10),
    _attention("_cudnn_attention_forward", f"{_CUDNN}S8_S8_", causal=10),  # since 2.14
    _attention("_cudnn_attention_backward", f"{_SEVEN}S4_S4_S4_{_SIZE}S6_dbSt8optionalIdE", query=2, causal=14),
)


def _numbered(rows: Iterable[Row]) -> tuple[Call, ...]:
    calls: list[Call] = []
    for row in rows:
        calls += row.calls(len(calls))
    return tuple(calls)


CALLS: tuple[Call, ...] = _numbered(
    [
        *_of_cuda("launch", "graph", "copy", "wait", "module", "link", "alloc", "free"),
        *NCCL,
        *GLOO,
        *TORCH,
        *NVTX,
        *CUBLAS,
        *(ATTENTION if ENTRY_ONLY_NEEDS_RETURN_ADDRESS else ()),
        *_of_cuda("name"),
    ]
)
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
