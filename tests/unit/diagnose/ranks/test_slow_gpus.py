"""GPUs that compute slower than those with the same work, by GPU times alone."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.diagnose.case import Case
from argus.diagnose.causes.cpu_time import attribute
from argus.diagnose.ranks import layout
from argus.diagnose.ranks.late_ranks import kept_waiting, narrowed
from argus.diagnose.ranks.lateness import Straggler
from argus.diagnose.ranks.lost_lead import lost_its_lead
from argus.diagnose.ranks.slow_gpus import all_grown, detect, find_idle_stage, find_slow, find_starved, starved_since
from argus.diagnose.read import queries
from argus.diagnose.read.gpu_times import COMPUTES, read, times_of
from argus.diagnose.read.peers import Mesh, between_stages, mesh_of
from argus.diagnose.suspect import Suspect
from tests.builders.cases import case_of

MS = 1e6
USUAL = {"forward": 20.0, "backward": 40.0, "optimizer": 3.0, "compute": 1.0}


class Cluster:
    """A training cluster's GPU times. Ranks are numbered tensor-parallel first, then data-parallel, then by stage.

    A micro-batch goes through the stages one after the other (1F1B takes ``micro + stages - 1`` slots of the slowest
    stage), then all replicas of a stage reduce their gradients: those that are early wait.
    """

    def __init__(self, dp: int, *, tp: int = 1, pp: int = 1, micro: int = 8, steps: int = 60, seed: int = 1) -> None:
        self.dp, self.tp, self.pp, self.micro, self.steps = dp, tp, pp, micro, steps
        self.count = dp * tp * pp
        self.random = np.random.default_rng(seed)
        self.place = np.array([(d, t, p) for p, d, t in product(range(pp), range(dp), range(tp))])
        self.factor = np.ones((self.count, steps))
        self.backward = np.ones((self.count, steps))
        self.length = np.ones((self.count, steps))
        self.stage_work = np.ones(pp)
        self.idle = np.full((self.count, steps), 2 * MS)
        self.noise = 0.01
        self.transfer_ns = np.full(max(pp - 1, 0), 0.1 * MS)
        """A transfer over each boundary of a pipeline of one rank a stage."""
        self.transfers_since = 0
        """Before this step all boundaries took 0.1 ms."""
        self.tensor = 0.0
        """Time of the passes in collectives of a lockstep group, of that of their computing."""

    def rank(self, dp: int, tp: int = 0, pp: int = 0) -> int:
        return (pp * self.dp + dp) * self.tp + tp

    def slow(self, ranks: list[int], factor: float, start: int = 0, *, backward: bool = False) -> Cluster:
        (self.backward if backward else self.factor)[ranks, start:] *= factor
        return self

    def columns(self) -> dict[str, NDArray[Any]]:
        d, p = self.place[:, 0], self.place[:, 2]
        shape = (self.count, self.steps)
        drawn = {name: ms * MS * np.exp(self.random.normal(0, self.noise, shape)) for name, ms in USUAL.items()}
        work = self.stage_work[p][:, None] * self.length
        drawn["forward"] *= work * self.factor
        drawn["backward"] *= work * self.factor * self.backward
        compute = sum(drawn.values())
        assert isinstance(compute, np.ndarray)
        # The slowest of a lockstep group sets its pace; the slowest stage the pipeline's.
        group = d + self.dp * p
        pace = np.zeros((self.dp * self.pp, self.steps))
        passes = compute * (1 + self.tensor)
        np.maximum.at(pace, group, passes)
        wait_mates = pace[group] - compute
        pipeline = np.stack([pace[group[d == one]].max(axis=0) for one in range(self.dp)])
        longest = pipeline * (self.micro + self.pp - 1) / self.micro
        step = longest.max(axis=0)
        wait_peers = step - longest[d]
        bubble = longest[d] - pace[group]
        numbers = np.broadcast_to(np.arange(self.steps), shape)
        columns = {f"{name}_ns": values for name, values in drawn.items()}
        columns |= {
            "collective_ns": wait_mates + wait_peers + 2 * MS,
            "pipeline_ns": bubble,
            "transfer_ns": np.zeros(shape),
        }
        columns |= {"idle_ns": self.idle * np.ones(shape)}
        columns |= {"step_ns": np.broadcast_to(step + 2 * MS, shape), "kernels": np.full(shape, 500)}
        columns |= {"rank": np.broadcast_to(np.arange(self.count)[:, None], shape), "step": numbers}
        return {name: np.ascontiguousarray(values).ravel() for name, values in columns.items()}

    def groups(self) -> dict[str, NDArray[Any]]:
        rows: list[tuple[str, list[int]]] = []
        d, t, p = self.place.T
        for name, size, same in (("tp", self.tp, (d, p)), ("dp", self.dp, (t, p)), ("pp", self.pp, (d, t))):
            if size > 1:
                keys = np.unique(np.stack(same, axis=1), axis=0)
                rows += [(name, np.flatnonzero((np.stack(same, axis=1) == key).all(axis=1)).tolist()) for key in keys]
        ranks = np.empty(len(rows), object)
        ranks[:] = [members for _, members in rows]
        return {
            "host": np.full(len(rows), "h"), "comm_group": np.arange(len(rows)) + 100, "ranks": ranks,
            "dimension": np.array([name for name, _ in rows], object),
        }  # fmt: skip

    def mesh(self) -> Mesh:
        return mesh_of(self.groups(), np.arange(self.count), np.full(self.count, 500))

    def query(self, text: str, params: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        if text == queries.GROUPS:
            return self.groups()
        if text in (queries.KERNEL_TIME, queries.RECORDED_KERNELS):
            return {name: np.empty(0) for name in ("kernel_id", "kernel", "rank", "launches", "spent_ns", "steps")}
        if text == queries.STAGE_TRANSFERS:
            ends = [(one, stage) for stage in range(self.pp - 1) for one in (stage, stage + 1)]
            return {
                "comm": np.array([100 + stage for _, stage in ends]), "rank": np.array([rank for rank, _ in ends]),
                # The receiver waits for the sender.
                "took_ns": np.array([self.transfer_ns[stage] * (1 + 3 * (rank > stage)) for rank, stage in ends]),
                "calls": np.full(len(ends), 2.0 * self.micro), "nbytes": np.full(len(ends), 8e6),
            }  # fmt: skip
        if text == queries.STAGE_TRANSFER_STEPS:
            steps = np.arange(params["first"], params["last"] + 1)
            took = self.transfer_ns[params["comm"] - 100]
            return {"step": steps, "took_ns": np.where(steps < self.transfers_since, 0.1 * MS, took)}
        columns = self.columns()
        if text == queries.GPU_TIMES:
            kept = (columns["step"] >= params["first"]) & (columns["step"] <= params["last"])
        else:
            assert text == queries.GPU_COMPUTE
            kept = np.isin(columns["step"], params["steps"]) & np.isin(columns["rank"], params["ranks"])
            columns["compute_ns"] = np.sum([columns[f"{name}_ns"] for name in COMPUTES], axis=0)
        return {name: values[kept] for name, values in columns.items()}

    def case(self, threshold: float = 0.05) -> Case:
        durations = self.columns()["step_ns"][: self.steps]
        hosts = {rank: f"node-{rank // 8}" for rank in range(self.count)}
        case = case_of(self.query, {"job": "j", "run": 1}, durations, hosts, threshold=threshold)
        case.gpus = read(self.query, case.params, case.numbers, self.count, None)
        return case

    def slow_gpus(self, threshold: float = 0.05) -> list[Suspect]:
        return detect(self.case(threshold))


def named(cluster: Cluster) -> list[tuple[str, list[int]]]:
    return [(finding.kind, finding.ranks) for finding in cluster.slow_gpus()]


@pytest.mark.parametrize("shape", [{"dp": 2}, {"dp": 8}, {"dp": 4, "tp": 2}, {"dp": 64}, {"dp": 4, "tp": 2, "pp": 4}])
def test_healthy_clusters_have_no_slow_gpu(shape: dict[str, int]) -> None:
    for seed in range(5):
        assert named(Cluster(**shape, seed=seed)) == []


def test_ranks_that_differ_all_along_as_gpus_do_are_no_finding() -> None:
    cluster = Cluster(32)
    cluster.factor *= cluster.random.normal(1, 0.03, (32, 1))
    assert named(cluster) == []
    # Among such ones a rank that is a tenth slower is nothing special; among equal ones it is.
    spread = np.linspace(0.92, 1.08, 32)
    spread[7] = 1.1
    cluster.factor[:] = spread[:, None]
    assert named(cluster) == []
    cluster.factor[:] = np.where(np.arange(32) == 7, 1.1, 1.0)[:, None]
    assert named(cluster) == [("compute_straggler", [7])]


@pytest.mark.parametrize(
    ("shape", "ranks"),
    [
        ({"dp": 8}, [3]),
        ({"dp": 2}, [1]),
        ({"dp": 64}, [7, 40]),
        ({"dp": 1, "tp": 8}, [5]),
        ({"dp": 4, "tp": 2, "pp": 2}, [9]),
    ],
)
def test_a_slow_gpu_that_others_wait_for(shape: dict[str, int], ranks: list[int]) -> None:
    cluster = Cluster(**shape).slow(ranks, 1.3, 25)
    (found,) = cluster.slow_gpus()
    assert (found.kind, found.ranks, found.phase) == ("compute_straggler", ranks, "backward")
    assert [found.since, found.last] == [25, 59]
    # Of 64 ms a step 18 more; a pipeline of two stages makes 9 slots of 8 micro-batches' time.
    slots = (8 + cluster.pp - 1) / 8
    assert found.lost_ns == pytest.approx(18 * slots * MS, rel=0.25)


@pytest.mark.parametrize("steps", [12, 16, 20])
def test_of_a_short_recording_the_newer_half_decides(steps: int) -> None:
    (found,) = Cluster(8, steps=steps).slow([3], 1.3, steps // 2).slow_gpus()
    assert (found.kind, found.ranks) == ("compute_straggler", [3])
    recovered = Cluster(8, steps=20).slow([3], 1.3)
    recovered.factor[:, 11:] = 1.0
    assert named(recovered) == []


def test_a_slow_gpu_that_the_pipeline_hides() -> None:
    """The stage has half of the others' work, so it may take 1.9 times as long and nobody notices."""
    cluster = Cluster(4, pp=4)
    cluster.stage_work[2] = 0.45
    slow = cluster.rank(1, pp=2)
    cluster.slow([slow], 1.9, 30, backward=True)
    (found,) = cluster.slow_gpus()
    assert (found.kind, found.ranks) == ("masked_compute_straggler", [slow])
    assert found.phase == "backward"
    assert found.since == 30
    assert found.lost_ns < 0.02 * 64 * MS
    assert found.slowdown == pytest.approx(1, abs=0.02)
    assert "backward (1.9" in found.evidence[0]["text"]
    assert found.cost is not None
    assert "the step does not wait for it yet" in found.cost["text"]


