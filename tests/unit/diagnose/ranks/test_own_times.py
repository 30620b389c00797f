"""Which rank holds up the others, by timers that contain the wait for them or do not."""

from __future__ import annotations

import numpy as np
import pytest

from argus.diagnose.case import Logged
from argus.diagnose.ranks import phase_times
from argus.diagnose.ranks.own_times import compare, kind_of, waiting_phases
from argus.diagnose.suspect import Suspect
from tests.builders.logged_job import LAYOUTS, Fault, Layout, Log, judge_rows, make, rows

CALLED_WAITING = {"communication", "waiting", "allreduce", "barrier_wait", "grad_sync"}
HOST_KINDS = ("data_loading", "gc_pause", "kernel_issue_stall")


def judged(log: Log, threshold: float = 0.05) -> tuple[list[Suspect], Logged]:
    times, phases = rows(log)
    return judge_rows(times, phases, float(np.median(log.step[:, -20:])) * 1e6, threshold)


@pytest.mark.parametrize("name", LAYOUTS)
def test_timers_that_contain_the_wait_are_measured(name: str) -> None:
    layout = LAYOUTS[name]
    found = waiting_phases(phase_times.read_timers(*rows(make(layout, seed=1))))
    waits = {each or "other" for each in layout.waits}
    assert waits <= set(found)
    # Besides those only what is called so.
    assert set(found) - waits <= CALLED_WAITING


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("size", "shape"), [(1.0, "step"), (0.1, "step"), (0.3, "ramp"), (0.2, "often")])
def test_the_rank_that_waits_least_is_named_with_its_side(name: str, size: float, shape: str) -> None:
    layout = LAYOUTS[name]
    for number, where in enumerate(sorted(set(layout.own) - set(layout.waits) - CALLED_WAITING)):
        log = make(layout, ranks=8, steps=150, faults=(Fault(where, 5, size, shape=shape),), seed=10 * number + 3)
        (one,) = judged(log)[0]
        assert one.ranks == [5], (where, one)
        assert (one.kind in HOST_KINDS) == (kind_of(where or "other") in HOST_KINDS), (where, one)
        assert one.phase == (where or "other")
        if shape == "step":
            assert abs(one.since - 49) <= 5
            which, _, text = one.evidence[0]["text"].partition(", which ")
            assert "waits least" in which
            several = text.startswith("contain the wait for other ranks, take ")
            assert several != text.startswith("contains the wait for other ranks, takes ")
            assert several == (" and " in which)


def with_noise_for_all(common: float, seed: int, *late: tuple[int, int, int]) -> Log:
    """Eight ranks of 300 steps of 68 ms, whose computing varies by a share for all at once and by half of it for each;
    their loaders hardly vary, and they wait in communication. ``late``: ranks that compute for 30 ms longer from a step
    to another one."""
    rng = np.random.default_rng(seed)
    compute = 60 * (1 + common * rng.standard_normal(300)) * (1 + common / 2 * rng.standard_normal((8, 300)))
    for rank, first, last in late:
        compute[rank, first:last] += 30
    data = 2 * (1 + 0.1 * rng.standard_normal((8, 300)))
    longest = (compute + data).max(axis=0)
    communication = longest - compute - data + 3 * (1 + 0.02 * rng.standard_normal(300))
    step = compute + data + communication + 5
    return Log(step, {"data_loading": data, "compute": compute, "communication": communication})


@pytest.mark.parametrize("seed", range(4))
def test_noise_that_all_ranks_share_makes_no_timer_one_that_contains_waiting(seed: int) -> None:
    """Batches of other lengths for all at once: computing is longer whenever steps are, by its own."""
    for late, expected in ((((4, 150, 300),), [4]), ((), []), (((4, 0, 300),), [4])):
        log = with_noise_for_all(0.05, seed, *late)
        assert waiting_phases(phase_times.read_timers(*rows(log))) == ("communication",)
        found = judged(log)[0]
        assert [(one.kind, one.ranks) for one in found] == [("compute_straggler", expected)] * bool(expected)


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_that_are_alike_are_not_blamed(name: str) -> None:
    layout = LAYOUTS[name]
    for seed in range(4):
        assert judged(make(layout, steps=150, spikes=0.01 * seed, seed=seed))[0] == []
    for where in layout.own:
        everybody = make(layout, ranks=8, steps=150, faults=(Fault(where, None, 0.4),), seed=7)
        assert judged(everybody)[0] == [], where
    # A delay inside the timer that the others wait in: all timers are alike.
    (inside, *_) = layout.waits
    hidden = make(layout, ranks=8, steps=150, faults=(Fault(inside, 2, 0.4),), seed=8)
    assert judged(hidden)[0] == []


