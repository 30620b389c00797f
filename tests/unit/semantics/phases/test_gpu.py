"""Phases of a step on the GPU, from operations whose answers can be read off."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import zlib
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.model import records
from argus.model.calls import CALLS, Layer
from argus.semantics.gpu.usage import _OP, GpuSteps, union
from argus.semantics.phases import gpu
from argus.semantics.phases.cpu import SEGMENT, Phase
from argus.semantics.phases.gpu import (
    GPU_METHODS,
    GPU_PHASES,
    OF_NCCL,
    Calls,
    GpuPhase,
    GpuPhases,
    Transfers,
    What,
    communicates,
    kinds_of,
    what_of,
)
from argus.semantics.steps.by_calls import ITERATION
from tests.unit.semantics.gpu.counted import calls_made

US = 1_000

Op = tuple[int, int, int, What] | tuple[int, int, int, What, int]
"""Launch, start and end in us; what it is; its identity (of a copy to the host: KiB)."""


def operations(*given: Op, tid: int | Sequence[int] = 1) -> NDArray[np.void]:
    out = np.zeros(len(given), _OP)
    for row, (launch, start, end, what, *identity) in zip(out, given, strict=True):
        row["launch"], row["start"], row["end"] = (US * np.array([launch, start, end])).tolist()
        row["kind"], row["identity"] = what, identity[0] if identity else what
    out["tid"] = tid
    return out


def split(phases: GpuPhases, ops: NDArray[np.void], *edges: int) -> list[dict[str, float]]:
    """Microseconds by phase, of each step, and with "overlapped " before it what is hidden."""
    steps = np.arange(len(edges) - 1)
    rows = phases.split(ops, US * np.array(edges), steps)
    found: list[dict[str, float]] = []
    for step in steps.tolist():
        own = rows[rows["step"] == step]
        assert own["duration_ns"].sum() == US * (edges[step + 1] - edges[step])
        reported = {GPU_PHASES[row["phase"]]: row["duration_ns"] / US for row in own if row["duration_ns"]}
        hidden = {f"overlapped {GPU_PHASES[row['phase']]}": row["overlapped_ns"] / US for row in own}
        found.append(reported | {name: ns for name, ns in hidden.items() if ns})
    return found


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("void at::native::(anonymous namespace)::cuComputeGradInput<float>(float const*)", What.BACKWARD),
        ("void flash_bwd_dq_dk_dv_loop_kernel<Flash_bwd_kernel_traits<64>>(Flash_bwd_params)", What.BACKWARD),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<64>>(Flash_fwd_params)", What.FORWARD),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::GeluBackward>(int)", What.BACKWARD),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>()", What.OPTIMIZER),
        ("void at::native::indexSelectLargeIndex<float>(int)", What.KERNEL),
        ("embedding_backward_feature_kernel", What.BACKWARD),
        ("void split_embedding_backward_codegen_rowwise_adagrad_unweighted_kernel<float>(int)", What.BACKWARD),
        ("void split_embedding_codegen_grad_indice_weights_kernel<float>(int)", What.BACKWARD),
        ("void amp_C::multi_tensor_adam_grad_kernel<float>(int)", What.OPTIMIZER),
        ("void at::native::multi_tensor_apply_kernel<CopyFunctor<float, float, 2>>()", What.KERNEL),
        ("ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_bf16(ncclSymkDevWorkArgs)", What.ALL_REDUCE),
        ("void fast_hadamard_transform_kernel<float>(int)", What.KERNEL),
        ("sm90_xmma_dgrad_implicit_gemm_bf16", What.BACKWARD),
        ("cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128_nt", What.KERNEL),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", What.ALL_GATHER),
        ("ncclKernel_ReduceScatter_RING_LL_Sum_float(ncclDevComm*)", What.REDUCE_SCATTER),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", What.SEND_RECV),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", What.COMMUNICATION),
        ("", What.KERNEL),
    ],
)  # fmt: skip
def test_names(name: str, what: What) -> None:
    assert what_of(name) == what


def what_it_was(name: str) -> What:
    """As ``what_of`` was before it left out names without any mark: each pattern searched in each name."""
    copies = re.compile(r"multi_tensor_apply\w*<.*copy", re.IGNORECASE)
    if collective := gpu._NCCL.match(name):
        return gpu.OF_NCCL.get(collective[1], What.COMMUNICATION)
    if copies.search(name):
        return What.KERNEL
    for text in (name.partition("<")[0], name):
        for pattern, what in (
            (gpu._CLIPPING, What.OPTIMIZER),
            (gpu._BACKWARD, What.BACKWARD),
            (gpu._OPTIMIZER, What.OPTIMIZER),
            (gpu._FORWARD, What.FORWARD),
        ):
            if pattern.search(text):
                return what
    return What.KERNEL


def test_what_any_name_is_did_not_change_with_the_time_that_it_takes() -> None:
    rng = random.Random(8)
    pieces = [
        *(
            "multi_tensor_apply",
            "MULTI_TENSOR_apply",
            "multi_tensor",
            "_kernel",
            "<",
            "<",
            ">",
            "copy",
            "Copy",
            "cop",
            "\n",
        ),
        *(
            "backward",
            "Bwd",
            "abwd",
            "dgrad",
            "wgrad",
            "bprop",
            "grad_input",
            "gradweight",
            "grad",
            "xgrad",
            "gradgrad",
        ),
        *("l2norm", "clip_grad", "adam", "hadam", "adagrad", "rmsprop", "lamb", "lambda", "sgd", "xsgd", "optimizer"),
        *("forward", "fwd", "afwd", "fprop", "embedding", "ncclDevKernel_AllReduce", "void ", "::", " ", "é", "ſ", "K"),
        *("elementwise", "at::native", "float, int", "_", "1"),
    ]
    for _ in range(20_000):
        name = "".join(rng.choices(pieces, k=rng.randrange(9)))
        assert what_of(name) == what_it_was(name), name


def test_names_are_searched_for_copies_in_time_that_grows_with_their_length() -> None:
    """Half a million characters: squared, that is days."""
    for name in ("multi_tensor_apply<" * 27_000, "multi_tensor_apply" * 28_000 + "<cop", "multi_tensor_apply" * 28_000):
        assert what_of(name) is What.OPTIMIZER
    assert what_of("multi_tensor_apply<" * 27_000 + "copy") is What.KERNEL


def test_what_and_phase_of_a_collective_have_one_number() -> None:
    assert [what for what in What if communicates(np.array([what], np.uint8))[0]] == [
        GpuPhase[what.name] for what in What if What.ALL_REDUCE <= what <= What.COMMUNICATION
    ]


def test_copies_are_named_by_their_direction() -> None:
    ops = np.zeros(6, records.GPU_OP)
    ops["kind"] = [records.GpuKind.KERNEL, *[records.GpuKind.MEMCPY] * 4, records.GpuKind.MEMSET]
    ops["copy"] = [0, 1, 2, 8, 10, 1]
    found = kinds_of(ops, np.full(6, What.BACKWARD, np.uint8))
    assert found.tolist() == [What.BACKWARD, What.COPY_IN, What.COPY_OUT, What.COPY, What.COPY, What.COPY]


def test_each_moment_counts_once() -> None:
    """A kernel before a collective, a collective before a copy; nothing is idle."""
    ops = operations(
        (0, 10, 30, What.FORWARD),
        (1, 20, 50, What.ALL_REDUCE),
        (2, 40, 70, What.COPY),
        (3, 80, 90, What.OPTIMIZER),
    )
    wanted = {"forward": 20, "all_reduce": 20, "memcpy": 20, "optimizer": 10, "idle": 30}
    assert split(GpuPhases(), ops, 0, 100) == [wanted | {"overlapped all_reduce": 10}]


def test_operations_are_cut_at_the_steps_edges() -> None:
    ops = operations((0, 10, 30, What.FORWARD), (1, 30, 60, What.BACKWARD))
    assert split(GpuPhases(), ops, 0, 20, 40) == [
        {"forward": 10, "idle": 10},
        {"forward": 10, "backward": 10},
    ]
    rows = GpuPhases().split(ops, US * np.array([0, 20, 40]), np.arange(2))
    begun = {(int(row["step"]), GPU_PHASES[row["phase"]]): int(row["operations"]) for row in rows}
    assert begun == {(0, "forward"): 1, (0, "idle"): 0, (1, "forward"): 0, (1, "backward"): 1}


def test_stretches_that_are_no_step_have_no_rows() -> None:
    ops = operations((0, 10, 90, What.FORWARD))
    rows = GpuPhases().split(ops, US * np.array([0, 20, 60, 100]), np.array([4, -1, 5]))
    assert sorted(set(rows["step"].tolist())) == [4, 5]
    assert rows["duration_ns"].sum() == 60 * US


# ---- what kernels are for


def test_pytorch_s_marks_show_what_was_launched_when() -> None:
    """They are stronger than names: a forward that is computed again in the backward pass is backward."""
    phases = GpuPhases()
    segments = [(0, 10, Phase.DATA_LOADING), (10, 20, Phase.FORWARD), (20, 40, Phase.BACKWARD),
                (40, 45, Phase.COMMUNICATION), (45, 50, Phase.OTHER), (50, 60, Phase.OPTIMIZER)]  # fmt: skip
    phases.feed_timeline(np.array([(US * begin, US * end, phase) for begin, end, phase in segments], SEGMENT))
    ops = operations(
        (12, 100, 110, What.KERNEL),
        (22, 110, 130, What.FORWARD),
        (42, 130, 170, What.KERNEL),  # by one of autograd's threads, while the training thread waits
        (47, 170, 175, What.KERNEL),
        (55, 175, 180, What.BACKWARD),
        (70, 180, 183, What.OPTIMIZER),  # launched after what is known: by its name
    )
    assert split(phases, ops, 100, 190) == [
        {"forward": 10, "backward": 60, "compute": 5, "optimizer": 8, "idle": 7}
    ]  # fmt: skip
    (row,) = (r for r in phases.split(ops, US * np.array([100, 190]), np.array([0])) if r["phase"] == 0)
    assert GPU_METHODS[row["method"]] == "marks"
    assert row["confidence"] == pytest.approx(0.95)


def test_kernels_whose_names_show_nothing_go_by_their_neighbours() -> None:
    ops = operations(
        (0, 0, 10, What.FORWARD),
        (1, 10, 30, What.KERNEL, 77),  # forward before it and after it
        (2, 30, 40, What.FORWARD),
        (3, 40, 45, What.SEND_RECV),  # where it changes there is a border
        (4, 45, 60, What.KERNEL, 78),
        (5, 60, 90, What.BACKWARD),
        (6, 90, 95, What.KERNEL, 79),  # and here there is none: as what was before
        (7, 95, 99, What.OPTIMIZER),
    )
    assert split(GpuPhases(), ops, 0, 100) == [
        {"forward": 40, "send_recv": 5, "backward": 50, "optimizer": 4, "idle": 1}
    ]  # fmt: skip


def test_a_kernel_is_for_what_it_was_for_where_that_was_clear() -> None:
    """Kernel 78 begins backward passes. Where no border is, it would be taken for the end of the forward."""
    clear = [
        (0, 0, 10, What.FORWARD),
        (1, 10, 15, What.ALL_REDUCE),
        (2, 15, 30, What.KERNEL, 78),
        (3, 30, 40, What.BACKWARD),
    ]
    vague = [(4, 40, 50, What.FORWARD), (5, 50, 65, What.KERNEL, 78), (6, 65, 70, What.BACKWARD)]
    phases = GpuPhases()
    assert split(phases, operations(*vague), 40, 70) == [{"forward": 25, "backward": 5}]
    for _ in range(2):
        split(phases, operations(*clear), 0, 40)
    assert split(phases, operations(*vague), 40, 70) == [{"forward": 10, "backward": 20}]


def threaded(*main: Op) -> NDArray[np.void]:
    """A backward pass, launched by a thread of its own, with nine kernels of which eight have names that show their
    phase; and what the thread that trains launched before and after it."""
    named = [(100 + 10 * n, 100 + 10 * n, 105 + 10 * n, What.BACKWARD) for n in range(8)]
    ops = np.concatenate([operations(*main, tid=1), operations(*named, (190, 190, 195, What.KERNEL, 5), tid=2)])
    return ops[np.argsort(ops["launch"], kind="stable")]


def test_the_threads_of_autograd_launch_backward_passes_only() -> None:
    """And the thread that trains launches none, though no name of its kernels shows anything: before the backward pass
    it is the forward, after it the optimiser, until there is a batch."""
    ops = threaded(
        (10, 10, 30, What.KERNEL, 7),
        (200, 200, 211, What.KERNEL, 6),
        (220, 220, 221, What.COPY_IN),
        (230, 230, 233, What.KERNEL, 6),
    )
    again = ops.copy()
    for name in ("launch", "start", "end"):
        again[name] += 300 * US
    phases = GpuPhases()
    rows = phases.split(np.concatenate([ops, again]), US * np.array([0, 300]), np.array([0]))
    found = {GPU_PHASES[row["phase"]]: (row["duration_ns"] // US, GPU_METHODS[row["method"]]) for row in rows}
    assert found["backward"] == (45, "names")
    assert found["forward"] == (20 + 3, "order")
    assert found["optimizer"] == (11, "order")
    rows = phases.split(ops, US * np.array([190, 200]), np.array([0]))
    assert [(GPU_PHASES[row["phase"]], GPU_METHODS[row["method"]]) for row in rows] == [
        ("backward", "threads"),
        ("idle", "records"),
    ]


def test_the_optimizer_ends_where_the_cpu_pauses_longest() -> None:
    ops = threaded(*((200 + at, 200 + at, 201 + at, What.KERNEL) for at in (0, 4, 8, 50, 54, 60)))
    last = ops[-1:].copy()
    last["launch"], last["kind"] = 400 * US, What.FORWARD
    (found,) = split(GpuPhases(), np.concatenate([ops, last]), 200, 300)
    assert found == {"optimizer": 3, "forward": 3, "idle": 94}


def test_a_program_of_one_thread_has_no_thread_of_autograd_s() -> None:
    """Its backward passes are known, and where a forward begins; not where it ends."""
    ops = operations(
        *((n, n, n + 1, What.BACKWARD) for n in range(8)),
        (8, 8, 10, What.KERNEL, 5),  # between two of a backward pass
        (10, 10, 11, What.BACKWARD),
        (11, 11, 12, What.COPY_IN),
        (12, 12, 16, What.KERNEL, 6),
        (17, 17, 20, What.BACKWARD),
    )
    assert split(GpuPhases(), ops, 0, 20) == [{"backward": 14, "compute": 4, "memcpy": 1, "idle": 1}]


def test_kernels_that_nothing_classifies_are_compute() -> None:
    ops = operations((0, 0, 10, What.KERNEL), (1, 10, 12, What.ALL_REDUCE))
    assert split(GpuPhases(), ops, 0, 20) == [{"compute": 10, "all_reduce": 2, "idle": 8}]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a program that has ever other kernels, threads, calls and sizes."""
    for name, most in (("KERNELS", 50), ("THREADS", 8), ("CALLS", 100), ("SIZES", 10), ("SEGMENTS", 30)):
        monkeypatch.setattr(gpu, name, most)
    phases, unseen = GpuPhases(), GpuPhases()
    for step in range(100):
        at = 100 * step
        kernels = [(at + n, at + n, at + n + 1, What.KERNEL, 1000 * step + n) for n in range(10)]
        ends = [(at + 20, at + 20, at + 30, What.FORWARD), (at - 1, at - 1, at, What.FORWARD)]
        sent = (at + 50, at + 50, at + 60, What.SEND_RECV, 7 * step)
        count = 10
        phases.calls.feed(US * (at + np.arange(count)), np.full(count, step), np.full(count, What.SEND_RECV, np.uint8),
                          np.full(count, step))  # fmt: skip
        # Of a program whose GPU times are off it is all that comes.
        phases.feed_timeline(np.array([(US * at, US * (at + 50), Phase.FORWARD)] * 10, SEGMENT))
        assert sum(map(len, phases._timeline)) <= 30 + 10 * 31
        unseen.feed_timeline(np.array([(US * at, US * (at + 50), Phase.FORWARD)] * 10, SEGMENT))
        ops = operations(*kernels, *ends, sent, tid=step)
        split(phases, ops[np.argsort(ops["launch"])], at, at + 100)
    assert len(phases._votes) == 50
    assert len(phases._threads) <= 9
    assert len(phases.transfers._newest) == 10
    assert len(phases.calls._join()) == 100
    assert len(unseen._timeline) <= 31
    assert sum(map(len, unseen._timeline)) <= 30 + 10 * 31


