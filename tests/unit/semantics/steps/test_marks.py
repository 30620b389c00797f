"""Records of PyTorch's probes become marks."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import tracemalloc
import zlib
from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.capture.process.names import KernelNames
from argus.model import records
from argus.model.calls import BY_SYMBOL, CALLS, Layer, Shape
from argus.semantics.phases.cpu import DEPTH, MARK, What
from argus.semantics.steps import marks as steps_marks
from argus.semantics.steps.marks import _NUMBERS, NAMES, STACKS, Marks
from argus.semantics.steps.range_names import Meaning, Role, meaning_of
from tests.unit.semantics.phases.test_cpu_bounds import lines_of

Array = NDArray[np.void]

OF_KIND = {call.kind: call.id for call in CALLS if call.shape is Shape.MARK}


def seen(kind: str, ts_ns: int, *, name: bytes = b"", handle: int = 0, at_exit: int = 0, tid: int = 9) -> Array:
    row = np.zeros(1, records.MARK)
    row["ts_ns"], row["handle"], row["tid"], row["call"], row["at_exit"] = ts_ns, handle, tid, OF_KIND[kind], at_exit
    kept = name[: records.MARK_NAME_LEN]
    row["name_len"] = len(kept)
    row["name"][0, : len(kept)] = np.frombuffer(kept, np.uint8)
    return row


def marks(*rows: Array, ends_of_backward: bool = True) -> Array:
    return Marks().take(np.concatenate([np.empty(0, records.MARK), *rows]), ends_of_backward=ends_of_backward)


def test_every_kind_of_record_has_its_mark() -> None:
    kinds = ("range_begin", "range_end", "backward", "wait", "work_begin", "work_end")
    found = marks(*(seen(kind, ts, handle=100 + ts, tid=ts) for ts, kind in enumerate(kinds, 1)))
    assert found.dtype == MARK
    assert found["what"].tolist() == [
        What.RANGE_BEGIN, What.RANGE_END, What.BACKWARD_BEGIN, What.WAIT, What.WORK_BEGIN, What.WORK_END,
    ]  # fmt: skip
    assert found["ts_ns"].tolist() == found["tid"].tolist() == [1, 2, 3, 4, 5, 6]
    assert found["handle"].tolist() == [101, 102, 103, 104, 105, 106]
    assert {call.kind for call in CALLS if call.shape is Shape.MARK and call.layer is Layer.TORCH} == {
        *kinds,
        "backward_begin",
    }


def test_a_backward_pass_is_reported_once() -> None:
    """Python's call goes through the engine: both have probes."""
    rows = [seen("backward", 1), seen("backward_begin", 2), seen("backward", 3, at_exit=1)]
    both = marks(*rows)
    assert list(zip(both["ts_ns"].tolist(), both["what"].tolist(), strict=True)) == [
        (1, What.BACKWARD_BEGIN),
        (3, What.BACKWARD_END),
    ]
    engine = marks(rows[1], ends_of_backward=False)
    assert engine["what"].tolist() == [What.BACKWARD_BEGIN]


@pytest.mark.parametrize(
    ("name", "role"),
    [
        (b"enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", Role.DATA),
        (b"DistributedDataParallel.forward", Role.FORWARD),
        (b"Optimizer.step#AdamW.step", Role.OPTIMIZER),
        (b"Optimizer.zero_grad#AdamW.zero_grad", Role.ZERO_GRAD),
        (b"Optimizer.step#" + b"x" * 200, Role.OPTIMIZER),
        (b"my own range", Role.NONE),
        ("Schlüssel".encode()[:5], Role.NONE),  # cut inside of a character
        (b"", Role.NONE),
    ],
)
def test_a_range_has_the_role_of_its_name(name: bytes, role: Role) -> None:
    assert marks(seen("range_begin", 1, name=name))["role"].tolist() == [role]


def test_roles_go_to_the_ranges_they_belong_to() -> None:
    names = [b"Optimizer.step#SGD.step", b"user", b"enumerate(DataLoader)#x", b"user", b"Optimizer.step#SGD.step"]
    rows = [seen("range_begin", 10 * i, name=name) for i, name in enumerate(names)]
    rows += [seen("range_end", 10 * i + 5) for i in range(len(names))]
    found = marks(*rows)
    expected = [Role.OPTIMIZER, Role.NONE, Role.DATA, Role.NONE, Role.OPTIMIZER]
    assert found["role"][found["what"] == What.RANGE_BEGIN].tolist() == expected
    assert not found["role"][found["what"] == What.RANGE_END].any(), "an end takes its begin's"


