"""Groups of recordings that only send and receive, and the places of peers in them."""

from __future__ import annotations

import numpy as np
import pytest

from argus.importers import kineto
from argus.importers.recordings import groups
from argus.importers.recordings.collectives import _rank_in_group
from argus.importers.recordings.recording import Recording
from argus.semantics.groups.communicators import COMMUNICATOR
from tests.builders.kineto_job import Job, make

CUT = "[" + ", ".join(map(str, range(29))) + ", ..., 63]"
EVEN = "[" + ", ".join(map(str, range(0, 58, 2))) + ", ..., 126]"


@pytest.mark.parametrize(
    ("rank", "ranks", "size", "place"),
    [
        (3, "[1, 3, 5, 7]", 4, 1), (2, "[1, 3, 5, 7]", 4, -1), (40, CUT, 64, 40), (63, CUT, 64, 63), (64, CUT, 64, -1),
        (6, EVEN, 64, 3), (126, EVEN, 64, 63), (80, EVEN, 64, -1), (126, EVEN, -1, -1),
    ],
)  # fmt: skip
def test_a_peer_is_its_place_in_the_group(rank: int, ranks: str, size: int, place: int) -> None:
    assert _rank_in_group(rank, ranks, size) == place


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> list[Recording]:
    job = Job(dp=2, pp=4, steps=4, layers=4, microbatches=8)
    return [kineto.read(path, rank) for rank, path in enumerate(make(job, tmp_path_factory.mktemp("pipeline")))]


def test_groups_of_transfers_alone_have_rows(pipeline: list[Recording]) -> None:
    rows = groups.find_communicators(pipeline)
    assert (rows[["rank", "comm"]] == np.sort(rows[["rank", "comm"]])).all()
    assert len(np.unique(rows[["rank", "comm"]])) == len(rows)
    # Each of eight ranks is in a data-parallel group of two and a pipeline of four stages.
    assert sorted(rows["nranks"].tolist()) == [2] * 8 + [4] * 8
    assert not (rows["error"] != "").any()


def test_groups_whose_collectives_are_not_lined_up_have_none(
    pipeline: list[Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row would say that their calls are numbered alike."""
    monkeypatch.setattr(groups, "find_groups", lambda known: np.empty(0, COMMUNICATOR))
    rows = groups.find_communicators(pipeline)
    for each in pipeline:
        with_collectives = set(
            each.collectives["comm"][~np.isin(each.collectives["call"], groups.POINT_TO_POINT)].tolist()
        )
        found = set(rows["comm"][rows["rank"] == each.rank].tolist())
        assert len(found) == 1
        assert not found & with_collectives