def call(at: int, tid: int = 7) -> tuple[np.ndarray, ...]:
    """A call of NCCL at a time in us."""
    return np.array([US * at]), np.array([tid]), np.array([What.ALL_TO_ALL], np.uint8), np.array([at])


def test_calls_of_long_ago_go_whether_or_not_kernels_ask_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that calls NCCL ten times a second would fill what is kept for an hour, a small array a turn."""
    monkeypatch.setattr(gpu, "CALLS_NS", 1000 * US)
    asked, silent = Calls(), Calls()
    for at in range(0, 50_000, 10):
        asked.feed(*call(at))
        silent.feed(*call(at))
        if at % 100 == 0:
            found, known = asked.of(operations((at + 5, at + 5, at + 6, What.SEND_RECV), tid=7))
            assert known.all()
            assert found[0, 3] == at
        assert len(asked._fresh) <= 10
        assert len(silent._fresh) < gpu.BATCHES
    for calls in (asked, silent):
        kept = calls._join()
        assert kept[:, 3].tolist() == list(range(48_990, 50_000, 10))
        assert kept.base is None, "a view would keep all of what it was cut from"


# ---- communication


def test_waiting_for_a_neighbour_is_a_bubble_and_the_transfer_is_not() -> None:
    """The transfer takes 5 us, which the other rank of the job knows: this one always waits."""
    job = Transfers()
    late, early = GpuPhases(), GpuPhases()
    late.transfers = early.transfers = job
    split(late, operations((0, 40, 45, What.SEND_RECV)), 0, 50)
    found = split(early, operations((0, 10, 45, What.SEND_RECV), (1, 45, 50, What.FORWARD)), 0, 50)
    assert found == [{"pipeline_bubble": 30, "send_recv": 5, "forward": 5, "idle": 10}]
    hidden = operations((0, 10, 45, What.SEND_RECV), (1, 0, 50, What.FORWARD))
    assert split(early, hidden, 0, 50) == [
        {"forward": 50, "overlapped send_recv": 5, "overlapped pipeline_bubble": 30}
    ]  # fmt: skip


def test_what_transfers_take_may_be_learned_before_any_are_reported() -> None:
    """As an importer does, which has the ranks one after the other."""
    job = Transfers()
    always_waits, never_waits = GpuPhases(), GpuPhases()
    always_waits.transfers = never_waits.transfers = job
    slow, quick = operations((0, 10, 45, What.SEND_RECV)), operations((0, 40, 45, What.SEND_RECV))
    for phases, ops in ((always_waits, slow), (never_waits, quick)):
        phases.learn(ops)
    assert split(always_waits, slow, 0, 50) == [{"pipeline_bubble": 30, "send_recv": 5, "idle": 15}]


def test_how_long_a_transfer_takes_is_known_by_its_size() -> None:
    calls = Calls()
    large, small = 1 << 20, 1 << 10
    calls.feed(
        US * np.array([0, 10, 20]),
        np.array([1, 1, 1]),
        np.full(3, What.SEND_RECV, np.uint8),
        np.array([small, large, large]),
    )
    phases = GpuPhases()
    phases.calls = calls
    ops = operations((1, 1, 2, What.SEND_RECV), (11, 12, 52, What.SEND_RECV), (21, 60, 140, What.SEND_RECV))
    assert split(phases, ops, 0, 200) == [{"send_recv": 1 + 40 + 40, "pipeline_bubble": 40, "idle": 79}]


def test_what_is_spent_in_each_communicator() -> None:
    calls = Calls()
    dp, tp, high = 5, 6, (1 << 64) - 1
    calls.feed(
        US * np.array([1, 11, 13, 21, 41]), np.array([1, 1, 2, 1, 1]), np.full(5, What.ALL_REDUCE, np.uint8),
        np.array([100, 200, 400, 800, 1600]), np.array([dp, dp, tp, high, dp], np.uint64), np.array([-1, -1, -1, 2, 3]),
    )  # fmt: skip
    phases = GpuPhases()
    phases.calls = calls
    ops = operations(
        (0, 1, 2, What.ALL_REDUCE),  # before the calls that are known
        (2, 3, 8, What.ALL_REDUCE),
        (12, 15, 22, What.ALL_REDUCE),
        (14, 16, 20, What.KERNEL),
        (15, 16, 19, What.ALL_REDUCE),
        (22, 28, 33, What.ALL_REDUCE),  # ends in the next step, and counts in the one in which it began
        (42, 45, 46, What.ALL_REDUCE),
        (43, 60, 61, What.ALL_REDUCE),  # after the last step
        tid=[3, 1, 1, 2, 2, 1, 1, 1],
    )
    edges, steps = US * np.array([0, 30, 40, 50]), np.array([7, -1, 8])
    rows = phases.collectives(ops, edges, steps)
    names = ("step", "start_ns", "comm", "peer", "what", "calls", "bytes", "duration_ns", "shortest_ns")
    assert sorted(rows[list(names)].tolist()) == [
        (7, 0, 0, -1, What.ALL_REDUCE, 1, 0, 1 * US, 1 * US),
        (7, 0, dp, -1, What.ALL_REDUCE, 2, 300, 12 * US, 5 * US),
        (7, 0, tp, -1, What.ALL_REDUCE, 1, 400, 3 * US, 3 * US),
        (7, 0, high, 2, What.ALL_REDUCE, 1, 800, 5 * US, 5 * US),
        (8, 40 * US, dp, 3, What.ALL_REDUCE, 1, 1600, 1 * US, 1 * US),
    ]
    assert len(phases.collectives(ops[:0], edges, steps)) == 0


def test_the_call_shows_what_the_kernel_s_name_does_not() -> None:
    calls = Calls()
    what = np.array([What.ALL_TO_ALL, 0, What.BROADCAST], np.uint8)
    calls.feed(US * np.array([10, 15, 30]), np.array([1, 1, 2]), what, np.array([8, 8, 8]))
    phases = GpuPhases()
    phases.calls = calls
    ops = operations(
        (5, 6, 7, What.SEND_RECV),  # before the calls that are known
        (16, 20, 30, What.SEND_RECV),
        (31, 40, 45, What.COMMUNICATION),
        (32, 50, 53, What.COMMUNICATION),
        tid=[1, 1, 2, 3],
    )
    assert split(phases, ops, 0, 60) == [
        {"send_recv": 1, "all_to_all": 10, "broadcast": 5, "communication": 3, "idle": 41}
    ]  # fmt: skip
    # The first and the last go by their names, and that is reported.
    assert phases.guessed == 2
    rows = phases.split(ops, US * np.array([0, 60]), np.array([0]))
    sure = {GPU_PHASES[row["phase"]]: float(row["confidence"]) for row in rows}
    assert (sure["send_recv"], sure["communication"]) == (pytest.approx(0.6), pytest.approx(0.6))
    assert (sure["all_to_all"], sure["broadcast"]) == (1.0, 1.0)


# ---- what the GPU waited for


def test_a_gpu_that_waits_for_its_batch() -> None:
    """From the end of all that was launched before until the batch's copy begins."""
    ops = operations((0, 0, 10, What.OPTIMIZER), (40, 42, 44, What.COPY_IN), (45, 47, 50, What.FORWARD))
    assert split(GpuPhases(), ops, 0, 50) == [
        {"optimizer": 10, "data_loading": 32, "memcpy": 2, "forward": 3, "idle": 3}
    ]  # fmt: skip


