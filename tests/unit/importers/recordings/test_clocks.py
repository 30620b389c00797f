"""Clocks, hosts and phases of imported recordings, on made-up jobs whose clocks and faults are known."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from argus.cli.main import main
from argus.diagnose.iteration.short import find_short_regression
from argus.importers import kineto
from argus.importers.recordings.clocks import AGREE_NS, compare_clocks, find_hosts, host_in_path, hosts_given
from argus.importers.recordings.groups import find_communicators
from argus.importers.recordings.phases import phases_of
from argus.importers.recordings.recording import Recording
from argus.importers.recordings.steps import find_all_steps
from argus.model.errors import ArgusError
from argus.model.units import UNKNOWN_HOST
from argus.semantics.phases.cpu import PHASES
from argus.store.open import Store
from tests.builders.kineto_job import Job, make, right

SMALL = Job(dp=4, steps=4, layers=2)


def read(job: Job, folder: Path) -> list[Recording]:
    return [kineto.read(path, rank) for rank, path in enumerate(make(job, folder))]


def placed(recordings: list[Recording]) -> tuple[dict[int, float], list[str], list[str]]:
    """(clock of each rank against rank 0's, us; hosts; what is reported)."""
    clocks = compare_clocks(recordings)
    notes = find_hosts(recordings, clocks)
    return {rank: clock.offset_ns / 1000 for rank, clock in clocks.items()}, [r.host for r in recordings], notes


@pytest.mark.parametrize(
    "job",
    [
        replace(SMALL, names="rank"),
        replace(SMALL, names="same"),
        replace(SMALL, names="number", described=False, version="1.13"),
        replace(SMALL, names="number", annotated=False),
        replace(SMALL, dp=2, tp=2, seq=True, version="2.6"),
        replace(SMALL, dp=1, pp=4, layers=4, described=False, version="2.0"),
    ],
    ids=["named by files", "one host name", "no arguments", "no steps", "numbers", "transfers"],
)
def test_clocks_are_known_from_collectives_alone(tmp_path: Path, job: Job) -> None:
    """0.3 ms apart: four hosts, whatever the recordings say of them; and one host where clocks agree."""
    found, hosts, notes = placed(read(replace(job, hosts=4, apart_us=300.0), tmp_path / "apart"))
    random = np.random.default_rng(99)
    offset = random.uniform(-300, 300, 4)
    offset[0], offset[-1] = 150, -150
    assert found == pytest.approx({rank: offset[0] - offset[rank] for rank in range(4)}, abs=5)
    differ = {round(one / (AGREE_NS / 1000)) for one in offset}
    assert len(set(hosts)) >= len(differ) - 1 > 1
    assert "whose ends scatter by" in notes[-1]
    assert "argus diagnose allows for it, and says how far off they are at most" in notes[-1]
    found, hosts, notes = placed(read(job, tmp_path / "one"))
    assert found == pytest.approx(dict.fromkeys(range(4), 0.0), abs=5)
    assert set(hosts) == {"worker" if job.names == "same" else UNKNOWN_HOST}
    assert not notes


def test_ranks_that_share_no_collective_are_hosts_of_their_own(tmp_path: Path) -> None:
    recordings = read(replace(SMALL, dp=1, steps=3), tmp_path / "a") + read(
        replace(SMALL, dp=1, steps=3), tmp_path / "b"
    )
    recordings[1].rank = 1
    found, hosts, notes = placed(recordings)
    assert found == {0: 0.0}
    assert hosts == ["host-of-rank-0", "host-of-rank-1"]
    assert any("no collective shows how the clock of rank 1 differs" in note for note in notes)


def test_a_name_is_believed_where_nothing_contradicts_it(tmp_path: Path) -> None:
    recordings = [*read(replace(SMALL, dp=1), tmp_path / "a"), *read(replace(SMALL, dp=1), tmp_path / "b")]
    recordings[1].rank = 1
    for each in recordings:
        each.host = "node7"
    recordings[1].ops["device"] = 1
    assert placed(recordings)[1] == ["node7", "node7"]
    for each in recordings:
        each.host = "node7"
    recordings[1].ops["device"] = recordings[0].ops["device"][0]
    assert placed(recordings)[1] == ["node7", "node7.rank-1"], "two recordings of one GPU are of two hosts"


def test_gpus_that_are_used_twice_are_of_two_hosts_although_clocks_agree(tmp_path: Path) -> None:
    recordings = read(replace(SMALL, hosts=2, names="same"), tmp_path)
    _, hosts, notes = placed(recordings)
    assert hosts == ["worker", "worker", "worker.rank-2", "worker.rank-2"]
    assert notes == ["4 ranks name their host 'worker', but clocks or GPUs are those of 2 hosts"]
    for each in recordings:
        each.host = "worker"
        each.ops["device"] = 0
    assert placed(recordings)[1] == ["worker"] * 4, "each rank sees only its own GPU"


@pytest.mark.parametrize(
    ("path", "host"),
    [
        ("/data/node-3/rank24.json.gz", "node-3"), ("/data/traces/rank24.json", ""), ("/d/host12_rank3.json", "host12"),
        ("/d/gpu-a17_1234.1735689600123.pt.trace.json", "gpu-a17"), ("/d/train-pod-4/trace.json", "pod-4"),
        ("/d/a_1.2.pt.trace.json.gz", "a"), ("/d/worker_3.json", ""),
    ],
)  # fmt: skip
def test_hosts_in_paths(path: str, host: str) -> None:
    assert host_in_path(path) == host


def test_hosts_that_the_user_gives(tmp_path: Path) -> None:
    recordings = [Recording(f"/d/n{rank // 2}/r{rank}.json", "kineto", rank, "trace", 1) for rank in range(4)]
    assert hosts_given(["0-1=a", "3=b"], recordings) == {0: "a", 1: "a", 3: "b"}
    assert hosts_given([r"/(n\d)/"], recordings) == {0: "n0", 1: "n0", 2: "n1", 3: "n1"}
    assert hosts_given(["0,2-9=c"], recordings) == {0: "c", 2: "c", 3: "c"}
    for wrong in ("7=a", "(", "abc", "x(y)", "1-2-3=a"):
        with pytest.raises(ArgusError, match="--host-of"):
            hosts_given([wrong], recordings)
    for twice in (["0-2=a", "2-3=b"], ["0-2=a", "1=b", "3=c"], ["1,1-2=a", "(n\\d)", "2=b"]):
        with pytest.raises(ArgusError, match=r"--host-of \S+: ranks? [12] is on a by another --host-of"):
            hosts_given(twice, recordings)
    # What says the same twice is no contradiction, and numbers may correct a pattern.
    assert hosts_given(["0-2=a", "2-3=a"], recordings) == dict.fromkeys(range(4), "a")
    assert hosts_given([r"/(n\d)/", "3=b"], recordings) == {0: "n0", 1: "n0", 2: "n1", 3: "b"}
    find_hosts(recordings, {}, {0: "a", 1: "a", 2: "b", 3: "b"})
    assert [each.host for each in recordings] == ["a", "a", "b", "b"]


def test_phases_of_annotations(tmp_path: Path) -> None:
    """A rank 7 ms late in its data loader: the phases have it, and those of each step add up to it."""
    recordings = read(replace(SMALL, fault="loader", much=7.0, victim=2), tmp_path)
    steps = find_all_steps(recordings, find_communicators(recordings))
    loading = []
    for each in recordings:
        rows = steps[each.rank].rows
        found, _ = phases_of(each, rows)
        for step, duration in zip(rows["step"].tolist(), rows["duration_ns"].tolist(), strict=True):
            assert found["duration_ns"][found["step"] == step].sum() == duration
        spent = {name: found["duration_ns"][found["phase"] == code] for code, name in enumerate(PHASES)}
        assert all(len(spent[name]) == 4 for name in ("data_loading", "forward", "backward", "optimizer"))
        loading.append(float(np.median(spent["data_loading"])) / 1e6)
    assert loading[2] == pytest.approx(8.0, abs=0.4)
    assert max(loading[:2] + loading[3:]) < 1.2


def test_phases_of_what_people_name(tmp_path: Path) -> None:
    recording = read(replace(SMALL, dp=1), tmp_path)[0]
    rows = find_all_steps([recording], find_communicators([recording]))[0].rows
    begin = rows["ts_ns"].astype(np.int64).tolist()
    recording.engine = recording.engine[:0]
    recording.ranges = [
        (name, at + a, at + b, 1)
        for at in begin
        for name, a, b in (
            ("## data loading ##", 1000, 101_000),
            ("my_forward", 101_000, 301_000),
            ("backward", 301_000, 801_000),
            ("optimizer step", 801_000, 901_000),
            ("something", 0, 900_000),
            ("save_checkpoint", 901_000, 931_000),
        )
    ]
    for at in begin:
        recording.ranges += [("async save", at + 1000 * part, at + 1000 * (part + 1), 2) for part in range(8)]
    found, _ = phases_of(recording, rows)
    spent = {PHASES[code]: found["duration_ns"][found["phase"] == code].tolist() for code in range(len(PHASES))}
    assert [spent[name][0] for name in ("data_loading", "forward", "backward", "optimizer", "checkpoint")] == [
        100_000, 200_000, 500_000, 100_000, 30_000,
    ]  # fmt: skip
    recording.ranges = [("something", at, at + 500_000, 1) for at in begin]
    assert not len(phases_of(recording, rows)[0]), "nothing names a phase"


@pytest.mark.parametrize(("before", "after", "factor", "found"), [
    (8, 16, 1.3, True), (4, 12, 1.3, True), (8, 16, 1.0, False), (3, 20, 1.3, False), (8, 16, 1.05, False),
])  # fmt: skip
def test_a_change_in_a_short_recording(before: int, after: int, factor: float, found: bool) -> None:
    random = np.random.default_rng(3)
    level = np.concatenate([np.full(before, 50e6), np.full(after, 50e6 * factor)])
    durations = level * (1 + 0.01 * random.standard_normal(len(level)))
    compute = level * 0.8 * (1 + 0.01 * random.standard_normal((4, len(level))))
    regression = find_short_regression(durations, compute)
    assert (regression is not None) == found
    if regression is not None:
        assert regression.index == before
        assert regression.confidence == pytest.approx(0.9 * min(before, after) / (min(before, after) + 1), abs=0.01)
    flat = np.full((4, len(level)), 40e6) * (1 + 0.01 * random.standard_normal((4, len(level))))
    assert find_short_regression(durations, flat) is None, "kernels do not say the same"


@pytest.fixture(scope="module")
def url(shared: Store) -> str:
    return shared.url


def verdict(job: Job, name: str, folder: Path, url: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    make(job, folder)
    assert main(["import", "kineto", str(folder), "--job", name, "--store", url]) == 0
    capsys.readouterr()
    main(["diagnose", "--job", name, "--store", url, "--format", "json", "--no-store"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


APART = Job(dp=4, steps=12, layers=4, hosts=4, apart_us=300.0)


@pytest.mark.thorough(first=1)
@pytest.mark.parametrize(
    "job",
    [
        APART,
        replace(APART, fault="loader", much=7.0, copies=False),
        replace(APART, fault="gpu", much=1.4),
        replace(APART, fault="stall", much=8.0, names="same"),
        replace(APART, fault="regression", onset=8, steps=24),
        replace(APART, fault="loader", much=7.0, hosts=1, apart_us=0.0, version="1.13"),
    ],
    ids=["healthy", "loader", "gpu", "stall", "regression", "loader on one host"],
)
def test_faults_on_clocks_that_differ(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str], job: Job, request: pytest.FixtureRequest
) -> None:
    found = verdict(job, request.node.callspec.id, tmp_path, url, capsys)
    assert not right(job, found), found
    if job.fault == "healthy":
        assert f"in {job.steps} steps a change may have been missed unless" in found["reason"]


@pytest.mark.thorough
def test_a_checkpoint_of_one_rank_is_the_phase_of_its_finding(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = replace(APART, fault="optimizer", much=25.0)
    for path in make(job, tmp_path):
        text = gzip.decompress(path.read_bytes()).replace(b"Optimizer.step#AdamW.step", b"save_checkpoint")
        path.write_bytes(gzip.compress(text))
    assert main(["import", "kineto", str(tmp_path), "--job", "checkpoint", "--store", url]) == 0
    capsys.readouterr()
    main(["diagnose", "--job", "checkpoint", "--store", url, "--format", "json", "--no-store"])
    (one,) = json.loads(capsys.readouterr().out)["findings"]
    assert (one["ranks"], one["phase"]) == ([job.victim], "checkpoint")
    assert any("ms a step in checkpoint, the others" in cited["text"] for cited in one["evidence"])
    assert "saves checkpoints in steps in which the others do not" in one["action"]


@pytest.mark.thorough
def test_a_gpu_whose_matrix_products_are_slow_in_three_steps(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = replace(APART, dp=4, fault="gemm", steps=3, much=1.3)
    (one,) = verdict(job, "gemm", tmp_path, url, capsys)["findings"]
    assert (one["kind"], one["ranks"], len(one["kernels"])) == ("compute_straggler", [3], 3)
    assert all("gemm" in name for name in one["kernels"])
    assert one["confidence"] == pytest.approx(0.6)


@pytest.mark.thorough(first=1)
@pytest.mark.parametrize("fault", ["gpu", "healthy"])
def test_recordings_of_few_steps(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str], fault: str) -> None:
    job = replace(APART, fault=fault, steps=5, much=1.4)
    found = verdict(job, f"few-{fault}", tmp_path, url, capsys)
    if fault == "gpu":
        (one,) = found["findings"]
        assert (one["kind"], one["ranks"]) == ("compute_straggler", [3])
        assert one["confidence"] == pytest.approx(0.75)
        assert "in each of the 5 steps" in one["evidence"][0]["text"]
    else:
        assert found["status"] == "inconclusive"
        assert not found["findings"]
        assert "kernels of ranks with the same work take equally long" in found["reason"]
    assert "5 whole steps were seen, 10 are needed" in found["reason"]


@pytest.mark.thorough
@pytest.mark.parametrize("victim", [0, 3])
def test_a_slow_link_of_groups_that_only_send_and_receive(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str], victim: int
) -> None:
    """The pipelines' groups have no collective, and PyTorch names peers by their global ranks."""
    job = Job(dp=2, pp=4, steps=12, layers=4, microbatches=8, fault="pipe", victim=victim, much=6.0, seed=victim)
    found = verdict(job, f"pipe{victim}", tmp_path, url, capsys)
    assert [(one["kind"], one["ranks"]) for one in found["findings"][:1]] == [
        ("link_degradation", [victim, victim + 2])
    ], found


def test_stalls_of_each_step_may_differ(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(dp=4, steps=5, layers=4, fault="stall", much=6.0, uneven=0.55)
    found = verdict(job, "uneven", tmp_path, url, capsys)
    assert not right(job, found), found


@pytest.mark.thorough
@pytest.mark.parametrize("steps", [12, 5])
def test_a_slow_gpu_that_is_alone_in_its_stage(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str], steps: int
) -> None:
    """Its kernels are those of the other stages, as many and longer: a slow GPU, not more layers."""
    job = replace(APART, dp=1, pp=4, layers=8, microbatches=8, fault="gpu", victim=1, much=1.35, steps=steps)
    found = verdict(job, f"stage-{steps}", tmp_path, url, capsys)
    (one,) = found["findings"]
    assert (one["kind"], one["ranks"]) == ("compute_straggler", [1])
    assert "other stages" in " ".join(each["text"] for each in one["evidence"])