def test_marks_come_in_order_of_time_and_those_of_one_moment_as_they_were() -> None:
    rows = [seen("wait", 5, handle=1), seen("range_end", 2), seen("wait", 5, handle=2), seen("range_begin", 1)]
    found = marks(*rows)
    assert found["ts_ns"].tolist() == [1, 2, 5, 5]
    assert found["handle"].tolist() == [0, 0, 1, 2]


def test_what_is_no_mark_is_left_out() -> None:
    row = seen("wait", 1)
    row["call"] = BY_SYMBOL["cudaMalloc"].id
    assert len(marks(row)) == 0
    # Of these only the entry is probed.
    assert len(marks(seen("wait", 1, at_exit=1), seen("range_begin", 2, at_exit=1))) == 0
    assert len(marks()) == 0


# ---- NVTX


def push(ts_ns: int, name: bytes, *, kind: str = "nvtx_push", tid: int = 9, domain: int = 0) -> Array:
    return seen(kind, ts_ns, name=name, tid=tid, handle=domain)


def pop(ts_ns: int, *, kind: str = "nvtx_pop", tid: int = 9, domain: int = 0) -> Array:
    return seen(kind, ts_ns, tid=tid, handle=domain)


def events(found: Array) -> list[tuple[int, str, int]]:
    columns = (found[name].tolist() for name in ("ts_ns", "what", "role"))
    return [(ts, What(what).name, role) for ts, what, role in zip(*columns, strict=True)]


def test_parts_that_a_program_names_are_marks_like_pytorch_s_and_know_what_they_end() -> None:
    names = [b"step 7", b"fetch batch", b"forward", b"backward", b"optimizer.step", b"norm"]
    rows = [push(1, names[0])]
    for at, name in enumerate(names[1:], 1):
        rows += [push(10 * at, name), pop(10 * at + 5)]
    found = marks(*rows, pop(99))
    assert events(found) == [
        (1, "STEP_BEGIN", 1),
        (10, "RANGE_BEGIN", Role.DATA),
        (15, "RANGE_END", Role.DATA),
        (20, "RANGE_BEGIN", Role.FORWARD),
        (25, "RANGE_END", Role.FORWARD),
        (30, "BACKWARD_BEGIN", 0),
        (35, "BACKWARD_END", 0),
        (40, "RANGE_BEGIN", Role.OPTIMIZER),
        (45, "RANGE_END", Role.OPTIMIZER),
        (50, "STEP_BEGIN", 0),
        (55, "STEP_END", 0),
        (99, "STEP_END", 1),
    ]
    steps = found[found["what"] == What.STEP_BEGIN]
    assert steps["depth"].tolist() == [0, 1]
    assert len(set(steps["handle"].tolist()) - {0}) == 2


def test_a_running_number_makes_no_other_range() -> None:
    found = marks(*(push(ts, b"step %d" % ts) for ts in range(3)), push(9, b"steps %d"))
    assert len(set(found["handle"].tolist())) == 2


def test_ranges_of_threads_domains_and_those_with_numbers_do_not_end_one_another() -> None:
    rows = [push(1, b"forward"), push(2, b"optimizer", tid=8), push(3, b"fetch data", domain=5)]
    rows += [push(4, b"zero_grad", kind="nvtx_start", domain=1), pop(5), pop(6, tid=8), pop(7, domain=5)]
    found = marks(*rows, pop(8, kind="nvtx_end", domain=77))
    ends = found[found["what"] == What.RANGE_END]
    assert ends["role"].tolist() == [Role.FORWARD, Role.OPTIMIZER, Role.DATA, Role.ZERO_GRAD]
    assert ends["tid"].tolist() == [9, 8, 9, 9]


