"""Ranges of NVTX mark the steps of programs that Argus knows nothing else of, attached while they run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from argus.live.cost import governor
from argus.live.options import Options
from argus.live.tracer import Tracer
from argus.store.open import open_store
from argus.store.reader import query
from tests.kernel.conftest import wait_until

pytestmark = pytest.mark.kernel

HERE = Path(__file__).parent
STYLES = ("chars", "wide", "attributes", "domain", "started", "points")

Call = tuple[int, int]
"""Just before and just after a call of NVTX's."""


@contextmanager
def running(folder: Path, styles: tuple[str, ...], *more: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A job with a rank for each way to name ranges, which has had some steps."""
    library = folder / "libnvToolsExt.so.1"
    flags = ["gcc", "-O2", "-Wall", "-Werror"]
    shared = ["-shared", "-fPIC", f"-Wl,-soname,{library.name}"]
    subprocess.run([*flags, *shared, "-o", library, HERE / "nvtx_library.c"], check=True)
    subprocess.run([*flags, "-o", folder / "steps", HERE / "nvtx_steps.c", library], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), "WORLD_SIZE": str(len(styles))}
    ranks = []
    try:
        for rank, style in enumerate(styles):
            command = [folder / "steps", folder / f"log-{rank}", style, *more]
            ranks.append(subprocess.Popen(command, env={**environment, "RANK": str(rank)}))
        wait_until(lambda: all(len(calls(folder, rank)["step"]) > 3 for rank in range(len(ranks))))
        yield ranks
    finally:
        for each in ranks:
            each.kill()
            each.wait()


def calls(folder: Path, rank: int) -> dict[str, list[Call]]:
    """What a rank logged so far; begins and ends of a part take turns."""
    found: dict[str, list[Call]] = {"step": []}
    log = folder / f"log-{rank}"
    text = log.read_text() if log.exists() else ""
    for line in text[: text.rfind("\n")].splitlines():
        what, before, after = line.rsplit(" ", 2)
        found.setdefault(what, []).append((int(before), int(after)))
    return found


def place(at: int, moments: list[Call]) -> int:
    """Which of these calls was at this time. It was one."""
    found = [i for i, (before, after) in enumerate(moments) if before <= at <= after]
    assert len(found) == 1
    return found[0]


def spent(log: dict[str, list[Call]], part: str, until: str, begin: int, end: int) -> tuple[int, int]:
    """The least and the most time of a part between two times: itself, and up to where the next one begins."""
    parts = [both for both in zip(log[part][::2], log[part][1::2], strict=False) if begin <= both[0][0]]
    parts = [(first, last) for first, last in parts if last[0] <= end]
    gaps = [min(after for before, after in log[until] if before >= last[0]) - last[0] for _, last in parts if until]
    least, most = (sum(last[i] - first[1 - i] for first, last in parts) for i in (0, 1))
    return least, most + sum(gaps)


def traced(folder: Path, store_url: str, ranks: list[subprocess.Popen[bytes]], steps: int) -> int:
    """Traces a job until it has made so many steps more. Returns what to take from stored times to get logged ones."""
    tracer = Tracer(open_store(store_url), Options(pids=tuple(each.pid for each in ranks), max_overhead=1.0))
    tracer.start()
    first = [len(calls(folder, rank)["step"]) for rank in range(len(ranks))]

    def enough() -> bool:
        tracer.poll()
        return all(len(calls(folder, rank)["step"]) > first[rank] + steps for rank in range(len(ranks)))

    wait_until(enough, timeout_s=60, what="steps")
    assert not tracer.stop()
    return tracer.session.mono_offset_ns


def rows(store_url: str, text: str) -> list[tuple[int, ...]]:
    with open_store(store_url) as store:
        return [tuple(row.values()) for row in query(store, text).to_pylist()]


@pytest.mark.parametrize("more", [(), ("whole",)], ids=["without an optimiser", "with one"])
def test_steps_and_phases_are_those_of_the_program(tmp_path: Path, store_url: str, more: tuple[str, ...]) -> None:
    styles = STYLES[:-1] if more else STYLES  # a point has no end
    with running(tmp_path, styles, *more) as ranks:
        offset = traced(tmp_path, store_url, ranks, 40)
    for rank, style in enumerate(styles):
        log = calls(tmp_path, rank)
        edges = log["optimizer.step"][1::2] if more else log["step"]
        found = rows(
            store_url,
            f"SELECT step, toUnixTimestamp64Nano(ts), duration_ns FROM iterations WHERE rank = {rank} ORDER BY step",
        )
        assert len(found) >= 36, style
        assert [step for step, _, _ in found] == list(range(found[0][0], found[0][0] + len(found)))
        begins = [place(ts - offset, edges) for _, ts, _ in found]
        assert begins == list(range(begins[0], begins[0] + len(found))), "each of the program's steps, once"
        assert all(ts + duration == after for (_, ts, duration), (_, after, _) in pairwise(found)), "without gaps"
        if style == "points":
            continue
        begin, end = found[0][1] - offset, found[-1][1] + found[-1][2] - offset
        # A gap between two parts is one's or the other's where a backward pass follows.
        parts = [("load data", "forward" if more else "", "data_loading"), ("forward", "", "forward")]
        if more:
            parts[1] = ("forward", "backward", "forward")
            parts += [("backward", "optimizer.step", "backward"), ("optimizer.step", "end", "optimizer")]
        for part, until, phase in parts:
            reported = f"SELECT sum(duration_ns) FROM phases WHERE rank = {rank} AND phase = '{phase}'"
            least, most = spent(log, part, until, begin, end)
            ((duration,),) = rows(store_url, reported)
            assert least <= duration <= most, (style, phase)


def test_ranges_that_cost_too_much_are_seen_in_windows_where_nothing_else_marks_steps(
    tmp_path: Path, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(governor, "LADDERS", {})
    with running(tmp_path, ("chars",)) as (rank,):
        tracer = Tracer(open_store(store_url), Options(pids=(rank.pid,), max_overhead=1.0))
        tracer.start()

        def polled(condition: Callable[[], bool]) -> None:
            wait_until(lambda: (tracer.poll(), condition())[1], timeout_s=60)

        def marks() -> int:
            return tracer.counters()["marks"][0]

        try:
            polled(lambda: tracer.jobs[0].by_marks is True)
            assert tracer.counters()["nvtx_probes_detached"] == (0, True)
            tracer._budget.overhead.governor.budget = 1e-9
            polled(lambda: tracer.counters()["nvtx_probes_detached"] == (1, True))
            assert "NVTX's ranges are seen in windows, since nothing else marks steps" in tracer.notes()[-1]
            assert tracer.jobs[0].by_marks is True
            polled(lambda: tracer.jobs[0].thinned is not None)
            before, steps = marks(), len(calls(tmp_path, 0)["step"])
            polled(lambda: len(calls(tmp_path, 0)["step"]) > steps + 20)
            assert marks() == before
        finally:
            lost = tracer.stop()
    assert lost == {"nvtx_probes_detached": 1}
