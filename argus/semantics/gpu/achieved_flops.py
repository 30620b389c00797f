"""How fast matrix products ran on one process's GPUs: calls of cuBLAS whose sizes are known, and the time of the
kernels that their threads launched meanwhile.

What is not known is reported as well: the time of kernels that are products or attention by their names, and that no
such call launched (Triton, CUTLASS and cuDNN, CUDA graphs, calls before the probes were there). So the share that is
known is known, too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argus.model.records import GPU_LAUNCH_MATCHED, GpuKind
from argus.semantics.gpu.flops import OUTSIDE, WORK, Achieved, Counted, launched_by, step_of, sum_up
from argus.semantics.gpu.products import Products

WINDOW_NS = 10_000_000_000
"""Steps of so long are one row a shape: a job has some 30 shapes, and looks the same for hours."""
KEPT = 1 << 18
"""Kernels, or calls, that are kept until their step is known, 45 bytes each. Beyond it they are in no step."""
MOST_SUMS = 1 << 14
"""Sums of a step's products, by GPU and shape, that make rows of a window before it is over: twice what one GPU has at
most."""
SUM_BYTES = 512
"""Bytes of one, roughly."""
_KERNEL = np.dtype(
    [
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
        ("launch_ns", "<i8"),
        ("launch_tid", "<u4"),
        ("device", "<u4"),
        ("name", "<u4"),
        ("by_name", "i1"),
    ]
)
"""``by_name``: its kind by its name, a place in ``_KINDS``, where no call gives the shape."""
_KINDS = ("", "gemm", "attention")
_NAMES = (
    (2, re.compile(r"flash|fmha|attention|attn|sdpa|mha_", re.IGNORECASE)),
    (1, re.compile(r"gemm|nvjet|xmma|cutlass|cublas|matmul|splitk|(^|_)(add|b)?mm(_|$)", re.IGNORECASE)),
)
"""Kernels of products and attention, by the names that cuBLAS, CUTLASS, cuDNN, FlashAttention and Triton give them."""


def kind_of(name: str) -> int:
    """The kind of a kernel by its name: a place in "", "gemm", "attention"."""
    return next((kind for kind, pattern in _NAMES if pattern.search(name)), 0)


def _middle(times: NDArray[np.int64]) -> int:
    """The moment before which half of them lie, or more."""
    return int(np.partition(times, len(times) // 2)[len(times) // 2]) + 1


@dataclass
class _Sum:
    ts_ns: int
    calls: int = 0
    kernels: int = 0
    flops: float = 0.0
    duration_ns: int = 0
    by_kernel: dict[int, int] = field(default_factory=dict)


class GpuFlops:
    """The products of one process. ``feed_calls``, ``feed`` and ``settle``, then ``take`` the rows."""

    def __init__(self) -> None:
        self.products = Products()
        self._symbols: list[str] = []
        self._places: dict[str, int] = {}
        self._kinds: list[int] = []
        self._works: list[NDArray[np.void]] = []
        self._kernels: list[NDArray[np.void]] = []
        self._kept = 0
        self._first_step = 0
        self._steps: list[int] = []
        self._sums: dict[tuple[bool, int, int], _Sum] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept until it is in a row, roughly."""
        parts = itertools.chain(self._works, self._kernels)
        return sum(part.nbytes for part in parts) + SUM_BYTES * len(self._sums)

    def keep(self, most_bytes: int) -> None:
        """Keeps less, as others need the room: the oldest calls and kernels are in rows, of no step."""
        while self._kept + sum(map(len, self._works)) and self.nbytes > most_bytes:
            times = [part["begin_ns"] for part in self._works] + [part["launch_ns"] for part in self._kernels]
            self._sum_up([], _middle(np.concatenate(times)))

    def feed_calls(self, calls: NDArray[np.void]) -> None:
        """Takes calls of cuBLAS: ``records.MATH`` of this process."""
        works = self.products.take(calls)
        if len(works):
            self._works.append(works)
            if sum(map(len, self._works)) > KEPT:
                self._sum_up([], _middle(np.concatenate(self._works)["begin_ns"]))

    def feed(self, ops: NDArray[np.void], words: NDArray[np.int32], texts: Sequence[str]) -> None:
        """Takes operations of the GPUs.

        Args:
            ops: ``records.GPU_OP``, shape (n,), without those that communicate.
            words: Their names, places in ``texts``, shape (n,).
            texts: The names.
        """
        chosen = ops["kind"] == GpuKind.KERNEL
        ops, words = ops[chosen], words[chosen]
        if not len(ops):
            return
        used, name_of = np.unique(words, return_inverse=True)
        symbols = np.array([self._symbol(texts[word]) for word in used.tolist()], np.int64)[name_of.reshape(-1)]
        kernels = np.zeros(len(ops), _KERNEL)
        for name in ("start_ns", "end_ns", "launch_ns", "launch_tid", "device"):
            kernels[name] = ops[name]
        kernels["name"], kernels["by_name"] = symbols, np.array(self._kinds, np.int8)[symbols]
        # A kernel of a graph was launched by nobody in particular.
        known = ((ops["flags"] & GPU_LAUNCH_MATCHED) != 0) & (ops["graph"] == 0)
        kernels["launch_tid"][~known] = 0
        kernels["launch_ns"] = np.where((ops["flags"] & GPU_LAUNCH_MATCHED) != 0, ops["launch_ns"], ops["start_ns"])
        kernels = kernels[known | (kernels["by_name"] > 0)]
        self._kernels.append(kernels)
        self._kept += len(kernels)
        if self._kept > KEPT:
            self._sum_up([], _middle(np.concatenate(self._kernels)["launch_ns"]))

    def _symbol(self, text: str) -> int:
        place = self._places.setdefault(text, len(self._symbols))
        if place == len(self._symbols):
            self._symbols.append(text)
            self._kinds.append(kind_of(text))
        return place

    def settle(self, steps: Sequence[tuple[int, int, int]]) -> None:
        """Sums up steps that are over. ``steps``: begin and end on the CPU in ns, and number, of each of which all
        operations have been fed, in order."""
        if not steps:
            return
        if not self._steps:
            self._first_step = steps[0][2]
        self._steps += [end - begin for begin, end, _ in steps]
        self._sum_up(steps, steps[-1][1])

    def _sum_up(self, steps: Sequence[tuple[int, int, int]], until_ns: int) -> None:
        """Sums up what was called before ``until_ns``."""
        works = np.concatenate([np.empty(0, WORK), *self._works])
        kernels = np.concatenate([np.empty(0, _KERNEL), *self._kernels])
        owner = launched_by(works, kernels)
        # A call may lie across: its kernels are summed up with it.
        since = kernels["launch_ns"].copy()
        since[owner >= 0] = works["begin_ns"][owner[owner >= 0]]
        later = since >= until_ns
        self._kernels, self._kept = [kernels[later]], int(later.sum())
        kernels, owner = kernels[~later], owner[~later]
        self._works = [works[works["begin_ns"] >= until_ns]]
        # A kernel without a known call stands for itself: an operation of no known work, of its own kernel.
        alone = np.flatnonzero((owner < 0) & (kernels["by_name"] > 0))
        unmatched = np.zeros(len(alone), WORK)
        unmatched["begin_ns"], unmatched["text"] = (
            kernels["launch_ns"][alone],
            -kernels["by_name"][alone].astype(np.int64),
        )
        owner[alone] = len(works) + np.arange(len(alone))
        works = np.concatenate([works, unmatched])
        kernels, owner = kernels[owner >= 0], owner[owner >= 0]
        edges = np.array([[begin, end] for begin, end, _ in steps], np.int64).reshape(-1, 2)
        inside = step_of(works["begin_ns"], edges[:, 0], edges[:, 1]) >= 0
        self._add(sum_up(works, inside.astype(np.int64), kernels, owner))

    def _add(self, achieved: Achieved) -> None:
        for place in range(len(achieved.flops)):
            text, spent = int(achieved.text[place]), int(achieved.duration_ns[place])
            key = bool(achieved.step[place]), int(achieved.device[place]), text
            into = self._sums.setdefault(key, _Sum(int(achieved.ts_ns[place])))
            into.calls += int(achieved.calls[place]) if text >= 0 else 0
            into.kernels += int(achieved.kernels[place])
            into.flops += float(achieved.flops[place])
            into.duration_ns += spent
            symbol = int(achieved.symbol[place])
            into.by_kernel[symbol] = into.by_kernel.get(symbol, 0) + spent

    def take(self, *, final: bool = False) -> tuple[dict[str, Any], Counted]:
        """The rows of a window that is over, or has very many, as columns of the table ``kernel_flops``, and what its
        steps come to; else nothing. ``ts`` is on the clock of the host. ``final``: nothing more will come."""
        counted = Counted()
        if final:
            self._sum_up([], np.iinfo(np.int64).max)
        elif sum(self._steps) < WINDOW_NS and len(self._sums) < MOST_SUMS:
            return {}, counted
        counted.steps, counted.steps_ns = len(self._steps), sum(self._steps)
        keys, sums = list(self._sums), list(self._sums.values())
        self._sums, self._steps = {}, []
        for (in_step, _, _), each in zip(keys, sums, strict=True):
            if in_step:
                counted.flops += each.flops
                counted.with_flops_ns += each.duration_ns if each.flops else 0
                counted.without_flops_ns += 0 if each.flops else each.duration_ns
        if not sums:
            return {}, counted
        texts = [self.products.texts[text] if text >= 0 else (_KINDS[-text], "", "", "") for _, _, text in keys]
        inside = np.array([in_step for in_step, _, _ in keys])
        longest = (max(each.by_kernel.items(), key=lambda item: item[1])[0] for each in sums)
        columns: dict[str, Any] = {
            name: list(words)
            for name, words in zip(("kind", "operator", "dtype", "shape"), zip(*texts, strict=True), strict=True)
        }
        return columns | {
            "step": np.where(inside, self._first_step, OUTSIDE).astype(np.int32),
            "steps": np.where(inside, counted.steps, 0).astype(np.uint32),
            "device": np.array([device for _, device, _ in keys], np.uint32),
            "kernel": [self._symbols[symbol] for symbol in longest],
            "ts": np.array([each.ts_ns for each in sums], np.int64),
            "calls": np.array([each.calls for each in sums], np.uint32),
            "kernels": np.array([each.kernels for each in sums], np.uint32),
            "flops": np.array([each.flops for each in sums], np.float64),
            "duration_ns": np.array([each.duration_ns for each in sums], np.int64),
        }, counted
