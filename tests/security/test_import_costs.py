"""Files whose few bytes refer to the same thing again and again, or have numbers far beyond what they list: what
importing them may cost."""

from __future__ import annotations

import json
import os
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from argus.diagnose.ranks import phase_times
from argus.diagnose.read import queries
from argus.diagnose.whatif import dependencies
from argus.importers import iterations_csv, kineto, nsys, tables, whatif_parquet
from argus.importers.dumps import flight_recorder
from argus.importers.iterations_csv import Columns
from argus.importers.recordings import collectives
from argus.importers.recordings.clocks import hosts_given
from argus.model.errors import ArgusError
from argus.model.ranks import HIGHEST_RANK
from argus.model.records import COLLECTIVE
from argus.report.look import Look
from argus.report.panels import heatmap, mesh
from tests.builders import training_job
from tests.unit.importers.test_kineto import trace
from tests.unit.importers.test_nsys import Table, export


def peak_mib(work: Callable[[], object]) -> float:
    """The most memory that Python and numpy had allocated at once."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1] / (1 << 20)
    finally:
        tracemalloc.stop()


# ---- recordings of Nsight Systems


def test_ranges_that_share_a_name_share_its_memory(tmp_path: Path) -> None:
    """20,000 ranges of one name of 1 MiB took 20 GB."""
    ranges = 1_000

    def shared(tables: Table) -> None:
        tables["StringIds"].append((1, "step" + "x" * (1 << 20)))
        begin, end, kind, _, tid, _ = tables["NVTX_EVENTS"][0]
        tables["NVTX_EVENTS"] = [(begin + n, end + n, kind, None, tid, 1) for n in range(ranges)]

    path = export(tmp_path / "report.sqlite", change=shared)
    assert peak_mib(lambda: nsys.read(path, 0)) < 16
    (first, *_) = nsys.read(path, 0)
    assert len(first.ranges) == ranges
    assert len({id(name) for name, *_ in first.ranges}) == 1


def test_a_name_is_read_to_a_bound(tmp_path: Path) -> None:
    def long(tables: Table) -> None:
        tables["StringIds"] = [(number, text + "x" * (1 << 20)) for number, text in tables["StringIds"]]
        tables["NVTX_EVENTS"] = [
            (*row[:3], row[3] and f"step{row[3]}" * 1_000, *row[4:]) for row in tables["NVTX_EVENTS"]
        ]

    for each in nsys.read(export(tmp_path / "report.sqlite", change=long), 0):
        assert max(map(len, (*each.symbols, *each.functions))) == nsys.MAX_NAME
        assert max(len(name) for name, *_ in each.ranges) == nsys.MAX_RANGE


def test_a_process_of_a_recording_has_its_own_names_only(tmp_path: Path) -> None:
    """Or each had those of all."""

    def other(tables: Table) -> None:
        tables["StringIds"].append((1, "another kernel"))
        place = next(at for at, row in enumerate(tables["CUPTI_ACTIVITY_KIND_KERNEL"]) if row[6] >> 24 & 0xFFF == 112)
        row = tables["CUPTI_ACTIVITY_KIND_KERNEL"][place]
        tables["CUPTI_ACTIVITY_KIND_KERNEL"][place] = (*row[:7], 1, *row[8:])

    first, second = nsys.read(export(tmp_path / "report.sqlite", change=other), 0)
    assert "another kernel" not in first.symbols
    assert second.symbols.count("another kernel") == 1
    assert names_of(second).count("another kernel") == 1


def names_of(recording: nsys.Recording) -> list[str]:
    """The name of each operation."""
    return [recording.symbols[place] for place in recording.ops["name"].tolist()]


def test_a_recording_has_a_bounded_number_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsys, "MAX_PROCESSES", 2)
    assert len(nsys.read(export(tmp_path / "two.sqlite"), 0)) == 2
    with pytest.raises(ArgusError, match="3 processes that used a GPU, more than 2"):
        nsys.read(export(tmp_path / "three.sqlite", pids=(111, 112, 113)), 0)


def test_a_recording_that_memory_does_not_suffice_for_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    path = export(tmp_path / "report.sqlite")
    monkeypatch.setattr(nsys, "_ranges", full)
    with pytest.raises(ArgusError, match="needs more memory than there is"):
        nsys.read(path, 0)


# ---- numbers far beyond what is listed


def test_ranks_beyond_all_jobs_are_refused(tmp_path: Path) -> None:
    log, recording = tmp_path / "log.csv", tmp_path / "rank0.json"
    log.write_text(f"rank,step,took\n0,1,5\n{HIGHEST_RANK},1,5\n{HIGHEST_RANK + 1},1,5\n")
    columns = Columns("rank", "step", "took")
    with pytest.raises(ArgusError, match=r"log\.csv, row 3: rank 10000001 is above 10,000,000"):
        iterations_csv.write(cast("Any", None), "job", log, columns)
    named = tmp_path / "rank10000001.csv"
    named.write_text("step,took\n1,5\n")
    with pytest.raises(ArgusError, match=r"rank10000001\.csv: rank 10000001 is above 10,000,000"):
        iterations_csv.write(cast("Any", None), "job", named, Columns(None, "step", "took"))
    for rank in (HIGHEST_RANK, HIGHEST_RANK + 1, 2**31 - 1):
        recording.write_text(json.dumps(trace(0) | {"distributedInfo": {"rank": rank, "world_size": rank}}))
        found = kineto.read(recording, 0)
        believed = (rank, "trace") if rank == HIGHEST_RANK else (0, "file name")
        assert (found.rank, found.rank_source) == believed


@pytest.mark.parametrize("what", ["stage", "dp_rank", "rank"])
def test_workers_beyond_all_jobs_are_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "trace.parquet"
    rows = training_job.rows(dp=1, pp=1, microbatches=1, steps=2)
    rows = {name: list(values) for name, values in rows.items()}
    rows.setdefault(what, [0] * len(rows["step"]))
    rows[what][1] = HIGHEST_RANK + 1
    pq.write_table(pa.table(rows), path)
    with pytest.raises(ArgusError, match=f"row 1{', ' + what if what != 'rank' else ''}: rank 10000001 is above"):
        whatif_parquet.read(path, None)


def test_lacking_ranks_take_no_memory_each() -> None:
    reading = iterations_csv._Reading(last={0: (19, 0), HIGHEST_RANK: (19, 0)}, steps=(0, 19))
    notes: list[str] = []
    assert peak_mib(lambda: notes.extend(iterations_csv._lacking(reading))) < 1
    assert notes == ["ranks 1, 2, 3, 4, 5, 6, 7, 8 and 9999991 more of 0 to 10000000 have no rows"]


def test_ranks_that_a_log_does_not_show_take_no_memory_each() -> None:
    rank, step = (each.ravel() for each in np.meshgrid([0, 1], np.arange(40), indexing="ij"))
    rows = {"rank": rank, "step": step, "duration_ns": 1e9 + rank + step % 3}
    answers = {
        queries.LOGGED_PHASES: {"n": np.array([len(rank)])}, queries.STEP_TIMES: rows,
        queries.ALL_PHASES: {**rows, "phase": np.full(len(rank), "compute")},
    }  # fmt: skip
    params, hosts = {"job": "j", "run": 1, "first": 0, "last": 39}, {0: "a", 1: "b", HIGHEST_RANK: "c"}
    found: list[Any] = []

    def slow() -> None:
        found.append(phase_times.slow_ranks(lambda text, params: answers[text], params, hosts, 0.05, 1e9))

    assert peak_mib(slow) < 8
    _, logged = found[0]
    assert len(logged.unseen) == HIGHEST_RANK - 2
    assert logged.unseen[:2] == [2, 3]


def test_lacking_stages_take_no_memory_each(tmp_path: Path) -> None:
    path, meta = training_job.write(
        tmp_path, training_job.rows(dp=1, pp=2, microbatches=1, steps=2), dp_size=1, pp_size=2
    )
    built = whatif_parquet.read(path, meta)
    built.operations.stage[built.operations.stage == 1] = HIGHEST_RANK

    def build() -> None:
        with pytest.raises(ArgusError, match="pipeline stage 1 has no operations"):
            dependencies.build(built.operations, built.layout)

    assert peak_mib(build) < 8


def test_hosts_of_ranks_that_there_are_not_take_no_memory() -> None:
    recordings: Any = [SimpleNamespace(rank=rank, path=f"rank{rank}.json") for rank in (0, HIGHEST_RANK)]
    given: list[Any] = []
    assert peak_mib(lambda: given.append(hosts_given([f"0-{HIGHEST_RANK}=node"], recordings))) < 1
    assert given == [{0: "node", HIGHEST_RANK: "node"}]


def test_a_heat_map_has_rows_for_the_ranks_alone() -> None:
    order = np.array([7, 2**32 - 1, 0], np.int64)
    rows = {
        "rank": np.array([0, 7, 3, 2**32 - 1, 8], np.uint32), "place": np.array([0, 1, 0, 1, 1]),
        "step_ns": np.array([1.0, 2.0, 9.0, 3.0, 9.0]),
    }  # fmt: skip
    look = cast("Look", SimpleNamespace(steps=(0, 1), read_large=lambda text, **asked: rows))
    found: list[Any] = []
    assert peak_mib(lambda: found.append(heatmap._filled(look, "", ["step_ns"], order, 1)["step_ns"])) < 1
    np.testing.assert_array_equal(found[0], [[np.nan, 2], [np.nan, 3], [1, np.nan]])


def test_a_mesh_has_columns_for_the_workers_alone() -> None:
    look = cast("Look", SimpleNamespace(stages={0: 0, 1: 0}))
    found: list[Any] = []
    ranks, stage, lane = np.array([0, 1]), np.array([0, 0]), np.array([1, 1 << 21])
    assert peak_mib(lambda: found.append(mesh._grid(look, ranks, stage, lane))) < 1
    row, column, row_names, column_names, _ = found[0]
    assert (row.tolist(), column.tolist()) == ([0, 0], [0, 1])
    assert (row_names, column_names) == (["stage 0"], ["1", "2097152"])


# ---- recordings of PyTorch's profiler


def test_what_lies_in_an_event_that_cannot_be_read_is_not_read_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each `[{},{` looked like the begin of another event, which was read up to the same wrong character: 4 KB of gzip
    took 23 s."""
    monkeypatch.setattr(kineto, "SEEN_AGAIN", 10_000, raising=False)
    path = tmp_path / "rank0.json"
    text = '{"traceEvents": [' + '{"a": [{}, ' * 100 + "[], " * 10_000 + "X}, {}]}"
    path.write_text(text)
    tried: list[int] = []
    event = kineto._Text.event

    def counted(self: kineto._Text) -> Any:
        tried.append(self.place)
        return event(self)

    monkeypatch.setattr(kineto._Text, "event", counted)
    with pytest.raises(ArgusError, match="events that cannot be read, up to the one at character 17, hold others"):
        kineto.read(path, 0)
    assert len(tried) == 1


