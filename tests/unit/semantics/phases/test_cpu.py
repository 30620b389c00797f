"""Phases of steps from hand-written timelines, whose answers can be read off, and from random programs."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from itertools import accumulate, pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.semantics.phases import cpu
from argus.semantics.phases.cpu import MARK, METHODS, PHASE, PHASES, Phase, PhaseTracker, What
from argus.semantics.steps.by_calls import ITERATION
from argus.semantics.steps.range_names import Role, role_of

MS = 1_000_000
MAIN, OTHER, GLOO = 100, 50, 200

Marks = list[tuple[int, int, int, int, int, int]]
Array = NDArray[np.void]

# A timeline is written in ms, each thing with its begin and end.


def mark(at: float, what: What, handle: int = 0, role: int = 0, tid: int = MAIN) -> tuple[int, int, int, int, int, int]:
    return round(at * MS), handle, tid, what, role, 0


def ranged(role: Role, begin: float, end: float, tid: int = MAIN) -> Marks:
    return [mark(begin, What.RANGE_BEGIN, role=role, tid=tid), mark(end, What.RANGE_END, tid=tid)]


def data(begin: float, end: float, tid: int = MAIN) -> Marks:
    return ranged(Role.DATA, begin, end, tid)


def forward(begin: float, end: float, tid: int = MAIN) -> Marks:
    return ranged(Role.FORWARD, begin, end, tid)


def optimizer(begin: float, end: float, tid: int = MAIN) -> Marks:
    return ranged(Role.OPTIMIZER, begin, end, tid)


def zero_grad(begin: float, end: float) -> Marks:
    return ranged(Role.ZERO_GRAD, begin, end)


def checkpoint(begin: float, end: float, tid: int = MAIN) -> Marks:
    return ranged(Role.CHECKPOINT, begin, end, tid)


def user(begin: float, end: float) -> Marks:
    return ranged(Role.NONE, begin, end)


def backward(begin: float, end: float | None, tid: int = MAIN) -> Marks:
    entered = [mark(begin, What.BACKWARD_BEGIN, tid=tid)]
    return entered if end is None else [*entered, mark(end, What.BACKWARD_END, tid=tid)]


def wait(at: float, handle: int = 0, tid: int = MAIN) -> Marks:
    return [mark(at, What.WAIT, handle, tid=tid)]


def work(begin: float | None, end: float | None, handle: int, tid: int = GLOO) -> Marks:
    ends = [] if end is None else [mark(end, What.WORK_END, handle, tid=tid)]
    return ends if begin is None else [mark(begin, What.WORK_BEGIN, handle, tid=tid), *ends]


def stream(*parts: Marks) -> Array:
    marks = np.array([m for part in parts for m in part], MARK)
    return marks[np.argsort(marks["ts_ns"], kind="stable")]


def steps(*bounds: float, confidence: float = 1.0) -> Array:
    rows = np.zeros(len(bounds) - 1, ITERATION)
    ns = [round(bound * MS) for bound in bounds]
    rows["rank"] = 7
    rows["step"] = np.arange(len(rows))
    rows["ts_ns"] = ns[:-1]
    rows["duration_ns"] = np.diff(ns)
    rows["confidence"] = confidence
    return rows


def ms_of(rows: Array) -> dict[str, float]:
    """Exposed time by phase, of one step."""
    return {PHASES[row["phase"]]: float(row["duration_ns"]) / MS for row in rows}


def phases_of(*parts: Marks, until: float) -> dict[str, float]:
    """Phases of the one step from 0 to ``until``, in ms."""
    return ms_of(split(*parts, bounds=(0, until)))


def split(*parts: Marks, bounds: tuple[float, ...]) -> Array:
    tracker = PhaseTracker()
    tracker.feed(stream(*parts))
    return tracker.split(steps(*bounds))


def row_of(rows: Array, phase: Phase) -> np.void:
    (row,) = rows[rows["phase"] == phase]
    found: np.void = row
    return found


# Timelines


def test_names_give_roles() -> None:
    assert role_of("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__") is Role.DATA
    assert role_of("DistributedDataParallel.forward") is Role.FORWARD
    assert role_of("FullyShardedDataParallel.forward") is Role.FORWARD
    assert role_of("Optimizer.step#AdamW.step") is Role.OPTIMIZER
    assert role_of("Optimizer.zero_grad#SGD.zero_grad") is Role.ZERO_GRAD
    assert role_of("## my forward ##") is Role.NONE
    assert role_of("aten::mm") is Role.NONE


def test_a_usual_ddp_step_is_reported_exactly() -> None:
    rows = split(
        data(1, 4),
        forward(6, 16),
        backward(18, 58),
        wait(50),
        work(20, 30, 0xA1),
        work(35, 57, 0xA2),
        zero_grad(60, 61),
        optimizer(62, 70),
        bounds=(0, 70),
    )
    reported = {
        PHASES[r["phase"]]: (r["duration_ns"] / MS, r["overlapped_ns"] / MS, METHODS[r["method"]], int(r["spans"]))
        for r in rows
    }
    assert reported == {
        "data_loading": (5, 0, "marks", 1),  # 3 ms of loading, 2 on the way to the model
        "forward": (12, 0, "marks", 1),  # and 2 of loss
        "backward": (33, 0, "marks", 2),
        "communication": (7, 25, "marks", 1),
        "optimizer": (9, 0, "marks", 2),
        "other": (4, 0, "remainder", 3),
    }
    assert (rows["rank"] == 7).all()
    assert rows["confidence"].tolist() == pytest.approx([(3 + 2 * 0.8) / 5, (10 + 2 * 0.8) / 12, 1, 0.95, 1, 0.8])


@pytest.mark.parametrize("slow", ["data_loading", "forward", "backward", "optimizer"])
def test_a_delay_goes_to_the_phase_it_is_in(slow: str) -> None:
    at = 0.0
    marks: Marks = []
    makers = {"data_loading": data, "forward": forward, "backward": backward, "optimizer": optimizer}
    for name, make in makers.items():
        lasts = 500 if name == slow else 5
        marks += make(at, at + lasts)
        at += lasts
    assert phases_of(marks, until=at) == {name: 500 if name == slow else 5 for name in makers}


def test_gradient_accumulation_splits_each_gap_by_its_neighbours() -> None:
    micro = [
        part
        for i in range(4)
        for at in [i * 20]
        for part in (data(at + 1, at + 3), forward(at + 5, at + 9), backward(at + 10, at + 18))
    ]
    assert phases_of(*micro, zero_grad(80, 81), optimizer(82, 90), until=90) == {
        "data_loading": 4 * 4,
        "forward": 4 * 5,
        "backward": 4 * 8,
        "optimizer": 9,
        "other": 4 * 3 + 1,  # backward to the next batch, zero_grad to optimiser
    }


def test_accumulation_without_a_loader_leaves_what_follows_a_backward_open() -> None:
    marks = (forward(1, 3), backward(4, 8), forward(10, 12), backward(13, 17), optimizer(18, 20))
    assert phases_of(*marks, until=20) == {"forward": 6, "backward": 8, "optimizer": 2, "other": 4}


def test_zero_grad_parts_the_gap_between_batch_and_model() -> None:
    marks = (data(0, 2), zero_grad(5, 6), forward(9, 12), backward(12, 20), optimizer(20, 22))
    assert phases_of(*marks, until=22) == {"data_loading": 5, "forward": 6, "backward": 8, "optimizer": 3}


def test_without_batch_and_wrapped_model_the_forward_is_what_lies_before_the_backward() -> None:
    assert phases_of(zero_grad(2, 3), backward(9, 20), optimizer(20, 22), until=22) == {
        "other": 2,
        "optimizer": 1 + 2,
        "forward": 6,
        "backward": 11,
    }


def test_zero_grad_inside_the_loss_changes_nothing_else() -> None:
    marks = (forward(0, 4), zero_grad(6, 7), backward(9, 20), optimizer(20, 22))
    assert phases_of(*marks, until=22) == {"forward": 8, "backward": 11, "optimizer": 3}


def test_without_forward_ranges_the_model_is_between_batch_and_backward() -> None:
    direct = split(data(0, 2), backward(12, 20), optimizer(20, 22), bounds=(0, 22))
    assert ms_of(direct) == {"data_loading": 2, "forward": 10, "backward": 8, "optimizer": 2}
    assert METHODS[row_of(direct, Phase.FORWARD)["method"]] == "between_marks"
    assert row_of(direct, Phase.FORWARD)["confidence"] == pytest.approx(0.8)
    parted = phases_of(data(0, 2), zero_grad(3, 4), backward(12, 20), optimizer(20, 22), until=22)
    assert parted == {"data_loading": 3, "forward": 8, "backward": 8, "optimizer": 3}


def test_no_backward_no_guess() -> None:
    assert phases_of(data(0, 2), forward(5, 9), data(12, 14), until=20) == {
        "data_loading": 4,
        "forward": 4,
        "other": 12,
    }
    evaluated = (backward(0, 5), optimizer(5, 6), forward(8, 10), optimizer(12, 13))
    assert phases_of(*evaluated, until=13) == {"forward": 2, "backward": 5, "optimizer": 2, "other": 4}
    loaded_for_nothing = (data(0, 2), zero_grad(4, 5), optimizer(6, 7), backward(9, 12))
    assert phases_of(*loaded_for_nothing, until=12) == {"data_loading": 2, "optimizer": 2, "backward": 3, "other": 5}


def test_a_second_batch_forgets_the_gap_before_a_zero_grad() -> None:
    marks = (data(0, 2), zero_grad(4, 5), data(6, 7), forward(8, 9), backward(9, 12))
    assert phases_of(*marks, until=12) == {"data_loading": 4, "forward": 1, "backward": 3, "optimizer": 1, "other": 3}


def test_a_forward_computed_again_inside_a_backward_opens_no_gap() -> None:
    """Activation checkpointing."""
    again = (forward(0, 2), backward(2, 12), forward(4, 6))
    assert phases_of(*again, zero_grad(15, 16), forward(17, 18), backward(18, 20), until=20) == {
        "forward": 3,
        "backward": 12,
        "optimizer": 1,
        "other": 4,
    }


def test_two_batches_in_a_row_say_nothing_about_the_time_between_them() -> None:
    marks = (data(0, 2), data(8, 9), forward(10, 14), backward(14, 20))
    assert phases_of(*marks, until=20) == {"data_loading": 4, "forward": 4, "backward": 6, "other": 6}


def test_a_backward_without_an_end_lasts_until_the_next_part() -> None:
    micro = (data(0, 1), backward(3, None), data(10, 11), backward(13, None))
    rows = split(*micro, zero_grad(20, 21), optimizer(22, 24), bounds=(0, 24))
    assert ms_of(rows) == {"data_loading": 2, "forward": 4, "backward": 14, "optimizer": 3, "other": 1}
    assert METHODS[row_of(rows, Phase.BACKWARD)["method"]] == "between_marks"
    twice = phases_of(backward(1, None), backward(4, None), until=10)
    assert twice == {"backward": 9, "other": 1}


def test_a_backward_without_an_end_does_not_outlive_its_step() -> None:
    rows = split(backward(1, None), optimizer(15, 16), bounds=(0, 10, 20))
    assert ms_of(rows[rows["step"] == 0]) == {"backward": 9, "other": 1}
    assert METHODS[row_of(rows, Phase.BACKWARD)["method"]] == "between_marks"
    assert ms_of(rows[rows["step"] == 1]) == {"optimizer": 1, "other": 9}


def test_a_closure_whose_backward_has_no_end_gives_the_next_step_back_to_the_optimizer() -> None:
    rows = split(optimizer(0, 20), backward(2, None), bounds=(0, 10, 30))
    assert ms_of(rows[rows["step"] == 0]) == {"backward": 8, "other": 2}
    assert ms_of(rows[rows["step"] == 1]) == {"optimizer": 10, "other": 10}


def test_nested_backwards_across_the_first_boundary_end_with_the_outer_one() -> None:
    rows = split(backward(2, 25), backward(4, 15), bounds=(0, 10, 30))
    assert (rows["duration_ns"][rows["phase"] == Phase.BACKWARD] / MS).tolist() == [8, 15]


def test_a_backward_without_an_end_ends_with_the_range_around_it() -> None:
    assert phases_of(user(0, 8), backward(1, None)[:1], optimizer(10, 12), until=12) == {
        "backward": 7,
        "optimizer": 2,
        "other": 3,
    }


def test_double_backward_counts_once() -> None:
    marks = (backward(2, 12), backward(4, 6), backward(7, 9), optimizer(13, 14))
    assert phases_of(*marks, until=14) == {"backward": 10, "optimizer": 1, "other": 3}


def test_a_hook_that_steps_inside_a_backward_is_the_optimizer() -> None:
    rows = split(backward(0, 10), optimizer(2, 4), optimizer(6, 7), data(11, 12), bounds=(0, 12))
    assert ms_of(rows) == {"backward": 7, "optimizer": 3, "data_loading": 1, "other": 1}
    assert row_of(rows, Phase.BACKWARD)["spans"] == 3


def test_a_closure_inside_the_optimizer_is_not_the_optimizers_time() -> None:
    """Lightning hands forward and backward to ``optimizer.step``."""
    marks = (data(0, 2), optimizer(3, 30), forward(5, 10), zero_grad(11, 12), backward(13, 25))
    assert phases_of(*marks, until=30) == {"data_loading": 5, "forward": 7, "backward": 12, "optimizer": 6}
    unwrapped = phases_of(data(0, 2), optimizer(3, 30), zero_grad(4, 5), backward(13, 25), until=30)
    assert unwrapped == {"data_loading": 4, "forward": 8, "backward": 12, "optimizer": 6}
    searched = phases_of(optimizer(0, 30), forward(1, 5), backward(5, 10), forward(14, 18), backward(18, 28), until=30)
    assert searched == {"forward": 8, "backward": 15, "optimizer": 6, "other": 1}
    nested = phases_of(optimizer(0, 20), forward(2, 10), backward(3, 5), forward(6, 8), until=20)
    assert nested == {"forward": 6, "backward": 2, "optimizer": 10, "other": 2}
    no_backward = phases_of(optimizer(0, 10), forward(2, 6), data(10, 11), until=11)
    assert no_backward == {"forward": 4, "optimizer": 4, "data_loading": 1, "other": 2}


def test_ranges_inside_ranges_count_once_by_rank_of_the_roles() -> None:
    marks = (optimizer(20, 30), optimizer(22, 28), forward(0, 15), forward(2, 4), data(5, 7), zero_grad(8, 9))
    assert phases_of(*marks, until=30) == {"data_loading": 2, "forward": 12, "optimizer": 11, "other": 5}


def test_a_gradient_taken_inside_the_forward_is_backward() -> None:
    marks = (data(0, 1), forward(2, 10), backward(4, 7), backward(12, 20))
    assert phases_of(*marks, until=20) == {"data_loading": 2, "forward": 7, "backward": 11}


def test_ranges_of_no_role_are_ignored_but_pair() -> None:
    marks = (user(0, 40), user(1, 19), forward(2, 10), user(3, 9), backward(10, 18), optimizer(20, 22))
    assert phases_of(*marks, until=40) == {"forward": 8, "backward": 8, "optimizer": 2, "other": 22}


@pytest.mark.parametrize(
    ("begin", "end", "step"),
    [
        (31, 35, {"data_loading": 3, "forward": 7, "backward": 8, "optimizer": 6, "checkpoint": 4, "other": 12}),
        (2.5, 3.5, {"data_loading": 2, "forward": 7, "backward": 8, "optimizer": 6, "checkpoint": 1, "other": 16}),
        (5, 7, {"data_loading": 3, "forward": 7, "backward": 8, "optimizer": 6, "other": 16}),
        (14, 16, {"data_loading": 3, "forward": 7, "backward": 8, "optimizer": 6, "other": 16}),
    ],
    ids=["after the optimiser", "before the forward", "in the forward", "in the backward"],
)
def test_a_checkpoint_is_a_phase_unless_it_lies_in_another(begin: float, end: float, step: dict[str, float]) -> None:
    marks = (data(1, 2), forward(4, 10), backward(11, 19), optimizer(20, 26))
    assert phases_of(*marks, checkpoint(begin, end), until=40) == step


def test_a_checkpoint_parts_nothing_and_waits_in_it_are_communication() -> None:
    marks = (data(0, 1), checkpoint(2, 5), backward(10, 20), checkpoint(22, 30), wait(24, 1), work(23, 26, 1))
    assert phases_of(*marks, until=30) == {
        "data_loading": 1, "forward": 9 - 3, "backward": 10, "checkpoint": 3 + 6, "communication": 2, "other": 2
    }  # fmt: skip


def test_a_program_that_names_only_its_checkpoints() -> None:
    assert phases_of(checkpoint(2, 5), until=10) == {"checkpoint": 3, "other": 7}
    assert phases_of(checkpoint(2, 5, OTHER), backward(6, 8), until=10) == {"backward": 2, "other": 8}


def test_an_end_without_a_begin_is_ignored() -> None:
    tracker = PhaseTracker()
    end = [mark(1, What.RANGE_END, role=Role.FORWARD)]
    late_end = [mark(15, What.RANGE_END), mark(16, What.BACKWARD_END)]
    tracker.feed(stream(end, backward(2, 8), optimizer(10, 12), late_end))
    assert ms_of(tracker.split(steps(0, 20))) == {"backward": 6, "optimizer": 2, "other": 12}
    assert tracker.counters["ranges_unmatched"] == 1  # the first one's begin was before the probes
    assert tracker.counters["backwards_unmatched"] == 1


def test_an_end_that_names_its_role_finds_its_begin_past_a_lost_end() -> None:
    lost = [mark(2, What.RANGE_BEGIN, role=Role.NONE)]
    named = [mark(1, What.RANGE_BEGIN, role=Role.FORWARD), mark(5, What.RANGE_END, role=Role.FORWARD)]
    assert phases_of(lost, named, backward(5, 9), until=10) == {"forward": 4, "backward": 4, "other": 1 + 1}


def test_a_range_whose_end_was_lost_is_given_up_after_a_step() -> None:
    tracker = PhaseTracker()
    loop = [part for at in (0, 20, 40) for part in (backward(at + 5, at + 10), optimizer(at + 15, at + 20))]
    lost = [mark(2, What.RANGE_BEGIN, role=Role.FORWARD)]
    tracker.feed(stream(lost, *loop))
    rows = tracker.split(steps(0, 20, 40, 60))
    forwards = [ms_of(rows[rows["step"] == i]).get("forward", 0) for i in range(3)]
    assert forwards == [8, 10, 0]
    assert tracker.counters["ranges_unfinished"] == 1


def test_a_backward_whose_end_was_lost_ends_at_the_next_batch() -> None:
    marks = (backward(0, 5), data(6, 7), backward(10, None), data(20, 21), backward(25, 28))
    assert phases_of(*marks, until=30) == {"data_loading": 2, "forward": 7, "backward": 18, "other": 3}


def test_a_backward_whose_end_was_lost_is_given_up_after_a_step() -> None:
    tracker = PhaseTracker()
    loop = [part for at in (0, 20, 40, 60) for part in (backward(at + 5, at + 10), optimizer(at + 15, at + 20))]
    lost = stream(*loop)["ts_ns"] == 30 * MS
    tracker.feed(stream(*loop)[~lost])
    rows = tracker.split(steps(0, 20, 40, 60, 80))
    assert [ms_of(rows[rows["step"] == i])["backward"] for i in range(4)] == [5, 10, 15, 5]
    assert tracker.counters["backwards_unfinished"] == 1


def test_only_the_main_thread_counts() -> None:
    main = (data(0, 2), backward(5, 10), optimizer(12, 15))
    beside = (data(1, 11, OTHER), backward(2, 14, OTHER), forward(0, 14, OTHER), wait(3, 1, OTHER), work(1, 4, 1))
    expected = {"data_loading": 2, "forward": 3, "backward": 5, "optimizer": 3, "other": 2}
    result = split(*main, *beside, bounds=(0, 15))
    assert ms_of(result) == {**expected, "communication": 0}
    assert row_of(result, Phase.COMMUNICATION)["overlapped_ns"] == 3 * MS


@pytest.mark.parametrize(
    ("main", "beside", "answer"),
    [
        (optimizer(0, 1), [*backward(2, 3, OTHER), *backward(4, 5, OTHER)], {"optimizer": 1, "other": 9}),
        (backward(0, 1), [*data(2, 3, OTHER), *data(4, 6, OTHER)], {"backward": 1, "other": 9}),
        (data(0, 1), forward(2, 5, OTHER), {"data_loading": 1, "other": 9}),
    ],
)
def test_the_main_thread_is_the_one_that_trains(main: Marks, beside: Marks, answer: dict[str, float]) -> None:
    assert phases_of(main, beside, until=10) == answer


def test_of_threads_alike_the_first_one_counts() -> None:
    assert phases_of(optimizer(0, 1), optimizer(1, 4, OTHER), until=10) == {"optimizer": 3, "other": 7}


def test_a_range_across_a_boundary_gives_each_step_its_part() -> None:
    tracker = PhaseTracker()
    computed = (data(4, 16), forward(18, 32), backward(34, 55), optimizer(56, 58))
    tracker.feed(stream(*computed, wait(45, 9), work(44, 52, 9)))
    found = [tracker.split(steps(*bounds)) for bounds in ((0, 10), (10, 30), (30, 50), (50, 60))]
    assert [ms_of(rows) for rows in found] == [
        {"data_loading": 6, "other": 4},
        {"data_loading": 6, "forward": 12, "other": 2},  # its backward is the next step's
        {"forward": 4, "backward": 11, "communication": 5},
        {"communication": 2, "backward": 3, "optimizer": 2, "other": 3},
    ]
    assert row_of(found[2], Phase.COMMUNICATION)["overlapped_ns"] == 1 * MS


def test_a_gap_across_a_boundary_counts_where_its_backward_is() -> None:
    rows = split(forward(0, 8), backward(13, 18), bounds=(0, 10, 20))
    assert ms_of(rows[rows["step"] == 0]) == {"forward": 8, "other": 2}
    assert ms_of(rows[rows["step"] == 1]) == {"forward": 3, "backward": 5, "other": 2}


def test_steps_apart_take_no_time_from_between() -> None:
    tracker = PhaseTracker()
    tracker.feed(stream(data(0, 8), data(12, 28), data(32, 40)))
    first, second = tracker.split(steps(0, 10)), tracker.split(steps(20, 35))
    assert ms_of(first) == {"data_loading": 8, "other": 2}
    assert ms_of(second) == {"data_loading": 11, "other": 4}


# Waits


def comm(*parts: Marks, until: float = 20) -> tuple[float, float, str]:
    """Exposed and overlapped ms and the method, of a step that begins at 0 and whose backward is all of it."""
    rows = split(backward(0, until), *parts, bounds=(0, until))
    found = rows[rows["phase"] == Phase.COMMUNICATION]
    if not len(found):
        return 0, 0, ""
    (row,) = found
    return row["duration_ns"] / MS, row["overlapped_ns"] / MS, METHODS[row["method"]]


def test_a_wait_lasts_until_its_work_is_finished() -> None:
    assert comm(wait(5, 1), work(2, 9, 1), work(9, 15, 2)) == (4, 9, "marks")


def test_a_wait_for_a_queued_work_lasts_until_it_is_finished() -> None:
    assert comm(wait(5, 2), work(2, 9, 1), work(9, 15, 2)) == (10, 3, "marks")
    assert comm(work(2, 9, 1), wait(5, 2), work(9, 15, 2, tid=GLOO + 1)) == (10, 3, "marks")


def test_a_wait_for_a_finished_work_is_no_wait() -> None:
    assert comm(work(2, 4, 1), wait(5, 1), work(6, 9, 2)) == (0, 5, "marks")


def test_a_handle_used_again_is_another_work() -> None:
    assert comm(work(2, 4, 1), work(5, 9, 1), wait(6, 1)) == (3, 3, "marks")
    assert comm(work(2, 4, 1), wait(5, 1), work(6, 9, 1)) == (4, 2, "marks")


def test_a_wait_ends_at_the_main_threads_next_mark() -> None:
    assert comm(wait(5, 1), user(7, 8), work(2, 9, 1)) == (2, 5, "marks")
    assert comm(wait(5, 1), wait(6, 2), work(2, 9, 1), work(4, 8, 2, GLOO + 1)) == (3, 4, "marks")


def test_waiting_for_all_lasts_until_the_last_end_before_the_next_mark() -> None:
    assert comm(wait(5), work(2, 9, 1), work(3, 12, 2, GLOO + 1), user(13, 14), work(15, 16, 3)) == (7, 4, "marks")
    assert comm(work(2, 4, 1), wait(5), user(6, 7), work(8, 9, 2)) == (0, 3, "marks")


def test_a_wait_of_works_without_probes_lasts_until_the_next_mark() -> None:
    assert comm(wait(5), user(8, 9)) == (3, 0, "between_marks")
    assert comm(wait(5, 1), user(8, 9)) == (3, 0, "between_marks")
    assert comm(work(1, 2, 2), wait(5, 1), user(8, 9)) == (3, 1, "between_marks")


def test_works_at_once_count_once() -> None:
    assert comm(work(2, 8, 1), work(4, 10, 2, GLOO + 1), work(14, 15, 3)) == (0, 9, "marks")


def test_a_wait_open_at_a_steps_end_lasts_until_it() -> None:
    for handle in (0, 1):
        rows = split(backward(0, 30), wait(5, handle), work(2, 16, 1), bounds=(0, 10, 20))
        exposed = [ms_of(rows[rows["step"] == i])["communication"] for i in range(2)]
        assert exposed == [5, 6], handle


def test_a_wait_that_is_over_does_not_come_back_with_its_handle() -> None:
    rows = split(backward(0, 30), wait(5, 1), work(2, 8, 1), work(9, 16, 1), bounds=(0, 10, 20))
    found = rows[rows["phase"] == Phase.COMMUNICATION]
    assert (found["duration_ns"] / MS).tolist() == [3, 0]
    assert (found["overlapped_ns"] / MS).tolist() == [4, 6]


def test_a_wait_in_a_later_step_knows_what_finished_before() -> None:
    rows = split(backward(0, 30), work(2, 8, 1), wait(15, 1), bounds=(0, 10, 30))
    assert ms_of(rows[rows["step"] == 1]) == {"backward": 20}


def test_a_work_without_an_end_is_given_up_when_its_thread_went_on() -> None:
    tracker = PhaseTracker()
    others = [work(at + 1, at + 3, 50 + at) for at in (0, 10, 20, 30)]
    tracker.feed(stream(backward(0, 40), work(5, None, 1), *others))
    rows = tracker.split(steps(0, 10, 20, 30, 40))
    behind = rows["overlapped_ns"][rows["phase"] == Phase.COMMUNICATION] / MS
    assert behind.tolist() == [2 + 5, 10, 2, 2]
    assert tracker.counters["works_unfinished"] == 1


def test_an_end_of_a_work_begun_before_the_probes_overlaps_nothing_but_ends_its_wait() -> None:
    assert comm(work(None, 9, 1), wait(5, 1)) == (4, 0, "marks")


# Feeding


def random_program(seed: int, count: int) -> tuple[Array, list[float]]:
    """Marks of ``count`` steps with whatever can happen in them, and boundaries; every time is unique."""
    rng = random.Random(seed)
    marks: list[list[int]] = []
    now = 0

    def put(what: What, handle: int = 0, role: int = 0, tid: int = MAIN) -> None:
        nonlocal now
        now += rng.randrange(1, 3 * MS)
        marks.append([now, handle, tid, what, role, 0])

    def nested(role: Role, depth: int) -> None:
        put(What.RANGE_BEGIN, role=role)
        for _ in range(rng.randrange(3) if depth < 3 else 0):
            anything(depth + 1)
        put(What.RANGE_END, role=role if rng.random() < 0.5 else 0)

    def anything(depth: int) -> None:
        pick = rng.random()
        if pick < 0.5:
            nested(rng.choice(list(Role)), depth)
        elif pick < 0.7:
            put(What.BACKWARD_BEGIN)
            for _ in range(rng.randrange(3) if depth < 3 else 0):
                anything(depth + 1)
            if with_ends and rng.random() < 0.95:
                put(What.BACKWARD_END)
        elif pick < 0.8:
            put(What.WAIT, rng.choice([0, 1, 2, 3]))
        elif pick < 0.85:
            put(What.RANGE_END)
        else:
            put(rng.choice([What.WORK_BEGIN, What.WORK_END]), rng.choice([1, 2, 3]), tid=rng.choice([GLOO, GLOO + 1]))

    with_ends = rng.random() < 0.7
    bounds = [0.0]
    for _ in range(count):
        for _ in range(rng.randrange(8)):
            anything(0)
        nested(Role.DATA, 0)
        nested(Role.OPTIMIZER, 0)
        now += rng.randrange(1, MS)
        bounds.append(now / MS)
    return np.array([tuple(m) for m in marks], MARK), bounds


@pytest.mark.parametrize("seed", range(60))
def test_durations_always_sum_to_the_steps(seed: int) -> None:
    marks, bounds = random_program(seed, 12)
    tracker = PhaseTracker()
    tracker.feed(marks)
    found = steps(*bounds)
    if seed % 2:
        found = tracker.snap(found)
    rows = tracker.split(found)
    sums = np.bincount(rows["step"], rows["duration_ns"].astype(float), len(found))
    assert sums.astype(np.int64).tolist() == found["duration_ns"].tolist()
    assert (rows["duration_ns"] + rows["overlapped_ns"] > 0).all()
    assert not rows["overlapped_ns"][rows["phase"] != Phase.COMMUNICATION].any()
    assert ((rows["spans"] > 0) == (rows["duration_ns"] > 0)).all()
    length = dict(zip(found["step"].tolist(), found["duration_ns"].tolist(), strict=True))
    assert all(row["duration_ns"] + row["overlapped_ns"] <= length[int(row["step"])] for row in rows)
    pairs = Counter(zip(rows["step"].tolist(), rows["phase"].tolist(), strict=True))
    assert max(pairs.values()) == 1


@pytest.mark.parametrize("seed", range(40))
def test_pieces_and_disorder_change_nothing(seed: int) -> None:
    marks, bounds = random_program(seed, 12)
    whole = PhaseTracker()
    whole.feed(marks)
    snapped = whole.snap(steps(*bounds))
    expected = whole.split(snapped)
    assert len(np.unique(expected["phase"])) >= 4

    rng = random.Random(seed + 1_000)
    delayed = marks["ts_ns"].astype(np.int64) + np.array([rng.randrange(50 * MS) for _ in marks])
    shuffled = marks[np.argsort(delayed, kind="stable")]
    cuts = sorted({0, len(marks), *(rng.randrange(len(marks)) for _ in range(30))})
    pieces = PhaseTracker()
    rows, moved, done = [], [], 0
    all_steps = steps(*bounds)
    for low, high in pairwise(cuts):
        pieces.feed(shuffled[low:high])
        missing = int(shuffled["ts_ns"][high:].min(initial=np.iinfo(np.uint64).max))
        ends = all_steps["ts_ns"] + all_steps["duration_ns"]
        ready = int(np.searchsorted(ends, missing))
        if ready > done and (rng.random() < 0.5 or high == len(marks)):
            moved.append(pieces.snap(all_steps[done:ready]))
            rows.append(pieces.split(moved[-1]))
            done = ready
    assert len(rows) > 1
    assert np.concatenate(moved).tolist() == snapped.tolist()
    assert np.concatenate(rows).tolist() == expected.tolist()
    assert not pieces.counters["marks_late"]


def test_a_mark_after_its_step_was_reported_still_closes_what_it_closes() -> None:
    tracker = PhaseTracker()
    tracker.feed(stream(optimizer(0.5, 1)))
    marks = stream(forward(2, 8), backward(12, 15))
    tracker.feed(marks[[0]])
    assert ms_of(tracker.split(steps(0, 10))) == {"optimizer": 0.5, "forward": 8, "other": 1.5}
    tracker.feed(marks[1:])
    assert ms_of(tracker.split(steps(10, 20))) == {"forward": 2, "backward": 3, "other": 5}
    assert tracker.counters["marks_late"] == 1


def test_times_of_long_uptimes_keep_their_nanoseconds() -> None:
    tracker = PhaseTracker()
    marks, rows = stream(data(1, 3), optimizer(4, 5), forward(6, 8)), steps(0, 5, 10)
    for times in (marks["ts_ns"], rows["ts_ns"]):
        times += np.uint64(2**60 + 1)  # 36 years: doubles step by 256 there
    marks["ts_ns"][3] += np.uint64(1)
    tracker.feed(marks)
    found = tracker.split(rows)
    assert row_of(found[found["step"] == 0], Phase.OPTIMIZER)["duration_ns"] == MS
    assert row_of(found[found["step"] == 1], Phase.OPTIMIZER)["duration_ns"] == 1
    assert not tracker.counters["marks_late"]


def test_nothing_fed_is_all_other() -> None:
    tracker = PhaseTracker()
    tracker.feed(np.empty(0, MARK))
    rows = tracker.split(steps(0, 5))
    assert rows.dtype == PHASE
    assert ms_of(rows) == {"other": 5}
    assert METHODS[rows["method"][0]] == "remainder"
    assert not len(tracker.split(steps(5)))
    assert not len(tracker.snap(steps(5)))


def test_what_is_fed_may_be_overwritten_by_its_owner() -> None:
    tracker = PhaseTracker()
    marks = stream(data(1, 3))
    tracker.feed(marks)
    marks["ts_ns"] = 0
    assert ms_of(tracker.split(steps(0, 5))) == {"data_loading": 2, "other": 3}


def test_marks_of_reported_steps_are_dropped() -> None:
    tracker = PhaseTracker()
    for i in range(4 * cpu.BOUNDARIES):
        at = i * 20
        tracker.feed(
            stream(
                data(at + 1, at + 2), backward(at + 3, at + 8), work(at + 4, at + 6, i + 1), optimizer(at + 9, at + 15)
            )
        )
        rows = tracker.split(tracker.snap(steps(at, at + 20)))
        assert tracker.marks_kept <= 8
        assert len(rows)
    assert not tracker.counters["marks_dropped_old"]
    assert len(tracker._chosen) <= cpu.BOUNDARIES
    assert len(tracker._offsets) <= cpu.OFFSETS


@pytest.mark.thorough
def test_marks_without_steps_are_bounded_and_what_is_open_stays_known() -> None:
    tracker = PhaseTracker()
    tracker.feed(stream([mark(0.5, What.RANGE_BEGIN)]))
    tracker.feed(stream([mark(0.6, What.RANGE_BEGIN, role=Role.DATA)]))
    steady = stream(user(0.001, 0.002), user(0.003, 0.004))
    fed = 2
    for _ in range(2 * cpu.MARKS // len(steady)):
        steady["ts_ns"] += MS
        tracker.feed(steady)
        fed += len(steady)
        assert tracker.marks_kept <= cpu.MARKS
    assert tracker.counters["marks_dropped_old"] == fed - tracker.marks_kept > cpu.MARKS // 2
    end = int(steady["ts_ns"][-1]) / MS
    assert ms_of(tracker.split(steps(end - 10, end))) == {"data_loading": 10}


def test_works_and_threads_are_bounded() -> None:
    tracker = PhaseTracker()
    for i in range(3):
        tids = range(1_000 * i, 1_000 * i + 1_000)
        at = 10_000 * i
        tracker.feed(
            stream(*(backward(at + j, at + j + 0.5, tid) for j, tid in enumerate(tids)), optimizer(at, at + 1))
        )
        many = [part for j in range(cpu.WORKS) for part in work(at + j / 2, at + j / 2 + 0.25, 1 + 10_000 * i + j)]
        tracker.feed(stream(many))
        tracker.split(steps(at, at + 10_000))
    assert len(tracker._works._last) <= cpu.WORKS
    assert all(len(tally) <= cpu.THREADS for tally in tracker._tallies)
    assert tracker._main is not None
    assert tracker._main.tid == MAIN


def test_ranges_that_never_end_are_bounded() -> None:
    tracker = PhaseTracker()
    begins = [mark(i / 100, What.RANGE_BEGIN) for i in range(3 * cpu.DEPTH)]
    tracker.feed(stream(begins, backward(50, 60), optimizer(60, 61)))
    assert ms_of(tracker.split(steps(0, 70))) == {"backward": 10, "optimizer": 1, "other": 59}
    assert tracker._main is not None
    assert len(tracker._main.open) <= cpu.DEPTH


# Boundaries


def moved(rows: Array) -> list[tuple[float, float]]:
    ns = zip(rows["ts_ns"].tolist(), rows["duration_ns"].tolist(), strict=True)
    return [(begin / MS, (begin + duration) / MS) for begin, duration in ns]


def test_boundaries_move_to_the_last_optimizers_end() -> None:
    tracker = PhaseTracker()
    tracker.feed(stream(optimizer(2, 4), optimizer(22, 25), optimizer(44, 45), optimizer(63, 66), data(27, 28)))
    before = steps(10, 30, 50, 70)
    after = tracker.snap(before)
    assert moved(after) == [(4, 25), (25, 45), (45, 66)]
    assert (after["method"] == 3).all()
    assert (after["confidence"] == 1).all()
    assert moved(before) == [(10, 30), (30, 50), (50, 70)]
    assert after["step"].tolist() == [0, 1, 2]


def test_an_end_at_the_boundary_is_before_it_and_one_at_the_boundary_before_is_not() -> None:
    tracker = PhaseTracker()
    tracker.feed(stream(optimizer(5, 10), optimizer(25, 30)))
    assert moved(tracker.snap(steps(10, 30))) == [(10, 30)]
    late = PhaseTracker()
    late.feed(stream(optimizer(5, 10), optimizer(35, 40)))
    after = late.snap(steps(10, 30, 50))
    assert moved(after) == [(10, 30), (30, 40)]
    assert after["method"].tolist() == [0, 3]


def test_a_skipped_optimizer_moves_the_boundary_by_the_median() -> None:
    tracker = PhaseTracker()
    ends = [4, 26, 45, 64, 104]  # none in (70, 90]
    tracker.feed(stream(*(optimizer(end - 1, end) for end in ends)))
    after = tracker.snap(steps(10, 30, 50, 70, 90, 110))
    assert moved(after) == [(4, 26), (26, 45), (45, 64), (64, 84.5), (84.5, 104)]  # 6, 4, 5 and 6 before
    assert after["method"].tolist() == [3, 3, 3, 0, 3]
    assert after["confidence"].tolist() == [1, 1, 1, 0.5, 1]
    assert sum(end - begin for begin, end in moved(after)) == 104 - 4


def test_a_low_confidence_is_not_raised() -> None:
    tracker = PhaseTracker()
    tracker.feed(stream(optimizer(5, 8)))
    after = tracker.snap(steps(0, 10, 20, confidence=0.25))
    assert after["confidence"].tolist() == [0.25, 0.25]


def test_the_newest_distances_count() -> None:
    tracker = PhaseTracker()
    early = [optimizer(20 * i + 14, 20 * i + 15) for i in range(40)]
    later = [optimizer(20 * i + 18, 20 * i + 19) for i in range(40, 40 + cpu.OFFSETS)]
    tracker.feed(stream(*early, *later))
    last = 40 + cpu.OFFSETS
    after = tracker.snap(steps(*range(0, 20 * (last + 2), 20)))
    assert moved(after)[-1] == (20 * last - 1, 20 * last + 19)


def test_of_two_optimizers_the_last_one_counts_nested_or_not() -> None:
    tracker = PhaseTracker()
    tracker.feed(stream(optimizer(2, 4), optimizer(6, 8), optimizer(22, 29), optimizer(23, 24)))
    assert moved(tracker.snap(steps(10, 30))) == [(8, 29)]


def test_without_optimizers_steps_stay() -> None:
    tracker = PhaseTracker()
    tracker.feed(stream(data(1, 2), backward(3, 4)))
    before = steps(0, 10, 20)
    assert tracker.snap(before).tolist() == before.tolist()
    tracker.feed(stream(optimizer(25, 28)))
    assert moved(tracker.snap(steps(20, 30))) == [(20, 28)]  # goes on where the unchanged one ended


def test_an_optimizer_on_another_thread_moves_nothing() -> None:
    tracker = PhaseTracker()
    tracker.feed(stream(optimizer(2, 4), optimizer(12, 14), optimizer(15, 18, OTHER)))
    assert moved(tracker.snap(steps(10, 20))) == [(4, 14)]


def test_steps_stay_continuous_across_calls() -> None:
    tracker = PhaseTracker()
    tracker.feed(stream(optimizer(2, 4), optimizer(22, 25), optimizer(62, 66)))
    found = [tracker.snap(steps(low, high)) for low, high in pairwise((10, 30, 50, 70))]
    assert [moved(rows)[0] for rows in found] == [(4, 25), (25, 44.5), (44.5, 66)]


def test_split_takes_no_mark_that_the_next_boundary_needs() -> None:
    tracker = PhaseTracker()
    found = []
    tracker.feed(stream(optimizer(2, 4)))
    for begin in (10, 30, 50):
        tracker.feed(stream(optimizer(begin + 12, begin + 15)))
        found.append(tracker.snap(steps(begin, begin + 20)))
        tracker.split(found[-1])
    assert [moved(rows)[0] for rows in found] == [(4, 25), (25, 45), (45, 65)]
    assert all(rows["method"][0] == 3 for rows in found)


def test_an_optimizer_open_when_a_step_was_reported_still_ends() -> None:
    tracker = PhaseTracker()
    marks = stream(optimizer(2, 4), optimizer(18, 25))
    tracker.feed(marks)
    tracker.split(steps(0, 20))
    after = tracker.snap(steps(20, 40))
    assert moved(after)[0][1] == 25
    assert after["method"][0] == 3


def test_a_distance_longer_than_a_step_leaves_it_a_nanosecond() -> None:
    tracker = PhaseTracker()
    tracker.feed(stream(optimizer(40, 41), optimizer(140, 141), optimizer(298, 299)))
    rows = tracker.snap(steps(100, 200, 300, 310, 320, 400))
    assert rows["duration_ns"].tolist()[2:4] == [1, 1]
    ends = (rows["ts_ns"] + rows["duration_ns"]).tolist()
    assert rows["ts_ns"].tolist() == [41 * MS, *ends[:-1]]
    assert ends[-1] == 341 * MS


@pytest.mark.parametrize("seed", range(30))
def test_snapped_steps_are_continuous_and_lose_no_time(seed: int) -> None:
    rng = random.Random(seed)
    bounds = list(accumulate((rng.randrange(1, 40) for _ in range(60)), initial=50))
    ends = sorted(rng.sample(range(40, bounds[-1]), 50))
    tracker = PhaseTracker()
    tracker.feed(stream(*(optimizer(end - 0.5, end) for end in ends)))
    rows: list[Array] = []
    at = 0
    while at < 60:
        width = rng.randrange(1, 9)
        rows.append(tracker.snap(steps(*bounds[at : at + width + 1])))
        at += width
    after = np.concatenate(rows)
    begin, lasts = after["ts_ns"].astype(np.int64), after["duration_ns"].astype(np.int64)
    assert (lasts > 0).all()
    assert (begin[1:] == (begin + lasts)[:-1]).all()
    assert (begin + lasts <= np.array(bounds[1:]) * MS).all()
    by_end = defaultdict(list)
    for end in ends:
        by_end[int(np.searchsorted(bounds, end))].append(end)
    for i, row in enumerate(after):
        assert (row["method"] == 3) == (i + 1 in by_end)
        if i + 1 in by_end:
            assert begin[i] + lasts[i] == by_end[i + 1][-1] * MS


def test_a_step_after_a_hole_begins_after_the_one_before_it() -> None:
    hole = np.concatenate([steps(10, 30), steps(31, 61)])
    usual = PhaseTracker()
    usual.feed(stream(optimizer(2, 4), optimizer(22, 24), optimizer(50, 58)))
    assert moved(usual.snap(hole)) == [(4, 24), (25, 58)]
    late = PhaseTracker()
    late.feed(stream(optimizer(2, 4), optimizer(22, 29), optimizer(50, 54)))
    assert moved(late.snap(hole)) == [(4, 29), (29, 54)]  # 31 less the median distance would be before 29


def test_steps_apart_are_moved_on_their_own() -> None:
    tracker = PhaseTracker()
    tracker.feed(stream(optimizer(2, 4), optimizer(22, 25), optimizer(102, 105), optimizer(122, 124)))
    assert moved(tracker.snap(np.concatenate([steps(10, 30), steps(110, 130)]))) == [(4, 25), (105, 124)]
