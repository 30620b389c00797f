"""Boundaries of a pipeline of one rank a stage: which of them is slow, and which only is of another kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from argus.diagnose.case import Case
from argus.diagnose.detector import Entry, ask
from argus.diagnose.iteration import growth
from argus.diagnose.ranks import layout, stage_links
from argus.diagnose.read import queries
from argus.diagnose.suspect import Suspect
from tests.unit.diagnose.ranks.test_links import Network
from tests.unit.diagnose.ranks.test_slow_gpus import MS, Cluster

OWN, SHARED, MIXED = "abcd", "aaaa", "abbc"
"""Hosts of four ranks: one each, one for all, two of them on one."""


def found(cluster: Cluster, hosts: str) -> list[Suspect]:
    case = cluster.case()
    case.hosts = dict(enumerate(hosts))
    return stage_links.detect(case)


@pytest.mark.parametrize(("hosts", "boundary", "named"), [
    (OWN, 0, [0, 1]), (OWN, 2, [2, 3]), (SHARED, 1, [1, 2]),
    # One inside a host is no slower than those between hosts; one of two between hosts has one like it alone.
    (MIXED, 1, [1, 2]), (MIXED, 0, []),
])  # fmt: skip
def test_the_slow_boundary_is_named(hosts: str, boundary: int, named: list[int]) -> None:
    cluster = Cluster(1, pp=4)
    assert found(cluster, hosts) == []
    cluster.transfer_ns[boundary] = 1 * MS
    assert [one.ranks for one in found(cluster, hosts)] == ([named] if named else [])


def test_what_a_slow_boundary_costs() -> None:
    cluster = Cluster(1, pp=4)
    cluster.transfer_ns[1] = 0.6 * MS
    (one,) = found(cluster, OWN)
    assert one.kind == "link_degradation"
    assert one.lost_ns == pytest.approx(16 * 0.5 * MS)
    # It is no longer than what its ranks spend in transfers.
    cluster.transfer_ns[1] = 9 * MS
    case = cluster.case()
    assert case.gpus is not None
    exposed = np.median(case.gpus.now.collective + case.gpus.now.pipeline, axis=1)[1:3].max()
    assert found(cluster, OWN)[0].lost_ns == pytest.approx(exposed, rel=0.01)


def test_steps_that_are_longer_since_a_boundary_is_slow_are_no_second_loss() -> None:
    cluster = Cluster(1, pp=4)
    cluster.transfer_ns[1], cluster.transfers_since = 1 * MS, 30
    case = cluster.case()
    case.hosts = dict(enumerate(OWN))
    longer = np.where(case.numbers >= 30, 14 * MS, 0.0)
    case.durations = case.durations + longer
    assert case.gpus is not None
    for times in (case.gpus.now, case.gpus.before):
        assert times is not None
        times.pipeline[:] += longer[times.steps]
    ask([Entry("stage_links", stage_links), Entry("growth", growth)], case)
    (one,) = case.suspects
    assert (one.kind, one.ranks, one.since) == ("link_degradation", [1, 2], 30)
    assert one.lost_ns == pytest.approx(14 * MS, rel=0.05)


def test_a_small_difference_or_a_small_cost_is_no_finding() -> None:
    cluster = Cluster(1, pp=4)
    cluster.transfer_ns[1] = 0.19 * MS
    assert found(cluster, OWN) == []
    cluster.transfer_ns[:] = 0.01 * MS, 0.1 * MS, 0.01 * MS
    assert found(cluster, OWN) == []


def test_stages_of_several_ranks_are_not_read() -> None:
    """Of 10,240 ranks there would be thousands of boundaries to compare with one another."""
    case = Cluster(2, pp=4).case()
    del case.query
    assert stage_links.detect(case) == []


def test_boundaries_that_differ_are_not_alike() -> None:
    cluster = Cluster(1, pp=4)
    assert "transfers between them take equally long" in layout.stages_alike(cluster.case())
    cluster.transfer_ns[1] = 0.21 * MS
    assert layout.stages_alike(cluster.case()) == ""
    two = Cluster(1, pp=2)
    assert layout.stages_alike(two.case()) == ""


def test_waits_for_nobody_knows_whom() -> None:
    """Where communicators are not known, all ranks may have the same work as well."""
    case = Cluster(4).case()
    assert case.gpus is not None
    assert layout.unknown_partners(case) == ""
    case.gpus.now.pipeline[:] = 0.6 * case.gpus.now.step
    assert "between which ranks those are is not known" in layout.unknown_partners(case)


class OneCommunicator(Network):
    """A pipeline of one rank a stage whose stages hand on in one communicator, as in Megatron-LM and with
    ``batch_isend_irecv``: it is known who sends to whom."""

    def query(self, text: str, params: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        rows = super().query(text, params)
        if text == queries.STAGE_TRANSFERS:
            rows["comm"] = np.full(len(rows["comm"]), 100)
        return rows

    def job(self) -> Case:
        case = super().job()
        case.hosts = dict(enumerate(SHARED))
        return case


def test_stages_that_hand_on_in_one_communicator_are_compared() -> None:
    pipeline = OneCommunicator(1, pp=4)
    pipeline.only = ("pp",)
    assert stage_links.detect(pipeline.job()) == []
    assert "transfers between them take equally long" in layout.stages_alike(pipeline.job())
    pipeline.link[0] = 5.0
    (one,) = stage_links.detect(pipeline.job())
    assert (one.kind, one.ranks) == ("link_degradation", [0, 1])
    assert "on the 2 other boundaries of the pipeline, 8 times a step" in one.evidence[0]["text"]
    assert "gpu_collectives" in one.evidence[0]["sql"]
    assert "least(m.comm_rank, g.peer)" in one.evidence[0]["sql"]
    assert layout.stages_alike(pipeline.job()) == ""
    assert one.since == 0
    later = OneCommunicator(1, pp=4)
    later.only = ("pp",)
    later.link[0, later.steps // 2 :] = 5.0
    (one,) = stage_links.detect(later.job())
    assert (one.ranks, one.since) == ([0, 1], later.steps // 2)