def test_a_few_events_that_cannot_be_read_are_no_reason_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names that are not JSON are looked at once."""
    monkeypatch.setattr(kineto, "SEEN_AGAIN", 0)
    path, content = tmp_path / "rank0.json", json.dumps(trace(1, steps=100))
    wrong = '{"ph": "X", "args": {"a": {"b": [1, 2]}}, "name": "a" b"}, '
    at = content.index('{"ph": "X"')
    path.write_text(content[:at] + wrong * 10 + content[at:])
    assert kineto.read(path, 0).losses["events_unreadable"] == 10


def test_nobody_counts_the_lines_before_a_wrong_event(tmp_path: Path) -> None:
    """JSONDecodeError does, whoever asks: 8,000 bytes of gzip, of 2 million wrong events, would have taken an hour."""
    path = tmp_path / "rank0.json"
    path.write_text("\n" * 10 + "[{X}, {}]")
    with kineto._Text(path) as text, pytest.raises(json.JSONDecodeError) as failure:
        text._scan(text.window, 11)
    assert (failure.value.pos, failure.value.lineno) == (12, 1)


# ---- dumps of flight recorders


def test_process_groups_that_share_a_list_of_ranks_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some bytes each, and each made the ranks anew."""
    monkeypatch.setattr(flight_recorder, "MAX_NUMBERS", 1_000)
    path, read = tmp_path / "rank_0", flight_recorder._ranks
    made: list[int] = []
    monkeypatch.setattr(flight_recorder, "_ranks", lambda value: made.append(len(value)) or read(value))

    def dump(groups: int) -> None:
        ranks = list(range(100))
        shared = {str(number): {"name": str(number), "desc": "", "ranks": ranks} for number in range(groups)}
        path.write_bytes(pickle.dumps({"version": "2.5", "pg_config": shared, "entries": []}, protocol=2))

    dump(10)
    found = flight_recorder.read(path)
    assert [len(group.ranks) for group in found.groups.values()] == [100] * 10
    assert len({id(group.ranks) for group in found.groups.values()}) == 1
    assert made == [100]
    dump(11)
    with pytest.raises(ArgusError, match="refer to more than 1,000 sizes and frames, or ranks"):
        flight_recorder.read(path)


