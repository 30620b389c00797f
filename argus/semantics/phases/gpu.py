"""Where the GPU's time of each step went: forward, backward, optimiser, each kind of communication, and what kept it
waiting.

At each moment the strongest thing counts: a kernel that computes, then NCCL's, then copies; a moment in which nothing
ran belongs to what the GPU waited for. So the phases of a step add up to the step.

What a kernel is for is known where PyTorch marks its own parts: by when it was launched. Elsewhere some kernels' names
show it (``attention_bwd``, ``multi_tensor_adamw``), and the others go by their neighbours in the order of launches.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from enum import IntEnum
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.model.records import GpuKind
from argus.semantics.gpu.joins import last_of
from argus.semantics.phases.cpu import SEGMENT, Phase


class What(IntEnum):
    """What an operation is, by itself."""

    KERNEL = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3
    ALL_REDUCE = 4
    ALL_GATHER = 5
    REDUCE_SCATTER = 6
    ALL_TO_ALL = 7
    BROADCAST = 8
    REDUCE = 9
    SEND_RECV = 10
    COMMUNICATION = 11
    """Of NCCL, of unknown kind by its name."""
    COPY = 12
    COPY_IN = 13
    COPY_OUT = 14


class GpuPhase(IntEnum):
    """``GPU_PHASE["phase"]``, the strongest first."""

    FORWARD = 0
    BACKWARD = 1
    OPTIMIZER = 2
    COMPUTE = 3
    ALL_REDUCE = 4
    ALL_GATHER = 5
    REDUCE_SCATTER = 6
    ALL_TO_ALL = 7
    BROADCAST = 8
    REDUCE = 9
    SEND_RECV = 10
    COMMUNICATION = 11
    PIPELINE_BUBBLE = 12
    CHECKPOINT = 13
    MEMCPY = 14
    DATA_LOADING = 15
    IDLE = 16


GPU_PHASES = tuple(phase.name.lower() for phase in GpuPhase)
"""Names of ``GPU_PHASE["phase"]``, as the table ``gpu_phases`` spells them."""


class Method(IntEnum):
    """``GPU_PHASE["method"]``: how most of a phase was found."""

    RECORDS = 0
    """What CUPTI records of the operation itself: NCCL's kernels, copies; and that nothing ran."""
    MARKS = 1
    """Launched while PyTorch was in that part."""
    NAMES = 2
    """By the kernels' names."""
    THREADS = 3
    """Launched by a thread that launches backward passes only."""
    ORDER = 4
    """Launched between kernels whose names show their phase."""
    CALLS = 5
    """By what the CPU called, and when."""


GPU_METHODS = tuple(method.name.lower() for method in Method)

GPU_PHASE = np.dtype(
    [
        ("step", "<u4"),
        ("start_ns", "<i8"),
        ("device", "<u4"),
        ("phase", "u1"),
        ("method", "u1"),
        ("duration_ns", "<i8"),
        ("overlapped_ns", "<i8"),
        ("operations", "<u4"),
        ("confidence", "<f4"),
    ]
)
"""One phase of one step on one device. ``start_ns``: of the step. ``overlapped_ns``: communication while kernels
computed, which is not in its ``duration_ns``. ``operations``: those of the phase that began in the step."""

GPU_COLLECTIVE = np.dtype(
    [
        ("step", "<u4"),
        ("start_ns", "<i8"),
        ("device", "<u4"),
        ("comm", "<u8"),
        ("peer", "<i4"),
        ("what", "u1"),
        ("calls", "<u4"),
        ("bytes", "<i8"),
        ("duration_ns", "<i8"),
        ("shortest_ns", "<i8"),
    ]
)
"""Kernels of NCCL of one communicator (0: not known) that began in one step on one device, by :class:`What`.
``start_ns``: of the step. ``peer``: who is sent to, received from, or the root, as a rank of the communicator; -1:
none. ``bytes``: of the calls that launched them, added up; of calls in a group, the last one's."""

_FOREVER = 1 << 62
_WAYS = len(GpuPhase), len(Method), 101
"""Phase, method and confidence in percent, to be distinguished by one number."""
_COMPUTES = int(GpuPhase.COMPUTE)
_COMMUNICATES = int(GpuPhase.PIPELINE_BUBBLE)