@pytest.mark.parametrize("shape", ["half", "often"])
def test_collections_of_one_rank_are_collections_though_not_in_every_step(shape: str) -> None:
    layout = Layout({"data_loading": 0.03, "compute": 0.86, "gc": 0.001, "communication": 0.1}, {"compute": 1.0})
    for seed in range(4, 8):
        (one,) = judged(make(layout, ranks=4, spikes=0.0, faults=(Fault("gc", 2, 0.4, shape=shape),), seed=seed))[0]
        assert (one.kind, one.ranks, one.phase) == ("gc_pause", [2], "gc"), (seed, one)


def test_a_rank_with_the_longest_computation_is_not_the_slow_one() -> None:
    log = make(LAYOUTS["wait inside compute"], faults=(Fault("data_loading", 3, 0.5),), seed=2)
    # Taken at its word, the timer says that everybody but rank 3 computes slowly.
    longest = np.argmax(np.median(log.phases["compute"][:, 150:], axis=1))
    assert longest != 3
    (one,) = judged(log)[0]
    assert (one.kind, one.ranks, one.phase) == ("data_loading", [3], "data_loading")
    assert one.slowdown == pytest.approx(1.5, abs=0.08)


def test_spikes_of_one_rank_are_jitter() -> None:
    log = make(LAYOUTS["wait inside compute"], spikes=0.0, faults=(Fault("", 4, 3.0, shape="spikes"),), seed=4)
    (one,) = judged(log)[0]
    assert (one.kind, one.ranks) == ("jitter", [4])
    # Of all ranks alike they are nobody's.
    shared = make(LAYOUTS["wait inside compute"], spikes=0.0, faults=(Fault("", None, 3.0, shape="spikes"),), seed=4)
    assert judged(shared)[0] == []


def spiked(every: int, more: float, *, spikes: float = 0.03, rank: int | None = 5, seed: int = 4) -> Log:
    """Ranks are late by up to a fifth of a step by turns, and one of them, or each, by ``more`` ms in one of so many
    steps."""
    log = make(LAYOUTS["wait inside compute"], spikes=spikes, seed=seed)
    long = np.where(np.arange(300) % every == 13, more, 0.0)
    log.step[:] += long
    late = np.ones(16, np.bool_) if rank is None else np.arange(16) == rank
    log.phases["data_loading"][late] += long
    log.phases["compute"][~late] += long
    return log


@pytest.mark.parametrize(("every", "more"), [(50, 400.0), (40, 400.0), (30, 250.0), (20, 130.0)])
@pytest.mark.parametrize("seed", range(3))
def test_short_spikes_by_turns_do_not_hide_long_ones_of_one_rank(every: int, more: float, seed: int) -> None:
    (one,) = judged(spiked(every, more, seed=seed))[0]
    assert (one.kind, one.ranks, one.phase) == ("jitter", [5], "data_loading")
    assert one.confidence > 0.9


def test_the_rank_that_alone_is_late_in_a_step_is_known() -> None:
    leads = judged(spiked(20, 60.0, spikes=0.0))[1].leads
    assert leads is not None
    assert sorted(leads) == list(range(100, 300))
    late = [(step, rank) for step, (rank, lead) in leads.items() if lead >= 50e6]
    assert late == [(step, 5) for step in range(113, 300, 20)]
    shared = judged(spiked(20, 60.0, spikes=0.0, rank=None))[1].leads
    assert shared is not None
    assert max(lead for _, lead in shared.values()) < 30e6


