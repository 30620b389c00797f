"""Memory and delays of a process tree, from a made-up /proc. Real commands are in tests/e2e/test_observe.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from argus.compare.observe.execute import Usage

PAGE = 4096


class Proc:
    """A /proc whose processes are written and taken away."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def thread(
        self, pid: int, tid: int, *, pages: int = 0, queue_ns: int = 0, ticks: int = 0, children: str = ""
    ) -> None:
        place = self.root / "proc" / str(pid) / "task" / str(tid)
        place.mkdir(parents=True, exist_ok=True)
        (self.root / "proc" / str(pid) / "statm").write_text(f"900 {pages} 3 1 0 2 0\n")
        fields = ["0"] * 50
        fields[11:15] = ["10", "20", "30", "40"]
        fields[39] = str(ticks)
        for where in (place, place.parent.parent):
            (where / "stat").write_text(f"{pid} (a) b) " + " ".join(fields))
        (place / "schedstat").write_text(f"1 {queue_ns} 7\n")
        (place / "children").write_text(children)

    def gone(self, pid: int, tid: int) -> None:
        for name in ("stat", "schedstat", "children"):
            (self.root / "proc" / str(pid) / "task" / str(tid) / name).unlink()


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Proc:
    monkeypatch.setattr("argus.compare.observe.execute._PAGE", PAGE)
    monkeypatch.setattr("argus.compare.observe.execute._TICK_NS", 10**7)
    return Proc(tmp_path)


def clock(*times: float) -> Iterator[float]:
    yield from times


def test_a_tree_is_summed_up_and_threads_that_ended_count_as_of_their_last_sample(proc: Proc) -> None:
    times = clock(0.0, 1.0, 4.0)
    usage = Usage(10, proc.root, lambda: next(times))
    proc.thread(10, 10, pages=100, queue_ns=5, children="20 ")
    proc.thread(10, 11, queue_ns=7, pages=100)
    proc.thread(20, 20, pages=50, queue_ns=1)
    usage.sample()
    proc.gone(10, 11)
    proc.thread(10, 10, pages=300, queue_ns=9, children="")
    usage.sample()
    figures = usage.figures()
    assert figures["peak_memory_bytes"] == 300 * PAGE
    assert figures["mean_memory_bytes"] == (150 * 1 + 300 * 3) / 4 * PAGE, "weighted by the time between samples"
    assert figures["run_queue_ns"] == 9 + 7 + 1
    assert figures["block_io_ns"] is None, "the kernel does not account it, so 0 would be a guess"


def test_waiting_for_disks_where_the_kernel_accounts_it(proc: Proc) -> None:
    (proc.root / "proc/sys/kernel").mkdir(parents=True)
    (proc.root / "proc/sys/kernel/task_delayacct").write_text("1\n")
    proc.thread(10, 10, pages=1, ticks=3)
    usage = Usage(10, proc.root, lambda: 0.0)
    usage.sample()
    assert usage.figures()["block_io_ns"] == 3e7


def test_a_process_that_was_never_seen_has_no_figures(tmp_path: Path) -> None:
    usage = Usage(10, tmp_path, lambda: 0.0)
    usage.sample()
    assert set(usage.figures().values()) == {None}


def test_cpu_time_of_a_tree(proc: Proc) -> None:
    proc.thread(10, 10, children="20")
    proc.thread(20, 20)
    assert Usage(10, proc.root, lambda: 0.0).cpu_s() == 2 * 100 * 0.01
