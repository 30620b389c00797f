"""Stacks in a store: the views against hand-computed data, and what the reader chooses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from argus.model.errors import ArgusError
from argus.semantics.stacks.profile import COLLECTING, KERNEL, NO_STACK
from argus.semantics.stacks.stack import group_by_stack
from argus.store.open import Store, open_store
from argus.store.read.stacks import Selection, newest_sample_ns, read_profile, read_threads
from argus.store.reader import query
from argus.store.writer import Writer
from tests.builders.stack_data import MS, PERIOD, T0, Row, native, py, stack, store_run, store_stacks
from tests.stores import new_store

FORWARD = stack(py("main", 10), py("step", 20), py("forward", 30, "/app/model.py"), native("sgemm", "/lib/libblas.so"))
BACKWARD = stack(py("main", 10), py("step", 21), native("backward", "/lib/libtorch.so"))
RECURSIVE = stack(py("main", 10), py("walk", 5), py("walk", 5), py("walk", 6))
WORKER = stack(native("clone3"), native("worker"), python="none", native="complete")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Two ranks, three steps of 100 ms from T0 on. One sample is 10 ms."""
    with open_store(new_store(tmp_path_factory.mktemp("stacks"))) as opened:
        with Writer(opened, source="test") as writer:
            store_run(writer, [0, 1], steps=3)
            store_stacks(writer, [
                Row(0, FORWARD, 10, count=4, last_ms=80, gil=True),
                Row(0, BACKWARD, 110, count=5, last_ms=180),
                Row(0, RECURSIVE, 210, count=2, gc=True, in_kernel=True),
                Row(0, WORKER, 20, count=3, tid=77, thread="pt_worker_0"),
                Row(1, FORWARD, 10, count=6),
                Row(1, FORWARD, 50, kind="off", count=2, ns=70 * MS, last_ms=190, reason="futex", runqueue_ns=5 * MS),
                Row(1, None, 250, kind="off", count=9, ns=9 * MS, last_ms=260, reason="gil", tid=78, thread="x"),
                Row(1, BACKWARD, 305, count=1),  # after the last step
            ])  # fmt: skip
            store_run(writer, [0], run=2)
            store_stacks(writer, [Row(0, FORWARD, 0, count=50)], run=2)
            assert writer.flush(), writer.last_error
        yield opened


def rows(store: Store, sql: str) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in query(store, sql).to_pylist()]


# ---- views


def test_samples_are_joined_with_the_step_of_their_middle(store: Store) -> None:
    sql = (
        "SELECT rank, step, kind, reason, count, ns, stack_id FROM stack_samples_by_step WHERE run = 1"
        " ORDER BY rank, ts, tid"
    )
    assert rows(store, sql) == [
        (0, 0, "cpu", "", 4, 4 * PERIOD, FORWARD.id),
        (0, 0, "cpu", "", 3, 3 * PERIOD, WORKER.id),
        (0, 1, "cpu", "", 5, 5 * PERIOD, BACKWARD.id),
        (0, 2, "cpu", "", 2, 2 * PERIOD, RECURSIVE.id),
        (1, 0, "cpu", "", 6, 6 * PERIOD, FORWARD.id),
        (1, 1, "off", "futex", 2, 70 * MS, FORWARD.id),  # began in step 0: its middle, 120 ms, is in step 1
        (1, 2, "off", "gil", 9, 9 * MS, 0),
        (1, None, "cpu", "", 1, PERIOD, BACKWARD.id),
    ]
    described = {name: (kind, comment) for name, kind, comment in rows(
        store, "SELECT name, type, comment FROM system.columns WHERE table = 'stack_samples_by_step'"
    )}  # fmt: skip
    assert described["step"][0] == "Nullable(UInt32)"


