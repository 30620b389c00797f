"""Slow links, by what transfers take; and how work is shared out."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.diagnose.case import Case
from argus.diagnose.ranks import layout, links
from argus.diagnose.read import queries, transfers
from argus.diagnose.read.baseline import Baseline
from argus.diagnose.read.gpu_times import GpuWindow, read
from argus.diagnose.suspect import Suspect
from tests.builders.cases import case_of
from tests.unit.diagnose.ranks.test_slow_gpus import MS, Cluster

PARAMS = {"job": "j", "run": 1}
HOSTS = {rank: f"node-{rank // 4}" for rank in range(64)}


class Network(Cluster):
    """A cluster with what its transfers take: by dimension, of the rank that waits for nobody, ms a step."""

    TAKES: ClassVar = {"tp": 6.0, "dp": 8.0, "pp": 0.4}
    OPS: ClassVar = {"tp": "AllReduce", "dp": "AllReduce", "pp": "SendRecv"}

    def __init__(self, dp: int, **shape: int) -> None:
        super().__init__(dp, **shape)
        self.link = np.ones((self.count, self.steps))
        """Factor of transfers that a rank takes part in."""
        self.load = dict.fromkeys(self.TAKES, 1.0)
        self.sent = np.full(self.steps, 1 << 24)
        """Bytes of a call, in each step."""
        self.every = 1
        """Transfers are in each step, or in one of so many."""
        self.only = ("tp", "dp", "pp")

    def transfers(self) -> dict[str, NDArray[Any]]:
        rows: list[tuple[Any, ...]] = []
        groups = self.groups()
        for number, dimension, members in zip(*(groups[n] for n in ("comm_group", "dimension", "ranks")), strict=True):
            if dimension not in self.only:
                continue
            pairs = [members] if dimension != "pp" else list(itertools.pairwise(members))
            for pair in pairs:
                took = self.TAKES[dimension] * MS * self.link[list(pair)].max(axis=0) * self.load[dimension]
                took = took * np.exp(self.random.normal(0, 0.03, self.steps))
                # Each step another one comes last, and the others wait for it.
                waits = self.random.exponential(3 * MS, (len(pair), self.steps))
                waits -= waits.min(axis=0)
                for rank, wait in zip(pair, waits, strict=True):
                    place = members.index(rank)
                    peer = -1 if dimension != "pp" else members.index(pair[0] if rank == pair[1] else pair[1])
                    for step in range(0, self.steps, self.every):
                        spent = took[step] + wait[step]
                        rows.append((rank, HOSTS[rank], number, place, peer, self.OPS[dimension], step, 8 * spent,
                                     spent, 8, self.sent[step]))  # fmt: skip
        names = ("rank", "host", "comm_group", "comm_rank", "peer", "op", "step", "duration_ns", "shortest_ns", "calls",
                 "bytes")  # fmt: skip
        return {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}

    def query(self, text: str, params: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        if text not in (queries.TRANSFERS, queries.TRANSFER_RANKS):
            return super().query(text, params)
        columns = self.transfers()
        took: dict[Any, float] = {}
        ranks: dict[Any, set[int]] = {}
        names = ("comm_group", "op", "comm_rank", "peer", "step", "rank", "duration_ns", "shortest_ns")
        for group, op, place, peer, step, rank, spent, shortest in zip(
            *(columns[n].tolist() for n in names), strict=True
        ):
            if params["first"] <= step <= params["last"]:
                pair = (-1, -1) if peer < 0 else (min(place, peer), max(place, peer))
                key = group, op, *pair
                at = (*key, step)
                took[at] = min(took.get(at, np.inf), spent if peer < 0 else shortest)
                ranks.setdefault(key, set()).add(rank)
        rows: list[tuple[Any, ...]] = [(*key, ns, 8, self.sent[key[-1]]) for key, ns in took.items()]
        names = ("comm_group", "op", "one", "other", "step", "took_ns", "calls", "bytes")
        if text == queries.TRANSFER_RANKS:
            rows, names = list(ranks), names[:4]
        out = {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
        if text == queries.TRANSFER_RANKS:
            out["ranks"] = np.empty(len(rows), object)
            out["ranks"][:] = [sorted(those) for those in ranks.values()]
        return out

    def seen(self) -> GpuWindow:
        seen = read(self.query, PARAMS, np.arange(self.steps), self.count, None)
        assert seen is not None
        return seen

    def job(self) -> Case:
        case = case_of(self.query, PARAMS, self.columns()["step_ns"][: self.steps], HOSTS)
        case.gpus = self.seen()
        return case

    def slow_links(self) -> list[Suspect]:
        return links.detect(self.job())

    def layout(self, fresh: int | None = None) -> list[Suspect]:
        case = self.job()
        assert case.gpus is not None
        return layout.suspects_of(case, case.gpus, fresh=fresh)


@pytest.mark.parametrize("shape", [{"dp": 8}, {"dp": 4, "tp": 2}, {"dp": 2, "tp": 2, "pp": 2}, {"dp": 4, "pp": 4}])
def test_healthy_networks_have_no_slow_link(shape: dict[str, int]) -> None:
    assert Network(**shape).slow_links() == []


def test_a_slow_communicator_is_named_with_its_ranks() -> None:
    network = Network(4, tp=4)
    network.only = ("tp",)
    network.link[8:12, 20:] = 1.6
    (found,) = network.slow_links()
    assert (found.kind, found.ranks, found.hosts) == ("link_degradation", [8, 9, 10, 11], ["node-2"])
    assert [found.since, found.last] == [20, 59]
    assert "1.6" in found.evidence[0]["text"]
    assert "3 others that send as much" in found.evidence[0]["text"]
    assert "which of them it is does not show" in found.evidence[-1]["text"]
    assert "CUDA_VISIBLE_DEVICES=… all_reduce_perf -b 2M -e 2M -g 2 on either half of the GPUs" in found.action


def test_the_action_says_how_to_find_the_link_of_a_ring() -> None:
    """Of four nodes with four GPUs each, 16 MiB in eight calls a step."""
    network = Network(16)
    network.link[:, 20:] = 2.0
    (found,) = network.slow_links()
    assert found.ranks == list(range(16))
    test = "mpirun -N 1 -H node-0,node-1 all_reduce_perf -b 2M -e 2M -g 4 on either half of the nodes"
    assert test in found.action


@pytest.mark.parametrize(("ranks", "halves"), [(2, False), (3, False), (4, True)])
def test_half_of_a_ring_is_two_ranks_at_least(ranks: int, halves: bool) -> None:
    network = Network(ranks)
    network.link[:, 20:] = 2.0
    (found,) = network.slow_links()
    assert ("by halves" in found.action) is halves
    assert f"all_reduce_perf -b 2M -e 2M -g {2 if halves else ranks}" in found.action


def test_the_rank_that_all_slow_transfers_have_in_common_is_named() -> None:
    network = Network(4, tp=2, pp=2)
    slow = network.rank(2, 1, 1)
    network.link[slow] = 3.0
    (found,) = network.slow_links()
    assert found.ranks == [slow]
    assert "takes part in all of them" in found.evidence[-1]["text"]
    assert "halves" not in found.action


def test_the_only_communicator_is_compared_with_its_own_past() -> None:
    network = Network(8, steps=100)
    assert network.slow_links() == []
    network.link[:, 60:] = 2.0
    (found,) = network.slow_links()
    assert found.ranks == list(range(8))
    assert found.since == pytest.approx(60, abs=1)
    assert "its own first steps" in found.evidence[0]["text"]


@pytest.mark.parametrize("steps", [20, 24, 29])
def test_of_a_short_recording_the_older_half_is_the_past(steps: int) -> None:
    network = Network(8, steps=steps)
    assert network.slow_links() == []
    network.link[:, steps // 2 :] = 2.0
    (found,) = network.slow_links()
    assert (found.ranks, found.since) == (list(range(8)), steps // 2)
    assert "its own first steps" in found.evidence[0]["text"]


@pytest.mark.parametrize(("groups", "slow"), [(1, 2), (2, 0)])
def test_operations_of_one_communicator_are_no_norm_for_one_another(groups: int, slow: int) -> None:
    """All that a sharded job sends goes over the same links; where several communicators send more, the work did."""
    took = np.random.default_rng(3).normal(1, 0.01, (2, 80))
    took[:, 40:] *= 3
    members = [tuple(range(4 * (number % groups), 4 * (number % groups) + 4)) for number in range(2)]
    names = [(number % groups, op, (-1, -1)) for number, op in enumerate(("AllGather", "ReduceScatter"))]
    ones = np.ones(2)
    now = transfers.Transfers(np.arange(80), names, members, np.arange(2), np.arange(2), took, ones, ones)
    first = replace(now, steps=now.steps[:20], took=took[:, :20])
    assert len(links.find_slow_links(now, first)) == slow


def test_a_link_that_was_well_in_the_first_steps_only() -> None:
    """Most of the steps that the newest are compared with are slow already."""
    network = Network(8)
    network.link[:, 12:] = 2.0
    (found,) = network.slow_links()
    assert found.since == pytest.approx(12, abs=1)
    assert "its own first steps" in found.evidence[0]["text"]


def test_waiting_for_others_is_no_slow_link() -> None:
    """A slow GPU keeps its lockstep group and all its peers waiting: no transfer takes longer."""
    assert Network(4, tp=4).slow([5], 2.0).slow_links() == []


@pytest.mark.parametrize("start", [12, 48])
def test_what_a_link_costs_is_what_became_exposed(start: int) -> None:
    """The newest 20 steps are not all slow, and what was exposed before is no loss."""
    network = Network(8)
    network.link[:, start:] = 2.0
    case = network.job()
    assert case.gpus is not None
    for times in (case.gpus.now, case.gpus.before):
        assert times is not None
        times.collective[:] = np.where(times.steps >= start, 12 * MS, 5 * MS)
    (found,) = links.detect(case)
    assert found.lost_ns == pytest.approx(7 * MS, rel=0.1)


def test_what_hides_behind_other_work_is_found_and_costs_nothing() -> None:
    network = Network(4, tp=4)
    network.only = ("tp",)
    network.link[8:12] = 2.0
    columns = network.columns()
    columns["collective_ns"][:] = 0
    network.columns = lambda: {name: values.copy() for name, values in columns.items()}  # type: ignore[method-assign]
    (found,) = network.slow_links()
    assert (found.lost_ns, found.slowdown) == (0.0, 1.0)


def test_what_is_little_in_a_step_is_not_reported() -> None:
    network = Network(4, tp=4)
    network.only = ("tp",)
    network.load["tp"] = 0.01
    network.link[8:12] = 2.0
    assert network.slow_links() == []


def test_a_pair_is_alike_others_between_the_same_stages() -> None:
    network = Network(4, pp=2)
    network.only = ("pp",)
    network.load["pp"] = 5.0
    network.link[network.rank(1, pp=1)] = 4.0
    (found,) = network.slow_links()
    assert found.ranks == [network.rank(1), network.rank(1, pp=1)]
    assert found.evidence[0]["text"].startswith("a transfer between ranks 1, 5 takes")
    assert "sendrecv_perf -b 2M -e 2M -g 1" in found.action


@pytest.mark.parametrize(("pp", "much", "is_named"), [(4, 3.0, True), (4, 1.6, False), (2, 3.0, False)])
def test_the_only_communicator_of_a_stage_is_compared_with_other_stages(pp: int, much: float, is_named: bool) -> None:
    """Two ranks a stage: each stage has one communicator for its gradients."""
    network = Network(2, pp=pp)
    network.only = ("dp",)
    network.link[2:4] = much
    found = network.slow_links()
    assert [suspect.ranks for suspect in found] == [[2, 3]] * is_named
    assert all("3 others that send as much" in suspect.evidence[0]["text"] for suspect in found)


@pytest.mark.parametrize("start", [0, 20])
def test_the_faster_of_two_stages_shows_how_long_as_many_bytes_may_take(start: int) -> None:
    network = Network(4, pp=2)
    network.only = ("dp",)
    network.link[4:8, start:] = 6.0
    (found,) = network.slow_links()
    assert (found.kind, found.ranks, found.since, found.confidence) == ("link_degradation", [4, 5, 6, 7], start, 0.7)
    assert "6.0" in found.evidence[0]["text"]
    assert "one other that sends as much" in found.evidence[0]["text"]
    texts = [cited["text"] for cited in found.evidence]
    assert "in the same steps ranks 0, 1, 2, 3, which are another stage, send as much in 6" in " ".join(texts)
    assert "not known" not in " ".join(texts)


def test_of_two_stages_on_unknown_nodes_their_placement_is_left_open() -> None:
    network = Network(4, pp=2)
    network.only = ("dp",)
    network.link[4:8] = 6.0
    case = network.job()
    case.hosts = {}
    (found,) = links.detect(case)
    assert any("on which nodes either are is not known" in cited["text"] for cited in found.evidence)


@pytest.mark.parametrize("reason", ["spread over more nodes", "costs little", "only twice as long", "sends more"])
def test_of_two_stages_none_is_blamed_without_proof(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(4, pp=2)
    network.only = ("dp",)
    network.link[4:8] = 2.0 if reason == "only twice as long" else 6.0
    if reason == "costs little":
        monkeypatch.setattr(Network, "TAKES", {"tp": 6.0, "dp": 0.08, "pp": 0.4})
    case = network.job()
    if reason == "spread over more nodes":
        case.hosts = {rank: f"node-{rank // (4 if rank < 4 else 2)}" for rank in range(8)}
    assert case.transfers is not None
    now = case.transfers.now
    if reason == "sends more":
        # As transfers_of labels them.
        case.transfers = replace(case.transfers, now=replace(now, across=np.arange(len(now.names))))
    assert links.detect(case) == []


def test_a_communicator_of_unknown_use_and_size() -> None:
    network = Network(4, tp=4)
    network.only = ("tp",)
    network.link[8:12] = 2.0
    case = network.job()
    assert case.transfers is not None
    case.transfers = replace(
        case.transfers, dimensions={}, now=replace(case.transfers.now, nbytes=np.zeros(len(case.transfers.now.names)))
    )
    (found,) = links.detect(case)
    assert "AllReduce of the communicator of ranks 8, 9, 10, 11" in found.evidence[0]["text"]
    assert "all_reduce_perf -b 1M -e 1G -f 4" in found.action


@pytest.mark.parametrize(
    ("shape", "share", "runs", "is_said"),
    [({"dp": 8}, 0.5, 0, True), ({"dp": 8}, 0.2, 0, False), ({"dp": 8}, 0.5, 3, False),
     ({"dp": 4, "tp": 2}, 0.5, 0, False)],
)  # fmt: skip
def test_links_that_nothing_can_be_compared_with_are_not_called_well(
    shape: dict[str, int], share: float, runs: int, is_said: bool
) -> None:
    """Where a network that was slow all along would not show."""
    network = Network(**shape)
    network.only = ("dp",)
    case = network.job()
    assert case.gpus is not None
    case.gpus = replace(case.gpus, now=replace(case.gpus.now, collective=share * case.gpus.now.step))
    case.baseline = Baseline("class", (None,) * runs)  # type: ignore[arg-type]
    said = links.without_like(case)
    assert ("communication takes 50% of a step, most of it AllReduce of ranks 0-7" in said) is is_said
    assert bool(said) is is_said
    assert ("all_reduce_perf -b 2M -e 2M -g 1" in said) is is_said


# ---- how work is shared out


@pytest.mark.parametrize("shape", [{"dp": 8}, {"dp": 4, "tp": 2, "pp": 2}, {"dp": 2, "pp": 4}, {"dp": 1, "pp": 8}])
def test_an_even_layout_is_no_finding(shape: dict[str, int]) -> None:
    assert Network(**shape, micro=4 * shape.get("pp", 1)).layout() == []


def test_a_stage_with_more_work() -> None:
    network = Network(2, pp=4, micro=16)
    network.stage_work[3] = 1.4
    (found,) = network.layout()
    assert (found.kind, found.ranks) == ("stage_imbalance", [6, 7])
    assert "(1.37x)" in found.evidence[0]["text"]
    # Shared out evenly it would be 1.1 for each.
    assert found.lost_ns == pytest.approx(0.3 * 60 * MS, rel=0.1)


def test_batches_of_different_length() -> None:
    network = Network(8)
    network.length = network.random.lognormal(0, 0.2, (8, network.steps))
    (found,) = network.layout()
    assert (found.kind, found.ranks) == ("sequence_imbalance", list(range(8)))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("slow", [2, 3, 4])
def test_a_gpu_that_is_slow_in_some_steps_is_no_batch_of_different_length(ranks: int, slow: int) -> None:
    """Its forward and its backward go together, too, but the longest is the same rank's each time."""
    network = Network(ranks)
    network.length = np.ones((ranks, network.steps))
    network.length[1, np.arange(network.steps) % 6 < slow] = 1.4
    assert network.layout() == []


