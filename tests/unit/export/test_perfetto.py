"""``argus export perfetto`` of a job without GPUs: steps, phases and stacks on a timeline."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from argus.export.perfetto import OFF_CPU, ON_CPU, PHASES, STEPS, Moment, moment_of, write_perfetto
from argus.store.open import Store, open_store
from argus.store.read.stacks import Selection
from argus.store.writer import Writer
from tests.builders.stack_data import MS, T0, Row, native, py, stack, store_run, store_stacks
from tests.stores import new_store

STEP = 100
"""ms, as ``store_run`` has it."""
SPENT = {"backward": 50 * MS, "data_loading": 10 * MS, "forward": 30 * MS, "optimizer": 0, "other": 10 * MS}
COMPUTE = stack(py("main", 12), py("step", 40), native("gemm"))
LOAD = stack(py("main", 12), py("load", 7, "/app/data.py"), native("read"))
HELPER = stack(native("argus_helper"), python="none")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Two ranks with ten steps; each computes, loads in between, and waits for 40 ms across the end of step 8."""
    with open_store(new_store(tmp_path)) as opened:
        with Writer(opened, source="test") as writer:
            store_run(writer, [0, 1], steps=10)
            every = [(rank, step, name) for rank in (0, 1) for step in range(10) for name in SPENT]
            writer.append("phases", {
                "job": "llama", "run": 1, "rank": [rank for rank, *_ in every], "step": [step for _, step, _ in every],
                "host": "node-0", "ts": [T0 + step * STEP * MS for _, step, _ in every],
                "phase": [name for *_, name in every], "duration_ns": [SPENT[name] for *_, name in every],
                "overlapped_ns": 0, "spans": 1, "method": "marks", "confidence": 1.0,
            })  # fmt: skip
            rows = []
            for rank in (0, 1):
                for step in range(10):
                    # Rows of one window overlap: a thread went back and forth between two places.
                    rows.append(Row(rank, COMPUTE, step * STEP + 1, count=6, last_ms=step * STEP + 90))
                    rows.append(Row(rank, LOAD, step * STEP + 20, count=2, last_ms=step * STEP + 95))
                rows.append(Row(
                    rank, LOAD, 880, kind="off", ns=40 * MS, last_ms=920, reason="read",
                ))  # fmt: skip
                rows.append(Row(rank, HELPER, 300, count=1, tid=77, thread="argus-cupti"))
            store_stacks(writer, rows)
            assert writer.flush(), writer.last_error
        yield opened


def events_of(store: Store, moment: Moment, file: Path) -> list[dict[str, Any]]:
    write_perfetto(store, moment, file)
    found: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return found


def test_the_last_seconds_of_a_job_without_gpus(store: Store, tmp_path: Path) -> None:
    moment = moment_of(store, Selection("llama", 1, last_ns=250 * MS))
    assert moment.end_ns == T0 + 10 * STEP * MS + 1, "the end of the newest step"
    events = events_of(store, moment, tmp_path / "t.json")
    assert {e["name"] for e in events if e.get("cat") == "step"} == {"step 7", "step 8", "step 9"}


def test_no_event_has_a_negative_time(store: Store, tmp_path: Path) -> None:
    """Perfetto drops those: the step that the window begins in would be missing on every rank."""
    begin = T0 + 7 * STEP * MS + 50 * MS
    moment = Moment("llama", 1, begin, begin + 2 * STEP * MS)
    file = tmp_path / "t.json"
    events = events_of(store, moment, file)
    assert min(event["ts"] for event in events if "ts" in event) == 0
    first = next(event for event in events if event.get("name") == "step 7")
    assert first["ts"] == 0, "it began before the window"
    assert json.loads(file.read_text())["otherData"]["begin_ns"] == str(T0 + 7 * STEP * MS)


def test_phases_fill_their_step_in_order(store: Store, tmp_path: Path) -> None:
    events = events_of(store, moment_of(store, Selection("llama", 1, ranks=(1,), steps=(3, 3))), tmp_path / "t.json")
    (step,) = [event for event in events if event.get("cat") == "step"]
    phases = [event for event in events if event.get("cat") == "phase"]
    assert [event["name"] for event in phases] == ["data loading", "forward", "backward", "other"], (
        "none of zero length"
    )
    assert {event["pid"] for event in phases} == {1}
    assert phases[0]["ts"] == step["ts"]
    for one, following in itertools.pairwise(phases):
        assert one["ts"] + one["dur"] == pytest.approx(following["ts"])
    assert sum(event["dur"] for event in phases) == pytest.approx(step["dur"])
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert "drawn end to end" in names[PHASES], "sums of a step are not taken for places in it"
    assert names[STEPS] == "steps"


def test_stacks_and_waits_have_tracks_without_overlap(store: Store, tmp_path: Path) -> None:
    moment = moment_of(store, Selection("llama", 1, ranks=(0,), last_ns=10 * STEP * MS))
    events = events_of(store, moment, tmp_path / "t.json")
    stacks = [event for event in events if event.get("cat") == "stack"]
    assert len(stacks) == 10, "rows that overlap are one slice"
    assert {event["tid"] for event in stacks} == {1000 + ON_CPU}
    for one, following in itertools.pairwise(sorted(stacks, key=lambda event: event["ts"])):
        assert one["ts"] + one["dur"] <= following["ts"]
    assert stacks[0]["name"] == "step (app/train.py:40)", "the deepest Python line of the stack with the most time"
    assert stacks[0]["args"]["samples"] == 8
    assert stacks[0]["args"]["1: 60.0 ms"].startswith("gemm (libc.so.6) < step (app/train.py:40) < main")
    (wait,) = [event for event in events if event.get("cat") == "wait"]
    assert (wait["name"], wait["tid"]) == ("read: load (app/data.py:7)", 1000 + OFF_CPU)
    assert wait["dur"] == 40_000
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"stacks of python (1000)", "waits of python (1000)"} <= names
    assert not any("argus" in name for name in names), "Argus's own thread in the process is not the job's"