def test_what_was_launched_nobody_knows_when_hides_no_batch() -> None:
    """As the last before CUPTI goes, whose calls have no record: first in order of launches, and the last to end."""
    ops = operations(
        (0, 85, 90, What.BACKWARD), (0, 0, 10, What.OPTIMIZER), (40, 42, 44, What.COPY_IN), (45, 47, 50, What.FORWARD)
    )  # fmt: skip
    ops["launch"][0] = -1
    assert split(GpuPhases(), ops, 0, 50, 100) == [
        {"optimizer": 10, "data_loading": 32, "memcpy": 2, "forward": 3, "idle": 3},
        {"backward": 5, "idle": 45},
    ]  # fmt: skip


def test_marks_show_when_data_is_loaded() -> None:
    phases = GpuPhases()
    phases.feed_timeline(np.array([(0, 20 * US, Phase.DATA_LOADING), (20 * US, 60 * US, Phase.FORWARD)], SEGMENT))
    ops = operations((2, 5, 10, What.KERNEL), (45, 47, 50, What.COPY_IN))
    # The copy was launched in the forward: its batch had been there before.
    assert split(phases, ops, 0, 50) == [{"compute": 5, "data_loading": 15, "memcpy": 3, "idle": 27}]


def test_marks_show_when_a_checkpoint_is_written() -> None:
    phases = GpuPhases()
    phases.feed_timeline(np.array([(0, 10 * US, Phase.OPTIMIZER), (10 * US, 40 * US, Phase.CHECKPOINT)], SEGMENT))
    ops = operations((2, 5, 15, What.KERNEL), (12, 15, 18, What.COPY_OUT))
    assert split(phases, ops, 0, 50) == [{"optimizer": 10, "checkpoint": 25, "idle": 15}]