# What kernels are called in PyTorch (aten/src/ATen/native/cuda: …_backward_…, GammaBetaBackward, multi_tensor_apply,
# …_grad_input), FlashAttention (flash_bwd_…, flash_fwd_…), Transformer Engine and Apex (…_bwd_…, multi_tensor_adam,
# multi_tensor_l2norm), Liger and Triton (…_backward_kernel, _bwd_preprocess), CUTLASS and cuDNN (dgrad, wgrad, fprop).
_BACKWARD = re.compile(
    r"backward|(?<![a-z])bwd|dgrad|wgrad|bprop|grad_?(input|weight|bias)|gradgrad|(?<![a-z])grad(?![a-z])",
    re.IGNORECASE,
)
_CLIPPING = re.compile(r"multi_tensor|l2norm|clip_grad", re.IGNORECASE)
_APPLY = re.compile(r"multi_tensor_apply", re.IGNORECASE)
_COPY = re.compile(r"copy", re.IGNORECASE)
_WORD = re.compile(r"\w*")
_MARKS = (
    *("backward", "bwd", "grad", "bprop", "multi_tensor", "l2norm", "adam", "rmsprop", "lamb", "sgd"),
    *("optimizer", "forward", "fwd", "fprop", "embedding"),
)
"""One of these is in whatever a pattern finds: most names have none, and are not searched."""
_OPTIMIZER = re.compile(r"(?<!h)adam|adagrad|rmsprop|(?<![a-z])lamb(?!da)|(?<![a-z])sgd|optimizer", re.IGNORECASE)
_FORWARD = re.compile(r"forward|(?<![a-z])fwd|fprop|embedding", re.IGNORECASE)
_NCCL = re.compile(r"^(?:void )?nccl(?:Symk)?(?:Dev)?Kernel_?([A-Za-z]*)")
OF_NCCL = {
    "AllReduce": What.ALL_REDUCE,
    "AllGather": What.ALL_GATHER,
    "ReduceScatter": What.REDUCE_SCATTER,
    "AllToAll": What.ALL_TO_ALL,
    "AlltoAll": What.ALL_TO_ALL,
    "Broadcast": What.BROADCAST,
    "Reduce": What.REDUCE,
    "SendRecv": What.SEND_RECV,
    "Send": What.SEND_RECV,
    "Recv": What.SEND_RECV,
    "Gather": What.COMMUNICATION,
    "Scatter": What.COMMUNICATION,
}
"""What NCCL's functions do, and its kernels, by the middle of their names."""
_OPS = {
    What.ALL_REDUCE: "AllReduce",
    What.ALL_GATHER: "AllGather",
    What.REDUCE_SCATTER: "ReduceScatter",
    What.ALL_TO_ALL: "AlltoAll",
    What.BROADCAST: "Broadcast",
    What.REDUCE: "Reduce",
    What.SEND_RECV: "SendRecv",
}
GPU_OPS = tuple(_OPS.get(what, "") for what in What)
"""Names of ``GPU_COLLECTIVE["what"]``, as the table ``gpu_collectives`` spells them."""
_OF_MARKS = {
    Phase.FORWARD: GpuPhase.FORWARD,
    Phase.BACKWARD: GpuPhase.BACKWARD,
    Phase.COMMUNICATION: GpuPhase.BACKWARD,  # DistributedDataParallel waits at its end; autograd's threads launch
    Phase.OPTIMIZER: GpuPhase.OPTIMIZER,
    Phase.DATA_LOADING: GpuPhase.COMPUTE,
    Phase.CHECKPOINT: GpuPhase.COMPUTE,
    Phase.OTHER: GpuPhase.COMPUTE,
}

SEGMENTS = 16_384
"""Newest stretches of the training thread's time that are kept, and parts that they come in: some 10 a step; 272 KiB,
and as much again for the parts."""
CALLS = 32_768
"""Newest calls of NCCL of a rank that are kept until their kernels' records come, seconds later, and the step is over:
1.5 MiB."""
CALLS_NS = 600_000_000_000
"""Nor are they kept for longer than this, against the newest: longer than a step takes, checkpoints included."""
BATCHES = 64
"""Batches of calls that may wait to be put with the others while no kernel asks for them."""
TRANSFERS = 512
"""Newest kernels of one size from which the time of a transfer is estimated."""
SIZES = 1_024
"""Sizes of transfers that are remembered."""
ALIKE = 1.1
"""Transfers that take up to this many times as long as the quickest waited for nobody."""
BACKWARD_THREAD = 8
"""Kernels of a backward pass, by their names, that make a thread one of autograd's."""
THREADS = 64
"""Threads that are remembered."""
KERNELS = 16_384
"""Kernels, distinguished by name and grid, of which is remembered what they were for: 3 MiB. Grids that go with the
length of a batch must not pile up."""
SURE = 0.9
"""Share that decides: of a kernel's appearances, what it is for; of a thread's, that it is one of autograd's."""
LARGE_COPY = 1 << 20
"""Bytes of a copy to the host that may be of a checkpoint: what programs read back to print is a few bytes."""
USUAL = 32
"""Newest steps whose large copies to the host are the usual ones (optimiser states kept on the host)."""
FEWEST = 3
"""Steps that show what is usual: with fewer, the median is a step's own or half of it."""
UNUSUAL = 4
"""A checkpoint is this many times what is usual, at least."""


def what_of(name: str) -> What:
    """What a kernel is, by its demangled name."""
    collective = _NCCL.match(name)
    if collective:
        return OF_NCCL.get(collective[1], What.COMMUNICATION)
    if name.isascii():
        lower = name.lower()
        if not any(mark in lower for mark in _MARKS):
            return What.KERNEL
    # FBGEMM's embeddings update themselves in the backward pass: split_embedding_backward_codegen_rowwise_adagrad.
    patterns = (
        (_CLIPPING, What.OPTIMIZER),
        (_BACKWARD, What.BACKWARD),
        (_OPTIMIZER, What.OPTIMIZER),
        (_FORWARD, What.FORWARD),
    )
    if _copies(name):
        return What.KERNEL  # of sharded parameters, forward and backward
    # A template's arguments show it where its own name does not: elementwise_kernel<…gelu_backward…>.
    for text in dict.fromkeys((name.partition("<")[0], name)):
        for pattern, what in patterns:
            if pattern.search(text):
                return what
    return What.KERNEL