@pytest.mark.thorough(first=4)
@pytest.mark.parametrize("seed", range(40))
def test_noise_names_no_rank(seed: int) -> None:
    layout = LAYOUTS[list(LAYOUTS)[seed % len(LAYOUTS)]]
    noise, spikes = 0.004 * (1, 4, 7)[seed % 3], 0.01 * (seed % 4)
    assert judged(make(layout, noise=noise, spikes=spikes, seed=1000 + seed))[0] == []


@pytest.mark.filterwarnings("error")
def test_a_rank_that_is_not_logged_to_the_end_is_compared_without_a_warning() -> None:
    log = make(LAYOUTS["wait inside compute"], ranks=8, faults=(Fault("data_loading", 3, 0.5),), seed=2)
    log.step[3, 200:] = np.nan
    (one,) = judged(log)[0]
    assert (one.ranks, one.since) == ([3], 99)


@pytest.mark.parametrize("seed", range(4))
def test_long_steps_cost_their_part_of_an_average_step(seed: int) -> None:
    """In three of ten steps a rank takes two more: a typical step is none of them, and the average one 1.6 times as
    long."""
    log = make(LAYOUTS["wait timed"], ranks=8, spikes=0.0, seed=seed)
    long = np.where(np.random.default_rng(seed).random(300) < 0.3, 160.0, 0.0)
    long[:30] = 0.0
    log.phases["fetch_batch"][3] += long
    log.phases["barrier_wait"][np.arange(8) != 3] += long
    log.step[:] += long
    (one,) = judged(log)[0]
    assert (one.kind, one.ranks) == ("jitter", [3])
    assert one.slowdown == pytest.approx(1 + float(np.mean(long[30:])) / 80, rel=0.1)


@pytest.mark.parametrize("seed", range(4))
def test_a_change_in_few_steps_is_one(seed: int) -> None:
    """14 steps before and 14 after: the rank sum of a full order is 4.5 standard errors."""
    log = make(LAYOUTS["wait timed"], ranks=8, steps=28, spikes=0.0, seed=seed,
               faults=(Fault("fwd_bwd", 5, 0.3, since=0.5),))  # fmt: skip
    (one,) = judged(log)[0]
    assert (one.ranks, one.since) == ([5], 14)


def test_a_rank_that_is_slow_from_the_first_step_is_named() -> None:
    log = make(LAYOUTS["wait inside backward"], faults=(Fault("forward", 1, 0.3, since=0.0),), seed=5)
    (one,) = judged(log)[0]
    assert (one.ranks, one.since) == ([1], 0)
    assert "a constant difference" in one.evidence[2]["text"]