@pytest.mark.parametrize("at_once", [20, 3, 1])
@pytest.mark.parametrize("saved", [0, 2, 15])
def test_parameters_on_their_way_to_a_disk_are_a_checkpoint(saved: int, at_once: int) -> None:
    """Copies to the host that all steps make are none. The first step that is seen may be one that saves, and is
    reported where two others are known by then."""
    phases = GpuPhases()
    kib = 1 << 12
    every: list[Op] = []
    for step in range(20):
        at = 100 * step
        every += [(at, at, at + 50, What.FORWARD), (at + 1, at + 50, at + 60, What.COPY_OUT, kib)]
        if step == saved:
            every.append((at + 2, at + 60, at + 70, What.COPY_OUT, 5 * kib))
            every.append((at + 90, at + 92, at + 95, What.ALL_REDUCE))
    edges = range(0, 2001, 100)
    found = []
    for first in range(0, 20, at_once):
        found += split(phases, operations(*every), *edges[first : first + at_once + 1])
    usual = {"forward": 50, "memcpy": 10, "idle": 40}
    assert found[:saved] + found[saved + 1 :] == [usual] * 19
    # All of them, and what the CPU did with them until it launched something else.
    if saved + at_once > 2:
        assert found[saved] == {"forward": 50, "checkpoint": 40, "all_reduce": 3, "idle": 7}


