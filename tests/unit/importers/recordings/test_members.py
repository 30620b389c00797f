"""Who is in communicators that recordings do not name: ranks whose collectives end together."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from argus.cli.main import main
from argus.importers import kineto
from argus.importers.recordings.groups import find_communicators
from argus.importers.recordings.members import divide, infer_members
from argus.store.open import Store
from tests.builders.kineto_job import Job, make, right

US = 1000.0


def scatter(parts: list[list[int]], within: float, between: float) -> np.ndarray:
    """Of each pair, ns."""
    many = sum(map(len, parts))
    out = np.full((many, many), between * US)
    for part in parts:
        out[np.ix_(part, part)] = within * US
    np.fill_diagonal(out, np.inf)
    return out


@pytest.mark.parametrize("parts", [[[0, 1, 2, 3]], [[0, 2], [1, 3]], [[0, 4], [1, 5], [2, 6], [3, 7]]])
def test_parts_of_equal_size_whose_members_end_together(parts: list[list[int]]) -> None:
    assert divide(scatter(parts, 1.5, 25.0)) == parts


@pytest.mark.parametrize(
    ("parts", "within", "between"),
    [([[0, 1], [2, 3]], 15.0, 25.0), ([[0, 1, 2], [3, 4]], 1.0, 50.0), ([[0], [1], [2]], 1.0, 50.0),
     ([[0, 1], [2, 3]], 30.0, 200.0), ([[0, 1], [2, 3]], np.inf, np.inf)],
    ids=["hardly closer", "unequal", "alone", "far apart", "not compared"],
)  # fmt: skip
def test_no_parts(parts: list[list[int]], within: float, between: float) -> None:
    assert divide(scatter(parts, within, between)) == []


def test_a_rank_close_to_two_parts_is_not_clear() -> None:
    values = scatter([[0, 1], [2, 3]], 1.0, 50.0)
    values[1, 2] = values[2, 1] = 1.0
    assert divide(values) == []


@pytest.mark.thorough(first=1)
@pytest.mark.parametrize("clocks", [0.0, 300.0], ids=["one clock", "clocks apart"])
@pytest.mark.parametrize(("version", "described"), [("1.13", False), ("2.0", True), ("2.6", False)])
@pytest.mark.parametrize(("dp", "tp"), [(4, 2), (2, 4), (8, 1)])
def test_ranks_of_a_mesh(tmp_path: Path, dp: int, tp: int, version: str, described: bool, clocks: float) -> None:
    job = Job(
        dp=dp, tp=tp, steps=12, layers=4, version=version, described=described, hosts=8, apart_us=clocks,
        drift_ppm=clocks and 10.0, seed=dp * tp,
    )  # fmt: skip
    recordings = [kineto.read(path, rank) for rank, path in enumerate(make(job, tmp_path))]
    inferred = infer_members(recordings)
    expected = {kind: job.groups(kind) for kind, size in (("dp", dp), ("tp", tp)) if size > 1}
    parts = {member.membership.name.split("/")[1] for member in inferred.values()}
    assert parts == {",".join(map(str, group)) for groups in expected.values() for group in groups}
    assert all(member.membership.size == len(member.membership.name.split(",")) for member in inferred.values())
    assert {member.offset for member in inferred.values()} == {0}


def test_one_communicator_of_all_and_some_of_two_with_equal_calls(tmp_path: Path) -> None:
    """Pipelines of two ranks a stage: gradients among those, then a norm among all; sizes are not recorded."""
    job = Job(dp=2, tp=4, steps=12, layers=4, version="2.0", described=False)
    recordings = [kineto.read(path, rank) for rank, path in enumerate(make(job, tmp_path))]
    ends = recordings[0].marks["end_ns"]
    for each in recordings:
        comms = each.collectives["comm"]
        gradients = next(comm for comm in np.unique(comms).tolist() if comm not in np.unique(comms[:4]).tolist())
        places = np.flatnonzero(comms == gradients)
        last = np.searchsorted(each.collectives["ts_ns"][places], each.marks["end_ns"]) - 1
        rows, gpu_end = each.collectives[places[last]].copy(), each.gpu_end[places[last]]
        rows["seq"] = np.arange(12)
        norm = rows.copy()
        norm["comm"] += 1
        norm["ts_ns"] += 1
        each.collectives = np.concatenate([rows, norm])
        each.gpu_end = np.concatenate([gpu_end, ends])
        each.numbers = np.full(24, -1)
    parts = {member.membership.name.split("/")[1] for member in infer_members(recordings).values()}
    assert parts == {"0,1,2,3,4,5,6,7", *(",".join(map(str, group)) for group in job.groups("dp"))}


def test_calls_that_a_recording_began_with_are_counted(tmp_path: Path) -> None:
    job = Job(dp=4, steps=5, layers=4, version="2.0", described=False, annotated=False)
    recordings = [kineto.read(path, rank) for rank, path in enumerate(make(job, tmp_path))]
    late = recordings[2]
    kept = late.collectives["ts_ns"] > late.collectives["ts_ns"][0]
    late.collectives, late.gpu_end, late.numbers = (
        values[kept] for values in (late.collectives, late.gpu_end, late.numbers)
    )
    late.collectives["seq"] -= 1
    inferred = infer_members(recordings)
    assert [inferred[rank, comm].offset for rank, comm in sorted(inferred)] == [0, 0, 1, 0]


def test_what_was_inferred_is_counted(tmp_path: Path) -> None:
    job = Job(dp=4, tp=2, steps=12, layers=4, version="2.6", described=False)
    recordings = [kineto.read(path, rank) for rank, path in enumerate(make(job, tmp_path / "unnamed"))]
    find_communicators(recordings)
    assert [each.counters["communicators_inferred"] for each in recordings] == [2] * 8
    recordings = [
        kineto.read(path, rank) for rank, path in enumerate(make(replace(job, described=True), tmp_path / "named"))
    ]
    find_communicators(recordings)
    assert not any(each.counters["communicators_inferred"] for each in recordings)


def test_ends_that_make_no_sense_are_no_communicator_and_no_error(tmp_path: Path) -> None:
    job = Job(dp=4, steps=12, layers=4, version="2.0", described=False)
    recordings = [kineto.read(path, rank) for rank, path in enumerate(make(job, tmp_path))]
    half = len(recordings[0].gpu_end) // 2
    recordings[0].gpu_end[:] = recordings[0].gpu_end[0]
    recordings[1].gpu_end[:half] = 0
    recordings[2].gpu_end[:] = -1
    recordings[3].gpu_end[::2] = (1 << 63) - 1
    assert infer_members(recordings) == {}


@pytest.mark.thorough
@pytest.mark.parametrize("fault", ["link", "healthy"])
@pytest.mark.parametrize("hosts", [1, 8])
def test_slow_links_of_communicators_that_nobody_names(
    tmp_path: Path, shared: Store, fault: str, hosts: int, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(
        dp=4, tp=2, steps=24, layers=8, fault=fault, victim=6, much=3.0, hosts=8, apart_us=300.0, version="2.0",
        names="same", seed=632515062,
    )  # fmt: skip
    if hosts == 1:
        job = replace(job, hosts=1, apart_us=0.0)
    make(job, tmp_path / "traces")
    stored = ["--job", f"{fault} {hosts}", "--store", shared.url]
    assert main(["import", "kineto", str(tmp_path / "traces"), *stored]) == 0
    capsys.readouterr()
    main(["diagnose", "--format", "json", *stored])
    assert right(job, json.loads(capsys.readouterr().out)) == ""