def test_what_is_out_of_balance_is_counted_and_does_no_harm_to_others() -> None:
    known = Marks()
    rows = [pop(1), push(2, b"step 1"), push(3, b"forward"), push(4, b"step 2"), pop(5), pop(6)]
    found = known.take(np.concatenate(rows), ends_of_backward=True)
    assert events(found) == [
        (2, "STEP_BEGIN", 1),
        (3, "RANGE_BEGIN", Role.FORWARD),
        (4, "RANGE_END", Role.FORWARD),
        (4, "STEP_END", 1),
        (4, "STEP_BEGIN", 1),
        (5, "STEP_END", 1),
    ], "a step is in no other one"
    assert known.counters == {"ranges_unmatched": 2, "ranges_unfinished": 2}
    for depth in range(2 * DEPTH):
        known.take(push(10 + depth, b"leak"), ends_of_backward=True)
    assert known.counters["ranges_unfinished"] == 2 + DEPTH
    for tid in range(2 * STACKS):
        known.take(push(10, b"leak", tid=tid), ends_of_backward=True)
    assert len(known._open) == STACKS


def test_ranges_survive_the_pieces_in_which_they_come() -> None:
    known = Marks()
    known.take(push(1, b"optimizer"), ends_of_backward=True)
    assert events(known.take(pop(2), ends_of_backward=True)) == [(2, "RANGE_END", Role.OPTIMIZER)]
    assert known.optimizers == 1
    for number in range(2 * NAMES):
        known.take(push(3, b"step %d" % number), ends_of_backward=True)
    assert len(known._names) <= NAMES


def test_a_backward_pass_that_is_named_is_not_reported_by_the_engine_too() -> None:
    """The engine's begins have no end: backward would never be over."""
    rows = np.concatenate([push(1, b"backward"), seen("backward_begin", 2), pop(3)])
    found = Marks().take(rows, ends_of_backward=False)
    assert [what for _, what, _ in events(found)] == ["BACKWARD_BEGIN", "BACKWARD_END"]


def test_once_it_is_known_which_ranges_are_steps_no_others_are_reported() -> None:
    known = Marks()
    handle = int(known.take(push(1, b"step 1"), ends_of_backward=True)["handle"][0])
    known.steps = handle
    found = known.take(np.concatenate([push(2, b"other"), pop(3), pop(4), push(5, b"step 2")]), ends_of_backward=True)
    assert events(found) == [(4, "STEP_END", 1), (5, "STEP_BEGIN", 1)]
    known.steps = 0
    assert not len(known.take(np.concatenate([pop(6), push(7, b"step 3")]), ends_of_backward=True))


class Plain:
    """Marks of ranges of which everything is kept while they are open, and that are searched through."""

    def __init__(self, depth: int, steps: int | None) -> None:
        self.depth, self.steps = depth, steps
        self.open: dict[tuple[int, int, bool], list[Meaning]] = {}
        self.counters: Counter[str] = Counter()
        self.rows: list[tuple[int, ...]] = []

    def show(self, meaning: Meaning, begins: bool, ts: int, tid: int, depth: int) -> None:
        if meaning.role is Role.BACKWARD:
            self.rows.append((ts, 0, tid, What.BACKWARD_BEGIN if begins else What.BACKWARD_END, 0, 0))
        elif meaning.role:
            self.rows.append((ts, 0, tid, What.RANGE_BEGIN if begins else What.RANGE_END, meaning.role, 0))
        elif not meaning.part and meaning.base:
            handle = 1 + zlib.crc32(meaning.base.encode())
            if self.steps is None or self.steps == handle:
                what = What.STEP_BEGIN if begins else What.STEP_END
                self.rows.append((ts, handle, tid, what, meaning.is_step, depth))

    def take(self, event: Array) -> None:
        kind, ts, tid = CALLS[int(event["call"])].kind, int(event["ts_ns"]), int(event["tid"])
        started = kind in ("nvtx_start", "nvtx_end")
        stack = self.open.setdefault((tid, 0 if started else int(event["handle"]), started), [])
        meaning = meaning_of(event["name"][: event["name_len"]].tobytes().decode(errors="replace"))
        if kind == "nvtx_mark":
            if not meaning.role:
                self.show(meaning, True, ts, tid, len(stack))
        elif kind in ("nvtx_push", "nvtx_start"):
            same = [place for place, each in enumerate(stack) if each.is_step and each.base == meaning.base]
            while meaning.is_step and same and len(stack) > same[0]:
                self.show(stack.pop(), False, ts, tid, len(stack))
                self.counters["ranges_unfinished"] += 1
            self.show(meaning, True, ts, tid, len(stack))
            stack.append(meaning)
            if len(stack) > self.depth:
                del stack[0]
                self.counters["ranges_unfinished"] += 1
        elif stack:
            self.show(stack.pop(), False, ts, tid, len(stack))
        else:
            self.counters["ranges_unmatched"] += 1