@pytest.mark.parametrize("ranks", [2, 3, 4, 16])
def test_batches_of_different_length_are_found_among_few_and_many(ranks: int) -> None:
    found = 0
    for seed in range(20):
        network = Network(ranks)
        rng = np.random.default_rng(seed)
        network.length = rng.lognormal(0, 0.25, (ranks, network.steps))
        found += [one.kind for one in network.layout()] == ["sequence_imbalance"]
    assert found == 20


def test_batches_that_differ_more_than_before_count_from_less_on() -> None:
    """Sums of a pipeline's micro-batches that differ by 3.5 % between two replicas cost too little to be reported,
    unless they did not do so before."""
    for start, reported in ((0, []), (16, [("sequence_imbalance", 16)])):
        network = Network(2, tp=2, pp=2, micro=16)
        each = network.random.normal(0, 0.035, (2, network.steps))
        network.length[:, start:] = np.exp(each[network.place[:, 0], start:])
        network.noise = 0.002
        assert [(found.kind, found.since) for found in network.layout()] == reported


def test_batches_that_vary_for_all_ranks_alike_are_even() -> None:
    network = Network(8)
    network.length = np.broadcast_to(network.random.lognormal(0, 0.3, network.steps), (8, network.steps))
    assert network.layout() == []


def test_noise_of_a_phase_alone_is_not_the_batch_s() -> None:
    network = Network(8)
    network.backward = network.random.lognormal(0, 0.2, (8, network.steps))
    assert network.layout() == []


