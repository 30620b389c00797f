"""Python and native frames as one stack, its number, and who is in the same place."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argus.model.records import (
    STACK_IDLE_PYTHON,
    STACK_NATIVE_CUT,
    STACK_PYTHON,
    STACK_PYTHON_CUT,
    STACK_PYTHON_REJECTED,
)
from argus.model.stacks import CUT, REJECTED, UNRESOLVED, Frame, Stack, merge
from argus.semantics.stacks.stack import group_by_stack, label, rank_text, short_file, thread_role
from tests.builders.stack_data import native, py, stack


@dataclass(frozen=True)
class P:
    function: str
    file: str = "/app/train.py"
    line: int = 1


@dataclass(frozen=True)
class N:
    function: str
    module: str = "/lib/libpython3.so"
    offset: int = 0x10
    kind: str = "native"
    build_id: str = ""


EVAL = N("_PyEval_EvalFrameDefault")


def is_eval(frame: N) -> bool:
    return frame.function.startswith("_PyEval_EvalFrameDefault")


def functions(merged: Stack) -> list[str]:
    return [frame.function for frame in merged.frames]


def woven(python: str, entries: str, natives: str, *, complete: bool = True, flags: int = STACK_PYTHON) -> Stack:
    """Words, root first; E is the eval loop; entries: x C called it, . Python did."""
    return merge(
        [None if word == "?" else P(word) for word in reversed(python.split())],
        [mark == "x" for mark in reversed(entries)],
        [EVAL if word == "E" else N(word) for word in reversed(natives.split())],
        complete,
        flags,
        is_eval,
    )


def test_an_eval_loop_runs_what_python_calls_up_to_the_next_call_from_c() -> None:
    merged = woven("module main step hook inner", "x..x.", "_start main E Tensor_backward E cudaLaunchKernel")
    assert functions(merged) == [
        "_start", "main", "module", "main", "step", "Tensor_backward", "hook", "inner", "cudaLaunchKernel",
    ]  # fmt: skip
    assert (merged.python, merged.native) == ("complete", "complete")
    assert [frame.kind for frame in merged.frames][2:6] == ["python", "python", "python", "native"]


def test_before_3_11_every_python_frame_has_an_eval_loop_of_its_own() -> None:
    merged = woven("module main step", "xxx", "_start E call E vectorcall E read")
    assert functions(merged) == ["_start", "module", "call", "main", "vectorcall", "step", "read"]


def test_loops_right_below_each_other() -> None:
    assert functions(woven("a b c", "xx.", "_start E E")) == ["_start", "a", "b", "c"]


@pytest.mark.parametrize(
    ("python", "entries", "natives"),
    [
        ("module main", "x.", "_start E call E memcpy"),  # about to begin a Python function
        ("module main", "xx", "_start E memcpy"),  # about to leave one
        ("module main", "..", "_start E memcpy"),  # nothing says where the first one begins
        ("module main", "x.", "_start memcpy"),
    ],
)
def test_what_does_not_count_alike_is_not_guessed(python: str, entries: str, natives: str) -> None:
    merged = woven(python, entries, natives)
    assert functions(merged) == ["module", "main", "memcpy"]
    assert (merged.python, merged.native) == ("complete", "leaf")


def test_a_leaf_alone_goes_below_python_unless_it_is_the_eval_loop() -> None:
    assert functions(woven("module main", "x.", "memcpy", complete=False)) == ["module", "main", "memcpy"]
    alone = woven("module main", "x.", "E", complete=False)
    assert functions(alone) == ["module", "main"]
    assert alone.native == "leaf"
    assert functions(woven("module main", "x.", "")) == ["module", "main"]
    assert woven("module main", "x.", "").native == "none"


def test_callers_of_an_incomplete_chain_are_not_believed() -> None:
    merged = woven("", "", "garbage middle leaf", complete=False, flags=0)
    assert functions(merged) == ["leaf"]
    assert woven("", "", "a b", complete=False, flags=STACK_NATIVE_CUT).native == "cut"


def test_threads_without_python() -> None:
    merged = woven("", "", "clone3 start_thread worker", flags=0)
    assert (functions(merged), merged.python, merged.native) == (
        ["clone3", "start_thread", "worker"],
        "none",
        "complete",
    )
    assert woven("", "", "clone3 worker", flags=STACK_IDLE_PYTHON).python == "none"
    assert woven("", "", "", flags=0) == Stack((), "none", "none")


def test_python_that_could_not_be_read_is_reported() -> None:
    merged = woven("", "", "E", complete=False, flags=STACK_PYTHON_REJECTED)
    assert functions(merged) == [REJECTED, "_PyEval_EvalFrameDefault"]
    assert (merged.frames[0].kind, merged.python) == ("marker", "rejected")
    whole = woven("", "", "_start E memcpy", flags=STACK_PYTHON_REJECTED)
    assert functions(whole) == ["_start", "_PyEval_EvalFrameDefault", "memcpy"]
    assert whole.python == "rejected"


def test_a_cut_python_stack_says_so_and_is_not_woven() -> None:
    merged = woven("deep deeper", "x.", "_start E memcpy", flags=STACK_PYTHON | STACK_PYTHON_CUT)
    assert functions(merged) == [CUT, "deep", "deeper", "memcpy"]
    assert (merged.python, merged.native) == ("cut", "leaf")


def test_frames_without_names() -> None:
    merged = merge(
        [None, P("main", line=-1)],
        [False, True],
        [N("", "/lib/libfoo.so", 0x1234)],
        False,
        STACK_PYTHON,
        [False],
    )
    assert merged.frames == (
        Frame("python", "main", "/app/train.py", 0),
        Frame("python", UNRESOLVED),
        Frame("native", "libfoo.so+0x1234", "/lib/libfoo.so"),
    )
    for nameless, expected in (
        (N("", "[anon]", 7), Frame("native", "[anon]", "[anon]")),
        (N("", "", 7), Frame("native", "?+0x7")),
    ):
        assert merge([], [], [nameless], False, 0, [False]).frames == (expected,)
    assert merge([], [], [N("f", "[jit]", 0, "jit")], False, 0, [False]).frames[0].kind == "jit"
    assert merge([], [], [N("clock_gettime", "[vdso]", 0, "vdso")], False, 0, [False]).frames[0].kind == "native"


def test_the_number_of_a_stack_is_that_of_its_content() -> None:
    one = stack(py("a", 1), py("b", 2))
    assert one.id == stack(py("a", 1), py("b", 2)).id
    # Fixed for ever: ids in stores of different versions must agree.
    assert one.id == 2695162944597330696
    others = [
        stack(py("a", 1), py("b", 3)), stack(py("b", 2), py("a", 1)), stack(py("a", 1)), stack(py("a", 1), py("b2")),
        stack(py("a", 1), native("b")), stack(py("a", 1), py("b", 2), native="complete"),
        stack(py("a", 1), py("b", 2), python="cut"), stack(py("a1", 0), py("b", 2)), stack(),
    ]  # fmt: skip
    assert len({one.id, *(other.id for other in others)}) == 1 + len(others)
    assert stack(py("\udcff\0;<")).id != 0


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2)), min_size=1, max_size=12), st.booleans())
def test_weaving_loses_and_invents_nothing(shape: list[tuple[bool, int]], complete: bool) -> None:
    """Whatever the shape: all Python frames, in their order; all native frames but the loops, where they are woven."""
    entries = [True, *(entry for entry, _ in shape[1:])]
    names: list[str] = []
    for number, (entry, calls) in enumerate(zip(entries, (c for _, c in shape), strict=True)):
        if entry:
            names += [f"c{number}_{k}" for k in range(calls)] + ["E"]
    names += ["leaf"]
    merged = merge(
        [P(f"p{n}") for n in reversed(range(len(shape)))],
        entries[::-1],
        [EVAL if name == "E" else N(name) for name in reversed(names)],
        complete,
        STACK_PYTHON,
        is_eval,
    )
    assert [f.function for f in merged.frames if f.kind == "python"] == [f"p{n}" for n in range(len(shape))]
    expected = [name for name in names if name != "E"] if complete else ["leaf"]
    assert [f.function for f in merged.frames if f.kind == "native"] == expected


# ---- who is where


def where(*counts: tuple[int, Stack]) -> list[tuple[int, str, Stack]]:
    members = []
    for count, place in counts:
        members += [(len(members) + n, "main", place) for n in range(count)]
    return members


def test_the_one_that_is_elsewhere_is_named() -> None:
    waiting = stack(py("main", 1), py("step", 9), py("all_reduce", 5))
    loading = stack(py("main", 1), py("step", 7), py("next", 3, "/app/data.py"))
    members = [(rank, "main", loading if rank == 3 else waiting) for rank in range(32)]
    groups = group_by_stack(members)
    assert [(group.ranks, group.odd, group.alike) for group in groups] == [
        ("0-2,4-31", False, "stack"),
        ("3", True, "stack"),
    ]
    assert groups[0].frames == waiting.frames
    assert groups[1].common == 2


def test_nobody_is_odd_where_there_is_no_majority() -> None:
    a, b, c = (stack(py(name)) for name in "abc")
    assert [group.odd for group in group_by_stack(where((2, a), (2, b)))] == [False, False]
    assert [group.odd for group in group_by_stack(where((2, a), (1, b), (1, c)))] == [False, False, False]
    assert [group.odd for group in group_by_stack(where((3, a), (2, b)))] == [False, False]
    assert [group.odd for group in group_by_stack(where((3, a), (1, b)))] == [False, True]
    assert group_by_stack([]) == []


def test_small_groups_are_put_together_by_functions_and_then_by_their_beginning() -> None:
    hang = stack(py("main", 1), py("barrier", 2))
    odd = stack(py("main", 1), py("save", 4))
    lines = [stack(py("main", 1), py("compute", 100 + n)) for n in range(40)]
    groups = group_by_stack(where((200, hang), *((1, one) for one in lines), (1, odd)))
    assert [(len(group.members), group.alike, group.odd) for group in groups] == [
        (200, "stack", False), (40, "functions", True), (1, "stack", True),
    ]  # fmt: skip
    assert groups[1].frames == (py("main", 1), py("compute", 0))
    spread = [stack(py("main", 1), py("layer", 2), py(f"kernel_{n}", n)) for n in range(40)]
    groups = group_by_stack(where((200, hang), *((1, one) for one in spread)))
    assert [(len(group.members), group.alike) for group in groups] == [(200, "stack"), (40, "prefix")]
    assert groups[1].frames == (py("main", 1), py("layer", 2))


def test_the_finest_beginning_that_a_person_can_read_is_taken() -> None:
    members = where(*((1, stack(py("main"), py(f"branch_{n % 5}"), py(f"leaf_{n}"))) for n in range(100)))
    for most in (8, 5):
        groups = group_by_stack(members, max_groups=most)
        assert [len(group.members) for group in groups] == [20] * 5
        assert all(group.frames[-1].function.startswith("branch_") for group in groups)
    assert [len(group.members) for group in group_by_stack(members, max_groups=4)] == [100]
    nothing = group_by_stack(where(*((1, stack(py(f"root_{n}"))) for n in range(100))), max_groups=8)
    assert [(len(group.members), group.frames) for group in nothing] == [(100, ())]


def test_a_thousand_ranks_with_five_threads_each() -> None:
    usual = [stack(*(py(f"f{n}", n) for n in range(40)), py(f"leaf{k}", k)) for k in range(30)]
    members = [(rank, f"t{t}", usual[(rank * 7 + t) % 30]) for rank in range(1000) for t in range(5)]
    members.append((999, "lost", stack(py("f0", 0), py("stuck", 1))))
    groups = group_by_stack(members)
    assert sum(len(group.members) for group in groups) == len(members)
    assert len(groups) <= 30 + 8


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=5), max_size=60), st.integers(1, 9)
)
def test_every_thread_is_in_one_group_and_agrees_with_it(shapes: list[list[tuple[str, int]]], most: int) -> None:
    members = [(rank, "main", stack(*(py(name, line) for name, line in shape))) for rank, shape in enumerate(shapes)]
    groups = group_by_stack(members, max_groups=most)
    assert sorted(member for group in groups for member in group.members) == [(r, t) for r, t, _ in members]
    assert [len(group.members) for group in groups] == sorted((len(group.members) for group in groups), reverse=True)
    place = {(rank, thread): one.frames for rank, thread, one in members}
    for group in groups:
        for member in group.members:
            frames = place[member]
            if group.alike != "prefix":
                assert len(frames) == len(group.frames)
            for frame, shown in zip(frames, group.frames, strict=False):
                assert frame.function == shown.function
                assert shown.line in (0, frame.line)


# ---- words


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1], "0,1"),
        ([0, 1, 2, *range(4, 32)], "0-2,4-31"),
        ([5, 5, 1], "1,5"),
        (range(1000), "0-999"),
    ],
)
def test_rank_text(ranks: list[int], text: str) -> None:
    assert rank_text(ranks) == text


@pytest.mark.parametrize(
    ("file", "short"),
    [
        ("/usr/lib/python3.11/threading.py", "threading.py"),
        ("/v/lib/python3.12/site-packages/torch/nn/modules/linear.py", "torch/nn/modules/linear.py"),
        ("/usr/lib/python3/dist-packages/numpy/core.py", "numpy/core.py"),
        ("/home/me/llama/src/train.py", "src/train.py"),
        ("train.py", "train.py"),
        ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap>"),
        ("", ""),
    ],
)
def test_short_file(file: str, short: str) -> None:
    assert short_file(file) == short


def test_labels() -> None:
    assert label(py("step", 41, "/a/b/train.py")) == "step (b/train.py)"
    assert label(py("step", 41, "/a/b/train.py"), lines=True) == "step (b/train.py:41)"
    assert label(py("step", 0, "/a/b/train.py"), lines=True) == "step (b/train.py)"
    assert label(native("cudaLaunchKernel", "/x/libcudart.so.12")) == "cudaLaunchKernel (libcudart.so.12)"
    assert label(Frame("native", "libfoo.so+0x1", "/x/libfoo.so")) == "libfoo.so+0x1"
    assert label(Frame("python", UNRESOLVED)) == UNRESOLVED
    evil = Frame("python", "f\x1b[31m", "/x/tra\x1b]0;in.py", 3)
    assert label(evil, lines=True) == r"f\x1b[31m (x/tra\x1b]0;in.py:3)"


@pytest.mark.parametrize(
    ("name", "role"),
    [("pt_autograd_7", "pt_autograd_#"), ("pt_nccl_watchdg", "pt_nccl_watchdg"), ("python3.11", "python3.11"),
     ("cuda00001400006", "cuda#"), ("Thread-12", "Thread-#"), ("", "")],
)  # fmt: skip
def test_thread_role(name: str, role: str) -> None:
    assert thread_role(name) == role
    assert thread_role(name, main=True) == "main"
