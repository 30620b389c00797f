"""GPU operations find the calls that launched them, in whatever order records arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.model import records
from argus.model.calls import BY_SYMBOL
from argus.model.records import GPU_OP, HOST_OP, LAUNCH, HostKind
from argus.semantics.gpu import correlation
from argus.semantics.gpu.correlation import Correlator
from tests.unit.semantics.gpu.counted import calls_made

US, S = 1_000, 1_000_000_000
T = 1_000 * S
NO_OPS, NO_CALLS, NO_PROBED = np.empty(0, GPU_OP), np.empty(0, HOST_OP), np.empty(0, LAUNCH)


def ops(*rows: tuple[int, int, int], **fields: Any) -> NDArray[np.void]:
    """(correlation, start, end), times after T."""
    out = np.zeros(len(rows), GPU_OP)
    out["correlation"], out["start_ns"], out["end_ns"] = [r[0] for r in rows], [T + r[1] for r in rows], 0
    out["end_ns"] = [T + r[2] for r in rows]
    out["kind"] = records.GpuKind.KERNEL
    for name, value in fields.items():
        out[name] = value
    return out


def calls(*rows: tuple[int, int, int], tid: int | list[int] = 7, kind: HostKind = HostKind.RUNTIME) -> NDArray[np.void]:
    """(correlation, begin, end)."""
    out = np.zeros(len(rows), HOST_OP)
    out["correlation"], out["start_ns"] = [r[0] for r in rows], [T + r[1] for r in rows]
    out["end_ns"], out["tid"], out["kind"] = [T + r[2] for r in rows], tid, kind
    return out


def probed(*times: int, tid: int = 7, symbol: str = "cudaLaunchKernel") -> NDArray[np.void]:
    out = np.zeros(len(times), LAUNCH)
    out["ts_ns"], out["tid"], out["call"] = [T + t for t in times], tid, BY_SYMBOL[symbol].id
    return out


def launches_of(found: NDArray[np.void]) -> list[tuple[int, int, int]]:
    """(correlation, launch, its end) by correlation; 0: not known."""
    rows = [
        (int(op["correlation"]), *(int(op[name]) - T if op[name] else 0 for name in ("launch_ns", "launch_end_ns")))
        for op in found
    ]
    return sorted(rows)  # type: ignore[arg-type]


def test_an_operation_is_matched_with_its_call() -> None:
    c = Correlator()
    found = c.feed(ops((5, 100, 200), (6, 300, 400)), calls((6, 50, 60), (5, 10, 20)), NO_PROBED, T)
    assert launches_of(found) == [(5, 10, 20), (6, 50, 60)]
    assert found["launch_tid"].tolist() == [7, 7]
    assert found["flags"].tolist() == [records.GPU_LAUNCH_MATCHED] * 2
    assert c.match_rate == 1.0


def test_the_call_may_come_later_than_the_operation_or_long_before() -> None:
    c = Correlator()
    assert len(c.feed(ops((5, 100, 200)), NO_CALLS, NO_PROBED, T)) == 0
    assert c.waiting == 1
    assert len(c.feed(NO_OPS, calls((9, 1, 2)), NO_PROBED, T + S)) == 0
    assert launches_of(c.feed(NO_OPS, calls((5, 10, 20)), NO_PROBED, T + 2 * S)) == [(5, 10, 20)]
    assert c.waiting == 0
    # a deep queue: a minute after its call
    for k in range(60):
        c.feed(NO_OPS, calls((1000 + k, (k + 3) * S, (k + 3) * S + 5)), NO_PROBED, T + (k + 3) * S)
    assert launches_of(c.feed(ops((9, 62 * S, 62 * S + 9)), NO_CALLS, NO_PROBED, T + 63 * S)) == [(9, 1, 2)]


def test_what_finds_no_call_goes_out_after_three_seconds() -> None:
    c = Correlator()
    c.feed(ops((5, 100, 200)), NO_CALLS, NO_PROBED, T)
    c.feed(ops((6, 100, 200)), NO_CALLS, NO_PROBED, T + S)
    assert len(c.feed(NO_OPS, NO_CALLS, NO_PROBED, T + 3 * S - 1)) == 0
    assert launches_of(c.feed(NO_OPS, NO_CALLS, NO_PROBED, T + 3 * S)) == [(5, 0, 0)]
    assert launches_of(c.flush()) == [(6, 0, 0)]
    assert c.waiting == 0
    assert (c.counters["gpu_ops"], c.counters["gpu_launch_unmatched"], c.match_rate) == (2, 2, 0.0)


def test_without_calls_nothing_waits() -> None:
    c = Correlator(api=False)
    assert launches_of(c.feed(ops((5, 100, 200)), NO_CALLS, NO_PROBED, T)) == [(5, 0, 0)]


def test_no_correlation_id_is_not_waited_for() -> None:
    assert len(Correlator().feed(ops((0, 100, 200)), NO_CALLS, NO_PROBED, T)) == 1


@pytest.mark.parametrize("together", [True, False])
def test_the_outermost_call_of_an_id_wins(together: bool) -> None:
    """A driver call inside a runtime call has its id, and its record comes first."""
    driver = calls((5, 14, 18), (6, 32, 33), (6, 34, 38), kind=HostKind.DRIVER)
    runtime = calls((5, 10, 20), (6, 30, 40))
    c = Correlator()
    if together:
        found = c.feed(ops((5, 100, 200), (6, 100, 200)), np.concatenate([driver, runtime]), NO_PROBED, T)
    else:
        c.feed(NO_OPS, driver, NO_PROBED, T)
        c.feed(NO_OPS, runtime, NO_PROBED, T)
        found = c.feed(ops((5, 100, 200), (6, 100, 200)), NO_CALLS, NO_PROBED, T)
    assert launches_of(found) == [(5, 10, 20), (6, 30, 40)]


def test_all_kernels_of_a_graph_have_its_launch() -> None:
    c = Correlator()
    first = c.feed(ops((5, 100, 110), (5, 120, 130), graph=3), calls((5, 10, 20)), NO_PROBED, T)
    later = c.feed(ops((5, 40 * S, 41 * S), graph=3), NO_CALLS, NO_PROBED, T + 42 * S)
    assert launches_of(np.concatenate([first, later])) == [(5, 10, 20)] * 3


def test_what_is_no_call_matches_nothing() -> None:
    wait = calls((5, 10, 20), kind=HostKind.SYNCHRONIZATION)
    assert len(Correlator().feed(ops((5, 100, 200)), wait, NO_PROBED, T)) == 0


def test_ids_that_begin_again_mean_the_call_before_the_operation() -> None:
    c = Correlator()
    c.feed(NO_OPS, calls((5, 10, 20), (6, 30, 40)), NO_PROBED, T)
    again = calls((5, 9 * S + 10, 9 * S + 20), (4294967295, 9 * S, 9 * S + 1))
    found = c.feed(ops((5, 100, 200), (5, 9 * S + 30, 9 * S + 40), (6, 100, 110)), again, NO_PROBED, T)
    assert launches_of(found) == [(5, 10, 20), (5, 9 * S + 10, 9 * S + 20), (6, 30, 40)]
    # In one batch, and only a call that began long after the operation: no match.
    c = Correlator()
    both = calls((5, 10, 20), (5, 9 * S + 10, 9 * S + 20), (6, 9 * S, 9 * S + 5))
    found = c.feed(ops((5, 100, 200), (5, 9 * S + 30, 9 * S + 40), (6, 100, 110)), both, NO_PROBED, T)
    assert launches_of(found) == [(5, 10, 20), (5, 9 * S + 10, 9 * S + 20)]


def test_a_start_before_the_launch_is_raised_to_it_and_counted() -> None:
    c = Correlator()
    found = c.feed(ops((5, 5, 8), (6, 35, 50), (7, 90, 99)), calls((5, 10, 20), (6, 30, 40), (7, 60, 70)), NO_PROBED, T)
    found.sort(order="correlation")
    assert (found["start_ns"] - T).tolist() == [10, 35, 90]
    assert (found["end_ns"] - T).tolist() == [10, 50, 99]
    assert ((found["flags"] & records.GPU_START_CLAMPED) != 0).tolist() == [True, False, False]
    assert c.counters["gpu_start_clamped"] == 1
    # A kernel that runs before its launch has returned is as it should be: counted, not changed.
    assert c.counters["gpu_started_before_launch_returned"] == 2


def test_old_calls_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correlation, "KEEP_CALLS", 10)
    c = Correlator()
    for k in range(1, 21):
        c.feed(NO_OPS, calls((k, k * 100, k * 100 + 9)), NO_PROBED, T)
    found = c.feed(ops(*((k, 5000, 6000) for k in range(1, 21))), NO_CALLS, NO_PROBED, T)
    assert [row[0] for row in launches_of(found)] == list(range(11, 21))
    monkeypatch.setattr(correlation, "KEEP_CALLS", 10**6)
    c.feed(NO_OPS, calls((99, 200 * S, 200 * S + 5)), NO_PROBED, T + 200 * S)
    late = c.feed(ops((15, 200 * S, 201 * S), (99, 201 * S, 202 * S)), NO_CALLS, NO_PROBED, T + 202 * S)
    assert [row[0] for row in launches_of(late)] == [99]


def test_calls_that_say_they_are_young_grow_old_by_when_they_came() -> None:
    c = Correlator()
    many = np.zeros(100_000, HOST_OP)
    many["kind"], many["start_ns"], many["end_ns"] = HostKind.RUNTIME, T, T + 1
    for turn in range(3):
        many["correlation"] = np.arange(len(many)) + 1 + turn * len(many)
        c.feed(NO_OPS, many, NO_PROBED, T + turn * S)
    assert c.kept[1] == 300_000
    c.feed(NO_OPS, NO_CALLS, NO_PROBED, T + correlation.KEEP_CALLS_NS + S + 1)
    assert c.kept[1] == 100_000
    # A process that is stuck makes no newer ones: what it waits for was launched by the newest.
    for wait_s in (300, 3000):
        c.feed(NO_OPS, NO_CALLS, NO_PROBED, T + wait_s * S)
        assert c.kept[1] == sum(map(len, c._calls)) == correlation.KEEP_NEWEST
    found = c.feed(ops((300_000, 100, 9000 * S)), NO_CALLS, NO_PROBED, T + 9001 * S)
    assert launches_of(found) == [(300_000, 0, 1)]


@pytest.mark.parametrize("seed", range(10))
def test_calls_whose_times_are_right_are_kept_as_by_these(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bound by arrival and without, a second more or less."""
    random = np.random.default_rng(seed)
    monkeypatch.setattr(correlation, "KEEP_CALLS_NS", 20 * S)
    at = np.sort(random.integers(0, 100 * S, 600))
    wait = np.where((random.random(600) < 0.5) & (at < 60 * S), 23 * S, 0) + random.integers(0, 18 * S, 600)
    given = calls(*((number + 1, begin, begin + 5) for number, begin in enumerate(at.tolist())))
    late = ops(*((number + 1, begin, begin + 9) for number, begin in enumerate((at + wait).tolist())))
    found = []
    for newest in (10, 1 << 60):
        monkeypatch.setattr(correlation, "KEEP_NEWEST", newest)
        c, parts = Correlator(), []
        for second in range(130):
            now = [(times >= second * S) & (times < (second + 1) * S) for times in (at + wait, at)]
            parts.append(c.feed(late[now[0]], given[now[1]], NO_PROBED, T + (second + 1) * S))
        found.append(np.concatenate([*parts, c.flush()]))
        assert c.counters["gpu_launch_matched"] == np.sum(wait < 18 * S) < 600
    assert found[0].tobytes() == found[1].tobytes()