@pytest.mark.parametrize("seed", range(60))
def test_marks_are_those_of_a_search_through_ranges_of_which_all_is_kept(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(steps_marks, "DEPTH", depth := rng.choice([3, 6, 256]))
    names = [b"step %d", b"Step %d", b"iteration %d", b"forward %d", b"other", b"optimizer.step", b"backward"]
    names += [b"", b"7", b"step N", b"micro step", b"eval", b"layer %d", b"save_checkpoint", b"\xff step %d", b"data"]
    kinds = ["nvtx_push"] * 6 + ["nvtx_pop"] * 3 + ["nvtx_start", "nvtx_end", "nvtx_mark"]
    rows = []
    for ts in range(400):
        name = rng.choice(names)
        name = name % rng.randrange(2000) if b"%" in name else name
        at = rng.randrange(2)
        rows.append(seen(rng.choice(kinds), ts, name=name, tid=rng.randrange(2), handle=at))
    steps = rng.choice([None, 0, 1 + zlib.crc32(b"step N")])
    found, plain = Marks(steps=steps), Plain(depth, steps)
    got: list[Any] = []
    for piece in np.array_split(np.concatenate(rows), 5):
        got += found.take(piece, ends_of_backward=True).tolist()
    for row in np.concatenate(rows):
        plain.take(row)
    assert got == plain.rows
    assert +found.counters == plain.counters


def test_what_is_counted_of_names_and_open_ranges_is_what_they_take() -> None:
    """Names of ranges that stay open were not: 27 MB of a process, of which 2.4 were counted."""

    def unnamed(name: str) -> Meaning:
        return Meaning(Role.NONE, name, is_step=False, part=False)

    rng = np.random.default_rng(0)
    cases = [(256, 256, 96), (40, 1000, 96), (1, 10, 20), (256, 1, 96), (256, 6, 40), (3, 256, 8)]
    for threads, depth, length in cases:
        number = threads * depth
        rows = np.zeros(number, records.MARK)
        rows["call"], rows["ts_ns"], rows["tid"] = OF_KIND["nvtx_push"], np.arange(number), np.arange(number) % threads
        rows["handle"], rows["name_len"] = 1 << 40, length
        rows["name"][:, :length] = rng.integers(ord("a"), ord("z"), (number, length))
        known = Marks()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for piece in np.array_split(rows, 1 + number // 1000):
                known.take(piece, ends_of_backward=True, meaning=unnamed)
            real = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert real <= known.kept + 8000, (threads, depth)
        assert known.kept < 2 * real + 4000, (threads, depth)
        assert sum(map(len, known._open.values())) == threads * min(depth, DEPTH)
        known.keep(known.kept // 2)
        assert sum(map(len, known._open.values())) <= threads * min(depth, DEPTH) / 2


@pytest.mark.parametrize("inner", [b"step", b"batch 3"])
def test_a_step_inside_of_many_others_is_not_searched_for(inner: bytes) -> None:
    """It was, in 0.1 ms a range: a process makes 50,000 a second."""
    known = Marks()
    words = [f"{chr(97 + i % 26)}_{chr(97 + i // 26)}_step".encode() for i in range(DEPTH - 2)]
    known.take(np.concatenate([push(ts, word) for ts, word in enumerate(words)]), ends_of_backward=True)
    assert len(known._open[9, 0, False]) == len(words)
    rows = np.concatenate([push(1000, inner)] * 50)
    known.take(rows, ends_of_backward=True)
    assert lines_of(lambda: known.take(rows, ends_of_backward=True)) < 100 * len(rows)
    assert known.counters["ranges_unfinished"] == 2 * len(rows) - 1


def letters(number: int) -> str:
    """A number without digits."""
    return "".join(chr(97 + int(digit)) for digit in str(number))


def test_names_without_end_do_not_make_others_forgotten() -> None:
    asked: Counter[str] = Counter()

    def meaning(name: str) -> Meaning:
        asked[name] += 1
        return meaning_of(name)

    known = Marks()
    for number in range(3 * NAMES):
        rows = push(1, b"forward"), pop(2), push(3, letters(number).encode()), pop(4)
        known.take(np.concatenate(rows), ends_of_backward=True, meaning=meaning)
    assert asked["forward"] == 1
    assert len(asked) == 1 + 3 * NAMES
    assert len(known._names) == NAMES


@pytest.mark.parametrize("seed", range(20))
def test_of_names_and_threads_those_that_were_used_last_are_kept(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program's own came first, and went first."""
    rng = random.Random(seed)
    monkeypatch.setattr(steps_marks, "STACKS", most := rng.choice([3, 8, 256]))
    monkeypatch.setattr(steps_marks, "NAMES", most_names := rng.choice([4, 256]))
    known, used, unfinished = Marks(), dict[int, int](), 0
    names: dict[bytes, None] = {}
    for ts in range(300):
        tid, name = rng.randrange(20), rng.choice("abcdefghijkl").encode()
        begins = rng.random() < 0.6
        known.take(push(ts, name, tid=tid) if begins else pop(ts, tid=tid), ends_of_backward=True)
        if begins:
            names.pop(name, None)
            names[name] = None
            for oldest in [*names][:-most_names]:
                del names[oldest]
            opened = used.pop(tid, 0) + 1
            if len(used) >= most:
                unfinished += used.pop(next(iter(used)))
            used[tid] = opened
        elif used.get(tid):
            used[tid] = used.pop(tid) - 1
        assert [*known._names] == [*names]
        assert [(key[0], len(each)) for key, each in known._open.items()] == [*used.items()]
        assert known.counters["ranges_unfinished"] == unfinished
    part = rng.random()
    known.keep(int(part * known.kept))
    left, left_names = [key[0] for key in known._open], [*known._names]
    assert left == [*used][len(used) - len(left) :]
    assert left_names == [*names][len(names) - len(left_names) :]
    assert known.counters["ranges_unfinished"] == unfinished + sum(used.values()) - sum(map(len, known._open.values()))


def test_the_numbers_in_a_name_are_no_other_names() -> None:
    asked: list[str] = []

    def meaning(name: str) -> Meaning:
        asked.append(name)
        return meaning_of(name)

    rows = [push(ts, b"step %d of 9" % ts) for ts in range(2000)]
    found = Marks().take(np.concatenate(rows), ends_of_backward=True, meaning=meaning)
    assert asked == ["step 0 of 0", "step 00 of 0", "step 000 of 0", "step 0000 of 0"]
    assert len(set(found["handle"].tolist())) == 1


@pytest.mark.parametrize("seed", range(20))
def test_a_name_means_the_same_with_other_numbers(seed: int) -> None:
    rng = random.Random(seed)
    parts = [
        "step",
        "fwd",
        "Forward",
        "GPU",
        "N",
        "zero",
        "grad",
        "ckpt",
        "data",
        "load",
        "é",
        "٣",
        "_",
        " ",
        "#",
        "opt",
    ]
    for _ in range(300):
        text = "".join(rng.choice([*parts, str(rng.randrange(10_000))]) for _ in range(rng.randrange(8))).encode()
        text = text[: rng.randrange(len(text) + 1)]  # also inside of a character
        other = text.translate(_NUMBERS)
        assert meaning_of(other.decode(errors="replace")) == meaning_of(text.decode(errors="replace"))


def test_a_range_for_whose_name_there_was_no_time_is_nothing_and_still_has_its_end() -> None:
    known = Marks()
    rows = np.concatenate([push(1, b"step 1"), push(2, b"forward"), pop(3), pop(4)])
    assert not len(known.take(rows, ends_of_backward=True, meaning=lambda name: None))
    assert not known.counters
    known.take(push(5, b"forward"), ends_of_backward=True, meaning=lambda name: None)
    found = known.take(np.concatenate([push(6, b"forward"), pop(7), pop(8)]), ends_of_backward=True)
    assert events(found) == [(6, "RANGE_BEGIN", Role.FORWARD), (7, "RANGE_END", Role.FORWARD)]
    assert not known.counters


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("forward", Role.FORWARD),
        ("Forward pass", Role.FORWARD),
        ("forward_step", Role.FORWARD),
        ("fwd_3", Role.FORWARD),
        ("backward", Role.BACKWARD),
        ("BackwardPass", Role.BACKWARD),
        ("bprop", Role.BACKWARD),
        ("forward_backward", Role.NONE),
        ("optimizer.step()", Role.OPTIMIZER),
        ("opt_step", Role.OPTIMIZER),
        ("optimizer init", Role.NONE),
        ("optimizer.zero_grad", Role.ZERO_GRAD),
        ("zero_grad", Role.ZERO_GRAD),
        ("data", Role.DATA),
        ("data_loading", Role.DATA),
        ("DataLoader.next", Role.DATA),
        ("load batch 12", Role.DATA),
        ("get_batch", Role.DATA),
        ("data parallel all-reduce", Role.NONE),
        ("save_checkpoint", Role.CHECKPOINT),
        ("save_checkpoint_step_100", Role.CHECKPOINT),
        ("Checkpoint", Role.CHECKPOINT),
        ("ckpt 3", Role.CHECKPOINT),
        ("saveCheckpoint", Role.CHECKPOINT),
        ("load_checkpoint", Role.CHECKPOINT),
        ("torch.save", Role.CHECKPOINT),
        ("dcp.save", Role.CHECKPOINT),
        ("dcp.async_save", Role.CHECKPOINT),
        ("save_state_dict", Role.CHECKPOINT),
        ("save_optimizer_state", Role.CHECKPOINT),
        ("[Callback]ModelCheckpoint.on_train_batch_end", Role.CHECKPOINT),
        ("activation_checkpoint", Role.NONE),
        ("checkpoint_wrapper", Role.NONE),
        ("checkpoint_block", Role.NONE),
        ("CheckpointFunction", Role.NONE),
        ("CheckpointFunctionBackward", Role.BACKWARD),
        ("checkpoint forward", Role.FORWARD),
        ("recompute", Role.NONE),
        ("save_rng_state", Role.NONE),
        ("save_for_backward", Role.BACKWARD),
        ("eval forward", Role.NONE),
    ],
)
def test_the_words_of_a_name_show_its_role(name: str, role: Role) -> None:
    meaning = meaning_of(name)
    assert meaning.role is role
    assert not meaning.is_step


@pytest.mark.parametrize(
    ("name", "is_step", "part"),
    [
        ("step 812", True, False),
        ("iteration812", True, False),
        ("Iter_5", True, False),
        ("train_step", True, False),
        ("trainStep", True, False),
        ("batch 3 of 7", True, False),
        ("epoch 1 step 9", True, False),
        ("microbatch 3", False, True),
        ("micro-step", False, True),
        ("layer 3 step", False, True),
        ("eval step 4", False, True),
        ("forward step", False, True),
        ("steppe", False, False),
        ("train", False, False),
        ("", False, False),
    ],
)
def test_a_name_says_a_step_or_a_part_of_one_or_neither(name: str, is_step: bool, part: bool) -> None:
    meaning = meaning_of(name)
    assert (meaning.is_step, meaning.part) == (is_step, part)


def test_names_that_the_kernel_could_not_read_are_read_or_counted() -> None:
    here = ctypes.create_string_buffer(b"step 7")
    rows = np.zeros(3, records.MARK)
    rows["pid"], rows["name_len"] = os.getpid(), 8
    rows["flags"][:2] = records.FLAG_NAME_ADDRESS
    for row, address in zip(rows, (ctypes.addressof(here), 16, ctypes.addressof(here)), strict=True):
        row["name"][:8] = np.frombuffer(address.to_bytes(8, "little"), np.uint8)
    names = KernelNames()
    found = names.complete(rows)
    assert found["name_len"].tolist() == [6, 0, 8]
    assert found["name"][0][:6].tobytes() == b"step 7"
    assert (found[2] == rows[2]).all(), "its name is what it says"
    assert names.unread == 1


def test_an_address_is_read_once_in_a_turn_however_many_marks_have_it() -> None:
    here = ctypes.create_string_buffer(b"step 7")
    rows = np.zeros(1000, records.MARK)
    rows["pid"], rows["name_len"], rows["flags"] = os.getpid(), 8, records.FLAG_NAME_ADDRESS
    for row, address in zip(rows, [ctypes.addressof(here), 16] * 500, strict=True):
        row["name"][:8] = np.frombuffer(address.to_bytes(8, "little"), np.uint8)

    class LookUps:
        asked = 0

        def may_look_up(self, pid: int) -> bool:
            self.asked += 1
            return True

        def looking_up(self, pid: int) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

    names = KernelNames(look_ups := LookUps())
    assert names.complete(rows)["name_len"].tolist() == [6, 0] * 500
    assert (look_ups.asked, names.unread) == (2, 500)