def test_hot_lines(store: Store) -> None:
    sql = (
        "SELECT file, line, function, self_ns, total_ns, self_count, total_count FROM hot_lines"
        " WHERE job = 'llama' AND run = 1 AND rank = 0 AND kind = 'cpu' ORDER BY file, line"
    )
    assert rows(store, sql) == [
        ("", 0, "", 3 * PERIOD, 3 * PERIOD, 3, 3),  # the thread without Python
        ("/app/model.py", 30, "forward", 4 * PERIOD, 4 * PERIOD, 4, 4),
        ("/app/train.py", 5, "walk", 0, 2 * PERIOD, 0, 2),  # twice in the stack, counted once
        ("/app/train.py", 6, "walk", 2 * PERIOD, 2 * PERIOD, 2, 2),
        ("/app/train.py", 10, "main", 0, 11 * PERIOD, 0, 11),
        ("/app/train.py", 20, "step", 0, 4 * PERIOD, 0, 4),
        ("/app/train.py", 21, "step", 5 * PERIOD, 5 * PERIOD, 5, 5),
    ]
    for kind in ("cpu", "off"):
        every = rows(store, f"SELECT sum(self_ns) FROM hot_lines WHERE run = 1 AND kind = '{kind}'")
        assert every == rows(store, f"SELECT sum(ns) FROM stack_samples WHERE run = 1 AND kind = '{kind}'")


def test_hot_functions(store: Store) -> None:
    sql = (
        "SELECT frame_kind, function, file, self_ns, total_ns FROM hot_functions"
        " WHERE job = 'llama' AND run = 1 AND rank = 0 AND kind = 'cpu' ORDER BY function"
    )
    assert rows(store, sql) == [
        ("native", "backward", "/lib/libtorch.so", 5 * PERIOD, 5 * PERIOD),
        ("native", "clone3", "/usr/lib/libc.so.6", 0, 3 * PERIOD),
        ("python", "forward", "/app/model.py", 0, 4 * PERIOD),
        ("python", "main", "/app/train.py", 0, 11 * PERIOD),
        ("native", "sgemm", "/lib/libblas.so", 4 * PERIOD, 4 * PERIOD),
        ("python", "step", "/app/train.py", 0, 9 * PERIOD),
        ("python", "walk", "/app/train.py", 2 * PERIOD, 2 * PERIOD),
        ("native", "worker", "/usr/lib/libc.so.6", 3 * PERIOD, 3 * PERIOD),
    ]
    off = "SELECT function, self_ns FROM hot_functions WHERE run = 1 AND kind = 'off' AND self_ns > 0 ORDER BY function"
    assert rows(store, off) == [("", 9 * MS), ("sgemm", 70 * MS)]


def test_off_cpu_by_reason(store: Store) -> None:
    sql = (
        "SELECT rank, thread, reason, times, off_ns, waited_for_cpu_ns, longest_ns FROM off_cpu_by_reason"
        " WHERE run = 1 ORDER BY off_ns DESC"
    )
    assert rows(store, sql) == [
        (1, "python", "futex", 2, 70 * MS, 5 * MS, 70 * MS),
        (1, "x", "gil", 9, 9 * MS, 0, 9 * MS),
    ]


# ---- profiles


def weights(store: Store, **fields: Any) -> dict[str, int]:
    """Milliseconds by the functions of the last two frames."""
    profile = read_profile(store, Selection("llama", 1, **fields))
    out: dict[str, int] = {}
    for sample in profile.samples:
        key = "/".join(frame.function for frame in sample.frames[-2:])
        out[key] = out.get(key, 0) + sample.ns // MS
    return out