# ---- communicators of recordings


def test_a_recording_has_a_bounded_number_of_process_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a rank's calls are looked at for each."""
    monkeypatch.setattr(collectives, "MOST_GROUPS", 3)
    path = tmp_path / "rank0.json"
    for groups, named in ((3, True), (4, True), (3, False), (4, False)):
        ranges = [
            {
                "ph": "X", "cat": "user_annotation" if named else "kernel", "pid": 1, "tid": number, "dur": 5,
                "name": "nccl:all_reduce" if named else "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "args": {
                    "Collective name": "allreduce", "Process Group Name": str(number) if named else "",
                }, "ts": 1_700_000_000_000_000 + 10 * number,
            }
            for number in range(groups)
        ]  # fmt: skip
        path.write_text(json.dumps({"traceEvents": ranges}))
        if groups == 3:
            assert len(np.unique(kineto.read(path, 0).collectives["comm"])) == groups
            continue
        with pytest.raises(ArgusError, match="calls of more than 3 process groups or streams"):
            kineto.read(path, 0)


def test_calls_of_communicators_are_found_by_sorting_them_once() -> None:
    rows = np.zeros(40, COLLECTIVE)
    rng = np.random.default_rng(1)
    rows["comm"] = rng.choice([7, 2**55, 3], 40)
    rows["call"] = rng.choice([*collectives.POINT_TO_POINT, collectives._CALL_OF["AllReduce"]], 40)
    together = ~np.isin(rows["call"], collectives.POINT_TO_POINT)
    found = collectives.places_by_comm(rows)
    assert set(found) == set(rows["comm"][together].tolist())
    for comm, places in found.items():
        np.testing.assert_array_equal(places, np.flatnonzero(together & (rows["comm"] == comm)))
    assert collectives.places_by_comm(rows[:0]) == {}


