"""Dumps of PyTorch's flight recorder: what is stored of them, which ranks are named, and what is refused."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import pickletools
import random
import re
from collections import Counter as Tally
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argus.cli.main import main
from argus.diagnose.verdict import json_schema
from argus.importers import rows
from argus.importers.dumps import dumps, flight_recorder, moments, plain_pickle
from argus.importers.rows import ImportReport
from argus.model.errors import ArgusError
from argus.store.arrow import to_arrow
from argus.store.open import open_store
from argus.store.reader import query_columns
from tests.builders import flight_dumps
from tests.builders.flight_dumps import Fault, run
from tests.stores import stored

DATA = Path(os.environ.get("ARGUS_REFERENCE_DATA", Path(__file__).parents[5] / "shared" / "data")) / "flight-recorder"
CASES = int(os.environ.get("ARGUS_FUZZ_CASES", "500"))
VERSIONS = ("2.0", "2.1", "2.2", "2.3", "2.4", "2.9", "2.10")


def verdict(url: str, job: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    main(["diagnose", "--job", job, "--format", "json", "--store", url])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, json_schema())
    with open_store(url) as store:
        for finding in found["findings"]:
            for evidence in finding["evidence"]:
                assert len(next(iter(query_columns(store, evidence["sql"]).values()))), evidence["sql"]
    return found


def imported(folder: Path, url: str, job: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["import", "flight-recorder", str(folder), "--job", job, "--store", url]) == 0
    return verdict(url, job, capsys)


def texts(found: dict[str, Any]) -> str:
    return "\n".join(evidence["text"] for finding in found["findings"] for evidence in finding["evidence"])


# ---- real dumps


@pytest.mark.parametrize("name", ["gpu_error_1st", "lock_gil_1st"])
def test_both_ranks_of_each_real_hang_are_named(name: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = DATA / name
    if not folder.is_dir():
        pytest.skip(f"the published dumps are not at {DATA} (ARGUS_REFERENCE_DATA)")
    faults = re.search(r"Fault ranks: \[([\d, ]+)\]", (folder / "fault_injection.log").read_text())
    assert faults is not None
    found = imported(folder, url, name, capsys)
    assert found["status"] == "hung"
    (finding,) = found["findings"]
    assert finding["ranks"] == [int(rank) for rank in faults[1].split(",")]
    assert finding["confidence"] == 0.9
    # What they called is not in these dumps with its lines, so that nothing shows whose a lock is that is held.
    assert finding["owner"] == ("infrastructure" if name.startswith("gpu") else "platform")
    assert set(finding["ranks"]) & set(finding["collective"]["missing"])


@pytest.mark.thorough(first=2)
@pytest.mark.parametrize("name", ["gpu_error_1st", "lock_gil_1st"])
@pytest.mark.parametrize("without", [slice(0, 1), slice(1, 2), slice(0, 2)])
def test_ranks_at_fault_that_left_no_dump_are_named(
    name: str, without: slice, tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As if they had been killed."""
    folder = DATA / name
    if not folder.is_dir():
        pytest.skip(f"the published dumps are not at {DATA} (ARGUS_REFERENCE_DATA)")
    faults = [int(rank) for rank in re.findall(r"Rank (\d+), fault_type", (folder / "fault_injection.log").read_text())]
    for path in folder.glob("_dump_*"):
        if int(path.name.removeprefix("_dump_")) not in faults[without]:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    found = imported(tmp_path, url, f"{name}-{without.start}{without.stop}", capsys)
    named = [rank for finding in found["findings"] for rank in finding["ranks"]]
    assert (found["status"], sorted(named)) == ("hung", faults), texts(found)
    for finding in found["findings"][1:]:
        assert set(finding["ranks"]) <= set(faults[without])
        assert finding["confidence"] == 0.5