def test_selections(store: Store) -> None:
    everything = {
        "forward/sgemm": 100, "step/backward": 60, "(collecting garbage)/[kernel]": 20, "clone3/worker": 30,
    }  # fmt: skip
    assert weights(store) == everything
    assert weights(store, ranks=(0,)) == everything | {"forward/sgemm": 40, "step/backward": 50}
    assert weights(store, ranks=(0,), other_ranks=True) == {"forward/sgemm": 60, "step/backward": 10}
    assert weights(store, threads=("main",), ranks=(0,)) == {
        "forward/sgemm": 40, "step/backward": 50, "(collecting garbage)/[kernel]": 20,
    }  # fmt: skip
    assert weights(store, threads=("pt_*",)) == {"clone3/worker": 30}
    assert weights(store, threads=("pt_worker_?", "nobody")) == {"clone3/worker": 30}
    assert weights(store, steps=(1, 1)) == {"step/backward": 50}
    assert weights(store, steps=(0, 1), ranks=(0,)) == {"forward/sgemm": 40, "clone3/worker": 30, "step/backward": 50}
    assert weights(store, from_ns=T0 + 100 * MS, to_ns=T0 + 210 * MS) == {"step/backward": 50}
    assert weights(store, from_ns=T0 + 45 * MS, to_ns=T0 + 46 * MS) == {"forward/sgemm": 40}
    assert weights(store, gil=True) == {"forward/sgemm": 40}
    assert weights(store, kind="off") == {"sgemm/(waiting: futex)": 70, "(no stack was taken)/(waiting: gil)": 9}
    assert sum(weights(store, kind="all").values()) == sum(everything.values()) + 79
    # It lasted from 50 to 190 ms, and half of that time is told: the part inside counts.
    for early, late, inside in ((0, 300, 70), (110, 130, 10), (0, 120, 35), (120, 300, 35), (188, 300, 1)):
        found = weights(store, kind="off", from_ns=T0 + early * MS, to_ns=T0 + late * MS, ranks=(1,), threads=("main",))
        assert found == {"sgemm/(waiting: futex)": inside}
    for early, late in ((0, 50), (190, 200)):
        with pytest.raises(ArgusError, match="no stacks"):
            weights(store, kind="off", from_ns=T0 + early * MS, to_ns=T0 + late * MS)
    assert weights(store, kind="off", from_ns=T0 + 120 * MS) == {
        "sgemm/(waiting: futex)": 35, "(no stack was taken)/(waiting: gil)": 9,
    }  # fmt: skip
    assert weights(store, kind="off", to_ns=T0 + 120 * MS) == {"sgemm/(waiting: futex)": 35}
    assert weights(store, last_ns=100 * MS) == {"step/backward": 10, "(collecting garbage)/[kernel]": 20}


def test_names_of_threads_are_no_patterns(store: Store) -> None:
    with pytest.raises(ArgusError, match="no stacks"):
        weights(store, threads=("pt_.*",))
    with pytest.raises(ArgusError, match="no stacks"):
        weights(store, threads=("pt(",))


def test_frames_that_samples_add(store: Store) -> None:
    profile = read_profile(store, Selection("llama", 1, ranks=(0,)), lines=True)
    (collecting,) = [sample for sample in profile.samples if COLLECTING in sample.frames]
    assert collecting.frames == (*RECURSIVE.frames, COLLECTING, KERNEL)
    waits = read_profile(store, Selection("llama", 1, kind="off"))
    assert {sample.frames[0] for sample in waits.samples} == {py("main"), NO_STACK}
    with_native = read_profile(store, Selection("llama", 1, ranks=(0,), gil=True), lines=True)
    assert [sample.frames for sample in with_native.samples] == [FORWARD.frames]


def test_what_is_kept_apart(store: Store) -> None:
    merged = read_profile(store, Selection("llama", 1))
    assert {(s.rank, s.thread, s.tid) for s in merged.samples} == {(-1, "", 0)}
    assert len(merged.samples) == 4
    apart = read_profile(store, Selection("llama", 1), by=("rank", "thread"))
    assert {(s.rank, s.thread, s.tid) for s in apart.samples} == {
        (0, "python", 1000),
        (0, "pt_worker_0", 77),
        (1, "python", 1001),
    }
    assert merged.total_ns == apart.total_ns