def _copies(name: str) -> bool:
    r"""Whether a line of a name has ``multi_tensor_apply\w*<.*copy``; in time that grows with its length, which
    a search for that pattern does not."""
    for line in name.split("\n") if _APPLY.search(name) else ():
        at = 0
        for piece in line.split("<")[:-1]:
            ends = [found.end() for found in _APPLY.finditer(piece)]
            at += len(piece) + 1
            if ends and _WORD.fullmatch(piece, ends[-1]):
                if _COPY.search(line, at):
                    return True
                break
    return False


def kinds_of(ops: NDArray[np.void], kernels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """What operations are: :class:`What`, shape (n,).

    Args:
        ops: ``records.GPU_OP``, shape (n,).
        kernels: What each is if it is a kernel, by its name.
    """
    # CUpti_ActivityMemcpyKind: host to device, or to an array; device or array to host.
    copy = ops["copy"]
    other = np.select([(copy == 1) | (copy == 3), (copy == 2) | (copy == 4)], [What.COPY_IN, What.COPY_OUT], What.COPY)
    other[ops["kind"] == GpuKind.MEMSET] = What.COPY
    return np.where(ops["kind"] == GpuKind.KERNEL, kernels, other).astype(np.uint8)


def communicates(kinds: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Which of these are NCCL's, shape (n,)."""
    return (kinds >= What.ALL_REDUCE) & (kinds <= What.COMMUNICATION)


class Transfers:
    """How long sends and receives take when nobody is waited for: as the quickest of their size, over a job's ranks.

    Of two ranks that meet the later one waits for nobody, so the ranks together know it even where one of them always
    waits.
    """

    def __init__(self) -> None:
        self._newest: dict[int, deque[int]] = {}

    def learn(self, key: NDArray[np.int64], duration: NDArray[np.int64]) -> None:
        """Takes kernels' sizes and durations in ns, both of shape (n,)."""
        fresh = _newest(key, self._newest, SIZES)
        self._newest.update((size, deque(maxlen=TRANSFERS)) for size in fresh)
        _forget_oldest(self._newest, SIZES)
        known = np.flatnonzero(np.isin(key, list(self._newest)))
        known = known[np.argsort(key[known], kind="stable")]
        sizes, first = np.unique(key[known], return_index=True)
        for size, ns in zip(sizes.tolist(), np.split(duration[known], first[1:]), strict=False):
            self._newest[size].extend(ns[-TRANSFERS:].tolist())

    def of(self, key: NDArray[np.int64]) -> NDArray[np.int64]:
        """What is usual for each size, ns, shape (n,): the median of those near the quickest one."""
        sizes, place = np.unique(key, return_inverse=True)
        usual = np.full(len(sizes), _FOREVER)  # not known: nobody was waited for
        for at in np.flatnonzero(np.isin(sizes, list(self._newest))).tolist():
            newest = np.array(self._newest[int(sizes[at])])
            usual[at] = int(np.median(newest[newest <= ALIKE * newest.min()]))
        return usual[place]


def call_rows(
    ts_ns: NDArray[np.int64],
    tid: NDArray[np.int64],
    what: NDArray[np.uint8],
    nbytes: NDArray[np.int64],
    comm: NDArray[np.uint64] | None = None,
    peer: NDArray[np.int32] | None = None,
) -> NDArray[np.int64]:
    """Calls of NCCL as :class:`Calls` keeps them.

    Args:
        ts_ns, tid, nbytes: When, by which thread, and how much, each shape (n,).
        what: As :class:`What`; those that are 0 are no collectives and left out.
        comm, peer: Their communicators, as the process has them, and ranks in these.

    Returns:
        Rows of these six, shape (at most n, 6).
    """
    handles = np.zeros(len(what), np.int64) if comm is None else np.ascontiguousarray(comm).view(np.int64)
    whom = np.full(len(what), -1) if peer is None else peer
    columns = (ts_ns, tid, what, nbytes, handles, whom)
    return np.stack([np.asarray(column, np.int64) for column in columns], axis=1)[what > 0]


class Calls:
    """A rank's newest calls of NCCL: what its kernels are for, where their names do not show it, and how large."""

    def __init__(self) -> None:
        self._calls = np.empty((0, 6), np.int64)
        self._fresh: list[NDArray[np.int64]] = []

    def feed(self, *columns: NDArray[Any]) -> None:
        """Takes calls: what :func:`call_rows` takes."""
        self.feed_rows(call_rows(*columns))

    def feed_rows(self, calls: NDArray[np.int64]) -> None:
        """Takes calls: rows of :func:`call_rows`, shape (n, 6)."""
        if len(calls):
            self._fresh.append(calls.copy())  # often a part of the calls of all ranks
            if len(self._fresh) >= BATCHES or sum(map(len, self._fresh)) > CALLS // 4:
                self._join()

    def _join(self) -> NDArray[np.int64]:
        """The calls that are kept, shape (n, 6): in one array. Hundreds of small ones, which stay for minutes among
        what is freed at once, hold many times their own size back."""
        if self._fresh:
            calls = np.concatenate([self._calls, *self._fresh])[-CALLS:]
            self._calls = calls[calls[:, 0] >= calls[:, 0].max() - CALLS_NS]
            self._fresh.clear()
        return self._calls

    @property
    def kept(self) -> int:
        """Bytes that are kept."""
        return self._calls.nbytes + sum(calls.nbytes for calls in self._fresh)

    def keep(self, most: int) -> None:
        """Keeps so many bytes of the newest calls."""
        calls = self._join()
        self._calls = calls[len(calls) - min(most // (6 * calls.itemsize), len(calls)) :].copy()

    def of(self, ops: NDArray[np.void]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The call that each operation was launched in, shape (n, 6), and whether there is one."""
        calls, tids = self._join(), ops["tid"].astype(np.int64)
        place = last_of(calls[:, 1], calls[:, 0], tids, ops["launch"])
        known = (place >= 0) & (tids > 0)
        found = np.zeros((len(ops), 6), np.int64)
        found[known] = calls[place[known]]
        return found, known


class GpuPhases:
    """The phases of one process's GPUs.

    Attributes:
        transfers: Shared by the ranks of a job.
        calls: The rank's.
        guessed: Kernels of NCCL of unknown kind by their names, and whose calls were not seen.
    """

    def __init__(self) -> None:
        self.transfers = Transfers()
        self.calls = Calls()
        self.guessed = 0
        self._timeline: deque[NDArray[np.void]] = deque()
        self._threads: dict[int, NDArray[np.int64]] = {}
        """Of each thread: kernels whose names show their phase, and those among them of a backward pass."""
        self._votes: dict[int, NDArray[np.int64]] = {}
        self._large: deque[int] = deque(maxlen=USUAL)

    def feed_timeline(self, segments: NDArray[np.void]) -> None:
        """Takes what the training thread did, by PyTorch's marks: :data:`SEGMENT`, in order of time."""
        if len(segments):
            self._timeline.append(segments)
            # None of it is asked for while GPU times are off.
            if len(self._timeline) > SEGMENTS:
                joined = np.concatenate(self._timeline)
                self._timeline = deque([joined[-SEGMENTS:]])

    def learn(self, ops: NDArray[np.void]) -> None:
        """Learns from operations how long transfers take, before any are split. ``ops``: as in ``split``."""
        what, nbytes = self._resolve(ops)
        pairs = what == What.SEND_RECV
        self.transfers.learn(self._sizes(ops[pairs], nbytes[pairs]), ops["end"][pairs] - ops["start"][pairs])

    def split(self, ops: NDArray[np.void], edges: NDArray[np.int64], steps: NDArray[np.int64]) -> NDArray[np.void]:
        """The phases of windows that follow one another.

        Args:
            ops: Operations of one device, in order of launch, those before and after the windows included, for they
                show what kernels are for: ``semantics.gpu.usage._OP``.
            edges: The windows, shape (n + 1,), ns.
            steps: The step of each window, -1 for none, shape (n,).

        Returns:
            :data:`GPU_PHASE` without device, by window and phase, those without time left out.
        """
        if not len(steps):
            return np.empty(0, GPU_PHASE)
        segments = self._segments(int(edges[0]))
        what, nbytes = self._resolve(ops)
        label, method, sure = self._labels(ops, what, segments)
        begin, end = ops["start"].copy(), ops["end"].copy()
        fresh = (end > edges[0]) & (end <= edges[-1])
        guessed = _vague(ops) & (nbytes < 0)
        sure[guessed] = 0.6
        self.guessed += int(np.sum(guessed & fresh))

        # Waiting for who sends, or receives, and then the transfer itself.
        pairs = np.flatnonzero(label == GpuPhase.SEND_RECV)
        waited = np.zeros(len(ops), np.int64)
        if len(pairs):
            size = self._sizes(ops[pairs], nbytes[pairs])
            took = end[pairs] - begin[pairs]
            self.transfers.learn(size[fresh[pairs]], took[fresh[pairs]])
            waited[pairs] = np.maximum(took - self.transfers.of(size), 0)
        checkpoint = self._checkpoints(ops, what, edges, steps)
        label[checkpoint] = GpuPhase.CHECKPOINT

        parts = [
            (begin + waited, end, label, method, sure),
            _pseudo(begin[pairs], begin[pairs] + waited[pairs], GpuPhase.PIPELINE_BUBBLE, Method.RECORDS, 0.8),
            *self._gaps(ops, what, checkpoint, segments),
        ]
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        return _sweep(columns, len(ops), edges, steps)

    def collectives(
        self, ops: NDArray[np.void], edges: NDArray[np.int64], steps: NDArray[np.int64]
    ) -> NDArray[np.void]:
        """What was spent in each communicator, in windows that follow one another. Arguments as for ``split``.

        Returns:
            :data:`GPU_COLLECTIVE` without device, by step.
        """
        window = np.searchsorted(edges, ops["start"], side="right") - 1
        inside = communicates(ops["kind"]) & (window >= 0) & (window < len(steps))
        inside[inside] = steps[window[inside]] >= 0
        ops, window = ops[inside], window[inside]
        if not len(ops):
            return np.empty(0, GPU_COLLECTIVE)
        calls, known = self.calls.of(ops)
        what = np.where(known & _vague(ops), calls[:, 2], ops["kind"])
        comm, peer = np.where(known, calls[:, 4], 0), np.where(known, calls[:, 5], -1)
        keys, row = _distinct_rows([window, comm, what, peer])
        took = ops["end"] - ops["start"]
        out = np.zeros(len(keys), GPU_COLLECTIVE)
        out["step"], out["start_ns"] = steps[keys[:, 0]], edges[keys[:, 0]]
        out["comm"], out["what"], out["peer"] = keys[:, 1].astype(np.uint64), keys[:, 2], keys[:, 3]
        out["calls"] = np.bincount(row)
        out["shortest_ns"] = _FOREVER
        np.add.at(out["bytes"], row, np.where(known, calls[:, 3], 0))
        np.add.at(out["duration_ns"], row, took)
        np.minimum.at(out["shortest_ns"], row, took)
        return out

    def _segments(self, since: int) -> NDArray[np.void]:
        while self._timeline and int(self._timeline[0]["end_ns"][-1]) < since - 60_000_000_000:
            self._timeline.popleft()
        return np.concatenate(self._timeline) if self._timeline else np.empty(0, SEGMENT)

    def _resolve(self, ops: NDArray[np.void]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """What operations are: an all-to-all's kernel is called as those of sends and receives are, and some are called
        "Generic". And the bytes of the calls that these were launched in; -1: not known, and then by name alone."""
        what: NDArray[np.uint8] = ops["kind"].copy()
        nbytes = np.full(len(ops), -1, np.int64)
        vague = np.flatnonzero(_vague(ops))
        if len(vague):
            calls, known = self.calls.of(ops[vague])
            what[vague[known]], nbytes[vague[known]] = calls[known, 2], calls[known, 3]
        return what, nbytes

    @staticmethod
    def _sizes(ops: NDArray[np.void], nbytes: NDArray[np.int64]) -> NDArray[np.int64]:
        """What two transfers must have in common to take equally long: their bytes, or, unknown, the kernel."""
        return np.where(nbytes >= 0, nbytes, -1 - ops["identity"].astype(np.int64))

    def _labels(
        self, ops: NDArray[np.void], what: NDArray[np.uint8], segments: NDArray[np.void]
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.float32]]:
        """Phase, method and confidence of each operation."""
        label = np.full(len(ops), GpuPhase.MEMCPY, np.uint8)
        method = np.full(len(ops), Method.RECORDS, np.uint8)
        sure = np.ones(len(ops), np.float32)
        talks = communicates(what)
        label[talks] = what[talks]  # the same numbers
        computes = np.flatnonzero(what <= What.OPTIMIZER)
        if not len(computes):
            return label, method, sure
        by_neighbours = self._by_neighbours(ops, what, computes)
        marked, known = _at(segments, ops["launch"][computes])
        label[computes], method[computes], sure[computes] = by_neighbours
        label[computes[known]] = marked[known]
        method[computes[known]], sure[computes[known]] = Method.MARKS, 0.95
        return label, method, sure

    def _by_neighbours(
        self, ops: NDArray[np.void], what: NDArray[np.uint8], computes: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.float32]]:
        """The same of kernels that compute, by their names, their threads and the order of launches."""
        own = what[computes]
        tids = ops["tid"][computes]
        named = own != What.KERNEL
        method = np.where(named, Method.NAMES, Method.ORDER).astype(np.uint8)
        sure = np.where(named, 0.8, 0.3).astype(np.float32)
        backward = np.isin(tids, self._backward_threads(tids, own))
        threads = bool(backward.any())
        # What is computed again there is backward, too.
        by_thread = backward & ((own == What.KERNEL) | (own == What.FORWARD))
        own[by_thread] = What.BACKWARD
        method[by_thread], sure[by_thread] = Method.THREADS, 0.9
        label = np.where(own != What.KERNEL, own - 1, GpuPhase.COMPUTE).astype(np.uint8)
        anchors = np.flatnonzero(own != What.KERNEL)
        if not len(anchors) or len(anchors) == len(own):
            return label, method, sure
        place = np.searchsorted(anchors, np.arange(len(own)), side="right")
        left, right = anchors[np.maximum(place - 1, 0)], anchors[np.minimum(place, len(anchors) - 1)]
        before = np.where(place > 0, own[left], own[right])
        after = np.where(place < len(anchors), own[right], own[left])
        unnamed = own == What.KERNEL

        # Between the anchors there may be a border that shows: a batch, or a collective.
        batches = np.searchsorted(np.flatnonzero(what == What.COPY_IN), computes)
        if threads:
            # These kernels are of the thread that trains: after a backward pass comes its optimiser, before it its
            # forward, and in between a batch.
            ended = np.where(before == What.FORWARD, before, What.OPTIMIZER)
            follows = np.where(after == What.OPTIMIZER, after, What.FORWARD)
            before, after = np.where(place > 0, ended, follows), np.where(place < len(anchors), follows, ended)
            passed = batches
        else:
            talks = np.searchsorted(np.flatnonzero(communicates(what)), computes)
            passed = batches + talks
        bordered = passed[right] > passed[left]
        by_border = np.where(passed > passed[left], after, before)
        same = unnamed & (before == after)
        split = unnamed & (before != after) & bordered
        guess = np.where(same, before, np.where(split, by_border, before))
        if threads:
            # No batch: the CPU prepares the next step for longer than it pauses anywhere in it.
            rows = np.flatnonzero(unnamed & (before != after) & ~bordered & (place > 0))
            launched = ops["launch"][computes]
            first = np.append(True, left[rows[1:]] != left[rows[:-1]])[: len(rows)]
            rows = rows[_since_longest(launched[rows] - launched[rows - 1], first)]
            guess[rows] = after[rows]
            label[unnamed] = guess[unnamed] - 1
            sure[same], sure[split], sure[unnamed & ~same & ~split] = 0.8, 0.6, 0.4
            return label, method, sure
        # A batch between two backward passes: some of it is the forward of the second.
        unclear = same & (before == What.BACKWARD) & (batches > batches[left])
        same &= ~unclear
        self._vote(ops["identity"][computes], guess, same, split)
        label[unnamed] = guess[unnamed] - 1
        label[unclear] = GpuPhase.COMPUTE
        sure[same], sure[split], sure[unnamed & ~same & ~split] = 0.7, 0.5, 0.4
        sure[unclear] = 0.3
        doubtful = np.flatnonzero(unnamed & ~same)
        if len(doubtful):
            votes = self._votes_of(ops["identity"][computes[doubtful]])
            for kind, applies in ((votes[:, :4], np.ones(len(doubtful), bool)), (votes[:, 4:], ~split[doubtful])):
                best, total = kind.argmax(axis=1), kind.sum(axis=1)
                clear = applies & (total >= 2) & (kind.max(axis=1) >= SURE * total) & (sure[doubtful] < 0.6)
                label[doubtful[clear]], sure[doubtful[clear]] = best[clear] - 1, 0.6
        return label, method, sure

    def _backward_threads(self, tids: NDArray[np.uint32], own: NDArray[np.uint8]) -> list[int]:
        """Threads that launch backward passes only (PyTorch's autograd has one for each GPU)."""
        distinct, place = np.unique(tids, return_inverse=True)
        named = np.bincount(place[own != What.KERNEL], minlength=len(distinct))
        back = np.bincount(place[own == What.BACKWARD], minlength=len(distinct))
        self._threads.update((tid, np.zeros(2, np.int64)) for tid in _newest(distinct, self._threads, THREADS))
        for at in np.flatnonzero(np.isin(distinct, list(self._threads))).tolist():
            self._threads[int(distinct[at])] += named[at], back[at]
        if len(self._threads) < 2:
            return []
        _forget_oldest(self._threads, THREADS)
        return [tid for tid, (named, back) in self._threads.items() if back >= BACKWARD_THREAD and back >= SURE * named]

    def _vote(
        self,
        identity: NDArray[np.uint32],
        guess: NDArray[np.uint8],
        same: NDArray[np.bool_],
        split: NDArray[np.bool_],
    ) -> None:
        """Counts what kernels whose names do not show it were for: between equals, and by borders."""
        counted = []
        for chosen, shift in ((same, 0), (split, 4)):
            codes, count = np.unique(identity[chosen].astype(np.int64) << 4 | guess[chosen], return_counts=True)
            counted.append((codes >> 4, shift + (codes & 15), count))
        kernels, kinds, counts = (np.concatenate(column) for column in zip(*counted, strict=True))
        self._votes.update((one, np.zeros(8, np.int64)) for one in _newest(kernels, self._votes, KERNELS))
        _forget_oldest(self._votes, KERNELS)
        known = np.isin(kernels, list(self._votes))
        columns = (column[known].tolist() for column in (kernels, kinds, counts))
        for one, kind, times in zip(*columns, strict=True):
            self._votes[one][kind] += times

    def _votes_of(self, identity: NDArray[np.uint32]) -> NDArray[np.int64]:
        """What was counted of each of these kernels, shape (n, 8); of those that are not remembered zeros."""
        kernels = np.array(sorted(self._votes), np.int64)
        counts = np.array([self._votes[one] for one in kernels.tolist()], np.int64).reshape(-1, 8)
        place = np.searchsorted(kernels, identity)
        known = np.append(kernels, -1)[place] == identity
        return np.append(counts, np.zeros((1, 8), np.int64), axis=0)[np.where(known, place, len(kernels))]

    def _checkpoints(
        self, ops: NDArray[np.void], what: NDArray[np.uint8], edges: NDArray[np.int64], steps: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Indices of copies to the host that only some steps make: the parameters, on their way to a disk."""
        # Sizes are in KiB.
        large = np.flatnonzero((what == What.COPY_OUT) & (ops["identity"] >= LARGE_COPY >> 10))
        window = np.searchsorted(edges, ops["start"][large], side="right") - 1
        inside = (window >= 0) & (window < len(steps))
        large, window = large[inside], window[inside]
        total = np.bincount(window, ops["identity"][large], minlength=len(steps)).astype(np.int64)
        is_checkpoint = np.zeros(len(steps), bool)
        real = np.flatnonzero(steps >= 0)
        # Those after a step show what is usual, too: the first that Argus sees may well be one with a checkpoint.
        ahead = deque(total[real[:USUAL]].tolist())
        for place, number in enumerate(real.tolist()):
            near = [*self._large, *ahead]
            if len(near) >= FEWEST:
                is_checkpoint[number] = total[number] > UNUSUAL * np.median(near)
            self._large.append(ahead.popleft())
            if place + USUAL < len(real):
                ahead.append(int(total[real[place + USUAL]]))
        chosen: NDArray[np.int64] = large[is_checkpoint[window]]
        return chosen

    @staticmethod
    def _gaps(
        ops: NDArray[np.void], what: NDArray[np.uint8], checkpoint: NDArray[np.int64], segments: NDArray[np.void]
    ) -> list[tuple[NDArray[Any], ...]]:
        """What a GPU without work waited for, as intervals that are weaker than all work."""
        at = ops["launch"]
        parts = []
        for phase, gap in ((Phase.DATA_LOADING, GpuPhase.DATA_LOADING), (Phase.CHECKPOINT, GpuPhase.CHECKPOINT)):
            here = segments[segments["phase"] == phase]
            parts.append(_pseudo(here["begin_ns"], here["end_ns"], gap, Method.MARKS, 0.95))
        known = np.flatnonzero(at >= 0)
        if len(known) > 1:
            # A batch: since all launched before it had ended the CPU had nothing for the GPU. What was launched nobody
            # knows when (the last before CUPTI goes, whose calls have no record) is before nothing.
            launched, ended = at[known], np.maximum.accumulate(ops["end"][known])
            first = np.flatnonzero(what[known[1:]] == What.COPY_IN) + 1
            first = first[~_at(segments, launched[first])[1]]
            since = np.maximum(launched[first - 1], ended[first - 1])
            parts.append(_pseudo(since, ops["start"][known[first]], GpuPhase.DATA_LOADING, Method.CALLS, 0.8))
        if len(checkpoint):
            following = np.minimum(checkpoint + 1, len(ops) - 1)
            parts.append(_pseudo(ops["end"][checkpoint], at[following], GpuPhase.CHECKPOINT, Method.CALLS, 0.8))
        return parts


def _vague(ops: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which are kernels of NCCL of unknown kind by their names, shape (n,)."""
    vague: NDArray[np.bool_] = (ops["kind"] == What.SEND_RECV) | (ops["kind"] == What.COMMUNICATION)
    return vague


def _newest(keys: NDArray[Any], remembered: Mapping[int, Any], most: int) -> list[int]:
    """Keys that are not remembered, in the order in which they first occur: the last ones, as many as have room."""
    distinct, first = np.unique(keys, return_index=True)
    fresh = np.flatnonzero(~np.isin(distinct, list(remembered)))
    latest: list[int] = distinct[fresh[np.argsort(first[fresh])][-most:]].tolist()
    return latest


def _forget_oldest(remembered: dict[int, Any], most: int) -> None:
    """Leaves no more than so many."""
    for key in list(islice(remembered, max(len(remembered) - most, 0))):
        del remembered[key]


def _since_longest(pauses: NDArray[np.int64], first: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which rows come after the longest pause of their run; of pauses that are equally long after the first one.

    Args:
        pauses: How long before each row nothing was, shape (n,).
        first: Which rows begin a run, shape (n,).
    """
    if not len(pauses):
        return np.zeros(0, bool)
    run = np.cumsum(first) - 1
    longest = np.flatnonzero(pauses == np.maximum.reduceat(pauses, np.flatnonzero(first))[run])
    _, at = np.unique(run[longest], return_index=True)
    since: NDArray[np.bool_] = np.arange(len(pauses)) >= longest[at][run]
    return since


def _pseudo(
    begin: NDArray[np.int64], end: NDArray[np.int64], phase: GpuPhase, method: Method, sure: float
) -> tuple[NDArray[Any], ...]:
    count = len(begin)
    return (
        begin,
        end,
        np.full(count, phase, np.uint8),
        np.full(count, method, np.uint8),
        np.full(count, sure, np.float32),
    )


def _at(segments: NDArray[np.void], times: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """The phase that PyTorch was in at these times, as a ``GpuPhase``, and whether it is known."""
    if not len(segments):
        return np.zeros(len(times), np.uint8), np.zeros(len(times), bool)
    place = np.searchsorted(segments["begin_ns"], times, side="right") - 1
    known = (place >= 0) & (times < segments["end_ns"][np.maximum(place, 0)])
    table = np.array([_OF_MARKS[phase] for phase in Phase], np.uint8)
    return table[segments["phase"][np.maximum(place, 0)]], known


def _distinct(codes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The distinct ones of small codes, ascending, and the place of each. Sorting them all takes 20 times as long."""
    present = np.zeros(int(codes.max(initial=0)) + 1, np.bool_)
    present[codes] = True
    place = np.cumsum(present) - 1
    return np.flatnonzero(present), place[codes]


def _distinct_rows(columns: list[NDArray[Any]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The distinct rows, ascending by their columns, shape (m, columns), and the place of each in them, shape (n,)."""
    code = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        values, place = np.unique(column, return_inverse=True)
        # Numbers of what has been distinguished by now: they stay below n, so that no product overflows.
        _, code = np.unique(code * len(values) + place, return_inverse=True)
    first = np.empty(int(code.max(initial=-1)) + 1, np.int64)
    first[code] = np.arange(len(code))
    return np.stack([np.asarray(column, np.int64)[first] for column in columns], axis=1), code


def _sums(place: NDArray[np.int64], values: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Sums of values by place, shape (count,). Exact up to 2**53, 104 days in ns."""
    return np.bincount(place, values, minlength=count).astype(np.int64)


def _sweep(
    columns: list[NDArray[Any]], real: int, edges: NDArray[np.int64], steps: NDArray[np.int64]
) -> NDArray[np.void]:
    """Sums up intervals by window and phase, each moment once. The first ``real`` ones are operations."""
    begin, end, label, method, sure = columns
    began = np.searchsorted(edges, begin[:real], side="right") - 1
    inside = (began >= 0) & (began < len(steps))
    phases = len(GpuPhase)
    operations = np.bincount(began[inside] * phases + label[:real][inside], minlength=len(steps) * phases)
    begin, end = np.clip(begin, edges[0], edges[-1]), np.clip(end, edges[0], edges[-1])
    keep = begin < end
    begin, end, label, method, sure = begin[keep], end[keep], label[keep], method[keep], sure[keep]
    # Labels that were found by different methods are kept apart, so that each moment has one way.
    labels = label, method, np.round(sure * 100).astype(np.int64)
    ways, way = _distinct(np.ravel_multi_index(labels, _WAYS))
    label_of, method_of, percent_of = np.unravel_index(ways, _WAYS)
    times = np.concatenate([begin, end, edges])
    order = np.argsort(times, kind="stable")
    times = times[order]
    place = np.empty(len(times), np.int64)
    place[order] = np.arange(len(times))
    length = np.diff(times)
    phase_of = np.append(label_of, GpuPhase.IDLE)
    winner = np.full(len(length), len(ways), np.int64)
    talks = np.zeros((len(GpuPhase), len(length)), np.bool_)
    by_way = np.argsort(way, kind="stable")
    for number, of_way in reversed(list(enumerate(np.split(by_way, np.cumsum(np.bincount(way))[:-1])))):
        change = np.zeros(len(times), np.int32)
        change[place[of_way]] = 1
        change[place[len(begin) + of_way]] = -1
        active = np.cumsum(change, dtype=np.int32)[:-1] > 0
        winner[active] = number  # the strongest comes last
        if _COMPUTES < phase_of[number] <= _COMMUNICATES:
            talks[phase_of[number]] |= active
    window = np.clip(np.searchsorted(edges, times[:-1], side="right") - 1, 0, len(steps) - 1)
    spent = _sums(window * len(phase_of) + winner, length, len(steps) * len(phase_of)).reshape(len(steps), -1)
    hidden = np.zeros((len(steps), phases), np.int64)
    computing = phase_of[winner] <= _COMPUTES
    for phase in range(_COMPUTES + 1, _COMMUNICATES + 1):
        behind = talks[phase] & computing
        hidden[:, phase] = _sums(window[behind], length[behind], len(steps))
    method_of = np.append(method_of, Method.RECORDS)
    sure_of = np.append(percent_of / 100, 1.0)
    parts = []
    for phase in GpuPhase:
        of = np.flatnonzero(phase_of == phase)
        by_label = spent[:, of]
        duration, overlapped = by_label.sum(axis=1), hidden[:, phase]
        there = np.flatnonzero((steps >= 0) & ((duration > 0) | (overlapped > 0)))
        if not len(there):
            continue
        by_label, duration = by_label[there], duration[there]
        most = of[by_label.argmax(axis=1)]
        part = np.zeros(len(there), GPU_PHASE)
        part["step"], part["start_ns"], part["phase"] = steps[there], edges[there], phase
        part["duration_ns"], part["overlapped_ns"] = duration, overlapped[there]
        part["operations"] = operations[there * phases + phase]
        part["method"] = method_of[most]
        part["confidence"] = np.where(duration > 0, by_label @ sure_of[of] / np.maximum(duration, 1), sure_of[most])
        parts.append(part)
    rows = np.concatenate([np.empty(0, GPU_PHASE), *parts])
    in_order: NDArray[np.void] = rows[np.argsort(rows["start_ns"], kind="stable")]
    return in_order