@pytest.mark.parametrize("seed", range(10))
def test_where_others_need_the_room_the_newest_calls_are_kept(seed: int) -> None:
    random = np.random.default_rng(seed)
    c, ids = Correlator(), np.zeros(0, np.int64)
    for turn in range(int(random.integers(1, 6))):
        fresh = np.arange(len(ids), len(ids) + int(random.integers(1, 30)))
        given = calls(*((int(number) + 1, int(number) * 100, int(number) * 100 + 9) for number in fresh))
        c.feed(ops((1 << 31, 5, 9)), given[random.permutation(len(given))], probed(turn), T + turn)
        ids = np.append(ids, fresh)
    waiting, _, launches = c.kept
    left = int(random.integers(0, len(ids) + 3))
    dropped = c.keep(0, left, 1)
    assert dropped == max(len(ids) - left, 0) + launches - 1
    assert c.kept == (waiting, min(left, len(ids)), 1)
    found = c.feed(ops(*((int(number) + 1, 10**6, 10**6 + 5) for number in ids)), NO_CALLS, NO_PROBED, T + 9)
    matched = {row[0] for row in launches_of(found) if row[2]}
    assert matched == set((ids[max(len(ids) - left, 0) :] + 1).tolist())
    assert np.sum(found["correlation"] == 1 << 31) == waiting, "they wait no longer"


