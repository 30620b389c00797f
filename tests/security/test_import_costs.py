"""Files whose few bytes refer to the same thing again and again, or have numbers far beyond what they list: what
importing them may cost."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from argus.importers import nsys
from argus.model.errors import ArgusError
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