def test_the_steps_of_a_gpu_have_phases() -> None:
    """Through ``GpuSteps``: windows on the GPU are those of its steps, devices apart, each step once."""
    usage = GpuSteps()
    given = np.zeros(8, records.GPU_OP)
    given["start_ns"] = US * np.array([5, 10, 30, 50, 60, 80, 12, 62])
    given["end_ns"] = given["start_ns"] + 10 * US
    given["launch_ns"] = given["start_ns"] - 2 * US
    given["device"] = [0] * 6 + [1] * 2
    given["kind"], given["flags"] = records.GpuKind.KERNEL, records.GPU_LAUNCH_MATCHED
    kinds = np.array([What.FORWARD, What.FORWARD, What.BACKWARD, What.OPTIMIZER] * 2, np.uint8)
    usage.feed(given, np.zeros(8, bool), kinds)
    steps = np.zeros(2, ITERATION)
    steps["ts_ns"], steps["duration_ns"], steps["step"] = US * np.array([7, 55]), US * np.array([48, 40]), [3, 4]
    usage.feed_steps(steps)
    rows = usage.advance(final=True)
    phases = usage.take_phases()
    assert sorted({(int(row["device"]), int(row["step"])) for row in phases}) == [(0, 3), (0, 4), (1, 3), (1, 4)]
    for device, step in ((0, 3), (0, 4), (1, 4)):
        of = (rows["device"] == device) & (rows["step"] == step)
        own = phases[(phases["device"] == device) & (phases["step"] == step)]
        assert own["duration_ns"].sum() == rows["duration_ns"][of].sum()
        assert set(own["start_ns"].tolist()) == set(rows["start_ns"][of].tolist())
    assert len(usage.take_phases()) == 0