@pytest.mark.parametrize("seed", range(30))
def test_what_room_takes_is_lost_only_if_an_operation_is_without_its_launch(seed: int) -> None:
    """Against a list of all calls: each operation has its launch or was counted, its call or itself, and where the
    young calls have room nothing is counted before its operation comes."""
    random = np.random.default_rng(seed)
    c, known, dropped = Correlator(), dict[int, bool](), 0
    came: dict[int, int] = {}
    for turn in range(int(random.integers(2, 30))):
        fresh = range(len(known) + 1, len(known) + 1 + int(random.integers(1, 40)))
        known |= dict.fromkeys(fresh, False)
        came |= dict.fromkeys(fresh, turn * S)
        some = [k for k in known if not known[k] and random.random() < 0.7] if random.random() < 0.8 else []
        given = calls(*((k, 100 * k, 100 * k + 9) for k in random.permutation(fresh).tolist()))
        found = c.feed(ops(*((k, 10**6, 10**6 + 5) for k in some)), given, NO_PROBED, T + turn * S)
        known |= dict.fromkeys(some, True)
        assert len(found) + c.waiting >= len(some)
        young = sum(at > turn * S - correlation.WAIT_NS for at in came.values())
        if random.random() < 0.5:
            left = int(random.integers(0, len(known) + 3))
            kept = c.kept[1]
            of_young = c.young_calls
            assert of_young <= young
            lost = c.keep(0, left, 0)
            assert c.kept[1] <= left
            assert c.kept[1] == sum(len(batch) for batch in c._calls)
            assert all(batch.matched == batch.calls["matched"].sum() and len(batch) for batch in c._calls)
            assert (lost == 0) if left >= of_young else (lost <= of_young - left)
            assert c.kept[1] == kept or kept > left
            dropped += lost
    c.feed(NO_OPS, NO_CALLS, NO_PROBED, T + 60 * S)
    before, already = c.counters["gpu_launch_unmatched"], c.without_call
    late = [k for k in known if not known[k]]
    c.feed(ops(*((k, 10**6, 10**6 + 5) for k in late)), NO_CALLS, NO_PROBED, T + 60 * S)
    c.flush()
    without = c.counters["gpu_launch_unmatched"] - before
    assert without <= dropped + c.without_call - already
    if not dropped:
        assert c.counters["gpu_launch_unmatched"] == c.without_call