def test_what_a_profile_says_of_itself(store: Store) -> None:
    profile = read_profile(store, Selection("llama", 1, steps=(0, 1)))
    assert (profile.rank_steps, profile.rank_ns, profile.period_ns) == (4, 400 * MS, PERIOD)
    assert profile.subtitle == "run 1, all ranks, steps 0-1, on the CPU"
    window = read_profile(store, Selection("llama", 1, from_ns=T0, to_ns=T0 + 200 * MS, ranks=(0,)))
    assert (window.rank_steps, window.begin_ns) == (2, T0 + 10 * MS)
    assert window.subtitle.startswith("run 1, rank 0, 2023-11-14 22:13:20.000 UTC to 2023-11-14 22:13:20.200 UTC")
    assert read_profile(store, Selection("llama", 2)).rank_steps == 0


def test_nothing_found_says_what_there_is(store: Store) -> None:
    with pytest.raises(ArgusError) as failure:
        read_profile(store, Selection("llama", 1, ranks=(7,), threads=("main",), steps=(5, 9)))
    assert failure.value.message == (
        "no stacks of job 'llama' found: run 1, rank 7, thread main, steps 5-9, on the CPU"
    )
    assert "ranks 0,1 from 2023-11-14 22:13:20.010" in failure.value.hint
    for ends, words in (
        ({"from_ns": T0 + 1000 * MS}, "from 2023-11-14 22:13:21.000 UTC on"),
        ({"to_ns": T0 - 1000 * MS}, "before 2023-11-14 22:13:19.000 UTC"),
    ):
        with pytest.raises(ArgusError) as failure:
            read_profile(store, Selection("llama", 1, **ends))
        assert failure.value.message == f"no stacks of job 'llama' found: run 1, all ranks, {words}, on the CPU"
    assert failure.value.hint.endswith(" UTC")
    with pytest.raises(ArgusError) as failure:
        read_profile(store, Selection("llama", 2, kind="off"))
    assert failure.value.hint.endswith(" UTC, all of them on the CPU: --kind cpu")
    with pytest.raises(ArgusError) as failure:
        read_profile(store, Selection("llama", 9, last_ns=MS))
    assert "no stacks at all" in failure.value.hint
    assert newest_sample_ns(store, "llama", 9) is None
    assert newest_sample_ns(store, "llama", 1) == T0 + 305 * MS


def test_stacks_that_the_store_lacks_are_not_left_out(store: Store) -> None:
    with Writer(store, source="lost") as writer:
        store_run(writer, [0], run=3)
        store_stacks(writer, [Row(0, None, 0, count=2)], run=3)
        assert writer.flush(), writer.last_error
    with store.lease() as client:
        client.command(
            "INSERT INTO stack_samples (job, run, rank, ts, last_ts, kind, count, ns, stack_id)"
            f" SELECT job, run, rank, ts, last_ts, kind, 3, {3 * PERIOD}, 4711 FROM stack_samples WHERE run = 3"
        )
    profile = read_profile(store, Selection("llama", 3))
    assert sum(sample.ns for sample in profile.samples if sample.frames == (NO_STACK,)) == 5 * PERIOD
    assert rows(store, "SELECT sum(self_ns) FROM hot_functions WHERE run = 3") == [(5 * PERIOD,)]


# ---- who is where


def test_threads_of_a_window(store: Store) -> None:
    found = {(t.rank, t.tid): t for t in read_threads(store, Selection("llama", 1, kind="all", steps=(0, 1)))}
    assert set(found) == {(0, 1000), (0, 77), (1, 1001)}
    one = found[1, 1001]
    assert (one.stack, one.reason, one.off_ns, one.cpu_ns, one.role, one.host) == (
        FORWARD, "futex", 70 * MS, 60 * MS, "main", "node-0",
    )  # fmt: skip
    assert found[0, 1000].stack == BACKWARD
    assert found[0, 1000].share == 5 / 9
    assert found[0, 77].role == "pt_worker_#"
    assert found[0, 1000].age_ns == 0