# ---- real traces


def recorded(path: Path) -> tuple[NDArray[np.void], NDArray[np.int64]]:
    """Operations of a trace of PyTorch's profiler, and what its own record of the CPU says of each: launched in a
    backward function of autograd, in an optimiser's step, or elsewhere (a forward)."""
    with gzip.open(path, "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    calls = {e["args"]["correlation"]: e for e in events if "correlation" in e.get("args", {}) and "dur" in e
             and "runtime" in e["cat"].lower()}  # fmt: skip
    spans: dict[tuple[What, int], list[tuple[float, float]]] = {}
    parts = ((What.BACKWARD, "autograd::engine::evaluate_function"), (What.OPTIMIZER, "Optimizer.step#"))
    for event in events:
        for what, prefix in parts:
            if event["name"].startswith(prefix) and not event["cat"].startswith("gpu"):
                spans.setdefault((what, event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    rows, threads = [], []
    for event in events:
        call = calls.get(event.get("args", {}).get("correlation"))
        kernel = event.get("cat", "").lower() == "kernel"
        if call is None or not (kernel or event["cat"].lower().startswith("gpu_mem")):
            continue
        name = event["name"]
        what = What.COPY_IN if "HtoD" in name else What.COPY_OUT if "DtoH" in name else What.COPY
        start, identity = round(event["ts"] * US), zlib.crc32(f"{name}{event['args'].get('grid')}".encode())
        tid = zlib.crc32(str(call["tid"]).encode())
        end, launch = start + round(event["dur"] * US), round(call["ts"] * US)
        rows.append((start, end, launch, tid, identity, 0, what_of(name) if kernel else what))
        threads.append(call["tid"])
    ops = np.array(rows, _OP)
    truth = np.full(len(ops), What.FORWARD, np.int64)
    for (what, thread), inside in sorted(spans.items(), key=lambda item: item[0][0]):
        begin, end = np.round(np.array(inside) * US).astype(np.int64).T
        merged = union(begin, end)
        place = np.maximum(np.searchsorted(merged[:, 0], ops["launch"], side="right") - 1, 0)
        own = np.array([tid == thread for tid in threads])
        truth[own & (ops["launch"] >= merged[place, 0]) & (ops["launch"] <= merged[place, 1])] = what
    order = np.argsort(ops["launch"], kind="stable")
    return ops[order], truth[order]


REFERENCE = Path(os.environ.get("ARGUS_REFERENCE_DATA", Path(__file__).parents[5] / "shared" / "data"))


@pytest.mark.thorough(first=1)
@pytest.mark.parametrize(
    ("name", "right"),
    [("nccl_data", 0.99), ("control", 0.98), ("sampled_rank-0", 0.96), ("sampled_rank-1", 0.96),
     ("df_index_resolver", 0.9)],
)  # fmt: skip
def test_what_kernels_of_real_programs_are_for(name: str, right: float) -> None:
    """By names, threads and order alone; weighed by time."""
    path = REFERENCE / "kineto" / f"{name}.json.gz"
    if not path.exists():
        pytest.skip(f"no reference data: {path} (ARGUS_REFERENCE_DATA)")
    ops, truth = recorded(path)
    computes = ops["kind"] <= What.OPTIMIZER
    assert computes.sum() > 1000
    phases = GpuPhases()
    for _ in range(2):  # what kernels are for is learned
        label, _, sure = phases._labels(ops, phases._resolve(ops)[0], np.empty(0, SEGMENT))
    took = (ops["end"] - ops["start"])[computes]
    correct = label[computes] + 1 == truth[computes]
    assert took[correct].sum() / took.sum() >= right
    # What is reported as sure is right more often.
    certain = sure[computes] >= 0.8
    assert took[correct & certain].sum() / took[certain].sum() >= 0.975


def test_every_function_of_nccl_that_moves_data_has_its_meaning() -> None:
    """What is not in the table counts as a kernel that computes (``argus.live.job``)."""
    moves = {call.kind for call in CALLS if call.layer is Layer.NCCL and call.program == "nccl"}
    moves -= {"GroupStart", "GroupEnd"}
    assert moves <= OF_NCCL.keys(), "add it to OF_NCCL"
    assert len(moves) >= 10
    for kind in moves:
        assert communicates(np.array([OF_NCCL[kind]])).all(), kind


# ---- what a process's own memory says may be anything: no pass for each thread, size, kernel or border

MANY, FEW = 20_000, 10_000


@pytest.mark.parametrize("seed", range(30))
def test_calls_are_found_as_a_loop_over_operations_finds_them(seed: int) -> None:
    random = np.random.default_rng(seed)
    calls, rows = Calls(), []
    for _ in range(3):
        ts, tid = random.integers(0, 50, 20), random.integers(1, 5, 20)
        nbytes, what = random.integers(1, 1000, 20), random.integers(1, 4, 20).astype(np.uint8)
        calls.feed(ts, tid, what, nbytes)
        rows += list(zip(ts.tolist(), tid.tolist(), what.tolist(), nbytes.tolist(), strict=True))
    ops = np.zeros(40, _OP)
    ops["tid"], ops["launch"] = random.integers(0, 7, 40), random.integers(-5, 60, 40)
    found, known = calls.of(ops)
    for op, row, is_known in zip(ops, found.tolist(), known.tolist(), strict=True):
        before = [(ts, n) for n, (ts, tid, *_) in enumerate(rows) if tid == op["tid"] and ts <= op["launch"]]
        assert is_known == bool(before)
        if before:
            assert tuple(row[:4]) == rows[max(before)[1]]


@pytest.mark.parametrize("seed", range(30))
def test_transfers_are_learnt_as_one_by_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "SIZES", 6)
    monkeypatch.setattr(gpu, "TRANSFERS", 4)
    random = np.random.default_rng(seed)
    transfers, newest = Transfers(), dict[int, list[int]]()
    for _ in range(4):
        count = int(random.integers(0, 25))
        key, took = random.integers(-3, int(random.choice([4, 30])), count), random.integers(1, 500, count)
        for size, ns in zip(key.tolist(), took.tolist(), strict=True):
            newest.setdefault(size, []).append(ns)
        while len(newest) > 6:
            del newest[next(iter(newest))]
        transfers.learn(key, took)
        assert [(size, list(kept)) for size, kept in transfers._newest.items()] == [
            (size, kept[-4:]) for size, kept in newest.items()
        ]
        asked = random.integers(-5, 32, 20)
        kept = [np.array(newest.get(size, [1 << 62])[-4:]) for size in asked.tolist()]
        assert transfers.of(asked).tolist() == [int(np.median(each[each <= 1.1 * each.min()])) for each in kept]


@pytest.mark.parametrize("seed", range(30))
def test_threads_and_votes_are_counted_as_one_by_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "THREADS", 5)
    monkeypatch.setattr(gpu, "KERNELS", 6)
    monkeypatch.setattr(gpu, "BACKWARD_THREAD", 2)
    random = np.random.default_rng(seed)
    phases, threads, votes = GpuPhases(), dict[int, list[int]](), dict[int, list[int]]()
    for turn in range(4):
        tids = random.integers(0, 4 + 2 * turn, 30).astype(np.uint32)
        own = np.where(tids % 3 == 0, What.BACKWARD, random.integers(0, 4, 30)).astype(np.uint8)
        for tid in sorted(set(tids.tolist())):
            kinds = own[tids == tid]
            seen = threads.setdefault(tid, [0, 0])
            seen[0] += int(np.sum(kinds != What.KERNEL))
            seen[1] += int(np.sum(kinds == What.BACKWARD))
        while len(threads) > 5:
            del threads[next(iter(threads))]
        found = phases._backward_threads(tids, own)
        assert {tid: seen.tolist() for tid, seen in phases._threads.items()} == threads
        assert list(phases._threads) == list(threads)
        assert found == [tid for tid, (named, back) in threads.items() if back >= 2 and back >= 0.9 * named]

        identity, guess = random.integers(0, 9, 30).astype(np.uint32), random.integers(1, 4, 30).astype(np.uint8)
        same, split = random.random(30) < 0.3, random.random(30) < 0.3
        for chosen, shift in ((same, 0), (split, 4)):
            for one, kind in sorted(zip(identity[chosen].tolist(), guess[chosen].tolist(), strict=True)):
                votes.setdefault(one, [0] * 8)[shift + kind] += 1
        while len(votes) > 6:
            del votes[next(iter(votes))]
        phases._vote(identity, guess, same, split)
        assert [(one, counts.tolist()) for one, counts in phases._votes.items()] == list(votes.items())
        expected = [votes.get(one, [0] * 8) for one in identity.tolist()]
        assert phases._votes_of(identity).tolist() == expected