@pytest.mark.parametrize("shape", [{"dp": 8}, {"dp": 4, "tp": 2}, {"dp": 2}])
def test_half_of_a_group(shape: dict[str, int]) -> None:
    cluster = Cluster(**shape)
    half = list(range(cluster.count // 2))
    assert named(cluster.slow(half, 1.25, 20)) == [("compute_straggler", half)]


def test_most_of_a_group_are_compared_with_their_own_past() -> None:
    slow = [0, 1, 2, 3, 4, 6]
    assert named(Cluster(8, steps=80).slow(slow, 1.25, 40)) == [("compute_straggler", slow)]


def test_a_rank_that_is_now_as_its_peers_is_none() -> None:
    """It had been faster, for a reason of its own."""
    cluster = Cluster(8, steps=80)
    cluster.factor[3, :40] = 0.8
    assert named(cluster) == []


def test_the_only_rank_of_a_stage_is_compared_with_its_own_past() -> None:
    assert named(Cluster(1, pp=4, steps=80).slow([2], 1.3, 40)) == [("compute_straggler", [2])]


@pytest.mark.parametrize("steps", [20, 24, 29])
def test_of_a_short_recording_the_older_half_is_the_past(steps: int) -> None:
    """A profiler's recording of 20 to 29 steps has no newest 20 and ten besides."""
    (found,) = Cluster(1, pp=4, steps=steps).slow([2], 1.3, steps // 2).slow_gpus()
    assert (found.kind, found.ranks, found.since) == ("compute_straggler", [2], steps // 2)
    assert "than its first steps" in found.evidence[0]["text"]
    assert named(Cluster(1, pp=4, steps=steps).slow(list(range(4)), 1.3, steps // 2)) == []


@pytest.mark.parametrize("steps", [20, 24, 29, 45])
def test_of_a_short_recording_a_gpu_may_be_slow_all_along(steps: int) -> None:
    """It has no better past, and peers."""
    for seed, shape in product(range(8), ({"dp": 8}, {"dp": 2, "tp": 2, "pp": 2})):
        cluster = Cluster(**shape, steps=steps, seed=seed)
        cluster.noise = 0.001
        assert named(cluster.slow([1], 1.24, 0)) == [("compute_straggler", [1])]


def test_of_a_short_recording_nothing_is_concluded_from_noise() -> None:
    """The errors of ten steps are not sure themselves: by them alone the first two of these had a slow GPU."""
    for shape in ({"dp": 1, "pp": 4}, {"dp": 2, "pp": 2}):
        cluster = Cluster(**shape, steps=24, seed=32)
        cluster.noise = 0.15
        assert named(cluster) == []
    for seed, steps in product(range(8), (20, 24, 29)):
        for shape in ({"dp": 8}, {"dp": 1, "pp": 4}, {"dp": 2, "pp": 2}):
            cluster = Cluster(**shape, steps=steps, seed=seed)
            cluster.noise = 0.06
            assert named(cluster) == []


def test_all_ranks_slower_is_no_rank_s_fault() -> None:
    assert named(Cluster(8, steps=80).slow(list(range(8)), 1.3, 40)) == []


def test_stages_with_other_work_are_not_compared() -> None:
    cluster = Cluster(4, pp=2)
    cluster.stage_work[1] = 1.5
    assert named(cluster) == []


def test_batches_of_varying_length_are_no_fault() -> None:
    for seed in range(5):
        cluster = Cluster(8, seed=seed)
        cluster.length = cluster.random.lognormal(0, 0.15, (8, cluster.steps))
        assert named(cluster) == []


def test_different_faults_are_distinguished() -> None:
    cluster = Cluster(8, steps=80).slow([1], 1.2, 20).slow([6], 2.0, 40)
    assert [(f.ranks, f.since) for f in cluster.slow_gpus()] == [([6], 40), ([1], 20)]


def test_the_first_slow_step_of_a_long_job_is_found_exactly() -> None:
    (found,) = Cluster(4, steps=1500).slow([2], 1.4, 433).slow_gpus()
    assert [found.since, found.last] == [433, 1499]


def test_a_recovered_gpu_is_no_finding() -> None:
    cluster = Cluster(8, steps=400)
    cluster.factor[3, 20:100] = 1.5
    assert named(cluster) == []


def test_gaps_in_what_is_known() -> None:
    """Ranks whose GPU times are missing in some steps, or altogether, are not in the way."""
    cluster = Cluster(8).slow([3], 1.4)
    columns = cluster.columns()
    kept = cluster.random.random(len(columns["rank"])) > 0.2
    kept &= columns["rank"] != 5
    now = times_of({name: values[kept] for name, values in columns.items()})
    mesh = mesh_of(cluster.groups(), now.ranks, now.kernels)
    assert [slow.ranks for slow in find_slow(now, mesh)] == [(3,)]
    few = columns["step"] < 9
    assert find_slow(times_of({name: values[few] for name, values in columns.items()}), cluster.mesh()) == []


# ---- what changed is detected more finely than what differs all along


def test_a_small_change_is_reported_and_a_constant_difference_of_that_size_is_not() -> None:
    assert named(Cluster(8).slow([3], 1.06, 25)) == [("compute_straggler", [3])]
    assert named(Cluster(8).slow([3], 1.06)) == []


@pytest.mark.parametrize("start", [12, 20, 30])
def test_a_stage_that_has_more_to_do_since_early_on(start: int) -> None:
    """Most of the first steps are slow already; the first ten are not."""
    cluster = Cluster(2, tp=2, pp=2)
    stage = [cluster.rank(d, t, 1) for d in range(2) for t in range(2)]
    (found,) = cluster.slow(stage, 1.08, start).slow_gpus()
    assert (found.kind, found.ranks, found.since) == ("stage_imbalance", stage, start)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_ranks_that_drift_each_on_its_own_are_healthy(ranks: int) -> None:
    """Clocks and temperatures wander by 2.5 %: newest and first steps differ by far more than their errors say."""
    for seed in range(4):
        cluster = Cluster(ranks, seed=seed)
        walk = np.zeros((ranks, cluster.steps))
        for step in range(1, cluster.steps):
            walk[:, step] = 0.95 * walk[:, step - 1] + 0.025 * np.sqrt(1 - 0.95**2) * cluster.random.standard_normal(
                ranks
            )
        cluster.factor *= np.exp(walk)
        assert named(cluster) == []
        assert (
            find_starved(times_of(cluster.columns()), cluster.mesh(), times_of(cluster.columns()).cut(slice(40))) == []
        )


def test_a_gpu_that_waits_a_little_for_its_cpu_since_a_step_is_reported() -> None:
    def starved(since: int) -> list[tuple[tuple[int, ...], int | None]]:
        cluster = Cluster(8)
        cluster.idle[5, since:] += 2 * MS
        seen = read(cluster.query, {}, np.arange(60), 8, None)
        assert seen is not None
        return [(one.ranks, starved_since(seen, one)) for one in find_starved(seen.now, seen.mesh, seen.before)]

    assert starved(20) == [((5,), 20)]
    assert starved(0) == []


def test_what_a_gpu_waits_for_its_cpu_is_judged_by_its_own_noise() -> None:
    """Computing varies by more than the wait takes: 1.5 ms of a step of 60."""
    cluster = Cluster(8)
    cluster.noise = 0.06
    assert find_starved(times_of(cluster.columns()), cluster.mesh()) == []
    cluster.idle[5, 20:] += 1.5 * MS
    seen = read(cluster.query, {}, np.arange(60), 8, None)
    assert seen is not None
    assert [one.ranks for one in find_starved(seen.now, seen.mesh, seen.before)] == [(5,)]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_stage_that_is_idle_is_compared_with_the_other_stages(tp: int) -> None:
    """All along: it has no earlier steps to be compared with."""
    cluster = Cluster(1, tp=tp, pp=4)
    cluster.stage_work[3] = 1.3
    assert find_idle_stage(times_of(cluster.columns()), cluster.mesh()) is None
    ranks = tuple(range(tp, 2 * tp))
    cluster.idle[list(ranks)] += 20 * MS
    seen = read(cluster.query, {}, np.arange(60), cluster.count, None)
    assert seen is not None
    found = find_idle_stage(seen.now, seen.mesh)
    assert found is not None
    assert (found.ranks, len(found.peers), found.persistence) == (ranks, 3 * tp, 1.0)
    assert found.cost_ns == pytest.approx(20 * MS, rel=0.02)
    assert starved_since(seen, found) is None
    (straggler,), _ = kept_waiting([], seen, MS, 0.05)
    assert (straggler.ranks, straggler.whole_stage, straggler.idle) == (ranks, True, True)
    # Less than a twentieth of a step is not reported, nor one rank of a stage, which has peers.
    cluster.idle[list(ranks)] -= 17 * MS
    assert find_idle_stage(times_of(cluster.columns()), cluster.mesh()) is None
    assert find_idle_stage(times_of(cluster.columns()), cluster.mesh(), 0.01) is not None
    cluster.idle[ranks[0]] += 20 * MS
    alone = find_idle_stage(times_of(cluster.columns()), cluster.mesh())
    assert (alone is None) == (tp > 1)


def test_a_stage_that_is_idle_since_a_step() -> None:
    cluster = Cluster(1, pp=4)
    cluster.stage_work[:] = 1.0, 1.4, 1.2, 1.0
    cluster.idle[3, 20:] += 20 * MS
    seen = read(cluster.query, {}, np.arange(60), 4, None)
    assert seen is not None
    found = find_idle_stage(seen.now, seen.mesh)
    assert found is not None
    assert starved_since(seen, found) == 20


# ---- pipelines that wait for work


@pytest.mark.parametrize(("micro", "transfers"), [(7, 0.0), (7, 5.0), (6, 0.0), (6, 5.0)])
def test_a_pipeline_s_micro_batches_are_whole_numbers(micro: int, transfers: float) -> None:
    """Seven for four stages are enough, six are not; how many ms transfers take themselves makes no difference."""
    cluster = Cluster(1, pp=4, micro=micro)
    cluster.noise = 0.002
    case = cluster.case()
    assert case.gpus is not None
    case.gpus.now.pipeline[:] += transfers * MS
    case.gpus.now.transfer[:] = transfers * MS
    found = [one.kind for one in layout.suspects_of(case, case.gpus)]
    assert found == ([] if micro == 7 else ["pipeline_bubble"])
    assert f"{micro} micro-batches" in layout.stages_alike(case)


def test_stages_of_one_rank_that_differ_are_not_alike() -> None:
    def alike(cluster: Cluster) -> str:
        return layout.stages_alike(cluster.case())

    assert alike(Cluster(1, pp=4)).startswith("each stage is one rank: they compute for 6")
    assert alike(Cluster(2, pp=4)) == ""
    slow, idle = Cluster(1, pp=4).slow([2], 1.1), Cluster(1, pp=4)
    idle.idle[2] += 10 * MS
    assert (alike(slow), alike(idle)) == ("", "")


# ---- who comes late, and whose GPU does


def late(cluster: Cluster, ranks: tuple[int, ...], gain_ms: float) -> Straggler | None:
    seen = read(cluster.query, {}, np.arange(cluster.steps), cluster.count, None)
    assert seen is not None
    return narrowed(Straggler(ranks, gain_ms * MS, 1.0, 0.0, 20), seen)


def test_ranks_that_wait_for_a_slow_gpu_of_their_pipeline_are_not_to_blame() -> None:
    """Rank 0 computes slower; ranks 4 and 5, the next stage of its data, come late to their own collectives for it."""
    assert late(Cluster(2, tp=2, pp=2).slow([0], 1.4, 20), (4, 5), 5) is None


def test_a_cpu_that_comes_late_and_a_gpu_that_does_not() -> None:
    found = late(Cluster(2, tp=2, pp=2), (0,), 5)
    assert found is not None
    assert (found.ranks, found.hidden) == ((0,), True)


def test_a_gpu_that_is_late_itself_is_not_hidden() -> None:
    cluster = Cluster(4, tp=2)
    cluster.idle[[2, 3], 20:] += np.array([[6.0], [3.5]]) * MS
    found = late(cluster, (2, 3, 4), 5)
    assert found is not None
    assert (found.ranks, found.waiting, found.hidden) == ((2, 3), (4,), False)


def test_the_latest_of_many_does_not_excuse_the_others() -> None:
    """Ranks of one host wait for a CPU, some by chance for longer: who waits for less than half of the longest is as
    guilty as those that wait for half of what is typical."""
    cluster = Cluster(16)
    cluster.idle[:8, 20:] += np.array([4, 4, 4, 4, 4, 4, 2.7, 6.8])[:, None] * MS
    found = late(cluster, tuple(range(8)), 5)
    assert found is not None
    assert found.ranks == tuple(range(8))


def test_ranks_that_are_late_in_turns_are_late() -> None:
    """Four wait for a CPU, another one for the longest in each step: all wait for that one, typically 6 ms, though
    each of the four is typically 1.5 ms late."""
    cluster = Cluster(8)
    cluster.idle[:4, 20:] += 1.5 * MS
    for step in range(20, 60):
        cluster.idle[step % 4, step] += 4.5 * MS
    found = late(cluster, (0, 3), 6)
    assert found is not None
    assert found.hidden  # half of the time somebody else is as late
    found = late(cluster, (0, 1, 2, 3), 6)
    assert found is not None
    assert (found.ranks, found.hidden) == ((0, 1, 2, 3), False)


def test_lateness_of_a_gpu_that_waits_is_sure_by_the_noise_of_its_waits() -> None:
    """Computing varies by 8 ms a step, what is waited for the CPU hardly."""
    cluster = Cluster(8)
    cluster.noise = 0.15
    cluster.idle[5, 20:] += 4 * MS
    found = late(cluster, (5,), 5)
    assert found is not None
    assert not found.hidden


def test_ranks_that_are_late_together_are_sure_together() -> None:
    """Eight GPUs wait for up to 12 ms a step: of one it is not sure in 20 steps, of five it is."""
    cluster = Cluster(16)
    cluster.noise = 0.03
    cluster.idle[:8, 20:] += cluster.random.uniform(-2, 12, (8, 40)).clip(0) * MS
    alone, found = late(cluster, (2,), 8), late(cluster, (2, 3, 4, 5, 6), 8)
    assert alone is not None
    assert alone.hidden
    assert found is not None
    assert not found.hidden


def test_a_stage_that_is_kept_waiting_is_to_blame_as_a_whole() -> None:
    """All ranks of stage 0 wait for a CPU: some come later than others to its collectives, by chance."""
    cluster = Cluster(2, tp=2, pp=2)

    def found(*idle_ms: float) -> list[tuple[tuple[int, ...], bool]]:
        cluster.idle[:4, 20:] = (2 + np.array(idle_ms)[:, None]) * MS
        seen = read(cluster.query, {}, np.arange(60), 8, None)
        assert seen is not None
        last = Straggler((0, 2), 4 * MS, 0.76, 1e-5, 50, own=True)
        stragglers, starved = kept_waiting([last], seen, MS, 0.05)
        assert len(stragglers) == len(starved)
        return [(one.ranks, slow is not None) for one, slow in zip(stragglers, starved, strict=True)]

    assert found(26, 20, 30, 21) == [((0, 1, 2, 3), True)]
    # Who waits for less than half as long as they do is not among them, or is reported separately.
    assert found(16, 7, 18, 6) == [((0, 2), False)]
    assert found(26, 9, 30, 8) == [((0, 2), True), ((1, 3), True)]


def test_all_gpus_that_became_slower_confirm_a_regression() -> None:
    def confirmed(share: float, factor: float) -> bool:
        cluster = Cluster(10).slow(list(range(round(10 * share))), factor, 30)
        seen = read(cluster.query, {}, np.arange(60), 10, None)
        assert seen is not None
        return all_grown(seen, 30)

    assert confirmed(1.0, 1.08)
    assert not confirmed(0.7, 1.08)
    assert not confirmed(1.0, 1.02)


# ---- who does the same work


def test_ranks_of_a_stage_belong_together() -> None:
    cluster = Cluster(4, tp=2, pp=3)
    mesh = cluster.mesh()
    d, _, p = cluster.place.T
    for labels, same in ((mesh.stage, p), (mesh.lockstep, d + 4 * p), (mesh.replica, d)):
        assert np.array_equal(labels[:, None] == labels[None, :], same[:, None] == same[None, :])
    assert mesh.staged


def test_the_only_ranks_of_their_stages_are_not_alike() -> None:
    assert len(set(Cluster(1, pp=4).mesh().stage.tolist())) == 4


def test_groups_that_each_host_saw_a_part_of_are_one() -> None:
    ranks = np.empty(3, object)
    ranks[:] = [[0, 1], [2, 3], [4, 5]]
    groups = {
        "host": np.array(["a", "b", "c"]), "comm_group": np.array([7, 8, 9]), "ranks": ranks,
        "dimension": np.array(["dp", "dp", "dp"]),
    }  # fmt: skip
    mesh = mesh_of(groups, np.arange(6), np.arange(6), {("a", 7): 50, ("b", 8): 50})
    assert mesh.stage.tolist() == [0, 0, 0, 0, 4, 4]


def test_communicators_among_stages() -> None:
    """What several hosts know a part of is one communicator."""
    ranks = np.empty(7, object)
    ranks[:] = [[0, 1], [2, 3], [0, 2], [1, 3], [0, 1, 2, 3], [0], [2]]
    groups = {
        "host": np.array(["a"] * 6 + ["b"]), "comm_group": np.array([1, 2, 3, 4, 5, 6, 6]), "ranks": ranks,
        "dimension": np.array(["tp", "tp", "pp", "pp", "world", "unknown", "unknown"]),
    }  # fmt: skip
    assert between_stages(groups) == [3, 4, 5, 6]
    assert between_stages(groups, {("b", 6): 7}) == [3, 4, 5]
    assert between_stages(groups, {("a", 6): 8, ("b", 6): 8}) == [3, 4, 5, 8]
    assert between_stages({name: values[:2] for name, values in groups.items()}) == []


def test_without_groups_those_with_as_many_kernels_are_compared() -> None:
    none = {name: np.empty(0, object) for name in ("host", "comm_group", "dimension", "ranks")}
    mesh = mesh_of(none, np.arange(4), np.array([500, 300, 500, 300]))
    assert mesh.stage[0] == mesh.stage[2] != mesh.stage[1] == mesh.stage[3]
    assert not mesh.staged


def test_a_whole_stage_that_becomes_slow_has_more_to_do() -> None:
    cluster = Cluster(2, tp=2, pp=2, steps=80)
    stage = [cluster.rank(d, t, 1) for d in range(2) for t in range(2)]
    assert named(cluster.slow(stage, 1.4, 40)) == [("stage_imbalance", stage)]


@pytest.mark.parametrize("dp", [1, 2])
def test_a_stage_of_one_rank_may_be_a_slow_gpu_and_it_says_so(dp: int) -> None:
    """Slow from the start: nobody has the same work, there is no past, and nothing is known of kernels."""
    cluster = Cluster(dp, pp=4)
    stage = [cluster.rank(d, pp=2) for d in range(dp)]
    assert named(cluster.slow(stage, 2.0)) == []
    case = cluster.case()
    assert case.gpus is not None
    (found,) = layout.suspects_of(case, case.gpus)
    alone = dp == 1
    assert (found.kind, found.ranks, found.confidence) == ("stage_imbalance", stage, 0.45 if alone else 0.9)
    assert any("would look the same" in one["text"] for one in found.further) == alone
    assert ("check the GPU of rank 2 (nvidia-smi" in found.action) == alone


def test_a_gpu_that_its_cpu_keeps_waiting() -> None:
    cluster = Cluster(8)
    times = times_of(cluster.columns())
    assert find_starved(times, cluster.mesh()) == []
    cluster.idle[5] += 20 * MS
    times = times_of(cluster.columns())
    (found,) = find_starved(times, cluster.mesh())
    assert (found.ranks, found.phase) == ((5,), "idle")
    assert found.cost_ns == pytest.approx(20 * MS, rel=0.1)
    # Its kernels take no longer.
    assert find_slow(times, cluster.mesh()) == []
    # A slow GPU is not starved.
    assert find_starved(times_of(Cluster(8).slow([3], 1.5).columns()), cluster.mesh()) == []


@pytest.mark.parametrize(("since", "is_reported"), [(20, True), (0, False), (52, False)])
def test_a_lead_that_was_lost(since: int, is_reported: bool) -> None:
    """Who always came late, or since a few steps only, has lost none."""
    ahead = np.full(60, -1.0 * MS)
    ahead[since:] = 5 * MS

    def query(text: str, params: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        assert (text, params["ranks"]) == (queries.LEAD, [3])
        return {"step": np.arange(60), "suspects_ns": ahead, "others_ns": np.zeros(60)}

    case = case_of(query, {}, np.full(60, 20.0 * MS), {3: "n"})
    case.lateness = None
    assert lost_its_lead(case, Straggler((3,), 5 * MS, 1.0, 0.0, 20, hidden=True)) is is_reported


@pytest.mark.parametrize(("hidden", "kind"), [(True, "kernel_issue_stall"), (False, "compute_straggler")])
def test_a_gpu_that_is_not_late_is_not_to_blame(hidden: bool, kind: str) -> None:
    """Its CPU comes 10 ms late by nothing that its calls show."""
    columns = {
        "rank": np.array([0, 1, 2]),
        **{f"{name}_ns": np.full(3, MS) for name in ("module", "data", "other", "sync")},
    }
    cause = attribute(columns, (0,), 10 * MS, (0.5 * MS, 0.0), hidden=hidden)
    assert (cause.kind, cause.known) == (kind, True)


@pytest.mark.parametrize(
    ("own_ms", "hidden", "words"),
    [
        ((8.0, -0.4), False, "computes 8.00 ms a step longer, and is idle for as long"),
        ((8.0, 0.9), False, "is idle for as long"),
        ((8.0, 1.1), False, "is idle for 1.10 ms a step longer"),
        ((-0.3, 4.0), False, "for 4.00 ms a step longer than those with the same work, and computes as long"),
        ((-0.0, -0.3), True, "it computes as long, and is idle for as long"),
    ],
)
def test_an_excess_that_is_none_is_no_number(own_ms: tuple[float, float], hidden: bool, words: str) -> None:
    """Of 10 ms that a rank comes late: what is negative, or less than a tenth of it, is scatter."""
    columns = {
        "rank": np.array([0, 1, 2]),
        **{f"{name}_ns": np.full(3, MS) for name in ("module", "data", "other", "sync")},
    }
    cause = attribute(columns, (0,), 10 * MS, (own_ms[0] * MS, own_ms[1] * MS), hidden=hidden)
    assert words in cause.text
    assert "-0." not in cause.text


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_gpu_that_its_cpu_keeps_waiting_now_more_now_less(ranks: int) -> None:
    """Launches run ahead and are caught up with: 0 to 20 ms a step, in all but one of them more than any other."""
    cluster = Cluster(ranks, steps=12)
    cluster.idle *= 1 + 0.05 * np.random.default_rng(3).random(cluster.idle.shape)
    times = times_of(cluster.columns())
    assert find_starved(times, cluster.mesh()) == []
    cluster.idle[1] += np.array([17, 12, 18, 11, 3, 9, 5, 14, 0, 3, 17, 8]) * MS
    found = find_starved(times_of(cluster.columns()), cluster.mesh())
    # Of two ranks it may be chance.
    assert [one.ranks for one in found] == ([] if ranks == 2 else [(1,)])
    if ranks > 2:
        turns = np.random.default_rng(5).integers(0, ranks, 12)
        cluster.idle[1] = 2 * MS
        cluster.idle[turns, np.arange(12)] += 12 * MS
        assert find_starved(times_of(cluster.columns()), cluster.mesh()) == []