def test_calls_that_wait_for_their_operations_go_after_those_that_do_not() -> None:
    """A kernel that is stuck on one stream, while a thousand a second run on others."""
    c = Correlator()
    for second in range(10):
        ids = range(1 + 1000 * second, 1 + 1000 * (second + 1))
        given = calls(*((k, 1000 * k, 1000 * k + 9) for k in ids))
        c.feed(ops(*((k, 1000 * k + 50, 1000 * k + 60) for k in ids if k != 500)), given, NO_PROBED, T + second * S)
        assert c.keep(0, c.young_calls + 10, 0) == 0
    assert c.kept[1] == 3001
    found = c.feed(ops((500, 10 * S, 11 * S), (501, 10 * S, 11 * S)), NO_CALLS, NO_PROBED, T + 20 * S)
    assert launches_of(found) == [(500, 500_000, 500_009)]
    assert launches_of(c.flush()) == [(501, 0, 0)]
    assert c.without_call == 1, "a second operation of a call that is gone, as those of a graph"
    # By when it would be gone in any case.
    c.feed(NO_OPS, NO_CALLS, NO_PROBED, T + 10 * S + correlation.KEEP_CALLS_NS)
    c.feed(ops((502, 200 * S, 201 * S)), NO_CALLS, NO_PROBED, T + 201 * S)
    c.flush()
    assert c.without_call == 1