@pytest.mark.parametrize("seed", range(30))
def test_the_longest_pause_of_a_run_is_the_first_such(seed: int) -> None:
    random = np.random.default_rng(seed)
    pauses, first = random.integers(0, 6, 40), random.random(40) < 0.2
    first[0] = True
    expected = []
    for run in np.split(pauses, np.flatnonzero(first)[1:]):
        expected += [place >= int(run.argmax()) for place in range(len(run))]
    assert gpu._since_longest(pauses, first).tolist() == expected


def a_step_of_many(**columns: Any) -> tuple[GpuPhases, NDArray[np.void]]:
    """The phases of one step of so many operations, and what they were taken from."""
    ops = np.zeros(MANY, _OP)
    ops["start"] = 1_000_000 + 1000 * np.arange(MANY)
    ops["end"], ops["launch"] = ops["start"] + 500, ops["start"] - 100
    ops["tid"], ops["identity"] = 1, 1
    for name, column in columns.items():
        ops[name] = column
    phases = GpuPhases()
    numbers = np.arange(gpu.CALLS)
    phases.calls.feed(numbers, numbers, np.full(gpu.CALLS, What.SEND_RECV, np.uint8), numbers)
    edges = np.array([1_000_000, int(ops["end"][-1]) + 1])
    found: list[NDArray[np.void]] = []
    assert calls_made(lambda: found.append(phases.split(ops, edges, np.array([0])))) < FEW
    return phases, found[0]