@pytest.mark.parametrize("name", ["gpu_error_1st", "lock_gil_1st"])
@pytest.mark.parametrize("missing", [(3, 10), range(8)], ids=["two", "half"])
@pytest.mark.thorough(first=1)
def test_innocent_ranks_without_a_dump_make_nothing_less_sure(
    name: str, missing: Sequence[int], tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that shows the ranks at fault is in the dumps that there are."""
    folder = DATA / name
    if not folder.is_dir():
        pytest.skip(f"the published dumps are not at {DATA} (ARGUS_REFERENCE_DATA)")
    faults = [int(rank) for rank in re.findall(r"Rank (\d+), fault_type", (folder / "fault_injection.log").read_text())]
    for path in folder.glob("_dump_*"):
        if int(path.name.removeprefix("_dump_")) not in missing:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    found = imported(tmp_path, url, f"{name}-innocent-{len(missing)}", capsys)
    assert (found["findings"][0]["ranks"], found["findings"][0]["confidence"]) == (faults, 0.9)
    for other in found["findings"][1:]:
        assert (set(other["ranks"]) <= set(missing), other["confidence"], other["share"]) == (True, 0.5, 0.0)
        assert "may be innocent" in other["evidence"][-1]["text"]
    assert len(found["findings"]) <= 2


def test_what_a_ranks_own_dump_shows_is_sure_without_those_of_others(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hang = run(flight_dumps.job(1, 1, 8), [Fault("cpu", 3, 12)])
    (one,) = imported(flight_dumps.write(tmp_path / "d", hang, absent=(6,)), url, "six is missing", capsys)["findings"]
    assert (one["ranks"], one["confidence"]) == ([3], 0.9)


@pytest.mark.parametrize("dated", [True, False])
def test_without_the_ranks_of_groups_nobody_is_said_to_be_there(
    dated: bool, tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank that did not make the call cannot be missed then."""
    folder = flight_dumps.write(tmp_path / "d", run(flight_dumps.job(1, 1, 4), [Fault("cpu", 1, 10)]))
    latest = 0
    for path in folder.iterdir():
        dump = pickle.loads(path.read_bytes())
        del dump["pg_config"]
        dump["entries"] = [entry for entry in dump["entries"] if entry["state"] != "completed"]
        latest = max([latest, *(entry["time_created_ns"] for entry in dump["entries"])])
        path.write_bytes(pickle.dumps(dump, protocol=2))
    for path in folder.iterdir():
        os.utime(path, ns=(latest, latest + (600 if dated else 86_400 * 365) * 10**9))
    found = imported(folder, url, f"no groups {dated}", capsys)
    said = "the dumps do not list the ranks of their process groups"
    if not dated:
        assert (found["status"], found["findings"]) == ("inconclusive", [])
        assert said in found["reason"]
        assert "nobody is missing" not in found["reason"]
        return
    (finding,) = found["findings"]
    assert (finding["ranks"], finding["confidence"]) == ([], 0.3), texts(found)
    assert said in finding["action"]


def test_pending_transfers_with_unknown_ranks_are_waits(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Format 2.1 does not list the ranks of groups, so that whom a send goes to is not known; rank 4 has none."""
    job = flight_dumps.job(1, 4, 2)
    at = [place for place, item in enumerate(job.programs[4]) if item.op == "send"][6]
    folder = flight_dumps.write(tmp_path / "d", run(job, [Fault("cpu", 4, at)]), "2.1", as_json=True)
    (one,) = imported(folder, url, "unknown ends", capsys)["findings"]
    text = texts({"findings": [one]})
    assert (one["ranks"], one["confidence"]) == ([4], 0.5), text
    assert "ranks 0, 2, 6 wait in a send or a receive, with ranks that the dumps do not list" in text


# ---- what is stored


def test_calls_groups_and_ranks_are_stored(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    hang = run(flight_dumps.job(2, 2, 2), [Fault("dead", 5, 40)])
    found = imported(flight_dumps.write(tmp_path / "d", hang), url, "rows", capsys)
    calls = sum(len(hang.calls[rank]) for rank in range(8) if rank != 5)
    assert stored(url, "SELECT count() FROM dumped_calls WHERE job = 'rows'") == [(calls,)]
    assert stored(url, "SELECT count() FROM collectives WHERE job = 'rows'") == [(calls,)]
    assert stored(url, "SELECT rank, state FROM dumps WHERE job = 'rows' AND state != 'dumped'") == [(5, "absent")]
    assert stored(url, "SELECT world_size, launcher FROM jobs FINAL WHERE job = 'rows'") == [(8, "flight-recorder")]
    groups = stored(
        url, "SELECT dimension, count() FROM parallel_groups FINAL WHERE job = 'rows' GROUP BY 1 ORDER BY 1"
    )
    assert groups == [("dp", 4), ("pp", 4), ("tp", 4), ("world", 1)]
    first = hang.calls[0][0]
    (row,) = stored(
        url, "SELECT op, seq, bytes, dtype, toUnixTimestamp64Nano(ts) FROM collectives WHERE job = 'rows' AND rank = 0 "
        "ORDER BY ts LIMIT 1"
    )  # fmt: skip
    assert row == ("AllGather", 1, 1024 * 8 * 2, "bfloat16", first.at)
    # A call has one number on all ranks of its group.
    (shared,) = stored(
        url, "SELECT max(n) FROM (SELECT uniqExact(rank) AS n FROM collectives_aligned WHERE job = 'rows' AND "
        "op = 'AllReduce' GROUP BY comm_group, aligned_seq)"
    )  # fmt: skip
    assert shared == (7,)
    assert found["findings"][0]["ranks"] == [5]
    assert "there is no dump of rank 5" in found["reason"]


@pytest.mark.thorough(first=2)
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("as_json", [False, True])
def test_every_version_names_the_rank(
    version: str, as_json: bool, tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hang = run(flight_dumps.job(2, 2, 2), [Fault("cpu", 3, 33)], seed=1)
    folder = flight_dumps.write(tmp_path / "d", hang, version, as_json=as_json)
    found = imported(folder, url, f"v{version}{as_json}", capsys)
    assert (found["status"], found["findings"][0]["ranks"]) == ("hung", [3])


@pytest.mark.thorough(first=2)
@pytest.mark.parametrize("kind", ["cpu", "dead", "gpu", "other"])
@pytest.mark.parametrize("active", [False, True])
def test_hangs_of_all_kinds(
    kind: str, active: bool, tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where only what had not completed was dumped, and where the ring was too small for the rest."""
    job = flight_dumps.job(4, 2, 2)
    at = next(place for place, item in enumerate(job.programs[6]) if place > 30 and item.op == "_all_gather_base")
    hang = run(job, [Fault(kind, 6, at)], seed=2)
    folder = flight_dumps.write(tmp_path / "d", hang, active=active, ring=2000 if active else 24)
    found = imported(folder, url, f"{kind}{active}", capsys)
    assert (found["status"], found["findings"][0]["ranks"]) == ("hung", [6]), texts(found)
    if kind == "cpu":
        # The call in which nobody else is missing comes first.
        assert found["findings"][0]["collective"]["missing"] == [6]
        assert "ranks 4, 5, 7 wait in AllGather" in found["findings"][0]["evidence"][0]["text"]
    if kind == "other":
        assert "rank 6 called Broadcast there" in texts(found)
    if kind == "gpu":
        assert "rank 6 stalled in" in texts(found)
    owner = {"gpu": "infrastructure", "dead": "infrastructure", "cpu": "platform", "other": "model"}[kind]
    assert found["findings"][0]["owner"] == owner


@pytest.mark.parametrize("active", [False, True])
@pytest.mark.thorough(first=1)
def test_batches_of_transfers_have_the_state_of_the_batch(
    active: bool, tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """PyTorch never updates what was called inside a batch."""
    job = flight_dumps.job(2, 4, 2)
    well = flight_dumps.write(tmp_path / "well", run(job, []), active=active, batched=True)
    assert imported(well, url, f"well batches {active}", capsys)["status"] == "inconclusive"
    hang = run(job, [Fault("cpu", 6, 60)], seed=3)
    folder = flight_dumps.write(tmp_path / "d", hang, active=active, batched=True)
    guessed = [flight_recorder.read(path).counters["transfers_without_state"] for path in sorted(folder.iterdir())]
    assert any(guessed) == active, "what is guessed is counted"
    found = imported(folder, url, f"batches {active}", capsys)
    assert (found["status"], found["findings"][0]["ranks"]) == ("hung", [6]), texts(found)


def test_a_call_that_its_members_disagree_on_is_shown(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two ranks, either may be wrong; of eight, the one that differs is."""
    job = flight_dumps.job(2, 2, 2)
    at = next(place for place, item in enumerate(job.programs[3]) if place > 30 and item.op == "all_reduce")
    pair = next(place for place, item in enumerate(job.programs[3]) if place > 30 and item.op == "_all_gather_base")
    for name, place, sure in (("two", pair, 0.5), ("eight", at, 0.9)):
        hang = run(job, [Fault("other", 3, place)], seed=1)
        (one,) = imported(flight_dumps.write(tmp_path / name, hang), url, name, capsys)["findings"]
        called = next(each["text"] for each in one["evidence"] if "rank 3 called Broadcast there" in each["text"])
        many = len(job.groups[job.programs[3][place].group][1])
        assert (one["confidence"], one["ranks"]) == ((0.5, [2, 3]) if many == 2 else (sure, [3]))
        assert ("one of them is wrong" in one["action"]) == (many == 2)
        assert (", the others AllReduce" in called) == (many > 2)


@pytest.mark.parametrize("ahead", [True, False])
def test_calls_in_another_order_are_shown(
    ahead: bool, tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 2 of four calls the collectives of two groups the other way round; or waits for the first of them."""
    groups = {"1": ("dp", [0, 1, 2, 3]), "2": ("ep", [0, 1, 2, 3])}
    pair = [flight_dumps.Item("all_reduce", "1"), flight_dumps.Item("all_to_all", "2")]
    wait = [] if ahead else [flight_dumps.Item("sync")]
    programs = {
        rank: pair * 4 + [item for call in (pair[::-1] if rank == 2 else pair) for item in (call, *wait)]
        for rank in range(4)
    }
    folder = flight_dumps.write(tmp_path / "d", run(flight_dumps.Job(groups, programs), []))
    (one,) = imported(folder, url, f"order {ahead}", capsys)["findings"]
    assert (one["ranks"], one["confidence"], one["owner"]) == ([2], 0.9, "model")
    expected = "rank 2 called AlltoAll 5 of ep of ranks 0-3 before AllReduce 5 of dp of ranks 0-3, the others after it"
    if not ahead:
        expected = "rank 2 came to AlltoAll 5 of ep of ranks 0-3 first, the others to AllReduce 5 of dp of ranks 0-3"
    assert one["evidence"][0]["text"] == expected
    ending = ": over all groups, the order must be the same on all ranks."
    if not ahead:
        ending = ", or calls other ones: the ranks' control flow differs."
    assert one["action"] == f"See why rank 2 calls collectives in another order than the others{ending}"


def test_what_one_rank_alone_called_may_be_its_own_fault(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = flight_dumps.job(1, 1, 8)
    last = max(place for place, item in enumerate(job.programs[0]) if item.op != "sync")
    hang = run(job, [Fault("cpu", rank, last) for rank in range(1, 8)])
    (one,) = imported(flight_dumps.write(tmp_path / "d", hang), url, "ahead", capsys)["findings"]
    assert (one["ranks"], one["confidence"]) == (list(range(1, 8)), 0.5)
    assert "or rank 0 made a call that the others do not make" in one["action"]


def test_most_dumps_missing_names_nobody_surely(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    hang = run(flight_dumps.job(1, 1, 8), [Fault("cpu", 5, 12)])
    folder = flight_dumps.write(tmp_path / "d", hang, absent=tuple(range(1, 8)))
    (one,) = imported(folder, url, "one of eight", capsys)["findings"]
    assert one["confidence"] == 0.5
    assert "import the dumps of all ranks" in one["action"]


def test_the_time_of_a_copied_file_is_not_that_of_the_dump(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """All ranks made the call. A day after it, with a timeout of ten minutes: the file was copied."""
    job = flight_dumps.job(1, 1, 4)
    at = next(place for place, item in enumerate(job.programs[0]) if place > 9 and item.op == "all_reduce")
    hang = run(job, [Fault("gpu", rank, at, 1) for rank in range(4)])
    folder = flight_dumps.write(tmp_path / "d", hang)
    latest = max(call.at for calls in hang.calls.values() for call in calls)
    for name, seconds, status in (("copied", 86_400, "inconclusive"), ("dumped", 600, "hung")):
        for path in folder.iterdir():
            os.utime(path, ns=(latest, latest + seconds * 10**9))
        found = imported(folder, url, name, capsys)
        assert found["status"] == status, found


def test_a_file_of_the_time_of_its_only_call_is_judged(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 did not complete what its peers did, nobody waits, and the files have the call's time: it may be any."""
    job = flight_dumps.job(1, 1, 4)
    at = next(place for place, item in enumerate(job.programs[0]) if place > 9 and item.op == "all_reduce")
    folder = flight_dumps.write(tmp_path / "d", run(job, [Fault("gpu", 1, at, 1)]))
    stalled = pickle.loads((folder / "nccl_trace_rank_1").read_bytes())["entries"][-1]
    for path in folder.iterdir():
        dump = pickle.loads(path.read_bytes())
        same = [each for each in dump["entries"] if each["collective_seq_id"] == stalled["collective_seq_id"]
                and each["profiling_name"] == stalled["profiling_name"]]  # fmt: skip
        dump["entries"] = [{**each, "time_created_ns": flight_dumps.T0} for each in same[-1:]]
        del dump["pg_status"]
        path.write_bytes(pickle.dumps(dump, protocol=2))
        os.utime(path, ns=(flight_dumps.T0, flight_dumps.T0))
    found = imported(folder, url, "same time", capsys)
    assert found["status"] == "inconclusive"
    assert "that is not a hang yet" in found["reason"]


def test_dumps_that_were_not_collected_are_reported(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two nodes' dumps only one's: that a rank has none is no reason to name it where another is at fault."""
    hang = run(flight_dumps.job(4, 1, 4), [Fault("cpu", 2, 33)])
    folder = flight_dumps.write(tmp_path / "d", hang, absent=tuple(range(8, 16)))
    found = imported(folder, url, "half", capsys)
    assert (found["status"], found["findings"][0]["ranks"]) == ("hung", [2])
    assert "no dump of ranks 8, 9, 10, 11, 12, 13, 14, 15" in found["reason"]


def test_frames_say_where(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    hang = run(flight_dumps.job(1, 1, 4), [Fault("cpu", 1, 10)])
    folder = tmp_path / "d"
    folder.mkdir()
    for rank in range(4):
        dump = flight_dumps.dump(hang, rank)
        for entry in dump["entries"]:
            entry["frames"] = [
                {"name": "all_reduce", "filename": "/torch/distributed/distributed_c10d.py", "line": 2696},
                {"name": "sync_gradients", "filename": "/app/train.py", "line": 40 + rank},
            ]
        (folder / f"rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))
    found = imported(folder, url, "frames", capsys)
    assert found["findings"][0]["owner"] == "model"
    text = texts(found)
    assert "rank 0 called it in sync_gradients (/app/train.py:40)" in text
    assert "rank 1 made its last recorded call in sync_gradients (/app/train.py:41)" in text


def test_a_job_that_did_not_hang(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    hang = run(flight_dumps.job(2, 2, 2), [])
    for active in (False, True):
        found = imported(flight_dumps.write(tmp_path / str(active), hang, active=active), url, f"well{active}", capsys)
        assert (found["status"], found["findings"]) == ("inconclusive", [])
        assert "no collective was pending when 8 ranks were dumped" in found["reason"]


def test_calls_in_flight_are_no_hang(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A running job whose ranks were dumped on request, right after their last calls."""
    hang = run(flight_dumps.job(1, 1, 4), [Fault("cpu", 1, 10)])
    folder = flight_dumps.write(tmp_path / "d", hang)
    latest = max(call.at for calls in hang.calls.values() for call in calls)
    for path in folder.iterdir():
        os.utime(path, ns=(latest, latest + 10**9))
    found = imported(folder, url, "flight", capsys)
    assert (found["status"], found["findings"]) == ("inconclusive", [])
    assert "that is not a hang yet" in found["reason"]


def test_dumps_of_different_moments_are_no_hang(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    job = flight_dumps.job(1, 1, 4, steps=60)
    early, late = run(job, [Fault("cpu", 3, 20)]), run(job, [Fault("cpu", 3, 200)])
    folder = tmp_path / "d"
    folder.mkdir()
    for rank in range(4):
        dump = flight_dumps.dump(early if rank < 2 else late, rank)
        (folder / f"rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))
    found = imported(folder, url, "moments", capsys)
    assert (found["status"], found["findings"]) == ("inconclusive", [])
    assert "the dumps are not of one moment" in found["reason"]


def broadcasts(op: str, *, first: int = 20) -> flight_dumps.Hang:
    """Rank 3 of four stops; the others complete so many more calls of a kind, then wait for it."""
    items = [flight_dumps.Item("all_reduce", "0")] * 5 + [flight_dumps.Item(op, "0")] * first
    items.append(flight_dumps.Item("all_reduce", "0"))
    groups = {"0": ("default_pg", [0, 1, 2, 3])}
    hang = run(flight_dumps.Job(groups, dict.fromkeys(range(4), items)), [Fault("cpu", 3, 5)])
    for rank in (0, 1, 2):
        for call in hang.calls[rank][:-1]:
            call.completed = True
    return hang


def test_a_rank_that_broadcasts_did_not_wait_for_is_late(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They complete without it, so that they say nothing of when it was dumped."""
    folder = flight_dumps.write(tmp_path / "d", broadcasts("broadcast"))
    (one,) = imported(folder, url, "broadcasts", capsys)["findings"]
    assert (one["ranks"], one["confidence"], one["owner"]) == ([3], 0.9, "platform")
    text = texts({"findings": [one]})
    assert "ranks 0, 1, 2 wait in AllReduce 26 of default_pg of ranks 0-3; rank 3 did not call it" in text
    assert "no dump" not in text
    assert "one moment" not in text


def test_a_dump_of_an_earlier_moment_is_not_called_missing(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = flight_dumps.write(tmp_path / "d", broadcasts("all_reduce"))
    (one,) = imported(folder, url, "earlier", capsys)["findings"]
    text = texts({"findings": [one]})
    assert one["ranks"] == [3]
    assert "ranks 0, 1, 2 wait in AllReduce 26 of default_pg of ranks 0-3; the dump of rank 3 is of an earlier" in text
    assert "rank 3 counts as not dumped" in text
    assert "there is no dump" not in text
    assert one["action"].startswith("Dump rank 3 again: its dump is of an earlier moment")


def two_hangs(folder: Path, older: tuple[int, ...], hours: float, *, empty: tuple[int, ...] = ()) -> Path:
    """Eight ranks, of which rank 2 stopped; the dumps of ``older`` are of a hang so many hours before."""
    hang = run(flight_dumps.job(2, 2, 2), [Fault("cpu", 2, 33)], seed=1)
    folder.mkdir()
    for rank in range(8):
        dump = flight_dumps.dump(hang, rank)
        for entry in dump["entries"]:
            for name in ("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns"):
                if rank in older and entry.get(name):
                    entry[name] -= int(hours * 3600e9)
        if rank in empty:
            dump["entries"] = []
        (folder / f"rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))
    return folder


def test_dumps_of_an_older_hang_are_left_out(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that left no dump this time, but one of an older hang, counts as one without a dump."""
    folder = two_hangs(tmp_path / "d", (2, 5), 8.1, empty=(7,))
    assert main(["import", "flight-recorder", str(folder), "--job", "stale", "--store", url]) == 0
    shown = capsys.readouterr().out
    assert "the dumps of ranks 2, 5 are 8 h 05 min older than the others: left out, as if missing" in shown
    assert "the dump of rank 7 has no call that shows of when: kept" in shown
    assert "dumps of another time 2" in shown
    found = verdict(url, "stale", capsys)
    assert "no dump of ranks 2, 5" in found["reason"]
    assert 2 in found["findings"][0]["ranks"]
    # All of them, where the user knows that clocks differ.
    assert main(["import", "flight-recorder", str(folder), "--any-time", "--job", "all", "--store", url]) == 0
    assert "older" not in capsys.readouterr().out
    # The other way round.
    newer = two_hangs(tmp_path / "n", (0,), -30)
    assert main(["import", "flight-recorder", str(newer), "--job", "n", "--format", "json", "--store", url]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["without_dump"] == [0]
    assert told["notes"] == [
        "the dump of rank 0 is 29 h 59 min newer than the others: left out, as if missing (--any-time keeps all)"
    ]


def test_dumps_of_one_hang_may_be_within_an_hour(tmp_path: Path) -> None:
    """Ranks stop within a timeout of one another; where calls may take long, so may that."""
    dumps_of = [flight_recorder.read(path) for path in sorted(two_hangs(tmp_path / "d", (2, 5), 0.9).iterdir())]
    assert moments.of_one_time(dumps_of) == (dumps_of, [])
    apart = [flight_recorder.read(path) for path in sorted(two_hangs(tmp_path / "e", (2, 5), 3.0).iterdir())]
    assert [dump.rank for dump in moments.of_one_time(apart)[0]] == [0, 1, 3, 4, 6, 7]
    apart[0].calls["timeout_ms"][0] = 2 * 3600 * 1000
    assert moments.of_one_time(apart) == (apart, [])


def test_dumps_half_of_which_are_of_another_hang_are_refused(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = refused(two_hangs(tmp_path / "d", (4, 5, 6, 7), 8.1, empty=(7,)), url, capsys)
    assert "the dumps are of 2 times: ranks 4, 5, 6 stopped at " in shown
    assert "; ranks 0, 1, 2, 3 stopped at " in shown
    assert "Import each hang by itself" in shown


# ---- what is refused


def refused(path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Imports what cannot be; one line comes back, and nothing is stored."""
    capsys.readouterr()
    assert main(["import", "flight-recorder", str(path), "--job", "refused", "--store", url]) in (2, 3)
    output = capsys.readouterr()
    assert output.out == ""
    assert len(output.err.strip().splitlines()) <= 2
    assert "Traceback" not in output.err
    return output.err


class _Call:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/never",)


@pytest.mark.thorough(first=8)
@pytest.mark.parametrize(
    ("data", "why"),
    [
        (pickle.dumps({"entries": [_Call()]}, protocol=2), "GLOBAL"),
        (pickle.dumps({"entries": [_Call()]}, protocol=4), "STACK_GLOBAL"),
        (pickle.dumps({"entries": {1, 2}}, protocol=4), "EMPTY_SET"),
        (b"\x80\x02cos\nsystem\n.", "GLOBAL"),
        (b"\x80\x02}q\x00(X\x07\x00\x00\x00entriesP1\nu.", "PERSID"),
        (b"\x80\x02\x82\x01.", "EXT1"),
        (b"\x80\x02\x8b\xff\xff\xff\x7f" + b"\0" * 64 + b".", "a number of"),
        (b"\x80\x02X\xff\xff\xff\x7fabc.", "it ends at byte"),
        (b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f.", "it ends at byte"),
        (b"\x80\x02j\xff\xff\xff\xff.", "a reference to nothing"),
        (b"\x80\x02" + b"]" * 3_100_000 + b".", "containers"),
        (b"\x80\x02" + b"(" * 100_000 + b".", "a value is missing"),
        (b"\x80\x02}]}s.", "a key that is a list"),
        (b"\x80\x02" + b"a" * 10, "a value is missing"),
        (b"\x80\x09.", "protocol 9"),
        (b"\x80\x02K\x01.", "neither entries nor pg_config"),
        (pickle.dumps({"version": "3.0", "entries": []}), "format"),
        (pickle.dumps({"version": "2.4", "entries": [1]}), "an entry is not a dictionary"),
        (pickle.dumps({"version": "2.4", "entries": 5}), "entries are not a list"),
        (b'{"entries": ' + b"[" * 200_000, "nested too deeply"),
        (b'{"entries": [' + b"[]," * 3_100_000, "containers"),
        (b'{"entries": [{"record_id": ', "not a flight-recorder dump"),
    ],
)  # fmt: skip
def test_hostile_files_are_refused_with_a_line(
    data: bytes, why: str, tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(data)
    assert why in refused(path, url, capsys)
    assert stored(url, "SELECT count() FROM jobs WHERE job = 'refused'") == [(0,)]


def test_what_is_no_file_is_refused(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe would be waited for."""
    os.mkfifo(tmp_path / "rank_0")
    assert "is not a file" in refused(tmp_path / "rank_0", url, capsys)
    assert "has no flight-recorder dump" in refused(tmp_path, url, capsys)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=8) | st.integers(0, 9), inner, max_size=5)
    ),
    max_leaves=30,
)


@given(PLAIN, st.integers(0, 5))
@settings(max_examples=CASES)
@pytest.mark.thorough
def test_plain_data_comes_back_as_it_was(value: Any, protocol: int) -> None:
    assert plain_pickle.loads(pickle.dumps(value, protocol=protocol)) == value


@given(st.binary(max_size=200))
@settings(max_examples=CASES)
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(plain_pickle.NotPlain):
        plain_pickle.loads(b"\x80\x02" + data)


FIELDS = ("entries", "pg_config", "pg_status", "version", "nccl_version")
ENTRY = st.dictionaries(
    st.sampled_from([
        "record_id", "pg_id", "process_group", "collective_seq_id", "p2p_seq_id", "profiling_name", "time_created_ns",
        "input_sizes", "input_dtypes", "output_sizes", "output_dtypes", "state", "time_discovered_completed_ns",
        "retired", "timeout_ms", "is_p2p", "frames",
    ]), PLAIN | st.sampled_from(["nccl:send 0->1", "nccl:all_reduce", "completed", 2**70, -(2**70), "9" * 30]),
)  # fmt: skip


@pytest.mark.thorough
@given(
    st.dictionaries(st.sampled_from(FIELDS), PLAIN | st.lists(ENTRY, max_size=4) | st.dictionaries(st.text(), ENTRY))
)
@settings(max_examples=CASES)
def test_values_of_any_kind_are_read_or_refused(found: dict[str, Any]) -> None:
    """What is read fits into the tables."""
    with contextlib.suppress(ValueError):
        check_rows(flight_recorder._dump(found, Path("rank_1"), 0))


def check_rows(dump: flight_recorder.Dump) -> None:
    """Raises ValueError or worse where rows do not fit into their tables."""
    for table, columns in dumps._tables([dump], ImportReport()):
        shared: dict[str, Any] = {"job": "j", "run": 1}
        if table not in rows._WITHOUT_HOST:
            shared["host"] = "h"
        try:
            to_arrow(table, {**shared, **columns})
        except ValueError as error:
            raise AssertionError(f"{table}: {error}") from error


@pytest.mark.thorough
def test_nesting_and_references_cost_no_more_than_the_file(tmp_path: Path) -> None:
    """A hundred thousand levels, lists in themselves, and a list that a million entries refer to."""
    path = tmp_path / "rank_0"
    deep = b"\x80\x02}(X\x07\x00\x00\x00entries]X\x04\x00\x00\x00deep" + b"]" * 100_000 + b"a" * 99_999 + b"u."
    path.write_bytes(deep)
    assert flight_recorder.read(path).calls == {}
    entry = b"}q\x01(X\x06\x00\x00\x00framesq\x02]q\x03" + b"(" + b"h\x03" * 1000 + b"eu"
    path.write_bytes(b"\x80\x02}(X\x07\x00\x00\x00entries](" + entry + b"h\x01" * 240_000 + b"eu.")
    with pytest.raises(Exception, match=r"sizes and frames"):
        flight_recorder.read(path)


def test_ranks_come_from_names_and_groups(tmp_path: Path) -> None:
    hang = run(flight_dumps.job(1, 1, 4), [])
    for name, rank in (
        ("_dump_3", 3),
        ("nccl_trace_rank_2.pkl", 2),
        ("rank1-2025-06-01.json", 1),
        ("job7_rank_0_x9", 0),
    ):
        path = tmp_path / name
        path.write_bytes(pickle.dumps(flight_dumps.dump(hang, rank, "2.0"), protocol=2))
        assert flight_recorder.read(path).rank == rank
    path = tmp_path / "odd"
    path.write_bytes(pickle.dumps(flight_dumps.dump(hang, 0), protocol=2))
    with pytest.raises(Exception, match="give its rank"):
        flight_recorder.read(path)
    path = path.rename(tmp_path / "rank_9")
    with pytest.raises(Exception, match="which is not in its process groups"):
        flight_recorder.read(path)


def test_two_dumps_of_a_rank_and_folders_without_any(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hang = run(flight_dumps.job(1, 1, 2), [])
    folder = flight_dumps.write(tmp_path / "d", hang)
    (folder / "again_rank_1").write_bytes((folder / "nccl_trace_rank_1").read_bytes())
    assert "are both of rank 1" in refused(folder, url, capsys)
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "log.txt").write_text("nothing")
    assert "has no flight-recorder dump" in refused(tmp_path / "none", url, capsys)
    assert "does not exist" in refused(tmp_path / "nowhere", url, capsys)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("optimized", [False, True])
def test_dumps_of_every_protocol_are_found_in_a_folder(tmp_path: Path, protocol: int, optimized: bool) -> None:
    """Before protocol 2 no byte says that a file is a pickle. Text that begins alike is none."""
    for rank, content in enumerate([flight_dumps.dump(run(flight_dumps.job(1, 1, 2), []), 0), {}]):
        data = pickle.dumps(content, protocol=protocol)
        (tmp_path / f"rank_{rank}").write_bytes(pickletools.optimize(data) if optimized else data)
    for name, text in (("notes_1.txt", "(default) nothing"), ("log_2", "} else {"), ("log_3", "(dp0) of rank 3\n")):
        (tmp_path / name).write_text(text)
    counters: Tally[str] = Tally()
    found = flight_recorder.find_dumps([tmp_path], counters)
    assert [path.name for path in found] == ["rank_0", "rank_1"]
    assert counters["files_of_other_kinds"] == 3


# ---- fuzz


def broken(data: bytes, rng: random.Random) -> bytes:
    """A dump that was cut off, whose bits were flipped, or into which parts of it were put again."""
    kind = rng.randrange(4)
    if kind == 0:
        return data[: rng.randrange(len(data))]
    changed = bytearray(data)
    if kind == 1:
        for _ in range(rng.randrange(1, 12)):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    elif kind == 2:
        low, high = sorted(rng.randrange(len(data)) for _ in range(2))
        place = rng.randrange(len(data))
        changed[place:place] = data[low:high]
    else:
        for _ in range(rng.randrange(1, 5)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


@pytest.mark.parametrize("as_json", [False, True])
def test_broken_dumps_are_read_or_refused(as_json: bool, tmp_path: Path) -> None:
    """Each is read, or refused in one line; what is read can be stored. ``ARGUS_FUZZ_CASES=10000`` tries more."""
    hang = run(flight_dumps.job(2, 2, 1, steps=2), [Fault("cpu", 1, 20)])
    whole = []
    for name, batched in (("d", False), ("batches", True)):
        folder = flight_dumps.write(tmp_path / name, hang, as_json=as_json, ring=12, batched=batched, active=batched)
        whole.append((folder / "nccl_trace_rank_1").read_bytes())
    if not as_json and DATA.is_dir():
        whole += [path.read_bytes() for path in sorted(DATA.glob("*/_dump_1*"))]
    rng, path, read, lines = random.Random(7), tmp_path / "rank_1", 0, set[int]()
    for case in range(CASES):
        path.write_bytes(broken(whole[case % len(whole)], rng))
        try:
            dump = flight_recorder.read(path)
        except ArgusError as error:
            lines.add(error.message.count("\n"))
            continue
        read += 1
        if case % 10 == 0:
            check_rows(dump)
    assert read > CASES / 50
    assert lines == {0}