def varying(seed: int, ranks: int, steps: int, noise: float = 0.1, slower: float = 1.0, longer_ms: float = 0.0) -> Log:
    """Batches of other lengths on each rank; rank 0 is slower all along, or longer in the newer half."""
    rng = np.random.default_rng(seed)
    compute = 60 * np.exp(noise * rng.standard_normal((ranks, steps)))
    compute[0] *= slower
    compute[0, steps // 2 :] += longer_ms
    data = 2 * (1 + 0.2 * rng.standard_normal((ranks, steps)))
    communication = (compute + data).max(axis=0) - compute - data + 3
    return Log(
        compute + data + communication + 3, {"data_loading": data, "compute": compute, "communication": communication}
    )


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_work_that_varies_makes_no_rank_a_slow_one(ranks: int) -> None:
    """In few steps one of them has more of the long ones by chance."""
    for slower, expected in ((1.0, 0), (1.3, 30)):
        named = 0
        for seed in range(40):
            found = judged(varying(seed, ranks, 30, slower=slower))[0]
            named += [one.ranks for one in found] == [[0]] if expected else bool(found)
        assert named >= expected if expected else named <= 1


def test_a_rank_that_recovered_is_mentioned_with_steps_and_cost() -> None:
    log = make(LAYOUTS["wait timed"], faults=(Fault("fetch_batch", 6, 1.4, since=0.4, until=0.43),), spikes=0.0, seed=6)
    found = judged(log)
    assert found[0] == []
    assert "rank 6 was slow in steps 120 to 128 (a step of up to 2." in found[1].note
    assert "which cost the others" in found[1].note


def test_a_rank_that_was_slow_for_longer_than_it_has_been_well_is_mentioned() -> None:
    log = make(LAYOUTS["wait timed"], faults=(Fault("fetch_batch", 6, 0.4, since=0.0, until=0.55),), spikes=0.0, seed=6)
    found = judged(log)
    assert found[0] == []
    assert "rank 6 was slow in steps 0 to 164 (a step of up to 1." in found[1].note


def chained(barriers: tuple[str, ...], ranks: int, seed: int, where: str = "", slow: int = 1) -> Log:
    """A loop of 80 steps whose timers follow one another; ranks leave those of ``barriers`` together, 5 ms after the
    last one has come there. From step 30 on rank ``slow`` takes 25 ms longer in ``where``."""
    rng = np.random.default_rng(seed)
    usual = {"data_loading": 2.0, "forward": 30.0, "backward": 60.0, "optimizer": 8.0, "logging": 0.5}
    noise = {"data_loading": 0.25, "forward": 0.03, "backward": 0.03, "optimizer": 0.05, "logging": 0.2}
    now, began = np.zeros(ranks), np.zeros(ranks)
    step = np.zeros((ranks, 80))
    phases = {name: np.zeros((ranks, 80)) for name in usual}
    for number in range(80):
        for name, took in usual.items():
            start = now
            now = now + took * np.maximum(0.5, 1 + noise[name] * rng.standard_normal(ranks))
            now[slow] += 25.0 * (name == where and number >= 30)
            if name in barriers:
                now = np.full(ranks, now.max() + 5 * (1 + 0.01 * rng.standard_normal()))
            phases[name][:, number] = now - start
        step[:, number], began = now - began, now
    return Log(step, phases)


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_timer_that_ranks_enter_and_leave_together_is_equal_on_all(ranks: int) -> None:
    """What one of them is slower by inside, all have: their forward passes end together, and then backward does."""
    log = chained(("forward", "backward"), ranks, seed=2, where="backward")
    assert judged(log)[1].equal == ("backward",)
    assert judged(chained(("backward",), ranks, seed=2, where="backward"))[1].equal == ()


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize(
    "barriers",
    [("logging",), ("backward", "logging"), ("data_loading", "backward"), ("data_loading",), ("forward",)],
    ids=" and ".join,
)
def test_the_wait_may_be_in_any_timer(barriers: tuple[str, ...], ranks: int) -> None:
    """A loss is averaged while it is logged, a batch is broadcast where it is loaded: what a rank is slower by after
    the last wait of a step, others wait for in the next one."""
    for seed in range(3):
        (one,) = judged(chained(barriers, ranks, seed, "optimizer"))[0]
        assert (one.ranks, one.phase) == ([1], "optimizer")
        assert abs(one.since - 30) <= 5
        assert judged(chained(barriers, ranks, seed))[0] == []


@pytest.mark.parametrize(("ranks", "where"), [(2, "logging"), (8, "logging"), (2, "data_loading"), (8, "data_loading")])
def test_a_hosts_own_time_is_no_wait(ranks: int, where: str) -> None:
    for seed in range(3):
        (one,) = judged(chained(("backward",), ranks, seed, where))[0]
        assert (one.ranks, one.phase) == ([1], where)


@pytest.mark.parametrize(
    ("name", "steps", "where", "rank", "size", "shape", "seed"),
    [
        ("wait in two timers", 60, "load", 1, 0.18, "step", 135877048),
        ("wait in two timers", 300, "load", 1, 0.81, "often", 996862693),
        ("wait inside backward", 300, "dataloader", 0, 0.6, "step", 214963804),
    ],
)
def test_a_loader_of_two_ranks_is_no_wait(
    name: str, steps: int, where: str, rank: int, size: float, shape: str, seed: int
) -> None:
    """Each of two ranks is what the other is not: timers that move together, or hardly, show nothing."""
    log = make(LAYOUTS[name], ranks=2, steps=steps, faults=(Fault(where, rank, size, shape=shape),), seed=seed)
    (one,) = judged(log)[0]
    assert (one.ranks, one.phase) == ([rank], where)


def test_checkpoints_of_one_rank_are_no_wait() -> None:
    """The other rank waits for them, and has none itself."""
    log = chained(("backward",), 2, 0)
    late = np.zeros((2, 80))
    late[0, 3::8] = 200.0
    phases = {**log.phases, "checkpoint": late, "backward": log.phases["backward"] + late[::-1]}
    timers = phase_times.read_timers(*rows(Log(log.step + late.max(axis=0), phases)))
    assert waiting_phases(timers) == ("backward",)


@pytest.mark.parametrize("noise", [0.02, 0.4])
def test_where_neither_timer_is_sure_to_contain_the_wait_nobody_is_named(noise: float) -> None:
    """Two timers between two waits, that vary alike on the last to come: either rank may wait for the other."""
    rng = np.random.default_rng(5)
    log = chained(("backward",), 2, 0)
    own = 8 + 0.4 * rng.standard_normal((2, 80)) + np.array([[0.0], [25.0]])
    ends = own.max(axis=0) + noise * rng.standard_normal(80)
    phases = {**log.phases, "optimizer": own, "logging": ends - own + 1}
    step = log.step - log.phases["optimizer"] - log.phases["logging"] + phases["optimizer"] + phases["logging"]
    assert [one.ranks for one in judged(Log(step, phases))[0]] == ([[1]] if noise < 0.1 else [])


@pytest.mark.parametrize(("where", "said"), [("forward", True), ("dataloader", False)])
def test_a_cost_is_the_least_where_a_timer_of_computing_contains_the_wait(where: str, said: bool) -> None:
    (one,) = judged(make(LAYOUTS["wait inside backward"], ranks=8, faults=(Fault(where, 5, 0.4),), seed=3))[0]
    least = [each["text"] for each in one.evidence if "computes longer inside does not show" in each["text"]]
    assert [text.partition(":")[0] for text in least] == ["backward contains the wait"] * said


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("name", ["wait inside backward", "wait timed"])
def test_a_slow_half_is_mentioned(name: str, ranks: int) -> None:
    """It is no straggler: there may be two kinds of machines. What it costs is said all the same."""
    where = {"wait inside backward": "forward", "wait timed": "fwd_bwd"}[name]
    slow = tuple(Fault(where, rank, 0.3, since=0.0) for rank in range(ranks // 2, ranks))
    found = judged(make(LAYOUTS[name], ranks=ranks, steps=60, faults=slow, spikes=0.0, seed=7))
    assert found[0] == []
    names = ", ".join(map(str, range(ranks // 2, ranks)))
    assert f"ranks differ by a constant, from the first step to the last: ranks {names} need " in found[1].note
    assert f" in {where.replace('_', ' ')}, the others " in found[1].note
    assert "if all should be alike, that costs 2" in found[1].note, "about 24 of 104 ms"
    assert judged(make(LAYOUTS[name], ranks=ranks, steps=60, spikes=0.0, seed=7))[1].note == ""


def test_a_half_that_becomes_slow_is_a_finding() -> None:
    slow = tuple(Fault("forward", rank, 0.3, since=0.5) for rank in range(4, 8))
    (one,) = judged(make(LAYOUTS["wait inside backward"], ranks=8, steps=120, faults=slow, spikes=0.0, seed=7))[0]
    assert one.ranks == [4, 5, 6, 7]
    assert abs(one.since - 60) <= 5


def test_episodes_are_no_single_long_steps() -> None:
    found = judged(with_noise_for_all(0.01, 1, (2, 40, 80), (5, 150, 200)))
    assert found[0] == []
    assert found[1].note.count("and no longer is") == 2


def test_two_slow_ranks_are_both_named() -> None:
    faults = (Fault("data", 2, 1.0), Fault("forward", 9, 0.5))
    found = judged(make(LAYOUTS["wait not timed"], faults=faults, seed=7))[0]
    assert sorted(rank for one in found for rank in one.ranks) == [2, 9]


@pytest.mark.parametrize("since", [0.0, 0.4])
def test_ranks_that_are_slow_for_different_reasons_are_two_findings(since: float) -> None:
    faults = (Fault("dataloader", 5, 0.3, since=since), Fault("forward", 1, 0.28, since=since))
    found = judged(make(LAYOUTS["wait inside backward"], ranks=8, steps=60, faults=faults, spikes=0.0, seed=2))[0]
    assert {(one.kind, *one.ranks): one.phase for one in found} == {
        ("data_loading", 5): "dataloader", ("compute_straggler", 1): "forward",
    }  # fmt: skip
    because = {one.ranks[0]: one.evidence[1]["text"] for one in found}
    assert because[5].startswith("it spends 27.")
    assert "in dataloader, the others 2." in because[5]
    assert because[1].startswith("it spends 4")
    assert "in forward, the others 24." in because[1]
    # Together they cost what the second slowest rank does; the slower one has the larger part.
    cost = {one.ranks[0]: one.lost_ns for one in found}
    assert cost[5] > cost[1]
    assert cost[5] + cost[1] == pytest.approx(0.3 * 80e6, rel=0.1)
    assert all("a part: they wait for rank" in one.evidence[2]["text"] for one in found)


def test_ranks_that_are_slow_for_the_same_reason_are_one_finding() -> None:
    faults = tuple(Fault("forward", rank, size, since=0.4) for rank, size in ((1, 0.28), (5, 0.3)))
    (one,) = judged(make(LAYOUTS["wait inside backward"], ranks=8, steps=60, faults=faults, spikes=0.0, seed=2))[0]
    assert (one.kind, one.ranks, one.phase) == ("compute_straggler", [1, 5], "forward")
    assert one.evidence[1]["text"].startswith("they spend 47.")
    assert "one of them was last in 100% of the steps, and they need" in one.evidence[2]["text"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_few_ranks_show_as_much(ranks: int) -> None:
    layout = LAYOUTS["wait inside compute"]
    assert judged(make(layout, ranks=ranks, seed=9))[0] == []
    (one,) = judged(make(layout, ranks=ranks, faults=(Fault("", 1, 0.5),), seed=9))[0]
    assert one.ranks == [1]


def test_what_is_too_small_is_reported() -> None:
    layout = LAYOUTS["wait inside compute"]
    text = judged(make(layout, noise=0.002, spikes=0.0, seed=1))[1].least
    assert "a rank that needs less than 1.59 ms (2.0% of a step) more than it did" in text
    noisy = phase_times.read_timers(*rows(make(layout, drift=0.05, seed=1)))
    assert compare(noisy, 0.05).least_ns > 2e6


@pytest.mark.thorough(first=2)
@pytest.mark.parametrize(("ranks", "steps", "noise"), [(2, 40, 0.05), (8, 40, 0.05), (8, 100, 0.02), (16, 200, 0.1)])
def test_what_is_not_too_small_is_found(ranks: int, steps: int, noise: float) -> None:
    """What a healthy log could hide is no more than that: nine of ten such changes are found."""
    small = compare(phase_times.read_timers(*rows(varying(1, ranks, steps, noise))), 0.05).least_ns
    assert small < 25e6, "nor is the bound beyond reach"
    found = 0
    for seed in range(30):
        log = varying(100 + seed, ranks, steps, noise, longer_ms=1.1e-6 * small)
        found += [one.ranks for one in judged(log)[0]] == [[0]]
    assert found >= 26


@pytest.mark.parametrize(
    ("phase", "kind"),
    [
        ("data_loading", "data_loading"), ("dataLoader", "data_loading"), ("gc", "gc_pause"),
        ("checkpoint", "kernel_issue_stall"), ("compute", "compute_straggler"), ("other", "compute_straggler"),
        ("update", "compute_straggler"),
    ],
)  # fmt: skip
def test_kinds_by_phase(phase: str, kind: str) -> None:
    assert kind_of(phase) == kind