@pytest.mark.parametrize("kind", [What.KERNEL, What.SEND_RECV])
def test_a_thread_for_each_operation_takes_no_pass_each(kind: What, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "SIZES", 50)
    phases, rows = a_step_of_many(tid=np.arange(1, MANY + 1), kind=kind)
    assert rows["operations"].sum() == MANY
    assert list(phases._threads) == ([] if kind else list(range(MANY - gpu.THREADS + 1, MANY + 1)))


def test_a_border_for_each_operation_takes_no_pass_each() -> None:
    kind = np.resize([What.FORWARD, What.KERNEL, What.OPTIMIZER, What.KERNEL], MANY)
    kind[:16] = What.BACKWARD
    _, rows = a_step_of_many(kind=kind, tid=np.where(np.arange(MANY) < 16, 2, 1))
    found = {GPU_PHASES[row["phase"]]: int(row["operations"]) for row in rows if row["operations"]}
    assert found["backward"] == 16
    assert sorted(found) == ["backward", "forward", "optimizer"]
    assert abs(found["forward"] - found["optimizer"]) <= 2  # each unnamed one is of the phase that follows


def test_a_kernel_for_each_operation_is_not_remembered_even_for_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """What these are for goes by their neighbours: two forward kernels around them."""
    monkeypatch.setattr(gpu, "KERNELS", 100)
    kind = np.zeros(MANY, np.uint8)
    kind[[0, -3]] = What.FORWARD
    kind[-1] = What.BACKWARD
    phases, _ = a_step_of_many(kind=kind, identity=np.arange(MANY))
    assert len(phases._votes) == 100


def test_a_size_for_each_transfer_is_not_remembered_even_for_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Counted(deque[int]):
        def __init__(self, maxlen: int) -> None:
            made.append(maxlen)
            super().__init__(maxlen=maxlen)

    monkeypatch.setattr(gpu, "deque", Counted)
    monkeypatch.setattr(gpu, "SIZES", 100)
    transfers = Transfers()
    assert calls_made(lambda: transfers.learn(np.arange(MANY), np.arange(MANY))) < FEW
    assert len(made) == gpu.SIZES
    assert transfers.of(np.array([0, MANY - 1])).tolist() == [1 << 62, MANY - 1]


@pytest.mark.parametrize("number", [0, 1, 7, 300])
def test_distinct_rows_are_those_that_comparing_rows_finds(number: int) -> None:
    for seed in range(20):
        random = np.random.default_rng(seed)
        columns = [
            random.integers(-3, 4, number),
            random.integers(-(1 << 62), 1 << 62, number) >> random.integers(0, 62),
        ]
        columns += [random.integers(0, 9, number).astype(np.uint8)]
        rows, place = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
        found = gpu._distinct_rows(columns)
        assert found[0].tolist() == rows.tolist()
        assert found[1].tolist() == place.ravel().tolist()