def test_few_matched_calls_of_a_large_batch_cost_no_copy_of_it() -> None:
    """Each turn one more operation comes, of calls that came long ago."""
    c = Correlator()
    c.feed(NO_OPS, calls(*((k, 10 * k, 10 * k + 5) for k in range(1, MANY))), NO_PROBED, T)
    c.feed(NO_OPS, calls(*((k, 10 * k, 10 * k + 5) for k in range(MANY, MANY + 10))), NO_PROBED, T + 10 * S)
    (old, _), before = c._calls, c._calls[0].calls
    for k in range(1, 10):
        c.feed(ops((k, S, S + 5)), NO_CALLS, NO_PROBED, T + 11 * S)
        assert c._drop_matched(10) == []
        assert old.calls is before
    half = ops(*((k, S, S + 5) for k in range(10, MANY // 2)))
    c.feed(half, NO_CALLS, NO_PROBED, T + 11 * S)
    assert len(c._drop_matched(10)[0]) == MANY // 2 - 1


# ---- the probes' launches


def test_the_probe_s_time_of_the_same_call_is_taken() -> None:
    c = Correlator()
    c.feed(NO_OPS, NO_CALLS, probed(9, 29), T)
    found = c.feed(ops((5, 100, 200), (6, 300, 400)), calls((5, 10, 20), (6, 31, 40)), NO_PROBED, T + S)
    assert launches_of(found) == [(5, 9, 20), (6, 29, 40)]
    assert found["flags"].tolist() == [records.GPU_LAUNCH_MATCHED | records.GPU_LAUNCH_PROBED] * 2
    assert c.counters["gpu_launch_probed"] == 2


def test_a_probe_of_another_call_is_not_taken() -> None:
    c = Correlator()
    seen = np.concatenate([
        probed(11),  # inside the call before
        probed(28, tid=8),  # another thread's
        probed(28, symbol="cudaStreamSynchronize"),  # launches nothing
    ])  # fmt: skip
    far = 1000 * US
    found = c.feed(
        ops((5, 100, 200), (6, 300, 400), (7, 2 * far, 3 * far)),
        calls((5, 10, 20), (6, 30, 40), (7, far + 101 * US, far + 102 * US)),
        np.concatenate([seen, probed(far)]),  # too long before
        T,
    )
    assert launches_of(found) == [(5, 10, 20), (6, 30, 40), (7, far + 101 * US, far + 102 * US)]
    assert c.counters["gpu_launch_probed"] == 0


def test_the_call_before_may_be_of_an_earlier_batch() -> None:
    c = Correlator()
    c.feed(NO_OPS, calls((5, 10, 20)), probed(9, 15), T)
    found = c.feed(ops((6, 300, 400)), calls((6, 30, 40)), NO_PROBED, T)
    assert launches_of(found) == [(6, 30, 40)], "15 was made before call 5 had returned"


def test_copies_that_return_late_are_found_though_out_of_order() -> None:
    c = Correlator()
    c.feed(NO_OPS, NO_CALLS, probed(500), T)
    c.feed(NO_OPS, NO_CALLS, probed(9, symbol="cudaMemcpy"), T)
    found = c.feed(ops((5, 100, 200), (6, 700, 800)), calls((5, 10, 400), (6, 501, 510)), NO_PROBED, T)
    assert launches_of(found) == [(5, 9, 400), (6, 500, 510)]


def test_probes_launches_are_kept_for_a_while_only() -> None:
    c = Correlator()
    c.feed(NO_OPS, NO_CALLS, probed(9), T)
    c.feed(NO_OPS, NO_CALLS, probed(14 * S), T + 16 * S)
    found = c.feed(ops((5, 100, 200)), calls((5, 10, 20)), NO_PROBED, T + 16 * S)
    assert launches_of(found) == [(5, 10, 20)]


def test_threads_of_another_pid_namespace() -> None:
    asked = []

    def host_tids(first: Sequence[int]) -> dict[int, int]:
        asked.append(first)
        return {7: 4007, 8: 4008} if len(asked) > 1 else {7: 4007}

    c = Correlator(host_tids=host_tids)
    seen = np.concatenate([probed(9, 29, tid=4007), probed(49, 2 * S + 69, tid=4008)])
    found = c.feed(ops((5, 100, 200)), calls((5, 10, 20)), seen, T)
    assert launches_of(found) == [(5, 9, 20)]
    assert found["launch_tid"].tolist() == [4007]
    # a thread that was not there then: looked up again, though not at once
    assert launches_of(c.feed(ops((6, 100, 200)), calls((6, 50, 60), tid=8), NO_PROBED, T)) == [(6, 50, 60)]
    later = c.feed(ops((7, 3 * S, 4 * S)), calls((7, 2 * S + 70, 2 * S + 80), tid=8), NO_PROBED, T + 2 * S)
    assert launches_of(later) == [(7, 2 * S + 69, 2 * S + 80)]
    assert later["launch_tid"].tolist() == [4008]
    assert asked == [[4007, 4008]] * 2, "those of launches first"


def test_threads_that_may_not_be_looked_up_now_are_later() -> None:
    answers = iter((None, {7: 4007}))
    c = Correlator(host_tids=lambda first: next(answers))
    assert launches_of(c.feed(NO_OPS, calls((5, 10, 20)), probed(9, 2 * S + 9, tid=4007), T)) == []
    found = c.feed(ops((6, 3 * S, 4 * S)), calls((6, 2 * S + 10, 2 * S + 20)), NO_PROBED, T + 2 * S)
    assert found["launch_tid"].tolist() == [4007]


def test_a_namespace_that_explains_nothing_is_not_believed() -> None:
    c = Correlator(host_tids=lambda first: {7: 9})
    found = c.feed(ops((5, 100, 200)), calls((5, 10, 20)), probed(9, tid=8), T)
    assert found["launch_tid"].tolist() == [7]


# ---- at large


@pytest.mark.thorough(first=2)
@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_lost_or_mixed_up_in_any_order_of_arrival(seed: int) -> None:
    """20,000 calls of 4 threads, 30,000 operations, in batches that are seconds apart: against the truth."""
    rng = np.random.default_rng(seed)
    n, threads = 20_000, 4
    tid = rng.integers(0, threads, n) + 7
    begin = np.cumsum(rng.integers(20 * US, 2000 * US, n))
    begin += T
    ids = (np.arange(n, dtype=np.uint64) + 2**32 - n // 2).astype(np.uint32)  # wraps round
    outer, inner = np.zeros(n, HOST_OP), np.zeros(n, HOST_OP)
    for c, (early, late) in ((outer, (0, 9 * US)), (inner, (2 * US, 7 * US))):
        c["correlation"], c["tid"], c["start_ns"], c["end_ns"] = ids, tid, begin + early, begin + late
    outer["kind"], inner["kind"] = HostKind.RUNTIME, HostKind.DRIVER
    has_inner = rng.random(n) < 0.7
    host = np.concatenate([outer, inner[has_inner]])
    delay = (tid % 3) * S // 2  # each thread fills buffers of its own
    seen = np.zeros(n, LAUNCH)
    seen["ts_ns"], seen["tid"], seen["call"] = begin - 300, tid, BY_SYMBOL["cudaLaunchKernel"].id
    has_probe = rng.random(n) < 0.8
    seen = seen[has_probe]
    which = np.sort(np.concatenate([np.arange(n), rng.integers(0, n, n // 2)]))
    gpu = np.zeros(len(which), GPU_OP)
    gpu["correlation"], gpu["name"] = ids[which], which
    gpu["start_ns"] = begin[which] + rng.integers(3 * US, 5 * S, len(which))
    gpu["end_ns"] = gpu["start_ns"] + 1000
    arrival = [
        gpu["end_ns"].astype(np.int64) + rng.integers(0, 2 * S, len(gpu)),
        np.concatenate([outer["end_ns"], outer["end_ns"][has_inner]]).astype(np.int64)
        + np.concatenate([delay, delay[has_inner]]),
        seen["ts_ns"].astype(np.int64),
    ]
    c, found = Correlator(), []
    for now in range(T, int(arrival[0].max()) + S, S // 4):
        part = [
            rows[(t > now - S // 4) & (t <= now)] for rows, t in zip((gpu, host, seen), arrival, strict=True)
        ]  # fmt: skip
        found.append(c.feed(part[0], part[1], part[2], now))
    found.append(c.flush())
    out = np.concatenate(found)
    out.sort(order=["name", "start_ns"])
    assert out["name"].tolist() == which.tolist()
    assert c.match_rate == 1.0
    assert out["launch_tid"].tolist() == tid[which].tolist()
    expected = np.where(has_probe, begin - 300, begin)[which]
    assert (out["launch_ns"].astype(np.int64) == expected).all()
    assert (((out["flags"] & records.GPU_LAUNCH_PROBED) != 0) == has_probe[which]).all()


# ---- what a process's own memory says may be anything: no pass for each thread, id or call

MANY, FEW = 20_000, 2_000


def some_calls(random: np.random.Generator, number: int) -> NDArray[np.void]:
    """Calls of few ids: those of one id lie inside one another, or apart."""
    out = np.zeros(number, correlation._CALL)

    def fill(which: int, rows: range, begin: int, end: int) -> None:
        while rows and begin < end:
            first, last = sorted(random.integers(begin, end + 1, 2).tolist())
            inner = int(random.integers(0, len(rows)))
            out["begin_ns"][rows[0]], out["end_ns"][rows[0]] = first, last
            out["correlation"][rows[0]] = which
            fill(which, rows[1 : 1 + inner], first, last)
            rows, begin = rows[1 + inner :], last

    for which, rows in enumerate(np.array_split(np.arange(number), 4)):
        fill(which, range(rows[0], rows[-1] + 1), 0, 200)
    out["tid"] = np.arange(number)
    return random.permutation(out[out["end_ns"] > 0])


def outermost_one_by_one(given: NDArray[np.void]) -> NDArray[np.void]:
    """Takes away those that begin before the one ahead of them has ended, until there is none."""
    given = given[np.lexsort((-given["end_ns"], given["begin_ns"], given["correlation"]))]
    while True:
        same = given["correlation"][1:] == given["correlation"][:-1]
        inside = same & (given["begin_ns"][1:] < given["end_ns"][:-1])
        if not inside.any():
            return given
        given = given[np.concatenate([[True], ~inside])]


@pytest.mark.parametrize("seed", range(40))
def test_outermost_calls_are_those_that_taking_away_one_by_one_leaves(seed: int) -> None:
    given = some_calls(np.random.default_rng(seed), 40)
    assert correlation._outermost(given).tolist() == outermost_one_by_one(given).tolist()


@pytest.mark.parametrize("seed", range(40))
def test_an_operation_is_matched_with_the_last_call_of_its_id_before_it(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(correlation, "SKEW_NS", 3)
    random = np.random.default_rng(seed)
    known = correlation._outermost(some_calls(random, 40))
    given = np.zeros(60, GPU_OP)
    given["correlation"] = random.integers(0, 6, 60)
    given["start_ns"] = random.integers(0, 250, 60)
    expected = []
    for op in given:
        places = np.flatnonzero(
            (known["correlation"] == op["correlation"]) & (known["begin_ns"] <= op["start_ns"].astype(np.int64) + 3)
        )
        expected.append(tuple(known[name][places[-1]] if len(places) else 0 for name in ("begin_ns", "end_ns", "tid")))
    correlation._match(given, known)
    assert given[["launch_ns", "launch_end_ns", "launch_tid"]].tolist() == expected


def probes_one_by_one(c: Correlator, given: NDArray[np.void]) -> None:
    """What ``_find_probed`` does, a thread at a time."""
    after = np.zeros(len(given), np.int64)
    for tid in np.unique(given["tid"]).tolist():
        chosen = np.flatnonzero(given["tid"] == tid)
        last_end = c._last_end.get(tid, 0)
        for place in chosen[np.argsort(given["begin_ns"][chosen], kind="stable")].tolist():
            after[place] = last_end if last_end <= given["begin_ns"][place] else 0
            last_end = max(last_end, int(given["end_ns"][place]))
        c._last_end[tid] = last_end
    for place, call in enumerate(given):
        tid = c._tids.get(int(call["tid"]), int(call["tid"]))
        ts = c._probe_ts[(c._probe_tid == tid) & (c._probe_ts <= call["begin_ns"])]
        reach = max(int(call["begin_ns"]) - correlation.PROBE_REACH_NS, int(after[place]))
        if len(ts) and ts[-1] > reach:
            call["begin_ns"], call["tid"], call["probed"] = ts[-1], tid, True


@pytest.mark.parametrize("seed", range(40))
def test_calls_get_the_probes_that_a_loop_over_threads_finds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correlation, "PROBE_REACH_NS", 12)
    random = np.random.default_rng(seed)
    quick, slow = Correlator(), Correlator()
    for c in (quick, slow):
        c._tids = {1: 11, 2: 12, 3: 3}
    for turn in range(3):
        given = np.zeros(30, correlation._CALL)
        given["tid"] = random.integers(1, 6, 30)
        given["begin_ns"] = 100 * turn + random.integers(1, 150, 30)
        given["end_ns"] = given["begin_ns"] + random.integers(0, 20, 30)
        ts, tids = np.sort(random.integers(0, 400, 50)), random.choice([3, 4, 5, 11, 12], 50).astype(np.uint32)
        for c in (quick, slow):
            c._probe_ts, c._probe_tid = ts, tids
        expected = given.copy()
        probes_one_by_one(slow, expected)
        quick._find_probed(given, 0)
        assert given.tolist() == expected.tolist()
        assert quick._last_end == slow._last_end


def test_threads_are_renumbered_as_one_by_one() -> None:
    c = Correlator()
    assert c.on_host(np.array([3, 1], np.uint32)).tolist() == [3, 1]
    c._tids = {1: 5, 2: 6}
    assert c.on_host(np.array([2, 3, 1, 2], np.uint32)).tolist() == [6, 3, 5, 6]
    assert c.on_host(np.empty(0, np.uint32)).tolist() == []


def test_calls_one_after_another_in_one_of_their_id_take_no_pass_each() -> None:
    given = np.zeros(MANY, correlation._CALL)
    given["correlation"], given["begin_ns"] = 1, 10 * np.arange(MANY)
    given["end_ns"] = given["begin_ns"] + 5
    given["end_ns"][0] = 1 << 50
    assert calls_made(lambda: correlation._outermost(given)) < FEW
    assert correlation._outermost(given).tolist() == given[:1].tolist()


def test_calls_of_an_id_that_are_all_later_take_no_pass_each() -> None:
    c = Correlator()
    late = calls(*((1, 10 * S + 10 * k, 10 * S + 10 * k + 5) for k in range(MANY)))
    given = ops(*[(1, 100, 200)] * MANY)
    assert calls_made(lambda: c.feed(given, late, NO_PROBED, T)) < FEW
    assert c.waiting == MANY


def test_a_thread_for_each_call_takes_no_pass_each() -> None:
    """With the probes' launches of as many threads, and in a PID namespace, where threads have other numbers."""
    c = Correlator()
    c._tids = {tid: tid + MANY for tid in range(1, 100)}
    tids = np.arange(1, MANY + 1)
    launches = probed(*(10 * tids + 3).tolist())
    launches["tid"] = c.on_host(tids.astype(np.uint32))
    given = calls(*((tid, 10 * tid + 4, 10 * tid + 8) for tid in tids.tolist()), tid=tids.tolist())
    assert calls_made(lambda: c.feed(ops((1, S, S + 5)), given, launches, T)) < FEW
    assert len(c._last_end) <= correlation.KEEP_THREADS
    found = c.feed(ops(*((tid, S, S + 5) for tid in tids.tolist())), NO_CALLS, NO_PROBED, T)
    assert found["launch_tid"].tolist() == launches["tid"].tolist()
    assert c.counters["gpu_launch_probed"] == MANY + 1


def test_a_number_for_each_thread_takes_no_pass_each() -> None:
    c = Correlator()
    c._tids = {1: 5, 2: 6}
    tids = np.arange(MANY, dtype=np.uint32)
    assert calls_made(lambda: c.on_host(tids)) < FEW
    assert c.on_host(tids)[:4].tolist() == [0, 5, 6, 3]


@pytest.mark.parametrize("seed", range(20))
def test_batches_of_calls_that_are_put_together_match_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correlation, "SKEW_NS", 3)
    random = np.random.default_rng(seed)
    host = calls(*some_calls(random, 60)[["correlation", "begin_ns", "end_ns"]].tolist())
    given = ops(*((int(random.integers(0, 5)), at, at + 5) for at in random.integers(0, 250, 60).tolist()))
    turns = [np.flatnonzero(random.integers(0, 20, size) == turn) for size in (len(host), 60) for turn in range(20)]
    found = []
    for most in (2, 1000):
        monkeypatch.setattr(correlation, "KEEP_BATCHES", most)
        c = Correlator()
        parts = [c.feed(given[turns[20 + turn]], host[turns[turn]], NO_PROBED, T) for turn in range(20)]
        assert len(c._calls) <= most
        assert c._calls_kept == sum(map(len, c._calls))
        found.append(np.concatenate([*parts, c.flush()]))
    for part in found:
        part.sort(order=["correlation", "start_ns", "launch_ns"])
    # Of two that began at once the outer one is taken for certain only where they are in one batch.
    columns = ["correlation", "start_ns", "launch_ns"]
    assert found[0][columns].tolist() == found[1][columns].tolist()


def test_calls_that_never_grow_old_are_kept_in_few_batches() -> None:
    c = Correlator()
    for k in range(2 * correlation.KEEP_BATCHES):
        c.feed(NO_OPS, calls((1, 100 * k, 100 * k + 5), (1 << 31, 100 * k, 100 * k + 5)), NO_PROBED, T)
    assert len(c._calls) == correlation.KEEP_BATCHES
    found = c.feed(ops((1, 5050, 5060), (1 << 31, 5050, 5060)), NO_CALLS, NO_PROBED, T)
    # the last one before the operation, or within SKEW_NS after it
    assert launches_of(found) == [(1, 25_500, 25_505), (1 << 31, 25_500, 25_505)]