# ---- tables


@pytest.mark.parametrize("block", [1, 7, 8 << 20])
@pytest.mark.parametrize(
    ("text", "row", "found"),
    [
        ("a,b\n1,2\n1,2,3\n1,2", "1,2", ", row 1 at byte 4"), ("a,b\n1,2,3\n1,2", "1,2", ", row 2 at byte 10"),
        ("a,b\n1,2,3\r\n", "1,2,3", ", row 1 at byte 4"), ("a,b\n1,23\n", "1,2", ""), ("", "1,2", ""),
    ],
)  # fmt: skip
def test_a_row_is_found_in_a_file_that_is_not_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, row: str, found: str, block: int
) -> None:
    """Its owner may cut a mapped one, which ended the import with SIGBUS."""
    monkeypatch.setattr(tables, "BLOCK_BYTES", block)
    path = tmp_path / "log.csv"
    path.write_bytes(text.encode())
    with path.open("rb") as file:
        assert tables._row_of(file, row, packed=False) == found


def test_a_table_that_is_cut_while_its_row_is_looked_for_is_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.csv"
    path.write_text("a,b\n" + "1,2\n" * 20_000)
    monkeypatch.setattr(tables, "BLOCK_BYTES", 4096)
    read = os.pread

    def cut(fd: int, size: int, at: int) -> bytes:
        data = read(fd, size, at)
        os.truncate(path, 10)
        return data

    monkeypatch.setattr(os, "pread", cut)
    with path.open("rb") as file:
        assert tables._row_of(file, "9,9,9", packed=False) == ""
    assert not any(name == "mmap" for name in vars(tables))