def test_a_thread_that_was_silent_comes_with_its_last_sign_of_life(store: Store) -> None:
    found = {(t.rank, t.tid): t for t in read_threads(store, Selection("llama", 1, kind="all", last_ns=20 * MS))}
    # The window is (285, 305] ms: rank 1's main thread alone is in it.
    assert found[1, 1001].age_ns == 0
    silent = found[0, 1000]
    assert silent.stack == RECURSIVE
    assert silent.age_ns == (305 - 210) * MS + 1
    assert (silent.cpu_ns, silent.off_ns) == (0, 0)
    ended = Selection("llama", 1, kind="all", last_ns=20 * MS, ranks=(1,))
    assert {t.rank for t in read_threads(store, ended)} == {1}
    with pytest.raises(ArgusError, match="no stacks"):
        read_threads(store, Selection("llama", 1, kind="all", steps=(50, 60)))


def test_a_wait_told_in_long_pieces_is_where_its_thread_is_now(store: Store) -> None:
    """Of a job that is calm, a wait is told every 10 s."""
    lock = stack(py("worker", 3), native("pthread_cond_wait"))
    with Writer(store, source="pieces") as writer:
        store_run(writer, [0], run=5)
        store_stacks(writer, [
            *(Row(0, FORWARD, ms, count=5, last_ms=ms + 100) for ms in range(0, 20_000, 134)),
            *(Row(0, lock, ms, kind="off", count=0, ns=10_000 * MS, last_ms=ms + 10_000, reason="futex", tid=77)
              for ms in (0, 10_000)),
        ], run=5)  # fmt: skip
        assert writer.flush(), writer.last_error
    threads = {t.tid: t for t in read_threads(store, Selection("llama", 5, kind="all", last_ns=2000 * MS))}
    assert threads[1000].age_ns == threads[77].age_ns == 0
    assert (threads[77].stack, threads[77].reason) == (lock, "futex")
    assert 1900 * MS <= threads[77].off_ns <= 2000 * MS
    waits = read_profile(store, Selection("llama", 5, kind="off", from_ns=T0 + 9000 * MS, to_ns=T0 + 12_000 * MS))
    assert (waits.total_ns, waits.begin_ns, waits.end_ns) == (3000 * MS, T0 + 9000 * MS, T0 + 12_000 * MS)
    assert waits.rank_ns == 3000 * MS


def test_a_thousand_ranks(store: Store) -> None:
    hang = stack(py("main", 1), py("barrier", 5), native("pthread_cond_wait"))
    other = stack(py("main", 1), py("save", 9), native("write"))
    spin = [stack(py("main", 1), py("loop", n), native(f"f{n % 17}")) for n in range(400)]
    with Writer(store, source="many") as writer:
        store_run(writer, range(1000), run=4)
        data = [
            Row(rank, other if rank == 617 else hang, 0, kind="off", ns=900 * MS, last_ms=1000, reason="futex")
            for rank in range(1000)
        ]
        data += [
            Row(rank, spin[(rank * 7 + k) % 400], 100 * k, count=5, tid=5000 + rank, thread=f"pt_autograd_{rank % 8}")
            for rank in range(1000)
            for k in range(3)
        ]
        store_stacks(writer, data, run=4)
        assert writer.flush(), writer.last_error
    threads = read_threads(store, Selection("llama", 4, kind="all", last_ns=2000 * MS))
    assert len(threads) == 2000
    main = [(t.rank, str(t.tid), t.stack) for t in threads if t.role == "main"]
    groups = group_by_stack(main)
    assert [(group.ranks, group.odd) for group in groups] == [("0-616,618-999", False), ("617", True)]
    others = group_by_stack([(t.rank, str(t.tid), t.stack) for t in threads if t.role == "pt_autograd_#"])
    assert len(others) <= 12
    assert sum(len(group.members) for group in others) == 1000
    profile = read_profile(store, Selection("llama", 4), lines=True)
    assert profile.total_ns == 15000 * PERIOD
    assert len(profile.samples) == len({sample.frames for sample in profile.samples}) == 400