@pytest.mark.parametrize(("micro", "is_reported"), [(2, True), (4, True), (7, False), (16, False)])
def test_a_pipeline_without_work(micro: int, is_reported: bool) -> None:
    found = Network(2, pp=4, micro=micro).layout()
    assert [finding.kind for finding in found] == ["pipeline_bubble"] * is_reported


def test_collectives_inside_the_passes_are_no_bubble() -> None:
    """Two stages with four micro-batches wait for a fifth of the time, however they spend the rest."""
    network = Network(2, tp=2, pp=2, micro=4)
    network.tensor = 0.6
    assert network.layout() == []


def test_a_layout_is_fresh_only_if_it_was_not_so_before() -> None:
    network = Network(8, steps=120)
    for start, reported in ((60, ["sequence_imbalance"]), (0, [])):
        network.length = np.ones((8, 120))
        network.length[:, start:] = network.random.lognormal(0, 0.2, (8, 120 - start))
        found = network.layout(fresh=60)
        assert [finding.kind for finding in found] == reported


def test_since_when_a_link_is_slow_is_found_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if only the newest 20 steps could be read at once."""
    monkeypatch.setattr("argus.diagnose.read.transfers.MOST_ROWS", 1)
    network = Network(4, tp=2, steps=160)
    network.only = ("tp",)
    network.link[2:4, 77:] = 2.0
    (found,) = network.slow_links()
    assert (found.ranks, found.since) == ([2, 3], 77)


@pytest.mark.parametrize(
    ("pairs", "is_reported"),
    [([(0, 1), (1, 2), (2, 3)], 1), ([(0, 1), (1, 2), (2, 3), (0, 3)], 2), ([(0, 1)], 1), ([(0, 1), (0, 2)], 2)],
)
def test_a_last_stage_that_hands_on_to_the_first_has_several_chunks(
    pairs: list[tuple[int, int]], is_reported: int
) -> None:
    def query(text: str, params: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        assert text == queries.TRANSFER_RANKS
        assert (params["first"], params["last"]) == (7, 9)
        rows = [(4, "SendRecv", *pair) for pair in pairs] + [(4, "AllReduce", -1, -1)]
        names = ("comm_group", "op", "one", "other")
        return {name: np.array(column, object) for name, column in zip(names, zip(*rows, strict=True), strict=True)}

    assert transfers.chunks(query, {}, np.arange(10)) == is_reported


@pytest.mark.parametrize("steps", [24, 60])
@pytest.mark.parametrize(("bytes_known", "computes_longer"), [(True, False), (False, True)])
def test_more_that_is_sent_is_no_slow_link(steps: int, bytes_known: bool, computes_longer: bool) -> None:
    """Longer sequences from the middle on. The first steps that are read have some of them."""
    job = Network(8, steps=steps)
    job.link[:, steps // 2 :] = 1.5
    assert [found.ranks for found in job.slow_links()] == [list(range(8))]
    if bytes_known:
        job.sent[steps // 2 :] = 3 << 23
    else:
        job.sent[:] = 0
    if computes_longer:
        job.slow(list(range(8)), 1.5, steps // 2)
    assert job.slow_links() == []


@pytest.mark.parametrize("more", [False, True])
def test_what_is_sent_in_one_of_three_steps(more: bool) -> None:
    """Gradients that are accumulated."""
    job = Network(8, steps=90)
    job.every = 3
    job.link[:, 45:] = 1.5
    job.sent[45:] += more << 23
    assert [found.ranks for found in job.slow_links()] == ([] if more else [list(range(8))])
