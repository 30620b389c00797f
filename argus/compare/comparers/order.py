"""The comparers, the most specific first: of two figures that cost the same the earlier one is the cause."""

from __future__ import annotations

from argus.compare.comparer import Comparer
from argus.compare.comparers import (
    collections,
    communicators,
    gpu_speed,
    hosts,
    issue_latency,
    kernel_tails,
    kernels,
    loading,
    phases,
    runqueue,
    step_tails,
    void,
)

COMPARERS: tuple[Comparer, ...] = (
    hosts, communicators, kernels, loading, collections, runqueue, void, issue_latency, gpu_speed, phases,
    kernel_tails, step_tails,
)  # fmt: skip
KINDS = {
    "host": "a host whose ranks compute slower",
    "bandwidth": "a communicator that moves the same bytes slower",
    "kernel": "a kernel that takes longer",
    "new_kernel": "a kernel that one side does not have",
    "data_loading": "waiting for the next batch",
    "collections": "collections of garbage",
    "runqueue": "waiting for a CPU",
    "void": "the GPU is idle",
    "issue_latency": "kernels are launched less far, or further, ahead of the GPU",
    "kernel_tail": "single launches of a kernel take much longer",
    "step_tail": "single steps take much longer",
    "gpu_speed": "all kernels take longer alike",
    "phase": "a phase takes longer, and nothing more specific explains it",
}
"""What a cause can be, in words for slower; of a faster run it is the contrary."""
